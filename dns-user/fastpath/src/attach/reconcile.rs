//! The thread that follows the interfaces, the local addresses and the queries that arrive.

mod addresses;
mod report;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashSet},
    net::{IpAddr, SocketAddr},
    os::fd::AsFd,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use dns_common::scope::LOOPBACK_IFINDEX;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::sync::watch;

use super::{
    attachment::{self, AttachContext, AttachState},
    choice::{self, Attachment, NotServed},
    gate::{Arrival, Gate},
    netlink::{Link, LocalAddress, Socket},
    objections::Objections,
    pace::{Pace, RtnlPace},
    pins::{KeptMaps, PinnedLink, Pins},
    queues,
    selection::Selection,
    settling::Settling,
    status::InterfacesStatus,
    structure,
};
use crate::{
    mailbox::{self, Ended, Ringer},
    map::{
        counters::CounterPages,
        scope::{ScopePage, Served},
    },
    observe::messages::Messages,
    programs::Programs,
};
use dns_core::config::{HookMode, OnStop};
use dns_kit::threads::{self, OnPanic};

/// Interval of full checks, even without events.
const ROUND: Duration = Duration::from_secs(10);

/// Interval at which probes are checked while the server reports arrivals.
const TICK: Duration = Duration::from_millis(250);

/// Interval at which to check whether the map is filled.
const FILL_ROUND: Duration = Duration::from_millis(10);

/// Shortest sleep while work is postponed.
const SHORTEST: Duration = Duration::from_millis(1);

/// How long after a report the server is considered to be reporting: about two intervals.
const REPORT_HOLDS: Duration = Duration::from_millis(600);

/// How long an interface without replies stays attached.
const IDLE: Duration = Duration::from_secs(300);

/// Settings and resources of the follower.
pub(crate) struct Setting {
    pub(crate) selection: Selection,
    pub(crate) mode: HookMode,
    pub(crate) programs: Programs,
    /// The folder of pins; `None` without pinning.
    pub(crate) pins: Option<Pins>,
    /// Listen addresses of the server; wildcards expand to the local addresses.
    pub(crate) listen: Vec<SocketAddr>,
    /// The page from which the programs read the endpoints and interfaces to serve.
    pub(crate) scope: Arc<ScopePage>,
    /// Counters of the programs.
    pub(crate) counters: Arc<CounterPages>,
    /// Maximum number of served interfaces: each takes a descriptor.
    pub(crate) most_interfaces: usize,
    /// A predecessor's links, to be taken over.
    pub(crate) predecessor: Vec<PinnedLink>,
    /// Becomes 1 when the map is filled; programs are attached only then.
    pub(crate) installs: watch::Receiver<u64>,
    /// Maps that the programs still need after this process has ended.
    pub(crate) kept_maps: Arc<KeptMaps>,
    /// Log messages of the programs, read here because this thread wakes up regularly.
    pub(crate) messages: Option<Messages>,
    /// Rung when the status has changed.
    pub(crate) changed: Ringer,
}

/// Commands to the thread. When all senders are gone, it detaches and ends.
enum Command {
    /// Serve exactly these addresses.
    Listen(Vec<SocketAddr>),
    /// Queries that reached the server's sockets.
    Arrived(Vec<Arrival>),
    Stop(OnStop),
}

/// Handle of the thread that follows the interfaces.
pub(crate) struct Interfaces {
    commands: mailbox::Sender<Command>,
    /// The last status published by the thread.
    status: watch::Receiver<InterfacesStatus>,
    /// Becomes true after the first round.
    ready: watch::Receiver<bool>,
    thread: JoinHandle<()>,
}

