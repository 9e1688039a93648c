use dns_consul::{
    catalog::{
        live::ServiceInstances,
        registrations::{Failover, PreparedQuery},
    },
    config::{ApiAddress, HttpApi},
};
use hyper::StatusCode;

use super::*;
use crate::tests::ScriptedAgent;

/// A watcher whose requests are never sent: tasks do not run in a test that does not wait.
struct Bench {
    watcher: CatalogWatcher,
    views: watch::Receiver<Arc<CatalogView>>,
    _updated: mpsc::Receiver<Update>,
}

fn address() -> ApiAddress {
    ApiAddress {
        tls: false,
        host: "127.0.0.1".to_owned(),
        port: 1,
    }
}

fn forbidden() -> FetchError {
    FetchError::Agent(AgentError::Forbidden { address: address() })
}

fn not_found() -> FetchError {
    FetchError::Agent(AgentError::NotFound { address: address() })
}

fn no_path() -> FetchError {
    FetchError::Agent(AgentError::Status {
        address: address(),
        status: StatusCode::INTERNAL_SERVER_ERROR,
        text: "No path to datacenter".to_owned(),
    })
}

fn place(datacenter: &str) -> Place {
    Place::Datacenter(datacenter.into())
}

fn key(service: &str) -> ServiceKey {
    (place("dc1"), service.to_owned())
}

fn health(service: &str) -> Topic {
    Topic::Health {
        place: place("dc1"),
        service: service.to_owned(),
    }
}

fn nodes(datacenter: &str) -> Topic {
    Topic::Nodes(datacenter.to_owned())
}

fn seconds_ago(seconds: u64) -> Instant {
    Instant::now() - Duration::from_secs(seconds)
}

impl Bench {
    /// Creates a watcher that may open so many connections and send so many requests per second.
    fn new(own: Option<&str>, max_connections: usize, rate: u32) -> Self {
        let settings = LiveSettings {
            api: HttpApi {
                addresses: vec![address()],
                wait: Duration::from_secs(30),
                rate,
                max_connections,
                ..HttpApi::default()
            },
            token_file: None,
            datacenter: own.map(str::to_owned),
            allow_stale: true,
            max_stale: Duration::from_secs(3600),
        };
        let (updates, updated) = mpsc::channel(256);
        let (watcher, views) = CatalogWatcher::new(
            settings,
            &Arc::default(),
            Arc::default(),
            Arc::default(),
            updates,
        );
        Self {
            watcher,
            views,
            _updated: updated,
        }
    }

    /// Returns whether a response, or its lack, leads to a new snapshot.
    fn is_news(&mut self, topic: Topic, content: Result<Content, FetchError>) -> bool {
        self.update(topic, false, content, Invalid::default())
    }

    fn update(
        &mut self,
        topic: Topic,
        once: bool,
        content: Result<Content, FetchError>,
        invalid: Invalid,
    ) -> bool {
        self.watcher.changed_since = None;
        self.watcher.handle_update(Update {
            topic,
            cursor: Cursor::default(),
            once,
            content,
            invalid,
        });
        self.watcher.changed_since.is_some()
    }

    /// Registers these services of the own datacenter, with a tag.
    fn register(&mut self, tag: &str, services: &[&str]) {
        let mut named = BTreeMap::new();
        for &service in services {
            named.insert(service.to_owned(), vec![tag.to_owned()]);
        }
        let topic = Topic::Services("dc1".to_owned());
        assert!(self.is_news(topic, Ok(Content::Services(named))));
    }

    /// Ends the fetch of a service.
    fn fetched(&mut self, service: &str) -> bool {
        let content = Content::Health(ServiceInstances::default());
        self.update(health(service), true, Ok(content), Invalid::default())
    }

    fn agent_is_in(&mut self, datacenter: &str, node_name: &str) -> bool {
        let agent = api::AgentInfo {
            datacenter: datacenter.to_owned(),
            node_name: node_name.to_owned(),
        };
        self.is_news(Topic::Agent, Ok(Content::Agent(agent)))
    }

    fn lacks(&mut self, datacenter: &str, missing: Missing) {
        let place = place(datacenter);
        self.watcher
            .handle_demand(Demand::Lack(Lack { place, missing }));
    }

    /// Returns the watches of other topics than services.
    fn watched(&self) -> Vec<String> {
        let mut watched: Vec<String> = self.watcher.watched.keys().map(Topic::to_string).collect();
        watched.sort();
        watched
    }

