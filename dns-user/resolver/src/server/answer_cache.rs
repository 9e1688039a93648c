//! The answer cache of a UDP worker, in which a hot name costs one look-up.
//!
//! Names and addresses of all entries are stored contiguously in a few buffers. Compared with
//! separate allocations, an entry takes a third of the memory, and a name that is not in the CPU
//! caches causes fewer cache misses.

use std::{
    hash::BuildHasher,
    mem,
    net::{Ipv4Addr, Ipv6Addr},
    ops::Range,
};

use dns_common::name::MAX_NAME_LEN;
use hashbrown::{HashTable, hash_table};

use crate::state::{Dependence, Generation};
use dns_core::{
    name::{Name, NameRef},
    resolve::{Existence, LocalAnswer},
};
use dns_health::{InstanceSet, Tracked};

/// Minimum size of each half, in bytes.
const HALF: usize = 4 << 20;
/// Most bytes of all workers' halves, for small fleets, if there are many workers.
const ALL_HALVES: usize = 128 << 20;
/// Size of each half per instance in bytes, if larger than the minimum: a fleet of 100,000
/// instances has too many busy names for [`HALF`].
const PER_INSTANCE: usize = 80;
/// Bytes of an entry other than its name and addresses: its fields and its share of the hash table.
const ENTRY_WEIGHT: usize = size_of::<Entry>() + 12;

/// Names and their resolutions, all from the same records and routes. A change of an instance's health voids
/// only the answers that depend on it. When the younger half is full, it replaces the older one, which is
/// dropped. Names in use move to the younger half, so unused names are dropped first.
pub(super) struct AnswerCache {
    /// Entries used since the halves were last exchanged.
    young: Half,
    /// Entries not used since then, or only while the younger half was full.
    old: Half,
    /// Maximum size of each half, in bytes.
    room: usize,
    /// Maximum size of each half for a small fleet.
    least_room: usize,
    /// The current generation. Entries are of the same state, and know with which health they were resolved.
    generation: Generation,
    /// Seeded per worker, so that clients cannot choose colliding names.
    hasher: foldhash::fast::RandomState,
}

/// The cached answer for a name.
#[derive(Clone, Copy)]
pub(super) struct Remembered<'a> {
    pub(super) name: NameRef<'a>,
    pub(super) answer: LocalAnswer<'a>,
    /// Instances and the tracked name behind the answer.
    dependence: &'a Dependence,
}

impl<'a> Remembered<'a> {
    /// Returns the tracked name, if a query for the name starts health checks.
    pub(super) fn tracked(&self) -> Option<&'a Tracked> {
        self.dependence.tracked.as_deref()
    }
}

/// A name in lower case. The buffer is reused for all queries of a worker.
pub(super) struct LowerName {
    /// The buffer; only the first `len` bytes are used.
    bytes: [u8; MAX_NAME_LEN],
    len: usize,
}

impl Default for LowerName {
    fn default() -> Self {
        Self {
            bytes: [0; MAX_NAME_LEN],
            len: 0,
        }
    }
}

impl LowerName {
    /// Lower-cases a wire-format name of at most 255 bytes. Longer names are truncated and
    /// therefore equal no name.
    #[inline]
    pub(super) fn set(&mut self, raw_name: &[u8]) {
        let len = raw_name.len().min(MAX_NAME_LEN);
        let bytes = &mut self.bytes[..len];
        bytes.copy_from_slice(&raw_name[..len]);
        // Length bytes are at most 63, and so never letters.
        bytes.make_ascii_lowercase();
        self.len = len;
    }

    #[inline]
    fn as_wire(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    pub(super) fn to_name(&self) -> Name {
        NameRef::of_wire(self.as_wire()).to_name()
    }
}

impl AnswerCache {
    /// Creates the cache of one of `workers` workers.
    pub(super) fn new(workers: usize) -> Self {
        let least_room = HALF.min(ALL_HALVES / workers.max(1));
        Self {
            young: Half::default(),
            old: Half::default(),
            room: least_room,
            least_room,
            generation: Generation::default(),
            hasher: foldhash::fast::RandomState::default(),
        }
    }

    /// Enters a generation: drops all entries of other records and routes, and sizes the halves for `instances`.
    #[inline]
    pub(super) fn enter(&mut self, generation: Generation, instances: impl FnOnce() -> usize) {
        // Health alone voids single answers, when they are used next: checks change it many times a
        // second.
        if self.generation.state != generation.state {
            // Counted only here, since the records change only with the state.
            self.room = self.least_room.max(PER_INSTANCE * instances());
            self.young.clear();
            self.old.clear();
        }
        self.generation = generation;
    }

