//! Who answers what is not local: joins recursors, handlers and reverse names to
//! the routes, again whenever files or configuration change.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    consul::{ConsulNames, ReverseConsulNames, recursors_of},
    fleet::{ByDomain, Fleet, Routes},
    ops::metrics::Metrics,
};
use dns_consul::config::Config as ConsulConfig;
use dns_core::{catalog::Snapshot, config::Config, name::Name};
use dns_upstream::{
    Answer, CachedSource, HandlerConfig, Handlers, InForce, Upstream, metrics::UpstreamMetrics,
};

/// Recursors, handlers and reverse names in force.
pub(super) struct Upstreams {
    /// Where they are put in force.
    fleet: Arc<Fleet>,
    /// Recursors and handlers, shared with status and metrics.
    pub(super) in_force: Arc<InForce>,
    /// Names of Consul's, and the recursors of their own.
    consul: Option<Consul>,
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

impl Upstreams {
    /// Puts recursors and handlers in force for the first time. `own` is where we
    /// listen ourselves. Inside a tokio runtime.
    pub(super) fn new(
        fleet: Arc<Fleet>,
        config: &Config,
        own: &[SocketAddr],
        handlers: Vec<HandlerConfig>,
        consul: Option<(Arc<ConsulNames>, ConsulConfig)>,
        metrics: &Metrics,
    ) -> prometheus::Result<Self> {
        let upstream = Upstream::new(config, own);
        let handlers = Handlers::new(handlers, config, &Handlers::default(), upstream.host_names());
        let in_force = InForce::new(upstream, handlers);
        UpstreamMetrics::new(in_force.clone(), metrics.server().to_owned())?.register(metrics.registry())?;
        let consul = consul.map(|(names, object)| {
            let recursors = recursors_of(&object, config, own);
            Consul { names, recursors }
        });
        let mut upstreams = Self { fleet, in_force, consul, retired: HashMap::new() };
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
            let previous = self.in_force.handlers.load_full();
            let upstream = self.in_force.upstream.load();
            let handlers = Handlers::new(handlers, config, &previous, upstream.host_names());
            self.in_force.handlers.store(Arc::new(handlers));
            self.retired.clear();
        }
        let is_retiring = self.retire(&snapshot.clone().unwrap_or_else(|| self.fleet.snapshot()));
        let routes = (has_handlers || is_retiring).then(|| self.routes(config));
        self.fleet.change(snapshot, routes);
    }

    /// Notes which handlers' domains the records have; whether that changes a route.
    fn retire(&mut self, snapshot: &Snapshot) -> bool {
        let handlers = self.in_force.handlers.load();
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
    pub(super) fn reconfigure(&mut self, old: &Config, new: &Config, own: &[SocketAddr]) {
        if old.recursion != new.recursion || old.cache != new.cache {
            self.in_force.upstream.store(Arc::new(Upstream::new(new, own)));
        }
        self.install(new);
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
        self.in_force.upstream.load().listens_on(own);
    }

    /// Routes queries by what is in force.
    fn install(&self, config: &Config) {
        self.fleet.set_routes(self.routes(config));
    }

    /// Makes routes of what is in force, and tells Consul's names whom to ask.
    fn routes(&self, config: &Config) -> Routes {
        let upstream = self.in_force.upstream.load();
        let handlers: ByDomain = self
            .in_force
            .handlers
            .load()
            .sources()
            .filter(|(domain, _)| !self.retired.contains_key(*domain))
            .map(|(domain, source)| (domain.clone(), Arc::new(source.clone()) as Arc<dyn Answer>))
            .collect();
        let answer = |source: CachedSource| Arc::new(source) as Arc<dyn Answer>;
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
        Routes {
            upchecks: config.upcheck_domains.iter().cloned().collect(),
            consul,
            handlers,
            reverse: Some(past),
            recursors: root,
            handlers_stay_away: config.compat.retired_handlers,
        }
    }
}
