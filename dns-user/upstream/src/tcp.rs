//! Queries one address over TCP, on persistent connections with many queries each (RFC 7766), and over
//! TLS in the same way (RFC 7858).
//!
//! A query uses an idle connection, or a new one while there are few, or else the one with the
//! fewest queries. Unneeded connections become idle and are closed, so the pool follows its use,
//! and one port serves many queries.

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
use hyper_rustls::ConfigBuilderExt as _;
use parking_lot::Mutex;
use rustls::{ClientConfig, crypto::ring};
use rustls_pki_types::ServerName;
use smallvec::SmallVec;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
    sync::{mpsc, oneshot},
};
use tokio_rustls::TlsConnector;

use crate::{
    TryError, message,
    udp::{Matching, ReplyMatch, match_reply},
};
use dns_kit::{logs::LineLimit, tls::ServerVerifier};

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
        let impossible = || ServerName::IpAddress(IpAddr::from(Ipv4Addr::UNSPECIFIED).into());
        let name =
            name.map(|name| ServerName::try_from(name.to_owned()).unwrap_or_else(|_| impossible()));
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

/// A connection, served by a separate task.
#[derive(Debug)]
struct Connection {
    /// Passes framed queries to the task.
    frames: mpsc::UnboundedSender<Vec<u8>>,
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
            let connection = self.open();
            let reply = connection
                .exchange(query, question)
                .await
                .map_err(|unanswered| unanswered.error)?;
            self.pool.lock().open.push(connection);
            Ok(reply)
        };
        tokio::time::timeout(self.timeout, exchange)
            .await
            .unwrap_or(Err(TryError::TimedOut))
    }

    /// Selects the connection for a query; `None` if all have the maximum number of queries.
    fn choose(&self) -> Option<Arc<Connection>> {
        if !self.persistent {
            return Some(self.open());
        }
        let mut pool = self.pool.lock();
        pool.open.retain(|connection| connection.takes_queries());
        let most = match pool.cut_off {
            Some(last) if last.elapsed() < UNSHARED => 1,
            _ => MAX_PIPELINED,
        };
        let least = pool
            .open
            .iter()
            .map(|connection| (connection.load(), connection))
            .min_by_key(|(load, _)| *load);
        match least {
            Some((0, connection)) => return Some(Arc::clone(connection)),
            Some((load, connection)) if pool.open.len() >= FEW && load < most => {
                return Some(Arc::clone(connection));
            }
            _ if pool.open.len() >= MAX_CONNECTIONS => return None,
            _ => {}
        }
        let connection = self.open();
        pool.open.push(Arc::clone(&connection));
        Some(connection)
    }

    fn open(&self) -> Arc<Connection> {
        let (frames, queue) = mpsc::unbounded_channel();
        let connection = Arc::new(Connection {
            frames,
            pending: Mutex::default(),
        });
        let (served, pool) = (Arc::clone(&connection), Arc::clone(&self.pool));
        let (address, matching, tls) = (self.address, self.matching, self.tls.clone());
        tokio::spawn(async move {
            let ended = served.serve(address, tls.as_deref(), matching, queue).await;
            // The task ends without an error only when idle.
            let error = ended.err().unwrap_or(TryError::Closed);
            if served.end(error) {
                pool.lock().cut_off = Some(Instant::now());
            }
        });
        connection
    }
}

impl Connection {
    /// Sends a query and waits for its reply, without a time limit.
    async fn exchange(
        &self,
        query: &mut [u8],
        question: Range<usize>,
    ) -> Result<Vec<u8>, Unanswered> {
        let alone = |error: TryError| Unanswered {
            error,
            shared: false,
        };
        let question = query.get(question).ok_or(alone(TryError::Unreadable))?;
        let length = u16::try_from(query.len()).map_err(|_| alone(TryError::Unreadable))?;
        let (sender, receiver) = oneshot::channel();
        let id = self.enter(Waiting {
            question: SmallVec::from_slice(question),
            sender,
        })?;
        message::set_id(query, id);
        // If the task has ended, `receiver` fails.
        let _ = self
            .frames
            .send([&length.to_be_bytes()[..], query].concat());
        receiver.await.unwrap_or(Err(Unanswered {
            error: TryError::Closed,
            shared: true,
        }))
    }

    /// Registers a query under a free random id.
    fn enter(&self, waiting: Waiting) -> Result<u16, Unanswered> {
        let mut pending = self.pending.lock();
        if pending.ended {
            return Err(Unanswered {
                error: TryError::Closed,
                shared: true,
            });
        }
        let id = loop {
            let id = rand::random();
            if !pending.waiting.contains_key(&id) {
                break id;
            }
        };
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
        self.pending
            .lock()
            .waiting
            .values()
            .filter(|waiting| !waiting.sender.is_closed())
            .count()
    }

