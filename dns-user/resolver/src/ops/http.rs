//! HTTP server for operators with limits on connections, time per request head and time per
//! response. A connection that exceeds one is closed.

use std::{collections::VecDeque, future::Future, time::Duration};

use axum::{Router, serve::Listener};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::task::AbortHandle;

use dns_platform::stall::{StallLimit, WRITE_TIMEOUT};

/// Maximum number of connections per port; a new one closes the oldest.
const MAX_CONNECTIONS: usize = 64;

/// Time limit for the head of the next request, including idle time: longer than Prometheus usually
/// waits between scrapes.
const HEADER_TIMEOUT: Duration = Duration::from_secs(65);

/// Serves connections until `shutdown` completes, then closes all of them. `routes` returns the router
/// for a connection.
pub(crate) async fn serve<L: Listener>(
    listener: L,
    routes: impl Fn(&L::Io) -> Router,
    shutdown: impl Future<Output = ()>,
) {
    serve_within(listener, routes, shutdown, WRITE_TIMEOUT).await;
}

async fn serve_within<L: Listener>(
    mut listener: L,
    routes: impl Fn(&L::Io) -> Router,
    shutdown: impl Future<Output = ()>,
    write_timeout: Duration,
) {
    let mut open: VecDeque<Connection> = VecDeque::new();
    tokio::pin!(shutdown);
    loop {
        let (stream, _client) = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut shutdown => return,
        };
        open.retain(|Connection(task)| !task.is_finished());
        if open.len() >= MAX_CONNECTIONS {
            open.pop_front();
        }
        let service = TowerToHyperService::new(routes(&stream));
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_TIMEOUT)
            .max_buf_size(64 << 10)
            .serve_connection(TokioIo::new(StallLimit::new(stream, write_timeout)), service);
        let task = tokio::spawn(async { drop(connection.await) });
        open.push_back(Connection(task.abort_handle()));
    }
}

/// An open connection; closed when dropped.
struct Connection(AbortHandle);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::{TcpListener, TcpStream},
    };

    use super::*;

    #[tokio::test]
    async fn unread_reply_closes_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/", get(|| async { vec![b'x'; 64 << 20] }));
        let served = serve_within(
            listener,
            |_: &TcpStream| router.clone(),
            std::future::pending(),
            Duration::from_millis(200),
        );
        let client = async {
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
            // Long enough for the server to time out even on a busy machine.
            tokio::time::sleep(Duration::from_secs(2)).await;
            let mut read = Vec::new();
            // A reset also proves that the connection was closed.
            let _ = client.read_to_end(&mut read).await;
            read.len()
        };
        let read = tokio::select! { () = served => unreachable!("it never ends"), read = client => read };
        assert!(read < 64 << 20, "{read}");
    }
}
