//! `issue`, `check`, `token` and `confirm-removals`.

use std::{
    path::PathBuf,
    process::ExitCode,
    time::{Duration, SystemTime},
};

use anyhow::Context;

use crate::{
    ca_files::CaFiles,
    certificate::Validity,
    check::{self, Findings, snapshot},
    control::{self, Command, Reply},
    descriptions::read_any,
    fleet::state::StateFolder,
    folder::{IdentityFolder, Pair},
    keys::PrivateKey,
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

impl Issue {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self { ca, container, folder, leaf } = self;
        let now = SystemTime::now();
        let authority = ca.load(now)?;
        for caution in authority.cautions(now, leaf.validity) {
            eprintln!("warning: {}: {caution}", ca.certificate.display());
        }
        let container = read_any(&container).with_context(|| container.display().to_string())?;
        let key = PrivateKey::generate(leaf.key_type)?;
        let wanted = Validity::backdated(now, leaf.validity, leaf.backdate);
        let issued = authority.issue(&container.identity()?, key.public_key_info(), wanted)?;
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
                let missing = check::names(&certificate, &records, &aliases)?;
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

/// Options of `token`.
#[derive(Debug, clap::Args)]
pub(super) struct Token {
    /// State folder of the issuer
    #[arg(long, value_name = "FOLDER")]
    state: PathBuf,
    /// Id of the instance, as in records.json
    #[arg(long, value_name = "ID")]
    instance: String,
    /// Minutes for which the token is valid
    #[arg(long, value_name = "MINUTES", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=10080))]
    minutes: u64,
    /// Create the token although records.json does not have the instance yet
    #[arg(long)]
    allow_unknown: bool,
}

impl Token {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self { state, instance, minutes, allow_unknown } = self;
        let state = StateFolder::open(state)?;
        if let (Some(facts), false) = (state.facts()?, allow_unknown) {
            let fleet = snapshot(&facts.records, &[])?;
            anyhow::ensure!(
                fleet.instances().any(|row| row.id == instance),
                "no instance {instance:?} in {}; correct the id, wait for the records, or add --allow-unknown",
                facts.records.display()
            );
        }
        let token = state.create_token(&instance, SystemTime::now(), Duration::from_secs(minutes * 60))?;
        println!("{}", token.as_str());
        Ok(ExitCode::SUCCESS)
    }
}

/// Options of `confirm-removals`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("process").required(true).args(["control", "state"]))]
pub(super) struct ConfirmRemovals {
    /// Number of identities or instances, as logged
    number: usize,
    /// Control socket of the rotator
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    /// State folder of the issuer
    #[arg(long, value_name = "FOLDER")]
    state: Option<PathBuf>,
}

impl ConfirmRemovals {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self { number, control, state } = self;
        if let Some(state) = state {
            StateFolder::open(state)?.confirm_removals(number)?;
        }
        if let Some(control) = control
            && let Reply::Error(problem) = control::send(&control, &Command::ConfirmRemovals { number })?
        {
            anyhow::bail!(problem);
        }
        Ok(ExitCode::SUCCESS)
    }
}
