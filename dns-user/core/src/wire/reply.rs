//! Replies made here, byte by byte.

use std::net::{Ipv4Addr, Ipv6Addr};

use hickory_proto::op::ResponseCode;

use super::{CLASS_IN, HEADER_LEN, Query, TYPE_A, TYPE_AAAA, TYPE_ANY, TYPE_OPT, flag};
use crate::resolve::{Existence, LocalAnswer};

/// Bytes of an OPT without options (RFC 6891, section 6.1.2).
pub const OPT_LEN: usize = 11;
/// Bytes of the fields between the owner name and the data of a record.
const FIXED_LEN: usize = 10;
/// A pointer to the question's name (RFC 1035, section 4.1.4).
const POINTER_TO_QUESTION: [u8; 2] = [0xc0, HEADER_LEN as u8];

/// Flags that depend on who answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyFlags {
    /// AA.
    pub authoritative: bool,
    /// RA.
    pub recursion_available: bool,
}

impl ReplyFlags {
    /// What we know ourselves: local names, up-checks, handlers.
    pub const LOCAL: Self = Self { authoritative: true, recursion_available: true };
    /// Refusals and errors (observed: neither flag is set).
    pub const ERROR: Self = Self { authoritative: false, recursion_available: false };
    /// What recursors would know.
    pub const RECURSION: Self = Self { authoritative: false, recursion_available: true };

    const fn bits(self) -> u16 {
        (if self.authoritative { flag::AA } else { 0 })
            | (if self.recursion_available { flag::RA } else { 0 })
    }
}

/// Source of the order of answers, with the room to shuffle in. One a worker;
/// it keeps its buffers.
#[derive(Debug, Default)]
pub struct Shuffle {
    /// Not for secrets: it spreads load.
    random: fastrand::Rng,
    /// Positions that are still to be drawn from.
    positions: Vec<u32>,
}

impl Shuffle {
    /// With a fixed seed, for tests and benches.
    pub fn with_seed(seed: u64) -> Self {
        Self { random: fastrand::Rng::with_seed(seed), positions: Vec::new() }
    }

    /// Draws `count` of the numbers below `total`, in random order: all orders
    /// are equally likely (Fisher and Yates). `count` is at most `total`.
    fn draw(&mut self, total: usize, count: usize, mut each: impl FnMut(usize)) {
        let Self { random, positions } = self;
        positions.clear();
        // More than 2^32 addresses cannot be: the address space of IPv4 ends there.
        positions.extend(0..total as u32);
        for drawn in 0..count {
            let rest = (total - drawn) as u32;
            let pick = if rest > 1 { drawn + random.u32(..rest) as usize } else { drawn };
            positions.swap(drawn, pick);
            each(positions[drawn] as usize);
        }
    }
}

/// Writes the reply to a query for a local name into `out`, which is emptied
/// first: at most `limit` bytes, as many answers as fit in random order, TC set
/// if some were left out. The bytes are those of hickory's encoder.
pub fn local_reply(
    query: &Query<'_>,
    answer: LocalAnswer<'_>,
    limit: usize,
    shuffle: &mut Shuffle,
    out: &mut Vec<u8>,
) {
    let LocalAnswer { existence, v4, v6 } = answer;
    let has_data_type = matches!(query.question.qtype, TYPE_A | TYPE_AAAA | TYPE_ANY);
    let rcode = match existence {
        Existence::Found => ResponseCode::NoError,
        Existence::NoSuchName => ResponseCode::NXDomain,
        Existence::Malformed if has_data_type => ResponseCode::FormErr,
        Existence::Malformed => ResponseCode::NoError,
    };
    write_addresses(query, rcode, (v4, v6), limit, shuffle, out);
}

/// As [`local_reply`], with NOERROR and addresses that come from elsewhere.
pub fn address_reply(
    query: &Query<'_>,
    v4: &[Ipv4Addr],
    v6: &[Ipv6Addr],
    limit: usize,
    shuffle: &mut Shuffle,
    out: &mut Vec<u8>,
) {
    write_addresses(query, ResponseCode::NoError, (v4, v6), limit, shuffle, out);
}

/// A reply with the question, the query's OPT answered, AA and RA clear.
pub fn error_reply(query: &Query<'_>, rcode: ResponseCode) -> Vec<u8> {
    bare_reply(query, rcode, ReplyFlags::ERROR)
}

/// A reply without records: the question, and an OPT where the query had one.
pub fn empty_reply(query: &Query<'_>, rcode: ResponseCode, flags: ReplyFlags) -> Vec<u8> {
    bare_reply(query, rcode, flags)
}

pub(super) fn bare_reply(query: &Query<'_>, rcode: ResponseCode, flags: ReplyFlags) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_LEN + query.question.wire_len() + OPT_LEN);
    write_start(query, flags.bits() | u16::from(rcode.low()), 0, &mut out);
    write_opt(query, rcode.high(), &mut out);
    out
}

