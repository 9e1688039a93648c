//! Liveness and readiness of the server, as a list of checks.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use super::service_status::{FastPathOff, FileState, Kind, ServiceReport, ServiceStatus};
use crate::consul::ConsulNames;
use dns_fastpath::FastPathHandle;
use dns_health::HealthService;
use dns_kit::tls::RotatingTls;
use dns_upstream::CurrentUpstreams;

/// Name of the check for whose failure a restart may help.
pub(super) const SOCKETS: &str = "sockets";

/// A check of one part of the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// Name of the check, such as `sockets` or `records`.
    pub name: Cow<'static, str>,
    /// Whether the server is ready in spite of the result.
    pub ok: bool,
    /// The result: `ok`, `degraded`, `not_ready` or `not_alive`.
    #[serde(rename = "verdict")]
    pub result: CheckResult,
    /// Finding, in a few words.
    pub detail: String,
}

/// Result of a check, from good to bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckResult {
    /// The part works as configured.
    Ok,
    /// Answers are correct but slower, or a component other than DNS is off: the server stays
    /// ready.
    Degraded,
    /// Not all data is in use: the server is not ready.
    NotReady,
    /// No service: a restart is needed.
    NotAlive,
}

impl CheckResult {
    /// Returns the word at the start of a line about the check.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Degraded => "warn",
            Self::NotReady | Self::NotAlive => "fail",
        }
    }
}

impl Check {
    fn new(name: &'static str, result: CheckResult, detail: String) -> Self {
        Self {
            name: name.into(),
            ok: result <= CheckResult::Degraded,
            result,
            detail,
        }
    }

    /// Returns a check that passes if there is no problem and otherwise has the result `bad`.
    fn of(
        name: &'static str,
        bad: CheckResult,
        problem: Option<String>,
        fine: impl FnOnce() -> String,
    ) -> Self {
        let result = if problem.is_some() {
            bad
        } else {
            CheckResult::Ok
        };
        Self::new(name, result, problem.unwrap_or_else(fine))
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
}

impl Readiness {
    /// Returns whether the fast path is enabled and no interface is served although one should be.
    pub(crate) fn is_fast_path_degraded(&self) -> bool {
        match self.service_status.state().fast_path_off {
            Some(FastPathOff::Intended(_)) => false,
            Some(FastPathOff::Failed(_)) => true,
            None => self.fast_path.unserved().is_some(),
        }
    }

