//! Lifecycle of the fast path: loading, heartbeats, take-over, shutdown.

use std::{
    io,
    net::SocketAddr,
    os::unix::net::UnixStream,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    sync::{Semaphore, mpsc::Receiver},
    task::{JoinError, JoinHandle},
    time::timeout,
};
use tracing::{error, info, warn};

use crate::{
    ops::{
        service_status::{FastPathOff, ServiceStatus},
        tap::{self, Tap, TapLine},
    },
    server::Arrivals,
    state::{Route, ServerState},
};
use dns_common::control::{COOKIES, ECHO_OPT};
use dns_core::{
    config::{Config, HookMode, XdpConfig},
    wire::{FLAG_CD, FLAG_RD, Parsed, UDP_PAYLOAD_SIZE, opt_record, parse, query_message},
};
use dns_fastpath::{
    Admission, AdmitAll, AnswerQuestion, AttacherConnection, FastPath, FastPathError, TapItem,
};
use dns_health::HealthService;

/// Delay before reconnecting to a lost attacher.
const ATTACHER_PAUSE: Duration = Duration::from_secs(1);

/// Delay before the next request after a refusal: each attempt that the kernel rejects costs a
/// second of CPU time.
const REFUSAL_PAUSE: Duration = Duration::from_secs(5);

/// How long programs answer while the server's own attacher is being started again: nothing probes
/// their interfaces meanwhile.
const UNFOLLOWED: Duration = Duration::from_secs(10);

/// How long to wait for an attacher of this server to offer itself. The first one reads the configuration
/// before.
const OFFER_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the start waits for the service to detach an earlier server's programs.
const DETACHING_TIMEOUT: Duration = Duration::from_secs(5);

/// The fast path of a running server, empty until its maps exist. DNS does not wait for it.
///
/// A reconnected attacher brings a new fast path; until its programs are attached, the previous one
/// keeps answering, and both receive every change.
pub(super) struct Lifecycle {
    config: XdpConfig,
    max_reply: Option<u16>,
    /// Bits of [`dns_common::control::Control::edns`].
    edns: u32,
    server_state: Arc<ServerState>,
    /// `None` if health checks are off.
    health: Option<Arc<HealthService>>,
    service_status: ServiceStatus,
    tap: Tap,
    attacher: AttacherSource,
    /// Time at which the attacher was lost; `None`: it is there.
    lost_at: Option<Instant>,
    loading: Option<JoinHandle<Loaded>>,
    /// Reason why the last load attempt failed.
    problem: Option<String>,
    /// Last logged reason why no interface is served.
    unserved: Option<String>,
    current: Option<Arc<FastPath>>,
    /// Whether the current fast path has yet to learn where queries arrive. Its first report does not wait for
    /// its turn; later ones keep their pace, by which the attacher measures how long probes take.
    pub(super) awaits_evidence: bool,
    /// Previous fast path, until the current one's programs are attached.
    retiring: Option<Arc<FastPath>>,
    /// Task that feeds the interfaces' queries to the tap.
    feeder: Option<JoinHandle<()>>,
    /// Consecutive heartbeats during which the health checks hung.
    missed_heartbeats: u32,
}

/// The connection on which the attachers that this server started offer themselves, or the reason why
/// none was started.
pub(super) type OwnAttacher = io::Result<UnixStream>;

/// The origin of connections to an attacher.
#[derive(Clone, Debug)]
enum AttacherSource {
    /// The service at `xdp.attach_socket`.
    Service,
    /// An attacher that this server started; if it is killed, another one follows.
    Own(Arc<UnixStream>),
    /// It was not started, or has ended; holds the reason.
    Gone(String),
}

/// Result of loading maps and programs.
type Loaded = Result<Arc<FastPath>, FastPathError>;

/// A lifecycle event of the fast path.
pub(super) enum FastPathEvent {
    Loaded(Result<Loaded, JoinError>),
    /// The connection to the attacher was lost; its programs keep answering.
    AttacherLost,
}

