//! The publisher: makes versions, puts their blobs, tells the fleet, keeps who has what.
//!
//! One task owns everything. The order makes a crash harmless: the version is committed, then
//! the blob is put, then it is announced; at the start the newest version goes the same way
//! again, to all who are not known to have it.

pub mod api;
pub mod book;
mod metrics;
pub mod source;
pub mod state;

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use anyhow::Context;
use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use futures::{StreamExt, stream::select};
use parking_lot::Mutex;

use self::{
    api::Desk,
    book::{Book, Count},
    metrics::Metrics,
    source::{InventoryOptions, Stamps},
    state::{Folder, Made, State, StateError},
};
use crate::{
    bus::{Bus, BusOptions},
    dataset::Dataset,
    files::{self, Permissions},
    message::{self, ASK, Announcement, Extra, Hello, Patch, Reply, Source},
    metrics_server,
    nats_config::PUBLISHER,
    patch,
    store::{Store, StoreOptions, unix_now},
    tls::TlsOptions,
};

/// How often files are looked at, and lagging agents.
const TICK: Duration = Duration::from_millis(100);

/// How often `agents.json` is written while it changes.
const BOOK_INTERVAL_MS: u64 = 1000;

/// Longest patch in a message: NATS takes a megabyte, and Base64 adds a third.
const LONGEST_PATCH: usize = 500_000;

/// Pause before a blob that could not be put is put again.
const PUT_PAUSE: Duration = Duration::from_secs(2);

/// Pause before what the disk refused is written again, in milliseconds.
const DISK_PAUSE_MS: u64 = 2000;

/// `publish`.
#[derive(Clone, Debug, clap::Args)]
pub struct PublishOptions {
    /// The inventory.
    #[command(flatten)]
    pub source: InventoryOptions,
    /// Folder of ids, versions and who has what; to be kept, and only one publisher has it
    #[arg(long, value_name = "FOLDER")]
    pub state: PathBuf,
    /// No bus and no blobstore: write the dataset to this file of this machine
    #[arg(long, value_name = "FILE", conflicts_with = "nats")]
    pub local: Option<PathBuf>,
    /// NATS servers, tls://HOST:PORT; several with commas
    #[arg(
        long,
        value_name = "URL",
        value_delimiter = ',',
        requires = "ca",
        required_unless_present = "local"
    )]
    pub nats: Vec<String>,
    /// Our certificates, for NATS and for the API.
    #[command(flatten)]
    pub tls: TlsOptions,
    /// The blobstore.
    #[command(flatten)]
    pub store: StoreOptions,
    /// Stay: publish whatever changes, bring back whoever lags
    #[arg(long)]
    pub watch: bool,
    /// Without --watch: how long agents are waited for, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub timeout: u64,
    /// Begin above this version, where the folder of a former publisher was lost
    #[arg(long, value_name = "VERSION", default_value_t = 0)]
    pub above: u64,
    /// Bytes a second that all downloads of whole blobs together may take
    #[arg(long, value_name = "BYTES", default_value_t = 125_000_000)]
    pub bandwidth: u64,
    /// How long signed links to a blob are good, in seconds; S3 takes a week at most
    #[arg(long, value_name = "SECONDS", default_value_t = 86_400, value_parser = clap::value_parser!(u64).range(1..=604_800))]
    pub links_good_for: u64,
    /// Send no patches and spread nothing, as a director
    #[arg(long)]
    pub no_patches: bool,
    /// HTTPS API for status and changes; asks for a certificate of --tls-ca
    #[arg(long, value_name = "ADDRESS", requires = "watch")]
    pub api: Option<std::net::SocketAddr>,
    /// Common names of the certificates that may use the API; several with commas
    #[arg(long, value_name = "NAME", value_delimiter = ',', requires = "api", default_value = PUBLISHER)]
    pub api_clients: Vec<String>,
    /// Prometheus metrics at http://ADDRESS/metrics
    #[arg(long, value_name = "ADDRESS", requires = "watch")]
    pub metrics: Option<std::net::SocketAddr>,
}

/// What others may look at while the publisher works.
pub type Shared = Arc<Mutex<Book>>;

/// The publisher of a fleet.
#[derive(Debug)]
struct Publisher {
    /// What was asked for.
    options: PublishOptions,
    /// The folder.
    folder: Folder,
    /// Ids and versions.
    state: State,
    /// Who has what.
    book: Book,
    /// A copy of it for the API.
    shared: Shared,
    /// The bus.
    bus: Bus,
    /// The blobstore.
    store: Store,
    /// The third token of our subjects: `director.<process>`.
    process: String,
    /// What is announced now.
    current: Option<Current>,
    /// Files as they were read last.
    stamps: Stamps,
    /// When they are read again although they are as they were: the disk refused what was made of them.
    read_again: Option<u64>,
    /// Whether the book changed since it was written, and when that was.
    unwritten: bool,
    /// When the book was written.
    written: u64,
    /// Counters.
    metrics: Metrics,
}

