//! Certificates and signing requests in DER, as Go's `crypto/x509` writes them for the reference:
//! all organizational units in one SET before the common name, then key usage, extended key usage,
//! authority key identifier and alternative names, and no basic constraints.

use std::time::{Duration, SystemTime};

use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use der::{
    Decode, Encode, Sequence,
    asn1::{
        Any, AnyRef, BitStringRef, Ia5String, OctetString, PrintableStringRef, SetOfVec, UintRef,
        Utf8StringRef,
    },
    oid::{
        AssociatedOid, ObjectIdentifier,
        db::{
            rfc4519::{COMMON_NAME, ORGANIZATIONAL_UNIT_NAME},
            rfc5280::{ID_KP_CLIENT_AUTH, ID_KP_SERVER_AUTH},
        },
    },
};
use x509_cert::{
    attr::AttributeTypeAndValue,
    certificate::Version,
    ext::{
        Extension,
        pkix::{
            AuthorityKeyIdentifier, ExtendedKeyUsage, KeyUsage, KeyUsages, SubjectAltName,
            name::GeneralName,
        },
    },
    name::{Name, RdnSequence},
    request::{self, CertReq, CertReqInfo},
    spki::AlgorithmIdentifierRef,
    time::Time,
};

use crate::{
    keys::{self, KeyError, PrivateKey},
    profile::Profile,
};

/// Period in which a certificate is valid, in whole seconds as in X.509.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// Start of the validity.
    pub not_before: SystemTime,
    /// End of the validity, inclusive.
    pub not_after: SystemTime,
}

impl Validity {
    /// Returns a validity that starts at `now`, truncated to seconds, and lasts `length`.
    pub fn starting(now: SystemTime, length: Duration) -> Self {
        // Rounded down, so the certificate is valid at once.
        let not_before = moment(seconds(now));
        Self {
            not_before,
            not_after: not_before + length,
        }
    }

    /// Returns a validity that lasts `length` from `now` and starts `backdate` earlier, so that peers
    /// with slow clocks accept it.
    pub fn backdated(now: SystemTime, length: Duration, backdate: Duration) -> Self {
        let Self {
            not_before,
            not_after,
        } = Self::starting(now, length);
        Self {
            not_before: not_before.checked_sub(backdate).unwrap_or(not_before),
            not_after,
        }
    }

    /// Returns the length; zero if the end precedes the start.
    pub fn length(&self) -> Duration {
        self.not_after
            .duration_since(self.not_before)
            .unwrap_or_default()
    }

    /// Compares the validity with a time: the only definition of "valid" in this crate.
    pub fn standing(&self, now: SystemTime) -> ValidityState {
        // The period includes both dates (RFC 5280, section 4.1.2.5), and a date is a whole second.
        if now < self.not_before {
            ValidityState::NotYet
        } else if seconds(now) <= seconds(self.not_after) {
            ValidityState::Valid
        } else {
            ValidityState::Expired
        }
    }
}

/// A validity at a certain time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValidityState {
    /// It starts at a later time.
    NotYet,
    /// It has started and not ended.
    Valid,
    /// It ended at an earlier time.
    Expired,
}

/// Returns the seconds since 1970; earlier times count as 1970.
pub(crate) fn seconds(moment: SystemTime) -> u64 {
    moment
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}

/// Returns the time at a number of seconds since 1970, capped at the year 9999.
pub(crate) fn moment(seconds: u64) -> SystemTime {
    // GeneralizedTime has four digits for the year (RFC 5280, section 4.1.2.5.2).
    const LAST: u64 = 253_402_300_799;
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds.min(LAST))
}

/// Serialises times as seconds since 1970.
pub(crate) mod unix {
    use std::time::SystemTime;

    use serde::{Deserialize, Deserializer, Serializer};

    use super::{moment, seconds};

