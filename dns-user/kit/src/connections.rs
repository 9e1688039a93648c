//! The open connections of a server, and the choice of the one to close if there are too many.
//!
//! A new client is always accepted. Above the limit a handshake without progress or else the idlest connection is
//! closed: of the same client if it exceeds its share, otherwise of the client with the most connections, the new one
//! included. A client therefore cannot keep others out, even with busy connections.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::sync::Notify;

use crate::{
    admission::{Client, client_of},
    clock::milliseconds,
};

/// Age from which an unfinished handshake is closed before other connections.
const HANDSHAKE_GRACE: Duration = Duration::from_secs(1);

/// Connections that the server makes to itself, which are never closed to make room.
#[derive(Clone, Debug, Default)]
pub struct OwnConnections(Arc<Mutex<HashSet<(IpAddr, u16)>>>);

impl OwnConnections {
    /// Marks connections from `local` as the server's while the guard lives.
    pub fn enter(&self, local: SocketAddr) -> impl Drop + use<> {
        let key = (local.ip().to_canonical(), local.port());
        self.0.lock().insert(key);
        OwnConnection {
            all: self.clone(),
            key,
        }
    }

    /// Returns whether a client is the server itself.
    fn contains(&self, client: SocketAddr) -> bool {
        self.0
            .lock()
            .contains(&(client.ip().to_canonical(), client.port()))
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

/// The open connections of listeners that share a limit.
#[derive(Debug)]
pub struct Connections {
    limit: usize,
    limit_per_client: usize,
    own: OwnConnections,
    /// Start of the clock for `OpenConnection::active`.
    since: Instant,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    /// Number of the next connection.
    next: u64,
    /// Open connections that were not ordered to close.
    open: HashMap<u64, Arc<OpenConnection>>,
}

#[derive(Debug)]
struct OpenConnection {
    peer: Peer,
    /// Whether the peer is the server itself.
    own: bool,
    /// Whether the handshake has finished, if there is one.
    is_established: AtomicBool,
    /// Time of the last query, in milliseconds since `Connections::since`.
    active: AtomicU64,
    /// Requests that the connection's task close it.
    called_off: Arc<Notify>,
    /// Tells that the task has ended.
    ended: Notify,
}

/// A connection that was ordered to close.
#[derive(Debug)]
pub struct Leaving(Arc<OpenConnection>);

impl Leaving {
    /// Returns the other end of the connection.
    pub fn peer(&self) -> Peer {
        self.0.peer
    }

    /// Waits until the connection's task has ended: until then it holds its descriptor and its buffers.
    pub async fn ended(self) {
        self.0.ended.notified().await;
    }
}

impl Connections {
    /// Creates an empty set. A client may have a quarter of `limit`.
    pub fn new(limit: usize, own: OwnConnections) -> Arc<Self> {
        Self::with_share(limit, limit.div_ceil(4), own)
    }

    /// Creates an empty set in which a client may have all connections until another one comes.
    pub fn without_shares(limit: usize) -> Arc<Self> {
        Self::with_share(limit, limit, OwnConnections::default())
    }

    fn with_share(limit: usize, limit_per_client: usize, own: OwnConnections) -> Arc<Self> {
        let new = Self {
            limit,
            limit_per_client,
            own,
            since: Instant::now(),
            table: Mutex::default(),
        };
        Arc::new(new)
    }

    /// Returns the maximum number of connections.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Adds a connection of a client that counts by its address; returns the one that must close for it.
    pub fn enter(self: &Arc<Self>, client: SocketAddr) -> (Place, Option<Leaving>) {
        let peer = Peer::Network(client_of(client.ip()));
        let entered = self.add(peer, self.own.contains(client));
        entered.0.established();
        entered
    }

    /// Adds a connection whose handshake begins; returns the one that must close for it.
    pub fn enter_handshake(self: &Arc<Self>, peer: Peer) -> (Place, Option<Leaving>) {
        self.add(peer, false)
    }

    fn add(self: &Arc<Self>, peer: Peer, own: bool) -> (Place, Option<Leaving>) {
        let entry = Arc::new(OpenConnection {
            peer,
            own,
            is_established: AtomicBool::new(false),
            active: AtomicU64::new(self.now()),
            called_off: Arc::default(),
            ended: Notify::new(),
        });
        let mut table = self.table.lock();
        let leaving = if entry.own {
            None
        } else {
            self.make_room(&mut table, peer)
        };
        let number = table.next;
        table.next += 1;
        table.open.insert(number, Arc::clone(&entry));
        (
            Place {
                connections: Arc::clone(self),
                number,
                entry,
            },
            leaving,
        )
    }

    /// Orders the idlest of all connections to close, for lack of descriptors.
    pub fn call_off_idlest(&self) -> Option<Leaving> {
        self.table.lock().call_off_idlest(self.now(), |_| true)
    }

    /// Makes room for one more connection of `peer`; returns the connection ordered to close.
    fn make_room(&self, table: &mut Table, peer: Peer) -> Option<Leaving> {
        // No client can have reached its share yet, so there is nothing to count.
        if table.open.len() < self.limit.min(self.limit_per_client) {
            return None;
        }
        // With the new one: if its client now has the most, one of its own gives way.
        let mut counts = HashMap::from([(peer, 1)]);
        for entry in table.open.values().filter(|entry| !entry.own) {
            *counts.entry(entry.peer).or_default() += 1;
        }
        let now = self.now();
        if counts[&peer] > self.limit_per_client {
            return table.call_off_idlest(now, |entry| entry.peer == peer);
        }
        let total: usize = counts.values().sum();
        if total <= self.limit {
            return None;
        }
        let most = counts.values().max().copied().unwrap_or(0);
        table.call_off_idlest(now, |entry| counts.get(&entry.peer) == Some(&most))
    }

    /// Returns the time since the set was created, in milliseconds.
    fn now(&self) -> u64 {
        milliseconds(self.since.elapsed())
    }
}

impl Table {
    /// Orders the idlest connection matching `eligible` to close, or an old handshake if there is one.
    fn call_off_idlest(
        &mut self,
        now: u64,
        eligible: impl Fn(&OpenConnection) -> bool,
    ) -> Option<Leaving> {
        let candidates = self
            .open
            .iter()
            .filter(|(_, entry)| !entry.own && eligible(entry));
        let idlest = candidates.min_by_key(|(number, entry)| {
            let active = entry.active.load(Ordering::Relaxed);
            (!entry.is_old_handshake(now), active, **number)
        });
        // Removed at once, so that the next newcomer does not choose the same one.
        let number = idlest.map(|(&number, _)| number)?;
        let entry = self.open.remove(&number)?;
        entry.called_off.notify_one();
        Some(Leaving(entry))
    }
}

impl OpenConnection {
    fn is_old_handshake(&self, now: u64) -> bool {
        let begun = self.active.load(Ordering::Relaxed);
        !self.is_established.load(Ordering::Relaxed)
            && now.saturating_sub(begun) >= milliseconds(HANDSHAKE_GRACE)
    }
}

/// The slot of one connection, released when dropped.
#[derive(Debug)]
pub struct Place {
    connections: Arc<Connections>,
    number: u64,
    entry: Arc<OpenConnection>,
}

impl Place {
    /// Records that a query arrived.
    pub fn touch(&self) {
        self.entry
            .active
            .store(self.connections.now(), Ordering::Relaxed);
    }

    /// Records that the handshake has finished.
    pub fn established(&self) {
        self.entry.is_established.store(true, Ordering::Relaxed);
    }

    /// Completes when the connection must close.
    pub async fn called_off(&self) {
        self.entry.called_off.notified().await;
    }

    /// Returns what orders the connection to close if it is notified.
    pub fn closer(&self) -> Arc<Notify> {
        Arc::clone(&self.entry.called_off)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.connections.table.lock().open.remove(&self.number);
        self.entry.ended.notify_one();
    }
}

//----------- Clients --------------------------------------------------------

/// `SOCK_DIAG_BY_FAMILY` (linux/sock_diag.h).
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// Size of `nlmsghdr` in bytes.
const HEADER: usize = 16;
/// Offset of `idiag_uid` in an `inet_diag_msg` (linux/inet_diag.h): four bytes of family, state,
/// timer and retransmissions, the socket's id of 48 bytes, expiry and two queues.
const UID: usize = 4 + 48 + 12;
/// Maximum length of the reply in bytes, of which only the first part is read.
const MAX_REPLY: usize = 512;
/// Time limit for the reply of the kernel, which normally arrives within the call.
const TIMEOUT: Duration = Duration::from_millis(100);

/// Identity of a peer before it has presented a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Peer {
    /// User id of a local process.
    User(u32),
    /// IPv4 address, or the /64 network of an IPv6 address, which one host may fill.
    Network(Client),
}

impl Peer {
    /// Returns the peer at `client` of a connection to `server`. Only peers on the loopback interface are
    /// looked up by user.
    pub fn of(client: SocketAddr, server: Option<SocketAddr>) -> Self {
        // The socket may be closed already; then the peer counts by its address.
        if let Some(server) = server
            && client.ip().to_canonical().is_loopback()
            && let Ok(user) = uid_of(client, server)
        {
            return Self::User(user);
        }
        Self::Network(client_of(client.ip()))
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(user) => write!(f, "user {user}"),
            Self::Network(IpAddr::V6(network)) if !network.is_unicast_link_local() => {
                write!(f, "{network}/64")
            }
            Self::Network(address) => write!(f, "{address}"),
        }
    }
}

