//! What definition files and a live Consul tell, together.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use dns_consul::{
    Zone,
    catalog::{Catalog, registrations::Registrations},
    config::Config,
};
use dns_consul_source::{Picture, Settings};

/// All that is registered, wherever it is told.
#[derive(Debug)]
pub(crate) struct Catalogs {
    /// What was told last.
    parts: Mutex<Parts>,
    /// How a live Consul is asked; `None`: none is.
    settings: watch::Sender<Option<Settings>>,
}

#[derive(Debug)]
struct Parts {
    config: Arc<Config>,
    files: Registrations,
    /// By a live Consul; `None`: none is asked.
    live: Option<Arc<Picture>>,
    version: u64,
}

/// A zone, and how new what it was made of is.
#[derive(Debug)]
pub(crate) struct NewZone {
    /// Grows with each change of what it is made of.
    pub(super) version: u64,
    pub(crate) zone: Zone,
}

impl Catalogs {
    /// Nothing yet. Where a live Consul is to be asked, nothing is known until it tells.
    pub(crate) fn new(config: Config) -> Self {
        let settings = watch::channel(settings_of(&config)).0;
        let live = config.http.is_some().then(|| unknown(&config));
        let parts = Parts { config: Arc::new(config), files: Registrations::default(), live, version: 0 };
        Self { parts: Mutex::new(parts), settings }
    }

    pub(crate) fn config(&self) -> Arc<Config> {
        self.lock().config.clone()
    }

    /// Another object `"consul"` from now on. What was told stays; a live Consul that is asked
    /// no more has told nothing.
    pub(crate) fn set_config(&self, config: Config) {
        let settings = settings_of(&config);
        self.change(|parts| {
            parts.live = settings.is_some().then(|| parts.live.take().unwrap_or_else(|| unknown(&config)));
            parts.config = Arc::new(config);
        });
        self.settings.send_if_modified(|in_force| {
            let differs = *in_force != settings;
            *in_force = settings;
            differs
        });
    }

    /// How a live Consul is asked; changes as that does.
    pub(super) fn settings(&self) -> watch::Receiver<Option<Settings>> {
        self.settings.subscribe()
    }

    /// The files tell this.
    pub(crate) fn set_files(&self, files: Registrations) {
        self.change(|parts| parts.files = files);
    }

    /// A live Consul tells this.
    pub(crate) fn set_live(&self, live: Arc<Picture>) {
        self.change(|parts| {
            // One that is asked no more may have told this a moment ago.
            if parts.config.http.is_some() {
                parts.live = Some(live);
            }
        });
    }

    /// All of it as a zone. Takes a tenth of a second for 50,000 instances.
    pub(crate) fn zone(&self) -> NewZone {
        let (version, mut config, mut registrations, live) = {
            let Parts { config, files, live, version } = &*self.lock();
            (*version, (**config).clone(), files.clone(), live.clone())
        };
        if let Some(live) = live {
            let Picture { registrations: told, datacenter, node_name } = &*live;
            if let (Some(datacenter), true) = (datacenter, config.datacenter_is_default) {
                config.datacenter.clone_from(datacenter);
            }
            if config.node_name.is_empty() {
                config.node_name.clone_from(node_name);
            }
            let Registrations {
                nodes,
                instances,
                queries,
                virtual_addresses,
                gateways,
                datacenters,
                distances,
                pending,
            } = told.clone();
            registrations.nodes.extend(nodes);
            registrations.instances.extend(instances);
            registrations.queries.extend(queries);
            registrations.virtual_addresses.extend(virtual_addresses);
            registrations.gateways.extend(gateways);
            registrations.datacenters.extend(datacenters);
            registrations.distances.extend(distances);
            registrations.pending = pending;
        }
        let catalog = Catalog::build(registrations, &config, config.visibility.clone());
        NewZone { version, zone: Zone { config, catalog } }
    }

    /// Changes what was told.
    fn change(&self, change: impl FnOnce(&mut Parts)) {
        let mut parts = self.lock();
        change(&mut parts);
        parts.version += 1;
    }

    /// What was told last. A panic in between leaves what was told before.
    fn lock(&self) -> MutexGuard<'_, Parts> {
        self.parts.lock()
    }
}

/// How the live Consul of an object is asked; `None`: none is.
fn settings_of(config: &Config) -> Option<Settings> {
    Some(Settings {
        api: config.http.clone()?,
        token_file: config.token_file.clone(),
        datacenter: (!config.datacenter_is_default).then(|| config.datacenter.clone()),
        allow_stale: config.dns.allow_stale,
        max_stale: config.dns.max_stale,
        stale_after: config.http.as_ref()?.stale_after,
    })
}

/// What is known before a live Consul has told anything.
fn unknown(config: &Config) -> Arc<Picture> {
    let mut unknown = Picture::default();
    unknown.registrations.pending.datacenters.insert(config.datacenter.clone());
    Arc::new(unknown)
}
