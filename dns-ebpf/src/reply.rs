//! Chooses the answers and writes the reply.

use core::mem::offset_of;

use aya_ebpf::bindings::bpf_fib_lookup as FibLookup;
use dns_common::{
    MIN_UDP_SIZE, UDP_PAYLOAD_SIZE,
    control::Control,
    counters::{Outcome, QueryKind},
    entry::{AnswerPolicy, EntryHeader, HAS_POLICY, padded},
    scope::{BOUNDED, LOOPBACK_IFINDEX, NEAR},
};

use crate::{
    IS_SKELETON,
    bytes::{Span, barrier, barrier_and, has, load, store},
    checksum::{self, Sum},
    frame::{
        A_LEN, AAAA_LEN, Frame, HEADER_LEN, IPV4_LEN, IPV6_LEN, MAX_QUERY_LEN, MAX_QUESTION_LEN,
        MAX_REPLY_LEN, OPT_LEN, TYPE_CLASS_LEN, UDP, UDP_LEN, UDP_SUM,
    },
    hook::Hook,
    lookup::Entry,
    maps::{self, Context, pass_to_stack},
    question::{Layout, Plan, Question},
    shuffle,
};

/// Variants of [`QueryKind`] as numbers.
const AAAA: usize = QueryKind::Aaaa as usize;
const OTHER: usize = QueryKind::Other as usize;
const ANY: usize = QueryKind::Any as usize;
/// IP packets up to this length skip the path MTU check: every host must accept them (RFC 791,
/// section 3.1).
const SAFE_PACKET_LEN: usize = 576;

/// Longest message to another machine in bytes, which passes every path without fragmentation (RFC
/// 9715).
const MAX_FAR_REPLY_LEN: usize = UDP_PAYLOAD_SIZE as usize;

/// Plans the reply from `entry`.
#[inline(always)]
pub fn plan<H: Hook>(
    hook: &H,
    context: &Context,
    frame: Frame,
    question: Question,
    entry: &Entry,
) -> Result<Plan, Outcome> {
    let header = entry.header();
    let (v4_count, v6_count) = (
        barrier(header.v4_count as usize),
        barrier(header.v6_count as usize),
    );
    if v4_count > H::MAX_V4 || v6_count > H::MAX_V6 {
        return pass_to_stack(Outcome::NotPublished);
    }
    // For verifiers (Linux 6.1) that do not track the bound in all copies of the number.
    let v4_count = barrier_and(v4_count, 0x7ff);
    // Like `EntryHeader::v4_offset` and `v6_offset`, from bounded numbers. Branch-free: for an entry without
    // a policy the bytes at its offset are masked to zero, which means no limits.
    let mut has_policy = barrier(header.rcode_other as usize / HAS_POLICY as usize).wrapping_neg();
    let mut is_any = ((question.kind() == ANY) as usize).wrapping_neg();
    if H::IS_FIRST {
        if has_policy | is_any != 0 {
            return pass_to_stack(Outcome::NotPublished);
        }
        // The verifier knows both from here on, and follows no choice that depends on them.
        has_policy = 0;
        is_any = 0;
    } else {
        is_any = context.zero.value_barrier(is_any, usize::MAX);
    }
    let policy_offset = barrier_and(size_of::<EntryHeader>() + padded(question.name_len), 0x1ff);
    // SAFETY: an entry of the largest size fits at this address.
    let policy =
        AnswerPolicy(unsafe { load::<u64>(entry.address + policy_offset) } & has_policy as u64);
    let v4_offset = policy_offset + barrier_and(has_policy, size_of::<AnswerPolicy>());
    let (rcode, list, available, record_len) = match question.kind() {
        AAAA => (
            header.rcode,
            v4_offset + padded(v4_count * 4),
            v6_count,
            AAAA_LEN,
        ),
        OTHER => (header.rcode_other, v4_offset, 0, A_LEN),
        // A, and ANY of a name without IPv6 addresses.
        _ => (header.rcode, v4_offset, v4_count, A_LEN),
    };
    // Userspace knows other types of a name with a policy.
    if has(is_any, has_policy) {
        return pass_to_stack(Outcome::NotPublished);
    }
    let appended = barrier_and(v6_count, is_any);
    let question_end = question.end();
    let fixed = question_end + question.opt_len();

    // With a policy, replies to such queries contain more than addresses and are written by
    // userspace.
    if has(has_policy, 1) && (available == 0 || frame.message_len != fixed) {
        return pass_to_stack(Outcome::NotPublished);
    }
    let all = at_most(available, policy.most());
    let is_plain = (question.limit == MIN_UDP_SIZE) as usize;
    let wanted = at_most(
        all,
        policy.plain(question.kind() == AAAA) & is_plain.wrapping_neg(),
    );
    let limit = question.limit - barrier_and(has_policy, AnswerPolicy::SPARE);
    let mut reply_len = fixed + wanted * record_len + appended * AAAA_LEN;
    let expected = if reply_len < limit { reply_len } else { limit };
    check_path(hook, context, &frame, expected)?;
    let mut given = wanted;
    if reply_len > limit {
        // Which records of both families fit depends on their order, so userspace draws them.
        if appended != 0 || fixed > limit || limit > MAX_REPLY_LEN {
            return pass_to_stack(Outcome::NoRoom);
        }
        given = (limit - fixed) / record_len;
        reply_len = fixed + given * record_len;
    }
    let most = max_reply(context);
    if reply_len > MAX_REPLY_LEN || reply_len > most {
        return pass_to_stack(Outcome::NoRoom);
    }
    Ok(Plan {
        layout: layout(frame, question, reply_len),
        rcode,
        entry: entry.address,
        list,
        available,
        given,
        appended,
        truncated: (given != all) as usize & !policy.never_truncates(),
        ttl: policy.ttl().to_be() as usize,
        no_recursion: policy.no_recursion(),
    })
}

