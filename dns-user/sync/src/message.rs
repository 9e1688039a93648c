//! Messages on the bus: calls, replies and subjects, byte for byte as a BOSH director and its
//! agents use them.

use dns_kit::foreign::printable;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::digest;

/// Version of the director's protocol.
const PROTOCOL: u8 = 3;

/// Second token of the subject on which agents send unsolicited reports; no director listens there.
pub(crate) const ASK: &str = "bosh-dns-sync";

/// Prefix of the second token of our publishers' reply subjects. It shows our agents that the caller reads a
/// [`Report`] in the reply; a director gets the reply it expects.
pub(crate) const OURS: &str = "bosh-dns-sync-";

/// Method of announcements with a signed link.
pub(crate) const SIGNED_METHOD: &str = "sync_dns_with_signed_url";

pub(crate) fn agent_subject(agent: &str) -> String {
    format!("agent.{agent}")
}

/// Returns the subject to which an agent replies: `director.<process>.<agent>.<request>`.
pub(crate) fn reply_subject(process: &str, agent: &str, request: &str) -> String {
    format!("director.{process}.{agent}.{request}")
}

/// Parses agent and request from a reply subject.
pub(crate) fn read_reply_subject(subject: &str) -> Option<(&str, &str)> {
    let mut tokens = subject.split('.');
    let first = tokens.next()?;
    let _process = tokens.next()?;
    let agent = tokens.next()?;
    let request = tokens.next()?;
    (first == "director" && tokens.next().is_none()).then_some((agent, request))
}

/// Returns whether one of our publishers reads the replies on this subject.
pub(crate) fn wants_report(reply_to: &str) -> bool {
    reply_to
        .strip_prefix("director.")
        .is_some_and(|rest| rest.starts_with(OURS))
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Announcement {
    pub source: BlobLocation,
    /// One or more digests of the blob.
    pub digest: String,
    /// Version of the dataset; 0 requests a report from an agent and changes nothing.
    pub version: u64,
    /// Sent to our agents only.
    pub extra: Option<Extra>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BlobLocation {
    /// Id in the blobstore configured in the agent: `sync_dns`.
    Blob(String),
    /// A URL that needs no credentials: `sync_dns_with_signed_url`.
    Signed {
        url: String,
        /// Headers that the store requires.
        headers: Map<String, Value>,
    },
}

/// Extra argument for our agents.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Extra {
    /// Patch from an older version to the announced one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patch: Option<Patch>,
    /// Period over which the fleet's downloads of the whole blob are spread, in milliseconds.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub spread_ms: u64,
    /// Length of the blob in bytes; bounds download and decompression.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub size: u64,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde asks for a reference"
)]
fn is_zero(value: &u64) -> bool {
    *value == 0
}

/// A compressed difference between two versions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Patch {
    /// Version that the patch applies to.
    pub from: u64,
    /// Base64 of the zstd frame.
    pub zstd: String,
}

/// State of an agent's file, as our agents report it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Version of the file; 0 without a usable file.
    pub version: u64,
    /// `sha256:<hex>` of the file; `None` without a usable file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Whether the agent applies patches.
    #[serde(default)]
    pub patches: bool,
}

impl Report {
    /// Parses the body of an unsolicited report. Returns `None` if it is malformed.
    pub(crate) fn read(body: &[u8]) -> Option<Self> {
        Self::of(&serde_json::from_slice(body).ok()?)
    }

    fn of(value: &Value) -> Option<Self> {
        let report: Self = serde_json::from_value(value.clone()).ok()?;
        // The digest is shown to operators and compared with ours, so nothing else may stand there.
        let good = report.digest.as_deref().is_none_or(digest::is_sha256);
        (good && report.version <= crate::dataset::LAST_VERSION).then_some(report)
    }

