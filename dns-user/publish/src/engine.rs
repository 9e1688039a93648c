//! Reconciles the zones of one provider with the sources: list, plan, guard, apply.

use std::{collections::BTreeSet, time::Duration};

use crate::{
    guard::{self, Refusal},
    ownership::{OwnershipError, Registry, View, remove_collisions},
    plan::{self, Action, Desired, Note, Plan, Reason, Rules},
    provider::{Batch, Progress, Provider, ProviderError, TransactionResult, Visibility, Zone},
    record::{Key, Name, Record},
};

/// Maximum number of list, plan and apply rounds in one run while other writers change the zones.
const MAX_ROUNDS: u32 = 8;

/// Maximum random pause before the second round; it doubles with each further round.
const PAUSE: Duration = Duration::from_millis(50);

/// Publishes to one provider.
pub struct Engine {
    /// Service that holds the zones.
    pub provider: Box<dyn Provider>,
    /// Format of owner records.
    pub registry: Registry,
    /// Rules that turn wanted records into changes.
    pub rules: Rules,
}

/// A zone with its ownership, or the reason why it is unavailable.
pub struct Surveyed {
    /// Identity within the provider.
    pub id: String,
    /// Apex of the zone.
    pub apex: Name,
    /// Clients that see the zone.
    pub visibility: Visibility,
    /// Records and their ownership, or the failure to list them.
    pub view: Result<View, ProviderError>,
    /// Problems of unreadable foreign data, which is left unchanged.
    pub warnings: Vec<String>,
}

/// Plan of a run.
pub struct Planned {
    /// Plans of the available zones, in the order of the survey.
    pub zones: Vec<ZonePlan>,
    /// Notes on wanted records without an available zone.
    pub notes: Vec<Note>,
    /// Number of wanted records.
    pub wanted: usize,
}

/// Plan of one zone.
pub struct ZonePlan {
    /// Identity within the provider.
    pub id: String,
    /// Changes, and notes on wanted records without effect.
    pub plan: Plan,
    /// Number of names in the zone that this publisher owns.
    pub owned: usize,
}

impl Planned {
    /// Returns whether nothing changes.
    pub fn is_empty(&self) -> bool {
        self.zones.iter().all(|zone| zone.plan.is_empty())
    }

    /// Returns the number of names to delete.
    pub fn deletions(&self) -> usize {
        self.zones.iter().map(|zone| zone.plan.deletions()).sum()
    }

    /// Returns an error if a zone's plan needs confirmation. `confirmed` is the number of deletions
    /// in all zones that the operator allows.
    pub fn check(&self, zone: &ZonePlan, confirmed: Option<usize>) -> Result<(), Refusal> {
        if confirmed.is_some_and(|confirmed| self.deletions() <= confirmed) {
            return Ok(());
        }
        guard::check(&zone.plan, zone.owned, self.wanted, None)
    }
}

/// Result of a run.
#[derive(Debug, Default)]
pub struct Report {
    /// One report for each zone of the provider.
    pub zones: Vec<ZoneReport>,
    /// Notes on wanted records without an available zone.
    pub notes: Vec<Note>,
    /// Number of rounds; more than one if there were conflicts with other writers.
    pub rounds: u32,
}

/// Result of one zone.
#[derive(Debug, Default)]
pub struct ZoneReport {
    /// Identity within the provider.
    pub id: String,
    /// Number of record sets in the zone.
    pub records: usize,
    /// Number of names that this publisher owns.
    pub owned: usize,
    /// Number of applied transactions.
    pub applied: usize,
    /// Number of transactions in conflict with another writer in the last round.
    pub conflicts: usize,
    /// Names whose transaction failed, with the errors.
    pub failures: Vec<(Name, NameError)>,
    /// Reason why the plan was not applied.
    pub refusal: Option<Refusal>,
    /// Reason why the zone is unavailable.
    pub failure: Option<ProviderError>,
    /// Notes on wanted records without effect.
    pub notes: Vec<Note>,
    /// Problems of unreadable foreign data, which is left unchanged.
    pub warnings: Vec<String>,
}

