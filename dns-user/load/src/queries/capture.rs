//! Queries of a capture in the format pcap (tcpdump, dumpcap -P). Names, types and options are kept; addresses, ports
//! and ids are not: they belong to the clients of that time.

use anyhow::{Context as _, Result, ensure};
use hickory_proto::op::{Message, MessageType, OpCode};

use super::{MAX_SEQUENCE, Query};

/// Port of the captured queries.
const PORT: u16 = 53;

/// Length of a DNS header.
const HEADER_LEN: usize = 12;

/// Returns whether a file begins like a capture.
pub(super) fn is_capture(bytes: &[u8]) -> bool {
    ByteOrder::of(bytes).is_some()
}

/// Byte order of the file's numbers.
#[derive(Clone, Copy)]
enum ByteOrder {
    Little,
    Big,
}

impl ByteOrder {
    /// Reads it from the magic number, which also tells microseconds from nanoseconds.
    fn of(bytes: &[u8]) -> Option<Self> {
        match bytes.get(..4)? {
            [0xd4, 0xc3, 0xb2, 0xa1] | [0x4d, 0x3c, 0xb2, 0xa1] => Some(Self::Little),
            [0xa1, 0xb2, 0xc3, 0xd4] | [0xa1, 0xb2, 0x3c, 0x4d] => Some(Self::Big),
            _ => None,
        }
    }

    fn number(self, bytes: &[u8], at: usize) -> Option<u32> {
        let bytes = bytes.get(at..at + 4)?.try_into().ok()?;
        Some(match self {
            Self::Little => u32::from_le_bytes(bytes),
            Self::Big => u32::from_be_bytes(bytes),
        })
    }
}

/// Returns the UDP queries to port 53.
pub(super) fn queries(bytes: &[u8]) -> Result<Vec<Query>> {
    let order = ByteOrder::of(bytes).context("no capture in the format pcap")?;
    let link = order.number(bytes, 20).context("the header is cut off")?;
    // LINKTYPE_ETHERNET, LINKTYPE_RAW, LINKTYPE_LINUX_SLL, LINKTYPE_LINUX_SLL2.
    let link_len = match link & 0xffff {
        1 => 14,
        101 => 0,
        113 => 16,
        276 => 20,
        other => anyhow::bail!("link type {other} is none of Ethernet, raw IP and Linux cooked"),
    };
    let mut queries = Vec::new();
    let mut at = 24;
    // A capture that was interrupted ends within a packet.
    while let Some(length) = order.number(bytes, at + 8) {
        let begin = at + 16;
        let Some(packet) = bytes.get(begin..begin + length as usize) else {
            break;
        };
        at = begin + length as usize;
        let payload = packet.get(link_len..).and_then(udp_payload);
        queries.extend(payload.and_then(query));
        ensure!(
            queries.len() <= MAX_SEQUENCE,
            "more than {MAX_SEQUENCE} queries"
        );
    }
    ensure!(!queries.is_empty(), "no UDP query to port {PORT}");
    Ok(queries)
}

/// Returns the payload of a datagram to port 53. Fragments, VLAN tags and IPv6 extension headers are not looked into.
fn udp_payload(packet: &[u8]) -> Option<&[u8]> {
    // The packet's own version: raw and cooked captures have both families.
    let udp = match packet.first()? >> 4 {
        4 if packet.get(9) == Some(&17) => usize::from(packet[0] & 0xf) * 4,
        6 if packet.get(6) == Some(&17) => 40,
        _ => return None,
    };
    let header = packet.get(udp..udp + 8)?;
    if u16::from_be_bytes([header[2], header[3]]) != PORT {
        return None;
    }
    // Padding of short Ethernet frames follows.
    let length = usize::from(u16::from_be_bytes([header[4], header[5]]));
    packet.get(udp + 8..udp + length)
}

