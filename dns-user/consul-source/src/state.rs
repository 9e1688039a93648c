//! Demands of the resolver, and catalog snapshots.

use crate::known::{Key, Known};
use dns_consul::{Lack, source::Picture};

/// A demand of the resolver.
#[derive(Debug)]
pub(crate) enum Demand {
    /// A query waits for this missing part.
    Lack(Lack),
    /// A query was for this service.
    Asked(Key),
    /// Interfaces answer for these services.
    Used(Vec<Key>),
}

/// Returns a snapshot; an empty one if the data has expired.
pub(crate) fn picture(known: &Known, expired: bool) -> Picture {
    let live = if expired { known.nothing() } else { known.live() };
    Picture { live, datacenter: known.own.clone(), node_name: known.node_name.clone() }
}
