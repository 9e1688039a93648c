//! State of the server's files and sockets and the history of reloads, shared by the daemon, the API and the `status` command.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use super::tap::seconds_since_1970;
use dns_core::config::{ConfigError, one_line};

/// Maximum number of warnings kept per kind of file.
const MAX_WARNINGS: usize = 100;

/// Maximum number of errors kept per kind of file.
const MAX_ERRORS: usize = 1000;

/// The state of files and sockets, and the history of their changes. Clones share it.
#[derive(Clone)]
pub struct ServiceStatus {
    shared: Arc<ServiceShared>,
}

struct ServiceShared {
    started: Instant,
    /// The same time in seconds since 1970.
    started_at: f64,
    changing: Mutex<Changing>,
}

/// The part of a [`ServiceStatus`] that changes.
#[derive(Default)]
struct Changing {
    state: ServiceReport,
    /// History of each kind of file, by label.
    reloads: BTreeMap<&'static str, Reloads>,
    /// Time at which the records in use were read.
    records_read: Option<Instant>,
}

/// The state of files and sockets.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ServiceReport {
    /// Listen addresses, for both UDP and TCP.
    pub listen: Vec<SocketAddr>,
    /// Reason why the fast path is off; `None` if it is on.
    pub fast_path_off: Option<FastPathOff>,
    /// Remarks on the configuration for the operator.
    pub notes: Vec<String>,
    /// Version of the records in use; `None` if none were read or they have no version.
    pub records_version: Option<u64>,
    /// Number of instances served.
    pub instances: usize,
    /// Number of aliases, from alias files and records.
    pub aliases: usize,
    /// State of each kind of file, by label.
    pub files: BTreeMap<&'static str, FileState>,
    /// Failure of the latest self-checks, if clients got no answers either.
    pub upcheck_error: Option<String>,
    /// Listen addresses that do not answer, with the reason.
    pub silent_addresses: Vec<String>,
    /// Parts for operators that are configured but off, with the reason.
    pub parts_off: Vec<(Part, String)>,
    /// Settings that were changed and take effect only after a restart.
    pub pending_restart: Vec<&'static str>,
    /// Reason why attached programs have no attacher.
    pub attacher_problem: Option<String>,
    /// Time of the main loop's last turn; `None` before the first.
    #[serde(skip)]
    pub last_turn: Option<Instant>,
}

/// A part of the server other than DNS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Part {
    /// The API's port.
    Api,
    /// The control socket.
    Control,
    /// Access of a group to the control socket.
    ControlGroup,
    /// The metrics port.
    Metrics,
    /// Health checks of instances.
    HealthChecks,
    /// The log of whole messages.
    Dnstap,
    /// The groups of this machine's jobs.
    LocalGroups,
}

/// Reason why the fast path is off.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum FastPathOff {
    /// The configuration switches it off, or it is being loaded.
    Intended(String),
    /// It could not be loaded.
    Failed(String),
}

impl FastPathOff {
    /// Returns the reason, which `status` shows.
    pub fn why(&self) -> &str {
        let (Self::Intended(why) | Self::Failed(why)) = self;
        why
    }
}

/// The state of one kind of file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FileState {
    /// Files of the last attempt.
    #[serde(rename = "paths")]
    pub files: Vec<PathBuf>,
    /// Whether any contents are in use.
    pub in_use: bool,
    /// Errors of the last attempt; empty if it succeeded.
    pub errors: Vec<String>,
    /// Items skipped in the contents in use, up to a limit.
    pub warnings: Vec<String>,
}

impl FileState {
    /// Returns the errors of the last attempt in one line; `None` if it succeeded.
    pub fn problem(&self) -> Option<String> {
        (!self.errors.is_empty()).then(|| one_line(&self.errors))
    }
}

impl Default for ServiceStatus {
    /// Creates an empty status with the current time as the start of the server.
    fn default() -> Self {
        let reloads = Kind::ALL
            .iter()
            // Each counter has a zero: Prometheus computes no increase for one whose first sample
            // is a failure.
            .map(|kind| (kind.label(), Reloads::default()))
            .collect();
        let changing = Mutex::new(Changing {
            reloads,
            ..Changing::default()
        });
        let started = Instant::now();
        // Kept beside the monotonic time: a jump of the wall clock must not change the uptime.
        let started_at = seconds_since_1970();
        Self {
            shared: Arc::new(ServiceShared {
                started,
                started_at,
                changing,
            }),
        }
    }
}

