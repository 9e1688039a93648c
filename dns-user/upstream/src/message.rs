//! The messages of an exchange with another server: the query, built from a client's question; the validated reply;
//! the result for clients; and what they are read and edited with, without fully parsing them.
//!
//! Only the parts of a client's message that a recursor needs are forwarded: name, type and class,
//! RD, CD and DO, and Client Subnet if configured. An option or flag from one client therefore
//! cannot affect a reply that other clients share.
//!
//! Forwarded messages keep their bytes, including records of unknown types, compression and order.
//! One walk finds the relevant positions (end of the question, OPT, TTLs); fields are then
//! overwritten in place.

use std::{collections::HashMap, hash::BuildHasher, ops::Range, sync::Arc};

use smallvec::SmallVec;

use super::{
    TryError,
    rdata::{FixedFields, is_valid_rdata, name_end, valid_name_end},
};
use dns_core::wire::{
    ExtendedError, FLAG_CD, FLAG_RD, OPT_LEN, Query, ReplyFlags, UDP_PAYLOAD_SIZE, begin_reply,
    opt_record,
};
pub(crate) use dns_core::wire::{HEADER_LEN, QUESTION_NAME, TYPE_OPT, TYPE_SOA, u16_at};

pub(crate) const NOERROR: u8 = 0;
pub(crate) const FORMERR: u8 = 1;
pub(crate) const SERVFAIL: u8 = 2;
pub(crate) const NXDOMAIN: u8 = 3;
pub(crate) const NOTIMP: u8 = 4;
pub(crate) const REFUSED: u8 = 5;

/// QR in the third byte of the header.
const QR: u8 = 0x80;
/// AA in the third byte.
const AA: u8 = 0x04;
/// TC in the third byte.
const TC: u8 = 0x02;
/// RD in the third byte.
const RD: u8 = 0x01;
/// RA in the fourth byte.
const RA: u8 = 0x80;
/// AD in the fourth byte (RFC 4035).
const AD: u8 = 0x20;
/// CD in the fourth byte (RFC 4035).
const CD: u8 = 0x10;
/// RCODE in the fourth byte.
const RCODE: u8 = 0x0f;
/// AD in the second 16 bits of a header.
pub(crate) const FLAG_AD: u16 = 0x0020;

//----------- Queries ----------------------------------------------------------

/// Selects the parts of a client's query that are forwarded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Form {
    /// Forwards a query without EDNS without it, and AD as set by the client
    /// (`compat.transparent_forwarding`). Otherwise every query carries an OPT and AD, so that AD
    /// in the reply shows whether the recursor has validated it (RFC 6840, section 5.7).
    pub(crate) transparent: bool,
    /// Forwards Client Subnet (`recursor_client_subnet`).
    pub(crate) client_subnet: bool,
}

/// Everything that distinguishes recursor queries: flags, type, class, name in lower case, Client
/// Subnet.
pub(crate) type CacheKey = SmallVec<[u8; 128]>;

/// A message to a recursor. Nearly all fit, and then need no allocation.
pub(crate) type QueryMessage = SmallVec<[u8; 96]>;

/// Offset of the class in a [`CacheKey`].
pub(crate) const KEY_CLASS: usize = 3;

/// The fields of a [`CacheKey`] without Client Subnet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyFields<'a> {
    pub(crate) dnssec_ok: bool,
    pub(crate) checking_disabled: bool,
    pub(crate) qtype: u16,
    pub(crate) qclass: u16,
    /// The name in lower case.
    pub(crate) name: &'a [u8],
}

impl<'a> KeyFields<'a> {
    /// Splits a key; `None` if it is too short.
    pub(crate) fn of(key: &'a [u8]) -> Option<Self> {
        let ([flags, type_high, type_low, class_high, class_low], name) =
            key.split_first_chunk()?;
        Some(Self {
            dnssec_ok: flags & 1 != 0,
            checking_disabled: flags & 2 != 0,
            qtype: u16::from_be_bytes([*type_high, *type_low]),
            qclass: u16::from_be_bytes([*class_high, *class_low]),
            name,
        })
    }
}

impl Form {
    /// Returns the message to a recursor, with id 0.
    pub(crate) fn message(self, query: &Query<'_>) -> QueryMessage {
        let mut flags = query.flags & (FLAG_RD | FLAG_CD | FLAG_AD);
        if !self.transparent {
            flags |= FLAG_AD;
        }
        let has_opt = self.has_opt(query);
        let question = &query.message[query.question_range()];
        let subnet = self.subnet(query).unwrap_or_default();
        let mut message = QueryMessage::from_slice(&[0, 0]);
        message.extend_from_slice(&flags.to_be_bytes());
        message.extend_from_slice(&[0, 1, 0, 0, 0, 0, 0, u8::from(has_opt)]);
        message.extend_from_slice(question);
        if has_opt {
            // Our own size: the reply is read as a whole, and cut to the client's limit afterwards.
            let [fields @ .., _, _] = opt_record(UDP_PAYLOAD_SIZE, 0, query.dnssec_ok());
            message.extend_from_slice(&fields);
            // The option's length was parsed from 16 bits.
            message.extend_from_slice(&(subnet.len() as u16).to_be_bytes());
            message.extend_from_slice(subnet);
        }
        message
    }

    /// Returns the key of the recursor query. Recursors cannot distinguish queries with equal keys.
    pub(crate) fn key(self, query: &Query<'_>) -> CacheKey {
        // Without RD, a recursor answers only from what it has (RFC 1034, section 4.3.1).
        let mut flags = u8::from(query.dnssec_ok())
            | u8::from(query.checking_disabled()) << 1
            | u8::from(query.recursion_desired()) << 2;
        if self.transparent {
            flags |=
                u8::from(query.flags & FLAG_AD != 0) << 3 | u8::from(query.edns.is_some()) << 4;
        }
        let [type_high, type_low] = query.question.qtype.to_be_bytes();
        let [class_high, class_low] = query.question.qclass.to_be_bytes();
        let fields = [flags, type_high, type_low, class_high, class_low];
        let mut key = CacheKey::from_slice(&fields);
        key.extend_from_slice(query.question.raw_name);
        key[fields.len()..].make_ascii_lowercase();
        if let Some(subnet) = self.subnet(query) {
            key.extend_from_slice(subnet);
        }
        key
    }

    /// Returns the Client Subnet option to forward, if any.
    pub(crate) fn subnet<'a>(self, query: &Query<'a>) -> Option<&'a [u8]> {
        if self.client_subnet {
            query.client_subnet()
        } else {
            None
        }
    }

    pub(crate) fn has_opt(self, query: &Query<'_>) -> bool {
        !self.transparent || query.edns.is_some()
    }
}

