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
//! | `/status`, `/healthz`, `/metrics` | GET |
//! | `/reload`, `/confirm` | POST |
//!
//! `/v2/project/` is accepted for `/v2/projects/`, and a trailing slash is ignored, because
//! document 003 writes its paths so.

mod resources;
mod state;
mod webhook;

use std::{collections::BTreeMap, io, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::{Body, Bytes, to_bytes},
    extract::{Path, Query, State, rejection::QueryRejection},
    http::{HeaderMap, Method, StatusCode, Uri, header},
    response::{IntoResponse, Response},
    routing::{MethodRouter, get, post},
};
use dns_kit::{
    http_server::{Listener, Server},
    tls::RotatingTls,
    unix_socket::{self, ControlSocket},
};
use nix::unistd::Group;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::net::TcpListener;

use self::resources::{Page, Preconditions, Scope};
pub use self::state::{ApiState, Confirmation, Confirmed, Health, Overview, ProviderOverview};
pub(crate) use self::webhook::webhook_routes;
use crate::{documents::Kind, update_record::ListOwner};

/// Maximum size of a request body in octets.
const MAX_BODY: usize = 1 << 20;

/// Timeout of receiving the body of a request.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Values of the placeholders in a path.
type PathParams = BTreeMap<String, String>;

/// Builds the scope of a request from its path.
type ScopeOf = fn(&PathParams) -> Scope;

/// Collections: their paths and scopes. `openapi.json` describes them.
const COLLECTIONS: [(&str, ScopeOf); 4] = [
    ("/v2/projects/{project}/dns-update-records", |params| {
        Scope::of_project(Kind::UpdateRecord, param(params, "project"))
    }),
    ("/v2/projects/{project}/inbound-intents", |params| {
        Scope::of_project(Kind::Intent, param(params, "project"))
    }),
    ("/v2/projects/{project}/logical-clouds/{logical-cloud}/kv-pairs", |params| {
        Scope::of_list(ListOwner::LogicalCloud {
            project: param(params, "project"),
            name: param(params, "logical-cloud"),
        })
    }),
    ("/v2/cluster-providers/{cluster-provider}/clusters/{cluster}/kv-pairs", |params| {
        Scope::of_list(ListOwner::Cluster {
            provider: param(params, "cluster-provider"),
            name: param(params, "cluster"),
        })
    }),
];

fn param(params: &PathParams, name: &str) -> String {
    // The router has matched the path, so every placeholder has a value.
    params.get(name).cloned().unwrap_or_default()
}

/// Returns the router with all routes of the API.
pub fn routes(api_state: Arc<ApiState>) -> Router {
    let mut router = Router::new();
    for (path, scope) in COLLECTIONS {
        let short = path.replacen("/v2/projects/", "/v2/project/", 1);
        let mut paths = vec![path.to_owned()];
        if short != path {
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
        .route("/reload", post(reload))
        .route("/confirm", post(confirm))
        .merge(plain_routes())
        .fallback(|uri: Uri| async move {
            let reason = format!("{} is not a path of the API; see /v2/openapi.json", uri.path());
            resources::refusal(StatusCode::NOT_FOUND, &reason)
        })
        .method_not_allowed_fallback(|method: Method| async move {
            let reason = format!("{method} is not possible here; use one of the methods in Allow");
            resources::refusal(StatusCode::METHOD_NOT_ALLOWED, &reason)
        })
        .with_state(api_state)
}

/// Returns the routes that are served without authentication.
pub fn metrics_routes(api_state: Arc<ApiState>) -> Router {
    plain_routes().with_state(api_state)
}

fn plain_routes() -> Router<Arc<ApiState>> {
    Router::new().route("/healthz", get(healthz)).route("/metrics", get(metrics))
}

fn collection_methods(scope: ScopeOf) -> MethodRouter<Arc<ApiState>> {
    get(
        move |State(api_state): State<Arc<ApiState>>,
              Path(params): Path<PathParams>,
              uri: Uri,
              page: PageOf| async move {
            let page = match page {
                Ok(Query(page)) => page,
                Err(error) => return resources::refusal(StatusCode::BAD_REQUEST, &error.body_text()),
            };
            blocking(move || resources::list(&api_state, &scope(&params), uri.path(), &page)).await
        },
    )
    .post(
        move |State(api_state): State<Arc<ApiState>>,
              Path(params): Path<PathParams>,
              uri: Uri,
              body: Body| async move {
            let body = match read_body(body, MAX_BODY).await {
                Ok(body) => body,
                Err(refusal) => return refusal,
            };
            blocking(move || resources::create(&api_state, &scope(&params), uri.path(), &body)).await
        },
    )
}

/// Query of a list.
type PageOf = Result<Query<Page>, QueryRejection>;

fn item_methods(scope: ScopeOf) -> MethodRouter<Arc<ApiState>> {
    get(move |State(api_state): State<Arc<ApiState>>, Path(params): Path<PathParams>, headers: HeaderMap| async move {
        let conditions = Preconditions::of(&headers);
        blocking(move || resources::read(&api_state, &scope(&params), &param(&params, "name"), &conditions)).await
    })
    .put(
        move |State(api_state): State<Arc<ApiState>>, Path(params): Path<PathParams>, headers: HeaderMap, body: Body| async move {
            let conditions = Preconditions::of(&headers);
            let body = match read_body(body, MAX_BODY).await {
                Ok(body) => body,
                Err(refusal) => return refusal,
            };
            let name = param(&params, "name");
            blocking(move || resources::replace(&api_state, &scope(&params), &name, &body, &conditions)).await
        },
    )
    .delete(move |State(api_state): State<Arc<ApiState>>, Path(params): Path<PathParams>, headers: HeaderMap| async move {
        let conditions = Preconditions::of(&headers);
        blocking(move || resources::delete(&api_state, &scope(&params), &param(&params, "name"), &conditions)).await
    })
}

/// Reads the body of a request. A client that stops sending must not hold its connection.
async fn read_body(body: Body, limit: usize) -> Result<Bytes, Response> {
    match tokio::time::timeout(BODY_TIMEOUT, to_bytes(body, limit)).await {
        Ok(Ok(body)) => Ok(body),
        Ok(Err(_)) => {
            let reason = format!("the body is incomplete, or larger than {limit} octets; send less");
            Err(resources::refusal(StatusCode::PAYLOAD_TOO_LARGE, &reason))
        }
        Err(_) => {
            let reason =
                format!("the body did not arrive within {} s; send it at once", BODY_TIMEOUT.as_secs());
            Err(resources::refusal(StatusCode::REQUEST_TIMEOUT, &reason))
        }
    }
}

/// Runs a request on a blocking thread, because the store waits for the disk.
async fn blocking(request: impl FnOnce() -> Response + Send + 'static) -> Response {
    tokio::task::spawn_blocking(request).await.unwrap_or_else(|error| {
        (StatusCode::INTERNAL_SERVER_ERROR, Json(json!({ "error": error.to_string() }))).into_response()
    })
}

async fn openapi_document() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], include_str!("openapi.json")).into_response()
}

