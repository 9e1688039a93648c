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
};

use nix::unistd::Gid;
use parking_lot::Mutex;

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
    fn allowed(&self, wanted: &[SocketAddr]) -> Vec<SocketAddr> {
        let (allowed, refused): (Vec<_>, Vec<_>) = wanted
            .iter()
            .copied()
            .partition(|address: &SocketAddr| self.listen.contains(address));
        if let Some(first) = refused.first() {
            // A server repeats its request at every change; a hostile one as often as it can.
            static LIMIT: LineLimit = LineLimit::new();
            if let Some(suppressed) = LIMIT.admit_any() {
                tracing::warn!(
                    address = %first,
                    refused = refused.len(),
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
        let sessions = Sessions::default();
        loop {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // The service manager starts the attacher again, and attached programs stay.
                Err(error) => return error,
            };
            static LIMIT: LineLimit = LineLimit::new();
            match peer(&stream) {
                // The mode of the socket admits a group; whoever else is in it gets nothing.
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
            let place = sessions.begin(stream);
            let authority = authority.clone();
            let session = threads::spawn("session", OnPanic::EndProcess, move || {
                let ConnectedServer { stream, serves } = &*place.open;
                if let Err(error) =
                    session::serve(stream, &authority, serves, Some(session::TIMEOUT))
                {
                    static LIMIT: LineLimit = LineLimit::new();
                    if let Some(suppressed) = LIMIT.admit_any() {
                        tracing::warn!(%error, suppressed, "connection to a server lost: its programs stay attached and answer until its lease expires");
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
struct Sessions(Arc<Mutex<Vec<Arc<ConnectedServer>>>>);

struct ConnectedServer {
    /// Shut down to end the session.
    stream: UnixStream,
    /// Whether the maps are filled: the server is in service.
    serves: AtomicBool,
}

/// A session's entry in [`Sessions`], removed when dropped.
struct Place {
    sessions: Sessions,
    open: Arc<ConnectedServer>,
}

impl Sessions {
    /// Registers a session; beyond [`MAX_SESSIONS`] disconnects the oldest, preferably one whose
    /// maps are not filled.
    fn begin(&self, stream: UnixStream) -> Place {
        let mut sessions = self.0.lock();
        if sessions.len() >= MAX_SESSIONS {
            // Whoever only connects must not put an end to a server in service.
            let cut = sessions
                .iter()
                .position(|session| !session.serves.load(Ordering::Relaxed))
                .unwrap_or(0);
            let cut = sessions.remove(cut);
            tracing::warn!(
                serves = cut.serves.load(Ordering::Relaxed),
                "too many servers connected: the oldest connection is closed"
            );
            // If this fails, the session ends by itself.
            let _ = cut.stream.shutdown(Shutdown::Both);
        }
        let open = Arc::new(ConnectedServer {
            stream,
            serves: AtomicBool::new(false),
        });
        sessions.push(open.clone());
        Place {
            sessions: self.clone(),
            open,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // By identity: a session that was displaced ends after its entry, and must not remove
        // another's.
        self.sessions
            .0
            .lock()
            .retain(|session| !Arc::ptr_eq(session, &self.open));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_end_spares_later_session() {
        let sessions = Sessions::default();
        let begin = || sessions.begin(UnixStream::pair().unwrap().0);
        let mut places: Vec<_> = (0..=MAX_SESSIONS).map(|_| begin()).collect();
        let disconnected = places.remove(0);
        drop(places);
        assert!(sessions.0.lock().is_empty());
        let later = begin();
        drop(disconnected);
        let left = sessions.0.lock();
        assert!(left.len() == 1 && Arc::ptr_eq(&left[0], &later.open));
    }
}