/// Returns the layout of a reply of `reply_len` bytes.
#[inline(always)]
pub fn layout(frame: Frame, question: Question, reply_len: usize) -> Layout {
    Layout {
        frame,
        question,
        partial: 0,
        answers_offset: frame.message + question.end(),
        reply_len,
        frame_len: frame.message + reply_len,
    }
}

/// Returns the length of the longest message that the server permits, in bytes.
#[inline(always)]
pub fn max_reply(context: &Context) -> usize {
    match context.control.max_reply as usize {
        0 => MAX_REPLY_LEN,
        max_reply => max_reply,
    }
}

/// Checks that the return path accepts a reply of `reply_len` bytes.
#[inline(always)]
pub fn check_path<H: Hook>(
    hook: &H,
    context: &Context,
    frame: &Frame,
    reply_len: usize,
) -> Result<(), Outcome> {
    if reply_len + frame.headers_len() > SAFE_PACKET_LEN
        && (H::IS_FIRST || !takes(hook, context, frame, reply_len))
    {
        return pass_to_stack(Outcome::LargeReply);
    }
    Ok(())
}

/// Returns whether the return path accepts a reply of `reply_len` bytes. On `lo` its MTU decides,
/// elsewhere the route and the kernel's path MTU; to other machines [`MAX_FAR_REPLY_LEN`] applies
/// as well.
#[inline(always)]
fn takes<H: Hook>(hook: &H, context: &Context, frame: &Frame, reply_len: usize) -> bool {
    let packet_len = reply_len + frame.headers_len();
    if hook.ifindex() == LOOPBACK_IFINDEX {
        return maps::fits_device(hook.context(), packet_len);
    }
    let flags = frame.interface(context.scope).flags;
    if flags & BOUNDED != 0 || reply_len > MAX_FAR_REPLY_LEN && flags & NEAR == 0 {
        return false;
    }
    describe(hook, context, frame, packet_len)
        .is_some_and(|route| maps::fits_route(hook.context(), route))
}

