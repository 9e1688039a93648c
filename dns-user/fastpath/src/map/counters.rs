//! The programs' counters.

use std::{
    array, io,
    mem::offset_of,
    os::fd::BorrowedFd,
    sync::atomic::{AtomicU64, Ordering},
};

use dns_common::{
    counters::{CpuCounters, OUTCOME_SLOTS, Outcome, RCODE_SLOTS},
    scope::INTERFACES,
};
use memmap2::MmapRaw;
use zerocopy::{FromZeros as _, transmute_mut};

use super::{Shape, map_shared, words};

/// Labels of the query types by which replies are counted, in the order of `QueryKind`.
const KINDS: [&str; 4] = ["A", "AAAA", "other", "ANY"];

/// Totals since the programs were loaded.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    cpus: Vec<CpuCounters>,
}

impl Counters {
    pub(crate) fn new(cpus: Vec<CpuCounters>) -> Self {
        Self { cpus }
    }

    /// Returns the number of packets with this outcome.
    pub fn outcome(&self, outcome: Outcome) -> u64 {
        self.sum(|cpu| cpu.outcomes[outcome as usize % OUTCOME_SLOTS])
    }

    /// Returns the number of packets for every outcome.
    pub fn outcomes(&self) -> impl Iterator<Item = (Outcome, u64)> {
        Outcome::ALL
            .iter()
            .map(|&outcome| (outcome, self.outcome(outcome)))
    }

    /// Returns the number of replies by the programs.
    pub fn hits(&self) -> u64 {
        Outcome::ALL
            .iter()
            .filter(|outcome| outcome.is_hit())
            .map(|&outcome| self.outcome(outcome))
            .sum()
    }

    /// Returns the number of replies by type label and RCODE.
    pub fn replies(&self) -> Vec<(&'static str, u8, u64)> {
        let mut replies = Vec::new();
        for (kind, label) in KINDS.into_iter().enumerate() {
            for rcode in 0..RCODE_SLOTS {
                let count = self.sum(|cpu| cpu.replies[kind][rcode]);
                replies.push((label, u8::try_from(rcode).expect("a few slots"), count));
            }
        }
        replies
    }

    /// Returns the bytes of the DNS messages of answered queries and of their replies.
    pub fn bytes(&self) -> (u64, u64) {
        (
            self.sum(|cpu| cpu.query_bytes),
            self.sum(|cpu| cpu.reply_bytes),
        )
    }

    /// Returns the number of replies by the interface in a slot.
    pub fn interface(&self, slot: usize) -> u64 {
        self.sum(|cpu| cpu.interface_hits[slot % INTERFACES])
    }

    pub(crate) fn join(mut self, others: Self) -> Self {
        // As if they were further CPUs: all figures are sums.
        self.cpus.extend(others.cpus);
        self
    }

    /// Returns the totals of programs that have ended. Interfaces are left out, because their slots are
    /// assigned again.
    pub(crate) fn ended(self) -> Self {
        let total = CpuCounters {
            outcomes: array::from_fn(|outcome| self.sum(|cpu| cpu.outcomes[outcome])),
            replies: array::from_fn(|kind| {
                array::from_fn(|rcode| self.sum(|cpu| cpu.replies[kind][rcode]))
            }),
            query_bytes: self.sum(|cpu| cpu.query_bytes),
            reply_bytes: self.sum(|cpu| cpu.reply_bytes),
            padding: Default::default(),
            interface_hits: [0; INTERFACES],
        };
        Self { cpus: vec![total] }
    }

    fn sum(&self, count: impl Fn(&CpuCounters) -> u64) -> u64 {
        self.cpus.iter().map(count).sum()
    }
}

/// The mapped `COUNTERS` map: one element per possible CPU.
#[derive(Debug)]
pub struct CounterPages {
    map: MmapRaw,
    cpus: usize,
}

impl CounterPages {
    /// Maps `COUNTERS`, which has this shape.
    pub fn map(map: BorrowedFd<'_>, shape: Shape) -> io::Result<Self> {
        let Shape {
            value_size,
            elements: cpus,
        } = shape;
        // The offsets below hold for this layout only.
        if value_size as usize != size_of::<CpuCounters>() {
            return Err(io::Error::other(format!(
                "counters of {value_size} bytes: another layout"
            )));
        }
        let cpus = cpus as usize;
        Ok(Self {
            map: map_shared(map, cpus * size_of::<CpuCounters>())?,
            cpus,
        })
    }

    pub(crate) fn read(&self) -> Vec<CpuCounters> {
        const WORDS: usize = size_of::<CpuCounters>() / size_of::<u64>();
        // Word by word: a volatile read of the whole element is compiled to thousands of instructions.
        (0..self.cpus)
            .map(|cpu| {
                let mut counters = CpuCounters::new_zeroed();
                let counts: &mut [u64; WORDS] = transmute_mut!(&mut counters);
                for (at, count) in counts.iter_mut().enumerate() {
                    *count = words::word(&self.map, cpu * WORDS + at).load(Ordering::Relaxed);
                }
                counters
            })
            .collect()
    }

