//! `bosh_dns_identity_*` metrics for Prometheus. Every scrape builds the families from the current state.

use std::{net::SocketAddr, time::SystemTime};

use dns_kit::{
    http_server::spawn_metrics,
    metrics::{Counter, Family, Gauge},
};
use prometheus::proto::MetricFamily;

use crate::{certificate::seconds, rotator::RotatorStatus};

macro_rules! families {
    ($($family:ident: $kind:ident = $name:literal [$($label:literal),*] $help:literal;)*) => {
        $(
            pub(crate) const $family: Family<$kind, { <[&str]>::len(&[$($label),*]) }> =
                Family::new($name, $help, [$($label),*]);
        )*

        /// Name, type, labels and help of every family, for the metrics reference.
        #[cfg(test)]
        pub(crate) const DECLARED: &[(&str, &str, &[&str], &str)] =
            &[$(($name, stringify!($kind), &[$($label),*], $help)),*];
    };
}

families! {
    EXPIRY: Gauge = "bosh_dns_identity_expiry_timestamp_seconds" ["guid"]
        "Expiry of a certificate, in seconds since 1970; 0 without one.";
    RENEW_BY: Gauge = "bosh_dns_identity_renew_by_timestamp_seconds" ["guid"]
        "End of a certificate's renewal window, in seconds since 1970: a healthy one is renewed before; 0 without one.";
    PAIR_FAILING: Gauge = "bosh_dns_identity_pair_failing" ["guid"]
        "1 if the last attempt to issue or renew the certificate failed.";
    IDENTITIES: Gauge = "bosh_dns_identity_identities" [] "Maintained identities.";
    FAILING: Gauge = "bosh_dns_identity_failing" [] "Certificates whose last renewal failed.";
    PROBLEMS: Gauge = "bosh_dns_identity_without_identity" []
        "Descriptions and folders without an identity.";
    POOL_KEYS: Gauge = "bosh_dns_identity_pool_keys" [] "Keys ready for use.";
    POOL_SIZE: Gauge = "bosh_dns_identity_pool_size" [] "Target size of the key pool.";
    CA_EXPIRY: Gauge = "bosh_dns_identity_ca_expiry_timestamp_seconds" []
        "Expiry of the CA certificate, in seconds since 1970.";
    CA_FILES_USABLE: Gauge = "bosh_dns_identity_ca_files_usable" []
        "1 if the current CA files are usable, 0 if an earlier CA stays in use.";
    RENEWALS: Counter = "bosh_dns_identity_renewals_total" [] "Certificates renewed.";
    FAILURES: Counter = "bosh_dns_identity_failures_total" ["reason"]
        "Failures by reason; retries are not counted.";
    MEMBERS: Gauge = "bosh_dns_identity_members" [] "Issuer: instances with certificates.";
    LAGGING: Gauge = "bosh_dns_identity_lagging" [] "Issuer: instances that have not yet installed the fleet's trust bundle.";
    TRUSTED_CAS: Gauge = "bosh_dns_identity_trusted_cas" []
        "Issuer: CAs that the fleet trusts; more than 1 during a rotation.";
    FILES_USABLE: Gauge = "bosh_dns_identity_files_usable" []
        "Issuer: 1 if the current trust, CA and records are usable, 0 if an earlier state stays in use.";
    ISSUED: Counter = "bosh_dns_identity_issued_total" [] "Issuer: certificates issued to agents.";
    REFUSED: Counter = "bosh_dns_identity_refused_total" ["reason"] "Issuer: calls refused, by reason.";
    CLOCK_SKEW: Gauge = "bosh_dns_identity_clock_skew_seconds" []
        "Agent: lead of the issuer's clock over this machine's, at the last reply.";
    ISSUER_REACHED: Gauge = "bosh_dns_identity_issuer_reached" [] "Agent: 1 if the last report reached the issuer.";
}

/// State of one pair, for its families.
pub(crate) struct PairState {
    /// Id of the identity, or name of the agent's folder.
    pub(crate) guid: String,
    /// End of the validity, in seconds since 1970; `None` without a pair.
    pub(crate) not_after: Option<u64>,
    /// End of the renewal window, in seconds since 1970.
    pub(crate) renew_by: Option<u64>,
    /// Whether the last attempt failed.
    pub(crate) failing: bool,
}

/// Returns the families of pairs; each pair has all of them from the start.
pub(crate) fn of_pairs(pairs: &[PairState]) -> Vec<MetricFamily> {
    let failing = pairs.iter().filter(|pair| pair.failing).count();
    vec![
        // Zero rather than no sample: an alert also finds a pair that was never issued.
        by_pair(EXPIRY, pairs, |pair| pair.not_after.unwrap_or(0)),
        by_pair(RENEW_BY, pairs, |pair| pair.renew_by.unwrap_or(0)),
        by_pair(PAIR_FAILING, pairs, |pair| u64::from(pair.failing)),
        FAILING.is(failing as f64),
    ]
}

fn by_pair(
    family: Family<Gauge, 1>,
    pairs: &[PairState],
    value: fn(&PairState) -> u64,
) -> MetricFamily {
    let values = pairs.iter();
    family.of(values.map(|pair| ([pair.guid.as_str()], value(pair) as f64)))
}

