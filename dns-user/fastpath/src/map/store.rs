//! The store of entries: an allocator of cells, and the memory itself.
//!
//! The allocator is pure bookkeeping. Freed cells stay in *quarantine* until the caller reports
//! that no program run can still read them.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    ops::Range,
    os::fd::{AsRawFd as _, BorrowedFd, OwnedFd},
    ptr,
    sync::atomic::{AtomicBool, Ordering},
};

use dns_common::entry::{CELL_SIZE, CHUNK_CELLS, CHUNK_SIZE, Location};
use memmap2::{MmapMut, MmapRaw};

use super::{Shape, map_shared, words::Words};

/// A run of cells, numbered across all chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Run {
    /// Number of cells. The first field, so that runs sort by length.
    length: u32,
    /// Number of the first cell.
    start: u32,
}

/// Allocates runs of cells by best fit and merges freed neighbours. An entry never crosses the
/// boundary of a chunk.
#[derive(Debug, Default)]
pub(crate) struct CellAllocator {
    /// Free runs by length, then position, for best fit.
    by_length: BTreeSet<Run>,
    /// The same runs, length by start, to find neighbours.
    by_start: BTreeMap<u32, u32>,
    /// Runs freed since the last grace period began; programs may still read them.
    quarantine: Vec<Run>,
    /// Runs freed before the current grace period began; free once it ends.
    waiting: Vec<Run>,
    pub(crate) total: u32,
    /// Cells in use, without quarantine.
    used: u32,
    pub(crate) quarantined: u32,
}

impl CellAllocator {
    pub(crate) fn new(chunks: u32) -> Self {
        let total = chunks
            .checked_mul(CHUNK_CELLS)
            .expect("the loader bounds the store far below 2^32 cells");
        let mut allocator = Self {
            total,
            ..Self::default()
        };
        for chunk in 0..chunks {
            allocator.insert_free(Run {
                start: chunk * CHUNK_CELLS,
                length: CHUNK_CELLS,
            });
        }
        allocator
    }

    /// Allocates an entry of `size` bytes; `None` if no run is long enough, which may change after
    /// [`Self::end_grace_period`].
    pub(crate) fn allocate(&mut self, size: usize) -> Option<Location> {
        let length = cells(size);
        // The shortest run that is long enough; of equal ones the first, so that the store fills
        // from its start, in few windows.
        let found = *self.by_length.range(Run { length, start: 0 }..).next()?;
        self.remove_free(found);
        if found.length > length {
            self.insert_free(Run {
                start: found.start + length,
                length: found.length - length,
            });
        }
        self.used += length;
        Some(Location(found.start))
    }

    /// Moves the cells of an entry of `size` bytes to quarantine.
    pub(crate) fn free(&mut self, location: Location, size: usize) {
        let run = Run {
            start: location.0,
            length: cells(size),
        };
        self.used -= run.length;
        self.quarantined += run.length;
        self.quarantine.push(run);
    }

    /// Begins a grace period: cells freed so far become free once it ends. Returns `false` if no
    /// cells wait for one, or if one is already running.
    pub(crate) fn begin_grace_period(&mut self) -> bool {
        if self.quarantine.is_empty() || !self.waiting.is_empty() {
            return false;
        }
        // Kept apart: what is freed from now on may be read by runs that began before this, and
        // needs the next one.
        self.waiting = std::mem::take(&mut self.quarantine);
        true
    }

    pub(crate) fn end_grace_period(&mut self) {
        for run in std::mem::take(&mut self.waiting) {
            self.quarantined -= run.length;
            self.join_free(run);
        }
    }

    pub(crate) fn free_cells(&self) -> u32 {
        self.total - self.used - self.quarantined
    }

    /// Returns the number of bytes in total, in use and in quarantine.
    pub(crate) fn fill(&self) -> StoreFill {
        StoreFill {
            total: self.total as usize * CELL_SIZE,
            used: self.used as usize * CELL_SIZE,
            quarantined: self.quarantined as usize * CELL_SIZE,
        }
    }

    /// Adds a free run, joined with its free neighbours in the same chunk.
    fn join_free(&mut self, mut run: Run) {
        // Two chunks are two elements of the array: no entry may cross their boundary.
        let chunk = run.start / CHUNK_CELLS;
        if let Some((&start, &length)) = self.by_start.range(..run.start).next_back()
            && start + length == run.start
            && start / CHUNK_CELLS == chunk
        {
            self.remove_free(Run { start, length });
            run = Run {
                start,
                length: length + run.length,
            };
        }
        let end = run.start + run.length;
        if let Some(&length) = self.by_start.get(&end)
            && end / CHUNK_CELLS == chunk
        {
            self.remove_free(Run { start: end, length });
            run.length += length;
        }
        self.insert_free(run);
    }

