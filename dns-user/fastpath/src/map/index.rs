//! The hash table from names to entries, see [`dns_common::index`]. The publisher is its only
//! writer. The programs read it, and so does userspace, to find out when an entry was last used.

use std::{
    io,
    os::fd::BorrowedFd,
    sync::{Arc, atomic::Ordering},
};

use dns_common::{
    entry::Location,
    index::{self, BUCKET_SLOTS, Bucket, Pair, WORD_SLOTS},
};
use memmap2::MmapRaw;

use super::{Shape, layout::read_header, map_shared, store::EntryMemory, words::Words};

/// Average number of names per pair of buckets in the largest table: with it, one pair in 8,000
/// would receive a 25th name (Poisson).
const NAMES_PER_PAIR: u32 = 12;

/// Returns the number of elements of an index of this many names.
pub fn elements(names: u32) -> u32 {
    // The largest table follows the root and all smaller tables, which together have the same length.
    2 * names
        .div_ceil(NAMES_PER_PAIR)
        // At least the smallest table; at most what the number of elements can say.
        .clamp(1, 1 << 30)
        .next_power_of_two()
}

/// The name's buckets are full, and the table cannot grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// The index, with write access.
#[derive(Debug)]
pub(crate) struct Index<W = MmapRaw> {
    memory: Arc<IndexMemory<W>>,
}

impl<W: Words> Index<W> {
    pub(crate) fn new(memory: Arc<IndexMemory<W>>) -> Self {
        memory.set_pairs(1);
        Self { memory }
    }

    /// Points the name with this hash to the entry at `new`, which is already written, instead of
    /// to `old`, if given.
    pub(crate) fn set(
        &mut self,
        hash: u64,
        new: Location,
        old: Option<Location>,
    ) -> Result<(), Full> {
        let memory = &self.memory;
        if let Some(place) = old.and_then(|old| memory.place(hash, old)) {
            // One store: a run finds the old entry or the new one, and never neither.
            memory.set_location(place, new);
            return Ok(());
        }
        loop {
            let pairs = memory.pairs();
            if let Some(place) = memory.free_place(hash, pairs) {
                memory.take(place, hash, new);
                return Ok(());
            }
            // Rarely more than once: each pair of buckets becomes two.
            memory.grow(pairs)?;
        }
    }

    pub(crate) fn remove(&mut self, hash: u64, location: Location) {
        if let Some(place) = self.memory.place(hash, location) {
            self.memory.give_back(place, hash);
        }
    }
}

/// The mapped elements of the `NAMES` map (in tests, anonymous memory), and the entries to which they point.
#[derive(Debug)]
pub(crate) struct IndexMemory<W = MmapRaw> {
    words: W,
    pub(crate) entries: Arc<EntryMemory<W>>,
}

#[derive(Clone, Copy, Debug)]
struct SlotPosition {
    /// Number of the bucket, from the start of the map.
    bucket: usize,
    /// Number of the slot in the bucket.
    slot: usize,
}

impl<W: Words> IndexMemory<W> {
    /// Creates an index in memory of whole elements, at least two: the root and the smallest table.
    pub(crate) fn new(words: W, entries: Arc<EntryMemory<W>>) -> Self {
        let bytes = words.bytes();
        assert!(
            bytes.is_multiple_of(size_of::<Pair>()) && bytes >= 2 * size_of::<Pair>(),
            "the index is made of whole elements"
        );
        Self { words, entries }
    }

    pub(crate) fn get(&self, hash: u64) -> Option<Location> {
        self.reachable(hash)
            .filter(|&place| self.tag(place) == index::tag(hash))
            .map(|place| self.location(place))
            // One name in 255 has the same tag, so the entry's hash decides.
            .find(|&location| self.hash_at(location) == Some(hash))
    }

    /// Returns the slots that may hold this hash, as searched by the program: slots of the other
    /// bucket only if some name had to move there.
    fn reachable(&self, hash: u64) -> impl Iterator<Item = SlotPosition> {
        let pairs = self.pairs();
        let count = self.words.load(
            overflow_count(first_bucket(hash, pairs), hash),
            Ordering::Acquire,
        );
        let overflows = index::overflows(count);
        places(hash, pairs).take(if overflows == 0 {
            BUCKET_SLOTS
        } else {
            2 * BUCKET_SLOTS
        })
    }

