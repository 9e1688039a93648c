//! Room for names: who leaves for whom.
//!
//! Listed names push out learned ones, and wait for their cells. Names that are merely
//! asked for push each other out, a few a second, and wait for nobody.

use std::time::Instant;

use dns_common::entry::Location;

use super::{Table, records::Kind};

/// Rounds of eviction for one listed name before it counts as not fitting.
const ROUNDS_FOR_ONE: usize = 8;

impl Table {
    /// Whether a learned name finds room without another one's leaving.
    pub(super) fn has_room_to_learn(&self) -> bool {
        self.records.useful() < self.limits.useful && self.store.has_room()
    }

    /// Room for the encoded entry of a name of this kind, evicting what may be evicted for it.
    pub(super) fn room(&mut self, key: u64, kind: Kind) -> Option<Location> {
        let held = self.records.get(key).map(|record| record.kind());
        match kind {
            Kind::Published | Kind::Learned if !matches!(held, Some(Kind::Published | Kind::Learned)) => {
                while self.records.useful() >= self.limits.useful {
                    let left = if kind == Kind::Published {
                        self.evict(Kind::Learned)
                    } else {
                        self.exchange_one(Kind::Learned)
                    };
                    left.then_some(())?;
                }
            }
            Kind::Negative if held != Some(Kind::Negative) => {
                while self.records.count(Kind::Negative) >= self.limits.negative {
                    self.evict(Kind::Negative).then_some(())?;
                }
            }
            Kind::Published | Kind::Learned | Kind::Negative => {}
        }
        match kind {
            Kind::Published => self.cells_for_listed(),
            Kind::Learned | Kind::Negative => self.cells_for_learned(held.is_some()),
        }
    }

    /// Evicts one name of a kind for the sake of another that was merely asked for,
    /// as far as that is allowed now.
    pub(super) fn exchange_one(&mut self, kind: Kind) -> bool {
        self.exchange.take(Instant::now()) && self.evict(kind)
    }

    /// Evicts one name of a kind. `false`: there is none.
    pub(super) fn evict(&mut self, kind: Kind) -> bool {
        let Some(key) = self.records.next_to_evict(kind, &self.store) else { return false };
        self.remove(key);
        self.evicted += 1;
        true
    }

    /// Cells for the encoded entry of a name that the snapshot lists: learned names
    /// leave for it, and their cells are waited for.
    fn cells_for_listed(&mut self) -> Option<Location> {
        let size = self.encoded.size();
        for _ in 0..ROUNDS_FOR_ONE {
            if let Some(location) = self.store.allocate(size) {
                return Some(location);
            }
            if !self.store.will_have(size) && !self.evict_batch() {
                return None;
            }
            self.reclaim_now();
        }
        None
    }

    /// Cells for the encoded entry of a name that was merely asked for. `replaces`: an
    /// entry of it is there, and what it says is out of date.
    ///
    /// Nobody waits for it: where there is no room, others leave, and the next query
    /// for the name finds their cells free.
    fn cells_for_learned(&mut self, replaces: bool) -> Option<Location> {
        let size = self.encoded.size();
        self.reclaim();
        let found =
            if replaces { self.store.allocate(size) } else { self.store.allocate_beside_reserve(size) };
        if found.is_none() && !self.store.will_have(self.store.batch(0)) && self.exchange.take(Instant::now())
        {
            self.evict_batch();
            self.reclaim();
        }
        found
    }

    /// Evicts names that were asked for until a batch of cells is on its way; `false`: there is none.
    fn evict_batch(&mut self) -> bool {
        let enough = self.store.batch(self.encoded.size());
        let mut evicted = false;
        while !self.store.will_have(enough) && (self.evict(Kind::Negative) || self.evict(Kind::Learned)) {
            evicted = true;
        }
        evicted
    }
}
