//! Who is told of the fleet: its state, and the names that are asked for.

use std::{net::IpAddr, sync::Arc};

use dns_common::control::CLIENT_BUCKETS;
use futures::future::BoxFuture;

use super::State;
use dns_core::{
    catalog::Snapshot,
    name::{Name, NameRef},
    resolve::Resolution,
};

/// The fast path, as the server sees it.
pub trait Publish: Send + Sync {
    /// There is a new state: other records, other aliases or other routes.
    fn install(&self, state: Arc<State>);
    /// The health of these instances has changed.
    fn health_changed(&self, instances: &[IpAddr]);
    /// `name` was resolved here. Called for every such query: cheap, never blocks.
    fn learn(&self, name: NameRef<'_>);
    /// More queries come up than can be answered: for a moment no more than this is to come
    /// up, by group of clients; `None`: all again. Cheap, never blocks.
    fn shed(&self, shares: Option<&PassShares>);
    /// Queries that went up at interfaces since the start; `None`: there is no fast path.
    fn went_up(&self) -> Option<u64>;
}

/// How many of 2^32 - 1 queries go up, by [`dns_common::control::client_bucket`].
pub type PassShares = [u32; CLIENT_BUCKETS];

/// The health tracker, as the server sees it.
pub trait Track: Send + Sync {
    /// There is a new snapshot.
    fn install(&self, snapshot: Arc<Snapshot>);
    /// `name` was asked for. Starts first checks in the background; cheap, never blocks.
    fn asked(&self, name: &Name, resolution: &Resolution);
    /// As [`Self::asked`] if the name is tracked; false: it is not. Cheap, never blocks.
    fn asked_again(&self, name: NameRef<'_>) -> bool;
    /// Waits for the first checks of instances that were never checked, within
    /// the limit of `synchronous_check_timeout`.
    fn first_checks<'a>(&'a self, name: &'a Name, resolution: &'a Resolution) -> BoxFuture<'a, ()>;
}

/// No fast path.
impl Publish for () {
    fn install(&self, _state: Arc<State>) {}
    fn health_changed(&self, _instances: &[IpAddr]) {}
    fn learn(&self, _name: NameRef<'_>) {}
    fn shed(&self, _shares: Option<&PassShares>) {}
    fn went_up(&self) -> Option<u64> {
        None
    }
}
