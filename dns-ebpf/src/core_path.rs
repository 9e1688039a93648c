//! From a frame to a reply, or to the reason why it goes up.

use aya_ebpf::helpers::generated::bpf_ktime_get_ns;
use dns_common::{
    control::Control,
    counters::{OUTCOME_SLOTS, Outcome},
    entry::EntryHeader,
};

use crate::{
    bytes::{Zero, store},
    clock, filter,
    frame::Frame,
    hook::Hook,
    lookup,
    maps::{self, Scratch},
    messages,
    outcome::goes_up,
    overload, parse, partial, reply,
    tap::{self, Seen},
};

/// What the steps work with.
pub struct Means {
    /// What userspace tells.
    control: &'static Control,
    /// This CPU's scratch room.
    pub scratch: *mut Scratch,
    /// For laundering.
    zero: Zero,
}

impl Means {
    /// Those of this run; they are always there.
    #[inline(always)]
    pub fn get() -> Option<Self> {
        let (control, scratch) = (maps::control()?, maps::scratch()?);
        // SAFETY: this CPU's own element, in which nobody writes that field.
        let zero = unsafe { Zero::read(&raw const (*scratch).zero) };
        Some(Self { control, scratch, zero })
    }
}

/// What the hook is to do with a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Send it back: it is the reply.
    Reply,
    /// Let it go up; it is untouched.
    Pass,
    /// Drop it, see [`overload`].
    Drop,
}

/// Answers the frame, if it is a query for a published name.
#[inline(always)]
pub fn answer<H: Hook>(hook: &H, means: &Means) -> Verdict {
    datagram(hook, means).map_or(Verdict::Pass, |frame| answer_datagram(hook, means, frame))
}

/// Where things lie in the frame, if it is a datagram for us.
#[inline(always)]
pub fn datagram<H: Hook>(hook: &H, means: &Means) -> Option<Frame> {
    match filter::filter(hook, means.control) {
        Ok(frame) => Some(frame.launder(means.zero)),
        Err(outcome) => {
            maps::count(outcome as usize);
            None
        }
    }
}

/// Answers a datagram for us, if it is a query for a published name.
#[inline(always)]
pub fn answer_datagram<H: Hook>(hook: &H, means: &Means, frame: Frame) -> Verdict {
    let &Means { control, scratch, zero } = means;
    let answer = try_answer(hook, means, frame);
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
        Err(outcome) => {
            // What comes now is one path, whatever the reason: followed for each of them it was
            // a fifth to a third of all that the verifier of Linux 5.15 looked at.
            let reason = zero.launder(*outcome as usize, OUTCOME_SLOTS - 1);
            if reason == Outcome::Collision as usize {
                messages::note_collision(scratch);
            }
            let (verdict, outcome) = if overload::is_shed(hook, control, scratch, &frame, reason) {
                (Verdict::Drop, Outcome::Shed as usize)
            } else {
                (Verdict::Pass, reason)
            };
            maps::count(outcome);
            (verdict, Seen { outcome: outcome as u8, answered: false, rcode: 0, answers: 0 })
        }
    };
    if control.tap_every != 0 && tap::is_due(control) {
        // A full ring loses events, which is all that can be done about it.
        let _ = tap::send(hook, zero, &frame, &seen.launder(zero));
    }
    if verdict != Verdict::Reply {
        messages::tell(scratch);
    }
    verdict
}

/// The steps from a datagram for us to its reply, in order.
#[inline(always)]
fn try_answer<H: Hook>(hook: &H, means: &Means, frame: Frame) -> Result<maps::Answered, Outcome> {
    let &Means { control, scratch, zero } = means;
    let now = clock::now(scratch);
    if now >= control.lease_deadline_ns {
        return goes_up(Outcome::LeaseExpired);
    }
    filter::pull_message(hook, &frame)?;
    let question = parse::parse(hook, zero, &frame)?;
    // SAFETY: this CPU's own element, alone while the program runs.
    let words = unsafe { &mut (*scratch).words };
    let (hash, name_sum) = parse::read_name(hook, &frame, question.name_len, control.hash_seed, words)?;
    let question = question.launder(zero);
    let entry = lookup::lookup(hash, question.name_len, words)?;
    let plan = reply::plan(hook, control, frame, question, &entry)?.launder(zero);
    let plan = if H::HAS_SKB {
        let Some(partial) = partial::is_partial(hook, &plan.frame, &plan.question, name_sum)? else {
            return goes_up(Outcome::Unsupported);
        };
        plan.with_partial(partial, zero)
    } else {
        plan
    };
    if !hook.grow(&plan) {
        return goes_up(Outcome::NoRoom);
    }
    reply::write(hook, scratch, zero, &plan)?;
    // SAFETY: the helper has no precondition.
    let last_used = if control.exact_last_used == 0 { now } else { unsafe { bpf_ktime_get_ns() } };
    if entry.header().last_used_ns != last_used {
        // SAFETY: the entry is readable and writable, `last_used_ns` its first
        // field.
        unsafe { store(entry.address + core::mem::offset_of!(EntryHeader, last_used_ns), last_used) };
    }
    Ok(plan.answered(hook.ifindex()))
}
