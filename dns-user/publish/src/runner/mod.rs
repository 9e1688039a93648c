//! The main loop: reads the sources after every change, and reconciles each provider in its own
//! task, so that a slow or failing provider delays no other.

mod launch;
mod report;
mod sources;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use anyhow::Context as _;
use dns_kit::{
    http_server::{Listener, Server},
    tls::RotatingTls,
};
use parking_lot::Mutex;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::{Notify, watch},
    task::JoinHandle,
};

use self::report::shortened;
pub use self::{
    launch::{LaunchOptions, launch, options_problems},
    report::{ProviderState, statuses},
    sources::{SourceState, Sources, read_once},
};
use crate::{
    api::{self, Access, ApiState, Confirmation, Confirmed},
    config::{ApiConfig, Config, WebhookConfig},
    documents::{DocumentId, DocumentStatus, Scan, StatusFile, Watch},
    engine::{Engine, Refusal, Report},
    fleet::{AliasWriter, ServerClient},
    metrics::Metrics,
    plan::Reason,
    publication::{Publication, Target},
    record::Record,
    store::Store,
};

const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(20);

/// Time within which events are combined.
const DEBOUNCE: Duration = Duration::from_millis(200);

/// Publishes until SIGTERM or SIGINT.
pub async fn run(config: Config) -> anyhow::Result<()> {
    let options = LaunchOptions::of(&config)?;
    let store = Store::open(&config.store)?;
    let mut sources = Sources::new(&config)?;
    let api_state = Arc::new(ApiState::new(store, Metrics::new()?));
    listen(&config, &api_state).await?;
    let shared = Arc::new(Shared { api_state: api_state.clone(), results: RoundResults::default(), options });
    let documents = [&config.documents[..], std::slice::from_ref(&config.store)].concat();
    let mut watch = Watch::start(&documents);
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let mut workers = Workers::default();
    let mut status = StatusWriter::default();
    let mut is_started = false;
    loop {
        let state = sources.read().await;
        if !is_started {
            is_started = true;
            tracing::info!(
                documents = state.scan.documents.len(),
                providers = state.publication.targets.len(),
                control = %config.socket.display(),
                "started"
            );
            for problem in options_problems(&config, &state.publication) {
                tracing::warn!("{problem}");
            }
        }
        expose(&api_state, &state);
        api_state.set_scan(state.scan.clone());
        workers.update(&shared, &state.publication);
        status.write(&shared, &state);
        // Succeeds only if systemd started the process.
        let _ = sd_notify::notify(false, &[sd_notify::NotifyState::Ready]);
        loop {
            tokio::select! {
                () = watch.changed() => {}
                () = api_state.changed() => {}
                _ = hangup.recv() => {}
                () = tokio::time::sleep_until(state.next.into()) => {}
                () = shared.results.changed.notified() => {
                    status.write(&shared, &state);
                    continue;
                }
                _ = terminate.recv() => return workers.end().await,
                _ = interrupt.recv() => return workers.end().await,
            }
            break;
        }
        if Instant::now() < state.next {
            tokio::time::sleep(DEBOUNCE).await;
        }
    }
}