    fn queue(&self) -> Vec<&str> {
        self.watcher.queue.iter().map(|key| &*key.1).collect()
    }

    fn idle(&self) -> Vec<&str> {
        self.watcher.idle.iter().map(|key| &*key.1).collect()
    }

    /// Returns the phase of each service.
    fn phases(&self) -> String {
        let mut phases = Vec::new();
        for ((_, service), tracked) in &self.watcher.tracked {
            let phase = match tracked.phase {
                Phase::Idle => "idle",
                Phase::Queued => "queued",
                Phase::Fetching { again: false } => "fetching",
                Phase::Fetching { again: true } => "again",
                Phase::Watched(_) => "watched",
            };
            phases.push(format!("{service} {phase}"));
        }
        phases.sort();
        phases.join(", ")
    }

    fn tracked(&mut self, service: &str) -> &mut Tracked {
        self.watcher.tracked.get_mut(&key(service)).unwrap()
    }

    fn status(&self) -> LiveStatus {
        self.watcher.publish_status();
        self.watcher.status.lock().clone()
    }
}

const OF_DC1: [&str; 3] = ["nodes of dc1", "prepared queries of dc1", "services of dc1"];

#[tokio::test]
async fn agent_tells_its_datacenter() {
    let mut bench = Bench::new(None, 8, 10);
    assert!(bench.agent_is_in("dc1", "one"));
    assert_eq!(bench.watched(), OF_DC1);
    assert!(!bench.agent_is_in("dc1", "one"), "nothing changed");
    assert!(bench.agent_is_in("dc1", "two"), "the node's name did");
    assert_eq!(bench.watcher.known.own.as_deref(), Some("dc1"));

    let mut other = Bench::new(Some("dc2"), 8, 10);
    assert!(!other.agent_is_in("dc1", ""));
    assert!(!other.agent_is_in("dc2", ""));
    assert_eq!(other.watcher.known.own.as_deref(), Some("dc2"));
    assert_eq!(other.watched(), [""; 0]);
    let options = other.watcher.options();
    assert_eq!(
        (options.wait, options.stale),
        (Duration::from_secs(30), true)
    );
}

#[tokio::test]
async fn token_that_may_not_read_the_agent_suffices() {
    let mut bench = Bench::new(None, 8, 10);
    bench.is_news(Topic::Agent, Err(not_found()));
    assert_eq!(bench.watched(), [""; 0]);
    bench.is_news(Topic::Agent, Err(forbidden()));
    assert_eq!(bench.watched(), OF_DC1);
    let mut configured = Bench::new(Some("dc2"), 8, 10);
    configured.is_news(Topic::Agent, Err(forbidden()));
    assert_eq!(configured.watcher.known.own.as_deref(), Some("dc2"));
}

#[tokio::test]
async fn agents_without_peers_are_asked_once() {
    for (was_answered, problem, is_asked_again) in [
        (false, forbidden(), false),
        (false, not_found(), false),
        (false, no_path(), true),
        (true, forbidden(), true),
    ] {
        let mut bench = Bench::new(Some("dc1"), 8, 10);
        bench.watcher.watch(Topic::Peerings);
        if was_answered {
            let peers = BTreeMap::from([("East".to_owned(), Vec::new())]);
            let answer = || Ok(Content::Peerings(peers.clone()));
            assert!(!bench.is_news(Topic::Peerings, answer()));
        }
        bench.is_news(Topic::Peerings, Err(problem));
        let is_failing = bench.watcher.freshness.contains_key(&Topic::Peerings);
        assert_eq!(is_failing, is_asked_again);
        assert_eq!(bench.watched().len(), usize::from(is_asked_again));
    }
}

#[tokio::test]
async fn datacenters_without_a_path_are_unreachable() {
    let mut bench = Bench::new(Some("dc1"), 8, 10);
    let names = || Ok(Content::Datacenters(vec!["dc1".into(), "dc2".into()]));
    assert!(bench.is_news(Topic::Datacenters, names()));
    assert!(!bench.is_news(Topic::Datacenters, names()));
    assert!(!bench.is_news(nodes("dc1"), Err(no_path())));
    assert!(!bench.is_news(nodes("dc2"), Err(not_found())));
    let none: fn() -> Result<Content, FetchError> = || Ok(Content::Nodes(Vec::new()));
    for returns in [none, || Ok(Content::Unchanged)] {
        assert!(bench.is_news(Topic::Services("dc2".into()), Err(no_path())));
        assert!(!bench.is_news(nodes("dc2"), Err(no_path())), "no news");
        assert!(bench.watcher.known.unreachable.contains("dc2"));
        assert!(bench.is_news(nodes("dc2"), returns()));
        assert!(bench.watcher.known.unreachable.is_empty());
    }
    assert!(!bench.is_news(nodes("dc2"), none()));
    assert!(bench.is_news(nodes("dc1"), none()), "the first list");
}

