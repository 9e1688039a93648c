//! One upstream query for many clients that wait for the same answer.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use smallvec::SmallVec;
use tokio::sync::oneshot;

use super::{Ask, cache::Key, lock};
use crate::wire::Transport;

/// Most clients that wait for the queries of others; one more, and the oldest of
/// those that wait for the same answer is told that it failed.
const MAX_FOLLOWERS: usize = 4096;

/// The upstream queries under way, and who else waits for them.
#[derive(Debug, Default)]
pub(crate) struct Flights {
    /// Who waits, by what for.
    followers: Mutex<HashMap<FlightKey, VecDeque<oneshot::Sender<Landing>>, foldhash::fast::RandomState>>,
    /// All of them together.
    waiting: AtomicUsize,
}

/// What an upstream query is for: the cache's key, how it goes up, and what size
/// of reply it allows. Only where all are equal would the upstream's reply be.
pub(crate) type FlightKey = SmallVec<[u8; 128]>;

/// How an upstream query ended.
#[derive(Clone, Debug)]
pub(crate) enum Landing {
    /// The reply to the one who asked first, whole; and whether it is a failure.
    Reply(Arc<[u8]>, bool),
    /// Too many wait, and this one has waited longest.
    GivenUp,
}

/// Part that a query has in a flight.
pub(crate) enum Part<'a> {
    /// It is the first: ask, and then [`Leader::land`].
    Leader(Leader<'a>),
    /// Somebody asks already. An error: that client has gone without an answer.
    Follower(oneshot::Receiver<Landing>),
}

/// Whoever asks for all. Dropped without landing, it lets the others ask themselves.
pub(crate) struct Leader<'a> {
    /// Where the others wait.
    flights: &'a Flights,
    /// What for; `None` once it has landed.
    key: Option<FlightKey>,
}

impl Flights {
    /// The key for a query.
    pub(crate) fn key(key: &Key, ask: &Ask<'_>) -> FlightKey {
        let mut flight = key.clone();
        let by_tcp = ask.transport == Transport::Tcp;
        let flags = [by_tcp, ask.udp_size().is_some(), ask.flags().authentic()];
        flight.push(flags.into_iter().fold(0, |bits, flag| bits << 1 | u8::from(flag)));
        flight.extend_from_slice(&ask.udp_size().unwrap_or(0).to_be_bytes());
        flight
    }

    /// Joins the flight for `key`, or begins it.
    pub(crate) fn join(&self, key: FlightKey) -> Part<'_> {
        let mut flights = lock(&self.followers);
        let Some(followers) = flights.get_mut(&key) else {
            flights.insert(key.clone(), VecDeque::new());
            return Part::Leader(Leader { flights: self, key: Some(key) });
        };
        if self.waiting.load(Ordering::Relaxed) >= MAX_FOLLOWERS
            && let Some(oldest) = followers.pop_front()
        {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            let _ = oldest.send(Landing::GivenUp);
        }
        let (sender, receiver) = oneshot::channel();
        followers.push_back(sender);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Part::Follower(receiver)
    }

    /// Ends a flight; gives those who wait.
    fn end(&self, key: &FlightKey) -> VecDeque<oneshot::Sender<Landing>> {
        let followers = lock(&self.followers).remove(key).unwrap_or_default();
        self.waiting.fetch_sub(followers.len(), Ordering::Relaxed);
        followers
    }
}

impl Leader<'_> {
    /// Gives the reply to all who wait for it.
    pub(crate) fn land(mut self, reply: &[u8], failed: bool) {
        let Some(key) = self.key.take() else { return };
        let followers = self.flights.end(&key);
        if followers.is_empty() {
            return;
        }
        let reply: Arc<[u8]> = reply.into();
        for follower in followers {
            let _ = follower.send(Landing::Reply(Arc::clone(&reply), failed));
        }
    }
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        if let Some(key) = &self.key {
            drop(self.flights.end(key));
        }
    }
}
