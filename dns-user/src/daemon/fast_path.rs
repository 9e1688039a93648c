//! Joins the fast path to the other rooms: what is published, what may be, what
//! operators see of it.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use dns_common::tap::TapEvent;
use tokio::{
    task::{JoinError, JoinHandle},
    time,
};
use tracing::{info, warn};

use super::status::Board;
use crate::{
    catalog::Snapshot,
    config::{HookMode, XdpConfig},
    fastpath::{Admission, Everything, FastPath, FastPathError, FastPathStatus, Publisher, TapItem},
    health::{HealthService, Marks},
    name::Name,
    ops::{
        metrics::{FastPathFamilies, FastReplies, Metrics},
        status::{FastPathView, InterfaceView},
        tap::{self, TapLine, TapPath, seconds_since_1970, type_text},
    },
    resolve::Health,
    server::Publish,
};

/// The fast path as the other rooms hold it: empty until the programs are loaded,
/// which takes the kernel's verifier seconds on a small machine. DNS does not wait.
#[derive(Clone, Default)]
pub(super) struct Slot(Arc<SlotInner>);

/// What the clones share.
#[derive(Default)]
struct SlotInner {
    /// Says what is to be answered.
    publisher: OnceLock<Publisher>,
    /// The fast path itself; whoever stops it has to be its only holder.
    fast_path: OnceLock<Weak<FastPath>>,
    /// What the tracker said last, for a publisher that comes later.
    order_counts: AtomicBool,
}

/// Programs that are being loaded.
pub(super) type Loading = JoinHandle<Result<FastPath, FastPathError>>;

impl Slot {
    /// Fills the slot.
    pub(super) fn fill(&self, fast_path: &Arc<FastPath>) {
        // The daemon's loop does so once.
        let _ = self.0.publisher.set(fast_path.publisher());
        Marks::order_counts(&fast_path.publisher(), self.0.order_counts.load(Ordering::SeqCst));
        let _ = self.0.fast_path.set(Arc::downgrade(fast_path));
    }

    /// The fast path of now.
    fn get(&self) -> Option<Arc<FastPath>> {
        self.0.fast_path.get()?.upgrade()
    }

    /// What `status` and `top` show.
    pub(super) fn view(&self) -> Option<FastPathView> {
        self.get().map(|fast_path| view(&fast_path))
    }

    /// Whether interfaces answer a name now.
    pub(super) fn is_published(&self, name: &Name) -> bool {
        self.0.publisher.get().is_some_and(|publisher| publisher.is_published(name))
    }
}

impl Publish for Slot {
    fn install(&self, snapshot: Arc<Snapshot>) {
        if let Some(publisher) = self.0.publisher.get() {
            publisher.install(snapshot);
        }
    }

    fn health_changed(&self, instances: &[IpAddr]) {
        if let Some(publisher) = self.0.publisher.get() {
            publisher.health_changed(instances);
        }
    }

    fn learn(&self, name: &Name) {
        if let Some(publisher) = self.0.publisher.get() {
            publisher.learn(name);
        }
    }
}

impl Marks for Slot {
    fn last_used_ns(&self, name: &Name) -> Option<u64> {
        self.0.publisher.get()?.last_used_ns(name)
    }

    fn forget(&self, names: &[Name]) {
        if let Some(publisher) = self.0.publisher.get() {
            publisher.forget(names);
        }
    }

    fn order_counts(&self, counts: bool) {
        // Kept first: a publisher that comes at this moment is told by one of the two.
        self.0.order_counts.store(counts, Ordering::SeqCst);
        if let Some(publisher) = self.0.publisher.get() {
            Marks::order_counts(publisher, counts);
        }
    }
}

/// Begins to load the programs, off the async threads; `None`, and a line that
/// says so, where none are wanted.
pub(super) fn load(
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
    board.change(|state| state.fast_path_off = Some("its programs are being loaded".to_owned()));
    let admission: Arc<dyn Admission> = match health {
        Some(health) => health.tracker(),
        None => Arc::new(Everything),
    };
    let (config, listen) = (config.clone(), listen.to_vec());
    Some(tokio::task::spawn_blocking(move || FastPath::start(&config, &listen, states, admission)))
}

/// Takes what came of loading; or says plainly why everything is answered from userspace.
pub(super) fn loaded(
    result: Result<Result<FastPath, FastPathError>, JoinError>,
    board: &Board,
) -> Option<Arc<FastPath>> {
    let problem = match result {
        Ok(Ok(fast_path)) => {
            board.change(|state| state.fast_path_off = None);
            return Some(Arc::new(fast_path));
        }
        Ok(Err(problem)) => problem.to_string(),
        // The panic was logged with its place.
        Err(problem) => problem.to_string(),
    };
    warn!("no fast path: {problem}; every query is answered from userspace");
    board.change(|state| state.fast_path_off = Some(problem));
    None
}

