//! Topics that are requested from Consul; requests, once or repeatedly as blocking queries; their responses.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::mpsc,
    time::{Instant, sleep},
};

use crate::{
    agent::{Agent, AgentError, Backoff},
    api::{self, Invalid},
    progress::Cursor,
};
use dns_consul::catalog::{
    Place,
    live::{Coordinate, ServiceInstances},
    registrations::{Gateway, Node, PreparedQuery},
};
use dns_kit::percent_encoded;

/// A topic that can be requested, and watched if Consul supports blocking queries for it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Topic {
    /// Datacenter and node of the agent itself.
    Agent,
    Datacenters,
    /// Nodes of a datacenter.
    Nodes(String),
    /// Names and tags of the services of a datacenter.
    Services(String),
    /// Instances of a service and their checks.
    Health {
        place: Place,
        service: String,
    },
    /// Ingress gateways and the services bound to them.
    Ingress,
    /// Prepared queries stored in a datacenter.
    Queries(String),
    /// Peers and the services that each exports to us.
    Peerings,
    /// Network coordinates of the nodes of a datacenter.
    NodeCoordinates(String),
    /// Network coordinates of the servers of all datacenters.
    ServerCoordinates,
}

impl Topic {
    /// Returns whether a blocking query is used. All other topics are polled, including
    /// coordinates, which change constantly.
    pub(crate) fn can_be_watched(&self) -> bool {
        matches!(
            self,
            Self::Nodes(_) | Self::Services(_) | Self::Health { .. } | Self::Ingress
        )
    }

    /// Returns whether it is about the instances of a service.
    pub(crate) fn is_of(&self, (place, service): &(Place, String)) -> bool {
        match self {
            Self::Health {
                place: own,
                service: name,
            } => own == place && name.eq_ignore_ascii_case(service),
            _ => false,
        }
    }

    /// Returns the datacenter that it is about, if it is one.
    pub(crate) fn datacenter(&self) -> Option<&str> {
        match self {
            Self::Nodes(name)
            | Self::Services(name)
            | Self::Queries(name)
            | Self::NodeCoordinates(name) => Some(name),
            Self::Health {
                place: Place::Datacenter(name),
                ..
            } => Some(name),
            _ => None,
        }
    }

    /// Returns the path of the request; `index` holds the index and the maximum wait of a blocking query.
    pub(crate) fn path(&self, options: &QueryOptions, index: Option<(u64, Duration)>) -> String {
        let mut parameters = Vec::new();
        // Always named: the next agent of the list may be in another datacenter, which it would answer for.
        if let Some(datacenter) = self.datacenter() {
            parameters.push(format!("dc={}", percent_encoded(datacenter)));
        }
        if let Self::Health {
            place: Place::Peer(peer),
            ..
        } = self
        {
            parameters.push(format!("peer={}", percent_encoded(peer)));
        }
        if self.can_be_watched() {
            if let Some((index, wait)) = index {
                parameters.push(format!("index={index}"));
                parameters.push(format!("wait={}ms", wait.as_millis()));
            }
            if options.stale {
                parameters.push("stale".to_owned());
            }
        }
        let path = match self {
            Self::Agent => "/v1/agent/self",
            Self::Datacenters => "/v1/catalog/datacenters",
            Self::Nodes(_) => "/v1/catalog/nodes",
            Self::Services(_) => "/v1/catalog/services",
            Self::Health { service, .. } => {
                &format!("/v1/health/service/{}", percent_encoded(service))
            }
            Self::Ingress => "/v1/config/ingress-gateway",
            Self::Queries(_) => "/v1/query",
            Self::Peerings => "/v1/peerings",
            Self::NodeCoordinates(_) => "/v1/coordinate/nodes",
            Self::ServerCoordinates => "/v1/coordinate/datacenters",
        };
        if parameters.is_empty() {
            return path.to_owned();
        }
        format!("{path}?{}", parameters.join("&"))
    }
}

