//! Several publishers, owners and writers in one zone.

use std::{
    collections::BTreeMap,
    thread,
    time::{Duration, Instant},
};

use dns_publish::{
    engine::Engine,
    plan::{Desired, PlanRules, Reason},
    record::{Record, RecordType},
};
use serde_json::json;

use crate::{
    name_server::{NameServer, Options, Program, engine, names, quiet, record, wish},
    publisher::{Publisher, Running, update_record},
};

fn has(server: &NameServer, text: &str) -> bool {
    server.transfer("example.org").contains(text)
}

/// Writes a second DNS Update Record for the same zone, with further parameters, and its document.
fn second(publisher: &Publisher, server: &NameServer, more: &serde_json::Value) {
    let mut other = update_record(server);
    other["apiVersion"] = "bosh-dns-publish/v1".into();
    other["kind"] = "DNSUpdateRecord".into();
    other["metadata"]["name"] = "other".into();
    let parameters = other["spec"]["external-dns-parameters"]
        .as_object_mut()
        .unwrap();
    parameters.extend(more.as_object().unwrap().clone());
    publisher.write("documents/other.json", &other.to_string());
    let endpoint = json!({
        "apiVersion": "externaldns.k8s.io/v1alpha1",
        "kind": "DNSEndpoint",
        "metadata": {"name": "others", "labels": {"dnsprovider": "other"}},
        "spec": {"endpoints": [{"dnsName": "b.example.org", "recordTTL": 60, "targets": ["192.0.2.2"]}]},
    });
    publisher.write("documents/others.json", &endpoint.to_string());
}

#[test]
fn equal_owner_in_one_zone_is_refused() {
    let server = NameServer::start(Program::Bind);
    let publisher = Publisher::of(&server);
    publisher.provider(&server, &json!({"interval": "1s"}));
    publisher.endpoints("web", &[("a.example.org", "192.0.2.1")]);
    let running = publisher.start();
    running.wait_until("the first record", || has(&server, "192.0.2.1\n"));
    second(&publisher, &server, &json!({"interval": "1s"}));
    let problem =
        "the same txt-owner-id \"me\" in zone example.org as DNS Update Record default/bind";
    running.wait_until("the refusal", || {
        running
            .get("/status")
            .1
            .to_string()
            .contains("default/other")
    });
    running.wait_until("both problems", || {
        let status = running.get("/status").1;
        ["bind", "other"]
            .iter()
            .all(|name| status["providers"][format!("default/{name}")]["synced"] == false)
    });
    let checked = publisher.expect(1, "check");
    assert!(checked.errors.contains(problem), "{checked:?}");
    assert!(has(&server, "192.0.2.1\n") && !has(&server, "192.0.2.2\n"));
    // Another owner, or other domains, make both work.
    for more in [
        json!({"txt-owner-id": "you", "interval": "1s"}),
        json!({"domain-filter": "b.example.org", "interval": "1s"}),
    ] {
        second(&publisher, &server, &more);
        publisher.provider(
            &server,
            &json!({"exclude-domains": "b.example.org", "interval": "1s"}),
        );
        running.wait_until("the second record", || has(&server, "192.0.2.2\n"));
        assert!(publisher.expect(0, "check").errors.is_empty());
        assert!(has(&server, "192.0.2.1\n"));
    }
    running.stop();
}

/// Returns eight names that begin with a letter.
fn eight(letter: char) -> Desired {
    wish((0..8).map(|number| {
        record(
            &format!("{letter}{number}.example.org"),
            RecordType::A,
            "192.0.2.1",
        )
    }))
}

