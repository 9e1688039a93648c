//! The control socket: the whole API for local users, without certificates. The kernel identifies
//! the peer (`SO_PEERCRED`, unix(7)).

use std::{io, os::unix::net::UnixListener as StdListener, sync::Arc, time::Duration};

use nix::unistd::{Gid, Uid, User};
use tokio::net::{UnixListener, UnixStream, unix::SocketAddr};

use super::{Backend, routes};
use crate::accounts;
use crate::ops::http;
use dns_core::config::ControlConfig;
use dns_kit::{
    logs::LineLimit,
    unix_socket::{self, Access},
};

/// A bound control socket.
#[derive(Debug)]
pub struct ControlSocket {
    listener: StdListener,
    admitted: Admitted,
}

/// Users permitted to connect, besides root and the server's own user.
#[derive(Clone, Copy, Debug)]
struct Admitted {
    /// The socket's owner.
    user: Uid,
    /// The socket's group, if one is configured.
    group: Option<Gid>,
}

impl ControlSocket {
    /// Binds the socket and sets its owner and group, which requires root. Without `control.user`
    /// the owner is `server_user`, the user that the server switches to.
    pub fn bind(config: &ControlConfig, server_user: Option<&str>) -> io::Result<Self> {
        let ControlConfig { socket, user, group, is_default: _ } = config;
        let of_user = |key, name: &str| match accounts::user(key, name) {
            Ok(user) => Ok(user.uid),
            Err(error) => Err(io::Error::new(io::ErrorKind::NotFound, error)),
        };
        let server = server_user.map(|name| of_user("xdp.user", name)).transpose()?;
        let user = match user {
            Some(name) => Some(of_user("control.user", name)?),
            None => server,
        };
        let group = match group {
            Some(name) => match accounts::group("control.group", name) {
                Ok(group) => Some(group.gid),
                Err(error) => return Err(io::Error::new(io::ErrorKind::NotFound, error)),
            },
            None => None,
        };
        let trusted = Vec::from_iter(server);
        let listener = unix_socket::bind(socket, Access { user, group }, &trusted)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, admitted: Admitted { user: user.unwrap_or(Uid::effective()), group } })
    }

    /// Serves until the process ends.
    pub async fn run(self, backend: Arc<Backend>) -> io::Result<()> {
        let Self { listener, admitted } = self;
        let listener = Admitting { listener: UnixListener::from_std(listener)?, admitted };
        let all = routes(backend);
        http::serve(listener, |_: &UnixStream| all.clone(), std::future::pending()).await;
        Ok(())
    }
}

impl Admitted {
    /// Returns whether a peer is permitted. The socket's mode should enforce the same, but some
    /// file systems ignore it, and the folder's owner can bypass it.
    fn admits(self, user: Uid, group: Gid) -> bool {
        if user.is_root() || user == Uid::effective() || user == self.user {
            return true;
        }
        let Some(wanted) = self.group else { return false };
        // SO_PEERCRED reports only the primary group; the others are in the user database.
        wanted == group || supplementary(user).contains(&wanted)
    }
}

/// Returns the groups of a user; empty if the user is unknown.
fn supplementary(user: Uid) -> Vec<Gid> {
    let Ok(Some(user)) = User::from_uid(user) else { return Vec::new() };
    let Ok(name) = std::ffi::CString::new(user.name) else { return Vec::new() };
    nix::unistd::getgrouplist(&name, user.gid).unwrap_or_default()
}

/// A listener that yields only connections of permitted users.
struct Admitting {
    listener: UnixListener,
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
                    // Probably out of file descriptors; wait until some are closed.
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
                            "control socket client refused: not permitted by control.user and control.groups user"
                        );
                    }
                }
                Err(error) => {
                    static LIMIT: LineLimit = LineLimit::new();
                    if let Some(left_out) = LIMIT.admit_any() {
                        tracing::warn!(%error, left_out, "control socket client refused: cannot read its user id (SO_PEERCRED)");
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
}
