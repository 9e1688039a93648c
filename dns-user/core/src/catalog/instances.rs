//! The instances in columnar form, with an index for each column.

use std::borrow::Cow;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use super::columns::{
    Column, ColumnBuilder, Dictionary, Edits, NO_VALUE, Piece, Postings, Renumbering, Row, Symbol,
    value_rows,
};
use crate::query::{Domains, Pattern};

/// An instance on one network: a row of `records.json`.
///
/// Strings are as in the file; a missing value is empty.
#[derive(Clone, Copy, Debug)]
pub struct Instance<'a> {
    /// Instance id, usually a UUID.
    pub id: &'a str,
    /// Numeric id of the instance, as a string of digits.
    pub num_id: &'a str,
    /// Name of the instance group.
    pub instance_group: &'a str,
    /// Name of the availability zone.
    pub az: &'a str,
    /// Numeric id of the availability zone, as a string of digits.
    pub az_id: &'a str,
    /// Name of the instance's network.
    pub network: &'a str,
    /// Numeric id of the network, as a string of digits.
    pub network_id: &'a str,
    /// Name of the instance's deployment.
    pub deployment: &'a str,
    /// Address; `None` if the file's value is not an address.
    pub ip: Option<IpAddr>,
    /// Domain as in the file, with a final dot.
    pub domain: &'a str,
    /// Agent id, resolvable below `bosh-agent-id.`.
    pub agent_id: &'a str,
    /// Index in its instance group; `None` if the file has no such column.
    pub index: Option<i64>,
    instances: &'a InstanceIndex,
    row: Row,
}

impl<'a> Instance<'a> {
    /// Returns the ids of the instance's groups.
    pub fn group_ids(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let instances = self.instances;
        instances
            .groups_of(self.row)
            .iter()
            .map(|&group| instances.groups.text(group))
    }
}

/// The values of a row to be added.
pub(crate) struct NewRow<'a> {
    pub(crate) id: &'a str,
    pub(crate) instance_group: &'a str,
    pub(crate) network: &'a str,
    pub(crate) deployment: &'a str,
    /// Domain, with or without the final dot.
    pub(crate) domain: &'a str,
    /// Numeric id of the instance. Empty if missing, like the fields below.
    pub(crate) num_id: &'a str,
    pub(crate) az: &'a str,
    pub(crate) az_id: &'a str,
    pub(crate) network_id: &'a str,
    pub(crate) agent_id: &'a str,
    /// Address, if the string is a valid one.
    pub(crate) address: Option<IpAddr>,
    /// Index, if the file has that column.
    pub(crate) index: Option<i64>,
    /// Group ids in the order of the file.
    pub(crate) groups: &'a [Cow<'a, str>],
}

/// Collects the rows of an [`InstanceIndex`]; fields correspond to it.
#[derive(Debug, Default)]
pub(crate) struct InstanceIndexBuilder {
    id: ColumnBuilder,
    num_id: ColumnBuilder,
    az: ColumnBuilder,
    az_id: ColumnBuilder,
    network_id: ColumnBuilder,
    agent_id: ColumnBuilder,
    /// Domains as in the file, with a final dot.
    domains: Dictionary,
    places: PlacesBuilder,
    /// Strings and place of the previous row: neighbouring rows often share them.
    last: Option<([String; 4], PlaceNumber)>,
    row_places: Vec<PlaceNumber>,
    addresses: Vec<Option<IpAddr>>,
    indexes: Vec<Option<i64>>,
    groups: Dictionary,
    /// End of each row's groups in `group_list`.
    group_ends: Vec<u32>,
    /// Groups of row 0, then of row 1, and so on.
    group_list: Vec<Symbol>,
    /// Start of the last row's groups there.
    last_groups: usize,
}

impl InstanceIndexBuilder {
    pub(crate) fn push(&mut self, row: &NewRow<'_>) {
        let place = self.place(row);
        self.row_places.push(place);
        self.id.push(row.id);
        self.num_id.push(row.num_id);
        self.az.push(row.az);
        self.az_id.push(row.az_id);
        self.network_id.push(row.network_id);
        self.agent_id.push(row.agent_id);
        self.addresses.push(row.address);
        self.indexes.push(row.index);
        let start = self.group_list.len();
        for (last, group) in (self.last_groups..).zip(row.groups) {
            // Neighbours are mostly in the same groups: comparing is cheaper than hashing.
            let symbol = match self.group_list.get(last) {
                Some(&symbol) if self.groups.text(symbol) == group => symbol,
                _ => self.groups.intern(group),
            };
            // A group listed twice holds the row once (a set, not a list).
            if !self.group_list[start..].contains(&symbol) {
                self.group_list.push(symbol);
            }
        }
        self.last_groups = start;
        // A file of less than 4 GiB cannot name as many groups.
        self.group_ends.push(self.group_list.len() as u32);
    }

