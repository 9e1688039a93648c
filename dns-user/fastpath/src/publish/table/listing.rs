//! The snapshot's list: the names to publish before the first query, the listed names that did not
//! fit, and the remaining work of a new list.

use std::vec;

use dns_core::name::Name;
use hashbrown::{HashMap, HashSet};

use super::status::UnfittingStatus;
use crate::map::layout::Unfitting as EntryUnfitting;

/// The reason why a listed name is not in the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unfitting {
    /// The name or its answer cannot be an entry.
    Entry(EntryUnfitting),
    /// Another name has the same hash.
    Collision,
    /// The index or the store is full, and none of its names may be evicted.
    NoRoom,
}

/// The names of the latest list.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// Keys of the listed names, up to the limit.
    keys: HashSet<u64>,
    /// Number of names past the limit.
    beyond: usize,
    /// Listed names within the limit that are missing from the map.
    unfitting: HashMap<u64, Unfitting>,
}

impl Listing {
    /// Returns a new list; `beyond` is the number of names past the limit of listed names.
    pub(super) fn new(listed: &[(u64, Name)], beyond: usize) -> Self {
        Self { keys: listed.iter().map(|&(key, _)| key).collect(), beyond, unfitting: HashMap::new() }
    }

    /// Returns whether the name is listed.
    pub(super) fn contains(&self, key: u64) -> bool {
        self.keys.contains(&key)
    }

    /// Records that a listed name did not fit. Other names are answered in userspace and not
    /// recorded, because clients could otherwise fill the memory.
    pub(super) fn note_unfitting(&mut self, key: u64, reason: Unfitting) {
        if self.contains(key) {
            self.unfitting.insert(key, reason);
        }
    }

    /// Records that a name is in the map.
    pub(super) fn fits(&mut self, key: u64) {
        self.unfitting.remove(&key);
    }

    /// Returns the number of missing names, by reason.
    pub(super) fn unfitting(&self) -> UnfittingStatus {
        let mut status = UnfittingStatus { no_room: self.beyond, ..Default::default() };
        for reason in self.unfitting.values() {
            *match reason {
                Unfitting::Entry(EntryUnfitting::NulByte) => &mut status.nul_byte,
                Unfitting::Entry(EntryUnfitting::TooManyAddresses) => &mut status.too_many_addresses,
                Unfitting::Collision => &mut status.collision,
                Unfitting::NoRoom => &mut status.no_room,
            } += 1;
        }
        status
    }
}

/// The remaining work until the map contains the new answers.
pub(super) struct Pass {
    /// Names already in the map. They are processed first, to replace stale answers and to make
    /// room for new names.
    known: vec::IntoIter<u64>,
    listed: vec::IntoIter<(u64, Name)>,
}

/// One step of a pass.
pub(super) enum Step {
    /// Update a name already in the map.
    Reconsider(u64),
    Publish(u64, Name),
}

impl Pass {
    /// Returns a pass over all these names.
    pub(super) fn new(known: Vec<u64>, listed: Vec<(u64, Name)>) -> Self {
        Self { known: known.into_iter(), listed: listed.into_iter() }
    }
}

impl Iterator for Pass {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        let known = self.known.next().map(Step::Reconsider);
        known.or_else(|| self.listed.next().map(|(key, name)| Step::Publish(key, name)))
    }
}
