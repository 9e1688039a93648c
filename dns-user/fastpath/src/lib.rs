//! The fast path as seen from userspace.
//!
//! * [`map`]: the memory that the programs answer from.
//! * [`publish`]: what is in it; its thread alone changes what is answered.
//! * [`attach`]: the programs on the interfaces; its thread attaches them once the
//!   maps are filled.
//! * [`observe`]: what the programs tell of themselves.
//! * [`here`]: programs and maps that this process loads, pins and attaches; [`apart`]: those that
//!   another process does, for a server without privileges; [`memory`]: what both come to.
//! * [`mailbox`]: channels to threads that sleep in poll(2).
//! * [`object`] loads the maps, [`programs`] the programs, each as it is needed; [`bpf`] are
//!   the system calls.
//!
//! [`FastPath`] owns all of it; [`Slot`] is the handle of its users.

mod apart;
mod attach;
mod bpf;
mod here;
mod mailbox;
mod map;
mod memory;
mod object;
mod observe;
mod programs;
mod publish;
mod slot;

use std::{
    hash::{BuildHasher as _, Hasher as _},
    io,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;

pub use self::{
    apart::attacher::{Attacher, Authority, ReadAuthority},
    attach::{
        gate::{Arrival, MOST_CLIENTS},
        hook::Hook,
        kinds::InterfaceKinds,
        status::{InterfaceState, InterfaceStatus, InterfacesStatus},
    },
    map::{counters::Counters, store::StoreFill},
    observe::tap::{TapItem, TapReader},
    programs::{ProgramState, ProgramStatus},
    publish::{
        publisher::Publisher,
        table::{NameSource, TableStatus, UnfittingStatus, fuzzing},
    },
    slot::Slot,
};
use self::{
    apart::server::{Apart, HandedOver},
    attach::{
        attachment,
        filters::Filters,
        netlink::Socket,
        pins::{self, Pins},
        rules::{Device, Rules},
    },
    here::{Here, Loaded},
    map::{control::ControlPage, counters::CounterPages, index::Index},
    memory::Memory,
    observe::ring::Ring,
    publish::{
        grace::GracePeriods,
        learn::LearnFilter,
        lease::Lease,
        publisher::PublisherThread,
        table::{EntryStore, Table},
    },
};
use dns_core::{
    catalog::Snapshot,
    config::{HookMode, OnStop, XdpConfig},
    name::Name,
    resolve::{self, Health, Resolution},
};

/// The BPF programs, built from `dns-ebpf` by the build script.
pub const OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/dns-ebpf"));

/// How often [`FastPath::report`] is to be called.
pub const REPORT_INTERVAL: Duration = Duration::from_millis(250);

/// Decides whether a resolved name may be answered by the interface now.
pub trait Admission: Send + Sync {
    /// Whether `name`, which resolves to `resolution`, may be published.
    fn may_publish(&self, name: &Name, resolution: &Resolution) -> bool;
}

/// Admits every name: health checks are off.
#[derive(Clone, Copy, Debug)]
pub struct Everything;

impl Admission for Everything {
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
}

/// Why there is no fast path. The server answers from userspace then.
#[derive(Debug, thiserror::Error)]
pub enum FastPathError {
    /// `xdp.enabled` is false, or `xdp.mode` is `off`.
    #[error("the fast path is switched off (xdp.enabled, xdp.mode)")]
    Off,
    /// There is nothing to answer for.
    #[error("the server listens on no address")]
    NoEndpoints,
    /// The process lacks the capabilities.
    #[error(
        "loading BPF programs is not permitted: needs root, or CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON ({0})"
    )]
    NotPermitted(String),
    /// The kernel does not take the object's maps.
    #[error("the kernel rejected the maps of the BPF object: {0}")]
    Load(String),
    /// The embedded object lacks a part: it was built from other sources.
    #[error("the embedded BPF object has no {0}")]
    Incomplete(&'static str),
    /// The attacher is not there.
    #[error("cannot connect to the attacher at {}: {error}", socket.display())]
    NoAttacher {
        /// Its socket.
        socket: PathBuf,
        /// What the kernel said.
        error: io::Error,
    },
    /// The attacher gives nothing.
    #[error("the attacher refused to load programs: {0}")]
    Refused(String),
    /// A system call failed.
    #[error("{what}: {error}")]
    Io {
        /// What was being done.
        what: String,
        /// Why it failed.
        error: io::Error,
    },
}

