//! Indexed catalog of registrations. A copy shares all data with its original; a change replaces
//! only the parts it affects.

pub mod live;
pub mod nodes;
pub mod registrations;

use std::{borrow::Cow, net::IpAddr, sync::Arc};

use hashbrown::{HashMap, HashSet};

use crate::{
    config::{Config, Visibility},
    question::Relation,
};
use dns_core::name::Name;
use live::{Live, LiveService, Shards};
use nodes::{Accept, Group, Member, Nodes, Sources, Target};
use registrations::{
    CheckStatus, Gateway, Instance, Node, PreparedQuery, Registrations, VirtualAddress,
};

/// Handle of an instance, for [`Catalog::instance`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceId {
    group: u32,
    index: u32,
}

/// Scope in which registered names are unique.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// A datacenter, by its lower-case name.
    Datacenter(Box<str>),
    /// A peer, by its lower-case name.
    Peer(Box<str>),
}

/// Place and lower-case name.
type PlacedName = (Place, Box<str>);

/// Peer and lower-case name; `None` for services that are not imported.
type PeerKey = (Option<Box<str>>, Box<str>);

/// Pseudo-group that owns the virtual addresses from definition files.
const FROM_FILES: u32 = u32::MAX;

/// All registrations with their indexes.
#[derive(Clone, Debug)]
pub struct Catalog {
    own: Place,
    /// Selects the addresses of instances.
    config: Arc<Config>,
    /// Read permissions of the token in use.
    visibility: Visibility,
    /// Registrations from definition files, except instances.
    fixed: Arc<Fixed>,
    /// Data of a live Consul; empty without one.
    live: Live,
    pub(crate) nodes: Arc<Nodes>,
    /// Instances by place and service. The index of a group never changes.
    groups: Vec<Arc<Group>>,
    /// Unused indexes in `groups`.
    free: Vec<u32>,
    services: Shards<PlacedName, u32>,
    /// Groups with mesh instances, by the service that these represent.
    connect: Shards<PlacedName, Vec<u32>>,
    /// Virtual addresses by peer and service, with the group that each comes from.
    virtual_addresses: Shards<PeerKey, Vec<(u32, IpAddr)>>,
    /// Instances of the local datacenter by their own addresses.
    addresses: Shards<IpAddr, Vec<InstanceId>>,
    /// Gateway services, by the service bound to them.
    ingress: Arc<HashMap<Box<str>, Vec<Box<str>>>>,
    instance_count: usize,
}

/// Registrations from definition files, except instances.
#[derive(Debug, Default)]
struct Fixed {
    nodes: Vec<Arc<Node>>,
    queries: Vec<PreparedQuery>,
    gateways: Vec<Gateway>,
    /// Known datacenters, and whether each is reachable.
    datacenters: HashMap<Box<str>, bool>,
    distances: HashMap<Box<str>, Vec<String>>,
}

/// Reachability of a datacenter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// At least one agent there answers.
    Reachable,
    /// The datacenter is known, but no agent there answers.
    Unreachable,
    /// The datacenter is not in the catalog.
    Unknown,
}

impl Catalog {
    /// Builds the catalog from the registrations that `visibility` permits. Instances without a
    /// node are skipped.
    pub fn build(registrations: Registrations, config: &Config, visibility: Visibility) -> Self {
        let Registrations {
            nodes,
            instances,
            queries,
            virtual_addresses,
            gateways,
            datacenters,
            distances,
        } = registrations;
        let mut fixed = Fixed {
            nodes,
            queries,
            gateways,
            datacenters: HashMap::new(),
            distances: HashMap::new(),
        };
        for known in datacenters {
            let name = lower(&known.name);
            fixed.datacenters.insert(name, known.reachable);
        }
        for (node, nearest) in distances {
            fixed.distances.insert(lower(&node), nearest);
        }
        let own = Place::Datacenter(config.datacenter.as_str().into());
        let nodes = Nodes::index(fixed.nodes.clone(), &visibility, &own);
        let mut catalog = Self {
            own,
            config: Arc::new(config.clone()),
            visibility,
            fixed: Arc::new(fixed),
            live: Live::default(),
            nodes: Arc::new(nodes),
            groups: Vec::new(),
            free: Vec::new(),
            services: Shards::default(),
            connect: Shards::default(),
            virtual_addresses: Shards::default(),
            addresses: Shards::default(),
            ingress: Arc::default(),
            instance_count: 0,
        };
        // After the nodes, because an instance is indexed with the place and address of its node.
        catalog.add_fixed(instances);
        for VirtualAddress {
            service,
            peer,
            address,
        } in virtual_addresses
        {
            let key = (peer.as_deref().map(lower), lower(&service));
            let address = vec![(FROM_FILES, address)];
            catalog.virtual_addresses.insert(key, address);
        }
        catalog.index_ingress();
        catalog
    }

