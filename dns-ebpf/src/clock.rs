//! The time, as it is at the last tick.

use aya_ebpf::helpers::generated::{bpf_jiffies64, bpf_ktime_get_coarse_ns};

use crate::maps::Scratch;

/// `CLOCK_MONOTONIC_COARSE` in ns, at most a tick behind.
///
/// It changes once a tick, so it is asked for once a tick: reading the number of
/// the tick is a plain load (the verifier puts it in the place of the helper,
/// Linux 5.6), asking for the time is a call.
#[inline(always)]
pub fn now(scratch: *mut Scratch) -> u64 {
    // SAFETY: the helpers have no precondition; this CPU's own element, alone
    // while the program runs.
    unsafe {
        let tick = bpf_jiffies64();
        if (*scratch).tick != tick {
            (*scratch).tick = tick;
            (*scratch).now_ns = bpf_ktime_get_coarse_ns();
        }
        (*scratch).now_ns
    }
}
