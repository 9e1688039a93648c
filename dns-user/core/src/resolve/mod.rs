//! Resolution of local names. Pure.
//!
//! Both paths answer from a [`Resolution`]: the userspace server and, through the publisher, the
//! BPF program.

mod addresses;
mod explain;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub use addresses::{
    AddressQueries, AddressQuery, FleetAddresses, MAX_ADDRESS_QUERIES, NoAddresses, addresses,
};
pub use explain::{Explanation, MatchExplanation, ResultExplanation, TargetExplanation, explain};
use smallvec::SmallVec;

use crate::{
    catalog::{InstanceIndex, NameRules, PlaceholderFilter, Row, Snapshot, Symbol, Target},
    name::Name,
    query::{
        AGENT_DOMAIN, Filter, Malformed, Pattern, QueryCriteria, QueryTarget, Strategy, group_id,
    },
};

/// Result of an instance's latest health check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HealthState {
    /// The instance reported `running` for itself or the group.
    Running,
    /// The instance reported `failing` for itself or the group.
    Failing,
    /// The check failed, or its reply was unusable.
    Unknown,
    /// No check has finished yet.
    Unchecked,
}

/// Source of the instances' health, implemented by `health::HealthStates`, by [`AllRunning`], and
/// by tests.
pub trait Health {
    /// Returns the state of the instance at `ip`; with `group`, that group's state on it if
    /// reported, or else the instance's own.
    fn state(&self, ip: IpAddr, group: Option<&str>) -> HealthState;
}

/// The health source while checks are disabled: every instance counts as running (observed: `q-s1`
/// selects none, `q-s3` all).
#[derive(Clone, Copy, Debug)]
pub struct AllRunning;

impl Health for AllRunning {
    fn state(&self, _ip: IpAddr, _group: Option<&str>) -> HealthState {
        HealthState::Running
    }
}

/// The resolution of a name, given a snapshot and the current health.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolution {
    /// Whether the name exists, which decides the RCODE.
    pub existence: Existence,
    /// IPv4 addresses after the health filter, in no particular order. Each row counts once; two
    /// rows with the same address yield it twice (observed).
    pub v4: Vec<Ipv4Addr>,
    /// IPv6 addresses after the health filter, as with `v4`.
    pub v6: Vec<Ipv6Addr>,
    /// Instances whose health affects the resolution.
    pub checks: Checks,
}

impl Resolution {
    /// Returns the part that determines the reply.
    pub fn answer(&self) -> LocalAnswer<'_> {
        let Self {
            existence,
            v4,
            v6,
            checks: _,
        } = self;
        LocalAnswer {
            existence: *existence,
            v4,
            v6,
        }
    }
}

/// The part of a [`Resolution`] that determines the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalAnswer<'a> {
    /// Whether the name exists, which decides the RCODE.
    pub existence: Existence,
    /// IPv4 addresses, in no particular order.
    pub v4: &'a [Ipv4Addr],
    /// IPv6 addresses, in no particular order.
    pub v6: &'a [Ipv6Addr],
}

/// Whether a name exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Existence {
    /// The name exists; the address lists may still be empty.
    Found,
    /// No row matches: NXDOMAIN.
    NoSuchName,
    /// The name violates the query language: FORMERR for A, AAAA and ANY; NOERROR without records
    /// for other types.
    Malformed,
}

/// The instances to check for a name, before the health filter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checks {
    /// Sorted addresses without duplicates: all matches, also for `s4`, but none if s0 has exactly
    /// one match (as for most instance names). The health of other instances cannot change the
    /// answer.
    pub instances: Vec<IpAddr>,
    /// Whether a query for the name starts checks, that is, `instances` is not empty.
    pub tracked: bool,
    /// `y1`: the first query waits for the first checks.
    pub synchronous: bool,
}

