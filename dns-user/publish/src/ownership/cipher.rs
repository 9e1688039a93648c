//! Encryption of the texts of owner records, as external-dns encrypts them. Pure.

use std::{
    fmt,
    io::{Read, Write},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use ring::{
    aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey},
    rand::{SecureRandom, SystemRandom},
};

/// Maximum size of a decompressed text in octets; an owner record is far smaller.
const MAX_TEXT: u64 = 64 * 1024;

/// Key that encrypts owner records: AES-256-GCM over gzip, in base64.
#[derive(Clone)]
pub struct Cipher(LessSafeKey);

impl Cipher {
    /// Length of a key in octets.
    pub const KEY_LEN: usize = 32;

    /// Parses a key of 32 octets, or its base64 (standard or URL-safe).
    pub fn new(key: &str) -> Result<Self, KeyError> {
        // No base64 of 32 octets has 32 characters, so the two forms cannot be confused.
        let decoded = if key.len() == Self::KEY_LEN {
            key.as_bytes().to_vec()
        } else {
            let standard = key
                .trim()
                .trim_end_matches('=')
                .replace('-', "+")
                .replace('_', "/");
            base64::engine::general_purpose::STANDARD_NO_PAD
                .decode(standard)
                .unwrap_or_default()
        };
        if decoded.len() != Self::KEY_LEN {
            return Err(KeyError);
        }
        let key = UnboundKey::new(&AES_256_GCM, &decoded).map_err(|_| KeyError)?;
        Ok(Self(LessSafeKey::new(key)))
    }

    /// Encrypts with a random nonce; `None` without random numbers.
    pub fn encrypt(&self, text: &str) -> Option<String> {
        let mut nonce = [0; NONCE_LEN];
        // A nonce used twice would reveal both texts and the key of the authentication, so a
        // counter that a restart resets does not do.
        SystemRandom::new().fill(&mut nonce).ok()?;
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(text.as_bytes()).ok()?;
        let mut sealed = encoder.finish().ok()?;
        let unique = Nonce::assume_unique_for_key(nonce);
        self.0
            .seal_in_place_append_tag(unique, Aad::empty(), &mut sealed)
            .ok()?;
        Some(STANDARD.encode([&nonce[..], &sealed].concat()))
    }

    /// Decrypts a text; `None` if it was not encrypted with this key.
    pub fn decrypt(&self, text: &str) -> Option<String> {
        let mut octets = STANDARD.decode(text.trim_matches('"')).ok()?;
        let (nonce, sealed) = octets.split_at_mut_checked(NONCE_LEN)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let plain = self.0.open_in_place(nonce, Aad::empty(), sealed).ok()?;
        let mut text = Vec::new();
        let unpacked = GzDecoder::new(&*plain)
            // A small text may unpack to gigabytes.
            .take(MAX_TEXT)
            .read_to_end(&mut text);
        // external-dns accepts uncompressed texts.
        String::from_utf8(if unpacked.is_ok() {
            text
        } else {
            plain.to_vec()
        })
        .ok()
    }
}

impl fmt::Debug for Cipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cipher")
    }
}

/// A key of the wrong size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("txt-encrypt-aes-key needs 32 bytes, or their base64; `openssl rand -base64 32` makes one")]
pub struct KeyError;
