//! One program on one hook of an interface: attaching it, checking it, detaching it.

use std::{
    fmt, io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
};

use crate::{
    attach::filters::{ClsactError, Filter},
    attach::hook::Hook,
    attach::netlink::{Link, Socket},
    attach::pins::{PinnedLink, Pins, remove_if_there},
    bpf::{self, LinkKind},
    programs::{Missing, Program, Programs},
};

/// The reason why nothing can be attached to a hook of an interface.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HookError {
    /// The hook's program is not loaded.
    #[error(transparent)]
    NoProgram(#[from] Missing),
    /// An interface takes one XDP program, and another program is attached.
    #[error("{hook}: {occupant} is attached already")]
    Occupied { hook: Hook, occupant: Occupant },
    /// The driver does not implement XDP.
    #[error("native: the driver does not support XDP")]
    NoNativeXdp,
    /// The driver supports XDP, but not with the interface's current configuration.
    #[error("native: the driver refuses XDP with the current MTU, LRO or queues: {0}")]
    DriverRefuses(io::Error),
    #[error("tcx: needs kernel 6.6")]
    NoTcx,
    #[error(transparent)]
    Clsact(#[from] ClsactError),
    /// Any other error from the kernel.
    #[error("{hook}: {error}")]
    Os { hook: Hook, error: io::Error },
}

/// A foreign XDP program, as far as the kernel reveals it.
#[derive(Debug)]
pub(crate) enum Occupant {
    /// Name and user are known, which needs CAP_SYS_ADMIN.
    Identified {
        id: u32,
        /// The program's name and the user that loaded it.
        info: bpf::ProgramInfo,
    },
    /// Only its id is known.
    Id(u32),
    Unknown,
}

impl Occupant {
    /// Looks up the program with this id; without CAP_SYS_ADMIN only the id is known.
    fn find(id: Option<u32>) -> Self {
        let Some(id) = id else { return Self::Unknown };
        match bpf::program_by_id(id).and_then(|program| bpf::program_info(program.as_fd())) {
            Ok(info) => Self::Identified { id, info },
            Err(_) => Self::Id(id),
        }
    }
}

impl fmt::Display for Occupant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Identified { id, info } => {
                write!(f, "XDP program \"{}\" (id {id}, loaded by uid {})", info.name, info.uid)
            }
            Self::Id(id) => write!(f, "the XDP program with id {id}"),
            Self::Unknown => f.write_str("another XDP program"),
        }
    }
}

/// Resources needed to attach a program.
pub(crate) struct AttachContext<'a> {
    pub(crate) programs: &'a mut Programs,
    /// The folder of pins; `None` without pinning.
    pub(crate) pins: Option<&'a Pins>,
    /// A predecessor's links, to be taken over.
    pub(crate) predecessor: &'a mut Vec<PinnedLink>,
    pub(crate) netlink: &'a mut Socket,
    /// Whether a qdisc may be added to the interface because no CNI plugin will add its own any
    /// more.
    pub(crate) settled: bool,
}

/// The state of a program on a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttachState {
    /// Our program is attached.
    Ours,
    /// A successor has replaced our program.
    TakenOver,
    /// The program was detached, or the interface is gone.
    Gone,
}

/// The kernel object that holds a program on its hook.
#[derive(Debug)]
enum HookHandle {
    Link(OwnedFd),
    Filter(Filter),
}

/// A program on a hook.
#[derive(Debug)]
pub(crate) struct HookAttachment {
    pub(crate) hook: Hook,
    handle: HookHandle,
    /// The link's pin.
    pin: Option<PathBuf>,
}

impl HookAttachment {
    pub(crate) fn take(
        hook: Hook,
        interface: &Link,
        context: &mut AttachContext<'_>,
    ) -> Result<Self, HookError> {
        let (handle, pin) = attach(hook, interface, context)?;
        let pin = pin.or_else(|| match &handle {
            HookHandle::Link(link) => pin_new(context.pins, link, interface, hook),
            HookHandle::Filter(_) => None,
        });
        Ok(Self { hook, handle, pin })
    }

