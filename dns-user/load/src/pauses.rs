//! Pauses of a server: times in which it answered nothing.
//!
//! A server that is too slow answers some queries of every moment. One whose CPU, or whose whole machine, was taken away
//! answers none of some milliseconds, and loses what its buffers have no room for: that tells their size, not its rate.

use std::time::Duration;

use serde::Serialize;

/// Length of a pause at least. A server that is too slow takes its queries in batches, which are shorter.
const MIN_LENGTH: Duration = Duration::from_micros(125);

/// Queries without a reply that a pause has at least: a single lost one is none.
const MIN_UNANSWERED: u64 = 10;

/// Queries that were due in a moment, and the replies to them.
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

    /// Returns the share without a reply.
    fn loss(self) -> f64 {
        self.lost() as f64 / self.sent.max(1) as f64
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
    /// Returns the pauses of consecutive moments of this length.
    pub(crate) fn of(moments: &[Moment], length: Duration) -> Self {
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
            let is_long = length * (end - begin) as u32 >= MIN_LENGTH;
            if is_long && unanswered >= MIN_UNANSWERED {
                // A pause begins and ends within a moment that has replies too.
                let first = begin.saturating_sub(1).max(first_free);
                first_free = moments.len().min(end + 1);
                pauses.add(&moments[first..first_free], length);
            }
            begin = end + 1;
        }
        pauses
    }

    fn add(&mut self, moments: &[Moment], length: Duration) {
        let mut silent = 0.0;
        // Moments without a query before the first lost one, and after the last, say nothing.
        let first = moments.iter().position(|moment| moment.lost() > 0);
        let last = moments.iter().rposition(|moment| moment.lost() > 0);
        if let (Some(first), Some(last)) = (first, last) {
            for moment in &moments[first..=last] {
                self.lost += moment.lost();
                silent += if moment.received == 0 {
                    1.0
                } else {
                    moment.loss()
                };
            }
        }
        let seconds = silent * length.as_secs_f64();
        self.count += 1;
        self.seconds += seconds;
        self.longest = self.longest.max(seconds * 1e3);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: Duration = Duration::from_millis(1);

    fn of(moments: &[Moment]) -> Pauses {
        Pauses::of(moments, LENGTH)
    }

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
        assert_eq!(of(&moments(&[50; 20])), Pauses::default());
        assert_eq!(of(&moments(&[100; 20])), Pauses::default());
        assert_eq!(of(&[]), Pauses::default());
    }

    #[test]
    fn pause_has_its_edges() {
        // A buffer's content is answered later, so that the pause begins within a moment.
        let found = of(&moments(&[100, 90, 60, 0, 0, 0, 20, 99, 100]));
        assert_eq!((found.count, found.lost), (1, 40 + 300 + 80));
        assert!(is_near(found.longest, 4.2), "{found:?}");
        assert!(is_near(found.seconds, 0.0042), "{found:?}");
    }

    #[test]
    fn pauses_share_no_moment() {
        let found = of(&moments(&[0, 50, 0, 50, 0]));
        assert_eq!((found.count, found.lost), (3, 400));
        assert!(is_near(found.longest, 1.5), "{found:?}");
        let all = of(&moments(&[0; 10]));
        assert_eq!((all.count, all.lost), (1, 1000));
        assert!(is_near(all.seconds, 0.01), "{all:?}");
    }

    /// At low rates a lost query is no pause, and neither is a generator that sends nothing.
    #[test]
    fn pause_takes_several_queries() {
        let moment = |sent, received| Moment { sent, received };
        let single = [moment(1, 1), moment(1, 0), moment(1, 1), moment(9, 0)];
        assert_eq!(of(&single), Pauses::default());
        let nothing_sent = vec![Moment::default(); 20];
        assert_eq!(of(&nothing_sent), Pauses::default());
        let around = [moment(5, 0), Moment::default(), moment(5, 0), moment(5, 5)];
        let found = of(&around);
        assert_eq!((found.count, found.lost), (1, 10));
        assert!(is_near(found.longest, 3.0), "{found:?}");
    }

    #[test]
    fn pause_takes_some_time() {
        let received = [100, 0, 0, 100, 0, 100];
        for (length, expected) in [(50, 0), (62, 0), (63, 1), (124, 1), (125, 2)] {
            let found = Pauses::of(&moments(&received), Duration::from_micros(length));
            assert_eq!(found.count, expected, "{length}");
        }
    }

    /// At low rates most moments have no query.
    #[test]
    fn pause_lasts_between_its_queries() {
        let mut sparse = Vec::new();
        for second in 0..20 {
            sparse.extend([Moment::default(); 9]);
            sparse.push(Moment {
                sent: 1,
                received: u64::from(second == 0),
            });
        }
        let found = of(&sparse);
        assert_eq!((found.count, found.lost), (1, 19));
        assert!(is_near(found.longest, 181.0), "{found:?}");
    }
}
