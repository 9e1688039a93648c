//! Metrics, named as in external-dns.
//!
//! Metrics of the controller and the registry have a `provider` label, because one process serves
//! several providers.

use std::collections::BTreeMap;

use prometheus::{GaugeVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder};

use crate::record::{Record, RecordType};

/// Declares the metrics: one row each.
macro_rules! metrics {
    ($($field:ident: $kind:ident $name:literal $([$($label:literal),+])? $help:literal;)*) => {
        #[derive(Clone, Debug)]
        pub(crate) struct Metrics {
            registry: Registry,
            $(
                #[doc = concat!($help, ".")]
                pub $field: $kind,
            )*
        }

        impl Metrics {
            pub(crate) fn new() -> prometheus::Result<Self> {
                let registry = Registry::new();
                dns_kit::metrics::register_process(&registry)?;
                $(
                    let $field = metrics!(@new $kind $name $([$($label),+])? $help)?;
                    registry.register(Box::new($field.clone()))?;
                )*
                Ok(Self { registry, $($field),* })
            }
        }
    };
    (@new $kind:ident $name:literal $help:literal) => { $kind::new($name, $help) };
    (@new $kind:ident $name:literal [$($label:literal),+] $help:literal) => {
        $kind::new(Opts::new($name, $help), &[$($label),+])
    };
}

metrics! {
    last_sync: GaugeVec "external_dns_controller_last_sync_timestamp_seconds" ["provider"]
        "End of the last round that published everything";
    last_reconcile: GaugeVec "external_dns_controller_last_reconcile_timestamp_seconds" ["provider"]
        "End of the last round";
    soft_errors: IntGaugeVec "external_dns_controller_consecutive_soft_errors" ["provider"]
        "Consecutive rounds that did not publish everything";
    no_op_runs: IntCounterVec "external_dns_controller_no_op_runs_total" ["provider"]
        "Rounds that changed nothing";
    verified_records: IntGaugeVec "external_dns_controller_verified_records" ["provider", "record_type"]
        "Wanted record sets of providers whose last round published everything";
    registry_endpoints: IntGaugeVec "external_dns_registry_endpoints_total" ["provider"]
        "Record sets in the zones";
    registry_errors: IntCounterVec "external_dns_registry_errors_total" ["provider"] "Failed rounds";
    registry_records: IntGaugeVec "external_dns_registry_records" ["provider"]
        "Names in the zones owned by this publisher";
    skipped: IntGaugeVec "external_dns_registry_skipped_records_owner_mismatch_per_sync" ["provider"]
        "Wanted records that belong to another owner";
    awaiting_confirmation: IntGaugeVec "bosh_dns_publish_deletions_awaiting_confirmation" ["provider"]
        "Deletions awaiting --confirm-deletions";
    source_endpoints: IntGauge "external_dns_source_endpoints_total" "Wanted record sets";
    source_errors: IntCounter "external_dns_source_errors_total" "Document reads that found problems";
    source_records: IntGaugeVec "external_dns_source_records" ["record_type"] "Wanted record sets by type";
    invalid_endpoints: IntGauge "external_dns_source_invalid_endpoints" "Problems in documents";
    deduplicated_endpoints: IntGauge "external_dns_source_deduplicated_endpoints"
        "Record sets wanted by several documents";
}

impl Metrics {
    pub(crate) fn text(&self) -> String {
        let families = self.registry.gather();
        TextEncoder::new().encode_to_string(&families).unwrap_or_else(|error| format!("# {error}\n"))
    }

    /// Returns the number of record sets by type; the default types are counted even at zero.
    pub(crate) fn count_types<'a>(records: impl IntoIterator<Item = &'a Record>) -> BTreeMap<String, usize> {
        let shown = RecordType::DEFAULT_MANAGED.into_iter();
        let mut counts: BTreeMap<String, usize> =
            shown.map(|record_type| (record_type.to_string(), 0)).collect();
        for record in records.into_iter().filter(|record| !record.targets.is_empty()) {
            *counts.entry(record.record_type.to_string()).or_default() += 1;
        }
        counts
    }

    /// Sets the gauges by record type; types that no longer occur are set to zero.
    pub(crate) fn set_types(gauge: &IntGaugeVec, provider: Option<&str>, counts: &BTreeMap<String, usize>) {
        for record_type in ["A", "AAAA", "CNAME"].into_iter().chain(counts.keys().map(String::as_str)) {
            let count = counts.get(record_type).copied().unwrap_or_default();
            let labels: Vec<&str> = provider.into_iter().chain([record_type]).collect();
            gauge.with_label_values(&labels).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// Removes the metrics of a provider that is no longer configured.
    pub(crate) fn forget(&self, provider: &str) {
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
        let dashboard = concat!(
            include_str!("../../../deploy/grafana/bosh-dns-publish.json"),
            include_str!("../../../deploy/prometheus/publish-rules.yml")
        );
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
