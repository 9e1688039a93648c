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
use tracing::warn;

use super::{api::Reloaded, metrics::WholeMetrics, tap::seconds_since_1970};
use dns_core::config::{ConfigError, one_line};

/// Maximum number of warnings kept per kind of file.
const MOST_WARNINGS: usize = 100;

/// Maximum number of errors kept per kind of file.
const MOST_ERRORS: usize = 1000;

/// The state of files and sockets, and the history of their changes. Clones share it.
#[derive(Clone)]
pub struct ServiceStatus {
    reload_history: ReloadHistory,
    state: Arc<Mutex<State>>,
}

/// The state of files and sockets.
#[derive(Clone, Debug, Default, Serialize)]
pub struct State {
    /// Listen addresses, for both UDP and TCP.
    pub listen: Vec<SocketAddr>,
    /// Reason why the fast path is off; `None` if it is on.
    pub fast_path_off: Option<FastPathOff>,
    /// Remarks on the configuration for the operator.
    pub notes: Vec<String>,
    /// Number of instances served.
    pub instances: usize,
    /// State of each kind of file, by label.
    pub files: BTreeMap<&'static str, FileState>,
    /// Failure of the latest self-checks, if clients got no answers either.
    pub upcheck_error: Option<String>,
    /// Listen addresses that do not answer, with the reason.
    pub silent_addresses: Vec<String>,
    /// Components that are configured but off, with the reason.
    pub parts_off: Vec<String>,
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

impl ServiceStatus {
    /// Creates an empty status.
    pub fn new(reload_history: ReloadHistory) -> Self {
        Self { reload_history, state: Arc::default() }
    }

    /// Returns the history of reloads and failures.
    pub fn reload_history(&self) -> &ReloadHistory {
        &self.reload_history
    }

    /// Returns a copy of the current state.
    pub fn state(&self) -> State {
        self.lock().clone()
    }

    /// Records a component that stays off.
    pub(crate) fn stays_off(&self, problem: String) {
        warn!("{problem}");
        self.change(|state| state.parts_off.push(problem));
    }

    /// Returns the reason why the newest files of this kind are not in use, if any.
    pub fn error(&self, kind: Kind) -> Option<String> {
        self.lock().files.get(kind.label())?.problem()
    }

    /// Returns whether contents of this kind are in use.
    pub fn is_in_use(&self, kind: Kind) -> bool {
        self.lock().files.get(kind.label()).is_some_and(|state| state.in_use)
    }

    /// Returns the result of a reload: what is in use and what failed, for each kind of file.
    pub(crate) fn reloaded(&self) -> Reloaded {
        let mut reloaded = Reloaded::default();
        let last = self.reload_history.reloads();
        for (kind, state) in &self.lock().files {
            match state.problem() {
                Some(problem) => reloaded.failed.push(format!("{kind}: {problem}")),
                None => {
                    let detail = last.get(*kind).map_or("", |event| event.detail.as_str());
                    reloaded.done.push(format!("{kind}: {} file(s), {detail}", state.files.len()));
                }
            }
        }
        reloaded
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
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
        let more = warnings.len().saturating_sub(MOST_WARNINGS);
        warnings.truncate(MOST_WARNINGS);
        if more > 0 {
            warnings.push(format!("and {more} more"));
        }
        self.reload_history.reloaded(kind, took, detail);
        let state = FileState { files, in_use: true, errors: Vec::new(), warnings };
        self.lock().files.insert(kind.label(), state);
    }

    /// Records that files are invalid; the contents in use stay.
    pub(crate) fn refused(&self, kind: Kind, files: Vec<PathBuf>, errors: &[ConfigError]) {
        let mut state = self.lock();
        let file_state = state.files.entry(kind.label()).or_default();
        file_state.files = files;
        file_state.errors = errors.iter().take(MOST_ERRORS).map(ToString::to_string).collect();
        if errors.len() > MOST_ERRORS {
            file_state.errors.push(format!("and {} more", errors.len() - MOST_ERRORS));
        }
        self.reload_history.failed(kind, file_state.problem().unwrap_or_default());
    }

