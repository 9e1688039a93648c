//! The publisher: creates versions, uploads their blobs, announces them, and tracks the version of
//! each agent.
//!
//! [`plan`] makes the decisions without I/O. [`state_writer`] does all disk I/O on a thread. The loop
//! here passes events to the plan and starts its actions on bus and blobstore as tasks with deadlines. It waits for none
//! of them, so a blobstore, disk or bus that hangs delays neither announcements nor shutdown.

pub(crate) mod api;
mod plan;
pub(crate) mod registry;
pub(crate) mod source;
pub(crate) mod state;
pub(crate) mod state_writer;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{self, TrySendError},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use async_nats::{Client, connection::State as Connection};
use bytes::Bytes;
use clap::value_parser;
use dns_kit::logs::LineLimit;
use futures_util::{StreamExt, stream::select};
use parking_lot::Mutex;
use ring::rand;
use tokio::{
    sync::mpsc::Receiver,
    task::{AbortHandle, JoinSet, spawn_blocking},
};

use self::{
    api::{PublisherApi, PublisherMetrics},
    plan::{Action, Outgoing, Plan, PlanSettings, StepInput},
    registry::{AgentCall, AgentRegistry, AgentVersion, Count},
    source::InventoryOptions,
    state::CommittedVersion,
    state_writer::{Job, StateEvent, StateWriter, TICK, is_of_the_disk},
};
use crate::{
    bus::{Bus, BusOptions, PUBLISHER},
    dataset::LAST_VERSION,
    file_options::FileOptions,
    http::{TlsFiles, TlsOptions},
    message::{self, ASK, Announcement, BlobLocation, OURS},
    now_ms,
    store::{Store, StoreOptions, unix_now},
};
use dns_kit::{
    files::{atomic, bounded},
    http_server,
};

/// Maximum number of jobs that wait for the writer, and of results that wait for the loop. Only a disk that hangs
/// lets so many wait: the plan has one commit at a time, and a registry each second.
const MAX_JOBS: usize = 64;
/// Maximum number of old blobs whose deletion is tried again; more stay in the blobstore.
const MAX_UNDELETED: usize = 100;
/// Maximum wait for the last write of `agents.json` at shutdown.
const LAST_WRITE: Duration = Duration::from_secs(1);

/// The registry as last written, for the API.
pub(crate) type Shared = Arc<Mutex<AgentRegistry>>;

struct Distributor {
    options: PublishOptions,
    plan: Plan,
    jobs: mpsc::SyncSender<Job>,
    events: Receiver<StateEvent>,
    /// Number of writes of the registry that the writer was given and has not reported.
    open_writes: usize,
    tasks: Tasks,
    bus: Bus,
    store: Store,
    shared: Shared,
    metrics: PublisherMetrics,
    failures: LineLimit,
    /// The last logged failure; repeats are rate-limited.
    last_failure: String,
    /// Old versions whose blobs are deleted with the next commit; those that could not be deleted are tried again.
    undeleted: Vec<CommittedVersion>,
}

/// Runs `publish`. Returns whether all agents hold the version.
pub(crate) async fn run(options: PublishOptions, progress: impl Fn(Count)) -> anyhow::Result<bool> {
    // Datasets and patches of megabytes are freed after each version.
    dns_kit::memory::return_large_buffers();
    // First, because of its lock: a second publisher on this folder must not even connect.
    let writer = StateWriter::open(&options)?;
    if let Some(file) = options.local.clone() {
        let ended = dns_kit::until_ended();
        // On a thread, so that a disk that hangs does not delay the end. It ends with the process: files are replaced
        // atomically.
        let writing = spawn_blocking(move || write_locally(&options, writer, &file));
        tokio::select! {
            written = writing => written??,
            () = ended => {}
        }
        return Ok(true);
    }
    let (bus, store, tls) = connect(&options).await?;
    // A folder that hangs must not delay the start.
    let unswept = store.clone();
    tokio::spawn(async move { unswept.sweep().await });
    // If the registry is unreadable, each agent must report once.
    let registry: AgentRegistry = writer
        .folder
        .read("agents.json")
        .unwrap_or_default()
        .unwrap_or_default();
    let shared = Shared::default();
    let metrics = PublisherMetrics::new()?;
    serve(&options, tls, &shared, &metrics).await?;
    let settings = PlanSettings {
        bandwidth: options.bandwidth,
        patches: !options.no_patches,
        links_good_for: Duration::from_secs(options.links_good_for),
    };
    let plan = Plan::new(settings, registry, writer.newest(), options.above);
    let (jobs, work) = mpsc::sync_channel(MAX_JOBS);
    let (said, events) = tokio::sync::mpsc::channel(MAX_JOBS);
    std::thread::Builder::new()
        .name("writer".to_owned())
        .spawn(move || writer.run(&work, &said))?;
    // New for each process, which gets no replies to an earlier one.
    let process = format!("{OURS}{}", state::blob_id());
    let tasks = Tasks::new(
        bus.client.clone(),
        store.clone(),
        process,
        options.bandwidth,
    );
    let distributor = Distributor {
        options,
        plan,
        jobs,
        events,
        open_writes: 0,
        tasks,
        bus,
        store,
        shared,
        metrics,
        failures: LineLimit::new(),
        last_failure: String::new(),
        undeleted: Vec::new(),
    };
    distributor.run(progress).await
}

