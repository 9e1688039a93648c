//! The server with a live Consul agent: a strict double of its HTTP API.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use dns_kit::metrics::names;
use hickory_proto::{op::ResponseCode, rr::RecordType};
use serde_json::{Value, json};
use whole_system_tests::{
    client,
    metrics::{Metrics, wait_for_fast_path},
    namespace::Namespace,
    process::{capture, wait_until},
    requires,
    server::{self, Server},
};

use crate::{EVENTUALLY, OURS, doubles::world::World, start_double};

/// Listen address of the double.
const AGENT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8500);

#[test]
fn server_starts_without_consul() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("consul-live")?;
    let extra = json!({
        "xdp": {"mode": "off"},
        "consul": {"sources": {"http": {"addresses": [format!("http://{AGENT}")]}}},
    });
    let folder = server::folder(&server::records_of_groups(&[]), None)?;
    let server = Server::start(Some(&namespace), folder, OURS, &extra)?;
    let ask = |name: &str| -> Result<hickory_proto::op::Message> {
        let query = client::query(name, RecordType::A, None)?;
        namespace.run(|| client::ask(OURS, &query))?
    };
    let rcode = |name: &str| ask(name).map(|reply| reply.metadata.response_code);
    // Before the first sync, registrations are unknown, which is not NXDOMAIN.
    ensure!(
        rcode("service-1.service.consul.")? == ResponseCode::ServFail,
        "nothing is known yet"
    );
    let double = start_double(&namespace, AGENT, World::generated(5, 3))?;
    let answers = |name: &str, count: usize| {
        ask(name).is_ok_and(|reply| {
            reply.metadata.response_code == ResponseCode::NoError
                && client::addresses(&reply).len() == count
        })
    };
    wait_until("the catalog", EVENTUALLY, || {
        answers("service-1.service.consul.", 3)
    })?;
    ensure!(
        rcode("nobody.service.consul.")? == ResponseCode::NXDomain,
        "an unregistered service is known to be missing"
    );
    ensure!(answers("node-2.node.dc1.consul.", 1), "a node");
    // Changes that the list of services does not show: health, and one more instance.
    double.change(|world| world.set_status("service-1", 0, "critical"));
    wait_until("the health", EVENTUALLY, || {
        answers("service-1.service.consul.", 2)
    })?;
    double.change(|world| world.move_node("node-2", "10.99.99.99"));
    let moved = || {
        ask("node-2.node.consul.")
            .is_ok_and(|reply| client::addresses(&reply) == [IpAddr::from([10, 99, 99, 99])])
    };
    wait_until("the moved node", EVENTUALLY, moved)?;
    ensure!(
        double.tally().violations.is_empty(),
        "{:?}",
        double.tally().violations
    );
    // Consul is unreachable: the last known state is served.
    drop(double);
    server.wait_for_log("Consul does not answer")?;
    ensure!(
        answers("service-1.service.consul.", 2),
        "the last known state"
    );
    Ok(())
}

#[test]
fn revoked_token_is_reported() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("consul-token")?;
    let double = start_double(&namespace, AGENT, World::generated(2, 3))?;
    let folder = server::folder(&server::records_of_groups(&[]), None)?;
    let extra = json!({
        "xdp": {"mode": "off"},
        "control": {"socket": folder.path().join("control.sock")},
        "metrics": {"enabled": true},
        "consul": {"sources": {"http": {"addresses": [format!("http://{AGENT}")], "wait": "1s", "stale_after": "2s"}}},
    });
    let server = Server::start(Some(&namespace), folder, OURS, &extra)?;
    let query = client::query("service-1.service.consul.", RecordType::A, None)?;
    let answers = || {
        let reply = namespace.run(|| client::ask(OURS, &query));
        reply.is_ok_and(|reply| reply.is_ok_and(|reply| client::addresses(&reply).len() == 3))
    };
    let readyz = || -> Result<String> {
        let mut curl = namespace.command("curl")?;
        capture(curl.args(["-sS", "--max-time", "10", "http://127.0.0.1:53088/readyz"]))
    };
    wait_until("the catalog", EVENTUALLY, answers)?;
    let fresh = readyz()?;
    ensure!(!fresh.contains("requests fail"), "{fresh}");
    double.set_token("another");
    wait_until("the stale catalog to be reported", EVENTUALLY, || {
        readyz().is_ok_and(|ready| ready.contains("requests fail, their last results are served"))
    })
    .with_context(|| server.log())?;
    let ready = readyz()?;
    ensure!(ready.contains("403"), "{ready}");
    let config = server.folder.path().join("config.json");
    let mut command = namespace.command(server::program()?)?;
    // Its exit status depends on the checks.
    let status = command.args(["status", "--config"]).arg(config).output()?;
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    ensure!(
        status.contains("their last results are served") && status.contains("403"),
        "{status}"
    );
    ensure!(answers(), "the last known state");
    let is_up = |expected| {
        Metrics::read(&namespace).is_ok_and(|metrics| metrics.sum(names::CONSUL_UP, "") == expected)
    };
    // The lists of the catalog may fail later than the service above.
    wait_until("the catalog to be unconfirmed", EVENTUALLY, || is_up(0))?;
    server.wait_for_log("requests fail; their last results stay in use")?;
    double.forget_token();
    server.wait_for_log("all requests are answered again")?;
    wait_until("the catalog to be confirmed", EVENTUALLY, || is_up(1))
}