    /// Serialises the report for an unsolicited message.
    pub(crate) fn write(&self) -> Vec<u8> {
        // Strings and numbers always serialise.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// The body of a call, its members in the director's order.
#[derive(Serialize)]
struct MethodCall<'a> {
    protocol: u8,
    method: &'a str,
    arguments: Vec<Argument<'a>>,
    reply_to: &'a str,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Argument<'a> {
    Text(&'a str),
    Number(u64),
    /// The object of `sync_dns_with_signed_url`.
    Signed(SignedArgument<'a>),
    Extra(&'a Extra),
}

#[derive(Serialize)]
struct SignedArgument<'a> {
    signed_url: &'a str,
    multi_digest: &'a str,
    version: u64,
    #[serde(skip_serializing_if = "Map::is_empty")]
    blobstore_headers: &'a Map<String, Value>,
}

impl Announcement {
    /// Returns the call as JSON.
    pub(crate) fn write(&self, reply_to: &str) -> Vec<u8> {
        let Self {
            source,
            digest,
            version,
            extra,
        } = self;
        let (method, mut arguments) = match source {
            BlobLocation::Blob(id) => (
                "sync_dns",
                vec![
                    Argument::Text(id),
                    Argument::Text(digest),
                    Argument::Number(*version),
                ],
            ),
            BlobLocation::Signed { url, headers } => (
                SIGNED_METHOD,
                vec![Argument::Signed(SignedArgument {
                    signed_url: url,
                    multi_digest: digest,
                    version: *version,
                    blobstore_headers: headers,
                })],
            ),
        };
        // For our agents only: BOSH's ignore a surplus argument, but log it as an error.
        arguments.extend(extra.as_ref().map(Argument::Extra));
        let call = MethodCall {
            protocol: PROTOCOL,
            method,
            arguments,
            reply_to,
        };
        // Strings and numbers always serialise.
        serde_json::to_vec(&call).unwrap_or_default()
    }
}

/// A call as received by an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Received {
    pub reply_to: String,
    /// The announcement, or the exception to return.
    pub call: Result<Announcement, CallError>,
}

/// A call that an agent cannot execute; the text is the reply's exception.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CallError {
    #[error("unknown message {0}")]
    UnknownMethod(String),
    #[error("sync_dns: the arguments must be a blob id, a digest and a version")]
    SyncDns,
    #[error("sync_dns: the version must be a number of 0 to 9007199254740991")]
    Version,
    #[error(
        "sync_dns: the blob id must be a plain name: letters, digits, `-`, `_` and `.`, 128 at most"
    )]
    BlobName,
    #[error(
        "sync_dns_with_signed_url: the argument must be an object with signed_url, multi_digest, version"
    )]
    SyncDnsWithSignedUrl,
}

/// Members common to all calls.
#[derive(Deserialize)]
struct AnyCall {
    #[serde(default)]
    method: String,
    #[serde(default)]
    arguments: Vec<Value>,
    #[serde(default)]
    reply_to: String,
}

/// Parses a call. Returns `None` for malformed JSON or a missing reply subject; the agent does not
/// reply then.
pub(crate) fn read_call(body: &[u8]) -> Option<Received> {
    let AnyCall {
        method,
        arguments,
        reply_to,
    } = serde_json::from_slice(body).ok()?;
    // Without a subject there is nowhere to say what is wrong.
    if reply_to.is_empty() {
        return None;
    }
    let call = match method.as_str() {
        "sync_dns" => read_sync_dns(&arguments),
        SIGNED_METHOD => read_signed(&arguments),
        other => Err(CallError::UnknownMethod(printable(other))),
    };
    Some(Received { reply_to, call })
}

fn read_sync_dns(arguments: &[Value]) -> Result<Announcement, CallError> {
    let [
        Value::String(blob),
        Value::String(digest),
        version,
        rest @ ..,
    ] = arguments
    else {
        return Err(CallError::SyncDns);
    };
    // Above it, numbers of JSON are not exact everywhere (RFC 8259, section 6).
    let version = version
        .as_u64()
        .filter(|version| *version <= crate::dataset::LAST_VERSION);
    let version = version.ok_or(CallError::Version)?;
    // Version 0 fetches nothing.
    if version > 0 && !is_plain_name(blob) {
        return Err(CallError::BlobName);
    }
    let source = BlobLocation::Blob(blob.clone());
    Ok(Announcement {
        source,
        digest: digest.clone(),
        version,
        extra: read_extra(rest),
    })
}