/// Describes the reply's route for the kernel's look-up.
#[inline(always)]
fn describe<H: Hook>(
    hook: &H,
    context: &Context,
    frame: &Frame,
    packet_len: usize,
) -> Option<*mut FibLookup> {
    const AF_INET: u8 = 2;
    const AF_INET6: u8 = 10;
    let Span { start: ip, end } = hook.span(frame.ip());
    // SAFETY: this CPU's own element, taken by this run.
    let route = unsafe { &raw mut (*context.scratch).route };
    let at = |offset: usize| route as usize + offset;
    // SAFETY (all): inside `route`, or just compared with the packet's end.
    unsafe {
        let mut word = 0;
        while word < size_of::<FibLookup>() {
            store(at(word), 0u64);
            word += 8;
        }
        store(at(offset_of!(FibLookup, l4_protocol)), UDP);
        store(
            at(offset_of!(FibLookup, __bindgen_anon_1)),
            packet_len as u16,
        );
        store(at(offset_of!(FibLookup, ifindex)), hook.ifindex());
        let (source, target) = (
            at(offset_of!(FibLookup, __bindgen_anon_3)),
            at(offset_of!(FibLookup, __bindgen_anon_4)),
        );
        if frame.is_v6() {
            if ip + IPV6_LEN > end {
                return None;
            }
            store(at(offset_of!(FibLookup, family)), AF_INET6);
            store(target, load::<u64>(ip + 8));
            store(target + 8, load::<u64>(ip + 16));
            store(source, load::<u64>(ip + 24));
            store(source + 8, load::<u64>(ip + 32));
        } else {
            if ip + IPV4_LEN > end {
                return None;
            }
            store(at(offset_of!(FibLookup, family)), AF_INET);
            store(target, load::<u32>(ip + 12));
            store(source, load::<u32>(ip + 16));
        }
    }
    Some(route)
}

/// Returns the smaller of both numbers; a limit of 0 means no limit.
#[inline(always)]
fn at_most(count: usize, limit: usize) -> usize {
    if limit.wrapping_sub(1) < count {
        limit
    } else {
        count
    }
}

/// Writes the reply into the packet, which already has its length. Fails only at checks that the
/// verifier requires and that cannot fail.
#[inline(always)]
pub fn write<H: Hook>(hook: &H, context: &Context, plan: &Plan) -> Result<(), Outcome> {
    write_parts(hook, context, plan).ok_or(Outcome::NoRoom)
}

/// Writes the parts of the reply, back to front.
#[inline(always)]
fn write_parts<H: Hook>(hook: &H, context: &Context, plan: &Plan) -> Option<()> {
    let &Context { scratch, zero, .. } = context;
    let layout = &plan.layout;
    let question = &layout.question;
    // Before the IPv4 addresses are written: the verifier knows their number afterwards, and would follow
    // the rest once per number.
    let v6 = plan.v6(zero);
    // Opaque, or the verifier would follow the rest for each kind of query.
    let mut sum = Sum::of(zero.value_barrier(0, usize::MAX) as u64);
    if question.kind() != AAAA && plan.given != 0 {
        sum = shuffle::write_v4(hook, scratch, zero, plan.v4(), plan.ttl);
    }
    if v6.given != 0 {
        let written = shuffle::write_v6(hook, scratch, zero, v6, plan.ttl);
        // A records have an even length.
        sum.add_sum(written, false);
    }
    if question.has_opt() {
        sum.add(write_opt(hook, context.control, layout)?);
    }
    let id = question.header & 0xffff;
    let third = question.header >> 16 & 0x01 | 0x84 | (plan.truncated as u64) << 1;
    let fourth =
        question.header >> 24 & 0x10 | 0x80 >> (plan.no_recursion << 3) | plan.rcode as u64;
    let given = ((plan.given + plan.appended) as u16).to_be() as u64;
    let header = Header {
        first: id | third << 16 | fourth << 24 | ONE_QUESTION | given << 48,
        last: (question.opt_count() as u32) << 24,
    };
    write_headers(hook, layout, header, sum)
}

/// The header of a reply.
#[derive(Clone, Copy)]
pub struct Header {
    /// Id, flags, and the numbers of questions and answers.
    pub first: u64,
    /// Numbers of authority and additional records.
    pub last: u32,
}

/// QDCOUNT 1 in the first eight bytes of a header.
pub const ONE_QUESTION: u64 = (1u16.to_be() as u64) << 32;