    pub(crate) fn serialize<S: Serializer>(
        at: &SystemTime,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(seconds(*at))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<SystemTime, D::Error> {
        u64::deserialize(deserializer).map(moment)
    }
}

/// Issuer fields of a leaf certificate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CertificateIssuer<'a> {
    pub(crate) key: &'a PrivateKey,
    /// Subject of the CA, DER.
    pub(crate) subject: &'a [u8],
    /// Subject key identifier of the CA.
    pub(crate) key_id: &'a [u8],
}

/// The part that an issuer signs (RFC 5280, section 4.1). The builder of `x509-cert` knows neither the order of the
/// reference's extensions nor keys of other libraries.
#[derive(Sequence)]
struct ToBeSigned<'a> {
    #[asn1(context_specific = "0")]
    version: Version,
    serial: UintRef<'a>,
    algorithm: AlgorithmIdentifierRef<'a>,
    issuer: AnyRef<'a>,
    validity: x509_cert::time::Validity,
    subject: RdnSequence,
    public_key_info: AnyRef<'a>,
    #[asn1(context_specific = "3")]
    extensions: Vec<Extension>,
}

/// The form of certificates and requests (RFC 5280, section 4.1; RFC 2986, section 4.2).
#[derive(Sequence)]
struct Signed<'a> {
    content: AnyRef<'a>,
    algorithm: AlgorithmIdentifierRef<'a>,
    signature: BitStringRef<'a>,
}

/// Issues a leaf certificate; returns DER.
pub(crate) fn issue(
    issuer: CertificateIssuer<'_>,
    profile: &Profile,
    public_key_info: &[u8],
    validity: Validity,
) -> Result<Vec<u8>, KeyError> {
    // As in the reference. A counter would have to survive kills and restored backups.
    let serial = random_uuid()?;
    let content = ToBeSigned {
        version: Version::V3,
        serial: UintRef::new(&serial)?,
        algorithm: issuer.key.signature_algorithm(),
        issuer: AnyRef::from_der(issuer.subject)?,
        validity: x509_cert::time::Validity::new(
            whole_seconds(validity.not_before)?,
            whole_seconds(validity.not_after)?,
        ),
        subject: subject(profile)?,
        public_key_info: AnyRef::from_der(public_key_info)?,
        extensions: extensions(issuer, profile)?,
    };
    sign(&content.to_der()?, issuer.key)
}

/// Builds a request (RFC 2986) that proves possession of `key`; the names are transmitted separately.
pub fn signing_request(key: &PrivateKey, common_name: &str) -> Result<Vec<u8>, KeyError> {
    let mut subject = RdnSequence::default();
    subject.push(vec![attribute(COMMON_NAME, common_name)?].try_into()?);
    let content = CertReqInfo {
        version: request::Version::V1,
        subject: Name::hazmat_from_rdn_sequence(subject),
        public_key: Decode::from_der(key.public_key_info())?,
        attributes: SetOfVec::default(),
    };
    sign(&content.to_der()?, key)
}

/// Verifies a request and returns its `SubjectPublicKeyInfo`, DER; `None` if it is malformed or not signed by its
/// own key.
pub fn verify_request(der: &[u8]) -> Option<Vec<u8>> {
    let request = CertReq::from_der(der).ok()?;
    let key = &request.info.public_key;
    // DER has one encoding for each value, so these are the octets that were signed.
    let signed = keys::verify(
        request.algorithm.oid,
        key.subject_public_key.raw_bytes(),
        &request.info.to_der().ok()?,
        request.signature.raw_bytes(),
    );
    key.to_der().ok().filter(|_| signed)
}

/// Returns 16 random bytes as a version 4 UUID (RFC 9562, section 5.4).
fn random_uuid() -> Result<[u8; 16], KeyError> {
    let mut bytes = [0; 16];
    SystemRandom::new().fill(&mut bytes)?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    Ok(bytes)
}

fn sign(content: &[u8], key: &PrivateKey) -> Result<Vec<u8>, KeyError> {
    let signature = key.sign(content)?;
    let signed = Signed {
        content: AnyRef::from_der(content)?,
        algorithm: key.signature_algorithm(),
        signature: BitStringRef::from_bytes(&signature)?,
    };
    Ok(signed.to_der()?)
}