    /// Adds the instances of files to their services.
    fn add_fixed(&mut self, instances: Vec<Arc<Instance>>) {
        let mut groups: HashMap<PlacedName, Vec<Arc<Instance>>> = HashMap::new();
        for instance in instances {
            // Reported when the files were read, or hidden by `acl`.
            let Some(node) = self.nodes.of_file_instance(&instance) else {
                continue;
            };
            let key = (node.place(), lower(&instance.service));
            groups.entry(key).or_default().push(instance);
        }
        for (key, instances) in groups {
            self.replace(key, |sources| sources.fixed = instances);
        }
    }

    /// Replaces the live Consul's data; indexes only the differences to the previous data.
    pub fn update(&mut self, live: Option<Live>) {
        let now = live.unwrap_or_default();
        let before = std::mem::replace(&mut self.live, now.clone());
        // Nodes first, because the instances below are indexed with them.
        let moved = self.update_nodes(&now, &before);
        if !Arc::ptr_eq(&now.gateways, &before.gateways) {
            self.index_ingress();
        }
        let mut places: Vec<&Place> = now.places.keys().collect();
        // A peer that is gone loses all its services.
        for place in before.places.keys() {
            if !now.places.contains_key(place) {
                places.push(place);
            }
        }
        for place in places {
            let services_now = services_at(&now, place);
            let services_before = services_at(&before, place);
            for (service, loaded) in services_now.changes(&services_before) {
                let instances = loaded.and_then(|service| service.instances.clone());
                self.replace((place.clone(), service.clone()), |sources| {
                    sources.live = instances
                });
            }
        }
        // The instances are the same, but not the addresses of their nodes.
        for number in self.groups_on(&moved) {
            let key = self.groups[number as usize].key.clone();
            self.replace(key, |_| {});
        }
    }

    /// Indexes the nodes if any changed. Returns the lower-case names of changed nodes.
    fn update_nodes(&mut self, now: &Live, before: &Live) -> HashSet<Box<str>> {
        let lists_now = node_lists(now);
        let lists_before = node_lists(before);
        let mut pairs = lists_now.iter().zip(&lists_before);
        if lists_now.len() == lists_before.len()
            && pairs.all(|(now, before)| Arc::ptr_eq(now, before))
        {
            return HashSet::new();
        }
        let mut moved = HashSet::new();
        let known_now = identities(&lists_now);
        let known_before = identities(&lists_before);
        for list in lists_now.iter().chain(&lists_before) {
            for node in list.iter() {
                // An unchanged node keeps its allocation, so one in a single list was added,
                // removed or changed.
                let node_id = Arc::as_ptr(node);
                if known_now.contains(&node_id) != known_before.contains(&node_id) {
                    moved.insert(lower(&node.name));
                }
            }
        }
        let mut all = self.fixed.nodes.clone();
        for list in &lists_now {
            all.extend_from_slice(list);
        }
        self.nodes = Arc::new(Nodes::index(all, &self.visibility, &self.own));
        moved
    }

    fn groups_on(&self, nodes: &HashSet<Box<str>>) -> Vec<u32> {
        if nodes.is_empty() {
            return Vec::new();
        }
        let mut found = Vec::new();
        for (number, group) in (0_u32..).zip(&self.groups) {
            let mut instances = group.sources.instances();
            if instances.any(|instance| nodes.contains(&*instance.node.to_ascii_lowercase())) {
                found.push(number);
            }
        }
        found
    }

