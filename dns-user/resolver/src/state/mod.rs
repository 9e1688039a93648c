//! The server state: the [`State`] from which queries are answered, and its replacement.
//!
//! A query loads the state once and is answered from it, even if another one is installed in the
//! meantime. Only [`ServerState`] replaces the state; it notifies the fast path and the health
//! tracker.

mod published;
mod route;
mod routes;

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use self::published::PublishedNames;
pub(crate) use self::route::Route;
pub use self::routes::{ByDomain, Routes};

use crate::consul::ConsulNames;
use dns_core::{
    catalog::Snapshot,
    name::{Name, NameRef},
    resolve::{Health, Resolution, resolve_local},
};
use dns_fastpath::{FastPathHandle, NameSource};
use dns_health::Tracker;

/// The data from which queries are answered at one moment; never changed, only replaced.
#[derive(Clone)]
pub struct State {
    /// Names of the fleet.
    pub snapshot: Arc<Snapshot>,
    /// Answerers of all other names.
    pub routes: Arc<Routes>,
    /// Domains of all records that have ever been in use.
    domains: Arc<HashSet<Name>>,
}

impl State {
    /// Returns whether `domain` (wire format) is or was one of the records.
    fn had_domain(&self, domain: &[u8]) -> bool {
        self.domains.contains(domain)
    }

    /// Returns a copy with another snapshot, or other routes, or both.
    fn with(&self, snapshot: Option<Arc<Snapshot>>, routes: Option<Arc<Routes>>) -> Self {
        let mut state = self.clone();
        if let Some(snapshot) = snapshot {
            Arc::make_mut(&mut state.domains).extend(snapshot.domains().cloned());
            state.snapshot = snapshot;
        }
        state.routes = routes.unwrap_or(state.routes);
        state
    }
}

/// The current state, and the components that follow it.
pub struct ServerState {
    state: ArcSwap<State>,
    /// Health of instances for answers.
    health: Arc<dyn Health + Send + Sync>,
    pub(crate) fast_path: FastPathHandle,
    /// The health tracker; `None` while health checks are off.
    tracker: Option<Arc<Tracker>>,
    /// Consul's names; `None` without Consul.
    consul: Option<Arc<ConsulNames>>,
    /// Held while the fast path is updated, so that it receives the newest state last.
    publishing: Mutex<()>,
    /// Incremented when the state has changed.
    generation: AtomicU64,
}

/// Result of [`ServerState::look_up`], which never waits.
#[derive(Debug)]
pub enum LookedUp {
    /// The resolution of a local name.
    Found(Resolution),
    /// The query must wait for first checks: use [`ServerState::look_up_checked`].
    NotChecked,
}

impl ServerState {
    /// Creates a state that answers from `snapshot` without routes until others are installed.
    pub(crate) fn new(
        snapshot: Snapshot,
        health: Arc<dyn Health + Send + Sync>,
        fast_path: FastPathHandle,
        tracker: Option<Arc<Tracker>>,
        consul: Option<Arc<ConsulNames>>,
    ) -> Self {
        let state = State {
            domains: Arc::new(snapshot.domains().cloned().collect()),
            snapshot: Arc::new(snapshot),
            routes: Arc::new(Routes::default()),
        };
        Self {
            state: ArcSwap::from_pointee(state),
            health,
            fast_path,
            tracker,
            consul,
            publishing: Mutex::new(()),
            generation: AtomicU64::new(0),
        }
    }

    /// Returns the current state. Each query calls this once.
    #[inline]
    pub fn state(&self) -> arc_swap::Guard<Arc<State>> {
        self.state.load()
    }

    /// Returns the current state, for longer use.
    pub fn state_full(&self) -> Arc<State> {
        self.state.load_full()
    }

