//! Indexed nodes, and the instances registered under one name in one place.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use hashbrown::{HashMap, HashSet};

use super::{
    PeerKey, Place, PlacedName,
    live::ServiceInstances,
    lower,
    registrations::{CheckStatus, Instance, Node},
};
use crate::config::{Config, Visibility};
use dns_core::name::Name;

/// Index of a node in [`Nodes::nodes`].
type NodeId = u32;

/// The readable nodes, sorted by name.
#[derive(Debug, Default)]
pub(crate) struct Nodes {
    nodes: Vec<Arc<Node>>,
    by_name: HashMap<PlacedName, NodeId, foldhash::fast::RandomState>,
    /// Nodes by peer and name, because instances in definition files do not name the datacenter.
    by_peer: HashMap<PeerKey, NodeId, foldhash::fast::RandomState>,
    /// Nodes by lower-case id, sorted for prefix lookups.
    by_id: BTreeMap<PlacedName, NodeId>,
    /// Names above nodes whose names contain dots.
    above: HashSet<PlacedName, foldhash::fast::RandomState>,
    peers: HashSet<Box<str>, foldhash::fast::RandomState>,
    /// First node at each address in the local datacenter.
    addresses: HashMap<IpAddr, NodeId, foldhash::fast::RandomState>,
}

