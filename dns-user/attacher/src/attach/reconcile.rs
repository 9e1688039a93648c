//! The thread that follows the interfaces, the local addresses and the queries that arrive.

mod attaching;
mod lists;
mod report;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashSet},
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use dns_fastpath::{
    map::CounterPages,
    protocol::{Arrival, InterfacesStatus, MAX_CLIENTS, Operation},
};
use parking_lot::Mutex;

use super::{
    attachment::{self, AttachContext, AttachState, Attachment, Filters},
    choice::{self, TcOrder},
    collisions::Collisions,
    firewall::{Change, Firewall, Stance},
    gate::{Gate, Loss, PROVEN_PROBE_INTERVAL, by_interface},
    heard::HeardClients,
    netlink::{Link, LocalAddress, Socket, link_at},
    pins::{KeptMaps, PinnedLink},
    rtnl_throttle::{CniGrace, EventPace, Events, RtnlThrottle},
    selection::Selection,
    topology,
    work::count,
};
use crate::{
    mailbox::{self, Ended, Notifier, wait_readable},
    programs::Programs,
    scope::{ScopePage, Served},
};
use dns_core::config::{HookMode, OnStop};
use dns_kit::{
    clock::kernel_monotonic_ns,
    threads::{self, OnPanic},
};

/// Interval of full checks, even without events.
const ROUND: Duration = Duration::from_secs(10);

/// Pause after a list that the kernel did not complete.
const RETRY: Duration = Duration::from_secs(1);

/// Interval at which this thread shows that it is alive, and so its longest sleep. Several fit into the time after
/// which the server ends the lease.
pub(crate) const WATCH_INTERVAL: Duration = Duration::from_secs(2);

/// Maximum number of waiting commands: the reports of 16 seconds.
const MAX_COMMANDS: usize = 64;

/// Interval at which probes are checked while the server reports arrivals.
const TICK: Duration = Duration::from_millis(250);

/// Shortest sleep while work is postponed.
const MIN_SLEEP: Duration = Duration::from_millis(1);

/// How long after a report the server is considered to be reporting: about two intervals.
const REPORT_HOLDS: Duration = Duration::from_millis(600);

/// How long an interface without replies stays attached; see [`is_retired`].
const IDLE: Duration = Duration::from_secs(300);

/// Longest time spent on new clients per report, and on all heard clients after a change of routes.
const LISTENING: Duration = Duration::from_millis(50);

/// Longest time for which programs are attached and detached without looking at anything else.
const BATCH: Duration = Duration::from_millis(100);

/// Settings and resources of the reconciler.
pub(crate) struct Setting {
    pub(crate) selection: Selection,
    pub(crate) mode: HookMode,
    pub(crate) programs: Programs,
    pub(crate) filters: Filters,
    /// Listen addresses of the server; wildcards expand to the local addresses.
    pub(crate) listen: Vec<SocketAddr>,
    /// The page from which the programs read the endpoints and interfaces to serve.
    pub(crate) scope: Arc<ScopePage>,
    pub(crate) counters: Arc<CounterPages>,
    pub(crate) collisions: Collisions,
    /// The map `HEARD_CLIENTS`.
    pub(crate) heard_clients: OwnedFd,
    /// Maximum number of served interfaces: each takes a descriptor.
    pub(crate) max_interfaces: usize,
    /// A predecessor's links, to be taken over.
    pub(crate) predecessor: Vec<PinnedLink>,
    /// See [`AttachContext::prepared`].
    pub(crate) prepared: BTreeMap<u32, OwnedFd>,
    /// Whether the kernel has refused a tcx link because it is older than 6.6.
    pub(crate) lacks_tcx: bool,
    /// Maps that the programs still need after this process has ended, and the folder of pins.
    pub(crate) kept_maps: Arc<KeptMaps>,
    pub(crate) changed: Notifier,
}

impl Setting {
    /// Returns whether an interface may be served at the current listen addresses.
    fn is_candidate(&self, link: &Link) -> bool {
        self.selection.admits(link, &self.listen)
    }
}

/// Commands to the thread. When all senders are gone, it detaches and ends.
enum Command {
    /// Serve exactly these addresses.
    Listen(Vec<SocketAddr>),
    /// Queries that reached the server's sockets.
    Arrived(Vec<Arrival>),
    /// The maps hold enough to answer from.
    Filled,
    Stop(OnStop),
}

