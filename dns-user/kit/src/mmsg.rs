//! Many datagrams per system call: `recvmmsg` (kernel 2.6.33) and `sendmmsg` (kernel 3.0).

use std::{
    io, mem,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::RawFd,
    ptr,
    time::Duration,
};

/// Buffer size for one control message: 16 bytes of header, at most 20 of `in6_pktinfo`.
const CONTROL_SIZE: usize = 64;

/// Size of the header of a control message.
const HEADER_SIZE: usize = size_of::<libc::cmsghdr>();

//----------- Incoming -------------------------------------------------------

/// Data requested from the kernel in addition to the datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReceiveMetadata {
    /// No further data, for connected sockets.
    Nothing,
    /// The address of each datagram's sender.
    Peers,
    /// Peer addresses and the control messages enabled on the socket.
    PeersAndControls,
}

/// Buffers for `COUNT` incoming datagrams of up to `SIZE` bytes each; longer ones are truncated.
pub struct Incoming<const COUNT: usize, const SIZE: usize> {
    /// Datagram buffers, one after another. Unused pages take no memory.
    rooms: Box<[u8]>,
    peers: Box<[libc::sockaddr_storage; COUNT]>,
    /// Control messages, with the destinations.
    controls: Box<[ControlMessages; COUNT]>,
    metadata: ReceiveMetadata,
    /// Headers; their pointers refer to the boxes in this struct, whose contents never move.
    headers: Box<[libc::mmsghdr; COUNT]>,
    /// One buffer for each header.
    slices: Box<[libc::iovec; COUNT]>,
    /// Number of headers that the kernel may have written to since they were prepared.
    used: usize,
}

/// Control messages of one datagram, aligned for `cmsghdr`.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub struct ControlMessages([u8; CONTROL_SIZE]);

/// A received datagram with its metadata.
pub struct Datagram<'a> {
    /// Payload, truncated to the buffer size.
    pub bytes: &'a [u8],
    /// Address of the sender, if requested.
    pub peer: &'a libc::sockaddr_storage,
    /// Control messages received with it, if requested.
    pub control: &'a ControlMessages,
    /// Length of the control messages in bytes.
    pub control_len: usize,
}

impl<const COUNT: usize, const SIZE: usize> Incoming<COUNT, SIZE> {
    /// Allocates empty buffers that request the given data.
    pub fn new(metadata: ReceiveMetadata) -> Self {
        // SAFETY: all-zero bytes are valid headers, addresses and slices: they
        // consist of integers and raw pointers.
        let (header, peer, slice): (libc::mmsghdr, libc::sockaddr_storage, libc::iovec) =
            unsafe { (mem::zeroed(), mem::zeroed(), mem::zeroed()) };
        Self {
            rooms: vec![0; COUNT * SIZE].into(),
            peers: Box::new([peer; COUNT]),
            controls: Box::new([ControlMessages([0; CONTROL_SIZE]); COUNT]),
            metadata,
            headers: Box::new([header; COUNT]),
            slices: Box::new([slice; COUNT]),
            used: COUNT,
        }
    }

