//! The listening sockets, with one server per address, so that addresses files can add and remove
//! addresses while the others keep serving.

use std::{
    collections::HashMap,
    io,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::oneshot,
    task::JoinHandle,
    time::{Instant, timeout_at},
};
use tracing::{error, info};

use super::failures::Failures;
use crate::{
    ops::{
        api::{self, ApiServer, Backend, BoundControl},
        service_status::{Part, ServiceStatus},
        tap::Tap,
    },
    server::{
        Arrivals, Connections, Cookies, Identity, MAX_TCP_CONNECTIONS, Options, Overload,
        OwnConnections, Server, ServerError, ServerMetrics,
    },
    state::ServerState,
};
use dns_core::config::{ApiConfig, Config, has_ipv4_apart};
use dns_kit::{limits::raise_file_limit, tls::RotatingTls};

/// Time for which the main loop waits until servers have closed their sockets. Afterwards their addresses are
/// tried again with those that were unavailable.
const MAX_CLOSING: Duration = Duration::from_secs(1);

/// Minimum limit of TCP connections, however few descriptors there are.
const MIN_TCP_CONNECTIONS: u64 = 16;

pub(super) struct Listeners {
    server_state: Arc<ServerState>,
    /// Answers to `version.bind` and similar queries.
    identity: Arc<Identity>,
    metrics: ServerMetrics,
    pub(super) options: Options,
    /// Running servers by address.
    running: HashMap<SocketAddr, Running>,
    /// Reason why each of the other addresses is not served.
    problems: HashMap<SocketAddr, String>,
}

struct Running {
    /// Stops the server when sent or dropped.
    stop: oneshot::Sender<()>,
    /// Completes when the server has stopped.
    task: JoinHandle<()>,
    /// Whether IPv4 has sockets of its own, see [`has_ipv4_apart`].
    ipv4_apart: bool,
}

impl Listeners {
    pub(super) fn new(
        server_state: Arc<ServerState>,
        identity: Arc<Identity>,
        metrics: ServerMetrics,
        options: Options,
    ) -> Self {
        Self {
            server_state,
            identity,
            metrics,
            options,
            running: HashMap::new(),
            problems: HashMap::new(),
        }
    }

    /// Listens on every available address and returns the addresses served; fails if there are
    /// none.
    pub(super) async fn start(
        &mut self,
        addresses: &[SocketAddr],
    ) -> Result<Vec<SocketAddr>, ServerError> {
        let mut problems = Vec::new();
        for &address in addresses {
            if let Err(problem) = self.listen(address, addresses).await {
                problems.push((address, problem));
            }
        }
        if self.running.is_empty() && !problems.is_empty() {
            return Err(problems.swap_remove(0).1);
        }
        for (address, problem) in problems {
            self.report(address, &problem);
        }
        Ok(self.served())
    }

    /// Replaces the set of listen addresses and returns the addresses served. An unavailable
    /// address is logged once and does not affect the others.
    pub(super) async fn set(&mut self, addresses: &[SocketAddr]) -> Vec<SocketAddr> {
        self.close_outdated(addresses).await;
        self.problems
            .retain(|address, _| addresses.contains(address));
        for &address in addresses {
            if let Err(problem) = self.listen(address, addresses).await {
                self.report(address, &problem);
            }
        }
        self.served()
    }

    /// Stops the servers on addresses that are no longer wanted, and on IPv6 wildcards that must give IPv4 away
    /// or take it back: the kernel fixes IPV6_V6ONLY when a socket is bound.
    async fn close_outdated(&mut self, wanted: &[SocketAddr]) {
        let outdated = |address: &SocketAddr, running: &mut Running| {
            !wanted.contains(address) || running.ipv4_apart != has_ipv4_apart(*address, wanted)
        };
        let mut ending = Vec::new();
        for (address, Running { stop, task, .. }) in self.running.extract_if(outdated) {
            if wanted.contains(&address) {
                info!("{address} is opened again, because other addresses of IPv4 are served");
            } else {
                info!("no longer listening on {address}");
            }
            // The receiver is gone if the server has already stopped.
            let _ = stop.send(());
            ending.push(task);
        }
        let deadline = Instant::now() + MAX_CLOSING;
        for task in ending {
            // A panic has been logged with its location.
            let _late = timeout_at(deadline, task).await;
        }
    }

    fn served(&self) -> Vec<SocketAddr> {
        let mut served: Vec<SocketAddr> = self.running.keys().copied().collect();
        served.sort_unstable();
        served
    }

    /// Returns the reasons why wanted addresses are not served.
    pub(super) fn problems(&self) -> impl Iterator<Item = &str> {
        self.problems.values().map(String::as_str)
    }

    /// Stops every server gracefully: queries already received are answered.
    pub(super) async fn stop(self) {
        let mut tasks = Vec::new();
        for Running { stop, task, .. } in self.running.into_values() {
            // The receiver is gone if the server has already stopped.
            let _ = stop.send(());
            tasks.push(task);
        }
        for task in tasks {
            // A panic has been logged with its location.
            let _ = task.await;
        }
    }