/// Handle of the thread that follows the interfaces.
pub(crate) struct Interfaces {
    commands: mailbox::Sender<Command>,
    pub(crate) status: Arc<Mutex<InterfacesStatus>>,
    /// Becomes true after the first round.
    pub(crate) is_ready: Arc<AtomicBool>,
    /// End of the last iteration of the thread's loop, in ns of the kernel's CLOCK_MONOTONIC.
    pub(crate) watched_ns: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Interfaces {
    /// Starts the thread. Opens the sockets here, in the caller's network namespace.
    pub(crate) fn start(setting: Setting) -> io::Result<Self> {
        let (commands, commanded) = mailbox::channel(MAX_COMMANDS)?;
        // Before the first lists, so that no change falls between a list and the subscription.
        let events = Events::subscribe()?;
        let reconciler = InterfaceReconciler::new(setting, events, Socket::requests()?)?;
        let status = reconciler.status.clone();
        let is_ready = reconciler.is_ready.clone();
        let watched_ns = reconciler.watched_ns.clone();
        // Without this thread new rules and lost probes would go unnoticed, so the process ends
        // with it: the connection breaks, and the server ends the lease in time.
        let thread = threads::spawn("interfaces", OnPanic::EndProcess, move || {
            reconciler.run(&commanded);
        })?;
        Ok(Self {
            commands,
            status,
            is_ready,
            watched_ns,
            thread,
        })
    }

    pub(crate) fn set_listen(&self, listen: &[SocketAddr]) {
        // An error: the thread has panicked, which was logged.
        let _ = self.commands.send(Command::Listen(listen.to_vec()));
    }

    /// Reports the queries that reached the server's sockets. Must be called about four times a
    /// second, even if there were none.
    pub(crate) fn report(&self, arrivals: Vec<Arrival>) {
        // While the thread waits for the kernel, reports are lost: what they say is out of date then.
        self.commands.offer(Command::Arrived(arrivals));
    }

    /// Reports that the maps hold enough to answer from.
    pub(crate) fn maps_are_filled(&self) {
        // See `set_listen`.
        let _ = self.commands.send(Command::Filled);
    }

    /// Ends the thread, and detaches the programs if `on_stop` says so.
    pub(crate) fn stop(self, on_stop: OnStop) {
        // An error: the thread has panicked.
        let _ = self.commands.send(Command::Stop(on_stop));
        if self.thread.join().is_err() {
            tracing::error!("the attacher thread panicked: its programs may still be attached");
        }
    }
}

struct InterfaceReconciler {
    setting: Setting,
    /// Whether the maps are filled; programs are attached only then.
    is_filled: bool,
    /// Whether interfaces and addresses have been listed. Before, none of them is known to be gone.
    is_informed: bool,
    /// Time of the next full check.
    next_round: Instant,
    netlink: Socket,
    events: Events,
    /// Until when events are gathered before they are handled; `None`: there are none.
    gather_until: Option<Instant>,
    /// Decides which interface may answer for which endpoint.
    gate: Gate,
    /// The interfaces, in the order of their indexes.
    links: Vec<Link>,
    /// Interfaces of routes that set an MTU; `None`: unknown.
    bounded: Option<BTreeSet<u32>>,
    /// The served endpoints with their slots.
    endpoints: Vec<(SocketAddr, usize)>,
    local: Vec<LocalAddress>,
    attached: BTreeMap<u32, OnInterface>,
    /// Interfaces to which attaching failed.
    refused: BTreeMap<u32, Refused>,
    /// Interfaces whose programs are being loaded.
    loading: BTreeSet<u32>,
    waiting: BTreeMap<u32, Waiting>,
    /// Interfaces with a clsact filter of a predecessor that was not taken over yet.
    earlier_filters: BTreeSet<u32>,
    /// Interfaces and endpoints whose next probe is due later than usual.
    deferred_probes: BTreeSet<(u32, usize)>,
    /// Interfaces to which a CNI plugin may still add a qdisc.
    cni_grace: CniGrace,
    /// Objections of packet filter rules and IPsec policies to interfaces.
    firewall: Firewall,
    /// Admissions that the programs have, by interface index: at most the interfaces that exist.
    admitted: BTreeMap<u32, Admitted>,
    /// Clients that are answered where the kernel's verdict depends on the client.
    heard: HeardClients,
    /// Reasons why interfaces with an open admission must not answer.
    refusals: BTreeMap<u32, String>,
    /// Decides when the next program may be attached or detached.
    rtnl: RtnlThrottle,
    /// Whether an operation was postponed until then.
    postponed: bool,
    /// Time of the server's last report.
    reported: Option<Instant>,
    /// Datagrams dropped by full receive queues, at the last check.
    lost_to_queues: u64,
    status: Arc<Mutex<InterfacesStatus>>,
    /// See [`Interfaces::is_ready`].
    is_ready: Arc<AtomicBool>,
    /// Whether the takeover is complete: every link of the predecessor is ours or gone.
    complete: bool,
    taken_over: bool,
    /// See [`Interfaces::watched_ns`].
    watched_ns: Arc<AtomicU64>,
}

/// The endpoints at which an interface answers, as bits of their slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Admitted {
    endpoints: u64,
    /// The endpoints among them at which it answers only clients whose own queries arrive.
    heard_only: u64,
}

