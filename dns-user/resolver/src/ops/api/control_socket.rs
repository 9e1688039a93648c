//! The control socket: the whole API for those who are on the machine, without certificates.
//! The kernel says who they are (`SO_PEERCRED`, unix(7)).

use std::{
    fs, io,
    os::unix::{
        fs::{PermissionsExt, chown},
        net::UnixListener as StdListener,
    },
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use nix::unistd::{Gid, Group, Uid, User};
use tokio::net::{UnixListener, UnixStream, unix::SocketAddr};

use super::{ApiBackend, routes};
use crate::ops::http;
use dns_core::config::ControlConfig;
use dns_platform::logs::LineLimit;

/// The control socket, bound.
#[derive(Debug)]
pub struct ControlSocket {
    /// What is listened on.
    listener: StdListener,
    /// Who may ask.
    admitted: Admitted,
}

/// Who may ask, besides root and whoever the server runs as.
#[derive(Clone, Copy, Debug)]
struct Admitted {
    /// The socket's owner.
    user: Uid,
    /// The socket's group, if one is configured.
    group: Option<Gid>,
}

impl ControlSocket {
    /// Binds the socket and gives it to its owner and group: to be done while we still are root.
    ///
    /// It takes the place of what a server before left there in one step. The folder is made
    /// if it is not there.
    pub fn bind(config: &ControlConfig) -> io::Result<Self> {
        let ControlConfig { socket, user, group } = config;
        let user = match user {
            Some(name) => User::from_name(name)?.ok_or_else(|| unknown("user", name))?.uid,
            None => Uid::effective(),
        };
        let group = match group {
            Some(name) => Some(Group::from_name(name)?.ok_or_else(|| unknown("group", name))?.gid),
            None => None,
        };
        if let Some(folder) = socket.parent() {
            fs::create_dir_all(folder)?;
        }
        let part = PathBuf::from(format!("{}.{}", socket.display(), std::process::id()));
        let listener = StdListener::bind(&part)?;
        let put = || {
            fs::set_permissions(
                &part,
                fs::Permissions::from_mode(if group.is_some() { 0o660 } else { 0o600 }),
            )?;
            if user != Uid::effective() || group.is_some() {
                chown(&part, Some(user.as_raw()), group.map(Gid::as_raw))?;
            }
            fs::rename(&part, socket)
        };
        if let Err(problem) = put() {
            // Nothing of ours stays; the first problem is the one that matters.
            let _ = fs::remove_file(&part);
            return Err(problem);
        }
        listener.set_nonblocking(true)?;
        Ok(Self { listener, admitted: Admitted { user, group } })
    }

    /// Serves until the process ends.
    pub async fn run(self, backend: Arc<dyn ApiBackend>) -> io::Result<()> {
        let Self { listener, admitted } = self;
        let listener = Admitting { listener: UnixListener::from_std(listener)?, admitted };
        let all = routes(backend);
        http::serve(listener, |_: &UnixStream| all.clone(), std::future::pending()).await;
        Ok(())
    }
}

/// There is no such user or group.
fn unknown(kind: &str, name: &str) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("control.{kind}: there is no {kind} {name:?}"))
}

impl Admitted {
    /// Whether a peer may ask. The socket's mode says the same; this holds also where a file
    /// system or a folder's owner does not.
    fn admits(self, user: Uid, group: Gid) -> bool {
        if user.is_root() || user == Uid::effective() || user == self.user {
            return true;
        }
        let Some(wanted) = self.group else { return false };
        // The peer's other groups are those of the user database.
        wanted == group || supplementary(user).contains(&wanted)
    }
}

/// Groups that a user belongs to; none if the user is not known.
fn supplementary(user: Uid) -> Vec<Gid> {
    let Ok(Some(user)) = User::from_uid(user) else { return Vec::new() };
    let Ok(name) = std::ffi::CString::new(user.name) else { return Vec::new() };
    nix::unistd::getgrouplist(&name, user.gid).unwrap_or_default()
}

/// Hands out connections of those who may ask.
struct Admitting {
    /// What is listened on.
    listener: UnixListener,
    /// Who may ask.
    admitted: Admitted,
}

impl axum::serve::Listener for Admitting {
    type Io = UnixStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (UnixStream, SocketAddr) {
        loop {
            let (stream, address) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    static LIMIT: LineLimit = LineLimit::new();
                    if let Some(left_out) = LIMIT.admit_any() {
                        tracing::warn!(%error, left_out, "the control socket cannot accept a connection");
                    }
                    // Out of file descriptors, most likely: give others time to close some.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            match stream.peer_cred() {
                Ok(peer) if self.admitted.admits(Uid::from_raw(peer.uid()), Gid::from_raw(peer.gid())) => {
                    return (stream, address);
                }
                Ok(peer) => {
                    static LIMIT: LineLimit = LineLimit::new();
                    if let Some(left_out) = LIMIT.admit_any() {
                        tracing::warn!(
                            user = peer.uid(),
                            left_out,
                            "the control socket refused a client: control.user and control.group do not admit its user"
                        );
                    }
                }
                Err(error) => {
                    static LIMIT: LineLimit = LineLimit::new();
                    if let Some(left_out) = LIMIT.admit_any() {
                        tracing::warn!(%error, left_out, "the control socket refused a client: cannot read its user id (SO_PEERCRED)");
                    }
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_the_owner_and_the_group_are_admitted() {
        let (user, group) = (Uid::from_raw(4_000_001), Gid::from_raw(4_000_002));
        let (stranger, elsewhere) = (Uid::from_raw(4_000_003), Gid::from_raw(4_000_004));
        let admitted = Admitted { user, group: Some(group) };
        assert!(admitted.admits(Uid::from_raw(0), elsewhere));
        assert!(admitted.admits(Uid::effective(), elsewhere));
        assert!(admitted.admits(user, elsewhere));
        assert!(admitted.admits(stranger, group));
        assert!(!admitted.admits(stranger, elsewhere));
        assert!(!Admitted { user, group: None }.admits(stranger, group));
    }

    #[test]
    fn a_socket_takes_the_place_of_one_left_behind() {
        let folder = tempfile::tempdir().unwrap();
        let config =
            ControlConfig { socket: folder.path().join("run/control.sock"), user: None, group: None };
        drop(ControlSocket::bind(&config).unwrap());
        assert!(config.socket.exists());
        let _second = ControlSocket::bind(&config).unwrap();
        std::os::unix::net::UnixStream::connect(&config.socket).unwrap();
        let mode = fs::metadata(&config.socket).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let names: Vec<_> = fs::read_dir(folder.path().join("run")).unwrap().collect();
        assert_eq!(names.len(), 1);
    }
}
