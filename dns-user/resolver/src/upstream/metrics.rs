//! Metrics of recursors and caches, read when somebody scrapes: a query costs no
//! more than the counters that the status needs anyway.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use prometheus::{
    Registry,
    core::{Collector, Desc},
    proto::{Bucket, Counter, Gauge, Histogram, Metric, MetricFamily, MetricType},
};

use super::{
    Handlers, Upstream,
    cache::{Cache, CacheCounters},
    forward::Forwarder,
    recursor::{LATENCY_BOUNDS_US, RecursorCounters},
};
use crate::ops::metrics::{labels::labelled, names};

/// The families of this room.
#[derive(Clone)]
pub struct UpstreamMetrics {
    /// The recursors of the configuration.
    upstream: Arc<Upstream>,
    /// The handlers in force.
    handlers: Arc<dyn Fn() -> Arc<Handlers> + Send + Sync>,
    /// Value of the label `server`.
    server: String,
    /// Stands for all families in the registry.
    desc: Desc,
}

impl UpstreamMetrics {
    /// Metrics of `upstream` and of the handlers that are in force at each time.
    pub fn new(
        upstream: Arc<Upstream>,
        handlers: impl Fn() -> Arc<Handlers> + Send + Sync + 'static,
        server: String,
    ) -> prometheus::Result<Self> {
        let name = names::RECURSOR_QUERIES_TOTAL.to_owned();
        let labels = ["recursor", "handler"].map(str::to_owned).to_vec();
        let desc = Desc::new(name, "Queries sent to recursors.".to_owned(), labels, Default::default())?;
        Ok(Self { upstream, handlers: Arc::new(handlers), server, desc })
    }

    /// Makes them part of what is scraped.
    pub fn register(&self, registry: &Registry) -> prometheus::Result<()> {
        registry.register(Box::new(self.clone()))
    }
}

/// Which families there are depends on what is configured; one stands for all.
impl Collector for UpstreamMetrics {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let handlers = (self.handlers)();
        let mut families = Families::default();
        if let Some(cache) = self.upstream.cache() {
            families.add_cache(&self.server, ".", cache);
        }
        for (domain, cache) in handlers.caches() {
            families.add_cache(&self.server, &domain.to_string(), cache);
        }
        if let Some(forwarder) = self.upstream.forwarder() {
            families.add_recursors("", forwarder);
        }
        for (domain, forwarder) in handlers.forwarders() {
            families.add_recursors(&domain.to_string(), forwarder);
        }
        families.0
    }
}

/// Families under way.
#[derive(Default)]
struct Families(Vec<MetricFamily>);

impl Families {
    /// The families of one cache.
    fn add_cache(&mut self, server: &str, zones: &str, cache: &Cache) {
        let CacheCounters { hits, denial_hits, misses, stale_hits, evictions, entries, denial_entries } =
            &*cache.counters;
        let common = [("server", server), ("zones", zones), ("view", "")];
        let of_kind = |kind| [("server", server), ("type", kind), ("view", ""), ("zones", zones)];
        for (kind, entries, hits) in [("success", entries, hits), ("denial", denial_entries, denial_hits)] {
            self.gauge(
                names::COREDNS_CACHE_ENTRIES,
                "Entries in the cache.",
                &of_kind(kind),
                entries.load(Relaxed) as f64,
            );
            self.counter(names::COREDNS_CACHE_HITS_TOTAL, "Answers from the cache.", &of_kind(kind), hits);
        }
        self.counter(
            names::COREDNS_CACHE_MISSES_TOTAL,
            "Queries not answered from the cache.",
            &common,
            misses,
        );
        let requests = [hits, denial_hits, misses].map(|count| count.load(Relaxed)).iter().sum();
        let requests = AtomicU64::new(requests);
        self.counter(names::COREDNS_CACHE_REQUESTS_TOTAL, "Queries put to the cache.", &common, &requests);
        self.counter(
            names::COREDNS_CACHE_SERVED_STALE_TOTAL,
            "Answers given past their time.",
            &common,
            stale_hits,
        );
        self.counter(
            names::COREDNS_CACHE_EVICTIONS_TOTAL,
            "Entries that had to make room.",
            &of_kind("success"),
            evictions,
        );
        self.gauge(
            names::CACHE_BYTES,
            "Bytes of the entries in the cache.",
            &[("zones", zones)],
            cache.bytes() as f64,
        );
    }

