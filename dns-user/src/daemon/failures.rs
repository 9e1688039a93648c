//! What becomes of panics.
//!
//! There should be none. One that happens all the same is logged with its place.
//! On a thread of tokio it loses the one task: a request, which the client asks
//! again, or a part of the server, whose end `serve` notices. So it does where a
//! UDP worker begins a request. On any other thread (UDP workers, the publisher) a
//! part of the server is gone for good: the server ends with exit code 70, in
//! order, so that its supervisor starts a whole one. Half a server that looks alive
//! would be worse.

use std::{any::Any, panic, thread};

use tokio::sync::mpsc;
use tracing::error;

use crate::server::beginning;

/// A part of the server failed from within.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{part} failed: {problem}; ending, so that a whole server can be started")]
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
}

impl Failures {
    /// Has panics of this process reported here.
    pub(super) fn install() -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        let from_hook = sender.clone();
        panic::set_hook(Box::new(move |panic| {
            let current = thread::current();
            let name = current.name().unwrap_or("a thread");
            let place = panic.location().map(ToString::to_string).unwrap_or_default();
            let problem = format!("{} at {place}", text(panic.payload()));
            error!("panic in {name}: {problem}");
            if !name.starts_with("tokio-") && !beginning() {
                // Nobody is there to receive it after the end.
                let _ = from_hook.send(Failure { part: name.to_owned(), problem });
            }
        }));
        Self { receiver, sender }
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

/// What a panic says.
fn text(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("panic")
}
