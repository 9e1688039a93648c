//! Queries one address over TCP, on persistent connections with many queries each (RFC 7766), and over
//! TLS in the same way (RFC 7858).
//!
//! A query uses an idle connection, or a new one while there are few, or else the one with the
//! fewest queries. Unneeded connections become idle and are closed, so the pool follows its use,
//! and one port serves many queries.
//!
//! Each connection has a task that owns its socket and its slot ([`crate::slots`]), so it counts until
//! its descriptor is closed. The task ends when no query can use the connection any more, when connecting
//! takes as long as a query may, or when no complete reply has come for [`MAX_IDLE`] and no query waits.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    ops::Range,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::{Buf, BytesMut};
use parking_lot::Mutex;
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use smallvec::SmallVec;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
    sync::{mpsc, oneshot},
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::{
    TryError, message,
    slots::{ConnectionLimit, ConnectionSlot},
    udp::{Matching, ReplyMatch, match_reply},
};
use dns_kit::{
    logs::LineLimit,
    tls::{self, ClientIdentity, ServerTrust, ServerVerifier},
};

/// Number of connections opened before queries share one.
const FEW: usize = 4;
/// Maximum number of connections to one recursor.
pub(crate) const MAX_CONNECTIONS: usize = 64;
/// Maximum number of queries on one connection.
pub(crate) const MAX_PIPELINED: usize = 64;
/// Time for which an idle connection is kept: shorter than servers keep it (RFC 7766, section 6.2.3
/// mentions a few seconds).
const MAX_IDLE: Duration = Duration::from_secs(4);
/// The same for a connection with TLS, which costs a handshake.
const MAX_IDLE_TLS: Duration = Duration::from_secs(20);
/// Time for which queries use separate connections after one was closed with queries unanswered:
/// some servers close a connection after each reply.
const UNSHARED: Duration = Duration::from_secs(10);

/// The TCP connections to one recursor.
#[derive(Debug)]
pub(crate) struct TcpConnections {
    address: SocketAddr,
    /// Time limit of a query, including connecting.
    timeout: Duration,
    /// How replies are matched to queries.
    matching: Matching,
    /// Whether connections serve more than one query.
    persistent: bool,
    /// TLS of the connections; `None` for plain TCP.
    tls: Option<Arc<Tls>>,
    /// Open connections, shared with their tasks.
    pool: Arc<Mutex<Pool>>,
    /// Bounds the connections whose tasks have not ended, in the pool or not.
    limit: ConnectionLimit,
}

/// TLS towards one recursor (RFC 7858). Sessions are resumed.
#[derive(Debug)]
pub(crate) struct Tls {
    config: Arc<ClientConfig>,
    /// The name in the server's certificate; `None` accepts any certificate (opportunistic privacy).
    name: Option<ServerName<'static>>,
}

impl Tls {
    /// Creates the settings for a recursor with this name in its certificate.
    pub(crate) fn new(name: Option<&str>) -> Self {
        // No certificate has the name that stands for an impossible one.
        let impossible = ServerName::IpAddress(IpAddr::from(Ipv4Addr::UNSPECIFIED).into());
        let name = name.map(|name| ServerName::try_from(name.to_owned()).unwrap_or(impossible));
        let trust = if name.is_some() {
            Trust::System
        } else {
            Trust::Anyone
        };
        Self {
            config: Arc::new(trust.client_config()),
            name,
        }
    }
}

#[derive(Debug, Default)]
struct Pool {
    /// Connections that accept queries.
    open: Vec<Arc<Connection>>,
    /// Time at which a connection was last closed with queries unanswered.
    cut_off: Option<Instant>,
}

/// The side of a connection that the pool and the waiting queries share. Once they have dropped it, its
/// task ends.
#[derive(Debug)]
struct Connection {
    /// Passes framed queries to the task, which may be unable to write; the others wait for room.
    frames: mpsc::Sender<Vec<u8>>,
    replies: Arc<Replies>,
}

