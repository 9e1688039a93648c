use std::collections::BTreeSet;

use super::{
    live::{LiveService, ServiceInstances},
    registrations::{Check, Datacenter},
    *,
};

fn config() -> Config {
    let json = dns_core::config::reader::Json::parse(b"{}").expect("JSON");
    Config::read(
        &dns_core::config::reader::ObjectReader::document("test", &json).expect("an object"),
    )
    .expect("defaults")
    .0
}

fn own() -> Place {
    Place::Datacenter("dc1".into())
}

fn node(name: &str, datacenter: &str, address: &str) -> Arc<Node> {
    let [name, datacenter, address] = [name, datacenter, address].map(str::to_owned);
    Arc::new(Node {
        name,
        datacenter,
        address,
        ..Node::default()
    })
}

fn instance(service: &str, node: &str, id: &str, address: &str) -> Instance {
    let [service, node, id, address] = [service, node, id, address].map(str::to_owned);
    Instance {
        node,
        id,
        service,
        address,
        port: 80,
        ..Instance::default()
    }
}

/// Sets the instances of a service, or removes it.
fn set(live: &mut Live, place: &Place, service: &str, loaded: Option<ServiceInstances>) {
    let known = live.places.entry(place.clone()).or_default();
    let services = known.services.get_or_insert_default();
    match loaded {
        Some(loaded) => {
            let service_of = LiveService {
                name: service.to_owned(),
                tags: Vec::new(),
                instances: Some(Arc::new(loaded)),
            };
            services.insert(service.into(), Arc::new(service_of));
        }
        None => drop(services.remove(service)),
    }
}

fn loaded(instances: Vec<Instance>) -> Option<ServiceInstances> {
    let instances = instances.into_iter().map(Arc::new).collect();
    Some(ServiceInstances {
        instances,
        ..ServiceInstances::default()
    })
}

/// Returns the results of all lookups in a catalog, as text.
fn contents(catalog: &Catalog, live: &Live) -> BTreeSet<String> {
    let mut lines = BTreeSet::from([format!(
        "{} {}",
        catalog.node_count(),
        catalog.instance_count()
    )]);
    for place in live.places.keys() {
        for service in ["web", "db", "proxy"] {
            for (kind, ids) in [
                ("service", catalog.service(place, service)),
                ("connect", catalog.connect(place, service)),
            ] {
                let asked = Name::root();
                let ids = ids.into_iter().map(|id| {
                    let (instance, node) = (catalog.instance(id), catalog.node_of(id));
                    let target = catalog.target(catalog.member(id), Accept::Any, &asked);
                    let target = target.map(Cow::into_owned);
                    assert_eq!(
                        target,
                        instance.target(node, &config(), Accept::Any, Some(&asked))
                    );
                    let first = catalog.member(id).first_with_target;
                    format!(
                        "{} {} {:?} {target:?} {first}",
                        instance.id,
                        node.address,
                        catalog.status(id)
                    )
                });
                lines.insert(format!(
                    "{place:?} {kind} {service} {:?}",
                    ids.collect::<Vec<_>>()
                ));
            }
            lines.insert(format!(
                "{service} {:?}",
                catalog.virtual_address(None, service)
            ));
        }
    }
    for last in 0..8 {
        let address = IpAddr::from([10, 1, 0, last]);
        let instance = catalog
            .instance_at(address)
            .map(|id| catalog.instance(id).id.clone());
        lines.insert(format!(
            "{address} {instance:?} {:?}",
            catalog.nodes.at(address).map(|node| &node.name)
        ));
    }
    lines
}