impl FastPathError {
    /// A system call that failed while doing `what`.
    fn io(what: &str, error: io::Error) -> Self {
        Self::Io { what: what.to_owned(), error }
    }
}

/// Everything about the fast path, for `/status`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct FastPathStatus {
    /// Interfaces and addresses.
    #[serde(flatten)]
    pub interfaces: InterfacesStatus,
    /// The programs that were needed so far.
    pub programs: Vec<ProgramStatus>,
    /// What is published.
    pub names: TableStatus,
    /// The lease.
    pub lease: LeaseStatus,
    /// Where links and maps are pinned; null: they end with the process.
    pub pinned_at: Option<PathBuf>,
}

/// The lease, in milliseconds.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct LeaseStatus {
    /// Its length.
    pub length_ms: u128,
    /// How long it still runs; 0: the program answers nothing.
    pub remaining_ms: u128,
}

/// The running fast path. Dropping it is [`FastPath::stop`].
pub struct FastPath {
    /// The threads; `None` once stopped.
    running: RwLock<Option<Running>>,
    /// The lease.
    lease: Lease,
    /// `CONTROL`.
    control: Arc<ControlPage>,
    /// `TAP`, until somebody reads it.
    tap: Mutex<Option<Ring>>,
    /// Counters.
    counters: Arc<CounterPages>,
    /// What to do at the end.
    on_stop: OnStop,
}

/// Publisher and attached programs.
struct Running {
    /// The publisher's thread.
    publisher: PublisherThread,
    /// The programs.
    programs: Attachments,
}

/// The process that attaches the programs.
enum Attachments {
    /// This process.
    Here(Here),
    /// The attacher.
    Apart(Apart),
}

impl FastPath {
    /// Loads programs and maps, or has the attacher do so (`xdp.attach_socket`), and starts the
    /// threads, in the caller's network namespace. Programs are attached when the first
    /// snapshot has been installed; [`Self::ready`] tells.
    pub fn start(
        config: &XdpConfig,
        endpoints: &[SocketAddr],
        health: Arc<dyn Health + Send + Sync>,
        admission: Arc<dyn Admission>,
    ) -> Result<Self, FastPathError> {
        if !config.enabled || config.mode == HookMode::Off {
            return Err(FastPathError::Off);
        }
        let main = *endpoints.first().ok_or(FastPathError::NoEndpoints)?;
        let of_grace = |error| FastPathError::io("starting the thread of grace periods", error);
        if let Some(socket) = &config.attach_socket {
            let handed_over = HandedOver::ask(socket, config.attach_user.as_deref(), endpoints)?;
            let (memory, earlier, connection, grace) =
                handed_over.split().map_err(|error| FastPathError::io("asking the attacher", error))?;
            let grace = GracePeriods::start_with(move || grace.wait()).map_err(of_grace)?;
            let attach = |installs| {
                connection
                    .attach(installs)
                    .map(Attachments::Apart)
                    .map_err(|error| FastPathError::io("asking the attacher", error))
            };
            return Self::publish(config, memory, earlier, grace, (health, admission), attach);
        }
        let (loaded, memory) = Loaded::load(config, main)?;
        let limit = memory.limits.useful + memory.limits.negative;
        let earlier = loaded.pins().map(|pins| pins.earlier_names(limit)).unwrap_or_default();
        let grace = GracePeriods::start().map_err(of_grace)?;
        let attach = |installs| loaded.attach(config, endpoints, installs).map(Attachments::Here);
        Self::publish(config, memory, earlier, grace, (health, admission), attach)
    }

    /// Starts to publish in `memory`; `attach` has the programs attached once it is filled.
    fn publish(
        config: &XdpConfig,
        memory: Memory,
        earlier: Vec<Name>,
        grace: GracePeriods,
        (health, admission): (Arc<dyn Health + Send + Sync>, Arc<dyn Admission>),
        attach: impl FnOnce(watch::Receiver<u64>) -> Result<Attachments, FastPathError>,
    ) -> Result<Self, FastPathError> {
        let Memory { index, entries, control, counters, tap, limits } = memory;
        if !earlier.is_empty() {
            tracing::info!(
                names = earlier.len(),
                "taking over the names that the previous server had learned"
            );
        }
        let seed = random_seed();
        control.set_hash_seed(seed);
        let lease = Lease::new(control.clone(), config.lease);
        let filter = Arc::new(LearnFilter::new());
        let store = EntryStore::new(Index::new(index.clone()), entries.clone());
        let table = Table::new((store, grace), seed, limits, health, admission, filter.clone());
        let publisher = PublisherThread::start(index, entries, seed, filter, table, lease.clone(), earlier)
            .map_err(|error| FastPathError::io("starting the publisher", error))?;
        let programs = attach(publisher.shared.installs())?;
        Ok(Self {
            running: RwLock::new(Some(Running { publisher, programs })),
            lease,
            control,
            tap: Mutex::new(tap),
            counters,
            on_stop: config.on_stop,
        })
    }