fn read_signed(arguments: &[Value]) -> Result<Announcement, CallError> {
    #[derive(Deserialize)]
    struct Link {
        signed_url: String,
        multi_digest: String,
        version: u64,
        #[serde(default)]
        blobstore_headers: Value,
    }

    let [argument @ Value::Object(_), rest @ ..] = arguments else {
        return Err(CallError::SyncDnsWithSignedUrl);
    };
    let Link {
        signed_url: url,
        multi_digest: digest,
        version,
        blobstore_headers,
    } = Link::deserialize(argument).map_err(|_| CallError::SyncDnsWithSignedUrl)?;
    // As in `sync_dns`: a report of a higher version would be malformed, and the agent would never
    // count as synced.
    if version > crate::dataset::LAST_VERSION {
        return Err(CallError::Version);
    }
    let headers = match blobstore_headers {
        Value::Object(headers) => headers,
        // Only some stores need headers, and directors leave the member out otherwise.
        _ => Map::new(),
    };
    Ok(Announcement {
        source: BlobLocation::Signed { url, headers },
        digest,
        version,
        extra: read_extra(rest),
    })
}

/// Returns our extra argument if present and well-formed; other surplus arguments are ignored.
fn read_extra(rest: &[Value]) -> Option<Extra> {
    // Later versions of the protocol may have arguments of their own there.
    serde_json::from_value(rest.first()?.clone()).ok()
}

fn is_plain_name(text: &str) -> bool {
    // It becomes part of a path, in a folder or a URL.
    (1..=128).contains(&text.len())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
        && !text.starts_with('.')
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// The agent has the announced version or a higher one. A BOSH agent does not report which one.
    Synced(Option<Report>),
    /// Reason of a failure, outermost cause first.
    Exception(String),
}

/// Reply of our agent to our publisher.
#[derive(Serialize)]
struct Synced<'a> {
    value: &'static str,
    #[serde(flatten)]
    report: &'a Report,
}

impl Reply {
    pub(crate) fn write(&self) -> Vec<u8> {
        match self {
            Self::Synced(None) => br#"{"value":"synced"}"#.to_vec(),
            // Strings and numbers always serialise.
            Self::Synced(Some(report)) => serde_json::to_vec(&Synced {
                value: "synced",
                report,
            })
            .unwrap_or_default(),
            Self::Exception(message) => serde_json::json!({ "exception": { "message": message } })
                .to_string()
                .into_bytes(),
        }
    }

    /// Parses a reply; a malformed one counts as an exception.
    pub(crate) fn read(body: &[u8]) -> Self {
        let reply: Value = serde_json::from_slice(body).unwrap_or_default();
        if reply.get("value").and_then(Value::as_str) == Some("synced") {
            return match reply.get("version") {
                // A BOSH agent: the word is all that it says.
                None => Self::Synced(None),
                Some(_) => match Report::of(&reply) {
                    Some(report) => Self::Synced(Some(report)),
                    None => {
                        Self::Exception("the reply's version or digest is malformed".to_owned())
                    }
                },
            };
        }
        let message = reply.pointer("/exception/message").and_then(Value::as_str);
        Self::Exception(printable(
            message.unwrap_or("the reply is neither `synced` nor an exception"),
        ))
    }
}

#[cfg(test)]
mod tests {
    use dns_kit::foreign::MAX_TEXT;

    use super::*;

    const REPLY_TO: &str = "director.p.a.r";

    /// Returns an announcement of version 42.
    fn announcement(source: BlobLocation, extra: Option<Extra>) -> Announcement {
        Announcement {
            source,
            digest: "sha256:00ff".to_owned(),
            version: 42,
            extra,
        }
    }

    #[test]
    fn calls_round_trip() {
        let blob = BlobLocation::Blob("blob-1".to_owned());
        let headers = Map::from_iter([("x-k".to_owned(), Value::from("v"))]);
        let signed = |headers| BlobLocation::Signed {
            url: "https://b/s?x=1&y=2".to_owned(),
            headers,
        };
        let patch = Extra {
            patch: Some(Patch {
                from: 41,
                zstd: "AA==".to_owned(),
            }),
            spread_ms: 9,
            size: 0,
        };
        for (call, golden) in [
            (
                announcement(blob.clone(), None),
                r#"{"protocol":3,"method":"sync_dns","arguments":["blob-1","sha256:00ff",42],"reply_to":"director.p.a.r"}"#,
            ),
            (
                announcement(blob, Some(patch)),
                r#"{"protocol":3,"method":"sync_dns","arguments":["blob-1","sha256:00ff",42,{"patch":{"from":41,"zstd":"AA=="},"spread_ms":9}],"reply_to":"director.p.a.r"}"#,
            ),
            (
                announcement(signed(Map::new()), None),
                r#"{"protocol":3,"method":"sync_dns_with_signed_url","arguments":[{"signed_url":"https://b/s?x=1&y=2","multi_digest":"sha256:00ff","version":42}],"reply_to":"director.p.a.r"}"#,
            ),
            (
                announcement(signed(headers), None),
                r#"{"protocol":3,"method":"sync_dns_with_signed_url","arguments":[{"signed_url":"https://b/s?x=1&y=2","multi_digest":"sha256:00ff","version":42,"blobstore_headers":{"x-k":"v"}}],"reply_to":"director.p.a.r"}"#,
            ),
        ] {
            let written = call.write(REPLY_TO);
            assert_eq!(String::from_utf8(written.clone()).unwrap(), golden);
            assert_eq!(
                read_call(&written),
                Some(Received {
                    reply_to: REPLY_TO.to_owned(),
                    call: Ok(call)
                })
            );
        }
    }

