//! Health checks that cannot succeed because of the server's own certificates.

use std::{net::SocketAddr, process::Command, time::Duration};

use hickory_proto::rr::RecordType;
use serde_json::json;
use whole_system_tests::{
    client, fleet,
    health::{Fleet, instance},
    metrics::Metrics,
    namespace::Namespace,
    process::wait_until,
    requires,
    server::{self, Server},
};

use crate::pki::{Client, Pki};

const ADDRESS: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 53);

/// Returns the output of `/readyz` and `status` while checks run with these files.
fn said(client: Client) -> String {
    let pki = Pki::new(client);
    let fleet = Fleet::start(&pki.server).unwrap();
    let records = fleet::records(1, (0..3).map(|n| (1, instance(n))));
    let folder = server::folder(&records, None).unwrap();
    let settings = json!({
        "health": {
            "enabled": true, "port": fleet.port, "check_interval": "1s",
            "certificate_file": pki.client.certificate, "private_key_file": pki.client.private_key,
            "ca_file": pki.client.ca,
        },
        "control": {"socket": folder.path().join("control.sock")},
        "metrics": {"enabled": true}, "xdp": {"mode": "off"},
    });
    let server = Server::start(None, folder, ADDRESS, &settings).unwrap();
    let query = client::query("q-s0.q-g1.bosh.", RecordType::A, Some(1232)).unwrap();
    client::ask(ADDRESS, &query).unwrap();
    wait_until("the first checks", Duration::from_secs(120), || {
        let states = dns_kit::metrics::names::HEALTH_INSTANCES;
        Metrics::here().is_ok_and(|metrics| metrics.sum(states, "") == 3)
    })
    .unwrap();
    let status = Command::new(server::program().unwrap())
        .args(["status", "--config"])
        .arg(server.folder.path().join("config.json"))
        .output()
        .unwrap();
    let curl = [
        "-sS",
        "--max-time",
        "10",
        "-w",
        "%{http_code}",
        "http://127.0.0.1:53088/readyz",
    ];
    let ready = Command::new("curl").args(curl).output().unwrap();
    let blind = Metrics::here()
        .unwrap()
        .sum(dns_kit::metrics::names::HEALTH_BLIND, "");
    format!(
        "status {}: {}\nready: {}\nblind {blind}",
        status.status.code().unwrap(),
        String::from_utf8_lossy(&status.stdout),
        String::from_utf8_lossy(&ready.stdout),
    )
}

/// Runs [`said`] in a private network and checks that every output contains `cause`.
fn tells(label: &str, client: Client, cause: &str) {
    requires!(namespaces);
    let said = Namespace::new(label).unwrap().run(|| said(client)).unwrap();
    assert_eq!(said.matches(cause).count(), 2, "{cause}: {said}");
    assert!(
        said.contains("status 1: ") && said.contains("503\n") && said.ends_with("blind 1"),
        "{said}"
    );
}

#[test]
fn expired_client_certificate_is_reported() {
    tells("expired", Client::Expired, "own certificate has expired");
}

#[test]
fn future_client_certificate_is_reported() {
    tells(
        "future",
        Client::NotYetValid,
        "own certificate is not valid yet",
    );
}

#[test]
fn foreign_ca_is_reported() {
    tells(
        "otherca",
        Client::OtherCa,
        "no checked instance can be reached",
    );
}

#[test]
fn usable_certificates_are_no_problem() {
    requires!(namespaces);
    let said = Namespace::new("sight")
        .unwrap()
        .run(|| said(Client::Good))
        .unwrap();
    assert!(
        said.starts_with("status 0: ") && said.contains("200\n") && said.ends_with("blind 0"),
        "{said}"
    );
}