impl Lifecycle {
    /// Creates a fast path that is off until [`Self::load`] is called.
    pub(super) fn new(
        config: &Config,
        own_attacher: Option<OwnAttacher>,
        server_state: Arc<ServerState>,
        health: Option<Arc<HealthService>>,
        service_status: ServiceStatus,
        tap: Tap,
    ) -> Self {
        Self {
            config: config.fast_path(),
            max_reply: config.max_reply,
            edns: u32::from(config.compat.echo_opt) * ECHO_OPT
                + u32::from(config.cookies.enabled) * COOKIES,
            server_state,
            health,
            service_status,
            tap,
            attacher: match own_attacher {
                None => AttacherSource::Service,
                Some(Ok(stream)) => AttacherSource::Own(Arc::new(stream)),
                // Without capabilities, which this process has dropped by now, none can be started.
                Some(Err(error)) => AttacherSource::Gone(format!("starting the attacher: {error}")),
            },
            lost_at: None,
            loading: None,
            problem: None,
            unserved: None,
            current: None,
            awaits_evidence: false,
            retiring: None,
            feeder: None,
            missed_heartbeats: 0,
        }
    }

    /// Starts creating the maps on a blocking thread; logs the reason if the fast path is disabled.
    pub(super) fn load(&mut self) {
        let off = match (self.config.enabled, self.config.mode) {
            (false, _) => Some("xdp.enabled is false"),
            (true, HookMode::Off) => Some("xdp.mode is off"),
            (true, _) => None,
        };
        if let Some(reason) = off {
            info!("fast path off: {reason}; every query is answered from userspace");
            self.off(FastPathOff::Intended(reason.to_owned()));
            return;
        }
        // Loading may take seconds of the verifier's time; `status` must not call that a failure.
        self.off(FastPathOff::Intended(
            "its programs are being loaded".to_owned(),
        ));
        self.server_state
            .fast_path
            .expect_previous_programs(self.config.lease);
        self.load_after(Duration::ZERO);
    }

