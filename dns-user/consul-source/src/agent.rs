//! Sends requests to the first agent that responds, at a limited rate and with pauses after failures.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use hyper::{HeaderMap, Response, StatusCode};
use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    time::{Instant, sleep, sleep_until, timeout},
};

use crate::{
    api::{TOKEN_CHECK_INTERVAL, Token},
    connections::{ConnectionError, Connections},
};
use dns_consul::config::{ApiAddress, HttpApi};
use dns_kit::{backoff, rate::TokenBucket};
use dns_upstream::HostNames;

/// Maximum time until a non-blocking response begins.
const TIMEOUT: Duration = Duration::from_secs(15);

#[derive(Debug, thiserror::Error)]
pub(crate) enum AgentError {
    /// No connection, or the connection broke.
    #[error("{address}: {problem}")]
    Connection {
        address: ApiAddress,
        problem: ConnectionError,
    },
    #[error("{address}: too many requests (429)")]
    TooMany { address: ApiAddress },
    #[error("{address}: permission denied (403): the token may not read this")]
    Forbidden { address: ApiAddress },
    #[error("{address}: not found (404)")]
    NotFound { address: ApiAddress },
    #[error("{address}: status {status}: {text}")]
    Status {
        address: ApiAddress,
        status: StatusCode,
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
    pub(crate) connections: Connections,
    token: Token,
    rate: RateLimit,
    breaker: CircuitBreaker,
    /// Time of the last response from a server with a leader.
    last_contact: Mutex<Option<Instant>>,
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
            rate: RateLimit::new(api.rate),
            breaker: CircuitBreaker::default(),
            last_contact: Mutex::default(),
            problem: Mutex::default(),
            requests: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            index_resets: AtomicU64::new(0),
        }
    }

    /// Sends a request once the rate limit and the circuit breaker permit it; `wait` is the longest time that
    /// the agent may hold it.
    pub(crate) async fn get(
        &self,
        path: &str,
        wait: Option<Duration>,
    ) -> Result<Reply, AgentError> {
        let permit = loop {
            let permit = self.breaker.permit().await;
            // The rate applies after the breaker, so that requests waiting during an outage do not burst.
            self.rate.wait().await;
            if permit.is_trial || !self.breaker.is_open() {
                break permit;
            }
        };
        let token = self.usable_token().await;
        let at = self.current.load(Ordering::Relaxed);
        let address = &self.addresses[at % self.addresses.len()];
        let limit = time_limit(wait);
        self.requests.fetch_add(1, Ordering::Relaxed);
        let answer = self
            .connections
            .get(address, path, token.as_deref(), limit)
            .await;
        let result = match answer {
            Ok(answer) => self.check_status(address, answer),
            Err(problem) => Err(AgentError::Connection {
                address: address.clone(),
                problem,
            }),
        };
        match &result {
            // The agent answers; what it refuses concerns this request alone.
            Ok(_) | Err(AgentError::NotFound { .. } | AgentError::Forbidden { .. }) => {
                permit.succeeded()
            }
            // Consul's texts for another datacenter that it cannot reach.
            Err(AgentError::Status { text, .. })
                if text.contains("No path to datacenter")
                    || text.contains("no server currently reachable") =>
            {
                permit.succeeded()
            }
            // The agent's limits are for a client as a whole, so all requests pause.
            Err(AgentError::TooMany { .. }) => permit.pause(Duration::from_secs(2)),
            Err(AgentError::Connection { problem, .. }) => {
                let last = (at + 1).is_multiple_of(self.addresses.len());
                // The first request to fail switches the agent for all.
                let _ =
                    self.current
                        .compare_exchange(at, at + 1, Ordering::Relaxed, Ordering::Relaxed);
                // After the last agent of the list, none is left to try.
                if last && matches!(problem, ConnectionError::Unreachable(_)) {
                    permit.unreachable();
                } else {
                    permit.failed();
                }
            }
            Err(AgentError::Status { .. }) => permit.failed(),
        }
        match &result {
            Ok(_) => *self.problem.lock() = None,
            Err(error) => self.count_failure(error),
        }
        result
    }

    /// Returns the token once its file can be read; `None` without a file.
    async fn usable_token(&self) -> Option<String> {
        loop {
            match self.token.now().await {
                Ok(token) => return token,
                // To a client without a token Consul's lists may be empty (ACLs that deny by default), and all names
                // would be denied.
                Err(problem) => *self.problem.lock() = Some(problem),
            }
            sleep(TOKEN_CHECK_INTERVAL).await;
        }
    }

    fn check_status(
        &self,
        address: &ApiAddress,
        answer: Response<Bytes>,
    ) -> Result<Reply, AgentError> {
        let address = address.clone();
        let (head, body) = answer.into_parts();
        let headers = &head.headers;
        match head.status {
            StatusCode::OK => {
                let leads = headers
                    .get("x-consul-knownleader")
                    // Requests that the agent answers by itself have no such header.
                    .is_none_or(|value| value != "false");
                if leads {
                    let ago = number(headers, "x-consul-lastcontact").unwrap_or(0);
                    let now = Instant::now();
                    *self.last_contact.lock() =
                        // The machine may not have run for that long.
                        now.checked_sub(Duration::from_millis(ago)).or(Some(now));
                }
                Ok(Reply {
                    index: number(headers, "x-consul-index"),
                    body,
                })
            }
            StatusCode::TOO_MANY_REQUESTS => Err(AgentError::TooMany { address }),
            StatusCode::FORBIDDEN => Err(AgentError::Forbidden { address }),
            StatusCode::NOT_FOUND => Err(AgentError::NotFound { address }),
            status => {
                let text = String::from_utf8_lossy(&body);
                Err(AgentError::Status {
                    address,
                    status,
                    // A proxy in front of the agent may send a whole page.
                    text: text.trim().chars().take(200).collect(),
                })
            }
        }
    }

    pub(crate) fn address(&self) -> &ApiAddress {
        &self.addresses[self.current.load(Ordering::Relaxed) % self.addresses.len()]
    }

    pub(crate) fn switches(&self) -> usize {
        self.current.load(Ordering::Relaxed)
    }

    pub(crate) fn last_contact(&self) -> Option<Instant> {
        *self.last_contact.lock()
    }

    pub(crate) fn problem(&self) -> Option<String> {
        self.problem.lock().clone()
    }

    pub(crate) fn is_away(&self) -> bool {
        self.breaker.is_open()
    }

    pub(crate) fn count_failure(&self, problem: &impl ToString) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        *self.problem.lock() = Some(problem.to_string());
    }

    pub(crate) fn count_index_reset(&self) {
        self.index_resets.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the numbers of requests, failures and index resets.
    pub(crate) fn counts(&self) -> [u64; 3] {
        [&self.requests, &self.failures, &self.index_resets]
            .map(|count| count.load(Ordering::Relaxed))
    }
}

