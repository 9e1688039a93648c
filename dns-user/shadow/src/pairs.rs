//! Queries that wait for their replies, in a bounded table.
//!
//! A packet may be seen several times: on a bridge and on its port, on a VLAN and on the interface below. Only the
//! first copy of a query or reply counts.

use std::{
    collections::{HashMap, VecDeque},
    net::SocketAddr,
    time::{Duration, Instant},
};

use dns_core::wire::{HEADER_LEN, Transport, u16_at};
use serde::Serialize;

/// Time after which a query counts as unanswered; resolvers of clients give up after five seconds.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time for which copies of an answered query are recognised.
const COPIES: Duration = Duration::from_secs(2);
/// Maximum number of queries that wait, and of answered ones whose copies are recognised.
const MAX_WAITING: usize = 8192;
/// Maximum length of a query that is kept: padded ones have a multiple of 128 bytes (RFC 8467, section 4.1). A flood
/// of messages as long as servers read would fill the table with 32 MiB.
const MAX_QUERY: usize = 1232;

/// A message seen on an interface.
#[derive(Clone, Copy, Debug)]
pub struct Sighting<'a> {
    /// The endpoint of the client.
    pub client: SocketAddr,
    /// The endpoint of the server.
    pub server: SocketAddr,
    /// How it was carried.
    pub transport: Transport,
    /// Number of the interface.
    pub interface: u32,
    /// When it was seen.
    pub at: Instant,
    /// When the kernel saw it, as time since 1970.
    pub stamp: Option<Duration>,
    /// The message.
    pub message: &'a [u8],
}

/// A query with its reply.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// The endpoint of the client.
    pub client: SocketAddr,
    /// How both were carried.
    pub transport: Transport,
    /// The query.
    pub query: Vec<u8>,
    /// The reply; empty if there was none.
    pub reply: Vec<u8>,
    /// When the query was seen.
    pub asked: Instant,
    /// When the reply was seen.
    pub replied: Instant,
    /// Time from the query to the reply by the kernel's clock.
    pub latency: Option<Duration>,
}

impl Exchange {
    /// Returns the length of both messages.
    pub fn bytes(&self) -> usize {
        self.query.len() + self.reply.len()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    client: SocketAddr,
    server: SocketAddr,
    is_tcp: bool,
    id: u16,
}

struct Waiting {
    /// `None` once the client has asked another question with the same id.
    query: Option<Vec<u8>>,
    interface: u32,
    asked: Instant,
    stamp: Option<Duration>,
}

/// Counts of messages that made no pair.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Unpaired {
    /// Copies of a message on another interface, and repetitions by the client.
    pub copies: u64,
    /// Replies whose query was not seen, such as those to queries from before the start.
    pub orphans: u64,
    /// Queries beyond the table's limit, or longer than any client's.
    pub excess: u64,
    /// Messages of clients that used an id again before its reply.
    pub ambiguous: u64,
}

/// Queries that wait for their replies.
#[derive(Default)]
pub struct Pairs {
    waiting: HashMap<Key, Waiting>,
    /// Answered queries: when, and the interface on which the query was seen first.
    answered: HashMap<Key, (Instant, u32)>,
    /// Keys in the order of their times, for expiry.
    asked_order: VecDeque<(Instant, Key)>,
    answered_order: VecDeque<(Instant, Key)>,
    /// Messages that made no pair.
    pub unpaired: Unpaired,
}

impl Pairs {
    /// Records a query; returns whether it is a new one.
    pub fn query(&mut self, seen: &Sighting<'_>) -> bool {
        let Some(key) = Key::of(seen) else {
            return false;
        };
        let mut is_copy = false;
        if let Some((_, interface)) = self.answered.get(&key) {
            // On the same interface it is a new query: clients with few ports soon use an id again.
            is_copy = *interface != seen.interface;
        }
        if let Some(waiting) = self.waiting.get_mut(&key)
            && !is_copy
        {
            is_copy = waiting.query.as_deref() == Some(seen.message);
            if !is_copy {
                // Neither query can be paired: the next reply may answer the first one.
                waiting.query = None;
                self.unpaired.ambiguous += 1;
                return true;
            }
        }
        if is_copy {
            self.unpaired.copies += 1;
            return false;
        }
        if self.waiting.len() >= MAX_WAITING || seen.message.len() > MAX_QUERY {
            self.unpaired.excess += 1;
            // Counted as a query, since the estimate of all queries is made from these.
            return true;
        }
        if self.asked_order.len() >= 2 * MAX_WAITING {
            // Drops answered queries, which are at least half of them, so that each is looked at twice at most.
            let waiting = &self.waiting;
            self.asked_order
                .retain(|(at, key)| waiting.get(key).is_some_and(|query| query.asked == *at));
        }
        let waiting = Waiting {
            query: Some(seen.message.to_vec()),
            interface: seen.interface,
            asked: seen.at,
            stamp: seen.stamp,
        };
        self.waiting.insert(key, waiting);
        self.asked_order.push_back((seen.at, key));
        true
    }

