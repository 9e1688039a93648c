//! Objections of the packet filter and IPsec to interfaces on which queries arrive.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::{Duration, Instant},
};

use super::{
    gate::{FRESH_REPORTS, Known},
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
    /// Number of the server's reports when the last change was noticed; `None` before the first
    /// reading.
    changed: Option<u64>,
    /// Cached answers, by interface, endpoint and client.
    known: BTreeMap<(u32, SocketAddr, IpAddr), Option<Objection>>,
    /// The last reading error, so that it is logged only once.
    problem: Option<String>,
}

impl Objections {
    /// Reads rules and policies again when they are due, after this number of server reports.
    pub(super) fn refresh(&mut self, now: Instant, reports: u64) {
        if self.read.is_some_and(|read| now.saturating_duration_since(read) < ROUND) {
            return;
        }
        self.read = Some(now);
        let found = self.rules.read_again().and_then(|rules| Ok((rules, xfrm::policies()?)));
        match found {
            Ok((rules, policies)) => {
                self.problem = None;
                if (&rules, &policies) != (&self.rules, &self.policies) || self.changed.is_none() {
                    (self.rules, self.policies, self.changed) = (rules, policies, Some(reports));
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

    /// Returns the reason why an interface must not answer these clients for an endpoint.
    ///
    /// An objection to a client's queries is overruled only by later queries of that client in two
    /// reports, which the kernel delivered although the rules seem to forbid it. A single late query
    /// may have waited in a socket since before the change.
    pub(super) fn find(&mut self, link: &Link, endpoint: SocketAddr, clients: &[Known]) -> Option<String> {
        if self.policies.iter().any(|policy| policy.covers(endpoint)) {
            return Some(
                "an IPsec policy covers the endpoint, and the program's replies would bypass it".to_owned(),
            );
        }
        if self.known.len() > MOST_KNOWN {
            self.known.clear();
        }
        let device = Device::of(link);
        let any = [(any_client(endpoint), None)];
        // The earlier of two reports.
        let clients = clients.iter().map(|known| (known.client, known.arrived[0]));
        let any = any.into_iter().filter(|_| clients.len() == 0);
        for (client, arrived) in clients.clone().chain(any) {
            let Self { rules, known, changed, .. } = self;
            let found = known
                .entry((link.ifindex, endpoint, client))
                .or_insert_with(|| rules.objection(&device, client, endpoint));
            let fresh = changed.map(|changed| changed + FRESH_REPORTS);
            match found {
                // The rules were misread.
                Some(Objection::Held) if arrived.is_some() && arrived >= fresh => {}
                Some(objection) => return Some(objection.to_string()),
                None => {}
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

#[cfg(test)]
mod tests {
    use super::*;

    const ENDPOINT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(169, 254, 0, 2)), 53);
    const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 255, 10, 2));
    const OTHER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 255, 10, 3));

    /// Returns rules read after `reports` reports, which seem to hold back the queries of both
    /// clients.
    fn holding(reports: u64) -> Objections {
        let held = [CLIENT, OTHER].map(|client| ((7, ENDPOINT, client), Some(Objection::Held)));
        Objections { changed: Some(reports), known: held.into(), ..Objections::default() }
    }

    fn known(client: IpAddr, arrived: [Option<u64>; 2]) -> Known {
        Known { client, arrived, seen: Instant::now() }
    }

    #[test]
    fn late_report_overrules_nothing() {
        let link = Link::named(7, "s-1");
        let find = |arrived| holding(10).find(&link, ENDPOINT, &[known(CLIENT, arrived)]).is_some();
        let fresh = Some(10 + FRESH_REPORTS);
        assert!(find([None; 2]) && find([Some(8), Some(9)]));
        assert!(find([Some(11), Some(12)]), "the reports count queries from before the change");
        assert!(find([None, fresh]) && find([Some(9), fresh]), "a single query may be late");
        assert!(!find([fresh, Some(20)]));
    }

    #[test]
    fn clients_speak_for_themselves() {
        let link = Link::named(7, "s-1");
        let fresh = known(CLIENT, [Some(10 + FRESH_REPORTS), Some(20)]);
        let other = known(OTHER, [Some(8), Some(9)]);
        assert!(holding(10).find(&link, ENDPOINT, &[fresh, other]).is_some());
    }
}
