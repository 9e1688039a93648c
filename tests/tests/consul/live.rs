//! The server with a live Consul agent: a strict double of its HTTP API.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};

use anyhow::{Result, ensure};
use hickory_proto::{op::ResponseCode, rr::RecordType};
use serde_json::json;
use whole_system_tests::{
    client,
    namespace::Namespace,
    process::wait_until,
    requires,
    server::{self, Server},
};

use crate::{
    EVENTUALLY, OURS,
    doubles::{
        double::{Double, Rules},
        world::World,
    },
};

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
    ensure!(rcode("service-1.service.consul.")? == ResponseCode::ServFail, "nothing is known yet");
    let listener = namespace.run(|| TcpListener::bind(AGENT))??;
    let double = Double::start(listener, World::generated(5, 3), Rules::default(), None)?;
    let answers = |name: &str, count: usize| {
        ask(name).is_ok_and(|reply| {
            reply.metadata.response_code == ResponseCode::NoError && client::addresses(&reply).len() == count
        })
    };
    wait_until("the catalog", EVENTUALLY, || answers("service-1.service.consul.", 3))?;
    ensure!(
        rcode("nobody.service.consul.")? == ResponseCode::NXDomain,
        "what is not registered is known, too"
    );
    ensure!(answers("node-2.node.dc1.consul.", 1), "a node");
    // Changes that the list of services does not show: health, and one more instance.
    double.change(|world| world.set_status("service-1", 0, "critical"));
    wait_until("the health", EVENTUALLY, || answers("service-1.service.consul.", 2))?;
    double.change(|world| world.move_node("node-2", "10.99.99.99"));
    let moved = || {
        ask("node-2.node.consul.")
            .is_ok_and(|reply| client::addresses(&reply) == [IpAddr::from([10, 99, 99, 99])])
    };
    wait_until("the moved node", EVENTUALLY, moved)?;
    ensure!(double.tally().violations.is_empty(), "{:?}", double.tally().violations);
    // Consul is unreachable: the last known state is served.
    drop(double);
    wait_until("the complaint", EVENTUALLY, || server.log().contains("Consul does not answer"))?;
    ensure!(answers("service-1.service.consul.", 2), "what was told last");
    Ok(())
}
