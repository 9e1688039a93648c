//! Links between certificates and providers, as a BOSH manifest states them.

use serde_json::Value;

use crate::san::{Consumed, Link, Names, Options, Purpose, SanError};

/// A variable of type `certificate` with the names of its certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    /// Name of the variable.
    pub name: String,
    /// Names from its options and the links that it consumes.
    pub names: Names,
}

/// A manifest that does not give the names.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The manifest is not valid YAML.
    #[error("{0}")]
    Yaml(String),
    /// A variable's link leads nowhere or gives no name.
    #[error("variable {variable}: {problem}")]
    Variable {
        /// Name of the manifest's variable.
        variable: String,
        /// Cause of the failure, and a remedy.
        problem: String,
    },
}

/// Returns the variables of type `certificate`, in the order of the manifest.
pub fn variables(text: &str, domain: &str) -> Result<Vec<Variable>, ManifestError> {
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
            Ok(Consumed { purpose, link: provider(&manifest, link, domain)?, wildcard })
        });
        let consumed = consumed.collect::<Result<Vec<_>, String>>().map_err(failed)?;
        let names = Names::of(&options, &consumed).map_err(|error| failed(error.to_string()))?;
        all.push(Variable { name, names });
    }
    Ok(all)
}

/// Finds the provider that a consumer names by `from`, or its manual address.
fn provider(manifest: &Value, consumer: &Value, domain: &str) -> Result<Link, String> {
    if let Some(address) = consumer["address"].as_str() {
        return Ok(Link::Manual(address.to_owned()));
    }
    let from = consumer["from"].as_str().ok_or("a consumer needs `from` or `address`")?;
    if manifest["features"]["use_short_dns_addresses"] == true
        || manifest["features"]["use_link_dns_names"] == true
    {
        return Err("short names need ids, which the manifest lacks; use `san` with --network-id and \
                    --group-id"
            .to_owned());
    }
    for group in list(&manifest["instance_groups"]) {
        for job in list(&group["jobs"]) {
            if !provides(job, from) {
                continue;
            }
            let networks = list(&group["networks"]);
            let is_default = |network: &&Value| list(&network["default"]).iter().any(|kind| kind == "dns");
            let is_addressable =
                |network: &&Value| list(&network["default"]).iter().any(|kind| kind == "addressable");
            let network = networks
                .iter()
                .find(is_addressable)
                .or_else(|| networks.iter().find(is_default))
                .or(networks.first());
            let text = |value: Option<&Value>, what: &str| {
                let text = value.and_then(Value::as_str).map(str::to_owned);
                text.ok_or(format!("{what} of the provider of {from:?} has no name"))
            };
            return Ok(Link::Group {
                instance_group: text(group.get("name"), "the instance group")?,
                network: text(network.and_then(|network| network.get("name")), "the network")?,
                deployment: text(manifest.get("name"), "the deployment")?,
                domain: domain.to_owned(),
                ids: None,
            });
        }
    }
    Err(format!("no job provides {from:?}; add it to `provides` of a job, or correct `from`"))
}

/// Whether a job provides a link by this name: the alias in `as`, or its own without one.
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

    #[test]
    fn document_example_gives_names() {
        let variables = variables(MANIFEST, "bosh").unwrap();
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
            let error = variables(&MANIFEST.replace(from, to), "bosh").unwrap_err().to_string();
            assert!(error.starts_with("variable ") && error.contains(expected), "{error}");
        }
    }
}
