//! The names in the map, by key, and their number by kind; the snapshot's list: the names to
//! publish before the first query, and the remaining work of a new list.

use std::collections::VecDeque;

use dns_common::entry::{Location, MAX_ENTRY_SIZE};
use dns_core::{
    changes::{Facet, Facets},
    name::Name,
};
use hashbrown::{HashMap, HashSet};

use super::entry_store::{EntryStore, Placed};
use crate::{
    map::{layout::EntryRefusal, store::StoreFill},
    publish::{dependents::SetNumber, second_chance::SecondChance},
};

/// The reason why a name is in the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Listed by the snapshot.
    Published,
    /// Queried, and it exists.
    Learned,
    /// Queried, and it does not exist.
    Negative,
}

/// One name in the map; its entry holds the name itself. Kept small, because a few bytes more per
/// name amount to half a megabyte.
#[derive(Debug)]
pub(super) struct NameRecord {
    /// The instances on whose health the answer depends.
    pub(super) dependency: Option<SetNumber>,
    /// Ticket in the queue of its kind.
    ticket: u64,
    pub(super) location: Location,
    /// The only facet of the name, or [`NONE`] or [`SEVERAL`].
    facet: Facet,
    /// Length of the entry in bytes.
    size: u16,
    pub(super) kind: Kind,
}

const _: () = assert!(MAX_ENTRY_SIZE <= u16::MAX as usize && size_of::<NameRecord>() == 24);

/// Stands for no facet: the meaning of the name depends on no row.
const NONE: Facet = Facet::reserved(0);

/// Stands for the facets in [`Records::several`].
const SEVERAL: Facet = Facet::reserved(1);

/// A set of facets with a bit for each slot of a member. Every name is compared with it before a new answer is published,
/// and nearly every one is excluded by its bit.
struct FacetFilter<'a> {
    members: &'a HashSet<Facet>,
    slots: [u64; Facet::SLOTS / 64],
}

impl<'a> FacetFilter<'a> {
    fn of(members: &'a HashSet<Facet>) -> Self {
        let mut slots = [0; Facet::SLOTS / 64];
        for facet in members {
            slots[facet.slot() / 64] |= 1 << (facet.slot() % 64);
        }
        Self { members, slots }
    }

    fn contains(&self, facet: Facet) -> bool {
        let bits = self.slots[facet.slot() / 64];
        bits & 1 << (facet.slot() % 64) != 0 && self.members.contains(&facet)
    }
}

impl NameRecord {
    fn holds(&self, kind: Kind, ticket: u64) -> bool {
        self.kind == kind && self.ticket == ticket
    }

    pub(super) fn size(&self) -> usize {
        self.size.into()
    }

    /// Sets location and length of the entry; the length is at most [`MAX_ENTRY_SIZE`].
    pub(super) fn place(&mut self, location: Location, size: usize) {
        self.location = location;
        self.size = u16::try_from(size).expect("no entry is longer than MAX_ENTRY_SIZE");
    }
}

/// The names in the map, and their order of eviction.
#[derive(Debug, Default)]
pub(super) struct Records {
    by_key: HashMap<u64, NameRecord>,
    /// Number of names by kind: published, learned, negative.
    counts: [usize; 3],
    /// Learned names in order of eviction.
    learned: SecondChance,
    /// Negative names in order of eviction.
    negative: SecondChance,
    /// The facets of names with more than one, by key.
    several: HashMap<u64, Box<[Facet]>>,
}

impl Records {
    pub(super) fn get(&self, key: u64) -> Option<&NameRecord> {
        self.by_key.get(&key)
    }

    /// Returns the record with this key for changes to anything but the kind ([`Self::set_kind`]).
    pub(super) fn get_mut(&mut self, key: u64) -> Option<&mut NameRecord> {
        self.by_key.get_mut(&key)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &NameRecord)> {
        self.by_key.iter().map(|(&key, record)| (key, record))
    }

    pub(super) fn count(&self, kind: Kind) -> usize {
        self.counts[kind as usize]
    }

