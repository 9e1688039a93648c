//! CoreDNS's etcd and Route 53 through the commands, as operators use them.

use serde_json::json;

use crate::{
    etcd::Etcd,
    publisher::Publisher,
    route53::Moto,
    route53_double::{Double, KEY_ID, SECRET},
};

/// Returns a publisher with the DNS Update Record `NAME` and settings of its provider.
fn publisher(name: &str, provider: &str, settings: &[(&str, &str)]) -> Publisher {
    let publisher = Publisher::new();
    let settings: serde_json::Map<_, _> = settings
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).into()))
        .collect();
    publisher.write(
        "publish.yml",
        &json!({
            "documents": ["documents"],
            "store": "state/store",
            "control": {"socket": "control.sock"},
            "provider_settings": {format!("default/{name}"): settings},
        })
        .to_string(),
    );
    let record = json!({
        "apiVersion": "bosh-dns-publish/v1",
        "kind": "DNSUpdateRecord",
        "metadata": {"name": name},
        "spec": {
            "provider": provider,
            // Documents of these tests have the label of another provider.
            "selector": "dnsprovider=bind",
            "external-dns-parameters": {"txt-owner-id": "me", "interval": "1s"},
        },
    });
    publisher.write("documents/provider.json", &record.to_string());
    publisher
}

/// Publishes and retires names by commands and by `run`; `is_there` looks at the provider.
fn go_through_commands(name: &str, publisher: &Publisher, is_there: &dyn Fn(&str) -> bool) {
    let two = [
        ("a.example.org", "192.0.2.1"),
        ("b.example.org", "192.0.2.2"),
    ];
    let nothing = format!("default/{name}:\n  nothing to do\n");
    publisher.endpoints("web", &two);
    publisher.expect(0, "check");
    let plan = publisher.expect(2, "plan");
    assert!(
        plan.out.contains("+ a.example.org 60 A 192.0.2.1\n"),
        "{plan:?}"
    );
    assert!(!is_there("192.0.2.1"));
    assert_eq!(
        publisher.expect(0, "apply").out,
        format!("default/{name}: 2 names changed\n")
    );
    assert!(is_there("192.0.2.1") && is_there("external-dns/owner=me"));
    assert_eq!(publisher.expect(0, "plan").out, nothing);

    let running = publisher.start();
    publisher.endpoints(
        "web",
        &[&two[..], &[("c.example.org", "192.0.2.9")]].concat(),
    );
    running.wait_until("the addition", || is_there("192.0.2.9"));
    let published = || {
        publisher
            .call("status")
            .out
            .contains("published, 3 record sets wanted, 3 names owned")
    };
    running.wait_until("the status", published);
    publisher.endpoints("web", &two);
    running.wait_until("the deletion", || !is_there("192.0.2.9"));
    assert_eq!(running.get("/healthz"), (200, json!("OK\n")));
    running.stop();
    assert_eq!(publisher.expect(0, "plan").out, nothing);

    publisher.expect(1, "retire");
    publisher.expect(0, "retire --confirm-deletions 2");
    assert!(!is_there("192.0.2.1") && !is_there("external-dns/owner=me"));
}

/// Changes the address of a published name.
fn replace_address(name: &str, publisher: &Publisher, is_there: &dyn Fn(&str) -> bool) {
    publisher.endpoints("web", &[("a.example.org", "192.0.2.1")]);
    publisher.expect(0, "apply");
    publisher.endpoints("web", &[("a.example.org", "192.0.2.7")]);
    assert_eq!(
        publisher.expect(0, "apply").out,
        format!("default/{name}: 1 names changed\n")
    );
    assert!(is_there("192.0.2.7") && !is_there("192.0.2.1"));
    publisher.expect(0, "retire --confirm-deletions 1");
}

#[test]
fn coredns_is_published_by_commands() {
    let etcd = Etcd::start(None);
    etcd.ctl(&[
        "put",
        "/skydns/org/example/hand",
        r#"{"host":"192.0.2.77"}"#,
    ]);
    let publisher = publisher("etcd", "coredns", &[("etcd-urls", &etcd.url)]);
    let is_there = |text: &str| {
        etcd.ctl(&["get", "/", "--prefix", "--print-value-only"])
            .contains(text)
    };
    go_through_commands("etcd", &publisher, &is_there);
    replace_address("etcd", &publisher, &is_there);
    assert_eq!(
        etcd.keys(),
        ["/skydns/org/example/hand"],
        "the foreign key stays alone"
    );
}

fn aws(url: &str) -> Publisher {
    let settings = [
        ("aws-endpoint", url),
        ("aws-sts-endpoint", url),
        ("aws-access-key-id", KEY_ID),
        ("aws-secret-access-key", SECRET),
    ];
    publisher("route53", "aws", &settings)
}

#[tokio::test(flavor = "multi_thread")]
async fn double_is_published_by_commands() {
    let double = Double::start(&[("Z1", "example.org", false)]).await;
    let publisher = aws(&double.url);
    let is_there =
        |text: &str| double.with(|state| state.zones[0].3.values().any(|set| set.contains(text)));
    // The commands wait for the double, which runs on this runtime.
    tokio::task::block_in_place(|| {
        go_through_commands("route53", &publisher, &is_there);
        replace_address("route53", &publisher, &is_there);
    });
    assert_eq!(
        double.with(|state| state.signed_by.iter().cloned().collect::<Vec<_>>()),
        [KEY_ID]
    );
}

#[test]
fn moto_is_published_by_commands() {
    let moto = Moto::start();
    let publisher = aws(&moto.url);
    // No address is replaced: moto refuses to delete and create a set in one batch.
    go_through_commands("route53", &publisher, &|text| {
        moto.record_sets().contains(text)
    });
}