    fn place(&mut self, row: &NewRow<'_>) -> PlaceNumber {
        let texts = [row.instance_group, row.network, row.deployment, row.domain];
        if let Some((last, place)) = &self.last
            && last.iter().zip(texts).all(|(last, text)| last == text)
        {
            return *place;
        }
        // One spelling, so that `bosh` and `bosh.` are the same domain.
        let domain = if row.domain.ends_with('.') {
            self.domains.intern(row.domain)
        } else {
            self.domains.intern(&format!("{}.", row.domain))
        };
        let number = self
            .places
            .number(row.instance_group, row.network, row.deployment, domain);
        self.last = Some((texts.map(str::to_owned), number));
        number
    }

    pub(crate) fn build(self) -> InstanceIndex {
        let Self {
            id,
            num_id,
            az,
            az_id,
            network_id,
            agent_id,
            domains,
            places,
            last: _,
            row_places,
            addresses,
            indexes,
            groups,
            group_ends,
            group_list,
            last_groups: _,
        } = self;
        let (index_numbers, by_index) = index_postings(&indexes);
        let group_rows = GroupRows {
            ends: group_ends.into(),
            list: group_list.into(),
        };
        let places = places.build();
        InstanceIndex {
            by_place: Arc::new(place_postings(&places, &row_places)),
            by_domain: Arc::new(domain_postings(&domains, &places, &row_places)),
            by_index: Arc::new(by_index),
            by_group: Arc::new(group_rows.postings(groups.len())),
            domain_names: Arc::new(Domains::new(domains.iter())),
            id: Arc::new(id.index()),
            num_id: Arc::new(num_id.index()),
            az: Arc::new(az.index()),
            az_id: Arc::new(az_id.index()),
            network_id: Arc::new(network_id.index()),
            agent_id: Arc::new(agent_id.index()),
            domains: Arc::new(domains),
            places: Arc::new(places),
            row_places: row_places.into(),
            addresses: addresses.into(),
            indexes: indexes.into(),
            index_numbers: Arc::new(index_numbers),
            groups: Arc::new(groups),
            group_rows: Arc::new(group_rows),
            predecessor: None,
        }
    }
}

/// Symbols of the instance indexes that occur.
type IndexNumbers = HashMap<i64, Symbol, foldhash::fast::FixedState>;

/// Numbers the instance indexes and groups the rows by them.
fn index_postings(indexes: &[Option<i64>]) -> (IndexNumbers, Postings) {
    let mut numbers = IndexNumbers::default();
    let mut index_of = Vec::with_capacity(indexes.len());
    for index in indexes {
        index_of.push(match index {
            None => NO_VALUE,
            Some(index) => {
                let next = numbers.len() as Symbol;
                *numbers.entry(*index).or_insert(next)
            }
        });
    }
    // No criterion selects the rows without an index.
    let with_index = value_rows(&index_of).filter(|&(index, _)| index != NO_VALUE);
    let postings = Postings::new(numbers.len(), with_index);
    (numbers, postings)
}

fn place_postings(places: &Places, place: &[PlaceNumber]) -> Postings {
    Postings::new(places.len(), value_rows(place))
}

fn domain_postings(domains: &Dictionary, places: &Places, place: &[PlaceNumber]) -> Postings {
    let mut domain_of = Vec::with_capacity(place.len());
    for &place in place {
        domain_of.push(places.get(place).domain);
    }
    Postings::new(domains.len(), value_rows(&domain_of))
}

