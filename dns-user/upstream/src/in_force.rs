//! Recursors and handlers in force.

use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::{CacheStatus, Handlers, RecursorStatus, Upstream};

/// The recursors and handlers that are asked now; each is replaced as a whole.
#[derive(Debug)]
pub struct InForce {
    /// The recursors of the configuration, replaced as a whole on reload.
    pub upstream: ArcSwap<Upstream>,
    /// The handlers by domain, replaced as a whole on reload.
    pub handlers: ArcSwap<Handlers>,
}

impl InForce {
    /// Puts these in force.
    pub fn new(upstream: Upstream, handlers: Handlers) -> Arc<Self> {
        Arc::new(Self {
            upstream: ArcSwap::from_pointee(upstream),
            handlers: ArcSwap::from_pointee(handlers),
        })
    }

    /// Returns the status of every recursor: first the configured recursors, then the handlers'.
    pub fn recursors(&self) -> Vec<RecursorStatus> {
        let mut all = self.upstream.load().status();
        all.extend(self.handlers.load().status());
        all
    }

    /// Returns how the cache of the recursors fares; `None` without a cache.
    pub fn cache(&self) -> Option<CacheStatus> {
        self.upstream.load().cache_status()
    }

    /// Empties all caches. Returns the entries that the cache of the recursors had; `None`
    /// without that cache.
    pub fn flush(&self) -> Option<u64> {
        let upstream = self.upstream.load();
        let before = upstream.cache_status().map(|status| status.entries);
        upstream.flush_cache();
        self.handlers.load().flush_cache();
        before
    }
}
