//! Transaction signatures (RFC 8945), over one message or a sequence of them. Pure.
//!
//! The hashes come from RustCrypto: `ring`, on which the crate `domain` builds, lacks SHA-224.

use std::{fmt, str::FromStr};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use hmac::{Hmac, KeyInit as _, Mac as _};

use super::wire::{CLASS_ANY, HEADER, MessageReader, TYPE_TSIG, WireError, push_name};
use crate::{provider::ProviderError, record::Name};

/// Allowed clock difference in seconds (RFC 8945, section 10).
pub(super) const FUDGE: u16 = 300;

/// Maximum number of unsigned messages between two signed ones (RFC 8945, section 5.3.1).
const MAX_UNSIGNED: usize = 99;

/// MAC algorithms for TSIG (RFC 8945, section 6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// `hmac-sha1`, 20 octets of MAC.
    Sha1,
    /// `hmac-sha224`, 28 octets of MAC.
    Sha224,
    /// `hmac-sha256`, 32 octets of MAC.
    Sha256,
    /// `hmac-sha384`, 48 octets of MAC.
    Sha384,
    /// `hmac-sha512`, 64 octets of MAC.
    Sha512,
}

impl Algorithm {
    const ALL: [(Self, &str); 5] = [
        (Self::Sha1, "hmac-sha1"),
        (Self::Sha224, "hmac-sha224"),
        (Self::Sha256, "hmac-sha256"),
        (Self::Sha384, "hmac-sha384"),
        (Self::Sha512, "hmac-sha512"),
    ];

    fn name(self) -> &'static str {
        // Every algorithm has a row.
        Self::ALL.iter().find(|(algorithm, _)| *algorithm == self).map_or("", |(_, name)| name)
    }
}

impl FromStr for Algorithm {
    type Err = ProviderError;

    fn from_str(text: &str) -> Result<Self, ProviderError> {
        let lower = text.trim().trim_end_matches('.').to_ascii_lowercase();
        let row = Self::ALL.iter().find(|(_, name)| *name == lower);
        row.map(|(algorithm, _)| *algorithm).ok_or_else(|| {
            ProviderError::Settings(format!(
                "rfc2136-tsig-secret-alg is {text:?}; use hmac-sha1, hmac-sha224, hmac-sha256, hmac-sha384 or hmac-sha512"
            ))
        })
    }
}

/// A TSIG key; `Debug` omits the secret.
#[derive(Clone)]
pub struct TsigKey {
    name: Name,
    algorithm: Algorithm,
    secret: Vec<u8>,
}

impl fmt::Debug for TsigKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TsigKey({}, {})", self.name, self.algorithm.name())
    }
}

impl TsigKey {
    /// Decodes a secret in base64.
    pub fn new(name: &str, algorithm: Algorithm, secret: &str) -> Result<Self, ProviderError> {
        let name = Name::parse(name)
            .map_err(|error| ProviderError::Settings(format!("rfc2136-tsig-keyname: {error}")))?;
        let secret = STANDARD.decode(secret.trim()).map_err(|error| {
            ProviderError::Settings(format!(
                "rfc2136-tsig-secret is not base64: {error}; `tsig-keygen` makes one"
            ))
        })?;
        Ok(Self { name, algorithm, secret })
    }

