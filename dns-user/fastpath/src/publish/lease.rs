//! The lease: how long the programs may answer without a renewal from userspace.
//!
//! Only the publisher's own loop renews it, so it expires if the publisher hangs. A live publisher
//! does not prove that the rest of the server is alive, so once the daemon sends heartbeats, the
//! lease is counted from the last one. A heartbeat is as old as the oldest sign of life that it
//! represents, so the lease also expires if the runtime dies or health checks hang. While a change
//! handed to the publisher is not in the map yet, the lease is counted from the time of the
//! hand-over: even on a busy machine, outdated entries are used for at most the length of a lease.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use crate::map::control::ControlPage;
use dns_kit::clock::kernel_monotonic_ns;

/// Renews the deadline in the `CONTROL` map.
#[derive(Clone, Debug)]
pub(crate) struct Lease {
    /// The page that holds the deadline.
    control: Arc<ControlPage>,
    length_ns: u64,
    /// Time of the last sign of life of the daemon's runtime, in ns of CLOCK_MONOTONIC; 0 before
    /// the first one.
    heartbeat_ns: Arc<AtomicU64>,
}

impl Lease {
    /// Returns a lease of this length that has not begun.
    pub(crate) fn new(control: Arc<ControlPage>, length: Duration) -> Self {
        let length_ns = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX / 4);
        Self { control, length_ns, heartbeat_ns: Arc::default() }
    }

    /// Returns the page that holds the deadline, for the other settings on it.
    pub(crate) fn page(&self) -> Arc<ControlPage> {
        self.control.clone()
    }

    /// Returns the renewal interval, short enough that most of the lease is left whenever the
    /// process stops.
    pub(crate) fn interval(&self) -> Duration {
        Duration::from_nanos((self.length_ns / 8).max(1_000_000))
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
        self.control.set_lease(deadline(current_at, heartbeat, self.length_ns));
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
    let alive_at = if heartbeat_ns == 0 { current_ns } else { heartbeat_ns.min(current_ns) };
    alive_at.saturating_add(length_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lease_counts_from_the_last_sign_of_life() {
        assert_eq!(deadline(1000, 0, 10), 1010, "no heartbeats were promised");
        assert_eq!(deadline(1000, 900, 10), 910, "the runtime has been silent since 900");
        assert_eq!(deadline(1000, 1001, 10), 1010, "never past the clock");
        assert_eq!(deadline(u64::MAX, 0, 10), u64::MAX);
    }
}
