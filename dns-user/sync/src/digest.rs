//! Digests of blobs: `sha256:<hex>`, several separated by `;`; a digest without a name is SHA-1.

use std::fmt::Write;

use ring::digest::{self, Algorithm};

/// The strongest known digest of an announcement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MultiDigest {
    algorithm: &'static Algorithm,
    /// Lower-case hexadecimal digits.
    hex: String,
}

/// Reasons why a digest cannot be used or does not match.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum DigestError {
    /// No digest of a known algorithm.
    #[error("{0:?} has no sha1, sha256 or sha512 digest")]
    Unknown(String),
    /// The bytes have a different digest.
    #[error("the digest of the blob is {found}, but {announced} was announced")]
    Mismatch {
        /// Digest of the bytes.
        found: String,
        /// Digest in the announcement.
        announced: String,
    },
}

/// Known algorithms, weakest first.
const KNOWN: [(&str, &Algorithm); 3] =
    [("sha1", &digest::SHA1_FOR_LEGACY_USE_ONLY), ("sha256", &digest::SHA256), ("sha512", &digest::SHA512)];

impl MultiDigest {
    /// Parses a digest or a list of digests; keeps the strongest.
    pub fn parse(text: &str) -> Result<Self, DigestError> {
        let mut best: Option<(usize, &str)> = None;
        for part in text.split(';') {
            let (name, hex) = part.trim().split_once(':').unwrap_or(("sha1", part.trim()));
            let Some(strength) = KNOWN.iter().position(|(known, _)| *known == name) else { continue };
            let right_length = hex.len() == KNOWN[strength].1.output_len() * 2;
            if !right_length || !hex.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                continue;
            }
            if best.is_none_or(|(known, _)| known < strength) {
                best = Some((strength, hex));
            }
        }
        let (strength, hex) = best.ok_or_else(|| DigestError::Unknown(text.to_owned()))?;
        Ok(Self { algorithm: KNOWN[strength].1, hex: hex.to_ascii_lowercase() })
    }

    /// Checks that the bytes have this digest.
    pub fn verify(&self, bytes: &[u8]) -> Result<(), DigestError> {
        let found = hex(digest::digest(self.algorithm, bytes).as_ref());
        if found == self.hex {
            return Ok(());
        }
        Err(DigestError::Mismatch { found, announced: self.hex.clone() })
    }
}

/// Returns `sha256:<hex>` of `bytes`, as a director announces it.
pub fn sha256(bytes: &[u8]) -> String {
    format!("sha256:{}", hex(digest::digest(&digest::SHA256, bytes).as_ref()))
}

/// Returns whether `text` has the form that [`sha256`] returns.
pub fn is_sha256(text: &str) -> bool {
    let digits = text.strip_prefix("sha256:").unwrap_or_default();
    digits.len() == 64 && digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}

/// Returns lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Digests of `abc` (FIPS 180 examples).
    const SHA1: &str = "a9993e364706816aba3e25717850c26c9cd0d89d";
    const SHA256: &str = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    const SHA512: &str = "sha512:ddaf35a193617abacc417349ae20413112e6fa4e89a97ea20a9eeee64b55d39a2192992a274fc1a836ba3c23a3feebbd454d4423643ce80e2a9ac94fa54ca49f";

    #[test]
    fn every_kind_and_list_is_read() {
        assert_eq!(sha256(b"abc"), SHA256);
        for text in
            [SHA1, &format!("sha1:{SHA1}"), SHA256, SHA512, &SHA256.to_uppercase().replace("SHA", "sha")]
        {
            let digest = MultiDigest::parse(text).unwrap();
            assert_eq!(digest.verify(b"abc"), Ok(()), "{text}");
            assert!(digest.verify(b"abd").is_err(), "{text}");
        }
    }

    #[test]
    fn the_strongest_counts() {
        let wrong = SHA512.replace('d', "e");
        let list = format!("{SHA1};{wrong};{SHA256}");
        assert!(MultiDigest::parse(&list).unwrap().verify(b"abc").is_err());
        let list = format!("{};{SHA256};md5:900150983cd24fb0", SHA1.replace('a', "b"));
        assert_eq!(MultiDigest::parse(&list).unwrap().verify(b"abc"), Ok(()));
        for bad in ["", "md5:900150983cd24fb0d6963f7d28e17f72", "sha256:12", "xyz"] {
            assert!(MultiDigest::parse(bad).is_err(), "{bad}");
        }
    }
}