#[test]
fn random_updates_equal_a_rebuild() {
    let mut random = fastrand::Rng::with_seed(37);
    let config = config();
    let files = Registrations {
        nodes: vec![node("file", "dc1", "10.9.0.1")],
        instances: vec![Arc::new(instance("web", "file", "from-file", "10.1.0.1"))],
        ..Registrations::default()
    };
    let build = || Catalog::build(files.clone(), &config, Visibility::all());
    let (mut catalog, mut live) = (build(), Live::unknown("dc1"));
    for _ in 0..400 {
        let place = if random.bool() {
            own()
        } else {
            Place::Datacenter("dc2".into())
        };
        let Place::Datacenter(datacenter) = place.clone() else {
            unreachable!("a datacenter")
        };
        match random.u8(..4) {
            0 => {
                let count = random.usize(..4);
                let list = (0..count).map(|number| {
                    node(
                        &format!("n{number}"),
                        &datacenter,
                        &format!("10.1.0.{}", random.u8(..8)),
                    )
                });
                live.places.entry(place).or_default().nodes = Some(Arc::new(list.collect()));
            }
            1 => set(
                &mut live,
                &place,
                ["web", "db", "proxy"][random.usize(..3)],
                None,
            ),
            _ => {
                let service = ["web", "db", "proxy"][random.usize(..3)];
                let mut list = Vec::new();
                for number in 0..random.usize(..4) {
                    let address = format!("10.1.0.{}", random.u8(..8));
                    let mut one = instance(
                        service,
                        &format!("n{}", random.u8(..4)),
                        &number.to_string(),
                        &address,
                    );
                    one.proxy_for = (service == "proxy")
                        .then(|| "web".to_owned())
                        .filter(|_| random.bool());
                    one.connect_native = random.bool();
                    if random.bool() {
                        one.checks.push(Check {
                            id: "up".to_owned(),
                            status: CheckStatus::Critical,
                        });
                    }
                    list.push(one);
                }
                let mut all = loaded(list);
                if let Some(all) = all.as_mut().filter(|_| random.bool()) {
                    all.virtual_addresses =
                        vec![("web".to_owned(), IpAddr::from([240, 0, 0, random.u8(1..3)]))];
                }
                set(&mut live, &place, service, all);
            }
        }
        // Two parts may give one service different addresses; then the latest counts, which a
        // rebuild cannot know.
        let proxies = [("web", own()), ("db", own()), ("proxy", own())];
        let virtual_sources = proxies.iter().filter(|(service, place)| {
            let known = live
                .places
                .get(place)
                .and_then(|known| known.service(service)?.instances.clone());
            known.is_some_and(|known| !known.virtual_addresses.is_empty())
        });
        let unique = virtual_sources.count() < 2;
        catalog.update(Some(live.clone()));
        let mut rebuilt = build();
        rebuilt.update(Some(live.clone()));
        let comparable = |lines: BTreeSet<String>| -> BTreeSet<String> {
            lines
                .into_iter()
                .filter(|line| unique || !line.contains("240.0.0"))
                .collect()
        };
        assert_eq!(
            comparable(contents(&catalog, &live)),
            comparable(contents(&rebuilt, &live))
        );
    }
    catalog.update(None);
    assert_eq!((catalog.instance_count(), catalog.node_count()), (1, 1));
}

#[test]
fn same_node_names_stay_apart() {
    let mut live = Live::unknown("dc1");
    for (datacenter, address) in [("dc1", "10.1.0.1"), ("dc2", "10.2.0.1")] {
        let place = Place::Datacenter(datacenter.into());
        set(
            &mut live,
            &place,
            "web",
            loaded(vec![instance("web", "n", "web", "")]),
        );
        let nodes = Arc::new(vec![node("n", datacenter, address)]);
        live.places.entry(place).or_default().nodes = Some(nodes);
    }
    let mut catalog = Catalog::build(Registrations::default(), &config(), Visibility::all());
    catalog.update(Some(live));
    for (datacenter, address) in [("dc1", "10.1.0.1"), ("dc2", "10.2.0.1")] {
        let ids = catalog.service(&Place::Datacenter(datacenter.into()), "web");
        let found: Vec<&str> = ids
            .iter()
            .map(|&id| catalog.node_of(id).address.as_str())
            .collect();
        assert_eq!(found, [address]);
    }
}

