//! The API on 127.0.0.1, by mutual TLS, and on the control socket: the reference's `/instances` and
//! `/local-groups`, and what our own command line needs.
//!
//! | Path | Method | Answer |
//! |---|---|---|
//! | `/instances[?address=NAME]` | any | JSON lines, an instance each; 422 for a malformed or unknown name |
//! | `/local-groups` | any | JSON lines: the VM as a whole, then each link of each job |
//! | `/status` | GET | one JSON object ([`crate::ops::status::Status`]) |
//! | `/resolve?name=NAME` | GET | one JSON object: what the name means, step by step |
//! | `/tap[?every=N][&name=TEXT][&client=TEXT][&misses=1]` | GET | JSON lines, a query each, without end |
//! | `/log` | GET, POST | levels of the log; POST changes them |
//! | `/reload` | POST | reads all files anew, as SIGHUP does |
//! | `/flush` | POST | empties the cache |

mod backend;
mod control;
mod control_socket;
mod groups;
mod instances;
mod listener;
mod peer;
mod tap;

use std::{future::Future, io, net::SocketAddr, sync::Arc};

use axum::{
    Router,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::{MethodRouter, any, get, post},
};
use serde::Serialize;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::server::TlsStream;

pub use self::{
    backend::{Backend, NameRefused, ReloadError, Reloaded},
    control::LogChange,
    control_socket::ControlSocket,
    groups::{Group, LocalHealth, read_jobs},
    instances::InstanceLine,
};
use crate::ops::http;
use dns_platform::tls::{RotatingTls, common_name};

/// The socket of the API, bound.
pub struct ApiServer {
    /// Hands out connections whose client has shown a good certificate.
    listener: listener::TlsListener,
    /// Who knows the answers.
    backend: Arc<Backend>,
    /// Whose certificates may change something; `None`: every good one.
    admins: Option<Arc<[String]>>,
}

impl ApiServer {
    /// Binds `address`; connections are served with the newest certificates. `admins`
    /// are the common names of the clients for which alone `/flush`, `/log`, `/tap` and
    /// `/reload` are; without them they are for every client with a good certificate.
    pub async fn bind(
        address: SocketAddr,
        tls: Arc<RotatingTls>,
        backend: Arc<Backend>,
        admins: Option<Vec<String>>,
    ) -> io::Result<Self> {
        let socket = TcpListener::bind(address).await?;
        let listener = listener::TlsListener::start(socket, tls)?;
        Ok(Self { listener, backend, admins: admins.map(Arc::from) })
    }

    /// Where it listens, the port that the kernel chose included.
    pub fn local_addr(&self) -> SocketAddr {
        self.listener.address()
    }

    /// Serves until `shutdown` ends. Streams that are still open are cut then.
    pub async fn run(self, shutdown: impl Future<Output = ()>) {
        let Self { listener, backend, admins } = self;
        let (all, refused) = (routes(backend), operations(any(not_an_admin)));
        let routes_for = |stream: &TlsStream<TcpStream>| match &admins {
            Some(admins) if !is_admin(stream, admins) => refused.clone().fallback_service(all.clone()),
            _ => all.clone(),
        };
        http::serve(listener, routes_for, shutdown).await;
    }
}

/// Whether a client's certificate is issued to one of the administrators.
fn is_admin(stream: &TlsStream<TcpStream>, admins: &[String]) -> bool {
    let certificates = stream.get_ref().1.peer_certificates();
    let name = certificates.and_then(<[_]>::first).and_then(common_name);
    name.is_some_and(|name| admins.contains(&name))
}

/// The paths that are for administrators, all leading to `there`.
fn operations(there: MethodRouter) -> Router {
    ["/flush", "/log", "/tap", "/reload"]
        .into_iter()
        .fold(Router::new(), |router, path| router.route(path, there.clone()))
}

/// 403.
async fn not_an_admin() -> Response {
    let reason = "this client certificate's common name is not among api.admins\n";
    (StatusCode::FORBIDDEN, reason).into_response()
}

/// All paths.
fn routes(backend: Arc<Backend>) -> Router {
    Router::new()
        // The reference does not look at the method (observed).
        .route("/instances", any(instances::instances))
        .route("/local-groups", any(groups::local_groups))
        .route("/status", get(control::status))
        .route("/resolve", get(control::resolve))
        .route("/tap", get(tap::tap))
        .route("/log", get(control::levels).post(control::change_levels))
        .route("/reload", post(control::reload))
        .route("/flush", post(control::flush))
        .with_state(backend)
}

/// An answer of JSON lines.
fn json_lines<T: Serialize>(lines: impl IntoIterator<Item = T>) -> Response {
    let mut text = String::new();
    for line in lines {
        match serde_json::to_string(&line) {
            Ok(json) => text.push_str(&json),
            Err(error) => return (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
        }
        text.push('\n');
    }
    ([(header::CONTENT_TYPE, "application/x-ndjson")], text).into_response()
}

/// A refusal of a name: 422 with the reason, as the reference (observed).
fn refused(NameRefused(reason): NameRefused) -> Response {
    (StatusCode::UNPROCESSABLE_ENTITY, format!("{reason}\n")).into_response()
}

#[cfg(test)]
mod tests;