    /// The handle of the publisher.
    pub fn publisher(&self) -> Publisher {
        self.running(|running| running.publisher.publisher.clone()).unwrap_or_else(Publisher::off)
    }

    /// Resolves when the first snapshot is in the map and all interfaces that
    /// there were have been dealt with.
    pub async fn ready(&self) {
        let Some(mut ready) = self.running(|running| running.programs.ready()) else { return };
        // An error means that the thread has ended: nothing is left to wait for.
        let _ = ready.wait_for(|ready| *ready).await;
    }

    /// Whether [`Self::ready`] would return at once.
    pub fn is_ready(&self) -> bool {
        self.running(|running| *running.programs.ready().borrow()).unwrap_or(true)
    }

    /// Resolves when the attacher is gone: the programs answer on, but nobody follows the
    /// interfaces. Never, where this process attaches them itself.
    pub async fn lost(&self) {
        let lost = self.running(|running| match &running.programs {
            Attachments::Apart(apart) => Some(apart.lost()),
            Attachments::Here(_) => None,
        });
        match lost.flatten() {
            Some(mut lost) => {
                // An error means that the thread has ended, too.
                let _ = lost.wait_for(|lost| *lost).await;
            }
            None => std::future::pending().await,
        }
    }

    /// A sign of life of the daemon's runtime, and of all that keeps answers true: the
    /// oldest of them is `age` old. From the first one on the lease counts from the last
    /// one, so they must come every eighth of the lease or so.
    pub fn heartbeat(&self, age: Duration) {
        self.lease.heartbeat(age);
    }

    /// Leaves replies of more bytes than these to userspace.
    pub fn set_max_reply(&self, bytes: u16) {
        self.control.set_max_reply(bytes.into());
    }

    /// Sets whether the OPT of a reply repeats the client's size with DO clear.
    pub fn set_echo_opt(&self, echo: bool) {
        self.control.set_echo_opt(echo);
    }

    /// The state of everything.
    pub fn status(&self) -> FastPathStatus {
        let (interfaces, programs, names, pinned_at) = self
            .running(|Running { publisher, programs }| {
                let names = publisher.shared.status();
                (programs.status(), programs.programs(), names, programs.pinned_at())
            })
            .unwrap_or_default();
        FastPathStatus {
            interfaces,
            programs,
            names,
            lease: LeaseStatus {
                length_ms: self.lease.length().as_millis(),
                remaining_ms: self.lease.remaining().as_millis(),
            },
            pinned_at,
        }
    }

    /// What the program has counted.
    pub fn counters(&self) -> Counters {
        Counters::new(self.counters.read())
    }

    /// The tap, for the one who feeds it to whoever looks; the first caller
    /// gets it. Must be called within a tokio runtime. `None`: it is taken.
    pub fn tap(&self) -> Option<io::Result<TapReader>> {
        let map = self.tap.lock().take()?;
        Some(TapReader::new(map, self.control.clone()))
    }

    /// Reports which queries reached the server's sockets. Interfaces are served while they do. To be called every [`REPORT_INTERVAL`], even if none
    /// did; a server that stays silent is not tested by probes.
    pub fn report(&self, arrivals: Vec<Arrival>) {
        self.running(|running| match &running.programs {
            Attachments::Here(here) => here.report(arrivals),
            Attachments::Apart(apart) => apart.report(arrivals),
        });
    }

    /// Answers for exactly these addresses from now on, as addresses files come
    /// and go. The interfaces stay those that were chosen at the start.
    pub fn set_endpoints(&self, endpoints: &[SocketAddr]) {
        self.running(|running| match &running.programs {
            Attachments::Here(here) => here.set_listen(endpoints),
            Attachments::Apart(apart) => apart.set_listen(endpoints),
        });
    }

