//! Heartbeat of the watcher's thread.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// Time of the last round of the watcher's loop.
#[derive(Debug)]
pub(super) struct Pulse {
    epoch: Instant,
    /// Milliseconds from the epoch to the last heartbeat.
    last_ms: AtomicU64,
}

impl Pulse {
    /// Starts with a heartbeat.
    pub(super) fn new() -> Self {
        Self { epoch: Instant::now(), last_ms: AtomicU64::new(0) }
    }

    pub(super) fn heartbeat(&self) {
        self.last_ms.store(self.elapsed_ms(), Ordering::Relaxed);
    }

    /// Returns the time since the last heartbeat.
    pub(super) fn silent_for(&self) -> Duration {
        Duration::from_millis(self.elapsed_ms().saturating_sub(self.last_ms.load(Ordering::Relaxed)))
    }

    /// Returns the milliseconds since the epoch.
    fn elapsed_ms(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}
