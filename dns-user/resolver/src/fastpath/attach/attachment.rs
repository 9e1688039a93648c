//! One program on one hook of an interface: how it gets there, whose is there,
//! and how it leaves.

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
};

use dns_common::object;

use crate::fastpath::{
    attach::hook::Hook,
    attach::netlink::{Link, Socket},
    attach::pins::{PinnedLink, Pins, remove_if_there},
    bpf::{self, LinkKind},
    programs::{Missing, Programs, Role},
};

/// Our filters of clsact among those of others. Every filter of an interface has a priority,
/// which is all that the kernel tells them apart by; so ours say in their names whose they are.
#[derive(Clone, Debug)]
pub(crate) struct Filters {
    /// The server: its first address and port.
    owner: String,
    /// The first of our priorities; if another's filter has it, the next one is taken.
    first: u16,
}

impl Filters {
    /// How many priorities are tried.
    const TRIES: u16 = 16;

    /// Those of the server at this address.
    pub(crate) fn of(main: SocketAddr) -> Self {
        let owner = main.to_string();
        let hash = dns_common::name::hash_name(0, owner.as_bytes());
        // 0xb000 to 0xbfff: after whatever takes the low numbers, before the
        // kernel's own choices from 0xc000 down.
        Self { first: 0xb000 | (hash % 0x1000) as u16, owner }
    }

    /// The name of a filter with this program.
    fn name(&self, program: &str) -> String {
        format!("{program} {}", self.owner)
    }

    /// Whether a filter of this name is ours.
    fn are(&self, name: &str) -> bool {
        [object::TC_PROGRAM, object::TC_SECOND_PROGRAM].into_iter().any(|program| name == self.name(program))
    }

    /// The priority of our filter, given who has which one, and whether it is there.
    fn place(
        &self,
        mut at: impl FnMut(u16) -> io::Result<Option<String>>,
    ) -> io::Result<Option<(u16, bool)>> {
        let mut free = None;
        for step in 0..Self::TRIES {
            let priority = 0xb000 | (self.first.wrapping_add(step) & 0xfff);
            match at(priority)? {
                Some(name) if self.are(&name) => return Ok(Some((priority, true))),
                Some(_) => {}
                None => free = free.or(Some((priority, false))),
            }
        }
        Ok(free)
    }

    /// Sets our filter.
    fn set(
        &self,
        ifindex: u32,
        program: BorrowedFd<'_>,
        stage: Stage,
        netlink: &mut Socket,
    ) -> io::Result<u16> {
        netlink.add_clsact(ifindex)?;
        let place = self.place(|priority| Ok(netlink.filter(ifindex, priority)?.map(|(_, name)| name)))?;
        let (priority, replace) =
            place.ok_or_else(|| io::Error::other("others have all of our priorities"))?;
        netlink.set_filter(ifindex, priority, replace, program, &self.name(stage.tc_program()))?;
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

/// What a program is to an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
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

    /// The program that it is on a hook.
    pub(crate) const fn role(self, hook: Hook) -> Role {
        match (self, hook) {
            (Self::Second, _) => Role::TcSecond,
            (Self::First, Hook::Native) => Role::Xdp,
            (Self::First, Hook::Generic) => Role::XdpGeneric,
            (Self::First, Hook::Tcx | Hook::Clsact) => Role::Tc,
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
    /// Attaches and pins; an error says why the hook cannot be had.
    pub(crate) fn take(
        hook: Hook,
        stage: Stage,
        interface: &Link,
        means: &mut Means<'_>,
    ) -> Result<Self, String> {
        let (held, pin) = attach(hook, stage, interface, means)?;
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
            tracing::warn!(%error, ifindex, "cannot detach a program");
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
        tracing::warn!(%error, "cannot unpin a link of the server before");
    }
    // An error means that it is detached already.
    let _ = bpf::link_detach(fd.as_fd());
}

/// Attaches to one hook; an error says why it cannot be had. With a link that
/// was taken over comes its pin.
fn attach(
    hook: Hook,
    stage: Stage,
    link: &Link,
    means: &mut Means<'_>,
) -> Result<(Held, Option<PathBuf>), String> {
    let Means { programs, pins: _, predecessor, netlink } = means;
    let filters = programs.filters.clone();
    let program = programs.get(stage.role(hook)).map_err(|missing| match missing {
        Missing::Refused(why) => why,
        // Who attaches has seen to it that nothing is loading any more.
        Missing::Loading => "its program is being loaded".to_owned(),
    })?;
    let Some(kind) = hook.link_kind() else {
        let set = filters.set(link.ifindex, program, stage, netlink);
        return set
            .map(|priority| (Held::Filter(priority), None))
            .map_err(|error| format!("clsact: {error}"));
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
    match bpf::program_by_id(id).and_then(|program| bpf::program_info(program.as_fd())) {
        Ok(info) => format!("XDP program \"{}\" (id {id}, loaded by uid {})", info.name, info.uid),
        // Only CAP_SYS_ADMIN may ask for programs by id.
        Err(_) => format!("the XDP program with id {id}"),
    }
}

/// Pins a new link; without a pin it ends with the process.
fn pin_new(pins: Option<&Pins>, fd: &OwnedFd, link: &Link, hook: Hook) -> Option<PathBuf> {
    let (pins, kind) = (pins?, hook.link_kind()?);
    pins.pin_link(fd.as_fd(), link.ifindex, kind)
        .inspect_err(|error| tracing::warn!(%error, interface = %link.name, "cannot pin a link: it ends with this process"))
        .ok()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_priority_that_another_server_has_is_left_to_it() {
        let (ours, theirs) =
            ["169.254.0.2:53", "169.254.0.2:54"].map(|text| Filters::of(text.parse().unwrap())).into();
        assert!((0xb000..0xc000).contains(&ours.first) && ours.first != theirs.first);
        let mut there: BTreeMap<u16, String> = BTreeMap::new();
        let place = |filters: &Filters, there: &BTreeMap<u16, String>| {
            filters.place(|priority| Ok(there.get(&priority).cloned())).unwrap()
        };
        assert_eq!(place(&ours, &there), Some((ours.first, false)));
        // As if both addresses had the same hash.
        there.insert(ours.first, theirs.name(object::TC_PROGRAM));
        let next = 0xb000 | (ours.first + 1) & 0xfff;
        assert_eq!(place(&ours, &there), Some((next, false)));
        there.insert(next, ours.name(object::TC_SECOND_PROGRAM));
        assert_eq!(place(&ours, &there), Some((next, true)), "of an earlier process");
        // Its own is found even where the first one has become free.
        there.remove(&ours.first);
        assert_eq!(place(&ours, &there), Some((next, true)));
        let all = (0..0x1000).map(|step| (0xb000 | step, "somebody's".to_owned())).collect();
        assert_eq!(place(&ours, &all), None);
    }
}
