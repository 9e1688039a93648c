//! Publishing to BIND and Knot.

use std::{
    fs,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
};

use dns_publish::{
    engine::Report,
    plan::Desired,
    provider::{OnConflict, rfc2136::Server as ServerAddress},
    record::{Name, Record, RecordType},
};

use crate::name_server::{
    NameServer, Options, Program, engine, names, quiet, record, trusting, wish,
};

/// Number of queries sent by one dig process.
const QUESTIONS: usize = 100;

async fn publish(server: &NameServer, desired: &Desired) -> Report {
    let report = server
        .engine()
        .reconcile(desired, None, &quiet)
        .await
        .unwrap();
    assert!(report.is_complete(), "{report:?}");
    report
}

#[tokio::test]
async fn racing_publishers_leave_no_orphan() {
    for program in Program::ALL {
        let server = NameServer::start(program);
        let desired = names(1_000);
        let (mut one, mut other) = (server.engine(), server.engine());
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
            first.applied() + second.applied(),
            1_000,
            "each name is written once"
        );

        let listing = one.list().await.unwrap();
        let view = listing[0].content.as_ref().unwrap();
        assert!(view.notes.is_empty(), "{:?}", view.notes);
        assert_eq!(
            view.records
                .iter()
                .filter(|record| record.labels.owner() == "me")
                .count(),
            1_000
        );
        for engine in [&mut one, &mut other] {
            assert_eq!(
                engine
                    .reconcile(&desired, None, &quiet)
                    .await
                    .unwrap()
                    .applied(),
                0,
                "no flapping"
            );
        }
    }
}

#[tokio::test]
async fn abandoned_run_is_completed() {
    for program in Program::ALL {
        let server = NameServer::start(program);
        let desired = names(2_000);
        // A publisher is killed between two messages, or during one.
        for messages in 1..4 {
            let sent = AtomicUsize::new(0);
            let (stop, stopped) = tokio::sync::oneshot::channel();
            let stop = std::sync::Mutex::new(Some(stop));
            let progress = |_: usize| {
                if sent.fetch_add(1, Ordering::Relaxed) + 1 == messages {
                    stop.lock().unwrap().take().map(|stop| stop.send(()));
                }
            };
            let mut engine = server.engine();
            tokio::select! {
                biased;
                _ = stopped => {}
                _ = engine.reconcile(&desired, None, &progress) => {}
            }
        }
        let mut engine = server.engine();
        let listing = engine.list().await.unwrap();
        let view = listing[0].content.as_ref().unwrap();
        assert!(
            view.notes.is_empty(),
            "no owner record without its record: {:?}",
            view.notes
        );
        publish(&server, &desired).await;
        assert_eq!(publish(&server, &desired).await.applied(), 0);
        assert_eq!(
            server
                .transfer("example.org")
                .matches("external-dns/owner=me")
                .count(),
            2_000
        );
    }
}

#[tokio::test]
async fn type_change_never_yields_nxdomain() {
    for program in Program::ALL {
        let server = NameServer::start(program);
        let address = record("flip.example.org", RecordType::A, "192.0.2.1");
        let alias = record("flip.example.org", RecordType::CNAME, "target.example.net");
        publish(&server, &wish([address.clone()])).await;

        let (stop, asked) = (AtomicBool::new(false), AtomicUsize::new(0));
        thread::scope(|scope| {
            let questions = scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let answers = server.dig("flip.example.org A", QUESTIONS);
                    let sound = answers.matches("status: NOERROR").count();
                    let empty = answers.matches("ANSWER: 0").count();
                    assert_eq!((sound, empty), (QUESTIONS, 0), "{program:?}: {answers}");
                    asked.fetch_add(sound, Ordering::Relaxed);
                }
            });
            let changes = scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .unwrap();
                runtime.block_on(async {
                    for round in 0..500 {
                        if round >= 25 && asked.load(Ordering::Relaxed) >= 2 * QUESTIONS {
                            break;
                        }
                        publish(&server, &wish([alias.clone()])).await;
                        publish(&server, &wish([address.clone()])).await;
                    }
                });
            });
            let result = changes.join();
            stop.store(true, Ordering::Relaxed);
            questions.join().unwrap();
            result.unwrap();
        });
        let asked = asked.load(Ordering::Relaxed);
        println!("{program:?}: {asked} answers to dig beside changes of type");
        assert!(
            asked >= 2 * QUESTIONS,
            "the questions ran beside the changes"
        );
    }
}

