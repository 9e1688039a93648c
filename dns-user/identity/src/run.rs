//! `run`: a rotator with its sources of identities, its clock and its metrics; and the control socket: one JSON object
//! per line, one reply per line.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read, Write},
    net::SocketAddr,
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, anyhow, bail};
use nix::fcntl::Flock;
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use prometheus::proto::MetricFamily;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use crate::{
    authority::CaFiles,
    descriptions::Descriptions,
    folder::{lock, make_folders},
    keys::{KeyPool, KeyType, Priority, thread_time},
    metrics,
    profile::{Container, Guid},
    rotator::{Next, Rotator, RotatorSettings, RotatorStatus},
};
use dns_kit::unix_socket::{self, Access};

/// Interval at which the folder of descriptions is read even without a change notification; longer if
/// reading takes more than a 500th of it.
const RESCAN: Duration = Duration::from_secs(10);
const RESCAN_SHARE: u32 = 500;
const MAX_RESCAN: Duration = Duration::from_secs(60);

/// Maximum wait for the rotator at the end.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// Maximum number of events between two steps.
const MAX_EVENTS: usize = 64;

/// Minimum validity (seed document 004).
const MIN_VALIDITY: Duration = Duration::from_secs(3600);

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
    /// PEM file with CAs of other cells, which all identities trust as well; repeatable
    #[arg(long, value_name = "FILE")]
    also_trust: Vec<PathBuf>,
    /// Time for which identities still trust a CA that was replaced
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse_time)]
    keep_old_ca: Duration,
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
    /// Time by which certificates start before now, for peers with slow clocks
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_time)]
    pub backdate: Duration,
    /// Key type
    #[arg(long, value_enum, value_name = "TYPE", default_value = "rsa-3072")]
    pub key_type: KeyType,
}

/// Parses a validity such as `24h`.
pub(crate) fn parse_validity(text: &str) -> Result<Duration, &'static str> {
    let validity = parse_time(text)?;
    if validity < MIN_VALIDITY {
        Err("the minimum is 1h")
    } else {
        Ok(validity)
    }
}

/// Parses a time such as `5m`.
pub(crate) fn parse_time(text: &str) -> Result<Duration, &'static str> {
    const FORM: &str = "use a number with a unit, such as 24h or 90m";
    let unit = match text.chars().last() {
        Some('h') => 3600,
        Some('m') => 60,
        Some('s') => 1,
        _ => return Err(FORM),
    };
    // The unit is one byte, so the text ends at a boundary; 32 bits of hours cannot overflow a
    // later sum.
    let number: u32 = text[..text.len() - 1].parse().map_err(|_| FORM)?;
    Ok(Duration::from_secs(u64::from(number) * unit))
}

enum Event {
    Command(ControlCommand, mpsc::Sender<Reply>),
    Rescan,
    /// The pool has a key that a renewal waits for.
    Key,
    Stop,
}

/// Runs a rotator until SIGTERM or SIGINT.
pub async fn run(options: RunOptions) -> anyhow::Result<()> {
    let RunOptions {
        ca,
        folder,
        containers,
        control,
        leaf,
        pool,
        also_trust,
        keep_old_ca,
        envoy,
        metrics,
    } = options;
    let now = SystemTime::now();
    let _lock = lock_folder(&folder)?;
    let control = control.as_deref().map(bind_control).transpose()?;
    let pool = KeyPool::start(leaf.key_type, pool, Priority::Idle).context("key pool")?;
    let settings = RotatorSettings {
        folder,
        validity: leaf.validity,
        backdate: leaf.backdate,
        envoy,
        also_trust,
        keep_old_ca,
    };
    let rotator = Rotator::open(settings, ca, pool, now)?;
    // It holds at most one command of each connected client, one rescan and one key.
    let (events, inbox) = mpsc::channel();
    let key_ready = events.clone();
    rotator.pool.on_key(move || {
        // The rotator may be stopping.
        let _ = key_ready.send(Event::Key);
    });

    let pending_rescan = Arc::new(AtomicBool::new(false));
    // Kept alive as long as the rotator.
    let mut _watcher = None;
    if let Some(containers) = &containers {
        let pending = pending_rescan.clone();
        _watcher = Some(watch(containers, events.clone(), pending)?);
    }
    if let Some(listener) = control {
        let events = events.clone();
        serve_control(listener, move |command| execute(&events, command))?;
    }
    if let Some(address) = metrics {
        let events = events.clone();
        metrics::serve(address, move || families(&events)).await?;
    }
    let descriptions = containers.map(Descriptions::new);
    // Dropped when the thread ends.
    let (running, mut ended) = oneshot::channel::<()>();
    let worker = thread::Builder::new().name("rotator".to_owned());
    worker.spawn(move || {
        let _running = running;
        work(rotator, descriptions, &inbox, &pending_rescan);
    })?;
    tracing::info!("rotator started");
    let _ = sd_notify::notify(false, &[sd_notify::NotifyState::Ready]);
    tokio::select! {
        // A supervisor starts the program again.
        _ = &mut ended => bail!("the rotator panicked"),
        () = dns_kit::until_ended() => {}
    }
    let _ = events.send(Event::Stop);
    // Its folder may hang; then it ends with the process, because files are replaced atomically.
    let _ = tokio::time::timeout(STOP_LIMIT, ended).await;
    Ok(())
}

