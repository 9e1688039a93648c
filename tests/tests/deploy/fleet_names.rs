//! The publisher's fleet names: addresses and health from a real server that checks real instances.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot set up its world has failed"
)]

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, SocketAddr},
    path::Path,
    process::Command,
    time::{Duration, Instant},
};
use test_support::free_address;

use dns_health::HEALTH_NAME;
use dns_publish::{config::Config, runner::Sources};
use hickory_proto::rr::RecordType;
use serde_json::json;
use whole_system_tests::{
    client, fleet,
    health::{Authority, Fleet, Says, instance, write_files},
    process::{Kept, wait_until},
    server::{self, Server},
};

/// Generous time limit for a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

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
            sources: Sources::new(&config).unwrap(),
            runtime: tokio::runtime::Runtime::new().unwrap(),
        }
    }

    /// Reads the sources; returns the published addresses and the current problem.
    fn read(&mut self) -> (BTreeSet<IpAddr>, Option<String>) {
        let state = self.runtime.block_on(self.sources.read());
        let records = &state.publication.targets["default/etcd"].desired.records;
        let targets = records.iter().flat_map(|record| &record.targets);
        let addresses = targets
            .map(|target| target.as_str().parse().unwrap())
            .collect();
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
        write_files(
            folder.path(),
            &authority.issue(HEALTH_NAME).unwrap(),
            &authority.certificate,
        )
        .unwrap()
    });
    let fleet = Fleet::start(&files[0]).unwrap();
    let folder = server::folder(
        &records(),
        Some(br#"{"router.cf.internal": ["q-s0.q-g1.bosh"]}"#),
    )
    .unwrap();
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
    wait_until("the control socket", LIMIT, || {
        publisher.read() == (all.clone(), None)
    })
    .unwrap();
    // A failed first check would begin a hold time early. An instance's second check begins after
    // the result of the first.
    wait_until("two checks of each instance", LIMIT, || {
        let hits = fleet.hits();
        all.iter()
            .all(|ip| hits.iter().filter(|hit| hit.ip == *ip).count() > 1)
    })
    .unwrap();
    // Reading the health again ends such a hold time.
    wait_until("health without problems", LIMIT, || {
        publisher.read() == (all.clone(), None)
    })
    .unwrap();

    let failed = Instant::now();
    fleet.says(instance(0), Says::state("failing"));
    wait_until("the withdrawal", LIMIT, || publisher.addresses().len() == 2).unwrap();
    assert!(
        failed.elapsed() >= HOLD,
        "withdrawn after {:?}",
        failed.elapsed()
    );
    assert!(!publisher.addresses().contains(&instance(0)));
    // A restarted process continues with the same hold time.
    assert_eq!(start().addresses().len(), 2);
    // Nor does a restarted server publish a dead address, although its check does not end: unchecked is no news.
    let rest = publisher.addresses();
    fleet.says(instance(0), Says::Nothing);
    server.restart(None).unwrap();
    wait_until("the restarted server", LIMIT, || {
        publisher.read() == (rest.clone(), None)
    })
    .unwrap();
    assert_eq!(start().read(), (rest, None), "nor do both");
    fleet.says(instance(0), Says::state("running"));
    server.restart(None).unwrap();
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
    wait_until("only the healthy one", LIMIT, || {
        publisher.addresses() == BTreeSet::from([instance(1)])
    })
    .unwrap();
    // Without valid records, the server's last ones remain in use.
    let length = server.log_length().unwrap();
    fs::write(path.join("records.json"), "{").unwrap();
    wait_until("the complaint", LIMIT, || {
        server.log_after(length).contains("records.json")
    })
    .unwrap();
    assert_eq!(publisher.read(), (BTreeSet::from([instance(1)]), None));
    fs::write(path.join("records.json"), records()).unwrap();
    // Without the alias there is no name; without targets, its published records stay.
    let held = ["router.example.org 0 A ", "router.example.org 0 AAAA "];
    let aliases = path.join("aliases/aliases.json");
    let alias = fs::read(&aliases).unwrap();
    fs::remove_file(&aliases).unwrap();
    wait_until("the end of the name", LIMIT, || publisher.wishes() == held).unwrap();
    fs::write(&aliases, alias).unwrap();
    let one = BTreeSet::from([instance(1)]);
    wait_until("the name again", LIMIT, || publisher.addresses() == one).unwrap();
    // Without the server, its last answers remain in use, and a new process changes no records.
    server.process().stop(LIMIT).unwrap();
    let (addresses, problem) = publisher.read();
    assert_eq!(addresses, one);
    assert!(problem.unwrap().contains("control.sock"));
    let mut publisher = start();
    assert_eq!(publisher.wishes(), held);
    assert!(publisher.read().1.unwrap().contains("control.sock"));
}

