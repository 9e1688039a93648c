//! Sends requests, once or repeatedly as blocking queries, and parses the responses.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::mpsc,
    time::{Instant, sleep},
};

use crate::{
    agent::{Agent, AgentError, Reply},
    api::{self, Invalid},
    cursor::{Cursor, Worth},
    pace::Backoff,
    topic::Topic,
};
use dns_consul::catalog::{
    Place,
    live::{Coordinate, ServiceInstances},
    registrations::{Gateway, Node, PreparedQuery},
};

/// Poll interval of topics that cannot be watched.
const POLL: Duration = Duration::from_secs(30);
/// Minimum pause of a watch after a change, and first pause after an unchanged response.
const PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) enum Content {
    Agent(api::Myself),
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
    /// Parses the response for a topic.
    fn read(topic: &Topic, body: &[u8], invalid: &mut Invalid) -> serde_json::Result<Self> {
        Ok(match topic {
            Topic::Agent => Self::Agent(api::agent(body)?),
            Topic::Datacenters => Self::Datacenters(api::datacenters(body)?),
            Topic::Nodes(datacenter) => Self::Nodes(api::nodes(body, datacenter, invalid)?),
            Topic::Services(_) => Self::Services(api::services(body, invalid)?),
            Topic::Health { place: Place::Datacenter(_), .. } => {
                Self::Health(api::health(body, None, invalid)?)
            }
            Topic::Health { place: Place::Peer(peer), .. } => {
                Self::Health(api::health(body, Some(peer), invalid)?)
            }
            Topic::Ingress => Self::Ingress(api::ingress(body, invalid)?),
            Topic::Queries(_) => Self::Queries(api::queries(body, invalid)?),
            Topic::Peerings => Self::Peerings(api::peerings(body, invalid)?),
            Topic::NodeCoordinates(_) => Self::NodeCoordinates(api::node_coordinates(body, invalid)?),
            Topic::ServerCoordinates => Self::ServerCoordinates(api::server_coordinates(body, invalid)?),
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
    /// The content or the error.
    pub(crate) told: Result<Content, NotTold>,
    /// Entries dropped from the response.
    pub(crate) invalid: Invalid,
}

/// Reason why a request gave no content.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotTold {
    /// No agent gave a successful response.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// The response is malformed.
    #[error("{0} cannot be read: {1}")]
    Json(&'static str, serde_json::Error),
}

/// Parameters common to all requests.
#[derive(Clone, Debug)]
pub(crate) struct QueryOptions {
    /// The agent's datacenter, which requests need not name.
    pub(crate) own: Option<String>,
    /// Longest wait of a blocking query.
    pub(crate) wait: Duration,
    /// Whether any Consul server may answer, not only the leader.
    pub(crate) stale: bool,
}

impl QueryOptions {
    /// Sends one request, starting at the position of `cursor`.
    async fn ask(&self, agent: &Agent, topic: &Topic, cursor: &Cursor) -> Result<Reply, AgentError> {
        // Randomised, in addition to the agent's own jitter, to spread watches that started
        // together.
        let wait = self.wait.mul_f64(1.0 - fastrand::f64() / 16.0);
        let wait = cursor.index().filter(|_| topic.can_be_watched()).map(|index| (index, wait));
        let path = topic.path(self.own.as_deref(), wait, self.stale);
        agent.get(&path, wait.map(|(_, wait)| wait)).await
    }
}

/// Parses a response. After a malformed one, the next request starts over.
fn read(
    agent: &Agent,
    topic: &Topic,
    cursor: &mut Cursor,
    reply: &Reply,
    invalid: &mut Invalid,
) -> Result<Content, NotTold> {
    if cursor.falls_to(reply.index) {
        agent.count_index_reset();
    }
    if cursor.advance(reply.index, &reply.body) == Worth::Known {
        return Ok(Content::Unchanged);
    }
    Content::read(topic, &reply.body, invalid).map_err(|error| {
        *cursor = Cursor::default();
        let problem = NotTold::Json("an answer of Consul's", error);
        agent.count_unreadable(&problem.to_string());
        problem
    })
}

/// Requests a topic repeatedly until the receiver is dropped.
pub(crate) async fn keep_asking(
    agent: Arc<Agent>,
    topic: Topic,
    mut cursor: Cursor,
    options: QueryOptions,
    updates: mpsc::Sender<Update>,
) {
    let mut backoff = Backoff::default();
    let mut quick = 0;
    let mut turns = agent.turns();
    loop {
        if turns != agent.turns() {
            // Another agent may have a different history.
            turns = agent.turns();
            cursor.reset();
        }
        let begun = Instant::now();
        let mut invalid = Invalid::default();
        let told = match options.ask(&agent, &topic, &cursor).await {
            Ok(reply) => read(&agent, &topic, &mut cursor, &reply, &mut invalid),
            Err(error) => Err(error.into()),
        };
        if told.is_ok() {
            backoff.reset();
        }
        let pause = match &told {
            Err(_) => backoff.next(),
            _ if !topic.can_be_watched() => POLL.mul_f64(0.9 + fastrand::f64() / 5.0),
            // Returned without a change: the earlier, the longer the pause.
            Ok(Content::Unchanged) => {
                quick = if begun.elapsed() < options.wait / 2 { (quick + 1).min(7) } else { 0 };
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

/// Requests a topic once, without blocking.
pub(crate) async fn fetch(
    agent: Arc<Agent>,
    topic: Topic,
    options: QueryOptions,
    updates: mpsc::Sender<Update>,
) {
    let (mut cursor, mut invalid) = (Cursor::default(), Invalid::default());
    let told = match options.ask(&agent, &topic, &cursor).await {
        // The first response is never unchanged.
        Ok(reply) => read(&agent, &topic, &mut cursor, &reply, &mut invalid),
        Err(error) => {
            // The gate delays all requests if no agent responds; this pause covers the failure of
            // this one only.
            sleep(Backoff::default().next()).await;
            Err(error.into())
        }
    };
    // An error means that the follower has ended.
    let _ = updates.send(Update { topic, cursor, once: true, told, invalid }).await;
}
