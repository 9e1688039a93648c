//! Patches: a dataset compressed with zstd, the version before it as the dictionary.

use std::io::{self, Read, Write};

use zstd::stream::raw::{CParameter, DParameter};

/// Level of the compression: beyond it a patch of one instance gains nothing (measured).
const LEVEL: i32 = 3;

/// Smallest and greatest window, as powers of two, that zstd takes without being asked twice.
const WINDOW: std::ops::RangeInclusive<u32> = 10..=27;

/// Makes the patch from one version to another.
pub fn make(old: &[u8], new: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = zstd::stream::write::Encoder::with_ref_prefix(Vec::new(), LEVEL, old)?;
    encoder.set_parameter(CParameter::WindowLog(window(old.len() + new.len())))?;
    // Matches far back in the old version are what a patch is made of.
    encoder.set_parameter(CParameter::EnableLongDistanceMatching(true))?;
    encoder.set_pledged_src_size(Some(new.len() as u64))?;
    encoder.write_all(new)?;
    encoder.finish()
}

/// Applies a patch; the result may not be longer than `limit` bytes.
pub fn apply(old: &[u8], patch: &[u8], limit: usize) -> io::Result<Vec<u8>> {
    let mut decoder = zstd::stream::read::Decoder::with_ref_prefix(patch, old)?;
    decoder.set_parameter(DParameter::WindowLogMax(*WINDOW.end()))?;
    let mut new = Vec::with_capacity(old.len().min(limit));
    decoder.take(limit as u64 + 1).read_to_end(&mut new)?;
    if new.len() > limit {
        return Err(io::Error::other(format!("the patched file is longer than {limit} bytes")));
    }
    Ok(new)
}

/// A window that holds so many bytes.
fn window(bytes: usize) -> u32 {
    let needed = usize::BITS - bytes.leading_zeros();
    needed.clamp(*WINDOW.start(), *WINDOW.end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_of_one_instance_is_small_and_exact() {
        let old: String =
            (0..10_000).map(|number| format!("[\"{:x}\",\"10.0.{number}\"],", fastrand::u128(..))).collect();
        let new = old.replacen("10.0.5000", "10.9.5000", 1);
        let patch = make(old.as_bytes(), new.as_bytes()).unwrap();
        assert!(patch.len() * 100 < new.len(), "{} of {}", patch.len(), new.len());
        assert_eq!(apply(old.as_bytes(), &patch, new.len()).unwrap(), new.as_bytes());
        assert!(apply(old.as_bytes(), &patch, new.len() - 1).is_err());
    }

    #[test]
    fn what_does_not_fit_is_an_error_or_other_bytes() {
        let (old, new) = (b"abcdefgh".repeat(500), b"abcdefgi".repeat(500));
        let patch = make(&old, &new).unwrap();
        let on_another = apply(&b"hgfedcba".repeat(500), &patch, 1 << 20);
        assert!(on_another.is_err() || on_another.is_ok_and(|bytes| bytes != new));
        assert!(apply(&old, &patch[..patch.len() / 2], 1 << 20).is_err());
        assert!(apply(&old, b"no patch", 1 << 20).is_err());
        assert_eq!(apply(b"", &make(b"", b"").unwrap(), 0).unwrap(), b"");
    }
}
