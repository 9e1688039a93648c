//! Commands on the inventory: `instance add|remove|move`; `address` and `san`, which name links and instance groups by
//! names instead of ids.

use std::{collections::BTreeMap, net::IpAddr, path::PathBuf};

use anyhow::Context;
use bytes::Bytes;
use clap::{Args, Subcommand, ValueEnum};

use crate::{
    dataset::{INSTANCE_GROUP, Ids, LINK},
    distributor::{
        source::InventoryOptions,
        state::{Folder, PublisherState},
    },
    http::{self, AcceptedName, HttpCall, TlsFiles, TlsOptions},
    inventory::{
        changes::Change,
        file::{Addresses, RawInstance},
    },
};
use dns_command_line::print;
use dns_core::link_address::{
    AddressGroup, Criteria, FirstLabel, LinkAddress, LinkStatus, canonical,
};
use dns_kit::http_client::{HttpClient, Limits};

#[derive(Debug, Subcommand)]
pub(super) enum InstanceCommand {
    /// Add an instance to the inventory
    Add(Add),
    /// Remove an instance from the inventory
    Remove(Remove),
    /// Change the address of an instance
    Move(Move),
}

/// Where the change is made.
#[derive(Debug, Args)]
struct Place {
    /// URL of the publisher's API, https://HOST:PORT; needs --tls-*
    #[arg(long, value_name = "URL", requires = "ca", conflicts_with_all = ["state", "inventory", "nodes"])]
    api: Option<String>,
    /// Our certificates for the API.
    #[command(flatten)]
    tls: TlsOptions,
    /// The publisher's state folder on this machine; needs --inventory or --nodes
    #[arg(long, value_name = "FOLDER", required_unless_present = "api")]
    state: Option<PathBuf>,
    /// Inventory of --state, YAML or JSON
    #[arg(long, value_name = "FILE|FOLDER", conflicts_with = "nodes")]
    inventory: Option<PathBuf>,
    /// Inventory of --state, as a hosts file
    #[arg(long, value_name = "HOSTSFILE")]
    nodes: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(super) struct Add {
    /// Id of the instance
    id: String,
    /// Deployment of the instance
    #[arg(long, value_name = "NAME")]
    deployment: String,
    /// Instance group of the instance
    #[arg(long, value_name = "NAME")]
    instance_group: String,
    /// Network and address of the instance; repeatable
    #[arg(long = "network", value_name = "NAME=ADDRESS", required = true, value_parser = network)]
    networks: Vec<(String, IpAddr)>,
    /// Index of the instance
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    index: u64,
    /// Availability zone of the instance
    #[arg(long, value_name = "NAME")]
    az: Option<String>,
    /// Id of the instance's agent
    #[arg(long, value_name = "ID")]
    agent_id: Option<String>,
    /// The API or the state folder to change.
    #[command(flatten)]
    place: Place,
}

#[derive(Debug, Args)]
pub(super) struct Remove {
    /// Id of the instance
    id: String,
    /// The API or the state folder to change.
    #[command(flatten)]
    place: Place,
}

#[derive(Debug, Args)]
pub(super) struct Move {
    /// Id of the instance
    id: String,
    /// New address of the instance
    ip: IpAddr,
    /// Network, if the instance has several
    #[arg(long, value_name = "NAME")]
    network: Option<String>,
    /// The API or the state folder to change.
    #[command(flatten)]
    place: Place,
}

impl InstanceCommand {
    pub(super) async fn run(self) -> anyhow::Result<()> {
        let (change, place) = match self {
            Self::Add(add) => add.change(),
            Self::Remove(Remove { id, place }) => (Change::Remove { id }, place),
            Self::Move(Move {
                id,
                ip,
                network,
                place,
            }) => (Change::Move { id, network, ip }, place),
        };
        let Place {
            api,
            tls,
            state,
            inventory,
            nodes,
        } = place;
        match (api, state) {
            (Some(api), _) => {
                let files = tls
                    .files()
                    .context("the API requires --tls-ca, --tls-certificate and --tls-key")?;
                let body = serde_json::to_vec(&change)?;
                call(&api, "/v1/changes", &files, Some(body.into()))
                    .await
                    .map(drop)
            }
            (None, Some(state)) if inventory.is_some() || nodes.is_some() => {
                let source = InventoryOptions { inventory, nodes };
                Ok(source.change(&Folder::existing(&state)?, change)?)
            }
            _ => anyhow::bail!("--api URL, or --state FOLDER and --inventory FILE, is required"),
        }
    }
}

impl Add {
    fn change(self) -> (Change, Place) {
        let mut networks: BTreeMap<String, Addresses> = BTreeMap::new();
        for (network, address) in self.networks {
            networks
                .entry(network)
                // A repeated network has an address of the other family.
                .and_modify(|held| held.add(address))
                .or_insert_with(|| address.into());
        }
        let change = Change::Add {
            deployment: self.deployment,
            group: self.instance_group,
            instance: RawInstance {
                id: self.id,
                index: Some(self.index),
                az: self.az,
                agent_id: self.agent_id,
                networks,
            },
        };
        (change, self.place)
    }
}

/// Calls the publisher's API: POST if there is a body, else GET.
pub(super) async fn call(
    api: &str,
    path: &str,
    files: &TlsFiles,
    body: Option<Bytes>,
) -> anyhow::Result<Bytes> {
    // One request for each command, so no connection is kept.
    let client = HttpClient::new(
        files
            .load("api", AcceptedName::Host)?
            .polling_client_config(),
        0,
    );
    let url = format!("{}{path}", api.trim_end_matches('/'));
    let headers = [("content-type".to_owned(), "application/json".into())]
        .into_iter()
        .collect();
    let method = if body.is_some() {
        hyper::Method::POST
    } else {
        hyper::Method::GET
    };
    let call = HttpCall {
        method,
        url: &url,
        basic: None,
        headers: Some(&headers),
        body: body.unwrap_or_default(),
    };
    let limits = Limits {
        time: std::time::Duration::from_secs(10),
        body: 64 << 20,
    };
    Ok(http::send(&client, call, limits).await?)
}

fn network(text: &str) -> anyhow::Result<(String, IpAddr)> {
    let (name, address) = text.split_once('=').context("expected NAME=ADDRESS")?;
    let address = address
        .parse()
        .with_context(|| format!("{address:?} is not an IP address"))?;
    Ok((name.to_owned(), address))
}

//----------- Names ----------------------------------------------------------

#[derive(Debug, Args)]
struct Group {
    /// The publisher's state folder, which contains the ids
    #[arg(long, value_name = "FOLDER")]
    state: PathBuf,
    /// Deployment of the instance group
    #[arg(long, value_name = "NAME")]
    deployment: String,
    /// Instance group to name
    #[arg(
        long,
        value_name = "NAME",
        required_unless_present = "link",
        conflicts_with = "link"
    )]
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
        let name = self.name()?;
        Ok(print(format!("{name}\n").as_bytes())?)
    }

    fn name(self) -> anyhow::Result<LinkAddress> {
        let Self {
            group,
            az,
            uuid,
            status,
            initial_health_check,
        } = self;
        let ids = group.ids()?;
        let mut zones = Vec::new();
        for zone in &az {
            let id = known(ids.zones.get(zone), "availability zone", zone)?;
            zones.push(id.to_string());
        }
        let mut criteria = Criteria {
            zones,
            status: match status {
                Health::Default => LinkStatus::Smart,
                Health::Unhealthy => LinkStatus::Unhealthy,
                Health::Healthy => LinkStatus::Healthy,
                Health::All => LinkStatus::All,
            },
            synchronous: initial_health_check.map(|first| first == First::Synchronous),
            ..Criteria::default()
        };
        if group.long {
            let first = uuid.map_or(FirstLabel::Query(criteria), FirstLabel::Instance);
            return Ok(LinkAddress {
                first,
                ..group.name(&ids)?
            });
        }
        // The short form has the instance's number, the long form its id as the first label.
        if let Some(uuid) = uuid {
            criteria.numbers = vec![known(ids.instances.get(&uuid), "instance", &uuid)?];
        }
        // A director always names the network in the short form of a link.
        criteria.networks = vec![known(
            ids.networks.get(&group.network),
            "network",
            &group.network,
        )?];
        Ok(LinkAddress {
            first: FirstLabel::Query(criteria),
            ..group.name(&ids)?
        })
    }
}

