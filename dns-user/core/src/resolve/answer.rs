//! Resolution of a name: aliases, matches, health filter.

use std::net::IpAddr;

use super::{Checks, Existence, Health, HealthState, Resolution};
use super::{
    below::has_names_below,
    select::{Matches, select},
};
use crate::catalog::{NameRules, Row, Snapshot, Target};
use crate::name::Name;
use crate::query::{Malformed, Question, Strategy};

/// Resolves a name; `None` if it is not local.
pub fn resolve(snapshot: &Snapshot, health: &dyn Health, name: &Name) -> Option<Resolution> {
    snapshot.local_zone(name)?;
    Some(resolve_local(snapshot, health, name))
}

/// Like [`resolve`], for a name already known to be local: [`Snapshot::local_zone`] of this
/// snapshot is not `None`.
pub fn resolve_local(snapshot: &Snapshot, health: &dyn Health, name: &Name) -> Resolution {
    let Ok(found) = Found::read(snapshot, name) else {
        return Resolution::without_data(without_match(snapshot, name, Existence::Malformed));
    };
    let existence = match found.existence() {
        Existence::Found => Existence::Found,
        none => without_match(snapshot, name, none),
    };
    let mut resolution = Resolution::without_data(existence);
    let mut checks = Vec::new();
    for matched in &found.matches {
        if !matched.needs_checks() {
            continue;
        }
        let addresses =
            matched.rows.iter().filter_map(|&row| snapshot.instance_index().addresses[row as usize]);
        let before = checks.len();
        checks.extend(addresses);
        resolution.checks.synchronous |= matched.synchronous && checks.len() > before;
    }
    checks.sort_unstable();
    checks.dedup();
    resolution.checks.tracked = !checks.is_empty();
    resolution.checks.instances = checks;
    let rows = found.healthy(snapshot, health);
    let rows = rows.into_iter().filter_map(|row| snapshot.instance_index().addresses[row as usize]);
    for address in found.addresses.into_iter().chain(rows) {
        match address {
            IpAddr::V4(address) => resolution.v4.push(address),
            IpAddr::V6(address) => resolution.v6.push(address),
        }
    }
    resolution
}

/// Returns whether a name without matching rows exists, by the snapshot's rules.
fn without_match(snapshot: &Snapshot, name: &Name, existence: Existence) -> Existence {
    let NameRules { formerr_for_malformed, nxdomain_for_empty_non_terminals } = snapshot.rules();
    if !nxdomain_for_empty_non_terminals && has_names_below(snapshot, name) {
        return Existence::Found;
    }
    if formerr_for_malformed { existence } else { Existence::NoSuchName }
}

/// Returns whether rows or addresses match a name, whatever their health.
pub(crate) fn has_matches(snapshot: &Snapshot, name: &Name) -> bool {
    Found::read(snapshot, name).is_ok_and(|found| found.existence() == Existence::Found)
}

/// Returns the instances of a name after the health filter ([`Snapshot::instance`]), whether or not the
/// name is local, or the reason why there are none. Literal addresses of aliases are excluded.
///
/// Unless the root is a domain, it selects every instance (observed).
pub fn instances(snapshot: &Snapshot, health: &dyn Health, name: &Name) -> Result<Vec<u32>, Existence> {
    let found = Found::read(snapshot, name).map_err(|_| Existence::Malformed)?;
    match found.existence() {
        Existence::Found => Ok(found.healthy(snapshot, health)),
        other => Err(other),
    }
}

/// The targets of a name before the health filter.
#[derive(Default)]
pub(super) struct Found<'s> {
    /// Literal addresses of aliases, with repetitions.
    pub(super) addresses: Vec<IpAddr>,
    /// Rows by target; each target has its own strategy (observed).
    pub(super) matches: Vec<Matches<'s>>,
}

impl<'s> Found<'s> {
    /// Follows an alias, if the name is one, and finds the rows.
    ///
    /// Targets that are malformed for every label were dropped when the snapshot was built, so an
    /// error here concerns the name itself.
    fn read(snapshot: &'s Snapshot, name: &Name) -> Result<Self, Malformed> {
        let mut found = Self::default();
        if let Some(targets) = snapshot.aliases().exact(name) {
            for target in targets {
                found.add(snapshot, target)?;
            }
        } else if let Some(targets) = snapshot.aliases().below(name) {
            for target in &targets {
                found.add(snapshot, target)?;
            }
        } else {
            found.add(snapshot, &Target::Name(name.clone()))?;
        }
        Ok(found)
    }

    /// Adds the addresses or rows of a target.
    fn add(&mut self, snapshot: &'s Snapshot, target: &Target) -> Result<(), Malformed> {
        let (name, narrowing) = match target {
            Target::Address(address) => {
                self.addresses.push(*address);
                return Ok(());
            }
            Target::Name(name) => (name, None),
            Target::Narrowed { base, by } => (snapshot.aliases().base(*base), Some(*by)),
        };
        let question = Question::read(name, &snapshot.instance_index().domain_names)?;
        self.matches.push(select(snapshot.instance_index(), &question, narrowing));
        Ok(())
    }

    /// Returns whether the name exists.
    fn existence(&self) -> Existence {
        let any = self.matches.iter().any(|matched| !matched.rows.is_empty());
        if any || !self.addresses.is_empty() { Existence::Found } else { Existence::NoSuchName }
    }

    /// Returns the rows that pass the health filters, without duplicates.
    fn healthy(&self, snapshot: &Snapshot, health: &dyn Health) -> Vec<Row> {
        let mut rows = Vec::new();
        for matched in &self.matches {
            rows.extend(matched.healthy(snapshot, health));
        }
        if self.matches.len() > 1 {
            rows.sort_unstable();
            rows.dedup();
        }
        rows
    }
}

impl Matches<'_> {
    /// Returns whether the answer depends on health. With the smart strategy a single match is
    /// returned unconditionally and never checked (observed).
    pub(super) fn needs_checks(&self) -> bool {
        self.strategy != Strategy::Smart || self.rows.len() > 1
    }

    /// Returns the rows that pass the health filter.
    pub(super) fn healthy(&self, snapshot: &Snapshot, health: &dyn Health) -> Vec<Row> {
        let state = |row: Row| match snapshot.instance_index().addresses[row as usize] {
            Some(address) => health.state(address, self.group),
            // An instance without an address cannot be checked.
            None => HealthState::Unknown,
        };
        let keep = |wanted: &dyn Fn(HealthState) -> bool| -> Vec<Row> {
            self.rows.iter().copied().filter(|&row| wanted(state(row))).collect()
        };
        match self.strategy {
            Strategy::All => self.rows.clone(),
            Strategy::Unhealthy => keep(&|state| state == HealthState::Failing),
            Strategy::Healthy => keep(&|state| state == HealthState::Running),
            Strategy::Smart if self.rows.len() <= 1 => self.rows.clone(),
            Strategy::Smart => {
                let good = keep(&|state| matches!(state, HealthState::Running | HealthState::Unchecked));
                if good.is_empty() { self.rows.clone() } else { good }
            }
        }
    }
}

impl Resolution {
    /// Creates a resolution without addresses.
    fn without_data(existence: Existence) -> Self {
        Self { existence, v4: Vec::new(), v6: Vec::new(), checks: Checks::default() }
    }
}
