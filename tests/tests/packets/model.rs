//! Reference model of the programs, written plainly from the documents and independent of their
//! implementation.

use std::{collections::HashMap, net::IpAddr};

use dns_common::{
    control::{COOKIES, ECHO_OPT},
    entry::AnswerPolicy,
};
use whole_system_tests::{
    checksum::{checksum, pseudo},
    program::{Hook, Published},
};

/// State published by userspace.
#[derive(Clone, Debug)]
pub(crate) struct World {
    /// Addresses and ports of the server.
    pub(crate) endpoints: Vec<(IpAddr, u16)>,
    /// Published answers, by lower-case name in wire format.
    pub(crate) published: HashMap<Vec<u8>, Published>,
    pub(crate) lease: bool,
    /// Limit on replies, in bytes of DNS message.
    pub(crate) max_reply: Option<usize>,
    /// Whether the OPT repeats the client's size, without DO.
    pub(crate) echo_opt: bool,
    /// Whether cookies are left to userspace.
    pub(crate) cookies: bool,
    /// VLANs whose frames are answered.
    pub(crate) vlans: Vec<u16>,
}

impl World {
    /// Returns the bits of [`dns_common::control::Control::edns`].
    pub(crate) fn edns(&self) -> u32 {
        let (echo, cookies) = (u32::from(self.echo_opt), u32::from(self.cookies));
        echo * ECHO_OPT + cookies * COOKIES
    }
}

/// An expected reply, before the choice of records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    /// The frame up to the end of the question; over IPv6 with a UDP checksum of zero.
    pub(crate) start: Vec<u8>,
    /// Records to choose from.
    pub(crate) records: Vec<Vec<u8>>,
    /// Number of records in the reply.
    pub(crate) given: usize,
    /// The OPT after the records.
    pub(crate) opt: Vec<u8>,
    /// Offset of the IP header.
    pub(crate) ip: usize,
    pub(crate) v6: bool,
    /// Whether the checksum remains partial.
    pub(crate) partial: bool,
}

impl Reply {
    /// Returns the length of the whole frame.
    pub(crate) fn frame_len(&self) -> usize {
        self.start.len() + self.given * self.records.first().map_or(0, Vec::len) + self.opt.len()
    }
}

/// Maximum message size of the programs.
const MOST: usize = 4096;

/// Reads two bytes in network order.
fn u16_at(bytes: &[u8], at: usize) -> Option<usize> {
    Some(usize::from(u16::from_be_bytes([
        *bytes.get(at)?,
        *bytes.get(at + 1)?,
    ])))
}