/// The queries of a connection, shared with its task.
#[derive(Debug, Default)]
struct Replies {
    /// Queries that wait for replies.
    pending: Mutex<Pending>,
}

/// The queries on a connection.
#[derive(Debug, Default)]
struct Pending {
    /// Queries by id. Expired ones stay, because a late reply to them is not a wrong one.
    waiting: HashMap<u16, Waiting, foldhash::fast::RandomState>,
    uses: u64,
    /// Whether the connection accepts no more queries.
    ended: bool,
}

/// One query on a connection.
#[derive(Debug)]
struct Waiting {
    /// The question section as sent.
    question: SmallVec<[u8; 64]>,
    sender: oneshot::Sender<Result<Vec<u8>, Unanswered>>,
}

/// A query that a connection left unanswered.
#[derive(Clone, Copy, Debug)]
struct Unanswered {
    error: TryError,
    /// Whether the connection was closed and also carried other queries: the server may never have
    /// read this one.
    shared: bool,
}

impl Unanswered {
    /// A query on a connection that was closed, perhaps before the server read it.
    const CUT_OFF: Self = Self {
        error: TryError::Closed,
        shared: true,
    };

    /// Returns the failure of a query itself, which would fail on another connection as well.
    fn alone(error: TryError) -> Self {
        Self {
            error,
            shared: false,
        }
    }
}

impl TcpConnections {
    /// Creates a pool for `address`, without connections.
    pub(crate) fn new(
        address: SocketAddr,
        timeout: Duration,
        matching: Matching,
        persistent: bool,
        tls: Option<Arc<Tls>>,
    ) -> Self {
        Self {
            address,
            timeout,
            matching,
            persistent,
            tls,
            pool: Arc::default(),
            limit: ConnectionLimit::new(MAX_CONNECTIONS),
        }
    }

    /// Sends `query` with a new id and waits for its reply. If a shared connection is closed with
    /// the query unanswered, sends it once more on a new connection.
    pub(crate) async fn ask(
        &self,
        query: &mut [u8],
        question: Range<usize>,
    ) -> Result<Vec<u8>, TryError> {
        let exchange = async {
            let connection = self.choose().ok_or(TryError::Busy)?;
            let unanswered = match connection.exchange(query, question.clone()).await {
                Ok(reply) => return Ok(reply),
                Err(unanswered) => unanswered,
            };
            if !unanswered.shared {
                return Err(unanswered.error);
            }
            // Not on another open one, which the server may be about to close as well.
            let connection = self.open().ok_or(unanswered.error)?;
            let reply = connection
                .exchange(query, question)
                .await
                .map_err(|unanswered| unanswered.error)?;
            if self.persistent {
                self.pool.lock().open.push(connection);
            }
            Ok(reply)
        };
        tokio::time::timeout(self.timeout, exchange)
            .await
            .unwrap_or(Err(TryError::TimedOut))
    }

    /// Selects the connection for a query; `None` if all have the maximum number of queries, and no further
    /// one may be opened.
    fn choose(&self) -> Option<Arc<Connection>> {
        if !self.persistent {
            return self.open();
        }
        let mut pool = self.pool.lock();
        pool.open
            .retain(|connection| connection.replies.takes_queries());
        let most = match pool.cut_off {
            Some(last) if last.elapsed() < UNSHARED => 1,
            _ => MAX_PIPELINED,
        };
        let mut least: Option<(usize, &Arc<Connection>)> = None;
        for connection in &pool.open {
            let load = connection.replies.load();
            if load < most && least.is_none_or(|(least, _)| load < least) {
                least = Some((load, connection));
            }
        }
        if let Some((load, connection)) = least
            // A server may answer the queries of a connection one after the other, so they share
            // one only where some exist already.
            && (load == 0 || pool.open.len() >= FEW)
        {
            return Some(Arc::clone(connection));
        }
        let Some(connection) = self.open() else {
            // The process has too many connections: a busy one is better than an error.
            return least.map(|(_, connection)| Arc::clone(connection));
        };
        pool.open.push(Arc::clone(&connection));
        Some(connection)
    }

