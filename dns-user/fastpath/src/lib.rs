//! The fast path as seen from userspace.
//!
//! * [`map`]: the memory from which the programs answer queries.
//! * [`publish`]: its contents, which only the publisher's thread changes.
//! * [`connection`]: the session with the attacher (`dns-attacher`), the privileged process that loads, pins and attaches
//!   the programs; [`protocol`]: what both say to each other.
//! * [`memory`]: the maps as the server uses them.
//! * [`observe`]: samples from the programs.
//!
//! [`FastPath`] owns all of it; [`FastPathHandle`] is the handle for its users. Nothing here needs a capability or calls
//! bpf(2).

mod connection;
mod handle;
pub mod map;
mod memory;
mod observe;
pub mod protocol;
mod publish;

use std::{
    any::Any,
    hash::{BuildHasher as _, Hasher as _},
    io,
    net::SocketAddr,
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use parking_lot::{Mutex, RwLock};

pub use self::{
    connection::AttacherConnection,
    handle::FastPathHandle,
    map::{
        answer::{AnswerKey, AnswerQuestion},
        counters::Counters,
        store::StoreFill,
    },
    observe::{TapItem, TapReader},
    protocol::{
        Arrival, Effort, Hook, InterfaceState, InterfaceStatus, InterfacesStatus, MAX_CLIENTS,
        MIN_QUERIES as EVIDENCE, Operation, ProgramState, ProgramStatus, Work,
    },
    publish::{
        answers::{AnswersStatus, MAX_REPLIES, REPLY_BYTES, RepliesStatus},
        lease::WITHOUT_MEMBARRIER,
        replies::{HeldReply, is_answerable},
        source::NameSource,
        table::{TableStatus, UnfittingStatus, fuzz as fuzzing},
    },
};
use self::{
    connection::Session,
    map::{control::ControlPage, counters::CounterPages},
    memory::Memory,
    observe::Ring,
    protocol::AttacherStatus,
    publish::{
        lease::{GracePeriods, Lease, UNWATCHED},
        publisher::Publisher,
        thread::{PublisherThread, ThreadSetting},
    },
};
use dns_core::{
    catalog::Snapshot,
    changes::{self, Changes, Facets},
    config::{HookMode, OnStop, XdpConfig},
    name::Name,
    resolve::{self, Health, Resolution},
};
use dns_kit::clock::kernel_monotonic_ns;

/// Entries of forwarded answers, for fuzz targets and for tests that compare the programs with userspace.
#[doc(hidden)]
pub mod forwarded {
    pub use crate::map::answer::{LocalReply, encode, encode_local};

    /// Returns the entry of the local replies to a question of clients with this EDNS size.
    pub fn local_entry(
        source: &dyn crate::NameSource,
        question: &crate::AnswerQuestion,
        size: Option<u16>,
        seed: u64,
    ) -> Option<Vec<u64>> {
        let drawn = crate::publish::replies::draw(source, question, size, seed)?;
        encode_local(&drawn.reply, question, seed)
    }
}

/// Interval at which callers should call [`FastPath::report`].
pub const REPORT_INTERVAL: Duration = Duration::from_millis(250);

/// How long a report from the server permits probes: about two intervals.
const REPORT_HOLDS_NS: u64 = 600_000_000;

/// Decides whether interfaces may currently answer a resolved name.
pub trait Admission: Send + Sync {
    /// Returns whether `name`, which resolves to `resolution`, may be published.
    fn may_publish(&self, name: &Name, resolution: &Resolution) -> bool;
}

/// Admits every name; used when health checks are off.
#[derive(Clone, Copy, Debug)]
pub struct AdmitAll;

impl Admission for AdmitAll {
    fn may_publish(&self, _name: &Name, _resolution: &Resolution) -> bool {
        true
    }
}

impl NameSource for Snapshot {
    fn published_names(&self) -> Box<dyn Iterator<Item = Name> + '_> {
        Box::new(dns_core::listing::published_names(self))
    }

    fn resolve(&self, health: &dyn Health, name: &Name) -> Option<Resolution> {
        resolve::resolve(self, health, name)
    }

    fn facets(&self, name: &Name) -> Facets {
        changes::facets(self, name)
    }

    fn changes_since(&self, older: &dyn NameSource) -> Option<Changes> {
        changes::between((older as &dyn Any).downcast_ref()?, self)
    }
}