/// Opens the control socket, the API and the metrics port.
async fn listen(config: &Config, api_state: &Arc<ApiState>) -> anyhow::Result<()> {
    let routes = api::routes(api_state.clone());
    let socket = api::bind_control(&config.socket, config.group.as_deref())
        .with_context(|| format!("{}: cannot open the control socket", config.socket.display()))?;
    tokio::spawn(api::serve_control(socket, routes.clone()));
    if let Some(ApiConfig { address, tls, clients }) = &config.api {
        let listener =
            TcpListener::bind(address).await.with_context(|| format!("cannot open the API at {address}"))?;
        let tls = RotatingTls::load("publish-api", "bosh-dns-publish", tls)?;
        tokio::spawn(tls.clone().watch(|_| {}));
        let access = clients.clone().map_or(Access::All, |names| Access::Names(names.into()));
        tokio::spawn(api::serve_tls(listener, tls, access, routes));
    }
    if let Some(webhook) = &config.webhook {
        let address = webhook.address;
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("cannot serve external-dns's webhook protocol at {address}"))?;
        let (writer, server) = alias_writer(config, webhook)?;
        let routes = api::webhook_routes(writer, server);
        let server = Server::new("the webhook", Listener::Plain(listener));
        tokio::spawn(server.run(move |_| routes.clone(), std::future::pending()));
    }
    if let Some(address) = config.metrics {
        let listener =
            TcpListener::bind(address).await.with_context(|| format!("cannot serve metrics at {address}"))?;
        let routes = api::metrics_routes(api_state.clone());
        let server = Server::new("the metrics port", Listener::Plain(listener));
        tokio::spawn(server.run(move |_| routes.clone(), std::future::pending()));
    }
    Ok(())
}

/// Prepares the writer of the fleet names that external-dns sends.
pub(crate) fn alias_writer(
    config: &Config,
    webhook: &WebhookConfig,
) -> anyhow::Result<(AliasWriter, ServerClient)> {
    // The configuration was refused without a server.
    let server = config.server.as_deref().unwrap_or(Path::new("config.json"));
    AliasWriter::new(webhook, server, config.store.with_file_name("webhook.json"))
}

#[derive(Default)]
struct Workers(BTreeMap<String, Worker>);

struct Worker {
    targets: watch::Sender<Arc<Target>>,
    task: JoinHandle<()>,
}

impl Workers {
    fn update(&mut self, shared: &Arc<Shared>, publication: &Publication) {
        let gone: Vec<String> =
            self.0.keys().filter(|name| !publication.targets.contains_key(*name)).cloned().collect();
        for name in gone {
            // Its current round completes; published records stay.
            drop(self.0.remove(&name));
            shared.results.states.lock().remove(&name);
            shared.api_state.metrics.forget(&name);
            tracing::info!(
                provider = name,
                "provider no longer used: its DNS Update Record was removed; published records stay"
            );
        }
        let time_limit = |target: &Target| {
            let interval = target.record.parameters.duration("interval").unwrap_or_default();
            interval * 3 + Duration::from_secs(60)
        };
        let expected = publication.targets.iter().map(|(name, target)| (name.clone(), time_limit(target)));
        shared.api_state.expect(expected);
        for (name, target) in &publication.targets {
            match self.0.get(name) {
                Some(worker) => {
                    worker.targets.send_if_modified(|current| {
                        let is_new = !current.wants_the_same(target);
                        if is_new {
                            *current = target.clone();
                        }
                        is_new
                    });
                }
                None => {
                    let (targets, receiver) = watch::channel(target.clone());
                    let task = tokio::spawn(work(shared.clone(), name.clone(), receiver));
                    self.0.insert(name.clone(), Worker { targets, task });
                }
            }
        }
    }

    /// Waits until rounds in progress have ended.
    async fn end(self) -> anyhow::Result<()> {
        let tasks: Vec<JoinHandle<()>> =
            self.0.into_values().map(|Worker { targets: _, task }| task).collect();
        let all = futures_util::future::join_all(tasks);
        if tokio::time::timeout(SHUTDOWN_TIMEOUT, all).await.is_err() {
            tracing::warn!("a round did not finish in time; the next start continues it");
        }
        Ok(())
    }
}

/// Writes status files, and keeps the last status of every document.
#[derive(Default)]
struct StatusWriter {
    known: BTreeMap<DocumentId, DocumentStatus>,
    unwritable: BTreeMap<PathBuf, String>,
    is_restored: bool,
}

