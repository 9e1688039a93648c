//! Instances registered under one name in one place.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use super::{
    Key, PeerKey, Place,
    live::ServiceInstances,
    lower,
    nodes::Nodes,
    registrations::{Instance, Node, Status},
};
use crate::visibility::Visibility;

/// The instances of a service in one place. Immutable; a change replaces it.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) key: Key,
    pub(super) sources: Sources,
    /// Readable instances with a node, sorted by node and id.
    pub(super) members: Vec<Member>,
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
pub(super) struct Member {
    pub(super) node: Arc<Node>,
    pub(super) instance: Arc<Instance>,
    /// Worst status of all checks, including the node's.
    pub(super) status: Status,
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
    fn new(node: &Arc<Node>, instance: &Arc<Instance>) -> Self {
        let checks = instance.checks.iter().chain(&node.checks);
        let status = checks.map(|check| check.status).max().unwrap_or_default();
        Self { node: node.clone(), instance: instance.clone(), status }
    }

    /// Returns the sort key of the instance.
    pub(super) fn order(&self) -> (Box<str>, Box<str>) {
        (lower(&self.instance.node), lower(&self.instance.id))
    }
}

impl Group {
    pub(super) fn empty(key: Key) -> Self {
        Self { key, sources: Sources::default(), members: Vec::new() }
    }

    pub(super) fn new(key: Key, sources: Sources, nodes: &Nodes, visibility: &Visibility) -> Self {
        let mut members = Vec::new();
        if visibility.service(&key.1) {
            let fixed = sources.fixed.iter().map(|instance| (nodes.of_file_instance(instance), instance));
            let live = sources.live.iter().flat_map(|live| &live.instances);
            let live = live.map(|instance| (nodes.of_live_instance(&key.0, instance), instance));
            members =
                fixed.chain(live).filter_map(|(node, instance)| Some(Member::new(node?, instance))).collect();
            members.sort_by_cached_key(Member::order);
        }
        Self { key, sources, members }
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
