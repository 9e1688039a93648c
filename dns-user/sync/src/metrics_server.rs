//! HTTP server of `/metrics` for Prometheus.

use std::net::SocketAddr;

use anyhow::Context;
use axum::{Router, routing::get};
use prometheus::{Registry, TextEncoder};

use crate::server;

/// Serves a registry at an address until the process ends.
pub(crate) async fn spawn(address: SocketAddr, registry: Registry) -> anyhow::Result<()> {
    let listener =
        tokio::net::TcpListener::bind(address).await.with_context(|| format!("metrics at {address}"))?;
    let text = move || async move {
        TextEncoder::new().encode_to_string(&registry.gather()).unwrap_or_else(|error| format!("# {error}\n"))
    };
    let router = Router::new().route("/metrics", get(text));
    tokio::spawn(server::accept(listener, move |stream| {
        let router = router.clone();
        async move {
            // A scraper that disconnects is not worth a log line.
            let _ = server::serve(stream, router).await;
        }
    }));
    Ok(())
}