impl fmt::Display for Topic {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Agent => out.write_str("the agent"),
            Self::Datacenters => out.write_str("datacenters"),
            Self::Nodes(datacenter) => write!(out, "nodes of {datacenter}"),
            Self::Services(datacenter) => write!(out, "services of {datacenter}"),
            Self::Health {
                place: Place::Datacenter(name),
                service,
            } => {
                write!(out, "service {service} of {name}")
            }
            Self::Health {
                place: Place::Peer(name),
                service,
            } => {
                write!(out, "service {service} of the peer {name}")
            }
            Self::Ingress => out.write_str("ingress gateways"),
            Self::Queries(datacenter) => write!(out, "prepared queries of {datacenter}"),
            Self::Peerings => out.write_str("peers"),
            Self::NodeCoordinates(datacenter) => {
                write!(out, "coordinates of the nodes of {datacenter}")
            }
            Self::ServerCoordinates => out.write_str("coordinates of servers"),
        }
    }
}

//----------- Requests -------------------------------------------------------

/// Poll interval of topics that cannot be watched.
const POLL: Duration = Duration::from_secs(30);
/// Minimum pause of a watch after a change, and first pause after an unchanged response.
const PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) enum Content {
    Agent(api::AgentInfo),
    Datacenters(Vec<String>),
    Nodes(Vec<Arc<Node>>),
    Services(BTreeMap<String, Vec<String>>),
    Health(ServiceInstances),
    Ingress(Vec<Gateway>),
    Queries(Vec<PreparedQuery>),
    Peerings(BTreeMap<String, Vec<String>>),
    NodeCoordinates(HashMap<String, Coordinate>),
    ServerCoordinates(BTreeMap<String, Vec<Coordinate>>),
    /// The same content as in the previous response.
    Unchanged,
}

impl Content {
    fn read(topic: &Topic, body: &[u8], invalid: &mut Invalid) -> serde_json::Result<Self> {
        Ok(match topic {
            Topic::Agent => Self::Agent(api::agent(body)?),
            Topic::Datacenters => Self::Datacenters(serde_json::from_slice(body)?),
            Topic::Nodes(datacenter) => Self::Nodes(api::nodes(body, datacenter, invalid)?),
            Topic::Services(_) => Self::Services(api::services(body, invalid)?),
            Topic::Health {
                place: Place::Datacenter(_),
                ..
            } => Self::Health(api::health(body, None, invalid)?),
            Topic::Health {
                place: Place::Peer(peer),
                ..
            } => Self::Health(api::health(body, Some(peer), invalid)?),
            Topic::Ingress => Self::Ingress(api::ingress(body, invalid)?),
            Topic::Queries(_) => Self::Queries(api::queries(body, invalid)?),
            Topic::Peerings => Self::Peerings(api::peerings(body, invalid)?),
            Topic::NodeCoordinates(_) => {
                Self::NodeCoordinates(api::node_coordinates(body, invalid)?)
            }
            Topic::ServerCoordinates => {
                Self::ServerCoordinates(api::server_coordinates(body, invalid)?)
            }
        })
    }
}

#[derive(Debug)]
pub(crate) struct Update {
    pub(crate) topic: Topic,
    /// Position for the next request.
    pub(crate) cursor: Cursor,
    /// Whether it was a single fetch.
    pub(crate) once: bool,
    pub(crate) content: Result<Content, FetchError>,
    /// Entries dropped from the response.
    pub(crate) invalid: Invalid,
}

/// Reason why a request gave no content.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FetchError {
    #[error(transparent)]
    Agent(#[from] AgentError),
    #[error("an answer of Consul's cannot be read: {0}")]
    Json(serde_json::Error),
}

/// Parameters common to all requests.
#[derive(Clone, Debug)]
pub(crate) struct QueryOptions {
    pub(crate) wait: Duration,
    /// Whether any Consul server may answer, not only the leader.
    pub(crate) stale: bool,
}

