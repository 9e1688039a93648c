//! Holds up the removal of many entries at once: a replaced folder or an empty file is more often a
//! mistake than the end of a fleet. Pure.

use std::time::{Duration, SystemTime};

/// Time after which a removal that was not confirmed takes effect.
const HOLD: Duration = Duration::from_secs(600);

/// Number of entries that may always disappear at once.
const FEW: usize = 10;

/// Decides whether entries may be removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Guard {
    /// Time at which the current removal was first seen.
    since: Option<SystemTime>,
    /// Number of removals that an operator confirmed.
    confirmed: usize,
}

/// Removals that wait for a confirmation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{missing} of {known} disappeared at once; they stay for 10 minutes, in which they can return: if this is \
     meant, run `bosh-dns-identity confirm-removals {missing}`"
)]
pub(crate) struct Held {
    missing: usize,
    known: usize,
}

impl Guard {
    /// Returns whether `missing` of `known` entries may be removed at `now`: at most max(10, 10 %),
    /// a confirmed number, or all that have been missing for ten minutes.
    pub(crate) fn check(&mut self, known: usize, missing: usize, now: SystemTime) -> Result<(), Held> {
        if missing <= FEW.max(known / 10) {
            self.since = None;
            return Ok(());
        }
        // A start in the future dates from before the clock was set back.
        let since = self.since.filter(|since| *since <= now).unwrap_or(now);
        self.since = Some(since);
        if missing <= self.confirmed || since + HOLD <= now {
            *self = Self::default();
            return Ok(());
        }
        Err(Held { missing, known })
    }

    /// Confirms the removal of up to `number` entries, once.
    pub(crate) fn confirm(&mut self, number: usize) {
        self.confirmed = number;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mass_removals_wait() {
        let mut guard = Guard::default();
        let start = SystemTime::now();
        assert_eq!(guard.check(50, 10, start), Ok(()));
        assert_eq!(guard.check(1000, 100, start), Ok(()));
        assert!(guard.check(50, 11, start).is_err());
        assert!(guard.check(50, 50, start + HOLD - Duration::from_secs(1)).is_err());
        assert_eq!(guard.check(50, 50, start + HOLD), Ok(()));
        assert!(guard.check(50, 50, start + HOLD).is_err(), "the next removal waits again");
        // The entries return.
        assert_eq!(guard.check(50, 0, start + HOLD), Ok(()));
        assert!(guard.check(50, 50, start + 2 * HOLD).is_err());
    }

    #[test]
    fn confirmation_counts_once() {
        let (mut guard, now) = (Guard::default(), SystemTime::now());
        guard.confirm(20);
        assert!(guard.check(100, 21, now).is_err());
        assert_eq!(guard.check(100, 20, now), Ok(()));
        assert!(guard.check(100, 20, now).is_err());
    }

    #[test]
    fn clock_set_back_prolongs_nothing() {
        let (mut guard, now) = (Guard::default(), SystemTime::now());
        assert!(guard.check(50, 50, now).is_err());
        let earlier = now - 10 * HOLD;
        assert!(guard.check(50, 50, earlier).is_err());
        assert_eq!(guard.check(50, 50, earlier + HOLD), Ok(()));
    }
}
