//! Mutual TLS with files that may change at any time.
//!
//! [`RotatingTls`] holds the last valid set of certificate, key and CA bundle, and reloads it when one of the
//! files changes. An inconsistent set (a new certificate with the old key, a partial file) is never used: the
//! last valid set stays in use and every poll tries again. Connections keep the set that they started with.

mod certificates;
mod configuration;

use std::{
    fmt::Display,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustls::{
    ClientConfig, RootCertStore, ServerConfig, SignatureScheme,
    client::ResolvesClientCert,
    sign::{CertifiedKey, SingleCertAndKey},
};
use rustls_pki_types::{
    CertificateDer, PrivateKeyDer,
    pem::{self, PemObject},
};

pub use self::certificates::{
    AcceptedName, Certificate, CertificateFacts, ServerVerifier, common_name, first_common_name,
};
pub use self::configuration::{
    ClientCertificates, ClientIdentity, ServerTrust, certified_key, client_config,
    client_config_of_files, server_config,
};
use crate::{
    clock::every,
    files::{FileStamp, ReadingThread, bounded},
};
use dns_core::config::TlsFiles;

/// Interval between checks of the files. A rotation by the agent or an operator is never more
/// urgent than this.
pub const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Interval between repeated warnings about a certificate.
const WARNING_INTERVAL: Duration = Duration::from_secs(24 * 3600);

/// One side of mutual TLS, based on the latest valid set of files.
#[derive(Debug)]
pub struct RotatingTls {
    /// Name in logs and metrics, such as `health-client` or `api`.
    pub purpose: &'static str,
    /// Required name in server certificates when connecting as a client.
    server_name: AcceptedName,
    files: TlsFiles,
    current: ArcSwap<TlsMaterial>,
    /// Result of the latest attempt to load.
    attempt: Mutex<Attempt>,
    /// Number of failed loads since the start, for metrics.
    failures: AtomicU64,
    reading: Arc<ReadingThread>,
}

/// Configurations for both sides, built from a certificate, its key and the CAs.
#[derive(Debug)]
pub struct TlsMaterial {
    /// Number of the set, counted from 1.
    pub generation: u64,
    /// For incoming connections; requires a client certificate from one of the CAs.
    pub server: Arc<ServerConfig>,
    /// For outgoing connections; requires a server certificate from one of the CAs, issued to the
    /// expected name.
    pub client: Arc<ClientConfig>,
    /// Our certificate, its chain and its key.
    identity: Arc<CertifiedKey>,
    roots: Arc<RootCertStore>,
    /// Properties of our certificate.
    pub certificate: CertificateFacts,
    /// Properties of the CAs in the bundle.
    pub authorities: Vec<CertificateFacts>,
}

/// Stamps of the three files; `None` for a missing one.
type FileStamps = [Option<FileStamp>; 3];

/// Maximum time for which an attempt to load waits for another one.
const MAX_POLL_WAIT: Duration = Duration::from_secs(1);

/// The latest attempt to load, and the latest warning.
#[derive(Debug)]
struct Attempt {
    /// Stamps taken just before the attempt.
    seen: FileStamps,
    /// Reason of the failure; `None` after a success.
    error: Option<String>,
    /// Time of the last warning about expiry.
    warned: Option<SystemTime>,
}

/// Reason why certificates are unusable, with the file.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct TlsError(String);

impl TlsError {
    /// Builds the error of a configuration without a file.
    fn general(problem: impl Display) -> Self {
        Self(format!("TLS: {problem}"))
    }

    fn unusable(path: &Path, problem: impl Display) -> Self {
        Self(format!("{}: {problem}", path.display()))
    }

    /// Adds the file that causes the error of a configuration.
    fn of_file(self, path: &Path) -> Self {
        Self::unusable(path, self.0)
    }

    /// Builds the error of a file that should contain `wanted`.
    fn in_file(path: &Path, wanted: &str, problem: impl Display) -> Self {
        Self::unusable(
            path,
            format_args!("{problem}; a PEM file with {wanted} is needed"),
        )
    }
}

impl RotatingTls {
    /// Loads the files for the first time. `purpose` is the name in logs and metrics; `server_name`
    /// is the required name in server certificates.
    pub fn load(
        purpose: &'static str,
        server_name: impl Into<AcceptedName>,
        files: &TlsFiles,
    ) -> Result<Arc<Self>, TlsError> {
        let seen = stamps(files);
        let server_name = server_name.into();
        let material = TlsMaterial::load(server_name, files, 1)?;
        let tls = Arc::new(Self {
            purpose,
            server_name,
            files: files.clone(),
            current: ArcSwap::from_pointee(material),
            attempt: Mutex::new(Attempt {
                seen,
                error: None,
                warned: None,
            }),
            failures: AtomicU64::new(0),
            reading: Arc::default(),
        });
        tls.warn_of_expiry(SystemTime::now());
        Ok(tls)
    }

    /// Returns the latest valid set.
    pub fn current(&self) -> Arc<TlsMaterial> {
        self.current.load_full()
    }

    /// Returns the current configuration for incoming connections.
    pub fn server_config(&self) -> Arc<ServerConfig> {
        self.current.load().server.clone()
    }

    /// Returns the current configuration for outgoing connections.
    pub fn client_config(&self) -> Arc<ClientConfig> {
        self.current.load().client.clone()
    }

    /// Returns a configuration for outgoing connections that polls at every handshake, for a client that
    /// keeps its configuration.
    pub fn polling_client_config(self: &Arc<Self>) -> ClientConfig {
        let mut config = ClientConfig::clone(&self.client_config());
        let verifier = ServerVerifier::polling(self.clone());
        config
            .dangerous()
            .set_certificate_verifier(Arc::new(verifier));
        config.client_auth_cert_resolver = Arc::new(PolledIdentity(self.clone()));
        config
    }

    /// Returns why the current files are unusable; `None` if they are in use.
    pub fn last_error(&self) -> Option<String> {
        self.attempt.lock().error.clone()
    }

    /// Returns why the certificate in use is invalid at `now`, or why newer files cannot be used; `None` if
    /// neither is the case.
    pub fn problem(&self, now: SystemTime) -> Option<String> {
        self.invalid(now).or_else(|| self.unusable_files())
    }

    /// Returns why the certificate in use is not valid at `now`.
    pub fn invalid(&self, now: SystemTime) -> Option<String> {
        let why = self.current.load().certificate.invalid_at(now)?;
        let purpose = self.purpose;
        let file = self.files.certificate.display();
        Some(format!("{purpose}: {file} is not valid now: it {why}"))
    }

    /// Returns why newer files cannot be used.
    pub fn unusable_files(&self) -> Option<String> {
        let purpose = self.purpose;
        let error = self.last_error()?;
        Some(format!("{purpose}: the new files cannot be used: {error}"))
    }

    /// Returns which certificate in use, or CA, is overdue for renewal at `now` and still valid.
    pub fn ends_soon(&self, now: SystemTime) -> Option<String> {
        let material = self.current.load();
        for facts in material.ending_soon(now) {
            let Ok(left) = facts.not_after.duration_since(now) else {
                continue;
            };
            let purpose = self.purpose;
            let hours = left.as_secs() / 3600;
            let subject = facts.common_name.as_deref().unwrap_or("(no common name)");
            return Some(format!(
                "{purpose}: the certificate of {subject} expires soon, in {hours} hours"
            ));
        }
        None
    }

    /// Returns the number of failed loads since the start.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Reloads the files if one changed since the last attempt or if that failed. Returns whether a
    /// new set is in use. Performs file I/O, so it must not run on a thread that answers queries.
    pub fn poll(&self) -> bool {
        // Another thread may be waiting for a mount that hangs; a handshake goes on with what is in use.
        let Some(mut attempt) = self.attempt.try_lock_for(MAX_POLL_WAIT) else {
            return false;
        };
        let seen = stamps(&self.files);
        if seen == attempt.seen && attempt.error.is_none() {
            // `warn_of_expiry` takes the same lock.
            drop(attempt);
            self.warn_of_expiry(SystemTime::now());
            return false;
        }
        let generation = self.current.load().generation + 1;
        let loaded = TlsMaterial::load(self.server_name, &self.files, generation);
        // A file that changed during the read may be incomplete; the earlier stamp makes the next
        // poll read it again.
        attempt.seen = seen;
        match loaded {
            Ok(material) => {
                tracing::info!(
                    purpose = self.purpose,
                    subject = material.certificate.common_name.as_deref().unwrap_or("-"),
                    authorities = material.authorities.len(),
                    "certificates reloaded"
                );
                attempt.error = None;
                // The new certificates have caused no warning yet.
                attempt.warned = None;
                self.current.store(Arc::new(material));
                drop(attempt);
                self.warn_of_expiry(SystemTime::now());
                true
            }
            Err(error) => {
                self.failures.fetch_add(1, Ordering::Relaxed);
                let text = error.to_string();
                // Unusable files are tried every second, but reported once for each cause.
                if attempt.error.as_ref() != Some(&text) {
                    tracing::warn!(
                        purpose = self.purpose,
                        "cannot use the new certificates; the last good ones stay in use: {text}"
                    );
                }
                attempt.error = Some(text);
                false
            }
        }
    }

    /// Polls for a handshake, which goes on with what is in use if a mount hangs: it may be on a thread that others
    /// need.
    fn poll_in_handshake(self: &Arc<Self>) {
        let tls = Arc::clone(self);
        self.reading.run(move || _ = tls.poll());
    }

    /// Polls every [`POLL_INTERVAL`] until dropped or aborted. Calls `after` after every poll, for metrics.
    pub async fn watch(self: Arc<Self>, after: impl Fn(&Self) + Send + 'static) {
        let mut ticks = every(POLL_INTERVAL);
        loop {
            ticks.tick().await;
            let tls = self.clone();
            // The panic hook reports a panic in the task; polling continues.
            let _ = tokio::task::spawn_blocking(move || tls.poll()).await;
            after(&self);
        }
    }

    /// Warns once a day about certificates in use that are overdue for renewal.
    fn warn_of_expiry(&self, now: SystemTime) {
        let material = self.current.load();
        let mut ending = material.ending_soon(now).peekable();
        if ending.peek().is_none() {
            return;
        }
        {
            let mut attempt = self.attempt.lock();
            if attempt.warned.is_some_and(|at| is_recent(at, now)) {
                return;
            }
            attempt.warned = Some(now);
        }
        for facts in ending {
            let subject = facts.common_name.as_deref().unwrap_or("(no common name)");
            match facts.not_after.duration_since(now) {
                Ok(left) => tracing::warn!(
                    purpose = self.purpose,
                    subject,
                    hours_left = left.as_secs() / 3600,
                    "certificate expires soon; rotate it"
                ),
                Err(_) => {
                    tracing::error!(
                        purpose = self.purpose,
                        subject,
                        "certificate expired; rotate it"
                    )
                }
            }
        }
    }
}

/// Returns whether the last warning is so recent that it need not be repeated. One in the future dates from before
/// the clock was set back.
fn is_recent(warned: SystemTime, now: SystemTime) -> bool {
    warned <= now && now < warned + WARNING_INTERVAL
}

impl TlsMaterial {
    fn load(
        server_name: AcceptedName,
        files: &TlsFiles,
        generation: u64,
    ) -> Result<Self, TlsError> {
        let TlsFiles {
            certificate,
            private_key,
            ca,
        } = files;
        let chain = read_certificates(certificate, CHAIN)?;
        let key = read_key(private_key)?;
        let bundle = read_certificates(ca, AUTHORITIES)?;

        // `read_certificates` returns at least one.
        let facts = CertificateFacts::parse(&chain[0])
            .map_err(|error| TlsError::unusable(certificate, error))?;
        // The facts are for logs and metrics; which CAs are trusted is decided by `trusted`.
        let authorities: Vec<_> = bundle
            .iter()
            .filter_map(|authority| CertificateFacts::parse(authority).ok())
            .collect();
        let roots = Arc::new(trusted(ca, bundle)?);

        let identity = certified_key(chain, key).map_err(|error| match error {
            rustls::Error::InconsistentKeys(_) => TlsError(format!(
                "{} does not match the certificate {}; install a matching key and certificate",
                private_key.display(),
                certificate.display()
            )),
            other => TlsError::unusable(private_key, other),
        })?;
        let server = server_config(
            identity.clone(),
            roots.clone(),
            ClientCertificates::Required,
        )
        .map_err(|error| error.of_file(ca))?;
        let verifier = ServerVerifier::fixed(server_name, roots.clone());
        let resolver = Arc::new(SingleCertAndKey::from(identity.clone()));
        let mut client = client_config(
            ServerTrust::Verifier(verifier),
            ClientIdentity::Resolver(resolver),
        )
        .map_err(|error| error.of_file(ca))?;
        // The session store is keyed by name, which all servers share: one instance's ticket would
        // be offered to the others.
        client.resumption = rustls::client::Resumption::disabled();
        // A name that is the same for every instance would be useless to the server as SNI.
        client.enable_sni = !matches!(server_name, AcceptedName::Fixed(_));
        Ok(Self {
            generation,
            server: Arc::new(server),
            client: Arc::new(client),
            identity,
            roots,
            certificate: facts,
            authorities,
        })
    }

    /// Returns our certificate and the CAs whose warning period has begun at `now`.
    fn ending_soon(&self, now: SystemTime) -> impl Iterator<Item = &CertificateFacts> {
        std::iter::once(&self.certificate)
            .chain(&self.authorities)
            .filter(move |facts| facts.warns_from() <= now)
    }

    /// Returns when the first warning about a CA of the bundle begins.
    pub fn authorities_warn_from(&self) -> Option<SystemTime> {
        self.authorities
            .iter()
            .map(CertificateFacts::warns_from)
            .min()
    }

    /// Returns the earliest expiry of the CAs in the bundle.
    pub fn authorities_not_after(&self) -> Option<SystemTime> {
        self.authorities.iter().map(|facts| facts.not_after).min()
    }
}

/// Content of the file with a certificate that its owner presents.
const CHAIN: &str = "a certificate (and its chain)";

/// Content of a file with trusted certificates.
const AUTHORITIES: &str = "one or several CA certificates";

/// Maximum size of a PEM file in bytes. The system's CAs take a quarter of a megabyte.
const MAX_PEM: u64 = 16 << 20;

/// Reads a PEM file; neither a FIFO, which blocks, nor a device without an end.
fn read_pem(path: &Path) -> Result<Vec<u8>, pem::Error> {
    bounded::read_at_most(path, MAX_PEM).map_err(pem::Error::Io)
}

fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    read_pem(path)
        .and_then(|text| PrivateKeyDer::from_pem_slice(&text))
        .map_err(|error| TlsError::in_file(path, "a private key", error))
}

