//! Compares existing records with wanted records. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use dns_core::name::reverse_of;

use crate::record::{DomainFilter, Labels, Name, Record, RecordType, Target};

/// Changes that a publisher may make.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Policy {
    /// Creates, updates and deletes.
    #[default]
    Sync,
    /// Creates and updates record sets, but deletes none.
    UpsertOnly,
    /// Creates record sets; existing ones stay unchanged.
    CreateOnly,
}

impl Policy {
    /// Returns the policy with this name in the parameter `policy`.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "sync" => Some(Self::Sync),
            "upsert-only" => Some(Self::UpsertOnly),
            "create-only" => Some(Self::CreateOnly),
            _ => None,
        }
    }
}

/// Rules of a plan.
#[derive(Debug, Clone)]
pub struct PlanRules {
    /// Kinds of changes to make.
    pub policy: Policy,
    /// Owner label of this publisher. If empty, records are only created.
    pub owner: String,
    /// Record types that the publisher manages.
    pub managed: BTreeSet<RecordType>,
    /// Filter for the names that the publisher manages.
    pub domains: DomainFilter,
    /// Former owner whose records are taken over if they are wanted.
    pub migrate_from: Option<String>,
    /// Minimum TTL in seconds.
    pub min_ttl: u32,
    /// Whether every wanted address gets a PTR record.
    pub creates_pointers: bool,
}

impl PlanRules {
    /// Returns the default rules for an owner: policy `sync`, types A, AAAA and CNAME, every name.
    pub fn of(owner: &str) -> Self {
        Self {
            policy: Policy::Sync,
            owner: owner.to_owned(),
            managed: RecordType::DEFAULT_MANAGED.into(),
            domains: DomainFilter::default(),
            migrate_from: None,
            min_ttl: 0,
            creates_pointers: false,
        }
    }

    pub(crate) fn owns(&self, record: &Record) -> bool {
        // Without ownership (`registry: noop`), external-dns deletes the records of others.
        !self.owner.is_empty() && record.labels.owner() == self.owner
    }

    fn may_replace(&self, record: &Record) -> bool {
        let owner = record.labels.owner();
        // An empty former owner would take over every record without an owner.
        self.owns(record) || !owner.is_empty() && self.migrate_from.as_deref() == Some(owner)
    }

    pub(crate) fn manages(&self, record: &Record) -> bool {
        self.managed.contains(&record.record_type) && self.domains.matches(&record.name)
    }
}

/// Records wanted by the sources.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Desired {
    /// Valid records of all sources.
    pub records: Vec<Record>,
    /// Resources of unreadable documents, whose records stay unchanged.
    pub held: BTreeSet<String>,
    /// If set, the records of all other resources stay unchanged as well, because a document that
    /// cannot be identified may want them.
    pub known: Option<BTreeSet<String>>,
}

impl Desired {
    /// Returns whether a document that cannot be read may want a record.
    fn holds(&self, record: &Record) -> bool {
        let resource = record.labels.resource();
        self.held.contains(resource)
            || self
                .known
                .as_ref()
                .is_some_and(|known| !known.contains(resource))
    }

    /// Returns the records by the resource that wants them.
    pub(crate) fn by_resource(&self) -> BTreeMap<&str, Vec<&Record>> {
        let mut found: BTreeMap<&str, Vec<&Record>> = BTreeMap::new();
        for record in &self.records {
            let resource = found.entry(record.labels.resource());
            resource.or_default().push(record);
        }
        found
    }
}

/// Returns a PTR record for each address of a set (RFC 1035, section 3.5; RFC 3596, section 2.5). A
/// wildcard has none.
pub(crate) fn pointers(record: &Record) -> Vec<Record> {
    let mut found = Vec::new();
    // A pointer gives the name of a host (RFC 1035, section 3.5), which a wildcard is not.
    if record.name.labels().next() == Some("*") {
        return found;
    }
    // Every name is valid as the data of a PTR record.
    let Ok(target) = Target::parse(RecordType::PTR, record.name.as_str()) else {
        return found;
    };
    for address in &record.targets {
        if let Some(name) = reverse_name(address) {
            found.push(Record {
                ttl: record.ttl,
                labels: record.labels.clone(),
                ..Record::new(name, RecordType::PTR, [target.clone()])
            });
        }
    }
    found
}

fn reverse_name(address: &Target) -> Option<Name> {
    let address = address.as_str().parse().ok()?;
    Name::parse(&reverse_of(address).to_string()).ok()
}

/// Plans the changes from `current` to `desired`.
pub fn plan(rules: &PlanRules, current: &[Record], desired: &Desired) -> Plan {
    let mut plan = Plan::default();
    let mut names: BTreeMap<&Name, Rows<'_>> = BTreeMap::new();
    let redirections = redirections(rules, current, desired);
    for record in current {
        let rows = names.entry(&record.name).or_default();
        if rules.manages(record) {
            rows.row(record).current.insert(record.record_type, record);
        } else {
            // It is never changed, but may exclude a CNAME, or be excluded by one.
            rows.unmanaged.insert(record.record_type);
            // With external-dns a narrowed filter deletes the names outside of it.
            if rules.owns(record) && rules.managed.contains(&record.record_type) {
                plan.note(record, Reason::LeftBehind);
            }
        }
    }
    for record in &desired.records {
        if !rules.domains.matches(&record.name) {
            plan.note(record, Reason::OutOfDomain);
        } else if !rules.managed.contains(&record.record_type) {
            plan.note(record, Reason::UnmanagedType);
        } else {
            let candidates = &mut names
                .entry(&record.name)
                .or_default()
                .row(record)
                .candidates;
            candidates
                .entry(record.record_type)
                .or_default()
                .push(record);
        }
    }
    for (name, mut rows) in names {
        // Route 53 refuses a CNAME beside other types also under another set identifier.
        rows.drop_conflicting_aliases(&mut plan);
        let mut actions = Vec::new();
        for row in rows.by_set.values() {
            actions.extend(plan_row(
                rules,
                row,
                &rows.unmanaged,
                (desired, &redirections),
                &mut plan,
            ));
        }
        if !actions.is_empty() {
            plan.changes.push(NameChange {
                name: name.clone(),
                actions,
            });
        }
    }
    plan
}