    fn load_after(&mut self, pause: Duration) {
        let admission: Arc<dyn Admission> = match &self.health {
            Some(health) => health.tracker(),
            None => Arc::new(AdmitAll),
        };
        let config = self.config.clone();
        let listen = self.service_status.state().listen;
        let states = Arc::clone(&self.server_state.health);
        let source = self.attacher.clone();
        self.loading = Some(tokio::spawn(async move {
            // tokio's timer makes a pause of nothing one of a millisecond.
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
            // Never cancelled; a panic has been logged with its location.
            // The socket to the attacher is read with blocking calls, and loading waits for the
            // kernel.
            let started = tokio::task::spawn_blocking(move || {
                let attacher = connect(&config, &source)?;
                FastPath::start(&config, attacher, &listen, states, admission).map(Arc::new)
            })
            .await;
            started.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()))
        }));
    }

    /// Waits for the next event; cancel-safe.
    pub(super) async fn next(&mut self) -> FastPathEvent {
        match (&mut self.loading, &self.current) {
            // Its predecessor, if there is one, has been lost already.
            (Some(loading), _) => FastPathEvent::Loaded(loading.await),
            (None, Some(fast_path)) => {
                fast_path.lost().await;
                FastPathEvent::AttacherLost
            }
            (None, None) => std::future::pending().await,
        }
    }

    /// Handles an event. Called from the loop that installs snapshots, so that the fast path misses
    /// none.
    pub(super) fn follow(&mut self, event: FastPathEvent) {
        match event {
            FastPathEvent::AttacherLost => {
                self.lost_at = Some(Instant::now());
                if !self.is_attached() {
                    const LOST: &str = "the attacher was lost before it had attached the programs";
                    self.off(FastPathOff::Failed(LOST.to_owned()));
                }
                // Its programs keep answering from maps that this process writes to as before.
                self.load_after(ATTACHER_PAUSE);
            }
            FastPathEvent::Loaded(result) => {
                self.loading = None;
                match result {
                    Ok(Ok(fast_path)) => self.take(fast_path),
                    Ok(Err(problem)) => self.failed(problem),
                    // The panic has been logged with its location.
                    Err(problem) => self.not_loaded(problem.to_string(), Some(REFUSAL_PAUSE)),
                }
            }
        }
    }

    fn is_attached(&self) -> bool {
        self.current
            .as_ref()
            .is_some_and(|fast_path| fast_path.is_ready())
    }

    /// Handles a failed attempt to load: tries again if that may help.
    fn failed(&mut self, problem: FastPathError) {
        let pause = match (&problem, &self.attacher) {
            // This process has no privileges left to start another one.
            (_, AttacherSource::Gone(_)) => None,
            (FastPathError::NoAttacher(_), _) => Some(ATTACHER_PAUSE),
            // The service may be restarted meanwhile, with other limits or another version.
            (_, AttacherSource::Service) => Some(REFUSAL_PAUSE),
            // It has refused for good, or its successor has ended as well.
            (_, AttacherSource::Own(_)) => None,
        };
        let text = problem.to_string();
        let is_unfollowed = matches!(self.attacher, AttacherSource::Own(_))
            && self.lost_at.is_some_and(|at| at.elapsed() >= UNFOLLOWED);
        if pause.is_none() || is_unfollowed {
            self.withdraw(&text);
        }
        if pause.is_none() {
            self.attacher = AttacherSource::Gone(text.clone());
        }
        self.not_loaded(text, pause);
    }

    /// Makes `fast_path` the current one, which receives all changes from now on.
    fn take(&mut self, fast_path: Arc<FastPath>) {
        (self.problem, self.lost_at) = (None, None);
        self.service_status.change(|state| {
            state.fast_path_off = None;
            state.attacher_problem = None;
        });
        // Before the first entry is published: a reply with another OPT would differ from
        // userspace's.
        fast_path.set_edns(self.edns);
        if let Some(bytes) = self.max_reply {
            fast_path.set_max_reply(bytes);
        }
        // First the handle, then what is published: changes from now on reach the new maps as well.
        self.server_state.fast_path.fill(&fast_path);
        self.server_state.publish();
        // Loading began with the addresses of that time; addresses files may have changed them
        // since.
        fast_path.set_endpoints(&self.service_status.state().listen);
        // From here on the main loop's heartbeats renew the lease.
        fast_path.heartbeat(Duration::ZERO);
        if let Some(before) = std::mem::replace(&mut self.feeder, feed(&fast_path, &self.tap)) {
            before.abort();
        }
        let oldest = std::mem::replace(&mut self.retiring, self.current.replace(fast_path));
        // The attacher was lost again before it had attached the programs of its predecessor: the programs of the one
        // before may answer, and no change reaches their maps any more.
        withdraw_in_background(oldest);
        self.awaits_evidence = true;
    }

    /// Logs each new reason once and schedules another attempt after `pause`, if there is one.
    fn not_loaded(&mut self, problem: String, pause: Option<Duration>) {
        let is_new = self.problem.as_ref() != Some(&problem);
        if self.is_attached() {
            if is_new {
                warn!("cannot load new programs: {problem}; attached programs keep answering");
            }
            self.service_status
                .change(|state| state.attacher_problem = Some(problem.clone()));
        } else {
            if is_new {
                warn!("fast path off: {problem}; every query is answered from userspace");
            }
            self.off(FastPathOff::Failed(problem.clone()));
        }
        self.problem = Some(problem);
        if let Some(pause) = pause {
            self.load_after(pause);
        }
    }

    /// Ends the fast path while the server's own attacher is gone, because nothing would detect
    /// interfaces from which the kernel stops delivering.
    fn withdraw(&mut self, problem: &str) {
        if self.current.is_none() {
            return;
        }
        error!("fast path lost: {problem}; every query is answered from userspace");
        self.off(FastPathOff::Failed(problem.to_owned()));
        self.server_state.fast_path.clear();
        if let Some(feeder) = self.feeder.take() {
            feeder.abort();
        }
        withdraw_in_background(self.current.take());
        withdraw_in_background(self.retiring.take());
    }

    fn off(&self, why: FastPathOff) {
        self.service_status.change(|state| {
            state.fast_path_off = Some(why);
            state.attacher_problem = None;
        });
    }

    /// Logs each new reason why no interface is served, and the end of that state.
    fn log_unserved(&mut self) {
        let Some(fast_path) = &self.current else {
            return;
        };
        let interfaces = fast_path.status().interfaces;
        match interfaces.unserved {
            Some(why) if self.unserved.as_ref() != Some(&why) => {
                warn!(
                    "no interface is served: {why}; userspace answers every query; correct xdp.interfaces or remove \
                     the cause"
                );
                self.unserved = Some(why);
            }
            // Requires a served interface: while the gate waits for queries, the reason may return
            // with the next one.
            None if self.unserved.is_some()
                && interfaces.interfaces.iter().any(|one| one.hook.is_some()) =>
            {
                info!("an interface is served again");
                self.unserved = None;
            }
            _ => {}
        }
    }

    /// Returns the heartbeat interval, short enough for the lease and the service manager's
    /// watchdog.
    pub(super) fn heartbeat_interval(&self) -> Duration {
        // Eight chances for each lease: a busy machine may delay some of them.
        (self.config.lease / 8).clamp(Duration::from_millis(1), Duration::from_secs(2))
    }

    /// Sends a heartbeat with the time since the last sign of life of the health checks, so that
    /// interfaces stop answering while the checks hang.
    pub(super) fn heartbeat(&mut self) {
        let silent_for = self
            .health
            .as_ref()
            .map_or(Duration::ZERO, |health| health.silent_for());
        // At the end of the lease the interfaces stop; the log must have said why before.
        let hangs = silent_for >= self.config.lease / 2;
        let now = if hangs {
            self.missed_heartbeats.saturating_add(1)
        } else {
            0
        };
        match (std::mem::replace(&mut self.missed_heartbeats, now), now) {
            // After one missed heartbeat the whole process may have been suspended; only a second
            // one shows that the checks hang.
            (1, 2) => {
                error!(
                    "health checks stalled: every query is answered from userspace until they resume"
                )
            }
            (2.., 0) => info!("health checks resumed: interfaces answer again"),
            _ => {}
        }
        for fast_path in self.current.iter().chain(&self.retiring) {
            fast_path.heartbeat(silent_for);
        }
        self.log_unserved();
        if self.retiring.is_some() && self.is_attached() {
            // Not earlier: until the new programs are attached, the old ones answer and need every
            // change.
            self.server_state.fast_path.retire();
            stop_in_background(self.retiring.take());
        }
    }

    /// Reports on which interfaces queries have arrived since the last report.
    pub(super) fn report(&self, arrivals: &Arrivals) {
        let arrivals = arrivals.take();
        for fast_path in self.current.iter().chain(&self.retiring) {
            fast_path.report(arrivals.clone());
        }
    }

    /// Reports the first queries, which open the first admission.
    pub(super) fn report_evidence(&mut self, arrivals: &Arrivals) {
        self.awaits_evidence = false;
        self.report(arrivals);
    }

    /// Replaces the set of addresses for which the interfaces answer.
    pub(super) fn set_endpoints(&self, listen: &[SocketAddr]) {
        for fast_path in self.current.iter().chain(&self.retiring) {
            fast_path.set_endpoints(listen);
        }
    }

    /// Returns whether interfaces should keep forwarded answers by this configuration, but have no
    /// room for them until a restart.
    pub(super) fn lacks_cache(&self, config: &Config) -> bool {
        // Maps have the size of their creation.
        self.config.is_on()
            && self.config.cache_entries == 0
            && config.fast_path().cache_entries > 0
    }

    pub(super) fn replies(&self) -> u64 {
        self.current
            .as_ref()
            .map_or(0, |fast_path| fast_path.counters().hits())
    }

    /// Waits until the interfaces answer from the last published state; returns false if that takes
    /// longer than `limit`.
    pub(super) async fn flushed(&self, limit: Duration) -> bool {
        // The publisher may be in a long pass, and the main loop must keep the heartbeats up.
        timeout(limit, self.server_state.fast_path.flushed())
            .await
            .is_ok()
    }

    /// Detaches everything, or leaves it to a successor, and waits for completion.
    pub(super) async fn stop(mut self) {
        match self.loading.take() {
            // The attacher detects the closed connection.
            Some(loading) if self.config.attach_socket.is_some() || self.lost_at.is_some() => {
                loading.abort()
            }
            // Programs that finish loading must be detached again.
            Some(loading) => self.current = loading.await.ok().and_then(Result::ok),
            None => {}
        }
        stop_in_background(self.retiring.take());
        if let Some(fast_path) = self.current.take() {
            // Waits for the kernel and joins threads, so it must not run on a runtime thread.
            let _ = tokio::task::spawn_blocking(move || fast_path.stop()).await;
        }
    }
}

