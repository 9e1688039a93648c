//! Which entries are to be moved next to each other, and when to look for them.
//!
//! The kernel maps the store by pages of 4 KiB, and a CPU remembers of only so many pages
//! where they are. Where few of many names are asked for, each lies on a page of its own,
//! and finding that page costs more than reading the entry: observed on Zen 3, with 1,000
//! of 100,000 instances asked for, 3.06 µs of CPU per query where they lie scattered, and
//! 2.66 where they are neighbours. So what is used is compacted now and then.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use dns_common::entry::{CELL_SIZE, CHUNK_CELLS, Location};

use crate::map::store::cells;

/// Cells of a page of memory (4 KiB).
const PAGE_CELLS: u32 = 4096 / CELL_SIZE as u32;

/// As many pages are no burden, however little of them is used.
const EASY_PAGES: usize = 64;

/// More than this share of a chunk is not moved: so much does not fit what a CPU remembers
/// either, and there would hardly be that much room in one place.
const MOST_CELLS: u32 = CHUNK_CELLS / 2;

/// An entry, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    /// Hash of its name.
    pub(crate) key: u64,
    /// Where it lies.
    pub(crate) location: Location,
    /// Its length in bytes.
    pub(crate) size: usize,
}

/// All of these, the entries in use, if they lie on more than twice the pages that they
/// would fill; else none of them. In the order in which they lie.
pub(crate) fn scattered(mut used: Vec<Placed>) -> Vec<Placed> {
    let filled: u32 = used.iter().map(|entry| cells(entry.size)).sum();
    let pages: HashSet<u32> = used.iter().map(|entry| entry.location.0 / PAGE_CELLS).collect();
    let needed = filled.div_ceil(PAGE_CELLS) as usize;
    if pages.len() <= EASY_PAGES.max(2 * needed) || filled > MOST_CELLS {
        return Vec::new();
    }
    used.sort_unstable_by_key(|entry| entry.location.0);
    used
}

/// When to look: a second after new records, then ever more rarely. A look reads
/// when each of all entries was last used: two milliseconds where there are 50,000 (observed).
#[derive(Debug)]
pub(crate) struct Pace {
    /// How long to wait after the next look.
    wait: Duration,
    /// When to look next.
    due: Instant,
}

impl Pace {
    /// Time to the first look.
    const SHORTEST: Duration = Duration::from_secs(1);
    /// Most time between two looks.
    const LONGEST: Duration = Duration::from_secs(64);

    /// There are new records now.
    pub(crate) fn new(now: Instant) -> Self {
        Self { wait: Self::SHORTEST, due: now + Self::SHORTEST }
    }

    /// Whether to look now; if so, the next time is later.
    pub(crate) fn is_due(&mut self, now: Instant) -> bool {
        if now < self.due {
            return false;
        }
        self.wait = (self.wait * 2).min(Self::LONGEST);
        self.due = now + self.wait;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `count` entries of `size` bytes, one every `step` cells.
    fn every(step: u32, count: u32, size: usize) -> Vec<Placed> {
        (0..count)
            .rev()
            .map(|number| Placed { key: number.into(), location: Location(number * step), size })
            .collect()
    }

    #[test]
    fn entries_that_lie_scattered_are_moved_in_their_order() {
        let moved = scattered(every(PAGE_CELLS, 100, 100));
        assert_eq!(moved.len(), 100);
        assert!(moved.is_sorted_by_key(|entry| entry.key));
    }

    #[test]
    fn what_lies_close_enough_stays() {
        assert_eq!(scattered(every(2, 10_000, 100)), [], "side by side");
        assert_eq!(scattered(every(4, 4_000, 100)), [], "on twice the pages that are needed");
        assert_eq!(scattered(every(5, 4_000, 100)).len(), 4_000, "on more");
        assert_eq!(scattered(every(PAGE_CELLS, EASY_PAGES as u32, 100)), [], "on few pages");
        assert_eq!(scattered(Vec::new()), []);
    }

    #[test]
    fn too_much_to_be_remembered_stays() {
        assert_eq!(scattered(every(PAGE_CELLS, MOST_CELLS + 1, CELL_SIZE)), []);
        assert!(!scattered(every(PAGE_CELLS, MOST_CELLS, CELL_SIZE)).is_empty());
    }

    #[test]
    fn looks_become_rare() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        let looks: Vec<u64> =
            (0..300).filter(|&second| pace.is_due(start + Duration::from_secs(second))).collect();
        assert_eq!(looks, [1, 3, 7, 15, 31, 63, 127, 191, 255]);
    }
}
