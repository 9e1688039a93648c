//! The attacher: loads the programs, hands their maps over to the server and attaches them. It
//! never reads from the network.
//!
//! * [`session`]: one server's programs and maps, from its request to its end.
//!
//! The attacher runs as a service with a socket ([`Attacher`]), or as a child process of the server ([`serve`]).

mod session;

use std::{
    io,
    net::{Shutdown, SocketAddr},
    os::{
        fd::AsFd as _,
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use nix::unistd::Gid;
use parking_lot::{Condvar, Mutex};

use dns_core::config::{ConfigErrors, XdpConfig};
use dns_fastpath::protocol::{peer, send_descriptors};
use dns_kit::{
    logs::LineLimit,
    threads::{self, OnPanic},
    unix_socket::{self, Access},
};

/// Maximum number of concurrent servers: one that ends, one that takes over, and a spare for each. Each has
/// separate maps. A further server displaces the oldest one without filled maps, or else the oldest one.
const MAX_SESSIONS: usize = 4;

/// Maximum number of sessions that hold maps: connected servers, and earlier sessions that are ending.
const MAX_HOLDING: usize = 2 * MAX_SESSIONS;

/// Longest wait for a session to end: it may wait for the kernel to verify a program, and the next server waits twice
/// as long for its maps.
const ENDING: Duration = Duration::from_secs(30);

/// The attacher's own configuration. It bounds every server's request.
#[derive(Clone, Debug)]
pub struct Authority {
    /// Interfaces, hooks, VLANs and the folder of pins.
    pub xdp: XdpConfig,
    /// The address after which the folder of pins is named.
    pub main: SocketAddr,
    /// Addresses on which servers may listen.
    pub listen: Vec<SocketAddr>,
}

impl Authority {
    /// Returns the addresses among `wanted` on which servers may listen, each once: a hostile server may repeat one as
    /// often as a line has room for, and a wildcard takes a look at all of them for each local address.
    fn allowed(&self, wanted: &[SocketAddr]) -> Vec<SocketAddr> {
        let mut allowed = self.listen.clone();
        allowed.retain(|address| wanted.contains(address));
        let is_refused = |address: &&SocketAddr| !self.listen.contains(address);
        if let Some(first) = wanted.iter().find(is_refused) {
            // A server repeats its request at every change; a hostile one as often as it can.
            static LIMIT: LineLimit = LineLimit::new();
            if let Some(suppressed) = LIMIT.admit_any() {
                tracing::warn!(
                    address = %first,
                    refused = wanted.iter().filter(is_refused).count(),
                    suppressed,
                    "a server requested addresses that the attacher's configuration does not allow: the fast path does not answer there"
                );
            }
        }
        allowed
    }
}

/// Reads the configuration again; the error names the file and the cause.
pub type ReadAuthority = Box<dyn Fn() -> Result<Authority, ConfigErrors> + Send + Sync>;

/// Serves the server that has started this attacher until its connection ends. Attached programs stay
/// attached unless the server has requested that they be detached.
pub fn serve(stream: &UnixStream, authority: &ReadAuthority) -> io::Result<()> {
    session::serve(stream, authority, &AtomicBool::new(false), None)
}

/// Creates a connection for an attacher that this process is about to start, and sends its other end to
/// the server on `server`, see [`dns_fastpath::AttacherConnection::receive`].
pub(crate) fn offer_connection(server: &UnixStream) -> io::Result<UnixStream> {
    let (ours, servers) = UnixStream::pair()?;
    send_descriptors(server, &[servers.as_fd()])?;
    Ok(ours)
}

/// The socket of the attacher, run as a service.
pub(crate) struct Attacher {
    listener: UnixListener,
    /// UID whose servers are admitted in addition to root's.
    user: u32,
}

impl Attacher {
    /// Binds the socket for servers of this user and group, replacing an existing socket.
    pub(crate) fn bind(socket: &Path, user: u32, group: u32) -> io::Result<Self> {
        let access = Access {
            user: None,
            group: Some(Gid::from_raw(group)),
        };
        Ok(Self {
            listener: unix_socket::bind(socket, access, &[])?,
            user,
        })
    }

    /// Serves connections until the process ends. Attached programs stay attached then.
    pub(crate) fn run(self, authority: ReadAuthority) -> io::Error {
        let Self { listener, user } = self;
        let authority = Arc::new(authority);
        let sessions = Arc::<Sessions>::default();
        loop {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // The service manager starts the attacher again, and attached programs stay.
                Err(error) => return error,
            };
            static LIMIT: LineLimit = LineLimit::new();
            match peer(&stream) {
                // The mode of the socket admits a group; its other members are refused.
                Ok(peer) if peer == 0 || peer == user => {}
                Ok(peer) => {
                    if let Some(suppressed) = LIMIT.admit_any() {
                        tracing::warn!(
                            user = peer,
                            suppressed,
                            "server refused: it runs neither as xdp.user nor as root"
                        );
                    }
                    continue;
                }
                Err(error) => {
                    if let Some(suppressed) = LIMIT.admit_any() {
                        tracing::warn!(%error, suppressed, "server refused: cannot read its user id (SO_PEERCRED)");
                    }
                    continue;
                }
            }
            let Some(place) = sessions.begin(stream, ENDING) else {
                if let Some(suppressed) = LIMIT.admit_any() {
                    tracing::warn!(
                        suppressed,
                        "server refused: {MAX_HOLDING} earlier sessions have not ended; check whether the kernel holds them up"
                    );
                }
                continue;
            };
            let authority = authority.clone();
            let session = threads::spawn("session", OnPanic::EndProcess, move || {
                let ConnectedServer { stream, serves } = &*place.server;
                if let Err(error) = session::serve(stream, &authority, serves, Some(&place.holding))
                {
                    static LIMIT: LineLimit = LineLimit::new();
                    if let Some(suppressed) = LIMIT.admit_any() {
                        let effect = if serves.load(Ordering::Relaxed) {
                            "its programs stay attached and answer until its lease expires"
                        } else {
                            "it had no programs yet"
                        };
                        tracing::warn!(%error, suppressed, "connection to a server lost: {effect}");
                    }
                }
            });
            if let Err(error) = session {
                return error;
            }
        }
    }
}

#[derive(Default)]
struct Sessions {
    open: Mutex<OpenSessions>,
    /// Notified when a session has given up its maps.
    ended: Condvar,
}

#[derive(Default)]
struct OpenSessions {
    /// The connected servers, oldest first.
    connected: Vec<Arc<ConnectedServer>>,
    /// Number of sessions that hold maps.
    holding: usize,
}

struct ConnectedServer {
    /// Shut down to end the session.
    stream: UnixStream,
    /// Whether the maps are filled: the server is in service.
    serves: AtomicBool,
}

/// A session's entry in [`Sessions`], removed when dropped.
struct Place {
    sessions: Arc<Sessions>,
    server: Arc<ConnectedServer>,
    holding: Arc<Holding>,
}

/// Counts a session as long as a clone is left: the thread that loads its programs may outlast it.
struct Holding(Arc<Sessions>);

impl Sessions {
    /// Registers a session; beyond [`MAX_SESSIONS`] disconnects the oldest, preferably one whose
    /// maps are not filled. `None` if none of too many ending sessions ends within `limit`.
    fn begin(self: &Arc<Self>, stream: UnixStream, limit: Duration) -> Option<Place> {
        let mut open = self.open.lock();
        // A server that connects again and again disconnects its earlier sessions faster than they can end.
        let waited =
            self.ended
                .wait_while_for(&mut open, |open| open.holding >= MAX_HOLDING, limit);
        if waited.timed_out() {
            return None;
        }
        let connected = &mut open.connected;
        if connected.len() >= MAX_SESSIONS {
            // A server that only connects must not put an end to one in service.
            let cut = connected
                .iter()
                .position(|session| !session.serves.load(Ordering::Relaxed))
                .unwrap_or(0);
            let cut = connected.remove(cut);
            static LIMIT: LineLimit = LineLimit::new();
            if let Some(suppressed) = LIMIT.admit_any() {
                tracing::warn!(
                    serves = cut.serves.load(Ordering::Relaxed),
                    suppressed,
                    "too many servers connected: the oldest connection is closed"
                );
            }
            // If this fails, the session ends by itself.
            let _ = cut.stream.shutdown(Shutdown::Both);
        }
        let server = Arc::new(ConnectedServer {
            stream,
            serves: AtomicBool::new(false),
        });
        connected.push(server.clone());
        open.holding += 1;
        Some(Place {
            sessions: self.clone(),
            server,
            holding: Arc::new(Holding(self.clone())),
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // By identity: a session that was displaced ends after its entry, and must not remove
        // another's.
        let mut open = self.sessions.open.lock();
        open.connected
            .retain(|server| !Arc::ptr_eq(server, &self.server));
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        let Self(sessions) = self;
        sessions.open.lock().holding -= 1;
        sessions.ended.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use dns_core::config::Config;

    use super::*;

    #[test]
    fn repeated_address_counts_once() {
        let text = br#"{"address": "0.0.0.0", "port": 53}"#;
        let config = Config::check("config.json", text).1.unwrap().config;
        let other = SocketAddr::from(([10, 0, 0, 2], 53));
        let authority = Authority {
            xdp: config.fast_path(),
            main: config.listen,
            listen: vec![config.listen, other],
        };
        let foreign = SocketAddr::from(([10, 0, 0, 9], 53));
        let mut wanted = vec![config.listen; 50_000];
        wanted.extend([foreign, other]);
        assert_eq!(authority.allowed(&wanted), [config.listen, other]);
    }

    #[test]
    fn late_end_spares_later_session() {
        let sessions = Arc::<Sessions>::default();
        let mut places: Vec<_> = (0..=MAX_SESSIONS).map(|_| begin(&sessions)).collect();
        let disconnected = places.remove(0);
        drop(places);
        assert!(sessions.open.lock().connected.is_empty());
        let later = begin(&sessions);
        drop(disconnected);
        let open = sessions.open.lock();
        assert_eq!(open.connected.len(), 1);
        assert!(Arc::ptr_eq(&open.connected[0], &later.server));
    }

    /// Begins a session, if necessary after the end of another one.
    fn begin(sessions: &Arc<Sessions>) -> Place {
        let (ours, _) = UnixStream::pair().unwrap();
        sessions.begin(ours, Duration::MAX).unwrap()
    }

    #[test]
    fn disconnected_sessions_count_until_they_end() {
        let sessions = Arc::<Sessions>::default();
        let mut places: Vec<_> = (0..MAX_HOLDING).map(|_| begin(&sessions)).collect();
        assert_eq!(sessions.open.lock().connected.len(), MAX_SESSIONS);
        let (ours, _) = UnixStream::pair().unwrap();
        assert!(sessions.begin(ours, Duration::ZERO).is_none());

        let later = sessions.clone();
        let waiting = thread::spawn(move || drop(begin(&later)));
        drop(places.remove(0));
        waiting.join().unwrap();
        assert_eq!(sessions.open.lock().holding, MAX_HOLDING - 1);
    }
}
