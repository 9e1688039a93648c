//! Reads the object `"consul"`, and merges the catalogs of the definition files and of a live Consul.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::sync::watch;

use dns_common::entry::{AnswerPolicy, MAX_V4, MAX_V6};
use dns_consul::{
    Asker, Publishable, Zone,
    catalog::{Catalog, Place, registrations::Registrations},
    config::Config,
    source::{CatalogView, LiveSettings},
};
use dns_core::{
    config::{ConfigError, ParsedFiles},
    name::Name,
    wire::{Query, TYPE_A, TYPE_AAAA},
};
use dns_kit::files::bounded;

/// All registrations, from both sources.
#[derive(Debug)]
pub(crate) struct Catalogs {
    /// The latest state of each source.
    parts: Mutex<Parts>,
    /// The catalog of the last zone, on which the next one is based.
    built: Mutex<Option<Built>>,
    /// Settings for a live Consul; `None` if none is configured.
    settings: watch::Sender<Option<LiveSettings>>,
}

/// A catalog with the inputs from which it was built, except for a live Consul.
#[derive(Debug)]
struct Built {
    source: Arc<Config>,
    files: Arc<Registrations>,
    datacenter: String,
    catalog: Catalog,
}

#[derive(Clone, Debug)]
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
        let settings = watch::channel(LiveSettings::of(&config)).0;
        let live = unknown_if_live(&config);
        let parts = Parts {
            config: Arc::new(config),
            files: Arc::default(),
            live,
            version: 0,
        };
        Self {
            parts: Mutex::new(parts),
            built: Mutex::new(None),
            settings,
        }
    }

    pub(crate) fn config(&self) -> Arc<Config> {
        self.parts.lock().config.clone()
    }

    /// Installs another object `"consul"`. The catalog of the files stays; the catalog of a live
    /// Consul that is no longer configured is dropped.
    pub(crate) fn set_config(&self, config: Config) {
        let settings = LiveSettings::of(&config);
        self.change(|parts| {
            let unknown = unknown_if_live(&config);
            // Its last catalog is better than none until the new settings have brought one.
            parts.live = unknown.map(|unknown| parts.live.take().unwrap_or(unknown));
            parts.config = Arc::new(config);
        });
        // Every change restarts the live source, which then reads the whole catalog again.
        self.settings.send_if_modified(|in_force| {
            let differs = *in_force != settings;
            *in_force = settings;
            differs
        });
    }

    #[cfg(feature = "live-consul")]
    pub(super) fn settings(&self) -> watch::Receiver<Option<LiveSettings>> {
        self.settings.subscribe()
    }

    pub(crate) fn set_files(&self, files: Registrations) {
        self.change(|parts| parts.files = Arc::new(files));
    }

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
        // Held until the end: both sources may ask for a zone at once, and the second one builds on
        // the first.
        let mut built = self.built.lock();
        // Copied, since building may take long and definitions must not wait.
        let Parts {
            config: source,
            files,
            live,
            version,
        } = self.parts.lock().clone();
        let mut config = (*source).clone();
        if let Some(live) = &live {
            let CatalogView {
                live: _,
                datacenter,
                node_name,
            } = &**live;
            // The agent knows its datacenter better than Consul's default `dc1`.
            if config.datacenter_is_default
                && let Some(datacenter) = datacenter
            {
                config.datacenter.clone_from(datacenter);
            }
            if config.node_name.is_empty() {
                config.node_name.clone_from(node_name);
            }
        }
        let reusable = built.take().filter(|built| {
            Arc::ptr_eq(&built.source, &source)
                && Arc::ptr_eq(&built.files, &files)
                // The index is made for one datacenter: names without one mean it.
                && built.datacenter == config.datacenter
        });
        let mut catalog = match reusable {
            Some(built) => built.catalog,
            None => Catalog::build((*files).clone(), &config, config.visibility.clone()),
        };
        catalog.update(live.as_ref().map(|live| live.live.clone()));
        *built = Some(Built {
            source,
            files,
            datacenter: config.datacenter.clone(),
            catalog: catalog.clone(),
        });
        NewZone {
            version,
            zone: Zone { config, catalog },
        }
    }

    fn change(&self, change: impl FnOnce(&mut Parts)) {
        let mut parts = self.parts.lock();
        change(&mut parts);
        parts.version += 1;
    }
}

/// Returns the view of a live Consul that has not answered yet; `None` if none is configured.
fn unknown_if_live(config: &Config) -> Option<Arc<CatalogView>> {
    config
        .http
        .is_some()
        .then(|| Arc::new(CatalogView::unknown(config)))
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
            ParsedFiles {
                valid: None,
                errors: vec![error],
            }
        }
    }
}

