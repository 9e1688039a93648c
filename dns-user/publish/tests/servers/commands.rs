//! The commands against a real BIND or Knot.

use serde_json::{Value, json};

use crate::{
    name_server::{NameServer, Options, Program},
    publisher::Publisher,
};

#[test]
fn plan_apply_and_retire_agree() {
    for program in Program::ALL {
        let server = NameServer::start(program);
        let publisher = Publisher::of(&server);
        publisher.endpoints(
            "web",
            &[
                ("a.example.org", "192.0.2.1"),
                ("b.example.org", "192.0.2.2"),
            ],
        );
        let plan = publisher.expect(2, "plan --color always");
        assert!(
            plan.out
                .contains("\x1b[32m  + a.example.org 60 A 192.0.2.1\x1b[0m"),
            "{plan:?}"
        );
        publisher.expect(2, "apply --dry-run");
        assert!(!server.transfer("example.org").contains("a.example.org"));
        assert_eq!(
            publisher.expect(0, "apply").out,
            "default/bind: 2 names changed\n"
        );
        assert_eq!(
            publisher.expect(0, "plan").out,
            "default/bind:\n  nothing to do\n"
        );
        publisher.endpoints("web", &[("a.example.org", "192.0.2.9")]);
        let plan: Value = serde_json::from_str(&publisher.expect(2, "plan --json").out).unwrap();
        assert_eq!(
            plan["default/bind"]["update"],
            json!([[
                "a.example.org 60 A 192.0.2.1",
                "a.example.org 60 A 192.0.2.9"
            ]])
        );
        assert_eq!(
            plan["default/bind"]["delete"],
            json!(["b.example.org 60 A 192.0.2.2"])
        );
        publisher.expect(0, "apply --provider bind");
        let refused = publisher.expect(1, "retire");
        assert!(
            refused.errors.contains("--confirm-deletions 1"),
            "{refused:?}"
        );
        assert!(server.transfer("example.org").contains("192.0.2.9"));
        publisher.expect(0, "retire --confirm-deletions 1");
        let left = server.transfer("example.org");
        assert!(
            !left.contains("192.0.2.9") && !left.contains("heritage"),
            "{left}"
        );
    }
}

#[test]
fn closed_output_is_no_failure() {
    let publisher = Publisher::new();
    publisher.write(
        "documents/etcd.yml",
        "apiVersion: bosh-dns-publish/v1\nkind: DNSUpdateRecord\nmetadata: {name: etcd}\nspec: {provider: coredns}\n",
    );
    for arguments in ["check", "render --output manifests"] {
        // As `| head -0` leaves it.
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = publisher
            .command(arguments)
            .stdout(writer)
            .output()
            .unwrap();
        assert!(output.status.success(), "{arguments}: {output:?}");
    }
}

#[test]
fn empty_source_needs_confirmation() {
    let server = NameServer::start(Program::Knot);
    let publisher = Publisher::of(&server);
    publisher.endpoints("web", &[("a.example.org", "192.0.2.1")]);
    publisher.expect(0, "apply");
    publisher.endpoints("web", &[]);
    let plan = publisher.expect(2, "plan");
    assert!(plan.out.contains("--confirm-deletions 1"), "{plan:?}");
    let refused = publisher.expect(1, "apply");
    assert!(
        refused.errors.contains("the documents want no records"),
        "{refused:?}"
    );
    publisher.expect(0, "apply --confirm-deletions 1");
    assert!(!server.transfer("example.org").contains("192.0.2.1"));
}

#[test]
fn damaged_document_keeps_records() {
    let server = NameServer::start(Program::Bind);
    let publisher = Publisher::of(&server);
    publisher.endpoints("one", &[("a.example.org", "192.0.2.1")]);
    publisher.endpoints(
        "two",
        &[
            ("b.example.org", "192.0.2.2"),
            ("c.example.org", "192.0.2.3"),
        ],
    );
    publisher.expect(0, "apply");
    publisher.endpoints("one", &[("a.example.org", "192.0.2.11")]);
    publisher.endpoints(
        "two",
        &[
            ("b.example.org", "192.0.2.22"),
            ("c.example.org", "192.0.2.333"),
        ],
    );
    let applied = publisher.expect(1, "apply");
    assert!(
        applied
            .errors
            .contains("documents/two.json:1: spec.endpoints[1].targets[0]: "),
        "{applied:?}"
    );
    let zone = server.transfer("example.org");
    for address in ["192.0.2.11", "192.0.2.22", "192.0.2.3\n"] {
        assert!(zone.contains(address), "{address}: {zone}");
    }
    assert_eq!(
        publisher.expect(1, "check").out,
        "default/bind: 2 record sets from 2 documents\n"
    );
}