impl QueryOptions {
    /// Sends one request, starting at the position of `cursor`, and parses the response. After a malformed one,
    /// the next request starts over.
    async fn request(
        &self,
        agent: &Agent,
        topic: &Topic,
        cursor: &mut Cursor,
        invalid: &mut Invalid,
    ) -> Result<Content, FetchError> {
        // Randomised, in addition to the agent's own jitter, to spread watches that started together.
        let wait = self.wait.mul_f64(1.0 - fastrand::f64() / 16.0);
        let wait = match cursor.index() {
            Some(index) if topic.can_be_watched() => Some((index, wait)),
            _ => None,
        };
        let path = topic.path(self, wait);
        let reply = agent.get(&path, wait.map(|(_, wait)| wait)).await?;
        if cursor.falls_to(reply.index) {
            agent.count_index_reset();
        }
        if !cursor.advance(reply.index, &reply.body) {
            return Ok(Content::Unchanged);
        }
        match Content::read(topic, &reply.body, invalid) {
            Ok(content) => Ok(content),
            Err(error) => {
                *cursor = Cursor::default();
                let problem = FetchError::Json(error);
                agent.count_failure(&problem);
                Err(problem)
            }
        }
    }
}

/// Pauses between the requests of a watch.
#[derive(Debug, Default)]
struct Pace {
    backoff: Backoff,
    /// Number of early responses without a change in a row.
    quick: u32,
}

impl Pace {
    /// Returns the pause after a request that took this time and might have waited for `wait`.
    fn after(
        &mut self,
        topic: &Topic,
        content: &Result<Content, FetchError>,
        took: Duration,
        wait: Duration,
    ) -> Duration {
        let Ok(content) = content else {
            return self.backoff.next();
        };
        self.backoff.reset();
        if !topic.can_be_watched() {
            // Spread, so that polls that began together do not stay together.
            return POLL.mul_f64(0.9 + fastrand::f64() / 5.0);
        }
        if !matches!(content, Content::Unchanged) {
            self.quick = 0;
            return PAUSE;
        }
        // Returned without a change: the earlier, the longer the pause.
        self.quick = if took < wait / 2 {
            // At most 128 times the first pause, 6.4 s.
            (self.quick + 1).min(7)
        } else {
            0
        };
        (PAUSE * (1 << self.quick)).mul_f64(0.5 + fastrand::f64() / 2.0)
    }
}

/// Requests a topic repeatedly until the receiver is dropped.
pub(crate) async fn watch_topic(
    agent: Arc<Agent>,
    topic: Topic,
    mut cursor: Cursor,
    options: QueryOptions,
    updates: mpsc::Sender<Update>,
) {
    let mut pace = Pace::default();
    let mut switches = agent.switches();
    loop {
        if switches != agent.switches() {
            // Another agent may have a different history.
            switches = agent.switches();
            cursor.reset();
        }
        let begun = Instant::now();
        let mut invalid = Invalid::default();
        let content = options
            .request(&agent, &topic, &mut cursor, &mut invalid)
            .await;
        if content.is_err() {
            // A blocking query would report the end of the failure only with the next change.
            cursor.reset();
        }
        let pause = pace.after(&topic, &content, begun.elapsed(), options.wait);
        let update = Update {
            topic: topic.clone(),
            cursor,
            once: false,
            content,
            invalid,
        };
        // The channel is bounded: if the watcher is busy, requests wait.
        if updates.send(update).await.is_err() {
            return;
        }
        sleep(pause).await;
    }
}

/// Requests a topic once, without blocking.
pub(crate) async fn fetch(
    agent: Arc<Agent>,
    topic: Topic,
    options: QueryOptions,
    updates: mpsc::Sender<Update>,
) {
    let mut cursor = Cursor::default();
    let mut invalid = Invalid::default();
    // The first response is never unchanged.
    let content = options
        .request(&agent, &topic, &mut cursor, &mut invalid)
        .await;
    if matches!(content, Err(FetchError::Agent(_))) {
        // The gate delays all requests if no agent responds; this pause covers the failure of this one only.
        sleep(Backoff::default().next()).await;
    }
    // An error means that the watcher has ended.
    let _ = updates
        .send(Update {
            topic,
            cursor,
            once: true,
            content,
            invalid,
        })
        .await;
}