impl Nodes {
    pub(super) fn index(mut nodes: Vec<Arc<Node>>, visibility: &Visibility, own: &Place) -> Self {
        // An instance is seen only if both its node and its service are readable (tests/cases).
        nodes.retain(|node| visibility.node(&node.name));
        nodes.sort_by_cached_key(|node| (lower(&node.name), node.peer.clone()));
        let mut index = Self::default();
        for (number, node) in nodes.iter().enumerate() {
            // Fewer than 2^32 nodes: the names alone would fill the memory.
            let number = number as NodeId;
            let place = node.place();
            if place == *own
                && let Ok(address) = node.address.parse()
            {
                // Of several nodes with one address the first by name answers, and tagged addresses
                // do not count (tests/cases).
                index.addresses.entry(address).or_insert(number);
            }
            if !node.id.is_empty() {
                index.by_id.insert((place.clone(), lower(&node.id)), number);
            }
            let name = lower(&node.name);
            for (dot, _) in name.match_indices('.') {
                index.above.insert((place.clone(), name[dot + 1..].into()));
            }
            let peer = node.peer.as_deref().map(lower);
            index.peers.extend(peer.clone());
            index.by_peer.insert((peer, name.clone()), number);
            index.by_name.insert((place, name), number);
        }
        Self { nodes, ..index }
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the node with this lower-case name, or else the only one whose id starts with it.
    pub(crate) fn find(&self, place: &Place, name: &str) -> Option<&Node> {
        if let Some(&node) = self.by_name.get(&(place.clone(), Box::from(name))) {
            return Some(&self.nodes[node as usize]);
        }
        // Consul tries no shorter prefixes (tests/cases).
        if name.len() < 2 {
            return None;
        }
        let mut matches = self
            .by_id
            .range((place.clone(), Box::from(name))..)
            .take_while(|((at, id), _)| at == place && id.starts_with(name));
        // The beginning of several ids selects none of them (tests/cases).
        match (matches.next(), matches.next()) {
            (Some((_, &node)), None) => Some(&self.nodes[node as usize]),
            _ => None,
        }
    }

    /// Returns whether a node's name ends with a dot and this lower-case name.
    pub(crate) fn has_below(&self, place: &Place, name: &str) -> bool {
        self.above.contains(&(place.clone(), Box::from(name)))
    }

    pub(super) fn is_peer(&self, name: &str) -> bool {
        self.peers.contains(name)
    }

    /// Returns the node of an instance that a live Consul registers at `place`.
    pub(super) fn of_live_instance(
        &self,
        place: &Place,
        instance: &Instance,
    ) -> Option<&Arc<Node>> {
        let number = self.by_name.get(&(place.clone(), lower(&instance.node)))?;
        Some(&self.nodes[*number as usize])
    }

    /// Returns the node of an instance from a definition file.
    pub(super) fn of_file_instance(&self, instance: &Instance) -> Option<&Arc<Node>> {
        let number = self
            .by_peer
            .get(&(instance.peer.as_deref().map(lower), lower(&instance.node)))?;
        Some(&self.nodes[*number as usize])
    }

    pub(crate) fn at(&self, address: IpAddr) -> Option<&Node> {
        let number = self.addresses.get(&address)?;
        Some(&self.nodes[*number as usize])
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

    /// Returns the address in text form: `lan_ipv6`, `lan_ipv4`, or else the address itself; in another
    /// datacenter, with `translate_wan_addrs`, each `wan` address that exists in place of its `lan` one.
    fn chosen(&self, config: &Config, accept: Accept) -> &str {
        choose(
            config.translates(&self.datacenter),
            accept,
            &self.address,
            |name: &str| self.tagged_addresses.get(name).map(String::as_str),
        )
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
        let own = choose(
            config.translates(&node.datacenter),
            accept,
            &self.address,
            |name: &str| {
                self.tagged_addresses
                    .get(name)
                    .map(|tagged| tagged.address.as_str())
            },
        );
        // Without an address of its own, the node's address and tags decide (tests/cases).
        if own.is_empty() {
            return Some(match node.location(config, accept)? {
                // The node's name does not resolve to an address taken from a tag.
                Location::Ip(address) if node.chosen(config, accept) == node.address => {
                    Target::Node(address)
                }
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

    /// Returns the port that belongs to [`target`](Self::target); `None` if there is no port of this name.
    pub fn port(&self, node: &Node, config: &Config, name: Option<&str>) -> Option<u16> {
        if let Some(name) = name {
            let mut ports = self.ports.iter();
            // A port name that does not exist denies the whole name (tests/cases).
            let port = ports.find(|port| port.name.eq_ignore_ascii_case(name))?;
            return Some(port.port);
        }
        // The tagged address comes with its own port (tests/cases).
        if config.translates(&node.datacenter)
            && let Some(tagged) = self.tagged_addresses.get("wan")
            && tagged.port != 0
        {
            return Some(tagged.port);
        }
        let named = self
            .ports
            .iter()
            .find(|port| port.default)
            .or(self.ports.first());
        if self.impossible_port.is_some() && named.is_none_or(|port| !port.default) {
            return None;
        }
        match named {
            Some(named) if named.default || self.port == 0 => Some(named.port),
            _ => Some(self.port),
        }
    }
}

/// Returns the address for clients of this address family.
fn choose<'a>(
    translate: bool,
    accept: Accept,
    plain: &'a str,
    tag: impl Fn(&str) -> Option<&'a str>,
) -> &'a str {
    let mut fallback = plain;
    // In the own datacenter, wan tags do not count (tests/cases).
    let mut v4 = filled(&tag, "lan_ipv4");
    let mut v6 = filled(&tag, "lan_ipv6");
    if translate {
        // Each address alone, as Consul does: `lan_ipv4` without `wan_ipv4` precedes `wan`
        // (tests/own-cases/wan-translation-family-tags.json).
        fallback = filled(&tag, "wan").unwrap_or(fallback);
        v4 = filled(&tag, "wan_ipv4").or(v4);
        v6 = filled(&tag, "wan_ipv6").or(v6);
    }
    let tagged = match accept {
        Accept::V4 => v4,
        Accept::V6 => v6,
        // Consul prefers IPv6 where either family serves.
        Accept::Any => v6.or(v4),
    };
    tagged.unwrap_or(fallback)
}

fn filled<'a>(tag: &impl Fn(&str) -> Option<&'a str>, name: &str) -> Option<&'a str> {
    tag(name).filter(|address| !address.is_empty())
}

//----------- Groups ---------------------------------------------------------

/// The instances of a service in one place. Immutable; a change replaces it.
#[derive(Debug)]
pub(crate) struct Group {
    pub(super) key: PlacedName,
    pub(super) sources: Sources,
    /// Readable instances with a node, sorted by node and id.
    pub(crate) members: Vec<Member>,
    /// Whether every member that has a target has an address.
    pub(crate) has_only_addresses: bool,
    /// Whether no two members have the same target.
    pub(crate) has_distinct_targets: bool,
}

/// Registrations that a group is built from.
#[derive(Clone, Debug, Default)]
pub(super) struct Sources {
    pub(super) fixed: Vec<Arc<Instance>>,
    pub(super) live: Option<Arc<ServiceInstances>>,
}

/// An instance with its node.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) node: Arc<Node>,
    pub(crate) instance: Arc<Instance>,
    /// Worst status of all checks, including the node's.
    pub(crate) status: CheckStatus,
    /// Chosen once, because an answer may contain thousands.
    pub(crate) targets: Targets,
    /// Index of the first member with the same target for [`Accept::Any`].
    pub(crate) first_with_target: u32,
}

/// Targets of an instance, by address family.
#[derive(Clone, Debug)]
pub(crate) enum Targets {
    /// The same for every family.
    One(Option<Target>),
    /// Of IPv4, IPv6 and any family.
    Each(Box<[Option<Target>; 3]>),
}

impl Targets {
    fn of(instance: &Instance, node: &Node, config: &Config) -> Self {
        let [v4, v6, any] = [Accept::V4, Accept::V6, Accept::Any]
            .map(|accept| instance.target(node, config, accept, None));
        // Nearly all instances: three targets would take three times the memory.
        if v4 == any && v6 == any {
            Self::One(any)
        } else {
            Self::Each(Box::new([v4, v6, any]))
        }
    }

