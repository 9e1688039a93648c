//! Reconciles the zones of one provider with the sources: list, plan, guard, apply.
//!
//! The guard decides which deletions need a confirmation, and which ones another writer keeps undoing.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashMap},
    time::{Duration, SystemTime},
};

use dns_kit::backoff;

use crate::{
    deletions::{RecentDeletions, WINDOW},
    ownership::{Registry, View, remove_collisions},
    plan::{self, Action, Desired, NameChange, Note, Plan, PlanRules, Reason},
    provider::{
        Batch, OnConflict, Progress, Provider, ProviderError, TransactionResult, Visibility, Zone,
        apply_verified,
    },
    record::{Key, Name, Record, RecordType},
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
    pub rules: PlanRules,
    /// Unconfirmed deletions of the last hour.
    pub deletions: RecentDeletions,
    undone: UndoneChanges,
    /// Changes of a TTL alone that were applied: the TTLs before and after.
    ttl_changes: HashMap<Key, TtlChange>,
}

/// TTL of a set before a change, and the wanted one.
type TtlChange = (Option<u32>, u32);

/// Returns the change of an action that changes nothing but a TTL.
fn ttl_change(action: &Action) -> Option<(Key, TtlChange)> {
    let Action::Update { before, after } = action else {
        return None;
    };
    let is_same = before.targets == after.targets
        && before.properties == after.properties
        && before.labels.owner() == after.labels.owner();
    if !is_same {
        return None;
    }
    // Without a wanted TTL nothing was asked for that the service could fail to keep.
    Some((after.key(), (before.ttl, after.ttl?)))
}

/// A zone with its ownership, or the reason why it is unavailable.
pub type ZoneListing = Zone<View>;

/// Plan of a run.
#[derive(Default)]
pub struct Planned {
    /// Plans of the available zones, in the order of the listing.
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
    /// Number of other names deleted in the last hour without a confirmation.
    pub recent: usize,
}

impl Planned {
    /// Returns whether nothing changes.
    pub fn is_empty(&self) -> bool {
        self.zones.iter().all(|zone| zone.plan.is_empty())
    }

    /// Returns the changes of all zones.
    pub fn actions(&self) -> impl Iterator<Item = &Action> {
        self.zones.iter().flat_map(|zone| zone.plan.actions())
    }

    /// Returns the number of names to delete.
    pub fn deletions(&self) -> usize {
        self.zones.iter().map(|zone| zone.plan.deletions()).sum()
    }

    /// Returns the notes of all zones.
    pub fn notes(&self) -> impl Iterator<Item = &Note> {
        self.zones
            .iter()
            .flat_map(|zone| &zone.plan.notes)
            .chain(&self.notes)
    }

    fn zone(&self, id: &str) -> Option<&ZonePlan> {
        self.zones.iter().find(|zone| zone.id == id)
    }

    /// Returns the report of a run that has not changed anything yet.
    pub(crate) fn report(&self, listing: &[ZoneListing]) -> Report {
        let mut zones = Vec::with_capacity(listing.len());
        for zone in listing {
            let mut report = ZoneReport {
                id: zone.id.clone(),
                warnings: zone.warnings.clone(),
                ..ZoneReport::default()
            };
            match &zone.content {
                Ok(view) => report.records = view.records.len(),
                Err(failure) => report.failure = Some(failure.clone()),
            }
            if let Some(of_zone) = self.zone(&zone.id) {
                report.owned = of_zone.owned;
                report.notes.clone_from(&of_zone.plan.notes);
            }
            zones.push(report);
        }
        Report {
            zones,
            notes: self.notes.clone(),
            rounds: 1,
            withheld: 0,
        }
    }

    /// Returns an error if a zone's deletions need confirmation. `confirmed` is the number of
    /// deletions in all zones that the operator allows.
    pub fn check(&self, zone: &ZonePlan, confirmed: Option<usize>) -> Result<(), Refusal> {
        let &ZonePlan { owned, recent, .. } = zone;
        let deletions = zone.plan.deletions();
        if deletions == 0 || self.is_confirmed(confirmed) {
            return Ok(());
        }
        // An empty source is hardly ever meant: with external-dns it wipes the zone.
        if self.wanted == 0 {
            return Err(Refusal::EmptySource { deletions });
        }
        // Names deleted within the hour no longer count as owned: without them, each run would
        // lower the limit of the next.
        let limit = FREE_DELETIONS.max((owned + recent) * FREE_PERCENT / 100);
        if deletions + recent > limit {
            Err(Refusal::TooMany {
                deletions,
                owned,
                recent,
                limit,
            })
        } else {
            Ok(())
        }
    }

    /// Returns whether the operator allows all deletions.
    fn is_confirmed(&self, confirmed: Option<usize>) -> bool {
        // The operator confirms the number that a plan showed. If there are more deletions now,
        // documents or zones have changed since, and the rest was never shown.
        confirmed.is_some_and(|confirmed| self.deletions() <= confirmed)
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
    /// Number of changes that a dry run has not made.
    pub withheld: usize,
}

/// Result of one zone.
#[derive(Debug, Default)]
pub struct ZoneReport {
    /// Identity within the provider.
    pub id: String,
    /// Number of record sets in the zone, without owner records.
    pub records: usize,
    /// Number of names that this publisher owns.
    pub owned: usize,
    /// Number of applied transactions.
    pub applied: usize,
    /// Number of names that lost a record without a replacement.
    pub deleted: usize,
    /// Number of transactions in conflict with another writer in the last round.
    pub conflicts: usize,
    /// Names that another writer with the same owner deletes or creates again and again.
    pub contested: BTreeSet<Name>,
    /// Names whose transaction failed, with the errors.
    pub failures: Vec<(Name, String)>,
    /// Reason why the deletions were not made.
    pub refusal: Option<Refusal>,
    /// Reason why the zone is unavailable.
    pub failure: Option<ProviderError>,
    /// Notes on wanted records without effect.
    pub notes: Vec<Note>,
    /// Problems of unreadable foreign data, which is left unchanged.
    pub warnings: Vec<String>,
}

impl Report {
    /// Returns whether all planned changes were applied.
    pub fn is_complete(&self) -> bool {
        self.has_succeeded() && self.withheld == 0
    }

