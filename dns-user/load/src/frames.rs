//! Ethernet frames of queries, with room for the parts that vary from query to query.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Result, bail};
use zerocopy::IntoBytes as _;

use crate::orders::{Frame, MAX_FRAME_LEN};

/// Length of an Ethernet header.
const ETHERNET_LEN: usize = 14;

/// Length of a UDP header.
const UDP_LEN: usize = 8;

/// Ends of the frames.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// Hardware addresses of the receiver and of our interface.
    pub hardware: [[u8; 6]; 2],
    /// First source address.
    pub source: IpAddr,
    /// Endpoint of the server.
    pub server: SocketAddr,
}

impl Route {
    /// Returns the frame of a message over IP and UDP; `None` if it is longer than [`MAX_FRAME_LEN`]. Fails unless both
    /// addresses have one family.
    pub fn frame(&self, message: &[u8]) -> Result<Option<Frame>> {
        // Any message that is too long for 16 bits is too long for a frame.
        if message.len() > MAX_FRAME_LEN {
            return Ok(None);
        }
        let udp_len = (UDP_LEN + message.len()) as u16;
        let mut bytes = self.hardware.concat();
        let addresses = match (self.source, self.server.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                bytes.extend([8, 0, 0x45, 0]);
                bytes.extend((20 + udp_len).to_be_bytes());
                // Identification 0, DF; TTL 64, UDP, no checksum yet.
                bytes.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
                [from.octets(), to.octets()].concat()
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
                bytes.extend(udp_len.to_be_bytes());
                bytes.extend([17, 64]);
                [from.octets(), to.octets()].concat()
            }
            (source, server) => bail!("{source} and {server} are not of one family"),
        };
        let source_end = bytes.len() + addresses.len() / 2;
        bytes.extend(addresses);
        let udp = bytes.len();
        bytes.extend([0, 0]);
        bytes.extend(self.server.port().to_be_bytes());
        bytes.extend(udp_len.to_be_bytes());
        bytes.extend([0, 0]);
        bytes.extend_from_slice(message);
        let source = u16::from_be_bytes([bytes[source_end - 2], bytes[source_end - 1]]);
        bytes[source_end - 2..source_end].fill(0);
        // The message's id.
        bytes[udp + UDP_LEN..]
            .iter_mut()
            .take(2)
            .for_each(|byte| *byte = 0);
        let mut padded = [0; MAX_FRAME_LEN];
        let Some(room) = padded.get_mut(..bytes.len()) else {
            return Ok(None);
        };
        room.copy_from_slice(&bytes);
        // The pseudo-header has both addresses, the protocol and the length.
        let addresses = source_end - (udp - source_end);
        let udp_sum = sum_of(&bytes[addresses..]) + 17 + u32::from(udp_len);
        Ok(Some(Frame {
            sent: 0,
            received: 0,
            answers: 0,
            len: bytes.len() as u32,
            is_ipv6: self.source.is_ipv6().into(),
            header_sum: sum_of(&bytes[ETHERNET_LEN..udp]),
            udp_sum,
            source: source.into(),
            bytes: zerocopy::transmute!(padded),
        }))
    }
}

/// Returns the message in a frame.
pub(crate) fn message(frame: &Frame) -> &[u8] {
    let ip_len = if frame.is_ipv6 != 0 { 40 } else { 20 };
    let bytes = frame.bytes.as_bytes().get(..frame.len as usize);
    let message = bytes.and_then(|bytes| bytes.get(ETHERNET_LEN + ip_len + UDP_LEN..));
    message.unwrap_or_default()
}

