//! From a name to its answer: aliases, matches, health filter.

use std::net::IpAddr;

use super::{Checks, Existence, Health, HealthState, Resolution};
use super::{
    below::has_names_below,
    select::{Matches, select},
};
use crate::catalog::{Instance, NameRules, Row, Snapshot, Target};
use crate::name::Name;
use crate::query::{Malformed, Question, Strategy};

/// What the name means now; `None`: it is not ours to answer.
pub fn resolve(snapshot: &Snapshot, health: &dyn Health, name: &Name) -> Option<Resolution> {
    snapshot.local_zone(name)?;
    Some(resolve_local(snapshot, health, name))
}

/// As [`resolve`], for a name that is known to be ours: this snapshot has a
/// [`Snapshot::local_zone`] for it.
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
        let addresses = matched.rows.iter().filter_map(|&row| snapshot.fleet().addresses[row as usize]);
        let before = checks.len();
        checks.extend(addresses);
        resolution.checks.synchronous |= matched.synchronous && checks.len() > before;
    }
    checks.sort_unstable();
    checks.dedup();
    resolution.checks.tracked = !checks.is_empty();
    resolution.checks.instances = checks;
    let rows = found.healthy(snapshot, health);
    let rows = rows.into_iter().filter_map(|row| snapshot.fleet().addresses[row as usize]);
    for address in found.addresses.into_iter().chain(rows) {
        match address {
            IpAddr::V4(address) => resolution.v4.push(address),
            IpAddr::V6(address) => resolution.v6.push(address),
        }
    }
    resolution
}

/// Whether a name that leads to no row exists all the same, by the snapshot's rules.
fn without_match(snapshot: &Snapshot, name: &Name, existence: Existence) -> Existence {
    let NameRules { formerr_for_malformed, nxdomain_for_empty_non_terminals } = snapshot.rules();
    if !nxdomain_for_empty_non_terminals && has_names_below(snapshot, name) {
        return Existence::Found;
    }
    if formerr_for_malformed { existence } else { Existence::NoSuchName }
}

/// The instances that a name gives after the health filter, whether it is ours
/// or not; otherwise why there are none. Addresses of aliases are left out.
///
/// The root stands for every instance, where it is no domain (observed).
pub fn instances<'s>(
    snapshot: &'s Snapshot,
    health: &dyn Health,
    name: &Name,
) -> Result<Vec<Instance<'s>>, Existence> {
    let found = Found::read(snapshot, name).map_err(|_| Existence::Malformed)?;
    match found.existence() {
        Existence::Found => {
            let rows = found.healthy(snapshot, health);
            Ok(rows.into_iter().map(|row| snapshot.fleet().instance(row)).collect())
        }
        other => Err(other),
    }
}

/// What a name leads to, before the health filter.
#[derive(Default)]
pub(super) struct Found<'s> {
    /// Addresses of aliases, as often as they are listed.
    pub(super) addresses: Vec<IpAddr>,
    /// Rows by target, each filtered by its own strategy (observed).
    pub(super) matches: Vec<Matches<'s>>,
}

impl<'s> Found<'s> {
    /// Follows an alias, if the name is one, and finds the rows.
    ///
    /// Targets of aliases that are malformed whatever the label were left out
    /// when the snapshot was built; what is malformed here is the name.
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

    /// Adds what a target leads to.
    fn add(&mut self, snapshot: &'s Snapshot, target: &Target) -> Result<(), Malformed> {
        let (name, narrowing) = match target {
            Target::Address(address) => {
                self.addresses.push(*address);
                return Ok(());
            }
            Target::Name(name) => (name, None),
            Target::Narrowed { base, by } => (snapshot.aliases().base(*base), Some(*by)),
        };
        let question = Question::read(name, &snapshot.fleet().domain_names)?;
        self.matches.push(select(snapshot.fleet(), &question, narrowing));
        Ok(())
    }

    /// Whether the name exists.
    fn existence(&self) -> Existence {
        let any = self.matches.iter().any(|matched| !matched.rows.is_empty());
        if any || !self.addresses.is_empty() { Existence::Found } else { Existence::NoSuchName }
    }

    /// The rows that pass the health filters, each once.
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
    /// Whether the answer depends on health: not for smart with exactly one
    /// match, which is given anyway (observed: it is never checked).
    pub(super) fn needs_checks(&self) -> bool {
        self.strategy != Strategy::Smart || self.rows.len() > 1
    }

    /// The rows that pass the health filter.
    pub(super) fn healthy(&self, snapshot: &Snapshot, health: &dyn Health) -> Vec<Row> {
        let state = |row: Row| match snapshot.fleet().addresses[row as usize] {
            Some(address) => health.state(address, self.group),
            // Nobody can ask an instance without an address.
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
    /// An answer without addresses.
    fn without_data(existence: Existence) -> Self {
        Self { existence, v4: Vec::new(), v6: Vec::new(), checks: Checks::default() }
    }
}
