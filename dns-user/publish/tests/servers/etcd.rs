//! Publishing to CoreDNS's keys in a real etcd.

use std::{net::SocketAddr, path::Path, process::Command, time::Instant};
use test_support::free_address;

use dns_publish::{
    engine::{Engine, Report},
    ownership::Registry,
    plan::{Desired, PlanRules},
    provider::{
        OnConflict, Parameters,
        coredns::{CoreDns, CoreDnsSettings},
    },
    record::{Record, RecordType},
};
use serde_json::Value;
use tempfile::TempDir;

use crate::{
    name_server::{names, quiet, record, wish},
    process::{Server, run},
};

/// A running etcd of one member.
pub(crate) struct Etcd {
    pub(crate) url: String,
    address: SocketAddr,
    peer: SocketAddr,
    folder: TempDir,
    /// Files of the server's certificate and key.
    tls: Option<(String, String)>,
    process: Option<Server>,
}

impl Etcd {
    pub(crate) fn start(tls: Option<(String, String)>) -> Self {
        let (address, peer) = (free_address(), free_address());
        let scheme = if tls.is_some() { "https" } else { "http" };
        let url = format!("{scheme}://localhost:{}", address.port());
        let folder = tempfile::tempdir().unwrap();
        let mut etcd = Self {
            url,
            address,
            peer,
            folder,
            tls,
            process: None,
        };
        etcd.restart();
        etcd
    }

    fn restart(&mut self) {
        self.process = None;
        let peer = format!("http://{}", self.peer);
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let client = format!("{scheme}://{}", self.address);
        let data = self.folder.path().join("data").display().to_string();
        let mut command = Command::new("etcd");
        command.args([
            "--data-dir",
            &data,
            "--listen-client-urls",
            &client,
            "--advertise-client-urls",
            &client,
        ]);
        command.args([
            "--listen-peer-urls",
            &peer,
            "--initial-advertise-peer-urls",
            &peer,
        ]);
        command.args([
            "--initial-cluster",
            &format!("default={peer}"),
            "--unsafe-no-fsync",
        ]);
        if let Some((certificate, key)) = &self.tls {
            command.args(["--cert-file", certificate, "--key-file", key]);
        }
        self.process = Some(Server::start(
            &mut command,
            &self.folder.path().join("log"),
            self.address,
        ));
    }

    fn parameters(&self) -> Parameters {
        Parameters([("etcd-urls".to_owned(), self.url.clone())].into())
    }

    fn engine(&self) -> Engine {
        engine(&self.parameters())
    }

    /// Runs etcdctl and returns its output.
    pub(crate) fn ctl(&self, arguments: &[&str]) -> String {
        let mut command = Command::new("etcdctl");
        command
            .env("ETCDCTL_API", "3")
            .args(PATIENT)
            .args(["--endpoints", &self.address.to_string()]);
        command.args(arguments);
        run(&mut command, "")
    }

    pub(crate) fn keys(&self) -> Vec<String> {
        let output = self.ctl(&["get", "/", "--prefix", "--keys-only"]);
        output
            .lines()
            .filter(|line| !line.is_empty())
            .map(str::to_owned)
            .collect()
    }
}

/// Options of etcdctl for a server that listens before it is ready.
const PATIENT: [&str; 4] = ["--dial-timeout", "60s", "--command-timeout", "60s"];

fn engine(parameters: &Parameters) -> Engine {
    let provider = CoreDns::new(CoreDnsSettings::from_parameters(parameters).unwrap()).unwrap();
    Engine::new(Box::new(provider), Registry::default(), PlanRules::of("me"))
}

async fn publish(engine: &mut Engine, desired: &Desired) -> Report {
    let report = engine.reconcile(desired, None, &quiet).await.unwrap();
    assert!(report.is_complete(), "{report:?}");
    report
}

