//! The identities of a rotator, and the order in which they are due: a step costs the same for ten
//! identities and for ten thousand.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
    time::{Duration, SystemTime},
};

use super::identity::Identity;
use crate::profile::Guid;

/// Maximum number of overdue identities that are queued at once.
const BACKLOG: usize = 256;

/// Period over which identities are reissued after a change of the CA.
pub(super) const REISSUE_SPREAD: Duration = Duration::from_secs(300);

/// Identities by guid, and by the time at which they are due.
pub(super) struct Identities {
    all: BTreeMap<Guid, Identity>,
    /// Each identity once. The times are lower bounds: a failed attempt delays an identity, but moves
    /// it in the queue only at its turn.
    queue: BTreeSet<(SystemTime, Guid)>,
    /// Latest time at which a step began.
    latest: SystemTime,
}

impl Identities {
    pub(super) fn new(now: SystemTime) -> Self {
        Self { all: BTreeMap::new(), queue: BTreeSet::new(), latest: now }
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn get(&self, guid: &Guid) -> Option<&Identity> {
        self.all.get(guid)
    }

    pub(super) fn guids(&self) -> impl Iterator<Item = &Guid> {
        self.all.keys()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Identity> {
        self.all.values()
    }

    /// Returns all identities for changes that make none due earlier.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (&Guid, &mut Identity)> {
        self.all.iter_mut()
    }

    /// Adds an identity, or replaces the one with its guid.
    pub(super) fn insert(&mut self, mut identity: Identity, now: SystemTime) {
        let guid = identity.container.guid.clone();
        self.remove(&guid);
        identity.queued = identity.schedule.due(now);
        self.queue.insert((identity.queued, guid.clone()));
        self.all.insert(guid, identity);
    }

    pub(super) fn remove(&mut self, guid: &Guid) -> Option<Identity> {
        let (guid, identity) = self.all.remove_entry(guid)?;
        self.queue.remove(&(identity.queued, guid));
        Some(identity)
    }

    /// Applies a change to all identities, which may make them due earlier.
    pub(super) fn change_all(&mut self, now: SystemTime, mut change: impl FnMut(&mut Identity)) {
        self.queue.clear();
        for (guid, identity) in &mut self.all {
            change(identity);
            identity.queued = identity.schedule.due(now);
            self.queue.insert((identity.queued, guid.clone()));
        }
    }

    /// Applies a change, which may make identities due earlier, to the next `count` identities after
    /// a guid; returns the last one, or `None` at the end.
    pub(super) fn change_next(
        &mut self,
        after: Option<&Guid>,
        count: usize,
        now: SystemTime,
        mut change: impl FnMut(&Guid, &mut Identity),
    ) -> Option<Guid> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let (mut passed, mut last) = (0, None);
        for (guid, identity) in self.all.range_mut::<Guid, _>((from, Bound::Unbounded)).take(count) {
            (passed, last) = (passed + 1, Some(guid));
            change(guid, identity);
            let due = identity.schedule.due(now);
            if due < identity.queued {
                self.queue.remove(&(identity.queued, guid.clone()));
                identity.queued = due;
                self.queue.insert((due, guid.clone()));
            }
        }
        last.filter(|_| passed == count).cloned()
    }

    /// Notices a clock that was set back, which makes identities due earlier.
    pub(super) fn begin_step(&mut self, now: SystemTime) {
        if now < self.latest {
            self.change_all(now, |_| {});
        }
        self.latest = now;
    }

    /// Returns a time before which no identity is due; `None` without identities.
    pub(super) fn next_due(&self) -> Option<SystemTime> {
        self.queue.first().map(|(at, _)| *at)
    }

    /// Returns the most urgent identities that are due, the first to renew last: those at the end of
    /// their window, then by due time.
    pub(super) fn overdue(&mut self, now: SystemTime) -> Vec<Guid> {
        let (mut due, mut delayed) = (Vec::new(), Vec::new());
        for (_, guid) in self.queue.iter().take_while(|(at, _)| *at <= now) {
            let schedule = &self.all[guid].schedule;
            match schedule.due(now) {
                at if at <= now => due.push((schedule.can_wait(now, REISSUE_SPREAD), at, guid)),
                _ => delayed.push(guid.clone()),
            }
        }
        if due.len() > BACKLOG {
            due.select_nth_unstable(BACKLOG);
            due.truncate(BACKLOG);
        }
        due.sort_unstable_by(|one, other| other.cmp(one));
        let due = due.into_iter().map(|(_, _, guid)| guid.clone()).collect();
        for guid in delayed {
            if let Some(identity) = self.remove(&guid) {
                self.insert(identity, now);
            }
        }
        due
    }
}