//----------- Answer -------------------------------------------------------
//
// Resolution of a name: aliases, matches, health filter.

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
    let instances = snapshot.instance_index();
    let mut resolution = Resolution::without_data(existence);
    let mut checks = Vec::new();
    for matched in &found.matches {
        if !matched.needs_checks() {
            continue;
        }
        let before = checks.len();
        for &row in &matched.rows {
            checks.extend(instances.addresses[row as usize]);
        }
        // A target whose rows have no address has no check to wait for.
        resolution.checks.synchronous |= matched.synchronous && checks.len() > before;
    }
    checks.sort_unstable();
    checks.dedup();
    resolution.checks.tracked = !checks.is_empty();
    resolution.checks.instances = checks;
    let rows = found.healthy(snapshot, health);
    let mut addresses = found.addresses;
    for row in rows {
        addresses.extend(instances.addresses[row as usize]);
    }
    for address in addresses {
        match address {
            IpAddr::V4(address) => resolution.v4.push(address),
            IpAddr::V6(address) => resolution.v6.push(address),
        }
    }
    resolution
}

/// Returns whether a name without matching rows exists, by the snapshot's rules.
fn without_match(snapshot: &Snapshot, name: &Name, existence: Existence) -> Existence {
    let NameRules {
        formerr_for_malformed,
        nxdomain_for_empty_non_terminals,
    } = snapshot.rules();
    if !nxdomain_for_empty_non_terminals && has_names_below(snapshot, name) {
        return Existence::Found;
    }
    if formerr_for_malformed {
        existence
    } else {
        Existence::NoSuchName
    }
}

/// Returns whether rows or addresses match a name, whatever their health.
pub(crate) fn has_matches(snapshot: &Snapshot, name: &Name) -> bool {
    Found::read(snapshot, name).is_ok_and(|found| found.existence() == Existence::Found)
}

/// Returns the instances of a name after the health filter ([`Snapshot::instance`]), whether or not the
/// name is local, or the reason why there are none. Literal addresses of aliases are excluded.
///
/// Unless the root is a domain, it selects every instance (observed).
pub fn instances(
    snapshot: &Snapshot,
    health: &dyn Health,
    name: &Name,
) -> Result<Vec<u32>, Existence> {
    let found = Found::read(snapshot, name).map_err(|_| Existence::Malformed)?;
    match found.existence() {
        Existence::Found => Ok(found.healthy(snapshot, health)),
        other => Err(other),
    }
}