/// An interface that waits for its program.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    since: Instant,
    /// Whether a foreign qdisc was found at ingress, as the bandwidth plugin adds it. It stays.
    has_foreign_qdisc: bool,
}

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

impl InterfaceReconciler {
    fn new(setting: Setting, events: Events, netlink: Socket) -> io::Result<Self> {
        let heard = HeardClients::new(setting.heard_clients.try_clone()?);
        Ok(Self {
            setting,
            is_filled: false,
            is_informed: false,
            next_round: Instant::now(),
            netlink,
            events,
            gather_until: None,
            gate: Gate::default(),
            links: Vec::new(),
            bounded: None,
            endpoints: Vec::new(),
            local: Vec::new(),
            attached: BTreeMap::new(),
            refused: BTreeMap::new(),
            loading: BTreeSet::new(),
            waiting: BTreeMap::new(),
            earlier_filters: BTreeSet::new(),
            deferred_probes: BTreeSet::new(),
            cni_grace: CniGrace::default(),
            firewall: Firewall::default(),
            admitted: BTreeMap::new(),
            heard,
            refusals: BTreeMap::new(),
            rtnl: RtnlThrottle::default(),
            postponed: false,
            reported: None,
            lost_to_queues: lists::lost_to_queues(),
            status: Arc::default(),
            is_ready: Arc::default(),
            complete: false,
            taken_over: false,
            watched_ns: Arc::new(AtomicU64::new(kernel_monotonic_ns())),
        })
    }

    /// Works until a stop command, or until all senders are gone.
    fn run(mut self, commands: &mailbox::Receiver<Command>) {
        let begun = Instant::now();
        let mut pace = EventPace::new();
        self.begin();
        loop {
            if !self.is_informed && Instant::now() >= self.next_round {
                self.begin();
            }
            if self.may_attach_programs() {
                // None of the events that are followed shows that another process has detached a
                // program or put its own filter in our place.
                if Instant::now() >= self.next_round {
                    self.next_round = Instant::now() + ROUND;
                    self.check_attachments();
                    self.list_all();
                }
                self.reconcile(Instant::now());
                self.complete_start(begun);
            }
            count(Operation::Round, || ());
            // After the work of a round, so that a thread that hangs in it counts as silent.
            self.watched_ns
                .store(kernel_monotonic_ns(), Ordering::Relaxed);
            let has_commands = self.sleep(commands);
            self.setting.collisions.report(&self.setting.counters);
            self.setting.programs.collect();
            if has_commands && let Some(on_stop) = self.handle_commands(commands) {
                return self.finish(on_stop);
            }
            self.gather_events(&mut pace, has_commands);
        }
    }

    /// Lists addresses and interfaces for the first time, unless the kernel fails to complete a list.
    fn begin(&mut self) {
        self.next_round = Instant::now() + ROUND;
        self.is_informed = self.list_all();
        if self.is_informed {
            self.find_earlier_filters();
        }
        self.order_programs();
    }

    /// Returns whether programs may be attached and detached.
    fn may_attach_programs(&self) -> bool {
        // Programs with empty maps answer nothing, and would take the place of a predecessor's that do. Without lists
        // it would seem as if every interface of a predecessor's programs were gone.
        self.is_filled && self.is_informed
    }

    /// Returns whether interfaces wait for a program that is being verified, or for the packet filter's rules: until then a
    /// predecessor's programs answer there.
    fn is_unfinished(&self) -> bool {
        !self.loading.is_empty() || self.firewall.awaits_rules()
    }

    /// Reports the end of the first pass, once.
    fn complete_start(&self, begun: Instant) {
        if self.is_unfinished() || self.is_ready.swap(true, Ordering::Relaxed) {
            return;
        }
        // Not earlier: their verification would take the CPU from the first answers.
        self.setting.programs.complete();
        self.setting.changed.notify();
        tracing::debug!(
            milliseconds = begun.elapsed().as_millis(),
            "first pass over all interfaces finished"
        );
    }

