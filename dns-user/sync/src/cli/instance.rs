//! `instance add|remove|move`.

use std::{net::IpAddr, path::PathBuf};

use anyhow::Context;
use bytes::Bytes;
use clap::{Args, Subcommand};

use crate::{
    http::{Call, HttpClient},
    inventory::{changes::Change, file::RawInstance},
    publisher::{source::InventoryOptions, state::Folder},
    tls::{self, TlsFiles, TlsOptions},
};

/// The changes.
#[derive(Debug, Subcommand)]
pub(super) enum Instance {
    /// Add an instance
    Add(Add),
    /// Remove an instance
    Remove(Remove),
    /// Change the address of an instance
    Move(Move),
}

/// Where the change is made.
#[derive(Debug, Args)]
struct Place {
    /// URL of the publisher's API, https://HOST:PORT, with --tls-*
    #[arg(long, value_name = "URL", requires = "ca", conflicts_with_all = ["state", "inventory", "nodes"])]
    api: Option<String>,
    /// Our certificates for the API.
    #[command(flatten)]
    tls: TlsOptions,
    /// Publisher's state folder on this machine, with its --inventory or --nodes
    #[arg(long, value_name = "FOLDER", required_unless_present = "api")]
    state: Option<PathBuf>,
    /// Its inventory
    #[arg(long, value_name = "FILE|FOLDER", conflicts_with = "nodes")]
    inventory: Option<PathBuf>,
    /// Its hosts file
    #[arg(long, value_name = "HOSTSFILE")]
    nodes: Option<PathBuf>,
}

/// `instance add`.
#[derive(Debug, Args)]
pub(super) struct Add {
    /// Its id
    id: String,
    /// Its deployment
    #[arg(long, value_name = "NAME")]
    deployment: String,
    /// Its instance group
    #[arg(long, value_name = "NAME")]
    instance_group: String,
    /// Its addresses; several times for several networks
    #[arg(long = "network", value_name = "NAME=ADDRESS", required = true, value_parser = network)]
    networks: Vec<(String, IpAddr)>,
    /// Its index
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    index: u64,
    /// Its availability zone
    #[arg(long, value_name = "NAME")]
    az: Option<String>,
    /// Id of its agent
    #[arg(long, value_name = "ID")]
    agent_id: Option<String>,
    /// The API or the state folder to change.
    #[command(flatten)]
    place: Place,
}

/// `instance remove`.
#[derive(Debug, Args)]
pub(super) struct Remove {
    /// Its id
    id: String,
    /// The API or the state folder to change.
    #[command(flatten)]
    place: Place,
}

/// `instance move`.
#[derive(Debug, Args)]
pub(super) struct Move {
    /// Its id
    id: String,
    /// Its new address
    ip: IpAddr,
    /// Network, if the instance has several
    #[arg(long, value_name = "NAME")]
    network: Option<String>,
    /// The API or the state folder to change.
    #[command(flatten)]
    place: Place,
}

impl Instance {
    /// Applies the change.
    pub(super) async fn run(self) -> anyhow::Result<()> {
        let (change, place) = match self {
            Self::Add(Add { id, deployment, instance_group, networks, index, az, agent_id, place }) => {
                let networks = networks.into_iter().collect();
                let instance = RawInstance { id, index: Some(index), az, agent_id, networks };
                (Change::Add { deployment, group: instance_group, instance }, place)
            }
            Self::Remove(Remove { id, place }) => (Change::Remove { id }, place),
            Self::Move(Move { id, ip, network, place }) => (Change::Move { id, network, ip }, place),
        };
        let Place { api, tls, state, inventory, nodes } = place;
        match (api, state) {
            (Some(api), _) => {
                let files = tls
                    .files()
                    .context("the API asks for a certificate: --tls-ca, --tls-certificate, --tls-key")?;
                let body = serde_json::to_vec(&change)?;
                call(&api, "/v1/changes", &files, Some(body.into())).await.map(drop)
            }
            (None, Some(state)) if inventory.is_some() || nodes.is_some() => {
                let source = InventoryOptions { inventory, nodes };
                std::fs::create_dir_all(&state).with_context(|| state.display().to_string())?;
                Ok(source.change(&Folder::open(&state), change)?)
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
    let client = HttpClient::new(tls::client(files, None)?);
    let url = format!("{}{path}", api.trim_end_matches('/'));
    let headers = [("content-type".to_owned(), "application/json".into())].into_iter().collect();
    let method = if body.is_some() { hyper::Method::POST } else { hyper::Method::GET };
    let call =
        Call { method, url: &url, basic: None, headers: Some(&headers), body: body.unwrap_or_default() };
    Ok(client.send(call, 64 << 20, std::time::Duration::from_secs(10)).await?)
}

/// Parses `NAME=ADDRESS`.
fn network(text: &str) -> anyhow::Result<(String, IpAddr)> {
    let (name, address) = text.split_once('=').context("NAME=ADDRESS is needed")?;
    let address = address.parse().with_context(|| format!("{address:?} is not an IP address"))?;
    Ok((name.to_owned(), address))
}
