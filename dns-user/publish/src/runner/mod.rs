//! The main loop: reads the sources (documents, stored resources, fleet and health) after every change, and
//! reconciles each provider in its own task, so that a slow or failing provider delays no other.

mod launch;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use anyhow::Context as _;
use axum::Router;
use dns_kit::{
    files::atomic,
    http_server::{Listener, Server, ServerLimits},
    tls::RotatingTls,
};
use parking_lot::Mutex;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::{Notify, watch},
    task::JoinHandle,
};

pub use self::launch::{LaunchOptions, launch, options_problems};
use self::launch::{fill_targets, mark_rivals};
use crate::{
    api,
    config::{ApiConfig, Config, WebhookConfig},
    documents::{Folder, Scan, Watch, read_json},
    engine::{Engine, Report},
    fleet::{AliasWriter, Fleet, HealthHistory, ResolveError, SavedHealth, ServerClient},
    plan::Reason,
    provider::{Loading, ProviderError, load},
    publication::{Publication, Target, fleet_names, publish},
    status::{
        ApiState, Confirmation, Confirmed, Metrics, ProviderState, StatusWriter, gauge, shortened,
    },
    store::{Store, write_json},
    webhook::MAX_MESSAGE,
};

const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(20);

/// File of the fleet's health, beside the store.
const HEALTH_FILE: &str = "health.json";

/// File of the recent deletions of all providers, beside the store.
const DELETIONS_FILE: &str = "deletions.json";

/// Time within which events are combined.
const DEBOUNCE: Duration = Duration::from_millis(200);

/// Publishes until SIGTERM or SIGINT.
pub async fn run(config: Config) -> anyhow::Result<()> {
    let options = LaunchOptions::of(&config)?;
    // Before the files beside it are swept: its lock keeps a second publisher away from them.
    let store = Store::open(&config.store)?;
    for file in [HEALTH_FILE, DELETIONS_FILE] {
        // A command that saves deletions at this very moment reports that it could not.
        atomic::sweep(&config.store.with_file_name(file));
    }
    let mut sources = Sources::new(&config)?;
    let api_state = Arc::new(ApiState::new(store, Metrics::new()?));
    // Before the API answers: who has seen it may end the publisher.
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    listen(&config, &api_state).await?;
    let changed = Notify::new();
    let shared = Arc::new(Shared {
        api_state: api_state.clone(),
        states: Mutex::default(),
        changed,
        options,
    });
    let documents = [&config.documents[..], std::slice::from_ref(&config.store)].concat();
    // Before the first scan, so that a change in between is not missed.
    let mut watch = Watch::start(&documents);
    let mut workers = Workers::default();
    let mut status = StatusWriter::default();
    let mut is_started = false;
    loop {
        let state = sources.read().await;
        if !is_started {
            is_started = true;
            log_start(&config, &state);
        }
        api_state
            .metrics
            .set_sources(&state.scan, &state.publication);
        *api_state.scan.lock() = state.scan.clone();
        workers.update(&shared, &state.publication);
        shared.write_status(&mut status, &state);
        // Succeeds only if systemd started the process.
        let _ = sd_notify::notify(false, &[sd_notify::NotifyState::Ready]);
        loop {
            tokio::select! {
                () = watch.changed() => {}
                () = api_state.change.notified() => {}
                _ = hangup.recv() => {}
                () = tokio::time::sleep_until(state.next.into()) => {}
                // A round has ended: only the status is new, and nothing has to be read.
                () = shared.changed.notified() => {
                    shared.write_status(&mut status, &state);
                    continue;
                }
                _ = terminate.recv() => return workers.end().await,
                _ = interrupt.recv() => return workers.end().await,
            }
            break;
        }
        // A deployment writes several files; reading after the first would publish a mixture.
        if Instant::now() < state.next {
            tokio::time::sleep(DEBOUNCE).await;
        }
    }
}

fn log_start(config: &Config, state: &SourceState) {
    tracing::info!(
        documents = state.scan.documents.len(),
        providers = state.publication.targets.len(),
        control = %config.socket.display(),
        "started"
    );
    // Warnings only: a provider's document may come later, through the API.
    for problem in options_problems(config, &state.publication) {
        tracing::warn!("{problem}");
    }
}

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
        // Two writers of the file would overwrite each other, and the running publisher knows more.
        fleet.health_file = None;
    }
    Ok(sources.read().await)
}

