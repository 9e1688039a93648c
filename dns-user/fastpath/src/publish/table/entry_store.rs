//! Entries in memory and the index that leads to them, written, moved and freed such that a
//! concurrent program finds either the complete old entry or the complete new one.

use std::sync::Arc;

use dns_common::entry::{CELL_SIZE, Location};
use memmap2::MmapRaw;

use crate::{
    map::{
        index::{Full, Index, IndexMemory},
        store::{CellAllocator, EntryMemory, cells},
        words::Words,
    },
    publish::lease::GracePeriods,
};

/// One in this many cells is reserved for listed names and changed entries, so that learned names
/// never take the room needed by a new records.json.
const RESERVE_SHARE: u32 = 8;

/// One in this many cells is evicted at a time when the store is full, so that one grace period
/// frees room for many names.
const BATCH_SHARE: u32 = 64;

/// The position of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    /// Hash of the entry's name.
    pub(crate) key: u64,
    pub(crate) location: Location,
    pub(crate) size: usize,
}

pub(crate) struct EntryStore<W = MmapRaw> {
    index: Index<W>,
    pub(crate) memory: Arc<EntryMemory<W>>,
    pub(crate) allocator: CellAllocator,
    /// Entries written since the start.
    pub(crate) written: u64,
}

impl<W: Words> EntryStore<W> {
    /// Returns the store of an index without names.
    pub(crate) fn of(index: Arc<IndexMemory<W>>) -> Self {
        let memory = index.entries.clone();
        let allocator = CellAllocator::new(memory.chunks());
        Self {
            index: Index::new(index),
            allocator,
            memory,
            written: 0,
        }
    }

    /// Allocates cells for `size` bytes without touching the reserve.
    pub(super) fn allocate_beside_reserve(&mut self, size: usize) -> Option<Location> {
        // Free cells may be too scattered for the entry, which `allocate` finds out.
        if self.allocator.free_cells() < cells(size) + self.reserve() {
            return None;
        }
        self.allocator.allocate(size)
    }

    /// Returns whether there are free cells outside the reserve.
    pub(super) fn has_room(&self) -> bool {
        self.allocator.free_cells() > self.reserve()
    }

    /// Returns whether `size` bytes are in quarantine and will become free.
    pub(crate) fn will_have(&self, size: usize) -> bool {
        self.allocator.quarantined >= cells(size)
    }

    /// Returns the bytes freed by one eviction, at least `size`.
    pub(crate) fn batch(&self, size: usize) -> usize {
        size.max((self.allocator.total / BATCH_SHARE) as usize * CELL_SIZE)
    }

    /// Writes an entry to its allocated cells and points the index to it, in place of an older
    /// entry. The older entry stays intact until the grace period ends, for program runs that have
    /// already found it. If the index is full, or the memory cannot be mapped, the cells are freed.
    pub(crate) fn write(
        &mut self,
        new: Placed,
        words: &[u64],
        old: Option<(Location, usize)>,
    ) -> Result<(), Full> {
        let Placed {
            key,
            location,
            size,
        } = new;
        // mmap(2) may fail for lack of memory; userspace answers the name then.
        if self.memory.prepare(location, size).is_err() {
            self.allocator.free(location, size);
            return Err(Full);
        }
        self.memory.write(location, words);
        if let Err(full) = self
            .index
            .set(key, location, old.map(|(location, _)| location))
        {
            self.allocator.free(location, size);
            return Err(full);
        }
        self.written += 1;
        // After the index has left it; runs that found it before are why it goes to quarantine.
        if let Some((location, size)) = old {
            self.allocator.free(location, size);
        }
        Ok(())
    }

    /// Removes an entry: program runs that begin later do not find it. Earlier runs may answer from
    /// it until they end; until then its cells are in quarantine.
    pub(crate) fn remove(&mut self, entry: Placed) {
        // Before the cells: nothing may lead to what will be overwritten.
        self.index.remove(entry.key, entry.location);
        self.allocator.free(entry.location, entry.size);
    }

    /// Frees cells whose grace period has ended and begins the next one.
    pub(crate) fn reclaim(&mut self, grace: &mut GracePeriods) {
        // The end first, so that the same call can begin the next one for what was freed meanwhile.
        if grace.ended() {
            self.allocator.end_grace_period();
        }
        if !grace.running && self.allocator.begin_grace_period() {
            // If the thread of the grace periods has ended, these cells stay in quarantine.
            grace.begin();
        }
    }

    /// Returns the number of cells that learned names leave free.
    fn reserve(&self) -> u32 {
        self.allocator.total / RESERVE_SHARE
    }
}