//----------- Replies ----------------------------------------------------------

/// A recursor's reply that is a complete and well-formed message ([`MessageIndex`]).
#[derive(Debug)]
pub(crate) struct ValidatedReply {
    pub(crate) reply: Vec<u8>,
    pub(crate) index: MessageIndex,
}

impl ValidatedReply {
    /// Validates a reply. A malformed one is treated like a missing one, because clients would get
    /// it malformed.
    pub(crate) fn new(reply: Vec<u8>) -> Result<Self, TryError> {
        let index = MessageIndex::of(&reply).ok_or(TryError::Unreadable)?;
        Ok(Self { reply, index })
    }

    /// Validates a reply by UDP to a query with this question. A truncated one (TC) may be cut
    /// anywhere; its content is ignored (RFC 2181, section 9).
    pub(crate) fn of_datagram(reply: Vec<u8>, question: &[u8]) -> Result<Self, TryError> {
        if !Flags::of(&reply).truncated() {
            return Self::new(reply);
        }
        match MessageIndex::of(&reply) {
            // Without its question, a client could not tell which query a truncated reply belongs to.
            Some(index) if index.questions > 0 => Ok(Self { reply, index }),
            _ => Self::new(truncated_reply(&reply, question)),
        }
    }

    /// Returns the RCODE. Upper bits in the OPT make it an error of the exchange with the recursor
    /// (BADVERS 16, BADCOOKIE 23), for which a client gets SERVFAIL.
    pub(crate) fn rcode(&self) -> u8 {
        if self.has_extended_rcode() {
            return SERVFAIL;
        }
        Flags::of(&self.reply).rcode()
    }

    /// Returns whether the OPT contains upper bits of the RCODE (RFC 6891, section 6.1.3).
    pub(crate) fn has_extended_rcode(&self) -> bool {
        let Some(opt) = &self.index.opt else {
            return false;
        };
        // Behind the owner, which is the root, the type and the size.
        self.reply[opt.start + 5] != 0
    }

    pub(crate) fn is_truncated(&self) -> bool {
        Flags::of(&self.reply).truncated()
    }

    /// Returns the Extended DNS Errors in the OPT.
    pub(crate) fn errors(&self) -> Vec<ExtendedError> {
        let Some(opt) = &self.index.opt else {
            return Vec::new();
        };
        // The owner of the OPT is the root.
        ExtendedError::read_all(&self.reply[opt.start + OPT_LEN..opt.end])
    }

    /// Returns the reply with the client's id and letter case and without the recursor's OPT, which
    /// concerns only this hop (RFC 6891, section 6.1.1).
    pub(crate) fn finish(self, query: &Query<'_>, form: Form) -> Forwarded {
        // With transparent forwarding, the client gets the whole OPT.
        let errors = if form.transparent {
            Vec::new()
        } else {
            self.errors()
        };
        let Self {
            mut reply,
            mut index,
        } = self;
        // Trailing bytes belong to no record. They would stand before the OPT that is appended.
        reply.truncate(index.end);
        set_id(&mut reply, query.id);
        restore_case(&mut reply, &index, query);
        if !form.transparent {
            remove_opt(&mut reply, &mut index);
        }
        Forwarded {
            reply,
            index,
            failed: false,
            errors,
            keep: false,
            busy: false,
            recursor: None,
        }
    }
}

/// The result of a forwarded query.
#[derive(Debug)]
pub(crate) struct Forwarded {
    /// Reply with the client's id and letter case, not yet truncated. It contains an OPT only with
    /// transparent forwarding.
    pub(crate) reply: Vec<u8>,
    pub(crate) index: MessageIndex,
    /// Whether there is no usable answer: no recursor replied, or all replies were errors.
    pub(crate) failed: bool,
    /// Extended DNS Errors for clients: the recursor's or our own.
    pub(crate) errors: Vec<ExtendedError>,
    /// Whether the answer cache keeps the reply although it is a failure.
    pub(crate) keep: bool,
    /// Whether the query was refused because this server is overloaded, which is independent of the name.
    pub(crate) busy: bool,
    /// Name of the recursor that sent the reply; `None` for replies created here.
    pub(crate) recursor: Option<Arc<str>>,
}

impl Forwarded {
    /// Returns a reply without records, marked as a failure.
    pub(crate) fn bare(query: &Query<'_>, rcode: u8, flags: ReplyFlags) -> Self {
        Self {
            keep: false,
            ..Self::own(begin_reply(query, rcode, flags), true)
        }
    }

    /// Returns a reply created by this server. The answer cache keeps it even if it is a failure.
    pub(crate) fn own(reply: Vec<u8>, failed: bool) -> Self {
        // Made here, so it is well-formed; without an index it would only not be cached.
        let index = MessageIndex::of(&reply).unwrap_or_default();
        Self {
            reply,
            index,
            failed,
            errors: Vec::new(),
            keep: failed,
            busy: false,
            recursor: None,
        }
    }
}

//----------- Positions and fields ---------------------------------------------

/// Reads four bytes in network order; `None` past the end.
pub(crate) fn u32_at(message: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*message.get(at..)?.first_chunk()?))
}

/// Returns an id that no waiting query has.
pub(crate) fn free_id<Q, S: BuildHasher>(waiting: &HashMap<u16, Q, S>) -> u16 {
    // Not counted up: an observer of one query would know the next (RFC 5452, section 4.3).
    loop {
        let id = rand::random();
        if !waiting.contains_key(&id) {
            return id;
        }
    }
}

/// Returns the message's id; 0 without a header.
pub(crate) fn id(message: &[u8]) -> u16 {
    u16_at(message, 0).unwrap_or(0)
}

pub(crate) fn set_id(message: &mut [u8], id: u16) {
    if let Some(place) = message.first_chunk_mut() {
        *place = id.to_be_bytes();
    }
}

/// The flags of a message; all clear without a header.
#[derive(Clone, Copy)]
pub(crate) struct Flags([u8; 2]);

impl Flags {
    pub(crate) fn of(message: &[u8]) -> Self {
        match message {
            [_, _, high, low, ..] => Self([*high, *low]),
            _ => Self([0; 2]),
        }
    }

    pub(crate) fn is_reply(self) -> bool {
        self.0[0] & QR != 0
    }

    pub(crate) fn truncated(self) -> bool {
        self.0[0] & TC != 0
    }