/// Rejects a live Consul in a build without the feature `live-consul`.
fn without_live(file: &str, mut loaded: Loaded) -> Loaded {
    let live = loaded
        .valid
        .as_ref()
        .is_some_and(|(config, _)| config.http.is_some());
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

//----------- Names for interfaces ----------------------------------------------

/// Consul's names at one moment.
#[derive(Clone)]
pub(crate) struct Published {
    pub(super) zone: Arc<Zone>,
    /// Whether replies set RA, because there are recursors.
    pub(super) recursion: bool,
    /// Seed for the choice of addresses if there are more than an entry holds.
    pub(super) seed: u64,
}

impl Published {
    /// Returns whether both have the same names with the same answers.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        let Self {
            zone,
            recursion,
            seed,
        } = self;
        Arc::ptr_eq(zone, &other.zone) && *recursion == other.recursion && *seed == other.seed
    }

    /// Returns the addresses of a name and the policy for sending them; `None` if interfaces must
    /// not answer it.
    pub(crate) fn look_up(
        &self,
        name: &Name,
    ) -> Option<(Vec<Ipv4Addr>, Vec<Ipv6Addr>, AnswerPolicy)> {
        let Publishable {
            mut v4,
            mut v6,
            ttl,
            most,
            plain_v4,
            plain_v6,
            truncates,
        } = self.zone.publishable(name)?;
        let policy = AnswerPolicy::new(ttl, most, [plain_v4, plain_v6], truncates, self.recursion);
        self.sample(&mut v4, MAX_V4);
        self.sample(&mut v6, MAX_V6);
        Some((v4, v6, policy))
    }

    /// Returns the reply to a query unless interfaces answer it from its addresses, or it depends on more
    /// than the query: on the client, on host names outside the catalog, or on data not read yet.
    pub(crate) fn reply(&self, query: &Query<'_>, serial: u32, seed: u64) -> Option<Vec<u8>> {
        let Self {
            zone,
            recursion,
            seed: _,
        } = self;
        if zone.config.dns.disable_compression || zone.lacks(query).is_some() {
            return None;
        }
        // `is_for_everyone` below excludes answers that depend on the client.
        let client = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let asker = Asker {
            client,
            recursion: *recursion,
            serial,
        };
        let answer = zone.answer(query, &asker, &mut fastrand::Rng::with_seed(seed))?;
        let is_address_list =
            matches!(query.question.qtype, TYPE_A | TYPE_AAAA) && answer.is_only_addresses();
        let waits_for_hosts = *recursion && !answer.hosts().is_empty();
        if is_address_list || !answer.is_for_everyone() || waits_for_hosts {
            return None;
        }
        Some(answer.finish(query, &zone.config.dns, &Default::default()))
    }

    /// Returns the name of a node or service at the address of a reverse query.
    pub(crate) fn reverse_reply(&self, query: &Query<'_>) -> Option<Vec<u8>> {
        let Self {
            zone,
            recursion,
            seed: _,
        } = self;
        if zone.config.dns.disable_compression {
            return None;
        }
        let asker = Asker {
            client: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            recursion: *recursion,
            serial: 0,
        };
        let answer = zone.reverse(query, &asker)?;
        Some(answer.finish(query, &zone.config.dns, &Default::default()))
    }

    /// Selects as many addresses as an entry holds. Each server makes a different choice, but
    /// always the same one for the same list, so that an entry changes only with the list.
    fn sample<T: Ord>(&self, addresses: &mut Vec<T>, most: usize) {
        if addresses.len() > most {
            // The choice must depend on the addresses alone, not on the order in which they
            // arrived.
            addresses.sort_unstable();
            fastrand::Rng::with_seed(self.seed).shuffle(addresses);
            addresses.truncate(most);
        }
    }
}

/// Maximum number of names kept, the same as the default limit of published names.
const MAX_NAMES: usize = 65_536;

/// A name answered within this time is in use.
const IN_USE: Duration = Duration::from_secs(60);

/// Place and service in lower case, by name and by type; type 0 stands for the name's addresses. Userspace does not see these queries, but the live source must
/// know which services are in use.
#[derive(Debug, Default)]
pub(super) struct Used(Mutex<HashMap<(Name, u16), (Place, String)>>);

/// The type under which [`Used`] keeps the addresses of a name.
pub(super) const ADDRESSES: u16 = 0;

impl Used {
    /// Records the service of a name that is passed to the publisher, with the type of the question or
    /// [`ADDRESSES`].
    pub(super) fn note(&self, name: &Name, qtype: u16, service: (Place, String)) {
        let mut names = self.0.lock();
        let key = (name.clone(), qtype);
        if names.len() < MAX_NAMES || names.contains_key(&key) {
            names.insert(key, service);
        }
    }

    /// Returns the services of names that an interface answered recently. `age` returns the time
    /// since the last answer for a name and type; names without one are dropped when room is scarce.
    pub(super) fn recent(
        &self,
        age: impl Fn(&Name, u16) -> Option<Duration>,
    ) -> Vec<(Place, String)> {
        let mut names = self.0.lock();
        // While there is room, an unused name stays: asked again, it need not be recorded again.
        let crowded = names.len() >= MAX_NAMES / 2;
        let mut services = Vec::new();
        names.retain(|(name, qtype), service| match age(name, *qtype) {
            Some(age) if age < IN_USE => {
                services.push(service.clone());
                true
            }
            _ => !crowded,
        });
        services.sort_unstable();
        services.dedup();
        services
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recently_answered_services_are_reported() {
        let used = Used::default();
        let key = |service: &str| (Place::Datacenter("dc1".into()), service.to_owned());
        for name in [
            "web.service.consul",
            "v1.web.service.consul",
            "db.service.consul",
            "old.service.consul",
        ] {
            let name = Name::from_text(name).expect("a name");
            let service = if name.to_string().contains("web") {
                "web"
            } else {
                "other"
            };
            used.note(&name, ADDRESSES, key(service));
        }
        assert_eq!(
            used.recent(|name: &Name, _qtype: u16| match name.to_string() {
                text if text.contains("web") => Some(Duration::from_secs(5)),
                text if text.starts_with("db") => Some(Duration::from_secs(61)),
                _ => None,
            }),
            [key("web")]
        );
        assert_eq!(used.0.lock().len(), 4);
    }
}
