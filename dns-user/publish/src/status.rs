//! State for operators: behind the API, the status of documents and providers, also in files beside the documents,
//! and metrics, named as in external-dns.
//!
//! Metrics of the controller and the registry have a `provider` label, because one process serves
//! several providers.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use prometheus::{
    GaugeVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
    core::Collector as _,
    proto::{LabelPair, MetricFamily},
};
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, mpsc, oneshot};

use crate::{
    documents::{
        Content, Document, DocumentId, DocumentStatus, FileState, ProviderResult, Scan, StatusFile,
        digest,
    },
    engine::Report,
    publication::{Publication, Target},
    record::{Name, Record, RecordType},
    store::Store,
};

/// Resources, documents of the folder, and state of the publisher.
#[derive(Debug)]
pub(crate) struct ApiState {
    pub store: Store,
    pub scan: Mutex<Arc<Scan>>,
    pub overview: Mutex<Overview>,
    /// Expected rounds, by provider.
    rounds: Mutex<BTreeMap<String, Round>>,
    /// Signals that a resource changed.
    pub change: Notify,
    pub metrics: Metrics,
    confirmations: Mutex<BTreeMap<String, mpsc::Sender<Confirmation>>>,
}

/// Permission for one round of a provider to delete names.
#[derive(Debug)]
pub(crate) struct Confirmation {
    pub deletions: usize,
    /// Receives the result of the round.
    pub reply: oneshot::Sender<Confirmed>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Confirmed {
    pub changed: usize,
    pub problems: Vec<String>,
}

/// State of the publisher, as `status` shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Overview {
    /// Every provider, by `PROJECT/RECORD`.
    pub providers: BTreeMap<String, ProviderOverview>,
    pub documents: Vec<DocumentStatus>,
    /// Problems of files that belong to no document.
    pub problems: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct ProviderOverview {
    /// `spec.provider` of the record.
    pub provider: String,
    /// Whether the last round published all wanted records.
    pub synced: bool,
    pub wanted: usize,
    /// Number of names in its zones that this publisher owns.
    pub owned: usize,
    pub problems: Vec<String>,
    pub remarks: Vec<String>,
}

#[derive(Debug)]
struct Round {
    /// Maximum time between successful rounds.
    time_limit: Duration,
    /// Start of the wait: the first expectation, or the last successful round.
    since: Instant,
    problem: Option<String>,
}

impl ApiState {
    pub(crate) fn new(store: Store, metrics: Metrics) -> Self {
        Self {
            store,
            scan: Mutex::default(),
            overview: Mutex::default(),
            rounds: Mutex::default(),
            change: Notify::new(),
            metrics,
            confirmations: Mutex::default(),
        }
    }

    /// Returns the confirmations for a provider, until the next call.
    pub(crate) fn receive_confirmations(&self, provider: &str) -> mpsc::Receiver<Confirmation> {
        let (sender, receiver) = mpsc::channel(MAX_CONFIRMATIONS);
        self.confirmations
            .lock()
            .insert(provider.to_owned(), sender);
        receiver
    }

    /// Starts a round in which a provider may delete this number of names, and waits for its end;
    /// `None` if the provider does not run.
    pub(crate) async fn confirm(&self, provider: &str, deletions: usize) -> Option<Confirmed> {
        let (reply, result) = oneshot::channel();
        // Cloned, because the lock must not be held while the request waits for its turn.
        let sender = self.confirmations.lock().get(provider).cloned()?;
        // Further requests wait in their connections, whose number the HTTP server limits.
        sender.send(Confirmation { deletions, reply }).await.ok()?;
        result.await.ok()
    }

    pub(crate) fn providers(&self) -> Vec<String> {
        self.confirmations.lock().keys().cloned().collect()
    }

    /// Forgets a provider that no longer runs.
    pub(crate) fn forget(&self, provider: &str) {
        self.confirmations.lock().remove(provider);
        self.metrics.forget(provider);
        // A record of the same name may have returned meanwhile.
        self.change.notify_one();
    }

    /// Returns the valid documents of the operator's files, without the store's.
    pub(crate) fn documents(&self) -> Vec<Document> {
        let scan = self.scan.lock();
        let mut own = BTreeSet::new();
        for file in self.own_files(&scan) {
            for document in &file.documents {
                own.insert(&document.id);
            }
        }
        let mut documents = Vec::new();
        for document in &scan.documents {
            if own.contains(&document.id) {
                documents.push(document.clone());
            }
        }
        documents
    }

    /// Returns the operator's file and line of a document.
    pub(crate) fn file_of(&self, id: &DocumentId) -> Option<String> {
        let scan = self.scan.lock();
        for file in self.own_files(&scan) {
            for document in &file.documents {
                if document.id == *id {
                    return Some(format!("{}:{}", file.path.display(), document.line));
                }
            }
        }
        None
    }

    fn own_files<'a>(&self, scan: &'a Scan) -> impl Iterator<Item = &'a FileState> {
        let files = scan.files.iter();
        files.filter(|file| !file.path.starts_with(&self.store.folder))
    }

    pub(crate) fn status_of(&self, id: &DocumentId) -> Option<DocumentStatus> {
        self.overview
            .lock()
            .documents
            .iter()
            .find(|status| status.id == *id)
            .cloned()
    }

    /// Expects rounds of exactly these providers, each within its time limit.
    pub(crate) fn expect(&self, providers: impl IntoIterator<Item = (String, Duration)>) {
        let mut rounds = self.rounds.lock();
        // Entries that are no longer expected are dropped: a removed provider must not stay late for ever.
        let mut before = std::mem::take(&mut *rounds);
        for (provider, time_limit) in providers {
            let known = before.remove(&provider);
            let mut round = known.unwrap_or_else(|| Round {
                time_limit,
                since: Instant::now(),
                problem: None,
            });
            round.time_limit = time_limit;
            rounds.insert(provider, round);
        }
    }

    /// Records the end of a provider's round; without a `problem` it was successful.
    pub(crate) fn end_round(&self, provider: &str, problem: Option<String>) {
        if let Some(round) = self.rounds.lock().get_mut(provider) {
            // A failed round does not restart the wait: `/healthz` reports providers that fail
            // again and again.
            if problem.is_none() {
                round.since = Instant::now();
            }
            round.problem = problem;
        }
    }

    /// Returns causes and remedies for every provider without a successful round in time.
    pub(crate) fn late_rounds(&self) -> Vec<String> {
        let mut late = Vec::new();
        for (provider, round) in &*self.rounds.lock() {
            let waited = round.since.elapsed();
            if waited > round.time_limit {
                let problem = round.problem.as_deref();
                let problem = problem.unwrap_or("the round has not ended");
                late.push(format!(
                    "{provider}: no successful round for {} s: {problem}",
                    waited.as_secs()
                ));
            }
        }
        late
    }
}

