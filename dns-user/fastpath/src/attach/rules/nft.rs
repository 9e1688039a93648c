//! Tables of nftables, `iptables-nft`'s included, as dumped by the kernel
//! (`linux/netfilter/nf_tables.h`).

use std::{collections::BTreeMap, io, net::SocketAddr};

use super::{
    expressions::Machine,
    nft_rule::{Expression, Set, Verdict, elements, expressions, number, only_destination, split},
    walk::{Action, Chains, Device, Ends, Meets, Packet, walk},
};
use crate::attach::netlink::{Attributes, Socket, push_attribute, text};

/// `NFNL_SUBSYS_NFTABLES`, in the upper byte of message types.
const SUBSYSTEM: u16 = 10 << 8;
/// `NFT_MSG_NEWTABLE` and the request for it.
const TABLES: (u16, u16) = (SUBSYSTEM, SUBSYSTEM | 1);
/// `NFT_MSG_NEWCHAIN` and the request for it.
const CHAINS: (u16, u16) = (SUBSYSTEM | 3, SUBSYSTEM | 4);
/// `NFT_MSG_NEWRULE` and the request for it.
const RULES: (u16, u16) = (SUBSYSTEM | 6, SUBSYSTEM | 7);
/// `NFT_MSG_NEWSET` and the request for it.
const SETS: (u16, u16) = (SUBSYSTEM | 9, SUBSYSTEM | 10);
/// `NFT_MSG_NEWSETELEM` and the request for it.
const ELEMENTS: (u16, u16) = (SUBSYSTEM | 12, SUBSYSTEM | 13);
const INET: u8 = 1;
const IPV4: u8 = 2;
const NETDEV: u8 = 5;
const IPV6: u8 = 10;
/// Type of NAT chains. Among chains at the priority of NAT (`NF_IP_PRI_NAT_DST`), only those of
/// this type translate.
const TYPE_NAT: &str = "nat";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ruleset {
    chains: Vec<Chain>,
    /// Sets and maps, by family, table and name.
    sets: BTreeMap<(u8, String, String), Set>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Chain {
    /// Address family of the table.
    family: u8,
    table: String,
    name: String,
    /// The hook of a base chain; `None` if the chain is reached by jumps only.
    base: Option<Base>,
    rules: Vec<Vec<Expression>>,
}

/// The hook of a base chain.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Base {
    /// `NF_INET_*`, or 0 and 1 for ingress and egress of netdev.
    hook: u32,
    /// Chains run in ascending order.
    priority: i32,
    devices: Vec<String>,
    /// Whether the policy is drop.
    drops: bool,
    /// Whether it is of type nat.
    is_nat: bool,
}

/// Returns the generation of the ruleset (`NFT_MSG_GETGEN`), which changes with every transaction.
pub(super) fn generation(socket: &mut Socket) -> io::Result<Option<u32>> {
    const REQUEST: u16 = 1 | 4;
    let mut found = None;
    socket.request(SUBSYSTEM | 16, REQUEST, &[0; 4], |kind, message| {
        if kind == SUBSYSTEM | 15 {
            let mut attributes = split(message).into_iter().flat_map(|(_, attributes)| attributes);
            found = attributes.find(|(attribute, _)| *attribute == 1).and_then(|(_, value)| number(value));
        }
    })?;
    Ok(found)
}

pub(super) fn read(socket: &mut Socket) -> io::Result<Ruleset> {
    // struct nfgenmsg: family, version, resource.
    let all = [0; 4];
    let chains =
        socket.dump(CHAINS.1, &all, |kind, message| (kind == CHAINS.0).then(|| chain(message)).flatten())?;
    let rules =
        socket.dump(RULES.1, &all, |kind, message| (kind == RULES.0).then(|| rule(message)).flatten())?;
    let names =
        socket.dump(SETS.1, &all, |kind, message| (kind == SETS.0).then(|| set(message)).flatten())?;
    let dormant = socket
        .dump(TABLES.1, &all, |kind, message| (kind == TABLES.0).then(|| dormant_table(message)).flatten())?;
    let mut ruleset = Ruleset { chains, sets: BTreeMap::new() };
    for chain in &mut ruleset.chains {
        if dormant.contains(&(chain.family, chain.table.clone())) {
            chain.base = None;
        }
    }
    for (family, table, name, expressions) in rules {
        let of = |chain: &&mut Chain| chain.family == family && chain.table == table && chain.name == name;
        if let Some(chain) = ruleset.chains.iter_mut().find(of) {
            chain.rules.push(expressions);
        }
    }
    for (key, flags, key_length) in names {
        let mut body = vec![key.0, 0, 0, 0];
        push_text(&mut body, 1, &key.1);
        push_text(&mut body, 2, &key.2);
        let elements = socket
            .dump(ELEMENTS.1, &body, |kind, message| (kind == ELEMENTS.0).then(|| elements(message)))?;
        let elements = elements.into_iter().flatten().collect();
        ruleset.sets.insert(key.clone(), Set { id: key, flags, key_length, elements });
    }
    Ok(ruleset)
}

