//! Why a packet goes up.

use core::arch::asm;

use dns_common::counters::Outcome;

/// A packet goes up for this reason.
///
/// The compiler would have every check that may fail write its reason down before it looks,
/// where all of them leave by one door. With a statement of its own behind each check, the
/// reason is written where the check has failed (measured: 2 of 100 instructions of a reply).
#[inline(always)]
pub fn goes_up<T>(reason: Outcome) -> Result<T, Outcome> {
    // SAFETY: no instruction at all.
    unsafe { asm!("/* goes up */", options(nomem, nostack, preserves_flags)) }
    Err(reason)
}