/// Takes the lock of a rotator's folder, which is created if it is missing.
fn lock_folder(folder: &Path) -> anyhow::Result<Flock<File>> {
    make_folders(folder).with_context(|| folder.display().to_string())?;
    File::open(folder)
        .and_then(lock)
        .with_context(|| folder.display().to_string())?
        .with_context(|| {
            format!(
                "{}: another rotator uses this folder; stop it or choose another one",
                folder.display()
            )
        })
}

/// Sends an event whenever the descriptions may have changed.
fn watch(
    containers: &Path,
    events: mpsc::Sender<Event>,
    pending: Arc<AtomicBool>,
) -> anyhow::Result<RecommendedWatcher> {
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // Reading the descriptions is also an event, but must not trigger the next read.
        if event.is_ok_and(|event| event.kind.is_access()) {
            return;
        }
        // One is enough, however many files change while the rotator is busy.
        if !pending.swap(true, Ordering::AcqRel) {
            // The rotator may be stopping.
            let _ = events.send(Event::Rescan);
        }
    })?;
    watcher
        .watch(containers, RecursiveMode::NonRecursive)
        .with_context(|| {
            format!(
                "{}: create the folder of descriptions",
                containers.display()
            )
        })?;
    Ok(watcher)
}

fn families(events: &mpsc::Sender<Event>) -> Vec<MetricFamily> {
    match tokio::task::block_in_place(|| execute(events, ControlCommand::Status)) {
        Reply::Status(status) => metrics::of_rotator(&status),
        Reply::Done | Reply::Error(_) => Vec::new(),
    }
}

fn execute(events: &mpsc::Sender<Event>, command: ControlCommand) -> Reply {
    let (reply, answer) = mpsc::channel();
    // Without a timeout: the rotator replies, or drops the sender when it ends.
    if events.send(Event::Command(command, reply)).is_ok()
        && let Ok(reply) = answer.recv()
    {
        return reply;
    }
    Reply::Error("the rotator is stopping".to_owned())
}

/// Runs the rotator on its thread. Sleeps are short, so that a clock jump is noticed within a second.
fn work(
    mut rotator: Rotator,
    mut descriptions: Option<Descriptions>,
    inbox: &mpsc::Receiver<Event>,
    pending_rescan: &AtomicBool,
) {
    let mut rescan_at = Instant::now();
    loop {
        if let Some(descriptions) = &mut descriptions
            && rescan_at <= Instant::now()
        {
            // CPU time, because waiting for a busy core must not make readings rarer.
            let used = thread_time();
            descriptions.reconcile(&mut rotator, SystemTime::now());
            let used = thread_time().saturating_sub(used);
            rescan_at = Instant::now() + RESCAN.max(used * RESCAN_SHARE).min(MAX_RESCAN);
        }
        let pause = match rotator.step(SystemTime::now()) {
            Next::At(next) => next.duration_since(SystemTime::now()).unwrap_or_default(),
            // The pool's event ends the pause early; the clock may jump meanwhile.
            Next::Key => Duration::from_secs(1),
        };
        let mut pause = pause.min(rescan_at.saturating_duration_since(Instant::now()));
        // Everything that has arrived is handled before the next step.
        for _ in 0..MAX_EVENTS {
            let Ok(event) = inbox.recv_timeout(pause) else {
                break;
            };
            match event {
                Event::Command(command, reply) => {
                    // A client that has disconnected needs no reply.
                    let _ =
                        reply.send(handle_command(&mut rotator, command, descriptions.as_mut()));
                }
                Event::Rescan => {
                    // Before the folder is read: a later change asks again.
                    pending_rescan.store(false, Ordering::Release);
                    rescan_at = Instant::now();
                }
                Event::Key => {}
                Event::Stop => return,
            }
            pause = Duration::ZERO;
        }
    }
}