/// State of all sources.
#[derive(Debug)]
pub struct SourceState {
    /// Documents of the folder.
    pub scan: Arc<Scan>,
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
    /// An unreadable configuration of the server is an error, because fleet names have no addresses without it.
    pub fn new(config: &Config) -> anyhow::Result<Self> {
        let fleet = match &config.server {
            Some(path) => Some(FollowedFleet::new(path, config)?),
            None => None,
        };
        let options = LaunchOptions::of(config)?;
        let mut paths = config.documents.clone();
        // Without it the API was never used.
        if config.store.is_dir() {
            paths.push(config.store.clone());
        }
        Ok(Self {
            folder: Folder::new(paths),
            fleet,
            options,
        })
    }

    /// Reads all changed sources.
    pub async fn read(&mut self) -> SourceState {
        // Files may lie on a file system that is slow; the API must answer meanwhile.
        let scan = tokio::task::block_in_place(|| self.folder.scan());
        let now = Instant::now();
        let mut next = now + SCAN_INTERVAL;
        let names = fleet_names(&scan.documents);
        let mut problem = None;
        if let Some(followed) = &mut self.fleet {
            if !names.is_empty() {
                // The last answers stay in use: that a server restarts must withdraw no address.
                if let Err(error) = followed.fleet.ask(&names).await {
                    problem = Some(format!(
                        "the fleet's addresses and health are unknown: {error}"
                    ));
                }
                next = next
                    .min(now + FLEET_INTERVAL)
                    .min(followed.fleet.next_change(now).unwrap_or(next));
                followed.save();
            }
            followed.log(problem.as_deref());
        }
        let mut publication = publish(&scan, &|name| match &self.fleet {
            Some(followed) => followed.fleet.records(name, problem.as_deref()),
            None => Err(ResolveError::NoServer),
        });
        fill_targets(&mut publication, &self.options);
        mark_rivals(&mut publication, &self.options);
        SourceState {
            scan: scan.into(),
            publication,
            next,
            fleet_problem: problem,
        }
    }
}

impl FollowedFleet {
    fn new(path: &Path, config: &Config) -> anyhow::Result<Self> {
        let (server, _) = ServerClient::of_server(path)?;
        let health_file = config.store.with_file_name(HEALTH_FILE);
        // Not an error of the start: without the file, unhealthy addresses are withdrawn later.
        let saved = read_json(&health_file).unwrap_or_else(|error| {
            tracing::warn!(
                file = %health_file.display(), error,
                "the saved health is unknown: unhealthy addresses are published again for their hold time; the next \
                 change of health replaces the file"
            );
            SavedHealth::default()
        });
        let history = HealthHistory::restore(&saved, Instant::now(), SystemTime::now());
        Ok(Self {
            fleet: Fleet::new(server, history),
            health_file: Some(health_file),
            saved,
            problem: None,
        })
    }

    /// Saves the time since which instances have been unhealthy, so that a restart does not restart
    /// their hold time.
    fn save(&mut self) {
        let Some(file) = &self.health_file else {
            return;
        };
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
        // The server is asked every 5 s; the log names a failure and its end.
        if self.problem.as_deref() != problem {
            match problem {
                Some(problem) => tracing::warn!("{problem}; the last known state stays in use"),
                None => tracing::info!("addresses and health of the fleet are available again"),
            }
            self.problem = problem.map(str::to_owned);
        }
    }
}

/// Opens the control socket, the API and the metrics port.
async fn listen(config: &Config, api_state: &Arc<ApiState>) -> anyhow::Result<()> {
    let routes = api::routes(api_state.clone());
    let socket = api::bind_control(&config.socket, config.group.as_deref()).with_context(|| {
        format!(
            "{}: cannot open the control socket",
            config.socket.display()
        )
    })?;
    tokio::spawn(api::serve_control(socket, routes.clone()));
    if let Some(ApiConfig {
        address,
        tls,
        clients,
    }) = &config.api
    {
        let listener = bind(*address, "open the API").await?;
        let tls = RotatingTls::load("publish-api", "bosh-dns-publish", tls)?;
        tokio::spawn(tls.clone().watch(|_| {}));
        tokio::spawn(api::serve_tls(listener, tls, clients.clone(), routes));
    }
    if let Some(webhook) = &config.webhook {
        let listener = bind(webhook.address, "serve external-dns's webhook protocol").await?;
        let (writer, server) = alias_writer(config, webhook)?;
        // Only `run` sweeps: `check` prepares a writer too, and must not remove a running
        // publisher's unfinished file.
        writer.sweep();
        serve("the webhook", listener, api::webhook_routes(writer, server));
    }
    if let Some(address) = config.metrics {
        let listener = bind(address, "serve metrics").await?;
        serve(
            "the metrics port",
            listener,
            api::metrics_routes(api_state.clone()),
        );
    }
    Ok(())
}

async fn bind(address: SocketAddr, purpose: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot {purpose} at {address}"))
}

