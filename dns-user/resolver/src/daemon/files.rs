//! All files that are followed, and what a look at them brings.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Instant};

use parking_lot::Mutex;
use tracing::error;

use super::{
    consul::ConsulFiles,
    records::CatalogFiles,
    sources::{Followed, Sources},
};
use crate::ops::board::Board;
use crate::{
    consul::{Catalogs, NewZone},
    ops::journal::Kind,
};
use dns_consul::config::Config as ConsulConfig;
use dns_core::{
    catalog::Snapshot,
    config::{ConfigError, addresses::parse_addresses},
};
use dns_upstream::{HandlerConfig, Handlers};

/// The files behind everything that changes while the server runs; clones share them.
#[derive(Clone)]
pub(super) struct Files(Arc<Mutex<Inner>>);

/// What the clones share.
struct Inner {
    /// Where the files are.
    sources: Sources,
    /// Records and aliases.
    catalog: CatalogFiles,
    /// Handler files.
    handlers: Followed,
    /// Addresses files.
    addresses: Followed,
    /// Definition files of Consul's names; `None`: there are no such names.
    consul: Option<ConsulFiles>,
    /// Where the state is shown.
    board: Board,
}

/// What is new.
#[derive(Default)]
pub(super) struct Changes {
    /// New records or aliases.
    pub(super) snapshot: Option<Snapshot>,
    /// The handlers of now.
    pub(super) handlers: Option<Vec<HandlerConfig>>,
    /// The further listen addresses of now.
    pub(super) addresses: Option<Vec<SocketAddr>>,
    /// Consul's names of now.
    pub(super) consul: Option<NewZone>,
}

/// What the first reading gives.
pub(super) struct First {
    /// The first snapshot.
    pub(super) snapshot: Snapshot,
    /// Handlers.
    pub(super) handlers: Vec<HandlerConfig>,
    /// Further listen addresses.
    pub(super) addresses: Vec<SocketAddr>,
    /// Consul's names; `None`: there are none.
    pub(super) consul: Option<NewZone>,
}

impl Files {
    /// Reads everything for the first time.
    pub(super) fn start(
        sources: Sources,
        consul: Option<ConsulConfig>,
        board: &Board,
    ) -> Result<(Self, First), ConfigError> {
        let (catalog, snapshot) = CatalogFiles::start(&sources, board)?;
        let consul = consul.map(|config| ConsulFiles::start(config, board)).transpose()?;
        let (consul_files, consul) = consul.unzip();
        let mut inner = Inner {
            handlers: Followed::new(sources.handlers.clone()),
            addresses: Followed::new(sources.addresses.clone()),
            catalog,
            consul: consul_files,
            sources,
            board: board.clone(),
        };
        let handlers = inner.read_handlers(true).transpose()?.unwrap_or_default();
        let addresses = inner.read_addresses(true).transpose()?.unwrap_or_default();
        Ok((Self(Arc::new(Mutex::new(inner))), First { snapshot, handlers, addresses, consul }))
    }

    /// Looks whether anything changed, off the async threads; with `force` everything
    /// is read and put to use anew.
    pub(super) async fn look(&self, force: bool) -> Changes {
        let this = self.clone();
        let looked = tokio::task::spawn_blocking(move || this.with(|inner| inner.look(force))).await;
        // A panic was logged with its place; what is in use stays.
        looked.unwrap_or_default()
    }

    /// All that is registered as Consul has it; `None`: there are no such names.
    pub(super) fn consul_catalogs(&self) -> Option<Arc<Catalogs>> {
        self.with(|inner| inner.consul.as_ref().map(|files| files.catalogs().clone()))
    }

    /// Another object `"consul"` from now on, off the async threads; the zone by it, `None` where
    /// there are no such names.
    pub(super) async fn reconfigure_consul(&self, config: ConsulConfig) -> Option<NewZone> {
        let this = self.clone();
        let reconfigured = tokio::task::spawn_blocking(move || {
            this.with(|inner| inner.consul.as_mut().map(|files| files.reconfigure(config)))
        });
        // A panic was logged with its place; what is in use stays.
        reconfigured.await.ok().flatten()
    }

