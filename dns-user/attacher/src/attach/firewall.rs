//! Objections of the packet filter and IPsec to interfaces on which queries arrive.

use std::{
    collections::{BTreeMap, HashSet},
    io,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use super::{
    netlink::{LOOPBACK, Link, LocalAddress, Socket, address_at, array_at},
    rules::{Device, DeviceKind, Facts, FilterStance, Objection, PacketFilter},
    work::count,
};
use dns_common::scope::{INTERFACES, MAX_ENDPOINTS};
use dns_fastpath::protocol::Operation;
use ipnet::IpNet;

/// Interval at which rules and policies are read while any interface is served.
const ROUND: Duration = Duration::from_secs(2);

/// Maximum number of attempts to read the rules for the first time that are waited for: after ten seconds a predecessor's
/// lease has ended anyway.
const MAX_AWAITED: u32 = 5;

/// Maximum number of cached answers about single clients.
const MAX_KNOWN: usize = 65_536;

/// Maximum number of cached answers about all clients of an interface.
const MAX_STANCES: usize = INTERFACES * MAX_ENDPOINTS;

/// Changes since the last look that verdicts may depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Nothing,
    /// Routes, which may refuse replies to single clients.
    Routes,
    /// Members of sets: what holds for single clients.
    Facts,
    Rules,
}

/// Whether an interface may answer for an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stance {
    Accepts,
    /// Only clients whose own queries arrive, because the kernel's verdict depends on the client.
    HeardOnly,
    Refuses(String),
}

/// Follows the rules, the policies, and the routes to clients.
#[derive(Debug, Default)]
pub(super) struct Firewall {
    rules: PacketFilter,
    /// Whether they have been read.
    has_rules: bool,
    /// Number of attempts to read them that have failed.
    failures: u32,
    /// The kernel's answers about sets in these rules.
    facts: Facts,
    /// The addresses of endpoints that interfaces of this machine have.
    local: Vec<LocalAddress>,
    /// The policies as read last.
    policies: Vec<Policy>,
    read: Option<Instant>,
    routes_changed: bool,
    /// Stance of the rules towards all clients, by interface and endpoint: at most as many as the programs serve.
    stances: BTreeMap<(u32, SocketAddr), FilterStance>,
    /// Stance towards all clients of all interfaces of a kind, if no rule on the way asks for name or index: the containers
    /// of a cell share one walk. At most as many as `stances`.
    alike: BTreeMap<(DeviceKind, SocketAddr), FilterStance>,
    /// Objections of the rules, by interface, endpoint and client, at most [`MAX_KNOWN`].
    known: BTreeMap<(u32, SocketAddr, IpAddr), Option<Objection>>,
    /// Refusals by routes from an address to a client, at most [`MAX_KNOWN`].
    routes: BTreeMap<(IpAddr, IpAddr), Option<String>>,
    /// The last reading error.
    problem: Option<Unreadable>,
}

/// An error of reading the rules.
#[derive(Debug, PartialEq, Eq)]
struct Unreadable {
    /// Whether it lasts: rules that cannot be read here may limit queries.
    lasts: bool,
    why: String,
}

impl Firewall {
    pub(super) fn routes_changed(&mut self) {
        self.routes_changed = true;
    }

    /// Notes which interfaces have the addresses of endpoints, on which rules may depend.
    pub(super) fn set_addresses(
        &mut self,
        local: &[LocalAddress],
        endpoints: &[(SocketAddr, usize)],
    ) {
        let local: Vec<LocalAddress> = local
            .iter()
            .copied()
            .filter(|address: &LocalAddress| {
                endpoints
                    .iter()
                    .any(|(endpoint, _)| endpoint.ip() == address.address)
            })
            .collect();
        if self.local != local {
            self.local = local;
            self.forget();
        }
    }

