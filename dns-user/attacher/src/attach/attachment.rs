//! One program on one hook of an interface: attaching it, checking it, detaching it; and our clsact filters,
//! distinguished from foreign ones.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
};

use dns_common::object;
use dns_fastpath::protocol::Hook;

use super::{
    netlink::{FilterInfo, Link, NewFilter, Occupant, Socket},
    rtnl_throttle::QUIET,
};
use crate::{
    attach::pins::{PinnedLink, Pins, remove_if_there},
    bpf::{self, LinkKind},
    programs::{Missing, Program, Programs},
};

/// The reason why nothing is attached to an interface or hook.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotServed {
    #[error("its program is being loaded")]
    Loading,
    /// The interface may still change; attaching is tried again once it has settled.
    #[error(
        "before Linux 6.6 a clsact qdisc is added {} s after the interface's last change, because a CNI plugin may still add \"ingress\"",
        QUIET.as_secs()
    )]
    Unsettled,
    #[error("{0}")]
    Refused(String),
}

/// Describes the foreign XDP program with this id; name and user are known with CAP_SYS_ADMIN only.
fn occupant(id: Option<u32>) -> String {
    let Some(id) = id else {
        return "another XDP program".to_owned();
    };
    match bpf::program_by_id(id).and_then(|program| bpf::program_info(program.as_fd())) {
        Ok(info) => format!(
            "XDP program \"{}\" (id {id}, loaded by uid {})",
            info.name, info.uid
        ),
        Err(_) => format!("the XDP program with id {id}"),
    }
}

/// Resources needed to attach a program.
pub(crate) struct AttachContext<'a> {
    pub(crate) programs: &'a mut Programs,
    pub(crate) filters: &'a Filters,
    /// The folder of pins; `None` without pinning.
    pub(crate) pins: Option<&'a Pins>,
    /// A predecessor's links, to be taken over.
    pub(crate) predecessor: &'a mut Vec<PinnedLink>,
    /// Links whose program does not answer yet, by interface. Closing one detaches its program.
    pub(crate) prepared: &'a mut BTreeMap<u32, OwnedFd>,
    /// Set once the kernel does not know tcx.
    pub(crate) lacks_tcx: &'a mut bool,
    pub(crate) netlink: &'a mut Socket,
    /// Whether a qdisc may be added to the interface because no CNI plugin will add its own any more.
    pub(crate) settled: bool,
}

/// The state of a program on a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttachState {
    Ours,
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

/// A program on a hook of an interface.
#[derive(Debug)]
pub(crate) struct Attachment {
    ifindex: u32,
    pub(crate) hook: Hook,
    handle: HookHandle,
    pin: Option<PathBuf>,
    /// The reason for the hook.
    pub(crate) why: String,
}

impl Attachment {
    /// Returns whether a server added the qdisc of this filter, so that it goes with the filter.
    pub(crate) fn owns_qdisc(&self) -> bool {
        matches!(&self.handle, HookHandle::Filter(filter) if filter.qdisc == QdiscOwner::Us)
    }

    pub(super) fn make(
        hook: Hook,
        interface: &Link,
        why: String,
        context: &mut AttachContext<'_>,
    ) -> Result<Self, NotServed> {
        let (handle, pin) = attach(hook, interface, context)?;
        let pin = pin.or_else(|| match &handle {
            HookHandle::Link(link) => pin_new(context.pins, link, interface, hook),
            HookHandle::Filter(_) => None,
        });
        Ok(Self {
            ifindex: interface.ifindex,
            hook,
            handle,
            pin,
            why,
        })
    }

