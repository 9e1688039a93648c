//! The effect of the packet filter on queries, on their replies and on `lo`, read from the kernel's
//! own tables, both legacy and nftables.
//!
//! Arriving queries reveal most of it ([`super::gate`]). Effects that they cannot reveal are
//! checked here: limits, which let some queries pass; rules that drop replies; and `lo`, where
//! connection tracking mistakes the program's reply for another query.
//!
//! * [`xtables`] and [`nft`] read the tables; [`mod@matches`] and [`expressions`] evaluate their
//!   rules, [`facts`] asks the kernel about sets.
//! * [`walk`]: the possible fates of a packet in them.
//!
//! A rule set that this module cannot decide is an objection: only the kernel knows then which queries pass.

mod expressions;
mod facts;
mod matches;
mod nft;
mod nft_rule;
mod walk;
mod xtables;

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

pub(crate) use self::xtables::{LISTS, open_lists, use_lists};
pub(crate) use self::{
    facts::Facts,
    walk::{Device, DeviceKind},
};
use dns_fastpath::protocol::Operation;

use self::{
    nft::DeviceHook,
    walk::{Client, Ends, Nat, NatGoal, Packet},
    xtables::{INPUT, OUTPUT, POSTROUTING, PREROUTING},
};
use super::{netlink::Socket, work::count};

/// Returns the error for rules that would take too much memory; it lasts, and every interface is left to userspace.
fn too_large(table: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::FileTooLarge,
        format!("the rules of {table} are too large to be evaluated"),
    )
}

/// A snapshot of the packet filter's tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PacketFilter {
    legacy: Vec<xtables::RuleTable>,
    /// Shared by successive readings: comparing it with itself takes no walk through all rules.
    nft: Arc<nft::Ruleset>,
    generation: Option<u32>,
}

/// The reason why an interface must not answer for an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Objection {
    #[error("the packet filter drops or diverts its queries")]
    Held,
    #[error("the packet filter limits its queries")]
    Limited,
    #[error("the packet filter drops or limits replies to its clients")]
    RepliesHeld,
    #[error("NAT at OUTPUT redirects local queries for other addresses to the server")]
    LocalNat,
    #[error(
        "NAT changes the source address of local queries, and a fast-path reply on lo is not translated back"
    )]
    LocalSourceNat,
    #[error(
        "NAT at INPUT changes the source address of queries, so that probes cannot be recognised"
    )]
    SourceNat,
    #[error(
        "NAT at PREROUTING redirects queries for other addresses to the server before they reach the bridge"
    )]
    BridgedNat,
    #[error(
        "INPUT does not accept lo, and connection tracking sees a fast-path reply as a new flow"
    )]
    LocalRepliesHeld,
    #[error("the packet filter decides by \"{0}\", which only the kernel can evaluate")]
    Undecided(&'static str),
}

impl Objection {
    /// Returns the objection to these ends of a packet; `held`: the one if it is certainly not delivered.
    fn to(ends: Ends, held: Self) -> Option<Self> {
        match ends {
            ends if ends.is_held() => Some(held),
            ends if !ends.is_undecided() => None,
            // Before undecided conditions: a limit is certain to hold back some queries.
            Ends { rate: true, .. } if held == Self::Held => Some(Self::Limited),
            Ends { rate: true, .. } => Some(held),
            Ends { unsure, .. } => Some(Self::Undecided(unsure.unwrap_or("too many rules"))),
        }
    }
}

/// Stance of the rules towards all clients of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FilterStance {
    /// They pass the queries of any client, and the replies to it.
    Accepts,
    /// They object to every client.
    Objects(Objection),
    /// It depends on the client.
    Depends,
}

/// The result of one or several walks.
struct Examined {
    objection: Option<Objection>,
    /// Whether the walk that led to the objection ends with certainty.
    is_held: bool,
    /// Whether a condition of these walks depends on the client, which they leave open.
    depends_on_client: bool,
}

impl Examined {
    fn of(ends: Ends, objection: Option<Objection>) -> Self {
        Self {
            objection,
            is_held: ends.is_held(),
            depends_on_client: ends.client,
        }
    }

    fn certainly(objection: Objection) -> Self {
        Self {
            objection: Some(objection),
            is_held: true,
            depends_on_client: false,
        }
    }

