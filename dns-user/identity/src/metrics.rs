//! `bosh_dns_identity_*` metrics for Prometheus. Every scrape builds the families from the current
//! state.

use std::{net::SocketAddr, time::SystemTime};

use dns_kit::http_server::spawn_metrics;
use prometheus::{IntCounterVec, IntGaugeVec, Opts, Registry};

use crate::{certificate::seconds, rotator::Status};

/// A declared family: source of both the exposition and the metrics reference.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// Full name, including the unit.
    pub name: &'static str,
    /// Prometheus type: `gauge` or `counter`.
    pub kind: &'static str,
    /// Names of the labels, in order.
    pub labels: &'static [&'static str],
    /// Help text of the exposition.
    pub help: &'static str,
}

macro_rules! families {
    ($($family:ident $kind:literal $name:literal [$($label:literal),*] $help:literal;)*) => {
        $(
            #[doc = $help]
            pub const $family: Family = Family { name: $name, kind: $kind, labels: &[$($label),*], help: $help };
        )*

        /// Every family that this crate exposes.
        pub const FAMILIES: &[Family] = &[$($family),*];
    };
}

families! {
    EXPIRY "gauge" "bosh_dns_identity_expiry_timestamp_seconds" ["guid"]
        "Expiry of a certificate, in seconds since 1970.";
    IDENTITIES "gauge" "bosh_dns_identity_identities" [] "Maintained identities.";
    FAILING "gauge" "bosh_dns_identity_failing" [] "Identities whose last renewal failed.";
    POOL_KEYS "gauge" "bosh_dns_identity_pool_keys" [] "Keys ready for use.";
    POOL_SIZE "gauge" "bosh_dns_identity_pool_size" [] "Target size of the key pool.";
    CA_EXPIRY "gauge" "bosh_dns_identity_ca_expiry_timestamp_seconds" []
        "Expiry of the CA certificate, in seconds since 1970.";
    CA_FILES_USABLE "gauge" "bosh_dns_identity_ca_files_usable" []
        "1 if the current CA files are usable, 0 if an earlier CA stays in use.";
    RENEWALS "counter" "bosh_dns_identity_renewals_total" [] "Certificates renewed.";
    FAILURES "counter" "bosh_dns_identity_failures_total" ["reason"]
        "Failures by reason; retries are not counted.";
    MEMBERS "gauge" "bosh_dns_identity_members" [] "Issuer: instances with certificates.";
    LAGGING "gauge" "bosh_dns_identity_lagging" [] "Issuer: instances that have not yet installed the fleet's trust bundle.";
    TRUSTED_CAS "gauge" "bosh_dns_identity_trusted_cas" []
        "Issuer: CAs that the fleet trusts; more than 1 during a rotation.";
    FILES_USABLE "gauge" "bosh_dns_identity_files_usable" []
        "Issuer: 1 if the current trust, CA and records are usable, 0 if an earlier state stays in use.";
    ISSUED "counter" "bosh_dns_identity_issued_total" [] "Issuer: certificates issued to agents.";
    REFUSED "counter" "bosh_dns_identity_refused_total" ["reason"] "Issuer: calls refused, by reason.";
    ISSUER_REACHED "gauge" "bosh_dns_identity_issuer_reached" [] "Agent: 1 if the last report reached the issuer.";
}

/// Families of one scrape.
#[derive(Debug, Default)]
pub struct Exposition(Registry);

impl Exposition {
    /// Adds a gauge with a value for each set of label values.
    pub fn gauge<'a>(
        &self,
        family: &Family,
        values: impl IntoIterator<Item = (Vec<&'a str>, i64)>,
    ) -> prometheus::Result<()> {
        let shown = IntGaugeVec::new(Opts::new(family.name, family.help), family.labels)?;
        for (labels, value) in values {
            shown.get_metric_with_label_values(&labels)?.set(value);
        }
        self.0.register(Box::new(shown))
    }

    /// Adds a counter with a value for each set of label values.
    pub fn counter<'a>(
        &self,
        family: &Family,
        values: impl IntoIterator<Item = (Vec<&'a str>, u64)>,
    ) -> prometheus::Result<()> {
        let shown = IntCounterVec::new(Opts::new(family.name, family.help), family.labels)?;
        for (labels, value) in values {
            shown.get_metric_with_label_values(&labels)?.inc_by(value);
        }
        self.0.register(Box::new(shown))
    }
}

/// Returns the families of a rotator.
pub fn of_rotator(status: &Status) -> prometheus::Result<Exposition> {
    let Status { authority, pool_ready, pool_size, renewals, failures, identities } = status;
    let shown = Exposition::default();
    let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
    let expiry = identities.iter().filter_map(|identity| {
        Some((vec![identity.guid.as_str()], i64::try_from(identity.not_after?).unwrap_or(i64::MAX)))
    });
    shown.gauge(&EXPIRY, expiry)?;
    let failing = identities.iter().filter(|identity| identity.failure.is_some()).count();
    for (family, value) in [
        (IDENTITIES, number(identities.len())),
        (FAILING, number(failing)),
        (POOL_KEYS, number(*pool_ready)),
        (POOL_SIZE, number(*pool_size)),
        (CA_EXPIRY, timestamp(authority.not_after)),
        (CA_FILES_USABLE, i64::from(authority.problem.is_none())),
    ] {
        shown.gauge(&family, [(vec![], value)])?;
    }
    shown.counter(&RENEWALS, [(vec![], *renewals)])?;
    shown.counter(&FAILURES, failures.iter().map(|(reason, count)| (vec![reason.as_str()], *count)))?;
    Ok(shown)
}

/// Converts a time to a metric value.
pub fn timestamp(at: SystemTime) -> i64 {
    i64::try_from(seconds(at)).unwrap_or(i64::MAX)
}

/// Serves `/metrics` until the process ends.
pub async fn serve(
    address: SocketAddr,
    families: impl Fn() -> prometheus::Result<Exposition> + Clone + Send + Sync + 'static,
) -> anyhow::Result<()> {
    spawn_metrics(address, move || families().map(|shown| shown.0.gather())).await
}
