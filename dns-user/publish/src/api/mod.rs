//! The API for DNS Update Records, their lists and intents.
//!
//! | Path | Methods |
//! |---|---|
//! | `/v2/projects/{project}/dns-update-records` | GET, POST |
//! | `/v2/projects/{project}/dns-update-records/{name}` | GET, PUT, DELETE |
//! | `/v2/projects/{project}/inbound-intents[/{name}]` | the same |
//! | `/v2/projects/{project}/logical-clouds/{logical-cloud}/kv-pairs[/{name}]` | the same |
//! | `/v2/cluster-providers/{cluster-provider}/clusters/{cluster}/kv-pairs[/{name}]` | the same |
//! | `/v2/openapi.json` | GET |
//! | `/status`, `/resources`, `/healthz`, `/metrics` | GET |
//! | `/reload` | POST |
//!
//! `/v2/project/` is accepted for `/v2/projects/`, and a trailing slash is ignored, because
//! document 003 writes its paths so.

mod desk;
mod listen;
mod resources;

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Json, Router,
    body::Bytes,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{MethodRouter, get, post},
};
use serde_json::json;

use self::resources::Scope;
pub use self::{
    desk::{Desk, Health, Overview, ProviderOverview},
    listen::{Access, ControlSocket, serve_control, serve_tls},
};
use crate::{
    documents::Kind,
    update_record::{ListOwner, openapi},
};

/// Values of the placeholders in a path.
type Places = BTreeMap<String, String>;

/// Builds the scope of a request from its path.
type ScopeOf = fn(&Places) -> Scope;

/// Collections in the order of the OpenAPI document.
const COLLECTIONS: [(openapi::Collection, ScopeOf); 4] = [
    (
        openapi::Collection {
            path: "/v2/projects/{project}/dns-update-records",
            schema: "dnsrecord",
            item: "a DNS Update Record",
        },
        |places| Scope::of_project(Kind::UpdateRecord, place(places, "project")),
    ),
    (
        openapi::Collection {
            path: "/v2/projects/{project}/inbound-intents",
            schema: "inboundintent",
            item: "an inbound intent",
        },
        |places| Scope::of_project(Kind::Intent, place(places, "project")),
    ),
    (
        openapi::Collection {
            path: "/v2/projects/{project}/logical-clouds/{logical-cloud}/kv-pairs",
            schema: "dnsrecordlist",
            item: "the list of a logical cloud",
        },
        |places| {
            Scope::of_list(ListOwner::LogicalCloud {
                project: place(places, "project"),
                name: place(places, "logical-cloud"),
            })
        },
    ),
    (
        openapi::Collection {
            path: "/v2/cluster-providers/{cluster-provider}/clusters/{cluster}/kv-pairs",
            schema: "dnsrecordlist",
            item: "the list of a cluster",
        },
        |places| {
            Scope::of_list(ListOwner::Cluster {
                provider: place(places, "cluster-provider"),
                name: place(places, "cluster"),
            })
        },
    ),
];

fn place(places: &Places, name: &str) -> String {
    // The router has matched the path, so every placeholder has a value.
    places.get(name).cloned().unwrap_or_default()
}

/// Returns the router with all routes of the API.
pub fn routes(desk: Arc<Desk>) -> Router {
    let mut router = Router::new();
    for (collection, scope) in COLLECTIONS {
        let short = collection.path.replacen("/v2/projects/", "/v2/project/", 1);
        let mut paths = vec![collection.path.to_owned()];
        if short != collection.path {
            paths.push(short);
        }
        for path in paths {
            for end in ["", "/"] {
                router = router
                    .route(&format!("{path}{end}"), collection_methods(scope))
                    .route(&format!("{path}/{{name}}{end}"), item_methods(scope));
            }
        }
    }
    router
        .route("/v2/openapi.json", get(openapi_document))
        .route("/status", get(status))
        .route("/resources", get(stored_resources))
        .route("/reload", post(reload))
        .merge(plain_routes())
        .with_state(desk)
}

/// Returns the routes that are served without authentication.
pub fn metrics_routes(desk: Arc<Desk>) -> Router {
    plain_routes().with_state(desk)
}

fn plain_routes() -> Router<Arc<Desk>> {
    Router::new().route("/healthz", get(healthz)).route("/metrics", get(metrics))
}

fn collection_methods(scope: ScopeOf) -> MethodRouter<Arc<Desk>> {
    get(move |State(desk): State<Arc<Desk>>, Path(places): Path<Places>| async move {
        blocking(move || resources::list(&desk, &scope(&places))).await
    })
    .post(move |State(desk): State<Arc<Desk>>, Path(places): Path<Places>, body: Bytes| async move {
        blocking(move || resources::create(&desk, &scope(&places), &body)).await
    })
}

fn item_methods(scope: ScopeOf) -> MethodRouter<Arc<Desk>> {
    get(move |State(desk): State<Arc<Desk>>, Path(places): Path<Places>| async move {
        blocking(move || resources::read(&desk, &scope(&places), &place(&places, "name"))).await
    })
    .put(move |State(desk): State<Arc<Desk>>, Path(places): Path<Places>, body: Bytes| async move {
        blocking(move || resources::replace(&desk, &scope(&places), &place(&places, "name"), &body)).await
    })
    .delete(move |State(desk): State<Arc<Desk>>, Path(places): Path<Places>| async move {
        blocking(move || resources::delete(&desk, &scope(&places), &place(&places, "name"))).await
    })
}

/// Runs a request on a blocking thread, because the store waits for the disk.
async fn blocking(request: impl FnOnce() -> Response + Send + 'static) -> Response {
    tokio::task::spawn_blocking(request).await.unwrap_or_else(|error| {
        (StatusCode::INTERNAL_SERVER_ERROR, Json(json!({ "error": error.to_string() }))).into_response()
    })
}

async fn openapi_document() -> Response {
    let collections = COLLECTIONS.map(|(collection, _)| collection);
    Json(openapi::document(&collections, env!("CARGO_PKG_VERSION"))).into_response()
}

async fn status(State(desk): State<Arc<Desk>>) -> Response {
    Json(desk.overview()).into_response()
}

async fn stored_resources(State(desk): State<Arc<Desk>>) -> Response {
    blocking(move || match desk.store().all() {
        Ok(all) => Json(all).into_response(),
        Err(error) => resources::failure(&error),
    })
    .await
}

async fn reload(State(desk): State<Arc<Desk>>) -> Response {
    desk.wake();
    StatusCode::ACCEPTED.into_response()
}

async fn healthz(State(desk): State<Arc<Desk>>) -> Response {
    let Health { healthy, reasons } = desk.health();
    match healthy {
        true => "OK\n".into_response(),
        false => (StatusCode::SERVICE_UNAVAILABLE, reasons.join("\n") + "\n").into_response(),
    }
}

async fn metrics(State(desk): State<Arc<Desk>>) -> Response {
    desk.metrics().text().into_response()
}

#[cfg(test)]
mod tests;
