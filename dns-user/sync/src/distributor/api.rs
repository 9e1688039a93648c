//! The publisher's API: HTTPS for clients whose certificate is signed by its CA and has an allowed
//! common name. Agents have certificates of the same CA but no access.
//!
//! | Call | Effect |
//! |---|---|
//! | `GET /v1/status` | returns the registry, as `status --json` |
//! | `POST /v1/changes` | adds, removes or moves an instance: `{"change": "add" ...}` |

use std::{net::SocketAddr, path::PathBuf};

use anyhow::Context;
use axum::{
    Json, Router,
    extract::State as Extract,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use dns_kit::{
    foreign::printable,
    http_server::{Client, Listener, Server},
};
use prometheus::{
    IntCounter, IntGauge, Registry, register_int_counter_with_registry,
    register_int_gauge_with_registry,
};
use serde_json::json;
use tokio::net::TcpListener;

use super::{
    Shared,
    plan::Plan,
    registry::{AgentRegistry, Count},
    source::InventoryOptions,
    state::Folder,
};
use crate::{
    http::{AcceptedName, TlsFiles},
    inventory::changes::Change,
};

/// State that the handlers share.
#[derive(Clone, Debug)]
pub(super) struct PublisherApi {
    pub(super) source: InventoryOptions,
    pub(super) state: PathBuf,
    pub(super) shared: Shared,
}

/// Serves the API until the process ends, to clients with one of these common names.
pub(super) async fn spawn(
    address: SocketAddr,
    files: TlsFiles,
    clients: Vec<String>,
    desk: PublisherApi,
) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("API at {address}"))?;
    let tls = files.load("api", AcceptedName::Host)?;
    tokio::spawn(tls.clone().watch(|_| {}));
    let router = Router::new()
        .route("/v1/status", get(status))
        .route("/v1/changes", post(change))
        .with_state(desk);
    let server = Server::new(
        "the API",
        Listener::Tls(listener, Box::new(move || tls.server_config())),
    );
    tokio::spawn(server.run(
        move |client: &Client| {
            let name = client.common_name().unwrap_or_default();
            // Agents have certificates of the same CA, and must not change the inventory.
            if clients.contains(&name) {
                return router.clone();
            }
            let name = printable(&name);
            tracing::warn!("API: client {name:?} refused: not listed in --api-clients");
            Router::new().fallback(refused)
        },
        std::future::pending(),
    ));
    Ok(())
}

async fn refused() -> Response {
    let problem = "the client certificate's common name is not in --api-clients";
    (StatusCode::FORBIDDEN, Json(json!({ "error": problem }))).into_response()
}

async fn status(Extract(desk): Extract<PublisherApi>) -> Json<AgentRegistry> {
    // Nothing panics while it is locked.
    Json(desk.shared.lock().clone())
}

async fn change(Extract(desk): Extract<PublisherApi>, Json(change): Json<Change>) -> Response {
    // It waits for a file lock and for the disk.
    let done = tokio::task::spawn_blocking(move || {
        let PublisherApi {
            source,
            state,
            shared: _,
        } = desk;
        source.change(&Folder::open(&state), change)
    });
    let problem = match done.await {
        // The change is on disk; the version that contains it follows (RFC 9110, section 15.3.3).
        Ok(Ok(())) => return StatusCode::ACCEPTED.into_response(),
        Ok(Err(error)) => format!("{error:#}"),
        Err(error) => error.to_string(),
    };
    (
        StatusCode::UNPROCESSABLE_ENTITY,
        Json(json!({ "error": problem })),
    )
        .into_response()
}

#[derive(Debug)]
pub(super) struct PublisherMetrics {
    pub(super) registry: Registry,
    pub(super) sent: IntCounter,
    pub(super) sent_bytes: IntCounter,
    exceptions: IntCounter,
    ignored: IntCounter,
    pub(super) blob_bytes: IntGauge,
    pub(super) inventory_good: IntGauge,
    version: IntGauge,
    /// One gauge per field of [`Count`], in its order.
    agents: [IntGauge; 6],
}

