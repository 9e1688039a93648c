//! Metrics, named as in external-dns.
//!
//! Metrics of the controller and the registry have a `provider` label, because one process serves
//! several providers.

use std::collections::BTreeMap;

use prometheus::{
    GaugeVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder, core::Collector,
};

/// Prometheus metrics of the publisher.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Registry,
    /// End of the last round that published all wanted records, in seconds since 1970.
    pub last_sync: GaugeVec,
    /// End of the last round, in seconds since 1970.
    pub last_reconcile: GaugeVec,
    /// Number of consecutive rounds that did not publish all wanted records.
    pub soft_errors: IntGaugeVec,
    /// Number of rounds without changes.
    pub no_op_runs: IntCounterVec,
    /// Number of wanted record sets found in the zones, by type.
    pub verified_records: IntGaugeVec,
    /// Number of record sets in the zones.
    pub registry_endpoints: IntGaugeVec,
    /// Number of failed rounds.
    pub registry_errors: IntCounterVec,
    /// Number of owned names in the zones.
    pub registry_records: IntGaugeVec,
    /// Number of wanted records that belong to another owner.
    pub skipped: IntGaugeVec,
    /// Number of deletions that need confirmation.
    pub awaiting_confirmation: IntGaugeVec,
    /// Number of wanted record sets.
    pub source_endpoints: IntGauge,
    /// Number of reads of the documents that found problems.
    pub source_errors: IntCounter,
    /// Number of wanted record sets, by type.
    pub source_records: IntGaugeVec,
    /// Number of documents and entries with problems.
    pub invalid_endpoints: IntGauge,
    /// Number of record sets wanted by several documents.
    pub deduplicated_endpoints: IntGauge,
}

impl Metrics {
    /// Creates and registers all metrics.
    pub fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        #[cfg(target_os = "linux")]
        registry.register(Box::new(prometheus::process_collector::ProcessCollector::for_self()))?;
        Ok(Self {
            last_sync: add(
                &registry,
                GaugeVec::new(
                    Opts::new(
                        "external_dns_controller_last_sync_timestamp_seconds",
                        "End of the last round that published everything",
                    ),
                    &["provider"],
                )?,
            )?,
            last_reconcile: add(
                &registry,
                GaugeVec::new(
                    Opts::new(
                        "external_dns_controller_last_reconcile_timestamp_seconds",
                        "End of the last round",
                    ),
                    &["provider"],
                )?,
            )?,
            soft_errors: gauges(
                &registry,
                "external_dns_controller_consecutive_soft_errors",
                "Consecutive rounds that did not publish everything",
                &["provider"],
            )?,
            no_op_runs: counters(
                &registry,
                "external_dns_controller_no_op_runs_total",
                "Rounds that changed nothing",
            )?,
            verified_records: gauges(
                &registry,
                "external_dns_controller_verified_records",
                "Wanted record sets of providers whose last round published everything",
                &["provider", "record_type"],
            )?,
            registry_endpoints: gauges(
                &registry,
                "external_dns_registry_endpoints_total",
                "Record sets in the zones",
                &["provider"],
            )?,
            registry_errors: counters(&registry, "external_dns_registry_errors_total", "Failed rounds")?,
            registry_records: gauges(
                &registry,
                "external_dns_registry_records",
                "Names in the zones owned by this publisher",
                &["provider"],
            )?,
            skipped: gauges(
                &registry,
                "external_dns_registry_skipped_records_owner_mismatch_per_sync",
                "Wanted records that belong to another owner",
                &["provider"],
            )?,
            awaiting_confirmation: gauges(
                &registry,
                "bosh_dns_publish_deletions_awaiting_confirmation",
                "Deletions awaiting --confirm-deletions",
                &["provider"],
            )?,
            source_endpoints: add(
                &registry,
                IntGauge::new("external_dns_source_endpoints_total", "Wanted record sets")?,
            )?,
            source_errors: add(
                &registry,
                IntCounter::new("external_dns_source_errors_total", "Document reads that found problems")?,
            )?,
            source_records: gauges(
                &registry,
                "external_dns_source_records",
                "Wanted record sets by type",
                &["record_type"],
            )?,
            invalid_endpoints: add(
                &registry,
                IntGauge::new("external_dns_source_invalid_endpoints", "Problems in documents")?,
            )?,
            deduplicated_endpoints: add(
                &registry,
                IntGauge::new(
                    "external_dns_source_deduplicated_endpoints",
                    "Record sets wanted by several documents",
                )?,
            )?,
            registry,
        })
    }

    /// Returns all metrics in Prometheus' text form.
    pub fn text(&self) -> String {
        let families = self.registry.gather();
        TextEncoder::new().encode_to_string(&families).unwrap_or_else(|error| format!("# {error}\n"))
    }

    /// Sets the gauges by record type; types that no longer occur are set to zero.
    pub fn set_types(gauge: &IntGaugeVec, provider: Option<&str>, counts: &BTreeMap<String, usize>) {
        for record_type in ["A", "AAAA", "CNAME"].into_iter().chain(counts.keys().map(String::as_str)) {
            let count = counts.get(record_type).copied().unwrap_or_default();
            let labels: Vec<&str> = provider.into_iter().chain([record_type]).collect();
            gauge.with_label_values(&labels).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// Removes the metrics of a provider that is no longer configured.
    pub fn forget(&self, provider: &str) {
        // Removal fails in metrics that lack the provider, which is fine.
        for family in [
            &self.soft_errors,
            &self.registry_endpoints,
            &self.registry_records,
            &self.skipped,
            &self.awaiting_confirmation,
        ] {
            let _ = family.remove_label_values(&[provider]);
        }
        for family in [&self.last_sync, &self.last_reconcile] {
            let _ = family.remove_label_values(&[provider]);
        }
    }
}

fn add<C: Collector + Clone + 'static>(registry: &Registry, metric: C) -> prometheus::Result<C> {
    registry.register(Box::new(metric.clone())).map(|()| metric)
}

