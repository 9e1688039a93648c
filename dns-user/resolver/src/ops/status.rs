//! The JSON object returned by `/status` and read by the commands `status` and `top`.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use prometheus::{Registry, proto::MetricFamily};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{readiness::Check, service_status::Event};
use dns_common::counters::Outcome;
use dns_fastpath::{FastPath, FastPathHandle, FastPathStatus, ProgramStatus};
use dns_kit::{
    logs::{LoggingStatus, Problem},
    metrics::families,
};
use dns_upstream::{
    CurrentUpstreams, RecursorStatus,
    admission::{Admission, AdmissionStatus, LimitedClient},
};

/// A snapshot of the server's state.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ServerStatus {
    /// Version of the server binary.
    pub server_version: String,
    /// Commit the server was built from.
    pub commit: String,
    /// Process id of the server.
    pub pid: u32,
    /// Absolute path of the server's config.json; null if it cannot be determined.
    pub config: Option<PathBuf>,
    /// Whether no check failed.
    pub ready: bool,
    /// Whether a check found slower service or a component that is off.
    pub degraded: bool,
    /// Results of the checks.
    pub checks: Vec<Check>,
    /// Start time, in seconds since 1970.
    pub started: f64,
    /// Seconds since the server's start.
    pub uptime_seconds: f64,
    /// Listen addresses, for both UDP and TCP.
    pub listen: Vec<String>,
    /// The records in use.
    pub records: RecordsStatus,
    /// Replies since the start, by path and kind.
    pub replies: RepliesStatus,
    /// The fast path; null if off.
    pub fast_path: Option<FastPathView>,
    /// Reason why the fast path is off; null if it is on.
    pub fast_path_off: Option<String>,
    /// Queries dropped and refused under overload, and the affected clients.
    pub overload: OverloadStatus,
    /// Recursors with their history, in query order.
    pub recursors: Vec<RecursorStatus>,
    /// Registrations of Consul names and the state of a live Consul; null if Consul is not
    /// configured.
    pub consul: Value,
    /// The cache; null if disabled.
    pub cache: Value,
    /// Health checks; null if off.
    pub health: Value,
    /// Certificates currently in use.
    pub certificates: Vec<CertificateStatus>,
    /// Last reload of each kind of file.
    pub last_reload: BTreeMap<String, Event>,
    /// Last failed reload of each kind of file.
    pub last_failure: BTreeMap<String, Event>,
    /// State of the followed files, as reported by the daemon.
    pub files: Value,
    /// Latest warnings and errors, oldest first.
    pub problems: Vec<Problem>,
    /// Remarks on the configuration for the operator.
    pub notes: Vec<String>,
    /// Log levels and request line limit.
    pub logging: LoggingStatus,
}

/// The records in use.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RecordsStatus {
    /// Path of the file; null if none is configured.
    pub file: Option<String>,
    /// Version of the records; null if none were read or they have no version.
    pub version: Option<u64>,
    /// Seconds since the file was read; null if it was not.
    pub age_seconds: Option<f64>,
    /// Number of instances in the records.
    pub instances: usize,
    /// Domains of the records.
    pub domains: Vec<String>,
    /// Number of aliases, from alias files and records.
    pub aliases: usize,
}

/// Replies since the start, by path and kind.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct RepliesStatus {
    /// Sent by the fast path.
    pub fast: u64,
    /// Sent by userspace, for any name.
    pub userspace: u64,
    /// For local names, on both paths.
    pub internal: u64,
    /// Queries forwarded to recursors.
    pub external: u64,
}

/// State of the fast path.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct FastPathView {
    /// Attached interfaces with their hooks.
    pub interfaces: Vec<InterfaceView>,
    /// Programs loaded so far.
    pub programs: Vec<ProgramStatus>,
    /// Packets by outcome, since the programs were loaded.
    pub outcomes: BTreeMap<String, u64>,
    /// Number of names published from the snapshot.
    pub published: usize,
    /// Number of names learned from queries.
    pub learned: usize,
    /// Number of learned names that do not exist.
    pub negative: usize,
    /// Number of names that do not fit in the map and are answered by userspace.
    #[serde(rename = "unfitting_names")]
    pub unfitting: usize,
    /// Fraction of the map in use, 0 to 1.
    pub map_fill: f64,
    /// Fraction of entry memory in use, 0 to 1.
    pub memory_fill: f64,
    /// Number of forwarded answers in the map.
    pub forwarded_answers: usize,
    /// Limit of forwarded answers; 0 if they are not kept.
    pub max_forwarded_answers: usize,
    /// Number of local replies of other types in the map.
    pub local_replies: usize,
    /// Limit of local replies; 0 if `xdp.other_types` is off.
    pub max_local_replies: usize,
    /// Remaining lease in seconds; null if expired.
    pub lease_seconds: Option<f64>,
    /// Complete status of the fast path.
    pub internals: Value,
}

