//! Entries of a cache: looked up by key, limited in bytes, evicted by second chance.
//!
//! The entries are divided into shards with a lock each, so that threads rarely wait for one
//! another. A full shard passes over its entries in turn: an entry used since the last pass stays,
//! an unused one is evicted. A flood of names therefore evicts little but itself. Every insertion
//! also passes over a few entries and removes expired ones, so the memory of an active cache
//! follows its fresh answers.

use std::{
    hash::BuildHasher,
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use hashbrown::{HashTable, hash_table::Entry as Place};
use parking_lot::Mutex;
use smallvec::SmallVec;

use dns_kit::clock::BootInstant;

/// Number of shards of a store; a store with less than [`MIN_SHARD`] bytes or [`MIN_ENTRIES`]
/// entries per shard has only one.
const SHARDS: usize = 8;
/// Minimum limit of a shard in bytes.
const MIN_SHARD: u64 = 1 << 20;
/// Minimum number of entries for which a shard has room; a few names never evict one another.
const MIN_ENTRIES: u64 = 64;
/// Buckets passed at each insertion in search of expired entries. A growing table has at least 7 of
/// 16 buckets in use, so about one entry is visited per new one.
const PASSED: usize = 2;
/// Bytes of an entry in addition to key and value: its slot, including the table's free slots, its place for a
/// short key, and two allocator headers.
pub(crate) const SLOT_SIZE: usize = 2 * size_of::<Slot<()>>() + size_of::<StoreKey>() + 32;

/// Nearly all keys fit, and then need no allocation.
type StoreKey = SmallVec<[u8; 48]>;

#[derive(Debug)]
pub(crate) struct Store<V> {
    shards: Box<[Mutex<Shard<V>>]>,
    hasher: foldhash::fast::RandomState,
    generation: AtomicU64,
}

/// Period between two flushes of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Generation(u64);

impl Generation {
    pub(crate) fn to_bytes(self) -> [u8; 8] {
        self.0.to_ne_bytes()
    }
}

/// Contents of a store, and its evictions so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    /// Number of entries with data.
    pub(crate) entries: u64,
    /// Number of entries without data (NXDOMAIN, NODATA).
    pub(crate) denials: u64,
    /// Sum of the weights in bytes.
    pub(crate) bytes: u64,
    /// Number of entries evicted to make room.
    pub(crate) evictions: u64,
}

/// The properties of an entry that the store acts on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EntryTerms {
    /// Bytes that count against the limit.
    pub(crate) weight: u32,
    /// Time after which the entry is useless and removed.
    pub(crate) until: BootInstant,
    /// Whether it is an answer without data.
    pub(crate) denial: bool,
}

/// Copies of entries elsewhere, which are used and evicted with them.
pub(crate) trait Mirror {
    /// Returns when the copy of an entry was last used, in nanoseconds of a clock that never goes
    /// back; `None` if there is no copy or it was never used.
    fn last_used_ns(&self, key: &[u8]) -> Option<u64>;

    /// Removes the copy of an entry that was evicted.
    fn evicted(&self, key: &[u8]);
}

#[derive(Debug)]
struct Shard<V> {
    slots: HashTable<Slot<V>>,
    /// The bucket passed last in search of an entry to evict.
    hand: usize,
    /// The bucket passed last in search of an expired entry. If this search moved `hand`, the unused
    /// entries that it passes would stay.
    expired_hand: usize,
    /// Limit of `totals.bytes`.
    most: u64,
    totals: Totals,
}

/// A value with its key.
#[derive(Debug)]
pub(crate) struct Stored<V> {
    key: StoreKey,
    value: V,
}

impl<V> Deref for Stored<V> {
    type Target = V;

    fn deref(&self) -> &V {
        &self.value
    }
}

#[derive(Debug)]
struct Slot<V> {
    stored: Arc<Stored<V>>,
    hash: u64,
    terms: EntryTerms,
    /// Whether it was used since the last pass.
    used: bool,
    /// Time of the last use of its copy that a pass has seen.
    copy_used_ns: u64,
}

