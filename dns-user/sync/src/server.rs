//! A bounded HTTP server: idle clients cannot keep others out.

use std::{collections::VecDeque, future::Future, io, time::Duration};

use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    task::{AbortHandle, JoinSet},
};

/// Maximum number of open connections; another one closes the oldest.
const MOST_CONNECTIONS: usize = 64;

/// Maximum lifetime of a connection.
const LIFE: Duration = Duration::from_secs(30);

/// Timeout for the head of a request.
const HEAD: Duration = Duration::from_secs(5);

/// Pause after a failed accept, which usually means that file descriptors are exhausted.
const PAUSE: Duration = Duration::from_millis(100);

/// Accepts connections until the process ends and serves each in its own task.
pub(crate) async fn accept<F, S>(listener: TcpListener, mut serve: F)
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
                if open.len() >= MOST_CONNECTIONS && let Some(oldest) = open.pop_front() {
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
pub(crate) async fn serve(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: axum::Router,
) -> io::Result<()> {
    let mut server = auto::Builder::new(TokioExecutor::new());
    server.http1().timer(TokioTimer::new()).header_read_timeout(HEAD);
    let served = server.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    served.await.map_err(io::Error::other)
}
