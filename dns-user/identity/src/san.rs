//! Names of link providers in certificates (seed document 000): the address without criteria, as
//! consumed by a variable of type `certificate`; and the links between certificates and providers, as stated in a
//! BOSH manifest.

use std::net::IpAddr;

use anyhow::{Context as _, anyhow, bail};
use serde::Deserialize;
use serde_json::Value;

use crate::profile::{MAX_COMMON_NAME, is_dns_name};
use dns_core::link_address::{AddressGroup, Criteria, FirstLabel, LinkAddress, canonical};

/// The provider of a link of type `address`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Link {
    /// Instances of the fleet.
    Group {
        /// Instance group, as in the manifest.
        instance_group: String,
        /// Network of the group.
        network: String,
        /// Deployment of the instance group.
        deployment: String,
        /// Domain, such as `bosh`.
        domain: String,
        /// Ids of network and group; present for the short form.
        ids: Option<Ids>,
    },
    /// A manual link: its address as written.
    Manual(String),
}

/// Ids for the short form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ids {
    /// Id of the network.
    pub network: u64,
    /// Id of the instance group, or of the link's group with `use_link_dns_names`.
    pub group: u64,
}

/// A link that a variable consumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Consumed {
    /// Purpose of the address, which selects its form.
    pub purpose: Purpose,
    /// Link provider that the name belongs to.
    pub link: Link,
    /// Whether `*` replaces the first label.
    pub wildcard: bool,
}

/// Purposes for which a certificate can consume a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Appended to the SANs.
    AlternativeName,
    /// Used as the common name, unless the options set one.
    CommonName,
}

/// Names that a variable's `options` set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Options {
    /// Common name of the certificate's subject.
    #[serde(default)]
    pub common_name: Option<String>,
    /// SANs: names and addresses.
    #[serde(default)]
    pub alternative_names: Vec<String>,
}

/// Names of the generated certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// Common name of the certificate's subject.
    pub common_name: Option<String>,
    /// SANs of type dNSName.
    pub dns: Vec<String>,
    /// SANs of type iPAddress.
    pub addresses: Vec<IpAddr>,
}

impl Purpose {
    /// Parses the name of a consumer.
    pub fn parse(name: &str) -> anyhow::Result<Self> {
        match name {
            "alternative_name" => Ok(Self::AlternativeName),
            "common_name" => Ok(Self::CommonName),
            other => {
                bail!("{other:?} is not a valid consumer; alternative_name and common_name are")
            }
        }
    }
}

impl Link {
    /// Returns the name for a certificate, or the wildcard. A manual address never becomes one.
    pub fn name(&self, wildcard: bool) -> anyhow::Result<String> {
        match self {
            Self::Manual(address) if is_dns_name(address) || address.parse::<IpAddr>().is_ok() => {
                Ok(address.clone())
            }
            Self::Manual(address) => Err(not_a_name(address)),
            Self::Group {
                instance_group,
                network,
                deployment,
                domain,
                ids,
            } => {
                let instance_group = canonical_label("instance group", instance_group)?;
                let network = canonical_label("network", network)?;
                let deployment = canonical_label("deployment", deployment)?;
                let group = match ids {
                    Some(ids) => AddressGroup::Id(ids.group.to_string()),
                    None => AddressGroup::Names {
                        instance_group,
                        network,
                        deployment,
                    },
                };
                // The short form has the network's id in the query, the long one its name as a
                // label.
                let networks = ids.iter().map(|ids| ids.network).collect();
                let query = FirstLabel::Query(Criteria {
                    networks,
                    ..Criteria::default()
                });
                let first = if wildcard {
                    FirstLabel::Wildcard
                } else {
                    query
                };
                Ok(LinkAddress {
                    group,
                    first,
                    domain: domain.clone(),
                }
                .to_string())
            }
        }
    }
}

fn canonical_label(what: &str, name: &str) -> anyhow::Result<String> {
    canonical(name).map_err(|cause| anyhow!("{what} {name:?}: {cause}; rename it"))
}

