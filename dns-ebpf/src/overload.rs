//! Shedding: while userspace receives more queries than it can answer, the programs drop a share of
//! the packets that they would pass to it.
//!
//! A query dropped by a full receive queue has already cost the kernel its whole path through the
//! stack; the more queries are dropped there, the less CPU time remains for answering. Userspace
//! sets the share that passes ([`Control::pass_shares`]) per group of clients, so that a client
//! that floods the server takes nothing from other groups. Published names are answered before this
//! check.

use aya_ebpf::helpers::bpf_get_prandom_u32;
use dns_common::{
    control::{CLIENT_BUCKETS, Control, client_bucket},
    counters::Outcome,
};

use crate::{
    bytes::{load, opaque},
    clock,
    frame::Frame,
    hook::Hook,
    maps::Scratch,
};

/// Returns whether to drop a datagram for us that would be passed to userspace for this reason (an
/// [`Outcome`] as a number).
#[inline(always)]
pub fn is_shed<H: Hook>(
    hook: &H,
    control: &Control,
    scratch: *mut Scratch,
    frame: &Frame,
    reason: usize,
) -> bool {
    // A server that hangs never lifts its limit, so the limit expires and ends with the lease.
    if clock::now(scratch) >= control.shed_until_ns
        || reason == Outcome::LeaseExpired as usize
        || reason == Outcome::Probe as usize
    {
        return false;
    }
    let source = hook.span(frame.source_end() - 4);
    if source.start + 4 > source.end {
        return false;
    }
    // SAFETY: just checked; the packet is untouched since.
    let last_four = unsafe { load::<u32>(source.start) };
    let bucket = opaque(client_bucket(last_four.to_ne_bytes())) & (CLIENT_BUCKETS - 1);
    // SAFETY: the helper has no precondition.
    unsafe { bpf_get_prandom_u32() > control.pass_shares[bucket] }
}
