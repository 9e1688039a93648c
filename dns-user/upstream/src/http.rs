//! Answers from a JSON server over HTTP.

use std::{
    collections::HashMap,
    fmt,
    io::Read as _,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use flate2::read::MultiGzDecoder;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Request, Response, StatusCode, body::Bytes, header};
use hyper_util::{
    client::legacy::Client,
    rt::{TokioExecutor, TokioTimer},
};
use parking_lot::Mutex;
use rustls::ClientConfig;
use url::{Origin, Url};

pub use dns_kit::foreign::redacted;

use super::{
    connector::Connector,
    host_names::HostNames,
    json_answer,
    message::{self, Forwarded},
    tcp::Trust,
};
use dns_core::wire::{ExtendedError, InfoCode, Query, ReplyFlags, begin_reply};
use dns_kit::logs::{LineLimit, with_causes};

/// Maximum size of a document in bytes.
const MAX_DOCUMENT: usize = 4 << 20;
/// Maximum number of requests for a query: Go's client refuses the tenth redirect (net/http, `defaultCheckRedirect`).
const MAX_REQUESTS: usize = 10;
/// Number of requests in a row from which a handler's server counts as out: a single one may fail.
const MIN_FAILED: u32 = 3;
/// Maximum number of idle connections per server.
const MAX_IDLE: usize = 16;
/// Time for which idle connections are kept.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// A handler's HTTP server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpServer {
    /// URL to which the question is added.
    pub url: Url,
    /// How the server's certificate is verified.
    pub trust: Trust,
}

/// HTTP client of one server, with its own limit of connections: a server that hangs occupies those of no other.
type HttpClient = Client<Connector, Empty<Bytes>>;

/// The clients of handlers that are created together. Handlers of one server share its client and thus its connections.
#[derive(Default)]
pub(crate) struct HttpClients {
    tls: HashMap<Trust, ClientConfig>,
    clients: HashMap<(Trust, Origin), HttpClient>,
}