    /// Receives as many queued datagrams as fit and returns their number, at least one. `flags` are
    /// passed to `recvmmsg` and determine whether it waits for the first one.
    pub fn receive(&mut self, socket: RawFd, flags: libc::c_int) -> io::Result<usize> {
        for (at, room) in self
            .rooms
            .chunks_exact_mut(SIZE)
            .enumerate()
            .take(self.used)
        {
            self.slices[at] = libc::iovec {
                iov_base: room.as_mut_ptr().cast(),
                iov_len: SIZE,
            };
            let header = &mut self.headers[at].msg_hdr;
            header.msg_iov = &raw mut self.slices[at];
            header.msg_iovlen = 1;
            if self.metadata >= ReceiveMetadata::Peers {
                header.msg_name = (&raw mut self.peers[at]).cast();
                header.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
            }
            if self.metadata >= ReceiveMetadata::PeersAndControls {
                header.msg_control = (&raw mut self.controls[at]).cast();
                header.msg_controllen = CONTROL_SIZE;
            }
        }
        // SAFETY: every pointer and length in the COUNT headers was written by the loop above, now or in an
        // earlier call: the first call prepares all of them (`used` starts as COUNT), and a later one those
        // that the kernel has changed since. Each pointer leads to a separate element of a box of `self`,
        // whose content never moves, with the length of that element. The boxes are private and borrowed
        // exclusively, so nothing else uses them in the meantime.
        let count = unsafe {
            libc::recvmmsg(
                socket,
                self.headers.as_mut_ptr(),
                COUNT as libc::c_uint,
                flags,
                ptr::null_mut(),
            )
        };
        // After an error the kernel may have written to any header.
        self.used = usize::try_from(count).unwrap_or(COUNT);
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// Returns the first `count` datagrams of the last [`receive`](Self::receive).
    pub fn datagrams(&self, count: usize) -> impl Iterator<Item = Datagram<'_>> {
        let rooms = self.rooms.chunks_exact(SIZE).zip(self.headers.iter());
        let about = self.peers.iter().zip(self.controls.iter());
        rooms
            .zip(about)
            .take(count)
            .map(|((room, header), (peer, control))| {
                // The kernel never returns a length above the buffer's.
                let length = (header.msg_len as usize).min(SIZE);
                Datagram {
                    bytes: &room[..length],
                    peer,
                    control,
                    control_len: header.msg_hdr.msg_controllen,
                }
            })
    }

    /// Returns a header for the reply to the datagram at `at`, without the reply itself: the
    /// destination is the sender, the source the original destination.
    pub fn reply_header(&mut self, at: usize) -> libc::msghdr {
        let mut header = self.headers[at].msg_hdr;
        if self.metadata >= ReceiveMetadata::PeersAndControls {
            self.controls[at].clear_interface(header.msg_controllen);
        }
        (header.msg_iov, header.msg_iovlen, header.msg_flags) = (ptr::null_mut(), 0, 0);
        header
    }
}

//----------- Sending --------------------------------------------------------

/// Sends messages; returns the number rejected by the kernel.
///
/// # Safety
/// The buffers and addresses in each header must outlive the call.
pub unsafe fn send(socket: RawFd, messages: &mut [libc::mmsghdr]) -> usize {
    let mut sent = 0;
    let mut failed = 0;
    while sent < messages.len() {
        let rest = &mut messages[sent..];
        // SAFETY: the headers of `rest` are a slice of that length, and the caller guarantees
        // everything that they point to.
        let count =
            unsafe { libc::sendmmsg(socket, rest.as_mut_ptr(), rest.len() as libc::c_uint, 0) };
        match usize::try_from(count) {
            Ok(count @ 1..) => sent += count,
            _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            // The first remaining message was rejected: skip it.
            _ => {
                sent += 1;
                failed += 1;
            }
        }
    }
    failed
}

//----------- ControlMessages ------------------------------------------------

