//! The health server: answers `GET /health` over mutual TLS from the state of this VM's agent and
//! jobs. Runs as a separate process.

mod agent;
mod config;
mod jobs;
mod process;

use std::{collections::BTreeMap, io, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    Request, Response, StatusCode, body::Incoming, header, server::conn::http1, service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
    task::JoinSet,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use self::{
    agent::AgentFile,
    jobs::{Jobs, Summary},
};
pub use self::{config::HealthServerConfig, process::run};
use super::{HEALTH_NAME, Report};
use dns_kit::{
    connections::{Connections, OwnConnections, Place},
    limits::raise_file_limit,
    logs::LineLimit,
    stall::{StallLimit, WRITE_TIMEOUT},
    tls::{RotatingTls, TlsError, common_name},
};

/// Maximum number of open connections, if the limit on open files allows: every VM that resolves
/// this VM's names keeps one.
const MAX_CONNECTIONS: usize = 8192;

/// Maximum number of TLS handshakes at a time, of which one client may have a quarter. Another one
/// closes the oldest, so that silent clients delay no other.
const MAX_HANDSHAKES: usize = 1024;

/// File descriptors for scripts, certificates and the agent's file.
const OTHER_FILES: u64 = 64;

/// Time for which a connection may stay open without a request: slightly longer than three check
/// intervals of bosh-dns.
const IDLE_LIMIT: Duration = Duration::from_secs(75);

/// Time for requests in progress to finish when the server stops.
const STOP_LIMIT: Duration = Duration::from_secs(1);

/// A health server bound to its address.
pub struct HealthServer {
    socket: TcpListener,
    tls: Arc<RotatingTls>,
    vm: Arc<Vm>,
}

/// The state of this VM.
#[derive(Debug)]
struct Vm {
    /// State reported by the agent.
    agent: AgentFile,
    /// State reported by the jobs' scripts.
    jobs: Arc<Jobs>,
    /// Time for which a request may wait for the first round of scripts.
    patience: Duration,
}

/// Reasons why the health server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum HealthServerError {
    /// The certificates cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The address is unavailable.
    #[error("cannot listen on {address}: {error}; stop the other health server or change the port")]
    Listen {
        /// The configured listen address.
        address: SocketAddr,
        /// The error of `bind` or `listen`.
        error: io::Error,
    },
}

impl HealthServer {
    /// Loads the certificates and starts listening.
    pub async fn bind(config: &HealthServerConfig) -> Result<Self, HealthServerError> {
        let tls = RotatingTls::load("health_server", HEALTH_NAME, &config.tls)?;
        if !tls.current().certificate.is_issued_to(HEALTH_NAME) {
            tracing::warn!("the certificate is not issued to {HEALTH_NAME}: clients will not accept it");
        }
        let address = config.listen;
        let socket =
            TcpListener::bind(address).await.map_err(|error| HealthServerError::Listen { address, error })?;
        let jobs =
            Jobs::new(config.jobs_dir.clone(), config.executable_path.clone(), config.executable_interval);
        let agent = AgentFile::new(config.health_file.clone());
        let vm = Arc::new(Vm { agent, jobs: Arc::new(jobs), patience: config.request_timeout });
        Ok(Self { socket, tls, vm })
    }

    /// Returns the listen address.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Returns the certificates and their key, which are reloaded when they change.
    pub fn tls(&self) -> &Arc<RotatingTls> {
        &self.tls
    }

