//! Sends the queries of recorded cases: DNS, including malformed messages, and HTTPS.

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::Path,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject};
use serde::Deserialize;
use serde_json::Value;

use super::{
    message::{Seen, write_query},
    scenario::{Proto, Query},
};
use crate::client::{ask_raw, receive_tcp};

/// Timeout of requests, which are always answered, and of sessions with several queries on one
/// connection.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Result of a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Observed {
    Reply {
        message: Seen,
        /// Whether the reply has the id of the query.
        id_echoed: bool,
    },
    /// No reply, or the connection was closed.
    NoResponse,
    /// Socket error, by its name in recordings.
    Error(String),
    /// A message that cannot be parsed, as hexadecimal digits.
    Unparsable(String),
}

/// Port numbers by placeholder.
pub type Ports = BTreeMap<String, u16>;

/// Sends one query.
///
/// # Errors
///
/// Fails if the recorded query cannot be encoded.
pub fn ask(query: &Query, ports: &Ports, timeout: Duration) -> Result<Observed> {
    let mut id = fastrand::u16(..);
    let message = write_query(query, id)?;
    if let (Some(_), [high, low, ..]) = (&query.raw, &message[..]) {
        id = u16::from_be_bytes([*high, *low]);
    }
    let port = query.port.as_deref().unwrap_or("PORT");
    let port = *ports
        .get(port)
        .with_context(|| format!("{port} is missing"))?;
    let server = SocketAddr::new(query.addr.unwrap_or(Ipv4Addr::LOCALHOST.into()), port);
    let reply = match query.proto.unwrap_or_default() {
        Proto::Udp => ask_raw(server, &message, timeout),
        Proto::Tcp => {
            let length = query
                .tcp_length
                .map_or_else(|| u16::try_from(message.len()), Ok)?;
            ask_tcp(&message, length, server, timeout)
        }
    };
    Ok(match reply {
        Ok(reply) => read_reply(&reply, id),
        Err(error) => failure(&error),
    })
}

/// Sends several queries at once on one connection.
///
/// # Errors
///
/// Fails if a recorded query cannot be encoded or the connection fails.
pub fn ask_session(queries: &[Query], server: SocketAddr) -> Result<Vec<Observed>> {
    let mut stream = connect(server, TIMEOUT)?;
    let mut bytes = Vec::new();
    let ids = 1000..1000 + u16::try_from(queries.len())?;
    for (query, id) in queries.iter().zip(ids.clone()) {
        let message = write_query(query, id)?;
        bytes.extend(u16::try_from(message.len())?.to_be_bytes());
        bytes.extend(message);
    }
    stream.write_all(&bytes)?;
    let replies = ids.map(|id| match receive_tcp(&mut stream) {
        Ok(reply) => read_reply(&reply, id),
        Err(_) => Observed::NoResponse,
    });
    Ok(replies.collect())
}

fn read_reply(reply: &[u8], id: u16) -> Observed {
    match Seen::parse(reply) {
        Ok(message) => Observed::Reply {
            id_echoed: message.id == id,
            message,
        },
        Err(error) => Observed::Unparsable(format!("{error:#}: {}", super::message::to_hex(reply))),
    }
}

/// Maps an error to no response or to its name.
fn failure(error: &io::Error) -> Observed {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::UnexpectedEof => {
            Observed::NoResponse
        }
        _ => Observed::Error(error_name(error)),
    }
}

/// Returns an error's name as used in recordings.
fn error_name(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => "ConnectionRefusedError",
        io::ErrorKind::ConnectionReset => "ConnectionResetError",
        io::ErrorKind::BrokenPipe => "BrokenPipeError",
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => "TimeoutError",
        _ => return error.to_string(),
    }
    .to_owned()
}

/// Sends and receives one message on a fresh connection.
fn ask_tcp(
    message: &[u8],
    length: u16,
    server: SocketAddr,
    timeout: Duration,
) -> io::Result<Vec<u8>> {
    let mut stream = connect(server, timeout)?;
    stream.write_all(&[&length.to_be_bytes()[..], message].concat())?;
    receive_tcp(&mut stream)
}