    /// Appends a signature at `now` (seconds since 1970) and returns a verifier of the responses.
    pub(super) fn sign(&self, message: &mut Vec<u8>, now: u64) -> Verifier<'_> {
        let mut mac = MacState::new(self);
        mac.update(message);
        mac.update(&self.variables(now, 0, &[]));
        let code = mac.finish();
        let mut record = Vec::new();
        push_name(&mut record, &self.name);
        record.extend(TYPE_TSIG.to_be_bytes());
        record.extend(CLASS_ANY.to_be_bytes());
        record.extend(0_u32.to_be_bytes());
        let mut data = algorithm_name(self.algorithm);
        data.extend(&now.to_be_bytes()[2..]);
        data.extend(FUDGE.to_be_bytes());
        data.extend((code.len() as u16).to_be_bytes());
        data.extend(&code);
        data.extend(&message[..2]);
        data.extend([0; 4]);
        record.extend((data.len() as u16).to_be_bytes());
        record.extend(data);
        message.extend(record);
        let additional = u16::from_be_bytes([message[10], message[11]]) + 1;
        message[10..12].copy_from_slice(&additional.to_be_bytes());
        let mut next = MacState::new(self);
        next.chain(&code);
        Verifier { key: self, mac: next, is_first: true, unsigned: 0 }
    }

    /// Returns the variables that a signature covers besides the message (RFC 8945, section 4.3.3).
    fn variables(&self, time: u64, error: u16, other: &[u8]) -> Vec<u8> {
        let mut variables = Vec::new();
        push_name(&mut variables, &self.name);
        variables.extend(CLASS_ANY.to_be_bytes());
        variables.extend(0_u32.to_be_bytes());
        variables.extend(algorithm_name(self.algorithm));
        variables.extend(&time.to_be_bytes()[2..]);
        variables.extend(FUDGE.to_be_bytes());
        variables.extend(error.to_be_bytes());
        variables.extend((other.len() as u16).to_be_bytes());
        variables.extend(other);
        variables
    }
}

/// Verifies the responses to one request, in order.
pub(super) struct Verifier<'a> {
    key: &'a TsigKey,
    /// Covers the last signature and all messages since.
    mac: MacState,
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
    #[error("the server does not know the key {0}; check rfc2136-tsig-keyname and rfc2136-tsig-secret-alg")]
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
            if self.is_first || self.unsigned > MAX_UNSIGNED {
                return Err(TsigError::Missing);
            }
            self.mac.update(message);
            return Ok(());
        };
        match signature.error {
            // The server cannot sign these (RFC 8945, section 5.2.2).
            16 => return Err(TsigError::Rejected),
            17 => return Err(TsigError::UnknownKey(self.key.name.clone())),
            _ => {}
        }
        let algorithm = Name::parse(self.key.algorithm.name()).map_err(|_| TsigError::OtherKey)?;
        if signature.key != self.key.name || signature.algorithm != algorithm {
            return Err(TsigError::OtherKey);
        }
        message.truncate(signature.start);
        let additional = u16::from_be_bytes([message[10], message[11]]).saturating_sub(1);
        message[10..12].copy_from_slice(&additional.to_be_bytes());
        let wire_id = [message[0], message[1]];
        message[..2].copy_from_slice(&signature.original_id);
        self.mac.update(message);
        message[..2].copy_from_slice(&wire_id);
        if self.is_first {
            let mut variables = self.key.variables(signature.time, signature.error, &signature.other);
            // The server's fudge applies.
            let fudge_at = variables.len() - signature.other.len() - 6;
            variables[fudge_at..fudge_at + 2].copy_from_slice(&signature.fudge.to_be_bytes());
            self.mac.update(&variables);
        } else {
            // In later messages only the time is covered (RFC 8945, section 5.3.1).
            self.mac.update(&signature.time.to_be_bytes()[2..]);
            self.mac.update(&signature.fudge.to_be_bytes());
        }
        let mac = std::mem::replace(&mut self.mac, MacState::new(self.key));
        if !mac.is(&signature.code) {
            return Err(TsigError::BadSignature);
        }
        self.mac.chain(&signature.code);
        self.is_first = false;
        self.unsigned = 0;
        match signature.error {
            0 if signature.time.abs_diff(now) > u64::from(signature.fudge) => {
                Err(TsigError::Clock(signature.time.abs_diff(now)))
            }
            0 => Ok(()),
            18 => Err(TsigError::Clock(signature.server_time().unwrap_or(signature.time).abs_diff(now))),
            other => Err(TsigError::Other(other)),
        }
    }

    /// Returns an error if messages followed the last signature.
    pub(super) fn finish(&self) -> Result<(), TsigError> {
        if self.is_first || self.unsigned > 0 { Err(TsigError::Missing) } else { Ok(()) }
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
        let others: usize = header.counts[1..].iter().map(|count| usize::from(*count)).sum();
        for _ in 1..others {
            reader.record()?;
        }
        let last = reader.record()?;
        if last.record_type.0 != TYPE_TSIG {
            return Ok(None);
        }
        if reader.position() != message.len() || last.start < HEADER {
            return Err(WireError("octets after the signature"));
        }
        let mut data = MessageReader::at(message, last.data.start);
        let algorithm = data.name()?;
        let time = u64::from(data.u16()?) << 32 | u64::from(data.u32()?);
        let fudge = data.u16()?;
        let length = usize::from(data.u16()?);
        let code = data.octets(length)?.to_vec();
        let original_id = data.u16()?.to_be_bytes();
        let error = data.u16()?;
        let length = usize::from(data.u16()?);
        let other = data.octets(length)?.to_vec();
        Ok(Some(Self {
            start: last.start,
            key: last.name,
            algorithm,
            time,
            fudge,
            code,
            original_id,
            error,
            other,
        }))
    }

    /// Returns the server's time in a BADTIME response.
    fn server_time(&self) -> Option<u64> {
        let octets: [u8; 6] = self.other.as_slice().try_into().ok()?;
        Some(octets.iter().fold(0, |time, octet| time << 8 | u64::from(*octet)))
    }
}