    /// Returns whether nothing failed; a dry run has made no changes.
    pub fn has_succeeded(&self) -> bool {
        self.zones.iter().all(|zone| {
            zone.failures.is_empty()
                && zone.conflicts == 0
                && zone.contested.is_empty()
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
    /// Creates an engine without a history.
    pub fn new(provider: Box<dyn Provider>, registry: Registry, rules: PlanRules) -> Self {
        Self {
            provider,
            registry,
            rules,
            deletions: RecentDeletions::default(),
            undone: UndoneChanges::default(),
            ttl_changes: HashMap::new(),
        }
    }

    /// Lists all zones and reads their ownership.
    pub async fn list(&mut self) -> Result<Vec<ZoneListing>, ProviderError> {
        // A command may have deleted names beside the running publisher. `launch` has reported an unreadable file.
        let _ = self.deletions.read();
        let mut listing = Vec::new();
        for zone in self.provider.list().await? {
            let Zone {
                id,
                apex,
                visibility,
                content,
                warnings,
            } = zone;
            if let Ok(records) = &content {
                self.forget_kept_ttls(records);
            }
            let content = content.map(|records| self.registry.read(&apex, records));
            listing.push(Zone {
                id,
                apex,
                visibility,
                content,
                warnings,
            });
        }
        Ok(listing)
    }

    /// Forgets changes of TTLs that the service kept. If one is undone later, it is made again.
    fn forget_kept_ttls(&mut self, records: &[Record]) {
        if self.ttl_changes.is_empty() {
            return;
        }
        for record in records {
            let key = record.key();
            if let Some((_, wanted)) = self.ttl_changes.get(&key)
                && record.ttl == Some(*wanted)
            {
                self.ttl_changes.remove(&key);
            }
        }
    }

    /// Lets the service adjust wanted records for the following plans.
    pub async fn prepare(&mut self, desired: &Desired) -> Result<(), ProviderError> {
        let records = self.wanted(desired);
        self.provider.prepare(&records).await
    }

    /// Returns the reasons why the service would refuse wanted records, as far as the records tell.
    pub fn unfit(&self, desired: &Desired) -> Vec<String> {
        let mut records = self.wanted(desired);
        self.provider.adjust(&mut records);
        let mut found = Vec::new();
        for record in records {
            if let Some(reason) = self.provider.unfit(&record) {
                found.push(format!("{} {}: {reason}", record.name, record.record_type));
            }
        }
        found
    }

    /// Returns the wanted records with the minimum TTL, and with PTR records if the rules create them.
    fn wanted(&self, desired: &Desired) -> Vec<Record> {
        let mut records = desired.records.clone();
        if self.rules.min_ttl > 0 {
            for record in &mut records {
                // As in external-dns, a TTL of 0 is none.
                if record.ttl.unwrap_or(0) == 0 {
                    record.ttl = Some(self.rules.min_ttl);
                }
            }
        }
        if self.rules.creates_pointers {
            let mut pointers_to = Vec::new();
            for record in &records {
                // An address that is not published has no pointer to it either.
                if record.record_type.is_address() && self.rules.manages(record) {
                    pointers_to.extend(plan::pointers(record));
                }
            }
            records.extend(pointers_to);
        }
        records
    }

    /// Plans the changes for a listing.
    pub fn plan(&self, listing: &[ZoneListing], desired: &Desired) -> Planned {
        let now = SystemTime::now();
        let mut records = self.wanted(desired);
        self.provider.adjust(&mut records);
        let wanted = records.len();
        let mut per_zone: Vec<Desired> = vec![Desired::default(); listing.len()];
        let mut stray = Plan::default();
        for record in records {
            let mut zones = self.zones_of(listing, &record.name);
            // A name that the filters exclude is meant for another provider's zones.
            if zones.is_empty() && self.rules.domains.matches(&record.name) {
                stray.note(&record, Reason::NoZone);
            }
            zones.retain(|zone| {
                let is_apex =
                    record.record_type == RecordType::NS && record.name == listing[*zone].apex;
                // No listing has these records, so a plan would create them in every round.
                if is_apex {
                    stray.note(&record, Reason::ApexServers);
                }
                !is_apex
            });
            // Hardly any record has more than one zone, so hardly any is copied.
            if let Some((last, others)) = zones.split_last() {
                for zone in others {
                    per_zone[*zone].records.push(record.clone());
                }
                per_zone[*last].records.push(record);
            }
        }
        let mut zones = Vec::new();
        for (index, mut desired_here) in per_zone.into_iter().enumerate() {
            // External-dns takes a zone that it cannot list for an empty one.
            let Ok(view) = &listing[index].content else {
                continue;
            };
            desired_here.held.clone_from(&desired.held);
            desired_here.known.clone_from(&desired.known);
            zones.push(self.plan_zone(listing, index, view, &desired_here, now));
        }
        Planned {
            zones,
            notes: stray.notes,
            wanted,
        }
    }

    /// Plans the changes of the zone with this index.
    fn plan_zone(
        &self,
        listing: &[ZoneListing],
        index: usize,
        view: &View,
        desired: &Desired,
        now: SystemTime,
    ) -> ZonePlan {
        let mut ours = Vec::new();
        for record in &view.records {
            // In a parent zone, names at or below the apex of a listed child are its delegation and
            // glue, or leftovers that no resolver sees. Only the child is planned for them.
            if self.zones_of(listing, &record.name).contains(&index) {
                ours.push(record.clone());
            }
        }
        let owned = self.owned(&ours);
        let mut plan = plan::plan(&self.rules, &ours, desired);
        // Changes that would be made again and again.
        self.keep_contested(&mut plan, now);
        self.keep_ttls(&mut plan);
        plan.notes.extend(view.notes.iter().cloned());
        let id = listing[index].id.clone();
        let recent = self.deletions.count(&id, &plan, now);
        ZonePlan {
            id,
            plan,
            owned,
            recent,
        }
    }

    /// Returns the zones of a name: the longest public one, and all private ones that contain it.
    fn zones_of(&self, listing: &[ZoneListing], name: &Name) -> Vec<usize> {
        // A webhook's peer may refuse all names of a message because of such a one.
        if !self.provider.serves(name) {
            return Vec::new();
        }
        let mut zones = Vec::new();
        let mut longest: Option<(usize, usize)> = None;
        for (index, zone) in listing.iter().enumerate() {
            if !name.is_within(&zone.apex) {
                continue;
            }
            if zone.visibility == Visibility::Private {
                zones.push(index);
                continue;
            }
            let length = zone.apex.labels().count();
            if longest.is_none_or(|(known, _)| length >= known) {
                longest = Some((length, index));
            }
        }
        if let Some((_, index)) = longest {
            zones.insert(0, index);
        }
        zones
    }

    /// Drops deletions that another writer has undone repeatedly.
    fn keep_contested(&self, plan: &mut Plan, now: SystemTime) {
        for change in std::mem::take(&mut plan.changes) {
            let deleted = change.deleted().next();
            let undone = &self.undone;
            match deleted {
                // The other writer creates it again, and clients see the name come and go.
                Some(record) if undone.has_repeatedly_deleted(&change, now) => {
                    plan.note(record, Reason::Contested);
                }
                _ => plan.changes.push(change),
            }
        }
    }

    /// Drops changes of a TTL alone that were made already and that the service did not keep.
    fn keep_ttls(&self, plan: &mut Plan) {
        let mut kept = Vec::new();
        for change in &mut plan.changes {
            change.actions.retain(|action| {
                let Some((key, ttls)) = ttl_change(action) else {
                    return true;
                };
                // External-dns repeats such a change in every round.
                let is_repeated = self.ttl_changes.get(&key) == Some(&ttls);
                if is_repeated {
                    let (found, wanted) = ttls;
                    kept.push((action.record().clone(), Reason::TtlKept { found, wanted }));
                }
                !is_repeated
            });
        }
        plan.changes.retain(|change| !change.actions.is_empty());
        for (record, reason) in kept {
            plan.note(&record, reason);
        }
    }

    /// Returns the number of names that this publisher owns.
    pub(crate) fn owned(&self, records: &[Record]) -> usize {
        let mut names = BTreeSet::new();
        for record in records {
            if self.rules.owns(record) {
                names.insert(&record.name);
            }
        }
        names.len()
    }

    /// Applies a plan to the listed zones. Deletions that need confirmation, and a name whose change
    /// is refused, stay unchanged without affecting the others.
    pub async fn apply(
        &mut self,
        listing: &[ZoneListing],
        planned: &Planned,
        confirmed: Option<usize>,
        on_conflict: OnConflict,
        progress: Progress<'_>,
    ) -> Report {
        let mut report = planned.report(listing);
        let is_confirmed = planned.is_confirmed(confirmed);
        for (zone, result) in listing.iter().zip(&mut report.zones) {
            let Ok(view) = &zone.content else { continue };
            let Some(of_zone) = planned.zone(&zone.id) else {
                continue;
            };
            result.refusal = planned.check(of_zone, confirmed).err();
            // Only deletions can lose what no document has any more, so only they wait for an
            // operator.
            let plan = match result.refusal {
                None => Cow::Borrowed(&of_zone.plan),
                Some(_) => Cow::Owned(of_zone.plan.without_deletions()),
            };
            // Confirmed deletions do not use up those that need no confirmation.
            if !is_confirmed {
                self.deletions.add(&zone.id, &plan, SystemTime::now());
            }
            let batch = Batch {
                zone: zone.id.clone(),
                on_conflict,
                transactions: Vec::new(),
            };
            self.apply_zone(view, &plan, batch, progress, result).await;
        }
        report
    }

    /// Applies the plan of one zone.
    async fn apply_zone(
        &mut self,
        view: &View,
        plan: &Plan,
        mut batch: Batch,
        progress: Progress<'_>,
        result: &mut ZoneReport,
    ) {
        for change in &plan.changes {
            match self.registry.transaction(view, change) {
                Ok(transaction) => batch.transactions.push(transaction),
                Err(error) => result
                    .failures
                    .push((change.name.clone(), error.to_string())),
            }
        }
        let collisions = remove_collisions(view, &mut batch.transactions);
        for (name, error) in collisions {
            result.failures.push((name, error.to_string()));
        }
        let mut applied = BTreeSet::new();
        if !batch.transactions.is_empty() {
            let results = apply_verified(&mut *self.provider, &batch, progress).await;
            for (transaction, outcome) in batch.transactions.into_iter().zip(results) {
                match outcome {
                    TransactionResult::Applied => drop(applied.insert(transaction.name)),
                    TransactionResult::Conflict => result.conflicts += 1,
                    // `apply_verified` leaves nothing unproven, and unproven is no success.
                    TransactionResult::Unproven(error) | TransactionResult::Failed(error) => {
                        result.failures.push((transaction.name, error.to_string()));
                    }
                }
            }
        }
        result.applied = applied.len();
        let mut changes: Vec<&NameChange> = plan.changes.iter().collect();
        changes.retain(|change| applied.contains(&change.name));
        self.count_sizes(view, &changes, result);
        let now = SystemTime::now();
        self.remember(&changes, now, result);
        for note in &plan.notes {
            if note.reason == Reason::Contested {
                // The conflict lasts as long as the other writer creates the set again.
                self.undone.kept(&note.name, now);
                result.contested.insert(note.name.clone());
            }
        }
    }

    /// Remembers applied changes, which others may undo or the service may not keep.
    fn remember(&mut self, changes: &[&NameChange], now: SystemTime, result: &mut ZoneReport) {
        self.undone.forget(now);
        for change in changes {
            result.deleted += usize::from(change.is_deletion());
            if self.undone.applied(change, now) {
                result.contested.insert(change.name.clone());
            }
            for action in &change.actions {
                match ttl_change(action) {
                    Some((key, ttls)) => self.ttl_changes.insert(key, ttls),
                    // The service writes the set again, and may keep its next TTL.
                    None => self.ttl_changes.remove(&action.record().key()),
                };
            }
        }
    }

    /// Adds the effect of changes to the numbers of sets and of owned names.
    fn count_sizes(&self, view: &View, changes: &[&NameChange], result: &mut ZoneReport) {
        if changes.is_empty() {
            return;
        }
        // The listing is older than the changes; without a correction the metrics would show them
        // one round later.
        let mut owned = BTreeSet::new();
        for record in &view.records {
            if self.rules.owns(record) {
                owned.insert(record.key());
            }
        }
        let before = names_of(&owned).len();
        for change in changes {
            for action in &change.actions {
                let record = action.record();
                match action {
                    Action::Create(_) => result.records += 1,
                    Action::Delete(_) => result.records = result.records.saturating_sub(1),
                    Action::Update { .. } | Action::Release(_) | Action::DropOrphan(_) => {}
                }
                match action {
                    Action::DropOrphan(_) => {}
                    Action::Create(_) | Action::Update { .. } if self.rules.owns(record) => {
                        owned.insert(record.key());
                    }
                    _ => {
                        owned.remove(&record.key());
                    }
                }
            }
        }
        // `result.owned` lacks the names of child zones, which `owned` includes, so only the
        // difference counts.
        result.owned = (result.owned + names_of(&owned).len()).saturating_sub(before);
    }

    /// Lists, plans and applies until the zones are as wanted. After a conflict with another
    /// writer, it lists and plans again after a short random pause.
    pub async fn reconcile(
        &mut self,
        desired: &Desired,
        confirmed: Option<usize>,
        progress: Progress<'_>,
    ) -> Result<Report, ProviderError> {
        let listing = self.list().await?;
        self.prepare(desired).await?;
        self.reconcile_listed(listing, desired, confirmed, progress)
            .await
    }

    /// Like [`Engine::reconcile`], but prepared and with a listing for the first round.
    pub async fn reconcile_listed(
        &mut self,
        mut listing: Vec<ZoneListing>,
        desired: &Desired,
        mut confirmed: Option<usize>,
        progress: Progress<'_>,
    ) -> Result<Report, ProviderError> {
        let mut applied: BTreeMap<String, usize> = BTreeMap::new();
        let mut round = 0;
        loop {
            round += 1;
            let planned = self.plan(&listing, desired);
            // To list again is one request for all names; to isolate the name at fault takes a
            // message for each half of a batch. So only a repeated conflict isolates.
            let on_conflict = if round > 1 {
                OnConflict::Isolate
            } else {
                OnConflict::ListAgain
            };
            let mut report = self
                .apply(&listing, &planned, confirmed, on_conflict, progress)
                .await;
            let has_conflict = report.zones.iter().any(|zone| zone.conflicts > 0);
            for zone in &mut report.zones {
                // A name that an earlier round changed is no longer part of the plan.
                let sum = applied.entry(zone.id.clone()).or_default();
                *sum += zone.applied;
                zone.applied = *sum;
                // The operator has allowed this number of deletions once, not in each round.
                confirmed = confirmed.map(|left| left.saturating_sub(zone.deleted));
            }
            report.rounds = round;
            if !has_conflict || round == MAX_ROUNDS {
                return Ok(report);
            }
            // Without a random pause, two publishers that met would meet again.
            let longest = backoff::pause(PAUSE, Duration::MAX, round);
            tokio::time::sleep(longest.mul_f64(fastrand::f64())).await;
            listing = self.list().await?;
        }
    }
}

fn names_of(keys: &BTreeSet<Key>) -> BTreeSet<&Name> {
    keys.iter().map(|key| &key.name).collect()
}

/// Number of deletions within [`WINDOW`] that need no confirmation, whatever the zone's size.
const FREE_DELETIONS: usize = 10;

/// Share of the owned names, in percent, that may be deleted within [`WINDOW`] without confirmation.
const FREE_PERCENT: usize = 10;

/// Number of deletions of a set after which it is kept if it exists again.
const MAX_REPEATED_DELETIONS: u32 = 2;

/// Number of creations of a set, without a deletion by this publisher, that shows a second writer.
const REPEATED_CREATIONS: u32 = 3;

/// Reason why the deletions of a plan need confirmation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum Refusal {
    #[error(
        "the documents want no records, which would delete {deletions} names; check the documents, or allow \
         it with `bosh-dns-publish apply --confirm-deletions {deletions}`"
    )]
    EmptySource { deletions: usize },
    #[error(
        "{deletions} of {owned} names would be deleted{}, above the limit of {limit} in an hour; the other \
         changes are made; check filters and documents, or allow the deletions with `bosh-dns-publish apply \
         --confirm-deletions {deletions}`",
        shown(*recent)
    )]
    TooMany {
        deletions: usize,
        owned: usize,
        recent: usize,
        limit: usize,
    },
}

