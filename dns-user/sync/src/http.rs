//! Requests to blobstores: bounded in time and size.

use std::time::Duration;

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::{Method, Request, StatusCode, header};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use rustls::ClientConfig;
use serde_json::{Map, Value};

/// A client of a blobstore.
#[derive(Clone, Debug)]
pub struct HttpClient {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
}

/// A request to a blobstore or to the publisher's API.
#[derive(Clone, Debug)]
pub struct Call<'a> {
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

/// Reasons why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The exchange failed: connection, TLS or HTTP, an invalid header, or a body that is too long.
    #[error("{url}: {problem}")]
    Request {
        /// Without its query, which may be a secret.
        url: String,
        /// The HTTP client's message with its causes.
        problem: String,
    },
    /// The store replied with an error status.
    #[error("{url}: the blobstore replied {status}")]
    Status {
        /// The URL without its query, which may be a secret.
        url: String,
        /// Status of the response.
        status: StatusCode,
    },
    /// The request took too long.
    #[error("{url}: not finished within {limit:?}")]
    Timeout {
        /// The URL without its query, which may be a secret.
        url: String,
        /// The limit that was exceeded.
        limit: Duration,
    },
}

impl HttpClient {
    /// Returns a client that verifies servers according to `tls`; plain `http` works as well.
    pub fn new(tls: ClientConfig) -> Self {
        let connector =
            HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().build();
        // There is one connection per version; idle ones are not kept for hours.
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build(connector);
        Self { client }
    }

    /// Sends a request and returns the response body; a body longer than `longest` is an error.
    pub async fn send(&self, call: Call<'_>, longest: usize, limit: Duration) -> Result<Bytes, HttpError> {
        let url = call.url.split('?').next().unwrap_or_default().to_owned();
        match tokio::time::timeout(limit, self.exchange(call, &url, longest)).await {
            Ok(result) => result,
            Err(_) => Err(HttpError::Timeout { url, limit }),
        }
    }

    /// Sends a request without a timeout.
    async fn exchange(&self, call: Call<'_>, shown: &str, longest: usize) -> Result<Bytes, HttpError> {
        let failed = |problem: String| HttpError::Request { url: shown.to_owned(), problem };
        let Call { method, url, basic, headers, body } = call;
        let mut request = Request::builder().method(method).uri(url);
        if let Some((user, password)) = basic {
            let credentials = STANDARD.encode(format!("{user}:{password}"));
            request = request.header(header::AUTHORIZATION, format!("Basic {credentials}"));
        }
        for (name, value) in headers.into_iter().flatten() {
            request = request.header(name, value.as_str().unwrap_or_default());
        }
        let request = request.body(Full::new(body)).map_err(|error| failed(error.to_string()))?;
        let response = self.client.request(request).await;
        let response = response.map_err(|error| failed(format!("{:#}", anyhow::Error::from(error))))?;
        let status = response.status();
        if !status.is_success() {
            return Err(HttpError::Status { url: shown.to_owned(), status });
        }
        let body = Limited::new(response.into_body(), longest).collect().await.map_err(|error| {
            match error.is::<LengthLimitError>() {
                true => failed(format!("the blob is longer than {longest} bytes")),
                false => failed(format!("the blob was cut short: {:#}", anyhow::Error::from_boxed(error))),
            }
        })?;
        Ok(body.to_bytes())
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpListener,
        thread::JoinHandle,
    };

    use super::*;
    use crate::tls;

    /// Starts a server for one request that answers these bytes; returns its URL and the thread,
    /// which returns the request.
    fn server(answer: &'static [u8]) -> (String, JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/bucket/blob?secret=1", listener.local_addr().unwrap());
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
        let client = HttpClient::new(tls::without_authorities());
        let call = Call { method: Method::GET, url: &url, basic: None, headers: None, body: Bytes::new() };
        let result = client.send(call, 10, limit).await.map_err(|error| error.to_string());
        // Joined off the runtime, which must still close the connection that the server waits for.
        tokio::task::spawn_blocking(|| served.join().unwrap()).await.unwrap();
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
        for (answer, problem) in [
            (&b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nblob"[..], "the blob was cut short"),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nblob\r\n", "the blob was cut short"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\nlonger blob", "longer than 10 bytes"),
            (b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nblob", "404 Not Found"),
            (b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", "302 Found"),
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
        let call = Call {
            method: Method::PUT,
            url: &url,
            basic: Some(("agent", "password")),
            headers: Some(&headers),
            body: Bytes::from_static(b"blob"),
        };
        HttpClient::new(tls::without_authorities()).send(call, 10, Duration::from_secs(20)).await.unwrap();
        let request = tokio::task::spawn_blocking(|| served.join().unwrap()).await.unwrap();
        assert!(request.starts_with("PUT /bucket/blob?secret=1 HTTP/1.1\r\n"), "{request}");
        for line in ["authorization: Basic YWdlbnQ6cGFzc3dvcmQ=", "x-amz-meta: v", "content-length: 4"] {
            assert!(request.contains(line), "{request}");
        }
    }
}
