//! The server at work: the loop, signals, the end.

use std::{
    net::SocketAddr,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::{mpsc, oneshot},
    task::JoinError,
    time,
};
use tracing::{error, info, warn};

use super::{
    DaemonError,
    answers::Answers,
    failures::{Failure, Failures},
    fast_path::{self, Loading, Slot},
    files::{Changes, Files},
    listeners::Listeners,
    sources::Sources,
    start::start,
    status::Board,
    upcheck::Upcheck,
    watch::Watch,
};
use crate::{
    config::{Config, Loaded},
    fastpath::{FastPath, FastPathError},
    health::HealthService,
    ops::{api::Reloaded, journal::Kind, logs::Logs, metrics::Metrics},
    server::{Local, Publish},
};

/// How often the server asks itself while it runs.
const UPCHECK_INTERVAL: Duration = Duration::from_secs(5);

/// So many questions to itself may fail one after the other before the server
/// ends: half a minute, during which nobody got an answer either.
const MOST_UPCHECK_FAILURES: u32 = 6;

/// Starts everything in order, serves until a signal, ends in order.
pub(super) async fn serve(
    path: &Path,
    loaded: Loaded,
    logs: &Logs,
    mut failures: Failures,
) -> Result<(), DaemonError> {
    // Before anything else: a signal during the start ends us in order as well.
    let mut signals = Signals::new()?;
    let mut daemon = start(path, loaded, logs, &failures).await?;
    let result = daemon.run(&mut signals, &mut failures).await;
    daemon.stop().await;
    result
}

/// All parts of a running server.
pub(super) struct Daemon<'a> {
    /// config.json.
    pub(super) path: &'a Path,
    /// What it said at the last good reading.
    pub(super) config: Arc<Config>,
    /// Levels can change.
    pub(super) logs: &'a Logs,
    /// What is shown to operators.
    pub(super) board: Board,
    /// Everything that is followed on disk.
    pub(super) files: Files,
    /// Says when to look.
    pub(super) watch: Watch,
    /// Names of the fleet.
    pub(super) local: Arc<Local>,
    /// Who answers which other name.
    pub(super) answers: Answers,
    /// The sockets.
    pub(super) listeners: Listeners,
    /// What the server asks itself.
    pub(super) upcheck: Upcheck,
    /// Health checks; `None`: off.
    pub(super) health: Option<Arc<HealthService>>,
    /// The fast path as other rooms hold it.
    pub(super) slot: Slot,
    /// Its programs while they are being loaded.
    pub(super) loading: Option<Loading>,
    /// The fast path; `None`: there is none, or not yet.
    pub(super) fast_path: Option<Arc<FastPath>>,
    /// All counters.
    pub(super) metrics: Metrics,
    /// Reloads that were asked for by the API.
    pub(super) reload_orders: mpsc::Receiver<oneshot::Sender<Reloaded>>,
}

