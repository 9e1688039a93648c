//! Messages for the log, by aya-log: what should never happen often, and nobody
//! would look for among the counters. Counters and the tap tell of everything else.
//!
//! The level is a constant to the verifier (`AYA_LOG_LEVEL`, set by userspace
//! before it loads the object): of a message above it no instruction is left.

use aya_log_ebpf::warn;

use crate::{clock, maps::Scratch};

/// Nanoseconds between two messages of a CPU at least.
const PAUSE: u64 = 1_000_000_000;

/// Two names have the same hash: the one that is published is answered here, the
/// other one by userspace.
#[inline(always)]
pub fn note_collision(scratch: *mut Scratch) {
    // SAFETY: this CPU's own element, alone while the program runs.
    unsafe { (*scratch).collisions += 1 };
}

/// Writes what was noted. To be called last, where nothing is left that the
/// verifier tells paths apart by: it follows all of this for each of them.
#[inline(always)]
pub fn tell(scratch: *mut Scratch) {
    // SAFETY: as in `note_collision`.
    if unsafe { (*scratch).collisions } != 0 {
        tell_of_collisions(scratch);
    }
}

/// Inlined: before Linux 6.2, or late 5.15, the verifier keeps all numbers of a program
/// that has a function of its own exactly, and follows each path for every one of them.
#[inline(always)]
fn tell_of_collisions(scratch: *mut Scratch) {
    let now = clock::now(scratch);
    // SAFETY: as in `note_collision`.
    let collisions = unsafe {
        if now - (*scratch).told_ns < PAUSE {
            return;
        }
        (*scratch).told_ns = now;
        core::mem::take(&mut (*scratch).collisions)
    };
    warn!((), "{} queries for a name with the hash of a published one: answered by userspace", collisions);
}
