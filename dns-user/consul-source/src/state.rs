//! Configuration of a source, catalog snapshots, and the state for operators.

use std::{path::PathBuf, time::Duration};

use serde::Serialize;

use crate::known::{Key, Known};
use dns_consul::{Lack, catalog::live::Live, http_api::HttpApi};

/// Configuration of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Agents and request limits.
    pub api: HttpApi,
    /// File with the ACL token.
    pub token_file: Option<PathBuf>,
    /// Datacenter of names without one; `None` for the agent's.
    pub datacenter: Option<String>,
    /// Whether any Consul server may answer, not only the leader.
    pub allow_stale: bool,
    /// Age up to which the last response is used while Consul fails to give a newer one.
    pub max_stale: Duration,
    /// Duration of failures after which a part of the catalog is reported as stale.
    pub stale_after: Duration,
}

/// A snapshot of the loaded part of the catalog.
#[derive(Clone, Debug, Default)]
pub struct Picture {
    /// Registrations. Snapshots share unchanged parts.
    pub live: Live,
    /// The agent's datacenter in lower case; `None` before its first response.
    pub datacenter: Option<String>,
    /// The agent's node; empty before its first response.
    pub node_name: String,
}

impl Picture {
    /// Returns whether the local datacenter is loaded completely.
    pub fn is_complete(&self) -> bool {
        self.datacenter.is_some() && self.live.is_complete()
    }
}

/// State of a source.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Status {
    /// Address of the agent in use.
    pub address: String,
    /// Whether no agent responds.
    pub away: bool,
    /// Seconds since the last response from a server with a leader; `None` before the first one.
    pub last_contact_seconds: Option<f64>,
    /// Whether the data is older than `max_stale` and the catalog therefore empty.
    pub expired: bool,
    /// Datacenter of the agent.
    pub datacenter: Option<String>,
    /// Number of distinct service names.
    pub services: usize,
    /// Number of services whose instances are loaded.
    pub services_told: usize,
    /// Number of services whose instances are watched; the others are fetched in turn.
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
    /// Responses with a smaller index than the previous one.
    pub index_resets: u64,
    /// Catalog snapshots published since the start.
    pub pictures: u64,
    /// Error of the last request, if it failed.
    pub problem: Option<String>,
    /// Number of topics that have failed for longer than `stale_after`; their old responses are
    /// used.
    pub stale: usize,
    /// Age in seconds of the oldest of these responses.
    pub oldest_stale_seconds: Option<f64>,
    /// Topic of the oldest of these responses, and its error.
    pub stale_problem: Option<String>,
    /// Number of invalid entries dropped from responses.
    pub invalid_entries: usize,
    /// Error of the first one.
    pub invalid_problem: Option<String>,
}

/// A demand of the resolver.
#[derive(Debug)]
pub(crate) enum Demand {
    /// A query waits for this missing part.
    Lack(Lack),
    /// A query was for this service.
    Asked(Key),
    /// Interfaces answer for these services.
    Used(Vec<Key>),
}

/// Returns a snapshot; an empty one if the data has expired.
pub(crate) fn picture(known: &Known, expired: bool) -> Picture {
    let live = if expired { known.nothing() } else { known.live() };
    Picture { live, datacenter: known.own.clone(), node_name: known.node_name.clone() }
}
