//! The DNS server: sockets and the service behind them.
//! * [`Server`]: the UDP and TCP sockets and their threads and tasks.
//! * [`service`]: turns a query into its reply, using the state of the fleet at the time of the
//!   query.
//!
//! A UDP worker is a thread with its own sockets. It answers local names directly. A query that
//! must wait for a recursor, a handler or a check is begun there and ended by the thread that learns its
//! answer, so a stalled upstream never delays a local answer.

mod answer_cache;
pub mod metrics;
mod near;
mod overload;
mod service;
pub mod socketless;
mod sockets;
mod tcp;
mod tcp_limits;
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

pub use metrics::ServerMetrics;
pub use overload::Overload;
pub use service::{cookies::Cookies, identity::Identity};
pub use udp::Arrivals;

pub use dns_kit::connections::{Connections, OwnConnections};

use crate::{ops::tap::Tap, state::ServerState};
use dns_core::config::Compat;
use dns_kit::threads::{self, OnPanic};
use dns_upstream::admission::Admission;
use service::QueryHandler;
use sockets::{Endpoint, WorkerSocket};

//----------- Options --------------------------------------------------------

/// Limits of a server.
#[derive(Clone)]
pub struct Options {
    /// Time limit of a query, after which it gets SERVFAIL.
    pub request_timeout: Duration,
    /// UDP threads per listen address; `None` for one per available CPU.
    pub workers: Option<NonZeroUsize>,
    /// Limits how many queries may wait for recursors, handlers or first checks at a time, in all
    /// servers that share it. If a client already holds as many slots as are free, its further
    /// queries get SERVFAIL immediately. In addition each source has a separate limit.
    pub waiting: Arc<Admission>,
    /// DNS Cookies for clients.
    pub cookies: Cookies,
    /// Quirks of bosh-dns to reproduce.
    pub compat: Compat,
    /// The open TCP connections, in all servers that share it. A client may have a quarter of the limit;
    /// above that, a new connection replaces the idlest one.
    pub connections: Arc<Connections>,
    /// The listen address, for dnstap.
    pub listen: Option<SocketAddr>,
    /// Publishes requests to subscribers of the live query log.
    pub tap: Tap,
    /// Maximum length in bytes of a UDP reply to a client that is not near, see [`near`]; `None`
    /// for no limit.
    pub max_reply: Option<u16>,
    /// Records on which interfaces queries arrive.
    pub arrivals: Arrivals,
    /// Lets interfaces shed part of the queries while the server is overloaded.
    pub overload: Overload,
    /// How long a TCP connection may stay open without a complete query.
    pub tcp_idle_timeout: Duration,
    /// Whether IPv4 has separate sockets, so that an IPv6 wildcard accepts only IPv6.
    pub ipv4_apart: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            request_timeout: Duration::from_secs(5),
            workers: None,
            waiting: Admission::new(MAX_WAITING),
            cookies: Cookies::default(),
            compat: Compat::default(),
            connections: Connections::new(MAX_TCP_CONNECTIONS, OwnConnections::default()),
            listen: None,
            tap: Tap::default(),
            max_reply: None,
            arrivals: Arrivals::default(),
            overload: Overload::default(),
            tcp_idle_timeout: Duration::from_secs(8),
            ipv4_apart: false,
        }
    }
}

/// Maximum number of open TCP connections, which bounds the memory of their buffers.
pub const MAX_TCP_CONNECTIONS: usize = 1024;

/// Default limit of queries that wait for recursors, handlers or first checks.
const MAX_WAITING: usize = 32_768;

/// Maximum number of UDP threads per listen address, for any number of CPUs. A thread takes about 200 KB,
/// and its cache of answers a share of a limit that all threads divide.
const MAX_WORKERS: usize = 128;

/// Error opening a listen socket.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address} ({transport}): {source}; {remedy}")]
pub struct ServerError {
    /// The configured listen address.
    pub address: SocketAddr,
    /// Name of the transport: `UDP` or `TCP`.
    pub transport: &'static str,
    /// The error of the system call.
    pub source: io::Error,
    /// Advice to the operator.
    pub remedy: &'static str,
}

