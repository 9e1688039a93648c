//! The life of the fast path: loading, its signs of life, take-over, end.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use tokio::task::{JoinError, JoinHandle};
use tracing::{error, info, warn};

use crate::ops::board::Board;
use crate::{
    fleet::Fleet,
    ops::tap::{Tap, TapLine},
    server::Arrivals,
};
use dns_core::{
    config::{Config, HookMode, XdpConfig},
    resolve::Health,
};
use dns_fastpath::{Admission, Everything, FastPath, FastPathError, TapItem};
use dns_health::HealthService;

/// Pause before a lost attacher is looked for.
const ATTACHER_PAUSE: Duration = Duration::from_secs(1);

/// Pause before an attacher that refused is asked again: hearing the kernel refuse once more
/// costs it a second of CPU.
const REFUSAL_PAUSE: Duration = Duration::from_secs(5);

/// The fast path of a running server: empty until its maps are made. DNS does not wait.
///
/// An attacher that comes back brings another fast path; until its programs are attached, the
/// one before answers on, and both are told of every change.
pub(super) struct Lifecycle {
    config: XdpConfig,
    max_reply: Option<u16>,
    echo_opt: bool,
    fleet: Arc<Fleet>,
    /// Health of instances, as published answers see it.
    states: Arc<dyn Health + Send + Sync>,
    /// Health checks; `None` while they are off.
    health: Option<Arc<HealthService>>,
    board: Board,
    tap: Tap,
    /// Programs that are being loaded.
    loading: Option<JoinHandle<Loaded>>,
    /// Reason for which nothing was loaded at the last attempt.
    problem: Option<String>,
    current: Option<Arc<FastPath>>,
    /// Predecessor, until the programs of the current one are attached.
    retiring: Option<Arc<FastPath>>,
    /// Task that shows live queries of the interfaces.
    feeder: Option<JoinHandle<()>>,
    /// Signs of life in a row at which the health checks hung.
    hung_beats: u32,
}

/// Result of loading maps and programs.
type Loaded = Result<Arc<FastPath>, FastPathError>;

/// Something that happened to the fast path.
pub(super) enum Event {
    /// Loading has ended.
    Loaded(Result<Loaded, JoinError>),
    /// The attacher is gone; the programs answer on.
    AttacherLost,
}

impl Lifecycle {
    /// A fast path that is off until [`Self::load`].
    pub(super) fn new(
        config: &Config,
        fleet: Arc<Fleet>,
        states: Arc<dyn Health + Send + Sync>,
        health: Option<Arc<HealthService>>,
        board: Board,
        tap: Tap,
    ) -> Self {
        Self {
            config: config.xdp.clone(),
            max_reply: config.max_reply,
            echo_opt: config.compat.echo_opt,
            fleet,
            states,
            health,
            board,
            tap,
            loading: None,
            problem: None,
            current: None,
            retiring: None,
            feeder: None,
            hung_beats: 0,
        }
    }

    /// Begins to make the maps, off the async threads; logs the reason if none are wanted.
    pub(super) fn load(&mut self) {
        let off = match (self.config.enabled, self.config.mode) {
            (false, _) => Some("xdp.enabled is false"),
            (true, HookMode::Off) => Some("xdp.mode is off"),
            (true, _) => None,
        };
        if let Some(reason) = off {
            info!("no fast path: {reason}; every query is answered from userspace");
            self.board.change(|state| state.fast_path_off = Some(reason.to_owned()));
            return;
        }
        self.board.change(|state| state.fast_path_off = Some("its programs are being loaded".to_owned()));
        self.load_after(Duration::ZERO);
    }

