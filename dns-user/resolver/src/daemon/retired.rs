//! Handlers that are not used: the records have, or had a moment ago, a domain of the same name.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use dns_core::{catalog::Snapshot, name::Name};

/// Delay after which a handler returns once the records no longer contain its domain. Until then
/// its names are forwarded to the recursors, as in bosh-dns (observed), where the handler never
/// returns.
const HANDLER_RETURN: Duration = Duration::from_secs(30);

/// Domains of such handlers: contained in the records (`None`), or removed from them at the given
/// time, less than [`HANDLER_RETURN`] ago.
#[derive(Default)]
pub(super) struct RetiredHandlers(HashMap<Name, Option<Instant>>);

impl RetiredHandlers {
    /// Follows the records; returns whether that changes a route. A handler returns by a later call.
    pub(super) fn follow(
        &mut self,
        snapshot: &Snapshot,
        is_handler: impl Fn(&Name) -> bool,
        now: Instant,
    ) -> bool {
        let mut changed = false;
        for domain in snapshot.domains().filter(|domain| is_handler(domain)) {
            // Also forgets the time of a domain that was gone for a moment.
            changed |= self.0.insert(domain.clone(), None).is_none();
        }
        let before = self.0.len();
        self.0.retain(|domain, gone| {
            if snapshot.domains().any(|present| present == domain) {
                return true;
            }
            // The time of the first look without the domain counts, not the last.
            now.duration_since(*gone.get_or_insert(now)) < HANDLER_RETURN
        });
        changed || self.0.len() != before
    }

    /// Returns whether the handler of a domain is not used.
    pub(super) fn contains(&self, domain: &Name) -> bool {
        self.0.contains_key(domain)
    }

    /// Forgets all: the handlers are others.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}