/// Gives signs of life until the server ends: the lease runs out without them.
pub(super) fn keep_alive(fast_path: &Arc<FastPath>) -> impl Future<Output = ()> + Send + use<> {
    let interval = fast_path.heartbeat_interval();
    // Whoever stops the fast path has to be its only holder.
    let fast_path = Arc::downgrade(fast_path);
    async move {
        let mut beats = time::interval(interval);
        beats.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        loop {
            beats.tick().await;
            match fast_path.upgrade() {
                Some(fast_path) => fast_path.heartbeat(),
                // Stopped: the server is ending, and this task with it.
                None => std::future::pending().await,
            }
        }
    }
}

/// Feeds live queries of the interfaces to whoever looks.
pub(super) fn feed_tap(fast_path: &Arc<FastPath>) {
    let tap = match fast_path.tap() {
        Some(Ok(tap)) => tap,
        Some(Err(problem)) => {
            warn!("queries answered by interfaces cannot be shown by `tap`: {problem}");
            return;
        }
        None => return,
    };
    let wanted = tap::global().wanted();
    let rate = wanted.clone();
    // Ends by itself where the ring buffer cannot be read; it says so then.
    tokio::spawn(tap.feed(wanted, move |item| match item {
        TapItem::Event(event) => tap::global().publish(line(&event, *rate.borrow())),
        TapItem::Lost(_) => {}
    }));
}

/// Counts the replies of the interfaces with all others, and what is theirs alone.
pub(super) fn count(fast_path: &Arc<FastPath>, metrics: &Metrics) {
    let fast_path = Arc::downgrade(fast_path);
    let families = FastPathFamilies::new(fast_path.clone())
        .and_then(|families| metrics.registry().register(Box::new(families)));
    if let Err(problem) = families {
        warn!("metrics of the fast path: {problem}");
    }
    metrics.count_fast_path(move || {
        let replies = fast_path.upgrade().map(|fast_path| fast_path.counters().replies());
        FastReplies { replies: replies.unwrap_or_default() }
    });
}

/// The fast path for operators.
fn view(fast_path: &FastPath) -> FastPathView {
    let status = fast_path.status();
    let counters = fast_path.counters();
    let detail = serde_json::to_value(&status).unwrap_or_default();
    let FastPathStatus { interfaces, names, lease, pinned_at: _ } = status;
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
        outcomes: counters
            .outcomes()
            .map(|(outcome, count)| (outcome.label().to_owned(), count))
            .collect::<BTreeMap<_, _>>(),
        published: names.published,
        learned: names.learned,
        negative: names.negative,
        unfitting: usize::try_from(unfitting).unwrap_or(usize::MAX),
        map_fill: share(names.published + names.learned, names.max_names),
        memory_fill: share(names.arena.used, names.arena.total),
        lease_seconds: (lease.remaining_ms > 0).then(|| lease.remaining_ms as f64 / 1000.0),
        detail,
    }
}

/// A query that an interface saw, for the tap.
fn line(event: &TapEvent, weight: u32) -> TapLine {
    let address = std::net::Ipv6Addr::from(event.client).to_canonical();
    let length = usize::from(event.name_len).min(event.name.len());
    let name = Name::from_wire(&event.name[..length]);
    let outcome = dns_common::counters::Outcome::ALL.iter().find(|outcome| **outcome as u8 == event.outcome);
    let outcome = outcome.map_or("unknown", |outcome| outcome.label());
    let answered = outcome.starts_with("hit");
    TapLine {
        time: seconds_since_1970(),
        path: TapPath::Fast,
        interface: interface_name(event.ifindex),
        client: SocketAddr::new(address, event.client_port),
        transport: "udp".to_owned(),
        name: name.map_or_else(|_| String::new(), |(name, _)| name.to_string()),
        query_type: type_text(event.query_type),
        outcome: outcome.to_owned(),
        rcode: answered.then(|| crate::ops::metrics::labels::rcode_label(event.rcode).into_owned()),
        answers: event.answers,
        micros: None,
        weight: weight.max(1),
    }
}

/// The name of an interface of now.
fn interface_name(ifindex: u32) -> Option<String> {
    nix::net::if_::if_indextoname(ifindex).ok()?.into_string().ok()
}