    /// Reads rules and policies again when they are due; returns what may have changed.
    pub(super) fn refresh(&mut self, now: Instant) -> Change {
        if self
            .read
            .is_some_and(|read| now.saturating_duration_since(read) < ROUND)
        {
            return Change::Nothing;
        }
        // Also if reading fails, or each wake-up would read all tables again.
        self.read = Some(now);
        let mut change = if std::mem::take(&mut self.routes_changed) {
            self.routes.clear();
            Change::Routes
        } else {
            Change::Nothing
        };
        let read = count(Operation::Rules, || {
            io::Result::Ok((self.rules.read_again()?, policies()?))
        });
        if let Some(of_rules) = self.note(read) {
            change = of_rules;
        }
        if matches!(change, Change::Facts | Change::Rules) {
            self.forget();
        }
        change
    }

    /// Returns whether an error that may pass has kept the rules from being read so far.
    pub(super) fn awaits_rules(&self) -> bool {
        let may_pass = self.problem.as_ref().is_some_and(|problem| !problem.lasts);
        may_pass && !self.has_rules && self.failures <= MAX_AWAITED
    }

    /// Notes rules and policies, or why they cannot be read; returns what may have changed.
    fn note(&mut self, read: io::Result<(PacketFilter, Vec<Policy>)>) -> Option<Change> {
        match read {
            Ok((rules, policies)) => {
                self.problem = None;
                self.has_rules = true;
                if (&rules, &policies) != (&self.rules, &self.policies) {
                    (self.rules, self.policies) = (rules, policies);
                    self.facts.forget();
                    return Some(Change::Rules);
                }
                // Packets, time and ipset(8) change members without a new generation of rules.
                self.facts.ask_again().then_some(Change::Facts)
            }
            Err(error) => {
                self.failures = self.failures.saturating_add(1);
                // Other errors pass, such as tables that change during every attempt to list them;
                // the rules read last are used until then, if there are any.
                let lasts = matches!(
                    error.kind(),
                    io::ErrorKind::PermissionDenied | io::ErrorKind::FileTooLarge
                );
                let problem = Unreadable {
                    lasts,
                    why: error.to_string(),
                };
                // Each is logged only once.
                if self.problem.as_ref() != Some(&problem) {
                    let effect = if lasts || !self.has_rules {
                        "userspace answers every query until they can be read"
                    } else {
                        "new rate limits, dropped replies and NAT on lo go undetected"
                    };
                    tracing::warn!(%error, "cannot read the packet filter rules (getsockopt, nfnetlink): {effect}");
                }
                self.problem = Some(problem);
                // Unread rules may be new ones, so every client must be heard again.
                Some(Change::Rules)
            }
        }
    }

    /// Forgets what the rules say about some interfaces.
    pub(super) fn forget_interfaces(&mut self, changed: &HashSet<u32>) {
        self.stances
            .retain(|(ifindex, _), _| !changed.contains(ifindex));
        self.known
            .retain(|(ifindex, ..), _| !changed.contains(ifindex));
    }

    fn forget(&mut self) {
        self.known.clear();
        self.stances.clear();
        self.alike.clear();
    }