/// Plans a transfer of `records` to another owner, or their release if `owner` is empty. Only owner records change.
pub fn transfer<'a>(records: impl IntoIterator<Item = &'a Record>, owner: &str) -> Plan {
    let mut actions = Vec::new();
    for record in records {
        if record.labels.owner() == owner {
            continue;
        }
        let action = if owner.is_empty() {
            Action::Release(record.clone())
        } else {
            let mut after = record.clone();
            let label = Labels::OWNER.to_owned();
            // The resource stays the same: who wants the record does not change.
            after.labels.0.insert(label, owner.to_owned());
            Action::Update {
                before: record.clone(),
                after,
            }
        };
        actions.push(action);
    }
    by_name(actions)
}

/// Plans the deletion of all `records` of `owner`.
pub fn retire<'a>(records: impl IntoIterator<Item = &'a Record>, owner: &str) -> Plan {
    let mut actions = Vec::new();
    for record in records {
        // Without an owner, this would delete all records that have none.
        if !owner.is_empty() && record.labels.owner() == owner {
            actions.push(Action::Delete(record.clone()));
        }
    }
    by_name(actions)
}

/// Plans the deletion of owner records of `owner` that have no record.
pub fn drop_orphans<'a>(orphans: impl IntoIterator<Item = &'a Record>, owner: &str) -> Plan {
    let mut actions = Vec::new();
    for orphan in orphans {
        if orphan.labels.owner() == owner {
            actions.push(Action::DropOrphan(orphan.clone()));
        }
    }
    by_name(actions)
}

fn by_name(actions: Vec<Action>) -> Plan {
    let mut names: BTreeMap<Name, Vec<Action>> = BTreeMap::new();
    for action in actions {
        let name = action.record().name.clone();
        names.entry(name).or_default().push(action);
    }
    let mut plan = Plan::default();
    for (name, actions) in names {
        plan.changes.push(NameChange { name, actions });
    }
    plan
}

#[derive(Default)]
struct Rows<'a> {
    by_set: BTreeMap<&'a str, Row<'a>>,
    unmanaged: BTreeSet<RecordType>,
}

impl<'a> Rows<'a> {
    fn row(&mut self, record: &'a Record) -> &mut Row<'a> {
        self.by_set.entry(&record.set_identifier).or_default()
    }

    /// Drops wanted CNAMEs where other types of the same name are wanted, under any set identifier.
    fn drop_conflicting_aliases(&mut self, plan: &mut Plan) {
        // A CNAME excludes all other data of its name (RFC 1034, section 3.6.2). As in external-dns, it is the one
        // that gives way.
        let mut types = self.by_set.values().flat_map(|row| row.candidates.keys());
        if types.all(|record_type| *record_type == RecordType::CNAME) {
            return;
        }
        for row in self.by_set.values_mut() {
            let aliases = row.candidates.remove(&RecordType::CNAME);
            for alias in aliases.into_iter().flatten() {
                plan.note(alias, Reason::AliasConflict);
            }
        }
    }
}

/// Sets of one name and set identifier, by type.
#[derive(Default)]
struct Row<'a> {
    current: BTreeMap<RecordType, &'a Record>,
    /// Wanted sets.
    candidates: BTreeMap<RecordType, Vec<&'a Record>>,
}

/// Delegations and DNAMEs of a zone, which send resolvers elsewhere for the names below them.
type Redirections<'a> = BTreeMap<&'a Name, &'a Record>;

fn redirects(record: &Record) -> bool {
    [RecordType::NS, RecordType::DNAME].contains(&record.record_type)
}

/// Returns the redirections after the changes, so that the next plan decides as this one does.
fn redirections<'a>(
    rules: &PlanRules,
    current: &'a [Record],
    desired: &'a Desired,
) -> Redirections<'a> {
    let mut found = Redirections::new();
    let mut foreign = BTreeSet::new();
    // A zone's records do not contain the NS of its apex.
    for record in current {
        if redirects(record) {
            found.insert(&record.name, record);
            // A foreign delegation stays, so it hides names after the changes as well.
            if !rules.may_replace(record) {
                foreign.insert(&record.name);
            }
        }
    }
    for record in &desired.records {
        // A delegation that is only wanted hides names in the plan that creates it, too; otherwise
        // the next plan would report names that this one has just created.
        let is_made = redirects(record)
            && rules.manages(record)
            && !record.targets.is_empty()
            && !foreign.contains(&record.name);
        if is_made {
            found.insert(&record.name, record);
        }
    }
    found
}

/// Returns the reason, if any, why resolvers do not see a record. They see the addresses of a
/// delegation's own servers (RFC 9471), and the records that make the delegation.
fn hidden(redirections: &Redirections<'_>, record: &Record) -> Option<Reason> {
    // Hardly any zone has one, and each name above a record is an allocation.
    if redirections.is_empty() {
        return None;
    }
    let mut above = Some(record.name.clone());
    while let Some(name) = above {
        if let Some(found) = redirections.get(&name) {
            let is_at = name == record.name;
            let belongs = match found.record_type {
                RecordType::NS if record.record_type.is_address() => found.points_to(&record.name),
                // The parent's servers answer for DS (RFC 4035, section 3.1.4.1).
                RecordType::NS => {
                    is_at && [RecordType::NS, RecordType::DS].contains(&record.record_type)
                }
                // A DNAME redirects the names below, not its own (RFC 6672, section 2.3).
                _ => is_at,
            };
            if !belongs {
                return Some(Reason::Hidden {
                    at: name,
                    record_type: found.record_type,
                });
            }
        }
        above = name.parent();
    }
    None
}

