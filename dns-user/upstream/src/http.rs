//! Answers from a JSON server over HTTP.

use std::{
    collections::HashMap,
    fmt,
    io::{self, Read as _},
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use flate2::read::MultiGzDecoder;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Request, Response, StatusCode, body::Bytes, header};
use hyper_rustls::HttpsConnector;
use hyper_util::{
    client::legacy::{
        Client,
        connect::{HttpConnector, dns},
    },
    rt::{TokioExecutor, TokioTimer},
};
use parking_lot::Mutex;
use tower_service::Service;
use url::Url;

pub use dns_kit::foreign::redacted;

use super::{
    host_names::{HostName, HostNames},
    json_answer,
    message::{self, Forwarded},
    tcp::Trust,
};
use dns_core::wire::{ExtendedError, InfoCode, Query, ReplyFlags, begin_reply};
use dns_kit::logs::{LineLimit, with_causes};

/// Maximum size of a document in bytes.
const MAX_DOCUMENT: usize = 4 << 20;
/// Maximum number of redirects that are followed (observed, and Go's limit).
const MAX_REDIRECTS: usize = 10;
/// Time for which a connection waits for the first look-up of its host name.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of idle connections per server.
const MAX_IDLE: usize = 16;
/// Time for which idle connections are kept.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// HTTP client shared by all handlers.
pub(crate) type HttpClient = Client<HttpsConnector<HttpConnector<Hosts>>, Empty<Bytes>>;

pub(crate) fn client(hosts: &Arc<HostNames>, trust: &Trust) -> HttpClient {
    let hosts = Hosts {
        names: Arc::clone(hosts),
        followed: Arc::default(),
    };
    let mut http = HttpConnector::new_with_resolver(hosts);
    http.enforce_http(false);
    http.set_nodelay(true);
    let connector =
        hyper_rustls::HttpsConnectorBuilder::new().with_tls_config(trust.client_config());
    let connector = connector
        .https_or_http()
        .enable_http1()
        .wrap_connector(http);
    Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(IDLE_TIMEOUT)
        .pool_max_idle_per_host(MAX_IDLE)
        .build(connector)
}

/// Host names of HTTP servers, each resolved repeatedly from its first connection on.
#[derive(Clone)]
pub(crate) struct Hosts {
    names: Arc<HostNames>,
    /// Known host names: only the ones in use by handlers.
    followed: Arc<Mutex<HashMap<String, Arc<HostName>>>>,
}

impl Service<dns::Name> for Hosts {
    type Response = std::iter::Once<SocketAddr>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: dns::Name) -> Self::Future {
        let Self { names, followed } = self;
        let mut followed = followed.lock();
        let host = followed
            .entry(name.as_str().to_owned())
            .or_insert_with(|| names.follow(name.as_str()));
        let host = Arc::clone(host);
        Box::pin(async move {
            let address = host.address(LOOK_UP_TIMEOUT).await;
            let address = address.ok_or_else(|| io::Error::other("the host name is not known"))?;
            // The client takes the port from the URL.
            Ok(std::iter::once(SocketAddr::new(address, 0)))
        })
    }
}

/// A server that answers in JSON.
pub(crate) struct HttpSource {
    /// URL of the server; ends with a slash.
    url: Url,
    client: HttpClient,
    /// Time limit of an answer, including connecting.
    timeout: Duration,
    failure_lines: LineLimit,
}

impl fmt::Debug for HttpSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            url,
            client: _,
            timeout,
            failure_lines: _,
        } = self;
        f.debug_struct("HttpSource")
            .field("url", &redacted(url))
            .field("timeout", timeout)
            .finish_non_exhaustive()
    }
}

