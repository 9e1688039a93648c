//! The server's side: requests maps from the attacher, and has it attach the programs.

use std::{
    io,
    net::{Shutdown, SocketAddr},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use dns_common::LAYOUT_VERSION;
use nix::unistd::User;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::wire::{
    Attached, FromAttacher, FromServer, Given, Lines, Wanted, is_nothing_yet, peer, receive_descriptors, send,
};
use crate::{
    Arrival, FastPathError, InterfacesStatus,
    map::Shape,
    memory::{Maps, Memory, SizedMap, names_in},
    programs::ProgramStatus,
};
use dns_core::{config::OnStop, name::Name};
use dns_platform::threads::{self, OnPanic};

/// Time limit for the attacher to load its programs: that takes seconds on a small machine.
const LOADING_PATIENCE: Duration = Duration::from_secs(60);

/// Interval at which to check whether the maps are filled.
const FILL_ROUND: Duration = Duration::from_millis(10);

/// Longest wait for the attacher afterwards; its messages wake the thread earlier.
const ROUND: Duration = Duration::from_secs(1);

/// Time limit for the attacher to detach everything.
const STOP_PATIENCE: Duration = Duration::from_secs(5);

/// Maps handed over by the attacher.
pub(crate) struct HandedOver {
    /// The connection on which they arrived.
    stream: UnixStream,
    /// Bytes received of the next line.
    lines: Lines,
    pub(crate) memory: Memory,
    /// Names learned by a predecessor.
    pub(crate) earlier: Vec<Name>,
}

impl HandedOver {
    /// Connects to the attacher at `socket` and requests maps. The attacher must run as root, as
    /// this server's user, or as `attacher`.
    pub(crate) fn ask(
        socket: &Path,
        attacher: Option<&str>,
        listen: &[SocketAddr],
    ) -> Result<Self, FastPathError> {
        let refused = FastPathError::Refused;
        let failed = |error: io::Error| refused(error.to_string());
        let stream = UnixStream::connect(socket)
            .map_err(|error| FastPathError::NoAttacher { socket: socket.to_owned(), error })?;
        let user = peer(&stream).map_err(failed)?;
        let known = attacher.and_then(|name| User::from_name(name).ok().flatten());
        let is_known = known.is_some_and(|known| known.uid.as_raw() == user);
        if user != 0 && user != nix::unistd::geteuid().as_raw() && !is_known {
            return Err(refused(format!(
                "it runs as user {user}: neither root, nor this server's user, nor xdp.attach_user"
            )));
        }
        stream.set_read_timeout(Some(LOADING_PATIENCE)).map_err(failed)?;
        send(&stream, &Wanted { layout: LAYOUT_VERSION, listen: listen.to_vec() }).map_err(failed)?;
        let descriptors = receive_descriptors(&stream).map_err(failed)?;
        let mut lines = Lines::default();
        let (shapes, earlier, limits) = match lines.next(&stream).map_err(failed)? {
            Given::Maps { shapes, earlier, limits } => (shapes, earlier, limits),
            Given::Refused(why) => return Err(refused(why)),
        };
        let mut maps = sized(descriptors, shapes.into_iter().chain(earlier))
            .ok_or_else(|| refused("it sent other maps than it says".to_owned()))?
            .into_iter();
        let mut map = || maps.next().ok_or_else(|| refused("it sent too few maps".to_owned()));
        let maps_given =
            Maps { names: map()?, entries: map()?, control: map()?, counters: map()?, tap: Some(map()?) };
        let earlier = match (maps.next(), maps.next()) {
            (Some(names), Some(entries)) => names_in(
                (names.fd.as_fd(), names.shape),
                (entries.fd.as_fd(), entries.shape),
                limits.useful + limits.negative,
            )
            .inspect_err(
                |error| tracing::warn!(%error, "cannot read the predecessor's learned names; starting without them"),
            )
            .unwrap_or_default(),
            _ => Vec::new(),
        };
        let memory = Memory::of(maps_given, limits)?;
        Ok(Self { stream, lines, memory, earlier })
    }
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
struct Speaker(Arc<Mutex<UnixStream>>);

impl Speaker {
    /// Sends a message. If the attacher does not accept it, the connection is unusable: half a line
    /// may have been sent.
    fn say(&self, message: &FromServer) -> io::Result<()> {
        let Self(stream) = self;
        let stream = stream.lock();
        send(&stream, message).inspect_err(|_| {
            // It is gone already where even this fails.
            let _ = stream.shutdown(Shutdown::Both);
        })
    }
}

/// Asks the attacher for RCU grace periods.
pub(crate) struct Grace {
    speaker: Speaker,
    /// Ends of grace periods, from the reading thread.
    over: Receiver<bool>,
}

impl Grace {
    /// Waits for a grace period; `false` if the attacher cannot confirm it.
    pub(crate) fn wait(&self) -> bool {
        self.speaker.say(&FromServer::Grace).is_ok() && self.over.recv().unwrap_or(false)
    }
}

/// A connection whose maps are not filled yet; becomes [`Apart`]. Filling them needs grace periods
/// already.
pub(crate) struct Connection {
    speaker: Speaker,
    stream: UnixStream,
    /// Bytes received of the next line.
    lines: Lines,
    /// Ends of grace periods.
    grace: Sender<bool>,
}

impl HandedOver {
    /// Splits off the memory, the names learned by a predecessor, and both sides of the connection.
    pub(crate) fn split(self) -> io::Result<(Memory, Vec<Name>, Connection, Grace)> {
        let Self { stream, lines, memory, earlier } = self;
        stream.set_write_timeout(Some(ROUND))?;
        let speaker = Speaker(Arc::new(Mutex::new(stream.try_clone()?)));
        let (grace, over) = channel();
        let connection = Connection { speaker: speaker.clone(), stream, lines, grace };
        Ok((memory, earlier, connection, Grace { speaker, over }))
    }
}

impl Connection {
    /// Requests that the programs be attached once `installs` reports filled maps.
    pub(crate) fn attach(self, installs: watch::Receiver<u64>) -> io::Result<Apart> {
        let Self { speaker, stream, lines, grace } = self;
        let attached = Arc::new(Mutex::new(Attached::default()));
        let end = Arc::new(Mutex::new(None));
        let (is_ready, ready) = watch::channel(false);
        let (is_lost, lost) = watch::channel(false);
        let listener = Listener {
            speaker: speaker.clone(),
            stream,
            lines,
            grace,
            attached: attached.clone(),
            ready: is_ready,
            installs,
            filled: false,
            end: end.clone(),
        };
        let thread = threads::spawn("attacher", OnPanic::EndProcess, move || {
            if let Err(problem) = listener.run() {
                tracing::warn!(%problem, "connection to the attacher lost: attached programs keep answering; new interfaces are answered from userspace until it returns");
            }
            is_lost.send_replace(true);
        })?;
        Ok(Apart { speaker, attached, ready, lost, end, thread })
    }
}

/// The programs attached on our behalf by the attacher.
pub(crate) struct Apart {
    speaker: Speaker,
    /// The last state reported by the attacher.
    attached: Arc<Mutex<Attached>>,
    /// Becomes true when the attacher has processed all interfaces present at the start.
    ready: watch::Receiver<bool>,
    /// Becomes true when the attacher is gone.
    lost: watch::Receiver<bool>,
    /// When to stop listening; `None`: never.
    end: Arc<Mutex<Option<Instant>>>,
    /// The thread that reads from the attacher.
    thread: JoinHandle<()>,
}

impl Apart {
    /// Becomes true when all interfaces present at the start have been processed.
    pub(crate) fn ready(&self) -> watch::Receiver<bool> {
        self.ready.clone()
    }

    /// Becomes true when the attacher is gone.
    pub(crate) fn lost(&self) -> watch::Receiver<bool> {
        self.lost.clone()
    }

    pub(crate) fn status(&self) -> InterfacesStatus {
        self.attached.lock().interfaces.clone()
    }

    /// Returns the programs needed so far.
    pub(crate) fn programs(&self) -> Vec<ProgramStatus> {
        self.attached.lock().programs.clone()
    }

    /// Returns the path at which links and maps are pinned.
    pub(crate) fn pinned_at(&self) -> Option<PathBuf> {
        self.attached.lock().pinned_at.clone()
    }

    /// Replaces the served endpoints.
    pub(crate) fn set_listen(&self, endpoints: &[SocketAddr]) {
        // If the attacher is gone, the next connection sends the addresses.
        let _ = self.speaker.say(&FromServer::Listen(endpoints.to_vec()));
    }

    /// Reports the queries that reached the server's sockets.
    pub(crate) fn report(&self, arrivals: Vec<Arrival>) {
        // As in `set_listen`.
        let _ = self.speaker.say(&FromServer::Arrived(arrivals));
    }

    /// Detaches everything, or leaves it to a successor.
    pub(crate) fn stop(self, on_stop: OnStop) {
        let Self { speaker, attached: _, ready: _, lost: _, end, thread } = self;
        *end.lock() = Some(Instant::now() + STOP_PATIENCE);
        // Without an attacher everything stays as it is.
        let _ = speaker.say(&FromServer::Stop { detach: on_stop == OnStop::Detach });
        if thread.join().is_err() {
            tracing::error!("the thread that reads from the attacher panicked");
        }
    }
}

struct Listener {
    /// Used to send that the maps are filled.
    speaker: Speaker,
    stream: UnixStream,
    /// Bytes received of the next line.
    lines: Lines,
    /// Ends of grace periods.
    grace: Sender<bool>,
    /// The last state reported by the attacher.
    attached: Arc<Mutex<Attached>>,
    /// Becomes true when the attacher has processed all interfaces present at the start.
    ready: watch::Sender<bool>,
    /// Becomes 1 when the maps are filled.
    installs: watch::Receiver<u64>,
    /// Whether the attacher knows that they are filled.
    filled: bool,
    /// When to stop listening; `None`: never.
    end: Arc<Mutex<Option<Instant>>>,
}

impl Listener {
    /// Reads until the end; an error if the attacher goes away before.
    fn run(mut self) -> io::Result<()> {
        self.stream.set_read_timeout(Some(FILL_ROUND))?;
        loop {
            if !self.filled && *self.installs.borrow() > 0 {
                self.filled = true;
                self.speaker.say(&FromServer::Filled)?;
                self.stream.set_read_timeout(Some(ROUND))?;
            }
            let end = *self.end.lock();
            match self.lines.next(&self.stream) {
                Ok(FromAttacher::Status(attached)) => {
                    let is_ready = attached.ready;
                    *self.attached.lock() = attached;
                    self.ready.send_if_modified(|ready| !std::mem::replace(ready, is_ready) && is_ready);
                }
                Ok(FromAttacher::GraceOver(vouched)) => {
                    // Fails if the publisher has ended and no longer waits.
                    let _ = self.grace.send(vouched);
                }
                Err(error) if is_nothing_yet(&error) => {
                    if end.is_some_and(|end| Instant::now() > end) {
                        tracing::warn!(
                            "the attacher did not confirm the stop in time (xdp.on_stop); stopping without it"
                        );
                        return Ok(());
                    }
                }
                // The attacher has done its last task.
                Err(_) if self.end.lock().is_some() => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }
}