    pub(super) fn ended(&self) -> Option<SocketAddr> {
        self.running
            .iter()
            .find(|(_, running)| running.task.is_finished())
            .map(|(&address, _)| address)
    }

    /// Records that an address is not served, and logs each new reason. The next [`Self::set`]
    /// tries again.
    fn report(&mut self, address: SocketAddr, problem: &ServerError) {
        let text = problem.to_string();
        if self.problems.insert(address, text.clone()).as_ref() != Some(&text) {
            error!("{text}; {address} is not served until it can be bound; trying again every 5 s");
        }
    }

    /// Listens on another address of `all`; does nothing if it is already served.
    async fn listen(&mut self, address: SocketAddr, all: &[SocketAddr]) -> Result<(), ServerError> {
        if self.running.contains_key(&address) {
            return Ok(());
        }
        let ipv4_apart = has_ipv4_apart(address, all);
        let options = Options {
            ipv4_apart,
            listen: Some(address),
            max_reply: Config::max_reply_at(self.options.max_reply, address),
            ..self.options.clone()
        };
        let server_state = self.server_state.clone();
        let identity = self.identity.clone();
        let bound = Server::bind(
            &[address],
            server_state,
            identity,
            self.metrics.clone(),
            options,
        )
        .await;
        let server = bound?;
        self.problems.remove(&address);
        info!("listening on {address}, UDP and TCP");
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(server.run(async {
            // Dropping the sender stops the server as well.
            let _ = stopped.await;
        }));
        let running = Running {
            stop,
            task,
            ipv4_apart,
        };
        self.running.insert(address, running);
        Ok(())
    }
}

/// Returns the options of every server. The TCP clients of all addresses together get at most a quarter of the
/// file descriptors; the rest is for forwarding, health checks and files.
pub(super) fn options(config: &Config, own: OwnConnections, tap: Tap) -> Options {
    let share = (raise_file_limit() / 4).max(MIN_TCP_CONNECTIONS);
    let limit = usize::try_from(share).unwrap_or(usize::MAX);
    Options {
        request_timeout: config.request_timeout,
        connections: Connections::new(limit.min(MAX_TCP_CONNECTIONS), own),
        tap,
        max_reply: config.max_reply,
        arrivals: if config.xdp.is_on() {
            Arrivals::on()
        } else {
            Arrivals::default()
        },
        compat: config.compat,
        cookies: Cookies::new(&config.cookies),
        overload: if config.xdp.shed {
            Overload::on()
        } else {
            Overload::default()
        },
        ..Options::default()
    }
}

//----------- API and control socket --------------------------------------------

/// Common name in the certificates of bosh-dns's API (observed).
const API_NAME: &str = "api.bosh-dns";

/// The control socket's path, and the socket if it could be bound.
pub(super) type Control = (PathBuf, io::Result<BoundControl>);

/// Loads the certificates of the API. Without usable ones the API stays off; DNS is unaffected.
pub(super) fn api_certificates(
    api: &ApiConfig,
    service_status: &ServiceStatus,
) -> Option<Arc<RotatingTls>> {
    RotatingTls::load("api", API_NAME, &api.tls)
        .map_err(|problem| {
            service_status.stays_off(Part::Api, format!("api: {problem}; the API stays off"));
        })
        .ok()
}

/// Opens the API. If its port is unavailable, the API stays off; DNS is unaffected.
pub(super) async fn open_api(
    api: &ApiConfig,
    tls: Arc<RotatingTls>,
    backend: Arc<Backend>,
    failures: &Failures,
) {
    let service_status = backend.readiness.service_status.clone();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, api.port));
    let server = match ApiServer::bind(address, tls.clone(), backend, api.admins.clone()).await {
        Ok(server) => server,
        Err(problem) => {
            return service_status.stays_off(
                Part::Api,
                format!("api: cannot listen on {address}: {problem}; the API stays off"),
            );
        }
    };
    failures.spawn("the watch on the API's certificates", tls.watch(|_| ()));
    failures.spawn("the API", server.run());
}

/// Serves the control socket. If binding failed, it stays off; DNS is unaffected.
pub(super) fn open_control((path, socket): Control, backend: Arc<Backend>, failures: &Failures) {
    let path = path.display();
    match socket {
        Ok(BoundControl {
            socket,
            without_group,
        }) => {
            if let Some(problem) = without_group {
                let service_status = &backend.readiness.service_status;
                service_status.stays_off(Part::ControlGroup, problem);
            }
            failures.spawn("the control socket", async {
                // Runs until the process ends; an earlier return is a failure.
                if let Err(problem) = api::serve_control(socket, backend).await {
                    error!("control: {problem}");
                }
            });
        }
        Err(problem) => {
            let problem =
                format!("control: {path} cannot be bound: {problem}; the control socket stays off");
            backend
                .readiness
                .service_status
                .stays_off(Part::Control, problem);
        }
    }
}