    pub(crate) fn locations(&self) -> impl Iterator<Item = Location> {
        self.taken(self.pairs()).map(|place| self.location(place))
    }

    fn taken(&self, pairs: u32) -> impl Iterator<Item = SlotPosition> {
        let first = 2 * pairs as usize;
        let all = (first..2 * first)
            .flat_map(|bucket| (0..BUCKET_SLOTS).map(move |slot| SlotPosition { bucket, slot }));
        all.filter(|&place| self.tag(place) != 0)
    }

    fn place(&self, hash: u64, location: Location) -> Option<SlotPosition> {
        let mut places = places(hash, self.pairs());
        places
            .find(|&place| self.tag(place) == index::tag(hash) && self.location(place) == location)
    }

    fn free_place(&self, hash: u64, pairs: u32) -> Option<SlotPosition> {
        places(hash, pairs).find(|&place| self.tag(place) == 0)
    }

    /// Fills a free slot.
    fn take(&self, place: SlotPosition, hash: u64, location: Location) {
        if let Some(count) = overflow_count_of(place, hash) {
            // Written before the tag: a reader without a match reads the other bucket only if this
            // counts an overflow.
            self.change(count, index::with_overflow);
        }
        self.set_location(place, location);
        self.set_tag(place, index::tag(hash));
    }

    /// Frees the slot of a name.
    fn give_back(&self, place: SlotPosition, hash: u64) {
        self.set_tag(place, 0);
        if let Some(count) = overflow_count_of(place, hash) {
            self.change(count, index::without_overflow);
        }
    }

    /// Fills a table of twice the size and switches to it.
    fn grow(&self, pairs: u32) -> Result<(), Full> {
        // The next table ends at four times this number of pairs, see `dns_common::index`.
        if pairs > self.elements() / 4 {
            return Err(Full);
        }
        for place in self.taken(pairs) {
            let location = self.location(place);
            // One pair of buckets is split into two, so there is room, and every entry has a header.
            if let Some(hash) = self.hash_at(location)
                && let Some(free) = self.free_place(hash, 2 * pairs)
            {
                self.take(free, hash, location);
            }
        }
        // Last, so that programs find a complete table. Runs that have read the old number find the
        // old one untouched.
        self.set_pairs(2 * pairs);
        Ok(())
    }

    fn hash_at(&self, location: Location) -> Option<u64> {
        read_header(&self.entries, location).map(|header| header.hash)
    }

    fn elements(&self) -> u32 {
        u32::try_from(self.words.bytes() / size_of::<Pair>())
            .expect("a BPF array has at most 2^32 elements")
    }

    /// Returns the number of pairs in use; an invalid root counts as 1.
    fn pairs(&self) -> u32 {
        let pairs = u32::try_from(self.words.load(0, Ordering::Acquire)).unwrap_or(0);
        // A predecessor's map may hold anything, and its numbers lead to offsets.
        if pairs.is_power_of_two() && pairs <= self.elements() / 2 {
            pairs
        } else {
            1
        }
    }

    fn set_pairs(&self, pairs: u32) {
        self.words.store(0, pairs.into(), Ordering::Release);
    }

    fn tag(&self, place: SlotPosition) -> u8 {
        self.words
            .load(tags(place), Ordering::Acquire)
            .to_le_bytes()[place.slot % WORD_SLOTS]
    }

    /// Sets the tag of a slot; its cell must be set first.
    fn set_tag(&self, place: SlotPosition, tag: u8) {
        self.change(tags(place), |word| {
            let mut bytes = word.to_le_bytes();
            bytes[place.slot % WORD_SLOTS] = tag;
            u64::from_le_bytes(bytes)
        });
    }

    /// Changes a word, ordered after all earlier writes. There is no concurrent writer.
    fn change(&self, index: usize, change: impl FnOnce(u64) -> u64) {
        self.words.store(
            index,
            change(self.words.load(index, Ordering::Relaxed)),
            Ordering::Release,
        );
    }

