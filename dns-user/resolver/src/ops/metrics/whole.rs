//! Server-wide metrics: records, reloads, logs, uptime.

use prometheus::Registry;

use crate::ops::{
    readiness::Readiness,
    service_status::{DURATIONS, State},
};
use dns_kit::{
    logs::Logs,
    metrics::{families, histogram},
};

/// Registers the families that belong to no single module.
pub fn register(registry: &Registry, logs: Logs, readiness: Readiness) -> prometheus::Result<()> {
    families::UPTIME_SECONDS.scrape(registry, move || {
        let status = &readiness.service_status;
        let State { records_version, instances, aliases, .. } = status.state();
        let records_age = status.records_age().unwrap_or_default();
        let kinds = status.reloads();
        let reloads = kinds.iter().map(|(kind, reloads)| ([*kind], reloads.count));
        let failures = kinds.iter().map(|(kind, reloads)| ([*kind], reloads.failures));
        let durations = kinds.iter().filter(|(_, reloads)| reloads.count > 0).map(|(kind, reloads)| {
            ([*kind], histogram(&DURATIONS, reloads.durations, reloads.took.as_secs_f64()))
        });
        vec![
            families::UPTIME_SECONDS.is(status.uptime().as_secs_f64()),
            families::RECORDS_VERSION.is(records_version.unwrap_or(0) as f64),
            families::RECORDS_AGE_SECONDS.is(records_age.as_secs_f64()),
            families::RECORDS_INSTANCES.is(instances as f64),
            families::RECORDS_ALIASES.is(aliases as f64),
            families::RELOADS_TOTAL.of(reloads),
            families::RELOAD_FAILURES_TOTAL.of(failures),
            families::RELOAD_DURATION_SECONDS.of(durations),
            families::LOG_LINES_LOST_TOTAL.is(logs.dropped()),
            families::FAST_PATH_DEGRADED.is(f64::from(readiness.is_fast_path_degraded())),
        ]
    })
}
