//! The lease: how long the programs may answer without a renewal from userspace.
//!
//! Only the publisher's own loop renews it, so it expires if the publisher hangs. A live publisher
//! does not prove that the rest of the server is alive, so once the daemon sends heartbeats, the
//! lease is counted from the last one. A heartbeat is as old as the oldest sign of life that it
//! represents, so the lease also expires if the runtime dies or health checks hang. While a change
//! handed to the publisher is not in the map yet, the lease is counted from the time of the
//! hand-over: even on a busy machine, outdated entries are used for at most the length of a lease.
//!
//! Only the attacher notices rules, routes and lost probes that forbid an interface to answer, so the lease
//! also ends [`UNWATCHED`] after its last sign of life, however long the lease is.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use crossbeam_channel::{Receiver, Sender, bounded};
use dns_kit::{
    clock::kernel_monotonic_ns,
    threads::{self, OnPanic},
};

use crate::map::control::ControlPage;

/// How long the programs may answer without a sign of life of the attacher that watches them.
pub(crate) const UNWATCHED: Duration = Duration::from_secs(10);

/// Renews the deadline in the `CONTROL` map.
#[derive(Clone, Debug)]
pub(crate) struct Lease {
    pub(crate) control: Arc<ControlPage>,
    length_ns: u64,
    /// Time of the last sign of life of the daemon's runtime, in ns of CLOCK_MONOTONIC; 0 before
    /// the first one.
    heartbeat_ns: Arc<AtomicU64>,
    /// Time of the last sign of life of the attacher, in ns of CLOCK_MONOTONIC.
    watched_ns: Arc<AtomicU64>,
}

impl Lease {
    /// Returns a lease of this length that has not begun.
    pub(crate) fn new(control: Arc<ControlPage>, length: Duration) -> Self {
        let length_ns = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX / 4);
        Self {
            control,
            length_ns,
            heartbeat_ns: Arc::default(),
            // Its programs are attached later, and it reports before that.
            watched_ns: Arc::new(AtomicU64::new(kernel_monotonic_ns())),
        }
    }

    /// Records that the attacher has looked at interfaces and rules at this time, in ns of CLOCK_MONOTONIC.
    pub(crate) fn watched(&self, at_ns: u64) {
        // A clock ahead of ours would keep the lease alive after its death.
        let at_ns = at_ns.min(kernel_monotonic_ns());
        self.watched_ns.fetch_max(at_ns, Ordering::Relaxed);
    }

    /// Returns how long the attacher has been silent.
    pub(crate) fn unwatched_for(&self) -> Duration {
        let watched_ns = self.watched_ns.load(Ordering::Relaxed);
        Duration::from_nanos(kernel_monotonic_ns().saturating_sub(watched_ns))
    }

    /// Returns the renewal interval, short enough that most of the lease is left whenever the process stops.
    pub(crate) fn interval(&self) -> Duration {
        // However long the lease, it ends UNWATCHED after the sign of life that the last renewal knew.
        let shortest = self.length().min(UNWATCHED);
        (shortest / 8).max(Duration::from_millis(1))
    }

    /// Records a sign of life of the daemon's runtime, `age` old. Once the first one was recorded,
    /// others must follow.
    pub(crate) fn heartbeat(&self, age: Duration) {
        let age = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        // Zero would mean that there has been no heartbeat.
        let at = kernel_monotonic_ns().saturating_sub(age).max(1);
        self.heartbeat_ns.store(at, Ordering::Relaxed);
    }

    /// Renews the lease. `behind` is the age of the oldest change that is not in the map yet.
    pub(crate) fn renew(&self, behind: Duration) {
        let heartbeat = self.heartbeat_ns.load(Ordering::Relaxed);
        let behind_ns = u64::try_from(behind.as_nanos()).unwrap_or(u64::MAX);
        let current_at = kernel_monotonic_ns().saturating_sub(behind_ns);
        let end = deadline(current_at, heartbeat, self.length_ns);
        let watched = self.watched_ns.load(Ordering::Relaxed);
        let unwatched_ns = u64::try_from(UNWATCHED.as_nanos()).unwrap_or(u64::MAX);
        // The earlier of both ends: neither sign of life proves that the other process is alive.
        self.control
            .set_lease(end.min(watched.saturating_add(unwatched_ns)));
    }

    /// Ends the lease: the programs stop answering.
    pub(crate) fn end(&self) {
        self.control.set_lease(0);
    }

    /// Returns the remaining time; zero once the lease has expired.
    pub(crate) fn remaining(&self) -> Duration {
        Duration::from_nanos(self.control.lease().saturating_sub(kernel_monotonic_ns()))
    }

    pub(crate) fn length(&self) -> Duration {
        Duration::from_nanos(self.length_ns)
    }
}