    /// Starts a connection; `None` if there are too many.
    fn open(&self) -> Option<Arc<Connection>> {
        let slot = self.limit.try_enter()?;
        let (frames, queue) = mpsc::channel(MAX_PIPELINED);
        let replies = Arc::<Replies>::default();
        let task = ConnectionTask {
            address: self.address,
            connect_timeout: self.timeout,
            matching: self.matching,
            tls: self.tls.clone(),
            replies: Arc::clone(&replies),
            pool: Arc::clone(&self.pool),
        };
        tokio::spawn(task.run(queue, slot));
        Some(Arc::new(Connection { frames, replies }))
    }
}

impl Connection {
    /// Sends a query and waits for its reply, without a time limit.
    async fn exchange(
        &self,
        query: &mut [u8],
        question: Range<usize>,
    ) -> Result<Vec<u8>, Unanswered> {
        let unreadable = Unanswered::alone(TryError::Unreadable);
        let question = query.get(question).ok_or(unreadable)?;
        let length = u16::try_from(query.len()).map_err(|_| unreadable)?;
        let (sender, receiver) = oneshot::channel();
        let id = self.replies.enter(Waiting {
            question: SmallVec::from_slice(question),
            sender,
        })?;
        message::set_id(query, id);
        // If the task has ended, `receiver` fails.
        let frame = [&length.to_be_bytes()[..], query].concat();
        let _ = self.frames.send(frame).await;
        receiver.await.unwrap_or(Err(Unanswered::CUT_OFF))
    }
}

/// The task of a connection.
struct ConnectionTask {
    address: SocketAddr,
    connect_timeout: Duration,
    matching: Matching,
    tls: Option<Arc<Tls>>,
    replies: Arc<Replies>,
    pool: Arc<Mutex<Pool>>,
}

impl ConnectionTask {
    /// Serves the connection to its end, then fails the queries that still wait. The slot is free once the
    /// socket is closed.
    async fn run(self, queue: mpsc::Receiver<Vec<u8>>, slot: ConnectionSlot) {
        let ended = self.serve(queue).await;
        drop(slot);
        // The task ends without an error only when idle or unused.
        let error = ended.err().unwrap_or(TryError::Closed);
        if self.replies.end(error) {
            self.pool.lock().cut_off = Some(Instant::now());
        }
    }

    /// Connects, then sends queries and delivers replies until the connection is closed, unused, or has
    /// been idle for too long.
    async fn serve(&self, queue: mpsc::Receiver<Vec<u8>>) -> Result<(), TryError> {
        // A server that accepts and then says nothing would keep the socket for good.
        let deadline = tokio::time::Instant::now() + self.connect_timeout;
        let connected = tokio::time::timeout_at(deadline, TcpStream::connect(self.address)).await;
        let stream = connected.map_err(|_| TryError::TimedOut)??;
        // Otherwise a query waits until the server has acknowledged the one before.
        let _ = stream.set_nodelay(true);
        let Some(tls) = &self.tls else {
            let (reader, writer) = stream.into_split();
            return self.converse(reader, writer, MAX_IDLE, queue).await;
        };
        let handshake = tokio::time::timeout_at(deadline, self.shake_hands(tls, stream)).await;
        let stream = handshake.map_err(|_| TryError::TimedOut)??;
        let (reader, writer) = tokio::io::split(stream);
        self.converse(reader, writer, MAX_IDLE_TLS, queue).await
    }

    async fn shake_hands(
        &self,
        tls: &Tls,
        stream: TcpStream,
    ) -> Result<TlsStream<TcpStream>, TryError> {
        let Self { address, .. } = self;
        let name = match &tls.name {
            Some(name) => name.clone(),
            // With an address, rustls sends no SNI, which may only hold a host name (RFC 6066,
            // section 3).
            None => ServerName::IpAddress(address.ip().into()),
        };
        let connector = TlsConnector::from(Arc::clone(&tls.config));
        connector.connect(name, stream).await.map_err(|error| {
            static LIMIT: LineLimit = LineLimit::new();
            if let Some(suppressed) = LIMIT.admit(address.ip()) {
                tracing::warn!(recursor = %address, %error, suppressed, "TLS handshake with a recursor failed");
            }
            TryError::Tls
        })
    }

