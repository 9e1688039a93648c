//! What the running server knows about its files and sockets: shared by the
//! daemon, the API and the command `status`.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use parking_lot::{Mutex, MutexGuard};
use serde::Serialize;
use tracing::warn;

use super::{
    api::Reloaded,
    journal::{Journal, Kind},
};

/// Most warnings that are kept of one kind of file.
const MOST_WARNINGS: usize = 100;

/// The state of files and sockets, and the journal of what happened to them;
/// clones share it.
#[derive(Clone)]
pub struct Board {
    /// Counts, and remembers when.
    journal: Journal,
    /// The state.
    state: Arc<Mutex<State>>,
}

/// The state of files and sockets.
#[derive(Clone, Debug, Default, Serialize)]
pub struct State {
    /// Where the server listens, UDP and TCP.
    pub listen: Vec<SocketAddr>,
    /// Why there is no fast path; `None`: there is one.
    pub fast_path_off: Option<String>,
    /// What an operator should know of how the server is set up.
    pub notes: Vec<String>,
    /// Instances that are served.
    pub instances: usize,
    /// Each kind of files, by its label.
    pub files: BTreeMap<&'static str, FileState>,
    /// Why nobody got an answer of late; `None`: somebody did.
    pub upcheck_error: Option<String>,
    /// What of the listen addresses does not answer, and why.
    pub silent_addresses: Vec<String>,
    /// Parts that are off although they are configured, and why.
    pub parts_off: Vec<String>,
}

/// The state of one kind of files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FileState {
    /// The files of the last attempt.
    pub files: Vec<PathBuf>,
    /// Whether contents of theirs are in use.
    pub in_use: bool,
    /// Why the last attempt failed; `None`: it did not.
    pub error: Option<String>,
    /// What was skipped in the contents in use, up to a bound.
    pub warnings: Vec<String>,
}

impl Board {
    /// An empty one beside a journal.
    pub fn new(journal: Journal) -> Self {
        Self { journal, state: Arc::default() }
    }

    /// What happened so far.
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// The state of now.
    pub fn state(&self) -> State {
        self.lock().clone()
    }

    /// Reports a part that stays off.
    pub(crate) fn stays_off(&self, problem: String) {
        warn!("{problem}");
        self.change(|state| state.parts_off.push(problem));
    }

    /// Why the newest files of this kind are not in use; `None`: they are.
    pub fn error(&self, kind: Kind) -> Option<String> {
        self.lock().files.get(kind.label())?.error.clone()
    }

    /// Whether any contents of this kind are in use.
    pub fn is_in_use(&self, kind: Kind) -> bool {
        self.lock().files.get(kind.label()).is_some_and(|state| state.in_use)
    }

    /// What is in use of every kind of files and what is not, for whoever asked for a reload.
    pub(crate) fn reloaded(&self) -> Reloaded {
        let mut reloaded = Reloaded::default();
        let last = self.journal.reloads();
        for (kind, state) in &self.lock().files {
            match &state.error {
                Some(error) => reloaded.failed.push(format!("{kind}: {error}")),
                None => {
                    let detail = last.get(*kind).map_or("", |event| event.detail.as_str());
                    reloaded.done.push(format!("{kind}: {} file(s), {detail}", state.files.len()));
                }
            }
        }
        reloaded
    }

    /// Changes something.
    pub(crate) fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
    }

    /// New contents are in use, `took` after they were noticed; `warnings` tell
    /// what was skipped.
    pub(crate) fn loaded(
        &self,
        kind: Kind,
        files: Vec<PathBuf>,
        mut warnings: Vec<String>,
        took: Duration,
        detail: &str,
    ) {
        let more = warnings.len().saturating_sub(MOST_WARNINGS);
        warnings.truncate(MOST_WARNINGS);
        if more > 0 {
            warnings.push(format!("and {more} more"));
        }
        self.journal.reloaded(kind, took, detail);
        let state = FileState { files, in_use: true, error: None, warnings };
        self.lock().files.insert(kind.label(), state);
    }

    /// Files cannot be used; what was in use stays.
    pub(crate) fn refused(&self, kind: Kind, files: Vec<PathBuf>, problem: &str) {
        self.journal.failed(kind, problem);
        let mut state = self.lock();
        let file_state = state.files.entry(kind.label()).or_default();
        file_state.files = files;
        file_state.error = Some(problem.to_owned());
    }

    /// The state is plain data: what a panicking holder left is still sound.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}