    /// Returns the opcode; 0 for a query.
    pub(crate) fn opcode(self) -> u8 {
        self.0[0] >> 3 & 15
    }

    /// Returns the four bits of the RCODE in the header.
    pub(crate) fn rcode(self) -> u8 {
        self.0[1] & 15
    }
}

pub(crate) fn set_authoritative(message: &mut [u8], on: bool) {
    set_bit(message, 2, AA, on);
}

pub(crate) fn set_truncated(message: &mut [u8], on: bool) {
    set_bit(message, 2, TC, on);
}

#[cfg(test)]
pub(crate) fn set_authentic(message: &mut [u8], on: bool) {
    set_bit(message, 3, AD, on);
}

/// Sets or clears one bit of the header.
fn set_bit(message: &mut [u8], at: usize, bit: u8, on: bool) {
    if let Some(byte) = message.get_mut(at) {
        *byte = if on { *byte | bit } else { *byte & !bit };
    }
}

/// Result of one validating walk over a message: every name ends and does not loop, data has the
/// format of its type, and there is at most one OPT, in the additional section and owned by the
/// root (RFC 6891, section 6.1.1).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MessageIndex {
    /// Number of entries in the question section.
    pub(crate) questions: u16,
    /// Number of records in the answer, authority and additional section.
    pub(crate) records: [u16; 3],
    /// Offset of the first record.
    pub(crate) question_end: usize,
    /// Range of the whole OPT record.
    pub(crate) opt: Option<Range<usize>>,
    /// End of the last record. Trailing bytes belong to no record.
    pub(crate) end: usize,
}

impl MessageIndex {
    /// Validates `message`; `None` if a section runs past its end or a record is malformed.
    pub(crate) fn of(message: &[u8]) -> Option<Self> {
        let questions = u16_at(message, 4)?;
        let records = [
            u16_at(message, 6)?,
            u16_at(message, 8)?,
            u16_at(message, 10)?,
        ];
        let mut at = HEADER_LEN;
        let mut numbers = FixedFields::default();
        for _ in 0..questions {
            let name_end = name_end(message, at, &numbers)?;
            at = name_end + 4;
            numbers.add(name_end..at);
        }
        // Type and class of the last question were passed over unread.
        if at > message.len() {
            return None;
        }
        let question_end = at;
        let mut opt = None;
        for (section, count) in records.into_iter().enumerate() {
            for _ in 0..count {
                let record = IndexedRecord::at(message, at, name_end(message, at, &numbers)?)?;
                let class = u16_at(message, record.ttl_at - 2)?;
                numbers.add(record.fixed_fields());
                if !is_valid_rdata(message, record.rtype, class, record.data.clone(), &numbers) {
                    return None;
                }
                if record.rtype == TYPE_OPT {
                    // Clients reject another one (RFC 6891, section 6.1.1), or find none where they look for it.
                    if section != 2 || opt.is_some() || message[at] != 0 {
                        return None;
                    }
                    opt = Some(at..record.data.end);
                }
                at = record.data.end;
            }
        }
        Some(Self {
            questions,
            records,
            question_end,
            opt,
            end: at,
        })
    }

    /// Returns the range of the only question: name, type, class.
    pub(crate) fn question(&self) -> Option<Range<usize>> {
        (self.questions == 1).then_some(HEADER_LEN..self.question_end)
    }

    /// Iterates over the records in order, each with the number of its section: 0 answer, 1
    /// authority, 2 additional.
    pub(crate) fn walk<'a>(
        &self,
        message: &'a [u8],
    ) -> impl Iterator<Item = (usize, IndexedRecord)> + use<'a> {
        // `of` has validated every name and length, so this walk ends where that one did.
        let counts = self.records;
        let mut at = self.question_end;
        (0..3)
            .flat_map(move |section| std::iter::repeat_n(section, usize::from(counts[section])))
            .map_while(move |section| {
                let record = IndexedRecord::at(message, at, valid_name_end(message, at)?)?;
                at = record.data.end;
                Some((section, record))
            })
    }
}

/// Offsets of one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IndexedRecord {
    /// Start of the owner name.
    pub(crate) owner: usize,
    pub(crate) rtype: u16,
    pub(crate) ttl_at: usize,
    /// TTL in seconds; for an OPT, the extended RCODE, version and flags.
    pub(crate) ttl: u32,
    pub(crate) data: Range<usize>,
}

impl IndexedRecord {
    fn fixed_fields(&self) -> Range<usize> {
        self.ttl_at - 4..self.data.start
    }

    /// Parses the record at `at`, whose owner ends at `fixed`.
    fn at(message: &[u8], at: usize, fixed: usize) -> Option<Self> {
        let start = fixed + 10;
        let end = start + usize::from(u16_at(message, fixed + 8)?);
        if end > message.len() {
            return None;
        }
        Some(Self {
            owner: at,
            rtype: u16_at(message, fixed)?,
            ttl_at: fixed + 4,
            ttl: u32_at(message, fixed + 4)?,
            data: start..end,
        })
    }
}

/// Returns the question section of a message with one question: name, type, class.
pub(crate) fn question_range(message: &[u8]) -> Option<Range<usize>> {
    if u16_at(message, 4)? != 1 {
        return None;
    }
    let end = name_end(message, HEADER_LEN, &FixedFields::default())? + 4;
    (end <= message.len()).then_some(HEADER_LEN..end)
}

/// Returns whether two question sections are equal except for letter case. Length bytes are at most
/// 63 and thus never letters; the last four bytes, type and class, are compared exactly.
pub(crate) fn same_question(ours: &[u8], theirs: &[u8]) -> bool {
    if ours.len() != theirs.len() {
        return false;
    }
    let Some(split) = ours.len().checked_sub(4) else {
        return false;
    };
    ours[split..] == theirs[split..] && ours[..split].eq_ignore_ascii_case(&theirs[..split])
}

/// Appends an OPT of the given size, DO clear, no options.
#[cfg(test)]
pub(crate) fn append_opt(message: &mut Vec<u8>, udp_size: u16) {
    let Some(count) = u16_at(message, 10) else {
        return;
    };
    message.extend_from_slice(&opt_record(udp_size, 0, false));
    message[10..12].copy_from_slice(&count.saturating_add(1).to_be_bytes());
}

/// Removes the OPT and the records after it: moving those could break pointers, and additional
/// records are optional.
pub(crate) fn remove_opt(message: &mut Vec<u8>, index: &mut MessageIndex) {
    let Some(opt) = index.opt.take() else { return };
    let mut before = 0;
    for (section, record) in index.walk(message) {
        before += u16::from(section == 2 && record.owner < opt.start);
    }
    index.records[2] = before;
    message.truncate(opt.start);
    index.end = opt.start;
    message[10..12].copy_from_slice(&index.records[2].to_be_bytes());
}

