//! The interface of everything that answers queries for names which are not the fleet's.

use futures::future::BoxFuture;

use dns_core::wire::{ForwardedAnswer, Query, Transport};

/// One answerer: recursors, a handler, reverse names, Consul's names.
pub trait Answer: Send + Sync {
    /// Returns a whole reply: the client's id, its question with the letter case kept. It may
    /// be larger than the client takes; the caller cuts it.
    fn answer<'a>(&'a self, query: &'a Query<'a>, transport: Transport) -> BoxFuture<'a, Vec<u8>>;

    /// Writes the reply into `out`, which is empty, if that needs no wait. Returns whether it
    /// did. Has to be cheap: other queries wait meanwhile.
    fn answer_at_once(&self, _query: &Query<'_>, _transport: Transport, _out: &mut Vec<u8>) -> bool {
        false
    }

    /// Returns the fresh cached answer to a query, for use without this answerer until its TTL has
    /// passed; `None` if there is none, or if the reply depends on more than name, type, DO and CD.
    fn cached(&self, _query: &Query<'_>) -> Option<ForwardedAnswer> {
        None
    }

    /// Replaces the cached answer to a query by a new one. The old one stays if that fails.
    fn refresh<'a>(&'a self, _query: &'a Query<'a>) -> BoxFuture<'a, ()> {
        Box::pin(std::future::ready(()))
    }
}
