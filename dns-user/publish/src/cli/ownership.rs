//! `adopt`, `transfer-owner` and `retire`.

use std::{collections::BTreeSet, process::ExitCode};

use anyhow::bail;

use super::{
    Colour, Selection, complain, complain_of, print,
    publish::{Prepared, plan_text, prepare, unlisted},
    read_sources,
};
use crate::{
    config::Config,
    engine::{Planned, ZonePlan},
    plan::{self, Action},
    provider::OnConflict,
    publication::Target,
    record::{Name, Record},
    runner::LaunchOptions,
    status::ProviderState,
};

#[derive(Debug, clap::Args)]
pub(super) struct Adopt {
    #[command(flatten)]
    selection: Selection,
    /// Limit the command to these names
    #[arg(value_name = "NAME", value_parser = Name::parse)]
    names: Vec<Name>,
    /// Only show the changes
    #[arg(long)]
    dry_run: bool,
}

#[derive(Debug, clap::Args)]
pub(super) struct Transfer {
    #[command(flatten)]
    selection: Selection,
    /// Current owner of the records
    #[arg(long, value_name = "OWNER")]
    from: String,
    /// New owner of the records
    #[arg(long, value_name = "OWNER")]
    to: String,
    /// Limit the command to these names
    #[arg(value_name = "NAME", value_parser = Name::parse)]
    names: Vec<Name>,
    /// Only show the changes
    #[arg(long)]
    dry_run: bool,
}

#[derive(Debug, clap::Args)]
pub(super) struct Retire {
    #[command(flatten)]
    selection: Selection,
    /// Allow up to this many deletions per provider
    #[arg(long, value_name = "N", conflicts_with = "keep_records")]
    confirm_deletions: Option<usize>,
    /// Only names at or below these domains, regardless of domain-filter
    #[arg(value_name = "DOMAIN", value_parser = Name::parse)]
    domains: Vec<Name>,
    /// Keep the records and remove only their ownership
    #[arg(long)]
    keep_records: bool,
    /// Delete only this owner's ownership records without a record; another OWNER only if its publisher is gone
    #[arg(long, value_name = "OWNER", num_args = 0..=1, require_equals = true, conflicts_with_all = ["keep_records", "confirm_deletions"])]
    orphans: Option<Option<String>>,
    /// Only show the changes
    #[arg(long)]
    dry_run: bool,
}

/// The part of a zone that a command may change.
struct InScope {
    records: Vec<Record>,
    /// Owner records without a record.
    orphans: Vec<Record>,
}

/// Plans a command's change of one zone; the text is the owner label of the publisher.
type Change<'a> = &'a dyn Fn(&Target, &str, &InScope) -> plan::Plan;

/// A change and its limits.
struct OwnershipChange<'a> {
    is_dry: bool,
    confirmed: Option<usize>,
    /// Domains that replace the provider's filters unless empty.
    domains: &'a [Name],
    change: Change<'a>,
    /// Error if no record is concerned.
    nothing: Option<&'a str>,
}

impl Adopt {
    pub(super) async fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let Self {
            selection,
            names,
            dry_run,
        } = self;
        let change: Change<'_> = &|target,
                                   owner,
                                   InScope {
                                       records,
                                       orphans: _,
                                   }| {
            let wanted: BTreeSet<&Name> = target
                .desired
                .records
                .iter()
                .map(|record| &record.name)
                .collect();
            let is_wanted = |record: &&Record| {
                record.labels.owner().is_empty()
                    && wanted.contains(&record.name)
                    && (names.is_empty() || names.contains(&record.name))
                    && target
                        .desired
                        .records
                        .iter()
                        .any(|wanted| wanted.key() == record.key())
            };
            plan::transfer(records.iter().filter(is_wanted), owner)
        };
        let nothing =
            Some("no wanted record without an owner matches; see `bosh-dns-publish plan`");
        OwnershipChange {
            is_dry: dry_run,
            confirmed: None,
            domains: &[],
            change,
            nothing,
        }
        .run(config, &selection)
        .await
    }
}

impl Transfer {
    pub(super) async fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let Self {
            selection,
            from,
            to,
            names,
            dry_run,
        } = self;
        if from.is_empty() || to.is_empty() {
            bail!(
                "an owner is empty; use `adopt` for records without an owner, and `retire --keep-records` to \
                 release records"
            );
        }
        let change: Change<'_> = &|_,
                                   _,
                                   InScope {
                                       records,
                                       orphans: _,
                                   }| {
            let is_meant = |record: &&Record| {
                record.labels.owner() == from && (names.is_empty() || names.contains(&record.name))
            };
            plan::transfer(records.iter().filter(is_meant), &to)
        };
        let nothing =
            Some("no record of the owner in --from matches; check the owner and the names");
        OwnershipChange {
            is_dry: dry_run,
            confirmed: None,
            domains: &[],
            change,
            nothing,
        }
        .run(config, &selection)
        .await
    }
}

