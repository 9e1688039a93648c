//! Joins the fast path to the other rooms: what is published, what may be, what
//! operators see of it.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

use dns_common::tap::TapEvent;
use tokio::time;
use tracing::{info, warn};

use super::status::Board;
use crate::{
    config::{HookMode, XdpConfig},
    fastpath::{Admission, Everything, FastPath, FastPathError, FastPathStatus, TapItem},
    health::HealthService,
    name::Name,
    ops::{
        metrics::{FastPathFamilies, FastReplies, Metrics},
        status::{FastPathView, InterfaceView},
        tap::{self, TapLine, TapPath, seconds_since_1970, type_text},
    },
    resolve::Health,
};

/// Loads the programs; or says plainly why everything is answered from userspace.
pub(super) fn start(
    config: &XdpConfig,
    listen: &[SocketAddr],
    states: Arc<dyn Health + Send + Sync>,
    health: Option<&HealthService>,
    board: &Board,
) -> Option<Arc<FastPath>> {
    let admission: Arc<dyn Admission> = match health {
        Some(health) => health.tracker(),
        None => Arc::new(Everything),
    };
    let problem = match FastPath::start(config, listen, states, admission) {
        Ok(fast_path) => return Some(Arc::new(fast_path)),
        Err(problem) => problem,
    };
    let reason = match (&problem, config.enabled, config.mode) {
        (FastPathError::Off, false, _) => "xdp.enabled is false".to_owned(),
        (FastPathError::Off, true, HookMode::Off) => "xdp.mode is off".to_owned(),
        _ => problem.to_string(),
    };
    let message = format!("no fast path: {reason}; every query is answered from userspace");
    match problem {
        FastPathError::Off => info!("{message}"),
        _ => warn!("{message}"),
    }
    board.change(|state| state.fast_path_off = Some(reason));
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

/// Counts the replies of the interfaces with all others, and registers the
/// families of the fast path itself.
pub(super) fn count(fast_path: &Arc<FastPath>, metrics: &Metrics) -> prometheus::Result<()> {
    metrics.registry().register(Box::new(FastPathFamilies::new(Arc::downgrade(fast_path))?))?;
    let fast_path = Arc::downgrade(fast_path);
    metrics.count_fast_path(move || {
        let replies = fast_path.upgrade().map(|fast_path| fast_path.counters().replies());
        FastReplies { replies: replies.unwrap_or_default() }
    });
    Ok(())
}

/// What `status` and `top` show.
pub(super) fn view(fast_path: &FastPath) -> FastPathView {
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