impl Names {
    /// Returns the names of a variable of type `certificate`, including the links that it consumes.
    pub fn of(options: &Options, consumed: &[Consumed]) -> anyhow::Result<Self> {
        let mut names = Self {
            common_name: options.common_name.clone(),
            ..Self::default()
        };
        // As in BOSH, the names of links are added to those of the options.
        for name in &options.alternative_names {
            names.add(name)?;
        }
        for Consumed {
            purpose,
            link,
            wildcard,
        } in consumed
        {
            let name = link.name(*wildcard)?;
            match purpose {
                Purpose::AlternativeName => names.add(&name)?,
                Purpose::CommonName => {
                    // In BOSH, a link does not override the common name of the options.
                    names.common_name.get_or_insert(name);
                }
            }
        }
        match names.common_name {
            Some(name) if name.chars().count() > MAX_COMMON_NAME => {
                bail!(
                    "common name {name:?} is longer than 64 characters (X.520); use alternative_name"
                )
            }
            _ => Ok(names),
        }
    }

    fn add(&mut self, name: &str) -> anyhow::Result<()> {
        match name.parse() {
            // Tried first, because an IPv4 address also has the form of a DNS name.
            Ok(address) => self.addresses.push(address),
            Err(_) if is_dns_name(name) => self.dns.push(name.to_owned()),
            Err(_) => return Err(not_a_name(name)),
        }
        Ok(())
    }
}

fn not_a_name(text: &str) -> anyhow::Error {
    anyhow!("{text:?} is neither a DNS name nor an IP address")
}

//----------- Manifest -------------------------------------------------------

/// Looks up the ids of a link's provider for the short form; the error says how to supply them.
pub type FindIds<'a> = &'a dyn Fn(&str, &Provider) -> anyhow::Result<Ids>;

/// The provider of a link, as a manifest describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Provider {
    /// Instance group of the job that provides the link.
    pub instance_group: String,
    /// Network of the group whose addresses the link uses.
    pub network: String,
    /// Name of the deployment.
    pub deployment: String,
    /// Whether the short form uses the id of the link's own group (`use_link_dns_names`).
    pub uses_link_group: bool,
}

/// A variable of type `certificate` with the names of its certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    /// Name of the variable.
    pub name: String,
    /// Names from its options and the links that it consumes.
    pub names: Names,
}

/// Returns the variables of type `certificate`, in manifest order. `find_ids` is called if the
/// manifest's features select short names.
pub fn variables(text: &str, domain: &str, find_ids: FindIds<'_>) -> anyhow::Result<Vec<Variable>> {
    let manifest: Value = serde_saphyr::from_str(text).map_err(|error| anyhow!("{error}"))?;
    let mut all = Vec::new();
    for variable in list(&manifest["variables"]) {
        let name = variable["name"].as_str().unwrap_or("(without a name)");
        let names = names_of(&manifest, variable, domain, find_ids)
            .map_err(|problem| anyhow!("variable {name}: {problem}"))?;
        if let Some(names) = names {
            let name = name.to_owned();
            all.push(Variable { name, names });
        }
    }
    Ok(all)
}

/// Returns the names of a certificate; `None` for a variable of another type.
fn names_of(
    manifest: &Value,
    variable: &Value,
    domain: &str,
    find_ids: FindIds<'_>,
) -> anyhow::Result<Option<Names>> {
    let consumes = variable["consumes"].as_object();
    let kind = variable["type"].as_str().unwrap_or_default();
    if kind != "certificate" {
        // BOSH defines consumers for certificates only.
        if consumes.is_some() {
            bail!("variable of type {kind:?} cannot consume links; only type certificate can");
        }
        return Ok(None);
    }
    let options = match &variable["options"] {
        Value::Null => Options::default(),
        options => serde_json::from_value(options.clone())?,
    };
    let mut consumed = Vec::new();
    for (consumer, link) in consumes.into_iter().flatten() {
        consumed.push(Consumed {
            purpose: Purpose::parse(consumer)?,
            link: consumed_link(manifest, link, domain, find_ids)?,
            wildcard: link["properties"]["wildcard"].as_bool().unwrap_or(false),
        });
    }
    Names::of(&options, &consumed).map(Some)
}

/// Returns the link that a consumer refers to by `from`, or its manual address.
fn consumed_link(
    manifest: &Value,
    consumer: &Value,
    domain: &str,
    find_ids: FindIds<'_>,
) -> anyhow::Result<Link> {
    if let Some(address) = consumer["address"].as_str() {
        return Ok(Link::Manual(address.to_owned()));
    }
    let from = consumer["from"]
        .as_str()
        .context("a consumer needs `from` or `address`")?;
    let provider = provider(manifest, from)?;
    let is_short =
        provider.uses_link_group || manifest["features"]["use_short_dns_addresses"] == true;
    let ids = if is_short {
        Some(find_ids(from, &provider)?)
    } else {
        None
    };
    let Provider {
        instance_group,
        network,
        deployment,
        uses_link_group: _,
    } = provider;
    Ok(Link::Group {
        instance_group,
        network,
        deployment,
        domain: domain.to_owned(),
        ids,
    })
}

