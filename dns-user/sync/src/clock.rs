//! The monotonic clock used for decisions, and the rate limit for log lines.

use std::{
    sync::OnceLock,
    time::{Duration, Instant, SystemTime},
};

/// Returns milliseconds since 1970: the wall clock at the start of the process, monotonic since, so
/// that setting the clock delays nothing.
pub(crate) fn now_ms() -> u64 {
    static BEGUN: OnceLock<(Instant, Duration)> = OnceLock::new();
    let (begun, clock) =
        BEGUN.get_or_init(|| (Instant::now(), SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default()));
    (*clock + begun.elapsed()).as_millis() as u64
}

//----------- LogLimit --------------------------------------------------------

/// Number of consecutive lines that are logged.
const BURST: u64 = 10;

/// Time after which one more line is logged, in milliseconds.
const INTERVAL_MS: u64 = 1000;

/// Allows a burst of lines, then one per second, and counts the omitted ones.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LogLimit {
    /// Time at which a full burst is allowed again, in milliseconds.
    full_at: u64,
    omitted: u64,
}

impl LogLimit {
    /// Returns the number of lines omitted since the last one if a line may be logged at `now`,
    /// else `None`.
    pub(crate) fn allow(&mut self, now: u64) -> Option<u64> {
        let base = self.full_at.max(now);
        if base - now >= BURST * INTERVAL_MS {
            self.omitted += 1;
            return None;
        }
        self.full_at = base + INTERVAL_MS;
        Some(std::mem::take(&mut self.omitted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floods_log_once_per_second() {
        let mut limit = LogLimit::default();
        let logged: Vec<u64> = (0..5000).filter_map(|now| limit.allow(now)).collect();
        assert_eq!(logged.len() as u64, BURST + 5);
        assert!(logged.iter().sum::<u64>() > 4900 - 1000, "{logged:?}");
    }
}
