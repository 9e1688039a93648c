//! The hash table from names to entries, see [`dns_common::index`]: written by
//! the publisher alone, read by the program and by whoever wants to know when an entry was last used.

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
use crate::bpf;

/// Names for one pair of buckets in the largest table: of pairs with so many on
/// average one in 8,000 would get a 25th (Poisson).
const NAMES_PER_PAIR: u32 = 12;

/// Elements of the `NAMES` map for so many names.
pub(crate) fn elements(names: u32) -> u32 {
    // The largest table follows the root and all smaller ones, which are as long together.
    2 * names.div_ceil(NAMES_PER_PAIR).clamp(1, 1 << 30).next_power_of_two()
}

/// The buckets of a name's hash are full, and the table is as large as it can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// The index, for its one writer.
#[derive(Debug)]
pub(crate) struct Index<W = MmapRaw> {
    /// The table.
    memory: Arc<IndexMemory<W>>,
}

impl<W: Words> Index<W> {
    /// The writer of an empty index.
    pub(crate) fn new(memory: Arc<IndexMemory<W>>) -> Self {
        memory.set_pairs(1);
        Self { memory }
    }

    /// Makes the name of this hash lie at `new`, where its entry is already, in
    /// the place of `old` if it was there before.
    pub(crate) fn set(&mut self, hash: u64, new: Location, old: Option<Location>) -> Result<(), Full> {
        let memory = &self.memory;
        if let Some(place) = old.and_then(|old| memory.place(hash, old)) {
            memory.set_location(place, new);
            return Ok(());
        }
        loop {
            let pairs = memory.pairs();
            if let Some(place) = memory.free_place(hash, pairs) {
                memory.take(place, hash, new);
                return Ok(());
            }
            memory.grow(pairs)?;
        }
    }

    /// Takes the name of this hash, whose entry lies at `location`, out.
    pub(crate) fn remove(&mut self, hash: u64, location: Location) {
        if let Some(place) = self.memory.place(hash, location) {
            self.memory.give_back(place, hash);
        }
    }
}

/// The elements of the `NAMES` map, mapped (or from nowhere, in tests), and the
/// entries that they lead to.
#[derive(Debug)]
pub(crate) struct IndexMemory<W = MmapRaw> {
    /// The words of the elements.
    words: W,
    /// The entries.
    entries: Arc<EntryMemory<W>>,
}

/// A slot.
#[derive(Clone, Copy, Debug)]
struct SlotPosition {
    /// Number of the bucket, counted from the start of the map.
    bucket: usize,
    /// Number in the bucket.
    slot: usize,
}

impl<W: Words> IndexMemory<W> {
    /// Takes over memory of whole elements: of two at least, the root and the smallest table.
    pub(crate) fn new(words: W, entries: Arc<EntryMemory<W>>) -> Self {
        let bytes = words.bytes();
        assert!(
            bytes.is_multiple_of(size_of::<Pair>()) && bytes >= 2 * size_of::<Pair>(),
            "the index is made of whole elements"
        );
        Self { words, entries }
    }

    /// Where the entry of the name with this hash lies.
    pub(crate) fn get(&self, hash: u64) -> Option<Location> {
        self.reachable(hash)
            .filter(|&place| self.tag(place) == index::tag(hash))
            .map(|place| self.location(place))
            .find(|&location| self.hash_at(location) == Some(hash))
    }

    /// The slots where this hash may stand, as the program sees it: those of the
    /// other bucket only if some name had to go there.
    fn reachable(&self, hash: u64) -> impl Iterator<Item = SlotPosition> {
        let pairs = self.pairs();
        let count = self.words.load(overflow_count(first_bucket(hash, pairs), hash), Ordering::Acquire);
        let overflows = index::overflows(count);
        places(hash, pairs).take(if overflows == 0 { BUCKET_SLOTS } else { 2 * BUCKET_SLOTS })
    }

    /// Where all entries lie.
    pub(crate) fn locations(&self) -> impl Iterator<Item = Location> {
        self.taken(self.pairs()).map(|place| self.location(place))
    }

    /// The slots in use of the table of so many pairs.
    fn taken(&self, pairs: u32) -> impl Iterator<Item = SlotPosition> {
        let first = 2 * pairs as usize;
        let all = (first..2 * first)
            .flat_map(|bucket| (0..BUCKET_SLOTS).map(move |slot| SlotPosition { bucket, slot }));
        all.filter(|&place| self.tag(place) != 0)
    }

    /// The slot of the name with this hash, whose entry lies at `location`.
    fn place(&self, hash: u64, location: Location) -> Option<SlotPosition> {
        let mut places = places(hash, self.pairs());
        places.find(|&place| self.tag(place) == index::tag(hash) && self.location(place) == location)
    }

    /// A free slot for this hash.
    fn free_place(&self, hash: u64, pairs: u32) -> Option<SlotPosition> {
        places(hash, pairs).find(|&place| self.tag(place) == 0)
    }

