//! Unfinished UDP checksums.
//!
//! A local sender leaves the checksum to the device (`CHECKSUM_PARTIAL`): the
//! field holds the sum of the pseudo-header alone, and whoever sends the packet
//! on adds the rest, our reply's too. A program cannot see that state, but it
//! can see the field: a sum of the pseudo-header alone is no valid checksum,
//! save by a chance of one in 65,536. Where that chance has come, the query
//! goes up.

use dns_common::counters::Outcome;

use crate::{
    bytes::{load, opaque},
    checksum::Sum,
    filter::{Frame, IPV4_LEN, IPV6_LEN, UDP_LEN},
    hook::Hook,
    question::{HEADER_LEN, OPT_LEN, Question, TYPE_CLASS_LEN},
};

/// Whether the query's checksum is unfinished. `name`: sum of the name as sent.
#[inline(always)]
pub fn is_partial<H: Hook>(hook: &H, frame: &Frame, question: &Question, name: Sum) -> Result<bool, Outcome> {
    let (data, end) = (hook.data(), hook.data_end());
    let ip = data + opaque(14 + ((frame.tagged as usize) << 2));
    let mut sum = Sum::new();
    let udp = if frame.v6 {
        if ip + IPV6_LEN + UDP_LEN > end {
            return Err(Outcome::BadLength);
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
            return Err(Outcome::BadLength);
        }
        // SAFETY: just compared with the end.
        unsafe {
            sum.add_half(load(ip + 12));
            sum.add_half(load(ip + 16));
        }
        ip + IPV4_LEN
    };
    sum.add_pseudo_tail(UDP_LEN + frame.message_len);
    // SAFETY: the UDP header was compared with the end, whatever the family.
    let (ports_and_length, field): (u64, u16) = unsafe { (load(udp), load(udp + 6)) };
    if field != sum.fold() {
        return Ok(false);
    }

    sum.add(ports_and_length);
    sum.add(question.header);
    sum.add_half(u32::from_ne_bytes([0, 0, 0, (question.opt != 0) as u8]));
    sum.add_sum(name, false);
    let after_name = hook.data() + opaque(frame.message + HEADER_LEN + question.name_len);
    if after_name + TYPE_CLASS_LEN > end {
        return Err(Outcome::BadLength);
    }
    let mut rest = Sum::new();
    // SAFETY: just compared with the end.
    rest.add_half(unsafe { load(after_name) });
    if question.opt != 0 {
        if frame.message_len != HEADER_LEN + question.name_len + TYPE_CLASS_LEN + OPT_LEN {
            // Options are not summed: only local resolvers' tools send them, and
            // the chance is taken.
            return Ok(true);
        }
        if after_name + TYPE_CLASS_LEN + OPT_LEN > end {
            return Err(Outcome::BadLength);
        }
        // SAFETY: just compared with the end. The last three bytes: half the
        // flags, and no options.
        unsafe {
            rest.add(load(after_name + TYPE_CLASS_LEN));
            rest.add_half(load::<u8>(after_name + TYPE_CLASS_LEN + 8) as u32);
        }
    }
    sum.add_sum(rest, question.name_len & 1 != 0);
    if sum.fold() == 0xffff { Err(Outcome::Unsupported) } else { Ok(true) }
}