    async fn converse(
        &self,
        reader: impl AsyncRead + Unpin,
        writer: impl AsyncWrite + Unpin,
        max_idle: Duration,
        queue: mpsc::Receiver<Vec<u8>>,
    ) -> Result<(), TryError> {
        let ended = tokio::select! {
            ended = self.read(reader, max_idle) => ended,
            ended = write(writer, queue) => ended,
        };
        Ok(ended?)
    }

    async fn read(&self, mut reader: impl AsyncRead + Unpin, max_idle: Duration) -> io::Result<()> {
        let mut input = BytesMut::new();
        // Only complete replies move it: single bytes would keep the connection for good.
        let mut idle_at = tokio::time::Instant::now() + max_idle;
        loop {
            match tokio::time::timeout_at(idle_at, reader.read_buf(&mut input)).await {
                Ok(Ok(0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => drop(read?),
                Err(_) if self.replies.end_if_idle() => return Ok(()),
                Err(_) => idle_at = tokio::time::Instant::now() + max_idle,
            }
            // At most the part of one reply stays here, which is no longer than its length says:
            // 65,535 bytes.
            while let Some(length) = input.first_chunk::<2>() {
                let length = usize::from(u16::from_be_bytes(*length));
                if input.len() < 2 + length {
                    break;
                }
                input.advance(2);
                self.replies
                    .deliver(&input.split_to(length), self.matching)?;
                idle_at = tokio::time::Instant::now() + max_idle;
            }
        }
    }
}

impl Replies {
    /// Registers a query under a free random id.
    fn enter(&self, waiting: Waiting) -> Result<u16, Unanswered> {
        let mut pending = self.pending.lock();
        if pending.ended {
            return Err(Unanswered::CUT_OFF);
        }
        let id = message::free_id(&pending.waiting);
        pending.uses += 1;
        pending.waiting.insert(id, waiting);
        Ok(id)
    }

    /// Returns whether the connection may take more queries. It may not after an unanswered query,
    /// because the server may answer sequentially.
    fn takes_queries(&self) -> bool {
        let pending = self.pending.lock();
        !pending.ended
            && !pending
                .waiting
                .values()
                .any(|waiting| waiting.sender.is_closed())
    }

    /// Returns the number of queries that wait for replies.
    fn load(&self) -> usize {
        let mut load = 0;
        for waiting in self.pending.lock().waiting.values() {
            load += usize::from(!waiting.sender.is_closed());
        }
        load
    }

    /// Delivers a reply to its query. Returns an error if there is none, because the server is not
    /// trustworthy then.
    fn deliver(&self, reply: &[u8], matching: Matching) -> io::Result<()> {
        let mut pending = self.pending.lock();
        let waiting = message::u16_at(reply, 0).and_then(|id| pending.waiting.remove(&id));
        let Some(Waiting { question, sender }) = waiting else {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                TryError::WrongReply,
            ));
        };
        let outcome = match match_reply(reply, &question, false) {
            ReplyMatch::Reply => Ok(reply.to_vec()),
            ReplyMatch::OtherQuestion if matching == Matching::Lenient => Ok(reply.to_vec()),
            // Over TCP there is room for everything.
            ReplyMatch::Unreadable | ReplyMatch::CutShort => Err(TryError::Unreadable),
            ReplyMatch::OtherQuestion | ReplyMatch::OtherLetters | ReplyMatch::NoReply => {
                Err(TryError::WrongReply)
            }
        };
        // The client may be gone.
        let _ = sender.send(outcome.map_err(Unanswered::alone));
        Ok(())
    }

