//! Kind of the interface on which a datagram arrived.

use std::io;

use super::{netlink::Socket, topology::is_near};

/// Distinguishes the loopback and container interfaces from all others.
pub struct InterfaceKinds {
    netlink: Socket,
}

impl InterfaceKinds {
    /// Opens a socket to the kernel, for the network namespace of the calling thread.
    pub fn new() -> io::Result<Self> {
        Ok(Self { netlink: Socket::requests()? })
    }

    /// Returns whether senders behind this interface run on this machine: the loopback, a veth, or
    /// a bridge of veths only. Returns false for an interface that is gone or unknown to the
    /// kernel.
    pub fn is_of_this_machine(&mut self, ifindex: u32) -> bool {
        let Ok(Some(link)) = self.netlink.link(ifindex) else { return false };
        // The ports decide about a bridge.
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
    fn loopback_is_near_missing_interface_not() {
        let mut kinds = InterfaceKinds::new().unwrap();
        assert!(kinds.is_of_this_machine(1));
        assert!(!kinds.is_of_this_machine(0x7fff_fff0));
    }
}
