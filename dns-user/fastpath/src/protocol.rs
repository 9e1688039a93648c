//! The protocol between server and attacher on a unix socket: one byte that carries the maps'
//! descriptors, then lines of JSON.

use std::{
    io::{self, IoSlice, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    net::SocketAddr,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    time::{Duration, Instant},
};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    attach::{gate::Arrival, status::InterfacesStatus},
    map::Shape,
    programs::ProgramStatus,
    publish::table::Limits,
};

/// Number of maps that a server needs.
pub(super) const SHARED_MAPS: usize = 7;

/// Maximum number of descriptors: the server's maps, and two of a predecessor.
const MOST_DESCRIPTORS: usize = SHARED_MAPS + 2;

/// Maximum length of a line in bytes: the status of some thousand interfaces.
const LONGEST_LINE: usize = 1 << 20;

/// The server's first line.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Request {
    /// Layout of the maps expected by the server ([`dns_common::LAYOUT_VERSION`]).
    pub(super) layout: u32,
    pub(super) listen: Vec<SocketAddr>,
}

/// The attacher's reply to [`Request`]; the maps' descriptors precede it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Response {
    Maps {
        /// Shapes of `NAMES`, `ENTRIES`, `ANSWER_NAMES`, `ANSWER_ENTRIES`, `CONTROL`, `COUNTERS`,
        /// and `TAP`.
        shapes: Vec<Shape>,
        /// Shapes of a predecessor's `NAMES` and `ENTRIES`; empty without one.
        earlier: Vec<Shape>,
        /// Maximum number of names by kind.
        limits: Limits,
    },
    /// The attacher sends no maps, for this reason.
    Refused(String),
}

/// Messages from the server after its request.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ServerMessage {
    /// The server listens on exactly these addresses.
    Listen(Vec<SocketAddr>),
    /// Queries that reached the server's sockets.
    Arrived(Vec<Arrival>),
    /// The maps are filled: attach the programs.
    Filled,
    /// Report the end of an RCU grace period.
    Grace,
    /// Ends the session. If the connection ends without it, the server has died and its programs
    /// stay.
    Stop {
        /// Whether to detach everything.
        detach: bool,
    },
}

/// Messages from the attacher after its response.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum AttacherMessage {
    /// The state of interfaces and programs.
    Status(AttacherStatus),
    /// The grace period has ended; whether the kernel confirmed it.
    GraceOver(bool),
}

/// The state of interfaces and programs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct AttacherStatus {
    pub(super) interfaces: InterfacesStatus,
    /// The programs needed so far; older attachers do not send them.
    #[serde(default)]
    pub(super) programs: Vec<ProgramStatus>,
    /// Whether all interfaces present at the start have been processed.
    pub(super) ready: bool,
    /// The path below which links and maps are pinned.
    pub(super) pinned_at: Option<PathBuf>,
}

pub(super) fn send(mut stream: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Sends the byte that carries the descriptors, at most [`MOST_DESCRIPTORS`].
pub(super) fn send_descriptors(stream: &UnixStream, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for one message"));
    }
    sendmsg(stream, &[IoSlice::new(b"\n")], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives the byte that carries the descriptors, and returns them.
pub(super) fn receive_descriptors(stream: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            descriptors.extend(received);
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
    /// Bytes received, not yet taken as lines.
    pending: Vec<u8>,
}

impl Lines {
    /// Waits for the next line; the limit is for the whole line, even if the peer sends single
    /// bytes.
    pub(super) fn next_within<T: DeserializeOwned>(
        &mut self,
        stream: &UnixStream,
        patience: Duration,
    ) -> io::Result<T> {
        let end = Instant::now() + patience;
        loop {
            if let Some(message) = self.take()? {
                return Ok(message);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            stream.set_read_timeout(Some(left))?;
            self.receive(stream)?;
        }
    }

    /// Waits for the next line, up to the stream's read timeout; bytes read until then are kept.
    /// The end of the stream is an error.
    pub(super) fn next<T: DeserializeOwned>(&mut self, stream: &UnixStream) -> io::Result<T> {
        loop {
            if let Some(message) = self.take()? {
                return Ok(message);
            }
            self.receive(stream)?;
        }
    }

    /// Returns the next line, if it has been received completely.
    pub(super) fn take<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let Some(end) = self.pending.iter().position(|&byte| byte == b'\n') else {
            return match self.pending.len() {
                0..=LONGEST_LINE => Ok(None),
                _ => Err(io::Error::new(io::ErrorKind::InvalidData, "a line without end")),
            };
        };
        let line: Vec<u8> = self.pending.drain(..=end).collect();
        Ok(Some(serde_json::from_slice(&line)?))
    }

    /// Reads once from the stream.
    pub(super) fn receive(&mut self, mut stream: &UnixStream) -> io::Result<()> {
        let mut buffer = [0; 4096];
        match stream.read(&mut buffer)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                self.pending.extend_from_slice(&buffer[..count]);
                Ok(())
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
        send(&one, &ServerMessage::Stop { detach: true }).unwrap();
        send(&one, &ServerMessage::Listen(vec!["127.0.0.1:53".parse().unwrap()])).unwrap();
        drop(one);
        let mut descriptors = receive_descriptors(&other).unwrap();
        assert_eq!(descriptors.len(), 1);
        let mut received = std::fs::File::from(descriptors.remove(0));
        let mut text = String::new();
        received.rewind().unwrap();
        received.read_to_string(&mut text).unwrap();
        assert_eq!(text, "shared");
        let mut lines = Lines::default();
        assert!(matches!(lines.next(&other).unwrap(), ServerMessage::Stop { detach: true }));
        assert!(matches!(lines.next(&other).unwrap(), ServerMessage::Listen(listen) if listen.len() == 1));
        assert_eq!(lines.next::<ServerMessage>(&other).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(peer(&other).unwrap(), nix::unistd::geteuid().as_raw());
    }

    #[test]
    fn surplus_descriptors_are_rejected() {
        let (one, _other) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        let error = send_descriptors(&one, &[file.as_fd(); 2 * MOST_DESCRIPTORS]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let (mut one, other) = UnixStream::pair().unwrap();
        let writer = std::thread::spawn(move || one.write_all(&vec![b' '; 2 * LONGEST_LINE]).is_err());
        let error = Lines::default().next::<ServerMessage>(&other).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        drop(other);
        assert!(writer.join().unwrap());
    }
}
