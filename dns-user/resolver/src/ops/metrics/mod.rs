//! Metrics: one registry, one exposition.
//!
//! Each room owns its counters (`metrics.rs`, `register`), and exposes by them the families
//! that [`dns_platform::metrics::names`] declares. Replies of the fast path never pass userspace; their counts are
//! read from the BPF maps when somebody scrapes and added to the families that
//! speak of all replies.

mod certificates;
pub mod fast_path;
mod fast_path_families;
pub mod http;
mod process;
mod whole;

use std::sync::Arc;

use prometheus::{Registry, TextEncoder, proto::MetricFamily};

pub use certificates::CertificateFamilies;
pub use fast_path::FastReplies;
pub use fast_path_families::FastPathFamilies;
pub use whole::{MomentFamilies, WholeMetrics};

use dns_fastpath::Slot;

//----------- Metrics --------------------------------------------------------

/// All metrics of this process; clones share them.
#[derive(Clone)]
pub struct Metrics {
    /// What the clones share.
    shared: Arc<Shared>,
}

/// What all handles have in common.
struct Shared {
    /// Where the rooms register.
    registry: Registry,
    /// Counts replies that userspace never sees.
    fast_path: Slot,
    /// Value of the label `server`.
    server: String,
}

impl Metrics {
    /// A registry with the figures of the process itself and those of the fast path. `server`
    /// is the value of the label of that name ([`dns_platform::metrics::labels::server_label`]).
    pub fn new(server: String, fast_path: Slot) -> prometheus::Result<Self> {
        let registry = Registry::new();
        process::register(&registry)?;
        registry.register(Box::new(FastPathFamilies::new(fast_path.clone())?))?;
        Ok(Self { shared: Arc::new(Shared { registry, fast_path, server }) })
    }

    /// Where a room registers its metrics.
    pub fn registry(&self) -> &Registry {
        &self.shared.registry
    }

    /// Value of the label `server`.
    pub fn server(&self) -> &str {
        &self.shared.server
    }

    /// All families of the moment, the fast path's replies counted in.
    pub fn gather(&self) -> Vec<MetricFamily> {
        let mut families = self.shared.registry.gather();
        if let Some(fast_path) = self.shared.fast_path.get() {
            let replies = FastReplies { replies: fast_path.counters().replies() };
            replies.add_to(&mut families, &self.shared.server);
        }
        families
    }

    /// The text exposition format, version 0.0.4.
    pub fn text(&self) -> prometheus::Result<String> {
        TextEncoder::new().encode_to_string(&self.gather())
    }
}

#[cfg(test)]
mod tests {
    use dns_platform::metrics::names;
    use prometheus::IntCounter;

    use super::*;

    #[test]
    fn exposition_holds_registered_metrics() {
        let metrics = Metrics::new("dns://127.0.0.1:53".into(), Slot::default()).unwrap();
        let counter = IntCounter::new("test_total", "For the test.").unwrap();
        counter.inc_by(7);
        metrics.registry().register(Box::new(counter)).unwrap();
        let text = metrics.text().unwrap();
        assert!(text.contains("\ntest_total 7\n"), "{text}");
        assert!(text.contains("process_resident_memory_bytes"), "{text}");
        assert!(!text.contains("fast_path"), "{text}");
    }

    #[test]
    fn fast_replies_count_among_all() {
        let metrics = Metrics::new("dns://127.0.0.1:53".into(), Slot::default()).unwrap();
        let internal = IntCounter::new(names::REQUESTS_INTERNAL_TOTAL, "Internal.").unwrap();
        internal.inc_by(2);
        metrics.registry().register(Box::new(internal)).unwrap();
        let mut families = metrics.gather();
        let replies = FastReplies { replies: vec![("A", 0, 40), ("AAAA", 0, 1)] };
        replies.add_to(&mut families, metrics.server());
        let text = TextEncoder::new().encode_to_string(&families).unwrap();
        assert!(text.contains("\nboshdns_requests_internal_total 43\n"), "{text}");
        assert!(
            text.contains(
                "coredns_dns_responses_total{plugin=\"xdp\",rcode=\"NOERROR\",server=\"dns://127.0.0.1:53\",\
                 view=\"\",zone=\".\"} 41"
            ),
            "{text}"
        );
        assert!(text.contains("bosh_dns_xdp_replies_total{path=\"fast\"} 41"), "{text}");
        // The registry itself does not add up from one exposition to the next.
        assert!(metrics.text().unwrap().contains("\nboshdns_requests_internal_total 2\n"));
    }
}
