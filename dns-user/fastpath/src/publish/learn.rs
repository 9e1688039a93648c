//! Filters the names that userspace hands to the publisher after resolving them.
//!
//! A name that userspace keeps answering (over TCP, or on an interface without the fast path) would
//! be handed over on every query. The filter suppresses such repetitions at the source, at the cost
//! of one atomic load.

use std::sync::atomic::{AtomicU64, Ordering};

/// Slots of the filter: 8 bytes each.
const SLOTS: usize = 1 << 13;

/// The keys handed over most recently: a hash table with one key per slot, in which a newer key
/// replaces an older one. A replaced key costs only a superfluous message.
#[derive(Debug)]
pub(crate) struct LearnFilter {
    /// The last key for each value of the lowest bits; 0 is empty, so a name with key 0 is always
    /// handed over.
    slots: Box<[AtomicU64]>,
}

impl LearnFilter {
    pub(crate) fn new() -> Self {
        Self { slots: (0..SLOTS).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Records `key`; `false` if it was recorded already and need not be handed over.
    pub(crate) fn note(&self, key: u64) -> bool {
        let slot = self.slot(key);
        if key != 0 && slot.load(Ordering::Relaxed) == key {
            return false;
        }
        slot.store(key, Ordering::Relaxed);
        true
    }

    /// Permits the next query for the name to be handed over again, because the name is not in the
    /// map.
    pub(crate) fn release(&self, key: u64) {
        // If another key has taken the slot in the meantime, there is nothing to release.
        let _ = self.slot(key).compare_exchange(key, 0, Ordering::Relaxed, Ordering::Relaxed);
    }

    fn slot(&self, key: u64) -> &AtomicU64 {
        // Truncation is intended: the lowest bits choose the slot.
        &self.slots[key as usize % SLOTS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetitions_are_held_back_until_forgotten() {
        let filter = LearnFilter::new();
        assert!(filter.note(5));
        assert!(!filter.note(5));
        filter.release(5);
        assert!(filter.note(5));
        let rival = 5 + SLOTS as u64;
        assert!(filter.note(rival));
        filter.release(5);
        assert!(!filter.note(rival), "releasing a key leaves its rival alone");
        assert!(filter.note(5));
    }

    #[test]
    fn a_key_of_zero_is_never_held_back() {
        let filter = LearnFilter::new();
        assert!(filter.note(0) && filter.note(0));
    }
}