    /// Returns the cached answer for a name, if it is still valid. `has_changed` returns whether the health
    /// of some instances has changed since a number of changes.
    #[inline]
    pub(super) fn get(
        &mut self,
        name: &LowerName,
        has_changed: impl Fn(InstanceSet, u64) -> bool,
    ) -> Option<Remembered<'_>> {
        let hash = self.hasher.hash_one(name.as_wire());
        match self.young.find(hash, name.as_wire()) {
            Some(at) => self
                .young
                .validate(at, self.generation, has_changed)
                .then(|| self.young.remembered(at)),
            None => self.get_old(hash, name, has_changed),
        }
    }

    /// Looks up the name in the older half and copies it to the younger half if there is room.
    #[cold]
    fn get_old(
        &mut self,
        hash: u64,
        name: &LowerName,
        has_changed: impl Fn(InstanceSet, u64) -> bool,
    ) -> Option<Remembered<'_>> {
        let at = self.old.find(hash, name.as_wire())?;
        if !self.old.validate(at, self.generation, has_changed) {
            return None;
        }
        let remembered = self.old.remembered(at);
        // Only an insertion exchanges the halves: doing it here would drop the half in which this
        // answer lies.
        if self.young.weight() + weight(&remembered) > self.room {
            return Some(remembered);
        }
        let at = self.young.push(hash, &remembered, self.generation.health);
        Some(self.young.remembered(at))
    }

    /// Inserts an answer that was resolved in the current generation. It replaces one whose instances' health
    /// has changed.
    pub(super) fn insert(
        &mut self,
        name: &LowerName,
        answer: LocalAnswer<'_>,
        dependence: &Dependence,
    ) {
        let hash = self.hasher.hash_one(name.as_wire());
        let new = Remembered {
            name: NameRef::of_wire(name.as_wire()),
            answer,
            dependence,
        };
        if self.young.weight() + weight(&new) > self.room {
            mem::swap(&mut self.young, &mut self.old);
            self.young.clear();
        }
        self.young.push(hash, &new, self.generation.health);
    }
}

/// Returns the size of an entry in bytes.
fn weight(
    Remembered {
        name,
        answer,
        dependence: _,
    }: &Remembered<'_>,
) -> usize {
    ENTRY_WEIGHT + name.as_wire().len() + size_of_val(answer.v4) + size_of_val(answer.v6)
}

/// One half of an [`AnswerCache`].
#[derive(Default)]
struct Half {
    /// Indexes into `entries`, by hash of the name.
    positions: HashTable<u32>,
    /// Entries in order of insertion.
    entries: Vec<Entry>,
    /// Names of all entries, in wire format.
    names: Vec<u8>,
    v4: Vec<Ipv4Addr>,
    v6: Vec<Ipv6Addr>,
}

/// Start of a name's data in a [`Half`]; it ends where the next entry's begins. The size limit of a
/// half keeps all offsets far below 2^32.
struct Entry {
    hash: u64,
    /// Number of health changes when the answer was last valid.
    health: u64,
    dependence: Dependence,
    name: u32,
    v4: u32,
    v6: u32,
    /// Length of the name in bytes.
    name_len: u8,
    existence: Existence,
}

impl Half {
    #[inline]
    fn find(&self, hash: u64, wire: &[u8]) -> Option<usize> {
        let same = Entry::is_for(&self.entries, &self.names, hash, wire);
        self.positions.find(hash, same).map(|at| *at as usize)
    }

    /// Returns whether the answer at an index is valid in a generation.
    #[inline]
    fn validate(
        &mut self,
        at: usize,
        generation: Generation,
        has_changed: impl Fn(InstanceSet, u64) -> bool,
    ) -> bool {
        let entry = &mut self.entries[at];
        if entry.health == generation.health {
            return true;
        }
        let is_valid = !has_changed(entry.dependence.instances, entry.health);
        if is_valid {
            // The next use of this answer then compares two numbers.
            entry.health = generation.health;
        }
        is_valid
    }

