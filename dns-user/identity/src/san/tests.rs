use super::*;

/// The examples of seed document 000.
const MANIFEST: &str = r#"
name: app-service
instance_groups:
- name: server_ig
  networks: [{ name: default }]
  jobs:
  - name: app_server
    provides:
      app-server-address: { as: my-custom-app-server-address }
    custom_provider_definitions:
    - { name: app-server-address, type: address }
variables:
- { name: default_ca, type: certificate, options: { is_ca: true, common_name: Default CA } }
- { name: secret, type: password }
- name: app_server_cert
  type: certificate
  options:
    ca: default_ca
    common_name: "Application Server"
    alternative_names: [custom-record.appservers.cf.local, 172.158.20.255]
  consumes:
    alternative_name: { from: my-custom-app-server-address, properties: { wildcard: true } }
    common_name: { from: my-custom-app-server-address }
- name: manual
  type: certificate
  consumes:
    common_name: { address: db.example.org }
"#;

/// Fails the test: the manifest does not select short names.
fn no_ids(link: &str, _: &Provider) -> anyhow::Result<Ids> {
    anyhow::bail!("{link}: use --records")
}

#[test]
fn features_select_short_names() {
    let find_ids = |link: &str, provider: &Provider| {
        assert_eq!(
            (link, provider.instance_group.as_str()),
            ("my-custom-app-server-address", "server_ig")
        );
        Ok(Ids {
            network: 3,
            group: if provider.uses_link_group { 9 } else { 7 },
        })
    };
    for (feature, name) in [
        ("use_short_dns_addresses", "q-n3s0.q-g7.bosh"),
        ("use_link_dns_names", "q-n3s0.q-g9.bosh"),
    ] {
        let manifest = MANIFEST.replace("wildcard: true", "wildcard: false");
        let text = format!("features: {{ {feature}: true }}\n{manifest}");
        let variables = variables(&text, "bosh", &find_ids).unwrap();
        assert_eq!(
            variables[1].names.dns,
            ["custom-record.appservers.cf.local", name]
        );
        let error = super::variables(&text, "bosh", &no_ids)
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "variable app_server_cert: my-custom-app-server-address: use --records"
        );
    }
}

#[test]
fn document_example_gives_names() {
    let variables = variables(MANIFEST, "bosh", &no_ids).unwrap();
    let names = &variables[1].names;
    assert_eq!(names.common_name.as_deref(), Some("Application Server"));
    assert_eq!(
        names.dns,
        [
            "custom-record.appservers.cf.local",
            "*.server-ig.default.app-service.bosh"
        ]
    );
    assert_eq!(
        names.addresses,
        ["172.158.20.255".parse::<IpAddr>().unwrap()]
    );
    assert_eq!(
        variables[2].names.common_name.as_deref(),
        Some("db.example.org")
    );
}

#[test]
fn wrong_consumers_are_explained() {
    for (from, to, expected) in [
        (
            "    common_name: { from",
            "    address: { from",
            "is not a valid consumer",
        ),
        (
            "from: my-custom-app-server-address }",
            "from: nothing }",
            "no job provides \"nothing\"",
        ),
        (
            "name: manual\n  type: certificate",
            "name: manual\n  type: ssh",
            "only type certificate",
        ),
    ] {
        let error = variables(&MANIFEST.replace(from, to), "bosh", &no_ids)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("variable ") && error.contains(expected),
            "{error}"
        );
    }
}

#[test]
fn default_network_names_the_group() {
    let found = |networks: &str| {
        let manifest = MANIFEST.replace("[{ name: default }]", networks);
        let variables = variables(&manifest, "bosh", &no_ids).unwrap();
        variables[1].names.dns[1].clone()
    };
    for (networks, network) in [
        ("[{ name: a }, { name: b }]", "a"),
        ("[{ name: a }, { name: b, default: [dns, gateway] }]", "b"),
        (
            "[{ name: a, default: [dns] }, { name: b, default: [addressable] }]",
            "b",
        ),
        (
            "[{ name: a, default: [gateway] }, { name: b, default: [] }]",
            "a",
        ),
    ] {
        let expected = format!("*.server-ig.{network}.app-service.bosh");
        assert_eq!(found(networks), expected, "{networks}");
    }
}

fn error_of(manifest: &str) -> String {
    variables(manifest, "bosh", &no_ids)
        .unwrap_err()
        .to_string()
}

#[test]
fn names_of_links_are_canonical() {
    let link = |ids| Link::Group {
        instance_group: "Server_IG".to_owned(),
        network: "Default".to_owned(),
        deployment: "App".to_owned(),
        domain: "bosh".to_owned(),
        ids,
    };
    let ids = Some(Ids {
        network: 3,
        group: 7,
    });
    for (link, wildcard, name) in [
        (link(None), false, "q-s0.server-ig.default.app.bosh"),
        (link(None), true, "*.server-ig.default.app.bosh"),
        (link(ids), false, "q-n3s0.q-g7.bosh"),
        (link(ids), true, "*.q-g7.bosh"),
        (Link::Manual("db.x".to_owned()), true, "db.x"),
        (Link::Manual("fd00::1".to_owned()), false, "fd00::1"),
    ] {
        assert_eq!(link.name(wildcard).unwrap(), name);
    }
    let error = Link::Manual("a b".to_owned()).name(false).unwrap_err();
    assert_eq!(
        error.to_string(),
        "\"a b\" is neither a DNS name nor an IP address"
    );
    for (group, network, deployment, what) in [
        ("", "n", "d", "instance group \"\": "),
        ("g", "", "d", "network \"\": "),
        ("g", "n", "", "deployment \"\": "),
    ] {
        let link = Link::Group {
            instance_group: group.to_owned(),
            network: network.to_owned(),
            deployment: deployment.to_owned(),
            domain: "bosh".to_owned(),
            ids,
        };
        let error = link.name(false).unwrap_err().to_string();
        assert!(
            error.starts_with(what) && error.ends_with("; rename it"),
            "{error}"
        );
    }
}

