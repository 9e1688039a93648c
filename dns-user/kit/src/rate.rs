//! Limits on how often something may happen.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// Tokens, one for each event, refilled at a steady rate up to a capacity.
#[derive(Debug)]
pub struct TokenBucket {
    per_second: f64,
    capacity: f64,
    /// Tokens at the last event; less than zero while events wait for theirs.
    left: f64,
    /// Time of the last event.
    at: Option<Instant>,
}

impl TokenBucket {
    /// Creates a full bucket.
    pub const fn full(per_second: f64, capacity: f64) -> Self {
        Self {
            per_second,
            capacity,
            left: capacity,
            at: None,
        }
    }

    /// Returns whether a token is left.
    pub fn is_left(&mut self, now: Instant) -> bool {
        self.refill(now);
        self.left >= 1.0
    }

    /// Takes a token; `false` if none is left.
    pub fn take(&mut self, now: Instant) -> bool {
        let is_left = self.is_left(now);
        if is_left {
            self.left -= 1.0;
        }
        is_left
    }

    /// Takes a token in any case; returns how long its event must wait for it.
    pub fn take_ahead(&mut self, now: Instant) -> Duration {
        self.refill(now);
        self.left -= 1.0;
        Duration::from_secs_f64((-self.left).max(0.0) / self.per_second)
    }

    fn refill(&mut self, now: Instant) {
        let passed = self
            .at
            .map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        self.left = (self.left + passed.as_secs_f64() * self.per_second).min(self.capacity);
        // Threads may come in another order than their times.
        self.at = self.at.max(Some(now));
    }
}

/// Counts the events of each second without a lock, for paths that many threads take.
#[derive(Debug, Default)]
pub struct EachSecond {
    /// The second (upper half) and the events in it (lower half).
    counted: AtomicU64,
}

impl EachSecond {
    /// Creates a counter without events.
    pub const fn new() -> Self {
        Self {
            counted: AtomicU64::new(0),
        }
    }

    /// Returns the second of the latest event.
    pub fn latest(&self) -> u32 {
        (self.counted.load(Ordering::Relaxed) >> 32) as u32
    }

    /// Counts an event in a second; returns `false`, and does not count it, after `max` of them.
    pub fn take(&self, max: u32, second: u32) -> bool {
        let second = u64::from(second) << 32;
        let counted = self
            .counted
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |counted| {
                let is_same = counted >> 32 == second >> 32;
                let before = if is_same { counted as u32 } else { 0 };
                (before < max).then_some(second | (u64::from(before) + 1))
            });
        counted.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_refill_up_to_capacity() {
        let start = Instant::now();
        let mut bucket = TokenBucket::full(100.0, 100.0);
        let taken = |bucket: &mut TokenBucket, at| (0..1000).filter(|_| bucket.take(at)).count();
        assert_eq!(taken(&mut bucket, start), 100);
        assert_eq!(taken(&mut bucket, start + Duration::from_millis(105)), 10);
        assert_eq!(taken(&mut bucket, start + Duration::from_secs(60)), 100);
        assert!(
            !bucket.is_left(start),
            "a clock that goes back gives nothing"
        );
        let end = start + Duration::from_secs(60);
        assert!(!bucket.is_left(end), "and nothing when it returns");
    }

    #[test]
    fn events_wait_for_their_tokens() {
        let start = Instant::now();
        let mut bucket = TokenBucket::full(2.0, 1.0);
        let waits = [0, 0, 0, 500, 3000, 3000].map(|millis| {
            let wait = bucket.take_ahead(start + Duration::from_millis(millis));
            wait.as_millis()
        });
        assert_eq!(waits, [0, 500, 1000, 1000, 0, 500]);
    }

    #[test]
    fn each_second_has_its_events() {
        let counter = EachSecond::new();
        let taken = |max, second| (0..10).filter(|_| counter.take(max, second)).count();
        assert_eq!([taken(3, 7), taken(3, 7), taken(3, 8)], [3, 0, 3]);
        assert_eq!([taken(5, 8), taken(0, 9)], [2, 0]);
    }

    #[test]
    fn counted_event_sets_latest_second() {
        let counter = EachSecond::new();
        assert_eq!(counter.latest(), 0);
        assert!(counter.take(1, 7) && !counter.take(1, 7));
        assert_eq!(counter.latest(), 7);
        assert!(!counter.take(0, 8));
        assert_eq!(counter.latest(), 7, "nothing was counted");
        assert!(counter.take(1, u32::MAX));
        assert_eq!(counter.latest(), u32::MAX);
    }
}