/// Result of a provider's last round.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ProviderState {
    /// What the round wanted; `None` before the end of the first one.
    pub round: Option<Arc<Target>>,
    /// Number of record sets and of owned names in each zone, from its last listing.
    pub zones: BTreeMap<String, Counts>,
    /// Problems of the provider or a zone, which affect all documents.
    pub general: Vec<String>,
    /// Problems of single names.
    pub names: Vec<(Name, String)>,
    /// Foreign data of the zones that could not be read.
    pub warnings: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Number of record sets, without owner records.
    pub records: usize,
    pub owned: usize,
}

/// Maximum number of confirmations that wait for a provider's round.
const MAX_CONFIRMATIONS: usize = 1;

/// Maximum number of problems of one document or provider in a status.
const MAX_PROBLEMS: usize = 20;

impl ProviderState {
    /// Summarises a report for the status. A zone that could not be listed keeps its counts of `before`.
    pub(crate) fn of_report(report: &Report, before: &Self) -> Self {
        let mut state = Self::default();
        let mut notes = report.notes.clone();
        for zone in &report.zones {
            let counts = match zone.failure {
                None => Counts {
                    records: zone.records,
                    owned: zone.owned,
                },
                // A dashboard would show an outage of the service as a loss of all records.
                Some(_) => before.zones.get(&zone.id).copied().unwrap_or_default(),
            };
            state.zones.insert(zone.id.clone(), counts);
            let mut problems = Vec::new();
            if let Some(name) = zone.contested.first() {
                let others = match zone.contested.len() {
                    1 => String::new(),
                    count => format!(" and {} more", count - 1),
                };
                problems.push(format!(
                    "another writer with the same owner deletes and creates {name}{others} again and again; give \
                     each publisher its own txt-owner-id"
                ));
            }
            if let Some(failure) = &zone.failure {
                problems.push(failure.to_string());
            }
            if let Some(refusal) = &zone.refusal {
                problems.push(refusal.to_string());
            }
            if zone.conflicts > 0 {
                problems.push(format!(
                    "{} changes conflicted with another writer in every round; the next run tries again",
                    zone.conflicts
                ));
            }
            for problem in problems {
                state.general.push(format!("zone {}: {problem}", zone.id));
            }
            state.names.extend(zone.failures.iter().cloned());
            state.warnings.extend(zone.warnings.iter().cloned());
            notes.extend(zone.notes.iter().cloned());
        }
        // Behind the failures, so that a shortened list begins with what went wrong.
        if report.withheld > 0 {
            state.general.push(format!(
                "dry-run is true, so {} changes are logged and not made; remove it to publish",
                report.withheld
            ));
        }
        for note in notes {
            state.names.push((note.name.clone(), note.to_string()));
        }
        state
    }

    /// Returns the result of a provider that could not run, with the counts of `before`.
    pub(crate) fn failed(problem: impl ToString, before: &Self) -> Self {
        Self {
            zones: before.zones.clone(),
            general: vec![problem.to_string()],
            ..Self::default()
        }
    }

    pub(crate) fn owned(&self) -> usize {
        self.zones.values().map(|counts| counts.owned).sum()
    }

    /// Returns the problems that prevent the publication of wanted records.
    pub(crate) fn problems(&self, target: &Target) -> Vec<String> {
        shortened(self.general.iter().chain(self.of_names(target, true)))
    }

    /// Returns remarks on what no document wants, such as owner records without a record.
    pub(crate) fn remarks(&self, target: &Target) -> Vec<String> {
        shortened(self.of_names(target, false).chain(&self.warnings))
    }

    /// Returns the problems of names that documents want, or of the others.
    fn of_names(&self, target: &Target, is_wanted: bool) -> impl Iterator<Item = &String> {
        self.names.iter().filter_map(move |(name, problem)| {
            (target.origins.contains_key(name) == is_wanted).then_some(problem)
        })
    }

    pub(crate) fn all_problems(&self) -> impl Iterator<Item = &String> {
        let of_names = self.names.iter().map(|(_, problem)| problem);
        self.general.iter().chain(of_names).chain(&self.warnings)
    }

    /// Returns the resources that want other records than in the round.
    fn pending<'a>(&self, target: &'a Target) -> BTreeSet<&'a str> {
        let mut wanted = target.desired.by_resource();
        if let Some(round) = &self.round
            && round.record == target.record
        {
            let known = round.desired.by_resource();
            wanted.retain(|resource, records| known.get(resource) != Some(&*records));
        }
        wanted.into_keys().collect()
    }
}

/// A target beside the result of its provider's last round.
struct Outcome<'a> {
    target: &'a Target,
    state: &'a ProviderState,
    /// Resources whose records wait for the next round.
    pending: BTreeSet<&'a str>,
}

impl Outcome<'_> {
    fn overview(&self) -> ProviderOverview {
        let Self {
            target,
            state,
            pending,
        } = self;
        let problems = state.problems(target);
        ProviderOverview {
            provider: target.record.provider.name().to_owned(),
            synced: state.round.is_some() && pending.is_empty() && problems.is_empty(),
            wanted: target.counts.values().sum(),
            owned: state.owned(),
            problems,
            remarks: [target.record.remarks(), state.remarks(target)].concat(),
        }
    }

    fn result(&self, document: &DocumentId) -> ProviderResult {
        let Self {
            target,
            state,
            pending,
        } = self;
        let mut problems: Vec<&String> = state.general.iter().collect();
        for (name, problem) in &state.names {
            let origins = target.origins.get(name);
            if origins.is_some_and(|origins| origins.contains(document)) {
                problems.push(problem);
            }
        }
        let problems = shortened(problems.into_iter());
        let is_pending = pending.contains(document.resource().as_str());
        let records = target.counts.get(document).copied().unwrap_or_default();
        ProviderResult {
            synced: state.round.is_some() && !is_pending && problems.is_empty(),
            records,
            problems,
        }
    }
}

