//! Connects to HTTP servers, within a time and a number of connections.

use std::{
    collections::HashMap,
    io,
    net::{Ipv4Addr, SocketAddr},
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll},
    time::Duration,
};

use hyper::{
    Uri,
    rt::{Read, ReadBufCursor, Write},
};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::{
    client::legacy::connect::{Connected, Connection, HttpConnector, dns},
    rt::TokioIo,
};
use parking_lot::Mutex;
use rustls::ClientConfig;
use tokio::net::TcpStream;
use tower_service::Service;
use url::Url;

use super::{
    host_names::{HostName, HostNames},
    slots::{ConnectionLimit, ConnectionSlot},
};

/// Maximum number of connections to one handler's server, idle ones included, and to the servers to which it redirects.
pub(crate) const MAX_CONNECTIONS: usize = 64;
/// Time limit for a slot, the look-up of the host name, connecting and the TLS handshake. The client connects in the
/// background when a request has found another connection meanwhile, and then nothing else limits the time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which a connection waits for the first look-up of its host name.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(2);

/// Reason why there is no connection.
type ConnectError = Box<dyn std::error::Error + Send + Sync>;

/// Opens the connections of one HTTP client.
#[derive(Clone)]
pub(crate) struct Connector {
    hosts: Hosts,
    /// The host name of the handler's URL, resolved as long as the handler exists: its addresses stay known
    /// while no recursor answers.
    _own: Option<Arc<HostName>>,
    limit: ConnectionLimit,
    inner: HttpsConnector<HttpConnector<Hosts>>,
}

impl Connector {
    /// Creates a connector for the server at `url`, and those to which it redirects. Must be called inside a
    /// tokio runtime.
    pub(crate) fn new(names: &Arc<HostNames>, url: &Url, tls: ClientConfig) -> Self {
        let hosts = Hosts {
            names: Arc::clone(names),
            followed: Arc::default(),
        };
        // At once, so that the first query need not wait for the look-up.
        let own = url.host_str().and_then(|host| hosts.follow(host));
        let mut http = HttpConnector::new_with_resolver(hosts.clone());
        // It connects for https as well; TLS is above it.
        http.enforce_http(false);
        http.set_nodelay(true);
        let https = HttpsConnectorBuilder::new().with_tls_config(tls);
        Self {
            hosts,
            _own: own,
            limit: ConnectionLimit::new(MAX_CONNECTIONS),
            inner: https.https_or_http().enable_http1().wrap_connector(http),
        }
    }

    async fn connect(mut self, server: Uri) -> Result<HttpStream, ConnectError> {
        let slot = self.limit.enter().await.ok_or("no connection is free")?;
        // Held by the connection, so that its name is looked up only while it is in use.
        let host = server.host().and_then(|host| self.hosts.follow(host));
        let stream = self.inner.call(server).await?;
        Ok(HttpStream {
            stream,
            _host: host,
            _slot: slot,
        })
    }
}

impl Service<Uri> for Connector {
    type Response = HttpStream;
    type Error = ConnectError;
    type Future = Pin<Box<dyn Future<Output = Result<HttpStream, ConnectError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, server: Uri) -> Self::Future {
        let connecting = tokio::time::timeout(CONNECT_TIMEOUT, self.clone().connect(server));
        Box::pin(async { connecting.await? })
    }
}

/// A connection, which counts against the limits until it is closed.
pub(crate) struct HttpStream {
    stream: MaybeHttpsStream<TokioIo<TcpStream>>,
    _host: Option<Arc<HostName>>,
    _slot: ConnectionSlot,
}

impl Connection for HttpStream {
    fn connected(&self) -> Connected {
        self.stream.connected()
    }
}

impl Read for HttpStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl Write for HttpStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Host names of HTTP servers, each resolved repeatedly while a connection to it exists.
#[derive(Clone)]
struct Hosts {
    names: Arc<HostNames>,
    /// Host names in use, and some that were until lately.
    followed: Arc<Mutex<HashMap<String, Weak<HostName>>>>,
}

impl Hosts {
    /// Returns a host name, which is resolved until dropped; `None` for an address.
    fn follow(&self, host: &str) -> Option<Arc<HostName>> {
        // In a URI, brackets are around IPv6 addresses only (RFC 3986, section 3.2.2).
        let is_address = host.starts_with('[') || host.parse::<Ipv4Addr>().is_ok();
        if is_address {
            return None;
        }
        let mut followed = self.followed.lock();
        if let Some(known) = followed.get(host).and_then(Weak::upgrade) {
            return Some(known);
        }
        // A server may redirect to any number of hosts: those that are no longer in use go here.
        followed.retain(|_, name| name.strong_count() > 0);
        let name = self.names.follow(host);
        followed.insert(host.to_owned(), Arc::downgrade(&name));
        Some(name)
    }
}

impl Service<dns::Name> for Hosts {
    type Response = std::iter::Once<SocketAddr>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: dns::Name) -> Self::Future {
        let host = self.follow(name.as_str());
        Box::pin(async move {
            let address = match host {
                Some(host) => host.address(LOOK_UP_TIMEOUT).await,
                None => None,
            };
            let address = address.ok_or_else(|| io::Error::other("the host name is not known"))?;
            // The client takes the port from the URL.
            Ok(std::iter::once(SocketAddr::new(address, 0)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts() -> Hosts {
        Hosts {
            names: Arc::default(),
            followed: Arc::default(),
        }
    }

    #[tokio::test]
    async fn used_names_are_followed() {
        let hosts = hosts();
        for address in ["192.0.2.1", "[::1]"] {
            assert!(hosts.follow(address).is_none(), "{address}");
        }
        let one = hosts.follow("a.test").unwrap();
        let again = hosts.follow("a.test").unwrap();
        assert!(Arc::ptr_eq(&one, &again));
        let other = hosts.follow("b.test").unwrap();
        assert!(!Arc::ptr_eq(&one, &other));
        assert_eq!(hosts.followed.lock().len(), 2);
        drop((one, again));
        // The next new name takes out those that are unused.
        let _third = hosts.follow("c.test").unwrap();
        let followed = hosts.followed.lock();
        let mut names: Vec<&str> = followed.keys().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["b.test", "c.test"]);
    }

    #[tokio::test]
    async fn unknown_names_have_no_connection() {
        let mut hosts = hosts();
        let mut context = Context::from_waker(std::task::Waker::noop());
        assert!(matches!(
            hosts.poll_ready(&mut context),
            Poll::Ready(Ok(()))
        ));
        for (name, expected) in [
            // Without a port, which the client takes from the URL.
            ("::2", Some("[::2]:0")),
            ("192.0.2.1", None),
        ] {
            let found = hosts.call(name.parse().unwrap()).await;
            match expected {
                Some(address) => {
                    let addresses: Vec<SocketAddr> = found.unwrap().collect();
                    assert_eq!(addresses, [address.parse().unwrap()], "{name}");
                }
                None => {
                    let error = found.unwrap_err().to_string();
                    assert_eq!(error, "the host name is not known", "{name}");
                }
            }
        }
    }
}
