//! Accepts TLS connections; handshakes run concurrently, each with a time limit.
//!
//! Before its handshake a connection is admitted by the user of its peer. A user may hold at most
//! as many handshakes as are still free; a further connection is closed immediately. Additional
//! handshakes are reserved for administrators: root and the server's own user.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use prometheus::{IntCounter, Registry};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::AbortHandle,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::peer::Peer;
use dns_kit::{logs::LineLimit, metrics::families, tls::RotatingTls};
use dns_upstream::admission::Admission;

const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);

/// Maximum number of concurrent handshakes. Only local processes can connect.
const HANDSHAKES: usize = 64;

/// Additional handshakes for root and the server's own user.
const RESERVE: usize = 32;

/// Registers the limit of handshakes and a counter of connections refused because of it.
pub(super) fn register(registry: &Registry) -> prometheus::Result<IntCounter> {
    let limits = families::LIMIT.gauges()?;
    for (resource, limit) in [("api_handshakes", HANDSHAKES), ("api_operator_handshakes", RESERVE)] {
        limits.with_label_values(&[resource]).set(limit as i64);
    }
    registry.register(Box::new(limits))?;
    let refused = families::API_REFUSED_CONNECTIONS_TOTAL.counter()?;
    registry.register(Box::new(refused.clone()))?;
    Ok(refused)
}

/// A connection whose client presented a valid certificate.
type Accepted = (TlsStream<TcpStream>, SocketAddr);

/// Yields connections after their handshake.
pub(super) struct TlsListener {
    address: SocketAddr,
    /// Connections after their handshake.
    ready: mpsc::Receiver<Accepted>,
    /// Accepting task, aborted with the listener.
    accepting: AbortHandle,
}

impl TlsListener {
    /// Starts accepting connections on `socket`.
    ///
    /// `refused` counts connections for whose handshake there is no slot.
    pub(super) fn start(socket: TcpListener, tls: Arc<RotatingTls>, refused: IntCounter) -> io::Result<Self> {
        let address = socket.local_addr()?;
        let (done, ready) = mpsc::channel(HANDSHAKES);
        let accepting = tokio::spawn(accept(socket, tls, done, refused)).abort_handle();
        Ok(Self { address, ready, accepting })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for TlsListener {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl axum::serve::Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> Accepted {
        match self.ready.recv().await {
            Some(connection) => connection,
            // The accepting task ends only when aborted; without it there are no more connections.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}

/// Accepts connections until aborted; each handshake is a separate task.
async fn accept(
    socket: TcpListener,
    tls: Arc<RotatingTls>,
    done: mpsc::Sender<Accepted>,
    refused: IntCounter,
) {
    let places = Admission::new(HANDSHAKES);
    let reserve = Admission::new(RESERVE);
    let own = nix::unistd::Uid::effective().as_raw();
    loop {
        let (stream, client) = match socket.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                static LIMIT: LineLimit = LineLimit::new();
                if let Some(left_out) = LIMIT.admit_any() {
                    tracing::warn!(%error, left_out, "the API cannot accept a connection");
                }
                // Probably out of file descriptors; wait until some are closed.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let peer = stream.local_addr().map_or(Peer::Address(client.ip()), |server| Peer::of(client, server));
        let is_operator = matches!(peer, Peer::User(user) if user == 0 || user == own);
        let place = places.admit_as(peer).or_else(|| is_operator.then(|| reserve.admit_as(peer)).flatten());
        let Some(place) = place else {
            refused.inc();
            static LIMIT: LineLimit = LineLimit::new();
            if let Some(left_out) = LIMIT.admit_any() {
                tracing::warn!(
                    ?peer,
                    left_out,
                    "too many unfinished API handshakes from one user; connection closed"
                );
            }
            continue;
        };
        let acceptor = TlsAcceptor::from(tls.server_config());
        let done = done.clone();
        tokio::spawn(async move {
            static LIMIT: LineLimit = LineLimit::new();
            let why = match tokio::time::timeout(HANDSHAKE_LIMIT, acceptor.accept(stream)).await {
                Ok(Ok(stream)) => {
                    // The receiver is dropped only when the API ends.
                    drop(done.send((stream, client)).await);
                    None
                }
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some("it did not finish its TLS handshake in time".to_owned()),
            };
            if let Some(why) = why
                && let Some(left_out) = LIMIT.admit(client.ip())
            {
                tracing::info!(%client, why, left_out, "API client refused");
            }
            drop(place);
        });
    }
}
