//! The configuration of a source, the pictures of the catalog, and the state for operators.

use std::{path::PathBuf, time::Duration};

use serde::Serialize;

use crate::known::{Key, Known};
use dns_consul::{Lack, catalog::live::Live, http_api::HttpApi};

/// Configuration of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The agents and the limits of questions.
    pub api: HttpApi,
    /// File that holds the ACL token.
    pub token_file: Option<PathBuf>,
    /// The datacenter of names without one; `None` for the agent's.
    pub datacenter: Option<String>,
    /// Whether any of Consul's servers may answer.
    pub allow_stale: bool,
    /// Age up to which the last answer is served while Consul fails to give another.
    pub max_stale: Duration,
    /// Time of failures after which a part of the catalog is reported as stale.
    pub stale_after: Duration,
}

/// The catalog as far as it has been read.
#[derive(Clone, Debug, Default)]
pub struct Picture {
    /// The registrations. Pictures share what they have in common.
    pub live: Live,
    /// The agent's datacenter in lower case; `None` before its first answer.
    pub datacenter: Option<String>,
    /// The agent's node; empty before its first answer.
    pub node_name: String,
}

impl Picture {
    /// Returns whether everything of the local datacenter has been read.
    pub fn is_complete(&self) -> bool {
        self.datacenter.is_some() && self.live.is_complete()
    }
}

/// State of a source.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Status {
    /// The agent in use.
    pub address: String,
    /// Whether no agent answers.
    pub away: bool,
    /// Seconds since the last answer of a server with a leader; `None` before the first one.
    pub last_contact_seconds: Option<f64>,
    /// Whether the answers are older than `max_stale`: the catalog is empty.
    pub expired: bool,
    /// Datacenter of the agent.
    pub datacenter: Option<String>,
    /// Number of distinct service names.
    pub services: usize,
    /// Services whose instances have been read.
    pub services_told: usize,
    /// Services whose instances are watched; the others are fetched in turn.
    pub services_watched: usize,
    /// Number of nodes in the catalog.
    pub nodes: usize,
    /// Number of service instances loaded.
    pub instances: usize,
    /// Number of open connections to Consul.
    pub connections: usize,
    /// Requests sent since the start.
    pub requests: u64,
    /// Requests that failed since the start.
    pub failures: u64,
    /// Answers whose index was smaller than the one before.
    pub index_resets: u64,
    /// Catalog pictures published since the start.
    pub pictures: u64,
    /// Error of the last request, if it failed.
    pub problem: Option<String>,
    /// Questions that have failed for longer than `stale_after`: their old answers are served.
    pub stale: usize,
    /// Age in seconds of the oldest of these answers.
    pub oldest_stale_seconds: Option<f64>,
    /// The oldest of these questions and the reason of its failure.
    pub stale_problem: Option<String>,
    /// Entries of answers that are invalid and are left out.
    pub invalid_entries: usize,
    /// The first of them.
    pub invalid_problem: Option<String>,
}

/// A wish of the resolver.
#[derive(Debug)]
pub(crate) enum Demand {
    /// A query waits for a missing part.
    Lack(Lack),
    /// A query asked for this service.
    Asked(Key),
    /// Interfaces answer for these.
    Used(Vec<Key>),
}

/// Returns a picture; an empty one if the answers have expired.
pub(crate) fn picture(known: &Known, expired: bool) -> Picture {
    let live = if expired { known.nothing() } else { known.live() };
    Picture { live, datacenter: known.own.clone(), node_name: known.node_name.clone() }
}