impl ControlMessages {
    /// Converts the control message of a query to that of its reply: keeps the source address and
    /// leaves the interface to the routing table.
    pub fn clear_interface(&mut self, length: usize) {
        let Some((kind, _)) = self.first(length) else {
            return;
        };
        let data = &mut self.0[HEADER_SIZE..length.min(CONTROL_SIZE)];
        match kind {
            // struct in_pktinfo: interface, local address, destination. The local address is the
            // source of the reply (ip(7)); the destination may be a broadcast or multicast address.
            (libc::IPPROTO_IP, libc::IP_PKTINFO) if data.len() >= 4 => data[..4].fill(0),
            // struct in6_pktinfo: address, interface. A link-local source requires its interface.
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) if data.len() >= 20 => {
                let link_local = data[0] == 0xfe && data[1] & 0xc0 == 0x80;
                if !link_local {
                    data[16..20].fill(0);
                }
            }
            _ => {}
        }
    }

    /// Returns the index of the receiving interface, if the kernel reported it.
    pub fn interface(&self, length: usize) -> Option<u32> {
        self.destination(length).map(|(ifindex, _)| ifindex)
    }

    /// Returns the receiving interface and the destination address; IPv4-mapped addresses become IPv4.
    pub fn destination(&self, length: usize) -> Option<(u32, IpAddr)> {
        let (kind, data) = self.first(length)?;
        let (ifindex, address) = match kind {
            // struct in_pktinfo: interface, local address, destination.
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => (
                data.first_chunk()?,
                IpAddr::from(*data.get(8..)?.first_chunk::<4>()?),
            ),
            // struct in6_pktinfo: destination, interface.
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => (
                data.get(16..)?.first_chunk()?,
                IpAddr::from(*data.first_chunk::<16>()?).to_canonical(),
            ),
            _ => return None,
        };
        Some((u32::from_ne_bytes(*ifindex), address)).filter(|&(ifindex, _)| ifindex != 0)
    }

    /// Returns when the kernel received the packet, as time since 1970, with `SO_TIMESTAMPNS`.
    pub fn timestamp(&self, length: usize) -> Option<Duration> {
        let (kind, data) = self.first(length)?;
        if kind != (libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS) {
            return None;
        }
        // struct timespec of 64-bit programs: seconds, nanoseconds.
        let seconds = u64::from_ne_bytes(*data.first_chunk()?);
        let nanos = u64::from_ne_bytes(*data.get(8..)?.first_chunk()?);
        Some(Duration::new(seconds, u32::try_from(nanos).ok()?))
    }

    /// Returns level and type of the first message, and its data; `None` if `length` bytes hold no whole header.
    #[inline]
    fn first(&self, length: usize) -> Option<((libc::c_int, libc::c_int), &[u8])> {
        let data = self.0.get(HEADER_SIZE..length.min(CONTROL_SIZE))?;
        // SAFETY: a whole header was written by the kernel, and `ControlMessages` is
        // aligned for it; every bit pattern is a `cmsghdr`.
        let header: libc::cmsghdr = unsafe { ptr::read(self.0.as_ptr().cast()) };
        Some(((header.cmsg_level, header.cmsg_type), data))
    }

    /// Returns the pointer for `sendmsg` with a single reply.
    pub fn as_mut_ptr(&mut self) -> *mut libc::c_void {
        (&raw mut self.0).cast()
    }
}

