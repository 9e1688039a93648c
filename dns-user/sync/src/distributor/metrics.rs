//! Metrics of the publisher.

use prometheus::{IntCounter, IntGauge, Registry};

use super::{plan::Plan, registry::Count};

#[derive(Debug)]
pub(super) struct Metrics {
    pub(super) registry: Registry,
    pub(super) sent: IntCounter,
    pub(super) sent_bytes: IntCounter,
    exceptions: IntCounter,
    ignored: IntCounter,
    pub(super) blob_bytes: IntGauge,
    pub(super) inventory_good: IntGauge,
    version: IntGauge,
    /// One gauge per field of [`Count`], in its order.
    agents: [IntGauge; 6],
}

impl Metrics {
    /// Registers all families with value zero.
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
            exceptions: counter("exceptions_total", "Exceptions replied by agents")?,
            ignored: counter("ignored_messages_total", "Messages that match no open call")?,
            blob_bytes: gauge("blob_bytes", "Size of the newest blob in bytes")?,
            inventory_good: gauge("inventory_good", "1 while the newest inventory is in use")?,
            version: gauge("version", "Version of the fleet")?,
            agents: [
                gauge("agents", "Agents in the inventory")?,
                gauge("agents_synced", "Agents on the current version")?,
                gauge("agents_unverified", "Agents that report the version without a digest")?,
                gauge("agents_disagreeing", "Agents with a higher version or different records")?,
                gauge("agents_failing", "Lagging agents that reported a reason")?,
                gauge("agents_silent", "Lagging agents that do not answer")?,
            ],
            registry,
        })
    }

    /// Updates the metrics derived from the plan.
    pub(super) fn set(&self, plan: &Plan, count: Count) {
        self.version.set(plan.registry.version.cast_signed());
        self.ignored.inc_by(plan.ignored.saturating_sub(self.ignored.get()));
        self.exceptions.inc_by(plan.exceptions.saturating_sub(self.exceptions.get()));
        let Count { agents, synced, unverified, disagreeing, failing, silent } = count;
        let values = [agents, synced, unverified, disagreeing, failing, silent];
        for (gauge, value) in self.agents.iter().zip(values) {
            gauge.set(value as i64);
        }
    }
}