/// The indexed instances; immutable once built. An index made by edits shares what they leave as it was.
#[derive(Debug)]
pub(crate) struct InstanceIndex {
    pub(crate) id: Arc<Column>,
    /// Numeric instance ids, as strings of digits.
    pub(crate) num_id: Arc<Column>,
    pub(crate) az: Arc<Column>,
    /// Numeric zone ids, as strings of digits.
    pub(crate) az_id: Arc<Column>,
    /// Numeric network ids, as strings of digits.
    pub(crate) network_id: Arc<Column>,
    pub(crate) agent_id: Arc<Column>,
    /// Domains as in the file, with a final dot.
    pub(crate) domains: Arc<Dictionary>,
    /// The same domains as names, to find the one that a query ends in.
    pub(crate) domain_names: Arc<Domains>,
    pub(crate) groups: Arc<Dictionary>,
    pub(crate) places: Arc<Places>,
    pub(crate) row_places: Arc<[PlaceNumber]>,
    /// Address of each row, if its value is a valid one.
    pub(crate) addresses: Arc<[Option<IpAddr>]>,
    /// Index of each row, if the file has that column.
    pub(crate) indexes: Arc<[Option<i64>]>,
    /// Symbols of the indexes that occur, for `by_index`.
    index_numbers: Arc<IndexNumbers>,
    group_rows: Arc<GroupRows>,
    /// Rows by the number of their place in `places`.
    pub(crate) by_place: Arc<Postings>,
    pub(crate) by_domain: Arc<Postings>,
    /// Rows by symbol in `index_numbers`.
    by_index: Arc<Postings>,
    pub(crate) by_group: Arc<Postings>,
    /// `None` if all rows were read.
    predecessor: Option<Predecessor>,
}

/// The index that another one was made of, and the rows that differ.
#[derive(Debug)]
struct Predecessor {
    index: Weak<InstanceIndex>,
    /// Rows that only that index has.
    removed: Box<[Row]>,
    /// Rows that only the new index has.
    added: Box<[Row]>,
}

impl Predecessor {
    fn of(index: &Arc<InstanceIndex>, edits: &Edits) -> Self {
        Self {
            // A strong reference would keep every index since the start in memory.
            index: Arc::downgrade(index),
            removed: edits.removed().iter().map(|&row| row as Row).collect(),
            added: edits.added().map(|(row, _)| row as Row).collect(),
        }
    }
}

/// The groups of each row.
#[derive(Debug)]
struct GroupRows {
    /// End of each row's groups in `list`.
    ends: Box<[u32]>,
    /// Groups of row 0, then of row 1, and so on.
    list: Box<[Symbol]>,
}

impl GroupRows {
    fn of(&self, row: Row) -> &[Symbol] {
        let index = row as usize;
        let start = if index == 0 {
            0
        } else {
            self.ends[index - 1] as usize
        };
        &self.list[start..self.ends[index] as usize]
    }

    fn postings(&self, groups: usize) -> Postings {
        let rows = 0..self.ends.len() as Row;
        let pairs = rows.flat_map(|row| self.of(row).iter().map(move |&group| (group, row)));
        Postings::new(groups, pairs)
    }
}

impl InstanceIndex {
    pub(crate) fn len(&self) -> usize {
        self.row_places.len()
    }

    pub(crate) fn instance(&self, row: Row) -> Instance<'_> {
        let [instance_group, network, deployment, domain] = self.whole_place_texts(row);
        Instance {
            id: self.id.text(row),
            num_id: self.num_id.text(row),
            instance_group,
            az: self.az.text(row),
            az_id: self.az_id.text(row),
            network,
            network_id: self.network_id.text(row),
            deployment,
            ip: self.addresses[row as usize],
            domain,
            agent_id: self.agent_id.text(row),
            index: self.indexes[row as usize],
            instances: self,
            row,
        }
    }

    pub(crate) fn place_of(&self, row: Row) -> Place {
        self.places.get(self.row_places[row as usize])
    }

    /// Returns the long form of a row's instance: id, instance group, network, deployment and domain, without the
    /// final dot.
    pub(crate) fn long_form(&self, row: Row) -> String {
        let [place @ .., domain] = self.place_texts(row);
        format!("{}.{}.{domain}", self.id.text(row), place.join("."))
    }

    /// Returns a row whose long form is exactly this text.
    pub(crate) fn row_with_long_form(&self, text: &str) -> Option<Row> {
        /// An instance has a row for each of its networks. A limit, because a file may repeat an id at will.
        const MAX_TRIED: usize = 8;
        // An id with a dot would be two labels, so no query reaches it.
        let (id, place) = text.split_at(text.find('.')?);
        let rows = self.id.rows_with(id.as_bytes());
        rows.iter().copied().take(MAX_TRIED).find(|&row| {
            let mut texts = self.place_texts(row).into_iter();
            texts.try_fold(place, |rest, text| {
                rest.strip_prefix('.')?.strip_prefix(text)
            }) == Some("")
        })
    }

    /// Returns instance group, network, deployment and domain of a row, without the final dot.
    fn place_texts(&self, row: Row) -> [&str; 4] {
        let [place @ .., domain] = self.whole_place_texts(row);
        let [instance_group, network, deployment] = place;
        [
            instance_group,
            network,
            deployment,
            domain.strip_suffix('.').unwrap_or(domain),
        ]
    }

    /// Returns instance group, network, deployment and domain of a row.
    pub(crate) fn whole_place_texts(&self, row: Row) -> [&str; 4] {
        let Place {
            instance_group,
            network,
            deployment,
            domain,
        } = self.place_of(row);
        [
            self.places.instance_groups.text(instance_group),
            self.places.networks.text(network),
            self.places.deployments.text(deployment),
            self.domains.text(domain),
        ]
    }

    pub(crate) fn groups_of(&self, row: Row) -> &[Symbol] {
        self.group_rows.of(row)
    }

    pub(crate) fn rows_with_index(&self, index: i64) -> &[Row] {
        self.index_numbers
            .get(&index)
            .map_or(&[], |&number| self.by_index.rows(number))
    }
}

