//! Memory shared with the programs, accessed word by word.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memmap2::MmapRaw;

/// Words of memory that the programs access concurrently. No word is accessed both as a whole and by halves.
///
/// A trait because correctness depends on the order of accesses: a second implementation lets loom
/// explore every order that a reader may see (`publish/table/interleavings.rs`).
pub(crate) trait Words {
    fn bytes(&self) -> usize;

    /// Reads a word. All methods panic if the index is out of bounds.
    fn load(&self, index: usize, order: Ordering) -> u64;

    fn store(&self, index: usize, value: u64, order: Ordering);

    /// Reads a half word (4 bytes).
    fn load_half(&self, index: usize, order: Ordering) -> u32;

    /// Writes a half word.
    fn store_half(&self, index: usize, value: u32, order: Ordering);
}

impl Words for MmapRaw {
    fn bytes(&self) -> usize {
        self.len()
    }

    fn load(&self, index: usize, order: Ordering) -> u64 {
        word(self, index).load(order)
    }

    fn store(&self, index: usize, value: u64, order: Ordering) {
        word(self, index).store(value, order);
    }

    fn load_half(&self, index: usize, order: Ordering) -> u32 {
        half(self, index).load(order)
    }

    fn store_half(&self, index: usize, value: u32, order: Ordering) {
        half(self, index).store(value, order);
    }
}

/// Returns a word of a mapping. Panics if the index is out of bounds, as [`half`] does.
pub fn word(map: &MmapRaw, index: usize) -> &AtomicU64 {
    assert!(
        index < map.len() / 8,
        "word {index} lies beyond the mapping"
    );
    // SAFETY: inside the mapping, as just checked, which lives as long as `map`, and aligned,
    // because mappings begin at a page boundary. Userspace writes only through these atomics.
    unsafe { AtomicU64::from_ptr(map.as_mut_ptr().cast::<u64>().add(index)) }
}

/// Returns a half word of a mapping.
pub fn half(map: &MmapRaw, index: usize) -> &AtomicU32 {
    assert!(
        index < map.len() / 4,
        "half word {index} lies beyond the mapping"
    );
    // SAFETY: as in `word`.
    unsafe { AtomicU32::from_ptr(map.as_mut_ptr().cast::<u32>().add(index)) }
}
