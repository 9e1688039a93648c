//! Handling of panics.
//!
//! Every panic is a defect; it is logged with its place and counted. [`OnPanic`] of the thread
//! decides what follows. On threads of the runtime and on UDP workers it loses one task: a
//! request, which the client sends again, or a part of the server, whose end `serve` notices.
//! On any other thread (the publisher, say) a part is gone for good, and the server ends in
//! order with exit code 70, to be restarted by its supervisor. It also ends when panics of
//! the first kind repeat. Half a server that looks alive would be worse.

use std::{
    any::Any,
    collections::VecDeque,
    panic, thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use prometheus::{IntCounter, Registry};

use tokio::sync::mpsc;
use tracing::error;

use dns_platform::{
    metrics::families,
    threads::{OnPanic, on_panic},
};

/// So many panics of parts that go on by themselves...
const MOST_PANICS: usize = 10;
/// ...in so long a time end the server.
const PANIC_WINDOW: Duration = Duration::from_secs(60);

/// A part of the server failed from within.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{part} failed: {problem}; the process ends, to be restarted")]
pub(crate) struct Failure {
    /// Which part.
    pub(super) part: String,
    /// What it said.
    pub(super) problem: String,
}

/// Where failures arrive.
pub(super) struct Failures {
    /// From the panic hook and from parts that end.
    receiver: mpsc::UnboundedReceiver<Failure>,
    /// For further parts.
    sender: mpsc::UnboundedSender<Failure>,
    /// All panics.
    panics: IntCounter,
}

impl Failures {
    /// Has panics of this process reported here.
    pub(super) fn install() -> prometheus::Result<Self> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let from_hook = sender.clone();
        let panics = families::PANICS_TOTAL.counter()?;
        let counted = panics.clone();
        let recent = Mutex::new(Recent::default());
        panic::set_hook(Box::new(move |panic| {
            let current = thread::current();
            let name = current.name().unwrap_or("a thread");
            let place = panic.location().map(ToString::to_string).unwrap_or_default();
            let problem = format!("{} at {place}", text(panic.payload()));
            error!("panic in {name}: {problem}");
            counted.inc();
            let is_over = match on_panic() {
                OnPanic::EndProcess => true,
                OnPanic::Continue => recent.lock().add(Instant::now()),
            };
            if is_over {
                // The receiver is gone once the server has ended.
                let _ = from_hook.send(Failure { part: name.to_owned(), problem });
            }
        }));
        Ok(Self { receiver, sender, panics })
    }

    /// Shows how many panics there were.
    pub(super) fn register(&self, registry: &Registry) -> prometheus::Result<()> {
        registry.register(Box::new(self.panics.clone()))
    }

    /// Runs a part of the server that must not end before the server does.
    pub(super) fn spawn(&self, part: &'static str, work: impl Future<Output = ()> + Send + 'static) {
        let sender = self.sender.clone();
        let task = tokio::spawn(work);
        tokio::spawn(async move {
            let problem = match task.await {
                Ok(()) => "it ended".to_owned(),
                Err(error) if error.is_cancelled() => return,
                Err(error) => error.to_string(),
            };
            // Nobody is there to receive it after the end.
            let _ = sender.send(Failure { part: part.to_owned(), problem });
        });
    }

    /// The next failure.
    pub(super) async fn next(&mut self) -> Failure {
        match self.receiver.recv().await {
            Some(failure) => failure,
            // We hold a sender ourselves.
            None => std::future::pending().await,
        }
    }
}

/// The panics of the last while.
#[derive(Default)]
struct Recent(VecDeque<Instant>);

impl Recent {
    /// One more; says whether they are too many.
    fn add(&mut self, now: Instant) -> bool {
        let Self(panics) = self;
        panics.push_back(now);
        while panics.front().is_some_and(|&first| now.duration_since(first) > PANIC_WINDOW) {
            panics.pop_front();
        }
        panics.len() > MOST_PANICS
    }
}

/// What a panic says.
fn text(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("panic")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_end_the_server_only_where_they_repeat() {
        let start = Instant::now();
        let mut recent = Recent::default();
        // One in ten seconds may go on for ever.
        assert!((0..100).all(|number| !recent.add(start + Duration::from_secs(10 * number))));
        let later = start + Duration::from_secs(10_000);
        let ended =
            (0..MOST_PANICS as u32 + 1).filter(|&number| recent.add(later + Duration::from_secs(1) * number));
        assert_eq!(ended.count(), 1, "the one past the bound");
    }
}