/// The targets of a name before the health filter.
#[derive(Default)]
struct Found<'s> {
    /// Literal addresses of aliases, with repetitions.
    addresses: Vec<IpAddr>,
    /// Rows by target; each target has its own strategy (observed).
    matches: Vec<Matches<'s>>,
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
        let (name, placeholder) = match target {
            Target::Address(address) => {
                self.addresses.push(*address);
                return Ok(());
            }
            Target::Name(name) => (name, None),
            Target::Placeholder { base, filter } => (snapshot.aliases().base(*base), Some(*filter)),
        };
        let question = QueryTarget::read(name, &snapshot.instance_index().domain_names)?;
        self.matches
            .push(select(snapshot.instance_index(), &question, placeholder));
        Ok(())
    }

    fn existence(&self) -> Existence {
        let any = self.matches.iter().any(|matched| !matched.rows.is_empty());
        if any || !self.addresses.is_empty() {
            Existence::Found
        } else {
            Existence::NoSuchName
        }
    }

    /// Returns the rows that pass the health filters, without duplicates.
    fn healthy(&self, snapshot: &Snapshot, health: &dyn Health) -> Vec<Row> {
        let mut rows = Vec::new();
        for matched in &self.matches {
            rows.extend(matched.healthy(snapshot, health));
        }
        // bosh-dns answers an instance that n targets match n times n times (docs/differences.md).
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
    fn needs_checks(&self) -> bool {
        self.strategy != Strategy::Smart || self.rows.len() > 1
    }

    /// Returns the rows that pass the health filter.
    fn healthy(&self, snapshot: &Snapshot, health: &dyn Health) -> Vec<Row> {
        match self.strategy {
            Strategy::All => self.rows.clone(),
            // An instance whose state is unknown is in neither `s1` nor `s3` (observed).
            Strategy::Unhealthy => {
                self.keep(snapshot, health, |state| state == HealthState::Failing)
            }
            Strategy::Healthy => self.keep(snapshot, health, |state| state == HealthState::Running),
            // Returned unconditionally and never checked (observed).
            Strategy::Smart if self.rows.len() <= 1 => self.rows.clone(),
            Strategy::Smart => {
                let good = self.keep(snapshot, health, |state| {
                    matches!(state, HealthState::Running | HealthState::Unchecked)
                });
                // Smart never removes every instance (observed): one of them may answer although
                // its check failed.
                if good.is_empty() {
                    self.rows.clone()
                } else {
                    good
                }
            }
        }
    }

    fn keep(
        &self,
        snapshot: &Snapshot,
        health: &dyn Health,
        is_wanted: impl Fn(HealthState) -> bool,
    ) -> Vec<Row> {
        let addresses = &snapshot.instance_index().addresses;
        let mut kept = Vec::with_capacity(self.rows.len());
        for &row in &self.rows {
            let state = match addresses[row as usize] {
                Some(address) => health.state(address, self.group),
                // An instance without an address cannot be checked.
                None => HealthState::Unknown,
            };
            if is_wanted(state) {
                kept.push(row);
            }
        }
        kept
    }
}

impl Resolution {
    /// Creates a resolution without addresses.
    fn without_data(existence: Existence) -> Self {
        Self {
            existence,
            v4: Vec::new(),
            v6: Vec::new(),
            checks: Checks::default(),
        }
    }
}

//----------- Below --------------------------------------------------------
//
// Empty non-terminals: names without addresses but with names below them (RFC 8020). A resolver
// with QNAME minimisation (RFC 9156) queries them first and applies NXDOMAIN to the whole subtree.

/// Returns whether the fleet has a name below `name`: an instance's long or short form, a domain of
/// the records, an agent's name, or an alias.
fn has_names_below(snapshot: &Snapshot, name: &Name) -> bool {
    let wire = name.as_wire();
    // No domain of the records, so the search below would not find it.
    if wire == AGENT_DOMAIN {
        return snapshot.instance_index().agent_id.dictionary.len() > 0;
    }
    if snapshot.has_alias_below(wire) {
        return true;
    }
    let mut domains = snapshot.domains();
    if domains.any(|domain| domain.suffixes().any(|suffix| suffix == wire)) {
        return true;
    }
    let instances = snapshot.instance_index();
    // Instances have no other names than those below a domain of the records.
    let Some((domain, domain_labels)) = instances.domain_names.longest(name) else {
        return false;
    };
    let labels: SmallVec<[&[u8]; 8]> = name.labels().collect();
    let above = &labels[..labels.len() - domain_labels];
    let is_place =
        |patterns: [Pattern<'_>; 3]| !instances.places.find(domain, &patterns).is_empty();
    match *above {
        [label] => {
            if let Some(id) = group_id(label)
                && let Some(group) = instances.groups.find(id)
            {
                let mut rows = instances.by_group.rows(group).iter();
                if rows.any(|&row| instances.place_of(row).domain == domain) {
                    return true;
                }
            }
            is_place([Pattern::Any, Pattern::Any, Pattern::Exact(label)])
        }
        [network, deployment] => is_place([
            Pattern::Any,
            Pattern::Exact(network),
            Pattern::Exact(deployment),
        ]),
        [instance_group, network, deployment] => {
            is_place([instance_group, network, deployment].map(Pattern::Exact))
        }
        _ => false,
    }
}

/// Returns whether a name that is not local exists because of an alias or a domain of the records
/// below it; false for the root, and if empty non-terminals get NXDOMAIN.
pub fn is_above_local(snapshot: &Snapshot, name: &Name) -> bool {
    let mut domains = snapshot.domains();
    // Everything is below the root, whose own records only the recursors have.
    name.label_count() > 0
        && !snapshot.rules().nxdomain_for_empty_non_terminals
        && (snapshot.has_alias_below(name.as_wire())
            || domains.any(|domain| domain.is_within(name)))
}

/// The rows selected by a name, before the health filter.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Matches<'f> {
    /// Row numbers without duplicates, in no particular order.
    pub(crate) rows: Vec<Row>,
    /// The health filter to apply.
    pub(crate) strategy: Strategy,
    /// The group whose state counts, for `q-g` names.
    pub(crate) group: Option<&'f str>,
    /// Whether the first query waits for the first checks.
    pub(crate) synchronous: bool,
}

