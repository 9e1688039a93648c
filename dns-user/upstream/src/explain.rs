//! Explains, without sending a query, how a name would be forwarded: recursors in the order in which they are
//! tried, and cached answers.

use std::fmt;

use serde::Serialize;

use super::{
    RecursorStatus,
    cached::{CachedSource, Source},
    http::shown,
    status,
};
use dns_core::{
    name::Name,
    wire::{CLASS_IN, Parsed, TYPE_A, TYPE_AAAA, parse},
};

/// The recursors and cached answers that a query for a name would find.
#[derive(Clone, Debug, Serialize)]
pub struct ForwardingExplanation {
    /// Recursors in the order in which they are tried; empty for other sources.
    pub recursors: Vec<RecursorStatus>,
    /// URL of a handler's HTTP server; null for other sources.
    pub url: Option<String>,
    /// Cached answers for types A and AAAA, for clients without DO; null without a cache.
    pub cached: Option<Vec<CacheFinding>>,
}

/// A cached answer, or its absence.
#[derive(Clone, Debug, Serialize)]
pub struct CacheFinding {
    /// Query type in text form.
    #[serde(rename = "type")]
    pub query_type: &'static str,
    /// Whether the answer is served.
    pub state: CachedState,
    /// Remaining lifetime in seconds; 0 unless fresh.
    pub ttl_seconds: u64,
    /// Whether the answer denies the name or its data; null if nothing is cached.
    pub denial: Option<bool>,
    /// Address of the recursor that sent the answer; null if nothing is cached, and for the answer
    /// of an HTTP handler.
    pub recursor: Option<String>,
}

/// State of a cached answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CachedState {
    /// The cache has no answer.
    Missing,
    /// Served without querying a recursor.
    Fresh,
    /// Expired; served only if no recursor answers (`cache.serve_stale`).
    Stale,
}

impl CachedSource {
    /// Explains how queries for a name are answered. Does not count as a query.
    pub fn explain(&self, name: &Name) -> ForwardingExplanation {
        let (recursors, url) = match self.source() {
            Source::Dns(forwarder) => (status::of(forwarder), None),
            Source::Http(http) => (Vec::new(), Some(shown(http.url()))),
            Source::Deny(_) => (Vec::new(), None),
        };
        let cached = self.cache().map(|cache| {
            let answer = |query_type: &'static str, number: u16| {
                let mut message = b"\0\0\x01\0\0\x01\0\0\0\0\0\0".to_vec();
                message.extend_from_slice(name.as_wire());
                message.extend_from_slice(&number.to_be_bytes());
                message.extend_from_slice(&CLASS_IN.to_be_bytes());
                let found = match parse(&message) {
                    Parsed::Query(query) => cache.key(&query).and_then(|key| cache.peek(&key)),
                    _ => None,
                };
                let Some((entry, left)) = found else { return CacheFinding::missing(query_type) };
                CacheFinding {
                    query_type,
                    state: if left.is_some() { CachedState::Fresh } else { CachedState::Stale },
                    ttl_seconds: left.unwrap_or_default().as_secs(),
                    denial: Some(entry.is_denial()),
                    recursor: entry.recursor().map(str::to_owned),
                }
            };
            vec![answer("A", TYPE_A), answer("AAAA", TYPE_AAAA)]
        });
        ForwardingExplanation { recursors, url, cached }
    }
}

impl CacheFinding {
    fn missing(query_type: &'static str) -> Self {
        Self { query_type, state: CachedState::Missing, ttl_seconds: 0, denial: None, recursor: None }
    }
}

impl fmt::Display for ForwardingExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { recursors, url, cached } = self;
        for (place, recursor) in recursors.iter().enumerate() {
            let order = if place == 0 { "asked first" } else { "asked next" };
            let latency =
                recursor.latency_ms.map_or_else(|| "no reply yet".to_owned(), |ms| format!("{ms:.1} ms"));
            let failed = recursor.recent_failures;
            writeln!(
                f,
                "recursor {}: {order}, {latency}, {failed} of the last 25 tries failed",
                recursor.address
            )?;
        }
        if let Some(url) = url {
            writeln!(f, "server {url}")?;
        }
        let Some(cached) = cached else { return writeln!(f, "cache: off") };
        for CacheFinding { query_type, state, ttl_seconds, denial, recursor } in cached {
            let kind = if *denial == Some(true) { "denial" } else { "answer" };
            let from = recursor.as_ref().map_or_else(String::new, |recursor| format!(" from {recursor}"));
            match state {
                CachedState::Missing => writeln!(f, "cache: no {query_type}")?,
                CachedState::Fresh => writeln!(f, "cache: {query_type} {kind}{from}, TTL {ttl_seconds} s")?,
                CachedState::Stale => {
                    writeln!(f, "cache: {query_type} {kind}{from}, expired; served if no recursor answers")?
                }
            }
        }
        Ok(())
    }
}
