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
pub(crate) struct ApiState {
    pub store: Store,
    scan: Mutex<Arc<Scan>>,
    overview: Mutex<Arc<Overview>>,
    /// Expected rounds, by provider.
    rounds: Mutex<BTreeMap<String, Round>>,
    change: Notify,
    pub metrics: Metrics,
    confirmations: Mutex<BTreeMap<String, mpsc::UnboundedSender<Confirmation>>>,
}

/// Permission for one round of a provider to delete names.
#[derive(Debug)]
pub(crate) struct Confirmation {
    /// Maximum number of names.
    pub deletions: usize,
    /// Receives the result of the round.
    pub reply: oneshot::Sender<Confirmed>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Confirmed {
    /// Number of changed names.
    pub changed: usize,
    pub problems: Vec<String>,
}

/// State of the publisher, as `status` shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Overview {
    /// Every provider, by `PROJECT/RECORD`.
    pub providers: BTreeMap<String, ProviderOverview>,
    pub documents: Vec<DocumentStatus>,
    /// Problems of files that belong to no document.
    pub problems: Vec<String>,
}

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
    pub(crate) fn receive_confirmations(&self, provider: &str) -> mpsc::UnboundedReceiver<Confirmation> {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.confirmations.lock().insert(provider.to_owned(), sender);
        receiver
    }

    /// Starts a round in which a provider may delete this number of names, and waits for its end;
    /// `None` if the provider does not run.
    pub(crate) async fn confirm(&self, provider: &str, deletions: usize) -> Option<Confirmed> {
        let (reply, result) = oneshot::channel();
        let sender = self.confirmations.lock().get(provider).cloned()?;
        sender.send(Confirmation { deletions, reply }).ok()?;
        result.await.ok()
    }

    pub(crate) fn providers(&self) -> Vec<String> {
        let senders = self.confirmations.lock();
        senders.iter().filter(|(_, sender)| !sender.is_closed()).map(|(name, _)| name.clone()).collect()
    }

    pub(crate) fn scan(&self) -> Arc<Scan> {
        self.scan.lock().clone()
    }

    /// Returns the valid documents of the operator's files, without the store's.
    pub(crate) fn documents(&self) -> Vec<Document> {
        let scan = self.scan();
        let files = scan.files.iter().filter(|file| !file.path.starts_with(self.store.folder()));
        let own: BTreeSet<&DocumentId> =
            files.flat_map(|file| &file.documents).map(|document| &document.id).collect();
        scan.documents.iter().filter(|document| own.contains(&document.id)).cloned().collect()
    }

    /// Returns the operator's file and line of a document.
    pub(crate) fn file_of(&self, id: &DocumentId) -> Option<String> {
        let scan = self.scan();
        let mut files = scan.files.iter().filter(|file| !file.path.starts_with(self.store.folder()));
        files.find_map(|file| {
            let document = file.documents.iter().find(|document| document.id == *id)?;
            Some(format!("{}:{}", file.path.display(), document.line))
        })
    }

    pub(crate) fn set_scan(&self, scan: Scan) {
        *self.scan.lock() = Arc::new(scan);
    }

    pub(crate) fn overview(&self) -> Overview {
        Overview::clone(&self.overview.lock())
    }

    pub(crate) fn set_overview(&self, overview: Overview) {
        *self.overview.lock() = Arc::new(overview);
    }

    pub(crate) fn status_of(&self, id: &DocumentId) -> Option<DocumentStatus> {
        self.overview.lock().documents.iter().find(|status| status.id == *id).cloned()
    }

    pub(crate) fn wake(&self) {
        self.change.notify_one();
    }

    /// Waits until a resource changes.
    pub(crate) async fn changed(&self) {
        self.change.notified().await;
    }

    /// Expects rounds of exactly these providers, each within its time limit.
    pub(crate) fn expect(&self, providers: impl IntoIterator<Item = (String, Duration)>) {
        let mut rounds = self.rounds.lock();
        let mut before = std::mem::take(&mut *rounds);
        for (provider, time_limit) in providers {
            let round = before.remove(&provider);
            let since = round.as_ref().map_or_else(Instant::now, |round| round.since);
            rounds.insert(
                provider,
                Round { time_limit, since, problem: round.and_then(|round| round.problem) },
            );
        }
    }

    /// Records the end of a provider's round; without a `problem` it was successful.
    pub(crate) fn end_round(&self, provider: &str, problem: Option<String>) {
        if let Some(round) = self.rounds.lock().get_mut(provider) {
            if problem.is_none() {
                round.since = Instant::now();
            }
            round.problem = problem;
        }
    }

    /// Returns causes and remedies for every provider without a successful round in time.
    pub(crate) fn late_rounds(&self) -> Vec<String> {
        let rounds = self.rounds.lock();
        let late = rounds.iter().filter(|(_, round)| round.since.elapsed() > round.time_limit);
        let reason = |(provider, Round { since, problem, .. }): (&String, &Round)| {
            let problem = problem.as_deref().unwrap_or("the round has not ended");
            format!("{provider}: no successful round for {} s: {problem}", since.elapsed().as_secs())
        };
        late.map(reason).collect()
    }
}
