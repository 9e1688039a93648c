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

#[cfg(test)]
mod tests {
    use super::*;

    /// The octets 0xfb repeated, whose base64 has the characters in which its two alphabets differ.
    const STANDARD_KEY: &str = "+/v7+/v7+/v7+/v7+/v7+/v7+/v7+/v7+/v7+/v7+/s=";

    #[test]
    fn keys_are_octets_or_base64() {
        let text = "heritage=external-dns";
        let sealed = Cipher::new(STANDARD_KEY).unwrap().encrypt(text).unwrap();
        let url_safe = STANDARD_KEY.replace('+', "-").replace('/', "_");
        for key in [
            STANDARD_KEY,
            STANDARD_KEY.trim_end_matches('='),
            &format!(" {STANDARD_KEY}\n"),
            &url_safe,
        ] {
            let found = Cipher::new(key).unwrap().decrypt(&sealed);
            assert_eq!(found.as_deref(), Some(text), "{key}");
        }
        let plain = "kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk";
        let of_octets = Cipher::new(plain).unwrap().encrypt(text).unwrap();
        let of_base64 = Cipher::new(&STANDARD.encode(plain)).unwrap();
        assert_eq!(of_base64.decrypt(&of_octets).as_deref(), Some(text));
        for key in [
            "",
            &plain[1..],
            &format!("{plain}k"),
            &STANDARD.encode(&plain[1..]),
            &STANDARD.encode([plain, "k"].concat()),
            &"?".repeat(43),
        ] {
            assert_eq!(Cipher::new(key).err(), Some(KeyError), "{key}");
        }
        assert_eq!(
            KeyError.to_string(),
            "txt-encrypt-aes-key needs 32 bytes, or their base64; `openssl rand -base64 32` makes one"
        );
        assert_eq!(format!("{:?}", Cipher::new(plain).unwrap()), "Cipher");
    }

    /// Seals octets that are no gzip, as external-dns may.
    fn sealed(cipher: &Cipher, octets: &[u8]) -> String {
        let nonce = [7; NONCE_LEN];
        let mut sealed = octets.to_vec();
        cipher
            .0
            .seal_in_place_append_tag(
                Nonce::assume_unique_for_key(nonce),
                Aad::empty(),
                &mut sealed,
            )
            .unwrap();
        STANDARD.encode([&nonce[..], &sealed].concat())
    }

    #[test]
    fn decrypted_texts_are_limited() {
        let cipher = Cipher::new(STANDARD_KEY).unwrap();
        assert_eq!(
            cipher.decrypt(&sealed(&cipher, b"plain")).as_deref(),
            Some("plain"),
            "without gzip"
        );
        assert_eq!(cipher.decrypt(&sealed(&cipher, b"\xff")), None, "no UTF-8");
        let quoted = format!("\"{}\"", sealed(&cipher, b"plain"));
        assert_eq!(cipher.decrypt(&quoted).as_deref(), Some("plain"));
        for (length, kept) in [(65_535, 65_535), (65_536, 65_536), (65_537, 65_536)] {
            let text = cipher.encrypt(&"x".repeat(length)).unwrap();
            assert_eq!(cipher.decrypt(&text).map(|text| text.len()), Some(kept));
        }
        // Shorter than a nonce, and a nonce alone.
        assert_eq!(cipher.decrypt(&STANDARD.encode([0; NONCE_LEN - 1])), None);
        assert_eq!(cipher.decrypt(&STANDARD.encode([0; NONCE_LEN])), None);
    }

    #[test]
    fn equal_texts_are_sealed_differently() {
        let cipher = Cipher::new(STANDARD_KEY).unwrap();
        assert_ne!(cipher.encrypt("same"), cipher.encrypt("same"));
    }
}