#[test]
fn illegible_file_keeps_records_of_a_new_process() {
    let server = NameServer::start(Program::Bind);
    let publisher = Publisher::of(&server);
    publisher.endpoints("one", &[("a.example.org", "192.0.2.1")]);
    publisher.endpoints("two", &[("b.example.org", "192.0.2.2")]);
    publisher.endpoints("three", &[("c.example.org", "192.0.2.3")]);
    publisher.expect(0, "apply");
    for text in ["", "{", "kind: ["] {
        publisher.write("documents/two.json", text);
        let applied = publisher.expect(1, "apply");
        assert!(
            applied.errors.contains("documents/two.json:1: "),
            "{applied:?}"
        );
        assert!(
            server.transfer("example.org").contains("192.0.2.2\n"),
            "{text:?}"
        );
    }
    std::fs::remove_file(publisher.path("documents/two.json")).unwrap();
    publisher.expect(0, "apply");
    let zone = server.transfer("example.org");
    assert!(
        !zone.contains("192.0.2.2\n") && zone.contains("192.0.2.3\n"),
        "{zone}"
    );
}

#[test]
fn foreign_owner_record_is_a_remark() {
    let server = NameServer::start(Program::Bind);
    let publisher = Publisher::of(&server);
    publisher.endpoints("web", &[("a.example.org", "192.0.2.1")]);
    let text = "heritage=external-dns,external-dns/owner=other";
    server.nsupdate(&format!(
        "update add a-gone.example.org 60 TXT \"{text}\"\n"
    ));
    let applied = publisher.expect(0, "apply");
    assert!(
        applied
            .errors
            .contains("a-gone.example.org TXT: the owner record of owner \"other\" has no record"),
        "{applied:?}"
    );
}

#[test]
fn orphans_are_reported_and_deleted() {
    for program in Program::ALL {
        let server = NameServer::start(program);
        let publisher = Publisher::of(&server);
        publisher.endpoints("web", &[("a.example.org", "192.0.2.1")]);
        publisher.expect(0, "apply");
        let text =
            |owner: &str| format!("TXT \"heritage=external-dns,external-dns/owner={owner}\"\n");
        server.nsupdate(&format!(
            "update add a-gone.example.org 60 {}update add a-both.example.org 60 {}update add a-both.example.org 60 {}",
            text("me"),
            text("me"),
            text("other")
        ));
        let plan = publisher.expect(0, "plan");
        assert!(
            plan.out.contains("`retire --orphans=me` deletes it"),
            "{plan:?}"
        );
        assert!(
            plan.out.contains("`retire --orphans=other` deletes it"),
            "{plan:?}"
        );
        let shown = publisher.expect(0, "retire --orphans --dry-run");
        let lines = "  - a-both.example.org TXT: owner record of \"me\"\n  - a-gone.example.org TXT: owner record of \"me\"\n";
        assert!(shown.out.contains(lines), "{shown:?}");
        let orphans = |zone: &str| {
            (
                zone.matches("owner=me").count(),
                zone.matches("owner=other").count(),
            )
        };
        assert_eq!(orphans(&server.transfer("example.org")), (3, 1));
        publisher.expect(0, "retire --orphans sub.example.org");
        publisher.expect(0, "retire --orphans");
        let zone = server.transfer("example.org");
        assert_eq!(
            orphans(&zone),
            (1, 1),
            "the owner record of a stays: {zone}"
        );
        publisher.expect(0, "retire --orphans=other");
        assert_eq!(orphans(&server.transfer("example.org")), (1, 0));
        assert_eq!(
            publisher.expect(0, "plan").out,
            "default/bind:\n  nothing to do\n"
        );
    }
}

