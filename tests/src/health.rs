//! Instances that answer health checks: real TLS servers on loopback, thousands of addresses on one
//! socket, and their certificates.

use std::{
    collections::HashMap,
    fs, io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Result;
use dns_core::config::{HealthConfig, TlsFiles};
use dns_health::HEALTH_NAME;
use dns_kit::tls::RotatingTls;
use http_body_util::Full;
use hyper::{Response, StatusCode, body::Bytes, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::{Mutex, MutexGuard};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::TlsAcceptor;

pub use crate::pki::{Authority, Identity};

//----------- Certificates ---------------------------------------------------

/// Writes key, certificate and CA file into `folder`, each by rename; returns their paths.
pub fn write_files(folder: &Path, identity: &Identity, authorities: &str) -> Result<TlsFiles> {
    let write = |name: &str, text: &str| -> io::Result<_> {
        let (path, new) = (folder.join(name), folder.join(format!("{name}.new")));
        fs::write(&new, text)?;
        fs::rename(&new, &path)?;
        Ok(path)
    };
    Ok(TlsFiles {
        certificate: write("certificate.pem", &identity.certificate)?,
        private_key: write("key.pem", &identity.key)?,
        ca: write("ca.pem", authorities)?,
    })
}

/// Returns a configuration that checks instances at this port.
pub fn config(port: u16, tls: TlsFiles, check_interval: Duration) -> HealthConfig {
    HealthConfig {
        enabled: true,
        port,
        tls: Some(tls),
        check_interval,
        max_tracked_queries: 2000,
        synchronous_check_timeout: Duration::from_secs(1),
        tracked_query_ttl: None,
    }
}

//----------- Fleet ----------------------------------------------------------

/// An instance's response to a health check.
#[derive(Clone, Debug)]
pub enum Says {
    /// Status 200 with this body.
    Body(String),
    /// Accepts the connection and never responds.
    Nothing,
    /// Status 302 with this location.
    Redirect(String),
    /// Status 200 and a body that never ends, one byte at a time.
    Drip,
    /// Raw bytes: `head`, then `again` until the client disconnects.
    Flood { head: Vec<u8>, again: Vec<u8> },
}

impl Says {
    /// Returns the body `{"state": state}`.
    pub fn state(state: &str) -> Self {
        Self::Body(format!(r#"{{"state":"{state}"}}"#))
    }
}

/// A check received by an instance.
#[derive(Clone, Copy, Debug)]
pub struct Hit {
    pub ip: IpAddr,
    /// Time of the request.
    pub at: Instant,
    /// Whether another request to the instance was in progress.
    pub overlaps: bool,
}

/// All instances in 127.0.0.0/8, on one socket that is reachable over loopback only.
pub struct Fleet {
    pub port: u16,
    shared: Arc<Shared>,
    /// Runs the server tasks; they end when it is dropped.
    _runtime: tokio::runtime::Runtime,
}

struct Shared {
    /// Certificates of all instances.
    tls: Arc<RotatingTls>,
    state: Mutex<State>,
}

/// Responses of the instances and the requests seen so far.
#[derive(Default)]
struct State {
    /// Response by instance; unlisted instances report `running`.
    says: HashMap<IpAddr, Says>,
    hits: Vec<Hit>,
    connections: usize,
    failed_handshakes: usize,
    /// Number of requests in progress, by instance.
    in_flight: HashMap<IpAddr, usize>,
}

impl Fleet {
    /// Starts the instances with certificates from `tls`.
    ///
    /// # Errors
    ///
    /// Fails if the socket cannot be bound to the loopback interface.
    pub fn start(tls: &TlsFiles) -> Result<Self> {
        let tls = RotatingTls::load("test", HEALTH_NAME, tls)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("fleet")
            .enable_all()
            .build()?;
        let listener = {
            let _inside = runtime.enter();
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
            socket.bind_device(Some(b"lo"))?;
            socket.set_nonblocking(true)?;
            socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)).into())?;
            socket.listen(4096)?;
            TcpListener::from_std(socket.into())?
        };
        let port = listener.local_addr()?.port();
        let shared = Arc::new(Shared {
            tls: tls.clone(),
            state: Mutex::default(),
        });
        runtime.spawn(tls.watch(|_| {}));
        runtime.spawn(accept(listener, shared.clone()));
        Ok(Self {
            port,
            shared,
            _runtime: runtime,
        })
    }

    /// Sets the response of an instance.
    pub fn says(&self, ip: IpAddr, says: Says) {
        self.state().says.insert(ip, says);
    }

    pub fn tls(&self) -> &RotatingTls {
        &self.shared.tls
    }

    /// Returns all requests so far, in order.
    pub fn hits(&self) -> Vec<Hit> {
        self.state().hits.clone()
    }

    /// Returns the number of TCP connections so far.
    pub fn connections(&self) -> usize {
        self.state().connections
    }

    /// Returns the number of failed handshakes so far.
    pub fn failed_handshakes(&self) -> usize {
        self.state().failed_handshakes
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state()
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// Accepts connections until the runtime ends.
async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                shared.state().connections += 1;
                tokio::spawn(serve(stream, shared.clone()));
            }
            // Out of file descriptors: other connections will be closed soon.
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

/// Serves one connection as the instance it was addressed to.
async fn serve(stream: TcpStream, shared: Arc<Shared>) -> Option<()> {
    let ip = stream.local_addr().ok()?.ip();
    if matches!(shared.state().says.get(&ip), Some(Says::Nothing)) {
        // Wait until the client gives up.
        let mut byte = [0];
        while stream.readable().await.is_ok() {
            match stream.try_read(&mut byte) {
                Ok(0) => return None,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return None,
            }
        }
        return None;
    }
    let _ = stream.set_nodelay(true);
    let Ok(stream) = TlsAcceptor::from(shared.tls.server_config())
        .accept(stream)
        .await
    else {
        shared.state().failed_handshakes += 1;
        return None;
    };
    let says = shared.state().says.get(&ip).cloned();
    match says {
        Some(Says::Flood { head, again }) => return flood(stream, &head, &again).await.ok(),
        Some(Says::Drip) => return drip(stream).await.ok(),
        _ => {}
    }
    let service = service_fn(|_| {
        let shared = shared.clone();
        async move {
            let _in_progress = InProgress::begin(&shared, ip);
            let says = shared.says(ip);
            tokio::task::yield_now().await;
            let response = match says {
                Says::Body(body) => Response::new(Full::new(Bytes::from(body))),
                Says::Redirect(location) => {
                    let mut response = Response::new(Full::default());
                    *response.status_mut() = StatusCode::FOUND;
                    if let Ok(location) = location.parse() {
                        response
                            .headers_mut()
                            .insert(hyper::header::LOCATION, location);
                    }
                    response
                }
                Says::Nothing | Says::Drip | Says::Flood { .. } => {
                    let mut response = Response::new(Full::default());
                    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
                    response
                }
            };
            Ok::<_, std::convert::Infallible>(response)
        }
    });
    http1::Builder::new()
        .serve_connection(TokioIo::new(stream), service)
        .await
        .ok()
}

/// Waits for a request, then sends a body one byte at a time, without end.
async fn drip(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> io::Result<()> {
    stream.read_exact(&mut [0; 1]).await?;
    stream
        .write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        .await?;
    loop {
        stream.write_all(b"1\r\n \r\n").await?;
        stream.flush().await?;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits for a request, then sends without end.
async fn flood(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    head: &[u8],
    again: &[u8],
) -> io::Result<()> {
    let mut request = [0; 1];
    stream.read_exact(&mut request).await?;
    stream.write_all(head).await?;
    let again = again.repeat(16_384 / again.len());
    loop {
        stream.write_all(&again).await?;
    }
}

impl Shared {
    /// Returns the response of an instance.
    fn says(&self, ip: IpAddr) -> Says {
        let says = self.state().says.get(&ip).cloned();
        says.unwrap_or_else(|| Says::state("running"))
    }
}

/// A request in progress. It also ends when its client gives up.
struct InProgress {
    shared: Arc<Shared>,
    ip: IpAddr,
}

impl InProgress {
    fn begin(shared: &Arc<Shared>, ip: IpAddr) -> Self {
        let mut state = shared.state();
        let in_flight = state.in_flight.entry(ip).or_default();
        let overlaps = *in_flight > 0;
        *in_flight += 1;
        let at = Instant::now();
        state.hits.push(Hit { ip, at, overlaps });
        Self {
            shared: Arc::clone(shared),
            ip,
        }
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        *self.shared.state().in_flight.entry(self.ip).or_default() -= 1;
    }
}

/// Returns address number `n` of a fleet, counting from 127.40.0.1.
pub fn instance(n: u32) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from_bits(
        Ipv4Addr::new(127, 40, 0, 1).to_bits() + n,
    ))
}