impl PublisherMetrics {
    /// Registers all families with value zero.
    pub(super) fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        Ok(Self {
            sent: counter(
                &registry,
                "bosh_dns_sync_messages_total",
                "Announcements sent",
            )?,
            sent_bytes: counter(
                &registry,
                "bosh_dns_sync_message_bytes_total",
                "Bytes of announcements sent",
            )?,
            exceptions: counter(
                &registry,
                "bosh_dns_sync_exceptions_total",
                "Exceptions replied by agents",
            )?,
            ignored: counter(
                &registry,
                "bosh_dns_sync_ignored_messages_total",
                "Messages that match no open call",
            )?,
            blob_bytes: gauge(
                &registry,
                "bosh_dns_sync_blob_bytes",
                "Size of the newest blob in bytes",
            )?,
            inventory_good: gauge(
                &registry,
                "bosh_dns_sync_inventory_good",
                "1 while the newest inventory is in use",
            )?,
            version: gauge(&registry, "bosh_dns_sync_version", "Version of the fleet")?,
            agents: agent_gauges(&registry)?,
            registry,
        })
    }

    /// Updates the metrics derived from the plan.
    pub(super) fn set(&self, plan: &Plan, count: Count) {
        self.version.set(plan.registry.version.cast_signed());
        self.ignored
            .inc_by(plan.ignored.saturating_sub(self.ignored.get()));
        self.exceptions
            .inc_by(plan.exceptions.saturating_sub(self.exceptions.get()));
        let Count {
            agents,
            synced,
            unverified,
            disagreeing,
            failing,
            silent,
        } = count;
        let values = [agents, synced, unverified, disagreeing, failing, silent];
        for (gauge, value) in self.agents.iter().zip(values) {
            gauge.set(value as i64);
        }
    }
}

fn agent_gauges(registry: &Registry) -> prometheus::Result<[IntGauge; 6]> {
    Ok([
        gauge(registry, "bosh_dns_sync_agents", "Agents in the inventory")?,
        gauge(
            registry,
            "bosh_dns_sync_agents_synced",
            "Agents on the current version",
        )?,
        gauge(
            registry,
            "bosh_dns_sync_agents_unverified",
            "Agents that report the version without a digest",
        )?,
        gauge(
            registry,
            "bosh_dns_sync_agents_disagreeing",
            "Agents with a higher version or different records",
        )?,
        gauge(
            registry,
            "bosh_dns_sync_agents_failing",
            "Lagging agents that reported a reason",
        )?,
        gauge(
            registry,
            "bosh_dns_sync_agents_silent",
            "Lagging agents that do not answer",
        )?,
    ])
}

fn gauge(registry: &Registry, name: &str, help: &str) -> prometheus::Result<IntGauge> {
    register_int_gauge_with_registry!(name, help, registry)
}

fn counter(registry: &Registry, name: &str, help: &str) -> prometheus::Result<IntCounter> {
    register_int_counter_with_registry!(name, help, registry)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct CommandLine {
        #[command(flatten)]
        source: InventoryOptions,
    }

    #[tokio::test]
    async fn changes_are_accepted_or_explained() {
        let folder = tempfile::tempdir().unwrap();
        let inventory = folder.path().join("inventory.json");
        let text = r#"{"deployments": [{"name": "d", "instance_groups": [{"name": "g", "instances": [
            {"id": "a", "networks": {"n": "10.0.0.1"}}]}]}]}"#;
        std::fs::write(&inventory, text).unwrap();
        let words = [
            "source".as_ref(),
            "--inventory".as_ref(),
            inventory.as_os_str(),
        ];
        let state = folder.path().join("state");
        Folder::lock(&state).unwrap();
        let api = PublisherApi {
            source: CommandLine::parse_from(words).source,
            state,
            shared: Shared::default(),
        };
        for (id, code, problem) in [("a", 202, ""), ("x", 422, "x: ")] {
            let removal = Change::Remove { id: id.to_owned() };
            let response = change(Extract(api.clone()), Json(removal)).await;
            assert_eq!(response.status().as_u16(), code);
            let body = axum::body::to_bytes(response.into_body(), 1000)
                .await
                .unwrap();
            assert!(String::from_utf8_lossy(&body).contains(problem), "{body:?}");
        }
        api.shared.lock().set_version(7, "seven", 0);
        assert_eq!(status(Extract(api.clone())).await.0.version, 7);
        assert_eq!(refused().await.status().as_u16(), 403);
        let files = api.source.load(&Folder::open(&api.state));
        assert!(files.unwrap().instances.is_empty());
    }
}
