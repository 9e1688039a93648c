//! One program on one hook of an interface: how it gets there, whose is there,
//! and how it leaves.

use std::{
    fmt, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
};

use crate::{
    attach::filters::Filters,
    attach::hook::Hook,
    attach::netlink::{Link, Socket},
    attach::pins::{PinnedLink, Pins, remove_if_there},
    bpf::{self, LinkKind},
    programs::{Missing, Program, Programs},
};

impl Filters {
    /// Sets our filter; its priority.
    fn set(&self, ifindex: u32, program: BorrowedFd<'_>, netlink: &mut Socket) -> Result<u16, HookError> {
        let clsact = |error| HookError::Os { hook: Hook::Clsact, error };
        netlink.add_clsact(ifindex).map_err(clsact)?;
        let place = self.place(|priority| Ok(netlink.filter(ifindex, priority)?.map(|(_, name)| name)));
        let (priority, replace) = place.map_err(clsact)?.ok_or(HookError::NoPriority)?;
        let name = self.name();
        netlink.set_filter(ifindex, priority, replace, program, &name).map_err(clsact)?;
        Ok(priority)
    }

    /// Removes our filter from an interface, whichever process set it; whether there was one.
    pub(crate) fn remove(&self, ifindex: u32, netlink: &mut Socket) -> io::Result<bool> {
        let place = self.place(|priority| Ok(netlink.filter(ifindex, priority)?.map(|(_, name)| name)));
        match place? {
            Some((priority, true)) => netlink.remove_filter(ifindex, priority).map(|()| true),
            _ => Ok(false),
        }
    }
}

/// Why nothing can be attached to a hook of an interface.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HookError {
    /// There is no program for it.
    #[error(transparent)]
    NoProgram(#[from] Missing),
    /// An interface takes one XDP program, and somebody else's is attached.
    #[error("{hook}: {occupant} is attached already")]
    Occupied {
        /// The hook.
        hook: Hook,
        /// What is attached.
        occupant: Occupant,
    },
    /// XDP in the driver is for the driver to implement.
    #[error("native: the driver does not support XDP")]
    NoNativeXdp,
    /// The driver has XDP, but not for the interface as it is set up.
    #[error("native: the driver refuses XDP with the present MTU, LRO or queues: {0}")]
    DriverRefuses(io::Error),
    /// An older kernel.
    #[error("tcx: needs kernel 6.6")]
    NoTcx,
    /// Filters of others have every priority that ours may have.
    #[error("clsact: every filter priority that is ours to use is taken by somebody else's filter")]
    NoPriority,
    /// Whatever else the kernel says.
    #[error("{hook}: {error}")]
    Os {
        /// The hook.
        hook: Hook,
        /// What the kernel says.
        error: io::Error,
    },
}

/// An XDP program that is none of ours, as far as the kernel tells.
#[derive(Debug)]
pub(crate) enum Occupant {
    /// Only CAP_SYS_ADMIN may ask for programs by id.
    Told {
        /// Its id.
        id: u32,
        /// Its name, and who loaded it.
        info: bpf::ProgramInfo,
    },
    /// There is one with this id.
    Id(u32),
    /// There is one.
    Unknown,
}

impl Occupant {
    /// What is known of the program with this id.
    fn find(id: Option<u32>) -> Self {
        let Some(id) = id else { return Self::Unknown };
        match bpf::program_by_id(id).and_then(|program| bpf::program_info(program.as_fd())) {
            Ok(info) => Self::Told { id, info },
            Err(_) => Self::Id(id),
        }
    }
}

impl fmt::Display for Occupant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Told { id, info } => {
                write!(f, "XDP program \"{}\" (id {id}, loaded by uid {})", info.name, info.uid)
            }
            Self::Id(id) => write!(f, "the XDP program with id {id}"),
            Self::Unknown => f.write_str("another XDP program"),
        }
    }
}

/// What attaching works with.
pub(crate) struct Means<'a> {
    /// What to attach.
    pub(crate) programs: &'a mut Programs,
    /// Where to pin; `None`: nowhere.
    pub(crate) pins: Option<&'a Pins>,
    /// Links of a predecessor, to be taken over.
    pub(crate) predecessor: &'a mut Vec<PinnedLink>,
    /// For requests.
    pub(crate) netlink: &'a mut Socket,
}

/// How a program on a hook fares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Our program is there.
    Ours,
    /// A successor has put its program there.
    TakenOver,
    /// Somebody detached it, or the interface is gone.
    Gone,
}

/// By what a program is held on its hook.
#[derive(Debug)]
enum Held {
    /// A link.
    Link(OwnedFd),
    /// A filter of clsact with this priority.
    Filter(u16),
}

/// A program on a hook.
#[derive(Debug)]
pub(crate) struct HookAttachment {
    /// The hook.
    pub(crate) hook: Hook,
    /// The link; at clsact the priority of the filter.
    held: Held,
    /// Where the link is pinned.
    pin: Option<PathBuf>,
}

impl HookAttachment {
    /// Attaches and pins.
    pub(crate) fn take(hook: Hook, interface: &Link, means: &mut Means<'_>) -> Result<Self, HookError> {
        let (held, pin) = attach(hook, interface, means)?;
        let pin = pin.or_else(|| match &held {
            Held::Link(link) => pin_new(means.pins, link, interface, hook),
            Held::Filter(_) => None,
        });
        Ok(Self { hook, held, pin })
    }

