//! The sources of wanted records: documents, stored resources, fleet and health.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

use super::{
    LaunchOptions,
    launch::{fill_targets, mark_rivals},
};
use crate::{
    config::Config,
    documents::{Folder, Scan},
    fleet::{Fleet, HealthHistory, ResolveError, SavedHealth, ServerClient},
    publication::{Publication, fleet_names, publish},
    store::write_json,
};

const FLEET_INTERVAL: Duration = Duration::from_secs(5);

/// Maximum interval between scans of all files, in case an event was lost.
const SCAN_INTERVAL: Duration = Duration::from_secs(30);

/// The sources of one publisher.
#[derive(Debug)]
pub struct Sources {
    folder: Folder,
    fleet: Option<FollowedFleet>,
    options: LaunchOptions,
}

#[derive(Debug)]
struct FollowedFleet {
    fleet: Fleet,
    /// File of the health saved for the next process; `None` in a command.
    health_file: Option<PathBuf>,
    saved: SavedHealth,
    /// The last problem logged.
    problem: Option<String>,
}

/// Reads documents and fleet once, for a command.
pub async fn read_once(config: &Config) -> anyhow::Result<SourceState> {
    let mut sources = Sources::new(config)?;
    if let Some(fleet) = &mut sources.fleet {
        fleet.health_file = None;
    }
    Ok(sources.read().await)
}

/// State of all sources.
#[derive(Debug)]
pub struct SourceState {
    /// Documents of the folder.
    pub scan: Scan,
    /// Wanted records of every provider.
    pub publication: Publication,
    /// Time at which the sources may change without an event.
    pub next: Instant,
    /// Failure to ask the server; its last answers are in use.
    pub fleet_problem: Option<String>,
}

impl Sources {
    /// Prepares the sources that a configuration names.
    ///
    /// An unreadable configuration of the server is an error, because fleet names have no addresses
    /// without it.
    pub fn new(config: &Config) -> anyhow::Result<Self> {
        let fleet = config.server.as_deref().map(|path| FollowedFleet::new(path, config)).transpose()?;
        let options = LaunchOptions::of(config)?;
        let mut paths = config.documents.clone();
        // Without it the API was never used.
        paths.extend(config.store.is_dir().then(|| config.store.clone()));
        Ok(Self { folder: Folder::new(paths), fleet, options })
    }

    /// Reads all changed sources.
    pub async fn read(&mut self) -> SourceState {
        let mut state = self.read_all().await;
        fill_targets(&mut state.publication, &self.options);
        mark_rivals(&mut state.publication, &self.options);
        state
    }

    async fn read_all(&mut self) -> SourceState {
        let scan = tokio::task::block_in_place(|| self.folder.scan());
        let now = Instant::now();
        let mut next = now + SCAN_INTERVAL;
        let names = fleet_names(&scan.documents);
        let Some(followed) = &mut self.fleet else {
            let publication = publish(&scan, &|_| Err(ResolveError::NoServer));
            return SourceState { scan, publication, next, fleet_problem: None };
        };
        let mut problem = None;
        if !names.is_empty() {
            let asked = followed.fleet.ask(&names).await;
            problem =
                asked.err().map(|error| format!("the fleet's addresses and health are unknown: {error}"));
            next = next.min(now + FLEET_INTERVAL).min(followed.fleet.next_change(now).unwrap_or(next));
            followed.save();
        }
        followed.log(problem.as_deref());
        let publication = publish(&scan, &|name| followed.fleet.records(name, problem.as_deref()));
        SourceState { scan, publication, next, fleet_problem: problem }
    }
}

impl FollowedFleet {
    fn new(path: &Path, config: &Config) -> anyhow::Result<Self> {
        let (server, _) = ServerClient::of_server(path)?;
        let health_file = config.store.with_file_name("health.json");
        let saved = fs::read(&health_file).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let saved: SavedHealth = saved.unwrap_or_default();
        let history = HealthHistory::restore(&saved, Instant::now(), SystemTime::now());
        let fleet = Fleet::new(server, history);
        Ok(Self { fleet, health_file: Some(health_file), saved, problem: None })
    }

    /// Saves the time since which instances have been unhealthy, so that a restart does not restart
    /// their hold time.
    fn save(&mut self) {
        let Some(file) = &self.health_file else { return };
        let current = self.fleet.health();
        if current.is_like(&self.saved) {
            return;
        }
        match write_json(file, &current) {
            Ok(()) => self.saved = current,
            Err(error) => tracing::warn!(
                file = %file.display(), %error,
                "cannot save health state: after a restart unhealthy addresses are published again for their hold time"
            ),
        }
    }

    fn log(&mut self, problem: Option<&str>) {
        if self.problem.as_deref() != problem {
            match problem {
                Some(problem) => tracing::warn!("{problem}; the last known state stays in use"),
                None => tracing::info!("addresses and health of the fleet are available again"),
            }
            self.problem = problem.map(str::to_owned);
        }
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
