//! The attacher, a root process: for each connected server it loads the programs, hands their maps
//! over and attaches them. It never reads from the network.

use std::{
    io,
    net::{Shutdown, SocketAddr},
    os::{
        fd::AsFd as _,
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    sync::Arc,
    time::Duration,
};

use dns_common::{LAYOUT_VERSION, object as names};
use nix::unistd::Gid;
use parking_lot::Mutex;
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
use dns_platform::{
    logs::LineLimit,
    threads::{self, OnPanic},
    unix_socket::{self, Access},
};

/// Intervals at which to check for a new state to send: while programs are being attached, and
/// afterwards.
const ROUNDS: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(500)];

/// Concurrent servers: one that ends, one that takes over, and one spare for each. Each has
/// separate maps. For a further server the oldest one without filled maps is cut off, else the
/// oldest one.
const MOST_SESSIONS: usize = 4;

/// Time limit for a server to send its request and to receive each message.
const PATIENCE: Duration = Duration::from_secs(5);

/// The attacher's own configuration. It bounds every server's request.
#[derive(Clone, Debug)]
pub struct Authority {
    /// Selection of interfaces, VLANs and the folder of pins.
    pub xdp: XdpConfig,
    /// The address after which pins are named.
    pub main: SocketAddr,
    /// Addresses on which servers may listen.
    pub listen: Vec<SocketAddr>,
}

impl Authority {
    /// Returns the wanted addresses that are permitted.
    fn allowed(&self, wanted: &[SocketAddr]) -> Vec<SocketAddr> {
        let (allowed, refused): (Vec<_>, Vec<_>) =
            wanted.iter().copied().partition(|address| self.listen.contains(address));
        if let Some(first) = refused.first() {
            static LIMIT: LineLimit = LineLimit::new();
            if let Some(left_out) = LIMIT.admit_any() {
                tracing::warn!(
                    address = %first,
                    refused = refused.len(),
                    left_out,
                    "a server requested addresses that the attacher's configuration does not allow: the fast path does not answer there"
                );
            }
        }
        allowed
    }
}

/// Reads the configuration again; the error names the file and the cause.
pub type ReadAuthority = Box<dyn Fn() -> Result<Authority, ConfigError> + Send + Sync>;

/// The socket of the attacher.
pub struct Attacher {
    listener: UnixListener,
    /// UID whose servers are admitted, besides root's.
    user: u32,
}

impl Attacher {
    /// Binds the socket for servers of this user and group, replacing an existing socket.
    pub fn bind(socket: &Path, user: u32, group: u32) -> io::Result<Self> {
        let access = Access { user: None, group: Some(Gid::from_raw(group)) };
        Ok(Self { listener: unix_socket::bind(socket, access, &[])?, user })
    }

    /// Serves connections until the process ends. Attached programs stay attached then.
    pub fn run(self, authority: ReadAuthority) -> io::Error {
        let Self { listener, user } = self;
        let authority = Arc::new(authority);
        let sessions = Sessions::default();
        loop {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return error,
            };
            static LIMIT: LineLimit = LineLimit::new();
            match peer(&stream) {
                Ok(peer) if peer == 0 || peer == user => {}
                Ok(peer) => {
                    if let Some(left_out) = LIMIT.admit_any() {
                        tracing::warn!(
                            user = peer,
                            left_out,
                            "server refused: it runs neither as xdp.user nor as root"
                        );
                    }
                    continue;
                }
                Err(error) => {
                    if let Some(left_out) = LIMIT.admit_any() {
                        tracing::warn!(%error, left_out, "server refused: cannot read its user id (SO_PEERCRED)");
                    }
                    continue;
                }
            }
            let place = match sessions.begin(&stream) {
                Ok(place) => place,
                Err(error) => {
                    tracing::warn!(%error, "server refused");
                    continue;
                }
            };
            let authority = authority.clone();
            let session = threads::spawn("session", OnPanic::EndProcess, move || {
                if let Err(error) = serve(&stream, &authority, &place) {
                    static LIMIT: LineLimit = LineLimit::new();
                    if let Some(left_out) = LIMIT.admit_any() {
                        tracing::warn!(%error, left_out, "connection to a server lost: its programs stay attached and answer until its lease expires");
                    }
                }
            });
            if let Err(error) = session {
                return error;
            }
        }
    }
}

/// The connected servers, oldest first.
#[derive(Clone, Default)]
struct Sessions(Arc<Mutex<Vec<Open>>>);

struct Open {
    number: u64,
    /// Closed to cut the session off.
    stream: UnixStream,
    /// Whether the maps are filled: the server is in service.
    serves: bool,
}

