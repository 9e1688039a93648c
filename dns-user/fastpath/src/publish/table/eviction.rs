//! Makes room for names by choosing names to evict.
//!
//! Listed names evict learned names and wait for their cells. Queried names only evict each other,
//! at a limited rate, and never wait.

use std::time::Instant;

use dns_common::entry::Location;

use super::{Table, records::Kind};

/// Rounds of eviction for one listed name before it counts as not fitting.
const ROUNDS_FOR_ONE: usize = 8;

impl Table {
    pub(super) fn has_room_to_learn(&self) -> bool {
        self.records.positive_count() < self.limits.max_names && self.store.has_room()
    }

    /// Allocates cells for the encoded entry of a name of this kind, evicting other names if permitted.
    pub(super) fn room(&mut self, key: u64, kind: Kind) -> Option<Location> {
        let held = self.records.get(key).map(|record| record.kind);
        match kind {
            Kind::Published | Kind::Learned
                // A name of these kinds has its place already: its new entry takes room in the
                // store alone.
                if !matches!(held, Some(Kind::Published | Kind::Learned)) =>
            {
                while self.records.positive_count() >= self.limits.max_names {
                    // The snapshot's names have precedence over queried ones, at any rate; among
                    // queried ones the rate protects those in use.
                    let left = if kind == Kind::Published {
                        self.evict(Kind::Learned)
                    } else {
                        self.exchange_one(Kind::Learned)
                    };
                    if !left {
                        return None;
                    }
                }
            }
            Kind::Negative if held != Some(Kind::Negative) => {
                // Without a rate: denials evict each other alone, and clients hand them over at a
                // limited one.
                while self.records.count(Kind::Negative) >= self.limits.negative {
                    if !self.evict(Kind::Negative) {
                        return None;
                    }
                }
            }
            Kind::Published | Kind::Learned | Kind::Negative => {}
        }
        match kind {
            Kind::Published => self.cells_for_listed(),
            Kind::Learned | Kind::Negative => self.cells_for_learned(held.is_some()),
        }
    }

    /// Evicts one name of a kind in favour of another queried name, if the rate limit permits.
    pub(super) fn exchange_one(&mut self, kind: Kind) -> bool {
        self.exchange.take(Instant::now()) && self.evict(kind)
    }

    /// Evicts one name of a kind; `false` if there is none.
    pub(super) fn evict(&mut self, kind: Kind) -> bool {
        let Some(key) = self.records.next_to_evict(kind, &self.store) else {
            return false;
        };
        self.remove(key);
        self.evicted += 1;
        true
    }

    /// Allocates cells for the encoded entry of a listed name; evicts learned names and waits for
    /// their cells if necessary.
    fn cells_for_listed(&mut self) -> Option<Location> {
        let size = self.encoded.size();
        // Freed cells may lie apart: a large entry needs a run, so several rounds may be necessary.
        for _ in 0..ROUNDS_FOR_ONE {
            if let Some(location) = self.store.allocator.allocate(size) {
                return Some(location);
            }
            if !self.store.will_have(size) && !self.evict_batch() {
                return None;
            }
            self.reclaim_now();
        }
        None
    }

    /// Allocates cells for the encoded entry of a queried name. `replaces` is true if the name has
    /// an outdated entry.
    ///
    /// Never waits: without room it evicts other names, whose cells are free by the next query for the name.
    fn cells_for_learned(&mut self, replaces: bool) -> Option<Location> {
        let size = self.encoded.size();
        self.reclaim();
        // The reserve is for this as well: userspace would answer the name until there is room.
        let found = if replaces {
            self.store.allocator.allocate(size)
        } else {
            self.store.allocate_beside_reserve(size)
        };
        if found.is_none()
            && !self.store.will_have(self.store.batch(0))
            && self.exchange.take(Instant::now())
        {
            self.evict_batch();
            self.reclaim();
        }
        found
    }

    /// Evicts negative and learned names until a batch of cells is in quarantine; returns whether
    /// any name was evicted.
    fn evict_batch(&mut self) -> bool {
        let enough = self.store.batch(self.encoded.size());
        let mut evicted = false;
        while !self.store.will_have(enough)
            && (self.evict(Kind::Negative) || self.evict(Kind::Learned))
        {
            evicted = true;
        }
        evicted
    }
}
