//! The fleet: the [`State`] that answers come from, and who is told when it changes.
//!
//! A query loads the state once and is answered from it, whatever is installed
//! meanwhile. [`Fleet`] is the one place where the state is replaced, and tells the
//! fast path and the health tracker ([`Publish`], [`Track`]).

mod listeners;
mod routes;

use std::{
    collections::HashSet,
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use arc_swap::ArcSwap;

pub use self::{
    listeners::{PassShares, Publish, Track},
    routes::{Answer, ByDomain, Routes},
};
pub(crate) use routes::{ARPA, ROOT};

use dns_core::{
    catalog::Snapshot,
    name::{Name, NameRef},
    resolve::{Health, Resolution, resolve_local},
};

/// What queries are answered from at one moment; never changed, only replaced.
#[derive(Clone)]
pub struct State {
    /// Names of the fleet.
    pub snapshot: Arc<Snapshot>,
    /// Who answers all other names.
    pub routes: Arc<Routes>,
    /// Domains of all records that were ever in force.
    domains: Arc<HashSet<Name>>,
}

impl State {
    /// Whether `domain` (wire format) is or was one of the records.
    pub(crate) fn had_domain(&self, domain: &[u8]) -> bool {
        self.domains.contains(domain)
    }

    /// The same with another snapshot, or other routes, or both.
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

/// The state in force, and what goes with it.
pub struct Fleet {
    /// What queries are answered from.
    state: ArcSwap<State>,
    /// What is known of instances.
    health: Arc<dyn Health + Send + Sync>,
    /// The fast path.
    publisher: Arc<dyn Publish>,
    /// The health tracker; `None`: health checks are off.
    tracker: Option<Arc<dyn Track>>,
    /// Goes up whenever a resolution may come out differently than before.
    generation: AtomicU64,
}

/// What [`Fleet::look_up`] found without waiting.
#[derive(Debug)]
pub enum LookedUp {
    /// This is the answer.
    Found(Resolution),
    /// The first checks are to be waited for: [`Fleet::look_up_checked`].
    NotChecked,
}

impl Fleet {
    /// Answers from `snapshot`, and sends nobody anywhere, until other ones are installed.
    pub fn new(
        snapshot: Snapshot,
        health: Arc<dyn Health + Send + Sync>,
        publisher: Arc<dyn Publish>,
        tracker: Option<Arc<dyn Track>>,
    ) -> Self {
        let state = State {
            domains: Arc::new(snapshot.domains().cloned().collect()),
            snapshot: Arc::new(snapshot),
            routes: Arc::new(Routes::default()),
        };
        Self {
            state: ArcSwap::from_pointee(state),
            health,
            publisher,
            tracker,
            generation: AtomicU64::new(0),
        }
    }

    /// The state in force. A query asks for it once.
    #[inline]
    pub fn state(&self) -> arc_swap::Guard<Arc<State>> {
        self.state.load()
    }

    /// The state in force, for whoever keeps it.
    pub fn state_full(&self) -> Arc<State> {
        self.state.load_full()
    }

    /// The snapshot in force.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.state.load().snapshot.clone()
    }

    /// Puts a new snapshot in force and tells fast path and tracker.
    pub fn install(&self, snapshot: Arc<Snapshot>) {
        self.change(Some(snapshot), None);
    }

    /// Puts other routes in force and tells the fast path: a name may have become
    /// somebody else's, or the fleet's.
    pub fn set_routes(&self, routes: Routes) {
        self.change(None, Some(routes));
    }

    /// Puts a new snapshot, other routes or both in force, at one moment, and tells fast path
    /// and tracker.
    pub fn change(&self, snapshot: Option<Arc<Snapshot>>, routes: Option<Routes>) {
        let routes = routes.map(Arc::new);
        if snapshot.is_none() && routes.is_none() {
            return;
        }
        self.state.rcu(|state| state.with(snapshot.clone(), routes.clone()));
        self.invalidate();
        self.publisher.install(self.state.load_full());
        if let (Some(tracker), Some(snapshot)) = (&self.tracker, snapshot) {
            tracker.install(snapshot);
        }
    }

    /// The health of these instances has changed: answers made before do not
    /// count any more. The fast path is told as well.
    pub fn health_changed(&self, instances: &[IpAddr]) {
        self.invalidate();
        self.publisher.health_changed(instances);
    }

    /// The answer for a local name of `state`, as a client's query asks for it: the
    /// name is tracked and learned. Never waits.
    pub fn look_up(&self, state: &State, name: &Name) -> LookedUp {
        let resolution = resolve_local(&state.snapshot, &*self.health, name);
        if self.tracker.is_some() && resolution.checks.tracked && resolution.checks.synchronous {
            return LookedUp::NotChecked;
        }
        self.asked(name, &resolution);
        self.publisher.learn(name.into());
        LookedUp::Found(resolution)
    }

    /// As [`Self::look_up`], after the first checks of instances that were never checked (`y1`).
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
        self.publisher.learn(name.into());
        resolution
    }

    /// A query for a name whose answer is remembered: tells the tracker, and the fast path, which
    /// may have given the name up since. False: the tracker does not know the name (any more), and
    /// it has to be looked up.
    #[inline]
    pub(crate) fn asked_again(&self, name: NameRef<'_>, is_tracked: bool) -> bool {
        let is_known = !is_tracked || self.tracker.as_ref().is_none_or(|tracker| tracker.asked_again(name));
        if is_known {
            self.publisher.learn(name);
        }
        is_known
    }

    /// Tells the tracker of a query for a name.
    fn asked(&self, name: &Name, resolution: &Resolution) {
        if let Some(tracker) = &self.tracker
            && resolution.checks.tracked
        {
            tracker.asked(name, resolution);
        }
    }

    /// Tells the fast path how much may come up from now on, see [`Publish::shed`].
    pub(crate) fn shed(&self, shares: Option<&PassShares>) {
        self.publisher.shed(shares);
    }

    /// Queries that came up through interfaces, see [`Publish::went_up`].
    pub(crate) fn went_up(&self) -> Option<u64> {
        self.publisher.went_up()
    }

    /// Number of the state that answers come from. Read it before asking: an
    /// answer is good for as long as the number stays.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Makes remembered answers void. After the state has changed: whoever sees
    /// the new number sees the new state.
    fn invalidate(&self) {
        self.generation.fetch_add(1, Ordering::Release);
    }
}
