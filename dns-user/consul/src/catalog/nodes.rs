//! Indexed nodes.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use hashbrown::{HashMap, HashSet};

use super::{
    Key, PeerKey, Place, lower,
    registrations::{Instance, Node},
};
use crate::config::Visibility;

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
