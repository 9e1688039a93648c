//! What we want to know about a certificate.

use std::time::{Duration, SystemTime};

use rustls_pki_types::CertificateDer;
use x509_parser::{
    error::X509Error,
    prelude::{FromDer, GeneralName, X509Certificate, X509Name},
};

/// The facts of one certificate that logs, metrics and checks use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFacts {
    /// Common name of the subject, if it has one.
    pub common_name: Option<String>,
    /// DNS names among the subject's alternative names.
    pub dns_names: Vec<String>,
    /// Start of its validity.
    pub not_before: SystemTime,
    /// End of its validity.
    pub not_after: SystemTime,
}

/// What is wrong with a certificate.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CertificateError {
    /// It is no certificate.
    #[error(transparent)]
    Encoding(#[from] x509_parser::nom::Err<X509Error>),
    /// Its alternative names cannot be read.
    #[error(transparent)]
    Extension(X509Error),
}

impl CertificateFacts {
    /// Reads them from DER; the error says what is wrong.
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

    /// Returns when warnings about the end begin: at 1/12 of the validity before it, but at most
    /// 30 days. A validity of up to a week is renewed by a program, which may take until 20 minutes
    /// before the end (docs/identity.md); warnings begin after that.
    pub fn warns_from(&self) -> SystemTime {
        const DAY: Duration = Duration::from_secs(24 * 3600);
        const LATEST_RENEWAL: Duration = Duration::from_secs(20 * 60);
        let validity = self.not_after.duration_since(self.not_before).unwrap_or_default();
        let longest = if validity > 7 * DAY { 30 * DAY } else { LATEST_RENEWAL };
        self.not_after - (validity / 12).min(longest)
    }

    /// Why the certificate is not valid at `now`; `None` if it is.
    pub fn invalid_at(&self, now: SystemTime) -> Option<&'static str> {
        if now < self.not_before {
            Some("is not valid yet")
        } else if now > self.not_after {
            Some("has expired")
        } else {
            None
        }
    }

    /// Whether the certificate is issued to `name`: by its common name, or by
    /// one of its DNS names. Directors make certificates with a common name
    /// alone, so that one counts, as it does for the reference.
    pub fn is_issued_to(&self, name: &str) -> bool {
        self.common_name.iter().chain(&self.dns_names).any(|held| held.eq_ignore_ascii_case(name))
    }
}

/// The common name of a certificate's subject; `None` also where it cannot be parsed.
pub fn common_name(certificate: &CertificateDer<'_>) -> Option<String> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    first_common_name(parsed.subject())
}

/// The first common name of `subject` that is text.
fn first_common_name(subject: &X509Name<'_>) -> Option<String> {
    subject.iter_common_name().find_map(|name| name.as_str().ok()).map(str::to_owned)
}

/// The moment that a number of seconds since 1970 stands for; what lies before
/// counts as 1970.
fn moment(seconds: i64) -> SystemTime {
    let since = Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
    SystemTime::UNIX_EPOCH.checked_add(since).unwrap_or(SystemTime::UNIX_EPOCH)
}
