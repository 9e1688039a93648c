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
//! table. Each bucket knows how many of those that prefer it had to go to the
//! other one: mostly none, and then whatever is not in it is not there at all. A
//! slot is a tag, one byte of the hash, and the cell where the entry
//! begins. One comparison finds all equal tags of eight slots; whether it is the
//! right entry, the hash in its header tells. So nobody is misled who reads a
//! slot while it changes.
//!
//! Why no `BPF_MAP_TYPE_HASH`: its buckets are as many as the map could ever
//! hold names, spread over hundreds of pages, and the first look at one was a
//! tenth of all the time that a query takes (measured; `docs/architecture.md`).
//! This table is as small as its content allows, and needs no system call.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::name::{HIGHS, ONES, first_zero};

/// Slots in a bucket.
pub const BUCKET_SLOTS: usize = 12;

/// Slots whose tags are in one word.
pub const WORD_SLOTS: usize = 8;

/// A cache line: twelve slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(64))]
pub struct Bucket {
    /// Tags, the first slot's in the lowest byte; 0: the slot is free. Slots 8
    /// to 11 have theirs in the second word, whose upper half counts the names
    /// that prefer this bucket and stand in the other one ([`overflows`]).
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

/// How many names stand in the other bucket because the one with this second word was
/// full.
#[inline(always)]
pub const fn overflows(second_word: u64) -> u32 {
    (second_word >> OVERFLOW_SHIFT) as u32
}

/// The second word of a bucket with one more of them.
#[inline(always)]
pub const fn with_overflow(second_word: u64) -> u64 {
    second_word + (1 << OVERFLOW_SHIFT)
}

/// The second word of a bucket with one less of them; there is one.
#[inline(always)]
pub const fn without_overflow(second_word: u64) -> u64 {
    second_word - (1 << OVERFLOW_SHIFT)
}

/// Where in its word the count of [`overflows`] begins.
const OVERFLOW_SHIFT: usize = 32;

/// The tag of a name with this hash, never 0.
#[inline(always)]
pub const fn tag(hash: u64) -> u8 {
    (1 + (((hash >> 56) * 255) >> 8)) as u8
}

/// The slots of a bucket that have this tag, a bit for each: bit `8n + 7` for slot `n`
/// of the first eight, `8n + 6` for slot `8 + n`.
#[inline(always)]
pub const fn slots_with(tags: [u64; 2], tag: u8) -> u64 {
    let wanted = ONES.wrapping_mul(tag as u64);
    zero_bytes(tags[0] ^ wanted) | zero_bytes(tags[1] ^ wanted) >> 1 & SECOND_SLOTS
}

/// The first slot of those that [`slots_with`] found; there is one. Below [`BUCKET_SLOTS`].
#[inline(always)]
pub const fn first_slot(slots: u64) -> usize {
    let lowest = slots & slots.wrapping_neg();
    let second = lowest & SECOND_SLOTS;
    let byte = first_zero(lowest + second);
    if second != 0 { byte + WORD_SLOTS } else { byte }
}

/// The bits of the slots whose tags are in the second word.
const SECOND_SLOTS: u64 = 0x4040_4040;

/// The highest bit of each byte that is zero.
#[inline(always)]
const fn zero_bytes(word: u64) -> u64 {
    // A byte's highest bit is set unless the whole byte is zero; nothing is
    // carried from one byte into the next.
    !(((word & !HIGHS) + !HIGHS) | word | !HIGHS)
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
        fn equal_tags_are_found_and_no_others(tags: [u8; 12], overflows: u32, wanted: u8, place in 0_usize..12) {
            let mut tags = tags;
            tags[place] = wanted;
            let word = |bytes: &[u8]| u64::from_le_bytes(core::array::from_fn(|at| bytes.get(at).copied().unwrap_or(0)));
            let second = word(&tags[8..]) | u64::from(overflows) << OVERFLOW_SHIFT;
            let mut slots = slots_with([word(&tags[..8]), second], wanted);
            let mut found = [false; BUCKET_SLOTS];
            while slots != 0 {
                found[first_slot(slots)] = true;
                slots &= slots - 1;
            }
            prop_assert_eq!(found, tags.map(|tag| tag == wanted));
        }
    }
}
