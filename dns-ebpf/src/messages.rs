//! Log messages, sent by aya-log, about rare events that an operator would not look for among the
//! counters. Everything else is reported by counters and the tap.
//!
//! The verifier sees the level as a constant (`AYA_LOG_LEVEL`, set by userspace before it loads the
//! object) and removes the code of messages above it.

use aya_log_ebpf::warn;

use crate::maps::{self, Scratch};

/// Minimum nanoseconds between two messages of a CPU.
const PAUSE: u64 = 1_000_000_000;

/// Records that two names have the same hash: the published one is answered here, the other one in
/// userspace.
#[inline(always)]
pub fn note_collision(scratch: *mut Scratch) {
    // SAFETY: this CPU's own element, not shared while the program runs.
    unsafe { (*scratch).collisions += 1 };
}

/// Logs the recorded collisions. Must be called last, when the verifier no longer distinguishes
/// paths, because it follows this code once per path.
#[inline(always)]
pub fn log_collisions(scratch: *mut Scratch) {
    // SAFETY: as in `note_collision`.
    if unsafe { (*scratch).collisions } != 0 {
        log_at_intervals(scratch);
    }
}

/// Logs the collisions, at most once per [`PAUSE`]. Inlined: before Linux 6.2 and late 5.15
/// releases, a single function call makes the verifier track every number of the program precisely
/// and follow a separate path for each value.
#[inline(always)]
fn log_at_intervals(scratch: *mut Scratch) {
    let now = maps::coarse_now(scratch);
    // SAFETY: as in `note_collision`.
    let collisions = unsafe {
        if now - (*scratch).told_ns < PAUSE {
            return;
        }
        (*scratch).told_ns = now;
        core::mem::take(&mut (*scratch).collisions)
    };
    warn!(
        (),
        "{} queries for a name with the hash of a published one: answered by userspace", collisions
    );
}
