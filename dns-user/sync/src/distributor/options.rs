//! Options of `publish`.

use std::{net::SocketAddr, path::PathBuf};

use clap::value_parser;

use super::source::InventoryOptions;
use crate::{dataset::LAST_VERSION, nats_config::PUBLISHER, store::StoreOptions, tls::TlsOptions};

/// Command-line options of the subcommand `publish`.
#[derive(Clone, Debug, clap::Args)]
pub struct PublishOptions {
    /// Options that name the inventory.
    #[command(flatten)]
    pub source: InventoryOptions,
    /// State folder (ids, versions, reports); keep it, and never share it between publishers
    #[arg(long, value_name = "FOLDER")]
    pub state: PathBuf,
    /// Write the records to this local file, without NATS and blobstore
    #[arg(long, value_name = "FILE", conflicts_with = "nats")]
    pub local: Option<PathBuf>,
    /// NATS servers, tls://HOST:PORT, separated by commas
    #[arg(
        long,
        value_name = "URL",
        value_delimiter = ',',
        requires = "ca",
        required_unless_present = "local"
    )]
    pub nats: Vec<String>,
    /// Certificates for NATS and for the API.
    #[command(flatten)]
    pub tls: TlsOptions,
    /// Options of the blobstore client.
    #[command(flatten)]
    pub store: StoreOptions,
    /// Keep running, publish changes and update lagging agents
    #[arg(long)]
    pub watch: bool,
    /// Without --watch: time limit for the agents, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub timeout: u64,
    /// Start above this version; needed only if agents cannot report their versions
    #[arg(long, value_name = "VERSION", default_value_t = 0, value_parser = value_parser!(u64).range(0..LAST_VERSION))]
    pub above: u64,
    /// Accept an inventory that removes up to this many instances in one version
    #[arg(long, value_name = "INSTANCES")]
    pub confirm_removals: Option<usize>,
    /// Bandwidth in bytes per second, for blob downloads and for messages separately
    #[arg(long, value_name = "BYTES", default_value_t = 125_000_000)]
    pub bandwidth: u64,
    /// Bytes of old datasets to keep for patches, in the state folder and in the blobstore separately
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 20)]
    pub keep_bytes: u64,
    /// Validity of signed links to a blob, in seconds; S3 allows at most a week
    #[arg(long, value_name = "SECONDS", default_value_t = 86_400, value_parser = value_parser!(u64).range(1..=604_800))]
    pub links_good_for: u64,
    /// Send neither patches nor spreading hints, like a director
    #[arg(long)]
    pub no_patches: bool,
    /// HTTPS API for status and changes; requires a client certificate of --tls-ca
    #[arg(long, value_name = "ADDRESS", requires = "watch")]
    pub api: Option<SocketAddr>,
    /// Common names of the certificates that may use the API, separated by commas
    #[arg(long, value_name = "NAME", value_delimiter = ',', requires = "api", default_value = PUBLISHER)]
    pub api_clients: Vec<String>,
    /// Prometheus metrics at http://ADDRESS/metrics
    #[arg(long, value_name = "ADDRESS", requires = "watch")]
    pub metrics: Option<SocketAddr>,
}
