//! The subset of rtnetlink used by the fast path: links and addresses, events about them, and
//! classic tc filters for kernels before tcx.
//!
//! Only known attributes are read, so newer kernels may send more or longer ones. An object that cannot be read is left
//! out of a list, and an event that cannot be read counts as lost. Layouts: `linux/rtnetlink.h`, `linux/if_link.h`, `linux/pkt_sched.h`, `linux/pkt_cls.h`.

use std::{
    io,
    net::IpAddr,
    ops::RangeInclusive,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use dns_fastpath::protocol::Operation;
use nix::sys::socket::{MsgFlags, recv, send, setsockopt, sockopt::RcvBufForce};
use rustix::net::{
    AddressFamily, Protocol, SocketFlags, SocketType, bind,
    netlink::{self, SocketAddrNetlink},
    socket_with,
};

use super::work::count;

/// `NLMSG_ERROR`: an error, or with code 0 an acknowledgement.
const ERROR: u16 = libc::NLMSG_ERROR as u16;
/// End of a dump.
const DONE: u16 = libc::NLMSG_DONE as u16;
/// Flags of requests for a complete list.
const DUMP: u16 = (libc::NLM_F_REQUEST | libc::NLM_F_DUMP) as u16;
/// Flags of requests for one object, and of changes.
pub(crate) const ACK: u16 = (libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16;
/// Sends the object to the requesting socket as well, not only to the multicast group.
const ECHO: u16 = libc::NLM_F_ECHO as u16;
/// Creates the object if it does not exist.
const CREATE: u16 = libc::NLM_F_CREATE as u16;
/// Replaces an existing object.
const REPLACE: u16 = libc::NLM_F_REPLACE as u16;
/// Fails if the object exists.
const EXCLUSIVE: u16 = libc::NLM_F_EXCL as u16;
/// Something changed while the dump was written; it may be incomplete.
const DUMP_INTERRUPTED: u16 = libc::NLM_F_DUMP_INTR as u16;
/// `RTNLGRP_IPV4_RULE` and `RTNLGRP_IPV6_RULE`: changes of routing rules.
const RULES: u32 = 1 << (8 - 1) | 1 << (19 - 1);
/// Multicast groups of the events to receive.
const GROUPS: u32 = RULES
    | (libc::RTMGRP_LINK
        | libc::RTMGRP_IPV4_IFADDR
        | libc::RTMGRP_IPV6_IFADDR
        | libc::RTMGRP_IPV4_ROUTE
        | libc::RTMGRP_IPV6_ROUTE) as u32;
/// Attributes of a classic filter with a program (`linux/pkt_cls.h`): the program's descriptor.
const TCA_BPF_FD: u16 = 6;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_FLAGS: u16 = 8;
/// Id of the program, in replies.
const TCA_BPF_ID: u16 = 11;
/// `TCA_BPF_FLAG_ACT_DIRECT`: the program's return value is the action.
const ACT_DIRECT: u32 = 1;
/// Attributes with the ids of an interface's XDP programs (`linux/if_link.h`): `IFLA_XDP_PROG_ID`,
/// and one each for driver, skb and hardware.
const IFLA_XDP_IDS: RangeInclusive<u16> = 4..=7;
/// `RTAX_MTU` (`linux/rtnetlink.h`).
const RTAX_MTU: u16 = 2;
const SKIP_STATS: u32 = libc::RTEXT_FILTER_SKIP_STATS as u32;
/// Number of attempts at a dump that is interrupted by changes.
const DUMP_TRIES: usize = 8;
/// `TC_H_CLSACT`, the same number as `TC_H_INGRESS`.
const CLSACT: u32 = 0xffff_fff1;
/// `TC_H_MAKE(TC_H_CLSACT, 0)`, the clsact qdisc's own handle.
const CLSACT_HANDLE: u32 = 0xffff_0000;
/// Parent of the filters at ingress: `TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_INGRESS)`.
const CLSACT_INGRESS: u32 = 0xffff_fff2;
/// Parent of the filters at egress.
const CLSACT_EGRESS: u32 = 0xffff_fff3;
/// Maximum size of events that wait in the kernel: the events of a thousand containers.
const MAX_EVENT_BYTES: usize = 8 << 20;
/// Size of the receive buffer in bytes: more than the longest message of a dump (32 KiB).
const BUFFER: usize = 1 << 16;

/// The properties of an interface that decide whether and how it is served.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) ifindex: u32,
    pub(crate) name: String,
    /// `ARPHRD_*`: 1 Ethernet, 772 loopback.
    pub(crate) layer: u16,
    /// Kind of a virtual interface: `veth`, `bridge`, `dummy`…; `None`: hardware, or `lo`.
    pub(crate) kind: Option<String>,
    /// Kind of the master, such as `bond` or `bridge`.
    pub(crate) part_of: Option<String>,
    /// The Ethernet address; zeros without one, as for `lo`.
    pub(crate) address: [u8; 6],
    pub(crate) master: Option<u32>,
    pub(crate) xdp_program: Option<u32>,
    /// Whether this is a tunnel with per-packet keys (collect_md, "external").
    pub(crate) collects_metadata: bool,
    /// Whether this is a VLAN-aware bridge.
    pub(crate) filters_vlans: bool,
}

/// Returns the interface with this index from a list in their order.
pub(crate) fn link_at(links: &[Link], ifindex: u32) -> Option<&Link> {
    let place = links.binary_search_by_key(&ifindex, |link| link.ifindex);
    Some(&links[place.ok()?])
}

pub(crate) const ETHERNET: u16 = 1;

/// `ARPHRD_LOOPBACK`: packets on `lo` also have an Ethernet header.
pub(crate) const LOOPBACK: u16 = 772;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LocalAddress {
    /// Index of the interface that has it.
    pub(crate) ifindex: u32,
    pub(crate) address: IpAddr,
    /// Prefix length of its network, in bits.
    pub(crate) prefix: u8,
    /// The broadcast address configured with it.
    pub(crate) broadcast: Option<IpAddr>,
}

impl LocalAddress {
    /// Returns whether the kernel takes both for one address: its lifetime or broadcast address may differ.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        (self.ifindex, self.address, self.prefix) == (other.ifindex, other.address, other.prefix)
    }

    /// Returns the addresses that no client on another machine can have: this address and the
    /// broadcast addresses of its network.
    pub(crate) fn refused_as_sender(&self) -> impl Iterator<Item = IpAddr> {
        let directed = match self.address {
            IpAddr::V4(ip) if self.prefix < 31 => {
                let hosts = u32::MAX.checked_shr(self.prefix.into()).unwrap_or(0);
                Some([
                    IpAddr::from((ip.to_bits() | hosts).to_be_bytes()),
                    IpAddr::from((ip.to_bits() & !hosts).to_be_bytes()),
                ])
            }
            _ => None,
        };
        [self.address]
            .into_iter()
            .chain(self.broadcast)
            .chain(directed.into_iter().flatten())
    }
}

