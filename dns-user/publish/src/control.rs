//! Client of control sockets: a running publisher's, and the server's.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{Method, Request, StatusCode, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

/// Timeout of a response.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Returns the body of a successful GET.
pub async fn get(socket: &Path, path: &str) -> anyhow::Result<Bytes> {
    let (status, body) = call(socket, Method::GET, path, Bytes::new()).await?;
    if status != StatusCode::OK {
        bail!("{}: {status}: {}", socket.display(), String::from_utf8_lossy(&body).trim_end());
    }
    Ok(body)
}

/// Sends a request and returns status and body.
pub async fn call(
    socket: &Path,
    method: Method,
    path: &str,
    body: Bytes,
) -> anyhow::Result<(StatusCode, Bytes)> {
    call_within(TIMEOUT, socket, method, path, body).await
}

/// Sends a request whose response may take some time.
pub async fn call_within(
    limit: Duration,
    socket: &Path,
    method: Method,
    path: &str,
    body: Bytes,
) -> anyhow::Result<(StatusCode, Bytes)> {
    tokio::time::timeout(limit, exchange(socket, method, path, body, usize::MAX))
        .await
        .with_context(|| format!("{}: no answer within {limit:?}", socket.display()))?
        .with_context(|| {
            format!(
                "{}: cannot connect to the publisher; is `bosh-dns-publish run` running?",
                socket.display()
            )
        })
}

/// Sends a request to a server's socket and returns status and body; a body longer than `longest`
/// is an error.
pub(crate) async fn exchange(
    socket: &Path,
    method: Method,
    path: &str,
    body: Bytes,
    longest: usize,
) -> anyhow::Result<(StatusCode, Bytes)> {
    let stream = UnixStream::connect(socket).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // The task ends with the response.
    tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "localhost")
        .header("connection", "close")
        .body(Full::new(body))?;
    let response = sender.send_request(request).await?;
    let status = response.status();
    let body = Limited::new(response.into_body(), longest).collect().await;
    Ok((status, body.map_err(anyhow::Error::from_boxed)?.to_bytes()))
}
