//! The catalog: what is registered, with indexes. Immutable.

pub mod address;
pub mod registrations;

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use hashbrown::HashMap;

use crate::{config::Config, visibility::Visibility};
use registrations::{Instance, Node, Pending, PreparedQuery, Registrations, Status, VirtualAddress};

/// Number of a node in [`Catalog::node`].
pub type NodeId = u32;
/// Number of an instance in [`Catalog::instance`].
pub type InstanceId = u32;

/// Where something is registered: names are unique within such a place.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// A datacenter, by its name in lower case.
    Datacenter(Box<str>),
    /// A peer, by its name in lower case.
    Peer(Box<str>),
}

/// Names by place and lower-case name.
type Index<T> = HashMap<(Place, Box<str>), T, foldhash::fast::RandomState>;

/// All that can be asked for.
#[derive(Debug)]
pub struct Catalog {
    /// Nodes that may be read, sorted by name.
    nodes: Vec<Arc<Node>>,
    /// Instances that may be read, with the number of their node; sorted by node and id.
    instances: Vec<Registered>,
    by_name: Index<NodeId>,
    /// Nodes by id in lower case, sorted for prefixes.
    by_id: BTreeMap<(Place, Box<str>), NodeId>,
    services: Index<Vec<InstanceId>>,
    /// Instances of the mesh by the service that they stand for.
    connect: Index<Vec<InstanceId>>,
    /// Virtual addresses by peer and service; the local datacenter has no peer.
    virtual_addresses: HashMap<(Option<Box<str>>, Box<str>), IpAddr>,
    /// Services of gateways, by the service bound to them.
    ingress: HashMap<Box<str>, Vec<Box<str>>>,
    /// First node of the local datacenter at an address.
    node_addresses: HashMap<IpAddr, NodeId>,
    /// First instance of the local datacenter at an address.
    instance_addresses: HashMap<IpAddr, InstanceId>,
    queries: Vec<PreparedQuery>,
    /// Datacenters that are known, and whether they can be reached.
    datacenters: HashMap<Box<str>, bool>,
    distances: HashMap<Box<str>, Vec<String>>,
    /// Read permissions of the token in use.
    visibility: Visibility,
    /// Data that the source has not loaded yet.
    pending: Pending,
}

/// An instance in its place.
#[derive(Debug)]
struct Registered {
    node: NodeId,
    instance: Arc<Instance>,
    /// The worst of all checks, including the node's.
    status: Status,
}

/// Whether a datacenter can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// At least one agent there answers.
    Reachable,
    /// The datacenter is known, but no agent there answers.
    Unreachable,
    /// The catalog has no such datacenter.
    Unknown,
}

impl Catalog {
    /// Makes the indexes of what `visibility` leaves. Instances without a node are
    /// left out.
    pub fn build(registrations: Registrations, config: &Config, visibility: Visibility) -> Self {
        let Registrations {
            mut nodes,
            mut instances,
            queries,
            virtual_addresses,
            gateways,
            datacenters,
            distances,
            pending,
        } = registrations;
        nodes.retain(|node| visibility.node(&node.name));
        nodes.sort_by_cached_key(|node| (lower(&node.name), node.peer.clone()));
        instances.retain(|instance| visibility.service(&instance.service));
        instances.sort_by_cached_key(|instance| (lower(&instance.node), lower(&instance.id)));
        let mut catalog = Self {
            nodes,
            instances: Vec::with_capacity(instances.len()),
            by_name: Index::default(),
            by_id: BTreeMap::new(),
            services: Index::default(),
            connect: Index::default(),
            virtual_addresses: HashMap::new(),
            ingress: HashMap::new(),
            node_addresses: HashMap::new(),
            instance_addresses: HashMap::new(),
            queries,
            datacenters: datacenters.into_iter().map(|known| (lower(&known.name), known.reachable)).collect(),
            distances: distances.into_iter().map(|(node, nearest)| (lower(&node), nearest)).collect(),
            visibility,
            pending,
        };
        catalog.datacenters.insert(config.datacenter.as_str().into(), true);
        let own = Place::Datacenter(config.datacenter.as_str().into());
        catalog.index_nodes(&own);
        catalog.index_instances(instances, &own);
        for VirtualAddress { service, peer, address } in virtual_addresses {
            catalog.virtual_addresses.insert((peer.as_deref().map(lower), lower(&service)), address);
        }
        for registrations::Gateway { gateway, services } in gateways {
            for service in services {
                catalog.ingress.entry(lower(&service)).or_default().push(lower(&gateway));
            }
        }
        catalog
    }

