//! Metrics of Consul's names, collected at scrape time.

use std::sync::Arc;

use prometheus::{Registry, proto::MetricFamily};

use super::ConsulNames;
use dns_consul::source::Status;
use dns_kit::metrics::families;

/// Registers the metric families of Consul's names.
pub(crate) fn register(registry: &Registry, consul: Arc<ConsulNames>) -> prometheus::Result<()> {
    families::CONSUL_INSTANCES.scrape(registry, move || {
        let zone = consul.zone();
        let catalog = &zone.catalog;
        let mut all = vec![
            families::CONSUL_NODES.is(catalog.node_count() as f64),
            families::CONSUL_INSTANCES.is(catalog.instance_count() as f64),
        ];
        all.extend(consul.source_status().iter().flat_map(of_source));
        all
    })
}

/// Returns the families of a live Consul.
fn of_source(status: &Status) -> Vec<MetricFamily> {
    vec![
        families::CONSUL_UP
            .is(f64::from(!status.away && !status.unconfirmed && status.last_contact_seconds.is_some())),
        families::CONSUL_CATALOG_AGE_SECONDS
            .of(status.last_contact_seconds.map(|seconds| ([] as [&str; 0], seconds))),
        families::CONSUL_SERVICES.of([
            (["known"], status.services as f64),
            (["told"], status.services_told as f64),
            (["watched"], status.services_watched as f64),
        ]),
        families::CONSUL_CONNECTIONS.is(status.connections as f64),
        families::CONSUL_REQUESTS_TOTAL.is(status.requests),
        families::CONSUL_REQUEST_FAILURES_TOTAL.is(status.failures),
        families::CONSUL_INDEX_RESETS_TOTAL.is(status.index_resets),
        families::CONSUL_STALE_QUESTIONS.is(status.stale as f64),
        families::CONSUL_INVALID_ENTRIES.is(status.invalid_entries as f64),
    ]
}
