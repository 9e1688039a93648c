//! Verification of TLS servers: HTTP handlers and recursors.

use std::{path::PathBuf, sync::Arc};

use dns_kit::tls::ServerVerifier;
use hyper_rustls::ConfigBuilderExt as _;
use rustls::{ClientConfig, crypto::ring};

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
        let checked_by = |verifier: ServerVerifier| {
            builder().dangerous().with_custom_certificate_verifier(Arc::new(verifier)).with_no_client_auth()
        };
        match self {
            Self::System => match builder().with_native_roots() {
                Ok(builder) => builder.with_no_client_auth(),
                Err(error) => {
                    tracing::warn!(%error, "cannot read the system's CA certificates; using Mozilla's");
                    builder().with_webpki_roots().with_no_client_auth()
                }
            },
            Self::File(path) => checked_by(ServerVerifier::of_file(path)),
            Self::Anyone => checked_by(ServerVerifier::unverified()),
        }
    }
}
