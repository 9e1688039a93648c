//! The coarse clock, cached per tick.

use aya_ebpf::helpers::generated::{bpf_jiffies64, bpf_ktime_get_coarse_ns};

use crate::maps::Scratch;

/// Returns `CLOCK_MONOTONIC_COARSE` in ns, at most one tick behind.
///
/// The coarse clock changes once per tick, so the helper is called once per tick. The tick's number
/// is a plain load, because the verifier inlines that helper (Linux 5.6).
#[inline(always)]
pub fn now(scratch: *mut Scratch) -> u64 {
    // SAFETY: the helpers have no precondition; this CPU's own element, not shared while the
    // program runs.
    unsafe {
        let tick = bpf_jiffies64();
        if (*scratch).tick != tick {
            (*scratch).tick = tick;
            (*scratch).now_ns = bpf_ktime_get_coarse_ns();
        }
        (*scratch).now_ns
    }
}