#[test]
fn change_touches_single_group() {
    let mut live = Live::unknown("dc1");
    live.places.entry(own()).or_default().nodes =
        Some(Arc::new(vec![node("n", "dc1", "10.1.0.1")]));
    for number in 0..1000 {
        let name = format!("service-{number}");
        set(
            &mut live,
            &own(),
            &name,
            loaded(vec![instance(&name, "n", &name, "10.1.0.2")]),
        );
    }
    let mut catalog = Catalog::build(Registrations::default(), &config(), Visibility::all());
    catalog.update(Some(live.clone()));
    let before = catalog.clone();
    set(
        &mut live,
        &own(),
        "service-7",
        loaded(vec![instance("service-7", "n", "other", "10.1.0.2")]),
    );
    catalog.update(Some(live));
    let replaced = catalog
        .groups
        .iter()
        .zip(&before.groups)
        .filter(|(now, before)| !Arc::ptr_eq(now, before));
    assert_eq!(replaced.count(), 1);
    assert!(Arc::ptr_eq(&catalog.nodes, &before.nodes));
    let ids = catalog.service(&own(), "service-7");
    assert_eq!(
        ids.iter()
            .map(|&id| catalog.instance(id).id.as_str())
            .collect::<Vec<_>>(),
        ["other"]
    );
}

#[test]
fn everything_is_pending_until_it_is_loaded() {
    let mut catalog = Catalog::build(Registrations::default(), &config(), Visibility::all());
    // Without a live Consul nothing will come.
    assert!(!catalog.is_pending(&own(), None));
    let mut live = Live::unknown("dc1");
    assert_eq!(live.own, "dc1");
    catalog.update(Some(live.clone()));
    assert!(catalog.is_pending(&own(), None) && catalog.is_pending(&own(), Some("web")));
    set(&mut live, &own(), "web", loaded(Vec::new()));
    live.places.get_mut(&own()).unwrap().nodes = Some(Default::default());
    catalog.update(Some(live));
    assert!(!catalog.is_pending(&own(), None) && !catalog.is_pending(&own(), Some("web")));
}

#[test]
fn parts_and_queries_may_be_missing() {
    let mut live = Live::unknown("dc1");
    assert!(live.is_incomplete(&own()) && live.lacks_queries("dc1"));
    assert!(!live.lacks_queries("dc2"), "it is not known");
    set(&mut live, &own(), "web", loaded(Vec::new()));
    let known = live.places.get_mut(&own()).unwrap();
    known.nodes = Some(Default::default());
    known.unloaded = 1;
    assert!(live.is_incomplete(&own()));
    live.places.get_mut(&own()).unwrap().unloaded = 0;
    assert!(!live.is_incomplete(&own()));
    live.queries.insert("dc1".into(), Default::default());
    assert!(!live.lacks_queries("dc1"));
}

#[test]
fn live_datacenters_precede_file_datacenters() {
    let known = |name: &str, reachable| Datacenter {
        name: name.to_owned(),
        reachable,
    };
    let files = Registrations {
        nodes: vec![Arc::new(Node {
            peer: Some("West".to_owned()),
            ..(*node("p", "dc9", "10.0.0.1")).clone()
        })],
        datacenters: vec![known("DC2", true), known("dc3", false), known("dc4", false)],
        ..Registrations::default()
    };
    let mut catalog = Catalog::build(files, &config(), Visibility::all());
    let reach =
        |catalog: &Catalog| ["dc1", "dc2", "dc3", "dc4", "dc5"].map(|name| catalog.reach(name));
    let [yes, no, unknown] = [Reach::Reachable, Reach::Unreachable, Reach::Unknown];
    assert_eq!(reach(&catalog), [yes, yes, no, no, unknown]);
    assert!(catalog.is_peer("west") && !catalog.is_peer("east") && !catalog.is_peer("dc2"));
    assert!(!catalog.lacks_datacenters(), "files name all of them");
    assert_eq!(catalog.nearest_datacenters("dc1"), [""; 0]);

    let mut live = Live::unknown("dc1");
    catalog.update(Some(live.clone()));
    assert!(catalog.lacks_datacenters());
    live.datacenters = vec![known("dc1", false), known("dc2", false), known("dc3", true)];
    live.places
        .insert(Place::Peer("east".into()), Default::default());
    catalog.update(Some(live));
    assert_eq!(reach(&catalog), [yes, no, yes, no, unknown]);
    assert!(catalog.is_peer("west") && catalog.is_peer("east"));
    assert!(!catalog.lacks_datacenters());
    assert_eq!(catalog.nearest_datacenters("dc2"), ["dc1", "dc3"]);
    assert_eq!(catalog.node_count(), 1);
}

