//! A single check: `GET https://<ip>:<port>/health` over a connection that may be kept open.

use std::{
    cell::Cell,
    collections::BTreeMap,
    error::Error as _,
    io,
    net::SocketAddr,
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll},
};

use anyhow::bail;
use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::{Request, StatusCode, Uri, body::Incoming, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use serde::Serialize;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    task::AbortHandle,
};
use tokio_rustls::{
    TlsConnector,
    rustls::{self, AlertDescription},
};

use super::{HEALTH_NAME, states::InstanceHealth};
use dns_core::{config::reader::Json, resolve::HealthState};
use dns_kit::tls::TlsMaterial;

/// Maximum number of bytes that an instance may send per check, measured below TLS: a handshake, a head and
/// the longest report, with room for framing. Chunks of one byte and informational responses count as well.
const MAX_RECEIVED: usize = MAX_REPORT + (48 << 10);

/// A connection to an instance's health server, kept between checks.
#[derive(Debug)]
pub(super) struct Connection {
    sender: http1::SendRequest<Empty<Bytes>>,
    /// Drives the connection; aborted on drop.
    driver: AbortHandle,
    /// Number of bytes that the instance may still send.
    allowance: Allowance,
    /// Generation of the certificates used for the handshake.
    generation: u64,
}

/// Reasons why a check failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum CheckError {
    #[error("no connection: {0}")]
    Connect(io::Error),
    /// The handshake failed: no TLS, a different CA, or a different name.
    #[error("TLS: {0}")]
    Tls(io::Error),
    /// The instance sent a TLS alert about our certificate.
    #[error("the instance refuses the client certificate: {0}")]
    Refused(rustls::Error),
    /// The connection broke, or the response was not HTTP.
    #[error("HTTP: {0}")]
    Http(hyper::Error),
    #[error("status {0}")]
    Status(StatusCode),
    #[error("report exceeds {MAX_REPORT} bytes")]
    TooLong,
    #[error("answer: {0}")]
    Answer(anyhow::Error),
}

impl CheckError {
    /// Builds the error of a failed handshake.
    fn of_handshake(error: io::Error) -> Self {
        match alert_in(&error) {
            Some(alert) => Self::Refused(alert),
            None => Self::Tls(error),
        }
    }
}

impl From<hyper::Error> for CheckError {
    /// Under TLS 1.3 the client's handshake ends before the server has seen its certificate
    /// (RFC 8446, section 2), so a refusal arrives in place of the first response.
    fn from(error: hyper::Error) -> Self {
        let mut cause = error.source();
        while let Some(found) = cause {
            if let Some(alert) = found.downcast_ref::<io::Error>().and_then(alert_in) {
                return Self::Refused(alert);
            }
            cause = found.source();
        }
        Self::Http(error)
    }
}

/// Returns the alert about a certificate that the other side sent, if the error is one.
fn alert_in(error: &io::Error) -> Option<rustls::Error> {
    let error = error.get_ref()?.downcast_ref::<rustls::Error>()?;
    let rustls::Error::AlertReceived(alert) = error else {
        return None;
    };
    // RFC 8446, section 6.2. Go's servers, among them bosh-dns, send bad_certificate for an unknown
    // CA; a client without a certificate gets certificate_required.
    let is_about_certificate = matches!(
        alert,
        AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA
            | AlertDescription::AccessDenied
            | AlertDescription::DecryptError
            | AlertDescription::CertificateRequired
    );
    is_about_certificate.then(|| error.clone())
}

