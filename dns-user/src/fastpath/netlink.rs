//! The little of rtnetlink that the fast path needs: links and addresses, the
//! news about them, and classic tc filters for kernels before tcx.
//!
//! Only the attributes in use are read, so newer kernels with more or longer
//! ones do no harm. Layouts: `linux/rtnetlink.h`, `linux/if_link.h`,
//! `linux/pkt_sched.h`, `linux/pkt_cls.h`.

use std::{
    io,
    net::IpAddr,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, socket,
};

/// `RTM_NEWLINK`, `RTM_GETLINK`.
const NEW_LINK: u16 = 16;
/// See [`NEW_LINK`].
const GET_LINK: u16 = 18;
/// `RTM_NEWADDR`, `RTM_GETADDR`.
const NEW_ADDRESS: u16 = 20;
/// See [`NEW_ADDRESS`].
const GET_ADDRESS: u16 = 22;
/// `RTM_NEWQDISC`.
const NEW_QDISC: u16 = 36;
/// `RTM_NEWTFILTER`, `RTM_DELTFILTER`, `RTM_GETTFILTER`.
const NEW_FILTER: u16 = 44;
/// See [`NEW_FILTER`].
const DELETE_FILTER: u16 = 45;
/// See [`NEW_FILTER`].
const GET_FILTER: u16 = 46;
/// `NLMSG_ERROR`: also an acknowledgement.
const ERROR: u16 = 2;
/// `NLMSG_DONE`: end of a dump.
const DONE: u16 = 3;
/// `NLM_F_REQUEST | NLM_F_DUMP`.
const DUMP: u16 = 0x301;
/// `NLM_F_REQUEST | NLM_F_ACK`.
const ACK: u16 = 0x5;
/// `NLM_F_CREATE`.
const CREATE: u16 = 0x400;
/// `NLM_F_REPLACE`.
const REPLACE: u16 = 0x100;
/// `NLM_F_EXCL`.
const EXCLUSIVE: u16 = 0x200;
/// `RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR`.
const GROUPS: u32 = 0x1 | 0x10 | 0x100;
/// Parent of the filters at ingress: `TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_INGRESS)`.
const CLSACT_INGRESS: u32 = 0xffff_fff2;
/// Bytes of a receive buffer: more than the kernel puts into one message of a dump (32 KiB).
const BUFFER: usize = 1 << 16;

/// What one wants to know about an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Link {
    /// Its number.
    pub(super) ifindex: u32,
    /// Its name.
    pub(super) name: String,
    /// `ARPHRD_*`: 1 Ethernet, 772 loopback.
    pub(super) layer: u16,
    /// Kind of a virtual interface: `veth`, `bridge`, `dummy`…; `None`: hardware, or `lo`.
    pub(super) kind: Option<String>,
    /// Kind of the interface that this one is a part of, such as `bond` or `bridge`.
    pub(super) part_of: Option<String>,
    /// Id of the XDP program on it.
    pub(super) xdp_program: Option<u32>,
}

/// A socket of the calling thread's network namespace.
pub(super) struct Socket {
    /// The socket.
    fd: OwnedFd,
    /// Number of the last request.
    sequence: u32,
}

impl Socket {
    /// A socket for requests.
    pub(super) fn requests() -> io::Result<Self> {
        Self::open(0)
    }

    /// A socket that hears of links and addresses.
    pub(super) fn news() -> io::Result<Self> {
        Self::open(GROUPS)
    }

