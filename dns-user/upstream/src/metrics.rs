//! Metrics of recursors and caches, collected at scrape time: a query only updates the counters
//! that the status command needs as well.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use prometheus::{
    Registry,
    proto::{Histogram, MetricFamily},
};

use super::{
    CachedSource, CurrentUpstreams,
    admission::AdmissionStatus,
    cache::{Cache, CacheCounters},
    cached, connector,
    forward::Forwarder,
    recursor::{LATENCY_BOUNDS_US, RecursorCounters},
    slots,
    store::Totals,
    tcp, udp,
};
use dns_kit::metrics::{families, histogram, labels};

/// The metric families of this crate.
pub struct UpstreamMetrics {
    /// The recursors and handlers in use.
    pub in_force: Arc<CurrentUpstreams>,
    /// Value of the label `server`.
    pub server: String,
}

/// Limits without a separate family, by resource.
const LIMITS: [(&str, usize); 5] = [
    ("recursor_tcp_connections", tcp::MAX_CONNECTIONS),
    ("recursor_tcp_connection_queries", tcp::MAX_PIPELINED),
    ("http_handler_connections", connector::MAX_CONNECTIONS),
    ("recursor_socket_queries", udp::MAX_IN_FLIGHT),
    ("remembered_failures", cached::MAX_FAILURES),
];

impl UpstreamMetrics {
    /// Registers all families of recursors and caches with `registry`.
    pub fn register(self, registry: &Registry) -> prometheus::Result<()> {
        families::RECURSOR_QUERIES_TOTAL.scrape(registry, move || self.collect())
    }

    /// The registry merges samples of the same family.
    fn collect(&self) -> Vec<MetricFamily> {
        let mut limits = vec![(["outgoing_connections"], slots::max_of_all() as f64)];
        for (resource, limit) in LIMITS {
            limits.push(([resource], limit as f64));
        }
        let mut all = vec![families::LIMIT.of(limits)];
        for (domain, source) in self.in_force.sources() {
            let domain = domain.map(|domain| domain.to_string());
            let handler = domain.as_deref().unwrap_or("");
            // CoreDNS's cache, whose metrics bosh-dns has, labels them by zone.
            let zones = domain.as_deref().unwrap_or(".");
            if let Some(cache) = source.cache() {
                all.extend(of_cache(&self.server, zones, cache));
            }
            if source.waits() {
                all.extend(of_source(handler, &source));
            }
            if let Some(forwarder) = source.forwarder() {
                all.extend(of_recursors(handler, forwarder));
            }
        }
        all
    }
}

fn of_cache(server: &str, zones: &str, cache: &Cache) -> [MetricFamily; 7] {
    let CacheCounters {
        hits,
        denial_hits,
        misses,
        stale_hits,
    } = &cache.counters;
    let [hits, denial_hits, misses, stale_hits] =
        [hits, denial_hits, misses, stale_hits].map(|count| count.load(Relaxed));
    let Totals {
        entries,
        denials,
        bytes,
        evictions,
    } = cache.totals();
    let common = [server, zones, labels::VIEW];
    let success = [server, "success", zones, labels::VIEW];
    let denial = [server, "denial", zones, labels::VIEW];
    [
        families::COREDNS_CACHE_ENTRIES.of([(success, entries as f64), (denial, denials as f64)]),
        families::COREDNS_CACHE_HITS_TOTAL.of([(success, hits), (denial, denial_hits)]),
        families::COREDNS_CACHE_MISSES_TOTAL.of([(common, misses)]),
        families::COREDNS_CACHE_REQUESTS_TOTAL.of([(common, hits + denial_hits + misses)]),
        families::COREDNS_CACHE_SERVED_STALE_TOTAL.of([(common, stale_hits)]),
        families::COREDNS_CACHE_EVICTIONS_TOTAL.of([(success, evictions)]),
        families::CACHE_BYTES.of([([zones], bytes as f64)]),
    ]
}

