//! Clients whose certificates have ended: neither a resumed session nor an open connection serves them.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, SystemTime},
};

use rustls::{
    ClientConfig, ClientConnection, HandshakeKind, RootCertStore, StreamOwned,
    SupportedProtocolVersion,
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject};

use crate::{
    authorities::TestAuthority,
    fleet::Fleet,
    tools::{has_faketime, openssl, openssl_at, text},
};

/// Seconds for which the client's certificate is valid.
const SECONDS: i64 = 15;

/// Creates a certificate of an instance that ends in a few seconds; returns its file and its key's, in `folder`.
fn ending_pair(authority: &TestAuthority, folder: &Path) -> ClientConfigFiles {
    let files = ClientConfigFiles {
        certificate: folder.join("client.crt"),
        key: folder.join("client.key"),
    };
    let key = text(&files.key);
    let curve = "ec_paramgen_curve:P-256";
    let generate = [
        "genpkey",
        "-algorithm",
        "EC",
        "-pkeyopt",
        curve,
        "-out",
        key,
    ];
    openssl(&generate, b"").unwrap();
    let request = openssl(&["req", "-new", "-subj", "/CN=i1", "-key", key], b"").unwrap();
    let extensions = folder.join("client.cnf");
    std::fs::write(&extensions, "extendedKeyUsage=clientAuth\n").unwrap();
    let (ca, ca_key) = (authority.certificate_path(), authority.key_path());
    let sign = [
        "x509",
        "-req",
        "-CA",
        text(&ca),
        "-CAkey",
        text(&ca_key),
        "-set_serial",
        "9",
        "-days",
        "1",
        "-extfile",
        text(&extensions),
        "-out",
        text(&files.certificate),
    ];
    // A day that is nearly over.
    openssl_at(SECONDS - 86_400, &sign, request.as_bytes()).unwrap();
    files
}

struct ClientConfigFiles {
    certificate: std::path::PathBuf,
    key: std::path::PathBuf,
}

/// Returns a client that stores sessions, as most do.
fn client(
    files: &ClientConfigFiles,
    authority: &TestAuthority,
    version: &'static SupportedProtocolVersion,
) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    let ca = CertificateDer::from_pem_slice(authority.certificate().as_bytes()).unwrap();
    roots.add(ca).unwrap();
    let chain = CertificateDer::pem_file_iter(&files.certificate)
        .unwrap()
        .map(Result::unwrap)
        .collect();
    let key = PrivateKeyDer::from_pem_file(&files.key).unwrap();
    let config =
        ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_protocol_versions(&[version])
            .unwrap()
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .unwrap();
    Arc::new(config)
}

type Connection = StreamOwned<ClientConnection, TcpStream>;

fn connect(config: &Arc<ClientConfig>, address: SocketAddr) -> Connection {
    let name = ServerName::try_from("identity.bosh-dns").unwrap();
    let session = ClientConnection::new(config.clone(), name).unwrap();
    let stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    StreamOwned::new(session, stream)
}

/// Reports as the instance; returns the reply's status line, or why there is none.
fn report(connection: &mut Connection) -> Result<String, std::io::Error> {
    let body = r#"{"generation":1,"issuers":[],"not_after":0}"#;
    let request = format!(
        "POST /v1/report HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    connection.write_all(request.as_bytes())?;
    let mut reply = vec![0; 16 << 10];
    let length = connection.read(&mut reply)?;
    let reply = String::from_utf8_lossy(&reply[..length]).into_owned();
    Ok(reply.lines().next().unwrap_or_default().to_owned())
}

#[test]
fn ended_certificate_is_not_served() {
    if !has_faketime() {
        return;
    }
    let fleet = Fleet::start();
    let files = ending_pair(&fleet.authority, fleet.folder.path());
    // X.509 counts whole seconds.
    let end = SystemTime::now() + Duration::from_secs(SECONDS.unsigned_abs() + 1);
    let mut clients = Vec::new();
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let config = client(&files, &fleet.authority, version);
        let mut open = Vec::new();
        for _ in 0..2 {
            let mut connection = connect(&config, fleet.address);
            assert_eq!(report(&mut connection).unwrap(), "HTTP/1.1 200 OK");
            let kind = connection.conn.handshake_kind();
            assert_eq!(kind, Some(HandshakeKind::Full), "{version:?}");
            open.push(connection);
        }
        clients.push((config, open));
    }
    while SystemTime::now() < end {
        thread::sleep(Duration::from_millis(100));
    }
    for (config, open) in clients {
        for mut connection in open {
            let status = report(&mut connection).unwrap_or_default();
            assert!(!status.contains("200"), "an open connection: {status}");
        }
        let mut resumed = connect(&config, fleet.address);
        let status = report(&mut resumed).unwrap_or_default();
        assert!(!status.contains("200"), "a resumed session: {status}");
        assert_ne!(resumed.conn.handshake_kind(), Some(HandshakeKind::Resumed));
    }
}

/// Proof of a caller's identity.
pub(crate) enum Proof<'a> {
    /// Certificate and key, PEM.
    Pair(&'a str, &'a str),
    Token(&'a str),
}

/// Calls an issuer as an agent does.
pub(crate) struct Caller {
    address: SocketAddr,
    roots: RootCertStore,
}

impl Caller {
    pub(crate) fn new(address: SocketAddr, authority: &TestAuthority) -> Self {
        let mut roots = RootCertStore::empty();
        let ca = CertificateDer::from_pem_slice(authority.certificate().as_bytes()).unwrap();
        roots.add(ca).unwrap();
        Self { address, roots }
    }

    /// Returns the JSON of a reply with status 200, otherwise the text or why there is none.
    pub(crate) fn call(
        &self,
        path: &str,
        body: &serde_json::Value,
        proof: &Proof<'_>,
    ) -> Result<serde_json::Value, String> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(self.roots.clone());
        let mut authorization = String::new();
        let config = match proof {
            Proof::Token(token) => {
                authorization = format!("authorization: Bearer {}\r\n", token.trim());
                builder.with_no_client_auth()
            }
            Proof::Pair(certificate, key) => {
                let chain = CertificateDer::pem_slice_iter(certificate.as_bytes())
                    .map(Result::unwrap)
                    .collect();
                let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
                builder.with_client_auth_cert(chain, key).unwrap()
            }
        };
        let exchange = || -> std::io::Result<Vec<u8>> {
            let name = ServerName::try_from("identity.bosh-dns").unwrap();
            let session = ClientConnection::new(Arc::new(config), name).unwrap();
            let mut stream = StreamOwned::new(session, TcpStream::connect(self.address)?);
            let body = body.to_string();
            // HTTP/1.0 ends with the connection.
            let head = format!(
                "POST {path} HTTP/1.0\r\ncontent-type: application/json\r\n{authorization}content-length: {}\r\n\r\n",
                body.len()
            );
            stream.write_all(head.as_bytes())?;
            stream.write_all(body.as_bytes())?;
            let mut reply = Vec::new();
            stream.read_to_end(&mut reply)?;
            Ok(reply)
        };
        let reply = exchange().map_err(|error| error.to_string())?;
        let reply = String::from_utf8_lossy(&reply).into_owned();
        let (head, body) = reply.split_once("\r\n\r\n").ok_or("cut short")?;
        if !head.contains(" 200 ") {
            return Err(body.to_owned());
        }
        serde_json::from_str(body).map_err(|error| error.to_string())
    }
}
