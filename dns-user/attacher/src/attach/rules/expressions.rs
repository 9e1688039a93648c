//! Evaluates the expressions of nftables rules on a partially known packet.

use std::{
    net::{IpAddr, SocketAddr},
    ops::Range,
};

use super::{
    matches::{self, Target},
    nft_rule::{Expression, Fields, Found, Set, Verdict, value, verdict},
    walk::{Action, Device, Mark, Meets, NatGoal, Open, Packet},
};
use crate::attach::netlink::octets;

/// Size of all registers in bytes.
const REGISTERS: usize = 64;

/// A byte of which no bit is known.
const UNKNOWN: (u8, u8) = (0, 0);

/// Evaluates a rule, expression by expression.
pub(super) struct Machine<'a, F> {
    /// The packet; `None`: any packet, so that every condition may hold.
    packet: Option<Packet>,
    /// Returns a set by its name.
    sets: F,
    /// The registers, byte by byte: the value, and which of its bits are known.
    registers: [(u8, u8); REGISTERS],
    /// Maps from which a register's value was looked up, by the register's first byte.
    mapped: Vec<(usize, &'a Set)>,
    /// Name of the last expression that loaded a register.
    origin: &'static str,
    /// Whether a register was loaded from what the packet leaves open.
    is_open: bool,
    /// Whether the conditions so far hold.
    pub(super) meets: Meets,
    verdicts: Vec<Verdict>,
}

