//! TLS to an agent, configured from files that may change.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use hyper_rustls::ConfigBuilderExt as _;
use parking_lot::Mutex;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _};

use dns_consul::config::{ApiAddress, HttpApi};

/// Reason why TLS cannot be configured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TlsError {
    /// A file is unusable.
    #[error("{}: {problem}", path.display())]
    File {
        path: PathBuf,
        /// Defect of the file.
        problem: String,
    },
    /// Certificate and key do not match, or no system CA certificate is readable.
    #[error("{0}")]
    Unusable(String),
    /// The host cannot appear in a certificate.
    #[error("{0:?} is not a name that a certificate can contain")]
    Name(String),
}

/// Builds the TLS configuration and keeps it until the files change.
#[derive(Debug)]
pub(crate) struct Tls {
    api: HttpApi,
    /// Last configuration, with the modification times of its files.
    made: Mutex<Option<(Stamps, Arc<ClientConfig>)>>,
}

/// Modification times of the files; `None` if unreadable.
type Stamps = Vec<Option<SystemTime>>;

impl Tls {
    /// Stores the file names; the files are read with the first connection.
    pub(crate) fn new(api: &HttpApi) -> Self {
        Self { api: api.clone(), made: Mutex::new(None) }
    }

    /// Returns the current configuration. Reads small files.
    pub(crate) fn config(&self) -> Result<Arc<ClientConfig>, TlsError> {
        let stamps = self.stamps();
        let mut made = self.made.lock();
        match &*made {
            Some((of, config)) if *of == stamps => Ok(config.clone()),
            _ => {
                let config = Arc::new(self.load()?);
                *made = Some((stamps, config.clone()));
                Ok(config)
            }
        }
    }

    /// Returns the expected name in this agent's certificate.
    pub(crate) fn server_name(&self, address: &ApiAddress) -> Result<ServerName<'static>, TlsError> {
        let name = self.api.tls_server_name.as_ref().unwrap_or(&address.host);
        ServerName::try_from(name.clone()).map_err(|_| TlsError::Name(name.clone()))
    }

    /// Returns the current modification times of the files.
    fn stamps(&self) -> Stamps {
        let HttpApi { ca_file, identity, .. } = &self.api;
        let (certificate, key) = identity.as_ref().map(|(certificate, key)| (certificate, key)).unzip();
        let files = [ca_file.as_ref(), certificate, key].into_iter().flatten();
        files.map(|path| fs::metadata(path).and_then(|about| about.modified()).ok()).collect()
    }

    fn load(&self) -> Result<ClientConfig, TlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let unusable = |error: rustls::Error| TlsError::Unusable(error.to_string());
        let builder = ClientConfig::builder_with_provider(provider);
        let builder = builder.with_safe_default_protocol_versions().map_err(unusable)?;
        let builder = match &self.api.ca_file {
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for authority in certificates(path)? {
                    roots.add(authority).map_err(|error| file(path, error))?;
                }
                builder.with_root_certificates(roots)
            }
            None => builder.with_native_roots().map_err(|error| TlsError::Unusable(error.to_string()))?,
        };
        let mut config = match &self.api.identity {
            Some((certificate, key)) => {
                let key = PrivateKeyDer::from_pem_file(key).map_err(|error| file(key, error))?;
                builder.with_client_auth_cert(certificates(certificate)?, key).map_err(unusable)?
            }
            None => builder.with_no_client_auth(),
        };
        // Many blocking queries share one HTTP/2 connection.
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(config)
    }
}

/// Reads the certificates in a file, at least one.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(certificates) if certificates.is_empty() => {
            Err(file(path, "contains no certificate in PEM format"))
        }
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(file(path, error)),
    }
}

/// Builds the error for an unusable file.
fn file(path: &Path, problem: impl ToString) -> TlsError {
    TlsError::File { path: path.to_owned(), problem: problem.to_string() }
}
