//! Which hook serves an interface, and how the program gets there.

use std::{
    fmt, io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
};

use aya::programs::ProgramFd;
use dns_common::object;

use super::{
    netlink::{Link, Socket},
    pins::{PinnedLink, Pins, remove_if_there},
    sys::{self, LinkKind},
};
use crate::config::HookMode;

/// A hook that a program can be attached to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Hook {
    /// XDP in the driver.
    Native,
    /// XDP after the skb was made.
    Generic,
    /// tcx at ingress (kernel 6.6).
    Tcx,
    /// A classic filter of the clsact qdisc.
    Clsact,
}

impl Hook {
    /// Label in metrics and status.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Generic => "generic",
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        }
    }

    /// Whether it is one of XDP's.
    const fn is_xdp(self) -> bool {
        matches!(self, Self::Native | Self::Generic)
    }

    /// The link that attaches to it; clsact has none.
    const fn link_kind(self) -> Option<LinkKind> {
        match self {
            Self::Native => Some(LinkKind::XdpNative),
            Self::Generic => Some(LinkKind::XdpGeneric),
            Self::Tcx => Some(LinkKind::Tcx),
            Self::Clsact => None,
        }
    }
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// Hooks to try on an interface, best first, and why.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// The hooks.
    hooks: Vec<Hook>,
    /// Why the first one is the choice.
    why: String,
    /// Whether another hook than the first is worth a warning.
    wanted_first: bool,
}

/// The hooks for an interface in this mode; an error says why there is none.
pub(super) fn plan(mode: HookMode, link: &Link) -> Result<Plan, String> {
    /// `ARPHRD_ETHER`.
    const ETHERNET: u16 = 1;
    /// `ARPHRD_LOOPBACK`: its packets have an Ethernet header, too.
    const LOOPBACK: u16 = 772;
    if !matches!(link.layer, ETHERNET | LOOPBACK) {
        return Err("its packets have no Ethernet header".into());
    }
    let plan = |hooks: &[Hook], why: String, wanted_first| Plan { hooks: hooks.into(), why, wanted_first };
    let tc = [Hook::Tcx, Hook::Clsact];
    Ok(match mode {
        HookMode::Off => return Err("mode is off".into()),
        HookMode::Tc => plan(&tc, "mode is tc".into(), false),
        HookMode::Native => plan(&[Hook::Native, Hook::Tcx, Hook::Clsact], "mode is native".into(), true),
        HookMode::Generic => plan(&[Hook::Generic, Hook::Tcx, Hook::Clsact], "mode is generic".into(), true),
        HookMode::Auto if link.layer == LOOPBACK => {
            plan(&tc, "auto: XDP would slow down bulk traffic on the loopback".into(), false)
        }
        HookMode::Auto => match &link.kind {
            None => plan(
                &[Hook::Native, Hook::Tcx, Hook::Clsact],
                "auto: hardware whose driver takes XDP".into(),
                false,
            ),
            Some(kind) if kind == "veth" => plan(
                &tc,
                "auto: native XDP on a veth needs help from the container's end, generic slows down bulk traffic"
                    .into(),
                false,
            ),
            Some(kind) => plan(&tc, format!("auto: a {kind} has no XDP of its own"), false),
        },
    })
}

/// The programs to attach.
pub(super) struct Programs {
    /// For XDP's hooks.
    pub(super) xdp: ProgramFd,
    /// For tc's.
    pub(super) tc: ProgramFd,
    /// Priority of our filters where clsact is used: two servers have two of them.
    pub(super) priority: u16,
}

impl Programs {
    /// The program for a hook.
    fn at(&self, hook: Hook) -> &ProgramFd {
        if hook.is_xdp() { &self.xdp } else { &self.tc }
    }

    /// Whether the kernel's number is that of one of ours.
    fn are(&self, id: u32) -> bool {
        [&self.xdp, &self.tc]
            .into_iter()
            .any(|program| sys::program_info(program.as_fd()).is_ok_and(|info| info.id == id))
    }
}

/// A program on an interface.
#[derive(Debug)]
pub(super) struct Attachment {
    /// Interface.
    pub(super) ifindex: u32,
    /// Where.
    pub(super) hook: Hook,
    /// Why there.
    pub(super) why: String,
    /// The link; `None` at clsact.
    link: Option<OwnedFd>,
    /// Where the link is pinned.
    pin: Option<PathBuf>,
}