    pub(crate) fn get(&self, accept: Accept) -> Option<&Target> {
        match (self, accept) {
            (Self::One(target), _) => target.as_ref(),
            (Self::Each(targets), Accept::V4) => targets[0].as_ref(),
            (Self::Each(targets), Accept::V6) => targets[1].as_ref(),
            (Self::Each(targets), Accept::Any) => targets[2].as_ref(),
        }
    }

    /// Returns whether no family's target is a host name.
    fn are_addresses(&self) -> bool {
        for accept in [Accept::V4, Accept::V6, Accept::Any] {
            if let Some(Target::Host(_)) = self.get(accept) {
                return false;
            }
        }
        true
    }
}

impl Sources {
    pub(super) fn instances(&self) -> impl Iterator<Item = &Arc<Instance>> {
        self.fixed
            .iter()
            .chain(self.live.iter().flat_map(|live| &live.instances))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.fixed.is_empty() && self.live.is_none()
    }
}

impl Member {
    fn new(node: &Arc<Node>, instance: &Arc<Instance>, config: &Config) -> Self {
        let checks = instance.checks.iter().chain(&node.checks);
        // An instance without checks counts as passing, as in Consul.
        let status = checks.map(|check| check.status).max().unwrap_or_default();
        let targets = Targets::of(instance, node, config);
        Self {
            node: node.clone(),
            instance: instance.clone(),
            status,
            targets,
            first_with_target: 0,
        }
    }

