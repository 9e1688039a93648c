use super::*;

fn config() -> Config {
    let text = br#"{"consul": {"node_name": "here", "advertise_addr": "10.0.0.1"}}"#;
    Config::of_document("config.json", text)
        .whole()
        .unwrap()
        .unwrap()
        .0
}

const HCL: &str = r#"
        service {
          name = "web"
          port = 80
          tags = ["v1", "eu"]
          weights = { passing = 10, warning = 1 }
          check {
            id     = "up"
            status = "warning"
          }
        }
        service {
          name    = "db"
          id      = "db-1"
          address = "10.0.0.9"
          meta { tier = "gold" }
        }
        check { id = "disk" }
        check {
          id         = "slow"
          service_id = "db-1"
          status     = "critical"
        }
    "#;

const JSON: &str = r#"{
        "services": [
            {"name": "web", "port": 80, "tags": ["v1", "eu"], "weights": {"passing": 10, "warning": 1},
             "check": {"id": "up", "status": "warning"}},
            {"Name": "db", "ID": "db-1", "Address": "10.0.0.9", "Meta": {"tier": "gold"}}
        ],
        "checks": [{"id": "disk"}, {"id": "slow", "service_id": "db-1", "status": "critical"}]
    }"#;

#[test]
fn hcl_and_json_say_the_same() {
    let hcl = Definitions::read([("a.hcl", HCL.as_bytes())], &config())
        .whole()
        .unwrap();
    let json = Definitions::read([("a.json", JSON.as_bytes())], &config())
        .whole()
        .unwrap();
    assert_eq!(hcl, json);
    let Registrations {
        nodes, instances, ..
    } = hcl.registrations;
    assert_eq!(
        (nodes[0].name.as_str(), nodes[0].address.as_str()),
        ("here", "10.0.0.1")
    );
    assert_eq!(
        nodes[0].checks,
        [Check {
            id: "disk".to_owned(),
            status: CheckStatus::Passing
        }]
    );
    assert_eq!(
        (instances[0].id.as_str(), instances[0].checks[0].status),
        ("web", CheckStatus::Warning)
    );
    assert_eq!(instances[1].checks[0].status, CheckStatus::Critical);
    assert_eq!(hcl.warnings, Vec::<String>::new());
}

#[test]
fn common_forms_are_accepted() {
    for (text, name, port) in [
        ("service { name = \"a\" port = 80 }", "a", 80),
        ("service {\n name = \"a\",\n port = 1\n}", "a", 1),
        (
            "service {\n \"name\" = \"a\"\n \"port\" = 1\n meta { \"version\" = \"1\" }\n}",
            "a",
            1,
        ),
        (
            "service {\n name = \"a\"\n port = 1\n tags = [\"urlprefix-${HOST}/a\"]\n}",
            "a",
            1,
        ),
        (
            "service {\n name = \"a\"\n port = 1\n weights { passing = 5 warning = 1 }\n}",
            "a",
            1,
        ),
        (
            "service {\n name = \"a\"\n port = 8300\n connect { sidecar_service {} }\n}",
            "a",
            8300,
        ),
        (
            "tls { defaults { verify_incoming = true } }\nservice {\n name = \"a\"\n port = 1\n}",
            "a",
            1,
        ),
        (
            "services { name = \"a\" port = \"1\" }\nservices { name = \"b\" }",
            "a",
            1,
        ),
        (
            "services = [{ name = \"a\", port = 1, check = { status = \"\" } }]",
            "a",
            1,
        ),
        (r#" {"service": {"name": "a", "port": 1}}"#, "a", 1),
    ] {
        let definitions = Definitions::read([("a.hcl", text.as_bytes())], &config()).whole();
        let definitions = definitions.unwrap_or_else(|error| panic!("{text}: {error}"));
        let first = &definitions.registrations.instances[0];
        assert_eq!((first.service.as_str(), first.port), (name, port), "{text}");
        let ignored: Vec<&str> = definitions.ignored.iter().map(String::as_str).collect();
        let settings = ["a.hcl: settings of Consul's agent, ignored: tls"];
        assert_eq!(
            ignored,
            if text.contains("tls") {
                &settings[..]
            } else {
                &[]
            },
            "{text}"
        );
    }
}

#[test]
fn agent_settings_alone_are_no_error() {
    let text = "datacenter = \"dc1\"\nretry_join = [\"10.0.0.1\"]\nconnect { enabled = true }\n";
    let definitions = Definitions::read([("consul.hcl", text.as_bytes())], &config())
        .whole()
        .unwrap();
    assert_eq!(definitions.registrations.instances, []);
    let expected =
        "consul.hcl: settings of Consul's agent, ignored: datacenter, retry_join, connect";
    assert_eq!(
        (definitions.ignored, definitions.warnings),
        (vec![expected.to_owned()], Vec::new())
    );
}

#[test]
fn names_of_the_http_api_are_read() {
    let text = br#"{"service": {"Name": "a", "TaggedAddresses": {"lan": {"Address": "10.0.0.9", "Port": 7}},
            "Connect": {"SidecarService": {"Port": 9}}, "Meta": {"ServiceID": "x"},
            "Checks": [{"CheckID": "up", "Status": "warning"}]}, "Check": {"ServiceID": "a", "CheckID": "b"}}"#;
    let definitions = Definitions::read([("a.json", &text[..])], &config())
        .whole()
        .unwrap();
    let [instance, sidecar] = &definitions.registrations.instances[..] else {
        panic!("two instances")
    };
    assert_eq!(
        (instance.tagged_addresses["lan"].port, sidecar.port),
        (7, 9)
    );
    let ids: Vec<&str> = instance
        .checks
        .iter()
        .map(|check| check.id.as_str())
        .collect();
    assert_eq!(
        (ids, instance.meta["ServiceID"].as_str()),
        (vec!["up", "b"], "x")
    );
}