    #[test]
    fn replies_round_trip() {
        let digest = digest::sha256(b"");
        let report = Report {
            version: 7,
            digest: Some(digest.clone()),
            patches: true,
        };
        let detailed =
            format!(r#"{{"value":"synced","version":7,"digest":"{digest}","patches":true}}"#);
        for (reply, golden) in [
            (Reply::Synced(None), r#"{"value":"synced"}"#),
            (Reply::Synced(Some(report)), &detailed),
            (
                Reply::Exception("a: b \"c\"".to_owned()),
                r#"{"exception":{"message":"a: b \"c\""}}"#,
            ),
        ] {
            assert_eq!(String::from_utf8(reply.write()).unwrap(), golden);
            assert_eq!(Reply::read(golden.as_bytes()), reply);
        }
        let bad_digest = r#"{"value":"synced","version":7,"digest":"sha256:12"}"#;
        let bad_version = r#"{"value":"synced","version":18446744073709551615}"#;
        for other in [
            "",
            "{}",
            r#"{"value":"sync"}"#,
            "[1]",
            bad_digest,
            bad_version,
        ] {
            assert!(
                matches!(Reply::read(other.as_bytes()), Reply::Exception(_)),
                "{other}"
            );
        }
    }

    #[test]
    fn foreign_text_is_printable() {
        let reply = Reply::read(br#"{"exception":{"message":"\u001b]0;owned\u0007\n\u001b[2J"}}"#);
        assert_eq!(
            reply,
            Reply::Exception(r"\u{1b}]0;owned\u{7}\n\u{1b}[2J".to_owned())
        );
        let longest = "x".repeat(MAX_TEXT);
        assert_eq!(printable(&longest), longest);
        for longer in [MAX_TEXT + 1, 10_000] {
            let cut = printable(&"x".repeat(longer));
            assert!(cut.starts_with(&longest), "{longer}");
            assert_eq!(cut.chars().count(), MAX_TEXT + 1, "{longer}");
        }
    }

    #[test]
    fn blob_ids_are_plain_names() {
        for id in [
            "../state.json",
            "/etc/passwd",
            "a/b",
            "",
            ".hidden",
            "a\u{0}b",
        ] {
            let body = serde_json::json!({"method": "sync_dns", "arguments": [id, "d", 1], "reply_to": "r"});
            let call = read_call(body.to_string().as_bytes()).unwrap().call;
            assert_eq!(call, Err(CallError::BlobName), "{id}");
        }
    }

    #[test]
    fn malformed_calls_are_refused() {
        assert_eq!(read_call(b"{"), None);
        assert_eq!(read_call(br#"{"method":"sync_dns"}"#), None);
        for body in [
            r#"{"method":"ping","reply_to":"r"}"#,
            r#"{"method":"sync_dns","arguments":["b","d"],"reply_to":"r"}"#,
            r#"{"method":"sync_dns","arguments":["b","d",-1],"reply_to":"r"}"#,
            r#"{"method":"sync_dns","arguments":["b","d",18446744073709551615],"reply_to":"r"}"#,
            r#"{"method":"sync_dns_with_signed_url","arguments":[{"signed_url":"u"}],"reply_to":"r"}"#,
            // 2^53: the agent's report of it would be malformed.
            r#"{"method":"sync_dns_with_signed_url","arguments":[{"signed_url":"u","multi_digest":"d","version":9007199254740992}],"reply_to":"r"}"#,
        ] {
            assert!(read_call(body.as_bytes()).unwrap().call.is_err(), "{body}");
        }
        let surplus = br#"{"method":"sync_dns","arguments":["b","d",1,"more",[2]],"reply_to":"r"}"#;
        assert_eq!(read_call(surplus).unwrap().call.unwrap().extra, None);
    }

    #[test]
    fn subjects_round_trip() {
        assert_eq!(
            read_reply_subject(&reply_subject("p", "a", "r")),
            Some(("a", "r"))
        );
        for other in ["director.p.a", "director.p.a.r.x", "agent.p.a.r"] {
            assert_eq!(read_reply_subject(other), None);
        }
    }

    #[test]
    fn texts_are_cut_at_their_limit() {
        for (length, is_cut) in [(MAX_TEXT, false), (MAX_TEXT + 1, true)] {
            let text = "ä".repeat(length);
            let expected = "ä".repeat(MAX_TEXT) + if is_cut { "…" } else { "" };
            assert_eq!(printable(&text), expected, "{length}");
        }
        for (text, expected) in [
            ("a\nb\u{7f}", r"a\nb\u{7f}"),
            ("\u{200d}\u{200e}\u{200f}", "\u{200d}\\u{200e}\\u{200f}"),
            (
                "a\u{2028}x\u{202e}\u{202f}b",
                "a\\u{2028}x\\u{202e}\u{202f}b",
            ),
        ] {
            assert_eq!(printable(text), expected);
        }
    }

    #[test]
    fn only_our_publisher_wants_reports() {
        for (reply_to, is_wanted) in [
            ("director.bosh-dns-sync-1.a.r", true),
            ("director.bosh-dns-sync.a.r", false),
            ("director.d1.bosh-dns-sync-1.r", false),
            ("x.director.bosh-dns-sync-1", false),
            ("bosh-dns-sync-1", false),
        ] {
            assert_eq!(wants_report(reply_to), is_wanted, "{reply_to}");
        }
        assert_eq!(agent_subject("a"), "agent.a");
        let subject = reply_subject("p", "a", "5-7");
        assert_eq!(read_reply_subject(&subject), Some(("a", "5-7")));
        for other in ["director.p.a", "director.p.a.r.x", "inbox.p.a.r", ""] {
            assert_eq!(read_reply_subject(other), None, "{other}");
        }
    }

    #[test]
    fn versions_and_names_have_limits() {
        let last = crate::dataset::LAST_VERSION;
        for (version, is_read) in [(0, true), (last, true), (last + 1, false)] {
            let body = format!(r#"{{"version":{version}}}"#);
            assert_eq!(
                Report::read(body.as_bytes()).is_some(),
                is_read,
                "{version}"
            );
            let call = format!(
                r#"{{"method":"sync_dns","arguments":["b","sha1:0",{version}],"reply_to":"r"}}"#
            );
            let call = read_call(call.as_bytes()).unwrap().call;
            assert_eq!(call.is_ok(), is_read, "{version}");
        }
        let longest = "x".repeat(128);
        for (name, is_plain) in [
            ("a", true),
            ("A-b_c.9", true),
            (longest.as_str(), true),
            (&(longest.clone() + "x"), false),
            ("", false),
            (".a", false),
            ("a/b", false),
            ("a b", false),
        ] {
            assert_eq!(is_plain_name(name), is_plain, "{name}");
            let call =
                format!(r#"{{"method":"sync_dns","arguments":["{name}","d",1],"reply_to":"r"}}"#);
            assert_eq!(read_call(call.as_bytes()).unwrap().call.is_ok(), is_plain);
            // Version 0 only asks for a report.
            let call = call.replace(",1]", ",0]");
            assert!(read_call(call.as_bytes()).unwrap().call.is_ok(), "{name}");
        }
        assert_eq!(read_call(br#"{"method":"sync_dns","reply_to":""}"#), None);
        let report = Report {
            version: 3,
            digest: None,
            patches: false,
        };
        assert_eq!(report.write(), br#"{"version":3,"patches":false}"#);
        assert_eq!(Report::read(&report.write()), Some(report));
        assert_eq!(Report::read(br#"{"version":3,"digest":"sha1:00"}"#), None);
    }
}
