//! The server's side: asks the attacher for maps, and has it attach their programs.

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

/// How long the attacher may take to load its programs: seconds, on a small machine.
const LOADING_PATIENCE: Duration = Duration::from_secs(60);

/// How often to look whether the maps have been filled.
const FILL_ROUND: Duration = Duration::from_millis(10);

/// How long the attacher is waited for once they are; news wake the thread earlier.
const ROUND: Duration = Duration::from_secs(1);

/// How long the attacher may take to detach everything.
const STOP_PATIENCE: Duration = Duration::from_secs(5);

/// Maps that the attacher has handed over.
pub(crate) struct HandedOver {
    /// The connection by which they came.
    stream: UnixStream,
    /// What has come of the next line.
    lines: Lines,
    /// The memory.
    pub(crate) memory: Memory,
    /// Names that a predecessor had learned.
    pub(crate) earlier: Vec<Name>,
}

impl HandedOver {
    /// Asks the attacher at `socket`, which runs as root, as this server's user, or as `attacher`.
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
                |error| tracing::warn!(%error, "cannot read the names that the previous server had learned; starting without them"),
            )
            .unwrap_or_default(),
            _ => Vec::new(),
        };
        let memory = Memory::of(maps_given, limits)?;
        Ok(Self { stream, lines, memory, earlier })
    }
}

/// Descriptors with their shapes; `None`: their numbers differ.
fn sized(descriptors: Vec<OwnedFd>, shapes: impl Iterator<Item = Shape>) -> Option<Vec<SizedMap>> {
    let shapes: Vec<Shape> = shapes.collect();
    let same = descriptors.len() == shapes.len();
    same.then(|| {
        let pairs = descriptors.into_iter().zip(shapes);
        pairs.map(|(fd, shape)| SizedMap { fd, shape }).collect()
    })
}

/// Says things to the attacher, one after the other.
#[derive(Clone)]
struct Speaker(Arc<Mutex<UnixStream>>);

impl Speaker {
    /// Says something. Nothing is heard of an attacher that does not take it: then half a line
    /// may be on its way, and nothing can follow.
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
    /// Where to ask.
    speaker: Speaker,
    /// What it says; shared with the thread that reads.
    over: Receiver<bool>,
}

impl Grace {
    /// Waits for one; `false`: there is nobody who could vouch for it.
    pub(crate) fn wait(&self) -> bool {
        self.speaker.say(&FromServer::Grace).is_ok() && self.over.recv().unwrap_or(false)
    }
}

/// What is on the way to [`Apart`]: grace periods are needed before the maps can be filled.
pub(crate) struct Connection {
    /// To ask.
    speaker: Speaker,
    /// To listen.
    stream: UnixStream,
    /// What has come of the next line.
    lines: Lines,
    /// Ends of grace periods.
    grace: Sender<bool>,
}

impl HandedOver {
    /// The memory, the names that a predecessor had learned, and both sides of the connection.
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
    /// Has the programs attached once `installs` says that the maps are filled.
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
                tracing::warn!(%problem, "lost the connection to the attacher: attached programs go on answering; interfaces that appear now are answered from userspace until it is back");
            }
            is_lost.send_replace(true);
        })?;
        Ok(Apart { speaker, attached, ready, lost, end, thread })
    }
}

/// The programs that the attacher attaches for us.
pub(crate) struct Apart {
    /// To ask it.
    speaker: Speaker,
    /// What it said last.
    attached: Arc<Mutex<Attached>>,
    /// Becomes true when it has dealt with all interfaces of the start.
    ready: watch::Receiver<bool>,
    /// Becomes true when it is gone.
    lost: watch::Receiver<bool>,
    /// Until when it is listened to; `None`: for ever.
    end: Arc<Mutex<Option<Instant>>>,
    /// The thread that listens to it.
    thread: JoinHandle<()>,
}

impl Apart {
    /// Becomes true when all interfaces of the start have been dealt with.
    pub(crate) fn ready(&self) -> watch::Receiver<bool> {
        self.ready.clone()
    }

    /// Becomes true when the attacher is gone.
    pub(crate) fn lost(&self) -> watch::Receiver<bool> {
        self.lost.clone()
    }

    /// Interfaces and addresses.
    pub(crate) fn status(&self) -> InterfacesStatus {
        self.attached.lock().interfaces.clone()
    }

    /// The programs that were needed so far.
    pub(crate) fn programs(&self) -> Vec<ProgramStatus> {
        self.attached.lock().programs.clone()
    }

    /// Where links and maps are pinned.
    pub(crate) fn pinned_at(&self) -> Option<PathBuf> {
        self.attached.lock().pinned_at.clone()
    }

    /// Answers for exactly these addresses from now on.
    pub(crate) fn set_listen(&self, endpoints: &[SocketAddr]) {
        // An attacher that is gone is asked when it is back.
        let _ = self.speaker.say(&FromServer::Listen(endpoints.to_vec()));
    }

    /// Reports which queries reached the server's sockets.
    pub(crate) fn report(&self, arrivals: Vec<Arrival>) {
        // As in `set_listen`.
        let _ = self.speaker.say(&FromServer::Arrived(arrivals));
    }

    /// Has everything detached, or left to a successor.
    pub(crate) fn stop(self, on_stop: OnStop) {
        let Self { speaker, attached: _, ready: _, lost: _, end, thread } = self;
        *end.lock() = Some(Instant::now() + STOP_PATIENCE);
        // With an attacher that is gone everything stays as it is.
        let _ = speaker.say(&FromServer::Stop { detach: on_stop == OnStop::Detach });
        if thread.join().is_err() {
            tracing::error!("the thread that reads from the attacher had panicked");
        }
    }
}

/// The thread that listens.
struct Listener {
    /// To tell it that the maps are filled.
    speaker: Speaker,
    /// What is listened to.
    stream: UnixStream,
    /// What has come of the next line.
    lines: Lines,
    /// Ends of grace periods.
    grace: Sender<bool>,
    /// What it said last.
    attached: Arc<Mutex<Attached>>,
    /// Becomes true when it has dealt with all interfaces of the start.
    ready: watch::Sender<bool>,
    /// Becomes 1 when the maps are filled.
    installs: watch::Receiver<u64>,
    /// Whether it was told so.
    filled: bool,
    /// Until when to listen; `None`: for ever.
    end: Arc<Mutex<Option<Instant>>>,
}

impl Listener {
    /// Listens until the end; an error if the attacher is gone before.
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
                    // Nobody waits any more where the publisher has ended.
                    let _ = self.grace.send(vouched);
                }
                Err(error) if is_nothing_yet(&error) => {
                    if end.is_some_and(|end| Instant::now() > end) {
                        tracing::warn!(
                            "the attacher did not confirm in time that it is done (xdp.on_stop); stopping without it"
                        );
                        return Ok(());
                    }
                }
                // It has done what it was asked for.
                Err(_) if self.end.lock().is_some() => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }
}
