//! Listeners: the control socket and mutual TLS.

use std::{
    fs, io,
    os::unix::{
        fs::{PermissionsExt as _, chown},
        net::UnixListener as StdListener,
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use axum::{Router, http::StatusCode};
use dns_kit::http_server;
use dns_kit::tls::{RotatingTls, common_name};
use nix::unistd::{Gid, Group, Uid, User};
use tokio::{
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tokio_rustls::TlsAcceptor;

/// Maximum number of connections to the control socket.
const MOST_CONNECTIONS: usize = 64;

/// Clients that are admitted by their certificate.
#[derive(Clone, Debug)]
pub enum Access {
    /// All clients with a certificate of the CA.
    All,
    /// Clients whose certificate has one of these common names.
    Names(Arc<[String]>),
}

/// The bound control socket.
#[derive(Debug)]
pub struct ControlSocket {
    listener: StdListener,
    group: Option<Gid>,
}

impl ControlSocket {
    /// Binds a socket for the process's user, and for a group if one is given. It replaces the
    /// socket of an earlier process.
    pub fn bind(path: &Path, group: Option<&str>) -> io::Result<Self> {
        let group = match group {
            Some(name) => {
                let unknown =
                    || io::Error::new(io::ErrorKind::NotFound, format!("group {name:?} does not exist"));
                Some(Group::from_name(name)?.ok_or_else(unknown)?.gid)
            }
            None => None,
        };
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let part = PathBuf::from(format!("{}.{}", path.display(), std::process::id()));
        let listener = StdListener::bind(&part)?;
        let put = || {
            let mode = if group.is_some() { 0o660 } else { 0o600 };
            fs::set_permissions(&part, fs::Permissions::from_mode(mode))?;
            if let Some(group) = group {
                chown(&part, None, Some(group.as_raw()))?;
            }
            fs::rename(&part, path)
        };
        if let Err(error) = put() {
            // The first error is the relevant one.
            let _ = fs::remove_file(&part);
            return Err(error);
        }
        listener.set_nonblocking(true)?;
        Ok(Self { listener, group })
    }

    /// Returns whether a peer may connect. The kernel reports the peer (`SO_PEERCRED`, unix(7)), so
    /// the check does not rely on the permissions of the socket's folder.
    fn admits(&self, stream: &UnixStream) -> bool {
        let Ok(peer) = stream.peer_cred() else { return false };
        let user = Uid::from_raw(peer.uid());
        if user.is_root() || user == Uid::effective() {
            return true;
        }
        let Some(group) = self.group else { return false };
        let groups = || {
            let user = User::from_uid(user).ok().flatten()?;
            let name = std::ffi::CString::new(user.name).ok()?;
            nix::unistd::getgrouplist(&name, user.gid).ok()
        };
        Gid::from_raw(peer.gid()) == group || groups().is_some_and(|groups| groups.contains(&group))
    }
}

/// Serves the control socket until dropped.
pub async fn serve_control(socket: ControlSocket, routes: Router) -> io::Result<()> {
    let listener = UnixListener::from_std(socket.listener.try_clone()?)?;
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        let permit = place(&places).await;
        match listener.accept().await {
            Ok((stream, _)) if socket.admits(&stream) => spawn(stream, routes.clone(), permit),
            Ok(_) => tracing::warn!("control socket client refused: its user is not permitted"),
            Err(error) => pause(&error).await,
        }
    }
}

/// Serves mutual TLS until dropped.
pub async fn serve_tls(listener: TcpListener, tls: Arc<RotatingTls>, access: Access, routes: Router) {
    let refused = Router::new().fallback(|| async {
        (StatusCode::FORBIDDEN, "the client certificate's common name is not in api.clients\n")
    });
    let serve_one = move |stream: TcpStream| {
        let acceptor = TlsAcceptor::from(tls.server_config());
        let (routes, refused, access) = (routes.clone(), refused.clone(), access.clone());
        async move {
            let Ok(stream) = acceptor.accept(stream).await else { return };
            let certificates = stream.get_ref().1.peer_certificates();
            let name = certificates.and_then(<[_]>::first).and_then(common_name);
            let is_admitted = match &access {
                Access::All => true,
                Access::Names(names) => name.is_some_and(|name| names.contains(&name)),
            };
            // A disconnecting client is not an error.
            drop(http_server::serve(stream, if is_admitted { routes } else { refused }).await);
        }
    };
    http_server::accept(listener, http_server::MOST_CONNECTIONS, serve_one).await;
}

fn spawn(stream: UnixStream, routes: Router, permit: OwnedSemaphorePermit) {
    tokio::spawn(async move {
        let _permit = permit;
        // A disconnecting client is not an error.
        drop(http_server::serve(stream, routes).await);
    });
}

async fn place(places: &Arc<Semaphore>) -> OwnedSemaphorePermit {
    match places.clone().acquire_owned().await {
        Ok(permit) => permit,
        // The semaphore is never closed.
        Err(_) => std::future::pending().await,
    }
}

async fn pause(error: &io::Error) {
    // Most likely out of file descriptors.
    tracing::warn!(%error, "cannot accept a connection; trying again");
    tokio::time::sleep(Duration::from_millis(100)).await;
}
