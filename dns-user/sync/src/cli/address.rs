//! `address` and `san`: names of links and instance groups, by names instead of ids.

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, ValueEnum};
use dns_core::link_address::canonical;
use dns_core::link_address::{AddressGroup, Criteria, FirstLabel, LinkAddress, Status};

use crate::{
    dataset::{INSTANCE_GROUP, Ids, LINK},
    distributor::state::{Folder, State},
};

#[derive(Debug, Args)]
struct Group {
    /// The publisher's state folder, which contains the ids
    #[arg(long, value_name = "FOLDER")]
    state: PathBuf,
    /// Deployment of the instance group
    #[arg(long, value_name = "NAME")]
    deployment: String,
    /// Instance group to name
    #[arg(long, value_name = "NAME", required_unless_present = "link", conflicts_with = "link")]
    instance_group: Option<String>,
    /// Link, as NAME-TYPE
    #[arg(long, value_name = "NAME-TYPE")]
    link: Option<String>,
    /// Network of the addresses
    #[arg(long, value_name = "NAME", default_value = "default")]
    network: String,
    /// Long form: <instance group>.<network>.<deployment>, without ids
    #[arg(long, requires = "instance_group")]
    long: bool,
    /// Domain that the name ends in
    #[arg(long, default_value = "bosh")]
    domain: String,
}

#[derive(Debug, Args)]
pub(super) struct Address {
    /// The link or instance group to name.
    #[command(flatten)]
    group: Group,
    /// Availability zone; repeatable, any may match
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    az: Vec<String>,
    /// Id of a single instance
    #[arg(long, value_name = "ID")]
    uuid: Option<String>,
    /// Instances to include, by health
    #[arg(long, value_enum, default_value_t = Health::Default)]
    status: Health,
    /// Whether the first query waits for health checks
    #[arg(long, value_enum, value_name = "WHEN")]
    initial_health_check: Option<First>,
}

#[derive(Debug, Args)]
pub(super) struct San {
    /// The link or instance group to name.
    #[command(flatten)]
    group: Group,
    /// Put `*` in place of the first label
    #[arg(long)]
    wildcard: bool,
}

/// `status` of a link's address.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Health {
    /// Healthy ones; all if there are none.
    Default,
    /// Only the unhealthy ones
    Unhealthy,
    /// Only the healthy ones
    Healthy,
    /// All, whatever their health
    All,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum First {
    /// The query does not wait for the checks
    Asynchronous,
    /// The query waits for the checks
    Synchronous,
}

impl Address {
    pub(super) fn run(self) -> anyhow::Result<()> {
        println!("{}", self.name()?);
        Ok(())
    }

    fn name(self) -> anyhow::Result<LinkAddress> {
        let Self { group, az, uuid, status, initial_health_check } = self;
        let ids = group.ids()?;
        let known = |found: Option<u64>, what: &str, name: &str| {
            found.with_context(|| format!("{what} {name} has no id; publish first"))
        };
        let zones: anyhow::Result<Vec<String>> = az
            .iter()
            .map(|zone| Ok(known(ids.find_zone(zone), "availability zone", zone)?.to_string()))
            .collect();
        let mut criteria = Criteria {
            zones: zones?,
            status: match status {
                Health::Default => Status::Smart,
                Health::Unhealthy => Status::Unhealthy,
                Health::Healthy => Status::Healthy,
                Health::All => Status::All,
            },
            synchronous: initial_health_check.map(|first| first == First::Synchronous),
            ..Criteria::default()
        };
        if group.long {
            let first = uuid.map_or(FirstLabel::Query(criteria), FirstLabel::Instance);
            return Ok(LinkAddress { first, ..group.name(&ids)? });
        }
        if let Some(uuid) = uuid {
            criteria.numbers = vec![known(ids.find_instance(&uuid), "instance", &uuid)?];
        }
        criteria.networks = vec![known(ids.find_network(&group.network), "network", &group.network)?];
        Ok(LinkAddress { first: FirstLabel::Query(criteria), ..group.name(&ids)? })
    }
}

impl San {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let Self { group, wildcard } = self;
        let ids = group.ids()?;
        println!("{}", group.name(&ids)?.san(wildcard));
        Ok(())
    }
}

impl Group {
    /// Reads the ids from the state folder.
    fn ids(&self) -> anyhow::Result<Ids> {
        let state: Option<State> = Folder::open(&self.state).read("state.json")?;
        Ok(state
            .with_context(|| {
                format!("{}: nothing has been published from this state folder", self.state.display())
            })?
            .ids)
    }

    fn name(&self, ids: &Ids) -> anyhow::Result<LinkAddress> {
        let Self { state: _, deployment, instance_group, link, network, long, domain } = self;
        let label = |name: &str| canonical(name).map_err(|problem| anyhow::anyhow!("{name:?}: {problem}"));
        let group = match (instance_group, link) {
            (Some(group), _) if *long => AddressGroup::Names {
                instance_group: label(group)?,
                network: label(network)?,
                deployment: label(deployment)?,
            },
            (Some(group), _) => AddressGroup::Id(find(ids, deployment, INSTANCE_GROUP, group)?),
            (None, Some(link)) => AddressGroup::Id(find(ids, deployment, LINK, link)?),
            (None, None) => anyhow::bail!("--instance-group or --link is required"),
        };
        Ok(LinkAddress { group, first: FirstLabel::Query(Criteria::default()), domain: domain.clone() })
    }
}

/// Looks up the id of a group and formats it.
fn find(ids: &Ids, deployment: &str, kind: &str, name: &str) -> anyhow::Result<String> {
    let id = ids.find_group(deployment, kind, name);
    let id = id.with_context(|| {
        format!("no {kind} {name} of deployment {deployment} has an id yet; publish first")
    })?;
    Ok(id.to_string())
}
