//! Configuration, catalog snapshots and status of a live source.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{catalog::live::Live, config::Config, config::HttpApi};

/// Configuration of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveSettings {
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
}

impl LiveSettings {
    /// Returns the settings of an object `"consul"`; `None` if it has no live Consul.
    pub fn of(config: &Config) -> Option<Self> {
        Some(Self {
            api: config.http.clone()?,
            token_file: config.token_file.clone(),
            // The default serves only where no agent tells its datacenter.
            datacenter: (!config.datacenter_is_default).then(|| config.datacenter.clone()),
            allow_stale: config.dns.allow_stale,
            max_stale: config.dns.max_stale,
        })
    }
}

/// A snapshot of the loaded part of the catalog.
#[derive(Clone, Debug, Default)]
pub struct CatalogView {
    /// Registrations. Snapshots share unchanged parts.
    pub live: Live,
    /// The agent's datacenter in lower case; `None` before its first response.
    pub datacenter: Option<String>,
    /// The agent's node; empty before its first response.
    pub node_name: String,
}

impl CatalogView {
    /// Returns the snapshot before a live Consul has answered: every name may exist.
    pub fn unknown(config: &Config) -> Self {
        Self {
            live: Live::unknown(&config.datacenter),
            ..Self::default()
        }
    }

    /// Returns whether the local datacenter is loaded completely.
    pub fn is_complete(&self) -> bool {
        self.datacenter.is_some() && self.live.is_complete()
    }
}

/// State of a source.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LiveStatus {
    /// Address of the agent in use.
    pub address: String,
    /// Whether no agent responds.
    pub away: bool,
    /// Whether requests for nodes or services of the local datacenter have failed for `stale_after`.
    pub unconfirmed: bool,
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
    pub views: u64,
    /// Error of the last request, if it failed.
    pub problem: Option<String>,
    /// Number of topics that have failed for longer than `stale_after`; their old responses are used.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{Place, live::LivePlace};

    #[test]
    fn catalog_is_pending_without_the_agent() {
        let text = br#"{"consul": {"datacenter": "DC7"}}"#;
        let (config, _) = Config::of_document("test", text).whole().unwrap().unwrap();
        let mut view = CatalogView::unknown(&config);
        assert_eq!((&*view.live.own, &view.datacenter), ("dc7", &None));
        let own = Place::Datacenter("dc7".into());
        assert!(view.live.is_pending(&own, Some("web")));
        let loaded = LivePlace {
            nodes: Some(Default::default()),
            services: Some(Default::default()),
            unloaded: 0,
        };
        view.live.places.insert(own.clone(), loaded);
        assert!(!view.is_complete(), "the agent has not told its datacenter");
        view.datacenter = Some("dc7".to_owned());
        assert!(view.is_complete());
        view.live.places.remove(&own);
        assert!(!view.is_complete());
    }
}
