//! `plan` and `apply`.

use std::{
    collections::BTreeMap,
    io::{self, IsTerminal as _},
    os::unix::net::UnixStream,
    process::ExitCode,
    time::Duration,
};

use anyhow::Context as _;
use hyper::{Method, StatusCode};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::{Colour, Selection, complain, print, read_sources};
use crate::{
    api::{ConfirmRequest, Confirmed},
    config::Config,
    control, diff,
    engine::{Engine, Planned, ZoneListing},
    publication::Target,
    runner::{LaunchOptions, ProviderState, launch},
};

#[derive(Debug, clap::Args)]
pub(super) struct Plan {
    #[command(flatten)]
    selection: Selection,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// When to use colour
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    color: Colour,
}

#[derive(Debug, clap::Args)]
pub(super) struct Apply {
    #[command(flatten)]
    selection: Selection,
    /// Allow up to this many deletions per provider, even if no document wants a record
    #[arg(long, value_name = "N")]
    confirm_deletions: Option<usize>,
    /// Only show the changes, as `plan` does
    #[arg(long)]
    dry_run: bool,
}

/// A provider with its plan.
pub(super) struct Prepared {
    pub(super) engine: Engine,
    pub(super) listing: Vec<ZoneListing>,
}

/// Maximum wait for the round of a running publisher.
const ROUND: Duration = Duration::from_mins(10);

/// Creates the engine of a target and lists its zones.
pub(super) async fn prepare(target: &Target, options: &LaunchOptions) -> Result<Prepared, String> {
    let mut engine = launch(target, options)?;
    let listing = engine.list().await.map_err(|error| error.to_string())?;
    engine.prepare(&target.desired).await.map_err(|error| error.to_string())?;
    Ok(Prepared { engine, listing })
}

/// Returns the errors of zones that could not be listed.
pub(super) fn unlisted(listing: &[ZoneListing]) -> Vec<String> {
    let failed = listing.iter().filter_map(|zone| Some((zone, zone.view.as_ref().err()?)));
    failed.map(|(zone, error)| format!("zone {}: {error}", zone.id)).collect()
}

/// Returns whether a wanted record is held back.
fn holds_back(planned: &Planned, target: &Target) -> bool {
    planned.notes().any(|note| target.origins.contains_key(&note.name))
}

impl Plan {
    pub(super) async fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let Self { selection, json, color } = self;
        let options = LaunchOptions::of(config).map_err(anyhow::Error::msg)?;
        let (read, has_problems) = read_sources(config).await?;
        let mut failed = has_problems;
        let mut changes = false;
        let mut objects = BTreeMap::new();
        let mut text = String::new();
        for target in selection.of(&read)? {
            let (planned, failures) = match prepare(target, &options).await {
                Ok(Prepared { engine, listing }) => {
                    (engine.plan(&listing, &target.desired), unlisted(&listing))
                }
                Err(problem) => (Planned::default(), vec![problem]),
            };
            failed |= !failures.is_empty() || holds_back(&planned, target);
            changes |= !planned.is_empty();
            text.push_str(&diff::text(&target.name(), &planned, &failures, None, color.is_on()));
            objects.insert(target.name(), diff::json(&planned, &failures));
        }
        match json {
            true => print(&(serde_json::to_string_pretty(&objects)? + "\n"))?,
            false => print(&text)?,
        }
        Ok(match (failed, changes) {
            (true, _) => ExitCode::FAILURE,
            (false, true) => ExitCode::from(2),
            (false, false) => ExitCode::SUCCESS,
        })
    }
}

impl Apply {
    pub(super) async fn run(self, config: &Config, bars: &MultiProgress) -> anyhow::Result<ExitCode> {
        let Self { selection, confirm_deletions, dry_run } = self;
        if dry_run {
            return Plan { selection, json: false, color: Colour::Auto }.run(config).await;
        }
        let options = LaunchOptions::of(config).map_err(anyhow::Error::msg)?;
        let (read, mut failed) = read_sources(config).await?;
        let targets = selection.of(&read)?;
        if let Some(deletions) = confirm_deletions
            && UnixStream::connect(&config.socket).is_ok()
        {
            let providers = targets.iter().map(|target| target.name()).collect();
            let is_done = confirm(config, ConfirmRequest { deletions, providers }).await?;
            return Ok(if is_done && !failed { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        for target in targets {
            let name = target.name();
            let problems = match prepare(target, &options).await {
                Ok(prepared) if target.record.parameters.is_set("dry-run") => {
                    let planned = prepared.engine.plan(&prepared.listing, &target.desired);
                    let failures = unlisted(&prepared.listing);
                    print(&diff::text(&name, &planned, &failures, None, Colour::Auto.is_on()))?;
                    eprintln!("{name}: nothing changed, because its parameter dry-run is true");
                    failures
                }
                Ok(prepared) => publish(target, prepared, confirm_deletions, &options, bars).await?,
                Err(problem) => vec![problem],
            };
            for problem in &problems {
                complain(&format!("{name}: {problem}"));
            }
            failed |= !problems.is_empty();
        }
        Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }
}

/// Lets the running publisher make the deletions: it has the credentials, and would otherwise
/// compete with this process. Returns whether everything is published.
async fn confirm(config: &Config, request: ConfirmRequest) -> anyhow::Result<bool> {
    let body = serde_json::to_vec(&request)?;
    let (status, body) =
        control::call_within(ROUND, &config.socket, Method::POST, "/confirm", body.into()).await?;
    if status != StatusCode::OK {
        anyhow::bail!("{}: {status}: {}", config.socket.display(), String::from_utf8_lossy(&body));
    }
    let results: BTreeMap<String, Confirmed> =
        serde_json::from_slice(&body).context("cannot parse the response")?;
    for (name, Confirmed { changed, problems }) in &results {
        print(&format!("{name}: {changed} names changed\n"))?;
        for problem in problems {
            complain(&format!("{name}: {problem}"));
        }
    }
    Ok(results.values().all(|result| result.problems.is_empty()))
}

/// Publishes to one provider, with a progress bar on a terminal. Returns the problems.
async fn publish(
    target: &Target,
    prepared: Prepared,
    confirmed: Option<usize>,
    options: &LaunchOptions,
    bars: &MultiProgress,
) -> anyhow::Result<Vec<String>> {
    let Prepared { mut engine, listing } = prepared;
    let style = ProgressStyle::with_template("{msg} {bar:40} {pos}/{len} names, {elapsed}, {eta} left")?;
    let bar = ProgressBar::hidden();
    if io::stderr().is_terminal() {
        let planned = engine.plan(&listing, &target.desired);
        let changes: usize = planned.zones.iter().map(|zone| zone.plan.changes.len()).sum();
        bar.set_length(changes as u64);
    }
    let bar = bars.add(bar.with_style(style).with_message(target.name()));
    let progress = |done: usize| bar.inc(done as u64);
    let report = engine.reconcile_listed(listing, &target.desired, confirmed, &progress).await;
    bar.finish_and_clear();
    options.save_deletions(&target.name(), &engine.deletions);
    Ok(match report {
        Ok(report) => {
            print(&format!("{}: {} names changed\n", target.name(), report.applied()))?;
            let state = ProviderState::of_report(&report, &ProviderState::default());
            for remark in state.remarks(target) {
                complain(&format!("{}: {remark}", target.name()));
            }
            state.problems(target)
        }
        Err(error) => vec![error.to_string()],
    })
}
