//! The API on 127.0.0.1 with mutual TLS and on the control socket: bosh-dns's `/instances` and
//! `/local-groups`, and the paths used by our command line.
//!
//! | Path | Method | Response |
//! |---|---|---|
//! | `/instances[?address=NAME]` | any | JSON lines, one per instance; 422 for a malformed or unknown name |
//! | `/local-groups` | any | JSON lines: the VM as a whole, then each link of each job |
//! | `/status` | GET | a JSON object ([`crate::ops::status::Status`]) |
//! | `/resolve?name=NAME` | GET | a JSON object: resolution of the name, step by step |
//! | `/tap[?every=N][&name=TEXT][&client=TEXT][&misses=1]` | GET | endless JSON lines, one per query |
//! | `/log` | GET, POST | log levels; POST changes them |
//! | `/reload` | POST | reloads every file, as SIGHUP does |
//! | `/flush` | POST | flushes all caches |
//! | `/cache[?name=NAME][&zone=NAME][&type=TYPE][&limit=N]` | GET | a JSON object ([`dns_upstream::Listing`]) |
//! | `/cache/flush` | POST | removes cached answers ([`CacheFlush`]) |

mod backend;
mod cache;
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
    cache::{CacheFlush, Criteria},
    control::LogChange,
    control_socket::ControlSocket,
    groups::{Group, LocalHealth, read_jobs},
    instances::InstanceLine,
};
use crate::ops::http;
use dns_kit::tls::{RotatingTls, common_name};

/// A bound API socket.
pub struct ApiServer {
    /// Yields connections whose client presented a valid certificate.
    listener: listener::TlsListener,
    backend: Arc<Backend>,
    /// Common names with access to the administrative paths; `None` for every valid certificate.
    admins: Option<Arc<[String]>>,
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
        let refused = listener::register(backend.metrics.registry()).map_err(io::Error::other)?;
        let listener = listener::TlsListener::start(socket, tls, refused)?;
        Ok(Self { listener, backend, admins: admins.map(Arc::from) })
    }

    /// Returns the bound address, including a port chosen by the kernel.
    pub fn local_addr(&self) -> SocketAddr {
        self.listener.address()
    }

    /// Serves until `shutdown` completes, then closes streams that are still open.
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

/// Returns whether a client certificate's common name is in `admins`.
fn is_admin(stream: &TlsStream<TcpStream>, admins: &[String]) -> bool {
    let certificates = stream.get_ref().1.peer_certificates();
    let name = certificates.and_then(<[_]>::first).and_then(common_name);
    name.is_some_and(|name| admins.contains(&name))
}

/// Routes all administrative paths to `there`.
fn operations(there: MethodRouter) -> Router {
    ["/cache", "/cache/flush", "/flush", "/log", "/tap", "/reload"]
        .into_iter()
        .fold(Router::new(), |router, path| router.route(path, there.clone()))
}

async fn not_an_admin() -> Response {
    let reason = "the client certificate's common name is not in api.admins\n";
    (StatusCode::FORBIDDEN, reason).into_response()
}

fn routes(backend: Arc<Backend>) -> Router {
    Router::new()
        // bosh-dns ignores the method (observed).
        .route("/instances", any(instances::instances))
        .route("/local-groups", any(groups::local_groups))
        .route("/status", get(control::status))
        .route("/resolve", get(control::resolve))
        .route("/tap", get(tap::tap))
        .route("/log", get(control::levels).post(control::change_levels))
        .route("/reload", post(control::reload))
        .route("/flush", post(control::flush))
        .route("/cache", get(cache::list))
        .route("/cache/flush", post(cache::flush))
        .with_state(backend)
}

/// Builds a response of JSON lines.
fn json_lines<T: Serialize>(lines: impl IntoIterator<Item = T>) -> Response {
    let mut text = String::new();
    for line in lines {
        match serde_json::to_string(&line) {
            Ok(json) => text.push_str(&json),
            Err(error) => return (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
        }
        text.push('\n');
    }
    // It may wait for its client.
    text.shrink_to_fit();
    ([(header::CONTENT_TYPE, "application/x-ndjson")], text).into_response()
}

/// Builds a 422 response with the reason, as bosh-dns does (observed).
fn refused(NameRefused(reason): NameRefused) -> Response {
    (StatusCode::UNPROCESSABLE_ENTITY, format!("{reason}\n")).into_response()
}

#[cfg(test)]
mod tests;
