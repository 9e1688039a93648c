//! Tables of nftables, `iptables-nft`'s included, as dumped by the kernel (`linux/netfilter/nf_tables.h`).

use std::{cell::Cell, collections::BTreeMap, io, net::SocketAddr};

use super::{
    expressions::Machine,
    nft_rule::{Expression, Fields, Set, Verdict, elements, expressions, only_destination, split},
    too_large,
    walk::{Action, Chains, Device, Ends, Meets, Nat, NatGoal, Packet, walk},
};
use crate::attach::netlink::{ACK, Attributes, Socket, push_text, text};

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

#[derive(Clone, Debug, PartialEq, Eq)]
struct Base {
    /// `NF_INET_*`, or 0 and 1 for ingress and egress of netdev.
    hook: u32,
    /// Chains run in ascending order.
    priority: i32,
    devices: Vec<String>,
    drops: bool,
    is_nat: bool,
}

/// Hooks of an interface (`NF_NETDEV_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DeviceHook {
    Ingress = 0,
    Egress = 1,
}

/// Returns the generation of the ruleset (`NFT_MSG_GETGEN`), which changes with every transaction.
pub(super) fn generation(socket: &mut Socket) -> io::Result<Option<u32>> {
    let mut found = None;
    socket.request(SUBSYSTEM | 16, ACK, &[0; 4], |kind, message| {
        if kind == SUBSYSTEM | 15 {
            found = split(message).and_then(|(_, fields)| fields.number(1));
        }
    })?;
    Ok(found)
}

pub(super) fn read(socket: &mut Socket) -> io::Result<Ruleset> {
    // struct nfgenmsg: family, version, resource.
    let all = [0; 4];
    let budget = Budget::default();
    let chains = socket.dump(CHAINS, &all, |message| budget.read(message, chain))?;
    let rules = socket.dump(RULES, &all, |message| budget.read(message, rule))?;
    let names = socket.dump(SETS, &all, |message| budget.read(message, set))?;
    let dormant = socket.dump(TABLES, &all, dormant_table)?;
    let mut ruleset = Ruleset {
        chains,
        sets: BTreeMap::new(),
    };
    for chain in &mut ruleset.chains {
        if dormant.contains(&(chain.family, chain.table.clone())) {
            // The kernel registers no hook of a dormant table.
            chain.base = None;
        }
    }
    for (family, table, name, expressions) in rules {
        let chain = ruleset.chains.iter_mut().find(|chain: &&mut Chain| {
            chain.family == family && chain.table == table && chain.name == name
        });
        // A rule without its chain came between two dumps; by the next round the generation has
        // changed.
        if let Some(chain) = chain {
            chain.rules.push(expressions);
        }
    }
    // The kernel lists the elements of one set at a time.
    for (key, flags, key_length) in names {
        let mut body = vec![key.0, 0, 0, 0];
        push_text(&mut body, 1, &key.1);
        push_text(&mut body, 2, &key.2);
        let elements = socket.dump(ELEMENTS, &body, |message| {
            let size = message.len().saturating_mul(ELEMENT_SHARE);
            budget.admits(size).then(|| elements(message))
        })?;
        let elements = elements.into_iter().flatten().collect();
        ruleset.sets.insert(
            key.clone(),
            Set {
                id: key,
                flags,
                key_length,
                elements,
            },
        );
    }
    // Only now: what came beyond the limit was read from the socket and dropped.
    budget.check()?;
    Ok(ruleset)
}

/// Maximum size of the rules in the kernel's form, in bytes: several times those of a large Kubernetes node. Users of
/// the host may add rules and elements of sets without limit.
const MAX_RULESET: usize = 32 << 20;

/// An element of a set takes this many times the memory of its message.
const ELEMENT_SHARE: usize = 4;

/// Counts what is read of a ruleset.
#[derive(Debug, Default)]
struct Budget(Cell<usize>);

