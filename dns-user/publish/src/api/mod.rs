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

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::Arc,
};

use axum::{
    Json, Router,
    body::{Body, Bytes, to_bytes},
    extract::{Path, Query, Request, State, rejection::QueryRejection},
    http::{HeaderMap, HeaderName, Method, StatusCode, Uri, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{MethodRouter, get, post},
};
use dns_kit::{
    accounts,
    http_server::{Listener, Server},
    tls::RotatingTls,
    unix_socket::{self, ControlListener, ControlSocket},
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::net::TcpListener;

use self::resources::{Page, Preconditions, Scope, refusal};
use crate::{
    documents::Kind,
    fleet::{AliasWriter, KnownTargets, ServerClient, WriteError, known_targets},
    go_json,
    status::ApiState,
    update_record::ListOwner,
    webhook::{Changes, Endpoint, EndpointList, MAX_MESSAGE, MEDIA_TYPE, is_media_type},
};

/// Maximum size of a request body in octets.
const MAX_BODY: usize = 1 << 20;

type PathParams = BTreeMap<String, String>;

type ScopeOf = fn(&PathParams) -> Scope;

/// Collections: their paths and scopes. `openapi.json` describes them.
const COLLECTIONS: [(&str, ScopeOf); 4] = [
    ("/v2/projects/{project}/dns-update-records", |params| {
        Scope::Project(Kind::UpdateRecord, param(params, "project"))
    }),
    ("/v2/projects/{project}/inbound-intents", |params| {
        Scope::Project(Kind::Intent, param(params, "project"))
    }),
    (
        "/v2/projects/{project}/logical-clouds/{logical-cloud}/kv-pairs",
        |params| {
            Scope::List(ListOwner::LogicalCloud {
                project: param(params, "project"),
                name: param(params, "logical-cloud"),
            })
        },
    ),
    (
        "/v2/cluster-providers/{cluster-provider}/clusters/{cluster}/kv-pairs",
        |params| {
            Scope::List(ListOwner::Cluster {
                provider: param(params, "cluster-provider"),
                name: param(params, "cluster"),
            })
        },
    ),
];

fn param(params: &PathParams, name: &str) -> String {
    // The router has matched the path, so every placeholder has a value.
    params.get(name).cloned().unwrap_or_default()
}

pub(crate) fn routes(api_state: Arc<ApiState>) -> Router {
    let mut router = Router::new();
    for (path, scope) in COLLECTIONS {
        let paths = BTreeSet::from([
            path.to_owned(),
            path.replacen("/v2/projects/", "/v2/project/", 1),
        ]);
        for path in paths {
            // The router compares paths as they are, and some clients write what the document has.
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
        // Every refusal has the form of a list of problems, these two as well.
        .fallback(|uri: Uri| async move {
            let reason = format!(
                "{} is not a path of the API; see /v2/openapi.json",
                uri.path()
            );
            refusal(StatusCode::NOT_FOUND, &reason)
        })
        .method_not_allowed_fallback(|method: Method| async move {
            let reason = format!("{method} is not possible here; use one of the methods in Allow");
            refusal(StatusCode::METHOD_NOT_ALLOWED, &reason)
        })
        .with_state(api_state)
}

/// Returns the routes that are served without authentication.
pub(crate) fn metrics_routes(api_state: Arc<ApiState>) -> Router {
    plain_routes().with_state(api_state)
}

fn plain_routes() -> Router<Arc<ApiState>> {
    Router::new()
        .route("/healthz", get(healthz))
        .route("/metrics", get(metrics))
}

type Shared = State<Arc<ApiState>>;

type Params = Path<PathParams>;

fn collection_methods(scope: ScopeOf) -> MethodRouter<Arc<ApiState>> {
    get(
        move |State(state): Shared, Path(params): Params, uri: Uri, page: PageOf| async move {
            let page = page
                .map_err(|error| refusal(StatusCode::BAD_REQUEST, &error.body_text()))?
                .0;
            blocking(move || resources::list(&state, &scope(&params), uri.path(), &page)).await
        },
    )
    .post(
        move |State(state): Shared, Path(params): Params, uri: Uri, body: Body| async move {
            let body = read_body(body, MAX_BODY).await?;
            let conditions = Preconditions::default();
            blocking(move || {
                let place = (uri.path(), None);
                resources::write(&state, &scope(&params), place, &body, &conditions)
            })
            .await
        },
    )
}

type PageOf = Result<Query<Page>, QueryRejection>;

fn item_methods(scope: ScopeOf) -> MethodRouter<Arc<ApiState>> {
    get(
        move |State(state): Shared, Path(params): Params, headers: HeaderMap| async move {
            let name = param(&params, "name");
            let conditions = Preconditions::of(&headers);
            blocking(move || resources::read(&state, &scope(&params), &name, &conditions)).await
        },
    )
    .put(
        move |State(state): Shared,
              Path(params): Params,
              headers: HeaderMap,
              body: Body| async move {
            let name = param(&params, "name");
            let conditions = Preconditions::of(&headers);
            let body = read_body(body, MAX_BODY).await?;
            blocking(move || {
                let place = ("", Some(&*name));
                resources::write(&state, &scope(&params), place, &body, &conditions)
            })
            .await
        },
    )
    .delete(
        move |State(state): Shared, Path(params): Params, headers: HeaderMap| async move {
            let name = param(&params, "name");
            let conditions = Preconditions::of(&headers);
            blocking(move || resources::delete(&state, &scope(&params), &name, &conditions)).await
        },
    )
}

/// A response, or a refusal that ended the request early.
type Answer = Result<Response, Response>;

/// Reads the body of a request. The server ends one that does not arrive in time.
async fn read_body(body: Body, limit: usize) -> Result<Bytes, Response> {
    to_bytes(body, limit).await.map_err(|_| {
        let reason = format!("the body is incomplete, or larger than {limit} octets; send less");
        refusal(StatusCode::PAYLOAD_TOO_LARGE, &reason)
    })
}

/// Runs a request on a blocking thread, because the store waits for the disk.
async fn blocking(request: impl FnOnce() -> Response + Send + 'static) -> Answer {
    tokio::task::spawn_blocking(request)
        .await
        .map_err(|error| refusal(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()))
}

async fn openapi_document() -> Response {
    (
        [(header::CONTENT_TYPE, "application/json")],
        include_str!("openapi.json"),
    )
        .into_response()
}

async fn status(State(api_state): Shared) -> Response {
    // Serialised under the lock, which costs less than a copy of a status of 10,000 names.
    Json(&*api_state.overview.lock()).into_response()
}

async fn reload(State(api_state): Shared) -> Response {
    api_state.change.notify_one();
    // The documents are read later (RFC 9110, section 15.3.3).
    StatusCode::ACCEPTED.into_response()
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ConfirmRequest {
    /// Maximum number of names that each provider may delete in its next round.
    pub deletions: usize,
    /// Providers as `PROJECT/RECORD`; all without any.
    #[serde(default)]
    pub providers: Vec<String>,
}

/// Runs a round of each provider that may delete as many names as the operator confirms. The
/// running publisher has the credentials that a command lacks.
async fn confirm(State(api_state): Shared, body: Body) -> Answer {
    let body = read_body(body, MAX_BODY).await?;
    let ConfirmRequest {
        deletions,
        providers,
    } = serde_json::from_slice(&body).map_err(|error| {
        let reason = format!("the body is not a confirmation: {error}; send {{\"deletions\": N}}");
        refusal(StatusCode::BAD_REQUEST, &reason)
    })?;
    let providers = if providers.is_empty() {
        api_state.providers()
    } else {
        providers
    };
    let mut results = BTreeMap::new();
    for provider in providers {
        let Some(result) = api_state.confirm(&provider, deletions).await else {
            let reason =
                format!("provider {provider:?} is not running; see `bosh-dns-publish status`");
            return Err(refusal(StatusCode::NOT_FOUND, &reason));
        };
        results.insert(provider, result);
    }
    Ok(Json(results).into_response())
}

async fn healthz(State(api_state): Shared) -> Response {
    match &api_state.late_rounds()[..] {
        [] => "OK\n".into_response(),
        reasons => (StatusCode::SERVICE_UNAVAILABLE, reasons.join("\n") + "\n").into_response(),
    }
}

async fn metrics(State(api_state): Shared) -> Response {
    api_state.metrics.text().into_response()
}

/// Binds the control socket for the process's user, and for a group if one is given.
pub(crate) fn bind_control(
    path: &std::path::Path,
    group: Option<&str>,
) -> io::Result<ControlListener> {
    let mut access = unix_socket::Access {
        user: None,
        group: None,
    };
    if let Some(name) = group {
        // Its members would be refused without a reason, so the start fails.
        let found = accounts::group("control.group", name).map_err(io::Error::other)?;
        access.group = Some(found.gid);
    }
    ControlSocket::bind(path, access, &[])?.listen()
}

pub(crate) async fn serve_control(listener: ControlListener, routes: Router) {
    let server = Server::new("the control socket", Listener::Control(listener));
    server
        .run(move |_| routes.clone(), std::future::pending())
        .await;
}

/// Serves clients with a certificate of the CA, whose common name must be one of `names`, if there are any.
pub(crate) async fn serve_tls(
    listener: TcpListener,
    tls: Arc<RotatingTls>,
    names: Option<Vec<String>>,
    routes: Router,
) {
    // Refused in HTTP, not in the handshake, where a client would learn nothing about the cause.
    let refused = Router::new().fallback(|| async {
        (
            StatusCode::FORBIDDEN,
            "the client certificate's common name is not in api.clients\n",
        )
    });
    // Asked for each connection, so that a rotated certificate applies to the next one.
    let listener = Listener::Tls(listener, Box::new(move || tls.server_config()));
    let server = Server::new("the API", listener);
    server
        .run(
            move |client: &dns_kit::http_server::Client| {
                // The CA may have issued certificates to others.
                let is_named = match (&names, client.common_name()) {
                    (None, _) => true,
                    (Some(names), Some(name)) => names.contains(&name),
                    (Some(_), None) => false,
                };
                if is_named {
                    routes.clone()
                } else {
                    refused.clone()
                }
            },
            std::future::pending(),
        )
        .await;
}

struct WebhookState {
    writer: Mutex<AliasWriter>,
    server: ServerClient,
}

pub(crate) fn webhook_routes(writer: AliasWriter, server: ServerClient) -> Router {
    Router::new()
        .route("/", get(negotiate))
        .route("/records", get(list).post(apply))
        .route("/adjustendpoints", post(adjust))
        // Not for `/healthz` behind it, which kubelet asks without these headers.
        .layer(middleware::from_fn(check_media_types))
        .route("/healthz", get(async || "OK\n"))
        .with_state(Arc::new(WebhookState {
            writer: Mutex::new(writer),
            server,
        }))
}

/// Refuses other versions of the protocol. Before 0.15, external-dns omits one of the headers.
async fn check_media_types(request: Request, next: Next) -> Response {
    let (code, reason) = match (
        other_media_type(request.headers(), &header::ACCEPT),
        other_media_type(request.headers(), &header::CONTENT_TYPE),
    ) {
        // 406 and 415 tell which header is wrong (RFC 9110, sections 15.5.7 and 15.5.16).
        (Some(other), _) => (
            StatusCode::NOT_ACCEPTABLE,
            format!("Accept is {other:?}; accept {MEDIA_TYPE}"),
        ),
        (None, Some(other)) => (
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            format!("Content-Type is {other:?}; send {MEDIA_TYPE}"),
        ),
        (None, None) => return next.run(request).await,
    };
    refusal(code, &reason)
}

/// Returns the value of a header that is present and names another media type.
fn other_media_type(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let value = headers.get(name)?.to_str().unwrap_or_default();
    if is_media_type(value) {
        return None;
    }
    Some(value.to_owned())
}

async fn negotiate(State(webhook): State<Arc<WebhookState>>) -> Response {
    let mut response = reply(&webhook.writer.lock().domains);
    // external-dns before 0.15 requires it.
    response.headers_mut().insert(
        header::VARY,
        header::HeaderValue::from_static("Content-Type"),
    );
    response
}

async fn list(State(webhook): State<Arc<WebhookState>>) -> Answer {
    blocking(move || {
        webhook
            .writer
            .lock()
            .list()
            .map_or_else(|error| failed(&error), |records| reply(&records))
    })
    .await
}

async fn adjust(State(webhook): State<Arc<WebhookState>>, body: Body) -> Answer {
    let EndpointList(endpoints) = read_message(body).await?;
    let known = webhook.known_targets(endpoints.iter()).await?;
    blocking(move || reply(&webhook.writer.lock().adjust(&endpoints, &known))).await
}

async fn apply(State(webhook): State<Arc<WebhookState>>, body: Body) -> Answer {
    let changes: Changes = read_message(body).await?;
    let known = webhook
        .known_targets(changes.create.iter().chain(&changes.update_new))
        .await?;
    blocking(
        move || match webhook.writer.lock().apply(&changes, &known) {
            Ok(records) => {
                tracing::info!(records, "external-dns changed names of the fleet");
                StatusCode::NO_CONTENT.into_response()
            }
            Err(error) => failed(&error),
        },
    )
    .await
}

impl WebhookState {
    /// Asks the server which targets of CNAMEs are names of the fleet, if it may know some.
    async fn known_targets<'a>(
        &self,
        endpoints: impl Iterator<Item = &'a Endpoint> + Clone,
    ) -> Result<KnownTargets, Response> {
        // The lock is released before the server is asked, which may hang.
        let targets = tokio::task::block_in_place(|| self.writer.lock().other_targets(endpoints));
        let targets = targets.map_err(|error| failed(&error))?;
        known_targets(&self.server, targets)
            .await
            .map_err(|error| failed(&error))
    }
}

async fn read_message<T: DeserializeOwned>(body: Body) -> Result<T, Response> {
    let body = read_body(body, MAX_MESSAGE).await?;
    go_json::from_slice(&body).map_err(|error| {
        refusal(
            StatusCode::BAD_REQUEST,
            &format!("not a message of the protocol: {error}; correct it"),
        )
    })
}

fn reply(body: &impl Serialize) -> Response {
    let body = serde_json::to_vec(body).unwrap_or_default();
    ([(header::CONTENT_TYPE, MEDIA_TYPE)], body).into_response()
}

/// external-dns repeats a request after a response of the class 5xx, and gives up after others.
fn failed(error: &WriteError) -> Response {
    let code = match error {
        WriteError::Unfit { .. } => StatusCode::BAD_REQUEST,
        WriteError::Conflict(_) | WriteError::Server(_) => StatusCode::SERVICE_UNAVAILABLE,
        WriteError::File { .. } => StatusCode::INTERNAL_SERVER_ERROR,
    };
    tracing::warn!(%error, "a request of external-dns failed");
    refusal(code, &error.to_string())
}

#[cfg(test)]
mod tests;
