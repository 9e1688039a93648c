//! AWS Signature Version 4. Pure.
//!
//! The crate `aws-sigv4` would add the runtime of AWS's SDK as a dependency; the scheme itself is a
//! hash over seven lines.

use hmac::{Hmac, KeyInit as _, Mac as _};
use ring::digest;
use sha2::Sha256;

/// Keys of an AWS account or role.
#[derive(Clone)]
pub struct Credentials {
    /// Access key id of the account.
    pub key_id: String,
    /// Secret access key, never logged.
    pub secret: String,
    /// Session token of temporary credentials.
    pub token: Option<String>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Credentials({})", self.key_id)
    }
}

/// Service and region covered by a signature.
#[derive(Debug, Clone)]
pub(super) struct Scope {
    pub(super) region: String,
    pub(super) service: &'static str,
}

pub(super) struct Request<'a> {
    pub(super) method: &'a str,
    pub(super) path: &'a str,
    pub(super) query: &'a [(&'a str, &'a str)],
    /// Headers in lower case, including `host`.
    pub(super) headers: &'a [(&'a str, &'a str)],
    pub(super) body: &'a [u8],
}

/// Returns the headers that sign a request at `time` (`YYYYMMDDThhmmssZ`).
pub(super) fn sign(
    request: &Request<'_>,
    credentials: &Credentials,
    scope: &Scope,
    time: &str,
) -> Vec<(&'static str, String)> {
    let mut headers: Vec<(&str, &str)> = request.headers.to_vec();
    headers.push(("x-amz-date", time));
    if let Some(token) = &credentials.token {
        headers.push(("x-amz-security-token", token));
    }
    headers.sort_unstable();
    let names: Vec<&str> = headers.iter().map(|(name, _)| *name).collect();
    let names = names.join(";");
    let lines: String = headers.iter().map(|(name, value)| format!("{name}:{}\n", value.trim())).collect();
    let canonical = format!(
        "{}\n{}\n{}\n{lines}\n{names}\n{}",
        request.method,
        request.path,
        encode_query(request.query),
        hex_hash(request.body)
    );
    let date = time.get(..8).unwrap_or(time);
    let Scope { region, service } = scope;
    let scope = format!("{date}/{region}/{service}/aws4_request");
    let text = format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{}", hex_hash(canonical.as_bytes()));
    let mut key = mac(format!("AWS4{}", credentials.secret).as_bytes(), date);
    for part in [region.as_str(), service, "aws4_request"] {
        key = mac(&key, part);
    }
    let signature = hex(&mac(&key, &text));
    let authorization = format!(
        "AWS4-HMAC-SHA256 Credential={}/{scope}, SignedHeaders={names}, Signature={signature}",
        credentials.key_id
    );
    let mut signed = vec![("x-amz-date", time.to_owned()), ("authorization", authorization)];
    signed.extend(credentials.token.clone().map(|token| ("x-amz-security-token", token)));
    signed
}

/// Encodes parameters, sorted by name.
pub(super) fn encode_query(query: &[(&str, &str)]) -> String {
    let mut pairs: Vec<String> =
        query.iter().map(|(name, value)| format!("{}={}", encode(name), encode(value))).collect();
    pairs.sort_unstable();
    pairs.join("&")
}

/// Percent-encodes all but unreserved characters (RFC 3986, section 2.3).
fn encode(text: &str) -> String {
    let octet = |octet: u8| match octet {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(octet).to_string(),
        _ => format!("%{octet:02X}"),
    };
    text.bytes().map(octet).collect()
}

fn hex_hash(octets: &[u8]) -> String {
    hex(digest::digest(&digest::SHA256, octets).as_ref())
}

fn hex(octets: &[u8]) -> String {
    octets.iter().map(|octet| format!("{octet:02x}")).collect()
}

#[expect(clippy::expect_used, reason = "HMAC takes keys of every length (RFC 2104)")]
fn mac(key: &[u8], text: &str) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of every length");
    mac.update(text.as_bytes());
    mac.finalize().into_bytes().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signature(request: &Request<'_>, service: &'static str) -> String {
        let credentials = Credentials {
            key_id: "AKIDEXAMPLE".to_owned(),
            secret: "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY".to_owned(),
            token: None,
        };
        let scope = Scope { region: "us-east-1".to_owned(), service };
        let headers = sign(request, &credentials, &scope, "20150830T123600Z");
        headers[1].1.rsplit('=').next().unwrap().to_owned()
    }

    /// `get-vanilla` of AWS's test suite.
    #[test]
    fn vanilla_request_matches_vector() {
        let headers = [("host", "example.amazonaws.com")];
        let request = Request { method: "GET", path: "/", query: &[], headers: &headers, body: b"" };
        let expected = "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31";
        assert_eq!(signature(&request, "service"), expected);
    }

    /// The example of AWS's General Reference.
    #[test]
    fn query_matches_documented_example() {
        let headers = [
            ("content-type", "application/x-www-form-urlencoded; charset=utf-8"),
            ("host", "iam.amazonaws.com"),
        ];
        let query = [("Version", "2010-05-08"), ("Action", "ListUsers")];
        let request = Request { method: "GET", path: "/", query: &query, headers: &headers, body: b"" };
        let expected = "5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7";
        assert_eq!(signature(&request, "iam"), expected);
    }
}
