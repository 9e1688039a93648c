//! Serving HTTP to operators within bounds: so many connections, and so long for a
//! request to be complete. Beyond them the oldest connection is closed.

use std::{collections::VecDeque, future::Future, time::Duration};

use axum::{Router, serve::Listener};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::task::AbortHandle;

/// Most connections to one port at a time.
const MAX_CONNECTIONS: usize = 64;

/// How long a client may take for the head of its next request, idle time included.
/// Longer than Prometheus usually waits between two scrapes.
const HEADER_TIMEOUT: Duration = Duration::from_secs(65);

/// Serves connections until `shutdown` ends; then all are cut. `routes` gives those for one.
pub(crate) async fn serve<L: Listener>(
    mut listener: L,
    routes: impl Fn(&L::Io) -> Router,
    shutdown: impl Future<Output = ()>,
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
            // Dropped: closed.
            open.pop_front();
        }
        let service = TowerToHyperService::new(routes(&stream));
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_TIMEOUT)
            .serve_connection(TokioIo::new(stream), service);
        // A client that goes away is no news.
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
