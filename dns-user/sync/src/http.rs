//! Requests to blobstores and to the publisher's API, with the paths and signatures of a director's WebDAV
//! blobstore.
//!
//! Certificates of mutual TLS are looked at every second and at connections (`dns_kit::tls`), so a rotation needs no restart.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use base64::{
    Engine,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use bytes::Bytes;
use dns_core::config;
pub use dns_kit::tls::{AcceptedName, RotatingTls, TlsError};
use dns_kit::{
    http_client::{ClientError, HttpClient, Limits},
    tls::{self, ClientIdentity, ServerTrust, ServerVerifier},
};
use http_body_util::Full;
use hyper::{Method, Request, StatusCode, header};
use ring::{digest, hmac};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Map, Value};

/// A request to a blobstore or to the publisher's API.
#[derive(Clone, Debug)]
pub struct HttpCall<'a> {
    /// Method of the request.
    pub method: Method,
    /// Absolute URL of the request.
    pub url: &'a str,
    /// User and password for basic authentication.
    pub basic: Option<(&'a str, &'a str)>,
    /// Additional headers, from the announcement.
    pub headers: Option<&'a Map<String, Value>>,
    /// Body of the request; may be empty.
    pub body: Bytes,
}

/// Reasons why a request failed; the URLs are without their queries, which may be secrets.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum HttpError {
    #[error("{url}: {cause}")]
    Request {
        url: String,
        cause: hyper::http::Error,
    },
    #[error("{url}: {cause}")]
    Exchange { url: String, cause: ClientError },
    #[error("{url}: the blobstore replied {status}")]
    Status { url: String, status: StatusCode },
}

/// Sends a request and returns the response body.
pub async fn send(
    client: &HttpClient,
    call: HttpCall<'_>,
    limits: Limits,
) -> Result<Bytes, HttpError> {
    let HttpCall {
        method,
        url,
        basic,
        headers,
        body,
    } = call;
    // The query of a signed link is a secret.
    let shown = url.split('?').next().unwrap_or_default();
    let mut request = Request::builder().method(method).uri(url);
    if let Some((user, password)) = basic {
        let credentials = STANDARD.encode(format!("{user}:{password}"));
        request = request.header(header::AUTHORIZATION, format!("Basic {credentials}"));
    }
    for (name, value) in headers.into_iter().flatten() {
        request = request.header(name, value.as_str().unwrap_or_default());
    }
    let request = request
        .body(Full::new(body))
        .map_err(|cause| HttpError::Request {
            url: shown.to_owned(),
            cause,
        })?;
    let response = client
        .send(request, limits)
        .await
        .map_err(|cause| HttpError::Exchange {
            url: shown.to_owned(),
            cause,
        })?;
    match response.status() {
        // A store answers PUT with 200, 201 or 204 (RFC 9110, section 9.3.4).
        status if status.is_success() => Ok(response.into_body()),
        status => Err(HttpError::Status {
            url: shown.to_owned(),
            status,
        }),
    }
}

/// Files of a client's CAs, certificate and private key.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
pub struct TlsFiles {
    /// PEM file of the CAs that the peer's certificate is verified against
    #[arg(long = "tls-ca", value_name = "FILE")]
    pub ca: PathBuf,
    /// PEM file of this program's certificate
    #[arg(long = "tls-certificate", value_name = "FILE")]
    pub certificate: PathBuf,
    /// PEM file of this program's private key
    #[arg(long = "tls-key", value_name = "FILE")]
    pub key: PathBuf,
}

/// As [`TlsFiles`], where there may be none: all three or nothing.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
pub struct TlsOptions {
    /// PEM file of the CAs that the peer's certificate is verified against
    #[arg(long = "tls-ca", value_name = "FILE", requires_all = ["certificate", "key"])]
    ca: Option<PathBuf>,
    /// PEM file of this program's certificate
    #[arg(long = "tls-certificate", value_name = "FILE", requires = "ca")]
    certificate: Option<PathBuf>,
    /// PEM file of this program's private key
    #[arg(long = "tls-key", value_name = "FILE", requires = "ca")]
    key: Option<PathBuf>,
}