    /// Waits for commands, events, or reports of programs; returns whether commands wait.
    fn sleep(&self, commands: &mailbox::Receiver<Command>) -> bool {
        let commands = commands.as_fd();
        let reports = self.setting.programs.reports();
        if self.gather_until.is_none() {
            wait_readable([commands, reports, self.events.as_fd()], self.wait())[0]
        } else {
            // The changes that are being gathered would end each wait at once.
            wait_readable([commands, reports], self.wait())[0]
        }
    }

    /// Gathers the events that arrive in short succession, and follows them together.
    fn gather_events(&mut self, pace: &mut EventPace, has_commands: bool) {
        let now = Instant::now();
        if self.gather_until.is_none() && self.events.any() {
            self.gather_until = Some(now + pace.wait(now));
        }
        // Commands end the gathering early.
        if self
            .gather_until
            .take_if(|until| has_commands || *until <= now)
            .is_some()
        {
            self.gate.network_changed(now);
            self.follow_events();
        }
    }

    /// Executes the pending commands; returns the stop command, if there is one.
    fn handle_commands(&mut self, commands: &mailbox::Receiver<Command>) -> Option<OnStop> {
        let mut listen = None;
        for command in commands.waiting() {
            match command {
                // Each replaces the one before, and costs a list of all addresses.
                Ok(Command::Listen(addresses)) => listen = Some(addresses),
                Ok(Command::Arrived(arrivals)) => self.take_report(&arrivals, Instant::now()),
                Ok(Command::Filled) => self.is_filled = true,
                Ok(Command::Stop(on_stop)) => return Some(on_stop),
                // The handle was dropped without a stop: nothing is left that could end these
                // programs later.
                Err(Ended) => return Some(OnStop::Detach),
            }
        }
        if let Some(listen) = listen {
            self.setting.listen = listen;
            self.follow_addresses();
        }
        None
    }

    /// Returns how long to sleep without events.
    fn wait(&self) -> Duration {
        let is_reported = self.reported.is_some_and(|at| at.elapsed() < REPORT_HOLDS);
        // A probe is judged by the reports after it, so these are followed closely; otherwise only
        // the sign of life is due.
        let mut wait = if is_reported { TICK } else { WATCH_INTERVAL };
        if let Some(until) = self.gather_until {
            wait = wait.min(until.saturating_duration_since(Instant::now()));
        }
        if self.postponed {
            wait = wait.min(self.rtnl.rest());
        }
        wait.max(MIN_SLEEP)
    }

    /// Requests the programs that will be needed, while the map is being filled.
    fn order_programs(&mut self) {
        for link in &self.links {
            if !self.setting.is_candidate(link) {
                continue;
            }
            // A refusal is noted when it is this interface's turn.
            if let Ok(plan) = choice::plan(self.setting.mode, link, TcOrder::Tcx) {
                plan.order(&mut self.setting.programs);
            }
        }
    }

    fn take_report(&mut self, arrivals: &[Arrival], now: Instant) {
        self.reported = Some(now);
        self.gate.reported();
        let until = Instant::now() + LISTENING;
        let local: HashSet<IpAddr> = self.local.iter().map(|local| local.address).collect();
        for arrival in arrivals {
            let endpoint = arrival.endpoint;
            // A report about an endpoint that is no longer served was on its way when that ended.
            if let Some(&(_, slot)) = self.endpoints.iter().find(|(known, _)| *known == endpoint) {
                for part in by_interface(arrival, &local) {
                    self.gate.arrived(slot, &part, now);
                    self.hear(&part, slot, until, now);
                }
            }
        }
    }

    /// Checks the probes: at proven admissions they become rare, and lost ones raise doubts.
    fn check_probes(&mut self, now: Instant) {
        for &ifindex in self.attached.keys() {
            for &(_, slot) in &self.endpoints {
                // An interface that waits to be detached has no slot any more.
                let Some(probed) = self.setting.scope.probed(ifindex, slot) else {
                    continue;
                };
                if self.gate.probed(ifindex, slot, probed, now)
                    && self.gate.is_proven(ifindex, slot, now)
                {
                    self.setting
                        .scope
                        .defer_probe(ifindex, slot, PROVEN_PROBE_INTERVAL);
                    self.deferred_probes.insert((ifindex, slot));
                }
            }
        }
        let Self {
            setting,
            gate,
            deferred_probes,
            ..
        } = self;
        // A program only compares the time, so a probe that was postponed must be made due here.
        deferred_probes.retain(|&(ifindex, slot)| {
            let is_proven = gate.is_proven(ifindex, slot, now);
            if !is_proven {
                setting.scope.defer_probe(ifindex, slot, Duration::ZERO);
            }
            is_proven
        });
        self.judge_probes(now);
    }