/// Returns the metric families of the queries waiting for a source. `handler` is its domain, empty
/// for the configured recursors.
fn of_source(handler: &str, source: &CachedSource) -> [MetricFamily; 4] {
    let AdmissionStatus {
        limit,
        waiting,
        refused,
        ..
    } = source.admission();
    [
        families::WAITING_QUERIES.of([([handler], waiting as f64)]),
        families::WAITING_QUERIES_LIMIT.of([([handler], limit as f64)]),
        families::REFUSED_QUERIES_TOTAL.of([([handler], refused)]),
        families::FAILURE_CACHE_HITS_TOTAL.of([([handler], source.failure_hits())]),
    ]
}

/// Returns the metric families of a list of recursors. `handler` is the domain they serve, empty
/// for the configured recursors.
fn of_recursors(handler: &str, forwarder: &Forwarder) -> Vec<MetricFamily> {
    let set = forwarder.set();
    let preferred = set.order.preferred();
    let mut all = Vec::new();
    for (index, recursor) in set.recursors.iter().enumerate() {
        let RecursorCounters {
            failed,
            mismatched,
            latency_us: _,
            latencies,
            latency_sum_us,
        } = &recursor.counters;
        let labels = [&*recursor.name, handler];
        let mut failures = Vec::new();
        for (reason, count) in failed.by_reason() {
            failures.push(([&*recursor.name, handler, reason.label()], count));
        }
        all.extend([
            families::RECURSOR_QUERIES_TOTAL.of([(labels, failed.tries())]),
            families::RECURSOR_FAILURES_TOTAL.of(failures),
            families::RECURSOR_MISMATCHED_TOTAL.of([(labels, mismatched.load(Relaxed))]),
            families::RECURSOR_PREFERRED.of([(labels, f64::from(index == preferred))]),
            families::RECURSOR_DURATION_SECONDS.of([(labels, latency(latencies, latency_sum_us))]),
        ]);
    }
    all
}

fn latency(latencies: &[AtomicU64], sum_us: &AtomicU64) -> Histogram {
    let replies = latencies.iter().map(|replies| replies.load(Relaxed));
    histogram(
        &LATENCY_BOUNDS_US.map(seconds),
        replies,
        seconds(sum_us.load(Relaxed)),
    )
}

fn seconds(microseconds: u64) -> f64 {
    microseconds as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_report_counters() {
        let latencies: [AtomicU64; LATENCY_BOUNDS_US.len() + 1] = Default::default();
        latencies[0].store(2, Relaxed);
        latencies[LATENCY_BOUNDS_US.len()].store(1, Relaxed);
        let latency = latency(&latencies, &AtomicU64::new(3_000_500));
        let all = [
            families::RECURSOR_DURATION_SECONDS.of([(["10.0.0.2:53", ""], latency)]),
            families::RECURSOR_QUERIES_TOTAL.of([(["10.0.0.2:53", ""], 7), (["b", "x."], 8)]),
        ];
        let text = prometheus::TextEncoder::new()
            .encode_to_string(&all)
            .unwrap();
        for line in [
            r#"bosh_dns_xdp_recursor_queries_total{handler="",recursor="10.0.0.2:53"} 7"#,
            r#"bosh_dns_xdp_recursor_queries_total{handler="x.",recursor="b"} 8"#,
            r#"bosh_dns_xdp_recursor_duration_seconds_bucket{handler="",recursor="10.0.0.2:53",le="0.00025"} 2"#,
            r#"bosh_dns_xdp_recursor_duration_seconds_bucket{handler="",recursor="10.0.0.2:53",le="+Inf"} 3"#,
            r#"bosh_dns_xdp_recursor_duration_seconds_sum{handler="",recursor="10.0.0.2:53"} 3.0005"#,
        ] {
            assert!(
                text.lines().any(|found| found == line),
                "{line} is not in\n{text}"
            );
        }
    }

    #[test]
    fn families_of_a_cache_have_its_counts() {
        let cache = crate::tests::counted_cache();
        let text = prometheus::TextEncoder::new()
            .encode_to_string(&of_cache("dns://:53", ".", &cache))
            .unwrap();
        let values: Vec<&str> = text
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| line.rsplit_once(' ').map(|(_, value)| value))
            .collect();
        assert_eq!(
            values,
            ["0", "0", "1", "20", "300", "321", "4000", "0", "0"],
            "{text}"
        );
    }
}
