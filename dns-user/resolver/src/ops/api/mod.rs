//! The API on 127.0.0.1 with mutual TLS and on the control socket: bosh-dns's `/instances` and
//! `/local-groups`, and the paths used by our command line.
//!
//! | Path | Method | Response |
//! |---|---|---|
//! | `/instances[?address=NAME]` | any | JSON lines, one per instance; 422 for a malformed or unknown name |
//! | `/local-groups` | any | JSON lines: the VM as a whole, then each link of each job |
//! | `/status` | GET | a JSON object ([`crate::ops::status::ServerStatus`]) |
//! | `/resolve?name=NAME[&type=TYPE]` | GET | a JSON object: resolution of the name, step by step |
//! | `/addresses` | POST | for each [`dns_core::resolve::AddressQuery`] of a list of at most 1,000 its `Ok` or `Err`; keeps the names' instances checked |
//! | `/tap[?every=N][&name=TEXT][&client=TEXT][&misses=1]` | GET | endless JSON lines, one per query |
//! | `/log` | GET, POST | log levels; POST changes them |
//! | `/reload` | POST | reloads every file, as SIGHUP does |
//! | `/flush` | POST | flushes all caches |
//! | `/cache[?name=NAME][&zone=NAME][&type=TYPE][&limit=N]` | GET | a JSON object ([`dns_upstream::Listing`]) |
//! | `/cache/flush` | POST | removes cached answers ([`CacheFlush`]) |

mod backend;
mod control;
mod instances;
mod local_groups;
mod tap;

use std::{future::pending, io, net::SocketAddr, sync::Arc};

use axum::{
    Router,
    extract::DefaultBodyLimit,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{MethodRouter, any, get, post},
};
use nix::unistd::Uid;
use prometheus::{IntCounter, Registry};
use tokio::net::TcpListener;

pub(crate) use self::local_groups::LocalJobs;
pub use self::{
    backend::{Backend, LocalReply, NameRefused},
    control::{CacheContents, CacheFlush, DEFAULT_LEVEL, LEVELS, LogChange},
    instances::InstanceLine,
    local_groups::Group,
};
use dns_core::config::ControlConfig;
use dns_kit::{
    accounts,
    http_server::{Listener, Server, ServerLimits},
    metrics::families,
    tls::RotatingTls,
    unix_socket::{Access, ControlSocket},
};

/// Maximum size of the queries for addresses: 1,000 names, of which 300,000 addresses are withdrawn.
const MAX_QUERIES: usize = 8 << 20;

/// A bound API socket.
pub struct ApiServer {
    server: Server,
    backend: Arc<Backend>,
    /// Common names with access to the administrative paths; `None` for every valid certificate.
    admins: Option<Vec<String>>,
}

impl ApiServer {
    /// Binds `address`; connections use the newest certificates. If `admins` is set, only clients
    /// with these common names may use `/cache`, `/flush`, `/log`, `/tap` and `/reload`; otherwise
    /// any client with a valid certificate may.
    pub async fn bind(
        address: SocketAddr,
        tls: Arc<RotatingTls>,
        backend: Arc<Backend>,
        admins: Option<Vec<String>>,
    ) -> io::Result<Self> {
        let socket = TcpListener::bind(address).await?;
        let replaced =
            register_connections(backend.metrics.registry()).map_err(io::Error::other)?;
        let listener = Listener::Tls(socket, Box::new(move || tls.server_config()));
        Ok(Self {
            server: Server::new("the API", listener).count_replaced(replaced),
            backend,
            admins,
        })
    }

    /// Serves until the process ends.
    pub async fn run(self) {
        let Self {
            server,
            backend,
            admins,
        } = self;
        let all = routes(backend);
        let refused = operations(any(not_an_admin));
        let routes_for = move |client: &dns_kit::http_server::Client| {
            let is_admin = match &admins {
                Some(admins) => client
                    .common_name()
                    .is_some_and(|name| admins.contains(&name)),
                None => true,
            };
            if is_admin {
                all.clone()
            } else {
                // The paths of bosh-dns stay open to its own clients, which have other common
                // names.
                refused.clone().fallback_service(all.clone())
            }
        };
        server.run(routes_for, pending()).await;
    }
}

