//! One recursor query for all clients that wait for the same answer.
//!
//! A client that could have many identical questions sent at the same time would have many chances
//! to guess a reply (RFC 5452, section 5). If two servers forward to each other, a query that joins
//! the flight of its predecessor ends the loop.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::{message::MessageIndex, outgoing::Key};

/// The recursor queries in flight, and the clients that wait for them.
#[derive(Debug, Default)]
pub(crate) struct SingleFlight {
    /// Waiting clients by key.
    followers: Mutex<HashMap<FlightKey, Vec<Follower>, foldhash::fast::RandomState>>,
}

/// A client that waits for another client's query.
type Follower = oneshot::Sender<Arc<FlightResult>>;

/// Everything that distinguishes recursor queries, followed by the transport and the generation of the
/// cache.
pub(crate) type FlightKey = Key;

/// The reply to the client that asked first.
#[derive(Debug)]
pub(crate) struct FlightResult {
    pub(crate) reply: Vec<u8>,
    pub(crate) index: MessageIndex,
    /// Whether the reply is a failure.
    pub(crate) failed: bool,
}

/// The part of a query in a flight.
pub(crate) enum Part<'a> {
    /// The first query: it asks, and then calls [`Leader::finish`].
    Leader(Leader<'a>),
    /// Another query is in flight. The receiver fails if that query's client disconnects first.
    Follower(oneshot::Receiver<Arc<FlightResult>>),
}

/// The query that asks for all. If it is dropped without landing, the others ask themselves.
pub(crate) struct Leader<'a> {
    /// The flights that it belongs to.
    flights: &'a SingleFlight,
    /// Key of the look-up in flight; `None` once it has result.
    key: Option<FlightKey>,
}

impl SingleFlight {
    /// Joins the flight for `key`, or begins it.
    pub(crate) fn join(&self, key: &FlightKey) -> Part<'_> {
        let mut flights = self.followers.lock();
        let Some(followers) = flights.get_mut(key) else {
            flights.insert(key.clone(), Vec::new());
            return Part::Leader(Leader { flights: self, key: Some(key.clone()) });
        };
        let (sender, receiver) = oneshot::channel();
        followers.push(sender);
        Part::Follower(receiver)
    }

    /// Ends a flight; returns the waiting clients.
    fn end(&self, key: &FlightKey) -> Vec<Follower> {
        self.followers.lock().remove(key).unwrap_or_default()
    }
}

impl Leader<'_> {
    /// Delivers the reply to all waiting clients.
    pub(crate) fn finish(mut self, result: &Arc<FlightResult>) {
        let Some(key) = self.key.take() else { return };
        for follower in self.flights.end(&key) {
            // The client may have gone.
            let _ = follower.send(Arc::clone(result));
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