/// How an attachment fares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Our program is there.
    Ours,
    /// A successor has put its program there.
    TakenOver,
    /// Somebody detached it, or the interface is gone.
    Gone,
}

impl Attachment {
    /// Attaches to the best hook of the plan that takes the program, in the
    /// place of what a predecessor left there.
    pub(super) fn make(
        plan: Plan,
        link: &Link,
        programs: &Programs,
        pins: Option<&Pins>,
        predecessor: &mut Vec<PinnedLink>,
        netlink: &mut Socket,
    ) -> Result<Self, String> {
        let Plan { hooks, why, wanted_first } = plan;
        let mut refusals: Vec<String> = Vec::new();
        for (index, &hook) in hooks.iter().enumerate() {
            let (link_fd, pin) = match attach(hook, link, programs, predecessor, netlink) {
                Ok(attached) => attached,
                Err(reason) => {
                    refusals.push(reason);
                    continue;
                }
            };
            let pin = pin.or_else(|| pin_new(pins, link_fd.as_ref(), link, hook));
            let why = if refusals.is_empty() { why } else { format!("{why}; but {}", refusals.join("; ")) };
            // Between tcx and clsact the kernel's age decides; nobody need act on it.
            if index > 0 && hooks[0].is_xdp() {
                if wanted_first {
                    tracing::warn!(interface = %link.name, %hook, why, "the wanted hook is not to be had; using another");
                } else {
                    tracing::info!(interface = %link.name, %hook, why, "the better hook is not to be had");
                }
            }
            return Ok(Self { ifindex: link.ifindex, hook, why, link: link_fd, pin });
        }
        Err(refusals.join("; "))
    }

    /// Whether our program is still there.
    pub(super) fn standing(&self, programs: &Programs, netlink: &mut Socket) -> Standing {
        let program = match &self.link {
            Some(link) => match sys::link_info(link.as_fd()) {
                Ok(info) if info.ifindex == self.ifindex => Some(info.program_id),
                _ => None,
            },
            None => netlink.filter(self.ifindex, programs.priority).ok().flatten().map(|(id, _)| id),
        };
        match program {
            Some(id) if programs.are(id) => Standing::Ours,
            Some(_) => Standing::TakenOver,
            None => Standing::Gone,
        }
    }

    /// Takes the program off the interface, unless a successor's is there by now.
    pub(super) fn detach(self, programs: &Programs, netlink: &mut Socket) {
        let standing = self.standing(programs, netlink);
        let Self { ifindex, hook: _, why: _, link, pin } = self;
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
    link: &Link,
    programs: &Programs,
    predecessor: &mut Vec<PinnedLink>,
    netlink: &mut Socket,
) -> Result<(Option<OwnedFd>, Option<PathBuf>), String> {
    let program = programs.at(hook).as_fd();
    let Some(kind) = hook.link_kind() else {
        let set = |netlink: &mut Socket| {
            netlink.add_clsact(link.ifindex)?;
            netlink.set_filter(link.ifindex, programs.priority, program, object::TC_PROGRAM)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// An interface of this kind.
    fn link(layer: u16, kind: Option<&str>) -> Link {
        Link {
            ifindex: 7,
            name: "x".into(),
            layer,
            kind: kind.map(str::to_owned),
            part_of: None,
            xdp_program: None,
        }
    }

    #[test]
    fn auto_takes_native_only_on_hardware() {
        let first = |layer, kind| plan(HookMode::Auto, &link(layer, kind)).unwrap().hooks[0];
        assert_eq!(first(1, None), Hook::Native);
        assert_eq!(first(772, None), Hook::Tcx);
        for kind in ["veth", "bridge", "dummy", "vlan"] {
            assert_eq!(first(1, Some(kind)), Hook::Tcx);
        }
    }

    #[test]
    fn every_mode_falls_back_to_tc() {
        for mode in [HookMode::Auto, HookMode::Native, HookMode::Generic, HookMode::Tc] {
            assert_eq!(plan(mode, &link(1, None)).unwrap().hooks.last(), Some(&Hook::Clsact));
        }
        assert_eq!(plan(HookMode::Generic, &link(1, None)).unwrap().hooks[0], Hook::Generic);
    }

    #[test]
    fn interfaces_without_ethernet_headers_are_left_alone() {
        // ARPHRD_NONE: a tun or WireGuard device.
        assert!(plan(HookMode::Tc, &link(0xfffe, Some("wireguard"))).is_err());
    }
}