/// Reads all certificates of a PEM file, at least one.
fn read_certificates(
    path: &Path,
    wanted: &'static str,
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let certificates: Vec<_> = read_pem(path)
        .and_then(|text| CertificateDer::pem_slice_iter(&text).collect::<Result<_, _>>())
        .map_err(|error| TlsError::in_file(path, wanted, error))?;
    if certificates.is_empty() {
        return Err(TlsError::in_file(path, wanted, "holds no certificate"));
    }
    Ok(certificates)
}

/// Returns the CAs among `bundle`, the certificates of `path`.
fn trusted(path: &Path, bundle: Vec<CertificateDer<'static>>) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    // One damaged certificate must not take the trust in the others away.
    let (_, ignored) = roots.add_parsable_certificates(bundle);
    if roots.is_empty() {
        return Err(TlsError::unusable(
            path,
            "none of its certificates can serve as a CA",
        ));
    }
    if ignored > 0 {
        tracing::warn!(file = %path.display(), ignored, "unusable CA certificates skipped");
    }
    Ok(roots)
}

/// Presents the latest valid certificate, polled at every handshake.
#[derive(Debug)]
struct PolledIdentity(Arc<RotatingTls>);

impl ResolvesClientCert for PolledIdentity {
    fn resolve(&self, _hints: &[&[u8]], _schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.0.poll_in_handshake();
        Some(self.0.current().identity.clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

fn stamps(files: &TlsFiles) -> FileStamps {
    [&files.certificate, &files.private_key, &files.ca].map(FileStamp::of)
}

#[cfg(test)]
mod tests;
