//! Metrics of the health checks.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use dns_core::resolve::HealthState;
use dns_kit::{metrics::families, tls::TlsMaterial};
use parking_lot::Mutex;
use prometheus::{Histogram, IntCounterVec, IntGauge, IntGaugeVec, Registry};

use super::{check::CheckError, states::HealthStates};

/// Histogram bounds of the duration of a check, in seconds.
const DURATIONS: [f64; 12] = [
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
];

/// Metrics of the watcher; cheap to clone.
#[derive(Clone, Debug)]
pub struct HealthMetrics {
    checks: IntCounterVec,
    /// Durations of checks in seconds.
    seconds: Histogram,
    pub(super) in_flight: IntGauge,
    pub(super) tracked_names: IntGauge,
    instances: IntGaugeVec,
    /// 1 while no instance can be checked.
    pub(super) blind: IntGauge,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CheckResult {
    Running,
    Failing,
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
        let Self {
            checks,
            seconds,
            in_flight,
            tracked_names,
            instances,
            blind,
        } = self;
        registry.register(Box::new(checks.clone()))?;
        registry.register(Box::new(seconds.clone()))?;
        registry.register(Box::new(in_flight.clone()))?;
        registry.register(Box::new(tracked_names.clone()))?;
        registry.register(Box::new(instances.clone()))?;
        registry.register(Box::new(blind.clone()))
    }

    /// Returns the number of completed checks, regardless of their result.
    pub fn checks(&self) -> u64 {
        CheckResult::LABELS
            .iter()
            .map(|label| self.checks.with_label_values(&[*label]).get())
            .sum()
    }

    pub(super) fn observe(&self, result: CheckResult, took: Duration) {
        self.checks.with_label_values(&[result.label()]).inc();
        self.seconds.observe(took.as_secs_f64());
    }

    pub(super) fn count_instances(&self, states: &Arc<HealthStates>) {
        for (state, count) in ["running", "failing", "unknown", "unchecked"]
            .iter()
            .zip(states.counts())
        {
            self.instances
                .with_label_values(&[*state])
                .set(count as i64);
        }
    }
}

impl CheckResult {
    /// Labels in the order of the variants.
    const LABELS: [&str; 8] = [
        "running",
        "failing",
        "other",
        "unreachable",
        "tls",
        "status",
        "malformed",
        "timeout",
    ];

    pub(super) fn of(state: HealthState) -> Self {
        match state {
            HealthState::Running => Self::Running,
            HealthState::Failing => Self::Failing,
            HealthState::Unknown | HealthState::Unchecked => Self::Other,
        }
    }

    fn label(self) -> &'static str {
        Self::LABELS[self as usize]
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

/// Results of the latest check of each instance.
#[derive(Debug, Default)]
pub(super) struct CheckFailures(Mutex<Latest>);

#[derive(Debug, Default)]
struct Latest {
    last: HashMap<IpAddr, CheckResult>,
    /// Error of the latest failed handshake.
    tls_error: String,
}

impl CheckFailures {
    pub(super) fn record(&self, ip: IpAddr, result: CheckResult) {
        self.0.lock().last.insert(ip, result);
    }

    pub(super) fn record_tls_error(&self, error: &std::io::Error) {
        self.0.lock().tls_error = error.to_string();
    }

    pub(super) fn forget(&self, ip: IpAddr) {
        self.0.lock().last.remove(&ip);
    }

    /// Returns why no instance can be checked with these certificates; `None` while some can, or
    /// none is checked.
    pub(super) fn why_no_check_can_work(
        &self,
        tls: &TlsMaterial,
        now: SystemTime,
    ) -> Option<String> {
        if let Some(why) = tls.certificate.invalid_at(now) {
            return Some(format!(
                "the health client's own certificate {why}: instances refuse it; rotate health.certificate_file"
            ));
        }
        if tls
            .authorities
            .iter()
            .all(|authority| authority.invalid_at(now).is_some())
        {
            return Some(
                "no CA of health.ca_file is valid now: no instance is trusted; renew the file"
                    .to_owned(),
            );
        }
        let latest = self.0.lock();
        let refused = latest
            .last
            .values()
            .filter(|result| **result == CheckResult::Tls)
            .count();
        (latest.all_failed() && refused > 0).then(|| {
            format!(
                "none of {} checked instances can be reached, {refused} because of TLS ({}): compare \
                 health.ca_file and health.certificate_file with the CA of the instances",
                latest.last.len(),
                latest.tls_error
            )
        })
    }

    /// Returns that no instance answers; `None` while one does, or none is checked.
    pub(super) fn why_none_answers(&self) -> Option<String> {
        let latest = self.0.lock();
        latest.all_failed().then(|| {
            format!(
                "none of {} checked instances answers its health check: names resolve to all their instances; \
                 is the health server (port `health.port`) of the instances running, and does a firewall pass it?",
                latest.last.len()
            )
        })
    }
}

impl Latest {
    /// Returns whether instances are checked and none answered its latest check.
    fn all_failed(&self) -> bool {
        let is_failure = |result: &CheckResult| {
            matches!(
                result,
                CheckResult::Tls | CheckResult::Unreachable | CheckResult::Timeout
            )
        };
        !self.last.is_empty() && self.last.values().all(is_failure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_answer_ends_the_outage() {
        let failures = CheckFailures::default();
        let [first, second] = [1, 2].map(|last| IpAddr::from([10, 0, 0, last]));
        assert_eq!(failures.why_none_answers(), None);
        failures.record(first, CheckResult::Unreachable);
        failures.record(second, CheckResult::Timeout);
        assert!(
            failures
                .why_none_answers()
                .unwrap()
                .contains("none of 2 checked instances")
        );
        failures.record(first, CheckResult::Failing);
        assert_eq!(failures.why_none_answers(), None);
        failures.forget(first);
        assert!(failures.why_none_answers().is_some());
    }
}