#[test]
fn refused_token_expires_the_catalog() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("consul-expire")?;
    let double = start_double(&namespace, AGENT, World::generated(2, 3))?;
    let folder = server::folder(&server::records_of_groups(&[]), None)?;
    let http = json!({"addresses": [format!("http://{AGENT}")], "stale_after": "1s", "expire_after": "3s"});
    let extra = json!({"xdp": {"mode": "off"}, "consul": {"sources": {"http": http}}});
    let server = Server::start(Some(&namespace), folder, OURS, &extra)?;
    let query = client::query("service-1.service.consul.", RecordType::A, None)?;
    let rcode = |wanted: ResponseCode| {
        let reply = namespace.run(|| client::ask(OURS, &query));
        reply.is_ok_and(|reply| reply.is_ok_and(|reply| reply.metadata.response_code == wanted))
    };
    wait_until("the catalog", EVENTUALLY, || rcode(ResponseCode::NoError))?;
    double.set_token("another");
    // Ends the blocking query of the service, whose next request is refused.
    double.change(|world| world.set_status("service-0", 0, "critical"));
    wait_until("the catalog to expire", EVENTUALLY, || {
        rcode(ResponseCode::ServFail)
    })
    .with_context(|| server.log())?;
    server.wait_for_log("the catalog has expired")?;
    double.forget_token();
    wait_until("the catalog to return", EVENTUALLY, || {
        rcode(ResponseCode::NoError)
    })
}

#[test]
fn live_queries_fail_over() -> Result<()> {
    requires!(namespaces);
    let namespace = Namespace::new("consul-failover")?;
    // The number of instances identifies the origin: 1 here, 2 in dc2, 4 in dc3, 3 of the peer.
    let double = start_double(&namespace, AGENT, World::generated(2, 1))?;
    double.change_other("dc2", |world| *world = World::generated(3, 2));
    double.change_other("dc3", |world| *world = World::generated(3, 4));
    double.change_other("peer:east", |world| *world = World::generated(4, 3));
    let query = |name: &str, service: &str, failover: Value| json!({"ID": name, "Name": name, "Service": {"Service": service, "Failover": failover}});
    let queries = json!([
        query("over", "service-2", json!({"Datacenters": ["dc2"]})),
        query(
            "nearest",
            "service-2",
            json!({"NearestN": 1, "Datacenters": ["dc2"]})
        ),
        query(
            "peer",
            "service-3",
            json!({"Targets": [{"Datacenter": "dc2"}, {"Peer": "east"}]})
        ),
    ]);
    double.set_list("/v1/query", queries);
    double.set_list(
        "/v1/query dc2",
        json!([query("there", "service-1", Value::Null)]),
    );
    double.set_list(
        "/v1/peerings",
        json!([{"Name": "east", "State": "ACTIVE", "StreamStatus": {"ImportedServices": ["service-3"]}}]),
    );
    let servers = |datacenter: &str, x: f64| {
        let coordinate =
            json!({"Node": "s", "Coord": {"Vec": [x], "Height": 0.0, "Adjustment": 0.0}});
        json!({"Datacenter": datacenter, "AreaID": "WAN", "Coordinates": [coordinate]})
    };
    let coordinates = json!([
        servers("dc1", 0.0),
        servers("dc2", 0.5),
        servers("dc3", 0.1)
    ]);
    double.set_list("/v1/coordinate/datacenters", coordinates);
    let extra = json!({
        "xdp": {"mode": "off"},
        "consul": {"sources": {"http": {"addresses": [format!("http://{AGENT}")]}}},
    });
    let folder = server::folder(&server::records_of_groups(&[]), None)?;
    let _server = Server::start(Some(&namespace), folder, OURS, &extra)?;
    let ask = |name: &str| -> Result<hickory_proto::op::Message> {
        let query = client::query(name, RecordType::A, Some(1232))?;
        namespace.run(|| client::ask(OURS, &query))?
    };
    for (name, count) in [
        ("over.query.consul.", 2),
        ("nearest.query.consul.", 4),
        ("peer.query.consul.", 3),
        ("there.query.dc2.consul.", 2),
        ("service-3.service.east.peer.consul.", 3),
        ("node-1.node.east.peer.consul.", 1),
    ] {
        let found = || ask(name).is_ok_and(|reply| client::addresses(&reply).len() == count);
        wait_until(name, EVENTUALLY, found).with_context(|| format!("{:?}", ask(name)))?;
    }
    for name in [
        "nobody.query.dc2.consul.",
        "service-3.service.dc2.consul.",
        "service-2.service.east.peer.consul.",
    ] {
        let rcode = ask(name)?.metadata.response_code;
        ensure!(rcode == ResponseCode::NXDomain, "{name}: {rcode}");
    }
    ensure!(
        double.tally().violations.is_empty(),
        "{:?}",
        double.tally().violations
    );
    Ok(())
}