/// Makes the attacher's service detach what an earlier server at these addresses left, if the fast path is off: its
/// programs would answer from old records beside this server. Waits until that is done, but not for long.
///
/// A server that has no service does this itself, before it gives up its privileges.
pub(super) async fn end_earlier_programs(config: &XdpConfig, listen: &[SocketAddr]) {
    // A server with a fast path takes the programs over instead, without a gap.
    let Some(socket) = config.attach_socket.clone().filter(|_| !config.is_on()) else {
        return;
    };
    let user = config.attach_user.clone();
    let listen = listen.to_vec();
    let detaching = tokio::task::spawn_blocking(move || {
        AttacherConnection::open(&socket, user.as_deref())
            .and_then(|attacher| attacher.detach_earlier(&listen))
            .map_err(|problem| problem.to_string())
    });
    // After the lease they do not answer anyway.
    let detached = timeout(config.lease.min(DETACHING_TIMEOUT), detaching).await;
    match detached {
        Ok(Ok(Ok(()))) => info!("the attacher has detached the programs of earlier servers"),
        // A service that does not run detaches them itself when it starts.
        Ok(Ok(Err(problem))) => {
            info!("programs of an earlier server answer until its lease expires: {problem}")
        }
        Ok(Err(_)) | Err(_) => warn!(
            "the attacher has not detached the programs of an earlier server in time; they answer until its \
             lease expires"
        ),
    }
}

