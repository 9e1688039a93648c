//! Transaction signatures (RFC 8945), over one message or a sequence of them. Pure.
//!
//! The hashes come from RustCrypto: `ring`, on which the crate `domain` builds, lacks SHA-224.

use std::{fmt, str::FromStr};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use hmac::{Hmac, KeyInit, Mac};

use super::messages::{
    CLASS_ANY, HEADER, MessageReader, Records, TYPE_TSIG, WireError, append, push_name,
};
use crate::{
    provider::{ProviderError, settings},
    record::{Name, RecordType},
};

/// Allowed clock difference in seconds (RFC 8945, section 10).
const FUDGE: u16 = 300;

/// Maximum number of unsigned messages between two signed ones (RFC 8945, section 5.3.1).
const MAX_UNSIGNED: usize = 99;

/// A MAC algorithm for TSIG (RFC 8945, section 6).
#[derive(Debug, Clone, Copy)]
pub struct Algorithm {
    name: &'static str,
    /// Returns the MAC of octets under a secret.
    code: fn(&[u8], &[u8]) -> Vec<u8>,
    /// Compares the MAC with a code in constant time. Truncated codes are rejected.
    is_code: fn(&[u8], &[u8], &[u8]) -> bool,
}

impl Algorithm {
    const ALL: [Self; 5] = [
        Self::of::<Hmac<sha1::Sha1>>("hmac-sha1"),
        Self::of::<Hmac<sha2::Sha224>>("hmac-sha224"),
        Self::of::<Hmac<sha2::Sha256>>("hmac-sha256"),
        Self::of::<Hmac<sha2::Sha384>>("hmac-sha384"),
        Self::of::<Hmac<sha2::Sha512>>("hmac-sha512"),
    ];

    const fn of<M: Mac + KeyInit>(name: &'static str) -> Self {
        Self {
            name,
            code: |secret, octets| hmac::<M>(secret, octets).finalize().into_bytes().to_vec(),
            is_code: |secret, octets, code| hmac::<M>(secret, octets).verify_slice(code).is_ok(),
        }
    }
}

#[expect(
    clippy::expect_used,
    reason = "HMAC takes keys of every length (RFC 2104)"
)]
fn hmac<M: Mac + KeyInit>(secret: &[u8], octets: &[u8]) -> M {
    <M as KeyInit>::new_from_slice(secret)
        .expect("HMAC takes keys of every length")
        .chain_update(octets)
}

impl FromStr for Algorithm {
    type Err = ProviderError;

    fn from_str(text: &str) -> Result<Self, ProviderError> {
        let lower = text.trim().trim_end_matches('.').to_ascii_lowercase();
        Self::ALL
            .into_iter()
            .find(|algorithm| algorithm.name == lower)
            .ok_or_else(|| {
                let names = Self::ALL.map(|algorithm| algorithm.name).join(", ");
                settings(format!(
                    "rfc2136-tsig-secret-alg is {text:?}; use one of {names}"
                ))
            })
    }
}

/// A TSIG key; `Debug` omits the secret.
#[derive(Clone)]
pub struct TsigKey {
    name: Name,
    algorithm: Algorithm,
    algorithm_name: Name,
    secret: Vec<u8>,
}

impl fmt::Debug for TsigKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TsigKey({}, {})", self.name, self.algorithm.name)
    }
}

impl TsigKey {
    /// Decodes a secret in base64.
    pub fn new(name: &str, algorithm: Algorithm, secret: &str) -> Result<Self, ProviderError> {
        let name = parse_name(name)?;
        let algorithm_name = parse_name(algorithm.name)?;
        let secret = STANDARD.decode(secret.trim()).map_err(|error| {
            settings(format!(
                "rfc2136-tsig-secret is not base64: {error}; `tsig-keygen` makes one"
            ))
        })?;
        Ok(Self {
            name,
            algorithm,
            algorithm_name,
            secret,
        })
    }

