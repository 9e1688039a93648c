//! From a frame to a reply, or to the reason for passing it to the network stack.

use core::mem::offset_of;

use aya_ebpf::helpers::generated::{bpf_get_prandom_u32, bpf_ktime_get_ns};
use dns_common::{
    control::{CLIENT_BUCKETS, Control, client_bucket},
    counters::{OUTCOME_SLOTS, Outcome},
    entry::EntryHeader,
    scope::{HeardClient, MAX_ENDPOINTS, MIN_HEARD_PORT, PROBE_INTERVAL_NS, PROBE_SHARE, Probe},
};

use crate::{
    bytes::{Span, barrier, load, store},
    filter,
    frame::{Frame, IPV6_SOURCE_END, UDP_LEN},
    hook::Hook,
    lookup,
    maps::{self, Context, Scratch, pass_to_stack},
    parse,
    question::Layout,
    reply,
    tap::{self, Seen},
};

/// The decision of the packet core, carried out by the hook.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Send the packet back: it now holds the reply.
    Reply,
    /// Pass it to the network stack, unmodified.
    Pass,
    /// Drop it, see [`is_shed`].
    Drop,
}

/// Answers the frame if it is a query for a published name.
#[inline(always)]
pub fn answer<H: Hook>(hook: &H, context: &Context) -> Verdict {
    match datagram(hook, context) {
        Some(frame) if maps::acquire_scratch(context.scratch) => {
            answer_datagram(hook, context, frame)
        }
        Some(_) => {
            maps::count(Outcome::Busy as usize);
            Verdict::Pass
        }
        None => Verdict::Pass,
    }
}

/// Returns the offsets in the frame if it is a datagram for us.
#[inline(always)]
pub fn datagram<H: Hook>(hook: &H, context: &Context) -> Option<Frame> {
    match filter::filter(hook, context.scope, context.zero) {
        Ok(frame) => Some(frame.value_barrier(context.zero)),
        Err(outcome) => {
            maps::count(outcome as usize);
            None
        }
    }
}

/// Answers a datagram for us if it is a query for a published name; otherwise tail-calls the
/// program for forwarded answers. Holds the scratch space for the duration of the call.
#[inline(always)]
pub fn answer_datagram<H: Hook>(hook: &H, context: &Context, frame: Frame) -> Verdict {
    let answer = try_answer(hook, context, frame);
    if !H::IS_FIRST
        && matches!(answer, Err(Outcome::NotPublished))
        && context.control.answer_generation != 0
    {
        frame.save_to_scratch(context.scratch);
        hook.call_forwarded();
    }
    conclude(hook, context, frame, answer)
}

/// Counts and reports the outcome of a datagram for us and releases the scratch space. An error is
/// an [`Outcome`] as a number.
#[inline(always)]
pub fn conclude<H: Hook>(
    hook: &H,
    context: &Context,
    frame: Frame,
    answer: Result<maps::Answered, Outcome>,
) -> Verdict {
    let &Context {
        control,
        scope: _,
        scratch,
        zero,
    } = context;
    let (verdict, seen) = match &answer {
        Ok(answered) => {
            maps::count_reply(answered);
            let seen = Seen {
                outcome: answered.outcome as u8,
                answered: true,
                rcode: answered.rcode,
                answers: answered.answers,
            };
            (Verdict::Reply, seen)
        }
        &Err(outcome) => {
            let reason = zero.value_barrier(outcome as usize, OUTCOME_SLOTS - 1);
            let (verdict, outcome) = if is_shed(hook, control, scratch, &frame, reason) {
                (Verdict::Drop, Outcome::Shed as usize)
            } else {
                (Verdict::Pass, reason)
            };
            maps::count(outcome);
            (
                verdict,
                Seen {
                    outcome: outcome as u8,
                    answered: false,
                    rcode: 0,
                    answers: 0,
                },
            )
        }
    };
    if !H::IS_FIRST && control.tap_every != 0 && tap::is_due(control) {
        // If the ring is full, the event is lost; there is nowhere to report that.
        let _ = tap::send(hook, zero, &frame, &seen.value_barrier(zero));
    }
    maps::release_scratch(scratch);
    verdict
}