#[tokio::test]
async fn services_are_fetched_then_watched_or_fetched_in_turn() {
    // One fetch at a time, and 8 - 1 - 6 watches.
    let mut bench = Bench::new(Some("dc1"), 8, 10);
    bench.register("v1", &["A", "b", "c", "d"]);
    assert_eq!(bench.queue(), ["a", "b", "c", "d"]);
    bench.watcher.fetch_next();
    assert_eq!(bench.watcher.fetching, 1);
    assert_eq!(bench.queue(), ["b", "c", "d"]);
    assert_eq!(bench.watcher.topic_of(&key("a")), Some(health("A")));
    assert!(bench.fetched("A"));
    assert_eq!(bench.watcher.fetching, 0);
    bench.watcher.fetch_next();
    let fetching = "a watched, b fetching, c queued, d queued";
    assert_eq!(bench.phases(), fetching);

    // A query waits for d; b changes while it is fetched.
    bench.lacks("dc1", Missing::Service("d".to_owned()));
    assert_eq!(bench.queue(), ["d", "c"]);
    bench.register("v2", &["A", "b", "c", "d"]);
    assert_eq!(
        bench.phases(),
        "a watched, b again, c queued, d queued",
        "a watch tells by itself, and what waits is fetched later"
    );
    assert!(bench.fetched("b"));
    assert_eq!(bench.queue(), ["d", "c", "b"]);
    bench.watcher.fetch_next();
    // Such a query gets the result of the fetch.
    bench.lacks("dc1", Missing::Service("d".to_owned()));
    assert!(bench.phases().ends_with("d fetching"));
    assert!(bench.fetched("d"));
    assert_eq!(bench.idle(), ["d"]);

    // A failed fetch is repeated.
    bench.watcher.fetch_next();
    bench.update(health("c"), true, Err(no_path()), Invalid::default());
    assert_eq!(bench.queue(), ["b", "c"]);
    bench.watcher.fetch_next();
    assert!(!bench.fetched("b"), "the same instances");
    assert_eq!(
        bench.phases(),
        "a watched, b idle, c queued, d idle",
        "one watch is all"
    );
    assert!(bench.tracked("b").loaded_at.is_some());
    assert!(bench.tracked("c").loaded_at.is_none());
    assert_eq!(bench.status().services_watched, 1);
    assert_eq!(bench.status().services_told, 3);
    // The watch of a reports.
    assert!(!bench.is_news(health("A"), Ok(Content::Unchanged)));
    assert_eq!(bench.watcher.fetching, 0);

    bench.register("v2", &["b", "c", "d"]);
    assert_eq!(bench.phases(), "b idle, c queued, d idle");
    assert!(!bench.watcher.freshness.contains_key(&health("A")));
    assert!(bench.watcher.freshness.contains_key(&health("b")));
    // The response to a fetch from before is not used.
    bench.watcher.fetching = 1;
    assert!(!bench.fetched("A"));
    assert_eq!(bench.watcher.fetching, 0);
    bench.watcher.queue.push_front(key("a"));
    bench.watcher.fetch_next();
    assert_eq!(bench.phases(), "b idle, c fetching, d idle");
}

#[tokio::test]
async fn requests_at_once_follow_the_connections() {
    for (connections, fetches, watches) in [
        (1, 1, 0),
        (7, 1, 0),
        (8, 1, 1),
        (16, 2, 8),
        (128, 16, 106),
        (1000, 16, 978),
    ] {
        let bench = Bench::new(Some("dc1"), connections, 10);
        let found = (bench.watcher.max_fetches(), bench.watcher.max_watches());
        assert_eq!(found, (fetches, watches), "{connections}");
    }
}

