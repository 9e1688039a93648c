//! Matches of x_tables (`linux/netfilter/xt_*.h`), for legacy tables and `iptables-nft`.

use std::net::IpAddr;

use super::{
    packet::{LENGTH, Packet},
    walk::Meets,
};

/// Bits of connection states (`XT_CONNTRACK_STATE_BIT`): invalid, established, related, new.
const ESTABLISHED: u16 = 1 << 1;
const NEW: u16 = 1 << 3;

/// Returns whether a packet meets a match of this name and revision.
pub(super) fn meets(name: &str, revision: u8, info: &[u8], packet: &Packet) -> Meets {
    match name {
        // These always hold, or depend on known properties of the packet only.
        "comment" => Meets::Yes,
        "udp" => ports(info, packet),
        "tcp" | "sctp" | "dccp" | "icmp" | "icmp6" | "esp" | "ah" => Meets::No,
        "multiport" => multiport(revision, info, packet),
        "state" => state(info, packet),
        "conntrack" => conntrack(revision, info, packet),
        "addrtype" => addrtype(revision, info, packet),
        "iprange" => iprange(info, packet),
        "mark" => mark(info, packet),
        "length" => length(info),
        "pkttype" => pkttype(info),
        // A plain packet passes the reverse path check.
        "rpfilter" => Meets::known(info.first().is_none_or(|flags| flags & 8 == 0)),
        // Decided for hosts without IPsec policies; with policies the interface is refused anyway.
        "policy" => policy(info),
        "limit" | "hashlimit" | "quota" | "connlimit" | "connbytes" | "statistic" | "recent" | "rateest"
        | "nfacct" | "quota2" => Meets::Rate,
        _ => Meets::Maybe,
    }
}

/// Reads two bytes in native order.
pub(super) fn u16_at(info: &[u8], at: usize) -> Option<u16> {
    info.get(at..)?.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes))
}