fn connect(server: SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&server, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

//----------- HTTP -----------------------------------------------------------

/// An HTTP response, observed or recorded.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Response {
    /// `tls` if the handshake failed or the connection was cut, else the name of the error.
    pub error: Option<String>,
    pub status: Option<u16>,
    pub body: Option<String>,
    /// The body as JSON lines; in recordings only.
    pub ndjson: Option<Vec<Value>>,
}

/// Sends a request by mutual TLS to a server whose certificate has this name; `certificate` names
/// the client certificate, if any.
///
/// # Errors
///
/// Fails if the certificates cannot be read.
pub fn api(
    server: SocketAddr,
    name: &'static str,
    method: &str,
    path: &str,
    folder: &Path,
    certificate: Option<&str>,
) -> Result<Response> {
    let config = client_config(folder, certificate)?;
    let stream = match connect(server, TIMEOUT) {
        Ok(stream) => stream,
        Err(error) => {
            return Ok(Response {
                error: Some(error_name(&error)),
                ..Response::default()
            });
        }
    };
    let connection = ClientConnection::new(Arc::new(config), ServerName::try_from(name)?)?;
    Ok(
        match exchange(StreamOwned::new(connection, stream), server, method, path) {
            Ok((status, body)) => Response {
                status: Some(status),
                body: Some(body),
                ..Response::default()
            },
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock
                ) =>
            {
                Response {
                    error: Some(error_name(&error)),
                    ..Response::default()
                }
            }
            Err(_) => Response {
                error: Some("tls".to_owned()),
                ..Response::default()
            },
        },
    )
}

/// Sends a plain GET request.
pub fn get(server: SocketAddr, path: &str) -> Response {
    match connect(server, TIMEOUT).and_then(|stream| exchange(stream, server, "GET", path)) {
        Ok((status, body)) => Response {
            status: Some(status),
            body: Some(body),
            ..Response::default()
        },
        Err(error) => Response {
            error: Some(error_name(&error)),
            ..Response::default()
        },
    }
}

/// Sends a request; returns status and body of the response.
fn exchange(
    mut stream: impl Read + Write,
    server: SocketAddr,
    method: &str,
    path: &str,
) -> io::Result<(u16, String)> {
    let length = if method == "GET" {
        ""
    } else {
        "Content-Length: 0\r\n"
    };
    // HTTP/1.0, so that the body ends with the connection and is not chunked.
    write!(
        stream,
        "{method} {path} HTTP/1.0\r\nHost: {server}\r\n{length}\r\n"
    )?;
    stream.flush()?;
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        // The response is complete even if the server closes without close_notify.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof && !bytes.is_empty() => {}
        Err(error) => return Err(error),
        Ok(_) => {}
    }
    let text = String::from_utf8_lossy(&bytes);
    let (head, body) = text
        .split_once("\r\n\r\n")
        .ok_or(io::ErrorKind::ConnectionReset)?;
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok());
    Ok((status.ok_or(io::ErrorKind::InvalidData)?, body.to_owned()))
}

/// Builds a client configuration that trusts the recordings' CA and presents one of their
/// certificates.
fn client_config(folder: &Path, certificate: Option<&str>) -> Result<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(authority(folder)?);
    Ok(match certificate {
        Some(name) => {
            let (chain, key) = identity(folder, name)?;
            builder.with_client_auth_cert(chain, key)?
        }
        None => builder.with_no_client_auth(),
    })
}

/// Reads the CA of the recordings.
///
/// # Errors
///
/// Fails if the file cannot be read.
pub fn authority(folder: &Path) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    let file = folder.join("ca.crt");
    roots.add(CertificateDer::from_pem_file(&file).with_context(|| file.display().to_string())?)?;
    Ok(roots)
}

/// Reads a certificate of the recordings and its key.
///
/// # Errors
///
/// Fails if the files cannot be read.
pub fn identity(
    folder: &Path,
    name: &str,
) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
    let (certificate, key) = (
        folder.join(format!("{name}.crt")),
        folder.join(format!("{name}.key")),
    );
    let certificate = CertificateDer::from_pem_file(&certificate)
        .with_context(|| certificate.display().to_string())?;
    let key = PrivateKeyDer::from_pem_file(&key).with_context(|| key.display().to_string())?;
    Ok((vec![certificate], key))
}