/// Serves the API and the metrics, if they have addresses.
async fn serve(
    options: &PublishOptions,
    tls: TlsFiles,
    shared: &Shared,
    metrics: &PublisherMetrics,
) -> anyhow::Result<()> {
    // A single publication ends before its API could be used.
    if let (Some(address), true) = (options.api, options.watch) {
        let api = PublisherApi {
            source: options.source.clone(),
            state: options.state.clone(),
            shared: shared.clone(),
        };
        api::spawn(address, tls, options.api_clients.clone(), api).await?;
    }
    if let Some(address) = options.metrics {
        let registry = metrics.registry.clone();
        http_server::spawn_metrics(address, move || registry.gather()).await?;
    }
    Ok(())
}

/// Connects to the bus and opens the store of blobs.
async fn connect(options: &PublishOptions) -> anyhow::Result<(Bus, Store, TlsFiles)> {
    let tls = options
        .tls
        .clone()
        .files()
        .context("--nats URL with its --tls-* files, or --local FILE, is required")?;
    let bus_options = BusOptions {
        nats: options.nats.clone(),
        tls: tls.clone(),
        ping_every: crate::bus::PING_EVERY,
    };
    anyhow::ensure!(
        options.store.blobstore.is_some(),
        "--blobstore URL is required"
    );
    let bus = Bus::connect(
        &bus_options,
        "bosh-dns-sync-publisher",
        "agents get no new version",
    )
    .await?;
    let store = Store::open(&options.store, Some(&bus))?;
    Ok((bus, store, tls))
}

impl Distributor {
    async fn run(mut self, progress: impl Fn(Count)) -> anyhow::Result<bool> {
        let own = self
            .bus
            .client
            .subscribe(format!("director.{}.>", self.tasks.process))
            .await?;
        let reports = self
            .bus
            .client
            .subscribe(format!("director.{ASK}.>"))
            .await?;
        let mut messages = select(own, reports);
        let mut ticks = tokio::time::interval(TICK);
        // After a pause of the whole machine, a burst of ticks would only repeat the same step.
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let deadline = tokio::time::Instant::now() + Duration::from_secs(self.options.timeout);
        let mut ended = std::pin::pin!(dns_kit::until_ended());
        loop {
            tokio::select! {
                message = messages.next() => {
                    let message = message.context("the subscription ended")?;
                    self.plan.on_message(&message.subject, &message.payload, now_ms(), fastrand::f64());
                    // A fleet that reconnects sends thousands of reports at once; the next tick
                    // acts on all of them.
                    continue;
                }
                event = self.events.recv() => self.on_event(event.context("the thread of the state folder ended")?)?,
                done = self.tasks.next() => self.done(done),
                _ = ticks.tick() => {}
                () = &mut ended => {
                    // Interrupted, a single publication succeeds only if it was complete anyway.
                    let complete = self.plan.announced() && self.plan.registry.count().complete();
                    self.write_last().await;
                    return Ok(self.options.watch || complete);
                }
            }
            self.act()?;
            let count = self.plan.registry.count();
            self.metrics.set(&self.plan, count);
            progress(count);
            if self.options.watch {
                // A running publisher goes on: the log and `agents_disagreeing` tell the operator.
                self.plan.take_disagreement();
                continue;
            }
            if let Some(complete) = self.result(deadline).await? {
                return Ok(complete);
            }
        }
    }

    /// Returns the result of a single publication, `None` while it is unknown: whether all agents hold the
    /// version at the latest at the deadline. A disagreement is an error.
    async fn result(&mut self, deadline: tokio::time::Instant) -> anyhow::Result<Option<bool>> {
        if let Some((agent, AgentVersion { version, digest })) = self.plan.take_disagreement() {
            self.write_last().await;
            bail!(
                "agent {agent} now has version {version} ({}), but this publisher made version {} ({}): \
                 another publisher is active; stop it, then `publish` continues above the highest \
                 version",
                digest.unwrap_or_default(),
                self.plan.registry.version,
                self.plan.registry.digest,
            );
        }
        let complete = self.plan.announced() && self.plan.registry.count().complete();
        if complete || tokio::time::Instant::now() >= deadline {
            let announced = self.plan.announced();
            self.write_last().await;
            if let Some((agent, AgentVersion { version, digest })) =
                self.plan.registry.disagreeing()
            {
                bail!(
                    "agent {agent} has version {version} ({}), which is higher than or different from \
                     version {} ({})",
                    digest.as_deref().unwrap_or_default(),
                    self.plan.registry.version,
                    self.plan.registry.digest,
                );
            }
            anyhow::ensure!(
                announced,
                "no version was announced within the timeout: the log shows whether the inventory, NATS, the \
                 blobstore or the state folder is the cause"
            );
            return Ok(Some(complete));
        }
        Ok(None)
    }

