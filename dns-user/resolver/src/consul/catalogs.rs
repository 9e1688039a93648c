//! Reads the object `"consul"`, and merges the catalogs of the definition files and of a live Consul.

use std::{path::Path, sync::Arc};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use dns_consul::{
    Zone,
    catalog::{Catalog, registrations::Registrations},
    config::Config,
    source::{CatalogView, Settings},
};
use dns_core::config::{ConfigError, ParsedFiles};
use dns_kit::files::bounded;

/// All registrations, from both sources.
#[derive(Debug)]
pub(crate) struct Catalogs {
    /// The latest state of each source.
    parts: Mutex<Parts>,
    /// The catalog of the last zone, on which the next one is based.
    built: Mutex<Option<Built>>,
    /// Settings for a live Consul; `None` if none is configured.
    settings: watch::Sender<Option<Settings>>,
}

/// A catalog with the inputs from which it was built, except for a live Consul.
#[derive(Debug)]
struct Built {
    source: Arc<Config>,
    files: Arc<Registrations>,
    datacenter: String,
    catalog: Catalog,
}

#[derive(Debug)]
struct Parts {
    config: Arc<Config>,
    files: Arc<Registrations>,
    /// The catalog of a live Consul; `None` if none is configured.
    live: Option<Arc<CatalogView>>,
    version: u64,
}

/// A zone with the version of its sources.
#[derive(Debug)]
pub(crate) struct NewZone {
    /// Incremented with each change of a source.
    pub(super) version: u64,
    pub(crate) zone: Zone,
}

impl Catalogs {
    /// Creates empty catalogs. If a live Consul is configured, its names are unknown until it
    /// answers.
    pub(crate) fn new(config: Config) -> Self {
        let settings = watch::channel(Settings::of(&config)).0;
        let live = unknown_if_live(&config);
        let parts = Parts { config: Arc::new(config), files: Arc::default(), live, version: 0 };
        Self { parts: Mutex::new(parts), built: Mutex::new(None), settings }
    }

    pub(crate) fn config(&self) -> Arc<Config> {
        self.lock().config.clone()
    }

    /// Installs another object `"consul"`. The catalog of the files stays; that of a live Consul
    /// that is no longer configured is dropped.
    pub(crate) fn set_config(&self, config: Config) {
        let settings = Settings::of(&config);
        self.change(|parts| {
            let unknown = unknown_if_live(&config);
            parts.live = unknown.map(|unknown| parts.live.take().unwrap_or(unknown));
            parts.config = Arc::new(config);
        });
        self.settings.send_if_modified(|in_force| {
            let differs = *in_force != settings;
            *in_force = settings;
            differs
        });
    }

    /// Returns a receiver of the settings for a live Consul.
    #[cfg(feature = "live-consul")]
    pub(super) fn settings(&self) -> watch::Receiver<Option<Settings>> {
        self.settings.subscribe()
    }

    /// Replaces the catalog of the files.
    pub(crate) fn set_files(&self, files: Registrations) {
        self.change(|parts| parts.files = Arc::new(files));
    }

    /// Replaces the catalog of the live Consul.
    #[cfg(feature = "live-consul")]
    pub(crate) fn set_live(&self, live: Arc<CatalogView>) {
        self.change(|parts| {
            // A Consul that is no longer configured may still deliver a catalog.
            if parts.config.http.is_some() {
                parts.live = Some(live);
            }
        });
    }

    /// Builds a zone from all registrations. Indexes only the changes since the last call, unless
    /// files or configuration changed: a complete index takes 0.1 s for 50,000 instances.
    pub(crate) fn zone(&self) -> NewZone {
        let mut built = self.built.lock();
        let (version, source, files, live) = {
            let Parts { config, files, live, version } = &*self.lock();
            (*version, config.clone(), files.clone(), live.clone())
        };
        let mut config = (*source).clone();
        if let Some(live) = &live {
            let CatalogView { live: _, datacenter, node_name } = &**live;
            if let (Some(datacenter), true) = (datacenter, config.datacenter_is_default) {
                config.datacenter.clone_from(datacenter);
            }
            if config.node_name.is_empty() {
                config.node_name.clone_from(node_name);
            }
        }
        let reusable = built.take().filter(|built| {
            Arc::ptr_eq(&built.source, &source)
                && Arc::ptr_eq(&built.files, &files)
                && built.datacenter == config.datacenter
        });
        let mut catalog = match reusable {
            Some(built) => built.catalog,
            None => Catalog::build((*files).clone(), &config, config.visibility.clone()),
        };
        catalog.update(live.as_ref().map(|live| live.live.clone()));
        *built =
            Some(Built { source, files, datacenter: config.datacenter.clone(), catalog: catalog.clone() });
        NewZone { version, zone: Zone { config, catalog } }
    }

    /// Changes the registrations and their version.
    fn change(&self, change: impl FnOnce(&mut Parts)) {
        let mut parts = self.lock();
        change(&mut parts);
        parts.version += 1;
    }

    /// Locks the sources. After a panic the previous state remains.
    fn lock(&self) -> MutexGuard<'_, Parts> {
        self.parts.lock()
    }
}

/// Returns the view of a live Consul that has not answered yet; `None` if none is configured.
fn unknown_if_live(config: &Config) -> Option<Arc<CatalogView>> {
    config.http.is_some().then(|| Arc::new(CatalogView::unknown(config)))
}

/// A configuration with the warnings about it; `None` if the file has no object `"consul"`.
type Loaded = ParsedFiles<Option<(Config, Vec<String>)>>;

/// Reads the object `"consul"` of `config.json` with warnings about it; `None` if there is no such
/// object.
pub(crate) fn load_config(path: &Path) -> Loaded {
    let file = path.display().to_string();
    match bounded::read(path) {
        Ok(bytes) => without_live(&file, Config::of_document(&file, &bytes)),
        Err(error) => {
            let error = ConfigError::of_file(file, format!("cannot be read: {error}"));
            ParsedFiles { valid: None, errors: vec![error] }
        }
    }
}

/// Rejects a live Consul in a build without the feature `live-consul`.
fn without_live(file: &str, mut loaded: Loaded) -> Loaded {
    let live = loaded.valid.as_ref().is_some_and(|(config, _)| config.http.is_some());
    if live && !cfg!(feature = "live-consul") {
        loaded.errors.push(ConfigError {
            file: file.to_owned(),
            key: Some("consul.sources.http".to_owned()),
            problem: "this build does not query a live Consul; remove the section, or use a build with the feature \
                      live-consul"
                .to_owned(),
        });
        loaded.valid = None;
    }
    loaded
}
