//! The newest warnings and errors, kept for `/status` whatever the levels are.

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;
use tracing::{Event, Subscriber};
use tracing_subscriber::{Layer, layer::Context};

use super::{Problem, format, tags};

/// How many are kept.
const KEPT: usize = 20;

/// Keeps them; clones share it.
#[derive(Clone, Default)]
pub(super) struct Recent {
    /// Oldest first.
    problems: Arc<Mutex<VecDeque<Problem>>>,
}

impl Recent {
    /// Oldest first.
    pub(super) fn problems(&self) -> Vec<Problem> {
        self.problems.lock().iter().cloned().collect()
    }
}

impl<S: Subscriber> Layer<S> for Recent {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let problem = Problem {
            time: format::now(),
            level: metadata.level().to_string(),
            tag: tags::of_target(metadata.target()).to_owned(),
            text: format::text_of(event),
        };
        let mut problems = self.problems.lock();
        // The same again: only the time is new.
        if let Some(last) = problems.back_mut().filter(|last| last.text == problem.text) {
            last.time = problem.time;
            return;
        }
        if problems.len() == KEPT {
            problems.pop_front();
        }
        problems.push_back(problem);
    }
}
