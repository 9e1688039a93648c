//! Names that were asked for in userspace, on their way to the publisher.
//!
//! A name that userspace goes on answering (over TCP, or on an interface
//! without the fast path) would be handed over at every query. The filter holds
//! such repetitions back where they arise, at the price of one atomic load.

use std::sync::atomic::{AtomicU64, Ordering};

/// Slots of the filter: 8 bytes each.
const SLOTS: usize = 1 << 13;

/// Remembers which keys were handed over last: a hash table of one entry a
/// slot, where a newer key pushes out an older one. Forgetting costs only a
/// superfluous message.
#[derive(Debug)]
pub(crate) struct LearnFilter {
    /// The key that was handed over last, by its lowest bits. 0: none; a name
    /// whose key is 0 is handed over every time.
    slots: Box<[AtomicU64]>,
}

impl LearnFilter {
    /// An empty filter.
    pub(crate) fn new() -> Self {
        Self { slots: (0..SLOTS).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Notes `key`; `false`: it was noted already, and there is nothing to hand over.
    pub(crate) fn note(&self, key: u64) -> bool {
        let slot = self.slot(key);
        if key != 0 && slot.load(Ordering::Relaxed) == key {
            return false;
        }
        slot.store(key, Ordering::Relaxed);
        true
    }

    /// The name is not in the map (any more): its next query is to be handed over again.
    pub(crate) fn release(&self, key: u64) {
        // Nothing is lost when another key has taken the slot meanwhile.
        let _ = self.slot(key).compare_exchange(key, 0, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The slot of a key.
    fn slot(&self, key: u64) -> &AtomicU64 {
        // Truncation is the point: the lowest bits choose the slot.
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
