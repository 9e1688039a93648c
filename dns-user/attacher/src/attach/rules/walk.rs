//! The possible fates of a packet in chains of rules, for legacy tables and nftables alike.
//!
//! Some matches cannot be decided outside the kernel (time, owners, contents). Both outcomes of such a
//! rule are followed, so the result contains every possible end of the packet.

use std::{
    cell::Cell,
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    rc::Rc,
};

use dns_common::scope::LOOPBACK_IFINDEX;

use super::facts::Facts;
use crate::attach::netlink::{Link, LocalAddress};

/// Whether a packet meets a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meets {
    No,
    /// Depends on facts unknown here; holds the name of the condition.
    Maybe(&'static str),
    /// Depends on the number of earlier packets.
    Rate,
    /// Depends on the client, which this walk leaves open.
    Client,
    Yes,
}

impl Meets {
    /// Converts a known condition.
    pub(super) fn known(truth: bool) -> Self {
        if truth { Self::Yes } else { Self::No }
    }

    pub(super) fn inverted(self, invert: bool) -> Self {
        match self {
            Self::No if invert => Self::Yes,
            Self::Yes if invert => Self::No,
            // The opposite of an unknown outcome is as unknown.
            other => other,
        }
    }

    pub(super) fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::No, _) | (_, Self::No) => Self::No,
            // Each client gets a walk of its own, which finds the other condition.
            (Self::Client, _) | (_, Self::Client) => Self::Client,
            (Self::Rate, _) | (_, Self::Rate) => Self::Rate,
            (Self::Maybe(name), _) | (_, Self::Maybe(name)) => Self::Maybe(name),
            _ => Self::Yes,
        }
    }
}

/// The action of a rule on a packet that meets its conditions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Continue,
    Accept,
    Drop,
    /// Redirect the packet, so that our socket does not receive it.
    Divert,
    /// Deliver the packet with another source address.
    Translate,
    /// Decided elsewhere; holds the name of the target.
    Unknown(&'static str),
    /// Continue in this chain, then return.
    Jump(usize),
    /// Continue in this chain and do not return.
    Goto(usize),
    Return,
}

/// Whether a packet passes NAT: only the first one of a flow does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Nat {
    Applies,
    Skipped,
}

/// The possible ends of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ends {
    pub(super) deliver: bool,
    pub(super) drop: bool,
    pub(super) divert: bool,
    /// Whether NAT may change the source address.
    pub(super) translated: bool,
    /// Whether any of these depends on the number of earlier packets.
    pub(super) rate: bool,
    /// Name of a condition or target on which any of these depends and that only the kernel can evaluate.
    pub(super) unsure: Option<&'static str>,
    /// Whether any condition depended on the client, which this walk leaves open.
    pub(super) client: bool,
}

impl Ends {
    pub(super) const DELIVERED: Self = Self {
        deliver: true,
        drop: false,
        divert: false,
        translated: false,
        rate: false,
        unsure: None,
        client: false,
    };

    fn or(self, other: Self) -> Self {
        Self {
            deliver: self.deliver || other.deliver,
            drop: self.drop || other.drop,
            divert: self.divert || other.divert,
            translated: self.translated || other.translated,
            rate: self.rate || other.rate,
            unsure: self.unsure.or(other.unsure),
            client: self.client || other.client,
        }
    }

    /// Combines the ends of two consecutive chains.
    pub(super) fn then(self, next: Self) -> Self {
        Self {
            // Every chain must let the packet through; to be lost in one of them suffices.
            deliver: self.deliver && next.deliver,
            ..self.or(next)
        }
    }

    /// Returns whether the packet is certainly not delivered.
    pub(super) fn is_held(self) -> bool {
        !self.deliver && (self.drop || self.divert)
    }

    /// Returns whether delivery is uncertain.
    pub(super) fn is_undecided(self) -> bool {
        self.deliver && (self.drop || self.divert)
    }
}

pub(super) trait Chains {
    /// Returns the actions of a rule on the packet of this walk, in order: a rule may hold several
    /// conditions, each with a separate action.
    fn decide(&mut self, chain: usize, rule: usize) -> Vec<(Meets, Action)>;

    fn rules(&mut self, chain: usize) -> usize;
}

/// Maximum depth of jumps: the kernel allows 16 in nft, and one per chain in x_tables.
const DEEPEST: usize = 64;

/// Maximum number of rules evaluated for one packet: uncertain jumps multiply the paths.
const MAX_RULES: usize = 200_000;

