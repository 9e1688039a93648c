//! AWS Signature Version 4: requests signed by headers, and signed URLs.
//!
//! The crate `aws-sigv4` would add the runtime of AWS's SDK as a dependency; the scheme itself is a hash over seven
//! lines.

use std::{
    fmt,
    time::{Duration, SystemTime},
};

use ring::{digest, hmac};
use time::{OffsetDateTime, format_description::BorrowedFormatItem, macros::format_description};
use url::{Position, Url};

use crate::{hex, percent_encoded};

const ALGORITHM: &str = "AWS4-HMAC-SHA256";

const TIME: &[BorrowedFormatItem<'_>] =
    format_description!("[year][month][day]T[hour][minute][second]Z");

/// Keys of an AWS account or role; `Debug` omits the secret.
#[derive(Clone)]
pub struct Credentials {
    /// Access key id of the account.
    pub key_id: String,
    /// Secret access key, never logged.
    pub secret: String,
    /// Session token of temporary credentials.
    pub token: Option<String>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Credentials({})", self.key_id)
    }
}

/// The key of a signature, which is valid for one service in one region on one day.
pub struct Signer<'a> {
    credentials: &'a Credentials,
    region: &'a str,
    service: &'a str,
    /// Time of signing, as `YYYYMMDDThhmmssZ`.
    time: String,
}

impl<'a> Signer<'a> {
    /// Creates a signer of requests that are sent at `now`.
    pub fn new(
        credentials: &'a Credentials,
        region: &'a str,
        service: &'a str,
        now: SystemTime,
    ) -> Self {
        // A clock beyond the year 9999 signs for 1970, which every service rejects.
        let since_1970 = now
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let now = OffsetDateTime::from_unix_timestamp(since_1970.as_secs().cast_signed())
            .unwrap_or(OffsetDateTime::UNIX_EPOCH);
        Self {
            credentials,
            region,
            service,
            time: now.format(TIME).unwrap_or_default(),
        }
    }

    /// Returns the headers that sign a request with its `headers`, whose names are in lower case.
    pub fn headers(
        &self,
        method: &str,
        path: &str,
        query: &[(&str, &str)],
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Vec<(&'static str, String)> {
        let mut headers = headers.to_vec();
        headers.push(("x-amz-date", &self.time));
        if let Some(token) = &self.credentials.token {
            headers.push(("x-amz-security-token", token));
        }
        // The canonical request lists headers by name.
        headers.sort_unstable();
        let names: Vec<&str> = headers.iter().map(|(name, _)| *name).collect();
        let names = names.join(";");
        let mut lines = String::new();
        for (name, value) in headers {
            lines.push_str(&format!("{name}:{}\n", value.trim()));
        }
        let query = encode_query(query);
        let body = hash(body);
        let canonical = format!("{method}\n{path}\n{query}\n{lines}\n{names}\n{body}");
        let authorization = format!(
            "{ALGORITHM} Credential={}, SignedHeaders={names}, Signature={}",
            self.key_scope(),
            self.signature(&canonical)
        );
        let mut signed = vec![
            ("x-amz-date", self.time.clone()),
            ("authorization", authorization),
        ];
        if let Some(token) = &self.credentials.token {
            signed.push(("x-amz-security-token", token.clone()));
        }
        signed
    }

    /// Returns a URL that gives everybody access for a time. `url` must have no query.
    pub fn url(&self, method: &str, mut url: Url, good_for: Duration) -> Url {
        let expires = good_for.as_secs().to_string();
        let credential = self.key_scope();
        let mut query = vec![
            ("X-Amz-Algorithm", ALGORITHM),
            ("X-Amz-Credential", &credential),
            ("X-Amz-Date", &self.time),
            ("X-Amz-Expires", &expires),
            ("X-Amz-SignedHeaders", "host"),
        ];
        if let Some(token) = &self.credentials.token {
            query.push(("X-Amz-Security-Token", token));
        }
        let query = encode_query(&query);
        // As clients send it in `Host`: the usual port of the scheme is left out.
        let host = &url[Position::BeforeHost..Position::AfterPort];
        let canonical = format!(
            // Who signs a URL does not know the body that will be sent to it.
            "{method}\n{}\n{query}\nhost:{host}\n\nhost\nUNSIGNED-PAYLOAD",
            url.path()
        );
        let signature = self.signature(&canonical);
        url.set_query(Some(&format!("{query}&X-Amz-Signature={signature}")));
        url
    }

    /// Returns what the key signs: day, region and service.
    fn scope(&self) -> String {
        let day = self.time.get(..8).unwrap_or_default();
        format!("{day}/{}/{}/aws4_request", self.region, self.service)
    }

    fn key_scope(&self) -> String {
        format!("{}/{}", self.credentials.key_id, self.scope())
    }

    fn signature(&self, canonical: &str) -> String {
        let scope = self.scope();
        let text = format!(
            "{ALGORITHM}\n{}\n{scope}\n{}",
            self.time,
            hash(canonical.as_bytes())
        );
        let mut key = format!("AWS4{}", self.credentials.secret).into_bytes();
        // A key for each of day, region, service and `aws4_request`: the last one signs nothing
        // outside this scope.
        for part in scope.split('/') {
            key = mac(&key, part);
        }
        hex(&mac(&key, &text))
    }
}

/// Encodes parameters, sorted by name.
pub fn encode_query(query: &[(&str, &str)]) -> String {
    let mut pairs = Vec::with_capacity(query.len());
    for (name, value) in query {
        pairs.push(format!(
            "{}={}",
            percent_encoded(name),
            percent_encoded(value)
        ));
    }
    // In the encoded form, as Signature Version 4 sorts parameters.
    pairs.sort_unstable();
    pairs.join("&")
}

fn hash(octets: &[u8]) -> String {
    hex(digest::digest(&digest::SHA256, octets).as_ref())
}

fn mac(key: &[u8], text: &str) -> Vec<u8> {
    let key = hmac::Key::new(hmac::HMAC_SHA256, key);
    hmac::sign(&key, text.as_bytes()).as_ref().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Signs a GET of `/` at 2015-08-30 12:36:00 UTC.
    fn signature(service: &str, query: &[(&str, &str)], headers: &[(&str, &str)]) -> String {
        let credentials = Credentials {
            key_id: "AKIDEXAMPLE".to_owned(),
            secret: "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY".to_owned(),
            token: None,
        };
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_440_938_160);
        let signer = Signer::new(&credentials, "us-east-1", service, now);
        let headers = signer.headers("GET", "/", query, headers, b"");
        headers[1].1.rsplit('=').next().unwrap().to_owned()
    }