fn gauges(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<IntGaugeVec> {
    add(registry, IntGaugeVec::new(Opts::new(name, help), labels)?)
}

fn counters(registry: &Registry, name: &str, help: &str) -> prometheus::Result<IntCounterVec> {
    add(registry, IntCounterVec::new(Opts::new(name, help), &["provider"])?)
}

/// Returns the metric families with a sample, except those of the process.
#[cfg(test)]
pub(crate) fn families() -> Vec<prometheus::proto::MetricFamily> {
    let all = tests::complete().registry.gather();
    all.into_iter().filter(|family| !family.name().starts_with("process_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns metrics with a sample of each family.
    pub(super) fn complete() -> Metrics {
        let metrics = Metrics::new().unwrap();
        for family in [&metrics.last_sync, &metrics.last_reconcile] {
            family.with_label_values(&["p"]);
        }
        for family in [
            &metrics.soft_errors,
            &metrics.registry_endpoints,
            &metrics.registry_records,
            &metrics.skipped,
            &metrics.awaiting_confirmation,
        ] {
            family.with_label_values(&["p"]);
        }
        metrics.no_op_runs.with_label_values(&["p"]);
        metrics.registry_errors.with_label_values(&["p"]);
        metrics.verified_records.with_label_values(&["p", "A"]);
        metrics.source_records.with_label_values(&["A"]);
        metrics
    }

    #[test]
    fn dashboard_uses_existing_metrics() {
        let metrics = complete();
        let text = metrics.text();
        let dashboard = include_str!("../../../deploy/grafana/bosh-dns-publish.json");
        let is_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
        let used: std::collections::BTreeSet<&str> = dashboard
            .split(|letter: char| !is_name(letter))
            .filter(|word| word.starts_with("external_dns_") || word.starts_with("bosh_dns_publish_"))
            .collect();
        assert!(used.len() > 10, "{used:?}");
        for name in used {
            assert!(text.contains(&format!("# TYPE {name} ")), "{name}");
        }
    }

    #[test]
    fn vanished_provider_leaves_metrics() {
        let metrics = Metrics::new().unwrap();
        metrics.soft_errors.with_label_values(&["p"]).set(3);
        metrics.forget("p");
        assert!(!metrics.text().contains("provider=\"p\""));
    }
}
