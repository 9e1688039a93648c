//! What goes over the bus: calls, replies, subjects, byte for byte as a director and its
//! agents have them.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Version of the protocol that a director names.
const PROTOCOL: u8 = 3;

/// Second token of the subject on which agents ask by themselves; no director listens there.
pub const ASK: &str = "bosh-dns-sync";

/// Subject on which an agent listens.
pub fn agent_subject(agent: &str) -> String {
    format!("agent.{agent}")
}

/// Subject to which an agent replies: `director.<process>.<agent>.<request>`.
pub fn reply_subject(process: &str, agent: &str, request: &str) -> String {
    format!("director.{process}.{agent}.{request}")
}

/// Agent and request of a subject that we listen on.
pub fn read_reply_subject(subject: &str) -> Option<(&str, &str)> {
    let mut tokens = subject.split('.');
    let (first, _process) = (tokens.next()?, tokens.next()?);
    let (agent, request) = (tokens.next()?, tokens.next()?);
    (first == "director" && tokens.next().is_none()).then_some((agent, request))
}

/// An announcement of a version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// Where the blob is.
    pub source: Source,
    /// Digest or digests of the blob.
    pub digest: String,
    /// Its version.
    pub version: u64,
    /// Ours alone: agents of a director ignore surplus arguments.
    pub extra: Option<Extra>,
}

/// Where a blob is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// In the blobstore that the agent knows, by its id: `sync_dns`.
    Blob(String),
    /// At an URL that needs nothing else: `sync_dns_with_signed_url`.
    Signed {
        /// The URL.
        url: String,
        /// Headers that the store needs.
        headers: Map<String, Value>,
    },
}

/// What we add for our own agents.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extra {
    /// How the new version comes out of an older one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patch: Option<Patch>,
    /// Milliseconds over which downloads of the whole blob are to be spread.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub spread_ms: u64,
}

/// Whether nothing is to be spread.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_zero(value: &u64) -> bool {
    *value == 0
}

/// A patch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Patch {
    /// Version that it belongs to.
    pub from: u64,
    /// Base64 of the zstd frame.
    pub zstd: String,
}

/// The body of a call; the order of the members is a director's.
#[derive(Serialize)]
struct Call<'a> {
    /// [`PROTOCOL`].
    protocol: u8,
    /// Name of the method.
    method: &'a str,
    /// Its arguments.
    arguments: Vec<Argument<'a>>,
    /// Subject for the reply.
    reply_to: &'a str,
}

/// One argument of a call.
#[derive(Serialize)]
#[serde(untagged)]
enum Argument<'a> {
    /// A text.
    Text(&'a str),
    /// The version.
    Number(u64),
    /// The object of `sync_dns_with_signed_url`.
    Signed(SignedArgument<'a>),
    /// Ours.
    Extra(&'a Extra),
}

/// The argument of `sync_dns_with_signed_url`.
#[derive(Serialize)]
struct SignedArgument<'a> {
    /// The URL.
    signed_url: &'a str,
    /// Digests.
    multi_digest: &'a str,
    /// Version.
    version: u64,
    /// Headers that the store needs.
    #[serde(skip_serializing_if = "Map::is_empty")]
    blobstore_headers: &'a Map<String, Value>,
}

impl Announcement {
    /// The body of the call.
    pub fn write(&self, reply_to: &str) -> Vec<u8> {
        let Self { source, digest, version, extra } = self;
        let (method, mut arguments) = match source {
            Source::Blob(id) => {
                ("sync_dns", vec![Argument::Text(id), Argument::Text(digest), Argument::Number(*version)])
            }
            Source::Signed { url, headers } => (
                "sync_dns_with_signed_url",
                vec![Argument::Signed(SignedArgument {
                    signed_url: url,
                    multi_digest: digest,
                    version: *version,
                    blobstore_headers: headers,
                })],
            ),
        };
        arguments.extend(extra.as_ref().map(Argument::Extra));
        let call = Call { protocol: PROTOCOL, method, arguments, reply_to };
        // Texts and numbers only: there is nothing that cannot be written.
        serde_json::to_vec(&call).unwrap_or_default()
    }
}

/// A call as an agent reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Subject for the reply.
    pub reply_to: String,
    /// What is asked, or why an exception is replied.
    pub call: Result<Announcement, CallError>,
}

/// A call that an agent cannot follow; the text is the reply's exception.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// A method that agents of ours do not have.
    #[error("unknown message {0}")]
    UnknownMethod(String),
    /// `sync_dns` without its three arguments.
    #[error("sync_dns: the arguments must be a blob id, a digest and a version")]
    SyncDns,
    /// `sync_dns` with a version that is none.
    #[error("sync_dns: the version must be a number of 0 or more")]
    Version,
    /// `sync_dns_with_signed_url` without what it needs.
    #[error(
        "sync_dns_with_signed_url: the argument must be an object with signed_url, multi_digest, version"
    )]
    SyncDnsWithSignedUrl,
}

/// The members of any call.
#[derive(Deserialize)]
struct AnyCall {
    /// Name of the method.
    #[serde(default)]
    method: String,
    /// Arguments.
    #[serde(default)]
    arguments: Vec<Value>,
    /// Subject for the reply.
    #[serde(default)]
    reply_to: String,
}

/// Reads a call. `None`: JSON that cannot be read, or nobody to reply to; an agent says
/// nothing then.
pub fn read_call(body: &[u8]) -> Option<Received> {
    let AnyCall { method, arguments, reply_to } = serde_json::from_slice(body).ok()?;
    if reply_to.is_empty() {
        return None;
    }
    let call = match method.as_str() {
        "sync_dns" => read_sync_dns(&arguments),
        "sync_dns_with_signed_url" => read_signed(&arguments),
        other => Err(CallError::UnknownMethod(other.to_owned())),
    };
    Some(Received { reply_to, call })
}