/// Plans one row. All its actions are applied in one transaction.
fn plan_row(
    rules: &PlanRules,
    row: &Row<'_>,
    unmanaged: &BTreeSet<RecordType>,
    (desired, redirections): (&Desired, &Redirections<'_>),
    plan: &mut Plan,
) -> Vec<Action> {
    let mut creates = Vec::new();
    let mut updates = Vec::new();
    for (record_type, candidates) in &row.candidates {
        let current = row.current.get(record_type).copied();
        // `candidates` has no entry without a record.
        let Some(wanted) = merge(candidates, current) else {
            continue;
        };
        match current {
            // External-dns writes the empty set, which withdraws the name.
            _ if wanted.targets.is_empty() => plan.note(&wanted, Reason::NoTargets),
            _ if wanted.is_self_alias() => plan.note(&wanted, Reason::SelfAlias),
            None => match hidden(redirections, &wanted) {
                Some(reason) => plan.note(&wanted, reason),
                None => creates.push(owned_by(rules, wanted, None)),
            },
            // As in external-dns, records of others are neither changed nor added to.
            Some(before) if !rules.may_replace(before) => {
                let owner = before.labels.owner().to_owned();
                plan.note(&wanted, Reason::Foreign { owner });
            }
            Some(before) => {
                // The record exists, and will be seen again without the redirection.
                if let Some(reason) = hidden(redirections, &wanted) {
                    plan.note(&wanted, reason);
                }
                let after = owned_by(rules, wanted, Some(before));
                if differs(before, &after) {
                    updates.push(Action::Update {
                        before: before.clone(),
                        after,
                    });
                }
            }
        }
    }
    let mut deletes = deletions(rules, row, desired, !creates.is_empty(), plan);
    if rules.policy == Policy::CreateOnly {
        updates.clear();
    }
    // After the policy: a set that it does not allow to delete still excludes a CNAME.
    if let Some(reason) = obstacle(rules, row, unmanaged, &creates, &deletes) {
        for create in creates.drain(..) {
            plan.note(&create, reason.clone());
        }
        // If the replacement cannot be created, the old record is kept.
        if !row.candidates.is_empty() {
            deletes.clear();
        }
    }
    let creates = creates.into_iter().map(Action::Create);
    deletes.into_iter().chain(updates).chain(creates).collect()
}

/// Returns the deletions of sets that are no longer wanted. With `is_replaced`, that includes sets in the way of new
/// ones.
fn deletions(
    rules: &PlanRules,
    row: &Row<'_>,
    desired: &Desired,
    is_replaced: bool,
    plan: &mut Plan,
) -> Vec<Action> {
    let mut deletes = Vec::new();
    for (record_type, record) in &row.current {
        // A wanted set is created, updated or noted above.
        if row.candidates.contains_key(record_type) {
            continue;
        }
        // One bad object must not withdraw what it wanted.
        if desired.holds(record) && rules.owns(record) {
            plan.note(record, Reason::SourceUnreadable);
        } else if rules.owns(record) || is_replaced && rules.may_replace(record) {
            deletes.push(Action::Delete((*record).clone()));
        }
    }
    if rules.policy != Policy::Sync {
        deletes.clear();
    }
    deletes
}

/// Returns the reason, if any, why nothing can be created beside the remaining records.
fn obstacle(
    rules: &PlanRules,
    row: &Row<'_>,
    unmanaged: &BTreeSet<RecordType>,
    creates: &[Record],
    deletes: &[Action],
) -> Option<Reason> {
    let first = creates.first()?;
    let foreign = row
        .current
        .values()
        // Without ownership (`registry: noop`) nothing is known about others, and records are
        // created as external-dns does.
        .find(|record| !rules.owner.is_empty() && !rules.may_replace(record));
    if let Some(foreign) = foreign {
        return Some(Reason::Foreign {
            owner: foreign.labels.owner().to_owned(),
        });
    }
    // The first one stands for all: `drop_conflicting_aliases` left either a CNAME or other types.
    let is_alias = first.record_type == RecordType::CNAME;
    // The server would refuse it at every interval, as it does with external-dns.
    for record_type in unmanaged {
        if (*record_type == RecordType::CNAME) != is_alias {
            return Some(Reason::Occupied {
                record_type: *record_type,
            });
        }
    }
    for record_type in row.current.keys() {
        let is_deleted = deletes
            .iter()
            .any(|action| matches!(action, Action::Delete(old) if old.record_type == *record_type));
        if (*record_type == RecordType::CNAME) != is_alias && !is_deleted {
            return Some(Reason::NeedsDeletion {
                record_type: *record_type,
            });
        }
    }
    None
}

/// Returns the wanted record with its new labels: the old ones, our owner, and the resource that wants it.
fn owned_by(rules: &PlanRules, mut wanted: Record, before: Option<&Record>) -> Record {
    // Labels that later versions of external-dns may have written survive an update.
    let mut labels = match before {
        Some(before) => before.labels.clone(),
        None => Labels::default(),
    };
    labels
        .0
        .extend(Labels::of(&rules.owner, wanted.labels.resource()).0);
    wanted.labels = labels;
    wanted
}

/// Returns whether a set must be written. A changed resource alone is ignored.
fn differs(before: &Record, after: &Record) -> bool {
    before.targets != after.targets
        // As in external-dns, a TTL of 0 is none.
        || after.ttl.unwrap_or(0) > 0 && after.ttl != before.ttl
        || before.properties != after.properties
        || before.labels.owner() != after.labels.owner()
}

/// Merges candidates into one set.
///
/// Addresses of all candidates are combined. For other types, the candidate with the resource of the existing set
/// wins, or else the one with the fewest, then the least targets. `None` without candidates.
fn merge(candidates: &[&Record], current: Option<&Record>) -> Option<Record> {
    let resource = current.map_or("", |current| current.labels.resource());
    // External-dns chooses in the same way, so a zone that moves between both does not change.
    let holder = candidates
        .iter()
        .find(|candidate| !resource.is_empty() && candidate.labels.resource() == resource);
    // Without an existing record the choice must not depend on the order of the documents, or two
    // publishers would undo each other's changes.
    let least = candidates.iter().min_by(|a, b| order(a).cmp(&order(b)));
    let mut merged: Record = (*holder.or(least)?).clone();
    // External-dns publishes the shorter list only.
    if merged.record_type.is_address() {
        merged.ttl = None;
        for candidate in candidates {
            merged.targets.extend(candidate.targets.iter().cloned());
            // As in external-dns, a TTL of 0 is none.
            if let Some(ttl) = candidate.ttl
                && ttl > 0
                && merged.ttl.is_none_or(|least| ttl < least)
            {
                merged.ttl = Some(ttl);
            }
        }
    }
    Some(merged)
}

/// Returns the sort key by preference. A set without targets comes last, because it gives no answer.
fn order(record: &Record) -> (bool, usize, &BTreeSet<Target>, &str) {
    let targets = &record.targets;
    let resource = record.labels.resource();
    (targets.is_empty(), targets.len(), targets, resource)
}

/// Changes, and wanted records without effect.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Changes by name, in order.
    pub changes: Vec<NameChange>,
    /// Notes on wanted records without effect, for display and metrics.
    pub notes: Vec<Note>,
}

