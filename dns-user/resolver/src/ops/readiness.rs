//! Liveness and readiness of the server, as a list of checks.

use std::{
    borrow::Cow,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use super::{
    conditions::{Condition, Facts, RecentEvents, TABLE, table::checks},
    service_status::{FastPathOff, Kind, ServiceReport, ServiceStatus},
};
use crate::consul::ConsulNames;
use dns_fastpath::FastPathHandle;
use dns_health::HealthService;
use dns_kit::tls::RotatingTls;
use dns_upstream::CurrentUpstreams;

pub use super::conditions::CheckResult;

/// A check of one part of the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// Name of the check, such as `sockets` or `records`.
    pub name: Cow<'static, str>,
    /// Name of the condition that holds, by which alerts and documentation know it; null for `ok`.
    #[serde(default)]
    pub condition: Option<Cow<'static, str>>,
    /// Whether the server is ready in spite of the result.
    pub ok: bool,
    /// The result: `ok`, `degraded`, `not_ready` or `not_alive`.
    #[serde(rename = "verdict")]
    pub result: CheckResult,
    /// Finding, consequence and remedy, in a few words.
    pub detail: String,
}

impl Check {
    /// Returns a check that passed.
    fn passed(name: &'static str, detail: String) -> Self {
        Self {
            name: name.into(),
            condition: None,
            ok: true,
            result: CheckResult::Ok,
            detail,
        }
    }

    /// Returns the check of a condition that holds.
    fn failed(condition: &'static Condition, detail: String) -> Self {
        let result = condition.result;
        Self {
            name: condition.check.into(),
            condition: Some(condition.name.into()),
            // A slower server is better than none: a load balancer must not take it out.
            ok: result <= CheckResult::Degraded,
            result,
            detail,
        }
    }
}

/// Runs the checks on the service status and the components.
#[derive(Clone)]
pub struct Readiness {
    pub(crate) service_status: ServiceStatus,
    pub(crate) fast_path: FastPathHandle,
    /// `None` if health checks are off.
    pub(crate) health: Option<Arc<HealthService>>,
    /// `None` without an object `"consul"`.
    pub(crate) consul: Option<Arc<ConsulNames>>,
    pub(crate) upstreams: Arc<CurrentUpstreams>,
    /// Certificates of the API and of the health checks.
    pub(crate) certificates: Vec<Arc<RotatingTls>>,
    pub(crate) events: Arc<RecentEvents>,
}

impl Readiness {
    /// Returns whether the fast path is enabled and no interface is served although one should be.
    pub(crate) fn is_fast_path_degraded(&self) -> bool {
        match self.service_status.state().fast_path_off {
            // Also while it is being loaded: every start would otherwise be a degradation.
            Some(FastPathOff::Intended(_)) => false,
            Some(FastPathOff::Failed(_)) => true,
            None => self.fast_path.unserved().is_some(),
        }
    }

    /// Returns every condition with its line if it holds.
    pub(crate) fn conditions(&self) -> Vec<(&'static Condition, Option<String>)> {
        let facts = self.facts();
        TABLE
            .iter()
            .map(|condition| (condition, condition.line(&facts)))
            .collect()
    }

    /// Returns the result of every check, those that failed first. Called on every probe: cheap,
    /// never blocks.
    pub fn checks(&self) -> Vec<Check> {
        let facts = self.facts();
        let mut all = Vec::new();
        for condition in TABLE {
            if let Some(line) = condition.line(&facts) {
                all.push(Check::failed(condition, line));
            }
        }
        // The worst comes first, so that the first lines of `status` name the outage.
        all.sort_by_key(|check| std::cmp::Reverse(check.result));
        for (name, detail) in self.passed(&facts.report) {
            // A check with a condition must not be shown as passed, too.
            if !all.iter().any(|check| check.name == name) {
                all.push(Check::passed(name, detail));
            }
        }
        all
    }

