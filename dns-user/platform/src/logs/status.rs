//! What `/status` and `/log` show of the log.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

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
