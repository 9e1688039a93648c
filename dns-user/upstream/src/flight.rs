//! One recursor query for all clients that wait for the same answer.
//!
//! A client that could have identical questions asked many times at once would have many
//! chances to guess a reply (RFC 5452, section 5); and where two servers forward to one
//! another, a query that joins the flight of its predecessor ends the loop.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::{message::Outline, outgoing::Key};

/// The recursor queries under way, and the clients that wait for them.
#[derive(Debug, Default)]
pub(crate) struct Flights {
    /// The clients by what they wait for.
    followers: Mutex<HashMap<FlightKey, Vec<Follower>, foldhash::fast::RandomState>>,
}

/// A client that waits for the query of another one.
type Follower = oneshot::Sender<Arc<Landed>>;

/// Everything in which recursor queries differ, the transport behind it.
pub(crate) type FlightKey = Key;

/// The reply to the client that asked first.
#[derive(Debug)]
pub(crate) struct Landed {
    pub(crate) reply: Vec<u8>,
    pub(crate) outline: Outline,
    /// Whether it is a failure.
    pub(crate) failed: bool,
}

/// Part that a query has in a flight.
pub(crate) enum Part<'a> {
    /// It is the first: ask, and then [`Leader::land`].
    Leader(Leader<'a>),
    /// Another query asks already. An error: its client has gone without an answer.
    Follower(oneshot::Receiver<Arc<Landed>>),
}

/// The query that asks for all. Dropped without landing, it lets the others ask themselves.
pub(crate) struct Leader<'a> {
    /// Where the others wait.
    flights: &'a Flights,
    /// Key of the look-up in flight; `None` once it has landed.
    key: Option<FlightKey>,
}

impl Flights {
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

    /// Ends a flight; gives the clients that wait.
    fn end(&self, key: &FlightKey) -> Vec<Follower> {
        self.followers.lock().remove(key).unwrap_or_default()
    }
}

impl Leader<'_> {
    /// Gives the reply to all clients that wait for it.
    pub(crate) fn land(mut self, landed: &Arc<Landed>) {
        let Some(key) = self.key.take() else { return };
        for follower in self.flights.end(&key) {
            // A client may have gone.
            let _ = follower.send(Arc::clone(landed));
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
