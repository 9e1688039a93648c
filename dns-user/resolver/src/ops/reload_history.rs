//! History of reloads and failed reloads, for metrics and status.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

use super::{metrics::WholeMetrics, tap::seconds_since_1970};

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
