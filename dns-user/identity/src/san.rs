//! Names of link providers in certificates (seed document 000): the address without criteria, as
//! consumed by a variable of type `certificate`.

use std::net::IpAddr;

use dns_core::link_address::{AddressGroup, Criteria, FirstLabel, LinkAddress, NotCanonical, canonical};
use serde::Deserialize;

use crate::profile::{MAX_COMMON_NAME, is_dns_name};

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

/// Reason why a link cannot be made into a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SanError {
    /// A part of the name has no canonical form.
    #[error("{what} {name:?}: {cause}; rename it")]
    NotCanonical {
        /// Instance group, network or deployment.
        what: &'static str,
        /// The name as in the manifest.
        name: String,
        /// Rule that the name violates.
        cause: NotCanonical,
    },
    /// The consumer's name is unknown.
    #[error("{0:?} is not a valid consumer; alternative_name and common_name are")]
    Consumer(String),
    /// Only variables of type `certificate` consume links.
    #[error("variable of type {0:?} cannot consume links; only type certificate can")]
    VariableType(String),
    /// The common name exceeds the 64 characters of X.520.
    #[error("common name {0:?} is longer than 64 characters (X.520); use alternative_name")]
    LongCommonName(String),
    /// A manual address or an alternative name is not a valid name.
    #[error("{0:?} is neither a DNS name nor an IP address")]
    NotName(String),
}

impl Purpose {
    /// Parses the name of a consumer.
    pub fn parse(name: &str) -> Result<Self, SanError> {
        match name {
            "alternative_name" => Ok(Self::AlternativeName),
            "common_name" => Ok(Self::CommonName),
            other => Err(SanError::Consumer(other.to_owned())),
        }
    }
}

impl Link {
    /// Returns the name for a certificate. A manual address never becomes a wildcard.
    pub fn name(&self, wildcard: bool) -> Result<String, SanError> {
        match self {
            Self::Manual(address) if is_dns_name(address) || address.parse::<IpAddr>().is_ok() => {
                Ok(address.clone())
            }
            Self::Manual(address) => Err(SanError::NotName(address.clone())),
            Self::Group { instance_group, network, deployment, domain, ids } => {
                let label = |what, name: &String| {
                    canonical(name).map_err(|cause| SanError::NotCanonical {
                        what,
                        name: name.clone(),
                        cause,
                    })
                };
                let instance_group = label("instance group", instance_group)?;
                let (network, deployment) = (label("network", network)?, label("deployment", deployment)?);
                let group = match ids {
                    Some(ids) => AddressGroup::Id(ids.group.to_string()),
                    None => AddressGroup::Names { instance_group, network, deployment },
                };
                let networks = ids.iter().map(|ids| ids.network).collect();
                let first = match wildcard {
                    true => FirstLabel::Wildcard,
                    false => FirstLabel::Query(Criteria { networks, ..Criteria::default() }),
                };
                Ok(LinkAddress { group, first, domain: domain.clone() }.to_string())
            }
        }
    }
}

impl Names {
    /// Returns the names of a variable of type `certificate`, including the links that it consumes.
    pub fn of(options: &Options, consumed: &[Consumed]) -> Result<Self, SanError> {
        let mut names = Self { common_name: options.common_name.clone(), ..Self::default() };
        for name in &options.alternative_names {
            names.add(name)?;
        }
        for Consumed { purpose, link, wildcard } in consumed {
            let name = link.name(*wildcard)?;
            match purpose {
                Purpose::AlternativeName => names.add(&name)?,
                Purpose::CommonName => {
                    names.common_name.get_or_insert(name);
                }
            }
        }
        match names.common_name {
            Some(name) if name.chars().count() > MAX_COMMON_NAME => Err(SanError::LongCommonName(name)),
            _ => Ok(names),
        }
    }

    fn add(&mut self, name: &str) -> Result<(), SanError> {
        match name.parse() {
            Ok(address) => self.addresses.push(address),
            Err(_) if is_dns_name(name) => self.dns.push(name.to_owned()),
            Err(_) => return Err(SanError::NotName(name.to_owned())),
        }
        Ok(())
    }
}