#[test]
fn named_domains_are_retired() {
    let server = NameServer::start(Program::Bind);
    let publisher = Publisher::of(&server);
    publisher.endpoints(
        "web",
        &[
            ("a.old.example.org", "192.0.2.1"),
            ("b.example.org", "192.0.2.2"),
        ],
    );
    publisher.expect(0, "apply");
    // A narrower filter leaves the records outside it unchanged; naming their domain deletes them.
    publisher.provider(&server, &json!({"exclude-domains": "old.example.org"}));
    publisher.endpoints("web", &[("b.example.org", "192.0.2.2")]);
    let left = "default/bind:\n  # a.old.example.org A: no longer in scope of domain-filter and exclude-domains; \
                `retire` with its domain deletes it\n";
    assert_eq!(publisher.expect(0, "plan").out, left);
    publisher.expect(1, "retire old.example.org");
    publisher.expect(0, "retire old.example.org --confirm-deletions 1");
    let zone = server.transfer("example.org");
    assert!(
        !zone.contains("old.example.org") && zone.contains("192.0.2.2"),
        "{zone}"
    );
}

#[test]
fn long_apply_draws_progress() {
    let server = NameServer::start(Program::Bind);
    let publisher = Publisher::of(&server);
    let names: Vec<String> = (0..900)
        .map(|number| format!("n{number}.example.org"))
        .collect();
    let addresses: Vec<(&str, &str)> = names
        .iter()
        .map(|name| (name.as_str(), "192.0.2.1"))
        .collect();
    publisher.endpoints("names", &addresses);
    let (said, drawn) = publisher.call_on_terminal("apply");
    assert_eq!(
        (said.code, said.out.as_str()),
        (0, "default/bind: 900 names changed\n"),
        "{drawn}"
    );
    let counts: Vec<usize> = drawn
        .split("/900 names")
        .filter_map(|before| before.rsplit(' ').next()?.parse().ok())
        .collect();
    assert!(
        counts.iter().any(|count| (1..=900).contains(count)) && counts.is_sorted(),
        "{drawn:?}"
    );
    assert!(
        drawn.contains("default/bind") && drawn.contains("left"),
        "{drawn:?}"
    );
    // The bar is cleared in the end, and there is none without a terminal.
    assert!(
        drawn.trim_end_matches(['\r', '\n']).ends_with("\x1b[2K"),
        "{drawn:?}"
    );
    publisher.endpoints("names", &[("n0.example.org", "192.0.2.2")]);
    assert_eq!(
        publisher.expect(0, "apply --confirm-deletions 899").errors,
        ""
    );
}

#[test]
fn records_change_hands() {
    let server = NameServer::start(Program::Bind);
    let publisher = Publisher::of(&server);
    server.nsupdate(
        "update add a.example.org 60 A 192.0.2.1\nupdate add x.example.org 60 A 192.0.2.9\n",
    );
    publisher.endpoints("web", &[("a.example.org", "192.0.2.1")]);
    let plan = publisher.expect(1, "plan");
    assert!(
        plan.out.contains(
            "# a.example.org A: the name has a record of no owner; take it over with `adopt`"
        ),
        "{plan:?}"
    );
    assert!(!plan.out.contains("nothing to do"), "{plan:?}");
    publisher.expect(0, "adopt --dry-run");
    assert!(!server.transfer("example.org").contains("heritage"));
    publisher.endpoints("web", &[("a.example.org", "192.0.2.8")]);
    let shown = publisher.expect(0, "adopt --dry-run");
    let change = "the next `apply` changes a.example.org 60 A 192.0.2.1 to the wanted a.example.org 60 A 192.0.2.8";
    assert!(shown.errors.contains(change), "{shown:?}");
    publisher.endpoints("web", &[("a.example.org", "192.0.2.1")]);
    let adopted = publisher.expect(0, "adopt");
    assert!(
        adopted
            .out
            .contains("~ a.example.org A: owner none -> \"me\""),
        "{adopted:?}"
    );
    assert_eq!(
        publisher.expect(0, "plan").out,
        "default/bind:\n  nothing to do\n"
    );
    publisher.expect(0, "transfer-owner --from me --to other");
    assert!(
        server
            .transfer("example.org")
            .contains("external-dns/owner=other")
    );
    assert!(publisher.expect(1, "plan").out.contains("owner \"other\""));
    for command in [
        "adopt",
        "transfer-owner --from nobody --to me",
        "adopt missing.example.org",
    ] {
        let said = publisher.expect(1, command);
        assert!(said.errors.contains("matches"), "{command}: {said:?}");
    }
    publisher.expect(0, "transfer-owner --from other --to me a.example.org");
    let handed_back = publisher.expect(0, "retire --keep-records");
    assert!(
        handed_back
            .out
            .contains("= a.example.org 60 A 192.0.2.1: remains without an owner"),
        "{handed_back:?}"
    );
    let zone = server.transfer("example.org");
    assert!(
        zone.contains("192.0.2.1") && zone.contains("192.0.2.9") && !zone.contains("heritage"),
        "{zone}"
    );
}

