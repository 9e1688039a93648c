//! Many datagrams with one system call: `recvmmsg` (kernel 2.6.33) and
//! `sendmmsg` (kernel 3.0).

use std::{
    io, mem,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::RawFd,
    ptr,
};

/// Datagrams that are taken at once.
pub(super) const BATCH: usize = 32;
/// Bytes that a query may have. Real ones are far below; what is cut off
/// cannot be read and gets FORMERR.
const QUERY_SIZE: usize = 4096;
/// Room for one control message: 16 bytes of header, at most 20 of `in6_pktinfo`.
const CONTROL_SIZE: usize = 64;

/// Buffers for incoming datagrams and the replies to them. The kernel writes
/// addresses and control messages where the replies take them from, so a reply
/// leaves from the address that its query was sent to.
pub(super) struct Batch {
    /// For queries, one after the other.
    queries: Box<[[u8; QUERY_SIZE]; BATCH]>,
    /// For replies.
    replies: [Vec<u8>; BATCH],
    /// Who sent the query and gets the reply.
    peers: Box<[libc::sockaddr_storage; BATCH]>,
    /// What the kernel says of the destination, and we of the source.
    controls: Box<[ControlMessages; BATCH]>,
    /// Whether the socket has control messages.
    told: bool,
    /// Headers for `recvmmsg`.
    incoming: Box<[libc::mmsghdr; BATCH]>,
    /// Headers for `sendmmsg`.
    outgoing: Box<[libc::mmsghdr; BATCH]>,
    /// One buffer for each header of `incoming`.
    incoming_slices: Box<[libc::iovec; BATCH]>,
    /// One buffer for each header of `outgoing`.
    outgoing_slices: Box<[libc::iovec; BATCH]>,
    /// How many headers of `incoming` the kernel has written to since they were prepared.
    used: usize,
}

// SAFETY: the raw pointers in the headers lead into the boxes of the same
// batch, whose contents do not move with it; they are set anew before each
// system call and read by nothing else.
unsafe impl Send for Batch {}

/// ControlMessages messages of one datagram, aligned as `cmsghdr` wants it.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(super) struct ControlMessages([u8; CONTROL_SIZE]);

/// One datagram of a batch, with the room for its reply.
pub(super) struct Datagram<'a> {
    /// The query.
    pub(super) query: &'a [u8],
    /// The reply; left empty: there is none.
    pub(super) reply: &'a mut Vec<u8>,
    /// Who sent it.
    pub(super) peer: &'a libc::sockaddr_storage,
    /// The control messages that came with it.
    pub(super) control: &'a ControlMessages,
    /// Bytes of them.
    pub(super) control_len: usize,
}

impl Batch {
    /// Room for [`BATCH`] datagrams; `told`: with control messages.
    pub(super) fn new(told: bool) -> Self {
        // SAFETY: all-zero bytes are valid headers, addresses and slices: they
        // consist of integers and raw pointers.
        let (header, peer, slice): (libc::mmsghdr, libc::sockaddr_storage, libc::iovec) =
            unsafe { (mem::zeroed(), mem::zeroed(), mem::zeroed()) };
        Self {
            queries: Box::new([[0; QUERY_SIZE]; BATCH]),
            replies: [const { Vec::new() }; BATCH],
            peers: Box::new([peer; BATCH]),
            controls: Box::new([ControlMessages([0; CONTROL_SIZE]); BATCH]),
            told,
            incoming: Box::new([header; BATCH]),
            outgoing: Box::new([header; BATCH]),
            incoming_slices: Box::new([slice; BATCH]),
            outgoing_slices: Box::new([slice; BATCH]),
            used: BATCH,
        }
    }

    /// Waits for a datagram and takes all that are there; says how many.
    pub(super) fn receive(&mut self, socket: RawFd) -> io::Result<usize> {
        for at in 0..self.used {
            self.incoming_slices[at] =
                libc::iovec { iov_base: self.queries[at].as_mut_ptr().cast(), iov_len: QUERY_SIZE };
            let header = &mut self.incoming[at].msg_hdr;
            header.msg_name = (&raw mut self.peers[at]).cast();
            header.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
            header.msg_iov = &raw mut self.incoming_slices[at];
            header.msg_iovlen = 1;
            if self.told {
                header.msg_control = (&raw mut self.controls[at]).cast();
                header.msg_controllen = CONTROL_SIZE;
            }
        }
        // SAFETY: each header leads to buffers of this batch with the sizes given,
        // which live longer than the call; there are BATCH headers.
        let count = unsafe {
            libc::recvmmsg(
                socket,
                self.incoming.as_mut_ptr(),
                BATCH as libc::c_uint,
                libc::MSG_WAITFORONE,
                ptr::null_mut(),
            )
        };
        // After an error some may have been written to.
        self.used = usize::try_from(count).unwrap_or(BATCH);
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// The first `count` datagrams, as [`receive`](Self::receive) left them.
    pub(super) fn datagrams(&mut self, count: usize) -> impl Iterator<Item = Datagram<'_>> {
        let queries = self.queries.iter().zip(self.incoming.iter());
        let rooms = self.replies.iter_mut().zip(self.peers.iter().zip(self.controls.iter()));
        queries.zip(rooms).take(count).map(|((query, header), (reply, (peer, control)))| {
            // The kernel never says more than it had room for.
            let length = (header.msg_len as usize).min(QUERY_SIZE);
            reply.clear();
            let control_len = header.msg_hdr.msg_controllen;
            Datagram { query: &query[..length], reply, peer, control, control_len }
        })
    }

