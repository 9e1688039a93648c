//! The lease: how long the program may answer without hearing from userspace.
//!
//! Only the publisher's own loop renews it, so a publisher that hangs lets it
//! run out. That the publisher lives does not prove that the rest does: while
//! the daemon gives heartbeats, the lease counts from the last one, so a dead
//! runtime lets it run out too.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use super::{maps::ControlPage, sys};

/// Renews the deadline in the `CONTROL` map.
#[derive(Clone, Debug)]
pub(super) struct Lease {
    /// Where the deadline stands.
    control: Arc<ControlPage>,
    /// Length, ns.
    length_ns: u64,
    /// When the daemon's runtime last gave a sign of life, ns of
    /// CLOCK_MONOTONIC; 0: it has not promised any.
    heartbeat_ns: Arc<AtomicU64>,
}

impl Lease {
    /// A lease of this length, not running yet.
    pub(super) fn new(control: Arc<ControlPage>, length: Duration) -> Self {
        let length_ns = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX / 4);
        Self { control, length_ns, heartbeat_ns: Arc::default() }
    }

    /// The page that the deadline stands on, for whoever has more to say there.
    pub(super) fn page(&self) -> Arc<ControlPage> {
        self.control.clone()
    }

    /// How often to renew: often enough for two renewals to be missed.
    pub(super) fn interval(&self) -> Duration {
        Duration::from_nanos((self.length_ns / 4).max(1_000_000))
    }

    /// A sign of life of the daemon's runtime. From the first one on they must keep coming.
    pub(super) fn heartbeat(&self) {
        self.heartbeat_ns.store(sys::monotonic_ns(), Ordering::Relaxed);
    }

    /// Renews.
    pub(super) fn renew(&self) {
        let heartbeat = self.heartbeat_ns.load(Ordering::Relaxed);
        self.control.set_lease(deadline(sys::monotonic_ns(), heartbeat, self.length_ns));
    }

    /// Switches the fast path off.
    pub(super) fn end(&self) {
        self.control.set_lease(0);
    }

    /// How long it still runs; zero: it has run out.
    pub(super) fn remaining(&self) -> Duration {
        Duration::from_nanos(self.control.lease().saturating_sub(sys::monotonic_ns()))
    }

    /// Its length.
    pub(super) fn length(&self) -> Duration {
        Duration::from_nanos(self.length_ns)
    }
}

/// The end of the lease, given the clock and the last heartbeat (0: none promised).
fn deadline(now_ns: u64, heartbeat_ns: u64, length_ns: u64) -> u64 {
    let alive_at = if heartbeat_ns == 0 { now_ns } else { heartbeat_ns.min(now_ns) };
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
