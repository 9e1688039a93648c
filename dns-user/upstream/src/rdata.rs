//! Validates names and record data inside a message.
//!
//! A reply is passed on with its original bytes, so a malformed part would reach the client, and
//! through the cache all others. Types whose format is not known here are opaque (RFC 3597): any
//! data is valid.

use std::ops::Range;

use smallvec::SmallVec;

use dns_core::wire::{CLASS_IN, HEADER_LEN, TYPE_OPT, TYPE_SOA, u16_at};

/// Maximum length of a name in wire format, in bytes (RFC 1035, section 2.3.4).
const MAX_NAME: usize = 255;
/// Maximum number of pointers in a name: it has at most 127 labels, and no server writes a pointer
/// in front of each.
const MAX_POINTERS: usize = 127;
/// Ranges of a message that contain numbers, in ascending order: TYPE and CLASS of a question;
/// TYPE, CLASS, TTL and RDLENGTH of a record.
///
/// A pointer into such a range would read a name from a number. No server writes such a pointer,
/// and the name would change (or break) when the cache rewrites the TTL.
#[derive(Debug, Default)]
pub(crate) struct FixedFields(SmallVec<[Range<usize>; 8]>);

impl FixedFields {
    /// Adds the fields at `range`, which follow all previous ones.
    pub(super) fn add(&mut self, range: Range<usize>) {
        self.0.push(range);
    }

    /// Removes the range added last.
    pub(super) fn take_back(&mut self) {
        self.0.pop();
    }

    /// Returns whether `part` overlaps any of these fields.
    fn touch(&self, part: &Range<usize>) -> bool {
        let next = self.0.partition_point(|fields| fields.end <= part.start);
        self.0
            .get(next)
            .is_some_and(|fields| fields.start < part.end)
    }
}

/// Returns the end of the name at `at` if it is valid: labels of at most 63 bytes, at most 255
/// bytes in total, each pointer to a name or the end of one that precedes the pointing part
/// completely (RFC 1035, section 4.1.4: "a prior occurrence"), outside the header and `numbers`.
/// This excludes loops.
pub(super) fn name_end(message: &[u8], at: usize, numbers: &FixedFields) -> Option<usize> {
    let mut name_end = None;
    let mut length = 0;
    // The part of the name being read, up to its latest possible end.
    let mut part = at..message.len();
    for _ in 0..=MAX_POINTERS {
        let last = labels_end(message.get(..part.end)?, part.start)?;
        length += last - part.start;
        let pointer = message[last] != 0;
        let end = last + if pointer { 2 } else { 1 };
        if end > part.end || length >= MAX_NAME {
            return None;
        }
        // The first part is where a name must be; only a pointer can lead into numbers.
        if name_end.is_some() && numbers.touch(&(part.start..end)) {
            return None;
        }
        let name_end = *name_end.get_or_insert(end);
        if !pointer {
            return Some(name_end);
        }
        let target = usize::from(u16_at(message, last)? & 0x3fff);
        if target < HEADER_LEN || target >= part.start {
            return None;
        }
        part = target..part.start;
    }
    None
}

/// Returns the end of the name at `at` of a message that has been validated.
pub(super) fn valid_name_end(message: &[u8], at: usize) -> Option<usize> {
    let last = labels_end(message, at)?;
    Some(last + if message[last] == 0 { 1 } else { 2 })
}

/// Returns the offset of the root label or pointer that ends the labels from `at`.
fn labels_end(message: &[u8], mut at: usize) -> Option<usize> {
    let limit = at + MAX_NAME;
    while at < limit {
        match *message.get(at)? {
            0 | 192.. => return Some(at),
            label @ 1..=63 => at += 1 + usize::from(label),
            _ => return None,
        }
    }
    None
}

/// Returns whether the data of a record, at `data` in `message`, has the format of its type; its
/// names must not overlap `numbers`.
pub(super) fn is_valid_rdata(
    message: &[u8],
    rtype: u16,
    class: u16,
    data: Range<usize>,
    numbers: &FixedFields,
) -> bool {
    let Some(message) = message.get(..data.end) else {
        return false;
    };
    let end = form(rtype, class)
        .iter()
        .try_fold(data.start, |at, field| field.end(message, at, numbers));
    end == Some(data.end)
}

/// A field of a record's data.
enum Field {
    Bytes(usize),
    Name,
    /// A character-string (RFC 1035, section 3.3).
    Text,
    /// At least one character-string, up to the end.
    Texts,
    /// Options of EDNS, up to the end (RFC 6891, section 6.1.2).
    Options,
    /// Any bytes up to the end of the data.
    Rest,
}