    /// The families of the recursors of a list; `handler`: the domain they are
    /// for, empty for those of the configuration.
    fn add_recursors(&mut self, handler: &str, forwarder: &Forwarder) {
        let set = forwarder.set();
        let preferred = set.order.preferred();
        for (index, recursor) in set.recursors.iter().enumerate() {
            let RecursorCounters {
                tries,
                network_errors,
                error_replies,
                given_up,
                mismatched,
                latency_us: _,
                latencies,
                latency_sum_us,
            } = &recursor.counters;
            let labels = [("recursor", recursor.name()), ("handler", handler)];
            let because = |reason| [labels[0], labels[1], ("reason", reason)];
            self.counter(names::RECURSOR_QUERIES_TOTAL, "Queries sent to recursors.", &labels, tries);
            for (reason, count) in
                [("network", network_errors), ("rcode", error_replies), ("given_up", given_up)]
            {
                let help = "Queries to recursors that brought no usable reply.";
                self.counter(names::RECURSOR_FAILURES_TOTAL, help, &because(reason), count);
            }
            let help = "Datagrams that were no reply to any query: late, wrong or forged.";
            self.counter(names::RECURSOR_MISMATCHED_TOTAL, help, &labels, mismatched);
            let help = "1 for the recursor that is asked first.";
            self.gauge(names::RECURSOR_PREFERRED, help, &labels, f64::from(u8::from(index == preferred)));
            self.latencies(&labels, latencies, latency_sum_us);
        }
    }

    /// The histogram of one recursor.
    fn latencies(&mut self, labels: &[(&str, &str)], latencies: &[AtomicU64], sum_us: &AtomicU64) {
        let mut histogram = Histogram::default();
        let mut buckets = Vec::with_capacity(LATENCY_BOUNDS_US.len());
        let mut count = 0;
        for (index, replies) in latencies.iter().enumerate() {
            count += replies.load(Relaxed);
            // The last one has no bound: it is the count of all.
            if let Some(&bound) = LATENCY_BOUNDS_US.get(index) {
                let mut bucket = Bucket::default();
                bucket.set_upper_bound(seconds(bound));
                bucket.set_cumulative_count(count);
                buckets.push(bucket);
            }
        }
        histogram.set_bucket(buckets);
        histogram.set_sample_count(count);
        histogram.set_sample_sum(seconds(sum_us.load(Relaxed)));
        let mut metric = labelled(labels);
        metric.set_histogram(histogram);
        let help = "Time to the replies of recursors.";
        self.push(names::RECURSOR_DURATION_SECONDS, help, MetricType::HISTOGRAM, metric);
    }

    /// Adds a counter.
    fn counter(&mut self, name: &str, help: &str, labels: &[(&str, &str)], count: &AtomicU64) {
        let mut counter = Counter::default();
        counter.set_value(count.load(Relaxed) as f64);
        let mut metric = labelled(labels);
        metric.set_counter(counter);
        self.push(name, help, MetricType::COUNTER, metric);
    }

    /// Adds a gauge.
    fn gauge(&mut self, name: &str, help: &str, labels: &[(&str, &str)], value: f64) {
        let mut gauge = Gauge::default();
        gauge.set_value(value);
        let mut metric = labelled(labels);
        metric.set_gauge(gauge);
        self.push(name, help, MetricType::GAUGE, metric);
    }

    /// Adds a metric to its family.
    fn push(&mut self, name: &str, help: &str, kind: MetricType, metric: Metric) {
        if let Some(family) = self.0.iter_mut().find(|family| family.name() == name) {
            family.mut_metric().push(metric);
            return;
        }
        let mut family = MetricFamily::default();
        family.set_name(name.to_owned());
        family.set_help(help.to_owned());
        family.set_field_type(kind);
        family.set_metric(vec![metric]);
        self.0.push(family);
    }
}

/// Microseconds as seconds.
fn seconds(microseconds: u64) -> f64 {
    microseconds as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_hold_what_was_counted() {
        let mut families = Families::default();
        let labels = [("recursor", "10.0.0.2:53"), ("handler", "")];
        let latencies: [AtomicU64; LATENCY_BOUNDS_US.len() + 1] = Default::default();
        latencies[0].store(2, Relaxed);
        latencies[LATENCY_BOUNDS_US.len()].store(1, Relaxed);
        families.latencies(&labels, &latencies, &AtomicU64::new(3_000_500));
        families.counter("x_total", "X.", &labels, &AtomicU64::new(7));
        families.counter("x_total", "X.", &[("recursor", "b")], &AtomicU64::new(8));
        let text = prometheus::TextEncoder::new().encode_to_string(&families.0).unwrap();
        for line in [
            r#"x_total{handler="",recursor="10.0.0.2:53"} 7"#,
            r#"x_total{recursor="b"} 8"#,
            r#"bosh_dns_xdp_recursor_duration_seconds_bucket{handler="",recursor="10.0.0.2:53",le="0.00025"} 2"#,
            r#"bosh_dns_xdp_recursor_duration_seconds_bucket{handler="",recursor="10.0.0.2:53",le="+Inf"} 3"#,
            r#"bosh_dns_xdp_recursor_duration_seconds_sum{handler="",recursor="10.0.0.2:53"} 3.0005"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}