impl Refusal {
    /// Returns the number of deletions that wait.
    pub fn deletions(&self) -> usize {
        match self {
            Self::EmptySource { deletions } | Self::TooMany { deletions, .. } => *deletions,
        }
    }
}

/// Formats earlier deletions within a sentence.
fn shown(recent: usize) -> String {
    if recent == 0 {
        String::new()
    } else {
        format!(" after {recent} others in the last hour")
    }
}

/// Own changes that another writer undoes. Such a writer has the same owner label, because changes
/// of other owners are never touched.
#[derive(Debug, Default)]
pub struct UndoneChanges {
    deleted: HashMap<Key, Repeated>,
    created: HashMap<Key, Repeated>,
}

/// Number of equal changes of one set, and the time of the last one.
#[derive(Debug, Clone, Copy)]
struct Repeated {
    times: u32,
    last: SystemTime,
}

impl UndoneChanges {
    /// Returns whether a change deletes only what was deleted repeatedly, the last time within an hour.
    fn has_repeatedly_deleted(&self, change: &NameChange, now: SystemTime) -> bool {
        change.is_deletion()
            && change.deleted().all(|record| {
                let deleted = self.deleted.get(&record.key());
                deleted.is_some_and(|deleted| {
                    deleted.times >= MAX_REPEATED_DELETIONS && deleted.is_recent(now)
                })
            })
    }

