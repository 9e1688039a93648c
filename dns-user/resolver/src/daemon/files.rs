//! All followed files and the changes found in them.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Instant};

use parking_lot::Mutex;
use tracing::error;

use super::{
    consul::ConsulFiles,
    records::CatalogFiles,
    sources::{Contents, Followed, Sources},
};
use crate::{
    consul::{Catalogs, NewZone},
    ops::service_status::{Kind, ServiceStatus},
};
use dns_consul::config::Config as ConsulConfig;
use dns_core::{
    catalog::Snapshot,
    config::{ConfigError, addresses::parse_addresses},
};
use dns_upstream::{HandlerConfig, Handlers};

/// All files that can change at runtime; clones share the state.
#[derive(Clone)]
pub(super) struct Files(Arc<Mutex<Inner>>);

struct Inner {
    sources: Sources,
    catalog: CatalogFiles,
    handlers: Followed,
    addresses: Followed,
    /// `None` if Consul is not configured.
    consul: Option<ConsulFiles>,
    service_status: ServiceStatus,
}

#[derive(Default)]
pub(super) struct Changes {
    /// Rebuilt after a change of records or aliases.
    pub(super) snapshot: Option<Snapshot>,
    /// All handlers, if any handler file changed.
    pub(super) handlers: Option<Vec<HandlerConfig>>,
    /// All additional listen addresses, if any addresses file changed.
    pub(super) addresses: Option<Vec<SocketAddr>>,
    /// The zone, if a definition file changed.
    pub(super) consul: Option<NewZone>,
}

/// Results of the first read.
pub(super) struct First {
    pub(super) snapshot: Snapshot,
    pub(super) handlers: Vec<HandlerConfig>,
    pub(super) addresses: Vec<SocketAddr>,
    /// `None` if Consul is not configured.
    pub(super) consul: Option<NewZone>,
}

impl Files {
    /// Reads every file for the first time.
    ///
    /// Invalid files are reported, and only the valid ones are served. An invalid handler file is an
    /// error, because other servers would be asked for the names of its handlers; so is an invalid
    /// alias file with `compat.require_alias_files`.
    pub(super) fn start(
        sources: Sources,
        consul: Option<ConsulConfig>,
        service_status: &ServiceStatus,
    ) -> Result<(Self, First), ConfigError> {
        let (catalog, snapshot) = CatalogFiles::start(&sources, service_status)?;
        let consul = consul.map(|config| ConsulFiles::start(config, service_status));
        let (consul_files, consul) = consul.unzip();
        let mut inner = Inner {
            handlers: Followed::new(sources.handlers.clone()),
            addresses: Followed::new(sources.addresses.clone()),
            catalog,
            consul: consul_files,
            sources,
            service_status: service_status.clone(),
        };
        let handlers = inner.read_handlers(true).transpose()?.unwrap_or_default();
        let addresses = match inner.read_addresses(true).transpose() {
            Ok(addresses) => addresses.unwrap_or_default(),
            Err(problem) => {
                error!(
                    "addresses files: {problem}; only the addresses of the other files are listened on until \
                     it is valid"
                );
                inner.addresses.valid(parse_listen_addresses)
            }
        };
        Ok((Self(Arc::new(Mutex::new(inner))), First { snapshot, handlers, addresses, consul }))
    }

    /// Checks the files for changes on a blocking thread; `force` re-reads and reapplies all of
    /// them.
    pub(super) async fn reload(&self, force: bool) -> Changes {
        let this = self.clone();
        let changes = tokio::task::spawn_blocking(move || this.with(|inner| inner.reload(force))).await;
        // A panic has been logged with its location; the data in use stays.
        changes.unwrap_or_default()
    }

    /// Returns the catalogs; `None` if Consul is not configured.
    pub(super) fn consul_catalogs(&self) -> Option<Arc<Catalogs>> {
        self.with(|inner| inner.consul.as_ref().map(|files| files.catalogs().clone()))
    }

    /// Switches to another object `"consul"` on a blocking thread and returns its zone; `None` if
    /// Consul was not configured at start.
    pub(super) async fn reconfigure_consul(&self, config: ConsulConfig) -> Option<NewZone> {
        let this = self.clone();
        let reconfigured = tokio::task::spawn_blocking(move || {
            this.with(|inner| inner.consul.as_mut().map(|files| files.reconfigure(config)))
        });
        // A panic has been logged with its location; the data in use stays.
        reconfigured.await.ok().flatten()
    }

    /// Replaces the followed sources.
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

    /// Returns the folders to watch.
    pub(super) fn folders(&self) -> Vec<PathBuf> {
        self.with(|inner| inner.folders())
    }

    /// Runs `work` with the state locked. After a panic in it the data read before remains.
    fn with<T>(&self, work: impl FnOnce(&mut Inner) -> T) -> T {
        work(&mut self.0.lock())
    }
}

impl Inner {
    fn reload(&mut self, force: bool) -> Changes {
        // Start all reads first: waking this thread for each completion in turn would be slow on a
        // busy CPU.
        self.catalog.look_ahead(force);
        self.handlers.look_ahead(force);
        self.addresses.look_ahead(force);
        let snapshot = self.catalog.refresh(force);
        let handlers = self.read_handlers(force).and_then(|read| {
            read.inspect_err(|problem| error!("handler files: {problem}; the current handlers stay in use"))
                .ok()
        });
        let addresses = self.read_addresses(force).and_then(|read| {
            read.inspect_err(|problem| {
                error!("addresses files: {problem}; the current listen addresses stay in use")
            })
            .ok()
        });
        let consul = self.consul.as_mut().and_then(|files| files.refresh(force, &self.service_status));
        Changes { snapshot, handlers, addresses, consul }
    }

    /// Returns the folders to watch, without duplicates.
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
        let (contents, parsed) = self.handlers.parsed(force, parse_handlers)?;
        match &parsed {
            Ok(handlers) => {
                let detail = format!("{} handlers", handlers.len());
                self.service_status.loaded(
                    Kind::Handlers,
                    contents.paths(),
                    Vec::new(),
                    begun.elapsed(),
                    &detail,
                );
            }
            Err(problem) => {
                self.service_status.refused(Kind::Handlers, contents.paths(), &problem.to_string())
            }
        }
        Some(parsed)
    }

    /// Reads the addresses files if they may have changed.
    fn read_addresses(&mut self, force: bool) -> Option<Result<Vec<SocketAddr>, ConfigError>> {
        let begun = Instant::now();
        let (contents, parsed) = self.addresses.parsed(force, parse_listen_addresses)?;
        match &parsed {
            Ok(addresses) => {
                let detail = format!("{} further addresses", addresses.len());
                self.service_status.loaded(
                    Kind::Addresses,
                    contents.paths(),
                    Vec::new(),
                    begun.elapsed(),
                    &detail,
                );
            }
            Err(problem) => {
                self.service_status.refused(Kind::Addresses, contents.paths(), &problem.to_string())
            }
        }
        Some(parsed)
    }
}

fn parse_handlers(contents: &Contents) -> Result<Vec<HandlerConfig>, ConfigError> {
    let files = contents.readable()?;
    Handlers::parse(files.iter().map(|(name, bytes)| (name.as_str(), *bytes)))
}

/// Parses addresses files; returns each address once.
fn parse_listen_addresses(contents: &Contents) -> Result<Vec<SocketAddr>, ConfigError> {
    let mut addresses = Vec::new();
    for (file, bytes) in contents.readable()? {
        for address in parse_addresses(&file, bytes)? {
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
    }
    Ok(addresses)
}
