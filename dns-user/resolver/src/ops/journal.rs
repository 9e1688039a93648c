//! What was read anew and what could not be used: for metrics and status.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

use super::{metrics::WholeMetrics, tap::seconds_since_1970};

/// Something that happened once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// When, in seconds since 1970.
    pub time: f64,
    /// What, in a few words.
    pub detail: String,
    /// How long it took, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub took_ms: Option<f64>,
}

/// Remembers the last reload and the last failure of each kind of files, and
/// counts them; clones share it.
#[derive(Clone)]
pub struct Journal {
    /// What the clones share.
    shared: Arc<Shared>,
}

/// What all handles have in common.
struct Shared {
    /// The counters.
    metrics: WholeMetrics,
    /// Start of the server.
    started: Instant,
    /// The same in seconds since 1970.
    started_at: f64,
    /// What is remembered.
    past: Mutex<Past>,
}

/// What is remembered.
#[derive(Default)]
struct Past {
    /// By kind.
    reloads: BTreeMap<String, Event>,
    /// By kind.
    failures: BTreeMap<String, Event>,
    /// When the records in force were read.
    records_read: Option<Instant>,
}

/// Kinds of files that are read again while the server runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// config.json.
    Config,
    /// records.json.
    Records,
    /// Alias files.
    Aliases,
    /// Handler files.
    Handlers,
    /// Addresses files.
    Addresses,
    /// Definition files of Consul's names.
    Consul,
    /// Certificates and keys.
    Certificates,
}

impl Kind {
    /// All of them.
    pub const ALL: &'static [Self] = &[
        Self::Config,
        Self::Records,
        Self::Aliases,
        Self::Handlers,
        Self::Addresses,
        Self::Consul,
        Self::Certificates,
    ];

    /// Label in metrics and status.
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

impl Journal {
    /// A journal that begins now.
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

    /// The counters.
    pub fn metrics(&self) -> &WholeMetrics {
        &self.shared.metrics
    }

    /// Start of the server.
    pub fn started(&self) -> Instant {
        self.shared.started
    }

    /// Start of the server, in seconds since 1970.
    pub fn started_at(&self) -> f64 {
        self.shared.started_at
    }

    /// Files of `kind` were put in force, after `took`.
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

    /// Files of `kind` could not be used.
    pub fn failed(&self, kind: Kind, detail: impl Into<String>) {
        self.shared.metrics.reload_failed(kind);
        let event = Event { time: seconds_since_1970(), detail: detail.into(), took_ms: None };
        self.past().failures.insert(kind.label().to_owned(), event);
    }

    /// Last time that files of each kind were put in force.
    pub fn reloads(&self) -> BTreeMap<String, Event> {
        self.past().reloads.clone()
    }

    /// Last time that files of each kind could not be used.
    pub fn failures(&self) -> BTreeMap<String, Event> {
        self.past().failures.clone()
    }

    /// How old the records in force are; `None`: none were read.
    pub fn records_age(&self) -> Option<Duration> {
        self.past().records_read.map(|read| read.elapsed())
    }

    /// What is remembered.
    fn past(&self) -> MutexGuard<'_, Past> {
        // Nothing in a locked section leaves the value half changed.
        self.shared.past.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_each_kind_is_remembered() {
        let journal = Journal::new(WholeMetrics::new().unwrap());
        assert_eq!(journal.records_age(), None);
        journal.reloaded(Kind::Records, Duration::from_millis(5), "version 1");
        journal.reloaded(Kind::Records, Duration::from_millis(6), "version 2");
        journal.failed(Kind::Handlers, "h.json: line 1: no domain");
        assert_eq!(journal.reloads()["records"].detail, "version 2");
        assert_eq!(journal.failures()["handlers"].detail, "h.json: line 1: no domain");
        assert!(journal.records_age().is_some());
    }
}