pub(crate) fn of_rotator(status: &RotatorStatus) -> Vec<MetricFamily> {
    // Taken apart completely, so that a new field cannot be forgotten here.
    let RotatorStatus {
        authority,
        pool_ready,
        pool_size,
        renewals,
        failures,
        identities,
        problems,
    } = status;
    let pairs = identities.iter().map(|identity| PairState {
        guid: identity.guid.to_string(),
        not_after: identity.not_after,
        renew_by: identity.renew_by,
        failing: identity.failure.is_some(),
    });
    let mut families = of_pairs(&pairs.collect::<Vec<_>>());
    families.extend([
        IDENTITIES.is(identities.len() as f64),
        PROBLEMS.is(problems.len() as f64),
        POOL_KEYS.is(*pool_ready as f64),
        POOL_SIZE.is(*pool_size as f64),
        CA_EXPIRY.is(timestamp(authority.not_after)),
        CA_FILES_USABLE.is(f64::from(authority.problem.is_none())),
        RENEWALS.is(*renewals),
        FAILURES.of(failures
            .iter()
            .map(|(reason, count)| ([reason.as_str()], *count))),
    ]);
    families
}

pub(crate) fn timestamp(at: SystemTime) -> f64 {
    // Exact: an f64 holds whole seconds up to 2^53.
    seconds(at) as f64
}

/// Serves `/metrics` until the process ends.
pub(crate) async fn serve(
    address: SocketAddr,
    families: impl Fn() -> Vec<MetricFamily> + Clone + Send + Sync + 'static,
) -> anyhow::Result<()> {
    spawn_metrics(address, move || {
        let mut families = families();
        // A family without a metric has no exposition.
        families.retain(|family| !family.get_metric().is_empty());
        families.sort_by(|one, other| one.name().cmp(other.name()));
        families
    })
    .await
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::tests::{START, World, at};

    /// Returns each sample as its name, label values and value.
    fn samples(families: &[MetricFamily]) -> Vec<(&str, String, f64)> {
        let mut samples = Vec::new();
        for family in families {
            for metric in family.get_metric() {
                let labels: Vec<&str> =
                    metric.get_label().iter().map(|pair| pair.value()).collect();
                let value = match family.get_field_type() {
                    prometheus::proto::MetricType::COUNTER => metric.get_counter().get_value(),
                    _ => metric.get_gauge().get_value(),
                };
                let name = family.name().strip_prefix("bosh_dns_identity_").unwrap();
                samples.push((name, labels.join(","), value));
            }
        }
        samples
    }

    #[test]
    fn pairs_start_with_complete_samples() {
        let pair = |guid: &str, end, failing| PairState {
            guid: guid.to_owned(),
            not_after: end,
            renew_by: end.map(|end| end - 20),
            failing,
        };
        let pairs = [
            pair("a", None, true),
            pair("b", Some(100), false),
            pair("c", None, true),
        ];
        let expected = [
            ("expiry_timestamp_seconds", "a", 0.0),
            ("expiry_timestamp_seconds", "b", 100.0),
            ("expiry_timestamp_seconds", "c", 0.0),
            ("renew_by_timestamp_seconds", "a", 0.0),
            ("renew_by_timestamp_seconds", "b", 80.0),
            ("renew_by_timestamp_seconds", "c", 0.0),
            ("pair_failing", "a", 1.0),
            ("pair_failing", "b", 0.0),
            ("pair_failing", "c", 1.0),
            ("failing", "", 2.0),
        ];
        let expected = expected.map(|(name, label, value)| (name, label.to_owned(), value));
        assert_eq!(samples(&of_pairs(&pairs)), expected);
    }

    #[test]
    fn rotator_shows_its_state() {
        let mut world = World::new();
        world.create(json!({"guid": "g1"}));
        world.create(json!({"guid": "g2"}));
        world.step(START);
        let mut status = world.rotator.status(at(START));
        status.renewals = 7;
        status.failures.insert("storage".to_owned(), 3);
        status.authority.not_after = at(START + 9);
        status.problems.push(crate::rotator::Problem {
            path: "x".into(),
            message: "y".to_owned(),
        });
        let shown = of_rotator(&status);
        let expected = [
            ("identities", "", 2.0),
            ("without_identity", "", 1.0),
            ("pool_keys", "", 2.0),
            ("pool_size", "", 2.0),
            ("ca_expiry_timestamp_seconds", "", 2_000_000_009.0),
            ("ca_files_usable", "", 1.0),
            ("renewals_total", "", 7.0),
            ("failures_total", "storage", 3.0),
        ];
        let expected = expected.map(|(name, label, value)| (name, label.to_owned(), value));
        let found = samples(&shown);
        assert_eq!(found[7..], expected);
        assert_eq!(
            found[..2],
            [
                ("expiry_timestamp_seconds", "g1".to_owned(), 2_000_086_400.0),
                ("expiry_timestamp_seconds", "g2".to_owned(), 2_000_086_400.0),
            ]
        );
        assert_eq!(found[6], ("failing", String::new(), 0.0));
        status.authority.problem = Some("z".to_owned());
        let shown = of_rotator(&status);
        assert!(samples(&shown).contains(&("ca_files_usable", String::new(), 0.0)));
    }
}
