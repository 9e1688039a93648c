//! The agent: hears of versions, fetches and checks them, replaces the files.
//!
//! One task reads the bus and answers what cannot be understood; one applies versions, the
//! newest first: an announcement that came meanwhile is answered by what is there then.

mod apply;
mod metrics;

use std::{path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context;
use futures::StreamExt;
use tokio::sync::{mpsc, watch};

use self::{apply::Applier, metrics::Metrics};
use crate::{
    bus::{Bus, BusOptions},
    files::Permissions,
    message::{self, ASK, Announcement, Hello, Received, Reply},
    metrics_server,
    store::{Store, StoreOptions},
};

/// What `/etc/hosts` becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum HostsMode {
    /// It is left alone.
    Off,
    /// A marked block of it is ours.
    Block,
    /// It is replaced as a whole, as a BOSH agent does.
    Replaced,
}

/// `agent`.
#[derive(Clone, Debug, clap::Args)]
pub struct AgentOptions {
    /// Our id: the agent_id of the inventory
    #[arg(long, value_name = "ID")]
    pub id: String,
    /// Beside a real agent: listen, fetch and check, neither reply nor write
    #[arg(long)]
    pub mute: bool,
    /// The bus.
    #[command(flatten)]
    pub bus: BusOptions,
    /// The blobstore.
    #[command(flatten)]
    pub store: StoreOptions,
    /// The file that the DNS server reads
    #[arg(long, value_name = "FILE", default_value = "/var/vcap/instance/dns/records.json")]
    pub records: PathBuf,
    /// Mode of the file, octal
    #[arg(long, value_name = "MODE", default_value = "640", value_parser = octal)]
    pub mode: u32,
    /// Owner of the file, by number; ours unless said
    #[arg(long, value_name = "UID")]
    pub user: Option<u32>,
    /// Group of the file, by number; ours unless said
    #[arg(long, value_name = "GID")]
    pub group: Option<u32>,
    /// What becomes of the hosts file
    #[arg(long, value_enum, default_value_t = HostsMode::Off)]
    pub hosts: HostsMode,
    /// The hosts file
    #[arg(long, value_name = "FILE", default_value = "/etc/hosts")]
    pub hosts_file: PathBuf,
    /// Longest wait before the publisher is asked for what was missed, after a connection, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 2000)]
    pub ask_jitter: u64,
    /// How often the publisher is told what is here, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub ask_every: u64,
    /// Prometheus metrics at http://ADDRESS/metrics
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<std::net::SocketAddr>,
}

impl AgentOptions {
    /// Mode and owner of `records.json`.
    fn permissions(&self) -> Permissions {
        Permissions { mode: self.mode, user: self.user, group: self.group }
    }
}

/// An announcement and where its reply goes.
type Work = (Announcement, String);

/// Runs until the process is told to end.
pub async fn run(options: AgentOptions) -> anyhow::Result<()> {
    let bus = Bus::connect(&options.bus, &options.id).await?;
    let store = Store::open(&options.store, Some(&bus))?;
    let metrics = Arc::new(Metrics::new()?);
    if let Some(address) = options.metrics {
        metrics_server::spawn(address, metrics.registry.clone()).await?;
    }
    let applier = Applier::new(&options, store, metrics.clone());
    tracing::info!(id = options.id, version = applier.version(), mute = options.mute, "agent started");
    let (queue, work) = mpsc::channel(1024);
    let (version, announced) = (applier.watch_version(), applier.announced());
    let worker = tokio::spawn(apply_all(applier, work, bus.clone(), options.mute));
    if !options.mute {
        tokio::spawn(ask(bus.clone(), options.clone(), version));
    }
    let listening = listen(&bus, &options, &queue, &announced);
    tokio::select! {
        ended = listening => ended,
        ended = worker => ended.context("the task that applies versions failed"),
        () = crate::ended() => {
            // What is being written is written beside and renamed: it is the old one or the new one.
            // A last reply may be on its way; without a bus there is none.
            let _ = tokio::time::timeout(Duration::from_secs(1), bus.client.flush()).await;
            Ok(())
        }
    }
}

/// Reads the bus.
async fn listen(
    bus: &Bus,
    options: &AgentOptions,
    queue: &mpsc::Sender<Work>,
    announced: &watch::Sender<u64>,
) -> anyhow::Result<()> {
    let mut messages = bus.client.subscribe(message::agent_subject(&options.id)).await?;
    while let Some(message) = messages.next().await {
        let Some(Received { reply_to, call }) = message::read_call(&message.payload) else {
            tracing::warn!("ignored a message that is not a call");
            continue;
        };
        match call {
            Ok(announcement) => {
                announced.send_if_modified(|newest| {
                    let newer = announcement.version > *newest;
                    *newest = announcement.version.max(*newest);
                    newer
                });
                queue.send((announcement, reply_to)).await?;
            }
            // A real agent answers all that is not ours to know.
            Err(problem) if !options.mute => {
                reply(bus, &reply_to, Reply::Exception(problem.to_string())).await
            }
            Err(_) => {}
        }
    }
    anyhow::bail!("the subscription ended")
}

/// Applies what is announced; several announcements that wait are settled by the newest.
async fn apply_all(mut applier: Applier, mut work: mpsc::Receiver<Work>, bus: Bus, mute: bool) {
    let mut waiting: Vec<Work> = Vec::new();
    while work.recv_many(&mut waiting, 1024).await > 0 {
        waiting.sort_by_key(|(announcement, _)| std::cmp::Reverse(announcement.version));
        for (announcement, reply_to) in waiting.drain(..) {
            let done = applier.apply(&announcement).await;
            if let Err(problem) = &done {
                tracing::error!(
                    version = announcement.version,
                    "cannot take the announced version; the records stay as they are: {problem}"
                );
            }
            if !mute {
                let answer = match done {
                    Ok(()) => Reply::Synced,
                    Err(problem) => Reply::Exception(problem.to_string()),
                };
                reply(&bus, &reply_to, answer).await;
            }
        }
    }
}

/// Sends a reply.
async fn reply(bus: &Bus, subject: &str, reply: Reply) {
    if let Err(error) = bus.client.publish(subject.to_owned(), reply.write().into()).await {
        // The publisher asks again.
        tracing::warn!("cannot send the reply: {error}");
    }
}

/// Tells what is here, after each connection and now and then: whoever missed something gets it.
async fn ask(bus: Bus, options: AgentOptions, version: watch::Receiver<u64>) {
    let mut connected = bus.connected.clone();
    let every = Duration::from_secs(options.ask_every.max(1));
    loop {
        tokio::select! {
            changed = connected.changed() => {
                if changed.is_err() {
                    return;
                }
                // A server that is back has a whole fleet at its door.
                tokio::time::sleep(Duration::from_millis(fastrand::u64(0..=options.ask_jitter))).await;
            }
            () = tokio::time::sleep(every.mul_f64(0.5 + fastrand::f64())) => {}
        }
        let subject = message::reply_subject(ASK, &options.id, "hello");
        let hello = Hello { version: *version.borrow() };
        let body = serde_json::to_vec(&hello).unwrap_or_default();
        if bus.client.publish(subject, body.into()).await.is_err() {
            return;
        }
    }
}

/// A text that is not the mode of a file.
#[derive(Debug, thiserror::Error)]
#[error("an octal mode such as 640 is needed")]
struct NoMode;

/// Reads an octal mode.
fn octal(text: &str) -> Result<u32, NoMode> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err(NoMode),
    }
}
