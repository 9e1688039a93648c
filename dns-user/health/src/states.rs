//! The health of every instance, for many concurrent readers.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    net::IpAddr,
    sync::atomic::{AtomicU64, Ordering},
};

use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

use dns_core::resolve::{Health, HealthState};

/// Number of shards, so that a writer blocks few readers.
const SHARDS: usize = 32;

/// State of every checked instance, by address.
///
/// Readers and writers hold the lock of one shard only for a map look-up, so no query ever waits for a check.
#[derive(Debug)]
pub struct HealthStates {
    shards: [RwLock<HashMap<IpAddr, InstanceHealth>>; SHARDS],
    hasher: RandomState,
    /// Held while a state changes, so that changes have numbers in the order in which they are announced.
    changing: Mutex<()>,
    /// Number of the latest change of each part of the instances ([`InstanceSet`]), written before `changes`.
    changed: [AtomicU64; InstanceSet::PARTS],
    changes: AtomicU64,
}

/// A superset of some instances: the parts, of [`Self::PARTS`] by hash of the address, in which they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InstanceSet(u64);

impl InstanceSet {
    const PARTS: usize = u64::BITS as usize;

    /// Returns the numbers of the parts.
    fn parts(self) -> impl Iterator<Item = usize> {
        (0..Self::PARTS).filter(move |part| self.0 >> part & 1 != 0)
    }
}

/// Health reported by one instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceHealth {
    /// State of the whole instance.
    pub state: HealthState,
    /// State of link groups, sorted by group id, without duplicates.
    pub groups: Box<[(Box<str>, HealthState)]>,
}

impl InstanceHealth {
    /// Returns the state of an instance without a usable answer.
    pub fn unknown() -> Self {
        Self {
            state: HealthState::Unknown,
            groups: Box::default(),
        }
    }

    /// Drops groups whose state equals the instance's, because they follow it anyway.
    fn condensed(self) -> Self {
        let Self { state, groups } = self;
        Self {
            state,
            groups: groups
                .into_iter()
                .filter(|(_, of_group)| *of_group != state)
                .collect(),
        }
    }
}

impl Default for HealthStates {
    /// Creates an empty set: no instance has been checked yet.
    fn default() -> Self {
        Self {
            shards: std::array::from_fn(|_| RwLock::default()),
            hasher: RandomState::new(),
            changing: Mutex::default(),
            changed: [const { AtomicU64::new(0) }; InstanceSet::PARTS],
            changes: AtomicU64::new(0),
        }
    }
}

impl HealthStates {
    /// Records an instance's report. Returns whether the state differs from the previous one; a
    /// first report differs unless it is "unchecked".
    pub fn set(&self, ip: IpAddr, health: InstanceHealth) -> bool {
        let health = health.condensed();
        let _in_order = self.changing.lock();
        let mut shard = self.write(ip);
        let changed = match shard.get(&ip) {
            Some(old) => *old != health,
            // An instance without an entry counts as unchecked already.
            None => health.state != HealthState::Unchecked || !health.groups.is_empty(),
        };
        shard.insert(ip, health);
        // Readers need not wait for the announcement: `changing` keeps its order.
        drop(shard);
        if changed {
            self.announce(ip);
        }
        changed
    }

    /// Forgets the instance, which becomes unchecked again. Returns whether it was known.
    pub fn remove(&self, ip: IpAddr) -> bool {
        let _in_order = self.changing.lock();
        let was_known = self.write(ip).remove(&ip).is_some();
        if was_known {
            self.announce(ip);
        }
        was_known
    }

    /// Counts a change of an instance, while `changing` is held.
    fn announce(&self, ip: IpAddr) {
        let number = self.changes.load(Ordering::Relaxed) + 1;
        // First: a reader that sees the number must see in which part the change was.
        self.changed[self.part(ip)].store(number, Ordering::Release);
        self.changes.store(number, Ordering::Release);
    }

    /// Returns the number of changes so far. A reader that sees the number after a change also sees
    /// the changed state.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Returns the parts in which these instances are.
    pub fn set_of(&self, instances: &[IpAddr]) -> InstanceSet {
        InstanceSet(
            instances
                .iter()
                .fold(0, |set, ip| set | 1 << self.part(*ip)),
        )
    }

    /// Returns whether an instance of the set may have changed after the first `changes` changes. Writes
    /// nothing, so any number of CPUs may ask.
    pub fn has_changed(&self, set: InstanceSet, changes: u64) -> bool {
        set.parts()
            .any(|part| self.changed[part].load(Ordering::Acquire) > changes)
    }

