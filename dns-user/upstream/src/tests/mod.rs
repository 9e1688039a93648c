//! Tests with real sockets on loopback.

mod cache;
mod current;
mod forward;
mod http;
mod lies;
mod misses;
mod scripted;

use std::{sync::atomic::Ordering, time::Duration};

use super::{
    cache::Cache,
    forward::Forwarder,
    host_names::HostNames,
    message::{self, Form},
    own::OwnAddresses,
    recursor::RecursorOptions,
    udp::Matching,
};
use dns_core::{
    config::{CacheConfig, Compat, RecursorSelection},
    wire::{Parsed, Query, Transport, append_opt, parse_by},
};

/// Timeout of one try: long enough for a busy machine, short enough to wait for.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Waits until a condition holds.
pub(crate) async fn until(condition: impl Fn() -> bool) {
    let holding = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let held = tokio::time::timeout(120 * TIMEOUT, holding).await;
    held.expect("the condition holds within two minutes");
}

/// Returns a query for `name` (wire format) and type with RD set, without EDNS.
pub(crate) fn query(name: &[u8], qtype: u16) -> Vec<u8> {
    let mut query = b"\xab\xcd\x01\0\0\x01\0\0\0\0\0\0".to_vec();
    query.extend_from_slice(name);
    query.extend_from_slice(&qtype.to_be_bytes());
    query.extend_from_slice(&[0, 1]);
    query
}

/// Returns the parts of a query that are forwarded.
pub(crate) fn form(compat: Compat) -> Form {
    Form {
        transparent: compat.transparent_forwarding,
        client_subnet: false,
    }
}

/// Returns the settings of a cache of ten answers.
pub(crate) fn small_cache(serve_stale: Option<Duration>) -> CacheConfig {
    CacheConfig {
        enabled: true,
        max_entries: 10,
        max_bytes: 1 << 20,
        serve_stale,
    }
}

/// Returns an empty cache with another number in each counter: 1 hit, 20 denials, 300 misses, 4,000 stale hits.
pub(crate) fn counted_cache() -> Cache {
    let cache = Cache::new(
        &small_cache(None),
        form(Compat::default()),
        Compat::default(),
    );
    let counters = &cache.counters;
    counters.hits.store(1, Ordering::Relaxed);
    counters.denial_hits.store(20, Ordering::Relaxed);
    counters.misses.store(300, Ordering::Relaxed);
    counters.stale_hits.store(4000, Ordering::Relaxed);
    cache
}

/// Returns the settings of recursors in tests.
pub(crate) fn options(retries: u32, compat: Compat) -> RecursorOptions {
    let matching = if compat.accept_other_questions {
        Matching::Lenient
    } else {
        Matching::Strict
    };
    RecursorOptions {
        timeout: TIMEOUT,
        max_retries: retries,
        form: form(compat),
        matching,
        randomise_case: false,
    }
}

/// Returns a forwarder to these addresses.
fn forwarder(names: &[String], retries: u32, compat: Compat) -> Forwarder {
    Forwarder::new(
        names,
        options(retries, compat),
        RecursorSelection::Serial,
        compat,
        &HostNames::new(&[], OwnAddresses::default()),
    )
}

/// Parses a query that the test has built.
pub(crate) fn parsed(message: &[u8]) -> Query<'_> {
    parsed_by(Transport::Udp, message)
}

/// Parses a query that the test has built, as received by this transport.
pub(crate) fn parsed_by(transport: Transport, message: &[u8]) -> Query<'_> {
    let Parsed::Query(query) = parse_by(transport, message) else {
        panic!("a query of our own making")
    };
    query
}

/// Forwards a query and checks that the reply belongs to it.
async fn ask(forwarder: &Forwarder, query: &[u8], transport: Transport) -> Vec<u8> {
    let ask = parsed_by(transport, query);
    let mut reply = forwarder.forward(&ask).await.reply;
    append_opt(&ask, &mut reply);
    assert_eq!(message::id(&reply), message::id(query), "the client's id");
    assert!(message::Flags::of(&reply).is_reply());
    reply
}

/// Returns the RCODE of a reply.
fn rcode(reply: &[u8]) -> u8 {
    message::Flags::of(reply).rcode()
}
