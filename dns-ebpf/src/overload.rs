//! Shedding: while userspace has more queries than it can answer, a part of what would go
//! up is dropped here.
//!
//! A query that the full receive queue of a socket drops has cost the kernel its whole way
//! up, and the more are dropped there the less of the CPU is left for answering. Userspace
//! says how much may come ([`Control::pass_shares`]), group by
//! group of clients, so that one that floods the server takes nothing from the others.
//! Published names are answered before anybody comes here.

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

/// Whether a datagram for us that would go up for this reason (an [`Outcome`] as a number) is shed.
#[inline(always)]
pub fn is_shed<H: Hook>(
    hook: &H,
    control: &Control,
    scratch: *mut Scratch,
    frame: &Frame,
    reason: usize,
) -> bool {
    // A server that hangs takes nothing back that it said before.
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
