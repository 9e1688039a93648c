//! Programs and maps loaded, pinned and attached by this process: the privileged part of the fast
//! path.

use std::{
    net::SocketAddr,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    path::Path,
    sync::Arc,
};

use aya::maps::Map;
use nix::sys::resource::{Resource, getrlimit};
use tokio::sync::watch;

use super::{
    FastPathError,
    attach::{
        filters::Filters,
        gate::Arrival,
        pins::{KeptMaps, PinnedLink, Pins},
        reconcile::{Interfaces, Setting},
        selection::Selection,
        status::InterfacesStatus,
    },
    bpf,
    map::{counters::CounterPages, scope::ScopePage},
    memory::Memory,
    object::Object,
    observe::{messages::Messages, ring::Ring},
    programs::{ProgramBoard, ProgramStatus, Programs},
};
use dns_core::config::{OnStop, XdpConfig};

/// Loadable programs, not attached anywhere yet.
pub(super) struct Loaded {
    programs: Programs,
    board: ProgramBoard,
    maps: [(&'static str, OwnedFd); 6],
    scope: Arc<ScopePage>,
    counters: Arc<CounterPages>,
    messages: Option<Messages>,
    /// The folder of pins; `None` without pinning.
    pins: Option<Pins>,
    /// Links left by a predecessor.
    predecessor: Vec<PinnedLink>,
}

impl Loaded {
    /// Loads the maps, for a server with this main address; returns them mapped as well.
    pub(super) fn load(config: &XdpConfig, main: SocketAddr) -> Result<(Self, Memory), FastPathError> {
        let object = Object::load(config.max_names)?;
        let Object { ebpf, kept_maps, index, entries, control, scope, counters, tap, messages, limits } =
            object;
        let pins = Pins::prepare(&config.bpffs, main)
            .inspect_err(|error| {
                tracing::warn!(%error, "cannot pin under xdp.bpffs: programs are detached when this process ends, regardless of xdp.on_stop");
            })
            .ok();
        let predecessor = pins.as_ref().map(Pins::pinned_links).unwrap_or_default();
        if !predecessor.is_empty() {
            tracing::info!(links = predecessor.len(), "taking over the predecessor's pinned links");
        }
        let tap = tap.map(ring).transpose()?;
        let board = ProgramBoard::default();
        let programs =
            Programs::start(ebpf, messages.as_ref().map(Messages::map), Filters::of(main), board.clone())
                .map_err(|error| FastPathError::io("starting the thread that loads programs", error))?;
        let memory = Memory { index, entries, control, counters: counters.clone(), tap, limits };
        Ok((Self { programs, board, maps: kept_maps, scope, counters, messages, pins, predecessor }, memory))
    }

    /// Returns the map of this name.
    pub(super) fn map(&self, name: &str) -> Option<BorrowedFd<'_>> {
        self.maps.iter().find(|(known, _)| *known == name).map(|(_, fd)| fd.as_fd())
    }

    pub(super) fn pins(&self) -> Option<&Pins> {
        self.pins.as_ref()
    }

    /// Attaches the programs, in the caller's network namespace, once `installs` reports filled
    /// maps.
    pub(super) fn attach(
        self,
        config: &XdpConfig,
        endpoints: &[SocketAddr],
        installs: watch::Receiver<u64>,
    ) -> Result<Here, FastPathError> {
        let Self { programs, board, maps, scope, counters, messages, pins, predecessor } = self;
        scope.set_vlans(&config.vlans);
        let kept_maps = Arc::new(KeptMaps { pins: pins.clone(), maps });
        let interfaces = Interfaces::start(Setting {
            selection: Selection::new(config.interfaces.as_deref(), &config.respect_filters, endpoints),
            mode: config.mode,
            programs,
            pins: pins.clone(),
            listen: endpoints.to_vec(),
            scope,
            counters,
            most_interfaces: most_interfaces(),
            predecessor,
            installs,
            kept_maps: kept_maps.clone(),
            messages,
        })
        .map_err(|error| FastPathError::io("following the interfaces", error))?;
        Ok(Here { interfaces, board, pins, kept_maps })
    }
}

/// Programs that are attached, or soon will be.
pub(super) struct Here {
    /// The follower of the interfaces.
    interfaces: Interfaces,
    /// Status of the programs.
    board: ProgramBoard,
    pins: Option<Pins>,
    /// The maps needed by the programs, kept open.
    kept_maps: Arc<KeptMaps>,
}

impl Here {
    /// Becomes true when all interfaces present at the start have been processed.
    pub(super) fn ready(&self) -> watch::Receiver<bool> {
        self.interfaces.ready()
    }

    pub(super) fn status(&self) -> InterfacesStatus {
        self.interfaces.status()
    }

    /// Returns the programs needed so far.
    pub(super) fn programs(&self) -> Vec<ProgramStatus> {
        self.board.all()
    }

    /// Returns the path at which links and maps are pinned.
    pub(super) fn pinned_at(&self) -> Option<&Path> {
        self.pins.as_ref().map(Pins::folder)
    }

    /// Reports the queries that reached the server's sockets, see [`Interfaces::report`].
    pub(super) fn report(&self, arrivals: Vec<Arrival>) {
        self.interfaces.report(arrivals);
    }

    /// Replaces the served addresses.
    pub(super) fn set_listen(&self, endpoints: &[SocketAddr]) {
        self.interfaces.set_listen(endpoints);
    }

    /// Detaches everything, or leaves it to a successor.
    pub(super) fn stop(self, on_stop: OnStop) {
        let Self { interfaces, board: _, pins, kept_maps } = self;
        interfaces.stop(on_stop);
        if on_stop == OnStop::Detach
            && let Some(pins) = pins
            // A predecessor's links, if this server ended before it took over.
            && (kept_maps.are_pinned() || pins.pinned_links().is_empty())
            && let Err(error) = pins.remove()
        {
            tracing::warn!(%error, "cannot remove the pinned maps");
        }
    }
}

/// Returns the limit of served interfaces: a quarter of the descriptors, and at least 256, stay
/// reserved for sockets and files.
fn most_interfaces() -> usize {
    const RESERVE: u64 = 256;
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft);
    usize::try_from(limit.saturating_sub(RESERVE.max(limit / 4))).unwrap_or(usize::MAX)
}

/// Maps the ring buffer `TAP`.
fn ring(map: Map) -> Result<Ring, FastPathError> {
    let Map::RingBuf(data) = map else { return Err(FastPathError::Incomplete(dns_common::object::TAP)) };
    let mapped = || -> std::io::Result<Ring> {
        let fd = data.fd().as_fd().try_clone_to_owned()?;
        let size = bpf::map_shape(fd.as_fd())?.elements;
        Ring::map(fd, size)
    };
    mapped().map_err(|error| FastPathError::io("mapping TAP", error))
}