/// Returns the format of a type's data. Classes other than IN have different addresses.
fn form(rtype: u16, class: u16) -> &'static [Field] {
    use Field::{Bytes, Name, Options, Rest, Text, Texts};
    // Names may be compressed in the types of RFC 1035, and receivers should accept it in RP, AFSDB,
    // RT, PX, NAPTR and SRV as well (RFC 3597, section 4).
    match rtype {
        // A, AAAA
        1 if class == CLASS_IN => &[Bytes(4)],
        28 if class == CLASS_IN => &[Bytes(16)],
        // NS, MD, MF, CNAME, MB, MG, MR, PTR, DNAME
        2..=5 | 7..=9 | 12 | 39 => &[Name],
        TYPE_SOA => &[Name, Name, Bytes(20)],
        // HINFO
        13 => &[Text, Text],
        // MINFO, RP
        14 | 17 => &[Name, Name],
        // MX, AFSDB, RT, KX
        15 | 18 | 21 | 36 => &[Bytes(2), Name],
        // TXT, SPF
        16 | 99 => &[Texts],
        // PX
        26 => &[Bytes(2), Name, Name],
        // SRV
        33 => &[Bytes(6), Name],
        // NAPTR
        35 => &[Bytes(4), Text, Text, Text, Name],
        TYPE_OPT => &[Options],
        // RRSIG
        46 => &[Bytes(18), Name, Rest],
        // NSEC
        47 => &[Name, Rest],
        _ => &[Rest],
    }
}

