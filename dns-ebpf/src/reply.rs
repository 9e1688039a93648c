//! What is answered, and writing it.

use dns_common::{
    control::Control,
    counters::{Outcome, QueryKind},
    entry::{EntryHeader, MAX_V4, MAX_V6, padded},
};

use crate::{
    bytes::{forget, load, masked, opaque, store},
    checksum::{self, Sum},
    filter::{Frame, IPV4_LEN, IPV6_LEN, UDP, UDP_LEN, UDP_SUM},
    hook::{Hook, Span},
    lookup::Entry,
    maps::{Answered, Scratch},
    question::{HEADER_LEN, OPT_LEN, Question, TYPE_CLASS_LEN},
    shuffle,
};

/// Bytes of an A record whose owner is a pointer to the question's name.
pub const A_LEN: usize = 16;
/// Bytes of an AAAA record of the same kind.
pub const AAAA_LEN: usize = 28;
/// Longest message that is given here, in bytes. A client that takes more, and
/// a name that has more, meet in userspace.
pub const MAX_REPLY_LEN: usize = 4096;
/// IP packets up to this length need no look at the interface's MTU: every
/// host must take them (RFC 791, section 3.1).
const SAFE_PACKET_LEN: usize = 576;

/// Everything about a reply, decided before anything is written.
#[derive(Clone, Copy)]
pub struct Plan {
    /// Where things lie in the frame.
    pub frame: Frame,
    /// What was asked.
    pub question: Question,
    /// RCODE of the reply.
    pub rcode: u8,
    /// Address of the first address of the entry's list.
    pub addresses: usize,
    /// Addresses in the list.
    pub available: usize,
    /// Addresses that are given.
    pub given: usize,
    /// 1 if more addresses are available than given.
    pub truncated: usize,
    /// All ones in 16 bits if the checksum is to be left unfinished, as the
    /// query's was; else 0. A mask, so that IPv4 needs no branch, and the verifier
    /// does not follow what comes then once more.
    pub partial: usize,
    /// Offset of the end of the question in the frame.
    pub answers_offset: usize,
    /// Bytes of DNS message in the reply.
    pub reply_len: usize,
    /// Bytes of the whole frame of the reply.
    pub frame_len: usize,
}

/// Decides what is answered from `entry`.
#[inline(always)]
pub fn plan<H: Hook>(
    hook: &H,
    control: &Control,
    frame: Frame,
    question: Question,
    entry: &Entry,
) -> Result<Plan, Outcome> {
    let header = &entry.header;
    let (v4_count, v6_count) = (opaque(header.v4_count as usize), opaque(header.v6_count as usize));
    if v4_count > MAX_V4 || v6_count > MAX_V6 {
        return Err(Outcome::NotPublished);
    }
    // For verifiers (Linux 6.1) that do not see the bound in all copies of the number.
    let v4_count = masked(v4_count, 0x7ff);
    // As `EntryHeader::v4_offset` and `v6_offset`, from bounded numbers.
    let v4_offset = size_of::<EntryHeader>() + padded(question.name_len);
    let (rcode, offset, available, record_len) = match question.kind {
        QueryKind::A => (header.rcode, v4_offset, v4_count, A_LEN),
        QueryKind::Aaaa => (header.rcode, v4_offset + padded(v4_count * 4), v6_count, AAAA_LEN),
        QueryKind::Other => (header.rcode_other, v4_offset, 0, A_LEN),
    };
    let opt_len = if question.opt != 0 { OPT_LEN } else { 0 };
    let question_end = HEADER_LEN + question.name_len + TYPE_CLASS_LEN;
    let fixed = question_end + opt_len;
    let headers = if frame.v6 { IPV6_LEN } else { IPV4_LEN } + UDP_LEN;

    let mut limit = question.limit;
    if control.max_reply != 0 && (control.max_reply as usize) < limit + headers {
        limit = (control.max_reply as usize).wrapping_sub(headers);
    }
    let mut reply_len = fixed + available * record_len;
    let wanted = if reply_len < limit { reply_len } else { limit };
    if wanted + headers > SAFE_PACKET_LEN
        && let Some(mtu) = hook.mtu_below(wanted + headers)
    {
        limit = mtu.wrapping_sub(headers);
    }
    let mut given = available;
    if reply_len > limit {
        if fixed > limit || limit > MAX_REPLY_LEN {
            return Err(Outcome::NoRoom);
        }
        given = (limit - fixed) / record_len;
        reply_len = fixed + given * record_len;
    }
    if reply_len > MAX_REPLY_LEN {
        return Err(Outcome::NoRoom);
    }
    Ok(Plan {
        frame,
        question,
        rcode,
        addresses: entry.address + opaque(offset),
        available,
        given,
        truncated: (given != available) as usize,
        partial: 0,
        answers_offset: frame.message + question_end,
        reply_len,
        frame_len: frame.message + reply_len,
    })
}

