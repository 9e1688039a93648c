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
    /// The interface on which packets arrive.
    pub(crate) interface: Interface,
    /// Whether the program of the first moments answers at tc.
    pub(crate) is_first: bool,
}

/// Most addresses of each family: the limits of the program of the first moments.
const FIRST_V4: usize = 32;
const FIRST_V6: usize = 16;

/// An interface, with as many bytes of MTU as the longest reply needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Interface {
    /// Ethernet address.
    pub(crate) address: [u8; 6],
    /// Whether clients may be on other machines.
    pub(crate) is_far: bool,
    /// Whether a route through it sets an MTU.
    pub(crate) is_bounded: bool,
    pub(crate) is_lo: bool,
}

impl Interface {
    /// `lo`, whose address is zero.
    pub(crate) const LO: Self = Self {
        address: [0; 6],
        is_far: false,
        is_bounded: false,
        is_lo: true,
    };

    /// Returns whether the interface may send a message of `len` bytes in an IP packet of `packet_len`.
    fn sends(self, len: usize, packet_len: usize) -> bool {
        let is_safe = packet_len <= SAFE_PACKET;
        is_safe || !self.is_bounded && (len <= MOST_FAR || !self.is_far)
    }
}

/// Length of an IP packet that passes every path.
pub(crate) const SAFE_PACKET: usize = 576;

/// Length of the longest message to another machine.
pub(crate) const MOST_FAR: usize = 1232;

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
    /// Records of another length after them, in any order.
    pub(crate) appended: Vec<Vec<u8>>,
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
        let appended: usize = self.appended.iter().map(Vec::len).sum();
        let records = self.given * self.records.first().map_or(0, Vec::len);
        self.start.len() + records + appended + self.opt.len()
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
    let is_first = world.is_first && hook == Hook::Tc;
    // Broadcast and multicast are passed up.
    if frame.get(..6)? != world.interface.address {
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
            let is_loopback = from[0] == 127 || to[0] == 127;
            if from[0] == 0
                || from[0] >= 224
                || is_loopback && !world.interface.is_lo
                || checksum(&[header]) != 0
            {
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
            let is_own = world.interface.is_lo && from == std::net::Ipv6Addr::LOCALHOST.octets();
            if from[0] == 0xff || is_reserved && !is_own {
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

    let Answer {
        question: message,
        limit,
        opt,
        records,
        appended,
        rcode,
        policy,
    } = answer(world, is_first, &udp[8..])?;
    let question_end = message.len();
    let fixed = question_end + opt.len();
    let appended_len: usize = appended.iter().map(Vec::len).sum();
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
    let expected = limit.min(fixed + given * record_len + appended_len);
    let headers_len = if v6 { 48 } else { 28 };
    let packet_len = expected + headers_len;
    if !world.interface.sends(expected, packet_len) || is_first && packet_len > SAFE_PACKET {
        return None;
    }
    if fixed + given * record_len + appended_len > limit {
        // Userspace draws from the records of both families.
        if appended_len > 0 || fixed > limit || limit > MOST {
            return None;
        }
        given = (limit - fixed).checked_div(record_len)?;
    }
    let reply_len = fixed + given * record_len + appended_len;
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
    let answers = given + appended.len();
    message[4..12].copy_from_slice(&[
        0,
        1,
        (answers >> 8) as u8,
        answers as u8,
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
        appended,
        opt,
        ip,
        v6,
        partial,
    })
}

/// The answer to a query, before it is fitted to the client's limit.
struct Answer {
    /// Header and question of the query.
    question: Vec<u8>,
    /// The client's limit.
    limit: usize,
    /// The OPT of the reply.
    opt: Vec<u8>,
    /// Records to choose from.
    records: Vec<Vec<u8>>,
    /// AAAA records of a reply to ANY, given as a whole or not at all.
    appended: Vec<Vec<u8>>,
    rcode: u8,
    policy: Option<AnswerPolicy>,
}

/// Looks up the answer to a query.
fn answer(world: &World, is_first: bool, message: &[u8]) -> Option<Answer> {
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
            if is_first {
                return None;
            }
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
    let is_long = published.v4.len() > FIRST_V4 || published.v6.len() > FIRST_V6;
    if is_first && (is_long || published.policy.is_some() || qtype == 255) {
        return None;
    }
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
    let v4 = published.v4.iter().map(|ip| record(1, &ip.octets()));
    let v6 = published.v6.iter().map(|ip| record(28, &ip.octets()));
    let (records, appended, rcode) = match qtype {
        1 => (v4.collect(), vec![], published.rcode),
        28 => (v6.collect(), vec![], published.rcode),
        255 if published.policy.is_none() => (v4.collect(), v6.collect(), published.rcode),
        41 | 43 | 128..=255 => return None,
        _ => (vec![], vec![], published.rcode_other),
    };
    Some(Answer {
        question,
        limit,
        opt,
        records,
        appended,
        rcode,
        policy: published.policy,
    })
}

/// Compares a frame with the expected reply.
pub(crate) fn compare(expected: &Reply, frame: &[u8]) -> Result<(), String> {
    let Reply {
        start,
        records,
        given,
        appended,
        opt,
        ip,
        v6,
        partial,
    } = expected;
    let record_len = records.first().map_or(0, Vec::len);
    let len = expected.frame_len();
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
    let (answers, found_opt) = frame[start.len()..].split_at(len - start.len() - opt.len());
    if found_opt != opt {
        return Err(format!("OPT {found_opt:02x?} instead of {opt:02x?}"));
    }
    let (answers, more) = answers.split_at(given * record_len);
    compare_records(records, answers)?;
    compare_records(appended, more)
}

/// Compares records with those to choose from, which have the same length; each may come once.
fn compare_records(records: &[Vec<u8>], answers: &[u8]) -> Result<(), String> {
    let record_len = records.first().map_or(0, Vec::len);
    let mut left = records.to_vec();
    for found in answers.chunks(record_len.max(1)) {
        match left.iter().position(|record| record == found) {
            Some(place) => drop(left.swap_remove(place)),
            None => return Err(format!("record {found:02x?} unexpected, or duplicate")),
        }
    }
    Ok(())
}
