//! Consul's names in operator output: metrics, `tap`, `top`, `status`.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use dns_kit::metrics::names;
use hickory_proto::rr::RecordType;
use serde_json::{Value, json};
use whole_system_tests::{
    client,
    metrics::{Metrics, wait_for_fast_path},
    namespace::Namespace,
    process::{capture, wait_until},
    requires,
    server::{self, Server},
};

use crate::{
    EVENTUALLY, OURS,
    doubles::{double::Fault, world::World},
    start_double,
};

/// A name in the definition file.
const WEB: &str = "web.service.consul.";

#[test]
fn source_metrics_are_exposed() -> Result<()> {
    requires!(namespaces);
    let agent = SocketAddr::from((Ipv4Addr::LOCALHOST, 8500));
    let namespace = Namespace::new("consul-count")?;
    let extra = json!({
        "xdp": {"mode": "off"},
        "metrics": {"enabled": true},
        "consul": {"sources": {"http": {"addresses": [format!("http://{agent}")]}}},
    });
    let folder = server::folder(&server::records_of_groups(&[]), None)?;
    let _server = Server::start(Some(&namespace), folder, OURS, &extra)?;
    let sum = |family: &str, label: &str| -> Result<u64> {
        Ok(Metrics::read(&namespace)?.sum(family, label))
    };
    wait_until("the metrics", EVENTUALLY, || {
        sum(names::CONSUL_UP, "").is_ok()
    })?;
    ensure!(
        sum(names::CONSUL_UP, "")? == 0 && sum(names::CONSUL_INSTANCES, "")? == 0,
        "nobody is there"
    );
    let failed = || sum(names::CONSUL_REQUEST_FAILURES_TOTAL, "").is_ok_and(|count| count > 0);
    wait_until("a request that failed", EVENTUALLY, failed)?;

    let double = start_double(&namespace, agent, World::generated(5, 3))?;
    let is = |family: &str, label: &str, wanted: u64| {
        sum(family, label).is_ok_and(|found| found == wanted)
    };
    wait_until("the instances", EVENTUALLY, || {
        is(names::CONSUL_INSTANCES, "", 15)
    })?;
    wait_until("the watches", EVENTUALLY, || {
        is(names::CONSUL_SERVICES, "state=\"watched\"", 5)
    })?;
    ensure!(
        is(names::CONSUL_NODES, "", 3) && is(names::CONSUL_SERVICES, "state=\"known\"", 5),
        "the catalog"
    );
    wait_until("somebody who answers", EVENTUALLY, || {
        is(names::CONSUL_UP, "", 1)
    })?;
    ensure!(sum(names::CONSUL_CONNECTIONS, "")? > 0 && sum(names::CONSUL_REQUESTS_TOTAL, "")? > 0);
    ensure!(is(names::CONSUL_INDEX_RESETS_TOTAL, "", 0), "no index fell");
    double.restore();
    let fell = || sum(names::CONSUL_INDEX_RESETS_TOTAL, "").is_ok_and(|count| count > 0);
    wait_until("an index that fell", EVENTUALLY, fell)?;

    // A single error is counted but is not an outage.
    let before = sum(names::CONSUL_REQUEST_FAILURES_TOTAL, "")?;
    double.misbehave([Fault::NoLeader]);
    double.change(|world| world.set_status("service-1", 0, "critical"));
    let counted =
        || sum(names::CONSUL_REQUEST_FAILURES_TOTAL, "").is_ok_and(|count| count > before);
    wait_until("the error", EVENTUALLY, counted)?;
    drop(double);
    wait_until("the outage", EVENTUALLY, || is(names::CONSUL_UP, "", 0))?;
    ensure!(
        is(names::CONSUL_INSTANCES, "", 15),
        "the last known state is served"
    );
    Ok(())
}