/// Truncates to the seconds that a certificate can state.
fn whole_seconds(at: SystemTime) -> der::Result<Time> {
    Time::try_from(moment(seconds(at)))
}

fn subject(profile: &Profile) -> der::Result<RdnSequence> {
    let mut subject = RdnSequence::default();
    let mut units = Vec::with_capacity(profile.organizational_units.len());
    for unit in &profile.organizational_units {
        units.push(attribute(ORGANIZATIONAL_UNIT_NAME, unit)?);
    }
    if !units.is_empty() {
        // The conversion sorts the SET OF by encoding, as DER requires.
        subject.push(units.try_into()?);
    }
    // A stopped container has none.
    if !profile.common_name.is_empty() {
        subject.push(vec![attribute(COMMON_NAME, &profile.common_name)?].try_into()?);
    }
    Ok(subject)
}

/// Returns type and value; a PrintableString if its alphabet suffices, as Go does.
fn attribute(oid: ObjectIdentifier, value: &str) -> der::Result<AttributeTypeAndValue> {
    let value = match PrintableStringRef::new(value) {
        Ok(printable) => Any::encode_from(&printable)?,
        Err(_) => Any::encode_from(&Utf8StringRef::new(value)?)?,
    };
    Ok(AttributeTypeAndValue { oid, value })
}

fn extensions(issuer: CertificateIssuer<'_>, profile: &Profile) -> der::Result<Vec<Extension>> {
    let usage = KeyUsage(
        KeyUsages::DigitalSignature | KeyUsages::KeyEncipherment | KeyUsages::KeyAgreement,
    );
    let purposes = ExtendedKeyUsage(vec![ID_KP_CLIENT_AUTH, ID_KP_SERVER_AUTH]);
    let authority = AuthorityKeyIdentifier {
        key_identifier: Some(OctetString::new(issuer.key_id)?),
        ..AuthorityKeyIdentifier::default()
    };
    // KeyUsage should be critical (RFC 5280, section 4.2.1.3), the authority key identifier must
    // not be (section 4.2.1.1).
    let mut extensions = vec![
        extension(true, &usage)?,
        extension(false, &purposes)?,
        extension(false, &authority)?,
    ];
    let mut names = Vec::new();
    for name in &profile.dns_names {
        names.push(GeneralName::DnsName(Ia5String::new(name)?));
    }
    for &address in &profile.addresses {
        names.push(GeneralName::from(address));
    }
    // The extension has at least one name. It is critical if nothing else says whose the certificate is (RFC 5280,
    // section 4.2.1.6).
    if !names.is_empty() {
        let has_subject =
            !profile.common_name.is_empty() || !profile.organizational_units.is_empty();
        extensions.push(extension(!has_subject, &SubjectAltName(names))?);
    }
    Ok(extensions)
}

fn extension<T: AssociatedOid + Encode>(critical: bool, value: &T) -> der::Result<Extension> {
    Ok(Extension {
        extn_id: T::OID,
        critical,
        extn_value: OctetString::new(value.to_der()?)?,
    })
}

#[cfg(test)]
mod tests {
    use der::oid::db::rfc5912::ECDSA_WITH_SHA_256;

    use super::*;
    use crate::keys::KeyType;

    #[test]
    fn both_dates_belong_to_the_validity() {
        let validity = Validity {
            not_before: moment(1000),
            not_after: moment(2000),
        };
        for (at, expected) in [
            (moment(999), ValidityState::NotYet),
            (moment(1000), ValidityState::Valid),
            (moment(2000), ValidityState::Valid),
            (
                moment(2000) + Duration::from_millis(999),
                ValidityState::Valid,
            ),
            (moment(2001), ValidityState::Expired),
        ] {
            assert_eq!(validity.standing(at), expected, "{at:?}");
        }
    }