/// A session's entry in [`Sessions`], removed when dropped.
struct Place {
    sessions: Sessions,
    number: u64,
}

impl Sessions {
    /// Registers a session; past [`MOST_SESSIONS`] it cuts off the oldest, preferably one whose maps are not filled.
    fn begin(&self, stream: &UnixStream) -> io::Result<Place> {
        let stream = stream.try_clone()?;
        let mut open = self.0.lock();
        if open.len() >= MOST_SESSIONS {
            let cut = open.iter().position(|session| !session.serves).unwrap_or(0);
            let cut = open.remove(cut);
            tracing::warn!(
                serves = cut.serves,
                "too many servers connected: the oldest connection is closed"
            );
            // It ends by itself where even this fails.
            let _ = cut.stream.shutdown(Shutdown::Both);
        }
        let number = open.last().map_or(0, |last| last.number + 1);
        open.push(Open { number, stream, serves: false });
        Ok(Place { sessions: self.clone(), number })
    }
}

impl Place {
    /// Records that the session's maps are filled.
    fn serves(&self) {
        let mut open = self.sessions.0.lock();
        if let Some(session) = open.iter_mut().find(|session| session.number == self.number) {
            session.serves = true;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.sessions.0.lock().retain(|session| session.number != self.number);
    }
}

/// Serves one server until its connection ends.
fn serve(stream: &UnixStream, read: &ReadAuthority, place: &Place) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut lines = Lines::default();
    let Wanted { layout, listen } = lines.next_within(stream, PATIENCE)?;
    let refuse = |why: String| {
        tracing::warn!(why, "server refused: it gets no programs and answers every query from userspace");
        send_descriptors(stream, &[])?;
        send(stream, &Given::Refused(why))
    };
    if layout != LAYOUT_VERSION {
        return refuse(format!(
            "the attacher's maps have layout {LAYOUT_VERSION}, the server's {layout}: run the same version of both"
        ));
    }
    let authority = match read() {
        Ok(authority) => authority,
        Err(problem) => return refuse(problem.to_string()),
    };
    let listen = authority.allowed(&listen);
    if listen.is_empty() {
        return refuse("the attacher's configuration names none of the server's addresses".to_owned());
    }
    let (loaded, memory) = match Loaded::load(&authority.xdp, authority.main) {
        Ok(loaded) => loaded,
        Err(problem) => return refuse(problem.to_string()),
    };
    hand_over(stream, &loaded, &memory)?;
    let (filled, installs) = watch::channel(0);
    let here = loaded.attach(&authority.xdp, &listen, installs).map_err(io::Error::other)?;
    tracing::info!("maps handed to a server");
    let mut session = Session { stream, lines, here: &here, filled, told: None, read, authority, place };
    let on_stop = session.run();
    // A server that died will be restarted.
    let asked = on_stop.as_ref().ok().copied();
    here.stop(asked.unwrap_or(OnStop::Keep));
    on_stop.map(drop)
}

/// Sends the descriptors of the maps, and of the predecessor's maps if there are any.
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

/// A connected server that has received its maps.
struct Session<'a> {
    stream: &'a UnixStream,
    /// Bytes received of the next line.
    lines: Lines,
    /// The programs attached for this server.
    here: &'a Here,
    /// Signals that the maps are filled.
    filled: watch::Sender<u64>,
    /// The last state sent to the server.
    told: Option<Attached>,
    /// Reads the attacher's configuration.
    read: &'a ReadAuthority,
    /// The last configuration that could be read.
    authority: Authority,
    place: &'a Place,
}

impl Session<'_> {
    /// Executes the server's requests until an orderly end; an error if the connection breaks.
    fn run(&mut self) -> io::Result<OnStop> {
        loop {
            self.tell()?;
            let is_ready = self.told.as_ref().is_some_and(|told| told.ready);
            self.stream.set_read_timeout(Some(ROUNDS[usize::from(is_ready)]))?;
            match self.lines.next(self.stream) {
                Ok(FromServer::Listen(endpoints)) => {
                    // If the configuration cannot be read, the last good one stays in force.
                    if let Ok(authority) = (self.read)() {
                        self.authority = authority;
                    }
                    self.here.set_listen(&self.authority.allowed(&endpoints));
                }
                Ok(FromServer::Arrived(arrivals)) => self.here.report(arrivals),
                Ok(FromServer::Filled) => {
                    self.place.serves();
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

    /// Sends the state of the interfaces and their programs if it changed.
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
