//! Evaluates the expressions of nftables rules on a partially known packet.

use std::net::{IpAddr, SocketAddr};

use super::{
    matches::{self, u32_at},
    nft::{Found, Set, number},
    packet::{LENGTH, Packet},
    walk::{Action, Meets},
};
use crate::attach::netlink::{Attributes, text};

/// Size of all registers in bytes.
const REGISTERS: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Expression {
    name: String,
    data: Vec<u8>,
}

/// The verdict of a rule, or of an element of a verdict map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Plain(Action),
    /// Continues in the chain of this name, then returns.
    Jump(String),
    /// Continues in the chain of this name and does not return.
    Goto(String),
}

impl Verdict {
    /// Returns the target chain.
    pub(super) fn chain(&self) -> Option<&str> {
        match self {
            Self::Plain(_) => None,
            Self::Jump(name) | Self::Goto(name) => Some(name),
        }
    }
}

/// Parses `NFTA_RULE_EXPRESSIONS`, without counters and comments.
pub(super) fn expressions(list: &[u8]) -> Vec<Expression> {
    let read = |value: &[u8]| {
        let mut expression = Expression { name: String::new(), data: Vec::new() };
        for (attribute, value) in Attributes(value) {
            match attribute {
                1 => expression.name = text(value),
                2 => expression.data = value.to_vec(),
                _ => {}
            }
        }
        // A counter that packets advance must not look like a changed rule.
        (expression.name != "counter").then_some(expression)
    };
    Attributes(list).filter_map(|(_, value)| read(value)).collect()
}

/// Returns the value in `NFTA_DATA_VALUE`.
pub(super) fn value(data: &[u8]) -> Vec<u8> {
    Attributes(data).find(|(kind, _)| *kind == 1).map(|(_, value)| value.to_vec()).unwrap_or_default()
}

pub(super) fn verdict(data: &[u8]) -> Option<Verdict> {
    let (_, value) = Attributes(data).find(|(kind, _)| *kind == 2)?;
    let (mut code, mut chain) = (None, None);
    for (attribute, value) in Attributes(value) {
        match attribute {
            1 => code = number(value).map(u32::cast_signed),
            2 => chain = Some(text(value)),
            _ => {}
        }
    }
    // NF_DROP, NF_ACCEPT, NF_QUEUE; NFT_CONTINUE, NFT_BREAK, NFT_JUMP, NFT_GOTO, NFT_RETURN.
    Some(match (code?, chain) {
        (0, _) => Verdict::Plain(Action::Drop),
        (1, _) => Verdict::Plain(Action::Accept),
        (-1 | -2, _) => Verdict::Plain(Action::Continue),
        (-3, Some(chain)) => Verdict::Jump(chain),
        (-4, Some(chain)) => Verdict::Goto(chain),
        (-5, _) => Verdict::Plain(Action::Return),
        _ => Verdict::Plain(Action::Unknown),
    })
}

/// Evaluates a rule, expression by expression.
pub(super) struct Machine<'a, F> {
    /// The packet; `None`: any packet, so that every condition may hold.
    packet: Option<Packet>,
    /// Returns a set by its name.
    sets: F,
    /// The registers, byte by byte; `None`: unknown.
    registers: [Option<u8>; REGISTERS],
    /// Maps from which a register's value was looked up, by the register's first byte.
    mapped: Vec<(usize, &'a Set)>,
    /// Whether the conditions so far hold.
    meets: Meets,
    verdicts: Vec<Verdict>,
}

