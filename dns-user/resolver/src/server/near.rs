//! Decides which clients are exempt from `max_reply`: clients that cannot forge their address, or
//! whose network is this machine.

use std::{
    collections::HashMap,
    net::IpAddr,
    time::{Duration, Instant},
};

use dns_attacher::InterfaceKinds;

/// How long the kind of an interface is cached. Limited because its index may be reused.
const BELIEVED: Duration = Duration::from_secs(10);

/// Maximum number of interfaces whose kind is cached.
const MAX_INTERFACES: usize = 4096;

/// Distinguishes near clients from far ones. Each worker has one.
#[derive(Default)]
pub(super) struct NearClients {
    /// Queries the kernel; `None` before first use, or if that is impossible.
    kinds: Option<InterfaceKinds>,
    /// Whether an interface belongs to this machine, with the time of that finding, by interface
    /// index.
    known: HashMap<u32, (bool, Instant)>,
}

impl NearClients {
    /// Returns whether the client is on the loopback, link-local, or on a container's interface.
    /// `ifindex` is the interface on which its query arrived, if reported by the kernel.
    pub(super) fn holds(&mut self, client: IpAddr, ifindex: Option<u32>) -> bool {
        let is_local = match client.to_canonical() {
            // The kernel drops packets from the network with a loopback source (RFC 1122, section
            // 3.2.1.3), and no router forwards a link-local one (RFC 3927, section 2.7; RFC 4291,
            // section 2.5.6). Neither can be forged from another network.
            IpAddr::V4(ip) => ip.is_loopback() || ip.is_link_local(),
            IpAddr::V6(ip) => ip.is_loopback() || ip.is_unicast_link_local(),
        };
        is_local || ifindex.is_some_and(|ifindex| self.is_of_this_machine(ifindex))
    }

    fn is_of_this_machine(&mut self, ifindex: u32) -> bool {
        let Self { kinds, known } = self;
        if let Some((is, _)) = known
            .get(&ifindex)
            .filter(|(_, checked)| checked.elapsed() < BELIEVED)
        {
            return *is;
        }
        if kinds.is_none() {
            // Tried again for the next interface: a lack of file descriptors passes.
            *kinds = InterfaceKinds::new().ok();
        }
        // If the kernel cannot be asked, the client counts as far, and the limit holds.
        let is = kinds
            .as_mut()
            .is_some_and(|kinds| kinds.is_of_this_machine(ifindex));
        if known.len() >= MAX_INTERFACES {
            // Containers' interfaces get ever new numbers. Forgetting all costs one question for
            // each that is left.
            known.clear();
        }
        known.insert(ifindex, (is, Instant::now()));
        is
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_and_link_local_are_near() {
        let mut near = NearClients::default();
        for client in [
            "127.0.0.1",
            "169.254.3.4",
            "::1",
            "fe80::1",
            "::ffff:127.0.0.1",
        ] {
            assert!(near.holds(client.parse().unwrap(), None), "{client}");
        }
        let far = IpAddr::from([10, 0, 0, 7]);
        assert!(!near.holds(far, None) && !near.holds(far, Some(0x7fff_fff0)));
        assert!(near.holds(far, Some(1)), "asked over lo");
    }
}