impl<'a, F: Fn(&str) -> Option<&'a Set>> Machine<'a, F> {
    pub(super) fn new(packet: &Packet, sets: F) -> Self {
        Self {
            // A copy: `apply_changes` returns it where the kernel leaves the rule.
            packet: Some(packet.clone()),
            ..Self::without_packet(sets)
        }
    }

    pub(super) fn without_packet(sets: F) -> Self {
        Self {
            packet: None,
            sets,
            registers: [UNKNOWN; REGISTERS],
            mapped: Vec::new(),
            origin: "a condition",
            is_open: false,
            meets: Meets::Yes,
            verdicts: Vec::new(),
        }
    }

    /// Returns the possible verdicts of the rule, exactly one of which applies.
    pub(super) fn verdicts(&self) -> impl Iterator<Item = &Verdict> {
        self.verdicts.iter()
    }

    /// Applies the rule's changes to the packet, where the kernel leaves the rule.
    pub(super) fn apply_changes(self, packet: &mut Packet) {
        if let Some(changed) = self.packet {
            *packet = changed;
        }
    }

    pub(super) fn step(&mut self, expression: &Expression) {
        let fields = Fields(&expression.data);
        const LOADING: [&str; 12] = [
            "meta", "payload", "ct", "fib", "rt", "socket", "hash", "osf", "xfrm", "tunnel",
            "inner", "numgen",
        ];
        if let Some(name) = LOADING.into_iter().find(|name| *name == expression.name) {
            self.origin = name;
        }
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
            "match" => self.extension_match(&fields),
            "target" => self.extension_target(&fields),
            // Each lets some packets through, so arriving queries prove nothing.
            "limit" | "quota" | "connlimit" => self.meets = self.meets.and(Meets::Rate),
            "numgen" => {
                // The register held a value of the packet until then.
                self.forget(fields.register(1).unwrap_or(0), REGISTERS);
                self.meets = self.meets.and(Meets::Rate);
            }
            "dynset" => {
                // A meter: holds expressions for each element, such as limits.
                let is_meter = fields.get(7).is_some() || fields.get(10).is_some();
                self.meets = self.meets.and(if is_meter {
                    Meets::Rate
                } else {
                    Meets::Maybe("dynset")
                });
            }
            "objref" => self.object(&fields),
            "reject" => self.decide(Action::Drop),
            "nat" => self.nat(&fields),
            "redir" | "tproxy" | "fwd" | "synproxy" => self.decide(Action::Divert),
            "queue" => self.decide(Action::Unknown("queue")),
            "notrack" => {
                if let Some(packet) = &mut self.packet {
                    // If the rule may not apply, NAT remains possible, which is the outcome to
                    // fear.
                    packet.untracked |= self.meets == Meets::Yes;
                }
            }
            "masq" => self.decide(Action::Translate),
            // These only observe or copy the packet.
            "log" | "dup" | "counter" | "flow_offload" | "last" => {}
            "exthdr" => self.extension_header(&fields),
            "socket" => self.socket(&fields),
            // Each has its destination register in another attribute.
            "rt" | "hash" | "osf" | "xfrm" | "tunnel" | "inner" => self.forget(0, REGISTERS),
            _ => {
                self.forget(0, REGISTERS);
                self.meets = self
                    .meets
                    .and(Meets::Maybe("an expression unknown to the server"));
            }
        }
    }

    /// Returns what an undecided condition depends on.
    fn undecided(&self) -> Meets {
        if self.is_open {
            Meets::Client
        } else {
            Meets::Maybe(self.origin)
        }
    }

    /// Adds a verdict, unless the rule continues.
    fn decide(&mut self, action: Action) {
        if action != Action::Continue {
            self.verdicts.push(Verdict::Plain(action));
        }
    }

    fn set(&mut self, register: Option<usize>, bytes: &[u8]) {
        let Some(at) = register else { return };
        self.mapped.retain(|(known, _)| *known != at);
        // Registers are padded to four bytes.
        for index in 0..bytes.len().next_multiple_of(4) {
            if let Some(place) = self.registers.get_mut(at + index) {
                *place = (bytes.get(index).copied().unwrap_or(0), u8::MAX);
            }
        }
    }

    /// Like [`Self::set`], for partly known bytes.
    fn set_bits(&mut self, register: Option<usize>, bytes: &[(u8, u8)]) {
        let Some(at) = register else { return };
        self.mapped.retain(|(known, _)| *known != at);
        for (place, byte) in self.registers.iter_mut().skip(at).zip(bytes) {
            *place = *byte;
        }
    }

    /// Marks `length` bytes from register byte `at` as unknown.
    fn forget(&mut self, at: usize, length: usize) {
        self.registers
            .iter_mut()
            .skip(at)
            .take(length)
            .for_each(|byte| *byte = UNKNOWN);
    }

    /// Returns `length` bytes from register byte `at`, if all are known.
    fn get(&self, at: usize, length: usize) -> Option<Vec<u8>> {
        self.registers
            .get(at..at + length)?
            .iter()
            .map(|&(value, known): &(u8, u8)| (known == u8::MAX).then_some(value))
            .collect()
    }

    /// Like [`Self::get`], from the first byte of a register that the expression may lack.
    fn read(&self, register: Option<usize>, length: usize) -> Option<Vec<u8>> {
        self.get(register?, length)
    }

    fn extension_match(&mut self, fields: &Fields<'_>) {
        let name = fields.text(1);
        let revision = fields.number(2).unwrap_or(0) as u8;
        let info = fields.get(3).unwrap_or_default();
        let meets = match &self.packet {
            Some(packet) => matches::meets(&name, revision, info, packet),
            None => Meets::Maybe("match"),
        };
        self.meets = self.meets.and(meets);
    }

    fn extension_target(&mut self, fields: &Fields<'_>) {
        let name = fields.text(1);
        let target = target(
            fields,
            &name,
            self.packet.as_ref().is_some_and(Packet::is_v6),
        );
        if let Some(packet) = &mut self.packet {
            target.change(self.meets, packet);
        }
        self.decide(target.action(self.packet.as_ref().map(|packet| packet.to)));
    }

    fn nat(&mut self, fields: &Fields<'_>) {
        // `NFT_NAT_DNAT`.
        if fields.number(1) != Some(1) {
            return self.decide(Action::Translate);
        }
        let to = self.packet.as_ref().map(|packet| packet.to);
        // NAT to the destination that the packet has already changes nothing, and no later rule of
        // NAT applies.
        let stays = to.is_some() && self.nat_target(fields) == to;
        self.decide(if stays {
            Action::Accept
        } else {
            Action::Divert
        });
    }

    fn meta(&mut self, fields: &Fields<'_>) {
        let key = fields.number(2);
        let Some(register) = fields.register(1) else {
            // The expression sets a value: a mark, or a priority.
            if key == Some(3) {
                let mark = self.mark_in(fields.register(3));
                if let Some(packet) = &mut self.packet {
                    packet.mark.set(mark, self.meets);
                }
            }
            return;
        };
        // Sixteen bytes, the length of an interface's name: whatever the key, what was there is
        // gone.
        self.forget(register, 16);
        // A random number.
        if key == Some(24) {
            self.meets = self.meets.and(Meets::Rate);
        }
        let Some(packet) = self.packet.clone() else {
            return;
        };
        if key == Some(3) {
            return self.set_bits(Some(register), &packet.mark.to_bytes());
        }
        // User and group of the socket: a packet from elsewhere has none yet, which ends the rule (`NFT_BREAK`).
        if matches!(key, Some(10 | 11)) && !packet.from_us {
            self.meets = Meets::No;
        }
        let protocol: u16 = if packet.is_v6() { 0x86dd } else { 0x0800 };
        let input = packet.input.as_ref();
        let output = packet.output.as_ref();
        // `NFT_META_PROTOCOL`, priority, indexes, names and types of both interfaces; then
        // `_SKUID`, `_NFPROTO`, `_L4PROTO`, `_PKTTYPE` and `_SECPATH`.
        let known: Option<Vec<u8>> = match key {
            Some(1) => Some(protocol.to_be_bytes().to_vec()),
            Some(2) => Some(vec![0; 4]),
            Some(4) => Some(index_of(input).to_ne_bytes().to_vec()),
            Some(5) => Some(index_of(output).to_ne_bytes().to_vec()),
            Some(6) => Some(name_of(input).to_vec()),
            Some(7) => Some(name_of(output).to_vec()),
            Some(8) => Some(layer_of(input).to_ne_bytes().to_vec()),
            Some(9) => Some(layer_of(output).to_ne_bytes().to_vec()),
            Some(10) if packet.is_of_server() => {
                let owner = packet.facts.owner(packet.from);
                owner.map(|user| user.to_ne_bytes().to_vec())
            }
            Some(15) => Some(vec![if packet.is_v6() { 10 } else { 2 }]),
            Some(16) => Some(vec![17]),
            // The packet type: addressed to this machine (`PACKET_HOST`).
            Some(19) => Some(vec![0]),
            // The packet came without IPsec.
            Some(25) => Some(vec![0]),
            _ => None,
        };
        if let Some(bytes) = known {
            self.set(Some(register), &bytes);
        }
    }

    fn payload(&mut self, fields: &Fields<'_>) {
        let Some(register) = fields.register(1) else {
            return;
        };
        let length = fields.number(4).unwrap_or(0) as usize;
        self.forget(register, length.next_multiple_of(4));
        let Some(packet) = &self.packet else { return };
        let base = fields.number(2);
        let offset = fields.number(3).unwrap_or(0) as usize;
        let header = match base {
            Some(1) => network_header(packet),
            Some(2) => {
                let ports = [packet.from.port(), packet.to.port()]
                    .map(u16::to_be_bytes)
                    .concat();
                ports.into_iter().map(Some).collect()
            }
            _ => Vec::new(),
        };
        let open = client_range(packet, base);
        let overlaps = offset < open.end && open.start < offset + length;
        // Even one byte of the client makes the outcome depend on it.
        self.is_open |= overlaps;
        let Some(bytes) = header.get(offset..offset + length) else {
            return;
        };
        // One unknown byte is enough for an unknown register.
        let known: Option<Vec<u8>> = bytes.iter().copied().collect();
        if !overlaps && let Some(bytes) = known {
            self.set(Some(register), &bytes);
        }
    }

    fn ct(&mut self, fields: &Fields<'_>) {
        let key = fields.number(2);
        let Some(register) = fields.register(1) else {
            // The expression sets a value, such as the mark of the flow.
            let mark = self.mark_in(fields.register(4));
            if let Some(packet) = &mut self.packet
                && key == Some(3)
                && !packet.untracked
            {
                packet.flow_mark.set(mark, self.meets);
            }
            return;
        };
        self.forget(register, 16);
        let Some(packet) = &self.packet else { return };
        if packet.untracked && key != Some(0) {
            // `NFT_BREAK`: there is no flow.
            self.meets = Meets::No;
            return;
        }
        let partly_known = match key {
            // Neither the packet's address nor that of its replies is translated; "seen reply", "assured" and
            // "confirmed" are set during the life of the flow.
            Some(2) if !packet.established => Some(Mark::ZERO.xor(Mark::UNKNOWN.and(2 | 4 | 8))),
            Some(3) => Some(packet.flow_mark),
            _ => None,
        };
        if let Some(mark) = partly_known {
            return self.set_bits(Some(register), &mark.to_bytes());
        }
        let known = match key {
            Some(0) => {
                // `NF_CT_STATE_BIT`, and `NF_CT_STATE_UNTRACKED_BIT`.
                let state = u32::from(matches::state_bit(packet, 1 << 6));
                Some(state.to_ne_bytes().to_vec())
            }
            // Original, reply.
            Some(1) => Some(vec![u8::from(packet.established)]),
            // The protocol of the flow.
            Some(10) => Some(vec![17]),
            _ => None,
        };
        if let Some(bytes) = known {
            self.set(Some(register), &bytes);
        }
    }

    /// Evaluates `NFTA_FIB_*`: the type of an address, or whether the reverse path leads back, which a plain
    /// packet's does.
    fn fib(&mut self, fields: &Fields<'_>) {
        const SENDER: u32 = 1;
        const INPUT: u32 = 8;
        const OUTPUT: u32 = 16;
        const PRESENT: u32 = 32;
        let Some(register) = fields.register(1) else {
            return;
        };
        self.forget(register, 16);
        let Some(packet) = &self.packet else { return };
        let result = fields.number(2);
        let flags = fields.number(3).unwrap_or(0);
        let word: u32 = match (result, &packet.input) {
            // `NFT_FIB_RESULT_ADDRTYPE`: `RTN_LOCAL`, `RTN_UNICAST`.
            (Some(3), _) if flags & (INPUT | OUTPUT) == 0 => {
                let is_ours = if flags & SENDER != 0 {
                    packet.from_us
                } else {
                    packet.to_us
                };
                if is_ours { 2 } else { 1 }
            }
            // The address is local for `inet_dev_addr_type` only at the interface that has it.
            (Some(3), Some(input)) if flags & (SENDER | OUTPUT) == 0 && packet.to_us => {
                match input.has_endpoint {
                    Some(true) => 2,
                    Some(false) => 1,
                    None => return,
                }
            }
            // Of a forged sender the kernel finds no route back.
            (Some(1), Some(_)) if flags & SENDER != 0 && packet.open == Open::Sender => {
                self.is_open = true;
                return;
            }
            // `NFT_FIB_RESULT_OIF`.
            (Some(1), Some(input)) if flags & SENDER != 0 => {
                if flags & PRESENT != 0 {
                    1
                } else {
                    input.ifindex()
                }
            }
            _ => return,
        };
        self.set(Some(register), &word.to_ne_bytes());
    }

    /// Evaluates `NFTA_EXTHDR_*`: a plain query has no extension headers and no IP options, and is not TCP.
    fn extension_header(&mut self, fields: &Fields<'_>) {
        const PRESENT: u32 = 1;
        let register = fields.register(1);
        if fields.number(5).unwrap_or(0) & PRESENT != 0 {
            self.set(register, &[0]);
        } else if register.is_some() {
            // `NFT_BREAK`.
            self.meets = Meets::No;
        }
    }

    /// Evaluates `NFTA_SOCKET_*`, only for transparency, which the server's socket lacks.
    fn socket(&mut self, fields: &Fields<'_>) {
        let Some(register) = fields.register(2) else {
            return;
        };
        self.forget(register, 16);
        if fields.number(1) == Some(0) && self.packet.is_some() {
            self.set(Some(register), &[0]);
        }
    }

    fn mark_in(&self, register: Option<usize>) -> Mark {
        let bytes = register.and_then(|at| self.registers.get(at..)?.first_chunk::<4>());
        bytes.map_or(Mark::UNKNOWN, |bytes| Mark::from_bytes(*bytes))
    }

    fn compare(&mut self, fields: &Fields<'_>) {
        let wanted = fields.value(3);
        let at = fields.register(1);
        let operation = fields.number(2);
        let found = self.read(at, wanted.len());
        let bits = at.and_then(|at| self.registers.get(at..at + wanted.len()));
        let mut differs = false;
        for ((value, known), wanted) in bits.unwrap_or_default().iter().zip(&wanted) {
            // One known bit that differs decides.
            differs |= (value ^ wanted) & known != 0;
        }
        let meets = match (found, operation) {
            // `NFT_CMP_EQ` to `NFT_CMP_GTE`: like memcmp, because numbers are in network order.
            (Some(found), Some(operation)) => Meets::known(match operation {
                0 => found == wanted,
                1 => found != wanted,
                2 => found < wanted,
                3 => found <= wanted,
                4 => found > wanted,
                _ => found >= wanted,
            }),
            (None, Some(operation @ (0 | 1))) if differs => Meets::known(operation == 1),
            _ => self.undecided(),
        };
        self.meets = self.meets.and(meets);
    }

    fn range(&mut self, fields: &Fields<'_>) {
        let from = fields.value(3);
        let to = fields.value(4);
        let meets = match self.read(fields.register(1), from.len()) {
            Some(found) => {
                Meets::known((from..=to).contains(&found) != (fields.number(2) == Some(1)))
            }
            None => self.undecided(),
        };
        self.meets = self.meets.and(meets);
    }

    /// Evaluates `NFTA_BITWISE_*`, only for a mask and an exclusive or.
    fn bitwise(&mut self, fields: &Fields<'_>) {
        let source = fields.register(1);
        let target = fields.register(2);
        let length = fields.number(3).unwrap_or(0) as usize;
        let found = source.and_then(|at| Some(self.registers.get(at..at + length)?.to_vec()));
        if let Some(at) = target {
            self.forget(at, length.next_multiple_of(4));
        }
        let mask = fields.get(4).map(value);
        let xor = fields.get(5).map(value);
        // Shifts (operation 1 and 2) are rare in rules for a host; their result is unknown.
        if let (Some(found), Some(mask), Some(xor), None | Some(0)) =
            (found, mask, xor, fields.number(6))
        {
            // A mask makes the bits that it clears known.
            let mut bytes = Vec::with_capacity(length);
            for (((value, known), mask), xor) in found.into_iter().zip(mask).zip(xor) {
                let known = known | !mask;
                bytes.push(((value & mask ^ xor) & known, known));
            }
            self.set_bits(target, &bytes);
        }
    }

    fn byteorder(&mut self, fields: &Fields<'_>) {
        let length = fields.number(4).unwrap_or(0) as usize;
        let size = fields.number(5).unwrap_or(0).max(1) as usize;
        let found = self.read(fields.register(1), length);
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
            self.meets = self.meets.and(Meets::Maybe("lookup"));
            return;
        };
        let key = self.read(fields.register(2), set.key_length);
        let found = match &self.packet {
            Some(packet) => match (set.find(key.as_deref()), &key, target) {
                // Packets or time change the set.
                (Found::Unknown, Some(key), None) => match packet.facts.nft_element(&set.id, key) {
                    Some(true) => Found::Element(&[], None),
                    Some(false) => Found::Nothing,
                    None => Found::Unknown,
                },
                (found, ..) => found,
            },
            None => Found::Unknown,
        };
        match (found, target) {
            (Found::Nothing, None) => self.meets = self.meets.and(Meets::known(is_inverted)),
            (Found::Element(..), None) => self.meets = self.meets.and(Meets::known(!is_inverted)),
            (Found::Unknown, None) => self.meets = self.meets.and(self.undecided()),
            // `NFT_BREAK`: a map without the key ends the rule.
            (Found::Nothing, Some(_)) => self.meets = Meets::No,
            (Found::Element(_, Some(verdict)), Some(0)) => self.verdicts.push(verdict.clone()),
            (Found::Unknown, Some(0)) => {
                // Any element may be the one, so the walk follows all their verdicts.
                self.verdicts.extend(set.verdicts().cloned());
                self.meets = self.meets.and(self.undecided());
            }
            (Found::Element(data, _), Some(_)) => self.set(fields.register(3), data),
            (Found::Unknown, Some(_)) => {
                let register = fields.register(3).unwrap_or(0);
                self.forget(register, 16);
                self.mapped.push((register, set));
                self.meets = self.meets.and(self.undecided());
            }
        }
    }

    /// Evaluates `NFTA_OBJREF_*`: an object, or a map that chooses one.
    fn object(&mut self, fields: &Fields<'_>) {
        let meets = match (fields.number(1), (self.sets)(&fields.text(4))) {
            // `NFT_OBJECT_QUOTA`, `NFT_OBJECT_LIMIT`, `NFT_OBJECT_CONNLIMIT`.
            (Some(2 | 4 | 5), _) => Meets::Rate,
            // Counters, helpers, timeouts and marks of the security module hold back no packet.
            (Some(_), _) => Meets::Yes,
            (None, Some(set)) if self.packet.is_some() => {
                let key = self.read(fields.register(3), set.key_length);
                if set.find(key.as_deref()) == Found::Nothing {
                    Meets::No
                } else {
                    Meets::Rate
                }
            }
            // An unknown map may lead to a limit.
            (None, _) => Meets::Rate,
        };
        self.meets = self.meets.and(meets);
    }

    fn nat_target(&self, fields: &Fields<'_>) -> Option<SocketAddr> {
        let to = self.packet.as_ref()?.to;
        let ip = match (fields.register(3), to.ip()) {
            (None, ip) => ip,
            (Some(at), IpAddr::V4(_)) => IpAddr::from(<[u8; 4]>::try_from(self.get(at, 4)?).ok()?),
            (Some(at), IpAddr::V6(_)) => {
                IpAddr::from(<[u8; 16]>::try_from(self.get(at, 16)?).ok()?)
            }
        };
        let port = match fields.register(5) {
            None => to.port(),
            Some(at) => u16::from_be_bytes(self.get(at, 2)?.try_into().ok()?),
        };
        Some(SocketAddr::new(ip, port))
    }

    /// Returns whether a register holds this value, or a map may store it there.
    fn may_hold(&self, register: usize, wanted: &[u8]) -> bool {
        if let Some(found) = self.get(register, wanted.len()) {
            return found == wanted;
        }
        match self.mapped.iter().find(|(known, _)| *known == register) {
            Some((_, set)) => set.data().any(|data| data.starts_with(wanted)),
            None => true,
        }
    }

    /// Returns whether NAT to the port in a register, or to the packet's own without one, may be NAT to the endpoint's.
    fn may_be_port(&self, register: Option<usize>, endpoint: SocketAddr) -> bool {
        register.is_none_or(|at| self.may_hold(at, &endpoint.port().to_be_bytes()))
    }

    /// Returns whether this expression may redirect packets for other machines to an endpoint.
    pub(super) fn nat_leads_to(&self, expression: &Expression, goal: NatGoal) -> bool {
        let NatGoal {
            endpoint,
            by_redirect,
        } = goal;
        let fields = Fields(&expression.data);
        match expression.name.as_str() {
            "nat" if fields.number(1) == Some(1) => {
                // `NFPROTO_INET` covers both address families.
                let is_of_family = match fields.number(2) {
                    Some(2) => endpoint.is_ipv4(),
                    Some(10) => endpoint.is_ipv6(),
                    _ => true,
                };
                let Some(address) = fields.register(3) else {
                    return false;
                };
                // An address from a map is followed by the port from the same element.
                let is_mapped = self.mapped.iter().any(|(at, _)| *at == address);
                is_of_family
                    && self.may_hold(address, &octets(endpoint.ip()))
                    && (is_mapped || self.may_be_port(fields.register(5), endpoint))
            }
            "redir" => by_redirect && self.may_be_port(fields.register(1), endpoint),
            "target" => target(&fields, &fields.text(1), endpoint.is_ipv6()).leads_to(goal),
            _ => false,
        }
    }
}