impl<'a, F: Fn(&str) -> Option<&'a Set>> Machine<'a, F> {
    pub(super) fn new(packet: &Packet, sets: F) -> Self {
        Self { packet: Some(packet.clone()), ..Self::blind(sets) }
    }

    pub(super) fn blind(sets: F) -> Self {
        Self {
            packet: None,
            sets,
            registers: [None; REGISTERS],
            mapped: Vec::new(),
            meets: Meets::Yes,
            verdicts: Vec::new(),
        }
    }

    /// Returns whether the conditions so far hold.
    pub(super) fn meets(&self) -> Meets {
        self.meets
    }

    /// Returns the possible verdicts of the rule, exactly one of which applies.
    pub(super) fn verdicts(&self) -> impl Iterator<Item = &Verdict> {
        self.verdicts.iter()
    }

    /// Applies the rule's changes to the packet, at the end of the rule.
    pub(super) fn leave(self, packet: &mut Packet) {
        if let Some(changed) = self.packet {
            *packet = changed;
        }
    }

    pub(super) fn step(&mut self, expression: &Expression) {
        let fields = Fields(&expression.data);
        match expression.name.as_str() {
            "meta" => self.meta(&fields),
            "payload" => self.payload(&fields),
            "ct" => self.ct(&fields),
            "fib" => self.fib(&fields),
            "cmp" => self.compare(&fields),
            "range" => self.range(&fields),
            "bitwise" => self.bitwise(&fields),
            "byteorder" => self.byteorder(&fields),
            "immediate" => self.immediate(&fields),
            "lookup" => self.lookup(&fields),
            "match" => {
                let name = fields.text(1);
                let revision = fields.number(2).unwrap_or(0) as u8;
                let info = fields.get(3).unwrap_or_default();
                let meets = match &self.packet {
                    Some(packet) => matches::meets(&name, revision, info, packet),
                    None => Meets::Maybe,
                };
                self.meets = self.meets.and(meets);
            }
            "target" => {
                let action = match fields.text(1).as_str() {
                    "REJECT" => Action::Drop,
                    "DNAT" | "REDIRECT" | "NETMAP" | "TPROXY" | "SYNPROXY" => Action::Divert,
                    "NFQUEUE" | "QUEUE" => Action::Unknown,
                    "MASQUERADE" | "SNAT" => Action::Translate,
                    "CT" | "NOTRACK" => {
                        let is_notrack = fields.text(1) == "NOTRACK"
                            || fields
                                .get(3)
                                .and_then(|info| info.first())
                                .is_some_and(|flags| flags & 1 != 0);
                        self.change(|packet, is_certain| packet.untracked |= is_notrack && is_certain);
                        Action::Continue
                    }
                    "MARK" | "CONNMARK" => {
                        self.change(|packet, _| packet.mark = None);
                        Action::Continue
                    }
                    _ => Action::Continue,
                };
                self.decide(action);
            }
            "limit" | "quota" | "connlimit" | "last" => self.meets = self.meets.and(Meets::Rate),
            "numgen" => {
                // The register held a value of the packet until then.
                self.forget(fields.register(1).unwrap_or(0), REGISTERS);
                self.meets = self.meets.and(Meets::Rate);
            }
            "dynset" => {
                // A meter: holds expressions for each element, such as limits.
                let is_meter = fields.get(7).is_some() || fields.get(10).is_some();
                self.meets = self.meets.and(if is_meter { Meets::Rate } else { Meets::Maybe });
            }
            "objref" => {
                // `NFT_OBJECT_QUOTA`, `NFT_OBJECT_LIMIT`, `NFT_OBJECT_CONNLIMIT`; an object chosen by a map
                // may be one of them.
                let meets = match fields.number(1) {
                    Some(2 | 4 | 5) | None => Meets::Rate,
                    Some(_) => Meets::Yes,
                };
                self.meets = self.meets.and(meets);
            }
            "reject" => self.decide(Action::Drop),
            "nat" => {
                // `NFT_NAT_DNAT`.
                if fields.number(1) != Some(1) {
                    self.decide(Action::Translate);
                } else {
                    let stays = self.packet.as_ref().map(|packet| packet.to);
                    let stays =
                        stays.is_some_and(|to| self.nat_target(&fields).is_some_and(|target| target == to));
                    self.decide(if stays { Action::Accept } else { Action::Divert });
                }
            }
            "redir" | "tproxy" | "fwd" | "synproxy" => self.decide(Action::Divert),
            "queue" => self.decide(Action::Unknown),
            "notrack" => self.change(|packet, is_certain| packet.untracked |= is_certain),
            "masq" => self.decide(Action::Translate),
            // These only observe or copy the packet.
            "log" | "dup" | "counter" | "flow_offload" => {}
            // Each has its destination register in another attribute.
            "rt" | "socket" | "hash" | "osf" | "xfrm" | "tunnel" | "exthdr" | "inner" => {
                self.forget(0, REGISTERS);
            }
            _ => {
                self.forget(0, REGISTERS);
                self.meets = self.meets.and(Meets::Maybe);
            }
        }
    }

    /// Adds a verdict, unless the rule continues.
    fn decide(&mut self, action: Action) {
        if action != Action::Continue {
            self.verdicts.push(Verdict::Plain(action));
        }
    }

    /// Applies a change to the packet; the closure's argument is whether the change is certain.
    fn change(&mut self, change: impl FnOnce(&mut Packet, bool)) {
        let is_certain = self.meets == Meets::Yes;
        if let Some(packet) = &mut self.packet {
            change(packet, is_certain);
        }
    }

    fn set(&mut self, register: Option<usize>, bytes: &[u8]) {
        let Some(at) = register else { return };
        self.mapped.retain(|(known, _)| *known != at);
        // Registers are padded to four bytes.
        let padded = bytes.len().next_multiple_of(4);
        for index in 0..padded {
            if let Some(place) = self.registers.get_mut(at + index) {
                *place = Some(bytes.get(index).copied().unwrap_or(0));
            }
        }
    }

    /// Marks `length` bytes from register byte `at` as unknown.
    fn forget(&mut self, at: usize, length: usize) {
        self.registers.iter_mut().skip(at).take(length).for_each(|byte| *byte = None);
    }

    /// Returns `length` bytes from register byte `at`, if all are known.
    fn get(&self, at: usize, length: usize) -> Option<Vec<u8>> {
        self.registers.get(at..at + length)?.iter().copied().collect()
    }

    fn meta(&mut self, fields: &Fields<'_>) {
        let key = fields.number(2);
        let Some(register) = fields.register(1) else {
            // The expression sets a value: a mark, or a priority.
            if key == Some(3) {
                let mark =
                    fields.register(3).and_then(|at| self.get(at, 4)).and_then(|bytes| u32_at(&bytes, 0));
                self.change(|packet, is_certain| packet.mark = mark.filter(|_| is_certain));
            }
            return;
        };
        self.forget(register, 16);
        let Some(packet) = self.packet.clone() else { return };
        let protocol: u16 = if packet.is_v6() { 0x86dd } else { 0x0800 };
        let name = |device: &Option<super::packet::Device>| {
            let mut bytes = [0; 16];
            for (place, byte) in bytes.iter_mut().zip(device.iter().flat_map(|device| device.name.bytes())) {
                *place = byte;
            }
            bytes
        };
        let index =
            |device: &Option<super::packet::Device>| device.as_ref().map_or(0, |device| device.ifindex);
        let layer = |device: &Option<super::packet::Device>| device.as_ref().map_or(0, |device| device.layer);
        let known: Option<Vec<u8>> = match key {
            Some(0) => Some(LENGTH.to_ne_bytes().to_vec()),
            Some(1) => Some(protocol.to_be_bytes().to_vec()),
            Some(2) => Some(vec![0; 4]),
            Some(3) => packet.mark.map(|mark| mark.to_ne_bytes().to_vec()),
            Some(4) => Some(index(&packet.input).to_ne_bytes().to_vec()),
            Some(5) => Some(index(&packet.output).to_ne_bytes().to_vec()),
            Some(6) => Some(name(&packet.input).to_vec()),
            Some(7) => Some(name(&packet.output).to_vec()),
            Some(8) => Some(layer(&packet.input).to_ne_bytes().to_vec()),
            Some(9) => Some(layer(&packet.output).to_ne_bytes().to_vec()),
            Some(15) => Some(vec![if packet.is_v6() { 10 } else { 2 }]),
            Some(16) => Some(vec![17]),
            // The packet type: addressed to this machine (`PACKET_HOST`).
            Some(19) => Some(vec![0]),
            _ => None,
        };
        if let Some(bytes) = known {
            self.set(Some(register), &bytes);
        }
    }

    fn payload(&mut self, fields: &Fields<'_>) {
        let Some(register) = fields.register(1) else { return };
        let length = fields.number(4).unwrap_or(0) as usize;
        self.forget(register, length.next_multiple_of(4));
        let Some(packet) = &self.packet else { return };
        let (base, offset) = (fields.number(2), fields.number(3).unwrap_or(0) as usize);
        let header = match base {
            Some(1) => network_header(packet),
            Some(2) => {
                let length = (LENGTH - 20) as u16;
                let ports = [packet.from.port(), packet.to.port(), length].map(u16::to_be_bytes).concat();
                ports.into_iter().map(Some).collect()
            }
            _ => Vec::new(),
        };
        let bytes: Option<Vec<u8>> =
            header.get(offset..offset + length).and_then(|bytes| bytes.iter().copied().collect());
        if let Some(bytes) = bytes {
            self.set(Some(register), &bytes);
        }
    }

    fn ct(&mut self, fields: &Fields<'_>) {
        let Some(register) = fields.register(1) else { return };
        self.forget(register, 16);
        let Some(packet) = &self.packet else { return };
        // `NF_CT_STATE_BIT`: established, new, untracked.
        let state: u32 = match packet {
            Packet { untracked: true, .. } => 64,
            Packet { established: true, .. } => 2,
            _ => 8,
        };
        let known = match fields.number(2) {
            Some(0) => Some(state.to_ne_bytes().to_vec()),
            // Original, reply.
            Some(1) => Some(vec![u8::from(packet.established)]),
            // Neither the packet's address nor that of its replies is translated; other status bits
            // may be set later.
            Some(2) if !packet.established => Some(vec![0; 4]),
            Some(3) => Some(vec![0; 4]),
            _ => None,
        };
        if let Some(bytes) = known {
            self.set(Some(register), &bytes);
        }
    }

    /// Evaluates `NFTA_FIB_*`, only for the type of an address.
    fn fib(&mut self, fields: &Fields<'_>) {
        let Some(register) = fields.register(1) else { return };
        self.forget(register, 16);
        let Some(packet) = &self.packet else { return };
        let (result, flags) = (fields.number(2), fields.number(3).unwrap_or(0));
        // `NFT_FIB_RESULT_ADDRTYPE`; flags 8 and 16 restrict the look-up to one interface.
        if result != Some(3) || flags & 0x18 != 0 {
            return;
        }
        let is_ours = if flags & 1 != 0 { packet.from_us } else { packet.to_us };
        // `RTN_LOCAL`, `RTN_UNICAST`.
        let kind: u32 = if is_ours { 2 } else { 1 };
        self.set(Some(register), &kind.to_ne_bytes());
    }

    fn compare(&mut self, fields: &Fields<'_>) {
        let wanted = fields.get(3).map(value).unwrap_or_default();
        let found = fields.register(1).and_then(|at| self.get(at, wanted.len()));
        let meets = match (found, fields.number(2)) {
            (Some(found), Some(operation)) => Meets::known(match operation {
                0 => found == wanted,
                1 => found != wanted,
                2 => found < wanted,
                3 => found <= wanted,
                4 => found > wanted,
                _ => found >= wanted,
            }),
            _ => Meets::Maybe,
        };
        self.meets = self.meets.and(meets);
    }

    fn range(&mut self, fields: &Fields<'_>) {
        let (from, to) =
            (fields.get(3).map(value).unwrap_or_default(), fields.get(4).map(value).unwrap_or_default());
        let meets = match fields.register(1).and_then(|at| self.get(at, from.len())) {
            Some(found) => Meets::known((from..=to).contains(&found) != (fields.number(2) == Some(1))),
            None => Meets::Maybe,
        };
        self.meets = self.meets.and(meets);
    }

    /// Evaluates `NFTA_BITWISE_*`, only for a mask and an exclusive or.
    fn bitwise(&mut self, fields: &Fields<'_>) {
        let (source, target) = (fields.register(1), fields.register(2));
        let length = fields.number(3).unwrap_or(0) as usize;
        let found = source.and_then(|at| self.get(at, length));
        if let Some(at) = target {
            self.forget(at, length.next_multiple_of(4));
        }
        let (mask, xor) = (fields.get(4).map(value), fields.get(5).map(value));
        if let (Some(found), Some(mask), Some(xor), None | Some(0)) = (found, mask, xor, fields.number(6)) {
            let bytes: Vec<u8> =
                found.iter().zip(mask).zip(xor).map(|((found, mask), xor)| found & mask ^ xor).collect();
            self.set(target, &bytes);
        }
    }

    fn byteorder(&mut self, fields: &Fields<'_>) {
        let length = fields.number(4).unwrap_or(0) as usize;
        let size = fields.number(5).unwrap_or(0).max(1) as usize;
        let found = fields.register(1).and_then(|at| self.get(at, length));
        let target = fields.register(2);
        if let Some(at) = target {
            self.forget(at, length.next_multiple_of(4));
        }
        if let Some(mut bytes) = found {
            if cfg!(target_endian = "little") {
                bytes.chunks_mut(size).for_each(<[u8]>::reverse);
            }
            self.set(target, &bytes);
        }
    }

    /// Evaluates `NFTA_IMMEDIATE_*`: a value or a verdict.
    fn immediate(&mut self, fields: &Fields<'_>) {
        let data = fields.get(2).unwrap_or_default();
        match verdict(data) {
            Some(Verdict::Plain(action)) => self.decide(action),
            Some(verdict) => self.verdicts.push(verdict),
            None => self.set(fields.register(1), &value(data)),
        }
    }

    /// Evaluates `NFTA_LOOKUP_*`: membership in a set, or the mapped value.
    fn lookup(&mut self, fields: &Fields<'_>) {
        let name = fields.text(1);
        let is_inverted = fields.number(5) == Some(1);
        // Verdicts go to register 0, used for nothing else.
        let target = fields.number(3);
        let Some(set) = (self.sets)(&name) else {
            self.meets = self.meets.and(Meets::Maybe);
            return;
        };
        let key = fields.register(2).and_then(|at| self.get(at, set.key_length()));
        let found = if self.packet.is_some() { set.find(key.as_deref()) } else { Found::Unknown };
        match (found, target) {
            (Found::Nothing, None) => self.meets = self.meets.and(Meets::known(is_inverted)),
            (Found::Element(..), None) => self.meets = self.meets.and(Meets::known(!is_inverted)),
            (Found::Unknown, None) => self.meets = self.meets.and(Meets::Maybe),
            (Found::Nothing, Some(_)) => self.meets = Meets::No,
            (Found::Element(_, Some(verdict)), Some(0)) => self.verdicts.push(verdict.clone()),
            (Found::Unknown, Some(0)) => {
                self.verdicts.extend(set.verdicts().cloned());
                self.meets = self.meets.and(Meets::Maybe);
            }
            (Found::Element(data, _), Some(_)) => self.set(fields.register(3), data),
            (Found::Unknown, Some(_)) => {
                let register = fields.register(3).unwrap_or(0);
                self.forget(register, 16);
                self.mapped.push((register, set));
                self.meets = self.meets.and(Meets::Maybe);
            }
        }
    }

    /// Returns the destination of `nat`, if it is known.
    fn nat_target(&self, fields: &Fields<'_>) -> Option<SocketAddr> {
        let to = self.packet.as_ref()?.to;
        let ip = match (fields.register(3), to.ip()) {
            (None, ip) => ip,
            (Some(at), IpAddr::V4(_)) => IpAddr::from(<[u8; 4]>::try_from(self.get(at, 4)?).ok()?),
            (Some(at), IpAddr::V6(_)) => IpAddr::from(<[u8; 16]>::try_from(self.get(at, 16)?).ok()?),
        };
        let port = match fields.register(5) {
            None => to.port(),
            Some(at) => u16::from_be_bytes(self.get(at, 2)?.try_into().ok()?),
        };
        Some(SocketAddr::new(ip, port))
    }

    /// Returns whether this expression may redirect packets for other machines to `endpoint`.
    pub(super) fn nat_leads_to(&self, expression: &Expression, endpoint: SocketAddr) -> bool {
        let fields = Fields(&expression.data);
        let octets = match endpoint.ip() {
            IpAddr::V4(ip) => ip.octets().to_vec(),
            IpAddr::V6(ip) => ip.octets().to_vec(),
        };
        // The register holds the value, or a map may store it there.
        let may_hold = |register: usize, wanted: &[u8]| match self.get(register, wanted.len()) {
            Some(found) => found == wanted,
            None => match self.mapped.iter().find(|(known, _)| *known == register) {
                Some((_, set)) => set.data().any(|data| data.starts_with(wanted)),
                None => true,
            },
        };
        let port =
            |register: Option<usize>| register.is_none_or(|at| may_hold(at, &endpoint.port().to_be_bytes()));
        match expression.name.as_str() {
            "nat" if fields.number(1) == Some(1) => {
                // `NFPROTO_INET` covers both address families.
                let of_family = match fields.number(2) {
                    Some(2) => endpoint.is_ipv4(),
                    Some(10) => endpoint.is_ipv6(),
                    _ => true,
                };
                let address = fields.register(3).is_some_and(|at| may_hold(at, &octets));
                // An address from a map is followed by the port from the same element.
                of_family
                    && address
                    && (self.mapped.iter().any(|(at, _)| Some(*at) == fields.register(3))
                        || port(fields.register(5)))
            }
            "redir" => endpoint.ip().is_loopback() && port(fields.register(1)),
            "target" => match fields.text(1).as_str() {
                "DNAT" | "REDIRECT" | "NETMAP" => super::xtables::target_leads_to(
                    &fields.text(1),
                    fields.number(2).unwrap_or(0) as u8,
                    fields.get(3).unwrap_or_default(),
                    endpoint,
                ),
                _ => false,
            },
            _ => false,
        }
    }
}