/// Sets the flags that this server determines: the query's RD and CD, RA, and AD only for a client
/// that understands it (RFC 6840, section 5.8).
pub(crate) fn set_own_flags(reply: &mut [u8], query: &Query<'_>) {
    let [_, _, high, low, ..] = reply else {
        return;
    };
    let [asked_high, asked_low] = query.flags.to_be_bytes();
    *high = *high & !RD | asked_high & RD;
    let kept = if query.wants_authentic_data() {
        AD | RCODE
    } else {
        RCODE
    };
    *low = *low & kept | asked_low & CD | RA;
}

/// Clears AD for a client that does not understand it (RFC 6840, section 5.8).
pub(crate) fn hide_authentic(reply: &mut [u8], query: &Query<'_>) {
    if !query.wants_authentic_data() {
        set_bit(reply, 3, AD, false);
    }
}

/// Restores the client's letter case in the question of a reply with this index.
pub(crate) fn restore_case(reply: &mut [u8], index: &MessageIndex, query: &Query<'_>) {
    let Some(theirs) = index.question() else {
        return;
    };
    let ours = &query.message[query.question_range()];
    // With `accept_other_questions`, the reply may repeat another one, which stays.
    if same_question(ours, &reply[theirs.clone()]) {
        reply[theirs].copy_from_slice(ours);
    }
}

/// Appends a record to the answer section of a message without further sections; `false` if the
/// message would become too long, without changing it.
pub(crate) fn push_answer(
    message: &mut Vec<u8>,
    owner: &[u8],
    rtype: u16,
    ttl: u32,
    data: &[u8],
) -> bool {
    push_record(message, 6, owner, rtype, ttl, data)
}

/// Appends the SOA of a zone to the authority section of a message without additional records.
pub(crate) fn push_soa(message: &mut Vec<u8>, zone: &[u8], ttl: u32, data: &[u8]) {
    push_record(message, 8, zone, TYPE_SOA, ttl, data);
}

/// Appends a record of class IN to the last section, whose count is at `count_at`.
fn push_record(
    message: &mut Vec<u8>,
    count_at: usize,
    owner: &[u8],
    rtype: u16,
    ttl: u32,
    data: &[u8],
) -> bool {
    let Some(count) = u16_at(message, count_at) else {
        return false;
    };
    let Ok(length) = u16::try_from(data.len()) else {
        return false;
    };
    // A message over TCP has its length in 16 bits (RFC 1035, section 4.2.2).
    let is_too_long = message.len() + owner.len() + 10 + data.len() > usize::from(u16::MAX);
    if count == u16::MAX || is_too_long {
        return false;
    }
    message.extend_from_slice(owner);
    message.extend_from_slice(&rtype.to_be_bytes());
    message.extend_from_slice(&[0, 1]);
    message.extend_from_slice(&ttl.to_be_bytes());
    message.extend_from_slice(&length.to_be_bytes());
    message.extend_from_slice(data);
    message[count_at..count_at + 2].copy_from_slice(&(count + 1).to_be_bytes());
    true
}

/// Returns an empty truncated reply (TC) to `question`, with the flags of a reply that was cut short.
pub(crate) fn truncated_reply(cut: &[u8], question: &[u8]) -> Vec<u8> {
    let flags = Flags::of(cut).0;
    let mut reply = vec![0, 0, flags[0] | QR | TC, flags[1] & !RCODE, 0, 1];
    reply.resize(HEADER_LEN, 0);
    reply.extend_from_slice(question);
    reply
}

/// Returns the fixed fields of a message that has only a question.
pub(crate) fn question_numbers(message: &[u8]) -> FixedFields {
    let mut numbers = FixedFields::default();
    numbers.add(message.len().saturating_sub(4)..message.len());
    numbers
}

/// Removes the last answer, which starts at `start`, unless its type occurs in zones and its data
/// has the format of that type. Returns whether it was kept. `numbers` contains the fixed fields
/// before it, and afterwards also its own.
pub(crate) fn keep_sound_answer(
    message: &mut Vec<u8>,
    start: usize,
    numbers: &mut FixedFields,
) -> bool {
    let record = name_end(message, start, numbers)
        .and_then(|fixed| IndexedRecord::at(message, start, fixed));
    let mut is_sound = false;
    if let Some(record) = record {
        // 249 to 255: TKEY, TSIG, IXFR, AXFR, MAILB, MAILA, ANY.
        let is_meta = matches!(record.rtype, 0 | TYPE_OPT | 249..=255);
        numbers.add(record.fixed_fields());
        is_sound = !is_meta && is_valid_rdata(message, record.rtype, 1, record.data, numbers);
        if !is_sound {
            numbers.take_back();
        }
    }
    if !is_sound && let Some(count) = u16_at(message, 6) {
        message.truncate(start);
        message[6..8].copy_from_slice(&count.saturating_sub(1).to_be_bytes());
    }
    is_sound
}

#[cfg(test)]
mod tests {
    use super::*;
    use dns_core::wire::{Parsed, parse};
    use proptest::prelude::*;

    /// Returns a reply with one A record and an OPT.
    fn reply() -> Vec<u8> {
        let mut message =
            b"\x12\x34\x81\x80\0\x01\0\0\0\0\0\0\x02Ok\x07example\0\0\x01\0\x01".to_vec();
        assert!(push_answer(
            &mut message,
            &QUESTION_NAME,
            1,
            300,
            &[192, 0, 2, 1]
        ));
        append_opt(&mut message, 1232);
        message
    }

    #[test]
    fn outline_finds_the_sections() {
        let message = reply();
        let mut index = MessageIndex::of(&message).unwrap();
        assert_eq!(index.records, [1, 0, 1]);
        assert_eq!(index.opt, Some(44..55));
        assert_eq!(index.end, message.len());
        let walked: Vec<_> = index
            .walk(&message)
            .map(|(section, record)| (section, record.rtype, record.ttl))
            .collect();
        assert_eq!(walked, [(0, 1, 300), (2, TYPE_OPT, 0)]);

        let mut without = message.clone();
        remove_opt(&mut without, &mut index);
        assert_eq!(MessageIndex::of(&without), Some(index));
        assert_eq!(without.len(), 44);
    }