fn connect(
    config: &XdpConfig,
    source: &AttacherSource,
) -> Result<AttacherConnection, FastPathError> {
    match (source, &config.attach_socket) {
        // This process may no longer execute programs: an attacher that it started before hands
        // over the connection.
        (AttacherSource::Own(standby), _) => AttacherConnection::receive(standby, OFFER_TIMEOUT),
        (AttacherSource::Service, Some(socket)) => {
            AttacherConnection::open(socket, config.attach_user.as_deref())
        }
        (AttacherSource::Service, None) => Err(FastPathError::ended()),
        (AttacherSource::Gone(why), _) => Err(FastPathError::Failed(format!(
            "the attacher refused to load programs: {why}"
        ))),
    }
}

/// Stops a superseded fast path, joining its threads on a blocking thread.
fn stop_in_background(fast_path: Option<Arc<FastPath>>) {
    if let Some(fast_path) = fast_path {
        drop(tokio::task::spawn_blocking(move || fast_path.stop()));
    }
}

/// Ends the answers of a fast path whose attacher is gone, joining its threads on a blocking thread.
fn withdraw_in_background(fast_path: Option<Arc<FastPath>>) {
    if let Some(fast_path) = fast_path {
        drop(tokio::task::spawn_blocking(move || fast_path.withdraw()));
    }
}