    /// Creates or replaces a group and updates the indexes.
    fn replace(&mut self, key: PlacedName, change: impl FnOnce(&mut Sources)) {
        let number = match self.services.get(&key) {
            Some(&number) => number,
            None => {
                let none = Sources::default();
                let empty = Group::new(
                    key.clone(),
                    none,
                    &self.nodes,
                    &self.visibility,
                    &self.config,
                );
                let empty = Arc::new(empty);
                // Fewer than 2^32 groups: the names alone would fill the memory.
                // Reused, because a service that comes and goes must not lengthen the list each
                // time.
                let number = self.free.pop().unwrap_or(self.groups.len() as u32);
                match self.groups.get_mut(number as usize) {
                    Some(free) => *free = empty,
                    None => self.groups.push(empty),
                }
                self.services.insert(key.clone(), number);
                number
            }
        };
        let before = self.groups[number as usize].clone();
        let mut sources = before.sources.clone();
        change(&mut sources);
        let now = Arc::new(Group::new(
            key,
            sources,
            &self.nodes,
            &self.visibility,
            &self.config,
        ));
        self.index_connect(number, &before, &now);
        self.index_virtual_addresses(number, &before, &now);
        if now.key.0 == self.own {
            self.index_addresses(number, &before, &now);
        }
        self.instance_count = self.instance_count + now.members.len() - before.members.len();
        if now.sources.is_empty() {
            self.services.remove(&now.key);
            self.free.push(number);
        }
        self.groups[number as usize] = now;
    }

    fn index_connect(&mut self, number: u32, before: &Group, now: &Group) {
        let old = before.destinations();
        let new = now.destinations();
        for gone in old.difference(&new) {
            self.connect
                .discard(&(now.key.0.clone(), gone.clone()), |group| *group == number);
        }
        for added in new.difference(&old) {
            let groups = self
                .connect
                .push((now.key.0.clone(), added.clone()), number);
            // The order of the answer must not depend on the order of changes.
            groups.sort_by(|a, b| {
                self.groups[*a as usize]
                    .key
                    .cmp(&self.groups[*b as usize].key)
            });
        }
    }

    fn index_virtual_addresses(&mut self, number: u32, before: &Group, now: &Group) {
        let old = before.virtual_addresses(&self.own);
        let new = now.virtual_addresses(&self.own);
        // Most changes concern checks only.
        if old == new {
            return;
        }
        for (key, _) in old {
            self.virtual_addresses
                .discard(&key, |(group, _)| *group == number);
        }
        for (key, address) in new {
            self.virtual_addresses.push(key, (number, address));
        }
    }

    fn index_addresses(&mut self, number: u32, before: &Group, now: &Group) {
        let old = before.addresses();
        let new = now.addresses();
        if old == new {
            return;
        }
        for (address, _) in old {
            self.addresses.discard(&address, |id| id.group == number);
        }
        for (address, index) in new {
            self.addresses.push(
                address,
                InstanceId {
                    group: number,
                    index,
                },
            );
        }
    }

    fn index_ingress(&mut self) {
        let mut ingress: HashMap<Box<str>, Vec<Box<str>>> = HashMap::new();
        let gateways = self.fixed.gateways.iter().chain(&*self.live.gateways);
        for Gateway { gateway, services } in gateways {
            for service in services {
                ingress
                    .entry(lower(service))
                    .or_default()
                    .push(lower(gateway));
            }
        }
        self.ingress = Arc::new(ingress);
    }

