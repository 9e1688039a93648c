//! Certificates in use: when they end, and whether newer files can be used.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use prometheus::{IntCounterVec, IntGaugeVec, Opts};

use super::{Metrics, names};
use crate::tls::RotatingTls;

/// Shows `certificates` on the metrics port, as they are whenever somebody looks.
pub fn show(metrics: &Metrics, certificates: Vec<Arc<RotatingTls>>) -> prometheus::Result<()> {
    let ends = IntGaugeVec::new(
        Opts::new(names::CERTIFICATE_EXPIRY_SECONDS, "End of certificates in use, seconds since 1970."),
        &["use", "part"],
    )?;
    let failures = IntCounterVec::new(
        Opts::new(
            names::CERTIFICATE_LOAD_FAILURES_TOTAL,
            "Attempts to load changed certificate files that failed; the last good ones stay in use.",
        ),
        &["use"],
    )?;
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