    pub(super) fn positive_count(&self) -> usize {
        self.count(Kind::Published) + self.count(Kind::Learned)
    }

    /// Adds a name as the last of its kind to be evicted. `last_used_ns` is taken from its entry.
    pub(super) fn insert(&mut self, entry: Placed, kind: Kind, last_used_ns: u64) {
        let Placed {
            key,
            location,
            size,
        } = entry;
        let mut record = NameRecord {
            dependency: None,
            ticket: 0,
            location,
            facet: NONE,
            size: 0,
            kind,
        };
        record.place(location, size);
        self.by_key.insert(key, record);
        self.counts[kind as usize] += 1;
        self.queue(key, kind, last_used_ns);
    }

    pub(super) fn remove(&mut self, key: u64) -> Option<NameRecord> {
        let record = self.by_key.remove(&key)?;
        self.counts[record.kind as usize] -= 1;
        // Its turn in the queue stays until it comes: without the record its ticket is void.
        if record.facet == SEVERAL {
            self.several.remove(&key);
        }
        Some(record)
    }

    pub(super) fn set_facets(&mut self, key: u64, facets: &Facets) {
        let Some(record) = self.by_key.get_mut(&key) else {
            return;
        };
        if record.facet == SEVERAL {
            self.several.remove(&key);
        }
        // A name with one facet needs no memory besides its record.
        record.facet = match facets[..] {
            [] => NONE,
            [facet] => facet,
            [..] => {
                self.several.insert(key, facets[..].into());
                SEVERAL
            }
        };
    }

    /// Returns the names that have one of these facets.
    pub(super) fn with_facets(&self, changed: &HashSet<Facet>) -> Vec<u64> {
        let changed = FacetFilter::of(changed);
        let mut keys = Vec::new();
        for (key, record) in &self.by_key {
            if changed.contains(record.facet) {
                keys.push(*key);
            }
        }
        for (key, facets) in &self.several {
            if facets.iter().any(|&facet| changed.contains(facet)) {
                keys.push(*key);
            }
        }
        keys
    }

    /// Moves a name to another kind; `false` if it already has that kind, or is not in the map.
    pub(super) fn set_kind(&mut self, key: u64, kind: Kind, store: &EntryStore) -> bool {
        let Some(record) = self
            .by_key
            .get_mut(&key)
            .filter(|record| record.kind != kind)
        else {
            return false;
        };
        self.counts[record.kind as usize] -= 1;
        record.kind = kind;
        self.counts[kind as usize] += 1;
        let last_used_ns = store.memory.last_used_ns(record.location);
        // As the last of its new kind; its turn in the old queue is void, because its ticket
        // changes.
        self.queue(key, kind, last_used_ns);
        true
    }

    /// Returns the next name of a kind to evict; `None` if the kind has no names to evict.
    pub(super) fn next_to_evict(&mut self, kind: Kind, store: &EntryStore) -> Option<u64> {
        let Self {
            by_key,
            counts,
            learned,
            negative,
            several: _,
        } = self;
        queue_of(learned, negative, kind)?.next(counts[kind as usize], |key, ticket| {
            let record = by_key
                .get(&key)
                .filter(|record| record.holds(kind, ticket))?;
            Some(store.memory.last_used_ns(record.location))
        })
    }

    /// Queues a name as the last of its kind if the kind has a queue.
    fn queue(&mut self, key: u64, kind: Kind, last_used_ns: u64) {
        let Self {
            by_key,
            counts,
            learned,
            negative,
            several: _,
        } = self;
        let Some(queue) = queue_of(learned, negative, kind) else {
            return;
        };
        let ticket = queue.queue(key, last_used_ns, counts[kind as usize], |key, ticket| {
            by_key
                .get(&key)
                .is_some_and(|record| record.holds(kind, ticket))
        });
        if let Some(record) = by_key.get_mut(&key) {
            record.ticket = ticket;
        }
    }
}

