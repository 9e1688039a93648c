//! The internet checksum (RFC 1071), mainly for UDP.

use std::net::{IpAddr, SocketAddrV4};

pub fn pseudo(from: IpAddr, to: IpAddr, udp_len: u16) -> Vec<u8> {
    let mut out = Vec::new();
    for address in [from, to] {
        match address {
            IpAddr::V4(address) => out.extend(address.octets()),
            IpAddr::V6(address) => out.extend(address.octets()),
        }
    }
    out.extend([0, 17]);
    out.extend(udp_len.to_be_bytes());
    out
}

/// Computes the internet checksum over parts of even length (the last may be odd).
pub fn checksum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0u32;
    for part in parts {
        for pair in part.chunks(2) {
            sum += u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
            sum = (sum & 0xffff) + (sum >> 16);
        }
    }
    !(sum as u16)
}

/// Returns the Ethernet frame of a message over IPv4 and UDP, with all checksums. `hardware` holds
/// the addresses of the receiver and the sender.
///
/// # Panics
///
/// Panics if the message does not fit into a packet.
pub fn udp_frame(hardware: [[u8; 6]; 2], from: SocketAddrV4, to: SocketAddrV4, message: &[u8]) -> Vec<u8> {
    const IP: usize = 14;
    let udp_len = u16::try_from(8 + message.len()).expect("a message that fits");
    let mut frame = [&hardware.concat()[..], &[8, 0, 0x45, 0]].concat();
    frame.extend((20 + udp_len).to_be_bytes());
    // Identification 0, DF; TTL 64, UDP, checksum.
    frame.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    frame.extend([from.ip().octets(), to.ip().octets()].concat());
    let sum = checksum(&[&frame[IP..]]).to_be_bytes();
    frame[IP + 10..IP + 12].copy_from_slice(&sum);
    let header = [from.port().to_be_bytes(), to.port().to_be_bytes(), udp_len.to_be_bytes(), [0, 0]].concat();
    let pseudo = pseudo((*from.ip()).into(), (*to.ip()).into(), udp_len);
    // Zero would mean no checksum (RFC 768).
    let sum = match checksum(&[&pseudo, &header, message]) {
        0 => 0xffff,
        sum => sum,
    };
    frame.extend(&header[..6]);
    frame.extend(sum.to_be_bytes());
    frame.extend(message);
    frame
}
