//! The recursors and handlers in use.

use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::{
    CacheStatus, CachedSource, ForwardingExplanation, Handlers, Listing, RecursorStatus, Selection, Upstream,
    admission::AdmissionStatus, status,
};
use dns_core::name::Name;

/// Tries in a row without a reply from which a recursor counts as out: a single datagram may be lost.
const OUTAGE_TRIES: u32 = 3;

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

    /// Returns every source with the domain of its handler: first the configured recursors, with
    /// `None`.
    pub(crate) fn sources(&self) -> Vec<(Option<Name>, CachedSource)> {
        let recursors = self.upstream.load().recursors().map(|source| (None, source));
        let handlers = self.handlers.load();
        let handlers = handlers.sources().map(|(domain, source)| (Some(domain.clone()), source.clone()));
        recursors.into_iter().chain(handlers).collect()
    }

    /// Returns the status of every recursor: the configured recursors first, then those of
    /// handlers.
    pub fn recursors(&self) -> Vec<RecursorStatus> {
        self.sources().iter().filter_map(|(_, source)| source.forwarder()).flat_map(status::of).collect()
    }

    /// Returns that no recursor answers or is known; `None` while one answers, or recursion is disabled.
    pub fn outage(&self) -> Option<String> {
        let source = self.upstream.load().recursors()?;
        let recursors = status::of(source.forwarder()?);
        if recursors.is_empty() {
            return Some(
                "no recursor is known: names outside the fleet get SERVFAIL; set `recursors`, or a nameserver in \
                 /etc/resolv.conf that is neither this server nor a loopback address"
                    .to_owned(),
            );
        }
        let is_out = recursors.iter().all(|recursor| recursor.unanswered_tries >= OUTAGE_TRIES);
        is_out.then(|| {
            let addresses: Vec<&str> = recursors.iter().map(|recursor| recursor.address.as_str()).collect();
            format!(
                "no recursor answers ({}): names outside the fleet get SERVFAIL; correct `recursors`, or restore \
                 the way to them",
                addresses.join(", ")
            )
        })
    }

    /// Returns the waiting queries of each source with the domain of its handler; `None` for the
    /// configured recursors.
    pub fn admissions(&self) -> Vec<(Option<String>, AdmissionStatus)> {
        let sources = self.sources().into_iter().filter(|(_, source)| source.waits());
        sources
            .map(|(domain, source)| (domain.map(|domain| domain.to_string()), source.admission()))
            .collect()
    }

    /// Returns the status of the recursors' cache; `None` without a cache.
    pub fn cache(&self) -> Option<CacheStatus> {
        self.upstream.load().recursors()?.cache().map(CacheStatus::of)
    }

    /// Explains how a name is forwarded: by the handler of a domain, or by the configured
    /// recursors. Returns `None` if that source does not exist.
    pub fn explain(&self, handler: Option<&Name>, name: &Name) -> Option<ForwardingExplanation> {
        let (_, source) = self.sources().into_iter().find(|(domain, _)| domain.as_ref() == handler)?;
        Some(source.explain(name))
    }

    /// Lists at most `limit` of the selected answers in all caches.
    pub fn list(&self, selection: &Selection, limit: usize) -> Listing {
        let sources = self.sources();
        let caches = sources.iter().filter_map(|(domain, source)| Some((domain.as_ref(), source.cache()?)));
        Listing::of(caches, selection, limit)
    }

    /// Removes the selected answers from all caches. An answer requested before is not stored
    /// afterwards. Returns the number of removed answers; `None` without any cache.
    pub fn flush(&self, selection: &Selection) -> Option<u64> {
        self.sources()
            .iter()
            .filter_map(|(_, source)| source.flush(selection))
            .reduce(|sum, count| sum + count)
    }
}