    /// Ends the connection if no query waits for a reply.
    fn end_if_idle(&self) -> bool {
        // No query comes in between, because `enter` takes the same lock.
        let mut pending = self.pending.lock();
        pending.ended = pending
            .waiting
            .values()
            .all(|waiting| waiting.sender.is_closed());
        pending.ended
    }

    /// Fails all waiting queries; returns whether a reply had arrived before.
    fn end(&self, error: TryError) -> bool {
        let mut pending = self.pending.lock();
        pending.ended = true;
        let uses = pending.uses;
        let left = pending.waiting.len() as u64;
        let shared = uses > 1 && matches!(error, TryError::Closed | TryError::Reset);
        let mut unanswered = false;
        for (_, waiting) in pending.waiting.drain() {
            unanswered |= waiting
                .sender
                .send(Err(Unanswered { error, shared }))
                .is_ok();
        }
        // Without an earlier reply the server is merely gone, which says nothing about shared
        // connections.
        unanswered && left < uses
    }
}

async fn write(
    mut writer: impl AsyncWrite + Unpin,
    mut queue: mpsc::Receiver<Vec<u8>>,
) -> io::Result<()> {
    // Ends once the pool and all queries have dropped the connection.
    while let Some(frame) = queue.recv().await {
        writer.write_all(&frame).await?;
        // A TLS stream may keep what was written.
        writer.flush().await?;
    }
    Ok(())
}

//----------- Trust ----------------------------------------------------------

/// The servers that a TLS client accepts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Trust {
    /// Servers with a certificate of one of the system's CAs.
    #[default]
    System,
    /// Servers with a certificate of one of the CAs in this PEM file, which is read again when it
    /// changes.
    File(PathBuf),
    /// Any server. The connection is encrypted, but not protected from an attacker on its way.
    Anyone,
}

