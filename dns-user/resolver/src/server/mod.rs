//! The DNS server: sockets, and the service behind them.
//!
//! * [`Server`]: the sockets, UDP and TCP, and the work that they bring.
//! * [`service`]: from a query to its reply, by the state of the fleet that is in
//!   force when the query comes in.
//!
//! A UDP worker is a thread of its own with its own sockets. It answers local
//! names on the spot; whatever has to wait for somebody else is polled once there and
//! becomes a task on tokio's workers, so that a stalled upstream never delays a
//! local answer.

mod answer_cache;
mod arrivals;
mod batch;
mod connections;
mod eager;
pub mod metrics;
mod near;
mod overload;
mod service;
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

use tokio::{sync::watch, task::JoinSet};

pub use arrivals::Arrivals;
pub use connections::OwnConnections;
pub use metrics::ServerMetrics;
pub use overload::Overload;
pub use service::identity::Identity;

use crate::{fleet::Fleet, ops::tap::Tap};
use dns_core::config::Compat;
use dns_platform::threads::{self, OnPanic};
use service::QueryHandler;
use sockets::Endpoint;

//----------- Options --------------------------------------------------------

/// Limits of a server.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long a query may take; then it is answered with SERVFAIL.
    pub request_timeout: Duration,
    /// UDP threads for each listen address; `None`: one for each CPU that we may use.
    pub workers: Option<NonZeroUsize>,
    /// Queries that wait for recursors, handlers or first checks at the same time, whatever
    /// they wait for; further ones of a client that holds as many places as are free get
    /// SERVFAIL at once. Each source has a bound of its own besides.
    pub max_in_flight: usize,
    /// Effects of the reference that are kept.
    pub compat: Compat,
    /// Open TCP connections, of one client a quarter of them; beyond that the idlest
    /// one is closed for a new one.
    pub max_tcp_connections: usize,
    /// Connections that the server makes to itself: not bounded.
    pub own: OwnConnections,
    /// Shows live queries.
    pub tap: Tap,
    /// Most bytes of a UDP reply to a client that is not near, see [`near`]; `None`: no bound.
    pub max_reply: Option<u16>,
    /// Counts by which interfaces queries arrive.
    pub arrivals: Arrivals,
    /// Whether a part of the queries is shed at the interface while more come than can be answered.
    pub overload: Overload,
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
            max_in_flight: 32_768,
            compat: Compat::default(),
            max_tcp_connections: 1024,
            own: OwnConnections::default(),
            tap: Tap::new(),
            max_reply: None,
            arrivals: Arrivals::default(),
            overload: Overload::default(),
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
    handler: Arc<QueryHandler>,
}

impl Server {
    /// Binds UDP and TCP on every address of `listen`. Port 0 takes a free port,
    /// the same for both. Must be called inside a tokio runtime.
    pub async fn bind(
        listen: &[SocketAddr],
        fleet: Arc<Fleet>,
        identity: Arc<Identity>,
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
            .map(|&address| Endpoint::bind(address, &options, workers))
            .collect::<Result<_, _>>()?;
        Ok(Self { endpoints, handler: Arc::new(QueryHandler::new(fleet, identity, metrics, options)) })
    }

    /// Where we listen, with the ports that were taken for port 0.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.endpoints.iter().map(|endpoint| endpoint.address).collect()
    }

    /// Serves until `shutdown` is done; then takes no new queries, answers those
    /// that are there, at most for the request timeout, and returns.
    pub async fn run(self, shutdown: impl Future<Output = ()>) {
        let Self { endpoints, handler } = self;
        let (stop, stopped) = watch::channel(false);
        let mut listeners = JoinSet::new();
        let mut workers = Workers::default();
        for Endpoint { address, tcp, udp } in endpoints {
            listeners.spawn(tcp::serve(tcp, handler.clone(), stopped.clone()));
            for socket in udp {
                workers.start(address, Arc::new(socket), &handler);
            }
        }
        shutdown.await;
        // Nobody waits for this value but the listeners, and they may be gone.
        let _ = stop.send(true);
        workers.stop().await;
        let in_order = async {
            while listeners.join_next().await.is_some() {}
            handler.idle().await;
        };
        let _late = tokio::time::timeout(handler.options.request_timeout, in_order).await;
    }
}

#[derive(Default)]
struct Workers {
    /// Each with the socket that ends it.
    threads: Vec<(Arc<udp::Socket>, JoinHandle<()>)>,
}

impl Workers {
    /// Starts a thread for `socket`.
    fn start(&mut self, address: SocketAddr, socket: Arc<udp::Socket>, handler: &Arc<QueryHandler>) {
        let worker = udp::Worker::new(socket.clone(), handler.clone());
        let name = format!("dns-udp-{}", self.threads.len());
        let started = threads::spawn(name, OnPanic::Continue, move || worker.run());
        match started {
            Ok(thread) => self.threads.push((socket, thread)),
            // The other threads of this address serve on: the kernel stops
            // steering packets to this socket as soon as it is closed.
            Err(error) => {
                tracing::error!(%address, %error, "cannot start a UDP thread: the other threads of this address answer its queries")
            }
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
