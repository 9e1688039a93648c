//! A strict double of Consul's HTTP API, written from its documentation: it answers blocking queries by
//! Consul's rules, injects faults on request, and records every violation by a client.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque},
    io,
    net::{SocketAddr, TcpListener},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use http_body_util::{BodyExt as _, Full, StreamBody, combinators::BoxBody};
use hyper::{
    Request, Response, StatusCode,
    body::{Bytes, Frame, Incoming},
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};
use tokio::sync::{oneshot, watch};
use tokio_rustls::TlsAcceptor;

use super::world::World;

/// Fault injected into one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    TooMany,
    /// Status 500, as from servers without a leader.
    NoLeader,
    /// The body arrives in pieces, with pauses.
    SlowBody,
    /// The connection closes in the middle of the body.
    CutBody,
    /// A blocking query returns immediately although nothing changed.
    Spurious,
}

/// Rules that the double enforces.
#[derive(Clone, Debug)]
pub(crate) struct DoubleRules {
    /// The token, if one is required.
    pub(crate) token: Option<String>,
    /// Maximum number of concurrent connections.
    pub(crate) connections: usize,
    /// Maximum number of requests within any second.
    pub(crate) rate: usize,
}

impl Default for DoubleRules {
    fn default() -> Self {
        Self {
            token: None,
            connections: 200,
            rate: 100_000,
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) requests: usize,
    /// Maximum number of concurrent connections.
    pub(crate) most_connections: usize,
    pub(crate) connections: usize,
    /// Largest number of requests observed within a second.
    pub(crate) busiest_second: usize,
    /// Violations of the rules by clients.
    pub(crate) violations: Vec<String>,
    /// Arrival times of the last second's requests.
    recent: VecDeque<Instant>,
}

/// The running double; dropping it closes all connections.
pub(crate) struct Double {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// State shared by the tasks.
struct Shared {
    world: Mutex<World>,
    /// Other datacenters by name, and peers as `peer:NAME`.
    others: Mutex<BTreeMap<String, World>>,
    /// Answers of the endpoints without an index, by path, with the datacenter where one is given; `[]` otherwise.
    lists: Mutex<BTreeMap<String, Value>>,
    forbidden: Mutex<HashSet<String>>,
    asked: Mutex<HashMap<String, usize>>,
    /// Notified when the registrations change.
    changed: watch::Sender<u64>,
    rules: Mutex<DoubleRules>,
    /// Faults of the next requests, one each.
    faults: Mutex<VecDeque<Fault>>,
    /// Whether servers have a leader.
    has_leader: AtomicBool,
    /// Whether requests for a service without an index get no answer.
    holds_polls: AtomicBool,
    tally: Mutex<Tally>,
    open: AtomicUsize,
    /// Open blocking queries by path.
    blocking: Mutex<HashSet<String>>,
    /// The largest index returned so far, by path.
    given: Mutex<HashMap<String, u64>>,
}

/// The body of a reply.
type Body = BoxBody<Bytes, io::Error>;

impl Double {
    /// Serves this world on a listener.
    pub(crate) fn start(
        listener: TcpListener,
        world: World,
        rules: DoubleRules,
        tls: Option<Arc<rustls::ServerConfig>>,
    ) -> io::Result<Self> {
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let shared = Arc::new(Shared {
            changed: watch::channel(0).0,
            world: Mutex::new(world),
            others: Mutex::default(),
            lists: Mutex::default(),
            forbidden: Mutex::default(),
            asked: Mutex::default(),
            rules: Mutex::new(rules),
            faults: Mutex::default(),
            has_leader: AtomicBool::new(true),
            holds_polls: AtomicBool::new(false),
            tally: Mutex::default(),
            open: AtomicUsize::new(0),
            blocking: Mutex::default(),
            given: Mutex::default(),
        });
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = shared.clone();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let thread = thread::spawn(move || {
            runtime.block_on(async move {
                let Ok(listener) = tokio::net::TcpListener::from_std(listener) else {
                    return;
                };
                let accepting = async {
                    loop {
                        if let Ok((stream, _)) = listener.accept().await {
                            tokio::spawn(serving.clone().connection(stream, tls.clone()));
                        }
                    }
                };
                tokio::select! {
                    () = accepting => {}
                    _ = stopped => {}
                }
            });
            // Connections are cut without waiting for them.
            runtime.shutdown_background();
        });
        Ok(Self {
            address,
            shared,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Changes the registrations and wakes blocking queries.
    pub(crate) fn change(&self, change: impl FnOnce(&mut World)) {
        change(&mut lock(&self.shared.world));
        self.shared.changed.send_modify(|count| *count += 1);
    }

    /// Changes the registrations of another datacenter, or of a peer as `peer:NAME`; adds it if it is new.
    pub(crate) fn change_other(&self, place: &str, change: impl FnOnce(&mut World)) {
        {
            let mut others = lock(&self.shared.others);
            let world = others.entry(place.to_owned()).or_default();
            change(world);
            place.clone_into(&mut world.datacenter);
        }
        self.shared.changed.send_modify(|count| *count += 1);
    }

    /// Denies the token access to a path.
    pub(crate) fn forbid(&self, path: &str) {
        lock(&self.shared.forbidden).insert(path.to_owned());
    }

    /// Returns the number of requests for a path.
    pub(crate) fn asked(&self, path: &str) -> usize {
        lock(&self.shared.asked).get(path).copied().unwrap_or(0)
    }

    /// Sets the answer of an endpoint without an index.
    pub(crate) fn set_list(&self, path: &str, answer: Value) {
        lock(&self.shared.lists).insert(path.to_owned(), answer);
    }

    pub(crate) fn world(&self) -> World {
        lock(&self.shared.world).clone()
    }

    pub(crate) fn restore(&self) {
        lock(&self.shared.given).clear();
        self.change(World::restore);
    }

    /// Injects these faults, one into each of the next requests.
    pub(crate) fn misbehave(&self, faults: impl IntoIterator<Item = Fault>) {
        lock(&self.shared.faults).extend(faults);
    }

    /// Returns the number of faults not yet injected.
    pub(crate) fn faults_left(&self) -> usize {
        lock(&self.shared.faults).len()
    }

    /// Sets whether servers have a leader; without one, only stale requests are answered.
    pub(crate) fn set_leader(&self, has_leader: bool) {
        self.shared.has_leader.store(has_leader, Ordering::SeqCst);
    }

    /// Answers only blocking queries about services from now on.
    pub(crate) fn hold_polls(&self) {
        self.shared.holds_polls.store(true, Ordering::SeqCst);
    }

    /// Requires another token from now on.
    pub(crate) fn set_token(&self, token: &str) {
        lock(&self.shared.rules).token = Some(token.to_owned());
    }

    /// Requires no token from now on.
    pub(crate) fn forget_token(&self) {
        lock(&self.shared.rules).token = None;
    }

    pub(crate) fn tally(&self) -> Tally {
        lock(&self.shared.tally).clone()
    }

    /// Returns whether a blocking query for this path is waiting.
    pub(crate) fn waits_for(&self, path: &str) -> bool {
        lock(&self.shared.blocking).contains(path)
    }

    /// Returns the number of waiting blocking queries.
    pub(crate) fn blocking(&self) -> usize {
        lock(&self.shared.blocking).len()
    }
}

impl Drop for Double {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            // It may have ended.
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            // It can only have panicked, which the output shows.
            let _ = thread.join();
        }
    }
}

impl Shared {
    async fn connection(
        self: Arc<Self>,
        stream: tokio::net::TcpStream,
        tls: Option<Arc<rustls::ServerConfig>>,
    ) {
        let open = self.open.fetch_add(1, Ordering::SeqCst) + 1;
        {
            let most = lock(&self.rules).connections;
            let mut tally = lock(&self.tally);
            tally.connections += 1;
            tally.most_connections = tally.most_connections.max(open);
            if open > most {
                tally
                    .violations
                    .push(format!("{open} connections at a time"));
            }
        }
        let this = self.clone();
        let service = service_fn(move |request| {
            let this = this.clone();
            async move { this.answer(request).await }
        });
        // Errors of disconnected clients are irrelevant.
        match tls {
            None => {
                let served = hyper::server::conn::http1::Builder::new();
                let _ = served.serve_connection(TokioIo::new(stream), service).await;
            }
            Some(tls) => {
                if let Ok(stream) = TlsAcceptor::from(tls).accept(stream).await {
                    let is_two = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                    let io = TokioIo::new(stream);
                    if is_two {
                        let mut served =
                            hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                        // Like Go's server.
                        served.max_concurrent_streams(250);
                        let _ = served.serve_connection(io, service).await;
                    } else {
                        let served = hyper::server::conn::http1::Builder::new();
                        let _ = served.serve_connection(io, service).await;
                    }
                }
            }
        }
        self.open.fetch_sub(1, Ordering::SeqCst);
    }