    /// Closes admissions with lost probes.
    fn judge_probes(&mut self, now: Instant) {
        let is_reported = self
            .reported
            .is_some_and(|at| now.saturating_duration_since(at) < TICK * 2);
        // Compared with the last look, which may be long ago: an old overflow may excuse one loss
        // too many, which leaves the interface on.
        let lost_to_queues = &mut self.lost_to_queues;
        let losses = self.gate.judge(now, || {
            let lost = lists::lost_to_queues();
            let before = std::mem::replace(lost_to_queues, lost);
            !is_reported || lost != before
        });
        for loss in losses {
            let Loss {
                ifindex,
                endpoint: slot,
                client,
                raises_doubt,
            } = loss;
            // Its earlier arrival proves nothing any more, even if one loss raises no doubt about
            // the interface.
            self.heard.forget((ifindex, slot, client));
            // Further clients are silent for the same reason: one line names what to look for.
            if !raises_doubt {
                continue;
            }
            let endpoint = self
                .endpoints
                .iter()
                .find(|(_, known)| *known == slot)
                .map(|(endpoint, _)| *endpoint);
            let interface = link_at(&self.links, ifindex).map(|link| &link.name);
            tracing::warn!(interface, ?endpoint, %client, "queries of a client no longer reach userspace from this interface: it answers only clients whose own queries arrive; check packet filter rules and routes");
        }
    }

    /// Attaches and detaches programs as decided by the gate.
    fn reconcile(&mut self, now: Instant) {
        // The links and pins are the successor's now: touching them would end its answers.
        if self.taken_over {
            return;
        }
        self.check_probes(now);
        self.loading.clear();
        self.postponed = false;
        let wanted = self.wanted(now);
        // In each round, so that pins which `bosh-dns-xdp detach` removes meanwhile are there again
        // when programs need them.
        if !self.complete {
            self.setting.kept_maps.prepare();
        }
        let unwanted = self.stop_unwanted(&wanted);
        self.heard.forget_old(now);
        let links = self.by_urgency(&wanted);
        let served: Vec<Served> = links.iter().map(|link| self.served(link)).collect();
        // Must precede attaching: programs pass queries of unknown interfaces to the network stack.
        let without_slot = self.setting.scope.add_interfaces(&served);
        let before = self.attached.len();
        let mut waiting = Vec::new();
        for link in &links {
            if without_slot.contains(&link.ifindex) {
                self.refuse(
                    link,
                    "its index collides with too many other served interfaces".to_owned(),
                );
                continue;
            }
            // Before attaching, so that a program that replaces a predecessor's answers immediately.
            self.admit(link.ifindex, wanted[&link.ifindex]);
            if !self.attached.contains_key(&link.ifindex) && self.may_attach(link, now) {
                waiting.push(link);
            }
        }
        // Others may hold the RTNL lock, for which the changes below wait, for seconds.
        if !(waiting.is_empty() && unwanted.is_empty() && self.complete) {
            self.publish_status(now);
        }
        let limit = Instant::now() + BATCH;
        self.attach_waiting(waiting, limit, now);
        self.detach_unwanted(&unwanted, limit);
        if self.complete {
            // Asking for the pins takes system calls, and only new programs can miss any.
            if before < self.attached.len() {
                self.setting.kept_maps.pin_if_gone();
            }
        } else if !self.is_unfinished() {
            self.complete_takeover();
        }
        // The status reports whether programs keep answering if the process is killed.
        self.publish_status(now);
    }

    /// Ends the answers at interfaces that are no longer wanted; returns those with programs.
    fn stop_unwanted(&mut self, wanted: &BTreeMap<u32, Admitted>) -> Vec<u32> {
        // Queries on an interface no longer served pass to userspace at once; its program is detached later.
        let unwanted: Vec<u32> = self
            .attached
            .keys()
            .copied()
            .filter(|ifindex| !wanted.contains_key(ifindex))
            .collect();
        for &ifindex in &unwanted {
            self.setting.scope.remove_interface(ifindex);
        }
        self.admitted
            .retain(|ifindex, _| wanted.contains_key(ifindex));
        self.setting
            // A prepared link has no pin: dropping its descriptor detaches it.
            .prepared
            .retain(|ifindex, _| wanted.contains_key(ifindex));
        unwanted
    }