    /// How many nodes there are.
    pub fn node_count(&self) -> usize {
        self.nodes.len()
    }

    /// How many instances there are.
    pub fn instance_count(&self) -> usize {
        self.instances.len()
    }

    /// Returns whether the source has not loaded this service yet or, without a service, the datacenter's
    /// list of services. Both names are in lower case.
    pub fn is_pending(&self, datacenter: &str, service: Option<&str>) -> bool {
        let Pending { datacenters, services } = &self.pending;
        if datacenters.is_empty() && services.is_empty() {
            return false;
        }
        datacenters.contains(datacenter)
            || service.is_some_and(|service| services.contains(&(datacenter.to_owned(), service.to_owned())))
    }

    /// Whether anything of a datacenter is not known yet; `datacenter` in lower case.
    pub fn is_incomplete(&self, datacenter: &str) -> bool {
        let Pending { datacenters, services } = &self.pending;
        datacenters.contains(datacenter) || services.iter().any(|(of, _)| of == datacenter)
    }

    /// Names of the services of a place, in lower case, in no order.
    pub fn service_names(&self, place: &Place) -> impl Iterator<Item = &str> {
        self.services.keys().filter(move |(at, _)| at == place).map(|(_, name)| &**name)
    }

    /// Names of the nodes of a place, in their order.
    pub fn node_names<'a>(&'a self, place: &'a Place) -> impl Iterator<Item = &'a str> {
        self.nodes.iter().filter(move |node| node.place() == *place).map(|node| node.name.as_str())
    }