/// Returns the first texts, and the number of the others.
pub(crate) fn shortened<'a>(texts: impl Iterator<Item = &'a String>) -> Vec<String> {
    let mut texts: Vec<String> = texts.cloned().collect();
    if texts.len() > MAX_PROBLEMS {
        let others = texts.len() - MAX_PROBLEMS;
        texts.truncate(MAX_PROBLEMS);
        texts.push(format!("and {others} more"));
    }
    texts
}

/// Returns the status of all documents and resources. `before` is the previous status, from which
/// generations are counted.
pub(crate) fn statuses(
    scan: &Scan,
    publication: &Publication,
    states: &BTreeMap<String, ProviderState>,
    before: &BTreeMap<DocumentId, DocumentStatus>,
) -> Overview {
    let unknown = ProviderState::default();
    let mut outcomes = BTreeMap::new();
    for (name, target) in &publication.targets {
        let state = states.get(name).unwrap_or(&unknown);
        let pending = state.pending(target);
        let outcome = Outcome {
            target,
            state,
            pending,
        };
        outcomes.insert(name, outcome);
    }
    let (mut problems, of_files) = scan.problems_by_document();
    for (id, found) in &publication.problems {
        let problems = problems.entry(id.clone()).or_default();
        problems.extend(found.iter().cloned());
    }
    let mut documents = Vec::new();
    let mut seen = BTreeSet::new();
    for file in &scan.files {
        for document in &file.documents {
            // A second definition is reported with its file, and has no status of its own.
            if !seen.insert(&document.id) {
                continue;
            }
            let before = before.get(&document.id);
            let problems = problems.remove(&document.id).unwrap_or_default();
            documents.push(status_of(document, problems, &outcomes, before));
        }
    }
    let mut providers = BTreeMap::new();
    for (name, outcome) in outcomes {
        providers.insert(name.clone(), outcome.overview());
    }
    Overview {
        providers,
        documents,
        problems: of_files,
    }
}

fn status_of(
    document: &Document,
    mut problems: Vec<String>,
    outcomes: &BTreeMap<&String, Outcome<'_>>,
    before: Option<&DocumentStatus>,
) -> DocumentStatus {
    let Document {
        id,
        labels,
        generation,
        content,
        ..
    } = document;
    // Of the parsed content: a comment or another layout is no new generation.
    let digest = digest(&format!("{labels:?}{content:?}"));
    let counted = match before {
        Some(known) if known.digest == digest => known.observed_generation,
        Some(known) => known.observed_generation + 1,
        None => 1,
    };
    let mut providers = BTreeMap::new();
    for (name, outcome) in outcomes {
        if outcome.target.counts.contains_key(id) {
            providers.insert((*name).clone(), outcome.result(id));
        }
        // The problems of a provider also belong to the record that configures it.
        if outcome.target.id == *id {
            problems.extend(outcome.state.general.iter().cloned());
        }
    }
    let remarks = match content {
        Some(Content::UpdateRecord(record)) => record.remarks(),
        _ => Vec::new(),
    };
    let of_providers = providers
        .values()
        .find_map(|result| result.problems.first());
    let last_error = match &problems[..] {
        [] => of_providers.cloned(),
        [only] => Some(only.clone()),
        [first, others @ ..] => Some(format!("{first} (and {} more)", others.len())),
    };
    DocumentStatus {
        id: id.clone(),
        // Kubernetes counts generations itself, and tools compare both numbers.
        observed_generation: generation.unwrap_or(counted),
        digest,
        providers,
        last_error,
        remarks,
    }
}

/// Writes status files, and keeps the last status of every document.
#[derive(Default)]
pub(crate) struct StatusWriter {
    known: BTreeMap<DocumentId, DocumentStatus>,
    unwritable: BTreeMap<PathBuf, String>,
    is_restored: bool,
}

impl StatusWriter {
    /// Shows the results of the last rounds, by provider.
    pub(crate) fn write(
        &mut self,
        api_state: &ApiState,
        publication: &Publication,
        states: &BTreeMap<String, ProviderState>,
        fleet_problem: Option<&str>,
    ) {
        let scan = api_state.scan.lock().clone();
        // At the first time only: afterwards the files hold what this process wrote.
        if !self.is_restored {
            for folder in folders(&scan) {
                StatusFile::sweep_unfinished(folder);
            }
            for file in &scan.files {
                for status in StatusFile::read(&file.path).unwrap_or_default().documents {
                    self.known.insert(status.id.clone(), status);
                }
            }
            self.is_restored = true;
        }
        let mut overview = statuses(&scan, publication, states, &self.known);
        self.known.clear();
        for status in &overview.documents {
            self.known.insert(status.id.clone(), status.clone());
        }
        if let Some(problem) = fleet_problem {
            overview.problems.push(problem.to_owned());
        }
        *api_state.overview.lock() = overview;
        self.write_files(&scan, &api_state.store.folder);
    }

    /// Writes the status beside the operator's documents; the API shows the status of its resources.
    fn write_files(&mut self, scan: &Scan, store: &Path) {
        let (_, of_files) = scan.problems_by_document();
        for file in &scan.files {
            // Files of the store belong to the API; beside a missing file nothing is written.
            if file.path.starts_with(store) || !file.path.is_file() {
                continue;
            }
            let mut documents = Vec::new();
            for document in &file.documents {
                documents.extend(self.known.get(&document.id).cloned());
            }
            // A file that is damaged now must still name its documents after a restart, or their
            // records would be deleted.
            documents.extend(missing(file, scan, &self.known));
            let prefix = format!("{}:", file.path.display());
            let mut problems = of_files.clone();
            problems.retain(|problem| problem.starts_with(&prefix));
            let status = StatusFile {
                documents,
                problems,
            };
            match status.write(&file.path) {
                Ok(()) => drop(self.unwritable.remove(&file.path)),
                Err(error) => {
                    let error = error.to_string();
                    // A folder that only root may write to is usual: one line says it.
                    if self.unwritable.get(&file.path) != Some(&error) {
                        tracing::warn!(
                            file = %file.path.display(), error,
                            "cannot write the status beside the documents; see `bosh-dns-publish status`"
                        );
                        self.unwritable.insert(file.path.clone(), error);
                    }
                }
            }
        }
        for folder in folders(scan) {
            StatusFile::sweep(folder);
        }
    }
}

/// Returns the folders in which documents lie.
fn folders(scan: &Scan) -> BTreeSet<&Path> {
    let mut folders = BTreeSet::new();
    for file in &scan.files {
        folders.extend(file.path.parent());
    }
    folders
}

