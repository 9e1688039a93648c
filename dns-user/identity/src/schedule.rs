//! Time of a pair's renewal: its window, early requests, clock skew, and backoff after failures. Pure.

use std::time::{Duration, SystemTime};

use aws_lc_rs::digest;
use dns_kit::backoff;
use serde::{Deserialize, Serialize};

use crate::{
    authority::date,
    certificate::{Validity, ValidityState, unix},
};

/// Tolerated lead of a certificate's start over the local clock, because NTP corrects clocks in small steps.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(60);

/// Delay after the first failure; doubles with every further failure.
const FIRST_DELAY: Duration = Duration::from_secs(1);

/// Maximum delay between attempts.
const MAX_DELAY: Duration = Duration::from_secs(300);

/// Renewal state of one pair.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    share: Share,
    pub(crate) validity: Option<Validity>,
    /// Lead of the certificate's start over the local clock when the pair was issued. The issuer's
    /// clock is ahead by that much, so a further pair would not be valid earlier.
    lead: Duration,
    /// Requested time of a renewal, and how far ahead it was at most.
    requested: Option<(SystemTime, Duration)>,
    pub(crate) failure: Option<Failure>,
    /// Consecutive pairs that were due as soon as they were issued.
    hasty: u32,
    /// Earliest renewal after such a pair.
    hold: Option<SystemTime>,
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
        Self {
            share,
            validity,
            lead: Duration::ZERO,
            requested: None,
            failure: None,
            hasty: 0,
            hold: None,
        }
    }

    /// Formats the end of the pair's validity; `-` without a pair.
    pub(crate) fn ends(&self) -> String {
        match self.validity {
            Some(validity) => date(validity.not_after),
            None => "-".to_owned(),
        }
    }

    /// Returns the end of the renewal window: a healthy pair is renewed before.
    pub fn deadline(&self) -> Option<SystemTime> {
        let validity = self.validity?;
        Some(validity.not_before + RenewalWindow::of(validity.length()).end)
    }

    /// Returns the time of the next attempt; it may be in the past.
    pub fn due(&self, now: SystemTime) -> SystemTime {
        // An attempt that failed is repeated even if the pair is not due by the present clock: only a success
        // ends the failure.
        let due = self
            .retry_at(now)
            .unwrap_or_else(|| self.due_by_validity(now));
        match self.hold {
            Some(hold) if is_delay(hold, now) => due.max(hold),
            _ => due,
        }
    }

    /// Returns the time of the next attempt after a failure; `None` without one.
    pub fn retry_at(&self, now: SystemTime) -> Option<SystemTime> {
        let retry_at = self.failure.as_ref()?.retry_at;
        Some(if is_delay(retry_at, now) {
            retry_at
        } else {
            now
        })
    }

    /// Records that what failed has succeeded in another way than by a new pair.
    pub(crate) fn mended(&mut self) {
        self.failure = None;
    }

    fn due_by_validity(&self, now: SystemTime) -> SystemTime {
        let Some(validity) = self.validity else {
            return now;
        };
        // The clock was set back: peers with a correct clock reject the pair.
        if validity.standing(now + self.lead + CLOCK_TOLERANCE) == ValidityState::NotYet {
            return now;
        }
        // In the reference, containers that were started together renew together: it has no jitter.
        let renewal = validity.not_before + RenewalWindow::of(validity.length()).moment(self.share);
        match self.requested {
            None => renewal,
            // Requested before the clock was set back.
            Some((requested, spread)) if requested > now + spread => now,
            Some((requested, _)) => requested.min(renewal),
        }
    }

    /// Returns whether the pair is valid and its renewal window lasts at least `time` longer.
    pub fn can_wait(&self, now: SystemTime, time: Duration) -> bool {
        self.validity
            .is_some_and(|validity| validity.standing(now) == ValidityState::Valid)
            && self.deadline().is_some_and(|end| now + time < end)
    }

    /// Requests a renewal ahead of its window, at the identity's share of `spread`.
    pub fn request(&mut self, now: SystemTime, spread: Duration) {
        let at = now + self.share.of_length(spread);
        if self.requested.is_none_or(|(earlier, _)| at < earlier) {
            self.requested = Some((at, spread));
        }
    }

    /// Records a new pair. A pair that is due at once, because the clocks of this machine and of the
    /// issuer disagree or the CA ends, is renewed with increasing delays.
    pub fn succeeded(&mut self, now: SystemTime, validity: Validity) {
        let hasty = self.hasty;
        *self = Self::new(self.share, Some(validity));
        self.lead = validity.not_before.duration_since(now).unwrap_or_default();
        if self.due_by_validity(now) <= now {
            self.hasty = hasty + 1;
            self.hold = Some(now + delay(self.hasty));
        }
    }

    /// Records that the pair is lost or damaged: it is due at once.
    pub fn lost(&mut self) {
        self.validity = None;
    }

    /// Records a failed attempt; returns whether the failure is new and must be reported.
    pub fn failed(&mut self, now: SystemTime, message: String) -> bool {
        let before = self.failure.take();
        let attempts = before
            .as_ref()
            .map_or(0, |failure| failure.attempts)
            .saturating_add(1);
        let is_new = before.is_none_or(|before| before.message != message);
        self.failure = Some(Failure {
            attempts,
            message,
            retry_at: now + delay(attempts),
        });
        is_new
    }
}

