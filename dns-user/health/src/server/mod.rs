//! The health server: answers `GET /health` over mutual TLS from the state of this VM's agent and
//! jobs. Runs as a separate process.

mod agent;
mod config;
mod jobs;
mod process;

use std::{collections::BTreeMap, io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    http::{StatusCode, Uri, header},
    response::{IntoResponse as _, Response},
};
use tokio::{net::TcpListener, task::JoinSet};

use self::{
    agent::AgentFile,
    jobs::{Jobs, Summary},
};
pub use self::{config::HealthServerConfig, process::run};
use super::{HEALTH_NAME, Report};
use dns_kit::{
    http_server::{Client, Limits, Listener, Server},
    limits::raise_file_limit,
    logs::LineLimit,
    tls::{RotatingTls, TlsError},
};

/// Maximum number of open connections, if the limit on open files allows: every VM that resolves
/// this VM's names keeps one.
const MAX_CONNECTIONS: usize = 8192;

/// File descriptors for scripts, certificates and the agent's file.
const OTHER_FILES: u64 = 64;

/// Time for which a connection may stay open without a request: slightly longer than three check
/// intervals of bosh-dns.
const IDLE_LIMIT: Duration = Duration::from_secs(75);

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
        let limits = Limits {
            connections: files.clamp(1, MAX_CONNECTIONS),
            handshake: vm.patience,
            idle: IDLE_LIMIT,
            head: 16 << 10,
            ..Limits::default()
        };
        let listener = Listener::Tls(socket, Box::new(move || tls.server_config()));
        let routes = move |client: &Client| {
            let (vm, is_known) = (vm.clone(), is_known(client));
            Router::new().fallback(move |uri: Uri| async move { answer(uri.path(), is_known, &vm).await })
        };
        Server::new("the health server", listener).with_limits(limits).run(routes, stop).await;
        // Running scripts are killed with their groups.
        background.shutdown().await;
    }
}

/// Returns whether a client's certificate is issued to [`HEALTH_NAME`].
fn is_known(client: &Client) -> bool {
    let name = client.common_name();
    let is_known = name.as_deref() == Some(HEALTH_NAME);
    static LIMIT: LineLimit = LineLimit::new();
    if !is_known
        && let Some(address) = client.address
        && let Some(suppressed) = LIMIT.admit(address.ip())
    {
        tracing::warn!(
            client = %address,
            name = name.as_deref().unwrap_or("-"),
            suppressed,
            "client refused: its certificate has another name"
        );
    }
    is_known
}

/// Answers a request. The method and the query string are ignored (observed).
async fn answer(path: &str, is_known: bool, vm: &Vm) -> Response {
    if path != "/health" {
        return (StatusCode::NOT_FOUND, "404 page not found\n").into_response();
    }
    if !is_known {
        return (StatusCode::BAD_REQUEST, "the client certificate is issued to another name\n")
            .into_response();
    }
    if tokio::time::timeout(vm.patience, vm.jobs.ready()).await.is_err() {
        let problem = "the first round of scripts has not ended yet\n";
        return (StatusCode::SERVICE_UNAVAILABLE, problem).into_response();
    }
    let body = serde_json::to_vec(&vm.report()).expect("texts can always be written as JSON");
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
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
