//! Instances registered under one name in one place.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use hashbrown::HashMap;

use super::{
    Key, PeerKey, Place,
    live::ServiceInstances,
    lower,
    nodes::{Accept, Nodes, Target},
    registrations::{Instance, Node, Status},
};
use crate::config::{Config, Visibility};

/// The instances of a service in one place. Immutable; a change replaces it.
#[derive(Debug)]
pub(crate) struct Group {
    pub(super) key: Key,
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
    /// From a live Consul.
    pub(super) live: Option<Arc<ServiceInstances>>,
}

/// An instance with its node.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) node: Arc<Node>,
    pub(crate) instance: Arc<Instance>,
    /// Worst status of all checks, including the node's.
    pub(crate) status: Status,
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
        let target = |accept| instance.target(node, config, accept, None);
        let [v4, v6, any] = [Accept::V4, Accept::V6, Accept::Any].map(target);
        if v4 == any && v6 == any { Self::One(any) } else { Self::Each(Box::new([v4, v6, any])) }
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
        let accepted = [Accept::V4, Accept::V6, Accept::Any].into_iter();
        !accepted.filter_map(|accept| self.get(accept)).any(|target| matches!(target, Target::Host(_)))
    }
}

impl Sources {
    pub(super) fn instances(&self) -> impl Iterator<Item = &Arc<Instance>> {
        self.fixed.iter().chain(self.live.iter().flat_map(|live| &live.instances))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.fixed.is_empty() && self.live.is_none()
    }
}

impl Member {
    fn new(node: &Arc<Node>, instance: &Arc<Instance>, config: &Config) -> Self {
        let checks = instance.checks.iter().chain(&node.checks);
        let status = checks.map(|check| check.status).max().unwrap_or_default();
        let targets = Targets::of(instance, node, config);
        Self { node: node.clone(), instance: instance.clone(), status, targets, first_with_target: 0 }
    }

    /// Returns the sort key of the instance.
    pub(super) fn order(&self) -> (Box<str>, Box<str>) {
        (lower(&self.instance.node), lower(&self.instance.id))
    }
}

impl Group {
    pub(super) fn empty(key: Key) -> Self {
        Self {
            key,
            sources: Sources::default(),
            members: Vec::new(),
            has_only_addresses: true,
            has_distinct_targets: true,
        }
    }

    pub(super) fn new(
        key: Key,
        sources: Sources,
        nodes: &Nodes,
        visibility: &Visibility,
        config: &Config,
    ) -> Self {
        let mut members = Vec::new();
        if visibility.service(&key.1) {
            let fixed = sources.fixed.iter().map(|instance| (nodes.of_file_instance(instance), instance));
            let live = sources.live.iter().flat_map(|live| &live.instances);
            let live = live.map(|instance| (nodes.of_live_instance(&key.0, instance), instance));
            let placed = fixed.chain(live);
            members =
                placed.filter_map(|(node, instance)| Some(Member::new(node?, instance, config))).collect();
            members.sort_by_cached_key(Member::order);
            number_targets(&mut members);
        }
        let has_only_addresses = members.iter().all(|member| member.targets.are_addresses());
        let mut numbered = (0_u32..).zip(&members);
        let has_distinct_targets = numbered.all(|(index, member)| member.first_with_target == index);
        Self { key, sources, members, has_only_addresses, has_distinct_targets }
    }

    /// Returns the services that the group's mesh instances represent, in lower case.
    pub(super) fn destinations(&self) -> BTreeSet<Box<str>> {
        self.members.iter().filter_map(|member| member.instance.destination()).map(lower).collect()
    }

    /// Returns the virtual addresses that a live Consul reports with these instances, for the local
    /// datacenter and peers.
    pub(super) fn virtual_addresses(&self, own: &Place) -> Vec<(PeerKey, IpAddr)> {
        let peer = match &self.key.0 {
            Place::Peer(peer) => Some(peer.clone()),
            place if place == own => None,
            Place::Datacenter(_) => return Vec::new(),
        };
        let addresses = self.sources.live.iter().flat_map(|live| &live.virtual_addresses);
        addresses.map(|(service, address)| ((peer.clone(), lower(service)), *address)).collect()
    }

    /// Returns the instances' own addresses, each with the instance's index.
    pub(super) fn addresses(&self) -> Vec<(IpAddr, u32)> {
        let numbered = (0_u32..).zip(&self.members);
        numbered.filter_map(|(index, member)| Some((member.instance.address.parse().ok()?, index))).collect()
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
    /// Returns the service that this mesh instance represents; `None` if it is not part of the
    /// mesh.
    pub(super) fn destination(&self) -> Option<&str> {
        match &self.proxy_for {
            Some(destination) => Some(destination),
            None if self.connect_native => Some(&self.service),
            None => None,
        }
    }
}