    /// Returns whether the instance has been checked since tracking began.
    pub fn is_checked(&self, ip: IpAddr) -> bool {
        self.read(ip).contains_key(&ip)
    }

    /// Returns the number of instances in each state, in the order running, failing, unknown,
    /// unchecked (only instances that report themselves as such).
    pub fn counts(&self) -> [usize; 4] {
        let mut counts = [0; 4];
        for shard in &self.shards {
            for health in shard.read().values() {
                counts[match health.state {
                    HealthState::Running => 0,
                    HealthState::Failing => 1,
                    HealthState::Unknown => 2,
                    HealthState::Unchecked => 3,
                }] += 1;
            }
        }
        counts
    }

    fn read(&self, ip: IpAddr) -> RwLockReadGuard<'_, HashMap<IpAddr, InstanceHealth>> {
        // A panic cannot leave the map half changed.
        self.shards[self.shard(ip)].read()
    }

    fn write(&self, ip: IpAddr) -> RwLockWriteGuard<'_, HashMap<IpAddr, InstanceHealth>> {
        self.shards[self.shard(ip)].write()
    }

    fn shard(&self, ip: IpAddr) -> usize {
        // The remainder is below SHARDS, so it fits.
        (self.hasher.hash_one(ip) % SHARDS as u64) as usize
    }

    fn part(&self, ip: IpAddr) -> usize {
        (self.hasher.hash_one(ip) % InstanceSet::PARTS as u64) as usize
    }
}