/// Returns whether a time is at most the longest delay away. A later one dates from before the clock was set back.
fn is_delay(at: SystemTime, now: SystemTime) -> bool {
    at <= now + MAX_DELAY
}

fn delay(attempts: u32) -> Duration {
    backoff::pause(FIRST_DELAY, MAX_DELAY, attempts)
}

//----------- RenewalWindow ---------------------------------------------------

/// Longest validity for which the window is a fraction of it (seed document 004).
const SHORT: Duration = Duration::from_secs(4 * 3600);

/// Renewal window, as offsets from the start of the validity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RenewalWindow {
    /// First time at which a renewal is allowed.
    pub start: Duration,
    /// Last time at which a healthy rotator renews.
    pub end: Duration,
}

impl RenewalWindow {
    /// Returns the documented window. For a validity above 4 h: from 1 h to 20 min before the end.
    /// Otherwise: from 1/4 to 1/12 of the validity before the end.
    pub fn of(validity: Duration) -> Self {
        let (early, late) = if validity > SHORT {
            (Duration::from_secs(3600), Duration::from_secs(20 * 60))
        } else {
            (validity / 4, validity / 12)
        };
        Self {
            start: validity - early,
            end: validity - late,
        }
    }

    /// Returns the offset at which an identity is renewed: the start of the window plus the
    /// identity's share of its length. This spreads renewals, and a restart changes nothing.
    pub fn moment(&self, share: Share) -> Duration {
        self.start + share.of_length(self.end - self.start)
    }
}

/// Fraction below one, derived from a guid.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share(f64);

impl Share {
    /// Returns the share of `guid`: the first bits of its SHA-256 as a fraction.
    pub fn of(guid: &str) -> Self {
        let hash = digest::digest(&digest::SHA256, guid.as_bytes());
        let mut first = [0; 8];
        first.copy_from_slice(&hash.as_ref()[..8]);
        // 53 bits are exact in an f64, so the fraction stays below one.
        Self((u64::from_be_bytes(first) >> 11) as f64 / (1_u64 << 53) as f64)
    }

    /// Returns this share of `length`.
    pub fn of_length(self, length: Duration) -> Duration {
        length.mul_f64(self.0)
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
        Schedule::new(
            Share::of("g1"),
            Some(Validity::starting(start(), 24 * HOUR)),
        )
    }

    #[test]
    fn renewal_falls_in_window() {
        let due = day().due(start());
        let end = start() + 24 * HOUR - Duration::from_secs(1200);
        assert!(due >= start() + 23 * HOUR && due < end);
        assert!(day().can_wait(due, Duration::ZERO) && !day().can_wait(end, Duration::ZERO));
        assert!(
            !day().can_wait(start() - HOUR, Duration::ZERO),
            "not valid yet"
        );
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
        schedule.succeeded(start(), Validity::starting(start(), HOUR));
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
        assert_eq!(
            failing.due(earlier),
            earlier,
            "an old retry does not delay it"
        );
    }