    /// Returns the number of nodes.
    pub fn node_count(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the number of instances.
    pub fn instance_count(&self) -> usize {
        self.instance_count
    }

    /// Returns whether a service or, if `None`, the place's list of services has not been loaded
    /// yet. The name is in lower case.
    pub fn is_pending(&self, place: &Place, service: Option<&str>) -> bool {
        self.live.is_pending(place, service)
    }

    /// Returns whether any part of a place has not been loaded yet.
    pub fn is_incomplete(&self, place: &Place) -> bool {
        self.live.is_incomplete(place)
    }

    /// Returns whether the prepared queries of a datacenter have not been loaded yet.
    pub fn lacks_queries(&self, datacenter: &str) -> bool {
        self.live.lacks_queries(datacenter)
    }

    pub(crate) fn member(&self, id: InstanceId) -> &Member {
        &self.groups[id.group as usize].members[id.index as usize]
    }

    /// Returns the instance with this id.
    pub fn instance(&self, id: InstanceId) -> &Instance {
        &self.member(id).instance
    }

    /// Returns the node of an instance.
    pub fn node_of(&self, id: InstanceId) -> &Node {
        &self.member(id).node
    }

    /// Returns the address or host name of an instance; `None` if it has no usable one.
    ///
    /// A host name equal to `asked` would loop, so the node's address replaces it.
    pub(crate) fn target<'a>(
        &self,
        member: &'a Member,
        accept: Accept,
        asked: &Name,
    ) -> Option<Cow<'a, Target>> {
        match member.targets.get(accept)? {
            Target::Host(name) if name == asked => member
                .instance
                .target(&member.node, &self.config, accept, Some(asked))
                .map(Cow::Owned),
            target => Some(Cow::Borrowed(target)),
        }
    }

    pub(crate) fn common_group(&self, ids: &[InstanceId]) -> Option<&Group> {
        let first = ids.first()?;
        let is_common = ids.iter().all(|id| id.group == first.group);
        is_common.then(|| &*self.groups[first.group as usize])
    }

    /// Returns the worst status of all checks of an instance and its node.
    pub fn status(&self, id: InstanceId) -> CheckStatus {
        self.member(id).status
    }

    /// Returns the weight of an instance in SRV records.
    pub fn weight(&self, id: InstanceId) -> u16 {
        match self.status(id) {
            CheckStatus::Passing => self.instance(id).weights.passing,
            CheckStatus::Warning => self.instance(id).weights.warning,
            // Only a prepared query that ignores the check returns the instance, with this weight
            // (tests/cases).
            CheckStatus::Critical => 0,
        }
    }

    /// Returns the reachability of a datacenter; `name` is in lower case.
    pub fn reach(&self, name: &str) -> Reach {
        if matches!(&self.own, Place::Datacenter(own) if **own == *name) {
            return Reach::Reachable;
        }
        let mut datacenters = self.live.datacenters.iter();
        let reachable = match datacenters.find(|known| known.name == name) {
            Some(known) => Some(&known.reachable),
            // Second, because files state what was true when they were written.
            None => self.fixed.datacenters.get(name),
        };
        match reachable {
            Some(true) => Reach::Reachable,
            Some(false) => Reach::Unreachable,
            None => Reach::Unknown,
        }
    }

    /// Returns whether a peer of this lower-case name is known.
    pub fn is_peer(&self, name: &str) -> bool {
        self.live.places.contains_key(&Place::Peer(name.into())) || self.nodes.is_peer(name)
    }

    /// Returns the instances of a service, sorted by node and id; `service` is in lower case.
    pub fn service(&self, place: &Place, service: &str) -> Vec<InstanceId> {
        match self.services.get(&(place.clone(), Box::from(service))) {
            Some(&group) => self.ids_of(group).collect(),
            None => Vec::new(),
        }
    }

    fn ids_of(&self, group: u32) -> impl Iterator<Item = InstanceId> {
        let count = self.groups[group as usize].members.len() as u32;
        (0..count).map(move |index| InstanceId { group, index })
    }

    /// Returns whether the token may read a service; `service` is in lower case.
    pub fn is_readable(&self, service: &str) -> bool {
        self.visibility.service(service)
    }

    /// Returns the mesh instances that represent a service; `service` is in lower case.
    pub fn connect(&self, place: &Place, service: &str) -> Vec<InstanceId> {
        if !self.visibility.service(service) {
            return Vec::new();
        }
        let mut found = Vec::new();
        let key = (place.clone(), Box::from(service));
        for &group in self.connect.get(&key).into_iter().flatten() {
            for id in self.ids_of(group) {
                let destination = self.instance(id).destination();
                // Proxies of several services may be registered under one name.
                if destination.is_some_and(|of| of.eq_ignore_ascii_case(service)) {
                    found.push(id);
                }
            }
        }
        found
    }

    /// Returns the instances of a service with this relation to it; `service` is in lower case.
    pub(crate) fn related(
        &self,
        relation: Relation,
        place: &Place,
        service: &str,
    ) -> Vec<InstanceId> {
        match relation {
            Relation::Own => self.service(place, service),
            Relation::Mesh => self.connect(place, service),
            Relation::Gateway => self.ingress(place, service),
        }
    }

    /// Returns the instances of the ingress gateways that a service is bound to; `service` is in
    /// lower case. A gateway bound to `*` serves every registered service, and no other name.
    pub fn ingress(&self, place: &Place, service: &str) -> Vec<InstanceId> {
        if !self.visibility.service(service) {
            return Vec::new();
        }
        let exists =
            !self.service(place, service).is_empty() || !self.connect(place, service).is_empty();
        let mut gateways = Vec::new();
        if let Some(bound) = self.ingress.get(service) {
            gateways.extend(bound);
        }
        if exists && let Some(bound) = self.ingress.get("*") {
            gateways.extend(bound);
        }
        // A gateway bound to both answers once.
        gateways.sort_unstable();
        gateways.dedup();
        let mut found = Vec::new();
        for gateway in gateways {
            found.extend(self.service(place, gateway));
        }
        found
    }

    /// Returns the virtual address of a service, or an error if the token may not read the service.
    pub fn virtual_address(
        &self,
        peer: Option<&str>,
        service: &str,
    ) -> Result<Option<IpAddr>, Unreadable> {
        if !self.visibility.service(service) {
            // Consul fails the query (SERVFAIL) instead of denying that the service exists.
            return Err(Unreadable);
        }
        let key = (peer.map(Box::from), Box::from(service));
        let Some(known) = self.virtual_addresses.get(&key) else {
            return Ok(None);
        };
        // Addresses of files come first, so that a live Consul's takes precedence.
        Ok(known.last().map(|(_, address)| *address))
    }

    /// Returns the first instance, by node and id, registered with this address in the local datacenter.
    pub fn instance_at(&self, address: IpAddr) -> Option<InstanceId> {
        let candidates = self.addresses.get(&address)?.iter().copied();
        candidates.min_by_key(|&id| self.member(id).order())
    }

    /// Returns the prepared queries stored in a datacenter; `datacenter` is in lower case.
    pub fn queries(&self, datacenter: &str) -> impl Iterator<Item = &PreparedQuery> {
        let own = matches!(&self.own, Place::Datacenter(own) if **own == *datacenter);
        let fixed = self
            .fixed
            .queries
            .iter()
            .filter(move |query| match &query.datacenter {
                Some(stored) => stored.eq_ignore_ascii_case(datacenter),
                None => own,
            });
        let live = self.live.queries.get(datacenter);
        fixed.chain(live.into_iter().flat_map(|queries| queries.iter()))
    }

    /// Returns all other datacenters of a live Consul, nearest first.
    pub fn nearest_datacenters(&self, from: &str) -> Vec<&str> {
        self.live.nearest_datacenters(from)
    }

    /// Returns whether the names of the datacenters have not been loaded yet.
    pub fn lacks_datacenters(&self) -> bool {
        // Without a live Consul there are no names to wait for.
        !self.live.own.is_empty() && self.live.datacenters.is_empty()
    }

    /// Returns a function that maps a node to its distance from the node `from`, if known: the index in a
    /// list from definition files, or the round-trip time estimated from a live Consul's coordinates.
    pub fn distances<'a>(&'a self, from: &str) -> impl Fn(&Node) -> Option<f64> + 'a {
        let listed = self.fixed.distances.get(&*lower(from));
        let coordinates = &self.live.coordinates.nodes;
        let own = coordinates.get(&*lower(from));
        move |node| match (listed, own) {
            (Some(list), _) => list
                .iter()
                .position(|known| known.eq_ignore_ascii_case(&node.name))
                .map(|at| at as f64),
            // Coordinates of other datacenters are not comparable.
            (None, Some(own)) if node.place() == self.own => {
                own.round_trip(coordinates.get(&*lower(&node.name))?)
            }
            _ => None,
        }
    }
}

/// Returns the services of a place; none before its first reply, or if it does not exist.
fn services_at(live: &Live, place: &Place) -> Shards<Box<str>, Arc<LiveService>> {
    match live.places.get(place) {
        Some(known) => known.services.clone().unwrap_or_default(),
        None => Shards::default(),
    }
}

fn node_lists(live: &Live) -> Vec<Arc<Vec<Arc<Node>>>> {
    let mut lists = Vec::new();
    for place in live.places.values() {
        lists.extend(place.nodes.clone());
    }
    lists
}

fn identities(lists: &[Arc<Vec<Arc<Node>>>]) -> HashSet<*const Node> {
    let mut identities = HashSet::new();
    for list in lists {
        for node in list.iter() {
            identities.insert(Arc::as_ptr(node));
        }
    }
    identities
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

fn lower(text: &str) -> Box<str> {
    text.to_ascii_lowercase().into()
}

#[cfg(test)]
mod tests;
