//! The internet checksum (RFC 1071), mainly for UDP.

use std::net::{IpAddr, SocketAddr};

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
            sum += u32::from(u16::from_be_bytes([
                pair[0],
                pair.get(1).copied().unwrap_or(0),
            ]));
            sum = (sum & 0xffff) + (sum >> 16);
        }
    }
    !(sum as u16)
}

/// Returns the Ethernet frame of a message over IP and UDP, with all checksums. `hardware` holds
/// the addresses of the receiver and the sender.
///
/// # Panics
///
/// Panics if the message does not fit into a packet, or the endpoints have different versions of IP.
pub fn udp_frame(
    hardware: [[u8; 6]; 2],
    from: impl Into<SocketAddr>,
    to: impl Into<SocketAddr>,
    message: &[u8],
) -> Vec<u8> {
    const IP: usize = 14;
    let (from, to) = (from.into(), to.into());
    let udp_len = u16::try_from(8 + message.len()).expect("a message that fits");
    let mut frame = hardware.concat();
    match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            frame.extend([8, 0, 0x45, 0]);
            frame.extend((20 + udp_len).to_be_bytes());
            // Identification 0, DF; TTL 64, UDP, checksum.
            frame.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
            frame.extend([from.octets(), to.octets()].concat());
            let sum = checksum(&[&frame[IP..]]).to_be_bytes();
            frame[IP + 10..IP + 12].copy_from_slice(&sum);
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend(udp_len.to_be_bytes());
            // UDP; hop limit 64.
            frame.extend([17, 64]);
            frame.extend([from.octets(), to.octets()].concat());
        }
        (from, to) => panic!("a packet from {from} to {to}"),
    }
    let header = [
        from.port().to_be_bytes(),
        to.port().to_be_bytes(),
        udp_len.to_be_bytes(),
        [0, 0],
    ]
    .concat();
    let pseudo = pseudo(from.ip(), to.ip(), udp_len);
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