impl TlsOptions {
    /// Returns the files, if they are given.
    pub fn files(self) -> Option<TlsFiles> {
        let Self {
            ca,
            certificate,
            key,
        } = self;
        Some(TlsFiles {
            ca: ca?,
            certificate: certificate?,
            key: key?,
        })
    }
}

impl TlsFiles {
    /// Loads the files, which are polled from then on. `purpose` is a name for logs.
    pub fn load(
        &self,
        purpose: &'static str,
        server: AcceptedName,
    ) -> Result<Arc<RotatingTls>, TlsError> {
        let Self {
            ca,
            certificate,
            key,
        } = self.clone();
        RotatingTls::load(
            purpose,
            server,
            &config::TlsFiles {
                certificate,
                private_key: key,
                ca,
            },
        )
    }
}

/// Returns the configuration for connections without a client certificate, to servers of `ca`; `None`
/// trusts no server, so that only plain `http` works.
pub fn anonymous_client(ca: Option<&Path>) -> Result<ClientConfig, TlsError> {
    let trust = match ca {
        None => ServerTrust::Roots(RootCertStore::empty()),
        Some(ca) => {
            let verifier = ServerVerifier::of_file(ca);
            // A missing file is a mistake now, and tolerated later.
            verifier.roots()?;
            ServerTrust::Verifier(verifier)
        }
    };
    tls::client_config(trust, ClientIdentity::Anonymous)
}

/// Returns the path `<first byte of sha1(blob id) as two hexadecimal digits>/<blob id>`.
pub fn blob_path(blob: &str) -> String {
    let hash = digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, blob.as_bytes());
    // As the director's client spreads blobs over folders; any other path is another blob.
    format!("{:02x}/{blob}", hash.as_ref()[0])
}

/// Returns `signed/<path>?e=<seconds>&st=<signature>&ts=<unix time>`: a GET that is valid for
/// `seconds` from `now`.
pub fn signed_blob_path(secret: &str, blob: &str, now: u64, seconds: u64) -> String {
    let path = blob_path(blob);
    let signature = signature(secret, &path, now, seconds);
    format!("signed/{path}?e={seconds}&st={signature}&ts={now}")
}

