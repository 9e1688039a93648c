//! What kind of interface a datagram came in by.

use std::io;

use super::{netlink::Socket, structure::is_near};

/// Tells the loopback and the interfaces of containers from all others.
pub struct InterfaceKinds {
    /// For requests.
    netlink: Socket,
}

impl InterfaceKinds {
    /// Asks the kernel about the network namespace of the calling thread.
    pub fn new() -> io::Result<Self> {
        Ok(Self { netlink: Socket::requests()? })
    }

    /// Whether what comes in by this interface is of this machine: the loopback, a veth, a
    /// bridge of veths alone. An interface that is gone, or of which the kernel tells nothing, is
    /// none of these.
    pub fn is_of_this_machine(&mut self, ifindex: u32) -> bool {
        let Ok(Some(link)) = self.netlink.link(ifindex) else { return false };
        // Of a bridge the ports decide.
        let all = match link.kind.as_deref() {
            Some("bridge") => self.netlink.links().unwrap_or_default(),
            _ => Vec::new(),
        };
        link.kind.as_deref() != Some("bridge") && is_near(&link, &[])
            || all.iter().any(|bridge| bridge.ifindex == ifindex) && is_near(&link, &all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_is_of_this_machine_and_what_is_not_there_is_not() {
        let mut kinds = InterfaceKinds::new().unwrap();
        assert!(kinds.is_of_this_machine(1));
        assert!(!kinds.is_of_this_machine(0x7fff_fff0));
    }
}
