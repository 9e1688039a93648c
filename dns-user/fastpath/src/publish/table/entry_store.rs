//! Entries in memory, and the index that leads to them: written, moved and given back
//! such that a program which reads meanwhile finds the old entry or the new one, whole.

use std::sync::Arc;

use dns_common::entry::{CELL_SIZE, Location};
use dns_core::name::Name;
use memmap2::MmapRaw;

use super::records::Placed;
use crate::map::{
    index::{Full, Index},
    layout::{is_named, read_name},
    store::{CellAllocator, EntryMemory, StoreFill, cells},
    words::Words,
};

/// One of so many cells is kept for listed names and for entries that change: names
/// that are merely asked for never take the last room from a new records.json.
const RESERVE_SHARE: u32 = 8;

/// One of so many cells is evicted at a time when the store is full, so that one
/// grace period serves many names.
const BATCH_SHARE: u32 = 64;

/// The store of entries and the index.
pub(crate) struct EntryStore<W = MmapRaw> {
    /// Where the program finds entries.
    index: Index<W>,
    /// Where entries are written.
    memory: Arc<EntryMemory<W>>,
    /// Which cells are free.
    allocator: CellAllocator,
    /// Entries written since the start.
    written: u64,
}

impl<W: Words> EntryStore<W> {
    /// An empty store under an empty index.
    pub(crate) fn new(index: Index<W>, memory: Arc<EntryMemory<W>>) -> Self {
        Self { index, allocator: CellAllocator::new(memory.chunks()), memory, written: 0 }
    }

    /// When the program last answered from an entry: ns of `CLOCK_MONOTONIC_COARSE`, 0: never.
    pub(super) fn last_used_ns(&self, location: Location) -> u64 {
        self.memory.last_used_ns(location)
    }

    /// The name of an entry; `None`: somebody else has written to the store.
    pub(super) fn name(&self, location: Location) -> Option<Name> {
        read_name(&self.memory, location)
    }

    /// Whether an entry is that of this name.
    pub(super) fn is_named(&self, location: Location, name: &Name) -> bool {
        is_named(&self.memory, location, name)
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

    /// Writes an entry to cells that were allocated for it and makes the index lead to it, in place
    /// of an older one, which stays whole for program runs that have found it until the grace period
    /// is over. Where the index is full, the cells go back.
    pub(super) fn write(
        &mut self,
        new: Placed,
        words: &[u64],
        old: Option<(Location, usize)>,
    ) -> Result<(), Full> {
        let Placed { key, location, size } = new;
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

    /// Takes an entry out: no program run that begins from now on finds it. Those that began
    /// before may answer from it until they end; its cells are in quarantine meanwhile.
    pub(super) fn remove(&mut self, entry: Placed) {
        self.index.remove(entry.key, entry.location);
        self.allocator.free(entry.location, entry.size);
    }

    /// A grace period begins now: cells that were given back so far are free when it is
    /// over. `false`: none were, or one is running already.
    pub(super) fn begin_grace_period(&mut self) -> bool {
        self.allocator.begin_grace_period()
    }

    /// The grace period that began last is over.
    pub(super) fn end_grace_period(&mut self) {
        self.allocator.end_grace_period();
    }

    /// How full the store is.
    pub(super) fn fill(&self) -> StoreFill {
        self.allocator.fill()
    }

    /// Entries written since the start.
    pub(super) fn written(&self) -> u64 {
        self.written
    }

    /// Cells that names which are merely asked for leave free.
    fn reserve(&self) -> u32 {
        self.allocator.total_cells() / RESERVE_SHARE
    }
}
