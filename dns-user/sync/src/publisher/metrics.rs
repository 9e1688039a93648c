//! What a publisher counts.

use prometheus::{IntCounter, IntGauge, Registry};

use super::book::{Book, Count};

/// The metrics.
#[derive(Debug)]
pub(super) struct Metrics {
    /// All of them.
    pub(super) registry: Registry,
    /// Messages sent.
    pub(super) sent: IntCounter,
    /// Their bytes.
    pub(super) sent_bytes: IntCounter,
    /// Exceptions that agents replied.
    pub(super) exceptions: IntCounter,
    /// Length of the newest blob.
    pub(super) blob_bytes: IntGauge,
    /// Whether the inventory in use is the newest.
    pub(super) inventory_good: IntGauge,
    /// The version.
    version: IntGauge,
    /// Agents, and how many of them have it, fail, or say nothing.
    agents: [IntGauge; 4],
}

impl Metrics {
    /// All at zero.
    pub(super) fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let gauge = |name: &str, help: &str| {
            let gauge = IntGauge::new(format!("bosh_dns_sync_{name}"), help)?;
            registry.register(Box::new(gauge.clone())).map(|()| gauge)
        };
        let counter = |name: &str, help: &str| {
            let counter = IntCounter::new(format!("bosh_dns_sync_{name}"), help)?;
            registry.register(Box::new(counter.clone())).map(|()| counter)
        };
        Ok(Self {
            sent: counter("messages_total", "Announcements sent")?,
            sent_bytes: counter("message_bytes_total", "Bytes of announcements sent")?,
            exceptions: counter("exceptions_total", "Exceptions that agents replied")?,
            blob_bytes: gauge("blob_bytes", "Length of the newest blob")?,
            inventory_good: gauge("inventory_good", "1 while the inventory in use is the newest")?,
            version: gauge("version", "Version that the fleet should have")?,
            agents: [
                gauge("agents", "Agents of the inventory")?,
                gauge("agents_synced", "Agents that have the version")?,
                gauge("agents_failing", "Agents that lag and said why")?,
                gauge("agents_silent", "Agents that lag and say nothing")?,
            ],
            registry,
        })
    }

    /// Shows the book.
    pub(super) fn set(&self, book: &Book, count: Count) {
        self.version.set(book.version.cast_signed());
        let Count { agents, synced, failing, silent } = count;
        for (gauge, value) in self.agents.iter().zip([agents, synced, failing, silent]) {
            gauge.set(value as i64);
        }
    }
}