    /// `get-vanilla` of AWS's test suite.
    #[test]
    fn vanilla_request_matches_vector() {
        let headers = [("host", "example.amazonaws.com")];
        let expected = "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31";
        assert_eq!(signature("service", &[], &headers), expected);
    }

    /// The example of AWS's General Reference.
    #[test]
    fn query_matches_documented_example() {
        let headers = [
            (
                "content-type",
                "application/x-www-form-urlencoded; charset=utf-8",
            ),
            ("host", "iam.amazonaws.com"),
        ];
        let query = [("Version", "2010-05-08"), ("Action", "ListUsers")];
        let expected = "5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7";
        assert_eq!(signature("iam", &query, &headers), expected);
    }

    #[test]
    fn clocks_out_of_range_sign_for_1970() {
        let credentials = Credentials {
            key_id: "K".to_owned(),
            secret: "S".to_owned(),
            token: None,
        };
        let late = SystemTime::UNIX_EPOCH + Duration::from_secs(300_000_000_000);
        let early = SystemTime::UNIX_EPOCH - Duration::from_secs(1);
        for now in [late, early] {
            let signer = Signer::new(&credentials, "r", "s", now);
            assert_eq!(signer.time, "19700101T000000Z");
        }
    }

    #[test]
    fn secrets_are_not_shown() {
        let credentials = Credentials {
            key_id: "AKID".to_owned(),
            secret: "hidden".to_owned(),
            token: Some("hidden".to_owned()),
        };
        assert_eq!(format!("{credentials:?}"), "Credentials(AKID)");
    }

    #[test]
    fn credential_names_key_and_scope() {
        let credentials = Credentials {
            key_id: "KEY".to_owned(),
            secret: "S".to_owned(),
            token: None,
        };
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_440_938_160);
        let signer = Signer::new(&credentials, "us-east-1", "iam", now);
        let headers = signer.headers("GET", "/", &[], &[("host", "h")], b"");
        let expected = "Credential=KEY/20150830/us-east-1/iam/aws4_request, ";
        assert!(headers[1].1.contains(expected), "{}", headers[1].1);
    }
}
