//! The open TCP connections, and the choice of the one to close if there are too many.
//!
//! A new client is always accepted. Above the limit the idlest connection is closed: of the same
//! client if it exceeds its share, otherwise of the client with the most connections. A client
//! therefore cannot keep others out, even with busy connections.

use std::{
    collections::{HashMap, HashSet},
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::admission::{Client, client_of};

/// Connections that the server makes to itself, which are never closed to make room.
#[derive(Clone, Debug, Default)]
pub struct OwnConnections(Arc<Mutex<HashSet<(IpAddr, u16)>>>);

impl OwnConnections {
    /// Marks connections from `local` as the server's while the guard lives.
    pub fn enter(&self, local: SocketAddr) -> impl Drop + use<> {
        let key = (local.ip().to_canonical(), local.port());
        self.0.lock().insert(key);
        OwnConnection { all: self.clone(), key }
    }

    /// Returns whether a client is the server itself.
    fn contains(&self, client: SocketAddr) -> bool {
        self.0.lock().contains(&(client.ip().to_canonical(), client.port()))
    }
}

/// One connection that the server makes to itself.
struct OwnConnection {
    /// The set that contains it.
    all: OwnConnections,
    /// Its local address and port.
    key: (IpAddr, u16),
}

impl Drop for OwnConnection {
    fn drop(&mut self) {
        self.all.0.lock().remove(&self.key);
    }
}

/// The open connections of one listener.
#[derive(Debug)]
pub struct Connections {
    limit: usize,
    /// Maximum number of connections of one client.
    limit_per_client: usize,
    own: OwnConnections,
    /// Start of the clock for `Entry::active`.
    since: Instant,
    table: Mutex<Table>,
}

/// The connections by number.
#[derive(Debug, Default)]
struct Table {
    /// Number of the next connection.
    next: u64,
    /// Open connections that were not ordered to close.
    open: HashMap<u64, Arc<Entry>>,
}

#[derive(Debug)]
struct Entry {
    /// The client, or its network.
    client: Client,
    /// Whether the client is the server itself.
    own: bool,
    /// Time of the last query, in milliseconds since `Connections::since`.
    active: AtomicU64,
    /// Requests that the connection's task close it.
    called_off: Notify,
}

impl Connections {
    /// Creates an empty set. A client may have a quarter of `limit`.
    pub fn new(limit: usize, own: OwnConnections) -> Arc<Self> {
        let limit_per_client = limit.div_ceil(4);
        let new = Self { limit, limit_per_client, own, since: Instant::now(), table: Mutex::default() };
        Arc::new(new)
    }

    /// Adds a connection and orders excess ones to close; returns their number.
    pub fn enter(self: &Arc<Self>, client: SocketAddr) -> (Place, usize) {
        let entry = Arc::new(Entry {
            client: client_of(client.ip()),
            own: self.own.contains(client),
            active: AtomicU64::new(self.now()),
            called_off: Notify::new(),
        });
        let mut table = self.table.lock();
        let called_off = if entry.own { 0 } else { self.make_room(&mut table, entry.client) };
        let number = table.next;
        table.next += 1;
        table.open.insert(number, Arc::clone(&entry));
        (Place { connections: Arc::clone(self), number, entry }, called_off)
    }

    /// Closes the idlest of all connections, for lack of descriptors.
    pub fn call_off_idlest(&self) {
        self.table.lock().call_off_idlest(|_| true);
    }

    /// Makes room for one more connection of `client`; returns the number of connections ordered to close.
    fn make_room(&self, table: &mut Table, client: Client) -> usize {
        if table.open.len() < self.limit.min(self.limit_per_client) {
            return 0;
        }
        let mut counts: HashMap<Client, usize> = HashMap::new();
        for entry in table.open.values().filter(|entry| !entry.own) {
            *counts.entry(entry.client).or_default() += 1;
        }
        if counts.get(&client).is_some_and(|&count| count >= self.limit_per_client) {
            return table.call_off_idlest(|entry| entry.client == client);
        }
        let total: usize = counts.values().sum();
        if total < self.limit {
            return 0;
        }
        let most = counts.values().max().copied().unwrap_or(0);
        table.call_off_idlest(|entry| counts.get(&entry.client) == Some(&most))
    }

    /// Returns the time since the listener was created, in milliseconds.
    fn now(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

impl Table {
    /// Closes the idlest connection matching `eligible`; returns how many, one or none.
    fn call_off_idlest(&mut self, eligible: impl Fn(&Entry) -> bool) -> usize {
        let candidates = self.open.iter().filter(|(_, entry)| !entry.own && eligible(entry));
        let idlest =
            candidates.min_by_key(|(number, entry)| (entry.active.load(Ordering::Relaxed), **number));
        let Some(number) = idlest.map(|(&number, _)| number) else { return 0 };
        if let Some(entry) = self.open.remove(&number) {
            entry.called_off.notify_one();
        }
        1
    }
}

/// The slot of one connection, released when dropped.
#[derive(Debug)]
pub struct Place {
    connections: Arc<Connections>,
    number: u64,
    entry: Arc<Entry>,
}

impl Place {
    /// Records that a query arrived.
    pub fn touch(&self) {
        self.entry.active.store(self.connections.now(), Ordering::Relaxed);
    }

    /// Completes when the connection must close.
    pub async fn called_off(&self) {
        self.entry.called_off.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.connections.table.lock().open.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    /// Returns a client with a distinct port.
    fn client(last: u8, port: u16) -> SocketAddr {
        ([192, 0, 2, last], port).into()
    }

    /// Returns which of these connections were ordered to close. Each order can be read only once.
    fn called_off(places: &[Place]) -> Vec<usize> {
        (0..places.len()).filter(|&at| places[at].called_off().now_or_never().is_some()).collect()
    }

    #[test]
    fn heaviest_client_loses_idlest_connection() {
        let connections = Connections::new(8, OwnConnections::default());
        let enter = |last, port| connections.enter(client(last, port)).0;
        // The share of a client is two connections.
        let mut places: Vec<Place> = (0..8).map(|number| enter(number / 2, number.into())).collect();
        assert_eq!(called_off(&places), [] as [usize; 0]);
        places[0].entry.active.store(9, Ordering::Relaxed);
        places.push(enter(0, 8));
        assert_eq!(called_off(&places), [1], "of the same client, not the one that asked last");
        places.push(enter(7, 9));
        let gone = called_off(&places);
        assert!(gone.len() == 1 && gone != [9], "{gone:?}");
        drop(places);
        assert!(connections.table.lock().open.is_empty());
    }

    #[test]
    fn own_connections_do_not_count() {
        let own = OwnConnections::default();
        let connections = Connections::new(1, own.clone());
        let guard = own.enter(client(1, 1));
        let ours = connections.enter(client(1, 1)).0;
        let theirs: Vec<Place> = (2..5).map(|port| connections.enter(client(1, port)).0).collect();
        assert_eq!(called_off(&[ours]), [] as [usize; 0]);
        assert_eq!(called_off(&theirs), [0, 1]);
        drop(guard);
        assert!(!own.contains(client(1, 1)));
    }
}
