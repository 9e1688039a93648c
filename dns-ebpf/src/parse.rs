//! Decides whether a message is a plain query, and for which name.
//!
//! The question's name is not walked label by label: the words hashed here are later compared with
//! the whole name of a published entry, and a name equal to a valid one is valid. The end of the
//! name follows from the length of the message; only if the OPT has options must it be searched
//! for. A wrong guess (trailing bytes) yields a name that is not published.

use dns_common::{
    MIN_UDP_SIZE,
    control::{COOKIES, Control},
    counters::{Outcome, QueryKind},
    forwarded::is_left_to_userspace,
    name::{
        MAX_NAME_LEN, MAX_NAME_WORDS, NameHasher, first_zero, lower8, lower8_branchless, zero_byte,
    },
};

use crate::{
    bytes::{Zero, barrier, barrier_and, load, store},
    checksum::Sum,
    frame::{Frame, HEADER_LEN, OPT_LEN, TYPE_CLASS_LEN},
    hook::Hook,
    maps::pass_to_stack,
    question::{Question, Words},
};

/// Flags that a plain query may have in the third byte: RD.
const PLAIN_THIRD: u64 = 0x01;
/// Flags that a plain query may have in the fourth byte: AD, CD.
const PLAIN_FOURTH: u64 = 0x30;

/// Parses everything but the name.
#[inline(always)]
pub fn parse<H: Hook>(
    hook: &H,
    control: &Control,
    zero: Zero,
    frame: &Frame,
) -> Result<Question, Outcome> {
    let (data, end) = (hook.data(), hook.data_end());
    let message = data + frame.message;
    if message + HEADER_LEN > end || frame.message_len < HEADER_LEN {
        return pass_to_stack(Outcome::BadLength);
    }
    // SAFETY: the header was just compared with the end.
    let (header, counts): (u64, u32) = unsafe { (load(message), load(message + 8)) };
    if header & 0x80 << 16 != 0 {
        return pass_to_stack(Outcome::Response);
    }
    // Opcode, AA, TC, RA, Z and RCODE must be zero; exactly one question, no answer, no authority.
    let additional = counts == u32::from_ne_bytes([0, 0, 0, 1]);
    if header & ((!PLAIN_THIRD & 0xff) << 16 | (!PLAIN_FOURTH & 0xff) << 24) != 0
        || (header >> 32) as u32 != u32::from_ne_bytes([0, 1, 0, 0])
        || (counts != 0 && !additional)
        || frame.message_len > H::MAX_QUERY_LEN
    {
        return pass_to_stack(Outcome::NotPlain);
    }
    if message + barrier_and(frame.message_len, 0x7ff) > end {
        return pass_to_stack(Outcome::BadLength);
    }

    let (name_len, opt) = if additional {
        with_opt::<H>(control, message, end, frame.message_len)?
    } else {
        (
            frame.message_len.wrapping_sub(HEADER_LEN + TYPE_CLASS_LEN),
            0,
        )
    };
    if name_len.wrapping_sub(1) >= MAX_NAME_LEN {
        return pass_to_stack(Outcome::BadName);
    }
    let name_len = zero.value_barrier(name_len, 0xff);
    let opt = zero.value_barrier(opt as usize, usize::MAX) as u64;

    let after_name = message + barrier(HEADER_LEN + name_len);
    if after_name + TYPE_CLASS_LEN > end {
        return pass_to_stack(Outcome::BadLength);
    }
    // SAFETY: just compared with the end.
    let kind = kind(unsafe { load(after_name) })?;
    let size = u16::from_be((opt >> 24) as u16) as usize;
    let limit = if size > MIN_UDP_SIZE {
        size
    } else {
        MIN_UDP_SIZE
    };
    // Make the results of branches opaque where the branches merge.
    let (kind, limit) = (
        zero.value_barrier(kind as usize, 3),
        zero.value_barrier(limit, 0xffff),
    );
    Ok(Question {
        header,
        name_len,
        kind,
        opt,
        limit,
    })
}

/// Returns the list that answers QTYPE and QCLASS, given in network order.
#[inline(always)]
fn kind(type_class: u32) -> Result<QueryKind, Outcome> {
    if type_class >> 16 != u16::from_ne_bytes([0, 1]) as u32 {
        return pass_to_stack(Outcome::BadType);
    }
    match u16::from_be(type_class as u16) {
        1 => Ok(QueryKind::A),
        28 => Ok(QueryKind::Aaaa),
        255 => Ok(QueryKind::Any),
        qtype if is_left_to_userspace(qtype) => pass_to_stack(Outcome::BadType),
        _ => Ok(QueryKind::Other),
    }
}

/// Returns the length of the name and the start of the OPT of a query with one additional record.
#[inline(always)]
fn with_opt<H: Hook>(
    control: &Control,
    message: usize,
    end: usize,
    message_len: usize,
) -> Result<(usize, u64), Outcome> {
    const FIXED: usize = HEADER_LEN + TYPE_CLASS_LEN + OPT_LEN;
    if message_len <= FIXED {
        return pass_to_stack(Outcome::BadEdns);
    }
    // Without options, the common case, the OPT is the last eleven bytes.
    let at = message + barrier_and(message_len - OPT_LEN, 0x7ff);
    if at + OPT_LEN > end {
        return pass_to_stack(Outcome::BadLength);
    }
    // SAFETY: just compared with the end.
    if let Some((opt, 0)) = unsafe { opt(at) } {
        return Ok((message_len - FIXED, opt));
    }
    if H::IS_FIRST {
        return pass_to_stack(Outcome::BadEdns);
    }

    let name_len = scan(message, end)?;
    let at = message + barrier(HEADER_LEN + name_len + TYPE_CLASS_LEN);
    if at + OPT_LEN > end {
        return pass_to_stack(Outcome::BadEdns);
    }
    // SAFETY: just compared with the end.
    match unsafe { opt(at) } {
        Some((opt, options_len)) if FIXED + name_len + options_len == message_len => {
            one_option(control, at + OPT_LEN, end, options_len)?;
            Ok((name_len, opt))
        }
        _ => pass_to_stack(Outcome::BadEdns),
    }
}