#[tokio::test]
async fn publishers_with_equal_owner_keep_all_names() {
    for program in Program::ALL {
        let server = NameServer::start(program);
        let (mut one, mut other) = (server.engine(), server.engine());
        let (ours, theirs) = (eight('a'), eight('b'));
        for _ in 0..5 {
            one.reconcile(&ours, None, &quiet).await.unwrap();
            other.reconcile(&theirs, None, &quiet).await.unwrap();
        }
        for _ in 0..3 {
            let report = one.reconcile(&ours, None, &quiet).await.unwrap();
            assert!(!report.is_complete() && report.applied() == 0, "{report:?}");
            assert_eq!(
                report.zones[0].contested.len(),
                8,
                "the quarrel is reported"
            );
            let reasons = report.zones[0]
                .notes
                .iter()
                .filter(|note| note.reason == Reason::Contested);
            assert_eq!(reasons.count(), 8);
            assert_eq!(
                other
                    .reconcile(&theirs, None, &quiet)
                    .await
                    .unwrap()
                    .applied(),
                0
            );
            assert_eq!(
                server
                    .transfer("example.org")
                    .matches("192.0.2.1\n")
                    .count(),
                16,
                "{program:?}"
            );
        }
    }
}

#[tokio::test]
async fn only_deletions_wait() {
    let server = NameServer::start(Program::Bind);
    let mut engine = server.engine();
    engine.reconcile(&names(40), None, &quiet).await.unwrap();
    let mut wanted = names(20);
    wanted.records[3] = record("n3.example.org", RecordType::A, "203.0.113.3");
    wanted
        .records
        .push(record("new.example.org", RecordType::A, "203.0.113.4"));
    let report = engine.reconcile(&wanted, None, &quiet).await.unwrap();
    assert!(
        report.zones[0].refusal.is_some() && report.applied() == 2,
        "{report:?}"
    );
    let zone = server.transfer("example.org");
    assert!(
        zone.contains("203.0.113.3\n") && zone.contains("203.0.113.4\n"),
        "{zone}"
    );
    assert_eq!(zone.matches("external-dns/owner=me").count(), 41);
    let report = engine.reconcile(&wanted, Some(20), &quiet).await.unwrap();
    assert!(report.is_complete() && report.applied() == 20, "{report:?}");
}

#[test]
fn deletions_count_over_runs() {
    let server = NameServer::start(Program::Knot);
    let publisher = Publisher::of(&server);
    let all: Vec<String> = (0..60)
        .map(|number| format!("n{number}.example.org"))
        .collect();
    let addresses: Vec<(&str, &str)> = all
        .iter()
        .map(|name| (name.as_str(), "192.0.2.1"))
        .collect();
    publisher.endpoints("web", &addresses);
    publisher.expect(0, "apply");
    publisher.endpoints("web", &addresses[..50]);
    publisher.expect(0, "apply");
    publisher.endpoints("web", &addresses[..40]);
    let refused = publisher.expect(1, "apply");
    assert!(
        refused.errors.contains("after 10 others in the last hour"),
        "{refused:?}"
    );
    assert_eq!(
        server
            .transfer("example.org")
            .matches("192.0.2.1\n")
            .count(),
        50
    );
    publisher.expect(0, "apply --confirm-deletions 10");
    assert_eq!(
        server
            .transfer("example.org")
            .matches("192.0.2.1\n")
            .count(),
        40
    );
}

