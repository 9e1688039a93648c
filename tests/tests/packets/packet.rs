//! Builds and parses packets byte by byte.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use whole_system_tests::checksum::{checksum, pseudo};

pub(crate) const A: u16 = 1;
pub(crate) const AAAA: u16 = 28;

/// A DNS query in a datagram. Every part can be made invalid.
#[derive(Clone, Debug)]
pub(crate) struct Query {
    pub(crate) id: u16,
    /// Third and fourth byte of the header.
    pub(crate) flags: u16,
    /// QDCOUNT, ANCOUNT, NSCOUNT; ARCOUNT follows from `opt` unless set.
    pub(crate) counts: [u16; 3],
    pub(crate) additional: Option<u16>,
    /// The name in wire format, or arbitrary bytes in its place.
    pub(crate) name: Vec<u8>,
    pub(crate) qtype: u16,
    pub(crate) qclass: u16,
    pub(crate) opt: Option<Opt>,
    /// Bytes after the message.
    pub(crate) trailing: Vec<u8>,
}

/// An OPT record of a query.
#[derive(Clone, Debug)]
pub(crate) struct Opt {
    /// Owner name; valid if it is the root.
    pub(crate) owner: u8,
    /// Type; valid if 41.
    pub(crate) kind: u16,
    pub(crate) size: u16,
    pub(crate) extended: u8,
    pub(crate) version: u8,
    /// DO and the other flags.
    pub(crate) flags: u16,
    /// Options in wire format.
    pub(crate) options: Vec<u8>,
    pub(crate) options_len: Option<u16>,
}

impl Opt {
    pub(crate) fn new(size: u16) -> Self {
        Self {
            owner: 0,
            kind: 41,
            size,
            extended: 0,
            version: 0,
            flags: 0,
            options: vec![],
            options_len: None,
        }
    }

    pub(crate) fn with_options(size: u16, options: &[u8]) -> Self {
        Self {
            options: options.to_vec(),
            ..Self::new(size)
        }
    }
}

impl Query {
    /// Creates a query with RD set.
    pub(crate) fn new(name: &str, qtype: u16) -> Self {
        Self {
            id: 0x1234,
            flags: 0x0100,
            counts: [1, 0, 0],
            additional: None,
            name: wire(name),
            qtype,
            qclass: 1,
            opt: None,
            trailing: vec![],
        }
    }

    pub(crate) fn opt(self, opt: Opt) -> Self {
        Self {
            opt: Some(opt),
            ..self
        }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(self.id.to_be_bytes());
        out.extend(self.flags.to_be_bytes());
        for count in self.counts {
            out.extend(count.to_be_bytes());
        }
        out.extend(
            self.additional
                .unwrap_or(self.opt.is_some() as u16)
                .to_be_bytes(),
        );
        out.extend(&self.name);
        out.extend(self.qtype.to_be_bytes());
        out.extend(self.qclass.to_be_bytes());
        if let Some(opt) = &self.opt {
            out.push(opt.owner);
            out.extend(opt.kind.to_be_bytes());
            out.extend(opt.size.to_be_bytes());
            out.extend([opt.extended, opt.version]);
            out.extend(opt.flags.to_be_bytes());
            out.extend(
                opt.options_len
                    .unwrap_or(opt.options.len() as u16)
                    .to_be_bytes(),
            );
            out.extend(&opt.options);
        }
        out.extend(&self.trailing);
        out
    }
}

/// Encodes a name, keeping its letter case. `.` ends labels; the root is "".
pub(crate) fn wire(name: &str) -> Vec<u8> {
    let mut out = Vec::new();
    for label in name.split('.').filter(|label| !label.is_empty()) {
        out.push(label.len() as u8);
        out.extend(label.as_bytes());
    }
    out.push(0);
    out
}

/// Returns a name of exactly `len` bytes in wire format (2 is impossible).
pub(crate) fn name_of_length(len: usize) -> Vec<u8> {
    let mut out = Vec::new();
    let mut left = len - 1;
    while left > 0 {
        // A label takes at least two bytes, so a single byte must never be left over.
        let take = if left > 64 {
            if left == 65 { 63 } else { 64 }
        } else {
            left
        };
        out.push((take - 1) as u8);
        out.extend((1..take).map(|i| b'a' + (i % 26) as u8));
        left -= take;
    }
    out.push(0);
    assert_eq!(out.len(), len);
    out
}

/// A datagram in its frame.
#[derive(Clone, Debug)]
pub(crate) struct Datagram {
    /// VLAN tags, outermost first.
    pub(crate) tags: Vec<(u16, u16)>,
    pub(crate) from: (IpAddr, u16),
    pub(crate) to: (IpAddr, u16),
    pub(crate) payload: Vec<u8>,
    /// Bytes after the IP packet.
    pub(crate) padding: usize,
}

/// IPv4 client of the fixtures.
pub(crate) const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 1, 2, 3));
/// IPv4 server of the fixtures.
pub(crate) const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(169, 254, 0, 2));
/// IPv6 client of the fixtures.
pub(crate) const CLIENT6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0x1234, 0, 0, 0x99));
/// IPv6 server of the fixtures.
pub(crate) const SERVER6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd01, 1, 2, 3, 0, 0xff, 0, 0x53));

impl Datagram {
    /// Returns a query from client to server over IPv4.
    pub(crate) fn v4(payload: Vec<u8>) -> Self {
        Self {
            tags: vec![],
            from: (CLIENT, 40_000),
            to: (SERVER, 53),
            payload,
            padding: 0,
        }
    }

    /// Returns a query from client to server over IPv6.
    pub(crate) fn v6(payload: Vec<u8>) -> Self {
        Self {
            from: (CLIENT6, 40_000),
            to: (SERVER6, 53),
            ..Self::v4(payload)
        }
    }

    /// Returns the frame, addressed to `lo`, where test runs take place.
    pub(crate) fn frame(&self) -> Vec<u8> {
        let mut out = vec![0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 2];
        for (kind, tag) in &self.tags {
            out.extend(kind.to_be_bytes());
            out.extend(tag.to_be_bytes());
        }
        let udp_len = 8 + self.payload.len() as u16;
        let mut udp = Vec::new();
        udp.extend(self.from.1.to_be_bytes());
        udp.extend(self.to.1.to_be_bytes());
        udp.extend(udp_len.to_be_bytes());
        udp.extend([0, 0]);
        udp.extend(&self.payload);
        let sum = checksum(&[&pseudo(self.from.0, self.to.0, udp_len), &udp]);
        udp[6..8].copy_from_slice(&if sum == 0 {
            [0xff, 0xff]
        } else {
            sum.to_be_bytes()
        });
        match (self.from.0, self.to.0) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                out.extend([0x08, 0x00]);
                let mut ip = vec![0x45, 0x10];
                ip.extend((20 + udp_len).to_be_bytes());
                ip.extend([0xab, 0xcd, 0x40, 0, 63, 17, 0, 0]);
                ip.extend(from.octets());
                ip.extend(to.octets());
                let sum = checksum(&[&ip]);
                ip[10..12].copy_from_slice(&sum.to_be_bytes());
                out.extend(ip);
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                out.extend([0x86, 0xdd, 0x60, 0x01, 0x02, 0x03]);
                out.extend(udp_len.to_be_bytes());
                out.extend([17, 63]);
                out.extend(from.octets());
                out.extend(to.octets());
            }
            other => panic!("both of one family, not {other:?}"),
        }
        out.extend(udp);
        out.extend(std::iter::repeat_n(0xee, self.padding));
        out
    }
}