    /// Appends a signature at `now` (seconds since 1970) and returns a verifier of the responses.
    pub(super) fn sign(&self, message: &mut Vec<u8>, now: u64) -> Result<Verifier<'_>, WireError> {
        let code = (self.algorithm.code)(
            &self.secret,
            &[&message[..], &self.variables((now, FUDGE), 0, &[])].concat(),
        );
        let mut data = Vec::new();
        push_name(&mut data, &self.algorithm_name);
        // The time has 48 bits (RFC 8945, section 4.2).
        data.extend(&now.to_be_bytes()[2..]);
        data.extend(FUDGE.to_be_bytes());
        data.extend((code.len() as u16).to_be_bytes());
        data.extend(&code);
        // The original ID, no error, and no other data (RFC 8945, section 4.2).
        data.extend(&message[..2]);
        data.extend([0; 4]);
        let mut record = Records::default();
        record.push(
            &Name::root(),
            &self.name,
            RecordType(TYPE_TSIG),
            CLASS_ANY,
            0,
            &data,
        )?;
        append(message, 3, &record);
        Ok(Verifier {
            key: self,
            // A response's signature covers the one of its request (RFC 8945, section 5.3).
            covered: with_length(&code),
            is_first: true,
            unsigned: 0,
        })
    }

    /// Returns the variables that a signature covers besides the message (RFC 8945, section 4.3.3).
    fn variables(&self, (time, fudge): (u64, u16), error: u16, other: &[u8]) -> Vec<u8> {
        let mut variables = Vec::new();
        push_name(&mut variables, &self.name);
        variables.extend(CLASS_ANY.to_be_bytes());
        variables.extend(0_u32.to_be_bytes());
        push_name(&mut variables, &self.algorithm_name);
        variables.extend(&time.to_be_bytes()[2..]);
        variables.extend(fudge.to_be_bytes());
        variables.extend(error.to_be_bytes());
        variables.extend((other.len() as u16).to_be_bytes());
        variables.extend(other);
        variables
    }
}

fn parse_name(name: &str) -> Result<Name, ProviderError> {
    Name::parse(name).map_err(|error| settings(format!("rfc2136-tsig-keyname: {error}")))
}

/// Returns a MAC preceded by its length, as the next signature covers it.
fn with_length(code: &[u8]) -> Vec<u8> {
    [&(code.len() as u16).to_be_bytes(), code].concat()
}

/// Verifies the responses to one request, in order.
pub(super) struct Verifier<'a> {
    key: &'a TsigKey,
    /// Octets that the next signature covers: the last signature, and all messages since.
    covered: Vec<u8>,
    is_first: bool,
    unsigned: usize,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum TsigError {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("the response is not signed")]
    Missing,
    #[error("the signature is wrong")]
    BadSignature,
    #[error("it is signed with another key or algorithm")]
    OtherKey,
    #[error(
        "the server does not know the key {0}; check rfc2136-tsig-keyname and rfc2136-tsig-secret-alg"
    )]
    UnknownKey(Name),
    #[error("the server rejects the signature; check rfc2136-tsig-secret")]
    Rejected,
    #[error("the clocks of server and publisher differ by {0} s; synchronise them by NTP")]
    Clock(u64),
    #[error("the server reports TSIG error {0}")]
    Other(u16),
}

