//! Selects the answerer of a query.

use std::sync::Arc;

use super::{
    State,
    routes::{ARPA, ROOT},
};
use dns_core::{
    name::Name,
    wire::{TYPE_A, TYPE_DS},
};
use dns_upstream::Answer;

impl State {
    /// Returns whether `name` is routed to the fleet, for every type that interfaces answer.
    /// Userspace routes all other types.
    pub(crate) fn is_local(&self, name: &Name) -> bool {
        matches!(Route::of(self, name, TYPE_A), Route::Local)
    }

    /// Returns whether `name` is routed to Consul's names, for types A and AAAA.
    pub(crate) fn is_consuls(&self, name: &Name) -> bool {
        matches!(Route::of(self, name, TYPE_A), Route::Consul(_))
    }
}

/// The answerer of a query.
#[derive(Clone)]
pub(crate) enum Route {
    /// The up-check: 127.0.0.1 and ::1.
    Upcheck,
    /// The fleet: the name has a local zone in the state used for routing.
    Local,
    /// The names of Consul's catalog.
    Consul(Arc<dyn Answer>),
    Handler(Arc<dyn Answer>),
    /// Reverse names: first from the state, then from this answerer.
    Reverse(Arc<dyn Answer>),
    Recursors(Arc<dyn Answer>),
    Refused,
}

impl Route {
    /// Returns the answerer of `name`: the longest domain that is a suffix of the name wins. Of
    /// equal domains, up-check names come first, then local names, Consul's names and handlers.
    pub(crate) fn of(state: &State, name: &Name, qtype: u16) -> Self {
        if qtype == TYPE_DS {
            return Self::of_parent(state, name);
        }
        let local_zone = state.snapshot.local_zone(name).map(Name::as_wire);
        name.suffixes()
            .find_map(|suffix| Self::exactly(state, suffix, local_zone == Some(suffix)))
            .unwrap_or_else(|| Self::root(state))
    }

    /// Returns the answerer for type DS, which belongs to the parent: the root if it has an
    /// answerer, else the shortest domain that is a suffix of the name (observed).
    fn of_parent(state: &State, name: &Name) -> Self {
        if !matches!(Self::root(state), Self::Refused) {
            return Self::root(state);
        }
        let mut suffixes: Vec<&[u8]> = name.suffixes().collect();
        suffixes.reverse();
        let exactly = |suffix: &&[u8]| {
            // A suffix of a name is a name.
            let is_local =
                Name::from_wire(suffix).is_ok_and(|(name, _)| state.snapshot.local_zone(&name).is_some());
            Self::exactly(state, suffix, is_local)
        };
        suffixes.iter().find_map(exactly).unwrap_or(Self::Refused)
    }

    /// Returns the answerer of exactly this domain.
    fn exactly(state: &State, domain: &[u8], is_local: bool) -> Option<Self> {
        let routes = &state.routes;
        if routes.upchecks.contains(domain) {
            return Some(Self::Upcheck);
        }
        if is_local {
            return Some(Self::Local);
        }
        if let Some(consul) = routes.consul.get(domain) {
            return Some(Self::Consul(consul.clone()));
        }
        if domain == ARPA
            && let Some(reverse) = &routes.reverse
        {
            return Some(Self::Reverse(reverse.clone()));
        }
        if domain == ROOT || routes.handlers_stay_away && state.had_domain(domain) {
            return None;
        }
        routes.handlers.get(domain).cloned().map(Self::Handler)
    }

    /// Returns the default route: recursors override a handler for the root.
    fn root(state: &State) -> Self {
        match (&state.routes.recursors, state.routes.handlers.get(ROOT)) {
            (Some(recursors), _) => Self::Recursors(recursors.clone()),
            (None, Some(handler)) => Self::Handler(handler.clone()),
            (None, None) => Self::Refused,
        }
    }
}
