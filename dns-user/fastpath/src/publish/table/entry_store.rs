//! Entries in memory and the index that leads to them, written, moved and freed such that a
//! concurrent program finds either the complete old entry or the complete new one.

use std::sync::Arc;

use dns_common::entry::{CELL_SIZE, Location};
use dns_core::name::Name;
use memmap2::MmapRaw;

use super::records::Placed;
use crate::{
    map::{
        index::{Full, Index},
        layout::{is_named, read_name},
        store::{CellAllocator, EntryMemory, StoreFill, cells},
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

/// The store of entries and its index.
pub(crate) struct EntryStore<W = MmapRaw> {
    index: Index<W>,
    memory: Arc<EntryMemory<W>>,
    allocator: CellAllocator,
    /// Entries written since the start.
    written: u64,
}

impl<W: Words> EntryStore<W> {
    pub(crate) fn new(index: Index<W>, memory: Arc<EntryMemory<W>>) -> Self {
        Self { index, allocator: CellAllocator::new(memory.chunks()), memory, written: 0 }
    }

    /// Returns when the programs last answered from an entry, in ns of `CLOCK_MONOTONIC_COARSE`; 0:
    /// never.
    pub(crate) fn last_used_ns(&self, location: Location) -> u64 {
        self.memory.last_used_ns(location)
    }

    /// Returns the name of an entry; `None` if a foreign process has overwritten the store.
    pub(super) fn name(&self, location: Location) -> Option<Name> {
        read_name(&self.memory, location)
    }

    pub(super) fn is_named(&self, location: Location, name: &Name) -> bool {
        is_named(&self.memory, location, name)
    }

    /// Returns whether an entry has these words, apart from the last-used time.
    pub(crate) fn says(&self, location: Location, words: &[u64]) -> bool {
        self.memory.equals_but_last_used(location, words)
    }

    /// Allocates cells for `size` bytes; `None` if no contiguous run is free.
    pub(crate) fn allocate(&mut self, size: usize) -> Option<Location> {
        self.allocator.allocate(size)
    }

    /// Like `allocate`, without touching the reserve.
    pub(super) fn allocate_beside_reserve(&mut self, size: usize) -> Option<Location> {
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
        self.allocator.quarantined_cells() >= cells(size)
    }

    /// Returns the bytes freed by one eviction, at least `size`.
    pub(crate) fn batch(&self, size: usize) -> usize {
        size.max((self.allocator.total_cells() / BATCH_SHARE) as usize * CELL_SIZE)
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
        let Placed { key, location, size } = new;
        if self.memory.prepare(location, size).is_err() {
            self.allocator.free(location, size);
            return Err(Full);
        }
        self.memory.write(location, words);
        if let Err(full) = self.index.set(key, location, old.map(|(location, _)| location)) {
            self.allocator.free(location, size);
            return Err(full);
        }
        self.written += 1;
        if let Some((location, size)) = old {
            self.allocator.free(location, size);
        }
        Ok(())
    }

    /// Removes an entry: program runs that begin later do not find it. Earlier runs may answer from
    /// it until they end; until then its cells are in quarantine.
    pub(crate) fn remove(&mut self, entry: Placed) {
        self.index.remove(entry.key, entry.location);
        self.allocator.free(entry.location, entry.size);
    }

    /// Begins a grace period: cells freed so far become free once it ends. Returns `false` if there
    /// are none, or if one is already running.
    pub(crate) fn begin_grace_period(&mut self) -> bool {
        self.allocator.begin_grace_period()
    }

    pub(crate) fn end_grace_period(&mut self) {
        self.allocator.end_grace_period();
    }

    /// Frees cells whose grace period has ended and begins the next one.
    pub(crate) fn reclaim(&mut self, grace: &mut GracePeriods) {
        if grace.ended() {
            self.end_grace_period();
        }
        if !grace.is_running() && self.begin_grace_period() {
            // If the thread of the grace periods has ended, these cells stay in quarantine.
            grace.begin();
        }
    }

    pub(crate) fn fill(&self) -> StoreFill {
        self.allocator.fill()
    }

    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    /// Returns the number of cells that learned names leave free.
    fn reserve(&self) -> u32 {
        self.allocator.total_cells() / RESERVE_SHARE
    }
}