#[test]
fn queries_belong_to_a_datacenter() {
    let query = |id: &str, datacenter: Option<&str>| PreparedQuery {
        id: id.to_owned(),
        datacenter: datacenter.map(str::to_owned),
        ..PreparedQuery::default()
    };
    let files = Registrations {
        queries: vec![
            query("a", None),
            query("b", Some("DC1")),
            query("c", Some("dc2")),
        ],
        ..Registrations::default()
    };
    let mut catalog = Catalog::build(files, &config(), Visibility::all());
    let mut live = Live::unknown("dc1");
    live.queries
        .insert("dc2".to_owned(), Arc::new(vec![query("d", None)]));
    catalog.update(Some(live));
    let ids = |datacenter: &str| -> String {
        catalog
            .queries(datacenter)
            .map(|query| &*query.id)
            .collect()
    };
    assert_eq!(
        (ids("dc1"), ids("dc2"), ids("dc3")),
        ("ab".into(), "cd".into(), "".into())
    );
}

#[test]
fn distances_are_listed_or_estimated() {
    use live::{Coordinate, Coordinates};

    let files = Registrations {
        distances: [("N1".to_owned(), vec!["n3".to_owned(), "N2".to_owned()])].into(),
        ..Registrations::default()
    };
    let mut catalog = Catalog::build(files, &config(), Visibility::all());
    let mut nodes = std::collections::HashMap::new();
    for (name, x) in [("n1", 1.0), ("n2", 3.0), ("far", 9.0)] {
        let coordinate = Coordinate {
            position: vec![x],
            ..Coordinate::default()
        };
        nodes.insert(name.to_owned(), coordinate);
    }
    let mut live = Live::unknown("dc1");
    live.coordinates = Arc::new(Coordinates {
        nodes,
        ..Coordinates::default()
    });
    let distances = |catalog: &Catalog, from: &str| {
        let distance = catalog.distances(from);
        [("n1", "dc1"), ("N2", "DC1"), ("n3", "dc1"), ("far", "dc2")]
            .map(|(name, datacenter)| distance(&node(name, datacenter, "")))
    };
    let listed = [None, Some(1.0), Some(0.0), None];
    assert_eq!(distances(&catalog, "n1"), listed);
    assert_eq!(distances(&catalog, "n2"), [None; 4]);
    catalog.update(Some(live));
    assert_eq!(
        distances(&catalog, "n1"),
        listed,
        "a list of files comes first"
    );
    // Coordinates of other datacenters are not comparable.
    assert_eq!(
        distances(&catalog, "N2"),
        [Some(2.0), Some(0.0), None, None]
    );
    assert_eq!(distances(&catalog, "n3"), [None; 4]);
}