/// Finds the rows selected by a name: scans the shortest candidate list of the indexes and tests each of its rows
/// against the other criteria. `placeholder` is an additional criterion, from a placeholder in
/// an alias.
pub(crate) fn select<'f>(
    instances: &'f InstanceIndex,
    question: &QueryTarget<'_>,
    placeholder: Option<PlaceholderFilter>,
) -> Matches<'f> {
    let rows = match question {
        // These forms have no filter label, so the health filter is the default, smart.
        QueryTarget::Agent(agent) => instances.agent_id.rows_with(agent).to_vec(),
        QueryTarget::Anywhere(None) => (0..instances.len() as Row).collect(),
        QueryTarget::Anywhere(Some(id)) => instances.id.rows_with(id).to_vec(),
        QueryTarget::Within(domain, criteria) => {
            return match Bound::new(instances, *domain, criteria, placeholder) {
                None => Matches::default(),
                Some(bound) => Matches {
                    rows: bound.rows(),
                    strategy: criteria.filter.strategy,
                    group: bound.group.map(|group| instances.groups.text(group)),
                    synchronous: criteria.filter.synchronous,
                },
            };
        }
    };
    Matches {
        rows,
        ..Matches::default()
    }
}

/// The alternatives of one criterion, as symbols.
type Symbols = SmallVec<[Symbol; 4]>;

/// Criteria with their strings looked up, so that rows compare by number.
struct Bound<'f> {
    instances: &'f InstanceIndex,
    domain: Symbol,
    id: Option<Symbol>,
    group: Option<Symbol>,
    /// Place numbers in ascending order.
    places: Option<Symbols>,
    /// Symbols of zone ids; empty: any.
    az_ids: Symbols,
    /// Symbols of instance numbers; empty: any.
    num_ids: Symbols,
    /// Symbols of network ids; empty: any.
    network_ids: Symbols,
    indexes: SmallVec<[i64; 4]>,
    placeholder: Option<PlaceholderFilter>,
}

impl<'f> Bound<'f> {
    /// Looks up the strings; `None` if one does not occur, so that no row can match.
    fn new(
        instances: &'f InstanceIndex,
        domain: Symbol,
        criteria: &QueryCriteria<'_>,
        placeholder: Option<PlaceholderFilter>,
    ) -> Option<Self> {
        let QueryCriteria {
            id,
            filter,
            group,
            place,
        } = criteria;
        let Filter {
            az_ids,
            indexes,
            num_ids,
            network_ids,
            strategy: _,
            synchronous: _,
        } = filter;
        Some(Self {
            instances,
            domain,
            id: look_up(id, |id| instances.id.dictionary.find(id))?,
            group: look_up(group, |group| instances.groups.find(group))?,
            places: place
                .as_ref()
                .map(|patterns| instances.places.find(domain, patterns)),
            az_ids: alternatives(az_ids, |text| instances.az_id.dictionary.find(text))?,
            num_ids: alternatives(num_ids, |text| instances.num_id.dictionary.find(text))?,
            network_ids: alternatives(network_ids, |text| {
                instances.network_id.dictionary.find(text)
            })?,
            indexes: alternatives(indexes, index)?,
            placeholder,
        })
    }

