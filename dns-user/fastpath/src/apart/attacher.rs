//! The process of root's: for each server that connects it loads programs, hands their maps
//! over and attaches them. It reads nothing of the network.

use std::{
    fs, io,
    net::SocketAddr,
    os::{
        fd::AsFd as _,
        unix::{
            fs::{PermissionsExt as _, chown},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use dns_common::{LAYOUT_VERSION, object as names};
use tokio::sync::watch;

use super::wire::{
    Attached, FromAttacher, FromServer, Given, Lines, Wanted, is_nothing_yet, peer, send, send_descriptors,
};
use crate::{
    bpf,
    here::{Here, Loaded},
    memory::Memory,
};
use dns_core::config::{ConfigError, OnStop, XdpConfig};
use dns_platform::threads::{self, OnPanic};

/// How often to look whether there is something new to tell: while programs are being attached, and
/// later.
const ROUNDS: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(500)];

/// Most servers at a time: one that ends, one that takes over, and one too many for each. Each has
/// maps of its own.
const MOST_SESSIONS: usize = 4;

/// How long a server may take to say what it wants, and to take what it is told.
const PATIENCE: Duration = Duration::from_secs(5);

/// Reads the configuration anew for each server; the error says why it cannot be used.
pub type ReadConfig = Box<dyn Fn() -> Result<(XdpConfig, SocketAddr), ConfigError> + Send + Sync>;

/// The socket of the attacher.
pub struct Attacher {
    /// What is listened on.
    listener: UnixListener,
    /// Whose servers are admitted, besides root's.
    user: u32,
}

impl Attacher {
    /// Binds the socket, for servers of this user and group. It takes the place of what an
    /// attacher before left there in one step; its folder is made if it is not there.
    pub fn bind(socket: &Path, user: u32, group: u32) -> io::Result<Self> {
        if let Some(folder) = socket.parent() {
            fs::create_dir_all(folder)?;
        }
        let part = PathBuf::from(format!("{}.{}", socket.display(), std::process::id()));
        let listener = UnixListener::bind(&part)?;
        let put = || {
            fs::set_permissions(&part, fs::Permissions::from_mode(0o660))?;
            chown(&part, None, Some(group))?;
            fs::rename(&part, socket)
        };
        if let Err(problem) = put() {
            // Nothing of ours stays; the first problem is the one that matters.
            let _ = fs::remove_file(&part);
            return Err(problem);
        }
        Ok(Self { listener, user })
    }

    /// Works for whoever connects, until the process ends. What is attached stays then.
    pub fn run(self, config: ReadConfig) -> io::Error {
        let Self { listener, user } = self;
        // Each session holds it once.
        let config = Arc::new(config);
        loop {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return error,
            };
            match peer(&stream) {
                Ok(peer) if peer == 0 || peer == user => {}
                Ok(peer) => {
                    tracing::warn!(user = peer, "refused a server: it runs neither as xdp.user nor as root");
                    continue;
                }
                Err(error) => {
                    tracing::warn!(%error, "refused a server: cannot read its user id (SO_PEERCRED)");
                    continue;
                }
            }
            if Arc::strong_count(&config) > MOST_SESSIONS {
                tracing::warn!("refused a server: {MOST_SESSIONS} are connected already");
                continue;
            }
            let config = config.clone();
            let session = threads::spawn("session", OnPanic::EndProcess, move || {
                if let Err(error) = serve(&stream, &config) {
                    tracing::warn!(%error, "lost the connection to a server: its programs stay attached, and answer until its lease is over");
                }
            });
            if let Err(error) = session {
                return error;
            }
        }
    }
}

/// Works for one server until it is gone.
fn serve(stream: &UnixStream, config: &ReadConfig) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut lines = Lines::default();
    let Wanted { layout, listen } = lines.next(stream)?;
    let refuse = |why: String| {
        tracing::warn!(why, "refused a server: it gets no programs and answers every query from userspace");
        send_descriptors(stream, &[])?;
        send(stream, &Given::Refused(why))
    };
    if layout != LAYOUT_VERSION {
        return refuse(format!(
            "the attacher's maps have layout {LAYOUT_VERSION}, the server's {layout}: run the same version of both"
        ));
    }
    let (config, main) = match config() {
        Ok(read) => read,
        Err(problem) => return refuse(problem.to_string()),
    };
    let (loaded, memory) = match Loaded::load(&config, main) {
        Ok(loaded) => loaded,
        Err(problem) => return refuse(problem.to_string()),
    };
    hand_over(stream, &loaded, &memory)?;
    let (filled, installs) = watch::channel(0);
    let here = loaded.attach(&config, &listen, installs).map_err(io::Error::other)?;
    tracing::info!("handed the maps over to a server");
    let mut session = Session { stream, lines, here: &here, filled, told: None };
    let on_stop = session.run();
    // A server that died is one that comes back.
    let asked = on_stop.as_ref().ok().copied();
    here.stop(asked.unwrap_or(OnStop::Keep));
    on_stop.map(drop)
}

