//! One program on one hook of an interface: how it gets there, whose is there,
//! and how it leaves.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
};

use aya::programs::ProgramFd;
use dns_common::object;

use super::{
    hooks::Hook,
    netlink::{Link, Socket},
    pins::{PinnedLink, Pins, remove_if_there},
    sys::{self, LinkKind},
};

/// The programs to attach.
pub(super) struct Programs {
    /// For XDP's hooks: of the mode's own kind, see [`super::hooks::xdp_program`].
    pub(super) xdp: ProgramFd,
    /// For tc's.
    pub(super) tc: ProgramFd,
    /// For tc's behind XDP.
    pub(super) tc_second: ProgramFd,
    /// Priority of our filters where clsact is used: two servers have two of them.
    pub(super) priority: u16,
}

/// What a program is to an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// It answers.
    First,
    /// It answers what XDP before it found no room for.
    Second,
}

impl Stage {
    /// The name of its program at tc, which filters of clsact show.
    const fn tc_program(self) -> &'static str {
        match self {
            Self::First => object::TC_PROGRAM,
            Self::Second => object::TC_SECOND_PROGRAM,
        }
    }
}

impl Programs {
    /// The program for a hook.
    fn at(&self, hook: Hook, stage: Stage) -> &ProgramFd {
        match stage {
            Stage::Second => &self.tc_second,
            Stage::First if hook.is_xdp() => &self.xdp,
            Stage::First => &self.tc,
        }
    }

    /// Whether the kernel's number is that of one of ours.
    fn are(&self, id: u32) -> bool {
        [&self.xdp, &self.tc, &self.tc_second]
            .into_iter()
            .any(|program| sys::program_info(program.as_fd()).is_ok_and(|info| info.id == id))
    }
}

/// What attaching works with.
pub(super) struct Means<'a> {
    /// What to attach.
    pub(super) programs: &'a Programs,
    /// Where to pin; `None`: nowhere.
    pub(super) pins: Option<&'a Pins>,
    /// Links of a predecessor, to be taken over.
    pub(super) predecessor: &'a mut Vec<PinnedLink>,
    /// For requests.
    pub(super) netlink: &'a mut Socket,
}

/// How a program on a hook fares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Our program is there.
    Ours,
    /// A successor has put its program there.
    TakenOver,
    /// Somebody detached it, or the interface is gone.
    Gone,
}

/// A program on a hook.
#[derive(Debug)]
pub(super) struct Place {
    /// The hook.
    pub(super) hook: Hook,
    /// The link; `None` at clsact.
    link: Option<OwnedFd>,
    /// Where the link is pinned.
    pin: Option<PathBuf>,
}

impl Place {
    /// Attaches and pins; an error says why the hook cannot be had.
    pub(super) fn take(
        hook: Hook,
        stage: Stage,
        interface: &Link,
        means: &mut Means<'_>,
    ) -> Result<Self, String> {
        let (link, pin) = attach(hook, stage, interface, means)?;
        let pin = pin.or_else(|| pin_new(means.pins, link.as_ref(), interface, hook));
        Ok(Self { hook, link, pin })
    }

    /// Whether our program is still there.
    pub(super) fn standing(&self, ifindex: u32, programs: &Programs, netlink: &mut Socket) -> Standing {
        let program = match &self.link {
            Some(link) => match sys::link_info(link.as_fd()) {
                Ok(info) if info.ifindex == ifindex => Some(info.program_id),
                _ => None,
            },
            None => netlink.filter(ifindex, programs.priority).ok().flatten().map(|(id, _)| id),
        };
        match program {
            Some(id) if programs.are(id) => Standing::Ours,
            Some(_) => Standing::TakenOver,
            None => Standing::Gone,
        }
    }

    /// Takes the program off, unless a successor's is there by now.
    pub(super) fn leave(self, ifindex: u32, programs: &Programs, netlink: &mut Socket) {
        let standing = self.standing(ifindex, programs, netlink);
        let Self { hook: _, link, pin } = self;
        if standing == Standing::TakenOver {
            return;
        }
        if let Some(pin) = &pin
            && let Err(error) = remove_if_there(pin)
        {
            tracing::warn!(%error, "cannot unpin a link");
        }
        let result = match &link {
            // Whoever else holds the link: it is off the interface now.
            Some(link) => sys::link_detach(link.as_fd()),
            None if standing == Standing::Ours => netlink.remove_filter(ifindex, programs.priority),
            None => Ok(()),
        };
        if let Err(error) = result
            && standing == Standing::Ours
        {
            tracing::warn!(%error, ifindex, "cannot detach a program");
        }
    }

