//! The instances in columnar form, with an index for each column.

use std::borrow::Cow;
use std::collections::HashMap;
use std::net::IpAddr;

use smallvec::SmallVec;

use super::columns::{Column, Dictionary, NO_VALUE, Postings, Row, Symbol};
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
        instances.groups_of(self.row).iter().map(|&group| instances.groups.text(group))
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
    id: Column,
    num_id: Column,
    az: Column,
    az_id: Column,
    network_id: Column,
    agent_id: Column,
    /// Domains as in the file, with a final dot.
    domains: Dictionary,
    places: PlacesBuilder,
    /// Strings and place of the previous row: neighbouring rows often share them.
    last: Option<([String; 4], PlaceNumber)>,
    place: Vec<PlaceNumber>,
    addresses: Vec<Option<IpAddr>>,
    indexes: Vec<Option<i64>>,
    groups: Dictionary,
    /// End of each row's groups in `group_list`.
    group_ends: Vec<u32>,
    /// Groups of row 0, then of row 1, and so on.
    group_list: Vec<Symbol>,
}

impl InstanceIndexBuilder {
    pub(crate) fn push(&mut self, row: &NewRow<'_>) {
        let place = self.place(row);
        self.place.push(place);
        self.id.push(row.id);
        self.num_id.push(row.num_id);
        self.az.push(row.az);
        self.az_id.push(row.az_id);
        self.network_id.push(row.network_id);
        self.agent_id.push(row.agent_id);
        self.addresses.push(row.address);
        self.indexes.push(row.index);
        let start = self.group_list.len();
        for group in row.groups {
            let group = self.groups.intern(group);
            // A group listed twice holds the row once (a set, not a list).
            if !self.group_list[start..].contains(&group) {
                self.group_list.push(group);
            }
        }
        self.group_ends.push(self.group_list.len() as u32);
    }

    /// Returns the number of the row's place.
    fn place(&mut self, row: &NewRow<'_>) -> PlaceNumber {
        let texts = [row.instance_group, row.network, row.deployment, row.domain];
        if let Some((last, place)) = &self.last
            && last.iter().zip(texts).all(|(last, text)| last == text)
        {
            return *place;
        }
        let domain = match row.domain.ends_with('.') {
            true => self.domains.intern(row.domain),
            false => self.domains.intern(&format!("{}.", row.domain)),
        };
        let number = self.places.number(row.instance_group, row.network, row.deployment, domain);
        self.last = Some((texts.map(str::to_owned), number));
        number
    }

    pub(crate) fn build(self) -> InstanceIndex {
        let Self {
            mut id,
            mut num_id,
            mut az,
            mut az_id,
            mut network_id,
            mut agent_id,
            domains,
            places,
            last: _,
            place,
            addresses,
            indexes,
            groups,
            group_ends,
            group_list,
        } = self;
        for column in [&mut id, &mut num_id, &mut az, &mut az_id, &mut network_id, &mut agent_id] {
            column.shrink_to_fit();
        }
        let rows = |values: &[u32]| -> Vec<(u32, Row)> {
            values.iter().enumerate().map(|(row, &value)| (value, row as Row)).collect()
        };
        let places = places.build();
        let by_place = Postings::new(places.len(), rows(&place).into_iter());
        let domain_of: Vec<Symbol> = place.iter().map(|&place| places.get(place).domain).collect();
        let by_domain = Postings::new(domains.len(), rows(&domain_of).into_iter());
        let mut index_numbers: HashMap<i64, Symbol, foldhash::fast::FixedState> = HashMap::default();
        let index_of: Vec<Symbol> = indexes
            .iter()
            .map(|index| match index {
                None => NO_VALUE,
                Some(index) => {
                    let next = index_numbers.len() as Symbol;
                    *index_numbers.entry(*index).or_insert(next)
                }
            })
            .collect();
        let with_index = rows(&index_of).into_iter().filter(|&(index, _)| index != NO_VALUE);
        let by_index = Postings::new(index_numbers.len(), with_index);
        let mut row_groups = Vec::with_capacity(group_list.len());
        let mut start = 0;
        for (row, &end) in group_ends.iter().enumerate() {
            row_groups.extend(group_list[start..end as usize].iter().map(|&group| (group, row as Row)));
            start = end as usize;
        }
        let by_group = Postings::new(groups.len(), row_groups.into_iter());
        InstanceIndex {
            by_id: id.postings(),
            by_num_id: num_id.postings(),
            by_az: az.postings(),
            by_az_id: az_id.postings(),
            by_network_id: network_id.postings(),
            by_agent_id: agent_id.postings(),
            by_place,
            by_domain,
            by_index,
            by_group,
            domain_names: Domains::new(domains.iter()),
            id,
            num_id,
            az,
            az_id,
            network_id,
            agent_id,
            domains,
            places,
            place,
            addresses,
            indexes,
            index_numbers,
            groups,
            group_ends,
            group_list,
        }
    }
}

