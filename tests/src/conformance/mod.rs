//! Replays recorded behaviour of bosh-dns against a running server: reads scenario folders
//! (`tests/conformance`, whose README describes the format), builds their surroundings, sends their
//! queries and compares the answers.
//!
//! - [`scenario`]: the file format of scenarios.
//! - [`world`]: the surroundings: files, ports, the server itself. [`recursor`], [`http`],
//!   [`responder`]: the scripted servers around it.
//! - [`client`], [`message`]: queries and replies, including malformed ones.
//! - [`expect`]: comparison of replies with the recording.
//! - [`replay`], [`steps`], [`startup`]: the three kinds of recorded cases.
//! - [`patience`]: time limits on a busy machine.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};

use crate::server;

pub mod client;
pub mod expect;
pub mod http;
pub mod message;
pub mod patience;
pub mod recursor;
pub mod replay;
pub mod responder;
pub mod scenario;
pub mod startup;
pub mod steps;
pub mod world;

/// Environment variable with another folder of scenarios in the same format: either `scenarios` or
/// its parent.
pub const FOLDER_VARIABLE: &str = "BOSH_DNS_CONFORMANCE";

/// Environment variable with name prefixes; other scenarios are skipped.
pub const ONLY_VARIABLE: &str = "BOSH_DNS_CONFORMANCE_ONLY";

/// Environment variable with another DNS server's command, such as `/path/to/bosh-dns --config
/// {config}`.
pub const SERVER_VARIABLE: &str = "BOSH_DNS_CONFORMANCE_SERVER";

/// Environment variable with another health server's command, such as `/path/to/bosh-dns-health
/// {config}`.
pub const HEALTH_SERVER_VARIABLE: &str = "BOSH_DNS_CONFORMANCE_HEALTH_SERVER";

/// Folder of certificates next to the scenarios.
const CERTIFICATES: &str = "_certs";

/// A folder of recorded scenarios.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// The parent folder of the scenarios.
    pub scenarios: PathBuf,
    /// Certificates and keys of all parties.
    pub certificates: PathBuf,
}

impl Recorded {
    /// Returns this project's scenarios, or the folder in [`FOLDER_VARIABLE`].
    ///
    /// # Errors
    ///
    /// Fails if the folder does not exist.
    pub fn find() -> Result<Self> {
        let own = Self::own();
        let Some(named) = env::var_os(FOLDER_VARIABLE).map(PathBuf::from) else {
            return Ok(own);
        };
        let below = named.join("scenarios");
        let scenarios = if below.is_dir() { below } else { named };
        ensure!(
            scenarios.is_dir(),
            "{FOLDER_VARIABLE} names {}, which is not a folder",
            scenarios.display()
        );
        let certificates = Some(scenarios.join(CERTIFICATES)).filter(|folder| folder.is_dir());
        Ok(Self {
            certificates: certificates.unwrap_or(own.certificates),
            scenarios,
        })
    }

    /// Returns this project's scenarios.
    pub fn own() -> Self {
        let scenarios = Path::new(env!("CARGO_MANIFEST_DIR")).join("conformance/scenarios");
        Self {
            certificates: scenarios.join(CERTIFICATES),
            scenarios,
        }
    }

    /// Returns the sorted names of scenarios that begin with one of `only` (any name if empty) and
    /// that [`ONLY_VARIABLE`] does not exclude.
    ///
    /// # Errors
    ///
    /// Fails if the folder cannot be read.
    pub fn names(&self, only: &[&str]) -> Result<Vec<String>> {
        let wanted = env::var(ONLY_VARIABLE).unwrap_or_default();
        let wanted: Vec<&str> = wanted.split_whitespace().collect();
        let mut names = Vec::new();
        for entry in
            fs::read_dir(&self.scenarios).with_context(|| self.scenarios.display().to_string())?
        {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_among = |prefixes: &[&str]| {
                prefixes.is_empty() || prefixes.iter().any(|prefix| name.starts_with(prefix))
            };
            if is_among(&wanted) && is_among(only) && entry.path().join("scenario.json").exists() {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }
}

/// Commands of the servers under test; `{config}` is replaced by the configuration file.
#[derive(Clone, Debug)]
pub struct Commands {
    pub dns: String,
    pub health: String,
    /// Whether the DNS server is not this project's.
    pub is_another: bool,
}

impl Commands {
    /// Returns the commands of this project's servers, or the values of [`SERVER_VARIABLE`] and
    /// [`HEALTH_SERVER_VARIABLE`].
    ///
    /// # Errors
    ///
    /// Fails if this project's servers are needed but not built.
    pub fn find() -> Result<Self> {
        let dns = env::var(SERVER_VARIABLE).ok();
        let health = env::var(HEALTH_SERVER_VARIABLE).ok();
        let is_another = dns.is_some();
        let own = |program: Result<PathBuf>, arguments: &str| {
            anyhow::Ok(format!("{} {arguments}", program?.display()))
        };
        Ok(Self {
            dns: dns.map_or_else(|| own(server::program(), "--config {config}"), Ok)?,
            health: health.map_or_else(
                || own(server::companion("bosh-dns-xdp-health"), "{config}"),
                Ok,
            )?,
            is_another,
        })
    }
}
