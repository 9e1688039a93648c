//! Sockets and the router: UDP, TCP, and who answers which name.
//!
//! * [`Server`]: the sockets, and the work that they bring.
//! * [`Local`]: what everybody asks about names of the fleet.
//! * [`Router`]: who answers a query; [`Answer`] is what such a one implements.
//!
//! A UDP worker is a thread of its own with its own sockets. It answers local
//! names on the spot; whatever has to wait for somebody else is begun there and
//! becomes a task on tokio's workers, so that a stalled upstream never delays a
//! local answer.

mod batch;
mod begun;
mod desk;
mod local;
mod memo;
pub mod metrics;
mod router;
mod seam;
mod sockets;
mod tcp;
#[cfg(test)]
mod tests;
mod udp;

use std::{
    io,
    net::SocketAddr,
    num::NonZeroUsize,
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use futures::future::BoxFuture;
use tokio::{sync::watch, task::JoinSet};

pub(crate) use begun::beginning;
pub use local::{Local, Looked};
pub use metrics::ServerMetrics;
pub use router::{ByDomain, Chaos, Router, Routes};
pub use seam::{Publish, Track};

use crate::wire::{Query, Transport};
use desk::Desk;
use sockets::Endpoint;

/// One thing that answers queries which are not local: recursors, handlers,
/// reverse names.
pub trait Answer: Send + Sync {
    /// A whole reply: the client's id, its question with the letter case kept.
    /// It may be larger than the client takes; whoever sends it cuts it.
    fn answer<'a>(&'a self, query: &'a Query<'a>, transport: Transport) -> BoxFuture<'a, Vec<u8>>;

    /// Writes the same into `out`, which is empty, if nobody has to be waited
    /// for, and says whether it did. Has to be cheap: other queries wait meanwhile.
    fn answer_at_once(&self, _query: &Query<'_>, _transport: Transport, _out: &mut Vec<u8>) -> bool {
        false
    }
}

//----------- Options --------------------------------------------------------

/// Limits of a server.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How long a query may take; then it is answered with SERVFAIL.
    pub request_timeout: Duration,
    /// UDP threads for each listen address; `None`: one for each CPU that we may use.
    pub workers: Option<NonZeroUsize>,
    /// Queries that wait for somebody else at the same time; the ones above are
    /// answered with SERVFAIL at once.
    pub max_in_flight: usize,
    /// Open TCP connections; further clients wait in the kernel's queue.
    pub max_tcp_connections: usize,
    /// How long a TCP connection may stay without a complete query.
    pub tcp_idle_timeout: Duration,
    /// Whether IPv4 has sockets of its own: then a wildcard of IPv6 takes IPv6 only, not both.
    pub ipv4_apart: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            request_timeout: Duration::from_secs(5),
            workers: None,
            max_in_flight: 16_384,
            max_tcp_connections: 1024,
            tcp_idle_timeout: Duration::from_secs(8),
            ipv4_apart: false,
        }
    }
}

/// Most UDP threads for each listen address, however many CPUs there are.
const MAX_WORKERS: usize = 32;

/// A socket that cannot be had.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address} ({transport}): {source}; {remedy}")]
pub struct ServerError {
    /// Where we were to listen.
    pub address: SocketAddr,
    /// `UDP` or `TCP`.
    pub transport: &'static str,
    /// What the kernel said.
    pub source: io::Error,
    /// What an operator can do about it.
    pub remedy: &'static str,
}

//----------- Server ---------------------------------------------------------

/// Bound sockets, ready to run.
pub struct Server {
    /// One for each listen address.
    endpoints: Vec<Endpoint>,
    /// What all of them share.
    desk: Arc<Desk>,
}

impl Server {
    /// Binds UDP and TCP on every address of `listen`. Port 0 takes a free port,
    /// the same for both. Must be called inside a tokio runtime.
    pub async fn bind(
        listen: &[SocketAddr],
        router: Arc<Router>,
        metrics: ServerMetrics,
        options: Options,
    ) -> Result<Self, ServerError> {
        let workers = options
            .workers
            .or_else(|| thread::available_parallelism().ok())
            .map_or(1, NonZeroUsize::get)
            .min(MAX_WORKERS);
        let endpoints = listen
            .iter()
            .map(|&address| Endpoint::bind(address, options.ipv4_apart, workers))
            .collect::<Result<_, _>>()?;
        Ok(Self { endpoints, desk: Arc::new(Desk::new(router, metrics, options)) })
    }

    /// Where we listen, with the ports that were taken for port 0.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.endpoints.iter().map(|endpoint| endpoint.address).collect()
    }

    /// Serves until `shutdown` is done; then takes no new queries, answers those
    /// that are there, at most for the request timeout, and returns.
    pub async fn run(self, shutdown: impl Future<Output = ()>) {
        let Self { endpoints, desk } = self;
        let (stop, stopped) = watch::channel(false);
        let mut listeners = JoinSet::new();
        let mut workers = Workers::default();
        for Endpoint { address, tcp, udp } in endpoints {
            listeners.spawn(tcp::serve(tcp, desk.clone(), stopped.clone()));
            for socket in udp {
                workers.start(address, Arc::new(socket), &desk);
            }
        }
        shutdown.await;
        // Nobody waits for this value but the listeners, and they may be gone.
        let _ = stop.send(true);
        workers.stop().await;
        let in_order = async {
            while listeners.join_next().await.is_some() {}
            desk.idle().await;
        };
        let _late = tokio::time::timeout(desk.options.request_timeout, in_order).await;
    }
}

/// The UDP threads.
#[derive(Default)]
struct Workers {
    /// Each with the socket that ends it.
    threads: Vec<(Arc<udp::Socket>, JoinHandle<()>)>,
}

impl Workers {
    /// Starts a thread for `socket`.
    fn start(&mut self, address: SocketAddr, socket: Arc<udp::Socket>, desk: &Arc<Desk>) {
        let worker = udp::Worker::new(socket.clone(), desk.clone());
        let started = thread::Builder::new()
            .name(format!("dns-udp-{}", self.threads.len()))
            .spawn(move || worker.run());
        match started {
            Ok(thread) => self.threads.push((socket, thread)),
            // The other threads of this address serve on: the kernel stops
            // steering packets to this socket as soon as it is closed.
            Err(error) => tracing::error!(%address, %error, "cannot start a UDP thread"),
        }
    }

    /// Ends all threads, after they have answered what is in their queues.
    async fn stop(self) {
        for (socket, _) in &self.threads {
            socket.stop();
        }
        let joined = tokio::task::spawn_blocking(move || {
            for (_, thread) in self.threads {
                let _panicked = thread.join();
            }
        });
        let _ = joined.await;
    }
}