/// Sends one request. Reuses `kept` if it was opened with the current certificates and is still
/// open. Returns the answer, and the connection if it can be kept for the next check.
///
/// Applies no time limit. Must be polled inside a `LocalSet`.
pub(super) async fn check(
    address: SocketAddr,
    tls: &TlsMaterial,
    kept: Option<Connection>,
) -> (Result<InstanceHealth, CheckError>, Option<Connection>) {
    let kept = kept.filter(|kept| kept.generation == tls.generation && !kept.sender.is_closed());
    if let Some(mut connection) = kept {
        match connection.ask(address).await {
            // The instance may have closed the connection at the same moment; a second request does no harm.
            Err(CheckError::Http(_) | CheckError::Refused(_)) => {}
            Err(CheckError::TooLong) => return (Err(CheckError::TooLong), None),
            answered => return (answered, Some(connection)),
        }
    }
    let mut connection = match Connection::open(address, tls).await {
        Ok(connection) => connection,
        Err(error) => return (Err(error), None),
    };
    match connection.ask(address).await {
        Err(error @ (CheckError::Http(_) | CheckError::Refused(_) | CheckError::TooLong)) => {
            (Err(error), None)
        }
        answered => (answered, Some(connection)),
    }
}

impl Connection {
    /// Connects and performs the handshake.
    async fn open(address: SocketAddr, tls: &TlsMaterial) -> Result<Self, CheckError> {
        let tcp = TcpStream::connect(address)
            .await
            .map_err(CheckError::Connect)?;
        // Delaying a single small request gains nothing.
        let _ = tcp.set_nodelay(true);
        let name = ServerName::try_from(HEALTH_NAME).expect("the constant is a DNS name");
        let allowance = Allowance::new(Cell::new(MAX_RECEIVED));
        let limited = ReadLimit {
            inner: tcp,
            allowance: allowance.clone(),
        };
        let connector = TlsConnector::from(Arc::clone(&tls.client));
        let stream = connector
            .connect(name, limited)
            .await
            .map_err(CheckError::of_handshake)?;
        let (sender, connection) = http1::Builder::new()
            .max_buf_size(16 << 10)
            .handshake(TokioIo::new(stream))
            .await?;
        // Errors are reported by the request that they concern.
        let driver = tokio::task::spawn_local(async move { _ = connection.await }).abort_handle();
        Ok(Self {
            sender,
            driver,
            allowance,
            generation: tls.generation,
        })
    }

    async fn ask(&mut self, address: SocketAddr) -> Result<InstanceHealth, CheckError> {
        self.allowance.set(MAX_RECEIVED);
        self.sender.ready().await?;
        let mut request = Request::new(Empty::new());
        *request.uri_mut() = Uri::from_static("/health");
        let host = header::HeaderValue::try_from(address.to_string())
            .expect("addresses are visible ASCII");
        request.headers_mut().insert(header::HOST, host);
        let response = self.sender.send_request(request).await?;
        let status = response.status();
        // Read even if unused, so that the connection can be kept.
        let body = read(response.into_body()).await?;
        if status != StatusCode::OK {
            return Err(CheckError::Status(status));
        }
        parse(&body).map_err(CheckError::Answer)
    }
}

/// Reads a body of at most [`MAX_REPORT`] bytes into one buffer: a list of its chunks could take
/// many times that memory.
async fn read(mut incoming: Incoming) -> Result<Vec<u8>, CheckError> {
    let mut body = Vec::new();
    while let Some(frame) = incoming.frame().await {
        let Ok(data) = frame?.into_data() else {
            continue;
        };
        if body.len() + data.len() > MAX_REPORT {
            return Err(CheckError::TooLong);
        }
        body.extend_from_slice(&data);
    }
    Ok(body)
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

//----------- ReadLimit ------------------------------------------------------

/// Number of bytes that a [`ReadLimit`] stream may still receive; clones share the limit.
type Allowance = Rc<Cell<usize>>;

/// A stream whose reads fail once the allowance is used up; the last read may exceed it by one buffer.
struct ReadLimit<T> {
    inner: T,
    allowance: Allowance,
}

impl<T: AsyncRead + Unpin> AsyncRead for ReadLimit<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.allowance.get() == 0 {
            let excess = io::Error::new(
                io::ErrorKind::InvalidData,
                "sent a longer reply than a health server needs",
            );
            return Poll::Ready(Err(excess));
        }
        let before = buffer.filled().len();
        let outcome = Pin::new(&mut self.inner).poll_read(context, buffer);
        let left = self
            .allowance
            .get()
            .saturating_sub(buffer.filled().len() - before);
        self.allowance.set(left);
        outcome
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for ReadLimit<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

//----------- Report -------------------------------------------------------
//
// The body of a health server's response: `{"state": "running", "group_state": {"7": "failing"}}`.

/// Maximum length of a report in bytes: twice the space that [`MAX_GROUPS`] groups need.
pub(super) const MAX_REPORT: usize = 64 << 10;

/// Maximum number of groups in a report. An instance has one per link that its jobs provide.
const MAX_GROUPS: usize = 1024;

/// A health server's report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// State of the whole instance.
    pub state: &'static str,
    /// State of each link group; omitted if there are none (observed).
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub group_state: BTreeMap<String, &'static str>,
}

