//! Client of control sockets: a running publisher's, and the server's.

use std::{path::Path, time::Duration};

use anyhow::{anyhow, bail};
use bytes::Bytes;
use dns_kit::http_client::{self, ClientError, Limits};
use http_body_util::Full;
use hyper::{Method, Request, StatusCode};
use tokio::net::UnixStream;

/// Time limit of a request whose response needs no round.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum length of a response in bytes; another program may listen at the path.
const MAX_RESPONSE: usize = 64 << 20;

pub(crate) async fn get(socket: &Path, path: &str) -> anyhow::Result<Bytes> {
    let (status, body) = call(TIMEOUT, socket, Method::GET, path, Bytes::new()).await?;
    if status != StatusCode::OK {
        bail!(
            "{}: {status}: {}",
            socket.display(),
            String::from_utf8_lossy(&body).trim_end()
        );
    }
    Ok(body)
}

/// Sends a request to a publisher. Returns status and body.
pub async fn call(
    limit: Duration,
    socket: &Path,
    method: Method,
    path: &str,
    body: Bytes,
) -> anyhow::Result<(StatusCode, Bytes)> {
    let limits = Limits {
        time: limit,
        body: MAX_RESPONSE,
    };
    exchange(socket, method, path, body, limits)
        .await
        .map_err(|error| match error {
            ClientError::Timeout(_) => anyhow!("{}: no answer within {limit:?}", socket.display()),
            other => anyhow!(other).context(format!(
                "{}: cannot connect to the publisher; is `bosh-dns-publish run` running?",
                socket.display()
            )),
        })
}

pub(crate) async fn exchange(
    socket: &Path,
    method: Method,
    path: &str,
    body: Bytes,
    limits: Limits,
) -> Result<(StatusCode, Bytes), ClientError> {
    let stream = UnixStream::connect(socket)
        .await
        .map_err(|error| ClientError::Exchange(error.to_string()))?;
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "localhost")
        // One request for each connection: the program ends behind it, or asks again in seconds.
        .header("connection", "close")
        .header("content-type", "application/json")
        .body(Full::new(body))
        .map_err(|error| ClientError::Exchange(error.to_string()))?;
    let response = http_client::exchange(stream, request, limits).await?;
    Ok((response.status(), response.into_body()))
}