/// A classic filter at ingress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FilterInfo {
    pub(crate) priority: u16,
    /// Id of its BPF program; 0 for another kind of filter.
    pub(crate) program: u32,
    /// The name that its owner gave to the program; empty for another kind of filter.
    pub(crate) name: String,
}

/// A change of the network configuration, as the kernel reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NetworkEvent {
    /// The link is new or has changed.
    Link(Link),
    LinkGone(u32),
    Address(LocalAddress),
    AddressGone(LocalAddress),
    Route {
        /// Whether the route sets an MTU.
        has_mtu: bool,
        /// Whether a client may have to be asked for anew: it is no new route that delivers packets.
        may_refuse: bool,
    },
    /// A part of a link that its other messages describe as well.
    Detail,
    /// Some events are unknown: everything must be listed again.
    Lost,
}

/// A netlink socket of the calling thread's network namespace.
pub(crate) struct Socket {
    fd: OwnedFd,
    /// Sequence number of the last request.
    sequence: u32,
    buffer: Vec<u8>,
}

/// A classic filter to be set at ingress.
pub(crate) struct NewFilter<'a> {
    pub(crate) priority: u16,
    pub(crate) program: BorrowedFd<'a>,
    pub(crate) name: &'a str,
}

impl NewFilter<'_> {
    fn body(&self, ifindex: u32) -> Vec<u8> {
        // Handle 1 at a priority of our own: a replacement meets exactly the filter that was set
        // like this.
        let mut body = traffic_message(ifindex, 1, CLSACT_INGRESS, filter_info(self.priority));
        push_attribute(&mut body, libc::TCA_KIND, b"bpf\0");
        let mut options = Vec::new();
        let program = self.program.as_raw_fd();
        push_attribute(&mut options, TCA_BPF_FD, &program.to_ne_bytes());
        push_text(&mut options, TCA_BPF_NAME, self.name);
        push_attribute(&mut options, TCA_BPF_FLAGS, &ACT_DIRECT.to_ne_bytes());
        push_attribute(&mut body, libc::TCA_OPTIONS, &options);
        body
    }
}

/// The filter that has a priority already; it is an error if one is expected to be absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Occupant {
    Absent,
    Replaced,
}

impl Socket {
    /// Opens a socket for rtnetlink requests.
    pub(crate) fn requests() -> io::Result<Self> {
        Self::open(None, 0)
    }

    /// Opens a socket for requests to the packet filter.
    pub(crate) fn netfilter() -> io::Result<Self> {
        Self::open(Some(netlink::NETFILTER), 0)
    }

    /// Opens a socket for requests about IPsec.
    pub(crate) fn ipsec() -> io::Result<Self> {
        Self::open(Some(netlink::XFRM), 0)
    }