/// Returns the reply to `frame`; `None` if it must be passed up untouched.
pub(crate) fn reply(world: &World, hook: Hook, frame: &[u8]) -> Option<Reply> {
    // Broadcast and multicast are passed up; the address of `lo` is zero.
    if frame.get(..6)? != [0; 6] {
        return None;
    }
    let (ethertype, ip) = match u16_at(frame, 12)? {
        0x8100 if !world.vlans.contains(&(u16_at(frame, 14)? as u16 & 0xfff)) => return None,
        0x8100 => (u16_at(frame, 16)?, 18),
        other => (other, 14),
    };
    let packet = frame.get(ip..)?;
    let (v6, from, to, udp) = match ethertype {
        0x0800 => {
            let header = packet.get(..20)?;
            let plain = header[0] == 0x45 && u16_at(header, 6)? & 0x3fff == 0 && header[9] == 17;
            if !plain {
                return None;
            }
            let from: [u8; 4] = header[12..16].try_into().ok()?;
            let to: [u8; 4] = header[16..20].try_into().ok()?;
            // Test runs are on `lo`, where all other sources are possible.
            if from[0] == 0 || from[0] >= 224 || checksum(&[header]) != 0 {
                return None;
            }
            (
                false,
                IpAddr::from(from),
                IpAddr::from(to),
                packet.get(20..u16_at(header, 2)?)?,
            )
        }
        0x86dd => {
            let header = packet.get(..40)?;
            if header[0] >> 4 != 6 || header[6] != 17 {
                return None;
            }
            let from: [u8; 16] = header[8..24].try_into().ok()?;
            let to: [u8; 16] = header[24..40].try_into().ok()?;
            let zeros = from.iter().take_while(|&&byte| byte == 0).count();
            let is_reserved = zeros >= 12 || zeros == 10 && from[10..12] == [0xff, 0xff];
            if from[0] == 0xff || is_reserved && from != std::net::Ipv6Addr::LOCALHOST.octets() {
                return None;
            }
            (
                true,
                IpAddr::from(from),
                IpAddr::from(to),
                packet.get(40..40 + u16_at(header, 4)?)?,
            )
        }
        _ => return None,
    };
    if udp.len() < 8 || u16_at(udp, 4)? != udp.len() {
        return None;
    }
    // A multicast source address or port zero.
    if frame[6] & 1 != 0 || u16_at(udp, 0)? == 0 {
        return None;
    }
    let (from_port, to_port) = (u16_at(udp, 0)? as u16, u16_at(udp, 2)? as u16);
    if !world.endpoints.contains(&(to, to_port)) || !world.lease {
        return None;
    }

    let (message, limit, opt, records, rcode, policy) = answer(world, &udp[8..])?;
    let question_end = message.len();
    let fixed = question_end + opt.len();
    let mut all = records.len();
    let mut given = all;
    let limit = match policy {
        // With a policy, replies without records and queries with EDNS options are left to
        // userspace.
        Some(_) if records.is_empty() || fixed != udp.len() - 8 => return None,
        Some(policy) => {
            let at_most =
                |count: usize, most: usize| if most == 0 { count } else { count.min(most) };
            all = at_most(all, policy.most());
            given = if limit == 512 {
                at_most(all, policy.plain(records[0].len() == 28))
            } else {
                all
            };
            limit - AnswerPolicy::SPARE
        }
        None => limit,
    };
    let record_len = records.first().map_or(0, Vec::len);
    if fixed + given * record_len > limit {
        if fixed > limit || limit > MOST {
            return None;
        }
        given = (limit - fixed).checked_div(record_len)?;
    }
    let reply_len = fixed + given * record_len;
    if reply_len > MOST || world.max_reply.is_some_and(|most| reply_len > most) {
        return None;
    }

    // Only IPv4 allows a missing checksum. In the driver, no later stage
    // would complete a partial one.
    let field = u16_at(udp, 6)?;
    let is_right = field == 0 && !v6
        || field != 0 && checksum(&[&pseudo(from, to, udp.len() as u16), udp]) == 0;
    let looks_unfinished =
        field != 0 && field == usize::from(!checksum(&[&pseudo(from, to, udp.len() as u16)]));
    if !is_right && !looks_unfinished {
        return None;
    }
    // If it may also be complete, tc asks the kernel, and test run packets have complete ones.
    let partial = hook == Hook::Tc && looks_unfinished && !is_right;

    let mut message = message;
    message[2] = 0x84
        | (message[2] & 0x01)
        | if given < all && policy.is_none_or(|policy| policy.never_truncates() == 0) {
            0x02
        } else {
            0
        };
    message[3] = if policy.is_some_and(|policy| policy.no_recursion() == 1) {
        0
    } else {
        0x80
    } | (message[3] & 0x10)
        | rcode;
    message[4..12].copy_from_slice(&[
        0,
        1,
        (given >> 8) as u8,
        given as u8,
        0,
        0,
        0,
        !opt.is_empty() as u8,
    ]);

    let mut start = [&frame[6..12], &frame[..6], &frame[12..ip]].concat();
    let udp_len = (8 + reply_len) as u16;
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let mut header = vec![0x45, 0];
            header.extend((20 + udp_len).to_be_bytes());
            header.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
            header.extend(to.octets());
            header.extend(from.octets());
            let sum = checksum(&[&header]);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            start.extend(header);
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            start.extend([0x60, 0, 0, 0]);
            start.extend(udp_len.to_be_bytes());
            start.extend([17, 64]);
            start.extend(to.octets());
            start.extend(from.octets());
        }
        _ => return None,
    }
    start.extend(to_port.to_be_bytes());
    start.extend(from_port.to_be_bytes());
    start.extend(udp_len.to_be_bytes());
    let seed = if partial {
        !checksum(&[&pseudo(to, from, udp_len)])
    } else {
        0
    };
    start.extend(seed.to_be_bytes());
    start.extend(message);
    Some(Reply {
        start,
        records,
        given,
        opt,
        ip,
        v6,
        partial,
    })
}

