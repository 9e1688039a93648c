//! `adopt`, `transfer-owner` and `retire`.

use std::{collections::BTreeSet, process::ExitCode};

use anyhow::bail;

use super::{
    Colour, Selection, print,
    publish::{Prepared, prepare, unlisted},
    read_sources,
};
use crate::{
    config::Config,
    diff,
    engine::{Planned, ZonePlan},
    plan,
    publication::Target,
    record::{Name, Record},
    runner::{LaunchOptions, ProviderState},
};

/// `adopt`.
#[derive(Debug, clap::Args)]
pub(super) struct Adopt {
    #[command(flatten)]
    selection: Selection,
    /// Only these names
    #[arg(value_name = "NAME", value_parser = Name::parse)]
    names: Vec<Name>,
    /// Only show the changes
    #[arg(long)]
    dry_run: bool,
}

/// `transfer-owner`.
#[derive(Debug, clap::Args)]
pub(super) struct Transfer {
    #[command(flatten)]
    selection: Selection,
    /// Present owner
    #[arg(long, value_name = "OWNER")]
    from: String,
    /// Next owner
    #[arg(long, value_name = "OWNER")]
    to: String,
    /// Only these names
    #[arg(value_name = "NAME", value_parser = Name::parse)]
    names: Vec<Name>,
    /// Only show the changes
    #[arg(long)]
    dry_run: bool,
}

/// `retire`.
#[derive(Debug, clap::Args)]
pub(super) struct Retire {
    #[command(flatten)]
    selection: Selection,
    /// Allow this many deletions in every provider
    #[arg(long, value_name = "N", conflicts_with = "keep_records")]
    confirm_deletions: Option<usize>,
    /// Keep the records and remove only their ownership
    #[arg(long)]
    keep_records: bool,
    /// Only show the changes
    #[arg(long)]
    dry_run: bool,
}

/// How a command changes one zone.
type Change<'a> = &'a dyn Fn(&Target, &str, &[Record]) -> plan::Plan;

impl Adopt {
    pub(super) async fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let Self { selection, names, dry_run } = self;
        change(config, &selection, dry_run, None, &|target, owner, records| {
            let wanted: BTreeSet<&Name> = target.desired.records.iter().map(|record| &record.name).collect();
            let is_wanted = |record: &&Record| {
                record.labels.owner().is_empty()
                    && wanted.contains(&record.name)
                    && (names.is_empty() || names.contains(&record.name))
                    && target.desired.records.iter().any(|wish| wish.key() == record.key())
            };
            plan::transfer(records.iter().filter(is_wanted), owner)
        })
        .await
    }
}

impl Transfer {
    pub(super) async fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let Self { selection, from, to, names, dry_run } = self;
        if from.is_empty() || to.is_empty() {
            bail!(
                "an owner is empty; use `adopt` for records without an owner, and `retire --keep-records` to give them up"
            );
        }
        change(config, &selection, dry_run, None, &|_, _, records| {
            let is_meant = |record: &&Record| {
                record.labels.owner() == from && (names.is_empty() || names.contains(&record.name))
            };
            plan::transfer(records.iter().filter(is_meant), &to)
        })
        .await
    }
}

impl Retire {
    pub(super) async fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let Self { selection, confirm_deletions, keep_records, dry_run } = self;
        change(config, &selection, dry_run, confirm_deletions, &|_, owner, records| match keep_records {
            true => plan::transfer(records.iter().filter(|record| record.labels.owner() == owner), ""),
            false => plan::retire(records, owner),
        })
        .await
    }
}

/// Plans a change in every zone of the selected providers, shows it, and applies it.
async fn change(
    config: &Config,
    selection: &Selection,
    is_dry: bool,
    confirmed: Option<usize>,
    change: Change<'_>,
) -> anyhow::Result<ExitCode> {
    let options = LaunchOptions::of(config).map_err(anyhow::Error::msg)?;
    let (read, _) = read_sources(config).await?;
    let mut failed = false;
    for target in selection.of(&read)? {
        let name = target.name();
        let problems = match prepare(target, &options).await {
            Ok(prepared) => change_one(target, prepared, is_dry, confirmed, change).await?,
            Err(problem) => vec![problem],
        };
        for problem in &problems {
            eprintln!("{name}: {problem}");
        }
        failed |= !problems.is_empty();
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

async fn change_one(
    target: &Target,
    prepared: Prepared,
    is_dry: bool,
    confirmed: Option<usize>,
    change: Change<'_>,
) -> anyhow::Result<Vec<String>> {
    let Prepared { mut engine, survey } = prepared;
    let owner = engine.rules.owner.clone();
    if owner.is_empty() {
        return Ok(vec!["its registry is noop, so there is no ownership; set registry to txt".to_owned()]);
    }
    let mut zones = Vec::new();
    for zone in &survey {
        let Ok(view) = &zone.view else { continue };
        let in_scope: Vec<Record> = view
            .records
            .iter()
            .filter(|record| engine.rules.domains.matches(&record.name))
            .cloned()
            .collect();
        let owned: BTreeSet<&Name> = in_scope
            .iter()
            .filter(|record| record.labels.owner() == owner)
            .map(|record| &record.name)
            .collect();
        zones.push(ZonePlan {
            id: zone.id.clone(),
            plan: change(target, &owner, &in_scope),
            owned: owned.len(),
        });
    }
    let planned = Planned { zones, notes: Vec::new(), wanted: 0 };
    print(&diff::text(&target.name(), &planned, &unlisted(&survey), confirmed, Colour::Auto.is_on()))?;
    if is_dry {
        return Ok(unlisted(&survey));
    }
    let report = engine.apply(&survey, &planned, confirmed, true, &|_| {}).await;
    print(&format!("{}: {} names changed\n", target.name(), report.applied()))?;
    let ProviderState { general, names, .. } = ProviderState::of_report(&report);
    Ok(general.into_iter().chain(names.into_iter().map(|(_, problem)| problem)).collect())
}
