//! All data loaded so far, demands of the resolver, and catalog snapshots.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use dns_consul::{
    Lack,
    catalog::{
        Place,
        live::{Coordinate, Live, LivePlace, LiveService, ServiceInstances},
        registrations::{Datacenter, Gateway, Instance, Node, PreparedQuery},
    },
    source::CatalogView,
};

/// Consul's default name of a datacenter.
pub(crate) const DEFAULT_DATACENTER: &str = "dc1";

/// Place and lower-case name of a service.
pub(crate) type ServiceKey = (Place, String);

/// All data loaded so far. Copies share unchanged parts.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// Local datacenter; `None` before the agent's first response.
    pub(crate) own: Option<String>,
    pub(crate) node_name: String,
    pub(crate) datacenters: Vec<String>,
    pub(crate) unreachable: HashSet<String>,
    live: Live,
}

/// Effect of a new list of services.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Difference {
    /// New services, and services with changed tags, whose instances must be fetched.
    pub(crate) to_fetch: Vec<ServiceKey>,
    /// Services that were removed.
    pub(crate) removed: Vec<ServiceKey>,
}

impl Known {
    /// Sets the nodes of a datacenter. Returns whether they changed. Unchanged nodes remain the same objects.
    pub(crate) fn set_nodes(&mut self, datacenter: &str, nodes: Vec<Arc<Node>>) -> bool {
        let place = self.place(&Place::Datacenter(datacenter.into()));
        set_nodes(place, nodes)
    }

    pub(crate) fn set_services(
        &mut self,
        place: &Place,
        services: BTreeMap<String, Vec<String>>,
    ) -> Difference {
        let known = self.place(place);
        let mut difference = Difference::default();
        let mut named = HashSet::new();
        let listed = known.services.get_or_insert_default();
        for (name, mut tags) in services {
            tags.sort();
            let lower = name.to_ascii_lowercase();
            named.insert(lower.clone());
            let before = listed.get(&*lower);
            let instances = match before {
                Some(service) if service.tags == tags => continue,
                // The previous instances answer until the new ones are loaded.
                Some(service) => service.instances.clone(),
                None => {
                    // Counted here, because every query for the mesh asks whether any is left.
                    known.unloaded += 1;
                    None
                }
            };
            listed.insert(
                lower.as_str().into(),
                Arc::new(LiveService {
                    name,
                    tags,
                    instances,
                }),
            );
            difference.to_fetch.push((place.clone(), lower));
        }
        let mut gone = Vec::new();
        for (name, _) in listed.iter() {
            if !named.contains(&**name) {
                gone.push(name.clone());
            }
        }
        for name in gone {
            if let Some(service) = listed.remove(&*name) {
                known.unloaded -= usize::from(service.instances.is_none());
            }
            difference.removed.push((place.clone(), name.into()));
        }
        if !difference.removed.is_empty() {
            gather_nodes(place, known);
        }
        difference
    }

    /// Sets the peers, each with the names of the services that it exports to us.
    pub(crate) fn set_peers(&mut self, peers: BTreeMap<String, Vec<String>>) -> Difference {
        let mut named = HashSet::new();
        for peer in peers.keys() {
            named.insert(peer_of(peer));
        }
        let mut gone = Vec::new();
        for place in self.live.places.keys() {
            if matches!(place, Place::Peer(_)) && !named.contains(place) {
                gone.push(place.clone());
            }
        }
        let mut all = Difference::default();
        for place in gone {
            let difference = self.set_services(&place, BTreeMap::new());
            all.removed.extend(difference.removed);
            self.live.places.remove(&place);
        }
        for (peer, services) in peers {
            let place = peer_of(&peer);
            // The list of exported services has no tags.
            let mut untagged = BTreeMap::new();
            for name in services {
                untagged.insert(name, Vec::new());
            }
            let Difference { to_fetch, removed } = self.set_services(&place, untagged);
            // An empty list is a loaded one: a peer may export nothing.
            self.place(&place).nodes.get_or_insert_default();
            all.to_fetch.extend(to_fetch);
            all.removed.extend(removed);
        }
        all
    }

