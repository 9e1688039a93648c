//! The sockets: one server for each listen address, so that addresses files can
//! come and go while the others serve on.

use std::{collections::HashMap, net::SocketAddr, sync::Arc, time::Duration};

use tokio::{sync::oneshot, task::JoinHandle};
use tracing::{error, info};

use crate::server::{Options, Router, Server, ServerError, ServerMetrics};

/// All servers.
pub(super) struct Listeners {
    /// Who answers.
    router: Arc<Router>,
    /// What they count.
    metrics: ServerMetrics,
    /// Their limits.
    options: Options,
    /// The running ones by address.
    running: HashMap<SocketAddr, Running>,
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
    pub(super) fn new(router: Arc<Router>, metrics: ServerMetrics, options: Options) -> Self {
        Self { router, metrics, options, running: HashMap::new() }
    }

    /// Listens on all of these, or fails.
    pub(super) async fn start(&mut self, addresses: &[SocketAddr]) -> Result<(), ServerError> {
        for &address in addresses {
            self.listen(address, addresses).await?;
        }
        Ok(())
    }

    /// Listens on exactly these from now on. An address that cannot be had is
    /// reported; the others serve. Gives the addresses that are served.
    pub(super) async fn set(&mut self, addresses: &[SocketAddr]) -> Vec<SocketAddr> {
        let gone: Vec<SocketAddr> =
            self.running.keys().filter(|address| !addresses.contains(address)).copied().collect();
        for address in gone {
            info!("listening on {address} no more");
            if let Some(Running { stop, task }) = self.running.remove(&address) {
                // Ended already: then there is nothing to stop.
                let _ = stop.send(());
                tokio::spawn(task);
            }
        }
        for &address in addresses {
            if let Err(problem) = self.listen(address, addresses).await {
                error!("{problem}");
            }
        }
        let mut served: Vec<SocketAddr> = self.running.keys().copied().collect();
        served.sort_unstable();
        served
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
        let options = Options { ipv4_apart, ..self.options };
        let server = Server::bind(&[address], self.router.clone(), self.metrics.clone(), options).await?;
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

/// The limits of a configuration.
pub(super) fn options(request_timeout: Duration) -> Options {
    Options { request_timeout, ..Options::default() }
}
