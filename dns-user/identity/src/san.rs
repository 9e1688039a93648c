//! Names of link providers in certificates (seed document 000): the address without criteria, as
//! consumed by a variable of type `certificate`; and the links between certificates and providers, as stated in a
//! BOSH manifest.

use std::net::IpAddr;

use anyhow::{Context as _, anyhow, bail, ensure};
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
    /// Returns the names of a variable's options.
    pub fn of(options: &Options) -> anyhow::Result<Self> {
        let mut names = Self::default();
        if let Some(name) = &options.common_name {
            names.set_common_name(name)?;
        }
        for name in &options.alternative_names {
            names.add(name)?;
        }
        Ok(names)
    }

    /// Adds the name of a link that a variable consumes; with `wildcard`, `*` replaces its first label.
    pub fn consume(&mut self, consumer: &str, link: &Link, wildcard: bool) -> anyhow::Result<()> {
        match consumer {
            // As in BOSH, the names of links are added to those of the options.
            "alternative_name" => self.add(&link.name(wildcard)?),
            // In BOSH, a link does not override the common name of the options.
            "common_name" if self.common_name.is_some() => link.name(wildcard).map(drop),
            "common_name" => self.set_common_name(&link.name(wildcard)?),
            other => {
                bail!("{other:?} is not a valid consumer; alternative_name and common_name are")
            }
        }
    }

    fn set_common_name(&mut self, name: &str) -> anyhow::Result<()> {
        ensure!(
            name.chars().count() <= MAX_COMMON_NAME,
            "common name {name:?} is longer than 64 characters (X.520); use alternative_name"
        );
        self.common_name = Some(name.to_owned());
        Ok(())
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
    let mut names = Names::of(&options)?;
    for (consumer, stated) in consumes.into_iter().flatten() {
        let link = consumed_link(manifest, stated, domain, find_ids)?;
        let wildcard = stated["properties"]["wildcard"] == true;
        names.consume(consumer, &link, wildcard)?;
    }
    Ok(Some(names))
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
mod tests;
