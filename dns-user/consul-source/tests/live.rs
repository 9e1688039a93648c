//! The live source against a strict double of Consul's HTTP API: no change is missed,
//! whatever the agent does, and no client behaves badly.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[allow(
    dead_code,
    reason = "the other test that uses these modules needs more of them"
)]
mod support;

use std::{
    collections::BTreeSet,
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    sync::Arc,
    time::{Duration, Instant},
};

use dns_consul::{
    Lack, Missing,
    catalog::{
        Catalog, Place,
        live::{Live, ServiceInstances},
        registrations::{
            CheckStatus as Health, FailoverTarget, Instance as Registered, Node, Registrations,
        },
    },
    config::{ApiAddress, HttpApi, Visibility},
    source::{CatalogView, LiveSettings},
};
use dns_consul_source::LiveConsul;
use dns_upstream::{HostNames, OwnAddresses};
use rustls_pki_types::{PrivateKeyDer, pem::PemObject as _};
use serde_json::json;
use support::{
    double::{Double, DoubleRules, Fault},
    world::{Instance, World},
};
use test_support::free_address;

/// Time limit for an event that must occur.
const TIMEOUT: Duration = Duration::from_secs(300);

#[tokio::test(flavor = "multi_thread")]
async fn changes_arrive() {
    let double = start(World::generated(20, 5), DoubleRules::default());
    let source = LiveConsul::start(settings(&[double.address], |_| {}), &Arc::default());
    until_same(&source, &double).await;
    let view = source.views().borrow().clone();
    assert_eq!(
        (view.datacenter.as_deref(), view.node_name.as_str()),
        (Some("dc1"), "agent")
    );
    // Health, an address and a port, none of which the list of services contains.
    double.change(|world| world.set_status("service-3", 1, "critical"));
    until_same(&source, &double).await;
    double.change(|world| world.register("service-3", instance("node-1", "second", "10.9.9.9")));
    until_same(&source, &double).await;
    double.change(|world| world.register("new", instance("node-2", "new", "10.9.9.10")));
    until_same(&source, &double).await;
    double.change(|world| world.move_node("node-2", "10.8.8.8"));
    until_same(&source, &double).await;
    for _ in 0..6 {
        double.change(|world| world.deregister("service-3"));
    }
    until_same(&source, &double).await;
    assert_eq!(double.tally().violations, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn faulty_agents_lose_no_change() {
    let seed = std::env::var("SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| fastrand::u64(..));
    println!("SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let double = start(World::generated(30, 4), DoubleRules::default());
    let source = LiveConsul::start(settings(&[double.address], |_| {}), &Arc::default());
    for round in 0..12 {
        let kinds = [
            Fault::TooMany,
            Fault::NoLeader,
            Fault::SlowBody,
            Fault::CutBody,
            Fault::Spurious,
        ];
        let faults: Vec<Fault> = (0..random.usize(..6))
            .map(|_| kinds[random.usize(..kinds.len())])
            .collect();
        double.misbehave(faults);
        for change in 0..random.usize(1..8) {
            let service = format!("service-{}", random.usize(..32));
            let number = random.usize(..4);
            match random.usize(..4) {
                0 => double.change(|world| world.set_status(&service, number, "warning")),
                1 => double.change(|world| {
                    let id = format!("{round}-{change}");
                    world.register(&service, instance("node-1", &id, "10.9.9.9"));
                }),
                2 => double.change(|world| {
                    if world.services.contains_key(&service) {
                        world.deregister(&service);
                    }
                }),
                _ => double.change(|world| {
                    world.move_node(&format!("node-{number}"), &format!("10.7.{round}.{change}"));
                }),
            }
        }
        if round % 4 == 3 {
            double.restore();
        }
        if random.bool() {
            tokio::time::sleep(Duration::from_millis(random.u64(..300))).await;
        }
    }
    until_same(&source, &double).await;
    assert_eq!(double.tally().violations, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_entries_are_reported() {
    let double = start(World::generated(5, 3), DoubleRules::default());
    let source = LiveConsul::start(settings(&[double.address], |_| {}), &Arc::default());
    until_same(&source, &double).await;
    // An instance with a port that does not exist, which keeps its address, and a node without a name.
    double.change(|world| {
        world.nodes.insert(String::new(), "10.6.6.6".to_owned());
        world.move_node("node-1", "10.6.6.1");
        world.register(
            "service-1",
            Instance {
                port: 70_000,
                ..instance("node-1", "bad", "10.6.6.7")
            },
        );
        world.register("service-1", instance("node-2", "good", "10.6.6.8"));
    });
    let are_loaded = || {
        let view = source.views().borrow().clone();
        instances(&view)
            .iter()
            .any(|instance| instance.id == "good")
            && nodes(&view).iter().any(|node| node.address == "10.6.6.1")
    };
    until("the valid entries are loaded", are_loaded).await;
    let view = source.views().borrow().clone();
    let bad = instances(&view)
        .into_iter()
        .find(|instance| instance.id == "bad")
        .unwrap();
    assert_eq!(
        (bad.address.as_str(), bad.impossible_port),
        ("10.6.6.7", Some(70_000))
    );
    until("the status counts them", || {
        source.status().invalid_entries == 2
    })
    .await;
    double.change(|world| {
        world.nodes.remove("");
        world.move_node("node-1", "10.6.6.2");
        world.set_status("service-1", 0, "warning");
        if let Some(service) = world.services.get_mut("service-1") {
            service.instances.retain(|instance| instance.id != "bad");
        }
    });
    until("all is valid", || source.status().invalid_entries == 0).await;
    until_same(&source, &double).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn revoked_token_is_reported_and_expires() {
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    fs::write(&token, "good\n").unwrap();
    let rules = DoubleRules {
        token: Some("good".to_owned()),
        ..DoubleRules::default()
    };
    let double = start(World::generated(5, 3), rules);
    let mut settings = settings(&[double.address], |api| api.wait = Duration::from_secs(1));
    settings.token_file = Some(token);
    settings.max_stale = Duration::from_secs(8);
    let source = LiveConsul::start(settings, &Arc::default());
    until_same(&source, &double).await;
    assert_eq!((source.status().stale, source.status().expired), (0, false));
    double.set_token("another");
    until("it is stale", || source.status().stale > 0).await;
    let problem = source.status().stale_problem.unwrap_or_default();
    assert!(problem.contains("permission denied (403)"), "{problem}");
    until("it has expired", || source.status().expired).await;
    double.set_token("good");
    until("it is fresh", || {
        source.status().stale == 0 && !source.status().expired
    })
    .await;
    until_same(&source, &double).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_request_goes_without_its_token() {
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    let rules = DoubleRules {
        token: Some("good".to_owned()),
        ..DoubleRules::default()
    };
    let double = start(World::generated(5, 3), rules);
    let mut settings = settings(&[double.address], |_| {});
    settings.token_file = Some(token.clone());
    let source = LiveConsul::start(settings, &Arc::default());
    let missing = format!("consul.token_file: {}: cannot be read: ", token.display());
    until("the status names the file", || {
        let problem = source.status().problem.unwrap_or_default();
        problem.starts_with(&missing)
    })
    .await;
    assert_eq!(double.tally().requests, 0);
    fs::write(&token, "good\n").unwrap();
    until_same(&source, &double).await;
    assert_eq!(source.status().failures, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_of_another_datacenter_answers_for_ours() {
    let near = start(World::generated(5, 2), DoubleRules::default());
    let elsewhere = World {
        datacenter: "dc2".to_owned(),
        ..World::generated(3, 1)
    };
    let far = start(elsewhere, DoubleRules::default());
    far.change_other("dc1", |world| *world = World::generated(5, 2));
    let settings = settings(&[near.address, far.address], |_| {});
    let source = LiveConsul::start(settings, &Arc::default());
    until_same(&source, &near).await;
    drop(near);
    let mut ours = World::generated(5, 2);
    ours.set_status("service-3", 1, "critical");
    far.change_other("dc1", |world| world.set_status("service-3", 1, "critical"));
    until("the change of our datacenter", || {
        same(&source, &ours).is_ok()
    })
    .await;
    assert_eq!(far.tally().violations, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn revoked_token_ends_blocking_queries() {
    let rules = || DoubleRules {
        token: None,
        ..DoubleRules::default()
    };
    let double = start(World::generated(5, 3), rules());
    // The agent would hold its blocking queries far longer than the limits.
    let settings = settings(&[double.address], |api| {
        api.wait = Duration::from_secs(600);
        api.expire_after = Some(Duration::from_secs(4));
    });
    let source = LiveConsul::start(settings, &Arc::default());
    until_same(&source, &double).await;
    until("nodes and services are watched", || {
        double.waits_for("/v1/catalog/nodes") && double.waits_for("/v1/catalog/services")
    })
    .await;
    assert!(!source.status().unconfirmed);
    double.set_token("another");
    double.change(|world| world.set_status("service-1", 0, "critical"));
    until("nodes and services are unconfirmed", || {
        source.status().unconfirmed
    })
    .await;
    until("it has expired", || source.status().expired).await;
    let is_pending = || source.views().borrow().live.is_pending(&own(), None);
    until("names are unknown", is_pending).await;
    double.forget_token();
    until("it is fresh", || {
        !source.status().unconfirmed && !source.status().expired
    })
    .await;
    until_same(&source, &double).await;
    // A watch that a change has just answered is refused with an index; the agent would hold its
    // repetition with that index for minutes.
    until("nodes are watched", || {
        double.waits_for("/v1/catalog/nodes")
    })
    .await;
    double.set_token("another");
    double.change(|world| world.move_node("node-1", "10.9.9.9"));
    until("nodes are unconfirmed again", || {
        source.status().unconfirmed
    })
    .await;
    double.forget_token();
    until("they are confirmed", || !source.status().unconfirmed).await;
    until_same(&source, &double).await;
    // One forbidden topic does not put the catalog in doubt.
    double.forbid("/v1/health/service/service-1");
    double.change(|world| world.set_status("service-1", 1, "critical"));
    until("the service is stale", || source.status().stale == 1).await;
    assert!(!source.status().unconfirmed && !source.status().expired);
}

#[tokio::test(flavor = "multi_thread")]
async fn used_services_stay_watched() {
    const SERVICES: usize = 300;
    let double = start(World::generated(SERVICES, 1), DoubleRules::default());
    // Services without a watch are fetched one after the other.
    let few = |api: &mut HttpApi| (api.max_connections, api.rate) = (20, 100);
    let source = LiveConsul::start(settings(&[double.address], few), &Arc::default());
    until_same(&source, &double).await;
    let watched = source.status().services_watched;
    assert!(watched < 20, "{watched}");
    // The interface reports its hot names; a query in userspace would have the same effect.
    source.used(vec![(own(), "service-299".to_owned())]);
    until("its watch", || {
        double.waits_for("/v1/health/service/service-299")
    })
    .await;
    // Only the watch can tell of the change.
    double.hold_polls();
    double.change(|world| world.set_status("service-299", 0, "critical"));
    until_same(&source, &double).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn returning_agent_is_not_flooded() {
    const RATE: usize = 200;
    let world = World::generated(600, 2);
    // Twice the rate: a double that is late counts the requests of more than a second.
    let rules = || DoubleRules {
        rate: 2 * RATE,
        ..DoubleRules::default()
    };
    let double = start(world.clone(), rules());
    let address = double.address;
    let source = LiveConsul::start(
        settings(&[address], |api| api.rate = RATE as u32),
        &Arc::default(),
    );
    until_same(&source, &double).await;
    assert_eq!(double.tally().violations, [""; 0]);
    drop(double);
    until("nobody answers", || source.status().away).await;
    let before = source.status().requests;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let asked = source.status().requests - before;
    // Requests in flight may fail one after the other; after that, one per second.
    assert!(asked <= 170, "{asked} requests to an agent that is away");
    same(&source, &world).unwrap();
    let double = Double::start(TcpListener::bind(address).unwrap(), world, rules(), None).unwrap();
    double.change(|world| world.set_status("service-7", 0, "critical"));
    until_same(&source, &double).await;
    let tally = double.tally();
    println!(
        "{} requests, {} in the busiest second",
        tally.requests, tally.busiest_second
    );
    assert_eq!(tally.violations, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_services_need_few_connections() {
    let before = resident();
    let double = start(World::generated(5000, 10), DoubleRules::default());
    let with_double = resident();
    let begun = Instant::now();
    let source = LiveConsul::start(
        settings(&[double.address], |api| api.rate = 4000),
        &Arc::default(),
    );
    until_same(&source, &double).await;
    let (took, with_source) = (begun.elapsed(), resident());
    // A watched service, and one that is not watched until it is queried.
    double.change(|world| world.set_status("service-0", 0, "critical"));
    double.change(|world| world.set_status("service-4999", 0, "critical"));
    source.asked(own(), "service-4999".to_owned());
    until_same(&source, &double).await;
    let (tally, status) = (double.tally(), source.status());
    println!(
        "5,000 services, 50,000 instances: loaded within {took:?}, {} requests, at most {} connections, {} services \
         watched; memory: {} MiB for the source, {} MiB for the double",
        tally.requests,
        tally.most_connections,
        status.services_watched,
        (with_source - with_double) >> 20,
        (with_double - before) >> 20,
    );
    assert!(tally.most_connections <= 150, "{}", tally.most_connections);
    assert_eq!(tally.violations, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_connection_watches_every_service() {
    let folder = tempfile::tempdir().unwrap();
    let key = rcgen::generate_simple_self_signed(["consul.example".to_owned()]).unwrap();
    let (certificate, token) = (folder.path().join("ca.pem"), folder.path().join("token"));
    fs::write(&certificate, key.cert.pem()).unwrap();
    fs::write(&token, "first\n").unwrap();
    let private =
        PrivateKeyDer::from_pem_slice(key.signing_key.serialize_pem().as_bytes()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![key.cert.der().clone()], private)
        .unwrap();
    tls.alpn_protocols = vec![b"h2".to_vec()];
    let rules = DoubleRules {
        token: Some("first".to_owned()),
        ..DoubleRules::default()
    };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let double = Double::start(
        listener,
        World::generated(600, 2),
        rules,
        Some(Arc::new(tls)),
    )
    .unwrap();
    let mut settings = settings(&[double.address], |api| {
        api.addresses[0].tls = true;
        api.ca_file = Some(certificate);
        api.tls_server_name = Some("consul.example".to_owned());
        api.rate = 2000;
    });
    settings.token_file = Some(token.clone());
    let source = LiveConsul::start(settings, &Arc::default());
    until_same(&source, &double).await;
    until("all are watched", || {
        source.status().services_watched == 600
    })
    .await;
    until("all wait", || double.blocking() > 600).await;
    let most = double.tally().most_connections;
    println!("600 services watched by {most} connections");
    assert!(most <= 12, "{most}");
    // The token is replaced while the source runs.
    fs::write(&token, "second\n").unwrap();
    double.set_token("second");
    for service in ["service-1", "service-599"] {
        double.change(|world| world.set_status(service, 0, "critical"));
    }
    until_same(&source, &double).await;
    assert_eq!(double.tally().violations, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn second_agent_takes_over() {
    let refused = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .unwrap()
        .local_addr()
        .unwrap();
    let double = start(World::generated(3, 2), DoubleRules::default());
    let mut settings = settings(&[refused, double.address], |_| {});
    settings.max_stale = Duration::from_secs(10);
    let source = LiveConsul::start(settings, &Arc::default());
    assert!(
        source.views().borrow().live.is_pending(&own(), None),
        "nothing is loaded yet"
    );
    until_same(&source, &double).await;
    // Servers without a leader answer stale requests and report the age of their data.
    double.set_leader(false);
    double.change(|world| world.set_status("service-1", 0, "critical"));
    until_same(&source, &double).await;
    // No server with a leader answers for longer than `max_stale`.
    until("the data is too old", || source.status().expired).await;
    let is_pending = || source.views().borrow().live.is_pending(&own(), None);
    until("it is given up", is_pending).await;
    double.set_leader(true);
    double.change(|world| world.set_status("service-1", 0, "passing"));
    until_same(&source, &double).await;
    assert_eq!(double.tally().violations, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn unreachable_datacenter_is_reported() {
    let double = start(World::generated(3, 2), DoubleRules::default());
    let source = LiveConsul::start(settings(&[double.address], |_| {}), &Arc::default());
    until_same(&source, &double).await;
    let dc2 = datacenter("dc2");
    until("dc2 is known by name", || {
        source.views().borrow().live.is_pending(&dc2, None)
    })
    .await;
    source.demand(Lack {
        place: dc2.clone(),
        missing: Missing::Service("web".to_owned()),
    });
    // The double cannot reach that datacenter.
    let unreachable = || {
        let views = source.views();
        let view = views.borrow();
        view.live
            .datacenters
            .iter()
            .any(|known| known.name == "dc2" && !known.reachable)
    };
    until("dc2 is out of reach", unreachable).await;
    assert!(!source.views().borrow().live.is_pending(&dc2, None));
}

#[tokio::test(flavor = "multi_thread")]
async fn queried_datacenters_are_read() {
    let double = start(World::generated(3, 2), DoubleRules::default());
    double.change_other("dc2", |world| *world = World::generated(2, 3));
    double.set_list(
        "/v1/query dc2",
        json!([{"ID": "q", "Name": "far", "Service": {"Service": "service-1"}}]),
    );
    let source = LiveConsul::start(settings(&[double.address], |_| {}), &Arc::default());
    until_same(&source, &double).await;
    let dc2 = datacenter("dc2");
    until("dc2 is known by name", || {
        source.views().borrow().live.is_pending(&dc2, None)
    })
    .await;
    assert!(source.views().borrow().live.lacks_queries("dc2"));
    source.demand(Lack {
        place: dc2.clone(),
        missing: Missing::Queries,
    });
    source.demand(Lack {
        place: dc2.clone(),
        missing: Missing::Lists,
    });
    until("its lists", || {
        !source.views().borrow().live.is_pending(&dc2, None)
    })
    .await;
    until("its queries", || {
        !source.views().borrow().live.lacks_queries("dc2")
    })
    .await;
    source.demand(Lack {
        place: dc2.clone(),
        missing: Missing::Service("service-1".to_owned()),
    });
    let count = || loaded(&source, &dc2, "service-1").map_or(0, |loaded| loaded.instances.len());
    until("the service", || count() == 3).await;
    // From then on it is watched; the other one is not read.
    double.change_other("dc2", |world| world.deregister("service-1"));
    until("its change", || count() == 2).await;
    assert!(loaded(&source, &dc2, "service-0").is_none());
    assert_eq!(double.tally().violations, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn peers_are_followed() {
    let double = start(World::generated(3, 2), DoubleRules::default());
    double.change_other("peer:east", |world| *world = World::generated(1, 2));
    let peering = |services: &[&str]| json!([{"Name": "east", "State": "ACTIVE", "StreamStatus": {"ImportedServices": services}}]);
    double.set_list("/v1/peerings", peering(&["service-0"]));
    let source = LiveConsul::start(settings(&[double.address], |_| {}), &Arc::default());
    let east = Place::Peer("east".into());
    let count = || loaded(&source, &east, "service-0").map_or(0, |loaded| loaded.instances.len());
    until("the imported service", || count() == 2).await;
    let nodes = source.views().borrow().live.places[&east]
        .nodes
        .clone()
        .unwrap_or_default();
    assert_eq!(
        nodes
            .iter()
            .map(|node| node.peer.as_deref())
            .collect::<Vec<_>>(),
        [Some("east"); 2]
    );
    double.change_other("peer:east", |world| world.deregister("service-0"));
    until("its change", || count() == 1).await;
    assert_eq!(double.tally().violations, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_peerings_are_no_failure() {
    let double = start(World::generated(1, 1), DoubleRules::default());
    double.forbid("/v1/peerings");
    let source = LiveConsul::start(settings(&[double.address], |_| {}), &Arc::default());
    until_same(&source, &double).await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(source.status().stale, 0);
    assert_eq!(
        double.asked("/v1/peerings"),
        1,
        "asked once, until a reload"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn coordinates_are_read_when_needed() {
    let double = start(World::generated(1, 1), DoubleRules::default());
    let at = |node: &str, x: f64| json!({"Node": node, "Coord": {"Vec": [x, 0.0], "Height": 0.0, "Adjustment": 0.0}});
    double.set_list(
        "/v1/coordinate/nodes",
        json!([at("node-0", 0.0), at("node-1", 0.5)]),
    );
    let servers = json!([
        {"Datacenter": "dc1", "AreaID": "WAN", "Coordinates": [at("s1", 0.0)]},
        {"Datacenter": "far", "AreaID": "WAN", "Coordinates": [at("s2", 0.9)]},
        {"Datacenter": "near", "AreaID": "WAN", "Coordinates": [at("s3", 0.1)]},
    ]);
    double.set_list("/v1/coordinate/datacenters", servers);
    let idle = LiveConsul::start(settings(&[double.address], |_| {}), &Arc::default());
    until_same(&idle, &double).await;
    drop(idle);
    assert_eq!(
        double.asked("/v1/coordinate/nodes"),
        0,
        "no query needs them"
    );
    let targets = json!({"NearestN": 1, "Datacenters": ["far"]});
    let query =
        json!([{"ID": "q", "Service": {"Service": "web", "Near": "_agent", "Failover": targets}}]);
    double.set_list("/v1/query", query);
    let source = LiveConsul::start(settings(&[double.address], |_| {}), &Arc::default());
    let nearest = || {
        let views = source.views();
        let live = views.borrow().live.clone();
        let names = live.coordinates.nearest_datacenters("dc1");
        names.into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    until("the servers' coordinates", || nearest() == ["near", "far"]).await;
    until("the nodes' coordinates", || {
        source.views().borrow().live.coordinates.nodes.len() == 2
    })
    .await;
    let query = source.views().borrow().live.queries["dc1"][0].clone();
    assert_eq!(
        query.failover.targets,
        [FailoverTarget::Datacenter("far".to_owned())]
    );
}

/// A change of one instance among 50,000 (20,000 in a debug build) reaches the view, and from there the catalog that
/// answers queries. Prints the times, and that of a rebuild; the test of `Shared` in dns-consul counts what an update
/// copies.
#[tokio::test(flavor = "multi_thread")]
async fn single_change_of_many_arrives() {
    const SERVICES: usize = if cfg!(debug_assertions) { 2000 } else { 5000 };
    let double = start(World::generated(SERVICES, 10), DoubleRules::default());
    let source = LiveConsul::start(
        settings(&[double.address], |api| api.rate = 4000),
        &Arc::default(),
    );
    until_same(&source, &double).await;
    source.asked(own(), "service-0".to_owned());
    until("its watch", || {
        double.waits_for("/v1/health/service/service-0")
    })
    .await;
    let json = dns_core::config::reader::Json::parse(b"{}").unwrap();
    let reader = dns_core::config::reader::ObjectReader::document("test", &json).unwrap();
    let (config, _) = dns_consul::config::Config::read(&reader).unwrap();
    let build = |live: &Live| {
        let mut catalog = Catalog::build(Registrations::default(), &config, Visibility::all());
        catalog.update(Some(live.clone()));
        catalog
    };
    let first = source.views().borrow().live.clone();
    let begun = Instant::now();
    let mut catalog = build(&first);
    let rebuild = begun.elapsed();
    assert_eq!(catalog.instance_count(), 10 * SERVICES);
    let (mut arrivals, mut updates) = (Vec::new(), Vec::new());
    for round in 0..10 {
        let status = if round % 2 == 0 {
            "critical"
        } else {
            "passing"
        };
        let mut views = source.views();
        views.mark_unchanged();
        double.change(|world| world.set_status("service-0", 0, status));
        let begun = Instant::now();
        let worst = |view: &Arc<CatalogView>| {
            let loaded = view.live.places[&own()]
                .service("service-0")
                .and_then(|service| service.instances.clone());
            loaded.and_then(|loaded| {
                loaded.instances[0]
                    .checks
                    .iter()
                    .map(|check| check.status)
                    .max()
            })
        };
        let wanted = if round % 2 == 0 {
            Health::Critical
        } else {
            Health::Passing
        };
        let view = views
            .wait_for(|view| worst(view) == Some(wanted))
            .await
            .unwrap()
            .clone();
        arrivals.push(begun.elapsed());
        let begun = Instant::now();
        // As in the resolver: the copy in use stays.
        let in_use = catalog.clone();
        catalog.update(Some(view.live.clone()));
        updates.push(begun.elapsed());
        let status = |catalog: &Catalog| catalog.status(catalog.service(&own(), "service-0")[0]);
        assert_eq!(status(&catalog), wanted);
        assert_ne!(status(&in_use), wanted);
    }
    arrivals.sort();
    updates.sort();
    println!(
        "{} instances: change to view {:?} to {:?}, view to catalog {:?} to {:?}; a rebuild takes {rebuild:?}",
        10 * SERVICES,
        arrivals[0],
        arrivals[9],
        updates[0],
        updates[9]
    );
}

fn datacenter(name: &str) -> Place {
    Place::Datacenter(name.into())
}

fn own() -> Place {
    datacenter("dc1")
}

/// Returns the source's data about a service; `None` if not yet loaded.
fn loaded(source: &LiveConsul, place: &Place, service: &str) -> Option<Arc<ServiceInstances>> {
    source
        .views()
        .borrow()
        .live
        .places
        .get(place)?
        .service(service)?
        .instances
        .clone()
}

/// All instances of the local datacenter.
fn instances(view: &CatalogView) -> Vec<Arc<Registered>> {
    let services = view
        .live
        .places
        .get(&own())
        .and_then(|place| place.services.clone())
        .unwrap_or_default();
    let loaded = services
        .iter()
        .filter_map(|(_, service)| service.instances.clone());
    loaded.flat_map(|loaded| loaded.instances.clone()).collect()
}

/// All nodes of the local datacenter.
fn nodes(view: &CatalogView) -> Vec<Arc<Node>> {
    let nodes = view
        .live
        .places
        .get(&own())
        .and_then(|place| place.nodes.clone());
    nodes.map(|nodes| nodes.to_vec()).unwrap_or_default()
}

/// Answers every DNS query for an address with 127.0.0.1 and a TTL of a minute.
async fn resolve_all(socket: tokio::net::UdpSocket) {
    let mut query = [0; 512];
    while let Ok((length, client)) = socket.recv_from(&mut query).await {
        // The question ends before the OPT, which has 11 bytes.
        let mut reply = query[..length - 11].to_vec();
        let is_a = reply[length - 11 - 3] == 1;
        reply[2..12].copy_from_slice(&[0x81, 0x80, 0, 1, 0, u8::from(is_a), 0, 0, 0, 0]);
        if is_a {
            reply.extend_from_slice(&[0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 127, 0, 0, 1]);
        }
        let _ = socket.send_to(&reply, client).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_hosts_resolve_in_background() {
    let double = start(World::generated(3, 1), DoubleRules::default());
    let resolver = tokio::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))
        .await
        .unwrap();
    let recursors = [resolver.local_addr().unwrap().to_string()];
    tokio::spawn(resolve_all(resolver));
    let names = HostNames::new(&recursors, OwnAddresses::default());
    let settings = settings(&[double.address], |api| {
        api.addresses[0].host = "agent.consul.test".to_owned()
    });
    let source = LiveConsul::start(settings, &names);
    until_same(&source, &double).await;
    assert_eq!(double.tally().violations, [""; 0]);
}

/// A double for this world.
fn start(world: World, rules: DoubleRules) -> Double {
    Double::start(
        TcpListener::bind(free_address()).unwrap(),
        world,
        rules,
        None,
    )
    .unwrap()
}

/// Settings for agents at these addresses, with one change.
fn settings(addresses: &[SocketAddr], change: impl FnOnce(&mut HttpApi)) -> LiveSettings {
    let address = |address: &SocketAddr| ApiAddress {
        tls: false,
        host: address.ip().to_string(),
        port: address.port(),
    };
    let mut api = HttpApi {
        addresses: addresses.iter().map(address).collect(),
        wait: Duration::from_secs(30),
        rate: 1000,
        stale_after: Duration::from_secs(2),
        ..HttpApi::default()
    };
    change(&mut api);
    LiveSettings {
        api,
        token_file: None,
        datacenter: None,
        allow_stale: true,
        max_stale: Duration::from_secs(3600),
    }
}

fn instance(node: &str, id: &str, address: &str) -> Instance {
    Instance {
        node: node.to_owned(),
        id: id.to_owned(),
        address: address.to_owned(),
        port: 80,
        tags: vec!["v1".to_owned()],
        status: "passing",
    }
}

/// Waits until the source's data equals the registrations.
async fn until_same(source: &LiveConsul, double: &Double) {
    let begun = Instant::now();
    loop {
        let looked = Instant::now();
        let pending = source
            .views()
            .borrow()
            .live
            .places
            .get(&own())
            .map_or(0, |place| place.unloaded);
        let checked = match pending {
            0 => same(source, &double.world()),
            // A large world is compared only after the versions agree.
            pending => Err(format!("{pending} services pending")),
        };
        match checked {
            Ok(()) => return,
            Err(differs) if begun.elapsed() > TIMEOUT => {
                panic!(
                    "{differs}\n{:?}\n{} faults left",
                    source.status(),
                    double.faults_left()
                )
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(20).max(looked.elapsed() * 4)).await,
        }
    }
}

/// Returns the difference between the source's data and the registrations, if any.
fn same(source: &LiveConsul, world: &World) -> Result<(), String> {
    let view = source.views().borrow().clone();
    if !view.live.is_complete() {
        return Err("not complete".to_owned());
    }
    let instances = instances(&view);
    let instances = instances.iter().map(|instance| {
        let status = match instance.checks.iter().map(|check| check.status).max() {
            Some(Health::Critical) => "critical",
            Some(Health::Warning) => "warning",
            _ => "passing",
        };
        let Registered {
            service,
            node,
            id,
            address,
            port,
            tags,
            ..
        } = &**instance;
        format!("{service} {node} {id} {address} {port} {tags:?} {status}")
    });
    let nodes = nodes(&view);
    let nodes = nodes
        .iter()
        .map(|node| format!("{} {}", node.name, node.address));
    let loaded: BTreeSet<String> = instances.chain(nodes).collect();
    let registered = world.all();
    match (
        registered.difference(&loaded).next(),
        loaded.difference(&registered).next(),
    ) {
        (None, None) => Ok(()),
        (missing, surplus) => Err(format!("missing {missing:?}, surplus {surplus:?}")),
    }
}

/// Waits until a condition holds.
async fn until(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < TIMEOUT, "{what}: not within {TIMEOUT:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Resident memory of this process in bytes.
fn resident() -> usize {
    let text = fs::read_to_string("/proc/self/statm").unwrap();
    text.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<usize>()
        .unwrap()
        * 4096
}