    /// Adds a run to both collections.
    fn insert_free(&mut self, run: Run) {
        self.by_start.insert(run.start, run.length);
        self.by_length.insert(run);
    }

    /// Removes a run from both collections.
    fn remove_free(&mut self, run: Run) {
        self.by_start.remove(&run.start);
        self.by_length.remove(&run);
    }
}

/// Usage of the store in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct StoreFill {
    /// Size of the whole store in bytes.
    pub total: usize,
    /// Bytes that hold published entries.
    pub used: usize,
    /// Bytes freed that programs may still read.
    pub quarantined: usize,
}

pub(crate) fn cells(size: usize) -> u32 {
    u32::try_from(size.div_ceil(CELL_SIZE).max(1)).expect("an entry is smaller than a chunk")
}

/// The bytes of the store, mapped from the BPF array (in tests, anonymous memory).
///
/// The programs read the same bytes, and write the `last_used_ns` word of an entry.
#[derive(Debug)]
pub(crate) struct EntryMemory<W = MmapRaw> {
    words: W,
    /// `None` if everything is mapped.
    windows: Option<Windows>,
}

/// The parts of the store, each mapped when the first entry is written to it: the kernel counts all of a mapped
/// array as resident, also what was never touched. The rest reads as zeros.
#[derive(Debug)]
struct Windows {
    map: OwnedFd,
    /// Address and size of the memory that they are parts of.
    base: usize,
    size: usize,
    are_mapped: Box<[AtomicBool]>,
}

/// Size of a window in bytes, of whole pages of any size.
pub(crate) const WINDOW: usize = 256 << 10;

