//! Asks the file system on a thread of its own, because a mount whose server is gone
//! can block any call for as long as it likes.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use crossbeam::channel::{Receiver, Sender, bounded};

use super::{Contents, Source, Stamps, Walk};
use dns_platform::threads::{self, OnPanic};

/// What a look at a source saw.
pub(super) struct Seen {
    /// The folders in which a change may be one of ours.
    pub(super) folders: Vec<PathBuf>,
    /// What a pattern matches that is no regular file.
    pub(super) left_out: Vec<PathBuf>,
    /// What it holds; `None`: what was known already.
    pub(super) contents: Option<Contents>,
}

/// The thread of one source, as its owner holds it. It ends with its owner, or when
/// the call that holds it up returns.
pub(super) struct Reader {
    /// Questions: the stamps that are known, if any can be trusted.
    ask: Sender<Option<Stamps>>,
    /// Answers.
    answers: Receiver<Seen>,
    /// Questions whose answers nobody waits for any more.
    overdue: usize,
    /// When the question was asked whose answer is still to be fetched.
    asked: Option<Instant>,
}

impl Reader {
    /// The reader of a source.
    pub(super) fn new(source: Source) -> Self {
        Self::looking(move |known| look(&source, known))
    }

    /// One that looks so; the stamps that are known are given to it.
    pub(super) fn looking(look: impl Fn(Option<&Stamps>) -> Seen + Send + 'static) -> Self {
        let (ask, questions) = bounded::<Option<Stamps>>(1);
        let (answer, answers) = bounded(1);
        let work = move || {
            for known in questions {
                if answer.send(look(known.as_ref())).is_err() {
                    return;
                }
            }
        };
        // Without a thread no answer ever comes, which is what the owner reports then.
        if let Err(error) = threads::spawn("files", OnPanic::EndProcess, work) {
            tracing::error!("no thread can be started to read files: {error}");
        }
        Self { ask, answers, overdue: 0, asked: None }
    }

    /// Asks what the source holds, for [`Self::answer`] to fetch. While an earlier question
    /// is unanswered no other one is asked.
    pub(super) fn ask(&mut self, known: Option<Stamps>) {
        while self.overdue > 0 {
            if self.answers.try_recv().is_err() {
                return;
            }
            // Out of date by now.
            self.overdue -= 1;
        }
        if self.asked.is_none() && self.ask.try_send(known).is_ok() {
            self.asked = Some(Instant::now());
        }
    }

    /// What the source holds, if it answers within `patience` from the question.
    pub(super) fn answer(&mut self, patience: Duration) -> Option<Seen> {
        let seen = self.answers.recv_deadline(self.asked.take()? + patience).ok();
        if seen.is_none() {
            self.overdue += 1;
        }
        seen
    }
}

/// One look.
pub(super) fn look(source: &Source, known: Option<&Stamps>) -> Seen {
    let Walk { stamps, left_out } = source.walk();
    let is_known = known == Some(&stamps);
    Seen { folders: source.folders(), left_out, contents: (!is_known).then(|| stamps.read()) }
}