    /// Opens a socket subscribed to `groups`.
    fn open(groups: u32) -> io::Result<Self> {
        let fd = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkRoute,
        )?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
        Ok(Self { fd, sequence: 0 })
    }

    /// All interfaces.
    pub(super) fn links(&mut self) -> io::Result<Vec<Link>> {
        // struct ifinfomsg, then IFLA_EXT_MASK = RTEXT_FILTER_SKIP_STATS.
        let mut body = vec![0; 16];
        push_attribute(&mut body, 29, &8_u32.to_ne_bytes());
        let mut links = Vec::new();
        self.request(GET_LINK, DUMP, &body, |kind, message| {
            if kind == NEW_LINK {
                links.extend(parse_link(message));
            }
        })?;
        Ok(links)
    }

    /// All local addresses.
    pub(super) fn addresses(&mut self) -> io::Result<Vec<IpAddr>> {
        let mut addresses = Vec::new();
        self.request(GET_ADDRESS, DUMP, &[0; 8], |kind, message| {
            if kind == NEW_ADDRESS {
                addresses.extend(parse_address(message));
            }
        })?;
        Ok(addresses)
    }

    /// Adds the clsact qdisc, if it is not there.
    pub(super) fn add_clsact(&mut self, ifindex: u32) -> io::Result<()> {
        // Handle TC_H_MAKE(TC_H_CLSACT, 0), parent TC_H_CLSACT.
        let mut body = traffic_message(ifindex, 0xffff_0000, 0xffff_fff1, 0);
        push_attribute(&mut body, 1, b"clsact\0");
        match self.request(NEW_QDISC, ACK | CREATE | EXCLUSIVE, &body, |_, _| {}) {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
            other => other,
        }
    }

    /// Puts a program at ingress as the classic filter of this priority, in the
    /// place of the one that is there.
    pub(super) fn set_filter(
        &mut self,
        ifindex: u32,
        priority: u16,
        program: BorrowedFd<'_>,
        name: &str,
    ) -> io::Result<()> {
        let mut body = traffic_message(ifindex, 1, CLSACT_INGRESS, filter_info(priority));
        push_attribute(&mut body, 1, b"bpf\0");
        let mut options = Vec::new();
        // TCA_BPF_FD, TCA_BPF_NAME, TCA_BPF_FLAGS = TCA_BPF_FLAG_ACT_DIRECT.
        push_attribute(&mut options, 6, &program.as_raw_fd().to_ne_bytes());
        push_attribute(&mut options, 7, &[name.as_bytes(), &[0]].concat());
        push_attribute(&mut options, 8, &1_u32.to_ne_bytes());
        push_attribute(&mut body, 2, &options);
        self.request(NEW_FILTER, ACK | CREATE | REPLACE, &body, |_, _| {})
    }

    /// Id and name of the program that is the classic filter of this priority.
    pub(super) fn filter(&mut self, ifindex: u32, priority: u16) -> io::Result<Option<(u32, String)>> {
        let body = traffic_message(ifindex, 0, CLSACT_INGRESS, filter_info(priority));
        let mut found = None;
        let result = self.request(GET_FILTER, DUMP, &body, |kind, message| {
            let same = message.get(16..20).is_some_and(|info| info == filter_info(priority).to_ne_bytes());
            if kind == NEW_FILTER && same {
                found = parse_filter(message).or(found.take());
            }
        });
        match result {
            // No clsact there.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) => Ok(None),
            other => other.map(|()| found),
        }
    }

    /// Removes the classic filter of this priority.
    pub(super) fn remove_filter(&mut self, ifindex: u32, priority: u16) -> io::Result<()> {
        let mut body = traffic_message(ifindex, 1, CLSACT_INGRESS, filter_info(priority));
        push_attribute(&mut body, 1, b"bpf\0");
        self.request(DELETE_FILTER, ACK, &body, |_, _| {})
    }

    /// Takes in what has been heard, without waiting. Whether anything was:
    /// news that were lost count as news.
    pub(super) fn heard(&self) -> bool {
        let mut buffer = [0; 4096];
        let mut any = false;
        loop {
            match recv(self.fd.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_TRUNC) {
                Ok(length) if length > 0 => any = true,
                // The kernel had more to say than the socket holds.
                Err(nix::Error::ENOBUFS) => any = true,
                Err(nix::Error::EINTR) => {}
                Ok(_) | Err(_) => return any,
            }
        }
    }

    /// Sends a request and hands over the messages of the reply.
    fn request(
        &mut self,
        kind: u16,
        flags: u16,
        body: &[u8],
        mut on_message: impl FnMut(u16, &[u8]),
    ) -> io::Result<()> {
        self.sequence += 1;
        let length = u32::try_from(16 + body.len()).map_err(io::Error::other)?;
        let mut message = Vec::with_capacity(16 + body.len());
        message.extend(length.to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend(flags.to_ne_bytes());
        message.extend(self.sequence.to_ne_bytes());
        message.extend(0_u32.to_ne_bytes());
        message.extend(body);
        send(self.fd.as_raw_fd(), &message, MsgFlags::empty())?;
        let mut buffer = vec![0; BUFFER];
        loop {
            let length = match recv(self.fd.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                Ok(length) => length,
                Err(nix::Error::EINTR) => continue,
                Err(error) => return Err(error.into()),
            };
            for (kind, sequence, message) in Messages(&buffer[..length]) {
                if sequence != self.sequence {
                    continue;
                }
                match kind {
                    DONE => return Ok(()),
                    ERROR => {
                        let code =
                            message.first_chunk().map_or(-libc::EPROTO, |code| i32::from_ne_bytes(*code));
                        return if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(-code)) };
                    }
                    kind => on_message(kind, message),
                }
            }
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The messages in a datagram: type, sequence number, body.
struct Messages<'a>(&'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = (u16, u32, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let header: &[u8; 16] = self.0.first_chunk()?;
        let [l0, l1, l2, l3, k0, k1, _, _, s0, s1, s2, s3, ..] = *header;
        let length = u32::from_ne_bytes([l0, l1, l2, l3]) as usize;
        let body = self.0.get(16..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes([k0, k1]), u32::from_ne_bytes([s0, s1, s2, s3]), body))
    }
}

