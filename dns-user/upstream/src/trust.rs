//! Verification of TLS servers: HTTP handlers and recursors.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use hyper_rustls::ConfigBuilderExt as _;
use parking_lot::Mutex;
use rustls::{
    ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject as _};

use dns_kit::files::FileStamp;

/// The servers that a TLS client accepts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Trust {
    /// Servers with a certificate of one of the system's CAs.
    #[default]
    System,
    /// Servers with a certificate of one of the CAs in this PEM file, which is read again when it
    /// changes.
    File(PathBuf),
    /// Any server. The connection is encrypted, but not protected from an attacker on its way.
    Anyone,
}

impl Trust {
    /// Returns the settings of a client that accepts these servers.
    pub(crate) fn client_config(&self) -> ClientConfig {
        let provider = Arc::new(ring::default_provider());
        let builder = || {
            ClientConfig::builder_with_provider(Arc::clone(&provider))
                .with_safe_default_protocol_versions()
                .expect("ring supports the TLS versions that rustls takes by default")
        };
        let checked_by = |verifier: Arc<dyn ServerCertVerifier>| {
            builder().dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth()
        };
        match self {
            Self::System => match builder().with_native_roots() {
                Ok(builder) => builder.with_no_client_auth(),
                Err(error) => {
                    tracing::warn!(%error, "cannot read the system's CA certificates; using Mozilla's");
                    builder().with_webpki_roots().with_no_client_auth()
                }
            },
            Self::File(path) => checked_by(Arc::new(FileRoots::new(path, &provider))),
            Self::Anyone => checked_by(Arc::new(Unverified(Arc::clone(&provider)))),
        }
    }
}

/// Accepts certificates of the CAs in a file.
#[derive(Debug)]
struct FileRoots {
    path: PathBuf,
    provider: Arc<CryptoProvider>,
    /// The last readable version of the file.
    loaded: Mutex<Option<(Option<FileStamp>, Arc<WebPkiServerVerifier>)>>,
}

impl FileRoots {
    fn new(path: &Path, provider: &Arc<CryptoProvider>) -> Self {
        Self { path: path.to_owned(), provider: Arc::clone(provider), loaded: Mutex::new(None) }
    }

    /// Returns the verifier of the file's current version, or of the last readable one.
    fn verifier(&self) -> Result<Arc<WebPkiServerVerifier>, Error> {
        let stamp = FileStamp::of(&self.path);
        let mut loaded = self.loaded.lock();
        if let Some((seen, verifier)) = &*loaded
            && stamp.is_some()
            && *seen == stamp
        {
            return Ok(Arc::clone(verifier));
        }
        match (self.load(), &*loaded) {
            (Ok(verifier), _) => {
                *loaded = Some((stamp, Arc::clone(&verifier)));
                Ok(verifier)
            }
            (Err(_), Some((_, verifier))) => Ok(Arc::clone(verifier)),
            (Err(problem), None) => Err(Error::General(format!(
                "{}: {problem}; a PEM file with CA certificates is needed",
                self.path.display()
            ))),
        }
    }

    fn load(&self) -> Result<Arc<WebPkiServerVerifier>, Box<dyn std::error::Error>> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(&self.path)? {
            roots.add(certificate?)?;
        }
        let provider = Arc::clone(&self.provider);
        Ok(WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build()?)
    }
}

impl ServerCertVerifier for FileRoots {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.verifier()?.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(
            message,
            certificate,
            signature,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(
            message,
            certificate,
            signature,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Accepts every certificate whose key the server has.
#[derive(Debug)]
struct Unverified(Arc<CryptoProvider>);

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
