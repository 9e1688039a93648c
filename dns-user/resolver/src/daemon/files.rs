//! All followed files and the changes found in them.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Instant};

use parking_lot::Mutex;
use tracing::error;

use super::{
    consul::ConsulFiles,
    followed_file::{Contents, Followed, Reading, Sources, error_lines},
    records::CatalogFiles,
};
use crate::{
    consul::{Catalogs, NewZone},
    ops::service_status::{Kind, ServiceStatus},
};
use dns_consul::config::Config as ConsulConfig;
use dns_core::{
    catalog::Snapshot,
    config::{ConfigErrors, ParsedFiles, parse::parse_addresses},
};
use dns_kit::files::watch::Writes;
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

/// Changes of other files than records and alias files.
#[derive(Default)]
pub(super) struct FileChanges {
    /// All handlers, if any handler file changed.
    pub(super) handlers: Option<Vec<HandlerConfig>>,
    /// All additional listen addresses, if any addresses file changed.
    pub(super) addresses: Option<Vec<SocketAddr>>,
    /// The zone, if a definition file changed.
    pub(super) consul: Option<NewZone>,
}

/// Results of the first read.
pub(super) struct InitialFiles {
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
    /// alias file with `compat.require_alias_files`. The status then has the errors of every file.
    pub(super) fn start(
        sources: Sources,
        consul: Option<ConsulConfig>,
        service_status: &ServiceStatus,
    ) -> Result<(Self, InitialFiles), ConfigErrors> {
        let (catalog, snapshot, mut fatal) = CatalogFiles::start(&sources, service_status);
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
        let handlers = inner.read_handlers(Reading::Always).unwrap_or_default();
        fatal.extend(handlers.errors);
        let addresses = inner.read_addresses(Reading::Always).unwrap_or_default();
        let others = "only the addresses of the other files are listened on until it is valid";
        for line in error_lines("addresses files", &addresses.errors, others) {
            error!("{line}");
        }
        // After all files have been read, so that an operator sees every error of one start.
        if !fatal.is_empty() {
            return Err(ConfigErrors(fatal));
        }
        Ok((
            Self(Arc::new(Mutex::new(inner))),
            InitialFiles {
                snapshot,
                handlers: handlers.valid,
                addresses: addresses.valid,
                consul,
            },
        ))
    }

    /// Reads records and alias files on a blocking thread; returns a new snapshot after a change.
    pub(super) async fn reload_catalog(&self, reading: Reading) -> Option<Snapshot> {
        self.with_blocking(move |inner| {
            inner.catalog.look_ahead(reading);
            inner.catalog.refresh(reading)
        })
        .await
    }

    /// Reads all other files on a blocking thread.
    pub(super) async fn reload_others(&self, reading: Reading) -> FileChanges {
        self.with_blocking(move |inner| inner.reload_others(reading))
            .await
    }

    /// Like [`Self::with`], on a blocking thread.
    async fn with_blocking<T: Default + Send + 'static>(
        &self,
        work: impl FnOnce(&mut Inner) -> T + Send + 'static,
    ) -> T {
        let this = self.clone();
        let done = tokio::task::spawn_blocking(move || this.with(work)).await;
        // A panic has been logged with its location; the data in use stays.
        done.unwrap_or_default()
    }

    pub(super) fn consul_catalogs(&self) -> Option<Arc<Catalogs>> {
        self.with(|inner| inner.consul.as_ref().map(|files| files.catalogs.clone()))
    }

    /// Switches to another object `"consul"` on a blocking thread and returns its zone; `None` if
    /// Consul was not configured at start.
    pub(super) async fn reconfigure_consul(&self, config: ConsulConfig) -> Option<NewZone> {
        self.with_blocking(|inner| Some(inner.consul.as_mut()?.reconfigure(config)))
            .await
    }

    pub(super) fn follow(&self, sources: Sources) {
        self.with(|inner| {
            // New readers start a thread each and read everything again.
            if inner.sources != sources {
                inner.catalog.follow(&sources);
                inner.handlers = Followed::new(sources.handlers.clone());
                inner.addresses = Followed::new(sources.addresses.clone());
                inner.sources = sources;
            }
        });
    }

    /// Relies on the kernel's reports of writes to the records file.
    pub(super) fn rely_on(&self, writes: Writes) {
        self.with(|inner| inner.catalog.rely_on(writes));
    }

    /// Returns the folders to watch; `None` while a file system hangs.
    pub(super) fn folders(&self) -> Option<Vec<PathBuf>> {
        self.with(|inner| inner.folders())
    }

    /// Runs `work` with the state locked. After a panic in it the data read before remains.
    fn with<T>(&self, work: impl FnOnce(&mut Inner) -> T) -> T {
        work(&mut self.0.lock())
    }
}