impl Plan {
    /// Makes one path of the many ways to a plan, see [`forget`].
    #[inline(always)]
    pub fn forget(mut self, scratch: *mut Scratch) -> Self {
        // SAFETY: cells of this CPU's own element.
        unsafe {
            let cells = &raw mut (*scratch).cells as *mut usize;
            self.given = forget(cells.add(4), self.given, 0x7ff);
            self.available = forget(cells.add(5), self.available, 0x7ff);
            self.reply_len = forget(cells.add(6), self.reply_len, 0x1fff);
            self.truncated = forget(cells.add(7), self.truncated, 1);
            self.frame_len = self.frame.message + self.reply_len;
        }
        self
    }

    /// The same with the state of the query's checksum.
    #[inline(always)]
    pub fn with_partial(mut self, partial: bool, scratch: *mut Scratch) -> Self {
        // SAFETY: a cell of this CPU's own element.
        self.frame = self.frame.forget(scratch);
        let mask = if partial { 0xffff } else { 0 };
        self.partial = unsafe { forget(&raw mut (*scratch).cells[9], mask, 0xffff) };
        self
    }

    /// What to count.
    #[inline(always)]
    pub fn answered(&self, ifindex: u32) -> Answered {
        Answered {
            outcome: if self.truncated != 0 { Outcome::HitTruncated } else { Outcome::Hit },
            kind: self.question.kind,
            rcode: self.rcode,
            query_len: self.frame.message_len,
            reply_len: self.reply_len,
            answers: self.given as u16,
            ifindex,
        }
    }
}

/// Writes the reply into the packet, which has its length already. Fails only
/// where the verifier wants a check that cannot fail.
#[inline(always)]
pub fn write<H: Hook>(hook: &H, scratch: *mut Scratch, plan: &Plan) -> Result<(), Outcome> {
    write_parts(hook, scratch, plan).ok_or(Outcome::NoRoom)
}

/// The parts, back to front.
#[inline(always)]
fn write_parts<H: Hook>(hook: &H, scratch: *mut Scratch, plan: &Plan) -> Option<()> {
    let mut sum = match plan.question.kind {
        QueryKind::A => shuffle::write_v4(scratch, plan, hook.span(plan.answers_offset)),
        QueryKind::Aaaa => shuffle::write_v6(scratch, plan, hook.span(plan.answers_offset)),
        QueryKind::Other => Sum::new(),
    };
    if plan.question.opt != 0 {
        let Span { start: opt, end } = hook.span(masked(plan.frame_len.wrapping_sub(OPT_LEN), 0x1fff));
        if opt + OPT_LEN > end {
            return None;
        }
        // SAFETY: just compared with the end.
        unsafe {
            store(opt, plan.question.opt);
            store(opt + 7, 0u32);
        }
        sum.add(plan.question.opt);
    }
    write_headers(hook, plan, sum)
}

/// Writes the headers of Ethernet, IP, UDP and DNS over those of the query.
/// `answers`: sum of everything behind the question.
#[inline(always)]
fn write_headers<H: Hook>(hook: &H, plan: &Plan, answers: Sum) -> Option<()> {
    // Branches by constants, so that every offset is one to the verifier.
    match (plan.frame.v6, plan.frame.tagged) {
        (false, false) => write_headers_at::<H, false, 14>(hook, plan, answers),
        (false, true) => write_headers_at::<H, false, 18>(hook, plan, answers),
        (true, false) => write_headers_at::<H, true, 14>(hook, plan, answers),
        (true, true) => write_headers_at::<H, true, 18>(hook, plan, answers),
    }
}