    /// Forgets changes before the last hour. Otherwise one of each name that ever was would stay.
    fn forget(&mut self, now: SystemTime) {
        self.deleted.retain(|_, change| change.is_recent(now));
        self.created.retain(|_, change| change.is_recent(now));
    }

    /// Records that the sets of a name were kept, which prolongs the conflict.
    pub fn kept(&mut self, name: &Name, now: SystemTime) {
        for (key, deleted) in &mut self.deleted {
            if key.name == *name {
                deleted.last = now;
            }
        }
    }

    /// Records an applied change. Returns whether a set was created again and again.
    pub fn applied(&mut self, change: &NameChange, now: SystemTime) -> bool {
        // A change of type also creates a set, but this publisher has deleted the one before, so it
        // shows no other writer.
        let is_replacement = change.deleted().next().is_some();
        for record in change.deleted() {
            self.created.remove(&record.key());
            if change.is_deletion() {
                Repeated::count(&mut self.deleted, record.key(), now);
            }
        }
        let mut is_repeated = false;
        for action in &change.actions {
            let Action::Create(record) = action else {
                continue;
            };
            // A document wants the set again, so its next deletion is a new decision.
            self.deleted.remove(&record.key());
            if !is_replacement {
                is_repeated |=
                    Repeated::count(&mut self.created, record.key(), now) >= REPEATED_CREATIONS;
            }
        }
        is_repeated
    }
}

impl Repeated {
    fn is_recent(self, now: SystemTime) -> bool {
        // A time in the future counts, because the clock was probably set back.
        now.duration_since(self.last).unwrap_or_default() < WINDOW
    }

    fn count(changes: &mut HashMap<Key, Self>, key: Key, now: SystemTime) -> u32 {
        let change = changes.entry(key).or_insert(Self {
            times: 0,
            last: now,
        });
        let before = if change.is_recent(now) {
            change.times
        } else {
            0
        };
        *change = Self {
            times: before + 1,
            last: now,
        };
        change.times
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future::BoxFuture;

    use super::*;
    use crate::{
        provider::{Results, Step, Transaction},
        record::DomainFilter,
    };

    fn deletions(count: usize) -> Plan {
        let change = |number: usize| {
            let record = Record::parse(
                &format!("n{number}.example.org"),
                RecordType::A,
                ["192.0.2.1"],
            );
            let record = record.unwrap();
            NameChange {
                name: record.name.clone(),
                actions: vec![Action::Delete(record)],
            }
        };
        Plan {
            changes: (0..count).map(change).collect(),
            notes: Vec::new(),
        }
    }

    #[test]
    fn repeatedly_undone_deletion_is_kept() {
        let change = deletions(1).changes.remove(0);
        let now = SystemTime::now();
        let mut undone = UndoneChanges::default();
        for expected in [false, false, true] {
            assert_eq!(undone.has_repeatedly_deleted(&change, now), expected);
            undone.applied(&change, now);
        }
        assert!(!undone.has_repeatedly_deleted(&change, now + WINDOW));
        let mut of_both = change.clone();
        let other = Record::parse("n0.example.org", RecordType::TXT, ["text"]).unwrap();
        of_both.actions.push(Action::Delete(other));
        assert!(
            !undone.has_repeatedly_deleted(&of_both, now),
            "sets of other types are counted apart"
        );
        let Action::Delete(record) = change.actions[0].clone() else {
            unreachable!()
        };
        let created = NameChange {
            name: change.name.clone(),
            actions: vec![Action::Create(record)],
        };
        // A creation by this publisher ends the conflict.
        assert!(!undone.applied(&created, now) && !undone.has_repeatedly_deleted(&change, now));
        assert!(!undone.applied(&created, now) && undone.applied(&created, now));
    }

    #[test]
    fn changes_of_a_ttl_alone_are_told_apart() {
        let record = |target: &str, ttl: Option<u32>, owner: &str| {
            let mut record = Record::parse("a.example.org", RecordType::A, [target]).unwrap();
            record.ttl = ttl;
            let label = crate::record::Labels::OWNER.to_owned();
            record.labels.0.insert(label, owner.to_owned());
            record
        };
        let before = record("192.0.2.1", Some(60), "own");
        for (after, change) in [
            (record("192.0.2.1", Some(300), "own"), Some((Some(60), 300))),
            (record("192.0.2.1", None, "own"), None),
            (record("192.0.2.2", Some(300), "own"), None),
            (record("192.0.2.1", Some(300), "other"), None),
        ] {
            let update = Action::Update {
                before: before.clone(),
                after,
            };
            let found = ttl_change(&update);
            assert_eq!(found, change.map(|change| (before.key(), change)));
        }
        assert_eq!(ttl_change(&Action::Create(before.clone())), None);
        assert_eq!(ttl_change(&Action::Delete(before)), None);
    }

    /// State of a service with zones in memory.
    #[derive(Default)]
    struct Service {
        zones: Vec<Zone>,
        /// Number of messages that will be in conflict.
        conflicts: usize,
        /// Sets of the zone `two` that another publisher writes while a message is in conflict.
        rivals: Vec<Record>,
        /// Name whose changes are refused.
        refused: Option<Name>,
        /// Whether the responses are lost.
        is_lost: bool,
        /// TTL that the service gives to each set.
        ttl: Option<u32>,
        prepared: Vec<String>,
        modes: Vec<OnConflict>,
    }

    #[derive(Clone, Default)]
    struct InMemory(std::sync::Arc<parking_lot::Mutex<Service>>);

    impl Provider for InMemory {
        fn prepare<'a>(
            &'a mut self,
            desired: &'a [Record],
        ) -> BoxFuture<'a, Result<(), ProviderError>> {
            self.0.lock().prepared = desired.iter().map(ToString::to_string).collect();
            Box::pin(async { Ok(()) })
        }