/// The reason why there is no fast path. The server then answers from userspace.
#[derive(Debug, thiserror::Error)]
pub enum FastPathError {
    /// The attacher cannot be reached or handed over no maps, which may be temporary.
    #[error("{0}")]
    NoAttacher(String),
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}

impl FastPathError {
    fn io(what: &str, error: io::Error) -> Self {
        Self::Failed(format!("{what}: {error}"))
    }

    /// The attacher that this server started has ended for good.
    pub fn ended() -> Self {
        Self::Failed(
            "the attacher has ended; restart the server to attach programs again".to_owned(),
        )
    }
}

/// Everything about the fast path, for `/status`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct FastPathStatus {
    /// The interfaces, the programs on them and the endpoints served.
    #[serde(flatten)]
    pub interfaces: InterfacesStatus,
    /// The programs needed so far.
    pub programs: Vec<ProgramStatus>,
    /// Number of published names, and the memory they take.
    #[serde(rename = "table")]
    pub names: TableStatus,
    /// Number of forwarded answers, and the memory they take.
    #[serde(rename = "forwarded")]
    pub answers: AnswersStatus,
    /// State of the lease under which the programs answer.
    pub lease: LeaseStatus,
    /// Path at which links and maps are pinned; null if they end with the process.
    pub pinned_at: Option<PathBuf>,
}

/// State of the lease, in milliseconds.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct LeaseStatus {
    /// Duration of a full lease, in milliseconds.
    pub length_ms: u128,
    /// Remaining time; 0 once the programs answer nothing.
    pub remaining_ms: u128,
}

/// The running fast path. Dropping it calls [`FastPath::stop`].
pub struct FastPath {
    /// The threads; `None` once stopped.
    running: RwLock<Option<Running>>,
    lease: Lease,
    control: Arc<ControlPage>,
    /// The ring buffer `TAP`, until [`FastPath::tap`] takes it.
    tap: Mutex<Option<Ring>>,
    counters: Arc<CounterPages>,
    /// Whether programs and pins stay when the server stops.
    on_stop: OnStop,
}

/// The publisher and the session with the attacher.
struct Running {
    publisher: PublisherThread,
    /// The session with the attacher, which follows the interfaces.
    session: Session,
}

/// Returns an error if the configuration leaves a fast path nothing to do.
fn check_wanted(config: &XdpConfig, endpoints: &[SocketAddr]) -> Result<(), FastPathError> {
    if !config.enabled || config.mode == HookMode::Off {
        return Err(FastPathError::Failed(
            "the fast path is switched off (xdp.enabled, xdp.mode)".to_owned(),
        ));
    }
    if endpoints.is_empty() {
        return Err(FastPathError::Failed(
            "the server has no listen address".to_owned(),
        ));
    }
    Ok(())
}