    /// Forty days ahead, attempts fail; the pair is not due by the right clock.
    #[test]
    fn failure_of_a_wrong_clock_is_retried_by_the_right_one() {
        let mut schedule = day();
        let right = start() + HOUR;
        let wrong = start() + 40 * 24 * HOUR;
        schedule.failed(wrong, "the CA expired".to_owned());
        assert_eq!(schedule.due(right), right);
        // If it fails again, the usual delays follow.
        schedule.failed(right, "disk full".to_owned());
        assert_eq!(schedule.due(right), right + 2 * FIRST_DELAY);
        schedule.succeeded(right, Validity::starting(right, 24 * HOUR));
        assert!(schedule.due(right) > right + 20 * HOUR);
    }

    #[test]
    fn requests_spread_but_hold() {
        let mut schedule = day();
        schedule.request(start(), HOUR);
        let due = schedule.due(start());
        assert!(due < start() + HOUR);
        schedule.request(start() + HOUR, HOUR);
        assert_eq!(schedule.due(start()), due, "an earlier request stands");
        // A request by a clock that was far ahead is not left for later.
        let mut schedule = day();
        schedule.request(start() + 40 * 24 * HOUR, HOUR);
        assert_eq!(schedule.due(start()), start());
    }

    #[test]
    fn slow_clock_renews_once() {
        let lead = Duration::from_secs(600);
        let mut schedule = day();
        schedule.succeeded(start() - lead, Validity::starting(start(), 24 * HOUR));
        for passed in [0, 1, 60, 600, 3600] {
            let now = start() - lead + Duration::from_secs(passed);
            assert!(schedule.due(now) > now + HOUR, "{passed} s later");
        }
        let earlier = start() - 2 * lead;
        assert_eq!(schedule.due(earlier), earlier, "a further step back renews");
    }

