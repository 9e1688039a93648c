//! Fleet names published by the packaged units: the publisher learns addresses and health through the server's control
//! socket, which the server opens for its group.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot use its machine has failed"
)]

use std::{
    collections::BTreeSet,
    fs,
    net::IpAddr,
    process::{Command, Stdio},
    time::Duration,
};

use dns_health::HEALTH_NAME;
use serde_json::{Value, json};
use whole_system_tests::{
    debian::Debian,
    fleet,
    health::{Authority, Fleet, Says, instance, write_files},
    process::{Kept, capture, wait_until},
    server,
};

use crate::packages::{FIRST, package};

/// Time limit that is reached only on failure.
const TIMEOUT: Duration = Duration::from_secs(120);

const DOCUMENTS: &str = "
apiVersion: bosh-dns-publish/v1
kind: DNSUpdateRecord
metadata: {name: etcd}
spec: {provider: coredns, external-dns-parameters: {interval: 1s}}
---
apiVersion: bosh-dns-publish/v1
kind: FleetName
metadata: {name: cf, labels: {dnsprovider: etcd}}
spec: {names: [{name: router.example.org, query: q-s0.q-g1.bosh, ttl: 60, hold: 1s}]}
";

const PUBLISHER: &str = "
documents: [/etc/bosh-dns-xdp/publish.d]
server: /etc/bosh-dns-xdp/config.json
provider_settings: {default/etcd: {etcd-urls: 'http://127.0.0.1:2379'}}
";

fn records() -> Vec<u8> {
    fleet::records(1, (0..3).map(|number| (1, instance(number))))
}

/// Returns the addresses in etcd's keys of the name.
fn published(machine: &Debian) -> BTreeSet<IpAddr> {
    let mut command = Command::new("etcdctl");
    command
        .env("ETCDCTL_API", "3")
        .args(["--endpoints", "127.0.0.1:2379"]);
    command.args([
        "get",
        "/skydns/org/example/router/",
        "--prefix",
        "--print-value-only",
    ]);
    let text = machine
        .in_network(|| capture(&mut command))
        .unwrap()
        .unwrap();
    let hosts = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    hosts
        .filter_map(|value| value["host"].as_str()?.parse().ok())
        .collect()
}

#[test]
fn packaged_publisher_learns_health() {
    let folder = tempfile::tempdir().unwrap();
    let Some(machine) = Debian::boot().unwrap() else {
        return;
    };
    let shared = machine.shared();
    fs::copy(
        package(FIRST, folder.path(), "bosh-dns-xdp"),
        shared.join("new.deb"),
    )
    .unwrap();
    let authority = Authority::new("ca").unwrap();
    let files = [folder.path().join("instances"), shared.join("tls")].map(|folder| {
        fs::create_dir(&folder).unwrap();
        write_files(
            &folder,
            &authority.issue(HEALTH_NAME).unwrap(),
            &authority.certificate,
        )
        .unwrap()
    });
    let fleet = machine
        .in_network(|| Fleet::start(&files[0]))
        .unwrap()
        .unwrap();
    let data = folder.path().join("etcd");
    let _etcd = machine
        .in_network(|| {
            let urls = ["http://127.0.0.1:2379", "http://127.0.0.1:2380"];
            let mut etcd = Command::new("etcd");
            etcd.arg("--data-dir").arg(&data).arg("--unsafe-no-fsync");
            etcd.args([
                "--listen-client-urls",
                urls[0],
                "--advertise-client-urls",
                urls[0],
            ]);
            etcd.args([
                "--listen-peer-urls",
                urls[1],
                "--initial-advertise-peer-urls",
                urls[1],
            ]);
            etcd.args(["--initial-cluster", &format!("default={}", urls[1])]);
            Kept::spawn(
                etcd.stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .stderr(Stdio::null()),
            )
        })
        .unwrap()
        .unwrap();

    machine.run("dpkg --install new.deb").unwrap();
    let configure = |control: Value| {
        let packaged = machine.run("cat /etc/bosh-dns-xdp/config.json").unwrap();
        let mut config: Value = serde_json::from_str(&packaged).unwrap();
        let health = json!({
            "enabled": true,
            "port": fleet.port,
            "certificate_file": "/shared/tls/certificate.pem",
            "private_key_file": "/shared/tls/key.pem",
            "ca_file": "/shared/tls/ca.pem",
            "check_interval": "200ms",
        });
        server::merge(
            &mut config,
            &json!({"health": health, "control": control, "xdp": {"enabled": false}}),
        );
        fs::write(shared.join("config.json"), config.to_string()).unwrap();
        machine
            .run("cp config.json /etc/bosh-dns-xdp/config.json")
            .unwrap();
        machine
            .run("systemctl restart bosh-dns-xdp")
            .unwrap_or_else(|error| panic!("{error}\n{}", machine.journal("bosh-dns-xdp")));
    };
    for (name, text) in [
        ("records.json", &records()[..]),
        ("cf.yml", DOCUMENTS.as_bytes()),
        ("publish.yml", PUBLISHER.as_bytes()),
    ] {
        fs::write(shared.join(name), text).unwrap();
    }
    // Health checks read the key.
    machine
        .run("chmod 644 tls/*; cp records.json /var/lib/bosh-dns-xdp")
        .unwrap();
    machine
        .run("cp cf.yml /etc/bosh-dns-xdp/publish.d; cp publish.yml /etc/bosh-dns-xdp")
        .unwrap();
    configure(json!({"group": "bosh-dns-control"}));
    wait_until("the server", TIMEOUT, || {
        machine.run("bosh-dns-xdp status").is_ok()
    })
    .unwrap();
    machine.run("systemctl start bosh-dns-publish").unwrap();
    let comes = |what: &str, expected: &BTreeSet<IpAddr>| {
        wait_until(what, TIMEOUT, || published(&machine) == *expected).unwrap_or_else(|error| {
            panic!(
                "{error}: {:?}\n{}",
                published(&machine),
                machine.journal("bosh-dns-publish")
            )
        });
    };
    let all: BTreeSet<IpAddr> = (0..3).map(instance).collect();
    comes("all addresses", &all);
    fleet.says(instance(0), Says::state("failing"));
    comes("the withdrawal", &(1..3).map(instance).collect());
    fleet.says(instance(0), Says::state("running"));
    comes("the return", &all);
    let journal = machine.journal("bosh-dns-publish");
    assert!(
        !journal.contains("the fleet's addresses and health are unknown"),
        "{journal}"
    );

    // Members of another group cannot use the socket: the publisher reports that, and publishes the known
    // data.
    configure(json!({"group": "bosh-dns-xdp"}));
    wait_until("the complaint", TIMEOUT, || {
        let journal = machine.journal("bosh-dns-publish");
        journal.contains("the fleet's addresses and health are unknown")
            && journal.contains("ermission denied")
    })
    .unwrap_or_else(|error| panic!("{error}\n{}", machine.journal("bosh-dns-publish")));
    assert_eq!(published(&machine), all);
}
