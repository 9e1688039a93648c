//! Queries by name, for the names that are asked most (space-saving by Metwally, Agrawal and El Abbadi, 2005).

use std::{cmp::Reverse, collections::HashMap};

use dns_core::name::Name;

/// Number of counters for each name that is exposed.
///
/// A name whose share of the queries exceeds one in all counters has a counter for certain, and an exposed count
/// exceeds the true one by at most that share of all queries.
const COUNTERS_PER_NAME: usize = 20;

/// Counters of the names that are asked most. A count never falls, so that it can be exposed as a counter: a new
/// name takes over the counter of the rarest one.
#[derive(Debug)]
pub(super) struct TopNames {
    /// Number of names to expose.
    most: usize,
    counts: HashMap<Name, u64>,
}

impl TopNames {
    pub(super) fn new(most: usize) -> Self {
        Self { most, counts: HashMap::new() }
    }

    /// Adds `queries` for a name.
    pub(super) fn add(&mut self, name: Name, queries: u64) {
        if let Some(count) = self.counts.get_mut(&name) {
            *count += queries;
            return;
        }
        let mut inherited = 0;
        if self.counts.len() >= self.most * COUNTERS_PER_NAME {
            let rarest = self.counts.iter().min_by_key(|(_, count)| **count);
            if let Some((name, count)) = rarest.map(|(name, count)| (name.clone(), *count)) {
                inherited = count;
                self.counts.remove(&name);
            }
        }
        self.counts.insert(name, inherited + queries);
    }

    /// Returns the names that are asked most, first the one with the highest count.
    pub(super) fn most(&self) -> Vec<(String, u64)> {
        let mut all: Vec<_> = self.counts.iter().map(|(name, count)| (Reverse(*count), name)).collect();
        all.sort_unstable();
        all.truncate(self.most);
        all.into_iter().map(|(Reverse(count), name)| (name.to_string(), count)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_names_survive_many_rare_ones() {
        let mut top = TopNames::new(2);
        let name = |text: &str| Name::from_text(text).unwrap();
        for number in 0..20_000 {
            top.add(name(&format!("rare{number}.bosh")), 1);
            top.add(name(if number % 3 == 0 { "second.bosh" } else { "first.bosh" }), 1);
        }
        assert!(top.counts.len() <= 2 * COUNTERS_PER_NAME);
        let shown = top.most();
        assert_eq!([&shown[0].0, &shown[1].0], ["first.bosh.", "second.bosh."]);
        // 40,000 queries, 40 counters: at most 1,000 too many.
        for ((_, count), exact) in shown.into_iter().zip([13_333, 6_667]) {
            assert!((exact..=exact + 1_000).contains(&count), "{count}");
        }
    }

    #[test]
    fn counts_never_fall() {
        let mut top = TopNames::new(1);
        let mut highest = 0;
        for number in 0..500_u32 {
            top.add(Name::from_text(&format!("n{}.bosh", number % 37)).unwrap(), u64::from(number % 5));
            let now = top.most()[0].1;
            assert!(now >= highest);
            highest = now;
        }
    }
}