//----------- Edited ---------------------------------------------------------

impl InstanceIndex {
    /// Returns the rows that only this index has (second) and only `older` has (first); `None` unless this
    /// index was made of `older` by edits.
    pub(crate) fn edits_since(&self, older: &Self) -> Option<(&[Row], &[Row])> {
        let Predecessor {
            index,
            removed,
            added,
        } = self.predecessor.as_ref()?;
        // The weak reference keeps the allocation, so no later index can have this address.
        std::ptr::eq(index.as_ptr(), older).then_some((removed, added))
    }

    /// Returns the index after edits that add the rows of `added`, equal to one of which all rows were read;
    /// `None` if the places of the rows are not the same, which takes a new index.
    pub(super) fn edited(self: &Arc<Self>, edits: &Edits, added: &Self) -> Option<Self> {
        let row_places = self.edited_places(edits, added)?;
        // Most edits give a row another address or agent, and leave it in its place.
        let (by_place, by_domain) = if Arc::ptr_eq(&row_places, &self.row_places) {
            (self.by_place.clone(), self.by_domain.clone())
        } else {
            let by_domain = domain_postings(&self.domains, &self.places, &row_places);
            (
                Arc::new(place_postings(&self.places, &row_places)),
                Arc::new(by_domain),
            )
        };
        let indexes = edits.apply(&self.indexes, &added.indexes);
        let (index_numbers, by_index) = if Arc::ptr_eq(&indexes, &self.indexes) {
            (self.index_numbers.clone(), self.by_index.clone())
        } else {
            let (numbers, postings) = index_postings(&indexes);
            (Arc::new(numbers), Arc::new(postings))
        };
        let (groups, group_rows, by_group) = self.edited_groups(edits, added);
        Some(Self {
            by_place,
            by_domain,
            domains: self.domains.clone(),
            domain_names: self.domain_names.clone(),
            places: self.places.clone(),
            row_places,
            addresses: edits.apply(&self.addresses, &added.addresses),
            indexes,
            index_numbers,
            groups,
            group_rows,
            id: edited_column(edits, &self.id, &added.id),
            num_id: edited_column(edits, &self.num_id, &added.num_id),
            az: edited_column(edits, &self.az, &added.az),
            az_id: edited_column(edits, &self.az_id, &added.az_id),
            network_id: edited_column(edits, &self.network_id, &added.network_id),
            agent_id: edited_column(edits, &self.agent_id, &added.agent_id),
            by_index,
            by_group,
            predecessor: Some(Predecessor::of(self, edits)),
        })
    }

    /// Returns the places of the rows after edits; `None` unless exactly the same places occur, first in the
    /// same order.
    fn edited_places(&self, edits: &Edits, added: &Self) -> Option<Arc<[PlaceNumber]>> {
        let mut new = Vec::with_capacity(added.len());
        for row in 0..added.len() as Row {
            let [names @ .., domain] = added.whole_place_texts(row).map(str::as_bytes);
            let domain = self.domains.find(domain)?;
            new.push(self.places.named(names, domain)?);
        }
        let place = edits.apply(&self.row_places, &new);
        if Arc::ptr_eq(&place, &self.row_places) {
            return Some(place);
        }
        let mut seen = 0;
        for &number in &*place {
            // A complete reading numbers places by first appearance, so it would number these
            // differently. The result must equal it.
            if number > seen {
                return None;
            }
            seen += PlaceNumber::from(number == seen);
        }
        (seen as usize == self.places.len()).then_some(place)
    }