impl Verifier<'_> {
    /// Verifies one message and removes its signature. `now` is in seconds since 1970.
    pub(super) fn verify(&mut self, message: &mut Vec<u8>, now: u64) -> Result<(), TsigError> {
        let Some(signature) = Signature::find(message)? else {
            self.unsigned += 1;
            // The first message is always signed, and then each hundredth at least (RFC 8945, section 5.3.1).
            if self.is_first || self.unsigned > MAX_UNSIGNED {
                return Err(TsigError::Missing);
            }
            self.covered.extend_from_slice(message);
            return Ok(());
        };
        match signature.error {
            // The server cannot sign these (RFC 8945, section 5.2.2).
            16 => return Err(TsigError::Rejected),
            17 => return Err(TsigError::UnknownKey(self.key.name.clone())),
            _ => {}
        }
        // Another algorithm under the same name could be a weaker one.
        if signature.key != self.key.name || signature.algorithm != self.key.algorithm_name {
            return Err(TsigError::OtherKey);
        }
        // The signature covers the message as it was before the signature was added.
        message.truncate(signature.start);
        let additional = u16::from_be_bytes([message[10], message[11]]).saturating_sub(1);
        message[10..12].copy_from_slice(&additional.to_be_bytes());
        let wire_id = [message[0], message[1]];
        // The signature covers the ID of the signer; a forwarder may have replaced it (RFC 8945, section 4.2).
        message[..2].copy_from_slice(&signature.original_id);
        self.covered.extend_from_slice(message);
        message[..2].copy_from_slice(&wire_id);
        if self.is_first {
            // The server's fudge applies.
            let times = (signature.time, signature.fudge);
            self.covered
                .extend(self.key.variables(times, signature.error, &signature.other));
        } else {
            // In later messages only the time is covered (RFC 8945, section 5.3.1).
            self.covered.extend(&signature.time.to_be_bytes()[2..]);
            self.covered.extend(signature.fudge.to_be_bytes());
        }
        if !(self.key.algorithm.is_code)(&self.key.secret, &self.covered, &signature.code) {
            return Err(TsigError::BadSignature);
        }
        self.covered = with_length(&signature.code);
        self.is_first = false;
        self.unsigned = 0;
        // The time counts only with a right MAC (RFC 8945, section 5.2): a forger could set it at will.
        match signature.error {
            0 if signature.time.abs_diff(now) > u64::from(signature.fudge) => {
                Err(TsigError::Clock(signature.time.abs_diff(now)))
            }
            0 => Ok(()),
            // BADTIME: its other data is the server's time (RFC 8945, section 5.2.3).
            18 => Err(TsigError::Clock(
                signature
                    .server_time()
                    .unwrap_or(signature.time)
                    .abs_diff(now),
            )),
            other => Err(TsigError::Other(other)),
        }
    }

    /// Returns an error if messages followed the last signature.
    pub(super) fn finish(&self) -> Result<(), TsigError> {
        // Without a signature at the end, a transfer could be cut off unnoticed (RFC 8945, section 5.3.1).
        if self.is_first || self.unsigned > 0 {
            Err(TsigError::Missing)
        } else {
            Ok(())
        }
    }
}

/// TSIG record, the last record of a signed message.
struct Signature {
    start: usize,
    key: Name,
    algorithm: Name,
    time: u64,
    fudge: u16,
    code: Vec<u8>,
    original_id: [u8; 2],
    error: u16,
    other: Vec<u8>,
}

impl Signature {
    /// Parses the signature of a message; `None` if it is unsigned.
    fn find(message: &[u8]) -> Result<Option<Self>, WireError> {
        let mut reader = MessageReader::new(message);
        let header = reader.header()?;
        if header.counts[3] == 0 {
            return Ok(None);
        }
        for _ in 0..header.counts[0] {
            reader.question()?;
        }
        let others: usize = header.counts[1..]
            .iter()
            .map(|count| usize::from(*count))
            .sum();
        for _ in 1..others {
            reader.record()?;
        }
        // A signature is the last record of the additional section (RFC 8945, section 5.1).
        let last = reader.record()?;
        if last.record_type.0 != TYPE_TSIG {
            return Ok(None);
        }
        if reader.at != message.len() || last.start < HEADER {
            return Err(WireError("octets after the signature"));
        }
        let mut data = MessageReader::at(message, last.data.start);
        // In the order of the record.
        Ok(Some(Self {
            start: last.start,
            key: last.name,
            algorithm: data.name()?,
            time: u64::from(data.u16()?) << 32 | u64::from(data.u32()?),
            fudge: data.u16()?,
            code: data.counted()?.to_vec(),
            original_id: data.u16()?.to_be_bytes(),
            error: data.u16()?,
            other: data.counted()?.to_vec(),
        }))
    }

