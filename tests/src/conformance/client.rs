//! Asks as recorded cases ask: by DNS, also with malformed messages, and by HTTPS.

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    path::Path,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result};
use rustls::{
    CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, Error, RootCertStore,
    SignatureScheme, StreamOwned,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject};
use serde::Deserialize;
use serde_json::Value;

use super::{
    message::{Seen, write_query},
    scenario::{Proto, Query},
};

/// How long several queries on one connection are waited for, and plain HTTP.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long the API is waited for.
const API_PATIENCE: Duration = Duration::from_secs(8);

/// What came of a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Observed {
    Reply {
        message: Seen,
        /// Whether its id is the query's.
        id_echoed: bool,
    },
    /// Nothing, or the connection was closed.
    NoResponse,
    /// The socket's error, by the name that recordings use.
    Error(String),
    /// A message that cannot be walked, as hexadecimal digits.
    Unparsable(String),
}

/// Where the placeholders of ports lead.
pub type Ports = BTreeMap<String, u16>;

/// Asks once.
///
/// # Errors
///
/// Where the recorded query cannot be written.
pub fn ask(query: &Query, ports: &Ports, patience: Duration) -> Result<Observed> {
    let mut id = fastrand::u16(..);
    let message = write_query(query, id)?;
    if let (Some(_), [high, low, ..]) = (&query.raw, &message[..]) {
        id = u16::from_be_bytes([*high, *low]);
    }
    let port = query.port.as_deref().unwrap_or("PORT");
    let port = *ports.get(port).with_context(|| format!("there is no {port}"))?;
    let server = SocketAddr::new(query.addr.unwrap_or(Ipv4Addr::LOCALHOST.into()), port);
    let reply = match query.proto.unwrap_or_default() {
        Proto::Udp => ask_udp(&message, server, patience),
        Proto::Tcp => {
            let length = query.tcp_length.map_or_else(|| u16::try_from(message.len()), Ok)?;
            ask_tcp(&message, length, server, patience)
        }
    };
    Ok(match reply {
        Ok(reply) => read_reply(&reply, id),
        Err(error) => failure(&error),
    })
}

/// Asks several times on one connection, all at once.
///
/// # Errors
///
/// Where a recorded query cannot be written, or no connection made.
pub fn ask_session(queries: &[Query], server: SocketAddr) -> Result<Vec<Observed>> {
    let mut stream = connect(server, PATIENCE)?;
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
        Ok(message) => Observed::Reply { id_echoed: message.id == id, message },
        Err(error) => Observed::Unparsable(format!("{error:#}: {}", super::message::to_hex(reply))),
    }
}

/// What an error means: silence, a closed connection, or the name of the error.
fn failure(error: &io::Error) -> Observed {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::UnexpectedEof => {
            Observed::NoResponse
        }
        _ => Observed::Error(error_name(error)),
    }
}

/// An error as recordings name it.
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

/// One datagram out, one in.
fn ask_udp(message: &[u8], server: SocketAddr, patience: Duration) -> io::Result<Vec<u8>> {
    let any: SocketAddr = if server.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
    let socket = UdpSocket::bind(any)?;
    socket.connect(server)?;
    socket.set_read_timeout(Some(patience))?;
    socket.send(message)?;
    let mut buffer = vec![0; 65_535];
    let length = socket.recv(&mut buffer)?;
    buffer.truncate(length);
    Ok(buffer)
}

/// One message out, one in, on a connection of its own.
fn ask_tcp(message: &[u8], length: u16, server: SocketAddr, patience: Duration) -> io::Result<Vec<u8>> {
    let mut stream = connect(server, patience)?;
    stream.write_all(&[&length.to_be_bytes()[..], message].concat())?;
    receive_tcp(&mut stream)
}

fn connect(server: SocketAddr, patience: Duration) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&server, patience)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn receive_tcp(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut reply = vec![0; usize::from(u16::from_be_bytes(length))];
    stream.read_exact(&mut reply)?;
    Ok(reply)
}

//----------- HTTP -----------------------------------------------------------

