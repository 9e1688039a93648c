//! How fast news and interfaces are dealt with.

use std::time::{Duration, Instant};

/// How long to wait for further news of the kernel before acting: containers bring several at once.
const COALESCE: Duration = Duration::from_millis(20);

/// The same while news keep coming: each look lists all interfaces.
const COALESCE_MOST: Duration = Duration::from_millis(640);

/// How long there must have been no news for the next ones to be acted upon at once.
const CALM: Duration = Duration::from_secs(2);

/// Attaching and detaching hold the RTNL lock, which all of the machine's network configuration
/// needs: the pause after each is 19 times as long (5 %).
const RTNL_PAUSE: u32 = 19;

/// Longest pause: what takes longer than a twentieth of it waited for the lock or the CPU.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// How long to gather news before acting upon them.
pub(super) struct Pace {
    /// The last wait.
    wait: Duration,
    /// When it began; `None`: there were no news yet.
    last: Option<Instant>,
}

impl Pace {
    /// No news yet.
    pub(super) fn new() -> Self {
        Self { wait: COALESCE, last: None }
    }

    /// There are news: how long to wait for more. Little after a calm, and twice as long each
    /// time while they keep coming.
    pub(super) fn wait(&mut self, now: Instant) -> Duration {
        let calm = self.last.is_none_or(|last| now.saturating_duration_since(last) > CALM);
        self.wait = if calm { COALESCE } else { (self.wait * 2).min(COALESCE_MOST) };
        self.last = Some(now);
        self.wait
    }
}

/// When the RTNL lock may be taken again.
#[derive(Debug, Default)]
pub(super) struct RtnlPace {
    /// Not before then; `None`: now.
    next: Option<Instant>,
}

impl RtnlPace {
    /// Whether the pause is over.
    pub(super) fn may_go(&self, now: Instant) -> bool {
        self.next.is_none_or(|next| now >= next)
    }

    /// Does something that takes the lock; the time it took counts as holding it.
    pub(super) fn take<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let done = work();
        let took = begun.elapsed();
        self.next = Some(begun + took + (took * RTNL_PAUSE).min(LONGEST_PAUSE));
        done
    }

    /// How long the pause still is.
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
        // Not 500: one every 20 ms.
        assert!(looks < 25, "{looks} looks in ten seconds of news");
        assert_eq!(pace.wait(now + CALM * 2), COALESCE, "after a calm");
    }
}