    /// Sets the instances of a service. Returns whether they changed. Unchanged instances remain
    /// the same objects.
    pub(crate) fn set_instances(
        &mut self,
        (place, name): &ServiceKey,
        mut loaded: ServiceInstances,
    ) -> bool {
        let known = self.place(place);
        // A removed service has no instances.
        let Some(services) = known.services.as_mut() else {
            return false;
        };
        let Some(service) = services.get(&**name) else {
            return false;
        };
        match &service.instances {
            // Blocking queries also return for changes elsewhere.
            Some(before) if **before == loaded => return false,
            Some(before) => {
                let mut same: HashMap<(&str, &str), &Arc<Instance>> = HashMap::new();
                for one in &before.instances {
                    same.insert((&one.node, &one.id), one);
                }
                for instance in &mut loaded.instances {
                    if let Some(before) = same.get(&(instance.node.as_str(), instance.id.as_str()))
                        && ***before == **instance
                    {
                        *instance = (*before).clone();
                    }
                }
            }
            None => known.unloaded -= 1,
        }
        let service = LiveService {
            instances: Some(Arc::new(loaded)),
            ..(**service).clone()
        };
        services.insert(name.as_str().into(), Arc::new(service));
        gather_nodes(place, known);
        true
    }

    /// Sets the gateways and the services bound to them. Returns whether they changed.
    pub(crate) fn set_gateways(&mut self, gateways: Vec<Gateway>) -> bool {
        let changed = *self.live.gateways != gateways;
        if changed {
            self.live.gateways = Arc::new(gateways);
        }
        changed
    }

    /// Sets the prepared queries of a datacenter. Returns whether they changed.
    pub(crate) fn set_queries(&mut self, datacenter: &str, queries: Vec<PreparedQuery>) -> bool {
        if let Some(before) = self.live.queries.get(datacenter)
            && **before == queries
        {
            return false;
        }
        let queries = Arc::new(queries);
        self.live.queries.insert(datacenter.to_owned(), queries);
        true
    }

    /// Sets the coordinates of the local datacenter's nodes. Returns whether they changed.
    pub(crate) fn set_node_coordinates(&mut self, nodes: HashMap<String, Coordinate>) -> bool {
        let changed = self.live.coordinates.nodes != nodes;
        if changed {
            Arc::make_mut(&mut self.live.coordinates).nodes = nodes;
        }
        changed
    }

    /// Sets the coordinates of each datacenter's servers. Returns whether they changed.
    pub(crate) fn set_server_coordinates(
        &mut self,
        servers: BTreeMap<String, Vec<Coordinate>>,
    ) -> bool {
        let changed = self.live.coordinates.servers != servers;
        if changed {
            Arc::make_mut(&mut self.live.coordinates).servers = servers;
        }
        changed
    }

    pub(crate) fn queries(&self) -> impl Iterator<Item = &PreparedQuery> {
        self.live
            .queries
            .values()
            .flat_map(|queries| queries.iter())
    }

    pub(crate) fn name_of(&self, (place, service): &ServiceKey) -> Option<&str> {
        Some(self.live.places.get(place)?.service(service)?.name.as_str())
    }

    pub(crate) fn has_instances(&self, (place, service): &ServiceKey) -> bool {
        if let Some(known) = self.live.places.get(place)
            && let Some(service) = known.service(service)
        {
            return service.instances.is_some();
        }
        false
    }

    pub(crate) fn is_datacenter(&self, name: &str) -> bool {
        self.own.as_deref() == Some(name)
            || self
                .datacenters
                .iter()
                .any(|known| known.eq_ignore_ascii_case(name))
    }