/// Returns the possible fates of a packet that enters this chain; `policy` applies at its end.
pub(super) fn walk(chains: &mut impl Chains, chain: usize, policy: Action) -> Ends {
    let mut left = MAX_RULES;
    let (ends, falls) = pass(chains, chain, DEEPEST, &mut left);
    if falls { ends.or(end(policy)) } else { ends }
}

fn end(action: Action) -> Ends {
    let none = Ends::default();
    match action {
        Action::Drop => Ends { drop: true, ..none },
        Action::Divert => Ends {
            divert: true,
            ..none
        },
        Action::Translate => Ends {
            translated: true,
            ..Ends::DELIVERED
        },
        Action::Unknown(name) => Ends {
            deliver: true,
            drop: true,
            unsure: Some(name),
            ..none
        },
        _ => Ends::DELIVERED,
    }
}

/// Returns the ends in a chain, and whether the packet may return from it.
fn pass(chains: &mut impl Chains, chain: usize, depth: usize, left: &mut usize) -> (Ends, bool) {
    let mut ends = Ends::default();
    // A loop of jumps, which the kernel refuses to load, would not end here.
    if depth == 0 {
        return (end(Action::Unknown("too many jumps")), true);
    }
    let mut may_return = false;
    for rule in 0..chains.rules(chain) {
        if *left == 0 {
            // Too many paths: the result is unknown.
            return (ends.or(end(Action::Unknown("too many rules"))), true);
        }
        *left -= 1;
        for (meets, action) in chains.decide(chain, rule) {
            let (found, falls, returns) = match (meets, action) {
                (Meets::No, _) => continue,
                (_, Action::Continue) => (Ends::default(), true, false),
                (_, Action::Return) => (Ends::default(), false, true),
                (_, Action::Jump(to)) => {
                    let (found, falls) = pass(chains, to, depth - 1, left);
                    (found, falls, false)
                }
                (_, Action::Goto(to)) => {
                    let (found, falls) = pass(chains, to, depth - 1, left);
                    (found, false, falls)
                }
                // It may also let the packet go on to the next rule.
                (_, Action::Unknown(_)) => (end(action), true, false),
                (_, last) => (end(last), false, false),
            };
            // The condition decides between this action and the following rules.
            let condition = match meets {
                Meets::Rate if action != Action::Continue => Ends {
                    rate: true,
                    ..Ends::default()
                },
                Meets::Maybe(name) if action != Action::Continue => Ends {
                    unsure: Some(name),
                    ..Ends::default()
                },
                // Also a rule that continues: it may set a mark, by which a later one decides.
                Meets::Client => Ends {
                    client: true,
                    ..Ends::default()
                },
                _ => Ends::default(),
            };
            ends = ends.or(found).or(condition);
            may_return |= returns;
            // Later rules are reached only by packets that this one does not end.
            if meets == Meets::Yes {
                if !falls {
                    return (ends, may_return);
                }
                break;
            }
        }
    }
    (ends, true)
}

/// An interface, as named in rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    name: String,
    ifindex: u32,
    /// Whether a condition has asked for name or index. Clones share it.
    is_identified: Rc<Cell<bool>>,
    pub(crate) layer: u16,
    /// Whether packets may have passed PREROUTING before they reach this interface: with
    /// br_netfilter, a bridge passes on what its ports received only after that.
    pub(crate) is_bridge: bool,
    /// Whether it has the address of the endpoint; `None`: unknown.
    pub(crate) has_endpoint: Option<bool>,
}

impl Device {
    /// Returns the interface as rules for the address `ip` see it; `local` are the addresses of this machine.
    pub(crate) fn of(link: &Link, ip: IpAddr, local: &[LocalAddress]) -> Self {
        let Link {
            name,
            ifindex,
            layer,
            kind,
            ..
        } = link;
        // A VLAN may belong to a bridge.
        let is_bridge = matches!(kind.as_deref(), Some("bridge" | "vlan"));
        Self {
            name: name.clone(),
            ifindex: *ifindex,
            is_identified: Rc::default(),
            layer: *layer,
            is_bridge,
            has_endpoint: has_address(*ifindex, ip, local),
        }
    }

    /// Returns the name, on which a condition depends.
    pub(super) fn name(&self) -> &str {
        self.is_identified.set(true);
        &self.name
    }

    /// Returns the index, on which a condition depends.
    pub(super) fn ifindex(&self) -> u32 {
        self.is_identified.set(true);
        self.ifindex
    }

    pub(super) fn is_loopback(&self) -> bool {
        self.ifindex == LOOPBACK_IFINDEX
    }

