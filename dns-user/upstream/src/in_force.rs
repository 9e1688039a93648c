//! The recursors and handlers in use.

use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::{
    CacheStatus, ForwardingExplanation, Handlers, Listing, RecursorStatus, Selection, Upstream,
    admission::AdmissionStatus,
};
use dns_core::name::Name;

/// The recursors and handlers in use; each is replaced as a whole.
#[derive(Debug)]
pub struct InForce {
    /// The recursors of the configuration, replaced as a whole on reload.
    pub upstream: ArcSwap<Upstream>,
    /// The handlers by domain, replaced as a whole on reload.
    pub handlers: ArcSwap<Handlers>,
}

impl InForce {
    /// Starts with these recursors and handlers.
    pub fn new(upstream: Upstream, handlers: Handlers) -> Arc<Self> {
        Arc::new(Self {
            upstream: ArcSwap::from_pointee(upstream),
            handlers: ArcSwap::from_pointee(handlers),
        })
    }

    /// Returns the status of every recursor: the configured recursors first, then those of
    /// handlers.
    pub fn recursors(&self) -> Vec<RecursorStatus> {
        let mut all = self.upstream.load().status();
        all.extend(self.handlers.load().status());
        all
    }

    /// Returns the waiting queries of each source with the domain of its handler; `None` for the
    /// configured recursors.
    pub fn admissions(&self) -> Vec<(Option<String>, AdmissionStatus)> {
        let recursors = self.upstream.load().recursors();
        let recursors = recursors.iter().map(|source| (None, source.admission()));
        let handlers = self.handlers.load();
        let waiting = handlers.sources().filter(|(_, source)| source.waits());
        let handlers = waiting.map(|(domain, source)| (Some(domain.to_string()), source.admission()));
        recursors.chain(handlers).collect()
    }

    /// Returns the status of the recursors' cache; `None` without a cache.
    pub fn cache(&self) -> Option<CacheStatus> {
        self.upstream.load().cache_status()
    }

    /// Explains how a name is forwarded: by the handler of a domain, or by the configured
    /// recursors. Returns `None` if that source does not exist.
    pub fn explain(&self, handler: Option<&Name>, name: &Name) -> Option<ForwardingExplanation> {
        match handler {
            None => Some(self.upstream.load().recursors()?.explain(name)),
            Some(domain) => {
                let handlers = self.handlers.load();
                let (_, source) = handlers.sources().find(|(known, _)| *known == domain)?;
                Some(source.explain(name))
            }
        }
    }

    /// Lists at most `limit` of the selected answers in all caches.
    pub fn list(&self, selection: &Selection, limit: usize) -> Listing {
        let (upstream, handlers) = (self.upstream.load(), self.handlers.load());
        let of_handlers = handlers.caches().map(|(domain, cache)| (Some(domain), &**cache));
        Listing::of(
            upstream.cache().map(|cache| (None, cache)).into_iter().chain(of_handlers),
            selection,
            limit,
        )
    }

    /// Removes the selected answers from all caches. An answer requested before is not stored
    /// afterwards. Returns the number of removed answers; `None` without any cache.
    pub fn flush(&self, selection: &Selection) -> Option<u64> {
        let (upstream, handlers) = (self.upstream.load(), self.handlers.load());
        let of_recursors = upstream.flush_cache(selection);
        let of_handlers = handlers.flush_cache(selection);
        let any = of_recursors.is_some() || handlers.caches().next().is_some();
        any.then(|| of_recursors.unwrap_or_default() + of_handlers)
    }
}
