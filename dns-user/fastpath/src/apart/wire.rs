//! What attacher and server say to each other on a unix socket: one byte that carries the
//! descriptors, then lines of JSON.

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

/// Most descriptors that are handed over: five maps, and two of a predecessor.
pub(super) const MOST_DESCRIPTORS: usize = 7;

/// Longest line: the status of some thousand interfaces.
const LONGEST_LINE: usize = 1 << 20;

/// The first line of the server.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Wanted {
    /// Layout of the maps that it knows ([`dns_common::LAYOUT_VERSION`]).
    pub(super) layout: u32,
    /// Where it listens.
    pub(super) listen: Vec<SocketAddr>,
}

/// The answer; the maps' descriptors go with it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Given {
    /// There are maps.
    Maps {
        /// Shapes of `NAMES`, `ENTRIES`, `CONTROL`, `COUNTERS`, and `TAP` if there is one.
        shapes: Vec<Shape>,
        /// Shapes of a predecessor's `NAMES` and `ENTRIES`; empty: there is none.
        earlier: Vec<Shape>,
        /// How many names fit.
        limits: Limits,
    },
    /// There are none; why.
    Refused(String),
}

/// What the server says afterwards.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromServer {
    /// It listens on exactly these addresses.
    Listen(Vec<SocketAddr>),
    /// These queries reached its sockets.
    Arrived(Vec<Arrival>),
    /// The maps are filled: attach.
    Filled,
    /// Tell when an RCU grace period is over.
    Grace,
    /// It ends in order. The end of the connection without this is a server that died: its
    /// programs stay.
    Stop {
        /// Whether to detach everything.
        detach: bool,
    },
}

/// What the attacher says afterwards.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromAttacher {
    /// How the interfaces are.
    Status(Attached),
    /// The grace period is over; whether the kernel vouches for it.
    GraceOver(bool),
}

/// How the interfaces are, and their programs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Attached {
    /// Interfaces and addresses.
    pub(super) interfaces: InterfacesStatus,
    /// The programs that were needed so far; an older attacher does not tell.
    #[serde(default)]
    pub(super) programs: Vec<ProgramStatus>,
    /// Whether all interfaces of the start have been dealt with.
    pub(super) ready: bool,
    /// Where links and maps are pinned.
    pub(super) pinned_at: Option<PathBuf>,
}

/// Sends a line.
pub(super) fn send(mut stream: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Sends the byte that carries descriptors.
pub(super) fn send_descriptors(stream: &UnixStream, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let raw: Vec<RawFd> = descriptors.iter().map(|fd| fd.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
    sendmsg::<UnixAddr>(stream.as_raw_fd(), &[IoSlice::new(b"\n")], control, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

/// Receives that byte and what it carries.
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

/// The user at the other end, as the kernel knows it (`SO_PEERCRED`, unix(7)).
pub(super) fn peer(stream: &UnixStream) -> io::Result<u32> {
    Ok(getsockopt(stream, PeerCredentials)?.uid())
}

/// Reads lines as they come.
#[derive(Debug, Default)]
pub(super) struct Lines {
    /// What has come of the next lines.
    pending: Vec<u8>,
}

impl Lines {
    /// Waits for the next line, so long in all: a byte now and then gains nothing.
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

    /// Waits for the next line, as long as the stream's read timeout allows; what is pending
    /// is kept then. The end of the stream is an error, too.
    pub(super) fn next<T: DeserializeOwned>(&mut self, stream: &UnixStream) -> io::Result<T> {
        loop {
            if let Some(line) = self.read_once(stream)? {
                return Ok(serde_json::from_slice(&line)?);
            }
        }
    }

    /// A line that is complete, or `None` after some more bytes of it.
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

/// Whether an error is only that nothing has come yet.
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