#[tokio::test]
async fn queried_services_take_the_watches_of_others() {
    let mut bench = Bench::new(Some("dc1"), 8, 10);
    bench.register("", &["a", "b", "c"]);
    for service in ["a", "b", "c"] {
        bench.watcher.fetch_next();
        bench.fetched(service);
    }
    let queried = |bench: &mut Bench, service: &str| {
        bench.watcher.handle_demand(Demand::Queried(key(service)));
        bench.phases()
    };
    assert_eq!(bench.phases(), "a watched, b idle, c idle");
    assert_eq!(queried(&mut bench, "b"), "a idle, b watched, c idle");
    assert!(bench.idle().contains(&"a"));
    // One in use keeps its watch.
    assert_eq!(queried(&mut bench, "a"), "a idle, b watched, c idle");
    bench.tracked("b").queried_at = Some(seconds_ago(30));
    assert_eq!(queried(&mut bench, "c"), "a idle, b watched, c idle");
    bench.tracked("b").queried_at = Some(seconds_ago(61));
    let used = Demand::Used(vec![key("none"), key("c")]);
    bench.watcher.handle_demand(used);
    assert_eq!(bench.phases(), "a idle, b idle, c watched");
    assert_eq!(queried(&mut bench, "none"), "a idle, b idle, c watched");

    // Of several, the least recently used one.
    let mut bench = Bench::new(Some("dc1"), 10, 10);
    bench.register("", &["a", "b", "c", "d"]);
    for service in ["a", "b", "c", "d"] {
        bench.watcher.fetch_next();
        bench.fetched(service);
    }
    assert_eq!(bench.phases(), "a watched, b watched, c watched, d idle");
    for (service, seconds) in [("a", 300), ("b", 500), ("c", 400)] {
        bench.tracked(service).queried_at = Some(seconds_ago(seconds));
    }
    assert_eq!(
        queried(&mut bench, "d"),
        "a watched, b idle, c watched, d watched"
    );
}

#[tokio::test]
async fn idle_services_are_fetched_at_a_tenth_of_the_rate() {
    // A tenth of 40 requests per second are 2 in a tick.
    let mut bench = Bench::new(Some("dc1"), 7, 40);
    let services = ["a", "b", "c", "d", "e"];
    bench.register("", &services);
    for service in services {
        bench.watcher.fetch_next();
        bench.fetched(service);
        bench.tracked(service).loaded_at = Some(seconds_ago(6));
    }
    assert_eq!(bench.idle(), services);
    // Of later than now, the age is 0, however busy the machine is.
    bench.tracked("c").loaded_at = Some(Instant::now() + Duration::from_secs(3600));
    bench.watcher.tick();
    assert_eq!(
        (bench.queue(), bench.idle()),
        (vec!["a", "b"], vec!["c", "d", "e"])
    );
    bench.watcher.tick();
    assert_eq!(bench.idle(), ["c", "d", "e"], "c was just fetched");
    assert!(!bench.watcher.watches_all.load(Ordering::Relaxed));
    // A watch needs no fetch; its place is the next one's.
    bench.tracked("c").loaded_at = None;
    bench.watcher.watch_instances(&key("c"));
    bench.watcher.tick();
    assert_eq!(
        (bench.queue(), bench.idle()),
        (vec!["a", "b", "d"], vec!["e"])
    );
    for service in services {
        bench.watcher.watch_instances(&key(service));
    }
    bench.watcher.tick();
    assert!(bench.watcher.watches_all.load(Ordering::Relaxed));
    assert!(bench.idle().is_empty());
}

