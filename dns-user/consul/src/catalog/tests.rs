use std::collections::BTreeSet;

use super::{
    live::{LiveService, ServiceInstances},
    registrations::Check,
    *,
};

fn config() -> Config {
    let json = dns_core::config::reader::Json::parse(b"{}").expect("JSON");
    Config::read(
        &dns_core::config::reader::ObjectReader::document("test", &json).expect("an object"),
    )
    .expect("defaults")
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