    /// Follows other files from now on.
    pub(super) fn follow(&self, sources: Sources) {
        self.with(|inner| {
            if inner.sources != sources {
                inner.catalog.follow(&sources);
                inner.handlers = Followed::new(sources.handlers.clone());
                inner.addresses = Followed::new(sources.addresses.clone());
                inner.sources = sources;
            }
        });
    }

    /// The folders in which a change may be one of ours.
    pub(super) fn folders(&self) -> Vec<PathBuf> {
        self.with(|inner| inner.folders())
    }

    /// Works on the files. A panic in between leaves what was read before.
    fn with<T>(&self, work: impl FnOnce(&mut Inner) -> T) -> T {
        work(&mut self.0.lock())
    }
}

impl Inner {
    /// Looks at all files.
    fn look(&mut self, force: bool) -> Changes {
        // All at once: each answer has to wake this thread, which takes its time where
        // the CPU is busy.
        self.catalog.look_ahead(force);
        self.handlers.look_ahead(force);
        self.addresses.look_ahead(force);
        let snapshot = self.catalog.refresh(force);
        let handlers = self.read_handlers(force).and_then(|read| {
            read.inspect_err(|problem| error!("handler files: {problem}; the handlers in use stay")).ok()
        });
        let addresses = self.read_addresses(force).and_then(|read| {
            read.inspect_err(|problem| error!("addresses files: {problem}; the sockets stay as they are"))
                .ok()
        });
        let consul = self.consul.as_mut().and_then(|files| files.refresh(force, &self.board));
        Changes { snapshot, handlers, addresses, consul }
    }

    /// The folders in which a change may be one of ours, each once.
    fn folders(&self) -> Vec<PathBuf> {
        let Self { catalog, handlers, addresses, consul, .. } = self;
        let consul = consul.as_ref().map(ConsulFiles::followed);
        let mut all = Vec::new();
        for followed in catalog.followed().into_iter().chain([handlers, addresses]).chain(consul) {
            for folder in followed.folders() {
                if !all.contains(folder) {
                    all.push(folder.clone());
                }
            }
        }
        all
    }

    /// Reads the handler files if they may have changed.
    fn read_handlers(&mut self, force: bool) -> Option<Result<Vec<HandlerConfig>, ConfigError>> {
        let begun = Instant::now();
        let (contents, parsed) = self.handlers.parsed(force, |contents| {
            let files = contents.readable()?;
            Handlers::parse(files.iter().map(|(name, bytes)| (name.as_str(), *bytes)))
        })?;
        match &parsed {
            Ok(handlers) => {
                let detail = format!("{} handlers", handlers.len());
                self.board.loaded(Kind::Handlers, contents.paths(), Vec::new(), begun.elapsed(), &detail);
            }
            Err(problem) => self.board.refused(Kind::Handlers, contents.paths(), &problem.to_string()),
        }
        Some(parsed)
    }

    /// Reads the addresses files if they may have changed.
    fn read_addresses(&mut self, force: bool) -> Option<Result<Vec<SocketAddr>, ConfigError>> {
        let begun = Instant::now();
        let (contents, parsed) = self.addresses.parsed(force, |contents| {
            let mut addresses = Vec::new();
            for (file, bytes) in contents.readable()? {
                for address in parse_addresses(&file, bytes)? {
                    if !addresses.contains(&address) {
                        addresses.push(address);
                    }
                }
            }
            Ok::<_, ConfigError>(addresses)
        })?;
        match &parsed {
            Ok(addresses) => {
                let detail = format!("{} further addresses", addresses.len());
                self.board.loaded(Kind::Addresses, contents.paths(), Vec::new(), begun.elapsed(), &detail);
            }
            Err(problem) => self.board.refused(Kind::Addresses, contents.paths(), &problem.to_string()),
        }
        Some(parsed)
    }
}