fn serve(name: &'static str, listener: TcpListener, routes: Router) {
    // One message of the largest size, or several smaller ones at a time.
    let limits = ServerLimits {
        body: MAX_MESSAGE,
        bodies: MAX_MESSAGE,
        ..ServerLimits::default()
    };
    let server = Server::new(name, Listener::Plain(listener)).with_limits(limits);
    tokio::spawn(server.run(move |_| routes.clone(), std::future::pending()));
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
    /// `None` once its DNS Update Record was removed: it ends after its round.
    targets: Option<watch::Sender<Arc<Target>>>,
    task: JoinHandle<()>,
}

impl Workers {
    fn update(&mut self, shared: &Arc<Shared>, publication: &Publication) {
        for (name, worker) in &mut self.0 {
            if !publication.targets.contains_key(name) && worker.targets.take().is_some() {
                tracing::info!(
                    provider = name,
                    "provider no longer used: its DNS Update Record was removed; published records stay"
                );
            }
        }
        self.0.retain(|_, worker| !worker.task.is_finished());
        let expected = publication
            .targets
            .iter()
            .map(|(name, target)| (name.clone(), time_limit(target)));
        shared.api_state.expect(expected);
        for (name, target) in &publication.targets {
            match self.0.get(name).map(|worker| &worker.targets) {
                // Two rounds of one provider would disturb each other; the end of this one wakes the main loop.
                Some(None) => {}
                Some(Some(targets)) => {
                    targets.send_if_modified(|current| {
                        // Every scan makes new targets; an equal one costs no listing.
                        let is_new = !current.wants_the_same(target);
                        if is_new {
                            *current = target.clone();
                        }
                        is_new
                    });
                }
                None => {
                    let (targets, receiver) = watch::channel(target.clone());
                    let worker = Worker {
                        targets: Some(targets),
                        task: tokio::spawn(work(shared.clone(), name.clone(), receiver)),
                    };
                    self.0.insert(name.clone(), worker);
                }
            }
        }
    }

    /// Waits until rounds in progress have ended.
    async fn end(self) -> anyhow::Result<()> {
        // Without its sender of targets, a worker ends after its round.
        let tasks = self.0.into_values().map(|worker| worker.task);
        let all = futures_util::future::join_all(tasks);
        if tokio::time::timeout(SHUTDOWN_TIMEOUT, all).await.is_err() {
            tracing::warn!("a round did not finish in time; the next start continues it");
        }
        Ok(())
    }
}

/// Returns the time after which a target without a finished round is late.
fn time_limit(target: &Target) -> Duration {
    // Three rounds may fail for a reason that passes, and each may take its time.
    target.record.parameters.interval() * 3 + Duration::from_secs(60)
}

/// Minimum pause between two rounds.
const MIN_PAUSE: Duration = Duration::from_secs(1);

struct Shared {
    api_state: Arc<ApiState>,
    /// Results of the last rounds, by provider.
    states: Mutex<BTreeMap<String, ProviderState>>,
    /// Signals a change of `states`.
    changed: Notify,
    options: LaunchOptions,
}

/// Reconciles until the sender of targets is dropped. A round in progress is completed.
async fn work(shared: Arc<Shared>, name: String, mut targets: watch::Receiver<Arc<Target>>) {
    let mut target = targets.borrow().clone();
    let mut engine: Option<Engine> = None;
    let mut launching = Loading::default();
    let mut confirmations = shared.api_state.receive_confirmations(&name);
    let mut confirmation: Option<Confirmation> = None;
    loop {
        let before = std::mem::replace(&mut target, targets.borrow_and_update().clone());
        let begun = Instant::now();
        // An engine remembers what others have undone, so it is kept while only the wanted records change.
        if before.record != target.record || before.rival != target.rival {
            engine = None;
            launching = Loading::default();
        }
        if engine.is_none() {
            let options = shared.options.clone();
            let wanted = target.clone();
            let launched = load(&launching, "its files", move || launch(&wanted, &options));
            match launched.await {
                Ok(launched) => engine = Some(launched),
                Err(error) => {
                    let problem = error.to_string();
                    let state = ProviderState::failed(&problem, &shared.state(&name));
                    shared.report(&name, &target, state, Some(problem));
                }
            }
        }
        let mut changed = 0;
        if let Some(engine) = &mut engine {
            let confirmed = confirmation
                .as_ref()
                .map(|confirmation| confirmation.deletions);
            changed = shared.round(&name, engine, &target, confirmed).await;
        }
        if let Some(Confirmation { reply, .. }) = confirmation.take() {
            let problems = shared.state(&name).problems(&target);
            // The client may have gone.
            let _ = reply.send(Confirmed { changed, problems });
        }
        let interval = target.record.parameters.interval();
        // Spreads publishers that started together.
        let pause = interval.max(MIN_PAUSE).mul_f64(0.9 + 0.2 * fastrand::f64());
        tokio::select! {
            changed = targets.changed() => {
                // The record was removed, or the process ends.
                if changed.is_err() {
                    return shared.forget(&name);
                }
                // A program may rewrite documents without a pause; zones are not listed as fast.
                tokio::time::sleep(MIN_PAUSE.saturating_sub(begun.elapsed())).await;
            }
            received = confirmations.recv() => {
                // The operator who confirmed has given up, and documents may have changed since.
                confirmation = received.filter(|received| !received.reply.is_closed());
            }
            () = tokio::time::sleep(pause) => {}
        }
    }
}