/// Writes the OPT at the end of the reply; returns its first eight bytes. The others are zero.
#[inline(always)]
pub fn write_opt<H: Hook>(hook: &H, control: &Control, layout: &Layout) -> Option<u64> {
    let start = layout.question.reply_opt(control.edns);
    let Span { start: opt, end } =
        hook.span(barrier_and(layout.frame_len.wrapping_sub(OPT_LEN), 0x1fff));
    if opt + OPT_LEN > end {
        return None;
    }
    // SAFETY: just compared with the end.
    unsafe {
        store(opt + 7, 0u32);
        store(opt, start);
    }
    Some(start)
}

/// Writes the Ethernet, IP, UDP and DNS headers over the query's headers. `answers` is the sum of
/// all bytes after the question.
#[inline(always)]
pub fn write_headers<H: Hook>(
    hook: &H,
    layout: &Layout,
    header: Header,
    answers: Sum,
) -> Option<()> {
    // The branches select constants, so that every offset is a constant for the verifier.
    match (layout.frame.is_v6(), layout.frame.is_tagged()) {
        (false, false) => write_headers_at::<H, false, 14>(hook, layout, header, answers),
        (false, true) => write_headers_at::<H, false, 18>(hook, layout, header, answers),
        (true, false) => write_headers_at::<H, true, 14>(hook, layout, header, answers),
        (true, true) => write_headers_at::<H, true, 18>(hook, layout, header, answers),
    }
}

/// Writes the headers, with the IP header at offset `IP`.
#[inline(always)]
fn write_headers_at<H: Hook, const V6: bool, const IP: usize>(
    hook: &H,
    layout: &Layout,
    header: Header,
    answers: Sum,
) -> Option<()> {
    let headers = IP + if V6 { IPV6_LEN } else { IPV4_LEN } + UDP_LEN;
    let (start, end) = (hook.data(), hook.data_end());
    let message = start + headers;
    if message + HEADER_LEN > end {
        return None;
    }
    // SAFETY (all loads and stores here): the frame was just compared with the
    // end up to the end of the DNS header.
    unsafe {
        store(message, header.first);
        store(message + 8, header.last);

        let (to, to_end): (u32, u16) = (load(start), load(start + 4));
        let (from, from_end): (u32, u16) = (load(start + 6), load(start + 10));
        store(start, from);
        store(start + 4, from_end);
        store(start + 6, to);
        store(start + 10, to_end);
    }

    let udp_len = UDP_LEN + layout.reply_len;
    if V6 {
        return write_ipv6(hook, layout, answers, start + IP, udp_len);
    }
    write_ipv4(layout, start + IP, udp_len);
    Some(())
}

/// Writes the IPv4 and UDP headers at `ip`, without a UDP checksum (RFC 768: zero) unless the
/// query's was unfinished.
#[inline(always)]
fn write_ipv4(layout: &Layout, ip: usize, udp_len: usize) {
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
        store(udp + UDP_SUM, addresses.fold() & layout.partial as u16);
    }
}

/// Writes the IPv6 and UDP headers at `ip`, with the checksum over the whole datagram (RFC 8200,
/// section 8.1: it is mandatory).
#[inline(always)]
fn write_ipv6<H: Hook>(
    hook: &H,
    layout: &Layout,
    answers: Sum,
    ip: usize,
    udp_len: usize,
) -> Option<()> {
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
        store(
            ip,
            u64::from_be(0x6000_0000_0000_1140 | (udp_len as u64) << 16),
        );
        store(ip + 8, server[0]);
        store(ip + 16, server[1]);
        store(ip + 24, client[0]);
        store(ip + 32, client[1]);
        swap_ports(udp, udp_len);
        if layout.is_partial() {
            store(udp + UDP_SUM, sum.fold());
            return Some(());
        }
        store(udp + UDP_SUM, 0u16);
        sum.add(load(udp));
        sum.add(load(udp + 8));
        sum.add_half(load(udp + 16));
    }
    let question_len = layout.question.name_len + TYPE_CLASS_LEN;
    let question = checksum::sum_bytes::<QUESTION_WORDS>(
        hook.span(layout.frame.message + HEADER_LEN),
        question_len,
    )?;
    sum.add_sum(question, false);
    sum.add_sum(answers, question_len & 1 != 0);
    let sum = sum.finish();
    // SAFETY: as above. A zero would mean that there is no checksum.
    unsafe { store(udp + UDP_SUM, if sum == 0 { 0xffff } else { sum }) };
    Some(())
}