    /// Returns whether our program is still attached.
    pub(crate) fn state(&self, ifindex: u32, programs: &Programs, netlink: &mut Socket) -> AttachState {
        let program = match &self.handle {
            HookHandle::Link(link) => match bpf::link_info(link.as_fd()) {
                Ok(info) if info.ifindex == ifindex => Some(info.program_id),
                _ => None,
            },
            HookHandle::Filter(Filter { priority, .. }) => {
                let filters = netlink.filters(ifindex).unwrap_or_default();
                let filter = filters.into_iter().find(|filter| filter.priority == *priority);
                // Another program may have been put in our place, which is no takeover.
                filter.filter(|filter| programs.filters.are(&filter.name)).map(|filter| filter.program)
            }
        };
        match program {
            Some(id) if programs.are(id) => AttachState::Ours,
            Some(_) => AttachState::TakenOver,
            None => AttachState::Gone,
        }
    }

    /// Detaches the program, unless a successor has replaced it.
    pub(crate) fn leave(self, ifindex: u32, programs: &Programs, netlink: &mut Socket) {
        let state = self.state(ifindex, programs, netlink);
        let Self { hook: _, handle, pin } = self;
        if state == AttachState::TakenOver {
            return;
        }
        if let Some(pin) = &pin
            && let Err(error) = remove_if_there(pin)
        {
            tracing::warn!(%error, "cannot unpin a link");
        }
        let result = match &handle {
            // Detaches the program even if other processes hold the link.
            HookHandle::Link(link) => bpf::link_detach(link.as_fd()),
            HookHandle::Filter(filter) if state == AttachState::Ours => filter.remove(ifindex, netlink),
            HookHandle::Filter(_) => Ok(()),
        };
        if let Err(error) = result
            && state == AttachState::Ours
        {
            tracing::warn!(%error, ifindex, "cannot detach a program: it may answer until the lease expires");
        }
    }

    /// Returns whether the attachment outlives the process.
    pub(crate) fn is_kept(&self) -> bool {
        self.pin.is_some() || matches!(self.handle, HookHandle::Filter(_))
    }
}

/// Detaches a predecessor's program from an interface that is no longer served.
pub(crate) fn drop_predecessor(link: PinnedLink) {
    let PinnedLink { fd, path, .. } = link;
    if let Err(error) = remove_if_there(&path) {
        tracing::warn!(%error, "cannot unpin a link of the previous server");
    }
    // An error means that it is already detached.
    let _ = bpf::link_detach(fd.as_fd());
}

/// Attaches to one hook. A link taken over keeps its pin.
fn attach(
    hook: Hook,
    link: &Link,
    context: &mut AttachContext<'_>,
) -> Result<(HookHandle, Option<PathBuf>), HookError> {
    let AttachContext { programs, pins: _, predecessor, netlink, settled } = context;
    let filters = programs.filters.clone();
    let program = programs.get(Program::of(hook))?;
    let Some(kind) = hook.link_kind() else {
        let filter = filters.set(link.ifindex, program, *settled, netlink)?;
        return Ok((HookHandle::Filter(filter), None));
    };
    // The predecessor's link on this hook: replaced atomically, so that every packet meets exactly
    // one program.
    if let Some(place) = predecessor.iter().position(|left| left.ifindex == link.ifindex && left.kind == kind)
    {
        let left = predecessor.swap_remove(place);
        let alive = bpf::link_info(left.fd.as_fd()).is_ok_and(|info| info.ifindex == link.ifindex);
        if alive && bpf::link_update(left.fd.as_fd(), program).is_ok() {
            return Ok((HookHandle::Link(left.fd), Some(left.path)));
        }
        drop_predecessor(left);
    }
    if hook.is_xdp() {
        // An interface takes one mode of XDP: the predecessor's link in the other mode must go
        // first.
        while let Some(place) =
            predecessor.iter().position(|left| left.ifindex == link.ifindex && left.kind != LinkKind::Tcx)
        {
            drop_predecessor(predecessor.swap_remove(place));
        }
    }
    match bpf::link_create(program, link.ifindex, kind) {
        Ok(fd) => Ok((HookHandle::Link(fd), None)),
        Err(error) => Err(explain(hook, link, error)),
    }
}

/// Converts an error from link creation to the reason for it.
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
