//! Sends requests to the first agent that responds, at a limited rate and with pauses after failures.

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
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until, timeout},
};

use crate::{
    api::Token,
    connections::{Answer, ConnectionError, Connections},
};
use dns_consul::config::{ApiAddress, HttpApi};
use dns_upstream::HostNames;

/// Maximum time until a non-blocking response begins.
const TIMEOUT: Duration = Duration::from_secs(15);

#[derive(Debug, thiserror::Error)]
pub(crate) enum AgentError {
    /// No connection, or the connection broke.
    #[error("{address}: {problem}")]
    Connection { address: ApiAddress, problem: ConnectionError },
    #[error("{address}: too many requests (429)")]
    TooMany { address: ApiAddress },
    #[error("{address}: permission denied (403): the token may not read this")]
    Forbidden { address: ApiAddress },
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
        let patience = wait.map_or(Duration::ZERO, |wait| wait + wait / 16) + TIMEOUT;
        self.requests.fetch_add(1, Ordering::Relaxed);
        let answer = self.connections.get(address, path, token.as_deref(), patience).await;
        let result = match answer {
            Ok(answer) => self.judge(address, answer),
            Err(problem) => Err(AgentError::Connection { address: address.clone(), problem }),
        };
        match &result {
            Ok(_) | Err(AgentError::NotFound { .. } | AgentError::Forbidden { .. }) => pass.succeeded(),
            Err(AgentError::TooMany { .. }) => pass.pause(Duration::from_secs(2)),
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

//----------- Pace -----------------------------------------------------------

/// First pause after an error.
const SHORTEST: Duration = Duration::from_secs(1);
/// Longest pause after errors.
const LONGEST: Duration = Duration::from_secs(60);
/// Number of rounds after which the gate's pause stops growing. At most 8 s, as a single request is
/// no load.
const MOST_ROUNDS: u32 = 4;
/// Consecutive errors after which only a single request at a time is sent.
const MOST_FAILURES: u32 = 8;

/// Limits requests to a steady rate with bursts of 0.1 s.
#[derive(Debug)]
pub(crate) struct Rate {
    interval: Duration,
    /// Time at which the next request is due if none waits.
    next: Mutex<Option<Instant>>,
}

impl Rate {
    /// Creates a limit of at least one request per second.
    pub(crate) fn new(per_second: u32) -> Self {
        Self { interval: Duration::from_secs(1) / per_second.max(1), next: Mutex::new(None) }
    }

    /// Waits until the caller may send a request.
    pub(crate) async fn turn(&self) {
        let at = {
            let mut next = self.next.lock();
            let now = Instant::now();
            let earliest = now.checked_sub(Duration::from_millis(100)).unwrap_or(now);
            let at = next.map_or(earliest, |next| next.max(earliest));
            *next = Some(at + self.interval);
            at
        };
        sleep_until(at).await;
    }
}

/// Pauses of one topic after consecutive errors: growing, and randomised so that requests that
/// failed together do not return together.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// Resets the pause after a success.
    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }

    /// Returns the pause after one more error.
    pub(crate) fn next(&mut self) -> Duration {
        self.failures = self.failures.saturating_add(1);
        drawn(self.failures)
    }
}

/// Returns the pause after this many errors: half to all of a time that doubles with each error.
fn drawn(failures: u32) -> Duration {
    let longest = (SHORTEST * 2u32.pow(failures.clamp(1, 7) - 1)).min(LONGEST);
    longest.mul_f64(0.5 + fastrand::f64() / 2.0)
}

/// Closes while no agent responds. Then only one request at a time is sent, with pauses, and all
/// others wait, so that a returning agent is not flooded.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: Mutex<GateState>,
    /// Signals a change of the state.
    changed: Notify,
}

#[derive(Debug, Default)]
struct GateState {
    /// Consecutive errors of all requests.
    failures: u32,
    /// Time before which no request passes.
    until: Option<Instant>,
    /// Whether a trial request is in progress.
    trying: bool,
}

/// Permission to send a request; takes its outcome.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    gate: &'a Gate,
    /// Whether all other requests wait for this one.
    trial: bool,
}

impl Gate {
    /// Waits until a request may be sent.
    pub(crate) async fn pass(&self) -> Pass<'_> {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let wait = {
                let mut state = self.state.lock();
                let now = Instant::now();
                match state.until {
                    None => return Pass { gate: self, trial: false },
                    Some(until) if until <= now && !state.trying => {
                        state.trying = true;
                        return Pass { gate: self, trial: true };
                    }
                    Some(until) if until > now => until - now,
                    Some(_) => LONGEST,
                }
            };
            // The pause can end without a notification.
            let _ = timeout(wait, changed).await;
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.state.lock().until.is_some()
    }

    /// Changes the state and wakes all waiting requests.
    fn change(&self, change: impl FnOnce(&mut GateState)) {
        change(&mut self.state.lock());
        self.changed.notify_waiters();
    }
}

impl Pass<'_> {
    /// Returns whether all other requests wait for this one.
    pub(crate) fn is_trial(&self) -> bool {
        self.trial
    }

    pub(crate) fn succeeded(self) {
        self.gate.change(|state| *state = GateState { trying: state.trying, ..GateState::default() });
    }

    /// Reports a failure; `hopeless` if no agent could be reached at all.
    pub(crate) fn failed(self, hopeless: bool) {
        self.gate.change(|state| {
            state.failures = state.failures.saturating_add(1);
            if hopeless || self.trial || state.failures >= MOST_FAILURES {
                // Concurrent failures count once.
                if self.trial || state.until.is_none() {
                    let rounds = if self.trial { state.failures.min(MOST_ROUNDS) } else { 1 };
                    state.until = Some(Instant::now() + drawn(rounds));
                }
            }
        });
    }

    /// Reports that the agent requested a pause.
    pub(crate) fn pause(self, pause: Duration) {
        self.gate.change(|state| {
            let until = Instant::now() + pause.clamp(SHORTEST, LONGEST).mul_f64(1.0 + fastrand::f64() / 4.0);
            state.until = Some(state.until.map_or(until, |already| already.max(until)));
        });
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if self.trial {
            self.gate.change(|state| state.trying = false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn requests_go_at_the_rate() {
        let rate = Rate::new(1000);
        let begun = Instant::now();
        for _ in 0..401 {
            rate.turn().await;
        }
        // The first 0.1 s of requests pass at once.
        let took = begun.elapsed();
        assert!(took >= Duration::from_millis(300), "{took:?}");
    }

    #[tokio::test]
    async fn closed_gate_passes_single_trial() {
        let gate = Gate::default();
        gate.pass().await.failed(true);
        assert!(gate.is_closed());
        let trial = gate.pass().await;
        assert!(trial.trial);
        assert!(timeout(SHORTEST * 2, gate.pass()).await.is_err(), "only one at a time");
        trial.failed(true);
        let trial = gate.pass().await;
        trial.succeeded();
        assert!(!gate.is_closed() && !gate.pass().await.trial);
    }

    #[test]
    fn pauses_grow_and_differ() {
        let mut backoff = Backoff::default();
        let pauses: Vec<Duration> = (0..9).map(|_| backoff.next()).collect();
        assert!(pauses[0] <= SHORTEST && pauses[8] >= LONGEST / 2 && pauses[8] <= LONGEST, "{pauses:?}");
        assert_ne!(drawn(7), drawn(7));
    }
}
