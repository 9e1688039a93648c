//! Reads and edits messages without fully parsing them.
//!
//! Forwarded messages keep their bytes, including records of unknown types, compression and order.
//! One walk finds the relevant positions (end of the question, OPT, TTLs); fields are then
//! overwritten in place.

use std::ops::Range;

use super::rdata::{FixedFields, is_valid_rdata, name_end, valid_name_end};
use dns_core::wire::Query;
pub(crate) use dns_core::wire::{HEADER_LEN, TYPE_OPT, TYPE_SOA, u16_at};

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

/// Reads four bytes in network order; `None` past the end.
pub(crate) fn u32_at(message: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*message.get(at..)?.first_chunk()?))
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
        Self(message.get(2..4).map_or([0; 2], |bytes| [bytes[0], bytes[1]]))
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
        let records = [u16_at(message, 6)?, u16_at(message, 8)?, u16_at(message, 10)?];
        let mut at = HEADER_LEN;
        let mut numbers = FixedFields::default();
        for _ in 0..questions {
            let name_end = name_end(message, at, &numbers)?;
            at = name_end + 4;
            numbers.add(name_end..at);
        }
        if at > message.len() {
            return None;
        }
        let question_end = at;
        let mut opt = None;
        for (section, count) in records.into_iter().enumerate() {
            for _ in 0..count {
                let record = Record::at(message, at, name_end(message, at, &numbers)?)?;
                let class = u16_at(message, record.ttl_at - 2)?;
                numbers.add(record.fixed_fields());
                if !is_valid_rdata(message, record.rtype, class, record.data.clone(), &numbers) {
                    return None;
                }
                if record.rtype == TYPE_OPT {
                    let in_its_place = section == 2 && opt.is_none() && message[at] == 0;
                    in_its_place.then_some(())?;
                    opt = Some(at..record.data.end);
                }
                at = record.data.end;
            }
        }
        Some(Self { questions, records, question_end, opt, end: at })
    }

    /// Returns the range of the only question: name, type, class.
    pub(crate) fn question(&self) -> Option<Range<usize>> {
        (self.questions == 1).then_some(HEADER_LEN..self.question_end)
    }

    /// Iterates over the records in order, each with the number of its section: 0 answer, 1
    /// authority, 2 additional.
    pub(crate) fn walk<'a>(&self, message: &'a [u8]) -> impl Iterator<Item = (usize, Record)> + use<'a> {
        let counts = self.records;
        let mut at = self.question_end;
        (0..3).flat_map(move |section| std::iter::repeat_n(section, usize::from(counts[section]))).map_while(
            move |section| {
                let record = Record::at(message, at, valid_name_end(message, at)?)?;
                at = record.data.end;
                Some((section, record))
            },
        )
    }
}

/// Offsets of one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// Start of the owner name.
    pub(crate) owner: usize,
    pub(crate) rtype: u16,
    pub(crate) ttl_at: usize,
    /// TTL in seconds; for an OPT, the extended RCODE, version and flags.
    pub(crate) ttl: u32,
    pub(crate) data: Range<usize>,
}

impl Record {
    fn fixed_fields(&self) -> Range<usize> {
        self.ttl_at - 4..self.data.start
    }

