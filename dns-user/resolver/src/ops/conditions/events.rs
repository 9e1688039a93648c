//! Events that an operator must know about for a while after they happened.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// A kind of event, counted since the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A panic was caught.
    Panic,
    /// The kernel refused to accept a TCP connection.
    RefusedConnection,
    /// A log line was lost.
    LostLogLine,
    /// An interface dropped a query under overload.
    ShedQuery,
}

impl Event {
    /// Returns how long the condition holds after the latest event.
    fn holds(self) -> Duration {
        match self {
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
pub(crate) struct RecentEvents {
    counters: Vec<(Event, ReadCounter)>,
    /// What was seen of each counter.
    seen: Mutex<Vec<Seen>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    count: u64,
    /// Time at which the counter had grown.
    grown: Option<Instant>,
}

impl RecentEvents {
    /// Follows these counters, which are zero now.
    pub(crate) fn of(counters: Vec<(Event, ReadCounter)>) -> Self {
        let seen = Mutex::new(vec![Seen::default(); counters.len()]);
        Self { counters, seen }
    }

    /// Returns the number of events since the start if one happened lately.
    pub(crate) fn recent(&self, event: Event) -> Option<u64> {
        let position = self
            .counters
            .iter()
            .position(|(known, _)| *known == event)?;
        let count = self.counters[position].1();
        let now = Instant::now();
        let mut seen = self.seen.lock();
        let seen = seen.get_mut(position)?;
        if seen.count != count {
            *seen = Seen {
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
        let counters: Vec<(Event, ReadCounter)> =
            vec![(Event::Panic, Box::new(move || read.load(Ordering::Relaxed)))];
        let events = RecentEvents::of(counters);
        assert_eq!(events.recent(Event::Panic), None);
        count.store(2, Ordering::Relaxed);
        assert_eq!(events.recent(Event::Panic), Some(2));
        assert_eq!(events.recent(Event::Panic), Some(2), "still");
        assert_eq!(events.recent(Event::ShedQuery), None, "not followed");
    }
}