/// Returns the unreadable documents of a file, which a restart must still know.
fn missing(
    file: &FileState,
    scan: &Scan,
    known: &BTreeMap<DocumentId, DocumentStatus>,
) -> Vec<DocumentStatus> {
    // In a file without problems, a document that is missing was removed.
    if file.problems.is_empty() {
        return Vec::new();
    }
    let Some(before) = StatusFile::read(&file.path) else {
        return Vec::new();
    };
    let mut missing = Vec::new();
    for status in before.documents {
        let is_missing = file.documents.iter().all(|one| one.id != status.id);
        if is_missing && scan.held.contains(&status.id.resource()) {
            missing.push(known.get(&status.id).cloned().unwrap_or(status));
        }
    }
    missing
}

/// Declares the metrics: one row each.
macro_rules! metrics {
    ($($field:ident: $kind:ident $name:literal $([$($label:literal),+])? $help:literal;)*) => {
        #[derive(Clone, Debug)]
        pub(crate) struct Metrics {
            registry: Registry,
            $(
                #[doc = concat!($help, ".")]
                pub $field: $kind,
            )*
        }

        impl Metrics {
            pub(crate) fn new() -> prometheus::Result<Self> {
                let registry = Registry::new();
                dns_kit::metrics::register_process(&registry)?;
                $(
                    let $field = metrics!(@new $kind $name $([$($label),+])? $help)?;
                    registry.register(Box::new($field.clone()))?;
                )*
                Ok(Self { registry, $($field),* })
            }
        }
    };
    (@new $kind:ident $name:literal $help:literal) => { $kind::new($name, $help) };
    (@new $kind:ident $name:literal [$($label:literal),+] $help:literal) => {
        $kind::new(Opts::new($name, $help), &[$($label),+])
    };
}

metrics! {
    last_sync: GaugeVec "external_dns_controller_last_sync_timestamp_seconds" ["provider"]
        "End of the last round that published everything";
    last_reconcile: GaugeVec "external_dns_controller_last_reconcile_timestamp_seconds" ["provider"]
        "End of the last round";
    soft_errors: IntGaugeVec "external_dns_controller_consecutive_soft_errors" ["provider"]
        "Consecutive rounds that did not publish everything";
    no_op_runs: IntCounterVec "external_dns_controller_no_op_runs_total" ["provider"]
        "Rounds that changed nothing";
    verified_records: IntGaugeVec "external_dns_controller_verified_records" ["provider", "record_type"]
        "Wanted record sets of providers whose last round published everything";
    registry_endpoints: IntGaugeVec "external_dns_registry_endpoints_total" ["provider"]
        "Record sets in the zones";
    registry_errors: IntCounterVec "external_dns_registry_errors_total" ["provider"] "Failed rounds";
    registry_records: IntGaugeVec "external_dns_registry_records" ["provider"]
        "Names in the zones owned by this publisher";
    skipped: IntGaugeVec "external_dns_registry_skipped_records_owner_mismatch_per_sync" ["provider"]
        "Wanted records that belong to another owner";
    awaiting_confirmation: IntGaugeVec "bosh_dns_publish_deletions_awaiting_confirmation" ["provider"]
        "Deletions awaiting --confirm-deletions";
    source_endpoints: IntGauge "external_dns_source_endpoints_total" "Wanted record sets";
    source_errors: IntCounter "external_dns_source_errors_total" "Document reads that found problems";
    source_records: IntGaugeVec "external_dns_source_records" ["record_type"] "Wanted record sets by type";
    invalid_endpoints: IntGauge "external_dns_source_invalid_endpoints" "Problems in documents";
    deduplicated_endpoints: IntGauge "external_dns_source_deduplicated_endpoints"
        "Record sets wanted by several documents";
}

impl Metrics {
    pub(crate) fn text(&self) -> String {
        let families = self.registry.gather();
        TextEncoder::new()
            .encode_to_string(&families)
            .unwrap_or_else(|error| format!("# {error}\n"))
    }

    /// Sets the metrics of the sources.
    pub(crate) fn set_sources(&self, scan: &Scan, publication: &Publication) {
        let targets = publication.targets.values();
        let counts = Self::count_types(targets.clone().flat_map(|target| &target.desired.records));
        self.source_endpoints.set(gauge(counts.values().sum()));
        Self::set_types(&self.source_records, None, &counts);
        let problems = scan.problems().count();
        self.invalid_endpoints.set(gauge(problems));
        // Counted at each read, so that `rate()` shows an error that lasts.
        if problems > 0 {
            self.source_errors.inc();
        }
        let mut duplicates = 0;
        for target in targets {
            let records = &target.desired.records;
            let keys: BTreeSet<_> = records.iter().map(Record::key).collect();
            duplicates += records.len() - keys.len();
        }
        self.deduplicated_endpoints.set(gauge(duplicates));
    }

    /// Returns the number of record sets by type; the default types are counted even at zero.
    pub(crate) fn count_types<'a>(
        records: impl IntoIterator<Item = &'a Record>,
    ) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        // Without a zero, a graph would begin at the first record.
        for record_type in RecordType::DEFAULT_MANAGED {
            counts.insert(record_type.to_string(), 0);
        }
        for record in records {
            if !record.targets.is_empty() {
                *counts.entry(record.record_type.to_string()).or_default() += 1;
            }
        }
        counts
    }

    /// Sets the gauges by record type; types that no longer occur are set to zero.
    pub(crate) fn set_types(
        family: &IntGaugeVec,
        provider: Option<&str>,
        counts: &BTreeMap<String, usize>,
    ) {
        let mut counts = counts.clone();
        // A gauge keeps its last value, so a type that no record has any more must be set.
        for record_type in Self::types_of(family, provider) {
            counts.entry(record_type).or_default();
        }
        for (record_type, count) in &counts {
            let labels: Vec<&str> = provider.into_iter().chain([record_type.as_str()]).collect();
            family.with_label_values(&labels).set(gauge(*count));
        }
    }

    /// Returns the record types for which a family has a gauge, of one provider if it has that label.
    fn types_of(family: &IntGaugeVec, provider: Option<&str>) -> Vec<String> {
        let mut types = Vec::new();
        for metric in family.collect().iter().flat_map(MetricFamily::get_metric) {
            // Labels are sorted by name: the provider precedes the type.
            if let [others @ .., record_type] = metric.get_label()
                && others.first().map(LabelPair::value) == provider
            {
                types.push(record_type.value().to_owned());
            }
        }
        types
    }

    /// Removes the metrics of a provider that is no longer configured.
    pub(crate) fn forget(&self, provider: &str) {
        // Removal fails in metrics that lack the provider, which is fine.
        for family in [
            &self.soft_errors,
            &self.registry_endpoints,
            &self.registry_records,
            &self.skipped,
            &self.awaiting_confirmation,
        ] {
            let _ = family.remove_label_values(&[provider]);
        }
        for family in [&self.last_sync, &self.last_reconcile] {
            let _ = family.remove_label_values(&[provider]);
        }
        for family in [&self.no_op_runs, &self.registry_errors] {
            let _ = family.remove_label_values(&[provider]);
        }
        for record_type in Self::types_of(&self.verified_records, Some(provider)) {
            let labels = [provider, &record_type];
            let _ = self.verified_records.remove_label_values(&labels);
        }
    }
}

