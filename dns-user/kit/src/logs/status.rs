//! State of the log as shown by `/status` and `/log`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A logged warning or error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// Time in seconds since 1970.
    pub time: f64,
    /// Level, either `WARN` or `ERROR`.
    pub level: String,
    /// Tag of the line.
    pub tag: String,
    /// Message and fields as text.
    pub text: String,
}

/// Levels and limits of the log.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct LoggingStatus {
    /// General level, `log_level` in the configuration.
    pub level: String,
    /// Tags with their own level.
    pub tags: BTreeMap<String, String>,
    /// Maximum number of request lines per second.
    pub requests_per_second: u32,
    /// Number of lines lost because the reader of the log stalled.
    pub lost: u64,
}
