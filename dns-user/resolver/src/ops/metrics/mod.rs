//! Metrics: one registry and its exposition.
//!
//! Each module owns its counters (`metrics.rs`, `register`) and exposes the families declared in
//! [`dns_kit::metrics::names`]. The fast path's replies bypass userspace; their counters are
//! read from the BPF maps on each scrape and added to the families that count all replies. They include the
//! replies of earlier programs of the process, so that no sum falls when the attacher restarts.

pub mod certificates;
pub mod fast_path;
mod fast_path_families;
pub mod http;
mod process;
pub mod whole;

use std::sync::Arc;

use prometheus::{Registry, TextEncoder, proto::MetricFamily};

pub use fast_path::FastReplies;

use dns_common::counters::Outcome;
use dns_fastpath::FastPathHandle;

//----------- Metrics --------------------------------------------------------

/// All metrics of this process. Clones share the registry.
#[derive(Clone)]
pub struct Metrics {
    shared: Arc<Shared>,
}

struct Shared {
    registry: Registry,
    /// The fast path, whose counters are read on each scrape.
    fast_path: FastPathHandle,
    /// Value of the label `server`.
    server: String,
}

impl Metrics {
    /// Creates a registry with the metrics of the process and of the fast path. `server` is the
    /// value of the label of that name ([`dns_kit::metrics::labels::server_label`]).
    pub fn new(server: String, fast_path: FastPathHandle) -> prometheus::Result<Self> {
        let registry = Registry::new();
        process::register(&registry)?;
        fast_path_families::register(&registry, fast_path.clone())?;
        Ok(Self { shared: Arc::new(Shared { registry, fast_path, server }) })
    }

    /// Returns the registry for further collectors.
    pub fn registry(&self) -> &Registry {
        &self.shared.registry
    }

    /// Returns the value of the label `server`.
    pub fn server(&self) -> &str {
        &self.shared.server
    }

    /// Collects all families, including the fast path's replies.
    pub fn gather(&self) -> Vec<MetricFamily> {
        let mut families = self.shared.registry.gather();
        if !self.shared.fast_path.is_empty() {
            let counters = self.shared.fast_path.counters();
            let forwarded = counters.outcome(Outcome::HitForwarded);
            let replies = FastReplies { replies: counters.replies(), forwarded };
            replies.add_to(&mut families, &self.shared.server);
        }
        families
    }

    /// Returns the metrics in text exposition format, version 0.0.4.
    pub fn text(&self) -> prometheus::Result<String> {
        TextEncoder::new().encode_to_string(&self.gather())
    }
}

#[cfg(test)]
mod tests {
    use dns_kit::metrics::names;
    use prometheus::IntCounter;

    use super::*;

    #[test]
    fn exposition_holds_registered_metrics() {
        let metrics = Metrics::new("dns://127.0.0.1:53".into(), FastPathHandle::default()).unwrap();
        let counter = IntCounter::new("test_total", "For the test.").unwrap();
        counter.inc_by(7);
        metrics.registry().register(Box::new(counter)).unwrap();
        let text = metrics.text().unwrap();
        assert!(text.contains("\ntest_total 7\n"), "{text}");
        assert!(text.contains("process_resident_memory_bytes"), "{text}");
        assert!(!text.contains("fast_path"), "{text}");
    }

    #[test]
    fn fast_path_replies_are_included() {
        let metrics = Metrics::new("dns://127.0.0.1:53".into(), FastPathHandle::default()).unwrap();
        let internal = IntCounter::new(names::REQUESTS_INTERNAL_TOTAL, "Internal.").unwrap();
        internal.inc_by(2);
        metrics.registry().register(Box::new(internal)).unwrap();
        let mut families = metrics.gather();
        let replies = FastReplies { replies: vec![("A", 0, 40), ("AAAA", 0, 1)], forwarded: 5 };
        replies.add_to(&mut families, metrics.server());
        let text = TextEncoder::new().encode_to_string(&families).unwrap();
        assert!(text.contains("\nboshdns_requests_internal_total 38\n"), "{text}");
        assert!(text.contains("\nboshdns_requests_external_total 5\n"), "{text}");
        assert!(
            text.contains(
                "coredns_dns_responses_total{plugin=\"xdp\",rcode=\"NOERROR\",server=\"dns://127.0.0.1:53\",\
                 view=\"\",zone=\".\"} 41"
            ),
            "{text}"
        );
        assert!(text.contains("bosh_dns_xdp_replies_total{path=\"fast\"} 41"), "{text}");
        // Repeated gathering does not accumulate the fast path's counts in the registry.
        assert!(metrics.text().unwrap().contains("\nboshdns_requests_internal_total 2\n"));
    }
}
