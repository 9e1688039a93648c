//! `adopt`, `transfer-owner` and `retire`.

use std::process::ExitCode;

use anyhow::bail;

use super::{
    Colour, Selection, complain, complain_of, exit_code, print,
    publish::{Prepared, plan_text, prepare, unlisted},
    read_sources,
};
use crate::{
    config::Config,
    engine::{Engine, Planned, ZoneListing, ZonePlan},
    plan::{self, Action},
    provider::OnConflict,
    publication::Target,
    record::{DomainFilter, Name, Record},
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
pub(super) struct TransferOwner {
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

enum Change {
    /// Takes the wanted records without an owner; all of them without names.
    Adopt(Vec<Name>),
    /// Gives the records of an owner to another one; all of them without names.
    Transfer {
        from: String,
        to: String,
        names: Vec<Name>,
    },
    /// Deletes the publisher's records.
    Retire,
    /// Removes the ownership of the publisher's records.
    Release,
    /// Deletes owner records without a record: of this owner, or of the publisher.
    DropOrphans(Option<String>),
}

/// A change and its limits.
struct OwnershipChange {
    is_dry: bool,
    confirmed: Option<usize>,
    /// Domains that replace the provider's filters unless empty.
    domains: Vec<Name>,
    change: Change,
    /// Error if no record is concerned.
    nothing: Option<&'static str>,
}

impl Adopt {
    pub(super) async fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let adoption = OwnershipChange {
            is_dry: self.dry_run,
            confirmed: None,
            domains: Vec::new(),
            change: Change::Adopt(self.names),
            nothing: Some("no wanted record without an owner matches; see `bosh-dns-publish plan`"),
        };
        adoption.run(config, &self.selection).await
    }
}

impl TransferOwner {
    pub(super) async fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let Self {
            selection,
            from,
            to,
            names,
            dry_run,
        } = self;
        // An empty text in a script's variable would adopt or release everything.
        if from.is_empty() || to.is_empty() {
            bail!(
                "an owner is empty; use `adopt` for records without an owner, and `retire --keep-records` to \
                 release records"
            );
        }
        let transfer = OwnershipChange {
            is_dry: dry_run,
            confirmed: None,
            domains: Vec::new(),
            change: Change::Transfer { from, to, names },
            nothing: Some(
                "no record of the owner in --from matches; check the owner and the names",
            ),
        };
        transfer.run(config, &selection).await
    }
}

impl Retire {
    pub(super) async fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let retirement = OwnershipChange {
            is_dry: self.dry_run,
            confirmed: self.confirm_deletions,
            domains: self.domains,
            change: match self.orphans {
                Some(owner) => Change::DropOrphans(owner),
                None if self.keep_records => Change::Release,
                None => Change::Retire,
            },
            nothing: None,
        };
        retirement.run(config, &self.selection).await
    }
}

impl Change {
    /// Plans the change of a zone's records and orphans in scope; `owner` is the publisher's owner label.
    fn plan(
        &self,
        target: &Target,
        owner: &str,
        records: &[Record],
        orphans: &[Record],
    ) -> plan::Plan {
        match self {
            Self::Adopt(names) => {
                let wanted = records.iter().filter(|record| {
                    // Only `transfer-owner` takes records of another owner.
                    record.labels.owner().is_empty()
                        && is_named(names, record)
                        && is_wanted(target, record)
                });
                plan::transfer(wanted, owner)
            }
            Self::Transfer { from, to, names } => {
                let meant = of_owner(records, from).filter(|record| is_named(names, record));
                plan::transfer(meant, to)
            }
            Self::Retire => plan::retire(records, owner),
            Self::Release => plan::transfer(of_owner(records, owner), ""),
            Self::DropOrphans(of) => plan::drop_orphans(orphans, of.as_deref().unwrap_or(owner)),
        }
    }
}