/// Returns the queue of a kind; `None` for names that are never evicted.
fn queue_of<'a>(
    learned: &'a mut SecondChance,
    negative: &'a mut SecondChance,
    kind: Kind,
) -> Option<&'a mut SecondChance> {
    match kind {
        Kind::Published => None,
        Kind::Learned => Some(learned),
        Kind::Negative => Some(negative),
    }
}

//----------- The snapshot's list --------------------------------------------

/// The reason why a listed name is not in the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnpublishedReason {
    /// The name or its answer cannot be an entry.
    Entry(EntryRefusal),
    /// Another name has the same hash.
    Collision,
    /// The index or the store is full, and none of its names may be evicted.
    NoRoom,
}

#[derive(Debug, Default)]
pub(super) struct Listing {
    /// Keys of the listed names, up to the limit.
    keys: HashSet<u64>,
    /// Number of names past the limit.
    beyond: usize,
    /// Listed names within the limit that are missing from the map.
    unfitting: HashMap<u64, UnpublishedReason>,
    /// The ones whose next answer may fit, by key.
    too_large: HashMap<u64, Name>,
}

impl Listing {
    /// Returns a new list; `beyond` is the number of names past the limit of listed names.
    pub(super) fn new(listed: &[(u64, Name)], beyond: usize) -> Self {
        Self {
            keys: listed.iter().map(|&(key, _)| key).collect(),
            beyond,
            ..Self::default()
        }
    }

    /// Adds a name, unless the list has `limit` names; returns whether it is listed. A name that is not
    /// `is_new` was counted before.
    pub(super) fn add(&mut self, key: u64, limit: usize, is_new: bool) -> bool {
        if self.keys.len() >= limit && !self.keys.contains(&key) {
            // Only counted: the status shows how many names the limit leaves out.
            self.beyond += usize::from(is_new);
            return false;
        }
        self.keys.insert(key);
        true
    }

    pub(super) fn remove(&mut self, key: u64) {
        if !self.keys.remove(&key) {
            // It was one of those past the limit.
            self.beyond = self.beyond.saturating_sub(1);
        }
        self.fits(key);
    }

    /// Returns the listed names whose answers are too large for an entry.
    pub(super) fn too_large(&self) -> impl Iterator<Item = (u64, &Name)> {
        self.too_large.iter().map(|(&key, name)| (key, name))
    }

    pub(super) fn contains(&self, key: u64) -> bool {
        self.keys.contains(&key)
    }

    /// Records that a listed name did not fit. Other names are answered in userspace and not
    /// recorded, because clients could otherwise fill the memory.
    pub(super) fn note_unfitting(&mut self, key: u64, name: &Name, reason: UnpublishedReason) {
        if self.contains(key) {
            self.unfitting.insert(key, reason);
            // Only these may fit after a change of their answer; the others need another name, or
            // room.
            if reason == UnpublishedReason::Entry(EntryRefusal::TooManyAddresses) {
                self.too_large.insert(key, name.clone());
            }
        }
    }

    /// Records that a name is in the map.
    pub(super) fn fits(&mut self, key: u64) {
        self.unfitting.remove(&key);
        self.too_large.remove(&key);
    }

    pub(super) fn unfitting(&self) -> UnfittingStatus {
        let mut status = UnfittingStatus {
            no_room: self.beyond,
            ..Default::default()
        };
        for reason in self.unfitting.values() {
            *match reason {
                UnpublishedReason::Entry(EntryRefusal::NulByte) => &mut status.nul_byte,
                UnpublishedReason::Entry(EntryRefusal::TooManyAddresses) => {
                    &mut status.too_many_addresses
                }
                UnpublishedReason::Collision => &mut status.collision,
                UnpublishedReason::NoRoom => &mut status.no_room,
            } += 1;
        }
        status
    }
}

/// The remaining work until the map contains the new answers.
#[derive(Default)]
pub(super) struct Pass {
    /// Names already in the map. They are processed first, to replace stale answers and to make
    /// room for new names.
    known: VecDeque<u64>,
    listed: VecDeque<(u64, Name)>,
}

