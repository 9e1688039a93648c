//! Who is asked what when.
//!
//! Nodes and names of services are always watched. The instances of each service are
//! fetched once; then they are watched, as many services as there are connections for
//! (by HTTP/2 that is all of them), those first that are asked for. The others are
//! fetched again and again, at a tenth of the rate, and at once when their tags change.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use serde::Serialize;
use tokio::{
    sync::{mpsc, watch},
    task::AbortHandle,
    time::{Instant, MissedTickBehavior, interval, sleep, sleep_until},
};

use crate::{
    agent::{Agent, AgentError, Reply},
    api::{self, Invalid},
    cursor::{Cursor, Worth},
    freshness::{Freshness, Summary},
    known::{Key, Known},
    pace::Backoff,
    token::Token,
    topic::Topic,
};
use dns_consul::{
    Lack,
    catalog::registrations::{Gateway, Node, Pending, PreparedQuery, Registrations},
    http_api::HttpApi,
};

/// Fetches at a time.
const FETCHES: usize = 16;
/// Connections that are not for the instances of services: nodes, services, gateways, and
/// what is asked for now and then.
const FIXED: usize = 6;
/// Time between questions for what cannot be watched.
const POLL: Duration = Duration::from_secs(30);
/// A service without a watch is fetched again after this, at the earliest.
const LEAST_AGE: Duration = Duration::from_secs(5);
/// A service that was asked for within this time keeps its watch.
const IN_USE: Duration = Duration::from_secs(60);
/// How long news are gathered before they are handed over.
const GATHER: Duration = Duration::from_millis(20);
/// Shortest pause of a watch after news, and first one after an answer without.
const PAUSE: Duration = Duration::from_millis(50);
/// Consul's name for a datacenter without one.
const DEFAULT_DATACENTER: &str = "dc1";
/// How often is looked at what is due.
const TICK: Duration = Duration::from_millis(500);

/// What a source needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Whom to ask, and how.
    pub api: HttpApi,
    /// The token.
    pub token_file: Option<PathBuf>,
    /// The own datacenter; `None`: that of the agent.
    pub datacenter: Option<String>,
    /// Whether any of Consul's servers may answer.
    pub allow_stale: bool,
    /// Age up to which the last answer is served while Consul fails to give another.
    pub max_stale: Duration,
    /// Time of failures after which a part of the catalog is reported as stale.
    pub stale_after: Duration,
}

/// What is registered, as far as it was told.
#[derive(Clone, Debug, Default)]
pub struct Picture {
    /// The registrations, and what is not known yet.
    pub registrations: Registrations,
    /// The agent's datacenter, in lower case; `None`: nobody has told yet.
    pub datacenter: Option<String>,
    /// The agent's node; empty: nobody has told yet.
    pub node_name: String,
}

impl Picture {
    /// Whether all of the own datacenter was told.
    pub fn is_complete(&self) -> bool {
        let Pending { datacenters, services } = &self.registrations.pending;
        self.datacenter.as_ref().is_some_and(|own| {
            !datacenters.contains(own) && services.iter().all(|(datacenter, _)| datacenter != own)
        })
    }
}

/// How the source is doing.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Status {
    /// Who is asked now.
    pub address: String,
    /// Whether nobody answers at the moment.
    pub away: bool,
    /// Seconds since somebody who is in touch with a leader answered; `None`: never.
    pub last_contact_seconds: Option<f64>,
    /// Whether `max_stale` is over: nothing is known any more.
    pub expired: bool,
    /// Datacenter of the agent.
    pub datacenter: Option<String>,
    /// Services that are known by name.
    pub services: usize,
    /// Those of them whose instances are known.
    pub services_told: usize,
    /// Those of them whose instances are watched; the others are fetched in turn.
    pub services_watched: usize,
    /// Nodes.
    pub nodes: usize,
    /// Instances.
    pub instances: usize,
    /// Open connections.
    pub connections: usize,
    /// Requests so far.
    pub requests: u64,
    /// Requests without an answer.
    pub failures: u64,
    /// Answers whose index was smaller than the one before.
    pub index_resets: u64,
    /// Pictures handed over.
    pub pictures: u64,
    /// Why the last request failed, if it did.
    pub problem: Option<String>,
    /// Questions that have failed for longer than `stale_after`: their old answers are served.
    pub stale: usize,
    /// Age in seconds of the oldest of these answers.
    pub oldest_stale_seconds: Option<f64>,
    /// The oldest of these questions and the reason of its failure.
    pub stale_problem: Option<String>,
    /// Entries of answers that are invalid and are left out.
    pub invalid_entries: usize,
    /// The first of them.
    pub invalid_problem: Option<String>,
}

