//! Links between certificates and providers, as stated in a BOSH manifest.

use serde_json::Value;

use crate::san::{Consumed, Ids, Link, Names, Options, Purpose, SanError};

/// Looks up the ids of a link's provider for the short form; the error says how to supply them.
pub type FindIds<'a> = &'a dyn Fn(&str, &Provider) -> Result<Ids, String>;

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

/// Reasons why a manifest yields no names.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The manifest is not valid YAML.
    #[error("{0}")]
    Yaml(String),
    /// A variable's link has no provider or yields no name.
    #[error("variable {variable}: {problem}")]
    Variable {
        /// Name of the manifest's variable.
        variable: String,
        /// Cause of the failure, and a remedy.
        problem: String,
    },
}

/// Returns the variables of type `certificate`, in manifest order. `find_ids` is called if the
/// manifest's features select short names.
pub fn variables(text: &str, domain: &str, find_ids: FindIds<'_>) -> Result<Vec<Variable>, ManifestError> {
    let manifest: Value =
        serde_saphyr::from_str(text).map_err(|error| ManifestError::Yaml(error.to_string()))?;
    let mut all = Vec::new();
    for variable in list(&manifest["variables"]) {
        let name = variable["name"].as_str().unwrap_or("(without a name)").to_owned();
        let failed = |problem: String| ManifestError::Variable { variable: name.clone(), problem };
        let consumes = variable["consumes"].as_object();
        let kind = variable["type"].as_str().unwrap_or_default();
        if kind != "certificate" {
            if consumes.is_some() {
                return Err(failed(SanError::VariableType(kind.to_owned()).to_string()));
            }
            continue;
        }
        let options = match &variable["options"] {
            Value::Null => Options::default(),
            options => serde_json::from_value(options.clone()).map_err(|error| failed(error.to_string()))?,
        };
        let consumed = consumes.into_iter().flatten().map(|(consumer, link)| {
            let purpose = Purpose::parse(consumer).map_err(|error| error.to_string())?;
            let wildcard = link["properties"]["wildcard"].as_bool().unwrap_or(false);
            Ok(Consumed { purpose, link: consumed_link(&manifest, link, domain, find_ids)?, wildcard })
        });
        let consumed = consumed.collect::<Result<Vec<_>, String>>().map_err(failed)?;
        let names = Names::of(&options, &consumed).map_err(|error| failed(error.to_string()))?;
        all.push(Variable { name, names });
    }
    Ok(all)
}

/// Returns the link that a consumer refers to by `from`, or its manual address.
fn consumed_link(
    manifest: &Value,
    consumer: &Value,
    domain: &str,
    find_ids: FindIds<'_>,
) -> Result<Link, String> {
    if let Some(address) = consumer["address"].as_str() {
        return Ok(Link::Manual(address.to_owned()));
    }
    let from = consumer["from"].as_str().ok_or("a consumer needs `from` or `address`")?;
    let provider = provider(manifest, from)?;
    let is_short = provider.uses_link_group || manifest["features"]["use_short_dns_addresses"] == true;
    let ids = if is_short { Some(find_ids(from, &provider)?) } else { None };
    let Provider { instance_group, network, deployment, uses_link_group: _ } = provider;
    Ok(Link::Group { instance_group, network, deployment, domain: domain.to_owned(), ids })
}

/// Finds the provider of a link.
fn provider(manifest: &Value, link: &str) -> Result<Provider, String> {
    let provides_it = |group: &&Value| list(&group["jobs"]).iter().any(|job| provides(job, link));
    let group = list(&manifest["instance_groups"]).iter().find(provides_it).ok_or_else(|| {
        format!("no job provides {link:?}; add it to `provides` of a job, or correct `from`")
    })?;
    let networks = list(&group["networks"]);
    let default_of = |kind: &str| {
        networks.iter().find(|network| list(&network["default"]).iter().any(|default| default == kind))
    };
    let network = default_of("addressable").or_else(|| default_of("dns")).or(networks.first());
    let text = |value: Option<&Value>, what: &str| {
        let text = value.and_then(Value::as_str).map(str::to_owned);
        text.ok_or(format!("{what} of the provider of {link:?} has no name"))
    };
    Ok(Provider {
        instance_group: text(group.get("name"), "the instance group")?,
        network: text(network.and_then(|network| network.get("name")), "the network")?,
        deployment: text(manifest.get("name"), "the deployment")?,
        uses_link_group: manifest["features"]["use_link_dns_names"] == true,
    })
}

/// Returns whether a job provides a link of this name: the alias in `as`, or the link's own name
/// without one.
fn provides(job: &Value, name: &str) -> bool {
    let stated = job["provides"].as_object();
    let renamed = stated.into_iter().flatten().any(|(own, provide)| match provide["as"].as_str() {
        Some(alias) => alias == name,
        None => own == name && provide.is_object(),
    });
    let custom = list(&job["custom_provider_definitions"]).iter().any(|definition| {
        let own = definition["name"].as_str();
        own == Some(name)
            && stated.and_then(|stated| stated.get(name)).is_none_or(|provide| provide["as"].is_null())
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
    fn no_ids(link: &str, _: &Provider) -> Result<Ids, String> {
        Err(format!("ids of {link} are asked for"))
    }

    #[test]
    fn features_select_short_names() {
        let find_ids = |link: &str, provider: &Provider| {
            assert_eq!(
                (link, provider.instance_group.as_str()),
                ("my-custom-app-server-address", "server_ig")
            );
            Ok(Ids { network: 3, group: if provider.uses_link_group { 9 } else { 7 } })
        };
        for (feature, name) in
            [("use_short_dns_addresses", "q-n3s0.q-g7.bosh"), ("use_link_dns_names", "q-n3s0.q-g9.bosh")]
        {
            let manifest = MANIFEST.replace("wildcard: true", "wildcard: false");
            let text = format!("features: {{ {feature}: true }}\n{manifest}");
            let variables = variables(&text, "bosh", &find_ids).unwrap();
            assert_eq!(variables[1].names.dns, ["custom-record.appservers.cf.local", name]);
            let error = super::variables(&text, "bosh", &no_ids).unwrap_err().to_string();
            assert!(error.starts_with("variable app_server_cert: ids of"), "{error}");
        }
    }

    #[test]
    fn document_example_gives_names() {
        let variables = variables(MANIFEST, "bosh", &no_ids).unwrap();
        let names = &variables[1].names;
        assert_eq!(names.common_name.as_deref(), Some("Application Server"));
        assert_eq!(names.dns, ["custom-record.appservers.cf.local", "*.server-ig.default.app-service.bosh"]);
        assert_eq!(names.addresses, ["172.158.20.255".parse::<std::net::IpAddr>().unwrap()]);
        assert_eq!(variables[2].names.common_name.as_deref(), Some("db.example.org"));
    }

    #[test]
    fn wrong_consumers_are_explained() {
        for (from, to, expected) in [
            ("    common_name: { from", "    address: { from", "is not a valid consumer"),
            ("from: my-custom-app-server-address }", "from: nothing }", "no job provides \"nothing\""),
            ("name: manual\n  type: certificate", "name: manual\n  type: ssh", "only type certificate"),
        ] {
            let error = variables(&MANIFEST.replace(from, to), "bosh", &no_ids).unwrap_err().to_string();
            assert!(error.starts_with("variable ") && error.contains(expected), "{error}");
        }
    }
}