/// Converts an address written by the kernel; returns the unspecified address if it is not an IP address.
pub fn socket_address(peer: &libc::sockaddr_storage) -> SocketAddr {
    let peer_ptr = &raw const *peer;
    match i32::from(peer.ss_family) {
        libc::AF_INET => {
            // SAFETY: the storage is larger than and aligned for every address, and
            // its family identifies this one.
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

#[cfg(test)]
mod tests {
    use std::{net::UdpSocket, os::fd::AsRawFd as _};

    use nix::sys::socket::{setsockopt, sockopt};

    use super::*;

    /// Returns a control message as the kernel writes it, with its length.
    fn control(level: libc::c_int, kind: libc::c_int, data: &[u8]) -> (ControlMessages, usize) {
        let length = 16 + data.len();
        // struct cmsghdr of 64-bit programs: length, level, type.
        let bytes = [
            &(length as u64).to_ne_bytes()[..],
            &level.to_ne_bytes(),
            &kind.to_ne_bytes(),
            data,
        ]
        .concat();
        let mut control = ControlMessages([0; CONTROL_SIZE]);
        control.0[..length].copy_from_slice(&bytes);
        (control, length)
    }

    fn ipv4_info(interface: u32) -> (ControlMessages, usize) {
        let data = [
            &interface.to_ne_bytes()[..],
            &[10, 0, 0, 1],
            &[10, 0, 0, 255],
        ]
        .concat();
        control(libc::IPPROTO_IP, libc::IP_PKTINFO, &data)
    }

    fn ipv6_info(address: &str, interface: u32) -> (ControlMessages, usize) {
        let address: Ipv6Addr = address.parse().unwrap();
        let data = [&address.octets()[..], &interface.to_ne_bytes()].concat();
        control(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &data)
    }

    #[test]
    fn control_message_gives_destination() {
        let (control_v4, length) = ipv4_info(7);
        let broadcast = IpAddr::from([10, 0, 0, 255]);
        assert_eq!(control_v4.destination(length), Some((7, broadcast)));
        assert_eq!(control_v4.destination(1000), Some((7, broadcast)));
        assert_eq!(control_v4.interface(length), Some(7));
        for cut in [0, 15, 16, 19, length - 1] {
            assert_eq!(control_v4.destination(cut), None, "{cut}");
            assert_eq!(control_v4.interface(cut), None, "{cut}");
        }
        for (address, found) in [
            ("2001:db8::1", "2001:db8::1"),
            // An IPv4 client of a socket for both families.
            ("::ffff:192.0.2.1", "192.0.2.1"),
        ] {
            let (control, length) = ipv6_info(address, 9);
            assert_eq!(
                control.destination(length),
                Some((9, found.parse().unwrap()))
            );
            assert_eq!(control.destination(length - 1), None);
        }
        // The kernel did not name the interface.
        let (unknown, length) = ipv4_info(0);
        assert_eq!(unknown.destination(length), None);
        assert_eq!(unknown.interface(length), None);
        for (level, kind) in [
            (libc::IPPROTO_IP, libc::IP_TTL),
            (libc::IPPROTO_IPV6, libc::IP_PKTINFO),
            (libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS),
        ] {
            let (other, length) = control(level, kind, &[1; 24]);
            assert_eq!(other.destination(length), None, "{level} {kind}");
        }
    }

    #[test]
    fn kernel_gives_packet_time() {
        let timespec =
            |seconds: u64, nanos: u64| [seconds.to_ne_bytes(), nanos.to_ne_bytes()].concat();
        let stamp = |data: &[u8]| control(libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS, data);
        let (control_of_time, length) = stamp(&timespec(1_700_000_000, 250_000_000));
        assert_eq!(
            control_of_time.timestamp(length),
            Some(Duration::new(1_700_000_000, 250_000_000))
        );
        for cut in [0, 15, 16, 24, length - 1] {
            assert_eq!(control_of_time.timestamp(cut), None, "{cut}");
        }
        let (damaged, length) = stamp(&timespec(1, u64::MAX));
        assert_eq!(damaged.timestamp(length), None);
        for (level, kind) in [
            (libc::IPPROTO_IP, libc::SCM_TIMESTAMPNS),
            (libc::SOL_SOCKET, libc::IP_PKTINFO),
        ] {
            let (other, length) = control(level, kind, &timespec(1, 2));
            assert_eq!(other.timestamp(length), None, "{level} {kind}");
        }
    }

    /// fe80::/10 exists at each interface; any other source has a route.
    #[test]
    fn link_local_replies_name_interface() {
        for (address, is_kept) in [
            ("fe80::1", true),
            ("febf::1", true),
            ("fec0::1", false),
            ("fe7f::1", false),
            ("ff80::1", false),
            ("2001:db8::1", false),
            ("::ffff:192.0.2.1", false),
        ] {
            let (mut control, length) = ipv6_info(address, 7);
            let before = control.0;
            control.clear_interface(length);
            let interface = if is_kept { 7_u32 } else { 0 };
            assert_eq!(control.0[32..36], interface.to_ne_bytes(), "{address}");
            assert_eq!(control.0[..32], before[..32], "{address}");
        }
        let (mut control, length) = ipv4_info(7);
        assert_eq!(control.as_mut_ptr(), control.0.as_mut_ptr().cast());
        let before = control.0;
        control.clear_interface(length);
        assert_eq!(control.0[16..20], [0; 4]);
        // The source of the reply stays.
        assert_eq!(control.0[20..28], [10, 0, 0, 1, 10, 0, 0, 255]);
        assert_eq!(control.0[..16], before[..16]);
    }

    #[test]
    fn only_whole_packet_infos_change() {
        let ipv4 = ipv4_info(7).0;
        let ipv6 = ipv6_info("2001:db8::1", 7).0;
        let other = control(libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS, &[9; 20]).0;
        for (before, length, is_changed) in [
            (ipv4, 0, false),
            (ipv4, 10, false),
            (ipv4, 16, false),
            (ipv4, 19, false),
            (ipv4, 20, true),
            (ipv4, 1000, true),
            (ipv6, 35, false),
            (ipv6, 36, true),
            (other, 36, false),
        ] {
            let mut after = before;
            after.clear_interface(length);
            assert_eq!(after.0 != before.0, is_changed, "{length}");
        }
    }

    /// Returns a socket and one that is connected to it.
    fn sockets(address: &str) -> [UdpSocket; 2] {
        let receiver = UdpSocket::bind(address).unwrap();
        let sender = UdpSocket::bind(address).unwrap();
        sender.connect(receiver.local_addr().unwrap()).unwrap();
        if receiver.local_addr().unwrap().is_ipv4() {
            setsockopt(&receiver, sockopt::Ipv4PacketInfo, &true).unwrap();
        } else {
            setsockopt(&receiver, sockopt::Ipv6RecvPacketInfo, &true).unwrap();
        }
        let limit = Some(Duration::from_secs(60));
        sender.set_read_timeout(limit).unwrap();
        [receiver, sender]
    }

    fn texts(incoming: &Incoming<2, 8>, count: usize) -> Vec<String> {
        incoming
            .datagrams(count)
            .map(|datagram| String::from_utf8_lossy(datagram.bytes).into_owned())
            .collect()
    }

    #[test]
    fn datagrams_carry_requested_messages() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            if address.starts_with('[') && !test_support::requirements::ipv6() {
                continue;
            }
            for metadata in [
                ReceiveMetadata::Nothing,
                ReceiveMetadata::Peers,
                ReceiveMetadata::PeersAndControls,
            ] {
                let [receiver, sender] = sockets(address);
                for text in ["first", "much too long", "third"] {
                    sender.send(text.as_bytes()).unwrap();
                }
                let mut incoming = Incoming::<2, 8>::new(metadata);
                let socket = receiver.as_raw_fd();
                assert_eq!(incoming.receive(socket, libc::MSG_DONTWAIT).unwrap(), 2);
                assert_eq!(texts(&incoming, 2), ["first", "much too"]);
                assert_eq!(texts(&incoming, 1), ["first"]);
                for datagram in incoming.datagrams(2) {
                    let peer = match metadata {
                        ReceiveMetadata::Nothing => "0.0.0.0:0".parse().unwrap(),
                        _ => sender.local_addr().unwrap(),
                    };
                    assert_eq!(socket_address(datagram.peer), peer);
                    let destination = datagram.control.destination(datagram.control_len);
                    let own = match metadata {
                        ReceiveMetadata::PeersAndControls => Some(sender.peer_addr().unwrap().ip()),
                        _ => None,
                    };
                    assert_eq!(destination.map(|(_, address)| address), own, "{metadata:?}");
                }
                assert_eq!(incoming.receive(socket, libc::MSG_DONTWAIT).unwrap(), 1);
                assert_eq!(texts(&incoming, 1), ["third"]);
                let error = incoming.receive(socket, libc::MSG_DONTWAIT).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
            }
        }
    }

    #[test]
    fn reply_goes_to_the_sender() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            if address.starts_with('[') && !test_support::requirements::ipv6() {
                continue;
            }
            let [receiver, sender] = sockets(address);
            sender.send(b"query").unwrap();
            let mut incoming = Incoming::<2, 8>::new(ReceiveMetadata::PeersAndControls);
            incoming
                .receive(receiver.as_raw_fd(), libc::MSG_WAITFORONE)
                .unwrap();
            let mut header = incoming.reply_header(0);
            let datagram = incoming.datagrams(1).next().unwrap();
            assert_eq!(datagram.control.interface(datagram.control_len), None);
            assert!(header.msg_iov.is_null());
            assert_eq!((header.msg_iovlen, header.msg_flags), (0, 0));

            let mut reply = *b"reply";
            let mut part = libc::iovec {
                iov_base: reply.as_mut_ptr().cast(),
                iov_len: reply.len(),
            };
            header.msg_iov = &raw mut part;
            header.msg_iovlen = 1;
            let mut lost = header;
            // An address that is cut off.
            lost.msg_namelen = 1;
            let mut messages = [header, lost, header].map(|msg_hdr| libc::mmsghdr {
                msg_hdr,
                msg_len: 0,
            });
            // SAFETY: the headers lead to `part`, `reply` and `incoming`, which live on.
            let rejected = unsafe { send(receiver.as_raw_fd(), &mut messages) };
            assert_eq!(rejected, 1);
            for _ in 0..2 {
                let mut read = [0; 8];
                let length = sender.recv(&mut read).unwrap();
                assert_eq!(read[..length], *b"reply");
            }
        }
    }
}