/// Returns the name as registers hold it: padded with NULs.
fn name_of(device: Option<&Device>) -> [u8; 16] {
    let mut bytes = [0; 16];
    if let Some(device) = device {
        // Names have at most 15 bytes (`IFNAMSIZ`).
        for (place, byte) in bytes.iter_mut().zip(device.name().bytes()) {
            *place = byte;
        }
    }
    bytes
}

fn index_of(device: Option<&Device>) -> u32 {
    device.map_or(0, Device::ifindex)
}

fn layer_of(device: Option<&Device>) -> u16 {
    device.map_or(0, |device| device.layer)
}

/// Reads `NFTA_TARGET_*`.
fn target<'a>(fields: &Fields<'a>, name: &'a str, v6: bool) -> Target<'a> {
    let revision = fields.number(2).unwrap_or(0) as u8;
    let info = fields.get(3).unwrap_or_default();
    Target {
        name,
        revision,
        info,
        v6,
    }
}

/// Returns the bytes of the client in the header of this base (`NFTA_PAYLOAD_BASE`), if the packet leaves it open.
fn client_range(packet: &Packet, base: Option<u32>) -> Range<usize> {
    let is_sender = match packet.open {
        Open::Neither => return 0..0,
        Open::Sender => true,
        Open::Receiver => false,
    };
    match (base, packet.is_v6(), is_sender) {
        (Some(1), false, true) => 12..16,
        (Some(1), false, false) => 16..20,
        (Some(1), true, true) => 8..24,
        (Some(1), true, false) => 24..40,
        (Some(2), _, true) => 0..2,
        (Some(2), _, false) => 2..4,
        _ => 0..0,
    }
}

/// Builds the IP header; unknown bytes are `None`.
fn network_header(packet: &Packet) -> Vec<Option<u8>> {
    let from = octets(packet.from.ip());
    let to = octets(packet.to.ip());
    let length = if packet.is_v6() { 40 } else { 20 };
    let known: Vec<(usize, &[u8])> = if packet.is_v6() {
        vec![(6, &[17]), (8, &from), (24, &to)]
    } else {
        // Version, length, DSCP and ECN; not a fragment; UDP.
        vec![
            (0, &[0x45, 0]),
            (6, &[0x40, 0]),
            (9, &[17]),
            (12, &from),
            (16, &to),
        ]
    };
    let mut header = vec![None; length];
    for (at, bytes) in known {
        for (place, byte) in header[at..].iter_mut().zip(bytes) {
            *place = Some(*byte);
        }
    }
    header
}
