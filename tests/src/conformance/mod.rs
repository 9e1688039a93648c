//! Recorded behaviour of the reference server, replayed against a running server:
//! scenario folders (`tests/conformance`, whose README describes the format) are
//! read, their surroundings are built, their queries asked and their answers compared.
//!
//! - [`scenario`]: what the files of a scenario say.
//! - [`world`]: the surroundings: files, ports, the server itself.
//!   [`recursor`], [`http`], [`responder`]: the scripted servers around it.
//! - [`client`], [`message`]: queries out, replies in, also malformed ones.
//! - [`expect`]: what was recorded against what came.
//! - [`replay`], [`steps`], [`startup`]: the three kinds of recorded cases.

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
pub mod recursor;
pub mod replay;
pub mod responder;
pub mod scenario;
pub mod startup;
pub mod steps;
pub mod world;

/// Names another folder of scenarios in the same format: the one that holds
/// `scenarios/`, or `scenarios` itself.
pub const FOLDER_VARIABLE: &str = "BOSH_DNS_CONFORMANCE";

/// Runs only the scenarios whose names begin with one of these words.
pub const ONLY_VARIABLE: &str = "BOSH_DNS_CONFORMANCE_ONLY";

/// Names another DNS server's command, such as `/path/to/bosh-dns --config {config}`.
pub const SERVER_VARIABLE: &str = "BOSH_DNS_CONFORMANCE_SERVER";

/// Names another health server's command, such as `/path/to/bosh-dns-health {config}`.
pub const HEALTH_SERVER_VARIABLE: &str = "BOSH_DNS_CONFORMANCE_HEALTH_SERVER";

/// Folder of certificates beside the scenarios.
const CERTIFICATES: &str = "_certs";

/// A folder of recorded scenarios.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// The folder that holds one folder for each scenario.
    pub scenarios: PathBuf,
    /// Certificates and keys of all parties.
    pub certificates: PathBuf,
}

impl Recorded {
    /// The scenarios of this project, or those that [`FOLDER_VARIABLE`] names.
    ///
    /// # Errors
    ///
    /// Where there is no such folder.
    pub fn find() -> Result<Self> {
        let own = Self::own();
        let Some(named) = env::var_os(FOLDER_VARIABLE).map(PathBuf::from) else { return Ok(own) };
        let below = named.join("scenarios");
        let scenarios = if below.is_dir() { below } else { named };
        ensure!(scenarios.is_dir(), "{FOLDER_VARIABLE} names {}, which is no folder", scenarios.display());
        let certificates = Some(scenarios.join(CERTIFICATES)).filter(|folder| folder.is_dir());
        Ok(Self { certificates: certificates.unwrap_or(own.certificates), scenarios })
    }

    /// The scenarios of this project.
    pub fn own() -> Self {
        let scenarios = Path::new(env!("CARGO_MANIFEST_DIR")).join("conformance/scenarios");
        Self { certificates: scenarios.join(CERTIFICATES), scenarios }
    }

    /// The names of the scenarios that begin with one of `only` (all, if there is none)
    /// and that [`ONLY_VARIABLE`] does not leave out, sorted.
    ///
    /// # Errors
    ///
    /// Where the folder cannot be read.
    pub fn names(&self, only: &[&str]) -> Result<Vec<String>> {
        let wanted = env::var(ONLY_VARIABLE).unwrap_or_default();
        let wanted: Vec<&str> = wanted.split_whitespace().collect();
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.scenarios).with_context(|| self.scenarios.display().to_string())? {
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

/// The commands of the servers that are asked; `{config}` stands for the configuration file.
#[derive(Clone, Debug)]
pub struct Commands {
    /// The DNS server.
    pub dns: String,
    /// The health server.
    pub health: String,
    /// Whether the DNS server is another one than ours.
    pub is_another: bool,
}

impl Commands {
    /// This project's servers, or those that [`SERVER_VARIABLE`] and
    /// [`HEALTH_SERVER_VARIABLE`] name.
    ///
    /// # Errors
    ///
    /// Where ours are wanted and not built.
    pub fn find() -> Result<Self> {
        let dns = env::var(SERVER_VARIABLE).ok();
        let health = env::var(HEALTH_SERVER_VARIABLE).ok();
        let is_another = dns.is_some();
        let own =
            |ending: &str| -> Result<String> { Ok(format!("{}{ending}", server::program()?.display())) };
        Ok(Self {
            dns: dns.map_or_else(|| own(" --config {config}"), Ok)?,
            health: health.map_or_else(|| own("-health {config}"), Ok)?,
            is_another,
        })
    }
}