    /// Asks the kernel for the program on the hook. After an error its state is unknown.
    pub(crate) fn state(
        &self,
        programs: &Programs,
        filters: &Filters,
        netlink: &mut Socket,
    ) -> io::Result<AttachState> {
        let program = match &self.handle {
            HookHandle::Link(link) => {
                let info = bpf::link_info(link.as_fd())?;
                // A link whose interface is gone has index 0.
                (info.ifindex == self.ifindex).then_some(info.program_id)
            }
            HookHandle::Filter(Filter { priority, .. }) => {
                let found = netlink.filters(self.ifindex)?;
                let filter = found
                    .into_iter()
                    .find(|filter| filter.priority == *priority);
                // Another program may have been put in our place, which is no takeover.
                filter
                    .filter(|filter| filters.are(&filter.name))
                    .map(|filter| filter.program)
            }
        };
        Ok(match program {
            Some(id) if programs.are(id) => AttachState::Ours,
            Some(_) => AttachState::TakenOver,
            None => AttachState::Gone,
        })
    }

    /// Detaches the program, unless a successor has replaced it.
    pub(crate) fn detach(self, programs: &Programs, filters: &Filters, netlink: &mut Socket) {
        let state = self.state(programs, filters, netlink);
        let Self {
            ifindex,
            hook: _,
            handle,
            pin,
            why: _,
        } = self;
        // The link is the successor's now, and so is the pin with its name.
        if matches!(state, Ok(AttachState::TakenOver)) {
            return;
        }
        let may_be_attached = !matches!(state, Ok(AttachState::Gone));
        // Unpinned first: if this process is killed in between, the link still ends with it.
        if let Some(pin) = &pin
            && let Err(error) = remove_if_there(pin)
        {
            tracing::warn!(%error, "cannot unpin a link");
        }
        let result = match (&handle, state) {
            // Detaches the program even if other processes hold the link.
            (HookHandle::Link(link), _) => bpf::link_detach(link.as_fd()),
            (HookHandle::Filter(filter), Ok(AttachState::Ours)) => filter.remove(ifindex, netlink),
            // A foreign filter of this priority must stay.
            (HookHandle::Filter(_), state) => state.map(drop),
        };
        if let Err(error) = result
            && may_be_attached
        {
            tracing::warn!(%error, ifindex, "cannot detach a program: it may answer until the lease expires");
        }
    }

    /// Returns whether the attachment outlives the process.
    pub(crate) fn is_kept(&self) -> bool {
        self.pin.is_some() || matches!(self.handle, HookHandle::Filter(_))
    }
}

/// Returns the program that is attached to a hook.
pub(super) const fn program_of(hook: Hook) -> Program {
    match hook {
        Hook::Native => Program::Xdp,
        Hook::Tcx | Hook::Clsact => Program::Tc,
    }
}

