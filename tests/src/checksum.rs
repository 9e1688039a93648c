//! The internet checksum (RFC 1071), mainly for UDP.

use std::net::IpAddr;

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
