//! Status of recursors and caches, for operators.

use std::{
    borrow::Cow, collections::BTreeMap, fmt, net::SocketAddr, sync::atomic::Ordering::Relaxed,
};

use serde::{Deserialize, Serialize};

use crate::{
    cache::{Cache, CacheCounters},
    cached::{CachedSource, UncachedSource},
    forward::{Forwarder, HISTORY, RecursorSet},
    http::redacted,
    recursor::RecursorCounters,
    store::Totals,
};
use dns_core::{
    name::Name,
    wire::{FLAG_RD, Parsed, TYPE_A, TYPE_AAAA, parse, query_message},
};

/// Status of one recursor.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RecursorStatus {
    /// Address as configured, `host:port`.
    pub address: String,
    /// Current address of a host name; `None` if unknown.
    pub resolved: Option<SocketAddr>,
    /// Whether it is tried first.
    pub preferred: bool,
    /// Number of queries sent to it since the start, including retries.
    pub tries: u64,
    /// Failed tries since the start, by reason; reasons without failures are omitted.
    pub failures: BTreeMap<Cow<'static, str>, u64>,
    /// Number of datagrams that matched no query in flight: late, wrong or forged.
    #[serde(rename = "strays")]
    pub mismatched: u64,
    /// Number of failures among its last 25 tries.
    pub recent_failures: u32,
    /// Number of tries in a row without a reply, up to the latest.
    pub unanswered_tries: u32,
    /// Number of replies in a row that are errors, up to the latest.
    pub error_replies: u32,
    /// Smoothed response time in milliseconds; `None` before the first reply.
    pub latency_ms: Option<f64>,
    /// Whether queries with EDNS are dropped, so that others are sent without it.
    pub drops_edns: bool,
    /// Whether it is an address of this server, which is never asked.
    pub is_own: bool,
}

/// Status of a cache.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheStatus {
    /// Number of cached answers.
    pub entries: u64,
    /// Number of entries that deny a name or its data (NXDOMAIN, NODATA).
    pub denials: u64,
    /// Approximate size of the entries in bytes, including overhead.
    pub bytes: u64,
    /// Number of queries answered from it.
    pub hits: u64,
    /// Number of queries not answered from it.
    pub misses: u64,
    /// Number of answers served stale because no recursor was reachable.
    pub served_stale: u64,
    /// Number of answers evicted to make room.
    pub evictions: u64,
}

impl CacheStatus {
    pub(crate) fn of(cache: &Cache) -> Self {
        let Totals {
            entries,
            denials,
            bytes,
            evictions,
        } = cache.swept_totals();
        let CacheCounters {
            hits,
            denial_hits,
            misses,
            stale_hits,
        } = &cache.counters;
        Self {
            entries: entries + denials,
            denials,
            bytes,
            hits: hits.load(Relaxed) + denial_hits.load(Relaxed),
            misses: misses.load(Relaxed),
            served_stale: stale_hits.load(Relaxed),
            evictions,
        }
    }
}

/// Returns the status of a forwarder's recursors in the order in which they are tried.
pub(crate) fn recursor_statuses(forwarder: &Forwarder) -> Vec<RecursorStatus> {
    let set = forwarder.set();
    let mut all = Vec::with_capacity(set.recursors.len());
    for index in set.order.order() {
        all.push(RecursorStatus::of(&set, index));
    }
    all
}

impl RecursorStatus {
    fn of(set: &RecursorSet, index: usize) -> Self {
        let recursor = &set.recursors[index];
        let RecursorCounters {
            failed,
            mismatched,
            latency_us,
            latencies: _,
            latency_sum_us: _,
        } = &recursor.counters;
        let mut failures = BTreeMap::new();
        for (reason, count) in failed.by_reason() {
            if count > 0 {
                failures.insert(reason.label().into(), count);
            }
        }
        let latency = latency_us.load(Relaxed);
        Self {
            address: recursor.name.to_string(),
            resolved: recursor.address(),
            preferred: index == set.order.preferred(),
            tries: failed.tries(),
            failures,
            mismatched: mismatched.load(Relaxed),
            recent_failures: set.order.recent_failures(index),
            unanswered_tries: failed.unanswered(),
            error_replies: failed.error_replies(),
            latency_ms: (latency != 0).then_some(latency as f64 / 1000.0),
            drops_edns: recursor.drops_edns(),
            is_own: recursor.is_own(),
        }
    }
}