async fn status(State(api_state): State<Arc<ApiState>>) -> Response {
    Json(api_state.overview()).into_response()
}

async fn reload(State(api_state): State<Arc<ApiState>>) -> Response {
    api_state.wake();
    StatusCode::ACCEPTED.into_response()
}

/// Body of a request to `/confirm`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfirmRequest {
    /// Maximum number of names that each provider may delete in its next round.
    pub deletions: usize,
    /// Providers as `PROJECT/RECORD`; all without any.
    #[serde(default)]
    pub providers: Vec<String>,
}

/// Runs a round of each provider that may delete as many names as the operator confirms. The
/// running publisher has the credentials that a command lacks.
async fn confirm(State(api_state): State<Arc<ApiState>>, body: Body) -> Response {
    let body = match read_body(body, MAX_BODY).await {
        Ok(body) => body,
        Err(refusal) => return refusal,
    };
    let request: ConfirmRequest = match serde_json::from_slice(&body) {
        Ok(request) => request,
        Err(error) => {
            let reason = format!("the body is not a confirmation: {error}; send {{\"deletions\": N}}");
            return resources::refusal(StatusCode::BAD_REQUEST, &reason);
        }
    };
    let ConfirmRequest { deletions, providers } = request;
    let providers = if providers.is_empty() { api_state.providers() } else { providers };
    let mut results = BTreeMap::new();
    for provider in providers {
        let Some(result) = api_state.confirm(&provider, deletions).await else {
            let reason = format!("provider {provider:?} is not running; see `bosh-dns-publish status`");
            return resources::refusal(StatusCode::NOT_FOUND, &reason);
        };
        results.insert(provider, result);
    }
    Json(results).into_response()
}

async fn healthz(State(api_state): State<Arc<ApiState>>) -> Response {
    let Health { healthy, reasons } = api_state.health();
    match healthy {
        true => "OK\n".into_response(),
        false => (StatusCode::SERVICE_UNAVAILABLE, reasons.join("\n") + "\n").into_response(),
    }
}

async fn metrics(State(api_state): State<Arc<ApiState>>) -> Response {
    api_state.metrics().text().into_response()
}

/// Clients that are admitted by their certificate.
#[derive(Clone, Debug)]
pub enum Access {
    /// All clients with a certificate of the CA.
    All,
    /// Clients whose certificate has one of these common names.
    Names(Arc<[String]>),
}

/// Binds the control socket for the process's user, and for a group if one is given.
pub fn bind_control(path: &std::path::Path, group: Option<&str>) -> io::Result<ControlSocket> {
    let group = match group {
        Some(name) => {
            let unknown =
                || io::Error::new(io::ErrorKind::NotFound, format!("group {name:?} does not exist"));
            Some(Group::from_name(name)?.ok_or_else(unknown)?.gid)
        }
        None => None,
    };
    ControlSocket::bind(path, unix_socket::Access { user: None, group }, &[])
}

/// Serves the control socket until dropped.
pub async fn serve_control(socket: ControlSocket, routes: Router) -> io::Result<()> {
    let server = Server::new("the control socket", Listener::Control(socket.listen()?));
    server.run(move |_| routes.clone(), std::future::pending()).await;
    Ok(())
}

/// Serves mutual TLS until dropped.
pub async fn serve_tls(listener: TcpListener, tls: Arc<RotatingTls>, access: Access, routes: Router) {
    let refused = Router::new().fallback(|| async {
        (StatusCode::FORBIDDEN, "the client certificate's common name is not in api.clients\n")
    });
    let listener = Listener::Tls(listener, Box::new(move || tls.server_config()));
    let server = Server::new("the API", listener);
    let routes = move |client: &dns_kit::http_server::Client| {
        let is_admitted = match &access {
            Access::All => true,
            Access::Names(names) => client.common_name().is_some_and(|name| names.contains(&name)),
        };
        if is_admitted { routes.clone() } else { refused.clone() }
    };
    server.run(routes, std::future::pending()).await;
}

#[cfg(test)]
mod tests;