    /// Detaches everything, or leaves it to a successor, per `xdp.on_stop`, and joins the
    /// threads. Whoever else holds the fast path sees one that answers nothing.
    pub fn stop(&self) {
        let running = self.running.write().take();
        let Some(Running { publisher, programs }) = running else { return };
        match programs {
            Attachments::Here(here) => here.stop(self.on_stop),
            Attachments::Apart(apart) => apart.stop(self.on_stop),
        }
        publisher.stop(self.on_stop == OnStop::Detach);
    }

    /// Reads what runs; `None` once stopped.
    fn running<T>(&self, read: impl FnOnce(&Running) -> T) -> Option<T> {
        self.running.read().as_ref().map(read)
    }
}

impl Attachments {
    /// Becomes true when all interfaces of the start have been dealt with.
    fn ready(&self) -> watch::Receiver<bool> {
        match self {
            Self::Here(here) => here.ready(),
            Self::Apart(apart) => apart.ready(),
        }
    }

    /// The programs that were needed so far.
    fn programs(&self) -> Vec<ProgramStatus> {
        match self {
            Self::Here(here) => here.programs(),
            Self::Apart(apart) => apart.programs(),
        }
    }

    /// Interfaces and addresses.
    fn status(&self) -> InterfacesStatus {
        match self {
            Self::Here(here) => here.status(),
            Self::Apart(apart) => apart.status(),
        }
    }

    /// Where links and maps are pinned.
    fn pinned_at(&self) -> Option<PathBuf> {
        match self {
            Self::Here(here) => here.pinned_at().map(Path::to_path_buf),
            Self::Apart(apart) => apart.pinned_at(),
        }
    }
}

impl Drop for FastPath {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Makes the folder of pins, on a bpffs that is mounted if need be, and gives
/// it and all that is in it to a user: to be called before privileges are
/// dropped, because mounting needs CAP_SYS_ADMIN.
pub fn prepare_pins(bpffs: &Path, owner: Option<(u32, u32)>) -> io::Result<()> {
    pins::ensure_bpffs(bpffs)?;
    owner.map_or(Ok(()), |(uid, gid)| pins::hand_over(bpffs, uid, gid))
}

/// What [`detach_all`] found and took away.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Detached {
    /// Links of XDP and tcx.
    pub links: usize,
    /// Filters of clsact.
    pub filters: usize,
    /// The folder of pins that is gone.
    pub folder: PathBuf,
}

/// Takes away everything that a server at these endpoints left attached, dead
/// or alive, in the caller's network namespace.
pub fn detach_all(config: &XdpConfig, endpoints: &[SocketAddr]) -> Result<Detached, FastPathError> {
    let main = *endpoints.first().ok_or(FastPathError::NoEndpoints)?;
    let pins = Pins::at(&config.bpffs, main).map_err(|error| FastPathError::io("finding the pins", error))?;
    let mut detached = Detached { folder: pins.folder().to_path_buf(), ..Detached::default() };
    for link in pins.pinned_links() {
        attachment::drop_predecessor(link);
        detached.links += 1;
    }
    pins.remove().map_err(|error| FastPathError::io("removing the pins", error))?;
    let mut netlink = Socket::requests().map_err(|error| FastPathError::io("asking netlink", error))?;
    let links = netlink.links().map_err(|error| FastPathError::io("listing the interfaces", error))?;
    let filters = Filters::of(main);
    for link in links {
        let removed = filters
            .remove(link.ifindex, &mut netlink)
            .map_err(|error| FastPathError::io(&format!("removing the filter of {}", link.name), error))?;
        detached.filters += usize::from(removed);
    }
    Ok(detached)
}

/// Returns what the packet filter of the calling thread's network namespace speaks against answering
/// queries of `client` for `endpoint` on an interface; `None`: nothing.
pub fn filter_objection(interface: &str, client: IpAddr, endpoint: SocketAddr) -> io::Result<Option<String>> {
    let links = Socket::requests()?.links()?;
    let link = links.iter().find(|link| link.name == interface).ok_or(io::ErrorKind::NotFound)?;
    let objection = Rules::read()?.objection(&Device::of(link), client, endpoint);
    Ok(objection.map(|objection| objection.to_string()))
}

/// A seed that nobody can guess: the standard library's own is of the kernel's randomness.
fn random_seed() -> u64 {
    std::hash::RandomState::new().build_hasher().finish()
}