    #[test]
    fn records_before_opt_stay() {
        let additional = |message: &mut Vec<u8>| {
            assert!(push_answer(
                message,
                &QUESTION_NAME,
                1,
                300,
                &[192, 0, 2, 7]
            ));
            // An additional record instead of an answer.
            message[7] -= 1;
            message[11] += 1;
        };
        let mut message = reply();
        message.truncate(44);
        message[11] = 0;
        additional(&mut message);
        let kept = message.clone();
        append_opt(&mut message, 1232);
        additional(&mut message);
        let mut index = MessageIndex::of(&message).unwrap();
        assert_eq!(index.records, [1, 0, 3]);
        remove_opt(&mut message, &mut index);
        assert_eq!(message, kept);
        assert_eq!(MessageIndex::of(&message), Some(index));
    }

    #[test]
    fn every_cut_is_noticed() {
        let message = reply();
        for length in 0..message.len() {
            assert_eq!(
                MessageIndex::of(&message[..length]),
                None,
                "cut to {length} bytes"
            );
        }
    }

    #[test]
    fn questions_compare_case_insensitively() {
        assert!(same_question(
            b"\x02Ok\0\0\x01\0\x01",
            b"\x02oK\0\0\x01\0\x01"
        ));
        assert!(!same_question(
            b"\x02ok\0\0\x41\0\x01",
            b"\x02ok\0\0\x61\0\x01"
        ));
        assert!(!same_question(
            b"\x02ok\0\0\x01\0\x01",
            b"\x03oks\0\0\x01\0\x01"
        ));
    }

    /// Builds a query for `oK. A` with these flags and OPT.
    fn message(flags: [u8; 2], opt: &[u8]) -> Vec<u8> {
        let count = u8::from(!opt.is_empty());
        let header = [0x12, 0x34, flags[0], flags[1], 0, 1, 0, 0, 0, 0, 0, count];
        [&header[..], b"\x02oK\0\0\x01\0\x01", opt].concat()
    }