#[test]
fn unavailable_provider_is_named() {
    let server = NameServer::start(Program::Bind);
    let publisher = Publisher::of(&server);
    publisher.endpoints("web", &[("a.example.org", "192.0.2.1")]);
    publisher.write(
        "documents/azure.yml",
        "apiVersion: bosh-dns-publish/v1\nkind: DNSUpdateRecord\nmetadata: {name: azure}\n\
         spec: {provider: azure, selector: dnsprovider=bind}\n",
    );
    for command in ["check", "apply"] {
        let said = publisher.expect(1, command);
        assert!(
            said.errors
                .contains("default/azure: azure-config-file is missing"),
            "{said:?}"
        );
    }
    publisher.write(
        "documents/azure.yml",
        "apiVersion: bosh-dns-publish/v1\nkind: DNSUpdateRecord\nmetadata: {name: azure}\n\
         spec: {provider: azure, selector: dnsprovider=bind, external-dns-parameters: {azure-config-file: /etc/azure.json}}\n",
    );
    let said = publisher.expect(1, "check");
    let start =
        "`external-dns --webhook-server --provider=azure --azure-config-file=/etc/azure.json`";
    assert!(
        said.errors.contains(start) && said.errors.contains("webhook-provider-url"),
        "{said:?}"
    );
    // The failure leaves the other provider unaffected.
    assert!(server.transfer("example.org").contains("192.0.2.1"));
    let unknown = publisher.expect(1, "plan --provider shop/bind");
    assert!(
        unknown
            .errors
            .contains("existing ones: default/azure, default/bind"),
        "{unknown:?}"
    );
    let rendered = publisher.expect(0, "render --output manifests");
    assert_eq!(rendered.out.lines().count(), 4, "{rendered:?}");
    let said = publisher.expect(1, "status");
    assert!(
        said.errors.contains("is `bosh-dns-publish run` running?"),
        "{said:?}"
    );
}

#[test]
fn alert_rules_hold() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/prometheus");
    let mut promtool = std::process::Command::new("promtool");
    promtool
        .args(["test", "rules", "publish-rules_test.yml"])
        .current_dir(folder);
    assert!(crate::process::run(&mut promtool, "").contains("SUCCESS"));
}

#[test]
fn misspelt_settings_fail_the_check() {
    let server = NameServer::start(Program::Bind);
    let publisher = Publisher::of(&server);
    publisher.endpoints("web", &[("a.example.org", "192.0.2.1")]);
    publisher.expect(0, "check");
    let plain = std::fs::read_to_string(publisher.path("publish.yml")).unwrap();
    publisher.write(
        "publish.yml",
        &format!(
            "{plain}provider_settings:\n  default/bind: {{rfc2136-min-tll: 60s, min-ttl: 60s}}\n  \
             default/bnd: {{min-ttl: 60s}}\n"
        ),
    );
    let said = publisher.expect(1, "check");
    for problem in [
        "provider_settings.default/bind.rfc2136-min-tll: unknown setting; did you mean \"rfc2136-min-ttl\"?",
        "provider_settings.default/bnd: there is no such DNS Update Record; did you mean \"default/bind\"?",
    ] {
        assert!(said.errors.contains(problem), "{problem}: {said:?}");
    }
    assert_eq!(said.errors.lines().count(), 2, "{said:?}");
}