    /// Returns the number of packets to our endpoints that were passed to userspace. Reads four cache
    /// lines of each CPU, which its programs write.
    pub(crate) fn passed_to_userspace(&self) -> u64 {
        (0..self.cpus)
            .map(|cpu| {
                // Dropped queries, and datagrams to other sockets, give this server no work.
                let outcomes = Outcome::ALL.iter().filter(|outcome: &&Outcome| {
                    !outcome.is_hit() && !matches!(outcome, Outcome::NotOurs | Outcome::Shed)
                });
                outcomes
                    .map(move |&outcome| self.outcome(cpu, outcome).load(Ordering::Relaxed))
                    .sum::<u64>()
            })
            .sum()
    }

    /// Returns the number of packets with this outcome.
    pub fn total(&self, outcome: Outcome) -> u64 {
        (0..self.cpus)
            .map(|cpu| self.outcome(cpu, outcome).load(Ordering::Relaxed))
            .sum()
    }

    fn outcome(&self, cpu: usize, outcome: Outcome) -> &AtomicU64 {
        let at = offset_of!(CpuCounters, outcomes) + outcome as usize * size_of::<u64>();
        self.counter(cpu, at)
    }

    /// Returns the number of replies by the interface in a slot.
    pub fn interface(&self, slot: usize) -> u64 {
        (0..self.cpus)
            .map(|cpu| self.hits(cpu, slot).load(Ordering::Relaxed))
            .sum()
    }

    /// Resets the counters of a slot that no program run uses yet.
    pub fn clear_interface(&self, slot: usize) {
        (0..self.cpus).for_each(|cpu| self.hits(cpu, slot).store(0, Ordering::Relaxed));
    }

    fn hits(&self, cpu: usize, slot: usize) -> &AtomicU64 {
        // Beyond it are the counters of the next CPU.
        assert!(slot < INTERFACES, "a counter of the map");
        self.counter(
            cpu,
            offset_of!(CpuCounters, interface_hits) + slot * size_of::<u64>(),
        )
    }

    fn counter(&self, cpu: usize, offset: usize) -> &AtomicU64 {
        assert!(cpu < self.cpus, "a counter of the map");
        words::word(&self.map, (cpu * size_of::<CpuCounters>() + offset) / 8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_added_up_over_cpus() {
        let mut one = CpuCounters::new_zeroed();
        one.outcomes[Outcome::Hit as usize] = 2;
        one.replies[1][3] = 5;
        one.interface_hits[7] = 1;
        let mut other = one;
        other.outcomes[Outcome::HitTruncated as usize] = 1;
        let counters = Counters::new(vec![one, other]);
        assert_eq!(counters.hits(), 5);
        assert!(counters.replies().contains(&("AAAA", 3, 10)));
        assert_eq!(counters.interface(7), 2);
    }

    #[test]
    fn misses_are_added_up_over_cpus() {
        let map: MmapRaw = memmap2::MmapMut::map_anon(3 * size_of::<CpuCounters>())
            .unwrap()
            .into();
        let pages = CounterPages { map, cpus: 3 };
        for (cpu, outcome) in [
            (0, Outcome::NotPublished),
            (2, Outcome::BadEdns),
            (2, Outcome::Hit),
            (1, Outcome::Shed),
        ] {
            pages.outcome(cpu, outcome).store(5, Ordering::Relaxed);
        }
        assert_eq!(
            pages.passed_to_userspace(),
            10,
            "hits and shed queries did not reach userspace"
        );
        assert_eq!(Counters::new(pages.read()).outcome(Outcome::BadEdns), 5);
    }

    #[test]
    fn ended_programs_stay_counted() {
        let mut cpu = CpuCounters::new_zeroed();
        cpu.outcomes[Outcome::Hit as usize] = 24_080;
        cpu.replies[0][0] = 24_080;
        cpu.query_bytes = 7;
        cpu.interface_hits[1] = 24_080;
        let ended = Counters::default()
            .join(Counters::new(vec![cpu, cpu]))
            .ended();
        cpu.outcomes[Outcome::Hit as usize] = 108;
        cpu.replies[0][0] = 108;
        let all = ended.join(Counters::new(vec![cpu]));
        assert_eq!((all.hits(), all.bytes()), (2 * 24_080 + 108, (21, 0)));
        assert!(all.replies().contains(&("A", 0, 2 * 24_080 + 108)));
        // The slot belongs to the interface of the newest programs.
        assert_eq!(all.interface(1), 24_080);
    }
}
