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
        "Expiry of a certificate, in seconds since 1970; 0 without one.";
    RENEW_BY "gauge" "bosh_dns_identity_renew_by_timestamp_seconds" ["guid"]
        "End of a certificate's renewal window, in seconds since 1970: a healthy one is renewed before; 0 without one.";
    PAIR_FAILING "gauge" "bosh_dns_identity_pair_failing" ["guid"]
        "1 if the last attempt to issue or renew the certificate failed.";
    IDENTITIES "gauge" "bosh_dns_identity_identities" [] "Maintained identities.";
    FAILING "gauge" "bosh_dns_identity_failing" [] "Certificates whose last renewal failed.";
    PROBLEMS "gauge" "bosh_dns_identity_without_identity" []
        "Descriptions and folders without an identity.";
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
    CLOCK_SKEW "gauge" "bosh_dns_identity_clock_skew_seconds" []
        "Agent: lead of the issuer's clock over this machine's, at the last reply.";
    ISSUER_REACHED "gauge" "bosh_dns_identity_issuer_reached" [] "Agent: 1 if the last report reached the issuer.";
}

/// Families of one scrape.
#[derive(Debug, Default)]
pub struct Exposition(Registry);

impl Exposition {
    /// Adds a gauge with a value for each set of label values.
    pub fn gauge<L: AsRef<str> + std::fmt::Debug>(
        &self,
        family: &Family,
        values: impl IntoIterator<Item = (Vec<L>, i64)>,
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

/// State of one pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairState {
    /// Id of the identity, or name of the agent's folder.
    pub guid: String,
    /// End of the validity, in seconds since 1970; `None` without a pair.
    pub not_after: Option<u64>,
    /// End of the renewal window, in seconds since 1970.
    pub renew_by: Option<u64>,
    /// Whether the last attempt failed.
    pub failing: bool,
}

/// Adds the families of pairs; each pair has all of them from the start.
pub fn add_pairs(shown: &Exposition, pairs: &[PairState]) -> prometheus::Result<()> {
    let end = |at: Option<u64>| i64::try_from(at.unwrap_or(0)).unwrap_or(i64::MAX);
    let label = |pair: &'_ PairState| vec![pair.guid.clone()];
    shown.gauge(&EXPIRY, pairs.iter().map(|pair| (label(pair), end(pair.not_after))))?;
    shown.gauge(&RENEW_BY, pairs.iter().map(|pair| (label(pair), end(pair.renew_by))))?;
    shown.gauge(&PAIR_FAILING, pairs.iter().map(|pair| (label(pair), i64::from(pair.failing))))?;
    let failing = pairs.iter().filter(|pair| pair.failing).count();
    shown.gauge(&FAILING, [(no_labels(), i64::try_from(failing).unwrap_or(i64::MAX))])
}

/// The label values of a family without labels.
pub fn no_labels() -> Vec<&'static str> {
    Vec::new()
}

/// Returns the families of a rotator.
pub fn of_rotator(status: &Status) -> prometheus::Result<Exposition> {
    let Status { authority, pool_ready, pool_size, renewals, failures, identities, problems } = status;
    let shown = Exposition::default();
    let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
    let pairs = identities.iter().map(|identity| PairState {
        guid: identity.guid.to_string(),
        not_after: identity.not_after,
        renew_by: identity.renew_by,
        failing: identity.failure.is_some(),
    });
    add_pairs(&shown, &pairs.collect::<Vec<_>>())?;
    for (family, value) in [
        (IDENTITIES, number(identities.len())),
        (PROBLEMS, number(problems.len())),
        (POOL_KEYS, number(*pool_ready)),
        (POOL_SIZE, number(*pool_size)),
        (CA_EXPIRY, timestamp(authority.not_after)),
        (CA_FILES_USABLE, i64::from(authority.problem.is_none())),
    ] {
        shown.gauge(&family, [(no_labels(), value)])?;
    }
    shown.counter(&RENEWALS, [(no_labels(), *renewals)])?;
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
