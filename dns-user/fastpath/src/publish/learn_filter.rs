//! Filters in userspace of what queries hand over to the publisher: names, answers and questions; and a rate
//! limit for what they hand over.

use std::{
    net::IpAddr,
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

use dns_common::forwarded::QueryKey;

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

    /// Permits the next query for the name to be handed over again, because the name is not in the map.
    pub(crate) fn release(&self, key: u64) {
        // If another key has taken the slot in the meantime, there is nothing to release.
        let _ = self.slot(key).compare_exchange(key, 0, Ordering::Relaxed, Ordering::Relaxed);
    }

    fn slot(&self, key: u64) -> &AtomicU64 {
        // Truncation is intended: the lowest bits choose the slot.
        &self.slots[key as usize % SLOTS]
    }
}

/// Returns the key of an answer in the filter, which differs in each generation.
pub(crate) fn filter_key(key: u64, generation: u64) -> u64 {
    key ^ generation.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

//----------- QuestionFilter -------------------------------------------------

/// Longest time between two queries that make a question worth publishing, in seconds.
const REPEATED_WITHIN: u64 = 10;

/// The questions answered by local replies in userspace: each is handed over at its second query within
/// [`REPEATED_WITHIN`], and then not again until it is released or the names change.
#[derive(Debug)]
pub(crate) struct QuestionFilter {
    /// The last question for each value of the lowest bits: the upper bits of its key, and the time of its
    /// first query in the lowest [`TIME_BITS`].
    first: Box<[AtomicU64]>,
    handed_over: LearnFilter,
    /// Number of changes of the names.
    changes: AtomicU64,
}

/// Bits of a time in seconds that a slot of [`QuestionFilter`] keeps.
const TIME_BITS: u32 = 16;

impl Default for QuestionFilter {
    fn default() -> Self {
        Self {
            first: (0..SLOTS).map(|_| AtomicU64::new(0)).collect(),
            handed_over: LearnFilter::new(),
            changes: AtomicU64::new(0),
        }
    }
}

impl QuestionFilter {
    /// Records a query at this time of `CLOCK_MONOTONIC`; returns whether to hand its question over.
    pub(crate) fn is_repeated(&self, key: u64, now_ns: u64) -> bool {
        let now = (now_ns / 1_000_000_000) & ((1 << TIME_BITS) - 1);
        // Truncation is intended: the lowest bits choose the slot.
        let slot = &self.first[key as usize % SLOTS];
        let (upper, seen) = (key >> TIME_BITS << TIME_BITS, slot.load(Ordering::Relaxed));
        let age = now.wrapping_sub(seen) & ((1 << TIME_BITS) - 1);
        if seen >> TIME_BITS << TIME_BITS != upper || age > REPEATED_WITHIN {
            slot.store(upper | now, Ordering::Relaxed);
            return false;
        }
        self.handed_over.note(self.key(key))
    }

    /// Lets a question be handed over again.
    pub(crate) fn release(&self, key: u64) {
        self.handed_over.release(self.key(key));
    }

    /// Lets all questions be handed over again, because the names have changed.
    pub(crate) fn begin(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    fn key(&self, key: u64) -> u64 {
        filter_key(key, self.changes.load(Ordering::Relaxed))
    }
}

//----------- ClientAllowance ------------------------------------------------

/// Denials and questions that the clients of a group may hand over per second.
const EACH_SECOND: u64 = 32;

/// Groups of clients.
const GROUPS: usize = 256;

/// Limits how fast each client hands over denials and questions, of which random names make any number: a
/// client that floods leaves room for other clients' names.
#[derive(Debug)]
pub(crate) struct ClientAllowance {
    /// The number handed over by each group, in the lowest 16 bits, and the second in which it was counted.
    groups: Box<[AtomicU64]>,
}

impl Default for ClientAllowance {
    fn default() -> Self {
        Self { groups: (0..GROUPS).map(|_| AtomicU64::new(0)).collect() }
    }
}

impl ClientAllowance {
    /// Counts a hand-over at this time of `CLOCK_MONOTONIC`; returns whether the client may make it. `seed`
    /// decides which clients share a group; an IPv6 client counts with its /64.
    pub(crate) fn take(&self, client: Option<IpAddr>, seed: u64, now_ns: u64) -> bool {
        let number = match client.map(|client| client.to_canonical()) {
            Some(IpAddr::V4(client)) => client.to_bits().into(),
            // Truncation is intended: the upper half is the network.
            Some(IpAddr::V6(client)) => (client.to_bits() >> 64) as u64,
            None => 0,
        };
        let group = QueryKey::new(0, false, false).hash(number ^ seed) as usize % GROUPS;
        let now = now_ns / 1_000_000_000;
        let count = |seen: u64| {
            let handed_over = if seen >> 16 == now { seen & 0xffff } else { 0 };
            (handed_over < EACH_SECOND).then_some(now << 16 | (handed_over + 1))
        };
        self.groups[group].fetch_update(Ordering::Relaxed, Ordering::Relaxed, count).is_ok()
    }
}

/// A bucket of tokens, refilled at a steady rate; it holds one second's worth.
#[derive(Debug)]
pub(crate) struct Allowance {
    /// Tokens per second, and the bucket's capacity.
    rate: f64,
    left: f64,
    /// The time at which `left` was correct.
    at: Instant,
}

impl Allowance {
    /// Returns a full bucket with `rate` tokens per second, at least 64.
    pub(crate) fn new(rate: usize, now: Instant) -> Self {
        let rate = rate.max(64) as f64;
        Self { rate, left: rate, at: now }
    }

    pub(crate) fn is_left(&mut self, now: Instant) -> bool {
        let gained = now.saturating_duration_since(self.at).as_secs_f64() * self.rate;
        self.left = (self.left + gained).min(self.rate);
        self.at = now;
        self.left >= 1.0
    }

    /// Takes a token; `false` if none is left.
    pub(crate) fn take(&mut self, now: Instant) -> bool {
        let is_left = self.is_left(now);
        if is_left {
            self.left -= 1.0;
        }
        is_left
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn flooding_client_leaves_room_for_others() {
        const SECOND: u64 = 1_000_000_000;
        let allowance = ClientAllowance::default();
        let taken = |client: &str, at: u64| {
            (0..1000).filter(|_| allowance.take(Some(client.parse().unwrap()), 7, at)).count() as u64
        };
        assert_eq!(taken("10.0.0.1", SECOND), EACH_SECOND);
        let others: u64 = (2..10).map(|last| taken(&format!("10.0.0.{last}"), SECOND)).sum();
        assert!(others >= 6 * EACH_SECOND, "{others}");
        assert_eq!(taken("::ffff:10.0.0.1", SECOND), 0, "the same client");
        assert_eq!(taken("10.0.0.1", 2 * SECOND), EACH_SECOND);
        assert_eq!(taken("fd00::1", SECOND), EACH_SECOND);
        assert_eq!(taken("fd00::2", SECOND), 0, "the same network");
    }

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

    #[test]
    fn second_query_hands_question_over() {
        const SECOND: u64 = 1_000_000_000;
        let filter = QuestionFilter::default();
        assert!(!filter.is_repeated(7 << 20, SECOND));
        assert!(filter.is_repeated(7 << 20, 11 * SECOND));
        assert!(!filter.is_repeated(7 << 20, 11 * SECOND), "it was handed over");
        filter.begin();
        assert!(filter.is_repeated(7 << 20, 11 * SECOND), "the names changed");
        filter.release(7 << 20);
        assert!(!filter.is_repeated(7 << 20, 12 * SECOND), "the first query was too long ago");
        assert!(filter.is_repeated(7 << 20, 12 * SECOND));
        assert!(!filter.is_repeated(9 << 20, 12 * SECOND), "another question");
    }

    #[test]
    fn tokens_refill_up_to_capacity() {
        let start = Instant::now();
        let mut allowance = Allowance::new(100, start);
        let taken = |allowance: &mut Allowance, at: Instant| (0..1000).filter(|_| allowance.take(at)).count();
        assert_eq!(taken(&mut allowance, start), 100);
        assert_eq!(taken(&mut allowance, start + Duration::from_millis(105)), 10);
        assert_eq!(taken(&mut allowance, start + Duration::from_secs(60)), 100);
        assert!(!allowance.is_left(start), "a clock that goes back gives nothing");
    }
}