fn of_owner<'a>(records: &'a [Record], owner: &'a str) -> impl Iterator<Item = &'a Record> {
    records
        .iter()
        .filter(move |record| record.labels.owner() == owner)
}

/// Returns whether a record is among the names of a command, which means all of them if it has none.
fn is_named(names: &[Name], record: &Record) -> bool {
    names.is_empty() || names.contains(&record.name)
}

fn is_wanted(target: &Target, record: &Record) -> bool {
    let wanted = &target.desired.records;
    wanted.iter().any(|wanted| wanted.key() == record.key())
}

impl OwnershipChange {
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
        Ok(exit_code(failed))
    }

    async fn change_one(
        &self,
        target: &Target,
        (mut engine, listing): Prepared,
    ) -> anyhow::Result<Vec<String>> {
        // An owner record without an owner cannot be written.
        if engine.rules.owner.is_empty() {
            return Ok(vec![
                "its registry is noop, which has no ownership; set registry to txt".to_owned(),
            ]);
        }
        let planned = self.planned(target, &engine, &listing);
        let mut failures = unlisted(&listing);
        if let Some(nothing) = self.nothing
            // A misspelt name or owner must not look like success.
            && planned.is_empty()
        {
            failures.push(nothing.to_owned());
        }
        print(&plan_text(
            &target.name(),
            &planned,
            &failures,
            self.confirmed,
            Colour::Auto,
        ))?;
        // A record kept by hand loses its data once it is owned.
        for (found, wanted) in differing(target, &planned) {
            complain(&format!(
                "{}: the next `apply` changes {found} to the wanted {wanted}",
                target.name()
            ));
        }
        if self.is_dry || planned.is_empty() {
            return Ok(failures);
        }
        let report = engine
            .apply(
                &listing,
                &planned,
                self.confirmed,
                // A command has one round: what conflicts is reported, and everything else is done.
                OnConflict::Isolate,
                &|_| {},
            )
            .await;
        print(&format!(
            "{}: {} names changed\n",
            target.name(),
            report.applied()
        ))?;
        let ProviderState { general, names, .. } =
            ProviderState::of_report(&report, &ProviderState::default());
        let mut problems = general;
        for (_, problem) in names {
            problems.push(problem);
        }
        Ok(problems)
    }

    /// Plans the change of every zone that could be listed.
    fn planned(&self, target: &Target, engine: &Engine, listing: &[ZoneListing]) -> Planned {
        let owner = &engine.rules.owner;
        let mut zones = Vec::new();
        for zone in listing {
            let Ok(view) = &zone.content else { continue };
            let records = self.select(&view.records, &engine.rules.domains);
            let orphans = self.select(&view.orphans, &engine.rules.domains);
            zones.push(ZonePlan {
                id: zone.id.clone(),
                plan: self.change.plan(target, owner, &records, &orphans),
                owned: engine.owned(&records),
                // An operator watches a command; only the deletions of one run are limited.
                recent: 0,
            });
        }
        Planned {
            zones,
            notes: Vec::new(),
            // No document is asked, so a retirement always needs a confirmation.
            wanted: 0,
        }
    }

    /// Returns the records that the command may change.
    fn select(&self, records: &[Record], filter: &DomainFilter) -> Vec<Record> {
        let mut selected = Vec::new();
        for record in records {
            let is_in_scope = match &self.domains[..] {
                [] => filter.matches(&record.name),
                // Named domains replace the filters: records outside of a narrowed filter are what
                // `retire` is for.
                domains => domains.iter().any(|domain| record.name.is_within(domain)),
            };
            if is_in_scope {
                selected.push(record.clone());
            }
        }
        selected
    }
}