//----------- Outages --------------------------------------------------------

/// Tries in a row without a reply from which a recursor counts as out: a single datagram may be lost.
const MIN_UNANSWERED: u32 = 3;

/// Replies in a row that are errors from which a recursor counts as out: even a healthy one answers
/// SERVFAIL for broken domains. One failure of a name is sent once and then cached (RFC 9520).
const MIN_ERROR_REPLIES: u32 = 5;

/// Why recursors answer no query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecursorOutage {
    /// No recursor is known.
    Unknown,
    /// None replies; holds their addresses.
    Silent(String),
    /// Each is silent or replies with errors; holds their addresses with the numbers of failures by
    /// reason.
    Failing(String),
}

impl RecursorOutage {
    /// Returns why none of these recursors answers; `None` while one does.
    pub(crate) fn of(all: &[RecursorStatus]) -> Option<Self> {
        let mut recursors = Vec::new();
        for recursor in all {
            // Never asked, so it has no failures, and would pass for one that answers.
            if !recursor.is_own {
                recursors.push(recursor);
            }
        }
        if recursors.is_empty() {
            return Some(Self::Unknown);
        }
        // Silence points to the network, errors to the recursors.
        if recursors.iter().all(|recursor| recursor.is_silent()) {
            let mut addresses = Vec::new();
            for recursor in recursors {
                addresses.push(&*recursor.address);
            }
            return Some(Self::Silent(addresses.join(", ")));
        }
        let mut failures = Vec::new();
        for recursor in recursors {
            if !recursor.is_out() {
                return None;
            }
            failures.push(recursor.failures_in_words());
        }
        Some(Self::Failing(failures.join(", ")))
    }
}

impl RecursorStatus {
    fn is_silent(&self) -> bool {
        self.unanswered_tries >= MIN_UNANSWERED
    }

    /// Returns whether its latest tries all failed.
    pub fn is_out(&self) -> bool {
        self.is_silent() || self.error_replies >= MIN_ERROR_REPLIES
    }

    /// Returns the address with its most frequent reasons of failures.
    fn failures_in_words(&self) -> String {
        let mut reasons: Vec<(&str, u64)> = Vec::new();
        for (reason, count) in &self.failures {
            reasons.push((reason, *count));
        }
        reasons.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        let mut text = format!("{}:", self.address);
        for (reason, count) in reasons {
            text += &format!(" {reason} {count}");
        }
        text
    }
}

//----------- Explanations ---------------------------------------------------

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
    /// Returns why the source answers no query; `None` while it does.
    pub(crate) fn outage(&self) -> Option<String> {
        match self.source() {
            UncachedSource::Dns(forwarder) => {
                match RecursorOutage::of(&recursor_statuses(forwarder))? {
                    RecursorOutage::Unknown => Some("it has no recursor".to_owned()),
                    RecursorOutage::Silent(addresses) => Some(format!("{addresses}: no reply")),
                    RecursorOutage::Failing(failures) => Some(failures),
                }
            }
            UncachedSource::Http(http) => {
                let error = http.outage()?;
                Some(format!("{}: {error}", redacted(http.url())))
            }
            UncachedSource::Deny(_) => None,
        }
    }

    /// Explains how queries for a name are answered. Does not count as a query.
    pub fn explain(&self, name: &Name) -> ForwardingExplanation {
        let (recursors, url) = match self.source() {
            UncachedSource::Dns(forwarder) => (recursor_statuses(forwarder), None),
            UncachedSource::Http(http) => (Vec::new(), Some(redacted(http.url()))),
            UncachedSource::Deny(_) => (Vec::new(), None),
        };
        let mut cached = None;
        if let Some(cache) = self.cache() {
            let v4 = CacheFinding::of(cache, name, "A", TYPE_A);
            let v6 = CacheFinding::of(cache, name, "AAAA", TYPE_AAAA);
            cached = Some(vec![v4, v6]);
        }
        ForwardingExplanation {
            recursors,
            url,
            cached,
        }
    }
}