    /// Opens a socket for questions about sockets.
    pub(crate) fn diagnosis() -> io::Result<Self> {
        Self::open(Some(netlink::SOCK_DIAG), 0)
    }

    /// Opens a socket that receives events about links and addresses.
    pub(crate) fn subscribed() -> io::Result<Self> {
        let socket = Self::open(None, GROUPS)?;
        // Without the capability the usual buffer remains, which overflows more often: a list replaces lost events.
        let _ = setsockopt(&socket.fd, RcvBufForce, &MAX_EVENT_BYTES);
        Ok(socket)
    }

    /// Opens a socket of a protocol, or else of rtnetlink, subscribed to `groups`.
    fn open(protocol: Option<Protocol>, groups: u32) -> io::Result<Self> {
        let fd = socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            protocol,
        )?;
        // With port 0 the kernel chooses a free one: other sockets of this process have theirs.
        bind(&fd, &SocketAddrNetlink::new(0, groups))?;
        Ok(Self::of(fd))
    }

    pub(crate) fn of(fd: OwnedFd) -> Self {
        Self {
            fd,
            sequence: 0,
            buffer: vec![0; BUFFER],
        }
    }

    /// Returns the interfaces in the order of their indexes.
    pub(crate) fn links(&mut self) -> io::Result<Vec<Link>> {
        let body = link_message(0);
        let mut links = count(Operation::Links, || {
            self.dump((libc::RTM_NEWLINK, libc::RTM_GETLINK), &body, parse_link)
        })?;
        links.sort_unstable_by_key(|link| link.ifindex);
        Ok(links)
    }

    pub(crate) fn link(&mut self, ifindex: u32) -> io::Result<Option<Link>> {
        let mut found = None;
        let body = link_message(ifindex);
        self.request(libc::RTM_GETLINK, ACK, &body, |kind, message| {
            if kind == libc::RTM_NEWLINK {
                found = parse_link(message);
            }
        })?;
        Ok(found)
    }

    /// Returns the interfaces of routes that set an MTU, possibly repeated. Every next hop of a
    /// multipath route counts.
    pub(crate) fn routes_with_mtu(&mut self) -> io::Result<Vec<u32>> {
        // An empty `struct rtmsg`: every family, every table.
        let routes = count(Operation::Routes, || {
            self.dump(
                (libc::RTM_NEWROUTE, libc::RTM_GETROUTE),
                &[0; 12],
                parse_route,
            )
        })?;
        Ok(routes.into_iter().flatten().collect())
    }

    /// Returns whether the kernel delivers packets for this address locally (`RTM_GETROUTE`: a
    /// route of type local).
    pub(crate) fn is_local(&mut self, address: IpAddr) -> io::Result<bool> {
        Ok(self.route_type(address, None)? == Some(libc::RTN_LOCAL))
    }

    /// Returns whether routes refuse a packet of this machine; the kernel reports a refusal of IPv4 as an
    /// error.
    pub(crate) fn refuses_route(&mut self, to: IpAddr, from: IpAddr) -> io::Result<bool> {
        let kind = self.route_type(to, Some(from))?;
        let refusing = [
            libc::RTN_UNREACHABLE,
            libc::RTN_BLACKHOLE,
            libc::RTN_PROHIBIT,
        ];
        Ok(kind.is_some_and(|kind| refusing.contains(&kind)))
    }

    fn route_type(&mut self, to: IpAddr, from: Option<IpAddr>) -> io::Result<Option<u8>> {
        let (family, bits) = match to {
            IpAddr::V4(_) => (libc::AF_INET, 32),
            IpAddr::V6(_) => (libc::AF_INET6, 128),
        };
        // struct rtmsg: family, lengths of destination and source.
        let mut body = vec![0; 12];
        body[0] = u8::try_from(family).map_err(io::Error::other)?;
        body[1] = bits;
        push_attribute(&mut body, libc::RTA_DST, &octets(to));
        if let Some(from) = from {
            body[2] = bits;
            push_attribute(&mut body, libc::RTA_SRC, &octets(from));
        }
        let mut kind = None;
        count(Operation::Route, || {
            self.request(libc::RTM_GETROUTE, ACK, &body, |message_kind, message| {
                if message_kind == libc::RTM_NEWROUTE {
                    // The eighth byte is the type.
                    kind = message.get(7).copied();
                }
            })
        })?;
        Ok(kind)
    }

    pub(crate) fn addresses(&mut self) -> io::Result<Vec<LocalAddress>> {
        let mut addresses = count(Operation::Addresses, || {
            self.dump(
                (libc::RTM_NEWADDR, libc::RTM_GETADDR),
                &[0; 8],
                parse_address,
            )
        })?;
        addresses.sort_unstable();
        Ok(addresses)
    }

    /// Returns a consistent list of all objects of a kind, by the types of the kernel's message and of
    /// the request. A dump that was interrupted, and so may be incomplete, is repeated; after
    /// [`DUMP_TRIES`] interruptions it is an error.
    pub(crate) fn dump<T>(
        &mut self,
        (answer, request): (u16, u16),
        body: &[u8],
        read: impl Fn(&[u8]) -> Option<T>,
    ) -> io::Result<Vec<T>> {
        let mut tries = 0;
        loop {
            tries += 1;
            // From the beginning each time: an interrupted dump may lack objects that were there
            // all the while.
            let mut found = Vec::new();
            match self.request(request, DUMP, body, |kind, message: &[u8]| {
                if kind == answer {
                    found.extend(read(message));
                }
            }) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted && tries < DUMP_TRIES => {}
                result => return result.map(|()| found),
            }
        }
    }

    /// Returns the kind of the qdisc at ingress: `ingress` or `clsact`.
    pub(crate) fn ingress_qdisc(&mut self, ifindex: u32) -> io::Result<Option<String>> {
        let body = traffic_message(ifindex, 0, CLSACT, 0);
        let mut found = None;
        let result = count(Operation::Filters, || {
            self.request(libc::RTM_GETQDISC, ACK | ECHO, &body, |kind, message| {
                if kind == libc::RTM_NEWQDISC {
                    found = qdisc_kind(message);
                }
            })
        });
        match result {
            // ENOENT (`tc_get_qdisc`): the interface has no qdisc at ingress.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            other => other.map(|()| found),
        }
    }

    /// Adds the clsact qdisc and its first filter within one system call: a kill in between would leave a qdisc that
    /// nothing attributes to this program. Returns the result of each; the kernel makes the second change even if it has
    /// refused the first.
    pub(crate) fn add_clsact_with(
        &mut self,
        ifindex: u32,
        filter: &NewFilter<'_>,
    ) -> io::Result<[io::Result<()>; 2]> {
        let mut body = traffic_message(ifindex, CLSACT_HANDLE, CLSACT, 0);
        push_attribute(&mut body, libc::TCA_KIND, b"clsact\0");
        // Without EXCLUSIVE the kernel would take this for a change of the qdisc that is there.
        let flags = ACK | CREATE | EXCLUSIVE;
        let mut messages = self.message(libc::RTM_NEWQDISC, flags, &body)?;
        let of_qdisc = self.sequence;
        messages.extend(self.message(libc::RTM_NEWTFILTER, flags, &filter.body(ifindex))?);
        let of_filter = self.sequence;
        send(self.fd.as_raw_fd(), &messages, MsgFlags::empty())?;
        let qdisc = self.receive_answer(of_qdisc, |_, _| {});
        Ok([qdisc, self.receive_answer(of_filter, |_, _| {})])
    }

    pub(crate) fn remove_clsact(&mut self, ifindex: u32) -> io::Result<()> {
        let body = traffic_message(ifindex, CLSACT_HANDLE, CLSACT, 0);
        self.request(libc::RTM_DELQDISC, ACK, &body, |_, _| {})
    }

    /// Returns whether the clsact qdisc has filters, in either direction, beside the one at ingress with this priority.
    pub(crate) fn has_other_filters(&mut self, ifindex: u32, priority: u16) -> io::Result<bool> {
        let at_ingress = self.filters(ifindex)?;
        let mut any = at_ingress.iter().any(|filter| filter.priority != priority);
        let body = traffic_message(ifindex, 0, CLSACT_EGRESS, 0);
        count(Operation::Filters, || {
            self.request(libc::RTM_GETTFILTER, DUMP, &body, |kind, _| {
                any |= kind == libc::RTM_NEWTFILTER
            })
        })?;
        Ok(any)
    }

    /// Attaches a program at ingress as a classic filter.
    pub(crate) fn set_filter(
        &mut self,
        ifindex: u32,
        filter: &NewFilter<'_>,
        occupant: Occupant,
    ) -> io::Result<()> {
        let place = match occupant {
            Occupant::Replaced => REPLACE,
            // A foreign filter of this priority may have been set since the list was read.
            Occupant::Absent => EXCLUSIVE,
        };
        let body = filter.body(ifindex);
        self.request(libc::RTM_NEWTFILTER, ACK | CREATE | place, &body, |_, _| {})
    }

    /// Returns the filters at ingress; none without a qdisc.
    pub(crate) fn filters(&mut self, ifindex: u32) -> io::Result<Vec<FilterInfo>> {
        let body = traffic_message(ifindex, 0, CLSACT_INGRESS, 0);
        let mut found: Vec<FilterInfo> = Vec::new();
        let result = count(Operation::Filters, || {
            self.request(libc::RTM_GETTFILTER, DUMP, &body, |kind, message| {
                if kind == libc::RTM_NEWTFILTER
                    && let Some(filter) = parse_filter(message)
                {
                    // The kernel sends a message about the priority before the filter itself.
                    found.pop_if(|last| last.priority == filter.priority && last.program == 0);
                    found.push(filter);
                }
            })
        });
        match result {
            // The interface has no such qdisc.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) => {
                Ok(Vec::new())
            }
            other => other.map(|()| found),
        }
    }

    pub(crate) fn remove_filter(&mut self, ifindex: u32, priority: u16) -> io::Result<()> {
        let mut body = traffic_message(ifindex, 1, CLSACT_INGRESS, filter_info(priority));
        push_attribute(&mut body, libc::TCA_KIND, b"bpf\0");
        self.request(libc::RTM_DELTFILTER, ACK, &body, |_, _| {})
    }

    /// Receives the next events without waiting; `None`: there are none.
    pub(crate) fn events(&mut self) -> Option<Vec<NetworkEvent>> {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_TRUNC;
        loop {
            return match recv(self.fd.as_raw_fd(), &mut self.buffer, flags) {
                // `MSG_TRUNC` returns the whole length.
                Ok(length) if length > BUFFER => Some(vec![NetworkEvent::Lost]),
                Ok(length) if length > 0 => {
                    let messages = NetlinkMessages(&self.buffer[..length]);
                    Some(messages.map(|message| parse_event(&message)).collect())
                }
                // The socket's buffer overflowed: events were lost.
                Err(nix::Error::ENOBUFS) => Some(vec![NetworkEvent::Lost]),
                Err(nix::Error::EINTR) => continue,
                // EAGAIN: none waits. Any other error comes again, and lists every ten seconds take
                // the place of events.
                Ok(_) | Err(_) => None,
            };
        }
    }

    pub(crate) fn request(
        &mut self,
        kind: u16,
        flags: u16,
        body: &[u8],
        on_message: impl FnMut(u16, &[u8]),
    ) -> io::Result<()> {
        let message = self.message(kind, flags, body)?;
        // The kernel does the work within this call, and waits for the RTNL lock here, for seconds
        // if others hold it.
        send(self.fd.as_raw_fd(), &message, MsgFlags::empty())?;
        self.receive_answer(self.sequence, on_message)
    }

    /// Returns a request with the next sequence number.
    fn message(&mut self, kind: u16, flags: u16, body: &[u8]) -> io::Result<Vec<u8>> {
        self.sequence += 1;
        let length = u32::try_from(16 + body.len()).map_err(io::Error::other)?;
        let mut message = Vec::with_capacity(16 + body.len());
        message.extend(length.to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend(flags.to_ne_bytes());
        message.extend(self.sequence.to_ne_bytes());
        message.extend(0_u32.to_ne_bytes());
        message.extend(body);
        Ok(message)
    }

    /// Receives the answer to the request with this sequence number.
    fn receive_answer(
        &mut self,
        sequence: u32,
        mut on_message: impl FnMut(u16, &[u8]),
    ) -> io::Result<()> {
        let mut answer = Answer {
            sequence,
            interrupted: false,
        };
        loop {
            // No time limit: whatever is requested here ends with an acknowledgement, an error or
            // DONE.
            let length = match recv(self.fd.as_raw_fd(), &mut self.buffer, MsgFlags::empty()) {
                Ok(length) => length,
                Err(nix::Error::EINTR) => continue,
                Err(error) => return Err(error.into()),
            };
            if answer.take(&self.buffer[..length], &mut on_message)? {
                return Ok(());
            }
        }
    }
}

