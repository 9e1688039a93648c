//! State behind the API.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, mpsc, oneshot};

use crate::{
    documents::{Document, DocumentId, DocumentStatus, Scan},
    metrics::Metrics,
    store::Store,
};

/// Resources, documents of the folder, and state of the publisher.
#[derive(Debug)]
pub struct ApiState {
    store: Store,
    scan: Mutex<Arc<Scan>>,
    overview: Mutex<Arc<Overview>>,
    rounds: Mutex<Rounds>,
    change: Notify,
    metrics: Metrics,
    confirmations: Mutex<BTreeMap<String, mpsc::UnboundedSender<Confirmation>>>,
}

/// Permission for one round of a provider to delete names.
#[derive(Debug)]
pub struct Confirmation {
    /// Maximum number of names.
    pub deletions: usize,
    /// Receives the result of the round.
    pub reply: oneshot::Sender<Confirmed>,
}

/// Result of a confirmed round.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confirmed {
    /// Number of changed names.
    pub changed: usize,
    /// Reasons why records are not published.
    pub problems: Vec<String>,
}

/// State of the publisher, as `status` shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Overview {
    /// Every provider, by `PROJECT/RECORD`.
    pub providers: BTreeMap<String, ProviderOverview>,
    /// Every document and resource.
    pub documents: Vec<DocumentStatus>,
    /// Problems of files that belong to no document.
    pub problems: Vec<String>,
}

/// State of one provider.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProviderOverview {
    /// `spec.provider` of the record.
    pub provider: String,
    /// Whether the last round published all wanted records.
    pub synced: bool,
    /// Number of wanted record sets.
    pub wanted: usize,
    /// Number of names in its zones that this publisher owns.
    pub owned: usize,
    /// Reasons why records are not published.
    pub problems: Vec<String>,
    /// Remarks, such as parameters without effect.
    pub remarks: Vec<String>,
}

/// Health of the publisher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// Whether every provider had a successful round in time.
    pub healthy: bool,
    /// Causes and remedies if not.
    pub reasons: Vec<String>,
}

/// Expected rounds, by provider.
#[derive(Debug, Default)]
struct Rounds(BTreeMap<String, Round>);

#[derive(Debug)]
struct Round {
    /// Maximum time between successful rounds.
    time_limit: Duration,
    /// Start of the wait: the first expectation, or the last successful round.
    since: Instant,
    problem: Option<String>,
}

impl ApiState {
    /// Creates a api_state without documents.
    pub fn new(store: Store, metrics: Metrics) -> Self {
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
    pub fn receive_confirmations(&self, provider: &str) -> mpsc::UnboundedReceiver<Confirmation> {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.confirmations.lock().insert(provider.to_owned(), sender);
        receiver
    }

    /// Starts a round in which a provider may delete this number of names, and waits for its end;
    /// `None` if the provider does not run.
    pub async fn confirm(&self, provider: &str, deletions: usize) -> Option<Confirmed> {
        let (reply, result) = oneshot::channel();
        let sender = self.confirmations.lock().get(provider).cloned()?;
        sender.send(Confirmation { deletions, reply }).ok()?;
        result.await.ok()
    }

    /// Returns the names of the running providers.
    pub fn providers(&self) -> Vec<String> {
        let senders = self.confirmations.lock();
        senders.iter().filter(|(_, sender)| !sender.is_closed()).map(|(name, _)| name.clone()).collect()
    }

    /// Returns the store of resources.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the metrics served at `/metrics`.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Returns the documents of the folder.
    pub fn scan(&self) -> Arc<Scan> {
        self.scan.lock().clone()
    }

    /// Returns the valid documents of the operator's files, without the store's.
    pub fn documents(&self) -> Vec<Document> {
        let scan = self.scan();
        let files = scan.files.iter().filter(|file| !file.path.starts_with(self.store.folder()));
        let own: BTreeSet<&DocumentId> =
            files.flat_map(|file| &file.documents).map(|document| &document.id).collect();
        scan.documents.iter().filter(|document| own.contains(&document.id)).cloned().collect()
    }

    /// Returns the operator's file and line of a document.
    pub fn file_of(&self, id: &DocumentId) -> Option<String> {
        let scan = self.scan();
        let mut files = scan.files.iter().filter(|file| !file.path.starts_with(self.store.folder()));
        files.find_map(|file| {
            let document = file.documents.iter().find(|document| document.id == *id)?;
            Some(format!("{}:{}", file.path.display(), document.line))
        })
    }

    /// Sets the documents of the folder.
    pub fn set_scan(&self, scan: Scan) {
        *self.scan.lock() = Arc::new(scan);
    }

    /// Returns the state of the publisher.
    pub fn overview(&self) -> Overview {
        Overview::clone(&self.overview.lock())
    }

    /// Sets the state of the publisher.
    pub fn set_overview(&self, overview: Overview) {
        *self.overview.lock() = Arc::new(overview);
    }

    /// Returns the status of a document or resource.
    pub fn status_of(&self, id: &DocumentId) -> Option<DocumentStatus> {
        self.overview.lock().documents.iter().find(|status| status.id == *id).cloned()
    }

    /// Makes the next round start soon.
    pub fn wake(&self) {
        self.change.notify_one();
    }

    /// Waits until a resource changes.
    pub async fn changed(&self) {
        self.change.notified().await;
    }

    /// Expects rounds of exactly these providers, each within its time limit.
    pub fn expect(&self, providers: impl IntoIterator<Item = (String, Duration)>) {
        let mut rounds = self.rounds.lock();
        let mut before = std::mem::take(&mut rounds.0);
        for (provider, time_limit) in providers {
            let round = before.remove(&provider);
            let since = round.as_ref().map_or_else(Instant::now, |round| round.since);
            rounds.0.insert(
                provider,
                Round { time_limit, since, problem: round.and_then(|round| round.problem) },
            );
        }
    }

    /// Records the end of a provider's round.
    pub fn note_round(&self, provider: &str, result: Result<(), String>) {
        if let Some(round) = self.rounds.lock().0.get_mut(provider) {
            match result {
                Ok(()) => (round.since, round.problem) = (Instant::now(), None),
                Err(problem) => round.problem = Some(problem),
            }
        }
    }

    /// Returns whether every provider had a successful round in time.
    pub fn health(&self) -> Health {
        let rounds = self.rounds.lock();
        let late = rounds.0.iter().filter(|(_, round)| round.since.elapsed() > round.time_limit);
        let reasons: Vec<String> = late
            .map(|(provider, Round { since, problem, .. })| {
                let problem = problem.as_deref().unwrap_or("the round has not ended");
                format!("{provider}: no successful round for {} s: {problem}", since.elapsed().as_secs())
            })
            .collect();
        Health { healthy: reasons.is_empty(), reasons }
    }
}