#[tokio::test]
async fn old_answers_expire() {
    let mut bench = Bench::new(Some("dc1"), 8, 10);
    let failing = |answered: u64, failing: u64| {
        let mut freshness = Freshness::default();
        freshness.succeeded(seconds_ago(answered));
        freshness.failed(seconds_ago(failing), "403".to_owned());
        freshness
    };
    bench.register("", &["a"]);
    bench.watcher.known.datacenters = vec!["dc2".to_owned()];
    for (expire_after, of, answered, since, unconfirmed, expired) in [
        (None, nodes("dc1"), 3300, 10, false, false),
        (None, nodes("dc1"), 3300, 70, true, false),
        (None, nodes("dc1"), 3610, 10, false, true),
        (None, Topic::Services("dc1".into()), 3610, 10, false, true),
        (None, nodes("dc2"), 3610, 70, false, false),
        (None, Topic::Ingress, 3610, 70, false, false),
        (Some(100), nodes("dc1"), 1000, 62, true, false),
        (Some(100), nodes("dc1"), 1000, 110, true, true),
    ] {
        bench.watcher.settings.api.expire_after = expire_after.map(Duration::from_secs);
        bench.watcher.freshness = HashMap::from([(of, failing(answered, since))]);
        bench.watcher.changed_since = None;
        bench.watcher.tick();
        assert_eq!(bench.watcher.changed_since.is_some(), expired);
        let status = bench.status();
        assert_eq!((status.expired, status.unconfirmed), (expired, unconfirmed));
        let is_stale = since >= 60;
        assert_eq!(status.stale, usize::from(is_stale));
        assert_eq!(bench.watcher.was_stale, is_stale);
        let seconds = status.oldest_stale_seconds.unwrap_or(0.0) as u64;
        let expected = if is_stale { answered } else { 0 };
        assert!((expected..expected + 300).contains(&seconds), "{seconds}");
        assert_eq!(status.stale_problem.is_some(), is_stale);
        bench.watcher.publish_snapshot();
        assert_eq!(bench.views.borrow().live.places.is_empty(), expired);
        assert!(bench.watcher.changed_since.is_none());

        // Once it is read, the same names return.
        bench.watcher.freshness.clear();
        bench.watcher.tick();
        assert_eq!(bench.watcher.changed_since.is_some(), expired);
        bench.watcher.publish_snapshot();
        assert_eq!(bench.views.borrow_and_update().live.places.len(), 1);
    }
    assert_eq!(bench.status().views, 16);
    assert!(bench.watcher.next_snapshot <= Instant::now() + Duration::from_secs(60));
}

#[tokio::test]
async fn dropped_entries_are_counted() {
    let mut bench = Bench::new(Some("dc1"), 8, 10);
    let invalid = |causes: &[(&str, usize)]| {
        let mut invalid = Invalid::default();
        for &(cause, count) in causes {
            let entry = (count, "web".to_owned());
            invalid.0.insert(cause.to_owned(), entry);
        }
        invalid
    };
    let none = || Ok(Content::Nodes(Vec::new()));
    bench.update(nodes("dc2"), false, none(), invalid(&[("no name", 2)]));
    let two = invalid(&[("no port", 1), ("no address", 1)]);
    bench.update(nodes("dc1"), false, none(), two);
    let status = bench.status();
    assert_eq!(status.invalid_entries, 4);
    let least = Some("nodes of dc1: web: no address".to_owned());
    assert_eq!(status.invalid_problem, least);
    // The same response says nothing of them, and neither does a failure.
    bench.is_news(nodes("dc1"), Ok(Content::Unchanged));
    bench.is_news(nodes("dc1"), Err(not_found()));
    assert_eq!(bench.status().invalid_entries, 4);
    bench.is_news(nodes("dc1"), none());
    assert_eq!(bench.status().invalid_entries, 2);
}

#[tokio::test]
async fn queries_for_other_datacenters_load_them() {
    let mut bench = Bench::new(Some("dc1"), 8, 10);
    bench.lacks("dc2", Missing::Service("web".to_owned()));
    assert_eq!(bench.watched(), [""; 0], "no datacenter of Consul's");
    let names = vec!["dc1".to_owned(), "dc2".to_owned()];
    bench.is_news(Topic::Datacenters, Ok(Content::Datacenters(names)));
    bench.lacks("dc2", Missing::Service("web".to_owned()));
    let [nodes, services, queries] = ["nodes of dc2", "services of dc2", "prepared queries of dc2"];
    assert_eq!(bench.watched(), [nodes, services]);
    assert_eq!(bench.queue(), [""; 0], "the list decides");
    bench.lacks("dc2", Missing::Queries);
    assert_eq!(bench.watched(), [nodes, queries, services]);
    let both = BTreeMap::from([("web".to_owned(), vec![]), ("db".to_owned(), vec![])]);
    let of_dc2 = || Topic::Services("dc2".to_owned());
    assert!(bench.is_news(of_dc2(), Ok(Content::Services(both.clone()))));
    bench.lacks("dc2", Missing::Service("web".to_owned()));
    assert_eq!(bench.queue(), ["web"], "only what was queried");
    bench.watcher.fetch_next();
    assert_eq!(bench.phases(), "web fetching");
    let tagged = both.into_keys().map(|name| (name, vec!["v2".to_owned()]));
    let tagged = tagged.collect();
    assert!(bench.is_news(of_dc2(), Ok(Content::Services(tagged))));
    assert_eq!(bench.phases(), "web again", "its tags changed");
    assert!(bench.is_news(of_dc2(), Ok(Content::Services(BTreeMap::new()))));
    assert_eq!(bench.phases(), "");
}