/// Returns the unpadded base64url of HMAC-SHA256 over method, path, time and duration.
fn signature(secret: &str, path: &str, now: u64, seconds: u64) -> String {
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
    URL_SAFE_NO_PAD.encode(hmac::sign(
        &key,
        // In the order in which a director's blobstore checks them.
        format!("GET{path}{now}{seconds}").as_bytes(),
    ))
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpListener,
        thread::JoinHandle,
        time::Duration,
    };

    use super::*;

    /// Starts a server for one request that answers these bytes; returns its URL and the thread,
    /// which returns the request.
    fn server(answer: &'static [u8]) -> (String, JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!(
            "http://{}/bucket/blob?secret=1",
            listener.local_addr().unwrap()
        );
        let served = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = vec![0; 4096];
            let length = stream.read(&mut request).unwrap();
            stream.write_all(answer).unwrap();
            if answer.is_empty() {
                // Hangs until the client gives up.
                let _ = stream.read(&mut [0]);
            }
            String::from_utf8_lossy(&request[..length]).into_owned()
        });
        (url, served)
    }

    /// Requests a blob of at most ten bytes.
    async fn got(answer: &'static [u8], limit: Duration) -> Result<Bytes, String> {
        let (url, served) = server(answer);
        let client = HttpClient::new(anonymous_client(None).unwrap(), 0);
        let call = HttpCall {
            method: Method::GET,
            url: &url,
            basic: None,
            headers: None,
            body: Bytes::new(),
        };
        let result = send(
            &client,
            call,
            Limits {
                time: limit,
                body: 10,
            },
        )
        .await
        .map_err(|error| error.to_string());
        // Joined off the runtime, which must still close the connection that the server waits for.
        tokio::task::spawn_blocking(|| served.join().unwrap())
            .await
            .unwrap();
        if let Err(error) = &result {
            assert!(!error.contains("secret=1"), "{error}");
        }
        result
    }

    #[tokio::test]
    async fn incomplete_blobs_are_errors() {
        let long = Duration::from_secs(20);
        let whole = got(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nblob", long).await;
        assert_eq!(whole, Ok(Bytes::from_static(b"blob")));
        let longest = got(
            b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nblob of 10",
            long,
        )
        .await;
        assert_eq!(longest, Ok(Bytes::from_static(b"blob of 10")));
        for (answer, problem) in [
            (
                &b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nblob"[..],
                "the response was cut short",
            ),
            (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nblob\r\n",
                "the response was cut short",
            ),
            (
                b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\nlonger blob",
                "longer than 10 bytes",
            ),
            (
                b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nblob",
                "404 Not Found",
            ),
            (
                b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",
                "302 Found",
            ),
        ] {
            let error = got(answer, long).await.unwrap_err();
            assert!(error.contains(problem), "{error}");
        }
        let error = got(b"", Duration::from_millis(200)).await.unwrap_err();
        assert!(error.contains("not finished within 200ms"), "{error}");
    }

    #[tokio::test]
    async fn requests_carry_credentials() {
        let (url, served) = server(b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n");
        let headers = Map::from_iter([("x-amz-meta".to_owned(), Value::from("v"))]);
        let call = HttpCall {
            method: Method::PUT,
            url: &url,
            basic: Some(("agent", "password")),
            headers: Some(&headers),
            body: Bytes::from_static(b"blob"),
        };
        let client = HttpClient::new(anonymous_client(None).unwrap(), 0);
        send(
            &client,
            call,
            Limits {
                time: Duration::from_secs(20),
                body: 10,
            },
        )
        .await
        .unwrap();
        let request = tokio::task::spawn_blocking(|| served.join().unwrap())
            .await
            .unwrap();
        assert!(
            request.starts_with("PUT /bucket/blob?secret=1 HTTP/1.1\r\n"),
            "{request}"
        );
        for line in [
            "authorization: Basic YWdlbnQ6cGFzc3dvcmQ=",
            "x-amz-meta: v",
            "content-length: 4",
        ] {
            assert!(request.contains(line), "{request}");
        }
    }

    #[test]
    fn a_path_begins_with_the_hash_of_the_id() {
        // sha1("abc") begins with a9.
        assert_eq!(blob_path("abc"), "a9/abc");
    }

    #[test]
    fn a_signature_is_golden() {
        // printf GETa9/abc1700000000900 | openssl dgst -sha256 -hmac secret -binary | basenc --base64url
        assert_eq!(
            signed_blob_path("secret", "abc", 1_700_000_000, 900),
            "signed/a9/abc?e=900&st=U6ru7hxdGD515dgIX0hCDSDNBJbFNsRlEdbNlP1nuQA&ts=1700000000"
        );
    }

    #[test]
    fn client_files_are_complete_or_absent() {
        use clap::Parser as _;

        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            tls: TlsOptions,
        }

        let parse = |words: &str| Line::try_parse_from(words.split_whitespace());
        assert_eq!(parse("x").unwrap().tls.files(), None);
        let all = parse("x --tls-ca a --tls-certificate b --tls-key c").unwrap();
        assert_eq!(
            all.tls.files(),
            Some(TlsFiles {
                ca: "a".into(),
                certificate: "b".into(),
                key: "c".into(),
            })
        );
        for some in ["x --tls-ca a", "x --tls-key c", "x --tls-ca a --tls-key c"] {
            assert!(parse(some).is_err(), "{some}");
        }
    }
}