#[test]
fn broken_deletions_are_reported_and_replaced() {
    let server = NameServer::start(Program::Knot);
    let publisher = Publisher::of(&server);
    publisher.endpoints(
        "web",
        &[
            ("a.example.org", "192.0.2.1"),
            ("b.example.org", "192.0.2.2"),
        ],
    );
    publisher.expect(0, "apply");
    std::fs::create_dir_all(publisher.path("state")).unwrap();
    publisher.write("state/deletions.json", "{\"default/bind\": [");
    publisher.endpoints("web", &[("a.example.org", "192.0.2.1")]);
    let said = publisher.expect(0, "apply");
    for part in [
        "deletions.json",
        "default/bind",
        "the guard counts from zero",
    ] {
        assert!(said.errors.contains(part), "{part}: {said:?}");
    }
    let saved: Value = crate::publisher::read(&publisher.path("state/deletions.json"));
    assert!(saved["default/bind"].is_object(), "{saved}");
    assert!(!publisher.expect(0, "apply").errors.contains("guard"));
}

#[test]
fn properties_that_route53_refuses_fail_the_check() {
    let publisher = Publisher::new();
    publisher.write(
        "documents/all.yml",
        "apiVersion: bosh-dns-publish/v1\nkind: DNSUpdateRecord\nmetadata: {name: r53}\n\
         spec: {provider: aws, selector: dnsprovider=r53, external-dns-parameters: {txt-owner-id: me}}\n---\n\
         apiVersion: externaldns.k8s.io/v1alpha1\nkind: DNSEndpoint\n\
         metadata: {name: w, labels: {dnsprovider: r53}}\nspec:\n  endpoints:\n  \
         - {dnsName: a.example.org, setIdentifier: x, targets: [192.0.2.1], providerSpecific: [{name: aws/weight, value: heavy}]}\n  \
         - {dnsName: b.example.org, setIdentifier: x, targets: [192.0.2.1], providerSpecific: [{name: aws/weight, value: '256'}]}\n  \
         - {dnsName: c.example.org, setIdentifier: x, targets: [192.0.2.1], providerSpecific: [{name: aws/weight, value: '255'}]}\n  \
         - {dnsName: d.example.org, setIdentifier: x, targets: [192.0.2.1], providerSpecific: [{name: aws/failover, value: first}]}\n",
    );
    let said = publisher.expect(1, "check");
    for problem in [
        "default/r53: a.example.org A: its property aws/weight is \"heavy\"; write a number from 0 to 255",
        "default/r53: b.example.org A: its property aws/weight is \"256\"",
        "default/r53: d.example.org A: its property aws/failover is \"first\"; write PRIMARY or SECONDARY",
    ] {
        assert!(said.errors.contains(problem), "{problem}: {said:?}");
    }
    assert!(!said.errors.contains("c.example.org"), "{said:?}");
}

#[test]
fn manual_names_exit_codes_and_files() {
    let manual = Publisher::new().expect(0, "man").out;
    for part in [
        "Exit codes",
        "found changes",
        "publish.env",
        "publish.d",
        "control.sock",
    ] {
        assert!(manual.replace('\\', "").contains(part), "{part}: {manual}");
    }
}

#[test]
fn default_targets_fill_empty_entries() {
    let server = NameServer::start(Program::Bind);
    let publisher = Publisher::of(&server);
    publisher.write(
        "documents/web.yml",
        "apiVersion: externaldns.k8s.io/v1alpha1\nkind: DNSEndpoint\nmetadata: {name: web, labels: {dnsprovider: bind}}\n\
         spec:\n  endpoints:\n  - {dnsName: a.example.org, recordTTL: 60, targets: []}\n  \
         - {dnsName: b.example.org, recordTTL: 60, targets: [192.0.2.9]}\n  \
         - {dnsName: c.example.org, recordTTL: 60, targets: [192.0.2.300]}\n",
    );
    let without = publisher.expect(1, "check");
    assert!(
        without
            .errors
            .contains("a.example.org: its entry has no target"),
        "{without:?}"
    );
    let plain = std::fs::read_to_string(publisher.path("publish.yml")).unwrap();
    let settings = |more: &str| {
        let settings =
            format!("provider_settings: {{default/bind: {{default-targets: '{more}}}}}\n");
        publisher.write("publish.yml", &format!("{plain}{settings}"));
    };
    settings("192.0.2.1, 2001:db8::1'");
    let said = publisher.expect(1, "check");
    assert_eq!(
        said.errors.lines().count(),
        1,
        "only the invalid target: {said:?}"
    );
    publisher.expect(1, "apply");
    let zone = server.transfer("example.org");
    assert!(
        zone.contains("192.0.2.1\n")
            && zone.contains("2001:db8::1\n")
            && zone.contains("192.0.2.9\n"),
        "{zone}"
    );
    assert!(
        !zone.contains("c.example.org"),
        "a damaged entry is no empty one: {zone}"
    );
    settings("192.0.2.2', force-default-targets: 'true'");
    publisher.expect(1, "apply");
    let zone = server.transfer("example.org");
    assert_eq!(zone.matches("192.0.2.2\n").count(), 2, "{zone}");
    assert!(
        !zone.contains("192.0.2.9\n") && !zone.contains("2001:db8::1\n"),
        "{zone}"
    );
    settings("x.example.net, y.example.net'");
    assert!(
        publisher
            .expect(1, "check")
            .errors
            .contains("default-targets")
    );
}

