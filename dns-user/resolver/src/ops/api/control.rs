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

use super::{
    Backend, NameRefused,
    backend::{LocalReply, parse},
    refused,
};
use crate::ops::tap::parse_type;
use dns_kit::logs::{parse_level, requests, tags};
use dns_upstream::{Listing, Selection};

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
    let query_type = match query_type.as_deref().map(number_of_type).transpose() {
        Ok(query_type) => query_type,
        Err(unknown) => return bad_request(unknown),
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
            let status = if reloaded.failed.is_empty() {
                StatusCode::OK
            } else {
                // Scripts need no parser to see that something old stays in use.
                StatusCode::CONFLICT
            };
            (status, Json(reloaded)).into_response()
        }
        Err(problem) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{problem}\n")).into_response(),
    }
}

pub(super) async fn flush_all(State(backend): State<Arc<Backend>>) -> Response {
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
    let known: Vec<_> = tags::TAGS
        .iter()
        .map(|tag| json!({ "name": tag.name, "about": tag.about }))
        .collect();
    Json(json!({ "levels": backend.logs.status(), "known_tags": known })).into_response()
}

pub(super) async fn change_levels(
    State(backend): State<Arc<Backend>>,
    Json(change): Json<LogChange>,
) -> Response {
    let logs = &backend.logs;
    let LogChange {
        level,
        tag,
        requests_per_second,
    } = change;
    let tag = match tag
        .as_deref()
        .map(|tag| tags::spelt(tag).ok_or(tag))
        .transpose()
    {
        Ok(tag) => tag,
        Err(unknown) => {
            let known = tags::names().collect::<Vec<_>>().join(", ");
            return bad_request(format!("unknown tag {unknown}; the tags are {known}"));
        }
    };
    match (level.as_deref(), tag) {
        (None, None) => {}
        // A request that changes nothing would look like a success.
        (None, Some(_)) => return bad_request("a tag needs a level"),
        (Some(text), tag) if text.eq_ignore_ascii_case(DEFAULT_LEVEL) => logs.unset(tag),
        (Some(text), tag) => match parse_level(text) {
            Some(level) => logs.set(tag, level),
            None => return bad_request(LEVELS),
        },
    }
    // After the level has been accepted: a refused request changes nothing.
    if let Some(limit) = requests_per_second {
        requests::set_limit(limit);
    }
    Json(logs.status()).into_response()
}

/// Parses a query type; the error is the reason in words.
fn number_of_type(text: &str) -> Result<u16, String> {
    parse_type(text)
        .ok_or_else(|| format!("{text:?} is no query type; use a name such as AAAA or TYPE65"))
}

fn bad_request(reason: impl Into<String>) -> Response {
    (StatusCode::BAD_REQUEST, reason.into() + "\n").into_response()
}

//----------- Cached answers ----------------------------------------------------

/// Default limit of answers per response.
const DEFAULT_LIMIT: usize = 10_000;

/// Parameters of `/cache`: criteria of the answers, and their maximum number; an absent criterion matches all.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListParameters {
    name: Option<String>,
    zone: Option<String>,
    #[serde(rename = "type")]
    query_type: Option<String>,
    limit: Option<usize>,
}

/// Response of `/cache`.
#[derive(Debug, Serialize, Deserialize)]
pub struct CacheContents {
    /// The answers of recursors and handlers.
    #[serde(flatten)]
    pub listing: Listing,
    /// Local replies of other types that interfaces give, sorted by name.
    pub local_replies: Vec<LocalReply>,
}

/// Body of a POST to `/cache/flush`: at least one criterion for the answers, or `all`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheFlush {
    /// Only this name, none below it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub name: Option<String>,
    /// The names at and below this one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub zone: Option<String>,
    /// The query type: A, TYPE65.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none", default)]
    pub query_type: Option<String>,
    /// Every answer in the cache.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub all: bool,
}

/// Selects cached answers; the error is the reason in words.
fn selection(
    name: Option<&str>,
    zone: Option<&str>,
    query_type: Option<&str>,
) -> Result<Selection, NameRefused> {
    let query_type = query_type.map(number_of_type).transpose();
    Ok(Selection {
        name: name.map(parse).transpose()?,
        zone: zone.map(parse).transpose()?,
        query_type: query_type.map_err(NameRefused)?,
    })
}

/// Handles `/cache`: the selected answers in the order of their names, with their records if a
/// single name is selected.
pub(super) async fn list_cached(
    State(backend): State<Arc<Backend>>,
    Query(parameters): Query<ListParameters>,
) -> Response {
    let ListParameters {
        name,
        zone,
        query_type,
        limit,
    } = parameters;
    let selection = match selection(name.as_deref(), zone.as_deref(), query_type.as_deref()) {
        Ok(selection) => selection,
        Err(NameRefused(reason)) => return bad_request(reason),
    };
    let limit = limit.unwrap_or(DEFAULT_LIMIT);
    let local_replies = backend.local_replies(&selection).await;
    // Describing many answers takes milliseconds, during which other requests must be served.
    match tokio::task::spawn_blocking(move || backend.readiness.upstreams.list(&selection, limit))
        .await
    {
        Ok(listing) => Json(CacheContents {
            listing,
            local_replies,
        })
        .into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

/// Handles `/cache/flush`; responds after the flush has taken effect.
pub(super) async fn flush_selected(
    State(backend): State<Arc<Backend>>,
    Json(flush): Json<CacheFlush>,
) -> Response {
    let CacheFlush {
        name,
        zone,
        query_type,
        all,
    } = flush;
    // An empty body must not flush everything.
    if all == (name.is_some() || zone.is_some() || query_type.is_some()) {
        return bad_request(
            "select answers by name, zone or type, or all of them with \"all\": true",
        );
    }
    match selection(name.as_deref(), zone.as_deref(), query_type.as_deref()) {
        Ok(selection) => {
            Json(json!({ "flushed": backend.flush(&selection).await })).into_response()
        }
        Err(NameRefused(reason)) => bad_request(reason),
    }
}