impl FastPath {
    /// Requests programs and maps from the attacher and starts the threads. Programs are attached
    /// once the first names are in the map or, if a predecessor's programs may still answer, once all
    /// names of the first snapshot are.
    pub fn start(
        config: &XdpConfig,
        attacher: AttacherConnection,
        endpoints: &[SocketAddr],
        health: Arc<dyn Health + Send + Sync>,
        admission: Arc<dyn Admission>,
    ) -> Result<Self, FastPathError> {
        check_wanted(config, endpoints)?;
        let asking = |error| FastPathError::io("asking the attacher", error);
        let (memory, earlier, pending, wait) =
            attacher.request_maps(endpoints)?.split().map_err(asking)?;
        let Memory {
            names,
            answers,
            control,
            counters,
            tap,
            limits,
        } = memory;
        if let Some(names) = earlier.as_ref().map(Vec::len).filter(|&names| names > 0) {
            tracing::info!(names, "taking over the predecessor's learned names");
        }
        // One at a time: the attacher reports the end of a grace period, but not of which.
        let wait = Arc::new(Mutex::new(wait));
        let grace_periods = || {
            let wait = wait.clone();
            GracePeriods::start(move || wait.lock()())
                .map_err(|error| FastPathError::io("starting the thread of grace periods", error))
        };
        // New for each set of maps: clients cannot find out which names collide.
        let seed = random_seed();
        control.set_hash_seed(seed);
        let lease = Lease::new(control.clone(), config.lease);
        let setting = ThreadSetting {
            names,
            answers,
            limits,
            health,
            admission,
            seed,
            lease: lease.clone(),
            earlier,
            request_attach: pending.request_attach(),
            attached: pending.ready.subscribe(),
        };
        let grace = [grace_periods()?, grace_periods()?];
        let publisher = PublisherThread::start(setting, grace)
            .map_err(|error| FastPathError::io("starting the publisher", error))?;
        let session = pending.follow(lease.clone()).map_err(asking)?;
        Ok(Self {
            running: RwLock::new(Some(Running { publisher, session })),
            lease,
            control,
            tap: Mutex::new(Some(tap)),
            counters,
            on_stop: config.on_stop,
        })
    }

    pub(crate) fn publisher(&self) -> Option<Arc<Publisher>> {
        self.running(|running| running.publisher.publisher.clone())
    }

    /// Resolves when the first snapshot is in the map and all interfaces present at the start have
    /// been processed.
    pub async fn ready(&self) {
        // Cloned, so that the lock is not held while waiting: `stop` needs it.
        let waits = self.running(|running| {
            (
                running.publisher.installs.clone(),
                running.session.ready.clone(),
            )
        });
        let Some((mut installs, mut ready)) = waits else {
            return;
        };
        // An error means that the thread has ended, so there is nothing left to wait for.
        let _ = installs.wait_for(|&installs| installs > 0).await;
        let _ = ready.wait_for(|ready| *ready).await;
    }

    /// Returns whether [`Self::ready`] would resolve immediately, and the kernel verifies no further program.
    pub fn is_ready(&self) -> bool {
        self.running(|Running { publisher, session }| {
            let programs = &session.attached.lock().programs;
            // The complete program is verified after the first pass; a start that waits for all
            // answers waits for it.
            let is_loading = programs
                .iter()
                .any(|program| program.state == ProgramState::Loading);
            *publisher.installs.borrow() > 0 && *session.ready.borrow() && !is_loading
        })
        .unwrap_or(true)
    }

    /// Resolves when the attacher is gone: the programs keep answering, but changes of interfaces
    /// are no longer followed.
    pub async fn lost(&self) {
        let Some(mut lost) = self.running(|running| running.session.lost.clone()) else {
            return std::future::pending().await;
        };
        // An error means that the thread has ended as well.
        let _ = lost.wait_for(|lost| *lost).await;
    }

    /// Records a sign of life of the daemon's runtime and of everything else on which correct answers depend;
    /// the oldest such sign is `age` old. From the first call on, the lease is counted from the latest call,
    /// so calls must follow at intervals of about an eighth of the lease.
    pub fn heartbeat(&self, age: Duration) {
        self.lease.heartbeat(age);
    }

    /// Leaves replies longer than this many bytes to userspace.
    pub fn set_max_reply(&self, bytes: u16) {
        self.control.set_max_reply(bytes.into());
    }

    /// Sets the bits for the OPT of queries and replies: `dns_common::control::ECHO_OPT` and `COOKIES`.
    pub fn set_edns(&self, bits: u32) {
        self.control.set_edns(bits);
    }

