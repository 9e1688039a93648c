//! `check`, `render` and `status`.

use std::{fs, path::PathBuf, process::ExitCode};

use anyhow::Context as _;

use super::{Selection, complain, print, read_sources};
use crate::{
    api::{Overview, ProviderOverview},
    config::Config,
    control, render,
    runner::{LaunchOptions, alias_writer, launch, options_problems},
};

#[derive(Debug, clap::Args)]
pub(super) struct Render {
    #[command(flatten)]
    selection: Selection,
    /// Folder for the manifests; default: standard output
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
    /// Container image of external-dns
    #[arg(long, value_name = "IMAGE", default_value = render::IMAGE)]
    image: String,
}

/// `status`. Exit code 1 if something is not published.
#[derive(Debug, clap::Args)]
pub(super) struct Status {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Checks everything that can be checked without contacting a provider.
pub(super) async fn check(config: &Config) -> anyhow::Result<ExitCode> {
    let options = LaunchOptions::of(config).map_err(anyhow::Error::msg)?;
    let (read, mut failed) = read_sources(config).await?;
    for problem in options_problems(config, &read.publication) {
        complain(&problem);
        failed = true;
    }
    if let Some(Err(problem)) = config.webhook.as_ref().map(|webhook| alias_writer(config, webhook)) {
        complain(&problem);
        failed = true;
    }
    for target in read.publication.targets.values() {
        let name = target.name();
        if let Err(problem) = launch(target, &options) {
            complain(&format!("{name}: {problem}"));
            failed = true;
        }
        for remark in target.record.remarks() {
            println!("{name}: {remark}");
        }
        let documents = target.counts.len();
        println!("{name}: {} record sets from {documents} documents", target.counts.values().sum::<usize>());
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

impl Render {
    pub(super) async fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let Self { selection, output, image } = self;
        let (mut read, failed) = read_sources(config).await?;
        let selected: Vec<String> = selection.of(&read)?.iter().map(|target| target.name()).collect();
        read.publication.targets.retain(|name, _| selected.contains(name));
        let manifests = render::manifests(&read.publication, &image)?;
        match output {
            None => print(&manifests.into_values().collect::<Vec<_>>().join("---\n"))?,
            Some(folder) => {
                fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
                for (name, text) in manifests {
                    let path = folder.join(name);
                    fs::write(&path, text).with_context(|| path.display().to_string())?;
                    println!("{}", path.display());
                }
            }
        }
        Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }
}

impl Status {
    pub(super) async fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let body = control::get(&config.socket, "/status").await?;
        let overview: Overview = serde_json::from_slice(&body).context("cannot parse the response")?;
        let is_well = overview.problems.is_empty()
            && overview.providers.values().all(|provider| provider.synced)
            && overview.documents.iter().all(|document| document.last_error.is_none());
        match self.json {
            true => print(&(serde_json::to_string_pretty(&overview)? + "\n"))?,
            false => print(&text(&overview))?,
        }
        Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// Formats the overview as text.
fn text(overview: &Overview) -> String {
    let Overview { providers, documents, problems } = overview;
    let mut text = String::new();
    for (name, provider) in providers {
        let ProviderOverview { provider, synced, wanted, owned, problems, remarks } = provider;
        let state = if *synced { "published" } else { "NOT PUBLISHED" };
        text.push_str(&format!(
            "{name} ({provider}): {state}, {wanted} record sets wanted, {owned} names owned\n"
        ));
        text.extend(problems.iter().map(|problem| format!("  ! {problem}\n")));
        text.extend(remarks.iter().map(|remark| format!("  # {remark}\n")));
    }
    for document in documents {
        let state = match &document.last_error {
            None => "ok".to_owned(),
            Some(error) => error.clone(),
        };
        text.push_str(&format!("{} (generation {}): {state}\n", document.id, document.observed_generation));
    }
    text.extend(problems.iter().map(|problem| format!("! {problem}\n")));
    if text.is_empty() {
        text.push_str("no documents; add some to the folder named in the configuration\n");
    }
    text
}