    /// Returns what the walks so far depend on beside name and index; `None` if they depend on these.
    pub(crate) fn kind(&self) -> Option<DeviceKind> {
        (!self.is_identified.get()).then_some(DeviceKind {
            is_loopback: self.is_loopback(),
            layer: self.layer,
            is_bridge: self.is_bridge,
            has_endpoint: self.has_endpoint,
        })
    }
}

/// The properties of an interface that rules can match, beside its name and index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DeviceKind {
    is_loopback: bool,
    layer: u16,
    is_bridge: bool,
    has_endpoint: Option<bool>,
}

/// Returns whether an interface has an address; `None` if no interface has it, so that it may belong to a route.
fn has_address(ifindex: u32, ip: IpAddr, local: &[LocalAddress]) -> Option<bool> {
    // Several interfaces may have the same address.
    let mut owners = local.iter().filter(|known| known.address == ip).peekable();
    owners.peek()?;
    Some(owners.any(|known| known.ifindex == ifindex))
}

/// A number of which single bits may be unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    value: u32,
    /// The bits of `value` that are known; all others are zero.
    known: u32,
}

impl Mark {
    pub(super) const ZERO: Self = Self::known(0);
    pub(super) const UNKNOWN: Self = Self { value: 0, known: 0 };

    pub(super) const fn known(value: u32) -> Self {
        Self {
            value,
            known: u32::MAX,
        }
    }

    /// Joins bytes in native order, each with its known bits.
    pub(super) fn from_bytes(bytes: [(u8, u8); 4]) -> Self {
        let known = u32::from_ne_bytes(bytes.map(|(_, known)| known));
        Self {
            value: u32::from_ne_bytes(bytes.map(|(value, _)| value)) & known,
            known,
        }
    }

    /// Splits the number into bytes in native order, each with its known bits.
    pub(super) fn to_bytes(self) -> [(u8, u8); 4] {
        let values = self.value.to_ne_bytes();
        let known = self.known.to_ne_bytes();
        std::array::from_fn(|index| (values[index], known[index]))
    }

    pub(super) fn and(self, mask: u32) -> Self {
        Self {
            value: self.value & mask,
            known: self.known | !mask,
        }
    }

    pub(super) fn xor(self, other: Self) -> Self {
        let known = self.known & other.known;
        Self {
            value: (self.value ^ other.value) & known,
            known,
        }
    }

    /// Changes the mark by a rule that the packet meets, perhaps: only the bits that are the same in both are then known.
    pub(super) fn set(&mut self, new: Self, meets: Meets) {
        let mut known = new.known;
        if meets != Meets::Yes {
            known &= self.known & !(self.value ^ new.value);
        }
        *self = Self {
            value: new.value & known,
            known,
        };
    }

    /// Returns whether the bits in `mask` equal `wanted`'s.
    pub(super) fn is(self, wanted: u32, mask: u32, name: &'static str) -> Meets {
        // A wanted bit outside of the mask is never met, and one known bit that differs decides.
        if wanted & !mask != 0 || (self.value ^ wanted) & mask & self.known != 0 {
            Meets::No
        } else if mask & !self.known == 0 {
            Meets::Yes
        } else {
            Meets::Maybe(name)
        }
    }
}

/// The end of a packet that is left open, so that its walk contains the fates of all clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Open {
    Neither,
    Sender,
    Receiver,
}

/// An endpoint to which NAT may send queries for other addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NatGoal {
    pub(super) endpoint: SocketAddr,
    /// Whether REDIRECT, which names no address, leads there.
    pub(super) by_redirect: bool,
}

/// A client, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Client {
    /// Its address, or an example of one.
    pub(super) address: IpAddr,
    /// Whether the walk contains the fates of all clients.
    pub(super) is_any: bool,
}

/// A UDP datagram on its way through the packet filter.
#[derive(Clone, Debug)]
pub(super) struct Packet {
    /// Receiving interface; `None` for a local packet before it re-enters.
    pub(super) input: Option<Device>,
    pub(super) output: Option<Device>,
    pub(super) from: SocketAddr,
    pub(super) to: SocketAddr,
    /// Which of them stands for any client.
    pub(super) open: Open,
    /// Whether connection tracking has seen both directions of the flow.
    pub(super) established: bool,
    /// Whether the destination is local.
    pub(super) to_us: bool,
    /// Whether the source is local.
    pub(super) from_us: bool,
    /// The mark set by rules.
    pub(super) mark: Mark,
    /// The mark of its flow, set by rules.
    pub(super) flow_mark: Mark,
    /// Whether a rule has exempted the packet from connection tracking.
    pub(super) untracked: bool,
    /// Members of sets, as the kernel reports them.
    pub(super) facts: Facts,
}