    /// Connects, then sends queries and delivers replies until the connection is closed or has been
    /// idle for too long.
    async fn serve(
        &self,
        address: SocketAddr,
        tls: Option<&Tls>,
        matching: Matching,
        queue: mpsc::UnboundedReceiver<Vec<u8>>,
    ) -> Result<(), TryError> {
        let stream = TcpStream::connect(address).await?;
        let _ = stream.set_nodelay(true);
        let Some(Tls { config, name }) = tls else {
            let (reader, writer) = stream.into_split();
            return self
                .converse(reader, writer, MAX_IDLE, matching, queue)
                .await;
        };
        let name = name
            .clone()
            .unwrap_or(ServerName::IpAddress(address.ip().into()));
        let stream = TlsConnector::from(Arc::clone(config)).connect(name, stream).await.map_err(|error| {
            static LIMIT: LineLimit = LineLimit::new();
            if let Some(suppressed) = LIMIT.admit(address.ip()) {
                tracing::warn!(recursor = %address, %error, suppressed, "TLS handshake with a recursor failed");
            }
            TryError::Tls
        })?;
        let (reader, writer) = tokio::io::split(stream);
        self.converse(reader, writer, MAX_IDLE_TLS, matching, queue)
            .await
    }

    async fn converse(
        &self,
        reader: impl AsyncRead + Unpin,
        writer: impl AsyncWrite + Unpin,
        max_idle: Duration,
        matching: Matching,
        queue: mpsc::UnboundedReceiver<Vec<u8>>,
    ) -> Result<(), TryError> {
        let ended = tokio::select! {
            ended = self.read(reader, max_idle, matching) => ended,
            ended = write(writer, queue) => ended,
        };
        Ok(ended?)
    }

    async fn read(
        &self,
        mut reader: impl AsyncRead + Unpin,
        max_idle: Duration,
        matching: Matching,
    ) -> io::Result<()> {
        let mut input = BytesMut::new();
        loop {
            match tokio::time::timeout(max_idle, reader.read_buf(&mut input)).await {
                Ok(Ok(0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => drop(read?),
                Err(_) if self.end_if_idle() => return Ok(()),
                Err(_) => {}
            }
            while let Some(length) = input.first_chunk::<2>() {
                let length = usize::from(u16::from_be_bytes(*length));
                if input.len() < 2 + length {
                    break;
                }
                input.advance(2);
                self.deliver(&input.split_to(length), matching)?;
            }
        }
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
            ReplyMatch::Unreadable | ReplyMatch::CutShort => Err(TryError::Unreadable),
            ReplyMatch::OtherQuestion | ReplyMatch::NoReply => Err(TryError::WrongReply),
        };
        // The client may be gone.
        let _ = sender.send(outcome.map_err(|error| Unanswered {
            error,
            shared: false,
        }));
        Ok(())
    }

    /// Ends the connection if no query waits for a reply.
    fn end_if_idle(&self) -> bool {
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
        let (uses, left) = (pending.uses, pending.waiting.len() as u64);
        let shared = uses > 1 && matches!(error, TryError::Closed | TryError::Reset);
        let mut unanswered = false;
        for (_, waiting) in pending.waiting.drain() {
            unanswered |= waiting
                .sender
                .send(Err(Unanswered { error, shared }))
                .is_ok();
        }
        unanswered && left < uses
    }
}

async fn write(
    mut writer: impl AsyncWrite + Unpin,
    mut queue: mpsc::UnboundedReceiver<Vec<u8>>,
) -> io::Result<()> {
    while let Some(frame) = queue.recv().await {
        writer.write_all(&frame).await?;
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
        let provider = Arc::new(ring::default_provider());
        let builder = || {
            ClientConfig::builder_with_provider(Arc::clone(&provider))
                .with_safe_default_protocol_versions()
                .expect("ring supports the TLS versions that rustls takes by default")
        };
        let checked_by = |verifier: ServerVerifier| {
            builder()
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(verifier))
                .with_no_client_auth()
        };
        match self {
            Self::System => match builder().with_native_roots() {
                Ok(builder) => builder.with_no_client_auth(),
                Err(error) => {
                    tracing::warn!(%error, "cannot read the system's CA certificates; using Mozilla's");
                    builder().with_webpki_roots().with_no_client_auth()
                }
            },
            Self::File(path) => checked_by(ServerVerifier::of_file(path)),
            Self::Anyone => checked_by(ServerVerifier::unverified()),
        }
    }
}
