//! Answers that a worker remembers, so that a hot name costs one look-up.

use std::{hash::BuildHasher, mem, net::IpAddr, sync::Arc};

use dns_common::name::MAX_NAME_LEN;
use hashbrown::HashTable;

use dns_core::{name::Name, resolve::Resolution};

/// Most weight of one of the two halves, bytes.
const MAX_WEIGHT: usize = 4 << 20;
/// What an entry takes beside what its name and its answer hold, bytes: its own fields,
/// its answer's, its share of the hash table, and the heads of four allocations.
const ENTRY_WEIGHT: usize = size_of::<Entry>() + size_of::<Resolution>() + 96;

/// Names and what they resolved to, all of one generation. When the younger
/// half is full, the older one is given up for it: names in use move to the
/// younger half, so the others go first.
pub(super) struct AnswerCache {
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

impl AnswerCache {
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
        let weight = weight(&name, &resolution);
        if self.young.weight + weight > MAX_WEIGHT {
            self.old = mem::take(&mut self.young);
        }
        self.young.weight += weight;
        self.young.push(Entry { name, resolution, hash })
    }
}

/// What an entry takes, bytes: the instances that are checked for it weigh more than its
/// addresses do.
fn weight(name: &Name, resolution: &Resolution) -> usize {
    let Resolution { existence: _, v4, v6, checks } = resolution;
    let addresses = size_of_val(&v4[..]) + size_of_val(&v6[..]);
    ENTRY_WEIGHT + name.as_wire().len() + addresses + checks.instances.len() * size_of::<IpAddr>()
}

/// Half of a [`AnswerCache`].
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
    use dns_core::resolve::{Checks, Existence};

    /// A resolution with `count` addresses.
    fn resolution(count: u32) -> Arc<Resolution> {
        let v4 = (0..count).map(std::net::Ipv4Addr::from_bits).collect();
        Arc::new(Resolution { existence: Existence::Found, v4, v6: vec![], checks: Checks::default() })
    }

    /// `text` as a name and as it may come from a client.
    fn name(text: &str) -> (Name, LowerName) {
        let name = Name::from_text(text).unwrap();
        let lower = LowerName::new(&name.as_wire().to_ascii_uppercase());
        (name, lower)
    }

    #[test]
    fn names_are_found_in_any_letter_case_until_the_generation_changes() {
        let mut cache = AnswerCache::new();
        let (web, asked) = name("q-s0.web.bosh");
        cache.keep_only(1);
        cache.insert(web.clone(), resolution(1));
        assert_eq!(cache.get(&asked).unwrap().name, web);
        assert!(cache.get(&name("q-s0.db.bosh").1).is_none());
        cache.keep_only(1);
        assert!(cache.get(&asked).is_some());
        cache.keep_only(2);
        assert!(cache.get(&asked).is_none());
    }

    #[test]
    fn what_is_not_used_goes_first_and_the_room_is_bounded() {
        let mut cache = AnswerCache::new();
        let (hot, hot_asked) = name("hot.bosh");
        cache.insert(hot, resolution(1));
        let (cold, cold_asked) = name("cold.bosh");
        cache.insert(cold, resolution(1));
        let large = resolution(1 << 16);
        for number in 0..200 {
            cache.insert(name(&format!("x{number}.bosh")).0, large.clone());
            assert!(cache.get(&hot_asked).is_some());
        }
        assert!(cache.get(&cold_asked).is_none());
        assert!(cache.young.weight <= MAX_WEIGHT && cache.old.weight <= MAX_WEIGHT);
    }

    #[test]
    fn a_flood_of_names_takes_no_more_than_two_halves() {
        let mut cache = AnswerCache::new();
        let instances: Vec<IpAddr> = (0..250u8).map(|last| IpAddr::from([10, 0, 0, last])).collect();
        let mut most = 0;
        for number in 0..20_000 {
            // Each with an answer of its own, as `resolve` makes it.
            let mut answer = Resolution::clone(&resolution(250));
            answer.checks.instances = instances.clone();
            cache.insert(name(&format!("q-s0n{number}.q-g1.bosh")).0, Arc::new(answer));
            let held = |half: &Half| {
                let of = |entry: &Entry| {
                    let Resolution { v4, checks, .. } = &*entry.resolution;
                    4 * v4.len() + checks.instances.len() * size_of::<IpAddr>()
                };
                half.entries.iter().map(of).sum::<usize>()
            };
            if number % 500 == 0 {
                most = most.max(held(&cache.young) + held(&cache.old));
            }
        }
        assert!((MAX_WEIGHT..=2 * MAX_WEIGHT).contains(&most), "{most} bytes were held");
    }
}
