//! The families of Consul's names, read when somebody scrapes.

use std::sync::Arc;

use prometheus::{
    core::{Collector, Desc},
    proto::MetricFamily,
};

use super::ConsulNames;
use crate::ops::metrics::{
    families::{counts, gauges},
    names,
};
use dns_consul_source::Status;

/// Collects them.
pub(crate) struct ConsulFamilies {
    /// What is read.
    consul: Arc<ConsulNames>,
    /// One for the registry's bookkeeping.
    description: Desc,
}

impl ConsulFamilies {
    /// Of these names.
    pub(crate) fn new(consul: Arc<ConsulNames>) -> prometheus::Result<Self> {
        let help = "Instances that are known.".to_owned();
        let description =
            Desc::new(names::CONSUL_INSTANCES.to_owned(), help, Vec::new(), Default::default())?;
        Ok(Self { consul, description })
    }
}

impl Collector for ConsulFamilies {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.description]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let zone = self.consul.zone();
        let catalog = &zone.catalog;
        let mut families = vec![
            gauges(names::CONSUL_NODES, "Nodes that are known.", [(vec![], catalog.node_count() as f64)]),
            gauges(
                names::CONSUL_INSTANCES,
                "Instances that are known.",
                [(vec![], catalog.instance_count() as f64)],
            ),
        ];
        families.extend(self.consul.source_status().iter().flat_map(of_source));
        families
    }
}

/// The families of a live Consul.
fn of_source(status: &Status) -> Vec<MetricFamily> {
    let services =
        [("known", status.services), ("told", status.services_told), ("watched", status.services_watched)];
    vec![
        gauges(
            names::CONSUL_UP,
            "1 while some agent answers.",
            [(vec![], f64::from(!status.away && status.last_contact_seconds.is_some()))],
        ),
        gauges(
            names::CONSUL_CATALOG_AGE_SECONDS,
            "Seconds since a server in touch with a leader answered.",
            status.last_contact_seconds.map(|seconds| (vec![], seconds)),
        ),
        gauges(
            names::CONSUL_SERVICES,
            "Services by what is known of them.",
            services.map(|(state, count)| (vec![("state", state.to_owned())], count as f64)),
        ),
        gauges(names::CONSUL_CONNECTIONS, "Connections to the agent.", [(vec![], status.connections as f64)]),
        counts(names::CONSUL_REQUESTS_TOTAL, "Requests to agents.", [(vec![], status.requests)]),
        counts(
            names::CONSUL_REQUEST_FAILURES_TOTAL,
            "Requests to agents without an answer.",
            [(vec![], status.failures)],
        ),
        counts(
            names::CONSUL_INDEX_RESETS_TOTAL,
            "Answers whose index was smaller than the one before.",
            [(vec![], status.index_resets)],
        ),
    ]
}