/// What came of an HTTP request, or what was recorded of one.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Response {
    /// `tls` where the handshake failed or the connection was cut, else the error's name.
    pub error: Option<String>,
    /// Status.
    pub status: Option<u16>,
    /// The body as text.
    pub body: Option<String>,
    /// The body as JSON lines; of recordings only.
    pub ndjson: Option<Vec<Value>>,
}

/// A request to the API by mutual TLS; `certificate` names the client's, if it shows one.
///
/// # Errors
///
/// Where the certificates cannot be read.
pub fn api(
    server: SocketAddr,
    method: &str,
    path: &str,
    folder: &Path,
    certificate: Option<&str>,
) -> Result<Response> {
    let config = client_config(folder, certificate)?;
    let stream = match connect(server, API_PATIENCE) {
        Ok(stream) => stream,
        Err(error) => return Ok(Response { error: Some(error_name(&error)), ..Response::default() }),
    };
    let connection = ClientConnection::new(Arc::new(config), ServerName::from(server.ip()))?;
    Ok(match exchange(StreamOwned::new(connection, stream), server, method, path) {
        Ok((status, body)) => Response { status: Some(status), body: Some(body), ..Response::default() },
        Err(error) if matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock) => {
            Response { error: Some(error_name(&error)), ..Response::default() }
        }
        Err(_) => Response { error: Some("tls".to_owned()), ..Response::default() },
    })
}

/// A plain GET request.
pub fn get(server: SocketAddr, path: &str) -> Response {
    match connect(server, PATIENCE).and_then(|stream| exchange(stream, server, "GET", path)) {
        Ok((status, body)) => Response { status: Some(status), body: Some(body), ..Response::default() },
        Err(error) => Response { error: Some(error_name(&error)), ..Response::default() },
    }
}

/// Sends a request and reads the response: its status and its body.
fn exchange(
    mut stream: impl Read + Write,
    server: SocketAddr,
    method: &str,
    path: &str,
) -> io::Result<(u16, String)> {
    let length = if method == "GET" { "" } else { "Content-Length: 0\r\n" };
    // HTTP/1.0: the body ends with the connection, and is not sent in chunks.
    write!(stream, "{method} {path} HTTP/1.0\r\nHost: {server}\r\n{length}\r\n")?;
    stream.flush()?;
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        // A server that closes without a TLS farewell has still said all it wanted to say.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof && !bytes.is_empty() => {}
        Err(error) => return Err(error),
        Ok(_) => {}
    }
    let text = String::from_utf8_lossy(&bytes);
    let (head, body) = text.split_once("\r\n\r\n").ok_or(io::ErrorKind::ConnectionReset)?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.ok_or(io::ErrorKind::InvalidData)?, body.to_owned()))
}

/// A client that trusts the recordings' CA and shows a certificate of theirs.
fn client_config(folder: &Path, certificate: Option<&str>) -> Result<ClientConfig> {
    let roots = Arc::new(authority(folder)?);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider.clone()).build()?;
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyName(verifier)));
    Ok(match certificate {
        Some(name) => {
            let (chain, key) = identity(folder, name)?;
            builder.with_client_auth_cert(chain, key)?
        }
        None => builder.with_no_client_auth(),
    })
}

/// The recordings' CA.
///
/// # Errors
///
/// Where the file cannot be read.
pub fn authority(folder: &Path) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    let file = folder.join("ca.crt");
    roots.add(CertificateDer::from_pem_file(&file).with_context(|| file.display().to_string())?)?;
    Ok(roots)
}

/// A certificate of the recordings and its key.
///
/// # Errors
///
/// Where the files cannot be read.
pub fn identity(folder: &Path, name: &str) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
    let (certificate, key) = (folder.join(format!("{name}.crt")), folder.join(format!("{name}.key")));
    let certificate =
        CertificateDer::from_pem_file(&certificate).with_context(|| certificate.display().to_string())?;
    let key = PrivateKeyDer::from_pem_file(&key).with_context(|| key.display().to_string())?;
    Ok((vec![certificate], key))
}

/// Accepts the CA's servers whatever they are called: they are reached by address.
#[derive(Debug)]
struct AnyName(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        // The chain is verified before the name.
        match self.0.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            other => other,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}
