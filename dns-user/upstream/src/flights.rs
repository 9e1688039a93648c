//! Shared queries: all clients that wait for the same answer follow the first one.

use std::{
    cell::Cell,
    collections::{HashMap, hash_map},
    sync::Arc,
};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use dns_core::wire::ExtendedError;

use crate::message::{CacheKey, MessageIndex};

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
pub(crate) type FlightKey = CacheKey;

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

impl FlightResult {
    /// Returns a copy of a reply for the clients that share it.
    pub(crate) fn copy_of(
        reply: &[u8],
        index: &MessageIndex,
        failed: bool,
        errors: &[ExtendedError],
    ) -> Arc<Self> {
        Arc::new(Self {
            reply: reply.to_vec(),
            index: index.clone(),
            failed,
            errors: errors.to_vec(),
        })
    }
}

/// Role of a query in a flight.
pub(crate) enum Part {
    /// The first query: it queries upstream, then calls [`Leader::end`].
    Leader(Leader),
    /// Another query is in flight. The receiver fails if that query's client disconnects first.
    Follower(oneshot::Receiver<Arc<FlightResult>>),
}

/// The client query that queries upstream on behalf of all. If it is dropped without a result, the others do
/// so themselves.
pub(crate) struct Leader {
    /// The flights that it belongs to.
    flights: Arc<SingleFlight>,
    /// Key of the look-up in flight.
    pub(crate) key: FlightKey,
    has_ended: Cell<bool>,
}

impl SingleFlight {
    pub(crate) fn join(self: &Arc<Self>, key: &FlightKey) -> Part {
        // Copied as octets; `clone` copies one at a time.
        match self.followers.lock().entry(FlightKey::from_slice(key)) {
            hash_map::Entry::Vacant(place) => {
                place.insert(Vec::new());
                Part::Leader(self.leader(key))
            }
            hash_map::Entry::Occupied(mut followers) => {
                let (sender, receiver) = oneshot::channel();
                followers.get_mut().push(sender);
                Part::Follower(receiver)
            }
        }
    }

    /// Starts a flight; `None` if there is one.
    pub(crate) fn lead(self: &Arc<Self>, key: &FlightKey) -> Option<Leader> {
        match self.followers.lock().entry(FlightKey::from_slice(key)) {
            hash_map::Entry::Vacant(place) => {
                place.insert(Vec::new());
                Some(self.leader(key))
            }
            hash_map::Entry::Occupied(_) => None,
        }
    }

    fn leader(self: &Arc<Self>, key: &FlightKey) -> Leader {
        Leader {
            flights: Arc::clone(self),
            key: FlightKey::from_slice(key),
            has_ended: Cell::new(false),
        }
    }

    /// Ends a flight; returns the waiting clients.
    fn end(&self, key: &FlightKey) -> Vec<Follower> {
        self.followers.lock().remove(key).unwrap_or_default()
    }
}

impl Leader {
    /// Ends the flight; returns the clients that wait for its result.
    pub(crate) fn end(&self) -> Vec<Follower> {
        // Another flight of this key may begin now, which `drop` must not end.
        self.has_ended.set(true);
        self.flights.end(&self.key)
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        // The followers' receivers fail, and each of them tries to lead.
        if !self.has_ended.get() {
            drop(self.flights.end(&self.key));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Joins a flight as a follower.
    fn follow(
        flights: &Arc<SingleFlight>,
        key: &FlightKey,
    ) -> oneshot::Receiver<Arc<FlightResult>> {
        match flights.join(key) {
            Part::Follower(receiver) => receiver,
            Part::Leader(_) => panic!("another one leads"),
        }
    }

    #[test]
    fn flight_ends_once() {
        let flights = Arc::<SingleFlight>::default();
        let key = FlightKey::from_slice(b"a");
        let other = FlightKey::from_slice(b"b");
        let Part::Leader(leader) = flights.join(&key) else {
            panic!("nobody else leads");
        };
        assert_eq!(leader.key, key);
        assert!(flights.lead(&key).is_none());
        let another = flights.lead(&other).unwrap();
        assert_eq!(another.key, other);
        let mut one = follow(&flights, &key);
        let _two = follow(&flights, &key);
        let followers = leader.end();
        assert_eq!((followers.len(), another.end().len()), (2, 0));
        let errors = [ExtendedError::new(dns_core::wire::InfoCode::Other, "x")];
        let index = MessageIndex::default();
        let result = FlightResult::copy_of(b"reply", &index, true, &errors);
        for follower in followers {
            follower.send(Arc::clone(&result)).unwrap();
        }
        let received = one.try_recv().unwrap();
        assert_eq!(
            (&received.reply[..], received.failed),
            (&b"reply"[..], true)
        );
        assert_eq!(
            (&received.index, &received.errors[..]),
            (&index, &errors[..])
        );
        // The next flight of this name is another one's.
        let next = flights.lead(&key).unwrap();
        drop(leader);
        let mut waiting = follow(&flights, &key);
        assert!(waiting.try_recv().is_err());
        drop(next);
        let gone = oneshot::error::TryRecvError::Closed;
        assert_eq!(waiting.try_recv().unwrap_err(), gone);
        assert!(matches!(flights.join(&key), Part::Leader(_)));
        assert!(flights.followers.lock().is_empty());
    }
}