    fn facts(&self) -> Facts<'_> {
        Facts {
            report: self.service_status.state(),
            fast_path: &self.fast_path,
            health: self.health.as_deref(),
            health_outage: self.health.as_ref().and_then(|health| health.outage()),
            consul_problem: self.consul.as_ref().and_then(|names| names.problem()),
            upstreams: &self.upstreams,
            recursor_outage: self.upstreams.outage(),
            recursors: self.upstreams.recursors(),
            certificates: self.certificates.iter().map(|tls| &**tls).collect(),
            events: &self.events,
            now: SystemTime::now(),
        }
    }

    /// Returns the checks that are shown while they pass, with the finding.
    fn passed(&self, report: &ServiceReport) -> Vec<(&'static str, String)> {
        let listen: Vec<String> = report.listen.iter().map(ToString::to_string).collect();
        let mut passed = vec![(
            checks::SOCKETS,
            format!("answering on {}", listen.join(", ")),
        )];
        let kinds = [
            (checks::CONFIGURATION, Kind::Config),
            (checks::RECORDS, Kind::Records),
            (checks::ALIASES, Kind::Aliases),
            (checks::HANDLERS, Kind::Handlers),
            (checks::ADDRESSES, Kind::Addresses),
            (checks::CONSUL_FILES, Kind::Consul),
        ];
        for (name, kind) in kinds {
            let Some(state) = report.files.get(kind.label()) else {
                continue;
            };
            let finding = if kind == Kind::Records {
                format!("{} instances", report.instances)
            } else {
                format!("{} files", state.files.len())
            };
            passed.push((name, finding));
        }
        let fast_path = match &report.fast_path_off {
            Some(off) => format!("off: {}", off.why()),
            None => self.fast_path.in_words(),
        };
        passed.push((checks::FAST_PATH, fast_path));
        if let Some(health) = &self.health {
            passed.push((checks::HEALTH, health_in_words(health)));
        }
        if let Some(consul) = &self.consul {
            let instances = consul.zone().catalog.instance_count();
            passed.push((checks::CONSUL, format!("{instances} instances")));
        }
        passed
    }
}

#[cfg(test)]
impl Readiness {
    /// Returns the checks of a server without health checks, Consul, recursors and fast path.
    pub(crate) fn of(service_status: ServiceStatus, events: RecentEvents) -> Self {
        let config = br#"{"port": 53, "disable_recursors": true}"#;
        let config = dns_core::config::Config::parse("config.json", config);
        let upstream = dns_upstream::Upstream::new(
            &config.unwrap().config,
            &dns_upstream::OwnAddresses::default(),
            &dns_upstream::NoInterfaces::shared(),
        );
        Self {
            service_status,
            fast_path: FastPathHandle::default(),
            health: None,
            consul: None,
            upstreams: CurrentUpstreams::new(upstream, dns_upstream::Handlers::default()),
            certificates: Vec::new(),
            events: Arc::new(events),
        }
    }

    /// Returns the line of a condition while it holds.
    pub(crate) fn line(&self, condition: &str) -> Option<String> {
        let mut checks = self.checks().into_iter();
        let check = checks.find(|check| check.condition.as_deref() == Some(condition));
        check.map(|check| check.detail)
    }
}

/// Minimum time between two equal lines about a check, which may alternate.
const QUIET: Duration = Duration::from_secs(60);

/// Logs the results of checks when they change.
#[derive(Debug, Default)]
pub(crate) struct CheckLog(Vec<CheckLine>);

/// A line that was logged.
#[derive(Debug)]
struct CheckLine {
    /// Name of the condition.
    condition: &'static str,
    /// The finding without its numbers, which change often; `None`: the check passed again.
    cause: Option<String>,
    at: Instant,
}

impl CheckLog {
    /// Logs the conditions that began or ended and that no part logs itself.
    pub(crate) fn log(&mut self, checks: &[Check], now: Instant) {
        for condition in TABLE {
            // The part that finds it knows more than this check, such as the file and the position.
            if !condition.logs_itself {
                let check = checks
                    .iter()
                    .find(|check| check.condition.as_deref() == Some(condition.name));
                self.log_one(condition, check, now);
            }
        }
    }