    async fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> Result<Response<Body>, io::Error> {
        self.count();
        let fault = lock(&self.faults).pop_front();
        match fault {
            Some(Fault::TooMany) => {
                return Ok(plain(
                    StatusCode::TOO_MANY_REQUESTS,
                    "Your IP is issuing too many requests",
                ));
            }
            Some(Fault::NoLeader) => {
                return Ok(plain(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    "No cluster leader",
                ));
            }
            _ => {}
        }
        let wanted = lock(&self.rules).token.clone();
        let token = request
            .headers()
            .get("x-consul-token")
            .and_then(|value| value.to_str().ok());
        let path = request.uri().path().to_owned();
        *lock(&self.asked).entry(path.clone()).or_default() += 1;
        if wanted.is_some() && token != wanted.as_deref() || lock(&self.forbidden).contains(&path) {
            return Ok(plain(StatusCode::FORBIDDEN, "Permission denied"));
        }
        let parameters: HashMap<String, String> = request
            .uri()
            .query()
            .unwrap_or_default()
            .split('&')
            .filter(|pair| !pair.is_empty())
            .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        let is_poll = path.starts_with("/v1/health/service/") && !parameters.contains_key("index");
        if is_poll && self.holds_polls.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        let stale = parameters.contains_key("stale");
        let has_leader = self.has_leader.load(Ordering::SeqCst);
        let is_local = path == "/v1/agent/self" || path == "/v1/catalog/datacenters";
        if !has_leader && !stale && !is_local {
            return Ok(plain(
                StatusCode::INTERNAL_SERVER_ERROR,
                "No cluster leader",
            ));
        }
        let own = lock(&self.world).datacenter().to_owned();
        let datacenter = parameters
            .get("dc")
            .filter(|datacenter| **datacenter != own)
            .cloned();
        let place = datacenter.or(parameters.get("peer").map(|peer| format!("peer:{peer}")));
        if place
            .as_ref()
            .is_some_and(|place| !lock(&self.others).contains_key(place))
        {
            return Ok(plain(
                StatusCode::INTERNAL_SERVER_ERROR,
                "No path to datacenter",
            ));
        }
        // The path including the datacenter or peer, as one key.
        let path = place.map_or(path.clone(), |place| format!("{path} {place}"));
        let may_wait = [
            "/v1/catalog/nodes",
            "/v1/catalog/services",
            "/v1/health/",
            "/v1/config/",
        ]
        .iter()
        .any(|watched| path.starts_with(watched));
        if !may_wait && parameters.contains_key("index") {
            self.note(format!(
                "{path}: a blocking query that this endpoint does not have"
            ));
        }
        if may_wait && fault != Some(Fault::Spurious) {
            self.wait(&path, &parameters).await;
        }
        let Some((index, body)) = self.find(&path) else {
            self.note(format!("asked for {path}"));
            return Ok(plain(StatusCode::NOT_FOUND, "no such path"));
        };
        let mut reply = Response::builder().header("content-type", "application/json");
        if let Some(index) = index {
            lock(&self.given).insert(path, index);
            reply = reply
                .header("x-consul-index", index)
                .header("x-consul-knownleader", has_leader.to_string());
            reply = reply.header("x-consul-lastcontact", if has_leader { 0 } else { 60_000 });
        }
        let body = body.to_string();
        let body: Body = match fault {
            Some(Fault::SlowBody) => pieces(&body, false),
            Some(Fault::CutBody) => {
                // Announces the full length.
                reply = reply.header("content-length", body.len());
                pieces(&body, true)
            }
            _ => whole(body),
        };
        reply.body(body).map_err(io::Error::other)
    }

