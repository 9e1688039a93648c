//! Connections to one agent at a time: a limited number, either HTTP/1.1 with one request each or
//! HTTP/2 with many; TLS is configured from files that may change.

use std::{
    collections::HashMap,
    fmt, io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::anyhow;
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt as _, Empty};
use hyper::{
    Request, Response,
    body::Incoming,
    client::conn::{http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::Mutex;
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use tokio_rustls::TlsConnector;

use dns_consul::config::{ApiAddress, HttpApi};
use dns_kit::{
    files::{FileStamp, Reading},
    tls,
};
use dns_upstream::{HostName, HostNames};

/// Timeout of connecting, including TLS.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of the first address lookup for a host name, in which connecting waits.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(4);
/// Timeout of a pause within a body.
const BODY_SILENCE: Duration = Duration::from_secs(10);
/// Timeout of a whole body.
const BODY_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum size of a body in bytes.
const MAX_BODY: usize = 256 << 20;
/// Maximum number of concurrent requests on an HTTP/2 connection; servers accept at least 250.
const MAX_STREAMS: usize = 100;
/// Timeout until a connection is ready for its next request.
const READY_TIMEOUT: Duration = Duration::from_millis(200);
/// Ping interval of a silent HTTP/2 connection.
const KEEP_ALIVE: Duration = Duration::from_secs(20);

/// Reason why a request got no response.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectionError {
    /// The agent could not be reached at all.
    #[error("{0}")]
    Unreachable(String),
    /// The connection broke, or the response is not HTTP.
    #[error("{0}")]
    Http(#[from] hyper::Error),
    #[error("no request: {0}")]
    Request(#[from] hyper::http::Error),
    /// The head of the response is late.
    #[error("no answer within {0:?}")]
    Silent(Duration),
    #[error("the response ended prematurely")]
    BodyStopped,
    #[error("the response is longer than {} MiB", MAX_BODY >> 20)]
    TooLarge,
}

/// All connections to the agents, at most as many as there are permits.
#[derive(Debug)]
pub(crate) struct Connections {
    tls: Tls,
    /// Host names of the agents, each resolved in the background.
    hosts: HashMap<String, Arc<HostName>>,
    /// One permit for each HTTP/1.1 connection with a pending request.
    permits: Arc<Semaphore>,
    /// Idle HTTP/1.1 connections.
    idle: Mutex<Vec<(ApiAddress, http1::SendRequest<Empty<Bytes>>)>>,
    /// HTTP/2 connections. The lock is held while connecting, so that concurrent requests share one
    /// new connection.
    shared: tokio::sync::Mutex<Vec<Shared>>,
    /// Whether the agent accepted HTTP/2.
    multiplexes: AtomicBool,
    open: Token,
}

#[derive(Debug)]
struct Shared {
    address: ApiAddress,
    sender: http2::SendRequest<Empty<Bytes>>,
    streams: Token,
}

/// A clone of a counter, which counts for as long as it lives.
type Token = Arc<()>;

fn clones(counter: &Token) -> usize {
    Arc::strong_count(counter) - 1
}

/// A connection, or a share of one, for a single request.
enum Lease {
    /// An HTTP/1.1 connection.
    Own(http1::SendRequest<Empty<Bytes>>, OwnedSemaphorePermit),
    /// A stream of an HTTP/2 connection.
    Part(http2::SendRequest<Empty<Bytes>>, Token),
}

impl Connections {
    /// Creates the pool without opening a connection. Starts resolving the agents' host names,
    /// which requires a tokio runtime.
    pub(crate) fn new(api: &HttpApi, names: &Arc<HostNames>) -> Self {
        let hosts = api
            .addresses
            .iter()
            .map(|address| (address.host.clone(), names.follow(&address.host)));
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

    pub(crate) fn open(&self) -> usize {
        clones(&self.open)
    }

    /// Returns whether requests share connections, as far as known.
    pub(crate) fn multiplexes(&self) -> bool {
        self.multiplexes.load(Ordering::Relaxed)
    }

    /// Sends a GET request for `path` to an agent. The head of the response must arrive within `limit`.
    pub(crate) async fn get(
        &self,
        address: &ApiAddress,
        path: &str,
        token: Option<&str>,
        limit: Duration,
    ) -> Result<Response<Bytes>, ConnectionError> {
        let lease = self.lease(address).await?;
        // HTTP/2 takes scheme and host from the URL, HTTP/1.1 the host from a header.
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
                let answer = read(sender.send_request(request), limit).await?;
                // Not after a response that ends the connection.
                if matches!(timeout(READY_TIMEOUT, sender.ready()).await, Ok(Ok(()))) {
                    self.idle.lock().push((address.clone(), sender));
                }
                // After the connection is idle again, so that the next request finds it.
                drop(permit);
                Ok(answer)
            }
            Lease::Part(mut sender, counted) => {
                let answer = read(sender.send_request(request), limit).await;
                drop(counted);
                answer
            }
        }
    }

    /// Returns a connection for one request, opening one if necessary.
    async fn lease(&self, address: &ApiAddress) -> Result<Lease, ConnectionError> {
        if address.tls {
            let mut shared = self.shared.lock().await;
            shared.retain(|one| one.address == *address && !one.sender.is_closed());
            if let Some(one) = shared.iter().find(|one| clones(&one.streams) < MAX_STREAMS) {
                return Ok(Lease::Part(one.sender.clone(), one.streams.clone()));
            }
            // Each shared connection counts against the limit, though it holds no permit.
            let room = self.permits.available_permits() > shared.len();
            // The first connection shows whether the agent speaks HTTP/2; only then further ones
            // are shared.
            if room && (shared.is_empty() && self.idle.lock().is_empty() || self.multiplexes()) {
                let permit = self.permit().await;
                return Ok(match self.connect(address).await? {
                    Sender::Own(sender) => Lease::Own(sender, permit),
                    Sender::Shared(sender) => {
                        self.multiplexes.store(true, Ordering::Relaxed);
                        let streams = Token::default();
                        let address = address.clone();
                        let part = Lease::Part(sender.clone(), streams.clone());
                        shared.push(Shared {
                            address,
                            sender,
                            streams,
                        });
                        part
                    }
                });
            }
        }
        let permit = self.permit().await;
        let found = {
            let mut idle = self.idle.lock();
            // Connections to other agents would only occupy the pool.
            idle.retain(|(to, sender)| to == address && !sender.is_closed());
            idle.pop()
        };
        match found {
            Some((_, sender)) => Ok(Lease::Own(sender, permit)),
            None => match self.connect(address).await? {
                Sender::Own(sender) => Ok(Lease::Own(sender, permit)),
                // The agent supports HTTP/2 by now; this connection serves one request.
                Sender::Shared(sender) => Ok(Lease::Part(sender, Token::default())),
            },
        }
    }

    /// Waits for a permit for one HTTP/1.1 request.
    async fn permit(&self) -> OwnedSemaphorePermit {
        match self.permits.clone().acquire_owned().await {
            Ok(permit) => permit,
            // The semaphore is never closed.
            Err(_) => std::future::pending().await,
        }
    }

    async fn connect(&self, address: &ApiAddress) -> Result<Sender, ConnectionError> {
        match timeout(CONNECT_TIMEOUT, self.open_connection(address)).await {
            Ok(opened) => opened,
            Err(_) => Err(unreachable(format_args!(
                "no connection within {} s",
                CONNECT_TIMEOUT.as_secs()
            ))),
        }
    }

    async fn open_connection(&self, address: &ApiAddress) -> Result<Sender, ConnectionError> {
        let Some(host) = self.hosts.get(&address.host) else {
            return Err(unknown_host(address));
        };
        let Some(ip) = host.address(LOOK_UP_TIMEOUT).await else {
            return Err(unknown_host(address));
        };
        let tcp = match TcpStream::connect((ip, address.port)).await {
            Ok(tcp) => tcp,
            Err(error) => {
                // The name may have another address by now.
                host.failed();
                return Err(cannot_connect(error));
            }
        };
        // Without it replies are only delayed.
        let _ = tcp.set_nodelay(true);
        let open = self.open.clone();
        if !address.tls {
            return one_by_one(tcp, open).await;
        }
        let config = self.tls.config().await.map_err(no_tls)?;
        let connector = TlsConnector::from(config);
        let name = self.tls.server_name(address).map_err(no_tls)?;
        let tls = connector.connect(name, tcp).await.map_err(cannot_connect)?;
        if tls.get_ref().1.alpn_protocol() != Some(b"h2") {
            return one_by_one(tls, open).await;
        }
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder
            // Blocking queries are silent for minutes: only pings notice a peer that is gone.
            .timer(TokioTimer::new())
            .keep_alive_interval(KEEP_ALIVE)
            .keep_alive_while_idle(true);
        let (sender, connection) = builder.handshake(TokioIo::new(tls)).await?;
        tokio::spawn(async move {
            // Pending requests report the error themselves.
            let _ = connection.await;
            drop(open);
        });
        Ok(Sender::Shared(sender))
    }
}

fn unreachable(why: fmt::Arguments<'_>) -> ConnectionError {
    ConnectionError::Unreachable(why.to_string())
}

fn unknown_host(address: &ApiAddress) -> ConnectionError {
    unreachable(format_args!("the host name {} is not known", address.host))
}

fn cannot_connect(error: io::Error) -> ConnectionError {
    unreachable(format_args!("cannot connect: {error}"))
}

fn no_tls(error: anyhow::Error) -> ConnectionError {
    unreachable(format_args!("no TLS: {error}"))
}

/// Protocol of a new connection.
enum Sender {
    /// HTTP/1.1: one request at a time.
    Own(http1::SendRequest<Empty<Bytes>>),
    /// HTTP/2: concurrent requests.
    Shared(http2::SendRequest<Empty<Bytes>>),
}

/// Starts HTTP/1.1 on an established stream.
async fn one_by_one<S>(stream: S, open: Token) -> Result<Sender, ConnectionError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(async move {
        // The pending request reports the error itself.
        let _ = connection.await;
        drop(open);
    });
    Ok(Sender::Own(sender))
}

async fn read(
    sending: impl Future<Output = Result<Response<Incoming>, hyper::Error>>,
    limit: Duration,
) -> Result<Response<Bytes>, ConnectionError> {
    let response = timeout(limit, sending)
        .await
        .map_err(|_| ConnectionError::Silent(limit))??;
    let (head, mut body) = response.into_parts();
    let whole = async {
        let mut bytes = BytesMut::new();
        while let Some(frame) = timeout(BODY_SILENCE, body.frame())
            .await
            .map_err(|_| ConnectionError::BodyStopped)?
        {
            if let Ok(data) = frame?.into_data() {
                append(&mut bytes, &data, MAX_BODY)?;
            }
        }
        Ok::<_, ConnectionError>(bytes.freeze())
    };
    let body = timeout(BODY_TIMEOUT, whole)
        .await
        .map_err(|_| ConnectionError::BodyStopped)??;
    Ok(Response::from_parts(head, body))
}

/// Appends a part of a body, which may have at most `max` bytes.
fn append(body: &mut BytesMut, data: &[u8], max: usize) -> Result<(), ConnectionError> {
    // The length that a response states may be wrong or missing.
    if body.len() + data.len() > max {
        return Err(ConnectionError::TooLarge);
    }
    body.extend_from_slice(data);
    Ok(())
}

//----------- TLS ------------------------------------------------------------

/// Builds the TLS configuration and keeps it until the files change.
#[derive(Debug)]
pub(crate) struct Tls {
    api: HttpApi,
    made: tokio::sync::Mutex<MadeTls>,
}

#[derive(Debug, Default)]
struct MadeTls {
    /// Last configuration, with the stamps of its files.
    last: Option<Stamped>,
    reading: Reading<anyhow::Result<Stamped>>,
}

type Stamped = (Stamps, Arc<ClientConfig>);

/// Stamps of the files; `None` for a missing one, which is noticed when it appears.
type Stamps = Vec<Option<FileStamp>>;

impl Tls {
    /// Stores the file names; the files are read with the first connection.
    pub(crate) fn new(api: &HttpApi) -> Self {
        Self {
            api: api.clone(),
            made: tokio::sync::Mutex::default(),
        }
    }

    /// Returns the current configuration; the last one while its files cannot be reached.
    pub(crate) async fn config(&self) -> anyhow::Result<Arc<ClientConfig>> {
        let mut made = self.made.lock().await;
        let MadeTls { last, reading } = &mut *made;
        let api = self.api.clone();
        let before = last.clone();
        let current = match reading.result(move || current(&api, before)).await {
            Ok(current) => current?,
            Err(hangs) => last.clone().ok_or(hangs)?,
        };
        let (_, config) = last.insert(current);
        Ok(config.clone())
    }

    /// Returns the expected name in this agent's certificate.
    pub(crate) fn server_name(&self, address: &ApiAddress) -> anyhow::Result<ServerName<'static>> {
        let name = self.api.tls_server_name.as_ref().unwrap_or(&address.host);
        ServerName::try_from(name.clone())
            .map_err(|_| anyhow!("{name:?} is not a name that a certificate can contain"))
    }
}