    /// Gives a free slot to a name.
    fn take(&self, place: SlotPosition, hash: u64, location: Location) {
        if let Some(count) = overflow_count_of(place, hash) {
            // Before the tag: who finds none looks no further.
            self.change(count, index::with_overflow);
        }
        self.set_location(place, location);
        self.set_tag(place, index::tag(hash));
    }

    /// Makes the slot of a name free.
    fn give_back(&self, place: SlotPosition, hash: u64) {
        self.set_tag(place, 0);
        if let Some(count) = overflow_count_of(place, hash) {
            self.change(count, index::without_overflow);
        }
    }

    /// Fills a table of twice the size and changes over to it.
    fn grow(&self, pairs: u32) -> Result<(), Full> {
        if pairs > self.elements() / 4 {
            return Err(Full);
        }
        for place in self.taken(pairs) {
            let location = self.location(place);
            // What was in one pair goes to two, so that there is room, and every entry has a header.
            if let Some(hash) = self.hash_at(location)
                && let Some(free) = self.free_place(hash, 2 * pairs)
            {
                self.take(free, hash, location);
            }
        }
        self.set_pairs(2 * pairs);
        Ok(())
    }

    /// The hash in the header of the entry there.
    fn hash_at(&self, location: Location) -> Option<u64> {
        read_header(&self.entries, location).map(|header| header.hash)
    }

    /// Elements in the mapping.
    fn elements(&self) -> u32 {
        u32::try_from(self.words.bytes() / size_of::<Pair>()).expect("a BPF array has at most 2^32 elements")
    }

    /// Pairs in use: what the root says, as far as it can be true.
    fn pairs(&self) -> u32 {
        let pairs = u32::try_from(self.words.load(0, Ordering::Acquire)).unwrap_or(0);
        if pairs.is_power_of_two() && pairs <= self.elements() / 2 { pairs } else { 1 }
    }

    /// Changes over to the table of so many pairs.
    fn set_pairs(&self, pairs: u32) {
        self.words.store(0, pairs.into(), Ordering::Release);
    }

    /// The tag of a slot.
    fn tag(&self, place: SlotPosition) -> u8 {
        self.words.load(tags(place), Ordering::Acquire).to_le_bytes()[place.slot % WORD_SLOTS]
    }

    /// Changes the tag of a slot. The cell is there before the tag that leads to it.
    fn set_tag(&self, place: SlotPosition, tag: u8) {
        self.change(tags(place), |word| {
            let mut bytes = word.to_le_bytes();
            bytes[place.slot % WORD_SLOTS] = tag;
            u64::from_le_bytes(bytes)
        });
    }

    /// Changes a word, behind all that was written before. Nobody else writes.
    fn change(&self, index: usize, change: impl FnOnce(u64) -> u64) {
        self.words.store(index, change(self.words.load(index, Ordering::Relaxed)), Ordering::Release);
    }

    /// Where the entry of a slot in use lies.
    fn location(&self, place: SlotPosition) -> Location {
        Location(self.words.load_half(cell(place), Ordering::Acquire))
    }

    /// Makes a slot lead to the entry at `location`, which is there already.
    fn set_location(&self, place: SlotPosition, location: Location) {
        self.words.store_half(cell(place), location.0, Ordering::Release);
    }
}

/// Number of the word that holds the tag of a slot.
fn tags(place: SlotPosition) -> usize {
    place.bucket * size_of::<Bucket>() / 8 + place.slot / WORD_SLOTS
}

/// Number of the half word that holds the location of a slot's entry.
fn cell(place: SlotPosition) -> usize {
    (place.bucket * size_of::<Bucket>() + std::mem::offset_of!(Bucket, cells)) / 4 + place.slot
}

/// Number of the word that counts the name of this hash in this slot, if it is not in the
/// bucket that it prefers.
fn overflow_count_of(place: SlotPosition, hash: u64) -> Option<usize> {
    let first = place.bucket & !1;
    (place.bucket != first + index::preferred_bucket(hash)).then(|| overflow_count(first, hash))
}

/// Number of the word that counts the names that are not in the bucket that this hash
/// prefers, though they prefer it, too. `first`: the first bucket of the pair.
fn overflow_count(first: usize, hash: u64) -> usize {
    tags(SlotPosition { bucket: first + index::preferred_bucket(hash), slot: WORD_SLOTS })
}

/// The slots where this hash may stand in a table of so many pairs, the best first.
fn places(hash: u64, pairs: u32) -> impl Iterator<Item = SlotPosition> {
    let first = first_bucket(hash, pairs);
    let preferred = index::preferred_bucket(hash);
    (0..2).flat_map(move |turn| {
        (0..BUCKET_SLOTS).map(move |slot| SlotPosition { bucket: first + (preferred ^ turn), slot })
    })
}

/// The first bucket of the pair where this hash may stand in a table of so many pairs.
fn first_bucket(hash: u64, pairs: u32) -> usize {
    2 * index::element(hash, pairs) as usize
}

/// Maps the index of these entries: all elements of `NAMES`.
pub(crate) fn map_index(map: BorrowedFd<'_>, entries: Arc<EntryMemory>) -> io::Result<IndexMemory> {
    map_index_of(map, bpf::map_shape(map)?, entries)
}