impl StatusWriter {
    fn write(&mut self, shared: &Shared, state: &SourceState) {
        if !self.is_restored {
            let files = state.scan.files.iter().filter_map(|file| StatusFile::read(&file.path));
            self.known =
                files.flat_map(|file| file.documents).map(|status| (status.id.clone(), status)).collect();
            self.is_restored = true;
        }
        let states = shared.results.states.lock().clone();
        let mut overview = statuses(&state.scan, &state.publication, &states, &self.known);
        self.known = overview.documents.iter().map(|status| (status.id.clone(), status.clone())).collect();
        overview.problems.extend(state.fleet_problem.clone());
        shared.api_state.set_overview(overview);
        self.write_files(&state.scan, shared.api_state.store.folder());
    }

    /// Writes the status beside the operator's documents; the API shows the status of its resources.
    fn write_files(&mut self, scan: &Scan, store: &Path) {
        let (_, of_files) = sources::problems_by_document(scan);
        let is_operators = |path: &Path| path.is_file() && !path.starts_with(store);
        for file in scan.files.iter().filter(|file| is_operators(&file.path)) {
            let documents =
                file.documents.iter().filter_map(|document| self.known.get(&document.id).cloned());
            let prefix = format!("{}:", file.path.display());
            let status = StatusFile {
                documents: documents.chain(missing(file, scan, &self.known)).collect(),
                problems: of_files.iter().filter(|problem| problem.starts_with(&prefix)).cloned().collect(),
            };
            match status.write(&file.path) {
                Ok(()) => drop(self.unwritable.remove(&file.path)),
                Err(error) => {
                    let error = error.to_string();
                    if self.unwritable.get(&file.path) != Some(&error) {
                        tracing::warn!(
                            file = %file.path.display(), error,
                            "cannot write the status beside the documents; see `bosh-dns-publish status`"
                        );
                        self.unwritable.insert(file.path.clone(), error);
                    }
                }
            }
        }
        let folders = scan.files.iter().filter_map(|file| file.path.parent());
        let folders: BTreeSet<&Path> = folders.collect();
        folders.into_iter().for_each(StatusFile::sweep);
    }
}

/// Returns the unreadable documents of a file, which a restart must still know.
fn missing(
    file: &crate::documents::FileState,
    scan: &Scan,
    known: &BTreeMap<DocumentId, DocumentStatus>,
) -> Vec<DocumentStatus> {
    if file.problems.is_empty() {
        return Vec::new();
    }
    let Some(before) = StatusFile::read(&file.path) else { return Vec::new() };
    let is_missing = |id: &DocumentId| {
        file.documents.iter().all(|document| document.id != *id) && scan.held.contains(&id.resource())
    };
    let missing = before.documents.into_iter().filter(|status| is_missing(&status.id));
    missing.map(|status| known.get(&status.id).cloned().unwrap_or(status)).collect()
}

/// Exposes the sources in metrics.
fn expose(api_state: &ApiState, state: &SourceState) {
    let metrics = &api_state.metrics;
    let records = state.publication.targets.values().flat_map(|target| &target.desired.records);
    let counts = Metrics::count_types(records);
    metrics.source_endpoints.set(i64::try_from(counts.values().sum::<usize>()).unwrap_or(i64::MAX));
    Metrics::set_types(&metrics.source_records, None, &counts);
    let problems = state.scan.problems().count();
    metrics.invalid_endpoints.set(i64::try_from(problems).unwrap_or(i64::MAX));
    if problems > 0 {
        metrics.source_errors.inc();
    }
    let duplicates: usize = state
        .publication
        .targets
        .values()
        .map(|target| {
            let keys: BTreeSet<_> = target.desired.records.iter().map(Record::key).collect();
            target.desired.records.len() - keys.len()
        })
        .sum();
    metrics.deduplicated_endpoints.set(i64::try_from(duplicates).unwrap_or(i64::MAX));
}

/// Minimum pause between two rounds.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);

/// Results of all providers, and a signal of changes.
#[derive(Debug, Default)]
struct RoundResults {
    states: Mutex<BTreeMap<String, ProviderState>>,
    changed: Notify,
}