/// Reads four bytes in native order.
pub(super) fn u32_at(info: &[u8], at: usize) -> Option<u32> {
    info.get(at..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

/// Converts a known condition; unknown if the information is too short.
fn known(truth: Option<bool>) -> Meets {
    truth.map_or(Meets::Maybe, Meets::known)
}

/// Evaluates `struct xt_udp`: two ranges of ports, and flags that invert them.
fn ports(info: &[u8], packet: &Packet) -> Meets {
    let within = |at: usize, port: u16, invert: u8| {
        let range = u16_at(info, at)?..=u16_at(info, at + 2)?;
        Some(range.contains(&port) != (info.get(8)? & invert != 0))
    };
    let both = || Some(within(0, packet.from.port(), 1)? && within(4, packet.to.port(), 2)?);
    known(both())
}

/// Returns the only destination port that `struct xt_udp` matches.
pub(super) fn only_udp_port(info: &[u8]) -> Option<u16> {
    let (first, last) = (u16_at(info, 4)?, u16_at(info, 6)?);
    (first == last && info.get(8)? & 2 == 0).then_some(first)
}

fn multiport(revision: u8, info: &[u8], packet: &Packet) -> Meets {
    if revision != 1 {
        return Meets::Maybe;
    }
    let matches = || {
        let (flags, count) = (*info.first()?, usize::from(*info.get(1)?).min(15));
        let port = |index: usize| u16_at(info, 2 + index * 2);
        let is_range = |index: usize| info.get(32 + index).map(|flag| *flag != 0);
        let listed = |wanted: u16| {
            let mut index = 0;
            while index < count {
                let first = port(index)?;
                let last = if is_range(index)? { port(index + 1)? } else { first };
                if (first..=last).contains(&wanted) {
                    return Some(true);
                }
                index += if is_range(index)? { 2 } else { 1 };
            }
            Some(false)
        };
        let (source, destination) = (listed(packet.from.port())?, listed(packet.to.port())?);
        let found = match flags {
            0 => source,
            1 => destination,
            _ => source || destination,
        };
        Some(found != (*info.get(47)? != 0))
    };
    known(matches())
}

/// Returns the state bit of the packet's flow; `untracked` is the bit for untracked packets.
fn state_bit(packet: &Packet, untracked: u16) -> u16 {
    match packet {
        Packet { untracked: true, .. } => untracked,
        Packet { established: true, .. } => ESTABLISHED,
        _ => NEW,
    }
}

fn state(info: &[u8], packet: &Packet) -> Meets {
    known(u32_at(info, 0).map(|mask| mask & u32::from(state_bit(packet, 1 << 6)) != 0))
}

/// Evaluates `struct xt_conntrack_mtinfo1` to `3`.
fn conntrack(revision: u8, info: &[u8], packet: &Packet) -> Meets {
    const STATE: u16 = 1;
    const STATUS: u16 = 1 << 6;
    const DIRECTION: u16 = 1 << 12;
    const STATE_ALIAS: u16 = 1 << 13;
    let read = || {
        let (flags, inverted) = (u16_at(info, 146)?, u16_at(info, 148)?);
        let (states, status) = match revision {
            1 => (u16::from(*info.get(150)?), u16::from(*info.get(151)?)),
            _ => (u16_at(info, 150)?, u16_at(info, 152)?),
        };
        Some((flags, inverted, states, status))
    };
    let Some((flags, inverted, states, status)) = read() else { return Meets::Maybe };
    let mut meets = Meets::Yes;
    if flags & STATE != 0 {
        let has = states & state_bit(packet, 1 << 8) != 0;
        meets = meets.and(Meets::known(has != (inverted & STATE != 0)));
    }
    if packet.untracked && flags & !(STATE | STATE_ALIAS) != 0 {
        return Meets::No;
    }
    if flags & STATUS != 0 {
        /// `IPS_SEEN_REPLY`, `IPS_ASSURED`, `IPS_CONFIRMED`: set during the life of a flow.
        const BY_AND_BY: u16 = 2 | 4 | 8;
        let status = match (status & BY_AND_BY, packet.established) {
            (0, _) => Meets::known(inverted & STATUS != 0),
            _ => Meets::Maybe,
        };
        meets = meets.and(status);
    }
    if flags & DIRECTION != 0 {
        let original = !packet.established;
        meets = meets.and(Meets::known(original != (inverted & DIRECTION != 0)));
    }
    if flags & !(STATE | STATUS | DIRECTION | STATE_ALIAS) != 0 {
        meets = meets.and(Meets::Maybe);
    }
    meets
}

/// Evaluates `struct xt_addrtype_info_v1`, or `xt_addrtype_info` for revision 0.
fn addrtype(revision: u8, info: &[u8], packet: &Packet) -> Meets {
    const UNICAST: u16 = 1 << 1;
    const LOCAL: u16 = 1 << 2;
    let of = |is_ours: bool| if is_ours { LOCAL } else { UNICAST };
    let matches = || {
        let (source, destination, flags) = (u16_at(info, 0)?, u16_at(info, 2)?, u32_at(info, 4)?);
        let (invert_source, invert_destination) = match revision {
            0 => (flags != 0, u32_at(info, 8)? != 0),
            _ => (flags & 1 != 0, flags & 2 != 0),
        };
        // The result then depends on the interface that has the address.
        if revision != 0 && flags & 0xc != 0 {
            return None;
        }
        let source = source == 0 || (source & of(packet.from_us) != 0) != invert_source;
        let destination = destination == 0 || (destination & of(packet.to_us) != 0) != invert_destination;
        Some(source && destination)
    };
    known(matches())
}

fn iprange(info: &[u8], packet: &Packet) -> Meets {
    let within = |address: IpAddr, at: usize| match address {
        IpAddr::V4(ip) => {
            let bound = |at: usize| info.get(at..)?.first_chunk::<4>().copied();
            Some((bound(at)?..=bound(at + 16)?).contains(&ip.octets()))
        }
        IpAddr::V6(ip) => {
            let bound = |at: usize| info.get(at..)?.first_chunk::<16>().copied();
            Some((bound(at)?..=bound(at + 16)?).contains(&ip.octets()))
        }
    };
    let matches = || {
        let flags = *info.get(64)?;
        let source = flags & 1 == 0 || within(packet.from.ip(), 0)? != (flags & 0x10 != 0);
        let destination = flags & 2 == 0 || within(packet.to.ip(), 32)? != (flags & 0x20 != 0);
        Some(source && destination)
    };
    known(matches())
}

fn mark(info: &[u8], packet: &Packet) -> Meets {
    let matches = || {
        let (mark, mask, invert) = (u32_at(info, 0)?, u32_at(info, 4)?, *info.get(8)? != 0);
        Some((packet.mark? & mask == mark) != invert)
    };
    known(matches())
}

fn length(info: &[u8]) -> Meets {
    let matches = || {
        let range = u16_at(info, 0)?..=u16_at(info, 2)?;
        Some(range.contains(&(LENGTH as u16)) != (*info.get(4)? != 0))
    };
    known(matches())
}

/// Evaluates `struct xt_pkttype_info`: the type, and whether to invert the match.
fn pkttype(info: &[u8]) -> Meets {
    known(u32_at(info, 0).zip(u32_at(info, 4)).map(|(kind, invert)| (kind == 0) != (invert != 0)))
}

/// Evaluates `struct xt_policy_info`: four elements, then flags, of which bit 2 means "none".
fn policy(info: &[u8]) -> Meets {
    known(u16_at(info, 4 * 76).map(|flags| flags & 4 != 0))
}
