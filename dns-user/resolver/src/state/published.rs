//! Names of a state that interfaces may answer.

use std::sync::Arc;

use dns_common::entry::AnswerPolicy;

use super::State;
use crate::consul::Published;
use dns_core::{
    listing,
    name::Name,
    resolve::{self, Checks, Existence, Health, Resolution},
};
use dns_fastpath::NameSource;

/// Names that interfaces may answer: those routed to the fleet, and those routed to Consul that
/// have only addresses there. A handler below a domain of the records keeps its names.
pub(super) struct PublishedNames {
    pub(super) state: Arc<State>,
    /// Consul's names at the same moment; `None` without Consul.
    pub(super) consul: Option<Published>,
}

impl NameSource for PublishedNames {
    fn published_names(&self) -> Box<dyn Iterator<Item = Name> + '_> {
        let state = &self.state;
        Box::new(listing::published_names(&state.snapshot).filter(|name| state.is_local(name)))
    }

    fn resolve(&self, health: &dyn Health, name: &Name) -> Option<Resolution> {
        let state = &self.state;
        state.is_local(name).then(|| resolve::resolve(&state.snapshot, health, name)).flatten()
    }

    fn resolve_with_policy(
        &self,
        health: &dyn Health,
        name: &Name,
    ) -> Option<(Resolution, Option<AnswerPolicy>)> {
        if let Some(resolution) = self.resolve(health, name) {
            return Some((resolution, None));
        }
        let consul = self.consul.as_ref().filter(|_| self.state.is_consuls(name))?;
        let (v4, v6, policy) = consul.look_up(name)?;
        let resolution = Resolution { existence: Existence::Found, v4, v6, checks: Checks::default() };
        Some((resolution, Some(policy)))
    }
}
