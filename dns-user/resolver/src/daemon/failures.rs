//! Handles panics.
//!
//! Every panic is a defect: it is logged with its location and counted. The thread's [`OnPanic`]
//! decides what follows. On runtime threads and UDP workers a panic loses one task: a request,
//! which the client retries, or a part of the server, whose end `serve` notices. On any other
//! thread (such as the publisher's) a component is lost permanently, so the server shuts down with
//! exit code 70 and its supervisor restarts it. It also shuts down if panics of the first kind
//! repeat, because a restart is better than a degraded server that seems to be alive.

use std::{
    collections::VecDeque,
    panic, thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use prometheus::{IntCounter, Registry};

use tokio::sync::mpsc;
use tracing::error;

use dns_kit::{
    metrics::families,
    threads::{OnPanic, on_panic},
};

/// Number of recoverable panics within [`PANIC_WINDOW`] after which the server ends.
const MAX_PANICS: usize = 10;
const PANIC_WINDOW: Duration = Duration::from_secs(60);

/// A component of the server failed with a defect.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{part} failed: {problem}; the process exits to be restarted")]
pub(crate) struct Failure {
    pub(super) part: String,
    pub(super) problem: String,
}

pub(super) struct Failures {
    /// Receives failures from the panic hook and from components that end.
    receiver: mpsc::Receiver<Failure>,
    sender: mpsc::Sender<Failure>,
    panics: IntCounter,
}

impl Failures {
    /// Returns the counter of caught panics.
    pub(super) fn panics(&self) -> IntCounter {
        self.panics.clone()
    }

    /// Installs the panic hook.
    pub(super) fn install() -> prometheus::Result<Self> {
        // The first failure ends the server: further ones change nothing.
        let (sender, receiver) = mpsc::channel(1);
        let from_hook = sender.clone();
        let panics = families::PANICS_TOTAL.counter()?;
        let counted = panics.clone();
        let recent = Mutex::new(Recent::default());
        panic::set_hook(Box::new(move |panic| {
            let current = thread::current();
            let name = current.name().unwrap_or("a thread");
            let place = panic
                .location()
                .map(ToString::to_string)
                .unwrap_or_default();
            let problem = format!("{} at {place}", panic.payload_as_str().unwrap_or("panic"));
            error!("panic in {name}: {problem}");
            counted.inc();
            let is_over = match on_panic() {
                OnPanic::EndProcess => true,
                OnPanic::Continue => recent.lock().add(Instant::now()),
            };
            if is_over {
                // A hook must not wait: it runs on the thread that panics, and the channel may be
                // full.
                let _ = from_hook.try_send(Failure {
                    part: name.to_owned(),
                    problem,
                });
            }
        }));
        Ok(Self {
            receiver,
            sender,
            panics,
        })
    }

    pub(super) fn register(&self, registry: &Registry) -> prometheus::Result<()> {
        registry.register(Box::new(self.panics.clone()))
    }

    /// Spawns a component that must not end before the server does.
    pub(super) fn spawn(
        &self,
        part: &'static str,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        let sender = self.sender.clone();
        let task = tokio::spawn(work);
        tokio::spawn(async move {
            let problem = match task.await {
                Ok(()) => "it ended".to_owned(),
                // The runtime is shutting down.
                Err(error) if error.is_cancelled() => return,
                Err(error) => error.to_string(),
            };
            let _ = sender.try_send(Failure {
                part: part.to_owned(),
                problem,
            });
        });
    }

    pub(super) async fn next(&mut self) -> Failure {
        match self.receiver.recv().await {
            Some(failure) => failure,
            // Unreachable, because `self.sender` keeps the channel open.
            None => std::future::pending().await,
        }
    }
}

/// Panics within the last [`PANIC_WINDOW`].
#[derive(Default)]
struct Recent(VecDeque<Instant>);

impl Recent {
    /// Records a panic; returns true if the limit is exceeded.
    fn add(&mut self, now: Instant) -> bool {
        let Self(panics) = self;
        panics.push_back(now);
        while panics
            .front()
            .is_some_and(|&first| now.duration_since(first) > PANIC_WINDOW)
        {
            panics.pop_front();
        }
        panics.len() > MAX_PANICS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{
        conditions::events::{CountedEvent, RecentEvents},
        readiness::Readiness,
        service_status::ServiceStatus,
    };

    #[test]
    fn caught_panic_is_a_condition() {
        let failures = Failures::install().unwrap();
        let panics = failures.panics();
        let events = RecentEvents::of(vec![(CountedEvent::Panic, Box::new(move || panics.get()))]);
        let readiness = Readiness::of(ServiceStatus::default(), events);
        assert_eq!(readiness.line("panicked"), None);
        let panicking = thread::spawn(|| {
            dns_kit::threads::adopt(OnPanic::Continue);
            panic!("a defect");
        });
        assert!(panicking.join().is_err());
        let line = readiness.line("panicked").unwrap();
        assert!(
            line.starts_with("a panic was caught (1 since the start)"),
            "{line}"
        );
    }

    #[test]
    fn repeated_panics_end_server() {
        let start = Instant::now();
        let mut recent = Recent::default();
        // One panic every ten seconds is tolerated indefinitely.
        assert!((0..100).all(|number| !recent.add(start + Duration::from_secs(10 * number))));
        let later = start + Duration::from_secs(10_000);
        let ended = (0..MAX_PANICS as u32 + 1)
            .filter(|&number| recent.add(later + Duration::from_secs(1) * number));
        assert_eq!(ended.count(), 1, "the one past the bound");
    }
}
