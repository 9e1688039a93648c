//! The packets whose way is looked at: a query, and the reply to it.

use std::net::{IpAddr, SocketAddr};

use crate::attach::netlink::Link;

/// An interface as rules name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    /// Its name.
    pub(crate) name: String,
    /// Its number.
    pub(crate) ifindex: u32,
    /// `ARPHRD_*`.
    pub(crate) layer: u16,
}

impl Device {
    /// As the kernel lists it.
    pub(crate) fn of(link: &Link) -> Self {
        let Link { name, ifindex, layer, .. } = link;
        Self { name: name.clone(), ifindex: *ifindex, layer: *layer }
    }
}

/// A UDP datagram on its way through the packet filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packet {
    /// By which it comes in; `None`: made here, and not on its way back in.
    pub(super) input: Option<Device>,
    /// By which it goes out.
    pub(super) output: Option<Device>,
    /// Sender.
    pub(super) from: SocketAddr,
    /// Receiver.
    pub(super) to: SocketAddr,
    /// Whether connection tracking knows the flow from both sides already.
    pub(super) established: bool,
    /// Whether the receiver is this machine.
    pub(super) to_us: bool,
    /// Whether the sender is this machine.
    pub(super) from_us: bool,
    /// What rules have set; `None`: unknown.
    pub(super) mark: Option<u32>,
    /// Whether a rule has taken it out of connection tracking.
    pub(super) untracked: bool,
}

/// Bytes of IP packet of a usual query, which rules may ask for.
pub(super) const LENGTH: u32 = 72;

/// A client's port: any above 1023 is like another to rules that know no single one.
const CLIENT_PORT: u16 = 40_000;

impl Packet {
    /// A query of `client` to `endpoint` that comes in by `device`.
    pub(super) fn query(device: &Device, client: IpAddr, endpoint: SocketAddr) -> Self {
        Self {
            input: Some(device.clone()),
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

    /// The reply to it on its way out.
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

    /// A local query on its way out by `lo`.
    pub(super) fn local_query(lo: &Device, endpoint: SocketAddr) -> Self {
        let query = Self::query(lo, endpoint.ip(), endpoint);
        Self { input: None, output: Some(lo.clone()), from_us: true, ..query }
    }

    /// The same on its way in.
    pub(super) fn local_query_in(lo: &Device, endpoint: SocketAddr) -> Self {
        Self { from_us: true, ..Self::query(lo, endpoint.ip(), endpoint) }
    }

    /// A reply that the program gave on `lo`, on its way in: to connection tracking the flow is
    /// as new as the query was.
    pub(super) fn local_reply_in(lo: &Device, endpoint: SocketAddr) -> Self {
        let query = Self::query(lo, endpoint.ip(), endpoint);
        Self { from: query.to, to: query.from, from_us: true, ..query }
    }

    /// Whether it is of IPv6.
    pub(super) fn is_v6(&self) -> bool {
        self.to.is_ipv6()
    }
}