/// The answer to a request, as received so far.
struct Answer {
    /// Sequence number of the request.
    sequence: u32,
    /// Whether the kernel marked the dump as incomplete.
    interrupted: bool,
}

impl Answer {
    /// Processes a datagram; returns whether it ends the answer. A dump that is inconsistent or
    /// incomplete is an error.
    fn take(
        &mut self,
        datagram: &[u8],
        on_message: &mut impl FnMut(u16, &[u8]),
    ) -> io::Result<bool> {
        for Message {
            kind,
            flags,
            sequence,
            body,
        } in NetlinkMessages(datagram)
        {
            // The rest of an answer that ended early with an error.
            if sequence != self.sequence {
                continue;
            }
            self.interrupted |= flags & DUMP_INTERRUPTED != 0;
            let code = word(body).map(u32::cast_signed);
            let code = match kind {
                // A dump's error code follows its end marker, if there is one.
                DONE => code.unwrap_or(0),
                ERROR => code.unwrap_or(-libc::EPROTO),
                kind => {
                    on_message(kind, body);
                    continue;
                }
            };
            return match code {
                // Reported only at the end: the next request must not find the rest of this dump.
                0.. if self.interrupted => Err(io::ErrorKind::Interrupted.into()),
                0.. => Ok(true),
                code => Err(io::Error::from_raw_os_error(code.saturating_neg())),
            };
        }
        Ok(false)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

struct Message<'a> {
    kind: u16,
    flags: u16,
    /// Sequence number of the request that it answers.
    sequence: u32,
    body: &'a [u8],
}

struct NetlinkMessages<'a>(&'a [u8]);