/// Header and question of the query, the client's limit, the OPT of the reply, the records to
/// choose from, the RCODE, and the answer policy.
#[expect(clippy::type_complexity, reason = "used once")]
fn answer(
    world: &World,
    message: &[u8],
) -> Option<(
    Vec<u8>,
    usize,
    Vec<u8>,
    Vec<Vec<u8>>,
    u8,
    Option<AnswerPolicy>,
)> {
    let header = message.get(..12)?;
    // QR, opcode, AA, TC; RA, Z, RCODE.
    if header[2] & 0xfe != 0
        || header[3] & 0xcf != 0
        || header[4..10] != [0, 1, 0, 0, 0, 0]
        || message.len() > 1500
    {
        return None;
    }
    let additional = u16_at(header, 10)?;
    if additional > 1 {
        return None;
    }

    let mut at = 12;
    loop {
        let len = usize::from(*message.get(at)?);
        at += 1 + len;
        match len {
            0 => break,
            1..64 => {}
            _ => return None,
        }
    }
    if at - 12 > 255 {
        return None;
    }
    let name = message[12..at].to_ascii_lowercase();
    let qtype = u16_at(message, at)? as u16;
    if u16_at(message, at + 2)? != 1 {
        return None;
    }
    let question = message[..at + 4].to_vec();
    let rest = &message[at + 4..];

    let (limit, opt) = if additional == 1 {
        let fixed = rest.get(..11)?;
        if fixed[..3] != [0, 0, 41]
            || fixed[5] != 0
            || fixed[6] != 0
            || 11 + u16_at(fixed, 9)? != rest.len()
        {
            return None;
        }
        // At most one complete option that needs no answer.
        let options = &rest[11..];
        if !options.is_empty() {
            let is_for_userspace =
                matches!((u16_at(options, 0)?, world.cookies), (3, _) | (10, true));
            if is_for_userspace || 4 + u16_at(options, 2)? != options.len() {
                return None;
            }
        }
        let size = [fixed[3], fixed[4]];
        let opt = if world.echo_opt {
            vec![0, 0, 41, size[0], size[1], 0, 0, 0, 0, 0, 0]
        } else {
            vec![0, 0, 41, 0x04, 0xd0, 0, 0, fixed[7] & 0x80, 0, 0, 0]
        };
        (usize::from(u16::from_be_bytes(size)).max(512), opt)
    } else if rest.is_empty() {
        (512, vec![])
    } else {
        return None;
    };

    let published = world.published.get(&name)?;
    let ttl = published.policy.map_or(0, AnswerPolicy::ttl).to_be_bytes();
    let record = |qtype: u8, address: &[u8]| {
        let mut out = [
            &[0xc0, 12, 0, qtype, 0, 1][..],
            &ttl,
            &[0, address.len() as u8],
        ]
        .concat();
        out.extend(address);
        out
    };
    let (records, rcode) = match qtype {
        1 => (
            published
                .v4
                .iter()
                .map(|ip| record(1, &ip.octets()))
                .collect(),
            published.rcode,
        ),
        28 => (
            published
                .v6
                .iter()
                .map(|ip| record(28, &ip.octets()))
                .collect(),
            published.rcode,
        ),
        255 if published.v6.is_empty() && published.policy.is_none() => (
            published
                .v4
                .iter()
                .map(|ip| record(1, &ip.octets()))
                .collect(),
            published.rcode,
        ),
        41 | 43 | 128..=255 => return None,
        _ => (vec![], published.rcode_other),
    };
    Some((question, limit, opt, records, rcode, published.policy))
}

/// Compares a frame with the expected reply.
pub(crate) fn compare(expected: &Reply, frame: &[u8]) -> Result<(), String> {
    let Reply {
        start,
        records,
        given,
        opt,
        ip,
        v6,
        partial,
    } = expected;
    let record_len = records.first().map_or(0, Vec::len);
    let len = start.len() + given * record_len + opt.len();
    if frame.len() != len {
        return Err(format!("{} bytes instead of {len}", frame.len()));
    }
    let mut frame = frame.to_vec();
    if *v6 && !partial {
        let udp = ip + 40;
        let sum = [frame[udp + 6], frame[udp + 7]];
        let address =
            |at: usize| IpAddr::from(<[u8; 16]>::try_from(&frame[at..at + 16]).unwrap_or_default());
        let head = pseudo(
            address(ip + 8),
            address(ip + 24),
            (frame.len() - udp) as u16,
        );
        if sum == [0, 0] || checksum(&[&head, &frame[udp..]]) != 0 {
            return Err(format!("bad UDP checksum {sum:02x?}"));
        }
        frame[udp + 6..udp + 8].fill(0);
    }
    if frame[..start.len()] != start[..] {
        return Err(format!(
            "headers or question differ:\n{:02x?}\n{start:02x?}",
            &frame[..start.len()]
        ));
    }
    let (answers, found_opt) = frame[start.len()..].split_at(given * record_len);
    if found_opt != opt {
        return Err(format!("OPT {found_opt:02x?} instead of {opt:02x?}"));
    }
    let mut left = records.clone();
    for found in answers.chunks(record_len.max(1)) {
        match left.iter().position(|record| record == found) {
            Some(place) => drop(left.swap_remove(place)),
            None => return Err(format!("record {found:02x?} unexpected, or duplicate")),
        }
    }
    Ok(())
}