/// Writes the headers, where the IP header begins at `IP`.
#[inline(always)]
fn write_headers_at<H: Hook, const V6: bool, const IP: usize>(
    hook: &H,
    plan: &Plan,
    answers: Sum,
) -> Option<()> {
    let question = &plan.question;
    let headers = IP + if V6 { IPV6_LEN } else { IPV4_LEN } + UDP_LEN;
    let (start, end) = (hook.data(), hook.data_end());
    let message = start + headers;
    if message + HEADER_LEN > end {
        return None;
    }
    let id = question.header & 0xffff;
    let third = question.header >> 16 & 0x01 | 0x84 | (plan.truncated as u64) << 1;
    let fourth = question.header >> 24 & 0x10 | 0x80 | plan.rcode as u64;
    let given = (plan.given as u16).to_be() as u64;
    // SAFETY (all loads and stores here): the frame was just compared with the
    // end up to the end of the DNS header.
    unsafe {
        store(message, id | third << 16 | fourth << 24 | (1u16.to_be() as u64) << 32 | given << 48);
        let additional: [u8; 4] = [0, 0, 0, (question.opt != 0) as u8];
        store(message + 8, u32::from_ne_bytes(additional));

        let (to, to_end): (u32, u16) = (load(start), load(start + 4));
        let (from, from_end): (u32, u16) = (load(start + 6), load(start + 10));
        store(start, from);
        store(start + 4, from_end);
        store(start + 6, to);
        store(start + 10, to_end);
    }

    let udp_len = UDP_LEN + plan.reply_len;
    if V6 {
        return write_ipv6(hook, plan, answers, start + IP, udp_len);
    }
    write_ipv4(plan, start + IP, udp_len);
    Some(())
}

/// Writes the headers of IPv4 and UDP at `ip`; the UDP checksum is left out
/// (RFC 768: zero).
#[inline(always)]
fn write_ipv4(plan: &Plan, ip: usize, udp_len: usize) {
    let udp = ip + IPV4_LEN;
    let total_len = (IPV4_LEN + udp_len) as u64;
    // SAFETY: inside the headers that `write_headers_at` compared with the end.
    unsafe {
        let (client, server): (u32, u32) = (load(ip + 12), load(ip + 16));
        // Identification 0 and DF, as Linux sends its own datagrams; TTL 64.
        let start = u64::from_be(0x4500_0000_0000_4000 | total_len << 32);
        let mut addresses = Sum::new();
        addresses.add_half(client);
        addresses.add_half(server);
        let mut sum = addresses;
        sum.add(start);
        sum.add_half(u32::from_ne_bytes([64, UDP, 0, 0]));
        store(ip, start);
        store(ip + 8, u16::from_ne_bytes([64, UDP]));
        store(ip + 10, sum.finish());
        store(ip + 12, server);
        store(ip + 16, client);
        swap_ports(udp, udp_len);
        addresses.add_pseudo_tail(udp_len);
        store(udp + UDP_SUM, addresses.fold() & plan.partial as u16);
    }
}

/// Writes the headers of IPv6 and UDP at `ip`, the checksum over the whole
/// datagram with them (RFC 8200, section 8.1: it may not be left out).
#[inline(always)]
fn write_ipv6<H: Hook>(hook: &H, plan: &Plan, answers: Sum, ip: usize, udp_len: usize) -> Option<()> {
    let udp = ip + IPV6_LEN;
    let mut sum = Sum::new();
    // SAFETY: inside the headers that `write_headers_at` compared with the end.
    unsafe {
        let client: [u64; 2] = [load(ip + 8), load(ip + 16)];
        let server: [u64; 2] = [load(ip + 24), load(ip + 32)];
        sum.add(client[0]);
        sum.add(client[1]);
        sum.add(server[0]);
        sum.add(server[1]);
        sum.add_pseudo_tail(udp_len);
        // Version 6, hop limit 64.
        store(ip, u64::from_be(0x6000_0000_0000_1140 | (udp_len as u64) << 16));
        store(ip + 8, server[0]);
        store(ip + 16, server[1]);
        store(ip + 24, client[0]);
        store(ip + 32, client[1]);
        swap_ports(udp, udp_len);
        if plan.partial != 0 {
            store(udp + UDP_SUM, sum.fold());
            return Some(());
        }
        store(udp + UDP_SUM, 0u16);
        sum.add(load(udp));
        sum.add(load(udp + 8));
        sum.add_half(load(udp + 16));
    }
    let question_len = plan.question.name_len + TYPE_CLASS_LEN;
    let question =
        checksum::sum_bytes::<QUESTION_WORDS>(hook.span(plan.frame.message + HEADER_LEN), question_len)?;
    sum.add_sum(question, false);
    sum.add_sum(answers, question_len & 1 != 0);
    let sum = sum.finish();
    // SAFETY: as above. Zero would mean that there is no checksum.
    unsafe { store(udp + UDP_SUM, if sum == 0 { 0xffff } else { sum }) };
    Some(())
}

/// Words of the longest question.
const QUESTION_WORDS: usize = crate::question::MAX_QUESTION_LEN.div_ceil(8);

/// Swaps the ports of the UDP header at `udp` and sets its length.
///
/// # Safety
/// The header can be read and written.
#[inline(always)]
unsafe fn swap_ports(udp: usize, udp_len: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let ports: u32 = load(udp);
        store(udp, ports.rotate_left(16));
        store(udp + 4, (udp_len as u16).to_be());
    }
}
