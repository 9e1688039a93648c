//! From a frame to a reply, or to the reason why it goes up.

use aya_ebpf::helpers::generated::{bpf_ktime_get_coarse_ns, bpf_ktime_get_ns};
use dns_common::{counters::Outcome, entry::EntryHeader};

use crate::{
    bytes::store,
    filter,
    hook::Hook,
    lookup,
    maps::{self, CONTROL},
    partial, question, reply,
};

/// Answers the frame, if it is a query for a published name. False: the frame
/// is untouched and goes up.
#[inline(always)]
pub fn answer<H: Hook>(hook: &H) -> bool {
    match try_answer(hook) {
        Ok(answered) => {
            maps::count_reply(&answered);
            true
        }
        Err(outcome) => {
            maps::count(outcome);
            false
        }
    }
}

/// The steps, in order.
#[inline(always)]
fn try_answer<H: Hook>(hook: &H) -> Result<maps::Answered, Outcome> {
    // SAFETY: userspace may write it meanwhile, which tears nothing that counts.
    let control = unsafe { &*CONTROL.get_ptr(0).ok_or(Outcome::NotOurs)? };
    let scratch = maps::scratch().ok_or(Outcome::NotPublished)?;
    let frame = filter::filter(hook, control)?.forget(scratch);
    // SAFETY: the helper has no precondition.
    let now = unsafe { bpf_ktime_get_coarse_ns() };
    if now >= control.lease_deadline_ns {
        return Err(Outcome::LeaseExpired);
    }
    filter::pull_message(hook, &frame)?;
    let mut question = question::parse(hook, scratch, &frame)?;
    // SAFETY: this CPU's own element, alone while the program runs.
    let words = unsafe { &mut (*scratch).words };
    let (hash, name_sum) = question::read_name(hook, &frame, question.name_len, control.hash_seed, words)?;
    question.forget(scratch);
    let entry = lookup::lookup(hash, question.name_len, words)?;
    question.forget(scratch);
    let plan = reply::plan(hook, control, frame, question, &entry)?.forget(scratch);
    let plan = if H::IS_TC {
        plan.with_partial(partial::is_partial(hook, &frame, &question, name_sum)?, scratch)
    } else {
        plan
    };
    hook.grow(&plan)?;
    reply::write(hook, scratch, &plan)?;
    // SAFETY: the helper has no precondition.
    let mark = if control.exact_marks == 0 { now } else { unsafe { bpf_ktime_get_ns() } };
    if entry.header.last_used_ns != mark {
        // SAFETY: the entry is readable and writable, `last_used_ns` its first
        // field.
        unsafe { store(entry.address + core::mem::offset_of!(EntryHeader, last_used_ns), mark) };
    }
    Ok(plan.answered(hook.ifindex()))
}