    fn log_one(&mut self, condition: &'static Condition, check: Option<&Check>, now: Instant) {
        let name = condition.name;
        let cause = check.map(|check| check.detail.replace(|c: char| c.is_ascii_digit(), ""));
        let mut of_condition = self.0.iter().rev().filter(|line| line.condition == name);
        let mut earlier = of_condition.clone();
        if of_condition.next().and_then(|last| last.cause.as_ref()) == cause.as_ref()
            // A recursor that answers every other query would otherwise fill the log.
            || earlier.any(|line| line.cause == cause && now.duration_since(line.at) < QUIET)
        {
            return;
        }
        match check {
            Some(Check { detail, .. }) => warn!("{}: {detail}", condition.check),
            None => info!("{}: no longer: {}", condition.check, condition.words),
        }
        self.0
            // Other conditions keep their last line, however old, since it says whether they hold.
            .retain(|line| line.condition != name || now.duration_since(line.at) < QUIET);
        self.0.push(CheckLine {
            condition: name,
            cause,
            at: now,
        });
    }
}

fn health_in_words(health: &HealthService) -> String {
    let [running, failing, unknown, _] = health.states().counts();
    format!("{running} instances running, {failing} failing, {unknown} unknown")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{conditions::find::MAX_LOOP_SILENCE, service_status::Part};

    #[test]
    fn parts_that_stay_off_are_conditions() {
        let status = ServiceStatus::default();
        let readiness = Readiness::of(status.clone(), RecentEvents::default());
        for (part, condition) in [
            (Part::Api, "api_off"),
            (Part::Control, "control_off"),
            (Part::ControlGroup, "control_group_missing"),
            (Part::Metrics, "metrics_off"),
            (Part::HealthChecks, "health_off"),
            (Part::Dnstap, "dnstap_off"),
            (Part::LocalGroups, "local_groups_off"),
        ] {
            assert_eq!(readiness.line(condition), None);
            let reason = format!("the reason of {condition}");
            status.stays_off(part, reason.clone());
            let line = readiness.line(condition);
            assert!(line.is_some_and(|line| line.starts_with(&reason)));
        }
    }

    #[test]
    fn stalled_main_loop_is_a_condition() {
        let status = ServiceStatus::default();
        let readiness = Readiness::of(status.clone(), RecentEvents::default());
        let after = |silence: Duration| {
            status.change(|state| state.last_turn = Instant::now().checked_sub(silence));
            readiness.line("loop_stalled")
        };
        assert_eq!(after(Duration::ZERO), None);
        let line = after(MAX_LOOP_SILENCE).unwrap();
        assert!(line.contains("the main loop stands still ("), "{line}");
    }

    #[test]
    fn alternating_check_is_logged_rarely() {
        let mut log = CheckLog::default();
        let begun = Instant::now();
        let silent = TABLE.iter().find(|one| one.name == "recursors_silent");
        let out = |detail: &str| [Check::failed(silent.unwrap(), detail.to_owned())];
        let mut lines = |checks: &[Check], after: u64| {
            log.log(checks, begun + Duration::from_secs(after));
            log.0
                .iter()
                .map(|line| (line.cause.clone(), line.at))
                .max_by_key(|(_, at)| *at)
        };
        let at = |after: u64| begun + Duration::from_secs(after);
        let line = |cause: Option<&str>, after| Some((cause.map(str::to_owned), at(after)));
        assert_eq!(lines(&[], 0), None, "nothing to say");
        assert_eq!(lines(&out("none of 3"), 1), line(Some("none of "), 1));
        assert_eq!(
            lines(&out("none of 2"), 2),
            line(Some("none of "), 1),
            "the same cause"
        );
        assert_eq!(lines(&out("another"), 3), line(Some("another"), 3));
        assert_eq!(lines(&[], 4), line(None, 4));
        assert_eq!(lines(&out("another"), 5), line(None, 4), "too soon");
        assert_eq!(lines(&out("another"), 63), line(Some("another"), 63));
    }
}
