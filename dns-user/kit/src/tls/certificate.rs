//! Properties of certificates.

use std::time::{Duration, SystemTime};

use rustls_pki_types::CertificateDer;
use x509_parser::{
    error::X509Error,
    prelude::{FromDer, GeneralName, X509Certificate, X509Name},
};

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

/// Reason why a certificate could not be parsed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CertificateError {
    /// The data is not a DER certificate.
    #[error(transparent)]
    Encoding(#[from] x509_parser::nom::Err<X509Error>),
    /// The alternative names are invalid.
    #[error(transparent)]
    Extension(X509Error),
}

impl CertificateFacts {
    /// Parses a DER certificate.
    pub fn parse(certificate: &CertificateDer<'_>) -> Result<Self, CertificateError> {
        let (_, parsed) = X509Certificate::from_der(certificate)?;
        let dns_names = match parsed.subject_alternative_name() {
            Ok(Some(extension)) => extension
                .value
                .general_names
                .iter()
                .filter_map(|name| match name {
                    GeneralName::DNSName(text) => Some((*text).to_owned()),
                    _ => None,
                })
                .collect(),
            Ok(None) => Vec::new(),
            Err(error) => return Err(CertificateError::Extension(error)),
        };
        Ok(Self {
            common_name: first_common_name(parsed.subject()),
            dns_names,
            not_before: moment(parsed.validity().not_before.timestamp()),
            not_after: moment(parsed.validity().not_after.timestamp()),
        })
    }

    /// Returns when warnings about the expiry begin: 1/12 of the validity before it, but at most 30
    /// days. Certificates with up to a week of validity are renewed by a program, possibly as late
    /// as 20 minutes before the expiry (docs/identity.md); warnings begin after that.
    pub fn warns_from(&self) -> SystemTime {
        const DAY: Duration = Duration::from_secs(24 * 3600);
        const LATEST_RENEWAL: Duration = Duration::from_secs(20 * 60);
        let validity = self.not_after.duration_since(self.not_before).unwrap_or_default();
        let longest = if validity > 7 * DAY { 30 * DAY } else { LATEST_RENEWAL };
        self.not_after - (validity / 12).min(longest)
    }

    /// Returns why the certificate is not valid at `now`; `None` if it is.
    pub fn invalid_at(&self, now: SystemTime) -> Option<&'static str> {
        if now < self.not_before {
            Some("is not valid yet (is this machine's clock right?)")
        } else if now > self.not_after {
            Some("has expired")
        } else {
            None
        }
    }

    /// Returns whether the certificate is issued to `name`, by its common name or one of its DNS
    /// names. The common name counts because directors issue certificates without alternative
    /// names, and bosh-dns accepts them.
    pub fn is_issued_to(&self, name: &str) -> bool {
        self.common_name.iter().chain(&self.dns_names).any(|held| held.eq_ignore_ascii_case(name))
    }
}

/// Returns the common name of a certificate's subject; `None` also if it cannot be parsed.
pub fn common_name(certificate: &CertificateDer<'_>) -> Option<String> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    first_common_name(parsed.subject())
}

/// Returns the first common name of `subject` that is a string.
fn first_common_name(subject: &X509Name<'_>) -> Option<String> {
    subject.iter_common_name().find_map(|name| name.as_str().ok()).map(str::to_owned)
}

/// Converts seconds since 1970; negative values become 1970.
fn moment(seconds: i64) -> SystemTime {
    let since = Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
    SystemTime::UNIX_EPOCH.checked_add(since).unwrap_or(SystemTime::UNIX_EPOCH)
}
