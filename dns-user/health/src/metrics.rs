//! Metrics of the health checks.

use std::{
    collections::HashMap,
    fmt,
    net::IpAddr,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum CheckResult {
    Running,
    Failing,
    Other,
    Unreachable,
    /// The handshake failed, usually because this machine does not accept the instance's certificate.
    Tls,
    /// The instance does not accept the client's certificate.
    Refused,
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

    pub(super) fn count_instances(&self, states: &HealthStates) {
        // In the order of `HealthStates::counts`.
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
    const LABELS: [&str; 9] = [
        "running",
        "failing",
        "other",
        "unreachable",
        "tls",
        "refused",
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
        // There is a label for each variant.
        Self::LABELS[self as usize]
    }
}

impl From<&CheckError> for CheckResult {
    fn from(error: &CheckError) -> Self {
        match error {
            CheckError::Connect(_) => Self::Unreachable,
            CheckError::Tls(_) => Self::Tls,
            CheckError::Refused(_) => Self::Refused,
            CheckError::Status(_) => Self::Status,
            CheckError::Http(_) | CheckError::TooLong | CheckError::Answer(_) => Self::Malformed,
        }
    }
}

//----------- Outages --------------------------------------------------------

/// Why checks tell the state of no instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HealthOutage {
    /// The client's own certificate is not valid now, for the stated reason.
    OwnCertificate(&'static str),
    /// No CA of the client is valid now.
    Authorities,
    /// This machine trusts no instance, or only unreachable ones.
    Untrusted(NoAnswers),
    /// Instances refuse the client's certificate.
    Refused(NoAnswers),
    /// Instances answer, and no answer is a report.
    Unusable(NoAnswers),
    /// No instance answers.
    Silent(NoAnswers),
}

impl HealthOutage {
    /// Returns whether certificates are the cause, on either side.
    pub fn is_of_certificates(&self) -> bool {
        match self {
            Self::OwnCertificate(_) | Self::Authorities | Self::Untrusted(_) | Self::Refused(_) => {
                true
            }
            Self::Unusable(_) | Self::Silent(_) => false,
        }
    }
}

impl fmt::Display for HealthOutage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OwnCertificate(why) => write!(f, "the health client's own certificate {why}"),
            Self::Authorities => f.write_str("no CA of health.ca_file is valid now"),
            Self::Untrusted(answers) => write!(
                f,
                "no checked instance can be reached ({answers} because of TLS: {})",
                answers.error
            ),
            Self::Refused(answers) => write!(
                f,
                "no checked instance accepts this machine's certificate ({answers} refuse it: {})",
                answers.error
            ),
            Self::Unusable(answers) => write!(
                f,
                "no checked instance gives a usable answer ({answers} answer: {})",
                answers.error
            ),
            Self::Silent(NoAnswers { checked, .. }) => write!(
                f,
                "no checked instance answers its health check ({checked} are checked)"
            ),
        }
    }
}

/// The number of instances whose latest check failed: all that are checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoAnswers {
    /// Number of checked instances.
    pub checked: usize,
    /// Number among them that failed for the reason of the outage.
    pub concerned: usize,
    /// Error of the latest check that failed for this reason; empty if it had none.
    pub error: String,
}

impl fmt::Display for NoAnswers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.concerned, self.checked)
    }
}

/// Results of the latest check of each instance.
#[derive(Debug, Default)]
pub(super) struct CheckFailures(Mutex<Latest>);

#[derive(Debug, Default)]
struct Latest {
    last: HashMap<IpAddr, CheckResult>,
    /// Text of the latest error for each result that has one.
    errors: HashMap<CheckResult, String>,
}

impl CheckFailures {
    pub(super) fn record(&self, ip: IpAddr, result: CheckResult) {
        self.0.lock().last.insert(ip, result);
    }

    /// Records the error of a check whose result is recorded as well.
    pub(super) fn record_error(&self, result: CheckResult, error: &CheckError) {
        // One text for each result instead of each instance: thousands fail alike.
        self.0.lock().errors.insert(result, error.to_string());
    }

    pub(super) fn forget(&self, ip: IpAddr) {
        self.0.lock().last.remove(&ip);
    }

    /// Returns why checks with these certificates tell the state of no instance; `None` while one
    /// does, or none is checked.
    pub(super) fn outage(&self, tls: &TlsMaterial, now: SystemTime) -> Option<HealthOutage> {
        if let Some(why) = tls.certificate.invalid_at(now) {
            return Some(HealthOutage::OwnCertificate(why));
        }
        if tls
            // During a rotation, one valid CA suffices.
            .authorities
            .iter()
            .all(|authority| authority.invalid_at(now).is_some())
        {
            return Some(HealthOutage::Authorities);
        }
        self.0.lock().outage()
    }
}