#[test]
fn sidecars_are_registered() {
    let hcl =
        "service {\n name = \"web\"\n tags = [\"v1\"]\n connect {\n sidecar_service {}\n }\n}\n";
    let json = r#"{"services": [{"name": "db", "id": "db-1",
            "connect": {"sidecar_service": {"port": 7, "tags": ["own"]}}}]}"#;
    let files = [("a.hcl", hcl.as_bytes()), ("b.json", json.as_bytes())];
    let instances = Definitions::read(files, &config())
        .whole()
        .unwrap()
        .registrations
        .instances;
    let proxies: Vec<_> = instances
        .iter()
        .map(|one| {
            (
                one.id.as_str(),
                one.service.as_str(),
                one.port,
                one.proxy_for.as_deref(),
                one.tags.join(" "),
            )
        })
        .collect();
    assert_eq!(
        proxies[1],
        (
            "web-sidecar-proxy",
            "web-sidecar-proxy",
            21_000,
            Some("web"),
            "v1".to_owned()
        )
    );
    assert_eq!(
        proxies[3],
        (
            "db-1-sidecar-proxy",
            "db-sidecar-proxy",
            7,
            Some("db"),
            "own".to_owned()
        )
    );
}

#[test]
fn every_wrong_definition_is_reported() {
    let files = [
        (
            "a.json",
            &br#"{"services": [{"name": 1}, {"name": "a"}, {"port": 1}], "nodes": [{}]}"#[..],
        ),
        ("b.json", br#"{"service": {"name": "b"}}"#),
        ("c.hcl", b"service {"),
    ];
    let ParsedFiles { valid, errors } = Definitions::read(files, &config());
    let services: Vec<&str> = valid
        .registrations
        .instances
        .iter()
        .map(|one| &*one.service)
        .collect();
    assert_eq!(services, ["b"]);
    let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
    let expected = [
        "a.json: services[0].name: is 1",
        "a.json: services[2].name: is missing",
        "a.json: nodes[0].node: is missing",
        "c.hcl: is not HCL",
    ];
    assert_eq!(errors.len(), expected.len(), "{errors:?}");
    for (error, expected) in errors.iter().zip(expected) {
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn errors_name_file_and_place() {
    let read = |file, text: &str| Definitions::read([(file, text.as_bytes())], &config()).whole();
    let error = |file, text| read(file, text).unwrap_err().to_string();
    assert_eq!(
        error("a.json", r#"{"service": {"port": 80}}"#),
        "a.json: service[0].name: is missing"
    );
    let syntax = error("a.hcl", "service {\n name = \n}");
    assert!(
        syntax.starts_with("a.hcl: is not HCL: line 3, column 1: a value was expected"),
        "{syntax}"
    );
    let number = error("a.json", r#"{"services": [{"name": "a", "port": 70000}]}"#);
    assert!(
        number.starts_with("a.json: services[0].port: is 70000;"),
        "{number}"
    );
    let tagged = error(
        "a.json",
        r#"{"service": {"name": "a", "tagged_addresses": {"lan": {"port": -1}}}}"#,
    );
    assert!(
        tagged.starts_with("a.json: service[0].tagged_addresses.lan.port: is -1"),
        "{tagged}"
    );
    let lost = read("a.json", r#"{"service": {"name": "a", "node": "there"}}"#).unwrap();
    assert!(
        lost.warnings[0].contains("\"there\""),
        "{:?}",
        lost.warnings
    );
}

fn registered(text: &str, config: &Config) -> Definitions {
    Definitions::read([("a.json", text.as_bytes())], config)
        .whole()
        .unwrap()
}

#[test]
fn own_node_is_registered_when_it_is_needed() {
    let config_of = |text: &str| {
        let text = format!(r#"{{"consul": {text}}}"#);
        let read = Config::of_document("config.json", text.as_bytes());
        read.whole().unwrap().unwrap().0
    };
    let [unnamed, named, addressed] = [
        r#"{"advertise_addr": "10.0.0.1"}"#,
        r#"{"node_name": "here"}"#,
        r#"{"node_name": "here", "advertise_addr": "10.0.0.1"}"#,
    ]
    .map(config_of);
    let [nothing, service, elsewhere, own] = [
        "{}",
        r#"{"service": {"name": "a"}}"#,
        r#"{"nodes": [{"node": "n", "address": "10.0.0.2"}], "service": {"name": "a", "node": "n"}}"#,
        r#"{"nodes": [{"node": "Here", "address": "10.0.0.3"}], "service": {"name": "a"}}"#,
    ];
    for (config, text, nodes, warnings) in [
        (&unnamed, nothing, &[][..], 0),
        (&unnamed, service, &[], 1),
        (&named, nothing, &[], 0),
        (&named, service, &["here"], 1),
        (&named, elsewhere, &["n"], 0),
        (&addressed, nothing, &["here"], 0),
        (&addressed, elsewhere, &["n", "here"], 0),
        (&addressed, own, &["Here"], 0),
    ] {
        let found = registered(text, config);
        let names: Vec<&str> = found
            .registrations
            .nodes
            .iter()
            .map(|node| &*node.name)
            .collect();
        assert_eq!(names, nodes, "{text}");
        assert_eq!(found.warnings.len(), warnings, "{:?}", found.warnings);
    }
}

#[test]
fn failover_has_one_form() {
    let read = |failover: &str| {
        let text =
            format!(r#"{{"queries": [{{"id": "1", "service": "web", "failover": {failover}}}]}}"#);
        let read = Definitions::read([("a.json", text.as_bytes())], &config());
        let found = read.whole().map_err(|error| error.to_string())?;
        Ok::<_, String>(found.registrations.queries[0].failover.clone())
    };
    let dc2 = || FailoverTarget::Datacenter("dc2".to_owned());
    let east = FailoverTarget::Peer("east".to_owned());
    assert_eq!(read("{}"), Ok(Failover::default()));
    let found = read(r#"{"datacenters": ["dc2"]}"#).unwrap();
    assert_eq!((found.nearest, found.targets), (0, vec![dc2()]));
    let found = read(r#"{"targets": [{"peer": "east"}, {"datacenter": "dc2"}]}"#).unwrap();
    assert_eq!((found.nearest, found.targets), (0, vec![east, dc2()]));
    let both = read(r#"{"datacenters": ["dc2"], "targets": [{"peer": "east"}]}"#);
    assert!(both.unwrap_err().contains("cannot be combined"));
    for wrong in ["{}", r#"{"peer": "east", "datacenter": "dc2"}"#] {
        assert!(
            read(&format!(r#"{{"targets": [{wrong}]}}"#)).is_err(),
            "{wrong}"
        );
    }
}

#[test]
fn metadata_is_text() {
    let found = registered(
        r#"{"service": {"name": "a", "meta": {"text": "1", "number": 2.5, "is": true}}}"#,
        &config(),
    );
    let meta = &found.registrations.instances[0].meta;
    let pairs: Vec<(&str, &str)> = meta.iter().map(|(key, value)| (&**key, &**value)).collect();
    assert_eq!(pairs, [("is", "true"), ("number", "2.5"), ("text", "1")]);
    let wrong = br#"{"service": {"name": "a", "meta": {"list": []}}}"#;
    let errors = Definitions::read([("a.json", &wrong[..])], &config()).errors;
    assert!(
        errors[0].to_string().contains("meta.list: is not text"),
        "{errors:?}"
    );
}

#[test]
fn weights_are_one_without_a_word() {
    let weights = |text: &str| {
        let text = format!(r#"{{"service": {{"name": "a"{text}}}}}"#);
        let found = registered(&text, &config());
        let weights = &found.registrations.instances[0].weights;
        (weights.passing, weights.warning)
    };
    assert_eq!(weights(""), (1, 1));
    assert_eq!(weights(r#", "weights": {"passing": 7}"#), (7, 1));
    assert_eq!(
        weights(r#", "weights": {"passing": 0, "warning": 65535}"#),
        (0, 65535)
    );
}

const WHOLE: &str = r#"{
        "nodes": [
            {"node": "n1", "id": "11-22", "datacenter": "dc2", "address": "10.0.0.2",
             "tagged_addresses": {"wan": "192.0.2.2"}, "meta": {"rack": "r1"},
             "checks": {"check_id": "disk", "status": "warning"}},
            {"node": "p1", "peer": "east", "address": "10.0.0.3"}],
        "services": [
            {"node": "p1", "peer": "east", "name": "db"},
            {"service": "web", "id": "web-1", "address": "10.0.0.4", "port": "80",
             "ports": [{"name": "http", "port": 8080, "default": true}, {"name": "admin", "port": 9000}],
             "tags": ["v1"], "meta": {"tier": "gold"}, "weights": {"passing": 5, "warning": 2},
             "tagged_addresses": {"wan": {"address": "192.0.2.4", "port": 8081}, "lan": "10.0.0.5"},
             "check": {"id": "up", "status": "passing"},
             "checks": [{"id": "slow", "status": "critical"}, {}],
             "connect": {"native": true, "sidecar_service": {}}},
            {"name": "web-proxy", "port": 21001, "proxy": {"destination_service_name": "web"}}],
        "queries": [
            {"id": "q1", "service": "web"},
            {"id": "q2", "name": "geo-", "datacenter": "dc2", "service": "${match(1)}", "tags": ["a", "!b"],
             "only_passing": true, "ignore_check_ids": ["up"], "node_meta": {"rack": "r1"},
             "service_meta": {"tier": "gold"}, "connect": true, "near": "_agent", "dns_ttl": "1m30s",
             "failover": {"targets": {"peer": "east"}},
             "template": {"regexp": "^geo-(.*)$", "remove_empty_tags": true}},
            {"id": "q3", "service": "x", "template": {}}],
        "virtual_ips": [{"service": "web", "peer": "east", "ip": "240.0.0.1"}, {"service": "db", "ip": "[fd00::1]"}],
        "ingress": [{"gateway": "gw", "services": ["web", "*"]}],
        "datacenters": [{"name": "dc2"}, {"name": "dc3", "reachable": false}],
        "distance": {"n1": ["n1", "p1"], "Services": []}
    }"#;

fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    let owned = |&(key, value): &(&str, &str)| (key.to_owned(), value.to_owned());
    pairs.iter().map(owned).collect()
}

fn check_of(id: &str, status: CheckStatus) -> Check {
    let id = id.to_owned();
    Check { id, status }
}

#[test]
fn every_member_is_read() {
    let text = |text: &str| text.to_owned();
    let texts = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect();
    let found = registered(WHOLE, &config());
    assert_eq!(found.warnings, [""; 0]);
    assert_eq!(found.ignored, [""; 0]);
    let Registrations {
        nodes,
        instances,
        queries,
        virtual_addresses,
        gateways,
        datacenters,
        distances,
    } = found.registrations;
    let n1 = Node {
        name: text("n1"),
        id: text("11-22"),
        datacenter: text("dc2"),
        peer: None,
        address: text("10.0.0.2"),
        tagged_addresses: map(&[("wan", "192.0.2.2")]),
        meta: map(&[("rack", "r1")]),
        checks: vec![check_of("disk", CheckStatus::Warning)],
    };
    let p1 = Node {
        name: text("p1"),
        datacenter: text("dc1"),
        peer: Some(text("east")),
        address: text("10.0.0.3"),
        ..Node::default()
    };
    let here = Node {
        name: text("here"),
        datacenter: text("dc1"),
        address: text("10.0.0.1"),
        ..Node::default()
    };
    assert_eq!(nodes, [n1, p1, here].map(Arc::new));

    let db = Instance {
        node: text("p1"),
        peer: Some(text("east")),
        id: text("db"),
        service: text("db"),
        ..Instance::default()
    };
    let port = |name: &str, port, default| NamedPort {
        name: name.to_owned(),
        port,
        default,
    };
    let tagged = |address: &str, port| TaggedAddress {
        address: address.to_owned(),
        port,
    };
    let web = Instance {
        node: text("here"),
        peer: None,
        id: text("web-1"),
        service: text("web"),
        address: text("10.0.0.4"),
        port: 80,
        impossible_port: None,
        ports: vec![port("http", 8080, true), port("admin", 9000, false)],
        tags: texts(&["v1"]),
        meta: map(&[("tier", "gold")]),
        weights: Weights {
            passing: 5,
            warning: 2,
        },
        tagged_addresses: [
            (text("wan"), tagged("192.0.2.4", 8081)),
            (text("lan"), tagged("10.0.0.5", 0)),
        ]
        .into(),
        proxy_for: None,
        connect_native: true,
        checks: vec![
            check_of("up", CheckStatus::Passing),
            check_of("slow", CheckStatus::Critical),
            check_of("", CheckStatus::Passing),
        ],
    };
    // A sidecar has its service's tags, metadata and checks, and no address of its own.
    let sidecar = Instance {
        node: text("here"),
        id: text("web-1-sidecar-proxy"),
        service: text("web-sidecar-proxy"),
        port: 21_000,
        tags: texts(&["v1"]),
        meta: map(&[("tier", "gold")]),
        proxy_for: Some(text("web")),
        checks: web.checks.clone(),
        ..Instance::default()
    };
    let proxy = Instance {
        node: text("here"),
        id: text("web-proxy"),
        service: text("web-proxy"),
        port: 21_001,
        proxy_for: Some(text("web")),
        ..Instance::default()
    };
    assert_eq!(instances, [db, web, sidecar, proxy].map(Arc::new));

    let q1 = PreparedQuery {
        id: text("q1"),
        service: text("web"),
        ..PreparedQuery::default()
    };
    let q2 = PreparedQuery {
        id: text("q2"),
        name: text("geo-"),
        datacenter: Some(text("dc2")),
        service: text("${match(1)}"),
        tags: texts(&["a", "!b"]),
        only_passing: true,
        ignore_check_ids: texts(&["up"]),
        node_meta: map(&[("rack", "r1")]),
        service_meta: map(&[("tier", "gold")]),
        connect: true,
        near: text("_agent"),
        ttl: Some(90),
        failover: Failover {
            nearest: 0,
            targets: vec![FailoverTarget::Peer(text("east"))],
        },
        template: Some(Template {
            regexp: text("^geo-(.*)$"),
            remove_empty_tags: true,
        }),
    };
    let q3 = PreparedQuery {
        id: text("q3"),
        service: text("x"),
        template: Some(Template::default()),
        ..PreparedQuery::default()
    };
    assert_eq!(queries, [q1, q2, q3]);
    let virtual_address = |service: &str, peer: Option<&str>, address: &str| VirtualAddress {
        service: service.to_owned(),
        peer: peer.map(str::to_owned),
        address: address.parse().unwrap(),
    };
    assert_eq!(
        virtual_addresses,
        [
            virtual_address("web", Some("east"), "240.0.0.1"),
            virtual_address("db", None, "fd00::1"),
        ]
    );
    let gateway = Gateway {
        gateway: text("gw"),
        services: texts(&["web", "*"]),
    };
    assert_eq!(gateways, [gateway]);
    let datacenter = |name: &str, reachable| Datacenter {
        name: name.to_owned(),
        reachable,
    };
    assert_eq!(
        datacenters,
        [datacenter("dc2", true), datacenter("dc3", false)]
    );
    assert_eq!(
        distances,
        [
            (text("n1"), texts(&["n1", "p1"])),
            (text("Services"), texts(&[]))
        ]
        .into()
    );
}

#[test]
fn sidecars_define_uninherited_values() {
    let parent = r#""name": "web", "address": "10.0.0.9", "port": 80, "tags": ["v1"],
            "ports": [{"name": "http", "port": 8080}], "weights": {"passing": 5},
            "tagged_addresses": {"lan": "10.0.0.5"}, "connect": {"native": true, "sidecar_service": "#;
    let own = r#"{"id": "s", "name": "side", "address": "10.0.0.8", "port": 7,
            "tags": ["v2"], "meta": {"a": "b"}}}"#;
    let text = format!(
        r#"{{"services": [{{{parent}{own}}}, {{{parent}{{}}}}}}, {{{parent}{{"port": 0}}}}}}, {{{parent}null}}}}]}}"#
    );
    let found = registered(&text, &config()).registrations.instances;
    let shown = |one: &Arc<Instance>| {
        format!(
            "{} {} {} {} {} {} {:?} {} {:?}",
            one.service,
            one.id,
            one.address,
            one.port,
            one.ports.len(),
            one.weights.passing,
            one.tags,
            one.tagged_addresses.len(),
            one.meta
        )
    };
    let found: Vec<String> = found.iter().map(shown).collect();
    let parent = r#"web web 10.0.0.9 80 1 5 ["v1"] 1 {}"#;
    // Sidecars without a port get one after the other, from Consul's `sidecar_min_port`.
    assert_eq!(
        found,
        [
            parent,
            r#"side s 10.0.0.8 7 0 1 ["v2"] 0 {"a": "b"}"#,
            parent,
            r#"web-sidecar-proxy web-sidecar-proxy  21000 0 1 ["v1"] 0 {}"#,
            parent,
            r#"web-sidecar-proxy web-sidecar-proxy  21001 0 1 ["v1"] 0 {}"#,
            parent,
        ]
    );
    // Ports are counted over all files.
    let one = br#"{"service": {"name": "a", "connect": {"sidecar_service": {}}}}"#;
    let files = [("a.json", &one[..]), ("b.json", one), ("c.json", one)];
    let all = Definitions::read(files, &config()).whole().unwrap();
    let ports: Vec<u16> = all
        .registrations
        .instances
        .iter()
        .map(|one| one.port)
        .collect();
    assert_eq!(ports, [0, 21_000, 0, 21_001, 0, 21_002]);
}

#[test]
fn checks_belong_to_own_services() {
    let text = r#"{
            "nodes": [{"node": "n", "address": "10.0.0.2"}],
            "services": [{"name": "a", "node": "n"}, {"name": "a"}, {"name": "b"}],
            "check": {"service_id": "a", "id": "1", "status": "critical"},
            "checks": [{"id": "2"}, {"service_id": "c", "id": "3"}, {"service_id": "", "id": "4", "status": "warning"}]}"#;
    let found = registered(text, &config());
    let Registrations {
        nodes, instances, ..
    } = found.registrations;
    let checks: Vec<Vec<Check>> = instances.iter().map(|one| one.checks.clone()).collect();
    let critical = check_of("1", CheckStatus::Critical);
    assert_eq!(checks, [vec![], vec![critical], vec![]]);
    assert_eq!(nodes[0].checks, []);
    assert_eq!(
        nodes[1].checks,
        [
            check_of("2", CheckStatus::Passing),
            check_of("4", CheckStatus::Warning)
        ]
    );
    assert_eq!(
        found.warnings,
        ["a check belongs to service \"c\", which no file defines: it has no effect"]
    );
}

#[test]
fn services_without_names_are_explained() {
    let unnamed = Config::of_document("config.json", br#"{"consul": {}}"#);
    let unnamed = unnamed.whole().unwrap().unwrap().0;
    let named = Config::of_document("config.json", br#"{"consul": {"node_name": "here"}}"#);
    let named = named.whole().unwrap().unwrap().0;
    let nowhere = "service \"a\" (id \"1\") has no node, and therefore no names: set consul.node_name, or \
                   the service's node";
    let lost = "service \"a\" (id \"1\") is on node \"n\", which no file defines: it has no names";
    let bare =
        "neither service \"a\" (id \"1\") nor its node has an address: set consul.advertise_addr";
    let east = r#""nodes": [{"node": "N", "peer": "east", "address": "10.0.0.2"}],"#;
    for (config, nodes, service, expected) in [
        (&unnamed, "", "", &[nowhere][..]),
        (&named, "", "", &[bare]),
        (&named, "", r#", "address": "10.0.0.9""#, &[]),
        (&named, "", r#", "node": "n""#, &[lost]),
        (&named, east, r#", "node": "n""#, &[lost]),
        (&named, east, r#", "node": "n", "peer": "west""#, &[lost]),
        (&named, east, r#", "node": "n", "peer": "east""#, &[]),
    ] {
        let text = format!(r#"{{{nodes} "service": {{"name": "a", "id": "1"{service}}}}}"#);
        assert_eq!(registered(&text, config).warnings, expected, "{text}");
    }
}

#[test]
fn errors_are_exact() {
    let read = |file, bytes: &[u8]| {
        let ParsedFiles { valid, errors } = Definitions::read([(file, bytes)], &config());
        let nothing = Registrations {
            nodes: valid.registrations.nodes.clone(),
            ..Registrations::default()
        };
        assert_eq!(
            valid.registrations, nothing,
            "nothing of a wrong file is used"
        );
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        errors.join("\n")
    };
    let port = "expected a whole number from 0 to 65535";
    for (text, expected) in [
        (
            r#"{"distance": {"a": "b"}}"#,
            "distance.a: is not a list of nodes".to_owned(),
        ),
        (r#"{"virtual_ips": [{"service": "a"}]}"#, "virtual_ips[0].ip: is missing".to_owned()),
        (
            r#"{"virtual_ips": [{"service": "a", "ip": "b"}]}"#,
            "virtual_ips[0].ip: \"b\" is not an IP address".to_owned(),
        ),
        (r#"{"virtual_ips": [{"ip": "10.0.0.1"}]}"#, "virtual_ips[0].service: is missing".to_owned()),
        (r#"{"ingress": {"services": ["a"]}}"#, "ingress[0].gateway: is missing".to_owned()),
        (r#"{"datacenters": {}}"#, "datacenters[0].name: is missing".to_owned()),
        (r#"{"queries": {"id": "1"}}"#, "queries[0].service: is missing".to_owned()),
        (r#"{"queries": {"service": "1"}}"#, "queries[0].id: is missing".to_owned()),
        (r#"{"nodes": {"node": "1"}}"#, "nodes[0].address: is missing".to_owned()),
        (
            r#"{"queries": {"id": "1", "service": "a", "failover": {"targets": {}}}}"#,
            "queries[0].failover.targets[0].peer: set either datacenter or peer".to_owned(),
        ),
        (
            r#"{"queries": {"id": "1", "service": "a", "failover": {"targets": {"peer": "a"}, "datacenters": ["b"]}}}"#,
            "queries[0].failover.targets: cannot be combined with datacenters; list them as targets"
                .to_owned(),
        ),
        (
            r#"{"checks": [{"status": "up"}]}"#,
            "checks[0].status: \"up\" is unknown; expected one of \"\", \"passing\", \"warning\", \"critical\""
                .to_owned(),
        ),
        (r#"{"service": {"name": "a", "port": "x"}}"#, format!("service[0].port: is \"x\"; {port}")),
        (
            r#"{"service": {"name": "a", "port": "65536"}}"#,
            format!("service[0].port: is \"65536\"; {port}"),
        ),
        (
            r#"{"service": {"name": "a", "ports": {"name": "b", "port": 65536}}}"#,
            format!("service[0].ports[0].port: is 65536; {port}"),
        ),
        (
            r#"{"service": {"name": "a", "weights": {"passing": 65536}}}"#,
            format!("service[0].weights.passing: is 65536; {port}"),
        ),
        (
            r#"{"service": {"name": "a", "tagged_addresses": {"lan": 7}}}"#,
            "service[0].tagged_addresses.lan: is not an object with an address".to_owned(),
        ),
        (
            r#"{"nodes": {"node": "1", "address": "a", "tagged_addresses": {"lan": {}}}}"#,
            "nodes[0].tagged_addresses.lan: is not text".to_owned(),
        ),
        // Values that are no objects stay, as errors.
        (r#"{"service": 7}"#, "service: is 7; expected a list".to_owned()),
        (r#"{"services": [7]}"#, "services[0]: is 7; expected an object".to_owned()),
    ] {
        assert_eq!(read("a.json", text.as_bytes()), format!("a.json: {expected}"), "{text}");
    }
    assert_eq!(
        read("a.json", b"[]"),
        "a.json: is a list, not an object of settings"
    );
    assert_eq!(
        read("a.hcl", b"a = \"\xff\""),
        "a.hcl: is not UTF-8: invalid utf-8 sequence of 1 bytes from index 5"
    );
    assert_eq!(
        read("a.conf", b"a = 1"),
        "a.conf: is not JSON: expected value at line 1 column 1"
    );
    assert_eq!(
        read("a.hcl", b" \n{\"a\" = 1}"),
        "a.hcl: is not JSON: expected `:` at line 2 column 6"
    );
}

#[test]
fn blocks_and_lists_say_the_same() {
    let of = |text: &str| {
        let read = Definitions::read([("a.hcl", text.as_bytes())], &config());
        read.whole()
            .unwrap_or_else(|error| panic!("{text}: {error}"))
    };
    let one = of("service { name = \"a\" } service { name = \"b\" } check { id = \"c\" }");
    let names: Vec<&str> = one
        .registrations
        .instances
        .iter()
        .map(|one| &*one.service)
        .collect();
    assert_eq!(names, ["a", "b"]);
    for text in [
        "service = [{ name = \"a\" }, { name = \"b\" }] checks { id = \"c\" }",
        "Service { name = \"a\" } SERVICE = [{ Name = \"b\" }] check = { CheckID = \"c\" }",
        "services { service = \"a\" } services { Service = \"b\" } Checks = [{ ID = \"c\" }]",
        "service { name = \"a\" } services = [{ name = \"b\" }] check = [{ check_id = \"c\" }]",
    ] {
        assert_eq!(of(text), one, "{text}");
    }
    // Names are data below `meta`, `tagged_addresses` and `distance`.
    let data = of(
        "service { name = \"a\" meta { CheckID = 1 } TaggedAddresses { ServiceID { Address = \"b\" } } \
                   Proxy { DestinationServiceName = \"c\" } } \
                   distance { check = [\"d\"] Check = [\"e\"] }",
    );
    let instance = &data.registrations.instances[0];
    assert_eq!(instance.meta, map(&[("CheckID", "1")]));
    assert_eq!(instance.tagged_addresses["ServiceID"].address, "b");
    assert_eq!(instance.proxy_for.as_deref(), Some("c"));
    assert_eq!(data.registrations.distances.len(), 2);
    for (members, proxy_for) in [
        ("destination_service = \"x\"", "x"),
        (
            "destination_service = \"x\" destination_service_name = \"y\"",
            "x",
        ),
        (
            "destination_service = \"\" destination_service_name = \"y\"",
            "y",
        ),
    ] {
        let found = of(&format!("service {{ name = \"a\" proxy {{ {members} }} }}"));
        let found = &found.registrations.instances[0];
        assert_eq!(found.proxy_for.as_deref(), Some(proxy_for), "{members}");
    }
}

#[test]
fn agent_settings_are_listed_once() {
    let text = "a = 1 a = 2 b = 1 service { name = \"x\" } a = 3 Checks = []\n";
    let found = Definitions::read([("a.hcl", text.as_bytes()), ("b.hcl", b"c = 1")], &config());
    assert_eq!(
        found.whole().unwrap().ignored,
        [
            "a.hcl: settings of Consul's agent, ignored: a, b, a",
            "b.hcl: settings of Consul's agent, ignored: c"
        ]
    );
}