    fn rows(&self) -> Vec<Row> {
        let lists = self.shortest();
        let candidates = lists.iter().map(|list| list.len()).sum();
        let mut rows = Vec::with_capacity(candidates);
        for list in lists {
            for &row in list {
                if self.holds(row) {
                    rows.push(row);
                }
            }
        }
        rows
    }

    /// Returns the lists of the criterion with the fewest candidates. They are disjoint: a row has
    /// one value per column, and a name has one group at most.
    fn shortest(&self) -> Lists<'f> {
        let instances = self.instances;
        // Every row that matches is among these, so there is always a list to scan.
        let mut best: Lists<'f> = [instances.by_domain.rows(self.domain)]
            .into_iter()
            .collect();
        if let Some(id) = self.id {
            consider(&mut best, [instances.id.rows(id)]);
        }
        if let Some(group) = self.group {
            consider(&mut best, [instances.by_group.rows(group)]);
        }
        if let Some(places) = &self.places {
            let places = places.iter();
            consider(
                &mut best,
                places.map(|&place| instances.by_place.rows(place)),
            );
        }
        for (column, symbols) in [
            (&instances.az_id, &self.az_ids),
            (&instances.num_id, &self.num_ids),
            (&instances.network_id, &self.network_ids),
        ] {
            if !symbols.is_empty() {
                consider(&mut best, symbols.iter().map(|&symbol| column.rows(symbol)));
            }
        }
        if !self.indexes.is_empty() {
            let indexes = self.indexes.iter();
            consider(
                &mut best,
                indexes.map(|&index| instances.rows_with_index(index)),
            );
        }
        match self.placeholder {
            Some(PlaceholderFilter::Number(number)) => {
                consider(&mut best, [instances.num_id.rows(number)]);
            }
            Some(PlaceholderFilter::Index(index)) => {
                consider(&mut best, [instances.rows_with_index(index)]);
            }
            Some(PlaceholderFilter::Zone(zone)) => consider(&mut best, [instances.az.rows(zone)]),
            // Rows are not indexed by the name of their network.
            Some(PlaceholderFilter::Network(_)) | None => {}
        }
        best
    }

    fn holds(&self, row: Row) -> bool {
        let instances = self.instances;
        let index = row as usize;
        let place = instances.place_of(row);
        if place.domain != self.domain {
            return false;
        }
        if let Some(id) = self.id
            && instances.id.values[index] != id
        {
            return false;
        }
        if let Some(places) = &self.places
            && places.binary_search(&instances.row_places[index]).is_err()
        {
            return false;
        }
        if let Some(group) = self.group
            && !instances.groups_of(row).contains(&group)
        {
            return false;
        }
        if !self.indexes.is_empty() {
            match instances.indexes[index] {
                Some(number) if self.indexes.contains(&number) => {}
                _ => return false,
            }
        }
        is_among(&self.az_ids, instances.az_id.values[index])
            && is_among(&self.num_ids, instances.num_id.values[index])
            && is_among(&self.network_ids, instances.network_id.values[index])
            && match self.placeholder {
                None => true,
                Some(PlaceholderFilter::Number(number)) => instances.num_id.values[index] == number,
                Some(PlaceholderFilter::Index(number)) => instances.indexes[index] == Some(number),
                Some(PlaceholderFilter::Zone(zone)) => instances.az.values[index] == zone,
                Some(PlaceholderFilter::Network(network)) => place.network == network,
            }
    }
}

/// Replaces the lists by others that are shorter together.
fn consider<'f>(best: &mut Lists<'f>, lists: impl IntoIterator<Item = &'f [Row]>) {
    let lists: Lists<'f> = lists.into_iter().collect();
    let length: usize = lists.iter().map(|list| list.len()).sum();
    // Every row is tested against all criteria anyway, so only the number of rows counts.
    if length < best.iter().map(|list| list.len()).sum() {
        *best = lists;
    }
}