impl<V> Store<V> {
    /// Creates an empty store of at most `most` bytes, whose entries have at least `least_weight`.
    pub(crate) fn new(most: u64, least_weight: u64) -> Self {
        let least_shard = MIN_SHARD.max(least_weight.saturating_mul(MIN_ENTRIES));
        let count = if most / SHARDS as u64 >= least_shard {
            SHARDS
        } else {
            1
        };
        let mut shards = Vec::with_capacity(count);
        for _ in 0..count {
            shards.push(Mutex::new(Shard {
                slots: HashTable::new(),
                hand: 0,
                expired_hand: 0,
                most: most / count as u64,
                totals: Totals::default(),
            }));
        }
        Self {
            shards: shards.into(),
            // Seeded at random, because clients choose the names.
            hasher: foldhash::fast::RandomState::default(),
            generation: AtomicU64::new(0),
        }
    }

    /// Returns the value of a key and records its use. It may have expired since the last pass.
    pub(crate) fn get(&self, key: &[u8]) -> Option<Arc<Stored<V>>> {
        let (hash, shard) = self.shard(key);
        let mut shard = shard.lock();
        let slot = shard
            .slots
            .find_mut(hash, |slot| slot.stored.key[..] == *key)?;
        slot.used = true;
        Some(Arc::clone(&slot.stored))
    }

    /// Stores a value that was requested in `generation`, evicting others if there is no room. A
    /// value of an earlier generation, or heavier than a shard, is not stored.
    pub(crate) fn insert(
        &self,
        key: &[u8],
        value: V,
        terms: EntryTerms,
        now: BootInstant,
        generation: Generation,
        mirror: &impl Mirror,
    ) {
        let (hash, shard) = self.shard(key);
        let stored = Stored {
            key: StoreKey::from_slice(key),
            value,
        };
        let slot = Slot {
            stored: Arc::new(stored),
            hash,
            terms,
            used: false,
            copy_used_ns: 0,
        };
        let mut shard = shard.lock();
        // Checked under the lock, which a flush takes after starting a new generation.
        if self.generation() == generation {
            shard.insert(slot, now, mirror);
        }
    }

    pub(crate) fn generation(&self) -> Generation {
        Generation(self.generation.load(Ordering::SeqCst))
    }

    /// Starts a new generation and removes the entries for which `goes` holds; returns their
    /// number.
    pub(crate) fn flush(&self, mut goes: impl FnMut(&[u8], &V) -> bool) -> u64 {
        // Before the shards are locked: a later insertion sees it, an earlier one is looked at below.
        self.generation.fetch_add(1, Ordering::SeqCst);
        let mut removed = 0;
        for shard in &self.shards {
            let mut shard = shard.lock();
            // One shard after the other, so that queries wait for a part of the entries only.
            removed += shard.retain(|slot| !goes(&slot.stored.key, &slot.stored));
        }
        removed
    }

    pub(crate) fn sweep(&self, now: BootInstant) {
        for shard in &self.shards {
            // Only for the figures of operators, which must not count what no client gets any more.
            let _removed = shard.lock().retain(|slot| slot.terms.until > now);
        }
    }

    /// Calls `each` for every entry, in no particular order, one shard after the other.
    pub(crate) fn for_each(&self, mut each: impl FnMut(&[u8], &V)) {
        for shard in &self.shards {
            for slot in &shard.lock().slots {
                each(&slot.stored.key, &slot.stored);
            }
        }
    }

    pub(crate) fn totals(&self) -> Totals {
        let mut sum = Totals::default();
        for shard in &self.shards {
            let Totals {
                entries,
                denials,
                bytes,
                evictions,
            } = shard.lock().totals;
            sum.entries += entries;
            sum.denials += denials;
            sum.bytes += bytes;
            sum.evictions += evictions;
        }
        sum
    }

    /// Returns the hash of a key and its shard. The shard's table uses the lowest and the highest
    /// bits of the hash.
    fn shard(&self, key: &[u8]) -> (u64, &Mutex<Shard<V>>) {
        let hash = self.hasher.hash_one(key);
        (
            hash,
            &self.shards[(hash >> 40) as usize % self.shards.len()],
        )
    }
}

