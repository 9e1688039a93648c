//! The agent: receives announcements, downloads and checks versions, replaces the files and reports
//! their state.
//!
//! One task reads the bus; another applies versions, newest first: an older announcement in the
//! queue is answered with the file's state after the newer one.

mod apply;
mod disk;

use std::{path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context;
use dns_kit::{foreign::printable, http_server, logs::LineLimit};
use futures_util::StreamExt;
use tokio::sync::{mpsc, watch};

use self::{
    apply::{AgentMetrics, Applier},
    disk::Disk,
};
use crate::{
    bus::{Bus, BusOptions},
    file_options::FileOptions,
    message::{self, ASK, Announcement, Received, Reply, Report},
    store::{Store, StoreOptions},
};

/// Interval of the check for a changed or removed file.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum number of queued announcements.
const QUEUE: usize = 256;

/// The treatment of `/etc/hosts`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum HostsMode {
    /// The file is not touched.
    Off,
    /// A marked block is maintained.
    Block,
    /// The whole file is replaced, as a BOSH agent does.
    Replaced,
}

/// Command-line options of the subcommand `agent`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct AgentOptions {
    /// Id of this agent, the inventory's agent_id
    #[arg(long, value_name = "ID")]
    pub id: String,
    /// Receive and verify, but neither reply nor write; for a machine with a BOSH agent
    #[arg(long)]
    pub mute: bool,
    /// Options of the NATS connection.
    #[command(flatten)]
    pub bus: BusOptions,
    /// Options of the blobstore client.
    #[command(flatten)]
    pub store: StoreOptions,
    /// File that the DNS server reads
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/var/vcap/instance/dns/records.json"
    )]
    pub records: PathBuf,
    #[command(flatten)]
    pub attributes: FileOptions,
    /// How to maintain the hosts file
    #[arg(long, value_enum, default_value_t = HostsMode::Off)]
    pub hosts: HostsMode,
    /// Path of the hosts file
    #[arg(long, value_name = "FILE", default_value = "/etc/hosts")]
    pub hosts_file: PathBuf,
    /// Maximum random delay before the first report, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 2000)]
    pub ask_jitter: u64,
    /// Average interval of reports to the publisher, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub ask_every: u64,
    /// Prometheus metrics at http://ADDRESS/metrics
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<std::net::SocketAddr>,
}

/// An announcement and the subject of its reply.
type Work = (Announcement, String);

/// Runs until SIGTERM or SIGINT.
pub(crate) async fn run(options: AgentOptions) -> anyhow::Result<()> {
    let bus = Bus::connect(
        &options.bus,
        &options.id,
        "the records on this machine stay as they are",
    )
    .await?;
    let store = Store::open(&options.store, Some(&bus))?;
    let metrics = Arc::new(AgentMetrics::new()?);
    if let Some(address) = options.metrics {
        let registry = metrics.registry.clone();
        http_server::spawn_metrics(address, move || registry.gather()).await?;
    }
    let running = async {
        let disk = Disk::start(&options, store.longest)?;
        let applier = Applier::new(options.mute, disk, store, metrics).await;
        let held = applier.held.subscribe();
        let Report {
            version, digest, ..
        } = held.borrow().clone();
        tracing::info!(
            id = options.id,
            version,
            digest,
            mute = options.mute,
            "agent started"
        );
        let (queue, work) = mpsc::channel(QUEUE);
        let announced = applier.announced.clone();
        let applying = tokio::spawn(apply_all(applier, work, bus.clone(), options.mute));
        if !options.mute {
            tokio::spawn(report(bus.clone(), options.clone(), held));
        }
        tokio::select! {
            ended = listen(&bus, &options, &queue, &announced) => ended,
            ended = applying => ended.context("the task that applies versions failed"),
        }
    };
    tokio::select! {
        ended = running => ended,
        () = dns_kit::until_ended() => {
            // The file is always either the old or the new one. A last reply may still be queued.
            let _ = tokio::time::timeout(Duration::from_secs(1), bus.client.flush()).await;
            Ok(())
        }
    }
}

