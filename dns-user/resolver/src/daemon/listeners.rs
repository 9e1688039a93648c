//! The sockets: one server for each listen address, so that addresses files can
//! come and go while the others serve on.

use std::{collections::HashMap, net::SocketAddr, sync::Arc};

use tokio::{sync::oneshot, task::JoinHandle};
use tracing::{error, info};

use crate::{
    fleet::Fleet,
    ops::tap::Tap,
    server::{Arrivals, Identity, Options, Overload, OwnConnections, Server, ServerError, ServerMetrics},
};
use dns_core::config::{Config, HookMode};
use dns_platform::limits::raise_file_limit;

/// All servers.
pub(super) struct Listeners {
    /// The state that they answer from.
    fleet: Arc<Fleet>,
    /// What they tell about themselves.
    identity: Arc<Identity>,
    /// What they count.
    metrics: ServerMetrics,
    /// Their limits.
    options: Options,
    /// The running ones by address.
    running: HashMap<SocketAddr, Running>,
    /// Why others are not, by address.
    problems: HashMap<SocketAddr, String>,
}

/// One running server.
struct Running {
    /// Ends it when sent or dropped.
    stop: oneshot::Sender<()>,
    /// Done when it has ended.
    task: JoinHandle<()>,
}

impl Listeners {
    /// No sockets yet.
    pub(super) fn new(
        fleet: Arc<Fleet>,
        identity: Arc<Identity>,
        metrics: ServerMetrics,
        options: Options,
    ) -> Self {
        Self { fleet, identity, metrics, options, running: HashMap::new(), problems: HashMap::new() }
    }

    /// Listens on those of these that can be had; fails if it is none. Gives the
    /// addresses that are served.
    pub(super) async fn start(&mut self, addresses: &[SocketAddr]) -> Result<Vec<SocketAddr>, ServerError> {
        let mut first_problem = None;
        for &address in addresses {
            if let Err(problem) = self.listen(address, addresses).await {
                first_problem.get_or_insert(problem);
            }
        }
        match (self.running.is_empty(), first_problem) {
            (true, Some(problem)) => Err(problem),
            _ => Ok(self.served()),
        }
    }

    /// Listens on exactly these from now on. An address that cannot be had is
    /// reported once; the others serve. Gives the addresses that are served.
    pub(super) async fn set(&mut self, addresses: &[SocketAddr]) -> Vec<SocketAddr> {
        let gone: Vec<SocketAddr> =
            self.running.keys().filter(|address| !addresses.contains(address)).copied().collect();
        for address in gone {
            info!("no longer listening on {address}");
            if let Some(Running { stop, task }) = self.running.remove(&address) {
                // Ended already: then there is nothing to stop.
                let _ = stop.send(());
                tokio::spawn(task);
            }
        }
        self.problems.retain(|address, _| addresses.contains(address));
        for &address in addresses {
            // Reported below; tried again when `set` is called again.
            let _ = self.listen(address, addresses).await;
        }
        self.served()
    }

    /// The addresses that are served.
    fn served(&self) -> Vec<SocketAddr> {
        let mut served: Vec<SocketAddr> = self.running.keys().copied().collect();
        served.sort_unstable();
        served
    }

    /// Counts by which interfaces queries arrive.
    pub(super) fn arrivals(&self) -> &Arrivals {
        &self.options.arrivals
    }

    /// Why wanted addresses are not served.
    pub(super) fn problems(&self) -> impl Iterator<Item = &str> {
        self.problems.values().map(String::as_str)
    }

    /// Ends all in order: queries that are there are answered.
    pub(super) async fn stop(self) {
        let running: Vec<Running> = self.running.into_values().collect();
        let mut tasks = Vec::new();
        for Running { stop, task } in running {
            // Ended already: then there is nothing to stop.
            let _ = stop.send(());
            tasks.push(task);
        }
        for task in tasks {
            // A panic was logged with its place.
            let _ = task.await;
        }
    }

    /// Whether some server has ended although nobody asked it to.
    pub(super) fn ended(&self) -> Option<SocketAddr> {
        self.running.iter().find(|(_, running)| running.task.is_finished()).map(|(&address, _)| address)
    }

    /// Listens on one more address of `all`; nothing to do if we do already.
    async fn listen(&mut self, address: SocketAddr, all: &[SocketAddr]) -> Result<(), ServerError> {
        if self.running.contains_key(&address) {
            return Ok(());
        }
        let ipv4_apart = all.iter().any(|other| other.is_ipv4() && other.port() == address.port());
        let options = Options { ipv4_apart, ..self.options.clone() };
        let (fleet, identity) = (self.fleet.clone(), self.identity.clone());
        let bound = Server::bind(&[address], fleet, identity, self.metrics.clone(), options).await;
        let server = match bound {
            Ok(server) => server,
            Err(problem) => {
                let text = problem.to_string();
                if self.problems.insert(address, text.clone()).as_ref() != Some(&text) {
                    error!(
                        "{text}; queries to {address} get no answer until it can be bound; trying again every 5 s"
                    );
                }
                return Err(problem);
            }
        };
        self.problems.remove(&address);
        info!("listening on {address}, UDP and TCP");
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(server.run(async {
            // A dropped sender ends the server as well.
            let _ = stopped.await;
        }));
        self.running.insert(address, Running { stop, task });
        Ok(())
    }
}

/// The limits of a configuration that listens on so many addresses: TCP clients of all
/// of them get at most a quarter of the descriptors, so that forwarding, health checks
/// and files find some, too.
pub(super) fn options(config: &Config, addresses: usize, own: OwnConnections, tap: Tap) -> Options {
    let share = raise_file_limit() / 4 / addresses.max(1) as u64;
    let most = Options::default().max_tcp_connections;
    let max_tcp_connections = usize::try_from(share).unwrap_or(most).clamp(16, most);
    let serves_interfaces = config.xdp.enabled && config.xdp.mode != HookMode::Off;
    Options {
        request_timeout: config.request_timeout,
        max_tcp_connections,
        own,
        tap,
        max_reply: config.max_reply,
        arrivals: if serves_interfaces { Arrivals::on() } else { Arrivals::default() },
        compat: config.compat,
        overload: if config.xdp.shed { Overload::on() } else { Overload::default() },
        ..Options::default()
    }
}

/// The configured address, then the further ones, each once.
pub(super) fn all_addresses(configured: SocketAddr, further: &[SocketAddr]) -> Vec<SocketAddr> {
    let mut all = vec![configured];
    for &address in further {
        if !all.contains(&address) {
            all.push(address);
        }
    }
    all
}
