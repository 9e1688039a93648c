//! Mutual TLS that reads its files for every connection, so a rotation needs no restart. A set that
//! cannot be used (half a file, a new certificate with the old key) is logged, and the last good
//! one stays in use.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use parking_lot::Mutex;
use rustls::{
    ClientConfig, DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig, SignatureScheme,
    client::{
        ResolvesClientCert, WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring},
    server::WebPkiClientVerifier,
    sign::CertifiedKey,
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject};
use x509_parser::prelude::{FromDer, X509Certificate};

/// Files of a client's CAs, certificate and private key.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
pub struct TlsFiles {
    /// PEM file of the CAs that the peer's certificate is verified against
    #[arg(long = "tls-ca", value_name = "FILE")]
    pub ca: PathBuf,
    /// PEM file of this program's certificate
    #[arg(long = "tls-certificate", value_name = "FILE")]
    pub certificate: PathBuf,
    /// PEM file of this program's private key
    #[arg(long = "tls-key", value_name = "FILE")]
    pub key: PathBuf,
}

/// As [`TlsFiles`], where there may be none: all three or nothing.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
pub struct TlsOptions {
    /// PEM file of the CAs that the peer's certificate is verified against
    #[arg(long = "tls-ca", value_name = "FILE", requires_all = ["certificate", "key"])]
    ca: Option<PathBuf>,
    /// PEM file of this program's certificate
    #[arg(long = "tls-certificate", value_name = "FILE", requires = "ca")]
    certificate: Option<PathBuf>,
    /// PEM file of this program's private key
    #[arg(long = "tls-key", value_name = "FILE", requires = "ca")]
    key: Option<PathBuf>,
}

impl TlsOptions {
    /// Returns the files, if they are given.
    pub fn files(self) -> Option<TlsFiles> {
        let Self { ca, certificate, key } = self;
        Some(TlsFiles { ca: ca?, certificate: certificate?, key: key? })
    }
}

/// Error in a certificate file.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct TlsError {
    path: PathBuf,
    /// Cause of the error.
    problem: String,
}

impl TlsError {
    /// Creates an error about a file.
    fn new(path: &Path, problem: impl ToString) -> Self {
        Self { path: path.to_owned(), problem: problem.to_string() }
    }
}

/// Returns the cryptography provider.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// Reads the CAs of a PEM file.
fn read_roots(path: &Path) -> Result<Arc<RootCertStore>, TlsError> {
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(certificates.map_err(|error| TlsError::new(path, error))?);
    if roots.is_empty() {
        return Err(TlsError::new(path, "it contains no CA certificate in PEM format"));
    }
    Ok(Arc::new(roots))
}

/// Reads a certificate, its chain and the matching key.
fn read_identity(files: &TlsFiles) -> Result<Arc<CertifiedKey>, TlsError> {
    let TlsFiles { certificate, key, .. } = files;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_file_iter(certificate).and_then(Iterator::collect);
    let chain = chain.map_err(|error| TlsError::new(certificate, error))?;
    if chain.is_empty() {
        return Err(TlsError::new(certificate, "it contains no certificate in PEM format"));
    }
    let private = PrivateKeyDer::from_pem_file(key).map_err(|error| TlsError::new(key, error))?;
    let certified = CertifiedKey::from_der(chain, private, &provider())
        .map_err(|error| TlsError::new(key, format!("it does not match the certificate: {error}")))?;
    Ok(Arc::new(certified))
}

/// A value read from files that may change; keeps the last good one.
#[derive(Debug)]
struct LastGood<T> {
    /// The last good value.
    value: Mutex<Arc<T>>,
}

impl<T> LastGood<T> {
    fn new(value: Arc<T>) -> Self {
        Self { value: Mutex::new(value) }
    }

    /// Reads the value again; returns the last good one if that fails.
    fn newest(&self, read: impl FnOnce() -> Result<Arc<T>, TlsError>) -> Arc<T> {
        // Nothing panics while it is locked.
        let mut value = self.value.lock();
        match read() {
            Ok(new) => *value = new,
            Err(error) => {
                tracing::warn!("cannot use the new certificates; the last good ones stay in use: {error}")
            }
        }
        value.clone()
    }
}