impl Shared {
    fn write_status(&self, writer: &mut StatusWriter, state: &SourceState) {
        let states = self.states.lock().clone();
        writer.write(
            &self.api_state,
            &state.publication,
            &states,
            state.fleet_problem.as_deref(),
        );
    }

    /// Forgets a provider whose last round has ended.
    fn forget(&self, name: &str) {
        self.states.lock().remove(name);
        self.api_state.forget(name);
    }

    fn state(&self, name: &str) -> ProviderState {
        self.states.lock().get(name).cloned().unwrap_or_default()
    }

    /// Runs one round. Returns the number of changed names.
    async fn round(
        &self,
        name: &str,
        engine: &mut Engine,
        target: &Arc<Target>,
        confirmed: Option<usize>,
    ) -> usize {
        let metrics = &self.api_state.metrics;
        let is_dry = target.record.parameters.is_set("dry-run");
        let result = if is_dry {
            dry_round(name, engine, target).await
        } else {
            engine.reconcile(&target.desired, confirmed, &|_| {}).await
        };
        let labels = &[name];
        metrics
            .last_reconcile
            .with_label_values(labels)
            .set(seconds_now());
        // Without a zero the first failure would be no increase.
        metrics.registry_errors.with_label_values(labels);
        let counts = Metrics::count_types(&target.desired.records);
        match result {
            Ok(report) => {
                let state = ProviderState::of_report(&report, &self.state(name));
                self.count(name, &report, &state);
                if report.is_complete() {
                    metrics
                        .last_sync
                        .with_label_values(labels)
                        .set(seconds_now());
                    Metrics::set_types(&metrics.verified_records, Some(name), &counts);
                }
                // A dry run is intended: it is no failure that counts for alerts.
                let problem = if report.has_succeeded() {
                    None
                } else {
                    let first = state.all_problems().next();
                    Some(first.cloned().unwrap_or_default())
                };
                self.report(name, target, state, problem);
                report.applied()
            }
            Err(error) => {
                metrics.registry_errors.with_label_values(labels).inc();
                let state = ProviderState::failed(&error, &self.state(name));
                self.report(name, target, state, Some(error.to_string()));
                0
            }
        }
    }

    fn count(&self, name: &str, report: &Report, state: &ProviderState) {
        let metrics = &self.api_state.metrics;
        let labels = &[name];
        let mut foreign = 0;
        let mut awaiting = 0;
        for zone in &report.zones {
            for note in &zone.notes {
                foreign += usize::from(matches!(note.reason, Reason::Foreign { .. }));
            }
            if let Some(refusal) = &zone.refusal {
                awaiting += refusal.deletions();
            }
        }
        // An unavailable zone keeps its last counts.
        let records: usize = state.zones.values().map(|counts| counts.records).sum();
        for (family, value) in [
            (&metrics.registry_endpoints, records),
            (&metrics.registry_records, state.owned()),
            (&metrics.skipped, foreign),
            (&metrics.awaiting_confirmation, awaiting),
        ] {
            family.with_label_values(labels).set(gauge(value));
        }
        // Some zones may work while others fail, which an alert must show.
        if report.zones.iter().any(|zone| zone.failure.is_some()) {
            metrics.registry_errors.with_label_values(labels).inc();
        }
        if report.applied() == 0 && report.is_complete() {
            metrics.no_op_runs.with_label_values(labels).inc();
        } else if report.applied() > 0 {
            tracing::info!(
                provider = name,
                changes = report.applied(),
                rounds = report.rounds,
                "published"
            );
        }
    }