fn provider(manifest: &Value, link: &str) -> anyhow::Result<Provider> {
    let mut groups = list(&manifest["instance_groups"]).iter();
    let group = groups.find(|group| list(&group["jobs"]).iter().any(|job| provides(job, link)));
    let group = group.with_context(|| {
        format!("no job provides {link:?}; add it to `provides` of a job, or correct `from`")
    })?;
    let networks = list(&group["networks"]);
    let network = default_of(networks, "addressable")
        .or_else(|| default_of(networks, "dns"))
        .or(networks.first());
    Ok(Provider {
        instance_group: named(Some(group), link, "the instance group")?,
        network: named(network, link, "the network")?,
        deployment: named(Some(manifest), link, "the deployment")?,
        uses_link_group: manifest["features"]["use_link_dns_names"] == true,
    })
}

fn named(part: Option<&Value>, link: &str, what: &str) -> anyhow::Result<String> {
    let name = part.and_then(|part| part["name"].as_str());
    let name = name.with_context(|| format!("{what} of the provider of {link:?} has no name"))?;
    Ok(name.to_owned())
}

/// Returns the network that a group declares as its default of a kind.
fn default_of<'a>(networks: &'a [Value], kind: &str) -> Option<&'a Value> {
    for network in networks {
        for default in list(&network["default"]) {
            if default == kind {
                return Some(network);
            }
        }
    }
    None
}

/// Returns whether a job provides a link of this name: the alias in `as`, or the link's own name without one.
fn provides(job: &Value, name: &str) -> bool {
    let stated = job["provides"].as_object();
    let renamed = stated
        .into_iter()
        .flatten()
        .any(|(own, provide)| match provide["as"].as_str() {
            Some(alias) => alias == name,
            // `nil` in place of an object withdraws the link.
            None => own == name && provide.is_object(),
        });
    let custom = list(&job["custom_provider_definitions"])
        .iter()
        .any(|definition| {
            let own = definition["name"].as_str();
            // The link of a custom definition exists without an entry in `provides`, which may only
            // rename it.
            own == Some(name)
                && stated
                    .and_then(|stated| stated.get(name))
                    .is_none_or(|provide| provide["as"].is_null())
        });
    renamed || custom
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
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
        let consumed = |purpose, name: &str| Consumed {
            purpose,
            link: Link::Manual(name.to_owned()),
            wildcard: false,
        };
        let links = [
            consumed(Purpose::CommonName, "c.x"),
            consumed(Purpose::AlternativeName, "d.x"),
            consumed(Purpose::AlternativeName, "fd00::1"),
            consumed(Purpose::CommonName, "e.x"),
        ];
        let expected = |common_name: &str| Names {
            common_name: Some(common_name.to_owned()),
            dns: ["a.x", "*.b.x", "d.x"].map(str::to_owned).to_vec(),
            addresses: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
        };
        assert_eq!(Names::of(&options(None), &links).unwrap(), expected("c.x"));
        assert_eq!(
            Names::of(&options(Some("é".repeat(64).as_str())), &links).unwrap(),
            expected(&"é".repeat(64))
        );
        let long = "é".repeat(65);
        assert_eq!(
            Names::of(&options(Some(&long)), &links)
                .unwrap_err()
                .to_string(),
            format!(
                "common name {long:?} is longer than 64 characters (X.520); use alternative_name"
            )
        );
        let wrong = Options {
            common_name: None,
            alternative_names: vec!["a b".to_owned()],
        };
        assert_eq!(
            Names::of(&wrong, &[]).unwrap_err().to_string(),
            "\"a b\" is neither a DNS name nor an IP address"
        );
        assert_eq!(
            Names::of(&Options::default(), &[]).unwrap(),
            Names::default()
        );
        for (name, purpose) in [
            ("alternative_name", Purpose::AlternativeName),
            ("common_name", Purpose::CommonName),
        ] {
            assert_eq!(Purpose::parse(name).unwrap(), purpose);
        }
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
}
