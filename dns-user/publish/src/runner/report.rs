//! Status of documents and providers, derived from the results of the last rounds. Pure.

use std::collections::BTreeMap;

use super::sources::problems_by_document;
use crate::{
    api::{Overview, ProviderOverview},
    documents::{Content, Document, DocumentId, DocumentStatus, ProviderResult, Scan},
    engine::Report,
    publication::{Publication, Target},
    record::Name,
    store::Resource,
};

/// Result of a provider's last round.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProviderState {
    /// Whether a round has completed.
    pub ran: bool,
    /// Number of owned names.
    pub owned: usize,
    /// Problems of the provider or a zone, which affect all documents.
    pub general: Vec<String>,
    /// Problems of single names.
    pub names: Vec<(Name, String)>,
}

impl ProviderState {
    /// Summarises a report for the status.
    pub fn of_report(report: &Report) -> Self {
        let mut state = Self { ran: true, ..Self::default() };
        let mut notes = report.notes.clone();
        for zone in &report.zones {
            state.owned += zone.owned;
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
            let failures = zone.failures.iter().map(|(name, error)| (name.clone(), error.to_string()));
            state.names.extend(failures);
            notes.extend(zone.notes.iter().cloned());
        }
        state.names.extend(notes.into_iter().map(|note| (note.name.clone(), note.to_string())));
        state
    }

    /// Returns the result of a provider that could not run.
    pub fn failed(problem: impl ToString) -> Self {
        Self { ran: true, general: vec![problem.to_string()], ..Self::default() }
    }

    /// Returns all problems that prevent the publication of wanted records.
    pub fn problems(&self, target: &Target) -> Vec<String> {
        let wanted = self.names.iter().filter(|(name, _)| target.origins.contains_key(name));
        self.general.iter().chain(wanted.map(|(_, problem)| problem)).cloned().collect()
    }

    /// Returns remarks on names that no document wants, such as owner records without a record.
    pub fn remarks(&self, target: &Target) -> Vec<String> {
        let others = self.names.iter().filter(|(name, _)| !target.origins.contains_key(name));
        others.map(|(_, remark)| remark.clone()).collect()
    }

    fn result(&self, target: &Target, document: &DocumentId) -> ProviderResult {
        let mut problems = self.general.clone();
        let is_own = |name: &Name| target.origins.get(name).is_some_and(|origins| origins.contains(document));
        problems
            .extend(self.names.iter().filter(|(name, _)| is_own(name)).map(|(_, problem)| problem.clone()));
        let records = target.counts.get(document).copied().unwrap_or_default();
        ProviderResult { synced: self.ran && problems.is_empty(), records, problems }
    }
}

/// Returns the status of all documents and resources. `before` is the previous status, from which
/// generations are counted.
pub fn statuses(
    scan: &Scan,
    stored: &[Resource],
    publication: &Publication,
    states: &BTreeMap<String, ProviderState>,
    before: &BTreeMap<DocumentId, DocumentStatus>,
) -> Overview {
    let (mut problems, of_files) = problems_by_document(scan);
    for (id, found) in &publication.problems {
        problems.entry(id.clone()).or_default().extend(found.iter().cloned());
    }
    let mut documents = Vec::new();
    let stored_documents = super::Sources::stored(stored);
    let generations: BTreeMap<&DocumentId, u64> =
        stored.iter().map(|resource| (&resource.id, resource.generation)).collect();
    let of_files_documents = scan.files.iter().flat_map(|file| &file.documents);
    let mut seen = std::collections::BTreeSet::new();
    for document in of_files_documents.chain(&stored_documents) {
        if !seen.insert(&document.id) {
            continue;
        }
        let digest = digest(document);
        let counted = match before.get(&document.id) {
            Some(known) if known.digest == digest => known.observed_generation,
            Some(known) => known.observed_generation + 1,
            None => 1,
        };
        let observed_generation =
            document.generation.or_else(|| generations.get(&document.id).copied()).unwrap_or(counted);
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
    let providers = publication.targets.iter().map(|(name, target)| {
        let state = states.get(name).cloned().unwrap_or_default();
        let problems = state.problems(target);
        let remarks = target.record.remarks().into_iter().chain(state.remarks(target));
        let overview = ProviderOverview {
            provider: target.record.provider.name().to_owned(),
            synced: state.ran && problems.is_empty(),
            wanted: target.counts.values().sum(),
            owned: state.owned,
            problems,
            remarks: remarks.collect(),
        };
        (name.clone(), overview)
    });
    Overview { providers: providers.collect(), documents, problems: of_files }
}

/// Returns a digest of a document's content, from which changes are detected.
fn digest(document: &Document) -> String {
    let Document { id: _, labels, generation: _, line: _, last_line: _, content } = document;
    let digest = ring::digest::digest(&ring::digest::SHA256, format!("{labels:?}{content:?}").as_bytes());
    digest.as_ref()[..8].iter().map(|octet| format!("{octet:02x}")).collect()
}