    #[inline]
    fn remembered(&self, at: usize) -> Remembered<'_> {
        let entry = &self.entries[at];
        let (v4_end, v6_end) = match self.entries.get(at + 1) {
            Some(next) => (next.v4 as usize, next.v6 as usize),
            None => (self.v4.len(), self.v6.len()),
        };
        Remembered {
            name: NameRef::of_wire(&self.names[entry.name_range()]),
            answer: LocalAnswer {
                existence: entry.existence,
                v4: &self.v4[entry.v4 as usize..v4_end],
                v6: &self.v6[entry.v6 as usize..v6_end],
            },
            dependence: &entry.dependence,
        }
    }

    /// Adds an entry in place of the name's previous one, if there is one, and returns its index.
    fn push(&mut self, hash: u64, new: &Remembered<'_>, health: u64) -> usize {
        let Remembered {
            name,
            answer: LocalAnswer { existence, v4, v6 },
            dependence,
        } = *new;
        let at = self.entries.len();
        self.entries.push(Entry {
            hash,
            health,
            dependence: dependence.clone(),
            name: self.names.len() as u32,
            v4: self.v4.len() as u32,
            v6: self.v6.len() as u32,
            // A name has at most 255 bytes.
            name_len: name.as_wire().len() as u8,
            existence,
        });
        self.names.extend_from_slice(name.as_wire());
        self.v4.extend_from_slice(v4);
        self.v6.extend_from_slice(v6);
        let entries = &self.entries;
        let same = Entry::is_for(entries, &self.names, hash, name.as_wire());
        // The bytes of a replaced entry stay until the half is dropped.
        match self
            .positions
            .entry(hash, same, |at| entries[*at as usize].hash)
        {
            // The table keeps one position for a name, so an outdated answer is never found again.
            hash_table::Entry::Occupied(mut position) => *position.get_mut() = at as u32,
            hash_table::Entry::Vacant(position) => {
                position.insert(at as u32);
            }
        }
        at
    }

    fn weight(&self) -> usize {
        let Self {
            positions: _,
            entries,
            names,
            v4,
            v6,
        } = self;
        entries.len() * ENTRY_WEIGHT + names.len() + size_of_val(&v4[..]) + size_of_val(&v6[..])
    }

    /// Drops all entries but keeps the allocations.
    fn clear(&mut self) {
        let Self {
            positions,
            entries,
            names,
            v4,
            v6,
        } = self;
        // The next records fill the halves with about as many names.
        positions.clear();
        entries.clear();
        names.clear();
        v4.clear();
        v6.clear();
    }
}

impl Entry {
    #[inline]
    fn name_range(&self) -> Range<usize> {
        let start = self.name as usize;
        start..start + usize::from(self.name_len)
    }

    /// Returns a predicate for the index of the entry for the name `wire`; `names` holds the names of `entries`.
    #[inline]
    fn is_for(entries: &[Self], names: &[u8], hash: u64, wire: &[u8]) -> impl Fn(&u32) -> bool {
        move |at| {
            let entry = &entries[*at as usize];
            // The hash first: most other entries of a bucket differ in it, and their names stay out
            // of the cache.
            entry.hash == hash && names[entry.name_range()] == *wire
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(count: u32) -> Vec<Ipv4Addr> {
        (0..count).map(Ipv4Addr::from_bits).collect()
    }

    /// Returns an answer with these addresses.
    fn found<'a>(v4: &'a [Ipv4Addr], v6: &'a [Ipv6Addr]) -> LocalAnswer<'a> {
        LocalAnswer {
            existence: Existence::Found,
            v4,
            v6,
        }
    }

    /// Returns the name `text` as a client may send it.
    fn name(text: &str) -> LowerName {
        let mut name = LowerName::default();
        name.set(
            &Name::from_text(text)
                .unwrap()
                .as_wire()
                .to_ascii_uppercase(),
        );
        name
    }

    fn generation(state: u64, health: u64) -> Generation {
        Generation { state, health }
    }

    /// Looks up a name whose instances have not changed.
    fn get<'c>(cache: &'c mut AnswerCache, name: &LowerName) -> Option<Remembered<'c>> {
        cache.get(name, |_, _| false)
    }

    #[test]
    fn lookup_is_case_insensitive() {
        let mut cache = AnswerCache::new(1);
        let web = Name::from_text("q-s0.web.bosh").unwrap();
        let v4 = addresses(3);
        let v6 = [Ipv6Addr::LOCALHOST];
        cache.enter(generation(1, 0), || 0);
        cache.insert(
            &name("q-s0.db.bosh"),
            found(&v4[..1], &[]),
            &Dependence::default(),
        );
        cache.insert(
            &name("q-s0.web.bosh"),
            found(&v4, &v6),
            &Dependence::default(),
        );
        cache.insert(
            &name("none.bosh"),
            LocalAnswer {
                existence: Existence::NoSuchName,
                v4: &[],
                v6: &[],
            },
            &Dependence::default(),
        );
        let remembered = get(&mut cache, &name("q-s0.web.bosh")).unwrap();
        assert_eq!(
            (remembered.name, remembered.answer),
            ((&web).into(), found(&v4, &v6))
        );
        assert_eq!(
            get(&mut cache, &name("q-s0.db.bosh")).unwrap().answer,
            found(&v4[..1], &[])
        );
        assert_eq!(
            get(&mut cache, &name("none.bosh"))
                .unwrap()
                .answer
                .existence,
            Existence::NoSuchName
        );
        assert!(get(&mut cache, &name("other.bosh")).is_none());
        cache.enter(generation(1, 0), || 0);
        assert!(get(&mut cache, &name("q-s0.web.bosh")).is_some());
        cache.enter(generation(2, 0), || 0);
        assert!(get(&mut cache, &name("q-s0.web.bosh")).is_none());
    }

