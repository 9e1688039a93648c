//! An HTTP client, bounded in time and size: with pooled connections by URL, or for one request over an open
//! stream.

use std::{
    error::Error,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::{
    Request, Response, Uri,
    body::{Bytes, Incoming},
    client::conn::http1,
};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioIo, TokioTimer},
};
use rustls::ClientConfig;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tower_service::Service;

use crate::logs::with_causes;

/// Limits of an exchange.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Time from the request to the end of the response.
    pub time: Duration,
    /// Maximum size of the response's body in bytes.
    pub body: usize,
}

/// Reasons why an exchange failed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum ClientError {
    #[error("{0}")]
    Exchange(String),
    #[error("the response is longer than {0} bytes")]
    TooLong(usize),
    #[error("the response was cut short: {0}")]
    CutShort(String),
    #[error("not finished within {0:?}")]
    Timeout(Duration),
}

/// Time limit for connecting, the look-up of the host name and the TLS handshake included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// Time for which unused connections are kept.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// A client that finds servers by URL: `http` or `https`.
#[derive(Clone, Debug)]
pub struct HttpClient {
    client: Client<BoundedConnector, Full<Bytes>>,
}

/// Connects within a time. The client connects in the background when a request has found another connection
/// meanwhile; a server that never finishes the handshake would then keep a descriptor for good.
#[derive(Clone, Debug)]
struct BoundedConnector(HttpsConnector<HttpConnector>);

impl Service<Uri> for BoundedConnector {
    type Response = MaybeHttpsStream<TokioIo<TcpStream>>;
    type Error = Box<dyn Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, server: Uri) -> Self::Future {
        let connecting = timeout(CONNECT_TIMEOUT, self.0.call(server));
        Box::pin(async { connecting.await? })
    }
}

impl HttpClient {
    /// Creates a client that verifies servers according to `tls` and keeps at most `idle` unused connections
    /// per server.
    pub fn new(tls: ClientConfig, idle: usize) -> Self {
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls)
            .https_or_http()
            .enable_http1()
            .build();
        Self {
            client: Client::builder(TokioExecutor::new())
                .pool_max_idle_per_host(idle)
                .pool_idle_timeout(IDLE_TIMEOUT)
                // Without a timer, an idle connection is only closed when another request is sent.
                .pool_timer(TokioTimer::new())
                .build(BoundedConnector(connector)),
        }
    }

    /// Sends a request to its absolute URL and reads the response, whatever its status.
    pub async fn send(
        &self,
        request: Request<Full<Bytes>>,
        limits: Limits,
    ) -> Result<Response<Bytes>, ClientError> {
        let exchange = async {
            let response = self
                .client
                .request(request)
                .await
                .map_err(|error| failed(&error))?;
            collect(response, limits.body).await
        };
        timeout(limits.time, exchange)
            .await
            .unwrap_or(Err(ClientError::Timeout(limits.time)))
    }
}

/// Sends a request over `stream`, which carries no further one, and reads the response.
pub async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
    limits: Limits,
) -> Result<Response<Bytes>, ClientError> {
    let exchange = async { collect(send(stream, request).await?, limits.body).await };
    timeout(limits.time, exchange)
        .await
        .unwrap_or(Err(ClientError::Timeout(limits.time)))
}

/// Sends a request over `stream`, which carries no further one; the response's body is unread. The
/// connection ends with the response.
pub async fn send(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
) -> Result<Response<Incoming>, ClientError> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| failed(&error))?;
    // Errors are reported by the request.
    tokio::spawn(connection);
    sender
        .send_request(request)
        .await
        .map_err(|error| failed(&error))
}

/// Reads a response whose body has at most `limit` bytes.
pub async fn collect(
    response: Response<Incoming>,
    limit: usize,
) -> Result<Response<Bytes>, ClientError> {
    let (head, body) = response.into_parts();
    // By what arrives, because Content-Length may be missing.
    match Limited::new(body, limit).collect().await {
        Ok(body) => Ok(Response::from_parts(head, body.to_bytes())),
        Err(error) if error.is::<LengthLimitError>() => Err(ClientError::TooLong(limit)),
        Err(error) => Err(ClientError::CutShort(with_causes(&*error))),
    }
}

fn failed(error: &(dyn Error + 'static)) -> ClientError {
    ClientError::Exchange(with_causes(error))
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use rustls::RootCertStore;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex},
        net::TcpListener,
    };

    use super::*;

    const LIMITS: Limits = Limits {
        time: Duration::from_secs(20),
        body: 10,
    };

    fn request(url: &str) -> Request<Full<Bytes>> {
        Request::get(url)
            .header("host", "x")
            .body(Full::default())
            .unwrap()
    }

    /// Reads a request, then sends `response` and closes the connection, or hangs if it is empty.
    async fn respond(mut stream: impl AsyncRead + AsyncWrite + Unpin, response: &'static str) {
        let mut head = vec![0; 4096];
        let _ = stream.read(&mut head).await;
        if response.is_empty() {
            pending::<()>().await;
        }
        stream.write_all(response.as_bytes()).await.unwrap();
    }

    async fn exchanged(response: &'static str, limits: Limits) -> Result<Bytes, String> {
        let (ours, theirs): (DuplexStream, DuplexStream) = duplex(4096);
        let server = tokio::spawn(respond(theirs, response));
        let result = exchange(ours, request("/"), limits).await;
        server.abort();
        result
            .map(Response::into_body)
            .map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn responses_are_bounded() {
        let whole = "HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nblob";
        assert_eq!(exchanged(whole, LIMITS).await.unwrap(), "blob");
        let long = "HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\nhello world";
        assert_eq!(
            exchanged(long, LIMITS).await.unwrap_err(),
            "the response is longer than 10 bytes"
        );
        let short = "HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nblob";
        assert!(
            exchanged(short, LIMITS)
                .await
                .unwrap_err()
                .contains("cut short")
        );
        assert!(exchanged("no http\r\n\r\n", LIMITS).await.is_err());
        let hurried = Limits {
            time: Duration::from_millis(200),
            ..LIMITS
        };
        assert_eq!(
            exchanged("", hurried).await.unwrap_err(),
            "not finished within 200ms"
        );
    }

    #[tokio::test]
    async fn url_names_the_server() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/path", listener.local_addr().unwrap());
        let server = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            respond(
                stream,
                "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
            )
            .await;
        });
        let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
        let tls = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        let response = HttpClient::new(tls, 0)
            .send(request(&url), LIMITS)
            .await
            .unwrap();
        assert_eq!(response.status(), 404);
        server.await.unwrap();
    }
}