/// A live source; ends when it is dropped.
#[derive(Debug)]
pub struct Source {
    /// What somebody waits for, or asked for.
    demands: mpsc::Sender<Demand>,
    /// What is registered.
    pictures: watch::Receiver<Arc<Picture>>,
    /// How it is doing.
    status: Arc<Mutex<Status>>,
    /// Whether all services are watched, whether they are asked for or not.
    watches_all: Arc<AtomicBool>,
    /// The task, and with it all others.
    task: AbortHandle,
}

/// What the follower is told by others.
#[derive(Debug)]
enum Demand {
    /// Somebody waits for this.
    Lack(Lack),
    /// This was asked for, and is known.
    Asked(Key),
    /// Interfaces answer for these.
    Used(Vec<Key>),
}

impl Source {
    /// Begins to ask. Inside a tokio runtime.
    pub fn start(settings: Settings) -> Self {
        let (demands, demanded) = mpsc::channel(1024);
        let mut known = Known::default();
        known.own.clone_from(&settings.datacenter);
        let (shown, pictures) = watch::channel(Arc::new(picture(&known, false)));
        let status = Arc::new(Mutex::new(Status::default()));
        let watches_all = Arc::new(AtomicBool::new(false));
        let (updates, updated) = mpsc::channel(256);
        let follower = Follower {
            agent: Arc::new(Agent::new(&settings.api, Token::new(settings.token_file.clone()))),
            settings,
            known,
            agents: None,
            updates,
            watched: HashMap::new(),
            freshness: HashMap::new(),
            invalid: HashMap::new(),
            was_stale: false,
            tracked: HashMap::new(),
            queue: VecDeque::new(),
            fetching: 0,
            round: VecDeque::new(),
            demanded: HashSet::new(),
            dirty: None,
            earliest: Instant::now(),
            expired: false,
            was_away: false,
            shown,
            status: status.clone(),
            watches_all: watches_all.clone(),
            pictures: 0,
        };
        let task = tokio::spawn(follower.run(updated, demanded)).abort_handle();
        Self { demands, pictures, status, watches_all, task }
    }

    /// What is registered; changes as it does.
    pub fn pictures(&self) -> watch::Receiver<Arc<Picture>> {
        self.pictures.clone()
    }

    /// Somebody waits for what the last picture lacks. Cheap, never blocks.
    pub fn demand(&self, lack: Lack) {
        // One that finds no room comes again with the next question.
        let _ = self.demands.try_send(Demand::Lack(lack));
    }

    /// Whether it watches all services, whether they are asked for or not.
    pub fn watches_all(&self) -> bool {
        self.watches_all.load(Ordering::Relaxed)
    }

    /// A service was asked for; names in lower case. Cheap, never blocks.
    pub fn asked(&self, datacenter: &str, service: &str) {
        // One that finds no room comes again with the next question.
        let _ = self.demands.try_send(Demand::Asked((datacenter.to_owned(), service.to_owned())));
    }

    /// Reports services that interfaces answer for, so that they keep or get a watch. Never blocks.
    pub fn used(&self, services: Vec<(String, String)>) {
        // The next report comes soon.
        let _ = self.demands.try_send(Demand::Used(services));
    }