pub(crate) fn gauge(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Returns the metric families with a sample, except the process's.
#[cfg(test)]
pub(crate) fn families() -> Vec<MetricFamily> {
    let all = tests::complete().registry.gather();
    all.into_iter()
        .filter(|family| !family.name().starts_with("process_"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns metrics with a sample of each family.
    pub(super) fn complete() -> Metrics {
        let metrics = Metrics::new().unwrap();
        for family in [&metrics.last_sync, &metrics.last_reconcile] {
            family.with_label_values(&["p"]);
        }
        for family in [
            &metrics.soft_errors,
            &metrics.registry_endpoints,
            &metrics.registry_records,
            &metrics.skipped,
            &metrics.awaiting_confirmation,
        ] {
            family.with_label_values(&["p"]);
        }
        metrics.no_op_runs.with_label_values(&["p"]);
        metrics.registry_errors.with_label_values(&["p"]);
        metrics.verified_records.with_label_values(&["p", "A"]);
        metrics.source_records.with_label_values(&["A"]);
        metrics
    }

    #[test]
    fn dashboard_uses_existing_metrics() {
        let metrics = complete();
        let text = metrics.text();
        let dashboard = concat!(
            include_str!("../../../deploy/grafana/bosh-dns-publish.json"),
            include_str!("../../../deploy/prometheus/publish-rules.yml")
        );
        let is_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
        let used: BTreeSet<&str> = dashboard
            .split(|letter: char| !is_name(letter))
            .filter(|word| {
                word.starts_with("external_dns_") || word.starts_with("bosh_dns_publish_")
            })
            .collect();
        assert!(used.len() > 10, "{used:?}");
        for name in used {
            assert!(text.contains(&format!("# TYPE {name} ")), "{name}");
        }
    }

    #[test]
    fn no_metric_of_a_vanished_provider_is_left() {
        let metrics = complete();
        assert!(metrics.text().contains("provider=\"p\""));
        metrics.forget("p");
        assert!(!metrics.text().contains("provider=\"p\""));
    }

    #[test]
    fn vanished_types_count_zero() {
        let metrics = Metrics::new().unwrap();
        let text = Record::parse("a.example.org", RecordType::TXT, ["x"]).unwrap();
        for (records, expected) in [(vec![text], 1), (Vec::new(), 0)] {
            let counts = Metrics::count_types(&records);
            for (family, provider) in [
                (&metrics.verified_records, Some("p")),
                (&metrics.source_records, None),
            ] {
                Metrics::set_types(family, provider, &counts);
                let labels: Vec<&str> = provider.into_iter().chain(["TXT"]).collect();
                assert_eq!(family.with_label_values(&labels).get(), expected);
            }
        }
        Metrics::set_types(&metrics.verified_records, Some("q"), &BTreeMap::new());
        assert!(!metrics.text().contains("provider=\"q\""));
    }

    #[test]
    fn vanished_provider_leaves_metrics() {
        let metrics = Metrics::new().unwrap();
        metrics.soft_errors.with_label_values(&["p"]).set(3);
        metrics.forget("p");
        assert!(!metrics.text().contains("provider=\"p\""));
    }

    #[test]
    fn remarks_concern_names_that_no_document_wants() {
        let folder = tempfile::tempdir().unwrap();
        let documents = "
apiVersion: bosh-dns-publish/v1
kind: DNSUpdateRecord
metadata: {name: bind, namespace: shop}
spec: {provider: rfc2136}
---
apiVersion: externaldns.k8s.io/v1alpha1
kind: DNSEndpoint
metadata: {name: one, namespace: shop, labels: {dnsprovider: bind}}
spec: {endpoints: [{dnsName: wanted.example.org, targets: [192.0.2.1]}]}
";
        std::fs::write(folder.path().join("a.yml"), documents).unwrap();
        let scan = crate::documents::Folder::new(vec![folder.path().to_owned()]).scan();
        let publication = crate::publication::publish(&scan, &|_| Ok(Vec::new()));
        let target = &publication.targets["shop/bind"];
        let named = |name: &str| (Name::parse(name).unwrap(), format!("about {name}"));
        let mut state = ProviderState {
            general: vec!["of a zone".to_owned()],
            names: vec![named("wanted.example.org"), named("other.example.org")],
            ..ProviderState::default()
        };
        assert_eq!(
            state.problems(target),
            ["of a zone", "about wanted.example.org"]
        );
        assert_eq!(state.remarks(target), ["about other.example.org"]);
        state.warnings = vec!["key x left unchanged".to_owned()];
        assert_eq!(
            state.remarks(target),
            ["about other.example.org", "key x left unchanged"]
        );
        state.warnings.clear();
        state.names = vec![named("other.example.org"); MAX_PROBLEMS + 3];
        let remarks = state.remarks(target);
        assert_eq!(remarks.len(), MAX_PROBLEMS + 1);
        assert_eq!(remarks[MAX_PROBLEMS], "and 3 more");
    }

    fn named(name: &str) -> Name {
        Name::parse(name).unwrap()
    }

    const DOCUMENTS: &str = "
apiVersion: bosh-dns-publish/v1
kind: DNSUpdateRecord
metadata: {name: bind, namespace: shop}
spec: {provider: rfc2136, external-dns-parameters: {fqdn-template: x}}
---
apiVersion: externaldns.k8s.io/v1alpha1
kind: DNSEndpoint
metadata: {name: one, namespace: shop, labels: {dnsprovider: bind}, generation: 7}
spec: {endpoints: [{dnsName: a.example.org, targets: [192.0.2.1]}, {dnsName: b.example.org, targets: [192.0.2.1]}]}
---
apiVersion: externaldns.k8s.io/v1alpha1
kind: DNSEndpoint
metadata: {name: two, namespace: shop, labels: {dnsprovider: bind}}
spec: {endpoints: [{dnsName: a.example.org, targets: [192.0.2.2]}]}
";

    fn scanned(text: &str) -> (tempfile::TempDir, Scan, Publication) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.yml"), text).unwrap();
        let scan = crate::documents::Folder::new(vec![folder.path().to_owned()]).scan();
        let publication = crate::publication::publish(&scan, &|_| Ok(Vec::new()));
        (folder, scan, publication)
    }

    fn zone(id: &str) -> crate::engine::ZoneReport {
        crate::engine::ZoneReport {
            id: id.to_owned(),
            records: 5,
            owned: 3,
            ..Default::default()
        }
    }

    #[test]
    fn reports_become_problems() {
        let note = |name: &str| {
            let record = Record::parse(name, RecordType::A, ["192.0.2.1"]).unwrap();
            crate::plan::Note::on(&record, crate::plan::Reason::NoZone)
        };
        let mut first = zone("z1");
        first.contested = ["a", "b", "c"].map(named).into();
        first.failure = Some(crate::provider::ProviderError::Settings("cause".to_owned()));
        first.refusal = Some(crate::engine::Refusal::EmptySource { deletions: 1 });
        first.conflicts = 2;
        first.failures = vec![(named("f"), "failed".to_owned())];
        first.notes = vec![note("n")];
        first.warnings = vec!["key x left unchanged".to_owned()];
        let mut second = zone("z2");
        second.contested = [named("d")].into();
        let report = Report {
            zones: vec![first, second, zone("z3")],
            notes: vec![note("s")],
            rounds: 1,
            withheld: 0,
        };
        let counts = |records, owned| Counts { records, owned };
        let before = ProviderState {
            zones: [
                ("z1".to_owned(), counts(9, 8)),
                ("gone".to_owned(), counts(1, 1)),
            ]
            .into(),
            ..ProviderState::default()
        };
        let state = ProviderState::of_report(&report, &before);
        let contested = |names: &str| {
            format!(
                "another writer with the same owner deletes and creates {names} again and again; give each publisher \
                 its own txt-owner-id"
            )
        };
        let text = "A: none of the provider's zones contains the name";
        let expected = ProviderState {
            round: None,
            // An unavailable zone keeps its counts.
            zones: [
                ("z1".to_owned(), counts(9, 8)),
                ("z2".to_owned(), counts(5, 3)),
                ("z3".to_owned(), counts(5, 3)),
            ]
            .into(),
            general: vec![
                format!("zone z1: {}", contested("a and 2 more")),
                "zone z1: cause".to_owned(),
                "zone z1: the documents want no records, which would delete 1 names; check the documents, or allow it \
                 with `bosh-dns-publish apply --confirm-deletions 1`"
                    .to_owned(),
                "zone z1: 2 changes conflicted with another writer in every round; the next run tries again".to_owned(),
                format!("zone z2: {}", contested("d")),
            ],
            names: vec![
                (named("f"), "failed".to_owned()),
                (named("s"), format!("s {text}")),
                (named("n"), format!("n {text}")),
            ],
            warnings: vec!["key x left unchanged".to_owned()],
        };
        assert_eq!(state, expected);
        assert_eq!(state.owned(), 14);
        assert_eq!(state.all_problems().count(), 9);
        let failed = ProviderState::failed("why", &state);
        let expected = ProviderState {
            zones: state.zones,
            general: vec!["why".to_owned()],
            ..ProviderState::default()
        };
        assert_eq!(failed, expected);
    }

    #[test]
    fn long_lists_are_shortened() {
        let texts: Vec<String> = (0..22).map(|number| number.to_string()).collect();
        for (count, last) in [
            (19, "18"),
            (20, "19"),
            (21, "and 1 more"),
            (22, "and 2 more"),
        ] {
            let shown = shortened(texts[..count].iter());
            assert_eq!(shown.last().unwrap(), last);
            assert_eq!(shown.len(), count.min(21));
        }
    }

    #[test]
    fn documents_share_provider_states() {
        let (_folder, scan, publication) = scanned(DOCUMENTS);
        let none = BTreeMap::new();
        let unknown = statuses(&scan, &publication, &BTreeMap::new(), &none);
        assert_eq!(unknown.problems, [] as [&str; 0]);
        let provider = |synced, owned, problems: &[&str], remarks: &[&str]| ProviderOverview {
            provider: "rfc2136".to_owned(),
            synced,
            wanted: 3,
            owned,
            problems: problems.iter().map(ToString::to_string).collect(),
            remarks: remarks.iter().map(ToString::to_string).collect(),
        };
        let ignored = "fqdn-template has no effect here: it configures external-dns's sources inside Kubernetes";
        assert_eq!(
            unknown.providers,
            [("shop/bind".to_owned(), provider(false, 0, &[], &[ignored]))].into()
        );
        let mut state = ProviderState {
            round: Some(publication.targets["shop/bind"].clone()),
            zones: [(
                "z".to_owned(),
                Counts {
                    records: 1,
                    owned: 4,
                },
            )]
            .into(),
            ..ProviderState::default()
        };
        let states =
            |state: &ProviderState| BTreeMap::from([("shop/bind".to_owned(), state.clone())]);
        let well = statuses(&scan, &publication, &states(&state), &none);
        assert_eq!(
            well.providers["shop/bind"],
            provider(true, 4, &[], &[ignored])
        );
        let shown = |overview: &Overview| {
            let mut lines = Vec::new();
            for document in &overview.documents {
                let results: Vec<String> = document
                    .providers
                    .iter()
                    .map(|(name, result)| {
                        format!(
                            "{name} {} {} {}",
                            result.synced,
                            result.records,
                            result.problems.join(",")
                        )
                    })
                    .collect();
                lines.push(format!(
                    "{} {} [{}] {:?} {}",
                    document.id,
                    document.observed_generation,
                    results.join(";"),
                    document.last_error.as_deref(),
                    document.remarks.len()
                ));
            }
            lines
        };
        assert_eq!(
            shown(&well),
            [
                "DNSUpdateRecord shop/bind 1 [] None 1",
                "DNSEndpoint shop/one 7 [shop/bind true 2 ] None 0",
                "DNSEndpoint shop/two 1 [shop/bind true 1 ] None 0",
            ]
        );
        // A problem of one name concerns the documents that want it.
        state.names = vec![
            (named("b.example.org"), "of b".to_owned()),
            (named("other.example.org"), "of another".to_owned()),
        ];
        let partial = statuses(&scan, &publication, &states(&state), &none);
        assert_eq!(
            partial.providers["shop/bind"],
            provider(false, 4, &["of b"], &[ignored, "of another"])
        );
        assert_eq!(
            shown(&partial),
            [
                "DNSUpdateRecord shop/bind 1 [] None 1",
                "DNSEndpoint shop/one 7 [shop/bind false 2 of b] Some(\"of b\") 0",
                "DNSEndpoint shop/two 1 [shop/bind true 1 ] None 0",
            ]
        );
        // One of the provider concerns all, its record as well.
        state.general = vec!["g1".to_owned(), "g2".to_owned()];
        let broken = statuses(&scan, &publication, &states(&state), &none);
        assert_eq!(
            shown(&broken),
            [
                "DNSUpdateRecord shop/bind 1 [] Some(\"g1 (and 1 more)\") 1",
                "DNSEndpoint shop/one 7 [shop/bind false 2 g1,g2,of b] Some(\"g1\") 0",
                "DNSEndpoint shop/two 1 [shop/bind false 1 g1,g2] Some(\"g1\") 0",
            ]
        );
        state.general.truncate(1);
        let broken = statuses(&scan, &publication, &states(&state), &none);
        assert_eq!(broken.documents[0].last_error.as_deref(), Some("g1"));
    }

    #[test]
    fn changed_documents_wait_for_the_next_round() {
        let (_folder, _, before) = scanned(DOCUMENTS);
        let target = before.targets["shop/bind"].clone();
        let of_round = |round: Arc<Target>| {
            let state = ProviderState {
                round: Some(round),
                ..ProviderState::default()
            };
            BTreeMap::from([("shop/bind".to_owned(), state)])
        };
        let synced = |text: &str, states: &BTreeMap<String, ProviderState>| {
            let (_folder, scan, publication) = scanned(text);
            let overview = statuses(&scan, &publication, states, &BTreeMap::new());
            let mut found = vec![overview.providers["shop/bind"].synced];
            for document in &overview.documents[1..] {
                found.push(document.providers["shop/bind"].synced);
            }
            found
        };
        let states = of_round(target.clone());
        assert_eq!(synced(DOCUMENTS, &states), [true, true, true]);
        let moved = DOCUMENTS.replace("192.0.2.2", "192.0.2.3");
        assert_eq!(synced(&moved, &states), [false, true, false]);
        let renamed = DOCUMENTS.replace("name: one", "name: three");
        assert_eq!(synced(&renamed, &states), [false, false, true]);
        // Without one of them, all that is wanted is published.
        let (rest, _) = DOCUMENTS.rsplit_once("---").unwrap();
        assert_eq!(synced(rest, &states), [true, true]);
        // The provider itself has changed.
        let other = DOCUMENTS.replace("fqdn-template: x", "txt-owner-id: x");
        assert_eq!(synced(&other, &states), [false, false, false]);
        assert_eq!(synced(DOCUMENTS, &BTreeMap::new()), [false, false, false]);
    }

    #[test]
    fn generations_count_changes_of_the_content() {
        let (_folder, scan, publication) = scanned(DOCUMENTS);
        let states = BTreeMap::new();
        let generations = |scan: &Scan, known: &BTreeMap<DocumentId, DocumentStatus>| {
            let overview = statuses(scan, &publication, &states, known);
            overview.documents
        };
        let mut known: BTreeMap<DocumentId, DocumentStatus> = BTreeMap::new();
        for mut status in generations(&scan, &BTreeMap::new()) {
            status.observed_generation = 5;
            known.insert(status.id.clone(), status);
        }
        let counts = |documents: Vec<DocumentStatus>| -> Vec<u64> {
            documents
                .iter()
                .map(|status| status.observed_generation)
                .collect()
        };
        assert_eq!(counts(generations(&scan, &known)), [5, 7, 5]);
        let (_folder, changed, _) = scanned(
            &DOCUMENTS
                .replace("192.0.2.2", "192.0.2.3")
                .replace("kind", "# c\nkind"),
        );
        assert_eq!(counts(generations(&changed, &known)), [5, 7, 6]);
    }

    fn api_state(folder: &Path) -> ApiState {
        ApiState::new(
            Store::open(&folder.join("store")).unwrap(),
            Metrics::new().unwrap(),
        )
    }

    #[test]
    fn store_and_operator_documents_differ() {
        let folder = tempfile::tempdir().unwrap();
        let state = api_state(folder.path());
        std::fs::write(folder.path().join("a.yml"), DOCUMENTS).unwrap();
        let stored = DOCUMENTS
            .replace("name: bind", "name: stored")
            .split("---")
            .next()
            .unwrap()
            .to_owned();
        std::fs::write(folder.path().join("store/s.yml"), stored).unwrap();
        let paths = vec![folder.path().to_owned(), folder.path().join("store")];
        *state.scan.lock() = Arc::new(crate::documents::Folder::new(paths).scan());
        assert_eq!(state.scan.lock().documents.len(), 4);
        let names: Vec<String> = state
            .documents()
            .iter()
            .map(|document| document.id.to_string())
            .collect();
        assert_eq!(
            names,
            [
                "DNSUpdateRecord shop/bind",
                "DNSEndpoint shop/one",
                "DNSEndpoint shop/two"
            ]
        );
        let id = |name: &str| DocumentId {
            kind: crate::documents::Kind::UpdateRecord,
            namespace: "shop".to_owned(),
            name: name.to_owned(),
        };
        let file = format!("{}:2", folder.path().join("a.yml").display());
        assert_eq!(state.file_of(&id("bind")), Some(file));
        assert_eq!(
            (state.file_of(&id("stored")), state.file_of(&id("x"))),
            (None, None)
        );
        assert_eq!(state.status_of(&id("bind")), None);
        let scan = state.scan.lock().clone();
        let publication = crate::publication::publish(&scan, &|_| Ok(Vec::new()));
        *state.overview.lock() = statuses(&scan, &publication, &BTreeMap::new(), &BTreeMap::new());
        for name in ["bind", "stored"] {
            assert_eq!(state.status_of(&id(name)).unwrap().id, id(name));
        }
    }

    #[test]
    fn unsuccessful_providers_are_late() {
        let folder = tempfile::tempdir().unwrap();
        let state = api_state(folder.path());
        let hour = Duration::from_secs(3_600);
        let expect = |limits: &[(&str, Duration)]| {
            state.expect(
                limits
                    .iter()
                    .map(|(name, limit)| ((*name).to_owned(), *limit)),
            );
        };
        expect(&[("a", hour), ("b", hour)]);
        assert_eq!(state.late_rounds(), [] as [&str; 0]);
        // Both began an hour and a second ago.
        let past = Instant::now()
            .checked_sub(hour + Duration::from_secs(1))
            .unwrap();
        for round in state.rounds.lock().values_mut() {
            round.since = past;
        }
        // Without the number of seconds, which grows meanwhile.
        let late = || {
            let mut lines = Vec::new();
            for line in state.late_rounds() {
                let (head, tail) = line.split_once(" for ").unwrap();
                let (seconds, problem) = tail.split_once(" s: ").unwrap();
                assert!(seconds.parse::<u64>().unwrap() > 3_600, "{line}");
                lines.push(format!("{head}: {problem}"));
            }
            lines
        };
        let not_ended = "no successful round: the round has not ended";
        assert_eq!(
            late(),
            [format!("a: {not_ended}"), format!("b: {not_ended}")]
        );
        state.end_round("a", Some("cause".to_owned()));
        state.end_round("b", None);
        state.end_round("unknown", None);
        assert_eq!(late(), ["a: no successful round: cause"]);
        // A provider that is expected again keeps its wait, with the new limit; others are forgotten.
        expect(&[("a", 2 * hour)]);
        assert_eq!(state.late_rounds(), [] as [&str; 0]);
        expect(&[("a", hour)]);
        assert_eq!(late()[0], "a: no successful round: cause");
        expect(&[]);
        assert_eq!(state.late_rounds(), [] as [&str; 0]);
    }

    #[tokio::test]
    async fn confirmations_reach_running_workers() {
        let folder = tempfile::tempdir().unwrap();
        let state = api_state(folder.path());
        assert_eq!(state.confirm("p", 3).await, None);
        let mut received = state.receive_confirmations("p");
        let gone = state.receive_confirmations("q");
        assert_eq!(state.providers(), ["p", "q"]);
        state.forget("q");
        drop(gone);
        assert_eq!(state.providers(), ["p"]);
        assert_eq!(state.confirm("q", 3).await, None);
        let confirmed = Confirmed {
            changed: 2,
            problems: vec!["x".to_owned()],
        };
        let worker = async {
            let Confirmation { deletions, reply } = received.recv().await.unwrap();
            reply.send(confirmed.clone()).unwrap();
            deletions
        };
        let (answer, deletions) = tokio::join!(state.confirm("p", 3), worker);
        assert_eq!((answer, deletions), (Some(confirmed), 3));
    }

    #[test]
    fn sources_are_counted() {
        let damaged = format!("{DOCUMENTS}---\nkind: Unknown\napiVersion: v1\n");
        let (_folder, scan, publication) = scanned(&damaged);
        let metrics = Metrics::new().unwrap();
        metrics.set_sources(&scan, &publication);
        metrics.set_sources(&scan, &publication);
        let of_type = |name: &str| metrics.source_records.with_label_values(&[name]).get();
        assert_eq!(metrics.source_endpoints.get(), 3);
        assert_eq!((of_type("A"), of_type("AAAA"), of_type("CNAME")), (3, 0, 0));
        assert_eq!(
            metrics.deduplicated_endpoints.get(),
            1,
            "a.example.org of two documents"
        );
        assert_eq!(
            (metrics.invalid_endpoints.get(), metrics.source_errors.get()),
            (1, 2)
        );
        let (_folder, scan, publication) = scanned(DOCUMENTS);
        metrics.set_sources(&scan, &publication);
        assert_eq!(
            (metrics.invalid_endpoints.get(), metrics.source_errors.get()),
            (0, 2)
        );
        let empty = Record::parse("a", RecordType::MX, [] as [&str; 0]).unwrap();
        let expected: BTreeMap<String, usize> = ["A", "AAAA", "CNAME"]
            .map(|name| (name.to_owned(), 0))
            .into();
        assert_eq!(Metrics::count_types([&empty]), expected);
        assert_eq!((gauge(7), gauge(usize::MAX)), (7, i64::MAX));
    }

    #[test]
    fn damaged_status_contents_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let state = api_state(folder.path());
        let file = folder.path().join("a.yml");
        std::fs::write(&file, DOCUMENTS).unwrap();
        let mut documents = crate::documents::Folder::new(vec![
            folder.path().to_owned(),
            file.with_file_name("none.yml"),
        ]);
        let mut writer = StatusWriter::default();
        let mut write = |writer: &mut StatusWriter, problem: Option<&str>| {
            let scan = documents.scan();
            let publication = crate::publication::publish(&scan, &|_| Ok(Vec::new()));
            *state.scan.lock() = Arc::new(scan);
            writer.write(&state, &publication, &BTreeMap::new(), problem);
            let status = StatusFile::read(&file).unwrap();
            let names: Vec<String> = status
                .documents
                .iter()
                .map(|status| status.id.name.clone())
                .collect();
            (
                names,
                status.problems.len(),
                state.overview.lock().problems.clone(),
            )
        };
        let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        let (found, problems, shown) = write(&mut writer, Some("the fleet is silent"));
        assert_eq!((found, problems), (names(&["bind", "one", "two"]), 0));
        assert_eq!(
            shown.last().map(String::as_str),
            Some("the fleet is silent")
        );
        // A document that is cut off stays in the status, one that is removed does not.
        std::fs::write(
            &file,
            DOCUMENTS.replace(
                "spec: {endpoints: [{dnsName: a.example.org, targets: [192.0.2.2]}]}",
                "spec: [",
            ),
        )
        .unwrap();
        let (found, problems, _) = write(&mut writer, None);
        assert_eq!((found, problems), (names(&["bind", "one", "two"]), 1));
        // Also by a new process.
        let mut restarted = StatusWriter::default();
        let (found, _, _) = write(&mut restarted, None);
        assert_eq!(found, names(&["bind", "one", "two"]));
        std::fs::write(
            &file,
            DOCUMENTS.rsplit_once("---").unwrap().0.to_owned() + "# end\n",
        )
        .unwrap();
        let (found, problems, _) = write(&mut restarted, None);
        assert_eq!((found, problems), (names(&["bind", "one"]), 0));
        assert!(!folder.path().join("none.yml.status").exists());
        assert!(!folder.path().join("store/.lock.status").exists());
    }
}
