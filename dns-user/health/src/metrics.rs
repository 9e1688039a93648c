//! Metrics of the health checks.

use std::{sync::Arc, time::Duration};

use prometheus::{Histogram, IntCounterVec, IntGauge, IntGaugeVec, Registry};

use super::{check::CheckError, states::HealthStates};
use dns_core::resolve::HealthState;
use dns_kit::metrics::families;

/// Histogram bounds of the duration of a check, in seconds.
const DURATIONS: [f64; 12] = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0];

/// Metrics of the watcher; cheap to clone.
#[derive(Clone, Debug)]
pub struct HealthMetrics {
    checks: IntCounterVec,
    /// Durations of checks in seconds.
    seconds: Histogram,
    pub(super) in_flight: IntGauge,
    /// Number of tracked names.
    pub(super) tracked_names: IntGauge,
    instances: IntGaugeVec,
    /// 1 while no instance can be checked.
    pub(super) blind: IntGauge,
}

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CheckResult {
    Running,
    Failing,
    /// An answer with another state.
    Other,
    Unreachable,
    Tls,
    /// Any status except 200.
    Status,
    /// The response is not HTTP, or its body is invalid.
    Malformed,
    /// No answer within the time limit.
    Timeout,
}

impl HealthMetrics {
    /// Creates the metrics, all at zero.
    pub fn new() -> prometheus::Result<Self> {
        Ok(Self {
            checks: families::HEALTH_CHECKS_TOTAL.counters()?,
            seconds: families::HEALTH_CHECK_DURATION_SECONDS.histogram(&DURATIONS)?,
            in_flight: families::HEALTH_CHECKS_IN_FLIGHT.gauge()?,
            tracked_names: families::HEALTH_TRACKED_NAMES.gauge()?,
            instances: families::HEALTH_INSTANCES.gauges()?,
            blind: families::HEALTH_BLIND.gauge()?,
        })
    }

    /// Registers all families of the watcher.
    pub fn register(&self, registry: &Registry) -> prometheus::Result<()> {
        let Self { checks, seconds, in_flight, tracked_names, instances, blind } = self;
        registry.register(Box::new(checks.clone()))?;
        registry.register(Box::new(seconds.clone()))?;
        registry.register(Box::new(in_flight.clone()))?;
        registry.register(Box::new(tracked_names.clone()))?;
        registry.register(Box::new(instances.clone()))?;
        registry.register(Box::new(blind.clone()))
    }

    /// Returns the number of completed checks, regardless of their result.
    pub fn checks(&self) -> u64 {
        CheckResult::ALL.iter().map(|result| self.checks.with_label_values(&[result.label()]).get()).sum()
    }

    pub(super) fn observe(&self, result: CheckResult, took: Duration) {
        self.checks.with_label_values(&[result.label()]).inc();
        self.seconds.observe(took.as_secs_f64());
    }

    /// Updates the gauge of instances.
    pub(super) fn count_instances(&self, states: &Arc<HealthStates>) {
        for (state, count) in ["running", "failing", "unknown", "unchecked"].iter().zip(states.counts()) {
            self.instances.with_label_values(&[*state]).set(count as i64);
        }
    }
}

impl CheckResult {
    const ALL: [Self; 8] = [
        Self::Running,
        Self::Failing,
        Self::Other,
        Self::Unreachable,
        Self::Tls,
        Self::Status,
        Self::Malformed,
        Self::Timeout,
    ];

    /// Returns the result of a check that was answered.
    pub(super) fn of(state: HealthState) -> Self {
        match state {
            HealthState::Running => Self::Running,
            HealthState::Failing => Self::Failing,
            HealthState::Unknown | HealthState::Unchecked => Self::Other,
        }
    }

    /// Returns the value of the label `result`.
    fn label(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Failing => "failing",
            Self::Other => "other",
            Self::Unreachable => "unreachable",
            Self::Tls => "tls",
            Self::Status => "status",
            Self::Malformed => "malformed",
            Self::Timeout => "timeout",
        }
    }
}

impl From<&CheckError> for CheckResult {
    fn from(error: &CheckError) -> Self {
        match error {
            CheckError::Connect(_) => Self::Unreachable,
            CheckError::Tls(_) => Self::Tls,
            CheckError::Status(_) => Self::Status,
            CheckError::Http(_) | CheckError::TooLong | CheckError::Answer(_) => Self::Malformed,
        }
    }
}