#[test]
fn running_publisher_takes_confirmations() {
    let server = NameServer::start(Program::Bind);
    let publisher = Publisher::of(&server);
    let all: Vec<String> = (0..12)
        .map(|number| format!("n{number}.example.org"))
        .collect();
    let addresses: Vec<(&str, &str)> = all
        .iter()
        .map(|name| (name.as_str(), "192.0.2.1"))
        .collect();
    publisher.endpoints("web", &addresses);
    let running = publisher.start();
    let count = || {
        server
            .transfer("example.org")
            .matches("192.0.2.1\n")
            .count()
    };
    running.wait_until("the records", || count() == 12);
    publisher.endpoints("web", &addresses[..1]);
    running.wait_until("the refusal", || {
        running
            .get("/status")
            .1
            .to_string()
            .contains("--confirm-deletions 11")
    });
    // As in the package, only the running publisher can sign.
    let record = std::fs::read_to_string(publisher.path("documents/bind.json")).unwrap();
    let (code, answer) = running
        .ask("POST", "/confirm", Some(&json!({"deletions": 3})))
        .unwrap();
    assert_eq!(
        (code, &answer["default/bind"]["changed"]),
        (200, &json!(0)),
        "{answer}"
    );
    assert!(
        answer["default/bind"]["problems"][0]
            .as_str()
            .unwrap()
            .contains("--confirm-deletions 11")
    );
    let said = publisher.expect(0, "apply --confirm-deletions 11");
    assert_eq!(
        (said.out.as_str(), said.errors.as_str()),
        ("default/bind: 11 names changed\n", "")
    );
    assert_eq!(count(), 1);
    assert_eq!(
        std::fs::read_to_string(publisher.path("documents/bind.json")).unwrap(),
        record
    );
    for (body, expected) in [
        (json!({"deletion": 3}), 400),
        (json!({"deletions": 3, "providers": ["default/none"]}), 404),
    ] {
        assert_eq!(
            running.ask("POST", "/confirm", Some(&body)).unwrap().0,
            expected
        );
    }
    running.stop();
}

#[tokio::test]
async fn texts_of_several_strings_are_changed() {
    for program in Program::ALL {
        let server = NameServer::start(program);
        let heritage = [
            "\"heritage=external-dns,external-dns\" \"/owner=me\"",
            "\"\" \"v=DKIM1\" \"; k=rsa\"",
        ];
        server.nsupdate(&format!(
            "zone example.org.\nupdate add d.example.org. 60 TXT {}\nupdate add txt-d.example.org. 60 TXT {}\n\
             update add a.example.org. 60 A 192.0.2.1\nupdate add a-a.example.org. 60 TXT {}\n\
             update add a-a.example.org. 60 TXT \"two\" \"parts\"\nupdate add a-a.example.org. 60 TXT \"twoparts\"\n",
            heritage[1], heritage[0], heritage[0]
        ));
        let mut engine = server.engine();
        engine.rules.managed.insert(RecordType::TXT);
        let text = |value: &str| Record {
            ttl: Some(60),
            ..Record::parse("d.example.org", RecordType::TXT, [value]).unwrap()
        };
        let address = record("a.example.org", RecordType::A, "192.0.2.2");
        let unchanged = wish([
            text("v=DKIM1; k=rsa"),
            record("a.example.org", RecordType::A, "192.0.2.1"),
        ]);
        let mut unchanged_ttl = unchanged.clone();
        unchanged_ttl.records[1].ttl = Some(60);
        assert_eq!(
            engine
                .reconcile(&unchanged_ttl, None, &quiet)
                .await
                .unwrap()
                .applied(),
            0
        );
        let report = engine
            .reconcile(
                &wish([text("v=DKIM1; k=ed25519"), address.clone()]),
                None,
                &quiet,
            )
            .await
            .unwrap();
        assert!(
            report.is_complete() && report.applied() == 2,
            "{program:?}: {report:?}"
        );
        let zone = server.transfer("example.org");
        assert!(
            zone.contains("\"v=DKIM1; k=ed25519\"") && zone.contains("192.0.2.2\n"),
            "{zone}"
        );
        let report = engine.reconcile(&wish([]), Some(2), &quiet).await.unwrap();
        assert!(report.is_complete() && report.applied() == 2, "{report:?}");
        let zone = server.transfer("example.org");
        // Foreign values beside the owner record stay as they were.
        assert!(
            zone.contains("\"two\" \"parts\"") && zone.contains("\"twoparts\""),
            "{zone}"
        );
        assert!(
            !zone.contains("heritage") && !zone.contains("DKIM"),
            "{zone}"
        );
    }
}