/// Checks for exactly one complete option at `at` that needs no answer. Userspace answers the rest:
/// FORMERR for a malformed option, NSID (RFC 5001), and cookies (RFC 7873) if it gives them.
#[inline(always)]
fn one_option(control: &Control, at: usize, end: usize, options_len: usize) -> Result<(), Outcome> {
    const NSID: u16 = u16::from_ne_bytes([0, 3]);
    const COOKIE: u16 = u16::from_ne_bytes([0, 10]);
    if at + 4 > end {
        return pass_to_stack(Outcome::BadEdns);
    }
    // SAFETY: just compared with the end.
    let (code, len): (u16, u16) = unsafe { (load(at), load(at + 2)) };
    let is_for_userspace = code == NSID || code == COOKIE && control.edns & COOKIES != 0;
    if is_for_userspace || u16::from_be(len) as usize + 4 != options_len {
        return pass_to_stack(Outcome::BadEdns);
    }
    Ok(())
}

/// Returns the start of the OPT at `at` with all flags but DO cleared, and the length of its
/// options; `None` if it is not an OPT of version 0.
///
/// # Safety
/// [`OPT_LEN`] bytes at `at` can be read.
#[inline(always)]
unsafe fn opt(at: usize) -> Option<(u64, usize)> {
    // Root label, type 41; size; extended RCODE and version.
    const SAME: u64 = u64::from_ne_bytes([0xff, 0xff, 0xff, 0, 0, 0xff, 0xff, 0]);
    const OPT: u64 = u64::from_ne_bytes([0, 0, 41, 0, 0, 0, 0, 0]);
    const KEPT: u64 = u64::from_ne_bytes([0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0x80]);
    // SAFETY: the caller's promise.
    let (start, options_len): (u64, u16) = unsafe { (load(at), load(at + 9)) };
    (start & SAME == OPT).then(|| (start & KEPT, u16::from_be(options_len) as usize))
}

/// Returns the length of the name by searching for its first zero byte.
#[inline(always)]
fn scan(message: usize, end: usize) -> Result<usize, Outcome> {
    let mut word = 0;
    while word < MAX_NAME_WORDS {
        let at = message + HEADER_LEN + word * 8;
        if at + 8 > end {
            return pass_to_stack(Outcome::BadEdns);
        }
        // SAFETY: just compared with the end.
        let zeros = zero_byte(unsafe { load(at) });
        if zeros != 0 {
            return Ok((barrier(word * 8) & 0xff) + first_zero(zeros) + 1);
        }
        word = barrier(word + 1);
    }
    pass_to_stack(Outcome::BadName)
}

/// Lower-cases a word of the name.
#[inline(always)]
fn lower<H: Hook>(word: u64) -> u64 {
    if H::IS_FIRST {
        lower8_branchless(word)
    } else {
        lower8(word)
    }
}

/// Offset of the last word of the longest name; also a mask.
const LAST_WORD: usize = size_of::<Words>() - 8;

/// Reads the name: stores its lower-cased words, and returns their hash and the sum of the name as
/// sent.
#[inline(always)]
pub fn read_name<H: Hook>(
    hook: &H,
    frame: &Frame,
    name_len: usize,
    seed: u64,
    zero: Zero,
    words: &mut Words,
) -> Result<(u64, Sum), Outcome> {
    let (data, end) = (hook.data(), hook.data_end());
    let mut sum = Sum::new();
    let name = data + frame.message + HEADER_LEN;
    let words = &raw mut *words as usize;
    let full = name_len & !7;
    let rest = name_len & 7;
    let mut hasher = NameHasher::new(seed);
    // In bytes, which spares a shift for each word and place (measured).
    let mut offset = 0;
    while offset < LAST_WORD {
        if offset == full {
            break;
        }
        let at = name + offset;
        if at + 8 > end {
            return pass_to_stack(Outcome::BadLength);
        }
        // SAFETY: just compared with the end.
        let sent = unsafe { load(at) };
        sum.add(sent);
        let word = lower::<H>(sent);
        // SAFETY: inside the words.
        unsafe { store(words + offset, word) };
        hasher.write(word);
        offset = barrier(offset + 8);
    }
    if H::IS_FIRST {
        // Or the verifier would follow the rest once per turn at which the loop ends.
        offset = zero.value_barrier(offset, LAST_WORD);
    }
    if rest != 0 {
        // The last bytes of the name, loaded as the upper end of eight bytes: the twelve bytes of
        // the header precede the name, so these eight can be read.
        let at = data + frame.message + barrier(HEADER_LEN - 8 + name_len);
        if at + 8 > end {
            return pass_to_stack(Outcome::BadLength);
        }
        // SAFETY: just compared with the end.
        let sent = unsafe { load::<u64>(at) } >> (64 - 8 * rest as u64);
        sum.add(sent);
        let word = lower::<H>(sent);
        // SAFETY: inside the words.
        unsafe { store(words + barrier_and(offset, LAST_WORD), word) };
        hasher.write(word);
    }
    Ok((hasher.finish(), sum))
}
