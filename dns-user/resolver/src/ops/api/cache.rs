//! Handlers of `/cache` and `/cache/flush`: the cached answers of recursors and handlers.

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
    control::bad_request,
};
use crate::ops::tap::parse_type;
use dns_upstream::{Listing, Selection};

/// Default limit of answers per response.
const DEFAULT_LIMIT: usize = 10_000;

#[derive(Debug, Deserialize)]
pub(super) struct ListParameters {
    /// Criteria of the answers.
    #[serde(flatten)]
    criteria: Criteria,
    /// Maximum number of answers in the response.
    limit: Option<usize>,
}

/// Response of `/cache`.
#[derive(Debug, Serialize)]
struct Contents {
    #[serde(flatten)]
    listing: Listing,
    /// Local replies of other types that interfaces give, sorted by name.
    local_replies: Vec<LocalReply>,
}

/// Criteria for cached answers; an absent criterion matches all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Criteria {
    /// Only this name, none below it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub name: Option<String>,
    /// The names at and below this one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub zone: Option<String>,
    /// The query type: A, TYPE65.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none", default)]
    pub query_type: Option<String>,
}

/// Body of a POST to `/cache/flush`: at least one criterion, or `all`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheFlush {
    /// Criteria of the answers.
    #[serde(flatten)]
    pub criteria: Criteria,
    /// Every answer in the cache.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub all: bool,
}

impl Criteria {
    fn selection(&self) -> Result<Selection, NameRefused> {
        let name = |text: &Option<String>| text.as_deref().map(parse).transpose();
        let query_type = |text: &String| {
            parse_type(text).ok_or_else(|| {
                NameRefused(format!("{text:?} is no query type; use a name such as AAAA or TYPE65"))
            })
        };
        Ok(Selection {
            name: name(&self.name)?,
            zone: name(&self.zone)?,
            query_type: self.query_type.as_ref().map(query_type).transpose()?,
        })
    }
}

/// Handles `/cache`: the selected answers in the order of their names, with their records if a
/// single name is selected.
pub(super) async fn list(
    State(backend): State<Arc<Backend>>,
    Query(ListParameters { criteria, limit }): Query<ListParameters>,
) -> Response {
    let selection = match criteria.selection() {
        Ok(selection) => selection,
        Err(NameRefused(reason)) => return bad_request(reason),
    };
    let limit = limit.unwrap_or(DEFAULT_LIMIT);
    let local_replies = backend.local_replies(&selection).await;
    // Describing many answers takes milliseconds, during which other requests must be served.
    match tokio::task::spawn_blocking(move || backend.cached(&selection, limit)).await {
        Ok(listing) => Json(Contents { listing, local_replies }).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

/// Handles `/cache/flush`; responds after the flush has taken effect.
pub(super) async fn flush(
    State(backend): State<Arc<Backend>>,
    Json(CacheFlush { criteria, all }): Json<CacheFlush>,
) -> Response {
    if all != (criteria == Criteria::default()) {
        return bad_request("select answers by name, zone or type, or all of them with \"all\": true");
    }
    match criteria.selection() {
        Ok(selection) => Json(json!({ "flushed": backend.flush(&selection).await })).into_response(),
        Err(NameRefused(reason)) => bad_request(reason),
    }
}