/// Returns the time within which a response must begin.
fn time_limit(wait: Option<Duration>) -> Duration {
    match wait {
        // The agent adds up to a sixteenth of the wait.
        Some(wait) => wait + wait / 16 + TIMEOUT,
        None => TIMEOUT,
    }
}

fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

//----------- Rate and pauses ------------------------------------------------

/// First pause after an error.
const MIN_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause after errors.
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Number of trials after which the circuit breaker's pause stops growing. At most 8 s, as a single request is
/// no load.
const MAX_TRIALS: u32 = 4;
/// Consecutive errors after which only a single request at a time is sent.
const MAX_FAILURES: u32 = 8;

/// Limits requests to a steady rate with bursts of 0.1 s.
#[derive(Debug)]
pub(crate) struct RateLimit(Mutex<TokenBucket>);

impl RateLimit {
    /// Creates a limit of at least one request per second.
    pub(crate) fn new(per_second: u32) -> Self {
        let per_second = f64::from(per_second.max(1));
        Self(Mutex::new(TokenBucket::full(
            per_second,
            1.0 + per_second / 10.0,
        )))
    }

    pub(crate) async fn wait(&self) {
        let now = Instant::now();
        let wait = self.0.lock().take_ahead(now.into_std());
        sleep_until(now + wait).await;
    }
}

/// Pauses of one topic after consecutive errors: growing, and randomised so that requests that
/// failed together do not return together.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    failures: u32,
}

impl Backoff {
    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }

    pub(crate) fn next(&mut self) -> Duration {
        self.failures = self.failures.saturating_add(1);
        random_pause(self.failures)
    }
}

