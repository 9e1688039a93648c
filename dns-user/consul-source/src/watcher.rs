//! Schedules the requests to Consul.
//!
//! Nodes and service names are always watched. The instances of each service are fetched once; then
//! the watches start, services in use first, one per connection (HTTP/2 watches all services). The
//! others are fetched in turn, at a tenth of the rate, and immediately when their tags change.
//! [`Phase`] is the state of one service.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, MissedTickBehavior, interval, sleep_until},
};

use crate::{
    agent::{Agent, AgentError},
    api,
    api::{Invalid, Token},
    known::{DEFAULT_DATACENTER, Demand, Difference, Known, ServiceKey, view},
    progress::{Cursor, Freshness, Phase, Running, Summary, Tracked},
    requests::{Content, FetchError, QueryOptions, Topic, Update, fetch, watch_topic},
};
use dns_consul::{
    Lack, Missing,
    catalog::Place,
    source::{CatalogView, LiveSettings, LiveStatus},
};
use dns_upstream::HostNames;

const MAX_FETCHES: usize = 16;
/// Connections for nodes, services, gateways and polls.
const OTHER_CONNECTIONS: usize = 6;
/// Minimum time between two fetches of a service without a watch.
const MIN_FETCH_INTERVAL: Duration = Duration::from_secs(5);
/// Time since its last use during which a service keeps its watch.
const IN_USE: Duration = Duration::from_secs(60);
/// Time during which changes are combined into one snapshot.
const GATHER: Duration = Duration::from_millis(20);
/// Interval of [`CatalogWatcher::tick`].
const TICK: Duration = Duration::from_millis(500);

/// Position of a new fetch in the queue.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Priority {
    /// Before all others.
    QueryWaits,
    /// After all others.
    Refresh,
}

/// The task that keeps the catalog up to date.
pub(crate) struct CatalogWatcher {
    agent: Arc<Agent>,
    settings: LiveSettings,
    known: Known,
    /// The datacenter that an agent told last.
    agent_datacenter: Option<String>,
    updates: mpsc::Sender<Update>,
    /// Running watches, except watches of services.
    watched: HashMap<Topic, Running>,
    /// Success and failure of each topic.
    freshness: HashMap<Topic, Freshness>,
    /// Entries dropped from responses, by topic.
    invalid: HashMap<Topic, Invalid>,
    /// Whether a topic was stale at the last tick.
    was_stale: bool,
    tracked: HashMap<ServiceKey, Tracked>,
    /// Services in [`Phase::Queued`].
    queue: VecDeque<ServiceKey>,
    /// Number of fetches in progress.
    fetching: usize,
    /// Services without a watch, least recently fetched first.
    idle: VecDeque<ServiceKey>,
    /// Time of the first change since the last snapshot.
    changed_since: Option<Instant>,
    /// Earliest time of the next snapshot.
    next_snapshot: Instant,
    expired: bool,
    /// Whether no agent responded at the last tick.
    was_away: bool,
    snapshots: watch::Sender<Arc<CatalogView>>,
    status: Arc<Mutex<LiveStatus>>,
    watches_all: Arc<AtomicBool>,
    views: u64,
}

impl CatalogWatcher {
    pub(crate) fn spawn(
        settings: LiveSettings,
        names: &Arc<HostNames>,
        status: Arc<Mutex<LiveStatus>>,
        watches_all: Arc<AtomicBool>,
        demanded: mpsc::Receiver<Demand>,
    ) -> (watch::Receiver<Arc<CatalogView>>, Running) {
        let (updates, updated) = mpsc::channel(256);
        let (watcher, views) = Self::new(settings, names, status, watches_all, updates);
        let task = tokio::spawn(watcher.run(updated, demanded));
        (views, Running(task.abort_handle()))
    }

    fn new(
        settings: LiveSettings,
        names: &Arc<HostNames>,
        status: Arc<Mutex<LiveStatus>>,
        watches_all: Arc<AtomicBool>,
        updates: mpsc::Sender<Update>,
    ) -> (Self, watch::Receiver<Arc<CatalogView>>) {
        let mut known = Known::default();
        known.own.clone_from(&settings.datacenter);
        let (snapshots, views) = watch::channel(Arc::new(view(&known, known.live())));
        let watcher = Self {
            agent: Arc::new(Agent::new(
                &settings.api,
                Token::new(settings.token_file.clone()),
                names,
            )),
            settings,
            known,
            agent_datacenter: None,
            updates,
            watched: HashMap::new(),
            freshness: HashMap::new(),
            invalid: HashMap::new(),
            was_stale: false,
            tracked: HashMap::new(),
            queue: VecDeque::new(),
            fetching: 0,
            idle: VecDeque::new(),
            changed_since: None,
            next_snapshot: Instant::now(),
            expired: false,
            was_away: false,
            snapshots,
            status,
            watches_all,
            views: 0,
        };
        (watcher, views)
    }