    /// Records the end of a round; without a `problem` nothing failed.
    fn report(
        &self,
        name: &str,
        target: &Arc<Target>,
        mut state: ProviderState,
        problem: Option<String>,
    ) {
        state.round = Some(target.clone());
        let metrics = &self.api_state.metrics;
        let errors = metrics.soft_errors.with_label_values(&[name]);
        match &problem {
            None => errors.set(0),
            Some(_) => errors.inc(),
        }
        let mut states = self.states.lock();
        if states.get(name) != Some(&state) {
            let before = states.remove(name).unwrap_or_default();
            let known: BTreeSet<&String> = before.all_problems().collect();
            let new = state
                .all_problems()
                .filter(|problem| !known.contains(problem));
            // One line for each of 10,000 names would bury the cause.
            for problem in shortened(new) {
                tracing::warn!(provider = name, "{problem}");
            }
            states.insert(name.to_owned(), state);
        }
        // The main loop, which is woken below, takes the same lock.
        drop(states);
        self.api_state.end_round(name, problem);
        self.changed.notify_one();
    }
}

/// Plans and logs without applying changes.
async fn dry_round(
    name: &str,
    engine: &mut Engine,
    target: &Target,
) -> Result<Report, ProviderError> {
    let listing = engine.list().await?;
    engine.prepare(&target.desired).await?;
    let planned = engine.plan(&listing, &target.desired);
    for action in planned.actions() {
        tracing::info!(provider = name, "dry run: {action}");
    }
    let mut report = planned.report(&listing);
    report.withheld = planned.actions().count();
    Ok(report)
}