impl Plan {
    /// Returns whether nothing changes.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// Returns the changes of all names.
    pub fn actions(&self) -> impl Iterator<Item = &Action> {
        self.changes.iter().flat_map(|change| &change.actions)
    }

    /// Returns the number of names that lose a record without a replacement.
    pub fn deletions(&self) -> usize {
        self.deleted_names().count()
    }

    /// Returns the names that lose a record without a replacement.
    pub(crate) fn deleted_names(&self) -> impl Iterator<Item = &Name> {
        let deletions = self.changes.iter().filter(|change| change.is_deletion());
        deletions.map(|change| &change.name)
    }

    /// Returns the plan without the records that names lose without a replacement.
    pub fn without_deletions(&self) -> Self {
        let mut kept = self.clone();
        for change in &mut kept.changes {
            // In a change of type the name keeps an answer, and the old set has to go first.
            if change.is_deletion() {
                let actions = &mut change.actions;
                actions.retain(|action| !matches!(action, Action::Delete(_)));
            }
        }
        kept.changes.retain(|change| !change.actions.is_empty());
        kept
    }

    pub(crate) fn note(&mut self, record: &Record, reason: Reason) {
        self.notes.push(Note::on(record, reason));
    }
}

/// Changes of one name. They are applied together, with their owner records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NameChange {
    /// Name of all records in `actions`.
    pub name: Name,
    /// At most one change for each type and set identifier; deletions come first.
    pub actions: Vec<Action>,
}

impl NameChange {
    /// Returns whether the name loses a record without a replacement.
    pub fn is_deletion(&self) -> bool {
        self.deleted().next().is_some() && !self.is_creation()
    }

    /// Returns the sets to delete.
    pub fn deleted(&self) -> impl Iterator<Item = &Record> {
        self.actions.iter().filter_map(|action| match action {
            Action::Delete(record) => Some(record),
            _ => None,
        })
    }

    /// Returns whether the name gains a record.
    pub fn is_creation(&self) -> bool {
        self.actions
            .iter()
            .any(|action| matches!(action, Action::Create(_)))
    }
}

/// Change of one record set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Creates a record set that does not exist.
    Create(Record),
    /// Replaces a set, or only its labels.
    Update {
        /// Record set as the provider listed it.
        before: Record,
        /// Set to write. Without a TTL it keeps the old one.
        after: Record,
    },
    /// Deletes a record set, given as listed.
    Delete(Record),
    /// Deletes the owner record and keeps the set.
    Release(Record),
    /// Deletes the texts of one owner from an owner record that has no record.
    DropOrphan(Record),
}

impl Action {
    /// Returns the record that results, or the one that was listed.
    pub(crate) fn record(&self) -> &Record {
        match self {
            Self::Create(record)
            | Self::Update { after: record, .. }
            | Self::Delete(record)
            | Self::Release(record)
            | Self::DropOrphan(record) => record,
        }
    }
}

/// One line that starts with `+`, `~`, `-` or `=`.
impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Create(record) => write!(f, "+ {record}"),
            Self::Update { before, after } => match change(before, after) {
                Some(change) => write!(f, "~ {} {}: {change}", before.name, before.record_type),
                None => write!(f, "~ {before} -> {after}"),
            },
            Self::Delete(record) => write!(f, "- {record}"),
            Self::Release(record) => write!(f, "= {record}: remains without an owner"),
            Self::DropOrphan(Record {
                name,
                record_type,
                labels,
                ..
            }) => {
                write!(
                    f,
                    "- {name} {record_type}: owner record of {:?}",
                    labels.owner()
                )
            }
        }
    }
}

fn change(before: &Record, after: &Record) -> Option<String> {
    let mut parts = Vec::new();
    if let (Some(new), old) = (after.ttl, before.ttl)
        && Some(new) != old
    {
        parts.push(format!("ttl {} -> {new}", old.unwrap_or(0)));
    }
    for target in before.targets.difference(&after.targets) {
        parts.push(format!("-{target}"));
    }
    for target in after.targets.difference(&before.targets) {
        parts.push(format!("+{target}"));
    }
    if before.labels.owner() != after.labels.owner() {
        parts.push(format!(
            "owner {} -> {}",
            shown_owner(before),
            shown_owner(after)
        ));
    }
    if before.properties != after.properties {
        parts.push(format!(
            "properties {:?} -> {:?}",
            before.properties, after.properties
        ));
    }
    (!parts.is_empty()).then(|| parts.join(", "))
}

fn shown_owner(record: &Record) -> String {
    match record.labels.owner() {
        "" => "none".to_owned(),
        owner => format!("{owner:?}"),
    }
}

/// A wanted record without effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// Name of the record.
    pub name: Name,
    /// Type of the record.
    pub record_type: RecordType,
    /// Cause, with the remedy in its text.
    pub reason: Reason,
}

impl Note {
    pub(crate) fn on(record: &Record, reason: Reason) -> Self {
        Self {
            name: record.name.clone(),
            record_type: record.record_type,
            reason,
        }
    }
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.name, self.record_type, self.reason)
    }
}