    /// Returns whether the instances of all services of a place are loaded, not only of queried
    /// ones: for the local datacenter and for peers.
    pub(crate) fn is_fully_loaded(&self, place: &Place) -> bool {
        match place {
            Place::Datacenter(name) => self.own.as_deref() == Some(&**name),
            Place::Peer(_) => true,
        }
    }

    /// Returns the numbers of services, services with loaded instances, nodes, and instances.
    pub(crate) fn counts(&self) -> (usize, usize, usize, usize) {
        let mut services = 0;
        let mut loaded = 0;
        let mut nodes = 0;
        let mut instances = 0;
        for place in self.live.places.values() {
            nodes += place.nodes.as_ref().map_or(0, |nodes| nodes.len());
            for (_, service) in place.services.iter().flat_map(|services| services.iter()) {
                services += 1;
                if let Some(known) = &service.instances {
                    loaded += 1;
                    instances += known.instances.len();
                }
            }
        }
        (services, loaded, nodes, instances)
    }

    pub(crate) fn live(&self) -> Live {
        let own = self.own.as_deref().unwrap_or(DEFAULT_DATACENTER);
        let mut datacenters = Vec::with_capacity(self.datacenters.len());
        for name in &self.datacenters {
            let name = name.to_ascii_lowercase();
            let reachable = !self.unreachable.contains(&name);
            datacenters.push(Datacenter { name, reachable });
        }
        Live {
            own: own.to_owned(),
            datacenters,
            ..self.live.clone()
        }
    }

    /// Returns empty registrations, for data that has expired.
    pub(crate) fn empty(&self) -> Live {
        Live::unknown(self.own.as_deref().unwrap_or(DEFAULT_DATACENTER))
    }

    fn place(&mut self, place: &Place) -> &mut LivePlace {
        self.live.places.entry(place.clone()).or_default()
    }
}

fn peer_of(name: &str) -> Place {
    Place::Peer(name.to_ascii_lowercase().into())
}

/// Sets the nodes of a place. Returns whether they changed. Unchanged nodes remain the same objects.
fn set_nodes(place: &mut LivePlace, mut nodes: Vec<Arc<Node>>) -> bool {
    if let Some(before) = &place.nodes {
        if **before == nodes {
            return false;
        }
        // The catalog finds changed nodes by their identity.
        let mut same: HashMap<&str, &Arc<Node>> = HashMap::new();
        for node in before.iter() {
            same.insert(&node.name, node);
        }
        for node in &mut nodes {
            if let Some(before) = same.get(node.name.as_str())
                && ***before == **node
            {
                *node = (*before).clone();
            }
        }
    }
    place.nodes = Some(Arc::new(nodes));
    true
}

/// Collects the nodes of a peer from its instances, because no endpoint lists them.
fn gather_nodes(place: &Place, known: &mut LivePlace) {
    if !matches!(place, Place::Peer(_)) {
        return;
    }
    let mut by_name: BTreeMap<&str, &Arc<Node>> = BTreeMap::new();
    for (_, service) in known.services.iter().flat_map(|services| services.iter()) {
        if let Some(loaded) = &service.instances {
            for node in &loaded.nodes {
                // Each service on a node reports it again.
                by_name.insert(&node.name, node);
            }
        }
    }
    let nodes = by_name.into_values().cloned().collect();
    set_nodes(known, nodes);
}

#[derive(Debug)]
pub(crate) enum Demand {
    /// A query waits for this missing part.
    Lack(Lack),
    /// A query was for this service.
    Queried(ServiceKey),
    /// Interfaces answer for these services.
    Used(Vec<ServiceKey>),
}