impl CacheFinding {
    fn of(cache: &Cache, name: &Name, query_type: &'static str, number: u16) -> Self {
        let mut finding = Self {
            query_type,
            state: CachedState::Missing,
            ttl_seconds: 0,
            denial: None,
            recursor: None,
        };
        let message = query_message(0, FLAG_RD, name.as_wire(), number);
        if let Parsed::Query(query) = parse(&message)
            && let Some(key) = cache.key(&query)
            && let Some((entry, left)) = cache.peek(&key)
        {
            finding.state = match left {
                Some(_) => CachedState::Fresh,
                None => CachedState::Stale,
            };
            finding.ttl_seconds = left.unwrap_or_default().as_secs();
            finding.denial = Some(entry.denial);
            finding.recursor = entry.recursor.as_deref().map(str::to_owned);
        }
        finding
    }
}

impl fmt::Display for ForwardingExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            recursors,
            url,
            cached,
        } = self;
        let mut order = "asked first";
        for recursor in recursors {
            let latency = match recursor.latency_ms {
                Some(ms) => format!("{ms:.1} ms"),
                None => "no reply yet".to_owned(),
            };
            let failed = recursor.recent_failures;
            if recursor.is_own {
                let address = &recursor.address;
                writeln!(f, "recursor {address}: this server itself, never asked")?;
                // The next one takes its turn.
                continue;
            }
            writeln!(
                f,
                "recursor {}: {order}, {latency}, {failed} of at most {HISTORY} recent tries failed",
                recursor.address
            )?;
            order = "asked next";
        }
        if let Some(url) = url {
            writeln!(f, "server {url}")?;
        }
        let Some(cached) = cached else {
            return writeln!(f, "cache: off");
        };
        for CacheFinding {
            query_type,
            state,
            ttl_seconds,
            denial,
            recursor,
        } in cached
        {
            let kind = if *denial == Some(true) {
                "denial"
            } else {
                "answer"
            };
            let from = match recursor {
                Some(recursor) => format!(" from {recursor}"),
                None => String::new(),
            };
            match state {
                CachedState::Missing => writeln!(f, "cache: no {query_type}")?,
                CachedState::Fresh => {
                    writeln!(f, "cache: {query_type} {kind}{from}, TTL {ttl_seconds} s")?
                }
                CachedState::Stale => writeln!(
                    f,
                    "cache: {query_type} {kind}{from}, expired; served if no recursor answers"
                )?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_is_the_first_that_is_asked() {
        let own = RecursorStatus {
            address: "127.0.0.1:53".to_owned(),
            is_own: true,
            ..RecursorStatus::default()
        };
        let [one, another] = ["192.0.2.1:53", "192.0.2.2:53"].map(|address| RecursorStatus {
            address: address.to_owned(),
            ..RecursorStatus::default()
        });
        let explanation = ForwardingExplanation {
            recursors: vec![own, one, another],
            url: None,
            cached: None,
        };
        let text = explanation.to_string();
        assert!(text.contains("192.0.2.1:53: asked first"), "{text}");
        assert!(text.contains("192.0.2.2:53: asked next"), "{text}");
    }

    /// Returns the status of a recursor with these tries without a reply, and replies that are errors.
    fn recursor(address: &str, unanswered_tries: u32, error_replies: u32) -> RecursorStatus {
        RecursorStatus {
            address: address.to_owned(),
            unanswered_tries,
            error_replies,
            ..RecursorStatus::default()
        }
    }

    #[test]
    fn recursors_are_out_after_several_failures() {
        for (unanswered, errors, is_silent, is_out) in [
            (0, 0, false, false),
            (2, 4, false, false),
            (3, 0, true, true),
            (0, 5, false, true),
            (4, 6, true, true),
        ] {
            let recursor = recursor("a", unanswered, errors);
            assert_eq!(
                (recursor.is_silent(), recursor.is_out()),
                (is_silent, is_out),
                "{unanswered} {errors}"
            );
        }
    }

    #[test]
    fn working_recursor_prevents_outage() {
        let own = RecursorStatus {
            is_own: true,
            ..recursor("own", 0, 0)
        };
        let mut failing = recursor("a:53", 0, 5);
        failing.failures = [("refused", 2), ("servfail", 7), ("timeout", 3)]
            .map(|(reason, count)| (Cow::from(reason), count))
            .into();
        let silent = recursor("b:53", 3, 0);
        let another = recursor("c:53", 9, 0);
        let working = recursor("d:53", 2, 4);
        let failures = "a:53: servfail 7 timeout 3 refused 2";
        for (recursors, expected) in [
            (vec![], Some(RecursorOutage::Unknown)),
            (vec![own.clone()], Some(RecursorOutage::Unknown)),
            (vec![working.clone()], None),
            (vec![own.clone(), silent.clone(), working.clone()], None),
            (vec![failing.clone(), working], None),
            (
                vec![silent.clone(), own, another],
                Some(RecursorOutage::Silent("b:53, c:53".to_owned())),
            ),
            (
                vec![failing.clone()],
                Some(RecursorOutage::Failing(failures.to_owned())),
            ),
            (
                vec![silent, failing],
                Some(RecursorOutage::Failing(format!("b:53:, {failures}"))),
            ),
        ] {
            assert_eq!(RecursorOutage::of(&recursors), expected, "{recursors:?}");
        }
    }

    #[test]
    fn explanation_is_written_line_by_line() {
        let own = RecursorStatus {
            is_own: true,
            ..recursor("127.0.0.1:53", 0, 0)
        };
        let fast = RecursorStatus {
            latency_ms: Some(1.26),
            recent_failures: 3,
            ..recursor("192.0.2.1:53", 0, 0)
        };
        let finding = |query_type, state, denial, recursor: Option<&str>| CacheFinding {
            query_type,
            state,
            ttl_seconds: 42,
            denial,
            recursor: recursor.map(str::to_owned),
        };
        let explanation = ForwardingExplanation {
            recursors: vec![own, fast, recursor("192.0.2.2:53", 0, 0)],
            url: Some("http://192.0.2.3/".to_owned()),
            cached: Some(vec![
                finding("A", CachedState::Missing, None, None),
                finding("A", CachedState::Fresh, Some(false), Some("192.0.2.1:53")),
                finding("AAAA", CachedState::Fresh, Some(true), None),
                finding("AAAA", CachedState::Stale, Some(true), Some("192.0.2.1:53")),
                finding("A", CachedState::Stale, Some(false), None),
            ]),
        };
        let expected = "\
            recursor 127.0.0.1:53: this server itself, never asked\n\
            recursor 192.0.2.1:53: asked first, 1.3 ms, 3 of at most 25 recent tries failed\n\
            recursor 192.0.2.2:53: asked next, no reply yet, 0 of at most 25 recent tries failed\n\
            server http://192.0.2.3/\n\
            cache: no A\n\
            cache: A answer from 192.0.2.1:53, TTL 42 s\n\
            cache: AAAA denial, TTL 42 s\n\
            cache: AAAA denial from 192.0.2.1:53, expired; served if no recursor answers\n\
            cache: A answer, expired; served if no recursor answers\n";
        assert_eq!(explanation.to_string(), expected);
    }

    #[test]
    fn cache_status_has_sums() {
        let cache = crate::tests::counted_cache();
        let CacheStatus {
            entries,
            denials,
            bytes,
            hits,
            misses,
            served_stale,
            evictions,
        } = CacheStatus::of(&cache);
        assert_eq!((hits, misses, served_stale), (21, 300, 4000));
        assert_eq!((entries, denials, bytes, evictions), (0, 0, 0, 0));
    }
}
