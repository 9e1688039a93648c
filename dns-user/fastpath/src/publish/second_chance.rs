//! Eviction: by second chance, so that a record used since its last inspection is spared once, and at a bounded rate.

use std::collections::VecDeque;

use dns_kit::rate::TokenBucket;

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
            // The record has gone, or has a later turn.
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

/// Returns an allowance of `rate` evictions per second, at least 64, and of one second's at once.
pub(super) fn allowance(rate: usize) -> TokenBucket {
    let rate = rate.max(64) as f64;
    TokenBucket::full(rate, rate)
}