impl Inner {
    fn reload_others(&mut self, reading: Reading) -> FileChanges {
        // Start all reads first: waking this thread for each completion in turn would be slow on a
        // busy CPU.
        self.handlers.look_ahead(reading, None);
        self.addresses.look_ahead(reading, None);
        let handlers = self.read_handlers(reading);
        let handlers = whole(
            "handler files",
            handlers,
            "the current handlers stay in use",
        );
        let addresses = self.read_addresses(reading);
        let addresses = whole(
            "addresses files",
            addresses,
            "the current listen addresses stay in use",
        );
        let consul = self
            .consul
            .as_mut()
            .and_then(|files| files.refresh(reading, &self.service_status));
        FileChanges {
            handlers,
            addresses,
            consul,
        }
    }

    /// Returns the folders to watch, without duplicates; `None` while a file system hangs, since inotify_add_watch(2)
    /// would hang as well.
    fn folders(&self) -> Option<Vec<PathBuf>> {
        let Self {
            catalog,
            handlers,
            addresses,
            consul,
            ..
        } = self;
        let consul = consul.as_ref().map(|files| &files.followed);
        let mut all = Vec::new();
        for followed in catalog
            .followed()
            .into_iter()
            .chain([handlers, addresses])
            .chain(consul)
        {
            if followed.hangs {
                return None;
            }
            for folder in &followed.folders {
                if !all.contains(folder) {
                    all.push(folder.clone());
                }
            }
        }
        Some(all)
    }

    fn read_handlers(&mut self, reading: Reading) -> Option<ParsedFiles<Vec<HandlerConfig>>> {
        let begun = Instant::now();
        let read = self
            .handlers
            .parsed(reading, |files| Handlers::parse(files.iter().copied()))?;
        let detail = format!("{} handlers", read.1.valid.len());
        self.report(Kind::Handlers, &read, begun, &detail);
        Some(read.1)
    }

    fn read_addresses(&mut self, reading: Reading) -> Option<ParsedFiles<Vec<SocketAddr>>> {
        let begun = Instant::now();
        let read = self
            .addresses
            .parsed(reading, |files| parse_addresses(files.iter().copied()))?;
        let detail = format!("{} further addresses", read.1.valid.len());
        self.report(Kind::Addresses, &read, begun, &detail);
        Some(read.1)
    }

    fn report<T>(
        &self,
        kind: Kind,
        (contents, parsed): &(Contents, ParsedFiles<T>),
        begun: Instant,
        detail: &str,
    ) {
        match parsed.errors.as_slice() {
            [] => {
                self.service_status.loaded(
                    kind,
                    contents.paths(),
                    Vec::new(),
                    begun.elapsed(),
                    detail,
                );
            }
            errors => self.service_status.refused(kind, contents.paths(), errors),
        }
    }
}

/// Returns the contents of changed files if all are valid; otherwise logs every error.
fn whole<T>(what: &str, read: Option<ParsedFiles<T>>, consequence: &str) -> Option<T> {
    let read = read?;
    for line in error_lines(what, &read.errors, consequence) {
        error!("{line}");
    }
    read.whole().ok()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use dns_core::config::Config;

    use super::*;

    #[tokio::test]
    async fn new_records_precede_other_files() {
        let folder = tempfile::tempdir().unwrap();
        let in_folder = |name: &str| folder.path().join(name).display().to_string();
        let records = in_folder("records.json");
        let write = |version: u64| {
            let text = format!(
                r#"{{"record_keys": ["id", "instance_group", "az", "network", "deployment", "ip", "domain"],
                "record_infos": [["a", "web", "z1", "net", "dep", "10.0.0.1", "bosh"]], "version": {version}}}"#
            );
            fs::write(&records, text).unwrap();
        };
        write(1);
        let handlers = in_folder("handlers.json");
        let text = format!(
            r#"{{"address": "127.0.0.1", "port": 53, "records_file": "{records}", "handlers_files_glob": "{handlers}"}}"#
        );
        let config = Config::check("config.json", text.as_bytes());
        let sources = Sources::of(&config.1.unwrap().config);
        let status = ServiceStatus::default();
        let (files, _) = Files::start(sources.clone(), None, &status).unwrap();

        files.with(|inner| inner.handlers = Followed::new(sources.handlers));
        write(2);
        let snapshot = files.reload_catalog(Reading::IfChanged).await;
        assert_eq!(snapshot.unwrap().version(), Some(2));
        let has_looked = || files.with(|inner| !inner.handlers.folders.is_empty());
        assert!(!has_looked());
        files.reload_others(Reading::IfChanged).await;
        assert!(has_looked());
    }

    #[tokio::test]
    async fn folders_of_hung_file_system_are_not_watched() {
        let config = br#"{"address": "127.0.0.1", "port": 53}"#;
        let config = Config::check("config.json", config).1.unwrap().config;
        let sources = Sources::of(&config);
        let (files, _) = Files::start(sources, None, &ServiceStatus::default()).unwrap();
        assert!(files.folders().is_some());
        let (followed, answer) = Followed::hanging();
        files.with(|inner| inner.handlers = followed);
        files.reload_others(Reading::IfChanged).await;
        assert_eq!(files.folders(), None);
        drop(answer);
        while files.folders().is_none() {
            files.reload_others(Reading::IfChanged).await;
        }
    }
}
