//! Mutual TLS whose files may change at any time.
//!
//! [`RotatingTls`] holds what was last loaded from a certificate, its key and a
//! bundle of CAs, and loads them again when one of the files changes. A set that
//! does not fit together (a new certificate beside the old key, half a file) is
//! never used: the last good set stays and the new one is tried again at every
//! poll. Connections keep the set that they began with.

mod certificate;
mod verify;

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use arc_swap::ArcSwap;
use parking_lot::{Mutex, MutexGuard};
use rustls::{ClientConfig, RootCertStore, ServerConfig, server::WebPkiClientVerifier};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};

pub use self::certificate::{CertificateFacts, common_name};
use crate::files::FileStamp;
use dns_core::config::TlsFiles;

/// How often the files are looked at. A rotation by the agent or by an operator
/// is never more urgent than this.
pub const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// How often the warning about one certificate is repeated.
const WARNING_INTERVAL: Duration = Duration::from_secs(24 * 3600);

/// One end of mutual TLS, always made from the newest good set of files.
#[derive(Debug)]
pub struct RotatingTls {
    /// What the material is for, in logs and metrics: `health-client`, `api`...
    purpose: &'static str,
    /// Name that a server's certificate has to be issued to when we are the client.
    server_name: &'static str,
    /// Where it comes from.
    files: TlsFiles,
    /// The newest good set.
    current: ArcSwap<TlsMaterial>,
    /// What the last attempt to load saw and how it went.
    attempt: Mutex<Attempt>,
    /// Loads that failed since the start, for metrics.
    failures: AtomicU64,
}

/// A certificate, its key and the CAs, made into configurations of both ends.
#[derive(Debug)]
pub struct TlsMaterial {
    /// Counts the sets: 1 for the first.
    pub generation: u64,
    /// For accepting connections: a client certificate of one of the CAs is required.
    pub server: Arc<ServerConfig>,
    /// For making connections: the server's certificate has to be of one of the
    /// CAs and issued to the expected name.
    pub client: Arc<ClientConfig>,
    /// Our own certificate.
    pub certificate: CertificateFacts,
    /// The CAs of the bundle.
    pub authorities: Vec<CertificateFacts>,
}

/// The files as they are on disk; `None`: not there.
type FileStamps = [Option<FileStamp>; 3];

/// The last attempt to load, and the last warning.
#[derive(Debug)]
struct Attempt {
    /// The files as they were just before it.
    seen: FileStamps,
    /// Why it failed, if it did.
    error: Option<String>,
    /// When an end that is near was warned about.
    warned: Option<SystemTime>,
}

/// Why certificates could not be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file could not be read, or holds no PEM of the wanted kind.
    #[error("{}: {problem}; a PEM file with {wanted} is needed", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
        /// What should be in it.
        wanted: &'static str,
    },
    /// The private key is another certificate's.
    #[error(
        "{} is not the key of {}; put both from the same pair there",
        key.display(),
        certificate.display()
    )]
    KeyMismatch {
        /// File of the certificate.
        certificate: PathBuf,
        /// File of the key.
        key: PathBuf,
    },
    /// The files can be read but TLS cannot use them.
    #[error("{}: {problem}", path.display())]
    Unusable {
        /// The file concerned.
        path: PathBuf,
        /// What rustls or the certificate parser says.
        problem: String,
    },
}

impl RotatingTls {
    /// Loads the files for the first time. `purpose` is the name in logs and
    /// metrics, `server_name` what servers that we connect to have to be called.
    pub fn load(
        purpose: &'static str,
        server_name: &'static str,
        files: &TlsFiles,
    ) -> Result<Arc<Self>, TlsError> {
        let seen = stamps(files);
        let material = TlsMaterial::load(server_name, files, 1)?;
        let tls = Arc::new(Self {
            purpose,
            server_name,
            files: files.clone(),
            current: ArcSwap::from_pointee(material),
            attempt: Mutex::new(Attempt { seen, error: None, warned: None }),
            failures: AtomicU64::new(0),
        });
        tls.warn_of_expiry(SystemTime::now());
        Ok(tls)
    }