    /// How it is doing.
    pub fn status(&self) -> Status {
        self.status.lock().clone()
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What is known as a picture.
fn picture(known: &Known, expired: bool) -> Picture {
    let own = DEFAULT_DATACENTER;
    let registrations = if expired { known.nothing(own) } else { known.registrations(own) };
    Picture { registrations, datacenter: known.own.clone(), node_name: known.node_name.clone() }
}

/// Aborts a task when it is dropped.
#[derive(Debug)]
struct Running(AbortHandle);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An answer to a question, read.
#[derive(Debug)]
enum Told {
    /// [`Topic::Agent`].
    Agent(api::Myself),
    /// [`Topic::Datacenters`].
    Datacenters(Vec<String>),
    /// [`Topic::Nodes`].
    Nodes(Vec<Arc<Node>>),
    /// [`Topic::Services`].
    Services(std::collections::BTreeMap<String, Vec<String>>),
    /// [`Topic::Health`].
    Health(api::Instances),
    /// [`Topic::Ingress`].
    Ingress(Vec<Gateway>),
    /// [`Topic::Queries`].
    Queries(Vec<PreparedQuery>),
    /// The same as before.
    Unchanged,
}

impl Told {
    /// Reads the answer to a question.
    fn read(topic: &Topic, body: &[u8], invalid: &mut Invalid) -> serde_json::Result<Self> {
        Ok(match topic {
            Topic::Agent => Self::Agent(api::agent(body)?),
            Topic::Datacenters => Self::Datacenters(api::datacenters(body)?),
            Topic::Nodes(_) => Self::Nodes(api::nodes(body, invalid)?),
            Topic::Services(_) => Self::Services(api::services(body, invalid)?),
            Topic::Health { .. } => Self::Health(api::health(body, invalid)?),
            Topic::Ingress => Self::Ingress(api::ingress(body, invalid)?),
            Topic::Queries => Self::Queries(api::queries(body, invalid)?),
        })
    }
}

/// What a question brought.
#[derive(Debug)]
struct Update {
    /// The question.
    topic: Topic,
    /// Where it stands now.
    cursor: Cursor,
    /// Whether it was asked once only.
    once: bool,
    /// The answer, or that there is none.
    told: Result<Told, NotTold>,
    /// Entries of it that are left out; empty if it is unchanged.
    invalid: Invalid,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
enum NotTold {
    /// Nobody gave one.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// It cannot be read.
    #[error("{0} cannot be read: {1}")]
    Json(&'static str, serde_json::Error),
}

/// How questions are asked.
#[derive(Clone, Debug)]
struct Manner {
    /// Our datacenter.
    own: Option<String>,
    /// How long an answer may be waited for.
    wait: Duration,
    /// Whether any server may answer.
    stale: bool,
}

impl Manner {
    /// Asks once, behind what `cursor` has seen.
    async fn ask(&self, agent: &Agent, topic: &Topic, cursor: &Cursor) -> Result<Reply, AgentError> {
        // Drawn by lot, beside what the agent adds: what began together does not end so.
        let wait = self.wait.mul_f64(1.0 - fastrand::f64() / 16.0);
        let wait = cursor.index().filter(|_| topic.can_be_watched()).map(|index| (index, wait));
        let path = topic.path(self.own.as_deref(), wait, self.stale);
        agent.get(&path, wait.map(|(_, wait)| wait)).await
    }
}

/// Reads a reply. After one that cannot be read the question starts again.
fn read(
    agent: &Agent,
    topic: &Topic,
    cursor: &mut Cursor,
    reply: &Reply,
    invalid: &mut Invalid,
) -> Result<Told, NotTold> {
    if cursor.falls_to(reply.index) {
        agent.count_index_reset();
    }
    if cursor.advance(reply.index, &reply.body) == Worth::Known {
        return Ok(Told::Unchanged);
    }
    Told::read(topic, &reply.body, invalid).map_err(|error| {
        *cursor = Cursor::default();
        let problem = NotTold::Json("an answer of Consul's", error);
        agent.count_unreadable(&problem.to_string());
        problem
    })
}

/// Asks again and again. Ends with whoever listens.
async fn keep_asking(
    agent: Arc<Agent>,
    topic: Topic,
    mut cursor: Cursor,
    manner: Manner,
    updates: mpsc::Sender<Update>,
) {
    let mut backoff = Backoff::default();
    let mut quick = 0;
    let mut turns = agent.turns();
    loop {
        if turns != agent.turns() {
            // Another agent may know another history.
            turns = agent.turns();
            cursor.reset();
        }
        let begun = Instant::now();
        let mut invalid = Invalid::default();
        let told = match manner.ask(&agent, &topic, &cursor).await {
            Ok(reply) => read(&agent, &topic, &mut cursor, &reply, &mut invalid),
            Err(error) => Err(error.into()),
        };
        if told.is_ok() {
            backoff.reset();
        }
        let pause = match &told {
            Err(_) => backoff.next(),
            _ if !topic.can_be_watched() => POLL.mul_f64(0.9 + fastrand::f64() / 5.0),
            // It returned for nothing: the quicker, the longer the pause.
            Ok(Told::Unchanged) => {
                quick = if begun.elapsed() < manner.wait / 2 { (quick + 1).min(7) } else { 0 };
                (PAUSE * (1 << quick)).mul_f64(0.5 + fastrand::f64() / 2.0)
            }
            Ok(_) => {
                quick = 0;
                PAUSE
            }
        };
        let update = Update { topic: topic.clone(), cursor, once: false, told, invalid };
        if updates.send(update).await.is_err() {
            return;
        }
        sleep(pause).await;
    }
}

/// Keeps up with what is registered.
struct Follower {
    /// Who is asked.
    agent: Arc<Agent>,
    /// How.
    settings: Settings,
    /// What was told.
    known: Known,
    /// The agent's datacenter, which need not be named in questions.
    agents: Option<String>,
    /// Where answers are sent.
    updates: mpsc::Sender<Update>,
    /// Questions that are asked again and again, those for instances not among them.
    watched: HashMap<Topic, Running>,
    /// Success and failure of each question.
    freshness: HashMap<Topic, Freshness>,
    /// Entries that are left out, by question.
    invalid: HashMap<Topic, Invalid>,
    /// Whether a question was stale at the last look.
    was_stale: bool,
    /// Services.
    tracked: HashMap<Key, Tracked>,
    /// Services whose instances are to be fetched.
    queue: VecDeque<Key>,
    /// Fetches under way.
    fetching: usize,
    /// Services without a watch, the one that was fetched longest ago first.
    round: VecDeque<Key>,
    /// Services of other datacenters that were asked for.
    demanded: HashSet<Key>,
    /// Since when there are news that were not handed over.
    dirty: Option<Instant>,
    /// The next picture is not made before this.
    earliest: Instant,
    /// See [`Status::expired`].
    expired: bool,
    /// Whether nobody answered at the last look.
    was_away: bool,
    /// Where pictures are handed over.
    shown: watch::Sender<Arc<Picture>>,
    /// Where others read how we are doing.
    status: Arc<Mutex<Status>>,
    /// See [`Source::watches_all`].
    watches_all: Arc<AtomicBool>,
    /// See [`Status::pictures`].
    pictures: u64,
}

/// A service.
#[derive(Debug, Default)]
struct Tracked {
    /// Where it stands.
    cursor: Cursor,
    /// The task that watches it.
    watch: Option<Running>,
    /// Whether it waits for its fetch, or that is under way.
    queued: bool,
    /// Whether it is to be fetched once more, when that fetch has come.
    again: bool,
    /// When its instances were told last.
    told: Option<Instant>,
    /// When it was asked for last.
    asked: Option<Instant>,
}

impl Follower {
    /// Works until it is aborted.
    async fn run(mut self, mut updated: mpsc::Receiver<Update>, mut demanded: mpsc::Receiver<Demand>) {
        for topic in [Topic::Agent, Topic::Datacenters, Topic::Ingress, Topic::Queries] {
            self.watch(topic);
        }
        if let Some(own) = self.known.own.clone() {
            self.watch_datacenter(&own);
        }
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let due = self.dirty.map(|since| (since + GATHER).max(self.earliest));
            tokio::select! {
                biased;
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => self.show(),
                Some(update) = updated.recv() => self.take(update),
                Some(demand) = demanded.recv() => self.take_demand(demand),
                _ = ticks.tick() => self.tick(),
            }
            self.fetch_next();
        }
    }

    /// Takes an answer in.
    fn take(&mut self, update: Update) {
        let Update { topic, cursor, once, told, invalid } = update;
        self.note_outcome(&topic, &told, invalid);
        if let Topic::Health { datacenter, service } = &topic {
            let key = (datacenter.clone(), service.to_ascii_lowercase());
            return self.take_instances(&key, cursor, once, told);
        }
        let told = match told {
            Ok(told) => told,
            Err(problem) => {
                tracing::debug!("Consul: {topic:?}: {problem}");
                return self.not_told(&topic, &problem);
            }
        };
        let is_news = match (topic, told) {
            (_, Told::Agent(api::Myself { datacenter, node_name })) => self.take_agent(datacenter, node_name),
            (_, Told::Datacenters(names)) => replace(&mut self.known.datacenters, names),
            (Topic::Nodes(datacenter), Told::Unchanged) => self.known.unreachable.remove(&datacenter),
            (Topic::Nodes(datacenter), Told::Nodes(nodes)) => {
                self.known.unreachable.remove(&datacenter) | self.known.set_nodes(&datacenter, nodes)
            }
            (Topic::Services(datacenter), Told::Services(services)) => {
                self.take_services(&datacenter, services);
                true
            }
            (_, Told::Ingress(gateways)) => replace(&mut self.known.gateways, gateways),
            (_, Told::Queries(queries)) => replace(&mut self.known.queries, queries),
            // Unchanged; other answers are read by their question.
            _ => false,
        };
        self.note(is_news);
    }

    /// The agent told who it is.
    fn take_agent(&mut self, datacenter: String, node_name: String) -> bool {
        let is_news = replace(&mut self.known.node_name, node_name);
        if self.agents.as_ref() == Some(&datacenter) {
            return is_news;
        }
        self.agents = Some(datacenter.clone());
        match &self.known.own {
            Some(own) if *own == datacenter => is_news,
            Some(own) => {
                tracing::warn!(
                    "Consul: the agent {} is in the datacenter {datacenter}, consul.datacenter is {own}; \
                     names of {own} are asked for there",
                    self.agent.address()
                );
                is_news
            }
            None => {
                tracing::info!("Consul: the agent {} is in {datacenter}", self.agent.address());
                self.known.own = Some(datacenter.clone());
                self.watch_datacenter(&datacenter);
                true
            }
        }
    }

    /// Notes whether a question succeeded, and warns once per reason about entries that are left out.
    fn note_outcome(&mut self, topic: &Topic, told: &Result<Told, NotTold>, invalid: Invalid) {
        let freshness = self.freshness.entry(topic.clone()).or_default();
        match told {
            Ok(Told::Unchanged) => freshness.succeeded(Instant::now()),
            Ok(_) => {
                freshness.succeeded(Instant::now());
                let before = match invalid.count {
                    0 => self.invalid.remove(topic),
                    _ => self.invalid.insert(topic.clone(), invalid.clone()),
                };
                if invalid.count > 0 && before.is_none_or(|before| before.reason != invalid.reason) {
                    tracing::warn!(
                        "Consul: {topic}: {} invalid entries are left out, the others are used; the first: {}",
                        invalid.count,
                        invalid.reason
                    );
                }
            }
            Err(problem) => freshness.failed(Instant::now(), problem.to_string()),
        }
    }

    /// A datacenter told its services.
    fn take_services(&mut self, datacenter: &str, services: std::collections::BTreeMap<String, Vec<String>>) {
        let is_own = self.known.own.as_deref() == Some(datacenter);
        let difference = self.known.set_services(datacenter, services);
        for key in difference.gone {
            self.tracked.remove(&key);
            self.demanded.remove(&key);
            let is_gone = |topic: &Topic| {
                matches!(topic, Topic::Health { datacenter, service }
                    if *datacenter == key.0 && service.eq_ignore_ascii_case(&key.1))
            };
            self.freshness.retain(|topic, _| !is_gone(topic));
            self.invalid.retain(|topic, _| !is_gone(topic));
        }
        for key in difference.to_ask {
            if is_own || self.demanded.contains(&key) {
                self.ask(key, false);
            }
        }
    }

    /// A service told its instances, or did not.
    fn take_instances(&mut self, key: &Key, cursor: Cursor, once: bool, told: Result<Told, NotTold>) {
        if once {
            self.fetching -= 1;
        }
        // One that is gone meanwhile has none.
        let Some(tracked) = self.tracked.get_mut(key) else { return };
        if once {
            tracked.queued = false;
        }
        let again = std::mem::take(&mut tracked.again);
        let is_watched = tracked.watch.is_some();
        match told {
            Ok(Told::Health(instances)) => {
                tracked.cursor = cursor;
                tracked.told = Some(Instant::now());
                let is_news = self.known.set_instances(key, instances);
                self.note(is_news);
            }
            Ok(_) => {
                tracked.cursor = cursor;
                tracked.told = Some(Instant::now());
            }
            Err(problem) => tracing::debug!("Consul: {}: {problem}", key.1),
        }
        if is_watched {
            return;
        }
        if again || !self.known.has_instances(key) {
            return self.ask(key.clone(), false);
        }
        if self.watch_count() < self.most_watches() {
            self.watch_instances(key);
        } else {
            self.round.push_back(key.clone());
        }
    }

    /// A question has no answer.
    fn not_told(&mut self, topic: &Topic, problem: &NotTold) {
        if let (Topic::Agent, None, NotTold::Agent(AgentError::Forbidden { .. })) =
            (topic, &self.known.own, problem)
        {
            tracing::warn!(
                "Consul: the token may not read the agent's datacenter; assuming {DEFAULT_DATACENTER}: \
                 set consul.datacenter, or let the token read the agent"
            );
            self.known.own = Some(DEFAULT_DATACENTER.to_owned());
            return self.watch_datacenter(DEFAULT_DATACENTER);
        }
        let (Topic::Nodes(datacenter) | Topic::Services(datacenter)) = topic else { return };
        let is_own = self.known.own.as_ref() == Some(datacenter);
        // The agent answers, but not for that datacenter.
        if !is_own && matches!(problem, NotTold::Agent(AgentError::Status { .. })) {
            let is_news = self.known.unreachable.insert(datacenter.clone());
            self.note(is_news);
        }
    }

    /// Takes in what others want.
    fn take_demand(&mut self, demand: Demand) {
        match demand {
            Demand::Asked(key) => self.note_use(&key),
            Demand::Used(keys) => keys.iter().for_each(|key| self.note_use(key)),
            Demand::Lack(Lack { datacenter, service }) => {
                if !self.known.is_datacenter(&datacenter) {
                    return;
                }
                self.watch_datacenter(&datacenter);
                if let Some(service) = service {
                    let key = (datacenter, service);
                    if self.known.own.as_ref() != Some(&key.0) {
                        self.demanded.insert(key.clone());
                    }
                    self.ask(key, true);
                }
            }
        }
    }

    /// Notes that a service is in use; it gets a watch if there is room for one.
    fn note_use(&mut self, key: &Key) {
        let Some(tracked) = self.tracked.get_mut(key) else { return };
        tracked.asked = Some(Instant::now());
        if tracked.watch.is_none() && !tracked.queued && self.make_room() {
            self.watch_instances(key);
        }
    }

    /// Looks at what is due.
    fn tick(&mut self) {
        let each = self.settings.api.rate as f64 / 10.0 * TICK.as_secs_f64();
        for _ in 0..(each.ceil() as usize).min(self.round.len()) {
            let Some(key) = self.round.front() else { break };
            let told =
                self.tracked.get(key).filter(|tracked| tracked.watch.is_none()).map(|tracked| tracked.told);
            match told {
                // It is young, and so are all behind it.
                Some(Some(at)) if at.elapsed() < LEAST_AGE => break,
                Some(_) => {
                    let key = key.clone();
                    self.round.pop_front();
                    self.ask(key, false);
                }
                // It is gone, or watched.
                None => {
                    self.round.pop_front();
                }
            }
        }
        let summary = self.summary();
        let expired = self.agent.contact().is_some_and(|at| at.elapsed() > self.settings.max_stale)
            || summary.catalog_age.is_some_and(|age| age > self.settings.max_stale);
        if expired != self.expired {
            self.expired = expired;
            self.note(true);
        }
        let away = self.agent.is_away();
        if away != self.was_away {
            self.was_away = away;
            match (away, self.agent.problem()) {
                (true, problem) => tracing::warn!(
                    "Consul does not answer: {}; what it told last is served",
                    problem.unwrap_or_default()
                ),
                (false, _) => tracing::info!("Consul answers again: {}", self.agent.address()),
            }
        }
        let stale = summary.stale > 0;
        if stale != self.was_stale {
            self.was_stale = stale;
            match summary.oldest {
                Some((_, problem)) => tracing::warn!(
                    "Consul: {} questions fail, their last answers are served; {problem}",
                    summary.stale
                ),
                None => tracing::info!("Consul: all questions are answered again"),
            }
        }
        self.watches_all.store(self.watch_count() >= self.tracked.len(), Ordering::Relaxed);
        self.tell_status();
    }

    /// Sums up failing questions. Questions of other datacenters count: their names are served, too.
    fn summary(&self) -> Summary {
        let own = self.known.own.as_deref();
        let catalog = |topic: &Topic| matches!(topic, Topic::Nodes(datacenter) | Topic::Services(datacenter) if own == Some(datacenter));
        Summary::of(&self.freshness, self.settings.stale_after, Instant::now(), catalog)
    }

    /// Notes that there are news.
    fn note(&mut self, is_news: bool) {
        if is_news && self.dirty.is_none() {
            self.dirty = Some(Instant::now());
        }
    }

    /// Hands over what is known.
    fn show(&mut self) {
        let begun = Instant::now();
        self.dirty = None;
        self.shown.send_replace(Arc::new(picture(&self.known, self.expired)));
        self.pictures += 1;
        // A large catalog that changes all the time is not all that we do.
        self.earliest = Instant::now() + begun.elapsed() * 4;
        self.tell_status();
    }

    /// Lets others read how we are doing.
    fn tell_status(&self) {
        let (services, services_told, nodes, instances) = self.known.counts();
        let [requests, failures, index_resets] = self.agent.counts();
        let Summary { stale, oldest, .. } = self.summary();
        let (oldest_stale_seconds, stale_problem) =
            oldest.map(|(age, problem)| (age.as_secs_f64(), problem)).unzip();
        let status = Status {
            address: self.agent.address().to_string(),
            away: self.was_away,
            last_contact_seconds: self.agent.contact().map(|at| at.elapsed().as_secs_f64()),
            expired: self.expired,
            datacenter: self.known.own.clone(),
            services,
            services_told,
            services_watched: self.watch_count(),
            nodes,
            instances,
            connections: self.agent.connections().open(),
            requests,
            failures,
            index_resets,
            pictures: self.pictures,
            problem: self.agent.problem(),
            stale,
            oldest_stale_seconds,
            stale_problem,
            invalid_entries: self.invalid.values().map(|invalid| invalid.count).sum(),
            invalid_problem: self
                .invalid
                .iter()
                .map(|(topic, invalid)| format!("{topic}: {}", invalid.reason))
                .min(),
        };
        *self.status.lock() = status;
    }

    /// How questions are asked now.
    fn manner(&self) -> Manner {
        let Settings { api, allow_stale, .. } = &self.settings;
        Manner { own: self.agents.clone(), wait: api.wait, stale: *allow_stale }
    }

    /// Asks this again and again from now on.
    fn watch(&mut self, topic: Topic) {
        if self.watched.contains_key(&topic) {
            return;
        }
        let asking = keep_asking(
            self.agent.clone(),
            topic.clone(),
            Cursor::default(),
            self.manner(),
            self.updates.clone(),
        );
        self.watched.insert(topic, Running(tokio::spawn(asking).abort_handle()));
    }

    /// Watches nodes and services of a datacenter.
    fn watch_datacenter(&mut self, datacenter: &str) {
        self.watch(Topic::Nodes(datacenter.to_owned()));
        self.watch(Topic::Services(datacenter.to_owned()));
    }

    /// Services that are watched.
    fn watch_count(&self) -> usize {
        self.tracked.values().filter(|tracked| tracked.watch.is_some()).count()
    }

    /// Services that may be watched.
    fn most_watches(&self) -> usize {
        match self.agent.connections().multiplexes() {
            true => usize::MAX,
            false => self.settings.api.max_connections.saturating_sub(FETCHES.min(self.fetches()) + FIXED),
        }
    }

    /// Fetches at a time.
    fn fetches(&self) -> usize {
        FETCHES.min(self.settings.api.max_connections / 8).max(1)
    }

    /// Makes room for one more watch, if need be; whether there is.
    fn make_room(&mut self) -> bool {
        if self.watch_count() < self.most_watches() {
            return true;
        }
        let watched = self.tracked.iter().filter(|(_, tracked)| tracked.watch.is_some());
        let Some((idlest, asked)) =
            watched.map(|(key, tracked)| (key, tracked.asked)).min_by_key(|&(_, asked)| asked)
        else {
            return false;
        };
        if asked.is_some_and(|asked| asked.elapsed() < IN_USE) {
            return false;
        }
        let idlest = idlest.clone();
        if let Some(tracked) = self.tracked.get_mut(&idlest) {
            tracked.watch = None;
        }
        self.round.push_back(idlest);
        true
    }

    /// Watches the instances of a service, from where its last answer stood.
    fn watch_instances(&mut self, key: &Key) {
        let Some(topic) = self.topic_of(key) else { return };
        let manner = self.manner();
        let Some(tracked) = self.tracked.get_mut(key) else { return };
        let asking = keep_asking(self.agent.clone(), topic, tracked.cursor, manner, self.updates.clone());
        tracked.watch = Some(Running(tokio::spawn(asking).abort_handle()));
    }

    /// Fetches the instances of a service as soon as there is room; those that somebody
    /// waits for first.
    fn ask(&mut self, key: Key, urgent: bool) {
        let tracked = self.tracked.entry(key.clone()).or_default();
        if tracked.watch.is_some() {
            return;
        }
        if tracked.queued {
            tracked.again |= !urgent;
            if !urgent {
                return;
            }
            // It may be far behind; asked for twice it is not.
            let Some(at) = self.queue.iter().position(|waiting| *waiting == key) else { return };
            self.queue.remove(at);
        }
        tracked.queued = true;
        match urgent {
            true => self.queue.push_front(key),
            false => self.queue.push_back(key),
        }
    }

    /// Begins as many fetches as there is room for.
    fn fetch_next(&mut self) {
        while self.fetching < self.fetches() {
            let Some(key) = self.queue.pop_front() else { return };
            let Some(topic) = self.topic_of(&key) else {
                // Nobody has registered it, or not yet: the list of services will tell.
                self.tracked.remove(&key);
                continue;
            };
            self.fetching += 1;
            let (agent, manner, updates) = (self.agent.clone(), self.manner(), self.updates.clone());
            tokio::spawn(async move {
                let (mut cursor, mut invalid) = (Cursor::default(), Invalid::default());
                let told = match manner.ask(&agent, &topic, &cursor).await {
                    // The first answer is always news.
                    Ok(reply) => read(&agent, &topic, &mut cursor, &reply, &mut invalid),
                    Err(error) => {
                        // The gate holds back all when nobody answers; this is for what just this
                        // service answers.
                        sleep(Backoff::default().next()).await;
                        Err(error.into())
                    }
                };
                // An error: the follower has ended.
                let _ = updates.send(Update { topic, cursor, once: true, told, invalid }).await;
            });
        }
    }

    /// The question for the instances of a service.
    fn topic_of(&self, key: &Key) -> Option<Topic> {
        let service = self.known.name_of(key)?.to_owned();
        Some(Topic::Health { datacenter: key.0.clone(), service })
    }
}

/// Puts a value in the place of another; whether it is another one.
fn replace<T: PartialEq>(place: &mut T, value: T) -> bool {
    let differs = *place != value;
    *place = value;
    differs
}
