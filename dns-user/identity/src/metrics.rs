//! `bosh_dns_identity_*` for Prometheus. Every scrape builds the families from the current state.

use std::{io, net::SocketAddr, time::SystemTime};

use anyhow::Context;
use axum::{Router, routing::get};
use prometheus::{IntCounterVec, IntGaugeVec, Opts, Registry, TextEncoder};

use crate::{certificate::seconds, rotator::Status};

/// Families of one scrape.
#[derive(Debug, Default)]
pub struct Exposition(Registry);

impl Exposition {
    /// Adds a gauge with a value for each set of label values.
    pub fn gauge<'a>(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
        values: impl IntoIterator<Item = (Vec<&'a str>, i64)>,
    ) -> prometheus::Result<()> {
        let family = IntGaugeVec::new(Opts::new(name, help), labels)?;
        for (labels, value) in values {
            family.get_metric_with_label_values(&labels)?.set(value);
        }
        self.0.register(Box::new(family))
    }

    /// Adds a counter with a value for each set of label values.
    pub fn counter<'a>(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
        values: impl IntoIterator<Item = (Vec<&'a str>, u64)>,
    ) -> prometheus::Result<()> {
        let family = IntCounterVec::new(Opts::new(name, help), labels)?;
        for (labels, value) in values {
            family.get_metric_with_label_values(&labels)?.inc_by(value);
        }
        self.0.register(Box::new(family))
    }
}

/// Families of a rotator.
pub fn of_rotator(status: &Status) -> prometheus::Result<Exposition> {
    let Status { authority, pool_ready, pool_size, renewals, failures, identities } = status;
    let shown = Exposition::default();
    let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
    shown.gauge(
        "bosh_dns_identity_expiry_timestamp_seconds",
        "End of an identity's certificate, seconds since 1970.",
        &["guid"],
        identities
            .iter()
            .filter_map(|identity| Some((vec![identity.guid.as_str()], timestamp(identity.not_after?)))),
    )?;
    let failing = identities.iter().filter(|identity| identity.failure.is_some()).count();
    for (name, help, value) in [
        ("bosh_dns_identity_identities", "Identities that are maintained.", number(identities.len())),
        ("bosh_dns_identity_failing", "Identities whose last renewal failed.", number(failing)),
        ("bosh_dns_identity_pool_keys", "Keys that are ready.", number(*pool_ready)),
        ("bosh_dns_identity_pool_size", "Keys that the pool is filled up to.", number(*pool_size)),
        (
            "bosh_dns_identity_ca_expiry_timestamp_seconds",
            "End of the CA's certificate, seconds since 1970.",
            timestamp(authority.not_after),
        ),
        (
            "bosh_dns_identity_ca_files_usable",
            "1 if the CA's files as they are can be used, 0 if an earlier CA stays in use.",
            i64::from(authority.problem.is_none()),
        ),
    ] {
        shown.gauge(name, help, &[], [(vec![], value)])?;
    }
    shown.counter(
        "bosh_dns_identity_renewals_total",
        "Pairs that were renewed.",
        &[],
        [(vec![], *renewals)],
    )?;
    let failures = failures.iter().map(|(reason, count)| (vec![reason.as_str()], *count));
    shown.counter(
        "bosh_dns_identity_failures_total",
        "Failures by reason, each counted once however often it is retried.",
        &["reason"],
        failures,
    )?;
    Ok(shown)
}

/// A moment as a metric's value.
pub fn timestamp(at: SystemTime) -> i64 {
    i64::try_from(seconds(at)).unwrap_or(i64::MAX)
}

/// Serves `/metrics` until the process ends.
pub async fn serve(
    address: SocketAddr,
    families: impl Fn() -> prometheus::Result<Exposition> + Clone + Send + Sync + 'static,
) -> anyhow::Result<()> {
    let listener = tokio::net::TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot serve metrics at {address}; choose a free address"))?;
    let text = move || async move {
        let text = families().and_then(|shown| TextEncoder::new().encode_to_string(&shown.0.gather()));
        text.unwrap_or_else(|error| format!("# {error}\n"))
    };
    let router = Router::new().route("/metrics", get(text));
    tokio::spawn(async move {
        let served: io::Result<()> = axum::serve(listener, router).await;
        if let Err(error) = served {
            tracing::error!(%error, "metrics are no longer served");
        }
    });
    Ok(())
}
