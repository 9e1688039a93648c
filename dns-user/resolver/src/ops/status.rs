//! What `/status` says: one JSON object that `status` and `top` read.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{journal::Event, probe::CheckStatus};
use dns_fastpath::{FastPath, FastPathStatus, ProgramStatus};
use dns_platform::logs::{LoggingStatus, Problem};

/// The state of the server at one moment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// Version of the server.
    pub version: String,
    /// Commit that it was built from.
    pub commit: String,
    /// Process id.
    pub pid: u32,
    /// Whether every check is well.
    pub ready: bool,
    /// What was looked at.
    pub checks: Vec<CheckStatus>,
    /// Start, in seconds since 1970.
    pub started: f64,
    /// Seconds since then.
    pub uptime_seconds: f64,
    /// Addresses that it listens on, UDP and TCP.
    pub listen: Vec<String>,
    /// The records in force.
    pub records: RecordsStatus,
    /// Replies so far.
    pub replies: RepliesStatus,
    /// The fast path; null: there is none.
    pub fast_path: Option<FastPathView>,
    /// Why there is none, if that was not asked for.
    pub fast_path_off: Option<String>,
    /// Recursors with their history, in the order in which they are asked.
    pub recursors: Vec<Value>,
    /// Consul's names: what is registered, and how a live Consul is doing; null: there
    /// are none.
    #[serde(default)]
    pub consul: Value,
    /// The cache; null: there is none.
    pub cache: Value,
    /// Health checks; null: they are off.
    pub health: Value,
    /// Certificates in use.
    pub certificates: Vec<CertificateStatus>,
    /// Last time that files of a kind were read anew.
    pub last_reload: BTreeMap<String, Event>,
    /// Last time that files of a kind could not be used.
    pub last_failure: BTreeMap<String, Event>,
    /// The files that are followed, as the daemon tells it.
    pub files: Value,
    /// The newest warnings and errors, newest last.
    pub problems: Vec<Problem>,
    /// What an operator should know of how the server is set up.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Levels of the log.
    pub logging: LoggingStatus,
}

/// The records in force.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RecordsStatus {
    /// The file; null: none is configured.
    pub file: Option<String>,
    /// Its version; null: none was read, or it names none.
    pub version: Option<u64>,
    /// Seconds since it was read; null: none was.
    pub age_seconds: Option<f64>,
    /// Instances.
    pub instances: usize,
    /// Domains.
    pub domains: Vec<String>,
    /// Aliases, of files and records.
    pub aliases: usize,
}

/// Replies so far.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct RepliesStatus {
    /// By the interface.
    pub fast: u64,
    /// By the sockets, whatever for.
    pub userspace: u64,
    /// For names of the fleet, both paths.
    pub internal: u64,
    /// Sent on to recursors.
    pub external: u64,
}

/// The fast path.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct FastPathView {
    /// Interfaces with their hook.
    pub interfaces: Vec<InterfaceView>,
    /// The programs that were needed so far.
    #[serde(default)]
    pub programs: Vec<ProgramView>,
    /// Packets by what became of them, since the program was loaded.
    pub outcomes: BTreeMap<String, u64>,
    /// Names that the snapshot publishes.
    pub published: usize,
    /// Names that were asked for and learned.
    pub learned: usize,
    /// Names that do not exist, learned as such.
    pub negative: usize,
    /// Names of the snapshot that are not in the map; userspace answers them.
    pub unfitting: usize,
    /// Share of the map in use, 0 to 1.
    pub map_fill: f64,
    /// Share of the entries' memory in use, 0 to 1.
    pub memory_fill: f64,
    /// Seconds that the lease still has; null: it has run out.
    pub lease_seconds: Option<f64>,
    /// All that the fast path tells of itself.
    pub detail: Value,
}

impl FastPathView {
    /// Describes a fast path.
    pub fn of(fast_path: &FastPath) -> Self {
        let (status, counters) = (fast_path.status(), fast_path.counters());
        let detail = serde_json::to_value(&status).unwrap_or_default();
        let FastPathStatus { interfaces, programs, names, lease, pinned_at: _ } = status;
        let share = |part: usize, whole: usize| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
        let interfaces = interfaces.interfaces.into_iter().map(|interface| InterfaceView {
            hook: interface.hook.map_or("none", |hook| hook.label()).to_owned(),
            replies: interface.slot.map_or(0, |slot| counters.interface(slot)),
            state: interface.state.label().to_owned(),
            name: interface.name,
            why: interface.why,
        });
        let outcomes = counters.outcomes().map(|(outcome, count)| (outcome.label().to_owned(), count));
        Self {
            interfaces: interfaces.collect(),
            programs: programs.into_iter().map(ProgramView::from).collect(),
            outcomes: outcomes.collect(),
            published: names.published,
            learned: names.learned,
            negative: names.negative,
            unfitting: names.unfitting.total(),
            map_fill: share(names.published + names.learned, names.max_names),
            memory_fill: share(names.store.used, names.store.total),
            lease_seconds: (lease.remaining_ms > 0).then(|| lease.remaining_ms as f64 / 1000.0),
            detail,
        }
    }
}

impl From<ProgramStatus> for ProgramView {
    fn from(status: ProgramStatus) -> Self {
        let ProgramStatus { name, state, instructions, load_ms, why, verifier } = status;
        let (name, state) = (name.into_owned(), state.label().to_owned());
        Self { name, state, instructions, load_ms, why, verifier }
    }
}

/// One interface.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct InterfaceView {
    /// Its name.
    pub name: String,
    /// `served`, `waiting` or `refused`.
    #[serde(default)]
    pub state: String,
    /// `native`, `generic`, `tcx`, `clsact` or `none`.
    pub hook: String,
    /// Why this hook, or why none.
    pub why: String,
    /// Replies so far.
    pub replies: u64,
}

/// One program of the fast path.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ProgramView {
    /// Its name.
    pub name: String,
    /// `loading`, `loaded`, `refused` (not tried again) or `failed` (tried again).
    pub state: String,
    /// Instructions that the verifier looked at; null: the kernel does not tell (before 5.16).
    pub instructions: Option<u32>,
    /// How long the kernel took; null: it is at it.
    pub load_ms: Option<f64>,
    /// Why it is not loaded.
    pub why: Option<String>,
    /// The last lines of the verifier, if it refused.
    pub verifier: Vec<String>,
}

/// A certificate in use.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CertificateStatus {
    /// What for: `api`, `health-client`...
    pub purpose: String,
    /// Common name of its subject.
    pub subject: Option<String>,
    /// End, in seconds since 1970.
    pub not_after: f64,
    /// Why newer files cannot be used, if that is so.
    pub error: Option<String>,
}
