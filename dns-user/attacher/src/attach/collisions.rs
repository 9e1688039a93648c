//! Log messages about queries whose names' hashes collide.

use std::time::{Duration, Instant};

use dns_common::counters::Outcome;
use dns_fastpath::map::CounterPages;

/// Minimum time between two messages about collisions.
const COLLISION_PAUSE: Duration = Duration::from_secs(1);

/// Queries for a name with the hash of a published one, which an operator would not look for among the counters.
#[derive(Default)]
pub(crate) struct Collisions {
    reported: u64,
    /// When they were last counted.
    at: Option<Instant>,
}

impl Collisions {
    /// Logs those since the last message, at most once per [`COLLISION_PAUSE`].
    pub(crate) fn report(&mut self, counters: &CounterPages) {
        // Called at each wake-up, and the total reads a cache line of every CPU that its programs
        // write.
        if self.at.is_some_and(|at| at.elapsed() < COLLISION_PAUSE) {
            return;
        }
        self.at = Some(Instant::now());
        let counted = counters.total(Outcome::Collision);
        if counted > self.reported {
            tracing::warn!(
                queries = counted - self.reported,
                "queries for a name with the hash of a published one: answered by userspace"
            );
        }
        self.reported = counted;
    }
}