impl ServiceStatus {
    /// Returns the time since the start of the server.
    pub fn uptime(&self) -> Duration {
        self.shared.started.elapsed()
    }

    /// Returns the start time of the server, in seconds since 1970.
    pub fn started_at(&self) -> f64 {
        self.shared.started_at
    }

    /// Returns a copy of the current state.
    pub fn state(&self) -> ServiceReport {
        self.lock().state.clone()
    }

    pub(crate) fn reloads(&self) -> BTreeMap<&'static str, Reloads> {
        self.lock().reloads.clone()
    }

    /// Returns the age of the records in use; `None` if none were read.
    pub fn records_age(&self) -> Option<Duration> {
        self.lock().records_read.map(|read| read.elapsed())
    }

    pub(crate) fn stays_off(&self, part: Part, problem: String) {
        self.set_off(part, Some(problem));
    }

    /// Records why a part is off; `None`: it works. Logs each change.
    pub(crate) fn set_off(&self, part: Part, problem: Option<String>) {
        let mut before = None;
        self.change(|state| {
            let mut of_part = state.parts_off.iter();
            if let Some(place) = of_part.position(|(off, _)| *off == part) {
                before = Some(state.parts_off.swap_remove(place).1);
            }
            state
                .parts_off
                .extend(problem.clone().map(|why| (part, why)));
        });
        match (before, problem) {
            (before, Some(problem)) if before.as_ref() != Some(&problem) => warn!("{problem}"),
            (Some(before), None) => info!("no longer: {before}"),
            _ => {}
        }
    }

    /// Returns whether contents of this kind are in use.
    pub fn is_in_use(&self, kind: Kind) -> bool {
        self.lock()
            .state
            .files
            .get(kind.label())
            .is_some_and(|state| state.in_use)
    }

    /// Returns the result of a reload: what is in use and what failed, for each kind of file.
    pub(crate) fn reloaded(&self) -> Reloaded {
        let mut reloaded = Reloaded::default();
        let Changing { state, reloads, .. } = &*self.lock();
        for (kind, state) in &state.files {
            match state.problem() {
                Some(problem) => reloaded.failed.push(format!("{kind}: {problem}")),
                None => {
                    let detail = reloads.get(kind).and_then(|reloads| reloads.last.as_ref());
                    let detail = detail.map_or("", |event| event.detail.as_str());
                    reloaded
                        .done
                        .push(format!("{kind}: {} file(s), {detail}", state.files.len()));
                }
            }
        }
        reloaded
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut ServiceReport)) {
        change(&mut self.lock().state);
    }

    /// Records that new contents are in use, `took` after the change was noticed; `warnings` lists
    /// the skipped items.
    pub(crate) fn loaded(
        &self,
        kind: Kind,
        files: Vec<PathBuf>,
        mut warnings: Vec<String>,
        took: Duration,
        detail: &str,
    ) {
        // A records file of 100,000 rows may be wrong in each, and every `status` carries this
        // list.
        let more = warnings.len().saturating_sub(MAX_WARNINGS);
        warnings.truncate(MAX_WARNINGS);
        if more > 0 {
            warnings.push(format!("and {more} more"));
        }
        let file_state = FileState {
            files,
            in_use: true,
            errors: Vec::new(),
            warnings,
        };
        let Changing {
            state,
            reloads,
            records_read,
        } = &mut *self.lock();
        // Replaces the errors of an earlier attempt: what is in use now is the newest version.
        state.files.insert(kind.label(), file_state);
        reloads
            .entry(kind.label())
            .or_default()
            .reloaded(took, detail);
        if kind == Kind::Records {
            *records_read = Some(Instant::now());
        }
    }

    /// Records that files are invalid; the contents in use stay.
    pub(crate) fn refused(&self, kind: Kind, files: Vec<PathBuf>, errors: &[ConfigError]) {
        let Changing { state, reloads, .. } = &mut *self.lock();
        // `in_use` and the warnings stay, which describe the contents in use.
        let file_state = state.files.entry(kind.label()).or_default();
        file_state.files = files;
        file_state.errors = errors
            .iter()
            .take(MAX_ERRORS)
            .map(ToString::to_string)
            .collect();
        if errors.len() > MAX_ERRORS {
            file_state
                .errors
                .push(format!("and {} more", errors.len() - MAX_ERRORS));
        }
        let problem = file_state.problem().unwrap_or_default();
        reloads.entry(kind.label()).or_default().failed(problem);
    }

    /// Locks the changing part; it is plain data, so it stays valid if a holder panicked.
    fn lock(&self) -> MutexGuard<'_, Changing> {
        self.shared.changing.lock()
    }
}