#[tokio::test]
async fn foreign_text_at_owner_record_blocks_nothing() {
    for program in Program::ALL {
        let server = NameServer::start(program);
        server.nsupdate("zone example.org.\nupdate add a-early.example.org. 60 TXT \"foreign\"\n");
        let mut engine = server.engine();
        let at = |address: &str| {
            wish(
                ["early", "late"]
                    .map(|name| record(&format!("{name}.example.org"), RecordType::A, address)),
            )
        };
        let publish = async |engine: &mut Engine, desired: &Desired, confirmed| {
            let report = engine.reconcile(desired, confirmed, &quiet).await.unwrap();
            assert!(
                report.is_complete() && report.applied() == 2,
                "{program:?}: {report:?}"
            );
        };
        publish(&mut engine, &at("192.0.2.1"), None).await;
        server.nsupdate("zone example.org.\nupdate add a-late.example.org. 60 TXT \"foreign\"\n");
        publish(&mut engine, &at("192.0.2.2"), None).await;
        assert_eq!(
            engine
                .reconcile(&at("192.0.2.2"), None, &quiet)
                .await
                .unwrap()
                .applied(),
            0
        );
        publish(&mut engine, &wish([]), Some(2)).await;
        let zone = server.transfer("example.org");
        assert_eq!(
            (
                zone.matches("\"foreign\"").count(),
                zone.matches("heritage").count()
            ),
            (2, 0),
            "{zone}"
        );
    }
}

#[tokio::test]
async fn hidden_names_are_held_back() {
    for program in Program::ALL {
        let server = NameServer::start(program);
        server.nsupdate(
            "zone example.org.\nupdate add sub.example.org. 60 NS ns.sub.example.org.\n\
             update add sub.example.org. 60 NS ns.example.net.\n",
        );
        let mut engine = server.engine();
        engine.rules.managed.extend([RecordType::NS]);
        let wanted = wish([
            record("x.sub.example.org", RecordType::A, "192.0.2.1"),
            record("sub.example.org", RecordType::A, "192.0.2.1"),
            record("ns.sub.example.org", RecordType::A, "192.0.2.2"),
            record("loop.example.org", RecordType::CNAME, "loop.example.org"),
            record("example.org", RecordType::NS, "ns9.example.org"),
            record("ok.example.org", RecordType::A, "192.0.2.3"),
        ]);
        for applied in [2, 0] {
            let report = engine.reconcile(&wanted, None, &quiet).await.unwrap();
            assert!(
                report.is_complete() && report.applied() == applied,
                "{program:?}: {report:?}"
            );
            let notes = report.notes.iter().chain(&report.zones[0].notes);
            let mut notes: Vec<String> = notes.map(ToString::to_string).collect();
            notes.sort();
            let starts = [
                "example.org NS: the server",
                "loop.example.org CNAME: the CNAME points",
                "sub.example.org A: resolvers do not",
                "x.sub.example.org A: resolvers do not",
            ];
            assert_eq!(notes.len(), starts.len(), "{notes:?}");
            assert!(
                notes
                    .iter()
                    .zip(starts)
                    .all(|(note, start)| note.starts_with(start)),
                "{notes:?}"
            );
        }
        let zone = server.transfer("example.org");
        assert!(
            zone.contains("192.0.2.2\n")
                && zone.contains("192.0.2.3\n")
                && !zone.contains("192.0.2.1\n")
        );
    }
}

#[tokio::test]
async fn delegation_in_the_same_document_hides_at_once() {
    for program in Program::ALL {
        let server = NameServer::start(program);
        let mut engine = server.engine();
        engine.rules.managed.extend([RecordType::NS]);
        let wanted = wish([
            record("sub.example.org", RecordType::NS, "ns.sub.example.org"),
            record("ns.sub.example.org", RecordType::A, "192.0.2.2"),
            record("x.sub.example.org", RecordType::A, "192.0.2.1"),
        ]);
        for applied in [2, 0] {
            let report = engine.reconcile(&wanted, None, &quiet).await.unwrap();
            assert!(
                report.is_complete() && report.applied() == applied,
                "{program:?}: {report:?}"
            );
            let notes: Vec<String> = report.zones[0]
                .notes
                .iter()
                .map(ToString::to_string)
                .collect();
            assert_eq!(notes.len(), 1, "{notes:?}");
            assert!(notes[0].starts_with("x.sub.example.org A: "), "{notes:?}");
        }
        let zone = server.transfer("example.org");
        assert!(!zone.contains("192.0.2.1\n"), "{zone}");
    }
}