    /// Returns the wanted interfaces in the order of attaching.
    fn by_urgency(&self, wanted: &BTreeMap<u32, Admitted>) -> Vec<Link> {
        let mut links: Vec<Link> = self
            .links
            .iter()
            .filter(|link| wanted.contains_key(&link.ifindex))
            .cloned()
            .collect();
        // The busiest ones are attached first, at a start in the order of the configuration: each holds up the next.
        links.sort_by_key(|link| {
            let queries = Reverse(self.gate.queries(link.ifindex));
            (queries, self.setting.selection.place(link))
        });
        links
    }

    /// Publishes the endpoints at which an interface answers, and whether it answers only heard clients.
    fn admit(&mut self, ifindex: u32, admitted: Admitted) {
        let before = self.admitted.insert(ifindex, admitted).unwrap_or_default();
        let begun = admitted.heard_only & !before.heard_only;
        if begun != 0 {
            // A query that arrived before the verdict depended on the client proves nothing.
            self.heard
                .retain(|(known, slot, _), _| known != ifindex || begun & 1 << slot == 0);
        }
        let scope = &self.setting.scope;
        scope.admit(ifindex, admitted.endpoints, admitted.heard_only);
    }

    fn change_status(&self, change: impl FnOnce(&mut InterfacesStatus)) {
        change(&mut self.status.lock());
        self.setting.changed.notify();
    }

    /// Returns the interfaces to serve, with the endpoints for which the gate is open.
    fn wanted(&mut self, now: Instant) -> BTreeMap<u32, Admitted> {
        for link in &self.links {
            if self.is_urgent(link) {
                self.endpoints
                    .iter()
                    .for_each(|&(_, slot)| self.gate.open(link.ifindex, slot, now));
            }
        }
        self.close_silent(now);
        self.refusals.clear();
        let mut wanted = BTreeMap::new();
        // Nothing depends on rules while no interface may answer, and reading them takes a look at
        // every table.
        if self.gate.interfaces().next().is_some() {
            self.follow_rules(now);
        }
        for link in self
            .links
            .iter()
            .filter(|link| self.setting.is_candidate(link))
        {
            let mut admitted = Admitted::default();
            for &(endpoint, slot) in &self.endpoints {
                if !self.gate.is_open(link.ifindex, slot) {
                    continue;
                }
                // The kind of interface comes first, because it takes no walk through the rules.
                let stance = match topology::refusal(link, &self.links) {
                    Some(refusal) => Stance::Refuses(refusal.to_owned()),
                    None => self.firewall.stance(link, endpoint),
                };
                let is_heard_only = match stance {
                    Stance::Refuses(why) => {
                        self.refusals.insert(link.ifindex, why);
                        continue;
                    }
                    Stance::HeardOnly => true,
                    // A route that refuses replies to one client may refuse others as well.
                    Stance::Accepts => {
                        self.gate.witness(link.ifindex, slot).is_some()
                            || self.gate.known(link.ifindex, slot).any(|client| {
                                self.firewall
                                    .objection(link, endpoint, client, &mut self.netlink)
                                    .is_some()
                            })
                    }
                };
                admitted.endpoints |= 1 << slot;
                admitted.heard_only |= u64::from(is_heard_only) << slot;
            }
            if admitted.endpoints != 0 {
                wanted.insert(link.ifindex, admitted);
            }
        }
        wanted
    }

    /// Closes the gate for interfaces that have given no replies for long.
    fn close_silent(&mut self, now: Instant) {
        let is_full = self.attached.len() >= self.setting.max_interfaces;
        for (&ifindex, on) in &mut self.attached {
            // Without a slot it gives no replies.
            let replies = self
                .setting
                .scope
                .interface(ifindex)
                .map_or(0, |slot| self.setting.counters.interface(slot));
            if replies != on.replies.0 {
                on.replies = (replies, now);
            }
            let silence = now.saturating_duration_since(on.replies.1);
            if !is_retired(silence, on.attachment.owns_qdisc(), is_full) {
                continue;
            }
            // A named interface would be attached again at once.
            let link = link_at(&self.links, ifindex);
            if !link.is_some_and(|link| self.setting.selection.names(link)) {
                self.gate.close(ifindex);
            }
        }
    }