fn seconds_now() -> f64 {
    let since = SystemTime::UNIX_EPOCH.elapsed();
    since.unwrap_or_default().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use futures_util::future::BoxFuture;

    use super::*;
    use crate::{
        documents::{DocumentId, Kind},
        ownership::Registry,
        plan::{Desired, PlanRules},
        provider::{Batch, Progress, Provider, Results, TransactionResult, Zone},
        record::{Name, Record, RecordType},
        text::{Problems, Reader, documents, parse},
        update_record::UpdateRecord,
    };

    /// A service that holds the same zones whatever is applied.
    struct Fixed(Result<Vec<Zone>, ProviderError>);

    impl Provider for Fixed {
        fn list(&mut self) -> BoxFuture<'_, Result<Vec<Zone>, ProviderError>> {
            let listed = self.0.clone();
            Box::pin(async { listed })
        }

        fn apply<'a>(&'a mut self, batch: &'a Batch, _: Progress<'a>) -> Results<'a> {
            Box::pin(async { vec![TransactionResult::Applied; batch.transactions.len()] })
        }
    }

    fn zone(id: &str, content: Result<Vec<Record>, ProviderError>) -> Zone {
        Zone {
            id: id.to_owned(),
            apex: Name::parse("example.org").unwrap(),
            visibility: Default::default(),
            content,
            warnings: Vec::new(),
        }
    }

    fn engine(listed: Result<Vec<Zone>, ProviderError>) -> Engine {
        Engine::new(
            Box::new(Fixed(listed)),
            Registry::default(),
            PlanRules::of("me"),
        )
    }

    fn failure() -> ProviderError {
        ProviderError::Settings("cause".to_owned())
    }

    fn set(name: &str) -> Record {
        Record::parse(&format!("{name}.example.org"), RecordType::A, ["192.0.2.1"]).unwrap()
    }

    fn target(parameters: &str, names: &[&str]) -> Arc<Target> {
        let body = format!(
            "{{\"metadata\": {{\"name\": \"p\"}}, \"spec\": {{\"provider\": \"coredns\", \
             \"external-dns-parameters\": {parameters}}}}}"
        );
        let problems = Problems::of("body");
        let node = parse(documents(&body)[0], &problems).unwrap();
        let record = UpdateRecord::read(&mut Reader::root(&node, &problems).fields().unwrap());
        let target = Target {
            id: DocumentId {
                kind: Kind::UpdateRecord,
                namespace: "shop".to_owned(),
                name: "p".to_owned(),
            },
            record: record.unwrap(),
            desired: Desired {
                records: names.iter().map(|name| set(name)).collect(),
                ..Desired::default()
            },
            untargeted: Vec::new(),
            origins: BTreeMap::new(),
            counts: BTreeMap::new(),
            rival: None,
        };
        Arc::new(target)
    }

    fn shared(folder: &Path) -> Shared {
        let config = Config {
            store: folder.join("store"),
            ..Config::default()
        };
        let store = Store::open(&config.store).unwrap();
        Shared {
            api_state: Arc::new(ApiState::new(store, Metrics::new().unwrap())),
            states: Mutex::default(),
            changed: Notify::new(),
            options: LaunchOptions::of(&config).unwrap(),
        }
    }

    #[test]
    fn time_limit_exceeds_three_rounds() {
        for (parameters, seconds) in [("{}", 240), ("{\"interval\": \"10s\"}", 90)] {
            assert_eq!(
                time_limit(&target(parameters, &[])),
                Duration::from_secs(seconds)
            );
        }
    }

    /// The gauges of provider `p`: sets, owned names, skipped ones, deletions that wait, and failed rounds in a row;
    /// then its counters of rounds without a change and of errors.
    fn counted(shared: &Shared) -> ([i64; 5], [u64; 2]) {
        let metrics = &shared.api_state.metrics;
        let gauges = [
            &metrics.registry_endpoints,
            &metrics.registry_records,
            &metrics.skipped,
            &metrics.awaiting_confirmation,
            &metrics.soft_errors,
        ];
        let counters = [&metrics.no_op_runs, &metrics.registry_errors];
        (
            gauges.map(|family| family.with_label_values(&["p"]).get()),
            counters.map(|family| family.with_label_values(&["p"]).get()),
        )
    }

    #[tokio::test]
    async fn rounds_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let shared = shared(folder.path());
        let metrics = &shared.api_state.metrics;
        shared
            .api_state
            .expect([("p".to_owned(), Duration::from_secs(3_600))]);
        let two = target("{}", &["a", "b"]);
        let time = |family: &prometheus::GaugeVec| family.with_label_values(&["p"]).get();
        let verified = || {
            metrics
                .verified_records
                .with_label_values(&["p", "A"])
                .get()
        };
        let round = async |listed, confirmed, target: &Arc<Target>| {
            let mut engine = engine(listed);
            shared.round("p", &mut engine, target, confirmed).await
        };
        // Nothing was there, and everything is published.
        assert_eq!(round(Ok(vec![zone("z", Ok(vec![]))]), None, &two).await, 2);
        assert_eq!(counted(&shared), ([2, 2, 0, 0, 0], [0, 0]));
        assert_eq!(verified(), 2);
        assert!(time(&metrics.last_sync) > 1e9 && time(&metrics.last_reconcile) > 1e9);
        // Another's name is there, and nothing changes.
        let one = target("{}", &["a"]);
        assert_eq!(
            round(
                Ok(vec![zone("z", Ok(vec![set("a"), set("c")]))]),
                None,
                &one
            )
            .await,
            0
        );
        assert_eq!(counted(&shared), ([2, 0, 1, 0, 0], [1, 0]));
        assert_eq!(verified(), 1);
        metrics.last_sync.with_label_values(&["p"]).set(1.0);
        // One of two zones fails: it keeps its last counts, and the other one changes.
        let broken = vec![zone("z", Err(failure())), zone("y", Ok(vec![]))];
        assert_eq!(round(Ok(broken), None, &one).await, 1);
        assert_eq!(counted(&shared), ([3, 1, 0, 0, 1], [1, 1]));
        assert_eq!(time(&metrics.last_sync), 1.0);
        let state = shared.state("p");
        assert_eq!(state.general, ["zone z: cause"]);
        // The service fails as a whole.
        assert_eq!(round(Err(failure()), None, &one).await, 0);
        assert_eq!(counted(&shared), ([3, 1, 0, 0, 2], [1, 2]));
        assert_eq!(shared.state("p").general, ["cause"]);
        assert_eq!(shared.state("p").owned(), 1);
        // Deletions wait for a confirmation.
        let text = Record::parse(
            "a-a.example.org",
            RecordType::TXT,
            ["heritage=external-dns,external-dns/owner=me"],
        );
        let owned = || vec![zone("z", Ok(vec![set("a"), text.clone().unwrap()]))];
        let none = target("{}", &[]);
        assert_eq!(round(Ok(owned()), None, &none).await, 0);
        assert_eq!(counted(&shared), ([1, 1, 0, 1, 3], [1, 2]));
        assert_eq!(round(Ok(owned()), Some(1), &none).await, 1);
        assert_eq!(counted(&shared), ([0, 0, 0, 0, 0], [1, 2]));
        assert_eq!(shared.state("unknown"), ProviderState::default());
    }

    #[tokio::test]
    async fn dry_rounds_change_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let shared = shared(folder.path());
        let dry = target("{\"dry-run\": true}", &["a", "b", "c"]);
        let listed = vec![zone("z", Ok(vec![set("a")])), zone("y", Err(failure()))];
        let mut engine = engine(Ok(listed));
        let report = dry_round("p", &mut engine, &dry).await.unwrap();
        assert_eq!(
            (report.applied(), report.rounds, report.notes.len()),
            (0, 1, 0)
        );
        let zones: Vec<(&str, usize, usize, usize, bool)> = report
            .zones
            .iter()
            .map(|zone| {
                (
                    &*zone.id,
                    zone.records,
                    zone.owned,
                    zone.notes.len(),
                    zone.failure.is_some(),
                )
            })
            .collect();
        assert_eq!(zones, [("z", 1, 0, 0, false), ("y", 0, 0, 0, true)]);
        assert_eq!(shared.round("p", &mut engine, &dry, None).await, 0);
        assert_eq!(counted(&shared).0, [1, 0, 0, 0, 1]);
        // What is only logged is not published.
        let withheld =
            "dry-run is true, so 1 changes are logged and not made; remove it to publish";
        for (names, expected) in [(&["a", "b"][..], &[withheld][..]), (&["a"], &[])] {
            let dry = target("{\"dry-run\": true}", names);
            let mut engine = tests::engine(Ok(vec![zone("z", Ok(vec![set("a")]))]));
            shared.round("p", &mut engine, &dry, None).await;
            assert_eq!(shared.state("p").general, expected);
            assert_eq!(counted(&shared).0[4], 0, "it did not fail");
        }
    }

    #[tokio::test]
    async fn only_news_of_a_round_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let shared = shared(folder.path());
        shared.api_state.expect([("p".to_owned(), Duration::ZERO)]);
        let wanted = target("{}", &["a"]);
        let mut state = ProviderState::failed("first", &ProviderState::default());
        shared.report("p", &wanted, state.clone(), Some("first".to_owned()));
        state.round = Some(wanted.clone());
        assert_eq!(shared.state("p"), state);
        assert!(shared.api_state.late_rounds()[0].ends_with(" s: first"));
        // The main loop was woken.
        shared.changed.notified().await;
        let well = ProviderState {
            round: Some(wanted.clone()),
            ..ProviderState::default()
        };
        shared.report("p", &wanted, well.clone(), None);
        assert_eq!(shared.state("p"), well);
        assert_eq!(counted(&shared).0[4], 0);
    }

    #[tokio::test]
    async fn provider_removed_during_a_round_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let service = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", service.local_addr().unwrap());
        let shared = shared_with_etcd(folder.path(), url);
        let mut wanted = Publication::default();
        let one = target("{}", &["a"]);
        wanted.targets.insert("shop/p".to_owned(), one);
        let mut workers = Workers::default();
        workers.update(&shared, &wanted);
        let (request, _) = service.accept().await.unwrap();
        // Its record goes and returns before the round fails.
        workers.update(&shared, &Publication::default());
        workers.update(&shared, &wanted);
        assert!(workers.0["shop/p"].targets.is_none());
        drop((request, service));
        shared.api_state.change.notified().await;
        assert_eq!(shared.state("shop/p"), ProviderState::default());
        let metrics = shared.api_state.metrics.text();
        assert!(!metrics.contains("shop/p"), "{metrics}");
        assert!(shared.api_state.providers().is_empty());
        while !workers.0["shop/p"].task.is_finished() {
            tokio::task::yield_now().await;
        }
        workers.update(&shared, &wanted);
        assert!(workers.0["shop/p"].targets.is_some());
    }

    /// Returns shared state with etcd at `url` as the service of `shop/p`.
    fn shared_with_etcd(folder: &Path, url: String) -> Arc<Shared> {
        let settings = BTreeMap::from([("etcd-urls".to_owned(), url)]);
        let mut shared = shared(folder);
        shared.options = LaunchOptions::of(&Config {
            store: folder.join("store"),
            provider_settings: BTreeMap::from([("shop/p".to_owned(), settings)]),
            ..Config::default()
        })
        .unwrap();
        Arc::new(shared)
    }

    #[tokio::test]
    async fn abandoned_confirmations_confirm_nothing() {
        use base64::{Engine as _, engine::general_purpose::STANDARD};

        let folder = tempfile::tempdir().unwrap();
        let pair = |key: &str, value: serde_json::Value| {
            let value = STANDARD.encode(value.to_string());
            serde_json::json!({"key": STANDARD.encode(key), "value": value, "mod_revision": "7"})
        };
        let text = "\"heritage=external-dns,external-dns/owner=default\"";
        let address = serde_json::json!({"host": "192.0.2.1", "targetstrip": 1});
        let owner = serde_json::json!({"text": text, "targetstrip": 1});
        let kvs = [
            pair("/skydns/org/example/a/1", address),
            pair("/skydns/org/example/a-a/1", owner),
        ];
        let listing = serde_json::json!({"header": {"revision": "9"}, "kvs": kvs}).to_string();
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let noted = asked.clone();
        let gate = Arc::new(Notify::new());
        let opened = gate.clone();
        let routes = Router::new().fallback(move |uri: axum::http::Uri| {
            let is_first = noted.lock().is_empty();
            noted.lock().push(uri.path().to_owned());
            let opened = opened.clone();
            let answer = match uri.path() {
                "/v3/kv/txn" => "{\"succeeded\": true}".to_owned(),
                _ => listing.clone(),
            };
            async move {
                if is_first {
                    opened.notified().await;
                }
                answer
            }
        });
        let service = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", service.local_addr().unwrap());
        serve("a test", service, routes);
        let shared = shared_with_etcd(folder.path(), url);
        let mut wanted = Publication::default();
        wanted
            .targets
            .insert("shop/p".to_owned(), target("{}", &[]));
        let mut workers = Workers::default();
        workers.update(&shared, &wanted);
        while asked.lock().is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // The operator gives up during a round that hangs.
        let confirmation = shared.api_state.confirm("shop/p", 1);
        assert!(
            tokio::time::timeout(Duration::ZERO, confirmation)
                .await
                .is_err()
        );
        gate.notify_one();
        shared.changed.notified().await;
        shared.changed.notified().await;
        assert_eq!(*asked.lock(), ["/v3/kv/range"; 2]);
        let confirmed = shared.api_state.confirm("shop/p", 1).await.unwrap();
        assert_eq!(confirmed.changed, 1);
        assert_eq!(asked.lock()[2..], ["/v3/kv/range", "/v3/kv/txn"]);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn sources_are_reread_after_interval() {
        let folder = tempfile::tempdir().unwrap();
        let documents = folder.path().join("publish.d");
        std::fs::create_dir(&documents).unwrap();
        let record = "apiVersion: bosh-dns-publish/v1\nkind: DNSUpdateRecord\nmetadata: {name: NAME, namespace: shop}\n\
                      spec: {provider: coredns}\n---\napiVersion: bosh-dns-publish/v1\nkind: FleetName\n\
                      metadata: {name: f, namespace: shop, labels: {dnsprovider: NAME}}\n\
                      spec: {names: [{name: r.example.org, alias: router.internal}]}\n";
        std::fs::write(documents.join("a.yml"), record.replace("NAME", "p")).unwrap();
        let mut config = Config {
            documents: vec![documents.clone()],
            store: folder.path().join("store"),
            ..Config::default()
        };
        let begin = Instant::now();
        let state = read_once(&config).await.unwrap();
        assert!(
            state.next >= begin + SCAN_INTERVAL && state.next <= Instant::now() + SCAN_INTERVAL
        );
        assert_eq!(
            state.publication.targets.keys().collect::<Vec<_>>(),
            ["shop/p"]
        );
        assert_eq!(state.fleet_problem, None);
        let problems = |state: &SourceState| -> Vec<String> {
            state
                .publication
                .problems
                .values()
                .flatten()
                .cloned()
                .collect()
        };
        assert_eq!(
            problems(&state),
            [
                "r.example.org: no server is configured; set `server` to the DNS server's config.json; its records \
                 stay unchanged"
            ]
        );
        // Resources of the store are read as well, if there is one; two of one owner are rivals.
        std::fs::create_dir(&config.store).unwrap();
        std::fs::write(
            config.store.join("s.yml"),
            record.replace("NAME", "q").split("---").next().unwrap(),
        )
        .unwrap();
        let state = read_once(&config).await.unwrap();
        assert_eq!(
            state.publication.targets.keys().collect::<Vec<_>>(),
            ["shop/p", "shop/q"]
        );
        assert!(
            state
                .publication
                .targets
                .values()
                .all(|target| target.rival.is_some())
        );
        // With a server that does not answer, it is asked again soon.
        let server = folder.path().join("config.json");
        let socket = folder.path().join("control.sock");
        let text = format!("{{\"port\": 53, \"control\": {{\"socket\": {socket:?}}}}}");
        std::fs::write(&server, text).unwrap();
        config.server = Some(server);
        let begin = Instant::now();
        let mut sources = Sources::new(&config).unwrap();
        let state = sources.read().await;
        assert!(
            state.next >= begin + FLEET_INTERVAL && state.next <= Instant::now() + FLEET_INTERVAL
        );
        let problem = state.fleet_problem.as_deref().unwrap();
        assert!(
            problem.starts_with("the fleet's addresses and health are unknown: "),
            "{problem}"
        );
        assert_eq!(problems(&state).len(), 1);
        assert!(
            problems(&state)[0].contains(problem),
            "{:?}",
            problems(&state)
        );
        let followed = sources.fleet.unwrap();
        assert_eq!(followed.problem.as_deref(), Some(problem));
        assert_eq!(
            followed.health_file,
            Some(folder.path().join("health.json"))
        );
    }
}
