//! Metric families of the certificates in use: expiry, and failed attempts to load newer files.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use prometheus::{
    core::{Collector, Desc},
    proto::MetricFamily,
};

use dns_platform::{metrics::families, tls::RotatingTls};

/// Collects the metric families of all certificates.
pub struct CertificateFamilies {
    certificates: Vec<Arc<RotatingTls>>,
    /// Required by the registry.
    description: Desc,
}

impl CertificateFamilies {
    /// Creates a collector for these certificates.
    pub fn new(certificates: Vec<Arc<RotatingTls>>) -> prometheus::Result<Self> {
        Ok(Self { certificates, description: families::CERTIFICATE_EXPIRY_SECONDS.describe()? })
    }
}

impl Collector for CertificateFamilies {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.description]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let ends = self.certificates.iter().flat_map(|tls| {
            let (purpose, material) = (tls.purpose(), tls.current());
            let own = ([purpose, "certificate"], seconds(material.certificate.not_after));
            let authority =
                material.authorities_not_after().map(|end| ([purpose, "authority"], seconds(end)));
            [Some(own), authority].into_iter().flatten()
        });
        let warnings = self.certificates.iter().flat_map(|tls| {
            let (purpose, material) = (tls.purpose(), tls.current());
            let own = ([purpose, "certificate"], seconds(material.certificate.warns_from()));
            let authority =
                material.authorities_warn_from().map(|from| ([purpose, "authority"], seconds(from)));
            [Some(own), authority].into_iter().flatten()
        });
        let failures = self.certificates.iter().map(|tls| ([tls.purpose()], tls.failures()));
        [
            families::CERTIFICATE_EXPIRY_SECONDS.of(ends),
            families::CERTIFICATE_WARNING_SECONDS.of(warnings),
            families::CERTIFICATE_LOAD_FAILURES_TOTAL.of(failures),
        ]
        .into_iter()
        .filter(|family| !family.get_metric().is_empty())
        .collect()
    }
}

/// Converts to seconds since 1970.
fn seconds(moment: SystemTime) -> f64 {
    moment.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() as f64
}
