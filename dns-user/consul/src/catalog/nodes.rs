//! Indexed nodes.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use hashbrown::{HashMap, HashSet};

use super::{
    Key, PeerKey, Place, lower,
    registrations::{Instance, Node},
};
use crate::config::{Config, Visibility};
use dns_core::name::Name;

/// Index of a node in [`Nodes::nodes`].
type NodeId = u32;

/// The readable nodes, sorted by name.
#[derive(Debug)]
pub(super) struct Nodes {
    nodes: Vec<Arc<Node>>,
    by_name: HashMap<Key, NodeId, foldhash::fast::RandomState>,
    /// Nodes by peer and name, because instances in definition files do not name the datacenter.
    by_peer: HashMap<PeerKey, NodeId, foldhash::fast::RandomState>,
    /// Nodes by lower-case id, sorted for prefix lookups.
    by_id: BTreeMap<Key, NodeId>,
    /// Names above nodes whose names contain dots.
    above: HashSet<Key, foldhash::fast::RandomState>,
    /// Peers with nodes.
    peers: HashSet<Box<str>, foldhash::fast::RandomState>,
    /// First node at each address in the local datacenter.
    addresses: HashMap<IpAddr, NodeId, foldhash::fast::RandomState>,
}

impl Nodes {
    pub(super) fn index(
        nodes: impl Iterator<Item = Arc<Node>>,
        visibility: &Visibility,
        own: &Place,
    ) -> Self {
        let mut nodes: Vec<Arc<Node>> = nodes.filter(|node| visibility.node(&node.name)).collect();
        nodes.sort_by_cached_key(|node| (lower(&node.name), node.peer.clone()));
        let mut index = Self {
            nodes: Vec::new(),
            by_name: HashMap::default(),
            by_peer: HashMap::default(),
            by_id: BTreeMap::new(),
            above: HashSet::default(),
            peers: HashSet::default(),
            addresses: HashMap::default(),
        };
        for (number, node) in nodes.iter().enumerate() {
            // Fewer than 2^32 nodes: the names alone would fill the memory.
            let number = number as NodeId;
            let place = node.place();
            if place == *own
                && let Ok(address) = node.address.parse()
            {
                index.addresses.entry(address).or_insert(number);
            }
            if !node.id.is_empty() {
                index.by_id.insert((place.clone(), lower(&node.id)), number);
            }
            let name = lower(&node.name);
            for (dot, _) in name.match_indices('.') {
                index.above.insert((place.clone(), name[dot + 1..].into()));
            }
            index.peers.extend(node.peer.as_deref().map(lower));
            index.by_peer.insert((node.peer.as_deref().map(lower), lower(&node.name)), number);
            index.by_name.insert((place, lower(&node.name)), number);
        }
        Self { nodes, ..index }
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().map(|node| &**node)
    }

    /// Returns the node with this lower-case name, or else the only one whose id starts with it.
    pub(super) fn find(&self, place: &Place, name: &str) -> Option<&Node> {
        if let Some(&node) = self.by_name.get(&(place.clone(), Box::from(name))) {
            return Some(&self.nodes[node as usize]);
        }
        if name.len() < 2 {
            return None;
        }
        let mut matches = self
            .by_id
            .range((place.clone(), Box::from(name))..)
            .take_while(|((at, id), _)| at == place && id.starts_with(name));
        match (matches.next(), matches.next()) {
            (Some((_, &node)), None) => Some(&self.nodes[node as usize]),
            _ => None,
        }
    }

    /// Returns whether a node's name ends with a dot and this lower-case name.
    pub(super) fn has_below(&self, place: &Place, name: &str) -> bool {
        self.above.contains(&(place.clone(), Box::from(name)))
    }

    pub(super) fn is_peer(&self, name: &str) -> bool {
        self.peers.contains(name)
    }

    /// Returns the node of an instance that a live Consul registers at `place`.
    pub(super) fn of_live_instance(&self, place: &Place, instance: &Instance) -> Option<&Arc<Node>> {
        let number = self.by_name.get(&(place.clone(), lower(&instance.node)))?;
        Some(&self.nodes[*number as usize])
    }

    /// Returns the node of an instance from a definition file.
    pub(super) fn of_file_instance(&self, instance: &Instance) -> Option<&Arc<Node>> {
        let number = self.by_peer.get(&(instance.peer.as_deref().map(lower), lower(&instance.node)))?;
        Some(&self.nodes[*number as usize])
    }

    pub(super) fn at(&self, address: IpAddr) -> Option<&Node> {
        self.addresses.get(&address).map(|&node| &*self.nodes[node as usize])
    }
}

//----------- Address ------------------------------------------------------
//
// Selects the address at which a node or an instance is reached.

/// Address family selected by the query type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accept {
    /// IPv4, for type A.
    V4,
    /// IPv6, for type AAAA.
    V6,
    /// One address of either family, for all other types.
    Any,
}

/// Address or host name of a node or an instance.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Location {
    /// An IP address, returned unchanged.
    Ip(IpAddr),
    /// Host name, resolved by a lookup.
    Host(Name),
}

/// Target of an instance, to which its SRV record points.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// Address of its node: `<node>.node.<datacenter>.<domain>`.
    Node(IpAddr),
    /// Own address, under a generated name: `<hex>.addr.<datacenter>.<domain>`.
    Address(IpAddr),
    /// The host name registered as its address.
    Host(Name),
}

impl Location {
    /// Parses an address; `None` if it is neither an IP address nor a domain name.
    pub fn from_text(text: &str) -> Option<Self> {
        match text.parse() {
            Ok(address) => Some(Self::Ip(address)),
            Err(_) if text.is_empty() => None,
            Err(_) => Name::from_text(text).ok().map(Self::Host),
        }
    }
}

impl Node {
    /// Returns the location of the node for clients of this address family.
    pub fn location(&self, config: &Config, accept: Accept) -> Option<Location> {
        Location::from_text(self.chosen(config, accept))
    }

    /// Returns the address in text form: `lan_ipv6`, `lan_ipv4`, or else the address itself; in
    /// another datacenter, with `translate_wan_addrs`, `wan_ipv6`, `wan_ipv4`, `wan`, or the
    /// address.
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
                // The node's name does not resolve to an address taken from a tag.
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

    /// Returns the port that belongs to [`target`](Self::target); `None` if there is no port of
    /// this name.
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
        if self.impossible_port.is_some() && named.is_none_or(|port| !port.default) {
            return None;
        }
        Some(named.filter(|port| port.default || self.port == 0).map_or(self.port, |port| port.port))
    }
}

/// Returns the address for clients of this address family.
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
