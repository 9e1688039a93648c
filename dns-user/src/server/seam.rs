//! What the server tells the rooms that act on local names.

use std::{net::IpAddr, sync::Arc};

use futures::future::BoxFuture;

use crate::{
    catalog::Snapshot,
    fastpath::Publisher,
    health::Tracker,
    name::Name,
    resolve::{AllRunning, Resolution, resolve},
};

/// The fast path, as the server sees it.
pub trait Publish: Send + Sync {
    /// There is a new snapshot.
    fn install(&self, snapshot: Arc<Snapshot>);
    /// The health of these instances has changed.
    fn health_changed(&self, instances: &[IpAddr]);
    /// `name` was resolved here. Called for every such query: cheap, never blocks.
    fn learn(&self, name: &Name);
}

/// The health tracker, as the server sees it.
pub trait Track: Send + Sync {
    /// There is a new snapshot.
    fn install(&self, snapshot: Arc<Snapshot>);
    /// `name` was asked for. Starts first checks in the background; cheap, never blocks.
    fn asked(&self, name: &Name, resolution: &Resolution);
    /// Waits for the first checks of instances that were never checked, within
    /// the limit of `synchronous_check_timeout`.
    fn first_checks<'a>(&'a self, name: &'a Name, resolution: &'a Resolution) -> BoxFuture<'a, ()>;
}

/// No fast path.
impl Publish for () {
    fn install(&self, _snapshot: Arc<Snapshot>) {}
    fn health_changed(&self, _instances: &[IpAddr]) {}
    fn learn(&self, _name: &Name) {}
}

impl Publish for Publisher {
    fn install(&self, snapshot: Arc<Snapshot>) {
        Self::install(self, snapshot);
    }

    fn health_changed(&self, instances: &[IpAddr]) {
        Self::health_changed(self, instances);
    }

    fn learn(&self, name: &Name) {
        Self::learn(self, name);
    }
}

impl Track for Tracker {
    fn install(&self, snapshot: Arc<Snapshot>) {
        // What a name needs checked does not depend on what is known of it.
        self.decide_by(Arc::new(move |name| Some(resolve(&snapshot, &AllRunning, name)?.checks)));
    }

    fn asked(&self, name: &Name, resolution: &Resolution) {
        Self::asked(self, name, resolution);
    }

    fn first_checks<'a>(&'a self, name: &'a Name, resolution: &'a Resolution) -> BoxFuture<'a, ()> {
        Box::pin(Self::first_checks(self, name, resolution))
    }
}
