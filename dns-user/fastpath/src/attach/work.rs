//! What the attacher does, how often, and for how long: attaching and some questions hold the kernel's RTNL lock, which
//! all network configuration needs.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

use serde::{Deserialize, Serialize};

/// An operation of the attacher.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Operation {
    /// The thread that follows the interfaces wakes up. Counted only.
    Round,
    /// Lists the interfaces, under the RTNL lock.
    Links,
    /// Lists the addresses.
    Addresses,
    /// Lists the routes.
    Routes,
    /// Looks up one route.
    Route,
    /// Looks for the qdisc or the filters of one interface, under the RTNL lock.
    Filters,
    /// Attaches a program, under the RTNL lock.
    Attach,
    /// Detaches a program, under the RTNL lock.
    Detach,
    /// Reads the packet filter and the IPsec policies.
    Rules,
    /// Walks through the rules for one interface, or for one client of it.
    Walk,
}

/// Number of operations.
const OPERATIONS: usize = Operation::Walk as usize + 1;

impl Operation {
    /// Returns the label used in metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Round => "round",
            Self::Links => "links",
            Self::Addresses => "addresses",
            Self::Routes => "routes",
            Self::Route => "route",
            Self::Filters => "filters",
            Self::Attach => "attach",
            Self::Detach => "detach",
            Self::Rules => "rules",
            Self::Walk => "walk",
        }
    }
}

/// How often an operation was done, and how long that took in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Effort {
    /// How often.
    pub times: u64,
    /// Nanoseconds, the wait for locks included.
    pub ns: u64,
}

/// The operations of this process so far.
pub type Work = BTreeMap<Operation, Effort>;

struct Counter {
    operation: Operation,
    times: AtomicU64,
    ns: AtomicU64,
}

const fn counter(operation: Operation) -> Counter {
    Counter {
        operation,
        times: AtomicU64::new(0),
        ns: AtomicU64::new(0),
    }
}

static COUNTERS: [Counter; OPERATIONS] = [
    counter(Operation::Round),
    counter(Operation::Links),
    counter(Operation::Addresses),
    counter(Operation::Routes),
    counter(Operation::Route),
    counter(Operation::Filters),
    counter(Operation::Attach),
    counter(Operation::Detach),
    counter(Operation::Rules),
    counter(Operation::Walk),
];

/// Does an operation and counts it.
pub(super) fn count<T>(operation: Operation, run: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let done = run();
    let took = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let counter = &COUNTERS[operation as usize];
    counter.times.fetch_add(1, Ordering::Relaxed);
    counter.ns.fetch_add(took, Ordering::Relaxed);
    done
}

/// Returns the operations of this process so far.
pub(crate) fn so_far() -> Work {
    let effort = |counter: &Counter| Effort {
        times: counter.times.load(Ordering::Relaxed),
        ns: counter.ns.load(Ordering::Relaxed),
    };
    COUNTERS
        .iter()
        .map(|counter| (counter.operation, effort(counter)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operation_has_its_counter() {
        for (index, counter) in COUNTERS.iter().enumerate() {
            assert_eq!(
                counter.operation as usize,
                index,
                "{}",
                counter.operation.label()
            );
        }
        let before = so_far()[&Operation::Round];
        assert_eq!(count(Operation::Round, || 7), 7);
        assert!(so_far()[&Operation::Round].times > before.times);
    }
}
