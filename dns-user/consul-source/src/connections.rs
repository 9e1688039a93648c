//! Connections to one agent at a time: a bounded number of them, HTTP/1.1 with one
//! request each, or HTTP/2 with many.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt as _, Empty};
use hyper::{
    HeaderMap, Request, Response, StatusCode,
    body::Incoming,
    client::conn::{http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::{Mutex, MutexGuard};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use tokio_rustls::TlsConnector;

use crate::tls::{Tls, TlsError};
use dns_consul::http_api::{ApiAddress, HttpApi};
use dns_upstream::{HostName, HostNames};

/// How long connecting may take, TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long connecting waits for the first address of a host name.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(4);
/// Longest silence inside a body that has begun.
const BODY_SILENCE: Duration = Duration::from_secs(10);
/// Longest time for a whole body.
const BODY_TIMEOUT: Duration = Duration::from_secs(120);
/// Largest body that is read, bytes.
const MAX_BODY: usize = 256 << 20;
/// Questions at a time on one connection of HTTP/2; servers take 250 and more.
const MAX_STREAMS: usize = 100;
/// How long a connection may take to be ready for its next question.
const READY_TIMEOUT: Duration = Duration::from_millis(200);
/// A connection of HTTP/2 that is silent is asked for a sign of life so often.
const KEEP_ALIVE: Duration = Duration::from_secs(20);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectionError {
    #[error("cannot connect: {0}")]
    Connect(std::io::Error),
    #[error("the host name {0} is not known")]
    UnknownHost(String),
    #[error("no TLS: {0}")]
    Tls(#[from] TlsError),
    /// It took too long.
    #[error("no connection within {} s", CONNECT_TIMEOUT.as_secs())]
    ConnectTimeout,
    /// The connection is cut, or what came is no HTTP.
    #[error("{0}")]
    Http(#[from] hyper::Error),
    /// The question makes no request.
    #[error("no request: {0}")]
    Request(#[from] hyper::http::Error),
    /// The head of the answer does not come.
    #[error("no answer within {0:?}")]
    Silent(Duration),
    /// The body stopped in the middle.
    #[error("the answer stopped in the middle")]
    BodyStopped,
    #[error("the answer is longer than {} MiB", MAX_BODY >> 20)]
    TooLarge,
}

impl ConnectionError {
    /// Whether the agent could not even be reached.
    pub(crate) fn is_unreachable(&self) -> bool {
        matches!(self, Self::Connect(_) | Self::UnknownHost(_) | Self::Tls(_) | Self::ConnectTimeout)
    }
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// All connections. At most as many are open as there are permits.
#[derive(Debug)]
pub(crate) struct Connections {
    tls: Tls,
    /// The hosts of the agents, each resolved in the background.
    hosts: HashMap<String, Arc<HostName>>,
    /// One for each connection of HTTP/1.1 that has a question under way.
    permits: Arc<Semaphore>,
    /// Connections of HTTP/1.1 without a question.
    idle: Mutex<Vec<(ApiAddress, http1::SendRequest<Empty<Bytes>>)>>,
    /// Connections of HTTP/2. The lock is held while one is made, so that many questions
    /// at once make one connection.
    shared: tokio::sync::Mutex<Vec<Shared>>,
    /// Whether many questions share a connection.
    multiplexes: AtomicBool,
    open: Arc<AtomicUsize>,
}

/// A connection of HTTP/2.
#[derive(Debug)]
struct Shared {
    address: ApiAddress,
    sender: http2::SendRequest<Empty<Bytes>>,
    streams: Arc<AtomicUsize>,
}

/// A way to ask one question.
enum Lease {
    /// An HTTP/1.1 connection for one request at a time.
    Own(http1::SendRequest<Empty<Bytes>>, OwnedSemaphorePermit),
    /// A part of one.
    Part(http2::SendRequest<Empty<Bytes>>, Counted),
}

/// Counts one more while it lives.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Connections {
    /// Opens none yet, and never more than the settings allow. Begins to resolve the agents' host
    /// names, which requires a tokio runtime.
    pub(crate) fn new(api: &HttpApi, names: &Arc<HostNames>) -> Self {
        let hosts = api.addresses.iter().map(|address| (address.host.clone(), names.follow(&address.host)));
        Self {
            tls: Tls::new(api),
            hosts: hosts.collect(),
            permits: Arc::new(Semaphore::new(api.max_connections)),
            idle: Mutex::default(),
            shared: tokio::sync::Mutex::default(),
            multiplexes: AtomicBool::new(false),
            open: Arc::default(),
        }
    }

    /// Connections that are open now.
    pub(crate) fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Whether many questions share a connection, as far as was seen.
    pub(crate) fn multiplexes(&self) -> bool {
        self.multiplexes.load(Ordering::Relaxed)
    }

    /// Asks `path` of an agent. The head of the answer has to come within `patience`.
    pub(crate) async fn get(
        &self,
        address: &ApiAddress,
        path: &str,
        token: Option<&str>,
        patience: Duration,
    ) -> Result<Answer, ConnectionError> {
        let lease = self.lease(address).await?;
        // HTTP/2 takes scheme and host from the address, HTTP/1.1 the host from a header.
        let target = match &lease {
            Lease::Own(..) => path.to_owned(),
            Lease::Part(..) => format!("{address}{path}"),
        };
        let mut request = Request::get(target).header("accept", "application/json");
        if let Lease::Own(..) = &lease {
            request = request.header("host", address.authority());
        }
        if let Some(token) = token {
            request = request.header("x-consul-token", token);
        }
        let request = request.body(Empty::new())?;
        match lease {
            Lease::Own(mut sender, permit) => {
                let answer = read(sender.send_request(request), patience).await?;
                let closes = answer.headers.get("connection").is_some_and(|value| value == "close");
                if !closes && matches!(timeout(READY_TIMEOUT, sender.ready()).await, Ok(Ok(()))) {
                    self.idle().push((address.clone(), sender));
                }
                drop(permit);
                Ok(answer)
            }
            Lease::Part(mut sender, counted) => {
                let answer = read(sender.send_request(request), patience).await;
                drop(counted);
                answer
            }
        }
    }

    /// A way to ask one question.
    async fn lease(&self, address: &ApiAddress) -> Result<Lease, ConnectionError> {
        if address.tls {
            let mut shared = self.shared.lock().await;
            shared.retain(|one| one.address == *address && !one.sender.is_closed());
            if let Some(one) = shared.iter().find(|one| one.streams.load(Ordering::Relaxed) < MAX_STREAMS) {
                return Ok(Lease::Part(one.sender.clone(), Counted::new(&one.streams)));
            }
            let room = self.permits.available_permits() > shared.len();
            if room && (shared.is_empty() && self.idle().is_empty() || self.multiplexes()) {
                let permit = self.permit().await;
                return Ok(match self.connect(address).await? {
                    Sender::Own(sender) => Lease::Own(sender, permit),
                    Sender::Shared(sender) => {
                        self.multiplexes.store(true, Ordering::Relaxed);
                        let streams = Arc::default();
                        let counted = Counted::new(&streams);
                        shared.push(Shared { address: address.clone(), sender: sender.clone(), streams });
                        Lease::Part(sender, counted)
                    }
                });
            }
        }
        let permit = self.permit().await;
        let found = {
            let mut idle = self.idle();
            // Those to another agent only take up places.
            idle.retain(|(to, sender)| to == address && !sender.is_closed());
            idle.pop()
        };
        match found {
            Some((_, sender)) => Ok(Lease::Own(sender, permit)),
            None => match self.connect(address).await? {
                Sender::Own(sender) => Ok(Lease::Own(sender, permit)),
                // The agent has learned HTTP/2 meanwhile: this one is used for one question.
                Sender::Shared(sender) => Ok(Lease::Part(sender, Counted::new(&Arc::default()))),
            },
        }
    }

    /// A place for one question by HTTP/1.1.
    async fn permit(&self) -> OwnedSemaphorePermit {
        match self.permits.clone().acquire_owned().await {
            Ok(permit) => permit,
            // The semaphore is never closed.
            Err(_) => std::future::pending().await,
        }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<(ApiAddress, http1::SendRequest<Empty<Bytes>>)>> {
        self.idle.lock()
    }

    async fn connect(&self, address: &ApiAddress) -> Result<Sender, ConnectionError> {
        let connecting = async {
            let unknown = || ConnectionError::UnknownHost(address.host.clone());
            let host = self.hosts.get(&address.host).ok_or_else(unknown)?;
            let ip = host.address(LOOK_UP_TIMEOUT).await.ok_or_else(unknown)?;
            let tcp = TcpStream::connect((ip, address.port)).await;
            // The name may have another address by now.
            let tcp = tcp.inspect_err(|_| host.failed()).map_err(ConnectionError::Connect)?;
            // One that cannot be set costs time, not answers.
            let _ = tcp.set_nodelay(true);
            let open = Counted::new(&self.open);
            if !address.tls {
                return one_by_one(tcp, open).await;
            }
            let connector = TlsConnector::from(self.tls.config()?);
            let tls = connector.connect(self.tls.server_name(address)?, tcp).await;
            let tls = tls.map_err(ConnectionError::Connect)?;
            if tls.get_ref().1.alpn_protocol() != Some(b"h2") {
                return one_by_one(tls, open).await;
            }
            let mut builder = http2::Builder::new(TokioExecutor::new());
            builder.timer(TokioTimer::new()).keep_alive_interval(KEEP_ALIVE).keep_alive_while_idle(true);
            let (sender, connection) = builder.handshake(TokioIo::new(tls)).await?;
            tokio::spawn(async move {
                // Its questions learn of its end.
                let _ = connection.await;
                drop(open);
            });
            Ok(Sender::Shared(sender))
        };
        timeout(CONNECT_TIMEOUT, connecting).await.map_err(|_| ConnectionError::ConnectTimeout)?
    }
}

/// Protocol of a new connection.
enum Sender {
    /// One question after the other.
    Own(http1::SendRequest<Empty<Bytes>>),
    /// Many at a time.
    Shared(http2::SendRequest<Empty<Bytes>>),
}

/// HTTP/1.1 on a connection that stands.
async fn one_by_one<S>(stream: S, open: Counted) -> Result<Sender, ConnectionError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(async move {
        // Its question learns of its end.
        let _ = connection.await;
        drop(open);
    });
    Ok(Sender::Own(sender))
}

async fn read(
    sending: impl Future<Output = Result<Response<Incoming>, hyper::Error>>,
    patience: Duration,
) -> Result<Answer, ConnectionError> {
    let response = timeout(patience, sending).await.map_err(|_| ConnectionError::Silent(patience))??;
    let (head, mut body) = response.into_parts();
    let whole = async {
        let mut bytes = BytesMut::new();
        while let Some(frame) =
            timeout(BODY_SILENCE, body.frame()).await.map_err(|_| ConnectionError::BodyStopped)?
        {
            if let Ok(data) = frame?.into_data() {
                if bytes.len() + data.len() > MAX_BODY {
                    return Err(ConnectionError::TooLarge);
                }
                bytes.extend_from_slice(&data);
            }
        }
        Ok(bytes.freeze())
    };
    let body = timeout(BODY_TIMEOUT, whole).await.map_err(|_| ConnectionError::BodyStopped)??;
    Ok(Answer { status: head.status, headers: head.headers, body })
}
