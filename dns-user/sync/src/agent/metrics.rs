//! Metrics of the agent.

use prometheus::{IntCounter, IntCounterVec, IntGauge, Opts, Registry};

/// Label of a version built from the previous one.
pub(super) const BY_PATCH: &str = "patch";

/// Label of a version downloaded as a whole.
pub(super) const BY_BLOB: &str = "blob";

#[derive(Debug)]
pub(super) struct Metrics {
    pub(super) registry: Registry,
    /// Version of the file.
    pub(super) version: IntGauge,
    /// Applied versions by source: [`BY_PATCH`], [`BY_BLOB`].
    pub(super) taken: IntCounterVec,
    /// Versions that could not be applied.
    pub(super) failed: IntCounter,
    /// Patches that did not apply.
    pub(super) patch_failed: IntCounter,
    /// Announcements of a version lower than the file's.
    pub(super) lower: IntCounter,
}

impl Metrics {
    pub(super) fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let counter = |name: &str, help: &str| {
            let counter = IntCounter::new(format!("bosh_dns_sync_agent_{name}"), help)?;
            registry.register(Box::new(counter.clone())).map(|()| counter)
        };
        let version = IntGauge::new("bosh_dns_sync_agent_version", "Version of records.json")?;
        registry.register(Box::new(version.clone()))?;
        let taken = IntCounterVec::new(
            Opts::new("bosh_dns_sync_agent_versions_total", "Versions installed, by patch or blob"),
            &["by"],
        )?;
        registry.register(Box::new(taken.clone()))?;
        // Expose zero from the start, so that `rate()` sees the first increment.
        for by in [BY_PATCH, BY_BLOB] {
            taken.with_label_values(&[by]);
        }
        Ok(Self {
            version,
            taken,
            failed: counter("failures_total", "Versions that could not be installed")?,
            patch_failed: counter("patch_failures_total", "Patches that could not be applied")?,
            lower: counter("lower_versions_total", "Announcements of lower versions, ignored")?,
            registry,
        })
    }
}
