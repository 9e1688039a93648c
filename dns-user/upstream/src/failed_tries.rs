//! Failed tries of one recursor: counters by reason, and log lines at a bounded rate.
//!
//! The first failure of each reason starts a series and is logged immediately. While the series lasts, a
//! task logs one summary per interval. The intervals double up to [`MAX_INTERVAL`]; one without a
//! failure ends the series.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;

use super::{
    TryError,
    message::{self, ValidatedReply},
};

/// Length of the first interval of a series.
const FIRST_INTERVAL: Duration = Duration::from_secs(10);
const MAX_INTERVAL: Duration = Duration::from_secs(300);
/// Share of failures from which a summary is a warning: even a healthy recursor answers SERVFAIL
/// for broken domains.
const ALARMING_SHARE: f64 = 0.2;

/// Declares the reasons with their labels (metrics, status) and their texts (log).
macro_rules! reasons {
    ($($reason:ident $label:literal $text:literal,)*) => {
        /// Reason why a try failed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Reason {
            $($reason,)*
        }

        impl Reason {
            pub(crate) const ALL: &[Self] = &[$(Self::$reason,)*];

            /// Returns the label in metrics and status.
            pub(crate) const fn label(self) -> &'static str {
                match self {
                    $(Self::$reason => $label,)*
                }
            }

            const fn text(self) -> &'static str {
                match self {
                    $(Self::$reason => $text,)*
                }
            }
        }
    };
}

reasons! {
    TimedOut "timeout" "no reply in time",
    NoAddress "no_address" "its address is unknown",
    Unreachable "unreachable" "its port is closed or its host unreachable",
    Reset "reset" "it reset the connection",
    Closed "closed" "it closed the connection without a reply",
    WrongReply "wrong_reply" "it replied to another query",
    Malformed "malformed" "its reply is malformed",
    Servfail "servfail" "it replied SERVFAIL",
    Refused "refused" "it replied REFUSED",
    OtherRcode "rcode" "it replied with an error RCODE",
    Tls "tls" "its TLS handshake failed",
    GivenUp "given_up" "too many queries to it are in flight",
    NoSocket "no_socket" "this machine has no descriptor, port or memory for a socket",
}

impl Reason {
    /// Returns the reason why an outcome counts as a failure; `None` for NOERROR and NXDOMAIN.
    pub(crate) fn of(outcome: &Result<ValidatedReply, TryError>) -> Option<Self> {
        Some(match outcome {
            Ok(reply) => match reply.rcode() {
                message::NOERROR | message::NXDOMAIN => return None,
                message::SERVFAIL => Self::Servfail,
                message::REFUSED => Self::Refused,
                _ => Self::OtherRcode,
            },
            Err(error) => match error {
                TryError::TimedOut => Self::TimedOut,
                TryError::Refused => Self::Unreachable,
                TryError::Reset => Self::Reset,
                TryError::Closed => Self::Closed,
                TryError::WrongReply => Self::WrongReply,
                TryError::Unreadable => Self::Malformed,
                TryError::Tls => Self::Tls,
                TryError::Busy => Self::GivenUp,
                TryError::NoSocket => Self::NoSocket,
            },
        })
    }
}

/// Tries of one recursor since the start, with its failures by reason.
#[derive(Debug)]
pub(crate) struct FailedTries {
    recursor: String,
    /// Queries sent, retries included.
    tries: AtomicU64,
    /// Failures in the order of [`Reason::ALL`].
    failures: [AtomicU64; Reason::ALL.len()],
    /// Tries in a row without a reply, up to the latest.
    unanswered: AtomicU32,
    /// Replies in a row that are errors, up to the latest.
    error_replies: AtomicU32,
    /// Bit set of the reasons logged in the current series; 0 without a series.
    series: Mutex<u16>,
}

impl FailedTries {
    pub(crate) fn new(recursor: &str) -> Arc<Self> {
        Arc::new(Self {
            recursor: recursor.to_owned(),
            tries: AtomicU64::new(0),
            failures: Default::default(),
            unanswered: AtomicU32::new(0),
            error_replies: AtomicU32::new(0),
            series: Mutex::new(0),
        })
    }