    /// Parses the record at `at`, whose owner ends at `fixed`.
    fn at(message: &[u8], at: usize, fixed: usize) -> Option<Self> {
        let start = fixed + 10;
        let end = start + usize::from(u16_at(message, fixed + 8)?);
        (end <= message.len()).then_some(())?;
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
    (u16_at(message, 4)? == 1).then_some(())?;
    let end = name_end(message, HEADER_LEN, &FixedFields::default())? + 4;
    (end <= message.len()).then_some(HEADER_LEN..end)
}

/// Returns whether two question sections are equal except for letter case. Length bytes are at most
/// 63 and thus never letters; the last four bytes, type and class, are compared exactly.
pub(crate) fn same_question(ours: &[u8], theirs: &[u8]) -> bool {
    let (Some(split), true) = (ours.len().checked_sub(4), ours.len() == theirs.len()) else { return false };
    ours[split..] == theirs[split..] && ours[..split].eq_ignore_ascii_case(&theirs[..split])
}

/// Appends an OPT of the given size, DO clear, no options.
#[cfg(test)]
pub(crate) fn append_opt(message: &mut Vec<u8>, udp_size: u16) {
    let Some(count) = u16_at(message, 10) else { return };
    message.extend_from_slice(&dns_core::wire::opt_record(udp_size, 0, false));
    message[10..12].copy_from_slice(&count.saturating_add(1).to_be_bytes());
}

/// Returns whether the OPT contains upper bits of the RCODE (RFC 6891, section 6.1.3).
pub(crate) fn has_extended_rcode(message: &[u8], index: &MessageIndex) -> bool {
    index.opt.as_ref().and_then(|opt| message.get(opt.start + 5)).is_some_and(|&bits| bits != 0)
}

/// Removes the OPT and the records after it: moving those could break pointers, and additional
/// records are optional.
pub(crate) fn remove_opt(message: &mut Vec<u8>, index: &mut MessageIndex) {
    let Some(opt) = index.opt.take() else { return };
    let before = index.walk(message).filter(|(section, record)| *section == 2 && record.owner < opt.start);
    index.records[2] = u16::try_from(before.count()).unwrap_or(u16::MAX);
    message.truncate(opt.start);
    index.end = opt.start;
    message[10..12].copy_from_slice(&index.records[2].to_be_bytes());
}

/// Sets the flags that this server determines: the query's RD and CD, RA, and AD only for a client
/// that understands it (RFC 6840, section 5.8).
pub(crate) fn set_own_flags(reply: &mut [u8], query: &Query<'_>) {
    let Some([high, low]) = reply.get_mut(2..4).and_then(|flags| flags.first_chunk_mut()) else { return };
    let [asked_high, asked_low] = query.flags.to_be_bytes();
    *high = *high & !RD | asked_high & RD;
    let kept = if query.wants_authentic_data() { AD | RCODE } else { RCODE };
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
    let Some(theirs) = index.question() else { return };
    let ours = &query.message[query.question_range()];
    if same_question(ours, &reply[theirs.clone()]) {
        reply[theirs].copy_from_slice(ours);
    }
}

/// Appends a record to the answer section of a message without further sections; `false` if the
/// message would become too long, without changing it.
pub(crate) fn push_answer(message: &mut Vec<u8>, owner: &[u8], rtype: u16, ttl: u32, data: &[u8]) -> bool {
    let Some(count) = u16_at(message, 6).filter(|&count| count < u16::MAX) else { return false };
    let Ok(length) = u16::try_from(data.len()) else { return false };
    if message.len() + owner.len() + 10 + data.len() > usize::from(u16::MAX) {
        return false;
    }
    message.extend_from_slice(owner);
    message.extend_from_slice(&rtype.to_be_bytes());
    message.extend_from_slice(&[0, 1]);
    message.extend_from_slice(&ttl.to_be_bytes());
    message.extend_from_slice(&length.to_be_bytes());
    message.extend_from_slice(data);
    message[6..8].copy_from_slice(&(count + 1).to_be_bytes());
    true
}

/// Appends the SOA of a zone to the authority section of a message without additional records.
pub(crate) fn push_soa(message: &mut Vec<u8>, zone: &[u8], ttl: u32, data: &[u8]) {
    let Some(count) = u16_at(message, 8) else { return };
    message.extend_from_slice(zone);
    message.extend_from_slice(&TYPE_SOA.to_be_bytes());
    message.extend_from_slice(&[0, 1]);
    message.extend_from_slice(&ttl.to_be_bytes());
    // The data of an SOA is shorter than 600 bytes.
    message.extend_from_slice(&(data.len() as u16).to_be_bytes());
    message.extend_from_slice(data);
    message[8..10].copy_from_slice(&(count + 1).to_be_bytes());
}

/// Returns an empty truncated reply (TC) to `question`, with the flags of a reply that was cut short.
pub(crate) fn truncated_reply(cut: &[u8], question: &[u8]) -> Vec<u8> {
    let flags = Flags::of(cut).0;
    let mut reply = vec![0, 0, flags[0] | QR | TC, flags[1] & !RCODE, 0, 1, 0, 0, 0, 0, 0, 0];
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
pub(crate) fn keep_sound_answer(message: &mut Vec<u8>, start: usize, numbers: &mut FixedFields) -> bool {
    let record = name_end(message, start, numbers).and_then(|fixed| Record::at(message, start, fixed));
    let is_sound = record.is_some_and(|record| {
        // 249 to 255: TKEY, TSIG, IXFR, AXFR, MAILB, MAILA, ANY.
        let is_meta = matches!(record.rtype, 0 | TYPE_OPT | 249..=255);
        numbers.add(record.fixed_fields());
        let is_sound = !is_meta && is_valid_rdata(message, record.rtype, 1, record.data, numbers);
        if !is_sound {
            numbers.take_back();
        }
        is_sound
    });
    if !is_sound && let Some(count) = u16_at(message, 6) {
        message.truncate(start);
        message[6..8].copy_from_slice(&count.saturating_sub(1).to_be_bytes());
    }
    is_sound
}

/// Pointer to the question's name, the owner of most answers.
pub(crate) const QUESTION_NAME: [u8; 2] = [0xc0, HEADER_LEN as u8];

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns a reply with one A record and an OPT.
    fn reply() -> Vec<u8> {
        let mut message = b"\x12\x34\x81\x80\0\x01\0\0\0\0\0\0\x02Ok\x07example\0\0\x01\0\x01".to_vec();
        assert!(push_answer(&mut message, &QUESTION_NAME, 1, 300, &[192, 0, 2, 1]));
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
        let walked: Vec<_> =
            index.walk(&message).map(|(section, record)| (section, record.rtype, record.ttl)).collect();
        assert_eq!(walked, [(0, 1, 300), (2, TYPE_OPT, 0)]);

        let mut without = message.clone();
        remove_opt(&mut without, &mut index);
        assert_eq!(MessageIndex::of(&without), Some(index));
        assert_eq!(without.len(), 44);
    }

    #[test]
    fn every_cut_is_noticed() {
        let message = reply();
        for length in 0..message.len() {
            assert_eq!(MessageIndex::of(&message[..length]), None, "cut to {length} bytes");
        }
    }

    #[test]
    fn questions_compare_case_insensitively() {
        assert!(same_question(b"\x02Ok\0\0\x01\0\x01", b"\x02oK\0\0\x01\0\x01"));
        assert!(!same_question(b"\x02ok\0\0\x41\0\x01", b"\x02ok\0\0\x61\0\x01"));
        assert!(!same_question(b"\x02ok\0\0\x01\0\x01", b"\x03oks\0\0\x01\0\x01"));
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
}
