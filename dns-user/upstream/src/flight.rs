//! One upstream query for many clients that wait for the same answer.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::sync::oneshot;

use super::{
    Ask,
    message::{self, Outline},
};
use dns_core::wire::Transport;

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

/// What an upstream query is for: how it goes up, DO, CD and RD, type, class, and the
/// name in lower case. Not the size of reply that the client takes, nor AD, nor whether
/// there is EDNS at all: one reply serves all of them, and whoever could have identical
/// questions asked many times at once would have many chances to guess a reply
/// (RFC 5452, section 5).
pub(crate) type FlightKey = SmallVec<[u8; 128]>;

/// How an upstream query ended.
#[derive(Clone, Debug)]
pub(crate) enum Landing {
    /// The reply to the one who asked first.
    Reply(Arc<Landed>),
    /// Too many wait, and this one has waited longest.
    GivenUp,
}

/// The reply to the one who asked first.
#[derive(Debug)]
pub(crate) struct Landed {
    /// The reply, whole; no OPT was added yet.
    pub(crate) reply: Vec<u8>,
    /// Its sections.
    pub(crate) outline: Outline,
    /// Whether it is a failure.
    pub(crate) failed: bool,
    /// The largest reply that the one who asked could take.
    pub(crate) limit: usize,
}

impl Landed {
    /// Whether a client who takes replies of up to `limit` bytes may get more by asking itself.
    pub(crate) fn is_cut_below(&self, limit: usize) -> bool {
        message::Flags::of(&self.reply).truncated() && limit > self.limit
    }
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
    /// The key for a query; `None`: the answer is for this client alone.
    pub(crate) fn key(ask: &Ask<'_>) -> Option<FlightKey> {
        if ask.is_personal() {
            return None;
        }
        let flags = ask.flags();
        let by_tcp = ask.transport == Transport::Tcp;
        let flags = [by_tcp, ask.dnssec_ok(), flags.checking_disabled(), flags.recursion_desired()];
        let mut key = FlightKey::new();
        key.push(flags.into_iter().fold(0, |bits, flag| bits << 1 | u8::from(flag)));
        key.extend_from_slice(&ask.qtype().to_be_bytes());
        key.extend_from_slice(&ask.qclass().to_be_bytes());
        key.extend_from_slice(ask.name());
        key[5..].make_ascii_lowercase();
        Some(key)
    }

    /// Joins the flight for `key`, or begins it.
    pub(crate) fn join(&self, key: FlightKey) -> Part<'_> {
        let mut flights = self.followers.lock();
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
        let followers = self.followers.lock().remove(key).unwrap_or_default();
        self.waiting.fetch_sub(followers.len(), Ordering::Relaxed);
        followers
    }
}

impl Leader<'_> {
    /// Gives the reply to all who wait for it.
    pub(crate) fn land(mut self, landed: impl FnOnce() -> Landed) {
        let Some(key) = self.key.take() else { return };
        let followers = self.flights.end(&key);
        if followers.is_empty() {
            return;
        }
        let landed = Arc::new(landed());
        for follower in followers {
            let _ = follower.send(Landing::Reply(Arc::clone(&landed)));
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
