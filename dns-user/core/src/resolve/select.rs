//! Row selection by criteria: scans the shortest candidate list of the indexes and tests each of
//! its rows against the other criteria.

use smallvec::SmallVec;

use crate::catalog::{InstanceIndex, Narrowing, Postings, Row, Symbol};
use crate::query::{Criteria, Filter, Question, Strategy};

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

/// Finds the rows selected by a name; `narrowing` is an additional criterion, from a placeholder in
/// an alias.
pub(crate) fn select<'f>(
    instances: &'f InstanceIndex,
    question: &Question<'_>,
    narrowing: Option<Narrowing>,
) -> Matches<'f> {
    let found = |rows: &[Row]| Matches { rows: rows.to_vec(), ..Matches::default() };
    match question {
        Question::Agent(agent) => match instances.agent_id.dictionary.find(agent) {
            Some(agent) => found(instances.by_agent_id.rows(agent)),
            None => Matches::default(),
        },
        Question::Anywhere(None) => {
            Matches { rows: (0..instances.len() as Row).collect(), ..Matches::default() }
        }
        Question::Anywhere(Some(id)) => match instances.id.dictionary.find(id) {
            Some(id) => found(instances.by_id.rows(id)),
            None => Matches::default(),
        },
        Question::Within(domain, criteria) => match Bound::new(instances, *domain, criteria, narrowing) {
            None => Matches::default(),
            Some(bound) => Matches {
                rows: bound.rows(),
                strategy: criteria.filter.strategy,
                group: bound.group.map(|group| instances.groups.text(group)),
                synchronous: criteria.filter.synchronous,
            },
        },
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
    narrowing: Option<Narrowing>,
}

impl<'f> Bound<'f> {
    /// Looks up the strings; `None` if one does not occur, so that no row can match.
    fn new(
        instances: &'f InstanceIndex,
        domain: Symbol,
        criteria: &Criteria<'_>,
        narrowing: Option<Narrowing>,
    ) -> Option<Self> {
        let Criteria { id, filter, group, place } = criteria;
        let Filter { az_ids, indexes, num_ids, network_ids, strategy: _, synchronous: _ } = filter;
        Some(Self {
            instances,
            domain,
            id: look_up(id, |id| instances.id.dictionary.find(id))?,
            group: look_up(group, |group| instances.groups.find(group))?,
            places: place.as_ref().map(|patterns| instances.places.find(domain, patterns)),
            az_ids: alternatives(az_ids, |text| instances.az_id.dictionary.find(text))?,
            num_ids: alternatives(num_ids, |text| instances.num_id.dictionary.find(text))?,
            network_ids: alternatives(network_ids, |text| instances.network_id.dictionary.find(text))?,
            indexes: alternatives(indexes, index)?,
            narrowing,
        })
    }

    /// Returns the rows that meet all criteria.
    fn rows(&self) -> Vec<Row> {
        let lists = self.shortest();
        let candidates = lists.iter().map(|list| list.len()).sum();
        let mut rows = Vec::with_capacity(candidates);
        rows.extend(lists.into_iter().flatten().copied().filter(|&row| self.holds(row)));
        rows
    }

    /// Returns the lists of the criterion with the fewest candidates. They are disjoint: a row has
    /// one value per column, and a name has one group at most.
    fn shortest(&self) -> Lists<'f> {
        let instances = self.instances;
        let mut best: Lists<'f> = [instances.by_domain.rows(self.domain)].into_iter().collect();
        let mut consider = |lists: Lists<'f>| {
            let length = |lists: &Lists<'f>| lists.iter().map(|list| list.len()).sum::<usize>();
            if length(&lists) < length(&best) {
                best = lists;
            }
        };
        let lists = |postings: &'f Postings, symbols: &[Symbol]| -> Lists<'f> {
            symbols.iter().map(|&symbol| postings.rows(symbol)).collect()
        };
        if let Some(id) = self.id {
            consider(lists(&instances.by_id, &[id]));
        }
        if let Some(group) = self.group {
            consider(lists(&instances.by_group, &[group]));
        }
        if let Some(places) = &self.places {
            consider(lists(&instances.by_place, places));
        }
        for (postings, symbols) in [
            (&instances.by_az_id, &self.az_ids),
            (&instances.by_num_id, &self.num_ids),
            (&instances.by_network_id, &self.network_ids),
        ] {
            if !symbols.is_empty() {
                consider(lists(postings, symbols));
            }
        }
        if !self.indexes.is_empty() {
            consider(self.indexes.iter().map(|&index| instances.rows_with_index(index)).collect());
        }
        match self.narrowing {
            Some(Narrowing::Number(number)) => consider(lists(&instances.by_num_id, &[number])),
            Some(Narrowing::Index(index)) => {
                consider([instances.rows_with_index(index)].into_iter().collect())
            }
            Some(Narrowing::Zone(zone)) => consider(lists(&instances.by_az, &[zone])),
            Some(Narrowing::Network(_)) | None => {}
        }
        best
    }

    /// Returns whether a row meets all criteria.
    fn holds(&self, row: Row) -> bool {
        let instances = self.instances;
        let index = row as usize;
        let place = instances.place_of(row);
        let among = |symbols: &[Symbol], symbol| symbols.is_empty() || symbols.contains(&symbol);
        place.domain == self.domain
            && self.id.is_none_or(|id| instances.id.values[index] == id)
            && self.places.as_ref().is_none_or(|places| places.binary_search(&instances.place[index]).is_ok())
            && among(&self.az_ids, instances.az_id.values[index])
            && among(&self.num_ids, instances.num_id.values[index])
            && among(&self.network_ids, instances.network_id.values[index])
            && (self.indexes.is_empty()
                || instances.indexes[index].is_some_and(|index| self.indexes.contains(&index)))
            && self.group.is_none_or(|group| instances.groups_of(row).contains(&group))
            && self.narrowing.is_none_or(|narrowing| match narrowing {
                Narrowing::Number(number) => instances.num_id.values[index] == number,
                Narrowing::Index(number) => instances.indexes[index] == Some(number),
                Narrowing::Zone(zone) => instances.az.values[index] == zone,
                Narrowing::Network(network) => place.network == network,
            })
    }
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
