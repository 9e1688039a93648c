//! Programs and maps that the attacher loads, pins and attaches for one server.

use std::{
    net::SocketAddr,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    sync::Arc,
};

use dns_common::object as names;
use nix::sys::resource::{Resource, getrlimit};
use tokio::sync::watch;

use crate::{
    FastPathError,
    attach::{
        filters::Filters,
        gate::Arrival,
        pins::{KeptMaps, PinnedLink, Pins},
        reconcile::{Interfaces, Setting},
        selection::Selection,
    },
    mailbox::Ringer,
    map::{counters::CounterPages, scope::ScopePage},
    object::{KEPT_MAPS, Object},
    observe::messages::Messages,
    programs::{Program, ProgramBoard, Programs},
    protocol::{AttacherStatus, SHARED_MAPS},
    publish::table::Limits,
};
use dns_core::config::{HookMode, OnStop, XdpConfig};

/// Maps of one server, with programs that are not attached yet.
pub(super) struct Loaded {
    programs: Programs,
    board: ProgramBoard,
    maps: [(&'static str, OwnedFd); KEPT_MAPS],
    tap: OwnedFd,
    scope: Arc<ScopePage>,
    counters: Arc<CounterPages>,
    messages: Option<Messages>,
    limits: Limits,
    /// The folder of pins; `None` without pinning.
    pins: Option<Pins>,
    /// Links left by a predecessor.
    predecessor: Vec<PinnedLink>,
    /// Rung when a state changes.
    changed: Ringer,
}

impl Loaded {
    /// Loads the maps for a server with this main address, and touches nothing of a running server. `changed` is
    /// rung when the state of programs or interfaces changes.
    pub(super) fn load(config: &XdpConfig, main: SocketAddr, changed: Ringer) -> Result<Self, FastPathError> {
        let Object { ebpf, kept_maps, tap, scope, counters, messages, limits } = Object::load(config)?;
        let board = ProgramBoard::new(changed.clone());
        let programs = Programs::start(
            ebpf,
            messages.as_ref().map(Messages::map),
            Filters::of(main),
            board.clone(),
            limits.answers + limits.replies > 0,
        )
        .map_err(|error| FastPathError::io("starting the thread that loads programs", error))?;
        Ok(Self {
            programs,
            board,
            maps: kept_maps,
            tap,
            scope,
            counters,
            messages,
            limits,
            pins: None,
            predecessor: Vec::new(),
            changed,
        })
    }

    /// Lets the kernel verify the program that most interfaces need in this mode, before they are known.
    pub(super) fn order_programs(&mut self, config: &XdpConfig) {
        let program = match config.mode {
            HookMode::Auto | HookMode::Tc => Program::Tc,
            HookMode::Native => Program::Xdp,
            HookMode::Off => return,
        };
        if config.interfaces.as_ref().is_none_or(|names| !names.is_empty()) {
            self.programs.order(program);
        }
    }

    /// Opens the folder of pins of this main address, and finds what a predecessor left there.
    pub(super) fn find_predecessor(&mut self, config: &XdpConfig, main: SocketAddr) {
        self.pins = Pins::prepare(&config.bpffs, main)
            .inspect_err(|error| {
                tracing::warn!(%error, "cannot pin under xdp.bpffs: programs are detached when this process ends, regardless of xdp.on_stop");
            })
            .ok();
        let Some(pins) = &self.pins else { return };
        pins.end_forwarded_answers();
        self.predecessor = pins.pinned_links(None);
        if !self.predecessor.is_empty() {
            tracing::info!(links = self.predecessor.len(), "taking over the predecessor's pinned links");
        }
    }

    /// Returns the maps that the server needs, in the protocol's order.
    pub(super) fn shared_maps(&self) -> Option<[BorrowedFd<'_>; SHARED_MAPS]> {
        let map = |name: &str| {
            let found = self.maps.iter().find(|(known, _)| *known == name);
            found.map(|(_, fd)| fd.as_fd())
        };
        Some([
            map(names::NAMES)?,
            map(names::ENTRIES)?,
            map(names::ANSWER_NAMES)?,
            map(names::ANSWER_ENTRIES)?,
            map(names::CONTROL)?,
            map(names::COUNTERS)?,
            self.tap.as_fd(),
        ])
    }

    /// Returns the largest number of names by kind.
    pub(super) fn limits(&self) -> Limits {
        self.limits
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
    ) -> Result<Installed, FastPathError> {
        let Self {
            programs,
            board,
            maps,
            tap: _,
            scope,
            counters,
            messages,
            limits: _,
            pins,
            predecessor,
            changed,
        } = self;
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
            changed,
        })
        .map_err(|error| FastPathError::io("following the interfaces", error))?;
        Ok(Installed { interfaces, board, pins, kept_maps })
    }
}

/// Programs that are attached, or soon will be.
pub(super) struct Installed {
    /// The follower of the interfaces.
    interfaces: Interfaces,
    /// Status of the programs.
    board: ProgramBoard,
    pins: Option<Pins>,
    /// The maps needed by the programs, kept open.
    kept_maps: Arc<KeptMaps>,
}

impl Installed {
    /// Returns the state of interfaces and programs.
    pub(super) fn status(&self) -> AttacherStatus {
        AttacherStatus {
            interfaces: self.interfaces.status(),
            programs: self.board.all(),
            ready: *self.interfaces.ready().borrow(),
            pinned_at: self.pins.as_ref().map(|pins| pins.folder().to_path_buf()),
        }
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
            // The pinned links are a predecessor's if this server ended before it took over.
            && (kept_maps.are_pinned() || pins.pinned_links(None).is_empty())
            && let Err(error) = pins.remove()
        {
            tracing::warn!(%error, "cannot remove the pinned maps");
        }
    }
}

/// Returns the maximum number of served interfaces: a quarter of the descriptors, and at least 256,
/// stay reserved.
fn most_interfaces() -> usize {
    const RESERVE: u64 = 256;
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft);
    usize::try_from(limit.saturating_sub(RESERVE.max(limit / 4))).unwrap_or(usize::MAX)
}
