//! The differences between two snapshots, and the names whose meaning they may change. Pure.
//!
//! A name depends on *facets*: hashes of values that a row must have to match the name. A row that was
//! added, removed or changed has facets, too, and a name that shares none of them means the same in
//! both snapshots. The rows are compared by their texts, not by hashes; two facets with the same hash
//! cost a superfluous resolution.

use std::hash::{BuildHasher as _, Hash};

use foldhash::fast::FixedState;
use hashbrown::HashSet;
use smallvec::SmallVec;

use crate::catalog::{
    Dictionary, InstanceIndex, Place, PlaceNumber, PlaceholderFilter, Row, Snapshot, Symbol, Target,
};
use crate::listing;
use crate::name::Name;
use crate::query::{Pattern, QueryCriteria, QueryTarget};
use crate::resolve::has_matches;

/// The hash of one value on which the meaning of a name depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Facet(u32);

/// The facets of a name: it is resolved again if any of them has changed.
pub type Facets = SmallVec<[Facet; 2]>;

impl Facet {
    /// A facet of every change.
    pub const ANY: Self = Self(0);

    /// Smallest value of a hash; smaller numbers are left to [`Self::ANY`] and to users of the type.
    const FIRST_HASH: u32 = 16;

    /// Returns the facet of a value.
    pub fn of(value: impl Hash) -> Self {
        // Truncation is intended.
        let hash = FixedState::default().hash_one(value) as u32;
        Self(hash.max(Self::FIRST_HASH))
    }

    /// Returns one of a few facets that [`Self::of`] never returns; `number` is below 15.
    pub const fn reserved(number: u32) -> Self {
        assert!(number + 1 < Self::FIRST_HASH);
        Self(number + 1)
    }

    /// Returns the lowest bits of the hash as a number below [`Self::SLOTS`].
    pub const fn slot(self) -> usize {
        self.0 as usize % Self::SLOTS
    }

    /// Number of values of [`Self::slot`].
    pub const SLOTS: usize = 4096;
}