/// Hands over the maps, and those of a predecessor.
fn hand_over(stream: &UnixStream, loaded: &Loaded, memory: &Memory) -> io::Result<()> {
    let earlier = loaded.pins().and_then(|pins| pins.earlier_maps());
    let maps = [names::NAMES, names::ENTRIES, names::CONTROL, names::COUNTERS].map(|name| loaded.map(name));
    let tap = memory.tap.as_ref().map(|tap| tap.as_fd());
    let mut descriptors = Vec::new();
    for map in maps.into_iter().chain([tap]) {
        descriptors.push(map.ok_or_else(|| io::Error::other("the object lacks a map"))?);
    }
    let shape = |map: &std::os::fd::BorrowedFd<'_>| bpf::map_shape(*map);
    let shapes = descriptors.iter().map(shape).collect::<io::Result<_>>()?;
    let before: Vec<_> = earlier.iter().flatten().map(|map| map.as_fd()).collect();
    let earlier_shapes = before.iter().map(shape).collect::<io::Result<_>>()?;
    descriptors.extend(before);
    send_descriptors(stream, &descriptors)?;
    send(stream, &Given::Maps { shapes, earlier: earlier_shapes, limits: memory.limits })
}

/// What goes on with a server that has its maps.
struct Session<'a> {
    /// To it.
    stream: &'a UnixStream,
    /// What has come of its next line.
    lines: Lines,
    /// What is attached for it.
    here: &'a Here,
    /// Says that the maps are filled.
    filled: watch::Sender<u64>,
    /// What it was told last.
    told: Option<Attached>,
}

impl Session<'_> {
    /// Does what it says until it ends in order; an error if it ends otherwise.
    fn run(&mut self) -> io::Result<OnStop> {
        loop {
            self.tell()?;
            let is_ready = self.told.as_ref().is_some_and(|told| told.ready);
            self.stream.set_read_timeout(Some(ROUNDS[usize::from(is_ready)]))?;
            match self.lines.next(self.stream) {
                Ok(FromServer::Listen(endpoints)) => self.here.set_listen(&endpoints),
                Ok(FromServer::Filled) => {
                    self.filled.send_replace(1);
                }
                Ok(FromServer::Grace) => {
                    let vouched = bpf::rcu_grace_period().is_ok();
                    send(self.stream, &FromAttacher::GraceOver(vouched))?;
                }
                Ok(FromServer::Stop { detach: true }) => return Ok(OnStop::Detach),
                Ok(FromServer::Stop { detach: false }) => return Ok(OnStop::Keep),
                Err(error) if is_nothing_yet(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Tells how the interfaces and their programs are, if that is new.
    fn tell(&mut self) -> io::Result<()> {
        let attached = Attached {
            interfaces: self.here.status(),
            programs: self.here.programs(),
            ready: *self.here.ready().borrow(),
            pinned_at: self.here.pinned_at().map(Path::to_path_buf),
        };
        if self.told.as_ref() != Some(&attached) {
            send(self.stream, &FromAttacher::Status(attached.clone()))?;
            self.told = Some(attached);
        }
        Ok(())
    }
}