    /// Reads the rules again when they are due. After a change of rules every client must be heard again; after a
    /// change of routes or sets, only clients that it concerns.
    fn follow_rules(&mut self, now: Instant) {
        let change = self.firewall.refresh(now);
        if change == Change::Nothing {
            return;
        }
        self.gate.network_changed(now);
        let until = Instant::now() + LISTENING;
        let Self {
            firewall,
            heard,
            netlink,
            links,
            endpoints,
            ..
        } = self;
        heard.retain(|(ifindex, slot, client), _| {
            let link = link_at(links, ifindex);
            let endpoint = endpoints.iter().find(|(_, known)| *known == slot);
            let (Some(link), Some(&(endpoint, _))) = (link, endpoint) else {
                return false;
            };
            // After new rules no earlier arrival counts. Otherwise clients not reached in time are
            // forgotten, which is the safe side: their next queries pass to userspace.
            change != Change::Rules
                && Instant::now() < until
                && firewall
                    .objection(link, endpoint, client, netlink)
                    .is_none()
        });
    }

    /// Notes the clients whose queries have arrived where only heard clients are answered.
    fn hear(&mut self, arrival: &Arrival, slot: usize, until: Instant, now: Instant) {
        let Self {
            admitted,
            firewall,
            heard,
            netlink,
            links,
            ..
        } = self;
        let is_needed = admitted
            .get(&arrival.ifindex)
            .is_some_and(|admitted| admitted.heard_only & 1 << slot != 0);
        let link = link_at(links, arrival.ifindex);
        // Elsewhere every client is answered, and noting them would only fill the map.
        let Some(link) = link.filter(|_| is_needed) else {
            return;
        };
        for &client in arrival.clients.iter().take(MAX_CLIENTS) {
            // Each new client takes a walk through all rules. The others' next queries pass to userspace, too.
            if Instant::now() >= until {
                return;
            }
            let objection = firewall.objection(link, arrival.endpoint, client, netlink);
            if objection.is_none() {
                heard.hear((arrival.ifindex, slot, client), now);
            }
        }
    }

    /// Checks the attachments: attaches again if another process detached a program, and keeps away
    /// from links that a successor has taken over.
    fn check_attachments(&mut self) {
        // The cause of a failure may lie outside the interface: memory, descriptors, or a foreign
        // program that has gone.
        self.setting.programs.try_again();
        self.refused
            .values_mut()
            .for_each(|refused| refused.again = true);
        let Self {
            setting,
            netlink,
            attached,
            taken_over,
            ..
        } = self;
        attached.retain(|_, on| {
            match on
                .attachment
                .state(&setting.programs, &setting.filters, netlink)
            {
                // Without an answer the next round asks again.
                Ok(AttachState::Ours) | Err(_) => true,
                // The pin stays: another server may have pinned its own link there; otherwise ours will
                // replace it.
                Ok(AttachState::Gone) => false,
                Ok(AttachState::TakenOver) => {
                    *taken_over = true;
                    true
                }
            }
        });
    }

    /// Detaches the predecessor's programs from interfaces that are not served. Called after the first round.
    fn complete_takeover(&mut self) {
        for left in std::mem::take(&mut self.setting.predecessor) {
            attachment::drop_predecessor(left);
        }
        for ifindex in std::mem::take(&mut self.earlier_filters) {
            self.remove_earlier_filter(ifindex);
        }
        // Last, because these pins hold the arrays through which the predecessor's tc programs
        // answer.
        self.setting.kept_maps.take_over();
        self.complete = true;
    }

    fn remove_earlier_filter(&mut self, ifindex: u32) {
        let Self {
            setting, netlink, ..
        } = self;
        if let Err(error) = setting.filters.remove(ifindex, netlink) {
            tracing::warn!(%error, ifindex, "cannot remove a filter of the previous server: it may answer until its lease expires");
        }
    }
}

/// Returns whether an interface that has given no reply for the time of `silence` is detached. Its program costs every
/// packet a little, and where `is_full`, another interface may need its place.
fn is_retired(silence: Duration, owns_qdisc: bool, is_full: bool) -> bool {
    if silence < IDLE {
        return false;
    }
    // The kernel drops what an interface sends while its clsact qdisc is removed, and again while the next query
    // brings it back.
    !owns_qdisc || is_full
}