    /// Runs a step of the plan and starts its actions.
    fn act(&mut self) -> anyhow::Result<()> {
        let connected = self.bus.client.connection_state() == Connection::Connected;
        let store = &self.store;
        let mut now = StepInput {
            ms: now_ms(),
            unix: unix_now(),
            // Known from the server's greeting only, so it stands for the connection as well.
            max_payload: connected.then(|| self.bus.client.max_payload()),
            random: &mut random,
            sign: &|blob, now, good_for| store.signed_url(blob, now, good_for),
        };
        for action in self.plan.step(&mut now) {
            match action {
                Action::Write(job) => self.hand_over(job)?,
                Action::Put(made, bytes) => self.tasks.put(made, bytes),
                Action::Ask(questions) => self.tasks.ask(questions),
                Action::Send(batch) => self.tasks.send(batch),
            }
        }
        Ok(())
    }

    /// Gives a job to the writer. The loop must not wait for a disk that hangs, so a job that finds the queue full
    /// counts as failed.
    fn hand_over(&mut self, job: Job) -> anyhow::Result<()> {
        let is_registry = matches!(job, Job::WriteRegistry(_));
        match self.jobs.try_send(job) {
            Ok(()) => self.open_writes += usize::from(is_registry),
            Err(TrySendError::Full(job)) => self.plan.job_failed(job, now_ms()),
            Err(TrySendError::Disconnected(_)) => bail!("the thread of the state folder ended"),
        }
        Ok(())
    }

    /// Processes a result of the writer.
    fn on_event(&mut self, event: StateEvent) -> anyhow::Result<()> {
        self.open_writes -= usize::from(matches!(event, StateEvent::RegistryWritten(_)));
        match event {
            StateEvent::Inventory(agents) => {
                self.plan.inventory(&agents, now_ms());
                self.metrics.inventory_good.set(1);
            }
            StateEvent::Committed(mut committed) => {
                self.metrics.blob_bytes.set(committed.bytes.len() as i64);
                self.undeleted.append(&mut committed.gone);
                if !self.undeleted.is_empty() {
                    self.tasks.delete(std::mem::take(&mut self.undeleted));
                }
                self.plan.committed(committed, now_ms());
            }
            StateEvent::Failed(error) => {
                self.metrics.inventory_good.set(0);
                self.plan.commit_failed(now_ms());
                // Without any version there is nothing that could stay in use.
                if !self.options.watch || !self.plan.has_version() {
                    return Err(error);
                }
                self.log_failure(format!(
                    "cannot use the inventory; the last good version stays in use: {error:#}"
                ));
            }
            StateEvent::Patch { from, to, patch } => self.plan.patch(from, to, patch),
            // The API shows the state on disk.
            StateEvent::RegistryWritten(Ok(())) => *self.shared.lock() = self.plan.registry.clone(),
            StateEvent::RegistryWritten(Err(error)) => {
                // If it is lost, each agent must report once.
                self.log_failure(format!("cannot save the agents' versions: {error}"));
                self.plan.registry_failed(now_ms());
            }
        }
        Ok(())
    }

    fn done(&mut self, done: Done) {
        match done {
            Done::Put { version, result } => {
                if let Err(error) = &result {
                    self.log_failure(format!(
                        "cannot store the blob; the fleet keeps the previous version: {error:#}"
                    ));
                }
                self.plan.put(version, result.is_ok(), now_ms());
            }
            Done::Deleted { failed, problem } => {
                self.undeleted.extend(failed);
                self.undeleted.truncate(MAX_UNDELETED);
                if let Some(error) = problem {
                    self.log_failure(format!(
                        "cannot delete an old blob; trying again with the next version: {error:#}"
                    ));
                }
            }
            Done::Asked => {}
            Done::Sent {
                version,
                messages,
                bytes,
                result,
            } => {
                self.metrics.sent.inc_by(messages);
                self.metrics.sent_bytes.inc_by(bytes);
                self.plan.sent(version, bytes);
                if let Err(error) = result {
                    self.log_failure(format!(
                        "cannot send the announcements; agents are asked again: {error:#}"
                    ));
                }
            }
        }
    }

    /// Logs a failure; repeats of the last one are rate-limited.
    fn log_failure(&mut self, text: String) {
        // A different failure is news, however soon it follows.
        if text == self.last_failure && self.failures.admit_any().is_none() {
            return;
        }
        tracing::error!("{text}");
        self.last_failure = text;
    }

    /// Writes the registry a last time, unless the disk hangs.
    async fn write_last(&mut self) {
        let registry = serde_json::to_vec(&self.plan.registry).unwrap_or_default();
        // A full queue means a disk that hangs; the process must end nevertheless.
        if self.jobs.try_send(Job::WriteRegistry(registry)).is_err() {
            tracing::warn!("{NO_LAST_WRITE}");
            return;
        }
        // Results of earlier writes come first.
        let written = all_written(&mut self.events, self.open_writes + 1);
        if tokio::time::timeout(LAST_WRITE, written).await.is_err() {
            tracing::warn!("{NO_LAST_WRITE}");
        }
    }
}

/// Waits for the results of this many writes of the registry.
async fn all_written(events: &mut Receiver<StateEvent>, mut writes: usize) {
    while writes > 0
        && let Some(event) = events.recv().await
    {
        writes -= usize::from(matches!(event, StateEvent::RegistryWritten(_)));
    }
}

