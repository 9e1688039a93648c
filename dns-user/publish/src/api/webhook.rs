//! The server of external-dns's webhook protocol, for fleet names.

use std::sync::Arc;

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, HeaderName, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use parking_lot::Mutex;
use serde::{Serialize, de::DeserializeOwned};

use super::{blocking, read_body, resources::refusal};
use crate::{
    fleet::{AliasWriter, WriteError},
    webhook::{Changes, Endpoint, MAX_MESSAGE, MEDIA_TYPE},
};

type Shared = Arc<Mutex<AliasWriter>>;

pub(crate) fn webhook_routes(writer: AliasWriter) -> Router {
    Router::new()
        .route("/", get(negotiate))
        .route("/records", get(list).post(apply))
        .route("/adjustendpoints", post(adjust))
        .layer(middleware::from_fn(check_media_types))
        .route("/healthz", get(async || "OK\n"))
        .with_state(Arc::new(Mutex::new(writer)))
}

async fn check_media_types(request: Request, next: Next) -> Response {
    match refuse_media_type(request.headers()) {
        Some(refused) => refused,
        None => next.run(request).await,
    }
}

/// Refuses other versions of the protocol. Before 0.15, external-dns omits one of the headers.
fn refuse_media_type(headers: &HeaderMap) -> Option<Response> {
    let other = |name: HeaderName| {
        let value = headers.get(name)?.to_str().unwrap_or_default().replace(' ', "");
        (value != MEDIA_TYPE && value != "*/*").then_some(value)
    };
    let (code, reason) = match (other(header::ACCEPT), other(header::CONTENT_TYPE)) {
        (Some(other), _) => (StatusCode::NOT_ACCEPTABLE, format!("Accept is {other:?}; accept {MEDIA_TYPE}")),
        (None, Some(other)) => {
            (StatusCode::UNSUPPORTED_MEDIA_TYPE, format!("Content-Type is {other:?}; send {MEDIA_TYPE}"))
        }
        (None, None) => return None,
    };
    Some(refusal(code, &reason))
}

async fn negotiate(State(writer): State<Shared>) -> Response {
    let mut response = reply(writer.lock().domains());
    // external-dns before 0.15 requires it.
    response.headers_mut().insert(header::VARY, header::HeaderValue::from_static("Content-Type"));
    response
}

async fn list(State(writer): State<Shared>) -> Response {
    blocking(move || writer.lock().list().map_or_else(|error| failed(&error), |records| reply(&records)))
        .await
}

async fn adjust(State(writer): State<Shared>, body: Body) -> Response {
    let endpoints: Vec<Endpoint> = match read_message(body).await {
        Ok(endpoints) => endpoints,
        Err(refused) => return refused,
    };
    let adjusted = move || {
        writer.lock().adjust(&endpoints).map_or_else(|error| failed(&error), |records| reply(&records))
    };
    blocking(adjusted).await
}

async fn apply(State(writer): State<Shared>, body: Body) -> Response {
    let changes: Changes = match read_message(body).await {
        Ok(changes) => changes,
        Err(refused) => return refused,
    };
    blocking(move || match writer.lock().apply(&changes) {
        Ok(records) => {
            tracing::info!(records, "external-dns changed names of the fleet");
            StatusCode::NO_CONTENT.into_response()
        }
        Err(error) => failed(&error),
    })
    .await
}

async fn read_message<T: DeserializeOwned>(body: Body) -> Result<T, Response> {
    let body = read_body(body, MAX_MESSAGE).await?;
    serde_json::from_slice(&body).map_err(|error| {
        refusal(StatusCode::BAD_REQUEST, &format!("not a message of the protocol: {error}; correct it"))
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
        WriteError::Conflict(_) => StatusCode::SERVICE_UNAVAILABLE,
        WriteError::File { .. } => StatusCode::INTERNAL_SERVER_ERROR,
    };
    tracing::warn!(%error, "a request of external-dns failed");
    refusal(code, &error.to_string())
}
