//! Digests and patches of blobs.
//!
//! A digest is `sha256:<hex>`, several are separated by `;`; one without a name is SHA-1. A patch is a dataset
//! compressed with zstd, with the previous version as dictionary.

use std::io::{self, Write as _};

use dns_kit::hex;
use ring::digest::{self, Algorithm};
use zstd::{
    stream::raw::CParameter,
    zstd_safe::{DCtx, get_frame_content_size},
};

/// The strongest known digest of an announcement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MultiDigest {
    algorithm: &'static Algorithm,
    /// Lower-case hexadecimal digits.
    hex: String,
}

/// Reasons why a digest cannot be used or does not match.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum DigestError {
    #[error("{0:?} has no sha1, sha256 or sha512 digest")]
    Unknown(String),
    #[error("the digest of the blob is {found}, but {announced} was announced")]
    Mismatch { found: String, announced: String },
}

/// Known algorithms, weakest first.
const KNOWN: [(&str, &Algorithm); 3] = [
    ("sha1", &digest::SHA1_FOR_LEGACY_USE_ONLY),
    ("sha256", &digest::SHA256),
    ("sha512", &digest::SHA512),
];

impl MultiDigest {
    /// Parses a digest or a list of digests; keeps the strongest.
    pub fn parse(text: &str) -> Result<Self, DigestError> {
        let mut best: Option<(usize, &str)> = None;
        for part in text.split(';') {
            // As in BOSH, a digest without a name is SHA-1, and of several the strongest known one counts.
            let (name, hex) = part.trim().split_once(':').unwrap_or(("sha1", part.trim()));
            let Some(strength) = KNOWN.iter().position(|(known, _)| *known == name) else {
                continue;
            };
            let right_length = hex.len() == KNOWN[strength].1.output_len() * 2;
            // A digest that is cut off can match nothing, and a weaker one beside it still can.
            if !right_length || !hex.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                continue;
            }
            if best.is_none_or(|(known, _)| known < strength) {
                best = Some((strength, hex));
            }
        }
        let (strength, hex) = best.ok_or_else(|| DigestError::Unknown(text.to_owned()))?;
        Ok(Self {
            algorithm: KNOWN[strength].1,
            hex: hex.to_ascii_lowercase(),
        })
    }

    /// Checks that the bytes have this digest.
    pub fn verify(&self, bytes: &[u8]) -> Result<(), DigestError> {
        let found = hex(digest::digest(self.algorithm, bytes).as_ref());
        if found == self.hex {
            return Ok(());
        }
        Err(DigestError::Mismatch {
            found,
            announced: self.hex.clone(),
        })
    }
}

/// Returns `sha256:<hex>` of `bytes`, as a director announces it.
pub fn sha256(bytes: &[u8]) -> String {
    format!(
        "sha256:{}",
        hex(digest::digest(&digest::SHA256, bytes).as_ref())
    )
}

/// Returns whether `text` has the form that [`sha256`] returns.
pub fn is_sha256(text: &str) -> bool {
    let digits = text.strip_prefix("sha256:").unwrap_or_default();
    digits.len() == 64
        && digits
            .bytes()
            .all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}

/// Compression level; higher levels do not shrink a patch of one instance (measured).
const LEVEL: i32 = 3;

/// Window sizes that zstd accepts by default, as powers of two.
const WINDOW: std::ops::RangeInclusive<u32> = 10..=27;

/// Creates the patch from `old` to `new`.
pub fn make_patch(old: &[u8], new: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = zstd::stream::write::Encoder::with_ref_prefix(Vec::new(), LEVEL, old)?;
    encoder.set_parameter(CParameter::WindowLog(window(old.len() + new.len())))?;
    // A patch consists mostly of matches far back in the old version.
    encoder.set_parameter(CParameter::EnableLongDistanceMatching(true))?;
    // The frame then states the length, which the agent needs before it allocates.
    encoder.set_pledged_src_size(Some(new.len() as u64))?;
    encoder.write_all(new)?;
    encoder.finish()
}

/// Applies a patch. The result has at most `limit` bytes, which also bounds memory: the frame
/// states the length of its content, and the result itself serves as the window.
pub fn apply_patch(old: &[u8], patch: &[u8], limit: usize) -> io::Result<Vec<u8>> {
    let Ok(Some(length)) = get_frame_content_size(patch) else {
        let problem = "the frame does not contain its content's length";
        return Err(io::Error::other(problem));
    };
    let length = match usize::try_from(length) {
        Ok(length) if length <= limit => length,
        _ => {
            let problem = format!("the patched file is longer than {limit} bytes");
            return Err(io::Error::other(problem));
        }
    };
    let mut context = DCtx::create();
    // The old version is not copied.
    context.ref_prefix(old).map_err(zstd_error)?;
    let mut new = Vec::with_capacity(length);
    context.decompress(&mut new, patch).map_err(zstd_error)?;
    Ok(new)
}

