//! Joins the fast path to the other rooms: what is published, what may be, what
//! operators see of it.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use dns_common::{entry::Rules, tap::TapEvent};
use parking_lot::Mutex;
use tokio::task::{JoinError, JoinHandle};
use tracing::{info, warn};

use super::status::Board;
use crate::{
    consul::ConsulNames,
    fleet::{Fleet, PassShares, Publish, State},
    ops::{
        metrics::{FastPathFamilies, FastReplies, Metrics},
        status::{FastPathView, InterfaceView, ProgramView},
        tap::{self, TapLine, TapPath, seconds_since_1970, type_text},
    },
    server::{SHEDDING_ORDER, is_consuls, is_local},
};
use dns_core::{
    config::{HookMode, XdpConfig},
    listing,
    name::{Name, NameRef},
    resolve::{self, Checks, Existence, Health, Resolution},
};
use dns_fastpath::{
    Admission, Everything, FastPath, FastPathError, FastPathStatus, NameSource, ProgramStatus, Publisher,
    TapItem,
};
use dns_health::{FastPathUse, HealthService};

/// The fast path as the other rooms hold it: empty until its maps
/// are made. DNS does not wait.
///
/// An attacher that comes back brings another one; until its programs are attached, both are told
/// of every change.
#[derive(Clone, Default)]
pub(super) struct Slot(Arc<SlotInner>);

/// What the clones share.
#[derive(Default)]
struct SlotInner {
    /// The one of now, if any, then the one before, while its programs may still answer.
    held: ArcSwap<Vec<Held>>,
    /// What the tracker said last, for a publisher that comes later.
    order_counts: AtomicBool,
    /// Names of Consul's; empty: there are none.
    consul: OnceLock<Arc<ConsulNames>>,
    /// Held while the publisher is told what names mean, so that it hears the newest last.
    telling: Mutex<()>,
}

/// A fast path of the slot.
#[derive(Clone)]
struct Held {
    /// Says what is to be answered.
    publisher: Publisher,
    /// The fast path itself; whoever stops it has to be its only holder.
    fast_path: Weak<FastPath>,
}

/// How long to wait before an attacher that is gone is looked for.
pub(super) const ATTACHER_PAUSE: Duration = Duration::from_secs(1);

/// How long to wait before an attacher that gave nothing is asked again.
const REFUSAL_PAUSE: Duration = Duration::from_secs(5);

/// Maps that are being made.
pub(super) type Loading = JoinHandle<Result<FastPath, FastPathError>>;

impl Slot {
    /// Fills the slot. What was there before is told of changes until [`Self::retire`].
    pub(super) fn fill(&self, fast_path: &Arc<FastPath>) {
        let held = Held { publisher: fast_path.publisher(), fast_path: Arc::downgrade(fast_path) };
        let before = self.0.held.load().first().cloned();
        self.0.held.store(Arc::new([Some(held), before].into_iter().flatten().collect()));
        fast_path.publisher().keep_exact_last_used(self.0.order_counts.load(Ordering::SeqCst));
    }

    /// Leaves the fast path of now alone.
    pub(super) fn retire(&self) {
        let first = self.0.held.load().first().cloned();
        self.0.held.store(Arc::new(first.into_iter().collect()));
    }

    /// Publishes these names, too; once.
    pub(super) fn publish_consul(&self, names: Arc<ConsulNames>) {
        // The daemon's start does so once.
        let _ = self.0.consul.set(names);
    }

    /// Consul's names mean something else now.
    pub(super) fn consul_changed(&self, fleet: &Fleet) {
        let Some(names) = self.0.consul.get() else { return };
        let _telling = self.0.telling.lock();
        let answers = Arc::new(PublishedNames { state: fleet.state_full(), consul: Some(names.published()) });
        self.tell(|publisher| publisher.refresh(answers.clone(), &names.domains()));
    }

    /// The fast path of now.
    pub(super) fn get(&self) -> Option<Arc<FastPath>> {
        self.0.held.load().first()?.fast_path.upgrade()
    }

