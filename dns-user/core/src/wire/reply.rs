//! Replies: construction of local ones, byte by byte, and fitting of foreign ones to the limits of client and
//! transport.

use std::net::{Ipv4Addr, Ipv6Addr};

use hickory_proto::{
    op::{HeaderCounts, Message, ResponseCode, emit_message_parts},
    serialize::binary::BinEncoder,
};

use super::{
    ADDITIONAL_COUNT_AT, CLASS_IN, ExtendedError, HEADER_LEN, InfoCode, Layout, OPT_LEN, Query,
    TYPE_A, TYPE_AAAA, TYPE_ANY, TYPE_OPT, flag, u16_at,
};
use crate::resolve::{Existence, LocalAnswer};

/// Length of the fields between the owner name and RDATA.
const FIXED_LEN: usize = 10;
/// Compression pointer to the question's name, the owner of most answers (RFC 1035, section 4.1.4).
pub const QUESTION_NAME: [u8; 2] = [0xc0, HEADER_LEN as u8];

/// Header flags that depend on the source of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyFlags {
    /// AA: the answer is authoritative.
    pub authoritative: bool,
    /// RA: this server offers recursion.
    pub recursion_available: bool,
}

impl ReplyFlags {
    /// Local data: names of the fleet, up-checks, handlers.
    pub const LOCAL: Self = Self {
        authoritative: true,
        recursion_available: true,
    };
    /// Refusals and errors (observed: neither flag is set).
    pub const ERROR: Self = Self {
        authoritative: false,
        recursion_available: false,
    };
    /// Replies for names that recursors are responsible for.
    pub const RECURSION: Self = Self {
        authoritative: false,
        recursion_available: true,
    };

    const fn bits(self) -> u16 {
        (if self.authoritative { flag::AA } else { 0 })
            | (if self.recursion_available {
                flag::RA
            } else {
                0
            })
    }
}

/// Random generator for the order of answers, with its buffers; one per worker.
#[derive(Debug, Default)]
pub struct Shuffle {
    /// Not cryptographic: only spreads load.
    random: fastrand::Rng,
    /// Positions not drawn yet.
    positions: Vec<u32>,
}

impl Shuffle {
    /// Creates a generator with a fixed seed, for tests and benches.
    pub fn with_seed(seed: u64) -> Self {
        Self {
            random: fastrand::Rng::with_seed(seed),
            positions: Vec::new(),
        }
    }

    /// Draws `count` distinct numbers below `total` in random order, uniformly over all orders
    /// (Fisher-Yates). `count` is at most `total`.
    fn draw(&mut self, total: usize, count: usize, mut each: impl FnMut(usize)) {
        let Self { random, positions } = self;
        positions.clear();
        // A name cannot have more than 2^32 addresses.
        positions.extend(0..total as u32);
        for drawn in 0..count {
            let rest = (total - drawn) as u32;
            // The last position is drawn already, without a random number.
            let pick = if rest > 1 {
                drawn + random.u32(..rest) as usize
            } else {
                drawn
            };
            positions.swap(drawn, pick);
            each(positions[drawn] as usize);
        }
    }
}

/// Writes the reply to a query for a local name into `out`, after clearing it: within the query's limit,
/// with as many answers as fit in random order, and TC set if some are omitted. The bytes
/// are identical to hickory's encoding.
pub fn local_reply(
    query: &Query<'_>,
    answer: LocalAnswer<'_>,
    shuffle: &mut Shuffle,
    out: &mut Vec<u8>,
) {
    let LocalAnswer { existence, v4, v6 } = answer;
    let has_data_type = matches!(query.question.qtype, TYPE_A | TYPE_AAAA | TYPE_ANY);
    let rcode = match existence {
        Existence::Found => ResponseCode::NoError,
        Existence::NoSuchName => ResponseCode::NXDomain,
        Existence::Malformed if has_data_type => ResponseCode::FormErr,
        // bosh-dns has no data of other types, and answers without looking at the form (observed).
        Existence::Malformed => ResponseCode::NoError,
    };
    write_addresses(query, rcode, (v4, v6), shuffle, out);
}

/// Builds a reply with the question and an OPT if the query has one; AA and RA are clear.
pub fn error_reply(query: &Query<'_>, rcode: ResponseCode) -> Vec<u8> {
    empty_reply(query, rcode, ReplyFlags::ERROR)
}

/// Builds a reply without records: the question, and an OPT if the query has one.
pub fn empty_reply(query: &Query<'_>, rcode: ResponseCode, flags: ReplyFlags) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_LEN + query.question.wire_len() + OPT_LEN);
    write_start(query, flags.bits() | u16::from(rcode.low()), 0, &mut out);
    write_opt(query, rcode.high(), &mut out);
    out
}