#[cfg(test)]
mod tests {
    use dns_consul::config::HttpApi;

    use super::*;
    use crate::{api::Token, tests::ScriptedAgent};

    #[test]
    fn paths_are_complete() {
        let topic = |service: &str| Topic::Health {
            place: Place::Datacenter("dc1".into()),
            service: service.into(),
        };
        let options = |stale| QueryOptions {
            wait: Duration::from_secs(300),
            stale,
        };
        let wait = Some((7, Duration::from_secs(300)));
        assert_eq!(
            topic("a b/c").path(&options(false), None),
            "/v1/health/service/a%20b%2Fc?dc=dc1"
        );
        assert_eq!(
            topic("web").path(&options(true), wait),
            "/v1/health/service/web?dc=dc1&index=7&wait=300000ms&stale"
        );
        assert_eq!(Topic::Agent.path(&options(true), wait), "/v1/agent/self");
        assert_eq!(
            Topic::Queries("dc2".into()).path(&options(true), wait),
            "/v1/query?dc=dc2"
        );
        let imported = Topic::Health {
            place: Place::Peer("east".into()),
            service: "web".into(),
        };
        assert_eq!(
            imported.path(&options(false), wait),
            "/v1/health/service/web?peer=east&index=7&wait=300000ms"
        );
    }

    #[test]
    fn topics_have_names() {
        let health = |place| Topic::Health {
            place,
            service: "Web".to_owned(),
        };
        let [datacenter, peer] = [Place::Datacenter("dc1".into()), Place::Peer("east".into())];
        let dc1 = || "dc1".to_owned();
        for (topic, shown, can_be_watched) in [
            (Topic::Agent, "the agent", false),
            (Topic::Datacenters, "datacenters", false),
            (Topic::Nodes(dc1()), "nodes of dc1", true),
            (Topic::Services(dc1()), "services of dc1", true),
            (health(datacenter.clone()), "service Web of dc1", true),
            (health(peer.clone()), "service Web of the peer east", true),
            (Topic::Ingress, "ingress gateways", true),
            (Topic::Queries(dc1()), "prepared queries of dc1", false),
            (Topic::Peerings, "peers", false),
            (
                Topic::NodeCoordinates(dc1()),
                "coordinates of the nodes of dc1",
                false,
            ),
            (Topic::ServerCoordinates, "coordinates of servers", false),
        ] {
            assert_eq!(
                (topic.to_string().as_str(), topic.can_be_watched()),
                (shown, can_be_watched)
            );
        }
        for (key, expected) in [
            ((datacenter.clone(), "web".to_owned()), true),
            ((datacenter.clone(), "db".to_owned()), false),
            ((peer, "web".to_owned()), false),
        ] {
            assert_eq!(health(datacenter.clone()).is_of(&key), expected);
            assert!(!Topic::Agent.is_of(&key));
        }
        assert_eq!(percent_encoded("aZ09-._~ä/"), "aZ09-._~%C3%A4%2F");
    }

    #[test]
    fn early_answers_without_a_change_slow_a_watch_down() {
        let [nodes, polled] = [Topic::Nodes("dc1".to_owned()), Topic::Agent];
        let wait = Duration::from_secs(30);
        let ms = |milliseconds: u64| Duration::from_millis(milliseconds);
        let mut pace = Pace::default();
        let mut after = |topic: &Topic, content: Result<Content, FetchError>, took: Duration| {
            pace.after(topic, &content, took, wait)
        };
        let unchanged = || Ok(Content::Unchanged);
        for longest in [100, 200, 400, 800, 1600, 3200, 6400, 6400] {
            let pause = after(&nodes, unchanged(), ms(14_999));
            assert!(
                (ms(longest / 2)..=ms(longest)).contains(&pause),
                "{pause:?}"
            );
        }
        let pause = after(&nodes, unchanged(), ms(15_000));
        assert!((ms(25)..=ms(50)).contains(&pause), "{pause:?}");
        after(&nodes, unchanged(), ms(0));
        let changed = || Ok(Content::Nodes(Vec::new()));
        assert_eq!(after(&nodes, changed(), ms(0)), PAUSE);
        let pause = after(&nodes, unchanged(), ms(0));
        assert!((ms(50)..=ms(100)).contains(&pause), "{pause:?}");

        let pause = after(&polled, unchanged(), ms(0));
        assert!((ms(27_000)..=ms(33_000)).contains(&pause), "{pause:?}");
        let failed = || {
            Err(FetchError::Json(
                serde_json::from_str::<u8>("").unwrap_err(),
            ))
        };
        for longest in [1000, 2000, 4000] {
            let pause = after(&nodes, failed(), ms(0));
            assert!(
                (ms(longest / 2)..=ms(longest)).contains(&pause),
                "{pause:?}"
            );
        }
        after(&nodes, changed(), ms(0));
        assert!(after(&nodes, failed(), ms(0)) <= ms(1000));
    }

