//! Counts what the attacher does and how long that takes: attaching and some questions hold the kernel's RTNL lock, which
//! all network configuration needs.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

use dns_fastpath::protocol::{Effort, Operation, Work};

struct Counter {
    times: AtomicU64,
    ns: AtomicU64,
}

/// A counter for each of [`Operation::ALL`].
static COUNTERS: [Counter; Operation::ALL.len()] = [const {
    Counter {
        times: AtomicU64::new(0),
        ns: AtomicU64::new(0),
    }
}; Operation::ALL.len()];

/// Does an operation and counts it.
pub(super) fn count<T>(operation: Operation, run: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let done = run();
    let took = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let counter = &COUNTERS[operation as usize];
    // Relaxed: two totals for metrics, and nothing is concluded from one about the other.
    counter.times.fetch_add(1, Ordering::Relaxed);
    counter.ns.fetch_add(took, Ordering::Relaxed);
    done
}

/// Returns the operations of this process so far.
pub(crate) fn so_far() -> Work {
    let mut work = Work::new();
    for operation in Operation::ALL {
        let counter = &COUNTERS[operation as usize];
        let effort = Effort {
            times: counter.times.load(Ordering::Relaxed),
            ns: counter.ns.load(Ordering::Relaxed),
        };
        work.insert(operation, effort);
    }
    work
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operation_has_its_counter() {
        for (index, operation) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(operation as usize, index, "{}", operation.label());
        }
        let before = so_far()[&Operation::Round];
        assert_eq!(count(Operation::Round, || 7), 7);
        assert!(so_far()[&Operation::Round].times > before.times);
    }
}
