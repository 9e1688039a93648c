//! Matches and targets of x_tables (`linux/netfilter/xt_*.h`), for legacy tables and `iptables-nft`.

use std::{
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
};

use super::{
    facts::Part,
    walk::{Action, Device, Mark, Meets, NatGoal, Open, Packet, QUERY_LENGTHS, REPLY_LENGTHS},
};
use crate::attach::netlink::{address_at, array_at};

/// Bits of connection states (`XT_CONNTRACK_STATE_BIT`): invalid, established, related, new.
const ESTABLISHED: u16 = 1 << 1;
const NEW: u16 = 1 << 3;

enum Evaluation {
    /// It never holds for a plain UDP datagram.
    Never,
    /// It depends on the number of earlier packets.
    Rate,
    /// Only the kernel can evaluate it.
    Kernel,
    /// `None`: only the kernel can evaluate these parameters.
    Computed(fn(&Match<'_>) -> Option<Meets>),
}

/// A match with its parameters, and the packet.
struct Match<'a> {
    revision: u8,
    info: &'a [u8],
    packet: &'a Packet,
}

/// The matches of Linux 6.18.
const MATCHES: [(&str, Evaluation); 66] = {
    use Evaluation::{Computed, Kernel, Never, Rate};
    [
        ("comment", Computed(|_| Some(Meets::Yes))),
        ("udp", Computed(ports)),
        ("multiport", Computed(multiport)),
        ("state", Computed(state)),
        ("conntrack", Computed(conntrack)),
        ("addrtype", Computed(addrtype)),
        ("iprange", Computed(iprange)),
        ("mark", Computed(mark)),
        ("connmark", Computed(connmark)),
        ("connlabel", Computed(connlabel)),
        ("helper", Computed(helper)),
        ("length", Computed(length)),
        ("pkttype", Computed(pkttype)),
        ("dscp", Computed(dscp)),
        ("tos", Computed(tos)),
        ("physdev", Computed(physdev)),
        ("socket", Computed(socket)),
        ("rpfilter", Computed(rpfilter)),
        ("policy", Computed(policy)),
        ("set", Computed(set)),
        ("owner", Computed(owner)),
        ("limit", Rate),
        ("hashlimit", Rate),
        ("quota", Rate),
        ("quota2", Rate),
        ("connlimit", Rate),
        ("connbytes", Rate),
        ("statistic", Rate),
        ("recent", Rate),
        ("rateest", Rate),
        ("nfacct", Rate),
        ("tcp", Never),
        ("tcpmss", Never),
        ("osf", Never),
        ("sctp", Never),
        ("dccp", Never),
        ("udplite", Never),
        ("icmp", Never),
        ("icmp6", Never),
        ("icmpv6", Never),
        ("esp", Never),
        ("ah", Never),
        ("ipcomp", Never),
        ("mh", Never),
        // Extension headers of IPv6, which a plain query does not have.
        ("rt", Never),
        ("frag", Never),
        ("hbh", Never),
        ("dst", Never),
        ("srh", Never),
        ("ipv6header", Kernel),
        ("eui64", Kernel),
        ("bpf", Kernel),
        ("cgroup", Kernel),
        ("cluster", Kernel),
        ("cpu", Kernel),
        ("devgroup", Kernel),
        ("ecn", Kernel),
        ("hl", Kernel),
        ("ipvs", Kernel),
        ("l2tp", Kernel),
        ("mac", Kernel),
        ("realm", Kernel),
        ("string", Kernel),
        ("time", Kernel),
        ("ttl", Kernel),
        ("u32", Kernel),
    ]
};

/// Returns whether a packet meets a match of this name and revision. A match unknown here counts as one that
/// only the kernel can evaluate.
pub(super) fn meets(name: &str, revision: u8, info: &[u8], packet: &Packet) -> Meets {
    let Some((name, evaluation)) = MATCHES.iter().find(|(known, _)| *known == name) else {
        return Meets::Maybe("a match unknown to the server");
    };
    match evaluation {
        Evaluation::Never => Meets::No,
        Evaluation::Rate => Meets::Rate,
        Evaluation::Kernel => Meets::Maybe(name),
        Evaluation::Computed(evaluate) => evaluate(&Match {
            revision,
            info,
            packet,
        })
        .unwrap_or(Meets::Maybe(name)),
    }
}

/// Reads two bytes in native order.
pub(super) fn u16_at(info: &[u8], at: usize) -> Option<u16> {
    array_at(info, at).map(u16::from_ne_bytes)
}

/// Reads four bytes in native order.
pub(super) fn u32_at(info: &[u8], at: usize) -> Option<u32> {
    array_at(info, at).map(u32::from_ne_bytes)
}

const ALL_PORTS: RangeInclusive<u16> = 0..=u16::MAX;

/// Reads a range of ports in native order.
fn port_range(info: &[u8], at: usize) -> Option<RangeInclusive<u16>> {
    Some(u16_at(info, at)?..=u16_at(info, at + 2)?)
}

/// Evaluates `struct xt_udp`: two ranges of ports, and flags that invert them.
fn ports(&Match { info, packet, .. }: &Match<'_>) -> Option<Meets> {
    const INVERT_SOURCE: u8 = 1;
    const INVERT_DESTINATION: u8 = 2;
    let sources = port_range(info, 0)?;
    let destinations = port_range(info, 4)?;
    let inverted = *info.get(8)?;
    let source = sources.contains(&packet.from.port()) != (inverted & INVERT_SOURCE != 0);
    let destination =
        destinations.contains(&packet.to.port()) != (inverted & INVERT_DESTINATION != 0);
    // `-m udp` without ports names all of them, which asks nothing of the client.
    Some(match packet.open {
        Open::Sender if sources != ALL_PORTS => Meets::Client.and(Meets::known(destination)),
        Open::Receiver if destinations != ALL_PORTS => Meets::Client.and(Meets::known(source)),
        Open::Neither | Open::Sender | Open::Receiver => Meets::known(source && destination),
    })
}

/// Returns the only destination port that `struct xt_udp` matches.
pub(super) fn only_udp_port(info: &[u8]) -> Option<u16> {
    let first = u16_at(info, 4)?;
    let last = u16_at(info, 6)?;
    (first == last && info.get(8)? & 2 == 0).then_some(first)
}

fn multiport(
    &Match {
        revision,
        info,
        packet,
    }: &Match<'_>,
) -> Option<Meets> {
    if revision != 1 {
        return None;
    }
    let flags = *info.first()?;
    let source = lists_port(info, packet.from.port())?;
    let destination = lists_port(info, packet.to.port())?;
    // `XT_MULTIPORT_SOURCE`, `_DESTINATION`, `_EITHER`: of either, the known port may suffice.
    let found = match (flags, packet.open) {
        (0, Open::Sender) | (1, Open::Receiver) => return Some(Meets::Client),
        (2.., Open::Sender) if !destination => return Some(Meets::Client),
        (2.., Open::Receiver) if !source => return Some(Meets::Client),
        (0, _) => source,
        (1, _) => destination,
        _ => source || destination,
    };
    Some(Meets::known(found != (*info.get(47)? != 0)))
}

/// Returns whether `struct xt_multiport_v1` has this port.
fn lists_port(info: &[u8], wanted: u16) -> Option<bool> {
    const MAX_PORTS: usize = 15;
    let count = usize::from(*info.get(1)?).min(MAX_PORTS);
    let mut index = 0;
    while index < count {
        let first = u16_at(info, 2 + index * 2)?;
        // Marks the first port of a range, whose last one follows.
        let is_range = *info.get(32 + index)? != 0;
        let last = if is_range {
            u16_at(info, 4 + index * 2)?
        } else {
            first
        };
        if (first..=last).contains(&wanted) {
            return Some(true);
        }
        index += if is_range { 2 } else { 1 };
    }
    Some(false)
}

/// Returns the state bit of the packet's flow; `untracked` is the bit for untracked packets.
pub(super) fn state_bit(packet: &Packet, untracked: u16) -> u16 {
    match packet {
        Packet {
            untracked: true, ..
        } => untracked,
        Packet {
            established: true, ..
        } => ESTABLISHED,
        _ => NEW,
    }
}

fn state(&Match { info, packet, .. }: &Match<'_>) -> Option<Meets> {
    Some(Meets::known(
        u32_at(info, 0)? & u32::from(state_bit(packet, 1 << 6)) != 0,
    ))
}

/// Evaluates `struct xt_conntrack_mtinfo1` to `3`.
fn conntrack(
    &Match {
        revision,
        info,
        packet,
    }: &Match<'_>,
) -> Option<Meets> {
    const NAME: &str = "conntrack";
    const STATE: u16 = 1;
    const STATUS: u16 = 1 << 6;
    const DIRECTION: u16 = 1 << 12;
    const STATE_ALIAS: u16 = 1 << 13;
    let flags = u16_at(info, 146)?;
    let inverted = u16_at(info, 148)?;
    let (states, status) = match revision {
        1 => (u16::from(*info.get(150)?), u16::from(*info.get(151)?)),
        _ => (u16_at(info, 150)?, u16_at(info, 152)?),
    };
    let mut meets = Meets::Yes;
    if flags & STATE != 0 {
        let has = states & state_bit(packet, 1 << 8) != 0;
        meets = meets.and(Meets::known(has != (inverted & STATE != 0)));
    }
    if packet.untracked && flags & !(STATE | STATE_ALIAS) != 0 {
        return Some(Meets::No);
    }
    if flags & STATUS != 0 {
        /// `IPS_SEEN_REPLY`, `IPS_ASSURED`, `IPS_CONFIRMED`: set during the life of a flow.
        const BY_AND_BY: u16 = 2 | 4 | 8;
        let status = match (status & BY_AND_BY, packet.established) {
            (0, _) => Meets::known(inverted & STATUS != 0),
            _ => Meets::Maybe(NAME),
        };
        meets = meets.and(status);
    }
    if flags & DIRECTION != 0 {
        let original = !packet.established;
        meets = meets.and(Meets::known(original != (inverted & DIRECTION != 0)));
    }
    if flags & !(STATE | STATUS | DIRECTION | STATE_ALIAS) != 0 {
        meets = meets.and(Meets::Maybe(NAME));
    }
    Some(meets)
}

/// Evaluates `struct xt_addrtype_info_v1`, or `xt_addrtype_info` for revision 0.
fn addrtype(
    &Match {
        revision,
        info,
        packet,
    }: &Match<'_>,
) -> Option<Meets> {
    const UNICAST: u16 = 1 << 1;
    const LOCAL: u16 = 1 << 2;
    let source_type = if packet.from_us { LOCAL } else { UNICAST };
    let destination_type = if packet.to_us { LOCAL } else { UNICAST };
    let source = u16_at(info, 0)?;
    let destination = u16_at(info, 2)?;
    let flags = u32_at(info, 4)?;
    let (invert_source, invert_destination) = match revision {
        0 => (flags != 0, u32_at(info, 8)? != 0),
        _ => (flags & 1 != 0, flags & 2 != 0),
    };
    // The result then depends on the interface that has the address.
    if revision != 0 && flags & 0xc != 0 {
        return None;
    }
    let source = source == 0 || (source & source_type != 0) != invert_source;
    let destination =
        destination == 0 || (destination & destination_type != 0) != invert_destination;
    Some(Meets::known(source && destination))
}

/// Evaluates `struct xt_iprange_mtinfo`: first and last source, first and last destination, flags.
fn iprange(&Match { info, packet, .. }: &Match<'_>) -> Option<Meets> {
    let v6 = packet.is_v6();
    let sources = address_at(info, 0, v6)?..=address_at(info, 16, v6)?;
    let destinations = address_at(info, 32, v6)?..=address_at(info, 48, v6)?;
    let flags = *info.get(64)?;
    let names_client = match packet.open {
        Open::Neither => false,
        Open::Sender => flags & 1 != 0,
        Open::Receiver => flags & 2 != 0,
    };
    if names_client {
        return Some(Meets::Client);
    }
    let source = flags & 1 == 0 || sources.contains(&packet.from.ip()) != (flags & 0x10 != 0);
    let destination =
        flags & 2 == 0 || destinations.contains(&packet.to.ip()) != (flags & 0x20 != 0);
    Some(Meets::known(source && destination))
}

/// Evaluates `struct xt_mark_mtinfo1`.
fn mark(&Match { info, packet, .. }: &Match<'_>) -> Option<Meets> {
    let meets = packet.mark.is(u32_at(info, 0)?, u32_at(info, 4)?, "mark");
    Some(meets.inverted(*info.get(8)? != 0))
}

/// Evaluates `struct xt_connmark_mtinfo1`.
fn connmark(&Match { info, packet, .. }: &Match<'_>) -> Option<Meets> {
    if packet.untracked {
        return Some(Meets::No);
    }
    let meets = packet
        .flow_mark
        .is(u32_at(info, 0)?, u32_at(info, 4)?, "connmark");
    Some(meets.inverted(*info.get(8)? != 0))
}

/// Evaluates `struct xt_connlabel_mtinfo`: a new flow has no labels.
fn connlabel(&Match { info, packet, .. }: &Match<'_>) -> Option<Meets> {
    const INVERT: u16 = 1;
    const SET: u16 = 2;
    let options = u16_at(info, 2)?;
    (options & SET == 0 && !packet.established).then_some(Meets::known(options & INVERT != 0))
}

/// Evaluates `struct xt_helper_info`: no helper follows flows of DNS.
fn helper(&Match { info, .. }: &Match<'_>) -> Option<Meets> {
    Some(Meets::known(u32_at(info, 0)? != 0))
}

/// Evaluates `struct xt_length_info` if it treats all queries, or all replies, alike.
fn length(&Match { info, packet, .. }: &Match<'_>) -> Option<Meets> {
    let from = u16_at(info, 0)?;
    let to = u16_at(info, 2)?;
    let invert = *info.get(4)? != 0;
    let lengths = if packet.established {
        REPLY_LENGTHS
    } else {
        QUERY_LENGTHS
    };
    if from > *lengths.end() || to < *lengths.start() {
        return Some(Meets::known(invert));
    }
    (from <= *lengths.start() && to >= *lengths.end()).then_some(Meets::known(!invert))
}

/// Evaluates `struct xt_pkttype_info`: the type, and whether to invert the match.
fn pkttype(&Match { info, .. }: &Match<'_>) -> Option<Meets> {
    Some(Meets::known(
        (u32_at(info, 0)? == 0) != (u32_at(info, 4)? != 0),
    ))
}

/// Evaluates `struct xt_dscp_info`: plain queries and replies have DSCP 0.
fn dscp(&Match { info, .. }: &Match<'_>) -> Option<Meets> {
    Some(Meets::known((*info.first()? == 0) != (*info.get(1)? != 0)))
}

/// Evaluates `struct xt_tos_match_info`: mask, value, inversion.
fn tos(&Match { revision, info, .. }: &Match<'_>) -> Option<Meets> {
    if revision != 1 {
        return None;
    }
    Some(Meets::known((*info.get(1)? == 0) != (*info.get(2)? != 0)))
}

/// Evaluates `struct xt_physdev_info`: only packets of a bridge have a physical device.
fn physdev(&Match { info, packet, .. }: &Match<'_>) -> Option<Meets> {
    for device in [&packet.input, &packet.output].into_iter().flatten() {
        // Which port it is, only the kernel knows.
        if device.is_bridge {
            return None;
        }
    }
    let inverted = *info.get(64)?;
    let wanted = *info.get(65)?;
    Some(Meets::known(wanted & !inverted & 0x1f == 0))
}

/// Evaluates `struct xt_socket_mtinfo1` to `3`: the server's socket is not transparent.
fn socket(&Match { revision, info, .. }: &Match<'_>) -> Option<Meets> {
    const TRANSPARENT: u8 = 1;
    (revision > 0 && info.first()? & TRANSPARENT != 0).then_some(Meets::No)
}

/// Evaluates `struct xt_rpfilter_info`: a plain packet passes the reverse path check.
fn rpfilter(&Match { info, packet, .. }: &Match<'_>) -> Option<Meets> {
    if packet.open == Open::Sender {
        return Some(Meets::Client);
    }
    Some(Meets::known(
        info.first().is_none_or(|flags| flags & 8 == 0),
    ))
}

/// Evaluates `struct xt_policy_info`: four elements, then flags, of which bit 2 means "none". Decided for hosts
/// without IPsec policies; with policies the interface is refused anyway.
fn policy(&Match { info, .. }: &Match<'_>) -> Option<Meets> {
    Some(Meets::known(u16_at(info, 4 * 76)? & 4 != 0))
}

/// Evaluates `struct xt_set_info_match_v1` to `4`, by asking the kernel.
fn set(
    &Match {
        revision,
        info,
        packet,
    }: &Match<'_>,
) -> Option<Meets> {
    const INVERT: u8 = 1;
    const RETURN_NOMATCH: u32 = 1 << 7;
    let compares_counters = match revision {
        1 | 2 => false,
        3 => *info.get(8)? != 0 || *info.get(24)? != 0 || u32_at(info, 40)? & RETURN_NOMATCH != 0,
        4 => *info.get(16)? != 0 || *info.get(32)? != 0 || u32_at(info, 40)? & RETURN_NOMATCH != 0,
        _ => return None,
    };
    let dimensions = *info.get(2)?;
    let flags = *info.get(3)?;
    if compares_counters || u32::from(flags) & RETURN_NOMATCH != 0 {
        return None;
    }
    for dimension in 1..=dimensions.min(6) {
        // The dimension's bit is set if it is the packet's source.
        let side = if flags & 1 << dimension != 0 {
            Open::Sender
        } else {
            Open::Receiver
        };
        if packet.open == side {
            return Some(Meets::Client);
        }
    }
    let source = part(packet.from, packet.input.as_ref());
    let destination = part(packet.to, packet.output.as_ref());
    let is_member =
        packet
            .facts
            .ipset(u16_at(info, 0)?, (dimensions, flags), &source, &destination)?;
    Some(Meets::known(is_member != (flags & INVERT != 0)))
}

fn part(endpoint: SocketAddr, device: Option<&Device>) -> Part {
    Part {
        endpoint,
        device: device.map_or_else(String::new, |device| device.name().to_owned()),
    }
}

/// Evaluates `struct xt_owner_match_info` for the server's replies: ranges of users and groups, what to compare, what to
/// invert. Of other packets only the kernel knows the socket.
fn owner(&Match { info, packet, .. }: &Match<'_>) -> Option<Meets> {
    const USER: u8 = 1;
    const SOCKET: u8 = 4;
    let compared = *info.get(16)?;
    let inverted = *info.get(17)?;
    if !packet.is_of_server() {
        return None;
    }
    // A reply has a socket.
    if compared & inverted & SOCKET != 0 {
        return Some(Meets::No);
    }
    if compared & USER != 0 {
        let user = packet.facts.owner(packet.from)?;
        let is_within = (u32_at(info, 0)?..=u32_at(info, 4)?).contains(&user);
        if is_within == (inverted & USER != 0) {
            return Some(Meets::No);
        }
    }
    // The kernel does not tell the group of a socket.
    (compared & !(USER | SOCKET) == 0).then_some(Meets::Yes)
}

pub(super) struct Target<'a> {
    pub(super) name: &'a str,
    pub(super) revision: u8,
    pub(super) info: &'a [u8],
    /// Whether its rule is one of ip6tables.
    pub(super) v6: bool,
}