/// Returns the configuration of the present files: `last` if it is theirs.
fn current(api: &HttpApi, last: Option<Stamped>) -> anyhow::Result<Stamped> {
    let HttpApi {
        ca_file, identity, ..
    } = api;
    let mut stamps = Stamps::new();
    stamps.extend(ca_file.as_ref().map(FileStamp::of));
    if let Some((certificate, key)) = identity {
        stamps.extend([certificate, key].map(FileStamp::of));
    }
    if let Some(last) = last
        && last.0 == stamps
    {
        return Ok(last);
    }
    let identity = identity
        .as_ref()
        .map(|(certificate, key)| (certificate.as_path(), key.as_path()));
    let mut config = tls::client_config_of_files(ca_file.as_deref(), identity)?;
    // Many blocking queries share one HTTP/2 connection.
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok((stamps, Arc::new(config)))
}

#[cfg(test)]
mod tests {
    use std::{fs, time::SystemTime};

    use super::*;

    #[test]
    fn tokens_count_their_clones() {
        let counter = Token::default();
        assert_eq!(clones(&counter), 0);
        let kept = [counter.clone(), counter.clone(), counter.clone()];
        assert_eq!(clones(&counter), 3);
        drop(kept);
        assert_eq!(clones(&counter), 0);
    }

