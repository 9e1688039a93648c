//! Overload: more queries reach userspace than the UDP threads can answer.
//!
//! A query dropped by a full receive queue has already cost the kernel its whole path through the
//! network stack, so the more queries the queues drop, the less CPU time is left for answering.
//! While a queue is full, the program on the interface therefore sheds part of the queries that it
//! would pass to the network stack ([`FastPathHandle::shed`](dns_fastpath::FastPathHandle::shed)).
//! Clients are divided into groups ([`client_bucket`](dns_common::control::client_bucket)), and each group gets an equal part of the
//! capacity (max-min fairness), so that a client that floods the server takes nothing from other
//! groups.
//!
//! A thread reports only after a full batch or while shedding. An order is valid for
//! [`ORDER`], so shedding ends within that time if the server dies.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use dns_common::control::CLIENT_BUCKETS;
use parking_lot::Mutex;

use crate::state::ServerState;

/// Validity of an order to the program.
const ORDER: Duration = Duration::from_millis(100);

/// Interval at which the reports of the threads are evaluated.
pub(super) const WINDOW: Duration = Duration::from_millis(10);

/// Consecutive windows with a full queue before shedding begins: a burst is not overload.
const FULL_WINDOWS: u32 = 2;

/// Fill level at which a queue counts as full.
const FULL: f64 = 0.75;

/// Fill level up to which a queue counts as empty.
const EMPTY: f64 = 1.0 / 16.0;

/// Assumed growth of the capacity per window while the queues are empty. The first measurement is
/// too low, because full queues take CPU from the threads.
const GROWTH: f64 = 1.1;

/// How far below the capacity the passed load is kept, per fraction of a queue in use. Queries that
/// have waited in a long queue are no longer in the CPU caches and cost twice as much (observed),
/// so the queues are kept nearly empty.
const DRAIN: f64 = 2.0;

/// Smallest share of a group's queries that is passed, from which its rate is estimated.
const MIN_SHARE: f64 = 1.0 / 1024.0;

/// Minimum interval between two log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

//----------- Overload -------------------------------------------------------

/// Overload state of all UDP threads; off by default.
#[derive(Clone, Default)]
pub struct Overload(pub(super) Option<Arc<SheddingState>>);

#[derive(Default)]
pub(super) struct SheddingState {
    pub(super) is_shedding: AtomicBool,
    limiter: Mutex<Limiter>,
}

impl Overload {
    /// Creates the shared state, switched on.
    pub fn on() -> Self {
        Self(Some(Arc::default()))
    }
}

/// Observations of a thread since its last report.
#[derive(Clone, Copy, Debug)]
pub(super) struct Report<'a> {
    /// Queries taken from the queue, by group of clients.
    pub(super) taken: &'a [u32; CLIENT_BUCKETS],
    /// Length of the count in seconds.
    pub(super) seconds: f64,
    /// Fill level of the queue: 0 to about 1.
    pub(super) fill: f64,
}

impl SheddingState {
    pub(super) fn report(&self, report: Report<'_>, now: Instant, server_state: &ServerState) {
        // Without a program shedding is impossible.
        let Some(decision) = self.limiter.lock().report(
            report,
            || server_state.fast_path.passed_to_userspace(),
            now,
        ) else {
            return;
        };
        match decision {
            Decision::Nothing => {}
            Decision::Shed(shares) => {
                self.is_shedding.store(true, Ordering::Relaxed);
                server_state.fast_path.shed(Some(&shares), ORDER);
            }
            Decision::End => {
                self.is_shedding.store(false, Ordering::Relaxed);
                server_state.fast_path.shed(None, ORDER);
            }
        }
    }
}

//----------- Limiter --------------------------------------------------------

/// The decision after a report.
#[derive(Debug, PartialEq)]
enum Decision {
    /// Keep the current order.
    Nothing,
    /// From now on pass this many of 2^32 - 1 queries, by group of clients.
    Shed(Box<[u32; CLIENT_BUCKETS]>),
    /// Pass all queries again.
    End,
}

