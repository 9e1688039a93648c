//! The publisher's fleet names: addresses from records.json, health from a real server that checks
//! real instances.

#![expect(clippy::unwrap_used, reason = "a test that cannot set up its world has failed")]

use std::{
    collections::BTreeSet,
    fs,
    net::IpAddr,
    path::Path,
    time::{Duration, Instant},
};
use test_support::free_address;

use dns_health::HEALTH_NAME;
use dns_publish::{config::Config, runner::Sources};
use serde_json::json;
use whole_system_tests::{
    fleet,
    health::{Authority, Fleet, Says, instance, write_files},
    process::wait_until,
    server::{self, Server},
};

/// Generous time limit for a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

const HOLD: Duration = Duration::from_secs(2);

const DOCUMENTS: &str = "
apiVersion: bosh-dns-publish/v1
kind: DNSUpdateRecord
metadata: {name: etcd}
spec: {provider: coredns}
---
apiVersion: bosh-dns-publish/v1
kind: FleetName
metadata: {name: cf, labels: {dnsprovider: etcd}}
spec: {names: [{name: router.example.org, alias: router.cf.internal, ttl: 60, hold: 2s}]}
";

/// The publisher's sources, polled repeatedly.
struct Publisher {
    sources: Sources,
    runtime: tokio::runtime::Runtime,
}

impl Publisher {
    /// Creates sources in `folder`, next to a server with the configuration `server`.
    fn new(folder: &Path, server: &Path) -> Self {
        fs::write(folder.join("documents.yml"), DOCUMENTS).unwrap();
        let config = Config {
            documents: vec![folder.join("documents.yml")],
            server: Some(server.to_owned()),
            store: folder.join("store"),
            ..Config::default()
        };
        Self {
            sources: Sources::new(&config, true).unwrap(),
            runtime: tokio::runtime::Runtime::new().unwrap(),
        }
    }

    /// Reads the sources; returns the published addresses and the current problem.
    fn read(&mut self) -> (BTreeSet<IpAddr>, Option<String>) {
        let state = self.runtime.block_on(self.sources.read());
        let records = &state.publication.targets["default/etcd"].desired.records;
        let targets = records.iter().flat_map(|record| &record.targets);
        let addresses = targets.map(|target| target.as_str().parse().unwrap()).collect();
        (addresses, state.fleet_problem)
    }

    fn wishes(&mut self) -> Vec<String> {
        let state = self.runtime.block_on(self.sources.read());
        let records = &state.publication.targets["default/etcd"].desired.records;
        records.iter().map(ToString::to_string).collect()
    }

    fn addresses(&mut self) -> BTreeSet<IpAddr> {
        self.read().0
    }
}

fn records() -> Vec<u8> {
    fleet::records(1, (0..3).map(|number| (1, instance(number))))
}

#[test]
fn server_health_decides_after_hold() {
    let authority = Authority::new("ca").unwrap();
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let files = folders.each_ref().map(|folder| {
        write_files(folder.path(), &authority.issue(HEALTH_NAME).unwrap(), &authority.certificate).unwrap()
    });
    let fleet = Fleet::start(&files[0]).unwrap();
    let folder = server::folder(&records(), Some(br#"{"router.cf.internal": ["q-s0.q-g1.bosh"]}"#)).unwrap();
    let path = folder.path().to_owned();
    let extra = json!({
        "health": {
            "enabled": true,
            "port": fleet.port,
            "certificate_file": files[1].certificate,
            "private_key_file": files[1].private_key,
            "ca_file": files[1].ca,
            "check_interval": "200ms",
        },
        "control": {"socket": path.join("control.sock")},
        "xdp": {"enabled": false},
        // On a busy machine a check may take long, which is not what this test calls ill.
        "request_timeout": "60s",
    });
    let mut server = Server::start(None, folder, free_address(), &extra).unwrap();
    let own = tempfile::tempdir().unwrap();
    let start = || Publisher::new(own.path(), &path.join("config.json"));
    let mut publisher = start();
    let all: BTreeSet<IpAddr> = (0..3).map(instance).collect();
    wait_until("the control socket", LIMIT, || publisher.read() == (all.clone(), None)).unwrap();
    // A failed first check would begin a hold time early. An instance's second check begins after
    // the result of the first.
    wait_until("two checks of each instance", LIMIT, || {
        let hits = fleet.hits();
        all.iter().all(|ip| hits.iter().filter(|hit| hit.ip == *ip).count() > 1)
    })
    .unwrap();
    // Reading the health again ends such a hold time.
    wait_until("health without problems", LIMIT, || publisher.read() == (all.clone(), None)).unwrap();

    let failed = Instant::now();
    fleet.says(instance(0), Says::state("failing"));
    wait_until("the withdrawal", LIMIT, || publisher.addresses().len() == 2).unwrap();
    assert!(failed.elapsed() >= HOLD, "withdrawn after {:?}", failed.elapsed());
    assert!(!publisher.addresses().contains(&instance(0)));
    // A restarted process continues with the same hold time.
    assert_eq!(start().addresses().len(), 2);
    fleet.says(instance(0), Says::state("running"));
    wait_until("the return", LIMIT, || publisher.addresses() == all).unwrap();

    for number in 0..3 {
        fleet.says(instance(number), Says::state("failing"));
    }
    // With one instance left, the others are withdrawn; without any, all of them return.
    let begin = Instant::now();
    wait_until("all addresses while none is healthy", LIMIT, || {
        let addresses = publisher.addresses();
        assert!(!addresses.is_empty());
        addresses == all && begin.elapsed() > HOLD * 3
    })
    .unwrap();

    fleet.says(instance(1), Says::state("running"));
    wait_until("only the healthy one", LIMIT, || publisher.addresses() == BTreeSet::from([instance(1)]))
        .unwrap();
    // Without the server, the last known health remains in use; without records, the last records.
    fs::write(path.join("records.json"), "{").unwrap();
    let (addresses, problem) = publisher.read();
    assert_eq!(addresses, BTreeSet::from([instance(1)]));
    assert!(problem.unwrap().contains("records.json"));
    fs::write(path.join("records.json"), records()).unwrap();
    server.process().stop(LIMIT).unwrap();
    let (addresses, problem) = publisher.read();
    assert_eq!(addresses, BTreeSet::from([instance(1)]));
    assert!(problem.unwrap().contains("control.sock"));
    // Removing the alias file removes the name; without targets, its published records stay.
    fs::remove_file(path.join("aliases/aliases.json")).unwrap();
    let (addresses, problem) = publisher.read();
    assert_eq!(addresses, BTreeSet::new());
    assert_eq!(publisher.wishes(), ["router.example.org 0 A ", "router.example.org 0 AAAA "]);
    assert!(problem.is_some());
}
