//! Names of the fleet: the snapshot of the moment and what goes with asking it.

use std::{
    collections::HashSet,
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use arc_swap::ArcSwap;

use super::{Publish, Track};
use crate::{
    catalog::Snapshot,
    name::Name,
    resolve::{Health, Resolution, resolve},
};

/// What both the sockets and everything else ask about local names.
pub struct Local {
    /// The snapshot in force.
    pub(super) snapshot: ArcSwap<Snapshot>,
    /// What is known of instances.
    health: Arc<dyn Health + Send + Sync>,
    /// The fast path.
    publisher: Arc<dyn Publish>,
    /// The health tracker; `None`: health checks are off.
    tracker: Option<Arc<dyn Track>>,
    /// Domains of all records that were ever in force.
    domains: ArcSwap<HashSet<Name>>,
    /// Goes up whenever a resolution may come out differently than before.
    generation: AtomicU64,
}

/// What [`Local::look`] found without waiting.
#[derive(Debug)]
pub enum Looked {
    /// Not a local name.
    NotLocal,
    /// This is the answer.
    Found(Arc<Resolution>),
    /// The first checks are to be waited for: ask [`Local::lookup`].
    Wait,
}

impl Local {
    /// Asks `snapshot` until another one is installed.
    pub fn new(
        snapshot: Snapshot,
        health: Arc<dyn Health + Send + Sync>,
        publisher: Arc<dyn Publish>,
        tracker: Option<Arc<dyn Track>>,
    ) -> Self {
        Self {
            domains: ArcSwap::from_pointee(snapshot.domains().cloned().collect()),
            snapshot: ArcSwap::from_pointee(snapshot),
            health,
            publisher,
            tracker,
            generation: AtomicU64::new(0),
        }
    }

    /// The snapshot in force.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshot.load_full()
    }

    /// Puts a new snapshot in force and tells fast path and tracker.
    pub fn install(&self, snapshot: Arc<Snapshot>) {
        self.domains.rcu(|domains| {
            let mut domains = HashSet::clone(domains);
            domains.extend(snapshot.domains().cloned());
            domains
        });
        self.snapshot.store(snapshot.clone());
        self.invalidate();
        self.publisher.install(snapshot.clone());
        if let Some(tracker) = &self.tracker {
            tracker.install(snapshot);
        }
    }

    /// The health of these instances has changed: answers made before do not
    /// count any more. The fast path is told as well.
    pub fn health_changed(&self, instances: &[IpAddr]) {
        self.invalidate();
        self.publisher.health_changed(instances);
    }

    /// The answer for `name`, with all that goes with a client's query: the
    /// name is tracked and learned, and `y1` waits for first checks. `None`:
    /// not a local name.
    pub async fn lookup(&self, name: &Name) -> Option<Arc<Resolution>> {
        let mut resolution = self.peek(name)?;
        if let Some(tracker) = &self.tracker
            && resolution.checks.tracked
        {
            tracker.asked(name, &resolution);
            if resolution.checks.synchronous {
                tracker.first_checks(name, &resolution).await;
                resolution = self.peek(name)?;
            }
        }
        self.publisher.learn(name);
        Some(Arc::new(resolution))
    }

    /// As [`lookup`](Self::lookup), for those who cannot wait.
    pub fn look(&self, name: &Name) -> Looked {
        let Some(resolution) = self.peek(name) else {
            return Looked::NotLocal;
        };
        if self.has_to_wait(&resolution) {
            return Looked::Wait;
        }
        self.asked(name, &resolution);
        self.publisher.learn(name);
        Looked::Found(Arc::new(resolution))
    }

    /// The answer for `name` without side effects; `None`: not a local name.
    pub fn peek(&self, name: &Name) -> Option<Resolution> {
        resolve(&self.snapshot.load(), &*self.health, name)
    }

    /// Whether `domain` (wire format) is or was one of the records.
    pub(super) fn had_domain(&self, domain: &[u8]) -> bool {
        self.domains.load().contains(domain)
    }

    /// Tells the tracker of another query for a name whose answer is remembered.
    #[inline]
    pub(super) fn asked(&self, name: &Name, resolution: &Resolution) {
        if let Some(tracker) = &self.tracker
            && resolution.checks.tracked
        {
            tracker.asked(name, resolution);
        }
    }

    /// Tells the fast path of a name that keeps coming up here.
    pub(super) fn learn(&self, name: &Name) {
        self.publisher.learn(name);
    }

    /// Whether this answer must not be given before the first checks.
    pub(super) fn has_to_wait(&self, resolution: &Resolution) -> bool {
        self.tracker.is_some() && resolution.checks.tracked && resolution.checks.synchronous
    }

    /// Number of the state that answers come from. Read it before asking: an
    /// answer is good for as long as the number stays.
    #[inline]
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Makes remembered answers void. After the state has changed: whoever sees
    /// the new number sees the new state.
    pub(super) fn invalidate(&self) {
        self.generation.fetch_add(1, Ordering::Release);
    }
}