    #[test]
    fn newer_answer_replaces_older() {
        let mut cache = AnswerCache::new(1);
        let v4 = addresses(2);
        cache.insert(&name("web.bosh"), found(&v4, &[]), &Dependence::default());
        cache.insert(
            &name("web.bosh"),
            found(&v4[..1], &[]),
            &Dependence::default(),
        );
        assert_eq!(cache.young.positions.len(), 1);
        assert_eq!(
            get(&mut cache, &name("web.bosh")).unwrap().answer,
            found(&v4[..1], &[])
        );
    }

    #[test]
    fn health_change_voids_dependent_answers_only() {
        use dns_core::resolve::HealthState;
        use dns_health::{HealthStates, InstanceHealth};
        use std::net::IpAddr;

        let states = HealthStates::default();
        let set = |ip: IpAddr, state| {
            states.set(
                ip,
                InstanceHealth {
                    state,
                    groups: Box::default(),
                },
            )
        };
        let instances: Vec<IpAddr> = (0..64).map(|last| IpAddr::from([10, 0, 0, last])).collect();
        let mut cache = AnswerCache::new(1);
        let v4 = addresses(1);
        let label = |number: usize| name(&format!("q-m{number}.bosh"));
        for (number, ip) in instances.iter().enumerate() {
            let dependence = Dependence {
                instances: states.set_of(&[*ip]),
                tracked: None,
            };
            cache.insert(&label(number), found(&v4, &[]), &dependence);
        }
        // In the older half the rules are the same.
        for half in 0..2 {
            let state = [HealthState::Failing, HealthState::Running][half];
            assert!(set(instances[7], state));
            cache.enter(generation(0, states.changes()), || 0);
            let kept = (0..instances.len())
                .filter(|&number| {
                    cache
                        .get(&label(number), |set, since| states.has_changed(set, since))
                        .is_some()
                })
                .collect::<Vec<_>>();
            assert!(!kept.contains(&7));
            assert!(
                kept.len() > instances.len() / 2,
                "{} of {} answers stay",
                kept.len(),
                instances.len()
            );
            let dependence = Dependence {
                instances: states.set_of(&instances[7..8]),
                tracked: None,
            };
            cache.insert(&label(7), found(&v4, &[]), &dependence);
            assert!(
                cache
                    .get(&label(7), |set, since| states.has_changed(set, since))
                    .is_some()
            );
            mem::swap(&mut cache.young, &mut cache.old);
        }
    }

    #[test]
    fn unused_names_are_evicted_first() {
        let mut cache = AnswerCache::new(1);
        let v4 = addresses(1);
        cache.insert(&name("hot.bosh"), found(&v4, &[]), &Dependence::default());
        cache.insert(&name("cold.bosh"), found(&v4, &[]), &Dependence::default());
        let large = addresses(1 << 16);
        for number in 0..200 {
            cache.insert(
                &name(&format!("x{number}.bosh")),
                found(&large, &[]),
                &Dependence::default(),
            );
            assert_eq!(
                get(&mut cache, &name("hot.bosh")).unwrap().answer,
                found(&v4, &[])
            );
        }
        assert!(get(&mut cache, &name("cold.bosh")).is_none());
        assert!(cache.young.weight() <= HALF && cache.old.weight() <= HALF);
    }

    #[test]
    fn name_flood_stays_within_limit() {
        let mut cache = AnswerCache::new(1);
        let v4 = addresses(250);
        let mut most = 0;
        for number in 0..20_000 {
            cache.insert(
                &name(&format!("q-s0n{number}.q-g1.bosh")),
                found(&v4, &[]),
                &Dependence::default(),
            );
            if number % 500 == 0 {
                most = most.max(cache.young.weight() + cache.old.weight());
            }
        }
        assert!((HALF..=2 * HALF).contains(&most), "{most} bytes were held");
    }

    #[test]
    fn limit_grows_with_fleet() {
        const INSTANCES: usize = 100_000;
        let mut cache = AnswerCache::new(1);
        cache.enter(generation(1, 0), || INSTANCES);
        let v4 = addresses(5);
        let names = || (0..INSTANCES).map(|number| name(&format!("{number}.q-g1234.q-n1.bosh")));
        for name in names() {
            cache.insert(&name, found(&v4, &[]), &Dependence::default());
        }
        assert!(names().all(|name| get(&mut cache, &name).is_some()));
        assert!(cache.young.weight() + cache.old.weight() <= 2 * PER_INSTANCE * INSTANCES);
    }
}
