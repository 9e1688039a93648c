//! The lease: how long the program may answer without hearing from userspace.
//!
//! Only the publisher's own loop renews it, so a publisher that hangs lets it
//! run out. That the publisher lives does not prove that the rest does: while
//! the daemon gives heartbeats, the lease counts from the last one, so a dead
//! runtime lets it run out too, and so do health checks that hang: a heartbeat is as
//! old as the oldest sign of life that it rests on. While something that the publisher
//! was told is not in the map yet, the lease counts from when that was told: entries
//! that say what was true before are answered from for the length of a lease at most,
//! however busy the machine is.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use crate::map::control::ControlPage;
use dns_platform::clock::kernel_monotonic_ns;

/// Renews the deadline in the `CONTROL` map.
#[derive(Clone, Debug)]
pub(crate) struct Lease {
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
    pub(crate) fn new(control: Arc<ControlPage>, length: Duration) -> Self {
        let length_ns = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX / 4);
        Self { control, length_ns, heartbeat_ns: Arc::default() }
    }

    /// The page that the deadline stands on, for whoever has more to say there.
    pub(crate) fn page(&self) -> Arc<ControlPage> {
        self.control.clone()
    }

    /// How often to renew: so often that most of the lease is left whenever the process
    /// is stopped.
    pub(crate) fn interval(&self) -> Duration {
        Duration::from_nanos((self.length_ns / 8).max(1_000_000))
    }

    /// A sign of life of the daemon's runtime, `age` old. From the first one on they must
    /// keep coming.
    pub(crate) fn heartbeat(&self, age: Duration) {
        let age = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        // Zero would mean that none was promised.
        let at = kernel_monotonic_ns().saturating_sub(age).max(1);
        self.heartbeat_ns.store(at, Ordering::Relaxed);
    }

    /// Renews. `behind`: how long ago the publisher was told the oldest of what is not
    /// in the map yet.
    pub(crate) fn renew(&self, behind: Duration) {
        let heartbeat = self.heartbeat_ns.load(Ordering::Relaxed);
        let behind_ns = u64::try_from(behind.as_nanos()).unwrap_or(u64::MAX);
        let current_at = kernel_monotonic_ns().saturating_sub(behind_ns);
        self.control.set_lease(deadline(current_at, heartbeat, self.length_ns));
    }

    /// Switches the fast path off.
    pub(crate) fn end(&self) {
        self.control.set_lease(0);
    }

    /// How long it still runs; zero: it has run out.
    pub(crate) fn remaining(&self) -> Duration {
        Duration::from_nanos(self.control.lease().saturating_sub(kernel_monotonic_ns()))
    }

    /// Its length.
    pub(crate) fn length(&self) -> Duration {
        Duration::from_nanos(self.length_ns)
    }
}

/// The end of the lease, given the moment of which the map is and the last heartbeat (0: none promised).
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
