//! Properties of an interface that rule out serving it and that arriving queries do not reveal, and whether its
//! clients run on this machine.

use std::io;

use super::netlink::{LOOPBACK, Link, Socket, link_at};

/// Returns the reason why an interface must not answer because of its type or its master; `all`
/// must include the master, in the order of indexes.
pub(super) fn refusal(link: &Link, all: &[Link]) -> Option<&'static str> {
    let master = link.master.and_then(|master| link_at(all, master));
    if link.collects_metadata {
        return Some("a tunnel with external keys (collect_md): a reply would carry no tunnel key");
    }
    if link.kind.as_deref() == Some("vrf") || link.part_of.as_deref() == Some("vrf") {
        return Some("it belongs to a VRF, which decides which addresses its clients reach");
    }
    if link.part_of.as_deref() == Some("openvswitch") {
        return Some("a port of Open vSwitch, whose flows decide what is delivered");
    }
    // The bridge alone knows whether it filters VLANs; its ports say nothing of it.
    if master.is_some_and(|master| master.filters_vlans) {
        return Some(
            "a port of a VLAN-aware bridge, which decides which addresses its clients reach",
        );
    }
    None
}

/// Returns whether an interface's clients run on this machine, as far as can be determined: `lo`, a
/// veth or netkit device, or a bridge whose ports are all of these and taps. An uplink in a bridge brings in
/// other machines.
pub(crate) fn is_near(link: &Link, all: &[Link]) -> bool {
    // A tap is of kind `tun`: it leads to a virtual machine of this host.
    let is_of_container =
        |link: &Link| matches!(link.kind.as_deref(), Some("veth" | "netkit" | "tun"));
    if link.layer == LOOPBACK || matches!(link.kind.as_deref(), Some("veth" | "netkit")) {
        return true;
    }
    let mut ports = all.iter().filter(|port| port.master == Some(link.ifindex));
    link.kind.as_deref() == Some("bridge") && ports.all(is_of_container)
}

/// Distinguishes the loopback and container interfaces from all others.
pub struct InterfaceKinds {
    netlink: Socket,
}

impl InterfaceKinds {
    /// Opens a socket to the kernel, for the network namespace of the calling thread.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            netlink: Socket::requests()?,
        })
    }

    /// Returns whether senders behind this interface run on this machine: the loopback, a veth, or a bridge
    /// of veths only. Returns false for an interface that is gone or unknown to the kernel.
    pub fn is_of_this_machine(&mut self, ifindex: u32) -> bool {
        let Ok(Some(link)) = self.netlink.link(ifindex) else {
            return false;
        };
        if link.kind.as_deref() != Some("bridge") {
            return is_near(&link, &[]);
        }
        // Its ports decide. A list that failed, or that is younger than the bridge, has none, as if all were near.
        let all = self.netlink.links().unwrap_or_default();
        link_at(&all, ifindex).is_some() && is_near(&link, &all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(ifindex: u32, kind: Option<&str>, master: Option<u32>) -> Link {
        Link {
            kind: kind.map(str::to_owned),
            master,
            ..Link::named(ifindex, "x")
        }
    }

    #[test]
    fn bridge_with_uplink_is_far() {
        let bridge = link(2, Some("bridge"), None);
        let veth = link(3, Some("veth"), Some(2));
        assert!(is_near(&bridge, &[bridge.clone(), veth.clone()]));
        let uplink = link(4, None, Some(2));
        assert!(!is_near(
            &bridge,
            &[bridge.clone(), veth.clone(), uplink.clone()]
        ));
        assert!(is_near(&veth, &[bridge, veth.clone()]) && !is_near(&uplink, &[]));
        assert!(
            is_near(&link(5, Some("netkit"), None), &[]),
            "Cilium's devices"
        );
    }

    #[test]
    fn tunnels_vrfs_and_aware_bridges_are_refused() {
        let plain = link(3, Some("veth"), Some(2));
        assert_eq!(refusal(&plain, &[link(2, Some("bridge"), None)]), None);
        let aware = Link {
            filters_vlans: true,
            ..link(2, Some("bridge"), None)
        };
        assert!(refusal(&plain, &[aware]).is_some());
        let tunnel = Link {
            collects_metadata: true,
            ..link(5, Some("vxlan"), None)
        };
        assert!(refusal(&tunnel, &[]).is_some());
        let slave = Link {
            part_of: Some("vrf".into()),
            ..link(6, Some("veth"), Some(9))
        };
        assert!(refusal(&slave, &[]).is_some());
    }

    #[test]
    fn loopback_is_near_missing_interface_not() {
        let mut kinds = InterfaceKinds::new().unwrap();
        assert!(kinds.is_of_this_machine(1));
        assert!(!kinds.is_of_this_machine(0x7fff_fff0));
    }
}
