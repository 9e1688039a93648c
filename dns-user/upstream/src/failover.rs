//! The order in which recursors are tried. Performs no I/O.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use dns_core::config::RecursorSelection;

/// Number of recent tries that count.
const HISTORY: u32 = 25;
/// Number of failures in the history from which the next recursor is preferred.
const MAX_FAILURES: u32 = 5;

/// Order of a fixed number of recursors, determined by the results of their tries.
#[derive(Debug)]
pub(crate) struct RecursorOrder {
    /// Configured way of ordering.
    mode: RecursorSelection,
    /// Index of the recursor to try first.
    preferred: AtomicUsize,
    histories: Box<[History]>,
}

/// Recent tries of one recursor: one bit per try, set if it failed, the latest in the lowest bit.
#[derive(Debug, Default)]
struct History {
    /// Tries since the recursor was last preferred, which decide whether it stays preferred.
    turn: AtomicU32,
    /// All tries, for operators.
    all: AtomicU32,
}

impl History {
    /// Records a try; returns the number of failures since the recursor was last preferred.
    fn record(&self, failed: bool) -> u32 {
        let Self { turn, all } = self;
        let add = |history: &AtomicU32| {
            let before = history.load(Ordering::Relaxed);
            if before == 0 && !failed {
                // The common case: nothing to write.
                return 0;
            }
            // Two tries that end at the same time may count as one, which is harmless.
            let after = (before << 1 | u32::from(failed)) & ((1 << HISTORY) - 1);
            history.store(after, Ordering::Relaxed);
            after.count_ones()
        };
        add(all);
        add(turn)
    }
}

impl RecursorOrder {
    /// Creates the order of `count` recursors; the first is preferred.
    pub(crate) fn new(mode: RecursorSelection, count: usize) -> Self {
        let histories = (0..count).map(|_| History::default()).collect();
        Self { mode, preferred: AtomicUsize::new(0), histories }
    }

    /// Returns indexes in the order in which they are tried.
    pub(crate) fn order(&self) -> impl Iterator<Item = usize> + use<> {
        let count = self.histories.len();
        let first = self.preferred();
        (first..count).chain(0..first)
    }

    /// Returns the index of the recursor to try first.
    pub(crate) fn preferred(&self) -> usize {
        self.preferred.load(Ordering::Relaxed)
    }

    /// Returns the number of failures among a recursor's last 25 tries.
    pub(crate) fn recent_failures(&self, index: usize) -> u32 {
        self.histories.get(index).map_or(0, |history| history.all.load(Ordering::Relaxed).count_ones())
    }

    /// Records the result of a try.
    pub(crate) fn record(&self, index: usize, failed: bool) {
        let Some(history) = self.histories.get(index) else { return };
        let failures = history.record(failed);
        if self.mode == RecursorSelection::Smart && failures >= MAX_FAILURES && failed {
            let next = (index + 1) % self.histories.len();
            let moved =
                self.preferred.compare_exchange(index, next, Ordering::Relaxed, Ordering::Relaxed).is_ok();
            if moved {
                // The recursor starts without failures when it is preferred again.
                history.turn.store(0, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns indexes in the order in which they are tried.
    fn order(recursors: &RecursorOrder) -> Vec<usize> {
        recursors.order().collect()
    }

    #[test]
    fn five_failures_move_preference() {
        let recursors = RecursorOrder::new(RecursorSelection::Smart, 3);
        for _ in 0..4 {
            recursors.record(0, true);
            recursors.record(0, false);
        }
        assert_eq!(order(&recursors), [0, 1, 2]);
        recursors.record(0, true);
        assert_eq!(order(&recursors), [1, 2, 0]);
        assert_eq!(recursors.recent_failures(0), 5, "operators still see the failures");
    }

    #[test]
    fn failures_expire_after_25_tries() {
        let recursors = RecursorOrder::new(RecursorSelection::Smart, 2);
        for _ in 0..10 {
            recursors.record(0, true);
            (0..6).for_each(|_| recursors.record(0, false));
        }
        assert_eq!(order(&recursors), [0, 1]);
    }

    #[test]
    fn unpreferred_failures_keep_preference() {
        let recursors = RecursorOrder::new(RecursorSelection::Smart, 2);
        (0..20).for_each(|_| recursors.record(1, true));
        assert_eq!(order(&recursors), [0, 1]);
    }

    #[test]
    fn serial_stays() {
        let recursors = RecursorOrder::new(RecursorSelection::Serial, 2);
        (0..20).for_each(|_| recursors.record(0, true));
        assert_eq!(order(&recursors), [0, 1]);
        assert_eq!(recursors.recent_failures(0), 20);
    }

    #[test]
    fn a_single_recursor_stays_preferred() {
        let recursors = RecursorOrder::new(RecursorSelection::Smart, 1);
        (0..20).for_each(|_| recursors.record(0, true));
        assert_eq!(order(&recursors), [0]);
    }
}