    /// The publisher of now.
    fn publisher(&self) -> Option<Publisher> {
        Some(self.0.held.load().first()?.publisher.clone())
    }

    /// Tells all publishers something.
    fn tell(&self, what: impl Fn(&Publisher)) {
        self.0.held.load().iter().for_each(|held| what(&held.publisher));
    }

    /// What `status` and `top` show.
    pub(super) fn view(&self) -> Option<FastPathView> {
        self.get().map(|fast_path| view(&fast_path))
    }

    /// Whether interfaces answer, and why not if none does.
    pub(super) fn in_words(&self) -> String {
        let Some(fast_path) = self.get() else { return "off".to_owned() };
        let interfaces = fast_path.status().interfaces.interfaces;
        match interfaces.first() {
            _ if interfaces.iter().any(|interface| interface.hook.is_some()) => "on".to_owned(),
            Some(interface) => format!("on no interface: {}: {}", interface.name, interface.why),
            None => "on no interface".to_owned(),
        }
    }

    /// Returns when the interfaces answer by what was installed last; at once where
    /// there is no fast path.
    pub(super) async fn flushed(&self) {
        if let Some(publisher) = self.publisher() {
            publisher.flushed().await;
        }
    }

    /// Whether interfaces answer a name now.
    pub(super) fn is_published(&self, name: &Name) -> bool {
        self.publisher().is_some_and(|publisher| publisher.is_published(name))
    }
}

/// What interfaces may answer of a state: the names that the server's own routing
/// sends to the fleet, and those that it sends to Consul's and that are nothing but addresses
/// there. A handler below a domain of the records has its names.
struct PublishedNames {
    /// The state.
    state: Arc<State>,
    /// Names of Consul's at the same moment.
    consul: Option<crate::consul::Published>,
}

impl NameSource for PublishedNames {
    fn published_names(&self) -> Box<dyn Iterator<Item = Name> + '_> {
        let state = &self.state;
        Box::new(listing::published_names(&state.snapshot).filter(|name| is_local(state, name)))
    }

    fn resolve(&self, health: &dyn Health, name: &Name) -> Option<Resolution> {
        let state = &self.state;
        is_local(state, name).then(|| resolve::resolve(&state.snapshot, health, name)).flatten()
    }

    fn resolve_ruled(&self, health: &dyn Health, name: &Name) -> Option<(Resolution, Option<Rules>)> {
        if let Some(resolution) = self.resolve(health, name) {
            return Some((resolution, None));
        }
        let consul = self.consul.as_ref().filter(|_| is_consuls(&self.state, name))?;
        let (v4, v6, rules) = consul.look_up(name)?;
        let resolution = Resolution { existence: Existence::Found, v4, v6, checks: Checks::default() };
        Some((resolution, Some(rules)))
    }
}

impl Publish for Slot {
    fn install(&self, state: Arc<State>) {
        let _telling = self.0.telling.lock();
        let consul = self.0.consul.get().map(|names| names.published());
        let names = Arc::new(PublishedNames { state, consul });
        self.tell(|publisher| publisher.install(names.clone()));
    }

    fn health_changed(&self, instances: &[IpAddr]) {
        self.tell(|publisher| publisher.health_changed(instances));
    }

    fn learn(&self, name: NameRef<'_>) {
        if let Some(held) = self.0.held.load().first() {
            held.publisher.learn(name);
        }
    }

    fn shed(&self, shares: Option<&PassShares>) {
        self.tell(|publisher| publisher.shed(shares, SHEDDING_ORDER));
    }

    fn went_up(&self) -> Option<u64> {
        self.get().map(|fast_path| fast_path.counters().went_up())
    }
}

impl FastPathUse for Slot {
    fn last_used_ns(&self, name: &Name) -> Option<u64> {
        self.0.held.load().first()?.publisher.last_used_ns(name)
    }

    fn withdraw(&self, names: &[Name]) {
        self.tell(|publisher| publisher.withdraw(names));
    }