/// Arguments of `sync_dns`.
fn read_sync_dns(arguments: &[Value]) -> Result<Announcement, CallError> {
    let [Value::String(blob), Value::String(digest), version, rest @ ..] = arguments else {
        return Err(CallError::SyncDns);
    };
    let version = version.as_u64().ok_or(CallError::Version)?;
    let source = Source::Blob(blob.clone());
    Ok(Announcement { source, digest: digest.clone(), version, extra: read_extra(rest) })
}

/// Arguments of `sync_dns_with_signed_url`.
fn read_signed(arguments: &[Value]) -> Result<Announcement, CallError> {
    let wrong = CallError::SyncDnsWithSignedUrl;
    let [Value::Object(object), rest @ ..] = arguments else { return Err(wrong) };
    let text = |name: &str| object.get(name).and_then(Value::as_str);
    let version = object.get("version").and_then(Value::as_u64);
    let (Some(url), Some(digest), Some(version)) = (text("signed_url"), text("multi_digest"), version) else {
        return Err(wrong);
    };
    let headers = object.get("blobstore_headers").and_then(Value::as_object).cloned().unwrap_or_default();
    let source = Source::Signed { url: url.to_owned(), headers };
    Ok(Announcement { source, digest: digest.to_owned(), version, extra: read_extra(rest) })
}

/// Our own argument, if there is one that can be read; whatever else is surplus is ignored.
fn read_extra(rest: &[Value]) -> Option<Extra> {
    serde_json::from_value(rest.first()?.clone()).ok()
}

/// What an agent replies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// It has the version or a higher one.
    Synced,
    /// Why not: causes from the outermost on.
    Exception(String),
}

impl Reply {
    /// The body of the reply.
    pub fn write(&self) -> Vec<u8> {
        match self {
            Self::Synced => br#"{"value":"synced"}"#.to_vec(),
            Self::Exception(message) => {
                serde_json::json!({ "exception": { "message": message } }).to_string().into_bytes()
            }
        }
    }

    /// Reads a reply; whatever is neither counts as an exception.
    pub fn read(body: &[u8]) -> Self {
        let reply: Value = serde_json::from_slice(body).unwrap_or_default();
        if reply.get("value").and_then(Value::as_str) == Some("synced") {
            return Self::Synced;
        }
        let message = reply.pointer("/exception/message").and_then(Value::as_str);
        Self::Exception(message.unwrap_or("a reply that is neither `synced` nor an exception").to_owned())
    }
}

/// What one of our agents says by itself: what it has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Version of its file; 0 without one.
    pub version: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reply subject.
    const REPLY_TO: &str = "director.p.a.r";

    /// An announcement of version 42.
    fn announcement(source: Source, extra: Option<Extra>) -> Announcement {
        Announcement { source, digest: "sha256:00ff".to_owned(), version: 42, extra }
    }

    #[test]
    fn calls_are_golden_and_read_back() {
        let blob = Source::Blob("blob-1".to_owned());
        let headers = Map::from_iter([("x-k".to_owned(), Value::from("v"))]);
        let signed = |headers| Source::Signed { url: "https://b/s?x=1&y=2".to_owned(), headers };
        let patch = Extra { patch: Some(Patch { from: 41, zstd: "AA==".to_owned() }), spread_ms: 9 };
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
            assert_eq!(read_call(&written), Some(Received { reply_to: REPLY_TO.to_owned(), call: Ok(call) }));
        }
    }

    #[test]
    fn replies_are_golden_and_read_back() {
        for (reply, golden) in [
            (Reply::Synced, r#"{"value":"synced"}"#),
            (Reply::Exception("a: b \"c\"".to_owned()), r#"{"exception":{"message":"a: b \"c\""}}"#),
        ] {
            assert_eq!(String::from_utf8(reply.write()).unwrap(), golden);
            assert_eq!(Reply::read(golden.as_bytes()), reply);
        }
        for other in ["", "{}", r#"{"value":"sync"}"#, "[1]"] {
            assert!(matches!(Reply::read(other.as_bytes()), Reply::Exception(_)), "{other}");
        }
    }

    #[test]
    fn what_cannot_be_done_is_an_exception_and_what_cannot_be_read_is_nothing() {
        assert_eq!(read_call(b"{"), None);
        assert_eq!(read_call(br#"{"method":"sync_dns"}"#), None);
        for body in [
            r#"{"method":"ping","reply_to":"r"}"#,
            r#"{"method":"sync_dns","arguments":["b","d"],"reply_to":"r"}"#,
            r#"{"method":"sync_dns","arguments":["b","d",-1],"reply_to":"r"}"#,
            r#"{"method":"sync_dns_with_signed_url","arguments":[{"signed_url":"u"}],"reply_to":"r"}"#,
        ] {
            assert!(read_call(body.as_bytes()).unwrap().call.is_err(), "{body}");
        }
        let surplus = br#"{"method":"sync_dns","arguments":["b","d",1,"more",[2]],"reply_to":"r"}"#;
        assert_eq!(read_call(surplus).unwrap().call.unwrap().extra, None);
    }

    #[test]
    fn subjects_are_read_back() {
        assert_eq!(read_reply_subject(&reply_subject("p", "a", "r")), Some(("a", "r")));
        for other in ["director.p.a", "director.p.a.r.x", "agent.p.a.r"] {
            assert_eq!(read_reply_subject(other), None);
        }
    }
}