/// Spawns the task that feeds the interfaces' queries to the tap; it ends if the ring buffer cannot
/// be read.
fn feed(fast_path: &FastPath, tap: &Tap) -> Option<JoinHandle<()>> {
    let reader = fast_path
        .tap()?
        .inspect_err(|problem| warn!("`tap` cannot show fast-path queries: {problem}"))
        .ok()?;
    let wanted = tap.wanted();
    let tap = tap.clone();
    let rate = wanted.clone();
    Some(tokio::spawn(reader.feed(wanted, move |item| match item {
        TapItem::Event(event, age) => {
            // One event stands for so many queries when the programs sample.
            let weight = *rate.borrow();
            if let Some(dnstap) = dns_dnstap::get() {
                tap::log_to_dnstap(dnstap, &event, age, weight);
            }
            tap.count_name(&event, weight);
            if tap.is_wanted() {
                tap.publish(TapLine::from_event(&event, age, weight), age);
            }
        }
        TapItem::Lost(number) => {
            if let Some(dnstap) = dns_dnstap::get() {
                dnstap.lost_at_interfaces(number);
            }
        }
    })))
}

//----------- Renewals ----------------------------------------------------------

/// Maximum number of concurrent renewals; further ones wait.
const AT_ONCE: usize = 16;

/// Time limit of a renewal. Afterwards the answer expires, and a query fetches it.
const RENEWAL_TIMEOUT: Duration = Duration::from_secs(5);

/// Renews forwarded answers that interfaces use shortly before they expire, so that no query waits for the renewal;
/// ends with the fast path.
pub(super) async fn follow_renewals(
    server_state: Arc<ServerState>,
    mut requested: Receiver<AnswerQuestion>,
) {
    let places = Arc::new(Semaphore::new(AT_ONCE));
    while let Some(renewal) = requested.recv().await {
        // While all places are taken, further requests wait in the bounded channel.
        let Ok(place) = places.clone().acquire_owned().await else {
            return;
        };
        let server_state = server_state.clone();
        tokio::spawn(async move {
            // The old answer stays until it expires.
            let _ = timeout(RENEWAL_TIMEOUT, renew(&server_state, &renewal)).await;
            drop(place);
        });
    }
}

/// Fetches an answer from the currently responsible server; its cache publishes it.
async fn renew(server_state: &ServerState, renewal: &AnswerQuestion) {
    let state = server_state.state_full();
    let message = query(renewal);
    let Parsed::Query(query) = parse(&message) else {
        return;
    };
    // Routed anew: since the answer was published, records or another handler may have taken the
    // name.
    if let Route::Handler(answer) | Route::Recursors(answer) =
        Route::of(&state, &renewal.name, renewal.qtype)
    {
        answer.refresh(&query).await;
    }
}

/// Returns the query that a client with these flags and RD would send.
fn query(renewal: &AnswerQuestion) -> Vec<u8> {
    let AnswerQuestion {
        name,
        qtype,
        dnssec_ok,
        checking_disabled,
    } = renewal;
    let flags = if *checking_disabled {
        FLAG_RD | FLAG_CD
    } else {
        FLAG_RD
    };
    let mut message = query_message(0, flags, name.as_wire(), *qtype);
    if *dnssec_ok {
        message[11] = 1;
        message.extend_from_slice(&opt_record(UDP_PAYLOAD_SIZE, 0, true));
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renewal_asks_the_same_question() {
        for (dnssec_ok, checking_disabled) in
            [(false, false), (true, false), (false, true), (true, true)]
        {
            let renewal = AnswerQuestion {
                name: "www.example".parse().unwrap(),
                qtype: 257,
                dnssec_ok,
                checking_disabled,
            };
            let message = query(&renewal);
            let Parsed::Query(query) = parse(&message) else {
                panic!("a query: {message:02x?}")
            };
            assert_eq!(
                (query.question.name(), query.question.qtype),
                (renewal.name, 257)
            );
            assert_eq!(
                (query.dnssec_ok(), query.checking_disabled()),
                (dnssec_ok, checking_disabled)
            );
            assert!(query.recursion_desired());
        }
    }
}