    fn location(&self, place: SlotPosition) -> Location {
        // A reader that sees a slot's cell sees the entry that was written before.
        Location(self.words.load_half(cell(place), Ordering::Acquire))
    }

    /// Points a slot to the entry at `location`, which is already written.
    fn set_location(&self, place: SlotPosition, location: Location) {
        self.words
            .store_half(cell(place), location.0, Ordering::Release);
    }
}

/// Returns the index of the word that holds a slot's tag.
fn tags(place: SlotPosition) -> usize {
    place.bucket * size_of::<Bucket>() / 8 + place.slot / WORD_SLOTS
}

/// Returns the index of the half word that holds the location of a slot's entry.
fn cell(place: SlotPosition) -> usize {
    (place.bucket * size_of::<Bucket>() + std::mem::offset_of!(Bucket, cells)) / 4 + place.slot
}

/// Returns the index of the word that counts this name as overflowed, if its slot is not in its
/// preferred bucket.
fn overflow_count_of(place: SlotPosition, hash: u64) -> Option<usize> {
    let first = place.bucket & !1;
    (place.bucket != first + index::preferred_bucket(hash)).then(|| overflow_count(first, hash))
}

/// Returns the index of the word that counts the names that prefer the same bucket as this hash but
/// are stored in the other one. `first` is the first bucket of the pair.
fn overflow_count(first: usize, hash: u64) -> usize {
    tags(SlotPosition {
        bucket: first + index::preferred_bucket(hash),
        slot: WORD_SLOTS,
    })
}

/// Returns the possible slots for this hash in a table of `pairs` pairs, the best first.
fn places(hash: u64, pairs: u32) -> impl Iterator<Item = SlotPosition> {
    let first = first_bucket(hash, pairs);
    let preferred = index::preferred_bucket(hash);
    (0..2).flat_map(move |turn| {
        (0..BUCKET_SLOTS).map(move |slot| SlotPosition {
            bucket: first + (preferred ^ turn),
            slot,
        })
    })
}

/// Returns the first bucket of the pair for this hash in a table of `pairs` pairs.
fn first_bucket(hash: u64, pairs: u32) -> usize {
    2 * index::element(hash, pairs) as usize
}

