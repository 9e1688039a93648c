//! Who answers what is not local: joins recursors, handlers and reverse names to
//! the routes, again whenever files or configuration change.

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
    consul::{ConsulNames, ReverseConsulNames, recursors_of},
    fleet::{Answer, ByDomain, Fleet, Routes},
};
use dns_consul::config::Config as ConsulConfig;
use dns_core::{
    catalog::Snapshot,
    config::Config,
    name::Name,
    wire::{Query, Transport},
};
use dns_upstream::{CachedSource, HandlerConfig, Handlers, Reverse, Upstream, metrics::UpstreamMetrics};

/// Recursors, handlers and reverse names in force.
pub(super) struct Upstreams {
    /// Where they are put in force.
    fleet: Arc<Fleet>,
    /// Where they are counted.
    registry: Registry,
    /// Value of the label `server`.
    server: String,
    /// What is in force; shared with status and metrics.
    pub(super) current: Arc<Current>,
    /// Names of Consul's, and the recursors of their own.
    consul: Option<Consul>,
    /// What is registered of it.
    metrics: Option<UpstreamMetrics>,
    /// Handlers' domains that are, or were until a moment ago, domains of the
    /// records; and since when they are not.
    retired: HashMap<Name, Option<Instant>>,
}

/// Names of Consul's.
struct Consul {
    /// The names.
    names: Arc<ConsulNames>,
    /// Recursors that the object `"consul"` names.
    recursors: Option<Arc<dyn Answer>>,
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

impl Upstreams {
    /// Puts recursors and handlers in force for the first time. `own` is where we
    /// listen ourselves. Inside a tokio runtime.
    pub(super) fn new(
        fleet: Arc<Fleet>,
        config: &Config,
        own: &[SocketAddr],
        handlers: Vec<HandlerConfig>,
        consul: Option<(Arc<ConsulNames>, ConsulConfig)>,
        registry: Registry,
        server: String,
    ) -> prometheus::Result<Self> {
        let current = Arc::new(Current {
            upstream: ArcSwap::from_pointee(Upstream::new(config, own)),
            handlers: ArcSwap::from_pointee(Handlers::new(handlers, config, &Handlers::default())),
        });
        let consul = consul.map(|(names, object)| {
            let recursors = recursors_of(&object, config, own);
            Consul { names, recursors }
        });
        let mut upstreams =
            Self { fleet, registry, server, current, consul, metrics: None, retired: HashMap::new() };
        upstreams.count()?;
        upstreams.retire(&upstreams.fleet.snapshot());
        upstreams.install(config);
        Ok(upstreams)
    }

    /// Puts new records and other handlers in force, as far as there are any. Handlers whose
    /// domain the records have give it up, and others come back; so this is to be called now
    /// and then even if there is nothing new.
    pub(super) fn follow(
        &mut self,
        snapshot: Option<Arc<Snapshot>>,
        handlers: Option<Vec<HandlerConfig>>,
        config: &Config,
    ) {
        let has_handlers = handlers.is_some();
        if let Some(handlers) = handlers {
            let previous = self.current.handlers.load_full();
            self.current.handlers.store(Arc::new(Handlers::new(handlers, config, &previous)));
            self.retired.clear();
        }
        let is_retiring = self.retire(&snapshot.clone().unwrap_or_else(|| self.fleet.snapshot()));
        let routes = (has_handlers || is_retiring).then(|| self.routes(config));
        self.fleet.change(snapshot, routes);
    }

    /// Notes which handlers' domains the records have; whether that changes a route.
    fn retire(&mut self, snapshot: &Snapshot) -> bool {
        let handlers = self.current.handlers.load();
        let mut changed = false;
        for domain in
            snapshot.domains().filter(|domain| handlers.sources().any(|(handler, _)| handler == *domain))
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

    /// Another object `"consul"` from now on, whose zone is in force.
    pub(super) fn reconfigure_consul(&mut self, object: &ConsulConfig, config: &Config, own: &[SocketAddr]) {
        if let Some(consul) = &mut self.consul {
            consul.recursors = recursors_of(object, config, own);
        }
        self.install(config);
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

    /// Routes queries by what is in force.
    fn install(&self, config: &Config) {
        self.fleet.set_routes(self.routes(config));
    }

    /// Makes routes of what is in force, and tells Consul's names whom to ask.
    fn routes(&self, config: &Config) -> Routes {
        let upstream = self.current.upstream.load();
        let handlers: ByDomain = self
            .current
            .handlers
            .load()
            .sources()
            .filter(|(domain, _)| !self.retired.contains_key(*domain))
            .map(|(domain, source)| (domain.clone(), answer(source.clone())))
            .collect();
        let recursors = upstream.recursors().map(answer);
        let mut past = Routes::past_reverse(upstream.uncached().map(answer).as_ref(), &handlers);
        let mut root = recursors.clone();
        let mut consul = ByDomain::default();
        if let Some(Consul { names, recursors: own }) = &self.consul {
            // Who comes from Consul has named the recursors there.
            root = recursors.clone().or_else(|| own.clone());
            names.ask(own.clone().or(recursors));
            consul
                .extend(names.domains().into_iter().map(|domain| (domain, names.clone() as Arc<dyn Answer>)));
            let next = match root {
                Some(_) if upstream.recursors().is_none() => root.clone(),
                Some(_) => Some(past),
                None => Routes::has_past_reverse(&handlers).then_some(past),
            };
            past = Arc::new(ReverseConsulNames { names: names.clone(), past: next });
        }
        let reverse = ReverseNames { names: reverse(self.fleet.clone()), past };
        Routes {
            upchecks: config.upcheck_domains.iter().cloned().collect(),
            consul,
            handlers,
            reverse: Some(Arc::new(reverse)),
            recursors: root,
            handlers_stay_away: config.compat.retired_handlers,
        }
    }
}

/// A source that queries can be routed to.
struct Forwarded(CachedSource);

/// Makes an [`Answer`] of a source.
fn answer(source: CachedSource) -> Arc<dyn Answer> {
    Arc::new(Forwarded(source))
}

impl Answer for Forwarded {
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
            match self.names.answer(query) {
                Some(reply) => reply,
                None => self.past.answer(query, transport).await,
            }
        })
    }

    fn answer_at_once(&self, query: &Query<'_>, _transport: Transport, out: &mut Vec<u8>) -> bool {
        self.names.answer(query).is_some_and(|reply| {
            out.extend_from_slice(&reply);
            true
        })
    }
}

/// Reverse names of the snapshot in force.
fn reverse(fleet: Arc<Fleet>) -> Reverse {
    Reverse::new(move |address| fleet.snapshot().reverse(address))
}