/// Parses a report by bosh-dns's rules (observed).
pub(super) fn parse(body: &[u8]) -> anyhow::Result<InstanceHealth> {
    // Text after the end invalidates the report.
    let members = match Json::parse(body)? {
        Json::Object(members) => members,
        Json::Null => Vec::new(),
        other => bail!("is {}, not an object", other.kind()),
    };
    let mut state = HealthState::Unknown;
    let mut groups: BTreeMap<String, HealthState> = BTreeMap::new();
    for (name, value) in members {
        // Member names match in any letter case; unknown members are ignored.
        if name.eq_ignore_ascii_case("state") {
            state = text(&value)?.map_or(state, state_of);
        } else if name.eq_ignore_ascii_case("group_state") {
            match value {
                Json::Object(members) => {
                    for (group, value) in members {
                        let state = text(&value)?.map_or(HealthState::Unknown, state_of);
                        groups.insert(group, state);
                        if groups.len() > MAX_GROUPS {
                            bail!("group_state has more than {MAX_GROUPS} groups");
                        }
                    }
                }
                Json::Null => groups.clear(),
                other => bail!("group_state is {}, not an object", other.kind()),
            }
        }
    }
    let groups = groups
        .into_iter()
        .map(|(group, state)| (group.into_boxed_str(), state))
        .collect();
    Ok(InstanceHealth { state, groups })
}

/// Returns the text of a state, `None` for null; any other type is an error.
fn text(value: &Json) -> anyhow::Result<Option<&str>> {
    match value {
        Json::Text(text) => Ok(Some(text)),
        Json::Null => Ok(None),
        // It invalidates the whole report.
        other => bail!("a state is {}, not text", other.kind()),
    }
}

