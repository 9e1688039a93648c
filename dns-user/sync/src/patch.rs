//! Patches: a dataset compressed with zstd, with the previous version as dictionary.

use std::io::{self, Write};

use zstd::{
    stream::raw::CParameter,
    zstd_safe::{DCtx, get_frame_content_size},
};

/// Compression level; higher levels do not shrink a patch of one instance (measured).
const LEVEL: i32 = 3;

/// Window sizes that zstd accepts by default, as powers of two.
const WINDOW: std::ops::RangeInclusive<u32> = 10..=27;

/// Creates the patch from `old` to `new`.
pub fn make(old: &[u8], new: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = zstd::stream::write::Encoder::with_ref_prefix(Vec::new(), LEVEL, old)?;
    encoder.set_parameter(CParameter::WindowLog(window(old.len() + new.len())))?;
    // A patch consists mostly of matches far back in the old version.
    encoder.set_parameter(CParameter::EnableLongDistanceMatching(true))?;
    encoder.set_pledged_src_size(Some(new.len() as u64))?;
    encoder.write_all(new)?;
    encoder.finish()
}

/// Applies a patch. The result has at most `limit` bytes, which also bounds memory: the frame
/// states the length of its content, and the result itself serves as the window.
pub fn apply(old: &[u8], patch: &[u8], limit: usize) -> io::Result<Vec<u8>> {
    let length = match get_frame_content_size(patch) {
        Ok(Some(length)) => length,
        _ => return Err(io::Error::other("the frame does not contain its content's length")),
    };
    let length = usize::try_from(length).ok().filter(|length| *length <= limit);
    let length =
        length.ok_or_else(|| io::Error::other(format!("the patched file is longer than {limit} bytes")))?;
    let failed = |code| io::Error::other(zstd::zstd_safe::get_error_name(code));
    let mut context = DCtx::create();
    context.ref_prefix(old).map_err(failed)?;
    let mut new = Vec::with_capacity(length);
    context.decompress(&mut new, patch).map_err(failed)?;
    Ok(new)
}

/// Returns the smallest window that holds `bytes` bytes, as a power of two.
fn window(bytes: usize) -> u32 {
    let needed = usize::BITS - bytes.leading_zeros();
    needed.clamp(*WINDOW.start(), *WINDOW.end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_change_makes_a_small_patch() {
        let old: String =
            (0..10_000).map(|number| format!("[\"{:x}\",\"10.0.{number}\"],", fastrand::u128(..))).collect();
        let new = old.replacen("10.0.5000", "10.9.5000", 1);
        let patch = make(old.as_bytes(), new.as_bytes()).unwrap();
        assert!(patch.len() * 100 < new.len(), "{} of {}", patch.len(), new.len());
        assert_eq!(apply(old.as_bytes(), &patch, new.len()).unwrap(), new.as_bytes());
        assert!(apply(old.as_bytes(), &patch, new.len() - 1).is_err());
    }

    #[test]
    fn unfit_patches_never_pass() {
        let (old, new) = (b"abcdefgh".repeat(500), b"abcdefgi".repeat(500));
        let patch = make(&old, &new).unwrap();
        let on_another = apply(&b"hgfedcba".repeat(500), &patch, 1 << 20);
        assert!(on_another.is_err() || on_another.is_ok_and(|bytes| bytes != new));
        assert!(apply(&old, &patch[..patch.len() / 2], 1 << 20).is_err());
        assert!(apply(&old, b"no patch", 1 << 20).is_err());
        assert_eq!(apply(b"", &make(b"", b"").unwrap(), 0).unwrap(), b"");
    }

    #[test]
    fn bombs_are_refused() {
        let bomb = make(b"", &vec![0; 300 << 20]).unwrap();
        assert!(bomb.len() < 100_000, "{}", bomb.len());
        let error = apply(b"", &bomb, 1 << 20).unwrap_err();
        assert!(error.to_string().contains("longer than 1048576 bytes"), "{error}");
        // A frame that does not state its content's length is not decompressed.
        let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), LEVEL).unwrap();
        encoder.write_all(&[0; 1000]).unwrap();
        assert!(apply(b"", &encoder.finish().unwrap(), 1 << 20).is_err());
    }
}