#[test]
fn single_change_of_many_is_answered() -> Result<()> {
    const SERVICES: usize = if cfg!(debug_assertions) { 1000 } else { 5000 };
    requires!(namespaces);
    let namespace = Namespace::new("consul-large")?;
    let double = start_double(&namespace, AGENT, World::generated(SERVICES, 10))?;
    let http = json!({"addresses": [format!("http://{AGENT}")], "rate": 4000});
    let extra = json!({"xdp": {"mode": "off"}, "consul": {"sources": {"http": http}}});
    let folder = server::folder(&server::records_of_groups(&[]), None)?;
    let server = Server::start(Some(&namespace), folder, OURS, &extra)?;
    server.wait_for_log(&format!("{} instances", 10 * SERVICES))?;
    let query = client::query("service-0.service.consul.", RecordType::A, Some(4096))?;
    let count = || -> Result<usize> {
        Ok(client::addresses(&namespace.run(|| client::ask(OURS, &query))??).len())
    };
    wait_until("all instances", EVENTUALLY, || {
        count().is_ok_and(|count| count == 10)
    })?;
    wait_until("its watch", EVENTUALLY, || {
        double.waits_for("/v1/health/service/service-0")
    })?;
    let mut times = Vec::new();
    for round in 0..10 {
        let (status, wanted) = if round % 2 == 0 {
            ("critical", 9)
        } else {
            ("passing", 10)
        };
        double.change(|world| world.set_status("service-0", 0, status));
        let begun = Instant::now();
        wait_until("the change", EVENTUALLY, || {
            count().is_ok_and(|count| count == wanted)
        })?;
        times.push(begun.elapsed());
        // The watch retries after its own pause.
        std::thread::sleep(Duration::from_millis(300));
    }
    times.sort();
    let instances = 10 * SERVICES;
    println!(
        "{instances} instances: change to answer {:?} (median), {:?} (longest)",
        times[5], times[9]
    );
    Ok(())
}

#[test]
fn interface_answers_keep_watches() -> Result<()> {
    /// Number of services, with few connections for their watches.
    const SERVICES: usize = 3000;
    /// Services in use, each answered by the interface once a second.
    const HOT: usize = 5;
    /// Longer than the time after which a service without queries loses its watch (60 s).
    const USED: Duration = Duration::from_secs(70);
    requires!(namespaces, bpf);
    let namespace = Namespace::new("consul-hot")?;
    let double = start_double(&namespace, AGENT, World::generated(SERVICES, 2))?;
    let http = json!({"addresses": [format!("http://{AGENT}")], "max_connections": 20});
    let extra = json!({
        "xdp": {"mode": "tc", "interfaces": ["lo"]},
        "metrics": {"enabled": true},
        "consul": {"sources": {"http": http}},
    });
    let folder = server::folder(&server::records_of_groups(&[1]), None)?;
    let server = Server::start(Some(&namespace), folder, OURS, &extra)?;
    server.wait_for_log("6000 instances")?;
    wait_for_fast_path(&namespace).with_context(|| server.log())?;
    // The last ones get no watch without being used.
    let hot: Vec<String> = (SERVICES - HOT..SERVICES)
        .map(|number| format!("service-{number}"))
        .collect();
    let count = |service: &str| -> Result<usize> {
        let query = client::query(&format!("{service}.service.consul."), RecordType::A, None)?;
        Ok(client::addresses(&namespace.run(|| client::ask(OURS, &query))??).len())
    };
    let ask_all = || -> Result<()> {
        hot.iter().try_for_each(|service| {
            ensure!(count(service)? == 2, "{service}");
            Ok(())
        })
    };
    let replies = || Ok::<_, anyhow::Error>(Metrics::read(&namespace)?.fast_path_replies());
    // Published after the first rounds.
    for _ in 0..5 {
        ask_all()?;
        std::thread::sleep(Duration::from_secs(1));
    }
    let (begun, mut asked, before) = (Instant::now(), 0, replies()?);
    while begun.elapsed() < USED {
        ask_all()?;
        asked += HOT as u64;
        std::thread::sleep(Duration::from_secs(1));
    }
    let by_interface = replies()? - before;
    // One query a second and interface is a probe, answered in userspace.
    ensure!(
        by_interface >= asked / 2,
        "the interface answered {by_interface} of {asked} queries"
    );
    let mut times = Vec::new();
    for service in &hot {
        let watch = format!("/v1/health/service/{service}");
        // Between two requests, a watch pauses.
        wait_until("the watch", EVENTUALLY, || double.waits_for(&watch))
            .with_context(|| service.clone())?;
        double.change(|world| world.set_status(service, 0, "critical"));
        let begun = Instant::now();
        wait_until("the change", EVENTUALLY, || {
            count(service).is_ok_and(|count| count == 1)
        })?;
        times.push(begun.elapsed());
    }
    times.sort();
    println!(
        "{SERVICES} services over 20 connections, {by_interface} of {asked} queries answered by the interface: \
         change to answer {:?} (median), {:?} (longest)",
        times[HOT / 2],
        times[HOT - 1]
    );
    Ok(())
}
