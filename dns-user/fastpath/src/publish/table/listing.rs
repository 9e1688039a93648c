//! What the snapshot lists: the names to publish before anybody asks for them, which of
//! them did not get in, and what is left to do of a new list.

use std::vec;

use dns_core::name::Name;
use hashbrown::{HashMap, HashSet};

use super::status::UnfittingStatus;
use crate::map::layout::Unfitting as EntryUnfitting;

/// Why a name that should be in the map is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unfitting {
    /// It cannot be an entry.
    Entry(EntryUnfitting),
    /// Another name has the same hash.
    Collision,
    /// The index or the store is full of names that may not be evicted.
    NoRoom,
}

/// The names of the newest list.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// Their keys, as far as there may be that many.
    keys: HashSet<u64>,
    /// How many names the list has beyond those.
    beyond: usize,
    /// Those of them that are not in the map though they should be.
    unfitting: HashMap<u64, Unfitting>,
}

impl Listing {
    /// A new list, and how many names it has beyond those that may be listed.
    pub(super) fn new(listed: &[(u64, Name)], beyond: usize) -> Self {
        Self { keys: listed.iter().map(|&(key, _)| key).collect(), beyond, unfitting: HashMap::new() }
    }

    /// Whether the list has this name.
    pub(super) fn contains(&self, key: u64) -> bool {
        self.keys.contains(&key)
    }

    /// Remembers that a listed name did not get into the map. Others are only
    /// answered from above: remembering them all would let clients fill memory.
    pub(super) fn note_unfitting(&mut self, key: u64, reason: Unfitting) {
        if self.contains(key) {
            self.unfitting.insert(key, reason);
        }
    }

    /// A name is in the map.
    pub(super) fn fits(&mut self, key: u64) {
        self.unfitting.remove(&key);
    }

    /// How many are not in the map, by reason.
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

/// What is left to do to make the map say what new answers say.
pub(super) struct Pass {
    /// Names that were in the map before. They come first: stale answers go, and room is
    /// made for new names.
    known: vec::IntoIter<u64>,
    /// The new answers' list.
    listed: vec::IntoIter<(u64, Name)>,
}

/// One thing to do.
pub(super) enum Step {
    /// Bring a name that was in the map before up to the newest answers.
    Reconsider(u64),
    /// Put a name of the list into the map.
    Publish(u64, Name),
}

impl Pass {
    /// All there is to do.
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
