//! Paths and signatures of a director's WebDAV blobstore.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use ring::{digest, hmac};

/// Returns the path `<first byte of sha1(blob id) as two hexadecimal digits>/<blob id>`.
pub fn path(blob: &str) -> String {
    let hash = digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, blob.as_bytes());
    format!("{:02x}/{blob}", hash.as_ref()[0])
}

/// Returns `signed/<path>?e=<seconds>&st=<signature>&ts=<unix time>`: a GET that is valid for
/// `seconds` from `now`.
pub fn signed_path(secret: &str, blob: &str, now: u64, seconds: u64) -> String {
    let path = path(blob);
    let signature = signature(secret, &path, now, seconds);
    format!("signed/{path}?e={seconds}&st={signature}&ts={now}")
}

/// Returns the unpadded base64url of HMAC-SHA256 over method, path, time and duration.
fn signature(secret: &str, path: &str, now: u64, seconds: u64) -> String {
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
    URL_SAFE_NO_PAD.encode(hmac::sign(&key, format!("GET{path}{now}{seconds}").as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_begins_with_the_hash_of_the_id() {
        // sha1("abc") begins with a9.
        assert_eq!(path("abc"), "a9/abc");
    }

    #[test]
    fn a_signature_is_golden() {
        // printf GETa9/abc1700000000900 | openssl dgst -sha256 -hmac secret -binary | basenc --base64url
        assert_eq!(
            signed_path("secret", "abc", 1_700_000_000, 900),
            "signed/a9/abc?e=900&st=U6ru7hxdGD515dgIX0hCDSDNBJbFNsRlEdbNlP1nuQA&ts=1700000000"
        );
    }
}