impl Interfaces {
    /// Starts the thread. Opens the sockets here, in the caller's network namespace.
    pub(crate) fn start(setting: Setting) -> std::io::Result<Self> {
        let (commands, commanded) = mailbox::channel()?;
        let (status, seen) = watch::channel(InterfacesStatus::default());
        let (is_ready, ready) = watch::channel(false);
        let news = Socket::news()?;
        let netlink = Socket::requests()?;
        let mut follower = Follower {
            unseen: seen.clone(),
            setting,
            netlink,
            gate: Gate::default(),
            links: Vec::new(),
            bounded: BTreeSet::new(),
            endpoints: Vec::new(),
            local: Vec::new(),
            attached: BTreeMap::new(),
            refused: BTreeMap::new(),
            loading: BTreeSet::new(),
            settling: Settling::default(),
            objections: Objections::default(),
            refusals: BTreeMap::new(),
            rtnl: RtnlPace::default(),
            postponed: false,
            reported: None,
            lost_to_queues: queues::lost(),
            status,
            complete: false,
            taken_over: false,
        };
        // The addresses must be known before any query is answered.
        follower.follow_addresses();
        let thread = threads::spawn("interfaces", OnPanic::EndProcess, move || {
            follower.run(&news, &commanded, &is_ready);
        })?;
        Ok(Self { commands, status: seen, ready, thread })
    }

    /// Replaces the served addresses.
    pub(crate) fn set_listen(&self, listen: &[SocketAddr]) {
        // An error: the thread has panicked, which was logged.
        let _ = self.commands.send(Command::Listen(listen.to_vec()));
    }

    /// Reports the queries that reached the server's sockets. Must be called about four times a
    /// second, even if there were none.
    pub(crate) fn report(&self, arrivals: Vec<Arrival>) {
        // See `set_listen`.
        let _ = self.commands.send(Command::Arrived(arrivals));
    }

    /// Returns the last published status.
    pub(crate) fn status(&self) -> InterfacesStatus {
        self.status.borrow().clone()
    }

    /// Becomes true when all interfaces present at the start have been processed.
    pub(crate) fn ready(&self) -> watch::Receiver<bool> {
        self.ready.clone()
    }

    /// Ends the thread, and detaches the programs if `on_stop` says so.
    pub(crate) fn stop(self, on_stop: OnStop) {
        let Self { commands, status: _, ready: _, thread } = self;
        // An error: the thread has panicked.
        let _ = commands.send(Command::Stop(on_stop));
        if thread.join().is_err() {
            tracing::error!("the attacher thread panicked: its programs may still be attached");
        }
    }
}

/// The state of the thread.
struct Follower {
    setting: Setting,
    netlink: Socket,
    /// Decides which interface may answer for which endpoint.
    gate: Gate,
    /// The interfaces as last listed.
    links: Vec<Link>,
    /// Interfaces of routes that set an MTU.
    bounded: BTreeSet<u32>,
    /// The served endpoints with their slots.
    endpoints: Vec<(SocketAddr, usize)>,
    local: Vec<LocalAddress>,
    /// Attached programs by interface index.
    attached: BTreeMap<u32, OnInterface>,
    /// Interfaces to which attaching failed.
    refused: BTreeMap<u32, Refused>,
    /// Interfaces whose programs are being loaded.
    loading: BTreeSet<u32>,
    /// Interfaces that may still change.
    settling: Settling,
    /// Objections of packet filter rules and IPsec policies to interfaces.
    objections: Objections,
    /// Reasons why interfaces with an open door must not answer.
    refusals: BTreeMap<u32, String>,
    /// Decides when the next program may be attached or detached.
    rtnl: RtnlPace,
    /// Whether an operation was postponed until then.
    postponed: bool,
    /// Time of the server's last report.
    reported: Option<Instant>,
    /// Datagrams dropped by full receive queues, at the last check.
    lost_to_queues: u64,
    status: watch::Sender<InterfacesStatus>,
    /// Detects changes of `status` that have not been announced yet.
    unseen: watch::Receiver<InterfacesStatus>,
    /// Whether the takeover is complete: every link of the predecessor is ours or gone.
    complete: bool,
    /// Whether a successor has taken over.
    taken_over: bool,
}

/// A program on an interface.
struct OnInterface {
    attachment: Attachment,
    /// Number of replies so far, and the time of the last increase.
    replies: (u64, Instant),
}

/// An interface to which attaching failed.
struct Refused {
    /// The interface's state at that time.
    link: Link,
    why: String,
    /// Whether to try again even if the interface has not changed.
    again: bool,
}