    /// Begins to make the maps after a pause.
    fn load_after(&mut self, pause: Duration) {
        let admission: Arc<dyn Admission> = match &self.health {
            Some(health) => health.tracker(),
            None => Arc::new(Everything),
        };
        let (config, listen, states) = (self.config.clone(), self.board.state().listen, self.states.clone());
        self.loading = Some(tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            let start = move || FastPath::start(&config, &listen, states, admission).map(Arc::new);
            // Nobody cancels it; the panic was logged with its place.
            let started = tokio::task::spawn_blocking(start).await;
            started.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()))
        }));
    }

    /// Waits for the next event. Nothing is lost if the future is dropped.
    pub(super) async fn next(&mut self) -> Event {
        match (&mut self.loading, &self.current) {
            (Some(loading), _) => Event::Loaded(loading.await),
            (None, Some(fast_path)) => {
                fast_path.lost().await;
                Event::AttacherLost
            }
            (None, None) => std::future::pending().await,
        }
    }

    /// Reacts to an event. Called where snapshots are installed as well, so that none is missed.
    pub(super) fn follow(&mut self, event: Event) {
        match event {
            Event::AttacherLost => self.load_after(ATTACHER_PAUSE),
            Event::Loaded(result) => {
                self.loading = None;
                match result {
                    Ok(Ok(fast_path)) => self.take(fast_path),
                    Ok(Err(problem @ FastPathError::NoAttacher { .. })) => {
                        self.not_loaded(problem.to_string(), ATTACHER_PAUSE);
                    }
                    Ok(Err(problem)) => self.not_loaded(problem.to_string(), REFUSAL_PAUSE),
                    // The panic was logged with its place.
                    Err(problem) => self.not_loaded(problem.to_string(), REFUSAL_PAUSE),
                }
            }
        }
    }

    /// Lets the interfaces answer what is published from now on.
    fn take(&mut self, fast_path: Arc<FastPath>) {
        self.problem = None;
        self.board.change(|state| state.fast_path_off = None);
        fast_path.set_echo_opt(self.echo_opt);
        if let Some(bytes) = self.max_reply {
            fast_path.set_max_reply(bytes);
        }
        self.fleet.fast_path.fill(&fast_path);
        self.fleet.publish();
        fast_path.set_endpoints(&self.board.state().listen);
        // The lease counts from the loop's signs of life from now on.
        fast_path.heartbeat(Duration::ZERO);
        if let Some(before) = std::mem::replace(&mut self.feeder, feed(&fast_path, &self.tap)) {
            before.abort();
        }
        self.retiring = self.current.replace(fast_path);
    }

    /// Logs each reason once, and asks an attacher again after a pause.
    fn not_loaded(&mut self, problem: String, pause: Duration) {
        let is_new = self.problem.as_ref() != Some(&problem);
        match self.current.is_some() {
            true if is_new => {
                warn!("cannot load new programs: {problem}; those that are attached go on answering");
            }
            false if is_new => warn!("no fast path: {problem}; every query is answered from userspace"),
            _ => {}
        }
        if self.current.is_none() {
            self.board.change(|state| state.fast_path_off = Some(problem.clone()));
        }
        self.problem = Some(problem);
        if self.config.attach_socket.is_some() {
            self.load_after(pause);
        }
    }

    /// Returns the interval of signs of life: short enough for the lease and for a service
    /// manager that waits for them.
    pub(super) fn beat_interval(&self) -> Duration {
        (self.config.lease / 8).clamp(Duration::from_millis(1), Duration::from_secs(2))
    }

    /// Gives a sign of life. Interfaces answer by what health checks find: they stop when the
    /// checks hang.
    pub(super) fn beat(&mut self) {
        let silent_for = self.health.as_ref().map_or(Duration::ZERO, |health| health.silent_for());
        let hangs = silent_for >= self.config.lease / 2;
        let now = if hangs { self.hung_beats.saturating_add(1) } else { 0 };
        match (std::mem::replace(&mut self.hung_beats, now), now) {
            // At the first one the whole process may have stood still; it is ahead of the checks.
            (1, 2) => error!("health checks hang: until they go on, every query is answered from userspace"),
            (2.., 0) => info!("health checks go on: interfaces answer again"),
            _ => {}
        }
        for fast_path in self.current.iter().chain(&self.retiring) {
            fast_path.heartbeat(silent_for);
        }
        if self.retiring.is_some() && self.current.as_ref().is_some_and(|fast_path| fast_path.is_ready()) {
            self.fleet.fast_path.retire();
            stop_in_background(self.retiring.take());
        }
    }

    /// Tells by which interfaces queries arrived since the last report.
    pub(super) fn report(&self, arrivals: &Arrivals) {
        let arrivals = arrivals.take();
        for fast_path in self.current.iter().chain(&self.retiring) {
            fast_path.report(arrivals.clone());
        }
    }

    /// Answers for exactly these addresses from now on.
    pub(super) fn set_endpoints(&self, listen: &[SocketAddr]) {
        if let Some(fast_path) = &self.current {
            fast_path.set_endpoints(listen);
        }
    }

    /// Returns the replies of the interfaces so far.
    pub(super) fn replies(&self) -> u64 {
        self.current.as_ref().map_or(0, |fast_path| fast_path.counters().hits())
    }

    /// Waits until the interfaces answer by what was published last; false if that takes longer
    /// than `patience`.
    pub(super) async fn flushed(&self, patience: Duration) -> bool {
        tokio::time::timeout(patience, self.fleet.fast_path.flushed()).await.is_ok()
    }

    /// Detaches everything, or leaves it to a successor, and waits until that is done.
    pub(super) async fn stop(mut self) {
        match self.loading.take() {
            // The attacher sees that nobody waits any more.
            Some(loading) if self.config.attach_socket.is_some() => loading.abort(),
            // What is loaded has to be taken away again.
            Some(loading) => self.current = loading.await.ok().and_then(Result::ok),
            None => {}
        }
        stop_in_background(self.retiring.take());
        if let Some(fast_path) = self.current.take() {
            // Waits for the kernel and joins threads.
            let _ = tokio::task::spawn_blocking(move || fast_path.stop()).await;
        }
    }
}

/// Stops a fast path whose programs others have replaced; joins its threads elsewhere.
fn stop_in_background(fast_path: Option<Arc<FastPath>>) {
    if let Some(fast_path) = fast_path {
        drop(tokio::task::spawn_blocking(move || fast_path.stop()));
    }
}

/// Shows live queries of the interfaces, in a task that ends by itself if the ring buffer cannot
/// be read.
fn feed(fast_path: &FastPath, tap: &Tap) -> Option<JoinHandle<()>> {
    let reader = fast_path
        .tap()?
        .inspect_err(|problem| warn!("queries answered by interfaces cannot be shown by `tap`: {problem}"))
        .ok()?;
    let (wanted, tap) = (tap.wanted(), tap.clone());
    let rate = wanted.clone();
    Some(tokio::spawn(reader.feed(wanted, move |item| match item {
        TapItem::Event(event, age) => tap.publish(TapLine::from_event(&event, age, *rate.borrow())),
        TapItem::Lost(_) => {}
    })))
}