/// Runs the steps from a datagram to its reply, in order.
#[inline(always)]
fn try_answer<H: Hook>(
    hook: &H,
    context: &Context,
    frame: Frame,
) -> Result<maps::Answered, Outcome> {
    let &Context {
        control,
        scope: _,
        scratch,
        zero,
    } = context;
    let now = maps::coarse_now(scratch);
    if now >= control.lease_deadline_ns {
        return pass_to_stack(Outcome::LeaseExpired);
    }
    filter::pull_message(hook, &frame)?;
    let question = parse::parse(hook, control, zero, &frame)?;
    // SAFETY: this CPU's own element, not shared while the program runs.
    let words = unsafe { &mut (*scratch).words };
    let (hash, name_sum) = parse::read_name(
        hook,
        &frame,
        question.name_len,
        control.hash_seed,
        zero,
        words,
    )?;
    let question = question.value_barrier(zero);
    // For the program called next: it may know an answer of another type, too.
    let save = |_: &Outcome| question.save_to_scratch(scratch, hash, name_sum);
    let entry = lookup::lookup::<H>(zero, hash, question.name_len, words).inspect_err(save)?;
    let plan = reply::plan(hook, context, frame, question, &entry)
        .inspect_err(save)?
        .value_barrier(zero);
    let is_partial = reply::is_partial(hook, &plan.layout.frame, &plan.layout.question, name_sum)?;
    let plan = plan.with_partial(is_partial, zero);
    make_room(hook, context, &plan.layout, now)?;
    reply::write(hook, context, &plan)?;
    // SAFETY: the helper has no precondition.
    let last_used = if control.exact_last_used == 0 {
        now
    } else {
        unsafe { bpf_ktime_get_ns() }
    };
    // CPUs read the clock at different times: the later one wins, or they would take turns forever.
    if entry.header().last_used_ns < last_used {
        // SAFETY: the entry is readable and writable, and `last_used_ns` is its first field.
        unsafe {
            store(
                entry.address + offset_of!(EntryHeader, last_used_ns),
                last_used,
            )
        };
    }
    Ok(plan.answered())
}

/// Resizes the frame to the length of the planned reply, unless the query becomes a probe. Nothing
/// is written yet, so userspace can still answer the query.
#[inline(always)]
pub fn make_room<H: Hook>(
    hook: &H,
    context: &Context,
    layout: &Layout,
    now: u64,
) -> Result<(), Outcome> {
    let control = context.control;
    if is_unheard(hook, context, &layout.frame, now) {
        return pass_to_stack(Outcome::UnheardClient);
    }
    // While queries are shed, a full queue would lose the probe.
    if now >= control.shed_until_ns
        && now < control.probe_until_ns
        && is_probe(hook, context, &layout.frame, now)
    {
        return pass_to_stack(Outcome::Probe);
    }
    if !hook.grow(layout) {
        return pass_to_stack(Outcome::NoRoom);
    }
    Ok(())
}

/// Returns whether to pass this answerable query to userspace as a probe, to test whether it
/// arrives.
#[inline(always)]
fn is_probe<H: Hook>(hook: &H, context: &Context, frame: &Frame, now: u64) -> bool {
    let &Context { scope, scratch, .. } = context;
    let probe =
        &raw const frame.interface(scope).probes[barrier(frame.endpoint) & (MAX_ENDPOINTS - 1)];
    // The programs write this word, so the compiler must not treat it as part of the shared
    // reference.
    let probe = barrier(probe as usize);
    // SAFETY: a probe in a map's memory.
    let due = unsafe { load::<u64>(probe + offset_of!(Probe, due_ns)) };
    // At random, because clients that take turns would otherwise be probed always or never.
    // SAFETY: the helper is always safe to call.
    if now < due || unsafe { bpf_get_prandom_u32() } % PROBE_SHARE != 0 {
        return false;
    }
    // SAFETY: as above; only the programs write it.
    unsafe { store(probe + offset_of!(Probe, due_ns), now + PROBE_INTERVAL_NS) };
    // The sockets of a killed server are gone immediately, so a probe would be lost.
    if !maps::is_listening(hook.context(), scratch, scope, frame.endpoint, frame.v6) {
        return false;
    }
    if !store_client(hook, frame, probe + offset_of!(Probe, client)) {
        return false;
    }
    // SAFETY: a probe in a map's memory, written only by the programs.
    unsafe {
        let count = probe + offset_of!(Probe, count);
        store(count, load::<u64>(count) + 1);
    }
    true
}