struct Shared {
    api_state: Arc<ApiState>,
    results: RoundResults,
    options: LaunchOptions,
}

/// Reconciles until the sender of targets is dropped. A round in progress is completed.
async fn work(shared: Arc<Shared>, name: String, mut targets: watch::Receiver<Arc<Target>>) {
    let mut launched: Option<(Arc<Target>, Engine)> = None;
    let mut confirmations = shared.api_state.receive_confirmations(&name);
    let mut confirmation: Option<Confirmation> = None;
    loop {
        let target = targets.borrow_and_update().clone();
        let begun = Instant::now();
        let is_outdated = |before: &Target| before.record != target.record || before.rival != target.rival;
        if launched.as_ref().is_some_and(|(before, _)| is_outdated(before)) {
            launched = None;
        }
        if launched.is_none() {
            match launch(&target, &shared.options) {
                Ok(engine) => launched = Some((target.clone(), engine)),
                Err(error) => {
                    let problem = error.to_string();
                    let state = ProviderState::failed(&problem, &shared.state(&name));
                    shared.report(&name, state, Some(problem));
                }
            }
        }
        let mut changed = 0;
        if let Some((_, engine)) = &mut launched {
            let confirmed = confirmation.as_ref().map(|confirmation| confirmation.deletions);
            changed = shared.round(&name, engine, &target, confirmed).await;
        }
        if let Some(Confirmation { deletions: _, reply }) = confirmation.take() {
            let problems = shared.state(&name).problems(&target);
            // The client may have gone.
            let _ = reply.send(Confirmed { changed, problems });
        }
        let interval = target.record.parameters.duration("interval").unwrap_or(Duration::from_secs(60));
        // Spreads publishers that started together.
        let pause = interval.max(SHORTEST_PAUSE).mul_f64(0.9 + 0.2 * fastrand::f64());
        tokio::select! {
            changed = targets.changed() => {
                if changed.is_err() {
                    return;
                }
                tokio::time::sleep(SHORTEST_PAUSE.saturating_sub(begun.elapsed())).await;
            }
            received = confirmations.recv() => confirmation = received,
            () = tokio::time::sleep(pause) => {}
        }
    }
}

impl Shared {
    fn state(&self, name: &str) -> ProviderState {
        self.results.states.lock().get(name).cloned().unwrap_or_default()
    }

    /// Runs one round. Returns the number of changed names.
    async fn round(
        &self,
        name: &str,
        engine: &mut Engine,
        target: &Target,
        confirmed: Option<usize>,
    ) -> usize {
        let metrics = &self.api_state.metrics;
        let is_dry = target.record.parameters.is_set("dry-run");
        let result = match is_dry {
            false => engine.reconcile(&target.desired, confirmed, &|_| {}).await,
            true => dry_round(name, engine, target).await,
        };
        self.options.save_deletions(name, &engine.deletions);
        let labels = &[name];
        metrics.last_reconcile.with_label_values(labels).set(seconds_now());
        // Without a zero the first failure would be no increase.
        metrics.registry_errors.with_label_values(labels);
        let counts = Metrics::count_types(&target.desired.records);
        match result {
            Ok(report) => {
                let state = ProviderState::of_report(&report, &self.state(name));
                self.count(name, &report, &state);
                let problem = match report.is_complete() {
                    true => {
                        metrics.last_sync.with_label_values(labels).set(seconds_now());
                        Metrics::set_types(&metrics.verified_records, Some(name), &counts);
                        None
                    }
                    false => {
                        let of_names = state.names.iter().map(|(_, problem)| problem);
                        Some(state.general.iter().chain(of_names).next().cloned().unwrap_or_default())
                    }
                };
                self.report(name, state, problem);
                report.applied()
            }
            Err(error) => {
                metrics.registry_errors.with_label_values(labels).inc();
                let state = ProviderState::failed(&error, &self.state(name));
                self.report(name, state, Some(error.to_string()));
                0
            }
        }
    }