/// Returns the end of the lease, given the time up to which the map is current and the last
/// heartbeat (0: none yet).
fn deadline(current_ns: u64, heartbeat_ns: u64, length_ns: u64) -> u64 {
    let alive_at = if heartbeat_ns == 0 {
        current_ns
    } else {
        heartbeat_ns.min(current_ns)
    };
    alive_at.saturating_add(length_ns)
}

/// Time in quarantine if the kernel refuses membarrier (with `nohz_full`, for example). A program
/// run takes microseconds, so the margin is wide, but this is no proof, which the status reports.
pub const WITHOUT_MEMBARRIER: Duration = Duration::from_secs(2);

/// Runs RCU grace periods on a separate thread, one at a time, and reports their ends.
///
/// A program run that began earlier may still read the cells of a replaced entry; after one RCU grace period
/// no such run is left. The kernel takes 10 ms or more for it, too long for the publisher to block.
#[derive(Debug)]
pub(crate) struct GracePeriods {
    /// Requests to the thread; dropping the sender ends the thread.
    begin: Sender<()>,
    /// One message per grace period: whether the kernel confirmed it.
    over: Receiver<bool>,
    /// Whether a grace period was begun whose end was not reported yet.
    pub(crate) running: bool,
    /// Whether the kernel confirmed every grace period so far.
    pub(crate) confirmed: bool,
}

impl GracePeriods {
    /// Starts the thread; `wait` waits for a grace period and returns whether the kernel confirmed it.
    pub(crate) fn start(mut wait: impl FnMut() -> bool + Send + 'static) -> io::Result<Self> {
        // One of each: a grace period begins only when the end of the last one was noted.
        let (begin, begun) = bounded::<()>(1);
        let (report, over) = bounded(1);
        threads::spawn("grace", OnPanic::EndProcess, move || {
            while begun.recv().is_ok() {
                let is_confirmed = wait();
                if !is_confirmed {
                    thread::sleep(WITHOUT_MEMBARRIER);
                }
                if report.send(is_confirmed).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self {
            begin,
            over,
            running: false,
            confirmed: true,
        })
    }

    /// Begins a grace period unless one is running; returns whether it did.
    pub(crate) fn begin(&mut self) -> bool {
        if self.running {
            return false;
        }
        // An error means that the thread has ended: freed cells are then never reused, which is
        // wasteful but safe.
        self.running = self.begin.send(()).is_ok();
        self.running
    }

    /// Returns whether the current grace period has ended; reports each end once.
    pub(crate) fn ended(&mut self) -> bool {
        let ended = self.over.try_recv().ok();
        self.note(ended)
    }

    /// Waits for the current grace period to end; `false` if none is running.
    pub(crate) fn wait(&mut self) -> bool {
        let ended = if self.running {
            self.over.recv().ok()
        } else {
            None
        };
        self.note(ended)
    }

    fn note(&mut self, ended: Option<bool>) -> bool {
        let Some(is_confirmed) = ended else {
            return false;
        };
        self.running = false;
        self.confirmed &= is_confirmed;
        true
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn the_lease_counts_from_the_last_sign_of_life() {
        assert_eq!(deadline(1000, 0, 10), 1010, "no heartbeats were promised");
        assert_eq!(
            deadline(1000, 900, 10),
            910,
            "the runtime has been silent since 900"
        );
        assert_eq!(deadline(1000, 1001, 10), 1010, "never past the clock");
        assert_eq!(deadline(u64::MAX, 0, 10), u64::MAX);
    }

    #[test]
    fn renewals_precede_lease_ends() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let control = Arc::new(ControlPage::map(file.as_fd()).unwrap());
        for (seconds, milliseconds) in [(1, 125), (10, 1_250), (60, 1_250), (3_600, 1_250)] {
            let lease = Lease::new(control.clone(), Duration::from_secs(seconds));
            assert_eq!(lease.interval(), Duration::from_millis(milliseconds));
            lease.renew(Duration::ZERO);
            assert!(lease.remaining() <= UNWATCHED, "{seconds} s");
        }
    }

    #[test]
    fn grace_periods_run_singly() {
        let mut grace = GracePeriods::start(|| true).unwrap();
        assert!(!grace.ended() && !grace.wait(), "none was begun");
        assert!(grace.begin());
        assert!(!grace.begin(), "one is running");
        assert!(grace.wait());
        assert!(!grace.ended() && !grace.running);
    }
}
