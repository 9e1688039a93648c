//! Bookkeeping of the tracker: names by last use, and instances by the names that need them.

use std::{
    cmp::{Ordering as Order, Reverse},
    collections::{BinaryHeap, HashMap},
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::sync::Notify;

use super::Tracked;

/// All data that changes with the tracked names.
#[derive(Debug, Default)]
pub(super) struct Registry {
    /// Every tracked name once, with a time not later than its last use; the exact time is read
    /// when the name reaches the top.
    order: BinaryHeap<Reverse<Use>>,
    instances: HashMap<IpAddr, Held>,
}

/// A name with its last use as known to the heap.
#[derive(Debug)]
struct Use {
    at: u64,
    tracked: Arc<Tracked>,
}

/// The reasons for tracking an instance.
#[derive(Debug, Default)]
struct Held {
    /// Number of tracked names that need it; at least one.
    by: usize,
    /// Queries that wait for its first check.
    waiting: Vec<Arc<FirstChecks>>,
}

/// A set of first checks that y1 queries wait for.
#[derive(Debug)]
pub(super) struct FirstChecks {
    /// Number of pending checks.
    left: AtomicUsize,
    /// Notified when the count reaches 0.
    done: Notify,
}

impl Registry {
    /// Starts tracking a name.
    pub(super) fn push(&mut self, at: u64, tracked: Arc<Tracked>) {
        self.order.push(Reverse(Use { at, tracked }));
    }

    /// Removes the least recently used name.
    ///
    /// Amortised O(log n): a name is reinserted only if it was used since it was last examined.
    pub(super) fn pop_oldest(&mut self, last_use: impl Fn(&Tracked) -> u64) -> Option<Arc<Tracked>> {
        self.pop_before(u64::MAX, last_use)
    }

    /// Removes the least recently used name if its last use was before `moment`.
    pub(super) fn pop_before(
        &mut self,
        moment: u64,
        last_use: impl Fn(&Tracked) -> u64,
    ) -> Option<Arc<Tracked>> {
        while self.order.peek().is_some_and(|Reverse(oldest)| oldest.at < moment) {
            let Reverse(Use { at, tracked }) = self.order.pop()?;
            let used = last_use(&tracked);
            if used <= at {
                return Some(tracked);
            }
            self.push(used, tracked);
        }
        None
    }

    /// Adds a name that needs the instance; returns whether it is the first.
    pub(super) fn hold(&mut self, ip: IpAddr) -> bool {
        let held = self.instances.entry(ip).or_default();
        held.by += 1;
        held.by == 1
    }

    /// Removes a name that needs the instance; returns whether it was the last.
    pub(super) fn release(&mut self, ip: IpAddr) -> bool {
        let Some(held) = self.instances.get_mut(&ip) else { return false };
        held.by -= 1;
        if held.by > 0 {
            return false;
        }
        let held = self.instances.remove(&ip);
        // The instance will not be checked: release the waiting queries.
        held.iter().flat_map(|held| &held.waiting).for_each(|first_checks| first_checks.one_done());
        true
    }

    /// Adds the instance, which must be tracked, to the checks that `first_checks` waits for.
    pub(super) fn wait(&mut self, ip: IpAddr, first_checks: Arc<FirstChecks>) {
        match self.instances.get_mut(&ip) {
            Some(held) => held.waiting.push(first_checks),
            None => first_checks.one_done(),
        }
    }

    /// Takes the queries that wait for the first check of the instance; `None` if it is not
    /// tracked.
    pub(super) fn take_waiting(&mut self, ip: IpAddr) -> Option<Vec<Arc<FirstChecks>>> {
        self.instances.get_mut(&ip).map(|held| std::mem::take(&mut held.waiting))
    }

    /// Returns the number of tracked instances.
    pub(super) fn instance_count(&self) -> usize {
        self.instances.len()
    }
}

impl FirstChecks {
    /// Creates a set of `count` checks, at least one.
    pub(super) fn new(count: usize) -> Self {
        Self { left: AtomicUsize::new(count), done: Notify::new() }
    }

    /// Counts one check as done.
    pub(super) fn one_done(&self) {
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.done.notify_waiters();
        }
    }

    /// Returns whether all checks have ended.
    pub(super) fn is_done(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }

    /// Waits until all checks have ended.
    pub(super) async fn done(&self) {
        let done = self.done.notified();
        let mut done = std::pin::pin!(done);
        // Register before the test, so that no wake-up is missed.
        done.as_mut().enable();
        if !self.is_done() {
            done.await;
        }
    }
}

impl Ord for Use {
    fn cmp(&self, other: &Self) -> Order {
        self.at.cmp(&other.at)
    }
}

impl PartialOrd for Use {
    fn partial_cmp(&self, other: &Self) -> Option<Order> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Use {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Use {}