    fn edited_groups(
        &self,
        edits: &Edits,
        added: &Self,
    ) -> (Arc<Dictionary>, Arc<GroupRows>, Arc<Postings>) {
        if edits.replace_all(|(row, new)| self.has_groups_of(row as Row, added, new as Row)) {
            return (
                self.groups.clone(),
                self.group_rows.clone(),
                self.by_group.clone(),
            );
        }
        // A group that no row has any more must not keep its number: names above it would still
        // exist.
        let mut symbols = Renumbering::new(&self.groups);
        let mut list = Vec::with_capacity(self.group_rows.list.len());
        let mut ends = Vec::with_capacity(edits.len());
        for piece in edits.pieces() {
            match piece {
                Piece::Kept(rows) => {
                    for row in rows.clone() {
                        for &group in self.groups_of(row as Row) {
                            list.push(symbols.keep(group));
                        }
                        ends.push(list.len() as u32);
                    }
                }
                Piece::Added(row) => {
                    for &group in added.groups_of(*row as Row) {
                        list.push(symbols.add(added.groups.text(group)));
                    }
                    ends.push(list.len() as u32);
                }
            }
        }
        let groups = symbols.finish();
        let group_rows = GroupRows {
            ends: ends.into(),
            list: list.into(),
        };
        let postings = group_rows.postings(groups.len());
        (Arc::new(groups), Arc::new(group_rows), Arc::new(postings))
    }

    fn has_groups_of(&self, row: Row, other: &Self, other_row: Row) -> bool {
        let groups = self.groups_of(row);
        let others = other.groups_of(other_row);
        let mut pairs = groups.iter().zip(others);
        groups.len() == others.len()
            && pairs.all(|(&one, &another)| self.groups.text(one) == other.groups.text(another))
    }
}

/// Returns a column after edits: the old one if no value of it changed.
fn edited_column(edits: &Edits, old: &Arc<Column>, new: &Column) -> Arc<Column> {
    // As texts: the same symbol means another one in the other dictionary.
    let is_same =
        edits.replace_all(|(row, new_row)| old.text(row as Row) == new.text(new_row as Row));
    if is_same {
        old.clone()
    } else {
        Arc::new(old.edited(edits, new))
    }
}

//----------- Places ---------------------------------------------------------

/// A distinct combination of instance group, network, deployment and domain, as in the long form of a name;
/// usually shared by many rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) instance_group: Symbol,
    pub(crate) network: Symbol,
    pub(crate) deployment: Symbol,
    /// Symbol in the fleet's domains.
    pub(crate) domain: Symbol,
}

/// Number of a place in [`Places`].
pub(crate) type PlaceNumber = u32;

/// Collects the places while rows are added; fields correspond to [`Places`].
#[derive(Debug, Default)]
pub(crate) struct PlacesBuilder {
    instance_groups: Dictionary,
    networks: Dictionary,
    deployments: Dictionary,
    list: Vec<Place>,
    numbers: HashMap<Place, PlaceNumber, foldhash::fast::FixedState>,
}

impl PlacesBuilder {
    /// Returns the number of a place, adding it if it is new.
    pub(crate) fn number(
        &mut self,
        instance_group: &str,
        network: &str,
        deployment: &str,
        domain: Symbol,
    ) -> PlaceNumber {
        let Self {
            instance_groups,
            networks,
            deployments,
            list,
            numbers,
        } = self;
        let place = Place {
            instance_group: instance_groups.intern(instance_group),
            network: networks.intern(network),
            deployment: deployments.intern(deployment),
            domain,
        };
        *numbers.entry(place).or_insert_with(|| {
            list.push(place);
            (list.len() - 1) as PlaceNumber
        })
    }

    pub(crate) fn build(self) -> Places {
        let Self {
            instance_groups,
            networks,
            deployments,
            list,
            numbers,
        } = self;
        Places {
            by_instance_group: postings_by(&list, instance_groups.len(), |place| {
                place.instance_group
            }),
            by_deployment: postings_by(&list, deployments.len(), |place| place.deployment),
            instance_groups,
            networks,
            deployments,
            list,
            numbers,
        }
    }
}

fn postings_by(list: &[Place], symbols: usize, symbol: fn(&Place) -> Symbol) -> Postings {
    let pairs = list.iter().enumerate();
    Postings::new(
        symbols,
        pairs.map(move |(number, place)| (symbol(place), number as PlaceNumber)),
    )
}