/// Decides the share of the queries to pass.
#[derive(Debug)]
struct Limiter {
    /// Time of the last decision.
    decided: Option<Instant>,
    /// Queries per second taken by the threads that have reported since then, by group.
    taken: [f64; CLIENT_BUCKETS],
    /// Number of queries passed by interfaces up to then.
    went_up: u64,
    /// Highest fill level since then.
    fill: f64,
    /// Consecutive windows in which a queue was full.
    full_windows: u32,
    /// Queries per second that can be answered; `None` while nothing is shed.
    capacity: Option<f64>,
    /// Queries per second that reach the interface and are not answered there, by group.
    offered: [f64; CLIENT_BUCKETS],
    /// Share of these queries that is passed, by group.
    shares: [f64; CLIENT_BUCKETS],
    /// Time of the last log line.
    logged: Option<Instant>,
}

impl Default for Limiter {
    fn default() -> Self {
        Self {
            decided: None,
            taken: [0.0; CLIENT_BUCKETS],
            went_up: 0,
            fill: 0.0,
            full_windows: 0,
            capacity: None,
            offered: [0.0; CLIENT_BUCKETS],
            shares: [1.0; CLIENT_BUCKETS],
            logged: None,
        }
    }
}

impl Limiter {
    /// Adds a report and decides once per window. `went_up` reads the number of queries that
    /// interfaces have passed so far, from counters of all CPUs; `None` without a fast path.
    fn report(
        &mut self,
        report: Report<'_>,
        went_up: impl FnOnce() -> Option<u64>,
        now: Instant,
    ) -> Option<Decision> {
        let Report {
            taken,
            seconds,
            fill,
        } = report;
        for (sum, &more) in self.taken.iter_mut().zip(taken) {
            // As rates, because the threads report after periods of different length.
            *sum += f64::from(more) / seconds;
        }
        // The kernel spreads the datagrams over the sockets, and one queue may overflow while
        // others are empty.
        self.fill = self.fill.max(fill);
        let elapsed = self.decided.map_or(Duration::MAX, |decided| {
            now.saturating_duration_since(decided)
        });
        // All threads report; the first one after the window decides for all.
        if elapsed < WINDOW {
            return Some(Decision::Nothing);
        }
        let went_up = went_up()?;
        // After a pause the order has expired, and the counts cover an unknown period.
        let decision = if elapsed > ORDER {
            self.forget()
        } else {
            let came = went_up.saturating_sub(self.went_up) as f64 / elapsed.as_secs_f64();
            self.decide(came, now)
        };
        (self.taken, self.fill) = ([0.0; CLIENT_BUCKETS], 0.0);
        (self.decided, self.went_up) = (Some(now), went_up);
        Some(decision)
    }

    fn forget(&mut self) -> Decision {
        let was_shedding = self.capacity.is_some();
        *self = Self {
            logged: self.logged,
            ..Self::default()
        };
        if was_shedding {
            Decision::End
        } else {
            Decision::Nothing
        }
    }

    /// Makes a decision based on the reports. `came` is the rate of queries passed, including those
    /// dropped by a queue.
    fn decide(&mut self, came: f64, now: Instant) -> Decision {
        let taken: f64 = self.taken.iter().sum();
        // A queue drops and delays the queries of all groups equally.
        let came_for_each = if taken > 0.0 { came / taken } else { 1.0 };
        for ((offered, &taken), share) in self.offered.iter_mut().zip(&self.taken).zip(self.shares)
        {
            // Only this share of the arriving queries was let through. The mean with the window before
            // keeps one burst from deciding; shares are at least `MIN_SHARE`, so the quotient is
            // finite.
            *offered = (*offered + taken * came_for_each / share) / 2.0;
        }
        let is_empty = self.fill <= EMPTY;
        let capacity = match self.capacity {
            // The threads were busy all the time, so this is their capacity.
            Some(capacity) if !is_empty => (capacity + taken) / 2.0,
            // The threads idled for part of the window, so their capacity is higher than what they
            // took.
            Some(capacity) => GROWTH * capacity,
            None => {
                self.full_windows = if self.fill >= FULL {
                    self.full_windows + 1
                } else {
                    0
                };
                if self.full_windows < FULL_WINDOWS {
                    return Decision::Nothing;
                }
                self.log(now);
                taken
            }
        };
        // With full queues the factor would become negative and everything would be shed: then the
        // queues empty themselves, and the threads stand still until the next window.
        let limit = capacity * (1.0 + DRAIN * (EMPTY / 2.0 - self.fill)).max(0.5);
        // Only then: while the queues still hold old queries, ending would fill them again at once.
        if is_empty && self.offered.iter().sum::<f64>() <= limit {
            return self.forget();
        }
        self.capacity = Some(capacity);
        self.shares = fair_shares(&self.offered, limit);
        Decision::Shed(Box::new(
            self.shares
                .map(|share| (share * f64::from(u32::MAX)) as u32),
        ))
    }

