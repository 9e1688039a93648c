//! Pauses of a server: times in which it answered nothing.
//!
//! A server that is too slow answers some queries of every moment. One whose CPU, or whose whole machine, was taken away
//! answers none of some milliseconds, and loses what its buffers have no room for: that tells their size, not its rate.

use serde::Serialize;

use crate::orders::MOMENT_BITS;

/// Queries without a reply that a pause has at least: a single lost one is none.
const MIN_UNANSWERED: u64 = 10;

/// Queries that were due in a moment of 2^[`MOMENT_BITS`] nanoseconds, and the replies to them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moment {
    /// Queries.
    pub sent: u64,
    /// Replies, whenever they came.
    pub received: u64,
}

impl Moment {
    fn lost(self) -> u64 {
        self.sent.saturating_sub(self.received)
    }

    /// Returns the part without a reply, in seconds.
    fn lost_seconds(self) -> f64 {
        let length = (1_u64 << MOMENT_BITS) as f64 / 1e9;
        length * self.lost() as f64 / self.sent.max(1) as f64
    }
}

/// Pauses of a load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Pauses {
    pub(crate) count: u64,
    /// Their sum.
    pub(crate) seconds: f64,
    /// The longest one in milliseconds.
    pub(crate) longest: f64,
    /// Queries that were due in them and had no reply.
    pub(crate) lost: u64,
}

impl Pauses {
    /// Returns the pauses of consecutive moments.
    pub(crate) fn of(moments: &[Moment]) -> Self {
        let mut pauses = Self::default();
        let mut first_free = 0;
        let mut begin = 0;
        while begin < moments.len() {
            let mut end = begin;
            let mut unanswered = 0;
            // Moments without a query, when the generator paused itself, end no pause.
            while let Some(moment) = moments.get(end).filter(|moment| moment.received == 0) {
                unanswered += moment.sent;
                end += 1;
            }
            if unanswered >= MIN_UNANSWERED {
                // A pause begins and ends within a moment that has replies too.
                let first = begin.saturating_sub(1).max(first_free);
                first_free = moments.len().min(end + 1);
                pauses.add(&moments[first..first_free]);
            }
            begin = end + 1;
        }
        pauses
    }

    fn add(&mut self, moments: &[Moment]) {
        let mut seconds = 0.0;
        for moment in moments {
            self.lost += moment.lost();
            seconds += moment.lost_seconds();
        }
        self.count += 1;
        self.seconds += seconds;
        self.longest = self.longest.max(seconds * 1e3);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Length of a moment in milliseconds.
    const LENGTH: f64 = 1.048576;

    /// Returns moments with 100 queries, of which these many were answered.
    fn moments(received: &[u64]) -> Vec<Moment> {
        let moment = |&received| Moment {
            sent: 100,
            received,
        };
        received.iter().map(moment).collect()
    }

    fn is_near(found: f64, expected: f64) -> bool {
        (found - expected).abs() < 1e-9
    }

    #[test]
    fn slow_server_has_no_pauses() {
        assert_eq!(Pauses::of(&moments(&[50; 20])), Pauses::default());
        assert_eq!(Pauses::of(&moments(&[100; 20])), Pauses::default());
        assert_eq!(Pauses::of(&[]), Pauses::default());
    }

    #[test]
    fn pause_has_its_edges() {
        // A buffer's content is answered later, so that the pause begins within a moment.
        let found = Pauses::of(&moments(&[100, 90, 60, 0, 0, 0, 20, 99, 100]));
        assert_eq!((found.count, found.lost), (1, 40 + 300 + 80));
        assert!(is_near(found.longest, 4.2 * LENGTH), "{found:?}");
        assert!(is_near(found.seconds, 4.2 * LENGTH / 1e3), "{found:?}");
    }

    #[test]
    fn pauses_share_no_moment() {
        let found = Pauses::of(&moments(&[0, 50, 0, 50, 0]));
        assert_eq!((found.count, found.lost), (3, 400));
        assert!(is_near(found.longest, 1.5 * LENGTH), "{found:?}");
        let all = Pauses::of(&moments(&[0; 10]));
        assert_eq!((all.count, all.lost), (1, 1000));
        assert!(is_near(all.seconds, 10.0 * LENGTH / 1e3), "{all:?}");
    }

    /// At low rates a lost query is no pause, and neither is a generator that sends nothing.
    #[test]
    fn pause_takes_several_queries() {
        let moment = |sent, received| Moment { sent, received };
        let single = [moment(1, 1), moment(1, 0), moment(1, 1), moment(9, 0)];
        assert_eq!(Pauses::of(&single), Pauses::default());
        let nothing_sent = vec![Moment::default(); 20];
        assert_eq!(Pauses::of(&nothing_sent), Pauses::default());
        let around = [moment(5, 0), Moment::default(), moment(5, 0), moment(5, 5)];
        let found = Pauses::of(&around);
        assert_eq!((found.count, found.lost), (1, 10));
        assert!(is_near(found.longest, 2.0 * LENGTH), "{found:?}");
    }
}