    /// Serves until `stop` is ready, then finishes requests in progress.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let Self { socket, tls, vm } = self;
        let mut background = JoinSet::new();
        background.spawn(vm.jobs.clone().run());
        background.spawn(tls.clone().watch(|_| {}));
        let files = usize::try_from(raise_file_limit().saturating_sub(OTHER_FILES)).unwrap_or(usize::MAX);
        let handshakes = Connections::new((files / 4).clamp(1, MAX_HANDSHAKES), OwnConnections::default());
        let room = Arc::new(Semaphore::new((files - files / 4).clamp(1, MAX_CONNECTIONS)));
        let (stopping, _) = watch::channel(false);
        let mut connections = JoinSet::new();
        let mut stop = std::pin::pin!(stop);
        loop {
            let accepted = tokio::select! {
                () = &mut stop => break,
                accepted = socket.accept() => accepted,
            };
            match accepted {
                Ok((stream, client)) => {
                    while connections.try_join_next().is_some() {}
                    let (handshake, _closed) = handshakes.enter(client);
                    let (tls, vm, room) = (tls.clone(), vm.clone(), room.clone());
                    let stopping = stopping.subscribe();
                    connections.spawn(async move {
                        if let Some(stream) = shake_hands(stream, client, &tls, &vm, handshake).await {
                            serve(stream, client, vm, stopping, &room).await;
                        }
                    });
                }
                Err(error) => {
                    static LIMIT: LineLimit = LineLimit::new();
                    if let Some(left_out) = LIMIT.admit_any() {
                        tracing::warn!(left_out, "cannot accept a connection: {error}");
                    }
                    // Most likely out of file descriptors.
                    handshakes.call_off_idlest();
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
        drop(socket);
        // Running scripts are killed with their groups.
        background.shutdown().await;
        stopping.send_replace(true);
        let all_ended = async { while connections.join_next().await.is_some() {} };
        // Close the remaining connections.
        let _ = tokio::time::timeout(STOP_LIMIT, all_ended).await;
    }
}

/// Performs the TLS handshake, unless it is called off in favour of another.
async fn shake_hands(
    stream: TcpStream,
    client: SocketAddr,
    tls: &RotatingTls,
    vm: &Vm,
    place: Place,
) -> Option<TlsStream<TcpStream>> {
    // Replies are small and complete, so delaying them gains nothing.
    let _ = stream.set_nodelay(true);
    static HANDSHAKES: LineLimit = LineLimit::new();
    let handshake = tokio::time::timeout(vm.patience, TlsAcceptor::from(tls.server_config()).accept(stream));
    let why = tokio::select! {
        done = handshake => match done {
            Ok(Ok(stream)) => return Some(stream),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "it did not finish in time".to_owned(),
        },
        () = place.called_off() => "the client has too many of them".to_owned(),
    };
    if let Some(left_out) = HANDSHAKES.admit(client.ip()) {
        tracing::info!(%client, left_out, "TLS handshake failed: {why}");
    }
    None
}

async fn serve(
    stream: TlsStream<TcpStream>,
    client: SocketAddr,
    vm: Arc<Vm>,
    mut stopping: watch::Receiver<bool>,
    room: &Semaphore,
) {
    static OTHER_NAMES: LineLimit = LineLimit::new();
    let Ok(_room) = room.try_acquire() else {
        static FULL: LineLimit = LineLimit::new();
        if let Some(left_out) = FULL.admit(client.ip()) {
            tracing::warn!(%client, left_out, "too many open connections: this one is closed");
        }
        return;
    };
    let name = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first()).and_then(common_name);
    let is_known = name.as_deref() == Some(HEALTH_NAME);
    if !is_known && let Some(left_out) = OTHER_NAMES.admit(client.ip()) {
        tracing::warn!(
            %client,
            name = name.as_deref().unwrap_or("-"),
            left_out,
            "client refused: its certificate has another name"
        );
    }
    let service = service_fn(|request| {
        let vm = vm.clone();
        async move { Ok::<_, std::convert::Infallible>(answer(&request, is_known, &vm).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE_LIMIT)
        .max_buf_size(16 << 10)
        .serve_connection(TokioIo::new(StallLimit::new(stream, WRITE_TIMEOUT)), service);
    let mut connection = std::pin::pin!(connection);
    // An error means that the server is gone: stop as well.
    let told = async { _ = stopping.wait_for(|stopping| *stopping).await };
    let ended = tokio::select! {
        ended = &mut connection => ended,
        () = told => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%client, "connection ended: {error}");
    }
}

/// Answers a request. The method and the query string are ignored (observed).
async fn answer(request: &Request<Incoming>, is_known: bool, vm: &Vm) -> Response<Full<Bytes>> {
    let text = |status: StatusCode, text: &'static str| {
        let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
        *response.status_mut() = status;
        response
    };
    if request.uri().path() != "/health" {
        return text(StatusCode::NOT_FOUND, "404 page not found\n");
    }
    if !is_known {
        return text(StatusCode::BAD_REQUEST, "the client certificate is issued to another name\n");
    }
    if tokio::time::timeout(vm.patience, vm.jobs.ready()).await.is_err() {
        return text(StatusCode::SERVICE_UNAVAILABLE, "the first round of scripts has not ended yet\n");
    }
    let body = serde_json::to_vec(&vm.report()).expect("texts can always be written as JSON");
    let mut response = Response::new(Full::new(Bytes::from(body)));
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}

impl Vm {
    /// Builds the current report. Groups of jobs with a script follow the script, all others the
    /// whole VM (observed); a group with both kinds of jobs fails if either does.
    fn report(&self) -> Report {
        let Summary { all_healthy, scripted, unscripted } = self.jobs.summary();
        let whole = all_healthy && self.agent.is_running();
        let mut groups = scripted;
        for group in unscripted {
            *groups.entry(group).or_insert(true) &= whole;
        }
        let text = |healthy| if healthy { "running" } else { "failing" };
        let group_state: BTreeMap<_, _> =
            groups.into_iter().map(|(group, healthy)| (group, text(healthy))).collect();
        Report { state: text(whole), group_state }
    }
}
