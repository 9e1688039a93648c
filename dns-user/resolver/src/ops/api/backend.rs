//! What the API asks of the running server.

use std::time::Duration;

use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Group, InstanceLine};
use crate::ops::{status::Status, tap::Tap};
use dns_platform::logs::Logs;

/// The running server, as the API sees it. Nothing here starts health checks
/// of instances (observed).
pub trait ApiBackend: Send + Sync + 'static {
    /// Instances that `address` stands for, after the health filter; all of
    /// them for `None`.
    fn instances(&self, address: Option<&str>) -> Result<Vec<InstanceLine>, NameRefused>;

    /// This VM and the links of its jobs.
    fn local_groups(&self) -> BoxFuture<'_, Vec<Group>>;

    /// The state of everything.
    fn status(&self) -> Status;

    /// What a name means, step by step.
    fn explain(&self, name: &str) -> Result<Value, NameRefused>;

    /// Reads all files anew.
    fn reload(&self) -> BoxFuture<'_, Result<Reloaded, ReloadError>>;

    /// Empties the cache; says how many answers were in it, `None` without a cache.
    fn flush(&self) -> BoxFuture<'_, Option<u64>>;

    /// Levels of the log; `None`: this process does not log.
    fn logs(&self) -> Option<&Logs>;

    /// Live queries.
    fn tap(&self) -> &Tap;
}

/// Why a name cannot be looked up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NameRefused(pub String);

/// Why it is not known what came of a reload.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReloadError {
    /// Nobody reads files any more.
    #[error("the server is ending")]
    Ending,
    /// The files are still being read.
    #[error("the reload takes longer than {0:?}; it goes on")]
    TooLong(Duration),
}

/// What a reload did.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Reloaded {
    /// Parts that were read and put in force, with what was found.
    pub done: Vec<String>,
    /// Parts that could not be used; their last good state stays.
    pub failed: Vec<String>,
}