    /// Parses the query in `message`.
    fn query(message: &[u8]) -> Query<'_> {
        let Parsed::Query(query) = parse(message) else {
            panic!("a query of our own making")
        };
        query
    }

    /// An OPT of 4096 bytes with DO, a cookie that is too short, and Client Subnet.
    const OPT: &[u8] =
        b"\0\0\x29\x10\0\0\0\x80\0\0\x10\0\x0a\0\x01x\0\x08\0\x07\0\x01\x18\0\xc0\0\x02";

    #[test]
    fn client_options_stay_behind() {
        let asked = message([0x01, 0x10], OPT);
        let sent = Form::default().message(&query(&asked));
        assert_eq!(
            sent[..12],
            *b"\0\0\x01\x30\0\x01\0\0\0\0\0\x01",
            "AD is ours, CD is the client's"
        );
        assert_eq!(
            sent[12..],
            *b"\x02oK\0\0\x01\0\x01\0\0\x29\x04\xd0\0\0\x80\0\0\0"
        );
        let with_subnet = Form {
            client_subnet: true,
            ..Form::default()
        };
        let sent = with_subnet.message(&query(&asked));
        assert_eq!(sent[29..], *b"\0\x0b\0\x08\0\x07\0\x01\x18\0\xc0\0\x02");
    }

    #[test]
    fn key_splits_into_fields() {
        let asked = message([0x01, 0x10], OPT);
        let key = Form::default().key(&query(&asked));
        let fields = KeyFields::of(&key);
        let expected = KeyFields {
            dnssec_ok: true,
            checking_disabled: true,
            qtype: 1,
            qclass: 1,
            name: b"\x02ok\0",
        };
        assert_eq!((fields, KeyFields::of(&key[..4])), (Some(expected), None));
    }

    #[test]
    fn keys_differ_as_messages_do() {
        let opt = |dnssec_ok: bool| opt_record(512, 0, dnssec_ok).to_vec();
        let messages: Vec<Vec<u8>> = [[0, 0], [1, 0], [1, 0x10], [1, 0x20]]
            .into_iter()
            .flat_map(|flags| {
                [&[][..], &opt(false), &opt(true), OPT].map(|opt| message(flags, opt))
            })
            .collect();
        for form in [
            Form::default(),
            Form {
                transparent: true,
                client_subnet: false,
            },
            Form {
                transparent: false,
                client_subnet: true,
            },
        ] {
            for one in &messages {
                for other in &messages {
                    let one = query(one);
                    let other = query(other);
                    assert_eq!(
                        form.key(&one) == form.key(&other),
                        form.message(&one) == form.message(&other),
                        "{form:?}: {one:?} and {other:?}"
                    );
                }
            }
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Some(index) = MessageIndex::of(&bytes) {
                prop_assert!(index.end <= bytes.len());
                prop_assert!(index.walk(&bytes).all(|(_, record)| record.data.end <= index.end));
            }
            let _ = question_range(&bytes);
        }
    }

    #[test]
    fn bits_are_set_and_cleared_alone() {
        let mut message = [0x12, 0x34, 0x81, 0x80];
        for on in [true, true, false, false] {
            set_authentic(&mut message, on);
            let flags = if on { 0x80 | AD } else { 0x80 };
            assert_eq!(message, [0x12, 0x34, 0x81, flags]);
        }
    }

    #[test]
    fn only_one_opt_of_the_root_is_read() {
        const OPT: &[u8] = &[0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0];
        let named = [&[1, b'a'], OPT].concat();
        let message = |counts: [u8; 3], records: &[&[u8]]| {
            let mut message = vec![
                0, 1, 0x80, 0, 0, 0, 0, counts[0], 0, counts[1], 0, counts[2],
            ];
            message.extend(records.concat());
            MessageIndex::of(&message).map(|index| index.opt.is_some())
        };
        assert_eq!(message([0, 0, 0], &[]), Some(false));
        assert_eq!(message([0, 0, 1], &[OPT]), Some(true));
        assert_eq!(message([0, 0, 2], &[OPT, OPT]), None);
        assert_eq!(message([0, 1, 0], &[OPT]), None);
        assert_eq!(message([1, 0, 0], &[OPT]), None);
        assert_eq!(message([0, 0, 1], &[&named]), None);
    }

    /// Returns a message with this header: flags and the counts of the sections.
    fn header(flags: [u8; 2], counts: [u8; 4]) -> Vec<u8> {
        let [questions, answers, authorities, additionals] = counts;
        let [high, low] = flags;
        vec![
            0x12,
            0x34,
            high,
            low,
            0,
            questions,
            0,
            answers,
            0,
            authorities,
            0,
            additionals,
        ]
    }

    #[test]
    fn flags_are_read_from_their_bits() {
        for (flags, is_reply, opcode, truncated, rcode) in [
            ([0x00, 0x00], false, 0, false, 0),
            ([0x80, 0x00], true, 0, false, 0),
            ([0x7f, 0xff], false, 15, true, 15),
            ([0x08, 0x01], false, 1, false, 1),
            ([0x40, 0xf0], false, 8, false, 0),
            ([0x02, 0x08], false, 0, true, 8),
            ([0x85, 0x85], true, 0, false, 5),
        ] {
            let found = Flags::of(&[0xff, 0xff, flags[0], flags[1]]);
            assert_eq!(
                (
                    found.is_reply(),
                    found.opcode(),
                    found.truncated(),
                    found.rcode()
                ),
                (is_reply, opcode, truncated, rcode),
                "{flags:02x?}"
            );
        }
        let none = Flags::of(&[0xff, 0xff, 0xff]);
        assert!(!none.is_reply() && !none.truncated());
        assert_eq!((none.opcode(), none.rcode()), (0, 0));
    }

    #[test]
    fn absent_header_fields_are_ignored() {
        let mut message = [1, 2, 0xfb, 0xff];
        set_truncated(&mut message, true);
        set_authoritative(&mut message, false);
        set_id(&mut message, 0x0304);
        assert_eq!(message, [3, 4, 0xfb, 0xff]);
        set_authoritative(&mut message, true);
        set_truncated(&mut message, false);
        assert_eq!(message, [3, 4, 0xfd, 0xff]);
        assert_eq!((id(&message), id(&message[..1])), (0x0304, 0));
        let mut short = [9];
        set_id(&mut short, 0x0304);
        set_truncated(&mut short, true);
        assert_eq!(short, [9]);
        assert_eq!(u32_at(&message, 0), Some(0x0304_fdff));
        assert_eq!((u32_at(&message, 1), u32_at(&message, 5)), (None, None));
    }

    #[test]
    fn key_bits_are_flags() {
        for (flags, dnssec_ok, checking_disabled) in [
            (0, false, false),
            (1, true, false),
            (2, false, true),
            (3, true, true),
            (0xfc, false, false),
        ] {
            let expected = KeyFields {
                dnssec_ok,
                checking_disabled,
                qtype: 0x0102,
                qclass: 0x0304,
                name: b"",
            };
            assert_eq!(KeyFields::of(&[flags, 1, 2, 3, 4]), Some(expected));
        }
    }

    #[test]
    fn keys_reflect_every_difference() {
        let with_do = opt_record(512, 0, true);
        let without_do = opt_record(512, 0, false);
        let subnet = b"\0\x08\0\x07\0\x01\x18\0\xc0\0\x02";
        let transparent = Form {
            transparent: true,
            client_subnet: false,
        };
        let personal = Form {
            transparent: false,
            client_subnet: true,
        };
        for (flags, opt, ours, theirs, tail) in [
            ([0, 0], &[][..], 0, 0, &[][..]),
            ([1, 0], &[], 4, 4, &[]),
            ([0, 0x10], &[], 2, 2, &[]),
            ([0, 0x20], &[], 0, 8, &[]),
            ([0, 0], &without_do, 0, 16, &[]),
            ([0, 0], &with_do, 1, 17, &[]),
            ([1, 0x30], OPT, 7, 31, subnet),
        ] {
            let asked = message(flags, opt);
            let asked = query(&asked);
            let fields = |flags: u8| [&[flags, 0, 1, 0, 1][..], b"\x02ok\0"].concat();
            assert_eq!(Form::default().key(&asked)[..], fields(ours), "{flags:?}");
            assert_eq!(transparent.key(&asked)[..], fields(theirs), "{flags:?}");
            let with_subnet = [&fields(ours)[..], tail].concat();
            assert_eq!(personal.key(&asked)[..], with_subnet, "{flags:?}");
            let expected = if tail.is_empty() { None } else { Some(tail) };
            assert_eq!(personal.subnet(&asked), expected);
            assert_eq!(transparent.subnet(&asked), None);
        }
    }

    #[test]
    fn form_decides_message_flags() {
        let transparent = Form {
            transparent: true,
            client_subnet: false,
        };
        let opt = opt_record(4096, 0, true);
        let question = b"\x02oK\0\0\x01\0\x01";
        for (flags, opt, ours, theirs) in [
            // Of AA, TC, RA, Z and RCODE nothing is forwarded.
            ([0x07, 0xcf], &[][..], [0x01, 0x20], Some([0x01, 0x00])),
            ([0x01, 0x20], &[], [0x01, 0x20], Some([0x01, 0x20])),
            ([0x00, 0x10], &[], [0x00, 0x30], Some([0x00, 0x10])),
            ([0x00, 0x00], &opt, [0x00, 0x20], None),
        ] {
            let asked = message(flags, opt);
            let asked = query(&asked);
            let sent = Form::default().message(&asked);
            let dnssec_ok = if opt.is_empty() { 0 } else { 0x80 };
            let ours = [
                &[0, 0, ours[0], ours[1], 0, 1, 0, 0, 0, 0, 0, 1][..],
                question,
                &[0, 0, 41, 4, 208, 0, 0, dnssec_ok, 0, 0, 0],
            ]
            .concat();
            assert_eq!(sent[..], ours, "{flags:02x?}");
            assert!(Form::default().has_opt(&asked));
            assert_eq!(transparent.has_opt(&asked), !opt.is_empty());
            if let Some([high, low]) = theirs {
                let theirs = [&[0, 0, high, low, 0, 1, 0, 0, 0, 0, 0, 0][..], question].concat();
                assert_eq!(transparent.message(&asked)[..], theirs, "{flags:02x?}");
            }
        }
    }

    #[test]
    fn cut_datagrams_become_truncated_replies() {
        let question = b"\x02oK\0\0\x01\0\x01";
        let whole = |flags| [&header(flags, [1, 0, 0, 0])[..], question].concat();
        let cut = |reply: &[u8]| {
            let outcome = ValidatedReply::of_datagram(reply.to_vec(), question);
            outcome.map(|validated| validated.reply)
        };
        let bare = [&[0, 0, 0x83, 0x80, 0, 1, 0, 0, 0, 0, 0, 0][..], question].concat();
        // Whole, with its own RCODE and id.
        let readable = whole([0x83, 0x83]);
        assert_eq!(cut(&readable).as_ref(), Ok(&readable));
        // Cut: the RCODE counts for nothing.
        assert_eq!(cut(&readable[..15]).as_ref(), Ok(&bare));
        // Without its question, a client could not tell what it answers.
        let questionless = header([0x03, 0x83], [0, 0, 0, 0]);
        assert_eq!(cut(&questionless).as_ref(), Ok(&bare));
        // Not truncated: malformed.
        assert_eq!(cut(&whole([0x81, 0x80])[..15]), Err(TryError::Unreadable));
        let readable = whole([0x81, 0x80]);
        assert_eq!(cut(&readable).as_ref(), Ok(&readable));
        let reply = ValidatedReply::new(whole([0x83, 0x83])).unwrap();
        assert!(reply.is_truncated());
        assert_eq!(reply.rcode(), NXDOMAIN);
        assert!(!ValidatedReply::new(readable).unwrap().is_truncated());
    }

    #[test]
    fn extended_rcodes_fail_the_exchange() {
        for (opt, rcode, is_extended, expected) in [
            (None, 3, false, 3),
            (Some([0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0]), 3, false, 3),
            // BADVERS: 16 in all.
            (
                Some([0, 0, 41, 4, 208, 1, 0, 0, 0, 0, 0]),
                0,
                true,
                SERVFAIL,
            ),
            // Version and flags are no RCODE.
            (Some([0, 0, 41, 4, 208, 0, 1, 0x80, 0, 0, 0]), 5, false, 5),
        ] {
            let mut message = header([0x81, 0x80 | rcode], [0, 0, 0, u8::from(opt.is_some())]);
            message.extend(opt.into_iter().flatten());
            let reply = ValidatedReply::new(message).unwrap();
            assert_eq!(reply.has_extended_rcode(), is_extended, "{opt:?}");
            assert_eq!(reply.rcode(), expected, "{opt:?}");
            assert_eq!(reply.errors(), []);
        }
    }

    /// A reply of another recursor to `oK. A`: an address, an OPT with an error and junk.
    fn recursors_reply() -> Vec<u8> {
        let mut reply = header([0x85, 0xa3], [1, 0, 0, 0]);
        set_id(&mut reply, 9);
        reply.extend_from_slice(b"\x02OK\0\0\x01\0\x01");
        assert!(push_answer(
            &mut reply,
            &QUESTION_NAME,
            1,
            9,
            &[192, 0, 2, 1]
        ));
        reply[11] = 1;
        reply.extend_from_slice(b"\0\0\x29\x04\xd0\0\0\0\0\0\x08\0\x0f\0\x04\0\x06ab");
        reply.extend_from_slice(b"junk");
        reply
    }

    #[test]
    fn finished_reply_is_the_clients() {
        let asked = message([0x01, 0], OPT);
        let query = query(&asked);
        let validated = ValidatedReply::new(recursors_reply()).unwrap();
        let error = ExtendedError {
            code: 6,
            text: b"ab".as_slice().into(),
        };
        assert_eq!(validated.errors(), std::slice::from_ref(&error));
        let forwarded = validated.finish(&query, Form::default());
        let mut expected = recursors_reply();
        expected.truncate(36);
        set_id(&mut expected, 0x1234);
        expected[12..16].copy_from_slice(b"\x02oK\0");
        expected[11] = 0;
        assert_eq!(forwarded.reply, expected);
        assert_eq!(MessageIndex::of(&expected), Some(forwarded.index));
        assert_eq!(forwarded.errors, [error]);
        let Forwarded {
            failed,
            keep,
            busy,
            recursor,
            ..
        } = forwarded;
        assert_eq!((failed, keep, busy, recursor), (false, false, false, None));

        let transparent = Form {
            transparent: true,
            client_subnet: false,
        };
        let validated = ValidatedReply::new(recursors_reply()).unwrap();
        let forwarded = validated.finish(&query, transparent);
        let mut expected = recursors_reply();
        expected.truncate(55);
        set_id(&mut expected, 0x1234);
        expected[12..16].copy_from_slice(b"\x02oK\0");
        assert_eq!(forwarded.reply, expected, "with the whole OPT");
        assert_eq!(forwarded.errors, []);
    }

    #[test]
    fn bare_replies_are_not_kept() {
        let asked = message([0x01, 0], &[]);
        let query = query(&asked);
        for (forwarded, failed, keep) in [
            (
                Forwarded::bare(&query, SERVFAIL, ReplyFlags::RECURSION),
                true,
                false,
            ),
            (Forwarded::own(asked.clone(), true), true, true),
            (Forwarded::own(asked.clone(), false), false, false),
        ] {
            assert_eq!((forwarded.failed, forwarded.keep), (failed, keep));
            assert!(!forwarded.busy && forwarded.errors.is_empty());
            assert_eq!(forwarded.recursor, None);
            assert_eq!(forwarded.index.end, 20);
            assert_eq!(id(&forwarded.reply), 0x1234);
        }
        assert_eq!(
            Forwarded::own(Vec::new(), false).index,
            MessageIndex::default()
        );
    }

    #[test]
    fn only_single_questions_have_ranges() {
        let question = b"\x02ok\0\0\x01\0\x01";
        for (questions, bytes, expected) in [
            (1, &question[..], Some(12..20)),
            (1, b"\x02ok\0\0\x01\0\x01more", Some(12..20)),
            (1, &question[..7], None),
            (1, b"", None),
            (0, b"", None),
            (2, b"\x02ok\0\0\x01\0\x01\x02ok\0\0\x01\0\x01", None),
        ] {
            let message = [&header([0x81, 0x80], [questions, 0, 0, 0])[..], bytes].concat();
            assert_eq!(question_range(&message), expected, "{questions} {bytes:?}");
            let index = MessageIndex::of(&message);
            assert_eq!(
                index.and_then(|index| index.question()),
                expected,
                "{questions} {bytes:?}"
            );
        }
        assert_eq!(question_range(&[0; 5]), None);
        // Both questions are passed over.
        let two = b"\x02ok\0\0\x01\0\x01\x02ok\0\0\x01\0\x01";
        let two = [&header([0x81, 0x80], [2, 0, 0, 0])[..], two].concat();
        let index = MessageIndex::of(&two).unwrap();
        assert_eq!(
            (index.questions, index.question_end, index.end),
            (2, 28, 28)
        );
        assert!(!same_question(b"\0\x01\x01", b"\0\x01\x01"), "no question");
        assert!(same_question(b"\0\x01\0\x01", b"\0\x01\0\x01"));
    }

    #[test]
    fn pointers_never_lead_into_numbers() {
        // An owner that points to type and class of the question, or to those of a record.
        let question = b"\x01a\0\0\x01\0\x01";
        let record = b"\xc0\x0c\0\x01\0\x01\0\0\0\0\0\x04\xc0\0\x02\x01";
        for (pointer, is_sound) in [
            (12, true),
            (14, true),
            (15, false),
            (17, false),
            // The owner of the first record, and its TTL.
            (19, true),
            (25, false),
        ] {
            let message = [
                &header([0x81, 0x80], [1, 2, 0, 0])[..],
                question,
                record,
                &[0xc0, pointer],
                &record[2..],
            ]
            .concat();
            let index = MessageIndex::of(&message);
            assert_eq!(index.is_some(), is_sound, "{pointer}");
        }
    }

    #[test]
    fn flags_join_client_and_server() {
        let with_do = opt_record(512, 0, true);
        for (asked, opt, expected) in [
            ([0x00, 0x00], &[][..], [0xfe, 0x8f]),
            ([0x01, 0x00], &[], [0xff, 0x8f]),
            ([0x00, 0x10], &[], [0xfe, 0x9f]),
            ([0x00, 0x20], &[], [0xfe, 0xaf]),
            ([0x01, 0x30], &[], [0xff, 0xbf]),
            // DO means that the client understands AD (RFC 6840, section 5.8).
            ([0x00, 0x00], &with_do, [0xfe, 0xaf]),
        ] {
            let asked = message(asked, opt);
            let mut reply = header([0xff, 0xff], [0; 4]);
            set_own_flags(&mut reply, &query(&asked));
            assert_eq!(reply[2..4], expected, "{asked:02x?}");
            assert_eq!(reply[..2], [0x12, 0x34]);
            // A property that the recursor does not state is not made up.
            let mut reply = header([0, 0], [0; 4]);
            set_own_flags(&mut reply, &query(&asked));
            assert_eq!(reply[2..4], [asked[2] & 1, asked[3] & 0x10 | 0x80]);
            let mut reply = header([0xff, 0xff], [0; 4]);
            hide_authentic(&mut reply, &query(&asked));
            assert_eq!(reply[2..4], [0xff, 0xdf | expected[1] & 0x20]);
        }
        let mut short = [1, 2, 3];
        set_own_flags(&mut short, &query(&message([1, 0], &[])));
        assert_eq!(short, [1, 2, 3]);
    }

    #[test]
    fn unasked_names_keep_case() {
        let asked = message([1, 0], &[]);
        for (question, expected) in [
            (b"\x02Ok\0\0\x01\0\x01", b"\x02oK\0\0\x01\0\x01"),
            (b"\x02Ox\0\0\x01\0\x01", b"\x02Ox\0\0\x01\0\x01"),
            (b"\x02Ok\0\0\x02\0\x01", b"\x02Ok\0\0\x02\0\x01"),
        ] {
            let mut reply = [&header([0x81, 0x80], [1, 0, 0, 0])[..], question].concat();
            let index = MessageIndex::of(&reply).unwrap();
            restore_case(&mut reply, &index, &query(&asked));
            assert_eq!(reply[12..], expected[..]);
        }
    }

    #[test]
    fn records_fit_into_sixteen_bits() {
        let empty = header([0x81, 0x80], [0; 4]);
        let room = 65_535 - 12 - 10 - 2;
        for (data, is_pushed) in [
            (0, true),
            (room - 1, true),
            (room, true),
            (room + 1, false),
            (65_535, false),
            (65_536, false),
        ] {
            let mut message = empty.clone();
            let data = vec![7; data];
            let owner = &QUESTION_NAME;
            assert_eq!(push_answer(&mut message, owner, 16, 9, &data), is_pushed);
            let length = if is_pushed { 24 + data.len() } else { 12 };
            assert_eq!(message.len(), length);
            assert_eq!(message[7], u8::from(is_pushed));
        }
        let mut full = empty.clone();
        full[6..8].copy_from_slice(&[0xff, 0xff]);
        assert!(!push_answer(&mut full, b"\0", 16, 9, b""));
        full[6..8].copy_from_slice(&[0xff, 0xfe]);
        assert!(push_answer(&mut full, b"\0", 16, 9, b""));
        assert_eq!(full[6..8], [0xff, 0xff]);
        assert!(!push_answer(&mut vec![0; 7], b"\0", 16, 9, b""));
        let mut message = empty.clone();
        assert!(push_answer(
            &mut message,
            b"\x01a\0",
            0x0102,
            0x0304_0506,
            b"xy"
        ));
        let record = b"\x01a\0\x01\x02\0\x01\x03\x04\x05\x06\0\x02xy";
        assert_eq!(message[12..], record[..]);
        let mut message = empty;
        push_soa(&mut message, b"\x01a\0", 0x0304_0506, b"xy");
        let record = b"\x01a\0\0\x06\0\x01\x03\x04\x05\x06\0\x02xy";
        assert_eq!(message[12..], record[..]);
        assert_eq!(message[6..10], [0, 0, 0, 1]);
    }

    #[test]
    fn only_sound_zone_types_stay() {
        for (rtype, data, is_kept) in [
            (0, &b""[..], false),
            (1, &[192, 0, 2, 1], true),
            (1, &[192, 0, 2], false),
            (41, b"", false),
            (248, b"", true),
            (249, b"", false),
            (255, b"", false),
            (256, b"", true),
        ] {
            let mut message = [
                &header([0x81, 0x80], [1, 0, 0, 0])[..],
                b"\x01a\0\0\x01\0\x01",
            ]
            .concat();
            let mut numbers = question_numbers(&message);
            let start = message.len();
            assert!(push_answer(&mut message, &QUESTION_NAME, rtype, 9, data));
            let added = message.clone();
            let found = keep_sound_answer(&mut message, start, &mut numbers);
            assert_eq!(found, is_kept, "{rtype} {data:?}");
            if is_kept {
                assert_eq!(message, added);
            } else {
                assert_eq!((message.len(), message[7]), (start, 0));
            }
            // Pointers to the name, and into the numbers of the question and of a record.
            for (pointer, is_sound) in [(15, false), (21, false), (12, true)] {
                let mut message = message.clone();
                let start = message.len();
                let data = [0xc0, pointer];
                assert!(push_answer(&mut message, &QUESTION_NAME, 5, 9, &data));
                let found = keep_sound_answer(&mut message, start, &mut numbers);
                assert_eq!(found, is_sound, "{rtype} {pointer}");
            }
        }
    }

    #[test]
    fn free_ids_belong_to_no_query() {
        let waiting: HashMap<u16, ()> = (4096..=u16::MAX).map(|id| (id, ())).collect();
        for _ in 0..8 {
            assert!(free_id(&waiting) < 4096);
        }
    }
}