    /// Adds a later walk, unless there is an objection already.
    fn or_else(self, next: impl FnOnce() -> Self) -> Self {
        // One reason suffices, and a walk of thousands of rules is spared.
        if self.objection.is_some() {
            return self;
        }
        let next = next();
        Self {
            // A mark of the query may decide about its reply.
            depends_on_client: self.depends_on_client || next.depends_on_client,
            ..next
        }
    }
}

impl PacketFilter {
    /// Reads the tables of the calling thread's network namespace. A kernel without nftables has no
    /// nftables tables.
    pub(crate) fn read() -> io::Result<Self> {
        Self::default().read_again()
    }

    /// Reads the tables again, reusing nftables tables whose generation has not changed.
    pub(crate) fn read_again(&self) -> io::Result<Self> {
        let (nft, generation) = match self.read_nft() {
            Ok(found) => found,
            // Without nftables, or without netfilter at all.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EINVAL | libc::EPROTONOSUPPORT | libc::EOPNOTSUPP)
                ) =>
            {
                (Arc::default(), None)
            }
            Err(error) => return Err(error),
        };
        Ok(Self {
            legacy: xtables::read()?,
            nft,
            generation,
        })
    }

    /// Returns the tables of nftables and their generation.
    fn read_nft(&self) -> io::Result<(Arc<nft::Ruleset>, Option<u32>)> {
        let mut socket = Socket::netfilter()?;
        // Read before the dump: a change in between is then noticed in the next round.
        let generation = nft::generation(&mut socket)?;
        // The dump of a large node has thousands of messages, its generation one.
        if generation.is_some() && generation == self.generation {
            return Ok((self.nft.clone(), generation));
        }
        Ok((Arc::new(nft::read(&mut socket)?), generation))
    }

    /// Returns the objection to answering queries of this client.
    pub(crate) fn objection(
        &self,
        device: &Device,
        client: IpAddr,
        endpoint: SocketAddr,
        facts: &Facts,
    ) -> Option<Objection> {
        let client = Client {
            address: client,
            is_any: false,
        };
        count(Operation::Walk, || {
            self.examine(device, client, endpoint, facts)
        })
        .objection
    }

    /// Returns what the rules say about all clients of an interface.
    pub(crate) fn stance(
        &self,
        device: &Device,
        endpoint: SocketAddr,
        facts: &Facts,
    ) -> FilterStance {
        // Local queries come from the address that they go to, unless a process binds another one.
        let address = if device.is_loopback() {
            endpoint.ip()
        } else {
            any_client(endpoint)
        };
        let client = Client {
            address,
            is_any: true,
        };
        let examined = count(Operation::Walk, || {
            self.examine(device, client, endpoint, facts)
        });
        match examined {
            Examined {
                objection: None, ..
            } => FilterStance::Accepts,
            // The packet is dropped for every client.
            Examined {
                objection: Some(objection @ (Objection::Held | Objection::RepliesHeld)),
                is_held: true,
                ..
            } => FilterStance::Objects(objection),
            Examined {
                // Asked before other objections: a walk for each client may find that it is not
                // concerned.
                depends_on_client: true,
                ..
            } => FilterStance::Depends,
            Examined {
                objection: Some(objection),
                ..
            } => FilterStance::Objects(objection),
        }
    }

    fn examine(
        &self,
        device: &Device,
        client: Client,
        endpoint: SocketAddr,
        facts: &Facts,
    ) -> Examined {
        if device.is_loopback() {
            return self.examine_lo(device, client, endpoint, facts);
        }
        // Independent of the client, and needs no walk.
        // REDIRECT leads to an address of the receiving interface.
        let goal = NatGoal {
            endpoint,
            by_redirect: device.has_endpoint != Some(false),
        };
        if device.is_bridge && self.nat_leads_to(PREROUTING, goal) {
            return Examined::certainly(Objection::BridgedNat);
        }
        let mut query = Packet::query(device, client, endpoint, facts);
        let ends = self.ends_inbound(&mut query);
        // Translation at INPUT changes what the server's socket sees, so a probe would never be
        // recognised.
        if ends.translated {
            return Examined::of(ends, Some(Objection::SourceNat));
        }
        let incoming = Examined::of(ends, Objection::to(ends, Objection::Held));
        incoming.or_else(|| {
            let mut reply = query.reply(device, client, endpoint);
            // NAT applies to the first packet of a flow only, and a reply never is.
            let ends = self.ends_outbound(&mut reply, Nat::Skipped);
            Examined::of(ends, Objection::to(ends, Objection::RepliesHeld))
        })
    }

    fn examine_lo(
        &self,
        lo: &Device,
        client: Client,
        endpoint: SocketAddr,
        facts: &Facts,
    ) -> Examined {
        // At OUTPUT REDIRECT leads to 127.0.0.1 or ::1 (`nf_nat_redirect_ipv4`).
        let goal = NatGoal {
            endpoint,
            by_redirect: endpoint.ip().is_loopback(),
        };
        if self.nat_leads_to(OUTPUT, goal) {
            return Examined::certainly(Objection::LocalNat);
        }
        let mut sent = Packet::local_query(lo, client, endpoint, facts);
        let out = self.ends_outbound(&mut sent, Nat::Applies);
        // Before the query's way in: the program replies at the ingress of `lo`, when only OUTPUT
        // and POSTROUTING have set marks.
        let mut given = sent.local_reply_in();
        let mut query = sent.back_from_lo();
        let ends = out.then(self.ends_inbound(&mut query));
        if ends.translated {
            return Examined::of(ends, Some(Objection::LocalSourceNat));
        }
        let mut reply = query.reply(lo, client, endpoint);
        Examined::of(ends, Objection::to(ends, Objection::Held))
            .or_else(|| {
                let ends = self.ends_outbound(&mut reply, Nat::Skipped);
                Examined::of(ends, Objection::to(ends, Objection::RepliesHeld))
            })
            .or_else(|| {
                let ends = self.ends_inbound(&mut given);
                Examined::of(ends, Objection::to(ends, Objection::LocalRepliesHeld))
            })
    }

    /// Returns whether NAT at `hook` may redirect queries for other addresses to the endpoint. The
    /// program sees them with the new address, and its reply would not be translated back.
    fn nat_leads_to(&self, hook: usize, goal: NatGoal) -> bool {
        let is_exempt = |to: SocketAddr| self.is_untracked(hook, to);
        xtables::leads_to(&self.legacy, hook, goal, is_exempt)
            || self.nft.leads_to(hook, goal, is_exempt)
    }

    /// Returns whether rules at `hook` exempt every query for `to` from connection tracking, and so from
    /// NAT. Conditions on interfaces or senders are not met.
    fn is_untracked(&self, hook: usize, to: SocketAddr) -> bool {
        let from = any_client(to);
        let mut packet = Packet {
            to_us: false,
            // Facts of its own: answers about an invented sender are not worth keeping.
            ..Packet::without_device(from, to, &Facts::default())
        };
        self.at_hook(hook, &mut packet, Nat::Skipped);
        packet.untracked
    }

    /// Returns the possible fates of a packet on its way to our sockets.
    fn ends_inbound(&self, packet: &mut Packet) -> Ends {
        // NAT has already been applied to a local query on its way out.
        let is_local = packet.from_us && packet.input.as_ref().is_some_and(Device::is_loopback);
        let nat = if is_local { Nat::Skipped } else { Nat::Applies };
        let mut ends = self.at_device(packet.input.clone(), DeviceHook::Ingress, packet);
        for (hook, nat) in [(PREROUTING, nat), (INPUT, Nat::Applies)] {
            ends = ends.then(self.at_hook(hook, packet, nat));
        }
        ends
    }

    fn ends_outbound(&self, packet: &mut Packet, nat: Nat) -> Ends {
        let ends = self.at_hook(OUTPUT, packet, nat);
        let ends = ends.then(self.at_hook(POSTROUTING, packet, nat));
        ends.then(self.at_device(packet.output.clone(), DeviceHook::Egress, packet))
    }

    fn at_hook(&self, hook: usize, packet: &mut Packet, nat: Nat) -> Ends {
        xtables::pass(&self.legacy, hook, packet, nat).then(self.nft.pass(hook, packet, nat))
    }

    fn at_device(&self, device: Option<Device>, hook: DeviceHook, packet: &mut Packet) -> Ends {
        device.map_or(Ends::DELIVERED, |device| {
            self.nft.pass_device(&device, hook, packet)
        })
    }
}

/// Returns a documentation address (RFC 5737, RFC 3849), used while no client is known.
pub(super) fn any_client(endpoint: SocketAddr) -> IpAddr {
    match endpoint {
        SocketAddr::V4(_) => IpAddr::from([192, 0, 2, 1]),
        SocketAddr::V6(_) => IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1]),
    }
}
