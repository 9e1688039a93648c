//! Sends requests to the first agent that responds.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use hyper::{HeaderMap, StatusCode};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::{
    api::Token,
    connections::{Answer, ConnectionError, Connections},
    pace::{Gate, Rate},
};
use dns_consul::config::{ApiAddress, HttpApi};
use dns_upstream::HostNames;

/// Maximum time until a non-blocking response begins.
const PATIENCE: Duration = Duration::from_secs(15);

#[derive(Debug, thiserror::Error)]
pub(crate) enum AgentError {
    /// No connection, or the connection broke.
    #[error("{address}: {problem}")]
    Connection { address: ApiAddress, problem: ConnectionError },
    #[error("{address}: too many requests (429)")]
    TooMany { address: ApiAddress },
    /// The token lacks permission for this request.
    #[error("{address}: permission denied (403): the token may not read this")]
    Forbidden { address: ApiAddress },
    /// The requested object does not exist.
    #[error("{address}: not found (404)")]
    NotFound { address: ApiAddress },
    /// Any other status than 200.
    #[error("{address}: status {status}: {text}")]
    Status {
        address: ApiAddress,
        status: StatusCode,
        /// Beginning of the body.
        text: String,
    },
}

#[derive(Debug)]
pub(crate) struct Reply {
    /// Index for the next blocking query.
    pub(crate) index: Option<u64>,
    pub(crate) body: Bytes,
}

#[derive(Debug)]
pub(crate) struct Agent {
    addresses: Vec<ApiAddress>,
    /// Index of the agent in use, modulo the number of addresses.
    current: AtomicUsize,
    connections: Connections,
    token: Token,
    /// Limits the rate of requests.
    rate: Rate,
    /// Holds back requests while no agent responds.
    gate: Gate,
    /// Time of the last response from a server with a leader.
    contact: Mutex<Option<Instant>>,
    /// Error of the last request; `None` if it succeeded.
    problem: Mutex<Option<String>>,
    requests: AtomicU64,
    /// Number of failed requests.
    failures: AtomicU64,
    /// Number of responses with a smaller index than the previous one.
    index_resets: AtomicU64,
}

impl Agent {
    /// Creates a client for the configured agents; connects on the first request.
    pub(crate) fn new(api: &HttpApi, token: Token, names: &Arc<HostNames>) -> Self {
        Self {
            addresses: api.addresses.clone(),
            current: AtomicUsize::new(0),
            connections: Connections::new(api, names),
            token,
            rate: Rate::new(api.rate),
            gate: Gate::default(),
            contact: Mutex::default(),
            problem: Mutex::default(),
            requests: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            index_resets: AtomicU64::new(0),
        }
    }

    /// Sends a request once the rate limit and the gate permit it; `wait` is the longest time that
    /// the agent may hold it.
    pub(crate) async fn get(&self, path: &str, wait: Option<Duration>) -> Result<Reply, AgentError> {
        let pass = loop {
            let pass = self.gate.pass().await;
            // The rate applies after the gate, so that requests waiting during an outage do not
            // burst.
            self.rate.turn().await;
            if pass.is_trial() || !self.gate.is_closed() {
                break pass;
            }
        };
        let at = self.current.load(Ordering::Relaxed);
        let address = &self.addresses[at % self.addresses.len()];
        let token = self.token.now().await;
        // The agent adds up to a sixteenth of the wait.
        let patience = wait.map_or(Duration::ZERO, |wait| wait + wait / 16) + PATIENCE;
        self.requests.fetch_add(1, Ordering::Relaxed);
        let answer = self.connections.get(address, path, token.as_deref(), patience).await;
        let result = match answer {
            Ok(answer) => self.judge(address, answer),
            Err(problem) => Err(AgentError::Connection { address: address.clone(), problem }),
        };
        match &result {
            Ok(_) | Err(AgentError::NotFound { .. } | AgentError::Forbidden { .. }) => pass.succeeded(),
            Err(AgentError::TooMany { .. }) => pass.told_to_wait(Duration::from_secs(2)),
            Err(AgentError::Connection { problem, .. }) => {
                let last = (at + 1).is_multiple_of(self.addresses.len());
                // The first request to fail switches the agent for all.
                let _ = self.current.compare_exchange(at, at + 1, Ordering::Relaxed, Ordering::Relaxed);
                pass.failed(last && problem.is_unreachable());
            }
            Err(AgentError::Status { .. }) => pass.failed(false),
        }
        match &result {
            Ok(_) => *self.problem.lock() = None,
            Err(error) => {
                self.failures.fetch_add(1, Ordering::Relaxed);
                *self.problem.lock() = Some(error.to_string());
            }
        }
        result
    }

    fn judge(&self, address: &ApiAddress, answer: Answer) -> Result<Reply, AgentError> {
        let address = || address.clone();
        let Answer { status, headers, body } = answer;
        match status {
            StatusCode::OK => {
                let leads = headers.get("x-consul-knownleader").is_none_or(|value| value != "false");
                if leads {
                    let ago = number(&headers, "x-consul-lastcontact").unwrap_or(0);
                    let now = Instant::now();
                    *self.contact.lock() = now.checked_sub(Duration::from_millis(ago)).or(Some(now));
                }
                Ok(Reply { index: number(&headers, "x-consul-index"), body })
            }
            StatusCode::TOO_MANY_REQUESTS => Err(AgentError::TooMany { address: address() }),
            StatusCode::FORBIDDEN => Err(AgentError::Forbidden { address: address() }),
            StatusCode::NOT_FOUND => Err(AgentError::NotFound { address: address() }),
            status => {
                let text: String = String::from_utf8_lossy(&body).trim().chars().take(200).collect();
                Err(AgentError::Status { address: address(), status, text })
            }
        }
    }

    pub(crate) fn address(&self) -> &ApiAddress {
        &self.addresses[self.current.load(Ordering::Relaxed) % self.addresses.len()]
    }

    /// Returns how often the agent was switched.
    pub(crate) fn turns(&self) -> usize {
        self.current.load(Ordering::Relaxed)
    }

    pub(crate) fn connections(&self) -> &Connections {
        &self.connections
    }

    /// Returns the time of the last response from a server with a leader.
    pub(crate) fn contact(&self) -> Option<Instant> {
        *self.contact.lock()
    }

    /// Returns the error of the last request, if it failed.
    pub(crate) fn problem(&self) -> Option<String> {
        self.problem.lock().clone()
    }

    /// Returns whether no agent responds.
    pub(crate) fn is_away(&self) -> bool {
        self.gate.is_closed()
    }

    /// Counts an invalid response as a failure.
    pub(crate) fn count_unreadable(&self, problem: &str) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        *self.problem.lock() = Some(problem.to_owned());
    }

    pub(crate) fn count_index_reset(&self) {
        self.index_resets.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the numbers of requests, failures and index resets.
    pub(crate) fn counts(&self) -> [u64; 3] {
        [&self.requests, &self.failures, &self.index_resets].map(|count| count.load(Ordering::Relaxed))
    }
}

/// Parses a numeric header; `None` if it is missing or not a number.
fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}