/// Starts a reply without an OPT, to which records are added. `rcode` is the part of the header.
pub fn begin_reply(query: &Query<'_>, rcode: u8, flags: ReplyFlags) -> Vec<u8> {
    let mut out = Vec::with_capacity(512);
    write_start(query, flags.bits() | u16::from(rcode & 0x0f), 0, &mut out);
    // `write_start` has counted an OPT, which the caller appends and counts behind the records.
    out[HEADER_LEN - 1] = 0;
    out
}

/// Builds a bare header, for messages with an unreliable question.
pub(super) fn questionless_reply(id: u16, query_flags: u16, rcode: ResponseCode) -> Vec<u8> {
    // CD is only defined for queries (RFC 4035, section 3.2.2).
    let copied = if query_flags & flag::OPCODE == 0 {
        flag::COPIED
    } else {
        flag::RD
    };
    let flags = flag::QR | query_flags & (copied | flag::OPCODE) | u16::from(rcode.low());
    let mut out = vec![0; HEADER_LEN];
    out[..2].copy_from_slice(&id.to_be_bytes());
    out[2..4].copy_from_slice(&flags.to_be_bytes());
    out
}

/// Writes header, question, answers and OPT.
fn write_addresses(
    query: &Query<'_>,
    rcode: ResponseCode,
    (v4, v6): (&[Ipv4Addr], &[Ipv6Addr]),
    shuffle: &mut Shuffle,
    out: &mut Vec<u8>,
) {
    let (v4, v6) = match query.question.qtype {
        TYPE_A => (v4, &[][..]),
        TYPE_AAAA => (&[][..], v6),
        TYPE_ANY => (v4, v6),
        _ => (&[][..], &[][..]),
    };
    out.clear();
    let opt_len = if query.edns.is_some() { OPT_LEN } else { 0 };
    let room = query
        .limit()
        .saturating_sub(HEADER_LEN + query.question.wire_len() + opt_len);
    let owner = owner_of_answers(query);
    let v4_len = owner.len() + FIXED_LEN + 4;
    let v6_len = owner.len() + FIXED_LEN + 16;
    let total = v4.len() + v6.len();
    // With both families, the number that fits depends on their order: draw them all and stop at
    // the first that does not fit.
    let most = match (v4.is_empty(), v6.is_empty()) {
        (_, true) => total.min(room / v4_len),
        (true, false) => total.min(room / v6_len),
        (false, false) => total,
    };
    write_start(
        query,
        flag::AA | flag::RA | u16::from(rcode.low()),
        most,
        out,
    );
    out.reserve(most.min(room / v4_len) * v6_len + OPT_LEN);
    let end = HEADER_LEN + query.question.wire_len() + room;
    let mut written = 0;
    let mut full = false;
    shuffle.draw(total, most, |position| {
        let length = if position < v4.len() { v4_len } else { v6_len };
        // Shorter records behind it are left out as well, as in bosh-dns (observed).
        full |= out.len() + length > end;
        if full {
            return;
        }
        out.extend_from_slice(owner);
        push_address(v4, v6, position, out);
        written += 1;
    });
    if written < total {
        out[2] |= (flag::TC >> 8) as u8;
    }
    // At most 65,535 bytes with at least 15 bytes per record.
    out[6..8].copy_from_slice(&(written as u16).to_be_bytes());
    write_opt(query, rcode.high(), out);
}

/// Appends the record behind its owner.
#[inline]
fn push_address(v4: &[Ipv4Addr], v6: &[Ipv6Addr], position: usize, out: &mut Vec<u8>) {
    match v4.get(position) {
        Some(address) => {
            let mut record = const { record::<{ FIXED_LEN + 4 }>(TYPE_A) };
            record[FIXED_LEN..].copy_from_slice(&address.octets());
            out.extend_from_slice(&record);
        }
        None => {
            let mut record = const { record::<{ FIXED_LEN + 16 }>(TYPE_AAAA) };
            record[FIXED_LEN..].copy_from_slice(&v6[position - v4.len()].octets());
            out.extend_from_slice(&record);
        }
    }
}

/// Writes the header, with the copied flags, and the question.
fn write_start(query: &Query<'_>, flags: u16, answers: usize, out: &mut Vec<u8>) {
    let flags = flag::QR | query.flags & flag::COPIED | flags;
    let mut header = [0; HEADER_LEN];
    header[..2].copy_from_slice(&query.id.to_be_bytes());
    header[2..4].copy_from_slice(&flags.to_be_bytes());
    header[5] = 1;
    header[6..8].copy_from_slice(&(answers as u16).to_be_bytes());
    header[11] = u8::from(query.edns.is_some());
    out.extend_from_slice(&header);
    // The question follows the header of the query and is well-formed.
    out.extend_from_slice(&query.message[HEADER_LEN..HEADER_LEN + query.question.wire_len()]);
}