#[tokio::test]
async fn minimum_applies_without_a_ttl() {
    let server = NameServer::start(Program::Bind);
    let bare = |name: &str| {
        Record::parse(&format!("{name}.example.org"), RecordType::A, ["192.0.2.1"]).unwrap()
    };
    let mut parameters = server.parameters();
    parameters
        .0
        .insert("rfc2136-min-ttl".to_owned(), "300s".to_owned());
    let settings =
        dns_publish::provider::rfc2136::Rfc2136Settings::from_parameters(&parameters).unwrap();
    let mut of_provider = engine(settings);
    let mut of_rules = server.engine();
    of_rules.rules = PlanRules {
        min_ttl: 600,
        ..PlanRules::of("you")
    };
    for applied in [1, 0] {
        assert_eq!(
            of_provider
                .reconcile(&wish([bare("a")]), None, &quiet)
                .await
                .unwrap()
                .applied(),
            applied
        );
        assert_eq!(
            of_rules
                .reconcile(&wish([bare("b")]), None, &quiet)
                .await
                .unwrap()
                .applied(),
            applied
        );
    }
    let zone = server.transfer("example.org");
    assert!(
        zone.contains("a.example.org.\t\t300\tIN\tA")
            && zone.contains("b.example.org.\t\t600\tIN\tA"),
        "{zone}"
    );
}

#[tokio::test]
async fn next_host_replaces_an_absent_one() {
    let server = NameServer::start(Program::Knot);
    let absent = test_support::free_address();
    let mut parameters = server.parameters();
    parameters.0.insert(
        "rfc2136-host".to_owned(),
        format!("{absent}, {}", server.address),
    );
    let settings =
        dns_publish::provider::rfc2136::Rfc2136Settings::from_parameters(&parameters).unwrap();
    let report = engine(settings)
        .reconcile(&names(3), None, &quiet)
        .await
        .unwrap();
    assert!(report.is_complete() && report.applied() == 3, "{report:?}");
}

#[tokio::test]
async fn large_set_is_explained() {
    let server = NameServer::with(Program::Bind, Options::default());
    let addresses: Vec<String> = (1..=120)
        .map(|number| format!("192.0.2.{number}"))
        .collect();
    let large = Record {
        ttl: Some(60),
        ..Record::parse("many.example.org", RecordType::A, &addresses).unwrap()
    };
    let mut wanted = names(3);
    wanted.records.push(large);
    let report = server
        .engine()
        .reconcile(&wanted, None, &quiet)
        .await
        .unwrap();
    assert_eq!(report.applied(), 3, "{report:?}");
    let reason = report.zones[0].failures[0].1.to_string();
    assert!(
        reason.contains("its set of 120 records") && reason.contains("max-records-per-type"),
        "{reason}"
    );
}