    /// Waits like a blocking query, and records violations of its rules.
    async fn wait(&self, path: &str, parameters: &HashMap<String, String>) {
        let index = parameters
            .get("index")
            .and_then(|index| index.parse::<u64>().ok());
        let Some(index) = index else {
            if parameters.contains_key("index") {
                self.note(format!("{path}: an index that is no number"));
            }
            return;
        };
        let wait = parameters
            .get("wait")
            .and_then(|wait| wait.strip_suffix("ms")?.parse().ok());
        let Some(wait) = wait.map(Duration::from_millis) else {
            return self.note(format!("{path}: an index, but no time to wait"));
        };
        if index == 0 || wait > Duration::from_secs(600) {
            self.note(format!("{path}: index {index}, {wait:?}"));
        }
        let given = lock(&self.given).get(path).copied();
        if given.is_some_and(|given| index > given) {
            self.note(format!(
                "{path}: index {index} was never given out, but {given:?}"
            ));
        }
        if !lock(&self.blocking).insert(path.to_owned()) {
            self.note(format!("{path}: two blocking queries at a time"));
        }
        let _blocking = Blocking { shared: self, path };
        let mut changed = self.changed.subscribe();
        let until = tokio::time::Instant::now() + wait + wait.mul_f64(fastrand::f64() / 16.0);
        let restored_at = *lock(&self.given).get(path).unwrap_or(&0);
        loop {
            changed.mark_unchanged();
            let now = self.find(path).and_then(|(index, _)| index).unwrap_or(0);
            // Restored servers abandon all blocking queries.
            if now > index || now < restored_at || now < index {
                return;
            }
            tokio::select! {
                _ = changed.changed() => {}
                () = tokio::time::sleep_until(until) => return,
            }
        }
    }