#[tokio::test]
async fn etcd_takes_ten_thousand_names() {
    let etcd = Etcd::start(None);
    let mut engine = etcd.engine();
    let desired = names(10_000);
    let begin = Instant::now();
    assert_eq!(publish(&mut engine, &desired).await.applied(), 10_000);
    let first = begin.elapsed();
    let begin = Instant::now();
    assert_eq!(publish(&mut engine, &desired).await.applied(), 0);
    println!(
        "etcd: 10000 names {first:.2?}, nothing to do {:.2?}",
        begin.elapsed()
    );
    assert_eq!(etcd.keys().len(), 20_000);
}

#[tokio::test]
async fn keys_and_values_follow_skydns() {
    let etcd = Etcd::start(None);
    let mut engine = etcd.engine();
    engine
        .rules
        .managed
        .extend([RecordType::PTR, RecordType::TXT]);
    let mut api = record("api.example.org", RecordType::A, "192.0.2.1");
    api.targets
        .extend(record("x.example.org", RecordType::A, "192.0.2.2").targets);
    api.properties
        .insert("coredns/group".to_owned(), "g1".to_owned());
    let both = [
        api,
        record("api.example.org", RecordType::AAAA, "2001:db8::1"),
        record("1.2.0.192.in-addr.arpa", RecordType::PTR, "api.example.org"),
        record("t.example.org", RecordType::TXT, "hello"),
    ];
    publish(&mut engine, &wish(both.clone())).await;
    let keys = etcd.keys();
    let below = |directory: &str| keys.iter().filter(|key| key.starts_with(directory)).count();
    assert_eq!(below("/skydns/org/example/api/"), 3);
    assert_eq!(below("/skydns/org/example/a-api/"), 1);
    assert!(
        keys.contains(&"/skydns/arpa/in-addr/192/0/2/1".to_owned()),
        "{keys:?}"
    );
    let values = etcd.ctl(&[
        "get",
        "/skydns/org/example/",
        "--prefix",
        "--print-value-only",
    ]);
    assert!(
        values.contains(r#"{"host":"192.0.2.1","ttl":1,"targetstrip":1,"group":"g1"}"#),
        "{values}"
    );
    assert!(
        values.contains(r#""text":"\"heritage=external-dns,external-dns/owner=me\"""#),
        "{values}"
    );
    // A name has separate sets for A and AAAA.
    assert_eq!(publish(&mut engine, &wish(both)).await.applied(), 0);
}

#[tokio::test]
async fn slash_in_a_label_is_refused() {
    let etcd = Etcd::start(None);
    // The key of a/b.example.org would be the one of b.a.example.org.
    etcd.ctl(&["put", "/skydns/org/example/a/b", r#"{"host":"192.0.2.77"}"#]);
    let mut engine = etcd.engine();
    let mut desired = names(2);
    desired
        .records
        .push(record("a/b.example.org", RecordType::A, "192.0.2.1"));
    for applied in [2, 0, 0] {
        let report = engine.reconcile(&desired, None, &quiet).await.unwrap();
        assert_eq!(report.applied(), applied, "{report:?}");
        let [(name, reason)] = &report.zones[0].failures[..] else {
            panic!("{report:?}")
        };
        assert_eq!(name.as_str(), "a/b.example.org");
        assert!(
            reason.to_string().contains("a slash within a label"),
            "{reason}"
        );
        assert_eq!(
            etcd.keys().len(),
            5,
            "two names with their owner records, and the foreign key"
        );
    }
}

#[tokio::test]
async fn stale_revision_is_refused() {
    let etcd = Etcd::start(None);
    let mut engine = etcd.engine();
    publish(
        &mut engine,
        &wish([record("api.example.org", RecordType::A, "192.0.2.1")]),
    )
    .await;
    let wanted = wish([record("api.example.org", RecordType::A, "192.0.2.2")]);
    for change in ["added", "changed", "deleted"] {
        let listing = engine.list().await.unwrap();
        let planned = engine.plan(&listing, &wanted);
        let key = etcd
            .keys()
            .into_iter()
            .find(|key| key.starts_with("/skydns/org/example/api/"))
            .unwrap();
        match change {
            "added" => etcd.ctl(&[
                "put",
                "/skydns/org/example/api/hand",
                r#"{"host":"192.0.2.9","targetstrip":1}"#,
            ]),
            "changed" => etcd.ctl(&["put", &key, r#"{"host":"192.0.2.8","targetstrip":1}"#]),
            _ => etcd.ctl(&["del", &key]),
        };
        let before = etcd.keys();
        let report = engine
            .apply(&listing, &planned, None, OnConflict::ListAgain, &quiet)
            .await;
        assert_eq!(
            (report.applied(), report.zones[0].conflicts),
            (0, 1),
            "{change}"
        );
        assert_eq!(etcd.keys(), before);
    }
    publish(&mut engine, &wanted).await;
    let values = etcd.ctl(&[
        "get",
        "/skydns/org/example/api/",
        "--prefix",
        "--print-value-only",
    ]);
    assert_eq!(
        values.lines().filter(|line| !line.is_empty()).count(),
        1,
        "{values}"
    );
}

#[tokio::test]
async fn siblings_and_foreign_values_stay() {
    let etcd = Etcd::start(None);
    let foreign = [
        (
            "/skydns/org/example/api2/11111111",
            r#"{"host":"192.0.2.7","targetstrip":1}"#,
        ),
        (
            "/skydns/org/example/api-x/1",
            r#"{"host":"192.0.2.6","targetstrip":1}"#,
        ),
        ("/skydns/org/example/x", "not json"),
        ("/skydns/org/example/number", "17"),
        ("/skydns2/org/example/api/1", r#"{"host":"192.0.2.5"}"#),
    ];
    for (key, value) in foreign {
        etcd.ctl(&["put", key, value]);
    }
    let mut engine = etcd.engine();
    let report = publish(
        &mut engine,
        &wish([record("api.example.org", RecordType::A, "192.0.2.1")]),
    )
    .await;
    assert_eq!(
        report.zones[0].warnings.len(),
        2,
        "{:?}",
        report.zones[0].warnings
    );
    let other = wish([record("other.example.org", RecordType::A, "192.0.2.1")]);
    publish(&mut engine, &other).await;
    assert!(
        !etcd
            .keys()
            .iter()
            .any(|key| key.starts_with("/skydns/org/example/api/"))
    );
    for (key, value) in foreign {
        assert_eq!(etcd.ctl(&["get", key, "--print-value-only"]).trim(), value);
    }
}

#[tokio::test]
async fn racing_publishers_to_etcd_agree() {
    let etcd = Etcd::start(None);
    let mut desired = names(1_000);
    // Names above others share their keys' ranges.
    desired
        .records
        .push(record("example.org", RecordType::A, "192.0.2.1"));
    let (mut one, mut other) = (etcd.engine(), etcd.engine());
    let (first, second) = tokio::join!(
        one.reconcile(&desired, None, &quiet),
        other.reconcile(&desired, None, &quiet)
    );
    let (first, second) = (first.unwrap(), second.unwrap());
    assert!(
        first.is_complete() && second.is_complete(),
        "{first:?} {second:?}"
    );
    assert_eq!(
        etcd.keys().len(),
        2_002,
        "every record and owner record exists once"
    );
    assert_eq!(publish(&mut one, &desired).await.applied(), 0);
    assert_eq!(publish(&mut other, &desired).await.applied(), 0);
}

#[tokio::test]
async fn restart_and_compaction_are_survived() {
    let mut etcd = Etcd::start(None);
    let mut engine = etcd.engine();
    publish(&mut engine, &names(50)).await;
    let output = etcd.ctl(&["get", "/none", "--write-out", "json"]);
    let header: Value = serde_json::from_str(&output).unwrap();
    etcd.ctl(&["compact", &header["header"]["revision"].to_string()]);
    assert_eq!(publish(&mut engine, &names(55)).await.applied(), 5);
    etcd.restart();
    assert_eq!(publish(&mut engine, &names(60)).await.applied(), 5);
    etcd.process = None;
    let error = engine
        .reconcile(&names(61), None, &quiet)
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("localhost"), "{error}");
}

#[tokio::test]
async fn user_and_tls_are_required() {
    let folder = tempfile::tempdir().unwrap();
    let files = certificate(folder.path());
    let etcd = Etcd::start(Some(files.clone()));
    let ca = files.0.as_str();
    let ctl = |arguments: &[&str]| {
        let tls = ["--cacert", ca, "--endpoints", &etcd.url];
        run(
            Command::new("etcdctl")
                .env("ETCDCTL_API", "3")
                .args(PATIENT)
                .args(tls)
                .args(arguments),
            "",
        )
    };
    ctl(&["user", "add", "root:secret"]);
    ctl(&["user", "grant-role", "root", "root"]);
    ctl(&["auth", "enable"]);

    let mut parameters = etcd.parameters();
    let untrusted = engine(&parameters).list().await.err().unwrap().to_string();
    assert!(untrusted.contains("certificate"), "{untrusted}");
    parameters.0.insert("tls-ca".to_owned(), files.0.clone());
    let anonymous = engine(&parameters).list().await.err().unwrap().to_string();
    assert!(anonymous.contains("etcd-username"), "{anonymous}");
    parameters
        .0
        .insert("etcd-username".to_owned(), "root".to_owned());
    parameters
        .0
        .insert("etcd-password".to_owned(), "wrong".to_owned());
    let refused = engine(&parameters).list().await.err().unwrap().to_string();
    assert!(refused.contains("authentication failed"), "{refused}");
    parameters
        .0
        .insert("etcd-password".to_owned(), "secret".to_owned());
    assert_eq!(
        publish(&mut engine(&parameters), &names(3)).await.applied(),
        3
    );
}

#[tokio::test]
async fn replaced_certificate_is_trusted() {
    let folder = tempfile::tempdir().unwrap();
    let files = certificate(folder.path());
    let mut etcd = Etcd::start(Some(files.clone()));
    let mut parameters = etcd.parameters();
    parameters.0.insert("tls-ca".to_owned(), files.0);
    let mut engine = engine(&parameters);
    assert_eq!(publish(&mut engine, &names(1)).await.applied(), 1);
    // Other ones under the same names, as a rotation leaves them.
    certificate(folder.path());
    etcd.restart();
    assert_eq!(publish(&mut engine, &names(2)).await.applied(), 1);
}

#[tokio::test]
async fn strict_owner_hides_foreign_keys() {
    let etcd = Etcd::start(None);
    etcd.ctl(&[
        "put",
        "/skydns/org/example/theirs/1",
        r#"{"host":"192.0.2.7","targetstrip":1,"owner":"you"}"#,
    ]);
    let mut parameters = etcd.parameters();
    parameters
        .0
        .insert("coredns-strictly-owned".to_owned(), "true".to_owned());
    parameters
        .0
        .insert("txt-owner-id".to_owned(), "me".to_owned());
    let mut engine = engine(&parameters);
    publish(&mut engine, &names(1)).await;
    let listing = engine.list().await.unwrap();
    let listed: Vec<&Record> = listing[0]
        .content
        .as_ref()
        .unwrap()
        .records
        .iter()
        .collect();
    assert_eq!(listed.len(), 1, "{listed:?}");
    let values = etcd.ctl(&[
        "get",
        "/skydns/org/example/n0/",
        "--prefix",
        "--print-value-only",
    ]);
    assert!(values.contains(r#""owner":"me""#), "{values}");
}

/// Writes a certificate for localhost and its key; returns their paths.
fn certificate(folder: &Path) -> (String, String) {
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (certificate, key) = (folder.join("cert.pem"), folder.join("key.pem"));
    std::fs::write(&certificate, certified.cert.pem()).unwrap();
    std::fs::write(&key, certified.signing_key.serialize_pem()).unwrap();
    (certificate.display().to_string(), key.display().to_string())
}

/// Returns a key with its random label replaced.
fn without_random(key: &str) -> String {
    let (head, last) = key.rsplit_once('/').unwrap();
    let is_random = last.len() == 8 && last.bytes().all(|octet| octet.is_ascii_hexdigit());
    if is_random {
        format!("{head}/<8 hex>")
    } else {
        key.to_owned()
    }
}

/// Parses `name ttl type target,target [coredns/group=...]`.
fn record_of(line: &str) -> Record {
    let (line, group) = line
        .split_once(" coredns/group=")
        .map_or((line, None), |(line, group)| (line, Some(group)));
    let words: Vec<&str> = line.splitn(4, ' ').collect();
    let record_type: RecordType = words[2].parse().unwrap();
    let targets = if record_type == RecordType::TXT {
        vec![words[3]]
    } else {
        words[3].split(',').collect()
    };
    let mut record = Record::parse(words[0], record_type, targets).unwrap();
    record.ttl = Some(words[1].parse().unwrap()).filter(|ttl| *ttl > 0);
    record
        .properties
        .extend(group.map(|group| ("coredns/group".to_owned(), group.to_owned())));
    record
}

#[tokio::test]
async fn keys_match_cases() {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cases");
    let folder = std::env::var("BOSH_DNS_EXTERNAL_CASES").unwrap_or_else(|_| default.to_owned());
    let file = std::fs::read_to_string(format!("{folder}/coredns_cases.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&file).unwrap();
    let etcd = Etcd::start(None);
    for case in &cases {
        let Some(keys) = case["keys"].as_object() else {
            println!(
                "{}: skipped, because it describes calls, not keys",
                case["id"]
            );
            continue;
        };
        let lines = |list: &Value| -> Vec<Record> {
            list.as_array()
                .into_iter()
                .flatten()
                .map(|line| record_of(line.as_str().unwrap()))
                .collect()
        };
        etcd.ctl(&["del", "/", "--prefix"]);
        let mut parameters = etcd.parameters();
        let prefix = case["prefix"].as_str().unwrap_or("/skydns/");
        parameters
            .0
            .insert("coredns-prefix".to_owned(), prefix.to_owned());
        if case["options"]["strictly_owned"] == true {
            parameters
                .0
                .insert("coredns-strictly-owned".to_owned(), "true".to_owned());
            parameters
                .0
                .insert("txt-owner-id".to_owned(), "me".to_owned());
        }
        let mut engine = engine(&parameters);
        // The cases contain owner records as plain records.
        engine.rules.owner = String::new();
        engine
            .rules
            .managed
            .extend([RecordType::PTR, RecordType::TXT]);
        let id = &case["id"];
        if case["records"].is_array() {
            publish(&mut engine, &wish(lines(&case["records"]))).await;
            let pairs = |text: &Value| text.to_string();
            let mut expected: Vec<(String, String)> = keys
                .iter()
                .map(|(key, value)| {
                    (
                        key.replace("<8 hex a>", "<8 hex>")
                            .replace("<8 hex b>", "<8 hex>"),
                        pairs(value),
                    )
                })
                .collect();
            let mut found: Vec<(String, String)> = Vec::new();
            for key in etcd.keys() {
                let value = etcd.ctl(&["get", &key, "--print-value-only"]);
                found.push((
                    without_random(&key),
                    pairs(&serde_json::from_str(&value).unwrap()),
                ));
            }
            expected.sort();
            found.sort();
            assert_eq!(found, expected, "{id}");
        } else {
            for (key, value) in keys {
                let text = value
                    .as_str()
                    .map_or_else(|| value.to_string(), str::to_owned);
                etcd.ctl(&["put", key, &text]);
            }
            let listing = engine.list().await.unwrap();
            let lists = [&case["ours"], &case["reads"], &case["theirs"]];
            let expected = lists
                .into_iter()
                .find(|list| list.is_array())
                .map(lines)
                .unwrap_or_default();
            let found = listing[0].content.as_ref().unwrap().records.clone();
            assert_eq!(found, expected, "{id}");
        }
    }
}