    /// What the material is for, as given to [`Self::load`].
    pub fn purpose(&self) -> &'static str {
        self.purpose
    }

    /// The newest good set.
    pub fn current(&self) -> Arc<TlsMaterial> {
        self.current.load_full()
    }

    /// Configuration for accepting connections now.
    pub fn server_config(&self) -> Arc<ServerConfig> {
        self.current.load().server.clone()
    }

    /// Configuration for making connections now.
    pub fn client_config(&self) -> Arc<ClientConfig> {
        self.current.load().client.clone()
    }

    /// Why the files as they are now cannot be used; `None`: what is in use is
    /// what lies in the files.
    pub fn last_error(&self) -> Option<String> {
        self.attempt().error.clone()
    }

    /// How many attempts to load failed since the start.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Loads the files again if one changed since the last attempt, or if that
    /// failed. Says whether a new set is in use now. Reads files: not for a
    /// thread that answers queries.
    pub fn poll(&self) -> bool {
        let mut attempt = self.attempt();
        let seen = stamps(&self.files);
        if seen == attempt.seen && attempt.error.is_none() {
            drop(attempt);
            self.warn_of_expiry(SystemTime::now());
            return false;
        }
        let generation = self.current.load().generation + 1;
        let loaded = TlsMaterial::load(self.server_name, &self.files, generation);
        // A file that changed while it was read may have been read in part: the
        // stamp from before makes the next poll look again.
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
                attempt.warned = None;
                self.current.store(Arc::new(material));
                drop(attempt);
                self.warn_of_expiry(SystemTime::now());
                true
            }
            Err(error) => {
                self.failures.fetch_add(1, Ordering::Relaxed);
                let text = error.to_string();
                if attempt.error.as_ref() != Some(&text) {
                    tracing::warn!(
                        purpose = self.purpose,
                        "cannot use the new certificates yet; the last good ones stay: {text}"
                    );
                }
                attempt.error = Some(text);
                false
            }
        }
    }

    /// Polls every [`POLL_INTERVAL`] until dropped or aborted. `after` is called
    /// after every poll, for metrics.
    pub async fn watch(self: Arc<Self>, after: impl Fn(&Self) + Send + 'static) {
        let mut ticks = tokio::time::interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let tls = self.clone();
            // A panic in there is a bug that the task's own message reports; go on.
            let _ = tokio::task::spawn_blocking(move || tls.poll()).await;
            after(&self);
        }
    }

    /// Warns once a day about certificates in use that should have been renewed by now.
    fn warn_of_expiry(&self, now: SystemTime) {
        let material = self.current.load();
        let mut ending = material.ending_soon(now).peekable();
        if ending.peek().is_none() {
            return;
        }
        {
            let mut attempt = self.attempt();
            if attempt.warned.is_some_and(|at| now < at + WARNING_INTERVAL) {
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
                    "certificate expires soon: rotate it"
                ),
                Err(_) => {
                    tracing::error!(purpose = self.purpose, subject, "certificate has expired: rotate it")
                }
            }
        }
    }

    /// The state of the last attempt.
    fn attempt(&self) -> MutexGuard<'_, Attempt> {
        self.attempt.lock()
    }
}

impl TlsMaterial {
    /// Reads and checks one set of files.
    fn load(server_name: &'static str, files: &TlsFiles, generation: u64) -> Result<Self, TlsError> {
        let TlsFiles { certificate, private_key, ca } = files;
        let chain = read_certificates(certificate, "a certificate (and its chain)")?;
        let key = PrivateKeyDer::from_pem_file(private_key).map_err(|error| TlsError::File {
            path: private_key.clone(),
            problem: error.to_string(),
            wanted: "a private key",
        })?;
        let bundle = read_certificates(ca, "one or several CA certificates")?;

        let facts = CertificateFacts::parse(&chain[0])
            .map_err(|error| TlsError::Unusable { path: certificate.clone(), problem: error.to_string() })?;
        let authorities: Vec<_> =
            bundle.iter().filter_map(|authority| CertificateFacts::parse(authority).ok()).collect();
        let mut roots = RootCertStore::empty();
        let (_, ignored) = roots.add_parsable_certificates(bundle);
        if roots.is_empty() {
            return Err(TlsError::Unusable {
                path: ca.clone(),
                problem: "none of its certificates can serve as a CA".to_owned(),
            });
        }
        if ignored > 0 {
            tracing::warn!(file = %ca.display(), ignored, "CA certificates that cannot be used are left out");
        }

        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let roots = Arc::new(roots);
        let unusable = |path: &Path| {
            let path = path.to_owned();
            move |error: rustls::Error| match error {
                rustls::Error::InconsistentKeys(_) => {
                    TlsError::KeyMismatch { certificate: certificate.clone(), key: private_key.clone() }
                }
                other => TlsError::Unusable { path, problem: other.to_string() },
            }
        };
        let clients = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
            .build()
            .map_err(|error| TlsError::Unusable { path: ca.clone(), problem: error.to_string() })?;
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(unusable(certificate))?
            .with_client_cert_verifier(clients)
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(unusable(private_key))?;
        // A resumed session skips the client's certificate: one that has expired since, or whose CA
        // has been replaced, would still be let in.
        server.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        let mut client = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(unusable(certificate))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verify::IssuedTo::new(server_name, roots, provider)))
            .with_client_auth_cert(chain, key)
            .map_err(unusable(private_key))?;
        // Servers are told apart by address; the store of sessions is keyed by
        // name, so one instance's ticket would be offered to all the others.
        client.resumption = rustls::client::Resumption::disabled();
        // The name is the same for every instance, so it tells the server nothing.
        client.enable_sni = false;
        Ok(Self {
            generation,
            server: Arc::new(server),
            client: Arc::new(client),
            certificate: facts,
            authorities,
        })
    }

    /// Our own certificate and the CAs whose warnings have begun at `now`.
    fn ending_soon(&self, now: SystemTime) -> impl Iterator<Item = &CertificateFacts> {
        std::iter::once(&self.certificate)
            .chain(&self.authorities)
            .filter(move |facts| facts.warns_from() <= now)
    }

    /// Returns when the first warning about a CA of the bundle begins.
    pub fn authorities_warn_from(&self) -> Option<SystemTime> {
        self.authorities.iter().map(CertificateFacts::warns_from).min()
    }

    /// The earliest end among the CAs of the bundle.
    pub fn authorities_not_after(&self) -> Option<SystemTime> {
        self.authorities.iter().map(|facts| facts.not_after).min()
    }
}

/// Reads all certificates of a PEM file; at least one.
fn read_certificates(path: &Path, wanted: &'static str) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let failed = |problem: String| TlsError::File { path: path.to_owned(), problem, wanted };
    let certificates: Vec<_> = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<_, _>>)
        .map_err(|error| failed(error.to_string()))?;
    if certificates.is_empty() {
        return Err(failed("holds no certificate".to_owned()));
    }
    Ok(certificates)
}

/// The stamps of the three files.
fn stamps(files: &TlsFiles) -> FileStamps {
    [&files.certificate, &files.private_key, &files.ca].map(FileStamp::of)
}

#[cfg(test)]
mod tests;