fn handle_command(
    rotator: &mut Rotator,
    command: ControlCommand,
    files: Option<&mut Descriptions>,
) -> Reply {
    let now = SystemTime::now();
    let done = match (command, files) {
        (ControlCommand::Status, files) => {
            let mut status = rotator.status(now);
            status
                .problems
                .extend(files.into_iter().flat_map(|files| files.problems()));
            return Reply::Status(Box::new(status));
        }
        (ControlCommand::ConfirmRemovals { number }, Some(files)) => {
            files.confirm_removals(number);
            return Reply::Done;
        }
        (ControlCommand::ConfirmRemovals { .. }, None) => {
            return Reply::Error(
                "identities are managed by commands; nothing needs confirmation".to_owned(),
            );
        }
        // The next reading of the folder would undo the command.
        (_, Some(_)) => {
            let problem =
                "identities are managed by the files of --containers; change the file there";
            return Reply::Error(problem.to_owned());
        }
        (ControlCommand::Create { container }, None) => rotator.create(container, now),
        (ControlCommand::Update { container }, None) => rotator.update(container, now),
        (ControlCommand::Destroy { guid }, None) => rotator.destroy(&guid),
    };
    done.inspect_err(|error| rotator.count_failure(error))
        .map_or_else(|error| Reply::Error(error.to_string()), |()| Reply::Done)
}

//----------- Control socket -------------------------------------------------

/// Maximum length of a command in bytes.
const MAX_COMMAND: u64 = 1 << 20;

/// Maximum length of a reply in bytes: 250 identities' states take 0.1 MiB.
const MAX_REPLY: u64 = 64 << 20;

/// Maximum number of clients of the control socket, each of which has a thread.
const MAX_CONTROL: usize = 16;

/// Maximum time that a client may stay idle.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time for which a client waits for a reply: a new identity may need an RSA key on a busy machine.
const MAX_WAIT: Duration = Duration::from_secs(120);

/// A command for a rotator.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "lowercase", deny_unknown_fields)]
pub enum ControlCommand {
    /// Create an identity; the reply is sent once its first pair is written.
    Create {
        /// Description of the new identity.
        container: Container,
    },
    /// Change the description of an identity.
    Update {
        /// Description that replaces the current one.
        container: Container,
    },
    /// Remove an identity and its files.
    Destroy {
        /// Id of the identity to remove.
        guid: Guid,
    },
    /// Confirm that descriptions of many identities may disappear at once.
    #[serde(rename = "confirm-removals")]
    ConfirmRemovals {
        /// Largest number of identities to remove.
        number: usize,
    },
    /// Return the state of all identities.
    Status,
}

/// The reply to a command.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reply {
    /// The command took effect.
    Done,
    /// The state of all identities.
    Status(Box<RotatorStatus>),
    /// The command failed: cause and remedy.
    Error(String),
}

/// Binds the socket, with access for this user only from its creation.
pub fn bind_control(path: &Path) -> anyhow::Result<UnixListener> {
    let place = path.display();
    // The new socket is renamed over an existing one, even if that is in use.
    if UnixStream::connect(path).is_ok() {
        bail!("{place}: another rotator serves this socket; stop it or choose another path");
    }
    unix_socket::bind(
        path,
        Access {
            user: None,
            group: None,
        },
        &[],
    )
    .map_err(|error| anyhow!("{place}: {error}"))
}

