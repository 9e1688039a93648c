//! The agents: connections in this process, and a sample of real processes.

use std::{
    os::unix::fs::MetadataExt,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::Result;
use async_nats::{Client, Event};
use dns_sync::{
    bus, dataset,
    digest::MultiDigest,
    message::{self, ASK, Reply, Report, Source},
    store::{LONGEST_BLOB, Store, StoreOptions},
    tls,
};
use futures::StreamExt;
use parking_lot::Mutex;
use tokio::{process::Child, sync::Semaphore};

use super::ground::{Ground, agent_id};

/// Maximum number of connections being opened concurrently.
const AT_ONCE: usize = 256;

/// Maximum number of whole blobs in memory: this process represents a whole fleet.
const BLOBS_AT_ONCE: usize = 16;

/// The report of a connection about the version that it holds.
type Held = Arc<Mutex<Report>>;

pub(super) struct Fleet {
    /// Reports of the connections.
    versions: Vec<Held>,
    /// Number of connects per connection.
    connections: Vec<Arc<AtomicU64>>,
    /// Whole blobs fetched since the last reset.
    fetched: Arc<AtomicU64>,
    /// Agents that run as processes.
    sample: Vec<Sampled>,
}

/// An agent that runs as a process.
struct Sampled {
    file: PathBuf,
    /// Number and version of the file that was read last, so that each is read once.
    seen: Mutex<(u64, u64)>,
    /// Handle of the process, which ends when dropped.
    _process: Child,
}

impl Sampled {
    /// Returns the version of its file; 0 without one.
    fn version(&self) -> u64 {
        // No panic can happen while it is locked.
        let mut seen = self.seen.lock();
        let number = std::fs::metadata(&self.file).map_or(0, |facts| facts.ino());
        if seen.0 != number
            && let Ok(bytes) = std::fs::read(&self.file)
            && let Ok(read) = dataset::Read::parse(&bytes)
        {
            *seen = (number, read.version);
        }
        seen.1
    }
}

/// State shared by all connections.
#[derive(Clone)]
struct Shared {
    store: Store,
    /// Limits the number of blobs in memory.
    room: Arc<Semaphore>,
    fetched: Arc<AtomicU64>,
}

impl Fleet {
    /// Connects all agents, a limited number at a time: the reconnect storm is measured later.
    pub(super) async fn connect(ground: &Ground, sample: usize) -> Result<Self> {
        let processes = sample.min(ground.agents());
        let fetched = Arc::new(AtomicU64::new(0));
        let store = StoreOptions {
            blobstore: Some(ground.blobstore()),
            blobstore_credentials: None,
            blobstore_ca: None,
            blobstore_timeout: 60,
            longest_blob: LONGEST_BLOB,
        };
        let store = Store::open(&store, None)?;
        let shared =
            Shared { store, room: Arc::new(Semaphore::new(BLOBS_AT_ONCE)), fetched: fetched.clone() };
        let numbers = processes..ground.agents();
        let (versions, connections): (Vec<_>, Vec<_>) =
            numbers.clone().map(|_| <(Held, Arc<AtomicU64>)>::default()).unzip();
        for (number, (version, connected)) in numbers.zip(versions.iter().zip(&connections)) {
            connect(ground, agent_id(number), version.clone(), connected.clone(), shared.clone()).await?;
            while waiting(&connections[..=number - processes]) > AT_ONCE {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        let sample = (0..processes).map(agent_id).map(|id| {
            let (file, process) = (ground.records(&id), ground.start_agent(&id)?);
            anyhow::Ok(Sampled { file, seen: Mutex::default(), _process: process })
        });
        Ok(Self { versions, connections, fetched, sample: sample.collect::<Result<_>>()? })
    }

    /// Returns whether all agents have a version. A sampled process counts by the file that it wrote.
    pub(super) fn all_have(&self, version: u64) -> bool {
        let Self { versions, sample, .. } = self;
        versions.iter().all(|has| has.lock().version >= version)
            && sample.iter().all(|sampled| sampled.version() >= version)
    }

    /// Returns whether all connections have connected since the last reset, without the sample.
    pub(super) fn all_connected(&self) -> bool {
        waiting(&self.connections) == 0
    }

    pub(super) fn forget_connections(&self) {
        self.connections.iter().for_each(|count| count.store(0, Ordering::Relaxed));
    }

    /// Returns the number of agents that are processes.
    pub(super) fn sampled(&self) -> usize {
        self.sample.len()
    }

    /// Returns the number of whole blobs fetched since the previous call, without the sample.
    pub(super) fn fetched(&self) -> u64 {
        self.fetched.swap(0, Ordering::Relaxed)
    }
}

/// Returns the number of agents that have not connected.
fn waiting(connections: &[Arc<AtomicU64>]) -> usize {
    connections.iter().filter(|count| count.load(Ordering::Relaxed) == 0).count()
}

async fn connect(
    ground: &Ground,
    id: String,
    held: Held,
    connected: Arc<AtomicU64>,
    shared: Shared,
) -> Result<()> {
    let bus = ground.bus(&id);
    let (said, mut again) = tokio::sync::watch::channel(());
    let counted = move |event: Event| {
        if matches!(event, Event::Connected) {
            connected.fetch_add(1, Ordering::Relaxed);
            said.send_replace(());
        }
        std::future::ready(())
    };
    let client = bus::options_for(tls::client(&bus.tls, None)?)
        .retry_on_initial_connect()
        .read_buffer_capacity(4096)
        .subscription_capacity(16)
        .client_capacity(16)
        .event_callback(counted)
        .connect(bus.nats)
        .await?;
    let mut calls = client.subscribe(message::agent_subject(&id)).await?;
    let (asking, has) = (client.clone(), held.clone());
    tokio::spawn(async move {
        while again.changed().await.is_ok() {
            tokio::time::sleep(Duration::from_millis(fastrand::u64(0..2000))).await;
            let body = has.lock().write();
            let _ = asking.publish(message::reply_subject(ASK, &id, "hello"), body.into()).await;
        }
    });
    tokio::spawn(async move {
        while let Some(message) = calls.next().await {
            take(&client, &message.payload, &held, &shared).await;
        }
    });
    Ok(())
}

/// Executes a call without writing a file.
async fn take(client: &Client, body: &[u8], held: &Held, shared: &Shared) {
    let Some(received) = message::read_call(body) else { return };
    let Ok(call) = received.call else { return };
    let has = held.lock().version;
    let patch = call.extra.and_then(|extra| extra.patch).is_some_and(|patch| patch.from == has);
    let mut failed = None;
    if !patch && call.version > has {
        // The semaphore is never closed; a permit stands for one blob.
        let _room = shared.room.acquire().await;
        let Source::Blob(blob) = &call.source else { return };
        let checked = match shared.store.get(blob, LONGEST_BLOB).await {
            Ok(bytes) => MultiDigest::parse(&call.digest)
                .and_then(|digest| digest.verify(&bytes))
                .map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        shared.fetched.fetch_add(1, Ordering::Relaxed);
        if let Err(problem) = checked {
            failed = Some(problem);
        }
    }
    let reply = match failed {
        Some(problem) => Reply::Exception(problem),
        None => {
            let mut held = held.lock();
            if call.version > held.version {
                *held = Report { version: call.version, digest: Some(call.digest), patches: true };
            }
            Reply::Synced(message::wants_report(&received.reply_to).then(|| held.clone()))
        }
    };
    let _ = client.publish(received.reply_to, reply.write().into()).await;
}
