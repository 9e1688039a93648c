//! Which interfaces may be served; [`super::gate`] decides which are.
//!
//! Without a list in the configuration every interface may be, or `lo` alone if we listen on
//! loopback addresses only. The kernel names the interface by which a query came as IP sees it: a
//! bridge or bond and not its ports.

use std::{collections::HashSet, net::SocketAddr};

use super::netlink::{LOOPBACK, Link};
use dns_core::config::file_pattern;

/// Which interfaces are to be served.
#[derive(Debug)]
pub(crate) struct Selection {
    /// Of these.
    candidates: Candidates,
    /// But for these, by name or glob: they are left to userspace.
    left_out: Vec<String>,
}

/// See [`Selection`].
#[derive(Debug)]
enum Candidates {
    /// By name, or by pattern.
    Listed(HashSet<String>, Vec<String>),
    /// Only the loopback.
    Loopback,
    /// Every one.
    All,
}

impl Selection {
    /// The selection for this configuration.
    pub(crate) fn new(listed: Option<&[String]>, left_out: &[String], endpoints: &[SocketAddr]) -> Self {
        let candidates = match listed {
            Some(names) => {
                let is_plain = |name: &String| !name.contains(['*', '?', '[', '\\']);
                let (plain, patterns): (Vec<String>, Vec<String>) = names.iter().cloned().partition(is_plain);
                Candidates::Listed(plain.into_iter().collect(), patterns)
            }
            None if endpoints.iter().all(|endpoint| endpoint.ip().is_loopback()) => Candidates::Loopback,
            None => Candidates::All,
        };
        Self { candidates, left_out: left_out.to_vec() }
    }

    /// Whether the configuration names this interface without a wildcard: then it is served
    /// without waiting for queries.
    pub(super) fn names(&self, link: &Link) -> bool {
        match &self.candidates {
            Candidates::Listed(plain, _) => plain.contains(&link.name) && self.takes(link),
            Candidates::Loopback | Candidates::All => false,
        }
    }

    /// Whether to serve this interface, once queries arrive through it.
    pub(super) fn takes(&self, link: &Link) -> bool {
        let Self { candidates, left_out } = self;
        let is_among = |patterns: &[String]| patterns.iter().any(|pattern| is_named(link, pattern));
        if is_among(left_out) {
            return false;
        }
        match candidates {
            Candidates::Listed(plain, patterns) => plain.contains(&link.name) || is_among(patterns),
            Candidates::Loopback => link.layer == LOOPBACK,
            Candidates::All => true,
        }
    }
}

/// Returns whether an interface has this name, or one that this pattern matches. A text that is
/// no pattern stands for itself.
fn is_named(link: &Link, pattern: &str) -> bool {
    file_pattern::matches(pattern.as_bytes(), link.name.as_bytes()).unwrap_or(link.name == pattern)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An interface.
    fn link(name: &str, kind: Option<&str>, part_of: Option<&str>) -> Link {
        Link {
            layer: if name == "lo" { 772 } else { 1 },
            kind: kind.map(str::to_owned),
            part_of: part_of.map(str::to_owned),
            ..Link::named(3, name)
        }
    }

    #[test]
    fn without_a_list_all_are_served_where_queries_can_arrive() {
        let all = Selection::new(None, &[], &["169.254.0.2:53".parse().unwrap()]);
        assert!(all.takes(&link("lo", None, None)));
        assert!(all.takes(&link("eth0", None, None)));
        assert!(all.takes(&link("br0", Some("bridge"), None)));
        assert!(!all.names(&link("lo", None, None)));
        let loopback =
            Selection::new(None, &[], &["127.0.0.1:53".parse().unwrap(), "[::1]:53".parse().unwrap()]);
        assert!(loopback.takes(&link("lo", None, None)));
        assert!(!loopback.takes(&link("eth0", None, None)));
    }

    #[test]
    fn what_is_left_to_userspace_is_never_served() {
        let (all, left) = (["eth0", "veth1"].map(str::to_owned), ["eth*".to_owned()]);
        let endpoints = ["10.0.0.1:53".parse().unwrap()];
        for selection in [Selection::new(None, &left, &endpoints), Selection::new(Some(&all), &left, &[])] {
            assert!(!selection.takes(&link("eth0", None, None)));
            assert!(selection.takes(&link("veth1", Some("veth"), None)));
        }
    }

    #[test]
    fn lists_hold_names_and_globs() {
        let listed = ["lo", "w-*", "br[0"].map(str::to_owned);
        let selection = Selection::new(Some(&listed), &[], &[]);
        for (name, served) in
            [("lo", true), ("w-abc-0", true), ("eth0", false), ("br[0", true), ("br0", false)]
        {
            let link = link(name, Some("bridge"), None);
            assert_eq!(selection.takes(&link), served, "{name}");
            assert_eq!(selection.names(&link), name == "lo", "{name}");
        }
    }
}