/// Returns the query of a message; what is none, or no server could read, is left out.
fn query(payload: &[u8]) -> Option<Query> {
    let parsed = Message::from_vec(payload).ok()?;
    let is_query = parsed.metadata.message_type == MessageType::Query
        && parsed.metadata.op_code == OpCode::Query;
    // To more than one question servers answer FORMERR (RFC 9619), which is no load to measure.
    let [question] = &parsed.queries[..] else {
        return None;
    };
    if !is_query {
        return None;
    }
    let mut message = payload.to_vec();
    message.get_mut(..HEADER_LEN)?[..2].fill(0);
    Some(Query {
        text: format!("{} {}", question.name(), question.query_type()),
        message,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUERY: &[u8] = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\x01\x01A\x04bosh\0\0\x01\0\x01\0\0\x29\x04\xd0\0\0\0\0\0\0";

    /// Returns a capture of raw packets, as tcpdump writes it on a little-endian machine.
    fn capture(packets: &[Vec<u8>]) -> Vec<u8> {
        let mut file = vec![0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0];
        file.extend([0; 8]);
        file.extend([0, 0, 4, 0, 101, 0, 0, 0]);
        for packet in packets {
            file.extend([0; 8]);
            file.extend((packet.len() as u32).to_le_bytes());
            file.extend((packet.len() as u32).to_le_bytes());
            file.extend(packet);
        }
        file
    }

    fn datagram(header: &[u8], port: u16, message: &[u8]) -> Vec<u8> {
        let length = (8 + message.len()) as u16;
        [
            header,
            &[0xc0, 0],
            &port.to_be_bytes(),
            &length.to_be_bytes(),
            &[0, 0],
            message,
            b"padding",
        ]
        .concat()
    }

    #[test]
    fn queries_keep_their_options_only() {
        let ipv4 = [&[0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17][..], &[7; 10]].concat();
        let ipv6 = [&[0x60, 0, 0, 0, 0, 0, 17, 64][..], &[7; 32]].concat();
        let mut reply = QUERY.to_vec();
        reply[2] |= 0x80;
        let mut file = capture(&[
            datagram(&ipv4, 53, QUERY),
            datagram(&ipv4, 54, QUERY),
            datagram(&ipv4, 53, &reply),
            datagram(&ipv6, 53, QUERY),
            vec![0x45],
        ]);
        // The capture was interrupted.
        file.extend([0; 9]);
        assert!(is_capture(&file) && !is_capture(b"a. A\n"));
        let found = queries(&file).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].message, [b"\0\0", &QUERY[2..]].concat());
        assert_eq!(found[0], found[1]);
        assert_eq!(found[0].to_string(), "A.bosh. A");
        assert!(queries(&capture(&[])).is_err());
    }

    #[test]
    fn packets_of_all_kinds_of_captures_are_read() {
        let ipv4 = [&[0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17][..], &[7; 10]].concat();
        let packet = datagram(&ipv4, 53, QUERY);
        let magics: [[u8; 4]; 4] = [
            [0xd4, 0xc3, 0xb2, 0xa1],
            [0x4d, 0x3c, 0xb2, 0xa1],
            [0xa1, 0xb2, 0xc3, 0xd4],
            [0xa1, 0xb2, 0x3c, 0x4d],
        ];
        for (link, header) in [(1, 14), (101, 0), (113, 16), (276, 20)] {
            for magic in magics {
                let number = |number: u32| match magic[0] {
                    0xa1 => number.to_be_bytes(),
                    _ => number.to_le_bytes(),
                };
                let packet = [&vec![9; header][..], &packet].concat();
                // The upper half of the link type is not part of it.
                let file = [
                    &magic[..],
                    &[0; 16],
                    &number(link | 0x1000_0000),
                    &[0; 8],
                    &number(packet.len() as u32),
                    &[0; 4],
                    &packet,
                ]
                .concat();
                assert_eq!(queries(&file).unwrap().len(), 1, "{link} {magic:x?}");
                // The last packet is cut off.
                assert!(queries(&file[..file.len() - 1]).is_err());
            }
        }
        let mut other = capture(&[packet]);
        other[20] = 2;
        assert!(
            queries(&other)
                .unwrap_err()
                .to_string()
                .contains("link type 2")
        );
        assert!(!is_capture(b"\xd4\xc3") && !is_capture(b"\xd4\xc3\xb2\xa0"));
    }

    #[test]
    fn other_packets_are_left_out() {
        let long_header = [&[0x46, 0, 0, 0, 0, 0, 0, 0, 64, 17][..], &[7; 14]].concat();
        let datagram_of =
            |header: &[u8]| udp_payload(&datagram(header, 53, QUERY)).map(<[u8]>::len);
        assert_eq!(datagram_of(&long_header), Some(QUERY.len()));
        let ipv4 = [&[0x45, 0, 0, 0, 0, 0, 0, 0, 64, 6][..], &[7; 10]].concat();
        assert_eq!(datagram_of(&ipv4), None);
        let ipv6 = [&[0x60, 0, 0, 0, 0, 0, 44, 64][..], &[7; 32]].concat();
        assert_eq!(datagram_of(&ipv6), None);
        assert_eq!(udp_payload(b""), None);
        assert_eq!(udp_payload(&[0x50; 60]), None);
        let is_query = |change: fn(&mut Vec<u8>)| {
            let mut message = QUERY.to_vec();
            change(&mut message);
            query(&message).is_some()
        };
        assert!(is_query(|_| {}));
        assert!(!is_query(|message| message[2] |= 0x80));
        assert!(!is_query(|message| message[2] |= 0x20));
        assert!(!is_query(|message| message.truncate(20)));
    }
}
