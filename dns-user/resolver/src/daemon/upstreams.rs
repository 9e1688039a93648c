//! Routes non-local names: combines recursors, handlers and reverse names into routes, which are
//! rebuilt when files or the configuration change.

use std::{net::SocketAddr, sync::Arc, time::Instant};

use super::retired::RetiredHandlers;
use crate::{
    consul::{ConsulNames, ReverseConsulNames, recursors_of},
    ops::metrics::Metrics,
    state::{ByDomain, Routes, ServerState},
};
use dns_consul::config::Config as ConsulConfig;
use dns_core::{
    catalog::Snapshot,
    config::{Config, SpecialNames as SpecialNamesSetting},
    wire::ForwardedAnswer,
};
use dns_fastpath::{AnswerKey, FastPathHandle};
use dns_upstream::{
    Answer, CachedQuestion, CachedSource, CurrentUpstreams, HandlerConfig, Handlers,
    InterfaceAnswers, OwnAddresses, SpecialNames, Upstream, metrics::UpstreamMetrics,
};

/// The recursors, handlers and reverse names in use.
pub(super) struct Upstreams {
    server_state: Arc<ServerState>,
    /// Recursors and handlers, shared with status and metrics.
    pub(super) in_force: Arc<CurrentUpstreams>,
    /// Addresses of this server, shared by all sources of recursors.
    own: OwnAddresses,
    /// Interfaces that answer from copies of cached answers.
    interfaces: Arc<dyn InterfaceAnswers>,
    /// Consul names and their own recursors; `None` without Consul.
    consul: Option<Consul>,
    retired: RetiredHandlers,
}

/// Consul names and their recursors.
struct Consul {
    names: Arc<ConsulNames>,
    /// Recursors configured in the object `"consul"`.
    recursors: Option<Arc<dyn Answer>>,
}

impl Upstreams {
    /// Installs recursors and handlers of a server that listens on `listen`. Must be called inside a
    /// tokio runtime.
    pub(super) fn new(
        server_state: Arc<ServerState>,
        config: &Config,
        listen: &[SocketAddr],
        handlers: Vec<HandlerConfig>,
        consul: Option<(Arc<ConsulNames>, ConsulConfig)>,
        metrics: &Metrics,
    ) -> prometheus::Result<Self> {
        let interfaces: Arc<dyn InterfaceAnswers> =
            Arc::new(MirroredAnswers(server_state.fast_path.clone()));
        let own = OwnAddresses::new(listen);
        let upstream = Upstream::new(config, &own, &interfaces);
        let handlers = Handlers::new(
            handlers,
            config,
            &Handlers::default(),
            upstream.host_names(),
            &interfaces,
        );
        let in_force = CurrentUpstreams::new(upstream, handlers);
        let server = metrics.server().to_owned();
        UpstreamMetrics {
            in_force: in_force.clone(),
            server,
        }
        .register(metrics.registry())?;
        let consul = consul.map(|(names, object)| {
            let recursors = recursors_of(&object, config, &own);
            Consul { names, recursors }
        });
        let mut upstreams = Self {
            server_state,
            in_force,
            own,
            interfaces,
            consul,
            retired: RetiredHandlers::default(),
        };
        // Before the first routes: a handler whose domain the records have must not answer even
        // once.
        upstreams.retire(&upstreams.server_state.snapshot());
        upstreams.install(config);
        Ok(upstreams)
    }

