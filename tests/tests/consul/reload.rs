//! Reloads of the `"consul"` object: reloadable settings and settings that need a restart.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use anyhow::{Result, ensure};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RecordType,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use whole_system_tests::{
    client,
    metrics::Metrics,
    namespace::Namespace,
    process::wait_until,
    requires,
    server::{self, Server},
};

use crate::{EVENTUALLY, OURS, doubles::world::World, start_double};

/// A server whose `"consul"` object changes.
struct Reloading {
    /// Ended before its namespace is removed.
    server: Server,
    namespace: Namespace,
}

impl Reloading {
    /// Starts the server with this object.
    fn start(label: &str, xdp: &Value, consul: &Value) -> Result<Self> {
        let namespace = Namespace::new(label)?;
        let folder = server::folder(&server::records_of_groups(&[]), None)?;
        let extra = json!({"xdp": xdp, "metrics": {"enabled": true}, "consul": consul});
        let server = Server::start(Some(&namespace), folder, OURS, &extra)?;
        Ok(Self { server, namespace })
    }

    /// Replaces the object in config.json (null removes it) and reloads.
    fn reload(&mut self, consul: &Value) -> Result<()> {
        reload(&mut self.server, consul)
    }

    /// Returns the reply for the A records of a name.
    fn ask(&self, name: &str) -> Result<Message> {
        let query = client::query(name, RecordType::A, None)?;
        self.namespace.run(|| client::ask(OURS, &query))?
    }

    /// Returns whether a name resolves to exactly this address with this TTL.
    fn says(&self, name: &str, address: [u8; 4], ttl: u32) -> bool {
        self.ask(name).is_ok_and(|reply| {
            client::addresses(&reply) == [IpAddr::from(address)]
                && reply.answers.iter().all(|record| record.ttl == ttl)
        })
    }

    /// Waits until the interface gives the same answer.
    fn until_the_interface_says(&self, name: &str, address: [u8; 4], ttl: u32) -> Result<()> {
        let fast =
            || Metrics::read(&self.namespace).map_or(0, |metrics| metrics.fast_path_replies());
        wait_until("the address, by the interface", EVENTUALLY, || {
            let before = fast();
            self.says(name, address, ttl) && fast() > before
        })
    }
}

/// Replaces the object `"consul"` in config.json (null removes it) and reloads; then the interfaces answer from the new
/// state.
pub(crate) fn reload(server: &mut Server, consul: &Value) -> Result<()> {
    server.change_settings(|settings| match (consul, settings.as_object_mut()) {
        (Value::Null, Some(settings)) => drop(settings.remove("consul")),
        (consul, _) => settings["consul"] = consul.clone(),
    })?;
    let before = server.log_length()?;
    server.process().signal(Signal::SIGHUP)?;
    let done = || server.log_after(before).contains("reload finished");
    wait_until("the reload", EVENTUALLY, done)
}

/// Returns a definition file with one service.
fn definition(address: &str) -> String {
    json!({"service": {"name": "web", "address": address}}).to_string()
}