impl Target<'_> {
    /// Returns its action on a packet to this address; `None`: any packet.
    pub(super) fn action(&self, to: Option<SocketAddr>) -> Action {
        match self.name {
            "REJECT" => Action::Drop,
            "DNAT" | "REDIRECT" => {
                if to.is_some_and(|to| {
                    self.new_target()
                        .is_some_and(|target| target.is_exactly(to))
                }) {
                    Action::Accept
                } else {
                    Action::Divert
                }
            }
            "NETMAP" | "TPROXY" | "SYNPROXY" | "DNPT" => Action::Divert,
            "MASQUERADE" | "SNAT" | "SNPT" => Action::Translate,
            // Later rules still see the packet; these targets change nothing that matters here.
            "LOG" | "NFLOG" | "ULOG" | "TRACE" | "AUDIT" | "MARK" | "CONNMARK" | "CONNSECMARK"
            | "SECMARK" | "CT" | "NOTRACK" | "DSCP" | "TOS" | "TTL" | "HL" | "ECN" | "CHECKSUM"
            | "CLASSIFY" | "TCPMSS" | "TCPOPTSTRIP" | "SET" | "TEE" | "RATEEST" | "IDLETIMER"
            | "LED" | "HMARK" => Action::Continue,
            "NFQUEUE" | "QUEUE" => Action::Unknown("NFQUEUE"),
            "CLUSTERIP" => Action::Unknown("CLUSTERIP"),
            _ => Action::Unknown("a target unknown to the server"),
        }
    }

    /// Returns whether the target may redirect packets for other machines to this endpoint.
    pub(super) fn leads_to(&self, goal: NatGoal) -> bool {
        match self.name {
            "DNAT" | "REDIRECT" => self.new_target().is_none_or(|target| target.may_be(goal)),
            "NETMAP" => true,
            _ => false,
        }
    }

    /// Applies the target's changes to a packet that meets its rule, perhaps.
    pub(super) fn change(&self, meets: Meets, packet: &mut Packet) {
        let Packet {
            mark, flow_mark, ..
        } = *packet;
        let mut new_mark = mark;
        let mut new_flow_mark = flow_mark;
        match self.name {
            "MARK" => new_mark = self.marked(mark).unwrap_or(Mark::UNKNOWN),
            // A packet without connection tracking has no flow.
            "CONNMARK" if packet.untracked => {}
            "CONNMARK" => match self.flow_marked(mark, flow_mark) {
                Some(changed) => (new_mark, new_flow_mark) = changed,
                None => (new_mark, new_flow_mark) = (Mark::UNKNOWN, Mark::UNKNOWN),
            },
            "HMARK" => new_mark = Mark::UNKNOWN,
            // `struct xt_set_info_target_v3`: the third set may hold marks; 0xffff means none.
            "SET" if self.revision >= 3 && u16_at(self.info, 8) != Some(0xffff) => {
                new_mark = Mark::UNKNOWN
            }
            // `struct xt_ct_target_info`: flags, of which the first means notrack.
            "CT" if self.info.first().is_some_and(|flags| flags & 1 == 0) => {}
            "CT" | "NOTRACK" => packet.untracked |= meets == Meets::Yes,
            _ => {}
        }
        packet.mark.set(new_mark, meets);
        packet.flow_mark.set(new_flow_mark, meets);
    }

    /// Evaluates `struct xt_mark_tginfo2`: mark, mask.
    fn marked(&self, mark: Mark) -> Option<Mark> {
        if self.revision != 2 {
            return None;
        }
        let new = u32_at(self.info, 0)?;
        let mask = u32_at(self.info, 4)?;
        Some(mark.and(!mask).xor(Mark::known(new)))
    }

    /// Evaluates `struct xt_connmark_tginfo1` and `2`: returns the marks of packet and flow.
    fn flow_marked(&self, mark: Mark, flow_mark: Mark) -> Option<(Mark, Mark)> {
        const SET: u8 = 0;
        const SAVE: u8 = 1;
        let new = u32_at(self.info, 0)?;
        let flow_mask = u32_at(self.info, 4)?;
        let mask = u32_at(self.info, 8)?;
        let mode = match self.revision {
            1 => *self.info.get(12)?,
            // Shifted marks are not evaluated.
            2 if *self.info.get(13)? == 0 => *self.info.get(14)?,
            _ => return None,
        };
        Some(match mode {
            SET => (mark, flow_mark.and(!flow_mask).xor(Mark::known(new))),
            SAVE => (mark, flow_mark.and(!flow_mask).xor(mark.and(mask))),
            _ => (mark.and(!mask).xor(flow_mark.and(flow_mask)), flow_mark),
        })
    }

    fn new_target(&self) -> Option<NewTarget> {
        NewTarget::read(self.name, self.revision, self.info, self.v6)
    }
}