/// All places of the fleet, searchable by names and patterns.
#[derive(Debug)]
pub(crate) struct Places {
    pub(crate) instance_groups: Dictionary,
    pub(crate) networks: Dictionary,
    pub(crate) deployments: Dictionary,
    list: Vec<Place>,
    /// Number of each place, for lookups by three exact names.
    numbers: HashMap<Place, PlaceNumber, foldhash::fast::FixedState>,
    by_instance_group: Postings,
    by_deployment: Postings,
}

impl Places {
    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    pub(crate) fn get(&self, number: PlaceNumber) -> Place {
        self.list[number as usize]
    }

    /// Returns the number of a place; `None` if no row has it.
    pub(crate) fn number_of(&self, place: &Place) -> Option<PlaceNumber> {
        self.numbers.get(place).copied()
    }

    /// Returns the number of the place with these names of instance group, network and deployment; `None` if no row
    /// has it.
    pub(crate) fn named(&self, names: [&[u8]; 3], domain: Symbol) -> Option<PlaceNumber> {
        let [instance_group, network, deployment] = names;
        let instance_group = self.instance_groups.find(instance_group)?;
        let network = self.networks.find(network)?;
        let deployment = self.deployments.find(deployment)?;
        self.number_of(&Place {
            instance_group,
            network,
            deployment,
            domain,
        })
    }

    /// Returns the places of a domain that match the patterns for instance group, network and
    /// deployment, in ascending order.
    ///
    /// Three exact names, the usual case, are found by hash. Otherwise the candidates come from the
    /// instance group or the deployment, whichever leaves fewer; only if both are `*` are all
    /// places scanned.
    pub(crate) fn find(
        &self,
        domain: Symbol,
        patterns: &[Pattern<'_>; 3],
    ) -> SmallVec<[PlaceNumber; 4]> {
        let [instance_group, _, deployment] = patterns;
        if let [
            Pattern::Exact(instance_group),
            Pattern::Exact(network),
            Pattern::Exact(deployment),
        ] = *patterns
        {
            return self
                .named([instance_group, network, deployment], domain)
                .into_iter()
                .collect();
        }
        let by_instance_group = Candidates::of(
            &self.instance_groups,
            &self.by_instance_group,
            instance_group,
        );
        let by_deployment = Candidates::of(&self.deployments, &self.by_deployment, deployment);
        let candidates = match (by_instance_group, by_deployment) {
            (Some(one), Some(other)) => Some(if other.len() < one.len() { other } else { one }),
            (one, other) => one.or(other),
        };
        let mut found = SmallVec::new();
        match candidates {
            Some(Candidates { symbols, postings }) => {
                for &number in symbols.iter().flat_map(|&symbol| postings.rows(symbol)) {
                    if self.fits(number, domain, patterns) {
                        found.push(number);
                    }
                }
            }
            None => {
                for number in 0..self.list.len() as PlaceNumber {
                    if self.fits(number, domain, patterns) {
                        found.push(number);
                    }
                }
            }
        }
        // `Bound::holds` looks places up by binary search.
        found.sort_unstable();
        found
    }

    fn fits(&self, number: PlaceNumber, domain: Symbol, patterns: &[Pattern<'_>; 3]) -> bool {
        let [instance_group, network, deployment] = patterns;
        let place = self.get(number);
        place.domain == domain
            && instance_group.fits(self.instance_groups.text(place.instance_group).as_bytes())
            && network.fits(self.networks.text(place.network).as_bytes())
            && deployment.fits(self.deployments.text(place.deployment).as_bytes())
    }
}

/// The places that match one pattern.
struct Candidates<'p> {
    symbols: SmallVec<[Symbol; 1]>,
    postings: &'p Postings,
}

impl<'p> Candidates<'p> {
    /// Returns the places whose name matches; `None`: all match.
    fn of(names: &Dictionary, postings: &'p Postings, pattern: &Pattern<'_>) -> Option<Self> {
        let mut symbols = SmallVec::new();
        match *pattern {
            Pattern::Any => return None,
            Pattern::Nothing => {}
            Pattern::Exact(name) => symbols.extend(names.find(name)),
            Pattern::Prefix(_) | Pattern::Suffix(_) => {
                for (symbol, name) in names.iter() {
                    if pattern.fits(name.as_bytes()) {
                        symbols.push(symbol);
                    }
                }
            }
        }
        Some(Self { symbols, postings })
    }

    fn len(&self) -> usize {
        self.symbols
            .iter()
            .map(|&symbol| self.postings.rows(symbol).len())
            .sum()
    }
}
