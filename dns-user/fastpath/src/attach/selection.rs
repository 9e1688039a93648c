//! Which interfaces to serve.
//!
//! Without a list in the configuration every interface is served on which a
//! query for one of our addresses can arrive:
//!
//! * `lo`: local processes' queries travel over it whatever our address is.
//! * if we listen only on loopback addresses, nothing else;
//! * otherwise every interface, but for bridges, whose ports are served, and
//!   for parts of a bond or team, which is served as a whole.

use std::net::SocketAddr;

use super::netlink::Link;
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
    /// By name or glob.
    Listed(Vec<String>),
    /// Only the loopback.
    Loopback,
    /// Wherever queries can arrive.
    All,
}

impl Selection {
    /// The selection for this configuration.
    pub(crate) fn new(listed: Option<&[String]>, left_out: &[String], endpoints: &[SocketAddr]) -> Self {
        let candidates = match listed {
            Some(names) => Candidates::Listed(names.to_vec()),
            None if endpoints.iter().all(|endpoint| endpoint.ip().is_loopback()) => Candidates::Loopback,
            None => Candidates::All,
        };
        Self { candidates, left_out: left_out.to_vec() }
    }

    /// Whether to serve this interface.
    pub(super) fn takes(&self, link: &Link) -> bool {
        let Self { candidates, left_out } = self;
        let is_among = |patterns: &[String]| patterns.iter().any(|pattern| is_named(link, pattern));
        if is_among(left_out) {
            return false;
        }
        match candidates {
            Candidates::Listed(patterns) => is_among(patterns),
            Candidates::Loopback => link.layer == 772,
            Candidates::All => {
                let part_of_bond = matches!(link.part_of.as_deref(), Some("bond" | "team"));
                link.kind.as_deref() != Some("bridge") && !part_of_bond
            }
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
            ifindex: 3,
            name: name.into(),
            layer: if name == "lo" { 772 } else { 1 },
            kind: kind.map(str::to_owned),
            part_of: part_of.map(str::to_owned),
            address: [0; 6],
            master: None,
            xdp_program: None,
        }
    }

    #[test]
    fn without_a_list_all_are_served_where_queries_can_arrive() {
        let all = Selection::new(None, &[], &["169.254.0.2:53".parse().unwrap()]);
        assert!(all.takes(&link("lo", None, None)));
        assert!(all.takes(&link("eth0", None, None)));
        assert!(all.takes(&link("veth1", Some("veth"), Some("bridge"))));
        assert!(!all.takes(&link("br0", Some("bridge"), None)), "its ports are served");
        assert!(!all.takes(&link("eth1", None, Some("bond"))), "the bond is served");
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
            assert_eq!(selection.takes(&link(name, Some("bridge"), None)), served, "{name}");
        }
    }
}