impl Budget {
    /// Counts a part; returns whether the whole is within the limit.
    fn admits(&self, size: usize) -> bool {
        let Self(read) = self;
        read.set(read.get().saturating_add(size));
        read.get() <= MAX_RULESET
    }

    /// Reads a message within the limit.
    fn read<T>(&self, message: &[u8], read: impl Fn(&[u8]) -> Option<T>) -> Option<T> {
        if !self.admits(message.len()) {
            return None;
        }
        read(message)
    }

    fn check(&self) -> io::Result<()> {
        if self.admits(0) {
            return Ok(());
        }
        Err(too_large("nftables"))
    }
}

impl Ruleset {
    /// Returns the possible fates of a packet at an IP hook.
    pub(super) fn pass(&self, hook: usize, packet: &mut Packet, nat: Nat) -> Ends {
        let family = if packet.is_v6() { IPV6 } else { IPV4 };
        self.through(packet, |chain: &Chain, base: &Base| {
            (chain.family == INET || chain.family == family)
                && usize::try_from(base.hook) == Ok(hook)
                && (nat == Nat::Applies || !base.is_nat)
        })
    }

    /// Returns the possible fates of a packet at ingress or egress of an interface.
    pub(super) fn pass_device(
        &self,
        device: &Device,
        hook: DeviceHook,
        packet: &mut Packet,
    ) -> Ends {
        const INET_INGRESS: u32 = 5;
        self.through(packet, |chain: &Chain, base: &Base| {
            base.devices.iter().any(|name| name == device.name())
                && (chain.family == NETDEV && base.hook == hook as u32
                    || chain.family == INET
                        && hook == DeviceHook::Ingress
                        && base.hook == INET_INGRESS)
        })
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
            ends = ends.then(walk(
                &mut NftPath {
                    ruleset: self,
                    packet,
                },
                index,
                policy,
            ));
        }
        ends
    }

    /// Returns whether a NAT rule at `hook` may redirect queries for other addresses to an endpoint; NAT
    /// does not apply to queries for those that are `is_exempt`.
    pub(super) fn leads_to(
        &self,
        hook: usize,
        goal: NatGoal,
        is_exempt: impl Fn(SocketAddr) -> bool,
    ) -> bool {
        let mut chains = Vec::new();
        for (index, chain) in self.chains.iter().enumerate() {
            if let Some(base) = &chain.base
                && base.is_nat
                && usize::try_from(base.hook) == Ok(hook)
            {
                chains.push(index);
            }
        }
        let mut next = 0;
        while let Some(&index) = chains.get(next) {
            next += 1;
            let chain = &self.chains[index];
            for rule in &chain.rules {
                if only_destination(rule).is_some_and(&is_exempt) {
                    continue;
                }
                let mut machine = Machine::without_packet(|name| self.set(chain, name));
                for expression in rule {
                    machine.step(expression);
                    if machine.nat_leads_to(expression, goal) {
                        return true;
                    }
                }
                for name in machine.verdicts().filter_map(Verdict::chain) {
                    // Several rules may jump to a chain; it is searched once.
                    if let Some(to) = self.index(chain, name)
                        && !chains.contains(&to)
                    {
                        chains.push(to);
                    }
                }
            }
        }
        false
    }

    fn set(&self, chain: &Chain, name: &str) -> Option<&Set> {
        self.sets
            .get(&(chain.family, chain.table.clone(), name.to_owned()))
    }

    /// Returns the chain of this name in the table of another chain.
    fn index(&self, of: &Chain, name: &str) -> Option<usize> {
        self.chains.iter().position(|chain| {
            chain.family == of.family && chain.table == of.table && chain.name == name
        })
    }
}

/// The path of one packet through the chains.
struct NftPath<'a, 'p> {
    ruleset: &'a Ruleset,
    packet: &'p mut Packet,
}

