//! Events that an operator must know about for a while after they happened.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// A kind of event, counted since the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CountedEvent {
    /// A panic was caught.
    Panic,
    /// The kernel refused to accept a TCP connection.
    RefusedConnection,
    /// A log line was lost.
    LostLogLine,
    /// An interface dropped a query under overload.
    ShedQuery,
}

impl CountedEvent {
    /// Returns how long the condition holds after the latest event.
    fn holds(self) -> Duration {
        match self {
            // Longer than the others: an operator must find the defect in `status`.
            Self::Panic => Duration::from_secs(15 * 60),
            Self::RefusedConnection | Self::LostLogLine => Duration::from_secs(10 * 60),
            // Shedding is counted all the time while it lasts.
            Self::ShedQuery => Duration::from_secs(60),
        }
    }
}

/// Reads a counter that only grows.
type ReadCounter = Box<dyn Fn() -> u64 + Send + Sync>;

/// Follows the counters of events.
#[derive(Default)]
pub(crate) struct RecentEvents(Vec<FollowedCounter>);

struct FollowedCounter {
    event: CountedEvent,
    read: ReadCounter,
    /// The last value.
    seen: Mutex<EventCount>,
}

#[derive(Default)]
struct EventCount {
    count: u64,
    /// Time at which the counter had grown.
    grown: Option<Instant>,
}

impl RecentEvents {
    /// Follows these counters, which are zero now.
    pub(crate) fn of(counters: Vec<(CountedEvent, ReadCounter)>) -> Self {
        let followed = counters.into_iter().map(|(event, read)| FollowedCounter {
            event,
            read,
            seen: Mutex::default(),
        });
        Self(followed.collect())
    }

    /// Returns the number of events since the start if one happened lately.
    pub(crate) fn recent(&self, event: CountedEvent) -> Option<u64> {
        let counter = self.0.iter().find(|counter| counter.event == event)?;
        let count = (counter.read)();
        let now = Instant::now();
        let mut seen = counter.seen.lock();
        // Compared at each probe: what happened between two of them counts from the later one.
        if seen.count != count {
            *seen = EventCount {
                count,
                grown: Some(now),
            };
        }
        let is_recent = now.saturating_duration_since(seen.grown?) < event.holds();
        is_recent.then_some(count)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    };

    use super::*;

    #[test]
    fn counter_that_grew_is_recent() {
        let count = Arc::new(AtomicU64::new(0));
        let read = count.clone();
        let counters: Vec<(CountedEvent, ReadCounter)> = vec![(
            CountedEvent::Panic,
            Box::new(move || read.load(Ordering::Relaxed)),
        )];
        let events = RecentEvents::of(counters);
        assert_eq!(events.recent(CountedEvent::Panic), None);
        count.store(2, Ordering::Relaxed);
        assert_eq!(events.recent(CountedEvent::Panic), Some(2));
        assert_eq!(events.recent(CountedEvent::Panic), Some(2), "still");
        assert_eq!(events.recent(CountedEvent::ShedQuery), None, "not followed");
    }
}
