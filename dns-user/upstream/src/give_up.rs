//! A bound on work under way where the oldest gives way to the newest.

use std::{
    collections::VecDeque,
    future::Future,
    sync::atomic::{AtomicU64, Ordering},
};

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// Lets at most so many pieces of work run at a time. One more, and the oldest
/// is given up: it would be the first to be of no use to anybody.
#[derive(Debug)]
pub(crate) struct OldestOut {
    /// Most pieces of work at a time.
    limit: usize,
    /// Those under way in the order of their start. A closed channel: done meanwhile.
    running: Mutex<VecDeque<oneshot::Sender<()>>>,
    /// How many were given up.
    given_up: AtomicU64,
}

impl OldestOut {
    /// With room for `limit`, at least 1.
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit: limit.max(1), running: Mutex::default(), given_up: AtomicU64::new(0) }
    }

    /// Does `work`; `None` if it had to give way.
    pub(crate) async fn run<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let (ticket, called_off) = oneshot::channel();
        self.enter(ticket);
        tokio::select! {
            biased;
            output = work => Some(output),
            _ = called_off => None,
        }
    }

    /// How many pieces of work were given up so far.
    #[cfg(test)]
    pub(crate) fn given_up(&self) -> u64 {
        self.given_up.load(Ordering::Relaxed)
    }

    /// Enters new work and makes room for it.
    fn enter(&self, ticket: oneshot::Sender<()>) {
        let mut running = self.running.lock();
        while running.front().is_some_and(oneshot::Sender::is_closed) {
            running.pop_front();
        }
        if running.len() >= self.limit {
            running.retain(|ticket| !ticket.is_closed());
        }
        if running.len() >= self.limit
            && let Some(oldest) = running.pop_front()
        {
            self.given_up.fetch_add(1, Ordering::Relaxed);
            let _ = oldest.send(());
        }
        running.push_back(ticket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_oldest_gives_way() {
        let bound = std::sync::Arc::new(OldestOut::new(2));
        let start = |bound: &std::sync::Arc<OldestOut>| {
            let bound = std::sync::Arc::clone(bound);
            tokio::spawn(async move { bound.run(std::future::pending::<()>()).await })
        };
        let first = start(&bound);
        tokio::task::yield_now().await;
        let second = start(&bound);
        tokio::task::yield_now().await;
        assert_eq!(bound.run(async { 7 }).await, Some(7));
        assert_eq!(first.await.unwrap(), None);
        assert!(!second.is_finished());
        // The one that is done counts no more.
        assert_eq!(bound.run(async { 8 }).await, Some(8));
        assert!(!second.is_finished());
        assert_eq!(bound.given_up(), 1);
        second.abort();
    }
}
