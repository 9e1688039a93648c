//! The server's side of privilege separation: receives the maps from the attacher and requests that
//! it attach the programs.

use std::{
    fmt::Display,
    io,
    net::{Shutdown, SocketAddr},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
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
use nix::unistd::User;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::{
    FastPathError,
    map::Shape,
    memory::{Memory, SizedMap, names_in},
    protocol::{
        Arrival, AttacherMessage, AttacherStatus, Lines, Request, Response, SHARED_MAPS,
        ServerMessage, Work, is_nothing_yet, peer, receive_descriptors, send,
    },
    publish::lease::Lease,
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
        // Another user's process at this path would decide what interfaces answer.
        if found != 0 && found != nix::unistd::geteuid().as_raw() && !is_known {
            return Err(refused(&format_args!(
                "it runs as user {found}: neither root, nor this server's user, nor xdp.attach_user"
            )));
        }
        Ok(Self(stream))
    }

    /// Receives the connection that the server's own attacher offers on `standby`.
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
            Err(error) if is_end(&error) => Err(FastPathError::ended()),
            // Another attacher follows the one whose connection was lost.
            Err(error) => Err(FastPathError::NoAttacher(format!(
                "cannot receive the connection to the attacher: {error}"
            ))),
        }
    }

    /// Detaches what an earlier server at these addresses left.
    pub fn detach_earlier(self, listen: &[SocketAddr]) -> Result<(), FastPathError> {
        let ReceivedMaps {
            stream, mut lines, ..
        } = self.request_maps(listen)?;
        // A session whose maps stay empty attaches nothing, and its stop detaches what it has
        // found.
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
        stream
            .set_read_timeout(Some(LOAD_TIMEOUT))
            .map_err(no_maps)?;
        send(
            &stream,
            &Request {
                layout: LAYOUT_VERSION,
                listen: listen.to_vec(),
            },
        )
        .map_err(no_maps)?;
        // The byte with the descriptors comes first, also with a refusal.
        let descriptors = receive_descriptors(&stream).map_err(no_maps)?;
        let mut lines = Lines::default();
        let (shapes, earlier, limits) = match lines.next(&stream).map_err(no_maps)? {
            Response::Maps {
                shapes,
                earlier,
                limits,
            } => (shapes, earlier, limits),
            Response::Refused(why) => return Err(refused(&why)),
        };
        // A server without bpf(2) cannot ask for the size of a map, and maps as much as it is told.
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
            // Without names there is still a predecessor: its programs answer until the map is
            // complete.
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

/// Returns whether an error means that the other process has ended.
fn is_end(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
    )
}

fn no_maps(error: io::Error) -> FastPathError {
    FastPathError::NoAttacher(format!("the attacher has sent no maps: {error}"))
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
    if descriptors.len() != shapes.len() {
        return None;
    }
    let mut maps = Vec::with_capacity(shapes.len());
    for (fd, shape) in descriptors.into_iter().zip(shapes) {
        maps.push(SizedMap { fd, shape });
    }
    Some(maps)
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
        // An attacher that was stopped must not hold up the thread that reports to it.
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
    /// The attacher's progress according to its last message.
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
        // After an error the connection is shut down, and the listener reports the loss.
        self.messenger
            .send(&ServerMessage::Arrived(arrivals))
            .is_ok()
    }

    /// Detaches everything, or leaves it to a successor.
    pub(crate) fn stop(self, on_stop: OnStop) {
        // Set first: from now on the end of the connection is the confirmation.
        *self.end.lock() = Some(Instant::now() + STOP_TIMEOUT);
        // Without an attacher nothing changes.
        let _ = self.messenger.send(&ServerMessage::Stop {
            detach: on_stop == OnStop::Detach,
        });
        if self.thread.join().is_err() {
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
            // Read before the wait, which lasts a second: a stop in between is noticed one round
            // later.
            let end = *self.end.lock();
            match self.connection.lines.next(&self.connection.stream) {
                Ok(AttacherMessage::Status(attached)) => {
                    let is_ready = attached.ready;
                    *self.attached.lock() = attached;
                    // Only the first change to true is of interest to those who wait.
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
