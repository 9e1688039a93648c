//! The monotonic clock used for decisions.

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