    /// Returns index and body for a path; `None` if the path is unknown.
    fn find(&self, path: &str) -> Option<(Option<u64>, Value)> {
        let (question, world) = (path, lock(&self.world));
        let others = lock(&self.others);
        let (path, world) = match question.split_once(' ') {
            Some((path, place)) => (path, others.get(place)?),
            None => (question, &*world),
        };
        let listed = || {
            (
                None,
                lock(&self.lists)
                    .get(question)
                    .cloned()
                    .unwrap_or_else(|| json!([])),
            )
        };
        Some(match path {
            "/v1/agent/self" => (
                None,
                json!({"Config": {"Datacenter": world.datacenter(), "NodeName": "agent", "Server": false}}),
            ),
            "/v1/catalog/datacenters" => {
                let others = others
                    .keys()
                    .map(String::as_str)
                    .filter(|name| !name.starts_with("peer:"));
                let own = world.datacenter();
                let names: BTreeSet<&str> = [own, "dc2"].into_iter().chain(others).collect();
                (None, json!(names))
            }
            "/v1/catalog/nodes" => (Some(world.nodes_index), world.list_nodes()),
            "/v1/catalog/services" => (Some(world.services_index), world.list_services()),
            "/v1/config/ingress-gateway" => (Some(1), json!([])),
            "/v1/query"
            | "/v1/peerings"
            | "/v1/coordinate/nodes"
            | "/v1/coordinate/datacenters" => listed(),
            path => {
                let service = path.strip_prefix("/v1/health/service/")?;
                // An unregistered service has the index of the list.
                let index = world
                    .services
                    .get(service)
                    .map_or(world.services_index, |service| service.index);
                (Some(index), world.list_health(service))
            }
        })
    }

    fn count(&self) {
        let most = lock(&self.rules).rate;
        let mut tally = lock(&self.tally);
        tally.requests += 1;
        let now = Instant::now();
        tally.recent.push_back(now);
        while tally
            .recent
            .front()
            .is_some_and(|&at| now - at > Duration::from_secs(1))
        {
            tally.recent.pop_front();
        }
        let recent = tally.recent.len();
        tally.busiest_second = tally.busiest_second.max(recent);
        if recent > most {
            tally
                .violations
                .push(format!("{recent} requests in a second"));
        }
    }

    /// Records a violation by a client.
    fn note(&self, violation: String) {
        lock(&self.tally).violations.push(violation);
    }
}

/// A blocking query that waits.
struct Blocking<'a> {
    shared: &'a Shared,
    path: &'a str,
}

impl Drop for Blocking<'_> {
    fn drop(&mut self) {
        lock(&self.shared.blocking).remove(self.path);
    }
}

/// A reply of text.
fn plain(status: StatusCode, text: &str) -> Response<Body> {
    let mut reply = Response::new(whole(text.to_owned()));
    *reply.status_mut() = status;
    reply
}

/// A body in one piece.
fn whole(text: String) -> Body {
    Full::new(Bytes::from(text))
        .map_err(|never| match never {})
        .boxed()
}

/// A body in three pieces, with pauses; or only the first one, and then the end.
fn pieces(text: &str, cut: bool) -> Body {
    let third = text.len() / 3;
    let parts =
        [&text[..third], &text[third..third * 2], &text[third * 2..]].map(|part| part.to_owned());
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    tokio::spawn(async move {
        for part in parts {
            if sender
                .send(Ok(Frame::data(Bytes::from(part))))
                .await
                .is_err()
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(30)).await;
            if cut {
                let _ = sender.send(Err(io::Error::other("cut"))).await;
                return;
            }
        }
    });
    StreamBody::new(futures_util::stream::unfold(
        receiver,
        |mut receiver| async move { Some((receiver.recv().await?, receiver)) },
    ))
    .boxed()
}

/// Locks; a panic elsewhere is that test's.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}
