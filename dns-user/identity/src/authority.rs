//! The certificate authority: its files are verified when loaded and reloaded when they change; then it issues
//! certificates.
//!
//! The reference performs none of these checks and issues certificates that peers reject.

use std::{
    collections::HashSet,
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::Context as _;
use aws_lc_rs::digest;
use dns_kit::{
    files::{FileStamp, bounded},
    tls::Certificate,
};
use rustls::{RootCertStore, server::WebPkiClientVerifier};
use rustls_pki_types::{
    CertificateDer, UnixTime,
    pem::{self, PemObject},
};
use serde::{Deserialize, Serialize};
use x509_cert::{
    der::{
        Decode, Encode,
        asn1::ObjectIdentifier,
        oid::db::rfc5280::{
            ANY_EXTENDED_KEY_USAGE, ID_CE_BASIC_CONSTRAINTS, ID_CE_CRL_DISTRIBUTION_POINTS,
            ID_CE_EXT_KEY_USAGE, ID_CE_KEY_USAGE, ID_CE_NAME_CONSTRAINTS, ID_CE_SUBJECT_ALT_NAME,
        },
    },
    ext::pkix::{BasicConstraints, ExtendedKeyUsage, KeyUsage, SubjectKeyIdentifier},
};
use zeroize::Zeroizing;

use crate::{
    certificate::{self, CertificateIssuer, Validity, ValidityState, moment, seconds},
    keys::{KeyError, KeyType, PrivateKey, pem as encode},
    profile::Profile,
};

/// A CA that passed every check.
#[derive(Debug)]
pub struct Authority {
    pub(crate) key: PrivateKey,
    /// The CA's certificate followed by its issuers, DER.
    pub chain: Vec<CertificateDer<'static>>,
    /// Subject of the CA's certificate, DER.
    subject: Vec<u8>,
    key_id: Vec<u8>,
    /// Validity of the CA's certificate.
    pub validity: Validity,
    pub(crate) fingerprint: Fingerprint,
}

/// SHA-256 of a CA's certificate, in hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Fingerprint(String);

/// A newly issued certificate.
#[derive(Debug)]
pub struct Issued {
    /// The leaf, followed by the CA's certificate and its issuers.
    pub pem: String,
    /// Validity of the leaf, limited by the CA's.
    pub validity: Validity,
}

/// Defect of a CA, with the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum Fault {
    #[error("no certificate in PEM format; put the CA's certificate first, then its issuers")]
    NoCertificate,
    #[error("certificate {0} is damaged: {1}; copy the file again")]
    Damaged(usize, String),
    #[error("CA key: {0}")]
    Key(KeyError),
    #[error("the private key does not match the CA certificate; use the key of {0:?}")]
    KeyMismatch(String),
    /// BasicConstraints lacks `CA:TRUE` (RFC 5280, section 4.2.1.9).
    #[error("certificate {0} is not a CA: BasicConstraints lacks CA:TRUE; create it as a CA")]
    NotCa(usize),
    #[error(
        "certificate {0} has no Subject Key Identifier, so leaves lack the authority key identifier and \
         some verifiers refuse them; create the CA with subjectKeyIdentifier=hash"
    )]
    NoKeyIdentifier(usize),
    #[error(
        "certificate {0} lacks keyCertSign in KeyUsage; create the CA with keyUsage=keyCertSign,cRLSign"
    )]
    NoCertSign(usize),
    #[error(
        "certificate {0} limits ExtendedKeyUsage, so peers refuse client or server certificates; omit the \
         extension or use anyExtendedKeyUsage"
    )]
    ExtendedKeyUsage(usize),
    #[error(
        "certificate {0} has the critical extension {1}, which some verifiers refuse; issue it without, or not \
         critical"
    )]
    CriticalExtension(usize, String),
    #[error("certificate {0} expired at {1}; replace the CA")]
    Expired(usize, String),
    #[error("certificate {0} is valid only from {1}; check this machine's clock")]
    NotYetValid(usize, String),
    #[error(
        "certificate {0} allows {1} CA certificates below it, but there are {2}; issue it with a larger \
         pathlen"
    )]
    PathLength(usize, u8, usize),
    #[error(
        "certificate {0} was not issued by certificate {1}; list the certificates from the CA up to the root"
    )]
    Order(usize, usize),
    #[error("verification of a test certificate failed: {0}")]
    Refused(String),
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl Fingerprint {
    /// Returns the fingerprint of a certificate in DER.
    pub fn of(der: &[u8]) -> Self {
        let hash = digest::digest(&digest::SHA256, der);
        Self(dns_kit::hex(hash.as_ref()))
    }

    /// Returns whether the text has the form of a fingerprint; one that was deserialised may not.
    pub fn is_well_formed(&self) -> bool {
        self.0.len() == 64
            && self
                .0
                .bytes()
                .all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    }

    /// Returns the fingerprint in lower-case hexadecimal.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Authority {
    /// Parses and checks a CA; returns every fault found.
    ///
    /// `chain` contains the CA's certificate and its issuers, `key` its private key (PKCS#1, SEC1
    /// or PKCS#8), both in PEM.
    pub fn parse(chain: &[u8], key: &[u8], now: SystemTime) -> Result<Self, Vec<Fault>> {
        let (ders, parsed) = parse_chain(chain).map_err(|fault| vec![fault])?;
        let mut faults = inspect(&parsed, now);
        // A bad key does not end the check: the operator gets all faults of both files at once.
        let key = match PrivateKey::from_pem(key) {
            Ok(key) => Some(key),
            Err(error) => {
                faults.push(Fault::Key(error));
                None
            }
        };
        let first = &parsed[0];
        if let Some(key) = &key
            && !certifies(first, key)
        {
            faults.push(Fault::KeyMismatch(
                first.tbs_certificate().subject().to_string(),
            ));
        }
        let subject = first.tbs_certificate().subject().to_der();
        // Each missing part has left a fault; a subject that was parsed can be encoded again.
        let (Some(key), Some(key_id), Ok(subject), true) =
            (key, key_identifier(first), subject, faults.is_empty())
        else {
            return Err(faults);
        };
        let authority = Self {
            key,
            subject,
            key_id,
            validity: validity(first),
            fingerprint: Fingerprint::of(&ders[0]),
            chain: ders,
        };
        authority
            .try_out(now)
            .map_err(|problem| vec![Fault::Refused(problem.to_string())])?;
        Ok(authority)
    }

    /// Issues a leaf and verifies it as a peer would, to find faults that `inspect` does not cover.
    fn try_out(&self, now: SystemTime) -> anyhow::Result<()> {
        // The CA signs any type of key, and this one costs no time.
        let key = PrivateKey::generate(KeyType::P256)?;
        let profile = Profile::new("trial", &[], [], [])?;
        let hour = Validity::starting(now, Duration::from_secs(3600));
        let issued = self.issue(&profile, key.public_key_info(), hour)?;
        let mut chain = certificates(issued.pem.as_bytes())?;
        let leaf = chain.remove(0);
        let mut roots = RootCertStore::empty();
        // The top certificate is the trust anchor, so that path lengths and usages along the chain
        // are checked.
        roots.add(chain.pop().context("no certificate")?)?;
        // As for all connections (`dns_kit::tls`), instead of whatever the process has as its
        // default.
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build()?;
        let now = UnixTime::since_unix_epoch(Duration::from_secs(seconds(now)));
        verifier.verify_client_cert(&leaf, &chain, now)?;
        Ok(())
    }

    /// Issues a certificate that ends with the CA at the latest. It may start before the CA, which no
    /// verifier minds: a new CA must not shorten the tolerance for slow clocks.
    pub fn issue(
        &self,
        profile: &Profile,
        public_key_info: &[u8],
        wanted: Validity,
    ) -> Result<Issued, KeyError> {
        let validity = Validity {
            not_after: wanted.not_after.min(self.validity.not_after),
            ..wanted
        };
        let issuer = CertificateIssuer {
            key: &self.key,
            subject: &self.subject,
            key_id: &self.key_id,
        };
        let leaf = certificate::issue(issuer, profile, public_key_info, validity)?;
        let mut text = encode("CERTIFICATE", &leaf).to_string();
        text.push_str(&self.chain_pem());
        Ok(Issued {
            pem: text,
            validity,
        })
    }

    /// Returns the CA's certificates, PEM.
    pub fn chain_pem(&self) -> String {
        encode_all(&self.chain)
    }

    /// Returns whether the CA can still issue at `now`.
    pub fn is_valid_at(&self, now: SystemTime) -> bool {
        self.validity.standing(now) == ValidityState::Valid
    }

    /// Returns a warning about issuing leaves of this length, if there is one.
    pub fn caution(&self, now: SystemTime, length: Duration) -> Option<String> {
        let end = self.validity.not_after;
        if now + length <= end {
            return None;
        }
        let end = date(end);
        Some(format!(
            "the CA expires at {end}, before a new leaf would; leaves expire with the CA: replace it soon"
        ))
    }
}

