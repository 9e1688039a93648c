//! Metrics of the server as a whole: records, reloads, logs, uptime.

use std::time::Duration;

use prometheus::{Gauge, HistogramVec, IntCounter, IntCounterVec, IntGauge, Registry};

use crate::ops::journal::{Journal, Kind};
use dns_platform::logs::Logs;
use dns_platform::metrics::families;

/// Bounds of the time that a reload takes, in seconds: one millisecond to ten seconds.
const RELOAD_BUCKETS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Counters and gauges that belong to no single room.
#[derive(Clone)]
pub struct WholeMetrics {
    /// Seconds since the start, set before exposition.
    uptime: Gauge,
    /// Version of the records.
    pub records_version: IntGauge,
    /// Seconds since the records were read, set before exposition.
    records_age: Gauge,
    /// Instances in the records.
    pub records_instances: IntGauge,
    /// Aliases of files and records.
    pub records_aliases: IntGauge,
    /// Reloads that went well, by kind.
    reloads: IntCounterVec,
    /// Reloads that failed, by kind.
    reload_failures: IntCounterVec,
    /// How long reloads took, by kind.
    reload_duration: HistogramVec,
    /// Log lines lost, brought up to date before exposition.
    log_lines_lost: IntCounter,
}

impl WholeMetrics {
    /// Metrics at zero; each kind of reload is there from the start.
    pub fn new() -> prometheus::Result<Self> {
        let metrics = Self {
            uptime: families::UPTIME_SECONDS.float_gauge()?,
            records_version: families::RECORDS_VERSION.gauge()?,
            records_age: families::RECORDS_AGE_SECONDS.float_gauge()?,
            records_instances: families::RECORDS_INSTANCES.gauge()?,
            records_aliases: families::RECORDS_ALIASES.gauge()?,
            reloads: families::RELOADS_TOTAL.counters()?,
            reload_failures: families::RELOAD_FAILURES_TOTAL.counters()?,
            reload_duration: families::RELOAD_DURATION_SECONDS.histograms(RELOAD_BUCKETS)?,
            log_lines_lost: families::LOG_LINES_LOST_TOTAL.counter()?,
        };
        for kind in Kind::ALL {
            metrics.reloads.with_label_values(&[kind.label()]);
            metrics.reload_failures.with_label_values(&[kind.label()]);
        }
        Ok(metrics)
    }

    /// Puts them into the registry.
    pub fn register(&self, registry: &Registry) -> prometheus::Result<()> {
        let Self {
            uptime,
            records_version,
            records_age,
            records_instances,
            records_aliases,
            reloads,
            reload_failures,
            reload_duration,
            log_lines_lost,
        } = self;
        registry.register(Box::new(uptime.clone()))?;
        registry.register(Box::new(records_version.clone()))?;
        registry.register(Box::new(records_age.clone()))?;
        registry.register(Box::new(records_instances.clone()))?;
        registry.register(Box::new(records_aliases.clone()))?;
        registry.register(Box::new(reloads.clone()))?;
        registry.register(Box::new(reload_failures.clone()))?;
        registry.register(Box::new(reload_duration.clone()))?;
        registry.register(Box::new(log_lines_lost.clone()))
    }

    /// Counts a file of `kind` that was put in force, and how long it took.
    pub(in crate::ops) fn reloaded(&self, kind: Kind, took: Duration) {
        self.reloads.with_label_values(&[kind.label()]).inc();
        self.reload_duration.with_label_values(&[kind.label()]).observe(took.as_secs_f64());
    }

    /// Counts a file of `kind` that could not be used.
    pub(in crate::ops) fn reload_failed(&self, kind: Kind) {
        self.reload_failures.with_label_values(&[kind.label()]).inc();
    }

    /// Brings up to date what is read rather than kept.
    pub fn refresh(&self, journal: &Journal, logs: Option<&Logs>) {
        self.uptime.set(journal.started().elapsed().as_secs_f64());
        self.records_age.set(journal.records_age().map_or(0.0, |age| age.as_secs_f64()));
        if let Some(logs) = logs {
            let new = logs.dropped().saturating_sub(self.log_lines_lost.get());
            self.log_lines_lost.inc_by(new);
        }
    }
}