    #[test]
    fn pair_due_at_once_backs_off() {
        let mut schedule = day();
        // The local clock is two days ahead of the issuer's.
        let mut now = start() + 48 * HOUR;
        let mut delays = Vec::new();
        for _ in 0..10 {
            schedule.succeeded(now, Validity::starting(start(), 24 * HOUR));
            let due = schedule.due(now);
            delays.push(due.duration_since(now).unwrap().as_secs());
            now = due;
        }
        assert_eq!(delays, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]);
        schedule.succeeded(now, Validity::starting(now, 24 * HOUR));
        assert_eq!(schedule.hasty, 0);
    }

    #[test]
    fn lost_pair_is_due_now() {
        let mut schedule = day();
        schedule.lost();
        assert_eq!(schedule.due(start()), start());
        assert!(!schedule.can_wait(start(), Duration::ZERO));
    }

    #[test]
    fn renewals_spread_over_window() {
        let window = RenewalWindow::of(Duration::from_secs(24 * 3600));
        let length = window.end - window.start;
        let mut tenths = [0; 10];
        for number in 0..1000 {
            let moment = window.moment(Share::of(&format!("container-{number}")));
            assert!(moment >= window.start && moment < window.end);
            let tenth = (moment - window.start).as_secs_f64() / length.as_secs_f64() * 10.0;
            tenths[tenth as usize] += 1;
        }
        assert!(
            tenths.iter().all(|&count| (60..=140).contains(&count)),
            "{tenths:?}"
        );
    }

    #[test]
    fn moment_survives_restart() {
        // A literal, because a change of the hash would move every renewal at an upgrade.
        assert_eq!(
            Share::of("")
                .of_length(Duration::from_secs(1 << 20))
                .as_secs(),
            0xe3b0_c442 >> 12
        );
    }

    #[test]
    fn windows_are_documented() {
        const MINUTE: Duration = Duration::from_secs(60);
        for (validity, start, end) in [
            (24 * HOUR, 23 * HOUR, 24 * HOUR - 20 * MINUTE),
            (5 * HOUR, 4 * HOUR, 5 * HOUR - 20 * MINUTE),
            (4 * HOUR, 3 * HOUR, 4 * HOUR - 20 * MINUTE),
            (2 * HOUR, 90 * MINUTE, 110 * MINUTE),
            (HOUR, 45 * MINUTE, 55 * MINUTE),
        ] {
            let window = RenewalWindow { start, end };
            assert_eq!(RenewalWindow::of(validity), window, "{validity:?}");
        }
        assert_eq!(day().deadline(), Some(start() + 24 * HOUR - 20 * MINUTE));
        assert_eq!(Schedule::new(Share::of("g1"), None).deadline(), None);
    }

    #[test]
    fn bounds_of_times_are_exact() {
        let second = Duration::from_secs(1);
        // A start less than a minute ahead is no reason to renew.
        let ahead = start() - CLOCK_TOLERANCE;
        assert!(day().due(ahead) > start());
        assert_eq!(day().due(ahead - second), ahead - second);
        let end = day().deadline().unwrap();
        assert!(day().can_wait(end - HOUR - second, HOUR));
        assert!(!day().can_wait(end - HOUR, HOUR));
        // A retry or a pause of the longest delay is one, a longer one dates from another clock.
        for (delay, is_one) in [(MAX_DELAY, true), (MAX_DELAY + second, false)] {
            assert_eq!(is_delay(start() + delay, start()), is_one);
            let mut schedule = day();
            schedule.failure = Some(Failure {
                attempts: 1,
                message: String::new(),
                retry_at: start() + delay,
            });
            let expected = if is_one { start() + delay } else { start() };
            assert_eq!(schedule.due(start()), expected);
            schedule.mended();
            assert_eq!(schedule.retry_at(start()), None);
            schedule.lost();
            schedule.hold = Some(start() + delay);
            assert_eq!(schedule.due(start()), expected);
        }
        // A request is taken back by a clock that was set back, not by a second.
        let mut schedule = day();
        schedule.requested = Some((start() + HOUR, HOUR));
        assert_eq!(schedule.due(start()), start() + HOUR);
        assert_eq!(schedule.due(start() - second), start() - second);
    }

    #[test]
    fn earliest_request_counts() {
        let mut schedule = day();
        // 0.4417 of an hour and of two hours.
        schedule.request(start(), 2 * HOUR);
        let seconds = |schedule: &Schedule| {
            let due = schedule.due(start()).duration_since(start());
            due.unwrap().as_secs()
        };
        assert_eq!(seconds(&schedule), 3180);
        schedule.request(start(), HOUR);
        assert_eq!(seconds(&schedule), 1590);
        schedule.request(start(), 2 * HOUR);
        assert_eq!(seconds(&schedule), 1590);
        // Not later than its window allows.
        let mut late = day();
        late.request(start() + 23 * HOUR, 24 * HOUR);
        let now = start() + 23 * HOUR;
        assert_eq!(late.due(now), day().due(now));
        assert_eq!(day().ends(), "2033-05-19 03:33:20 UTC");
        assert_eq!(Schedule::new(Share::of("g1"), None).ends(), "-");
    }

    #[test]
    fn success_ends_requests_and_failures() {
        let mut schedule = day();
        schedule.failed(start(), "full".to_owned());
        schedule.failed(start(), "full".to_owned());
        assert_eq!(
            schedule.failure,
            Some(Failure {
                attempts: 2,
                message: "full".to_owned(),
                retry_at: start() + Duration::from_secs(2),
            })
        );
        schedule.request(start(), HOUR);
        let validity = Validity::starting(start(), 24 * HOUR);
        schedule.succeeded(start(), validity);
        assert_eq!(schedule, day());
        // Attempts are counted without an end.
        schedule.failure = Some(Failure {
            attempts: u32::MAX,
            message: String::new(),
            retry_at: start(),
        });
        schedule.failed(start(), "full".to_owned());
        let failure = schedule.failure.unwrap();
        assert_eq!(failure.attempts, u32::MAX);
        assert_eq!(failure.retry_at, start() + MAX_DELAY);
        assert_eq!(
            serde_json::to_string(&failure).unwrap(),
            r#"{"attempts":4294967295,"message":"full","retry_at":2000000300}"#
        );
    }

    #[test]
    fn shares_are_spread_evenly() {
        // The first 53 bits of the SHA-256.
        assert_eq!(Share::of("g1"), Share(0.44171434410082555));
        assert_eq!(Share::of("a"), Share(0.7913742705223815));
        let window = RenewalWindow::of(24 * HOUR);
        let moment = window.moment(Share(0.25));
        assert_eq!(moment, 23 * HOUR + Duration::from_secs(600));
    }
}