fn is_among(symbols: &[Symbol], symbol: Symbol) -> bool {
    symbols.is_empty() || symbols.contains(&symbol)
}

type Lists<'f> = SmallVec<[&'f [Row]; 4]>;

/// Looks up an optional criterion; `None` if its value does not occur.
fn look_up(text: &Option<&[u8]>, find: impl Fn(&[u8]) -> Option<Symbol>) -> Option<Option<Symbol>> {
    match text {
        None => Some(None),
        Some(text) => find(text).map(Some),
    }
}

/// Looks up alternatives, without duplicates; `None` if there are some but none occurs.
fn alternatives<T: PartialEq + Copy>(
    texts: &[&[u8]],
    find: impl Fn(&[u8]) -> Option<T>,
) -> Option<SmallVec<[T; 4]>> {
    let mut found = SmallVec::new();
    for value in texts.iter().filter_map(|text| find(text)) {
        if !found.contains(&value) {
            found.push(value);
        }
    }
    (texts.is_empty() || !found.is_empty()).then_some(found)
}

/// Parses an index. Indexes are compared as strings, so `00` is not one.
fn index(text: &[u8]) -> Option<i64> {
    if text.len() > 1 && text[0] == b'0' {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok()
}

#[cfg(test)]
mod below_tests {
    use super::{AllRunning, Existence, resolve, *};
    use crate::catalog::{AliasFiles, NameRules, Records};

    /// Builds two instances, one with a group, and aliases.
    fn snapshot(rules: NameRules) -> Snapshot {
        let records =
            br#"{"record_keys": ["id", "instance_group", "group_ids", "network", "deployment", "ip",
            "domain"], "record_infos": [["a", "web", ["1"], "net", "dep", "10.0.0.1", "bosh"],
            ["b", "db", ["2"], "net", "other", "10.0.0.2", "inner.my.tld"]]}"#;
        let aliases = br#"{"x.deep.alias.bosh": ["10.0.0.9"], "_.any.bosh": ["_.web.net.dep.bosh"],
            "db.alias.test": ["10.0.0.9"]}"#;
        let (records, _) = Records::parse(records).unwrap();
        let (aliases, _) = AliasFiles::parse([("aliases.json", &aliases[..])]).unwrap();
        Snapshot::build(records, &aliases).0.with_rules(rules)
    }

    /// Returns whether a name exists under `rules`.
    fn existence(rules: NameRules, name: &str) -> Existence {
        resolve(
            &snapshot(rules),
            &AllRunning,
            &Name::from_text(name).unwrap(),
        )
        .unwrap()
        .existence
    }

    #[test]
    fn empty_non_terminals_exist() {
        let modern = NameRules {
            formerr_for_malformed: false,
            nxdomain_for_empty_non_terminals: false,
        };
        for name in [
            "bosh",
            "dep.bosh",
            "net.dep.bosh",
            "web.net.dep.bosh",
            "q-g1.bosh",
            "alias.bosh",
            "deep.alias.bosh",
            "any.bosh",
            "a.web.net.dep.bosh",
            "q-s0.q-g1.bosh",
        ] {
            assert_eq!(existence(modern, name), Existence::Found, "{name}");
        }
        for name in [
            "nonsense.bosh",
            "other.bosh",
            "net.other.bosh",
            "db.net.dep.bosh",
            "q-g2.bosh",
            "q-g9.bosh",
            "www.nonsense.bosh",
            "x.web.net.dep.bosh",
            "y.deep.alias.bosh",
            "a.b.c.d.e.f.bosh",
        ] {
            assert_eq!(existence(modern, name), Existence::NoSuchName, "{name}");
        }
    }

    #[test]
    fn group_in_several_domains_is_in_each() {
        let records =
            br#"{"record_keys": ["id", "instance_group", "group_ids", "network", "deployment", "ip",
            "domain"], "record_infos": [["a", "web", ["1"], "net", "dep", "10.0.0.1", "first.test"],
            ["b", "web", ["1"], "net", "dep", "10.0.0.2", "second.test"],
            ["c", "web", ["1"], "net", "dep", "10.0.0.3", "second.test"],
            ["d", "web", ["2"], "net", "dep", "10.0.0.4", "third.test"],
            ["e", "web", ["1"], "net", "dep", "10.0.0.5", "fourth.test"]]}"#;
        let (records, _) = Records::parse(records).unwrap();
        let snapshot = Snapshot::build(records, &AliasFiles::default()).0;
        let snapshot = snapshot.with_rules(NameRules {
            formerr_for_malformed: false,
            nxdomain_for_empty_non_terminals: false,
        });
        let found = |name: &str| {
            let name = Name::from_text(name).unwrap();
            let resolution = resolve(&snapshot, &AllRunning, &name).unwrap();
            (resolution.existence, resolution.v4)
        };
        for (domain, lasts) in [
            ("first.test", &[1][..]),
            ("second.test", &[2, 3]),
            ("third.test", &[]),
            ("fourth.test", &[5]),
        ] {
            // Above a group without instances in a domain there is no name either.
            let above = if lasts.is_empty() {
                Existence::NoSuchName
            } else {
                Existence::Found
            };
            assert_eq!(
                found(&format!("q-g1.{domain}")),
                (above, vec![]),
                "{domain}"
            );
            let (_, mut v4) = found(&format!("q-s0.q-g1.{domain}"));
            v4.sort();
            let expected = lasts.iter().map(|&last| Ipv4Addr::new(10, 0, 0, last));
            assert_eq!(v4, expected.collect::<Vec<_>>(), "{domain}");
        }
    }

    #[test]
    fn names_above_domains_and_aliases_exist() {
        let modern = NameRules {
            formerr_for_malformed: false,
            nxdomain_for_empty_non_terminals: false,
        };
        let modern = snapshot(modern);
        let reference = snapshot(NameRules::default());
        for (name, expected) in [
            ("my.tld", true),
            ("tld", true),
            ("alias.test", true),
            ("test", true),
            ("other.tld", false),
            (".", false),
        ] {
            let name = Name::from_text(name).unwrap();
            assert_eq!(is_above_local(&modern, &name), expected, "{name}");
            assert!(!is_above_local(&reference, &name), "{name}");
        }
    }

    #[test]
    fn default_rules_match_bosh_dns() {
        let reference = NameRules::default();
        for (name, expected) in [
            ("bosh", Existence::NoSuchName),
            ("net.dep.bosh", Existence::NoSuchName),
            ("dep.bosh", Existence::Malformed),
            ("nonsense.bosh", Existence::Malformed),
        ] {
            assert_eq!(existence(reference, name), expected, "{name}");
        }
    }

    #[test]
    fn names_of_agents_are_below_their_domain() {
        for (agent, expected) in [("", false), (r#", "agent_id""#, true)] {
            let value = if agent.is_empty() { "" } else { r#", "x""# };
            let records = format!(
                r#"{{"record_keys": ["id", "instance_group", "group_ids", "network", "deployment", "ip", "domain"{agent}],
                "record_infos": [["a", "web", ["1"], "net", "dep", "10.0.0.1", "bosh"{value}]]}}"#
            );
            let (records, _) = Records::parse(records.as_bytes()).unwrap();
            let snapshot = Snapshot::build(records, &AliasFiles::default()).0;
            let name = Name::from_wire(AGENT_DOMAIN).unwrap().0;
            assert_eq!(has_names_below(&snapshot, &name), expected, "{agent}");
        }
    }
}

#[cfg(test)]
mod names_tests;
