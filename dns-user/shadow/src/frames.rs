//! Packets of a cooked packet socket: IP with UDP or TCP, without the header of the link.
//!
//! The kernel removes the header of the link and the outer VLAN tag before such a socket sees a packet, so every kind
//! of interface looks the same here.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use dns_core::wire::{Transport, u16_at};

/// EtherType of IPv4.
const IPV4: u16 = 0x0800;
/// EtherType of IPv6.
const IPV6: u16 = 0x86dd;
/// EtherTypes of an inner VLAN tag (IEEE 802.1Q and 802.1ad).
const VLAN: [u16; 2] = [0x8100, 0x88a8];

/// IP protocol numbers.
const TCP: u8 = 6;
const UDP: u8 = 17;

const IPV6_HEADER: usize = 40;
const UDP_HEADER: usize = 8;

/// A packet between two endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Endpoint that sent it.
    pub source: SocketAddr,
    /// Endpoint to which it was sent.
    pub destination: SocketAddr,
    /// Protocol that carries the content.
    pub transport: Transport,
    /// Payload of UDP or TCP.
    pub content: Content<'a>,
}

/// The content of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content<'a> {
    /// Whole messages; none in a bare acknowledgement of TCP.
    Messages(Vec<&'a [u8]>),
    /// A first fragment, or a segment with parts of messages: begins with a message, unless it is the middle of one.
    Part(&'a [u8]),
}

/// The reason why a packet is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unreadable {
    /// A fragment without ports, or of IPv6; fragments are counted, not reassembled.
    Fragment,
    /// Shorter than its own lengths, or not IP with UDP or TCP.
    Malformed,
}

/// Reads a packet whose first header has this EtherType.
///
/// # Errors
///
/// Returns why the packet cannot be compared.
pub fn read(mut ethertype: u16, mut bytes: &[u8]) -> Result<Packet<'_>, Unreadable> {
    // At most two tags are in use (802.1ad); a third would be an attack on the loop.
    for _ in 0..2 {
        if !VLAN.contains(&ethertype) {
            break;
        }
        ethertype = u16_at(bytes, 2).ok_or(Unreadable::Malformed)?;
        bytes = &bytes[4..];
    }
    match ethertype {
        IPV4 => read_v4(bytes),
        IPV6 => read_v6(bytes),
        _ => Err(Unreadable::Malformed),
    }
}

fn read_v4(bytes: &[u8]) -> Result<Packet<'_>, Unreadable> {
    let header = bytes.first_chunk::<20>().ok_or(Unreadable::Malformed)?;
    let header_len = usize::from(header[0] & 15) * 4;
    let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
    let fragment = u16::from_be_bytes([header[6], header[7]]);
    // The offset: this one is not the first (RFC 791, section 3.1).
    if fragment & 0x1fff != 0 {
        return Err(Unreadable::Fragment);
    }
    let more_follow = fragment & 0x2000 != 0;
    // A segment that the kernel offloads to the device may have length 0 (BIG TCP).
    let end = if total == 0 { bytes.len() } else { total };
    let payload = bytes.get(header_len..end).ok_or(Unreadable::Malformed)?;
    let source = Ipv4Addr::from([header[12], header[13], header[14], header[15]]);
    let destination = Ipv4Addr::from([header[16], header[17], header[18], header[19]]);
    let addresses = (source.into(), destination.into());
    read_transport(header[9], payload, addresses, more_follow)
}

fn read_v6(bytes: &[u8]) -> Result<Packet<'_>, Unreadable> {
    /// Next header of a fragment (RFC 8200, section 4.5).
    const FRAGMENT: u8 = 44;
    let header = bytes
        .first_chunk::<IPV6_HEADER>()
        .ok_or(Unreadable::Malformed)?;
    if header[6] == FRAGMENT {
        return Err(Unreadable::Fragment);
    }
    let length = usize::from(u16::from_be_bytes([header[4], header[5]]));
    // 0 in a jumbogram (RFC 2675), or in segments that the kernel has merged beyond 64 KiB (BIG TCP, Linux 5.19).
    let end = if length == 0 {
        bytes.len()
    } else {
        IPV6_HEADER + length
    };
    let payload = bytes.get(IPV6_HEADER..end).ok_or(Unreadable::Malformed)?;
    let source = v6_at(bytes, 8).ok_or(Unreadable::Malformed)?;
    let destination = v6_at(bytes, 24).ok_or(Unreadable::Malformed)?;
    read_transport(header[6], payload, (source, destination), false)
}

fn v6_at(header: &[u8], at: usize) -> Option<IpAddr> {
    let octets: &[u8; 16] = header.get(at..)?.first_chunk()?;
    Some(Ipv6Addr::from(*octets).into())
}

fn field(payload: &[u8], at: usize) -> Result<u16, Unreadable> {
    u16_at(payload, at).ok_or(Unreadable::Malformed)
}

fn read_transport(
    protocol: u8,
    payload: &[u8],
    (source, destination): (IpAddr, IpAddr),
    more_follow: bool,
) -> Result<Packet<'_>, Unreadable> {
    let source = SocketAddr::new(source, field(payload, 0)?);
    let destination = SocketAddr::new(destination, field(payload, 2)?);
    let (transport, content) = match protocol {
        UDP => (Transport::Udp, read_datagram(payload, more_follow)),
        TCP => (Transport::Tcp, read_segment(payload)),
        _ => return Err(Unreadable::Malformed),
    };
    Ok(Packet {
        source,
        destination,
        transport,
        content: content.ok_or(Unreadable::Malformed)?,
    })
}

