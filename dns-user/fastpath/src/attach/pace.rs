//! Limits how often events are handled and interfaces are changed.

use std::time::{Duration, Instant};

/// Time to wait for further events before handling them: starting a container causes several.
const COALESCE: Duration = Duration::from_millis(20);

/// Maximum of that time while events keep coming: each round lists all interfaces.
const COALESCE_MOST: Duration = Duration::from_millis(640);

/// Silence after which the next event is handled immediately.
const CALM: Duration = Duration::from_secs(2);

/// Length of the pause after attaching or detaching, as a multiple of its duration: both hold the
/// RTNL lock, which all network configuration needs, so they take at most 5 % of the time.
const RTNL_PAUSE: u32 = 19;

/// Maximum pause: an operation longer than a twentieth of it was waiting for the lock or the CPU.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Decides how long to gather events.
pub(super) struct Pace {
    wait: Duration,
    /// Start of the last wait; `None` before the first event.
    last: Option<Instant>,
}

impl Pace {
    pub(super) fn new() -> Self {
        Self { wait: COALESCE, last: None }
    }

    /// Returns how long to wait for more events: briefly after a quiet period, and twice as long
    /// each time while they keep coming.
    pub(super) fn wait(&mut self, now: Instant) -> Duration {
        let calm = self.last.is_none_or(|last| now.saturating_duration_since(last) > CALM);
        self.wait = if calm { COALESCE } else { (self.wait * 2).min(COALESCE_MOST) };
        self.last = Some(now);
        self.wait
    }
}

/// Decides when the RTNL lock may be taken again.
#[derive(Debug, Default)]
pub(super) struct RtnlPace {
    /// Earliest time of the next operation; `None`: now.
    next: Option<Instant>,
}

impl RtnlPace {
    /// Returns whether the pause has ended.
    pub(super) fn may_go(&self, now: Instant) -> bool {
        self.next.is_none_or(|next| now >= next)
    }

    /// Runs an operation that takes the lock; its whole duration counts as holding it.
    pub(super) fn take<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let done = work();
        let took = begun.elapsed();
        self.next = Some(begun + took + (took * RTNL_PAUSE).min(LONGEST_PAUSE));
        done
    }

    /// Returns the rest of the pause.
    pub(super) fn wait(&self) -> Duration {
        self.next.map_or(Duration::ZERO, |next| next.saturating_duration_since(Instant::now()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_news_are_gathered() {
        let (mut pace, mut now, mut looks) = (Pace::new(), Instant::now(), 0);
        assert_eq!(pace.wait(now), COALESCE, "one that comes alone is served at once");
        let end = now + Duration::from_secs(10);
        while now < end {
            now += pace.wait(now);
            looks += 1;
        }
        // Without coalescing it would be 500, one every 20 ms.
        assert!(looks < 25, "{looks} looks in ten seconds of news");
        assert_eq!(pace.wait(now + CALM * 2), COALESCE, "after a calm");
    }
}
