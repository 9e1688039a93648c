//! A bounded HTTP server: plain TCP, mutual TLS, or a control socket.
//!
//! At the limit of connections, a new one replaces a connection of the peer that has the most: its oldest
//! handshake that makes no progress if it has one, otherwise its oldest connection. No peer keeps others out, however
//! many connections it opens. Unread responses ([`unread`]) and bodies of requests ([`requests`]) are limited as
//! well, in time and in bytes of a peer and of all ([`held`]).

mod held;
mod requests;
mod unread;

use std::{
    convert::Infallible,
    future::Future,
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use anyhow::Context as _;
use axum::{
    Router,
    body::Body,
    http::{StatusCode, header::CONNECTION},
    response::{IntoResponse as _, Response},
    routing::get,
};
use hyper::{
    Request,
    body::{Body as _, Incoming},
    server::conn::http1,
    service::{Service as _, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use prometheus::{IntCounter, TextEncoder, proto::MetricFamily};
use rustls::ServerConfig;
use rustls_pki_types::CertificateDer;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, UnixStream},
    sync::{Notify, watch},
    task::JoinSet,
};
use tokio_rustls::TlsAcceptor;

use self::{
    held::HeldBytes,
    requests::{BoundedBody, CutOff, HeldRequest, MAX_SMALL},
    unread::{Responses, StallLimit},
};
use crate::{
    connections::{Connections, Peer, Place},
    logs::LineLimit,
    tls::{CertificateFacts, common_name},
    unix_socket::ControlListener,
};

/// Pause after a failed accept, which usually means that file descriptors are exhausted.
const PAUSE: Duration = Duration::from_millis(100);

/// Time for requests in progress to finish when a server stops.
const STOP_LIMIT: Duration = Duration::from_secs(1);

//----------- Server ---------------------------------------------------------

/// Accepts connections on one listener, within its limits.
pub struct Server {
    /// Subject of its log lines, such as "the API".
    name: &'static str,
    listener: Listener,
    limits: ServerLimits,
    /// Counts connections that were closed in favour of another.
    replaced: Option<IntCounter>,
}

/// The socket of a server.
pub enum Listener {
    /// Connections without encryption, over TCP.
    Plain(TcpListener),
    /// With the TLS configuration that is current when a connection arrives.
    Tls(TcpListener, TlsSource),
    /// Connections of users of this machine.
    Control(ControlListener),
}

/// Returns the current TLS configuration of a server.
pub type TlsSource = Box<dyn Fn() -> Arc<ServerConfig> + Send + Sync>;

/// Limits of a server.
#[derive(Clone, Copy, Debug)]
pub struct ServerLimits {
    /// Maximum number of connections, handshakes included.
    pub connections: usize,
    /// Time limit for a TLS handshake.
    pub handshake: Duration,
    /// Time limit for the head of the next request, idle time included.
    pub idle: Duration,
    /// Maximum size of a request's head in bytes.
    pub head: usize,
    /// Time for which a client may leave a response unread.
    pub unread: Duration,
    /// Time limit for the body of a request, from the end of its head.
    pub request: Duration,
    /// Maximum size of a request's body in bytes; handlers may have lower limits.
    pub body: usize,
    /// Maximum size in bytes of all bodies that are being received or answered. One peer has half of it; a single
    /// body may be larger.
    pub bodies: usize,
}

impl Default for ServerLimits {
    /// Returns the limits of a server with few clients.
    fn default() -> Self {
        Self {
            connections: 128,
            handshake: Duration::from_secs(5),
            // Longer than the usual scrape interval of Prometheus.
            idle: Duration::from_secs(65),
            head: 64 << 10,
            unread: Duration::from_secs(20),
            request: Duration::from_secs(20),
            body: 8 << 20,
            bodies: 16 << 20,
        }
    }
}

/// The other end of a connection.
#[derive(Clone, Debug)]
pub struct Client {
    /// User or network of the client.
    pub peer: Peer,
    /// Address of the client; `None` on a control socket.
    pub address: Option<SocketAddr>,
    /// The client's verified certificate; `None` without TLS, or if the server requires none.
    pub certificate: Option<CertificateDer<'static>>,
    /// End of the certificate's validity.
    certificate_ends: Option<SystemTime>,
}

impl Client {
    /// Creates a client that has presented no certificate.
    fn new(peer: Peer, address: Option<SocketAddr>) -> Self {
        Self {
            peer,
            address,
            certificate: None,
            certificate_ends: None,
        }
    }

    /// Returns the common name in the client's certificate.
    pub fn common_name(&self) -> Option<String> {
        self.certificate.as_ref().and_then(common_name)
    }
}

/// Maximum time after a handshake for which a client's certificate counts as verified: the CAs may have changed.
const MAX_VERIFIED: Duration = Duration::from_secs(600);

impl Client {
    /// Returns when the client must present its certificate again; never without one.
    async fn verified(&self) {
        if self.certificate.is_none() {
            return std::future::pending().await;
        }
        let _ = tokio::time::timeout(MAX_VERIFIED, until(self.certificate_ends)).await;
    }
}

/// Returns at a time; never without one. A clock that is set back meanwhile is not noticed.
async fn until(time: Option<SystemTime>) {
    match time {
        Some(time) => {
            let left = time.duration_since(SystemTime::now()).unwrap_or_default();
            tokio::time::sleep(left).await;
        }
        None => std::future::pending().await,
    }
}

/// Returns the response to a request after the end of the client's certificate.
fn certificate_ended() -> Response {
    let text = "the client's certificate has expired; connect with a new one\n";
    (StatusCode::UNAUTHORIZED, [(CONNECTION, "close")], text).into_response()
}

type Routes = dyn Fn(&Client) -> Router + Send + Sync;

impl Server {
    /// Creates a server with the default limits.
    pub fn new(name: &'static str, listener: Listener) -> Self {
        Self {
            name,
            listener,
            limits: ServerLimits::default(),
            replaced: None,
        }
    }

    /// Uses other limits than the default ones.
    pub fn with_limits(self, limits: ServerLimits) -> Self {
        Self { limits, ..self }
    }

    /// Counts connections that are closed in favour of another.
    pub fn count_replaced(self, replaced: IntCounter) -> Self {
        Self {
            replaced: Some(replaced),
            ..self
        }
    }

    /// Returns the address of a TCP server, including a port chosen by the kernel.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match &self.listener {
            Listener::Plain(socket) | Listener::Tls(socket, _) => socket.local_addr(),
            Listener::Control(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Serves until `stop` is ready, then lets requests in progress finish within [`STOP_LIMIT`]. `routes`
    /// returns the router for a client.
    pub async fn run(
        self,
        routes: impl Fn(&Client) -> Router + Send + Sync + 'static,
        stop: impl Future<Output = ()>,
    ) {
        let Self {
            name,
            listener,
            limits,
            replaced,
        } = self;
        let (stopping, _) = watch::channel(false);
        let context = Arc::new(Context {
            name,
            limits,
            routes: Box::new(routes),
            responses: Responses::default(),
            bodies: HeldBytes::new(limits.bodies),
        });
        let connections = Connections::without_shares(limits.connections);
        let mut tasks = JoinSet::new();
        let mut stop = std::pin::pin!(stop);
        loop {
            let accepted = tokio::select! {
                () = &mut stop => break,
                accepted = listener.accept() => accepted,
                // Otherwise the set would keep the result of every connection that ended.
                Some(_) = tasks.join_next() => continue,
            };
            let (socket, client) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    static LIMIT: LineLimit = LineLimit::new();
                    if let Some(suppressed) = LIMIT.admit_any() {
                        tracing::warn!(suppressed, "{name} cannot accept a connection: {error}");
                    }
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            let (place, leaving) = connections.enter_handshake(client.peer);
            if let Some(leaving) = leaving {
                replaced.as_ref().inspect(|counter| counter.inc());
                static LIMIT: LineLimit = LineLimit::new();
                if let Some(suppressed) = LIMIT.admit_any() {
                    tracing::warn!(
                        suppressed,
                        "{name} has {} connections: the oldest one of {}, which has the most, was closed",
                        limits.connections,
                        leaving.peer()
                    );
                }
                // Until then it holds its descriptor.
                leaving.ended().await;
            }
            let context = context.clone();
            let stopping = stopping.subscribe();
            tasks.spawn(async move {
                tokio::select! {
                    () = context.connection(socket, client, &place, stopping) => {}
                    // Dropping the other future closes the connection in any state: in a handshake,
                    // a handler, or an unread response.
                    () = place.called_off() => {}
                }
            });
        }
        // From here on clients are refused at once instead of waiting in the backlog.
        drop(listener);
        stopping.send_replace(true);
        let all_ended = async { while tasks.join_next().await.is_some() {} };
        // The remaining connections are closed.
        let _ = tokio::time::timeout(STOP_LIMIT, all_ended).await;
    }
}

enum Socket {
    Plain(TcpStream),
    Tls(TcpStream, Arc<ServerConfig>),
    Control(UnixStream),
}

impl Listener {
    async fn accept(&self) -> io::Result<(Socket, Client)> {
        let (stream, config) = match self {
            Self::Control(socket) => {
                let (stream, user) = socket.accept().await?;
                let client = Client::new(Peer::User(user.as_raw()), None);
                return Ok((Socket::Control(stream), client));
            }
            Self::Plain(socket) => (socket.accept().await?, None),
            Self::Tls(socket, config) => (socket.accept().await?, Some(config())),
        };
        let (stream, address) = stream;
        // Responses are written at once, so delaying them gains nothing.
        let _ = stream.set_nodelay(true);
        let peer = Peer::of(address, stream.local_addr().ok());
        let socket = match config {
            Some(config) => Socket::Tls(stream, config),
            None => Socket::Plain(stream),
        };
        Ok((socket, Client::new(peer, Some(address))))
    }
}

/// State shared by the connections of a server.
struct Context {
    name: &'static str,
    limits: ServerLimits,
    routes: Box<Routes>,
    responses: Responses,
    /// Bodies of requests that are not answered.
    bodies: HeldBytes,
}

impl Context {
    /// Serves a connection until it ends.
    async fn connection(
        &self,
        socket: Socket,
        mut client: Client,
        place: &Place,
        stopping: watch::Receiver<bool>,
    ) {
        let close = place.closer();
        match socket {
            Socket::Plain(stream) => {
                place.established();
                self.requests(stream, client, close, stopping).await;
            }
            Socket::Control(stream) => {
                place.established();
                self.requests(stream, client, close, stopping).await;
            }
            Socket::Tls(stream, config) => {
                let handshake = TlsAcceptor::from(config).accept(stream);
                let problem = match tokio::time::timeout(self.limits.handshake, handshake).await {
                    Ok(Ok(stream)) => {
                        place.established();
                        let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
                        if let Some(certificate) = chain.first() {
                            client.certificate_ends = CertificateFacts::parse(certificate)
                                .ok()
                                .map(|facts| facts.not_after);
                            client.certificate = Some(certificate.clone().into_owned());
                        }
                        return self.requests(stream, client, close, stopping).await;
                    }
                    Ok(Err(error)) => error.to_string(),
                    Err(_) => format!("not finished within {:?}", self.limits.handshake),
                };
                static LIMIT: LineLimit = LineLimit::new();
                if let Some(client) = client.address
                    && let Some(suppressed) = LIMIT.admit(client.ip())
                {
                    tracing::info!(%client, suppressed, "{}: TLS handshake failed: {problem}", self.name);
                }
            }
        }
    }

    async fn requests<S>(
        &self,
        stream: S,
        client: Client,
        close: Arc<Notify>,
        mut stopping: watch::Receiver<bool>,
    ) where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        // Once for each connection, because routes may depend on the client's certificate.
        let router = TowerToHyperService::new((self.routes)(&client));
        let peer = client.peer;
        let ends = client.certificate_ends;
        let service = service_fn(move |request| {
            let router = router.clone();
            let close = close.clone();
            async move {
                // The handshake may be long ago. The connection is about to be closed, but a clock may jump.
                if ends.is_some_and(|ends| ends < SystemTime::now()) {
                    return Ok(certificate_ended());
                }
                self.respond(router, request, peer, close).await
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.idle)
            .max_buf_size(self.limits.head)
            .serve_connection(
                TokioIo::new(StallLimit::new(stream, self.limits.unread)),
                service,
            );
        let mut connection = std::pin::pin!(connection);
        // An error means that the server is gone.
        let stopped = async { _ = stopping.wait_for(|stopping| *stopping).await };
        let ended = tokio::select! {
            ended = &mut connection => ended,
            () = stopped => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
            () = client.verified() => {
                connection.as_mut().graceful_shutdown();
                tokio::select! {
                    ended = connection => ended,
                    // A response without an end ends with the certificate.
                    () = until(ends) => return,
                }
            }
        };
        if let Err(error) = ended {
            tracing::debug!(peer = %client.peer, "{}: connection ended: {error}", self.name);
        }
    }
}

impl Context {
    /// Answers a request. Notifying `close` closes the connection.
    async fn respond(
        &self,
        router: TowerToHyperService<Router>,
        request: Request<Incoming>,
        peer: Peer,
        close: Arc<Notify>,
    ) -> Result<Response, Infallible> {
        let response = self.answer(router, request, peer, close.clone()).await?;
        Ok(self.responses.count(response, peer, close))
    }

    /// Answers a request within the limits of its body.
    async fn answer(
        &self,
        router: TowerToHyperService<Router>,
        request: Request<Incoming>,
        peer: Peer,
        close: Arc<Notify>,
    ) -> Result<Response, Infallible> {
        if request.body().is_end_stream() {
            return router.call(request.map(Body::new)).await;
        }
        let declared = request.body().size_hint().lower();
        // By the header Content-Length, before anything of the body is read.
        if declared > self.limits.body as u64 {
            return Ok(self.cut_off(CutOff::Long(self.limits.body), peer));
        }
        let now = Instant::now();
        // The entry is empty, and the body counts as it arrives.
        let Some(place) = self.bodies.admit(peer, 0, MAX_SMALL, close, now) else {
            return Ok(self.cut_off(CutOff::Crowded, peer));
        };
        // Until the response is there, a handler may hold the body.
        let held = HeldRequest::new(place, self.limits);
        let of_handler = held.clone();
        let request = request.map(|body| Body::new(BoundedBody::new(body, of_handler)));
        let response = router.call(request).await?;
        match held.cut_off() {
            Some(why) => Ok(self.cut_off(why, peer)),
            None => Ok(response),
        }
    }

    /// Returns the response to a request whose body was cut off.
    fn cut_off(&self, why: CutOff, peer: Peer) -> Response {
        static LIMIT: LineLimit = LineLimit::new();
        if let Some(suppressed) = LIMIT.admit_any() {
            tracing::info!(%peer, suppressed, "{}: request refused: {why}", self.name);
        }
        why.response()
    }
}

//----------- Metrics --------------------------------------------------------

/// Serves `/metrics` at an address until the process ends; `gather` returns the families.
pub async fn spawn_metrics(
    address: SocketAddr,
    gather: impl Fn() -> Vec<MetricFamily> + Clone + Send + Sync + 'static,
) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot serve metrics at {address}; choose a free address"))?;
    let router = Router::new().route(
        "/metrics",
        get(move || async move {
            let text = TextEncoder::new().encode_to_string(&gather());
            text.unwrap_or_else(|error| format!("# {error}\n"))
        }),
    );
    let server = Server::new("the metrics port", Listener::Plain(listener));
    tokio::spawn(server.run(move |_| router.clone(), std::future::pending()));
    Ok(())
}

#[cfg(test)]
mod tests;
