//! Failed resolutions, cached for a second (RFC 9520).

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::{flight::FlightKey, flight::FlightResult};

/// Time for which a failure is cached: the minimum of RFC 9520, section 3.2, because the recursors
/// of a machine recover within moments.
const LIFETIME: Duration = Duration::from_secs(1);
/// Maximum number of remembered failures; another one replaces the oldest.
pub(crate) const MAX_FAILURES: usize = 4096;

/// Failed resolutions of one source.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    remembered: Mutex<Remembered>,
    /// Number of failures, readable without the lock.
    count: AtomicUsize,
    /// Number of queries answered with a remembered failure.
    hits: AtomicU64,
}

/// Failures by key and in order of expiry.
#[derive(Debug, Default)]
struct Remembered {
    by_key: HashMap<FlightKey, (Instant, Arc<FlightResult>), foldhash::fast::RandomState>,
    /// Keys with their time of insertion.
    order: VecDeque<(Instant, FlightKey)>,
}

impl Failures {
    /// Returns whether no failure is remembered, without taking the lock.
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Returns the reply that failed less than [`LIFETIME`] ago.
    pub(crate) fn get(&self, key: &FlightKey) -> Option<Arc<FlightResult>> {
        if self.is_empty() {
            return None;
        }
        let remembered = self.remembered.lock();
        let (since, result) = remembered.by_key.get(key)?;
        (since.elapsed() < LIFETIME).then(|| {
            self.hits.fetch_add(1, Ordering::Relaxed);
            Arc::clone(result)
        })
    }

    pub(crate) fn insert(&self, key: FlightKey, result: Arc<FlightResult>) {
        let now = Instant::now();
        let mut remembered = self.remembered.lock();
        while let Some((since, _)) = remembered.order.front()
            && (now.duration_since(*since) >= LIFETIME || remembered.order.len() >= MAX_FAILURES)
        {
            remembered.forget_oldest();
        }
        remembered.order.push_back((now, key.clone()));
        remembered.by_key.insert(key, (now, result));
        self.count.store(remembered.order.len(), Ordering::Relaxed);
    }

    pub(crate) fn flush(&self) {
        *self.remembered.lock() = Remembered::default();
        self.count.store(0, Ordering::Relaxed);
    }

    /// Returns the number of queries answered with a remembered failure since the start.
    pub(crate) fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }
}

impl Remembered {
    /// Removes the oldest failure, unless its key has failed again since.
    fn forget_oldest(&mut self) {
        let Some((since, key)) = self.order.pop_front() else { return };
        if self.by_key.get(&key).is_some_and(|(latest, _)| *latest == since) {
            self.by_key.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_failure_makes_room() {
        let failures = Failures::default();
        let result = Arc::new(FlightResult {
            reply: Vec::new(),
            index: Default::default(),
            failed: true,
            errors: Vec::new(),
        });
        let key = |number: usize| FlightKey::from_slice(&number.to_be_bytes());
        for number in 0..=MAX_FAILURES {
            failures.insert(key(number), Arc::clone(&result));
        }
        assert!(failures.get(&key(0)).is_none());
        assert!(failures.remembered.lock().by_key.len() <= MAX_FAILURES);
        failures.flush();
        assert!(failures.get(&key(MAX_FAILURES)).is_none());
    }
}
