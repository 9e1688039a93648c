//! Queries the file system on a dedicated thread: a hung mount can block any call indefinitely.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use crossbeam::channel::{Receiver, Sender, bounded};

use super::{Contents, Source, Stamps, Walk};
use dns_platform::threads::{self, OnPanic};

/// Result of reading a source.
pub(super) struct Seen {
    /// Folders in which a change may affect the source.
    pub(super) folders: Vec<PathBuf>,
    /// Matches that are not regular files.
    pub(super) left_out: Vec<PathBuf>,
    /// `None` if the contents match the known stamps.
    pub(super) contents: Option<Contents>,
}

/// Handle to a source's thread, which ends when the handle is dropped or its blocking call returns.
pub(super) struct Reader {
    /// Requests, each with the known stamps if they are reliable.
    ask: Sender<Option<Stamps>>,
    answers: Receiver<Seen>,
    /// Number of timed-out requests whose results have not arrived yet.
    overdue: usize,
    /// Time of the pending request.
    asked: Option<Instant>,
}

impl Reader {
    /// Spawns the reader of a source.
    pub(super) fn new(source: Source) -> Self {
        Self::reading(move |known| read(&source, known))
    }

    /// Spawns a reader that calls `read` with the known stamps.
    pub(super) fn reading(read: impl Fn(Option<&Stamps>) -> Seen + Send + 'static) -> Self {
        let (ask, questions) = bounded::<Option<Stamps>>(1);
        let (answer, answers) = bounded(1);
        let work = move || {
            for known in questions {
                if answer.send(read(known.as_ref())).is_err() {
                    return;
                }
            }
        };
        // Without a thread no result arrives, and the owner reports a timeout.
        if let Err(error) = threads::spawn("files", OnPanic::EndProcess, work) {
            tracing::error!("cannot start a thread to read files: {error}");
        }
        Self { ask, answers, overdue: 0, asked: None }
    }

    /// Requests the contents, which [`Self::answer`] returns. Does nothing while an earlier request
    /// is pending.
    pub(super) fn ask(&mut self, known: Option<Stamps>) {
        while self.overdue > 0 {
            if self.answers.try_recv().is_err() {
                return;
            }
            // The result of a request that has timed out.
            self.overdue -= 1;
        }
        if self.asked.is_none() && self.ask.try_send(known).is_ok() {
            self.asked = Some(Instant::now());
        }
    }

    /// Returns the contents if they arrive within `patience` of the request.
    pub(super) fn answer(&mut self, patience: Duration) -> Option<Seen> {
        let seen = self.answers.recv_deadline(self.asked.take()? + patience).ok();
        if seen.is_none() {
            self.overdue += 1;
        }
        seen
    }
}

pub(super) fn read(source: &Source, known: Option<&Stamps>) -> Seen {
    let Walk { stamps, left_out } = source.walk();
    let is_known = known == Some(&stamps);
    Seen { folders: source.folders(), left_out, contents: (!is_known).then(|| stamps.read()) }
}
