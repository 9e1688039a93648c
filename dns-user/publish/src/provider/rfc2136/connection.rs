//! One TCP or TLS connection to a name server.

use std::{
    io,
    time::{Duration, SystemTime},
};

use rustls_pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::TlsConnector;

use super::{
    Settings,
    tsig::{TsigError, TsigKey},
    wire::{MessageReader, WireError},
};
use crate::provider::ProviderError;

/// Address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// Host name or IP address.
    pub host: String,
    /// TCP port of the server.
    pub port: u16,
    /// Whether messages go over TLS (RFC 9103).
    pub tls: bool,
}

impl Server {
    /// Parses `host`, `host:port`, `[address]:port` or `tls://host:port`.
    pub fn parse(text: &str) -> Result<Self, ProviderError> {
        let (tls, rest) =
            text.trim().strip_prefix("tls://").map_or((false, text.trim()), |rest| (true, rest));
        let default = if tls { 853 } else { 53 };
        let bad = || {
            ProviderError::Settings(format!(
                "rfc2136-host is {text:?}; write host, host:port, [address]:port or tls://host:port"
            ))
        };
        let (host, port) = if let Some(rest) = rest.strip_prefix('[') {
            let (host, behind) = rest.split_once(']').ok_or_else(bad)?;
            (host, behind.strip_prefix(':'))
        } else if rest.matches(':').count() == 1 {
            let (host, port) = rest.split_once(':').ok_or_else(bad)?;
            (host, Some(port))
        } else {
            (rest, None)
        };
        if host.is_empty() || host.contains('/') {
            return Err(bad());
        }
        let port = port.map_or(Ok(default), str::parse).map_err(|_| bad())?;
        Ok(Self { host: host.to_owned(), port, tls })
    }
}

impl std::fmt::Display for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { host, port, tls } = self;
        let scheme = if *tls { "tls://" } else { "" };
        if host.contains(':') {
            write!(f, "{scheme}[{host}]:{port}")
        } else {
            write!(f, "{scheme}{host}:{port}")
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("no answer within {} s", .0.as_secs())]
    Timeout(Duration),
    #[error("TLS name: {0}")]
    ServerName(String),
    #[error(transparent)]
    Settings(#[from] ProviderError),
    #[error(transparent)]
    Tsig(#[from] TsigError),
    #[error(transparent)]
    Wire(#[from] WireError),
}

/// A bidirectional byte stream.
trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// An open connection. Messages are prefixed with their length (RFC 1035, section 4.2.2).
pub(super) struct Connection {
    stream: Box<dyn Stream>,
    /// Timeout of a message.
    limit: Duration,
    clock: fn() -> SystemTime,
}

impl Connection {
    pub(super) async fn open(settings: &Settings) -> Result<Self, ConnectionError> {
        let Settings { files, timeout: limit, clock, .. } = settings;
        let (server, limit, clock) = (settings.server(), *limit, *clock);
        let open = async {
            let tcp = TcpStream::connect((server.host.as_str(), server.port)).await?;
            tcp.set_nodelay(true)?;
            if !server.tls {
                return Ok::<_, ConnectionError>(Box::new(tcp) as Box<dyn Stream>);
            }
            let name = ServerName::try_from(server.host.clone())
                .map_err(|error| ConnectionError::ServerName(error.to_string()))?;
            // RFC 9103, section 7.1.
            let config = files.config(&[b"dot"])?;
            Ok(Box::new(TlsConnector::from(config).connect(name, tcp).await?) as Box<dyn Stream>)
        };
        let stream = timeout(limit, open).await.map_err(|_| ConnectionError::Timeout(limit))??;
        Ok(Self { stream, limit, clock })
    }

    /// Sends a message, signed if there is a key, and passes every response to `take` until it
    /// returns true. Signatures are verified and removed first.
    pub(super) async fn ask<E: From<ConnectionError>>(
        &mut self,
        mut message: Vec<u8>,
        key: Option<&TsigKey>,
        mut take: impl FnMut(&[u8]) -> Result<bool, E>,
    ) -> Result<(), E> {
        let mut verifier = key.map(|key| key.sign(&mut message, self.now()));
        self.send(&message).await?;
        loop {
            let mut response = self.receive().await?;
            if let Some(verifier) = &mut verifier {
                verifier.verify(&mut response, self.now()).map_err(ConnectionError::from)?;
            }
            if take(&response)? {
                break;
            }
        }
        if let Some(verifier) = &verifier {
            verifier.finish().map_err(ConnectionError::from)?;
        }
        Ok(())
    }

    /// Sends messages with different ids, signed if there is a key, without waiting in between, and
    /// passes every response to `take` with the number of its message. A server may respond in any
    /// order (RFC 7766, section 7).
    pub(super) async fn ask_all(
        &mut self,
        messages: impl Iterator<Item = Vec<u8>>,
        key: Option<&TsigKey>,
        mut take: impl FnMut(usize, &[u8]) -> Result<(), ConnectionError>,
    ) -> Result<(), ConnectionError> {
        let mut waiting = Vec::new();
        for mut message in messages {
            let id = MessageReader::new(&message).header()?.id;
            waiting.push(Some((id, key.map(|key| key.sign(&mut message, self.now())))));
            self.send(&message).await?;
        }
        for _ in 0..waiting.len() {
            let mut response = self.receive().await?;
            let id = MessageReader::new(&response).header()?.id;
            let asked = waiting.iter().position(|one| one.as_ref().is_some_and(|(asked, _)| *asked == id));
            let number = asked.ok_or(WireError("a response to a different message"))?;
            if let Some((_, Some(mut verifier))) = waiting[number].take() {
                verifier.verify(&mut response, self.now())?;
                verifier.finish()?;
            }
            take(number, &response)?;
        }
        Ok(())
    }

    /// Returns the time in seconds since 1970.
    fn now(&self) -> u64 {
        (self.clock)().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
    }

    async fn send(&mut self, message: &[u8]) -> Result<(), ConnectionError> {
        let length = u16::try_from(message.len()).map_err(|_| WireError("a message above 65,535 octets"))?;
        let framed = [&length.to_be_bytes(), message].concat();
        let write = async {
            self.stream.write_all(&framed).await?;
            self.stream.flush().await
        };
        Ok(timeout(self.limit, write).await.map_err(|_| ConnectionError::Timeout(self.limit))??)
    }

    async fn receive(&mut self) -> Result<Vec<u8>, ConnectionError> {
        let read = async {
            let mut message = vec![0; usize::from(self.stream.read_u16().await?)];
            self.stream.read_exact(&mut message).await?;
            Ok(message)
        };
        let read = timeout(self.limit, read).await.map_err(|_| ConnectionError::Timeout(self.limit))?;
        read.map_err(|error: io::Error| match error.kind() {
            io::ErrorKind::UnexpectedEof => ConnectionError::Io(io::Error::new(
                error.kind(),
                "the server closed the connection prematurely",
            )),
            _ => ConnectionError::Io(error),
        })
    }
}
