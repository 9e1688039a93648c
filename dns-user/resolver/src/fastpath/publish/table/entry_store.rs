//! Entries in memory, and the index that leads to them: written, moved and given back
//! such that a program which reads meanwhile finds the old entry or the new one, whole.

use std::sync::Arc;

use dns_common::entry::{CELL_SIZE, Location};

use crate::fastpath::{
    map::index::{Full, Index},
    map::store::{CellAllocator, EntryMemory, StoreFill, cells},
    publish::compaction::Placed,
    publish::grace::GracePeriods,
};

/// One of so many cells is kept for listed names and for entries that change: names
/// that are merely asked for never take the last room from a new records.json.
const RESERVE_SHARE: u32 = 8;

/// One of so many cells is evicted at a time when the store is full, so that one
/// grace period serves many names.
const BATCH_SHARE: u32 = 64;

/// The store of entries and the index.
pub(crate) struct EntryStore {
    /// Where the program finds entries.
    index: Index,
    /// Where entries are written.
    memory: Arc<EntryMemory>,
    /// Which cells are free.
    allocator: CellAllocator,
    /// When cells that were given back become free.
    grace: GracePeriods,
    /// Entries written since the start.
    written: u64,
}

impl EntryStore {
    /// An empty store under an empty index.
    pub(crate) fn new(index: Index, memory: Arc<EntryMemory>, grace: GracePeriods) -> Self {
        Self { index, allocator: CellAllocator::new(memory.chunks()), memory, grace, written: 0 }
    }

    /// When the program last answered from an entry: ns of `CLOCK_MONOTONIC_COARSE`, 0: never.
    pub(super) fn last_used_ns(&self, location: Location) -> u64 {
        self.memory.last_used_ns(location)
    }

    /// Whether an entry says what these words say; when it was last used does not count.
    pub(super) fn says(&self, location: Location, words: &[u64]) -> bool {
        self.memory.equals_but_last_used(location, words)
    }

    /// Cells for so many bytes; `None`: there are none in one place.
    pub(super) fn allocate(&mut self, size: usize) -> Option<Location> {
        self.allocator.allocate(size)
    }

    /// The same, if the reserve is not touched by it.
    pub(super) fn allocate_beside_reserve(&mut self, size: usize) -> Option<Location> {
        if self.allocator.free_cells() < cells(size) + self.reserve() {
            return None;
        }
        self.allocator.allocate(size)
    }

    /// Whether cells are free beside the reserve.
    pub(super) fn has_room(&self) -> bool {
        self.allocator.free_cells() > self.reserve()
    }

    /// Whether as many bytes are on their way to being free.
    pub(super) fn will_have(&self, size: usize) -> bool {
        self.allocator.quarantined_cells() >= cells(size)
    }

    /// Bytes that one eviction makes room for, and at least `size`.
    pub(super) fn batch(&self, size: usize) -> usize {
        size.max((self.allocator.total_cells() / BATCH_SHARE) as usize * CELL_SIZE)
    }

    /// Writes an entry to cells that were allocated for it, in place of an older one, and makes
    /// the index lead to it. Where the index is full, the cells go back.
    pub(super) fn write(
        &mut self,
        new: Placed,
        words: &[u64],
        old: Option<(Location, usize)>,
    ) -> Result<(), Full> {
        let Placed { key, location, size } = new;
        self.memory.write(location, words);
        if let Err(full) = self.index.set(key, location, old.map(|(location, _)| location)) {
            self.quarantine(location, size);
            return Err(full);
        }
        self.written += 1;
        if let Some((location, size)) = old {
            self.quarantine(location, size);
        }
        Ok(())
    }

    /// Moves an entry to other cells, allocated for it. The answer stays the same all the
    /// while: until the index leads to the new one, the old one lives. Should the program
    /// answer from it once more meanwhile, that use is not counted.
    pub(super) fn relocate(&mut self, old: Placed, new: Location) -> Result<(), Full> {
        let Placed { key, location, size } = old;
        let words = self.memory.read(location, size.div_ceil(8)).expect("entries lie inside the store");
        self.write(Placed { key, location: new, size }, &words, Some((location, size)))
    }

    /// Takes an entry out.
    pub(super) fn remove(&mut self, entry: Placed) {
        self.index.remove(entry.key, entry.location);
        self.quarantine(entry.location, entry.size);
    }

    /// Makes cells free whose grace period is over, and begins the next one. To be
    /// called often; never waits.
    pub(super) fn reclaim(&mut self) {
        if self.grace.ended() {
            self.allocator.end_grace_period();
        }
        if !self.grace.is_running() && self.allocator.begin_grace_period() {
            // If the thread of the grace periods has ended, these cells stay as they are.
            self.grace.begin();
        }
    }

    /// Whether cells become free soon.
    pub(super) fn is_reclaiming(&self) -> bool {
        self.grace.is_running()
    }

    /// Waits until all cells that were given back are free: a grace period or two.
    pub(super) fn reclaim_now(&mut self) {
        for _ in 0..2 {
            self.reclaim();
            if self.grace.wait() {
                self.allocator.end_grace_period();
            }
        }
    }

    /// How full the store is.
    pub(super) fn fill(&self) -> StoreFill {
        self.allocator.fill()
    }

    /// Entries written since the start.
    pub(super) fn written(&self) -> u64 {
        self.written
    }

    /// Whether the kernel tells when programs have finished with a replaced entry.
    pub(super) fn vouched(&self) -> bool {
        self.grace.vouched()
    }

    /// Cells that names which are merely asked for leave free.
    fn reserve(&self) -> u32 {
        self.allocator.total_cells() / RESERVE_SHARE
    }

    /// Gives cells back that programs may still be reading, but none that begins now.
    fn quarantine(&mut self, location: Location, size: usize) {
        self.memory.write_tombstone(location);
        self.allocator.free(location, size);
    }
}