impl Health for HealthStates {
    fn state(&self, ip: IpAddr, group: Option<&str>) -> HealthState {
        let shard = self.read(ip);
        let Some(health) = shard.get(&ip) else {
            return HealthState::Unchecked;
        };
        if let Some(wanted) = group
            && let Ok(place) = health.groups.binary_search_by(|(id, _)| (**id).cmp(wanted))
        {
            return health.groups[place].1;
        }
        health.state
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_state_overrides_instance() {
        let states = HealthStates::default();
        let ip = IpAddr::from([10, 0, 0, 1]);
        assert_eq!(states.state(ip, None), HealthState::Unchecked);
        let health = InstanceHealth {
            state: HealthState::Failing,
            groups: [("7".into(), HealthState::Running)].into(),
        };
        assert!(states.set(ip, health.clone()));
        assert!(!states.set(ip, health));
        assert_eq!(states.state(ip, None), HealthState::Failing);
        assert_eq!(states.state(ip, Some("7")), HealthState::Running);
        assert_eq!(states.state(ip, Some("8")), HealthState::Failing);
        assert_eq!(states.counts(), [0, 1, 0, 0]);
    }

    #[test]
    fn changes_concern_few_instances() {
        let states = HealthStates::default();
        let ips: Vec<IpAddr> = (0..=255)
            .map(|last| IpAddr::from([10, 0, 0, last]))
            .collect();
        let sets: Vec<InstanceSet> = ips.iter().map(|ip| states.set_of(&[*ip])).collect();
        assert!(states.set(ips[0], InstanceHealth::unknown()));
        let after = states.changes();
        let changed = sets
            .iter()
            .filter(|set| states.has_changed(**set, after - 1))
            .count();
        assert!(states.has_changed(sets[0], after - 1) && !states.has_changed(sets[0], after));
        // One of 64 on average.
        assert!(changed < ips.len() / 4, "{changed}");
        assert!(states.has_changed(states.set_of(&ips), after - 1));
        assert!(
            !states.has_changed(InstanceSet::default(), 0),
            "a name without checks"
        );
        assert!(!states.set(ips[0], InstanceHealth::unknown()));
        assert_eq!(states.changes(), after, "nothing has changed");
        assert!(states.remove(ips[0]) && states.has_changed(sets[0], after));
    }

    #[test]
    fn forgotten_instance_is_unchecked() {
        let states = HealthStates::default();
        let ip = IpAddr::from([0; 16]);
        assert!(states.set(ip, InstanceHealth::unknown()));
        assert!(states.is_checked(ip));
        assert!(states.remove(ip));
        assert!(!states.remove(ip) && !states.is_checked(ip));
        assert_eq!(states.state(ip, Some("1")), HealthState::Unchecked);
    }

    #[test]
    fn first_report_without_news_changes_nothing() {
        let ip = IpAddr::from([10, 0, 0, 1]);
        let health = |state, groups: &[(&str, HealthState)]| InstanceHealth {
            state,
            groups: groups
                .iter()
                .map(|(group, state)| ((*group).into(), *state))
                .collect(),
        };
        for (health, differs) in [
            (health(HealthState::Unchecked, &[]), false),
            // Follows the instance, so it says nothing.
            (
                health(HealthState::Unchecked, &[("1", HealthState::Unchecked)]),
                false,
            ),
            (
                health(HealthState::Unchecked, &[("1", HealthState::Failing)]),
                true,
            ),
            (health(HealthState::Running, &[]), true),
            (health(HealthState::Unknown, &[]), true),
        ] {
            let states = HealthStates::default();
            assert_eq!(states.set(ip, health.clone()), differs, "{health:?}");
            assert_eq!(states.changes(), u64::from(differs), "{health:?}");
            assert!(states.is_checked(ip) && !states.set(ip, health));
        }
    }

    #[test]
    fn instances_are_counted_by_state() {
        let states = HealthStates::default();
        let all = [
            HealthState::Running,
            HealthState::Failing,
            HealthState::Unknown,
            HealthState::Unchecked,
        ];
        let mut last = 0;
        for (count, state) in (1..).zip(all) {
            for _ in 0..count {
                last += 1;
                let groups = Box::default();
                states.set(
                    IpAddr::from([10, 0, 0, last]),
                    InstanceHealth { state, groups },
                );
            }
        }
        assert_eq!(states.counts(), [1, 2, 3, 4]);
        let changed = states.changes();
        states.set(IpAddr::from([10, 0, 0, 1]), InstanceHealth::unknown());
        assert_eq!(
            (states.counts(), states.changes()),
            ([0, 2, 4, 4], changed + 1)
        );
    }

    #[test]
    fn sets_have_the_parts_of_their_instances() {
        let states = HealthStates::default();
        let ips: Vec<IpAddr> = (0..=255).map(|last| [10, 0, 0, last].into()).collect();
        let mut parts: Vec<usize> = Vec::new();
        for ip in &ips {
            let own: Vec<usize> = states.set_of(&[*ip]).parts().collect();
            assert_eq!(own, [states.part(*ip)]);
            parts.extend(own);
        }
        parts.sort_unstable();
        parts.dedup();
        assert_eq!(states.set_of(&ips).parts().collect::<Vec<_>>(), parts);
        // All but a few of 64 parts have one of 256 instances.
        assert!(parts.len() > 32, "{parts:?}");
    }

    #[test]
    fn groups_are_found_in_lists() {
        let states = HealthStates::default();
        let ip = IpAddr::from([10, 0, 0, 1]);
        let groups = [
            ("1", HealthState::Failing),
            ("2", HealthState::Running),
            ("3", HealthState::Unknown),
            ("5", HealthState::Unchecked),
        ];
        let health = InstanceHealth {
            state: HealthState::Running,
            groups: groups.map(|(group, state)| (group.into(), state)).into(),
        };
        assert!(states.set(ip, health.clone()));
        for (group, expected) in [
            (None, HealthState::Running),
            (Some("1"), HealthState::Failing),
            // Follows the instance.
            (Some("2"), HealthState::Running),
            (Some("3"), HealthState::Unknown),
            (Some("4"), HealthState::Running),
            (Some("5"), HealthState::Unchecked),
        ] {
            assert_eq!(states.state(ip, group), expected, "{group:?}");
        }
        let kept: Vec<String> = health
            .condensed()
            .groups
            .iter()
            .map(|(group, _)| group.to_string())
            .collect();
        assert_eq!(kept, ["1", "3", "5"]);
    }

    #[test]
    fn changes_are_numbered() {
        let states = HealthStates::default();
        let [one, another] = [1, 2].map(|last| IpAddr::from([10, 0, 0, last]));
        assert_eq!(states.changes(), 0);
        for (ip, expected) in [(one, 1), (another, 2)] {
            states.set(ip, InstanceHealth::unknown());
            assert_eq!(states.changes(), expected);
            let set = states.set_of(&[ip]);
            assert!(states.has_changed(set, expected - 1) && !states.has_changed(set, expected));
        }
        assert!(!states.remove(IpAddr::from([10, 0, 0, 3])));
        assert_eq!(states.changes(), 2);
        assert!(states.remove(one));
        assert_eq!((states.changes(), states.counts()), (3, [0, 0, 1, 0]));
        assert_eq!(InstanceHealth::unknown().state, HealthState::Unknown);
    }

    #[test]
    fn instances_are_spread_over_shards() {
        let states = HealthStates::default();
        for last in 0..=255 {
            states.set([10, 0, 0, last].into(), InstanceHealth::unknown());
        }
        let used = states
            .shards
            .iter()
            .filter(|shard| !shard.read().is_empty());
        // Nearly all of 32 shards have one of 256 instances.
        assert!(used.count() > 16);
        assert_eq!(states.counts(), [0, 0, 256, 0]);
    }
}
