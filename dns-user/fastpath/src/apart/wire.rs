//! The protocol of attacher and server on a unix socket: one byte that carries the descriptors,
//! then lines of JSON.

use std::{
    io::{self, IoSlice, IoSliceMut, Read, Write},
    net::SocketAddr,
    os::{
        fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    time::{Duration, Instant},
};

use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, UnixAddr, getsockopt, recvmsg, sendmsg,
    sockopt::PeerCredentials,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    attach::{gate::Arrival, status::InterfacesStatus},
    map::Shape,
    programs::ProgramStatus,
    publish::table::Limits,
};

/// Largest number of descriptors: five maps, and two of a predecessor.
pub(super) const MOST_DESCRIPTORS: usize = 7;

/// Longest line: the status of some thousand interfaces.
const LONGEST_LINE: usize = 1 << 20;

/// The server's first line.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Wanted {
    /// Layout of the maps expected by the server ([`dns_common::LAYOUT_VERSION`]).
    pub(super) layout: u32,
    pub(super) listen: Vec<SocketAddr>,
}

/// The reply to [`Wanted`]; the maps' descriptors accompany it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Given {
    Maps {
        /// Shapes of `NAMES`, `ENTRIES`, `CONTROL`, `COUNTERS`, and `TAP` if there is one.
        shapes: Vec<Shape>,
        /// Shapes of a predecessor's `NAMES` and `ENTRIES`; empty without one.
        earlier: Vec<Shape>,
        /// Largest number of names by kind.
        limits: Limits,
    },
    /// No maps, with the reason.
    Refused(String),
}

/// Messages from the server after its first request.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromServer {
    /// The server listens on exactly these addresses.
    Listen(Vec<SocketAddr>),
    /// Queries that reached the server's sockets.
    Arrived(Vec<Arrival>),
    /// The maps are filled: attach the programs.
    Filled,
    /// Report the end of an RCU grace period.
    Grace,
    /// Orderly end. If the connection ends without it, the server has died and its programs stay.
    Stop {
        /// Whether to detach everything.
        detach: bool,
    },
}

/// Messages from the attacher after the hand-over.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromAttacher {
    /// The state of interfaces and programs.
    Status(Attached),
    /// The grace period is over; whether the kernel confirmed it.
    GraceOver(bool),
}

/// The state of interfaces and programs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Attached {
    pub(super) interfaces: InterfacesStatus,
    /// The programs needed so far; older attachers do not send them.
    #[serde(default)]
    pub(super) programs: Vec<ProgramStatus>,
    /// Whether all interfaces present at the start have been processed.
    pub(super) ready: bool,
    /// The path at which links and maps are pinned.
    pub(super) pinned_at: Option<PathBuf>,
}

pub(super) fn send(mut stream: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Sends the byte that carries the descriptors.
pub(super) fn send_descriptors(stream: &UnixStream, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let raw: Vec<RawFd> = descriptors.iter().map(|fd| fd.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
    sendmsg::<UnixAddr>(stream.as_raw_fd(), &[IoSlice::new(b"\n")], control, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

/// Receives the byte that carries the descriptors, and returns them.
pub(super) fn receive_descriptors(stream: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let mut byte = [0];
    let mut parts = [IoSliceMut::new(&mut byte)];
    let mut space = nix::cmsg_space!([RawFd; MOST_DESCRIPTORS]);
    let received =
        recvmsg::<UnixAddr>(stream.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut descriptors = Vec::new();
    for message in received.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = message {
            // SAFETY: the kernel has just made these descriptors for us, and nobody else knows them.
            descriptors.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    Ok(descriptors)
}

/// Returns the UID of the peer, according to the kernel (`SO_PEERCRED`, unix(7)).
pub(super) fn peer(stream: &UnixStream) -> io::Result<u32> {
    Ok(getsockopt(stream, PeerCredentials)?.uid())
}

/// Splits a stream into lines.
#[derive(Debug, Default)]
pub(super) struct Lines {
    /// Bytes received of the next lines.
    pending: Vec<u8>,
}

impl Lines {
    /// Waits for the next line, for this time in total: a peer that trickles bytes gains nothing.
    pub(super) fn next_within<T: DeserializeOwned>(
        &mut self,
        stream: &UnixStream,
        patience: Duration,
    ) -> io::Result<T> {
        let end = Instant::now() + patience;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            stream.set_read_timeout(Some(left))?;
            match self.read_once(stream)? {
                Some(line) => return Ok(serde_json::from_slice(&line)?),
                None => continue,
            }
        }
    }

    /// Waits for the next line, up to the stream's read timeout, which keeps the bytes read so far.
    /// The end of the stream is an error, too.
    pub(super) fn next<T: DeserializeOwned>(&mut self, stream: &UnixStream) -> io::Result<T> {
        loop {
            if let Some(line) = self.read_once(stream)? {
                return Ok(serde_json::from_slice(&line)?);
            }
        }
    }

    /// Returns a complete line, or `None` after reading some more bytes.
    fn read_once(&mut self, mut stream: &UnixStream) -> io::Result<Option<Vec<u8>>> {
        if let Some(end) = self.pending.iter().position(|&byte| byte == b'\n') {
            return Ok(Some(self.pending.drain(..=end).collect()));
        }
        if self.pending.len() > LONGEST_LINE {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a line without end"));
        }
        let mut buffer = [0; 4096];
        match stream.read(&mut buffer)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                self.pending.extend_from_slice(&buffer[..count]);
                Ok(None)
            }
        }
    }
}

/// Returns whether an error only means that no data has arrived yet.
pub(super) fn is_nothing_yet(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use std::{io::Seek as _, os::fd::AsFd as _};

    use super::*;

    #[test]
    fn descriptors_and_lines_arrive() {
        let (one, other) = UnixStream::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"shared").unwrap();
        send_descriptors(&one, &[file.as_fd()]).unwrap();
        send(&one, &FromServer::Stop { detach: true }).unwrap();
        send(&one, &FromServer::Listen(vec!["127.0.0.1:53".parse().unwrap()])).unwrap();
        drop(one);
        let mut descriptors = receive_descriptors(&other).unwrap();
        assert_eq!(descriptors.len(), 1);
        let mut received = std::fs::File::from(descriptors.remove(0));
        let mut text = String::new();
        received.rewind().unwrap();
        received.read_to_string(&mut text).unwrap();
        assert_eq!(text, "shared");
        let mut lines = Lines::default();
        assert!(matches!(lines.next(&other).unwrap(), FromServer::Stop { detach: true }));
        assert!(matches!(lines.next(&other).unwrap(), FromServer::Listen(listen) if listen.len() == 1));
        assert_eq!(lines.next::<FromServer>(&other).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(peer(&other).unwrap(), nix::unistd::geteuid().as_raw());
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let (mut one, other) = UnixStream::pair().unwrap();
        let writer = std::thread::spawn(move || one.write_all(&vec![b' '; 2 * LONGEST_LINE]).is_err());
        let error = Lines::default().next::<FromServer>(&other).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        drop(other);
        assert!(writer.join().unwrap());
    }
}