impl Ruleset {
    /// Returns the possible fates of a packet at an IP hook. `with_nat` is true for the first
    /// packet of a flow.
    pub(super) fn pass(&self, hook: usize, packet: &mut Packet, with_nat: bool) -> Ends {
        let family = if packet.is_v6() { IPV6 } else { IPV4 };
        let is_met = |chain: &Chain, base: &Base| {
            (chain.family == INET || chain.family == family)
                && usize::try_from(base.hook) == Ok(hook)
                && (with_nat || !base.is_nat)
        };
        self.through(packet, is_met)
    }

    /// Returns the possible fates of a packet at ingress or egress of an interface.
    pub(super) fn pass_device(&self, device: &Device, is_ingress: bool, packet: &mut Packet) -> Ends {
        const INET_INGRESS: u32 = 5;
        let hook = if is_ingress { 0 } else { 1 };
        let is_met = |chain: &Chain, base: &Base| {
            base.devices.contains(&device.name)
                && (chain.family == NETDEV && base.hook == hook
                    || chain.family == INET && is_ingress && base.hook == INET_INGRESS)
        };
        self.through(packet, is_met)
    }

    /// Returns the possible fates of a packet in the base chains for which `is_met` holds.
    fn through(&self, packet: &mut Packet, is_met: impl Fn(&Chain, &Base) -> bool) -> Ends {
        let mut met: Vec<(i32, usize, &Base)> = Vec::new();
        for (index, chain) in self.chains.iter().enumerate() {
            if let Some(base) = chain.base.as_ref().filter(|base| is_met(chain, base)) {
                met.push((base.priority, index, base));
            }
        }
        met.sort_unstable_by_key(|&(priority, index, _)| (priority, index));
        let mut ends = Ends::DELIVERED;
        for (_, index, &Base { drops, is_nat, .. }) in met {
            // Packets exempted from connection tracking pass no NAT.
            if is_nat && packet.untracked {
                continue;
            }
            let policy = if drops { Action::Drop } else { Action::Accept };
            ends = ends.then(walk(&mut Way { ruleset: self, packet }, index, policy));
        }
        ends
    }

    /// Returns whether a NAT rule at `hook` may redirect queries for other addresses to `endpoint`; NAT
    /// does not apply to queries for those that are `is_exempt`.
    pub(super) fn leads_to(
        &self,
        hook: usize,
        endpoint: SocketAddr,
        is_exempt: impl Fn(SocketAddr) -> bool,
    ) -> bool {
        let starts = self.chains.iter().enumerate().filter(|(_, chain)| {
            chain.base.as_ref().is_some_and(|base| base.is_nat && usize::try_from(base.hook) == Ok(hook))
        });
        let mut chains: Vec<usize> = starts.map(|(index, _)| index).collect();
        let mut next = 0;
        while let Some(&index) = chains.get(next) {
            next += 1;
            let chain = &self.chains[index];
            for rule in &chain.rules {
                if only_destination(rule).is_some_and(&is_exempt) {
                    continue;
                }
                let mut machine = Machine::blind(|name| self.set(chain, name));
                for expression in rule {
                    machine.step(expression);
                    if machine.nat_leads_to(expression, endpoint) {
                        return true;
                    }
                }
                let named = machine.verdicts().filter_map(|verdict| self.index(chain, verdict.chain()?));
                for to in named.collect::<Vec<_>>() {
                    if !chains.contains(&to) {
                        chains.push(to);
                    }
                }
            }
        }
        false
    }

    /// Returns a set of the chain's table.
    fn set(&self, chain: &Chain, name: &str) -> Option<&Set> {
        self.sets.get(&(chain.family, chain.table.clone(), name.to_owned()))
    }

    /// Returns the chain of this name in the table of another chain.
    fn index(&self, of: &Chain, name: &str) -> Option<usize> {
        self.chains
            .iter()
            .position(|chain| chain.family == of.family && chain.table == of.table && chain.name == name)
    }
}