    /// Returns the sort key of the instance.
    pub(super) fn order(&self) -> (Box<str>, Box<str>) {
        (lower(&self.instance.node), lower(&self.instance.id))
    }
}

impl Group {
    pub(super) fn new(
        key: PlacedName,
        sources: Sources,
        nodes: &Nodes,
        visibility: &Visibility,
        config: &Config,
    ) -> Self {
        let mut members = Vec::new();
        if visibility.service(&key.1) {
            for instance in &sources.fixed {
                if let Some(node) = nodes.of_file_instance(instance) {
                    members.push(Member::new(node, instance, config));
                }
            }
            for instance in sources.live.iter().flat_map(|live| &live.instances) {
                if let Some(node) = nodes.of_live_instance(&key.0, instance) {
                    members.push(Member::new(node, instance, config));
                }
            }
            members.sort_by_cached_key(Member::order);
            number_targets(&mut members);
        }
        let has_only_addresses = members.iter().all(|member| member.targets.are_addresses());
        let mut numbered = (0_u32..).zip(&members);
        let has_distinct_targets =
            numbered.all(|(index, member)| member.first_with_target == index);
        Self {
            key,
            sources,
            members,
            has_only_addresses,
            has_distinct_targets,
        }
    }

    /// Returns the services that the group's mesh instances represent, in lower case.
    pub(super) fn destinations(&self) -> BTreeSet<Box<str>> {
        let mut destinations = BTreeSet::new();
        for member in &self.members {
            if let Some(destination) = member.instance.destination() {
                destinations.insert(lower(destination));
            }
        }
        destinations
    }

    /// Returns the virtual addresses that a live Consul reports with these instances, for the local
    /// datacenter and peers.
    pub(super) fn virtual_addresses(&self, own: &Place) -> Vec<(PeerKey, IpAddr)> {
        let peer = match &self.key.0 {
            Place::Peer(peer) => Some(peer.clone()),
            place if place == own => None,
            // Virtual names are looked up here or at a peer: a datacenter in them has no effect
            // (tests/cases).
            Place::Datacenter(_) => return Vec::new(),
        };
        let Some(live) = &self.sources.live else {
            return Vec::new();
        };
        let mut addresses = Vec::new();
        for (service, address) in &live.virtual_addresses {
            addresses.push(((peer.clone(), lower(service)), *address));
        }
        addresses
    }