/// Returns the kind of link that attaches to a hook; `None`: a filter does.
const fn link_kind(hook: Hook) -> Option<LinkKind> {
    match hook {
        Hook::Native => Some(LinkKind::XdpNative),
        Hook::Tcx => Some(LinkKind::Tcx),
        Hook::Clsact => None,
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

/// Attaches to one hook. A link taken over keeps its pin. While the program does not answer yet, its link is prepared.
fn attach(
    hook: Hook,
    link: &Link,
    context: &mut AttachContext<'_>,
) -> Result<(HookHandle, Option<PathBuf>), NotServed> {
    let AttachContext {
        programs,
        filters,
        pins: _,
        predecessor,
        prepared,
        lacks_tcx,
        netlink,
        settled,
    } = context;
    let program = match programs.get(program_of(hook)) {
        Ok(program) => program,
        Err(Missing::Loading(loaded)) => {
            // A predecessor's program answers meanwhile.
            let is_free = !predecessor.iter().any(|left| left.ifindex == link.ifindex);
            if let Some(program) = loaded
                && hook == Hook::Tcx
                && is_free
                && !prepared.contains_key(&link.ifindex)
                // An error comes again when the program answers, and is reported then.
                && let Ok(fd) = bpf::link_create(program, link.ifindex, LinkKind::Tcx)
            {
                prepared.insert(link.ifindex, fd);
            }
            return Err(NotServed::Loading);
        }
        Err(Missing::NotLoaded(why)) => {
            // Closing the link detaches the program, which would pass every packet for nothing.
            prepared.remove(&link.ifindex);
            return Err(NotServed::Refused(why));
        }
    };
    let prepared = prepared.remove(&link.ifindex);
    // A filter has no link; its predecessor is found by its name.
    let Some(kind) = link_kind(hook) else {
        let filter = filters.set(link.ifindex, program, *settled, netlink)?;
        return Ok((HookHandle::Filter(filter), None));
    };
    // The predecessor's link on this hook: replaced atomically, so that every packet meets exactly
    // one program.
    if let Some(place) = predecessor
        .iter()
        .position(|left| left.ifindex == link.ifindex && left.kind == kind)
    {
        let left = predecessor.swap_remove(place);
        // The kernel refuses to update a link whose interface is gone (ENOLINK).
        let alive = bpf::link_info(left.fd.as_fd()).is_ok_and(|info| info.ifindex == link.ifindex);
        if alive && bpf::link_update(left.fd.as_fd(), program).is_ok() {
            return Ok((HookHandle::Link(left.fd), Some(left.path)));
        }
        drop_predecessor(left);
    }
    if hook == Hook::Native {
        // An interface takes one mode of XDP: the predecessor's link in the other mode must go first.
        while let Some(place) = predecessor
            .iter()
            .position(|left| left.ifindex == link.ifindex && left.kind != LinkKind::Tcx)
        {
            drop_predecessor(predecessor.swap_remove(place));
        }
    }
    if let Some(fd) = prepared
        && hook == Hook::Tcx
    {
        return Ok((HookHandle::Link(fd), None));
    }
    match bpf::link_create(program, link.ifindex, kind) {
        Ok(fd) => Ok((HookHandle::Link(fd), None)),
        Err(error) => {
            // Any other error, such as ENOMEM, is one of this moment or of this interface.
            **lacks_tcx |= hook == Hook::Tcx && error.raw_os_error() == Some(UNKNOWN_ATTACH_TYPE);
            Err(explain(hook, link, error))
        }
    }
}

/// The answer of a kernel that does not know the attach type (before Linux 6.6 for tcx).
const UNKNOWN_ATTACH_TYPE: i32 = libc::EINVAL;

/// Converts an error from link creation to the reason for it.
fn explain(hook: Hook, link: &Link, error: io::Error) -> NotServed {
    NotServed::Refused(match error.raw_os_error() {
        Some(libc::EBUSY | libc::EEXIST) if hook == Hook::Native => {
            // An interface takes one XDP program.
            format!("{hook}: {} is attached already", occupant(link.xdp_program))
        }
        Some(libc::EOPNOTSUPP) if hook == Hook::Native => {
            "native: the driver does not support XDP".to_owned()
        }
        Some(UNKNOWN_ATTACH_TYPE) if hook == Hook::Tcx => "tcx: needs kernel 6.6".to_owned(),
        // Each driver has its own number for the same: for the MTU, virtio_net has EINVAL and veth
        // ERANGE.
        Some(libc::EINVAL | libc::ERANGE | libc::E2BIG) if hook == Hook::Native => {
            format!("native: the driver refuses XDP with the current MTU, LRO or queues: {error}")
        }
        _ => format!("{hook}: {error}"),
    })
}

fn clsact_failed(error: io::Error) -> NotServed {
    NotServed::Refused(format!("clsact: {error}"))
}

/// Pins a new link; without a pin it ends with the process.
fn pin_new(pins: Option<&Pins>, fd: &OwnedFd, link: &Link, hook: Hook) -> Option<PathBuf> {
    let pins = pins?;
    let kind = link_kind(hook)?;
    pins.pin_link(fd.as_fd(), link.ifindex, kind)
        .inspect_err(|error| tracing::warn!(%error, interface = %link.name, "cannot pin a link: its program is detached when this process ends"))
        .ok()
}

/// The only ingress qdisc that our filters can share with foreign ones.
const CLSACT: &str = "clsact";

/// Suffix of a filter's name if the server added the qdisc.
const WITH_QDISC: &str = " qdisc";

/// Whether the interface accepts a classic filter, and whether that is sensible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IngressSlot {
    /// No qdisc: one may be added.
    Free,
    /// A clsact qdisc without foreign filters at ingress, which could see packets first.
    Clsact,
    /// Another qdisc, or foreign filters.
    Foreign,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QdiscOwner {
    /// A server at the same address. The qdisc goes with the filter.
    Us,
    Others,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Filter {
    pub(super) priority: u16,
    qdisc: QdiscOwner,
}

impl Filter {
    /// Removes the filter, and the qdisc if a server added it and nothing else uses it: a CNI
    /// plugin could otherwise no longer add `ingress`.
    pub(super) fn remove(self, ifindex: u32, netlink: &mut Socket) -> io::Result<()> {
        // Filters at egress use the same qdisc; removing it would remove them as well.
        if self.qdisc == QdiscOwner::Us && !netlink.has_other_filters(ifindex, self.priority)? {
            // With its filter in one step: the owner of the qdisc is part of the filter's name, and a kill in between
            // would leave it for good.
            return netlink.remove_clsact(ifindex);
        }
        netlink.remove_filter(ifindex, self.priority)
    }
}

/// Our clsact filters. The kernel identifies a filter of an interface only by its priority, so each
/// of ours carries its owner in its name.
#[derive(Clone, Debug)]
pub(crate) struct Filters {
    /// The server's main address and port.
    owner: String,
    /// Our first priority; if a foreign filter occupies it, the next one is tried.
    first: u16,
}

impl Filters {
    /// Number of priorities to try.
    const TRIES: u16 = 16;

    pub(crate) fn of(main: SocketAddr) -> Self {
        let owner = main.to_string();
        let hash = dns_common::name::hash_name(0, owner.as_bytes());
        // 0xb000 to 0xbfff: after filters with low numbers, before the kernel's own choices from 0xc000 down.
        Self {
            first: 0xb000 | (hash % 0x1000) as u16,
            owner,
        }
    }

    pub(crate) fn slot(&self, ifindex: u32, netlink: &mut Socket) -> io::Result<IngressSlot> {
        Ok(match netlink.ingress_qdisc(ifindex)? {
            None => IngressSlot::Free,
            Some(kind) if kind == CLSACT && self.are_all(&netlink.filters(ifindex)?) => {
                IngressSlot::Clsact
            }
            Some(_) => IngressSlot::Foreign,
        })
    }

    /// Sets our filter. A clsact qdisc is added only if the interface is settled.
    pub(super) fn set(
        &self,
        ifindex: u32,
        program: BorrowedFd<'_>,
        settled: bool,
        netlink: &mut Socket,
    ) -> Result<Filter, NotServed> {
        let (filter, occupant) = match netlink.ingress_qdisc(ifindex).map_err(clsact_failed)? {
            Some(kind) if kind == CLSACT => {
                let filters = netlink.filters(ifindex).map_err(clsact_failed)?;
                self.place(&filters).ok_or_else(|| {
                    NotServed::Refused(
                        "clsact: foreign filters occupy every priority available to the server"
                            .to_owned(),
                    )
                })?
            }
            // Filters of another qdisc, such as a bandwidth limit, may see packets first and consume them.
            Some(kind) => {
                return Err(NotServed::Refused(format!(
                    "clsact: the interface has a foreign qdisc \"{kind}\" (a bandwidth limit?), which before Linux \
                     6.6 excludes ours"
                )));
            }
            None if !settled => return Err(NotServed::Unsettled),
            None => return self.set_with_qdisc(ifindex, program, netlink),
        };
        let new = NewFilter {
            priority: filter.priority,
            program,
            name: &self.name(filter.qdisc),
        };
        netlink
            .set_filter(ifindex, &new, occupant)
            .map_err(clsact_failed)?;
        Ok(filter)
    }

    /// Sets our filter with a qdisc of its own.
    fn set_with_qdisc(
        &self,
        ifindex: u32,
        program: BorrowedFd<'_>,
        netlink: &mut Socket,
    ) -> Result<Filter, NotServed> {
        let filter = Filter {
            priority: self.first,
            qdisc: QdiscOwner::Us,
        };
        let new = NewFilter {
            priority: filter.priority,
            program,
            name: &self.name(filter.qdisc),
        };
        let [of_qdisc, of_filter] = netlink
            .add_clsact_with(ifindex, &new)
            .map_err(clsact_failed)?;
        let undone = match (of_qdisc, &of_filter) {
            (Ok(()), Ok(())) => return Ok(filter),
            (Ok(()), Err(_)) => netlink.remove_clsact(ifindex),
            // Another qdisc was added just before: the next attempt finds it, and takes its owner into account.
            (Err(_), Ok(())) => netlink.remove_filter(ifindex, filter.priority),
            (Err(error), Err(_)) if error.raw_os_error() == Some(libc::EEXIST) => {
                return Err(NotServed::Unsettled);
            }
            (Err(error), Err(_)) => return Err(clsact_failed(error)),
        };
        if let Err(error) = undone {
            tracing::warn!(%error, ifindex, "cannot remove a clsact qdisc or filter that was added in part: other qdiscs at ingress may be refused");
        }
        Err(of_filter.map_or_else(clsact_failed, |()| NotServed::Unsettled))
    }

    /// Returns our filter on an interface, whichever process set it.
    fn find(&self, ifindex: u32, netlink: &mut Socket) -> io::Result<Option<Filter>> {
        let place = self.place(&netlink.filters(ifindex)?);
        Ok(place
            .filter(|(_, occupant)| *occupant == Occupant::Replaced)
            .map(|(filter, _)| filter))
    }

    pub(crate) fn is_on(&self, ifindex: u32, netlink: &mut Socket) -> io::Result<bool> {
        Ok(self.find(ifindex, netlink)?.is_some())
    }

    /// Removes our filter from an interface, whichever process set it; returns whether there was one.
    pub(crate) fn remove(&self, ifindex: u32, netlink: &mut Socket) -> io::Result<bool> {
        match self.find(ifindex, netlink)? {
            Some(filter) => filter.remove(ifindex, netlink).map(|()| true),
            None => Ok(false),
        }
    }

    fn name(&self, qdisc: QdiscOwner) -> String {
        let suffix = if qdisc == QdiscOwner::Us {
            WITH_QDISC
        } else {
            ""
        };
        format!("{} {}{suffix}", object::TC_PROGRAM, self.owner)
    }

    /// Returns the owner of the qdisc if a filter of this name is ours.
    fn qdisc_of(&self, name: &str) -> Option<QdiscOwner> {
        [QdiscOwner::Us, QdiscOwner::Others]
            .into_iter()
            .find(|&qdisc| name == self.name(qdisc))
    }

    /// Returns whether a filter of this name is ours.
    pub(crate) fn are(&self, name: &str) -> bool {
        self.qdisc_of(name).is_some()
    }

    fn are_all(&self, filters: &[FilterInfo]) -> bool {
        filters.iter().all(|filter| self.are(&filter.name))
    }

    /// Returns our filter among those at ingress, or the place for it; `None` if foreign filters occupy every
    /// priority tried.
    fn place(&self, filters: &[FilterInfo]) -> Option<(Filter, Occupant)> {
        let mut free = None;
        for step in 0..Self::TRIES {
            let priority = 0xb000 | (self.first.wrapping_add(step) & 0xfff);
            match filters.iter().find(|filter| filter.priority == priority) {
                Some(filter) => {
                    // Ours may be behind a free priority: the filter that occupied that one when ours
                    // was set has gone.
                    if let Some(qdisc) = self.qdisc_of(&filter.name) {
                        return Some((Filter { priority, qdisc }, Occupant::Replaced));
                    }
                }
                None => {
                    let filter = Filter {
                        priority,
                        // The qdisc was there before us.
                        qdisc: QdiscOwner::Others,
                    };
                    free = free.or(Some((filter, Occupant::Absent)));
                }
            }
        }
        free
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use aya_obj::generated::bpf_insn;
    use nix::sched::{CloneFlags, unshare};

    use super::*;
    use crate::{
        attach::kernel_tests::stand_in,
        bpf::ProgramType,
        mailbox,
        programs::{LoadProblem, Report},
    };

    /// `lo` in a new network namespace, and a program that is being loaded for it.
    struct Lo {
        link: Link,
        programs: Programs,
        reports: mailbox::Sender<(Program, Report)>,
        predecessor: Vec<PinnedLink>,
        prepared: BTreeMap<u32, OwnedFd>,
        lacks_tcx: bool,
        netlink: Socket,
    }

    impl Lo {
        fn new() -> Self {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            let (reports, told) = mailbox::channel(4).unwrap();
            Self {
                link: Link::named(1, "lo"),
                programs: Programs::told(told),
                reports,
                predecessor: Vec::new(),
                prepared: BTreeMap::new(),
                lacks_tcx: false,
                netlink: Socket::requests().unwrap(),
            }
        }

        fn report(&mut self, report: Report) {
            self.reports.send((Program::Tc, report)).unwrap();
            self.programs.collect();
        }

        fn attach(&mut self) -> Result<Attachment, NotServed> {
            let filters = Filters::of(([127, 0, 0, 1], 53).into());
            let mut context = AttachContext {
                programs: &mut self.programs,
                filters: &filters,
                pins: None,
                predecessor: &mut self.predecessor,
                prepared: &mut self.prepared,
                lacks_tcx: &mut self.lacks_tcx,
                netlink: &mut self.netlink,
                settled: true,
            };
            Attachment::make(Hook::Tcx, &self.link, String::new(), &mut context)
        }
    }

    /// Lets the kernel verify a program that passes every packet: r0 = -1, exit.
    fn passing_program() -> OwnedFd {
        let instruction = |code, imm| bpf_insn {
            code,
            _bitfield_align_1: [],
            _bitfield_1: bpf_insn::new_bitfield_1(0, 0),
            off: 0,
            imm,
        };
        let code = [instruction(0xb7, -1), instruction(0x95, 0)];
        let mut log = vec![0; 4096];
        bpf::load_program("dns_tc", ProgramType::Tc, &code, c"GPL", &mut log).unwrap()
    }

    #[test]
    fn refusal_by_one_interface_says_nothing_of_the_kernel() {
        if !test_support::requirements::root() {
            return;
        }
        let in_own_namespace = || {
            let mut gone = Lo::new();
            gone.link = Link::named(99, "gone");
            gone.report(Report::Attachable(passing_program()));
            gone.report(Report::Answers);
            let Err(NotServed::Refused(why)) = gone.attach() else {
                panic!("attached to an interface that does not exist");
            };
            // Linux before 6.6 refuses before it looks for the interface.
            assert_eq!(gone.lacks_tcx, why == "tcx: needs kernel 6.6", "{why}");
        };
        thread::spawn(in_own_namespace).join().unwrap();
    }

    #[test]
    fn link_is_prepared_until_program_answers() {
        if !test_support::requirements::root() {
            return;
        }
        let in_own_namespace = || {
            let mut lo = Lo::new();
            assert!(matches!(lo.attach(), Err(NotServed::Loading)));
            assert!(lo.prepared.is_empty(), "nothing is loaded");
            let probe = passing_program();
            if bpf::link_create(probe.as_fd(), 1, LinkKind::Tcx).is_err() {
                // Linux before 6.6: a filter holds the lock for 0.1 ms.
                return;
            }

            lo.report(Report::Attachable(passing_program()));
            assert!(matches!(lo.attach(), Err(NotServed::Loading)));
            let id = |fd: &OwnedFd| bpf::link_info(fd.as_fd()).unwrap();
            let attached = id(&lo.prepared[&1]);
            assert_eq!(attached.ifindex, 1);
            // Again, as each round does.
            assert!(matches!(lo.attach(), Err(NotServed::Loading)));
            assert_eq!(id(&lo.prepared[&1]), attached);

            lo.report(Report::Answers);
            let attachment = lo.attach().unwrap();
            assert!(lo.prepared.is_empty());
            let HookHandle::Link(fd) = &attachment.handle else {
                panic!("tcx is a link");
            };
            assert_eq!(id(fd), attached);

            let mut lo = Lo::new();
            lo.report(Report::Attachable(passing_program()));
            assert!(matches!(lo.attach(), Err(NotServed::Loading)));
            assert!(lo.prepared.contains_key(&1));
            lo.report(Report::Problem(LoadProblem::refusal()));
            assert!(matches!(lo.attach(), Err(NotServed::Refused(_))));
            assert!(lo.prepared.is_empty(), "detached by closing the link");

            let mut lo = Lo::new();
            lo.predecessor.push(PinnedLink {
                fd: probe,
                ifindex: 1,
                kind: LinkKind::Tcx,
                path: PathBuf::new(),
            });
            lo.report(Report::Attachable(passing_program()));
            assert!(matches!(lo.attach(), Err(NotServed::Loading)));
            assert!(lo.prepared.is_empty(), "the predecessor answers");
        };
        thread::spawn(in_own_namespace).join().unwrap();
    }

    #[test]
    fn qdisc_goes_if_filter_is_refused() {
        if !test_support::requirements::root() {
            return;
        }
        let in_own_namespace = || {
            let mut lo = Lo::new();
            let filters = Filters::of(([127, 0, 0, 1], 53).into());
            let no_program = std::fs::File::open("/dev/null").unwrap();
            filters
                .set(1, no_program.as_fd(), true, &mut lo.netlink)
                .unwrap_err();
            assert_eq!(lo.netlink.ingress_qdisc(1).unwrap(), None);

            let program = passing_program();
            let filter = filters
                .set(1, program.as_fd(), true, &mut lo.netlink)
                .unwrap();
            assert_eq!(filter.qdisc, QdiscOwner::Us);
            // A refused replacement changes nothing.
            filters
                .set(1, no_program.as_fd(), true, &mut lo.netlink)
                .unwrap_err();
            assert!(filters.is_on(1, &mut lo.netlink).unwrap());

            // The qdisc was there before.
            let later = Filters::of(([127, 0, 0, 1], 54).into());
            let refused = later.set_with_qdisc(1, program.as_fd(), &mut lo.netlink);
            assert!(matches!(refused, Err(NotServed::Unsettled)));
            assert!(!later.is_on(1, &mut lo.netlink).unwrap());
            let other = later
                .set(1, program.as_fd(), true, &mut lo.netlink)
                .unwrap();
            assert_eq!(other.qdisc, QdiscOwner::Others);
            filter.remove(1, &mut lo.netlink).unwrap();
            assert!(later.is_on(1, &mut lo.netlink).unwrap(), "in use");
            other.remove(1, &mut lo.netlink).unwrap();

            lo.netlink.remove_clsact(1).unwrap();
            let filter = filters
                .set(1, program.as_fd(), true, &mut lo.netlink)
                .unwrap();
            filter.remove(1, &mut lo.netlink).unwrap();
            assert_eq!(lo.netlink.ingress_qdisc(1).unwrap(), None);
        };
        thread::spawn(in_own_namespace).join().unwrap();
    }

    #[test]
    fn no_kill_separates_qdisc_from_filter() {
        let (mut netlink, kernel) = stand_in(|kind, _| match kind {
            libc::RTM_GETQDISC => Err(libc::ENOENT),
            _ => Ok(None),
        });
        let filters = Filters::of(([127, 0, 0, 1], 53).into());
        let program = std::fs::File::open("/dev/null").unwrap();
        let filter = filters.set(7, program.as_fd(), true, &mut netlink).unwrap();
        filter.remove(7, &mut netlink).unwrap();
        drop(netlink);
        assert_eq!(
            kernel.join().unwrap(),
            [
                vec![libc::RTM_GETQDISC],
                vec![libc::RTM_NEWQDISC, libc::RTM_NEWTFILTER],
                vec![libc::RTM_GETTFILTER],
                vec![libc::RTM_GETTFILTER],
                vec![libc::RTM_DELQDISC],
            ]
        );
    }

    #[test]
    fn vanished_interface_keeps_no_other_filter() {
        let filters = Filters::of(([127, 0, 0, 1], 53).into());
        let program = std::fs::File::open("/dev/null").unwrap();
        let new = NewFilter {
            priority: filters.first,
            program: program.as_fd(),
            name: &filters.name(QdiscOwner::Others),
        };
        let listed = new.listed(0);
        let (mut netlink, kernel) = stand_in(move |kind, ifindex| match (kind, ifindex) {
            (libc::RTM_GETTFILTER, _) => Ok(Some(listed.clone())),
            (_, 7) => Err(libc::ENODEV),
            (_, 8) => Err(libc::EPERM),
            _ => Ok(None),
        });
        let links = [(7, "gone"), (8, "kept"), (9, "eth0")]
            .map(|(ifindex, name)| Link::named(ifindex, name));
        let error = crate::detach_filters(&filters, &links, &mut netlink).unwrap_err();
        assert!(error.to_string().contains("kept"), "{error}");
        let detached = crate::detach_filters(&filters, &links[..1], &mut netlink);
        assert_eq!(detached.unwrap(), 0);
        drop(netlink);
        let calls = kernel.join().unwrap().concat();
        let removals = calls
            .iter()
            .filter(|&&kind| kind == libc::RTM_DELTFILTER)
            .count();
        assert_eq!(removals, 4);
    }

    #[test]
    fn unanswered_question_ends_no_attachment() {
        let (mut netlink, kernel) = stand_in(|_, _| Err(libc::ENOMEM));
        let filters = Filters::of(([127, 0, 0, 1], 53).into());
        let (_reports, told) = mailbox::channel(1).unwrap();
        let attachment = Attachment {
            ifindex: 7,
            hook: Hook::Clsact,
            handle: HookHandle::Filter(Filter {
                priority: filters.first,
                qdisc: QdiscOwner::Us,
            }),
            pin: None,
            why: String::new(),
        };
        let state = attachment.state(&Programs::told(told), &filters, &mut netlink);
        assert_eq!(state.unwrap_err().kind(), io::ErrorKind::OutOfMemory);
        drop(netlink);
        kernel.join().unwrap();
    }

    #[test]
    fn foreign_priority_is_kept() {
        let (ours, theirs) = ["169.254.0.2:53", "169.254.0.2:54"]
            .map(|text| Filters::of(text.parse().unwrap()))
            .into();
        assert!((0xb000..0xc000).contains(&ours.first) && ours.first != theirs.first);
        let filter = |priority: u16, name: String| FilterInfo {
            priority,
            program: 1,
            name,
        };
        let mut there = Vec::new();
        let others = QdiscOwner::Others;
        let free = |priority| {
            Some((
                Filter {
                    priority,
                    qdisc: others,
                },
                Occupant::Absent,
            ))
        };
        assert_eq!(ours.place(&there), free(ours.first));
        // As if the hashes of both addresses were equal.
        there.push(filter(ours.first, theirs.name(others)));
        let next = 0xb000 | (ours.first + 1) & 0xfff;
        assert_eq!(ours.place(&there), free(next));
        there.push(filter(next, ours.name(QdiscOwner::Us)));
        let found = Some((
            Filter {
                priority: next,
                qdisc: QdiscOwner::Us,
            },
            Occupant::Replaced,
        ));
        assert_eq!(ours.place(&there), found, "of an earlier process");
        // Our filter is found even if the first priority has become free.
        there.remove(0);
        assert_eq!(ours.place(&there), found);
        let all: Vec<FilterInfo> = (0..0x1000)
            .map(|step| filter(0xb000 | step, "somebody's".to_owned()))
            .collect();
        assert_eq!(ours.place(&all), None);
        assert!(!ours.are_all(&all) && ours.are_all(&there));
    }
}