/// Returns the only IPv4 or IPv6 destination and UDP port that a rule matches, if it compares with both.
pub(super) fn only_destination(rule: &[Expression]) -> Option<SocketAddr> {
    // The header field in the register, as base, offset and length.
    let (mut field, mut ip, mut port) = (None, None, None);
    for expression in rule {
        let fields = Fields(&expression.data);
        match expression.name.as_str() {
            "payload" => {
                let of = |attribute| fields.number(attribute);
                field = Some((of(2), of(3), of(4)));
            }
            "cmp" if fields.number(2) == Some(0) => {
                let wanted = fields.get(3).map(value).unwrap_or_default();
                match field.take() {
                    Some((Some(1), Some(16), Some(4))) => {
                        ip = wanted.first_chunk::<4>().map(|octets| IpAddr::from(*octets));
                    }
                    Some((Some(1), Some(24), Some(16))) => {
                        ip = wanted.first_chunk::<16>().map(|octets| IpAddr::from(*octets));
                    }
                    Some((Some(2), Some(2), Some(2))) => {
                        port = wanted.first_chunk::<2>().map(|octets| u16::from_be_bytes(*octets));
                    }
                    _ => {}
                }
            }
            // `iptables-nft` keeps the ports in a match.
            "match" if fields.text(1) == "udp" => {
                port = port.or(matches::only_udp_port(fields.get(3).unwrap_or_default()));
            }
            // A changed register no longer holds the header field.
            _ => field = None,
        }
    }
    Some(SocketAddr::new(ip?, port?))
}

