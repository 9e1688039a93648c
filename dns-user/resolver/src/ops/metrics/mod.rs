//! Metrics: one registry, one exposition.
//!
//! Each room owns its counters (`metrics.rs`, `register`), and exposes by them the families
//! that [`dns_platform::metrics::names`] declares. Replies of the fast path never pass userspace; their counts are
//! read from the BPF maps when somebody scrapes and added to the families that
//! speak of all replies.

pub mod certificates;
pub mod fast_path;
mod fast_path_families;
pub mod http;
mod process;
mod whole;

use std::sync::Arc;

use parking_lot::Mutex;
use prometheus::{Registry, TextEncoder, proto::MetricFamily};

pub use fast_path::FastReplies;
pub use fast_path_families::FastPathFamilies;
pub use whole::WholeMetrics;

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
    /// Called before each exposition: for gauges that are cheaper to read than to keep.
    refreshers: Mutex<Vec<Refresher>>,
    /// Reads the replies of the fast path; `None`: there is none.
    fast_path: Mutex<Option<FastPathSource>>,
    /// Value of the label `server`.
    server: String,
}

/// Brings some gauges up to date.
type Refresher = Box<dyn Fn() + Send + Sync>;

/// Reads what the program has counted.
type FastPathSource = Box<dyn Fn() -> FastReplies + Send + Sync>;

impl Metrics {
    /// An empty registry with the figures of the process itself. `server` is
    /// the value of the label of that name ([`dns_platform::metrics::labels::server_label`]).
    pub fn new(server: String) -> prometheus::Result<Self> {
        let registry = Registry::new();
        process::register(&registry)?;
        Ok(Self {
            shared: Arc::new(Shared {
                registry,
                refreshers: Mutex::new(Vec::new()),
                fast_path: Mutex::new(None),
                server,
            }),
        })
    }

    /// Where a room registers its metrics.
    pub fn registry(&self) -> &Registry {
        &self.shared.registry
    }

    /// Value of the label `server`.
    pub fn server(&self) -> &str {
        &self.shared.server
    }

    /// Calls `refresh` before each exposition.
    pub fn before_exposition(&self, refresh: impl Fn() + Send + Sync + 'static) {
        self.shared.refreshers.lock().push(Box::new(refresh));
    }

    /// Counts the replies that `read` tells of in the families that speak of all replies.
    pub fn count_fast_path(&self, read: impl Fn() -> FastReplies + Send + Sync + 'static) {
        *self.shared.fast_path.lock() = Some(Box::new(read));
    }

    /// All families of the moment, the fast path's replies counted in.
    pub fn gather(&self) -> Vec<MetricFamily> {
        for refresh in &*self.shared.refreshers.lock() {
            refresh();
        }
        let mut families = self.shared.registry.gather();
        if let Some(read) = &*self.shared.fast_path.lock() {
            read().add_to(&mut families, &self.shared.server);
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
    use prometheus::{IntCounter, IntGauge};

    use super::*;

    #[test]
    fn exposition_holds_what_was_registered_and_refreshed() {
        let metrics = Metrics::new("dns://127.0.0.1:53".into()).unwrap();
        let gauge = IntGauge::new("test_gauge", "For the test.").unwrap();
        metrics.registry().register(Box::new(gauge.clone())).unwrap();
        metrics.before_exposition(move || gauge.set(7));
        let text = metrics.text().unwrap();
        assert!(text.contains("\ntest_gauge 7\n"), "{text}");
        assert!(text.contains("process_resident_memory_bytes"), "{text}");
    }

    #[test]
    fn replies_of_the_fast_path_count_among_all() {
        let metrics = Metrics::new("dns://127.0.0.1:53".into()).unwrap();
        let internal = IntCounter::new(names::REQUESTS_INTERNAL_TOTAL, "Internal.").unwrap();
        internal.inc_by(2);
        metrics.registry().register(Box::new(internal)).unwrap();
        metrics.count_fast_path(|| FastReplies { replies: vec![("A", 0, 40), ("AAAA", 0, 1)] });
        let text = metrics.text().unwrap();
        assert!(text.contains("\nboshdns_requests_internal_total 43\n"), "{text}");
        assert!(
            text.contains(
                "coredns_dns_responses_total{plugin=\"xdp\",rcode=\"NOERROR\",server=\"dns://127.0.0.1:53\",\
                 view=\"\",zone=\".\"} 41"
            ),
            "{text}"
        );
        assert!(text.contains("bosh_dns_xdp_replies_total{path=\"fast\"} 41"), "{text}");
        // Adding must not add up from one exposition to the next.
        assert!(metrics.text().unwrap().contains("\nboshdns_requests_internal_total 43\n"));
    }
}
