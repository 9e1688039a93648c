//! The states that a server would answer from, followed without a server: no socket, no query, no program.

use std::{collections::HashSet, net::SocketAddr, path::Path, sync::Arc, time::Instant};

use futures_util::future::BoxFuture;

use super::{
    files::{FileChanges, Files, InitialFiles},
    followed_file::{Reading, Sources},
    retired::RetiredHandlers,
    settings,
    upstreams::behind_special_names,
};
use crate::{
    ops::service_status::ServiceStatus,
    state::{ByDomain, Routes, ServerState},
};
use dns_core::{
    catalog::Snapshot,
    config::{Config, ConfigErrors, Loaded, all_addresses},
    name::Name,
    resolve::Health,
    wire::{ExtendedError, InfoCode, Query, ReplyFlags, empty_reply},
};
use dns_fastpath::FastPathHandle;
use dns_kit::{files::watch::Watch, privileges};
use dns_upstream::{Answer, Denial, HandlerConfig, HandlerSource};
use hickory_proto::op::ResponseCode;

/// Follows the files of a configuration.
pub struct FollowedFleet {
    /// The configuration, which is read once.
    pub config: Config,
    /// Warnings about it.
    pub warnings: Vec<String>,
    files: Files,
    watch: Watch,
    pub(super) handlers: Vec<HandlerConfig>,
    retired: RetiredHandlers,
    /// Domains of handlers that the records have, or once had.
    former_handlers: HashSet<Name>,
    /// Domains of Consul's names.
    pub(super) consul: Vec<Name>,
    snapshot: Arc<Snapshot>,
    further_addresses: Vec<SocketAddr>,
}

/// Returns the main address of the server with this configuration.
///
/// # Errors
///
/// Returns every error in the configuration.
pub fn listen_address(path: &Path) -> Result<SocketAddr, ConfigErrors> {
    let (Loaded { config, .. }, _) = settings::load_config(path)?;
    Ok(config.listen)
}

/// Drops the privileges that watching does not need. Must be called before the first thread starts, and before
/// anything of the network is read.
///
/// # Errors
///
/// Fails if the kernel refuses.
pub fn give_up_privileges() -> anyhow::Result<()> {
    privileges::keep_for_watching()
}

impl FollowedFleet {
    /// Reads the files that a server with this configuration would read.
    ///
    /// # Errors
    ///
    /// Returns every error in the configuration.
    pub fn of(path: &Path) -> Result<Self, ConfigErrors> {
        let (Loaded { config, warnings }, consul) = settings::load_config(path)?;
        // Live sources of Consul are not asked; its names are compared by their route.
        let mut consul_domains = Vec::new();
        if let Some(consul) = consul {
            consul_domains.push(consul.domain);
            consul_domains.extend(consul.alt_domain);
        }
        let (
            files,
            InitialFiles {
                snapshot,
                handlers,
                addresses,
                ..
            },
        ) = Files::start(Sources::of(&config), None, &ServiceStatus::default())?;
        let mut watch = Watch::new();
        watch.set(files.folders().unwrap_or_default());
        let mut fleet = Self {
            config,
            warnings,
            files,
            watch,
            handlers,
            retired: RetiredHandlers::default(),
            former_handlers: HashSet::new(),
            consul: consul_domains,
            snapshot: Arc::new(snapshot),
            further_addresses: addresses,
        };
        fleet.retire_handlers(Instant::now());
        Ok(fleet)
    }