#[tokio::test]
async fn longest_names_get_owner_records() {
    for program in Program::ALL {
        let server = NameServer::start(program);
        let label = "x".repeat(63);
        // 3 labels of 64 octets, one of 50, and 13 octets of the zone: 255 on the wire.
        let longest = format!("{label}.{label}.{label}.{}.example.org", "y".repeat(49));
        let many = format!("{}example.org", "z.".repeat(121));
        let wishes = [
            format!("{label}.example.org"),
            longest,
            many,
            "example.org".to_owned(),
        ];
        assert_eq!(wishes[1].len() + 2, Name::MAX_WIRE);
        assert_eq!(wishes[2].len() + 2, Name::MAX_WIRE);
        let desired = wish(
            wishes
                .iter()
                .map(|name| record(name, RecordType::A, "192.0.2.1")),
        );
        assert_eq!(publish(&server, &desired).await.applied(), wishes.len());
        assert_eq!(publish(&server, &desired).await.applied(), 0);
        assert_eq!(
            server
                .transfer("example.org")
                .matches("external-dns/owner=me")
                .count(),
            wishes.len()
        );
        // They can be deleted again, which takes ownership.
        let kept = wish([desired.records[0].clone()]);
        assert_eq!(publish(&server, &kept).await.applied(), wishes.len() - 1);
        assert_eq!(
            server
                .transfer("example.org")
                .matches("external-dns/owner=me")
                .count(),
            1
        );
    }
}

#[tokio::test]
async fn every_algorithm_is_understood() {
    for program in Program::ALL {
        for algorithm in [
            "hmac-sha1",
            "hmac-sha224",
            "hmac-sha256",
            "hmac-sha384",
            "hmac-sha512",
        ] {
            let server = NameServer::with(
                program,
                Options {
                    algorithm,
                    ..Options::default()
                },
            );
            assert_eq!(
                publish(&server, &names(3)).await.applied(),
                3,
                "{program:?} {algorithm}"
            );
        }
    }
}

#[tokio::test]
async fn every_type_is_read_back() {
    for program in Program::ALL {
        let server = NameServer::start(program);
        let records = [
            ("mail.example.org", RecordType::MX, "10 mx.example.net"),
            (
                "_sip._tcp.example.org",
                RecordType::SRV,
                "10 5 5060 sip.example.net",
            ),
            (
                "text.example.org",
                RecordType::TXT,
                "two words, \"quotes\" and \\ a backslash",
            ),
            (
                "enum.example.org",
                RecordType::NAPTR,
                r#"100 10 "u" "E2U+sip" "!^.*$!sip:info@example.org!" ."#,
            ),
            ("sub.example.org", RecordType::NS, "ns.example.net"),
            ("ptr.example.org", RecordType::PTR, "host.example.net"),
            ("*.wild.example.org", RecordType::AAAA, "2001:db8::1"),
            (
                "caa.example.org",
                RecordType(257),
                r"\# 12 00056973737565 636132 2e6e",
            ),
        ];
        let desired =
            wish(records.map(|(name, record_type, target)| record(name, record_type, target)));
        let mut long = record("long.example.org", RecordType::TXT, &"t".repeat(700));
        long.ttl = None;
        let desired = wish(desired.records.into_iter().chain([long]));
        let mut engine = server.engine();
        engine.rules.managed = desired
            .records
            .iter()
            .map(|record| record.record_type)
            .collect();
        let report = engine.reconcile(&desired, None, &quiet).await.unwrap();
        assert!(report.is_complete(), "{report:?}");
        assert_eq!(report.applied(), desired.records.len());
        let again = engine.reconcile(&desired, None, &quiet).await.unwrap();
        assert_eq!(again.applied(), 0, "{program:?}: {again:?}");
    }
}

#[tokio::test]
async fn foreign_addition_is_not_overwritten() {
    for program in Program::ALL {
        let server = NameServer::start(program);
        let before = wish([record("api.example.org", RecordType::A, "192.0.2.1")]);
        publish(&server, &before).await;
        let mut engine = server.engine();
        let listing = engine.list().await.unwrap();
        let after = wish([record("api.example.org", RecordType::A, "192.0.2.2")]);
        let planned = engine.plan(&listing, &after);
        server.nsupdate("zone example.org.\nupdate add api.example.org. 60 A 192.0.2.9\n");
        let report = engine
            .apply(&listing, &planned, None, OnConflict::ListAgain, &quiet)
            .await;
        assert_eq!((report.applied(), report.zones[0].conflicts), (0, 1));
        assert_eq!(
            server.ask("api.example.org", RecordType::A),
            (0, 2),
            "nothing changed"
        );
        // The next listing sees the addition to our own record and replaces the set.
        assert_eq!(publish(&server, &after).await.applied(), 1);
        assert_eq!(server.ask("api.example.org", RecordType::A), (0, 1));
    }
}