fn known(found: Option<&u64>, what: &str, name: &str) -> anyhow::Result<u64> {
    let id = found.with_context(|| format!("{what} {name} has no id; publish first"))?;
    Ok(*id)
}

impl San {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let Self { group, wildcard } = self;
        let ids = group.ids()?;
        let name = group.name(&ids)?.san(wildcard);
        Ok(print(format!("{name}\n").as_bytes())?)
    }
}

impl Group {
    /// Reads the ids from the state folder.
    fn ids(&self) -> anyhow::Result<Ids> {
        let state: Option<PublisherState> = Folder::open(&self.state).read("state.json")?;
        Ok(state
            .with_context(|| {
                format!(
                    "{}: nothing has been published from this state folder",
                    self.state.display()
                )
            })?
            .ids)
    }

    fn name(&self, ids: &Ids) -> anyhow::Result<LinkAddress> {
        let Self {
            state: _,
            deployment,
            instance_group,
            link,
            network,
            long,
            domain,
        } = self;
        let label =
            |name: &str| canonical(name).map_err(|problem| anyhow::anyhow!("{name:?}: {problem}"));
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
        Ok(LinkAddress {
            group,
            first: FirstLabel::Query(Criteria::default()),
            domain: domain.clone(),
        })
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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    /// A command line with only an address.
    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        address: Address,
    }