#[test]
fn reload_changes_consul_answers() -> Result<()> {
    requires!(namespaces, bpf);
    let definitions = tempfile::TempDir::with_prefix("bdx-")?;
    let [first, second] = ["first.json", "second.json"].map(|name| definitions.path().join(name));
    fs::write(&first, definition("10.0.0.1"))?;
    fs::write(&second, definition("10.0.0.2"))?;
    let object = |domain: &str, ttl: &str, file: &std::path::Path| {
        json!({
            "domain": domain, "node_name": "here", "advertise_addr": "10.0.0.9",
            "dns_config": {"service_ttl": {"*": ttl}}, "sources": {"files": [file]},
        })
    };
    let xdp = json!({"mode": "tc", "interfaces": ["lo"]});
    let before = object("consul", "5s", &first);
    let mut running = Reloading::start("consul-hup", &xdp, &before)?;
    running.until_the_interface_says("web.service.consul.", [10, 0, 0, 1], 5)?;

    // Other files and another TTL: old answers disappear from both paths.
    running.reload(&object("consul", "9s", &second))?;
    ensure!(
        running.says("web.service.consul.", [10, 0, 0, 2], 9),
        "another file, another TTL"
    );
    running.until_the_interface_says("web.service.consul.", [10, 0, 0, 2], 9)?;

    // Another domain: names in the previous domain are no longer Consul's.
    running.reload(&object("corp", "9s", &second))?;
    ensure!(
        running.says("web.service.corp.", [10, 0, 0, 2], 9),
        "the new domain"
    );
    running.until_the_interface_says("web.service.corp.", [10, 0, 0, 2], 9)?;
    let rcode = running.ask("web.service.consul.")?.metadata.response_code;
    ensure!(rcode == ResponseCode::Refused, "the domain before: {rcode}");

    // An unreadable object changes nothing and is reported.
    running.reload(&json!({"domain": 5}))?;
    running
        .server
        .wait_for_log("the current configuration stays in use")?;
    ensure!(
        running.says("web.service.corp.", [10, 0, 0, 2], 9),
        "the object in use stays"
    );
    // Removing the object changes nothing before a restart either.
    running.reload(&Value::Null)?;
    running
        .server
        .wait_for_log("takes effect only after a restart: the current one stays in use")?;
    ensure!(
        running.says("web.service.corp.", [10, 0, 0, 2], 9),
        "the object in use stays"
    );
    // And back to the first object.
    running.reload(&before)?;
    ensure!(
        running.says("web.service.consul.", [10, 0, 0, 1], 5),
        "back again"
    );
    Ok(())
}

#[test]
fn reload_switches_consul_address() -> Result<()> {
    requires!(namespaces);
    let agent = |port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let object = |port: u16| json!({"sources": {"http": {"addresses": [format!("http://{}", agent(port))]}}});
    let mut running = Reloading::start("consul-turn", &json!({"mode": "off"}), &object(8500))?;
    let start_double = |running: &Reloading, port: u16, instances: usize| {
        let world = World::generated(5, instances);
        start_double(&running.namespace, agent(port), world)
    };
    let count = |running: &Reloading| {
        running
            .ask("service-1.service.consul.")
            .map_or(0, |reply| client::addresses(&reply).len())
    };
    let first = start_double(&running, 8500, 3)?;
    wait_until("the first catalog", EVENTUALLY, || count(&running) == 3)?;

    // The new address is unreachable: the last known state of the first Consul is served.
    running.reload(&object(8501))?;
    ensure!(
        count(&running) == 3,
        "the last known state stays until a better one arrives"
    );
    let second = start_double(&running, 8501, 2)?;
    wait_until("the second catalog", EVENTUALLY, || count(&running) == 2)?;
    let asked = first.tally().requests;
    second.change(|world| world.set_status("service-1", 0, "critical"));
    wait_until("the second one's health", EVENTUALLY, || {
        count(&running) == 1
    })?;
    ensure!(
        first.tally().requests == asked,
        "the first one is no longer queried"
    );

    // Another datacenter needs a restart, because no part of the catalog would apply.
    let mut elsewhere = object(8500);
    elsewhere["datacenter"] = json!("elsewhere");
    running.reload(&elsewhere)?;
    running
        .server
        .wait_for_log("consul.datacenter changed, which takes effect only after a restart")?;
    ensure!(count(&running) == 1, "the object in use stays");

    // An object without an agent's address: the catalog is dropped.
    running.reload(&json!({}))?;
    let rcode = running
        .ask("service-1.service.consul.")?
        .metadata
        .response_code;
    ensure!(rcode == ResponseCode::NXDomain, "without a source: {rcode}");
    running.reload(&object(8501))?;
    wait_until("the second catalog again", EVENTUALLY, || {
        count(&running) == 1
    })?;
    for double in [first, second] {
        ensure!(
            double.tally().violations.is_empty(),
            "{:?}",
            double.tally().violations
        );
    }
    Ok(())
}
