//! Answers that a worker remembers, so that a hot name costs one look-up.

use std::{hash::BuildHasher, mem, sync::Arc};

use dns_common::name::MAX_NAME_LEN;
use hashbrown::HashTable;

use crate::{name::Name, resolve::Resolution};

/// Most weight of one of the two halves, in IPv4 addresses: 4 MiB of them.
const MAX_WEIGHT: usize = 1 << 20;
/// What an entry weighs beside its addresses.
const ENTRY_WEIGHT: usize = 64;

/// Names and what they resolved to, all of one generation. When the younger
/// half is full, the older one is given up for it: names in use move to the
/// younger half, so the others go first.
pub(super) struct Memo {
    /// Used since the halves were last exchanged.
    young: Half,
    /// Not used since.
    old: Half,
    /// The generation that everything in here is of.
    generation: u64,
    /// Seeded for this worker, so that nobody can choose names that collide.
    hasher: foldhash::fast::RandomState,
}

/// One remembered answer.
pub(super) struct Entry {
    /// The name.
    pub(super) name: Name,
    /// The answer.
    pub(super) resolution: Arc<Resolution>,
    /// Hash of the name.
    hash: u64,
}

/// A name in lower case, on the stack.
pub(super) struct LowerName {
    /// The bytes, of which `len` count.
    bytes: [u8; MAX_NAME_LEN],
    /// At most [`MAX_NAME_LEN`].
    len: usize,
}

impl LowerName {
    /// Lower-cases a wire-format name of at most 255 bytes; longer ones are cut,
    /// and so equal no name.
    #[inline]
    pub(super) fn new(raw_name: &[u8]) -> Self {
        let mut bytes = [0; MAX_NAME_LEN];
        let len = raw_name.len().min(MAX_NAME_LEN);
        bytes[..len].copy_from_slice(&raw_name[..len]);
        // Length bytes are at most 63, and so never letters.
        bytes[..len].make_ascii_lowercase();
        Self { bytes, len }
    }

    /// The bytes.
    #[inline]
    fn as_wire(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Memo {
    /// Empty.
    pub(super) fn new() -> Self {
        Self {
            young: Half::default(),
            old: Half::default(),
            generation: 0,
            hasher: foldhash::fast::RandomState::default(),
        }
    }

    /// Forgets everything unless it is of `generation`.
    #[inline]
    pub(super) fn keep_only(&mut self, generation: u64) {
        if self.generation != generation {
            self.generation = generation;
            self.young.clear();
            self.old.clear();
        }
    }

    /// What is remembered of a name.
    #[inline]
    pub(super) fn get(&mut self, name: &LowerName) -> Option<&mut Entry> {
        let hash = self.hasher.hash_one(name.as_wire());
        if let Some(at) = self.young.find(hash, name.as_wire()) {
            return self.young.entries.get_mut(at);
        }
        self.get_old(hash, name)
    }

    /// As [`get`](Self::get), among the names not used lately.
    #[cold]
    fn get_old(&mut self, hash: u64, name: &LowerName) -> Option<&mut Entry> {
        let at = self.old.find(hash, name.as_wire())?;
        let Entry { name, resolution, hash: _ } = self.old.entries.get(at)?;
        self.insert(name.clone(), resolution.clone())
    }

    /// Remembers an answer of the current generation.
    pub(super) fn insert(&mut self, name: Name, resolution: Arc<Resolution>) -> Option<&mut Entry> {
        let hash = self.hasher.hash_one(name.as_wire());
        let weight = ENTRY_WEIGHT + resolution.v4.len() + 4 * resolution.v6.len();
        if self.young.weight + weight > MAX_WEIGHT {
            self.old = mem::take(&mut self.young);
        }
        self.young.weight += weight;
        self.young.push(Entry { name, resolution, hash })
    }
}

/// Half of a [`Memo`].
#[derive(Default)]
struct Half {
    /// Positions in `entries`, by hash of the name.
    positions: HashTable<u32>,
    /// In the order of their arrival.
    entries: Vec<Entry>,
    /// Sum over the entries.
    weight: usize,
}

impl Half {
    /// Position of the entry for the name `wire`.
    #[inline]
    fn find(&self, hash: u64, wire: &[u8]) -> Option<usize> {
        let same = |at: &u32| self.entries[*at as usize].name.as_wire() == wire;
        self.positions.find(hash, same).map(|at| *at as usize)
    }

    /// Adds an entry for a name that is not there.
    fn push(&mut self, entry: Entry) -> Option<&mut Entry> {
        // The weight bounds the number of entries far below 2^32.
        let at = self.entries.len() as u32;
        let hash = entry.hash;
        self.entries.push(entry);
        let entries = &self.entries;
        self.positions.insert_unique(hash, at, |at| entries[*at as usize].hash);
        self.entries.last_mut()
    }

    /// Forgets everything, keeps the room.
    fn clear(&mut self) {
        self.positions.clear();
        self.entries.clear();
        self.weight = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::{Checks, Outcome};

    /// A resolution with `count` addresses.
    fn resolution(count: u32) -> Arc<Resolution> {
        let v4 = (0..count).map(std::net::Ipv4Addr::from_bits).collect();
        Arc::new(Resolution { outcome: Outcome::Found, v4, v6: vec![], checks: Checks::default() })
    }

    /// `text` as a name and as it may come from a client.
    fn name(text: &str) -> (Name, LowerName) {
        let name = Name::from_text(text).unwrap();
        let lower = LowerName::new(&name.as_wire().to_ascii_uppercase());
        (name, lower)
    }

    #[test]
    fn names_are_found_in_any_letter_case_until_the_generation_changes() {
        let mut memo = Memo::new();
        let (web, asked) = name("q-s0.web.bosh");
        memo.keep_only(1);
        memo.insert(web.clone(), resolution(1));
        assert_eq!(memo.get(&asked).unwrap().name, web);
        assert!(memo.get(&name("q-s0.db.bosh").1).is_none());
        memo.keep_only(1);
        assert!(memo.get(&asked).is_some());
        memo.keep_only(2);
        assert!(memo.get(&asked).is_none());
    }

    #[test]
    fn what_is_not_used_goes_first_and_the_room_is_bounded() {
        let mut memo = Memo::new();
        let (hot, hot_asked) = name("hot.bosh");
        memo.insert(hot, resolution(1));
        let (cold, cold_asked) = name("cold.bosh");
        memo.insert(cold, resolution(1));
        let large = resolution(1 << 16);
        for number in 0..200 {
            memo.insert(name(&format!("x{number}.bosh")).0, large.clone());
            assert!(memo.get(&hot_asked).is_some());
        }
        assert!(memo.get(&cold_asked).is_none());
        assert!(memo.young.weight <= MAX_WEIGHT && memo.old.weight <= MAX_WEIGHT);
    }
}