const NO_LAST_WRITE: &str =
    "the state folder does not answer; agents are asked again at the next start";

fn random() -> u64 {
    // Linux's random source does not fail once seeded. A predictable number is tolerable: replies
    // are still matched to the agent.
    match rand::generate(&rand::SystemRandom::new()) {
        Ok(random) => u64::from_ne_bytes(random.expose()),
        Err(_) => fastrand::u64(..),
    }
}

/// Returns all metric families, for the metrics reference.
#[cfg(test)]
pub(crate) fn metric_families() -> Vec<prometheus::proto::MetricFamily> {
    PublisherMetrics::new()
        .expect("the names are valid")
        .registry
        .gather()
}

/// Command-line options of the subcommand `publish`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PublishOptions {
    #[command(flatten)]
    pub source: InventoryOptions,
    /// State folder (ids, versions, reports); keep it, and never share it between publishers
    #[arg(long, value_name = "FOLDER")]
    pub state: PathBuf,
    /// Write the records to this local file, without NATS and blobstore
    #[arg(long, value_name = "FILE", conflicts_with = "nats")]
    pub local: Option<PathBuf>,
    #[command(flatten)]
    pub attributes: FileOptions,
    /// NATS servers, tls://HOST:PORT, separated by commas
    #[arg(
        long,
        value_name = "URL",
        value_delimiter = ',',
        requires = "ca",
        required_unless_present = "local"
    )]
    pub nats: Vec<String>,
    #[command(flatten)]
    pub tls: TlsOptions,
    #[command(flatten)]
    pub store: StoreOptions,
    /// Keep running, publish changes and update lagging agents
    #[arg(long)]
    pub watch: bool,
    /// Without --watch: time limit for the agents, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub timeout: u64,
    /// Start above this version; needed only if agents cannot report their versions
    #[arg(long, value_name = "VERSION", default_value_t = 0, value_parser = value_parser!(u64).range(0..LAST_VERSION))]
    pub above: u64,
    /// Accept an inventory that removes up to this many instances in one version
    #[arg(long, value_name = "INSTANCES")]
    pub confirm_removals: Option<usize>,
    /// Bandwidth in bytes per second, for blob downloads and for messages separately
    #[arg(long, value_name = "BYTES", default_value_t = 125_000_000)]
    pub bandwidth: u64,
    /// Bytes of old datasets to keep for patches, in the state folder and in the blobstore separately
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 20)]
    pub keep_bytes: u64,
    /// Validity of signed links to a blob, in seconds; S3 allows at most a week
    #[arg(long, value_name = "SECONDS", default_value_t = 86_400, value_parser = value_parser!(u64).range(1..=604_800))]
    pub links_good_for: u64,
    /// Send neither patches nor spreading hints, like a director
    #[arg(long)]
    pub no_patches: bool,
    /// HTTPS API for status and changes; requires a client certificate of --tls-ca
    #[arg(long, value_name = "ADDRESS", requires = "watch")]
    pub api: Option<SocketAddr>,
    /// Common names of the certificates that may use the API, separated by commas
    #[arg(long, value_name = "NAME", value_delimiter = ',', requires = "api", default_value = PUBLISHER)]
    pub api_clients: Vec<String>,
    /// Prometheus metrics at http://ADDRESS/metrics
    #[arg(long, value_name = "ADDRESS", requires = "watch")]
    pub metrics: Option<SocketAddr>,
}

/// Implements `publish --local`: writes the dataset to a file of this machine whenever the inventory changes,
/// without bus or blobstore.
fn write_locally(
    options: &PublishOptions,
    mut writer: StateWriter,
    file: &Path,
) -> anyhow::Result<()> {
    atomic::sweep(file);
    let failures = LineLimit::new();
    loop {
        let written = writer
            .poll()
            .map(|read| read.and_then(|_| write_version(options, &mut writer, file)));
        match written {
            Some(Ok(())) if !options.watch => return Ok(()),
            Some(Err(error)) if options.watch && writer.newest().is_some() => {
                // Other errors are in the inventory, whose next change is noticed by its stamps.
                if is_of_the_disk(&error) {
                    writer.retry();
                }
                // A full disk fails every two seconds, and may be the one that keeps the log.
                if let Some(omitted) = failures.admit_any() {
                    tracing::error!(
                        omitted,
                        "cannot use the inventory; the last good version stays in use: {error:#}"
                    );
                }
            }
            Some(Err(error)) => return Err(error),
            Some(Ok(())) | None => {}
        }
        std::thread::sleep(TICK);
    }
}

fn write_version(
    options: &PublishOptions,
    writer: &mut StateWriter,
    file: &Path,
) -> anyhow::Result<()> {
    let committed = writer.commit(options.above)?;
    // The server reads the file again whenever it is replaced.
    let present = bounded::read_at_most(file, committed.bytes.len() as u64).ok();
    if present.as_deref() != Some(&committed.bytes) {
        atomic::replace(file, &committed.bytes, options.attributes.of(file))?;
        let version = committed.made.version;
        tracing::info!(version, file = %file.display(), "records written");
    }
    Ok(())
}