fn algorithm_name(algorithm: Algorithm) -> Vec<u8> {
    let label = algorithm.name();
    let mut name = vec![label.len() as u8];
    name.extend(label.as_bytes());
    name.push(0);
    name
}

enum MacState {
    Sha1(Hmac<sha1::Sha1>),
    Sha224(Hmac<sha2::Sha224>),
    Sha256(Hmac<sha2::Sha256>),
    Sha384(Hmac<sha2::Sha384>),
    Sha512(Hmac<sha2::Sha512>),
}

/// Evaluates an expression for the HMAC in use.
macro_rules! on_mac {
    ($state:expr, $mac:ident => $work:expr) => {
        match $state {
            MacState::Sha1($mac) => $work,
            MacState::Sha224($mac) => $work,
            MacState::Sha256($mac) => $work,
            MacState::Sha384($mac) => $work,
            MacState::Sha512($mac) => $work,
        }
    };
}

impl MacState {
    #[expect(clippy::expect_used, reason = "HMAC takes keys of every length (RFC 2104)")]
    fn new(key: &TsigKey) -> Self {
        const ANY_LENGTH: &str = "HMAC takes keys of every length";
        let secret = &key.secret;
        match key.algorithm {
            Algorithm::Sha1 => Self::Sha1(Hmac::new_from_slice(secret).expect(ANY_LENGTH)),
            Algorithm::Sha224 => Self::Sha224(Hmac::new_from_slice(secret).expect(ANY_LENGTH)),
            Algorithm::Sha256 => Self::Sha256(Hmac::new_from_slice(secret).expect(ANY_LENGTH)),
            Algorithm::Sha384 => Self::Sha384(Hmac::new_from_slice(secret).expect(ANY_LENGTH)),
            Algorithm::Sha512 => Self::Sha512(Hmac::new_from_slice(secret).expect(ANY_LENGTH)),
        }
    }

    fn update(&mut self, octets: &[u8]) {
        on_mac!(self, mac => mac.update(octets));
    }

    /// Covers the previous MAC, preceded by its length.
    fn chain(&mut self, code: &[u8]) {
        self.update(&(code.len() as u16).to_be_bytes());
        self.update(code);
    }

    fn finish(self) -> Vec<u8> {
        on_mac!(self, mac => mac.finalize().into_bytes().to_vec())
    }

    /// Compares in constant time. Truncated MACs are rejected.
    fn is(self, code: &[u8]) -> bool {
        on_mac!(self, mac => mac.verify_slice(code).is_ok())
    }
}
