//! The server's side of privilege separation: receives the maps from the attacher and requests that
//! it attach the programs. Their protocol on a unix socket: one byte that carries the maps' descriptors, then
//! lines of JSON.

use std::{
    fmt::Display,
    io::{self, IoSlice, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    net::{Shutdown, SocketAddr},
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{Sender, channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use dns_common::LAYOUT_VERSION;
use dns_core::{config::OnStop, name::Name};
use dns_kit::threads::{self, OnPanic};
use nix::{
    sys::socket::{getsockopt, sockopt::PeerCredentials},
    unistd::User,
};
use parking_lot::Mutex;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::sync::watch;

use crate::{
    FastPathError,
    attach::{gate::Arrival, reconcile::report::InterfacesStatus, work::Work},
    map::Shape,
    memory::{Memory, SizedMap, names_in},
    object::SHARED_MAPS,
    programs::ProgramStatus,
    publish::{lease::Lease, table::Limits},
};

/// Time limit for the attacher to create its maps, which takes a second on a small machine.
const LOAD_TIMEOUT: Duration = Duration::from_secs(60);

/// Longest wait for the attacher's messages.
const ROUND: Duration = Duration::from_secs(1);

/// Time limit for the attacher to detach everything: a thousand interfaces take some seconds.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// A connection to an attacher: a separate service, a child process, or a thread of this process.
#[derive(Debug)]
pub struct AttacherConnection(UnixStream);

impl From<UnixStream> for AttacherConnection {
    /// Uses a connected stream without checking who is at the other end.
    fn from(stream: UnixStream) -> Self {
        Self(stream)
    }
}

impl AttacherConnection {
    /// Connects to the service at `socket`, which must run as root, as this process's user, or as `user`.
    pub fn open(socket: &Path, user: Option<&str>) -> Result<Self, FastPathError> {
        let stream = UnixStream::connect(socket).map_err(|error| {
            FastPathError::NoAttacher(format!(
                "cannot connect to the attacher at {}: {error}",
                socket.display()
            ))
        })?;
        let found = peer(&stream).map_err(|error| refused(&error))?;
        let known = user.and_then(|name| User::from_name(name).ok().flatten());
        let is_known = known.is_some_and(|known| known.uid.as_raw() == found);
        if found != 0 && found != nix::unistd::geteuid().as_raw() && !is_known {
            return Err(refused(&format_args!(
                "it runs as user {found}: neither root, nor this server's user, nor xdp.attach_user"
            )));
        }
        Ok(Self(stream))
    }

    /// Receives the connection that the server's own attacher offers on `standby`
    /// ([`crate::offer_connection`]).
    pub fn receive(standby: &UnixStream, timeout: Duration) -> Result<Self, FastPathError> {
        standby
            .set_read_timeout(Some(timeout))
            .map_err(|error| FastPathError::io("waiting for the attacher", error))?;
        match receive_descriptors(standby) {
            Ok(descriptors) => {
                let stream = descriptors
                    .into_iter()
                    .next()
                    .ok_or_else(FastPathError::ended)?;
                Ok(Self(stream.into()))
            }
            Err(error) if is_nothing_yet(&error) => Err(FastPathError::NoAttacher(
                "the attacher was killed and is being started again".to_owned(),
            )),
            Err(_) => Err(FastPathError::ended()),
        }
    }

    /// Detaches what an earlier server at these addresses left.
    pub fn detach_earlier(self, listen: &[SocketAddr]) -> Result<(), FastPathError> {
        let ReceivedMaps {
            stream, mut lines, ..
        } = self.request_maps(listen)?;
        let failed = |error| FastPathError::io("asking the attacher to detach", error);
        send(&stream, &ServerMessage::Stop { detach: true }).map_err(failed)?;
        stream
            .set_read_timeout(Some(STOP_TIMEOUT))
            .map_err(failed)?;
        // Its last message is followed by the end of the connection.
        while lines.next::<AttacherMessage>(&stream).is_ok() {}
        Ok(())
    }

    pub(crate) fn request_maps(self, listen: &[SocketAddr]) -> Result<ReceivedMaps, FastPathError> {
        let Self(stream) = self;
        let failed = |error: io::Error| {
            FastPathError::NoAttacher(format!("the attacher has sent no maps: {error}"))
        };
        stream
            .set_read_timeout(Some(LOAD_TIMEOUT))
            .map_err(failed)?;
        send(
            &stream,
            &Request {
                layout: LAYOUT_VERSION,
                listen: listen.to_vec(),
            },
        )
        .map_err(failed)?;
        let descriptors = receive_descriptors(&stream).map_err(failed)?;
        let mut lines = Lines::default();
        let (shapes, earlier, limits) = match lines.next(&stream).map_err(failed)? {
            Response::Maps {
                shapes,
                earlier,
                limits,
            } => (shapes, earlier, limits),
            Response::Refused(why) => return Err(refused(&why)),
        };
        let mut maps = sized(descriptors, shapes.into_iter().chain(earlier))
            .ok_or_else(|| refused(&"it sent different maps than announced"))?
            .into_iter();
        let received: Vec<SizedMap> = maps.by_ref().take(SHARED_MAPS).collect();
        let received = received
            .try_into()
            .map_err(|_| refused(&"it sent too few maps"))?;
        let earlier = match (maps.next(), maps.next()) {
            (Some(names), Some(entries)) => Some(names_in(
                (names.fd.as_fd(), names.shape),
                (entries.fd.as_fd(), entries.shape),
                limits.max_names + limits.negative,
            )
            .inspect_err(
                |error| tracing::warn!(%error, "cannot read the predecessor's learned names; starting without them"),
            )
            .unwrap_or_default()),
            _ => None,
        };
        let memory = Memory::of(received, limits)?;
        Ok(ReceivedMaps {
            stream,
            lines,
            memory,
            earlier,
        })
    }
}

fn refused(why: &dyn Display) -> FastPathError {
    FastPathError::Failed(format!("the attacher refused to load programs: {why}"))
}

/// Maps received from the attacher, and the connection on which they arrived.
pub(crate) struct ReceivedMaps {
    stream: UnixStream,
    lines: Lines,
    memory: Memory,
    /// Names learned by a predecessor, whose programs may still answer; `None` without one.
    earlier: Option<Vec<Name>>,
}

/// Pairs descriptors with their shapes; `None` if their numbers differ.
fn sized(descriptors: Vec<OwnedFd>, shapes: impl Iterator<Item = Shape>) -> Option<Vec<SizedMap>> {
    let shapes: Vec<Shape> = shapes.collect();
    let same = descriptors.len() == shapes.len();
    same.then(|| {
        let pairs = descriptors.into_iter().zip(shapes);
        pairs.map(|(fd, shape)| SizedMap { fd, shape }).collect()
    })
}

/// Serialises messages to the attacher.
#[derive(Clone)]
struct Messenger(Arc<Mutex<UnixStream>>);

impl Messenger {
    /// Sends a message. If the attacher does not accept it, the connection is unusable: half a line
    /// may have been sent.
    fn send(&self, message: &ServerMessage) -> io::Result<()> {
        let Self(stream) = self;
        let stream = stream.lock();
        send(&stream, message).inspect_err(|_| {
            // Fails only if the connection is already gone.
            let _ = stream.shutdown(Shutdown::Both);
        })
    }
}

/// Waits for a grace period; `false` if the attacher cannot confirm it.
pub(crate) type GraceWait = Box<dyn FnMut() -> bool + Send>;

/// A connection whose maps are not filled yet; becomes a [`Session`]. Filling them already needs
/// grace periods.
pub(crate) struct Pending {
    messenger: Messenger,
    stream: UnixStream,
    lines: Lines,
    grace: Sender<bool>,
    /// Becomes true when the attacher has processed all interfaces present at the start.
    pub(crate) ready: watch::Sender<bool>,
}

impl ReceivedMaps {
    /// Splits off the memory, the names learned by a predecessor, the connection, and the wait for grace
    /// periods.
    pub(crate) fn split(self) -> io::Result<(Memory, Option<Vec<Name>>, Pending, GraceWait)> {
        let Self {
            stream,
            lines,
            memory,
            earlier,
        } = self;
        stream.set_write_timeout(Some(ROUND))?;
        let messenger = Messenger(Arc::new(Mutex::new(stream.try_clone()?)));
        let (grace, over) = channel();
        let (ready, _) = watch::channel(false);
        let pending = Pending {
            messenger: messenger.clone(),
            stream,
            lines,
            grace,
            ready,
        };
        let wait =
            move || messenger.send(&ServerMessage::Grace).is_ok() && over.recv().unwrap_or(false);
        Ok((memory, earlier, pending, Box::new(wait)))
    }
}

impl Pending {
    /// Returns the function that requests that the programs be attached, because the maps hold enough to answer from.
    pub(crate) fn request_attach(&self) -> Box<dyn FnOnce() + Send> {
        let messenger = self.messenger.clone();
        // If the attacher is gone, the session reports it.
        Box::new(move || drop(messenger.send(&ServerMessage::Filled)))
    }

    /// Starts to follow the attacher's messages.
    ///
    /// Its signs of life keep `lease` alive.
    pub(crate) fn follow(self, lease: Lease) -> io::Result<Session> {
        let messenger = self.messenger.clone();
        let attached = Arc::new(Mutex::new(AttacherStatus::default()));
        let work = Arc::new(Mutex::new(Work::default()));
        let end = Arc::new(Mutex::new(None));
        let ready = self.ready.subscribe();
        let (is_lost, lost) = watch::channel(false);
        let listener = Listener {
            connection: self,
            attached: attached.clone(),
            work: work.clone(),
            end: end.clone(),
            lease,
        };
        let thread = threads::spawn("attacher", OnPanic::EndProcess, move || {
            if let Err(problem) = listener.run() {
                tracing::warn!(%problem, "connection to the attacher lost: new interfaces are answered from userspace");
            }
            is_lost.send_replace(true);
        })?;
        Ok(Session {
            messenger,
            attached,
            work,
            ready,
            lost,
            end,
            thread,
        })
    }
}

/// A session with the attacher, which attaches programs on our behalf.
pub(crate) struct Session {
    messenger: Messenger,
    pub(crate) attached: Arc<Mutex<AttacherStatus>>,
    /// What the attacher has done, according to its last message about it.
    pub(crate) work: Arc<Mutex<Work>>,
    /// Becomes true when the attacher has processed all interfaces present at the start.
    pub(crate) ready: watch::Receiver<bool>,
    /// Becomes true when the attacher is gone.
    pub(crate) lost: watch::Receiver<bool>,
    /// Time at which to stop listening; `None`: never.
    end: Arc<Mutex<Option<Instant>>>,
    thread: JoinHandle<()>,
}

impl Session {
    pub(crate) fn set_listen(&self, endpoints: &[SocketAddr]) {
        // If the attacher is gone, the next connection sends the addresses.
        let _ = self
            .messenger
            .send(&ServerMessage::Listen(endpoints.to_vec()));
    }

    /// Reports the queries that reached the server's sockets; returns whether the attacher takes reports.
    pub(crate) fn report(&self, arrivals: Vec<Arrival>) -> bool {
        self.messenger
            .send(&ServerMessage::Arrived(arrivals))
            .is_ok()
    }

    /// Detaches everything, or leaves it to a successor.
    pub(crate) fn stop(self, on_stop: OnStop) {
        let Self {
            messenger,
            attached: _,
            work: _,
            ready: _,
            lost: _,
            end,
            thread,
        } = self;
        *end.lock() = Some(Instant::now() + STOP_TIMEOUT);
        // Without an attacher nothing changes.
        let _ = messenger.send(&ServerMessage::Stop {
            detach: on_stop == OnStop::Detach,
        });
        if thread.join().is_err() {
            tracing::error!("the thread that reads from the attacher panicked");
        }
    }
}

struct Listener {
    connection: Pending,
    attached: Arc<Mutex<AttacherStatus>>,
    work: Arc<Mutex<Work>>,
    /// Time at which to stop listening; `None`: never.
    end: Arc<Mutex<Option<Instant>>>,
    lease: Lease,
}

impl Listener {
    /// Reads until the end; an error if the attacher goes away before.
    fn run(mut self) -> io::Result<()> {
        self.connection.stream.set_read_timeout(Some(ROUND))?;
        loop {
            let end = *self.end.lock();
            match self.connection.lines.next(&self.connection.stream) {
                Ok(AttacherMessage::Status(attached)) => {
                    let is_ready = attached.ready;
                    *self.attached.lock() = attached;
                    let ready = &self.connection.ready;
                    ready.send_if_modified(|ready| !std::mem::replace(ready, is_ready) && is_ready);
                }
                Ok(AttacherMessage::Watching { at_ns, work }) => {
                    self.lease.watched(at_ns);
                    *self.work.lock() = work;
                }
                Ok(AttacherMessage::GraceOver(is_confirmed)) => {
                    // Fails if the publisher has ended and no longer waits.
                    let _ = self.connection.grace.send(is_confirmed);
                }
                Err(error) if is_nothing_yet(&error) => {
                    if end.is_some_and(|end| Instant::now() > end) {
                        tracing::warn!(
                            "the attacher did not confirm the stop in time (xdp.on_stop); stopping without it"
                        );
                        return Ok(());
                    }
                }
                // The attacher has completed its last task.
                Err(_) if self.end.lock().is_some() => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Maximum number of descriptors: the server's maps, and two of a predecessor.
const MAX_DESCRIPTORS: usize = SHARED_MAPS + 2;

/// Maximum length of a line in bytes: the status of some thousand interfaces.
const MAX_LINE: usize = 1 << 20;

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
        /// Shapes of `NAMES`, `ENTRIES`, `ANSWER_NAMES`, `ANSWER_ENTRIES`, `CONTROL`, `COUNTERS`, and `TAP`.
        shapes: Vec<Shape>,
        /// Shapes of a predecessor's `NAMES` and `ENTRIES`; empty without one.
        earlier: Vec<Shape>,
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
    /// Ends the session. If the connection ends without it, the server has died and its programs stay.
    Stop { detach: bool },
}

/// Messages from the attacher after its response.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum AttacherMessage {
    Status(AttacherStatus),
    /// The grace period has ended; whether the kernel confirmed it.
    GraceOver(bool),
    /// Sent every two seconds: a stopped attacher keeps its connection open.
    Watching {
        /// The time of the last complete look at interfaces, rules and probes, in ns of the kernel's CLOCK_MONOTONIC.
        at_ns: u64,
        /// What the attacher has done so far.
        work: Work,
    },
}

/// The state of interfaces and programs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct AttacherStatus {
    pub(super) interfaces: InterfacesStatus,
    /// The programs needed so far.
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

/// Sends the byte that carries the descriptors, at most [`MAX_DESCRIPTORS`].
pub(super) fn send_descriptors(
    stream: &UnixStream,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "too many descriptors for one message",
        ));
    }
    sendmsg(
        stream,
        &[IoSlice::new(b"\n")],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

/// Receives the byte that carries the descriptors, and returns them.
pub(super) fn receive_descriptors(stream: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut byte)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
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
    /// Waits for the next line; the limit is for the whole line, even if the peer sends single bytes.
    pub(super) fn next_within<T: DeserializeOwned>(
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
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
    )
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