/// Appends the OPT of the reply if the query has one.
fn write_opt(query: &Query<'_>, extended_rcode: u8, out: &mut Vec<u8>) {
    if let Some(opt) = query.reply_opt(extended_rcode) {
        out.extend_from_slice(&opt);
    }
}

/// Encodes an OPT of version 0 without options (RFC 6891, section 6.1.2).
pub fn opt_record(udp_size: u16, extended_rcode: u8, dnssec_ok: bool) -> [u8; OPT_LEN] {
    let [type_high, type_low] = TYPE_OPT.to_be_bytes();
    let [size_high, size_low] = udp_size.to_be_bytes();
    let flags = if dnssec_ok { 0x80 } else { 0 };
    [
        0,
        type_high,
        type_low,
        size_high,
        size_low,
        extended_rcode,
        0,
        flags,
        0,
        0,
        0,
    ]
}

/// Appends and counts the OPT of a reply to `query`, if the query has one. The reply must end with
/// its last record and have no OPT.
pub fn append_opt(query: &Query<'_>, reply: &mut Vec<u8>) {
    if let Some(opt) = query.reply_opt(0) {
        push_opt(reply, &opt);
    }
}

fn push_opt(message: &mut Vec<u8>, opt: &[u8]) {
    let Some(count) = u16_at(message, ADDITIONAL_COUNT_AT) else {
        return;
    };
    message.extend_from_slice(opt);
    message[ADDITIONAL_COUNT_AT..HEADER_LEN]
        .copy_from_slice(&count.saturating_add(1).to_be_bytes());
}

/// Encodes TYPE, CLASS, TTL 0 and RDLENGTH, with room for the RDATA.
const fn record<const LEN: usize>(kind: u16) -> [u8; LEN] {
    let mut record = [0; LEN];
    [record[0], record[1]] = kind.to_be_bytes();
    [record[2], record[3]] = CLASS_IN.to_be_bytes();
    // 4 or 16.
    record[FIXED_LEN - 1] = (LEN - FIXED_LEN) as u8;
    record
}

