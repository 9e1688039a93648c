//! `instance add|remove|move`.

use std::{collections::BTreeMap, net::IpAddr, path::PathBuf};

use anyhow::Context;
use bytes::Bytes;
use clap::{Args, Subcommand};
use dns_kit::http_client::{HttpClient, Limits};

use crate::{
    distributor::{source::InventoryOptions, state::Folder},
    http::{self, AcceptedName, Call, TlsFiles, TlsOptions},
    inventory::{
        changes::Change,
        file::{Addresses, RawInstance},
    },
};

#[derive(Debug, Subcommand)]
pub(super) enum Instance {
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

impl Instance {
    pub(super) async fn run(self) -> anyhow::Result<()> {
        let (change, place) = match self {
            Self::Add(Add { id, deployment, instance_group, networks, index, az, agent_id, place }) => {
                let mut addresses: BTreeMap<String, Addresses> = BTreeMap::new();
                for (network, address) in networks {
                    addresses
                        .entry(network)
                        .and_modify(|held| held.add(address))
                        .or_insert_with(|| address.into());
                }
                let networks = addresses;
                let instance = RawInstance { id, index: Some(index), az, agent_id, networks };
                (Change::Add { deployment, group: instance_group, instance }, place)
            }
            Self::Remove(Remove { id, place }) => (Change::Remove { id }, place),
            Self::Move(Move { id, ip, network, place }) => (Change::Move { id, network, ip }, place),
        };
        let Place { api, tls, state, inventory, nodes } = place;
        match (api, state) {
            (Some(api), _) => {
                let files =
                    tls.files().context("the API requires --tls-ca, --tls-certificate and --tls-key")?;
                let body = serde_json::to_vec(&change)?;
                call(&api, "/v1/changes", &files, Some(body.into())).await.map(drop)
            }
            (None, Some(state)) if inventory.is_some() || nodes.is_some() => {
                let source = InventoryOptions { inventory, nodes };
                Ok(source.change(&Folder::existing(&state)?, change)?)
            }
            _ => anyhow::bail!("--api URL, or --state FOLDER and --inventory FILE, is required"),
        }
    }
}

/// Calls the publisher's API: POST if there is a body, else GET.
pub(super) async fn call(
    api: &str,
    path: &str,
    files: &TlsFiles,
    body: Option<Bytes>,
) -> anyhow::Result<Bytes> {
    let client = HttpClient::new(files.load("api", AcceptedName::Host)?.polling_client_config(), 0);
    let url = format!("{}{path}", api.trim_end_matches('/'));
    let headers = [("content-type".to_owned(), "application/json".into())].into_iter().collect();
    let method = if body.is_some() { hyper::Method::POST } else { hyper::Method::GET };
    let call =
        Call { method, url: &url, basic: None, headers: Some(&headers), body: body.unwrap_or_default() };
    let limits = Limits { time: std::time::Duration::from_secs(10), body: 64 << 20 };
    Ok(http::send(&client, call, limits).await?)
}

fn network(text: &str) -> anyhow::Result<(String, IpAddr)> {
    let (name, address) = text.split_once('=').context("expected NAME=ADDRESS")?;
    let address = address.parse().with_context(|| format!("{address:?} is not an IP address"))?;
    Ok((name.to_owned(), address))
}
