//! Replies from whole answers: the body sent by another server, with TTLs counted down, or the body of a
//! local reply.

use core::mem::offset_of;

use aya_ebpf::helpers::{bpf_get_prandom_u32, generated::bpf_ktime_get_boot_ns};
use dns_common::{
    control::Control,
    counters::Outcome,
    forwarded::{
        AnswerHeader, LOCAL, MAX_ANSWER_SIZE, MAX_BODY_LEN, MAX_RECORDS, MAX_VARIANTS, QueryKey,
        Variant, WIDE, client_group, counted,
    },
    name::MAX_NAME_LEN,
};

use crate::{
    bytes::{Span, barrier, barrier_and, has, load, store},
    checksum::Sum,
    frame::{Frame, HEADER_LEN, TYPE_CLASS_LEN},
    hook::Hook,
    lookup::{self, Answer},
    maps::{self, Answered, Context, pass_to_stack},
    pipeline::{self, Verdict},
    question::{Layout, Question},
    reply::{self, Header, ONE_QUESTION},
};

/// Words of the longest body, without its last eight bytes.
const BODY_WORDS: usize = MAX_BODY_LEN / 8;

/// Answers the query parsed by the calling program, if its answer is known. Uses the scratch space
/// taken by that program.
#[inline(always)]
pub fn answer<H: Hook>(hook: &H, context: &Context) -> Verdict {
    let frame = Frame::load(context.scratch);
    pipeline::conclude(hook, context, frame, try_answer(hook, context, frame))
}

/// Runs the steps from a parsed query to its reply, in order.
#[inline(always)]
fn try_answer<H: Hook>(hook: &H, context: &Context, frame: Frame) -> Result<Answered, Outcome> {
    let &Context {
        control,
        scope: _,
        scratch,
        zero,
    } = context;
    let (question, name_hash, name_sum) = Question::load(scratch);
    let plain_len = question.end() + question.opt_len();
    // Without RD the client wants no forwarded answer (local replies repeat RD), and EDNS options are for userspace.
    if !question.recursion_desired() || frame.message_len != plain_len {
        return pass_to_stack(Outcome::NotPublished);
    }
    let key = key(hook, &frame, &question)?;
    // SAFETY: this CPU's own element, not shared while the program runs.
    let words = unsafe { &(*scratch).words };
    let answer = lookup::forwarded::<H>(zero, name_hash, key, question.name_len, words)?;
    let question = question.value_barrier(zero);
    let header = answer.header();
    let is_local = header.generation == LOCAL;
    if !is_local && header.generation != control.answer_generation {
        return pass_to_stack(Outcome::NotPublished);
    }
    let hit = zero.value_barrier(
        if is_local {
            Outcome::HitOther
        } else {
            Outcome::HitForwarded
        } as usize,
        0x1f,
    );
    // SAFETY: the helper has no precondition.
    let age = unsafe { bpf_ktime_get_boot_ns() }.wrapping_sub(header.since_ns);
    let Some(ttl) = counted(header.ttl, header.lifetime, header.generation, age) else {
        return pass_to_stack(Outcome::AnswerExpired);
    };
    let chosen = choose(context, &answer, &question)?;
    let variant = chosen.of(&answer);
    let body_len = barrier_and(variant.body_len as usize, 0x7ff);
    let reply_len = plain_len + body_len;
    // Userspace truncates longer replies and sets TC.
    if body_len > MAX_BODY_LEN
        || reply_len > question.limit
        || reply_len > reply::max_reply(context)
    {
        return pass_to_stack(Outcome::NoRoom);
    }
    reply::check_path(hook, context, &frame, reply_len)?;
    let layout = reply::layout(frame, question, reply_len).value_barrier(zero);
    let now = maps::coarse_now(scratch);
    let is_partial = reply::is_partial(hook, &frame, &question, name_sum)?;
    let layout = layout.with_partial(is_partial, zero);
    pipeline::make_room(hook, context, &layout, now)?;
    write(hook, control, &layout, &answer, chosen, body_len, ttl).ok_or(Outcome::NoRoom)?;
    // CPUs read the clock at different times: the later one wins, or they would take turns forever.
    if answer.header().last_used_ns < now {
        // SAFETY: the entry is readable and writable.
        unsafe { store(answer.address + offset_of!(AnswerHeader, last_used_ns), now) };
    }
    let variant = chosen.of(&answer);
    Ok(Answered {
        outcome: hit,
        kind: layout.question.kind(),
        rcode: variant.flags[1] & 0xf,
        query_len: layout.frame.message_len,
        reply_len: layout.reply_len,
        answers: u16::from_be_bytes(variant.counts[0]),
        slot: layout.frame.slot,
    })
}

/// The chosen variant: its offset from the start of the entry.
#[derive(Clone, Copy)]
struct Chosen(usize);

impl Chosen {
    #[inline(always)]
    fn of(self, answer: &Answer) -> &Variant {
        // SAFETY: an entry of the largest size fits at the answer's address.
        unsafe { &*((answer.address + barrier_and(self.0, MAX_VARIANT_OFFSET)) as *const Variant) }
    }
}