    pub(crate) fn began(&self) {
        self.tries.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn tries(&self) -> u64 {
        self.tries.load(Ordering::Relaxed)
    }

    /// Returns the number of failures for every reason.
    pub(crate) fn by_reason(&self) -> impl Iterator<Item = (Reason, u64)> {
        Reason::ALL
            .iter()
            .zip(&self.failures)
            .map(|(reason, count)| (*reason, count.load(Ordering::Relaxed)))
    }

    /// Returns the number of tries in a row without a reply, up to the latest.
    pub(crate) fn unanswered(&self) -> u32 {
        self.unanswered.load(Ordering::Relaxed)
    }

    /// Returns the number of replies in a row that are errors, up to the latest.
    pub(crate) fn error_replies(&self) -> u32 {
        self.error_replies.load(Ordering::Relaxed)
    }

    /// Records that the recursor replied without an error.
    pub(crate) fn answered(&self) {
        self.replied();
        // The common case: nothing to write.
        if self.error_replies() != 0 {
            self.error_replies.store(0, Ordering::Relaxed);
        }
    }

    fn replied(&self) {
        if self.unanswered() != 0 {
            self.unanswered.store(0, Ordering::Relaxed);
        }
    }

    /// Counts a failure, and logs it if it is the first with its reason in the series. Must be
    /// called inside a tokio runtime.
    pub(crate) fn failed(self: &Arc<Self>, reason: Reason) {
        self.failures[reason as usize].fetch_add(1, Ordering::Relaxed);
        match reason {
            Reason::TimedOut
            | Reason::NoAddress
            | Reason::Unreachable
            | Reason::Reset
            | Reason::Closed
            | Reason::Tls => {
                self.unanswered.fetch_add(1, Ordering::Relaxed);
            }
            // Not sent.
            Reason::GivenUp | Reason::NoSocket => {}
            // Wrong as it is, a reply shows that the recursor is there.
            Reason::WrongReply
            | Reason::Malformed
            | Reason::Servfail
            | Reason::Refused
            | Reason::OtherRcode => {
                self.replied();
                self.error_replies.fetch_add(1, Ordering::Relaxed);
            }
        }
        let bit = 1 << reason as u16;
        let mut series = self.series.lock();
        if *series & bit != 0 {
            return;
        }
        if *series == 0 {
            // Started while the lock is held, so that each series has one task.
            tokio::spawn(Arc::clone(self).summarise(self.state(), FIRST_INTERVAL));
        }
        *series |= bit;
        tracing::warn!(
            recursor = self.recursor,
            reason = reason.label(),
            "a query to a recursor failed: {}; the next recursor is tried, and if none is left the client \
             gets SERVFAIL; `bosh-dns-xdp status` counts failures by reason",
            reason.text(),
        );
    }

    /// Logs summaries until an interval passes without a failure. `reported` is the state after the
    /// first failure of the series, which was logged separately.
    async fn summarise(self: Arc<Self>, mut reported: CounterValues, mut interval: Duration) {
        loop {
            tokio::time::sleep(interval).await;
            // Locked while the counters are read: a failure in between would be in no summary.
            let mut series = self.series.lock();
            let now = self.state();
            let Some(summary) = Summary::between(&reported, &now) else {
                *series = 0;
                let tries = now.tries - reported.tries;
                // Without tries nothing is known about it.
                if tries > 0 {
                    tracing::info!(
                        recursor = self.recursor,
                        "the recursor answers again: {tries} queries without a failure"
                    );
                }
                return;
            };
            summary.log(&self.recursor, interval);
            reported = now;
            interval = (interval * 2).min(MAX_INTERVAL);
        }
    }

    fn state(&self) -> CounterValues {
        CounterValues {
            tries: self.tries(),
            failures: self.by_reason().map(|(_, count)| count).collect(),
        }
    }
}

/// Values of the counters at one time.
#[derive(Debug)]
struct CounterValues {
    tries: u64,
    /// Failures in the order of [`Reason::ALL`].
    failures: Vec<u64>,
}

/// Failures of one interval.
#[derive(Debug, PartialEq)]
struct Summary {
    tries: u64,
    failed: u64,
    /// For example `timeout 12, servfail 3`, most frequent first.
    reasons: String,
}

impl Summary {
    /// Returns the failures between two states; `None` if there were none.
    fn between(before: &CounterValues, now: &CounterValues) -> Option<Self> {
        let mut counts = Vec::new();
        let mut failed = 0;
        for (index, reason) in Reason::ALL.iter().enumerate() {
            // Counters only grow, so no difference is negative.
            let count = now.failures[index] - before.failures[index];
            if count > 0 {
                counts.push((count, reason.label()));
            }
            failed += count;
        }
        if failed == 0 {
            return None;
        }
        counts.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
        let mut reasons = Vec::new();
        for (count, reason) in counts {
            reasons.push(format!("{reason} {count}"));
        }
        Some(Self {
            // A query sent before the interval may have failed within it.
            tries: (now.tries - before.tries).max(failed),
            failed,
            reasons: reasons.join(", "),
        })
    }