impl Latest {
    /// Returns why no latest check told a state. The reasons of single instances may differ; the
    /// one that the operator of this machine can mend comes first.
    fn outage(&self) -> Option<HealthOutage> {
        // A single report proves that certificates and network work in principle.
        if self.last.is_empty()
            || self.last.values().any(|result| {
                matches!(
                    result,
                    CheckResult::Running | CheckResult::Failing | CheckResult::Other
                )
            })
        {
            return None;
        }
        if let Some(answers) = self.answers(&[CheckResult::Tls]) {
            return Some(HealthOutage::Untrusted(answers));
        }
        if let Some(answers) = self.answers(&[CheckResult::Refused]) {
            return Some(HealthOutage::Refused(answers));
        }
        if let Some(answers) = self.answers(&[CheckResult::Status, CheckResult::Malformed]) {
            return Some(HealthOutage::Unusable(answers));
        }
        self.answers(&[CheckResult::Unreachable, CheckResult::Timeout])
            .map(HealthOutage::Silent)
    }

    /// Counts the instances whose latest check had one of these results; `None` without one.
    fn answers(&self, results: &[CheckResult]) -> Option<NoAnswers> {
        let concerned = self
            .last
            .values()
            .filter(|result| results.contains(result))
            .count();
        let error = results.iter().find_map(|result| self.errors.get(result));
        (concerned > 0).then(|| NoAnswers {
            checked: self.last.len(),
            concerned,
            error: error.cloned().unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use tokio_rustls::rustls;

    use super::*;
    use crate::{HEALTH_NAME, tests::Authority};
    use dns_kit::tls::RotatingTls;

    #[test]
    fn one_answer_ends_the_outage() {
        let failures = CheckFailures::default();
        let outage = || failures.0.lock().outage();
        let [first, second] = [1, 2].map(|last| IpAddr::from([10, 0, 0, last]));
        assert_eq!(outage(), None);
        failures.record(first, CheckResult::Unreachable);
        failures.record(second, CheckResult::Timeout);
        let Some(HealthOutage::Silent(NoAnswers { checked, .. })) = outage() else {
            panic!("{:?}", outage());
        };
        assert_eq!(checked, 2);
        failures.record(first, CheckResult::Failing);
        assert_eq!(outage(), None);
        failures.forget(first);
        assert!(outage().is_some());
    }

    #[test]
    fn own_mistakes_come_first() {
        let failures = CheckFailures::default();
        let results = [
            CheckResult::Timeout,
            CheckResult::Status,
            CheckResult::Refused,
            CheckResult::Tls,
        ];
        let mut found = Vec::new();
        for (last, result) in results.into_iter().enumerate() {
            failures.record(IpAddr::from([10, 0, 0, last as u8]), result);
            found.push(failures.0.lock().outage().unwrap());
        }
        assert!(matches!(
            &found[..],
            [
                HealthOutage::Silent(_),
                HealthOutage::Unusable(_),
                HealthOutage::Refused(_),
                HealthOutage::Untrusted(NoAnswers {
                    checked: 4,
                    concerned: 1,
                    ..
                }),
            ]
        ));
    }

    #[test]
    fn outages_name_cause_and_numbers() {
        let answers = || NoAnswers {
            checked: 5,
            concerned: 2,
            error: "why".to_owned(),
        };
        for (outage, text, is_of_certificates) in [
            (
                HealthOutage::OwnCertificate("has expired"),
                "own certificate has expired",
                true,
            ),
            (HealthOutage::Authorities, "no CA of health.ca_file", true),
            (
                HealthOutage::Untrusted(answers()),
                "(2 of 5 because of TLS: why)",
                true,
            ),
            (
                HealthOutage::Refused(answers()),
                "(2 of 5 refuse it: why)",
                true,
            ),
            (
                HealthOutage::Unusable(answers()),
                "(2 of 5 answer: why)",
                false,
            ),
            (HealthOutage::Silent(answers()), "(5 are checked)", false),
        ] {
            assert!(outage.to_string().contains(text), "{outage}");
            assert_eq!(outage.is_of_certificates(), is_of_certificates, "{outage}");
        }
    }

    #[test]
    fn latest_error_is_told() {
        let failures = CheckFailures::default();
        let [first, second] = [1, 2].map(|last| IpAddr::from([10, 0, 0, last]));
        let outage = || failures.0.lock().outage();
        failures.record(first, CheckResult::Malformed);
        failures.record(second, CheckResult::Timeout);
        let unusable = |error: &str| {
            Some(HealthOutage::Unusable(NoAnswers {
                checked: 2,
                concerned: 1,
                error: error.to_owned(),
            }))
        };
        assert_eq!(outage(), unusable(""));
        failures.record_error(CheckResult::Malformed, &CheckError::TooLong);
        assert_eq!(outage(), unusable("report exceeds 65536 bytes"));
        failures.record_error(CheckResult::Tls, &CheckError::TooLong);
        assert_eq!(outage(), unusable("report exceeds 65536 bytes"));
        failures.forget(first);
        assert!(matches!(
            outage(),
            Some(HealthOutage::Silent(NoAnswers {
                checked: 1,
                concerned: 1,
                ..
            }))
        ));
        failures.forget(second);
        assert_eq!(outage(), None);
    }

    #[test]
    fn results_are_counted_by_label() {
        let metrics = HealthMetrics::new().unwrap();
        let registry = Registry::new();
        metrics.register(&registry).unwrap();
        let refused = rustls::Error::AlertReceived(rustls::AlertDescription::UnknownCA);
        let io_error = || std::io::Error::other("broken");
        for (error, label) in [
            (CheckError::Connect(io_error()), "unreachable"),
            (CheckError::Tls(io_error()), "tls"),
            (CheckError::Refused(refused), "refused"),
            (CheckError::Status(hyper::StatusCode::NOT_FOUND), "status"),
            (CheckError::TooLong, "malformed"),
            (CheckError::Answer(anyhow::anyhow!("odd")), "malformed"),
        ] {
            assert_eq!(CheckResult::from(&error).label(), label, "{error}");
        }
        for (state, label) in [
            (HealthState::Running, "running"),
            (HealthState::Failing, "failing"),
            (HealthState::Unknown, "other"),
            (HealthState::Unchecked, "other"),
        ] {
            assert_eq!(CheckResult::of(state).label(), label);
            metrics.observe(CheckResult::of(state), Duration::from_millis(3));
        }
        metrics.observe(CheckResult::Timeout, Duration::from_secs(1));
        assert_eq!(metrics.checks(), 5);
        let states = HealthStates::default();
        states.set(
            IpAddr::from([10, 0, 0, 1]),
            super::super::states::InstanceHealth::unknown(),
        );
        metrics.count_instances(&states);
        metrics.in_flight.set(7);
        metrics.tracked_names.set(8);
        metrics.blind.set(1);
        let text = prometheus::TextEncoder::new()
            .encode_to_string(&registry.gather())
            .unwrap();
        for line in [
            r#"result="other"} 2"#,
            r#"result="running"} 1"#,
            r#"result="timeout"} 1"#,
            "_count 5",
            r#"le="0.002"} 0"#,
            r#"le="0.005"} 4"#,
            r#"state="unknown"} 1"#,
            r#"state="running"} 0"#,
            "in_flight 7",
            "tracked_names 8",
            "blind 1",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
    }

    #[test]
    fn own_certificates_precede_instances() {
        let folder = tempfile::tempdir().unwrap();
        let ended = Authority::until(2001);
        let files = ended.issue(&folder.path().join("client"), HEALTH_NAME);
        let failures = CheckFailures::default();
        let outage = |years: u64| {
            let tls = RotatingTls::load("health_client", HEALTH_NAME, &files).unwrap();
            let now = SystemTime::UNIX_EPOCH + Duration::from_secs(years * 365 * 86_400);
            failures.outage(&tls.current(), now)
        };
        // Certificates begin in 1975.
        let early = outage(0).unwrap();
        assert!(matches!(early, HealthOutage::OwnCertificate(_)), "{early}");
        let text = early.to_string();
        assert!(
            text.starts_with("the health client's own certificate "),
            "{text}"
        );
        assert_eq!(outage(20), None, "1990");
        let late = outage(40).unwrap();
        assert_eq!(late, HealthOutage::Authorities);
        assert_eq!(late.to_string(), "no CA of health.ca_file is valid now");
        // During a rotation, one valid CA suffices.
        let both = [ended.pem, Authority::new().pem].concat();
        std::fs::write(&files.ca, both).unwrap();
        assert_eq!(outage(40), None);
        failures.record(IpAddr::from([10, 0, 0, 1]), CheckResult::Timeout);
        assert!(matches!(outage(40), Some(HealthOutage::Silent(_))));
    }
}
