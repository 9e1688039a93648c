//! The handle of a live source: its configuration, the pictures of the catalog, and its state.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use serde::Serialize;
use tokio::{
    sync::{mpsc, watch},
    task::AbortHandle,
};

use crate::{
    follow::Follower,
    known::{Key, Known},
};
use dns_consul::{
    Lack,
    catalog::registrations::{Pending, Registrations},
    http_api::HttpApi,
};

/// Consul's name for a datacenter without one.
pub(crate) const DEFAULT_DATACENTER: &str = "dc1";

/// Configuration of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The agents and the limits of questions.
    pub api: HttpApi,
    /// The token.
    pub token_file: Option<PathBuf>,
    /// The datacenter of names without one; `None` for the agent's.
    pub datacenter: Option<String>,
    /// Whether any of Consul's servers may answer.
    pub allow_stale: bool,
    /// Age up to which the last answer is served while Consul fails to give another.
    pub max_stale: Duration,
    /// Time of failures after which a part of the catalog is reported as stale.
    pub stale_after: Duration,
}

/// The catalog as far as it has been read.
#[derive(Clone, Debug, Default)]
pub struct Picture {
    /// The registrations, with the parts that are pending.
    pub registrations: Registrations,
    /// The agent's datacenter in lower case; `None` before its first answer.
    pub datacenter: Option<String>,
    /// The agent's node; empty before its first answer.
    pub node_name: String,
}

impl Picture {
    /// Returns whether everything of the own datacenter has been read.
    pub fn is_complete(&self) -> bool {
        let Pending { datacenters, services } = &self.registrations.pending;
        self.datacenter.as_ref().is_some_and(|own| {
            !datacenters.contains(own) && services.iter().all(|(datacenter, _)| datacenter != own)
        })
    }
}

/// State of a source.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Status {
    /// The agent in use.
    pub address: String,
    /// Whether no agent answers.
    pub away: bool,
    /// Seconds since the last answer of a server with a leader; `None` before the first one.
    pub last_contact_seconds: Option<f64>,
    /// Whether the answers are older than `max_stale`: the catalog is empty.
    pub expired: bool,
    /// Datacenter of the agent.
    pub datacenter: Option<String>,
    /// Services by name.
    pub services: usize,
    /// Services whose instances have been read.
    pub services_told: usize,
    /// Services whose instances are watched; the others are fetched in turn.
    pub services_watched: usize,
    /// Nodes.
    pub nodes: usize,
    /// Instances.
    pub instances: usize,
    /// Open connections.
    pub connections: usize,
    /// Requests so far.
    pub requests: u64,
    /// Requests that failed.
    pub failures: u64,
    /// Answers whose index was smaller than the one before.
    pub index_resets: u64,
    /// Number of pictures.
    pub pictures: u64,
    /// Error of the last request, if it failed.
    pub problem: Option<String>,
    /// Questions that have failed for longer than `stale_after`: their old answers are served.
    pub stale: usize,
    /// Age in seconds of the oldest of these answers.
    pub oldest_stale_seconds: Option<f64>,
    /// The oldest of these questions and the reason of its failure.
    pub stale_problem: Option<String>,
    /// Entries of answers that are invalid and are left out.
    pub invalid_entries: usize,
    /// The first of them.
    pub invalid_problem: Option<String>,
}

/// A live source; dropping it ends its tasks.
#[derive(Debug)]
pub struct Source {
    /// Wishes of the resolver.
    demands: mpsc::Sender<Demand>,
    /// The newest picture.
    pictures: watch::Receiver<Arc<Picture>>,
    /// The state for operators.
    status: Arc<Mutex<Status>>,
    /// Whether every service has a watch.
    watches_all: Arc<AtomicBool>,
    /// The follower's task, which owns all others.
    task: AbortHandle,
}

/// A wish of the resolver.
#[derive(Debug)]
pub(crate) enum Demand {
    /// A query waits for a missing part.
    Lack(Lack),
    /// A query asked for this service.
    Asked(Key),
    /// Interfaces answer for these.
    Used(Vec<Key>),
}

impl Source {
    /// Starts the tasks; requires a tokio runtime.
    pub fn start(settings: Settings) -> Self {
        let (demands, demanded) = mpsc::channel(1024);
        let mut known = Known::default();
        known.own.clone_from(&settings.datacenter);
        let (shown, pictures) = watch::channel(Arc::new(picture(&known, false)));
        let status = Arc::new(Mutex::new(Status::default()));
        let watches_all = Arc::new(AtomicBool::new(false));
        let task = Follower::spawn(settings, known, shown, status.clone(), watches_all.clone(), demanded);
        Self { demands, pictures, status, watches_all, task }
    }

    /// Returns the channel of pictures.
    pub fn pictures(&self) -> watch::Receiver<Arc<Picture>> {
        self.pictures.clone()
    }

    /// Asks for a part that the last picture lacks. Never blocks.
    pub fn demand(&self, lack: Lack) {
        // If the queue is full, the next query repeats it.
        let _ = self.demands.try_send(Demand::Lack(lack));
    }

    /// Returns whether every service has a watch, so that reports of use are unnecessary.
    pub fn watches_all(&self) -> bool {
        self.watches_all.load(Ordering::Relaxed)
    }

    /// Reports a query for a service; names in lower case. Never blocks.
    pub fn asked(&self, datacenter: &str, service: &str) {
        // If the queue is full, the next query repeats it.
        let _ = self.demands.try_send(Demand::Asked((datacenter.to_owned(), service.to_owned())));
    }

    /// Reports services that interfaces answer for, so that they keep or get a watch. Never blocks.
    pub fn used(&self, services: Vec<(String, String)>) {
        // The next report comes soon.
        let _ = self.demands.try_send(Demand::Used(services));
    }

    /// Returns the state for operators.
    pub fn status(&self) -> Status {
        self.status.lock().clone()
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Returns a picture; an empty one if the answers have expired.
pub(crate) fn picture(known: &Known, expired: bool) -> Picture {
    let own = DEFAULT_DATACENTER;
    let registrations = if expired { known.nothing(own) } else { known.registrations(own) };
    Picture { registrations, datacenter: known.own.clone(), node_name: known.node_name.clone() }
}
