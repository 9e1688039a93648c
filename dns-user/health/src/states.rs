//! The health of every instance, for many concurrent readers.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    net::IpAddr,
    sync::atomic::{AtomicU64, Ordering},
};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use dns_core::resolve::{Health, HealthState};

/// Number of shards, so that a writer blocks few readers.
const SHARDS: usize = 32;

/// State of every checked instance, by address.
///
/// Readers and writers hold the lock of one shard only for a map look-up, so no query ever waits
/// for a check.
#[derive(Debug)]
pub struct HealthStates {
    shards: [RwLock<HashMap<IpAddr, InstanceHealth>>; SHARDS],
    hasher: RandomState,
    /// Incremented after each change.
    changes: AtomicU64,
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
        Self { state: HealthState::Unknown, groups: Box::default() }
    }

    /// Drops groups whose state equals the instance's, because they follow it anyway.
    fn condensed(self) -> Self {
        let Self { state, groups } = self;
        Self { state, groups: groups.into_iter().filter(|(_, of_group)| *of_group != state).collect() }
    }
}

impl HealthStates {
    /// Creates an empty set: no instance has been checked yet.
    pub fn new() -> Self {
        Self {
            shards: std::array::from_fn(|_| RwLock::default()),
            hasher: RandomState::new(),
            changes: AtomicU64::new(0),
        }
    }

    /// Records an instance's report. Returns whether the state differs from the previous one; a
    /// first report differs unless it is "unchecked".
    pub fn set(&self, ip: IpAddr, health: InstanceHealth) -> bool {
        let health = health.condensed();
        let mut shard = self.write(ip);
        let changed = match shard.get(&ip) {
            Some(old) => *old != health,
            None => health.state != HealthState::Unchecked || !health.groups.is_empty(),
        };
        shard.insert(ip, health);
        drop(shard);
        if changed {
            self.changes.fetch_add(1, Ordering::Release);
        }
        changed
    }

    /// Forgets the instance, which becomes unchecked again. Returns whether it was known.
    pub fn remove(&self, ip: IpAddr) -> bool {
        let was_known = self.write(ip).remove(&ip).is_some();
        if was_known {
            self.changes.fetch_add(1, Ordering::Release);
        }
        was_known
    }

    /// Returns the number of changes so far. A reader that sees the number after a change also sees
    /// the changed state.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
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

    /// Locks the shard of `ip` for reading.
    fn read(&self, ip: IpAddr) -> RwLockReadGuard<'_, HashMap<IpAddr, InstanceHealth>> {
        // A panic cannot leave the map half changed.
        self.shards[self.shard(ip)].read()
    }

    /// Locks the shard of `ip` for writing.
    fn write(&self, ip: IpAddr) -> RwLockWriteGuard<'_, HashMap<IpAddr, InstanceHealth>> {
        self.shards[self.shard(ip)].write()
    }

    /// Returns the index of the shard of `ip`.
    fn shard(&self, ip: IpAddr) -> usize {
        // The remainder is below SHARDS, so it fits.
        (self.hasher.hash_one(ip) % SHARDS as u64) as usize
    }
}

impl Default for HealthStates {
    fn default() -> Self {
        Self::new()
    }
}

impl Health for HealthStates {
    fn state(&self, ip: IpAddr, group: Option<&str>) -> HealthState {
        let shard = self.read(ip);
        let Some(health) = shard.get(&ip) else {
            return HealthState::Unchecked;
        };
        group
            .and_then(|wanted| health.groups.binary_search_by(|(id, _)| (**id).cmp(wanted)).ok())
            .map_or(health.state, |place| health.groups[place].1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_state_overrides_instance() {
        let states = HealthStates::new();
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
    fn forgotten_instance_is_unchecked() {
        let states = HealthStates::new();
        let ip = IpAddr::from([0; 16]);
        assert!(states.set(ip, InstanceHealth::unknown()));
        assert!(states.is_checked(ip));
        assert!(states.remove(ip));
        assert!(!states.remove(ip) && !states.is_checked(ip));
        assert_eq!(states.state(ip, Some("1")), HealthState::Unchecked);
    }
}