    fn order_counts(&self, counts: bool) {
        // Kept first: a publisher that comes at this moment is told by one of the two.
        self.0.order_counts.store(counts, Ordering::SeqCst);
        self.tell(|publisher| publisher.keep_exact_last_used(counts));
    }
}

/// Begins to make the maps, off the async threads; `None`, and a line that
/// says so, where none are wanted.
pub(super) fn load(
    config: &XdpConfig,
    listen: &[SocketAddr],
    states: Arc<dyn Health + Send + Sync>,
    health: Option<&HealthService>,
    board: &Board,
) -> Option<Loading> {
    let loading = load_after(Duration::ZERO, config, listen, states, health, board)?;
    board.change(|state| state.fast_path_off = Some("its programs are being loaded".to_owned()));
    Some(loading)
}

/// The same, after a while.
pub(super) fn load_after(
    pause: Duration,
    config: &XdpConfig,
    listen: &[SocketAddr],
    states: Arc<dyn Health + Send + Sync>,
    health: Option<&HealthService>,
    board: &Board,
) -> Option<Loading> {
    let off = match (config.enabled, config.mode) {
        (false, _) => Some("xdp.enabled is false"),
        (true, HookMode::Off) => Some("xdp.mode is off"),
        (true, _) => None,
    };
    if let Some(reason) = off {
        info!("no fast path: {reason}; every query is answered from userspace");
        board.change(|state| state.fast_path_off = Some(reason.to_owned()));
        return None;
    }
    let admission: Arc<dyn Admission> = match health {
        Some(health) => health.tracker(),
        None => Arc::new(Everything),
    };
    let (config, listen) = (config.clone(), listen.to_vec());
    Some(tokio::spawn(async move {
        tokio::time::sleep(pause).await;
        let started =
            tokio::task::spawn_blocking(move || FastPath::start(&config, &listen, states, admission)).await;
        // Nobody cancels it; the panic was logged with its place.
        started.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()))
    }))
}

/// Why nothing was loaded.
pub(super) struct NotLoaded {
    /// In words.
    pub(super) problem: String,
    /// After which time an attacher may be asked again.
    pub(super) again: Duration,
}

/// Takes what came of loading; or the reason why there is nothing.
pub(super) fn loaded(
    result: Result<Result<FastPath, FastPathError>, JoinError>,
) -> Result<Arc<FastPath>, NotLoaded> {
    match result {
        Ok(Ok(fast_path)) => Ok(Arc::new(fast_path)),
        Ok(Err(problem)) => {
            // It costs the attacher a second of CPU to hear the kernel refuse once more.
            let is_there = !matches!(problem, FastPathError::NoAttacher { .. });
            let again = if is_there { REFUSAL_PAUSE } else { ATTACHER_PAUSE };
            Err(NotLoaded { problem: problem.to_string(), again })
        }
        // The panic was logged with its place.
        Err(problem) => Err(NotLoaded { problem: problem.to_string(), again: REFUSAL_PAUSE }),
    }
}

/// How often the daemon's loop gives a sign of life: often enough for the lease, and
/// for a service manager that waits for one.
pub(super) fn heartbeat_interval(config: &XdpConfig) -> Duration {
    (config.lease / 8).clamp(Duration::from_millis(1), Duration::from_secs(2))
}

/// Feeds live queries of the interfaces to whoever looks: a task, to be ended with the fast path.
pub(super) fn feed_tap(fast_path: &Arc<FastPath>) -> Option<JoinHandle<()>> {
    let tap = fast_path
        .tap()?
        .inspect_err(|problem| warn!("queries answered by interfaces cannot be shown by `tap`: {problem}"))
        .ok()?;
    let wanted = tap::global().wanted();
    let rate = wanted.clone();
    // Ends by itself where the ring buffer cannot be read; it says so then.
    Some(tokio::spawn(tap.feed(wanted, move |item| match item {
        TapItem::Event(event, age) => tap::global().publish(line(&event, age, *rate.borrow())),
        TapItem::Lost(_) => {}
    })))
}