    #[test]
    fn forged_requests_are_refused() {
        let key = PrivateKey::generate(KeyType::P256).unwrap();
        let request = signing_request(&key, "i1").unwrap();
        let read = verify_request(&request).unwrap();
        assert_eq!(read, key.public_key_info());
        // The outer header precedes the signed part; algorithm and signature follow it.
        let signed = 3..request.len() - 16 - 72;
        for at in 0..request.len() {
            let mut changed = request.clone();
            changed[at] ^= 1;
            let accepted = verify_request(&changed);
            // Some encodings outside the signed part are equivalent, but never with another key.
            assert!(accepted.is_none() || !signed.contains(&at), "byte {at}");
            assert!(
                accepted.is_none_or(|accepted| accepted == read),
                "byte {at}"
            );
        }
        assert_eq!(verify_request(&request[1..]), None);
    }

    #[test]
    fn rsa_requests_are_read() {
        let key = PrivateKey::generate(KeyType::Rsa2048).unwrap();
        assert!(verify_request(&signing_request(&key, "i1").unwrap()).is_some());
    }

    /// An issued certificate, parsed.
    fn issued(profile: &Profile) -> x509_cert::Certificate {
        let key = PrivateKey::generate(KeyType::P256).unwrap();
        // `CN=ca`.
        let subject = b"\x30\x0d\x31\x0b\x30\x09\x06\x03\x55\x04\x03\x0c\x02ca";
        let issuer = CertificateIssuer {
            key: &key,
            subject,
            key_id: &[1, 2, 3],
        };
        let validity = Validity {
            not_before: moment(1000) + Duration::from_millis(999),
            not_after: moment(2000),
        };
        let der = issue(issuer, profile, key.public_key_info(), validity).unwrap();
        let parsed = x509_cert::Certificate::from_der(&der).unwrap();
        let stated = parsed.tbs_certificate();
        assert_eq!(stated.version(), Version::V3);
        assert_eq!(stated.issuer().to_der().unwrap(), subject);
        assert_eq!(
            stated.subject_public_key_info().to_der().unwrap(),
            key.public_key_info()
        );
        let stated = stated.validity();
        assert_eq!(stated.not_before.to_system_time(), moment(1000));
        assert_eq!(stated.not_after.to_system_time(), moment(2000));
        assert!(keys::verify(
            ECDSA_WITH_SHA_256,
            parsed
                .tbs_certificate()
                .subject_public_key_info()
                .subject_public_key
                .raw_bytes(),
            &parsed.tbs_certificate().to_der().unwrap(),
            parsed.signature().raw_bytes(),
        ));
        parsed
    }

    /// Returns object identifier, criticality and DER in hexadecimal of each extension.
    fn extensions_of(certificate: &x509_cert::Certificate) -> Vec<(String, bool, String)> {
        let mut found = Vec::new();
        for extension in certificate.tbs_certificate().extensions().unwrap() {
            found.push((
                extension.extn_id.to_string(),
                extension.critical,
                dns_kit::hex(extension.extn_value.as_bytes()),
            ));
        }
        found
    }

