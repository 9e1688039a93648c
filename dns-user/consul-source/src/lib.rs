//! Live source of Consul's names: queries Consul's HTTP API and keeps a catalog of `dns-consul` up to date.
//!
//! Bottom-up:
//!
//! * `connections`: TCP and TLS to one agent, HTTP/1.1 and HTTP/2, limited in number; files of certificates that may
//!   change at run time.
//! * `agent`: the rate of requests, and the pauses after failures; sends a request to the first agent that responds.
//! * `progress`: the index of blocking queries, and the age of old responses.
//! * `api`: parses Consul's JSON to registrations.
//! * `requests`: the topics, and one-time and repeated requests.
//! * `known`: all data loaded so far, demands of the resolver, and catalog snapshots.
//! * `watcher`: the schedule of requests.
//! * [`LiveConsul`]: the handle.

mod agent;
mod api;
mod connections;
mod known;
mod progress;
mod requests;
mod watcher;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};

use self::{known::Demand, progress::Running, watcher::CatalogWatcher};
use dns_consul::{
    Lack,
    catalog::Place,
    source::{CatalogView, LiveSettings, LiveStatus},
};
use dns_upstream::HostNames;

/// A live source; dropping it ends its tasks.
#[derive(Debug)]
pub struct LiveConsul {
    demands: mpsc::Sender<Demand>,
    views: watch::Receiver<Arc<CatalogView>>,
    status: Arc<Mutex<LiveStatus>>,
    /// Whether every service has a watch.
    watches_all: Arc<AtomicBool>,
    /// The watcher's task, which owns all others.
    _task: Running,
}

impl LiveConsul {
    /// Starts the tasks; requires a tokio runtime. `names` resolves the agents' host names.
    pub fn start(settings: LiveSettings, names: &Arc<HostNames>) -> Self {
        let (demands, demanded) = mpsc::channel(1024);
        let status = Arc::new(Mutex::new(LiveStatus::default()));
        let watches_all = Arc::new(AtomicBool::new(false));
        let (views, _task) = CatalogWatcher::spawn(
            settings,
            names,
            status.clone(),
            watches_all.clone(),
            demanded,
        );
        Self {
            demands,
            views,
            status,
            watches_all,
            _task,
        }
    }

    /// Returns a receiver of catalog snapshots.
    pub fn views(&self) -> watch::Receiver<Arc<CatalogView>> {
        self.views.clone()
    }

    /// Requests a part that the last snapshot lacks. Never blocks.
    pub fn demand(&self, lack: Lack) {
        // If the queue is full, the next query repeats it.
        let _ = self.demands.try_send(Demand::Lack(lack));
    }

    /// Returns whether every service is watched, so that reports of use are unnecessary.
    pub fn watches_all(&self) -> bool {
        self.watches_all.load(Ordering::Relaxed)
    }

    /// Reports a query for a service; names are in lower case. Never blocks.
    pub fn asked(&self, place: Place, service: String) {
        // If the queue is full, the next query repeats it.
        let _ = self.demands.try_send(Demand::Queried((place, service)));
    }

    /// Reports services that interfaces answer for, so that they keep or get a watch. Never blocks.
    pub fn used(&self, services: Vec<(Place, String)>) {
        // If the queue is full, the next report follows soon.
        let _ = self.demands.try_send(Demand::Used(services));
    }

    /// Returns the state for operators.
    pub fn status(&self) -> LiveStatus {
        self.status.lock().clone()
    }
}

#[cfg(test)]
mod tests;
