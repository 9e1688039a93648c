//! Status of recursors and caches, for operators.

use std::{borrow::Cow, collections::BTreeMap, net::SocketAddr, sync::atomic::Ordering};

use super::{
    cache::Cache,
    forward::Forwarder,
    recursor::{Recursor, RecursorCounters},
    store::Totals,
};

/// Status of one recursor.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct RecursorStatus {
    /// Address as configured, `host:port`.
    pub address: String,
    /// Current address of a host name; `None` if unknown.
    pub resolved: Option<SocketAddr>,
    /// Whether it is tried first.
    pub preferred: bool,
    /// Number of queries sent to it since the start, including retries.
    pub tries: u64,
    /// Failed tries since the start, by reason; reasons without failures are omitted.
    pub failures: BTreeMap<Cow<'static, str>, u64>,
    /// Number of datagrams that matched no query in flight: late, wrong or forged.
    #[serde(rename = "strays")]
    pub mismatched: u64,
    /// Number of failures among its last 25 tries.
    pub recent_failures: u32,
    /// Number of tries in a row without a reply, up to the latest.
    pub unanswered_tries: u32,
    /// Smoothed response time in milliseconds; `None` before the first reply.
    pub latency_ms: Option<f64>,
    /// Whether queries with EDNS are dropped, so that others are sent without it.
    pub drops_edns: bool,
}

/// Status of a cache.
#[derive(Clone, Copy, Debug, Default, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct CacheStatus {
    /// Number of cached answers.
    pub entries: u64,
    /// Number of entries that deny a name or its data (NXDOMAIN, NODATA).
    pub denials: u64,
    /// Approximate size of the entries in bytes, including overhead.
    pub bytes: u64,
    /// Number of queries answered from it.
    pub hits: u64,
    /// Number of queries not answered from it.
    pub misses: u64,
    /// Number of answers served stale because no recursor was reachable.
    pub served_stale: u64,
    /// Number of answers evicted to make room.
    pub evictions: u64,
}

impl CacheStatus {
    pub(crate) fn of(cache: &Cache) -> Self {
        let Totals { entries, denials, bytes, evictions } = cache.swept_totals();
        let counters = &cache.counters;
        let read = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        Self {
            entries: entries + denials,
            denials,
            bytes,
            hits: read(&counters.hits) + read(&counters.denial_hits),
            misses: read(&counters.misses),
            served_stale: read(&counters.stale_hits),
            evictions,
        }
    }
}

/// Returns the status of a forwarder's recursors in the order in which they are tried.
pub(crate) fn of(forwarder: &Forwarder) -> Vec<RecursorStatus> {
    let set = forwarder.set();
    let preferred = set.order.preferred();
    let status = |index: usize| {
        let recent_failures = set.order.recent_failures(index);
        one(&set.recursors[index], index == preferred, recent_failures)
    };
    set.order.order().map(status).collect()
}

fn one(recursor: &Recursor, preferred: bool, recent_failures: u32) -> RecursorStatus {
    let RecursorCounters { failed, mismatched, latency_us, latencies: _, latency_sum_us: _ } =
        &recursor.counters;
    let latency = latency_us.load(Ordering::Relaxed);
    RecursorStatus {
        address: recursor.name().to_string(),
        resolved: recursor.address(),
        preferred,
        tries: failed.tries(),
        failures: failed
            .by_reason()
            .filter(|(_, count)| *count > 0)
            .map(|(reason, count)| (reason.label().into(), count))
            .collect(),
        mismatched: mismatched.load(Ordering::Relaxed),
        recent_failures,
        unanswered_tries: failed.unanswered(),
        latency_ms: (latency != 0).then_some(latency as f64 / 1000.0),
        drops_edns: recursor.drops_edns(),
    }
}
