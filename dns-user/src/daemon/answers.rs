//! Who answers what is not local: joins recursors, handlers and reverse names to
//! the router, again whenever files or configuration change.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use arc_swap::ArcSwap;
use futures::future::BoxFuture;
use prometheus::Registry;

use crate::{
    config::{Config, RecursorErrors},
    name::Name,
    server::{Answer, ByDomain, Local, Router, Routes},
    upstream::{Channel, HandlerConfig, Handlers, Reverse, Upstream, metrics::UpstreamMetrics},
    wire::{Query, Transport},
};

/// Recursors, handlers and reverse names in force.
pub(super) struct Answers {
    /// Where they are put in force.
    router: Arc<Router>,
    /// Where they are counted.
    registry: Registry,
    /// Value of the label `server`.
    server: String,
    /// What is in force; shared with status and metrics.
    pub(super) current: Arc<Current>,
    /// What is registered of it.
    metrics: Option<UpstreamMetrics>,
    /// Handlers' domains that are, or were until a moment ago, domains of the
    /// records; and since when they are not.
    retired: HashMap<Name, Option<Instant>>,
}

/// So long after the records have lost a domain its handler comes back. Just after
/// the change its names go to the recursors, as with the reference (observed),
/// where the handler is gone for good.
const HANDLER_RETURN: Duration = Duration::from_secs(30);

/// What is in force.
pub(super) struct Current {
    /// Recursors.
    pub(super) upstream: ArcSwap<Upstream>,
    /// Handlers.
    pub(super) handlers: ArcSwap<Handlers>,
}

impl Answers {
    /// Puts recursors and handlers in force for the first time. `own` is where we
    /// listen ourselves. Inside a tokio runtime.
    pub(super) fn new(
        router: Arc<Router>,
        config: &Config,
        own: &[SocketAddr],
        handlers: Vec<HandlerConfig>,
        registry: Registry,
        server: String,
    ) -> prometheus::Result<Self> {
        let current = Arc::new(Current {
            upstream: ArcSwap::from_pointee(Upstream::new(config, own)),
            handlers: ArcSwap::from_pointee(Handlers::new(handlers, config, &Handlers::default())),
        });
        let mut answers = Self { router, registry, server, current, metrics: None, retired: HashMap::new() };
        answers.count()?;
        answers.retire();
        answers.install(config);
        Ok(answers)
    }

    /// Takes handlers back whose domain the records have, and brings others back.
    /// To be called when records have changed, and now and then.
    pub(super) fn follow_records(&mut self, config: &Config) {
        if self.retire() {
            self.install(config);
        }
    }

    /// Notes which handlers' domains the records have; whether that changes a route.
    fn retire(&mut self) -> bool {
        let snapshot = self.router.local().snapshot();
        let handlers = self.current.handlers.load();
        let mut changed = false;
        for domain in
            snapshot.domains().filter(|domain| handlers.channels().any(|(handler, _)| handler == *domain))
        {
            changed |= self.retired.insert(domain.clone(), None).is_none();
        }
        let before = self.retired.len();
        self.retired.retain(|domain, gone| {
            if snapshot.domains().any(|present| present == domain) {
                return true;
            }
            gone.get_or_insert_with(Instant::now).elapsed() < HANDLER_RETURN
        });
        changed || self.retired.len() != before
    }

    /// Puts other handlers in force.
    pub(super) fn set_handlers(&mut self, handlers: Vec<HandlerConfig>, config: &Config) {
        let previous = self.current.handlers.load_full();
        self.current.handlers.store(Arc::new(Handlers::new(handlers, config, &previous)));
        self.retired.clear();
        self.retire();
        self.install(config);
    }

    /// Puts a changed configuration in force; recursors and their cache stay if
    /// nothing changed for them.
    pub(super) fn reconfigure(
        &mut self,
        old: &Config,
        new: &Config,
        own: &[SocketAddr],
    ) -> prometheus::Result<()> {
        if old.recursion != new.recursion || old.cache != new.cache {
            self.current.upstream.store(Arc::new(Upstream::new(new, own)));
            self.count()?;
        }
        self.install(new);
        Ok(())
    }

    /// We listen elsewhere from now on.
    pub(super) fn listens_on(&self, own: &[SocketAddr]) {
        self.current.upstream.load().listens_on(own);
    }

    /// Counts what is in force.
    fn count(&mut self) -> prometheus::Result<()> {
        if let Some(old) = self.metrics.take() {
            self.registry.unregister(Box::new(old))?;
        }
        let current = self.current.clone();
        let handlers = move || current.handlers.load_full();
        let metrics = UpstreamMetrics::new(self.current.upstream.load_full(), handlers, self.server.clone())?;
        metrics.register(&self.registry)?;
        self.metrics = Some(metrics);
        Ok(())
    }

    /// Makes routes of what is in force.
    fn install(&self, config: &Config) {
        let upstream = self.current.upstream.load();
        let handlers: ByDomain = self
            .current
            .handlers
            .load()
            .channels()
            .filter(|(domain, _)| !self.retired.contains_key(*domain))
            .map(|(domain, channel)| (domain.clone(), answer(channel.clone())))
            .collect();
        let past = Routes::past_reverse(upstream.uncached().map(answer).as_ref(), &handlers);
        let reverse = ReverseNames { names: reverse(self.router.local().clone()), past };
        self.router.install(Routes {
            upchecks: config.upcheck_domains.iter().cloned().collect(),
            handlers,
            reverse: Some(Arc::new(reverse)),
            recursors: upstream.recursors().map(answer),
            handlers_stay_away: config.recursion.errors == RecursorErrors::Nxdomain,
        });
    }
}

/// A channel at the router's seam.
struct ByChannel(Channel);

/// Makes an [`Answer`] of a channel.
fn answer(channel: Channel) -> Arc<dyn Answer> {
    Arc::new(ByChannel(channel))
}

impl Answer for ByChannel {
    fn answer<'a>(&'a self, query: &'a Query<'a>, transport: Transport) -> BoxFuture<'a, Vec<u8>> {
        Box::pin(self.0.answer(query, transport))
    }

    fn answer_at_once(&self, query: &Query<'_>, transport: Transport, out: &mut Vec<u8>) -> bool {
        self.0.answer_at_once(query, transport, out)
    }
}

/// Reverse names, known addresses first.
struct ReverseNames {
    /// Knows the records' and aliases' addresses.
    names: Reverse,
    /// Answers for all others.
    past: Arc<dyn Answer>,
}

impl Answer for ReverseNames {
    fn answer<'a>(&'a self, query: &'a Query<'a>, transport: Transport) -> BoxFuture<'a, Vec<u8>> {
        Box::pin(async move {
            match self.names.answer(query, transport) {
                Some(reply) => reply,
                None => self.past.answer(query, transport).await,
            }
        })
    }

    fn answer_at_once(&self, query: &Query<'_>, transport: Transport, out: &mut Vec<u8>) -> bool {
        self.names.answer(query, transport).is_some_and(|reply| {
            out.extend_from_slice(&reply);
            true
        })
    }
}

/// Reverse names of the snapshot in force.
fn reverse(local: Arc<Local>) -> Reverse {
    Reverse::new(move |address| local.snapshot().reverse(address))
}
