//! Eviction: by second chance, so that a record used since its last inspection is spared once, and at a bounded rate.

use std::{collections::VecDeque, time::Instant};

/// An entry in a queue of evictable records.
#[derive(Debug)]
struct Turn {
    key: u64,
    /// The record's ticket, if this entry is valid.
    ticket: u64,
    /// The record's last use when it was queued, or last spared.
    spared_at_ns: u64,
}

/// Records in the order of their eviction. A record has the ticket of its valid entry; entries with
/// other tickets are void.
#[derive(Debug, Default)]
pub(super) struct SecondChance {
    turns: VecDeque<Turn>,
    ticket: u64,
}

impl SecondChance {
    /// Queues a record as the last of `count` to be evicted, and returns its ticket. `holds` returns
    /// whether the record with a key has this ticket.
    pub(super) fn queue(
        &mut self,
        key: u64,
        last_used_ns: u64,
        count: usize,
        holds: impl Fn(u64, u64) -> bool,
    ) -> u64 {
        if self.turns.len() > 2 * count + 64 {
            // Drops entries of records removed for other reasons.
            self.turns.retain(|turn| holds(turn.key, turn.ticket));
        }
        self.ticket += 1;
        self.turns.push_back(Turn {
            key,
            ticket: self.ticket,
            spared_at_ns: last_used_ns,
        });
        self.ticket
    }

    /// Takes the key of the next of `count` records to evict; `None` if there is none.
    /// `last_used_ns` returns the last use of the record with a key and this ticket.
    pub(super) fn next(
        &mut self,
        count: usize,
        last_used_ns: impl Fn(u64, u64) -> Option<u64>,
    ) -> Option<u64> {
        let mut spared = 0;
        while let Some(turn) = self.turns.pop_front() {
            let Some(last_used) = last_used_ns(turn.key, turn.ticket) else {
                continue;
            };
            // After a whole round every record has had its second chance.
            if last_used <= turn.spared_at_ns || spared > count {
                return Some(turn.key);
            }
            spared += 1;
            self.turns.push_back(Turn {
                spared_at_ns: last_used,
                ..turn
            });
        }
        None
    }
}

/// A bucket of tokens, refilled at a steady rate; it holds one second's worth.
#[derive(Debug)]
pub(super) struct Allowance {
    /// Tokens per second, and the bucket's capacity.
    rate: f64,
    left: f64,
    /// The time at which `left` was correct.
    at: Instant,
}

impl Allowance {
    /// Returns a full bucket with `rate` tokens per second, at least 64.
    pub(super) fn new(rate: usize, now: Instant) -> Self {
        let rate = rate.max(64) as f64;
        Self {
            rate,
            left: rate,
            at: now,
        }
    }

    pub(super) fn is_left(&mut self, now: Instant) -> bool {
        let gained = now.saturating_duration_since(self.at).as_secs_f64() * self.rate;
        self.left = (self.left + gained).min(self.rate);
        self.at = now;
        self.left >= 1.0
    }

    /// Takes a token; `false` if none is left.
    pub(super) fn take(&mut self, now: Instant) -> bool {
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
    fn tokens_refill_up_to_capacity() {
        let start = Instant::now();
        let mut allowance = Allowance::new(100, start);
        let taken = |allowance: &mut Allowance, at: Instant| {
            (0..1000).filter(|_| allowance.take(at)).count()
        };
        assert_eq!(taken(&mut allowance, start), 100);
        assert_eq!(
            taken(&mut allowance, start + Duration::from_millis(105)),
            10
        );
        assert_eq!(taken(&mut allowance, start + Duration::from_secs(60)), 100);
        assert!(
            !allowance.is_left(start),
            "a clock that goes back gives nothing"
        );
    }
}
