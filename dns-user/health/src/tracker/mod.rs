//! Tracks the most recently queried names and the instances that they need checked.

#[cfg(test)]
mod tests;

use std::{
    cmp,
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::{Mutex, RwLock};
use tokio::sync::{mpsc, watch};

use super::states::{HealthStates, InstanceHealth};
use dns_core::{
    catalog::Snapshot,
    name::Name,
    resolve::{AllRunning, Checks, Resolution, resolve},
};
use dns_fastpath::{Admission, FastPathHandle};
use dns_kit::clock::{kernel_coarse_ns, kernel_monotonic_ns};

/// Bounds of the tracker.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of tracked names (`max_tracked_queries`).
    pub names: usize,
    /// Time for which a y1 query waits for first checks (`synchronous_check_timeout`).
    pub first_checks: Duration,
    /// Time after its last query at which a name is forgotten (`tracked_query_ttl`).
    pub ttl: Option<Duration>,
}

/// The most recently queried names, up to a limit, and the instances that they need.
///
/// Query paths never wait for checks. A UDP worker keeps the [`Tracked`] of each name that it has answered:
/// another query for it takes no lock and writes at most once per tick of the clock, unless the order of
/// names within a tick matters. A new name costs a few map changes under a briefly held lock.
pub struct Tracker {
    limits: Limits,
    states: Arc<HealthStates>,
    /// Tracked names. Locked only for single look-ups and changes, and last.
    names: RwLock<HashMap<Name, Arc<Tracked>>>,
    /// The order of use and the instances. Locked before `names`.
    registry: Mutex<Registry>,
    /// Whether the order of uses within a tick of the clock matters, see [`Self::set_precision`].
    is_exact: AtomicBool,
    /// The fast path, whose answers count as uses as well.
    fast_path: FastPathHandle,
    commands: mpsc::UnboundedSender<WatcherCommand>,
    /// Number of commands not carried out yet.
    queued: AtomicUsize,
}

/// A tracked name. Read by every CPU that answers it, so in separate cache lines.
#[derive(Debug)]
#[repr(align(128))]
pub struct Tracked {
    name: Name,
    /// Time of the last use in userspace, `CLOCK_MONOTONIC` in ns.
    last_use: AtomicU64,
    /// Whether the name has been dropped, and its next query must be looked up.
    is_dropped: AtomicBool,
    /// Instances that it needs checked, without duplicates. Changed under the registry's lock.
    instances: Mutex<Box<[IpAddr]>>,
    /// Queries that wait for the first checks of its instances.
    first_checks: Mutex<Option<FirstChecks>>,
}

/// Number of queued commands above which no new names are tracked until the watcher's thread has
/// caught up. A command takes about 40 bytes.
const MAX_QUEUED: usize = 65_536;

/// Age of the oldest use, in nanoseconds, from which on the order of uses within a tick cannot decide which
/// name is dropped next, or hardly: ticks take at most 10 ms.
const EXACT_WITHIN_NS: u64 = 1_000_000_000;

/// A command to the watcher's thread.
pub enum WatcherCommand {
    /// Check the instance from now on.
    Check {
        /// Address of the instance.
        ip: IpAddr,
        /// Whether a query waits for the first result.
        urgent: bool,
    },
    /// Names and instances are no longer tracked.
    Dropped {
        /// Names to withdraw from the fast path.
        names: Vec<Name>,
        /// Instances that are unchecked again.
        instances: Vec<IpAddr>,
    },
    /// A name is newly tracked. It was resolved before that, and the snapshot may have changed in
    /// the meantime.
    Began(Arc<Tracked>),
    /// There are new records: determine again which instances every name needs.
    Decide(Arc<Snapshot>),
}