#[test]
fn weights_follow_the_worst_check() {
    use registrations::Weights;

    let with = |id: &str, status: Option<CheckStatus>| {
        let mut one = instance("web", "n", id, "");
        one.weights = Weights {
            passing: 7,
            warning: 3,
        };
        for status in status.into_iter().chain([CheckStatus::Passing]) {
            let id = String::new();
            one.checks.push(Check { id, status });
        }
        Arc::new(one)
    };
    let files = Registrations {
        nodes: vec![node("n", "dc1", "10.0.0.1")],
        instances: vec![
            with("c", Some(CheckStatus::Critical)),
            with("b", Some(CheckStatus::Warning)),
            with("A", None),
        ],
        ..Registrations::default()
    };
    let catalog = Catalog::build(files, &config(), Visibility::all());
    let ids = catalog.service(&own(), "web");
    let weights: Vec<(CheckStatus, u16)> = ids
        .iter()
        .map(|&id| (catalog.status(id), catalog.weight(id)))
        .collect();
    let expected = [
        (CheckStatus::Passing, 7),
        (CheckStatus::Warning, 3),
        (CheckStatus::Critical, 0),
    ];
    assert_eq!(weights, expected, "sorted by id, in any letter case");
    for (word, status) in [
        ("passing", Some(CheckStatus::Passing)),
        ("warning", Some(CheckStatus::Warning)),
        ("critical", Some(CheckStatus::Critical)),
        ("maintenance", Some(CheckStatus::Critical)),
        ("Passing", None),
        ("", None),
    ] {
        assert_eq!(CheckStatus::from_text(word), status, "{word}");
    }
}

#[test]
fn gateways_serve_bound_services() {
    let gateway = |gateway: &str, services: &[&str]| Gateway {
        gateway: gateway.to_owned(),
        services: services.iter().map(|&service| service.to_owned()).collect(),
    };
    let native = Instance {
        connect_native: true,
        ..instance("native", "n", "native", "")
    };
    let proxy = Instance {
        proxy_for: Some("meshed".to_owned()),
        ..instance("proxy", "n", "proxy", "")
    };
    let plain = ["web", "gw", "all"].map(|name| instance(name, "n", name, ""));
    let files = Registrations {
        nodes: vec![node("n", "dc1", "10.0.0.1")],
        instances: plain
            .into_iter()
            .chain([native, proxy])
            .map(Arc::new)
            .collect(),
        gateways: vec![
            gateway("GW", &["Web", "bound"]),
            gateway("all", &["*", "web"]),
        ],
        ..Registrations::default()
    };
    let mut catalog = Catalog::build(files.clone(), &config(), Visibility::all());
    let names = |catalog: &Catalog, ids: Vec<InstanceId>| {
        let mut names: Vec<String> = ids
            .iter()
            .map(|&id| catalog.instance(id).id.clone())
            .collect();
        names.sort();
        names.join(" ")
    };
    for (service, ingress, connect) in [
        ("web", "all gw", ""),
        ("bound", "gw", ""),
        ("native", "all", "native"),
        ("meshed", "all", "proxy"),
        ("proxy", "all", ""),
        ("none", "", ""),
    ] {
        let found = names(&catalog, catalog.ingress(&own(), service));
        assert_eq!(found, ingress, "{service}");
        let found = names(&catalog, catalog.connect(&own(), service));
        assert_eq!(found, connect, "{service}");
    }
    // A live Consul's gateways are added.
    let mut live = Live::unknown("dc1");
    live.gateways = Arc::new(vec![gateway("web", &["none"])]);
    catalog.update(Some(live));
    assert_eq!(names(&catalog, catalog.ingress(&own(), "none")), "web");
    assert_eq!(names(&catalog, catalog.ingress(&own(), "web")), "all gw");
    let nothing = Visibility {
        nodes: vec!["*".to_owned()],
        services: vec!["gw".to_owned(), "proxy".to_owned()],
    };
    let catalog = Catalog::build(files, &config(), nothing);
    assert_eq!(names(&catalog, catalog.ingress(&own(), "web")), "");
    assert_eq!(names(&catalog, catalog.connect(&own(), "meshed")), "");
    assert!(catalog.is_readable("GW") && !catalog.is_readable("web"));
    assert_eq!(catalog.virtual_address(None, "web"), Err(Unreadable));
    assert_eq!(catalog.virtual_address(None, "gw"), Ok(None));
}