/// Sums 16-bit words (RFC 1071).
fn sum_of(bytes: &[u8]) -> u32 {
    let mut sum = 0;
    for pair in bytes.chunks(2) {
        let low = pair.get(1).copied().unwrap_or(0);
        sum += u32::from(u16::from_be_bytes([pair[0], low]));
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(source: &str, server: &str) -> Route {
        Route {
            hardware: [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]],
            source: source.parse().unwrap(),
            server: server.parse().unwrap(),
        }
    }

    #[test]
    fn parts_that_vary_are_left_out() {
        let message = b"\x12\x34\x01\x00abc";
        let frame = route("10.1.2.3", "10.0.0.9:5353")
            .frame(message)
            .unwrap()
            .unwrap();
        let expected = [
            &[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0][..],
            &[
                0x45, 0, 0, 35, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 1, 0, 0, 10, 0, 0, 9,
            ],
            &[0, 0, 0x14, 0xe9, 0, 15, 0, 0],
            b"\0\0\x01\x00abc",
        ]
        .concat();
        assert_eq!(super::message(&frame), b"\0\0\x01\x00abc");
        let len = frame.len as usize;
        assert_eq!(
            (len, frame.bytes.as_bytes()[..len].to_vec()),
            (49, expected)
        );
        assert!(frame.bytes.as_bytes()[len..].iter().all(|&byte| byte == 0));
        assert_eq!((frame.is_ipv6, frame.source), (0, 0x0203));
        assert_eq!(
            frame.header_sum,
            0x4500 + 35 + 0x4000 + 0x4011 + 0x0a01 + 0x0a00 + 9
        );
        let message_sum = 0x0100 + 0x6162 + 0x6300;
        let pseudo = 0x0a01 + 0x0a00 + 9 + 17 + 15;
        assert_eq!(frame.udp_sum, pseudo + 0x14e9 + 15 + message_sum);

        let frame = route("fd00::1:2", "[fd00::9]:53")
            .frame(message)
            .unwrap()
            .unwrap();
        assert_eq!((frame.len, frame.is_ipv6, frame.source), (69, 1, 2));
        assert_eq!(super::message(&frame), b"\0\0\x01\x00abc");
        assert_eq!(
            frame.bytes.as_bytes()[12..22],
            [0x86, 0xdd, 0x60, 0, 0, 0, 0, 15, 17, 64]
        );
        let addresses = 0xfd00 + 1 + 0xfd00 + 9;
        assert_eq!(frame.udp_sum, addresses + 17 + 15 + 53 + 15 + message_sum);
        assert_eq!(frame.header_sum, 0x6000 + 15 + 0x1140 + addresses);
    }

    #[test]
    fn frames_have_a_limit() {
        for (source, server, headers) in [("10.0.0.1", "10.0.0.2:53", 42), ("::1", "[::2]:53", 62)]
        {
            let route = route(source, server);
            let fits = MAX_FRAME_LEN - headers;
            let frame = route.frame(&vec![7; fits]).unwrap().unwrap();
            assert_eq!(frame.len as usize, MAX_FRAME_LEN);
            assert!(route.frame(&vec![7; fits + 1]).unwrap().is_none());
            assert!(route.frame(&vec![7; MAX_FRAME_LEN + 1]).unwrap().is_none());
            // Even a message without an id.
            assert_eq!(route.frame(b"").unwrap().unwrap().len as usize, headers);
        }
        assert!(route("10.0.0.1", "[::2]:53").frame(b"").is_err());
        assert!(route("::1", "10.0.0.1:53").frame(b"").is_err());
    }

    #[test]
    fn length_decides_whether_messages_fit() {
        for (source, server, header) in [
            ("10.1.2.3", "10.0.0.9:53", 42),
            ("fd00::1", "[fd00::9]:53", 62),
        ] {
            let longest = MAX_FRAME_LEN - header;
            for (length, fits) in [
                (12, true),
                (longest, true),
                (longest + 1, false),
                (MAX_FRAME_LEN, false),
                (MAX_FRAME_LEN + 1, false),
                // Lengths of IP and UDP have 16 bits.
                (65_520, false),
                (65_536 + 12, false),
            ] {
                let frame = route(source, server).frame(&vec![1; length]).unwrap();
                let found = frame.map(|frame| frame.len as usize);
                assert_eq!(found, fits.then_some(header + length), "{server} {length}");
            }
        }
    }
}