    fn count(&self, name: &str, report: &Report, state: &ProviderState) {
        let metrics = &self.api_state.metrics;
        let labels = &[name];
        let sum = |count: &dyn Fn(&crate::engine::ZoneReport) -> usize| -> i64 {
            i64::try_from(report.zones.iter().map(count).sum::<usize>()).unwrap_or(i64::MAX)
        };
        // An unavailable zone keeps its last counts.
        let records: usize = state.zones.values().map(|counts| counts.records).sum();
        let gauge = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        metrics.registry_endpoints.with_label_values(labels).set(gauge(records));
        metrics.registry_records.with_label_values(labels).set(gauge(state.owned()));
        if report.zones.iter().any(|zone| zone.failure.is_some()) {
            metrics.registry_errors.with_label_values(labels).inc();
        }
        let is_foreign = |zone: &crate::engine::ZoneReport| {
            zone.notes.iter().filter(|note| matches!(note.reason, Reason::Foreign { .. })).count()
        };
        metrics.skipped.with_label_values(labels).set(sum(&is_foreign));
        let waiting = |zone: &crate::engine::ZoneReport| zone.refusal.as_ref().map_or(0, Refusal::deletions);
        metrics.awaiting_confirmation.with_label_values(labels).set(sum(&waiting));
        if report.applied() == 0 && report.is_complete() {
            metrics.no_op_runs.with_label_values(labels).inc();
        } else if report.applied() > 0 {
            tracing::info!(provider = name, changes = report.applied(), rounds = report.rounds, "published");
        }
    }

    /// Records the end of a round; without a `problem` it published everything.
    fn report(&self, name: &str, state: ProviderState, problem: Option<String>) {
        let errors = self.api_state.metrics.soft_errors.with_label_values(&[name]);
        match &problem {
            None => errors.set(0),
            Some(_) => errors.inc(),
        }
        let mut states = self.results.states.lock();
        if states.get(name) != Some(&state) {
            let before = states.remove(name).unwrap_or_default();
            let known: BTreeSet<&String> =
                before.general.iter().chain(before.names.iter().map(|(_, problem)| problem)).collect();
            let names = state.names.iter().map(|(_, problem)| problem);
            let new = state.general.iter().chain(names).filter(|problem| !known.contains(problem));
            // One line for each of 10,000 names would bury the cause.
            for problem in shortened(new) {
                tracing::warn!(provider = name, "{problem}");
            }
            states.insert(name.to_owned(), state);
        }
        drop(states);
        self.api_state.end_round(name, problem);
        self.results.changed.notify_one();
    }
}

/// Plans and logs without applying changes.
async fn dry_round(
    name: &str,
    engine: &mut Engine,
    target: &Target,
) -> Result<Report, crate::provider::ProviderError> {
    let listing = engine.list().await?;
    engine.prepare(&target.desired).await?;
    let planned = engine.plan(&listing, &target.desired);
    for action in planned.zones.iter().flat_map(|zone| zone.plan.actions()) {
        tracing::info!(provider = name, "dry run: {action}");
    }
    let zones = listing.iter().map(|zone| {
        let plan = planned.zones.iter().find(|plan| plan.id == zone.id);
        crate::engine::ZoneReport {
            id: zone.id.clone(),
            failure: zone.view.as_ref().err().cloned(),
            records: zone.view.as_ref().map_or(0, |view| view.records.len()),
            owned: plan.map_or(0, |plan| plan.owned),
            notes: plan.map_or_else(Vec::new, |plan| plan.plan.notes.clone()),
            ..crate::engine::ZoneReport::default()
        }
    });
    Ok(Report { zones: zones.collect(), notes: planned.notes, rounds: 1 })
}

fn seconds_now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |elapsed| elapsed.as_secs_f64())
}
