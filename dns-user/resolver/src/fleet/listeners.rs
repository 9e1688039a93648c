//! Who is told of the fleet: its state, and the names that are asked for.

use std::{net::IpAddr, sync::Arc};

use futures::future::BoxFuture;

use super::State;
use dns_core::{catalog::Snapshot, name::Name, resolve::Resolution};

/// The fast path, as the server sees it.
pub trait Publish: Send + Sync {
    /// There is a new state: other records, other aliases or other routes.
    fn install(&self, state: Arc<State>);
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
    fn install(&self, _state: Arc<State>) {}
    fn health_changed(&self, _instances: &[IpAddr]) {}
    fn learn(&self, _name: &Name) {}
}