/// Serves commands until the process ends; `execute` runs each.
pub fn serve_control(
    listener: UnixListener,
    execute: impl Fn(ControlCommand) -> Reply + Clone + Send + 'static,
) -> io::Result<()> {
    let open = Arc::new(());
    let control = thread::Builder::new().name("control".to_owned());
    control.spawn(move || {
        for stream in listener.incoming() {
            match stream {
                // Closed at once. Only the owner of the socket can open as many.
                Ok(_) if Arc::strong_count(&open) > MAX_CONTROL => {
                    tracing::warn!(
                        "control socket: {MAX_CONTROL} clients are connected; another one was refused"
                    );
                }
                Ok(stream) => {
                    let execute = execute.clone();
                    let place = open.clone();
                    thread::spawn(move || {
                        if let Err(error) = answer(&stream, execute) {
                            tracing::debug!(%error, "control connection ended");
                        }
                        drop(place);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "control socket cannot accept; retrying");
                    // Without descriptors, accept(2) fails at once (EMFILE), and the loop would
                    // occupy a core.
                    thread::sleep(Duration::from_millis(100));
                }
            }
        }
    })?;
    Ok(())
}

fn answer(stream: &UnixStream, execute: impl Fn(ControlCommand) -> Reply) -> io::Result<()> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if (&mut reader).take(MAX_COMMAND).read_line(&mut line)? == 0 {
            return Ok(());
        }
        let reply = match serde_json::from_str(&line) {
            Ok(command) => execute(command),
            Err(error) => Reply::Error(format!("cannot parse the command: {error}")),
        };
        let mut text = serde_json::to_string(&reply)?;
        text.push('\n');
        (&mut &*stream).write_all(text.as_bytes())?;
    }
}

/// Sends one command to a rotator.
pub fn send_command(path: &Path, command: &ControlCommand) -> anyhow::Result<Reply> {
    let place = path.display();
    let line = exchange(path, command)
        .map_err(|error| anyhow!("{place}: {error}; is `bosh-dns-identity run` running?"))?;
    serde_json::from_str(&line).map_err(|error| anyhow!("{place}: cannot parse the reply: {error}"))
}