/// Returns the pause after this many errors: half to all of a time that doubles with each error.
fn random_pause(failures: u32) -> Duration {
    backoff::pause(MIN_PAUSE, MAX_PAUSE, failures).mul_f64(0.5 + fastrand::f64() / 2.0)
}

/// Opens while no agent responds. Then only one request at a time is sent, with pauses, and all
/// others wait, so that a returning agent is not flooded.
#[derive(Debug, Default)]
pub(crate) struct CircuitBreaker {
    state: Mutex<BreakerState>,
    /// Signals a change of the state.
    changed: Notify,
}

#[derive(Debug, Default)]
struct BreakerState {
    /// Consecutive errors of all requests.
    failures: u32,
    /// Time before which no request passes.
    until: Option<Instant>,
    /// Whether a trial request is in progress.
    trying: bool,
}

/// Permission to send a request; takes its outcome.
#[derive(Debug)]
pub(crate) struct Permit<'a> {
    breaker: &'a CircuitBreaker,
    /// Whether all other requests wait for this one.
    is_trial: bool,
}

impl CircuitBreaker {
    pub(crate) async fn permit(&self) -> Permit<'_> {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Registered before the state is read: a change in between is not missed.
            changed.as_mut().enable();
            let wait = {
                let mut state = self.state.lock();
                let now = Instant::now();
                match state.until {
                    None => {
                        return Permit {
                            breaker: self,
                            is_trial: false,
                        };
                    }
                    Some(until) if until <= now && !state.trying => {
                        state.trying = true;
                        return Permit {
                            breaker: self,
                            is_trial: true,
                        };
                    }
                    Some(until) if until > now => until - now,
                    // The end of the trial notifies.
                    Some(_) => MAX_PAUSE,
                }
            };
            // The pause can end without a notification.
            let _ = timeout(wait, changed).await;
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.state.lock().until.is_some()
    }

    /// Changes the state and wakes all waiting requests.
    fn change(&self, change: impl FnOnce(&mut BreakerState)) {
        change(&mut self.state.lock());
        self.changed.notify_waiters();
    }
}

