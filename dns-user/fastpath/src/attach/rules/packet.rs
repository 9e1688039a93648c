//! The packets whose path is evaluated: a query, and its reply.

use std::net::{IpAddr, SocketAddr};

use crate::attach::netlink::Link;

/// An interface, as named in rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) ifindex: u32,
    pub(crate) layer: u16,
    /// Whether packets may have passed PREROUTING before they reach this interface: with
    /// br_netfilter, a bridge passes on what its ports received only after that.
    pub(crate) is_bridge: bool,
}

impl Device {
    /// Returns the device for an interface listed by the kernel.
    pub(crate) fn of(link: &Link) -> Self {
        let Link { name, ifindex, layer, kind, .. } = link;
        // A VLAN may belong to a bridge.
        let is_bridge = matches!(kind.as_deref(), Some("bridge" | "vlan"));
        Self { name: name.clone(), ifindex: *ifindex, layer: *layer, is_bridge }
    }
}

/// A UDP datagram on its way through the packet filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packet {
    /// Receiving interface; `None` for a local packet before it re-enters.
    pub(super) input: Option<Device>,
    pub(super) output: Option<Device>,
    pub(super) from: SocketAddr,
    pub(super) to: SocketAddr,
    /// Whether connection tracking has seen both directions of the flow.
    pub(super) established: bool,
    /// Whether the destination is local.
    pub(super) to_us: bool,
    /// Whether the source is local.
    pub(super) from_us: bool,
    /// The mark set by rules; `None`: unknown.
    pub(super) mark: Option<u32>,
    /// Whether a rule has exempted the packet from connection tracking.
    pub(super) untracked: bool,
}

/// Length of a typical query's IP packet in bytes, for rules that match lengths.
pub(super) const LENGTH: u32 = 72;

/// Port of a typical client. Rules rarely distinguish ports above 1023.
const CLIENT_PORT: u16 = 40_000;

impl Packet {
    /// Returns a query from `client` to `endpoint` that arrives on `device`.
    pub(super) fn query(device: &Device, client: IpAddr, endpoint: SocketAddr) -> Self {
        Self { input: Some(device.clone()), ..Self::without_device(client, endpoint) }
    }

    /// Returns a query whose interface is unknown.
    pub(super) fn without_device(client: IpAddr, endpoint: SocketAddr) -> Self {
        Self {
            input: None,
            output: None,
            from: SocketAddr::new(client, CLIENT_PORT),
            to: endpoint,
            established: false,
            to_us: true,
            from_us: false,
            mark: Some(0),
            untracked: false,
        }
    }

    /// Returns the reply to it on its way out.
    pub(super) fn reply(device: &Device, client: IpAddr, endpoint: SocketAddr) -> Self {
        Self {
            input: None,
            output: Some(device.clone()),
            from: endpoint,
            to: SocketAddr::new(client, CLIENT_PORT),
            established: true,
            to_us: false,
            from_us: true,
            ..Self::query(device, client, endpoint)
        }
    }

    /// Returns a local query of `client` on its way out through `lo`.
    pub(super) fn local_query(lo: &Device, client: IpAddr, endpoint: SocketAddr) -> Self {
        let query = Self::query(lo, client, endpoint);
        Self { input: None, output: Some(lo.clone()), from_us: true, ..query }
    }

    /// Returns this local query on its way in from `lo`: mark and exemption from connection tracking
    /// stay.
    pub(super) fn back_from_lo(&self) -> Self {
        Self { input: self.output.clone(), output: None, ..self.clone() }
    }

    /// Returns the program's reply on `lo` to this query, on its way in: it is the same buffer, so connection
    /// tracking considers its flow new, like the query's, or exempts it as well.
    pub(super) fn local_reply_in(&self) -> Self {
        Self { from: self.to, to: self.from, ..self.back_from_lo() }
    }

    pub(super) fn is_v6(&self) -> bool {
        self.to.is_ipv6()
    }
}
