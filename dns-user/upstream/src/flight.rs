//! Shares one recursor query among all clients that wait for the same answer.
//!
//! A client that could cause many identical questions to be sent at once would have many chances to
//! guess a reply (RFC 5452, section 5). Sharing also ends forwarding loops: if two servers forward
//! to each other, a query that joins the flight of its predecessor goes no further.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::{message::MessageIndex, outgoing::Key};
use dns_core::wire::ExtendedError;

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

//----------- Failures -------------------------------------------------------

/// Time for which a failure is cached: the minimum of RFC 9520, section 3.2, because the recursors
/// of a machine recover within moments.
const LIFETIME: Duration = Duration::from_secs(1);
/// Maximum number of remembered failures; another one replaces the oldest.
pub(crate) const MAX_FAILURES: usize = 4096;

/// Failed resolutions of one source.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    remembered: Mutex<Remembered>,
    /// Number of failures, readable without the lock.
    count: AtomicUsize,
    /// Number of queries answered with a remembered failure.
    hits: AtomicU64,
}

/// Failures by key and in order of expiry.
#[derive(Debug, Default)]
struct Remembered {
    by_key: HashMap<FlightKey, (Instant, Arc<FlightResult>), foldhash::fast::RandomState>,
    /// Keys with their time of insertion.
    order: VecDeque<(Instant, FlightKey)>,
}

impl Failures {
    /// Returns whether no failure is remembered, without taking the lock.
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Returns the reply that failed less than [`LIFETIME`] ago.
    pub(crate) fn get(&self, key: &FlightKey) -> Option<Arc<FlightResult>> {
        if self.is_empty() {
            return None;
        }
        let remembered = self.remembered.lock();
        let (since, result) = remembered.by_key.get(key)?;
        (since.elapsed() < LIFETIME).then(|| {
            self.hits.fetch_add(1, Ordering::Relaxed);
            Arc::clone(result)
        })
    }

    pub(crate) fn insert(&self, key: FlightKey, result: Arc<FlightResult>) {
        let now = Instant::now();
        let mut remembered = self.remembered.lock();
        while let Some((since, _)) = remembered.order.front()
            && (now.duration_since(*since) >= LIFETIME || remembered.order.len() >= MAX_FAILURES)
        {
            remembered.forget_oldest();
        }
        remembered.order.push_back((now, key.clone()));
        remembered.by_key.insert(key, (now, result));
        self.count.store(remembered.order.len(), Ordering::Relaxed);
    }

    pub(crate) fn flush(&self) {
        *self.remembered.lock() = Remembered::default();
        self.count.store(0, Ordering::Relaxed);
    }

    /// Returns the number of queries answered with a remembered failure since the start.
    pub(crate) fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }
}

impl Remembered {
    fn forget_oldest(&mut self) {
        let Some((since, key)) = self.order.pop_front() else { return };
        if self.by_key.get(&key).is_some_and(|(latest, _)| *latest == since) {
            self.by_key.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_failure_makes_room() {
        let failures = Failures::default();
        let result = Arc::new(FlightResult {
            reply: Vec::new(),
            index: Default::default(),
            failed: true,
            errors: Vec::new(),
        });
        let key = |number: usize| FlightKey::from_slice(&number.to_be_bytes());
        for number in 0..=MAX_FAILURES {
            failures.insert(key(number), Arc::clone(&result));
        }
        assert!(failures.get(&key(0)).is_none());
        assert!(failures.remembered.lock().by_key.len() <= MAX_FAILURES);
        failures.flush();
        assert!(failures.get(&key(MAX_FAILURES)).is_none());
    }
}