    /// Sends the replies to the first `count` datagrams, those that are not
    /// empty; says how many the kernel did not take.
    pub(super) fn send(&mut self, socket: RawFd, count: usize) -> usize {
        let mut ready = 0;
        for at in 0..count.min(BATCH) {
            let reply = &mut self.replies[at];
            if reply.is_empty() {
                continue;
            }
            self.outgoing_slices[ready] =
                libc::iovec { iov_base: reply.as_mut_ptr().cast(), iov_len: reply.len() };
            let received = &self.incoming[at].msg_hdr;
            let header = &mut self.outgoing[ready].msg_hdr;
            header.msg_name = received.msg_name;
            header.msg_namelen = received.msg_namelen;
            header.msg_iov = &raw mut self.outgoing_slices[ready];
            header.msg_iovlen = 1;
            // None unless the socket has some.
            header.msg_control = received.msg_control;
            header.msg_controllen = received.msg_controllen;
            if self.told {
                self.controls[at].clear_interface(received.msg_controllen);
            }
            ready += 1;
        }
        let (mut sent, mut failed) = (0, 0);
        while sent < ready {
            let rest = &mut self.outgoing[sent..ready];
            // SAFETY: each header leads to a reply, an address and control messages
            // of this batch, which live longer than the call.
            let count = unsafe { libc::sendmmsg(socket, rest.as_mut_ptr(), rest.len() as libc::c_uint, 0) };
            match usize::try_from(count) {
                Ok(count @ 1..) => sent += count,
                _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
                // The first of the rest was not taken: go on behind it.
                _ => {
                    sent += 1;
                    failed += 1;
                }
            }
        }
        failed
    }
}

impl ControlMessages {
    /// Makes what the kernel said of a query fit for its reply: the source
    /// address stays, the interface is left to the routing table.
    pub(super) fn clear_interface(&mut self, length: usize) {
        let length = length.min(CONTROL_SIZE);
        let header_len = size_of::<libc::cmsghdr>();
        if length < header_len {
            return;
        }
        // SAFETY: at least a header was written by the kernel, and `ControlMessages` is
        // aligned for it; every bit pattern is a `cmsghdr`.
        let header: libc::cmsghdr = unsafe { ptr::read(self.0.as_ptr().cast()) };
        let data = &mut self.0[header_len..length];
        match (header.cmsg_level, header.cmsg_type) {
            // struct in_pktinfo: interface, local address, destination. The local
            // address is the one to answer from (ip(7)): for a broadcast or
            // multicast query the destination could not be.
            (libc::IPPROTO_IP, libc::IP_PKTINFO) if data.len() >= 4 => data[..4].fill(0),
            // struct in6_pktinfo: address, interface. A link-local source needs
            // its interface.
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) if data.len() >= 20 => {
                let link_local = data[0] == 0xfe && data[1] & 0xc0 == 0x80;
                if !link_local {
                    data[16..20].fill(0);
                }
            }
            _ => {}
        }
    }

    /// Number of the interface that the datagram came in by, if the kernel told.
    pub(super) fn interface(&self, length: usize) -> Option<u32> {
        let header_len = size_of::<libc::cmsghdr>();
        let data = self.0.get(header_len..length.min(CONTROL_SIZE))?;
        // SAFETY: a whole header was written by the kernel, and `ControlMessages` is
        // aligned for it; every bit pattern is a `cmsghdr`.
        let header: libc::cmsghdr = unsafe { ptr::read(self.0.as_ptr().cast()) };
        let at = match (header.cmsg_level, header.cmsg_type) {
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => 0,
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => 16,
            _ => return None,
        };
        let number = data.get(at..)?.first_chunk()?;
        Some(u32::from_ne_bytes(*number)).filter(|&number| number != 0)
    }

    /// For `sendmsg` of a single reply.
    pub(super) fn as_mut_ptr(&mut self) -> *mut libc::c_void {
        (&raw mut self.0).cast()
    }
}

/// The address in what the kernel wrote; the unspecified one if it is of
/// neither family of IP.
pub(super) fn socket_address(peer: &libc::sockaddr_storage) -> SocketAddr {
    let peer_ptr = &raw const *peer;
    match i32::from(peer.ss_family) {
        libc::AF_INET => {
            // SAFETY: the storage is larger than and aligned for every address, and
            // its family says that it holds this one.
            let address = unsafe { ptr::read(peer_ptr.cast::<libc::sockaddr_in>()) };
            let ip = Ipv4Addr::from_bits(u32::from_be(address.sin_addr.s_addr));
            SocketAddr::from((ip, u16::from_be(address.sin_port)))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let address = unsafe { ptr::read(peer_ptr.cast::<libc::sockaddr_in6>()) };
            let ip = Ipv6Addr::from(address.sin6_addr.s6_addr);
            SocketAddr::from((ip, u16::from_be(address.sin6_port)))
        }
        _ => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
    }
}
