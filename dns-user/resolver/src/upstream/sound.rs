//! Whether names and data inside a message are what they claim to be.
//!
//! A reply is passed on as the bytes it was, so whatever is wrong in it would be
//! wrong for the client, and from the cache for everybody. Types whose form is not
//! known here are opaque (RFC 3597): any data is right for them.

use std::ops::Range;

use super::message::{HEADER_LEN, TYPE_OPT, TYPE_SOA, u16_at};

/// Longest name, bytes of wire format (RFC 1035, section 2.3.4).
const MAX_NAME: usize = 255;
/// Most pointers in one name: it has at most 127 labels, and a pointer in front of
/// each is more than any server writes.
const MAX_POINTERS: usize = 127;
/// CLASS IN.
const CLASS_IN: u16 = 1;

/// Where the name at `at` ends, if it is one: labels of at most 63 bytes, at most 255
/// bytes in all, pointers to what stands before them and not into the header (RFC
/// 1035, section 4.1.4: "a prior occurrence"). So no name loops.
pub(super) fn name_end(message: &[u8], mut at: usize) -> Option<usize> {
    let mut end = None;
    let mut length = 0;
    let mut pointers = 0;
    // Where the part of the name that is being read began: pointers lead before it.
    let mut part = at;
    loop {
        match *message.get(at)? {
            0 => {
                length += 1;
                return (length <= MAX_NAME).then_some(end.unwrap_or(at + 1));
            }
            label @ 1..=63 => {
                length += usize::from(label) + 1;
                at += usize::from(label) + 1;
            }
            192.. => {
                let target = usize::from(u16_at(message, at)? & 0x3fff);
                end = end.or(Some(at + 2));
                pointers += 1;
                if target < HEADER_LEN || target >= part || pointers > MAX_POINTERS {
                    return None;
                }
                (at, part) = (target, target);
            }
            _ => return None,
        }
        if length > MAX_NAME {
            return None;
        }
    }
}

/// Whether the data of a record, at `data` in `message`, has the form of its type.
pub(super) fn is_sound_data(message: &[u8], rtype: u16, class: u16, data: Range<usize>) -> bool {
    let Some(message) = message.get(..data.end) else { return false };
    let end = form(rtype, class).iter().try_fold(data.start, |at, field| field.end(message, at));
    end == Some(data.end)
}

/// A part of a record's data.
enum Field {
    /// So many bytes.
    Bytes(usize),
    /// A domain name.
    Name,
    /// A character-string (RFC 1035, section 3.3).
    Text,
    /// At least one character-string, up to the end.
    Texts,
    /// Options of EDNS, up to the end (RFC 6891, section 6.1.2).
    Options,
    /// Whatever comes, up to the end.
    Rest,
}

/// The form of the data of a type. Classes other than IN have other addresses.
fn form(rtype: u16, class: u16) -> &'static [Field] {
    use Field::{Bytes, Name, Options, Rest, Text, Texts};
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
    /// Where the field that begins at `at` ends; `message` ends with the data.
    fn end(&self, message: &[u8], mut at: usize) -> Option<usize> {
        let end = match self {
            Self::Bytes(count) => at + count,
            Self::Name => name_end(message, at)?,
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

    /// A header, and behind it `name` at 12.
    fn message(name: &[u8]) -> Vec<u8> {
        [&[0; HEADER_LEN], name].concat()
    }

    #[test]
    fn names_end_where_they_say_and_never_loop() {
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
        let longest = [[&[63][..], &[b'x'; 63]].concat().repeat(3), vec![61; 62], vec![0]].concat();
        assert_eq!(name_end(&message(&longest), 12), Some(12 + 255));
        let too_long = [[&[63][..], &[b'x'; 63]].concat().repeat(3), vec![62; 63], vec![0]].concat();
        assert_eq!(name_end(&message(&too_long), 12), None);
        // Each pointer leads to the one before: that many are nobody's honest work.
        let chain = |count: u16| {
            let pointers = (0..count).flat_map(|number| (0xc000 | (12 + 2 * number)).to_be_bytes());
            message(&[&[0, 0][..], &pointers.collect::<Vec<_>>()].concat())
        };
        assert_eq!(name_end(&chain(127), 12 + 2 * 127), Some(12 + 2 * 128));
        assert_eq!(name_end(&chain(128), 12 + 2 * 128), None);
    }

    #[test]
    fn data_has_the_form_of_its_type() {
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
                is_sound_data(&message, rtype, CLASS_IN, 12..message.len()),
                sound,
                "type {rtype}: {data:?}"
            );
        }
        // An A of Chaosnet is a name and a number (RFC 1035, section 3.4.1 knows IN alone).
        assert!(is_sound_data(&message(b"\0\0\x01"), 1, 3, 12..15));
    }

    proptest! {
        #[test]
        fn what_is_called_sound_hickory_reads(bytes in proptest::collection::vec(0u8..66, 0..80)) {
            use hickory_proto::{rr::Name, serialize::binary::{BinDecodable, BinDecoder}};
            let message = message(&bytes);
            if let Some(end) = name_end(&message, 12) {
                let mut decoder = BinDecoder::new(&message).clone(12);
                prop_assert!(Name::read(&mut decoder).is_ok());
                prop_assert_eq!(decoder.index(), end);
            }
        }

        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>, rtype in 0u16..50, at in 0usize..40, length in 0usize..40) {
            let _ = name_end(&bytes, at);
            let _ = is_sound_data(&bytes, rtype, CLASS_IN, at..at + length);
        }
    }
}