#[tokio::test]
async fn names_that_nobody_registered_take_no_memory() {
    let mut bench = Bench::new(Some("dc1"), 8, 10);
    let names = vec!["dc1".to_owned(), "dc2".to_owned()];
    bench.is_news(Topic::Datacenters, Ok(Content::Datacenters(names)));
    for datacenter in ["dc1", "dc2"] {
        for number in 0..1000 {
            bench.lacks(datacenter, Missing::Service(format!("x{number}")));
        }
    }
    let CatalogWatcher {
        tracked,
        queue,
        freshness,
        ..
    } = &bench.watcher;
    assert_eq!((tracked.len(), queue.len(), freshness.len()), (0, 0, 1));
}

#[tokio::test]
async fn peers_bring_their_services() {
    let mut bench = Bench::new(Some("dc1"), 8, 10);
    let peers = |services: &[&str]| {
        let services = services.iter().map(|&name| name.to_owned()).collect();
        Ok(Content::Peerings(BTreeMap::from([(
            "East".to_owned(),
            services,
        )])))
    };
    assert!(bench.is_news(Topic::Peerings, peers(&["web"])));
    assert!(!bench.is_news(Topic::Peerings, peers(&["web"])));
    assert_eq!(bench.queue(), ["web"]);
    assert!(bench.is_news(Topic::Peerings, peers(&[])));
    assert_eq!(bench.phases(), "");
}

#[tokio::test]
async fn coordinates_are_watched_for_queries_that_need_them() {
    for (nearest, near, watched) in [
        (0, "", &[][..]),
        (1, "", &["coordinates of servers"]),
        (0, "_agent", &["coordinates of the nodes of dc1"]),
    ] {
        let mut bench = Bench::new(Some("dc1"), 8, 10);
        let query = PreparedQuery {
            near: near.to_owned(),
            failover: Failover {
                nearest,
                ..Failover::default()
            },
            ..PreparedQuery::default()
        };
        let queries = || Ok(Content::Queries(vec![query.clone()]));
        let topic = || Topic::Queries("dc1".to_owned());
        assert!(bench.is_news(topic(), queries()));
        assert!(!bench.is_news(topic(), queries()));
        assert_eq!(bench.watched(), watched);
    }
    let mut bench = Bench::new(Some("dc1"), 8, 10);
    let none = || Ok(Content::NodeCoordinates(HashMap::new()));
    assert!(!bench.is_news(Topic::NodeCoordinates("dc1".to_owned()), none()));
}

#[tokio::test]
async fn revoked_token_is_looked_for_at_once() {
    let mut bench = Bench::new(Some("dc1"), 8, 10);
    bench.watcher.watch_own("dc1");
    let read = |bench: &mut Bench, topic: Topic| {
        bench.is_news(topic, Ok(Content::Unchanged));
    };
    read(&mut bench, nodes("dc1"));
    read(&mut bench, Topic::Ingress);
    let tasks = |bench: &Bench| {
        [nodes("dc1"), Topic::Services("dc1".to_owned())]
            .map(|topic| bench.watcher.watched[&topic].0.id())
    };
    let before = tasks(&bench);
    bench.is_news(Topic::Ingress, Err(not_found()));
    assert_eq!(tasks(&bench), before);
    read(&mut bench, Topic::Ingress);
    bench.is_news(Topic::Ingress, Err(forbidden()));
    let after = tasks(&bench);
    assert_ne!(after[0], before[0]);
    assert_eq!(
        after[1], before[1],
        "never answered, so it waits for nothing"
    );
    bench.is_news(Topic::Ingress, Err(forbidden()));
    assert_eq!(tasks(&bench), after, "once");
}

#[tokio::test]
async fn gateways_and_coordinates_are_news() {
    use dns_consul::catalog::{live::Coordinate, registrations::Gateway};

    let mut bench = Bench::new(Some("dc1"), 8, 10);
    let gateway = Gateway {
        gateway: "gw".to_owned(),
        services: vec!["web".to_owned()],
    };
    let gateways = || Ok(Content::Ingress(vec![gateway.clone()]));
    assert!(bench.is_news(Topic::Ingress, gateways()));
    assert!(!bench.is_news(Topic::Ingress, gateways()));
    let of_nodes = || {
        let nodes = HashMap::from([("n".to_owned(), Coordinate::default())]);
        Ok(Content::NodeCoordinates(nodes))
    };
    let topic = || Topic::NodeCoordinates("dc1".to_owned());
    assert!(bench.is_news(topic(), of_nodes()));
    assert!(!bench.is_news(topic(), of_nodes()));
    let of_servers = || {
        let servers = BTreeMap::from([("dc1".to_owned(), Vec::new())]);
        Ok(Content::ServerCoordinates(servers))
    };
    assert!(bench.is_news(Topic::ServerCoordinates, of_servers()));
    assert!(!bench.is_news(Topic::ServerCoordinates, of_servers()));
    let live = bench.watcher.known.live();
    assert_eq!(live.gateways.len(), 1);
    assert_eq!(
        (live.coordinates.nodes.len(), live.coordinates.servers.len()),
        (1, 1)
    );
}