    /// Whether our program is still there.
    pub(crate) fn standing(&self, ifindex: u32, programs: &Programs, netlink: &mut Socket) -> Standing {
        let program = match &self.held {
            Held::Link(link) => match bpf::link_info(link.as_fd()) {
                Ok(info) if info.ifindex == ifindex => Some(info.program_id),
                _ => None,
            },
            Held::Filter(priority) => {
                let filter = netlink.filter(ifindex, *priority).ok().flatten();
                filter.map(|(id, _)| id).filter(|&id| id != 0)
            }
        };
        match program {
            Some(id) if programs.are(id) => Standing::Ours,
            Some(_) => Standing::TakenOver,
            None => Standing::Gone,
        }
    }

    /// Takes the program off, unless a successor's is there by now.
    pub(crate) fn leave(self, ifindex: u32, programs: &Programs, netlink: &mut Socket) {
        let standing = self.standing(ifindex, programs, netlink);
        let Self { hook: _, held, pin } = self;
        if standing == Standing::TakenOver {
            return;
        }
        if let Some(pin) = &pin
            && let Err(error) = remove_if_there(pin)
        {
            tracing::warn!(%error, "cannot unpin a link");
        }
        let result = match &held {
            // Whoever else holds the link: it is off the interface now.
            Held::Link(link) => bpf::link_detach(link.as_fd()),
            Held::Filter(priority) if standing == Standing::Ours => netlink.remove_filter(ifindex, *priority),
            Held::Filter(_) => Ok(()),
        };
        if let Err(error) = result
            && standing == Standing::Ours
        {
            tracing::warn!(%error, ifindex, "cannot detach a program: it may go on answering until the lease is over");
        }
    }

    /// Whether it outlives the process.
    pub(crate) fn is_kept(&self) -> bool {
        self.pin.is_some() || matches!(self.held, Held::Filter(_))
    }
}

/// Takes down what a predecessor left on an interface that is not served any more.
pub(crate) fn drop_predecessor(link: PinnedLink) {
    let PinnedLink { fd, path, .. } = link;
    if let Err(error) = remove_if_there(&path) {
        tracing::warn!(%error, "cannot unpin a link of the previous server");
    }
    // An error means that it is detached already.
    let _ = bpf::link_detach(fd.as_fd());
}

/// Attaches to one hook. With a link that was taken over comes its pin.
fn attach(hook: Hook, link: &Link, means: &mut Means<'_>) -> Result<(Held, Option<PathBuf>), HookError> {
    let Means { programs, pins: _, predecessor, netlink } = means;
    let filters = programs.filters.clone();
    let program = programs.get(Program::of(hook))?;
    let Some(kind) = hook.link_kind() else {
        let priority = filters.set(link.ifindex, program, netlink)?;
        return Ok((Held::Filter(priority), None));
    };
    // The predecessor's own link on this hook: one step, no packet meets none or both.
    if let Some(place) = predecessor.iter().position(|left| left.ifindex == link.ifindex && left.kind == kind)
    {
        let left = predecessor.swap_remove(place);
        let alive = bpf::link_info(left.fd.as_fd()).is_ok_and(|info| info.ifindex == link.ifindex);
        if alive && bpf::link_update(left.fd.as_fd(), program).is_ok() {
            return Ok((Held::Link(left.fd), Some(left.path)));
        }
        drop_predecessor(left);
    }
    if hook.is_xdp() {
        // An interface takes one kind of XDP: the predecessor's other one has to go first.
        while let Some(place) =
            predecessor.iter().position(|left| left.ifindex == link.ifindex && left.kind != LinkKind::Tcx)
        {
            drop_predecessor(predecessor.swap_remove(place));
        }
    }
    match bpf::link_create(program, link.ifindex, kind) {
        Ok(fd) => Ok((Held::Link(fd), None)),
        Err(error) => Err(explain(hook, link, error)),
    }
}

/// Why a link could not be made.
fn explain(hook: Hook, link: &Link, error: io::Error) -> HookError {
    match error.raw_os_error() {
        Some(libc::EBUSY | libc::EEXIST) if hook.is_xdp() => {
            HookError::Occupied { hook, occupant: Occupant::find(link.xdp_program) }
        }
        Some(libc::EOPNOTSUPP) if hook == Hook::Native => HookError::NoNativeXdp,
        Some(libc::EINVAL) if hook == Hook::Tcx => HookError::NoTcx,
        Some(libc::EINVAL | libc::ERANGE | libc::E2BIG) if hook == Hook::Native => {
            HookError::DriverRefuses(error)
        }
        _ => HookError::Os { hook, error },
    }
}

/// Pins a new link; without a pin it ends with the process.
fn pin_new(pins: Option<&Pins>, fd: &OwnedFd, link: &Link, hook: Hook) -> Option<PathBuf> {
    let (pins, kind) = (pins?, hook.link_kind()?);
    pins.pin_link(fd.as_fd(), link.ifindex, kind)
        .inspect_err(|error| tracing::warn!(%error, interface = %link.name, "cannot pin a link: its program is detached when this process ends"))
        .ok()
}