fn context<'a>(
    setting: &'a mut Setting,
    netlink: &'a mut Socket,
    settled: bool,
) -> AttachContext<'a> {
    let Setting {
        programs,
        filters,
        kept_maps,
        predecessor,
        prepared,
        lacks_tcx,
        ..
    } = setting;
    AttachContext {
        programs,
        filters,
        pins: kept_maps.pins.as_ref(),
        predecessor,
        prepared,
        lacks_tcx,
        netlink,
        settled,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use dns_common::counters::CpuCounters;
    use dns_fastpath::map::Shape;

    use super::*;
    use crate::{attach::netlink::NetworkEvent, bpf::LinkKind};

    /// Returns a thread's state without programs, which takes over a link on `lo`.
    fn reconciler(events: Events, netlink: Socket) -> InterfaceReconciler {
        let file = || OwnedFd::from(tempfile::tempfile().unwrap());
        let counters = tempfile::tempfile().unwrap();
        counters.set_len(size_of::<CpuCounters>() as u64).unwrap();
        let shape = Shape {
            value_size: size_of::<CpuCounters>() as u32,
            elements: 1,
        };
        let lo = PinnedLink {
            ifindex: 1,
            kind: LinkKind::Tcx,
            fd: file(),
            path: "/missing/1-tcx".into(),
        };
        let (_, told) = mailbox::channel(1).unwrap();
        let setting = Setting {
            selection: Selection::new(None, &[]),
            mode: HookMode::Auto,
            programs: Programs::told(told),
            filters: Filters::of(([127, 0, 0, 1], 53).into()),
            listen: vec![([127, 0, 0, 1], 53).into()],
            scope: Arc::new(ScopePage::anonymous()),
            counters: Arc::new(CounterPages::map(counters.as_fd(), shape).unwrap()),
            collisions: Collisions::default(),
            heard_clients: file(),
            max_interfaces: 1,
            predecessor: vec![lo],
            prepared: BTreeMap::new(),
            lacks_tcx: false,
            kept_maps: Arc::new(KeptMaps {
                pins: None,
                maps: std::array::from_fn(|_| ("", file())),
            }),
            changed: mailbox::notifications().unwrap().0,
        };
        InterfaceReconciler::new(setting, events, netlink).unwrap()
    }

    #[test]
    fn predecessor_stays_until_interfaces_are_known() {
        let (silent, _) = UnixStream::pair().unwrap();
        let kernel = Socket::requests().unwrap();
        let events = Events::subscribe().unwrap();
        // Each request fails, because the other end is gone.
        let mut reconciler = reconciler(events, Socket::of(silent.into()));
        reconciler.is_filled = true;
        reconciler.begin();
        assert!(!reconciler.may_attach_programs());
        assert!(reconciler.next_round <= Instant::now() + RETRY);
        assert_eq!(reconciler.bounded, None);

        reconciler.netlink = kernel;
        let begun = Instant::now();
        reconciler.begin();
        assert!(reconciler.may_attach_programs());
        assert!(reconciler.next_round >= begun + ROUND);
        assert!(link_at(&reconciler.links, 1).is_some());
        assert!(reconciler.bounded.is_some());
        assert_eq!(reconciler.setting.predecessor.len(), 1);
    }

    #[test]
    fn successor_of_an_index_inherits_no_admission() {
        let veth = |name: &str, last| Link {
            address: [2, 0, 0, 0, 0, last],
            ..Link::named(7, name)
        };
        let now = Instant::now();
        let reused = [
            NetworkEvent::LinkGone(7),
            NetworkEvent::Link(veth("later", 2)),
        ];
        let changed = [NetworkEvent::Link(veth("later", 1))];
        for (events, is_open) in [(Vec::from(reused), false), (Vec::from(changed), true)] {
            let mut reconciler = reconciler(Events::told(events), Socket::requests().unwrap());
            reconciler.set_addresses(Vec::new());
            reconciler.set_links(vec![veth("earlier", 1)]);
            let (_, slot) = reconciler.endpoints[0];
            reconciler.gate.open(7, slot, now);
            reconciler.follow_events();
            assert_eq!(
                reconciler.links,
                [veth("later", if is_open { 1 } else { 2 })]
            );
            assert_eq!(reconciler.gate.is_open(7, slot), is_open);
        }
    }

    #[test]
    fn silent_interface_keeps_qdisc_until_place_is_needed() {
        let almost = IDLE - Duration::from_millis(1);
        assert!(!is_retired(almost, false, true));
        assert!(is_retired(IDLE, false, false));
        assert!(!is_retired(IDLE, true, false));
        assert!(is_retired(IDLE, true, true));
    }
}