impl Permit<'_> {
    pub(crate) fn succeeded(self) {
        self.breaker.change(|state| {
            *state = BreakerState {
                // Ended when the permit is dropped, like the trial itself.
                trying: state.trying,
                ..BreakerState::default()
            }
        });
    }

    pub(crate) fn failed(self) {
        self.failed_at(MAX_FAILURES);
    }

    /// Reports that no agent could be reached at all.
    pub(crate) fn unreachable(self) {
        self.failed_at(0);
    }

    /// Reports a failure; the breaker opens if there are now `most` of them.
    fn failed_at(self, most: u32) {
        self.breaker.change(|state| {
            state.failures = state.failures.saturating_add(1);
            let trials = if self.is_trial {
                state.failures.min(MAX_TRIALS)
            } else if state.failures >= most && state.until.is_none() {
                1
            } else {
                // Concurrent failures count once.
                return;
            };
            state.until = Some(Instant::now() + random_pause(trials));
        });
    }

    /// Reports that the agent requested a pause.
    pub(crate) fn pause(self, pause: Duration) {
        self.breaker.change(|state| {
            // Later, never earlier than the agent asked for.
            let until = Instant::now() + pause.mul_f64(1.0 + fastrand::f64() / 4.0);
            state.until = Some(state.until.map_or(until, |already| already.max(until)));
        });
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        if self.is_trial {
            self.breaker.change(|state| state.trying = false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::ScriptedAgent;

    #[tokio::test]
    async fn requests_go_at_the_rate() {
        let rate = RateLimit::new(1000);
        let begun = Instant::now();
        for _ in 0..401 {
            rate.wait().await;
        }
        // The first 0.1 s of requests pass at once.
        let took = begun.elapsed();
        assert!(took >= Duration::from_millis(300), "{took:?}");
    }

    #[tokio::test]
    async fn open_breaker_passes_single_trial() {
        let breaker = CircuitBreaker::default();
        breaker.permit().await.unreachable();
        assert!(breaker.is_open());
        let trial = breaker.permit().await;
        assert!(trial.is_trial);
        assert!(
            timeout(MIN_PAUSE * 2, breaker.permit()).await.is_err(),
            "only one at a time"
        );
        trial.unreachable();
        let trial = breaker.permit().await;
        trial.succeeded();
        assert!(!breaker.is_open() && !breaker.permit().await.is_trial);
    }

    #[tokio::test]
    async fn state_of_the_agent_is_shown() {
        let address = |port| ApiAddress {
            tls: false,
            host: "127.0.0.1".to_owned(),
            port,
        };
        let api = HttpApi {
            addresses: vec![address(1), address(2)],
            ..HttpApi::default()
        };
        let agent = Agent::new(&api, Token::new(None), &Arc::default());
        assert_eq!(agent.counts(), [0, 0, 0]);
        agent.count_failure(&"no JSON");
        for _ in 0..2 {
            agent.count_index_reset();
        }
        assert_eq!(agent.counts(), [0, 1, 2]);
        assert_eq!(agent.problem().as_deref(), Some("no JSON"));
        assert!(!agent.is_away());
        agent.breaker.permit().await.unreachable();
        assert!(agent.is_away());
        for (switches, port) in [(0, 1), (1, 2), (2, 1), (3, 2)] {
            agent.current.store(switches, Ordering::Relaxed);
            assert_eq!(agent.address().port, port);
        }
    }

    #[tokio::test]
    async fn requested_pauses_are_kept() {
        let requested = Duration::from_secs(10);
        let breaker = CircuitBreaker::default();
        let begun = Instant::now();
        breaker.permit().await.pause(requested);
        let until = breaker.state.lock().until.unwrap();
        assert!(until >= begun + requested);
    }

    #[test]
    fn pauses_grow_and_differ() {
        let mut backoff = Backoff::default();
        let pauses: Vec<Duration> = (0..9).map(|_| backoff.next()).collect();
        assert!(
            pauses[0] <= MIN_PAUSE && pauses[8] >= MAX_PAUSE / 2 && pauses[8] <= MAX_PAUSE,
            "{pauses:?}"
        );
        assert_ne!(random_pause(7), random_pause(7));
    }

    fn agents(ports: &[u16]) -> Agent {
        let address = |port: &u16| ApiAddress {
            tls: false,
            host: "127.0.0.1".to_owned(),
            port: *port,
        };
        let api = HttpApi {
            addresses: ports.iter().map(address).collect(),
            ..HttpApi::default()
        };
        Agent::new(&api, Token::new(None), &Arc::default())
    }

    #[tokio::test]
    async fn pauses_differ_by_a_quarter() {
        for _ in 0..50 {
            let breaker = CircuitBreaker::default();
            let permit = breaker.permit().await;
            permit.pause(MAX_PAUSE);
            let until = breaker.state.lock().until.unwrap();
            let most = MAX_PAUSE.mul_f64(1.25);
            assert!(until <= Instant::now() + most);
        }
    }

    #[tokio::test]
    async fn last_agent_that_is_unreachable_opens_the_breaker() {
        // Nothing listens at the ports 1 and 2.
        let agent = agents(&[1, 2]);
        for (switches, is_away) in [(1, false), (2, true)] {
            let error = agent.get("/v1/agent/self", None).await.unwrap_err();
            let start = format!("http://127.0.0.1:{switches}: cannot connect: ");
            assert!(error.to_string().starts_with(&start), "{error}");
            assert!(matches!(error, AgentError::Connection { .. }), "{error}");
            assert_eq!((agent.switches(), agent.is_away()), (switches, is_away));
            assert_eq!(agent.counts(), [switches as u64, switches as u64, 0]);
            assert!(agent.problem().is_some());
        }
    }

    #[tokio::test]
    async fn heads_of_replies_are_read() {
        let read = |agent: &Agent, status: u16, headers: &[(&str, &str)]| {
            let mut reply = Response::builder().status(status);
            for (name, value) in headers {
                reply = reply.header(*name, *value);
            }
            let reply = reply.body(Bytes::from_static(b" text ")).unwrap();
            agent.check_status(&agent.addresses[0], reply)
        };
        let agent = agents(&[1]);
        assert_eq!(agent.last_contact(), None);
        let unled = [("x-consul-knownleader", "false"), ("x-consul-index", " 7 ")];
        assert_eq!(read(&agent, 200, &unled).unwrap().index, Some(7));
        assert_eq!(agent.last_contact(), None, "without a leader");
        let late = [
            ("x-consul-knownleader", "true"),
            ("x-consul-lastcontact", "60000"),
        ];
        assert_eq!(read(&agent, 200, &late).unwrap().index, None);
        let ago = agent.last_contact().unwrap().elapsed();
        assert!(ago >= Duration::from_secs(60), "{ago:?}");
        assert_eq!(
            read(&agent, 200, &[("x-consul-index", "x")]).unwrap().index,
            None
        );
        assert!(agent.last_contact().unwrap().elapsed() < ago);
        for (status, text) in [
            (429, "too many requests (429)"),
            (403, "permission denied (403): the token may not read this"),
            (404, "not found (404)"),
            (500, "status 500 Internal Server Error: text"),
        ] {
            let error = read(&agent, status, &[]).unwrap_err().to_string();
            assert_eq!(error, format!("http://127.0.0.1:1: {text}"));
        }
    }

    #[tokio::test]
    async fn request_outcomes_are_counted() {
        let scripted = ScriptedAgent::start(&[
            ("200 OK\r\nx-consul-index: 9", "{}"),
            ("403 Forbidden", "{}"),
            ("404 Not Found", "{}"),
            ("500 Internal Server Error", "{}"),
            (
                "500 Internal Server Error",
                "rpc error making call: No path to datacenter",
            ),
            ("200 OK", "{}"),
            ("429 Too Many Requests", "{}"),
        ])
        .await;
        let agent = agents(&[scripted.address.port]);
        for (number, failures, problem, is_away) in [
            (1, 0, None, false),
            (
                2,
                1,
                Some("permission denied (403): the token may not read this"),
                false,
            ),
            (3, 2, Some("not found (404)"), false),
            (4, 3, Some("status 500 Internal Server Error: {}"), false),
            (
                5,
                4,
                Some(
                    "status 500 Internal Server Error: rpc error making call: No path to datacenter",
                ),
                false,
            ),
            (6, 4, None, false),
            (7, 5, Some("too many requests (429)"), true),
        ] {
            let reply = agent.get("/v1/x", None).await;
            assert_eq!(reply.is_ok(), problem.is_none(), "{reply:?}");
            if number == 1 {
                let reply = reply.unwrap();
                assert_eq!((reply.index, &*reply.body), (Some(9), &b"{}"[..]));
            }
            assert_eq!(agent.counts(), [number, failures, 0]);
            let address = format!("{}: ", scripted.address);
            let problem = problem.map(|problem| address + problem);
            assert_eq!(agent.problem(), problem);
            assert_eq!(agent.is_away(), is_away);
            // Refusals concern one request; an error of the server counts against the agent.
            let failures = agent.breaker.state.lock().failures;
            assert_eq!(failures, u32::from(number == 4));
        }
        assert_eq!(agent.switches(), 0, "the agent answers");
    }

    /// Checks the length of the pause that began after `begun`, in milliseconds.
    fn assert_pause(
        breaker: &CircuitBreaker,
        begun: Instant,
        milliseconds: std::ops::RangeInclusive<u64>,
    ) {
        let until = breaker.state.lock().until.expect("a pause");
        let [least, most] =
            [milliseconds.start(), milliseconds.end()].map(|ms| Duration::from_millis(*ms));
        assert!(until >= begun + least, "{milliseconds:?}");
        assert!(until <= Instant::now() + most, "{milliseconds:?}");
    }

    fn end_pause(breaker: &CircuitBreaker) {
        breaker.state.lock().until = Some(Instant::now());
    }

    #[tokio::test]
    async fn eighth_failure_opens_the_breaker() {
        let breaker = CircuitBreaker::default();
        for _ in 0..7 {
            breaker.permit().await.failed();
        }
        assert!(!breaker.is_open());
        breaker.permit().await.succeeded();
        for _ in 0..6 {
            breaker.permit().await.failed();
        }
        // Sent before the breaker opens.
        let concurrent = [
            breaker.permit().await,
            breaker.permit().await,
            breaker.permit().await,
        ];
        breaker.permit().await.failed();
        assert!(!breaker.is_open(), "seven");
        let begun = Instant::now();
        breaker.permit().await.failed();
        assert!(breaker.is_open());
        assert_pause(&breaker, begun, 500..=1000);
        // Concurrent failures count once.
        let until = breaker.state.lock().until;
        let [first, second, third] = concurrent;
        first.failed();
        second.unreachable();
        assert_eq!(breaker.state.lock().until, until);
        assert_eq!(breaker.state.lock().failures, 10);
        third.succeeded();
        assert!(!breaker.is_open());
        assert_eq!(breaker.state.lock().failures, 0);
    }

    #[tokio::test]
    async fn failed_trials_lengthen_the_pause() {
        let breaker = CircuitBreaker::default();
        let mut begun = Instant::now();
        breaker.permit().await.unreachable();
        for longest in [1000, 2000, 4000, 8000, 8000] {
            assert_pause(&breaker, begun, longest / 2..=longest);
            end_pause(&breaker);
            let trial = breaker.permit().await;
            assert!(trial.is_trial && breaker.state.lock().trying);
            begun = Instant::now();
            trial.failed();
            assert!(!breaker.state.lock().trying);
        }
        // A trial that ends without an outcome makes room for the next one.
        end_pause(&breaker);
        drop(breaker.permit().await);
        assert!(breaker.is_open() && !breaker.state.lock().trying);
        let trial = breaker.permit().await;
        assert!(trial.is_trial);
        trial.succeeded();
        assert!(!breaker.is_open() && !breaker.state.lock().trying);
        assert!(!breaker.permit().await.is_trial);
    }

    #[tokio::test]
    async fn longer_pause_stays() {
        let breaker = CircuitBreaker::default();
        let permits = [
            breaker.permit().await,
            breaker.permit().await,
            breaker.permit().await,
        ];
        let [first, second, third] = permits;
        first.pause(Duration::from_secs(20));
        let until = breaker.state.lock().until;
        second.pause(Duration::from_secs(2));
        assert_eq!(breaker.state.lock().until, until);
        let begun = Instant::now();
        third.pause(Duration::from_secs(40));
        assert_pause(&breaker, begun, 40_000..=50_000);
    }

    #[test]
    fn topic_pauses_double_to_a_minute() {
        let mut backoff = Backoff::default();
        for round in 0..2 {
            for longest in [1, 2, 4, 8, 16, 32, 60, 60] {
                let pause = backoff.next();
                let longest = Duration::from_secs(longest);
                assert!(
                    longest / 2 <= pause && pause <= longest,
                    "{round}: {pause:?}"
                );
            }
            backoff.reset();
        }
        let mut last = Backoff { failures: u32::MAX };
        assert!(last.next() >= MAX_PAUSE / 2);
    }

    #[tokio::test]
    async fn texts_of_a_proxy_are_cut() {
        let agent = agents(&[1]);
        let page = format!(" {}\n", "é".repeat(300));
        let reply = Response::builder()
            .status(502)
            .body(Bytes::from(page))
            .unwrap();
        let error = agent.check_status(&agent.addresses[0], reply).unwrap_err();
        let AgentError::Status { status, text, .. } = error else {
            panic!("{error}")
        };
        assert_eq!((status, text), (StatusCode::BAD_GATEWAY, "é".repeat(200)));
    }

    #[test]
    fn responses_begin_in_time() {
        for (wait, limit) in [
            (None, 15),
            (Some(0), 15),
            (Some(160), 185),
            (Some(600), 652),
        ] {
            let limit_of_wait = time_limit(wait.map(Duration::from_secs));
            assert_eq!(limit_of_wait.as_secs(), limit, "{wait:?}");
        }
    }

    /// Returns whether a request may be sent now.
    async fn passes(breaker: &CircuitBreaker) -> bool {
        timeout(Duration::ZERO, breaker.permit()).await.is_ok()
    }

    #[tokio::test]
    async fn pauses_and_trials_block_requests() {
        let breaker = CircuitBreaker::default();
        let earlier = breaker.permit().await;
        breaker.permit().await.pause(MAX_PAUSE);
        assert!(!passes(&breaker).await);
        end_pause(&breaker);
        assert!(passes(&breaker).await);
        let trial = breaker.permit().await;
        assert!(trial.is_trial);
        assert!(!passes(&breaker).await);
        // A request from before the trial succeeds: the breaker is closed, and the trial goes on.
        earlier.succeeded();
        assert!(passes(&breaker).await);
        breaker.permit().await.unreachable();
        end_pause(&breaker);
        assert!(!passes(&breaker).await, "one trial at a time");
        drop(trial);
        assert!(passes(&breaker).await);
    }
}