impl<V> Shard<V> {
    fn insert(&mut self, slot: Slot<V>, now: BootInstant, mirror: &impl Mirror) {
        let same = self
            .slots
            .find_entry(slot.hash, |other| other.stored.key == slot.stored.key);
        if let Ok(replaced) = same {
            let (replaced, _) = replaced.remove();
            self.totals.remove(&replaced.terms);
        }
        let weight = u64::from(slot.terms.weight);
        // Only now: an older answer must not outlive a newer one that is too heavy.
        if weight > self.most {
            return;
        }
        // Expired entries go with insertions, so that no task has to sweep the cache.
        for _ in 0..PASSED {
            self.pass_expired(now);
        }
        let mut passed = 0;
        let round = self.slots.num_buckets();
        while self.totals.bytes + weight > self.most {
            // Clients may use all entries faster than they can be passed over.
            self.pass(now, passed < 2 * round, mirror);
            passed += 1;
        }
        self.totals.add(&slot.terms);
        // The key is not in the table.
        if let Place::Vacant(place) = self.slots.entry(slot.hash, |_| false, |slot| slot.hash) {
            place.insert(slot);
        }
    }

    /// Passes over the next bucket in search of an expired entry, which it removes.
    fn pass_expired(&mut self, now: BootInstant) {
        self.expired_hand = self.after(self.expired_hand);
        if let Some(slot) = self.slots.get_bucket(self.expired_hand)
            && slot.terms.until <= now
        {
            let _expired = self.remove(self.expired_hand);
        }
    }

    /// Passes over the next bucket: removes its entry, or makes it unused if used ones are spared.
    fn pass(&mut self, now: BootInstant, spares_used: bool, mirror: &impl Mirror) {
        self.hand = self.after(self.hand);
        let Some(slot) = self.slots.get_bucket_mut(self.hand) else {
            return;
        };
        let is_over = slot.terms.until <= now;
        if !is_over && spares_used {
            // Interfaces answer without a look-up here, so only the copy knows of these uses.
            let copy_used_ns = mirror.last_used_ns(&slot.stored.key).unwrap_or(0);
            let is_copy_used = copy_used_ns != 0 && copy_used_ns != slot.copy_used_ns;
            if is_copy_used || slot.used {
                (slot.used, slot.copy_used_ns) = (false, copy_used_ns);
                return;
            }
        }
        if let Some(slot) = self.remove(self.hand)
            && !is_over
        {
            self.totals.evictions += 1;
            mirror.evicted(&slot.stored.key);
        }
    }

    /// Returns the bucket after this one, in a circle.
    fn after(&self, bucket: usize) -> usize {
        if bucket + 1 < self.slots.num_buckets() {
            bucket + 1
        } else {
            0
        }
    }

    /// Removes the slot in this bucket.
    fn remove(&mut self, bucket: usize) -> Option<Slot<V>> {
        let (slot, _) = self.slots.get_bucket_entry(bucket).ok()?.remove();
        self.totals.remove(&slot.terms);
        Some(slot)
    }

    /// Keeps only the slots for which `keep` holds; returns the number of removed ones.
    fn retain(&mut self, mut keep: impl FnMut(&Slot<V>) -> bool) -> u64 {
        let totals = &mut self.totals;
        let before = self.slots.len();
        self.slots.retain(|slot| {
            let kept = keep(slot);
            if !kept {
                totals.remove(&slot.terms);
            }
            kept
        });
        (before - self.slots.len()) as u64
    }
}

impl Totals {
    fn add(&mut self, terms: &EntryTerms) {
        *self.count(terms.denial) += 1;
        self.bytes += u64::from(terms.weight);
    }

    fn remove(&mut self, terms: &EntryTerms) {
        *self.count(terms.denial) -= 1;
        self.bytes -= u64::from(terms.weight);
    }