//----------- Reloads --------------------------------------------------------

/// Result of a reload.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Reloaded {
    /// Data that was loaded and applied, with a summary.
    pub done: Vec<String>,
    /// Data that could not be loaded; its last good version stays in use.
    pub failed: Vec<String>,
}

/// A reload or a failed reload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Time of the event, in seconds since 1970.
    pub time: f64,
    /// Summary of the event.
    pub detail: String,
    /// Duration of the reload, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub took_ms: Option<f64>,
}

/// Bounds of the buckets of [`Reloads::durations`], in seconds: 1 ms to 10 s.
pub(super) const DURATIONS: [f64; 13] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

/// The reloads of one kind of file.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reloads {
    /// The last successful reload.
    pub(super) last: Option<Event>,
    pub(super) last_failure: Option<Event>,
    /// Number of successful reloads.
    pub(super) count: u64,
    /// Number of failed reloads.
    pub(super) failures: u64,
    /// Successful reloads by duration; the last bucket has no bound.
    pub(super) durations: [u64; DURATIONS.len() + 1],
    /// Total duration of the successful reloads.
    pub(super) took: Duration,
}

impl Reloads {
    fn reloaded(&mut self, took: Duration, detail: &str) {
        let seconds = took.as_secs_f64();
        self.count += 1;
        self.durations[DURATIONS
            .iter()
            .position(|bound| seconds <= *bound)
            .unwrap_or(DURATIONS.len())] += 1;
        self.took += took;
        let took_ms = Some(seconds * 1000.0);
        self.last = Some(Event {
            time: seconds_since_1970(),
            detail: detail.to_owned(),
            took_ms,
        });
    }

    fn failed(&mut self, detail: String) {
        self.failures += 1;
        self.last_failure = Some(Event {
            time: seconds_since_1970(),
            detail,
            took_ms: None,
        });
    }
}

/// Kinds of files that are reloaded at runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The configuration, config.json.
    Config,
    /// The BOSH records, records.json.
    Records,
    /// Alias files, merged in order.
    Aliases,
    /// Files that define handlers.
    Handlers,
    /// Files with additional listen addresses.
    Addresses,
    /// Definition files of Consul names.
    Consul,
}

impl Kind {
    /// Every kind, in order of display.
    pub const ALL: &'static [Self] = &[
        Self::Config,
        Self::Records,
        Self::Aliases,
        Self::Handlers,
        Self::Addresses,
        Self::Consul,
    ];

    /// Returns the label used in metrics and status.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::Records => "records",
            Self::Aliases => "aliases",
            Self::Handlers => "handlers",
            Self::Addresses => "addresses",
            Self::Consul => "consul",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_keeps_last_event() {
        let status = ServiceStatus::default();
        assert_eq!(status.records_age(), None);
        for (took, detail) in [(5, "version 1"), (6, "version 2"), (20_000, "version 3")] {
            let took = Duration::from_millis(took);
            status.loaded(Kind::Records, Vec::new(), Vec::new(), took, detail);
        }
        status.refused(
            Kind::Handlers,
            Vec::new(),
            &[ConfigError::of_file("h.json", "no domain")],
        );
        let detail = |event: &Option<Event>| event.as_ref().unwrap().detail.clone();
        let reloads = status.reloads();
        let records = &reloads["records"];
        let handlers = &reloads["handlers"];
        assert_eq!(detail(&records.last), "version 3");
        assert_eq!(detail(&handlers.last_failure), "h.json: no domain");
        assert_eq!(
            (records.count, records.failures, handlers.failures),
            (3, 0, 1)
        );
        assert_eq!(
            (
                records.durations[2],
                records.durations[3],
                records.durations[13]
            ),
            (1, 1, 1)
        );
        assert!(status.records_age().is_some());
    }
}