//----------- Tasks ----------------------------------------------------------

/// Time limit for a batch of messages, in addition to the time that the bandwidth requires.
const SEND_DEADLINE: Duration = Duration::from_secs(10);

/// Lead over the bandwidth limit below which the sender does not pause.
const SLACK: Duration = Duration::from_millis(5);

/// The result of a task.
#[derive(Debug)]
enum Done {
    Put {
        version: u64,
        result: anyhow::Result<()>,
    },
    Deleted {
        failed: Vec<CommittedVersion>,
        /// Error of the last one that failed.
        problem: Option<anyhow::Error>,
    },
    Asked,
    Sent {
        version: u64,
        messages: u64,
        bytes: u64,
        result: anyhow::Result<()>,
    },
}

#[derive(Debug)]
struct Tasks {
    client: Client,
    store: Store,
    process: String,
    bandwidth: u64,
    running: JoinSet<Done>,
    putting: Option<AbortHandle>,
    sending: Option<AbortHandle>,
}

impl Tasks {
    /// Creates an empty set. `process` is the second token of the reply subjects.
    fn new(client: Client, store: Store, process: String, bandwidth: u64) -> Self {
        Self {
            client,
            store,
            process,
            bandwidth: bandwidth.max(1),
            running: JoinSet::new(),
            putting: None,
            sending: None,
        }
    }

    /// Waits for the next result; never returns without tasks.
    async fn next(&mut self) -> Done {
        loop {
            match self.running.join_next().await {
                None => std::future::pending().await,
                Some(Ok(done)) => return done,
                // Aborted in favour of a newer version.
                Some(Err(_)) => {}
            }
        }
    }

    /// Uploads a blob; aborts an older upload.
    fn put(&mut self, made: CommittedVersion, bytes: Bytes) {
        if let Some(older) = self.putting.take() {
            older.abort();
        }
        let store = self.store.clone();
        self.putting = Some(self.running.spawn(async move {
            let result = store.put(&made.blob, &bytes).await.map_err(Into::into);
            Done::Put {
                version: made.version,
                result,
            }
        }));
    }

    fn delete(&mut self, gone: Vec<CommittedVersion>) {
        let store = self.store.clone();
        self.running.spawn(async move {
            let mut failed = Vec::new();
            let mut problem = None;
            for made in gone {
                if let Err(error) = store.delete(&made.blob).await {
                    let place = format!("version {}, blob {}", made.version, made.blob);
                    problem = Some(anyhow::Error::from(error).context(place));
                    failed.push(made);
                }
            }
            Done::Deleted { failed, problem }
        });
    }

    /// Requests reports from agents by announcing version 0, which every agent has.
    fn ask(&mut self, questions: Vec<(String, AgentCall)>) {
        let client = self.client.clone();
        let process = self.process.clone();
        // Not counted against the bandwidth: a question has a few hundred bytes, and the answer
        // decides the next version.
        self.running.spawn(async move {
            let question = Announcement {
                source: BlobLocation::Blob("-".to_owned()),
                digest: crate::digest::sha256(b""),
                version: 0,
                extra: None,
            };
            let asked = async {
                for (agent, call) in questions {
                    let body =
                        question.write(&message::reply_subject(&process, &agent, &call.token()));
                    // The agent reports on its next connection anyway.
                    let _ = client
                        .publish(message::agent_subject(&agent), body.into())
                        .await;
                }
            };
            let _ = tokio::time::timeout(SEND_DEADLINE, asked).await;
            Done::Asked
        });
    }