pub(crate) fn view(known: &Known, live: Live) -> CatalogView {
    CatalogView {
        live,
        datacenter: known.own.clone(),
        node_name: known.node_name.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> Place {
        Place::Datacenter("dc1".into())
    }

    #[test]
    fn missing_answers_are_pending() {
        let mut known = Known::default();
        assert!(known.live().is_pending(&own(), None));
        known.own = Some("dc1".to_owned());
        known.set_nodes("dc1", Vec::new());
        let named = |tags: &[&str]| {
            let tags = tags.iter().map(|&tag| tag.to_owned()).collect();
            BTreeMap::from([("Web".to_owned(), tags)])
        };
        let key = (own(), "web".to_owned());
        assert_eq!(
            known.set_services(&own(), named(&["a"])).to_fetch,
            std::slice::from_ref(&key)
        );
        let live = known.live();
        assert!(
            !live.is_pending(&own(), None)
                && live.is_pending(&own(), Some("web"))
                && !live.is_complete()
        );
        assert!(known.set_instances(&key, ServiceInstances::default()));
        assert!(
            !known.set_instances(&key, ServiceInstances::default()),
            "the same is no news"
        );
        assert!(known.live().is_complete());
        assert_eq!(
            known.set_services(&own(), named(&["b"])).to_fetch,
            std::slice::from_ref(&key),
            "other tags"
        );
        assert!(
            known.live().is_complete(),
            "the old instances count until then"
        );
        assert_eq!(
            known.set_services(&own(), BTreeMap::new()).removed,
            std::slice::from_ref(&key)
        );
        assert!(
            !known.set_instances(&key, ServiceInstances::default()),
            "it is gone"
        );
        known.set_services(&own(), named(&["a"]));
        known.set_services(&own(), BTreeMap::new());
        assert!(known.live().is_complete());
    }

    #[test]
    fn peers_come_and_go() {
        let mut known = Known {
            own: Some("dc1".to_owned()),
            ..Known::default()
        };
        let (east, key) = (peer_of("East"), (peer_of("east"), "web".to_owned()));
        assert!(!known.live().is_pending(&east, Some("web")), "no such peer");
        let difference = known.set_peers(BTreeMap::from([(
            "East".to_owned(),
            vec!["Web".to_owned()],
        )]));
        assert_eq!(difference.to_fetch, std::slice::from_ref(&key));
        assert!(known.live().is_pending(&east, Some("web")));
        let node = Node {
            name: "n".to_owned(),
            peer: Some("east".to_owned()),
            ..Node::default()
        };
        let loaded = ServiceInstances {
            nodes: vec![Arc::new(node)],
            ..ServiceInstances::default()
        };
        assert!(known.set_instances(&key, loaded));
        assert_eq!(
            known.live().places[&east]
                .nodes
                .as_ref()
                .map(|nodes| nodes.len()),
            Some(1)
        );
        assert_eq!(known.set_peers(BTreeMap::new()).removed, [key]);
        assert!(!known.live().places.contains_key(&east));
    }

    #[test]
    fn nodes_of_a_peer_go_with_its_services() {
        let mut known = Known::default();
        let exported = |names: &[&str]| {
            let names = names.iter().map(|&name| name.to_owned()).collect();
            BTreeMap::from([("east".to_owned(), names)])
        };
        known.set_peers(exported(&["web", "db"]));
        let east = peer_of("east");
        for service in ["web", "db"] {
            let node = Node {
                name: format!("of-{service}"),
                peer: Some("east".to_owned()),
                ..Node::default()
            };
            let loaded = ServiceInstances {
                nodes: vec![Arc::new(node)],
                ..ServiceInstances::default()
            };
            known.set_instances(&(east.clone(), service.to_owned()), loaded);
        }
        known.set_peers(exported(&["db"]));
        let live = known.live();
        let nodes = live.places[&east].nodes.as_ref().unwrap();
        assert_eq!(nodes.len(), 1);
        assert_eq!(nodes[0].name, "of-db");
    }

    #[test]
    fn loaded_parts_are_counted() {
        let mut known = Known::default();
        assert_eq!(known.counts(), (0, 0, 0, 0));
        assert_eq!(known.live().own, DEFAULT_DATACENTER);
        known.own = Some("dc2".to_owned());
        known.datacenters = vec!["dc2".to_owned(), "DC3".to_owned()];
        known.unreachable.insert("dc3".to_owned());
        let node = |name: &str| {
            Arc::new(Node {
                name: name.to_owned(),
                ..Node::default()
            })
        };
        assert!(known.set_nodes("dc2", vec![node("a"), node("b")]));
        assert!(!known.set_nodes("dc2", vec![node("a"), node("b")]));
        let kept = known.live().places[&Place::Datacenter("dc2".into())]
            .nodes
            .clone()
            .unwrap();
        assert!(known.set_nodes("dc2", vec![node("b"), node("c")]));
        let nodes = known.live().places[&Place::Datacenter("dc2".into())]
            .nodes
            .clone()
            .unwrap();
        assert!(Arc::ptr_eq(&kept[1], &nodes[0]), "the same node is kept");
        let place = Place::Datacenter("dc2".into());
        let services = ["Web", "db"].map(|name| (name.to_owned(), Vec::new()));
        known.set_services(&place, services.into());
        let key = (place.clone(), "web".to_owned());
        assert_eq!(known.name_of(&key), Some("Web"));
        assert!(!known.has_instances(&key));
        let instance = |id: &str| {
            Arc::new(Instance {
                id: id.to_owned(),
                ..Instance::default()
            })
        };
        let loaded = |ids: &[&str]| ServiceInstances {
            instances: ids.iter().map(|id| instance(id)).collect(),
            ..ServiceInstances::default()
        };
        assert!(known.set_instances(&key, loaded(&["1", "2", "3"])));
        assert!(known.has_instances(&key) && !known.set_instances(&key, loaded(&["1", "2", "3"])));
        assert_eq!(known.counts(), (2, 1, 2, 3));
        assert!(!known.set_instances(&(place, "none".to_owned()), loaded(&[])));
        for (name, is_known) in [("dc2", true), ("dc3", true), ("DC3", true), ("dc4", false)] {
            assert_eq!(known.is_datacenter(name), is_known, "{name}");
        }
        for (place, is_loaded) in [
            (Place::Datacenter("dc2".into()), true),
            (Place::Datacenter("dc3".into()), false),
            (peer_of("x"), true),
        ] {
            assert_eq!(known.is_fully_loaded(&place), is_loaded);
        }
        let live = known.live();
        let datacenters: Vec<(&str, bool)> = live
            .datacenters
            .iter()
            .map(|datacenter| (&*datacenter.name, datacenter.reachable))
            .collect();
        assert_eq!(
            (&*live.own, datacenters),
            ("dc2", vec![("dc2", true), ("dc3", false)])
        );
        assert_eq!(known.empty().own, "dc2");
    }

    #[test]
    fn equal_values_are_no_news() {
        let mut known = Known::default();
        assert!(!known.set_gateways(Vec::new()));
        let gateway = Gateway {
            gateway: "g".to_owned(),
            services: Vec::new(),
        };
        assert!(known.set_gateways(vec![gateway.clone()]) && !known.set_gateways(vec![gateway]));
        assert!(known.set_queries("dc1", Vec::new()) && !known.set_queries("dc1", Vec::new()));
        assert!(known.set_queries("dc1", vec![PreparedQuery::default()]));
        assert_eq!(known.queries().count(), 1);
        assert!(!known.set_node_coordinates(HashMap::new()));
        let nodes = HashMap::from([("a".to_owned(), Coordinate::default())]);
        assert!(known.set_node_coordinates(nodes.clone()) && !known.set_node_coordinates(nodes));
        assert!(!known.set_server_coordinates(BTreeMap::new()));
        let servers = BTreeMap::from([("dc1".to_owned(), vec![Coordinate::default()])]);
        assert!(
            known.set_server_coordinates(servers.clone()) && !known.set_server_coordinates(servers)
        );
    }

    fn instance(node: &str, id: &str, port: u16) -> Arc<Instance> {
        Arc::new(Instance {
            node: node.to_owned(),
            id: id.to_owned(),
            port,
            ..Instance::default()
        })
    }

    fn instances_of(known: &Known, key: &ServiceKey) -> Vec<Arc<Instance>> {
        let service = known.live.places[&key.0].service(&key.1).unwrap();
        service.instances.as_ref().unwrap().instances.clone()
    }

    fn services(list: &[(&str, &[&str])]) -> BTreeMap<String, Vec<String>> {
        let mut services = BTreeMap::new();
        for (name, tags) in list {
            let tags = tags.iter().map(|&tag| tag.to_owned()).collect();
            services.insert((*name).to_owned(), tags);
        }
        services
    }

    #[test]
    fn unchanged_instances_remain_the_same_objects() {
        let mut known = Known::default();
        known.set_services(&own(), services(&[("web", &[])]));
        let key = (own(), "web".to_owned());
        let loaded = |instances: [Arc<Instance>; 3]| ServiceInstances {
            instances: instances.into(),
            ..ServiceInstances::default()
        };
        let first = [
            instance("n1", "a", 1),
            instance("n1", "b", 1),
            instance("n2", "a", 1),
        ];
        assert!(known.set_instances(&key, loaded(first.clone())));
        let second = [
            instance("n2", "a", 1),
            instance("n1", "a", 2),
            instance("n3", "b", 1),
        ];
        assert!(known.set_instances(&key, loaded(second.clone())));
        let found = instances_of(&known, &key);
        assert_eq!(found, second);
        assert!(Arc::ptr_eq(&found[0], &first[2]), "the same node and id");
        assert!(Arc::ptr_eq(&found[1], &second[1]), "another port");
        assert!(Arc::ptr_eq(&found[2], &second[2]), "another node");
        let service = known.live.places[&own()].service("web").unwrap();
        assert_eq!((&*service.name, service.tags.len()), ("web", 0));
    }

    #[test]
    fn new_services_and_tags_are_fetched() {
        let mut known = Known::default();
        let key = |service: &str| (own(), service.to_owned());
        let set = |known: &mut Known, list: &[(&str, &[&str])]| {
            let Difference { to_fetch, removed } = known.set_services(&own(), services(list));
            let names =
                |keys: Vec<ServiceKey>| keys.into_iter().map(|key| key.1).collect::<Vec<_>>();
            let unloaded = known.live.places[&own()].unloaded;
            (names(to_fetch), names(removed), unloaded)
        };
        let list = |names: &[&str]| {
            names
                .iter()
                .map(|&name| name.to_owned())
                .collect::<Vec<_>>()
        };
        let found = set(&mut known, &[("Db", &["b", "a"]), ("web", &[])]);
        assert_eq!(found, (list(&["db", "web"]), list(&[]), 2));
        // The order of tags means nothing.
        let found = set(&mut known, &[("Db", &["a", "b"]), ("web", &[])]);
        assert_eq!(found, (list(&[]), list(&[]), 2));
        assert!(known.set_instances(&key("db"), ServiceInstances::default()));
        assert_eq!(known.live.places[&own()].unloaded, 1);
        let found = set(&mut known, &[("Db", &["a"]), ("web", &[])]);
        assert_eq!(found, (list(&["db"]), list(&[]), 1));
        assert!(
            known.has_instances(&key("db")),
            "the previous ones answer until then"
        );
        let found = set(&mut known, &[("Db", &["a"]), ("x", &[])]);
        assert_eq!(found, (list(&["x"]), list(&["web"]), 1));
        let found = set(&mut known, &[]);
        let removed = {
            let mut removed = found.1;
            removed.sort();
            removed
        };
        assert_eq!(
            (found.0, removed, found.2),
            (list(&[]), list(&["db", "x"]), 0)
        );
        let service = known.live.places[&own()].services.as_ref().unwrap();
        assert_eq!(service.iter().count(), 0);
        assert!(!known.has_instances(&key("db")));
        assert_eq!(known.name_of(&key("db")), None);
    }

    #[test]
    fn peers_are_places_even_without_services() {
        let mut known = Known::default();
        known.set_services(&own(), services(&[("web", &[])]));
        let peers = |list: &[(&str, &[&str])]| services(list);
        let difference = known.set_peers(peers(&[("East", &["web", "db"]), ("west", &[])]));
        assert_eq!(difference.removed, []);
        let east = |service: &str| (peer_of("east"), service.to_owned());
        assert_eq!(difference.to_fetch, [east("db"), east("web")]);
        let west = &known.live.places[&peer_of("west")];
        assert!(west.is_loaded() && west.unloaded == 0);
        assert_eq!(known.counts(), (3, 0, 0, 0));
        // The same list is no news.
        let same = known.set_peers(peers(&[("East", &["web", "db"]), ("west", &[])]));
        assert_eq!(same, Difference::default());
        let difference = known.set_peers(peers(&[("west", &["x"])]));
        let mut removed = difference.removed;
        removed.sort();
        assert_eq!(removed, [east("db"), east("web")]);
        assert_eq!(difference.to_fetch, [(peer_of("west"), "x".to_owned())]);
        let places: Vec<&Place> = known.live.places.keys().collect();
        assert_eq!(
            places,
            [&own(), &peer_of("west")],
            "the own datacenter stays"
        );
    }

    #[test]
    fn nodes_are_gathered_for_peers_alone() {
        let node = |name: &str, address: &str| {
            Arc::new(Node {
                name: name.to_owned(),
                address: address.to_owned(),
                ..Node::default()
            })
        };
        let loaded = |nodes: Vec<Arc<Node>>| ServiceInstances {
            nodes,
            ..ServiceInstances::default()
        };
        let mut known = Known::default();
        known.set_peers(services(&[("east", &["db", "web"])]));
        known.set_services(&own(), services(&[("web", &[])]));
        let east = |service: &str| (peer_of("east"), service.to_owned());
        known.set_instances(&east("web"), loaded(vec![node("b", "1"), node("a", "1")]));
        known.set_instances(&(own(), "web".to_owned()), loaded(vec![node("c", "1")]));
        let nodes = |known: &Known, place: &Place| known.live.places[place].nodes.clone();
        assert_eq!(nodes(&known, &own()), None);
        let first = nodes(&known, &peer_of("east")).unwrap();
        assert_eq!(*first, [node("a", "1"), node("b", "1")]);
        // Each service on a node reports it again; unchanged nodes stay the same objects.
        known.set_instances(&east("db"), loaded(vec![node("b", "1"), node("c", "1")]));
        let second = nodes(&known, &peer_of("east")).unwrap();
        assert_eq!(*second, [node("a", "1"), node("b", "1"), node("c", "1")]);
        assert!(Arc::ptr_eq(&first[0], &second[0]) && Arc::ptr_eq(&first[1], &second[1]));
    }

    #[test]
    fn views_hold_known_state() {
        let mut known = Known {
            own: Some("dc2".to_owned()),
            node_name: "n".to_owned(),
            ..Known::default()
        };
        assert!(known.is_datacenter("dc2") && !known.is_datacenter("dc1"));
        known.set_nodes("dc2", Vec::new());
        known.set_queries(
            "dc2",
            vec![PreparedQuery::default(), PreparedQuery::default()],
        );
        known.set_queries("dc3", vec![PreparedQuery::default()]);
        assert_eq!(known.queries().count(), 3);
        let all = view(&known, known.live());
        assert_eq!(
            (all.datacenter.as_deref(), &*all.node_name),
            (Some("dc2"), "n")
        );
        assert_eq!(all.live.places.len(), 1);
        let none = view(&known, known.empty());
        assert_eq!(
            (none.datacenter.as_deref(), none.live.places.len()),
            (Some("dc2"), 0)
        );
        assert_eq!((&*none.live.own, none.live.queries.len()), ("dc2", 0));
        assert_eq!(Known::default().empty().own, "dc1");
    }
}