#[test]
fn settings_narrow_publication() {
    let zones = vec!["example.org", "2.0.192.in-addr.arpa"];
    let server = NameServer::with(
        Program::Bind,
        Options {
            zones,
            ..Options::default()
        },
    );
    let publisher = Publisher::of(&server);
    publisher.provider(
        &server,
        &json!({"rfc2136-zone": "example.org, 2.0.192.in-addr.arpa"}),
    );
    let settings = json!({
        "managed-record-types": "A, AAAA, MX, DNAME",
        "exclude-record-types": "AAAA",
        "regex-domain-filter": "(^|[.])[amdx][.]example[.]org$|in-addr",
        "regex-domain-exclusion": "^x[.]",
        // As in external-dns, a number is one of seconds, and a record with a TTL keeps it.
        "min-ttl": "300",
        "create-ptr": "true",
    });
    let config = json!({
        "documents": ["documents"],
        "store": "state/store",
        "control": {"socket": "control.sock"},
        "provider_settings": {"default/bind": settings},
    });
    publisher.write("publish.yml", &config.to_string());
    let wanted = |name: &str, kind: &str, target: &str| json!({"dnsName": name, "recordType": kind, "targets": [target]});
    let mut own_ttl = wanted("m.example.org", "MX", "10 mail.example.net");
    own_ttl["recordTTL"] = 60.into();
    let document = json!({
        "apiVersion": "externaldns.k8s.io/v1alpha1",
        "kind": "DNSEndpoint",
        "metadata": {"name": "all", "labels": {"dnsprovider": "bind"}},
        "spec": {"endpoints": [
            wanted("a.example.org", "A", "192.0.2.1"),
            wanted("a.example.org", "AAAA", "2001:db8::1"),
            own_ttl,
            wanted("d.example.org", "DNAME", "example.net"),
            wanted("b.example.org", "A", "192.0.2.2"),
            wanted("x.example.org", "A", "192.0.2.3"),
        ]},
    });
    publisher.write("documents/all.json", &document.to_string());
    // Exit code 1: wanted records are held back.
    let plan = publisher.expect(1, "plan").out;
    for held in [
        "# a.example.org AAAA: ",
        "# b.example.org A: ",
        "# x.example.org A: ",
    ] {
        assert!(plan.contains(held), "{held}: {plan}");
    }
    assert_eq!(
        publisher.call("apply").out,
        "default/bind: 4 names changed\n"
    );
    let (forward, reverse) = (
        server.transfer("example.org"),
        server.transfer("2.0.192.in-addr.arpa"),
    );
    let has = |zone: &str, words: &[&str]| {
        zone.lines()
            .any(|line| line.split_whitespace().eq(words.iter().copied()))
    };
    for words in [
        ["a.example.org.", "300", "IN", "A", "192.0.2.1"].as_slice(),
        &[
            "m.example.org.",
            "60",
            "IN",
            "MX",
            "10",
            "mail.example.net.",
        ],
        &["d.example.org.", "300", "IN", "DNAME", "example.net."],
    ] {
        assert!(has(&forward, words), "{words:?}: {forward}");
    }
    let pointer = [
        "1.2.0.192.in-addr.arpa.",
        "300",
        "IN",
        "PTR",
        "a.example.org.",
    ];
    assert!(has(&reverse, &pointer), "{reverse}");
    for absent in ["2001:db8::1", "192.0.2.2", "192.0.2.3"] {
        assert!(
            !forward.contains(absent) && !reverse.contains("x.example.org"),
            "{absent}: {forward}"
        );
    }
    assert_eq!(
        publisher.call("apply").out,
        "default/bind: 0 names changed\n"
    );
}