/// Returns the owner of the socket bound to `local` and connected to `remote`, in this network
/// namespace (sock_diag(7)). Needs no privilege.
fn uid_of(local: SocketAddr, remote: SocketAddr) -> io::Result<u32> {
    let protocol = Protocol::from(libc::NETLINK_SOCK_DIAG);
    let mut socket = Socket::new(Domain::from(libc::AF_NETLINK), Type::RAW, Some(protocol))?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    socket.write_all(&request(local, remote))?;
    let mut reply = [0; MAX_REPLY];
    let length = socket.read(&mut reply)?;
    let reply = &reply[..length];
    // Any other kind is NLMSG_ERROR: the socket is closed.
    if reply.get(4..6) == Some(&SOCK_DIAG_BY_FAMILY.to_ne_bytes()[..])
        && let Some(rest) = reply.get(HEADER + UID..)
        && let Some(uid) = rest.first_chunk()
    {
        return Ok(u32::from_ne_bytes(*uid));
    }
    Err(io::ErrorKind::NotFound.into())
}

/// Builds an `inet_diag_req_v2` for exactly this socket, with its `nlmsghdr`.
fn request(local: SocketAddr, remote: SocketAddr) -> Vec<u8> {
    let family = if local.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    } as u8;
    let mut message = Vec::with_capacity(72);
    message.extend_from_slice(&72u32.to_ne_bytes());
    message.extend_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    message.extend_from_slice(&(libc::NLM_F_REQUEST as u16).to_ne_bytes());
    // Sequence number and port id.
    message.extend_from_slice(&[0; 8]);
    message.extend_from_slice(&[family, libc::IPPROTO_TCP as u8, 0, 0]);
    // Any TCP state.
    message.extend_from_slice(&u32::MAX.to_ne_bytes());
    message.extend_from_slice(&local.port().to_be_bytes());
    message.extend_from_slice(&remote.port().to_be_bytes());
    for address in [local.ip(), remote.ip()] {
        let mut field = [0; 16];
        match address {
            IpAddr::V4(address) => field[..4].copy_from_slice(&address.octets()),
            IpAddr::V6(address) => field = address.octets(),
        }
        message.extend_from_slice(&field);
    }
    // Any interface; INET_DIAG_NOCOOKIE.
    message.extend_from_slice(&[0; 4]);
    message.extend_from_slice(&[0xff; 8]);
    message
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use futures_util::FutureExt;

    use super::*;

    /// Returns a client with a distinct port.
    fn client(last: u8, port: u16) -> SocketAddr {
        ([192, 0, 2, last], port).into()
    }

    /// Returns which of these connections were ordered to close. Each order can be read only once.
    fn called_off(places: &[Place]) -> Vec<usize> {
        (0..places.len())
            .filter(|&at| places[at].called_off().now_or_never().is_some())
            .collect()
    }

    #[test]
    fn heaviest_client_loses_idlest_connection() {
        let connections = Connections::new(8, OwnConnections::default());
        let enter = |last, port| connections.enter(client(last, port)).0;
        // The share of a client is two connections.
        let mut places: Vec<Place> = (0..8)
            .map(|number| enter(number / 2, number.into()))
            .collect();
        assert_eq!(called_off(&places), [] as [usize; 0]);
        places[0].entry.active.store(9, Ordering::Relaxed);
        let (place, leaving) = connections.enter(client(0, 8));
        places.push(place);
        assert_eq!(
            called_off(&places),
            [1],
            "of the same client, not the one that asked last"
        );
        let mut ended = std::pin::pin!(leaving.unwrap().ended());
        assert!(ended.as_mut().now_or_never().is_none());
        places.remove(1);
        assert!(ended.now_or_never().is_some());
        places.push(enter(7, 9));
        let gone = called_off(&places);
        assert!(gone.len() == 1 && gone != [8], "{gone:?}");
        drop(places);
        assert!(connections.table.lock().open.is_empty());
    }

    #[test]
    fn peer_with_most_connections_gives_way() {
        let connections = Connections::without_shares(4);
        let mut places = Vec::new();
        for (user, expected) in [
            (1, None),
            (2, None),
            (2, None),
            (2, None),
            (3, Some(Peer::User(2))),
            (3, Some(Peer::User(2))),
            // With the new one, its own peer has the most.
            (3, Some(Peer::User(3))),
        ] {
            let (place, leaving) = connections.enter_handshake(Peer::User(user));
            place.established();
            places.push(place);
            assert_eq!(leaving.map(|leaving| leaving.peer()), expected, "{user}");
        }
        // Each time the oldest one.
        assert_eq!(called_off(&places), [1, 2, 4]);
        // Among peers with one connection each, the oldest gives way.
        let connections = Connections::without_shares(2);
        let places = [1, 2, 3].map(|user| connections.enter_handshake(Peer::User(user)).0);
        assert_eq!(called_off(&places), [0]);
        drop(places);
        assert!(connections.table.lock().open.is_empty());
    }

    #[test]
    fn old_unfinished_handshakes_give_way() {
        // Whether each connection is established, whether it is old, and the one that gives way.
        for (table, expected) in [
            ([(true, true), (false, true)], 1),
            ([(true, true), (false, false)], 0),
            ([(true, false), (false, false)], 0),
            ([(false, false), (true, false)], 0),
            ([(true, true), (true, true)], 0),
            ([(false, true), (false, true)], 0),
        ] {
            let connections = Arc::new(Connections {
                limit: 2,
                limit_per_client: 2,
                own: OwnConnections::default(),
                since: Instant::now() - HANDSHAKE_GRACE,
                table: Mutex::default(),
            });
            let mut places = Vec::new();
            for (is_established, is_old) in table {
                let (place, leaving) = connections.enter_handshake(Peer::User(1));
                assert!(leaving.is_none());
                if is_established {
                    place.established();
                }
                // However slow this machine is, the others are not old.
                let begun = if is_old { 0 } else { u64::MAX };
                place.entry.active.store(begun, Ordering::Relaxed);
                places.push(place);
            }
            places.push(connections.enter_handshake(Peer::User(1)).0);
            assert_eq!(called_off(&places), [expected], "{table:?}");
        }
    }

    #[test]
    fn own_connections_do_not_count() {
        let own = OwnConnections::default();
        let connections = Connections::new(1, own.clone());
        let guard = own.enter(client(1, 1));
        let ours = connections.enter(client(1, 1)).0;
        let theirs: Vec<Place> = (2..5)
            .map(|port| connections.enter(client(1, port)).0)
            .collect();
        assert_eq!(called_off(&[ours]), [] as [usize; 0]);
        assert_eq!(called_off(&theirs), [0, 1]);
        drop(guard);
        assert!(!own.contains(client(1, 1)));
    }

    #[test]
    fn local_peer_has_a_user() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            if address.starts_with('[') && !test_support::requirements::ipv6() {
                continue;
            }
            let listener = TcpListener::bind(address).unwrap();
            let server = listener.local_addr().unwrap();
            let _client = TcpStream::connect(server).unwrap();
            let (_stream, client) = listener.accept().unwrap();
            assert_eq!(
                Peer::of(client, Some(server)),
                Peer::User(nix::unistd::getuid().as_raw())
            );
        }
        let unused = SocketAddr::from(([127, 0, 0, 1], 1));
        assert_eq!(Peer::of(unused, Some(unused)), Peer::Network(unused.ip()));
    }

    #[test]
    fn ipv6_hosts_count_by_network() {
        let peer = |text: &str| Peer::of(SocketAddr::new(text.parse().unwrap(), 1), None);
        assert_eq!(peer("2001:db8::1"), peer("2001:db8::2:3"));
        assert_ne!(peer("2001:db8::1"), peer("2001:db8:0:1::1"));
        assert_ne!(peer("fe80::1"), peer("fe80::2"));
        assert_eq!(peer("::ffff:192.0.2.1"), peer("192.0.2.1"));
        assert_eq!(peer("2001:db8::1").to_string(), "2001:db8::/64");
    }

    #[test]
    fn peers_are_users_or_networks() {
        let network = |address: &str| Peer::of(SocketAddr::new(address.parse().unwrap(), 9), None);
        for (address, shown) in [
            ("192.0.2.7", "192.0.2.7"),
            ("::ffff:192.0.2.7", "192.0.2.7"),
            ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
            ("127.0.0.1", "127.0.0.1"),
            ("fe80::7", "fe80::7"),
        ] {
            assert_eq!(network(address).to_string(), shown);
        }
        assert_eq!(Peer::User(7).to_string(), "user 7");
        let [local, remote]: [SocketAddr; 2] =
            ["10.0.0.1:258", "10.0.0.2:772"].map(|text| text.parse().unwrap());
        let message = request(local, remote);
        assert_eq!(
            (message.len(), message[16], message[17]),
            (72, libc::AF_INET as u8, 6)
        );
        assert_eq!(message[24..28], [1, 2, 3, 4]);
        assert_eq!(
            (&message[28..32], &message[44..48]),
            (&[10, 0, 0, 1][..], &[10, 0, 0, 2][..])
        );
        let message = request("[::1]:258".parse().unwrap(), "[::2]:772".parse().unwrap());
        assert_eq!(
            (message[16], message[43], message[59]),
            (libc::AF_INET6 as u8, 1, 2)
        );
    }

    #[test]
    fn clients_get_quarter_of_limit() {
        let connections = Connections::new(8, OwnConnections::default());
        assert_eq!(connections.limit(), 8);
        let mut places = Vec::new();
        for (last, port, expected) in [
            (1, 1, None),
            (1, 2, None),
            // The third one of a client closes the idlest of its own.
            (1, 3, Some(0)),
            (2, 4, None),
            (1, 5, Some(1)),
        ] {
            let (place, leaving) = connections.enter(client(last, port));
            places.push(place);
            let closed = called_off(&places);
            assert_eq!(closed, Vec::from_iter(expected), "{port}");
            assert_eq!(leaving.is_some(), expected.is_some(), "{port}");
        }
        assert_eq!(connections.table.lock().open.len(), 3);
    }

    #[test]
    fn oldest_query_marks_idlest_connection() {
        let connections = Arc::new(Connections {
            limit: 8,
            limit_per_client: 2,
            own: OwnConnections::default(),
            since: Instant::now() - Duration::from_secs(5),
            table: Mutex::default(),
        });
        let own = connections.own.enter(client(9, 9));
        let mut places = Vec::new();
        for (last, port, active) in [(9, 9, 0), (1, 1, 30), (2, 2, 20), (3, 3, 40)] {
            let (place, _) = connections.enter(client(last, port));
            // Since the start of the clock.
            assert!(place.entry.active.load(Ordering::Relaxed) >= 5_000);
            place.entry.active.store(active, Ordering::Relaxed);
            places.push(place);
        }
        // A query makes it the busiest one.
        places[2].touch();
        assert!(places[2].entry.active.load(Ordering::Relaxed) >= 5_000);
        let mut closed = Vec::new();
        for _ in 0..3 {
            assert!(connections.call_off_idlest().is_some());
            closed.extend(called_off(&places));
        }
        assert_eq!(closed, [1, 3, 2]);
        // The server's own is never closed.
        assert!(connections.call_off_idlest().is_none());
        drop(own);
    }

    #[test]
    fn client_loses_own_idlest_connection() {
        let connections = Connections::new(8, OwnConnections::default());
        let mut places = Vec::new();
        for (last, port, active) in [(1, 1, 10), (2, 2, 40), (2, 3, 30), (1, 4, 20)] {
            let (place, _) = connections.enter(client(last, port));
            place.entry.active.store(active, Ordering::Relaxed);
            places.push(place);
        }
        places.push(connections.enter(client(2, 5)).0);
        assert_eq!(called_off(&places), [2]);
    }

    /// The owner of a socket is not always the user of this process.
    #[test]
    fn socket_owner_is_local_peer() {
        if !test_support::requirements::root() {
            return;
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = listener.local_addr().unwrap();
        let connected = TcpStream::connect(server).unwrap();
        std::os::unix::fs::fchown(&connected, Some(65_534), None).unwrap();
        let client = connected.local_addr().unwrap();
        assert_eq!(Peer::of(client, Some(server)), Peer::User(65_534));
        assert_eq!(Peer::of(client, None), Peer::Network(client.ip()));
    }
}