impl Retire {
    pub(super) async fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let Self {
            selection,
            confirm_deletions: confirmed,
            domains,
            keep_records,
            orphans,
            dry_run,
        } = self;
        let change: Change<'_> = &|_,
                                   owner,
                                   InScope {
                                       records,
                                       orphans: found,
                                   }| match &orphans {
            Some(of) => plan::drop_orphans(found, of.as_deref().unwrap_or(owner)),
            None if keep_records => plan::transfer(
                records
                    .iter()
                    .filter(|record| record.labels.owner() == owner),
                "",
            ),
            None => plan::retire(records, owner),
        };
        OwnershipChange {
            is_dry: dry_run,
            confirmed,
            domains: &domains,
            change,
            nothing: None,
        }
        .run(config, &selection)
        .await
    }
}

impl OwnershipChange<'_> {
    /// Plans the change in every zone of the selected providers, shows it, and applies it.
    async fn run(&self, config: &Config, selection: &Selection) -> anyhow::Result<ExitCode> {
        let options = LaunchOptions::of(config)?;
        let (read, _) = read_sources(config).await?;
        let mut failed = false;
        for target in selection.of(&read)? {
            let name = target.name();
            let problems = match prepare(target, &options).await {
                Ok(prepared) => self.change_one(target, prepared).await?,
                Err(problem) => vec![problem.to_string()],
            };
            failed |= complain_of(&name, &problems);
        }
        Ok(if failed {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        })
    }

    async fn change_one(
        &self,
        target: &Target,
        (mut engine, listing): Prepared,
    ) -> anyhow::Result<Vec<String>> {
        let Self {
            is_dry,
            confirmed,
            domains,
            change,
            nothing,
        } = *self;
        let owner = engine.rules.owner.clone();
        if owner.is_empty() {
            return Ok(vec![
                "its registry is noop, which has no ownership; set registry to txt".to_owned(),
            ]);
        }
        let is_in_scope = |record: &&Record| match domains {
            [] => engine.rules.domains.matches(&record.name),
            domains => domains.iter().any(|domain| record.name.is_within(domain)),
        };
        let mut zones = Vec::new();
        for zone in &listing {
            let Ok(view) = &zone.content else { continue };
            let select = |records: &[Record]| records.iter().filter(is_in_scope).cloned().collect();
            let in_scope = InScope {
                records: select(&view.records),
                orphans: select(&view.orphans),
            };
            let ours = in_scope
                .records
                .iter()
                .filter(|record| record.labels.owner() == owner);
            let owned = ours
                .map(|record| &record.name)
                .collect::<BTreeSet<_>>()
                .len();
            let plan = change(target, &owner, &in_scope);
            zones.push(ZonePlan {
                id: zone.id.clone(),
                plan,
                owned,
                recent: 0,
            });
        }
        let planned = Planned {
            zones,
            notes: Vec::new(),
            wanted: 0,
        };
        let mut failures = unlisted(&listing);
        failures.extend(nothing.filter(|_| planned.is_empty()).map(str::to_owned));
        print(&plan_text(
            &target.name(),
            &planned,
            &failures,
            confirmed,
            Colour::Auto,
        ))?;
        for (found, wanted) in differing(target, &planned) {
            complain(&format!(
                "{}: the next `apply` changes {found} to the wanted {wanted}",
                target.name()
            ));
        }
        if is_dry || planned.is_empty() {
            return Ok(failures);
        }
        let report = engine
            .apply(&listing, &planned, confirmed, OnConflict::Isolate, &|_| {})
            .await;
        print(&format!(
            "{}: {} names changed\n",
            target.name(),
            report.applied()
        ))?;
        let ProviderState { general, names, .. } =
            ProviderState::of_report(&report, &ProviderState::default());
        Ok(general
            .into_iter()
            .chain(names.into_iter().map(|(_, problem)| problem))
            .collect())
    }
}

/// Returns the records that an adoption takes although documents want another value, with what they want.
fn differing<'a>(target: &'a Target, planned: &'a Planned) -> Vec<(&'a Record, &'a Record)> {
    let taken = planned
        .zones
        .iter()
        .flat_map(|zone| zone.plan.actions())
        .filter_map(|action| match action {
            Action::Update { before, .. } if before.labels.owner().is_empty() => Some(before),
            _ => None,
        });
    let wanted = |found: &&'a Record| {
        let candidates = target
            .desired
            .records
            .iter()
            .filter(|wanted| wanted.key() == found.key());
        candidates
            .into_iter()
            .find(|wanted| wanted.targets != found.targets && !wanted.targets.is_empty())
    };
    taken
        .filter_map(|found| Some((found, wanted(&found)?)))
        .collect()
}