#[test]
fn outage_is_one_line() {
    let server = NameServer::start(Program::Bind);
    let publisher = Publisher::of(&server);
    let all: Vec<String> = (0..300)
        .map(|number| format!("n{number}.example.org"))
        .collect();
    let addresses: Vec<(&str, &str)> = all
        .iter()
        .map(|name| (name.as_str(), "192.0.2.1"))
        .collect();
    publisher.provider(&server, &json!({"interval": "1s"}));
    publisher.endpoints("web", &addresses);
    let running = publisher.start();
    let owned = |count: usize| {
        let line = format!("external_dns_registry_records{{provider=\"default/bind\"}} {count}\n");
        running
            .get("/metrics")
            .1
            .as_str()
            .is_some_and(|metrics| metrics.contains(&line))
    };
    running.wait_until("the records", || owned(300));
    let (_, metrics) = running.get("/metrics");
    // Sets of the round itself count: 300, and the server's own address record.
    let sets = "external_dns_registry_endpoints_total{provider=\"default/bind\"} 301\n";
    assert!(metrics.as_str().unwrap().contains(sets), "{metrics}");
    drop(server);
    running.wait_until("the outage", || {
        let (_, metrics) = running.get("/metrics");
        metrics
            .as_str()
            .unwrap()
            .contains("external_dns_registry_errors_total{provider=\"default/bind\"} 2")
    });
    assert!(owned(300), "the last known numbers stay");
    let said = publisher.expect(1, "status");
    assert!(
        said.out.contains("300 names owned") && said.out.lines().count() < 10,
        "{said:?}"
    );
    let status = std::fs::read_to_string(publisher.path("documents/web.json.status")).unwrap();
    assert!(status.lines().count() < 30, "{status}");
    running.kill();
    let log = std::fs::read_to_string(publisher.path("log")).unwrap();
    assert!(log.matches("WARN").count() < 5, "{log}");
    assert!(log.contains("started documents=2 providers=1"), "{log}");
}

#[tokio::test]
async fn addresses_get_pointers() {
    let zones = vec![
        "example.org",
        "2.0.192.in-addr.arpa",
        "8.b.d.0.1.0.0.2.ip6.arpa",
    ];
    let server = NameServer::with(
        Program::Knot,
        Options {
            zones,
            ..Options::default()
        },
    );
    let mut engine = server.engine();
    engine.rules.creates_pointers = true;
    engine.rules.managed.insert(RecordType::PTR);
    let wanted = wish([
        record("a.example.org", RecordType::A, "192.0.2.7"),
        record("a.example.org", RecordType::AAAA, "2001:db8::1"),
        record("*.w.example.org", RecordType::A, "192.0.2.8"),
    ]);
    let report = engine.reconcile(&wanted, None, &quiet).await.unwrap();
    assert!(report.is_complete() && report.applied() == 4, "{report:?}");
    assert_eq!(
        engine
            .reconcile(&wanted, None, &quiet)
            .await
            .unwrap()
            .applied(),
        0
    );
    assert_eq!(
        server.ask("7.2.0.192.in-addr.arpa", RecordType::PTR),
        (0, 1)
    );
    let nibbles = format!("1.{}8.b.d.0.1.0.0.2.ip6.arpa", "0.".repeat(23));
    assert_eq!(server.ask(&nibbles, RecordType::PTR), (0, 1));
    engine.reconcile(&wish([]), Some(10), &quiet).await.unwrap();
    assert_eq!(server.ask("7.2.0.192.in-addr.arpa", RecordType::PTR).0, 3);
}