/// Reason why the change of one name failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The provider refused the transaction.
    #[error(transparent)]
    Provider(#[from] ProviderError),
    /// The owner record cannot be written.
    #[error(transparent)]
    Ownership(#[from] OwnershipError),
}

impl Report {
    /// Returns whether all planned changes were applied.
    pub fn is_complete(&self) -> bool {
        self.zones.iter().all(|zone| {
            zone.failures.is_empty()
                && zone.conflicts == 0
                && zone.refusal.is_none()
                && zone.failure.is_none()
        })
    }

    /// Returns the number of applied transactions.
    pub fn applied(&self) -> usize {
        self.zones.iter().map(|zone| zone.applied).sum()
    }
}

impl Engine {
    /// Lists all zones and reads their ownership.
    pub async fn survey(&mut self) -> Result<Vec<Surveyed>, ProviderError> {
        let zones = self.provider.list().await?;
        Ok(zones.into_iter().map(|zone| self.read(zone)).collect())
    }

    fn read(&self, zone: Zone) -> Surveyed {
        let Zone { id, apex, visibility, records, warnings } = zone;
        let view = records.map(|records| self.registry.read(&apex, records));
        Surveyed { id, apex, visibility, view, warnings }
    }

    /// Plans the changes for a survey.
    pub fn plan(&self, survey: &[Surveyed], desired: &Desired) -> Planned {
        let mut records = desired.records.clone();
        self.provider.adjust(&mut records);
        let wanted = records.len();
        let mut per_zone: Vec<Desired> = vec![Desired::default(); survey.len()];
        let mut stray = Plan::default();
        for record in records {
            let places = places(survey, &record.name);
            if places.is_empty() && self.rules.domains.matches(&record.name) {
                stray.note(&record, Reason::NoZone);
            }
            for place in places {
                if survey[place].view.is_err() {
                    stray.note(&record, Reason::ZoneUnavailable { zone: survey[place].apex.clone() });
                }
                per_zone[place].records.push(record.clone());
            }
        }
        let mut zones = Vec::new();
        for (index, mut wishes) in per_zone.into_iter().enumerate() {
            let Ok(view) = &survey[index].view else { continue };
            wishes.held.clone_from(&desired.held);
            let ours: Vec<Record> = view
                .records
                .iter()
                .filter(|record| places(survey, &record.name).contains(&index))
                .cloned()
                .collect();
            let owned = self.owned(&ours);
            let mut plan = plan::plan(&self.rules, &ours, &wishes);
            plan.notes.extend(view.notes.iter().cloned());
            zones.push(ZonePlan { id: survey[index].id.clone(), plan, owned });
        }
        Planned { zones, notes: stray.notes, wanted }
    }

    /// Returns the number of names that this publisher owns.
    fn owned(&self, records: &[Record]) -> usize {
        let ours = records
            .iter()
            .filter(|record| !self.rules.owner.is_empty() && record.labels.owner() == self.rules.owner);
        ours.map(|record| &record.name).collect::<BTreeSet<_>>().len()
    }

    /// Applies a plan to the surveyed zones. A zone whose plan needs confirmation, and a name whose
    /// change is refused, stay unchanged without affecting the others.
    pub async fn apply(
        &mut self,
        survey: &[Surveyed],
        planned: &Planned,
        confirmed: Option<usize>,
        isolate: bool,
        progress: Progress<'_>,
    ) -> Report {
        let mut report = Report { notes: planned.notes.clone(), rounds: 1, ..Report::default() };
        for zone in survey {
            let mut result = ZoneReport { id: zone.id.clone(), ..ZoneReport::default() };
            result.warnings.clone_from(&zone.warnings);
            match &zone.view {
                Err(failure) => result.failure = Some(failure.clone()),
                Ok(view) => {
                    result.records = view.records.len();
                    if let Some(plan) = planned.zones.iter().find(|plan| plan.id == zone.id) {
                        result.owned = plan.owned;
                        result.notes.clone_from(&plan.plan.notes);
                        result.refusal = planned.check(plan, confirmed).err();
                        if result.refusal.is_none() {
                            self.apply_zone(view, plan, isolate, progress, &mut result).await;
                        }
                    }
                }
            }
            report.zones.push(result);
        }
        report
    }

    async fn apply_zone(
        &mut self,
        view: &View,
        planned: &ZonePlan,
        isolate: bool,
        progress: Progress<'_>,
        result: &mut ZoneReport,
    ) {
        let mut batch = Batch { zone: planned.id.clone(), isolate, transactions: Vec::new() };
        for change in &planned.plan.changes {
            match self.registry.transaction(view, change) {
                Ok(transaction) => batch.transactions.push(transaction),
                Err(error) => result.failures.push((change.name.clone(), error.into())),
            }
        }
        let collisions = remove_collisions(view, &mut batch.transactions);
        result.failures.extend(collisions.into_iter().map(|(name, error)| (name, error.into())));
        if batch.transactions.is_empty() {
            return;
        }
        let outcome = self.provider.apply(&batch, progress).await;
        let mut applied = BTreeSet::new();
        for (transaction, outcome) in batch.transactions.into_iter().zip(outcome.results) {
            match outcome {
                TransactionResult::Applied => {
                    result.applied += 1;
                    applied.insert(transaction.name);
                }
                TransactionResult::Conflict => result.conflicts += 1,
                TransactionResult::Failed(error) => result.failures.push((transaction.name, error.into())),
            }
        }
        let [before, after] = self.owned_around(view, &planned.plan, &applied);
        result.owned = (result.owned + after).saturating_sub(before);
    }

    /// Returns the number of owned names in a zone before and after the changes of the names in
    /// `applied`.
    fn owned_around(&self, view: &View, plan: &Plan, applied: &BTreeSet<Name>) -> [usize; 2] {
        let is_ours = |record: &Record| record.labels.owner() == self.rules.owner;
        let count = |keys: &BTreeSet<Key>| keys.iter().map(|key| &key.name).collect::<BTreeSet<_>>().len();
        let mut owned: BTreeSet<Key> =
            view.records.iter().filter(|record| is_ours(record)).map(Record::key).collect();
        let before = count(&owned);
        for action in plan
            .changes
            .iter()
            .filter(|change| applied.contains(&change.name))
            .flat_map(|change| &change.actions)
        {
            match action {
                Action::Create(record) | Action::Update { after: record, .. } if is_ours(record) => {
                    owned.insert(record.key());
                }
                Action::Create(record)
                | Action::Update { after: record, .. }
                | Action::Delete(record)
                | Action::Release(record) => {
                    owned.remove(&record.key());
                }
                Action::DropOrphan(_) => {}
            }
        }
        [before, count(&owned)]
    }

    /// Lists, plans and applies until the zones are as wanted. After a conflict with another
    /// writer, it lists and plans again after a short random pause.
    pub async fn reconcile(
        &mut self,
        desired: &Desired,
        confirmed: Option<usize>,
        progress: Progress<'_>,
    ) -> Result<Report, ProviderError> {
        let mut applied: Vec<(String, usize)> = Vec::new();
        let mut round = 0;
        loop {
            round += 1;
            let survey = self.survey().await?;
            let planned = self.plan(&survey, desired);
            let mut report = self.apply(&survey, &planned, confirmed, round > 1, progress).await;
            let has_conflict = report.zones.iter().any(|zone| zone.conflicts > 0);
            for zone in &mut report.zones {
                match applied.iter_mut().find(|(id, _)| *id == zone.id) {
                    Some((_, sum)) => {
                        *sum += zone.applied;
                        zone.applied = *sum;
                    }
                    None => applied.push((zone.id.clone(), zone.applied)),
                }
            }
            report.rounds = round;
            if !has_conflict || round == MAX_ROUNDS {
                return Ok(report);
            }
            let longest = PAUSE * 2_u32.pow(round - 1);
            tokio::time::sleep(longest.mul_f64(fastrand::f64())).await;
        }
    }
}

/// Returns the zones of a name: the longest public one, and all private ones that contain it.
fn places(survey: &[Surveyed], name: &Name) -> Vec<usize> {
    let fits = |zone: &Surveyed| name.is_within(&zone.apex);
    let public =
        survey.iter().enumerate().filter(|(_, zone)| zone.visibility == Visibility::Public && fits(zone));
    let longest = public.max_by_key(|(_, zone)| zone.apex.labels().count());
    let private =
        survey.iter().enumerate().filter(|(_, zone)| zone.visibility == Visibility::Private && fits(zone));
    longest.into_iter().chain(private).map(|(index, _)| index).collect()
}