    /// Returns the current snapshot.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.state.load().snapshot.clone()
    }

    /// Installs a new snapshot.
    pub fn install(&self, snapshot: Arc<Snapshot>) {
        self.change(Some(snapshot), None);
    }

    /// Installs routes. Updates the fast path, because a name may have moved to another answerer or
    /// to the fleet.
    pub fn set_routes(&self, routes: Routes) {
        self.change(None, Some(routes));
    }

    /// Installs a new snapshot, other routes, or both atomically.
    pub fn change(&self, snapshot: Option<Arc<Snapshot>>, routes: Option<Routes>) {
        let routes = routes.map(Arc::new);
        if snapshot.is_none() && routes.is_none() {
            return;
        }
        self.state.rcu(|state| state.with(snapshot.clone(), routes.clone()));
        self.generation.fetch_add(1, Ordering::Release);
        // Another server or the fleet may now be responsible for any name.
        self.fast_path.void_answers();
        self.publish();
        if let (Some(tracker), Some(snapshot)) = (&self.tracker, snapshot) {
            tracker.install(snapshot);
        }
    }

    /// Publishes the current state to the interfaces.
    pub(crate) fn publish(&self) {
        let _newest_last = self.publishing.lock();
        self.fast_path.install(&self.published_names());
    }

    /// Publishes Consul's names again after a change of their zone.
    pub(crate) fn consul_changed(&self) {
        let Some(consul) = &self.consul else { return };
        let _newest_last = self.publishing.lock();
        self.fast_path.refresh(&self.published_names(), &consul.domains());
    }

    /// Returns the names that interfaces may answer now.
    fn published_names(&self) -> Arc<dyn NameSource> {
        let consul = self.consul.as_ref().map(|names| names.published());
        Arc::new(PublishedNames { state: self.state_full(), consul })
    }

    /// Resolves a local name of `state` for a client's query, tracks the name and publishes it.
    /// Never waits.
    pub fn look_up(&self, state: &State, name: &Name) -> LookedUp {
        let resolution = resolve_local(&state.snapshot, &*self.health, name);
        if self.tracker.is_some() && resolution.checks.tracked && resolution.checks.synchronous {
            return LookedUp::NotChecked;
        }
        self.asked(name, &resolution);
        self.fast_path.learn(name);
        LookedUp::Found(resolution)
    }

    /// Like [`Self::look_up`], but waits for first checks of instances that have not been checked
    /// yet (`y1`).
    pub async fn look_up_checked(&self, state: &State, name: &Name) -> Resolution {
        let resolution = resolve_local(&state.snapshot, &*self.health, name);
        self.asked(name, &resolution);
        let resolution = match &self.tracker {
            Some(tracker) if resolution.checks.tracked && resolution.checks.synchronous => {
                tracker.first_checks(name, &resolution).await;
                resolve_local(&state.snapshot, &*self.health, name)
            }
            _ => resolution,
        };
        self.fast_path.learn(name);
        resolution
    }

    /// Reports a query for a name with a cached answer to the tracker and to the fast path, which
    /// may have withdrawn the name since. Returns false if the tracker does not know the name (any
    /// more), so that the caller must look it up.
    #[inline]
    pub(crate) fn asked_again(&self, name: NameRef<'_>, is_tracked: bool) -> bool {
        let is_known = !is_tracked || self.tracker.as_ref().is_none_or(|tracker| tracker.asked_again(name));
        if is_known {
            self.fast_path.learn(name);
        }
        is_known
    }

    /// Reports a query for a name to the tracker.
    fn asked(&self, name: &Name, resolution: &Resolution) {
        if let Some(tracker) = &self.tracker
            && resolution.checks.tracked
        {
            tracker.asked(name, resolution);
        }
    }

    /// Returns a number that increases whenever a resolution may change. Must be read before
    /// resolving: a cached answer is valid as long as the number stays the same.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        let health = self.tracker.as_ref().map_or(0, |tracker| tracker.states().changes());
        self.generation.load(Ordering::Acquire).wrapping_add(health)
    }
}