    /// Returns the addresses on which a server would listen.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        all_addresses(self.config.listen, &self.further_addresses)
    }

    /// Returns whether names of Consul are configured.
    pub fn has_consul(&self) -> bool {
        !self.consul.is_empty()
    }

    /// Returns the current names.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshot.clone()
    }

    /// Returns the domains of handlers that the records have, or once had.
    pub fn former_handlers(&self) -> &HashSet<Name> {
        &self.former_handlers
    }

    /// Waits until the files may have changed, at most a second; returns whether answers may have.
    pub async fn follow(&mut self) -> bool {
        self.watch.next().await;
        self.reload(Instant::now()).await
    }

    /// Reads the files if they have changed; returns whether answers may have.
    pub async fn reload(&mut self, now: Instant) -> bool {
        let snapshot = self.files.reload_catalog(Reading::IfChanged).await;
        let FileChanges { handlers, .. } = self.files.reload_others(Reading::IfChanged).await;
        if let Some(folders) = self.files.folders() {
            self.watch.set(folders);
        }
        let is_changed = snapshot.is_some() || handlers.is_some();
        if let Some(snapshot) = snapshot {
            self.snapshot = Arc::new(snapshot);
        }
        if let Some(handlers) = handlers {
            self.handlers = handlers;
            // As in `Upstreams::follow`.
            self.retired.clear();
        }
        self.retire_handlers(now) || is_changed
    }

    /// Follows which handlers the records suspend; returns whether that changes a route.
    fn retire_handlers(&mut self, now: Instant) -> bool {
        let handlers = &self.handlers;
        let is_handler = |domain: &Name| handlers.iter().any(|handler| handler.domain == *domain);
        // Those of earlier files do not matter, and would accumulate.
        self.former_handlers.retain(|domain| is_handler(domain));
        let domains = self.snapshot.domains().filter(|domain| is_handler(domain));
        self.former_handlers.extend(domains.cloned());
        self.retired.follow(&self.snapshot, is_handler, now)
    }

    /// Returns a state that answers from the current files, and asks no other server.
    pub fn state(&self, health: Arc<dyn Health + Send + Sync>) -> Arc<ServerState> {
        let fast_path = FastPathHandle::default();
        let state = ServerState::new(Snapshot::empty(), health, fast_path, None, None);
        state.change(Some(self.snapshot.clone()), Some(self.routes()));
        Arc::new(state)
    }

    fn routes(&self) -> Routes {
        let config = &self.config;
        // One for all recursors and handlers: none of them is asked, and the route tells them
        // apart.
        let elsewhere: Arc<dyn Answer> = Arc::new(Elsewhere);
        let never_return = config.compat.retired_handlers;
        let mut handlers = ByDomain::default();
        for HandlerConfig { domain, source, .. } in &self.handlers {
            // The state knows the domains of its own records only, and was made a moment ago.
            let is_former = never_return && self.former_handlers.contains(domain);
            if is_former || self.retired.contains(domain) {
                continue;
            }
            let answer: Arc<dyn Answer> = match source {
                HandlerSource::Deny(denial) => Arc::new(Denied(*denial)),
                HandlerSource::Dns(_) | HandlerSource::Http(_) => elsewhere.clone(),
            };
            handlers.insert(domain.clone(), answer);
        }
        let recursors =
            (!config.recursion.disabled).then(|| behind_special_names(elsewhere.clone(), config));
        let mut consul = ByDomain::default();
        for domain in &self.consul {
            consul.insert(domain.clone(), elsewhere.clone());
        }
        let reverse = Routes::reverse_fallback(recursors.as_ref(), &handlers);
        Routes {
            upchecks: config.upcheck_domains.iter().cloned().collect(),
            consul,
            reverse: Some(reverse),
            handlers,
            recursors,
            retires_handlers: config.compat.retired_handlers,
        }
    }
}

/// A source that is not asked: its answers always have to be waited for.
struct Elsewhere;

impl Answer for Elsewhere {
    fn answer<'a>(&'a self, query: &'a Query<'a>) -> BoxFuture<'a, Vec<u8>> {
        let reply = empty_reply(query, ResponseCode::ServFail, ReplyFlags::RECURSION);
        Box::pin(std::future::ready(reply))
    }
}

/// A handler that denies every name.
struct Denied(Denial);

impl Denied {
    fn reply(&self, query: &Query<'_>) -> Vec<u8> {
        let rcode = match self.0 {
            Denial::Nxdomain => ResponseCode::NXDomain,
            Denial::Refused => ResponseCode::Refused,
        };
        let mut reply = empty_reply(query, rcode, ReplyFlags::LOCAL);
        // As in `dns_upstream::CachedSource`, which also opens sockets.
        ExtendedError::new(InfoCode::Blocked, "denied by a handler of this server")
            .push(query, &mut reply);
        reply
    }
}

impl Answer for Denied {
    fn answer<'a>(&'a self, query: &'a Query<'a>) -> BoxFuture<'a, Vec<u8>> {
        Box::pin(std::future::ready(self.reply(query)))
    }

    fn answer_at_once(&self, query: &Query<'_>, out: &mut Vec<u8>) -> bool {
        *out = self.reply(query);
        true
    }
}