    /// Returns the exchange that a reply completes.
    pub fn reply(&mut self, seen: &Sighting<'_>) -> Option<Exchange> {
        let key = Key::of(seen)?;
        let Some(waiting) = self.waiting.get_mut(&key) else {
            if self.answered.contains_key(&key) {
                self.unpaired.copies += 1;
            } else {
                self.unpaired.orphans += 1;
            }
            return None;
        };
        let Some(query) = waiting.query.take() else {
            // More replies may follow, so it stays until it expires.
            self.unpaired.ambiguous += 1;
            return None;
        };
        let Waiting {
            interface,
            asked,
            stamp,
            ..
        } = *waiting;
        self.waiting.remove(&key);
        // Beyond the limit, copies merely count as queries of their own.
        if self.answered.len() < MAX_WAITING && self.answered_order.len() < 2 * MAX_WAITING {
            self.answered.insert(key, (seen.at, interface));
            self.answered_order.push_back((seen.at, key));
        }
        let mut latency = None;
        if let Some(asked) = stamp
            && let Some(replied) = seen.stamp
        {
            // None if the clock was set back in between.
            latency = replied.checked_sub(asked);
        }
        Some(Exchange {
            client: seen.client,
            transport: seen.transport,
            query,
            reply: seen.message.to_vec(),
            asked,
            replied: seen.at,
            latency,
        })
    }

    /// Removes the queries that waited too long; returns their number.
    pub fn expire(&mut self, now: Instant) -> u64 {
        while let Some((at, key)) = self
            .answered_order
            .pop_front_if(|(at, _)| now.duration_since(*at) > COPIES)
        {
            // The port and id may have been used again since.
            if let Some((last, _)) = self.answered.get(&key)
                && *last == at
            {
                self.answered.remove(&key);
            }
        }
        let mut expired = 0;
        while let Some((at, key)) = self
            .asked_order
            .pop_front_if(|(at, _)| now.duration_since(*at) > PATIENCE)
        {
            // The port and id may belong to a later query, which is listed by itself.
            if let Some(waiting) = self.waiting.get(&key)
                && waiting.asked == at
            {
                expired += u64::from(waiting.query.is_some());
                self.waiting.remove(&key);
            }
        }
        expired
    }

    /// Forgets the query of a reply that was seen in part: it is answered, but cannot be compared.
    pub fn forget(&mut self, seen: &Sighting<'_>) {
        if let Some(key) = Key::of(seen) {
            self.waiting.remove(&key);
        }
    }

    /// Forgets the queries that wait, after packets were lost that may have been their replies.
    pub fn forget_waiting(&mut self) {
        self.asked_order.clear();
        self.waiting.clear();
    }

    /// Returns how many queries wait.
    #[cfg(test)]
    fn waiting(&self) -> usize {
        self.waiting.len()
    }
}

