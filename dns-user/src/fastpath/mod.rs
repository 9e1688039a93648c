//! The fast path as seen from userspace: loading, hooks, interfaces, publisher,
//! lease, marks, tap.
//!
//! [`FastPath`] owns two threads: the *publisher* (`publisher.rs`), which alone
//! changes what is answered, and the follower of the *interfaces*
//! (`interfaces.rs`), which attaches the programs once the map is filled.

mod arena;
mod counters;
mod entry;
mod gather;
mod hooks;
mod index;
mod interfaces;
mod learn;
mod lease;
mod maps;
mod messages;
mod netlink;
mod object;
mod pins;
mod places;
mod publisher;
mod sys;
mod table;
mod tap;

use std::{
    hash::{BuildHasher as _, Hasher as _},
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use dns_common::object as names;
use tokio::sync::watch;

pub use self::{
    arena::ArenaFill,
    counters::Counters,
    hooks::Hook,
    interfaces::{InterfaceStatus, InterfacesStatus},
    publisher::Publisher,
    table::{Answers, TableStatus, UnfittingStatus},
    tap::{Tap, TapItem},
};
use self::{
    index::Index,
    interfaces::{Interfaces, Selection, Setting},
    learn::LearnFilter,
    lease::Lease,
    maps::{ControlPage, CounterPages},
    netlink::Socket,
    object::Object,
    pins::{KeptMaps, Pins},
    places::Programs,
    publisher::PublisherThread,
    table::Table,
};
use crate::{
    catalog::Snapshot,
    config::{HookMode, OnStop, XdpConfig},
    name::Name,
    resolve::{self, Health, Resolution},
};

/// The BPF programs, built from `dns-ebpf` by the build script.
pub const OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/dns-ebpf"));

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

impl Answers for Snapshot {
    fn published_names(&self) -> Box<dyn Iterator<Item = Name> + '_> {
        Box::new(self.published_names())
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
    #[error("the server listens nowhere")]
    NoEndpoints,
    /// The process lacks the capabilities.
    #[error(
        "loading BPF programs is not permitted: needs root, or CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON ({0})"
    )]
    NotPermitted(String),
    /// The kernel does not take the object.
    #[error("the kernel does not take the BPF programs: {0}")]
    Load(String),
    /// The embedded object lacks a part: it was built from other sources.
    #[error("the embedded BPF object has no {0}")]
    Incomplete(&'static str),
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
    /// The publisher's thread; `None` once stopped.
    publisher: Option<PublisherThread>,
    /// The follower of the interfaces; `None` once stopped.
    interfaces: Option<Interfaces>,
    /// The lease.
    lease: Lease,
    /// `CONTROL`.
    control: Arc<ControlPage>,
    /// `TAP`, until somebody reads it.
    tap: Mutex<Option<aya::maps::Map>>,
    /// Counters.
    counters: Arc<CounterPages>,
    /// Pins.
    pins: Option<Pins>,
    /// The maps that the programs need, open as long as this is.
    kept_maps: Arc<KeptMaps>,
    /// What to do at the end.
    on_stop: OnStop,
}

impl FastPath {
    /// Loads programs and maps, and starts the threads, in the caller's network
    /// namespace. Programs are attached when the first snapshot has been
    /// installed; [`Self::ready`] tells.
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
        let object = Object::load(config.max_names, hooks::xdp_program(config.mode))?;
        let Object { xdp, tc, tc_second, kept_maps, index, arena, control, counters, tap, messages, limits } =
            object;
        let seed = random_seed();
        control.set_hash_seed(seed);

        let pins = Pins::prepare(&config.bpffs, main)
            .inspect_err(|error| {
                tracing::warn!(%error, "nothing can be pinned: the fast path ends with this process, whatever xdp.on_stop says");
            })
            .ok();
        let predecessor = pins.as_ref().map(Pins::pinned_links).unwrap_or_default();
        let earlier =
            pins.as_ref().map(|pins| pins.earlier_names(limits.useful + limits.negative)).unwrap_or_default();
        if !predecessor.is_empty() {
            tracing::info!(
                links = predecessor.len(),
                names = earlier.len(),
                "taking over from the server before"
            );
        }

        let lease = Lease::new(control.clone(), config.lease);
        let filter = Arc::new(LearnFilter::new());
        let table = Table::new(
            Index::new(index.clone()),
            arena.clone(),
            seed,
            limits,
            health,
            admission,
            filter.clone(),
        );
        let publisher = PublisherThread::start(index, arena, seed, filter, table, lease.clone(), earlier)
            .map_err(|error| FastPathError::io("starting the publisher", error))?;