    #[test]
    fn labels_of_addresses_hold_their_criteria() {
        let folder = tempfile::tempdir().unwrap();
        let state = serde_json::to_vec(&PublisherState::default()).unwrap();
        std::fs::write(folder.path().join("state.json"), state).unwrap();
        let place = folder.path().display().to_string();
        for (criteria, label) in [
            ("", "q-s0"),
            ("--status unhealthy", "q-s1"),
            ("--status healthy", "q-s3"),
            ("--status all", "q-s4"),
            ("--initial-health-check synchronous", "q-s0y1"),
            ("--initial-health-check asynchronous", "q-s0y0"),
        ] {
            let words = "address --deployment dep --instance-group web --long --state";
            let mut words: Vec<&str> = words.split(' ').chain([place.as_str()]).collect();
            words.extend(criteria.split_whitespace());
            let name = Line::try_parse_from(words).unwrap().address.name();
            let expected = format!("{label}.web.default.dep.bosh");
            assert_eq!(name.unwrap().to_string(), expected, "{criteria}");
        }
    }

    /// The state of a publisher that has published two groups.
    fn published() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let mut state = PublisherState::default();
        let ids = &mut state.ids;
        assert_eq!(ids.group("dep", INSTANCE_GROUP, "other"), 1);
        assert_eq!(ids.group("dep", INSTANCE_GROUP, "web"), 2);
        assert_eq!(ids.group("dep", LINK, "conn-address"), 3);
        for zone in ["z1", "z2"] {
            ids.zone(zone);
        }
        for network in ["m", "default"] {
            ids.network(network);
        }
        for instance in ["i1", "i2", "i3"] {
            ids.instance(instance);
        }
        let state = serde_json::to_vec(&state).unwrap();
        std::fs::write(folder.path().join("state.json"), state).unwrap();
        folder
    }

    fn address(folder: &std::path::Path, more: &str) -> Result<String, String> {
        let words = format!(
            "address --deployment dep --state {} {more}",
            folder.display()
        );
        let line = Line::try_parse_from(words.split_whitespace()).unwrap();
        let name = line.address.name();
        name.map(|name| name.to_string())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn short_addresses_have_ids() {
        let folder = published();
        let text = |text: &str| Err(text.to_owned());
        for (more, expected) in [
            ("--instance-group web", Ok("q-n2s0.q-g2.bosh".to_owned())),
            (
                "--instance-group web --network m --domain x",
                Ok("q-n1s0.q-g2.x".to_owned()),
            ),
            ("--link conn-address", Ok("q-n2s0.q-g3.bosh".to_owned())),
            (
                "--instance-group web --az z2,z1",
                Ok("q-a1a2n2s0.q-g2.bosh".to_owned()),
            ),
            (
                "--instance-group web --uuid i3",
                Ok("q-m3n2s0.q-g2.bosh".to_owned()),
            ),
            (
                "--instance-group web --long --uuid i3",
                Ok("i3.web.default.dep.bosh".to_owned()),
            ),
            (
                "--instance-group Web_1 --long --network Net --domain x",
                Ok("q-s0.web-1.net.dep.x".to_owned()),
            ),
            (
                "--instance-group web --az z3",
                text("availability zone z3 has no id; publish first"),
            ),
            (
                "--instance-group web --uuid i4",
                text("instance i4 has no id; publish first"),
            ),
            (
                "--instance-group web --network x",
                text("network x has no id; publish first"),
            ),
            (
                "--instance-group x",
                text("no instance-group x of deployment dep has an id yet; publish first"),
            ),
            (
                "--link web",
                text("no link web of deployment dep has an id yet; publish first"),
            ),
        ] {
            assert_eq!(address(folder.path(), more), expected, "{more}");
        }
        let empty = tempfile::tempdir().unwrap();
        assert_eq!(
            address(empty.path(), "--instance-group web"),
            Err(format!(
                "{}: nothing has been published from this state folder",
                empty.path().display()
            ))
        );
    }

    #[derive(Parser)]
    struct Instances {
        #[command(subcommand)]
        command: InstanceCommand,
    }

    #[tokio::test]
    async fn commands_change_the_state_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().display().to_string();
        let inventory = folder.path().join("inventory.yml");
        std::fs::write(
            &inventory,
            "deployments: [{name: d, instance_groups: [{name: g, instances: [{id: a, networks: {n: 10.0.0.1}}]}]}]",
        )
        .unwrap();
        let run = async |words: &str| {
            let words = std::iter::once("instance").chain(words.split_whitespace());
            let done = Instances::parse_from(words).command.run().await;
            done.map_err(|error| error.to_string())
        };
        let place = format!("--state {path}/state --inventory {path}/inventory.yml");
        assert_eq!(
            run(&format!("remove a {place}")).await,
            Err(format!(
                "{path}/state: no publisher has used this folder; correct the path, or start `publish` first"
            ))
        );
        let state = Folder::lock(&folder.path().join("state")).unwrap();
        let add = "add b --deployment d --instance-group g --network n=10.0.0.2 --network n=fd00::2 --network m=10.1.0.2 \
                   --index 7 --az z1 --agent-id agent-b";
        run(&format!("{add} {place}")).await.unwrap();
        run(&format!("move a 10.0.0.9 {place}")).await.unwrap();
        let source = InventoryOptions {
            inventory: Some(inventory),
            nodes: None,
        };
        let shown = || {
            let mut shown = Vec::new();
            for instance in source.load(&state).unwrap().instances {
                let mut addresses = Vec::new();
                for (network, address) in instance.networks {
                    addresses.push(format!("{network}={address}"));
                }
                let zone = instance.zone.unwrap_or_default();
                let agent = instance.agent.unwrap_or_default();
                let addresses = addresses.join(" ");
                shown.push(format!(
                    "{} {} {zone} {agent} {addresses}",
                    instance.id, instance.index
                ));
            }
            shown
        };
        assert_eq!(
            shown(),
            [
                "a 0   n=10.0.0.9",
                "b 7 z1 agent-b m=10.1.0.2 n=10.0.0.2 n=fd00::2",
            ]
        );
        run(&format!("remove a {place}")).await.unwrap();
        assert_eq!(shown().len(), 1);
        assert_eq!(
            run(&format!("remove a --state {path}/state")).await,
            Err("--api URL, or --state FOLDER and --inventory FILE, is required".to_owned())
        );
        let unreachable = "remove a --api https://127.0.0.1:1 --tls-ca /none --tls-certificate /none --tls-key /none";
        assert!(run(unreachable).await.is_err());
        let network = |text: &str| network(text).map_err(|error| format!("{error:#}"));
        assert_eq!(
            network("n=10.0.0.1"),
            Ok(("n".to_owned(), "10.0.0.1".parse().unwrap()))
        );
        assert_eq!(network("n"), Err("expected NAME=ADDRESS".to_owned()));
        assert_eq!(
            network("n=x"),
            Err("\"x\" is not an IP address: invalid IP address syntax".to_owned())
        );
    }
}