/// The indexed instances; immutable once built.
#[derive(Debug)]
pub(crate) struct InstanceIndex {
    pub(crate) id: Column,
    /// Numeric instance ids, as strings of digits.
    pub(crate) num_id: Column,
    pub(crate) az: Column,
    /// Numeric zone ids, as strings of digits.
    pub(crate) az_id: Column,
    /// Numeric network ids, as strings of digits.
    pub(crate) network_id: Column,
    pub(crate) agent_id: Column,
    /// Domains as in the file, with a final dot.
    pub(crate) domains: Dictionary,
    /// The same domains as names, to find the one that a query ends in.
    pub(crate) domain_names: Domains,
    pub(crate) groups: Dictionary,
    pub(crate) places: Places,
    /// Place of each row.
    pub(crate) place: Vec<PlaceNumber>,
    /// Address of each row, if its value is a valid one.
    pub(crate) addresses: Vec<Option<IpAddr>>,
    /// Index of each row, if the file has that column.
    pub(crate) indexes: Vec<Option<i64>>,
    /// Symbols of the indexes that occur, for `by_index`.
    index_numbers: HashMap<i64, Symbol, foldhash::fast::FixedState>,
    /// End of each row's groups in `group_list`.
    group_ends: Vec<u32>,
    /// Groups of row 0, then of row 1, and so on.
    group_list: Vec<Symbol>,
    pub(crate) by_id: Postings,
    pub(crate) by_num_id: Postings,
    pub(crate) by_az: Postings,
    pub(crate) by_az_id: Postings,
    pub(crate) by_network_id: Postings,
    pub(crate) by_agent_id: Postings,
    /// Rows by the number of their place in `places`.
    pub(crate) by_place: Postings,
    pub(crate) by_domain: Postings,
    /// Rows by symbol in `index_numbers`.
    by_index: Postings,
    pub(crate) by_group: Postings,
}

impl InstanceIndex {
    /// Returns the number of rows.
    pub(crate) fn len(&self) -> usize {
        self.place.len()
    }