impl Follower {
    /// Works until a stop command, or until all senders are gone.
    fn run(mut self, news: &Socket, commands: &mailbox::Receiver<Command>, ready: &watch::Sender<bool>) {
        let begun = Instant::now();
        let mut last_round = begun;
        let mut pace = Pace::new();
        let mut first = true;
        self.list_interfaces();
        self.order_programs();
        loop {
            let filled = !first || *self.setting.installs.borrow() > 0;
            if filled {
                if last_round.elapsed() >= ROUND {
                    self.check_attachments();
                    self.follow_addresses();
                    self.list_interfaces();
                    last_round = Instant::now();
                }
                self.reconcile(Instant::now());
                if first && self.loading.is_empty() {
                    first = false;
                    ready.send_replace(true);
                    self.setting.changed.ring();
                    tracing::debug!(
                        milliseconds = begun.elapsed().as_millis(),
                        "first pass over all interfaces finished"
                    );
                }
            }
            if self.unseen.has_changed().unwrap_or(false) {
                self.unseen.mark_unchanged();
                self.setting.changed.ring();
            }
            let messages = self.setting.messages.as_ref().map(AsFd::as_fd);
            let fds = [Some(news.as_fd()), Some(commands.as_fd()), messages, self.setting.programs.news()];
            let mut fds: Vec<_> =
                fds.into_iter().flatten().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
            let timeout = PollTimeout::try_from(self.wait(filled)).unwrap_or(PollTimeout::MAX);
            // An interrupted wait is only a shorter one.
            let _ = poll(&mut fds, timeout);
            let is_told = fds[1].any().unwrap_or(false);
            if let Some(messages) = &mut self.setting.messages {
                messages.hand_on();
            }
            self.setting.programs.collect();
            if is_told && let Some(on_stop) = self.obey(commands) {
                return self.finish(on_stop);
            }
            if news.heard() {
                // Commands end the pause early; the other events remain pending.
                let mut wake = [PollFd::new(commands.as_fd(), PollFlags::POLLIN)];
                let wait = PollTimeout::try_from(pace.wait(Instant::now())).unwrap_or(PollTimeout::MAX);
                let _ = poll(&mut wake, wait);
                news.heard();
                self.follow_addresses();
                self.list_interfaces();
            }
        }
    }

    /// Executes the pending commands; returns the stop command, if there is one.
    fn obey(&mut self, commands: &mailbox::Receiver<Command>) -> Option<OnStop> {
        loop {
            match commands.take() {
                Ok(Some(Command::Listen(listen))) => {
                    self.setting.listen = listen;
                    self.follow_addresses();
                }
                Ok(Some(Command::Arrived(arrivals))) => self.take_report(&arrivals, Instant::now()),
                Ok(Some(Command::Stop(on_stop))) => return Some(on_stop),
                Ok(None) => return None,
                Err(Ended) => return Some(OnStop::Detach),
            }
        }
    }

    /// Returns how long to sleep without events.
    fn wait(&self, filled: bool) -> Duration {
        if !filled {
            return FILL_ROUND;
        }
        let is_reported = self.reported.is_some_and(|at| at.elapsed() < REPORT_HOLDS);
        let wait = if is_reported { TICK } else { ROUND };
        if self.postponed { self.rtnl.wait().clamp(SHORTEST, wait) } else { wait }
    }

    /// Requests the programs that will be needed, while the map is being filled.
    fn order_programs(&mut self) {
        for link in self.links.iter().filter(|link| self.setting.selection.takes(link)) {
            if let Ok(plan) = choice::plan(self.setting.mode, link) {
                plan.order(&mut self.setting.programs);
            }
        }
    }