        let kept_maps = Arc::new(KeptMaps { pins: pins.clone(), maps: kept_maps });
        let interfaces = Interfaces::start(Setting {
            selection: Selection::new(config.interfaces.as_deref(), endpoints),
            mode: config.mode,
            programs: Programs { xdp, tc, tc_second, priority: filter_priority(main) },
            pins: pins.clone(),
            listen: endpoints.to_vec(),
            control: control.clone(),
            predecessor,
            installs: publisher.shared.installs(),
            kept_maps: kept_maps.clone(),
            messages,
        })
        .map_err(|error| FastPathError::io("following the interfaces", error))?;
        Ok(Self {
            publisher: Some(publisher),
            interfaces: Some(interfaces),
            lease,
            control,
            tap: Mutex::new(tap),
            counters,
            pins,
            kept_maps,
            on_stop: config.on_stop,
        })
    }

    /// The handle of the publisher.
    pub fn publisher(&self) -> Publisher {
        self.publisher.as_ref().map_or_else(Publisher::off, |thread| thread.publisher.clone())
    }

    /// Resolves when the first snapshot is in the map and all interfaces that
    /// there were have been dealt with.
    pub async fn ready(&self) {
        let Some(interfaces) = &self.interfaces else { return };
        let mut ready: watch::Receiver<bool> = interfaces.ready();
        // An error means that the thread has ended: nothing is left to wait for.
        let _ = ready.wait_for(|ready| *ready).await;
    }

    /// A sign of life of the daemon's runtime: from the first one on the lease
    /// counts from the last one, so they must come every
    /// [`Self::heartbeat_interval`] or so.
    pub fn heartbeat(&self) {
        self.lease.heartbeat();
    }

    /// How often to call [`Self::heartbeat`].
    pub fn heartbeat_interval(&self) -> Duration {
        self.lease.interval()
    }

    /// The state of everything.
    pub fn status(&self) -> FastPathStatus {
        FastPathStatus {
            interfaces: self.interfaces.as_ref().map(Interfaces::status).unwrap_or_default(),
            names: self.publisher.as_ref().map(|thread| thread.shared.status()).unwrap_or_default(),
            lease: LeaseStatus {
                length_ms: self.lease.length().as_millis(),
                remaining_ms: self.lease.remaining().as_millis(),
            },
            pinned_at: self.pins.as_ref().map(|pins| pins.folder().to_path_buf()),
        }
    }

    /// What the program has counted.
    pub fn counters(&self) -> Counters {
        Counters::new(self.counters.read())
    }

    /// The tap, for the one who feeds it to whoever looks; the first caller
    /// gets it. Must be called within a tokio runtime. `None`: it is taken.
    pub fn tap(&self) -> Option<io::Result<Tap>> {
        let map = self.tap.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        Some(Tap::new(map, self.control.clone()))
    }

    /// Answers for exactly these addresses from now on, as addresses files come
    /// and go. The interfaces stay those that were chosen at the start.
    pub fn set_endpoints(&self, endpoints: &[SocketAddr]) {
        if let Some(interfaces) = &self.interfaces {
            interfaces.set_listen(endpoints);
        }
    }

    /// Detaches everything, or leaves it to a successor, per `xdp.on_stop`.
    pub fn stop(mut self) {
        self.stop_once();
    }

    /// The work of [`Self::stop`], done once.
    fn stop_once(&mut self) {
        if let Some(interfaces) = self.interfaces.take() {
            interfaces.stop(self.on_stop);
        }
        if let Some(publisher) = self.publisher.take() {
            publisher.stop(self.on_stop == OnStop::Detach);
        }
        if self.on_stop == OnStop::Detach
            && let Some(pins) = self.pins.take()
            // Those of a predecessor, if this server ended before it took over.
            && (self.kept_maps.are_pinned() || pins.pinned_links().is_empty())
            && let Err(error) = pins.remove()
        {
            tracing::warn!(%error, "cannot remove the pinned maps");
        }
    }
}

impl Drop for FastPath {
    fn drop(&mut self) {
        self.stop_once();
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
        places::drop_predecessor(link);
        detached.links += 1;
    }
    pins.remove().map_err(|error| FastPathError::io("removing the pins", error))?;
    let mut netlink = Socket::requests().map_err(|error| FastPathError::io("asking netlink", error))?;
    let links = netlink.links().map_err(|error| FastPathError::io("listing the interfaces", error))?;
    let priority = filter_priority(main);
    for link in links {
        let ours = netlink.filter(link.ifindex, priority).ok().flatten();
        if ours.is_some_and(|(_, name)| [names::TC_PROGRAM, names::TC_SECOND_PROGRAM].contains(&&*name)) {
            netlink.remove_filter(link.ifindex, priority).map_err(|error| {
                FastPathError::io(&format!("removing the filter of {}", link.name), error)
            })?;
            detached.filters += 1;
        }
    }
    Ok(detached)
}

/// Priority of our clsact filters: the same at every start of this server, and
/// most likely another than that of a second one.
fn filter_priority(main: SocketAddr) -> u16 {
    let text = main.to_string();
    let hash = dns_common::name::hash_name(0, text.as_bytes());
    // 0xb000 to 0xbfff: after whatever takes the low numbers, before the
    // kernel's own choices from 0xc000 down.
    0xb000 | (hash % 0x1000) as u16
}

/// A seed that nobody can guess: the standard library's own is of the kernel's randomness.
fn random_seed() -> u64 {
    std::hash::RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_of_two_servers_differ() {
        let one = filter_priority("169.254.0.2:53".parse().unwrap());
        assert_eq!(one, filter_priority("169.254.0.2:53".parse().unwrap()));
        assert_ne!(one, filter_priority("169.254.0.2:54".parse().unwrap()));
        assert!((0xb000..0xc000).contains(&one));
    }
}