#[tokio::test]
async fn zone_ownership_transfers_both_ways() {
    let server = NameServer::start(Program::Knot);
    let theirs = "zone example.org.\n\
                  update add app.example.org. 60 A 192.0.2.1\n\
                  update add a-app.example.org. 60 TXT \"heritage=external-dns,external-dns/owner=k8s,external-dns/resource=service/default/app\"\n\
                  update add old.example.org. 60 A 192.0.2.2\n\
                  update add old.example.org. 60 TXT \"heritage=external-dns,external-dns/owner=k8s\"\n\
                  update add other.example.org. 60 A 192.0.2.3\n\
                  update add a-other.example.org. 60 TXT \"heritage=external-dns,external-dns/owner=cluster-2\"\n";
    server.nsupdate(theirs);
    let desired = wish(
        ["app", "old"]
            .into_iter()
            .zip([1, 2])
            .map(|(name, number)| {
                record(
                    &format!("{name}.example.org"),
                    RecordType::A,
                    &format!("192.0.2.{number}"),
                )
            }),
    );
    let mut engine = server.engine();
    engine.rules.migrate_from = Some("k8s".to_owned());
    let report = engine.reconcile(&desired, None, &quiet).await.unwrap();
    assert!(report.is_complete() && report.applied() == 2, "{report:?}");
    let text = server.transfer("example.org");
    assert_eq!(text.matches("external-dns/owner=me").count(), 2, "{text}");
    assert_eq!(
        text.matches("owner=cluster-2").count(),
        1,
        "other clusters' records stay (issue 5993)"
    );
    assert!(
        text.contains("resource=service/default/app"),
        "labels are kept"
    );
    assert!(!text.contains("owner=k8s"), "{text}");

    let listing = engine.list().await.unwrap();
    let ours: Vec<Record> = listing[0].content.as_ref().unwrap().records.clone();
    let ours = ours.iter().filter(|record| record.labels.owner() == "me");
    let mut planned = engine.plan(&listing, &desired);
    planned.zones[0].plan = dns_publish::plan::transfer(ours, "k8s");
    let report = engine
        .apply(&listing, &planned, None, OnConflict::ListAgain, &quiet)
        .await;
    assert!(report.is_complete() && report.applied() == 2, "{report:?}");
    let text = server.transfer("example.org");
    assert_eq!(text.matches("external-dns/owner=k8s").count(), 2, "{text}");
    assert_eq!(
        text.matches(" A\t192.0.2.").count() + text.matches("\tA\t192.0.2.").count(),
        4,
        "{text}"
    );
}

#[tokio::test]
async fn longest_zone_takes_the_name() {
    let options = Options {
        zones: vec!["example.org", "k8s.example.org"],
        ..Options::default()
    };
    let server = NameServer::with(Program::Bind, options);
    let desired = wish([
        record("x.k8s.example.org", RecordType::A, "192.0.2.1"),
        record("x.example.org", RecordType::A, "192.0.2.2"),
        record("notexample.org", RecordType::A, "192.0.2.3"),
    ]);
    let report = publish(&server, &desired).await;
    assert_eq!(report.applied(), 2);
    assert_eq!(report.notes.len(), 1, "{:?}", report.notes);
    assert!(
        server
            .transfer("k8s.example.org")
            .contains("a-x.k8s.example.org.")
    );
    assert!(!server.transfer("example.org").contains("k8s.example.org."));
}

#[tokio::test]
async fn messages_go_over_tls() {
    let folder = tempfile::tempdir().unwrap();
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (certificate, key) = (
        folder.path().join("cert.pem"),
        folder.path().join("key.pem"),
    );
    fs::write(&certificate, certified.cert.pem()).unwrap();
    fs::write(&key, certified.signing_key.serialize_pem()).unwrap();
    let files = (certificate.display().to_string(), key.display().to_string());
    let options = Options {
        certificate: Some(files),
        ..Options::default()
    };
    let server = NameServer::with(Program::Bind, options);
    // The certificate is for localhost, and the server listens on its address alone.
    let mut settings = server.settings();
    settings.servers[0] = ServerAddress::parse(&format!("tls://{}", server.tls_address)).unwrap();
    settings.files = trusting(&certificate);
    let refused = engine(settings.clone())
        .reconcile(&names(1), None, &quiet)
        .await
        .unwrap();
    assert!(
        refused.zones[0].failure.is_some(),
        "the address is not in the certificate"
    );

    let proxy = crate::faults::Proxy::start(server.tls_address, None).await;
    settings.servers[0] =
        ServerAddress::parse(&format!("tls://localhost:{}", proxy.address.port())).unwrap();
    let report = engine(settings)
        .reconcile(&names(5), None, &quiet)
        .await
        .unwrap();
    assert!(report.is_complete() && report.applied() == 5, "{report:?}");
}
