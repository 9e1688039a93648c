//! Whether the server is well, as a list of things that were looked at.

use serde::{Deserialize, Serialize};

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// `sockets`, `records`...
    pub name: &'static str,
    /// Whether it is as it should be.
    pub ok: bool,
    /// Whether nothing works without it, so that a restart is in order.
    pub vital: bool,
    /// What was seen, in a few words.
    pub detail: String,
}

/// The same, as `/status` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckStatus {
    /// `sockets`, `records`...
    pub name: String,
    /// Whether it is as it should be.
    pub ok: bool,
    /// What was seen, in a few words.
    pub detail: String,
}

impl From<Check> for CheckStatus {
    fn from(Check { name, ok, vital: _, detail }: Check) -> Self {
        Self { name: name.to_owned(), ok, detail }
    }
}

/// Whoever can say how the server is. Called on every probe: cheap, never blocking.
pub trait Probe: Send + Sync + 'static {
    /// Everything that was looked at.
    fn checks(&self) -> Vec<Check>;
}
