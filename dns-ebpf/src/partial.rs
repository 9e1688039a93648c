//! UDP checksums of queries: right, wrong or unfinished.
//!
//! A local sender leaves the checksum to the device (`CHECKSUM_PARTIAL`): the field holds the sum
//! of the pseudo-header alone, and the device that transmits the packet adds the rest, for our
//! reply as well. A program cannot see that state, but it can see the field: the sum of the
//! pseudo-header alone is a valid checksum only with a probability of one in 65,536. In that case
//! tc asks the kernel.

use dns_common::counters::Outcome;

use crate::{
    bytes::{Span, load, masked, opaque},
    checksum::{self, Sum},
    frame::Frame,
    headers::{HEADER_LEN, IPV4_LEN, IPV6_LEN, MAX_QUERY_LEN, TYPE_CLASS_LEN, UDP_LEN, UDP_SUM},
    hook::Hook,
    outcome::goes_up,
    question::Question,
};

/// Returns whether the query's checksum is unfinished; an error if it is wrong. `name` is the sum of the name as sent. Invalidates addresses.
#[inline(always)]
pub fn is_partial<H: Hook>(hook: &H, frame: &Frame, question: &Question, name: Sum) -> Result<bool, Outcome> {
    let (data, end) = (hook.data(), hook.data_end());
    let ip = data + frame.ip();
    let mut sum = Sum::new();
    let udp = if frame.is_v6() {
        if ip + IPV6_LEN + UDP_LEN > end {
            return goes_up(Outcome::BadLength);
        }
        let mut at = 8;
        while at < IPV6_LEN {
            // SAFETY: just compared with the end.
            sum.add(unsafe { load(ip + at) });
            at += 8;
        }
        ip + IPV6_LEN
    } else {
        if ip + IPV4_LEN + UDP_LEN > end {
            return goes_up(Outcome::BadLength);
        }
        // SAFETY: just compared with the end.
        unsafe {
            sum.add_half(load(ip + 12));
            sum.add_half(load(ip + 16));
        }
        ip + IPV4_LEN
    };
    sum.add_pseudo_tail(UDP_LEN + frame.message_len);
    // SAFETY: the UDP header was compared with the end for both families.
    let (ports_and_length, field): (u64, u16) = unsafe { (load(udp), load(udp + UDP_SUM)) };
    if field == 0 {
        // No checksum, which IPv6 does not allow (RFC 8200, section 8.1).
        return if frame.is_v6() { goes_up(Outcome::BadChecksum) } else { Ok(false) };
    }
    let pseudo = sum;
    sum.add(ports_and_length);
    sum.add(question.header);
    sum.add_half(u32::from_ne_bytes([0, 0, 0, question.has_opt() as u8]));
    sum.add_sum(name, false);
    let after_name = hook.data() + opaque(frame.message + HEADER_LEN + question.name_len);
    if after_name + TYPE_CLASS_LEN > end {
        return goes_up(Outcome::BadLength);
    }
    let rest = if !question.has_opt() {
        let mut rest = Sum::new();
        // SAFETY: just compared with the end.
        rest.add_half(unsafe { load(after_name) });
        rest
    } else {
        let rest_len = frame.message_len.wrapping_sub(HEADER_LEN + question.name_len);
        checksum::sum_bytes::<REST_WORDS>(Span { start: after_name, end }, masked(rest_len, 0x7ff))
            .ok_or(Outcome::BadLength)?
    };
    sum.add_sum(rest, question.name_len & 1 != 0);
    if !H::IS_TC {
        // A local sender's query on a veth is unfinished at native XDP as well, but its reply is a
        // new frame, which no device finishes.
        let is_accepted = sum.is_right() || pseudo.folds_to(field);
        return if is_accepted { Ok(false) } else { goes_up(Outcome::BadChecksum) };
    }
    match (sum.is_right(), pseudo.folds_to(field)) {
        (true, false) => Ok(false),
        (false, true) => Ok(true),
        (false, false) => goes_up(Outcome::BadChecksum),
        (true, true) => hook.is_unfinished(frame.message - UDP_LEN + UDP_SUM).ok_or(Outcome::Unsupported),
    }
}

/// Words of the longest message after its question's name.
const REST_WORDS: usize = (MAX_QUERY_LEN - HEADER_LEN).div_ceil(8);
