//! Client of a running publisher's control socket.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{Method, Request, StatusCode, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

/// Timeout of a response.
const PATIENCE: Duration = Duration::from_secs(30);

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
    let asked = async {
        let stream = UnixStream::connect(socket).await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // The task ends with the response.
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "bosh-dns-publish")
            .header("connection", "close")
            .body(Full::new(body))?;
        let response = sender.send_request(request).await?;
        let status = response.status();
        anyhow::Ok((status, response.into_body().collect().await?.to_bytes()))
    };
    tokio::time::timeout(PATIENCE, asked)
        .await
        .with_context(|| format!("{}: no answer within {PATIENCE:?}", socket.display()))?
        .with_context(|| {
            format!(
                "{}: cannot connect to the publisher; is `bosh-dns-publish run` running?",
                socket.display()
            )
        })
}