    /// Answers one request with this header, and keeps the connection open.
    async fn agent(header: &'static str) -> ApiAddress {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            drop(listener);
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                request.push(stream.read_u8().await.unwrap());
            }
            let request = String::from_utf8(request).unwrap().to_ascii_lowercase();
            let host = format!("\r\nhost: 127.0.0.1:{port}\r\n");
            assert!(request.starts_with("get /v1/x http/1.1\r\n") && request.contains(&host));
            assert!(request.contains("\r\nx-consul-token: secret\r\n"));
            let reply = format!("HTTP/1.1 200 OK\r\n{header}content-length: 2\r\n\r\n{{}}");
            stream.write_all(reply.as_bytes()).await.unwrap();
            // Until the client closes it.
            let _ = stream.read_u8().await;
        });
        ApiAddress {
            tls: false,
            host: "127.0.0.1".to_owned(),
            port,
        }
    }

    #[tokio::test]
    async fn connections_are_kept_unless_the_agent_closes_them() {
        for (header, kept) in [
            ("connection: close\r\n", 0),
            ("connection: keep-alive\r\n", 1),
            ("", 1),
        ] {
            let address = agent(header).await;
            let api = HttpApi {
                addresses: vec![address.clone()],
                max_connections: 1,
                ..HttpApi::default()
            };
            let connections = Connections::new(&api, &Arc::default());
            assert_eq!((connections.open(), connections.multiplexes()), (0, false));
            let limit = Duration::from_secs(60);
            let reply = connections
                .get(&address, "/v1/x", Some("secret"), limit)
                .await;
            assert_eq!(&reply.unwrap().body()[..], b"{}");
            assert_eq!(connections.idle.lock().len(), kept, "{header}");
            assert_eq!(connections.permits.available_permits(), 1);
            if kept == 1 {
                assert_eq!(connections.open(), 1);
                // The agent takes no second connection.
                let again = connections.lease(&address).await;
                let Ok(Lease::Own(sender, _)) = again else {
                    panic!("no connection")
                };
                connections.idle.lock().push((address.clone(), sender));
            }
            // Connections to another agent would only occupy the pool.
            let other = agent("").await;
            let reply = connections
                .get(&other, "/v1/x", Some("secret"), limit)
                .await;
            assert!(reply.is_ok(), "{reply:?}");
            let idle: Vec<ApiAddress> = connections
                .idle
                .lock()
                .iter()
                .map(|(to, _)| to.clone())
                .collect();
            assert_eq!(idle, [other]);
            connections.multiplexes.store(true, Ordering::Relaxed);
            assert!(connections.multiplexes());
        }
    }

    #[test]
    fn errors_name_the_cause() {
        let address = ApiAddress {
            tls: false,
            host: "consul.example".to_owned(),
            port: 1,
        };
        let refused = io::Error::from(io::ErrorKind::ConnectionRefused);
        for (error, expected) in [
            (
                unknown_host(&address),
                "the host name consul.example is not known",
            ),
            (
                cannot_connect(refused),
                "cannot connect: connection refused",
            ),
            (no_tls(anyhow!("no file")), "no TLS: no file"),
            (
                ConnectionError::Silent(Duration::from_secs(15)),
                "no answer within 15s",
            ),
            (
                ConnectionError::BodyStopped,
                "the response ended prematurely",
            ),
            (
                ConnectionError::TooLarge,
                "the response is longer than 256 MiB",
            ),
        ] {
            assert_eq!(error.to_string(), expected);
        }
        assert_eq!(MAX_BODY, 268_435_456);
    }

    #[tokio::test]
    async fn unreachable_agents_are_told_apart() {
        let address = |host: &str| ApiAddress {
            tls: false,
            host: host.to_owned(),
            port: 1,
        };
        let api = HttpApi {
            addresses: vec![address("127.0.0.1")],
            ..HttpApi::default()
        };
        let connections = Connections::new(&api, &Arc::default());
        let limit = Duration::from_secs(60);
        for (host, expected) in [
            (
                "127.0.0.1",
                "cannot connect: Connection refused (os error 111)",
            ),
            ("127.0.0.2", "the host name 127.0.0.2 is not known"),
        ] {
            let error = connections.get(&address(host), "/", None, limit).await;
            let error = error.unwrap_err();
            assert!(matches!(error, ConnectionError::Unreachable(_)));
            assert_eq!(error.to_string(), expected);
        }
        assert_eq!((connections.open(), connections.idle.lock().len()), (0, 0));
        assert_eq!(connections.permits.available_permits(), 150);
    }

    #[test]
    fn certificate_must_contain_the_agents_name() {
        let name = |configured: Option<&str>, host: &str| {
            let api = HttpApi {
                tls_server_name: configured.map(str::to_owned),
                ..HttpApi::default()
            };
            let address = ApiAddress {
                tls: true,
                host: host.to_owned(),
                port: 1,
            };
            let name = Tls::new(&api).server_name(&address);
            name.map(|name| name.to_str().into_owned())
                .map_err(|error| error.to_string())
        };
        assert_eq!(
            name(None, "consul.example").as_deref(),
            Ok("consul.example")
        );
        assert_eq!(name(None, "10.0.0.1").as_deref(), Ok("10.0.0.1"));
        assert_eq!(
            name(Some("server.dc1.consul"), "10.0.0.1").as_deref(),
            Ok("server.dc1.consul")
        );
        let wrong = "\"a b\" is not a name that a certificate can contain";
        assert_eq!(name(Some("a b"), "10.0.0.1"), Err(wrong.to_owned()));
    }

    #[tokio::test]
    async fn configuration_follows_its_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let made = rcgen::generate_simple_self_signed(["consul.example".to_owned()]).unwrap();
        fs::write(path("ca"), made.cert.pem()).unwrap();
        let api = HttpApi {
            ca_file: Some(path("ca")),
            identity: Some((path("cert"), path("key"))),
            ..HttpApi::default()
        };
        let tls = Tls::new(&api);
        assert!(tls.config().await.is_err(), "two files are missing");
        fs::write(path("cert"), made.cert.pem()).unwrap();
        fs::write(path("key"), made.signing_key.serialize_pem()).unwrap();
        let first = tls.config().await.unwrap();
        assert_eq!(first.alpn_protocols, [&b"h2"[..], b"http/1.1"]);
        assert!(Arc::ptr_eq(&first, &tls.config().await.unwrap()));
        for (name, seconds) in [("ca", 1), ("cert", 2), ("key", 3)] {
            let before = tls.config().await.unwrap();
            let file = fs::File::options().write(true).open(path(name)).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
                .unwrap();
            let after = tls.config().await.unwrap();
            assert!(!Arc::ptr_eq(&before, &after), "{name}");
            assert!(Arc::ptr_eq(&after, &tls.config().await.unwrap()));
        }
        // A replacement may have the time of the file before.
        let before = tls.config().await.unwrap();
        fs::write(path("new"), made.cert.pem()).unwrap();
        let file = fs::File::options().write(true).open(path("new")).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1))
            .unwrap();
        fs::rename(path("new"), path("ca")).unwrap();
        assert!(!Arc::ptr_eq(&before, &tls.config().await.unwrap()));
        // The last one stays in use while its folder hangs.
        let before = tls.config().await.unwrap();
        let none = Tls::new(&api);
        let mut ends = Vec::new();
        for hung in [&tls, &none] {
            let (end, ended) = std::sync::mpsc::channel::<()>();
            let read = move || {
                let _ended = ended.recv();
                Err(anyhow!("ended"))
            };
            let began = hung.made.lock().await.reading.result(read).await;
            assert!(began.is_err());
            ends.push(end);
        }
        assert!(Arc::ptr_eq(&before, &tls.config().await.unwrap()));
        assert!(none.config().await.is_err());
        drop(ends);
        let (stamps, _) = current(&HttpApi::default(), None).unwrap();
        assert_eq!(stamps, []);
    }

    #[test]
    fn bodies_have_a_limit() {
        let mut body = BytesMut::new();
        assert!(append(&mut body, b"abc", 5).is_ok());
        assert!(append(&mut body, b"de", 5).is_ok());
        let error = append(&mut body, b"f", 5).unwrap_err();
        assert!(matches!(error, ConnectionError::TooLarge));
        assert_eq!(&body[..], b"abcde");
        assert!(append(&mut body, b"", 5).is_ok());
        assert!(append(&mut BytesMut::new(), b"abcdef", 5).is_err());
    }
}