/// A value that a row has, or that a name requires.
#[derive(Hash)]
enum Value<'a> {
    Id(&'a [u8]),
    Agent(&'a [u8]),
    Number(&'a [u8]),
    Group(&'a [u8]),
    Place([&'a [u8]; 3]),
    InstanceGroup(&'a [u8]),
    Network(&'a [u8]),
    Deployment(&'a [u8]),
    Domain(&'a str),
    /// An alias of the records that makes names local.
    Zone(&'a [u8]),
    /// The names that have names below them.
    Parents,
}

impl From<Value<'_>> for Facet {
    fn from(value: Value<'_>) -> Self {
        Self::of(value)
    }
}

/// The differences between two snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Names with any of these facets may have another meaning.
    pub facets: HashSet<Facet>,
    /// Names that may have another meaning, whatever their facets.
    pub renewed: Vec<Name>,
    /// Names to publish before the first query that the older snapshot did not list.
    pub listed: Vec<Name>,
    /// Names to publish before the first query that the older snapshot may have listed, too: rows with
    /// the same id or number hide each other's names, and aliases are listed even without an answer.
    pub still_listed: Vec<Name>,
    /// Names that the newer snapshot no longer lists.
    pub unlisted: Vec<Name>,
    /// Aliases that exist in one of the snapshots.
    pub zones: Vec<Name>,
}

impl Changes {
    /// Returns whether nothing has changed.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Sorts names by the snapshots that list them.
    fn sort_listed(&mut self, old: &Snapshot, new: &Snapshot, names: HashSet<Name>) {
        for name in names {
            match (is_listed(old, &name), is_listed(new, &name)) {
                (false, true) => self.listed.push(name),
                (true, false) => self.unlisted.push(name),
                (true, true) => self.still_listed.push(name),
                (false, false) => {}
            }
        }
        // The order of a set is arbitrary.
        for names in [&mut self.listed, &mut self.still_listed, &mut self.unlisted] {
            names.sort_unstable();
        }
    }

    /// Returns whether a name with this facet may have another meaning.
    #[inline]
    pub fn concern(&self, facet: Facet) -> bool {
        self.facets.contains(&facet)
    }
}

fn is_listed(snapshot: &Snapshot, name: &Name) -> bool {
    snapshot.aliases().exact.contains_key(name)
        || snapshot.local_zone(name).is_some() && has_matches(snapshot, name)
}

/// Returns the facets of a name.
pub fn facets(snapshot: &Snapshot, name: &Name) -> Facets {
    let mut facets = Facets::new();
    let instances = snapshot.instance_index();
    if let Some(zone) = snapshot.local_zone(name)
        // `between` compares the domains as a whole; only aliases come and go with rows.
        && instances.domain_names.get(zone.as_wire()).is_none()
    {
        facets.push(Value::Zone(zone.as_wire()).into());
    }
    if let Some(targets) = snapshot.aliases().exact(name) {
        for target in targets {
            add_target(snapshot, target, &mut facets);
        }
    } else if let Some(targets) = snapshot.aliases().below(name) {
        for target in &targets {
            add_target(snapshot, target, &mut facets);
        }
    } else {
        facets.extend(facet_of(instances, name));
    }
    // A name with rows exists, whatever is below it.
    if !snapshot.rules().nxdomain_for_empty_non_terminals && !has_matches(snapshot, name) {
        facets.push(Value::Parents.into());
    }
    facets
}

fn add_target(snapshot: &Snapshot, target: &Target, facets: &mut Facets) {
    let instances = snapshot.instance_index();
    match target {
        // Literal addresses come from alias files, and other files make `between` return `None`.
        Target::Address(_) => {}
        Target::Name(name) => facets.extend(facet_of(instances, name)),
        Target::Placeholder {
            filter: PlaceholderFilter::Number(number),
            ..
        } => {
            let number = instances.num_id.dictionary.text(*number);
            facets.push(Value::Number(number.as_bytes()).into());
        }
        Target::Placeholder { base, .. } => {
            facets.extend(facet_of(instances, snapshot.aliases().base(*base)));
        }
    }
}

/// Returns a facet that every row has that this name selects, as rare as possible; `None` if no row
/// can match.
fn facet_of(instances: &InstanceIndex, name: &Name) -> Option<Facet> {
    let question = QueryTarget::read(name, &instances.domain_names).ok()?;
    let (domain, criteria) = match question {
        QueryTarget::Agent(agent) => return Some(Value::Agent(agent).into()),
        QueryTarget::Anywhere(Some(id)) => return Some(Value::Id(id).into()),
        QueryTarget::Anywhere(None) => return Some(Facet::ANY),
        QueryTarget::Within(domain, criteria) => (domain, criteria),
    };
    let QueryCriteria {
        id,
        filter,
        group,
        place,
    } = &criteria;
    let value = match (id, &filter.num_ids[..], group, place) {
        (Some(id), ..) => Value::Id(id),
        // Of several numbers a row has one, so none of them is a facet of every row.
        (None, [number], ..) => Value::Number(number),
        (None, _, Some(group), _) => Value::Group(group),
        (
            None,
            _,
            None,
            Some(
                [
                    Pattern::Exact(group),
                    Pattern::Exact(network),
                    Pattern::Exact(deployment),
                ],
            ),
        ) => Value::Place([group, network, deployment]),
        (None, _, None, Some([Pattern::Exact(group), ..])) => Value::InstanceGroup(group),
        (None, _, None, Some([.., Pattern::Exact(deployment)])) => Value::Deployment(deployment),
        (None, _, None, Some([_, Pattern::Exact(network), _])) => Value::Network(network),
        (None, _, None, _) => Value::Domain(instances.domains.text(domain)),
    };
    Some(value.into())
}

fn facets_of_row(instances: &InstanceIndex, row: Row) -> impl Iterator<Item = Facet> {
    let instance = instances.instance(row);
    let [group, network, deployment] = [
        instance.instance_group,
        instance.network,
        instance.deployment,
    ]
    .map(str::as_bytes);
    let values = [
        Value::Id(instance.id.as_bytes()),
        Value::Agent(instance.agent_id.as_bytes()),
        Value::Number(instance.num_id.as_bytes()),
        Value::Place([group, network, deployment]),
        Value::InstanceGroup(group),
        Value::Network(network),
        Value::Deployment(deployment),
        Value::Domain(instance.domain),
    ];
    let groups = instances.groups_of(row).iter();
    let groups =
        groups.map(move |&group| Value::Group(instances.groups.text(group).as_bytes()).into());
    values.map(Facet::from).into_iter().chain(groups)
}

/// Returns the differences between two snapshots; `None` if any name may have changed, or if so many
/// rows have that resolving all names is cheaper.
pub fn between(old: &Snapshot, new: &Snapshot) -> Option<Changes> {
    let mut changes = Changes::default();
    if std::ptr::eq(old, new) {
        return Some(changes);
    }
    let before = old.instance_index();
    let after = new.instance_index();
    let are_read_alike = old.rules() == new.rules()
        && old.aliases().has_source_of(new.aliases())
        && before.domain_names.are_named_like(&after.domain_names);
    if !are_read_alike {
        return None;
    }
    // Nothing else differs, and the rows are the same if both share them.
    if std::ptr::eq(before, after) {
        return Some(changes);
    }
    let Rows { removed, added } = changed_rows(before, after)?;
    if removed.is_empty() && added.is_empty() {
        return Some(changes);
    }
    changes.facets.insert(Facet::ANY);
    let mut names: HashSet<Name> = HashSet::new();
    for (snapshot, rows) in [(old, &removed), (new, &added)] {
        for &row in rows {
            changes
                .facets
                .extend(facets_of_row(snapshot.instance_index(), row));
            names.extend(listing::names_of_row(snapshot, row));
            // Only the first row of an instance in a group lists names there.
            let id = snapshot.instance_index().id.text(row);
            let rows = after.id.rows_with(id.as_bytes());
            names.extend(rows.iter().flat_map(|&row| listing::names_of_row(new, row)));
            let aliases = snapshot
                .aliases()
                .names_of_row(snapshot.instance_index(), row);
            changes.renewed.extend(aliases);
        }
    }
    changes.renewed.sort_unstable();
    changes.renewed.dedup();
    for alias in &changes.renewed {
        if old.aliases().exact.contains_key(alias) != new.aliases().exact.contains_key(alias) {
            changes.facets.insert(Value::Zone(alias.as_wire()).into());
            changes.zones.push(alias.clone());
        }
    }
    names.extend(changes.renewed.iter().cloned());
    // They are listed even while they have no answer.
    names.extend(new.aliases().fixed().filter(|name: &Name| {
        facets(new, name)
            .iter()
            .any(|&facet| changes.concern(facet))
    }));
    if !changes.zones.is_empty() || have_other_parents(old, new, &removed, &added) {
        changes.facets.insert(Value::Parents.into());
    }
    changes.sort_listed(old, new, names);
    Some(changes)
}

/// Returns whether names may have gained or lost the names below them, apart from aliases.
fn have_other_parents(old: &Snapshot, new: &Snapshot, removed: &[Row], added: &[Row]) -> bool {
    let before = old.instance_index();
    let after = new.instance_index();
    (before.agent_id.dictionary.len() == 0) != (after.agent_id.dictionary.len() == 0)
        // A group may be in several domains.
        || before.domains.len() > 1
        || !removed.iter().all(|&row| is_known(row, before, after))
        || !added.iter().all(|&row| is_known(row, after, before))
}

/// Returns whether the place and the groups of a row also occur in another index.
fn is_known(row: Row, here: &InstanceIndex, there: &InstanceIndex) -> bool {
    let [names @ .., domain] = here.whole_place_texts(row).map(str::as_bytes);
    let Some(domain) = there.domains.find(domain) else {
        return false;
    };
    if there.places.named(names, domain).is_none() {
        return false;
    }
    for &group in here.groups_of(row) {
        let group = here.groups.text(group).as_bytes();
        if there.groups.find(group).is_none() {
            return false;
        }
    }
    true
}

//----------- Rows -----------------------------------------------------------

/// Rows that only one of two snapshots has. A row with another value in any column is both.
#[derive(Debug, Default, PartialEq, Eq)]
struct Rows {
    /// Rows of the older snapshot.
    removed: Vec<Row>,
    /// Rows of the newer snapshot.
    added: Vec<Row>,
}

/// Largest number of rows inserted or removed at one place that [`changed_rows`] recognises.
const MAX_RUN: usize = 64;

/// Compares the rows of two indexes; `None` if more than an eighth of them differ. A row that moved
/// may count as removed and added.
fn changed_rows(old: &InstanceIndex, new: &InstanceIndex) -> Option<Rows> {
    let most = 256.max(old.len().max(new.len()) / 8);
    // The reader of the file has compared the rows already.
    if let Some((removed, added)) = new.edits_since(old) {
        let rows = Rows {
            removed: removed.to_vec(),
            added: added.to_vec(),
        };
        return (removed.len() + added.len() <= most).then_some(rows);
    }
    let comparison = Comparison::new(old, new);
    let mut rows = Rows::default();
    let mut at_old = 0;
    let mut at_new = 0;
    while at_old < old.len() && at_new < new.len() {
        if comparison.are_same_rows(at_old, at_new) {
            (at_old, at_new) = (at_old + 1, at_new + 1);
            continue;
        }
        // The shortest step after which the rows are the same again.
        let step = (1..=MAX_RUN).find_map(|run| {
            [(run, run), (0, run), (run, 0)]
                .into_iter()
                .find(|(of_old, of_new)| {
                    let next_old = at_old + of_old;
                    let next_new = at_new + of_new;
                    next_old < old.len()
                        && next_new < new.len()
                        && comparison.are_same_rows(next_old, next_new)
                })
        });
        let (of_old, of_new) = step.unwrap_or((1, 1));
        rows.removed.extend(at_old as Row..(at_old + of_old) as Row);
        rows.added.extend(at_new as Row..(at_new + of_new) as Row);
        (at_old, at_new) = (at_old + of_old, at_new + of_new);
        if rows.removed.len() + rows.added.len() > most {
            return None;
        }
    }
    rows.removed.extend(at_old as Row..old.len() as Row);
    rows.added.extend(at_new as Row..new.len() as Row);
    (rows.removed.len() + rows.added.len() <= most).then_some(rows)
}

/// Numbers of an older snapshot's symbols in a newer one; [`Symbol::MAX`] if it has none, and for
/// rows without a value.
struct Translation(Vec<Symbol>);

impl Translation {
    fn new(old: &Dictionary, new: &Dictionary) -> Self {
        let mut next = 0;
        let mut symbols = Vec::with_capacity(old.len());
        for (_, text) in old.iter() {
            // Symbols are numbered by first appearance, so most are in the same order.
            if (next as usize) < new.len() && new.text(next) == text {
                symbols.push(next);
                next += 1;
                continue;
            }
            match new.find(text.as_bytes()) {
                Some(symbol) => {
                    symbols.push(symbol);
                    next = symbol + 1;
                }
                None => symbols.push(Symbol::MAX),
            }
        }
        Self(symbols)
    }

    /// Returns whether an old symbol and a new one stand for the same text.
    fn is_same(&self, old: Symbol, new: Symbol) -> bool {
        match self.0.get(old as usize) {
            Some(&translated) => translated == new && new != Symbol::MAX,
            // No value.
            None => new == Symbol::MAX,
        }
    }
}

/// Compares rows of two indexes.
struct Comparison<'i> {
    old: &'i InstanceIndex,
    new: &'i InstanceIndex,
    /// Id, number, zone, zone id, network id, agent.
    columns: [Translation; 6],
    /// Place in the newer index by place in the older one.
    places: Vec<Option<PlaceNumber>>,
    groups: Translation,
}

impl<'i> Comparison<'i> {
    fn new(old: &'i InstanceIndex, new: &'i InstanceIndex) -> Self {
        let columns = [
            (&old.id, &new.id),
            (&old.num_id, &new.num_id),
            (&old.az, &new.az),
            (&old.az_id, &new.az_id),
            (&old.network_id, &new.network_id),
            (&old.agent_id, &new.agent_id),
        ]
        .map(|(old, new)| Translation::new(&old.dictionary, &new.dictionary));
        let [instance_groups, networks, deployments, domains] = [
            (&old.places.instance_groups, &new.places.instance_groups),
            (&old.places.networks, &new.places.networks),
            (&old.places.deployments, &new.places.deployments),
            (&*old.domains, &*new.domains),
        ]
        .map(|(old, new)| Translation::new(old, new));
        let mut places = Vec::with_capacity(old.places.len());
        for number in 0..old.places.len() as PlaceNumber {
            let Place {
                instance_group,
                network,
                deployment,
                domain,
            } = old.places.get(number);
            places.push(new.places.number_of(&Place {
                instance_group: instance_groups.0[instance_group as usize],
                network: networks.0[network as usize],
                deployment: deployments.0[deployment as usize],
                domain: domains.0[domain as usize],
            }));
        }
        let groups = Translation::new(&old.groups, &new.groups);
        Self {
            old,
            new,
            columns,
            places,
            groups,
        }
    }

    fn are_same_rows(&self, at_old: usize, at_new: usize) -> bool {
        let Self {
            old,
            new,
            columns: [id, num_id, az, az_id, network_id, agent_id],
            places,
            groups,
        } = self;
        let old_groups = old.groups_of(at_old as Row);
        let new_groups = new.groups_of(at_new as Row);
        id.is_same(old.id.values[at_old], new.id.values[at_new])
            && old.addresses[at_old] == new.addresses[at_new]
            && places[old.row_places[at_old] as usize] == Some(new.row_places[at_new])
            && old.indexes[at_old] == new.indexes[at_new]
            && num_id.is_same(old.num_id.values[at_old], new.num_id.values[at_new])
            && agent_id.is_same(old.agent_id.values[at_old], new.agent_id.values[at_new])
            && az.is_same(old.az.values[at_old], new.az.values[at_new])
            && az_id.is_same(old.az_id.values[at_old], new.az_id.values[at_new])
            && network_id.is_same(old.network_id.values[at_old], new.network_id.values[at_new])
            && old_groups.len() == new_groups.len()
            && old_groups
                .iter()
                .zip(new_groups)
                .all(|(&old, &new)| groups.is_same(old, new))
    }
}

#[cfg(test)]
mod tests;