impl FastPathView {
    /// Returns the view of a fast path.
    pub fn of(fast_path: &FastPath) -> Self {
        let status = fast_path.status();
        let counters = fast_path.counters();
        let internals = json!(status);
        let FastPathStatus {
            interfaces,
            programs,
            names,
            answers,
            lease,
            pinned_at: _,
        } = status;
        let mut views = Vec::with_capacity(interfaces.interfaces.len());
        for interface in interfaces.interfaces {
            let hook = interface.hook.map_or("none", |hook| hook.label());
            views.push(InterfaceView {
                hook: hook.to_owned(),
                replies: interface.slot.map_or(0, |slot| counters.interface(slot)),
                state: interface.state.label().to_owned(),
                name: interface.name,
                why: interface.why,
            });
        }
        let mut outcomes = BTreeMap::new();
        for (outcome, count) in counters.outcomes() {
            outcomes.insert(outcome.label().to_owned(), count);
        }
        Self {
            interfaces: views,
            programs,
            outcomes,
            published: names.published,
            learned: names.learned,
            negative: names.negative,
            unfitting: names.unfitting.total(),
            map_fill: share(names.published + names.learned, names.max_names),
            memory_fill: share(names.store.used, names.store.total),
            forwarded_answers: answers.entries,
            max_forwarded_answers: answers.max_entries,
            local_replies: answers.replies.entries,
            max_local_replies: answers.replies.max_entries,
            lease_seconds: (lease.remaining_ms > 0).then(|| lease.remaining_ms as f64 / 1000.0),
            internals,
        }
    }
}

/// State of an interface.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct InterfaceView {
    /// Name as shown to operators.
    pub name: String,
    /// `served`, `waiting` or `refused`.
    pub state: String,
    /// `native`, `tcx`, `clsact` or `none`.
    pub hook: String,
    /// Reason why this hook, or none, was chosen.
    pub why: String,
    /// Replies since the start.
    #[serde(rename = "reply_count")]
    pub replies: u64,
}

/// State of a certificate in use.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CertificateStatus {
    /// Purpose: `api`, `health-client`...
    pub purpose: String,
    /// Common name of the subject.
    pub subject: Option<String>,
    /// Expiry, in seconds since 1970.
    pub not_after: f64,
    /// Error of the last attempt to load newer files.
    pub error: Option<String>,
}

//----------- Overload ----------------------------------------------------------

/// Maximum number of clients per budget in the metrics. Each is a time series, so there must be
/// few.
const MAX_CLIENTS: usize = 5;

/// Name of the budget of the whole server.
const SERVER: &str = "server";

/// Name of the budget of the recursors.
const RECURSORS: &str = "recursors";

/// Reads the state of overload.
#[derive(Clone)]
pub struct OverloadSource {
    /// Limits the waiting queries of the whole server.
    pub waiting: Arc<Admission>,
    /// Recursors and handlers, each with a budget.
    pub upstreams: Arc<CurrentUpstreams>,
    /// Counts the queries that interfaces drop.
    pub fast_path: FastPathHandle,
}

/// Queries dropped and refused, and the clients that exceed their share.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OverloadStatus {
    /// Queries dropped by interfaces since the programs were loaded, because userspace could not
    /// answer them.
    pub shed: u64,
    /// The limits on waiting queries: for the server, the recursors and each handler.
    pub budgets: Vec<Budget>,
}

/// A limit on waiting queries.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Budget {
    /// `server`, `recursors`, or the domain of a handler.
    pub name: String,
    /// Its slots and the clients that hold them.
    #[serde(flatten)]
    pub status: AdmissionStatus,
}

impl OverloadStatus {
    /// Returns the clients with refused queries, with the budget, most refusals first.
    pub fn limited(&self) -> Vec<(&str, &LimitedClient)> {
        let mut all: Vec<_> = self
            .budgets
            .iter()
            .flat_map(|Budget { name, status }| {
                status.limited.iter().map(|client| (name.as_str(), client))
            })
            .collect();
        all.sort_by_key(|(_, client)| std::cmp::Reverse(client.refused));
        all
    }
}

/// Returns the fraction of `whole` that is in use, 0 to 1.
pub(super) fn share(part: usize, whole: usize) -> f64 {
    // A table that was never made is not full.
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64
    }
}

impl OverloadSource {
    /// Returns the current state.
    pub fn status(&self) -> OverloadStatus {
        let shed = self.fast_path.counters().outcome(Outcome::Shed);
        let server = Budget {
            name: SERVER.to_owned(),
            status: self.waiting.status(),
        };
        // The server's is the first: commands show it as the sum of all.
        let mut budgets = vec![server];
        for (domain, status) in self.upstreams.admissions() {
            let name = domain.unwrap_or_else(|| RECURSORS.to_owned());
            budgets.push(Budget { name, status });
        }
        OverloadStatus { shed, budgets }
    }

    /// Registers the metric families of overload.
    pub fn register(self, registry: &Registry) -> prometheus::Result<()> {
        families::OVERLOAD_QUERIES_TOTAL.scrape(registry, move || self.families())
    }

    fn families(&self) -> Vec<MetricFamily> {
        let OverloadStatus { shed, budgets } = self.status();
        let [mut by_server, mut by_recursors, mut by_handlers] = [0; 3];
        let mut limited = Vec::new();
        let mut clients = Vec::new();
        for Budget { name, status } in &budgets {
            let refused = match name.as_str() {
                SERVER => &mut by_server,
                RECURSORS => &mut by_recursors,
                // All count as one, since anybody who writes their files chooses their number.
                _ => &mut by_handlers,
            };
            *refused += status.refused;
            limited.push(([name.as_str()], status.limited.len() as f64));
            for client in status.limited.iter().take(MAX_CLIENTS) {
                let labels = [name.clone(), client.client.to_string()];
                clients.push((labels, client.refused as f64));
            }
        }
        let by_reason = [
            (["shed"], shed),
            ([SERVER], by_server),
            ([RECURSORS], by_recursors),
            (["handler"], by_handlers),
        ];
        let server = budgets.first();
        vec![
            families::OVERLOAD_QUERIES_TOTAL.of(by_reason),
            families::LIMITED_CLIENTS.of(limited),
            families::LIMITED_CLIENT_REFUSALS.of(clients),
            families::LIMIT
                .of(server.map(|budget| (["waiting_queries"], budget.status.limit as f64))),
        ]
    }
}
