//! Certificates in use: when they end, and whether newer files can be used.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use super::Metrics;
use dns_platform::metrics::families;
use dns_platform::tls::RotatingTls;

/// Shows `certificates` on the metrics port, as they are whenever somebody looks.
pub fn show(metrics: &Metrics, certificates: Vec<Arc<RotatingTls>>) -> prometheus::Result<()> {
    let ends = families::CERTIFICATE_EXPIRY_SECONDS.gauges()?;
    let failures = families::CERTIFICATE_LOAD_FAILURES_TOTAL.counters()?;
    metrics.registry().register(Box::new(ends.clone()))?;
    metrics.registry().register(Box::new(failures.clone()))?;
    metrics.before_exposition(move || {
        for tls in &certificates {
            let (purpose, material) = (tls.purpose(), tls.current());
            let end = seconds(material.certificate.not_after);
            ends.with_label_values(&[purpose, "certificate"]).set(end);
            if let Some(first) = material.authorities_not_after() {
                ends.with_label_values(&[purpose, "authority"]).set(seconds(first));
            }
            let failed = failures.with_label_values(&[purpose]);
            failed.inc_by(tls.failures().saturating_sub(failed.get()));
        }
    });
    Ok(())
}

/// Seconds since 1970.
fn seconds(moment: SystemTime) -> i64 {
    let since = moment.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}