/// Words of the longest question.
const QUESTION_WORDS: usize = MAX_QUESTION_LEN.div_ceil(8);

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

/// Returns whether the query's UDP checksum is unfinished; an error if it is wrong. `name` is the sum of the name as
/// sent. Invalidates addresses.
///
/// A local sender leaves the checksum to the device (`CHECKSUM_PARTIAL`): the field holds the sum
/// of the pseudo-header alone, and the device that transmits the packet adds the rest, for our
/// reply as well. A program cannot see that state, but it can see the field: the sum of the
/// pseudo-header alone is a valid checksum only with a probability of one in 65,536. In that case
/// tc asks the kernel.
#[inline(always)]
pub fn is_partial<H: Hook>(
    hook: &H,
    frame: &Frame,
    question: &Question,
    name: Sum,
) -> Result<bool, Outcome> {
    if IS_SKELETON {
        return Ok(false);
    }
    let (data, end) = (hook.data(), hook.data_end());
    let ip = data + frame.ip();
    let mut sum = Sum::new();
    let udp = if frame.is_v6() {
        if ip + IPV6_LEN + UDP_LEN > end {
            return pass_to_stack(Outcome::BadLength);
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
            return pass_to_stack(Outcome::BadLength);
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
        return if frame.is_v6() {
            pass_to_stack(Outcome::BadChecksum)
        } else {
            Ok(false)
        };
    }
    let pseudo = sum;
    sum.add(ports_and_length);
    sum.add(question.header);
    sum.add_half(u32::from_ne_bytes([0, 0, 0, question.has_opt() as u8]));
    sum.add_sum(name, false);
    let after_name = hook.data() + barrier(frame.message + HEADER_LEN + question.name_len);
    if after_name + TYPE_CLASS_LEN > end {
        return pass_to_stack(Outcome::BadLength);
    }
    let rest = if !question.has_opt() {
        let mut rest = Sum::new();
        // SAFETY: just compared with the end.
        rest.add_half(unsafe { load(after_name) });
        rest
    } else {
        let rest_len = frame
            .message_len
            .wrapping_sub(HEADER_LEN + question.name_len);
        let span = Span {
            start: after_name,
            end,
        };
        let rest_len = barrier_and(rest_len, 0x7ff);
        let rest = if H::IS_FIRST {
            checksum::sum_bytes::<FIRST_REST_WORDS>(span, rest_len)
        } else {
            checksum::sum_bytes::<REST_WORDS>(span, rest_len)
        };
        rest.ok_or(Outcome::BadLength)?
    };
    sum.add_sum(rest, question.name_len & 1 != 0);
    if !H::IS_TC {
        // A local sender's query on a veth is unfinished at native XDP as well, but its reply is a
        // new frame, which no device finishes.
        let is_accepted = sum.is_right() || pseudo.folds_to(field);
        return if is_accepted {
            Ok(false)
        } else {
            pass_to_stack(Outcome::BadChecksum)
        };
    }
    match (sum.is_right(), pseudo.folds_to(field)) {
        (true, false) => Ok(false),
        (false, true) => Ok(true),
        (false, false) => pass_to_stack(Outcome::BadChecksum),
        (true, true) => hook
            .is_unfinished(frame.message - UDP_LEN + UDP_SUM)
            .ok_or(Outcome::Unsupported),
    }
}

/// Words of the longest message after its question's name.
const REST_WORDS: usize = (MAX_QUERY_LEN - HEADER_LEN).div_ceil(8);

/// The same for the first program, which answers no query with options.
const FIRST_REST_WORDS: usize = (TYPE_CLASS_LEN + OPT_LEN).div_ceil(8);