/// The attributes in a stretch of bytes: type without its flags, value.
struct Attributes<'a>(&'a [u8]);

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let [l0, l1, k0, k1] = *self.0.first_chunk()?;
        let length = usize::from(u16::from_ne_bytes([l0, l1]));
        let value = self.0.get(4..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        // NLA_F_NESTED and NLA_F_NET_BYTEORDER are the two highest bits.
        Some((u16::from_ne_bytes([k0, k1]) & 0x3fff, value))
    }
}

/// Appends an attribute.
fn push_attribute(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let length = u16::try_from(4 + value.len()).expect("attributes written here are short");
    body.extend(length.to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(value);
    body.resize(body.len().next_multiple_of(4), 0);
}

/// `struct tcmsg`.
fn traffic_message(ifindex: u32, handle: u32, parent: u32, info: u32) -> Vec<u8> {
    [0, ifindex, handle, parent, info].iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// `tcm_info` of a filter of this priority for all protocols (ETH_P_ALL, network order).
fn filter_info(priority: u16) -> u32 {
    u32::from(priority) << 16 | u32::from(3_u16.to_be())
}

/// Reads an RTM_NEWLINK.
fn parse_link(message: &[u8]) -> Option<Link> {
    let (header, attributes) = message.split_first_chunk::<16>()?;
    let mut link = Link {
        ifindex: u32::from_ne_bytes(*header[4..].first_chunk()?),
        name: String::new(),
        layer: u16::from_ne_bytes([header[2], header[3]]),
        kind: None,
        part_of: None,
        xdp_program: None,
    };
    for (kind, value) in Attributes(attributes) {
        match kind {
            // IFLA_IFNAME
            3 => link.name = text(value),
            // IFLA_LINKINFO: IFLA_INFO_KIND, IFLA_INFO_SLAVE_KIND
            18 => {
                for (kind, value) in Attributes(value) {
                    match kind {
                        1 => link.kind = Some(text(value)),
                        4 => link.part_of = Some(text(value)),
                        _ => {}
                    }
                }
            }
            // IFLA_XDP: IFLA_XDP_PROG_ID, or one each for driver, skb and hardware
            43 => {
                for (kind, value) in Attributes(value) {
                    if matches!(kind, 4..=7)
                        && let Some(id) = value.first_chunk().map(|id| u32::from_ne_bytes(*id))
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

/// Reads an RTM_NEWADDR: the local address.
fn parse_address(message: &[u8]) -> Option<IpAddr> {
    let (_header, attributes) = message.split_first_chunk::<8>()?;
    let mut found = None;
    for (kind, value) in Attributes(attributes) {
        // IFA_LOCAL (2) is the own end; IFA_ADDRESS (1) the same, or the peer's.
        if kind == 2 || kind == 1 && found.is_none() {
            found = match value.len() {
                4 => value.first_chunk::<4>().map(|octets| IpAddr::from(*octets)),
                16 => value.first_chunk::<16>().map(|octets| IpAddr::from(*octets)),
                _ => found,
            };
        }
    }
    found
}

/// Reads id and name of the program from an RTM_NEWTFILTER.
fn parse_filter(message: &[u8]) -> Option<(u32, String)> {
    let (_header, attributes) = message.split_first_chunk::<20>()?;
    let (_, options) = Attributes(attributes).find(|&(kind, _)| kind == 2)?;
    let (mut id, mut name) = (None, String::new());
    for (kind, value) in Attributes(options) {
        match kind {
            7 => name = text(value),
            11 => id = value.first_chunk().map(|id| u32::from_ne_bytes(*id)),
            _ => {}
        }
    }
    Some((id?, name))
}

/// A text with or without its final NUL.
fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value.strip_suffix(&[0]).unwrap_or(value)).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_names_lo() {
        let mut socket = Socket::requests().unwrap();
        let links = socket.links().unwrap();
        let lo = links.iter().find(|link| link.name == "lo").unwrap();
        assert_eq!((lo.ifindex, lo.layer, lo.kind.as_deref()), (1, 772, None));
        assert!(socket.addresses().is_ok());
    }

    #[test]
    fn nothing_malformed_is_read_past_its_end() {
        let mut body = Vec::new();
        push_attribute(&mut body, 3, b"eth0\0");
        assert_eq!(Attributes(&body).next(), Some((3, &b"eth0\0"[..])));
        for end in 0..body.len() {
            let _ = Attributes(&body[..end]).count();
            let _ = Messages(&body[..end]).count();
            let _ = parse_link(&body[..end]);
        }
        assert_eq!(Attributes(&[2, 0, 1, 0]).count(), 0, "a length below its own header");
    }
}