/// Parses the text of a state, case-sensitively.
fn state_of(text: &str) -> HealthState {
    match text {
        "running" => HealthState::Running,
        "failing" => HealthState::Failing,
        // An instance may report itself as unchecked, and is then treated as such (observed).
        "unchecked" => HealthState::Unchecked,
        _ => HealthState::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
        task::LocalSet,
    };

    use super::*;
    use crate::tests::{Authority, Machine, until};
    use dns_kit::tls::RotatingTls;

    fn handshake_error(alert: AlertDescription) -> CheckError {
        let alert = rustls::Error::AlertReceived(alert);
        CheckError::of_handshake(io::Error::new(io::ErrorKind::InvalidData, alert))
    }

    #[test]
    fn alerts_about_certificates_are_refusals() {
        for alert in [
            AlertDescription::BadCertificate,
            AlertDescription::UnsupportedCertificate,
            AlertDescription::CertificateRevoked,
            AlertDescription::CertificateExpired,
            AlertDescription::CertificateUnknown,
            AlertDescription::UnknownCA,
            AlertDescription::AccessDenied,
            AlertDescription::DecryptError,
            AlertDescription::CertificateRequired,
        ] {
            let error = handshake_error(alert);
            assert!(matches!(error, CheckError::Refused(_)), "{error}");
        }
        for alert in [
            AlertDescription::HandshakeFailure,
            AlertDescription::ProtocolVersion,
            AlertDescription::InternalError,
        ] {
            let error = handshake_error(alert);
            assert!(matches!(error, CheckError::Tls(_)), "{error}");
        }
        let own = rustls::Error::General("the instance's certificate".to_owned());
        for error in [io::Error::other("reset"), io::Error::other(own)] {
            assert!(alert_in(&error).is_none(), "{error}");
        }
    }

    #[tokio::test]
    async fn allowance_ends_reading() {
        let allowance = Allowance::new(Cell::new(5));
        let (client, mut server) = tokio::io::duplex(64);
        server.write_all(b"abcdefghij").await.unwrap();
        let mut limited = ReadLimit {
            inner: client,
            allowance: allowance.clone(),
        };
        let mut four = [0; 4];
        limited.read_exact(&mut four).await.unwrap();
        assert_eq!((&four, allowance.get()), (b"abcd", 1));
        // The last read may exceed it.
        limited.read_exact(&mut four).await.unwrap();
        assert_eq!((&four, allowance.get()), (b"efgh", 0));
        let error = limited.read(&mut four).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        allowance.set(2);
        assert_eq!(limited.read(&mut four).await.unwrap(), 2);
        // Writing is not limited.
        limited.write_all(b"question").await.unwrap();
        limited.flush().await.unwrap();
        limited.shutdown().await.unwrap();
        let mut asked = Vec::new();
        server.read_to_end(&mut asked).await.unwrap();
        assert_eq!(asked, b"question");
    }

    /// Returns what is read of a response with a body of this length.
    async fn length_read(length: usize) -> Result<usize, CheckError> {
        let (client, mut server) = tokio::io::duplex(4096);
        let serve = async move {
            let mut request = [0; 1024];
            let _ = server.read(&mut request).await;
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n");
            let response = [head.into_bytes(), vec![b'x'; length]].concat();
            // Fails where the client has read enough.
            let _ = server.write_all(&response).await;
            // Stays open until the client has read.
            server
        };
        let ask = async move {
            let (mut sender, connection) = http1::handshake(TokioIo::new(client)).await?;
            let request = Request::new(Empty::<Bytes>::new());
            let exchange = async {
                let response = sender.send_request(request).await?;
                Ok(read(response.into_body()).await?.len())
            };
            tokio::select! {
                outcome = exchange => outcome,
                _ = connection => panic!("the connection ended first"),
            }
        };
        tokio::join!(serve, ask).1
    }

    #[tokio::test]
    async fn reports_have_a_limit() {
        assert_eq!(length_read(0).await.unwrap(), 0);
        assert_eq!(length_read(MAX_REPORT).await.unwrap(), MAX_REPORT);
        let error = length_read(MAX_REPORT + 1).await.unwrap_err();
        assert!(matches!(error, CheckError::TooLong), "{error}");
    }

    /// Passes connections on to a health server; counts them.
    struct Counted {
        address: SocketAddr,
        accepted: Arc<AtomicUsize>,
        open: Arc<AtomicUsize>,
    }

    impl Counted {
        async fn start(server: SocketAddr) -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let [accepted, open] = <[Arc<AtomicUsize>; 2]>::default();
            let counted = Self {
                address,
                accepted: Arc::clone(&accepted),
                open: Arc::clone(&open),
            };
            tokio::spawn(async move {
                while let Ok((mut client, _)) = listener.accept().await {
                    accepted.fetch_add(1, Ordering::Relaxed);
                    open.fetch_add(1, Ordering::Relaxed);
                    let open = Arc::clone(&open);
                    tokio::spawn(async move {
                        let mut server = TcpStream::connect(server).await.unwrap();
                        // Ends with an error where a side is gone.
                        let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                        open.fetch_sub(1, Ordering::Relaxed);
                    });
                }
            });
            counted
        }

        fn accepted(&self) -> usize {
            self.accepted.load(Ordering::Relaxed)
        }
    }

    #[tokio::test]
    async fn open_connections_are_used_again() {
        let authority = Authority::new();
        let machine = Machine::start(&authority).await;
        let server = Counted::start(machine.address).await;
        let files = authority.issue(&machine.folder.path().join("client"), HEALTH_NAME);
        let tls = RotatingTls::load("health_client", HEALTH_NAME, &files).unwrap();
        let tls = tls.current();
        let exchanges = async {
            let (result, kept) = check(server.address, &tls, None).await;
            assert_eq!(result.unwrap().state, HealthState::Running);
            machine.say("failing now");
            let (result, kept) = check(server.address, &tls, kept).await;
            assert_eq!(result.unwrap().state, HealthState::Failing);
            assert_eq!(server.accepted(), 1);
            // Opened with other certificates.
            let mut kept = kept.unwrap();
            kept.generation += 1;
            let (result, kept) = check(server.address, &tls, Some(kept)).await;
            assert!(result.is_ok());
            assert_eq!(server.accepted(), 2);
            // Closed meanwhile.
            let kept = kept.unwrap();
            kept.driver.abort();
            until(|| kept.sender.is_closed()).await;
            let (result, kept) = check(server.address, &tls, Some(kept)).await;
            assert!(result.is_ok());
            assert_eq!(server.accepted(), 3);
            // One that is not kept is closed.
            drop(kept);
            until(|| server.open.load(Ordering::Relaxed) == 0).await;
        };
        LocalSet::new().run_until(exchanges).await;
    }

    #[tokio::test]
    async fn other_answers_keep_the_connection() {
        let authority = Authority::new();
        let machine = Machine::start(&authority).await;
        let server = Counted::start(machine.address).await;
        let files = authority.issue(&machine.folder.path().join("client"), "other.bosh-dns");
        let tls = RotatingTls::load("health_client", HEALTH_NAME, &files).unwrap();
        let tls = tls.current();
        let exchanges = async {
            let mut kept = None;
            for _ in 0..3 {
                let (result, connection) = check(server.address, &tls, kept).await;
                let error = result.unwrap_err();
                assert_eq!(error.to_string(), "status 400 Bad Request");
                kept = connection;
            }
            assert_eq!(server.accepted(), 1);
            let closed = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = closed.local_addr().unwrap();
            drop(closed);
            let (result, kept) = check(address, &tls, None).await;
            let error = result.unwrap_err();
            assert!(matches!(error, CheckError::Connect(_)), "{error}");
            assert!(error.to_string().starts_with("no connection: "), "{error}");
            assert!(kept.is_none());
        };
        LocalSet::new().run_until(exchanges).await;
    }

    #[tokio::test]
    async fn only_tls_is_a_health_server() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            let (mut client, _) = listener.accept().await.unwrap();
            client.write_all(b"SSH-2.0-OpenSSH_9.6\r\n").await.unwrap();
            std::future::pending::<()>().await;
        });
        let folder = tempfile::tempdir().unwrap();
        let files = Authority::new().issue(&folder.path().join("client"), HEALTH_NAME);
        let tls = RotatingTls::load("health_client", HEALTH_NAME, &files).unwrap();
        let exchange = async { check(address, &tls.current(), None).await };
        let (result, kept) = LocalSet::new().run_until(exchange).await;
        let error = result.unwrap_err();
        assert!(matches!(error, CheckError::Tls(_)), "{error}");
        assert!(kept.is_none());
    }

    #[tokio::test]
    async fn read_limit_flushes_writes() {
        let (client, mut server) = tokio::io::duplex(64);
        let mut limited = ReadLimit {
            inner: tokio::io::BufWriter::new(client),
            allowance: Allowance::new(Cell::new(0)),
        };
        limited.write_all(b"question").await.unwrap();
        limited.flush().await.unwrap();
        let mut asked = [0; 8];
        server.read_exact(&mut asked).await.unwrap();
        assert_eq!(&asked, b"question");
        limited.shutdown().await.unwrap();
        assert_eq!(server.read(&mut asked).await.unwrap(), 0, "the end");
    }

    #[tokio::test]
    async fn new_bytes_use_the_allowance() {
        let (client, mut server) = tokio::io::duplex(64);
        server.write_all(b"abcd").await.unwrap();
        let allowance = Allowance::new(Cell::new(10));
        let mut limited = ReadLimit {
            inner: client,
            allowance: Rc::clone(&allowance),
        };
        let mut room = [0; 8];
        let mut buffer = ReadBuf::new(&mut room);
        buffer.put_slice(b"123");
        std::future::poll_fn(|context| Pin::new(&mut limited).poll_read(context, &mut buffer))
            .await
            .unwrap();
        assert_eq!((buffer.filled(), allowance.get()), (&b"123abcd"[..], 6));
    }

    /// Returns the outcome of a check of a server that sends these bytes over TLS.
    async fn outcome_of(response: Vec<u8>) -> Result<InstanceHealth, CheckError> {
        let folder = tempfile::tempdir().unwrap();
        let files = Authority::new().issue(&folder.path().join("both"), HEALTH_NAME);
        let tls = RotatingTls::load("health_client", HEALTH_NAME, &files).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let acceptor = tokio_rustls::TlsAcceptor::from(tls.server_config());
        tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let mut stream = acceptor.accept(stream).await.unwrap();
            let _ = stream.read(&mut [0; 1024]).await;
            // Fails where the client has read enough.
            let _ = stream.write_all(&response).await;
            let _ = stream.flush().await;
            std::future::pending::<()>().await;
        });
        let exchange = async { check(address, &tls.current(), None).await.0 };
        LocalSet::new().run_until(exchange).await
    }

    #[tokio::test]
    async fn answers_hold_little_beyond_reports() {
        let padding = " ".repeat(MAX_REPORT - r#"{"state":"running"}"#.len());
        let report = format!(r#"{{"state":"running"{padding}}}"#);
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {MAX_REPORT}\r\n\r\n");
        let hints = "HTTP/1.1 103 Early Hints\r\n\r\n";
        let after_hints = |count| format!("{}{head}{report}", hints.repeat(count)).into_bytes();
        let health = outcome_of(after_hints(100)).await.unwrap();
        assert_eq!(health.state, HealthState::Running);
        let error = outcome_of(after_hints(10_000)).await.unwrap_err();
        assert!(matches!(error, CheckError::Http(_)), "{error}");
        let error = outcome_of(b"220 smtp.example ESMTP\r\n".to_vec()).await;
        let error = error.unwrap_err();
        assert!(matches!(error, CheckError::Http(_)), "{error}");
    }

    #[tokio::test]
    async fn heads_of_requests_have_a_limit() {
        let authority = Authority::new();
        let machine = Machine::start(&authority).await;
        let files = authority.issue(&machine.folder.path().join("client"), HEALTH_NAME);
        let tls = RotatingTls::load("health_client", HEALTH_NAME, &files).unwrap();
        let tls = tls.current();
        let exchanges = async {
            for (length, is_answered) in [(8 << 10, true), (24 << 10, false)] {
                let mut connection = Connection::open(machine.address, &tls).await.unwrap();
                let mut request = Request::new(Empty::new());
                *request.uri_mut() = Uri::from_static("/health");
                let value = header::HeaderValue::try_from("x".repeat(length)).unwrap();
                request.headers_mut().insert(header::USER_AGENT, value);
                let response = connection.sender.send_request(request).await;
                // It may also close the connection before the end of the request.
                let found = response.is_ok_and(|response| response.status() == StatusCode::OK);
                assert_eq!(found, is_answered, "{length}");
            }
        };
        LocalSet::new().run_until(exchanges).await;
    }
}

#[cfg(test)]
mod report_tests {
    use super::*;

    /// Returns the state of the instance in `body`; `None` if the body is invalid.
    fn state(body: &str) -> Option<HealthState> {
        parse(body.as_bytes()).ok().map(|health| health.state)
    }

    #[test]
    fn bodies_are_read_like_bosh_dns() {
        assert_eq!(state(r#"{"state":"running"}"#), Some(HealthState::Running));
        assert_eq!(
            state(r#"{"STATE":"failing","more":{"x":1},"group_state":{}}"#),
            Some(HealthState::Failing)
        );
        assert_eq!(
            state(r#"{"state":"unchecked"}"#),
            Some(HealthState::Unchecked)
        );
        for odd in [
            "{}",
            r#"{"state":null}"#,
            r#"{"state":"Running"}"#,
            r#"{"state":"unknown"}"#,
            "null",
        ] {
            assert_eq!(state(odd), Some(HealthState::Unknown), "{odd}");
        }
        for broken in [
            "",
            "running",
            "[]",
            r#"{"state":1}"#,
            r#"{"state":"running"} x"#,
            r#"{"state":"running","group_state":{"1":5}}"#,
            r#"{"state":"running","group_state":[]}"#,
        ] {
            assert_eq!(state(broken), None, "{broken}");
        }
    }

    #[test]
    fn groups_are_read() {
        let health =
            parse(br#"{"state":"running","group_state":{"2":"odd","1":"failing"}}"#).unwrap();
        let groups: Vec<_> = health
            .groups
            .iter()
            .map(|(group, state)| (&**group, *state))
            .collect();
        assert_eq!(
            groups,
            [("1", HealthState::Failing), ("2", HealthState::Unknown)]
        );
        // A later null takes back what an earlier member said (observed of Go's decoder).
        let none = parse(br#"{"group_state":{"1":"failing"},"Group_State":null}"#).unwrap();
        assert_eq!(none.groups.len(), 0);
        let null = parse(br#"{"group_state":{"1":null}}"#).unwrap();
        assert_eq!(null.groups[0].1, HealthState::Unknown);
    }

    #[test]
    fn too_many_groups_are_refused() {
        let report = |groups: usize| {
            let groups: Vec<_> = (0..groups)
                .map(|group| format!(r#""{group}":"failing""#))
                .collect();
            parse(
                format!(
                    r#"{{"state":"running","group_state":{{{}}}}}"#,
                    groups.join(",")
                )
                .as_bytes(),
            )
        };
        assert_eq!(report(MAX_GROUPS).unwrap().groups.len(), MAX_GROUPS);
        assert!(
            report(MAX_GROUPS + 1)
                .unwrap_err()
                .to_string()
                .contains("more than 1024 groups")
        );
    }

    #[test]
    fn report_without_groups_omits_field() {
        let mut report = Report {
            state: "running",
            group_state: BTreeMap::new(),
        };
        assert_eq!(
            serde_json::to_string(&report).unwrap(),
            r#"{"state":"running"}"#
        );
        report.group_state.insert("1".to_owned(), "failing");
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(text, r#"{"state":"running","group_state":{"1":"failing"}}"#);
        assert_eq!(parse(text.as_bytes()).unwrap().groups.len(), 1);
    }

    #[test]
    fn errors_tell_the_cause() {
        for (body, expected) in [
            ("[]", "is a list, not an object"),
            (r#"{"state": 7}"#, "a state is a number, not text"),
            (
                r#"{"group_state": {"1": {}}}"#,
                "a state is an object, not text",
            ),
            (
                r#"{"group_state": "x"}"#,
                "group_state is a text, not an object",
            ),
        ] {
            let error = parse(body.as_bytes()).unwrap_err().to_string();
            assert_eq!(error, expected, "{body}");
        }
        assert_eq!(
            CheckError::TooLong.to_string(),
            "report exceeds 65536 bytes"
        );
    }

    #[test]
    fn last_member_of_a_name_counts() {
        for (body, expected) in [
            (
                r#"{"state":"running","State":"failing"}"#,
                HealthState::Failing,
            ),
            (r#"{"state":"failing","State":null}"#, HealthState::Failing),
            (
                r#"{"state":"failing","state_":"running"}"#,
                HealthState::Failing,
            ),
        ] {
            assert_eq!(state(body), Some(expected), "{body}");
        }
        let merged = parse(
            br#"{"group_state":{"1":"failing","2":"running"},"group_state":{"1":"unchecked"}}"#,
        );
        let groups = [("1", HealthState::Unchecked), ("2", HealthState::Running)]
            .map(|(group, state)| (group.into(), state));
        assert_eq!(*merged.unwrap().groups, groups);
    }
}