    /// The node of this number.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id as usize]
    }

    /// The instance of this number.
    pub fn instance(&self, id: InstanceId) -> &Instance {
        &self.instances[id as usize].instance
    }

    /// The node that an instance is on.
    pub fn node_of(&self, id: InstanceId) -> &Node {
        self.node(self.instances[id as usize].node)
    }

    /// The worst of all checks of an instance and its node.
    pub fn status(&self, id: InstanceId) -> Status {
        self.instances[id as usize].status
    }

    /// Weight of an instance in SRV records.
    pub fn weight(&self, id: InstanceId) -> u16 {
        match self.status(id) {
            Status::Passing => self.instance(id).weights.passing,
            Status::Warning => self.instance(id).weights.warning,
            Status::Critical => 0,
        }
    }

    /// Whether a datacenter can be asked; `name` in lower case.
    pub fn reach(&self, name: &str) -> Reach {
        match self.datacenters.get(name) {
            Some(true) => Reach::Reachable,
            Some(false) => Reach::Unreachable,
            None => Reach::Unknown,
        }
    }

    /// The node of this name, or else the only one whose id begins with it, which
    /// takes two characters at least; `name` in lower case.
    pub fn find_node(&self, place: &Place, name: &str) -> Option<NodeId> {
        if let Some(&node) = self.by_name.get(&(place.clone(), name.into())) {
            return Some(node);
        }
        if name.len() < 2 {
            return None;
        }
        let mut matches = self
            .by_id
            .range((place.clone(), name.into())..)
            .take_while(|((at, id), _)| at == place && id.starts_with(name));
        match (matches.next(), matches.next()) {
            (Some((_, &node)), None) => Some(node),
            _ => None,
        }
    }

    /// Instances of a service; `service` in lower case.
    pub fn service(&self, place: &Place, service: &str) -> &[InstanceId] {
        self.services.get(&(place.clone(), service.into())).map_or(&[], Vec::as_slice)
    }

    /// Whether the token may read a service; `service` in lower case.
    pub fn is_readable(&self, service: &str) -> bool {
        self.visibility.service(service)
    }

    /// Instances of the mesh that stand for a service; `service` in lower case.
    pub fn connect(&self, place: &Place, service: &str) -> &[InstanceId] {
        if !self.visibility.service(service) {
            return &[];
        }
        self.connect.get(&(place.clone(), service.into())).map_or(&[], Vec::as_slice)
    }

    /// Instances of the ingress gateways that a service is bound to; `service` in lower case. A gateway bound to `*`
    /// serves every registered service, and no other name.
    pub fn ingress(&self, place: &Place, service: &str) -> Vec<InstanceId> {
        if !self.visibility.service(service) {
            return Vec::new();
        }
        let exists = !self.service(place, service).is_empty() || !self.connect(place, service).is_empty();
        let wildcard = self.ingress.get("*").filter(|_| exists);
        let bound = self.ingress.get(service).into_iter().chain(wildcard);
        let mut gateways: Vec<&str> = bound.flatten().map(|gateway| &**gateway).collect();
        gateways.sort_unstable();
        gateways.dedup();
        gateways.into_iter().flat_map(|gateway| self.service(place, gateway)).copied().collect()
    }

    /// The virtual address of a service; `Err`: the token may not read the service.
    pub fn virtual_address(&self, peer: Option<&str>, service: &str) -> Result<Option<IpAddr>, Unreadable> {
        if !self.visibility.service(service) {
            return Err(Unreadable);
        }
        Ok(self.virtual_addresses.get(&(peer.map(Into::into), service.into())).copied())
    }

    /// Returns the first node, by name, of the local datacenter at an address.
    pub fn node_at(&self, address: IpAddr) -> Option<&Node> {
        self.node_addresses.get(&address).map(|&node| self.node(node))
    }

    /// Returns the first instance, by node and id, of the local datacenter that registered this address.
    pub fn instance_at(&self, address: IpAddr) -> Option<InstanceId> {
        self.instance_addresses.get(&address).copied()
    }

    /// Returns all prepared queries of the catalog.
    pub fn queries(&self) -> &[PreparedQuery] {
        &self.queries
    }

    /// Names of nodes, nearest to `node` first, as far as that is known.
    pub fn nearest(&self, node: &str) -> &[String] {
        self.distances.get(&*lower(node)).map_or(&[], Vec::as_slice)
    }

    /// Fills the indexes of nodes.
    fn index_nodes(&mut self, own: &Place) {
        for (number, node) in self.nodes.iter().enumerate() {
            // Fewer than 2^32 nodes: the names alone would fill the memory.
            let number = number as NodeId;
            let place = node.place();
            if place == *own
                && let Ok(address) = node.address.parse()
            {
                self.node_addresses.entry(address).or_insert(number);
            }
            if !node.id.is_empty() {
                self.by_id.insert((place.clone(), lower(&node.id)), number);
            }
            self.by_name.insert((place, lower(&node.name)), number);
        }
    }

    /// Puts the instances in their places and fills their indexes.
    fn index_instances(&mut self, instances: Vec<Arc<Instance>>, own: &Place) {
        let by_peer: HashMap<(Box<str>, Option<Box<str>>), NodeId> = self
            .nodes
            .iter()
            .enumerate()
            .map(|(number, node)| ((lower(&node.name), node.peer.as_deref().map(lower)), number as NodeId))
            .collect();
        for instance in instances {
            let key = (lower(&instance.node), instance.peer.as_deref().map(lower));
            let Some(&node) = by_peer.get(&key) else { continue };
            let number = self.instances.len() as InstanceId;
            let place = self.node(node).place();
            if place == *own
                && let Ok(address) = instance.address.parse()
            {
                self.instance_addresses.entry(address).or_insert(number);
            }
            let service = (place.clone(), lower(&instance.service));
            if let Some(destination) = &instance.proxy_for {
                self.connect.entry((place, lower(destination))).or_default().push(number);
            } else if instance.connect_native {
                self.connect.entry(service.clone()).or_default().push(number);
            }
            self.services.entry(service).or_default().push(number);
            let checks = instance.checks.iter().chain(&self.node(node).checks);
            let status = checks.map(|check| check.status).max().unwrap_or_default();
            self.instances.push(Registered { node, instance, status });
        }
    }
}

/// The token lacks read permission, which the answer must reveal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unreadable;

impl Node {
    /// Where the node is registered.
    pub fn place(&self) -> Place {
        match &self.peer {
            Some(peer) => Place::Peer(lower(peer)),
            None => Place::Datacenter(lower(&self.datacenter)),
        }
    }
}

/// The text in lower case.
fn lower(text: &str) -> Box<str> {
    text.to_ascii_lowercase().into()
}
