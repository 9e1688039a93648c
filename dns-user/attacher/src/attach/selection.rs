//! The interfaces that may be served; [`super::gate`] decides which of them are.
//!
//! Without a list in the configuration every interface may be served, or only `lo` while all listen
//! addresses are loopback addresses. The kernel reports the receiving interface at the IP layer: a
//! bridge or bond, not its ports. Of the listen addresses, local ones are served.

use std::{
    collections::{HashMap, HashSet},
    net::{IpAddr, SocketAddr},
};

use dns_common::scope::Endpoint;
use dns_core::config::{values, wildcard_receives};

use super::netlink::{LOOPBACK, Link};
use crate::scope::address_bytes;

/// The interfaces that may be served.
#[derive(Debug)]
pub(crate) struct Selection {
    candidates: Candidates,
    /// Names and glob patterns of interfaces whose queries userspace answers.
    excluded: Vec<String>,
}

#[derive(Debug)]
enum Candidates {
    /// Names with their places in the list, and glob patterns.
    Listed(HashMap<String, usize>, Vec<String>),
    /// Interfaces on which queries to a listen address can arrive.
    Reachable,
}

impl Selection {
    pub(crate) fn new(listed: Option<&[String]>, excluded: &[String]) -> Self {
        let candidates = match listed {
            Some(names) => {
                let (plain, patterns): (Vec<String>, Vec<String>) = names
                    .iter()
                    .cloned()
                    // Plain names are in a map: with 300 of them, comparing each took a third of
                    // this thread's time.
                    .partition(|name: &String| !name.contains(['*', '?', '[', '\\']));
                let places = 0..plain.len();
                Candidates::Listed(plain.into_iter().zip(places).collect(), patterns)
            }
            None => Candidates::Reachable,
        };
        Self {
            candidates,
            excluded: excluded.to_vec(),
        }
    }

    /// Returns whether the configuration names this interface without a wildcard: it is then served
    /// without waiting for queries.
    pub(super) fn names(&self, link: &Link) -> bool {
        match &self.candidates {
            Candidates::Listed(plain, _) => plain.contains_key(&link.name) && !self.excludes(link),
            Candidates::Reachable => false,
        }
    }

    /// Returns the place of an interface among those that the configuration names; all others come last.
    pub(super) fn place(&self, link: &Link) -> usize {
        match &self.candidates {
            Candidates::Listed(plain, _) => plain.get(&link.name).copied(),
            Candidates::Reachable => None,
        }
        .unwrap_or(usize::MAX)
    }

    /// Returns the interfaces that the configuration names without a wildcard and that do not
    /// exist, sorted by name.
    pub(super) fn missing(&self, links: &[Link]) -> Vec<&str> {
        let Candidates::Listed(plain, _) = &self.candidates else {
            return Vec::new();
        };
        let existing: HashSet<&str> = links.iter().map(|link| &*link.name).collect();
        let mut missing: Vec<&str> = plain
            .keys()
            .map(String::as_str)
            .filter(|name: &&str| !existing.contains(name))
            .collect();
        missing.sort_unstable();
        missing
    }

    /// Returns whether this interface is served once queries to one of the listen addresses arrive on
    /// it.
    ///
    /// The addresses are an argument because they change while the server runs: files in `addresses.d`
    /// add some, and Docker creates its bridge after a boot.
    pub(super) fn admits(&self, link: &Link, listen: &[SocketAddr]) -> bool {
        let is_candidate = match &self.candidates {
            Candidates::Listed(plain, patterns) => {
                plain.contains_key(&link.name) || is_among(link, patterns)
            }
            // The kernel drops queries to loopback addresses that arrive on another interface.
            Candidates::Reachable if listen.iter().all(|address| address.ip().is_loopback()) => {
                link.layer == LOOPBACK
            }
            Candidates::Reachable => true,
        };
        is_candidate && !self.excludes(link)
    }

    fn excludes(&self, link: &Link) -> bool {
        is_among(link, &self.excluded)
    }
}

fn is_among(link: &Link, patterns: &[String]) -> bool {
    patterns.iter().any(|pattern| is_named(link, pattern))
}

/// Returns whether the pattern matches one of the interface's names. Text that is not a valid
/// pattern is compared literally.
fn is_named(link: &Link, pattern: &str) -> bool {
    values::pattern_matches(pattern.as_bytes(), link.name.as_bytes())
        .unwrap_or(link.name == pattern)
}

/// Expands wildcards to the local addresses covered by their sockets and drops addresses that are
/// not local. Earlier endpoints take precedence if there are too many.
///
/// An IPv6 wildcard covers IPv4 as well, unless IPv4 has a separate socket on the port
/// (`server/sockets.rs`, as in bosh-dns).
pub(super) fn expand(listen: &[SocketAddr], local: &[IpAddr]) -> Vec<SocketAddr> {
    let mut all: Vec<SocketAddr> = Vec::new();
    for endpoint in listen {
        let addresses: Vec<IpAddr> = match endpoint.ip() {
            ip if is_scoped(&ip) => Vec::new(),
            ip if !ip.is_unspecified() => vec![ip],
            _ => {
                let mut addresses = Vec::new();
                for &address in local {
                    if wildcard_receives(*endpoint, address, listen) && !is_scoped(&address) {
                        addresses.push(address);
                    }
                }
                // A fixed order, since there may be more addresses than slots, and the kernel lists
                // them in any order; `lo`'s come first.
                addresses.sort_by_key(|address| (!address.is_loopback(), *address));
                addresses
            }
        };
        for address in addresses {
            let found = SocketAddr::new(address, endpoint.port());
            // An address may be named and be covered by a wildcard as well.
            if !all.contains(&found) {
                all.push(found);
            }
        }
    }
    all
}