/// Reason why a wanted record has no effect, or only a partial one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum Reason {
    #[error(
        "the name has a record of {}; take it over with `adopt` or `transfer-owner`",
        shown(owner)
    )]
    Foreign { owner: String },
    #[error("the name is out of scope: domain-filter or exclude-domains excludes it")]
    OutOfDomain,
    #[error(
        "no longer in scope of domain-filter and exclude-domains; `retire` with its domain deletes it"
    )]
    LeftBehind,
    #[error("records of this type are not managed; add the type to managed_record_types")]
    UnmanagedType,
    #[error(
        "the name has a record of type {record_type}, and a CNAME excludes all others; remove one of them"
    )]
    Occupied { record_type: RecordType },
    #[error(
        "blocked by the record of type {record_type}, which the policy does not allow to delete; use policy sync"
    )]
    NeedsDeletion { record_type: RecordType },
    #[error(
        "the CNAME is dropped because other records of the name are wanted; remove one of them"
    )]
    AliasConflict,
    #[error("no target is known; existing records stay unchanged")]
    NoTargets,
    #[error(
        "the service keeps the TTL {} in place of {wanted}; leave the TTL out, or want the one that it keeps",
        found.unwrap_or(0)
    )]
    TtlKept { found: Option<u32>, wanted: u32 },
    #[error("its document cannot be read; the record stays unchanged until it can")]
    SourceUnreadable,
    #[error(
        "the owner record of {} has no record; if its publisher is gone, `retire --orphans={owner}` deletes it",
        shown(owner)
    )]
    Orphan { owner: String },
    #[error(
        "its owner record also matches another record; neither changes until `adopt` names the owner"
    )]
    Ambiguous,
    #[error("none of the provider's zones contains the name")]
    NoZone,
    #[error("the CNAME points to its own name; correct its target")]
    SelfAlias,
    #[error(
        "the server manages the NS records of its zone; change them there, and remove the record here"
    )]
    ApexServers,
    #[error(
        "resolvers do not see the name: {at} has a record of type {record_type}; publish it in that zone"
    )]
    Hidden { at: Name, record_type: RecordType },
    #[error(
        "kept, because another writer with the same owner creates it again after every deletion; give each \
         publisher its own txt-owner-id"
    )]
    Contested,
}

