//! Index of published names: a hash table in the elements of the `NAMES` map, an mmap-able BPF
//! array.
//!
//! Element 0 is the [`Root`]; it holds the number of [`Pair`]s of buckets in use, a power of two. A
//! table of `n` pairs occupies the elements `n..2 * n`, so a table never overlaps the smaller one
//! it replaces: the publisher fills the new table, then updates the root. A program run that has
//! just read the old root still finds the old table intact.
//!
//! A name occupies one slot of the pair selected by its hash, in the preferred bucket if there was
//! room, and never moves within a table. Each bucket counts the names that prefer it but overflowed
//! into its neighbour. The count is mostly zero, and then a lookup ends after one bucket. A slot
//! holds a tag, one byte of the hash, and the first cell of the entry. One comparison finds all
//! equal tags of eight slots; the hash in the entry's header then confirms the match, so reading a
//! slot during an update is harmless.
//!
//! `BPF_MAP_TYPE_HASH` is not used because it allocates buckets for its maximum size, spread over
//! hundreds of pages; the first access to one took a tenth of the time per query (measured;
//! `docs/architecture.md`). This table is as small as its content allows and needs no system calls.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::name::{HIGHS, ONES, first_zero};

/// Slots in a bucket.
// Two words of tags and twelve cells of four bytes fill a cache line.
pub const BUCKET_SLOTS: usize = 12;

/// Slots whose tags share a word.
pub const WORD_SLOTS: usize = 8;

/// A bucket of twelve slots in one cache line.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C, align(64))]
pub struct Bucket {
    /// Tags, the first slot's in the lowest byte; 0: the slot is free. The second word holds the
    /// tags of slots 8 to 11; its upper half counts the names that prefer this bucket but are in
    /// the other one ([`overflows`]).
    pub tags: [u64; 2],
    /// First cell of each slot's entry ([`crate::entry::Location`]).
    pub cells: [u32; BUCKET_SLOTS],
}

/// An element of the `NAMES` map: two neighbouring buckets.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(transparent)]
pub struct Pair(pub [Bucket; 2]);

/// Element 0 of the `NAMES` map.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(64))]
pub struct Root {
    /// Number of pairs in use: a power of two; 0 before the first name.
    pub pairs: u64,
    /// Padding to the size of an element, always zero.
    pub padding: [u64; 15],
}

const _: () = assert!(size_of::<Root>() == size_of::<Pair>());

/// Returns the element that holds the pair of `hash` in a table of `pairs` pairs.
#[inline(always)]
pub const fn element(hash: u64, pairs: u32) -> u32 {
    // A power of two and the bits below it: exactly the elements from `pairs` to `2 * pairs`.
    pairs | hash as u32 & pairs.wrapping_sub(1)
}

/// Returns which bucket of its pair `hash` prefers, 0 or 1.
#[inline(always)]
pub const fn preferred_bucket(hash: u64) -> usize {
    // A bit that neither the pair (the lowest ones) nor the tag (from bit 56 on) depends on.
    (hash >> 55) as usize & 1
}

/// Returns the number of names stored in the other bucket because the bucket with this second word
/// was full.
#[inline(always)]
pub const fn overflows(second_word: u64) -> u32 {
    (second_word >> OVERFLOW_SHIFT) as u32
}

/// Returns the second word with its overflow count incremented.
#[inline(always)]
pub const fn with_overflow(second_word: u64) -> u64 {
    second_word + (1 << OVERFLOW_SHIFT)
}

/// Returns the second word with its overflow count, which must not be zero, decremented.
#[inline(always)]
pub const fn without_overflow(second_word: u64) -> u64 {
    second_word - (1 << OVERFLOW_SHIFT)
}

/// Position of the overflow count in the second word.
const OVERFLOW_SHIFT: usize = 32;

/// Returns the tag of a name with this hash, never 0.
#[inline(always)]
pub const fn tag(hash: u64) -> u8 {
    // 256 values become 255, because 0 marks a free slot.
    (1 + (((hash >> 56) * 255) >> 8)) as u8
}

/// Returns the slots of a bucket with this tag as a bit set: bit `8n + 7` for slot `n` of the first
/// eight, `8n + 6` for slot `8 + n`.
#[inline(always)]
pub const fn slots_with(tags: [u64; 2], tag: u8) -> u64 {
    // The marks of the second word are a bit lower, so that both fit into one result. `zero_byte`
    // would not do: every mark counts here, not only the first.
    let wanted = ONES.wrapping_mul(tag as u64);
    zero_bytes(tags[0] ^ wanted) | zero_bytes(tags[1] ^ wanted) >> 1 & SECOND_SLOTS
}

/// Returns the first slot in a non-empty result of [`slots_with`], below [`BUCKET_SLOTS`].
#[inline(always)]
pub const fn first_slot(slots: u64) -> usize {
    let lowest = slots & slots.wrapping_neg();
    let second = lowest & SECOND_SLOTS;
    // A mark of the second word, added to itself, is where `first_zero` expects one.
    let byte = first_zero(lowest + second);
    if second != 0 { byte + WORD_SLOTS } else { byte }
}

/// Bits of the slots whose tags are in the second word.
const SECOND_SLOTS: u64 = 0x4040_4040;

/// Sets the highest bit of each byte of the result whose byte in `word` is zero.
#[inline(always)]
const fn zero_bytes(word: u64) -> u64 {
    // A byte's highest bit is set unless the whole byte is zero; no carry crosses bytes.
    !(((word & !HIGHS) + !HIGHS) | word | !HIGHS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn tables_never_overlap() {
        for pairs in [1, 2, 4, 1 << 20] {
            for hash in [0, 1, 7, u64::MAX, 0x1234_5678_9abc_def0] {
                assert!((pairs..2 * pairs).contains(&element(hash, pairs)));
            }
        }
    }

    #[test]
    fn tags_are_never_zero() {
        assert_eq!((tag(0), tag(u64::MAX)), (1, 255));
        assert!((0..=255).all(|byte: u64| tag(byte << 56) != 0));
    }

    proptest! {
        #[test]
        fn slots_with_finds_equal_tags(tags: [u8; 12], overflows: u32, wanted: u8, place in 0_usize..12) {
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