    /// Locks the state; it is plain data, so it stays valid if a holder panicked.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

//----------- ReloadHistory --------------------------------------------------

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

/// Counts reloads and failures and keeps the last of each per kind of file. Clones share it.
#[derive(Clone)]
pub struct ReloadHistory {
    shared: Arc<Shared>,
}

struct Shared {
    metrics: WholeMetrics,
    started: Instant,
    /// The same time in seconds since 1970.
    started_at: f64,
    past: Mutex<Past>,
}

#[derive(Default)]
struct Past {
    reloads: BTreeMap<String, Event>,
    failures: BTreeMap<String, Event>,
    /// Time at which the records in use were read.
    records_read: Option<Instant>,
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
    /// Certificates and private keys.
    Certificates,
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
        Self::Certificates,
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
            Self::Certificates => "certificates",
        }
    }
}

impl ReloadHistory {
    /// Creates an empty history with the current time as the start of the server.
    pub fn new(metrics: WholeMetrics) -> Self {
        Self {
            shared: Arc::new(Shared {
                metrics,
                started: Instant::now(),
                started_at: seconds_since_1970(),
                past: Mutex::new(Past::default()),
            }),
        }
    }

    /// Returns the server-wide metrics.
    pub fn metrics(&self) -> &WholeMetrics {
        &self.shared.metrics
    }

    /// Returns the start time of the server.
    pub fn started(&self) -> Instant {
        self.shared.started
    }

    /// Returns the start time of the server, in seconds since 1970.
    pub fn started_at(&self) -> f64 {
        self.shared.started_at
    }

    /// Records that files of `kind` were reloaded, after `took`.
    pub fn reloaded(&self, kind: Kind, took: Duration, detail: impl Into<String>) {
        self.shared.metrics.reloaded(kind, took);
        let took_ms = Some(took.as_secs_f64() * 1000.0);
        let event = Event { time: seconds_since_1970(), detail: detail.into(), took_ms };
        let mut past = self.past();
        past.reloads.insert(kind.label().to_owned(), event);
        if kind == Kind::Records {
            past.records_read = Some(Instant::now());
        }
    }

    /// Records that files of `kind` could not be loaded.
    pub fn failed(&self, kind: Kind, detail: impl Into<String>) {
        self.shared.metrics.reload_failed(kind);
        let event = Event { time: seconds_since_1970(), detail: detail.into(), took_ms: None };
        self.past().failures.insert(kind.label().to_owned(), event);
    }

    /// Returns the last reload of each kind.
    pub fn reloads(&self) -> BTreeMap<String, Event> {
        self.past().reloads.clone()
    }

    /// Returns the last failed reload of each kind.
    pub fn failures(&self) -> BTreeMap<String, Event> {
        self.past().failures.clone()
    }

    /// Returns the age of the records in use; `None` if none were read.
    pub fn records_age(&self) -> Option<Duration> {
        self.past().records_read.map(|read| read.elapsed())
    }

    fn past(&self) -> MutexGuard<'_, Past> {
        // No critical section leaves the value half updated.
        self.shared.past.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn journal_keeps_last_event_per_kind() {
        let reload_history = ReloadHistory::new(WholeMetrics::new().unwrap());
        assert_eq!(reload_history.records_age(), None);
        reload_history.reloaded(Kind::Records, Duration::from_millis(5), "version 1");
        reload_history.reloaded(Kind::Records, Duration::from_millis(6), "version 2");
        reload_history.failed(Kind::Handlers, "h.json: line 1: no domain");
        assert_eq!(reload_history.reloads()["records"].detail, "version 2");
        assert_eq!(reload_history.failures()["handlers"].detail, "h.json: line 1: no domain");
        assert!(reload_history.records_age().is_some());
    }
}