    /// Returns whether an interface may answer for an endpoint.
    pub(super) fn stance(&mut self, link: &Link, endpoint: SocketAddr) -> Stance {
        if self.policies.iter().any(|policy| policy.covers(endpoint)) {
            let why =
                "an IPsec policy covers the endpoint, and the program's replies would bypass it";
            return Stance::Refuses(why.to_owned());
        }
        // They may limit queries, and no later look will show it if the error lasts.
        if let Some(Unreadable { lasts, why }) = &self.problem
            && (*lasts || !self.has_rules)
        {
            return Stance::Refuses(format!("the packet filter rules cannot be read: {why}"));
        }
        // More than the programs serve: each costs one walk if it is asked for again.
        if self.stances.len() > MAX_STANCES {
            self.stances.clear();
            self.alike.clear();
        }
        let Self {
            rules,
            facts,
            stances,
            alike,
            local,
            ..
        } = self;
        let found = stances.entry((link.ifindex, endpoint)).or_insert_with(|| {
            let device = Device::of(link, endpoint.ip(), local);
            // A fresh device has been asked for nothing, so it may take over any walk that never
            // asked for its name or index.
            let known = device.kind().and_then(|kind| alike.get(&(kind, endpoint)));
            if let Some(known) = known {
                return *known;
            }
            let stance = rules.stance(&device, endpoint, facts);
            // Asked again, because only now it is known whether a rule wanted name or index.
            if let Some(kind) = device.kind() {
                alike.insert((kind, endpoint), stance);
            }
            stance
        });
        match found {
            FilterStance::Accepts => Stance::Accepts,
            FilterStance::Depends => Stance::HeardOnly,
            FilterStance::Objects(objection) => Stance::Refuses(objection.to_string()),
        }
    }

    /// Returns the reason why an interface must not answer this client for an endpoint.
    ///
    /// Queries that arrive do not overrule a rule that holds back a client: they may belong to flows
    /// that connection tracking knew before the rule, while new ones are lost.
    pub(super) fn objection(
        &mut self,
        link: &Link,
        endpoint: SocketAddr,
        client: IpAddr,
        netlink: &mut Socket,
    ) -> Option<String> {
        if self.known.len() > MAX_KNOWN {
            self.known.clear();
        }
        let Self {
            rules,
            facts,
            local,
            known,
            routes,
            ..
        } = self;
        let of_rules = known
            .entry((link.ifindex, endpoint, client))
            .or_insert_with(|| {
                let device = Device::of(link, endpoint.ip(), local);
                rules.objection(&device, client, endpoint, facts)
            });
        if let Some(objection) = of_rules {
            return Some(objection.to_string());
        }
        // A reply to this machine itself takes the local table, which refuses nothing.
        if link.layer == LOOPBACK {
            return None;
        }
        if routes.len() > MAX_KNOWN {
            routes.clear();
        }
        let of_routes = routes
            .entry((endpoint.ip(), client))
            .or_insert_with(|| route_refusal(netlink, client, endpoint));
        of_routes.clone()
    }
}

/// Returns why the machine's routes refuse replies to a client, which the program would send.
fn route_refusal(netlink: &mut Socket, client: IpAddr, endpoint: SocketAddr) -> Option<String> {
    // The route of such an address depends on the interface.
    let is_link_local = matches!(client, IpAddr::V6(ip) if ip.is_unicast_link_local());
    if is_link_local || client.is_ipv4() != endpoint.is_ipv4() {
        return None;
    }
    match netlink.refuses_route(client, endpoint.ip()) {
        Ok(true) => Some(format!("a route or rule refuses replies to {client}")),
        Ok(false) => None,
        // EINVAL: a blackhole; EACCES: prohibited. Without any route the queries arrived by mistake.
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::EINVAL | libc::EACCES | libc::EHOSTUNREACH)
            ) =>
        {
            Some(format!(
                "a route or rule refuses replies to {client}: {error}"
            ))
        }
        Err(_) => None,
    }
}

/// `XFRM_MSG_NEWPOLICY`, and the request for all policies.
const POLICIES: (u16, u16) = (0x13, 0x15);
/// Offset of the direction, after selector, lifetimes, priority and index, in `struct xfrm_userpolicy_info`.
const DIRECTION_AT: usize = 56 + 64 + 32 + 4 + 4;

/// The selector of an IPsec policy (`linux/xfrm.h`). A program's reply bypasses policies, so endpoints that
/// they cover are left to userspace: the local endpoints that it covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Policy {
    /// The local addresses.
    ours: IpNet,
    protocol: u8,
    /// The local port and its mask.
    port: (u16, u16),
}