    /// Returns a row with its strings.
    pub(crate) fn instance(&self, row: Row) -> Instance<'_> {
        let place = self.place_of(row);
        Instance {
            id: self.id.text(row),
            num_id: self.num_id.text(row),
            instance_group: self.places.instance_groups.text(place.instance_group),
            az: self.az.text(row),
            az_id: self.az_id.text(row),
            network: self.places.networks.text(place.network),
            network_id: self.network_id.text(row),
            deployment: self.places.deployments.text(place.deployment),
            ip: self.addresses[row as usize],
            domain: self.domains.text(place.domain),
            agent_id: self.agent_id.text(row),
            index: self.indexes[row as usize],
            instances: self,
            row,
        }
    }

    /// Returns the place of a row.
    pub(crate) fn place_of(&self, row: Row) -> Place {
        self.places.get(self.place[row as usize])
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
        const TRIED: usize = 8;
        let (id, place) = text.split_at(text.find('.')?);
        let rows = self.by_id.rows(self.id.dictionary.find(id.as_bytes())?);
        rows.iter().copied().take(TRIED).find(|&row| {
            let mut texts = self.place_texts(row).into_iter();
            texts.try_fold(place, |rest, text| rest.strip_prefix('.')?.strip_prefix(text)) == Some("")
        })
    }

    /// Returns instance group, network, deployment and domain of a row, without the final dot.
    fn place_texts(&self, row: Row) -> [&str; 4] {
        let Place { instance_group, network, deployment, domain } = self.place_of(row);
        let domain = self.domains.text(domain);
        [
            self.places.instance_groups.text(instance_group),
            self.places.networks.text(network),
            self.places.deployments.text(deployment),
            domain.strip_suffix('.').unwrap_or(domain),
        ]
    }

    /// Returns the groups of a row.
    pub(crate) fn groups_of(&self, row: Row) -> &[Symbol] {
        let index = row as usize;
        let start = if index == 0 { 0 } else { self.group_ends[index - 1] as usize };
        &self.group_list[start..self.group_ends[index] as usize]
    }

    /// Returns the rows with this instance index.
    pub(crate) fn rows_with_index(&self, index: i64) -> &[Row] {
        self.index_numbers.get(&index).map_or(&[], |&number| self.by_index.rows(number))
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
        let Self { instance_groups, networks, deployments, list, numbers } = self;
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
        let Self { instance_groups, networks, deployments, list, numbers } = self;
        let by = |symbols: usize, symbol: fn(&Place) -> Symbol| {
            let pairs = list.iter().enumerate();
            Postings::new(symbols, pairs.map(move |(number, place)| (symbol(place), number as PlaceNumber)))
        };
        Places {
            by_instance_group: by(instance_groups.len(), |place| place.instance_group),
            by_deployment: by(deployments.len(), |place| place.deployment),
            instance_groups,
            networks,
            deployments,
            list,
            numbers,
        }
    }
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
    /// Returns the number of places.
    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    /// Returns the place with this number.
    pub(crate) fn get(&self, number: PlaceNumber) -> Place {
        self.list[number as usize]
    }

    /// Returns the number of a place; `None` if no row has it.
    pub(crate) fn number_of(&self, place: &Place) -> Option<PlaceNumber> {
        self.numbers.get(place).copied()
    }

    /// Returns the places of a domain that match the patterns for instance group, network and
    /// deployment, in ascending order.
    ///
    /// Three exact names, the usual case, are found by hash. Otherwise the candidates come from the
    /// instance group or the deployment, whichever leaves fewer; only if both are `*` are all
    /// places scanned.
    pub(crate) fn find(&self, domain: Symbol, patterns: &[Pattern<'_>; 3]) -> SmallVec<[PlaceNumber; 4]> {
        let [instance_group, network, deployment] = patterns;
        if let (Pattern::Exact(instance_group), Pattern::Exact(network), Pattern::Exact(deployment)) =
            (instance_group, network, deployment)
        {
            let place = || {
                let instance_group = self.instance_groups.find(instance_group)?;
                let network = self.networks.find(network)?;
                let deployment = self.deployments.find(deployment)?;
                self.number_of(&Place { instance_group, network, deployment, domain })
            };
            return place().into_iter().collect();
        }
        let by_instance_group =
            Candidates::of(&self.instance_groups, &self.by_instance_group, instance_group);
        let by_deployment = Candidates::of(&self.deployments, &self.by_deployment, deployment);
        let candidates = match (by_instance_group, by_deployment) {
            (Some(one), Some(other)) => Some(if other.len() < one.len() { other } else { one }),
            (one, other) => one.or(other),
        };
        let fits = |number: &PlaceNumber| {
            let place = self.get(*number);
            place.domain == domain
                && instance_group.fits(self.instance_groups.text(place.instance_group).as_bytes())
                && network.fits(self.networks.text(place.network).as_bytes())
                && deployment.fits(self.deployments.text(place.deployment).as_bytes())
        };
        let mut found: SmallVec<[PlaceNumber; 4]> = match candidates {
            Some(Candidates { symbols, postings }) => {
                symbols.iter().flat_map(|&symbol| postings.rows(symbol)).copied().filter(fits).collect()
            }
            None => (0..self.list.len() as PlaceNumber).filter(fits).collect(),
        };
        found.sort_unstable();
        found
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
        let symbols = match *pattern {
            Pattern::Any => return None,
            Pattern::Nothing => SmallVec::new(),
            Pattern::Exact(name) => names.find(name).into_iter().collect(),
            Pattern::Prefix(prefix) => names.starting_with(prefix).into(),
            Pattern::Suffix(suffix) => names.ending_with(suffix).into(),
        };
        Some(Self { symbols, postings })
    }

    /// Returns the number of candidates.
    fn len(&self) -> usize {
        self.symbols.iter().map(|&symbol| self.postings.rows(symbol).len()).sum()
    }
}
