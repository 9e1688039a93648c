//! The packet socket: sees the observed server's packets on all interfaces, and sends nothing.

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsRawFd, OwnedFd},
    time::Duration,
};

use dns_kit::mmsg::{Datagram, Incoming, ReceiveMetadata};
use nix::{
    errno::Errno,
    sys::socket::{AddressFamily, SockFlag, SockType, setsockopt, socket, sockopt},
};

use crate::{
    filter::{MAX_ENDPOINTS, Share, program},
    frames::{self, Packet, Unreadable},
};

/// Packets read with one system call.
const BATCH: usize = 32;
/// Size of the largest packet.
const PACKET: usize = 65_600;
/// Requested size of the socket's queue in bytes; the kernel may grant less (`net.core.rmem_max`).
const QUEUE: usize = 4 << 20;

/// Why packets cannot be seen.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The process lacks the capability.
    #[error(
        "cannot open a packet socket: {0}; watching needs the capability CAP_NET_RAW and no other: run as root, \
         or with `setpriv --ambient-caps +net_raw --inh-caps +net_raw`, or ask the server itself with --ask ADDRESS"
    )]
    NotPermitted(io::Error),
    /// The server listens on more addresses than a filter holds.
    #[error("the server listens on {0} addresses; at most {MAX_ENDPOINTS} can be watched")]
    TooManyEndpoints(usize),
    /// Another failure of the system.
    #[error("packet socket: {0}")]
    Other(#[from] io::Error),
}

/// A packet socket with its filter.
pub struct Capture {
    socket: OwnedFd,
    endpoints: Vec<SocketAddr>,
    incoming: Box<Incoming<BATCH, PACKET>>,
}

/// A packet as it was seen.
#[derive(Clone, Debug)]
pub struct SeenPacket<'a> {
    /// The packet, or why it cannot be read.
    pub packet: Result<Packet<'a>, Unreadable>,
    /// Number of the interface.
    pub interface: u32,
    /// When the kernel saw it, as time since 1970.
    pub stamp: Option<Duration>,
}

/// Packets since the last question.
#[derive(Clone, Copy, Debug, Default)]
pub struct Statistics {
    /// Packets that the filter passed.
    pub passed: u64,
    /// Those of them that the queue had no room for.
    pub dropped: u64,
}

impl Capture {
    /// Opens the socket for packets to and from these endpoints.
    ///
    /// # Errors
    ///
    /// Fails if the process lacks CAP_NET_RAW.
    pub fn open(endpoints: &[SocketAddr]) -> Result<Self, CaptureError> {
        if endpoints.len() > MAX_ENDPOINTS {
            return Err(CaptureError::TooManyEndpoints(endpoints.len()));
        }
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        // Without a protocol it receives nothing, so that no packet comes before the filter is attached.
        let socket = match socket(AddressFamily::Packet, SockType::Datagram, flags, None) {
            Ok(socket) => socket,
            Err(error @ (Errno::EPERM | Errno::EACCES)) => {
                return Err(CaptureError::NotPermitted(error.into()));
            }
            Err(error) => return Err(CaptureError::Other(error.into())),
        };
        let capture = Self {
            socket,
            endpoints: endpoints.to_vec(),
            incoming: Box::new(Incoming::new(ReceiveMetadata::PeersAndControls)),
        };
        capture.pass(Share::ALL)?;
        // While a comparison takes long, packets wait here instead of being lost.
        setsockopt(&capture.socket, sockopt::RcvBuf, &QUEUE).map_err(io::Error::from)?;
        // Packets wait in the queue: only the kernel's time of arrival measures the server's
        // latency.
        setsockopt(&capture.socket, sockopt::ReceiveTimestampns, &true).map_err(io::Error::from)?;
        // Last: from now on packets arrive.
        capture.receive_all_protocols()?;
        Ok(capture)
    }

    /// Lets a share of the packets pass.
    pub fn pass(&self, share: Share) -> io::Result<()> {
        let mut program = program(&self.endpoints, share);
        let filter = libc::sock_fprog {
            len: u16::try_from(program.len()).map_err(io::Error::other)?,
            filter: program.as_mut_ptr(),
        };
        // SAFETY: the program outlives the call, which copies it; its length is that of the vector.
        let result = unsafe {
            libc::setsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_FILTER,
                (&raw const filter).cast(),
                size_of_val(&filter) as libc::socklen_t,
            )
        };
        checked(result)
    }

    /// Begins to receive, on all interfaces. "Binding" a packet socket takes no port or address.
    fn receive_all_protocols(&self) -> io::Result<()> {
        // SAFETY: all-zero bytes are a valid `sockaddr_ll`.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        // SAFETY: the address outlives the call and has this length.
        let result = unsafe {
            libc::bind(
                self.socket.as_raw_fd(),
                (&raw const address).cast(),
                size_of_val(&address) as libc::socklen_t,
            )
        };
        checked(result)
    }

    /// Reads queued packets and returns their number, 0 if there is none.
    pub fn receive(&mut self) -> io::Result<usize> {
        match self
            .incoming
            .receive(self.socket.as_raw_fd(), libc::MSG_DONTWAIT)
        {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) =>
            {
                Ok(0)
            }
            // An interface that goes down; the others stay.
            Err(error) if error.raw_os_error() == Some(libc::ENETDOWN) => Ok(0),
            result => result,
        }
    }

    /// Returns the packets read last.
    pub fn packets(&self, count: usize) -> impl Iterator<Item = SeenPacket<'_>> {
        self.incoming.datagrams(count).filter_map(seen)
    }

    /// Returns the packets since the last call.
    pub fn statistics(&self) -> io::Result<Statistics> {
        let mut statistics = libc::tpacket_stats {
            tp_packets: 0,
            tp_drops: 0,
        };
        let mut length = size_of_val(&statistics) as libc::socklen_t;
        // SAFETY: the kernel writes at most `length` bytes to the structure.
        let result = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                (&raw mut statistics).cast(),
                &raw mut length,
            )
        };
        checked(result)?;
        Ok(Statistics {
            passed: statistics.tp_packets.into(),
            dropped: statistics.tp_drops.into(),
        })
    }
}

fn checked(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Returns a packet, unless another copy of it is seen.
fn seen(datagram: Datagram<'_>) -> Option<SeenPacket<'_>> {
    let peer = &raw const *datagram.peer;
    // SAFETY: the kernel wrote a `sockaddr_ll`, which the storage is large enough for and aligned to.
    let link: libc::sockaddr_ll = unsafe { std::ptr::read(peer.cast()) };
    // A packet on `lo` passes the socket on its way out and on its way in.
    let is_outgoing = link.sll_pkttype == libc::PACKET_OUTGOING;
    if is_outgoing && link.sll_hatype == libc::ARPHRD_LOOPBACK {
        return None;
    }
    // Packets between others, which a switch floods or a bridge in promiscuous mode passes.
    if link.sll_pkttype == libc::PACKET_OTHERHOST {
        return None;
    }
    Some(SeenPacket {
        packet: frames::read(u16::from_be(link.sll_protocol), datagram.bytes),
        interface: u32::try_from(link.sll_ifindex).unwrap_or(0),
        stamp: datagram.control.timestamp(datagram.control_len),
    })
}
