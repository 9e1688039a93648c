//! Overload as reported to operators: the queries that interfaces drop and userspace refuses, and
//! the affected clients.

use std::sync::Arc;

use prometheus::{Registry, proto::MetricFamily};
use serde::{Deserialize, Serialize};

use dns_common::counters::Outcome;
use dns_fastpath::FastPathHandle;
use dns_kit::metrics::families;
use dns_upstream::{
    InForce,
    admission::{Admission, AdmissionStatus, LimitedClient},
};

/// Maximum number of clients per budget in the metrics. Each is a time series, so there must be
/// few.
const MAX_CLIENTS: usize = 5;

/// Name of the budget of the whole server.
const SERVER: &str = "server";

/// Name of the budget of the recursors.
const RECURSORS: &str = "recursors";

/// Reads the state of overload.
#[derive(Clone)]
pub struct OverloadSource {
    /// Limits the waiting queries of the whole server.
    pub waiting: Arc<Admission>,
    /// Recursors and handlers, each with a budget.
    pub upstreams: Arc<InForce>,
    /// Counts the queries that interfaces drop.
    pub fast_path: FastPathHandle,
}

/// Queries dropped and refused, and the clients that exceed their share.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OverloadStatus {
    /// Queries dropped by interfaces since the programs were loaded, because userspace could not
    /// answer them.
    pub shed: u64,
    /// The limits on waiting queries: for the server, the recursors and each handler.
    pub budgets: Vec<Budget>,
}

/// A limit on waiting queries.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Budget {
    /// `server`, `recursors`, or the domain of a handler.
    pub name: String,
    /// Its slots and the clients that hold them.
    #[serde(flatten)]
    pub status: AdmissionStatus,
}

impl OverloadStatus {
    /// Returns the clients with refused queries, with the budget, most refusals first.
    pub fn limited(&self) -> Vec<(&str, &LimitedClient)> {
        let mut all: Vec<_> = self
            .budgets
            .iter()
            .flat_map(|Budget { name, status }| status.limited.iter().map(|client| (name.as_str(), client)))
            .collect();
        all.sort_by_key(|(_, client)| std::cmp::Reverse(client.refused));
        all
    }
}

impl OverloadSource {
    /// Returns the current state.
    pub fn status(&self) -> OverloadStatus {
        let shed = self.fast_path.counters().outcome(Outcome::Shed);
        let server = Budget { name: SERVER.to_owned(), status: self.waiting.status() };
        let sources = self
            .upstreams
            .admissions()
            .into_iter()
            .map(|(domain, status)| Budget { name: domain.unwrap_or_else(|| RECURSORS.to_owned()), status });
        let budgets = std::iter::once(server).chain(sources).collect();
        OverloadStatus { shed, budgets }
    }

    /// Registers the metric families of overload.
    pub fn register(self, registry: &Registry) -> prometheus::Result<()> {
        families::OVERLOAD_QUERIES_TOTAL.scrape(registry, move || self.families())
    }

    fn families(&self) -> Vec<MetricFamily> {
        let OverloadStatus { shed, budgets } = self.status();
        let refused = |wanted: &dyn Fn(&str) -> bool| -> u64 {
            let matching = budgets.iter().filter(|budget| wanted(&budget.name));
            matching.map(|budget| budget.status.refused).sum()
        };
        let by_reason = [
            (["shed"], shed),
            ([SERVER], refused(&|name| name == SERVER)),
            ([RECURSORS], refused(&|name| name == RECURSORS)),
            (["handler"], refused(&|name| name != SERVER && name != RECURSORS)),
        ];
        let limited =
            budgets.iter().map(|budget| ([budget.name.as_str()], budget.status.limited.len() as f64));
        let clients = budgets.iter().flat_map(|budget| {
            let most = budget.status.limited.iter().take(MAX_CLIENTS);
            most.map(|client| ([budget.name.clone(), client.client.to_string()], client.refused as f64))
        });
        let server = budgets.iter().find(|budget| budget.name == SERVER);
        vec![
            families::OVERLOAD_QUERIES_TOTAL.of(by_reason),
            families::LIMITED_CLIENTS.of(limited),
            families::LIMITED_CLIENT_REFUSALS.of(clients),
            families::LIMIT.of(server.map(|budget| (["waiting_queries"], budget.status.limit as f64))),
        ]
    }
}