/// Largest offset of a variant, rounded up to a mask.
const MAX_VARIANT_OFFSET: usize = 0x3ff;
const _: () = assert!(
    AnswerHeader::variants_offset(MAX_NAME_LEN) + MAX_VARIANTS * size_of::<Variant>()
        <= MAX_VARIANT_OFFSET + 1
);

/// Chooses one of the variants that are valid for the client, at random.
#[inline(always)]
fn choose(context: &Context, answer: &Answer, question: &Question) -> Result<Chosen, Outcome> {
    let group = barrier_and(client_group(question.opt_count(), question.limit), 3);
    let header = barrier(answer.address);
    // SAFETY (both): inside the header.
    let [least, most] = unsafe { load::<[u16; 2]>(header + offset_of!(AnswerHeader, wide_limits)) };
    let is_within = question.limit >= least as usize && question.limit <= most as usize;
    if group == WIDE && !is_within {
        return pass_to_stack(Outcome::NotPublished);
    }
    let [first, count] =
        unsafe { load::<[u8; 2]>(header + offset_of!(AnswerHeader, variants) + group * 2) };
    if count == 0 {
        return pass_to_stack(Outcome::NotPublished);
    }
    let mut index = first as usize;
    if count > 1 {
        // SAFETY: the helper has no precondition.
        index += (unsafe { bpf_get_prandom_u32() } as usize * count as usize) >> 32;
    }
    let index = context.zero.value_barrier(index, MAX_VARIANTS - 1);
    Ok(Chosen(
        AnswerHeader::variants_offset(barrier_and(question.name_len, 0xff))
            + index * size_of::<Variant>(),
    ))
}

/// Reads the type of the question; its class is IN.
#[inline(always)]
fn key<H: Hook>(hook: &H, frame: &Frame, question: &Question) -> Result<QueryKey, Outcome> {
    let Span { start, end } = hook.span(frame.message + HEADER_LEN + question.name_len);
    if start + TYPE_CLASS_LEN > end {
        return pass_to_stack(Outcome::BadLength);
    }
    // SAFETY: just compared with the end.
    let qtype = u16::from_be(unsafe { load(start) });
    Ok(QueryKey::new(
        qtype,
        question.dnssec_ok(),
        question.checking_disabled(),
    ))
}

/// Writes the reply into the packet, which already has its length. Fails only at checks that the
/// verifier requires and that cannot fail.
#[inline(always)]
fn write<H: Hook>(
    hook: &H,
    control: &Control,
    layout: &Layout,
    answer: &Answer,
    chosen: Chosen,
    body_len: usize,
    ttl: u32,
) -> Option<()> {
    let header = answer.header();
    let variant = chosen.of(answer);
    let question = &layout.question;
    let body = answer.address + barrier_and(variant.body_at as usize, MAX_ANSWER_SIZE - 1);
    let Span { start: to, end } = hook.span(layout.answers_offset);
    let full = body_len >> 3;
    let mut index = 0;
    while index < BODY_WORDS {
        let at = to + index * 8;
        if index >= full || at + 8 > end {
            break;
        }
        // SAFETY: inside the entry; just compared with the packet's end.
        unsafe { store(at, load::<u64>(body + index * 8)) };
        index = barrier(index + 1);
    }
    // The last eight bytes, for any length: no body is shorter, unless it is empty.
    if has(body_len, 0x7f8) {
        let last = barrier_and(body_len.wrapping_sub(8), 0x7ff);
        let at = to + last;
        if at + 8 > end {
            return None;
        }
        // SAFETY: as above.
        unsafe { store(at, load::<u64>(body + last)) };
    }

    let ttl_count = header.ttl_count as usize;
    let ttl = ttl.to_be();
    let ttls = answer.address + offset_of!(AnswerHeader, ttls);
    let mut index = 0;
    while index < MAX_RECORDS {
        if index >= ttl_count {
            break;
        }
        // SAFETY: inside the header.
        let at = to + barrier_and(unsafe { load::<u16>(ttls + index * 2) } as usize, 0x7ff);
        if at + 4 > end {
            return None;
        }
        // SAFETY: just compared with the packet's end.
        unsafe { store(at, ttl) };
        index = barrier(index + 1);
    }

    let odd = header.odd_ttls as usize;
    let mut sum = Sum::of(variant.body_sum as u64);
    sum.add_times(ttl, ttl_count.wrapping_sub(odd) & 0xff);
    sum.add_times(ttl.swap_bytes(), odd);
    if question.has_opt() {
        let mut opt = Sum::new();
        opt.add(reply::write_opt(hook, control, layout)?);
        sum.add_sum(opt, body_len & 1 != 0);
    }
    let id = question.header & 0xffff;
    let [high, low] = variant.flags;
    let flags = (high as u64) << 16 | (low as u64) << 24 & question.authentic_mask();
    let [answers, authority, additional] = variant.counts.map(u16::from_ne_bytes);
    let additional = u16::from_be(additional)
        .wrapping_add(question.opt_count() as u16)
        .to_be();
    let header = Header {
        first: id | flags | ONE_QUESTION | (answers as u64) << 48,
        last: authority as u32 | (additional as u32) << 16,
    };
    reply::write_headers(hook, layout, header, sum)
}