    /// Returns the server's time in a BADTIME response.
    fn server_time(&self) -> Option<u64> {
        let octets: [u8; 6] = self.other.as_slice().try_into().ok()?;
        Some(
            octets
                .iter()
                .fold(0, |time, octet| time << 8 | u64::from(*octet)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_may_differ_by_the_fudge() {
        let key = TsigKey::new("publisher", "hmac-sha256".parse().unwrap(), "c2VjcmV0").unwrap();
        let now = 1_800_000_000;
        let fudge = u64::from(FUDGE);
        let late = || Err(TsigError::Clock(fudge + 1));
        for (time, expected) in [
            (now, Ok(())),
            (now - fudge, Ok(())),
            (now + fudge, Ok(())),
            (now - fudge - 1, late()),
            (now + fudge + 1, late()),
        ] {
            let mut message = vec![0; HEADER];
            key.sign(&mut message, time).unwrap();
            // A reply's signature covers the one of its request too, which is left out here.
            let mut verifier = Verifier {
                key: &key,
                covered: Vec::new(),
                is_first: true,
                unsigned: 0,
            };
            assert_eq!(verifier.verify(&mut message, now), expected, "{time}");
        }
    }

    #[test]
    fn hundredth_message_is_signed_at_least() {
        let key = TsigKey::new("publisher", "hmac-sha256".parse().unwrap(), "c2VjcmV0").unwrap();
        for (unsigned, is_first, expected) in [
            (0, true, Err(TsigError::Missing)),
            (0, false, Ok(())),
            (MAX_UNSIGNED - 1, false, Ok(())),
            (MAX_UNSIGNED, false, Err(TsigError::Missing)),
        ] {
            let mut verifier = Verifier {
                key: &key,
                covered: Vec::new(),
                is_first,
                unsigned,
            };
            let mut message = vec![0; HEADER];
            assert_eq!(verifier.verify(&mut message, 0), expected, "{unsigned}");
            assert_eq!(verifier.unsigned, unsigned + 1);
        }
    }

    #[test]
    fn codes_match_the_rfcs() {
        // RFC 2202 and RFC 4231, test case 2.
        for (name, expected) in [
            ("hmac-sha1", "effcdf6ae5eb2fa2d27416d5f184df9c259a7c79"),
            (
                "hmac-sha224",
                "a30e01098bc6dbbf45690f3a7e9e6d0f8bbea2a39e6148008fd05e44",
            ),
            (
                "HMAC-SHA256.",
                "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843",
            ),
            (
                " hmac-sha384 ",
                "af45d2e376484031617f78d2b58a6b1b9c7ef464f5a01b47e42ec3736322445e8e2240ca5e69e2c78b3239ecfab21649",
            ),
            (
                "hmac-sha512",
                "164b7a7bfcf819e2e395fbe73b56e0a387bd64222e831fd610270cd7ea2505549758bf75c05a994a6d034f65f8f0e6fd\
                 caeab1a34d4a6b4b636e070a38bce737",
            ),
        ] {
            let algorithm: Algorithm = name.parse().unwrap();
            let octets = b"what do ya want for nothing?";
            let code = (algorithm.code)(b"Jefe", octets);
            assert_eq!(dns_kit::hex(&code), expected, "{name}");
            assert!((algorithm.is_code)(b"Jefe", octets, &code));
            assert!(!(algorithm.is_code)(b"Jefe", &octets[1..], &code));
            assert!(!(algorithm.is_code)(b"jefe", octets, &code));
            assert!(
                !(algorithm.is_code)(b"Jefe", octets, &code[..10]),
                "truncated"
            );
        }
        assert_eq!(
            "hmac-md5".parse::<Algorithm>().unwrap_err().to_string(),
            "rfc2136-tsig-secret-alg is \"hmac-md5\"; use one of hmac-sha1, hmac-sha224, hmac-sha256, hmac-sha384, \
             hmac-sha512"
        );
    }

    fn key() -> TsigKey {
        TsigKey::new("Publisher.", "hmac-sha256".parse().unwrap(), " c2VjcmV0\n").unwrap()
    }

    #[test]
    fn shown_keys_hide_the_secret() {
        assert_eq!(format!("{:?}", key()), "TsigKey(publisher, hmac-sha256)");
        let algorithm: Algorithm = "hmac-sha256".parse().unwrap();
        let error = TsigKey::new("a..b", algorithm, "").unwrap_err().to_string();
        assert!(
            error.starts_with("rfc2136-tsig-keyname: \"a..b\" is not"),
            "{error}"
        );
        let error = TsigKey::new("a", algorithm, "?").unwrap_err().to_string();
        assert!(
            error.starts_with("rfc2136-tsig-secret is not base64: "),
            "{error}"
        );
        assert!(error.ends_with("; `tsig-keygen` makes one"), "{error}");
    }

    #[test]
    fn signatures_follow_the_rfc() {
        let key = key();
        let mut message = vec![0xab, 0xcd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let verifier = key.sign(&mut message, 0x0102_0304_0506).unwrap();
        let code = &message[message.len() - 38..message.len() - 6];
        assert_eq!(verifier.covered, [&[0, 32], code].concat());
        assert!(verifier.is_first && verifier.unsigned == 0);
        let mut expected = vec![0xab, 0xcd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
        expected.extend(b"\x09publisher\0");
        // Type TSIG, class ANY, no TTL, and the length of the data.
        expected.extend([0, 250, 0, 255, 0, 0, 0, 0, 0, 61]);
        expected.extend(b"\x0bhmac-sha256\0");
        expected.extend([1, 2, 3, 4, 5, 6, 1, 44, 0, 32]);
        expected.extend(code);
        expected.extend([0xab, 0xcd, 0, 0, 0, 0]);
        assert_eq!(message, expected);
        // It covers the message before, and the variables of the signature.
        let mut covered = vec![0xab, 0xcd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        covered.extend(b"\x09publisher\0");
        covered.extend([0, 255, 0, 0, 0, 0]);
        covered.extend(b"\x0bhmac-sha256\0");
        covered.extend([1, 2, 3, 4, 5, 6, 1, 44, 0, 0, 0, 0]);
        assert!((key.algorithm.is_code)(b"secret", &covered, code));
    }

    /// A server with the same key: signs a response to what `verifier` expects.
    fn signed(key: &TsigKey, covered: &[u8], error: u16, other: &[u8], time: u64) -> Vec<u8> {
        let plain = vec![0xab, 0xcd, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let variables = key.variables((time, FUDGE), error, other);
        let code = (key.algorithm.code)(&key.secret, &[covered, &plain, &variables].concat());
        with_code(key, plain, &code, error, other, time)
    }

    fn with_code(
        key: &TsigKey,
        mut message: Vec<u8>,
        code: &[u8],
        error: u16,
        other: &[u8],
        time: u64,
    ) -> Vec<u8> {
        let mut data = Vec::new();
        push_name(&mut data, &key.algorithm_name);
        data.extend(&time.to_be_bytes()[2..]);
        data.extend(FUDGE.to_be_bytes());
        data.extend((code.len() as u16).to_be_bytes());
        data.extend(code);
        data.extend(&message[..2]);
        data.extend(error.to_be_bytes());
        data.extend((other.len() as u16).to_be_bytes());
        data.extend(other);
        let mut record = Records::default();
        let tsig = RecordType(TYPE_TSIG);
        record
            .push(&Name::root(), &key.name, tsig, CLASS_ANY, 0, &data)
            .unwrap();
        append(&mut message, 3, &record);
        message
    }

    const NOW: u64 = 1_800_000_000;

    fn request() -> Vec<u8> {
        vec![0xab, 0xcd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    }

    #[test]
    fn verified_responses_lose_the_signature() {
        let key = key();
        let mut message = request();
        let mut verifier = key.sign(&mut message, NOW).unwrap();
        let mut response = signed(&key, &verifier.covered, 0, &[], NOW);
        // A forwarder may replace the id; the signature has the original one.
        response[..2].copy_from_slice(&[1, 2]);
        assert_eq!(verifier.verify(&mut response, NOW), Ok(()));
        assert_eq!(response, [1, 2, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert!(!verifier.is_first && verifier.unsigned == 0);
        assert_eq!(verifier.finish(), Ok(()));
        // Later messages cover the last signature, what came between, and the time alone.
        let mut between = vec![0xab, 0xcd, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let before = verifier.covered.clone();
        assert_eq!(verifier.verify(&mut between, NOW), Ok(()));
        assert_eq!(verifier.finish(), Err(TsigError::Missing));
        assert_eq!(verifier.covered, [&before[..], &between].concat());
        let plain = between.clone();
        let times = [&NOW.to_be_bytes()[2..], &FUDGE.to_be_bytes()].concat();
        let covered = [&verifier.covered[..], &plain, &times].concat();
        let code = (key.algorithm.code)(&key.secret, &covered);
        let mut last = with_code(&key, plain, &code, 0, &[], NOW);
        assert_eq!(verifier.verify(&mut last, NOW), Ok(()));
        assert_eq!(verifier.covered, with_length(&code));
        assert_eq!(verifier.finish(), Ok(()));
    }

    #[test]
    fn wrong_signatures_are_told_apart() {
        let server_time = (NOW + 1_000).to_be_bytes();
        let mut weaker = key();
        weaker.algorithm_name = Name::parse("hmac-sha1").unwrap();
        let mut other = key();
        other.name = Name::parse("other").unwrap();
        let key = key();
        let verify = |made: &dyn Fn(&[u8]) -> Vec<u8>| {
            let mut message = request();
            let mut verifier = key.sign(&mut message, NOW).unwrap();
            let mut response = made(&verifier.covered);
            verifier.verify(&mut response, NOW)
        };
        let of = |error: u16, other: &'static [u8]| {
            let key = &key;
            move |covered: &[u8]| signed(key, covered, error, other, NOW)
        };
        assert_eq!(verify(&of(0, &[])), Ok(()));
        assert_eq!(verify(&of(0, b"other")), Ok(()));
        assert_eq!(verify(&of(16, &[])), Err(TsigError::Rejected));
        assert_eq!(
            verify(&of(17, &[])),
            Err(TsigError::UnknownKey(key.name.clone()))
        );
        assert_eq!(verify(&of(22, &[])), Err(TsigError::Other(22)));
        // BADTIME tells the time of the server, if it does.
        assert_eq!(verify(&of(18, &[])), Err(TsigError::Clock(0)));
        let late = |covered: &[u8]| signed(&key, covered, 18, &server_time[2..], NOW);
        assert_eq!(verify(&late), Err(TsigError::Clock(1_000)));
        assert_eq!(
            verify(&|covered: &[u8]| signed(&other, covered, 0, &[], NOW)),
            Err(TsigError::OtherKey)
        );
        assert_eq!(
            verify(&|covered: &[u8]| signed(&weaker, covered, 0, &[], NOW)),
            Err(TsigError::OtherKey)
        );
        assert_eq!(
            verify(&|_: &[u8]| signed(&key, b"another request", 0, &[], NOW)),
            Err(TsigError::BadSignature)
        );
        let trailing = |covered: &[u8]| [&signed(&key, covered, 0, &[], NOW)[..], &[0]].concat();
        let octets = Err(TsigError::Wire(WireError("octets after the signature")));
        assert_eq!(verify(&trailing), octets);
        // Another record at the end is no signature.
        let mut record = Records::default();
        record
            .push(&Name::root(), &key.name, RecordType::A, CLASS_ANY, 0, &[])
            .unwrap();
        let unsigned = |_: &[u8]| {
            let mut message = request();
            append(&mut message, 3, &record);
            message
        };
        assert_eq!(verify(&unsigned), Err(TsigError::Missing));
        for (error, text) in [
            (TsigError::Missing, "the response is not signed"),
            (TsigError::BadSignature, "the signature is wrong"),
            (
                TsigError::OtherKey,
                "it is signed with another key or algorithm",
            ),
            (
                TsigError::UnknownKey(key.name.clone()),
                "the server does not know the key publisher; check rfc2136-tsig-keyname and rfc2136-tsig-secret-alg",
            ),
            (
                TsigError::Rejected,
                "the server rejects the signature; check rfc2136-tsig-secret",
            ),
            (
                TsigError::Clock(7),
                "the clocks of server and publisher differ by 7 s; synchronise them by NTP",
            ),
            (TsigError::Other(22), "the server reports TSIG error 22"),
        ] {
            assert_eq!(error.to_string(), text);
        }
    }

    #[test]
    fn a_signature_follows_questions_and_records() {
        let key = key();
        let zone = Name::parse("example.org").unwrap();
        let mut message = crate::provider::rfc2136::messages::question(7, 0, &zone, 252);
        for section in [1, 1, 2, 3] {
            let mut record = Records::default();
            record
                .push(&zone, &zone, RecordType(99), 1, 0, &[1])
                .unwrap();
            append(&mut message, section, &record);
        }
        let start = message.len();
        assert!(Signature::find(&message).unwrap().is_none());
        key.sign(&mut message, NOW).unwrap();
        let found = Signature::find(&message).unwrap().unwrap();
        assert_eq!((found.start, found.time, found.fudge), (start, NOW, 300));
        assert_eq!(
            (found.original_id, found.error, found.code.len()),
            ([0, 7], 0, 32)
        );
        assert_eq!(found.other, [] as [u8; 0]);
    }
}
