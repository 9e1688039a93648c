//! Metric families of the certificates in use: expiry, and failed attempts to load newer files.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use prometheus::{Registry, proto::MetricFamily};

use dns_kit::{metrics::families, tls::RotatingTls};

/// Registers the metric families of these certificates.
pub fn register(registry: &Registry, certificates: Vec<Arc<RotatingTls>>) -> prometheus::Result<()> {
    families::CERTIFICATE_EXPIRY_SECONDS.scrape(registry, move || all(&certificates))
}

fn all(certificates: &[Arc<RotatingTls>]) -> Vec<MetricFamily> {
    let ends = certificates.iter().flat_map(|tls| {
        let (purpose, material) = (tls.purpose(), tls.current());
        let own = ([purpose, "certificate"], seconds(material.certificate.not_after));
        let authority = material.authorities_not_after().map(|end| ([purpose, "authority"], seconds(end)));
        [Some(own), authority].into_iter().flatten()
    });
    let warnings = certificates.iter().flat_map(|tls| {
        let (purpose, material) = (tls.purpose(), tls.current());
        let own = ([purpose, "certificate"], seconds(material.certificate.warns_from()));
        let authority = material.authorities_warn_from().map(|from| ([purpose, "authority"], seconds(from)));
        [Some(own), authority].into_iter().flatten()
    });
    let failures = certificates.iter().map(|tls| ([tls.purpose()], tls.failures()));
    [
        families::CERTIFICATE_EXPIRY_SECONDS.of(ends),
        families::CERTIFICATE_WARNING_SECONDS.of(warnings),
        families::CERTIFICATE_LOAD_FAILURES_TOTAL.of(failures),
    ]
    .into_iter()
    .filter(|family| !family.get_metric().is_empty())
    .collect()
}

/// Converts to seconds since 1970.
fn seconds(moment: SystemTime) -> f64 {
    moment.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() as f64
}