impl Chains for NftPath<'_, '_> {
    fn decide(&mut self, chain: usize, rule: usize) -> Vec<(Meets, Action)> {
        let Self { ruleset, packet } = self;
        let chain = &ruleset.chains[chain];
        let mut machine = Machine::new(packet, |name| ruleset.set(chain, name));
        for expression in &chain.rules[rule] {
            let before = machine.meets;
            machine.step(expression);
            // The kernel does not run the rest of the rule, but a mark that the rule has set stays.
            if machine.meets == Meets::No {
                machine.apply_changes(packet);
                return continuing(before);
            }
        }
        let meets = machine.meets;
        let mut actions = Vec::new();
        for verdict in machine.verdicts() {
            let to = verdict.chain().and_then(|name| ruleset.index(chain, name));
            let action = match (verdict, to) {
                (Verdict::Plain(action), _) => *action,
                (Verdict::Jump(_), Some(to)) => Action::Jump(to),
                (Verdict::Goto(_), Some(to)) => Action::Goto(to),
                // Deleted since the chains were listed.
                (Verdict::Jump(_) | Verdict::Goto(_), None) => Action::Unknown("a missing chain"),
            };
            actions.push((meets, action));
        }
        if actions.is_empty() {
            actions = continuing(meets);
        }
        machine.apply_changes(packet);
        actions
    }

    fn rules(&mut self, chain: usize) -> usize {
        self.ruleset.chains[chain].rules.len()
    }
}

/// Returns the actions of a rule without a verdict: it may set a mark, for some clients only.
fn continuing(meets: Meets) -> Vec<(Meets, Action)> {
    if meets == Meets::Client {
        vec![(meets, Action::Continue)]
    } else {
        Vec::new()
    }
}

/// Parses `NFT_MSG_NEWTABLE`: family and name of a table whose chains the kernel does not call.
fn dormant_table(message: &[u8]) -> Option<(u8, String)> {
    let (family, fields) = split(message)?;
    // NFT_TABLE_F_DORMANT.
    (fields.number(2)? & 1 != 0).then_some((family, fields.name(1)?))
}

fn chain(message: &[u8]) -> Option<Chain> {
    let (family, fields) = split(message)?;
    // NF_DROP.
    let drops = fields.number(5) == Some(0);
    let base = fields.get(4).map(|value| Base {
        drops,
        is_nat: fields.text(7) == TYPE_NAT,
        ..hook(value)
    });
    Some(Chain {
        family,
        table: fields.name(1)?,
        name: fields.name(3)?,
        base,
        rules: Vec::new(),
    })
}

fn hook(value: &[u8]) -> Base {
    let fields = Fields(value);
    let several = Attributes(fields.get(4).unwrap_or_default()).map(|(_, name)| text(name));
    Base {
        hook: fields.number(1).unwrap_or(u32::MAX),
        priority: fields.number(2).unwrap_or(0).cast_signed(),
        devices: fields.name(3).into_iter().chain(several).collect(),
        drops: false,
        is_nat: false,
    }
}

/// Parses `NFT_MSG_NEWRULE`: family, table, chain, expressions.
fn rule(message: &[u8]) -> Option<(u8, String, String, Vec<Expression>)> {
    let (family, fields) = split(message)?;
    Some((
        family,
        fields.name(1)?,
        fields.name(2)?,
        expressions(fields.get(4).unwrap_or_default()),
    ))
}

/// Parses `NFT_MSG_NEWSET`: family, table and name; flags; length of a key.
fn set(message: &[u8]) -> Option<((u8, String, String), u32, usize)> {
    let (family, fields) = split(message)?;
    let key_length = fields.number(5).unwrap_or(0) as usize;
    Some((
        (family, fields.name(1)?, fields.name(2)?),
        fields.number(3).unwrap_or(0),
        key_length,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ruleset_has_a_limit() {
        let budget = Budget::default();
        assert!(budget.admits(MAX_RULESET) && budget.check().is_ok());
        assert!(!budget.admits(1));
        let error = budget.check().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert!(error.to_string().contains("nftables"), "{error}");
    }
}
