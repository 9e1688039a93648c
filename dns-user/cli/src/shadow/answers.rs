//! Our answers, from the states that were in use lately.

use std::{
    collections::{HashSet, VecDeque},
    net::{IpAddr, SocketAddr},
    os::unix::net::UnixDatagram,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::health::FollowedHealth;
use dns_core::{
    catalog::Snapshot,
    config::Compat,
    name::Name,
    resolve::explain,
    wire::{Parsed, Transport, parse_by},
};
use dns_fastpath::is_answerable;
use dns_resolver::{
    daemon::shadow::FollowedFleet,
    server::{
        Cookies, Identity,
        metrics::Responder,
        socketless::{Considered, SocketlessServer},
    },
};
use dns_shadow::{
    judge::TRANSITION,
    reference::{Asked, HealthKnowledge, Nature, OurReply, Ours, Reference, Route, Settings},
    watch::thread_cpu,
};

/// Maximum number of states that are kept: five changes per second within the window of [`TRANSITION`], twice.
const MAX_STATES: usize = 100;
/// Number of queries that are kept for the measurement of costs, and how often each is answered.
const MAX_SAMPLES: usize = 64;
const REPETITIONS: u32 = 50;

/// A state with its time.
struct State {
    /// When another one replaced it.
    until: Option<Instant>,
    configured: SocketlessServer,
    compatible: SocketlessServer,
    snapshot: Arc<Snapshot>,
    addresses: HashSet<IpAddr>,
    /// Domains of handlers that the records have, or once had.
    former_handlers: HashSet<Name>,
}

/// The states in use lately, the newest first.
#[derive(Clone, Default)]
pub(super) struct States(Arc<Mutex<VecDeque<State>>>);

impl States {
    /// Adds the fleet's current state.
    pub(super) fn install(&self, fleet: &FollowedFleet, health: &FollowedHealth) {
        let config = &fleet.config;
        let state = fleet.state(health.states());
        let identity = Arc::new(Identity::of_this_host(config.identity));
        // A difference that disappears with all quirks of bosh-dns is one of the documented ones.
        let [configured, compatible] = [config.compat, Compat::REFERENCE].map(|compat: Compat| {
            let cookies = Cookies::new(&config.cookies);
            SocketlessServer::new(state.clone(), identity.clone(), compat, cookies)
        });
        let snapshot = fleet.snapshot();
        let mut addresses = HashSet::new();
        for instance in snapshot.instances() {
            addresses.extend(instance.ip);
        }
        let new = State {
            until: None,
            configured,
            compatible,
            snapshot,
            addresses,
            former_handlers: fleet.former_handlers().clone(),
        };
        let mut states = self.0.lock();
        let now = Instant::now();
        if let Some(last) = states.front_mut() {
            last.until = Some(now);
            // Only the addresses of the current state are asked for.
            last.addresses = HashSet::new();
        }
        states.push_front(new);
        states.truncate(MAX_STATES);
        // Twice the window: a difference is judged again when it has passed.
        states.retain(|state| {
            state
                .until
                .is_none_or(|until| now.duration_since(until) < 4 * TRANSITION)
        });
    }

    /// Returns the number of instances of the current state.
    pub(super) fn instances(&self) -> usize {
        let states = self.0.lock();
        states
            .front()
            .map_or(0, |state| state.snapshot.instances().len())
    }
}

/// The server of this program, without sockets.
pub(super) struct OurServer {
    states: States,
    health: FollowedHealth,
    /// Whether interfaces answer by the configuration.
    has_interfaces: bool,
    /// Queries for the measurement of costs.
    samples: Vec<(Vec<u8>, SocketAddr, Transport)>,
}

impl OurServer {
    pub(super) fn new(states: States, health: FollowedHealth, has_interfaces: bool) -> Self {
        Self {
            states,
            health,
            has_interfaces,
            samples: Vec::new(),
        }
    }

    /// Returns the CPU time of one query, measured with queries that were seen, and how.
    pub(super) fn cost(&self) -> Option<(Duration, String)> {
        if self.samples.is_empty() {
            return None;
        }
        let mut states = self.states.0.lock();
        let state = states.front_mut()?;
        // CPU time, not wall time: the machine serves others meanwhile.
        let before = thread_cpu();
        for _ in 0..REPETITIONS {
            for (query, client, transport) in &self.samples {
                state.configured.consider(query, *client, *transport);
            }
        }
        let answering = thread_cpu().saturating_sub(before);
        let count = REPETITIONS * u32::try_from(self.samples.len()).ok()?;
        let transfer = cost_of_transfer().ok()?;
        let method = format!(
            "{} queries that were seen, answered {REPETITIONS} times each by this program ({:.1} us), and a datagram \
             received and sent on a pair of sockets ({:.1} us); interfaces need less",
            self.samples.len(),
            (answering / count).as_secs_f64() * 1e6,
            transfer.as_secs_f64() * 1e6,
        );
        Some((answering / count + transfer, method))
    }
}

/// Measures the CPU time of receiving and sending a datagram on this machine, by a pair of sockets without an address.
fn cost_of_transfer() -> std::io::Result<Duration> {
    const ROUNDS: u32 = 2000;
    let (here, there) = UnixDatagram::pair()?;
    let mut buffer = [0; 512];
    let before = thread_cpu();
    for _ in 0..ROUNDS {
        here.send(&buffer[..100])?;
        there.recv(&mut buffer)?;
    }
    Ok(thread_cpu().saturating_sub(before) / ROUNDS)
}

impl Reference for OurServer {
    fn states(&self, since: Instant) -> usize {
        let states = self.states.0.lock();
        states
            .iter()
            .position(|state: &State| state.until.is_some_and(|until| until < since))
            .unwrap_or(states.len())
    }

    fn answer(&mut self, asked: &Asked<'_>, settings: Settings, state: usize) -> Ours {
        // Each query is answered once more with compatible settings, and must not count twice.
        if self.samples.len() < MAX_SAMPLES && settings == Settings::Configured {
            let sample = (asked.query.to_vec(), asked.client, asked.transport);
            self.samples.push(sample);
        }
        let mut states = self.states.0.lock();
        // States only become fewer by the passing of time: then the current one is meant.
        let state = if state < states.len() { state } else { 0 };
        let Some(state) = states.get_mut(state) else {
            return silence(Err("nothing loaded"));
        };
        let server = match settings {
            Settings::Configured => &mut state.configured,
            Settings::Compatible => &mut state.compatible,
        };
        let considered = server.consider(asked.query, asked.client, asked.transport);
        drop(states);
        let Some(Considered {
            reply,
            responder,
            resolution,
        }) = considered
        else {
            return silence(self.by_interface(asked, Route::NoSource, &OurReply::Silence));
        };

        let mut health = HealthKnowledge::Settled;
        let mut instances = Vec::new();
        if let (Some(resolution), Some(name)) = (resolution, name_of(asked)) {
            health = self.health.knowledge(&name, &resolution);
            instances = resolution.checks.instances;
        }
        let (route, reply) = match (responder, reply) {
            (responder, Some(reply)) => (route(responder), OurReply::Message(reply)),
            // A reverse name that the records do not have.
            (Responder::Reverse, None) => (Route::Recursors, OurReply::Elsewhere),
            (responder, None) => (route(responder), OurReply::Elsewhere),
        };
        Ours {
            interface: self.by_interface(asked, route, &reply),
            reply,
            route,
            instances,
            health,
        }
    }

    fn is_of_fleet(&self, address: IpAddr) -> bool {
        let states = self.states.0.lock();
        states
            .front()
            .is_some_and(|state| state.addresses.contains(&address))
    }

    fn steps(&self, name: &Name) -> String {
        let states = self.states.0.lock();
        let Some(state) = states.front() else {
            return String::new();
        };
        explain(&state.snapshot, &*self.health.states(), name).to_string()
    }

    fn nature(&self, name: &Name) -> Nature {
        let states = self.states.0.lock();
        let Some(state) = states.front() else {
            return Nature::default();
        };
        let explained = explain(&state.snapshot, &*self.health.states(), name);
        Nature {
            is_alias: explained.alias.is_some(),
            is_malformed: explained
                .targets
                .iter()
                .any(|target| target.problem.is_some()),
            is_above_ours: state.configured.is_above_ours(name),
            has_other_domain: has_other_domain(&state.snapshot, name),
            is_of_former_handler: state
                .former_handlers
                .iter()
                .any(|domain| name.is_within(domain)),
        }
    }
}

impl OurServer {
    /// Returns whether an interface would have answered; the table of names has room for all of a usual fleet.
    fn by_interface(
        &self,
        asked: &Asked<'_>,
        route: Route,
        reply: &OurReply,
    ) -> Result<(), &'static str> {
        if !self.has_interfaces {
            return Err("interfaces are off (xdp.enabled)");
        }
        // The programs see packets, not streams.
        if asked.transport == Transport::Tcp {
            return Err("TCP");
        }
        let Parsed::Query(query) = parse_by(Transport::Udp, asked.query) else {
            return Err("malformed or unusual message");
        };
        match route {
            Route::Fleet | Route::Reverse | Route::Consul if !is_answerable(&query) => {
                Err("EDNS options, another class or no recursion desired")
            }
            Route::Fleet | Route::Reverse => Ok(()),
            Route::Consul => Err("Consul's names: learned at the first query"),
            Route::Upcheck => Err("up-check"),
            Route::Handler | Route::Recursors if matches!(reply, OurReply::Elsewhere) => {
                Err("forwarded (with cache.enabled, interfaces answer from the second query on)")
            }
            Route::Handler | Route::Recursors | Route::NoSource => Err("refused or denied"),
        }
    }
}