        fn adjust(&self, desired: &mut Vec<Record>) {
            desired.retain(|record| record.name.labels().next() != Some("dropped"));
        }

        fn unfit(&self, record: &Record) -> Option<String> {
            (record.name.labels().next() == Some("bad")).then(|| "too bad".to_owned())
        }

        fn serves(&self, name: &Name) -> bool {
            name.labels().next() != Some("unserved")
        }

        fn list(&mut self) -> BoxFuture<'_, Result<Vec<Zone>, ProviderError>> {
            let zones = self.0.lock().zones.clone();
            Box::pin(async { Ok(zones) })
        }

        fn apply<'a>(&'a mut self, batch: &'a Batch, _: Progress<'a>) -> Results<'a> {
            let mut service = self.0.lock();
            service.modes.push(batch.on_conflict);
            let mut results = Vec::new();
            for transaction in &batch.transactions {
                results.push(service.apply(&batch.zone, transaction));
            }
            service.conflicts = service.conflicts.saturating_sub(1);
            Box::pin(async { results })
        }
    }

    impl Service {
        fn apply(&mut self, zone: &str, transaction: &Transaction) -> TransactionResult {
            if self.conflicts > 0 {
                return TransactionResult::Conflict;
            }
            // Behind the message in conflict, so it is too late for this round.
            let rivals = std::mem::take(&mut self.rivals);
            if !rivals.is_empty() {
                self.sets("two").extend(rivals);
            }
            if self.refused.as_ref() == Some(&transaction.name) {
                return TransactionResult::Failed(ProviderError::Settings("no".to_owned()));
            }
            for step in &transaction.steps {
                match step {
                    Step::Create(record) | Step::Replace { after: record, .. } => {
                        self.put(zone, record)
                    }
                    Step::Delete(record) => self.remove(zone, record),
                    Step::Require(_) | Step::RequireAbsent(..) => {}
                }
            }
            if self.is_lost {
                let server = "service".to_owned();
                let reason = "no response".to_owned();
                return TransactionResult::Failed(ProviderError::Unreachable { server, reason });
            }
            TransactionResult::Applied
        }

        fn sets(&mut self, zone: &str) -> &mut Vec<Record> {
            let zone = self.zones.iter_mut().find(|one| one.id == zone).unwrap();
            zone.content.as_mut().unwrap()
        }

        fn put(&mut self, zone: &str, record: &Record) {
            self.remove(zone, record);
            let mut record = record.clone();
            record.ttl = self.ttl.or(record.ttl);
            self.sets(zone).push(record);
        }

        fn remove(&mut self, zone: &str, record: &Record) {
            self.sets(zone).retain(|set| set.key() != record.key());
        }
    }

    fn zone(id: &str, apex: &str, visibility: Visibility) -> Zone {
        Zone {
            id: id.to_owned(),
            apex: Name::parse(apex).unwrap(),
            visibility,
            content: Ok(Vec::new()),
            warnings: vec![format!("warning of {id}")],
        }
    }

    fn engine(zones: Vec<Zone>) -> (Engine, InMemory) {
        let service = InMemory::default();
        service.0.lock().zones = zones;
        let mut rules = PlanRules::of("me");
        rules.managed.insert(RecordType::NS);
        let engine = Engine::new(Box::new(service.clone()), Registry::default(), rules);
        (engine, service)
    }

    fn one_zone() -> (Engine, InMemory) {
        engine(vec![zone("z", "example.org", Visibility::Public)])
    }

    /// Parses `name type target|target`.
    fn set(line: &str) -> Record {
        let words: Vec<&str> = line.split(' ').collect();
        let record_type: RecordType = words[1].parse().unwrap();
        Record::parse(words[0], record_type, words[2].split('|')).unwrap()
    }

    fn desired(lines: &[&str]) -> Desired {
        Desired {
            records: lines.iter().map(|line| set(line)).collect(),
            ..Desired::default()
        }
    }

    fn numbered(count: usize) -> Desired {
        let mut wanted = Desired::default();
        for number in 0..count {
            wanted
                .records
                .push(set(&format!("n{number}.example.org A 192.0.2.1")));
        }
        wanted
    }

    fn recently_deleted(engine: &Engine) -> usize {
        let now = SystemTime::now();
        engine.deletions.count("z", &Plan::default(), now)
    }

    async fn reconcile(engine: &mut Engine, desired: &Desired) -> Report {
        engine.reconcile(desired, None, &|_| {}).await.unwrap()
    }

    #[tokio::test]
    async fn wanted_records_follow_the_rules() {
        let (mut engine, service) = one_zone();
        engine.rules.min_ttl = 60;
        engine.rules.creates_pointers = true;
        engine.rules.domains = DomainFilter::new([], ["out.example.org"]).unwrap();
        let mut wanted = desired(&[
            "a.example.org A 192.0.2.1",
            "b.example.org AAAA 2001:db8::1",
            "c.example.org CNAME a.example.org",
            "out.example.org A 192.0.2.2",
        ]);
        for (record, ttl) in wanted
            .records
            .iter_mut()
            .zip([None, Some(0), Some(5), Some(61)])
        {
            record.ttl = ttl;
        }
        engine.prepare(&wanted).await.unwrap();
        assert_eq!(
            service.0.lock().prepared,
            [
                "a.example.org 60 A 192.0.2.1",
                "b.example.org 60 AAAA 2001:db8::1",
                "c.example.org 5 CNAME a.example.org",
                "out.example.org 61 A 192.0.2.2",
                "1.2.0.192.in-addr.arpa 60 PTR a.example.org",
                "1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.8.b.d.0.1.0.0.2.ip6.arpa 60 PTR b.example.org",
            ]
        );
        engine.rules.creates_pointers = false;
        engine.rules.min_ttl = 0;
        engine.prepare(&wanted).await.unwrap();
        assert_eq!(service.0.lock().prepared[0], "a.example.org 0 A 192.0.2.1");
        assert_eq!(service.0.lock().prepared.len(), 4);
        let fitting = desired(&["bad.example.org A 192.0.2.1", "a.example.org A 192.0.2.1"]);
        assert_eq!(engine.unfit(&fitting), ["bad.example.org A: too bad"]);
    }

    #[tokio::test]
    async fn longest_public_zone_owns_a_name() {
        let mut broken = zone("broken", "broken.example.org", Visibility::Public);
        broken.content = Err(ProviderError::Settings("x".to_owned()));
        let (mut engine, _) = engine(vec![
            zone("public", "example.org", Visibility::Public),
            zone("sub", "sub.example.org", Visibility::Public),
            zone("private", "example.org", Visibility::Private),
            broken,
            zone("public2", "example.org", Visibility::Public),
        ]);
        let listing = engine.list().await.unwrap();
        let zones = |name: &str| {
            let places = engine.zones_of(&listing, &Name::parse(name).unwrap());
            let ids = places.iter().map(|place| listing[*place].id.as_str());
            ids.collect::<Vec<_>>()
        };
        for (name, expected) in [
            ("a.example.org", &["public2", "private"][..]),
            ("example.org", &["public2", "private"]),
            ("sub.example.org", &["sub", "private"]),
            ("a.sub.example.org", &["sub", "private"]),
            ("unserved.example.org", &[]),
            ("example.net", &[]),
            ("org", &[]),
        ] {
            assert_eq!(zones(name), expected, "{name}");
        }
        engine.rules.domains = DomainFilter::new([], ["elsewhere"]).unwrap();
        let wanted = desired(&[
            "a.example.org A 192.0.2.1",
            "a.sub.example.org A 192.0.2.2",
            "a.broken.example.org A 192.0.2.3",
            "a.example.net A 192.0.2.4",
            "a.elsewhere A 192.0.2.5",
            "example.org NS ns.example.net",
            "sub.example.org NS ns.example.net",
            "dropped.example.org A 192.0.2.6",
        ]);
        let planned = engine.plan(&listing, &wanted);
        assert_eq!(planned.wanted, 7);
        let mut shown = Vec::new();
        for zone in &planned.zones {
            for action in zone.plan.actions() {
                shown.push(format!("{} {action}", zone.id));
            }
        }
        assert_eq!(
            shown,
            [
                "sub + a.sub.example.org 0 A 192.0.2.2",
                "private + a.broken.example.org 0 A 192.0.2.3",
                "private + a.example.org 0 A 192.0.2.1",
                "private + sub.example.org 0 NS ns.example.net",
                "public2 + a.example.org 0 A 192.0.2.1",
            ]
        );
        let notes: Vec<String> = planned.notes().map(ToString::to_string).collect();
        let apex = "the server manages the NS records of its zone; change them there, and remove the record here";
        assert_eq!(notes.len(), 5, "{notes:#?}");
        assert_eq!(
            notes[1..],
            [
                "a.example.net A: none of the provider's zones contains the name".to_owned(),
                format!("example.org NS: {apex}"),
                format!("example.org NS: {apex}"),
                format!("sub.example.org NS: {apex}"),
            ]
        );
        // In the private zone, the delegation hides what is below it.
        assert!(
            notes[0].starts_with("a.sub.example.org A: resolvers do not see"),
            "{notes:#?}"
        );
        assert!(!planned.is_empty() && planned.deletions() == 0);
        assert_eq!(planned.actions().count(), 5);
    }

    #[tokio::test]
    async fn child_zones_keep_own_records() {
        let (mut engine, service) = engine(vec![
            zone("parent", "example.org", Visibility::Public),
            zone("child", "sub.example.org", Visibility::Public),
        ]);
        let parent = desired(&["a.example.org A 192.0.2.1"]);
        assert!(reconcile(&mut engine, &parent).await.is_complete());
        let text = Record::parse(
            "a-x.sub.example.org",
            RecordType::TXT,
            ["heritage=external-dns,external-dns/owner=me"],
        );
        service.0.lock().put("parent", &text.unwrap());
        service
            .0
            .lock()
            .put("parent", &set("x.sub.example.org A 192.0.2.9"));
        let listing = engine.list().await.unwrap();
        let planned = engine.plan(&listing, &parent);
        assert!(planned.is_empty());
        assert_eq!((planned.zones[0].owned, planned.zones[1].owned), (1, 0));
    }

    #[tokio::test]
    async fn rounds_create_change_and_delete() {
        let (mut engine, service) = one_zone();
        let report = reconcile(&mut engine, &numbered(3)).await;
        assert!(report.is_complete());
        assert_eq!(
            (report.rounds, report.applied(), report.notes.len()),
            (1, 3, 0)
        );
        let of_zone = &report.zones[0];
        assert_eq!(
            (of_zone.id.as_str(), of_zone.records, of_zone.owned),
            ("z", 3, 3)
        );
        assert_eq!(of_zone.warnings, ["warning of z"]);
        assert_eq!((of_zone.conflicts, of_zone.failures.len()), (0, 0));
        let report = reconcile(&mut engine, &numbered(3)).await;
        assert_eq!(
            (
                report.applied(),
                report.zones[0].records,
                report.zones[0].owned
            ),
            (0, 3, 3)
        );
        // A foreign record beside them is counted, and noted if it is wanted.
        service
            .0
            .lock()
            .put("z", &set("foreign.example.org A 192.0.2.7"));
        let mut wanted = numbered(2);
        wanted.records[0] = set("n0.example.org A 192.0.2.8");
        wanted.records.push(set("foreign.example.org A 192.0.2.8"));
        let report = reconcile(&mut engine, &wanted).await;
        let of_zone = &report.zones[0];
        assert_eq!(
            (report.applied(), of_zone.records, of_zone.owned),
            (2, 3, 2)
        );
        assert_eq!(of_zone.notes.len(), 1, "{:?}", of_zone.notes);
        assert_eq!(recently_deleted(&engine), 1);
        assert!(report.is_complete(), "a note is no failure");
        // Confirmed deletions are not counted.
        let confirmed = engine
            .reconcile(&numbered(0), Some(2), &|_| {})
            .await
            .unwrap();
        assert_eq!((confirmed.applied(), confirmed.zones[0].owned), (2, 0));
        assert_eq!(recently_deleted(&engine), 1);
    }

    #[tokio::test]
    async fn excess_deletions_wait_alone() {
        let (mut engine, _) = one_zone();
        reconcile(&mut engine, &numbered(12)).await;
        let mut wanted = numbered(1);
        wanted.records.push(set("new.example.org A 192.0.2.1"));
        let report = reconcile(&mut engine, &wanted).await;
        let refusal = Refusal::TooMany {
            deletions: 11,
            owned: 12,
            recent: 0,
            limit: 10,
        };
        assert_eq!(report.zones[0].refusal, Some(refusal));
        assert_eq!((report.applied(), report.zones[0].owned), (1, 13));
        assert!(!report.is_complete());
        let report = reconcile(&mut engine, &numbered(0)).await;
        assert_eq!(
            report.zones[0].refusal,
            Some(Refusal::EmptySource { deletions: 13 })
        );
        // Ten may go without a confirmation, then none within the hour.
        let mut ten = numbered(2);
        ten.records.push(set("new.example.org A 192.0.2.1"));
        assert!(reconcile(&mut engine, &ten).await.is_complete());
        let report = reconcile(&mut engine, &numbered(2)).await;
        let refusal = report.zones[0].refusal.clone().unwrap();
        assert_eq!(
            refusal,
            Refusal::TooMany {
                deletions: 1,
                owned: 3,
                recent: 10,
                limit: 10
            }
        );
    }

    #[tokio::test(start_paused = true)]
    async fn conflicts_cause_more_rounds() {
        let (mut engine, service) = one_zone();
        service.0.lock().conflicts = 2;
        let report = reconcile(&mut engine, &numbered(2)).await;
        assert_eq!(
            (report.rounds, report.applied(), report.is_complete()),
            (3, 2, true)
        );
        let modes = [
            OnConflict::ListAgain,
            OnConflict::Isolate,
            OnConflict::Isolate,
        ];
        assert_eq!(service.0.lock().modes, modes);
        service.0.lock().conflicts = 99;
        let report = reconcile(&mut engine, &numbered(3)).await;
        assert_eq!(
            (report.rounds, report.applied(), report.is_complete()),
            (8, 0, false)
        );
        assert_eq!(report.zones[0].conflicts, 1);
    }

    #[tokio::test]
    async fn refused_name_spares_the_rest() {
        let (mut engine, service) = one_zone();
        let refused = Name::parse("n1.example.org").unwrap();
        service.0.lock().refused = Some(refused.clone());
        let report = reconcile(&mut engine, &numbered(3)).await;
        assert_eq!((report.applied(), report.is_complete()), (2, false));
        assert_eq!(report.zones[0].failures, [(refused, "no".to_owned())]);
        assert_eq!((report.zones[0].records, report.zones[0].owned), (2, 2));
        // Neither what the registry refuses, nor a collision with an owner record.
        let wanted = desired(&[
            "x.example.org A 192.0.2.1",
            "a-x.example.org CNAME b.example.net",
        ]);
        let (mut engine, _) = one_zone();
        engine.rules.owner = "a,b".to_owned();
        let report = reconcile(&mut engine, &wanted).await;
        assert_eq!((report.applied(), report.zones[0].failures.len()), (0, 2));
        engine.rules.owner = "me".to_owned();
        let report = reconcile(&mut engine, &wanted).await;
        assert_eq!(report.applied(), 1);
        let (name, problem) = &report.zones[0].failures[0];
        assert_eq!(name.as_str(), "a-x.example.org");
        assert!(
            problem.contains("would hold a CNAME and an owner record"),
            "{problem}"
        );
    }

    #[tokio::test]
    async fn unlisted_zones_stay_unchanged() {
        let mut broken = zone("broken", "example.org", Visibility::Public);
        let failure = ProviderError::Settings("cause".to_owned());
        broken.content = Err(failure.clone());
        let (mut engine, _) = engine(vec![broken, zone("net", "example.net", Visibility::Public)]);
        let wanted = desired(&[
            "a.example.org A 192.0.2.1",
            "a.example.net A 192.0.2.1",
            "a.example.com A 192.0.2.1",
        ]);
        let report = reconcile(&mut engine, &wanted).await;
        assert_eq!((report.applied(), report.is_complete()), (1, false));
        assert_eq!(report.zones[0].failure, Some(failure));
        assert_eq!(report.zones[1].failure, None);
        assert_eq!(
            (report.zones[0].id.as_str(), report.zones[1].id.as_str()),
            ("broken", "net")
        );
        assert_eq!(report.notes.len(), 1);
        assert_eq!(report.notes[0].reason, Reason::NoZone);
    }

    #[tokio::test]
    async fn repeatedly_restored_name_is_kept() {
        let (mut engine, service) = one_zone();
        let both = desired(&["a.example.org A 192.0.2.1", "b.example.org A 192.0.2.1"]);
        reconcile(&mut engine, &both).await;
        let listed = service.0.lock().zones.clone();
        let one = desired(&["a.example.org A 192.0.2.1"]);
        for round in 1..=2 {
            let report = reconcile(&mut engine, &one).await;
            assert_eq!(
                (report.applied(), report.is_complete()),
                (1, true),
                "{round}"
            );
            // Another publisher with the same owner creates it again.
            service.0.lock().zones.clone_from(&listed);
        }
        // Only the first deletion counts towards the limit.
        assert_eq!(recently_deleted(&engine), 1);
        let report = reconcile(&mut engine, &one).await;
        assert_eq!((report.applied(), report.is_complete()), (0, false));
        let name = Name::parse("b.example.org").unwrap();
        assert_eq!(report.zones[0].contested, BTreeSet::from([name.clone()]));
        assert_eq!(report.zones[0].notes[0].reason, Reason::Contested);
        assert_eq!(report.zones[0].notes[0].name, name);
    }

    #[tokio::test]
    async fn repeatedly_removed_name_is_contested() {
        let (mut engine, service) = one_zone();
        let one = desired(&["a.example.org A 192.0.2.1"]);
        let empty = service.0.lock().zones.clone();
        for round in 1..=3 {
            let report = reconcile(&mut engine, &one).await;
            assert_eq!(
                (report.applied(), report.is_complete()),
                (1, round < 3),
                "{round}"
            );
            service.0.lock().zones.clone_from(&empty);
        }
    }

    #[tokio::test]
    async fn ttl_kept_by_service_is_noted() {
        let (mut engine, service) = one_zone();
        let with_ttl = |ttl: u32| {
            let mut wanted = desired(&["a.example.org A 192.0.2.1"]);
            wanted.records[0].ttl = Some(ttl);
            wanted
        };
        service.0.lock().ttl = Some(60);
        assert_eq!(reconcile(&mut engine, &with_ttl(60)).await.applied(), 1);
        assert_eq!(
            reconcile(&mut engine, &with_ttl(300)).await.applied(),
            1,
            "it may be kept"
        );
        let report = reconcile(&mut engine, &with_ttl(300)).await;
        assert_eq!((report.applied(), report.is_complete()), (0, true));
        let kept = Reason::TtlKept {
            found: Some(60),
            wanted: 300,
        };
        assert_eq!(report.zones[0].notes[0].reason, kept);
        assert_eq!(report.zones[0].notes.len(), 1);
        // Another TTL is tried once, too.
        assert_eq!(reconcile(&mut engine, &with_ttl(200)).await.applied(), 1);
        assert_eq!(reconcile(&mut engine, &with_ttl(200)).await.applied(), 0);
        // Together with another target it is written again.
        let mut other = with_ttl(200);
        other.records[0].targets = set("a.example.org A 192.0.2.2").targets;
        assert_eq!(reconcile(&mut engine, &other).await.applied(), 1);
        assert_eq!(
            reconcile(&mut engine, &other).await.applied(),
            1,
            "the service wrote the set again"
        );
        // A service that keeps it is believed again.
        service.0.lock().ttl = None;
        assert_eq!(reconcile(&mut engine, &with_ttl(90)).await.applied(), 1);
        assert_eq!(reconcile(&mut engine, &with_ttl(70)).await.applied(), 1);
        assert_eq!(engine.ttl_changes.len(), 1);
        assert_eq!(reconcile(&mut engine, &with_ttl(70)).await.applied(), 0);
        assert!(engine.ttl_changes.is_empty());
    }

    #[test]
    fn report_without_rest_is_complete() {
        let with = |change: &dyn Fn(&mut ZoneReport)| {
            let mut zone = ZoneReport::default();
            change(&mut zone);
            let zones = vec![ZoneReport::default(), zone];
            Report {
                zones,
                ..Report::default()
            }
        };
        assert!(with(&|zone| zone.applied = 3).is_complete());
        let name = Name::parse("a").unwrap();
        assert!(!with(&|zone| zone.failures.push((name.clone(), String::new()))).is_complete());
        assert!(!with(&|zone| zone.conflicts = 1).is_complete());
        assert!(!with(&|zone| zone.contested = BTreeSet::from([name.clone()])).is_complete());
        assert!(
            !with(&|zone| zone.refusal = Some(Refusal::EmptySource { deletions: 1 })).is_complete()
        );
        assert!(
            !with(&|zone| zone.failure = Some(ProviderError::Settings(String::new())))
                .is_complete()
        );
        assert_eq!(with(&|zone| zone.applied = 3).applied(), 3);
    }

    #[test]
    fn the_guard_has_exact_limits() {
        let refused = |deleted: usize, owned, recent, wanted, confirmed| {
            let zone = ZonePlan {
                id: "z".to_owned(),
                plan: deletions(deleted),
                owned,
                recent,
            };
            let planned = Planned {
                zones: vec![zone],
                notes: Vec::new(),
                wanted,
            };
            planned.check(&planned.zones[0], confirmed).err()
        };
        for (deleted, owned, recent, wanted, confirmed, limit) in [
            (0, 0, 100, 0, None, None),
            (10, 10, 0, 1, None, None),
            (11, 109, 0, 1, None, Some(10)),
            (11, 110, 0, 1, None, None),
            (20, 200, 0, 1, None, None),
            (21, 200, 0, 1, None, Some(20)),
            (11, 119, 9, 1, None, Some(12)),
            (3, 111, 9, 1, None, None),
            (4, 111, 9, 1, None, Some(12)),
            (4, 111, 9, 1, Some(4), None),
            (4, 111, 9, 1, Some(3), Some(12)),
            (1, 1, 0, 0, Some(1), None),
        ] {
            let expected = limit.map(|limit| Refusal::TooMany {
                deletions: deleted,
                owned,
                recent,
                limit,
            });
            assert_eq!(
                refused(deleted, owned, recent, wanted, confirmed),
                expected,
                "{deleted} {owned}"
            );
        }
        assert_eq!(
            refused(1, 1, 0, 0, None),
            Some(Refusal::EmptySource { deletions: 1 })
        );
        // Zones are confirmed together.
        let zone = |count| ZonePlan {
            id: "z".to_owned(),
            plan: deletions(count),
            owned: 20,
            recent: 0,
        };
        let planned = Planned {
            zones: vec![zone(11), zone(12)],
            notes: Vec::new(),
            wanted: 1,
        };
        assert!(planned.check(&planned.zones[0], Some(22)).is_err());
        assert!(planned.check(&planned.zones[0], Some(23)).is_ok());
    }

    #[test]
    fn refusals_tell_how_to_confirm() {
        let many = |recent| Refusal::TooMany {
            deletions: 11,
            owned: 12,
            recent,
            limit: 10,
        };
        let rest = "above the limit of 10 in an hour; the other changes are made; check filters and documents, or allow \
                    the deletions with `bosh-dns-publish apply --confirm-deletions 11`";
        assert_eq!(
            many(0).to_string(),
            format!("11 of 12 names would be deleted, {rest}")
        );
        assert_eq!(
            many(3).to_string(),
            format!("11 of 12 names would be deleted after 3 others in the last hour, {rest}")
        );
        assert_eq!(many(0).deletions(), 11);
        assert_eq!(Refusal::EmptySource { deletions: 7 }.deletions(), 7);
    }

    #[test]
    fn kept_sets_prolong_a_conflict() {
        let change = deletions(1).changes.remove(0);
        let start = SystemTime::now();
        let mut undone = UndoneChanges::default();
        undone.applied(&change, start);
        undone.applied(&change, start);
        let almost = start + WINDOW - Duration::from_secs(1);
        assert!(undone.has_repeatedly_deleted(&change, almost));
        undone.kept(&Name::parse("other").unwrap(), almost);
        assert!(!undone.has_repeatedly_deleted(&change, start + WINDOW));
        undone.kept(&change.name, almost);
        assert!(undone.has_repeatedly_deleted(&change, start + WINDOW));
        assert!(!undone.has_repeatedly_deleted(&change, almost + WINDOW));
        // A clock that was set back forgets nothing.
        assert!(undone.has_repeatedly_deleted(&change, start - WINDOW));
        // A deletion long after the former one counts as the first.
        let later = almost + WINDOW;
        undone.applied(&change, later);
        assert!(!undone.has_repeatedly_deleted(&change, later));
        undone.applied(&change, later);
        assert!(undone.has_repeatedly_deleted(&change, later));
        // A change of type shows no second writer.
        let Action::Delete(record) = change.actions[0].clone() else {
            unreachable!()
        };
        let replaced = NameChange {
            name: change.name.clone(),
            actions: vec![
                Action::Delete(record),
                Action::Create(set("n0.example.org CNAME a")),
            ],
        };
        for _ in 0..5 {
            assert!(!undone.applied(&replaced, later));
        }
        assert!(
            !undone.has_repeatedly_deleted(&replaced, later),
            "it is no deletion"
        );
    }

    #[tokio::test]
    async fn changes_are_forgotten_after_an_hour() {
        let (mut engine, _) = one_zone();
        let long_ago = SystemTime::now() - WINDOW;
        for number in 0..3 {
            let deletion = deletions(number + 1).changes.remove(number);
            engine.undone.applied(&deletion, long_ago);
            let created = NameChange {
                name: deletion.name,
                actions: vec![Action::Create(set(&format!("m{number} A 192.0.2.1")))],
            };
            engine.undone.applied(&created, long_ago);
        }
        assert!(reconcile(&mut engine, &numbered(1)).await.is_complete());
        let UndoneChanges { deleted, created } = &engine.undone;
        assert_eq!((deleted.len(), created.len()), (0, 1));
    }

    #[tokio::test]
    async fn lost_responses_make_no_room_for_deletions() {
        let (mut engine, service) = one_zone();
        reconcile(&mut engine, &numbered(20)).await;
        // The service deletes eight names, but its response is lost.
        service.0.lock().is_lost = true;
        let report = reconcile(&mut engine, &numbered(12)).await;
        assert_eq!((report.applied(), report.zones[0].failures.len()), (0, 8));
        service.0.lock().is_lost = false;
        let report = reconcile(&mut engine, &numbered(9)).await;
        let refusal = Refusal::TooMany {
            deletions: 3,
            owned: 12,
            recent: 8,
            limit: 10,
        };
        assert_eq!(report.zones[0].refusal, Some(refusal));
        // A deletion that is repeated counts once.
        service.0.lock().refused = Some(Name::parse("n11.example.org").unwrap());
        for _ in 0..5 {
            let report = reconcile(&mut engine, &numbered(11)).await;
            assert_eq!(report.zones[0].refusal, None);
        }
    }

    #[tokio::test]
    async fn deletions_beyond_the_confirmed_number_count() {
        let (mut engine, _) = one_zone();
        reconcile(&mut engine, &numbered(20)).await;
        let confirmed = async |engine: &mut Engine, wanted: usize, confirmed: usize| {
            let wanted = numbered(wanted);
            let report = engine.reconcile(&wanted, Some(confirmed), &|_| {});
            let mut report = report.await.unwrap();
            (report.applied(), report.zones.remove(0).refusal.is_some())
        };
        // The confirmation does not cover the deletions, so the limit does.
        assert_eq!(confirmed(&mut engine, 12, 1).await, (8, false));
        assert_eq!(confirmed(&mut engine, 9, 1).await, (0, true));
        assert_eq!(confirmed(&mut engine, 9, 3).await, (3, false));
        // Those that it covers count for nothing.
        assert_eq!(confirmed(&mut engine, 7, 0).await, (2, false));
        assert_eq!(confirmed(&mut engine, 6, 0).await, (0, true));
    }

    #[tokio::test(start_paused = true)]
    async fn confirmed_number_is_for_all_rounds() {
        let zones = vec![
            zone("one", "example.org", Visibility::Public),
            zone("two", "example.net", Visibility::Public),
        ];
        let (mut engine, service) = engine(zones);
        let mut all = desired(&["a.example.org A 192.0.2.1", "b.example.org A 192.0.2.1"]);
        for number in 0..30 {
            all.records
                .push(set(&format!("n{number}.example.net A 192.0.2.1")));
        }
        assert!(reconcile(&mut engine, &all).await.is_complete());
        // Half of the names of the second zone come from another publisher with the same owner, later.
        let mut rivals = Vec::new();
        for number in 15..30 {
            let own = format!("n{number}.example.net");
            let is_of = |record: &mut Record| record.name.as_str().ends_with(&own);
            rivals.extend(service.0.lock().sets("two").extract_if(.., is_of));
        }
        service.0.lock().rivals = rivals;
        service.0.lock().conflicts = 1;
        let rest = desired(&["a.example.org A 192.0.2.1"]);
        let report = engine.reconcile(&rest, Some(16), &|_| {}).await.unwrap();
        assert_eq!((report.rounds, report.applied()), (2, 16));
        let refusal = Refusal::TooMany {
            deletions: 15,
            owned: 15,
            recent: 0,
            limit: 10,
        };
        assert_eq!(report.zones[1].refusal, Some(refusal));
    }
}
