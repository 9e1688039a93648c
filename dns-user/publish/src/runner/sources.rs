//! The sources of wanted records: documents, stored resources, fleet and health.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

use dns_core::config::Config as ServerConfig;

use super::{
    LaunchOptions,
    launch::{fill_targets, mark_rivals},
};
use crate::{
    config::Config,
    documents::{Folder, Scan},
    fleet::{FleetFiles, HealthHistory, ResolveError, SavedHealth, ServerClient, resolve},
    publication::{Publication, fleet_names, publish},
    store::write_json,
};

/// Interval of health queries.
const HEALTH_INTERVAL: Duration = Duration::from_secs(5);

/// Maximum interval between scans of all files, in case an event was lost.
const SCAN_INTERVAL: Duration = Duration::from_secs(30);

/// The sources of one publisher.
#[derive(Debug)]
pub struct Sources {
    folder: Folder,
    fleet: Option<Fleet>,
    options: LaunchOptions,
    /// Whether the health state is saved for the next process.
    saves_health: bool,
}

#[derive(Debug)]
struct Fleet {
    files: FleetFiles,
    /// `None` if the server has no control socket.
    server: Option<ServerClient>,
    history: HealthHistory,
    health_file: PathBuf,
    saved: SavedHealth,
    /// The last problem logged.
    problem: Option<String>,
}

/// Reads documents and fleet once, for a command.
pub async fn read_once(config: &Config) -> anyhow::Result<State> {
    let mut sources = Sources { saves_health: false, ..Sources::new(config)? };
    Ok(sources.read().await)
}

/// State of all sources.
#[derive(Debug)]
pub struct State {
    /// Documents of the folder.
    pub scan: Scan,
    /// Wanted records of every provider.
    pub publication: Publication,
    /// Time at which the sources may change without an event.
    pub next: Instant,
    /// Failure to read the fleet's files or health; the last known state is in use.
    pub fleet_problem: Option<String>,
}

impl Sources {
    /// Prepares the sources that a configuration names.
    ///
    /// An unreadable configuration of the server is an error, because fleet names cannot be
    /// resolved without it.
    pub fn new(config: &Config) -> anyhow::Result<Self> {
        let fleet = config.server.as_deref().map(|path| Fleet::new(path, config)).transpose()?;
        let options = LaunchOptions::of(config)?;
        let mut paths = config.documents.clone();
        // Without it the API was never used.
        paths.extend(config.store.is_dir().then(|| config.store.clone()));
        Ok(Self { folder: Folder::new(paths), fleet, options, saves_health: true })
    }

    /// Returns the files of the fleet to watch.
    pub fn fleet_files(&self) -> Vec<PathBuf> {
        self.fleet.as_ref().map(|fleet| fleet.files.files()).unwrap_or_default()
    }

    /// Reads all changed sources.
    pub async fn read(&mut self) -> State {
        let mut state = self.read_all().await;
        fill_targets(&mut state.publication, &self.options);
        mark_rivals(&mut state.publication, &self.options);
        state
    }

    async fn read_all(&mut self) -> State {
        let scan = tokio::task::block_in_place(|| self.folder.scan());
        let now = Instant::now();
        let mut next = now + SCAN_INTERVAL;
        let names = fleet_names(&scan.documents);
        let Some(fleet) = &mut self.fleet else {
            let publication = publish(&scan, &|_| Err(ResolveError::NoServer));
            return State { scan, publication, next, fleet_problem: None };
        };
        let mut problem = None;
        let mut snapshot = None;
        if !names.is_empty() {
            next = next.min(now + HEALTH_INTERVAL);
            let (found, unreadable) = tokio::task::block_in_place(|| fleet.files.refresh());
            snapshot = found;
            problem = unreadable.map(|error| error.to_string());
            fleet.history.keep(&names);
            if let Some(server) = &mut fleet.server {
                for name in &names {
                    match server.unhealthy_addresses(name).await {
                        Ok(unhealthy) => fleet.history.observe(name, &unhealthy, now),
                        Err(error) => {
                            problem = Some(format!("the fleet's health is unknown: {error}"));
                            break;
                        }
                    }
                }
            }
            if self.saves_health {
                fleet.save(now);
            }
        }
        fleet.log(problem.as_deref());
        let changes = std::cell::Cell::new(next);
        let publication = publish(&scan, &|name| {
            let snapshot = snapshot.as_deref().ok_or_else(|| ResolveError::NoRecords(problem.clone()))?;
            let resolved = resolve(name, snapshot, &fleet.history, now)?;
            changes.set(resolved.next_change.unwrap_or(next).min(changes.get()));
            Ok(resolved.records)
        });
        State { scan, publication, next: changes.get(), fleet_problem: problem }
    }
}

impl Fleet {
    fn new(path: &Path, config: &Config) -> anyhow::Result<Self> {
        let (files, ServerConfig { listen, control, .. }) = FleetFiles::of_server(path)?;
        let dns = SocketAddr::new(
            if listen.ip().is_unspecified() { loopback(listen) } else { listen.ip() },
            listen.port(),
        );
        let server = control.map(|control| ServerClient::new(control.socket, Some(dns)));
        if server.is_none() {
            tracing::warn!(
                file = %path.display(),
                "the server has no control socket: addresses are published regardless of health; set \"control\""
            );
        }
        let health_file = config.store.with_file_name("health.json");
        let saved = fs::read(&health_file).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let saved: SavedHealth = saved.unwrap_or_default();
        Ok(Self {
            files,
            server,
            history: HealthHistory::restore(&saved, Instant::now(), SystemTime::now()),
            health_file,
            saved,
            problem: None,
        })
    }

    /// Saves the time since which instances have been unhealthy, so that a restart does not restart
    /// their hold time.
    fn save(&mut self, now: Instant) {
        let current = self.history.save(now, SystemTime::now());
        if current.is_like(&self.saved) {
            return;
        }
        match write_json(&self.health_file, &current) {
            Ok(()) => self.saved = current,
            Err(error) => tracing::warn!(
                file = %self.health_file.display(), %error,
                "cannot save health state: after a restart unhealthy addresses are published again for their hold time"
            ),
        }
    }

    fn log(&mut self, problem: Option<&str>) {
        if self.problem.as_deref() != problem {
            match problem {
                Some(problem) => tracing::warn!("{problem}; the last known state stays in use"),
                None => tracing::info!("records and health of the fleet are available again"),
            }
            self.problem = problem.map(str::to_owned);
        }
    }
}

fn loopback(listen: SocketAddr) -> std::net::IpAddr {
    match listen {
        SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
        SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
    }
}

/// Returns the problems by the document that contains their line.
pub(super) fn problems_by_document(
    scan: &Scan,
) -> (BTreeMap<crate::documents::DocumentId, Vec<String>>, Vec<String>) {
    let mut of_documents: BTreeMap<_, Vec<String>> = BTreeMap::new();
    let mut of_files = Vec::new();
    for file in &scan.files {
        for problem in &file.problems {
            // Documents are sorted by line.
            let document = file.documents.iter().rev().find(|document| document.line <= problem.line);
            let is_inside = document.filter(|document| problem.line <= document.last_line);
            match is_inside {
                Some(document) => {
                    of_documents.entry(document.id.clone()).or_default().push(problem.to_string())
                }
                None => of_files.push(problem.to_string()),
            }
        }
    }
    (of_documents, of_files)
}