/// Possible lengths of the IP packet of a query without EDNS options, in bytes.
pub(super) const QUERY_LENGTHS: RangeInclusive<u16> = 45..=340;

/// Possible lengths of the IP packet of a reply.
pub(super) const REPLY_LENGTHS: RangeInclusive<u16> = 45..=4200;

/// Port of a typical client. Rules rarely distinguish ports above 1023.
const CLIENT_PORT: u16 = 40_000;

impl Packet {
    /// Returns a query from `client` to `endpoint` that arrives on `device`.
    pub(super) fn query(
        device: &Device,
        client: Client,
        endpoint: SocketAddr,
        facts: &Facts,
    ) -> Self {
        Self {
            input: Some(device.clone()),
            open: if client.is_any {
                Open::Sender
            } else {
                Open::Neither
            },
            ..Self::without_device(client.address, endpoint, facts)
        }
    }

    /// Returns a query whose interface is unknown.
    pub(super) fn without_device(client: IpAddr, endpoint: SocketAddr, facts: &Facts) -> Self {
        Self {
            input: None,
            output: None,
            from: SocketAddr::new(client, CLIENT_PORT),
            to: endpoint,
            open: Open::Neither,
            // As if new: rules that let established flows pass say nothing about a client's first
            // query.
            established: false,
            to_us: true,
            from_us: false,
            mark: Mark::ZERO,
            flow_mark: Mark::ZERO,
            untracked: false,
            facts: facts.clone(),
        }
    }

    /// Returns the server's reply to this query, which left the packet filter like this, on its way out
    /// through `device`. `from` and `to` are those of the query as the client sent it.
    pub(super) fn reply(&self, device: &Device, client: Client, endpoint: SocketAddr) -> Self {
        Self {
            output: Some(device.clone()),
            from: endpoint,
            to: SocketAddr::new(client.address, CLIENT_PORT),
            open: if client.is_any {
                Open::Receiver
            } else {
                Open::Neither
            },
            established: true,
            to_us: false,
            from_us: true,
            // The mark of the query belongs to its packet; that of the flow is shared by both
            // directions.
            flow_mark: self.flow_mark,
            ..Self::without_device(client.address, endpoint, &self.facts)
        }
    }

    pub(super) fn local_query(
        lo: &Device,
        client: Client,
        endpoint: SocketAddr,
        facts: &Facts,
    ) -> Self {
        let query = Self::query(lo, client, endpoint, facts);
        Self {
            input: None,
            output: Some(lo.clone()),
            from_us: true,
            ..query
        }
    }

    /// Returns this local query on its way in from `lo`: mark and exemption from connection tracking stay.
    pub(super) fn back_from_lo(&self) -> Self {
        Self {
            input: self.output.clone(),
            output: None,
            ..self.clone()
        }
    }

    /// Returns the program's reply on `lo` to this query, on its way in: it is the same buffer, so connection
    /// tracking considers its flow new, like the query's, or exempts it as well.
    pub(super) fn local_reply_in(&self) -> Self {
        Self {
            from: self.to,
            to: self.from,
            open: match self.open {
                Open::Neither => Open::Neither,
                Open::Sender => Open::Receiver,
                Open::Receiver => Open::Sender,
            },
            ..self.back_from_lo()
        }
    }

    /// Returns whether the server's socket sends the packet.
    pub(super) fn is_of_server(&self) -> bool {
        self.from_us && self.established && self.input.is_none()
    }

    pub(super) fn is_v6(&self) -> bool {
        self.to.is_ipv6()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_bits_leave_others_known() {
        let mark = Mark::known(0x4000).xor(Mark {
            value: 0,
            known: !0x8000,
        });
        assert_eq!(mark.is(0x4000, 0x4000, "mark"), Meets::Yes);
        assert_eq!(mark.is(0, 0x4000, "mark"), Meets::No);
        assert_eq!(mark.is(0x8000, 0x8000, "mark"), Meets::Maybe("mark"));
        assert_eq!(
            mark.is(0x8000, 0xc000, "mark"),
            Meets::No,
            "one known bit differs"
        );
        assert_eq!(
            mark.and(!0x8000),
            Mark::known(0x4000),
            "the mask clears the unknown bit"
        );
        assert_eq!(Mark::from_bytes(mark.to_bytes()), mark);
        let mut mark = Mark::known(4);
        mark.set(Mark::known(5), Meets::Rate);
        assert_eq!(
            mark,
            Mark {
                value: 4,
                known: !1
            }
        );
        mark.set(Mark::known(5), Meets::Yes);
        assert_eq!(mark, Mark::known(5));
    }
}