/// A header alone, for messages whose question is not to be believed.
pub(super) fn questionless_reply(id: u16, query_flags: u16, rcode: ResponseCode) -> Vec<u8> {
    // CD means something in queries alone (RFC 4035, section 3.2.2).
    let copied = if query_flags & flag::OPCODE == 0 { flag::COPIED } else { flag::RD };
    let flags = flag::QR | query_flags & (copied | flag::OPCODE) | u16::from(rcode.low());
    let mut out = vec![0; HEADER_LEN];
    out[..2].copy_from_slice(&id.to_be_bytes());
    out[2..4].copy_from_slice(&flags.to_be_bytes());
    out
}

/// Header, question, answers, OPT.
fn write_addresses(
    query: &Query<'_>,
    rcode: ResponseCode,
    (v4, v6): (&[Ipv4Addr], &[Ipv6Addr]),
    limit: usize,
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
    let room = limit.saturating_sub(HEADER_LEN + query.question.wire_len() + opt_len);
    let owner = owner_of_answers(query);
    let (v4_len, v6_len) = (owner.len() + FIXED_LEN + 4, owner.len() + FIXED_LEN + 16);
    let total = v4.len() + v6.len();
    // With both families, how many fit depends on which come first: draw them
    // all and stop at the first that does not fit.
    let most = match (v4.is_empty(), v6.is_empty()) {
        (_, true) => total.min(room / v4_len),
        (true, false) => total.min(room / v6_len),
        (false, false) => total,
    };
    write_start(query, flag::AA | flag::RA | u16::from(rcode.low()), most, out);
    out.reserve(most.min(room / v4_len) * v6_len + OPT_LEN);
    let end = HEADER_LEN + query.question.wire_len() + room;
    let mut written = 0;
    let mut full = false;
    shuffle.draw(total, most, |position| {
        let length = if position < v4.len() { v4_len } else { v6_len };
        full |= out.len() + length > end;
        if full {
            return;
        }
        out.extend_from_slice(owner);
        match v4.get(position) {
            Some(address) => {
                out.extend_from_slice(&const { fixed_fields(TYPE_A, 4) });
                out.extend_from_slice(&address.octets());
            }
            None => {
                out.extend_from_slice(&const { fixed_fields(TYPE_AAAA, 16) });
                out.extend_from_slice(&v6[position - v4.len()].octets());
            }
        }
        written += 1;
    });
    if written < total {
        out[2] |= (flag::TC >> 8) as u8;
    }
    // At most 65,535 bytes of at least 15 bytes each.
    out[6..8].copy_from_slice(&(written as u16).to_be_bytes());
    write_opt(query, rcode.high(), out);
}

/// Header (with the flags that every reply takes over) and question.
fn write_start(query: &Query<'_>, flags: u16, answers: usize, out: &mut Vec<u8>) {
    let flags = flag::QR | query.flags & flag::COPIED | flags;
    let mut header = [0; HEADER_LEN];
    header[..2].copy_from_slice(&query.id.to_be_bytes());
    header[2..4].copy_from_slice(&flags.to_be_bytes());
    header[5] = 1;
    header[6..8].copy_from_slice(&(answers as u16).to_be_bytes());
    header[11] = u8::from(query.edns.is_some());
    out.extend_from_slice(&header);
    // The question stands right behind the header of the query, and is well-formed.
    out.extend_from_slice(&query.message[HEADER_LEN..HEADER_LEN + query.question.wire_len()]);
}

/// Appends the OPT of the reply if the query had one.
fn write_opt(query: &Query<'_>, extended_rcode: u8, out: &mut Vec<u8>) {
    if let Some(opt) = query.reply_opt(extended_rcode) {
        out.extend_from_slice(&opt);
    }
}

/// An OPT of version 0 without options (RFC 6891, section 6.1.2).
pub fn opt_record(udp_size: u16, extended_rcode: u8, dnssec_ok: bool) -> [u8; OPT_LEN] {
    let [type_high, type_low] = TYPE_OPT.to_be_bytes();
    let [size_high, size_low] = udp_size.to_be_bytes();
    let flags = if dnssec_ok { 0x80 } else { 0 };
    [0, type_high, type_low, size_high, size_low, extended_rcode, 0, flags, 0, 0, 0]
}

/// Appends the OPT of a reply to `query` and counts it, if the query has one. The reply
/// ends with its last record and has no OPT.
pub fn append_opt(query: &Query<'_>, reply: &mut Vec<u8>) {
    let (Some(opt), Some(count)) = (query.reply_opt(0), super::u16_at(reply, 10)) else { return };
    reply.extend_from_slice(&opt);
    reply[10..12].copy_from_slice(&count.saturating_add(1).to_be_bytes());
}

/// TYPE, CLASS, TTL 0 and RDLENGTH.
const fn fixed_fields(kind: u16, data_len: u8) -> [u8; FIXED_LEN] {
    let [type_high, type_low] = kind.to_be_bytes();
    let [class_high, class_low] = CLASS_IN.to_be_bytes();
    [type_high, type_low, class_high, class_low, 0, 0, 0, 0, 0, data_len]
}

/// The owner of the answers: the question's name, pointed to. The root is
/// shorter than a pointer.
fn owner_of_answers(query: &Query<'_>) -> &'static [u8] {
    if query.question.raw_name.len() == 1 { &[0] } else { &POINTER_TO_QUESTION }
}