/// Returns whether an address is link-local (fe80::/10). The programs do not distinguish links, so
/// userspace answers there.
fn is_scoped(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// Converts an endpoint to the form that the program compares.
pub(super) fn to_endpoint(endpoint: SocketAddr) -> Endpoint {
    Endpoint {
        address: address_bytes(endpoint.ip()),
        port: endpoint.port().to_be_bytes(),
        family: if endpoint.is_ipv4() { 4 } else { 6 },
        padding: [0; 5],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(name: &str, kind: Option<&str>, part_of: Option<&str>) -> Link {
        Link {
            layer: if name == "lo" { 772 } else { 1 },
            kind: kind.map(str::to_owned),
            part_of: part_of.map(str::to_owned),
            ..Link::named(3, name)
        }
    }

    fn listen(addresses: &[&str]) -> Vec<SocketAddr> {
        addresses
            .iter()
            .map(|address| address.parse().unwrap())
            .collect()
    }

    #[test]
    fn default_follows_listen_addresses() {
        let selection = Selection::new(None, &[]);
        let routable = listen(&["127.0.0.1:53", "169.254.0.2:53"]);
        assert!(selection.admits(&link("lo", None, None), &routable));
        assert!(selection.admits(&link("eth0", None, None), &routable));
        assert!(selection.admits(&link("br0", Some("bridge"), None), &routable));
        assert!(!selection.names(&link("lo", None, None)));
        let loopback = listen(&["127.0.0.1:53", "[::1]:53"]);
        assert!(selection.admits(&link("lo", None, None), &loopback));
        assert!(!selection.admits(&link("eth0", None, None), &loopback));
    }

    #[test]
    fn excluded_interfaces_stay_excluded() {
        let all = ["eth0", "veth1"].map(str::to_owned);
        let left = ["eth*".to_owned()];
        let endpoints = listen(&["10.0.0.1:53"]);
        for selection in [
            Selection::new(None, &left),
            Selection::new(Some(&all), &left),
        ] {
            assert!(!selection.admits(&link("eth0", None, None), &endpoints));
            assert!(selection.admits(&link("veth1", Some("veth"), None), &endpoints));
        }
    }

    #[test]
    fn only_plain_names_are_missing() {
        let listed = ["eth99", "eth0", "w-*"].map(str::to_owned);
        let links = [link("eth0", None, None)];
        assert_eq!(
            Selection::new(Some(&listed), &[]).missing(&links),
            ["eth99"]
        );
        assert!(Selection::new(None, &[]).missing(&links).is_empty());
    }

    #[test]
    fn names_keep_their_order() {
        let listed = ["eth1", "w-*", "lo", "eth0"].map(str::to_owned);
        let selection = Selection::new(Some(&listed), &[]);
        let mut links = ["lo", "w-1", "eth0", "eth1"].map(|name| link(name, None, None));
        links.sort_by_key(|link| selection.place(link));
        assert_eq!(links.map(|link| link.name), ["eth1", "lo", "eth0", "w-1"]);
    }

    #[test]
    fn lists_hold_names_and_globs() {
        let listed = ["lo", "w-*", "br[0"].map(str::to_owned);
        let selection = Selection::new(Some(&listed), &[]);
        for (name, served) in [
            ("lo", true),
            ("w-abc-0", true),
            ("eth0", false),
            ("br[0", true),
            ("br0", false),
        ] {
            let link = link(name, Some("bridge"), None);
            assert_eq!(selection.admits(&link, &[]), served, "{name}");
            assert_eq!(selection.names(&link), name == "lo", "{name}");
        }
    }

    #[test]
    fn wildcards_expand_to_local_addresses() {
        let local: Vec<IpAddr> = ["10.0.0.1", "::1", "127.0.0.1", "10.0.0.1"]
            .map(|ip| ip.parse().unwrap())
            .into();
        let listen = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert_eq!(
            expand(&[listen("0.0.0.0:53")], &local),
            [listen("127.0.0.1:53"), listen("10.0.0.1:53")]
        );
        let both = ["127.0.0.1:53", "[::1]:53", "10.0.0.1:53"].map(listen);
        assert_eq!(
            expand(&[listen("[::]:53")], &local),
            both,
            "IPv6's takes IPv4 too"
        );
        assert_eq!(
            expand(&[listen("[::]:53"), listen("10.0.0.1:54")], &local)[..3],
            both
        );
        let own_v4 = expand(&[listen("[::]:53"), listen("10.0.0.1:53")], &local);
        assert_eq!(
            own_v4,
            [listen("[::1]:53"), listen("10.0.0.1:53")],
            "IPv4 has a socket of its own"
        );
        assert_eq!(
            expand(&[listen("10.0.0.1:53"), listen("0.0.0.0:53")], &local).len(),
            2,
            "no repeats"
        );
    }

    #[test]
    fn endpoints_are_in_network_order() {
        let endpoint = to_endpoint("169.254.0.2:53".parse().unwrap());
        assert_eq!(
            endpoint.address,
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 169, 254, 0, 2]
        );
        assert_eq!((endpoint.port, endpoint.family), ([0, 53], 4));
    }
}