    /// Lists the interfaces. Drops the state and the pins of interfaces that are gone.
    fn list_interfaces(&mut self) {
        self.status.send_modify(|status| status.polls += 1);
        let links = match self.netlink.links() {
            Ok(links) => links,
            Err(error) => {
                tracing::warn!(%error, "cannot list the interfaces (netlink): programs stay attached where they are; trying again");
                return;
            }
        };
        let is_there = |ifindex: u32| links.iter().any(|link| link.ifindex == ifindex);
        let gone: Vec<u32> =
            self.links.iter().map(|link| link.ifindex).filter(|&ifindex| !is_there(ifindex)).collect();
        for &ifindex in &gone {
            self.attached.remove(&ifindex);
            self.setting.scope.remove_interface(ifindex);
            if let Some(pins) = &self.setting.pins {
                pins.unpin_links(ifindex);
            }
        }
        match self.netlink.routes_with_mtu() {
            Ok(bounded) => self.bounded = bounded.into_iter().collect(),
            Err(error) => {
                tracing::warn!(%error, "cannot list the routes (netlink): the known MTUs stay in use; trying again");
            }
        }
        self.refused.retain(|&ifindex, _| is_there(ifindex));
        self.gate.retain(|ifindex, _| is_there(ifindex));
        self.settling.listed(&self.links, &links, Instant::now());
        self.links = links;
    }

    /// Processes a report from the server. Queries of a local process bound to another interface
    /// (SO_BINDTODEVICE) arrived over `lo` and prove nothing about that interface.
    fn take_report(&mut self, arrivals: &[Arrival], now: Instant) {
        self.reported = Some(now);
        self.gate.reported();
        let local: HashSet<IpAddr> = self.local.iter().map(|local| local.address).collect();
        for arrival in arrivals {
            let is_local = |client: &IpAddr| local.contains(client);
            if arrival.ifindex != LOOPBACK_IFINDEX && arrival.clients.iter().any(is_local) {
                continue;
            }
            if let Some(&(_, slot)) = self.endpoints.iter().find(|(known, _)| *known == arrival.endpoint) {
                self.gate.arrived(slot, arrival, now);
            }
        }
    }

    /// Checks the probes, and closes doors with lost probes.
    fn check_probes(&mut self, now: Instant) {
        for &ifindex in self.attached.keys() {
            for &(_, slot) in &self.endpoints {
                if let Some(probed) = self.setting.scope.probed(ifindex, slot) {
                    self.gate.probed(ifindex, slot, probed, now);
                }
            }
        }
        let is_reported = self.reported.is_some_and(|at| now.saturating_duration_since(at) < TICK * 2);
        let lost_to_queues = &mut self.lost_to_queues;
        let closed = self.gate.judge(now, || {
            let lost = queues::lost();
            let before = std::mem::replace(lost_to_queues, lost);
            !is_reported || lost != before
        });
        for (ifindex, slot, client) in closed {
            let endpoint =
                self.endpoints.iter().find(|(_, known)| *known == slot).map(|(endpoint, _)| *endpoint);
            let interface = self.links.iter().find(|link| link.ifindex == ifindex).map(|link| &link.name);
            tracing::warn!(interface, ?endpoint, %client, "queries no longer reach userspace from this interface: fast path detached; check packet filter rules and routes");
        }
    }

