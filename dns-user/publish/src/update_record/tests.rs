use std::collections::BTreeMap;

use serde_json::json;

use super::{intent::IntentOutcome, *};
use crate::text::{Problem, Problems, documents, parse};

fn read<T>(text: &str, read: impl FnOnce(&mut Fields<'_>) -> Option<T>) -> Result<T, Vec<String>> {
    let problems = Problems::of("body");
    let node = parse(documents(text)[0], &problems);
    let found = node.and_then(|node| read(&mut Reader::root(&node, &problems).fields()?));
    let problems = problems.into_vec();
    match found {
        Some(found) if problems.is_empty() => Ok(found),
        _ => Err(problems.iter().map(Problem::to_string).collect()),
    }
}

fn record(provider: &str, parameters: Value) -> Result<UpdateRecord, Vec<String>> {
    let body = json!({
        "metadata": {"name": "name_of_dns_information_record"},
        "spec": {"provider": provider, "external-dns-parameters": parameters},
    });
    read(&body.to_string(), UpdateRecord::read)
}

fn general_example() -> Value {
    json!({
        "contour-load-balancer": "heptio-contour/contour", "fqdn-template": "template",
        "combine-fqdn-annotation": true, "ignore-hostname-annotation": true, "compatibility": "mate",
        "publish-internal-services": true, "publish-host-ip": true, "service-type-filter": "all",
        "domain-filter": "example.com", "exclude-domains": "example.com", "zone-id-filter": "zone filter",
        "tls-ca": "tls ca path", "tls-client-cert": "tls client cert path",
        "tls-client-cert-key": "tls client cert key path", "policy": "sync", "registry": "txt",
        "txt-owner-id": "default", "txt-prefix": "custom string", "txt-cache-interval": "30s",
        "interval": "30s", "once": true, "dry-run": true, "log-format": "text", "metrics-address": ":7979",
        "log-level": "info",
    })
}

/// Returns the parameters of each provider in the document's example.
fn provider_example(provider: ProviderKind) -> Value {
    use ProviderKind::*;
    match provider {
        Webhook => json!({}),
        Aws | AwsServiceDiscovery => json!({
            "aws-zone-type": "public", "aws-zone-tags": "zone tags",
            "aws-assume-role": "arn:aws:iam::123455567:role/external-dns", "aws-batch-change-size": 1000,
            "aws-batch-change-interval": "1s", "aws-evaluate-target-health": true,
            "no-aws-evaluate-target-health": true, "aws-api-retries": 3, "aws-prefer-cname": true,
        }),
        Azure | AzureDns | AzurePrivateDns => json!({
            "azure-config-file": "/etc/kubernetes/azure.json", "azure-resource-group": "resource group",
            "azure-subscription-id": "subscription id", "azure-user-assigned-identity-client-id": "client id",
        }),
        CoreDns => json!({"coredns-prefix": "skydns"}),
        Rfc2136 => json!({
            "rfc2136-host": "host.sample.com", "rfc2136-zone": "", "rfc2136-insecure": false,
            "rfc2136-tsig-keyname": "tsig key", "rfc2136-tsig-secret": "tsig secret",
            "rfc2136-tsig-secret-alg": "tsig secret alg", "rfc2136-tsig-axfr": "axfr", "request-timeout": "30s",
        }),
    }
}

#[test]
fn document_examples_are_accepted() {
    for provider in ProviderKind::ALL {
        let mut parameters = general_example();
        let own = provider_example(provider);
        parameters
            .as_object_mut()
            .unwrap()
            .extend(own.as_object().unwrap().clone());
        let record = record(provider.name(), parameters.clone()).unwrap();
        assert_eq!(
            record.to_json()["spec"]["external-dns-parameters"],
            parameters,
            "{provider:?}"
        );
    }
}

#[test]
fn userdata_reads_in_both_spellings() {
    let both = |first: &str, second: &str| {
        let body = json!({
            "metadata": {"name": "r", "description": "d", first: "one", second: "two"},
            "spec": {"provider": "coredns"},
        });
        read(&body.to_string(), UpdateRecord::read)
    };
    for (first, second) in [("userdata1", "userdata2"), ("userData1", "userData2")] {
        let metadata = both(first, second).unwrap().metadata;
        assert_eq!(metadata.user_data1.as_deref(), Some("one"));
        assert_eq!(metadata.user_data2.as_deref(), Some("two"));
        let written = metadata.to_json("userdata");
        assert_eq!(
            written,
            json!({"name": "r", "description": "d", "userdata1": "one", "userdata2": "two"})
        );
    }
    assert!(
        both("userdata1", "userData1").unwrap_err()[0]
            .contains("keep one of userdata1 and userData1")
    );
}

#[test]
fn wrong_types_are_refused_with_remedy() {
    for (provider, name, value, reason) in [
        (
            "coredns",
            "coredns-prefix",
            json!(1),
            "1 instead of text; put it in quotes: \"1\"",
        ),
        (
            "coredns",
            "once",
            json!("true"),
            "the text \"true\" instead of true or false",
        ),
        (
            "aws",
            "aws-batch-change-size",
            json!("1000"),
            "the text \"1000\" instead of a whole number",
        ),
        (
            "aws",
            "aws-batch-change-size",
            json!(-1),
            "-1 is out of range",
        ),
        (
            "aws",
            "aws-zone-type",
            json!("both"),
            "use one of public, private",
        ),
        (
            "aws",
            "coredns-prefix",
            json!("skydns"),
            "not a parameter of the provider aws",
        ),
        (
            "coredns",
            "policy",
            json!("Sync"),
            "use one of sync, upsert-only, create-only",
        ),
        (
            "coredns",
            "interval",
            json!("30"),
            "use a number with a unit",
        ),
        (
            "coredns",
            "domain-filters",
            json!("a"),
            "did you mean \"domain-filter\"?",
        ),
        (
            "coredns",
            "provider",
            json!("aws"),
            "it differs from spec.provider",
        ),
    ] {
        let problems = record(provider, json!({name: value})).unwrap_err();
        assert_eq!(problems.len(), 1, "{problems:?}");
        let path = format!("body:1: spec.external-dns-parameters.{name}: ");
        assert!(
            problems[0].starts_with(&path) && problems[0].contains(reason),
            "{problems:?}"
        );
    }
    assert!(record("route53", json!({})).unwrap_err()[0].contains("use one of aws, aws-sd, azure"));
    assert!(record("coredns", json!({"provider": "coredns"})).is_ok());
}

#[test]
fn bad_names_are_refused() {
    for name in ["", "a/b", "-a", "a b", "ä", &"a".repeat(64)] {
        let body = json!({"metadata": {"name": name}, "spec": {"provider": "coredns"}});
        assert!(
            read(&body.to_string(), UpdateRecord::read).is_err(),
            "{name}"
        );
    }
}

#[test]
fn defaults_match_document() {
    let record = record("rfc2136", json!({})).unwrap();
    for (name, default) in [
        ("contour-load-balancer", Some("heptio-contour/contour")),
        ("service-type-filter", Some("all")),
        ("policy", Some("sync")),
        ("registry", Some("txt")),
        ("txt-owner-id", Some("default")),
        ("interval", Some("1m")),
        ("log-format", Some("text")),
        ("log-level", Some("info")),
        ("txt-prefix", None),
        ("metrics-address", None),
    ] {
        let texts = record.parameters.texts();
        assert_eq!(texts.text(name), default, "{name}");
    }
    assert_eq!(
        record.to_json()["spec"]["external-dns-parameters"],
        json!({})
    );
}

#[test]
fn obstacles_are_named() {
    for (provider, parameters, wanted) in [
        ("azure", json!({}), "azure-config-file is missing"),
        (
            "coredns",
            json!({"domain-filter": " "}),
            "domain-filter is empty",
        ),
        (
            "azure-private-dns",
            json!({}),
            "azure-subscription-id is missing",
        ),
        (
            "rfc2136",
            json!({"rfc2136-host": "h", "rfc2136-zone": "z", "rfc2136-tsig-secret-alg": "gss-tsig"}),
            "the provider rfc2136 does not support GSS-TSIG",
        ),
        (
            "rfc2136",
            json!({"rfc2136-host": "h", "rfc2136-zone": "z"}),
            "rfc2136-tsig-keyname is missing",
        ),
        (
            "rfc2136",
            provider_example(ProviderKind::Rfc2136),
            "rfc2136-zone is missing",
        ),
        (
            "rfc2136",
            provider_example(ProviderKind::Rfc2136),
            "rfc2136-tsig-secret is not base64",
        ),
        (
            "rfc2136",
            provider_example(ProviderKind::Rfc2136),
            "rfc2136-tsig-secret-alg is \"tsig secret alg\"",
        ),
        (
            "coredns",
            json!({"registry": "aws-sd"}),
            "registry aws-sd is not available",
        ),
    ] {
        let obstacles = record(provider, parameters).unwrap().obstacles();
        assert!(
            obstacles.iter().any(|obstacle| obstacle.contains(wanted)),
            "{provider}: {obstacles:?}"
        );
        assert!(
            !obstacles
                .iter()
                .any(|obstacle| obstacle.contains("tsig secret\"")),
            "{obstacles:?}"
        );
    }
    for (provider, parameters) in [
        ("aws", json!({})),
        ("coredns", json!({})),
        (
            "rfc2136",
            json!({"rfc2136-host": "h", "rfc2136-zone": "z", "rfc2136-insecure": true}),
        ),
        (
            "rfc2136",
            json!({"rfc2136-host": "h", "rfc2136-zone": "z", "rfc2136-tsig-keyname": "k",
                           "rfc2136-tsig-secret": "c2VjcmV0", "rfc2136-tsig-secret-alg": "HMAC-SHA512."}),
        ),
    ] {
        assert_eq!(
            record(provider, parameters).unwrap().obstacles(),
            [] as [String; 0]
        );
    }
}

#[test]
fn parameters_without_effect_are_reported() {
    let record = record(
        "aws",
        json!({"compatibility": "mate", "log-level": "debug", "policy": "sync",
        "aws-evaluate-target-health": true, "no-aws-evaluate-target-health": true}),
    )
    .unwrap();
    let remarks = record.remarks();
    assert_eq!(remarks.len(), 3, "{remarks:?}");
    assert!(
        remarks[0].starts_with("compatibility has no effect here: ")
            && remarks[0].contains("Kubernetes")
    );
    assert!(remarks[1].starts_with("log-level has no effect here: "));
    assert!(remarks[2].contains("the latter wins"));
}

#[test]
fn document_list_reads_back() {
    let body = json!({
        "metadata": {
            "name": "dns-update-record-list",
            "description": "list of the DNS update records associated with this logical-cloud or cluster",
            "userData1": "<user data>", "userData2": "<user data>",
        },
        "spec": {"kv": [{"key1": "dns-update-record-1"}, {"key2": "dns-update-record-47"}]},
    });
    let list = read(&body.to_string(), RecordList::read).unwrap();
    assert_eq!(
        list.records(),
        ["dns-update-record-1", "dns-update-record-47"]
    );
    assert_eq!(list.to_json(), body);
    let other = body
        .to_string()
        .replace("dns-update-record-list", "other-list");
    assert!(
        read(&other, RecordList::read).unwrap_err()[0].contains("name it dns-update-record-list")
    );
}

fn lists() -> BTreeMap<ListOwner, RecordList> {
    let list = |records: &[&str]| RecordList {
        metadata: Metadata {
            name: RecordList::NAME.to_owned(),
            ..Metadata::default()
        },
        pairs: records
            .iter()
            .map(|record| ("key".to_owned(), (*record).to_owned()))
            .collect(),
    };
    let cluster = |name: &str| ListOwner::Cluster {
        provider: "p".to_owned(),
        name: name.to_owned(),
    };
    BTreeMap::from([
        (
            ListOwner::LogicalCloud {
                project: "shop".to_owned(),
                name: "lc1".to_owned(),
            },
            list(&["route53", "gone"]),
        ),
        (cluster("edge1"), list(&["bind", "etcd"])),
        (cluster("edge2"), list(&["bind"])),
    ])
}

fn intent(spec: Value) -> Intent {
    let body = json!({"metadata": {"name": "front"}, "spec": spec});
    read(&body.to_string(), Intent::read).unwrap()
}

#[test]
fn domain_selects_the_list() {
    let intent = intent(json!({
        "app": "front", "externalName": "Shop", "publicDomain": "example.org", "localDomain": "corp.example",
        "ttl": 60,
        "placements": [{"logicalCloud": "lc1", "clusters": [
            {"cluster": "p/edge1", "publicAddresses": ["192.0.2.1", "2001:db8::1"], "localAddresses": ["10.0.0.1"]},
            {"cluster": "p/edge2", "publicAddresses": ["192.0.2.2"], "localAddresses": ["10.0.0.2"]},
            {"cluster": "p/edge3", "localAddresses": ["10.0.0.3"]},
        ]}],
    }));
    let IntentOutcome { bindings, problems } =
        intent.bindings("shop", &lists(), |name| name != "gone");
    let shown: Vec<_> = bindings
        .iter()
        .flat_map(|(name, records)| {
            records
                .iter()
                .map(move |record| format!("{name}: {record}"))
        })
        .collect();
    assert_eq!(
        shown,
        [
            "bind: shop.corp.example 60 A 10.0.0.1,10.0.0.2",
            "etcd: shop.corp.example 60 A 10.0.0.1",
            "route53: shop.example.org 60 A 192.0.2.1,192.0.2.2",
            "route53: shop.example.org 60 AAAA 2001:db8::1",
        ]
    );
    assert_eq!(problems.len(), 2, "{problems:?}");
    assert!(
        problems[0].contains("names DNS Update Record \"gone\""),
        "{problems:?}"
    );
    assert!(
        problems[1].starts_with("cluster p/edge3 has no dns-update-record-list"),
        "{problems:?}"
    );
    assert_eq!(
        read(&intent.to_json().to_string(), Intent::read).unwrap(),
        intent
    );
}

#[test]
fn intent_needs_a_domain() {
    for spec in [
        json!({"app": "a"}),
        json!({"app": "a", "externalName": "shop"}),
        json!({"app": "a", "externalName": "shop", "publicDomain": "example.org"}),
    ] {
        assert_eq!(
            intent(spec).bindings("shop", &lists(), |_| true),
            IntentOutcome::default()
        );
    }
    let body =
        json!({"metadata": {"name": "i"}, "spec": {"app": "a", "publicDomain": "example.org"}});
    assert!(read(&body.to_string(), Intent::read).unwrap_err()[0].contains("add externalName"));
}

#[test]
fn host_name_stands_alone_in_an_intent() {
    let with = |addresses: Value| {
        intent(json!({
            "app": "a", "externalName": "shop", "publicDomain": "example.org",
            "placements": [{"logicalCloud": "lc1", "clusters": [{"cluster": "p/x", "publicAddresses": addresses}]}],
        }))
        .bindings("shop", &lists(), |name| name == "route53")
    };
    let alone = with(json!(["lb.example.com"]));
    assert_eq!(
        alone.bindings[0].1[0].to_string(),
        "shop.example.org 0 CNAME lb.example.com"
    );
    let beside = with(json!(["lb.example.com", "192.0.2.1"]));
    assert_eq!(beside.bindings, []);
    assert!(
        beside
            .problems
            .iter()
            .any(|problem| problem.contains("cannot be combined")),
        "{beside:?}"
    );
    assert!(
        with(json!([]))
            .problems
            .iter()
            .any(|problem| problem.contains("no cluster has an address"))
    );
}

#[test]
fn identifiers_are_valid_in_kubernetes() {
    for (text, expected) in [
        ("a", true),
        ("A.b_c-9", true),
        (&"a".repeat(63), true),
        (&"a".repeat(64), false),
        ("", false),
        ("-a", false),
        ("a-", false),
        (".a", false),
        ("a_", false),
        ("a b", false),
        ("a/b", false),
        ("aéb", false),
    ] {
        assert_eq!(is_identifier(text), expected, "{text}");
    }
}

#[test]
fn records_select_endpoints_by_label() {
    let labels = |pairs: &[(&str, &str)]| -> Labels {
        pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    };
    let mut by_name = record("coredns", json!({})).unwrap();
    by_name.metadata.name = "etcd".to_owned();
    for (given, expected) in [
        (labels(&[("dnsprovider", "etcd")]), true),
        (labels(&[("dnsprovider", "other")]), false),
        (labels(&[]), false),
    ] {
        assert_eq!(by_name.selects(&given), expected);
    }
    let body = json!({"metadata": {"name": "etcd"}, "spec": {"provider": "coredns", "selector": "tier in (a, b)"}});
    let selecting = read(&body.to_string(), UpdateRecord::read).unwrap();
    assert!(selecting.selects(&labels(&[("tier", "b")])));
    assert!(!selecting.selects(&labels(&[("dnsprovider", "etcd")])));
    assert_eq!(
        selecting.to_json(),
        json!({"metadata": {"name": "etcd"},
               "spec": {"provider": "coredns", "external-dns-parameters": {}, "selector": "tier in (a,b)"}})
    );
}

#[test]
fn metadata_is_returned_as_written() {
    let body = json!({
        "metadata": {"name": "etcd", "description": "d", "userdata1": "u1", "userData2": "u2", "labels": {}},
        "spec": {"provider": "coredns", "external-dns-parameters": {"once": true, "coredns-prefix": "p", "txt-prefix": null}},
    });
    let record = read(&body.to_string(), UpdateRecord::read).unwrap();
    let expected = json!({
        "metadata": {"name": "etcd", "description": "d", "userdata1": "u1", "userdata2": "u2"},
        "spec": {"provider": "coredns", "external-dns-parameters": {"once": true, "coredns-prefix": "p"}},
    });
    assert_eq!(record.to_json(), expected);
    assert_eq!(record.metadata.to_json("userData")["userData2"], "u2");
    let twice = json!({"metadata": {"name": "a", "userdata1": "x", "userData1": "y"}, "spec": {"provider": "coredns"}});
    assert_eq!(
        read(&twice.to_string(), UpdateRecord::read).unwrap_err(),
        ["body:1: metadata.userData1: userdata1 is also set; keep one of userdata1 and userData1"]
    );
}

#[test]
fn parameters_have_texts_and_defaults() {
    let record = record(
        "coredns",
        json!({"once": true, "dry-run": false, "txt-prefix": " ", "interval": "30s", "coredns-prefix": "p"}),
    )
    .unwrap();
    let parameters = &record.parameters;
    for (name, text) in [
        ("interval", Some("30s")),
        ("coredns-prefix", Some("p")),
        ("txt-prefix", None),
        ("policy", Some("sync")),
        ("once", Some("true")),
        ("zone-id-filter", None),
        ("unknown", None),
    ] {
        assert_eq!(parameters.texts().text(name), text, "{name}");
    }
    for (name, is_set, is_blank) in [
        ("once", true, false),
        ("dry-run", false, false),
        ("txt-prefix", false, true),
        ("interval", false, false),
        ("domain-filter", false, false),
    ] {
        assert_eq!(
            (parameters.is_set(name), parameters.is_blank(name)),
            (is_set, is_blank),
            "{name}"
        );
    }
    assert_eq!(parameters.interval(), Duration::from_secs(30));
    assert_eq!(
        DocumentParameters::default().interval(),
        Duration::from_mins(1)
    );
    let texts = parameters.texts().0;
    for (name, text) in [
        ("once", "true"),
        ("dry-run", "false"),
        ("txt-prefix", " "),
        ("policy", "sync"),
        ("txt-owner-id", "default"),
    ] {
        assert_eq!(texts[name], text);
    }
    assert!(!texts.contains_key("zone-id-filter"));
    let names: Vec<&str> = parameters
        .iter()
        .map(|(parameter, _)| parameter.name)
        .collect();
    assert_eq!(
        names,
        [
            "coredns-prefix",
            "dry-run",
            "interval",
            "once",
            "txt-prefix"
        ]
    );
}

#[test]
fn contradictions_are_obstacles() {
    let obstacles = |parameters: Value| record("coredns", parameters).unwrap().obstacles();
    for (parameters, expected) in [
        (json!({}), vec![]),
        (
            json!({"domain-filter": " ", "exclude-domains": ""}),
            vec![
                "domain-filter is empty, which filters nothing; name domains, or remove it",
                "exclude-domains is empty, which filters nothing; name domains, or remove it",
            ],
        ),
        (
            json!({"registry": "aws-sd"}),
            vec![
                "registry aws-sd is not available in bosh-dns-publish; use txt or noop, or run external-dns itself \
                 (bosh-dns-publish render)",
            ],
        ),
    ] {
        assert_eq!(obstacles(parameters), expected);
    }
}

#[test]
fn intents_and_lists_are_checked() {
    let intent = |spec: Value| {
        let body = json!({"metadata": {"name": "i"}, "spec": spec});
        read(&body.to_string(), Intent::read).map(|intent| intent.ttl)
    };
    for (ttl, expected) in [
        (json!(1), Ok(Some(1))),
        (json!(2_147_483_647_u32), Ok(Some(2_147_483_647))),
        (
            json!(0),
            Err("0 is out of range; give a whole number from 1 to 2147483647"),
        ),
        (
            json!(2_147_483_648_u32),
            Err("2147483648 is out of range; give a whole number from 1 to 2147483647"),
        ),
    ] {
        let found = intent(json!({"app": "a", "ttl": ttl}));
        assert_eq!(
            found,
            expected.map_err(|reason| vec![format!("body:1: spec.ttl: {reason}")])
        );
    }
    for (spec, expected) in [
        (
            json!({"app": "a", "localDomain": "d"}),
            "spec: domain is set, but not externalName; add externalName",
        ),
        (
            json!({"app": "a", "externalName": "a..b"}),
            "spec.externalName: \"a..b\" is not a domain name: it has an empty label; remove the extra dot; use a domain \
             name",
        ),
        (
            json!({"app": "a", "placements": [{"logicalCloud": "l"}]}),
            "spec.placements[0]: member \"clusters\" is missing; add \"clusters\"",
        ),
        (
            json!({"app": "a", "placements": [{"logicalCloud": "l", "clusters": [{"cluster": "p/a/b"}]}]}),
            "spec.placements[0].clusters[0].cluster: \"p/a/b\" is not a cluster; write it as PROVIDER/NAME",
        ),
        (
            json!({"app": "a", "placements": [{"logicalCloud": "l", "clusters": [{"cluster": "p/a", "x": 1}]}]}),
            "spec.placements[0].clusters[0].x: unknown member \"x\"; remove it; known members are cluster, \
             publicAddresses, localAddresses",
        ),
    ] {
        assert_eq!(intent(spec).unwrap_err(), [format!("body:1: {expected}")]);
    }
    let list = |spec: Value| {
        let body = json!({"metadata": {"name": "dns-update-record-list"}, "spec": spec});
        read(&body.to_string(), RecordList::read)
    };
    let pairs = list(json!({"kv": [{"a": "x", "b": "y"}, {"c": "x"}]})).unwrap();
    assert_eq!(pairs.records(), ["x", "y"]);
    assert_eq!(
        pairs.to_json(),
        json!({"metadata": {"name": "dns-update-record-list"},
               "spec": {"kv": [{"a": "x"}, {"b": "y"}, {"c": "x"}]}})
    );
    assert_eq!(
        list(json!({"kv": [{"a": "x y"}], "more": 1}))
            .unwrap_err()
            .len(),
        1,
        "the rest is not read"
    );
    assert_eq!(
        list(json!({"kv": [], "more": 1})).unwrap_err(),
        ["body:1: spec.more: unknown member \"more\"; remove it; known members are kv"]
    );
    for (owner, shown) in [
        (
            ListOwner::LogicalCloud {
                project: "shop".to_owned(),
                name: "lc".to_owned(),
            },
            "logical cloud lc of project shop",
        ),
        (
            ListOwner::Cluster {
                provider: "p".to_owned(),
                name: "edge".to_owned(),
            },
            "cluster p/edge",
        ),
    ] {
        assert_eq!(owner.to_string(), shown);
    }
}
