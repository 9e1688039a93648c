//! Verification of server certificates.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use parking_lot::Mutex;
use rustls::{
    DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    client::{
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_cert_signed_by_trust_anchor, verify_server_name,
    },
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    server::ParsedCertificate,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use x509_cert::{
    certificate::{CertificateInner, Raw},
    der::{self, Decode, Tag, Tagged, oid::db::rfc4519::COMMON_NAME},
    ext::pkix::{SubjectAltName, name::GeneralName},
    name::Name,
};

use super::{AUTHORITIES, RotatingTls, TlsError, read_certificates, trusted};
use crate::{
    files::{FileStamp, ReadingThread},
    logs::LineLimit,
};

/// The names that a server's certificate may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcceptedName {
    /// This name, regardless of the address. Unlike the usual check, it accepts a common name without
    /// alternative names, because directors issue such certificates.
    Fixed(&'static str),
    /// The host that the connection is for.
    Host,
    /// The host that the connection is for; the common name must be below this domain.
    HostBelow(&'static str),
}

impl From<&'static str> for AcceptedName {
    fn from(name: &'static str) -> Self {
        Self::Fixed(name)
    }
}

/// Verifier of server certificates: the issuer first, then the name.
#[derive(Debug)]
pub struct ServerVerifier {
    roots: Roots,
    name: AcceptedName,
    provider: Arc<CryptoProvider>,
}

#[derive(Debug)]
enum Roots {
    Fixed(Arc<RootCertStore>),
    File(Arc<AuthorityFile>),
    /// The CAs of the latest valid set of files.
    Polled(Arc<RotatingTls>),
    /// Every certificate is accepted, if the server has its key.
    Any,
}

impl ServerVerifier {
    /// Accepts certificates of these CAs.
    pub(super) fn fixed(name: AcceptedName, roots: Arc<RootCertStore>) -> Self {
        Self::new(Roots::Fixed(roots), name)
    }

    /// Accepts certificates of the CAs that `tls` uses at the time of the handshake, for its server name.
    pub(super) fn polling(tls: Arc<RotatingTls>) -> Self {
        let name = tls.server_name;
        Self::new(Roots::Polled(tls), name)
    }

    /// Accepts certificates of the CAs in a PEM file, for the host of the connection. While the file cannot
    /// be read, the last good CAs are used, or handshakes fail.
    pub fn of_file(path: &Path) -> Self {
        Self::new(Roots::File(AuthorityFile::new(path)), AcceptedName::Host)
    }

    /// Accepts every server: the connection is encrypted, but not protected from an attacker on its way.
    pub fn unverified() -> Self {
        Self::new(Roots::Any, AcceptedName::Host)
    }

    fn new(roots: Roots, name: AcceptedName) -> Self {
        Self {
            roots,
            name,
            provider: Arc::new(ring::default_provider()),
        }
    }

    /// Returns the CAs to use now; `None` if there is nothing to verify.
    pub fn roots(&self) -> Result<Option<Arc<RootCertStore>>, TlsError> {
        match &self.roots {
            Roots::Fixed(roots) => Ok(Some(roots.clone())),
            Roots::Polled(tls) => {
                tls.poll_in_handshake();
                Ok(Some(tls.current().roots.clone()))
            }
            Roots::Any => Ok(None),
            Roots::File(file) => file.roots().map(Some),
        }
    }

    fn check_name(
        &self,
        certificate: &ParsedCertificate<'_>,
        der: &CertificateDer<'_>,
        host: &ServerName<'_>,
    ) -> Result<(), Error> {
        match self.name {
            AcceptedName::Host => verify_server_name(certificate, host),
            // Not by webpki, which ignores the common name; directors' certificates may have
            // nothing else.
            AcceptedName::Fixed(name) => {
                let facts = CertificateFacts::parse(der).map_err(|_| {
                    Error::InvalidCertificate(rustls::CertificateError::BadEncoding)
                })?;
                if facts.is_issued_to(name) {
                    Ok(())
                } else {
                    let problem = rustls::CertificateError::NotValidForName;
                    Err(Error::InvalidCertificate(problem))
                }
            }
            AcceptedName::HostBelow(below) => {
                verify_server_name(certificate, host)?;
                let name = common_name(der).unwrap_or_default();
                match name.strip_suffix(below) {
                    // Whole labels: `evilbosh.example` is not below `bosh.example`.
                    Some(first) if first.ends_with('.') && first.len() > 1 => Ok(()),
                    _ => Err(Error::General(format!(
                        "the server's common name {name:?} is not below {below}"
                    ))),
                }
            }
        }
    }
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let roots = self
            .roots()
            .map_err(|error| Error::General(error.to_string()))?;
        if let Some(roots) = roots {
            let parsed = ParsedCertificate::try_from(end_entity)?;
            let algorithms = self.provider.signature_verification_algorithms.all;
            verify_server_cert_signed_by_trust_anchor(
                &parsed,
                &roots,
                intermediates,
                now,
                algorithms,
            )?;
            self.check_name(&parsed, end_entity, server_name)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

/// The CAs of a file, read again at a handshake if it changed; the last good ones stay in use.
#[derive(Debug)]
struct AuthorityFile {
    path: PathBuf,
    reading: Arc<ReadingThread>,
    /// The last good CAs, or why there are none.
    latest: Mutex<Result<StampedRoots, TlsError>>,
}

/// The CAs of a file with its stamp.
type StampedRoots = (Option<FileStamp>, Arc<RootCertStore>);

impl AuthorityFile {
    fn new(path: &Path) -> Arc<Self> {
        let unread = "its folder does not respond; if it is mounted, check its server";
        Arc::new(Self {
            path: path.to_owned(),
            reading: Arc::default(),
            latest: Mutex::new(Err(TlsError::unusable(path, unread))),
        })
    }

    fn roots(self: &Arc<Self>) -> Result<Arc<RootCertStore>, TlsError> {
        let file = Arc::clone(self);
        self.reading.run(move || file.read());
        let (_, roots) = self.latest.lock().clone()?;
        Ok(roots)
    }

    fn read(&self) {
        let stamp = FileStamp::of(&self.path);
        if let Ok((seen, _)) = &*self.latest.lock()
            // Two missing files have equal stamps.
            && stamp.is_some()
            && *seen == stamp
        {
            return;
        }
        let read = read_certificates(&self.path, AUTHORITIES)
            .and_then(|bundle| trusted(&self.path, bundle));
        let mut latest = self.latest.lock();
        match read {
            Ok(roots) => *latest = Ok((stamp, Arc::new(roots))),
            // The stamp stays the old one, so that the next handshake reads the file again.
            Err(error) if latest.is_ok() => {
                static LIMIT: LineLimit = LineLimit::new();
                if let Some(suppressed) = LIMIT.admit_any() {
                    tracing::warn!(
                        suppressed,
                        "cannot use the new CA certificates; the last good ones stay in use: {error}"
                    );
                }
            }
            Err(error) => *latest = Err(error),
        }
    }
}

//----------- Properties -----------------------------------------------------

/// A parsed certificate, also one whose serial number is longer than RFC 5280 allows.
pub type Certificate = CertificateInner<Raw>;

/// Properties of a certificate used in logs, metrics and checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFacts {
    /// Common name of the subject, if it has one.
    pub common_name: Option<String>,
    /// DNS names among the subject's alternative names.
    pub dns_names: Vec<String>,
    /// Start of the validity period.
    pub not_before: SystemTime,
    /// End of the validity period.
    pub not_after: SystemTime,
}

impl CertificateFacts {
    /// Parses a DER certificate.
    pub fn parse(certificate: &CertificateDer<'_>) -> der::Result<Self> {
        let parsed = Certificate::from_der(certificate)?;
        let parsed = parsed.tbs_certificate();
        let mut dns_names = Vec::new();
        if let Some((_, names)) = parsed.get_extension::<SubjectAltName>()? {
            for name in names.0 {
                if let GeneralName::DnsName(text) = name {
                    dns_names.push(text.to_string());
                }
            }
        }
        Ok(Self {
            common_name: first_common_name(parsed.subject()),
            dns_names,
            not_before: parsed.validity().not_before.to_system_time(),
            not_after: parsed.validity().not_after.to_system_time(),
        })
    }

    /// Returns when warnings about the expiry begin: 1/12 of the validity before it, but at most 30
    /// days. Certificates with up to a week of validity are renewed by a program, possibly as late
    /// as 20 minutes before the expiry (docs/identity.md); warnings begin after that.
    pub fn warns_from(&self) -> SystemTime {
        const DAY: Duration = Duration::from_secs(24 * 3600);
        const LATEST_RENEWAL: Duration = Duration::from_secs(20 * 60);
        let validity = self
            .not_after
            .duration_since(self.not_before)
            .unwrap_or_default();
        let longest = if validity > 7 * DAY {
            30 * DAY
        } else {
            LATEST_RENEWAL
        };
        self.not_after - (validity / 12).min(longest)
    }

    /// Returns why the certificate is not valid at `now`; `None` if it is.
    pub fn invalid_at(&self, now: SystemTime) -> Option<&'static str> {
        if now < self.not_before {
            Some("is not valid yet (is this machine's clock right?)")
        } else if now >= self.not_after + Duration::from_secs(1) {
            // The date is a whole second, and valid to its end (RFC 5280, section 4.1.2.5).
            Some("has expired")
        } else {
            None
        }
    }

    /// Returns whether the certificate is issued to `name`, by its common name or one of its DNS
    /// names. The common name counts because directors issue certificates without alternative
    /// names, and bosh-dns accepts them.
    pub fn is_issued_to(&self, name: &str) -> bool {
        self.common_name
            .iter()
            .chain(&self.dns_names)
            .any(|held| held.eq_ignore_ascii_case(name))
    }
}

/// Returns the common name of a certificate's subject; `None` also if it cannot be parsed.
pub fn common_name(certificate: &CertificateDer<'_>) -> Option<String> {
    first_common_name(
        Certificate::from_der(certificate)
            .ok()?
            .tbs_certificate()
            .subject(),
    )
}

/// Returns the first common name of `subject` that is a string.
pub fn first_common_name(subject: &Name) -> Option<String> {
    for attribute in subject.iter() {
        let is_string = matches!(
            attribute.value.tag(),
            Tag::Utf8String | Tag::PrintableString | Tag::Ia5String | Tag::TeletexString
        );
        if attribute.oid == COMMON_NAME
            && is_string
            && let Ok(text) = str::from_utf8(attribute.value.value())
        {
            return Some(text.to_owned());
        }
    }
    None
}