    /// Attaches and detaches programs as decided by the gate.
    fn reconcile(&mut self, now: Instant) {
        if self.taken_over {
            return;
        }
        self.check_probes(now);
        self.loading.clear();
        self.postponed = false;
        let wanted = self.wanted(now);
        if !self.complete {
            self.setting.kept_maps.prepare();
        }
        // Queries on an interface that is no longer served pass to userspace at once; its program
        // is detached later.
        let unwanted: Vec<u32> =
            self.attached.keys().copied().filter(|ifindex| !wanted.contains_key(ifindex)).collect();
        for ifindex in unwanted {
            self.setting.scope.remove_interface(ifindex);
            if !self.rtnl.may_go(now) {
                self.postponed = true;
            } else if let Some(on) = self.attached.remove(&ifindex) {
                let Self { setting, netlink, rtnl, links, refusals, .. } = self;
                // Lost probes were logged; an idle interface is no event.
                if let Some(why) = refusals.get(&ifindex) {
                    let interface = links.iter().find(|link| link.ifindex == ifindex).map(|link| &link.name);
                    tracing::info!(interface, why, "fast path detached; queries are answered in userspace");
                }
                rtnl.take(|| on.attachment.detach(&setting.programs, netlink));
            }
        }
        let mut links: Vec<Link> =
            self.links.iter().filter(|link| wanted.contains_key(&link.ifindex)).cloned().collect();
        // The busiest ones are attached first.
        links.sort_by_key(|link| Reverse(self.gate.queries(link.ifindex)));
        let served: Vec<Served> = links.iter().map(|link| self.served(link)).collect();
        // Must precede attaching: programs pass queries of unknown interfaces to the network stack.
        let without_slot = self.setting.scope.add_interfaces(&served);
        let before = self.attached.len();
        for link in &links {
            let ifindex = link.ifindex;
            if without_slot.contains(&ifindex) {
                self.refuse(link, "its index collides with too many other served interfaces".to_owned());
                continue;
            }
            // Before attaching, so that a program that replaces a predecessor's answers
            // immediately.
            self.setting.scope.admit(ifindex, wanted[&ifindex]);
            if !self.attached.contains_key(&ifindex) {
                if self.is_urgent(link) || self.rtnl.may_go(now) {
                    self.attach(link, now);
                } else {
                    self.postponed = true;
                }
            }
        }
        if !self.loading.is_empty() {
            // The predecessor's programs keep answering until then.
        } else if !self.complete {
            self.complete_takeover();
        } else if before < self.attached.len() {
            self.setting.kept_maps.pin_if_gone();
        }
        // The status reports whether programs keep answering if the process is killed.
        self.publish_status(now);
    }

    /// Returns the interfaces to serve, with the endpoints for which the gate is open.
    fn wanted(&mut self, now: Instant) -> BTreeMap<u32, u64> {
        let Self { setting, links, endpoints, gate, attached, objections, refusals, .. } = self;
        for link in links.iter() {
            let named = setting.selection.names(link);
            if named || setting.predecessor.iter().any(|left| left.ifindex == link.ifindex) {
                endpoints.iter().for_each(|&(_, slot)| gate.open(link.ifindex, slot));
            }
        }
        for (&ifindex, on) in attached.iter_mut() {
            let replies = setting.scope.interface(ifindex).map_or(0, |slot| setting.counters.interface(slot));
            if replies != on.replies.0 {
                on.replies = (replies, now);
            }
            if now.saturating_duration_since(on.replies.1) >= IDLE {
                gate.close(ifindex);
            }
        }
        refusals.clear();
        let mut wanted = BTreeMap::new();
        if gate.interfaces().next().is_some() {
            objections.refresh(now);
        }
        for link in links.iter().filter(|link| setting.selection.takes(link)) {
            let mut mask = 0;
            for &(endpoint, slot) in endpoints.iter() {
                if !gate.is_open(link.ifindex, slot) {
                    continue;
                }
                let objection = match structure::refusal(link, links) {
                    Some(refusal) => Some((refusal.to_owned(), None)),
                    None => objections.find(link, endpoint, gate.known(link.ifindex, slot)),
                };
                gate.hold(link.ifindex, slot, objection.as_ref().and_then(|&(_, client)| client));
                match objection {
                    Some((why, _)) => drop(refusals.insert(link.ifindex, why)),
                    None => mask |= 1 << slot,
                }
            }
            if mask != 0 {
                wanted.insert(link.ifindex, mask);
            }
        }
        wanted
    }

    /// Returns whether to attach to an interface immediately: it is named in the configuration, or
    /// a predecessor's program must be replaced.
    fn is_urgent(&self, link: &Link) -> bool {
        self.setting.selection.names(link)
            || self.setting.predecessor.iter().any(|left| left.ifindex == link.ifindex)
    }

    /// Describes an interface for the programs.
    fn served(&self, link: &Link) -> Served {
        let master = link.master.and_then(|master| self.links.iter().find(|other| other.ifindex == master));
        Served {
            ifindex: link.ifindex,
            address: link.address,
            master: master.unwrap_or(link).address,
            near: structure::is_near(link, &self.links),
            bounded: self.bounded.contains(&link.ifindex),
        }
    }