fn exchange(path: &Path, command: &ControlCommand) -> io::Result<String> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(MAX_WAIT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let mut text = serde_json::to_string(command)?;
    text.push('\n');
    stream.write_all(text.as_bytes())?;
    let mut line = String::new();
    BufReader::new(stream.take(MAX_REPLY)).read_line(&mut line)?;
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::World;

    #[test]
    fn validity_has_minimum() {
        assert_eq!(parse_validity("24h"), Ok(Duration::from_secs(86_400)));
        assert_eq!(parse_validity("90m"), Ok(Duration::from_secs(5400)));
        assert_eq!(parse_time("0s"), Ok(Duration::ZERO));
        for bad in ["59m", "24", "", "h", "-1h", "1d", "é"] {
            assert!(parse_validity(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn seventeenth_client_is_refused() {
        use std::io::Read as _;

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        serve_control(UnixListener::bind(&path).unwrap(), |_| Reply::Done).unwrap();
        let connect = || UnixStream::connect(&path).unwrap();
        let mut clients: Vec<UnixStream> = (0..MAX_CONTROL).map(|_| connect()).collect();
        let mut text = String::new();
        assert_eq!(connect().read_to_string(&mut text).unwrap(), 0);
        // The others are open still.
        for client in &clients {
            client.set_nonblocking(true).unwrap();
        }
        let waiting = clients.iter_mut().map(|client| client.read(&mut [0]));
        let waiting = waiting.filter(|read| {
            read.as_ref()
                .is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
        });
        assert_eq!(waiting.count(), MAX_CONTROL);
    }

    #[test]
    fn times_have_units() {
        const FORM: &str = "use a number with a unit, such as 24h or 90m";
        for (text, seconds) in [
            ("1h", Ok(3600)),
            ("60m", Ok(3600)),
            ("3600s", Ok(3600)),
            ("4294967295h", Ok(15_461_882_262_000)),
            ("4294967296h", Err(FORM)),
            ("1", Err(FORM)),
            ("s", Err(FORM)),
            ("1.5h", Err(FORM)),
        ] {
            let expected: Result<u64, _> = seconds;
            let parsed = parse_time(text).map(|time| time.as_secs());
            assert_eq!(parsed, expected, "{text}");
        }
        for (text, expected) in [
            ("59m", Err("the minimum is 1h")),
            ("3599s", Err("the minimum is 1h")),
            ("3600s", Ok(Duration::from_secs(3600))),
            ("x", Err(FORM)),
        ] {
            assert_eq!(parse_validity(text), expected);
        }
    }

    fn command(text: &str) -> ControlCommand {
        serde_json::from_str(text).unwrap()
    }

    /// Handles a command; returns the reply in JSON.
    fn handled(world: &mut World, files: Option<&mut Descriptions>, text: &str) -> String {
        let reply = handle_command(&mut world.rotator, command(text), files);
        serde_json::to_string(&reply).unwrap()
    }

    #[test]
    fn commands_change_identities() {
        let mut world = World::new();
        let unknown = r#"{"error":"no identity g1; `status` lists them"}"#;
        for (text, reply) in [
            (r#"{"command":"destroy","guid":"g1"}"#, unknown),
            (r#"{"command":"update","container":{"guid":"g1"}}"#, unknown),
            (
                r#"{"command":"create","container":{"guid":"g1","ous":[""]}}"#,
                r#"{"error":"an organizational unit is empty; remove it from `ous`"}"#,
            ),
            (
                r#"{"command":"create","container":{"guid":"g1"}}"#,
                "\"done\"",
            ),
            (
                r#"{"command":"update","container":{"guid":"g1","ous":["app:a"]}}"#,
                "\"done\"",
            ),
            (
                r#"{"command":"confirm-removals","number":3}"#,
                r#"{"error":"identities are managed by commands; nothing needs confirmation"}"#,
            ),
        ] {
            assert_eq!(handled(&mut world, None, text), reply, "{text}");
        }
        let Reply::Status(status) =
            handle_command(&mut world.rotator, ControlCommand::Status, None)
        else {
            panic!("no status");
        };
        let failures = [("profile", 1), ("unknown", 2)];
        let failures = failures.map(|(reason, count)| (reason.to_owned(), count));
        assert_eq!(status.failures, failures.into());
        assert_eq!(status.identities.len(), 1);
        let destroy = r#"{"command":"destroy","guid":"g1"}"#;
        assert_eq!(handled(&mut world, None, destroy), "\"done\"");
        assert!(!world.path("g1").exists());
    }

    #[test]
    fn files_leave_no_commands() {
        let mut world = World::new();
        let place = world.folder.path().join("containers");
        std::fs::create_dir(&place).unwrap();
        std::fs::write(place.join("a b.json"), "").unwrap();
        let mut files = Descriptions::new(place);
        files.reconcile(&mut world.rotator, SystemTime::now());
        let managed = r#"{"error":"identities are managed by the files of --containers; change the file there"}"#;
        for text in [
            r#"{"command":"create","container":{"guid":"g1"}}"#,
            r#"{"command":"update","container":{"guid":"g1"}}"#,
            r#"{"command":"destroy","guid":"g1"}"#,
        ] {
            assert_eq!(handled(&mut world, Some(&mut files), text), managed);
        }
        let confirm = r#"{"command":"confirm-removals","number":3}"#;
        assert_eq!(handled(&mut world, Some(&mut files), confirm), "\"done\"");
        let status = handle_command(&mut world.rotator, ControlCommand::Status, Some(&mut files));
        let Reply::Status(status) = status else {
            panic!("no status");
        };
        assert_eq!(status.problems.len(), 1);
        assert!(world.rotator.guids().is_empty());
    }

    #[test]
    fn socket_answers_every_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let place = path.display();
        let silent = send_command(&path, &ControlCommand::Status).unwrap_err();
        assert_eq!(
            silent.to_string(),
            format!(
                "{place}: No such file or directory (os error 2); is `bosh-dns-identity run` running?"
            )
        );
        let listener = bind_control(&path).unwrap();
        serve_control(listener, |command| match command {
            ControlCommand::Destroy { guid } => Reply::Error(format!("not {guid}")),
            _ => Reply::Done,
        })
        .unwrap();
        let destroy = command(r#"{"command":"destroy","guid":"g1"}"#);
        let reply = send_command(&path, &destroy).unwrap();
        assert!(matches!(reply, Reply::Error(text) if text == "not g1"));
        let reply = send_command(&path, &ControlCommand::Status).unwrap();
        assert!(matches!(reply, Reply::Done));
        // Several commands on one connection, a mistake among them.
        let mut stream = UnixStream::connect(&path).unwrap();
        let lines = "{}\n{\"command\":\"status\"}\n{\"command\":\"none\"}\n";
        stream.write_all(lines.as_bytes()).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut replies = String::new();
        stream.read_to_string(&mut replies).unwrap();
        let replies: Vec<&str> = replies.lines().collect();
        assert_eq!(replies.len(), 3);
        assert_eq!(
            replies[0],
            r#"{"error":"cannot parse the command: missing field `command` at line 1 column 2"}"#
        );
        assert_eq!(replies[1], "\"done\"");
        assert!(replies[2].starts_with(r#"{"error":"cannot parse the command: "#));
        let taken = bind_control(&path).unwrap_err().to_string();
        assert_eq!(
            taken,
            format!("{place}: another rotator serves this socket; stop it or choose another path")
        );
        // A line that is no reply.
        let other = folder.path().join("other");
        let listener = UnixListener::bind(&other).unwrap();
        let answering = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).unwrap();
            stream.write_all(b"{\n").unwrap();
            line
        });
        let error = send_command(&other, &destroy).unwrap_err().to_string();
        let start = format!("{}: cannot parse the reply: ", other.display());
        assert!(error.starts_with(&start), "{error}");
        let line = answering.join().unwrap();
        assert_eq!(line, "{\"command\":\"destroy\",\"guid\":\"g1\"}\n");
    }

    #[test]
    fn ended_rotator_is_said_so() {
        let (events, inbox) = mpsc::channel();
        drop(inbox);
        let stopping =
            |reply| matches!(reply, Reply::Error(text) if text == "the rotator is stopping");
        assert!(stopping(execute(&events, ControlCommand::Status)));
        let (events, inbox) = mpsc::channel();
        let answering = thread::spawn(move || {
            // The first command is dropped, the second answered.
            drop(inbox.recv().unwrap());
            let Ok(Event::Command(ControlCommand::Status, reply)) = inbox.recv() else {
                panic!("no command");
            };
            reply.send(Reply::Done).unwrap();
        });
        assert!(stopping(execute(&events, ControlCommand::Status)));
        assert!(matches!(
            execute(&events, ControlCommand::Status),
            Reply::Done
        ));
        answering.join().unwrap();
    }

    #[test]
    fn folder_admits_a_single_rotator() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b");
        let lock = lock_folder(&path).unwrap();
        assert_eq!(
            lock_folder(&path).unwrap_err().to_string(),
            format!(
                "{}: another rotator uses this folder; stop it or choose another one",
                path.display()
            )
        );
        drop(lock);
        drop(lock_folder(&path).unwrap());
        let (events, _inbox) = mpsc::channel();
        let none = folder.path().join("none");
        let unwatched = watch(&none, events, Arc::default()).unwrap_err();
        assert_eq!(
            unwatched.to_string(),
            format!("{}: create the folder of descriptions", none.display())
        );
    }

    #[test]
    fn rotator_works_until_stopped() {
        let world = World::new();
        let containers = world.folder.path().join("containers");
        std::fs::create_dir(&containers).unwrap();
        std::fs::write(containers.join("g1.json"), r#"{"guid":"g1"}"#).unwrap();
        let path = world.path("g1");
        let World {
            folder: _folder,
            rotator,
            ..
        } = world;
        let (events, inbox) = mpsc::channel();
        let pending = Arc::new(AtomicBool::new(true));
        let of_thread = pending.clone();
        let files = Descriptions::new(containers.clone());
        let worker = thread::spawn(move || work(rotator, Some(files), &inbox, &of_thread));
        let count = || match execute(&events, ControlCommand::Status) {
            Reply::Status(status) => status.identities.len(),
            _ => panic!("no status"),
        };
        assert_eq!(count(), 1);
        assert!(path.exists());
        std::fs::write(containers.join("g2.json"), r#"{"guid":"g2"}"#).unwrap();
        events.send(Event::Rescan).unwrap();
        // The command that follows in the same round is answered first.
        while count() < 2 {}
        assert!(!pending.load(Ordering::Acquire));
        events.send(Event::Key).unwrap();
        events.send(Event::Stop).unwrap();
        worker.join().unwrap();
    }

    #[test]
    fn changed_files_are_noticed_once() {
        let folder = tempfile::tempdir().unwrap();
        let (events, inbox) = mpsc::channel();
        let pending = Arc::new(AtomicBool::new(false));
        let _watcher = watch(folder.path(), events, pending.clone()).unwrap();
        for name in ["a.json", "b.json"] {
            std::fs::write(folder.path().join(name), "{}").unwrap();
        }
        assert!(matches!(inbox.recv(), Ok(Event::Rescan)));
        assert!(pending.load(Ordering::Acquire));
        assert!(inbox.try_recv().is_err());
    }
}