fn zstd_error(code: usize) -> io::Error {
    io::Error::other(zstd::zstd_safe::get_error_name(code))
}

/// Returns the smallest window that holds `bytes` bytes, as a power of two.
fn window(bytes: usize) -> u32 {
    let needed = usize::BITS - bytes.leading_zeros();
    // A larger window would have to be allowed explicitly by whoever decompresses.
    needed.clamp(*WINDOW.start(), *WINDOW.end())
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
        for text in [
            SHA1,
            &format!("sha1:{SHA1}"),
            SHA256,
            SHA512,
            &SHA256.to_uppercase().replace("SHA", "sha"),
        ] {
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
        for bad in [
            "",
            "md5:900150983cd24fb0d6963f7d28e17f72",
            "sha256:12",
            "xyz",
        ] {
            assert!(MultiDigest::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn small_change_makes_a_small_patch() {
        let old: String = (0..10_000)
            .map(|number| format!("[\"{:x}\",\"10.0.{number}\"],", fastrand::u128(..)))
            .collect();
        let new = old.replacen("10.0.5000", "10.9.5000", 1);
        let patch = make_patch(old.as_bytes(), new.as_bytes()).unwrap();
        assert!(
            patch.len() * 100 < new.len(),
            "{} of {}",
            patch.len(),
            new.len()
        );
        assert_eq!(
            apply_patch(old.as_bytes(), &patch, new.len()).unwrap(),
            new.as_bytes()
        );
        assert!(apply_patch(old.as_bytes(), &patch, new.len() - 1).is_err());
    }

    #[test]
    fn unfit_patches_never_pass() {
        let old = b"abcdefgh".repeat(500);
        let new = b"abcdefgi".repeat(500);
        let patch = make_patch(&old, &new).unwrap();
        let on_another = apply_patch(&b"hgfedcba".repeat(500), &patch, 1 << 20);
        assert!(on_another.is_err() || on_another.is_ok_and(|bytes| bytes != new));
        assert!(apply_patch(&old, &patch[..patch.len() / 2], 1 << 20).is_err());
        assert!(apply_patch(&old, b"no patch", 1 << 20).is_err());
        assert_eq!(
            apply_patch(b"", &make_patch(b"", b"").unwrap(), 0).unwrap(),
            b""
        );
    }

    #[test]
    fn bombs_are_refused() {
        let bomb = make_patch(b"", &vec![0; 300 << 20]).unwrap();
        assert!(bomb.len() < 100_000, "{}", bomb.len());
        let error = apply_patch(b"", &bomb, 1 << 20).unwrap_err();
        assert!(
            error.to_string().contains("longer than 1048576 bytes"),
            "{error}"
        );
        // A frame that does not state its content's length is not decompressed.
        let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), LEVEL).unwrap();
        encoder.write_all(&[0; 1000]).unwrap();
        assert!(apply_patch(b"", &encoder.finish().unwrap(), 1 << 20).is_err());
    }

    #[test]
    fn windows_hold_both_versions() {
        for (bytes, log) in [
            (0, 10),
            (1023, 10),
            (1024, 11),
            (1 << 20, 21),
            ((1 << 27) - 1, 27),
            (1 << 27, 27),
            (usize::MAX, 27),
        ] {
            assert_eq!(window(bytes), log, "{bytes}");
        }
        let own = sha256(b"x");
        assert!(is_sha256(&own));
        for other in [
            own.to_ascii_uppercase(),
            own.replace("sha256:", "sha1:"),
            own.replace("sha256:", ""),
            own[..own.len() - 1].to_owned(),
            format!("{own}0"),
            format!("{}g", &own[..own.len() - 1]),
        ] {
            assert!(!is_sha256(&other), "{other}");
        }
    }

    #[test]
    fn patched_file_may_be_as_long_as_the_limit() {
        let (old, new) = (b"old".repeat(100), b"new".repeat(200));
        let patch = make_patch(&old, &new).unwrap();
        assert_eq!(apply_patch(&old, &patch, new.len()).unwrap(), new);
        let error = apply_patch(&old, &patch, new.len() - 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the patched file is longer than 599 bytes"
        );
    }

    #[test]
    fn first_of_equal_strength_counts() {
        let other = SHA256.replace("ba78", "ab87");
        let first = MultiDigest::parse(&format!("{SHA256};{other}")).unwrap();
        assert_eq!(first.verify(b"abc"), Ok(()));
        let first = MultiDigest::parse(&format!(" {other} ; {SHA256}")).unwrap();
        assert_eq!(
            first.verify(b"abc").unwrap_err().to_string(),
            format!(
                "the digest of the blob is {}, but {} was announced",
                &SHA256["sha256:".len()..],
                &other["sha256:".len()..]
            )
        );
    }
}
