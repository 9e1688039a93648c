//! Server-wide metrics: records, reloads, logs, uptime.

use std::time::Duration;

use prometheus::{HistogramVec, IntCounterVec, IntGauge, Registry};

use crate::ops::{readiness::Readiness, service_status::Kind};
use dns_platform::logs::Logs;
use dns_platform::metrics::families;

/// Histogram buckets of the reload duration, in seconds: 1 ms to 10 s.
const RELOAD_BUCKETS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Counters and gauges that belong to no single module.
#[derive(Clone)]
pub struct WholeMetrics {
    /// Version of the records in use.
    pub records_version: IntGauge,
    /// Number of instances in the records.
    pub records_instances: IntGauge,
    /// Number of aliases, from alias files and records.
    pub records_aliases: IntGauge,
    /// Successful reloads, by kind.
    reloads: IntCounterVec,
    /// Failed reloads, by kind.
    reload_failures: IntCounterVec,
    /// Duration of reloads, by kind.
    reload_duration: HistogramVec,
}

impl WholeMetrics {
    /// Creates the metrics with value zero for every kind of reload.
    pub fn new() -> prometheus::Result<Self> {
        let metrics = Self {
            records_version: families::RECORDS_VERSION.gauge()?,
            records_instances: families::RECORDS_INSTANCES.gauge()?,
            records_aliases: families::RECORDS_ALIASES.gauge()?,
            reloads: families::RELOADS_TOTAL.counters()?,
            reload_failures: families::RELOAD_FAILURES_TOTAL.counters()?,
            reload_duration: families::RELOAD_DURATION_SECONDS.histograms(RELOAD_BUCKETS)?,
        };
        for kind in Kind::ALL {
            metrics.reloads.with_label_values(&[kind.label()]);
            metrics.reload_failures.with_label_values(&[kind.label()]);
        }
        Ok(metrics)
    }

    /// Adds the metrics to `registry`.
    pub fn register(&self, registry: &Registry) -> prometheus::Result<()> {
        let Self {
            records_version,
            records_instances,
            records_aliases,
            reloads,
            reload_failures,
            reload_duration,
        } = self;
        registry.register(Box::new(records_version.clone()))?;
        registry.register(Box::new(records_instances.clone()))?;
        registry.register(Box::new(records_aliases.clone()))?;
        registry.register(Box::new(reloads.clone()))?;
        registry.register(Box::new(reload_failures.clone()))?;
        registry.register(Box::new(reload_duration.clone()))
    }

    /// Counts a reload of `kind` and its duration.
    pub(in crate::ops) fn reloaded(&self, kind: Kind, took: Duration) {
        self.reloads.with_label_values(&[kind.label()]).inc();
        self.reload_duration.with_label_values(&[kind.label()]).observe(took.as_secs_f64());
    }

    pub(in crate::ops) fn reload_failed(&self, kind: Kind) {
        self.reload_failures.with_label_values(&[kind.label()]).inc();
    }
}

/// Registers the values computed on each scrape: ages, lost log lines, degradation.
pub fn register(registry: &Registry, logs: Logs, readiness: Readiness) -> prometheus::Result<()> {
    let reload_history = readiness.service_status.reload_history().clone();
    families::UPTIME_SECONDS.scrape(registry, move || {
        let records_age = reload_history.records_age().map_or(0.0, |age| age.as_secs_f64());
        vec![
            families::UPTIME_SECONDS.is(reload_history.started().elapsed().as_secs_f64()),
            families::RECORDS_AGE_SECONDS.is(records_age),
            families::LOG_LINES_LOST_TOTAL.is(logs.dropped()),
            families::FAST_PATH_DEGRADED.is(f64::from(readiness.is_fast_path_degraded())),
        ]
    })
}