    #[test]
    fn paths_name_the_datacenter() {
        let options = QueryOptions {
            wait: Duration::from_secs(300),
            stale: true,
        };
        let health = |place| Topic::Health {
            place,
            service: "web".to_owned(),
        };
        let name = |name: &str| name.to_owned();
        let wait = Some((7, Duration::from_millis(1500)));
        for (topic, polled, watched) in [
            (Topic::Agent, "/v1/agent/self", ""),
            (Topic::Datacenters, "/v1/catalog/datacenters", ""),
            (
                Topic::Nodes(name("dc1")),
                "/v1/catalog/nodes?dc=dc1&stale",
                "?dc=dc1&index=7&wait=1500ms&stale",
            ),
            (
                Topic::Nodes(name("d 2")),
                "/v1/catalog/nodes?dc=d%202&stale",
                "?dc=d%202&index=7&wait=1500ms&stale",
            ),
            (
                Topic::Services(name("dc2")),
                "/v1/catalog/services?dc=dc2&stale",
                "?dc=dc2&index=7&wait=1500ms&stale",
            ),
            (
                health(Place::Datacenter("dc2".into())),
                "/v1/health/service/web?dc=dc2&stale",
                "?dc=dc2&index=7&wait=1500ms&stale",
            ),
            (
                health(Place::Peer("dc1".into())),
                "/v1/health/service/web?peer=dc1&stale",
                "?peer=dc1&index=7&wait=1500ms&stale",
            ),
            (
                Topic::Ingress,
                "/v1/config/ingress-gateway?stale",
                "?index=7&wait=1500ms&stale",
            ),
            (Topic::Queries(name("dc2")), "/v1/query?dc=dc2", "?dc=dc2"),
            (Topic::Peerings, "/v1/peerings", ""),
            (
                Topic::NodeCoordinates(name("dc2")),
                "/v1/coordinate/nodes?dc=dc2",
                "?dc=dc2",
            ),
            (Topic::ServerCoordinates, "/v1/coordinate/datacenters", ""),
        ] {
            assert_eq!(topic.path(&options, None), polled);
            let path = topic.path(&options, wait);
            let parameters = path.find('?').map_or("", |at| &path[at..]);
            assert_eq!(parameters, watched, "{path}");
        }
    }

