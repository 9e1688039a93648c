//! Certificates and signing requests in DER, as Go's `crypto/x509` writes them for the reference:
//! all organizational units in one SET before the common name, then key usage, extended key usage,
//! authority key identifier and alternative names, and no basic constraints.

use std::{
    net::IpAddr,
    time::{Duration, SystemTime},
};

use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use time::OffsetDateTime;
use x509_cert::{
    der::{Decode, Encode},
    request::CertReq,
};
use yasna::{
    DERWriter, Tag, construct_der,
    models::ObjectIdentifier,
    tags::{TAG_GENERALIZEDTIME, TAG_UTCTIME},
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
        match now {
            now if now < self.not_before => ValidityState::NotYet,
            now if now < self.not_after => ValidityState::Valid,
            _ => ValidityState::Expired,
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

/// Issues a leaf certificate; returns DER.
pub(crate) fn issue(
    issuer: CertificateIssuer<'_>,
    profile: &Profile,
    public_key_info: &[u8],
    validity: Validity,
) -> Result<Vec<u8>, KeyError> {
    let serial = random_uuid()?;
    let to_sign = construct_der(|writer| {
        writer.write_sequence(|writer| {
            // Version 3.
            writer
                .next()
                .write_tagged(Tag::context(0), |writer| writer.write_u8(2));
            writer.next().write_bigint_bytes(&serial, true);
            write_algorithm(writer.next(), issuer.key);
            writer.next().write_der(issuer.subject);
            writer.next().write_sequence(|writer| {
                write_time(writer.next(), validity.not_before);
                write_time(writer.next(), validity.not_after);
            });
            write_subject(writer.next(), profile);
            writer.next().write_der(public_key_info);
            writer.next().write_tagged(Tag::context(3), |writer| {
                write_extensions(writer, issuer, profile)
            });
        });
    });
    sign(to_sign, issuer.key)
}

/// Builds a request (RFC 2986) that proves possession of `key`; the names are transmitted separately.
pub fn signing_request(key: &PrivateKey, common_name: &str) -> Result<Vec<u8>, KeyError> {
    let info = construct_der(|writer| {
        writer.write_sequence(|writer| {
            writer.next().write_u8(0);
            writer.next().write_sequence(|writer| {
                writer
                    .next()
                    .write_set(|writer| write_attribute(writer.next(), COMMON_NAME, common_name));
            });
            writer.next().write_der(key.public_key_info());
            writer
                .next()
                .write_tagged_implicit(Tag::context(0), |writer| writer.write_set(|_| {}));
        });
    });
    sign(info, key)
}

/// Verifies a request and returns its `SubjectPublicKeyInfo`, DER; `None` if it is malformed or not signed by its
/// own key.
pub fn verify_request(der: &[u8]) -> Option<Vec<u8>> {
    let request = CertReq::from_der(der).ok()?;
    let key = &request.info.public_key;
    // DER has one encoding for each value, so these are the octets that were signed.
    let signed = keys::verify(
        &request.algorithm.oid.to_string(),
        key.subject_public_key.raw_bytes(),
        &request.info.to_der().ok()?,
        request.signature.raw_bytes(),
    );
    key.to_der().ok().filter(|_| signed)
}

const COMMON_NAME: &[u64] = &[2, 5, 4, 3];

const ORGANIZATIONAL_UNIT: &[u64] = &[2, 5, 4, 11];

/// Returns 16 random bytes as a version 4 UUID (RFC 9562, section 5.4).
fn random_uuid() -> Result<[u8; 16], KeyError> {
    let mut bytes = [0; 16];
    SystemRandom::new().fill(&mut bytes)?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    Ok(bytes)
}

/// Appends algorithm and signature in the form of certificates and requests.
fn sign(to_sign: Vec<u8>, key: &PrivateKey) -> Result<Vec<u8>, KeyError> {
    let signature = key.sign(&to_sign)?;
    Ok(construct_der(|writer| {
        writer.write_sequence(|writer| {
            writer.next().write_der(&to_sign);
            write_algorithm(writer.next(), key);
            writer
                .next()
                .write_bitvec_bytes(&signature, signature.len() * 8);
        });
    }))
}

fn write_algorithm(writer: DERWriter<'_>, key: &PrivateKey) {
    let (algorithm, has_null) = key.signature_algorithm();
    writer.write_sequence(|writer| {
        writer.next().write_oid(&algorithm);
        if has_null {
            writer.next().write_null();
        }
    });
}

/// Writes UTCTime up to 2049, GeneralizedTime afterwards (RFC 5280, section 4.1.2.5).
fn write_time(writer: DERWriter<'_>, at: SystemTime) {
    let at = OffsetDateTime::from(moment(seconds(at)));
    let (year, month, day) = at.to_calendar_date();
    let (hour, minute, second) = at.to_hms();
    let rest = format!(
        "{:02}{day:02}{hour:02}{minute:02}{second:02}Z",
        u8::from(month)
    );
    let (tag, text) = match year {
        ..2050 => (TAG_UTCTIME, format!("{:02}{rest}", year % 100)),
        _ => (TAG_GENERALIZEDTIME, format!("{year:04}{rest}")),
    };
    writer.write_tagged_implicit(tag, |writer| writer.write_bytes(text.as_bytes()));
}

fn write_subject(writer: DERWriter<'_>, profile: &Profile) {
    writer.write_sequence(|writer| {
        if !profile.organizational_units.is_empty() {
            // SET OF sorts by encoding, as DER requires.
            writer.next().write_set_of(|writer| {
                for unit in &profile.organizational_units {
                    write_attribute(writer.next(), ORGANIZATIONAL_UNIT, unit);
                }
            });
        }
        if !profile.common_name.is_empty() {
            writer.next().write_set(|writer| {
                write_attribute(writer.next(), COMMON_NAME, &profile.common_name)
            });
        }
    });
}

/// Writes type and value; a PrintableString if its alphabet suffices, as Go does.
fn write_attribute(writer: DERWriter<'_>, kind: &[u64], value: &str) {
    writer.write_sequence(|writer| {
        writer.next().write_oid(&ObjectIdentifier::from_slice(kind));
        if value
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b" '()+,-./:=?".contains(&byte))
        {
            writer.next().write_printable_string(value);
        } else {
            writer.next().write_utf8_string(value);
        }
    });
}

fn write_extensions(writer: DERWriter<'_>, issuer: CertificateIssuer<'_>, profile: &Profile) {
    // digitalSignature (0), keyEncipherment (2), keyAgreement (4).
    let key_usage = construct_der(|writer| writer.write_bitvec_bytes(&[0b1010_1000], 5));
    let extended = construct_der(|writer| {
        writer.write_sequence(|writer| {
            // clientAuth, serverAuth.
            for purpose in [2, 1] {
                let oid = ObjectIdentifier::from_slice(&[1, 3, 6, 1, 5, 5, 7, 3, purpose]);
                writer.next().write_oid(&oid);
            }
        });
    });
    let authority = construct_der(|writer| {
        writer.write_sequence(|writer| {
            writer
                .next()
                .write_tagged_implicit(Tag::context(0), |writer: DERWriter<'_>| {
                    writer.write_bytes(issuer.key_id)
                });
        });
    });
    let names = construct_der(|writer| write_names(writer, profile));
    // Identifiers of RFC 5280, section 4.2.1.
    let has_subject = !profile.common_name.is_empty() || !profile.organizational_units.is_empty();
    let extensions = [
        (15, true, key_usage),
        (37, false, extended),
        (35, false, authority),
        (17, !has_subject, names),
    ];
    let has_names = !profile.dns_names.is_empty() || !profile.addresses.is_empty();
    writer.write_sequence(|writer| {
        for (number, is_critical, value) in extensions {
            // RFC 5280, section 4.2.1.6: the extension has at least one name.
            if number == 17 && !has_names {
                continue;
            }
            writer.next().write_sequence(|writer| {
                writer
                    .next()
                    .write_oid(&ObjectIdentifier::from_slice(&[2, 5, 29, number]));
                if is_critical {
                    writer.next().write_bool(true);
                }
                writer.next().write_bytes(&value);
            });
        }
    });
}

fn write_names(writer: DERWriter<'_>, profile: &Profile) {
    writer.write_sequence(|writer| {
        // dNSName (2) and iPAddress (7) of GeneralName.
        for name in &profile.dns_names {
            writer
                .next()
                .write_tagged_implicit(Tag::context(2), |writer: DERWriter<'_>| {
                    writer.write_bytes(name.as_bytes())
                });
        }
        for address in &profile.addresses {
            let octets = match address {
                IpAddr::V4(address) => address.octets().to_vec(),
                IpAddr::V6(address) => address.octets().to_vec(),
            };
            writer
                .next()
                .write_tagged_implicit(Tag::context(7), |writer| writer.write_bytes(&octets));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::KeyType;

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
}