impl Field {
    /// Returns the end of the field at `at`; `message` ends with the data.
    fn end(&self, message: &[u8], mut at: usize, numbers: &FixedFields) -> Option<usize> {
        let end = match self {
            Self::Bytes(count) => at + count,
            Self::Name => name_end(message, at, numbers)?,
            Self::Text => at + 1 + usize::from(*message.get(at)?),
            Self::Texts => {
                at += 1 + usize::from(*message.get(at)?);
                while at < message.len() {
                    at += 1 + usize::from(message[at]);
                }
                at
            }
            Self::Options => {
                while at < message.len() {
                    at += 4 + usize::from(u16_at(message, at + 2)?);
                }
                at
            }
            Self::Rest => message.len(),
        };
        (end <= message.len()).then_some(end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the end of a name in a message that consists of names.
    fn name_end(message: &[u8], at: usize) -> Option<usize> {
        super::name_end(message, at, &FixedFields::default())
    }

    /// Builds a message with `name` at offset 12, after the header.
    fn message(name: &[u8]) -> Vec<u8> {
        [&[0; HEADER_LEN], name].concat()
    }

    #[test]
    fn names_end_and_never_loop() {
        assert_eq!(name_end(&message(b"\0"), 12), Some(13));
        assert_eq!(name_end(&message(b"\x01a\x01b\0"), 12), Some(17));
        assert_eq!(name_end(&message(b"\x01a\0\x01b\xc0\x0c"), 15), Some(19));
        for broken in [
            &b""[..],
            b"\x01a",
            b"\xc0",
            b"\xc0\x0c",
            b"\xc0\x0e\0",
            b"\x01a\xc0\x0c",
            b"\xc0\x04",
            b"\x40\0",
            b"\x80\0",
        ] {
            assert_eq!(name_end(&message(broken), 12), None, "{broken:?}");
        }
        let longest = [
            [&[63][..], &[b'x'; 63]].concat().repeat(3),
            vec![61; 62],
            vec![0],
        ]
        .concat();
        assert_eq!(name_end(&message(&longest), 12), Some(12 + 255));
        let too_long = [
            [&[63][..], &[b'x'; 63]].concat().repeat(3),
            vec![62; 63],
            vec![0],
        ]
        .concat();
        assert_eq!(name_end(&message(&too_long), 12), None);
        // Each pointer refers to the previous one; no real server emits a chain this long.
        let chain = |count: u16| {
            let pointers = (0..count).flat_map(|number| (0xc000 | (12 + 2 * number)).to_be_bytes());
            message(&[&[0, 0][..], &pointers.collect::<Vec<_>>()].concat())
        };
        assert_eq!(name_end(&chain(127), 12 + 2 * 127), Some(12 + 2 * 128));
        assert_eq!(name_end(&chain(128), 12 + 2 * 128), None);
    }

    #[test]
    fn pointers_target_earlier_whole_names() {
        // The label at 12 covers the pointer to it.
        assert_eq!(name_end(&message(b"\x03a\xc0\x0c\0"), 14), None);
        assert_eq!(name_end(&message(b"\x01a\0\xc0\x0c"), 15), Some(17));
        // The pointer at 200 would end within the name at 201, which points to it.
        let mut overlapping = vec![0; 203];
        overlapping[200..].copy_from_slice(&[0xc0, 0xc0, 200]);
        assert_eq!(name_end(&overlapping, 201), None);
        let mut numbers = FixedFields::default();
        numbers.add(15..19);
        numbers.add(22..26);
        // A name, four numbers, a label followed by a pointer, numbers, pointers.
        let message = message(
            b"\x01a\0\x01\0\0\0\x00\xc0\x0c\x01b\0\0\xc0\x0c\xc0\x0e\xc0\x0f\xc0\x13\xc0\x16",
        );
        for (at, end) in [
            (26, Some(28)),
            (28, Some(30)),
            (30, None),
            (32, Some(34)),
            (34, None),
        ] {
            assert_eq!(
                super::name_end(&message, at, &numbers),
                end,
                "the pointer at {at}"
            );
        }
    }

    #[test]
    fn data_must_fit_type() {
        for (rtype, data, sound) in [
            (1, &b"\xc0\0\x02\x01"[..], true),
            (1, b"\xc0\0\x02", false),
            (28, &[0; 16], true),
            (28, &[0; 17], false),
            (5, b"\x01a\0", true),
            (5, b"\x01a\0x", false),
            (5, b"", false),
            (15, b"\0\x0a\x01a\0", true),
            (15, b"\0\x0a", false),
            (16, b"\x01a\0\x02bc", true),
            (13, b"\x01a\x02bc", true),
            (13, b"\x01a\x02bcd", false),
            (13, b"\x01a\x02b", false),
            (13, b"\x01a", false),
            (35, b"\0\x01\0\x02\x01u\0\x03abc\0", true),
            (35, b"\0\x01\0\x02\x01u\0\x03abc", false),
            (16, b"\0", true),
            (16, b"", false),
            (16, b"\x02a", false),
            (33, b"\0\x01\0\x02\0\x35\0", true),
            (41, b"\0\x0a\0\x02ab", true),
            (41, b"", true),
            (41, b"\0\x0a\0\x03ab", false),
            (41, b"\0\x0a", false),
            (65_280, b"", true),
            (65_280, b"anything", true),
        ] {
            let message = message(data);
            assert_eq!(
                is_valid_rdata(
                    &message,
                    rtype,
                    CLASS_IN,
                    12..message.len(),
                    &FixedFields::default()
                ),
                sound,
                "type {rtype}: {data:?}"
            );
        }
        // An A record of Chaosnet is a name and a number (RFC 1035, section 3.4.1 covers IN only).
        assert!(is_valid_rdata(
            &message(b"\0\0\x01"),
            1,
            3,
            12..15,
            &FixedFields::default()
        ));
    }

    proptest! {
        #[test]
        fn hickory_accepts_sound_messages(bytes in proptest::collection::vec(0u8..66, 0..80)) {
            use hickory_proto::{rr::Name, serialize::binary::{BinDecodable, BinDecoder}};
            let message = message(&bytes);
            if let Some(end) = name_end(&message, 12) {
                let mut decoder = BinDecoder::new(&message).clone(12);
                prop_assert!(Name::read(&mut decoder).is_ok());
                prop_assert_eq!(decoder.index(), end);
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>, rtype in 0u16..50, at in 0usize..40, length in 0usize..40) {
            let _ = name_end(&bytes, at);
            let _ = is_valid_rdata(&bytes, rtype, CLASS_IN, at..at + length, &FixedFields::default());
        }
    }

    #[test]
    fn addresses_of_other_classes_have_any_form() {
        let chaos = 3;
        for (rtype, length) in [(1, 4), (28, 16)] {
            assert!(matches!(form(rtype, CLASS_IN), [Field::Bytes(found)] if *found == length));
            assert!(matches!(form(rtype, chaos), [Field::Rest]));
        }
    }

    #[test]
    fn numbers_are_touched_by_overlap_only() {
        let mut numbers = FixedFields::default();
        numbers.add(15..19);
        numbers.add(22..26);
        for (part, expected) in [
            (0..15, false),
            (0..16, true),
            (14..15, false),
            (15..16, true),
            (18..19, true),
            (18..22, true),
            (19..22, false),
            (19..23, true),
            (25..26, true),
            (26..30, false),
        ] {
            assert_eq!(numbers.touch(&part), expected, "{part:?}");
        }
        numbers.take_back();
        assert!(!numbers.touch(&(22..26)) && numbers.touch(&(15..16)));
    }

    #[test]
    fn every_type_has_its_form() {
        let name = &b"\x01a\0"[..];
        let text = &b"\x02bc"[..];
        let bytes = |count: usize| vec![0; count];
        for (types, parts) in [
            (&[1][..], vec![bytes(4)]),
            (&[28], vec![bytes(16)]),
            (&[2, 3, 4, 5, 7, 8, 9, 12, 39], vec![name.to_vec()]),
            (&[6], vec![name.to_vec(), name.to_vec(), bytes(20)]),
            (&[13], vec![text.to_vec(), text.to_vec()]),
            (&[14, 17], vec![name.to_vec(), name.to_vec()]),
            (&[15, 18, 21, 36], vec![bytes(2), name.to_vec()]),
            (&[26], vec![bytes(2), name.to_vec(), name.to_vec()]),
            (&[33], vec![bytes(6), name.to_vec()]),
            (
                &[35],
                vec![
                    bytes(4),
                    text.to_vec(),
                    text.to_vec(),
                    text.to_vec(),
                    name.to_vec(),
                ],
            ),
        ] {
            let data = parts.concat();
            for &rtype in types {
                let is_valid = |data: &[u8]| {
                    let message = message(data);
                    let range = 12..message.len();
                    is_valid_rdata(&message, rtype, CLASS_IN, range, &FixedFields::default())
                };
                assert!(is_valid(&data), "type {rtype}");
                let longer = [&data[..], &[0]].concat();
                assert!(!is_valid(&longer), "type {rtype} and one more byte");
                for length in 0..data.len() {
                    assert!(!is_valid(&data[..length]), "{length} bytes of type {rtype}");
                }
            }
        }
        // The rest of these types may be anything, also nothing.
        for (rtype, start) in [(46, 18), (47, 0)] {
            let data = [&bytes(start)[..], name].concat();
            let is_valid = |data: &[u8]| {
                let message = message(data);
                let range = 12..message.len();
                is_valid_rdata(&message, rtype, CLASS_IN, range, &FixedFields::default())
            };
            assert!(is_valid(&data) && is_valid(&[&data[..], b"\xff\xff"].concat()));
            assert!(!is_valid(&data[..data.len() - 1]), "type {rtype}");
        }
        for rtype in [
            10, 11, 19, 20, 22, 23, 24, 25, 27, 29, 34, 37, 38, 40, 42, 45, 48, 98, 100,
        ] {
            assert!(matches!(form(rtype, CLASS_IN), [Field::Rest]), "{rtype}");
        }
        for rtype in [16, 99] {
            assert!(matches!(form(rtype, CLASS_IN), [Field::Texts]), "{rtype}");
        }
        assert!(matches!(form(41, CLASS_IN), [Field::Options]));
        // Data that ends past the message.
        let short = message(b"\0\0\0");
        assert!(!is_valid_rdata(
            &short,
            65_280,
            CLASS_IN,
            12..16,
            &FixedFields::default()
        ));
    }

    #[test]
    fn root_or_pointer_ends_names() {
        for (name, end) in [
            (&b"\0more"[..], Some(13)),
            (b"\x01a\0", Some(15)),
            (b"\x01a\xc0\x0c", Some(16)),
            (b"\xff\x0c", Some(14)),
            (b"\x01", None),
            (b"\x40a", None),
        ] {
            assert_eq!(valid_name_end(&message(name), 12), end, "{name:?}");
        }
        // Labels of 64 bytes do not exist, those of 63 do.
        let label = |length: u8| [&[length][..], &vec![b'x'; usize::from(length)], b"\0"].concat();
        assert_eq!(name_end(&message(&label(63)), 12), Some(12 + 65));
        assert_eq!(name_end(&message(&label(64)), 12), None);
        // A label of 2 bytes and a pointer to a name of 253 make 255 bytes; one more is too many.
        for (last, is_valid) in [(59, true), (60, false)] {
            let name = [label(63)[..64].repeat(3), label(last)].concat();
            let start = 12 + name.len();
            let pointing = [&name[..], b"\x01a\xc0\x0c"].concat();
            let found = name_end(&message(&pointing), start);
            assert_eq!(found, is_valid.then_some(start + 4), "{last}");
        }
    }
}