/// Writes the client's address to `to`, 16 bytes of a map's memory; returns false if the packet is too short, which
/// it never is.
#[inline(always)]
fn store_client<H: Hook>(hook: &H, frame: &Frame, to: usize) -> bool {
    let Span { start: ip, end } = hook.span(frame.ip());
    if ip + IPV6_SOURCE_END > end {
        return false;
    }
    // SAFETY: the caller's memory. For both families the packet was compared with its end: an IPv4 header is
    // followed by a DNS header.
    unsafe {
        if frame.is_v6() {
            store(to, load::<u64>(ip + 8));
            store(to + 8, load::<u64>(ip + 16));
        } else {
            store(to, 0u64);
            store(to + 8, u32::from_ne_bytes([0, 0, 0xff, 0xff]));
            store(to + 12, load::<u32>(ip + 12));
        }
    }
    true
}

/// Returns whether to leave an answerable query to userspace because the kernel's verdict depends on the client here,
/// and no query of this client has arrived lately.
#[inline(always)]
fn is_unheard<H: Hook>(hook: &H, context: &Context, frame: &Frame, now: u64) -> bool {
    let &Context { scope, scratch, .. } = context;
    let interface = frame.interface(scope);
    if interface.heard_only >> (barrier(frame.endpoint) & (MAX_ENDPOINTS - 1)) & 1 == 0 {
        return false;
    }
    let Span { start: udp, end } = hook.span(frame.ip() + frame.headers_len() - UDP_LEN);
    if udp + UDP_LEN > end {
        return true;
    }
    // SAFETY: just compared with the end.
    if u16::from_be(unsafe { load::<u16>(udp) }) < MIN_HEARD_PORT {
        return true;
    }
    // SAFETY: this CPU's own element.
    let client = barrier(unsafe { &raw mut (*scratch).client } as usize);
    // SAFETY: as above.
    unsafe {
        store(client + offset_of!(HeardClient, ifindex), interface.ifindex);
        store(
            client + offset_of!(HeardClient, endpoint),
            frame.endpoint as u32,
        );
    }
    !store_client(hook, frame, client + offset_of!(HeardClient, address))
        || !maps::is_heard(scratch, now)
}

/// Sheds load: while userspace receives more queries than it can answer, the programs drop a share of the packets
/// that they would pass to it. Returns whether to drop a datagram for us that would be passed for this reason (an
/// [`Outcome`] as a number).
///
/// A query dropped by a full receive queue has already cost the kernel its whole path through the
/// stack; the more queries are dropped there, the less CPU time remains for answering. Userspace
/// sets the share that passes ([`Control::pass_shares`]) per group of clients, so that a client
/// that floods the server takes nothing from other groups. Published names are answered before this
/// check.
#[inline(always)]
fn is_shed<H: Hook>(
    hook: &H,
    control: &Control,
    scratch: *mut Scratch,
    frame: &Frame,
    reason: usize,
) -> bool {
    // A server that hangs never lifts its limit, so the limit expires and ends with the lease.
    if maps::coarse_now(scratch) >= control.shed_until_ns
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
    let bucket = barrier(client_bucket(last_four.to_ne_bytes())) & (CLIENT_BUCKETS - 1);
    // SAFETY: the helper has no precondition.
    unsafe { bpf_get_prandom_u32() > control.pass_shares[bucket] }
}