pub(super) enum Step {
    /// Update a name already in the map.
    Reconsider(u64),
    Publish(u64, Name),
}

impl Pass {
    pub(super) fn new(known: Vec<u64>, listed: Vec<(u64, Name)>) -> Self {
        Self {
            known: known.into(),
            listed: listed.into(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.known.is_empty() && self.listed.is_empty()
    }

    /// Adds names before all others.
    pub(super) fn add_first(&mut self, known: Vec<u64>, listed: Vec<(u64, Name)>) {
        // From the end, because each is put before those that are there.
        for key in known.into_iter().rev() {
            self.known.push_front(key);
        }
        for name in listed.into_iter().rev() {
            self.listed.push_front(name);
        }
    }
}

impl Iterator for Pass {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        if let Some(key) = self.known.pop_front() {
            return Some(Step::Reconsider(key));
        }
        let (key, name) = self.listed.pop_front()?;
        Some(Step::Publish(key, name))
    }
}

/// Number of names and memory in use, for status and metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct TableStatus {
    /// Listed names in the map.
    pub published: usize,
    /// Learned names in the map.
    pub learned: usize,
    /// Names in the fast-path map that do not exist or are malformed.
    pub negative: usize,
    /// Listed names that are not in the map, by reason; userspace answers them.
    #[serde(rename = "unfitting_by_reason")]
    pub unfitting: UnfittingStatus,
    /// Limit of published and learned names.
    pub max_names: usize,
    /// Limit of negative names.
    pub max_negative: usize,
    /// Memory of the entries.
    pub store: StoreFill,
    /// Names evicted since the start.
    pub evicted: u64,
    /// Entries written since the start.
    pub written: u64,
    /// Whether the kernel refuses membarrier, which would confirm that no program still reads the
    /// cells of a replaced entry; the publisher then waits for a fixed time instead.
    #[serde(rename = "unvouched")]
    pub grace_unconfirmed: bool,
}

/// Number of listed names that are not in the map, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct UnfittingStatus {
    /// A label holds a NUL byte.
    pub nul_byte: usize,
    /// More addresses than an entry holds.
    pub too_many_addresses: usize,
    /// Another name has the same hash.
    pub collision: usize,
    /// `max_names` or the store is exhausted; the interface answers such a name once it has been queried.
    pub no_room: usize,
}

impl UnfittingStatus {
    /// Returns the total number of listed names that are not in the map.
    pub fn total(&self) -> usize {
        self.by_reason().iter().map(|(_, count)| count).sum()
    }

    /// Describes the numbers above zero, for operators.
    pub fn in_words(&self) -> String {
        let &Self {
            nul_byte,
            too_many_addresses,
            collision,
            no_room,
        } = self;
        let reasons = [
            (nul_byte, "with a NUL byte"),
            (
                too_many_addresses,
                "with more addresses than an entry holds",
            ),
            (collision, "with the hash of another name"),
            (no_room, "without room (raise xdp.max_names)"),
        ];
        let mut words = Vec::new();
        for (count, reason) in reasons {
            if count > 0 {
                words.push(format!("{count} {reason}"));
            }
        }
        words.join(", ")
    }

    /// Returns each number with its label in metrics.
    pub fn by_reason(&self) -> [(&'static str, usize); 4] {
        let &Self {
            nul_byte,
            too_many_addresses,
            collision,
            no_room,
        } = self;
        [
            ("nul_byte", nul_byte),
            ("too_many_addresses", too_many_addresses),
            ("collision", collision),
            ("no_room", no_room),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filter_holds_exactly_the_members() {
        let members: HashSet<Facet> = (0..1000).map(Facet::of).chain([Facet::ANY]).collect();
        let filter = FacetFilter::of(&members);
        // With this many of either there are common slots.
        let all = (0..100_000)
            .map(Facet::of)
            .chain([Facet::ANY, NONE, SEVERAL]);
        for facet in all {
            assert_eq!(
                filter.contains(facet),
                members.contains(&facet),
                "{facet:?}"
            );
        }
    }
}