    #[test]
    fn leaf_matches_the_reference() {
        let units = ["space:b".to_owned(), "app:a".to_owned()];
        let addresses = ["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()];
        let profile = Profile::new("g1", &units, ["*.r.x"], addresses).unwrap();
        let leaf = issued(&profile);
        assert_eq!(
            leaf.tbs_certificate().subject().to_string(),
            "CN=g1,OU=app:a+OU=space:b"
        );
        let expected = [
            // Digital signature, key encipherment, key agreement.
            ("2.5.29.15", true, "030203a8".to_owned()),
            // Client before server, as in Go.
            (
                "2.5.29.37",
                false,
                "301406082b0601050507030206082b06010505070301".to_owned(),
            ),
            ("2.5.29.35", false, "30058003010203".to_owned()),
            (
                "2.5.29.17",
                false,
                [
                    "3023",
                    "82026731",
                    "82052a2e722e78",
                    "87040a000001",
                    "8710fd000000000000000000000000000001",
                ]
                .concat(),
            ),
        ];
        let expected = expected.map(|(oid, critical, der)| (oid.to_owned(), critical, der));
        assert_eq!(extensions_of(&leaf), expected);
    }

    #[test]
    fn names_are_critical_without_a_subject() {
        let empty = Profile {
            common_name: String::new(),
            organizational_units: Vec::new(),
            dns_names: vec![String::new()],
            addresses: Vec::new(),
        };
        let with_unit = Profile {
            organizational_units: vec!["app:a".to_owned()],
            ..empty.clone()
        };
        let with_name = Profile {
            common_name: "é".to_owned(),
            ..empty.clone()
        };
        for (profile, subject, critical) in [
            (&empty, "", true),
            (&with_unit, "OU=app:a", false),
            (&with_name, "CN=é", false),
        ] {
            let leaf = issued(profile);
            assert_eq!(leaf.tbs_certificate().subject().to_string(), subject);
            let extensions = extensions_of(&leaf);
            assert_eq!(
                extensions[3],
                ("2.5.29.17".to_owned(), critical, "30028200".to_owned())
            );
        }
        let unnamed = Profile {
            dns_names: Vec::new(),
            ..empty
        };
        assert_eq!(extensions_of(&issued(&unnamed)).len(), 3);
    }

    #[test]
    fn alphabet_decides_the_text_type() {
        for (text, tag) in [("app-1.x", 0x13), ("a_b", 0x0c), ("a*b", 0x0c), ("é", 0x0c)] {
            let der = attribute(COMMON_NAME, text)
                .unwrap()
                .value
                .to_der()
                .unwrap();
            assert_eq!((der[0], &der[2..]), (tag, text.as_bytes()), "{text}");
        }
    }

    #[test]
    fn serial_numbers_are_random_uuids() {
        let (mut all, mut any) = ([0xff; 16], [0; 16]);
        for _ in 0..256 {
            let uuid = random_uuid().unwrap();
            for (at, byte) in uuid.into_iter().enumerate() {
                all[at] &= byte;
                any[at] |= byte;
            }
        }
        let mut version_and_variant = [0; 16];
        version_and_variant[6] = 0x40;
        version_and_variant[8] = 0x80;
        assert_eq!(all, version_and_variant);
        let mut possible = [0xff; 16];
        possible[6] = 0x4f;
        possible[8] = 0xbf;
        assert_eq!(any, possible);
    }

    #[test]
    fn validities_are_whole_seconds() {
        let now = moment(5000) + Duration::from_millis(700);
        let length = Duration::from_secs(100);
        let starting = Validity::starting(now, length);
        let expected = Validity {
            not_before: moment(5000),
            not_after: moment(5100),
        };
        assert_eq!(starting, expected);
        assert_eq!(starting.length(), length);
        let backdated = Validity::backdated(now, length, Duration::from_secs(30));
        let expected = Validity {
            not_before: moment(4970),
            ..expected
        };
        assert_eq!(backdated, expected);
        assert_eq!(backdated.length(), Duration::from_secs(130));
        let reversed = Validity {
            not_before: moment(2),
            not_after: moment(1),
        };
        assert_eq!(reversed.length(), Duration::ZERO);
        assert_eq!(seconds(SystemTime::UNIX_EPOCH - length), 0);
        assert_eq!(seconds(moment(u64::MAX)), 253_402_300_799);
        assert_eq!(seconds(moment(7)), 7);
    }

    #[test]
    fn times_are_numbers_in_json() {
        #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        struct Held(#[serde(with = "unix")] SystemTime);

        let held = Held(moment(1234));
        let text = serde_json::to_string(&held).unwrap();
        assert_eq!(text, "1234");
        assert_eq!(serde_json::from_str::<Held>(&text).unwrap(), held);
        assert!(serde_json::from_str::<Held>("-1").is_err());
    }

    #[test]
    fn request_states_its_name_and_key() {
        let key = PrivateKey::generate(KeyType::P256).unwrap();
        let der = signing_request(&key, "i1").unwrap();
        let request = CertReq::from_der(&der).unwrap();
        assert_eq!(request.info.subject.to_string(), "CN=i1");
        assert_eq!(request.info.version, request::Version::V1);
        assert_eq!(verify_request(&der).unwrap(), key.public_key_info());
        assert_eq!(verify_request(b""), None);
    }
}
