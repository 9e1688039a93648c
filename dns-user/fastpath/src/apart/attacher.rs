//! The process of root's: for each server that connects it loads programs, hands their maps
//! over and attaches them. It reads nothing of the network.

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

/// How often to look whether there is something new to tell: while programs are being attached, and
/// later.
const ROUNDS: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(500)];

/// Servers at a time: one that ends, one that takes over, and one more for each. Each has maps of its
/// own. For a further one the oldest that has not filled its maps is cut off, or else the oldest.
const MOST_SESSIONS: usize = 4;

/// How long a server may take to say what it wants, and to take what it is told.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the attacher's own configuration allows, whatever a server asks for.
#[derive(Clone, Debug)]
pub struct Authority {
    /// Interfaces, VLANs, pins.
    pub xdp: XdpConfig,
    /// The address that pins are named after.
    pub main: SocketAddr,
    /// Where servers may listen.
    pub listen: Vec<SocketAddr>,
}

impl Authority {
    /// Those of the wanted addresses that are allowed.
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
                    "a server asks for addresses that the attacher's configuration does not name: interfaces do not answer there"
                );
            }
        }
        allowed
    }
}

/// Reads the configuration anew; the error says why it cannot be used.
pub type ReadAuthority = Box<dyn Fn() -> Result<Authority, ConfigError> + Send + Sync>;

/// The socket of the attacher.
pub struct Attacher {
    /// What is listened on.
    listener: UnixListener,
    /// Whose servers are admitted, besides root's.
    user: u32,
}

impl Attacher {
    /// Binds the socket, for servers of this user and group, in place of one that is there.
    pub fn bind(socket: &Path, user: u32, group: u32) -> io::Result<Self> {
        let access = Access { user: None, group: Some(Gid::from_raw(group)) };
        Ok(Self { listener: unix_socket::bind(socket, access, &[])?, user })
    }

    /// Works for whoever connects, until the process ends. What is attached stays then.
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
                            "refused a server: it runs neither as xdp.user nor as root"
                        );
                    }
                    continue;
                }
                Err(error) => {
                    if let Some(left_out) = LIMIT.admit_any() {
                        tracing::warn!(%error, left_out, "refused a server: cannot read its user id (SO_PEERCRED)");
                    }
                    continue;
                }
            }
            let place = match sessions.begin(&stream) {
                Ok(place) => place,
                Err(error) => {
                    tracing::warn!(%error, "refused a server");
                    continue;
                }
            };
            let authority = authority.clone();
            let session = threads::spawn("session", OnPanic::EndProcess, move || {
                if let Err(error) = serve(&stream, &authority, &place) {
                    static LIMIT: LineLimit = LineLimit::new();
                    if let Some(left_out) = LIMIT.admit_any() {
                        tracing::warn!(%error, left_out, "lost the connection to a server: its programs stay attached, and answer until its lease is over");
                    }
                }
            });
            if let Err(error) = session {
                return error;
            }
        }
    }
}

/// The servers that are connected, oldest first.
#[derive(Clone, Default)]
struct Sessions(Arc<Mutex<Vec<Open>>>);

struct Open {
    number: u64,
    /// To cut it off.
    stream: UnixStream,
    /// Whether its maps are filled: then it serves.
    serves: bool,
}

/// A session's place, given back when dropped.
struct Place {
    sessions: Sessions,
    number: u64,
}

impl Sessions {
    /// Gives a new session a place, that of another one if there is no free one.
    fn begin(&self, stream: &UnixStream) -> io::Result<Place> {
        let stream = stream.try_clone()?;
        let mut open = self.0.lock();
        if open.len() >= MOST_SESSIONS {
            let cut = open.iter().position(|session| !session.serves).unwrap_or(0);
            let cut = open.remove(cut);
            tracing::warn!(serves = cut.serves, "too many servers are connected: the oldest one is cut off");
            // It ends by itself where even this fails.
            let _ = cut.stream.shutdown(Shutdown::Both);
        }
        let number = open.last().map_or(0, |last| last.number + 1);
        open.push(Open { number, stream, serves: false });
        Ok(Place { sessions: self.clone(), number })
    }
}

impl Place {
    /// The session's maps are filled.
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

/// Works for one server until it is gone.
fn serve(stream: &UnixStream, read: &ReadAuthority, place: &Place) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut lines = Lines::default();
    let Wanted { layout, listen } = lines.next_within(stream, PATIENCE)?;
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
    tracing::info!("handed the maps over to a server");
    let mut session = Session { stream, lines, here: &here, filled, told: None, read, authority, place };
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
    /// Reads what is allowed.
    read: &'a ReadAuthority,
    /// What was allowed when that was last read.
    authority: Authority,
    place: &'a Place,
}

impl Session<'_> {
    /// Does what it says until it ends in order; an error if it ends otherwise.
    fn run(&mut self) -> io::Result<OnStop> {
        loop {
            self.tell()?;
            let is_ready = self.told.as_ref().is_some_and(|told| told.ready);
            self.stream.set_read_timeout(Some(ROUNDS[usize::from(is_ready)]))?;
            match self.lines.next(self.stream) {
                Ok(FromServer::Listen(endpoints)) => {
                    // What was allowed before stays so while the configuration cannot be read.
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