/// The version that is announced.
#[derive(Debug)]
struct Current {
    /// It.
    made: Made,
    /// Its bytes.
    bytes: Bytes,
    /// Where agents get it.
    source: Source,
    /// When that was signed, since 1970.
    signed: Duration,
    /// Patches to it, by the version they start from; `None`: too long, or that one is gone.
    patches: HashMap<u64, Option<Patch>>,
}

/// Runs `publish`. Returns whether all have the version.
pub async fn run(options: PublishOptions, progress: impl Fn(Count)) -> anyhow::Result<bool> {
    let folder = Folder::lock(&options.state)?;
    let state: State = folder.read("state.json")?.unwrap_or_default();
    if let Some(file) = options.local.clone() {
        return run_local(&options, &folder, state, &file).await.map(|()| true);
    }
    let tls =
        options.tls.clone().files().context("say --nats URL with its --tls-* files, or --local FILE")?;
    let bus_options = BusOptions { nats: options.nats.clone(), tls };
    anyhow::ensure!(options.store.blobstore.is_some(), "say where blobs are: --blobstore URL");
    let bus = Bus::connect(&bus_options, "bosh-dns-sync-publisher").await?;
    let store = Store::open(&options.store, Some(&bus))?;
    // Who has what is asked again where it cannot be read.
    let mut book: Book = folder.read("agents.json").unwrap_or_default().unwrap_or_default();
    book.hurry();
    let shared = Shared::default();
    if let (Some(address), true) = (options.api, options.watch) {
        api::spawn(
            address,
            bus_options.tls.clone(),
            options.api_clients.clone(),
            Desk { source: options.source.clone(), state: options.state.clone(), shared: shared.clone() },
        )
        .await?;
    }
    let metrics = Metrics::new()?;
    if let Some(address) = options.metrics {
        metrics_server::spawn(address, metrics.registry.clone()).await?;
    }
    let publisher = Publisher {
        process: state::blob_id(),
        options,
        folder,
        state,
        book,
        shared,
        bus,
        store,
        current: None,
        stamps: Stamps::new(),
        read_again: None,
        unwritten: true,
        written: 0,
        metrics,
    };
    publisher.run(progress).await
}

/// `--local`: the file alone.
async fn run_local(
    options: &PublishOptions,
    folder: &Folder,
    mut state: State,
    file: &std::path::Path,
) -> anyhow::Result<()> {
    let permissions = Permissions { mode: 0o640, ..Permissions::PRIVATE };
    files::sweep(file);
    let mut stamps = Stamps::new();
    let mut read_again = None;
    let mut ended = std::pin::pin!(crate::ended());
    loop {
        let now = options.source.stamps(&options.state);
        if now != stamps || read_again.is_some_and(|at| now_ms() >= at) {
            (stamps, read_again) = (now, None);
            let written = make(options, folder, &mut state).and_then(|_| {
                let newest = state.versions.last().context("no version was made")?;
                let bytes = folder.dataset(newest.version).context("the dataset is gone")?;
                if std::fs::read(file).ok().as_deref() != Some(&bytes) {
                    files::replace(file, &bytes, permissions)?;
                    tracing::info!(version = newest.version, file = %file.display(), "wrote the records");
                }
                Ok(folder.forget_old(&mut state, unix_now().as_secs())?)
            });
            match written {
                Err(error) if options.watch && !state.versions.is_empty() => {
                    tracing::error!("cannot use the inventory; the last good version stays: {error:#}");
                    read_again = is_of_the_disk(&error).then(|| now_ms() + DISK_PAUSE_MS);
                }
                Err(error) => return Err(error),
                Ok(_) => {}
            }
        }
        if !options.watch {
            return Ok(());
        }
        tokio::select! {
            () = tokio::time::sleep(TICK) => {}
            () = &mut ended => return Ok(()),
        }
    }
}

/// Makes a version if something changed; returns the agents of the inventory.
fn make(options: &PublishOptions, folder: &Folder, state: &mut State) -> anyhow::Result<Vec<String>> {
    let inventory = options.source.load(folder)?;
    let mut ids = state.ids.clone();
    let dataset = Dataset::build(&inventory, &mut ids);
    if folder.commit(state, ids, &dataset, options.above, unix_now().as_secs())? {
        let version = state.versions.last().map_or(0, |made| made.version);
        tracing::info!(version, rows = dataset.rows(), "made a new version of the records");
    }
    Ok(inventory.instances.into_iter().filter_map(|instance| instance.agent).collect())
}

