//! A bounded HTTP server: idle clients cannot keep others out.

use std::{collections::VecDeque, future::Future, io, net::SocketAddr, time::Duration};

use anyhow::Context as _;
use axum::{Router, routing::get};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
    service::TowerToHyperService,
};
use prometheus::{TextEncoder, proto::MetricFamily};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    task::{AbortHandle, JoinSet},
};

/// Maximum number of open connections of a server with few clients.
pub const MOST_CONNECTIONS: usize = 64;

/// Maximum lifetime of a connection.
const LIFE: Duration = Duration::from_secs(30);

/// Time after which a connection is closed once its request is answered.
const USED: Duration = Duration::from_secs(20);

/// Timeout for the head of a request.
const HEAD: Duration = Duration::from_secs(5);

/// Pause after a failed accept, which usually means that file descriptors are exhausted.
const PAUSE: Duration = Duration::from_millis(100);

/// Accepts connections until dropped and serves each in its own task. If `most` are open, another one
/// closes the oldest.
pub async fn accept<F, S>(listener: TcpListener, most: usize, mut serve: F)
where
    F: FnMut(TcpStream) -> S + Send + 'static,
    S: Future<Output = ()> + Send + 'static,
{
    let mut tasks = JoinSet::new();
    let mut open: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else {
                    tokio::time::sleep(PAUSE).await;
                    continue;
                };
                open.retain(|connection| !connection.is_finished());
                if open.len() >= most && let Some(oldest) = open.pop_front() {
                    oldest.abort();
                }
                let served = serve(stream);
                open.push_back(tasks.spawn(async move {
                    // Dropping the future closes the connection.
                    let _ = tokio::time::timeout(LIFE, served).await;
                }));
            }
            Some(_) = tasks.join_next() => {}
        }
    }
}

/// Serves requests on a connection.
pub async fn serve(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
) -> io::Result<()> {
    let mut server = auto::Builder::new(TokioExecutor::new());
    server.http1().timer(TokioTimer::new()).header_read_timeout(HEAD);
    let served = server.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    tokio::pin!(served);
    tokio::select! {
        served = &mut served => return served.map_err(io::Error::other),
        () = tokio::time::sleep(USED) => served.as_mut().graceful_shutdown(),
    }
    served.await.map_err(io::Error::other)
}

/// Serves `/metrics` at an address until the process ends; `gather` returns the families.
pub async fn spawn_metrics(
    address: SocketAddr,
    gather: impl Fn() -> prometheus::Result<Vec<MetricFamily>> + Clone + Send + Sync + 'static,
) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot serve metrics at {address}; choose a free address"))?;
    let text = move || async move {
        let text = gather().and_then(|families| TextEncoder::new().encode_to_string(&families));
        text.unwrap_or_else(|error| format!("# {error}\n"))
    };
    tokio::spawn(serve_plain(listener, Router::new().route("/metrics", get(text))));
    Ok(())
}

/// Serves plain HTTP until dropped.
pub async fn serve_plain(listener: TcpListener, router: Router) {
    let serve_one = move |stream| {
        let router = router.clone();
        async move {
            // A client that disconnects is not worth a log line.
            let _ = serve(stream, router).await;
        }
    };
    accept(listener, MOST_CONNECTIONS, serve_one).await;
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn oldest_idle_connection_is_closed() -> anyhow::Result<()> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let router = Router::new().route("/metrics", get(|| async { "up 1\n" }));
        let server = tokio::spawn(serve_plain(listener, router));
        let mut idle = Vec::new();
        for _ in 0..3 * MOST_CONNECTIONS {
            idle.push(TcpStream::connect(address).await?);
        }
        let mut client = TcpStream::connect(address).await?;
        client.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await?;
        let mut reply = String::new();
        client.read_to_string(&mut reply).await?;
        assert!(reply.starts_with("HTTP/1.1 200") && reply.ends_with("up 1\n"), "{reply}");
        // The oldest was closed for a newer one.
        assert_eq!(idle[0].read(&mut [0]).await?, 0);
        server.abort();
        Ok(())
    }
}
