//! HTTP requests to providers, and the files of TLS clients. They are read for every connection or
//! client, so renewed certificates are used.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{Request, StatusCode};
use hyper_rustls::{ConfigBuilderExt as _, HttpsConnector};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use tokio::time::timeout;

use super::{Parameters, ProviderError};

/// Maximum size of a response in octets.
const MAX_BODY: usize = 256 << 20;

/// A client that reuses connections.
pub(super) struct Http {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    limit: Duration,
}

pub(super) struct Response {
    pub(super) status: StatusCode,
    pub(super) body: Bytes,
}

impl Http {
    /// Creates a client of servers at `urls`; reads the TLS files only for `https`. Each request
    /// takes at most `limit`.
    pub(super) fn new<'a>(
        mut urls: impl Iterator<Item = &'a str>,
        files: &TlsFiles,
        limit: Duration,
    ) -> Result<Self, ProviderError> {
        let config = match urls.any(|url| url.starts_with("https:")) {
            true => files.config(&[])?,
            false => TlsFiles::unused()?,
        };
        let connector = hyper_rustls::HttpsConnectorBuilder::new()
            .with_tls_config((*config).clone())
            .https_or_http()
            .enable_http1()
            .build();
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Ok(Self { client, limit })
    }

    /// Sends a request and reads the whole response. `server` identifies the server in errors.
    pub(super) async fn send(
        &self,
        server: &str,
        request: Request<Full<Bytes>>,
    ) -> Result<Response, ProviderError> {
        let unreachable = |reason: String| ProviderError::Unreachable { server: server.to_owned(), reason };
        let exchange = async {
            let response = self.client.request(request).await;
            let response =
                response.map_err(|error| unreachable(format!("{:#}", anyhow::Error::from(error))))?;
            let (head, body) = response.into_parts();
            let body = Limited::new(body, MAX_BODY).collect().await;
            let body =
                body.map_err(|error| unreachable(format!("the response ended prematurely: {error}")))?;
            Ok(Response { status: head.status, body: body.to_bytes() })
        };
        let seconds = self.limit.as_secs();
        timeout(self.limit, exchange)
            .await
            .map_err(|_| unreachable(format!("no answer within {seconds} s")))?
    }
}

/// Files of a TLS client.
#[derive(Debug, Clone, Default)]
pub struct TlsFiles {
    /// CA certificates for the server's certificate; the system's if absent.
    pub ca: Option<PathBuf>,
    /// Client certificate and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

impl TlsFiles {
    /// Parses `tls-ca`, `tls-client-cert` and `tls-client-cert-key`.
    pub fn from_parameters(parameters: &Parameters) -> Result<Self, ProviderError> {
        let identity = match (parameters.path("tls-client-cert"), parameters.path("tls-client-cert-key")) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => {
                let message = "tls-client-cert and tls-client-cert-key require each other; set both or \
                               neither";
                return Err(ProviderError::Settings(message.to_owned()));
            }
        };
        Ok(Self { ca: parameters.path("tls-ca"), identity })
    }

    /// Returns a configuration for a client that never uses TLS, because the system may have no CA
    /// certificates.
    pub fn unused() -> Result<Arc<ClientConfig>, ProviderError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| ProviderError::Settings(format!("TLS: {error}")))?;
        Ok(Arc::new(builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth()))
    }

    /// Loads the files. `protocols` are offered by ALPN.
    pub fn config(&self, protocols: &[&[u8]]) -> Result<Arc<ClientConfig>, ProviderError> {
        let unusable = |error: rustls::Error| ProviderError::Settings(format!("TLS: {error}"));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider);
        let builder = builder.with_safe_default_protocol_versions().map_err(unusable)?;
        let builder = match &self.ca {
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for authority in certificates(path)? {
                    roots.add(authority).map_err(|error| bad_file(path, error))?;
                }
                builder.with_root_certificates(roots)
            }
            None => builder.with_native_roots().map_err(|error| {
                ProviderError::Settings(format!("TLS: cannot load the system's CAs: {error}; set tls-ca"))
            })?,
        };
        let mut config = match &self.identity {
            Some((certificate, key)) => {
                let key = PrivateKeyDer::from_pem_file(key).map_err(|error| bad_file(key, error))?;
                builder.with_client_auth_cert(certificates(certificate)?, key).map_err(unusable)?
            }
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        Ok(Arc::new(config))
    }
}

/// Reads the certificates of a file, at least one.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, ProviderError> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(certificates) if certificates.is_empty() => Err(bad_file(path, "no certificate in PEM format")),
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(bad_file(path, error)),
    }
}

fn bad_file(path: &Path, problem: impl std::fmt::Display) -> ProviderError {
    ProviderError::Settings(format!("{}: {problem}", path.display()))
}
