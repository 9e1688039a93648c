//! Shares one recursor query among all clients that wait for the same answer.
//!
//! A client that could cause many identical questions to be sent at once would have many chances to
//! guess a reply (RFC 5452, section 5). Sharing also ends forwarding loops: if two servers forward
//! to each other, a query that joins the flight of its predecessor goes no further.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::Arc,
};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use dns_core::wire::ExtendedError;

use super::{message::MessageIndex, outgoing::Key};

/// The recursor queries in flight, and the clients that wait for them.
#[derive(Debug, Default)]
pub(crate) struct SingleFlight {
    /// Waiting clients by key.
    followers: Mutex<HashMap<FlightKey, Vec<Follower>, foldhash::fast::RandomState>>,
}

/// A client that waits for another client's query.
pub(crate) type Follower = oneshot::Sender<Arc<FlightResult>>;

/// Everything that distinguishes recursor queries, followed by the transport and the cache's
/// generation.
pub(crate) type FlightKey = Key;

/// Result of the leader's query.
#[derive(Debug)]
pub(crate) struct FlightResult {
    pub(crate) reply: Vec<u8>,
    pub(crate) index: MessageIndex,
    /// Whether the reply is a failure.
    pub(crate) failed: bool,
    /// Extended DNS Errors for clients.
    pub(crate) errors: Vec<ExtendedError>,
}

/// Role of a query in a flight.
pub(crate) enum Part<'a> {
    /// The first query: it queries upstream, then calls [`Leader::end`].
    Leader(Leader<'a>),
    /// Another query is in flight. The receiver fails if that query's client disconnects first.
    Follower(oneshot::Receiver<Arc<FlightResult>>),
}

/// The client query that queries upstream on behalf of all. If it is dropped without a result, the others do
/// so themselves.
pub(crate) struct Leader<'a> {
    /// The flights that it belongs to.
    flights: &'a SingleFlight,
    /// Key of the look-up in flight; `None` once it has a result.
    key: Option<&'a FlightKey>,
}

impl SingleFlight {
    /// Joins the flight for `key`, or starts it.
    pub(crate) fn join<'a>(&'a self, key: &'a FlightKey) -> Part<'a> {
        // Copied as octets; `clone` copies one at a time.
        match self.followers.lock().entry(FlightKey::from_slice(key)) {
            Entry::Vacant(place) => {
                place.insert(Vec::new());
                Part::Leader(Leader { flights: self, key: Some(key) })
            }
            Entry::Occupied(mut followers) => {
                let (sender, receiver) = oneshot::channel();
                followers.get_mut().push(sender);
                Part::Follower(receiver)
            }
        }
    }

    /// Ends a flight; returns the waiting clients.
    fn end(&self, key: &FlightKey) -> Vec<Follower> {
        self.followers.lock().remove(key).unwrap_or_default()
    }
}

impl Leader<'_> {
    /// Ends the flight; returns the clients that wait for its result.
    pub(crate) fn end(mut self) -> Vec<Follower> {
        self.key.take().map(|key| self.flights.end(key)).unwrap_or_default()
    }
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            drop(self.flights.end(key));
        }
    }
}