//----------- Server ---------------------------------------------------------

/// Bound sockets, ready to run.
pub struct Server {
    /// One endpoint per listen address.
    endpoints: Vec<Endpoint>,
    /// The service, shared by all endpoints.
    handler: Arc<QueryHandler>,
}

impl Server {
    /// Binds UDP and TCP on every address of `listen`. Port 0 selects a free port, the same for
    /// both. Must be called inside a tokio runtime.
    pub async fn bind(
        listen: &[SocketAddr],
        server_state: Arc<ServerState>,
        identity: Arc<Identity>,
        metrics: ServerMetrics,
        options: Options,
    ) -> Result<Self, ServerError> {
        let workers = options
            .workers
            // Respects the affinity and the CPU quota of the control group: in a container with two
            // CPUs of a large machine more threads would only take turns.
            .or_else(|| thread::available_parallelism().ok())
            .map_or(1, NonZeroUsize::get)
            .min(MAX_WORKERS);
        metrics.tcp_limit(options.connections.limit());
        let endpoints = listen
            .iter()
            .map(|&address| Endpoint::bind(address, &options, workers))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            endpoints,
            handler: Arc::new(QueryHandler::new(server_state, identity, metrics, options)),
        })
    }

    /// Returns the listen addresses, with the ports selected for port 0.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.endpoints
            .iter()
            .map(|endpoint| endpoint.address)
            .collect()
    }

    /// Serves until `shutdown` completes. Then takes no new queries, answers the pending ones
    /// within the request timeout, and returns.
    pub async fn run(self, shutdown: impl Future<Output = ()>) {
        let Self { endpoints, handler } = self;
        let (stop, stopped) = watch::channel(false);
        let mut listeners = JoinSet::new();
        let mut workers = Workers::default();
        let all = endpoints.iter().map(|endpoint| endpoint.udp.len()).sum();
        for Endpoint { address, tcp, udp } in endpoints {
            listeners.spawn(tcp::serve(tcp, handler.clone(), stopped.clone()));
            for socket in udp {
                workers.start(address, Arc::new(socket), &handler, all);
            }
        }
        shutdown.await;
        // Only the listeners receive this value, and they may have ended.
        let _ = stop.send(true);
        // Before waiting for queries in flight, because a worker may still begin some from its
        // queue.
        workers.stop().await;
        let in_order = async {
            while listeners.join_next().await.is_some() {}
            handler.idle().await;
        };
        // No query is answered later than this anyway.
        let _late = tokio::time::timeout(handler.options.request_timeout, in_order).await;
    }
}

#[derive(Default)]
struct Workers {
    /// The threads, each with the socket that stops it.
    threads: Vec<(Arc<WorkerSocket>, JoinHandle<()>)>,
}

impl Workers {
    /// Starts the thread of a socket, one of `all`.
    fn start(
        &mut self,
        address: SocketAddr,
        socket: Arc<WorkerSocket>,
        handler: &Arc<QueryHandler>,
        all: usize,
    ) {
        let worker = udp::Worker::new(socket.clone(), handler.clone(), all);
        let name = format!("dns-udp-{}", self.threads.len());
        let started = threads::spawn(name, OnPanic::Continue, move || worker.run());
        match started {
            Ok(thread) => self.threads.push((socket, thread)),
            // The other threads of this address continue, because the kernel stops steering packets
            // to this socket once it is closed.
            Err(error) => {
                tracing::error!(%address, %error, "cannot start a UDP thread: the remaining threads of this address answer its queries")
            }
        }
    }

    /// Ends all threads after they have answered their queued queries.
    async fn stop(self) {
        for (socket, _) in &self.threads {
            // All sockets first, so that the threads end beside each other rather than one after
            // the other.
            socket.stop();
        }
        // Joining blocks, and the worker that is waited for may need the runtime for its last
        // queries.
        let joined = tokio::task::spawn_blocking(move || {
            for (_, thread) in self.threads {
                let _panicked = thread.join();
            }
        });
        let _ = joined.await;
    }
}