/// The destination of a NAT rule.
#[derive(Debug)]
struct NewTarget {
    /// Range of addresses; `None`: the address stays, or becomes a local one.
    addresses: Option<(IpAddr, IpAddr)>,
    /// Range of ports; `None`: the port stays.
    ports: Option<(u16, u16)>,
    /// Whether the new address is the interface's, or 127.0.0.1 and ::1 at OUTPUT.
    is_redirect: bool,
}

impl NewTarget {
    fn read(name: &str, revision: u8, info: &[u8], v6: bool) -> Option<Self> {
        let is_redirect = name == "REDIRECT";
        // The offsets of flags, first and last address, and ports, which are in network order.
        let [flags_at, first_at, last_at, ports_at] = if !v6 && (is_redirect || revision == 0) {
            // `struct nf_nat_ipv4_multi_range_compat`: a count, then one range.
            [4, 8, 12, 16]
        } else {
            // `struct nf_nat_range`, `struct nf_nat_range2`: 16 bytes for each address.
            [0, 4, 20, 36]
        };
        let flags = u32_at(info, flags_at)?;
        let first_port = u16::from_be_bytes(array_at(info, ports_at)?);
        let last_port = u16::from_be_bytes(array_at(info, ports_at + 2)?);
        let mut target = Self {
            addresses: None,
            ports: None,
            is_redirect,
        };
        // `NF_NAT_RANGE_MAP_IPS`, which REDIRECT leaves to the kernel, `NF_NAT_RANGE_PROTO_SPECIFIED`.
        if flags & 1 != 0 && !is_redirect {
            target.addresses = Some((
                address_at(info, first_at, v6)?,
                address_at(info, last_at, v6)?,
            ));
        }
        if flags & 2 != 0 {
            target.ports = Some((first_port, last_port));
        }
        Some(target)
    }

