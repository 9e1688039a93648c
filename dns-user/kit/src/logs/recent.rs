//! The latest warnings and errors, kept for `/status` regardless of the levels.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use parking_lot::Mutex;
use tracing::{Event, Subscriber};
use tracing_subscriber::{Layer, layer::Context};

use super::{Problem, format, tags};

/// Maximum number of lines kept.
const KEPT: usize = 20;

/// The kept lines, shared by all clones.
#[derive(Clone, Default)]
pub(super) struct Recent {
    problems: Arc<Mutex<VecDeque<Problem>>>,
}

impl Recent {
    pub(super) fn problems(&self) -> Vec<Problem> {
        self.problems.lock().iter().cloned().collect()
    }
}

impl<S: Subscriber> Layer<S> for Recent {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let problem = Problem {
            time: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
            level: metadata.level().to_string(),
            tag: tags::of_target(metadata.target()).to_owned(),
            text: format::text_of(event),
        };
        let mut problems = self.problems.lock();
        // A repetition only updates the time.
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