    fn count(&mut self, denial: bool) -> &mut u64 {
        if denial {
            &mut self.denials
        } else {
            &mut self.entries
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Stores `number` with a weight of 100 for `seconds`.
    fn insert(store: &Store<u32>, number: u32, seconds: u64, now: BootInstant) {
        let until = now + Duration::from_secs(seconds);
        let terms = EntryTerms {
            weight: 100,
            until,
            denial: false,
        };
        store.insert(
            &number.to_be_bytes(),
            number,
            terms,
            now,
            store.generation(),
            &NoMirror,
        );
    }

    struct NoMirror;

    impl Mirror for NoMirror {
        fn last_used_ns(&self, _key: &[u8]) -> Option<u64> {
            None
        }

        fn evicted(&self, _key: &[u8]) {}
    }

    /// Copies of some entries, used at the given time.
    struct Copies {
        of: std::ops::Range<u32>,
        used_ns: std::cell::Cell<u64>,
        evicted: std::cell::RefCell<Vec<Vec<u8>>>,
    }

    impl Mirror for Copies {
        fn last_used_ns(&self, key: &[u8]) -> Option<u64> {
            let number = u32::from_be_bytes(key.try_into().ok()?);
            self.of.contains(&number).then_some(self.used_ns.get())
        }

        fn evicted(&self, key: &[u8]) {
            self.evicted.borrow_mut().push(key.to_vec());
        }
    }

    #[test]
    fn uses_of_copies_count() {
        let store = Store::new(10_000, 100);
        let now = BootInstant::now();
        (0..100).for_each(|number| insert(&store, number, 60, now));
        let copies = Copies {
            of: 0..20,
            used_ns: 1.into(),
            evicted: Vec::new().into(),
        };
        let insert = |number: u32| {
            let terms = EntryTerms {
                weight: 100,
                until: now + Duration::from_secs(60),
                denial: false,
            };
            store.insert(
                &number.to_be_bytes(),
                number,
                terms,
                now,
                store.generation(),
                &copies,
            );
        };
        for number in 100..1000 {
            insert(number);
            copies.used_ns.set(u64::from(number));
        }
        let mut kept = 0;
        store.for_each(|_, value| kept += usize::from(*value < 20));
        assert_eq!(kept, 20, "copies in use keep their entries");
        assert_eq!(copies.evicted.borrow().len(), 900);
        // Copies that clients do not use any more are evicted with their entries.
        (1000..5000).for_each(insert);
        assert!((0..20u32).all(|number| {
            copies
                .evicted
                .borrow()
                .contains(&number.to_be_bytes().to_vec())
        }));
    }

    fn holds(store: &Store<u32>, number: u32) -> bool {
        store
            .get(&number.to_be_bytes())
            .is_some_and(|found| **found == number)
    }

    #[test]
    fn full_store_evicts_unused_entries() {
        let store = Store::new(10_000, 100);
        let now = BootInstant::now();
        (0..100).for_each(|number| insert(&store, number, 60, now));
        assert_eq!(
            store.totals(),
            Totals {
                entries: 100,
                bytes: 10_000,
                ..Totals::default()
            }
        );
        // A flood of new names does not evict names in steady use.
        for number in 100..1000 {
            assert!((0..20).all(|used| holds(&store, used)), "before {number}");
            insert(&store, number, 60, now);
            assert!(store.totals().bytes <= 10_000);
        }
        assert_eq!(store.totals().evictions, 900);
    }

    /// Copies of the entries 0 to 49, each used before every pass; counts the passes.
    struct Passes(std::cell::RefCell<[u64; 50]>);

    impl Mirror for Passes {
        fn last_used_ns(&self, key: &[u8]) -> Option<u64> {
            let number = u32::from_be_bytes(key.try_into().ok()?);
            let mut passes = self.0.borrow_mut();
            let count = passes.get_mut(number as usize)?;
            *count += 1;
            Some(*count)
        }

        fn evicted(&self, _key: &[u8]) {}
    }

    #[test]
    fn entries_are_passed_in_turn() {
        let store = Store::new(10_000, 100);
        let now = BootInstant::now();
        let passes = Passes([0; 50].into());
        let terms = EntryTerms {
            weight: 100,
            until: now + Duration::from_secs(60),
            denial: false,
        };
        for number in 0..2000u32 {
            store.insert(
                &number.to_be_bytes(),
                number,
                terms,
                now,
                store.generation(),
                &passes,
            );
        }
        let passes = passes.0.into_inner();
        let least = passes.iter().min().unwrap();
        let most = passes.iter().max().unwrap();
        // A table that grows moves its entries, which may gain or lose a pass.
        assert!(*least > 10 && most - least <= 3, "{passes:?}");
    }

    #[test]
    fn small_limit_is_reached() {
        const BYTES: u64 = 64 << 20;
        for limit in [1, 5, 20, 100, 500] {
            let store = Store::new(BYTES, BYTES / limit);
            let now = BootInstant::now();
            let weight = u32::try_from(BYTES / limit).unwrap();
            let terms = EntryTerms {
                weight,
                until: now + Duration::from_secs(60),
                denial: false,
            };
            for number in 0..1000u32 {
                store.insert(
                    &number.to_be_bytes(),
                    number,
                    terms,
                    now,
                    store.generation(),
                    &NoMirror,
                );
            }
            assert_eq!(store.totals().entries, limit);
        }
    }

    #[test]
    fn expired_entries_leave_first() {
        let store = Store::new(1 << 20, 100);
        let now = BootInstant::now();
        (0..500).for_each(|number| insert(&store, number, 1, now));
        let later = now + Duration::from_secs(2);
        (500..1000).for_each(|number| insert(&store, number, 60, later));
        let Totals {
            entries, evictions, ..
        } = store.totals();
        assert!(
            entries < 700 && evictions == 0,
            "{entries} entries, {evictions} evictions"
        );
        store.sweep(later);
        assert_eq!(
            store.totals(),
            Totals {
                entries: 500,
                bytes: 50_000,
                ..Totals::default()
            }
        );
    }

    #[test]
    fn replaced_value_counts_once() {
        let store = Store::new(10_000, 100);
        let now = BootInstant::now();
        let insert = |weight, denial| {
            let terms = EntryTerms {
                weight,
                until: now,
                denial,
            };
            store.insert(b"key", 7, terms, now, store.generation(), &NoMirror);
        };
        insert(50, true);
        insert(60, false);
        assert_eq!(
            store.totals(),
            Totals {
                entries: 1,
                bytes: 60,
                ..Totals::default()
            }
        );
        insert(10_001, false);
        assert_eq!(
            store.totals(),
            Totals::default(),
            "too heavy, and the old value is gone"
        );
    }

    #[test]
    fn flush_removes_matching_entries() {
        let store = Store::new(1 << 24, 100);
        let now = BootInstant::now();
        (0..1000).for_each(|number| insert(&store, number, 60, now));
        assert_eq!(store.flush(|_, value| value % 10 != 0), 900);
        assert_eq!(
            store.totals(),
            Totals {
                entries: 100,
                bytes: 10_000,
                ..Totals::default()
            }
        );
        let mut seen = 0;
        store.for_each(|_, _| seen += 1);
        assert_eq!(seen, 100);
    }

    #[test]
    fn flush_rejects_earlier_requests() {
        let store = Store::new(1 << 24, 100);
        let now = BootInstant::now();
        let terms = EntryTerms {
            weight: 100,
            until: now,
            denial: false,
        };
        let before = store.generation();
        assert_eq!(store.flush(|_, _: &u32| false), 0);
        store.insert(b"key", 1, terms, now, before, &NoMirror);
        assert!(store.get(b"key").is_none());
        store.insert(b"key", 2, terms, now, store.generation(), &NoMirror);
        assert_eq!(store.get(b"key").map(|found| **found), Some(2));
    }

    #[test]
    fn only_large_stores_are_divided() {
        for (most, least_weight, shards, limit) in [
            (8 << 20, 0, 8, 1 << 20),
            ((8 << 20) - 1, 0, 1, (8 << 20) - 1),
            // Each shard has room for 64 entries.
            (1 << 30, 2 << 20, 8, 128 << 20),
            (1 << 30, (2 << 20) + 1, 1, 1 << 30),
            (1 << 30, u64::MAX, 1, 1 << 30),
        ] {
            let store = Store::<u32>::new(most, least_weight);
            assert_eq!(store.shards.len(), shards, "{most} {least_weight}");
            assert!(store.shards.iter().all(|shard| shard.lock().most == limit));
        }
    }

    #[test]
    fn keys_use_every_shard() {
        let store = Store::new(8 << 20, 0);
        let now = BootInstant::now();
        (0..1000).for_each(|number| insert(&store, number, 60, now));
        for shard in &store.shards {
            let entries = shard.lock().totals.entries;
            assert!((50..250).contains(&entries), "{entries} of 1000");
        }
        let Totals {
            entries,
            denials,
            bytes,
            evictions,
        } = store.totals();
        assert_eq!((entries, denials, bytes, evictions), (1000, 0, 100_000, 0));
        assert!((0..1000).all(|number| holds(&store, number)));
        assert_eq!(store.flush(|_, value| *value < 10), 10);
        assert_eq!(store.totals().bytes, 99_000);
    }

    #[test]
    fn totals_are_summed_over_shards() {
        let store = Store::<u32>::new(8 << 20, 0);
        for (number, shard) in (1..).zip(&store.shards) {
            shard.lock().totals = Totals {
                entries: number,
                denials: 10 * number,
                bytes: 100 * number,
                evictions: 1000 * number,
            };
        }
        let expected = Totals {
            entries: 36,
            denials: 360,
            bytes: 3600,
            evictions: 36_000,
        };
        assert_eq!(store.totals(), expected);
    }

    /// Stores `number` with this weight and end, as an answer or a denial.
    fn put(store: &Store<u32>, number: u32, terms: EntryTerms, now: BootInstant) {
        let key = number.to_be_bytes();
        store.insert(&key, number, terms, now, store.generation(), &NoMirror);
    }

    #[test]
    fn answers_and_denials_are_counted_apart() {
        let store = Store::new(1000, 0);
        let now = BootInstant::now();
        let terms = |weight, denial| EntryTerms {
            weight,
            until: now + Duration::from_secs(60),
            denial,
        };
        let totals = || {
            let Totals {
                entries,
                denials,
                bytes,
                evictions,
            } = store.totals();
            [entries, denials, bytes, evictions]
        };
        put(&store, 1, terms(100, true), now);
        put(&store, 2, terms(200, false), now);
        put(&store, 3, terms(300, true), now);
        assert_eq!(totals(), [1, 2, 600, 0]);
        put(&store, 3, terms(10, false), now);
        assert_eq!(totals(), [2, 1, 310, 0]);
        assert_eq!(store.flush(|_, value| *value == 1), 1);
        assert_eq!(totals(), [2, 0, 210, 0]);
        // One that fills the store replaces all.
        put(&store, 4, terms(1000, false), now);
        assert_eq!(totals(), [1, 0, 1000, 2]);
        put(&store, 5, terms(1001, false), now);
        assert_eq!(totals(), [1, 0, 1000, 2]);
        assert!(holds(&store, 4) && !holds(&store, 5));
    }

    #[test]
    fn entries_end_at_their_time() {
        let now = BootInstant::now();
        let second = Duration::from_secs(1);
        let ends = |until| EntryTerms {
            weight: 600,
            until,
            denial: false,
        };
        for (until, is_over) in [(now, true), (now + second, false)] {
            let store = Store::new(1000, 0);
            put(&store, 1, ends(until), now);
            store.sweep(now);
            assert_eq!(store.get(&1u32.to_be_bytes()).is_none(), is_over);
            // An entry whose time is over makes room without being evicted.
            let store = Store::new(1000, 0);
            put(&store, 1, ends(until), now);
            put(&store, 2, ends(now + second), now);
            let Totals {
                entries, evictions, ..
            } = store.totals();
            assert_eq!((entries, evictions), (1, u64::from(!is_over)));
        }
    }

    #[test]
    fn used_entries_get_second_chance() {
        let store = Store::new(1000, 0);
        let now = BootInstant::now();
        let terms = EntryTerms {
            weight: 500,
            until: now + Duration::from_secs(60),
            denial: false,
        };
        put(&store, 1, terms, now);
        put(&store, 2, terms, now);
        assert!(holds(&store, 1));
        put(&store, 3, terms, now);
        // Looked at without a use.
        let kept = |store: &Store<u32>| {
            let mut kept = Vec::new();
            store.for_each(|_, value| kept.push(*value));
            kept.sort_unstable();
            kept
        };
        assert_eq!(kept(&store), [1, 3]);
        // Everything in use cannot all stay.
        assert!(holds(&store, 1) && holds(&store, 3));
        put(&store, 4, terms, now);
        let left = kept(&store);
        assert!(left.len() == 2 && left.contains(&4), "{left:?}");
        assert_eq!(store.totals().evictions, 2);
    }

    #[test]
    fn generations_differ() {
        let store = Store::<u32>::new(1000, 0);
        let first = store.generation();
        assert_eq!(first, Generation::default());
        store.flush(|_, _| true);
        let second = store.generation();
        assert_ne!(first.to_bytes(), second.to_bytes());
        assert_eq!(second.to_bytes(), 1u64.to_ne_bytes());
    }

    #[test]
    fn constant_use_spares_twice() {
        let store = Store::new(1000, 100);
        let now = BootInstant::now();
        (0..10).for_each(|number| insert(&store, number, 60, now));
        let passes = Passes([0; 50].into());
        let terms = EntryTerms {
            weight: 100,
            until: now + Duration::from_secs(60),
            denial: false,
        };
        let key = 100u32.to_be_bytes();
        store.insert(&key, 100, terms, now, store.generation(), &passes);
        assert_eq!(passes.0.into_inner()[..10], [2; 10]);
        assert_eq!((store.totals().entries, store.totals().evictions), (10, 1));
        assert!(holds(&store, 100));
    }
}
