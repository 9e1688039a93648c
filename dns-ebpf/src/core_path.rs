//! From a frame to a reply, or to the reason why it goes up.

use aya_ebpf::helpers::generated::bpf_ktime_get_ns;
use dns_common::{control::Control, counters::Outcome, entry::EntryHeader};

use crate::{
    bytes::store,
    clock,
    filter::{self, Frame},
    hook::Hook,
    lookup,
    maps::{self, Scratch},
    messages, partial, question, reply,
    tap::{self, Seen},
};

/// What the steps work with.
pub struct Means {
    /// What userspace tells.
    control: &'static Control,
    /// This CPU's scratch room.
    scratch: *mut Scratch,
}

impl Means {
    /// Those of this run; they are always there.
    #[inline(always)]
    pub fn get() -> Option<Self> {
        Some(Self { control: maps::control()?, scratch: maps::scratch()? })
    }
}

/// Answers the frame, if it is a query for a published name. False: the frame
/// is untouched and goes up.
#[inline(always)]
pub fn answer<H: Hook>(hook: &H, means: &Means) -> bool {
    is_for_us(hook, means) && answer_found(hook, means)
}

/// Whether the frame is a datagram for us. If so, [`answer_found`] knows where
/// things lie in it, in this program or in the one that is called next.
#[inline(always)]
pub fn is_for_us<H: Hook>(hook: &H, means: &Means) -> bool {
    match filter::filter(hook, means.control) {
        Ok(frame) => {
            frame.keep(means.scratch);
            true
        }
        Err(outcome) => {
            maps::count(outcome);
            false
        }
    }
}

/// Answers the datagram that [`is_for_us`] found, if it is a query for a
/// published name.
#[inline(always)]
pub fn answer_found<H: Hook>(hook: &H, means: &Means) -> bool {
    let &Means { control, scratch } = means;
    let frame = Frame::kept(scratch);
    let answer = try_answer(hook, control, scratch, frame);
    let seen = match &answer {
        Ok(answered) => {
            maps::count_reply(answered);
            Seen {
                outcome: answered.outcome as u8,
                answered: true,
                rcode: answered.rcode,
                answers: answered.answers,
            }
        }
        Err(outcome) => {
            maps::count(*outcome);
            if let Outcome::HandedOn = outcome {
                // The tap sees what the second stage makes of it.
                return false;
            }
            if let Outcome::Collision = outcome {
                messages::note_collision(scratch);
            }
            Seen { outcome: *outcome as u8, answered: false, rcode: 0, answers: 0 }
        }
    };
    if control.tap_every != 0 && tap::is_due(scratch, control) {
        // A full ring loses events, which is all that can be done about it.
        let _ = tap::send(hook, scratch, &frame, &seen.forget(scratch));
    }
    let answered = answer.is_ok();
    if !answered {
        messages::tell(scratch);
    }
    answered
}

/// The steps from a datagram for us to its reply, in order.
#[inline(always)]
fn try_answer<H: Hook>(
    hook: &H,
    control: &Control,
    scratch: *mut Scratch,
    frame: Frame,
) -> Result<maps::Answered, Outcome> {
    let now = clock::now(scratch);
    if now >= control.lease_deadline_ns {
        return Err(Outcome::LeaseExpired);
    }
    filter::pull_message(hook, &frame)?;
    let mut question = question::parse(hook, scratch, &frame)?;
    // SAFETY: this CPU's own element, alone while the program runs.
    let words = unsafe { &mut (*scratch).words };
    let (hash, name_sum) = question::read_name(hook, &frame, question.name_len, control.hash_seed, words)?;
    question.forget(scratch);
    let entry = lookup::lookup(scratch, hash, question.name_len, words)?;
    question.forget(scratch);
    let frame = frame.forget(scratch);
    let plan = reply::plan(hook, control, frame, question, &entry)?.forget(scratch);
    let plan = if H::HAS_SKB {
        let Some(partial) = partial::is_partial(hook, &frame, &question, name_sum)? else {
            return Err(handed_on_or(Outcome::Unsupported, hook, control));
        };
        plan.with_partial(partial, scratch)
    } else {
        plan
    };
    if !hook.grow(&plan) {
        return Err(handed_on_or(Outcome::NoRoom, hook, control));
    }
    let plan = plan.forget(scratch);
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

/// What becomes of a query that cannot be answered at this hook for this reason.
#[inline(always)]
fn handed_on_or<H: Hook>(reason: Outcome, hook: &H, control: &Control) -> Outcome {
    if hook.hand_on(control) { Outcome::HandedOn } else { reason }
}
