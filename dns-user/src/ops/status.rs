//! What `/status` says: one JSON object that `status` and `top` read.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{journal::Event, probe::CheckStatus};

/// The state of the server at one moment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// Version of the server.
    pub version: String,
    /// Commit that it was built from.
    pub commit: String,
    /// Process id.
    pub pid: u32,
    /// Whether every check is well.
    pub ready: bool,
    /// What was looked at.
    pub checks: Vec<CheckStatus>,
    /// Start, in seconds since 1970.
    pub started: f64,
    /// Seconds since then.
    pub uptime_seconds: f64,
    /// Addresses that it listens on, UDP and TCP.
    pub listen: Vec<String>,
    /// The records in force.
    pub records: RecordsStatus,
    /// Replies so far.
    pub replies: RepliesStatus,
    /// The fast path, as that room tells it; null: there is none.
    pub fast_path: Value,
    /// Recursors with their history, as that room tells it.
    pub recursors: Value,
    /// The cache; null: there is none.
    pub cache: Value,
    /// Health checks; null: they are off.
    pub health: Value,
    /// Certificates in use.
    pub certificates: Vec<CertificateStatus>,
    /// Last time that files of a kind were read anew.
    pub last_reload: BTreeMap<String, Event>,
    /// Last time that files of a kind could not be used.
    pub last_failure: BTreeMap<String, Event>,
    /// The newest warnings and errors, newest last.
    pub problems: Vec<Problem>,
    /// Levels of the log.
    pub logging: LoggingStatus,
}

/// The records in force.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RecordsStatus {
    /// The file; null: none is configured.
    pub file: Option<String>,
    /// Its version; null: none was read, or it names none.
    pub version: Option<u64>,
    /// Seconds since it was read; null: none was.
    pub age_seconds: Option<f64>,
    /// Instances.
    pub instances: usize,
    /// Domains.
    pub domains: Vec<String>,
    /// Names that are published.
    pub names: usize,
    /// Aliases, of files and records.
    pub aliases: usize,
}

/// Replies so far.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct RepliesStatus {
    /// By the interface.
    pub fast: u64,
    /// By the sockets, whatever for.
    pub userspace: u64,
    /// For names of the fleet, both paths.
    pub internal: u64,
    /// Sent on to recursors.
    pub external: u64,
}

/// A certificate in use.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CertificateStatus {
    /// What for: `api`, `health-client`...
    pub purpose: String,
    /// Common name of its subject.
    pub subject: Option<String>,
    /// End, in seconds since 1970.
    pub not_after: f64,
    /// Why newer files cannot be used, if that is so.
    pub error: Option<String>,
}

/// A line of the log that told of a problem.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// When, RFC 3339.
    pub time: String,
    /// `WARN` or `ERROR`.
    pub level: String,
    /// Tag of the line.
    pub tag: String,
    /// Message and fields.
    pub text: String,
}

/// Levels of the log.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct LoggingStatus {
    /// `log_level`.
    pub level: String,
    /// Tags with a level of their own.
    pub tags: BTreeMap<String, String>,
    /// Request lines a second, at most.
    pub requests_per_second: u32,
    /// Lines lost because nobody read the log.
    pub lost: u64,
}