    fn log(&self, recursor: &str, interval: Duration) {
        let Self {
            tries,
            failed,
            reasons,
        } = self;
        let text = format!(
            "{failed} of {tries} queries to a recursor failed within {} s: {reasons}",
            interval.as_secs()
        );
        if *failed as f64 >= *tries as f64 * ALARMING_SHARE {
            tracing::warn!(recursor, "{text}");
        } else {
            tracing::info!(recursor, "{text}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_lists_reasons_by_frequency() {
        let state = |tries, timeouts, servfails| {
            let mut failures = vec![0; Reason::ALL.len()];
            failures[Reason::TimedOut as usize] = timeouts;
            failures[Reason::Servfail as usize] = servfails;
            CounterValues { tries, failures }
        };
        assert_eq!(Summary::between(&state(5, 1, 1), &state(9, 1, 1)), None);
        let summary = Summary::between(&state(5, 1, 1), &state(105, 3, 8)).unwrap();
        assert_eq!(
            summary,
            Summary {
                tries: 100,
                failed: 9,
                reasons: "servfail 7, timeout 2".to_owned()
            }
        );
    }

    #[test]
    fn reason_bits_are_distinct() {
        for (index, reason) in Reason::ALL.iter().enumerate() {
            assert_eq!(*reason as usize, index);
            assert_eq!(
                Reason::ALL
                    .iter()
                    .filter(|other| other.label() == reason.label())
                    .count(),
                1
            );
        }
        assert!(Reason::ALL.len() <= 16);
    }

    #[tokio::test]
    async fn any_reply_ends_the_outage() {
        let tries = FailedTries::new("127.0.0.1:53");
        for reason in [Reason::TimedOut, Reason::Unreachable, Reason::GivenUp] {
            tries.failed(reason);
        }
        assert_eq!(tries.unanswered(), 2);
        tries.failed(Reason::Servfail);
        assert_eq!(tries.unanswered(), 0);
        tries.failed(Reason::TimedOut);
        tries.answered();
        assert_eq!(tries.unanswered(), 0);
    }

    #[tokio::test]
    async fn quiet_interval_ends_series() {
        let tries = FailedTries::new("127.0.0.1:53");
        for _ in 0..3 {
            tries.began();
            tries.failed(Reason::TimedOut);
        }
        assert_ne!(*tries.series.lock(), 0);
        assert_eq!(tries.by_reason().next(), Some((Reason::TimedOut, 3)));
        // A second task ends the same series earlier.
        Arc::clone(&tries)
            .summarise(tries.state(), Duration::from_millis(1))
            .await;
        assert_eq!(*tries.series.lock(), 0);
    }

    #[test]
    fn every_outcome_has_its_reason() {
        for (error, reason) in [
            (TryError::TimedOut, Reason::TimedOut),
            (TryError::Refused, Reason::Unreachable),
            (TryError::Reset, Reason::Reset),
            (TryError::Closed, Reason::Closed),
            (TryError::WrongReply, Reason::WrongReply),
            (TryError::Unreadable, Reason::Malformed),
            (TryError::Tls, Reason::Tls),
            (TryError::Busy, Reason::GivenUp),
            (TryError::NoSocket, Reason::NoSocket),
        ] {
            assert_eq!(Reason::of(&Err(error)), Some(reason));
        }
        for (rcode, reason) in [
            (0, None),
            (1, Some(Reason::OtherRcode)),
            (2, Some(Reason::Servfail)),
            (3, None),
            (4, Some(Reason::OtherRcode)),
            (5, Some(Reason::Refused)),
            (6, Some(Reason::OtherRcode)),
        ] {
            let reply = [0, 1, 0x80, rcode, 0, 0, 0, 0, 0, 0, 0, 0].to_vec();
            let reply = ValidatedReply::new(reply).unwrap();
            assert_eq!(Reason::of(&Ok(reply)), reason, "{rcode}");
        }
    }

    #[tokio::test]
    async fn failures_are_counted_by_reason() {
        let tries = FailedTries::new("127.0.0.1:53");
        for _ in 0..3 {
            tries.began();
        }
        for (reason, times) in Reason::ALL.iter().zip(1..) {
            for _ in 0..times {
                tries.failed(*reason);
            }
        }
        let counts: Vec<u64> = tries.by_reason().map(|(_, count)| count).collect();
        assert_eq!(counts, (1..=Reason::ALL.len() as u64).collect::<Vec<_>>());
        let state = tries.state();
        assert_eq!((state.tries, state.failures), (3, counts));
        // Each reason is logged once in a series.
        assert_eq!(*tries.series.lock(), (1 << Reason::ALL.len()) - 1);
        let errors = tries.error_replies();
        tries.failed(Reason::GivenUp);
        assert_eq!(tries.error_replies(), errors, "it was not sent");
        tries.answered();
        assert_eq!((tries.error_replies(), tries.unanswered()), (0, 0));
    }

    #[tokio::test]
    async fn failures_are_silence_or_errors() {
        for (reason, unanswered, error_replies, label) in [
            (Reason::TimedOut, 3, 1, "timeout"),
            (Reason::NoAddress, 3, 1, "no_address"),
            (Reason::Unreachable, 3, 1, "unreachable"),
            (Reason::Reset, 3, 1, "reset"),
            (Reason::Closed, 3, 1, "closed"),
            (Reason::WrongReply, 0, 2, "wrong_reply"),
            (Reason::Malformed, 0, 2, "malformed"),
            (Reason::Servfail, 0, 2, "servfail"),
            (Reason::Refused, 0, 2, "refused"),
            (Reason::OtherRcode, 0, 2, "rcode"),
            (Reason::Tls, 3, 1, "tls"),
            (Reason::GivenUp, 2, 1, "given_up"),
            (Reason::NoSocket, 2, 1, "no_socket"),
        ] {
            let tries = FailedTries::new("127.0.0.1:53");
            tries.failed(Reason::Servfail);
            tries.failed(Reason::TimedOut);
            tries.failed(Reason::TimedOut);
            assert_eq!((tries.unanswered(), tries.error_replies()), (2, 1));
            tries.failed(reason);
            assert_eq!(
                (tries.unanswered(), tries.error_replies()),
                (unanswered, error_replies),
                "{reason:?}"
            );
            assert_eq!(reason.label(), label);
            assert!(!reason.text().is_empty());
            assert_eq!(tries.tries(), 0, "none has begun");
        }
    }

    #[test]
    fn summary_counts_failures_in_between() {
        let state = |tries, first, second| {
            let mut failures = vec![0; Reason::ALL.len()];
            failures[Reason::TimedOut as usize] = first;
            failures[Reason::Tls as usize] = second;
            CounterValues { tries, failures }
        };
        for (before, now, expected) in [
            (state(0, 0, 0), state(0, 0, 0), None),
            (state(7, 3, 0), state(9, 3, 0), None),
            (state(7, 3, 0), state(9, 4, 0), Some((2, 1, "timeout 1"))),
            // Sent before, failed within.
            (
                state(9, 3, 4),
                state(9, 4, 6),
                Some((3, 3, "tls 2, timeout 1")),
            ),
        ] {
            let expected = expected.map(|(tries, failed, reasons): (u64, u64, &str)| Summary {
                tries,
                failed,
                reasons: reasons.to_owned(),
            });
            assert_eq!(Summary::between(&before, &now), expected);
        }
    }

    #[tokio::test]
    async fn series_has_a_single_task() {
        let tries = FailedTries::new("127.0.0.1:53");
        assert_eq!(Arc::strong_count(&tries), 1);
        for reason in [
            Reason::TimedOut,
            Reason::TimedOut,
            Reason::Servfail,
            Reason::Tls,
        ] {
            tries.failed(reason);
            // The task's and the test's.
            assert_eq!(Arc::strong_count(&tries), 2, "{reason:?}");
        }
    }
}