    /// Sends a batch at the configured bandwidth; aborts an older batch.
    fn send(&mut self, batch: Vec<Outgoing>) {
        if let Some(older) = self.sending.take() {
            older.abort();
        }
        let client = self.client.clone();
        let process = self.process.clone();
        let bandwidth = self.bandwidth;
        self.sending = Some(self.running.spawn(async move {
            let version = batch.first().map_or(0, |first| first.call.version);
            let mut messages = 0_u64;
            let mut bytes = 0_u64;
            let sent = async {
                let begun = Instant::now();
                for Outgoing {
                    agent,
                    call,
                    announcement,
                } in batch
                {
                    let body = announcement.write(&message::reply_subject(
                        &process,
                        &agent,
                        &call.token(),
                    ));
                    let length = body.len() as u64;
                    let publish = client.publish(message::agent_subject(&agent), body.into());
                    // If the connection hangs, the queue is full and `publish` waits without end.
                    let published = tokio::time::timeout(SEND_DEADLINE, publish).await;
                    published
                        .context("NATS accepts no messages")?
                        .with_context(|| format!("to agent {agent}"))?;
                    messages += 1;
                    bytes += length;
                    let planned = Duration::from_secs_f64(bytes as f64 / bandwidth as f64);
                    let ahead = planned.saturating_sub(begun.elapsed());
                    // A sleep of a millisecond for each message would cost more than the messages.
                    if ahead > SLACK {
                        tokio::time::sleep(ahead).await;
                    }
                }
                Ok(())
            };
            let result = sent.await;
            Done::Sent {
                version,
                messages,
                bytes,
                result,
            }
        }));
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn every_write_is_awaited() {
        let (said, mut events) = tokio::sync::mpsc::channel(2);
        said.try_send(StateEvent::RegistryWritten(Ok(()))).unwrap();
        let early = all_written(&mut events, 2).now_or_never();
        assert_eq!(early, None, "a write is open");
        said.try_send(StateEvent::RegistryWritten(Ok(()))).unwrap();
        all_written(&mut events, 1).await;
    }

    #[test]
    fn nonces_differ() {
        assert_ne!(random(), random());
    }

    use std::collections::HashMap;

    use clap::Parser as _;

    use super::{registry::AgentRegistry, state::StateError};
    use crate::tests::FakeBus;

    #[derive(clap::Parser)]
    struct CommandLine {
        #[command(flatten)]
        options: PublishOptions,
    }

    /// Options of a publisher whose files are in a folder.
    fn options(folder: &Path, more: &str) -> PublishOptions {
        let place = folder.display();
        let words = format!(
            "publish --state {place}/state --inventory {place}/inventory.yml --local {place}/records.json {more}"
        );
        CommandLine::parse_from(words.split_whitespace()).options
    }

    const INVENTORY: &str = "deployments: [{name: d, instance_groups: [{name: g, instances: [{id: a, networks: {n: 10.0.0.1}}]}]}]";

    #[tokio::test]
    async fn changes_write_records_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let inventory = |text: &str| std::fs::write(path.join("inventory.yml"), text).unwrap();
        inventory("deployments: x");
        let failed = run(options(path, ""), |_| {}).await.unwrap_err();
        let start = format!("{}: ", path.join("inventory.yml").display());
        assert!(failed.to_string().starts_with(&start), "{failed}");
        inventory(INVENTORY);
        assert!(run(options(path, "--above 5"), |_| {}).await.unwrap());
        let read = || std::fs::read_to_string(path.join("records.json")).unwrap();
        assert!(read().contains(r#""version":6"#), "{}", read());
        let inode = || {
            let facts = std::fs::metadata(path.join("records.json")).unwrap();
            std::os::unix::fs::MetadataExt::ino(&facts)
        };
        let before = inode();
        assert!(run(options(path, ""), |_| {}).await.unwrap());
        assert_eq!(inode(), before, "nothing changed");
        std::fs::write(path.join("records.json"), "x").unwrap();
        assert!(run(options(path, ""), |_| {}).await.unwrap());
        assert!(read().contains(r#""version":6"#), "{}", read());
        let facts = std::fs::metadata(path.join("records.json")).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::mode(&facts.permissions());
        assert_eq!(mode & 0o777, 0o640);
        inventory(&INVENTORY.replace("10.0.0.1", "10.0.0.2"));
        assert!(run(options(path, ""), |_| {}).await.unwrap());
        assert!(read().contains(r#""version":7"#), "{}", read());
    }

    /// A distributor without a thread for its state folder.
    struct Bench {
        distributor: Distributor,
        bus: FakeBus,
        work: mpsc::Receiver<Job>,
        said: tokio::sync::mpsc::Sender<StateEvent>,
        folder: tempfile::TempDir,
    }

    impl Bench {
        async fn new(more: &str, jobs: usize) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let options = options(folder.path(), more);
            let bus = FakeBus::start().await;
            let store = StoreOptions {
                blobstore: Some(format!("file://{}", folder.path().display())),
                ..options.store.clone()
            };
            let store = Store::open(&store, None).unwrap();
            let settings = PlanSettings {
                bandwidth: 1_000_000,
                patches: true,
                links_good_for: Duration::from_secs(10),
            };
            let plan = Plan::new(settings, AgentRegistry::default(), None, 0);
            let (jobs, work) = mpsc::sync_channel(jobs);
            let (said, events) = tokio::sync::mpsc::channel(8);
            let client = bus.bus.client.clone();
            let distributor = Distributor {
                options,
                plan,
                jobs,
                events,
                open_writes: 0,
                tasks: Tasks::new(client, store.clone(), "p".to_owned(), 1_000_000_000),
                bus: bus.bus.clone(),
                store,
                shared: Shared::default(),
                metrics: PublisherMetrics::new().unwrap(),
                failures: LineLimit::new(),
                last_failure: String::new(),
                undeleted: Vec::new(),
            };
            Self {
                distributor,
                bus,
                work,
                said,
                folder,
            }
        }
    }

    fn version(version: u64, blob: &str) -> CommittedVersion {
        CommittedVersion {
            version,
            blob: blob.to_owned(),
            digest: "sha256:x".to_owned(),
            at: 0,
        }
    }

    #[tokio::test]
    async fn state_folder_events_are_taken() {
        let mut bench = Bench::new("", 2).await;
        let distributor = &mut bench.distributor;
        let agents = vec!["a".to_owned()];
        distributor.on_event(StateEvent::Inventory(agents)).unwrap();
        assert_eq!(distributor.metrics.inventory_good.get(), 1);
        assert_eq!(distributor.plan.registry.count().agents, 1);
        // Each write is counted until its result.
        distributor
            .hand_over(Job::WriteRegistry(Vec::new()))
            .unwrap();
        distributor.hand_over(Job::Commit { floor: 3 }).unwrap();
        assert_eq!(distributor.open_writes, 1);
        // A full queue fails the job.
        distributor.hand_over(Job::Commit { floor: 4 }).unwrap();
        assert!(matches!(bench.work.recv(), Ok(Job::WriteRegistry(_))));
        assert!(matches!(bench.work.recv(), Ok(Job::Commit { floor: 3 })));
        assert!(bench.work.try_recv().is_err());
        assert_eq!(distributor.shared.lock().count().agents, 0);
        distributor
            .on_event(StateEvent::RegistryWritten(Ok(())))
            .unwrap();
        assert_eq!(distributor.open_writes, 0);
        assert_eq!(distributor.shared.lock().count().agents, 1);
        // A single publication ends with a failure, a running one without a version.
        let failed = || StateEvent::Failed(anyhow::anyhow!("wrong"));
        for watch in [false, true] {
            distributor.options.watch = watch;
            let error = distributor.on_event(failed()).unwrap_err();
            assert_eq!(error.to_string(), "wrong");
        }
        assert_eq!(distributor.metrics.inventory_good.get(), 0);
        let committed = state_writer::Committed {
            made: version(1, "b1"),
            bytes: Bytes::from_static(b"12345"),
            new: true,
            gone: Vec::new(),
        };
        distributor
            .on_event(StateEvent::Committed(committed))
            .unwrap();
        assert_eq!(distributor.metrics.blob_bytes.get(), 5);
        distributor.on_event(failed()).unwrap();
        assert_eq!(
            distributor.last_failure,
            "cannot use the inventory; the last good version stays in use: wrong"
        );
        distributor.options.watch = false;
        assert!(distributor.on_event(failed()).is_err());
        distributor.open_writes = 1;
        let full = StateError::NoMoreVersions(7);
        distributor
            .on_event(StateEvent::RegistryWritten(Err(full)))
            .unwrap();
        assert!(
            distributor
                .last_failure
                .starts_with("cannot save the agents' versions: version 7 is the highest possible")
        );
        drop(bench.work);
        let ended = distributor.hand_over(Job::Commit { floor: 0 }).unwrap_err();
        assert_eq!(ended.to_string(), "the thread of the state folder ended");
    }

    #[tokio::test]
    async fn last_write_is_awaited() {
        let mut bench = Bench::new("", 1).await;
        bench.distributor.open_writes = 2;
        for _ in 0..3 {
            let written = StateEvent::RegistryWritten(Ok(()));
            bench.said.send(written).await.unwrap();
        }
        bench.distributor.write_last().await;
        // All three results are taken, and no wait for a fourth remains.
        assert!(bench.distributor.events.try_recv().is_err());
        assert!(matches!(bench.work.try_recv(), Ok(Job::WriteRegistry(_))));
        // A full queue is not waited for.
        bench
            .distributor
            .jobs
            .send(Job::Commit { floor: 0 })
            .unwrap();
        bench.distributor.write_last().await;
        assert!(matches!(bench.work.try_recv(), Ok(Job::Commit { .. })));
    }

    #[tokio::test]
    async fn single_publication_has_a_result() {
        let mut bench = Bench::new("", 1).await;
        let later = tokio::time::Instant::now() + Duration::from_secs(3600);
        let now = tokio::time::Instant::now();
        let distributor = &mut bench.distributor;
        assert_eq!(distributor.result(later).await.unwrap(), None);
        drop(bench.work);
        let none = distributor.result(now).await.unwrap_err();
        assert_eq!(
            none.to_string(),
            "no version was announced within the timeout: the log shows whether the inventory, NATS, the blobstore or \
             the state folder is the cause"
        );
    }

    #[tokio::test]
    async fn results_of_tasks_are_counted() {
        let mut bench = Bench::new("", 1).await;
        let distributor = &mut bench.distributor;
        let result = |fails: bool| {
            if fails {
                Err(anyhow::anyhow!("wrong"))
            } else {
                Ok(())
            }
        };
        for (done, failure) in [
            (
                Done::Put {
                    version: 1,
                    result: result(true),
                },
                "cannot store the blob; the fleet keeps the previous version: wrong",
            ),
            (
                Done::Deleted {
                    failed: vec![version(1, "b1")],
                    problem: result(true).err(),
                },
                "cannot delete an old blob; trying again with the next version: wrong",
            ),
            (
                Done::Sent {
                    version: 1,
                    messages: 2,
                    bytes: 30,
                    result: result(true),
                },
                "cannot send the announcements; agents are asked again: wrong",
            ),
        ] {
            distributor.done(done);
            assert_eq!(distributor.last_failure, failure);
        }
        distributor.last_failure.clear();
        for done in [
            Done::Put {
                version: 1,
                result: result(false),
            },
            Done::Deleted {
                failed: (2..=MAX_UNDELETED as u64 + 1)
                    .map(|number| version(number, "b"))
                    .collect(),
                problem: None,
            },
            Done::Asked,
            Done::Sent {
                version: 1,
                messages: 3,
                bytes: 400,
                result: result(false),
            },
        ] {
            distributor.done(done);
        }
        assert_eq!(distributor.last_failure, "");
        assert_eq!(distributor.undeleted.len(), MAX_UNDELETED);
        assert_eq!(distributor.metrics.sent.get(), 5);
        assert_eq!(distributor.metrics.sent_bytes.get(), 430);
    }

    #[tokio::test]
    async fn failed_deletions_are_repeated() {
        let mut bench = Bench::new("", 1).await;
        let path = bench.folder.path().join("b1");
        std::fs::write(&path, "blob").unwrap();
        let distributor = &mut bench.distributor;
        distributor.done(Done::Deleted {
            failed: vec![version(1, "b1")],
            problem: Some(anyhow::anyhow!("the blobstore hung")),
        });
        let committed = state_writer::Committed {
            made: version(3, "b3"),
            bytes: Bytes::new(),
            new: true,
            gone: vec![version(2, "b2")],
        };
        let event = StateEvent::Committed(committed);
        distributor.on_event(event).unwrap();
        let done = distributor.tasks.next().await;
        assert!(matches!(done, Done::Deleted { problem: None, .. }));
        assert!(!path.exists());
        assert_eq!(distributor.undeleted, []);
    }

    #[tokio::test]
    async fn metrics_show_the_plan() {
        let mut bench = Bench::new("", 1).await;
        let distributor = &mut bench.distributor;
        distributor.plan.registry.version = 7;
        (distributor.plan.ignored, distributor.plan.exceptions) = (3, 4);
        let count = Count {
            agents: 11,
            synced: 12,
            unverified: 13,
            disagreeing: 14,
            failing: 15,
            silent: 16,
        };
        // Counters only grow by what is new.
        for _ in 0..2 {
            distributor.metrics.set(&distributor.plan, count);
        }
        let mut values = HashMap::new();
        for family in distributor.metrics.registry.gather() {
            let metric = &family.get_metric()[0];
            let value = metric.get_gauge().get_value() + metric.get_counter().get_value();
            let name = family.name().strip_prefix("bosh_dns_sync_").unwrap();
            values.insert(name.to_owned(), value as u64);
        }
        let expected = [
            ("agents", 11),
            ("agents_disagreeing", 14),
            ("agents_failing", 15),
            ("agents_silent", 16),
            ("agents_synced", 12),
            ("agents_unverified", 13),
            ("blob_bytes", 0),
            ("exceptions_total", 4),
            ("ignored_messages_total", 3),
            ("inventory_good", 0),
            ("message_bytes_total", 0),
            ("messages_total", 0),
            ("version", 7),
        ];
        let expected = expected.map(|(name, value)| (name.to_owned(), value));
        assert_eq!(values, HashMap::from(expected));
    }

    #[tokio::test]
    async fn tasks_store_ask_and_send() {
        let mut bench = Bench::new("", 1).await;
        let tasks = &mut bench.distributor.tasks;
        let path = bench.folder.path().join("b1");
        tasks.put(version(1, "b1"), Bytes::from_static(b"blob"));
        assert!(matches!(
            tasks.next().await,
            Done::Put {
                version: 1,
                result: Ok(())
            }
        ));
        assert_eq!(std::fs::read(&path).unwrap(), b"blob");
        // A blob that is gone already is deleted.
        tasks.delete(vec![version(1, "b1"), version(2, "b2")]);
        let deleted = |done: Done| matches!(done, Done::Deleted { problem: None, .. });
        assert!(deleted(tasks.next().await));
        assert!(!path.exists());
        let call = |version| AgentCall { version, nonce: 5 };
        tasks.ask(vec![("a1".to_owned(), call(0)), ("a2".to_owned(), call(0))]);
        assert!(matches!(tasks.next().await, Done::Asked));
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        for agent in ["a1", "a2"] {
            let token = call(0).token();
            let body = format!(
                r#"{{"protocol":3,"method":"sync_dns","arguments":["-","{empty}",0],"reply_to":"director.p.{agent}.{token}"}}"#
            );
            assert_eq!(bench.bus.next().await, (format!("agent.{agent}"), body));
        }
        let outgoing = |agent: &str| Outgoing {
            agent: agent.to_owned(),
            call: call(6),
            announcement: Arc::new(Announcement {
                source: BlobLocation::Blob("b".to_owned()),
                digest: "d".to_owned(),
                version: 6,
                extra: None,
            }),
        };
        tasks.send(vec![outgoing("a1"), outgoing("a2")]);
        let Done::Sent {
            version,
            messages,
            bytes,
            result,
        } = tasks.next().await
        else {
            panic!("not sent");
        };
        assert!(result.is_ok());
        let mut length = 0;
        for agent in ["a1", "a2"] {
            let token = call(6).token();
            let body = format!(
                r#"{{"protocol":3,"method":"sync_dns","arguments":["b","d",6],"reply_to":"director.p.{agent}.{token}"}}"#
            );
            length += body.len() as u64;
            assert_eq!(bench.bus.next().await, (format!("agent.{agent}"), body));
        }
        assert_eq!((version, messages, bytes), (6, 2, length));
        tasks.send(Vec::new());
        assert!(matches!(
            tasks.next().await,
            Done::Sent {
                version: 0,
                messages: 0,
                bytes: 0,
                result: Ok(())
            }
        ));
    }
}