impl Publisher {
    /// The loop.
    async fn run(mut self, progress: impl Fn(Count)) -> anyhow::Result<bool> {
        let own = self.bus.client.subscribe(format!("director.{}.>", self.process)).await?;
        let asked = self.bus.client.subscribe(format!("director.{ASK}.>")).await?;
        let mut messages = select(own, asked);
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let deadline = tokio::time::Instant::now() + Duration::from_secs(self.options.timeout);
        let mut put_again = tokio::time::Instant::now();
        let mut ended = std::pin::pin!(crate::ended());
        loop {
            tokio::select! {
                message = messages.next() => {
                    let message = message.context("the subscription ended")?;
                    self.heard(&message.subject, &message.payload);
                    continue;
                }
                _ = ticks.tick() => {}
                () = &mut ended => {
                    self.write_book()?;
                    let Count { agents, synced, .. } = self.book.count();
                    return Ok(self.options.watch || self.current.is_some() && synced == agents);
                }
            }
            self.look_at_files()?;
            if self.current.is_none()
                && tokio::time::Instant::now() >= put_again
                && let Err(error) = self.put().await
            {
                tracing::error!("cannot store the blob; the fleet keeps the previous version: {error:#}");
                put_again = tokio::time::Instant::now() + PUT_PAUSE;
            }
            self.announce().await?;
            let count = self.book.count();
            self.metrics.set(&self.book, count);
            progress(count);
            if self.unwritten
                && now_ms() >= self.written + BOOK_INTERVAL_MS
                && let Err(error) = self.write_book()
            {
                // Lost, it costs a question to each agent: the fleet does without it.
                tracing::error!("cannot write down which agent has which version: {error:#}");
                self.written = now_ms() + DISK_PAUSE_MS;
            }
            if self.options.watch {
                continue;
            }
            let done = self.current.is_some() && count.synced == count.agents;
            if done || tokio::time::Instant::now() >= deadline {
                self.write_book()?;
                anyhow::ensure!(self.current.is_some(), "the blob could not be put within the timeout");
                return Ok(done);
            }
        }
    }

    /// Makes a version where files changed. A bad inventory leaves the last good version.
    fn look_at_files(&mut self) -> anyhow::Result<()> {
        let now = self.options.source.stamps(&self.options.state);
        if now == self.stamps && self.read_again.is_none_or(|at| now_ms() < at) {
            return Ok(());
        }
        self.stamps = now;
        self.read_again = None;
        match make(&self.options, &self.folder, &mut self.state) {
            Ok(agents) => {
                self.book.set_agents(agents.iter().map(String::as_str));
                self.unwritten = true;
                self.metrics.inventory_good.set(1);
            }
            Err(error) if self.options.watch && !self.state.versions.is_empty() => {
                self.metrics.inventory_good.set(0);
                tracing::error!("cannot use the inventory; the last good version stays: {error:#}");
                self.read_again = is_of_the_disk(&error).then(|| now_ms() + DISK_PAUSE_MS);
            }
            Err(error) => return Err(error),
        }
        let newest = self.state.versions.last().map(|made| made.version);
        if self.current.as_ref().map(|current| current.made.version) != newest {
            self.current = None;
        }
        Ok(())
    }

    /// Puts the blob of the newest version; from then on it is announced.
    async fn put(&mut self) -> anyhow::Result<()> {
        let Some(made) = self.state.versions.last().cloned() else { return Ok(()) };
        let bytes: Bytes = self.folder.dataset(made.version).context("the dataset is gone")?.into();
        self.store.put(&made.blob, &bytes).await?;
        let (source, signed) = self.sign(&made);
        self.book.set_version(made.version, now_ms());
        self.metrics.blob_bytes.set(bytes.len() as i64);
        self.current = Some(Current { made, bytes, source, signed, patches: HashMap::new() });
        self.unwritten = true;
        for old in self.folder.forget_old(&mut self.state, unix_now().as_secs())? {
            if let Err(error) = self.store.delete(&old.blob).await {
                tracing::warn!(
                    version = old.version,
                    "cannot delete an old blob from the blobstore: {error}"
                );
            }
        }
        Ok(())
    }

    /// Where agents get a version, and when that was signed.
    fn sign(&self, made: &Made) -> (Source, Duration) {
        let (now, good_for) = (unix_now(), Duration::from_secs(self.options.links_good_for));
        let source = match self.store.signed_url(&made.blob, now, good_for) {
            Some(url) => Source::Signed { url, headers: serde_json::Map::new() },
            None => Source::Blob(made.blob.clone()),
        };
        (source, now)
    }