    /// Whether it outlives the process.
    pub(super) fn is_kept(&self) -> bool {
        self.pin.is_some() || self.link.is_none()
    }
}

/// Takes down what a predecessor left on an interface that is not served any more.
pub(super) fn drop_predecessor(link: PinnedLink) {
    let PinnedLink { fd, path, .. } = link;
    if let Err(error) = remove_if_there(&path) {
        tracing::warn!(%error, "cannot unpin a link of the server before");
    }
    // An error means that it is detached already.
    let _ = sys::link_detach(fd.as_fd());
}

/// Attaches to one hook; an error says why it cannot be had. With a link that
/// was taken over comes its pin.
fn attach(
    hook: Hook,
    stage: Stage,
    link: &Link,
    means: &mut Means<'_>,
) -> Result<(Option<OwnedFd>, Option<PathBuf>), String> {
    let Means { programs, pins: _, predecessor, netlink } = means;
    let program = programs.at(hook, stage).as_fd();
    let Some(kind) = hook.link_kind() else {
        let set = |netlink: &mut Socket| {
            netlink.add_clsact(link.ifindex)?;
            netlink.set_filter(link.ifindex, programs.priority, program, stage.tc_program())
        };
        return set(netlink).map(|()| (None, None)).map_err(|error| format!("clsact: {error}"));
    };
    // The predecessor's own link on this hook: one step, no packet meets none or both.
    if let Some(place) = predecessor.iter().position(|left| left.ifindex == link.ifindex && left.kind == kind)
    {
        let left = predecessor.swap_remove(place);
        let alive = sys::link_info(left.fd.as_fd()).is_ok_and(|info| info.ifindex == link.ifindex);
        if alive && sys::link_update(left.fd.as_fd(), program).is_ok() {
            return Ok((Some(left.fd), Some(left.path)));
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
    match sys::link_create(program, link.ifindex, kind) {
        Ok(fd) => Ok((Some(fd), None)),
        Err(error) => Err(explain(hook, link, &error)),
    }
}

/// Why a link could not be made, in words.
fn explain(hook: Hook, link: &Link, error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EBUSY | libc::EEXIST) if hook.is_xdp() => match link.xdp_program {
            Some(id) => format!("{hook}: {} is there", whose(id)),
            None => format!("{hook}: another XDP program is there"),
        },
        Some(libc::EOPNOTSUPP) if hook == Hook::Native => format!("{hook}: the driver has no XDP"),
        Some(libc::EINVAL) if hook == Hook::Tcx => format!("{hook}: needs kernel 6.6"),
        Some(libc::EINVAL | libc::ERANGE | libc::E2BIG) if hook == Hook::Native => {
            format!("{hook}: the driver refuses (MTU, LRO or queues): {error}")
        }
        _ => format!("{hook}: {error}"),
    }
}

/// Whose XDP program that is, as far as the kernel tells us.
fn whose(id: u32) -> String {
    match sys::program_by_id(id).and_then(|program| sys::program_info(program.as_fd())) {
        Ok(info) => format!("XDP program \"{}\" (id {id}, loaded by uid {})", info.name, info.uid),
        // Only CAP_SYS_ADMIN may ask for programs by id.
        Err(_) => format!("the XDP program with id {id}"),
    }
}

/// Pins a new link; without a pin it ends with the process.
fn pin_new(pins: Option<&Pins>, fd: Option<&OwnedFd>, link: &Link, hook: Hook) -> Option<PathBuf> {
    let (pins, fd, kind) = (pins?, fd?, hook.link_kind()?);
    pins.pin_link(fd.as_fd(), link.ifindex, kind)
        .inspect_err(|error| tracing::warn!(%error, interface = %link.name, "cannot pin a link: it ends with this process"))
        .ok()
}