fn read_datagram(payload: &[u8], more_follow: bool) -> Option<Content<'_>> {
    if more_follow {
        // The length in the header is that of the whole datagram.
        return Some(Content::Part(payload.get(UDP_HEADER..)?));
    }
    // UDP's own length: short frames of Ethernet are padded behind it.
    let length = usize::from(u16_at(payload, 4)?);
    let message = payload.get(UDP_HEADER..length)?;
    Some(Content::Messages(vec![message]))
}

fn read_segment(payload: &[u8]) -> Option<Content<'_>> {
    let offset = payload.get(12)? >> 4;
    let segment = payload.get(usize::from(offset) * 4..)?;
    Some(match whole_messages(segment) {
        Some(messages) => Content::Messages(messages),
        // Behind the length of its first message.
        None => Content::Part(segment.get(2..).unwrap_or_default()),
    })
}

/// Returns the messages of a TCP segment that holds nothing but whole ones; `None` if a message is split.
///
/// Streams are not reassembled: servers and clients write a message with its length at once (RFC 7766, section 8), so
/// nearly all segments hold whole messages, and the rest is counted.
fn whole_messages(segment: &[u8]) -> Option<Vec<&[u8]>> {
    let mut messages = Vec::new();
    let mut rest = segment;
    while !rest.is_empty() {
        let length = usize::from(u16_at(rest, 0)?);
        messages.push(rest.get(2..2 + length)?);
        rest = &rest[2 + length..];
    }
    Some(messages)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(protocol: u8, fragment: u16, payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, protocol, 0, 0];
        bytes[2..4].copy_from_slice(&(20 + payload.len() as u16).to_be_bytes());
        bytes[6..8].copy_from_slice(&fragment.to_be_bytes());
        bytes.extend([10, 0, 0, 1, 10, 0, 0, 2]);
        bytes.extend_from_slice(payload);
        bytes
    }

    fn udp(message: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x30, 0x39, 0, 53];
        bytes.extend((8 + message.len() as u16).to_be_bytes());
        bytes.extend([0, 0]);
        bytes.extend_from_slice(message);
        bytes
    }

    #[test]
    fn datagrams_are_read_behind_tags_and_padding() {
        let plain = v4(17, 0x4000, &udp(b"hello"));
        let mut padded = plain.clone();
        padded.extend([0; 9]);
        let tagged = [&[0, 7, 8, 0][..], &plain].concat();
        for (ethertype, bytes) in [(IPV4, &plain), (IPV4, &padded), (0x8100, &tagged)] {
            let packet = read(ethertype, bytes).unwrap();
            assert_eq!(packet.content, Content::Messages(vec![b"hello"]));
            assert_eq!(packet.source, "10.0.0.1:12345".parse().unwrap());
            assert_eq!(packet.destination, "10.0.0.2:53".parse().unwrap());
        }
        let mut v6 = vec![0x60, 0, 0, 0, 0, 13, 17, 64];
        v6.extend(Ipv6Addr::LOCALHOST.octets());
        v6.extend(Ipv6Addr::LOCALHOST.octets());
        v6.extend(udp(b"hello"));
        let packet = read(IPV6, &v6).unwrap();
        assert_eq!(packet.destination, "[::1]:53".parse().unwrap());
        assert_eq!(packet.content, Content::Messages(vec![b"hello"]));
    }

    #[test]
    fn every_cut_is_refused() {
        let whole = v4(17, 0, &udp(b"hello"));
        for length in 0..whole.len() {
            assert!(read(IPV4, &whole[..length]).is_err(), "{length}");
        }
        assert_eq!(
            read(IPV4, &v4(17, 0x2001, &udp(b"x"))),
            Err(Unreadable::Fragment)
        );
        assert_eq!(read(0x0806, &whole), Err(Unreadable::Malformed));
    }

    /// Half of a datagram: its length in the UDP header is that of the whole.
    #[test]
    fn first_fragments_hold_a_beginning() {
        let mut datagram = udp(b"beginning and end");
        datagram.truncate(UDP_HEADER + 9);
        let bytes = v4(17, 0x2000, &datagram);
        let packet = read(IPV4, &bytes).unwrap();
        assert_eq!(packet.content, Content::Part(b"beginning"));
        assert_eq!(packet.transport, Transport::Udp);
    }

    #[test]
    fn only_whole_messages_of_a_segment_are_used() {
        let two = [0, 1, b'a', 0, 2, b'b', b'c'];
        assert_eq!(whole_messages(&two), Some(vec![&b"a"[..], &b"bc"[..]]));
        assert_eq!(whole_messages(&two[..6]), None);
        assert_eq!(whole_messages(&[0]), None);
        let mut segment = vec![
            0, 53, 0, 99, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0, 0, 0, 0, 0, 0, 0,
        ];
        segment.extend(two);
        let bytes = v4(6, 0, &segment);
        let packet = read(IPV4, &bytes).unwrap();
        assert_eq!(packet.content, Content::Messages(vec![b"a", b"bc"]));
        segment.pop();
        let bytes = v4(6, 0, &segment);
        let packet = read(IPV4, &bytes).unwrap();
        assert_eq!(packet.content, Content::Part(&two[2..6]));
    }
}