/// Counts the replies of the interfaces with all others, and what is theirs alone.
pub(super) fn count(slot: &Slot, metrics: &Metrics) {
    let families = slot.clone();
    let families = FastPathFamilies::new(Box::new(move || families.get()))
        .and_then(|families| metrics.registry().register(Box::new(families)));
    if let Err(problem) = families {
        warn!("the metrics of the fast path are not exposed: {problem}");
    }
    let slot = slot.clone();
    metrics.count_fast_path(move || {
        let replies = slot.get().map(|fast_path| fast_path.counters().replies());
        FastReplies { replies: replies.unwrap_or_default() }
    });
}

/// The fast path for operators.
fn view(fast_path: &FastPath) -> FastPathView {
    let status = fast_path.status();
    let counters = fast_path.counters();
    let detail = serde_json::to_value(&status).unwrap_or_default();
    let FastPathStatus { interfaces, programs, names, lease, pinned_at: _ } = status;
    let unfitting = serde_json::to_value(names.unfitting).unwrap_or_default();
    let unfitting =
        unfitting.as_object().into_iter().flatten().filter_map(|(_, count)| count.as_u64()).sum::<u64>();
    let share = |part: usize, whole: usize| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
    FastPathView {
        interfaces: interfaces
            .interfaces
            .iter()
            .map(|interface| InterfaceView {
                name: interface.name.clone(),
                hook: interface.hook.map_or("none", |hook| hook.label()).to_owned(),
                why: interface.why.clone(),
                replies: counters.interface(interface.ifindex),
            })
            .collect(),
        programs: programs.into_iter().map(program).collect(),
        outcomes: counters
            .outcomes()
            .map(|(outcome, count)| (outcome.label().to_owned(), count))
            .collect::<BTreeMap<_, _>>(),
        published: names.published,
        learned: names.learned,
        negative: names.negative,
        unfitting: usize::try_from(unfitting).unwrap_or(usize::MAX),
        map_fill: share(names.published + names.learned, names.max_names),
        memory_fill: share(names.store.used, names.store.total),
        lease_seconds: (lease.remaining_ms > 0).then(|| lease.remaining_ms as f64 / 1000.0),
        detail,
    }
}

/// A program for operators.
fn program(status: ProgramStatus) -> ProgramView {
    let ProgramStatus { name, state, instructions, load_ms, why, verifier } = status;
    ProgramView {
        name: name.into_owned(),
        state: state.label().to_owned(),
        instructions,
        load_ms,
        why,
        verifier,
    }
}

/// A query that an interface saw, for the tap.
fn line(event: &TapEvent, age: Duration, weight: u32) -> TapLine {
    let address = std::net::Ipv6Addr::from(event.client).to_canonical();
    let length = usize::from(event.name_len).min(event.name.len());
    let name = Name::from_wire(&event.name[..length]);
    let outcome = dns_common::counters::Outcome::ALL.iter().find(|outcome| **outcome as u8 == event.outcome);
    let outcome = outcome.map_or("unknown", |outcome| outcome.label());
    let answered = outcome.starts_with("hit");
    TapLine {
        time: seconds_since_1970() - age.as_secs_f64(),
        path: TapPath::Fast,
        interface: interface_name(event.ifindex),
        client: SocketAddr::new(address, event.client_port),
        transport: "udp".to_owned(),
        name: name.map_or_else(|_| String::new(), |(name, _)| name.to_string()),
        query_type: type_text(event.query_type),
        outcome: outcome.to_owned(),
        rcode: answered.then(|| dns_platform::metrics::labels::rcode_label(event.rcode).into_owned()),
        answers: event.answers,
        micros: None,
        weight: weight.max(1),
    }
}

/// The name of an interface of now.
fn interface_name(ifindex: u32) -> Option<String> {
    nix::net::if_::if_indextoname(ifindex).ok()?.into_string().ok()
}
