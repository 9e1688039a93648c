//! One check: `GET https://<ip>:<port>/health` over a connection that is kept.

use std::{net::SocketAddr, sync::Arc};

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Request, StatusCode, Uri, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use tokio::{net::TcpStream, task::AbortHandle};
use tokio_rustls::TlsConnector;

use super::{
    HEALTH_NAME,
    report::{self, MAX_REPORT, ReportError},
    states::InstanceHealth,
};
use dns_platform::tls::TlsMaterial;

/// A connection to an instance's health server, kept between checks.
#[derive(Debug)]
pub(super) struct Connection {
    /// Sends requests.
    sender: http1::SendRequest<Empty<Bytes>>,
    /// Drives the connection; ends with it.
    driver: AbortHandle,
    /// Which set of certificates it was made with.
    generation: u64,
}

/// Why a check gave nothing.
#[derive(Debug, thiserror::Error)]
pub(super) enum CheckError {
    /// No TCP connection.
    #[error("no connection: {0}")]
    Connect(std::io::Error),
    /// The handshake failed: no TLS there, another CA, another name.
    #[error("TLS: {0}")]
    Tls(std::io::Error),
    /// The connection broke, or what came was no HTTP.
    #[error("HTTP: {0}")]
    Http(#[from] hyper::Error),
    /// Another status than 200.
    #[error("status {0}")]
    Status(StatusCode),
    /// The body broke off or is too long.
    #[error("body: {0}")]
    Body(Box<dyn std::error::Error + Send + Sync>),
    /// The body is not what it should be.
    #[error("answer: {0}")]
    Answer(#[from] ReportError),
}

/// Asks once. Reuses `kept` if it was made with the certificates of now and is
/// still open. Gives the answer and a connection for the next time, if there is one.
///
/// There is no time limit in here. Must be polled inside a `LocalSet`.
pub(super) async fn check(
    address: SocketAddr,
    tls: &TlsMaterial,
    kept: Option<Connection>,
) -> (Result<InstanceHealth, CheckError>, Option<Connection>) {
    let kept = kept.filter(|kept| kept.generation == tls.generation && !kept.sender.is_closed());
    if let Some(mut connection) = kept {
        match connection.ask(address).await {
            // The other end may have closed it just now; asking again does no harm.
            Err(CheckError::Http(_) | CheckError::Body(_)) => {}
            answered => return (answered, Some(connection)),
        }
    }
    let mut connection = match Connection::open(address, tls).await {
        Ok(connection) => connection,
        Err(error) => return (Err(error), None),
    };
    match connection.ask(address).await {
        Err(error @ (CheckError::Http(_) | CheckError::Body(_))) => (Err(error), None),
        answered => (answered, Some(connection)),
    }
}

impl Connection {
    /// Connects and shakes hands.
    async fn open(address: SocketAddr, tls: &TlsMaterial) -> Result<Self, CheckError> {
        let tcp = TcpStream::connect(address).await.map_err(CheckError::Connect)?;
        // One small request at a time gains nothing from waiting for more.
        let _ = tcp.set_nodelay(true);
        let name = ServerName::try_from(HEALTH_NAME).expect("the constant is a DNS name");
        let stream =
            TlsConnector::from(Arc::clone(&tls.client)).connect(name, tcp).await.map_err(CheckError::Tls)?;
        let (sender, connection) =
            http1::Builder::new().max_buf_size(16 << 10).handshake(TokioIo::new(stream)).await?;
        // Errors come out at the request that they concern.
        let driver = tokio::task::spawn_local(async move { _ = connection.await }).abort_handle();
        Ok(Self { sender, driver, generation: tls.generation })
    }

    /// One request and its answer.
    async fn ask(&mut self, address: SocketAddr) -> Result<InstanceHealth, CheckError> {
        self.sender.ready().await?;
        let mut request = Request::new(Empty::new());
        *request.uri_mut() = Uri::from_static("/health");
        let host = header::HeaderValue::try_from(address.to_string()).expect("addresses are visible ASCII");
        request.headers_mut().insert(header::HOST, host);
        let response = self.sender.send_request(request).await?;
        let status = response.status();
        // Read also where it is not wanted, so that the connection can be kept.
        let body =
            Limited::new(response.into_body(), MAX_REPORT).collect().await.map_err(CheckError::Body)?;
        if status != StatusCode::OK {
            return Err(CheckError::Status(status));
        }
        Ok(report::parse(&body.to_bytes())?)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}