impl std::fmt::Debug for Tracker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tracker")
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl Tracker {
    /// Creates an empty tracker, and the receiver of its commands to the watcher.
    pub fn new(
        limits: Limits,
        states: Arc<HealthStates>,
        fast_path: FastPathHandle,
    ) -> (Self, mpsc::UnboundedReceiver<WatcherCommand>) {
        let (commands, receiver) = mpsc::unbounded_channel();
        let tracker = Self {
            limits,
            states,
            names: RwLock::default(),
            registry: Mutex::default(),
            is_exact: AtomicBool::new(false),
            fast_path,
            commands,
            queued: AtomicUsize::new(0),
        };
        (tracker, receiver)
    }

    /// Returns the states of the instances.
    pub fn states(&self) -> &HealthStates {
        &self.states
    }

    /// Records a query for the name that was answered in userspace. Starts first checks in the
    /// background; never waits.
    pub fn track(&self, name: &Name, resolution: &Resolution) {
        if !resolution.checks.tracked || self.limits.names == 0 {
            return;
        }
        let now = kernel_monotonic_ns();
        let is_tracked = match self.names.read().get(name) {
            Some(tracked) => tracked.touch(now),
            None => false,
        };
        if !is_tracked {
            self.begin(name, &resolution.checks, now);
        }
    }

    /// Does the same as [`Self::track`] for a name that was tracked; `false` if it no longer is, so that it
    /// must be looked up.
    #[inline]
    pub fn touch(&self, tracked: &Tracked) -> bool {
        let is_exact = self.is_exact.load(Ordering::Relaxed);
        tracked.touch(if is_exact {
            kernel_monotonic_ns()
        } else {
            kernel_coarse_ns()
        })
    }

    /// Returns the name as it is tracked now, for [`Self::touch`].
    pub fn tracked(&self, name: &Name) -> Option<Arc<Tracked>> {
        self.names.read().get(name).cloned()
    }

    /// Returns whether names are tracked at all.
    pub fn is_on(&self) -> bool {
        self.limits.names > 0
    }

    /// Waits until all instances of the name have been checked once, for at most `synchronous_check_timeout`.
    /// Serves y1 queries; returns immediately if all are checked. Records the use as [`Self::track`] does.
    pub async fn first_checks(&self, name: &Name, resolution: &Resolution) {
        self.track(name, resolution);
        if !resolution.checks.tracked
            || resolution
                .checks
                .instances
                .iter()
                .all(|ip| self.states.is_checked(*ip))
        {
            return;
        }
        let Some(first_checks) = self.wait_for_first(name) else {
            return;
        };
        let mut left = first_checks.subscribe();
        let _ =
            // After the time limit the query is answered with the states known so far.
            tokio::time::timeout(self.limits.first_checks, left.wait_for(|left| *left == 0)).await;
    }

    /// Returns whether the name is tracked.
    pub fn is_tracked(&self, name: &Name) -> bool {
        self.names.read().contains_key(name)
    }

    pub(super) fn expire_interval(&self) -> Duration {
        let ttl = self.limits.ttl.unwrap_or(Duration::MAX);
        // Names may stay about a tenth of the TTL too long; short TTLs must not keep the thread
        // busy.
        (ttl / 10).clamp(Duration::from_millis(100), Duration::from_secs(60))
    }

    /// Returns the number of tracked names.
    pub fn name_count(&self) -> usize {
        self.names.read().len()
    }

    /// Returns the number of tracked instances.
    pub fn instance_count(&self) -> usize {
        self.registry.lock().instances.len()
    }

    /// Installs new records: the watcher's thread determines again which instances every name needs.
    pub fn install(&self, snapshot: Arc<Snapshot>) {
        self.send(WatcherCommand::Decide(snapshot));
    }

    /// Starts tracking a name. If the watcher's thread is far behind, as in a flood of names, the
    /// name is left for its next query: it is not published until then, and memory stays bounded.
    fn begin(&self, name: &Name, checks: &Checks, now: u64) {
        if self.queued.load(Ordering::Relaxed) >= MAX_QUEUED {
            return;
        }
        let mut registry = self.registry.lock();
        if let Some(tracked) = self.names.read().get(name) {
            // Another thread was faster.
            tracked.touch(now);
            return;
        }
        let tracked = Arc::new(Tracked {
            name: name.clone(),
            last_use: AtomicU64::new(now),
            is_dropped: AtomicBool::new(false),
            instances: Mutex::default(),
            first_checks: Mutex::default(),
        });
        for ip in self.acquire(&mut registry, &tracked, needed(checks)).1 {
            self.send(WatcherCommand::Check {
                ip,
                urgent: checks.synchronous,
            });
        }
        registry.order.push(Reverse(Use {
            at: now,
            tracked: tracked.clone(),
        }));
        let count = {
            let mut names = self.names.write();
            names.insert(name.clone(), tracked.clone());
            names.len()
        };
        self.send(WatcherCommand::Began(tracked));
        // At the limit, the least recently used name is dropped.
        self.set_precision(&mut registry, count >= self.limits.names, now);
        for _ in self.limits.names..count {
            if let Some(oldest) =
                registry.pop_before(u64::MAX, |tracked: &Tracked| self.last_use(tracked))
            {
                self.drop_name(&mut registry, &oldest);
            }
        }
    }

    /// Decides whether times of uses must be exact: if the next name is dropped soon, and the oldest use was so
    /// recent that the order within a tick may decide. Exact times are written by every query, so CPUs that
    /// answer the same name would pass its cache line around.
    fn set_precision(&self, registry: &mut Registry, is_full: bool, now: u64) {
        let is_exact = is_full
            && registry
                .oldest_use(|tracked| self.last_use(tracked))
                .is_some_and(|oldest| now.saturating_sub(oldest) < EXACT_WITHIN_NS);
        if self.is_exact.swap(is_exact, Ordering::Relaxed) != is_exact {
            self.fast_path.keep_exact_last_used(is_exact);
        }
    }

    /// Removes names without a query within the time limit, if one is set.
    pub(super) fn expire(&self) {
        let Some(ttl) = self.limits.ttl else { return };
        let ttl = u64::try_from(ttl.as_nanos()).unwrap_or(u64::MAX);
        // The machine has not run for that long yet.
        let Some(before) = kernel_monotonic_ns().checked_sub(ttl) else {
            return;
        };
        let mut registry = self.registry.lock();
        while let Some(expired) = registry.pop_before(before, |tracked| self.last_use(tracked)) {
            self.drop_name(&mut registry, &expired);
        }
    }

    /// Removes a name and the instances that no other name needs.
    fn drop_name(&self, registry: &mut Registry, tracked: &Arc<Tracked>) {
        self.names.write().remove(&tracked.name);
        // Workers keep the `Tracked`: the mark makes their next query look the name up.
        tracked.is_dropped.store(true, Ordering::Release);
        let instances = self.release_locked(registry, &tracked.replace_instances(Box::default()));
        self.send(WatcherCommand::Dropped {
            names: vec![tracked.name.clone()],
            instances,
        });
    }

    /// Sets the instances that a name needs. Returns the previous ones, still acquired, and the newly
    /// needed ones that no other name had acquired.
    fn acquire(
        &self,
        registry: &mut Registry,
        tracked: &Tracked,
        needed: Box<[IpAddr]>,
    ) -> (Box<[IpAddr]>, Vec<IpAddr>) {
        let new = needed
            .iter()
            .copied()
            .filter(|ip| registry.acquire(*ip))
            .collect();
        (tracked.replace_instances(needed), new)
    }

    /// Releases instances; returns those no longer needed by any name, which become unchecked.
    fn release_locked(&self, registry: &mut Registry, instances: &[IpAddr]) -> Vec<IpAddr> {
        let gone: Vec<_> = instances
            .iter()
            .copied()
            .filter(|ip| registry.release(*ip))
            .collect();
        for ip in &gone {
            self.states.remove(*ip);
        }
        gone
    }

    /// Determines from the newest records which instances a name needs. The previous ones are
    /// returned, still acquired, and must be passed to [`Self::release`].
    pub(super) fn decide(&self, tracked: &Tracked, records: &Snapshot) -> Box<[IpAddr]> {
        // The health of instances does not affect which of them need checks.
        let checks =
            resolve(records, &AllRunning, &tracked.name).map(|resolution| resolution.checks);
        self.set_checks(tracked, checks)
    }

    /// Sets the instances that a name needs; `None` if it is no longer a local name.
    fn set_checks(&self, tracked: &Tracked, checks: Option<Checks>) -> Box<[IpAddr]> {
        let checks = checks.filter(|checks| checks.tracked).unwrap_or_default();
        let needed = needed(&checks);
        let mut registry = self.registry.lock();
        // The name was dropped in the meantime.
        let is_current = self
            .names
            .read()
            .get(&tracked.name)
            // By identity, because the name may have been tracked again.
            .is_some_and(|known| std::ptr::eq(&**known, tracked));
        if !is_current || *tracked.instances.lock() == needed {
            return Box::default();
        }
        let (before, new) = self.acquire(&mut registry, tracked, needed);
        for ip in new {
            self.send(WatcherCommand::Check {
                ip,
                urgent: checks.synchronous,
            });
        }
        before
    }

    /// Releases instances that names needed before.
    pub(super) fn release(&self, instances: &[IpAddr]) {
        if instances.is_empty() {
            return;
        }
        let gone = self.release_locked(&mut self.registry.lock(), instances);
        if !gone.is_empty() {
            self.send(WatcherCommand::Dropped {
                names: Vec::new(),
                instances: gone,
            });
        }
    }

    pub(super) fn all(&self) -> Vec<Arc<Tracked>> {
        self.names.read().values().cloned().collect()
    }

    /// Records the result of a check. Returns whether the state has changed.
    pub fn checked(&self, ip: IpAddr, health: InstanceHealth) -> bool {
        let mut registry = self.registry.lock();
        // No longer tracked: the instance must stay unchecked.
        let Some(waiting) = registry.take_waiting(ip) else {
            return false;
        };
        let changed = self.states.set(ip, health);
        drop(registry);
        waiting.iter().for_each(one_done);
        changed
    }

    /// Returns the first checks that a y1 query for the name must wait for; `None` if all are done.
    fn wait_for_first(&self, name: &Name) -> Option<FirstChecks> {
        let mut registry = self.registry.lock();
        let tracked = self.names.read().get(name).cloned()?;
        let mut current = tracked.first_checks.lock();
        if let Some(running) = current.as_ref().filter(|running| *running.borrow() > 0) {
            return Some(running.clone());
        }
        let instances = tracked.instances.lock();
        let unchecked: Vec<_> = instances
            .iter()
            .filter(|ip| !self.states.is_checked(**ip))
            .collect();
        if unchecked.is_empty() {
            return None;
        }
        let first_checks = FirstChecks::new(unchecked.len());
        for ip in unchecked {
            // A check that is already queued becomes urgent by the repeated command.
            registry.wait(*ip, first_checks.clone());
            self.send(WatcherCommand::Check {
                ip: *ip,
                urgent: true,
            });
        }
        *current = Some(first_checks.clone());
        Some(first_checks)
    }

    /// Returns the time of the name's last use on either path.
    fn last_use(&self, tracked: &Tracked) -> u64 {
        let used_there = self.fast_path.last_used_ns(&tracked.name).unwrap_or(0);
        tracked.last_use.load(Ordering::Relaxed).max(used_there)
    }

    /// Sends a command to the watcher's thread. Commands are dropped after the thread has ended.
    fn send(&self, command: WatcherCommand) {
        // Counted first: the thread may take the command before this function continues, and the
        // number would wrap.
        self.queued.fetch_add(1, Ordering::Relaxed);
        if self.commands.send(command).is_err() {
            self.queued.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Records that the watcher's thread has taken this many commands.
    pub(super) fn taken(&self, count: usize) {
        self.queued.fetch_sub(count, Ordering::Relaxed);
    }
}

impl Admission for Tracker {
    /// Returns whether the fast path may answer a resolved name now: its first query must reach
    /// userspace, which starts the checks, and a y1 name needs all its instances checked.
    fn may_publish(&self, name: &Name, resolution: &Resolution) -> bool {
        let Checks {
            instances,
            tracked,
            synchronous,
        } = &resolution.checks;
        if !tracked {
            return true;
        }
        self.is_tracked(name)
            && (!synchronous || instances.iter().all(|ip| self.states.is_checked(*ip)))
    }
}

impl Tracked {
    /// Records a use at this time, unless a later one, or one in the same tick, is known. Returns whether the
    /// name is still tracked.
    #[inline]
    fn touch(&self, now: u64) -> bool {
        // A plain load, because an atomic maximum takes the cache line from other CPUs even if it changes nothing.
        if self.last_use.load(Ordering::Relaxed) < now {
            self.last_use.fetch_max(now, Ordering::Relaxed);
        }
        !self.is_dropped.load(Ordering::Acquire)
    }

    /// Replaces the needed instances and returns the previous ones.
    fn replace_instances(&self, instances: Box<[IpAddr]>) -> Box<[IpAddr]> {
        std::mem::replace(&mut *self.instances.lock(), instances)
    }
}

/// Returns the instances that need checks, sorted and without duplicates.
fn needed(checks: &Checks) -> Box<[IpAddr]> {
    let mut instances = checks.instances.clone();
    instances.sort_unstable();
    instances.dedup();
    instances.into()
}

//----------- Registry -----------------------------------------------------
//
// Bookkeeping of the tracker: names by last use, and instances by the names that need them.

/// All data that changes with the tracked names.
#[derive(Debug, Default)]
struct Registry {
    /// Every tracked name once, with a time not later than its last use; the exact time is read
    /// when the name reaches the top.
    order: BinaryHeap<Reverse<Use>>,
    instances: HashMap<IpAddr, TrackedInstance>,
}

/// A name with its last use as known to the heap.
#[derive(Debug)]
struct Use {
    at: u64,
    tracked: Arc<Tracked>,
}

/// An instance, and the reasons for tracking it.
#[derive(Debug, Default)]
struct TrackedInstance {
    /// Number of tracked names that need it; at least one.
    by: usize,
    /// Queries that wait for its first check.
    waiting: Vec<FirstChecks>,
}

/// Number of pending first checks that y1 queries wait for.
type FirstChecks = watch::Sender<usize>;

fn one_done(first_checks: &FirstChecks) {
    first_checks.send_modify(|left| *left -= 1);
}

impl Registry {
    /// Removes the least recently used name if its last use was before `moment`.
    ///
    /// Amortised O(log n): a name is reinserted only if it was used since it was last examined.
    fn pop_before(
        &mut self,
        moment: u64,
        last_use: impl Fn(&Tracked) -> u64,
    ) -> Option<Arc<Tracked>> {
        if self.oldest_use(last_use)? >= moment {
            return None;
        }
        let Reverse(Use { tracked, .. }) = self.order.pop()?;
        Some(tracked)
    }

    /// Returns the time of the least recent use, and moves that name to the top.
    fn oldest_use(&mut self, last_use: impl Fn(&Tracked) -> u64) -> Option<u64> {
        loop {
            let mut top = self.order.peek_mut()?;
            let used = last_use(&top.0.tracked);
            if used <= top.0.at {
                return Some(top.0.at);
            }
            // It sinks when `top` is dropped.
            top.0.at = used;
        }
    }

    /// Adds a name that needs the instance; returns whether it is the first.
    fn acquire(&mut self, ip: IpAddr) -> bool {
        let instance = self.instances.entry(ip).or_default();
        instance.by += 1;
        instance.by == 1
    }

    /// Removes a name that needs the instance; returns whether it was the last.
    fn release(&mut self, ip: IpAddr) -> bool {
        let Some(instance) = self.instances.get_mut(&ip) else {
            return false;
        };
        instance.by -= 1;
        if instance.by > 0 {
            return false;
        }
        let instance = self.instances.remove(&ip);
        // The instance will not be checked: release the waiting queries.
        instance
            .iter()
            .flat_map(|instance| &instance.waiting)
            .for_each(one_done);
        true
    }

    /// Adds the instance, which must be tracked, to the checks that `first_checks` waits for.
    fn wait(&mut self, ip: IpAddr, first_checks: FirstChecks) {
        match self.instances.get_mut(&ip) {
            Some(instance) => instance.waiting.push(first_checks),
            // No check of this instance will end.
            None => one_done(&first_checks),
        }
    }

    /// Takes the queries that wait for the first check of the instance; `None` if it is not tracked.
    fn take_waiting(&mut self, ip: IpAddr) -> Option<Vec<FirstChecks>> {
        self.instances
            .get_mut(&ip)
            .map(|instance| std::mem::take(&mut instance.waiting))
    }
}

impl Ord for Use {
    fn cmp(&self, other: &Self) -> cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

impl PartialOrd for Use {
    fn partial_cmp(&self, other: &Self) -> Option<cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Use {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Use {}