/// Builds the IP header; unknown bytes are `None`.
fn network_header(packet: &Packet) -> Vec<Option<u8>> {
    let (mut header, at) =
        if packet.is_v6() { (vec![None; 40], (8, 24)) } else { (vec![None; 20], (12, 16)) };
    let mut put = |at: usize, bytes: &[u8]| {
        for (place, byte) in header[at..].iter_mut().zip(bytes) {
            *place = Some(*byte);
        }
    };
    let mut address = |at: usize, ip: IpAddr| match ip {
        IpAddr::V4(ip) => put(at, &ip.octets()),
        IpAddr::V6(ip) => put(at, &ip.octets()),
    };
    address(at.0, packet.from.ip());
    address(at.1, packet.to.ip());
    if packet.is_v6() {
        put(6, &[17]);
    } else {
        put(0, &[0x45]);
        put(2, &(LENGTH as u16).to_be_bytes());
        // Not a fragment.
        put(6, &[0x40, 0]);
        put(9, &[17]);
    }
    header
}

/// The attributes of an expression.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn get(&self, wanted: u16) -> Option<&'a [u8]> {
        Attributes(self.0).find(|(kind, _)| *kind == wanted).map(|(_, value)| value)
    }

    fn number(&self, wanted: u16) -> Option<u32> {
        number(self.get(wanted)?)
    }

    fn text(&self, wanted: u16) -> String {
        self.get(wanted).map(text).unwrap_or_default()
    }

    /// Returns the first byte of a data register: four of sixteen bytes (1 to 4), or sixteen of
    /// four bytes (8 to 23), which share their storage.
    fn register(&self, wanted: u16) -> Option<usize> {
        match self.number(wanted)? {
            register @ 1..=4 => Some((register as usize - 1) * 16),
            register @ 8..=23 => Some((register as usize - 8) * 4),
            _ => None,
        }
    }
}