    /// Returns the instances' own addresses, each with the instance's index.
    pub(super) fn addresses(&self) -> Vec<(IpAddr, u32)> {
        let mut addresses = Vec::new();
        for (index, member) in (0_u32..).zip(&self.members) {
            if let Ok(address) = member.instance.address.parse() {
                addresses.push((address, index));
            }
        }
        addresses
    }
}

/// Sets each member's index of the first member with the same target.
fn number_targets(members: &mut [Member]) {
    let mut first: HashMap<Target, u32, foldhash::fast::RandomState> = HashMap::default();
    for (index, member) in (0_u32..).zip(members) {
        member.first_with_target = match member.targets.get(Accept::Any) {
            // A node's own address and the same address as a service's are one.
            Some(Target::Node(address) | Target::Address(address)) => {
                *first.entry(Target::Address(*address)).or_insert(index)
            }
            Some(host @ Target::Host(_)) => *first.entry(host.clone()).or_insert(index),
            None => index,
        };
    }
}

impl Instance {
    /// Returns the service that this mesh instance represents; `None` if it is not part of the mesh.
    pub(super) fn destination(&self) -> Option<&str> {
        match &self.proxy_for {
            Some(destination) => Some(destination),
            None if self.connect_native => Some(&self.service),
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::registrations::{NamedPort, TaggedAddress};

    /// A configuration of `dc1` that translates addresses of other datacenters.
    fn config() -> Config {
        let text = br#"{"consul": {"translate_wan_addrs": true}}"#;
        let (config, _) = Config::of_document("test", text).whole().unwrap().unwrap();
        config
    }

    fn node(datacenter: &str, address: &str, tags: &[(&str, &str)]) -> Node {
        let mut node = Node {
            datacenter: datacenter.to_owned(),
            address: address.to_owned(),
            ..Node::default()
        };
        for &(tag, address) in tags {
            node.tagged_addresses
                .insert(tag.to_owned(), address.to_owned());
        }
        node
    }

    fn instance(address: &str, tags: &[(&str, &str)]) -> Instance {
        let mut instance = Instance {
            address: address.to_owned(),
            ..Instance::default()
        };
        for &(tag, address) in tags {
            let address = address.to_owned();
            let tagged = TaggedAddress { address, port: 0 };
            instance.tagged_addresses.insert(tag.to_owned(), tagged);
        }
        instance
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    const ACCEPTS: [Accept; 3] = [Accept::V4, Accept::V6, Accept::Any];

    #[test]
    fn tagged_addresses_follow_family_and_datacenter() {
        const LAN: &[(&str, &str)] = &[("lan_ipv4", "10.0.0.2"), ("lan_ipv6", "fd00::2")];
        const ALL: &[(&str, &str)] = &[
            ("lan_ipv4", "10.0.0.2"),
            ("lan_ipv6", "fd00::2"),
            ("wan", "192.0.2.1"),
            ("wan_ipv4", "192.0.2.4"),
            ("wan_ipv6", "2001:db8::6"),
        ];
        let config = config();
        for (datacenter, tags, expected) in [
            ("dc1", &[][..], ["10.0.0.1"; 3]),
            ("dc2", &[], ["10.0.0.1"; 3]),
            ("dc1", LAN, ["10.0.0.2", "fd00::2", "fd00::2"]),
            ("dc2", LAN, ["10.0.0.2", "fd00::2", "fd00::2"]),
            ("DC1", ALL, ["10.0.0.2", "fd00::2", "fd00::2"]),
            ("dc2", ALL, ["192.0.2.4", "2001:db8::6", "2001:db8::6"]),
            ("dc1", &ALL[2..3], ["10.0.0.1"; 3]),
            ("dc2", &ALL[2..3], ["192.0.2.1"; 3]),
            // Each family alone: `lan_ipv4` without `wan_ipv4` precedes `wan`.
            (
                "dc2",
                &[LAN[0], ALL[2]],
                ["10.0.0.2", "192.0.2.1", "10.0.0.2"],
            ),
            (
                "dc2",
                &[LAN[0], ALL[4]],
                ["10.0.0.2", "2001:db8::6", "2001:db8::6"],
            ),
            (
                "dc2",
                &[("wan", ""), ("wan_ipv4", ""), LAN[0]],
                ["10.0.0.2", "10.0.0.1", "10.0.0.2"],
            ),
        ] {
            let node = node(datacenter, "10.0.0.1", tags);
            let found = ACCEPTS.map(|accept| node.location(&config, accept));
            let locations = expected.map(|address| Some(Location::Ip(ip(address))));
            assert_eq!(found, locations, "{datacenter} {tags:?}");
            // Instances have the same rules; without addresses, the node's apply, under a name of its own if
            // a tag chose it.
            let tagged = instance("10.0.0.1", tags);
            let plain = self::node(datacenter, "10.0.0.7", &[]);
            let found = ACCEPTS.map(|accept| tagged.target(&plain, &config, accept, None));
            let targets = expected.map(|address| Some(Target::Address(ip(address))));
            assert_eq!(found, targets, "{datacenter} {tags:?}");
            let bare = instance("", &[]);
            let found = ACCEPTS.map(|accept| bare.target(&node, &config, accept, None));
            let targets = expected.map(|address| {
                Some(if address == "10.0.0.1" {
                    Target::Node(ip(address))
                } else {
                    Target::Address(ip(address))
                })
            });
            assert_eq!(found, targets, "{datacenter} {tags:?}");
            // Kept once if it is the same for each family.
            let targets_of = Targets::of(&bare, &node, &config);
            let found = ACCEPTS.map(|accept| targets_of.get(accept).cloned());
            assert_eq!(found, targets);
            assert!(targets_of.are_addresses());
            let is_one = matches!(targets_of, Targets::One(_));
            assert_eq!(is_one, expected == [expected[0]; 3]);
        }
    }

    #[test]
    fn unasked_host_names_are_targets() {
        let config = config();
        let name = |text: &str| Name::from_text(text).unwrap();
        let by_ip = node("dc1", "10.0.0.1", &[]);
        let by_name = node("dc1", "node.example", &[]);
        let nowhere = node("dc1", "", &[]);
        let host = |text: &str| Some(Target::Host(name(text)));
        let asked = name("web.service.consul");
        for (address, on, expected) in [
            ("web.example", &by_ip, host("web.example")),
            (
                "Web.Service.Consul",
                &by_ip,
                Some(Target::Node(ip("10.0.0.1"))),
            ),
            ("web.service.consul.", &by_name, host("web.service.consul")),
            ("web.service.consul.", &nowhere, host("web.service.consul")),
            ("", &by_name, host("node.example")),
            ("", &nowhere, None),
            ("a..b", &by_ip, None),
        ] {
            let found = instance(address, &[]).target(on, &config, Accept::V4, Some(&asked));
            assert_eq!(found, expected, "{address}");
        }
        for (text, expected) in [
            ("", None),
            ("10.0.0.1", Some(Location::Ip(ip("10.0.0.1")))),
            ("fd00::1", Some(Location::Ip(ip("fd00::1")))),
            ("A.example", Some(Location::Host(name("a.example")))),
            ("a..b", None),
        ] {
            assert_eq!(Location::from_text(text), expected, "{text}");
        }
        let mixed = instance("10.0.0.1", &[("lan_ipv6", "a.example")]);
        let targets = Targets::of(&mixed, &by_ip, &config);
        assert!(!targets.are_addresses());
        assert_eq!(
            targets.get(Accept::V4),
            Some(&Target::Address(ip("10.0.0.1")))
        );
        assert_eq!(targets.get(Accept::V6), host("a.example").as_ref());
    }

    #[test]
    fn ports_follow_names_defaults_and_tags() {
        let config = config();
        let named = |name: &str, port, default| NamedPort {
            name: name.to_owned(),
            port,
            default,
        };
        let [http, admin] = [named("HTTP", 8080, false), named("admin", 9000, true)];
        let none: &[NamedPort] = &[];
        let main = std::slice::from_ref(&http);
        let both = &[http.clone(), admin][..];
        for (port, impossible, ports, wan, datacenter, name, expected) in [
            (80, None, none, 0, "dc1", None, Some(80)),
            (0, None, none, 0, "dc1", None, Some(0)),
            (80, None, none, 0, "dc1", Some("http"), None),
            (80, None, main, 0, "dc1", Some("http"), Some(8080)),
            (80, None, both, 0, "dc1", Some("ADMIN"), Some(9000)),
            (80, None, main, 0, "dc1", None, Some(80)),
            (0, None, main, 0, "dc1", None, Some(8080)),
            (80, None, both, 0, "dc1", None, Some(9000)),
            (0, None, both, 0, "dc1", None, Some(9000)),
            // A port that is none leaves no SRV record, unless another one is the default.
            (0, Some(-1), none, 0, "dc1", None, None),
            (0, Some(-1), main, 0, "dc1", None, None),
            (0, Some(-1), both, 0, "dc1", None, Some(9000)),
            (80, None, both, 443, "dc2", None, Some(443)),
            (80, None, both, 443, "dc1", None, Some(9000)),
            (80, None, none, 0, "dc2", None, Some(80)),
            (80, None, both, 443, "dc2", Some("http"), Some(8080)),
        ] {
            let mut one = instance("", &[("wan", "192.0.2.1")]);
            one.tagged_addresses.get_mut("wan").unwrap().port = wan;
            one.port = port;
            one.impossible_port = impossible;
            one.ports = ports.to_vec();
            let found = one.port(&node(datacenter, "10.0.0.1", &[]), &config, name);
            assert_eq!(
                found, expected,
                "{port} {impossible:?} {ports:?} {wan} {datacenter} {name:?}"
            );
        }
    }
}