#[test]
fn tap_shows_both_paths() -> Result<()> {
    requires!(namespaces, bpf);
    let namespace = Namespace::new("consul-tap")?;
    let folder = server::folder(&server::records_of_groups(&[1]), None)?;
    let definitions = folder.path().join("web.json");
    fs::write(
        &definitions,
        json!({"service": {"name": "web", "address": "10.0.0.1", "port": 80}}).to_string(),
    )?;
    let extra = json!({
        "control": {"socket": folder.path().join("control.sock")},
        "metrics": {"enabled": true},
        "xdp": {"mode": "tc", "interfaces": ["lo"]},
        "consul": {"node_name": "here", "advertise_addr": "10.0.0.9", "sources": {"files": [definitions]}},
    });
    let server = Server::start(Some(&namespace), folder, OURS, &extra)?;
    wait_for_fast_path(&namespace)?;
    let ask = |kind: RecordType| -> Result<()> {
        let query = client::query(WEB, kind, None)?;
        namespace.run(|| client::ask(OURS, &query))?.map(drop)
    };
    let operate = |arguments: &[&str]| -> Result<String> {
        let mut command = namespace.command(server::program()?)?;
        capture(
            command
                .args(arguments)
                .arg("--config")
                .arg(server.folder.path().join("config.json")),
        )
    };
    // Sends queries until the command has seen enough.
    let beside = |arguments: &[&str], kinds: &[RecordType]| -> Result<String> {
        thread::scope(|scope| {
            let command = scope.spawn(|| operate(arguments));
            while !command.is_finished() {
                kinds.iter().try_for_each(|&kind| ask(kind))?;
                thread::sleep(Duration::from_millis(20));
            }
            command
                .join()
                .map_err(|_| anyhow::anyhow!("the command panicked"))?
        })
    };
    // Only userspace knows whether DS belongs to the parent's servers.
    let rows = [
        ("fast", "hit", RecordType::A),
        ("fast", "hit_other", RecordType::SRV),
        ("userspace", "consul", RecordType::DS),
    ];
    for (path, outcome, kind) in rows {
        let arguments = [
            "tap",
            "--json",
            "--path",
            path,
            "--name",
            "web.service",
            "--count",
            "2",
            "--seconds",
            "60",
        ];
        let lines = beside(&arguments, &[kind])?;
        ensure!(lines.lines().count() == 2, "{lines}");
        for line in lines.lines() {
            let line: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
            ensure!(
                line["name"] == WEB
                    && line["path"] == path
                    && line["outcome"] == outcome
                    && line["type"] == kind.to_string(),
                "{line}"
            );
        }
    }
    let page = beside(
        &["top", "--json", "--seconds", "2"],
        &[RecordType::A, RecordType::SRV],
    )?;
    let page: Value = serde_json::from_str(&page)?;
    for (kind, path) in [("A", "fast"), ("SRV", "fast")] {
        let mut rows = page["names"].as_array().into_iter().flatten();
        let row = rows.find(|row| row["name"] == WEB && row["type"] == kind);
        ensure!(
            row.is_some_and(|row| row[path].as_i64().unwrap_or_default() > 0),
            "{kind}: {page}"
        );
    }
    let resolved = operate(&["resolve", "web.service.consul"])?;
    ensure!(
        resolved.contains("the interface (fast path) for addresses and SRV over UDP"),
        "{resolved}"
    );
    let listing: Value = serde_json::from_str(&operate(&["cache", "list", "--json"])?)?;
    let reply = &listing["local_replies"][0];
    ensure!(
        reply["name"] == WEB && reply["type"] == "SRV" && reply["denial"] == false,
        "{listing}"
    );
    let listing = operate(&["cache", "list", "--type", "SRV"])?;
    ensure!(
        listing
            .lines()
            .any(|line| line.contains(WEB) && line.contains("until a change")),
        "{listing}"
    );
    let lookup = operate(&["cache", "lookup", WEB])?;
    ensure!(
        lookup.contains("IN SRV: a local reply, answered by the interface"),
        "{lookup}"
    );
    wait_until("the status of other types", EVENTUALLY, || {
        let status = operate(&["status"]).unwrap_or_default();
        status.contains("Consul")
            && status.contains("consul.")
            && status.contains("; 1 of 2,048 other types;")
    })?;
    Ok(())
}