impl Trust {
    /// Returns the settings of a client that accepts these servers.
    pub(crate) fn client_config(&self) -> ClientConfig {
        let trust = match self {
            Self::System => ServerTrust::System,
            Self::File(path) => ServerTrust::Verifier(ServerVerifier::of_file(path)),
            Self::Anyone => ServerTrust::Verifier(ServerVerifier::unverified()),
        };
        tls::client_config(trust, ClientIdentity::Anonymous)
            .or_else(|error| {
                tracing::warn!(%error, "cannot read the system's CA certificates; using Mozilla's");
                tls::client_config(ServerTrust::Mozilla, ClientIdentity::Anonymous)
            })
            .expect("Mozilla's CAs and the TLS versions are compiled in")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns connections that are never opened, because the test leaves their tasks no time.
    fn connections() -> TcpConnections {
        let address = SocketAddr::from(([127, 0, 0, 1], 9));
        let timeout = Duration::from_secs(60);
        TcpConnections::new(address, timeout, Matching::Strict, true, None)
    }

    /// Lets a query wait for a reply; it does for as long as the receiver lives.
    fn wait_in(replies: &Replies) -> oneshot::Receiver<Result<Vec<u8>, Unanswered>> {
        let (sender, receiver) = oneshot::channel();
        let question = SmallVec::new();
        replies.enter(Waiting { question, sender }).unwrap();
        receiver
    }

    #[tokio::test]
    async fn full_connections_are_joined_by_another() {
        let connections = connections();
        let mut waiting = Vec::new();
        for query in 1..=FEW * MAX_PIPELINED + 1 {
            let connection = connections.choose().unwrap();
            waiting.push(wait_in(&connection.replies));
            let expected = match query {
                _ if query <= FEW => query,
                _ if query <= FEW * MAX_PIPELINED => FEW,
                _ => FEW + 1,
            };
            let open = connections.pool.lock().open.len();
            assert_eq!(open, expected, "query {query}");
        }
    }

    #[tokio::test]
    async fn queries_share_nothing_after_a_cut() {
        let connections = connections();
        // Later than now, so that a slow machine changes nothing.
        connections.pool.lock().cut_off = Some(Instant::now() + UNSHARED);
        let mut waiting = Vec::new();
        for query in 1..=MAX_CONNECTIONS {
            let connection = connections.choose().unwrap();
            waiting.push(wait_in(&connection.replies));
            assert_eq!(connections.pool.lock().open.len(), query);
        }
        assert!(connections.choose().is_none());
    }

    #[test]
    fn server_cuts_off_after_a_reply_only() {
        for (queries, replied, expected) in
            [(0, 0, false), (2, 0, false), (2, 1, true), (2, 2, false)]
        {
            let replies = Replies::default();
            let waiting: Vec<_> = (0..queries).map(|_| wait_in(&replies)).collect();
            let ids: Vec<u16> = replies.pending.lock().waiting.keys().copied().collect();
            for id in &ids[..replied] {
                replies.pending.lock().waiting.remove(id);
            }
            let cut = replies.end(TryError::Closed);
            assert_eq!(cut, expected, "{replied} of {queries}");
            drop(waiting);
        }
    }

    #[tokio::test]
    async fn idle_connections_end() {
        let task = ConnectionTask {
            address: SocketAddr::from(([127, 0, 0, 1], 9)),
            connect_timeout: Duration::from_secs(60),
            matching: Matching::Strict,
            tls: None,
            replies: Arc::default(),
            pool: Arc::default(),
        };
        let (reader, _silent) = tokio::io::duplex(1);
        task.read(reader, Duration::from_millis(1)).await.unwrap();
        assert!(task.replies.pending.lock().ended);
    }

    /// Returns a framed reply with this id, flags and question.
    fn frame(id: u16, flags: [u8; 2], question: &[u8]) -> Vec<u8> {
        let length = 12 + question.len() as u16;
        let mut frame = length.to_be_bytes().to_vec();
        frame.extend_from_slice(&id.to_be_bytes());
        frame.extend_from_slice(&flags);
        frame.extend_from_slice(&[0, 1, 0, 0, 0, 0, 0, 0]);
        frame.extend_from_slice(question);
        frame
    }

    const QUESTION: &[u8] = b"\x02oK\0\0\x01\0\x01";
    /// Longer than any test takes.
    const LONG: Duration = Duration::from_secs(3600);

    /// Lets a query for [`QUESTION`] wait; returns its id as well.
    fn wait_for_reply(replies: &Replies) -> (u16, oneshot::Receiver<Result<Vec<u8>, Unanswered>>) {
        let (sender, receiver) = oneshot::channel();
        let question = SmallVec::from_slice(QUESTION);
        let id = replies.enter(Waiting { question, sender }).unwrap();
        (id, receiver)
    }

    #[test]
    fn replies_are_delivered_to_their_queries() {
        let other = b"\x02ox\0\0\x01\0\x01";
        for (flags, question, strict, lenient) in [
            ([0x81, 0x80], QUESTION, None, None),
            ([0x83, 0x85], QUESTION, None, None),
            // The letters are not random over TCP.
            ([0x81, 0x80], b"\x02Ok\0\0\x01\0\x01", None, None),
            ([0x81, 0x80], other, Some(TryError::WrongReply), None),
            (
                [0x01, 0x80],
                QUESTION,
                Some(TryError::WrongReply),
                Some(TryError::WrongReply),
            ),
            (
                [0x81, 0x80],
                b"\x02o",
                Some(TryError::Unreadable),
                Some(TryError::Unreadable),
            ),
            (
                [0x83, 0x80],
                b"\x02o",
                Some(TryError::Unreadable),
                Some(TryError::Unreadable),
            ),
        ] {
            for (matching, expected) in [(Matching::Strict, strict), (Matching::Lenient, lenient)] {
                let replies = Replies::default();
                let (id, mut receiver) = wait_for_reply(&replies);
                let reply = frame(id, flags, question)[2..].to_vec();
                replies.deliver(&reply, matching).unwrap();
                let outcome = receiver.try_recv().unwrap();
                match expected {
                    None => assert_eq!(outcome.unwrap(), reply, "{flags:02x?} {question:?}"),
                    Some(error) => {
                        let unanswered = outcome.unwrap_err();
                        assert_eq!(unanswered.error, error, "{flags:02x?} {question:?}");
                        assert!(!unanswered.shared, "another connection would not help");
                    }
                }
                // Nothing waits for it any more.
                let again = replies.deliver(&reply, matching).unwrap_err();
                assert_eq!(TryError::from(again), TryError::WrongReply);
            }
        }
        let short = Replies::default().deliver(&[7], Matching::Lenient);
        assert_eq!(TryError::from(short.unwrap_err()), TryError::WrongReply);
    }

    #[test]
    fn only_waiting_queries_are_a_load() {
        let replies = Replies::default();
        assert!(replies.takes_queries());
        let (_, one) = wait_for_reply(&replies);
        let (id, another) = wait_for_reply(&replies);
        assert!(replies.takes_queries() && replies.load() == 2);
        assert!(!replies.end_if_idle() && replies.takes_queries());
        drop(one);
        // The server may answer one after the other, and be stuck.
        assert!(!replies.takes_queries() && replies.load() == 1);
        assert!(!replies.end_if_idle());
        let reply = frame(id, [0x81, 0x80], QUESTION);
        replies.deliver(&reply[2..], Matching::Strict).unwrap();
        drop(another);
        assert!(replies.load() == 0 && replies.end_if_idle());
        assert!(!replies.takes_queries());
        let (sender, _receiver) = oneshot::channel();
        let question = SmallVec::new();
        let refused = replies.enter(Waiting { question, sender }).unwrap_err();
        assert_eq!((refused.error, refused.shared), (TryError::Closed, true));
    }

    #[test]
    fn closed_shared_connections_permit_repeats() {
        for (queries, error, shared) in [
            (1, TryError::Closed, false),
            (2, TryError::Closed, true),
            (2, TryError::Reset, true),
            (2, TryError::WrongReply, false),
            (2, TryError::TimedOut, false),
        ] {
            let replies = Replies::default();
            let mut waiting: Vec<_> = (0..queries).map(|_| wait_in(&replies)).collect();
            assert!(!replies.end(error));
            for receiver in &mut waiting {
                let unanswered = receiver.try_recv().unwrap().unwrap_err();
                assert_eq!((unanswered.error, unanswered.shared), (error, shared));
            }
            assert!(!replies.takes_queries() && replies.load() == 0);
        }
        // Nobody waits for what is left.
        let replies = Replies::default();
        let (id, _receiver) = wait_for_reply(&replies);
        drop(wait_in(&replies));
        let reply = frame(id, [0x81, 0x80], QUESTION);
        replies.deliver(&reply[2..], Matching::Strict).unwrap();
        assert!(!replies.end(TryError::Closed));
    }

    fn task() -> ConnectionTask {
        ConnectionTask {
            address: SocketAddr::from(([127, 0, 0, 1], 9)),
            connect_timeout: Duration::from_secs(60),
            matching: Matching::Strict,
            tls: None,
            replies: Arc::default(),
            pool: Arc::default(),
        }
    }

    #[tokio::test]
    async fn cut_frames_are_read() {
        for size in [1, 2, 3, 7, 21, 22, 23, 44, 1000] {
            let task = task();
            let mut receivers = Vec::new();
            let mut bytes = Vec::new();
            for _ in 0..3 {
                let (id, receiver) = wait_for_reply(&task.replies);
                receivers.push(receiver);
                bytes.extend(frame(id, [0x81, 0x80], QUESTION));
            }
            // The start of another one that never comes.
            bytes.extend_from_slice(&[0, 20, 1]);
            let (reader, mut writer) = tokio::io::duplex(size);
            let send = async {
                for part in bytes.chunks(size) {
                    writer.write_all(part).await.unwrap();
                }
                drop(writer);
            };
            let (ended, ()) = tokio::join!(task.read(reader, LONG), send);
            assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
            for (receiver, expected) in receivers.into_iter().zip(bytes.chunks(22)) {
                assert_eq!(receiver.await.unwrap().unwrap(), expected[2..], "{size}");
            }
        }
    }

    #[tokio::test]
    async fn unasked_reply_ends_the_connection() {
        let task = task();
        let (id, _receiver) = wait_for_reply(&task.replies);
        let (reader, mut writer) = tokio::io::duplex(64);
        let wrong = frame(!id, [0x81, 0x80], QUESTION);
        writer.write_all(&wrong).await.unwrap();
        let ended = task.read(reader, LONG).await.unwrap_err();
        assert_eq!(TryError::from(ended), TryError::WrongReply);
    }

    #[tokio::test]
    async fn connections_are_kept_while_queries_wait() {
        let task = task();
        let (id, receiver) = wait_for_reply(&task.replies);
        let (reader, mut writer) = tokio::io::duplex(64);
        let reply = frame(id, [0x81, 0x80], QUESTION);
        let send = async {
            for part in [&reply[..1], &reply[1..]] {
                tokio::time::sleep(Duration::from_millis(5)).await;
                writer.write_all(part).await.unwrap();
            }
            let outcome = receiver.await.unwrap();
            // Kept open.
            (outcome, writer)
        };
        let idle = Duration::from_millis(1);
        let (ended, (outcome, _open)) = tokio::join!(task.read(reader, idle), send);
        assert!(ended.is_ok() && !task.replies.takes_queries());
        assert_eq!(outcome.unwrap(), reply[2..]);
    }

    #[tokio::test]
    async fn frames_are_written_on_arrival() {
        let (writer, mut reader) = tokio::io::duplex(64);
        let (frames, queue) = mpsc::channel(4);
        for frame in [b"ab".to_vec(), b"cde".to_vec()] {
            frames.send(frame).await.unwrap();
        }
        drop(frames);
        write(writer, queue).await.unwrap();
        let mut written = Vec::new();
        reader.read_to_end(&mut written).await.unwrap();
        assert_eq!(written, b"abcde");
    }

    #[tokio::test]
    async fn only_persistent_connections_are_shared() {
        let persistent = connections();
        let single = TcpConnections {
            persistent: false,
            ..connections()
        };
        let first = persistent.choose().unwrap();
        assert!(Arc::ptr_eq(&first, &persistent.choose().unwrap()), "idle");
        assert_eq!(persistent.pool.lock().open.len(), 1);
        let first = single.choose().unwrap();
        assert!(!Arc::ptr_eq(&first, &single.choose().unwrap()));
        assert_eq!(single.pool.lock().open.len(), 0);
        // A cut of long ago counts no more.
        let long_ago = Instant::now().checked_sub(UNSHARED);
        persistent.pool.lock().cut_off = long_ago;
        let mut waiting = Vec::new();
        for _ in 0..2 * FEW {
            waiting.push(wait_in(&persistent.choose().unwrap().replies));
        }
        assert_eq!(persistent.pool.lock().open.len(), FEW);
        // One that is stuck, or has ended, takes no more.
        drop(waiting.pop());
        persistent.choose().unwrap();
        let pool = persistent.pool.lock();
        assert!(pool.open.iter().all(|open| open.replies.takes_queries()));
        assert_eq!(pool.open.len(), FEW);
    }

    #[tokio::test]
    async fn overlong_queries_are_not_sent() {
        let connection = connections().choose().unwrap();
        for (length, question) in [(65_536, 12..20), (19, 12..20)] {
            let refused = connection
                .exchange(&mut vec![0; length], question)
                .await
                .unwrap_err();
            assert_eq!(refused.error, TryError::Unreadable, "{length}");
            assert!(!refused.shared);
        }
        assert_eq!(connection.replies.load(), 0);
    }

    #[test]
    fn names_of_certificates_decide_about_trust() {
        let name = |text: &str| ServerName::try_from(text.to_owned()).ok();
        assert_eq!(Tls::new(None).name, None);
        assert_eq!(Tls::new(Some("dns.example")).name, name("dns.example"));
        // No certificate has it.
        assert_eq!(Tls::new(Some("not a name")).name, name("0.0.0.0"));
    }
}
