//! Options for mutual TLS, and its use: certificates are polled at every connection (`dns_kit::tls`), so a
//! rotation needs no restart.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use dns_core::config;
use dns_kit::tls::ServerVerifier;
pub use dns_kit::tls::{AcceptedName, RotatingTls, TlsError};
use rustls::{ClientConfig, RootCertStore, crypto::ring};

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

impl TlsFiles {
    /// Loads the files, which are polled from then on. `purpose` is a name for logs.
    pub fn load(&self, purpose: &'static str, server: AcceptedName) -> Result<Arc<RotatingTls>, TlsError> {
        let Self { ca, certificate, key } = self.clone();
        RotatingTls::load(purpose, server, &config::TlsFiles { certificate, private_key: key, ca })
    }
}

/// Returns the configuration for connections without a client certificate, to servers of `ca`; `None`
/// trusts no server, so that only plain `http` works.
pub fn anonymous_client(ca: Option<&Path>) -> Result<ClientConfig, TlsError> {
    // The provider supports the requested versions.
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring speaks TLS 1.2 and 1.3");
    let Some(ca) = ca else {
        return Ok(builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth());
    };
    let verifier = ServerVerifier::of_file(ca);
    // A missing file is a mistake now, and tolerated later.
    verifier.roots()?;
    Ok(builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier)).with_no_client_auth())
}
