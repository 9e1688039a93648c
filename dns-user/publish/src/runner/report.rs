//! Status of documents and providers, derived from the results of the last rounds. Pure.

use std::{collections::BTreeMap, sync::Arc};

use super::sources::problems_by_document;
use crate::{
    api::{Overview, ProviderOverview},
    documents::{Content, Document, DocumentId, DocumentStatus, ProviderResult, Scan},
    engine::Report,
    publication::{Publication, Target},
    record::Name,
};

/// Result of a provider's last round.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProviderState {
    /// Whether a round has completed.
    pub ran: bool,
    /// Number of record sets and of owned names in each zone, from its last listing.
    pub zones: BTreeMap<String, Counts>,
    /// Problems of the provider or a zone, which affect all documents.
    pub general: Vec<String>,
    /// Problems of single names.
    pub names: Vec<(Name, String)>,
}

/// Size of a zone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of record sets, without owner records.
    pub records: usize,
    /// Number of owned names.
    pub owned: usize,
}

/// Maximum number of problems of one document or provider in a status.
const MAX_PROBLEMS: usize = 20;

impl ProviderState {
    /// Summarises a report for the status. A zone that could not be listed keeps its counts of
    /// `before`.
    pub fn of_report(report: &Report, before: &Self) -> Self {
        let mut state = Self { ran: true, ..Self::default() };
        let mut notes = report.notes.clone();
        for zone in &report.zones {
            let counts = match zone.failure {
                None => Counts { records: zone.records, owned: zone.owned },
                Some(_) => before.zones.get(&zone.id).copied().unwrap_or_default(),
            };
            state.zones.insert(zone.id.clone(), counts);
            if let Some(name) = zone.contested.first() {
                let others = match zone.contested.len() {
                    1 => String::new(),
                    count => format!(" and {} more", count - 1),
                };
                state.general.push(format!(
                    "zone {}: another writer with the same owner deletes and creates {name}{others} again and \
                     again; give each publisher its own txt-owner-id",
                    zone.id
                ));
            }
            if let Some(failure) = &zone.failure {
                state.general.push(format!("zone {}: {failure}", zone.id));
            }
            if let Some(refusal) = &zone.refusal {
                state.general.push(format!("zone {}: {refusal}", zone.id));
            }
            if zone.conflicts > 0 {
                let conflicts = zone.conflicts;
                state.general.push(format!(
                    "zone {}: {conflicts} changes conflicted with another writer in every round; the next \
                     run tries again",
                    zone.id
                ));
            }
            state.names.extend(zone.failures.iter().cloned());
            notes.extend(zone.notes.iter().cloned());
        }
        state.names.extend(notes.into_iter().map(|note| (note.name.clone(), note.to_string())));
        state
    }

    /// Returns the result of a provider that could not run, with the counts of `before`.
    pub fn failed(problem: impl ToString, before: &Self) -> Self {
        let zones = before.zones.clone();
        Self { ran: true, zones, general: vec![problem.to_string()], names: Vec::new() }
    }

    /// Returns the number of owned names in all zones.
    pub fn owned(&self) -> usize {
        self.zones.values().map(|counts| counts.owned).sum()
    }

    /// Returns the problems that prevent the publication of wanted records.
    pub fn problems(&self, target: &Target) -> Vec<String> {
        let wanted = self.names.iter().filter(|(name, _)| target.origins.contains_key(name));
        shortened(self.general.iter().chain(wanted.map(|(_, problem)| problem)))
    }

    /// Returns remarks on names that no document wants, such as owner records without a record.
    pub fn remarks(&self, target: &Target) -> Vec<String> {
        let others = self.names.iter().filter(|(name, _)| !target.origins.contains_key(name));
        shortened(others.map(|(_, remark)| remark))
    }

    fn overview(&self, target: &Target) -> ProviderOverview {
        let problems = self.problems(target);
        ProviderOverview {
            provider: target.record.provider.name().to_owned(),
            synced: self.ran && problems.is_empty(),
            wanted: target.counts.values().sum(),
            owned: self.owned(),
            problems,
            remarks: target.record.remarks().into_iter().chain(self.remarks(target)).collect(),
        }
    }

    fn result(&self, target: &Target, document: &DocumentId) -> ProviderResult {
        let is_own = |name: &Name| target.origins.get(name).is_some_and(|origins| origins.contains(document));
        let of_names = self.names.iter().filter(|(name, _)| is_own(name)).map(|(_, problem)| problem);
        let problems = shortened(self.general.iter().chain(of_names));
        let records = target.counts.get(document).copied().unwrap_or_default();
        ProviderResult { synced: self.ran && problems.is_empty(), records, problems }
    }
}

/// Returns the first texts, and the number of the others.
pub(super) fn shortened<'a>(texts: impl Iterator<Item = &'a String>) -> Vec<String> {
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
pub fn statuses(
    scan: &Scan,
    publication: &Publication,
    states: &BTreeMap<String, ProviderState>,
    before: &BTreeMap<DocumentId, DocumentStatus>,
) -> Overview {
    let (mut problems, of_files) = problems_by_document(scan);
    for (id, found) in &publication.problems {
        problems.entry(id.clone()).or_default().extend(found.iter().cloned());
    }
    let mut documents = Vec::new();
    let mut seen = std::collections::BTreeSet::new();
    for document in scan.files.iter().flat_map(|file| &file.documents) {
        if !seen.insert(&document.id) {
            continue;
        }
        let digest = digest(document);
        let counted = match before.get(&document.id) {
            Some(known) if known.digest == digest => known.observed_generation,
            Some(known) => known.observed_generation + 1,
            None => 1,
        };
        let observed_generation = document.generation.unwrap_or(counted);
        let mut own = problems.remove(&document.id).unwrap_or_default();
        let mut remarks = Vec::new();
        let mut providers = BTreeMap::new();
        for (name, target) in &publication.targets {
            let state = states.get(name).cloned().unwrap_or_default();
            if target.counts.contains_key(&document.id) {
                providers.insert(name.clone(), state.result(target, &document.id));
            }
            if target.id == document.id {
                own.extend(state.general);
            }
        }
        if let Some(Content::UpdateRecord(record)) = &document.content {
            remarks = record.remarks();
        }
        let of_providers = providers.values().flat_map(|result| result.problems.first());
        let last_error = own.first().or_else(|| of_providers.into_iter().next()).cloned();
        let last_error = last_error.map(|first| match own.len() {
            0 | 1 => first,
            count => format!("{first} (and {} more)", count - 1),
        });
        documents.push(DocumentStatus {
            id: document.id.clone(),
            observed_generation,
            digest,
            providers,
            last_error,
            remarks,
        });
    }
    let overview = |(name, target): (&String, &Arc<Target>)| {
        (name.clone(), states.get(name).unwrap_or(&ProviderState::default()).overview(target))
    };
    let providers = publication.targets.iter().map(overview);
    Overview { providers: providers.collect(), documents, problems: of_files }
}

/// Returns a digest of a document's content, from which changes are detected.
fn digest(document: &Document) -> String {
    let Document { id: _, labels, generation: _, line: _, last_line: _, content } = document;
    let digest = ring::digest::digest(&ring::digest::SHA256, format!("{labels:?}{content:?}").as_bytes());
    digest.as_ref()[..8].iter().map(|octet| format!("{octet:02x}")).collect()
}
