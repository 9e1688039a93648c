//! The interface of everything that answers queries for names which are not the fleet's.

use futures::future::BoxFuture;

use dns_core::wire::{Query, Transport};

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
}
