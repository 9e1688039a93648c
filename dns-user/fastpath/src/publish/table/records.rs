//! The names that are in the map, by key, and how many of each kind.

use std::collections::VecDeque;

use dns_common::entry::{Location, MAX_ENTRY_SIZE};
use hashbrown::HashMap;

use super::entry_store::EntryStore;
use crate::publish::dependents::SetNumber;

/// Where an entry lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Placed {
    /// Hash of its name.
    pub(super) key: u64,
    /// Its first cell.
    pub(super) location: Location,
    /// Its length in bytes.
    pub(super) size: usize,
}

/// Why a name is in the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Listed by the snapshot.
    Published,
    /// Asked for, and it exists.
    Learned,
    /// Asked for, and it does not.
    Negative,
}

/// One name in the map; the name itself stands in its entry. There are as many as names: a few
/// bytes more here are half a megabyte.
#[derive(Debug)]
pub(super) struct Record {
    /// The instances on whose health the answer depends.
    pub(super) dependency: Option<SetNumber>,
    /// Which place in its kind's queue is its own; older ones are void.
    ticket: u64,
    /// Where its entry lies.
    location: Location,
    /// Bytes of its entry.
    size: u16,
    /// Why it is there.
    kind: Kind,
}

const _: () = assert!(MAX_ENTRY_SIZE <= u16::MAX as usize);

impl Record {
    /// Why it is there.
    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    /// Where its entry lies.
    pub(super) fn location(&self) -> Location {
        self.location
    }

    /// Bytes of its entry.
    pub(super) fn size(&self) -> usize {
        self.size.into()
    }

    /// Notes where its entry lies now, and its bytes: [`MAX_ENTRY_SIZE`] at most.
    pub(super) fn place(&mut self, location: Location, size: usize) {
        self.location = location;
        self.size = u16::try_from(size).expect("no entry is longer than MAX_ENTRY_SIZE");
    }
}

/// A place in a queue of names that may be evicted.
#[derive(Debug)]
struct Turn {
    /// The name.
    key: u64,
    /// That of its record, if this is its place.
    ticket: u64,
    /// The name's last use when it was queued, or last spared from eviction.
    spared_at_ns: u64,
}

/// All names in the map, and whose turn it is to leave it.
#[derive(Debug, Default)]
pub(super) struct Records {
    /// The names by key.
    by_key: HashMap<u64, Record>,
    /// Names by kind: published, learned, negative.
    counts: [usize; 3],
    /// Learned names in the order of their turn to be evicted.
    learned: VecDeque<Turn>,
    /// The same of negative names.
    negative: VecDeque<Turn>,
    /// The next ticket.
    next_ticket: u64,
}

impl Records {
    /// The name with this key.
    pub(super) fn get(&self, key: u64) -> Option<&Record> {
        self.by_key.get(&key)
    }

    /// The same, to be changed; its kind by [`Self::set_kind`].
    pub(super) fn get_mut(&mut self, key: u64) -> Option<&mut Record> {
        self.by_key.get_mut(&key)
    }

    /// All of them.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &Record)> {
        self.by_key.iter().map(|(&key, record)| (key, record))
    }

    /// How many there are of a kind.
    pub(super) fn count(&self, kind: Kind) -> usize {
        self.counts[kind as usize]
    }

    /// How many exist: published and learned ones.
    pub(super) fn useful(&self) -> usize {
        self.count(Kind::Published) + self.count(Kind::Learned)
    }

    /// Adds a name, the last of its kind to be evicted. `last_used_ns`: of its entry.
    pub(super) fn insert(&mut self, entry: Placed, kind: Kind, last_used_ns: u64) {
        let Placed { key, location, size } = entry;
        let mut record = Record { dependency: None, ticket: 0, location, size: 0, kind };
        record.place(location, size);
        self.by_key.insert(key, record);
        self.counts[kind as usize] += 1;
        self.queue(key, last_used_ns);
    }

    /// Takes a name out.
    pub(super) fn remove(&mut self, key: u64) -> Option<Record> {
        let record = self.by_key.remove(&key)?;
        self.counts[record.kind as usize] -= 1;
        Some(record)
    }

    /// Moves a name to another kind; `false`: it is of that kind already, or not there.
    pub(super) fn set_kind(&mut self, key: u64, kind: Kind, store: &EntryStore) -> bool {
        let Some(record) = self.by_key.get_mut(&key).filter(|record| record.kind != kind) else {
            return false;
        };
        self.counts[record.kind as usize] -= 1;
        record.kind = kind;
        self.counts[kind as usize] += 1;
        let last_used_ns = store.last_used_ns(record.location);
        self.queue(key, last_used_ns);
        true
    }

    /// Whose turn it is to leave, of a kind, by second chance: who was used since it was
    /// last looked at is spared once. `None`: there is none.
    pub(super) fn next_to_evict(&mut self, kind: Kind, store: &EntryStore) -> Option<u64> {
        let count = self.count(kind);
        let queue = queue_of(&mut self.learned, &mut self.negative, kind)?;
        let mut spared = 0;
        while let Some(turn) = queue.pop_front() {
            let Some(record) = self.by_key.get(&turn.key) else { continue };
            if record.ticket != turn.ticket || record.kind != kind {
                continue;
            }
            let last_used = store.last_used_ns(record.location);
            // After a whole round everybody has had the second chance.
            if last_used > turn.spared_at_ns && spared <= count {
                spared += 1;
                queue.push_back(Turn { spared_at_ns: last_used, ..turn });
                continue;
            }
            return Some(turn.key);
        }
        None
    }

    /// Gives a name its place at the end of its kind's queue, if that has one.
    fn queue(&mut self, key: u64, spared_at_ns: u64) {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let Some(record) = self.by_key.get_mut(&key) else { return };
        record.ticket = ticket;
        let count = self.counts[record.kind as usize];
        let Some(queue) = queue_of(&mut self.learned, &mut self.negative, record.kind) else { return };
        queue.push_back(Turn { key, ticket, spared_at_ns });
        if queue.len() > 2 * count + 64 {
            // Places of names that left by other ways.
            let records = &self.by_key;
            queue.retain(|turn| records.get(&turn.key).is_some_and(|record| record.ticket == turn.ticket));
        }
    }
}

/// The queue of a kind; none of names that are never evicted.
fn queue_of<'a>(
    learned: &'a mut VecDeque<Turn>,
    negative: &'a mut VecDeque<Turn>,
    kind: Kind,
) -> Option<&'a mut VecDeque<Turn>> {
    match kind {
        Kind::Published => None,
        Kind::Learned => Some(learned),
        Kind::Negative => Some(negative),
    }
}
