//! Which of its addresses a node or an instance is reached at.

use std::net::IpAddr;

use dns_core::name::Name;

use super::registrations::{Instance, Node};
use crate::config::Config;

/// The address family that a question asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accept {
    /// Accepts IPv4 targets, for type A.
    V4,
    /// Accepts IPv6 targets, for type AAAA.
    V6,
    /// All other types: one address, whatever its family.
    Any,
}

/// Where something is reached.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Location {
    /// Reached at an IP address.
    Ip(IpAddr),
    /// A host name, to be looked up.
    Host(Name),
}

/// Where an instance is reached, and so what an SRV record points to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// At the address of its node: `<node>.node.<datacenter>.<domain>`.
    Node(IpAddr),
    /// At a generated name: `<hex>.addr.<datacenter>.<domain>`.
    Address(IpAddr),
    /// At a host name.
    Host(Name),
}

impl Location {
    /// Reads an address; `None`: neither an IP address nor a domain name.
    pub fn from_text(text: &str) -> Option<Self> {
        match text.parse() {
            Ok(address) => Some(Self::Ip(address)),
            Err(_) if text.is_empty() => None,
            Err(_) => Name::from_text(text).ok().map(Self::Host),
        }
    }
}

impl Node {
    /// Where the node is reached by clients that take addresses of this family.
    pub fn location(&self, config: &Config, accept: Accept) -> Option<Location> {
        Location::from_text(self.chosen(config, accept))
    }

    /// The address in text form: `lan_ipv6`, `lan_ipv4`, or else the address
    /// itself; in another datacenter, with `translate_wan_addrs`, `wan_ipv6`,
    /// `wan_ipv4`, `wan`, or the address.
    fn chosen(&self, config: &Config, accept: Accept) -> &str {
        let tag = |name: &str| self.tagged_addresses.get(name).map(String::as_str);
        choose(config.translates(&self.datacenter), accept, &self.address, tag)
    }
}

impl Instance {
    /// Returns the address or host name of the instance; `None` if it has no usable one.
    ///
    /// A host name equal to `asked` would loop, so the node's address replaces it.
    pub fn target(
        &self,
        node: &Node,
        config: &Config,
        accept: Accept,
        asked: Option<&Name>,
    ) -> Option<Target> {
        let tag = |name: &str| self.tagged_addresses.get(name).map(|tagged| tagged.address.as_str());
        let own = choose(config.translates(&node.datacenter), accept, &self.address, tag);
        if own.is_empty() {
            return Some(match node.location(config, accept)? {
                // An address that came from a tag is not what the node's name leads to.
                Location::Ip(address) if node.chosen(config, accept) == node.address => Target::Node(address),
                Location::Ip(address) => Target::Address(address),
                Location::Host(name) => Target::Host(name),
            });
        }
        match Location::from_text(own)? {
            Location::Ip(address) => Some(Target::Address(address)),
            Location::Host(name) if asked == Some(&name) => match node.location(config, accept) {
                Some(Location::Ip(address)) => Some(Target::Node(address)),
                _ => Some(Target::Host(name)),
            },
            Location::Host(name) => Some(Target::Host(name)),
        }
    }

    /// The port that is reached at [`target`](Self::target); `None`: it has no port of this name.
    pub fn port(&self, node: &Node, config: &Config, name: Option<&str>) -> Option<u16> {
        if let Some(name) = name {
            return self.ports.iter().find(|port| port.name.eq_ignore_ascii_case(name)).map(|port| port.port);
        }
        if config.translates(&node.datacenter)
            && let Some(tagged) = self.tagged_addresses.get("wan")
            && tagged.port != 0
        {
            return Some(tagged.port);
        }
        let named = self.ports.iter().find(|port| port.default).or(self.ports.first());
        Some(named.filter(|port| port.default || self.port == 0).map_or(self.port, |port| port.port))
    }
}

/// The address for clients that take this family.
fn choose<'a>(
    translate: bool,
    accept: Accept,
    plain: &'a str,
    tag: impl Fn(&str) -> Option<&'a str>,
) -> &'a str {
    let tag = |name| tag(name).filter(|address| !address.is_empty());
    let (fallback, v4, v6) = if translate {
        (tag("wan").unwrap_or(plain), tag("wan_ipv4"), tag("wan_ipv6"))
    } else {
        (plain, tag("lan_ipv4"), tag("lan_ipv6"))
    };
    let v6 = v6.filter(|_| accept != Accept::V4);
    let v4 = v4.filter(|_| accept != Accept::V6);
    v6.or(v4).unwrap_or(fallback)
}