    #[test]
    fn topics_have_own_content() {
        let health = |place| Topic::Health {
            place,
            service: "web".to_owned(),
        };
        let dc2 = || "dc2".to_owned();
        let instance = r#"[{"Node": {"Node": "n"}, "Service": {"Service": "web", "ID": "w"}}]"#;
        let coordinate = r#"{"Node": "N", "Coord": {"Vec": [1], "Height": 2, "Adjustment": 3}}"#;
        let servers = format!(r#"[{{"Datacenter": "DC2", "Coordinates": [{coordinate}]}}]"#);
        for (topic, body, expected) in [
            (
                Topic::Agent,
                r#"{"Config": {"Datacenter": "DC1", "NodeName": "n"}}"#,
                r#"Agent(AgentInfo { datacenter: "dc1", node_name: "n" })"#,
            ),
            (
                Topic::Datacenters,
                r#"["dc1", "DC2"]"#,
                r#"Datacenters(["dc1", "DC2"])"#,
            ),
            (
                Topic::Nodes(dc2()),
                r#"[{"Node": "n", "Datacenter": "DC2"}]"#,
                r#"Nodes([Node { name: "n", id: "", datacenter: "dc2", peer: None, address: "", tagged_addresses: {}, meta: {}, checks: [] }])"#,
            ),
            (
                Topic::Services(dc2()),
                r#"{"web": ["a"]}"#,
                r#"Services({"web": ["a"]})"#,
            ),
            (Topic::Ingress, "[]", "Ingress([])"),
            (Topic::Queries(dc2()), "[]", "Queries([])"),
            (
                Topic::Peerings,
                r#"[{"Name": "east", "StreamStatus": {"ImportedServices": ["web"]}}]"#,
                r#"Peerings({"east": ["web"]})"#,
            ),
            (
                Topic::NodeCoordinates(dc2()),
                &format!("[{coordinate}]"),
                r#"NodeCoordinates({"n": Coordinate { position: [1.0], height: 2.0, adjustment: 3.0 }})"#,
            ),
            (
                Topic::ServerCoordinates,
                &servers,
                r#"ServerCoordinates({"dc2": [Coordinate { position: [1.0], height: 2.0, adjustment: 3.0 }]})"#,
            ),
        ] {
            let content = Content::read(&topic, body.as_bytes(), &mut Invalid::default()).unwrap();
            assert_eq!(format!("{content:?}"), expected);
            assert!(
                Content::read(&topic, b"7", &mut Invalid::default()).is_err(),
                "{topic}"
            );
        }
        for (place, peer) in [
            (Place::Datacenter("dc1".into()), None),
            (Place::Peer("east".into()), Some("east".to_owned())),
        ] {
            let read = Content::read(&health(place), instance.as_bytes(), &mut Invalid::default());
            let Ok(Content::Health(read)) = read else {
                panic!("{read:?}")
            };
            assert_eq!(read.instances[0].peer, peer);
            assert_eq!(read.nodes.len(), usize::from(peer.is_some()));
        }
    }

    /// Returns a client of the agent.
    fn client(agent: &ScriptedAgent) -> Arc<Agent> {
        let api = HttpApi {
            addresses: vec![agent.address.clone()],
            ..HttpApi::default()
        };
        Arc::new(Agent::new(&api, Token::new(None), &Arc::default()))
    }

    fn options() -> QueryOptions {
        QueryOptions {
            wait: Duration::from_secs(32),
            stale: false,
        }
    }

    fn nodes() -> Topic {
        Topic::Nodes("dc1".to_owned())
    }

    const ONE: &str = r#"[{"Node": "n"}]"#;

    #[tokio::test]
    async fn blocking_queries_use_last_index() {
        let scripted = ScriptedAgent::start(&[
            ("200 OK\r\nx-consul-index: 7", ONE),
            ("200 OK\r\nx-consul-index: 9", ONE),
            ("200 OK\r\nx-consul-index: 3", "[]"),
            ("200 OK\r\nx-consul-index: 3", "[]"),
            ("200 OK\r\nx-consul-index: 4", "["),
            ("200 OK\r\nx-consul-index: 4", "[]"),
            ("404 Not Found", ""),
        ])
        .await;
        let agent = client(&scripted);
        let mut cursor = Cursor::default();
        for (index, content, resets, failures) in [
            (None, "Nodes(1)", 0, 0),
            (Some(7), "Unchanged", 0, 0),
            (Some(9), "Nodes(0)", 1, 0),
            // The index fell: another history.
            (None, "Unchanged", 1, 0),
            (
                Some(3),
                "an answer of Consul's cannot be read: EOF while parsing a list at line 1 column 1",
                1,
                1,
            ),
            // An unreadable answer is requested again.
            (None, "Nodes(0)", 1, 1),
            (Some(4), "not found (404)", 1, 2),
        ] {
            let mut invalid = Invalid::default();
            let found = options()
                .request(&agent, &nodes(), &mut cursor, &mut invalid)
                .await;
            let found = match found {
                Ok(Content::Nodes(nodes)) => format!("Nodes({})", nodes.len()),
                Ok(content) => format!("{content:?}"),
                Err(error) => error.to_string(),
            };
            assert!(found.ends_with(content), "{found}");
            let [_, failed, fallen] = agent.counts();
            assert_eq!((failed, fallen), (failures, resets));
            let paths = scripted.take_paths();
            let [path] = &paths[..] else {
                panic!("{paths:?}")
            };
            let Some(index) = index else {
                assert_eq!(path, "/v1/catalog/nodes?dc=dc1");
                continue;
            };
            // Up to a sixteenth shorter, so that watches that began together do not return together.
            let start = format!("/v1/catalog/nodes?dc=dc1&index={index}&wait=");
            let wait = path.strip_prefix(&start);
            let wait: u64 = wait.unwrap().strip_suffix("ms").unwrap().parse().unwrap();
            assert!((30_000..=32_000).contains(&wait), "{wait}");
        }
        // A topic without blocking queries has no index, even if the agent sends one.
        let scripted = ScriptedAgent::start(&[("200 OK\r\nx-consul-index: 7", "[]"); 2]).await;
        let agent = client(&scripted);
        let mut cursor = Cursor::default();
        for _ in 0..2 {
            let invalid = &mut Invalid::default();
            let found = options()
                .request(&agent, &Topic::Datacenters, &mut cursor, invalid)
                .await;
            assert!(found.is_ok());
            assert_eq!(scripted.take_paths(), ["/v1/catalog/datacenters"]);
        }
    }

    #[tokio::test]
    async fn watch_ends_without_listeners() {
        let scripted = ScriptedAgent::start(&[
            ("200 OK\r\nx-consul-index: 7", ONE),
            ("200 OK\r\nx-consul-index: 8", "[]"),
        ])
        .await;
        let agent = client(&scripted);
        let (updates, mut updated) = mpsc::channel(1);
        let watch = watch_topic(
            agent.clone(),
            nodes(),
            Cursor::default(),
            options(),
            updates,
        );
        let watch = tokio::spawn(watch);
        for (index, length) in [(7, 1), (8, 0)] {
            let update = updated.recv().await.unwrap();
            assert_eq!((update.topic, update.once), (nodes(), false));
            assert_eq!(update.cursor.index(), Some(index));
            let Ok(Content::Nodes(nodes)) = update.content else {
                panic!("{:?}", update.content)
            };
            assert_eq!(nodes.len(), length);
        }
        let paths = scripted.take_paths();
        assert_eq!(paths[0], "/v1/catalog/nodes?dc=dc1");
        assert!(
            paths[1].starts_with("/v1/catalog/nodes?dc=dc1&index=7&wait="),
            "{paths:?}"
        );
        watch.abort();

        let unused = ScriptedAgent::start(&[("200 OK", "[]")]).await;
        let (updates, updated) = mpsc::channel(1);
        drop(updated);
        watch_topic(
            client(&unused),
            nodes(),
            Cursor::default(),
            options(),
            updates,
        )
        .await;
        assert_eq!(unused.take_paths().len(), 1);
    }

    #[tokio::test]
    async fn fetch_gives_a_single_update() {
        let scripted = ScriptedAgent::start(&[("200 OK\r\nx-consul-index: 7", ONE)]).await;
        let (updates, mut updated) = mpsc::channel(2);
        fetch(client(&scripted), nodes(), options(), updates).await;
        let update = updated.recv().await.unwrap();
        assert_eq!((update.topic, update.once), (nodes(), true));
        assert_eq!(update.cursor.index(), Some(7));
        assert!(matches!(update.content, Ok(Content::Nodes(_))));
        assert!(updated.recv().await.is_none());
        assert_eq!(scripted.take_paths(), ["/v1/catalog/nodes?dc=dc1"]);
    }
}
