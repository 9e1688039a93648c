//! The only place where TLS is configured, for all servers and clients of all programs.
//!
//! Versions 1.2 and 1.3 with ring's algorithms. A server that trusts clients' certificates never resumes a
//! session: resuming skips the certificate, so one that has expired, or whose CA was replaced, would still be
//! accepted.

use std::{path::Path, sync::Arc};

use hyper_rustls::ConfigBuilderExt as _;
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    client::ResolvesClientCert,
    crypto::{CryptoProvider, ring},
    server::{NoServerSessionStorage, WebPkiClientVerifier},
    sign::{CertifiedKey, SingleCertAndKey},
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::{AUTHORITIES, CHAIN, ServerVerifier, TlsError, read_certificates, read_key, trusted};

/// Whether a client must present a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientCertificates {
    /// Clients without one are refused in the handshake.
    Required,
    /// It is verified if there is one; the server decides what clients without one may do.
    Optional,
}

/// Servers that a client accepts.
#[derive(Debug)]
pub enum ServerTrust {
    /// With a certificate of one of these CAs.
    Roots(RootCertStore),
    /// With a certificate of one of the system's CAs.
    System,
    /// With a certificate of one of Mozilla's CAs.
    Mozilla,
    /// As this verifier decides.
    Verifier(ServerVerifier),
}

/// The certificate that a client presents to a server that asks for one.
#[derive(Debug)]
pub enum ClientIdentity {
    /// No certificate.
    Anonymous,
    /// A certificate, with those above it, and its key.
    Pair(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>),
    /// The certificate that is right at the time of the handshake.
    Resolver(Arc<dyn ResolvesClientCert>),
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// Joins a certificate, with those above it, and its key; they must match.
pub fn certified_key(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<Arc<CertifiedKey>, rustls::Error> {
    CertifiedKey::from_der(chain, key, &provider()).map(Arc::new)
}

/// Returns the configuration of a server with this identity, which trusts clients with a certificate of these CAs.
pub fn server_config(
    identity: Arc<CertifiedKey>,
    roots: Arc<RootCertStore>,
    clients: ClientCertificates,
) -> Result<ServerConfig, TlsError> {
    // Named explicitly everywhere: the default provider belongs to the process, and any crate may
    // set it.
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider());
    let verifier = match clients {
        ClientCertificates::Required => verifier,
        ClientCertificates::Optional => verifier.allow_unauthenticated(),
    };
    let verifier = verifier.build().map_err(TlsError::general)?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(TlsError::general)?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(identity)));
    // TLS 1.2 resumes by the stored sessions, TLS 1.3 by tickets. There is no `ticketer`.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Returns the configuration of a client.
pub fn client_config(
    trust: ServerTrust,
    identity: ClientIdentity,
) -> Result<ClientConfig, TlsError> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(TlsError::general)?;
    let builder = match trust {
        ServerTrust::Roots(roots) => builder.with_root_certificates(roots),
        ServerTrust::System => builder.with_native_roots().map_err(TlsError::general)?,
        ServerTrust::Mozilla => builder.with_webpki_roots(),
        ServerTrust::Verifier(verifier) => builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier)),
    };
    match identity {
        ClientIdentity::Anonymous => Ok(builder.with_no_client_auth()),
        ClientIdentity::Resolver(resolver) => Ok(builder.with_client_cert_resolver(resolver)),
        ClientIdentity::Pair(chain, key) => builder
            .with_client_auth_cert(chain, key)
            .map_err(TlsError::general),
    }
}

/// Returns the configuration of a client that trusts the CAs in the PEM file `ca`, by default the system's, and
/// presents the certificate and the key in these files, if any.
pub fn client_config_of_files(
    ca: Option<&Path>,
    identity: Option<(&Path, &Path)>,
) -> Result<ClientConfig, TlsError> {
    let trust = match ca {
        Some(ca) => ServerTrust::Roots(trusted(ca, read_certificates(ca, AUTHORITIES)?)?),
        None => ServerTrust::System,
    };
    let identity = match identity {
        Some((certificate, key)) => {
            ClientIdentity::Pair(read_certificates(certificate, CHAIN)?, read_key(key)?)
        }
        None => ClientIdentity::Anonymous,
    };
    client_config(trust, identity)
}