/// Length of the soak in seconds; an hour finds more.
fn soak_time() -> Duration {
    let seconds = std::env::var("PUBLISH_SOAK_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(20))
}

/// A publisher of the soak with its wanted names.
struct Owner {
    letter: char,
    publisher: Publisher,
    running: Option<Running>,
    wanted: BTreeMap<String, String>,
}

impl Owner {
    fn start(server: &NameServer, letter: char) -> Self {
        let publisher = Publisher::of(server);
        publisher.provider(
            server,
            &json!({"txt-owner-id": letter.to_string(), "interval": "1s"}),
        );
        let mut owner = Self {
            letter,
            publisher,
            running: None,
            wanted: BTreeMap::new(),
        };
        (0..12).for_each(|number| owner.want(number));
        owner.write();
        owner.running = Some(owner.publisher.start());
        owner
    }

    fn want(&mut self, number: u32) {
        let address = format!("198.51.100.{}", fastrand::u8(1..250));
        self.wanted
            .insert(format!("{}{number}.example.org", self.letter), address);
    }

    fn write(&self) {
        let addresses: Vec<(&str, &str)> = self
            .wanted
            .iter()
            .map(|(name, address)| (name.as_str(), address.as_str()))
            .collect();
        self.publisher.endpoints("web", &addresses);
    }

    /// Changes the document, edits the zone by hand, or kills the process.
    fn disturb(&mut self, server: &NameServer) {
        let index = fastrand::usize(..self.wanted.len());
        let Some(name) = self.wanted.keys().nth(index).cloned() else {
            return;
        };
        match fastrand::u32(..6) {
            0 if self.wanted.len() > 5 => drop(self.wanted.remove(&name)),
            0..=2 => self.want(fastrand::u32(..20)),
            3 => self.by_hand(server, &format!("update delete {name}. A\n")),
            4 => {
                let more = format!(
                    "update add {name}. 60 A 203.0.113.9\nupdate add hand-{name}. 60 TXT \"by hand\"\n"
                );
                self.by_hand(server, &more);
            }
            _ => {
                self.running.take().unwrap().kill();
                self.running = Some(self.publisher.start());
            }
        }
        self.write();
    }

    /// Edits the zone while it is as wanted, and waits until it is so again. An edit of a name that is
    /// just created or deleted would leave a record without an owner, or an owner record alone.
    fn by_hand(&self, server: &NameServer, lines: &str) {
        self.settle(server);
        server.nsupdate(&format!("zone example.org.\n{lines}"));
        self.settle(server);
    }

    fn settle(&self, server: &NameServer) {
        self.running
            .as_ref()
            .unwrap()
            .wait_until("the wanted state", || self.is_settled(server));
    }

    fn is_settled(&self, server: &NameServer) -> bool {
        // Without a confirmation the guard would stop the soak after ten deletions.
        let confirm = json!({"deletions": 100, "providers": ["default/bind"]});
        let running = self.running.as_ref().unwrap();
        let Some((200, results)) = running.ask("POST", "/confirm", Some(&confirm)) else {
            return false;
        };
        let zone = server.transfer("example.org");
        let lines: Vec<Vec<&str>> = zone
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        let of = |record_type: &str| -> Vec<(String, String)> {
            let records = lines
                .iter()
                .filter(|words| words.get(3) == Some(&record_type));
            let pair = |words: &Vec<&str>| {
                (
                    words[0].trim_end_matches('.').to_owned(),
                    words[4..].join(" "),
                )
            };
            let mut pairs: Vec<_> = records.map(pair).collect();
            pairs.sort();
            pairs
        };
        let is_ours = |name: &str| name.starts_with(self.letter) && name.ends_with(".example.org");
        let found: Vec<_> = of("A")
            .into_iter()
            .filter(|(name, _)| is_ours(name))
            .collect();
        let wanted: Vec<_> = self.wanted.clone().into_iter().collect();
        let texts = of("TXT");
        let owned = texts
            .iter()
            .filter(|(_, text)| text.contains(&format!("owner={}", self.letter)));
        results["default/bind"]["problems"] == json!([])
            && found == wanted
            && owned.count() == wanted.len()
    }
}

#[test]
fn owners_share_a_zone_through_faults() {
    let server = NameServer::start(Program::Bind);
    let mut owners = ['p', 'q'].map(|letter| Owner::start(&server, letter));
    let begin = Instant::now();
    while begin.elapsed() < soak_time() {
        owners[fastrand::usize(..2)].disturb(&server);
        thread::sleep(Duration::from_millis(fastrand::u64(..300)));
    }
    for owner in &owners {
        owner.settle(&server);
    }
    let hands = server
        .transfer("example.org")
        .matches("\"by hand\"")
        .count();
    println!("{hands} records by hand");
    for owner in owners {
        owner.running.unwrap().stop();
    }
    assert_eq!(
        server
            .transfer("example.org")
            .matches("\"by hand\"")
            .count(),
        hands
    );
}
