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

    /// Returns the names of all algorithms, which are external-dns's.
    pub(super) fn names() -> String {
        Self::ALL.map(|algorithm| algorithm.name).join(", ")
    }

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
                settings(format!(
                    "rfc2136-tsig-secret-alg is {text:?}; use one of {}",
                    Self::names()
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
}