    /// Returns the result of every check. Called on every probe: cheap, never blocks.
    pub fn checks(&self) -> Vec<Check> {
        let Self {
            service_status,
            fast_path,
            health,
            consul,
            upstreams,
            certificates,
        } = self;
        let ServiceReport {
            listen,
            fast_path_off,
            records_version: _,
            instances,
            aliases: _,
            files,
            upcheck_error,
            silent_addresses,
            parts_off,
            notes: _,
        } = service_status.state();
        let listen: Vec<String> = listen.iter().map(ToString::to_string).collect();
        let mut checks = vec![Check::of(
            SOCKETS,
            CheckResult::NotAlive,
            upcheck_error,
            || format!("answering on {}", listen.join(", ")),
        )];
        if !silent_addresses.is_empty() {
            // The other addresses answer, and a restart would not repair this one.
            let detail = silent_addresses.join("; ");
            checks.push(Check::new("every address", CheckResult::NotReady, detail));
        }
        checks.extend(file_checks(&files, instances));
        checks.push(fast_path_check(fast_path_off, fast_path));
        if let Some(health) = health {
            // Until the first checks, names resolve to all their instances.
            let (result, problem) = match health.why_no_check_can_work() {
                None => (CheckResult::Degraded, health.why_none_answers()),
                problem => (CheckResult::NotReady, problem),
            };
            checks.push(Check::of("health checks", result, problem, || {
                health_in_words(health)
            }));
        }
        if let Some(consul) = consul {
            // The last known data is served until then; a restart would not help.
            checks.push(Check::of(
                "Consul",
                CheckResult::NotReady,
                consul.problem(),
                || format!("{} instances", consul.zone().catalog.instance_count()),
            ));
        }
        if let Some(outage) = upstreams.outage() {
            // Names of the fleet are answered, and a restart would not help.
            checks.push(Check::new("recursors", CheckResult::Degraded, outage));
        }
        let now = SystemTime::now();
        let problems: Vec<String> = certificates
            .iter()
            .filter_map(|tls| tls.problem(now))
            .collect();
        if !problems.is_empty() {
            checks.push(Check::new(
                "certificates",
                CheckResult::Degraded,
                problems.join("; "),
            ));
        }
        if !parts_off.is_empty() {
            // DNS works without them.
            let detail = parts_off.join("; ");
            checks.push(Check::new("parts off", CheckResult::Degraded, detail));
        }
        checks
    }
}

/// Returns the checks of the kinds of files in use; `instances` is the number in the records.
fn file_checks(files: &BTreeMap<&'static str, FileState>, instances: usize) -> Vec<Check> {
    let kinds = [
        ("configuration", Kind::Config),
        ("records", Kind::Records),
        ("aliases", Kind::Aliases),
        ("handlers", Kind::Handlers),
        ("addresses", Kind::Addresses),
        ("Consul files", Kind::Consul),
    ];
    let check = |(name, kind): (&'static str, Kind)| {
        let state = files.get(kind.label())?;
        if kind == Kind::Records && instances == 0 && state.errors.is_empty() {
            let file = state
                .files
                .first()
                .map(|file| file.display().to_string())
                .unwrap_or_default();
            let detail = format!(
                "{file} has no instance: names of the fleet are refused until the agent writes others; \
                 compare records_file with the agent's settings"
            );
            return Some(Check::new(name, CheckResult::Degraded, detail));
        }
        Some(Check::of(
            name,
            CheckResult::NotReady,
            state.problem(),
            || match kind {
                Kind::Records => format!("{instances} instances"),
                _ => format!("{} files", state.files.len()),
            },
        ))
    };
    kinds.into_iter().filter_map(check).collect()
}

/// Returns the check of the fast path, without which answers are slower, not wrong.
fn fast_path_check(off: Option<FastPathOff>, fast_path: &FastPathHandle) -> Check {
    match off {
        Some(FastPathOff::Intended(why)) => {
            Check::new("fast path", CheckResult::Ok, format!("off: {why}"))
        }
        Some(FastPathOff::Failed(why)) => {
            Check::new("fast path", CheckResult::Degraded, format!("off: {why}"))
        }
        None => {
            let problem = fast_path
                .unserved()
                .map(|why| format!("on no interface: {why}"));
            Check::of("fast path", CheckResult::Degraded, problem, || {
                fast_path.in_words()
            })
        }
    }
}

/// Checks whose parts do not log a changed result themselves. A reload logs records that cannot be
/// read, but not records without instances.
const LOGGED_HERE: [&str; 4] = ["records", "health checks", "recursors", "certificates"];

/// Minimum time between two equal lines about a check, which may alternate.
const QUIET: Duration = Duration::from_secs(60);

/// Logs the results of checks when they change.
#[derive(Debug, Default)]
pub(crate) struct CheckLog(Vec<CheckLine>);

/// A line that was logged.
#[derive(Debug)]
struct CheckLine {
    check: &'static str,
    /// The finding without its numbers, which change often; `None`: the check passed again.
    cause: Option<String>,
    at: Instant,
}

impl CheckLog {
    pub(crate) fn log(&mut self, checks: &[Check], now: Instant) {
        for name in LOGGED_HERE {
            let check = checks
                .iter()
                .find(|check| check.name == name && check.result != CheckResult::Ok);
            if name == "records" && check.is_some_and(|check| check.result == CheckResult::NotReady)
            {
                continue;
            }
            let cause = check.map(|check| check.detail.replace(|c: char| c.is_ascii_digit(), ""));
            let of_check = || self.0.iter().rev().filter(|line| line.check == name);
            if of_check().next().and_then(|last| last.cause.as_ref()) == cause.as_ref()
                || of_check().any(|line| line.cause == cause && now.duration_since(line.at) < QUIET)
            {
                continue;
            }
            match check {
                Some(Check { detail, .. }) => warn!("{name}: {detail}"),
                None => info!("{name}: ok again"),
            }
            self.0
                .retain(|line| line.check != name || now.duration_since(line.at) < QUIET);
            self.0.push(CheckLine {
                check: name,
                cause,
                at: now,
            });
        }
    }
}

fn health_in_words(health: &HealthService) -> String {
    let [running, failing, unknown, _] = health.states().counts();
    format!("{running} instances running, {failing} failing, {unknown} unknown")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alternating_check_is_logged_rarely() {
        let mut log = CheckLog::default();
        let begun = Instant::now();
        let out = |detail: &str| {
            [Check::new(
                "recursors",
                CheckResult::Degraded,
                detail.to_owned(),
            )]
        };
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
