//! Handlers of the operator paths: status, resolve, log levels, reload, flush.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Query, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{Backend, refused};
use crate::ops::tap::parse_type;
use dns_kit::logs::{parse_level, requests, tags};
use dns_upstream::Selection;

pub(super) async fn status(State(backend): State<Arc<Backend>>) -> Response {
    Json(backend.status()).into_response()
}

#[derive(Debug, Deserialize)]
pub(super) struct ResolveParameters {
    /// Name to resolve, with or without the trailing dot.
    name: String,
    /// Query type; by default both types of addresses.
    #[serde(rename = "type")]
    query_type: Option<String>,
}

pub(super) async fn resolve(
    State(backend): State<Arc<Backend>>,
    Query(ResolveParameters { name, query_type }): Query<ResolveParameters>,
) -> Response {
    let query_type = match query_type.as_deref().map(|text| parse_type(text).ok_or(text)).transpose() {
        Ok(query_type) => query_type,
        Err(unknown) => return bad_request(format!("{unknown:?} is no query type")),
    };
    match backend.explain(&name, query_type) {
        Ok(explanation) => Json(explanation).into_response(),
        Err(reason) => refused(reason),
    }
}

/// Handles `/reload`: 200 on success, 409 if the last good version of any data stays in use.
pub(super) async fn reload(State(backend): State<Arc<Backend>>) -> Response {
    match backend.reload().await {
        Ok(reloaded) => {
            let status = if reloaded.failed.is_empty() { StatusCode::OK } else { StatusCode::CONFLICT };
            (status, Json(reloaded)).into_response()
        }
        Err(problem) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{problem}\n")).into_response(),
    }
}

pub(super) async fn flush(State(backend): State<Arc<Backend>>) -> Response {
    Json(json!({ "flushed": backend.flush(&Selection::default()).await })).into_response()
}

/// Word that undoes a change of a level.
pub const DEFAULT_LEVEL: &str = "default";

/// The values of a level, for messages.
pub const LEVELS: &str = "the levels are DEBUG, INFO, WARN, ERROR, NONE, and default";

/// Body of a POST to `/log`; absent members change nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogChange {
    /// New level: DEBUG, INFO, WARN, ERROR or NONE; `default` makes a tag follow the general level again,
    /// or returns the general level to the configured one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub level: Option<String>,
    /// Tag the level applies to; the general level if absent.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub tag: Option<String>,
    /// Maximum number of request lines per second.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub requests_per_second: Option<u32>,
}

pub(super) async fn levels(State(backend): State<Arc<Backend>>) -> Response {
    let known: Vec<_> =
        tags::TAGS.iter().map(|tag| json!({ "name": tag.name, "about": tag.about })).collect();
    let levels = backend.logs.as_ref().map(|logs| logs.status());
    Json(json!({ "levels": levels, "known_tags": known })).into_response()
}

pub(super) async fn change_levels(
    State(backend): State<Arc<Backend>>,
    Json(change): Json<LogChange>,
) -> Response {
    let Some(logs) = &backend.logs else {
        return (StatusCode::CONFLICT, "this process does not log\n").into_response();
    };
    let LogChange { level, tag, requests_per_second } = change;
    let tag = match tag.as_deref().map(|tag| tags::spelt(tag).ok_or(tag)).transpose() {
        Ok(tag) => tag,
        Err(unknown) => {
            let known = tags::names().collect::<Vec<_>>().join(", ");
            return bad_request(format!("unknown tag {unknown}; the tags are {known}"));
        }
    };
    let changed = match (level.as_deref(), tag) {
        (None, None) => Ok(()),
        (None, Some(_)) => return bad_request("a tag needs a level"),
        (Some(text), tag) if text.eq_ignore_ascii_case(DEFAULT_LEVEL) => logs.unset(tag),
        (Some(text), tag) => match parse_level(text) {
            Some(level) => logs.set(tag, level),
            None => return bad_request(LEVELS),
        },
    };
    if let Some(limit) = requests_per_second {
        requests::set_limit(limit);
    }
    match changed {
        Ok(()) => Json(logs.status()).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

pub(super) fn bad_request(reason: impl Into<String>) -> Response {
    (StatusCode::BAD_REQUEST, reason.into() + "\n").into_response()
}