/// Parses the certificates of a PEM text; there must be at least one.
pub fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, Fault> {
    let mut ders = Vec::new();
    for (number, read) in CertificateDer::pem_slice_iter(text).enumerate() {
        ders.push(read.map_err(|error| Fault::Damaged(number + 1, explain(&error).to_owned()))?);
    }
    if ders.is_empty() {
        Err(Fault::NoCertificate)
    } else {
        Ok(ders)
    }
}

/// Explains a defect of PEM; the library's own text lists the bytes of the line as numbers.
fn explain(error: &pem::Error) -> &'static str {
    match error {
        pem::Error::MissingSectionEnd { .. } => "the END line is missing",
        pem::Error::IllegalSectionStart { .. } => "the BEGIN line is malformed",
        pem::Error::Base64Decode(_) => "the text between BEGIN and END is not base64",
        _ => "it is not PEM",
    }
}

/// Encodes certificates as PEM, each once.
pub(crate) fn bundle(ders: impl IntoIterator<Item = CertificateDer<'static>>) -> String {
    let mut held = HashSet::new();
    let mut ders: Vec<_> = ders.into_iter().collect();
    // The order stays, because bundles are compared as texts.
    ders.retain(|der| held.insert(der.clone()));
    encode_all(&ders)
}

/// Encodes certificates as PEM.
pub(crate) fn encode_all(ders: &[CertificateDer<'_>]) -> String {
    let mut text = String::new();
    for der in ders {
        text.push_str(&encode("CERTIFICATE", der));
    }
    text
}

/// Parses certificates in DER.
pub fn parse_all(ders: &[CertificateDer<'static>]) -> Result<Vec<Certificate>, Fault> {
    let mut parsed = Vec::with_capacity(ders.len());
    for (der, number) in ders.iter().zip(1..) {
        let certificate = Certificate::from_der(der);
        parsed.push(certificate.map_err(|error| Fault::Damaged(number, error.to_string()))?);
    }
    Ok(parsed)
}

/// Parses the certificates of a PEM text, at least one; returns each in DER and parsed.
pub(crate) fn parse_chain(
    text: &[u8],
) -> Result<(Vec<CertificateDer<'static>>, Vec<Certificate>), Fault> {
    let ders = certificates(text)?;
    let parsed = parse_all(&ders)?;
    Ok((ders, parsed))
}

/// Checks the certificates of a CA, its own first. Faults number them from 1.
pub fn inspect(chain: &[Certificate], now: SystemTime) -> Vec<Fault> {
    let mut faults = Vec::new();
    for (below, certificate) in chain.iter().enumerate() {
        let number = below + 1;
        let stated = certificate.tbs_certificate();
        match stated.get_extension::<BasicConstraints>() {
            Ok(Some((_, constraints))) if constraints.ca => {
                // It limits the intermediate certificates below; the leaf does not count (RFC 5280,
                // section 4.2.1.9).
                if let Some(allowed) = constraints.path_len_constraint
                    && below > usize::from(allowed)
                {
                    faults.push(Fault::PathLength(number, allowed, below));
                }
            }
            _ => faults.push(Fault::NotCa(number)),
        }
        if key_identifier(certificate).is_none() {
            faults.push(Fault::NoKeyIdentifier(number));
        }
        // A missing extension is a fault, too: a CA must have it (RFC 5280, section 4.2.1.3).
        if !matches!(stated.get_extension::<KeyUsage>(), Ok(Some((_, usage))) if usage.key_cert_sign())
        {
            faults.push(Fault::NoCertSign(number));
        }
        // Verifiers apply the usages of an intermediate CA to the leaves below it, so Diego's
        // documentation asks for none or "any".
        match stated.get_extension::<ExtendedKeyUsage>() {
            Ok(None) => {}
            Ok(Some((_, usage))) if usage.0.contains(&ANY_EXTENDED_KEY_USAGE) => {}
            _ => faults.push(Fault::ExtendedKeyUsage(number)),
        }
        for oid in unknown_critical(certificate) {
            faults.push(Fault::CriticalExtension(number, oid.to_string()));
        }
        let validity = validity(certificate);
        match validity.standing(now) {
            ValidityState::Expired => faults.push(Fault::Expired(number, date(validity.not_after))),
            ValidityState::NotYet => {
                faults.push(Fault::NotYetValid(number, date(validity.not_before)))
            }
            ValidityState::Valid => {}
        }
        // By name only: `Authority::try_out` verifies the signatures.
        if let Some(above) = chain.get(number)
            && above.tbs_certificate().subject() != stated.issuer()
        {
            faults.push(Fault::Order(number, number + 1));
        }
    }
    faults
}

/// Returns the OIDs of critical extensions that not all of OpenSSL, Go and webpki process: a peer must
/// refuse a chain with an unknown one (RFC 5280, section 4.2).
fn unknown_critical(certificate: &Certificate) -> Vec<ObjectIdentifier> {
    const KNOWN: [ObjectIdentifier; 6] = [
        ID_CE_KEY_USAGE,
        ID_CE_SUBJECT_ALT_NAME,
        ID_CE_BASIC_CONSTRAINTS,
        ID_CE_NAME_CONSTRAINTS,
        ID_CE_CRL_DISTRIBUTION_POINTS,
        ID_CE_EXT_KEY_USAGE,
    ];
    let mut unknown = Vec::new();
    let extensions = certificate.tbs_certificate().extensions();
    for extension in extensions.into_iter().flatten() {
        if extension.critical && !KNOWN.contains(&extension.extn_id) {
            unknown.push(extension.extn_id);
        }
    }
    unknown
}

/// Returns whether `certificate` contains the public key of `key`.
pub fn certifies(certificate: &Certificate, key: &PrivateKey) -> bool {
    // The encoded form includes algorithm and curve, so keys of different types are never equal.
    let certified = certificate
        .tbs_certificate()
        .subject_public_key_info()
        .to_der();
    certified.is_ok_and(|info| info == key.public_key_info())
}

/// Returns the validity stated in a certificate.
pub fn validity(certificate: &Certificate) -> Validity {
    let stated = certificate.tbs_certificate().validity();
    Validity {
        not_before: stated.not_before.to_system_time(),
        not_after: stated.not_after.to_system_time(),
    }
}

/// Formats a time as `2026-11-24 23:10:00 UTC`.
pub fn date(at: SystemTime) -> String {
    let at = time::OffsetDateTime::from(moment(seconds(at)));
    let (hour, minute, second) = at.to_hms();
    format!("{} {hour:02}:{minute:02}:{second:02} UTC", at.date())
}

fn key_identifier(certificate: &Certificate) -> Option<Vec<u8>> {
    let (_, identifier) = certificate
        .tbs_certificate()
        .get_extension::<SubjectKeyIdentifier>()
        .ok()
        .flatten()?;
    Some(identifier.0.into_bytes().into_vec()).filter(|identifier| !identifier.is_empty())
}

/// PEM files of a CA.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
pub struct CaFiles {
    /// PEM file of the CA certificate, followed by its chain
    #[arg(long = "ca", value_name = "FILE")]
    pub certificate: PathBuf,
    /// PEM file of the CA's private key: PKCS#1, SEC1 or PKCS#8
    #[arg(long = "ca-key", value_name = "FILE")]
    pub key: PathBuf,
}

/// Faults of a CA that cannot be used, each on a line with its file.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct CaError(String);

impl CaError {
    pub(crate) fn of(path: &Path, problem: String) -> Self {
        Self(format!("{}: {problem}", path.display()))
    }
}

/// Stamps of certificate and key; `None` for a missing file.
pub type Stamps = [Option<FileStamp>; 2];

impl CaFiles {
    /// Loads and checks the CA; the error lists every fault with its file.
    pub fn load(&self, now: SystemTime) -> Result<Authority, CaError> {
        let certificate = read_pem(&self.certificate)?;
        let key = read_pem(&self.key)?;
        let faults = match Authority::parse(&certificate, &key, now) {
            Ok(authority) => return Ok(authority),
            Err(faults) => faults,
        };
        let mut lines = Vec::new();
        for fault in faults {
            let path = match fault {
                Fault::Key(_) | Fault::KeyMismatch(_) => &self.key,
                _ => &self.certificate,
            };
            lines.push(format!("{}: {fault}", path.display()));
        }
        Err(CaError(lines.join("\n")))
    }

    /// Returns the stamps of both files.
    pub fn stamps(&self) -> Stamps {
        [&self.certificate, &self.key].map(FileStamp::of)
    }
}

pub(crate) fn read_pem(path: &Path) -> Result<Zeroizing<Vec<u8>>, CaError> {
    bounded::read(path)
        .map(Zeroizing::new)
        .map_err(|error| CaError::of(path, format!("{error}; choose a readable PEM file")))
}

#[cfg(test)]
mod tests {
    use rcgen::{
        BasicConstraints as Constraints, CertificateParams, CustomExtension, DnType,
        ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyUsagePurpose,
    };

    use super::*;
    use crate::tests::{HOUR, START, TestCa, at, replace};

    /// Returns the faults of a CA with a change.
    fn faults(change: fn(&mut CertificateParams)) -> Vec<Fault> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(Constraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        change(&mut params);
        let key = rcgen::KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        inspect(&parse_chain(pem.as_bytes()).unwrap().1, SystemTime::now())
    }

    #[test]
    fn every_fault_of_a_ca_is_found() {
        assert_eq!(faults(|_| {}), []);
        let usages = |usages: fn(&mut CertificateParams)| faults(usages);
        assert_eq!(
            usages(|ca| ca.extended_key_usages = vec![ExtendedKeyUsagePurpose::Any]),
            []
        );
        assert_eq!(
            usages(|ca| ca.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth]),
            [Fault::ExtendedKeyUsage(1)]
        );
        assert_eq!(
            usages(|ca| ca.key_usages = vec![KeyUsagePurpose::CrlSign]),
            [Fault::NoCertSign(1)]
        );
        assert_eq!(
            faults(|ca| ca.key_identifier_method = KeyIdMethod::PreSpecified(Vec::new())),
            [Fault::NoKeyIdentifier(1)]
        );
        assert_eq!(
            faults(|ca| ca.is_ca = IsCa::ExplicitNoCa)[0],
            Fault::NotCa(1)
        );
        assert_eq!(
            faults(|ca| ca.is_ca = IsCa::Ca(Constraints::Constrained(0))),
            []
        );
        assert_eq!(
            faults(|ca| ca.not_after = rcgen::date_time_ymd(2001, 1, 1)),
            [Fault::Expired(1, "2001-01-01 00:00:00 UTC".to_owned())]
        );
        assert_eq!(
            faults(|ca| ca.not_before = rcgen::date_time_ymd(2101, 1, 1)),
            [Fault::NotYetValid(1, "2101-01-01 00:00:00 UTC".to_owned())]
        );
    }

    #[test]
    fn damaged_certificate_has_its_number() {
        let key = rcgen::KeyPair::generate().unwrap();
        let pem = CertificateParams::default()
            .self_signed(&key)
            .unwrap()
            .pem();
        assert_eq!(certificates(b"").unwrap_err(), Fault::NoCertificate);
        assert_eq!(certificates(pem.as_bytes()).unwrap().len(), 1);
        assert_eq!(
            certificates([&*pem, &*pem].concat().as_bytes())
                .unwrap()
                .len(),
            2
        );
        let damaged = pem.replace("MII", "M*I");
        let number = |text: String| match certificates(text.as_bytes()).unwrap_err() {
            Fault::Damaged(number, _) => number,
            other => panic!("{other:?}"),
        };
        assert_eq!(number(damaged.clone()), 1);
        assert_eq!(number([&*pem, &*damaged].concat()), 2);
        assert_eq!(number([&*pem, &*pem, &*damaged].concat()), 3);
    }

    #[test]
    fn defects_of_pem_are_explained() {
        let key = rcgen::KeyPair::generate().unwrap();
        let pem = CertificateParams::default()
            .self_signed(&key)
            .unwrap()
            .pem();
        for (text, problem) in [
            (
                pem.replace("MII", "M*I"),
                "the text between BEGIN and END is not base64",
            ),
            (
                pem.replace("-----END", "----END"),
                "the END line is missing",
            ),
            (
                pem.replace("-----BEGIN CERTIFICATE-----", "-----BEGIN CERTIFICATE"),
                "the BEGIN line is malformed",
            ),
        ] {
            let found = certificates(text.as_bytes()).unwrap_err();
            assert_eq!(found, Fault::Damaged(1, problem.to_owned()));
        }
    }

    #[test]
    fn fingerprints_are_64_lower_digits() {
        let right = Fingerprint::of(b"ca").0;
        for (text, expected) in [
            (right.clone(), true),
            (right.to_uppercase(), false),
            (right[1..].to_owned(), false),
            (format!("{right}0"), false),
            (format!("{}g", &right[1..]), false),
            (String::new(), false),
        ] {
            assert_eq!(
                Fingerprint(text.clone()).is_well_formed(),
                expected,
                "{text}"
            );
        }
    }

    fn parse(ca: &TestCa) -> Result<Authority, Vec<Fault>> {
        Authority::parse(ca.chain.as_bytes(), ca.key.as_bytes(), at(START))
    }

    #[test]
    fn chain_checks_reach_the_root() {
        let root = |length| {
            TestCa::with("root", |params| {
                params.is_ca = IsCa::Ca(Constraints::Constrained(length));
            })
        };
        // A path length counts the CAs between a certificate and the leaf.
        for (length, below, faults) in [
            (1, 1, vec![]),
            (0, 1, vec![Fault::PathLength(2, 0, 1)]),
            (2, 2, vec![]),
            (1, 2, vec![Fault::PathLength(3, 1, 2)]),
        ] {
            let mut ca = root(length);
            for _ in 0..below {
                ca = ca.below("below", |_| {});
            }
            let found = parse(&ca).err().unwrap_or_default();
            assert_eq!(found, faults, "{length} {below}");
        }
        let ca = TestCa::new("top").below("ca", |_| {});
        let authority = parse(&ca).unwrap();
        assert_eq!(authority.chain.len(), 2);
        assert_eq!(authority.chain_pem(), ca.chain);
        assert_eq!(
            authority.fingerprint,
            Fingerprint::of(&certificates(ca.chain.as_bytes()).unwrap()[0])
        );
        let stranger = TestCa::new("stranger");
        let own = encode_all(&certificates(ca.chain.as_bytes()).unwrap()[..1]);
        let wrong = TestCa {
            chain: own + &stranger.chain,
            ..ca
        };
        assert_eq!(parse(&wrong).unwrap_err(), [Fault::Order(1, 2)]);
        // The name alone proves nothing.
        let namesake = TestCa::new("top");
        let forged = TestCa {
            chain: encode_all(&authority.chain[..1]) + &namesake.chain,
            ..wrong
        };
        let faults = parse(&forged).unwrap_err();
        assert!(matches!(faults[..], [Fault::Refused(_)]), "{faults:?}");
    }

    #[test]
    fn file_faults_are_listed() {
        let one = TestCa::with("one", |params| {
            params.key_usages = vec![KeyUsagePurpose::CrlSign];
            params.not_after = at(START - 1).into();
        });
        let now = at(START);
        let chain = one.chain.as_bytes();
        let expired = Fault::Expired(1, "2033-05-18 03:33:19 UTC".to_owned());
        assert_eq!(
            Authority::parse(chain, b"", now).unwrap_err(),
            [
                Fault::NoCertSign(1),
                expired.clone(),
                Fault::Key(KeyError::NoPem)
            ]
        );
        let other = TestCa::new("other");
        assert_eq!(
            Authority::parse(chain, other.key.as_bytes(), now).unwrap_err(),
            [
                Fault::NoCertSign(1),
                expired,
                Fault::KeyMismatch("CN=one".to_owned())
            ]
        );
        assert_eq!(
            Authority::parse(b"", one.key.as_bytes(), now).unwrap_err(),
            [Fault::NoCertificate]
        );
        let place = tempfile::tempdir().unwrap();
        let files = other.write(place.path());
        replace(&files.certificate, &one.chain);
        let (certificate, key) = (files.certificate.display(), files.key.display());
        assert_eq!(
            files.load(now).unwrap_err().to_string(),
            format!(
                "{certificate}: certificate 1 lacks keyCertSign in KeyUsage; create the CA with \
                 keyUsage=keyCertSign,cRLSign\n\
                 {certificate}: certificate 1 expired at 2033-05-18 03:33:19 UTC; replace the CA\n\
                 {key}: the private key does not match the CA certificate; use the key of \"CN=one\""
            )
        );
        replace(&files.key, "none");
        let error = files.load(now).unwrap_err().to_string();
        let last = format!(
            "\n{key}: CA key: no private key in PEM format; expected `-----BEGIN PRIVATE KEY-----` or an RSA or EC form"
        );
        assert!(error.ends_with(&last), "{error}");
        std::fs::remove_file(&files.key).unwrap();
        assert_eq!(
            files.load(now).unwrap_err().to_string(),
            format!("{key}: No such file or directory (os error 2); choose a readable PEM file")
        );
        assert!(files.stamps()[0].is_some() && files.stamps()[1].is_none());
    }

    #[test]
    fn unknown_critical_extensions_are_faults() {
        let extension = |critical| {
            move |params: &mut CertificateParams| {
                let mut extension = CustomExtension::from_oid_content(&[1, 2, 3, 4], vec![5, 0]);
                extension.set_criticality(critical);
                params.custom_extensions = vec![extension];
            }
        };
        let found = |critical| {
            let ca = TestCa::with("ca", extension(critical));
            inspect(&parse_chain(ca.chain.as_bytes()).unwrap().1, at(START))
        };
        assert_eq!(found(false), []);
        assert_eq!(
            found(true),
            [Fault::CriticalExtension(1, "1.2.3.4".to_owned())]
        );
    }

    #[test]
    fn leaf_ends_with_its_ca() {
        let ca = TestCa::with("ca", |params| params.not_after = at(START + 100).into());
        let authority = parse(&ca).unwrap();
        let profile = Profile::new("a", &[], [], []).unwrap();
        let key = PrivateKey::generate(KeyType::P256).unwrap();
        for (length, end) in [(99, 99), (100, 100), (101, 100)] {
            let wanted = Validity {
                not_before: at(START - 10),
                not_after: at(START + length),
            };
            let issued = authority
                .issue(&profile, key.public_key_info(), wanted)
                .unwrap();
            let stated = Validity {
                not_after: at(START + end),
                ..wanted
            };
            assert_eq!(issued.validity, stated);
            let (_, parsed) = parse_chain(issued.pem.as_bytes()).unwrap();
            assert_eq!(validity(&parsed[0]), stated);
            assert_eq!(parsed.len(), 2);
            assert!(certifies(&parsed[0], &key) && !certifies(&parsed[1], &key));
        }
        for (now, valid) in [(START + 100, true), (START + 101, false)] {
            assert_eq!(authority.is_valid_at(at(now)), valid);
        }
        let second = Duration::from_secs(1);
        assert_eq!(authority.caution(at(START), 100 * second), None);
        assert_eq!(
            authority.caution(at(START), 101 * second).as_deref(),
            Some(
                "the CA expires at 2033-05-18 03:35:00 UTC, before a new leaf would; leaves expire with the CA: \
                 replace it soon"
            )
        );
        assert_eq!(authority.caution(at(START) - HOUR, HOUR), None);
    }

    #[test]
    fn bundle_is_ordered_without_duplicates() {
        let [a, b, c] = ["a", "b", "c"].map(|name| TestCa::new(name).chain);
        let text = [&*b, &*a, &*b, &*c, &*a].concat();
        let ders = certificates(text.as_bytes()).unwrap();
        assert_eq!(ders.len(), 5);
        assert_eq!(bundle(ders.clone()), [&*b, &*a, &*c].concat());
        assert_eq!(encode_all(&ders), text);
        assert_eq!(bundle([]), "");
        let mut damaged = ders;
        damaged[3] = CertificateDer::from(vec![0x30, 0]);
        let fault = parse_all(&damaged).unwrap_err();
        assert!(matches!(fault, Fault::Damaged(4, _)), "{fault:?}");
        assert_eq!(explain(&pem::Error::NoItemsFound), "it is not PEM");
    }

    #[test]
    fn dates_are_written_completely() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (START, "2033-05-18 03:33:20 UTC"),
            (951_829_509, "2000-02-29 13:05:09 UTC"),
            (u64::MAX, "9999-12-31 23:59:59 UTC"),
        ] {
            assert_eq!(date(moment(seconds)), text);
        }
    }

    #[test]
    fn issuer_names_are_compared_whole() {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut above = CertificateParams::default();
        above.distinguished_name.push(DnType::OrganizationName, "o");
        let issuer = Issuer::from_params(&above, &key);
        let below = CertificateParams::default()
            .signed_by(&key, &issuer)
            .unwrap()
            .pem();
        let sound = above.self_signed(&key).unwrap().pem();
        let namesake = CertificateParams::default()
            .self_signed(&key)
            .unwrap()
            .pem();
        for (above, is_order) in [(sound, false), (namesake, true)] {
            let (_, parsed) = parse_chain((below.clone() + &above).as_bytes()).unwrap();
            let faults = inspect(&parsed, at(START));
            assert_eq!(faults.contains(&Fault::Order(1, 2)), is_order);
        }
    }
}