impl Daemon<'_> {
    /// Serves until SIGTERM or SIGINT, or until a part fails.
    async fn run(&mut self, signals: &mut Signals, failures: &mut Failures) -> Result<(), DaemonError> {
        let mut asking = time::interval_at(time::Instant::now() + UPCHECK_INTERVAL, UPCHECK_INTERVAL);
        asking.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        let mut unanswered = 0;
        loop {
            tokio::select! {
                () = self.watch.next() => self.look(false).await,
                asked = signals.next() => match asked {
                    Asked::End(name) => {
                        info!("{name}: ending");
                        return Ok(());
                    }
                    Asked::Reload => self.reload("SIGHUP").await,
                },
                Some(done) = self.reload_orders.recv() => {
                    self.reload("API").await;
                    // Whoever asked may have gone.
                    let _ = done.send(self.board.reloaded());
                }
                result = finished(&mut self.loading) => self.take_fast_path(result, failures),
                failure = failures.next() => return Err(failure.into()),
                _ = asking.tick() => {
                    if let Some(address) = self.listeners.ended() {
                        let part = format!("the server on {address}");
                        return Err(Failure { part, problem: "it ended".to_owned() }.into());
                    }
                    self.ask_itself(&mut unanswered).await?;
                }
            }
        }
    }

    /// The programs are loaded, or cannot be: from now on interfaces answer what
    /// is published. Here, where snapshots are installed as well, so that none is missed.
    fn take_fast_path(
        &mut self,
        result: Result<Result<FastPath, FastPathError>, JoinError>,
        failures: &Failures,
    ) {
        self.loading = None;
        let Some(fast_path) = fast_path::loaded(result, &self.board) else { return };
        self.slot.fill(&fast_path);
        self.slot.install(self.local.snapshot());
        fast_path.set_endpoints(&self.board.state().listen);
        failures.spawn("the heartbeat of the fast path", fast_path::keep_alive(&fast_path));
        fast_path::feed_tap(&fast_path);
        fast_path::count(&fast_path, &self.metrics);
        self.fast_path = Some(fast_path);
    }

    /// One question to itself; an error once too many stayed unanswered.
    async fn ask_itself(&self, unanswered: &mut u32) -> Result<(), DaemonError> {
        let result = self.upcheck.once().await;
        self.board.change(|state| state.upcheck_error = result.as_ref().err().map(ToString::to_string));
        let Err(problem) = result else {
            if *unanswered > 0 {
                info!("the server answers itself again");
            }
            *unanswered = 0;
            return Ok(());
        };
        *unanswered += 1;
        error!("the server does not answer itself ({unanswered} of {MOST_UPCHECK_FAILURES}): {problem}");
        if *unanswered >= MOST_UPCHECK_FAILURES { Err(DaemonError::Hung(problem)) } else { Ok(()) }
    }

    /// Looks at the files and puts to use what is new.
    async fn look(&mut self, force: bool) {
        let Changes { snapshot, handlers, addresses } = self.files.look(force).await;
        if let Some(snapshot) = snapshot {
            self.local.install(Arc::new(snapshot));
        }
        self.answers.follow_records(&self.config);
        if let Some(handlers) = handlers {
            self.answers.set_handlers(handlers, &self.config);
        }
        if let Some(addresses) = addresses {
            self.listen(&addresses).await;
        }
        self.watch.set(self.files.folders());
    }

    /// Listens on the configured address and these.
    async fn listen(&mut self, further: &[SocketAddr]) {
        let wanted = all_addresses(self.config.listen, further);
        self.answers.listens_on(&wanted);
        let served = self.listeners.set(&wanted).await;
        self.upcheck =
            Upcheck::new(&served, &self.config.upcheck_domains, self.config.internal_upcheck.as_ref());
        if let Some(fast_path) = &self.fast_path {
            fast_path.set_endpoints(&served);
        }
        self.board.change(|state| state.listen = served);
    }

    /// Reads everything again, the configuration too.
    async fn reload(&mut self, why: &str) {
        info!("{why}: reading everything again");
        match Config::load(self.path) {
            Ok(loaded) => self.reconfigure(loaded),
            Err(problem) => {
                error!("{problem}; the configuration in use stays");
                self.board.refused(Kind::Config, vec![self.path.to_owned()], &problem.to_string());
            }
        }
        self.look(true).await;
        info!("{why}: everything was read again");
    }

    /// Puts to use what of a new configuration can change while the server runs.
    fn reconfigure(&mut self, loaded: Loaded) {
        let begun = Instant::now();
        let Loaded { config, mut warnings } = loaded;
        let stays = needs_restart(&self.config, &config);
        if !stays.is_empty() {
            warnings.push(format!("changed, but takes effect only after a restart: {}", stays.join(", ")));
        }
        for warning in &warnings {
            warn!("{warning}");
        }
        let config = Config {
            listen: self.config.listen,
            timeout: self.config.timeout,
            request_timeout: self.config.request_timeout,
            api: self.config.api.clone(),
            health: self.config.health.clone(),
            metrics: self.config.metrics,
            jobs_dir: self.config.jobs_dir.clone(),
            xdp: self.config.xdp.clone(),
            ..config
        };
        if let Err(problem) = self.logs.apply(&config.logging) {
            error!("{problem}");
        }
        let listen = self.board.state().listen;
        if let Err(problem) = self.answers.reconfigure(&self.config, &config, &listen) {
            error!("metrics: {problem}");
        }
        self.files.follow(Sources::of(&config));
        self.config = Arc::new(config);
        self.board.loaded(Kind::Config, vec![self.path.to_owned()], warnings, begun.elapsed(), "read");
    }

    /// Ends in order.
    async fn stop(self) {
        let Self { listeners, health, mut fast_path, loading, board, .. } = self;
        if let Some(loading) = loading {
            // What is loaded has to be taken away again.
            fast_path = fast_path::loaded(loading.await, &board);
        }
        // First, so that what interfaces answer no more finds the sockets open.
        if let Some(fast_path) = fast_path {
            // Waits for the kernel and joins threads.
            // Someone who just looks at it for a moment drops it last, which stops it as well.
            let stop = move || Arc::into_inner(fast_path).map(FastPath::stop);
            let _ = tokio::task::spawn_blocking(stop).await;
        }
        listeners.stop().await;
        if let Some(health) = health {
            // Joins a thread.
            let _ = tokio::task::spawn_blocking(move || health.stop()).await;
        }
        info!("ended");
    }
}

/// What came of loading the programs; never, if none are being loaded.
async fn finished(loading: &mut Option<Loading>) -> Result<Result<FastPath, FastPathError>, JoinError> {
    match loading {
        Some(loading) => loading.await,
        None => std::future::pending().await,
    }
}

/// Settings that differ and take effect only after a restart, by their names.
fn needs_restart(old: &Config, new: &Config) -> Vec<&'static str> {
    let parts = [
        ("address, port", old.listen != new.listen),
        ("timeout", old.timeout != new.timeout),
        ("request_timeout", old.request_timeout != new.request_timeout),
        ("api", old.api != new.api),
        ("jobs_dir", old.jobs_dir != new.jobs_dir),
        ("health", old.health != new.health),
        ("metrics", old.metrics != new.metrics),
        ("identity", old.identity != new.identity),
        ("xdp", old.xdp != new.xdp),
    ];
    parts.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name).collect()
}

/// The configured address, then the further ones, each once.
pub(super) fn all_addresses(configured: SocketAddr, further: &[SocketAddr]) -> Vec<SocketAddr> {
    let mut all = vec![configured];
    for &address in further {
        if !all.contains(&address) {
            all.push(address);
        }
    }
    all
}

/// The signals that mean something to us.
struct Signals {
    /// SIGTERM: end.
    terminate: Signal,
    /// SIGINT: end.
    interrupt: Signal,
    /// SIGHUP: read everything again.
    hangup: Signal,
}

/// What a signal asks for.
enum Asked {
    /// To end; the signal's name.
    End(&'static str),
    /// To read everything again.
    Reload,
}

impl Signals {
    /// Takes them over from their default actions.
    fn new() -> Result<Self, DaemonError> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// The next one.
    async fn next(&mut self) -> Asked {
        tokio::select! {
            _ = self.terminate.recv() => Asked::End("SIGTERM"),
            _ = self.interrupt.recv() => Asked::End("SIGINT"),
            _ = self.hangup.recv() => Asked::Reload,
        }
    }
}