/// Receives calls from the bus and queues announcements.
async fn listen(
    bus: &Bus,
    options: &AgentOptions,
    queue: &mpsc::Sender<Work>,
    announced: &watch::Sender<u64>,
) -> anyhow::Result<()> {
    let mut messages = bus
        .client
        .subscribe(message::agent_subject(&options.id))
        .await?;
    let warnings = LineLimit::new();
    while let Some(message) = messages.next().await {
        let Some(Received { reply_to, call }) = message::read_call(&message.payload) else {
            if let Some(omitted) = warnings.admit_any() {
                tracing::warn!(omitted, "message ignored: not a call");
            }
            continue;
        };
        match call {
            Ok(announcement) => {
                // A full queue holds newer work than the caller waits for; the publisher retries. An announcement
                // that is dropped must not end the downloads of lower ones.
                let Ok(place) = queue.try_reserve() else {
                    continue;
                };
                announced.send_modify(|newest| *newest = announcement.version.max(*newest));
                place.send((announcement, reply_to));
            }
            // A mute agent leaves unknown methods to the BOSH agent beside it.
            Err(problem) if !options.mute => {
                reply(bus, &reply_to, Reply::Exception(problem.to_string())).await
            }
            Err(_) => {}
        }
    }
    anyhow::bail!("the subscription ended")
}

/// Applies announcements, newest first.
async fn apply_all(mut applier: Applier, mut work: mpsc::Receiver<Work>, bus: Bus, mute: bool) {
    let mut looks = tokio::time::interval(LOOK_INTERVAL);
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let warnings = LineLimit::new();
    let mut waiting: Vec<Work> = Vec::new();
    loop {
        tokio::select! {
            received = work.recv_many(&mut waiting, QUEUE) => {
                if received == 0 {
                    return;
                }
            }
            _ = looks.tick() => {
                if let Err(error) = applier.report().await
                    && let Some(omitted) = warnings.admit_any()
                {
                    tracing::error!(omitted, "cannot read the records; they stay unchanged: {error}");
                }
            }
        }
        // The older ones are then answered without a download.
        waiting.sort_by_key(|(announcement, _)| std::cmp::Reverse(announcement.version));
        for (announcement, reply_to) in waiting.drain(..) {
            let done = applier.apply(&announcement).await;
            if let Err(problem) = &done
                && let Some(omitted) = warnings.admit_any()
            {
                tracing::error!(
                    version = announcement.version,
                    omitted,
                    "cannot install the announced version; the records stay unchanged: {}",
                    printable(&problem.to_string())
                );
            }
            if !mute {
                let answer = match done {
                    // A director gets exactly the reply that it knows.
                    Ok(report) => Reply::Synced(message::wants_report(&reply_to).then_some(report)),
                    Err(problem) => Reply::Exception(problem.to_string()),
                };
                reply(&bus, &reply_to, answer).await;
            }
        }
    }
}

/// Sends a reply. If it is lost, the publisher retries.
async fn reply(bus: &Bus, subject: &str, reply: Reply) {
    /// A bus that accepts nothing must not delay versions.
    const LIMIT: Duration = Duration::from_secs(5);
    let sent = bus.client.publish(subject.to_owned(), reply.write().into());
    match tokio::time::timeout(LIMIT, sent).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!("cannot send the reply: {error}"),
        Err(_) => tracing::warn!("cannot send the reply: NATS accepts no messages"),
    }
}