/// Reasons why there is no answer.
#[derive(Debug, thiserror::Error)]
enum HttpError {
    /// The name cannot be encoded in a URL.
    #[error("cannot build the request: {0}")]
    Request(#[from] hyper::http::Error),
    /// The connection failed or broke.
    #[error("{0}")]
    Connection(#[from] hyper_util::client::legacy::Error),
    /// Any status except 200.
    #[error("status {0}")]
    Status(StatusCode),
    /// A redirect does not name a URL of HTTP.
    #[error("redirected to an unusable location")]
    Location,
    /// The server redirects without end.
    #[error("stopped after {MAX_REDIRECTS} redirects")]
    Redirects,
    /// The document was incomplete or too large.
    #[error("{0}")]
    Body(Box<dyn std::error::Error + Send + Sync>),
    /// The document is not an answer.
    #[error(transparent)]
    Answer(#[from] json_answer::JsonAnswerError),
    /// The time limit was exceeded.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
}

impl HttpSource {
    /// Creates a source at `url`. `request_timeout` is the total time limit of a client's query.
    pub(crate) fn new(mut url: Url, client: HttpClient, request_timeout: Duration) -> Self {
        if !url.path().ends_with('/') {
            url.set_path(&format!("{}/", url.path()));
        }
        // Slightly shorter, so that the client gets the handler's SERVFAIL.
        let timeout = request_timeout - request_timeout / 10;
        Self {
            url,
            client,
            timeout,
            failure_lines: LineLimit::new(),
        }
    }

    pub(crate) fn url(&self) -> &Url {
        &self.url
    }

    /// Requests an answer; every error becomes SERVFAIL.
    pub(crate) async fn fetch(&self, query: &Query<'_>) -> Forwarded {
        let outcome = match tokio::time::timeout(self.timeout, self.request(query)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(HttpError::TimedOut(self.timeout)),
        };
        match outcome {
            Ok(reply) => Forwarded::own(reply, false),
            Err(error) => {
                if let Some(suppressed) = self.failure_lines.admit_per_minute() {
                    tracing::warn!(
                        url = redacted(&self.url),
                        error = with_causes(&error),
                        suppressed,
                        "the HTTP request of a handler failed: the client gets SERVFAIL; check the handler's URL with \
                         curl. For a server with a certificate of a private CA, set `ca_file` of the source"
                    );
                }
                let text = "the HTTP server of this domain gave no answer";
                let errors = vec![ExtendedError::new(InfoCode::NetworkError, text)];
                let reply = begin_reply(query, message::SERVFAIL, ReplyFlags::LOCAL);
                Forwarded {
                    errors,
                    ..Forwarded::own(reply, true)
                }
            }
        }
    }

    async fn request(&self, query: &Query<'_>) -> Result<Vec<u8>, HttpError> {
        let mut url = self.url.clone();
        url.query_pairs_mut()
            .append_pair("type", &query.question.qtype.to_string())
            .append_pair("name", &presentation(query.question.raw_name));
        for _ in 0..=MAX_REDIRECTS {
            let request = Request::get(url.as_str())
                .header(header::ACCEPT, "application/dns-json, application/json")
                .header(header::ACCEPT_ENCODING, "gzip");
            let response = self.client.request(request.body(Empty::new())?).await?;
            if let Some(target) = redirect_target(&url, &response)? {
                url = target;
                continue;
            }
            if response.status() != StatusCode::OK {
                return Err(HttpError::Status(response.status()));
            }
            let coding = response.headers().get(header::CONTENT_ENCODING);
            let is_compressed =
                coding.is_some_and(|coding| coding.as_bytes().eq_ignore_ascii_case(b"gzip"));
            let document = Limited::new(response.into_body(), MAX_DOCUMENT)
                .collect()
                .await;
            let document = document.map_err(HttpError::Body)?.to_bytes();
            let document = if is_compressed {
                decompress(&document)?.into()
            } else {
                document
            };
            return Ok(json_answer::reply(query, &document)?);
        }
        Err(HttpError::Redirects)
    }
}

/// Returns the URL to which a response redirects; `None` if it does not, or without saying where.
fn redirect_target<B>(url: &Url, response: &Response<B>) -> Result<Option<Url>, HttpError> {
    // 301, 302, 303, 307, 308, as Go's client.
    if !matches!(response.status().as_u16(), 301..=303 | 307 | 308) {
        return Ok(None);
    }
    let Some(location) = response.headers().get(header::LOCATION) else {
        return Ok(None);
    };
    let target = location
        .to_str()
        .ok()
        .and_then(|location| url.join(location).ok());
    match target.filter(|target| matches!(target.scheme(), "http" | "https")) {
        Some(target) => Ok(Some(target)),
        None => Err(HttpError::Location),
    }
}

/// Decompresses a document of at most [`MAX_DOCUMENT`] bytes.
fn decompress(document: &[u8]) -> Result<Vec<u8>, HttpError> {
    let mut text = Vec::new();
    let mut decoder = MultiGzDecoder::new(document).take(MAX_DOCUMENT as u64 + 1);
    decoder
        .read_to_end(&mut text)
        .map_err(|error| HttpError::Body(error.into()))?;
    if text.len() > MAX_DOCUMENT {
        return Err(HttpError::Body(
            "the decompressed document is too large".into(),
        ));
    }
    Ok(text)
}

/// Formats a name in presentation format with the final dot, preserving letter case. Special
/// characters are escaped with a backslash, unprintable ones as `\ddd` (as in bosh-dns).
fn presentation(name: &[u8]) -> String {
    let mut text = String::with_capacity(name.len());
    let mut rest = name;
    while let Some((&length, tail)) = rest.split_first() {
        let Some((label, tail)) = tail.split_at_checked(usize::from(length)) else {
            break;
        };
        if label.is_empty() {
            break;
        }
        for &byte in label {
            match byte {
                b'.' | b' ' | b'\'' | b'@' | b';' | b'(' | b')' | b'"' | b'\\' => {
                    text.push('\\');
                    text.push(char::from(byte));
                }
                b'!'..=b'~' => text.push(char::from(byte)),
                _ => text.push_str(&format!("\\{byte:03}")),
            }
        }
        text.push('.');
        rest = tail;
    }
    if text.is_empty() {
        text.push('.');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped_like_bosh_dns() {
        assert_eq!(presentation(b"\x03a b\x07eXample\0"), "a\\ b.eXample.");
        assert_eq!(presentation(b"\x04\xc3\xa4+.\0"), "\\195\\164+\\..");
        assert_eq!(presentation(b"\0"), ".");
    }
}