/// Formats an owner within a sentence.
fn shown(owner: &str) -> String {
    if owner.is_empty() {
        "no owner".to_owned()
    } else {
        format!("owner {owner:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_single_sentences() {
        let record_type = RecordType::A;
        let at = Name::root();
        let reasons = [
            Reason::Foreign {
                owner: String::new(),
            },
            Reason::OutOfDomain,
            Reason::LeftBehind,
            Reason::UnmanagedType,
            Reason::Occupied { record_type },
            Reason::NeedsDeletion { record_type },
            Reason::AliasConflict,
            Reason::NoTargets,
            Reason::TtlKept {
                found: None,
                wanted: 60,
            },
            Reason::SourceUnreadable,
            Reason::Orphan {
                owner: String::new(),
            },
            Reason::Ambiguous,
            Reason::NoZone,
            Reason::SelfAlias,
            Reason::ApexServers,
            Reason::Hidden { at, record_type },
            Reason::Contested,
        ];
        for reason in reasons {
            let text = reason.to_string();
            assert!(
                !text.contains("  ") && !text.contains('\n') && !text.contains('#'),
                "{text:?}"
            );
        }
    }

    fn owned(name: &str, owner: &str) -> Record {
        let mut record = Record::parse(name, RecordType::A, ["192.0.2.1"]).unwrap();
        let label = Labels::OWNER.to_owned();
        record.labels.0.insert(label, owner.to_owned());
        record
    }

    #[test]
    fn owners_are_transferred_released_and_retired() {
        let records = [
            owned("a.example.org", "one"),
            owned("b.example.org", "two"),
            owned("c.example.org", "one"),
            owned("d.example.org", ""),
        ];
        let lines = |plan: Plan| {
            let actions = plan.changes.iter().flat_map(|change| &change.actions);
            let mut lines = Vec::new();
            for action in actions {
                lines.push(match action {
                    Action::Update { before, after } => {
                        format!(
                            "{} {}>{}",
                            before.name,
                            before.labels.owner(),
                            after.labels.owner()
                        )
                    }
                    Action::Release(record) => format!("{} released", record.name),
                    Action::Delete(record) => format!("{} deleted", record.name),
                    other => format!("{other}"),
                });
            }
            lines.join(", ")
        };
        assert_eq!(
            lines(transfer(&records, "two")),
            "a.example.org one>two, c.example.org one>two, d.example.org >two"
        );
        assert_eq!(
            lines(transfer(&records, "")),
            "a.example.org released, b.example.org released, c.example.org released"
        );
        assert_eq!(
            lines(retire(&records, "one")),
            "a.example.org deleted, c.example.org deleted"
        );
        assert_eq!(lines(retire(&records, "")), "");
    }

    #[test]
    fn sets_differ_by_what_is_published() {
        let one = || owned("a.example.org", "one");
        let with_ttl = |ttl: u32| Record {
            ttl: Some(ttl),
            ..one()
        };
        assert!(!differs(&one(), &one()));
        assert!(differs(&one(), &owned("a.example.org", "two")));
        for (before, after, expected) in [
            (60, 60, false),
            (60, 61, true),
            (60, 0, false),
            (0, 1, true),
        ] {
            assert_eq!(differs(&with_ttl(before), &with_ttl(after)), expected);
        }
        assert!(!differs(&with_ttl(60), &one()), "none is wanted");
        let mut resource = one();
        let label = Labels::RESOURCE.to_owned();
        resource.labels.0.insert(label, "r".to_owned());
        assert!(!differs(&one(), &resource));
        let other = Record::parse("a.example.org", RecordType::A, ["192.0.2.2"]).unwrap();
        let other = Record {
            labels: one().labels,
            ..other
        };
        assert!(differs(&one(), &other));
    }

    /// Parses `name type target|target`, owned by `me` unless the line ends in ` of OWNER`.
    fn set(line: &str) -> Record {
        let (line, owner) = line.split_once(" of ").unwrap_or((line, "me"));
        let words: Vec<&str> = line.splitn(3, ' ').collect();
        let targets = words.get(2).copied().unwrap_or_default().split('|');
        let record_type: RecordType = words[1].parse().unwrap();
        let targets = targets.filter(|target| !target.is_empty());
        let mut record =
            Record::parse(&format!("{}.example.org", words[0]), record_type, targets).unwrap();
        record.labels = Labels::of(owner, "");
        record
    }

    /// Plans from lines to lines, with all types managed that the lines have, and shows actions and notes.
    fn planned_by(rules: &PlanRules, current: &[&str], desired: &[&str]) -> Vec<String> {
        let sets = |lines: &[&str]| lines.iter().map(|line| set(line)).collect::<Vec<_>>();
        let desired = Desired {
            records: sets(desired),
            ..Desired::default()
        };
        shown(&plan(rules, &sets(current), &desired))
    }

    /// Returns actions and notes as lines without the common domain.
    fn shown(plan: &Plan) -> Vec<String> {
        let actions = plan.actions().map(ToString::to_string);
        let notes = plan.notes.iter().map(|note| format!("# {note}"));
        actions
            .chain(notes)
            .map(|line| line.replace(".example.org", ""))
            .collect()
    }

    fn rules() -> PlanRules {
        let mut rules = PlanRules::of("me");
        rules.managed.extend([
            RecordType::NS,
            RecordType::DS,
            RecordType::DNAME,
            RecordType::MX,
            RecordType::TXT,
        ]);
        rules
    }

    fn planned(current: &[&str], desired: &[&str]) -> Vec<String> {
        planned_by(&rules(), current, desired)
    }

    const HIDDEN: &str = "has a record of type NS; publish it in that zone";

    #[test]
    fn records_below_a_delegation_are_hidden() {
        let delegation = "sub NS ns.sub.example.org|ns.example.net";
        for (wanted, is_hidden) in [
            ("www.sub A 192.0.2.1", true),
            ("a.b.sub A 192.0.2.1", true),
            ("sub A 192.0.2.1", true),
            ("sub MX 10 m.example.net", true),
            ("x.sub NS n.example.net", true),
            ("x.sub TYPE43 \\# 1 00", true),
            // The addresses of its own servers, and what makes the delegation.
            ("ns.sub A 192.0.2.1", false),
            ("ns.sub AAAA 2001:db8::1", false),
            ("ns.sub MX 10 m.example.net", true),
            ("sub TYPE43 \\# 1 00", false),
            ("subs A 192.0.2.1", false),
            ("www A 192.0.2.1", false),
        ] {
            let found = planned(&[delegation], &[delegation, wanted]);
            assert_eq!(found.len(), 1, "{found:?}");
            let expected = if is_hidden { HIDDEN } else { "+ " };
            assert!(found[0].contains(expected), "{wanted}: {found:?}");
            // A delegation that comes with the same plan hides as well.
            let found = planned(&[], &[delegation, wanted]);
            assert_eq!(
                found.iter().any(|line| line.contains(HIDDEN)),
                is_hidden,
                "{wanted}"
            );
        }
        assert_eq!(
            planned(&[delegation], &[delegation, "www.sub A 192.0.2.1"]),
            [format!(
                "# www.sub A: resolvers do not see the name: sub {HIDDEN}"
            )]
        );
    }

    #[test]
    fn dname_hides_names_below() {
        let redirection = "sub DNAME example.net";
        for (wanted, is_hidden) in [
            ("www.sub A 192.0.2.1", true),
            ("sub A 192.0.2.1", false),
            ("www A 192.0.2.1", false),
        ] {
            let found = planned(&[redirection], &[redirection, wanted]);
            assert_eq!(found.len(), 1, "{found:?}");
            assert_eq!(
                found[0].contains("has a record of type DNAME"),
                is_hidden,
                "{found:?}"
            );
        }
    }

    #[test]
    fn existing_hidden_records_stay_current() {
        let delegation = "sub NS ns.example.net";
        let note = format!("# www.sub A: resolvers do not see the name: sub {HIDDEN}");
        assert_eq!(
            planned(
                &[delegation, "www.sub A 192.0.2.1"],
                &[delegation, "www.sub A 192.0.2.2"]
            ),
            ["~ www.sub A: -192.0.2.1, +192.0.2.2", &*note]
        );
    }

    #[test]
    fn unmade_delegation_hides_nothing() {
        let www = "www.sub A 192.0.2.1";
        let created = "+ www.sub 0 A 192.0.2.1";
        let has_created = |found: &[String]| found.iter().any(|line| line == created);
        assert!(
            has_created(&planned(&[], &["sub NS", www])),
            "without targets"
        );
        let unmanaged = PlanRules::of("me");
        assert!(has_created(&planned_by(
            &unmanaged,
            &[],
            &["sub NS ns.example.net", www]
        )));
        let mut elsewhere = rules();
        elsewhere.domains = DomainFilter::new([], ["ns-sub.example.org"]).unwrap();
        let wanted = ["ns-sub NS ns.example.net", "www.ns-sub A 192.0.2.1"];
        assert!(
            !planned_by(&elsewhere, &[], &wanted)
                .iter()
                .any(|line| line.starts_with('+'))
        );
        // One that is deleted by the same plan still hides, until the next one.
        let deleted = planned(&["sub NS ns.example.net"], &[www]);
        assert_eq!(deleted[0], "- sub 0 NS ns.example.net");
        assert!(!has_created(&deleted), "{deleted:?}");
        // A foreign delegation stays, whatever is wanted in its place.
        let foreign = "sub NS ns.sub.example.org of you";
        let wanted = [
            "sub NS other.sub.example.org",
            "ns.sub A 192.0.2.1",
            "other.sub A 192.0.2.1",
        ];
        let found = planned(&[foreign], &wanted);
        assert_eq!(found.len(), 3, "{found:?}");
        assert_eq!(found[0], "+ ns.sub 0 A 192.0.2.1");
        // An own one is replaced, and its new servers count.
        let found = planned(&["sub NS ns.sub.example.org"], &wanted);
        assert!(
            found.contains(&"+ other.sub 0 A 192.0.2.1".to_owned()),
            "{found:?}"
        );
        assert!(
            !found.contains(&"+ ns.sub 0 A 192.0.2.1".to_owned()),
            "{found:?}"
        );
    }

    #[test]
    fn records_beyond_scope_are_noted() {
        let mut narrow = PlanRules::of("me");
        narrow.domains = DomainFilter::new(["in.example.org"], []).unwrap();
        let left = "no longer in scope of domain-filter and exclude-domains; `retire` with its domain deletes it";
        assert_eq!(
            planned_by(
                &narrow,
                &[
                    "x.in A 192.0.2.1",
                    "out A 192.0.2.1",
                    "theirs A 192.0.2.1 of you",
                    "mail MX 10 m.example.net",
                ],
                &["out A 192.0.2.1", "x.in A 192.0.2.1", "x.in MX 10 m.example.net"]
            ),
            [
                format!("# out A: {left}"),
                "# out A: the name is out of scope: domain-filter or exclude-domains excludes it".to_owned(),
                "# x.in MX: records of this type are not managed; add the type to managed_record_types".to_owned(),
            ]
        );
    }

    #[test]
    fn policies_limit_changes() {
        let current = [
            "kept A 192.0.2.1",
            "changed A 192.0.2.1",
            "typed A 192.0.2.1",
            "gone A 192.0.2.1",
        ];
        let desired = [
            "kept A 192.0.2.1",
            "changed A 192.0.2.2",
            "typed CNAME a.example.net",
            "new A 192.0.2.3",
        ];
        let blocked = "# typed CNAME: blocked by the record of type A, which the policy does not allow to delete; use \
                       policy sync";
        for (policy, expected) in [
            (
                Policy::Sync,
                &[
                    "~ changed A: -192.0.2.1, +192.0.2.2",
                    "- gone 0 A 192.0.2.1",
                    "+ new 0 A 192.0.2.3",
                    "- typed 0 A 192.0.2.1",
                    "+ typed 0 CNAME a.example.net",
                ][..],
            ),
            (
                Policy::UpsertOnly,
                &[
                    "~ changed A: -192.0.2.1, +192.0.2.2",
                    "+ new 0 A 192.0.2.3",
                    blocked,
                ],
            ),
            (Policy::CreateOnly, &["+ new 0 A 192.0.2.3", blocked]),
        ] {
            let rules = PlanRules { policy, ..rules() };
            assert_eq!(
                planned_by(&rules, &current, &desired),
                expected,
                "{policy:?}"
            );
        }
    }

    #[test]
    fn foreign_records_stay() {
        let foreign = |owner: &str| {
            format!(
                "the name has a record of {owner}; take it over with `adopt` or `transfer-owner`"
            )
        };
        for (current, desired, expected) in [
            (
                "a A 192.0.2.1 of you",
                "a A 192.0.2.1",
                foreign("owner \"you\""),
            ),
            ("a A 192.0.2.1 of ", "a A 192.0.2.2", foreign("no owner")),
            // Beside them, nothing is created either.
            (
                "a A 192.0.2.1 of you",
                "a AAAA 2001:db8::1",
                foreign("owner \"you\""),
            ),
        ] {
            let record_type = desired.split(' ').nth(1).unwrap();
            assert_eq!(
                planned(&[current], &[desired]),
                [format!("# a {record_type}: {expected}")]
            );
        }
        // A former owner's records are taken over if they are wanted, and only then.
        let migrating = PlanRules {
            migrate_from: Some("you".to_owned()),
            ..rules()
        };
        assert_eq!(
            planned_by(
                &migrating,
                &["a A 192.0.2.1 of you", "b A 192.0.2.1 of you"],
                &["a A 192.0.2.1"]
            ),
            ["~ a A: owner \"you\" -> \"me\""]
        );
        assert_eq!(
            planned_by(
                &migrating,
                &["a A 192.0.2.1 of you"],
                &["a CNAME b.example.net"]
            ),
            ["- a 0 A 192.0.2.1", "+ a 0 CNAME b.example.net"]
        );
        let of_nobody = PlanRules {
            migrate_from: Some(String::new()),
            ..rules()
        };
        assert_eq!(
            planned_by(&of_nobody, &["a A 192.0.2.1 of "], &["a A 192.0.2.2"]).len(),
            1
        );
        // Without ownership, records are created beside others, and none is deleted.
        let noop = PlanRules::of("");
        assert_eq!(
            planned_by(
                &noop,
                &["a A 192.0.2.1 of ", "b A 192.0.2.1 of "],
                &["a AAAA 2001:db8::1"]
            ),
            ["+ a 0 AAAA 2001:db8::1"]
        );
    }

    #[test]
    fn aliases_stand_alone() {
        let dropped =
            "the CNAME is dropped because other records of the name are wanted; remove one of them";
        assert_eq!(
            planned(&[], &["a CNAME b.example.net", "a A 192.0.2.1"]),
            [
                "+ a 0 A 192.0.2.1".to_owned(),
                format!("# a CNAME: {dropped}")
            ]
        );
        // Types that the publisher does not manage are in the way all the same.
        let plain = PlanRules::of("me");
        let occupied = |record_type: &str| {
            format!(
                "the name has a record of type {record_type}, and a CNAME excludes all others; remove one of them"
            )
        };
        for (managed, current, desired, reason) in [
            (
                &plain,
                "a MX 10 m.example.net",
                "a CNAME b.example.net",
                Some(occupied("MX")),
            ),
            (&plain, "a MX 10 m.example.net", "a A 192.0.2.1", None),
        ] {
            let found = planned_by(managed, &[current], &[desired]);
            match reason {
                Some(reason) => assert_eq!(found, [format!("# a CNAME: {reason}")]),
                None => assert_eq!(found, ["+ a 0 A 192.0.2.1"]),
            }
        }
        let mut without_aliases = PlanRules::of("me");
        without_aliases.managed.remove(&RecordType::CNAME);
        assert_eq!(
            planned_by(
                &without_aliases,
                &["a CNAME b.example.net of you"],
                &["a A 192.0.2.1"]
            ),
            [format!("# a A: {}", occupied("CNAME"))]
        );
        assert_eq!(
            planned(&[], &["a CNAME a.example.org"]),
            ["# a CNAME: the CNAME points to its own name; correct its target"]
        );
        assert_eq!(
            planned(&["a A 192.0.2.1"], &["a A"]),
            ["# a A: no target is known; existing records stay unchanged"]
        );
    }

    #[test]
    fn sets_with_identifiers_are_planned_apart() {
        let with = |line: &str, identifier: &str| {
            let mut record = set(line);
            record.set_identifier = identifier.to_owned();
            record
        };
        let desired = Desired {
            records: vec![
                with("a A 192.0.2.1", "eu"),
                with("a CNAME b.example.net", "us"),
            ],
            ..Desired::default()
        };
        let current = [with("a A 192.0.2.9", "eu"), with("a A 192.0.2.8", "asia")];
        let found = plan(&rules(), &current, &desired);
        assert_eq!(
            shown(&found),
            [
                "- a 0 A 192.0.2.8 set=asia",
                "~ a A: -192.0.2.9, +192.0.2.1",
                "# a CNAME: the CNAME is dropped because other records of the name are wanted; remove one of them"
            ]
        );
        assert_eq!(found.changes.len(), 1, "one change of the name");
    }

    #[test]
    fn unreadable_documents_hold_their_records() {
        let of = |line: &str, owner: &str, resource: &str| {
            let mut record = set(line);
            record.labels = Labels::of(owner, resource);
            record
        };
        let current = [
            of("held A 192.0.2.1", "me", "crd/shop/bad"),
            of("known A 192.0.2.1", "me", "crd/shop/good"),
            of("unknown A 192.0.2.1", "me", "crd/shop/lost"),
            of("theirs A 192.0.2.1", "you", "crd/shop/bad"),
        ];
        let held = |name: &str| {
            format!(
                "# {name} A: its document cannot be read; the record stays unchanged until it can"
            )
        };
        let deleted = |name: &str| format!("- {name} 0 A 192.0.2.1");
        let bad = BTreeSet::from(["crd/shop/bad".to_owned()]);
        let good = BTreeSet::from(["crd/shop/good".to_owned()]);
        for (held_resources, known, expected) in [
            (
                bad.clone(),
                None,
                vec![deleted("known"), deleted("unknown"), held("held")],
            ),
            (
                bad,
                Some(good.clone()),
                vec![deleted("known"), held("held"), held("unknown")],
            ),
            (
                BTreeSet::new(),
                Some(good),
                vec![deleted("known"), held("held"), held("unknown")],
            ),
        ] {
            let desired = Desired {
                records: Vec::new(),
                held: held_resources,
                known,
            };
            assert_eq!(shown(&plan(&rules(), &current, &desired)), expected);
        }
    }

    #[test]
    fn single_document_decides() {
        let of = |line: &str, resource: &str| {
            let mut record = set(line);
            record.labels = Labels::of("", resource);
            record
        };
        let long = of("a TXT a|b", "r1");
        let short = of("a TXT z", "r2");
        let least = of("a TXT c", "r3");
        let empty = of("a TXT", "r4");
        let merged =
            |candidates: &[&Record], current: Option<&Record>| merge(candidates, current).unwrap();
        // Without an existing set: the fewest targets, then the least; an empty set gives no answer.
        assert_eq!(merged(&[&empty, &long, &short, &least], None), least);
        assert_eq!(merged(&[&least, &short, &long, &empty], None), least);
        assert_eq!(merged(&[&empty, &long], None), long);
        let same = of("a TXT c", "r0");
        assert_eq!(
            merged(&[&least, &same], None),
            same,
            "the least resource at last"
        );
        // With one, the document that wanted it.
        assert_eq!(merged(&[&least, &long], Some(&of("a TXT x", "r1"))), long);
        assert_eq!(merged(&[&least, &long], Some(&of("a TXT x", "r9"))), least);
        let nameless = of("a TXT a|b", "");
        assert_eq!(
            merged(&[&nameless, &least], Some(&of("a TXT x", ""))),
            least
        );
        assert_eq!(merge(&[], None), None);
    }

    #[test]
    fn addresses_have_pointers() {
        let mut record = set("host A 192.0.2.1|10.20.30.40");
        record.ttl = Some(60);
        let found = pointers(&record);
        let lines: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(
            lines,
            [
                "40.30.20.10.in-addr.arpa 60 PTR host.example.org",
                "1.2.0.192.in-addr.arpa 60 PTR host.example.org"
            ]
        );
        assert!(found.iter().all(|pointer| pointer.labels == record.labels));
        assert_eq!(
            pointers(&set("host AAAA 2001:db8::1:2ef"))[0].name.as_str(),
            "f.e.2.0.1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.8.b.d.0.1.0.0.2.ip6.arpa"
        );
        assert_eq!(pointers(&set("*.host A 192.0.2.1")), []);
        assert_eq!(pointers(&set("host CNAME b.example.net")), []);
    }

    #[test]
    fn plans_describe_changes() {
        let sets: Vec<Record> = ["a A 192.0.2.1", "b A 192.0.2.1", "b MX 10 m.example.net"]
            .map(set)
            .into();
        let retired = retire(&sets, "me");
        assert_eq!(
            (
                retired.is_empty(),
                retired.deletions(),
                retired.actions().count()
            ),
            (false, 2, 3)
        );
        assert_eq!(retired.changes[1].deleted().count(), 2);
        assert!(retired.changes[1].is_deletion() && !retired.changes[1].is_creation());
        assert_eq!(retired.without_deletions(), Plan::default());
        assert!(Plan::default().is_empty());
        let replaced = NameChange {
            name: sets[0].name.clone(),
            actions: vec![
                Action::Delete(sets[0].clone()),
                Action::Create(set("a CNAME b.example.net")),
            ],
        };
        assert!(!replaced.is_deletion() && replaced.is_creation());
        let released = transfer(&sets, "");
        assert_eq!(
            (released.deletions(), released.without_deletions()),
            (0, released.clone())
        );
        assert_eq!(released.changes[0].deleted().count(), 0);
    }

    #[test]
    fn reasons_name_owner_and_remedy() {
        let foreign = |owner: &str| {
            Reason::Foreign {
                owner: owner.to_owned(),
            }
            .to_string()
        };
        let orphan = |owner: &str| {
            Reason::Orphan {
                owner: owner.to_owned(),
            }
            .to_string()
        };
        let kept = |found| Reason::TtlKept { found, wanted: 300 }.to_string();
        for (found, expected) in [
            (
                foreign("you"),
                "the name has a record of owner \"you\"; take it over with `adopt` or `transfer-owner`",
            ),
            (
                foreign(""),
                "the name has a record of no owner; take it over with `adopt` or `transfer-owner`",
            ),
            (
                orphan("you"),
                "the owner record of owner \"you\" has no record; if its publisher is gone, `retire --orphans=you` \
                 deletes it",
            ),
            (
                kept(Some(60)),
                "the service keeps the TTL 60 in place of 300; leave the TTL out, or want the one that it keeps",
            ),
            (
                kept(None),
                "the service keeps the TTL 0 in place of 300; leave the TTL out, or want the one that it keeps",
            ),
        ] {
            assert_eq!(found, expected);
        }
    }
}
