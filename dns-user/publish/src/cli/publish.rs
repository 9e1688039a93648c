//! `plan` and `apply`.

use std::{collections::BTreeMap, process::ExitCode};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::{Colour, Selection, complain, print, read_sources};
use crate::{
    config::Config,
    diff,
    engine::{Engine, Planned, Surveyed},
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
    pub(super) survey: Vec<Surveyed>,
}

/// Creates the engine of a target and lists its zones.
pub(super) async fn prepare(target: &Target, options: &LaunchOptions) -> Result<Prepared, String> {
    let mut engine = launch(&target.record, &target.name(), options)?;
    let survey = engine.survey().await.map_err(|error| error.to_string())?;
    Ok(Prepared { engine, survey })
}

/// Returns the errors of zones that could not be listed.
pub(super) fn unlisted(survey: &[Surveyed]) -> Vec<String> {
    let failed = survey.iter().filter_map(|zone| Some((zone, zone.view.as_ref().err()?)));
    failed.map(|(zone, error)| format!("zone {}: {error}", zone.id)).collect()
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
                Ok(Prepared { engine, survey }) => (engine.plan(&survey, &target.desired), unlisted(&survey)),
                Err(problem) => (Planned { zones: Vec::new(), notes: Vec::new(), wanted: 0 }, vec![problem]),
            };
            failed |= !failures.is_empty();
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
        for target in selection.of(&read)? {
            let name = target.name();
            let problems = match prepare(target, &options).await {
                Ok(prepared) if target.record.parameters.is_set("dry-run") => {
                    let planned = prepared.engine.plan(&prepared.survey, &target.desired);
                    print(&diff::text(
                        &name,
                        &planned,
                        &unlisted(&prepared.survey),
                        None,
                        Colour::Auto.is_on(),
                    ))?;
                    eprintln!("{name}: nothing changed, because its parameter dry-run is true");
                    unlisted(&prepared.survey)
                }
                Ok(prepared) => publish(target, prepared, confirm_deletions, bars).await?,
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

/// Publishes to one provider, with a progress bar on a terminal. Returns the problems.
async fn publish(
    target: &Target,
    mut prepared: Prepared,
    confirmed: Option<usize>,
    bars: &MultiProgress,
) -> anyhow::Result<Vec<String>> {
    let planned = prepared.engine.plan(&prepared.survey, &target.desired);
    let changes: usize = planned.zones.iter().map(|zone| zone.plan.changes.len()).sum();
    let style = ProgressStyle::with_template("{msg} {bar:40} {pos}/{len} names, {elapsed}, {eta} left")?;
    let bar = bars.add(ProgressBar::new(changes as u64).with_style(style).with_message(target.name()));
    let report = prepared.engine.reconcile(&target.desired, confirmed, &|done| bar.inc(done as u64)).await;
    bar.finish_and_clear();
    Ok(match report {
        Ok(report) => {
            print(&format!("{}: {} names changed\n", target.name(), report.applied()))?;
            let state = ProviderState::of_report(&report);
            for remark in state.remarks(target) {
                complain(&format!("{}: {remark}", target.name()));
            }
            state.problems(target)
        }
        Err(error) => vec![error.to_string()],
    })
}