impl Windows {
    /// Maps the windows that hold these bytes of the store, unless they are mapped.
    fn map(&self, bytes: Range<usize>) -> io::Result<()> {
        for window in bytes.start / WINDOW..bytes.end.div_ceil(WINDOW) {
            if self.are_mapped[window].load(Ordering::Relaxed) {
                continue;
            }
            let start = window * WINDOW;
            // The store is no multiple of a window.
            let length = WINDOW.min(self.size - start);
            let offset = libc::off_t::try_from(start).map_err(io::Error::other)?;
            let access = (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED,
            );
            // SAFETY: replaces pages inside the anonymous mapping that `EntryMemory` owns and unmaps as a whole. They
            // were never written to, so a concurrent reader finds zeros or what the array holds.
            let mapped = unsafe {
                let address = ptr::with_exposed_provenance_mut(self.base + start);
                libc::mmap(
                    address,
                    length,
                    access.0,
                    access.1,
                    self.map.as_raw_fd(),
                    offset,
                )
            };
            if mapped == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            self.are_mapped[window].store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl<W: Words> EntryMemory<W> {
    /// Creates a store in memory of whole chunks.
    pub(crate) fn new(words: W) -> Self {
        assert!(
            words.bytes().is_multiple_of(CHUNK_SIZE),
            "the store is made of whole chunks"
        );
        Self {
            words,
            windows: None,
        }
    }

    pub(crate) fn chunks(&self) -> u32 {
        u32::try_from(self.words.bytes() / CHUNK_SIZE).expect("the loader bounds the store")
    }

    /// Maps the part of the store into which an entry of `size` bytes will be written.
    pub(crate) fn prepare(&self, location: Location, size: usize) -> io::Result<()> {
        let Some(windows) = &self.windows else {
            return Ok(());
        };
        let start = location.chunk() as usize * CHUNK_SIZE + location.offset() as usize;
        windows.map(start..(start + size).min(self.words.bytes()))
    }

    /// Writes an entry's words to allocated cells, to which the index does not point yet, so no
    /// program reads them.
    pub(crate) fn write(&self, location: Location, entry: &[u64]) {
        let start = self
            .start(location, entry.len())
            .expect("the allocator hands out cells inside the store");
        for (index, &word) in entry.iter().enumerate() {
            // Relaxed: the index's store, with release, publishes these words.
            self.words.store(start + index, word, Ordering::Relaxed);
        }
    }

    /// Reads `count` words of an entry; `None` if they are not all inside the store.
    ///
    /// While the publisher rewrites cells, the words may come from two entries, so other threads
    /// must compare the name.
    pub(crate) fn read(&self, location: Location, count: usize) -> Option<Vec<u64>> {
        let mut words = vec![0; count];
        self.read_to(location, &mut words)?;
        Some(words)
    }

    /// Reads as many words as `words` holds.
    pub(crate) fn read_to(&self, location: Location, words: &mut [u64]) -> Option<()> {
        let start = self.start(location, words.len())?;
        for (index, word) in words.iter_mut().enumerate() {
            *word = self.words.load(start + index, Ordering::Relaxed);
        }
        Some(())
    }

    /// Returns whether the words at `location` are these, apart from the first one (the last-used time).
    pub(crate) fn equals_but_last_used(&self, location: Location, words: &[u64]) -> bool {
        let Some(start) = self.start(location, words.len()) else {
            return false;
        };
        (1..words.len())
            .all(|index| self.words.load(start + index, Ordering::Relaxed) == words[index])
    }

    pub(crate) fn last_used_ns(&self, location: Location) -> u64 {
        // Outside of the store there is no entry, and so no use.
        self.start(location, 1)
            .map_or(0, |start| self.words.load(start, Ordering::Relaxed))
    }

    /// Returns the index of the first of `count` words at `location`, if all lie inside the memory.
    fn start(&self, location: Location, count: usize) -> Option<usize> {
        let start = (location.chunk() as usize * CHUNK_SIZE + location.offset() as usize) / 8;
        (start.checked_add(count)? <= self.words.bytes() / 8).then_some(start)
    }
}

/// Maps the store, which has one chunk per element of the map.
pub(crate) fn map_entries(map: BorrowedFd<'_>, shape: Shape) -> io::Result<EntryMemory> {
    Ok(EntryMemory::new(map_shared(map, bytes(shape)?)?))
}

/// Like [`map_entries`], for an empty store: maps only what [`EntryMemory::prepare`] asks for.
pub(crate) fn map_new_entries(map: BorrowedFd<'_>, shape: Shape) -> io::Result<EntryMemory> {
    let size = bytes(shape)?;
    let are_mapped = (0..size.div_ceil(WINDOW))
        .map(|_| AtomicBool::new(false))
        .collect();
    let memory = MmapRaw::from(MmapMut::map_anon(size)?);
    let base = memory.as_mut_ptr().expose_provenance();
    let windows = Windows {
        map: map.try_clone_to_owned()?,
        base,
        size,
        are_mapped,
    };
    Ok(EntryMemory {
        windows: Some(windows),
        ..EntryMemory::new(memory)
    })
}

fn bytes(
    Shape {
        value_size,
        elements: chunks,
    }: Shape,
) -> io::Result<usize> {
    if value_size as usize != CHUNK_SIZE {
        return Err(io::Error::other(format!(
            "the store's chunks have {value_size} bytes, not {CHUNK_SIZE}"
        )));
    }
    Ok(chunks as usize * CHUNK_SIZE)
}

#[cfg(test)]
mod tests {
    use dns_common::entry::MAX_ENTRY_SIZE;
    use proptest::prelude::*;

    use super::*;

    const USABLE: usize = CHUNK_CELLS as usize * CELL_SIZE;

    #[test]
    fn entries_never_cross_chunks() {
        let mut allocator = CellAllocator::new(2);
        let almost = USABLE - CELL_SIZE;
        let first = allocator.allocate(almost).unwrap();
        let second = allocator.allocate(almost).unwrap();
        assert_ne!(first.chunk(), second.chunk());
        assert_eq!(
            allocator.allocate(2 * CELL_SIZE),
            None,
            "one cell is left in each chunk"
        );
        assert!(allocator.allocate(CELL_SIZE).is_some());
    }

    #[test]
    fn behind_every_beginning_is_room_for_the_longest_entry() {
        let mut allocator = CellAllocator::new(1);
        let last = std::iter::from_fn(|| allocator.allocate(CELL_SIZE))
            .last()
            .unwrap();
        assert!(last.offset() as usize + MAX_ENTRY_SIZE <= CHUNK_SIZE);
    }

    #[test]
    fn freed_chunks_stay_separate() {
        let mut allocator = CellAllocator::new(2);
        let runs: Vec<_> = (0..2)
            .map(|_| allocator.allocate(USABLE).unwrap())
            .collect();
        for run in runs {
            allocator.free(run, USABLE);
        }
        release(&mut allocator);
        assert_eq!(allocator.allocate(USABLE + CELL_SIZE), None);
        assert!(allocator.allocate(USABLE).is_some() && allocator.allocate(USABLE).is_some());
    }

    #[test]
    fn quarantined_cells_are_not_handed_out() {
        let mut allocator = CellAllocator::new(1);
        let all = allocator.allocate(USABLE).unwrap();
        allocator.free(all, USABLE);
        assert_eq!(allocator.allocate(1), None);
        assert_eq!(
            allocator.fill(),
            StoreFill {
                total: USABLE,
                used: 0,
                quarantined: USABLE
            }
        );
        release(&mut allocator);
        assert_eq!(allocator.allocate(USABLE), Some(all));
    }

    #[test]
    fn grace_period_frees_earlier_cells() {
        let mut allocator = CellAllocator::new(1);
        let first = allocator.allocate(USABLE / 2).unwrap();
        let second = allocator.allocate(CELL_SIZE).unwrap();
        assert!(!allocator.begin_grace_period(), "nothing was given back");
        allocator.free(first, USABLE / 2);
        assert!(allocator.begin_grace_period());
        allocator.free(second, CELL_SIZE);
        assert!(!allocator.begin_grace_period(), "one is running");
        allocator.end_grace_period();
        assert_eq!(
            allocator.quarantined, 1,
            "what came later waits for the next one"
        );
        release(&mut allocator);
        assert_eq!(allocator.free_cells(), CHUNK_CELLS);
    }

    /// Runs a whole grace period.
    fn release(allocator: &mut CellAllocator) {
        assert!(allocator.begin_grace_period());
        allocator.end_grace_period();
    }

    #[test]
    fn the_best_fit_is_taken() {
        let mut allocator = CellAllocator::new(1);
        let runs: Vec<_> = [3, 1, 2, 1]
            .map(|cells| allocator.allocate(cells * CELL_SIZE).unwrap())
            .into();
        allocator.free(runs[0], 3 * CELL_SIZE);
        allocator.free(runs[2], 2 * CELL_SIZE);
        release(&mut allocator);
        assert_eq!(
            allocator.allocate(2 * CELL_SIZE),
            Some(runs[2]),
            "not a part of the larger hole"
        );
    }

    #[test]
    fn memory_refuses_places_outside() {
        let memory = memory(1);
        assert_eq!(memory.read(Location(CHUNK_CELLS), 1), None);
        assert_eq!(
            memory.read(
                Location(CHUNK_CELLS - 1),
                (CELL_SIZE + 2 * MAX_ENTRY_SIZE) / 8 + 1
            ),
            None
        );
        assert_eq!(memory.last_used_ns(Location(7 * CHUNK_CELLS)), 0);
    }

    #[test]
    fn the_last_use_is_left_out_of_comparisons() {
        let memory = memory(1);
        let place = Location(1);
        memory.write(place, &[7, 1, 2]);
        assert!(memory.equals_but_last_used(place, &[0, 1, 2]));
        assert!(!memory.equals_but_last_used(place, &[7, 1, 3]));
        assert_eq!(memory.last_used_ns(place), 7);
    }

    /// Returns anonymous memory of `chunks` chunks.
    fn memory(chunks: usize) -> EntryMemory {
        EntryMemory::new(MmapMut::map_anon(chunks * CHUNK_SIZE).unwrap().into())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// After any sequence of steps no two live runs overlap, none overlaps the quarantine, and
        /// in the end all cells are free.
        #[test]
        fn live_runs_never_overlap(steps in prop::collection::vec((0_u8..8, 1_usize..9000), 1..400)) {
            let mut allocator = CellAllocator::new(2);
            let mut live: Vec<(Location, usize)> = Vec::new();
            let mut waiting: Vec<(Location, usize)> = Vec::new();
            for (action, size) in steps {
                match action {
                    0..=4 => if let Some(place) = allocator.allocate(size) { live.push((place, size)) },
                    5..=6 if !live.is_empty() => {
                        let (place, size) = live.swap_remove(size % live.len());
                        allocator.free(place, size);
                        waiting.push((place, size));
                    }
                    7 if allocator.begin_grace_period() => { allocator.end_grace_period(); waiting.clear(); }
                    _ => {}
                }
                let mut spans: Vec<(u32, u32)> = live.iter().chain(&waiting)
                    .map(|&(place, size)| (place.0, place.0 + cells(size))).collect();
                spans.sort_unstable();
                prop_assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0));
                let inside = spans.iter().all(|&(start, end)| {
                    start / CHUNK_CELLS == (end - 1) / CHUNK_CELLS && end <= 2 * CHUNK_CELLS
                });
                prop_assert!(inside);
            }
            for (place, size) in live.drain(..) { allocator.free(place, size) }
            allocator.begin_grace_period();
            allocator.end_grace_period();
            prop_assert_eq!(allocator.fill().used, 0);
            prop_assert!(allocator.allocate(USABLE).is_some() && allocator.allocate(USABLE).is_some());
        }
    }
}