    fn log(&mut self, now: Instant) {
        if self
            .logged
            .is_some_and(|logged| now.saturating_duration_since(logged) < LOG_INTERVAL)
        {
            return;
        }
        self.logged = Some(now);
        tracing::warn!(
            "overload: shedding queries at the interface, heaviest clients first; fast-path names are not affected (outcome \"shed\" of bosh_dns_xdp_fast_path_packets_total counts; xdp.shed: false turns it off)"
        );
    }
}

/// Returns the share of each group's queries to pass, such that the total stays within `limit` and
/// a group gets more than another only if the other gets everything that it offers.
fn fair_shares(offered: &[f64; CLIENT_BUCKETS], limit: f64) -> [f64; CLIENT_BUCKETS] {
    let mut ascending = *offered;
    ascending.sort_by(f64::total_cmp);
    let mut left = limit;
    let mut part = f64::INFINITY;
    for (at, &rate) in ascending.iter().enumerate() {
        // The part that a small group leaves goes to the larger ones, which come later in this
        // order.
        let equal = left / (CLIENT_BUCKETS - at) as f64;
        if rate > equal {
            part = equal;
            break;
        }
        left -= rate;
    }
    offered.map(|rate| {
        if rate <= part {
            1.0
        } else {
            (part / rate).clamp(MIN_SHARE, 1.0)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Queries per second that are answered.
    const CAPACITY: f64 = 100_000.0;

    /// Number of queries that a queue holds.
    const QUEUE: f64 = 4_000.0;

    /// A simulated server that answers [`CAPACITY`] queries per second from a queue.
    struct Overloaded {
        limiter: Limiter,
        shares: Option<Box<[u32; CLIENT_BUCKETS]>>,
        /// Queries in the queue, by group.
        queue: [f64; CLIENT_BUCKETS],
        windows: u32,
        /// Queries passed so far.
        went_up: f64,
    }

    impl Overloaded {
        /// Returns an idle server.
        fn new() -> Self {
            Self {
                limiter: Limiter::default(),
                shares: None,
                queue: [0.0; CLIENT_BUCKETS],
                windows: 0,
                went_up: 0.0,
            }
        }

        /// Simulates one window; `offered` is in queries per second by group. Returns the answered
        /// queries per second.
        fn window(
            &mut self,
            start: Instant,
            offered: &[f64; CLIENT_BUCKETS],
        ) -> [f64; CLIENT_BUCKETS] {
            let seconds = WINDOW.as_secs_f64();
            for (bucket, (queued, rate)) in self.queue.iter_mut().zip(offered).enumerate() {
                let share = self.shares.as_ref().map_or(1.0, |shares| {
                    f64::from(shares[bucket]) / f64::from(u32::MAX)
                });
                *queued += rate * seconds * share;
                self.went_up += rate * seconds * share;
            }
            let came: f64 = self.queue.iter().sum();
            let answered = self
                .queue
                .map(|queued| queued * (CAPACITY * seconds / came).min(1.0));
            let left = came - answered.iter().sum::<f64>();
            let kept = (QUEUE / left.max(1.0)).min(1.0);
            for (queued, answered) in self.queue.iter_mut().zip(answered) {
                *queued = (*queued - answered) * kept;
            }
            self.windows += 1;
            let counts = answered.map(|answered| answered.round() as u32);
            let left = left.min(QUEUE);
            let report = Report {
                taken: &counts,
                seconds,
                fill: left / QUEUE,
            };
            let now = start + self.windows * WINDOW;
            match self
                .limiter
                .report(report, || Some(self.went_up as u64), now)
                .unwrap()
            {
                Decision::Nothing => {}
                Decision::Shed(shares) => self.shares = Some(shares),
                Decision::End => self.shares = None,
            }
            answered.map(|answered| answered / seconds)
        }

        /// Simulates this many windows; returns the queries answered per second in their second
        /// half, by group.
        fn windows(
            &mut self,
            count: u32,
            offered: &[f64; CLIENT_BUCKETS],
        ) -> [f64; CLIENT_BUCKETS] {
            let start = Instant::now();
            let mut sums = [0.0; CLIENT_BUCKETS];
            for window in 0..count {
                let answered = self.window(start, offered);
                if window >= count / 2 {
                    for (sum, answered) in sums.iter_mut().zip(answered) {
                        *sum += answered;
                    }
                }
            }
            sums.map(|sum| sum / f64::from(count - count / 2))
        }
    }

    #[test]
    fn shedding_keeps_full_throughput() {
        let mut server = Overloaded::new();
        let mut offered = [0.0; CLIENT_BUCKETS];
        (offered[3], offered[5]) = (1_000_000.0, 2_000.0);
        let answered = server.windows(400, &offered);
        assert!(
            answered.iter().sum::<f64>() > 0.95 * CAPACITY,
            "{answered:?}"
        );
        assert!(
            answered[5] > 0.98 * offered[5],
            "a modest client loses nothing: {}",
            answered[5]
        );
        let queued: f64 = server.queue.iter().sum();
        assert!(
            queued < 0.75 * QUEUE,
            "{queued} wait: the queue drops nothing"
        );
        // Shedding ends with the flood.
        offered[3] = 1_000.0;
        server.windows(100, &offered);
        assert_eq!(server.shares, None);
    }

    #[test]
    fn load_within_capacity_is_kept() {
        let mut server = Overloaded::new();
        let offered = [0.9 * CAPACITY / CLIENT_BUCKETS as f64; CLIENT_BUCKETS];
        let start = Instant::now();
        for _ in 0..200 {
            server.window(start, &offered);
            assert_eq!(server.shares, None);
        }
        // A burst that fills the queue only briefly is not overload either.
        server.window(
            start,
            &[20.0 * CAPACITY / CLIENT_BUCKETS as f64; CLIENT_BUCKETS],
        );
        assert_eq!(server.shares, None);
    }

    #[test]
    fn pause_ends_shedding() {
        let mut limiter = Limiter::default();
        let start = Instant::now();
        let report = Report {
            taken: &[100; CLIENT_BUCKETS],
            seconds: 0.01,
            fill: 1.0,
        };
        let decisions: Vec<Decision> = (0..5)
            .map(|window| {
                limiter
                    .report(
                        report,
                        || Some(10_000 * u64::from(window)),
                        start + window * WINDOW,
                    )
                    .unwrap()
            })
            .collect();
        assert!(matches!(decisions[4], Decision::Shed(_)), "{decisions:?}");
        let end = limiter.report(report, || Some(60_000), start + 5 * WINDOW + ORDER);
        assert_eq!(end, Some(Decision::End));
    }

    #[test]
    fn uncounted_time_keeps_capacity() {
        let mut limiter = Limiter::default();
        let start = Instant::now();
        // A thread that has found its queue empty restarts its count, regardless of the time of the
        // last decision.
        let report = Report {
            taken: &[100; CLIENT_BUCKETS],
            seconds: 0.01,
            fill: 1.0,
        };
        for at in [0, 50, 100, 150] {
            limiter.report(
                report,
                || Some(at * 1_000),
                start + Duration::from_millis(at),
            );
        }
        assert_eq!(limiter.capacity.map(f64::round), Some(640_000.0));
    }

    #[test]
    fn counters_are_read_once_per_window() {
        let mut limiter = Limiter::default();
        let mut reads = 0;
        let start = Instant::now();
        let report = Report {
            taken: &[100; CLIENT_BUCKETS],
            seconds: 0.01,
            fill: 1.0,
        };
        for window in 0..20 {
            // Each of 32 workers reports in each window.
            for worker in 0..32 {
                let now = start + window * WINDOW + Duration::from_micros(worker);
                limiter.report(
                    report,
                    || {
                        reads += 1;
                        Some(u64::from(window) * 10_000)
                    },
                    now,
                );
            }
        }
        assert_eq!(reads, 20);
    }

    #[test]
    fn capacity_is_shared_fairly() {
        let mut offered = [0.0; CLIENT_BUCKETS];
        (offered[0], offered[1], offered[2]) = (10.0, 100.0, 1_000.0);
        let shares = fair_shares(&offered, 70.0);
        assert_eq!(
            (shares[0], shares[1] * 100.0, shares[2] * 1_000.0),
            (1.0, 30.0, 30.0)
        );
        assert_eq!(fair_shares(&offered, 2_000.0), [1.0; CLIENT_BUCKETS]);
    }
}