impl<'a> Iterator for NetlinkMessages<'a> {
    type Item = Message<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        let header: &[u8; 16] = self.0.first_chunk()?;
        let [l0, l1, l2, l3, k0, k1, f0, f1, s0, s1, s2, s3, ..] = *header;
        let length = u32::from_ne_bytes([l0, l1, l2, l3]) as usize;
        let body = self.0.get(16..length)?;
        // The last message of a datagram may lack its padding.
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Message {
            kind: u16::from_ne_bytes([k0, k1]),
            flags: u16::from_ne_bytes([f0, f1]),
            sequence: u32::from_ne_bytes([s0, s1, s2, s3]),
            body,
        })
    }
}

/// The attributes in a byte range: type without its flags, and value.
pub(crate) struct Attributes<'a>(pub(crate) &'a [u8]);

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let [l0, l1, k0, k1] = *self.0.first_chunk()?;
        let length = usize::from(u16::from_ne_bytes([l0, l1]));
        let value = self.0.get(4..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((
            // The two highest bits say how the value is encoded, not what it is.
            u16::from_ne_bytes([k0, k1]) & libc::NLA_TYPE_MASK as u16,
            value,
        ))
    }
}

pub(crate) fn push_attribute(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let length = u16::try_from(4 + value.len()).expect("attributes written here are short");
    body.extend(length.to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(value);
    body.resize(body.len().next_multiple_of(4), 0);
}

/// Appends a string with its NUL.
pub(crate) fn push_text(body: &mut Vec<u8>, kind: u16, text: &str) {
    push_attribute(body, kind, &[text.as_bytes(), &[0]].concat());
}

pub(crate) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// Returns a number in native order.
fn word(value: &[u8]) -> Option<u32> {
    array_at(value, 0).map(u32::from_ne_bytes)
}

/// Returns the bytes of a field at this offset.
pub(crate) fn array_at<const LENGTH: usize>(bytes: &[u8], at: usize) -> Option<[u8; LENGTH]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// Returns the address of a family at this offset, in network order.
pub(crate) fn address_at(bytes: &[u8], at: usize, is_v6: bool) -> Option<IpAddr> {
    if is_v6 {
        array_at::<16>(bytes, at).map(IpAddr::from)
    } else {
        array_at::<4>(bytes, at).map(IpAddr::from)
    }
}

/// Returns a request for an interface; 0: for all.
fn link_message(ifindex: u32) -> Vec<u8> {
    // struct ifinfomsg: the index is its second word.
    let mut body = vec![0; 16];
    body[4..8].copy_from_slice(&ifindex.to_ne_bytes());
    // Otherwise the kernel asks each driver for its counters, which are not needed here.
    push_attribute(&mut body, libc::IFLA_EXT_MASK, &SKIP_STATS.to_ne_bytes());
    body
}

fn traffic_message(ifindex: u32, handle: u32, parent: u32, info: u32) -> Vec<u8> {
    [0, ifindex, handle, parent, info]
        .iter()
        .flat_map(|word| word.to_ne_bytes())
        .collect()
}

/// Returns the `tcm_info` of a filter of this priority for all protocols, in network order.
fn filter_info(priority: u16) -> u32 {
    u32::from(priority) << 16 | u32::from((libc::ETH_P_ALL as u16).to_be())
}

fn parse_link(message: &[u8]) -> Option<Link> {
    let (header, attributes) = message.split_first_chunk::<16>()?;
    let mut link = Link {
        ifindex: word(&header[4..])?,
        layer: u16::from_ne_bytes([header[2], header[3]]),
        ..Link::default()
    };
    for (kind, value) in Attributes(attributes) {
        match kind {
            // Tunnels and InfiniBand have other lengths, and no Ethernet header: `choice::plan`
            // refuses them.
            libc::IFLA_ADDRESS => link.address = value.first_chunk().copied().unwrap_or_default(),
            libc::IFLA_IFNAME => link.name = text(value),
            libc::IFLA_MASTER => link.master = word(value),
            libc::IFLA_LINKINFO => {
                // Its meaning depends on the kind, whichever attribute comes first.
                let mut data = None;
                for (kind, value) in Attributes(value) {
                    match kind {
                        libc::IFLA_INFO_KIND => link.kind = Some(text(value)),
                        libc::IFLA_INFO_SLAVE_KIND => link.part_of = Some(text(value)),
                        libc::IFLA_INFO_DATA => data = Some(value),
                        _ => {}
                    }
                }
                read_kind(&mut link, data.unwrap_or_default());
            }
            libc::IFLA_XDP => {
                for (kind, value) in Attributes(value) {
                    if IFLA_XDP_IDS.contains(&kind)
                        && let Some(id) = word(value)
                        && id != 0
                    {
                        link.xdp_program = Some(id);
                    }
                }
            }
            _ => {}
        }
    }
    (!link.name.is_empty()).then_some(link)
}

fn parse_event(message: &Message<'_>) -> NetworkEvent {
    let Message { kind, body, .. } = *message;
    let family = body.first().copied().unwrap_or_default();
    let event = match kind {
        // A port leaves its bridge, or only its state there changes; the link itself has a message of its own.
        libc::RTM_NEWLINK | libc::RTM_DELLINK if i32::from(family) != libc::AF_UNSPEC => {
            Some(NetworkEvent::Detail)
        }
        libc::RTM_NEWLINK => parse_link(body).map(NetworkEvent::Link),
        libc::RTM_DELLINK => parse_link(body).map(|link| NetworkEvent::LinkGone(link.ifindex)),
        libc::RTM_NEWADDR => parse_address(body).map(NetworkEvent::Address),
        libc::RTM_DELADDR => parse_address(body).map(NetworkEvent::AddressGone),
        libc::RTM_NEWROUTE | libc::RTM_DELROUTE => {
            const DELIVERS: [u8; 3] = [libc::RTN_UNICAST, libc::RTN_LOCAL, libc::RTN_BROADCAST];
            // The eighth byte is the type.
            let delivers = body.get(7).is_some_and(|kind| DELIVERS.contains(kind));
            Some(NetworkEvent::Route {
                has_mtu: parse_route(body).is_some(),
                may_refuse: kind == libc::RTM_DELROUTE || !delivers,
            })
        }
        libc::RTM_NEWRULE | libc::RTM_DELRULE => Some(NetworkEvent::Route {
            has_mtu: false,
            may_refuse: true,
        }),
        _ => None,
    };
    event.unwrap_or(NetworkEvent::Lost)
}

/// Returns whether data of a link have this attribute, and it is not zero.
fn has_flag(data: &[u8], wanted: u16) -> bool {
    // A flag without a value (geneve, GRE), or a byte (vxlan, bridge).
    Attributes(data).any(|(kind, value)| kind == wanted && value.first() != Some(&0))
}

/// Reads the attributes specific to the kind of link (`IFLA_VXLAN_*`, `IFLA_GENEVE_*`,
/// `IFLA_GRE_*`, `IFLA_BR_*`).
fn read_kind(link: &mut Link, data: &[u8]) {
    match link.kind.as_deref() {
        // `IFLA_VXLAN_COLLECT_METADATA`, and so on.
        Some("vxlan") => link.collects_metadata = has_flag(data, 25),
        Some("geneve") => link.collects_metadata = has_flag(data, 6),
        Some("gretap" | "ip6gretap" | "erspan" | "ip6erspan") => {
            link.collects_metadata = has_flag(data, 18)
        }
        // It has no other mode (Linux 5.7).
        Some("bareudp") => link.collects_metadata = true,
        Some("bridge") => link.filters_vlans = has_flag(data, 7),
        _ => {}
    }
}

/// Reads an RTM_NEWROUTE: the interfaces of a route that sets an MTU.
fn parse_route(message: &[u8]) -> Option<Vec<u32>> {
    let (_header, attributes) = message.split_first_chunk::<12>()?;
    let mut has_mtu = false;
    let mut interfaces = Vec::new();
    for (kind, value) in Attributes(attributes) {
        match kind {
            libc::RTA_METRICS => has_mtu = Attributes(value).any(|(kind, _)| kind == RTAX_MTU),
            libc::RTA_OIF => interfaces.extend(word(value)),
            libc::RTA_MULTIPATH => {
                // struct rtnexthop: length, flags, hops, interface, and attributes.
                let mut rest = value;
                while let Some(hop) = rest.first_chunk::<8>() {
                    interfaces.extend(word(&hop[4..]));
                    // At least the header, so that a length of zero cannot hold up the loop.
                    let length = usize::from(u16::from_ne_bytes([hop[0], hop[1]])).max(8);
                    rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
                }
            }
            _ => {}
        }
    }
    has_mtu.then_some(interfaces)
}

fn parse_address(message: &[u8]) -> Option<LocalAddress> {
    // struct ifaddrmsg: family, prefix, flags, scope, index.
    let (&header, attributes) = message.split_first_chunk::<8>()?;
    let [_family, prefix, _flags, _scope, index @ ..] = header;
    let mut own = None;
    let mut other = None;
    let mut broadcast = None;
    for (kind, value) in Attributes(attributes) {
        let address = address_at(value, 0, value.len() == 16);
        match kind {
            libc::IFA_LOCAL => own = address,
            // The same address, or the peer's.
            libc::IFA_ADDRESS => other = address,
            libc::IFA_BROADCAST => broadcast = address,
            _ => {}
        }
    }
    Some(LocalAddress {
        ifindex: u32::from_ne_bytes(index),
        address: own.or(other)?,
        prefix,
        broadcast,
    })
}

/// Returns the kind of a qdisc, which follows `struct tcmsg`.
fn qdisc_kind(message: &[u8]) -> Option<String> {
    for (kind, value) in Attributes(message.get(20..)?) {
        if kind == libc::TCA_KIND {
            return Some(text(value));
        }
    }
    None
}

fn parse_filter(message: &[u8]) -> Option<FilterInfo> {
    let (header, attributes) = message.split_first_chunk::<20>()?;
    let info = word(&header[16..])?;
    let mut program = 0;
    let mut name = String::new();
    let options = Attributes(attributes).find(|&(kind, _)| kind == libc::TCA_OPTIONS);
    for (kind, value) in Attributes(options.map_or(&[], |(_, options)| options)) {
        match kind {
            TCA_BPF_NAME => name = text(value),
            TCA_BPF_ID => program = word(value).unwrap_or(0),
            _ => {}
        }
    }
    Some(FilterInfo {
        priority: (info >> 16) as u16,
        program,
        name,
    })
}

pub(crate) fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value.strip_suffix(&[0]).unwrap_or(value)).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    impl NewFilter<'_> {
        /// Returns the filter as the kernel lists it.
        pub(crate) fn listed(&self, ifindex: u32) -> Vec<u8> {
            self.body(ifindex)
        }
    }

    impl Link {
        /// Returns a plain Ethernet interface.
        pub(crate) fn named(ifindex: u32, name: &str) -> Self {
            Self {
                ifindex,
                name: name.to_owned(),
                layer: ETHERNET,
                ..Self::default()
            }
        }
    }

    #[test]
    fn the_kernel_names_lo() {
        let mut socket = Socket::requests().unwrap();
        let links = socket.links().unwrap();
        let lo = links.iter().find(|link| link.name == "lo").unwrap();
        assert_eq!((lo.ifindex, lo.layer, lo.kind.as_deref()), (1, 772, None));
        assert_eq!(socket.link(1).unwrap().as_ref(), Some(lo));
        assert!(socket.addresses().is_ok());
    }

    /// Returns a message of a dump.
    fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
        let header = [
            (16 + body.len() as u32).to_ne_bytes(),
            [0; 4],
            7_u32.to_ne_bytes(),
            [0; 4],
        ];
        let mut message = header.concat();
        message[4..6].copy_from_slice(&kind.to_ne_bytes());
        message[6..8].copy_from_slice(&flags.to_ne_bytes());
        message.extend(body);
        message
    }

    #[test]
    fn incomplete_dump_is_rejected() {
        let take = |datagrams: &[Vec<u8>]| {
            let mut answer = Answer {
                sequence: 7,
                interrupted: false,
            };
            let mut seen = 0;
            let mut ended = Ok(false);
            for datagram in datagrams {
                ended = answer.take(datagram, &mut |_, _| seen += 1);
                if !matches!(ended, Ok(false)) {
                    break;
                }
            }
            (ended.map_err(|error| error.kind()), seen)
        };
        let link = message(libc::RTM_NEWLINK, 2, &[0; 16]);
        let done = message(DONE, 2, &[0; 4]);
        assert_eq!(take(&[link.clone(), done.clone()]), (Ok(true), 1));
        let marked = message(libc::RTM_NEWLINK, 2 | DUMP_INTERRUPTED, &[0; 16]);
        assert_eq!(
            take(&[marked, done.clone()]),
            (Err(io::ErrorKind::Interrupted), 1)
        );
        let marked = message(DONE, 2 | DUMP_INTERRUPTED, &[0; 4]);
        assert_eq!(
            take(&[link.clone(), marked]),
            (Err(io::ErrorKind::Interrupted), 1)
        );
        let broken = message(DONE, 2, &(-libc::ENOMEM).to_ne_bytes());
        assert_eq!(take(&[link, broken]), (Err(io::ErrorKind::OutOfMemory), 1));
    }

    #[test]
    fn malformed_messages_stay_in_bounds() {
        let mut body = Vec::new();
        push_attribute(&mut body, libc::IFLA_IFNAME, b"eth0\0");
        assert_eq!(Attributes(&body).next(), Some((3, &b"eth0\0"[..])));
        for end in 0..body.len() {
            let _ = Attributes(&body[..end]).count();
            let _ = NetlinkMessages(&body[..end]).count();
            let _ = parse_link(&body[..end]);
        }
        assert_eq!(
            Attributes(&[2, 0, 1, 0]).count(),
            0,
            "a length below its own header"
        );
    }
}
