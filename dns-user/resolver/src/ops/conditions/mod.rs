//! Conditions of the server of which an operator must know.
//!
//! [`TABLE`] is the only list of them. A row yields the line of `status` and `/readyz`, the sample of
//! `bosh_dns_xdp_condition`, the alert in `deploy/prometheus/rules.yml` and the row of
//! docs/troubleshooting.md, so that none of the four knows more than the others.
//!
//! * `table`: the rows; `find`: how each is found in the server's own state.
//! * [`events`]: conditions that are events, which hold for a while.

pub(crate) mod events;
pub(super) mod find;
#[cfg(test)]
mod page_tests;
pub(crate) mod table;

use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::service_status::ServiceReport;
use dns_fastpath::FastPathHandle;
use dns_health::{HealthOutage, HealthService};
use dns_kit::tls::RotatingTls;
use dns_upstream::{CurrentUpstreams, RecursorOutage, RecursorStatus};

pub(crate) use self::{events::RecentEvents, table::TABLE};

/// A condition: one row of the table.
pub(crate) struct Condition {
    /// Value of the label `condition`, and the name in JSON.
    pub(crate) name: &'static str,
    /// Name of the check in whose place the line appears.
    pub(crate) check: &'static str,
    /// Result of the check while the condition holds.
    pub(crate) result: CheckResult,
    /// Words of every finding, by which an operator finds the page's row.
    pub(crate) words: &'static str,
    /// The loss for clients or operators.
    pub(crate) consequence: &'static str,
    /// The remedy.
    pub(crate) remedy: &'static str,
    #[cfg_attr(not(test), expect(dead_code, reason = "for the generated rules"))]
    pub(crate) alert: Alert,
    /// Whether the part concerned logs the condition itself.
    pub(crate) logs_itself: bool,
    /// Returns the finding while the condition holds.
    pub(super) find: fn(&Facts<'_>) -> Option<String>,
}

/// The alert of a condition.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(test), expect(dead_code, reason = "for the generated rules"))]
pub(crate) struct Alert {
    /// Name of the alert; conditions with the same remedy share one.
    pub(crate) name: &'static str,
    /// Value of the label `severity`.
    pub(crate) severity: &'static str,
    /// Time for which the condition must hold, in Prometheus' form.
    pub(crate) after: &'static str,
    /// A counter that must have risen within that time, besides.
    pub(crate) rising: Option<&'static str>,
}

impl Alert {
    /// Returns the alert for as long as queries to recursors fail. Recursors that are not asked stay silent after a short
    /// outage, until the next query.
    const fn while_failures_rise(mut self) -> Self {
        self.rising = Some("bosh_dns_xdp_recursor_failures_total");
        self
    }
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

/// Evidence for the conditions: the server's own state and counters, read once.
pub(crate) struct Facts<'a> {
    pub(super) report: ServiceReport,
    pub(super) fast_path: &'a FastPathHandle,
    /// `None` if health checks are off.
    pub(super) health: Option<&'a HealthService>,
    pub(super) health_outage: Option<HealthOutage>,
    /// Why Consul's data is not current.
    pub(super) consul_problem: Option<String>,
    pub(super) upstreams: &'a CurrentUpstreams,
    pub(super) recursor_outage: Option<RecursorOutage>,
    /// Recursors of the configuration, then of handlers.
    pub(super) recursors: Vec<RecursorStatus>,
    pub(super) certificates: Vec<&'a RotatingTls>,
    pub(super) events: &'a RecentEvents,
    pub(super) now: SystemTime,
}

impl Condition {
    /// Returns the line about the condition while it holds: finding, consequence, remedy.
    pub(crate) fn line(&self, facts: &Facts<'_>) -> Option<String> {
        let finding = (self.find)(facts)?;
        Some(format!("{finding}: {}; {}", self.consequence, self.remedy))
    }
}
