//! Renewal time of a pair: its window, early requests, and backoff after failures. Pure.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::{
    certificate::{Validity, unix},
    window::{RenewalWindow, Share},
};

/// Tolerated lead of a certificate's start over the local clock, because NTP corrects clocks in
/// small steps.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(60);

/// Delay after the first failure; doubles with every further failure.
const FIRST_DELAY: Duration = Duration::from_secs(1);

/// Maximum delay between attempts.
const LONGEST_DELAY: Duration = Duration::from_secs(300);

/// Renewal state of one pair.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    share: Share,
    validity: Option<Validity>,
    requested: Option<SystemTime>,
    failure: Option<Failure>,
}

/// Attempts that failed since the last success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Number of consecutive failed attempts.
    pub attempts: u32,
    /// Cause of the last failure, with the remedy.
    pub message: String,
    /// Earliest time of the next attempt.
    #[serde(with = "unix")]
    pub retry_at: SystemTime,
}

impl Schedule {
    /// Creates the schedule of a pair with this validity; `None` if there is no pair yet.
    pub fn new(share: Share, validity: Option<Validity>) -> Self {
        Self { share, validity, requested: None, failure: None }
    }

    /// Returns the validity of the pair in use.
    pub fn validity(&self) -> Option<Validity> {
        self.validity
    }

    /// Returns the current failure; `None` if the last attempt succeeded.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// Returns the time of the next attempt; it may be in the past.
    pub fn due(&self, now: SystemTime) -> SystemTime {
        let Some(validity) = self.validity else { return self.not_before_retry(now, now) };
        // The clock was set back: peers with a correct clock reject the pair.
        if validity.not_before > now + CLOCK_TOLERANCE {
            return self.not_before_retry(now, now);
        }
        let renewal = validity.not_before + RenewalWindow::of(validity.length()).moment(self.share);
        let due = self.requested.map_or(renewal, |requested| requested.min(renewal));
        self.not_before_retry(due, now)
    }

    /// Returns whether the pair is valid and its renewal window lasts at least `time` longer.
    pub fn can_wait(&self, now: SystemTime, time: Duration) -> bool {
        self.validity.is_some_and(|validity| {
            let end = validity.not_before + RenewalWindow::of(validity.length()).end;
            validity.not_before <= now && now + time < end
        })
    }

    fn not_before_retry(&self, due: SystemTime, now: SystemTime) -> SystemTime {
        match &self.failure {
            // A retry later than any delay dates from before the clock was set back.
            Some(failure) if failure.retry_at <= now + LONGEST_DELAY => due.max(failure.retry_at),
            _ => due,
        }
    }

    /// Requests a renewal ahead of its window, at the identity's share of `spread`.
    pub fn request(&mut self, now: SystemTime, spread: Duration) {
        let at = now + self.share.of_length(spread);
        self.requested = Some(self.requested.map_or(at, |earlier| earlier.min(at)));
    }

    /// Records a new pair.
    pub fn succeeded(&mut self, validity: Validity) {
        *self = Self::new(self.share, Some(validity));
    }

    /// Records a failed attempt; returns whether the failure is new and must be reported.
    pub fn failed(&mut self, now: SystemTime, message: String) -> bool {
        let before = self.failure.take();
        let attempts = before.as_ref().map_or(0, |failure| failure.attempts) + 1;
        let delay = FIRST_DELAY.saturating_mul(1 << (attempts - 1).min(16)).min(LONGEST_DELAY);
        let is_new = before.is_none_or(|before| before.message != message);
        self.failure = Some(Failure { attempts, message, retry_at: now + delay });
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn start() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(2_000_000_000)
    }

    fn day() -> Schedule {
        Schedule::new(Share::of("g1"), Some(Validity::starting(start(), 24 * HOUR)))
    }

    #[test]
    fn renewal_falls_in_window() {
        let due = day().due(start());
        let end = start() + 24 * HOUR - Duration::from_secs(1200);
        assert!(due >= start() + 23 * HOUR && due < end);
        assert!(day().can_wait(due, Duration::ZERO) && !day().can_wait(end, Duration::ZERO));
        assert!(!day().can_wait(start() - HOUR, Duration::ZERO), "not valid yet");
    }

    #[test]
    fn backoff_doubles_up_to_limit() {
        let mut schedule = day();
        let late = start() + 24 * HOUR;
        let mut delays = Vec::new();
        for _ in 0..12 {
            schedule.failed(late, "disk full".to_owned());
            delays.push(schedule.due(late).duration_since(late).unwrap().as_secs());
        }
        assert_eq!(delays, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]);
    }

    #[test]
    fn repeated_failure_is_reported_once() {
        let mut schedule = day();
        let reported = ["full", "full", "read-only", "read-only", "full"]
            .map(|cause| schedule.failed(start(), cause.to_owned()));
        assert_eq!(reported, [true, false, true, false, true]);
        schedule.succeeded(Validity::starting(start(), HOUR));
        assert!(schedule.failed(start(), "full".to_owned()));
    }

    #[test]
    fn clock_set_back_renews_now() {
        let earlier = start() - HOUR;
        assert_eq!(day().due(earlier), earlier);
        let slightly = start() - Duration::from_secs(5);
        assert!(day().due(slightly) > start(), "a small step renews nothing");
        let mut failing = day();
        failing.failed(start() + 100 * HOUR, "full".to_owned());
        assert_eq!(failing.due(earlier), earlier, "an old retry does not delay it");
    }

    #[test]
    fn requests_spread_but_hold() {
        let mut schedule = day();
        schedule.request(start(), HOUR);
        let due = schedule.due(start());
        assert!(due < start() + HOUR);
        schedule.request(start() + HOUR, HOUR);
        assert_eq!(schedule.due(start()), due, "an earlier request stands");
    }
}