/// Returns the records that an adoption takes although documents want another value, with what they want.
fn differing<'a>(target: &'a Target, planned: &'a Planned) -> Vec<(&'a Record, &'a Record)> {
    let mut found = Vec::new();
    for action in planned.actions() {
        let Action::Update { before, .. } = action else {
            continue;
        };
        if !before.labels.owner().is_empty() {
            continue;
        }
        for wanted in &target.desired.records {
            if wanted.key() == before.key()
                && wanted.targets != before.targets
                && !wanted.targets.is_empty()
            {
                found.push((before, wanted));
                break;
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cli::tests::target,
        ownership::Registry,
        provider::{ProviderError, Zone},
        record::{Labels, RecordType},
        runner::launch,
    };

    fn name(text: &str) -> Name {
        Name::parse(text).unwrap()
    }

    fn owned(text: &str, owner: &str) -> Record {
        let mut record = Record::parse(text, RecordType::A, ["192.0.2.1"]).unwrap();
        record.labels = Labels::of(owner, "");
        record
    }

    fn records() -> Vec<Record> {
        vec![
            owned("free.example.org", ""),
            owned("wanted.example.org", ""),
            owned("taken.example.org", "you"),
            owned("own.example.org", "default"),
            owned("other.example.net", "default"),
        ]
    }

    /// Returns the change of one zone as lines.
    fn planned(change: &Change) -> Vec<String> {
        let target = target(vec![
            owned("wanted.example.org", ""),
            owned("taken.example.org", ""),
            owned("own.example.org", ""),
        ]);
        let orphans = [
            owned("a-x.example.org", "default"),
            owned("a-y.example.org", "you"),
        ];
        let plan = change.plan(&target, "default", &records(), &orphans);
        assert_eq!(plan.notes, []);
        plan.actions().map(ToString::to_string).collect()
    }

    #[test]
    fn ownership_changes_concern_selected_records() {
        let moved =
            |record: &str, from: &str, to: &str| format!("~ {record} A: owner {from} -> {to:?}");
        let adopted = moved("wanted.example.org", "none", "default");
        for (names, expected) in [
            (vec![], vec![adopted.clone()]),
            (vec!["wanted.example.org"], vec![adopted]),
            (vec!["free.example.org"], vec![]),
            (vec!["taken.example.org"], vec![]),
        ] {
            let names = names.into_iter().map(name).collect();
            assert_eq!(planned(&Change::Adopt(names)), expected);
        }
        let transfer = |from: &str, to: &str, names: &[&str]| {
            planned(&Change::Transfer {
                from: from.to_owned(),
                to: to.to_owned(),
                names: names.iter().map(|text| name(text)).collect(),
            })
        };
        let taken = moved("taken.example.org", "\"you\"", "me");
        assert_eq!(transfer("you", "me", &[]), [&*taken]);
        assert_eq!(transfer("you", "me", &["taken.example.org"]), [&*taken]);
        assert_eq!(transfer("you", "me", &["own.example.org"]), [] as [&str; 0]);
        assert_eq!(
            planned(&Change::Retire),
            [
                "- other.example.net 0 A 192.0.2.1",
                "- own.example.org 0 A 192.0.2.1"
            ]
        );
        assert_eq!(
            planned(&Change::Release),
            [
                "= other.example.net 0 A 192.0.2.1: remains without an owner",
                "= own.example.org 0 A 192.0.2.1: remains without an owner"
            ]
        );
        for (owner, expected) in [
            (None, "- a-x.example.org A: owner record of \"default\""),
            (Some("you"), "- a-y.example.org A: owner record of \"you\""),
        ] {
            let change = Change::DropOrphans(owner.map(str::to_owned));
            assert_eq!(planned(&change), [expected]);
        }
    }

    fn change_of(change: Change, domains: &[&str]) -> OwnershipChange {
        OwnershipChange {
            is_dry: false,
            confirmed: None,
            domains: domains.iter().map(|domain| name(domain)).collect(),
            change,
            nothing: None,
        }
    }

    #[test]
    fn named_domains_replace_the_filters() {
        let filter = DomainFilter::new(["example.org"], ["own.example.org"]).unwrap();
        for (domains, expected) in [
            (
                &[][..],
                &[
                    "free.example.org",
                    "wanted.example.org",
                    "taken.example.org",
                ][..],
            ),
            (&["example.net"], &["other.example.net"]),
            (
                &["own.example.org", "example.net"],
                &["own.example.org", "other.example.net"],
            ),
            (&["example.com"], &[]),
        ] {
            let change = change_of(Change::Retire, domains);
            let selected = change.select(&records(), &filter);
            let found: Vec<&str> = selected.iter().map(|record| record.name.as_str()).collect();
            assert_eq!(found, expected, "{domains:?}");
        }
    }

    #[test]
    fn a_retirement_always_needs_a_confirmation() {
        let target = target(Vec::new());
        let options = LaunchOptions::of(&Config::default()).unwrap();
        let engine = launch(&target, &options).unwrap();
        let view = Registry::default().read(&Name::root(), Vec::new());
        let zone = |id: &str, content| Zone {
            id: id.to_owned(),
            apex: Name::root(),
            visibility: Default::default(),
            content,
            warnings: Vec::new(),
        };
        let mut listed = view;
        listed.records = records();
        let failed = Err(ProviderError::Settings("x".to_owned()));
        let listing = [zone("a", failed), zone("b", Ok(listed))];
        let planned =
            change_of(Change::Retire, &["own.example.org"]).planned(&target, &engine, &listing);
        assert_eq!(
            (planned.zones.len(), planned.wanted, planned.notes.len()),
            (1, 0, 0)
        );
        let of_zone = &planned.zones[0];
        assert_eq!(
            (of_zone.id.as_str(), of_zone.owned, of_zone.recent),
            ("b", 1, 0)
        );
        assert_eq!(planned.deletions(), 1);
        assert!(planned.check(of_zone, None).is_err() && planned.check(of_zone, Some(1)).is_ok());
    }

    #[test]
    fn replaced_adopted_values_are_named() {
        let target = target(vec![
            owned("same.example.org", ""),
            owned("empty.example.org", ""),
            owned("changed.example.org", ""),
            owned("owned.example.org", ""),
        ]);
        let mut target = target;
        target.desired.records[1].targets.clear();
        let found = |text: &str, owner: &str, address: &str| {
            let mut record = Record::parse(text, RecordType::A, [address]).unwrap();
            record.labels = Labels::of(owner, "");
            record
        };
        let taken = [
            found("same.example.org", "", "192.0.2.1"),
            found("empty.example.org", "", "192.0.2.9"),
            found("changed.example.org", "", "192.0.2.9"),
            found("owned.example.org", "you", "192.0.2.9"),
            found("unknown.example.org", "", "192.0.2.9"),
        ];
        let zone = ZonePlan {
            id: "z".to_owned(),
            plan: plan::transfer(&taken, "me"),
            owned: 0,
            recent: 0,
        };
        let planned = Planned {
            zones: vec![zone],
            notes: Vec::new(),
            wanted: 0,
        };
        let shown: Vec<String> = differing(&target, &planned)
            .iter()
            .map(|(found, wanted)| format!("{found} to {wanted}"))
            .collect();
        assert_eq!(
            shown,
            ["changed.example.org 0 A 192.0.2.9 to changed.example.org 0 A 192.0.2.1"]
        );
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_transfer_has_two_owners() {
        for (from, to) in [("", "b"), ("a", "")] {
            let transfer = TransferOwner {
                selection: Selection {
                    providers: Vec::new(),
                },
                from: from.to_owned(),
                to: to.to_owned(),
                names: Vec::new(),
                dry_run: true,
            };
            let error = transfer.run(&Config::default()).await.unwrap_err();
            assert_eq!(
                error.to_string(),
                "an owner is empty; use `adopt` for records without an owner, and `retire --keep-records` to release \
                 records"
            );
        }
    }
}
