//! The families of the fast path, read from its maps when somebody scrapes.

use std::sync::Arc;

use dns_common::counters::Outcome;
use prometheus::{
    core::{Collector, Desc},
    proto::MetricFamily,
};

use super::{
    families::{counts, gauges},
    labels::rcode_label,
    names,
};
use crate::fastpath::{FastPath, FastPathStatus};

/// The fast path of now, if there is one.
type Source = Box<dyn Fn() -> Option<Arc<FastPath>> + Send + Sync>;

/// Collects them. Does not keep the fast path alive.
pub struct FastPathFamilies {
    /// What is read.
    fast_path: Source,
    /// One for the registry's bookkeeping.
    description: Desc,
}

impl FastPathFamilies {
    /// Of this fast path.
    pub fn new(fast_path: Source) -> prometheus::Result<Self> {
        let help = "1 while some interface answers.".to_owned();
        let description = Desc::new(names::FAST_PATH_UP.to_owned(), help, Vec::new(), Default::default())?;
        Ok(Self { fast_path, description })
    }
}

impl Collector for FastPathFamilies {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.description]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        match (self.fast_path)() {
            Some(fast_path) => families(&fast_path),
            None => vec![gauges(names::FAST_PATH_UP, "1 while some interface answers.", [(vec![], 0.0)])],
        }
    }
}

/// All families.
fn families(fast_path: &FastPath) -> Vec<MetricFamily> {
    let (counters, status) = (fast_path.counters(), fast_path.status());
    let FastPathStatus { interfaces, programs, names: table, lease, pinned_at: _ } = status;
    let label = |key: &'static str, value: &str| vec![(key, value.to_owned())];
    let (bytes_in, bytes_out) = counters.bytes();
    let attached = interfaces.interfaces.iter().filter(|interface| interface.hook.is_some()).count();
    let ratio = |part: usize, whole: usize| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
    let up = attached > 0 && lease.remaining_ms > 0;
    vec![
        gauges(names::FAST_PATH_UP, "1 while some interface answers.", [(vec![], f64::from(up))]),
        counts(
            names::FAST_PATH_PACKETS_TOTAL,
            "Packets by what became of them.",
            counters.outcomes().map(|(outcome, count)| (label("outcome", Outcome::label(outcome)), count)),
        ),
        counts(
            names::FAST_PATH_REPLIES_TOTAL,
            "Replies of the interface by type and rcode.",
            counters.replies().into_iter().map(|(query_type, rcode, count)| {
                (vec![("rcode", rcode_label(rcode).into_owned()), ("type", query_type.to_owned())], count)
            }),
        ),
        counts(
            names::FAST_PATH_BYTES_TOTAL,
            "Bytes of DNS messages, of answered queries and their replies.",
            [(label("direction", "in"), bytes_in), (label("direction", "out"), bytes_out)],
        ),
        counts(
            names::FAST_PATH_INTERFACE_REPLIES_TOTAL,
            "Replies by interface.",
            interfaces.interfaces.iter().map(|interface| {
                (label("interface", &interface.name), counters.interface(interface.ifindex))
            }),
        ),
        gauges(
            names::FAST_PATH_INTERFACE_INFO,
            "Hook of each interface; always 1.",
            interfaces.interfaces.iter().map(|interface| {
                let hook = interface.hook.map_or("none", |hook| hook.label());
                (vec![("hook", hook.to_owned()), ("interface", interface.name.clone())], 1.0)
            }),
        ),
        gauges(
            names::FAST_PATH_PROGRAM_INFO,
            "Programs that were needed, and how they fare; always 1.",
            programs.iter().map(|program| {
                let reason = [program.why.as_slice(), &program.verifier].concat().join("\n");
                let state = program.state.label();
                let labels =
                    [("program", program.name.to_string()), ("reason", reason), ("state", state.to_owned())];
                (labels.to_vec(), 1.0)
            }),
        ),
        gauges(
            names::FAST_PATH_PROGRAM_LOAD_SECONDS,
            "Seconds that the kernel took for a program.",
            programs.iter().filter_map(|program| {
                program.load_ms.map(|took| (label("program", &program.name), took / 1000.0))
            }),
        ),
        gauges(
            names::FAST_PATH_PROGRAM_VERIFIED_INSTRUCTIONS,
            "Instructions that the verifier looked at for a program.",
            programs.iter().filter_map(|program| {
                program.instructions.map(|count| (label("program", &program.name), f64::from(count)))
            }),
        ),
        gauges(
            names::FAST_PATH_ENTRIES,
            "Names in the map.",
            [("learned", table.learned), ("negative", table.negative), ("published", table.published)]
                .map(|(kind, count)| (label("kind", kind), count as f64)),
        ),
        gauges(
            names::FAST_PATH_UNFITTING_NAMES,
            "Names of the snapshot that are not in the map; userspace answers them.",
            [(vec![], table.unfitting.total() as f64)],
        ),
        gauges(
            names::FAST_PATH_MAP_FILL_RATIO,
            "Share of the map in use.",
            [(vec![], ratio(table.published + table.learned, table.max_names))],
        ),
        gauges(
            names::FAST_PATH_ARENA_FILL_RATIO,
            "Share of the entries' memory in use.",
            [(vec![], ratio(table.store.used + table.store.quarantined, table.store.total))],
        ),
        gauges(
            names::FAST_PATH_LEASE_SECONDS,
            "Seconds that the lease still has.",
            [(vec![], lease.remaining_ms as f64 / 1000.0)],
        ),
        counts(
            names::FAST_PATH_EVICTIONS_TOTAL,
            "Learned names that had to make room.",
            [(vec![], table.evicted)],
        ),
        counts(names::FAST_PATH_WRITES_TOTAL, "Elements written to the map.", [(vec![], table.written)]),
    ]
}
