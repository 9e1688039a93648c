//! The clock of decisions.

use std::{
    sync::OnceLock,
    time::{Duration, Instant, SystemTime},
};

/// Milliseconds since 1970 by the clock at the process's start, steady since: setting the clock delays
/// nothing.
pub(crate) fn now_ms() -> u64 {
    static BEGUN: OnceLock<(Instant, Duration)> = OnceLock::new();
    let (begun, clock) =
        BEGUN.get_or_init(|| (Instant::now(), SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default()));
    (*clock + begun.elapsed()).as_millis() as u64
}