#[tokio::test]
async fn agents_out_of_reach_are_reported() {
    let mut bench = Bench::new(Some("dc1"), 8, 10);
    bench.watcher.tick();
    let status = bench.status();
    assert_eq!(
        (status.away, status.requests, status.failures),
        (false, 0, 0)
    );
    assert_eq!(status.address, "http://127.0.0.1:1");
    assert_eq!(status.datacenter.as_deref(), Some("dc1"));
    assert_eq!((status.problem, status.last_contact_seconds), (None, None));
    assert!(!status.unconfirmed && !status.expired);
    // Nothing listens there.
    assert!(
        bench
            .watcher
            .agent
            .get("/v1/agent/self", None)
            .await
            .is_err()
    );
    assert!(!bench.status().away, "until the next tick");
    bench.watcher.tick();
    let status = bench.status();
    assert_eq!(
        (status.away, status.requests, status.failures),
        (true, 1, 1)
    );
    let problem = "http://127.0.0.1:1: cannot connect: Connection refused (os error 111)";
    assert_eq!(status.problem.as_deref(), Some(problem));
    bench.watcher.agent.count_index_reset();
    assert_eq!(bench.status().index_resets, 1);
}

#[tokio::test]
async fn removed_services_leave_no_trace() {
    let mut bench = Bench::new(Some("dc1"), 8, 10);
    bench.register("", &["a", "b"]);
    for service in ["a", "b"] {
        let mut invalid = Invalid::default();
        invalid
            .0
            .insert("no port".to_owned(), (1, service.to_owned()));
        let content = Ok(Content::Health(ServiceInstances::default()));
        bench.update(health(service), false, content, invalid);
    }
    assert_eq!(bench.status().invalid_entries, 2);
    bench.register("", &["b"]);
    assert_eq!(bench.status().invalid_entries, 1);
    let problem = Some("service b of dc1: b: no port".to_owned());
    assert_eq!(bench.status().invalid_problem, problem);
    // The watch of a reported its end as well.
    for content in [
        Ok(Content::Health(ServiceInstances::default())),
        Err(not_found()),
    ] {
        bench.is_news(health("a"), content);
    }
    assert!(bench.watcher.freshness.contains_key(&health("b")));
    assert!(!bench.watcher.freshness.contains_key(&health("a")));
}

#[tokio::test]
async fn gone_datacenters_are_not_stale() {
    let mut bench = Bench::new(Some("dc1"), 8, 10);
    bench.watcher.settings.api.stale_after = Duration::ZERO;
    for name in ["dc1", "dc2"] {
        bench.is_news(nodes(name), Ok(Content::Nodes(Vec::new())));
        bench.is_news(nodes(name), Err(no_path()));
    }
    for (listed, stale) in [(&["dc1", "dc2"] as &[&str], 2), (&["dc1"], 1), (&[], 1)] {
        let names = listed.iter().map(|&name| name.to_owned()).collect();
        bench.is_news(Topic::Datacenters, Ok(Content::Datacenters(names)));
        assert_eq!(bench.status().stale, stale, "{listed:?}");
    }
}

#[tokio::test]
async fn first_change_times_the_snapshot() {
    let mut bench = Bench::new(Some("dc1"), 8, 10);
    bench.watcher.schedule_snapshot_if(false);
    assert_eq!(bench.watcher.changed_since, None);
    bench.watcher.schedule_snapshot_if(true);
    let since = bench.watcher.changed_since;
    assert!(since.is_some());
    bench.watcher.schedule_snapshot_if(true);
    bench.watcher.schedule_snapshot_if(false);
    assert_eq!(bench.watcher.changed_since, since);
    bench.watcher.publish_snapshot();
    assert_eq!(
        (bench.watcher.changed_since, bench.watcher.views),
        (None, 1)
    );
    assert!(bench.views.has_changed().unwrap());
    assert!(replace(&mut bench.watcher.known.node_name, "n".to_owned()));
    assert!(!replace(&mut bench.watcher.known.node_name, "n".to_owned()));
    assert_eq!(bench.watcher.known.node_name, "n");
}