/// Returns the owner of the answers: a pointer to the question's name, or the root itself, which is
/// shorter.
pub fn owner_of_answers(query: &Query<'_>) -> &'static [u8] {
    if query.question.raw_name.len() == 1 {
        &[0]
    } else {
        &QUESTION_NAME
    }
}

//----------- Replies of other servers ------------------------------------------

/// Adapts a complete reply to the client. Above the client's size limit, it compresses names, and if that is not
/// enough keeps the records that fit, in their order, with TC set. An unparsable reply is passed on if it fits;
/// otherwise the result is SERVFAIL.
pub fn truncate_to_client(query: &Query<'_>, mut reply: Vec<u8>) -> Vec<u8> {
    let limit = query.limit();
    let ours = query.reply_opt(0);
    // The usual case: a reply that was written for this client is neither parsed nor copied.
    if reply.len() <= limit && ours.is_none_or(|opt| ends_with_opt(&reply, &opt)) {
        return reply;
    }
    let Some(layout) = Layout::read(&reply) else {
        return if reply.len() <= limit {
            reply
        } else {
            unreadable(query)
        };
    };
    let opt = match (layout.opt, ours) {
        // An existing one stays unchanged.
        (Some((start, end)), _) => reply[start..end].to_vec(),
        // RFC 6891, section 6.1.1: a query with an OPT has a reply with one.
        (None, Some(opt)) => {
            reply.truncate(layout.end);
            push_opt(&mut reply, &opt);
            opt.to_vec()
        }
        (None, None) => Vec::new(),
    };
    if reply.len() <= limit {
        return reply;
    }
    let room = limit - opt.len().min(limit);
    let Some(mut cut) = compress(&reply, room).or_else(|| cut_raw(&reply, room)) else {
        return unreadable(query);
    };
    if !opt.is_empty() {
        push_opt(&mut cut, &opt);
    }
    cut
}

/// Returns whether the last record is `opt`. (If another record's data happens to look like it, the
/// client merely loses its OPT.)
fn ends_with_opt(reply: &[u8], opt: &[u8]) -> bool {
    u16_at(reply, ADDITIONAL_COUNT_AT).is_some_and(|count| count > 0) && reply.ends_with(opt)
}

/// Re-encodes the message with compressed names in at most `room` bytes, without its OPT; `None` if
/// hickory cannot parse or encode it.
fn compress(message: &[u8], room: usize) -> Option<Vec<u8>> {
    let mut message = Message::from_vec(message).ok()?;
    loop {
        // Each round but the last clears a section that had records, so the loop ends.
        let (bytes, kept) = encode(&message, room)?;
        // After the first record that does not fit, bosh-dns drops all others, even smaller ones in later sections
        // (observed).
        if usize::from(kept.answers) < message.answers.len()
            && !(message.authorities.is_empty() && message.additionals.is_empty())
        {
            message.authorities.clear();
            message.additionals.clear();
        } else if usize::from(kept.authorities) < message.authorities.len()
            && !message.additionals.is_empty()
        {
            message.additionals.clear();
        } else {
            return Some(bytes);
        }
        // TC stays set even if the remaining records fit now.
        message.metadata.truncation = true;
    }
}

/// Encodes the sections up to `room` bytes; returns the bytes and the record counts.
fn encode(message: &Message, room: usize) -> Option<(Vec<u8>, HeaderCounts)> {
    let mut bytes = Vec::with_capacity(room);
    let mut encoder = BinEncoder::new(&mut bytes);
    encoder.set_max_size(room.try_into().ok()?);
    let header = emit_message_parts(
        &message.metadata,
        &mut message.queries.iter(),
        &mut message.answers.iter(),
        &mut message.authorities.iter(),
        &mut message.additionals.iter(),
        None,
        message.signature.as_deref(),
        &mut encoder,
    )
    .ok()?;
    // Drop the partially encoded record.
    encoder.trim();
    Some((bytes, header.counts))
}

/// Keeps the leading records that fit, unchanged: compression pointers only point backwards, to
/// data that is kept. The OPT is omitted; the caller appends it.
fn cut_raw(message: &[u8], room: usize) -> Option<Vec<u8>> {
    let Layout {
        records,
        counts,
        start,
        end: _,
        opt,
    } = Layout::read(message)?;
    if start > room {
        return None;
    }
    let mut kept = message[..start].to_vec();
    let mut kept_counts = [0u16; 3];
    let mut rest = records.into_iter();
    'sections: for (kept_count, count) in kept_counts.iter_mut().zip(counts) {
        for (start, end) in rest.by_ref().take(usize::from(count)) {
            if Some((start, end)) == opt {
                continue;
            }
            if kept.len() + (end - start) > room {
                kept[2] |= (flag::TC >> 8) as u8;
                break 'sections;
            }
            kept.extend_from_slice(&message[start..end]);
            *kept_count += 1;
        }
    }
    for (at, count) in [6, 8, ADDITIONAL_COUNT_AT].into_iter().zip(kept_counts) {
        kept[at..at + 2].copy_from_slice(&count.to_be_bytes());
    }
    Some(kept)
}

/// Returns the reply sent instead of one that is too large and unparsable.
fn unreadable(query: &Query<'_>) -> Vec<u8> {
    let mut reply = error_reply(query, ResponseCode::ServFail);
    ExtendedError::new(InfoCode::Other, "the reply is too long and cannot be cut")
        .push(query, &mut reply);
    reply
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_kept_within_room() {
        let question = b"\x12\x34\x81\0\0\x01\0\x02\0\0\0\0\x01a\0\0\x01\0\x01";
        let record = b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04\x0a\0\0\x01";
        let message = [&question[..], record, record].concat();
        // 19 bytes of header and question, 16 of each record.
        for (room, kept) in [(51, 2), (50, 1), (35, 1), (34, 0), (19, 0)] {
            let mut expected = message[..19 + 16 * kept].to_vec();
            expected[7] = kept as u8;
            if kept < 2 {
                expected[2] |= 0x02;
            }
            assert_eq!(cut_raw(&message, room), Some(expected), "{room}");
        }
        assert_eq!(cut_raw(&message, 18), None, "the question does not fit");
    }

    #[test]
    fn counts_end_at_their_maximum() {
        let mut message = [0; HEADER_LEN].to_vec();
        message[ADDITIONAL_COUNT_AT..].copy_from_slice(&[0xff, 0xfe]);
        for _ in 0..2 {
            push_opt(&mut message, b"opt");
            assert_eq!(message[ADDITIONAL_COUNT_AT..HEADER_LEN], [0xff, 0xff]);
        }
        assert_eq!(message[HEADER_LEN..], *b"optopt");
        let mut cut = message[..HEADER_LEN - 1].to_vec();
        push_opt(&mut cut, b"opt");
        assert_eq!(cut, message[..HEADER_LEN - 1], "no count");
    }
}