/// Sends a message of external-dns; returns the response if it was accepted.
fn post(webhook: SocketAddr, path: &str, message: &serde_json::Value) -> Option<Vec<u8>> {
    let header = "Content-Type: application/external.dns.webhook+json;version=1";
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--fail", "--header", header, "--data"])
        .arg(message.to_string());
    let output = curl
        .arg(format!("http://{webhook}{path}"))
        .output()
        .unwrap();
    output.status.success().then_some(output.stdout)
}

fn post_records(webhook: SocketAddr, changes: &serde_json::Value) -> bool {
    post(webhook, "/records", changes).is_some()
}

#[test]
fn names_of_external_dns_are_answered() {
    let folder = server::folder(
        &records(),
        Some(br#"{"router.cf.internal": ["q-s0.q-g1.bosh"]}"#),
    )
    .unwrap();
    let path = folder.path().to_owned();
    let extra =
        json!({"xdp": {"enabled": false}, "control": {"socket": path.join("control.sock")}});
    let server = Server::start(None, folder, free_address(), &extra).unwrap();
    let own = tempfile::tempdir().unwrap();
    let webhook = free_address();
    let config = json!({
        "documents": [], "store": own.path().join("store"),
        "control": {"socket": own.path().join("control.sock")},
        "server": path.join("config.json"),
        "webhook": {
            "address": webhook, "domains": ["apps.internal"],
            "alias_file": path.join("aliases/external-dns.json"),
        },
    });
    let file = own.path().join("publish.yml");
    fs::write(&file, config.to_string()).unwrap();
    let mut publisher = Command::new(server::companion("bosh-dns-publish").unwrap());
    let _publisher = Kept::spawn(publisher.arg("--config").arg(&file).arg("run")).unwrap();
    let set = |name: &str, record_type: &str, target: &str| json!({"dnsName": name, "recordType": record_type, "targets": [target]});
    let web = set("web.apps.internal", "A", "192.0.2.1");
    let created = json!({"create": [
        web, set("router.apps.internal", "CNAME", "router.cf.internal"), set("*.w.apps.internal", "A", "192.0.2.3"),
    ]});
    wait_until("the webhook", LIMIT, || post_records(webhook, &created)).unwrap();
    let answers = |name: &str| -> BTreeSet<IpAddr> {
        let query = client::query(name, RecordType::A, None).unwrap();
        client::ask(server.address, &query)
            .map(|reply| client::addresses(&reply))
            .unwrap_or_default()
            .into_iter()
            .collect()
    };
    let one = |text: &str| BTreeSet::from([text.parse::<IpAddr>().unwrap()]);
    wait_until("the name", LIMIT, || {
        answers("web.apps.internal.") == one("192.0.2.1")
    })
    .unwrap();
    assert_eq!(answers("x.w.apps.internal."), one("192.0.2.3"));
    assert_eq!(
        answers("router.apps.internal."),
        (0..3).map(instance).collect()
    );
    // Only names of the fleet may be the target of an alias.
    let foreign = set("lb.apps.internal", "CNAME", "lb.example.net");
    assert!(!post_records(webhook, &json!({"create": [foreign]})));
    let wanted = json!([
        web,
        foreign,
        set("r.apps.internal", "CNAME", "router.cf.internal")
    ]);
    let adjusted: serde_json::Value =
        serde_json::from_slice(&post(webhook, "/adjustendpoints", &wanted).unwrap()).unwrap();
    assert_eq!(adjusted, json!([wanted[0], wanted[2]]));
    let changed =
        json!({"updateOld": [web], "updateNew": [set("web.apps.internal", "A", "192.0.2.2")]});
    assert!(post_records(webhook, &changed));
    wait_until("the change", LIMIT, || {
        answers("web.apps.internal.") == one("192.0.2.2")
    })
    .unwrap();
    assert!(post_records(
        webhook,
        &json!({"delete": [set("web.apps.internal", "A", "192.0.2.2")]})
    ));
    wait_until("the deletion", LIMIT, || {
        answers("web.apps.internal.").is_empty()
    })
    .unwrap();
}
