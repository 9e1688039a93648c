//! Metrics of the server as a whole: records, reloads, logs, uptime.

use std::time::{Duration, Instant};

use prometheus::{Gauge, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry};

use super::names;
use crate::ops::logs::Logs;

/// Bounds of the time that a reload takes, in seconds: one millisecond to ten seconds.
const RELOAD_BUCKETS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Kinds of files that are read again while the server runs.
const RELOAD_KINDS: &[&str] = &["config", "records", "aliases", "handlers", "certificates"];

/// Counters and gauges that belong to no single room.
#[derive(Clone)]
pub struct WholeMetrics {
    /// Seconds since the start, set before exposition.
    uptime: Gauge,
    /// Version of the records.
    pub records_version: IntGauge,
    /// Seconds since the records were read, set before exposition.
    pub records_age: Gauge,
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
        let kind = &["kind"];
        let metrics = Self {
            uptime: Gauge::new(names::UPTIME_SECONDS, "Seconds since the start.")?,
            records_version: IntGauge::new(names::RECORDS_VERSION, "Version of the records in force.")?,
            records_age: Gauge::new(names::RECORDS_AGE_SECONDS, "Seconds since the records were read.")?,
            records_instances: IntGauge::new(names::RECORDS_INSTANCES, "Instances in the records.")?,
            records_aliases: IntGauge::new(names::RECORDS_ALIASES, "Aliases of files and records.")?,
            reloads: IntCounterVec::new(Opts::new(names::RELOADS_TOTAL, "Files read anew."), kind)?,
            reload_failures: IntCounterVec::new(
                Opts::new(
                    names::RELOAD_FAILURES_TOTAL,
                    "Files that could not be used; the last good state stays.",
                ),
                kind,
            )?,
            reload_duration: HistogramVec::new(
                HistogramOpts::new(
                    names::RELOAD_DURATION_SECONDS,
                    "From noticing a file to answering from it in userspace.",
                )
                .buckets(RELOAD_BUCKETS.to_vec()),
                kind,
            )?,
            log_lines_lost: IntCounter::new(
                names::LOG_LINES_LOST_TOTAL,
                "Log lines lost because nobody read the log.",
            )?,
        };
        for kind in RELOAD_KINDS {
            metrics.reloads.with_label_values(&[kind]);
            metrics.reload_failures.with_label_values(&[kind]);
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

    /// Counts a file of `kind` (one of [`RELOAD_KINDS`]) that was put in force, and how long it took.
    pub fn reloaded(&self, kind: &str, took: Duration) {
        self.reloads.with_label_values(&[kind]).inc();
        self.reload_duration.with_label_values(&[kind]).observe(took.as_secs_f64());
    }

    /// Counts a file of `kind` that could not be used.
    pub fn reload_failed(&self, kind: &str) {
        self.reload_failures.with_label_values(&[kind]).inc();
    }

    /// Brings up to date what is read rather than kept.
    pub fn refresh(&self, started: Instant, records_read: Option<Instant>, logs: Option<&Logs>) {
        self.uptime.set(started.elapsed().as_secs_f64());
        self.records_age.set(records_read.map_or(0.0, |read| read.elapsed().as_secs_f64()));
        if let Some(logs) = logs {
            let new = logs.dropped().saturating_sub(self.log_lines_lost.get());
            self.log_lines_lost.inc_by(new);
        }
    }
}
