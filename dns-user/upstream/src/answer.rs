//! The interface of the components that answer queries for names outside the fleet.

use futures_util::future::BoxFuture;

use dns_core::wire::{ForwardedAnswer, Query, Transport};

/// Answers queries: recursors, a handler, reverse names, Consul's names.
pub trait Answer: Send + Sync {
    /// Returns a complete reply with the client's id and the letter case of its question. It may be
    /// larger than the client accepts; the caller truncates it.
    fn answer<'a>(&'a self, query: &'a Query<'a>, transport: Transport) -> BoxFuture<'a, Vec<u8>>;

    /// Writes the reply into the empty `out` if that requires no waiting. Returns whether it did.
    /// Must be cheap, because other queries wait in the meantime.
    fn answer_at_once(&self, _query: &Query<'_>, _transport: Transport, _out: &mut Vec<u8>) -> bool {
        false
    }

    /// Returns the fresh cached answer to a query, for use without this answerer until its TTL has
    /// passed; `None` if there is none, or if the reply depends on more than name, type, DO and CD.
    fn cached(&self, _query: &Query<'_>) -> Option<ForwardedAnswer> {
        None
    }

    /// Replaces the cached answer to a query with a new one. The old one stays if that fails.
    fn refresh<'a>(&'a self, _query: &'a Query<'a>) -> BoxFuture<'a, ()> {
        Box::pin(std::future::ready(()))
    }
}