impl HttpClients {
    fn of(&mut self, url: &Url, trust: &Trust, hosts: &Arc<HostNames>) -> HttpClient {
        let tls = self.tls.entry(trust.clone());
        let tls = tls.or_insert_with(|| trust.client_config());
        let client = self.clients.entry((trust.clone(), url.origin()));
        let client = client.or_insert_with(|| {
            Client::builder(TokioExecutor::new())
                // Without a timer, an idle connection is closed only when a request looks for one.
                .pool_timer(TokioTimer::new())
                .pool_idle_timeout(IDLE_TIMEOUT)
                .pool_max_idle_per_host(MAX_IDLE)
                .build(Connector::new(hosts, url, tls.clone()))
        });
        client.clone()
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
    /// Requests in a row that failed, up to the latest.
    failed: AtomicU32,
    /// Error of the latest one.
    error: Mutex<String>,
}

impl fmt::Debug for HttpSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            url,
            client: _,
            timeout,
            failure_lines: _,
            failed: _,
            error: _,
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
    #[error("stopped after {MAX_REQUESTS} redirects")]
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
    /// Creates a source at the server's URL. `request_timeout` is the total time limit of a client's query.
    pub(crate) fn new(
        server: &HttpServer,
        clients: &mut HttpClients,
        hosts: &Arc<HostNames>,
        request_timeout: Duration,
    ) -> Self {
        let client = clients.of(&server.url, &server.trust, hosts);
        let mut url = server.url.clone();
        // bosh-dns requests `URL/?type=...` (observed).
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
            failed: AtomicU32::new(0),
            error: Mutex::default(),
        }
    }

    /// Returns the error of the latest request if several in a row failed.
    pub(crate) fn outage(&self) -> Option<String> {
        if self.failed.load(Ordering::Relaxed) < MIN_FAILED {
            return None;
        }
        Some(self.error.lock().clone())
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
            Ok(reply) => {
                self.failed.store(0, Ordering::Relaxed);
                Forwarded::own(reply, false)
            }
            Err(error) => {
                self.failed.fetch_add(1, Ordering::Relaxed);
                *self.error.lock() = with_causes(&error);
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
        for _ in 0..MAX_REQUESTS {
            // Go's client asks for gzip by itself (net/http, `Transport`).
            let mut request = Request::get(url.as_str())
                // Cloudflare's resolver answers in JSON only if it is asked to.
                .header(header::ACCEPT, "application/dns-json, application/json")
                .header(header::ACCEPT_ENCODING, "gzip");
            if url.origin() != self.url.origin() {
                // A server may redirect each query to another one. Connections to those would stay open, and
                // their host names be looked up, long after the query.
                request = request.header(header::CONNECTION, "close");
            }
            let response = self.client.request(request.body(Empty::new())?).await?;
            if let Some(target) = redirect_target(&url, &response)? {
                url = target;
                continue;
            }
            // Also for other statuses of success, as in bosh-dns (observed).
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
    if let Ok(location) = location.to_str()
        && let Ok(target) = url.join(location)
        && matches!(target.scheme(), "http" | "https")
    {
        return Ok(Some(target));
    }
    Err(HttpError::Location)
}

/// Decompresses a document of at most [`MAX_DOCUMENT`] bytes.
fn decompress(document: &[u8]) -> Result<Vec<u8>, HttpError> {
    let mut text = Vec::new();
    // A few kilobytes can decompress to gigabytes.
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

    #[test]
    fn special_characters_are_escaped() {
        assert_eq!(
            presentation(b"\x0c.'@;()\"\\!~az\x01x\0"),
            "\\.\\'\\@\\;\\(\\)\\\"\\\\!~az.x."
        );
        assert_eq!(presentation(b"\x03\x00\x1f\x7f\0"), "\\000\\031\\127.");
        // Cut off.
        assert_eq!(presentation(b"\x01a\x05b"), "a.");
    }

    #[test]
    fn usable_redirects_are_followed() {
        let url: Url = "https://dns.example/a/b?x=1".parse().unwrap();
        let target = |status: u16, location: Option<&[u8]>| {
            let mut response = Response::builder().status(status);
            if let Some(location) = location {
                response = response.header(header::LOCATION, location);
            }
            let response = response.body(()).unwrap();
            redirect_target(&url, &response)
                .map(|target| target.map(|target| target.to_string()))
                .map_err(|error| error.to_string())
        };
        for status in [301, 302, 303, 307, 308] {
            for (location, expected) in [
                (&b"/c"[..], "https://dns.example/c"),
                (b"c?y", "https://dns.example/a/c?y"),
                (b"http://192.0.2.1:81", "http://192.0.2.1:81/"),
            ] {
                let found = target(status, Some(location));
                assert_eq!(found, Ok(Some(expected.to_owned())), "{status}");
            }
            assert_eq!(target(status, None), Ok(None), "{status}");
            let unusable = Err("redirected to an unusable location".to_owned());
            for location in [&b"ftp://x/"[..], b"file:///etc/passwd", b"http://", b"\xff"] {
                assert_eq!(target(status, Some(location)), unusable, "{location:?}");
            }
        }
        for status in [200, 300, 304, 305, 306, 309, 404] {
            assert_eq!(target(status, Some(b"/c")), Ok(None), "{status}");
        }
    }

    #[test]
    fn decompressed_documents_have_a_limit() {
        use std::io::Write as _;

        for (length, expected) in [
            (0, Ok(0)),
            (4 << 20, Ok(4 << 20)),
            ((4 << 20) + 1, Err("the decompressed document is too large")),
        ] {
            let mut encoder =
                flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(&vec![b' '; length]).unwrap();
            let found = decompress(&encoder.finish().unwrap());
            let found = found
                .map(|text| text.len())
                .map_err(|error| error.to_string());
            assert_eq!(found, expected.map_err(str::to_owned), "{length}");
        }
        assert!(decompress(b"no gzip").is_err());
    }

    fn server(url: &str, trust: Trust) -> HttpServer {
        HttpServer {
            url: url.parse().unwrap(),
            trust,
        }
    }

    #[tokio::test]
    async fn server_and_trust_share_clients() {
        let mut clients = HttpClients::default();
        let second = Duration::from_secs(1);
        for (url, trust, count, settings) in [
            ("http://192.0.2.1/a", Trust::Anyone, 1, 1),
            ("http://192.0.2.1/b/", Trust::Anyone, 1, 1),
            ("http://192.0.2.1:81/a", Trust::Anyone, 2, 1),
            ("https://192.0.2.1/a", Trust::Anyone, 3, 1),
            ("http://192.0.2.1/a", Trust::System, 4, 2),
        ] {
            let server = server(url, trust);
            let source = HttpSource::new(&server, &mut clients, &Arc::default(), second);
            assert_eq!(
                (clients.clients.len(), clients.tls.len()),
                (count, settings)
            );
            let slashed = format!("{}/", url.trim_end_matches('/'));
            assert_eq!(source.url().as_str(), slashed);
            assert_eq!(source.timeout, Duration::from_millis(900));
        }
    }

    #[tokio::test]
    async fn outage_needs_three_successive_failures() {
        let server = server("http://user:secret@192.0.2.1/a", Trust::Anyone);
        let second = Duration::from_secs(1);
        let source = HttpSource::new(
            &server,
            &mut HttpClients::default(),
            &Arc::default(),
            second,
        );
        *source.error.lock() = "why".to_owned();
        for (failed, expected) in [(0, None), (2, None), (3, Some("why")), (4, Some("why"))] {
            source.failed.store(failed, Ordering::Relaxed);
            assert_eq!(source.outage().as_deref(), expected, "{failed}");
        }
        let text = format!("{source:?}");
        assert!(text.starts_with("HttpSource { url: \"http://"), "{text}");
        assert!(
            text.contains("timeout: 900ms") && !text.contains("secret"),
            "{text}"
        );
        for (error, expected) in [
            (
                HttpError::Status(StatusCode::NOT_FOUND),
                "status 404 Not Found",
            ),
            (HttpError::Redirects, "stopped after 10 redirects"),
            (HttpError::TimedOut(second), "no answer within 1s"),
        ] {
            assert_eq!(error.to_string(), expected);
        }
    }
}