impl Key {
    /// Returns `None` for a message without a header.
    fn of(seen: &Sighting<'_>) -> Option<Self> {
        if seen.message.len() < HEADER_LEN {
            return None;
        }
        Some(Self {
            client: seen.client,
            server: seen.server,
            is_tcp: seen.transport == Transport::Tcp,
            id: u16_at(seen.message, 0)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(
        id: u16,
        port: u16,
        interface: u32,
        at: Instant,
        message: &mut Vec<u8>,
    ) -> Sighting<'_> {
        message.resize(HEADER_LEN, 0);
        message[..2].copy_from_slice(&id.to_be_bytes());
        Sighting {
            client: SocketAddr::from(([10, 0, 0, 1], port)),
            server: SocketAddr::from(([10, 0, 0, 2], 53)),
            transport: Transport::Udp,
            interface,
            at,
            stamp: None,
            message,
        }
    }

    #[test]
    fn copies_on_other_interfaces_count_once() {
        let mut pairs = Pairs::default();
        let now = Instant::now();
        let mut a = Vec::new();
        let mut b = Vec::new();
        assert!(pairs.query(&seen(1, 9, 1, now, &mut a)));
        assert!(!pairs.query(&seen(1, 9, 2, now, &mut a)));
        assert!(pairs.reply(&seen(1, 9, 2, now, &mut b)).is_some());
        assert!(pairs.reply(&seen(1, 9, 1, now, &mut b)).is_none());
        assert!(!pairs.query(&seen(1, 9, 3, now, &mut a)));
        assert_eq!(pairs.unpaired.copies, 3);
        assert!(pairs.reply(&seen(2, 9, 1, now, &mut b)).is_none());
        assert_eq!(pairs.unpaired.orphans, 1);
    }

    #[test]
    fn unanswered_queries_expire_and_the_table_is_bounded() {
        let mut pairs = Pairs::default();
        let now = Instant::now();
        let mut message = Vec::new();
        for number in 0..3 * MAX_WAITING {
            let sighting = seen(number as u16, (number >> 14) as u16, 1, now, &mut message);
            pairs.query(&sighting);
        }
        assert_eq!(pairs.waiting(), MAX_WAITING);
        assert_eq!(pairs.unpaired.excess, 2 * MAX_WAITING as u64);
        assert_eq!(pairs.expire(now + PATIENCE), 0);
        let later = now + PATIENCE + Duration::from_millis(1);
        assert_eq!(pairs.expire(later), MAX_WAITING as u64);
        assert_eq!(pairs.waiting(), 0);
        assert!(pairs.query(&seen(1, 9, 1, later, &mut message)));
    }

    /// Only queries that wait take room, however many are compared within the time limit of one.
    #[test]
    fn answered_queries_take_no_room() {
        let mut pairs = Pairs::default();
        let now = Instant::now();
        let mut message = Vec::new();
        // Stays at the head of the order.
        pairs.query(&seen(0, 1, 1, now, &mut message));
        for number in 0..3 * MAX_WAITING {
            let sighting = seen(number as u16, 9, 1, now, &mut message);
            assert!(pairs.query(&sighting));
            assert!(pairs.reply(&sighting).is_some(), "{number}");
        }
        assert_eq!(pairs.unpaired.excess, 0);
        assert!(pairs.asked_order.len() <= 2 * MAX_WAITING);
        let later = now + PATIENCE + Duration::from_millis(1);
        assert_eq!(pairs.expire(later), 1);
    }

    /// A client asks another question with an id that waits: the first reply to come may answer either.
    #[test]
    fn reused_ids_pair_nothing() {
        let mut pairs = Pairs::default();
        let now = Instant::now();
        let mut first = vec![1; HEADER_LEN];
        let mut second = vec![2; HEADER_LEN];
        assert!(pairs.query(&seen(7, 9, 1, now, &mut first)));
        assert!(pairs.query(&seen(7, 9, 1, now, &mut second)));
        for reply in [&mut first, &mut second] {
            assert!(pairs.reply(&seen(7, 9, 1, now, reply)).is_none());
        }
        assert_eq!(pairs.unpaired.ambiguous, 3);
        let later = now + PATIENCE + Duration::from_millis(1);
        assert_eq!(pairs.expire(later), 0, "answered, and not to be told apart");
        assert!(pairs.query(&seen(7, 9, 1, later, &mut first)));
        assert!(pairs.reply(&seen(7, 9, 1, later, &mut first)).is_some());
    }

    /// A reply in parts answers its query all the same.
    #[test]
    fn partial_replies_leave_nothing_unanswered() {
        let mut pairs = Pairs::default();
        let now = Instant::now();
        let mut message = Vec::new();
        assert!(pairs.query(&seen(7, 9, 1, now, &mut message)));
        pairs.forget(&seen(7, 9, 1, now, &mut message));
        let later = now + PATIENCE + Duration::from_millis(1);
        assert_eq!(pairs.expire(later), 0);
    }
}