#[tokio::test]
async fn catalog_expires_with_last_contact() {
    let head = "200 OK\r\nx-consul-knownleader: true\r\nx-consul-lastcontact: 10000";
    let scripted = ScriptedAgent::start(&[(head, "[]")]).await;
    let mut bench = Bench::new(Some("dc1"), 8, 10);
    let api = HttpApi {
        addresses: vec![scripted.address.clone()],
        ..HttpApi::default()
    };
    bench.watcher.agent = Arc::new(Agent::new(&api, Token::new(None), &Arc::default()));
    assert!(bench.watcher.agent.get("/v1/x", None).await.is_ok());
    // The servers had a leader 10 s ago.
    for (max_stale, expired) in [(3600, false), (10, true), (3600, false)] {
        bench.watcher.settings.max_stale = Duration::from_secs(max_stale);
        bench.watcher.tick();
        let status = bench.status();
        assert_eq!(status.expired, expired, "{max_stale}");
        assert!(status.last_contact_seconds.unwrap() >= 10.0);
        assert_eq!((status.connections, status.requests), (1, 1));
    }
}

#[tokio::test]
async fn watch_response_ends_no_fetch() {
    let mut bench = Bench::new(Some("dc1"), 8, 10);
    bench.register("", &["a"]);
    bench.watcher.fetch_next();
    let instances = || Ok(Content::Health(ServiceInstances::default()));
    assert!(bench.is_news(health("a"), instances()));
    assert_eq!(bench.phases(), "a fetching");
    assert_eq!(bench.watcher.fetching, 1);
    assert!(bench.tracked("a").loaded_at.is_some());
    assert!(!bench.update(health("a"), true, instances(), Invalid::default()));
    assert_eq!((&*bench.phases(), bench.watcher.fetching), ("a watched", 0));
}

#[tokio::test]
async fn queried_service_takes_a_free_watch() {
    let mut bench = Bench::new(Some("dc1"), 8, 10);
    bench.register("", &["a", "b"]);
    for service in ["a", "b"] {
        bench.watcher.fetch_next();
        bench.fetched(service);
    }
    assert_eq!(bench.phases(), "a watched, b idle");
    bench.register("", &["b"]);
    bench.watcher.handle_demand(Demand::Queried(key("b")));
    assert_eq!(bench.phases(), "b watched");
}

#[tokio::test]
async fn least_problem_is_shown() {
    let mut bench = Bench::new(Some("dc1"), 8, 10);
    for number in (10..40).rev() {
        let mut invalid = Invalid::default();
        invalid
            .0
            .insert("no port".to_owned(), (1, "web".to_owned()));
        let content = Ok(Content::Nodes(Vec::new()));
        bench.update(nodes(&format!("dc{number}")), false, content, invalid);
    }
    let status = bench.status();
    assert_eq!(status.invalid_entries, 30);
    let least = Some("nodes of dc10: web: no port".to_owned());
    assert_eq!(status.invalid_problem, least);
}

#[tokio::test]
async fn next_snapshot_is_not_earlier() {
    let mut bench = Bench::new(Some("dc1"), 8, 10);
    let begun = Instant::now();
    bench.watcher.publish_snapshot();
    assert!(bench.watcher.next_snapshot >= begun);
    assert_eq!(bench.watcher.status.lock().views, 1);
}

#[tokio::test]
async fn ticks_fetch_some_idle_services() {
    // A tenth of the rate, for half a second, rounded up.
    for (rate, expected) in [(1, 1), (20, 1), (21, 2), (40, 2), (60, 3), (1000, 6)] {
        let mut bench = Bench::new(Some("dc1"), 7, rate);
        let services = ["a", "b", "c", "d", "e", "f"];
        bench.register("", &services);
        for service in services {
            bench.watcher.fetch_next();
            bench.fetched(service);
            bench.tracked(service).loaded_at = Some(seconds_ago(6));
        }
        bench.watcher.tick();
        assert_eq!(bench.queue(), services[..expected], "{rate}");
        assert_eq!(bench.idle(), services[expected..], "{rate}");
    }
}