    async fn run(
        mut self,
        mut updated: mpsc::Receiver<Update>,
        mut demanded: mpsc::Receiver<Demand>,
    ) {
        // The rest is watched once the agent has told its datacenter.
        for topic in [
            Topic::Agent,
            Topic::Datacenters,
            Topic::Ingress,
            Topic::Peerings,
        ] {
            self.watch(topic);
        }
        if let Some(own) = self.known.own.clone() {
            self.watch_own(&own);
        }
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let due = self
                .changed_since
                .map(|since| (since + GATHER).max(self.next_snapshot));
            tokio::select! {
                // A due snapshot first: updates may arrive without pause.
                biased;
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => self.publish_snapshot(),
                Some(update) = updated.recv() => self.handle_update(update),
                Some(demand) = demanded.recv() => self.handle_demand(demand),
                _ = ticks.tick() => self.tick(),
            }
            self.fetch_next();
        }
    }

    fn handle_update(&mut self, update: Update) {
        let Update {
            topic,
            cursor,
            once,
            content,
            invalid,
        } = update;
        if let Topic::Health { place, service } = &topic {
            let key = (place.clone(), service.to_ascii_lowercase());
            // The last response about a service that was deregistered must not leave it in the maps for good.
            if self.tracked.contains_key(&key) {
                self.note_outcome(&topic, &content, invalid);
            }
            return self.handle_instances(&key, cursor, once, content);
        }
        self.note_outcome(&topic, &content, invalid);
        let content = match content {
            Ok(content) => content,
            Err(problem) => {
                tracing::debug!("Consul: {topic:?}: {problem}");
                return self.handle_failure(&topic, &problem);
            }
        };
        let changed = match (topic, content) {
            (
                _,
                Content::Agent(api::AgentInfo {
                    datacenter,
                    node_name,
                }),
            ) => self.handle_agent(datacenter, node_name),
            (_, Content::Datacenters(names)) => replace(&mut self.known.datacenters, names),
            (Topic::Nodes(datacenter), Content::Unchanged) => {
                self.known.unreachable.remove(&datacenter)
            }
            (Topic::Nodes(datacenter), Content::Nodes(nodes)) => {
                // Not `||`: the nodes are set in any case.
                self.known.unreachable.remove(&datacenter)
                    | self.known.set_nodes(&datacenter, nodes)
            }
            (Topic::Services(datacenter), Content::Services(services)) => {
                let difference = self
                    .known
                    .set_services(&Place::Datacenter(datacenter.into()), services);
                self.apply_difference(difference);
                true
            }
            (_, Content::Peerings(peers)) => self.handle_peers(peers),
            (_, Content::Ingress(gateways)) => self.known.set_gateways(gateways),
            (Topic::Queries(datacenter), Content::Queries(queries)) => {
                let changed = self.known.set_queries(&datacenter, queries);
                // The new queries may be the first that need coordinates.
                self.watch_coordinates();
                changed
            }
            (_, Content::NodeCoordinates(nodes)) => self.known.set_node_coordinates(nodes),
            (_, Content::ServerCoordinates(servers)) => self.known.set_server_coordinates(servers),
            // Unchanged; all other content is paired with its topic above.
            _ => false,
        };
        self.schedule_snapshot_if(changed);
    }

    /// Processes the agent's own data. Returns whether the catalog changed.
    fn handle_agent(&mut self, datacenter: String, node_name: String) -> bool {
        let changed = replace(&mut self.known.node_name, node_name);
        if self.agent_datacenter.as_ref() == Some(&datacenter) {
            return changed;
        }
        self.agent_datacenter = Some(datacenter.clone());
        match &self.known.own {
            Some(own) if *own == datacenter => changed,
            Some(own) => {
                tracing::warn!(
                    "Consul: the agent {} is in the datacenter {datacenter}, consul.datacenter is {own}; \
                     names of {own} are requested from it",
                    self.agent.address()
                );
                changed
            }
            None => {
                tracing::info!(
                    "Consul: the agent {} is in {datacenter}",
                    self.agent.address()
                );
                self.known.own = Some(datacenter.clone());
                self.watch_own(&datacenter);
                true
            }
        }
    }

    /// Records whether a request succeeded, and warns once per reason about dropped entries.
    fn note_outcome(
        &mut self,
        topic: &Topic,
        content: &Result<Content, FetchError>,
        invalid: Invalid,
    ) {
        let freshness = self.freshness.entry(topic.clone()).or_default();
        let was_fresh = freshness.is_fresh();
        match content {
            Ok(Content::Unchanged) => freshness.succeeded(Instant::now()),
            Ok(_) => {
                freshness.succeeded(Instant::now());
                self.note_invalid(topic, invalid);
            }
            Err(problem) => {
                freshness.failed(Instant::now(), problem.to_string());
                // The same token probably fails everywhere.
                if was_fresh && matches!(problem, FetchError::Agent(AgentError::Forbidden { .. })) {
                    self.recheck_catalog();
                }
            }
        }
    }

    /// Records the invalid entries of a response, and warns once about each new cause.
    fn note_invalid(&mut self, topic: &Topic, invalid: Invalid) {
        let before = self.invalid.remove(topic).unwrap_or_default();
        for (line, cause) in invalid.lines().zip(invalid.0.keys()) {
            if !before.0.contains_key(cause) {
                tracing::warn!("Consul: {topic}: {line}");
            }
        }
        if invalid != Invalid::default() {
            self.invalid.insert(topic.clone(), invalid);
        }
    }

    /// Requests nodes and services immediately. A revoked token fails first where a request does not
    /// wait; the blocking queries that the agent already holds would report it minutes later.
    fn recheck_catalog(&mut self) {
        let Some(own) = self.known.own.clone() else {
            return;
        };
        for topic in [Topic::Nodes(own.clone()), Topic::Services(own)] {
            if self.freshness.get(&topic).is_some_and(Freshness::is_fresh)
                && self.watched.remove(&topic).is_some()
            {
                self.watch(topic);
            }
        }
    }

    /// Processes the list of peers. Returns whether it changed.
    fn handle_peers(&mut self, peers: BTreeMap<String, Vec<String>>) -> bool {
        let difference = self.known.set_peers(peers);
        let changed = difference != Difference::default();
        self.apply_difference(difference);
        changed
    }

    /// Processes changes of a service list: forgets removed services, and fetches new ones.
    fn apply_difference(&mut self, difference: Difference) {
        for key in difference.removed {
            self.tracked.remove(&key);
            // A registration that is gone cannot be stale or invalid.
            self.freshness.retain(|topic, _| !topic.is_of(&key));
            self.invalid.retain(|topic, _| !topic.is_of(&key));
        }
        for key in difference.to_fetch {
            // Of other datacenters, only the queried services are kept.
            if self.known.is_fully_loaded(&key.0) || self.tracked.contains_key(&key) {
                self.queue_fetch(key, Priority::Refresh);
            }
        }
    }

    fn handle_instances(
        &mut self,
        key: &ServiceKey,
        cursor: Cursor,
        once: bool,
        content: Result<Content, FetchError>,
    ) {
        if once {
            // The slot is free whether or not the service still exists.
            self.fetching -= 1;
        }
        // A service that has been deregistered is no longer tracked.
        let Some(tracked) = self.tracked.get_mut(key) else {
            return;
        };
        let fetched = match tracked.phase {
            Phase::Fetching { again } if once => {
                tracked.phase = Phase::Idle;
                Some(again)
            }
            // A response of a watch, which may have just ended.
            _ => None,
        };
        match content {
            Ok(content) => {
                tracked.cursor = cursor;
                tracked.loaded_at = Some(Instant::now());
                if let Content::Health(instances) = content {
                    let changed = self.known.set_instances(key, instances);
                    self.schedule_snapshot_if(changed);
                }
            }
            Err(problem) => tracing::debug!("Consul: {}: {problem}", key.1),
        }
        let Some(again) = fetched else { return };
        // Its tags have changed meanwhile, or the fetch failed.
        if again || !self.known.has_instances(key) {
            return self.queue_fetch(key.clone(), Priority::Refresh);
        }
        if self.watch_count() < self.max_watches() {
            self.watch_instances(key);
        } else {
            self.idle.push_back(key.clone());
        }
    }

    fn handle_failure(&mut self, topic: &Topic, problem: &FetchError) {
        // A token without `agent:read` still serves for everything else.
        if let (Topic::Agent, None, FetchError::Agent(AgentError::Forbidden { .. })) =
            (topic, &self.known.own, problem)
        {
            tracing::warn!(
                "Consul: the token may not read the agent's datacenter; assuming {DEFAULT_DATACENTER}: \
                 set consul.datacenter, or let the token read the agent"
            );
            self.known.own = Some(DEFAULT_DATACENTER.to_owned());
            return self.watch_own(DEFAULT_DATACENTER);
        }
        if let (
            Topic::Peerings,
            FetchError::Agent(error @ (AgentError::Forbidden { .. } | AgentError::NotFound { .. })),
        ) = (topic, problem)
            && self
                .freshness
                .get(topic)
                .is_some_and(|freshness| !freshness.was_answered())
        {
            tracing::info!(
                "Consul: cannot list peers, their names do not exist: {error}; use Consul 1.13 or later and \
                 a token with peering:read, then reload"
            );
            self.watched.remove(topic);
            self.freshness.remove(topic);
            return;
        }
        let (Topic::Nodes(datacenter) | Topic::Services(datacenter)) = topic else {
            return;
        };
        let is_own = self.known.own.as_ref() == Some(datacenter);
        // The agent responds but has no path to that datacenter.
        if !is_own && matches!(problem, FetchError::Agent(AgentError::Status { .. })) {
            let changed = self.known.unreachable.insert(datacenter.clone());
            self.schedule_snapshot_if(changed);
        }
    }

    fn handle_demand(&mut self, demand: Demand) {
        match demand {
            Demand::Queried(key) => self.note_use(&key),
            Demand::Used(keys) => keys.iter().for_each(|key| self.note_use(key)),
            Demand::Lack(Lack { place, missing }) => {
                if let Place::Datacenter(name) = &place {
                    // Clients may ask for any datacenter; one that Consul does not list costs no request.
                    if !self.known.is_datacenter(name) {
                        return;
                    }
                    self.watch_datacenter(name);
                }
                match (missing, &place) {
                    (Missing::Service(service), _) => {
                        let key = (place, service);
                        // Clients may ask for any name. One that is not listed yet is demanded again with the next
                        // snapshot.
                        if self.known.name_of(&key).is_some() {
                            self.queue_fetch(key, Priority::QueryWaits);
                        }
                    }
                    (Missing::Queries, Place::Datacenter(name)) => {
                        self.watch(Topic::Queries(name.to_string()));
                    }
                    _ => {}
                }
            }
        }
    }

    /// Records the use of a service, and watches it if possible.
    fn note_use(&mut self, key: &ServiceKey) {
        let Some(tracked) = self.tracked.get_mut(key) else {
            return;
        };
        tracked.queried_at = Some(Instant::now());
        if matches!(tracked.phase, Phase::Idle) && self.make_room() {
            self.watch_instances(key);
        }
    }

    /// Starts due fetches and reports changes of the state.
    fn tick(&mut self) {
        // A tenth of the permitted rate; the rest is for queries that wait, and for watches.
        let each = self.settings.api.rate as f64 / 10.0 * TICK.as_secs_f64();
        for _ in 0..(each.ceil() as usize).min(self.idle.len()) {
            let Some(key) = self.idle.front() else { break };
            let idle = self
                .tracked
                .get(key)
                .filter(|tracked| matches!(tracked.phase, Phase::Idle));
            match idle.map(|tracked| tracked.loaded_at) {
                // All later ones were fetched more recently.
                Some(Some(at)) if at.elapsed() < MIN_FETCH_INTERVAL => break,
                Some(_) => {
                    let key = key.clone();
                    self.idle.pop_front();
                    self.queue_fetch(key, Priority::Refresh);
                }
                // Deregistered, watched or queued.
                None => {
                    self.idle.pop_front();
                }
            }
        }
        self.report_changes();
        self.watches_all
            .store(self.watch_count() >= self.tracked.len(), Ordering::Relaxed);
        self.publish_status();
    }

    /// Logs changes of the catalog's age, of the agents' reachability and of failing requests.
    fn report_changes(&mut self) {
        let summary = self.summary();
        let max_stale = self.settings.max_stale;
        let last_contact = self.agent.last_contact();
        let mut expired = last_contact.is_some_and(|at| at.elapsed() > max_stale)
            || summary.catalog_age.is_some_and(|age| age > max_stale);
        if let Some(failing) = summary.catalog_failing
            && let Some(limit) = self.settings.api.expire_after
        {
            expired |= failing > limit;
        }
        if expired != self.expired {
            self.expired = expired;
            self.schedule_snapshot_if(true);
            if expired {
                tracing::warn!(
                    "Consul: the catalog has expired; names get SERVFAIL until it is read"
                );
            } else {
                tracing::info!("Consul: the catalog is current again");
            }
        }
        let away = self.agent.is_away();
        if away != self.was_away {
            self.was_away = away;
            match (away, self.agent.problem()) {
                (true, problem) => tracing::warn!(
                    "Consul does not answer: {}; the last known catalog stays in use",
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
                    "Consul: {} requests fail; their last results stay in use: {problem}",
                    summary.stale
                ),
                None => tracing::info!("Consul: all requests are answered again"),
            }
        }
    }

    /// Summarises failing topics. Topics of other datacenters count, because their names are also served, while Consul
    /// lists them.
    fn summary(&self) -> Summary {
        let own = self.known.own.as_deref();
        let is_listed = |topic: &Topic| {
            let datacenter = topic.datacenter();
            datacenter.is_none_or(|name| self.known.is_datacenter(name))
        };
        Summary::of(
            self.freshness.iter().filter(|(topic, _)| is_listed(topic)),
            self.settings.api.stale_after,
            Instant::now(),
            |topic: &Topic| matches!(topic, Topic::Nodes(datacenter) | Topic::Services(datacenter) if own == Some(datacenter)),
        )
    }

    fn schedule_snapshot_if(&mut self, changed: bool) {
        if changed && self.changed_since.is_none() {
            self.changed_since = Some(Instant::now());
        }
    }

    fn publish_snapshot(&mut self) {
        let begun = Instant::now();
        self.changed_since = None;
        // Names get SERVFAIL then: whether they exist is unknown.
        let live = if self.expired {
            self.known.empty()
        } else {
            self.known.live()
        };
        self.snapshots
            .send_replace(Arc::new(view(&self.known, live)));
        self.views += 1;
        // A large catalog that changes constantly must not use up the CPU.
        self.next_snapshot = Instant::now() + begun.elapsed() * 4;
        self.publish_status();
    }

    fn publish_status(&self) {
        let (services, services_loaded, nodes, instances) = self.known.counts();
        let [requests, failures, index_resets] = self.agent.counts();
        let Summary {
            stale,
            oldest,
            catalog_failing,
            ..
        } = self.summary();
        let (oldest_stale_seconds, stale_problem) = oldest
            .map(|(age, problem)| (age.as_secs_f64(), problem))
            .unzip();
        let invalid_problems = self.invalid.iter().flat_map(|(topic, invalid)| {
            let lines = invalid.lines();
            lines.map(move |line| format!("{topic}: {line}"))
        });
        let status = LiveStatus {
            address: self.agent.address().to_string(),
            away: self.was_away,
            unconfirmed: catalog_failing
                .is_some_and(|failing| failing >= self.settings.api.stale_after),
            last_contact_seconds: self
                .agent
                .last_contact()
                .map(|at| at.elapsed().as_secs_f64()),
            expired: self.expired,
            datacenter: self.known.own.clone(),
            services,
            services_told: services_loaded,
            services_watched: self.watch_count(),
            nodes,
            instances,
            connections: self.agent.connections.open(),
            requests,
            failures,
            index_resets,
            views: self.views,
            problem: self.agent.problem(),
            stale,
            oldest_stale_seconds,
            stale_problem,
            invalid_entries: self.invalid.values().map(Invalid::count).sum(),
            // The least one, so that the status does not change without a reason.
            invalid_problem: invalid_problems.min(),
        };
        *self.status.lock() = status;
    }

    fn options(&self) -> QueryOptions {
        let LiveSettings {
            api, allow_stale, ..
        } = &self.settings;
        QueryOptions {
            wait: api.wait,
            stale: *allow_stale,
        }
    }

    fn watch(&mut self, topic: Topic) {
        if self.watched.contains_key(&topic) {
            return;
        }
        let task = watch_topic(
            self.agent.clone(),
            topic.clone(),
            Cursor::default(),
            self.options(),
            self.updates.clone(),
        );
        self.watched
            .insert(topic, Running(tokio::spawn(task).abort_handle()));
    }

    fn watch_own(&mut self, datacenter: &str) {
        self.watch_datacenter(datacenter);
        self.watch(Topic::Queries(datacenter.to_owned()));
    }

    /// Watches the coordinates that prepared queries need.
    fn watch_coordinates(&mut self) {
        if self.known.queries().any(|query| query.failover.nearest > 0) {
            self.watch(Topic::ServerCoordinates);
        }
        if self.known.queries().any(|query| !query.near.is_empty())
            && let Some(own) = self.known.own.clone()
        {
            self.watch(Topic::NodeCoordinates(own));
        }
    }

    fn watch_datacenter(&mut self, datacenter: &str) {
        self.watch(Topic::Nodes(datacenter.to_owned()));
        self.watch(Topic::Services(datacenter.to_owned()));
    }

    fn watch_count(&self) -> usize {
        self.tracked
            .values()
            .filter(|tracked| tracked.is_watched())
            .count()
    }

    fn max_watches(&self) -> usize {
        // With HTTP/2, about 100 watches share a connection.
        if self.agent.connections.multiplexes() {
            return usize::MAX;
        }
        self.settings
            .api
            .max_connections
            .saturating_sub(self.max_fetches() + OTHER_CONNECTIONS)
    }

    fn max_fetches(&self) -> usize {
        // An eighth of few connections: the others are for watches.
        MAX_FETCHES
            .min(self.settings.api.max_connections / 8)
            .max(1)
    }

    /// Returns whether another watch is possible; ends the least recently used one if necessary.
    fn make_room(&mut self) -> bool {
        if self.watch_count() < self.max_watches() {
            return true;
        }
        let watched = self.tracked.iter_mut();
        let watched = watched.filter(|(_, tracked)| tracked.is_watched());
        let Some((key, tracked)) = watched.min_by_key(|(_, tracked)| tracked.queried_at) else {
            return false;
        };
        // Services in use would displace one another, each at the cost of a request.
        if tracked.queried_at.is_some_and(|at| at.elapsed() < IN_USE) {
            return false;
        }
        tracked.phase = Phase::Idle;
        self.idle.push_back(key.clone());
        true
    }

    /// Watches the instances of a service, starting at its last position.
    fn watch_instances(&mut self, key: &ServiceKey) {
        let Some(topic) = self.topic_of(key) else {
            return;
        };
        let options = self.options();
        let Some(tracked) = self.tracked.get_mut(key) else {
            return;
        };
        let task = watch_topic(
            self.agent.clone(),
            topic,
            tracked.cursor,
            options,
            self.updates.clone(),
        );
        tracked.phase = Phase::Watched(Running(tokio::spawn(task).abort_handle()));
    }

    fn queue_fetch(&mut self, key: ServiceKey, priority: Priority) {
        let urgent = priority == Priority::QueryWaits;
        let tracked = self.tracked.entry(key.clone()).or_default();
        match &mut tracked.phase {
            Phase::Watched(_) => return,
            Phase::Fetching { again } => {
                // A waiting query gets the result of this fetch; a change may have come after it was answered.
                *again |= !urgent;
                return;
            }
            Phase::Queued if !urgent => return,
            // Moves to the front.
            Phase::Queued => self.queue.retain(|waiting| *waiting != key),
            Phase::Idle => tracked.phase = Phase::Queued,
        }
        if urgent {
            self.queue.push_front(key)
        } else {
            self.queue.push_back(key)
        }
    }

    fn fetch_next(&mut self) {
        while self.fetching < self.max_fetches() {
            let Some(key) = self.queue.pop_front() else {
                return;
            };
            // Deregistered in the meantime.
            let Some(topic) = self.topic_of(&key) else {
                continue;
            };
            match self.tracked.get_mut(&key) {
                Some(tracked) if matches!(tracked.phase, Phase::Queued) => {
                    tracked.phase = Phase::Fetching { again: false };
                }
                // Removed and registered again in the meantime.
                _ => continue,
            }
            self.fetching += 1;
            tokio::spawn(fetch(
                self.agent.clone(),
                topic,
                self.options(),
                self.updates.clone(),
            ));
        }
    }

    fn topic_of(&self, key: &ServiceKey) -> Option<Topic> {
        let service = self.known.name_of(key)?.to_owned();
        Some(Topic::Health {
            place: key.0.clone(),
            service,
        })
    }
}

/// Replaces a value. Returns whether it changed.
fn replace<T: PartialEq>(place: &mut T, value: T) -> bool {
    let differs = *place != value;
    *place = value;
    differs
}

#[cfg(test)]
mod tests;