    /// Returns whether the rule leaves every packet's destination unchanged.
    fn is_exactly(&self, to: SocketAddr) -> bool {
        !self.is_redirect
            && self
                .addresses
                .is_none_or(|range| range == (to.ip(), to.ip()))
            && self
                .ports
                .is_none_or(|range| range == (to.port(), to.port()))
    }

    /// Returns whether a packet for another machine may be redirected to this endpoint.
    fn may_be(&self, goal: NatGoal) -> bool {
        let NatGoal {
            endpoint,
            by_redirect,
        } = goal;
        let port = self
            .ports
            .is_none_or(|(from, to)| (from..=to).contains(&endpoint.port()));
        let address = match self.addresses {
            Some((from, to)) => (from..=to).contains(&endpoint.ip()),
            None => self.is_redirect && by_redirect,
        };
        port && address
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::rules::{
        Facts, Objection,
        walk::{Action, Ends},
    };

    fn packet() -> Packet {
        let endpoint = "169.254.0.2:53".parse().unwrap();
        Packet::without_device([10, 255, 10, 2].into(), endpoint, &Facts::default())
    }

    /// Matches of Linux 6.18 for either family (`/proc/net/ip_tables_matches`, `ip6_tables_matches`).
    const OF_KERNEL: &str = "addrtype ah bpf cgroup cluster comment connbytes connlabel connlimit connmark conntrack \
        cpu dccp devgroup dscp dst ecn esp eui64 frag hashlimit hbh helper hl icmp icmp6 ipcomp iprange ipv6header \
        ipvs l2tp length limit mac mark mh multiport nfacct osf owner physdev pkttype policy quota rateest realm \
        recent rpfilter rt sctp set socket srh state statistic string tcp tcpmss time tos ttl u32 udp udplite";

    #[test]
    fn kernel_matches_are_known() {
        for name in OF_KERNEL.split_whitespace() {
            assert_ne!(
                meets(name, 1, &[], &packet()),
                meets("new", 1, &[], &packet()),
                "{name}"
            );
        }
    }

    #[test]
    fn truncated_parameters_are_undecided() {
        for (name, evaluation) in &MATCHES {
            let found = meets(name, 1, &[], &packet());
            match evaluation {
                Evaluation::Never => assert_eq!(found, Meets::No, "{name}"),
                Evaluation::Rate => assert_eq!(found, Meets::Rate, "{name}"),
                Evaluation::Computed(_) if ["comment", "rpfilter"].contains(name) => {}
                Evaluation::Kernel | Evaluation::Computed(_) => {
                    assert_eq!(found, Meets::Maybe(name))
                }
            }
        }
    }

    #[test]
    fn random_parameters_never_panic() {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..20_000 {
            let (name, _) = random.choice(&MATCHES).unwrap();
            let info: Vec<u8> = (0..random.usize(..320)).map(|_| random.u8(..)).collect();
            let _ = meets(name, random.u8(..5), &info, &packet());
        }
    }

    #[test]
    fn unknown_condition_before_drop_is_objection() {
        struct OneRule(Meets, Action);
        impl crate::attach::rules::walk::Chains for OneRule {
            fn decide(&mut self, _chain: usize, _rule: usize) -> Vec<(Meets, Action)> {
                vec![(self.0, self.1)]
            }
            fn rules(&mut self, _chain: usize) -> usize {
                1
            }
        }
        let objection = |meets, action| {
            let ends: Ends =
                crate::attach::rules::walk::walk(&mut OneRule(meets, action), 0, Action::Accept);
            Objection::to(ends, Objection::Held)
        };
        let unknown = meets("new", 0, &[], &packet());
        let undecided = Some(Objection::Undecided("a match unknown to the server"));
        for action in [Action::Drop, Action::Divert] {
            assert_eq!(objection(unknown, action), undecided);
            assert_eq!(objection(Meets::Rate, action), Some(Objection::Limited));
            assert_eq!(objection(Meets::Yes, action), Some(Objection::Held));
            assert_eq!(objection(Meets::No, action), None);
        }
        assert_eq!(
            objection(unknown, Action::Accept),
            None,
            "either way it is delivered"
        );
        assert_eq!(
            objection(Meets::Yes, Action::Unknown("queue")),
            Some(Objection::Undecided("queue"))
        );
    }

    /// Targets of Linux 6.18 for either family, except the end of a chain (`/proc/net/ip_tables_targets`,
    /// `ip6_tables_targets`).
    const TARGETS_OF_KERNEL: &str = "AUDIT CHECKSUM CLASSIFY CONNMARK CONNSECMARK CT DNAT DNPT DSCP ECN HL HMARK IDLETIMER LED LOG \
        MARK MASQUERADE NETMAP NFLOG NFQUEUE NOTRACK RATEEST REDIRECT REJECT SECMARK SET SNAT SNPT SYNPROXY TCPMSS \
        TCPOPTSTRIP TEE TOS TPROXY TRACE TTL";

    #[test]
    fn kernel_targets_are_known() {
        let action = |name| {
            Target {
                name,
                revision: 0,
                info: &[],
                v6: true,
            }
            .action(None)
        };
        for name in TARGETS_OF_KERNEL.split_whitespace() {
            assert_ne!(action(name), action("NEW"), "{name}");
        }
        assert!(matches!(action("NEW"), Action::Unknown(_)));
    }
}