/// The same of a map whose shape is known.
pub(crate) fn map_index_of(
    map: BorrowedFd<'_>,
    shape: Shape,
    entries: Arc<EntryMemory>,
) -> io::Result<IndexMemory> {
    let Shape { value_size, elements } = shape;
    if value_size as usize != size_of::<Pair>() {
        return Err(io::Error::other(format!(
            "an index with elements of {value_size} bytes: another layout"
        )));
    }
    Ok(IndexMemory::new(map_shared(map, elements as usize * size_of::<Pair>())?, entries))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use dns_common::entry::{CELL_SIZE, CHUNK_SIZE, EntryHeader};
    use proptest::prelude::*;
    use zerocopy::FromZeros as _;

    use super::*;

    /// An index with room for so many names, and cells for entries.
    struct Bench {
        /// The index.
        index: Index,
        /// The entries.
        entries: Arc<EntryMemory>,
    }

    impl Bench {
        /// An empty one.
        fn new(names: u32, cells: usize) -> Self {
            let anonymous = |length: usize| memmap2::MmapMut::map_anon(length).unwrap().into();
            let entries =
                Arc::new(EntryMemory::new(anonymous((cells * CELL_SIZE).next_multiple_of(CHUNK_SIZE))));
            let map = anonymous(elements(names) as usize * size_of::<Pair>());
            Self { index: Index::new(Arc::new(IndexMemory::new(map, entries.clone()))), entries }
        }

        /// Writes the header of an entry at `new` and sets it.
        fn set(&mut self, hash: u64, new: Location, old: Option<Location>) -> Result<(), Full> {
            let header = EntryHeader { hash, ..EntryHeader::new_zeroed() };
            self.entries.write(new, &zerocopy::transmute!(header) as &[u64; size_of::<EntryHeader>() / 8]);
            self.index.set(hash, new, old)
        }

        /// Names that are not in the bucket that they prefer, as the buckets count them.
        fn overflows(&self) -> usize {
            let memory = &self.index.memory;
            let first = 2 * memory.pairs() as usize;
            let second_words =
                (first..2 * first).map(|bucket| tags(SlotPosition { bucket, slot: WORD_SLOTS }));
            let words = second_words.map(|index| memory.words.load(index, Ordering::Relaxed));
            words.map(|word| index::overflows(word) as usize).sum()
        }

        /// The same as the entries tell.
        fn names_in_the_other_bucket(&self) -> usize {
            let memory = &self.index.memory;
            let places = memory.taken(memory.pairs());
            let hashed = places.map(|place| (place, memory.hash_at(memory.location(place))));
            hashed
                .filter(|(place, hash)| hash.is_some_and(|hash| overflow_count_of(*place, hash).is_some()))
                .count()
        }
    }

    /// Hashes as names have them.
    fn hash(number: u32) -> u64 {
        dns_common::name::hash_name(7, &number.to_le_bytes())
    }

    #[test]
    fn as_many_names_as_promised_fit() {
        for names in [1, 12, 100, 1_000, 20_000, 69_632] {
            let mut bench = Bench::new(names, names as usize);
            let set = (0..names).filter(|&n| bench.set(hash(n), Location(n), None).is_ok()).count();
            // One in 1,000 may meet full buckets.
            assert!(set + 1 + names as usize / 1_000 >= names as usize, "{set} of {names}");
            let found = (0..names).filter(|&n| bench.index.memory.get(hash(n)) == Some(Location(n)));
            assert_eq!(found.count(), set);
        }
    }

    #[test]
    fn a_table_is_as_small_as_its_content_allows() {
        let mut bench = Bench::new(65_536, 5_000);
        for number in 0..5_000 {
            bench.set(hash(number), Location(number), None).unwrap();
        }
        assert!((256..=1024).contains(&bench.index.memory.pairs()), "{}", bench.index.memory.pairs());
    }

    #[test]
    fn equal_tags_are_told_apart_by_the_entries() {
        let mut bench = Bench::new(1, 24);
        // The upper bits choose tag and bucket: equal in all of these.
        for number in 0..24 {
            bench.set(number << 8, Location(number as u32), None).unwrap();
        }
        assert_eq!(bench.set(24 << 8, Location(24), None), Err(Full));
        bench.index.remove(3 << 8, Location(3));
        for number in 0..24 {
            let expected = (number != 3).then_some(Location(number as u32));
            assert_eq!(bench.index.memory.get(number << 8), expected);
        }
    }

    #[test]
    fn a_root_that_cannot_be_true_is_not_believed() {
        let mut bench = Bench::new(24, 6);
        bench.set(1, Location(5), None).unwrap();
        for pairs in [0, 3, 8, u64::MAX] {
            bench.index.memory.words.store(0, pairs, Ordering::Relaxed);
            assert_eq!(bench.index.memory.get(1), Some(Location(5)));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Whatever comes, changes and goes: the index says what a map would say.
        #[test]
        fn it_is_a_map(steps in prop::collection::vec((0_u8..4, 0_u32..300), 1..2000)) {
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