#[test]
fn live_virtual_addresses_come_first() {
    let address = |last: u8| IpAddr::from([240, 0, 0, last]);
    let of_file = |peer: Option<&str>, address| VirtualAddress {
        service: "Web".to_owned(),
        peer: peer.map(str::to_owned),
        address,
    };
    let files = Registrations {
        virtual_addresses: vec![of_file(None, address(1)), of_file(Some("East"), address(2))],
        ..Registrations::default()
    };
    let mut catalog = Catalog::build(files, &config(), Visibility::all());
    let found = |catalog: &Catalog| {
        [None, Some("east"), Some("west")].map(|peer| catalog.virtual_address(peer, "web").unwrap())
    };
    assert_eq!(found(&catalog), [Some(address(1)), Some(address(2)), None]);
    let mut live = Live::unknown("dc1");
    for (place, last) in [
        (own(), 5),
        (Place::Datacenter("dc2".into()), 6),
        (Place::Peer("west".into()), 7),
    ] {
        let loaded = ServiceInstances {
            virtual_addresses: vec![("WEB".to_owned(), address(last))],
            ..ServiceInstances::default()
        };
        set(&mut live, &place, "proxy", Some(loaded));
    }
    catalog.update(Some(live.clone()));
    // Those of other datacenters have no name.
    let expected = [Some(address(5)), Some(address(2)), Some(address(7))];
    assert_eq!(found(&catalog), expected);
    set(&mut live, &own(), "proxy", None);
    live.places.remove(&Place::Peer("west".into()));
    catalog.update(Some(live));
    assert_eq!(found(&catalog), [Some(address(1)), Some(address(2)), None]);
}

#[test]
fn numbers_of_removed_services_are_reused() {
    let mut live = Live::unknown("dc1");
    live.places.entry(own()).or_default().nodes =
        Some(Arc::new(vec![node("n", "dc1", "10.1.0.1")]));
    let mut catalog = Catalog::build(Registrations::default(), &config(), Visibility::all());
    for round in 0..5 {
        let name = format!("service-{round}");
        let address = format!("10.1.0.{round}");
        set(
            &mut live,
            &own(),
            &name,
            loaded(vec![instance(&name, "n", &name, &address)]),
        );
        catalog.update(Some(live.clone()));
        assert_eq!((catalog.instance_count(), catalog.groups.len()), (1, 1));
        let id = catalog.instance_at(address.parse().unwrap()).unwrap();
        assert_eq!(catalog.instance(id).id, name);
        set(&mut live, &own(), &name, None);
        catalog.update(Some(live.clone()));
        assert_eq!((catalog.instance_count(), catalog.free.len()), (0, 1));
        assert!(catalog.instance_at(address.parse().unwrap()).is_none());
        assert!(catalog.service(&own(), &name).is_empty());
    }
}

#[test]
fn readable_nodes_and_instances_are_counted() {
    let nodes = ["a", "b", "c"].map(|name| node(name, "dc1", "10.0.0.1"));
    let instances = [("web", "a"), ("web", "b"), ("db", "c"), ("web", "none")];
    let instances = instances.map(|(service, node)| Arc::new(instance(service, node, service, "")));
    let files = Registrations {
        nodes: nodes.into(),
        instances: instances.into(),
        ..Registrations::default()
    };
    let readable = |nodes: &[&str], services: &[&str]| {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let visibility = Visibility {
            nodes: names(nodes),
            services: names(services),
        };
        let catalog = Catalog::build(files.clone(), &config(), visibility);
        (catalog.node_count(), catalog.instance_count())
    };
    assert_eq!(readable(&["*"], &["*"]), (3, 3));
    assert_eq!(readable(&["a", "c"], &["*"]), (2, 2));
    assert_eq!(readable(&["*"], &["web"]), (3, 2));
    assert_eq!(readable(&[], &["*"]), (0, 0));
}
