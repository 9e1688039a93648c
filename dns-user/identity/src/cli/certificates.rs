//! `issue` and `check`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::SystemTime,
};

use anyhow::Context;

use crate::{
    ca_files::CaFiles,
    check::{self, Findings},
    folder::{IdentityFolder, Pair},
    keys::PrivateKey,
    profile::Container,
    run::LeafOptions,
};

#[derive(Debug, clap::Args)]
pub(super) struct Issue {
    #[command(flatten)]
    ca: CaFiles,
    /// JSON file that describes the container
    #[arg(long, value_name = "FILE")]
    container: PathBuf,
    /// Folder for instance.crt, instance.key, instance.pem and ca.crt
    #[arg(long, value_name = "FOLDER")]
    folder: PathBuf,
    #[command(flatten)]
    leaf: LeafOptions,
}

#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["ca", "folder", "certificate"]))]
pub(super) struct Check {
    /// PEM file of a CA
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Private key of the CA; without it, the certificate alone is checked
    #[arg(long, value_name = "FILE", requires = "ca")]
    ca_key: Option<PathBuf>,
    /// Folder of an identity
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// Certificate whose names must resolve in the fleet of --records
    #[arg(long, value_name = "FILE", requires = "records")]
    certificate: Option<PathBuf>,
    /// The fleet's records.json
    #[arg(long, value_name = "FILE")]
    records: Option<PathBuf>,
    /// Alias file of the fleet; repeatable
    #[arg(long, value_name = "FILE")]
    aliases: Vec<PathBuf>,
    /// Also exit with code 1 if a name does not resolve
    #[arg(long)]
    strict: bool,
}

/// Reads the description of a container.
pub(super) fn read_description(path: &Path) -> anyhow::Result<Container> {
    let text = fs::read(path).with_context(|| path.display().to_string())?;
    serde_json::from_slice(&text).with_context(|| path.display().to_string())
}

impl Issue {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self { ca, container, folder, leaf } = self;
        let now = SystemTime::now();
        let authority = ca.load(now)?;
        for caution in authority.cautions(now, leaf.validity) {
            eprintln!("warning: {}: {caution}", ca.certificate.display());
        }
        let container = read_description(&container)?;
        let key = PrivateKey::generate(leaf.key_type)?;
        let issued = authority.issue(&container.identity()?, key.public_key_info(), now, leaf.validity)?;
        let pair = Pair { certificate: issued.pem, key: key.to_pem()? };
        IdentityFolder::new(folder).replace_pair(&pair, &authority.chain_pem(), container.owner)?;
        Ok(ExitCode::SUCCESS)
    }
}

impl Check {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self { ca, ca_key, folder, certificate, records, aliases, strict } = self;
        let now = SystemTime::now();
        let mut found = Findings::default();
        match (ca, ca_key, folder, certificate.zip(records)) {
            (Some(certificate), Some(key), _, _) => {
                found = check::authority(&CaFiles { certificate, key }, now);
            }
            (Some(certificate), None, _, _) => found = check::authority_certificate(&certificate, now),
            (None, _, Some(folder), _) => found = check::folder(&folder, now),
            (None, _, None, Some((certificate, records))) => {
                let missing =
                    check::names(&certificate, &records, &aliases).map_err(|error| anyhow::anyhow!(error))?;
                match strict {
                    true => found.errors = missing,
                    false => found.warnings = missing,
                }
            }
            (None, _, None, None) => anyhow::bail!("one of --ca, --folder or --certificate is required"),
        }
        let Findings { errors, warnings } = found;
        for warning in &warnings {
            println!("warning: {warning}");
        }
        for error in &errors {
            println!("error: {error}");
        }
        if errors.is_empty() && warnings.is_empty() {
            println!("no defect found");
        }
        Ok(if errors.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