/// Returns whether a further domain is a suffix of the name's text, with which bosh-dns may answer.
fn has_other_domain(snapshot: &Snapshot, name: &Name) -> bool {
    let own = snapshot.local_zone(name);
    let text = name.to_string();
    snapshot
        .domains()
        // As text, because bosh-dns compares domains so: `xbosh` ends with `bosh`.
        .any(|domain| Some(domain) != own && text.ends_with(&domain.to_string()))
}

fn silence(interface: Result<(), &'static str>) -> Ours {
    Ours {
        reply: OurReply::Silence,
        route: Route::NoSource,
        instances: Vec::new(),
        health: HealthKnowledge::Settled,
        interface,
    }
}

fn name_of(asked: &Asked<'_>) -> Option<Name> {
    match parse_by(asked.transport, asked.query) {
        Parsed::Query(query) => Some(query.question.name()),
        Parsed::Reply(_) | Parsed::Drop => None,
    }
}

fn route(responder: Responder) -> Route {
    match responder {
        Responder::Local => Route::Fleet,
        Responder::Recursors => Route::Recursors,
        Responder::Handler => Route::Handler,
        Responder::Consul => Route::Consul,
        Responder::Reverse => Route::Reverse,
        Responder::Upcheck => Route::Upcheck,
        Responder::Chaos | Responder::None => Route::NoSource,
    }
}