    /// Returns the state of the fast path.
    pub fn status(&self) -> FastPathStatus {
        let (attached, names, answers) = self
            .running(|Running { publisher, session }| {
                (
                    session.attached.lock().clone(),
                    publisher.status.lock().clone(),
                    *publisher.answers_status.lock(),
                )
            })
            .unwrap_or_default();
        let AttacherStatus {
            mut interfaces,
            programs,
            ready: _,
            pinned_at,
        } = attached;
        // The attacher's last words may still say that all is well.
        if self.lease.unwatched_for() >= UNWATCHED {
            interfaces.unserved = Some(format!(
                "the attacher has been silent for more than {} s, so nothing watches packet filter rules and routes: \
                 check whether its process is stopped or waits for the kernel",
                UNWATCHED.as_secs()
            ));
        }
        FastPathStatus {
            interfaces,
            programs,
            names,
            answers,
            lease: LeaseStatus {
                length_ms: self.lease.length().as_millis(),
                remaining_ms: self.lease.remaining().as_millis(),
            },
            pinned_at,
        }
    }

    /// Returns what the attacher has done so far; up to two seconds old.
    pub fn attacher_work(&self) -> Work {
        self.running(|running| running.session.work.lock().clone())
            .unwrap_or_default()
    }

    /// Returns the programs' counters, as totals since they were loaded.
    pub fn counters(&self) -> Counters {
        Counters::new(self.counters.read())
    }

    /// Returns the reader of the tap, or `None` after the first call. Must be called within a tokio runtime.
    pub fn tap(&self) -> Option<io::Result<TapReader>> {
        let map = self.tap.lock().take()?;
        Some(TapReader::new(map, self.control.clone()))
    }

    /// Reports the queries that reached the server's sockets; interfaces are served only while such
    /// reports arrive. Must be called every [`REPORT_INTERVAL`], even without queries, because the
    /// programs do not probe a silent server.
    pub fn report(&self, arrivals: Vec<Arrival>) {
        self.running(|running| {
            // Without an attacher no probe is evaluated.
            let is_followed = running.session.report(arrivals);
            let until = if is_followed {
                kernel_monotonic_ns().saturating_add(REPORT_HOLDS_NS)
            } else {
                0
            };
            self.control.probe_until(until);
        });
    }

    /// Replaces the served addresses, as addresses files come and go. The candidate interfaces follow.
    pub fn set_endpoints(&self, endpoints: &[SocketAddr]) {
        self.running(|running| running.session.set_listen(endpoints));
    }

    /// Detaches everything, or leaves it to a successor, according to `xdp.on_stop`, and joins the
    /// threads. Other holders find the fast path stopped and empty.
    pub fn stop(&self) {
        self.end(self.on_stop);
    }

    /// Stops and ends the lease: the programs no longer answer, even if they stay attached because
    /// the attacher is gone.
    pub fn withdraw(&self) {
        self.end(OnStop::Detach);
    }

    fn end(&self, of_answers: OnStop) {
        // Taken out, so that `drop` after `stop` finds nothing to end.
        let running = self.running.write().take();
        let Some(Running { publisher, session }) = running else {
            return;
        };
        // The server stops answering soon.
        self.control.probe_until(0);
        // First the programs, then the publisher, which keeps the maps up to date as long as they
        // answer.
        session.stop(self.on_stop);
        publisher.stop(of_answers);
    }

    /// Calls `read` with the running part; `None` once stopped.
    fn running<T>(&self, read: impl FnOnce(&Running) -> T) -> Option<T> {
        self.running.read().as_ref().map(read)
    }
}

impl Drop for FastPath {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Returns an unpredictable seed, by way of the standard library's hasher, which is seeded from the
/// kernel's random numbers.
fn random_seed() -> u64 {
    std::hash::RandomState::new().build_hasher().finish()
}