/// The path of one packet through the chains.
struct Way<'a, 'p> {
    ruleset: &'a Ruleset,
    packet: &'p mut Packet,
}

impl Chains for Way<'_, '_> {
    fn decide(&mut self, chain: usize, rule: usize) -> Vec<(Meets, Action)> {
        let Self { ruleset, packet } = self;
        let chain = &ruleset.chains[chain];
        let mut machine = Machine::new(packet, |name| ruleset.set(chain, name));
        for expression in &chain.rules[rule] {
            machine.step(expression);
            if machine.meets() == Meets::No {
                return Vec::new();
            }
        }
        let meets = machine.meets();
        let mut actions = Vec::new();
        for verdict in machine.verdicts() {
            let action = match verdict {
                Verdict::Jump(name) => {
                    ruleset.index(chain, name).map_or(Action::Unknown("a missing chain"), Action::Jump)
                }
                Verdict::Goto(name) => {
                    ruleset.index(chain, name).map_or(Action::Unknown("a missing chain"), Action::Goto)
                }
                Verdict::Plain(action) => *action,
            };
            actions.push((meets, action));
        }
        machine.leave(packet);
        actions
    }

    fn rules(&mut self, chain: usize) -> usize {
        self.ruleset.chains[chain].rules.len()
    }
}

/// Appends a string attribute.
fn push_text(body: &mut Vec<u8>, kind: u16, text: &str) {
    push_attribute(body, kind, &[text.as_bytes(), &[0]].concat());
}

/// Parses `NFT_MSG_NEWTABLE`: family and name of a table whose chains the kernel does not call.
fn dormant_table(message: &[u8]) -> Option<(u8, String)> {
    let (family, attributes) = split(message)?;
    let (mut name, mut flags) = (None, 0);
    for (attribute, value) in attributes {
        match attribute {
            1 => name = Some(text(value)),
            2 => flags = number(value).unwrap_or(0),
            _ => {}
        }
    }
    // NFT_TABLE_F_DORMANT.
    (flags & 1 != 0).then_some((family, name?))
}

fn chain(message: &[u8]) -> Option<Chain> {
    let (family, attributes) = split(message)?;
    let (mut table, mut name, mut base, mut drops, mut kind) = (None, None, None, false, String::new());
    for (attribute, value) in attributes {
        match attribute {
            1 => table = Some(text(value)),
            3 => name = Some(text(value)),
            4 => base = Some(hook(value)),
            // NF_DROP.
            5 => drops = number(value) == Some(0),
            7 => kind = text(value),
            _ => {}
        }
    }
    let base = base.map(|base| Base { drops, is_nat: kind == TYPE_NAT, ..base });
    Some(Chain { family, table: table?, name: name?, base, rules: Vec::new() })
}

fn hook(value: &[u8]) -> Base {
    let mut base = Base { hook: u32::MAX, priority: 0, devices: Vec::new(), drops: false, is_nat: false };
    for (attribute, value) in Attributes(value) {
        match attribute {
            1 => base.hook = number(value).unwrap_or(u32::MAX),
            2 => base.priority = number(value).unwrap_or(0).cast_signed(),
            3 => base.devices.push(text(value)),
            4 => base.devices.extend(Attributes(value).map(|(_, name)| text(name))),
            _ => {}
        }
    }
    base
}

/// Parses `NFT_MSG_NEWRULE`: family, table, chain, expressions.
fn rule(message: &[u8]) -> Option<(u8, String, String, Vec<Expression>)> {
    let (family, attributes) = split(message)?;
    let (mut table, mut chain, mut found) = (None, None, Vec::new());
    for (attribute, value) in attributes {
        match attribute {
            1 => table = Some(text(value)),
            2 => chain = Some(text(value)),
            4 => found = expressions(value),
            _ => {}
        }
    }
    Some((family, table?, chain?, found))
}

/// Parses `NFT_MSG_NEWSET`: family, table and name; flags; length of a key.
fn set(message: &[u8]) -> Option<((u8, String, String), u32, usize)> {
    let (family, attributes) = split(message)?;
    let (mut table, mut name, mut flags, mut key_length) = (None, None, 0, 0);
    for (attribute, value) in attributes {
        match attribute {
            1 => table = Some(text(value)),
            2 => name = Some(text(value)),
            3 => flags = number(value).unwrap_or(0),
            5 => key_length = number(value).unwrap_or(0) as usize,
            _ => {}
        }
    }
    Some(((family, table?, name?), flags, key_length))
}
