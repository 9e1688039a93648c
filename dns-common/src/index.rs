//! How published names are found: a hash table in the elements of the `NAMES`
//! map, an mmap-able BPF array.
//!
//! Element 0 is the [`Root`]: it says how many [`Pair`]s of buckets are in use,
//! a power of two. A table of `n` pairs lies in the elements `n..2 * n`, so a
//! table never overlaps the one that it grew from: it is filled first, then the
//! root is changed, and a program run that read the old root just before still
//! finds everything where it was.
//!
//! A name stands in one of the slots of the pair that its hash selects, in the
//! bucket that its hash prefers if there was room, and never moves inside a
//! table. A slot is a tag, one byte of the hash, and the cell where the entry
//! begins. One comparison finds all equal tags of eight slots; whether it is the
//! right entry, the hash in its header tells. So nobody is misled who reads a
//! slot while it changes.
//!
//! Why no `BPF_MAP_TYPE_HASH`: its buckets are as many as the map could ever
//! hold names, spread over hundreds of pages, and the first look at one was a
//! tenth of all the time that a query takes (measured; `docs/architecture.md`).
//! This table is as small as its content allows, and needs no system call.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Slots in a bucket.
pub const BUCKET_SLOTS: usize = 12;

/// Slots whose tags are in one word.
pub const WORD_SLOTS: usize = 8;

/// A cache line: twelve slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(64))]
pub struct Bucket {
    /// Tags, the first slot's in the lowest byte; 0: the slot is free. Slots 8
    /// to 11 have theirs in the second word, whose upper half stays zero.
    pub tags: [u64; 2],
    /// For each slot the cell where its entry begins ([`crate::entry::Location`]).
    pub cells: [u32; BUCKET_SLOTS],
}

/// An element of the `NAMES` map: two neighbouring buckets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Pair(pub [Bucket; 2]);

/// Element 0 of the `NAMES` map.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(64))]
pub struct Root {
    /// Pairs in use: a power of two; 0 before the first name.
    pub pairs: u64,
    /// Explicit padding, zero.
    pub padding: [u64; 15],
}

const _: () = assert!(size_of::<Root>() == size_of::<Pair>());

/// The element that holds the pair of this hash in a table of `pairs` pairs.
#[inline(always)]
pub const fn element(hash: u64, pairs: u32) -> u32 {
    pairs | hash as u32 & pairs.wrapping_sub(1)
}

/// Number of the bucket of its pair that this hash prefers.
#[inline(always)]
pub const fn preferred_bucket(hash: u64) -> usize {
    (hash >> 55) as usize & 1
}

/// The tag of a name with this hash, never 0.
#[inline(always)]
pub const fn tag(hash: u64) -> u8 {
    (1 + (((hash >> 56) * 255) >> 8)) as u8
}

/// The slots among these eight that have this tag (0: that are free): the
/// highest bit of each one's byte.
#[inline(always)]
pub const fn slots_with(tags: u64, tag: u8) -> u64 {
    const LOW_BITS: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    const ONES: u64 = 0x0101_0101_0101_0101;
    let different = tags ^ ONES.wrapping_mul(tag as u64);
    // A byte's highest bit is set unless the whole byte is zero; nothing is
    // carried from one byte into the next.
    !(((different & LOW_BITS) + LOW_BITS) | different | LOW_BITS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn elements_of_different_sizes_do_not_overlap() {
        for pairs in [1, 2, 4, 1 << 20] {
            for hash in [0, 1, 7, u64::MAX, 0x1234_5678_9abc_def0] {
                assert!((pairs..2 * pairs).contains(&element(hash, pairs)));
            }
        }
    }

    #[test]
    fn tags_are_never_those_of_free_slots() {
        assert_eq!((tag(0), tag(u64::MAX)), (1, 255));
        assert!((0..=255).all(|byte: u64| tag(byte << 56) != 0));
    }

    proptest! {
        #[test]
        fn equal_tags_are_found_and_no_others(tags: [u8; 8], wanted: u8, place in 0_usize..8) {
            let mut tags = tags;
            tags[place] = wanted;
            let found = slots_with(u64::from_le_bytes(tags), wanted).to_le_bytes();
            prop_assert_eq!(found, tags.map(|tag| if tag == wanted { 0x80 } else { 0 }));
        }
    }
}