/// Maps all elements of `NAMES` as the index of these entries.
pub(crate) fn map_index(
    map: BorrowedFd<'_>,
    shape: Shape,
    entries: Arc<EntryMemory>,
) -> io::Result<IndexMemory> {
    let Shape {
        value_size,
        elements,
    } = shape;
    if value_size as usize != size_of::<Pair>() {
        return Err(io::Error::other(format!(
            "an index with elements of {value_size} bytes: another layout"
        )));
    }
    Ok(IndexMemory::new(
        map_shared(map, elements as usize * size_of::<Pair>())?,
        entries,
    ))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use dns_common::entry::{CELL_SIZE, CHUNK_SIZE, EntryHeader};
    use proptest::prelude::*;
    use zerocopy::FromZeros as _;

    use super::*;

    /// An index with room for `names` names, and cells for entries.
    struct Bench {
        index: Index,
        entries: Arc<EntryMemory>,
    }

    impl Bench {
        fn new(names: u32, cells: usize) -> Self {
            let anonymous = |length: usize| memmap2::MmapMut::map_anon(length).unwrap().into();
            let entries = Arc::new(EntryMemory::new(anonymous(
                (cells * CELL_SIZE).next_multiple_of(CHUNK_SIZE),
            )));
            let map = anonymous(elements(names) as usize * size_of::<Pair>());
            Self {
                index: Index::new(Arc::new(IndexMemory::new(map, entries.clone()))),
                entries,
            }
        }

        /// Writes the header of an entry at `new` and points the name to it.
        fn set(&mut self, hash: u64, new: Location, old: Option<Location>) -> Result<(), Full> {
            let header = EntryHeader {
                hash,
                ..EntryHeader::new_zeroed()
            };
            self.entries.write(
                new,
                &zerocopy::transmute!(header) as &[u64; size_of::<EntryHeader>() / 8],
            );
            self.index.set(hash, new, old)
        }

        /// Returns the number of overflowed names counted by the buckets.
        fn overflows(&self) -> usize {
            let memory = &self.index.memory;
            let first = 2 * memory.pairs() as usize;
            let second_words = (first..2 * first).map(|bucket| {
                tags(SlotPosition {
                    bucket,
                    slot: WORD_SLOTS,
                })
            });
            let words = second_words.map(|index| memory.words.load(index, Ordering::Relaxed));
            words.map(|word| index::overflows(word) as usize).sum()
        }

        /// Returns the number of overflowed names, determined from the entries.
        fn names_in_the_other_bucket(&self) -> usize {
            let memory = &self.index.memory;
            let places = memory.taken(memory.pairs());
            let hashed = places.map(|place| (place, memory.hash_at(memory.location(place))));
            hashed
                .filter(|(place, hash)| {
                    hash.is_some_and(|hash| overflow_count_of(*place, hash).is_some())
                })
                .count()
        }
    }

    /// Returns a hash distributed like the hashes of names.
    fn hash(number: u32) -> u64 {
        dns_common::name::hash_name(7, &number.to_le_bytes())
    }

    #[test]
    fn as_many_names_as_promised_fit() {
        for names in [1, 12, 100, 1_000, 20_000, 69_632] {
            let mut bench = Bench::new(names, names as usize);
            let set = (0..names)
                .filter(|&n| bench.set(hash(n), Location(n), None).is_ok())
                .count();
            // One in 1,000 may meet full buckets.
            assert!(
                set + 1 + names as usize / 1_000 >= names as usize,
                "{set} of {names}"
            );
            let found =
                (0..names).filter(|&n| bench.index.memory.get(hash(n)) == Some(Location(n)));
            assert_eq!(found.count(), set);
        }
    }

    #[test]
    fn table_size_follows_content() {
        let mut bench = Bench::new(65_536, 5_000);
        for number in 0..5_000 {
            bench.set(hash(number), Location(number), None).unwrap();
        }
        assert!(
            (256..=1024).contains(&bench.index.memory.pairs()),
            "{}",
            bench.index.memory.pairs()
        );
    }

    #[test]
    fn equal_tags_are_told_apart_by_the_entries() {
        let mut bench = Bench::new(1, 24);
        // The upper bits choose tag and bucket; they are equal in all of these.
        for number in 0..24 {
            bench
                .set(number << 8, Location(number as u32), None)
                .unwrap();
        }
        assert_eq!(bench.set(24 << 8, Location(24), None), Err(Full));
        bench.index.remove(3 << 8, Location(3));
        for number in 0..24 {
            let expected = (number != 3).then_some(Location(number as u32));
            assert_eq!(bench.index.memory.get(number << 8), expected);
        }
    }

    #[test]
    fn invalid_root_is_ignored() {
        let mut bench = Bench::new(24, 6);
        bench.set(1, Location(5), None).unwrap();
        for pairs in [0, 3, 8, u64::MAX] {
            bench.index.memory.words.store(0, pairs, Ordering::Relaxed);
            assert_eq!(bench.index.memory.get(1), Some(Location(5)));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// After any sequence of inserts, changes and removals the index agrees with a `HashMap`.
        #[test]
        fn index_matches_hash_map(steps in prop::collection::vec((0_u8..4, 0_u32..300), 1..2000)) {
            let mut bench = Bench::new(300, 2000);
            let mut model: HashMap<u32, Location> = HashMap::new();
            for (time, (action, number)) in steps.into_iter().enumerate() {
                let old = model.get(&number).copied();
                match (action, old) {
                    (0, Some(location)) => {
                        bench.index.remove(hash(number), location);
                        model.remove(&number);
                    }
                    (0, None) => bench.index.remove(hash(number), Location(u32::MAX)),
                    _ => {
                        let new = Location(time as u32);
                        match bench.set(hash(number), new, old) {
                            Ok(()) => drop(model.insert(number, new)),
                            Err(Full) => prop_assert!(old.is_none()),
                        }
                    }
                }
            }
            for number in 0..300 {
                prop_assert_eq!(bench.index.memory.get(hash(number)), model.get(&number).copied());
            }
            prop_assert_eq!(bench.index.memory.locations().count(), model.len());
            prop_assert_eq!(bench.overflows(), bench.names_in_the_other_bucket());
        }
    }
}
