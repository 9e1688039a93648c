//! `run`: a rotator with its sources of identities, its clock and its metrics.

use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant, SystemTime},
};

use anyhow::Context;
use notify::{RecursiveMode, Watcher};
use parking_lot::Mutex;

use crate::{
    ca_files::CaFiles,
    control::{self, Command, Reply},
    descriptions::Descriptions,
    keys::KeyType,
    metrics,
    pool::KeyPool,
    rotator::{Rotator, Settings, Status},
};

/// Interval at which the folder of descriptions is read even without a change notification.
const RESCAN: Duration = Duration::from_secs(10);

/// Minimum validity (seed document 004).
const SHORTEST_VALIDITY: Duration = Duration::from_secs(3600);

/// Command-line options of the subcommand `run`.
#[derive(Debug, clap::Args)]
pub struct RunOptions {
    #[command(flatten)]
    ca: CaFiles,
    /// Folder for the identities, one folder each; a tmpfs keeps keys off disks
    #[arg(long, value_name = "FOLDER")]
    folder: PathBuf,
    /// Folder of container descriptions, one GUID.json per identity
    #[arg(long, value_name = "FOLDER", required_unless_present = "control")]
    containers: Option<PathBuf>,
    /// Unix socket for `status` and, without --containers, `create`, `update` and `destroy`
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    #[command(flatten)]
    leaf: LeafOptions,
    /// Number of keys to generate in advance
    #[arg(long, value_name = "NUMBER", default_value_t = 16)]
    pool: usize,
    /// Also write Envoy SDS files
    #[arg(long)]
    envoy: bool,
    /// Serve Prometheus metrics at http://ADDRESS/metrics
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<SocketAddr>,
}

/// Validity and key of certificates.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct LeafOptions {
    /// Validity of certificates, at least 1h, such as 24h or 90m
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse_validity)]
    pub validity: Duration,
    /// Key type
    #[arg(long, value_enum, value_name = "TYPE", default_value = "rsa-3072")]
    pub key_type: KeyType,
}

/// Parses a validity such as `24h`.
pub(crate) fn parse_validity(text: &str) -> Result<Duration, String> {
    let unit = match text.chars().last() {
        Some('h') => 3600,
        Some('m') => 60,
        _ => return Err("use a number with a unit, such as 24h or 90m".to_owned()),
    };
    let number: u32 = text[..text.len() - 1].parse().map_err(|_| "use a number with a unit".to_owned())?;
    let validity = Duration::from_secs(u64::from(number) * unit);
    match validity < SHORTEST_VALIDITY {
        true => Err("the minimum is 1h".to_owned()),
        false => Ok(validity),
    }
}

enum Event {
    Command(Command, mpsc::Sender<Reply>),
    Rescan,
    Stop,
}

/// Runs a rotator until SIGTERM or SIGINT.
pub async fn run(options: RunOptions) -> anyhow::Result<()> {
    let RunOptions { ca, folder, containers, control, leaf, pool, envoy, metrics } = options;
    let now = SystemTime::now();
    let pool = KeyPool::start(leaf.key_type, pool).context("key pool")?;
    let rotator = Rotator::open(Settings { folder, validity: leaf.validity, envoy }, ca, pool, now)?;
    let shown = Arc::new(Mutex::new(rotator.status(now)));
    let (events, inbox) = mpsc::channel();

    // Kept alive as long as the rotator.
    let mut _watcher = None;
    if let Some(containers) = &containers {
        let events = events.clone();
        let notified = move |event: notify::Result<notify::Event>| {
            // Reading the descriptions is also an event, but must not trigger the next read.
            if event.is_ok_and(|event| event.kind.is_access()) {
                return;
            }
            // The rotator may be stopping.
            let _ = events.send(Event::Rescan);
        };
        let mut watcher = notify::recommended_watcher(notified)?;
        watcher
            .watch(containers, RecursiveMode::NonRecursive)
            .with_context(|| format!("{}: create the folder of descriptions", containers.display()))?;
        _watcher = Some(watcher);
    }
    if let Some(path) = &control {
        let events = Mutex::new(events.clone());
        let events = Arc::new(events);
        control::serve(path, move |command| execute(&events, command))?;
    }
    if let Some(address) = metrics {
        let shown = shown.clone();
        metrics::serve(address, move || metrics::of_rotator(&shown.lock())).await?;
    }
    let descriptions = containers.map(Descriptions::new);
    let worker = thread::Builder::new()
        .name("rotator".to_owned())
        .spawn(move || work(rotator, descriptions, &inbox, &shown))?;
    tracing::info!("rotator started");
    let _ = sd_notify::notify(false, &[sd_notify::NotifyState::Ready]);
    dns_kit::signals::ended().await;
    let _ = events.send(Event::Stop);
    worker.join().map_err(|_| anyhow::anyhow!("the rotator panicked"))
}

fn execute(events: &Mutex<mpsc::Sender<Event>>, command: Command) -> Reply {
    let (reply, answer) = mpsc::channel();
    let sent = events.lock().send(Event::Command(command, reply));
    let stopped = || Reply::Error("the rotator is stopping".to_owned());
    if sent.is_err() { stopped() } else { answer.recv().unwrap_or_else(|_| stopped()) }
}

/// Runs the rotator on its thread. Sleeps are short, so that a clock jump is noticed within a
/// second.
fn work(
    mut rotator: Rotator,
    mut descriptions: Option<Descriptions>,
    inbox: &mpsc::Receiver<Event>,
    shown: &Mutex<Status>,
) {
    let mut rescan_at = Instant::now();
    loop {
        if let Some(descriptions) = &mut descriptions
            && rescan_at <= Instant::now()
        {
            descriptions.reconcile(&mut rotator, SystemTime::now());
            rescan_at = Instant::now() + RESCAN;
        }
        let now = SystemTime::now();
        let next = rotator.step(now);
        *shown.lock() = rotator.status(now);
        let pause = next.duration_since(SystemTime::now()).unwrap_or_default();
        let pause = pause.min(rescan_at.saturating_duration_since(Instant::now()));
        match inbox.recv_timeout(pause.max(Duration::from_millis(1))) {
            Ok(Event::Command(command, reply)) => {
                // A client that has disconnected needs no reply.
                let _ = reply.send(obey(&mut rotator, command, descriptions.is_some()));
            }
            Ok(Event::Rescan) => rescan_at = Instant::now(),
            Ok(Event::Stop) | Err(mpsc::RecvTimeoutError::Disconnected) => return,
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
    }
}

fn obey(rotator: &mut Rotator, command: Command, by_files: bool) -> Reply {
    let now = SystemTime::now();
    let done = match command {
        Command::Status => return Reply::Status(Box::new(rotator.status(now))),
        _ if by_files => {
            let problem = "identities are managed by the files of --containers; change the file there";
            return Reply::Error(problem.to_owned());
        }
        Command::Create { container } => rotator.create(container, now),
        Command::Update { container } => rotator.update(container, now),
        Command::Destroy { guid } => rotator.destroy(&guid),
    };
    done.map_or_else(|error| Reply::Error(error.to_string()), |()| Reply::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn validity_has_minimum() {
        assert_eq!(parse_validity("24h"), Ok(Duration::from_secs(86_400)));
        assert_eq!(parse_validity("90m"), Ok(Duration::from_secs(5400)));
        for bad in ["59m", "24", "", "h", "-1h", "1d", "é"] {
            assert!(parse_validity(bad).is_err(), "{bad}");
        }
    }
}