/// Presents our certificate, read again at every handshake.
#[derive(Debug)]
struct FreshIdentity {
    files: TlsFiles,
    /// The last good certificate and key.
    last: LastGood<CertifiedKey>,
}

impl ResolvesClientCert for FreshIdentity {
    fn resolve(&self, _hints: &[&[u8]], _schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.last.newest(|| read_identity(&self.files)))
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// Verifies the server against CAs read at every handshake, its host name and, if required, its
/// common name.
#[derive(Debug)]
struct FreshRoots {
    /// File of the CAs.
    ca: PathBuf,
    /// The last good CAs.
    last: LastGood<RootCertStore>,
    /// Required suffix of the common name, without the leading dot.
    common_name_below: Option<&'static str>,
    /// Cryptography for everything that does not depend on the CAs.
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for FreshRoots {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let roots = self.last.newest(|| read_roots(&self.ca));
        let verifier = WebPkiServerVerifier::builder_with_provider(roots, self.provider.clone())
            .build()
            .map_err(|error| rustls::Error::General(error.to_string()))?;
        verifier.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)?;
        if let Some(below) = self.common_name_below {
            let name = common_name(end_entity).unwrap_or_default();
            let good = name.strip_suffix(below).is_some_and(|first| first.ends_with('.') && first.len() > 1);
            if !good {
                let problem = format!("the server's common name {name:?} is not below {below}");
                return Err(rustls::Error::General(problem));
            }
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }

    fn root_hint_subjects(&self) -> Option<&[DistinguishedName]> {
        None
    }
}

/// Returns the common name of a certificate.
pub fn common_name(certificate: &[u8]) -> Option<String> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let name = parsed.subject().iter_common_name().next()?.as_str().ok()?.to_owned();
    Some(name)
}

/// Returns a server certificate verifier for `ca`.
fn verifier(ca: &Path, common_name_below: Option<&'static str>) -> Result<Arc<FreshRoots>, TlsError> {
    let last = LastGood::new(read_roots(ca)?);
    Ok(Arc::new(FreshRoots { ca: ca.to_owned(), last, common_name_below, provider: provider() }))
}

/// Returns the configuration for connections with a client certificate.
pub fn client(files: &TlsFiles, common_name_below: Option<&'static str>) -> Result<ClientConfig, TlsError> {
    let identity = FreshIdentity { files: files.clone(), last: LastGood::new(read_identity(files)?) };
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| TlsError::new(&files.certificate, error))?
        .dangerous()
        .with_custom_certificate_verifier(verifier(&files.ca, common_name_below)?)
        .with_client_cert_resolver(Arc::new(identity));
    // A resumed session would keep the previous certificates.
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
}

/// Returns the configuration for connections without a client certificate, to servers of `ca`.
pub fn anonymous_client(ca: &Path) -> Result<ClientConfig, TlsError> {
    let config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| TlsError::new(ca, error))?
        .dangerous()
        .with_custom_certificate_verifier(verifier(ca, None)?)
        .with_no_client_auth();
    Ok(config)
}

/// Returns the configuration for accepting clients that have a certificate of the CA.
pub fn server(files: &TlsFiles) -> Result<ServerConfig, TlsError> {
    let clients = WebPkiClientVerifier::builder_with_provider(read_roots(&files.ca)?, provider())
        .build()
        .map_err(|error| TlsError::new(&files.ca, error))?;
    let identity = read_identity(files)?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| TlsError::new(&files.certificate, error))?
        .with_client_cert_verifier(clients)
        .with_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from((*identity).clone())));
    // A resumed session would not be checked against the CA and the clock again.
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Returns the modification times of the files, to detect a rotation.
pub fn stamp(files: &TlsFiles) -> [Option<SystemTime>; 3] {
    [&files.ca, &files.certificate, &files.key]
        .map(|path| fs::metadata(path).and_then(|facts| facts.modified()).ok())
}

/// Returns a configuration that trusts no server: for plain `http`, and for `https` without a
/// configured CA, where every handshake fails.
pub fn without_authorities() -> ClientConfig {
    // The provider supports the requested versions.
    let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    builder
        .expect("ring speaks TLS 1.2 and 1.3")
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth()
}