/// Registers the limit of the API's connections; returns the counter of those that gave way to others.
fn register_connections(registry: &Registry) -> prometheus::Result<IntCounter> {
    let limit = families::LIMIT.gauges()?;
    limit
        .with_label_values(&["api_connections"])
        .set(ServerLimits::default().connections as i64);
    registry.register(Box::new(limit))?;
    let replaced = families::API_REFUSED_CONNECTIONS_TOTAL.counter()?;
    registry.register(Box::new(replaced.clone()))?;
    Ok(replaced)
}

/// A bound control socket.
#[derive(Debug)]
pub struct BoundControl {
    pub(crate) socket: ControlSocket,
    /// Why the configured group has no access.
    pub(crate) without_group: Option<String>,
}

/// Binds the control socket and sets its owner and group, which requires root or membership in the
/// group. Without `control.user` the owner is `server_user`, the user that the server switches to.
pub fn bind_control(config: &ControlConfig, server_user: Option<&str>) -> io::Result<BoundControl> {
    let ControlConfig {
        socket,
        user,
        group,
        is_default: _,
    } = config;
    let server = uid_of("xdp.user", server_user)?;
    // Commands of the server's own user must work without a group.
    let user = uid_of("control.user", user.as_deref())?.or(server);
    let group = match group {
        Some(name) => Some(accounts::group("control.group", name).map_err(missing)?),
        None => None,
    };
    let gid = group.as_ref().map(|group| group.gid);
    // The folder may belong to root or to this user; a folder of anybody else could be exchanged
    // under the socket.
    let trusted: Vec<Uid> = server.into_iter().collect();
    let with_group = ControlSocket::bind(socket, Access { user, group: gid }, &trusted);
    match (with_group, group) {
        // A service manager may start the server as a user who is no member of the group, and only
        // members may give files to it (chown(2)). Root can still use commands.
        (Err(error), Some(group)) if error.kind() == io::ErrorKind::PermissionDenied => {
            let access = Access { user, group: None };
            let socket = ControlSocket::bind(socket, access, &trusted)?;
            let name = group.name;
            let why = format!(
                "control: the socket is bound without the group {name:?}, of which this process is no member"
            );
            Ok(BoundControl {
                socket,
                without_group: Some(why),
            })
        }
        (bound, _) => Ok(BoundControl {
            socket: bound?,
            without_group: None,
        }),
    }
}

/// Returns the user that a setting names, if any.
fn uid_of(setting: &'static str, name: Option<&str>) -> io::Result<Option<Uid>> {
    match name {
        Some(name) => Ok(Some(accounts::user(setting, name).map_err(missing)?.uid)),
        None => Ok(None),
    }
}

/// Returns the error of an account that this machine does not have.
fn missing(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, error)
}

/// Serves the whole API on the control socket, to local users and without certificates, until the process
/// ends.
pub async fn serve_control(socket: ControlSocket, backend: Arc<Backend>) -> io::Result<()> {
    let all = routes(backend);
    let server = Server::new("the control socket", Listener::Control(socket.listen()?));
    server
        // The mode of the socket decides who connects, so every client is an administrator.
        .run(move |_| all.clone(), pending())
        .await;
    Ok(())
}

/// Routes all administrative paths to `there`.
fn operations(there: MethodRouter) -> Router {
    [
        "/cache",
        "/cache/flush",
        "/flush",
        "/log",
        "/tap",
        "/reload",
    ]
    .into_iter()
    .fold(Router::new(), |router, path| {
        router.route(path, there.clone())
    })
}

async fn not_an_admin() -> Response {
    let reason = "the client certificate's common name is not in api.admins\n";
    (StatusCode::FORBIDDEN, reason).into_response()
}

fn routes(backend: Arc<Backend>) -> Router {
    Router::new()
        // bosh-dns ignores the method (observed).
        .route("/instances", any(instances::instances))
        .route("/local-groups", any(instances::local_groups))
        .route("/status", get(control::status))
        .route("/resolve", get(control::resolve))
        .route(
            "/addresses",
            post(instances::addresses).layer(DefaultBodyLimit::max(MAX_QUERIES)),
        )
        .route("/tap", get(tap::tap))
        .route("/log", get(control::levels).post(control::change_levels))
        .route("/reload", post(control::reload))
        .route("/flush", post(control::flush_all))
        .route("/cache", get(control::list_cached))
        .route("/cache/flush", post(control::flush_selected))
        .with_state(backend)
}

/// Builds a 422 response with the reason, as bosh-dns does (observed).
fn refused(NameRefused(reason): NameRefused) -> Response {
    (StatusCode::UNPROCESSABLE_ENTITY, format!("{reason}\n")).into_response()
}

#[cfg(test)]
mod tests;