/// Reports the file's state: after each connection, when another program changed the file, and at intervals.
async fn report(bus: Bus, options: AgentOptions, mut held: watch::Receiver<Report>) {
    let mut connected = bus.connected.clone();
    let every = Duration::from_secs(options.ask_every);
    loop {
        tokio::select! {
            changed = connected.changed() => {
                if changed.is_err() {
                    return;
                }
                // After a restart of the server, the whole fleet reports.
                tokio::time::sleep(Duration::from_millis(fastrand::u64(0..=options.ask_jitter))).await;
            }
            changed = held.changed() => {
                if changed.is_err() {
                    return;
                }
            }
            // At random times, so that a fleet that started together does not report together.
            () = tokio::time::sleep(every.mul_f64(0.5 + fastrand::f64())) => {}
        }
        let subject = message::reply_subject(ASK, &options.id, "hello");
        let body = held.borrow_and_update().write();
        // Only a client that has ended fails here; without a connection, messages are queued.
        if bus.client.publish(subject, body.into()).await.is_err() {
            return;
        }
    }
}

/// Returns all metric families, for the metrics reference.
#[cfg(test)]
pub(crate) fn metric_families() -> Vec<prometheus::proto::MetricFamily> {
    AgentMetrics::new()
        .expect("the names are valid")
        .registry
        .gather()
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use clap::Parser;

    use super::*;
    use crate::{
        digest::sha256,
        store::{MAX_BLOB, StoreOptions},
        tests::FakeBus,
    };

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        agent: AgentOptions,
    }

    fn options(folder: &Path, more: &str) -> AgentOptions {
        let words = format!(
            "agent --id a1 --nats tls://n --tls-ca c --tls-certificate c --tls-key k --records {}/records.json {more}",
            folder.display()
        );
        CommandLine::parse_from(words.split_whitespace()).agent
    }

    /// Starts an agent beside a bus, with its blobs in the folder.
    async fn start(folder: &Path, more: &str) -> (FakeBus, watch::Receiver<u64>) {
        let options = options(folder, more);
        let bus = FakeBus::start().await;
        let store = StoreOptions {
            blobstore: Some(format!("file://{}", folder.display())),
            blobstore_credentials: None,
            blobstore_ca: None,
            blobstore_timeout: 5,
            longest_blob: MAX_BLOB,
        };
        let store = Store::open(&store, None).unwrap();
        let disk = Disk::start(&options, MAX_BLOB).unwrap();
        let metrics = Arc::new(AgentMetrics::new().unwrap());
        let mute = options.mute;
        let applier = Applier::new(mute, disk, store, metrics).await;
        let announced = applier.announced.clone();
        let seen = announced.subscribe();
        let (queue, work) = mpsc::channel(QUEUE);
        let connection = bus.bus.clone();
        tokio::spawn(apply_all(applier, work, connection.clone(), mute));
        tokio::spawn(async move {
            let _ = listen(&connection, &options, &queue, &announced).await;
        });
        (bus, seen)
    }

    fn dataset(version: u64) -> String {
        format!(
            r#"{{"records":[],"version":{version},"record_keys":["id"],"record_infos":[],"aliases":{{}}}}"#
        )
    }

    fn call(version: u64, digest: &str, reply_to: &str) -> String {
        format!(
            r#"{{"protocol":3,"method":"sync_dns","arguments":["blob","{digest}",{version}],"reply_to":"{reply_to}"}}"#
        )
    }

    #[tokio::test]
    async fn calls_get_expected_answers() {
        let folder = tempfile::tempdir().unwrap();
        let (mut bus, _announced) = start(folder.path(), "").await;
        let dataset = dataset(5);
        fs::write(folder.path().join("blob"), &dataset).unwrap();
        let digest = sha256(dataset.as_bytes());
        let ours = "director.bosh-dns-sync-p.a1.r";
        let wrong = sha256(b"x");
        for (body, subject, reply) in [
            (
                call(5, &digest, "director.p.a1.r1"),
                "director.p.a1.r1",
                r#"{"value":"synced"}"#.to_owned(),
            ),
            (
                call(0, "x", ours),
                ours,
                format!(r#"{{"value":"synced","version":5,"digest":"{digest}","patches":true}}"#),
            ),
            (
                r#"{"method":"ping","arguments":[],"reply_to":"director.p.a1.r2"}"#.to_owned(),
                "director.p.a1.r2",
                r#"{"exception":{"message":"unknown message ping"}}"#.to_owned(),
            ),
            (
                call(6, &wrong, "director.p.a1.r3"),
                "director.p.a1.r3",
                format!(
                    r#"{{"exception":{{"message":"checking the blob: the digest of the blob is {}, but {} was announced"}}}}"#,
                    &digest["sha256:".len()..],
                    &wrong["sha256:".len()..]
                ),
            ),
        ] {
            // Text that is no call gets no reply.
            bus.deliver.send("{".to_owned()).unwrap();
            bus.deliver.send(body).unwrap();
            assert_eq!(bus.next().await, (subject.to_owned(), reply));
        }
        let written = fs::read_to_string(folder.path().join("records.json")).unwrap();
        assert_eq!(written, dataset);
    }

    #[tokio::test]
    async fn mute_agent_only_listens() {
        let folder = tempfile::tempdir().unwrap();
        let (mut bus, mut announced) = start(folder.path(), "--mute").await;
        let dataset = dataset(5);
        fs::write(folder.path().join("blob"), &dataset).unwrap();
        let unknown = r#"{"method":"ping","arguments":[],"reply_to":"director.p.a1.r2"}"#;
        bus.deliver.send(unknown.to_owned()).unwrap();
        let digest = sha256(dataset.as_bytes());
        bus.deliver
            .send(call(5, &digest, "director.p.a1.r1"))
            .unwrap();
        // Noticed, and then checked.
        for version in [5, 0] {
            announced
                .wait_for(|announced| *announced == version)
                .await
                .unwrap();
        }
        assert!(!folder.path().join("records.json").exists());
        assert!(bus.published.try_recv().is_err());
    }

    #[tokio::test]
    async fn dropped_announcement_ends_no_download() {
        let folder = tempfile::tempdir().unwrap();
        let mut bus = FakeBus::start().await;
        let (queue, mut work) = mpsc::channel(1);
        let announced = watch::Sender::new(0);
        let seen = announced.subscribe();
        let connection = bus.bus.clone();
        let options = options(folder.path(), "");
        tokio::spawn(async move { listen(&connection, &options, &queue, &announced).await });
        // The second one finds the queue full.
        for version in [5, 6] {
            let body = call(version, "x", "director.p.a1.r1");
            bus.deliver.send(body).unwrap();
        }
        let unknown = r#"{"method":"ping","arguments":[],"reply_to":"director.p.a1.r2"}"#;
        bus.deliver.send(unknown.to_owned()).unwrap();
        assert_eq!(bus.next().await.0, "director.p.a1.r2");
        assert_eq!(*seen.borrow(), 5);
        assert_eq!(work.recv().await.unwrap().0.version, 5);
    }

    #[tokio::test]
    async fn connections_and_changes_report_state() {
        let folder = tempfile::tempdir().unwrap();
        let mut bus = FakeBus::start().await;
        let (connect, connected) = watch::channel(0);
        let reporter = Bus {
            connected,
            ..bus.bus.clone()
        };
        let held = watch::Sender::new(Report::default());
        let options = options(folder.path(), "--ask-jitter 0");
        tokio::spawn(report(reporter, options, held.subscribe()));
        let subject = "director.bosh-dns-sync.a1.hello".to_owned();
        connect.send_replace(1);
        let none = r#"{"version":0,"patches":false}"#.to_owned();
        assert_eq!(bus.next().await, (subject.clone(), none));
        held.send_replace(Report {
            version: 7,
            digest: Some("d".to_owned()),
            patches: true,
        });
        let seven = r#"{"version":7,"digest":"d","patches":true}"#.to_owned();
        assert_eq!(bus.next().await, (subject, seven));
    }
}
