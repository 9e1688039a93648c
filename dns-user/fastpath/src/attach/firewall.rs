//! Objections of the packet filter and IPsec to interfaces on which queries arrive.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use super::{
    netlink::{LOOPBACK, Link, Socket},
    rules::{Device, Facts, PacketFilter, any_client},
};

/// Interval at which rules and policies are read while any interface is served.
const ROUND: Duration = Duration::from_secs(2);

/// Maximum number of cached answers.
const MOST_KNOWN: usize = 65_536;

/// Follows the rules, the policies, and the routes to clients.
#[derive(Debug, Default)]
pub(super) struct Firewall {
    rules: PacketFilter,
    /// The kernel's answers about sets in these rules.
    facts: Facts,
    /// The policies as read last.
    policies: Vec<Policy>,
    read: Option<Instant>,
    routes_changed: bool,
    /// Cached answers, by interface, endpoint and client.
    known: BTreeMap<(u32, SocketAddr, IpAddr), Option<String>>,
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

    /// Reads rules and policies again when they are due; returns whether they may have changed.
    pub(super) fn refresh(&mut self, now: Instant) -> bool {
        if self
            .read
            .is_some_and(|read| now.saturating_duration_since(read) < ROUND)
        {
            return false;
        }
        self.read = Some(now);
        let mut is_changed = std::mem::take(&mut self.routes_changed);
        match self
            .rules
            .read_again()
            .and_then(|rules| Ok((rules, policies()?)))
        {
            Ok((rules, policies)) => {
                self.problem = None;
                if (&rules, &policies) != (&self.rules, &self.policies) {
                    (self.rules, self.policies) = (rules, policies);
                    self.facts.forget();
                    is_changed = true;
                } else {
                    is_changed |= self.facts.ask_again();
                }
            }
            Err(error) => {
                let lasts = error.kind() == io::ErrorKind::PermissionDenied;
                let problem = Unreadable {
                    lasts,
                    why: error.to_string(),
                };
                // Each is logged only once.
                if self.problem.as_ref() != Some(&problem) {
                    tracing::warn!(%error, "cannot read the packet filter rules (getsockopt, nfnetlink): rate limits, dropped replies and NAT on lo go undetected");
                }
                self.problem = Some(problem);
                is_changed = true;
            }
        }
        if is_changed {
            self.known.clear();
        }
        is_changed
    }

    /// Returns the reason why an interface must not answer these clients for an endpoint, and the client
    /// that it concerns.
    ///
    /// Queries that arrive do not overrule a rule that holds back a client: they may belong to flows
    /// that connection tracking knew before the rule, while new ones are lost.
    pub(super) fn objection(
        &mut self,
        link: &Link,
        endpoint: SocketAddr,
        clients: impl Iterator<Item = IpAddr>,
        netlink: &mut Socket,
    ) -> Option<(String, Option<IpAddr>)> {
        if self.policies.iter().any(|policy| policy.covers(endpoint)) {
            let why =
                "an IPsec policy covers the endpoint, and the program's replies would bypass it";
            return Some((why.to_owned(), None));
        }
        if let Some(Unreadable { lasts: true, why }) = &self.problem {
            return Some((
                format!("the packet filter rules cannot be read: {why}"),
                None,
            ));
        }
        if self.known.len() > MOST_KNOWN {
            self.known.clear();
        }
        let device = Device::of(link);
        let mut clients = clients.map(|client| (client, true)).peekable();
        let any = clients.peek().is_none().then(|| match link.layer {
            LOOPBACK => endpoint.ip(),
            _ => any_client(endpoint),
        });
        for (client, is_known) in clients.chain(any.map(|client| (client, false))) {
            let Self {
                rules,
                facts,
                known,
                ..
            } = self;
            let found = known
                .entry((link.ifindex, endpoint, client))
                .or_insert_with(|| {
                    let objection = rules.objection(&device, client, endpoint, facts);
                    let objection = objection.map(|found| found.to_string());
                    let is_routed = is_known && link.layer != LOOPBACK;
                    objection.or_else(|| {
                        is_routed
                            .then(|| route_refusal(netlink, client, endpoint))
                            .flatten()
                    })
                });
            if let Some(objection) = found {
                return Some((objection.clone(), Some(client)));
            }
        }
        None
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
    /// The local address, or network, of the policy.
    ours: IpAddr,
    /// Length of its prefix in bits.
    prefix: u8,
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
    // struct xfrm_selector: destination, source, ports with masks, family, prefixes, protocol.
    let direction = *message.get(DIRECTION_AT)?;
    let port = |at: usize| {
        message
            .get(at..)?
            .first_chunk()
            .map(|bytes| u16::from_be_bytes(*bytes))
    };
    let family = u16::from_ne_bytes(*message.get(40..)?.first_chunk()?);
    // Outbound packets carry our address as their source.
    let is_out = direction == 1;
    let at = if is_out { 16 } else { 0 };
    let ours = match i32::from(family) {
        libc::AF_INET => IpAddr::from(*message.get(at..)?.first_chunk::<4>()?),
        _ => IpAddr::from(*message.get(at..)?.first_chunk::<16>()?),
    };
    let prefix = *message.get(if is_out { 43 } else { 42 })?;
    let ports = if is_out {
        (port(36)?, port(38)?)
    } else {
        (port(32)?, port(34)?)
    };
    Some(Policy {
        ours,
        prefix,
        protocol: *message.get(44)?,
        port: ports,
    })
}

impl Policy {
    /// Returns whether the policy covers queries to an endpoint, or replies from it.
    pub(super) fn covers(&self, endpoint: SocketAddr) -> bool {
        let same = |ours: u128, theirs: u128, bits: u32| {
            let host = bits.saturating_sub(u32::from(self.prefix));
            ours.checked_shr(host).unwrap_or(0) == theirs.checked_shr(host).unwrap_or(0)
        };
        let address = match (self.ours, endpoint.ip()) {
            (IpAddr::V4(ours), IpAddr::V4(ip)) => {
                same(ours.to_bits().into(), ip.to_bits().into(), 32)
            }
            (IpAddr::V6(ours), IpAddr::V6(ip)) => same(ours.to_bits(), ip.to_bits(), 128),
            _ => false,
        };
        let (port, mask) = self.port;
        address && matches!(self.protocol, 0 | 17) && endpoint.port() & mask == port & mask
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
