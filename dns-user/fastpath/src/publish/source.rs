//! The meaning of names, as the publisher sees it.

use std::any::Any;

use dns_common::entry::AnswerPolicy;

use dns_core::{
    changes::{Changes, Facet, Facets},
    name::Name,
    resolve::{Health, Resolution},
    wire::Query,
};

/// The meaning of names: a snapshot, as seen by the publisher.
pub trait NameSource: Any + Send + Sync {
    /// Returns the names to publish before the first query, the most useful first.
    fn published_names(&self) -> Box<dyn Iterator<Item = Name> + '_>;

    /// Returns the current meaning of `name`; `None` if other servers answer for it.
    fn resolve(&self, health: &dyn Health, name: &Name) -> Option<Resolution>;

    /// Like [`Self::resolve`], with the policy for presenting the addresses, if different from the
    /// fleet's default.
    fn resolve_with_policy(
        &self,
        health: &dyn Health,
        name: &Name,
    ) -> Option<(Resolution, Option<AnswerPolicy>)> {
        self.resolve(health, name)
            .map(|resolution| (resolution, None))
    }

    /// Returns the reply that userspace gives to a query by UDP if it depends on nothing but the query's
    /// question, flags and EDNS size, and is no list of addresses that [`Self::resolve_with_policy`] gives.
    /// SOA records have this `serial`. Equal seeds yield the same order and choice of records.
    fn reply(&self, _query: &Query<'_>, _serial: u32, _seed: u64) -> Option<Vec<u8>> {
        None
    }

    /// Returns whether an older source gives the same replies for `name`; `false` if that is unknown.
    fn gives_same_replies(&self, _older: &dyn NameSource, _name: &Name) -> bool {
        false
    }

    /// Returns the facets on which the meaning of `name` depends.
    fn facets(&self, _name: &Name) -> Facets {
        // A source that cannot tell has all its names resolved at each change.
        [Facet::ANY].into_iter().collect()
    }

    /// Returns what has changed since an older source; `None` if any name may have changed.
    fn changes_since(&self, _older: &dyn NameSource) -> Option<Changes> {
        None
    }
}
