//! What kind of interface a datagram came in by.

use std::io;

use super::netlink::{Link, Socket};

/// `ARPHRD_LOOPBACK`.
const LOOPBACK: u16 = 772;

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
    /// bridge. One that is gone, or of which the kernel tells nothing, is none of these.
    pub fn is_of_this_machine(&mut self, ifindex: u32) -> bool {
        let link = self.netlink.link(ifindex).ok().flatten();
        link.is_some_and(|Link { layer, kind, .. }| {
            layer == LOOPBACK || matches!(kind.as_deref(), Some("veth" | "bridge"))
        })
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