    /// Tells all who are due.
    async fn announce(&mut self) -> anyhow::Result<()> {
        // What is sent without a bus waits for it, and we with it.
        if self.bus.client.connection_state() != async_nats::connection::State::Connected {
            return Ok(());
        }
        let now = now_ms();
        let due = self.book.due(now);
        if due.is_empty() {
            return Ok(());
        }
        // A link is signed once a version, and anew when whoever comes late would find it over.
        let half = Duration::from_secs(self.options.links_good_for) / 2;
        let Some(current) = &self.current else { return Ok(()) };
        if is_over(current.signed, half, unix_now()) {
            let (source, signed) = self.sign(&current.made);
            self.current = self.current.take().map(|current| Current { source, signed, ..current });
        }
        let Some(current) = &mut self.current else { return Ok(()) };
        // Whether a patch fits is known to the agent only: all may come for the blob.
        let spread = match self.options.no_patches {
            true => 0,
            false => (due.len() * current.bytes.len()) as u64 * 1000 / self.options.bandwidth.max(1),
        };
        let mut announcement = Announcement {
            source: current.source.clone(),
            digest: current.made.digest.clone(),
            version: current.made.version,
            extra: None,
        };
        for (agent, has) in due {
            let patch = match self.options.no_patches {
                true => None,
                false => current.patch(has, &self.folder),
            };
            announcement.extra =
                (patch.is_some() || spread > 0).then_some(Extra { patch, spread_ms: spread });
            let request = format!("{}-{:08x}", current.made.version, fastrand::u32(..));
            let body = announcement.write(&message::reply_subject(&self.process, &agent, &request));
            self.book.bytes_sent += body.len() as u64;
            self.metrics.sent.inc();
            self.metrics.sent_bytes.inc_by(body.len() as u64);
            self.bus.client.publish(message::agent_subject(&agent), body.into()).await?;
            self.book.asked(&agent, now, spread, fastrand::f64());
        }
        self.unwritten = true;
        Ok(())
    }

    /// A message came.
    fn heard(&mut self, subject: &str, body: &[u8]) {
        let Some((agent, request)) = message::read_reply_subject(subject) else { return };
        let now = now_ms();
        self.unwritten = true;
        if subject.split('.').nth(1) == Some(ASK) {
            let Ok(Hello { version }) = serde_json::from_slice(body) else { return };
            if self.book.said(agent, version, now) {
                tracing::error!(
                    agent,
                    version,
                    ours = self.book.version,
                    "an agent has a higher version than there is and takes nothing lower: another publisher, \
                     or the folder of state was lost; start with `--above {version}`"
                );
            }
            return;
        }
        let Some(version) = request.split('-').next().and_then(|version| version.parse().ok()) else {
            return;
        };
        let reply = Reply::read(body);
        if let Reply::Exception(problem) = &reply
            && version >= self.book.version
        {
            self.metrics.exceptions.inc();
            tracing::warn!(agent, version, "the agent could not take the version: {problem}");
        }
        self.book.replied(agent, version, reply, now, fastrand::f64());
    }

    /// Writes who has what.
    fn write_book(&mut self) -> anyhow::Result<()> {
        self.folder.write("agents.json", &self.book)?;
        // The API shows what is on disk; nothing panics while it is locked.
        *self.shared.lock() = self.book.clone();
        (self.unwritten, self.written) = (false, now_ms());
        Ok(())
    }
}

impl Current {
    /// The patch from a version, if there can be one that is short.
    fn patch(&mut self, from: u64, folder: &Folder) -> Option<Patch> {
        let Self { made: _, bytes, source: _, signed: _, patches } = self;
        let make = || {
            let old = folder.dataset(from)?;
            let frame = patch::make(&old, bytes)
                .inspect_err(|error| {
                    tracing::warn!("cannot make a patch; agents fetch the whole blob: {error}")
                })
                .ok()?;
            (frame.len() <= LONGEST_PATCH.min(bytes.len()))
                .then(|| Patch { from, zstd: STANDARD.encode(frame) })
        };
        patches.entry(from).or_insert_with(make).clone()
    }
}

/// Whether an inventory was not taken because a file could not be written: that may go better later,
/// although the inventory stays as it is.
fn is_of_the_disk(error: &anyhow::Error) -> bool {
    error.is::<StateError>() || error.is::<files::ReplaceError>()
}

/// Whether so much time has passed since `signed`; a clock that was set back counts as that.
fn is_over(signed: Duration, after: Duration, now: Duration) -> bool {
    now.checked_sub(signed).is_none_or(|age| age >= after)
}

/// Milliseconds since 1970 as the clock said when the process began, and steady since: a clock
/// that is set does not keep anybody waiting.
pub(crate) fn now_ms() -> u64 {
    static BEGUN: OnceLock<(Instant, Duration)> = OnceLock::new();
    let (begun, clock) = BEGUN.get_or_init(|| (Instant::now(), unix_now()));
    (*clock + begun.elapsed()).as_millis() as u64
}
