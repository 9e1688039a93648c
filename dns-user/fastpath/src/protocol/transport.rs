//! Descriptors and lines on a unix socket.

use std::{
    io::{self, IoSlice, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::{Duration, Instant},
};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Serialize, de::DeserializeOwned};

use super::SHARED_MAPS;

/// Maximum number of descriptors: the server's maps, and two of a predecessor.
const MAX_DESCRIPTORS: usize = SHARED_MAPS + 2;

/// Maximum length of a line in bytes: the status of some thousand interfaces.
const MAX_LINE: usize = 1 << 20;

/// Sends a message as a line.
pub fn send(mut stream: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Sends the byte that carries the descriptors, at most [`MAX_DESCRIPTORS`].
pub fn send_descriptors(stream: &UnixStream, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "too many descriptors for one message",
        ));
    }
    // A stream carries descriptors only with at least one byte (unix(7)); this one is the end of an
    // empty line.
    sendmsg(
        stream,
        &[IoSlice::new(b"\n")],
        &mut control,
        // A peer that is gone is an error, not a signal that ends the process.
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

/// Receives the byte that carries the descriptors, and returns them.
pub fn receive_descriptors(stream: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    // There is room for as many as the protocol knows.
    let received = recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut byte)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    // The kernel passes on as many as this process may open, and drops the others without an error (`scm_detach_fds`).
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::other(
            "descriptors were lost; raise the limit of open files (LimitNOFILE)",
        ));
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
pub fn peer(stream: &UnixStream) -> io::Result<u32> {
    Ok(getsockopt(stream, PeerCredentials)?.uid())
}

/// Splits a stream into lines.
#[derive(Debug, Default)]
pub struct Lines {
    /// Bytes received, not yet taken as lines.
    pending: Vec<u8>,
}

impl Lines {
    /// Waits for the next line; the limit is for the whole line, even if the peer sends single bytes.
    pub fn next_within<T: DeserializeOwned>(
        &mut self,
        stream: &UnixStream,
        timeout: Duration,
    ) -> io::Result<T> {
        let end = Instant::now() + timeout;
        loop {
            if let Some(message) = self.take()? {
                return Ok(message);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            // Only what is left: each byte would otherwise buy the peer the whole time again.
            stream.set_read_timeout(Some(left))?;
            self.receive(stream)?;
        }
    }

    /// Waits for the next line, up to the stream's read timeout; bytes read until then are kept.
    /// The end of the stream is an error.
    pub fn next<T: DeserializeOwned>(&mut self, stream: &UnixStream) -> io::Result<T> {
        loop {
            if let Some(message) = self.take()? {
                return Ok(message);
            }
            self.receive(stream)?;
        }
    }

    /// Returns the next line, if it has been received completely.
    pub fn take<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let Some(end) = self.pending.iter().position(|&byte| byte == b'\n') else {
            return match self.pending.len() {
                // Each read adds at most one buffer, so hardly more than the limit is ever kept.
                0..=MAX_LINE => Ok(None),
                _ => Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "a line without end",
                )),
            };
        };
        let line: Vec<u8> = self.pending.drain(..=end).collect();
        Ok(Some(serde_json::from_slice(&line)?))
    }

    /// Waits for bytes, and keeps them.
    pub fn receive(&mut self, mut stream: &UnixStream) -> io::Result<()> {
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
pub fn is_nothing_yet(error: &io::Error) -> bool {
    // SO_RCVTIMEO ends a read with EAGAIN (socket(7)).
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
    )
}

#[cfg(test)]
mod tests {
    use std::{
        io::Seek as _,
        os::fd::{AsFd as _, AsRawFd as _},
    };

    use nix::sys::resource::{Resource, getrlimit, setrlimit};

    use super::*;
    use crate::protocol::ServerMessage;

    #[test]
    fn descriptors_and_lines_arrive() {
        let (one, other) = UnixStream::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"shared").unwrap();
        send_descriptors(&one, &[file.as_fd()]).unwrap();
        send(&one, &ServerMessage::Stop { detach: true }).unwrap();
        send(
            &one,
            &ServerMessage::Listen(vec!["127.0.0.1:53".parse().unwrap()]),
        )
        .unwrap();
        drop(one);
        let mut descriptors = receive_descriptors(&other).unwrap();
        assert_eq!(descriptors.len(), 1);
        let mut received = std::fs::File::from(descriptors.remove(0));
        let mut text = String::new();
        received.rewind().unwrap();
        received.read_to_string(&mut text).unwrap();
        assert_eq!(text, "shared");
        let mut lines = Lines::default();
        assert!(matches!(
            lines.next(&other).unwrap(),
            ServerMessage::Stop { detach: true }
        ));
        assert!(
            matches!(lines.next(&other).unwrap(), ServerMessage::Listen(listen) if listen.len() == 1)
        );
        assert_eq!(
            lines.next::<ServerMessage>(&other).unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
        assert_eq!(peer(&other).unwrap(), nix::unistd::geteuid().as_raw());
    }

    #[test]
    fn lack_of_descriptors_is_an_error() {
        let (one, other) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        send_descriptors(&one, &[file.as_fd(); 3]).unwrap();
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        // Room for one of the three.
        let lowest = file.try_clone().unwrap().as_raw_fd();
        setrlimit(Resource::RLIMIT_NOFILE, lowest as u64 + 1, hard).unwrap();
        let received = receive_descriptors(&other);
        setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
        let error = received.unwrap_err();
        assert!(error.to_string().contains("LimitNOFILE"), "{error}");
        assert_eq!(file.try_clone().unwrap().as_raw_fd(), lowest, "closed");
    }

    #[test]
    fn surplus_descriptors_are_rejected() {
        let (one, _other) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        let error = send_descriptors(&one, &[file.as_fd(); 2 * MAX_DESCRIPTORS]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let (mut one, other) = UnixStream::pair().unwrap();
        let writer = std::thread::spawn(move || one.write_all(&vec![b' '; 2 * MAX_LINE]).is_err());
        let error = Lines::default().next::<ServerMessage>(&other).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        drop(other);
        assert!(writer.join().unwrap());
    }
}