#[test]
fn options_precede_links() {
    let options = |common_name: Option<&str>| Options {
        common_name: common_name.map(str::to_owned),
        alternative_names: ["a.x", "10.0.0.1", "*.b.x"].map(str::to_owned).to_vec(),
    };
    let names = |options: &Options| {
        let mut names = Names::of(options)?;
        for (consumer, name) in [
            ("common_name", "c.x"),
            ("alternative_name", "d.x"),
            ("alternative_name", "fd00::1"),
            ("common_name", "e.x"),
        ] {
            names.consume(consumer, &Link::Manual(name.to_owned()), false)?;
        }
        anyhow::Ok(names)
    };
    let expected = |common_name: &str| Names {
        common_name: Some(common_name.to_owned()),
        dns: ["a.x", "*.b.x", "d.x"].map(str::to_owned).to_vec(),
        addresses: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
    };
    assert_eq!(names(&options(None)).unwrap(), expected("c.x"));
    assert_eq!(
        names(&options(Some("é".repeat(64).as_str()))).unwrap(),
        expected(&"é".repeat(64))
    );
    let long = "é".repeat(65);
    assert_eq!(
        names(&options(Some(&long))).unwrap_err().to_string(),
        format!("common name {long:?} is longer than 64 characters (X.520); use alternative_name")
    );
    let wrong = Options {
        common_name: None,
        alternative_names: vec!["a b".to_owned()],
    };
    assert_eq!(
        Names::of(&wrong).unwrap_err().to_string(),
        "\"a b\" is neither a DNS name nor an IP address"
    );
    assert_eq!(Names::of(&Options::default()).unwrap(), Names::default());
}

#[test]
fn only_certificates_are_listed() {
    let variables = variables(MANIFEST, "bosh", &no_ids).unwrap();
    let names: Vec<&str> = variables
        .iter()
        .map(|variable| variable.name.as_str())
        .collect();
    assert_eq!(names, ["default_ca", "app_server_cert", "manual"]);
    assert_eq!(
        variables[0].names,
        Names {
            common_name: Some("Default CA".to_owned()),
            ..Names::default()
        }
    );
    assert_eq!(super::variables("{}", "bosh", &no_ids).unwrap(), []);
    for (from, to, expected) in [
        (
            "{ address: db.example.org }",
            "{}",
            "variable manual: a consumer needs `from` or `address`",
        ),
        (
            "- name: manual\n  type",
            "- type",
            "variable (without a name): \"a b\" is neither a DNS name nor an IP address",
        ),
        (
            "name: app-service",
            "title: app-service",
            "variable app_server_cert: the deployment of the provider of \"my-custom-app-server-address\" has no \
             name",
        ),
        (
            "- name: server_ig\n  networks",
            "- networks",
            "variable app_server_cert: the instance group of the provider of \"my-custom-app-server-address\" has \
             no name",
        ),
        (
            "[{ name: default }]",
            "[]",
            "variable app_server_cert: the network of the provider of \"my-custom-app-server-address\" has no name",
        ),
        (
            "type: password",
            "type: password, consumes: {}",
            "variable secret: variable of type \"password\" cannot consume links; only type certificate can",
        ),
        (
            "common_name: { from: my-custom-app-server-address }",
            "cn: { from: my-custom-app-server-address }",
            "variable app_server_cert: \"cn\" is not a valid consumer; alternative_name and common_name are",
        ),
        (
            "from: my-custom-app-server-address }\n",
            "from: other }\n",
            "variable app_server_cert: no job provides \"other\"; add it to `provides` of a job, or correct `from`",
        ),
    ] {
        let mut text = MANIFEST.replace(from, to);
        assert_ne!(text, MANIFEST, "{from}");
        if to == "- type" {
            text = text.replace("db.example.org", "a b");
        }
        assert_eq!(error_of(&text), expected);
    }
    assert!(super::variables("a: [", "bosh", &no_ids).is_err());
}

#[test]
fn last_name_finds_links() {
    let group = |job: &str| {
        let text = format!("name: d\ninstance_groups: [{{name: g, jobs: [{job}]}}]");
        let manifest: Value = serde_saphyr::from_str(&text).unwrap();
        let job = &manifest["instance_groups"][0]["jobs"][0];
        ["own", "alias"].map(|name| provides(job, name))
    };
    for (job, expected) in [
        ("{provides: {own: {as: alias}}}", [false, true]),
        ("{provides: {own: {shared: true}}}", [true, false]),
        ("{provides: {own: nil}}", [false, false]),
        ("{provides: {other: {}}}", [false, false]),
        (
            "{custom_provider_definitions: [{name: own}]}",
            [true, false],
        ),
        (
            "{provides: {own: {as: alias}}, custom_provider_definitions: [{name: own}]}",
            [false, true],
        ),
        (
            "{provides: {own: {shared: true}}, custom_provider_definitions: [{name: own}]}",
            [true, false],
        ),
        (
            "{provides: {other: {as: x}}, custom_provider_definitions: [{name: own}]}",
            [true, false],
        ),
        ("{}", [false, false]),
    ] {
        assert_eq!(group(job), expected, "{job}");
    }
}
