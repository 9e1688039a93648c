//! Objections of the packet filter and IPsec to interfaces on which queries arrive.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::{Duration, Instant},
};

use super::{
    netlink::Link,
    rules::{Device, Objection, Rules},
    xfrm::{self, Policy},
};

/// Interval at which rules and policies are read while any interface is served.
const ROUND: Duration = Duration::from_secs(2);

/// Maximum number of cached answers.
const MOST_KNOWN: usize = 65_536;

/// Follows the rules and policies.
#[derive(Debug, Default)]
pub(super) struct Objections {
    /// The rules as read last.
    rules: Rules,
    /// The policies as read last.
    policies: Vec<Policy>,
    read: Option<Instant>,
    /// Cached answers, by interface, endpoint and client.
    known: BTreeMap<(u32, SocketAddr, IpAddr), Option<Objection>>,
    /// The last reading error, so that it is logged only once.
    problem: Option<String>,
}

impl Objections {
    /// Reads rules and policies again when they are due.
    pub(super) fn refresh(&mut self, now: Instant) {
        if self.read.is_some_and(|read| now.saturating_duration_since(read) < ROUND) {
            return;
        }
        self.read = Some(now);
        let found = self.rules.read_again().and_then(|rules| Ok((rules, xfrm::policies()?)));
        match found {
            Ok((rules, policies)) => {
                self.problem = None;
                if (&rules, &policies) != (&self.rules, &self.policies) {
                    (self.rules, self.policies) = (rules, policies);
                    self.known.clear();
                }
            }
            Err(error) => {
                let problem = error.to_string();
                if self.problem.as_ref() != Some(&problem) {
                    tracing::warn!(%error, "cannot read the packet filter rules (getsockopt, nfnetlink): rate limits, dropped replies and NAT on lo go undetected; the gate relies on arriving queries alone");
                }
                self.problem = Some(problem);
            }
        }
    }

    /// Returns the reason why an interface must not answer these clients for an endpoint, and the client
    /// that it concerns.
    ///
    /// Queries that arrive do not overrule a rule that holds back a client: they may belong to flows
    /// that connection tracking knew before the rule, while new ones are lost.
    pub(super) fn find(
        &mut self,
        link: &Link,
        endpoint: SocketAddr,
        clients: impl Iterator<Item = IpAddr>,
    ) -> Option<(String, Option<IpAddr>)> {
        if self.policies.iter().any(|policy| policy.covers(endpoint)) {
            let why = "an IPsec policy covers the endpoint, and the program's replies would bypass it";
            return Some((why.to_owned(), None));
        }
        if self.known.len() > MOST_KNOWN {
            self.known.clear();
        }
        let device = Device::of(link);
        let mut clients = clients.peekable();
        let any = clients.peek().is_none().then(|| any_client(endpoint));
        for client in clients.chain(any) {
            let Self { rules, known, .. } = self;
            let found = known
                .entry((link.ifindex, endpoint, client))
                .or_insert_with(|| rules.objection(&device, client, endpoint));
            if let Some(objection) = found {
                return Some((objection.to_string(), Some(client)));
            }
        }
        None
    }
}

/// Returns a documentation address (RFC 5737, RFC 3849), used while no client is known.
fn any_client(endpoint: SocketAddr) -> IpAddr {
    if endpoint.is_ipv4() {
        Ipv4Addr::new(192, 0, 2, 1).into()
    } else {
        Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into()
    }
}