    /// Attaches to one interface, unless attaching failed before and the interface has not changed.
    fn attach(&mut self, link: &Link, now: Instant) {
        let before = self.refused.get(&link.ifindex);
        if before.is_some_and(|before| before.link == *link && !before.again) {
            return;
        }
        let settled = self.setting.selection.names(link) || self.settling.is_settled(link, now);
        if self.settling.is_waiting(link.ifindex) && !settled {
            return;
        }
        if self.attached.len() >= self.setting.most_interfaces {
            return self.refuse(link, format!(
                "{} interfaces are served already, and the remaining descriptors are reserved for sockets; \
                 raise LimitNOFILE",
                self.attached.len()
            ));
        }
        let slot = self.setting.scope.interface(link.ifindex);
        slot.iter().for_each(|&slot| self.setting.counters.clear_interface(slot));
        let Self { setting, netlink, rtnl, settling, .. } = self;
        let begun = Instant::now();
        let made = choice::plan(setting.mode, link).and_then(|plan| {
            rtnl.take(|| Attachment::make(plan, link, &mut context(setting, netlink, settled)))
        });
        settling.set_waiting(link.ifindex, matches!(made, Err(NotServed::Unsettled)));
        match made {
            Ok(attachment) => {
                tracing::info!(interface = %link.name, hook = %attachment.hook(), why = attachment.why(), took_us = begun.elapsed().as_micros(), "program attached: the interface answers queries");
                self.refused.remove(&link.ifindex);
                self.attached.insert(link.ifindex, OnInterface { attachment, replies: (0, now) });
            }
            Err(NotServed::Loading) => {
                self.loading.insert(link.ifindex);
            }
            Err(NotServed::Unsettled) => {}
            Err(refusal) => self.refuse(link, refusal.to_string()),
        }
    }

    /// Records why an interface is not served; logs each reason once.
    fn refuse(&mut self, link: &Link, why: String) {
        if self.refused.get(&link.ifindex).is_none_or(|before| before.why != why) {
            tracing::warn!(interface = %link.name, why, "interface not served: its queries are answered from userspace");
        }
        self.refused.insert(link.ifindex, Refused { link: link.clone(), why, again: false });
    }

    /// Checks the attachments: attaches again if another process detached a program, and keeps away
    /// from links that a successor has taken over.
    fn check_attachments(&mut self) {
        self.setting.programs.try_again();
        self.refused.values_mut().for_each(|refused| refused.again = true);
        let Self { setting, netlink, attached, taken_over, .. } = self;
        attached.retain(|_, on| match on.attachment.state(&setting.programs, netlink) {
            AttachState::Ours => true,
            // The pin stays: another server may have pinned its own link there; otherwise ours will
            // replace it.
            AttachState::Gone => false,
            AttachState::TakenOver => {
                *taken_over = true;
                true
            }
        });
    }

    /// Detaches the predecessor's programs from interfaces that are not served. Called after the
    /// first round.
    fn complete_takeover(&mut self) {
        for left in std::mem::take(&mut self.setting.predecessor) {
            attachment::drop_predecessor(left);
        }
        self.setting.kept_maps.take_over();
        self.complete = true;
    }

    /// Detaches the programs, or leaves them to a successor.
    fn finish(mut self, on_stop: OnStop) {
        // Links of the predecessor that were not taken over are kept or removed like ours.
        let left = std::mem::take(&mut self.setting.predecessor);
        match on_stop {
            OnStop::Keep => {
                let lost = self.attached.values().filter(|on| !on.attachment.is_kept()).count();
                if lost > 0 {
                    tracing::warn!(
                        lost,
                        "links are not pinned: programs are detached when this process ends, regardless of xdp.on_stop"
                    );
                }
            }
            OnStop::Detach => {
                for link in left {
                    attachment::drop_predecessor(link);
                }
                for (_, on) in std::mem::take(&mut self.attached) {
                    on.attachment.detach(&self.setting.programs, &mut self.netlink);
                }
            }
        }
    }
}

/// Returns the resources to attach with.
fn context<'a>(setting: &'a mut Setting, netlink: &'a mut Socket, settled: bool) -> AttachContext<'a> {
    let Setting { programs, pins, predecessor, .. } = setting;
    AttachContext { programs, pins: pins.as_ref(), predecessor, netlink, settled }
}