    /// Applies new records and handlers, if any. Suspends handlers whose domain the records contain
    /// and reinstates the others after a delay, so it must be called periodically even without
    /// changes.
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
            let handlers = Handlers::new(
                handlers,
                config,
                &previous,
                upstream.host_names(),
                &self.interfaces,
            );
            self.in_force.handlers.store(Arc::new(handlers));
            // Other handlers under the same domains have not been suspended yet.
            self.retired.clear();
        }
        let is_retiring = self.retire(
            &snapshot
                .clone()
                .unwrap_or_else(|| self.server_state.snapshot()),
        );
        let routes = (has_handlers || is_retiring).then(|| self.routes(config));
        // Together, so that no query sees new records with the old routes.
        self.server_state.change(snapshot, routes);
    }

    /// Updates the suspended handler domains; returns whether that changes a route.
    fn retire(&mut self, snapshot: &Snapshot) -> bool {
        let handlers = self.in_force.handlers.load();
        self.retired.follow(
            snapshot,
            |domain| handlers.sources().any(|(handler, _)| handler == domain),
            Instant::now(),
        )
    }

    /// Applies a changed configuration; recursors, handlers and their caches are kept if their
    /// settings are unchanged.
    pub(super) fn reconfigure(&mut self, old: &Config, new: &Config) {
        // Unchanged ones keep their connections, their cache and what they know of slow recursors.
        if old.recursion != new.recursion || old.cache != new.cache {
            let upstream = Upstream::new(new, &self.own, &self.interfaces);
            // Handlers take their time limits from the configuration, and ask its recursors for host names.
            let handlers = Handlers::new(
                self.in_force.handlers.load().configs(),
                new,
                &Handlers::default(),
                upstream.host_names(),
                &self.interfaces,
            );
            self.in_force.upstream.store(Arc::new(upstream));
            self.in_force.handlers.store(Arc::new(handlers));
        }
        self.install(new);
    }

    /// Applies another object `"consul"` whose zone is already installed.
    pub(super) fn reconfigure_consul(&mut self, object: &ConsulConfig, config: &Config) {
        if let Some(consul) = &mut self.consul {
            consul.recursors = recursors_of(object, config, &self.own);
        }
        self.install(config);
    }

    /// Follows the listen addresses, and the addresses of interfaces that wildcards cover.
    pub(super) fn listens_on(&self, listen: &[SocketAddr]) {
        self.own.set(listen);
    }

    fn install(&self, config: &Config) {
        self.server_state.set_routes(self.routes(config));
    }

    /// Builds the routes and sets the recursors of Consul names.
    fn routes(&self, config: &Config) -> Routes {
        let upstream = self.in_force.upstream.load();
        let mut handlers = ByDomain::default();
        for (domain, source) in self.in_force.handlers.load().sources() {
            if !self.retired.contains(domain) {
                handlers.insert(domain.clone(), Arc::new(source.clone()));
            }
        }
        let before = |source: CachedSource| behind_special_names(Arc::new(source), config);
        let recursors = upstream.recursors().map(before);
        // bosh-dns asks its recursors for reverse names without its cache (observed).
        let uncached = upstream.uncached().map(before);
        let mut fallback = Routes::reverse_fallback(uncached.as_ref(), &handlers);
        let mut root = recursors.clone();
        let mut consul = ByDomain::default();
        if let Some(Consul {
            names,
            recursors: own,
        }) = &self.consul
        {
            // A configuration migrated from Consul sets its recursors there.
            root = recursors.clone().or_else(|| own.clone());
            names.ask(own.clone().or(recursors));
            for domain in names.domains() {
                consul.insert(domain, names.clone());
            }
            let next = match root {
                // The server's own recursion is off: Consul's recursors answer these names, too.
                Some(_) if upstream.recursors().is_none() => root.clone(),
                Some(_) => Some(fallback),
                None => Routes::has_reverse_fallback(&handlers).then_some(fallback),
            };
            fallback = Arc::new(ReverseConsulNames {
                names: names.clone(),
                fallback: next,
            });
        }
        Routes {
            upchecks: config.upcheck_domains.iter().cloned().collect(),
            consul,
            handlers,
            reverse: Some(fallback),
            recursors: root,
            retires_handlers: config.compat.retired_handlers,
        }
    }
}

/// Returns recursors behind the special-use names, if this server answers these.
pub(super) fn behind_special_names(recursors: Arc<dyn Answer>, config: &Config) -> Arc<dyn Answer> {
    match config.recursion.special_names {
        SpecialNamesSetting::Local => Arc::new(SpecialNames::new(recursors)),
        SpecialNamesSetting::Forward => recursors,
    }
}

/// The forwarded answers in the fast path's maps.
struct MirroredAnswers(FastPathHandle);

impl std::fmt::Debug for MirroredAnswers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MirroredAnswers").finish_non_exhaustive()
    }
}

fn key<'a>(question: &CachedQuestion<'a>) -> AnswerKey<'a> {
    let CachedQuestion {
        name,
        qtype,
        dnssec_ok,
        checking_disabled,
    } = *question;
    AnswerKey {
        name,
        qtype,
        dnssec_ok,
        checking_disabled,
    }
}

impl InterfaceAnswers for MirroredAnswers {
    fn generation(&self) -> u64 {
        self.0.answer_generation()
    }

    fn holds(&self, question: &CachedQuestion<'_>) -> bool {
        self.0.holds_answer(&key(question))
    }

    fn last_used_ns(&self, question: &CachedQuestion<'_>) -> Option<u64> {
        self.0.answer_last_used_ns(&key(question))
    }

    fn replace(&self, answer: ForwardedAnswer, generation: u64) {
        self.0.replace_answer(answer, generation);
    }

    fn remove(&self, question: &CachedQuestion<'_>) {
        self.0.remove_answer(&key(question));
    }

    fn clear(&self) {
        self.0.void_answers();
    }
}