/// Returns the policies of the calling thread's network namespace; none on a kernel without IPsec.
pub(super) fn policies() -> io::Result<Vec<Policy>> {
    let mut socket = match Socket::ipsec() {
        Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => return Ok(Vec::new()),
        other => other?,
    };
    // struct xfrm_userpolicy_id.
    let all = [0; 64];
    socket.dump(POLICIES, &all, policy)
}

fn policy(message: &[u8]) -> Option<Policy> {
    /// `XFRM_POLICY_OUT`.
    const OUT: u8 = 1;
    // struct xfrm_selector: destination, source, ports with masks, family, prefixes, protocol.
    let direction = *message.get(DIRECTION_AT)?;
    let family: [u8; 2] = array_at(message, 40)?;
    // Policies are of IPv4 or of IPv6.
    let is_v6 = i32::from(u16::from_ne_bytes(family)) != libc::AF_INET;
    // Outbound packets carry our address as their source, the others as their destination.
    let [ours_at, prefix_at, port_at] = if direction == OUT {
        [16, 43, 36]
    } else {
        [0, 42, 32]
    };
    let ours = address_at(message, ours_at, is_v6)?;
    let prefix = *message.get(prefix_at)?;
    let port = u16::from_be_bytes(array_at(message, port_at)?);
    let mask = u16::from_be_bytes(array_at(message, port_at + 2)?);
    Some(Policy {
        ours: IpNet::new(ours, prefix).ok()?,
        protocol: *message.get(44)?,
        port: (port, mask),
    })
}

impl Policy {
    /// Returns whether the policy covers queries to an endpoint, or replies from it.
    pub(super) fn covers(&self, endpoint: SocketAddr) -> bool {
        // 0 covers every protocol (`linux/xfrm.h`, `xfrm_selector`).
        let covers_udp = matches!(i32::from(self.protocol), 0 | libc::IPPROTO_UDP);
        let (port, mask) = self.port;
        // A mask of zero covers every port.
        covers_udp && self.ours.contains(&endpoint.ip()) && endpoint.port() & mask == port & mask
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unread_rules_are_not_taken_for_none() {
        let link = Link::named(7, "eth0");
        let endpoint = ([10, 0, 0, 1], 53).into();
        let mut firewall = Firewall::default();
        let interrupted = || Err(io::ErrorKind::Interrupted.into());
        assert_eq!(firewall.note(interrupted()), Some(Change::Rules));
        assert!(matches!(
            firewall.stance(&link, endpoint),
            Stance::Refuses(_)
        ));
        assert!(firewall.awaits_rules());
        let mut failing = Firewall::default();
        for _ in 0..=MAX_AWAITED {
            failing.note(interrupted());
        }
        assert!(!failing.awaits_rules());
        firewall.note(Ok((PacketFilter::default(), Vec::new())));
        assert!(!firewall.awaits_rules());
        assert_eq!(firewall.stance(&link, endpoint), Stance::Accepts);
        // The rules read last are still known.
        firewall.note(interrupted());
        assert_eq!(firewall.stance(&link, endpoint), Stance::Accepts);
        firewall.note(Err(io::ErrorKind::PermissionDenied.into()));
        assert!(matches!(
            firewall.stance(&link, endpoint),
            Stance::Refuses(_)
        ));
    }

    #[test]
    fn policy_covers_prefix() {
        let mut message = vec![0; 168];
        message[..4].copy_from_slice(&[10, 0, 16, 0]);
        message[40..42].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
        message[42] = 24;
        let policy = policy(&message).unwrap();
        assert!(policy.covers("10.0.16.5:53".parse().unwrap()));
        assert!(!policy.covers("10.0.17.5:53".parse().unwrap()));
        assert!(!policy.covers("[fd00::1]:53".parse().unwrap()));
        message[44] = 6;
        assert!(
            !super::policy(&message)
                .unwrap()
                .covers("10.0.16.5:53".parse().unwrap()),
            "TCP alone"
        );
    }
}
