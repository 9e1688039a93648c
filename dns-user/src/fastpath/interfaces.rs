//! The interfaces: which ones to serve, followed as they come and go.
//!
//! Without a list in the configuration every interface is served on which a
//! query for one of our addresses can arrive:
//!
//! * `lo`: local processes' queries travel over it whatever our address is.
//! * if we listen only on loopback addresses, nothing else;
//! * otherwise every interface, but for bridges, whose ports are served, and
//!   for parts of a bond or team, which is served as a whole.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr},
    os::{fd::AsFd, unix::net::UnixStream},
    sync::{Arc, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use dns_common::{
    control::{Control, Endpoint, MAX_ENDPOINTS},
    counters::INTERFACE_SLOTS,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::sync::watch;

use super::{
    hooks::{self, Attachment, Hook},
    maps::ControlPage,
    messages::Messages,
    netlink::{Link, Socket},
    pins::{KeptMaps, PinnedLink, Pins},
    places::{self, Means, Programs, Standing},
};
use crate::config::{HookMode, OnStop};

/// How long news may gather before they are acted upon: containers bring several at once.
const GATHER: Duration = Duration::from_millis(20);

/// How often everything is looked at even without news.
const ROUND: Duration = Duration::from_secs(10);

/// How often to look whether the map has been filled.
const FILL_ROUND: Duration = Duration::from_millis(10);

/// One interface, for the status.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct InterfaceStatus {
    /// Its name.
    pub name: String,
    /// Its number.
    pub ifindex: u32,
    /// The hook that serves it; null: none does, its queries are answered from userspace.
    pub hook: Option<Hook>,
    /// The hook behind XDP where replies are given that find no room there; null:
    /// there is none, or `hook` is no XDP.
    pub second: Option<Hook>,
    /// Why that one, or why none.
    pub why: String,
}

/// Where queries are answered.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct InterfacesStatus {
    /// Interfaces that are served, or should be, by number.
    pub interfaces: Vec<InterfaceStatus>,
    /// Addresses and ports whose queries the program answers.
    pub endpoints: Vec<SocketAddr>,
    /// Addresses and ports beyond the program's limit: answered from userspace.
    pub endpoints_left_out: usize,
    /// Whether another server has taken over, so that this one follows nothing any more.
    pub taken_over: bool,
}

/// Which interfaces are to be served.
#[derive(Debug)]
pub(super) enum Selection {
    /// By name or glob.
    Listed(Vec<glob::Pattern>),
    /// Only the loopback.
    Loopback,
    /// Wherever queries can arrive.
    All,
}

impl Selection {
    /// The selection for this configuration; names that are no globs stand for themselves.
    pub(super) fn new(listed: Option<&[String]>, endpoints: &[SocketAddr]) -> Self {
        match listed {
            Some(names) => Self::Listed(
                names
                    .iter()
                    .map(|name| {
                        glob::Pattern::new(name).unwrap_or_else(|_| {
                            let literal = glob::Pattern::escape(name);
                            glob::Pattern::new(&literal).expect("an escaped text is a pattern")
                        })
                    })
                    .collect(),
            ),
            None if endpoints.iter().all(|endpoint| endpoint.ip().is_loopback()) => Self::Loopback,
            None => Self::All,
        }
    }

    /// Whether to serve this interface.
    fn takes(&self, link: &Link) -> bool {
        match self {
            Self::Listed(patterns) => patterns.iter().any(|pattern| pattern.matches(&link.name)),
            Self::Loopback => link.layer == 772,
            Self::All => {
                let part_of_bond = matches!(link.part_of.as_deref(), Some("bond" | "team"));
                link.kind.as_deref() != Some("bridge") && !part_of_bond
            }
        }
    }
}

/// What the follower works with.
pub(super) struct Setting {
    /// Which interfaces.
    pub(super) selection: Selection,
    /// Which hook.
    pub(super) mode: HookMode,
    /// What to attach.
    pub(super) programs: Programs,
    /// Where to pin; `None`: nowhere.
    pub(super) pins: Option<Pins>,
    /// Where the server listens; wildcards are made into the local addresses.
    pub(super) listen: Vec<SocketAddr>,
    /// Where the program learns the addresses.
    pub(super) control: Arc<ControlPage>,
    /// Links of a predecessor, to be taken over.
    pub(super) predecessor: Vec<PinnedLink>,
    /// Becomes 1 when the map is filled: only then are programs attached.
    pub(super) installs: watch::Receiver<u64>,
    /// What the programs need when this process is gone.
    pub(super) kept_maps: Arc<KeptMaps>,
    /// Messages of the programs, read here because this thread sleeps until
    /// something comes anyway.
    pub(super) messages: Option<Messages>,
}

/// The thread that follows the interfaces.
pub(super) struct Interfaces {
    /// To wake it for stopping.
    wake: UnixStream,
    /// What to do at the end.
    end: Arc<Mutex<Option<OnStop>>>,
    /// Other addresses to serve, until the thread has taken them.
    listen: Arc<Mutex<Option<Vec<SocketAddr>>>>,
    /// What it last saw.
    status: Arc<Mutex<InterfacesStatus>>,
    /// Becomes true when the first round is done.
    ready: watch::Receiver<bool>,
    /// The thread.
    thread: JoinHandle<()>,
}

impl Interfaces {
    /// Starts to follow. Sockets are opened here, in the caller's network namespace.
    pub(super) fn start(setting: Setting) -> std::io::Result<Self> {
        let (wake, woken) = UnixStream::pair()?;
        let end = Arc::new(Mutex::new(None));
        let listen = Arc::new(Mutex::new(None));
        let status = Arc::new(Mutex::new(InterfacesStatus::default()));
        let (is_ready, ready) = watch::channel(false);
        let news = Socket::news()?;
        let netlink = Socket::requests()?;
        let mut follower = Follower {
            setting,
            netlink,
            attached: BTreeMap::new(),
            refused: BTreeMap::new(),
            status: status.clone(),
            complete: false,
            taken_over: false,
        };
        // The addresses are known before anything can be answered.
        follower.follow_addresses();
        let (worker_end, worker_listen) = (end.clone(), listen.clone());
        let thread = thread::Builder::new().name("interfaces".into()).spawn(move || {
            follower.run(&news, &woken, &worker_end, &worker_listen, &is_ready);
        })?;
        Ok(Self { wake, end, listen, status, ready, thread })
    }

    /// Serves exactly these addresses from now on.
    pub(super) fn set_listen(&self, listen: &[SocketAddr]) {
        *self.listen.lock().unwrap_or_else(PoisonError::into_inner) = Some(listen.to_vec());
        // The thread has ended, or its buffer holds other wake-ups already.
        let _ = (&self.wake).write(&[0]);
    }

    /// What was last seen.
    pub(super) fn status(&self) -> InterfacesStatus {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Becomes true when all interfaces of the start have been dealt with.
    pub(super) fn ready(&self) -> watch::Receiver<bool> {
        self.ready.clone()
    }

    /// Ends the thread, detaching or not.
    pub(super) fn stop(self, on_stop: OnStop) {
        let Self { wake, end, listen: _, status: _, ready: _, thread } = self;
        *end.lock().unwrap_or_else(PoisonError::into_inner) = Some(on_stop);
        // Closing one end wakes the thread that polls the other.
        drop(wake);
        if thread.join().is_err() {
            tracing::error!("the thread that follows the interfaces had panicked");
        }
    }
}

/// The state of the thread.
struct Follower {
    /// What it works with.
    setting: Setting,
    /// For requests.
    netlink: Socket,
    /// What is attached, by interface.
    attached: BTreeMap<u32, Attachment>,
    /// Interfaces that could not be served, as they were then, and why.
    refused: BTreeMap<u32, (Link, String)>,
    /// For others to read.
    status: Arc<Mutex<InterfacesStatus>>,
    /// Whether all that a predecessor left is ours, or gone.
    complete: bool,
    /// Whether a successor has taken over.
    taken_over: bool,
}

impl Follower {
    /// Works until woken for the end.
    fn run(
        mut self,
        news: &Socket,
        woken: &UnixStream,
        end: &Mutex<Option<OnStop>>,
        listen: &Mutex<Option<Vec<SocketAddr>>>,
        ready: &watch::Sender<bool>,
    ) {
        let mut last_round = Instant::now();
        let mut first = true;
        loop {
            if !first || *self.setting.installs.borrow() > 0 {
                let begun = Instant::now();
                if first || last_round.elapsed() >= ROUND {
                    self.look_after();
                    last_round = Instant::now();
                }
                self.reconcile();
                if first {
                    first = false;
                    ready.send_replace(true);
                    tracing::debug!(milliseconds = begun.elapsed().as_millis(), "attached");
                }
            }
            let wait = if first { FILL_ROUND } else { ROUND };
            let messages = self.setting.messages.as_ref().map(AsFd::as_fd);
            let fds = [Some(news.as_fd()), Some(woken.as_fd()), messages];
            let mut fds: Vec<_> =
                fds.into_iter().flatten().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
            let timeout = PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX);
            // An interrupted wait is a wait that was shorter.
            let _ = poll(&mut fds, timeout);
            let woken_up = fds[1].any().unwrap_or(false);
            if let Some(messages) = &mut self.setting.messages {
                messages.hand_on();
            }
            if woken_up {
                if let Some(listen) = listen.lock().unwrap_or_else(PoisonError::into_inner).take() {
                    self.setting.listen = listen;
                    self.follow_addresses();
                }
                // Bytes are wake-ups; the end of the stream is the end.
                let mut wake_ups = [0; 16];
                let mut stream = woken;
                if stream.read(&mut wake_ups).is_ok_and(|count| count > 0) {
                    continue;
                }
                let on_stop = end.lock().unwrap_or_else(PoisonError::into_inner).take();
                return self.finish(on_stop.unwrap_or(OnStop::Detach));
            }
            if news.heard() {
                thread::sleep(GATHER);
                news.heard();
                self.follow_addresses();
            }
        }
    }

    /// Makes the attachments follow the interfaces that there are.
    fn reconcile(&mut self) {
        if self.taken_over {
            return;
        }
        let links = match self.netlink.links() {
            Ok(links) => links,
            Err(error) => {
                tracing::warn!(%error, "cannot list the interfaces; trying again");
                return;
            }
        };
        let wanted: BTreeMap<u32, &Link> = links
            .iter()
            .filter(|link| self.setting.selection.takes(link))
            .map(|link| (link.ifindex, link))
            .collect();
        let unwanted: Vec<u32> =
            self.attached.keys().copied().filter(|ifindex| !wanted.contains_key(ifindex)).collect();
        for ifindex in unwanted {
            if let Some(attachment) = self.attached.remove(&ifindex) {
                attachment.detach(&self.setting.programs, &mut self.netlink);
            }
        }
        self.refused.retain(|ifindex, _| wanted.contains_key(ifindex));
        if !self.complete {
            self.setting.kept_maps.prepare();
        }
        let before = self.attached.len();
        if before < wanted.len() {
            // A predecessor's program waits behind XDP until ours does; where nobody waits,
            // what is handed on goes up all the same.
            self.setting.control.set_second_stages([u64::MAX; INTERFACE_SLOTS / 64]);
        }
        for (&ifindex, &link) in &wanted {
            if !self.attached.contains_key(&ifindex) {
                self.attach(link);
            }
            if let Some(attachment) = self.attached.get_mut(&ifindex) {
                attachment.complete(link, &mut means(&mut self.setting, &mut self.netlink));
            }
        }
        self.setting.control.set_second_stages(second_stages(&self.attached));
        if !self.complete {
            self.complete_takeover();
        } else if before < self.attached.len() {
            self.setting.kept_maps.pin_if_gone();
        }
        // Who sees that interfaces answer may rely on their going on when we are killed.
        self.publish_status(&wanted);
    }

    /// Attaches to one interface, unless it refused before and is still the same.
    fn attach(&mut self, link: &Link) {
        if self.refused.get(&link.ifindex).is_some_and(|(then, _)| then == link) {
            return;
        }
        let made = hooks::plan(self.setting.mode, link)
            .and_then(|plan| Attachment::make(plan, link, &mut means(&mut self.setting, &mut self.netlink)));
        match made {
            Ok(attachment) => {
                tracing::info!(interface = %link.name, hook = %attachment.hook(), why = attachment.why(), "answering");
                self.refused.remove(&link.ifindex);
                self.attached.insert(link.ifindex, attachment);
            }
            Err(why) => {
                tracing::warn!(interface = %link.name, why, "not served: its queries are answered from userspace");
                self.refused.insert(link.ifindex, (link.clone(), why));
            }
        }
    }

    /// Looks whether all is as it should be: what somebody else detached is
    /// attached again, what a successor took is his.
    fn look_after(&mut self) {
        self.refused.clear();
        let Self { setting, netlink, attached, taken_over, .. } = self;
        let mut gone = Vec::new();
        for (&ifindex, attachment) in attached.iter_mut() {
            match attachment.look_after(&setting.programs, netlink) {
                Standing::Ours => {}
                Standing::Gone => gone.push(ifindex),
                Standing::TakenOver => *taken_over = true,
            }
        }
        for ifindex in gone {
            if let Some(attachment) = attached.remove(&ifindex) {
                attachment.give_up(&setting.programs, netlink);
            }
        }
    }

    /// After the first round: what the predecessor served and we do not goes.
    fn complete_takeover(&mut self) {
        for left in std::mem::take(&mut self.setting.predecessor) {
            places::drop_predecessor(left);
        }
        self.setting.kept_maps.take_over();
        self.complete = true;
    }

    /// Tells the program where the server listens.
    fn follow_addresses(&mut self) {
        let local = if self.setting.listen.iter().any(|listen| listen.ip().is_unspecified()) {
            match self.netlink.addresses() {
                Ok(addresses) => addresses,
                Err(error) => {
                    tracing::warn!(%error, "cannot list the local addresses; trying again");
                    return;
                }
            }
        } else {
            Vec::new()
        };
        let all = expand(&self.setting.listen, &local);
        let served = &all[..all.len().min(MAX_ENDPOINTS)];
        let endpoints: Vec<Endpoint> = served.iter().map(|&endpoint| to_endpoint(endpoint)).collect();
        self.setting.control.set_endpoints(&endpoints);
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        let left_out = all.len() - served.len();
        if left_out > status.endpoints_left_out {
            tracing::warn!(
                left_out,
                "more addresses than the program holds: queries for the rest are answered from userspace"
            );
        }
        status.endpoints_left_out = left_out;
        status.endpoints = served.to_vec();
    }

    /// Lets others read what there is.
    fn publish_status(&self, wanted: &BTreeMap<u32, &Link>) {
        let interfaces = wanted
            .iter()
            .map(|(&ifindex, link)| {
                let attachment = self.attached.get(&ifindex);
                InterfaceStatus {
                    name: link.name.clone(),
                    ifindex,
                    hook: attachment.map(Attachment::hook),
                    second: attachment.and_then(Attachment::second_hook),
                    why: attachment
                        .map(Attachment::why)
                        .or_else(|| self.refused.get(&ifindex).map(|(_, why)| why.clone()))
                        .unwrap_or_default(),
                }
            })
            .collect();
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        status.interfaces = interfaces;
        status.taken_over = self.taken_over;
    }

    /// Detaches, or leaves everything to a successor.
    fn finish(mut self, on_stop: OnStop) {
        // Links of a predecessor that were never taken over are his to lease out, or ours to remove.
        let left = std::mem::take(&mut self.setting.predecessor);
        match on_stop {
            OnStop::Keep => {
                let lost = self.attached.values().filter(|attachment| !attachment.is_kept()).count();
                if lost > 0 {
                    tracing::warn!(lost, "programs that are not pinned end with this process");
                }
            }
            OnStop::Detach => {
                for link in left {
                    places::drop_predecessor(link);
                }
                for (_, attachment) in std::mem::take(&mut self.attached) {
                    attachment.detach(&self.setting.programs, &mut self.netlink);
                }
            }
        }
    }
}

/// What attaching works with.
fn means<'a>(setting: &'a mut Setting, netlink: &'a mut Socket) -> Means<'a> {
    let Setting { programs, pins, predecessor, .. } = setting;
    Means { programs, pins: pins.as_ref(), predecessor, netlink }
}

/// Where XDP may hand packets on, as [`Control::second_stages`] has it.
fn second_stages(attached: &BTreeMap<u32, Attachment>) -> [u64; INTERFACE_SLOTS / 64] {
    let (mut with, mut without) = ([0; INTERFACE_SLOTS / 64], [0; INTERFACE_SLOTS / 64]);
    for (&ifindex, attachment) in attached.iter().filter(|(_, attachment)| attachment.is_xdp()) {
        let (word, bit) = Control::second_stage(ifindex);
        let slots = if attachment.second_hook().is_some() { &mut with } else { &mut without };
        slots[word] |= bit;
    }
    std::array::from_fn(|word| with[word] & !without[word])
}

/// Makes wildcards into the local addresses that their sockets take queries for;
/// the order says who is served first where there are too many.
///
/// A wildcard of IPv6 takes IPv4 as well, unless that has a socket of its own on
/// the port (`server/sockets.rs`, as in the reference).
fn expand(listen: &[SocketAddr], local: &[IpAddr]) -> Vec<SocketAddr> {
    let mut all: Vec<SocketAddr> = Vec::new();
    for endpoint in listen {
        let addresses: Vec<IpAddr> = match endpoint.ip() {
            ip if !ip.is_unspecified() => vec![ip],
            ip => {
                let has_v4 = listen.iter().any(|other| other.is_ipv4() && other.port() == endpoint.port());
                let takes = |address: &IpAddr| match address {
                    IpAddr::V4(_) => ip.is_ipv4() || !has_v4,
                    IpAddr::V6(_) => ip.is_ipv6(),
                };
                let mut addresses: Vec<IpAddr> = local.iter().copied().filter(takes).collect();
                addresses.sort_by_key(|address| (!address.is_loopback(), *address));
                addresses
            }
        };
        for address in addresses {
            let found = SocketAddr::new(address, endpoint.port());
            if !all.contains(&found) {
                all.push(found);
            }
        }
    }
    all
}

/// An endpoint as the program compares it.
fn to_endpoint(endpoint: SocketAddr) -> Endpoint {
    let (address, family) = match endpoint.ip() {
        IpAddr::V4(ip) => (ip.to_ipv6_mapped().octets(), 4),
        IpAddr::V6(ip) => (ip.octets(), 6),
    };
    Endpoint { address, port: endpoint.port().to_be_bytes(), family, wildcard: 0, padding: [0; 4] }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An interface.
    fn link(name: &str, kind: Option<&str>, part_of: Option<&str>) -> Link {
        Link {
            ifindex: 3,
            name: name.into(),
            layer: if name == "lo" { 772 } else { 1 },
            kind: kind.map(str::to_owned),
            part_of: part_of.map(str::to_owned),
            xdp_program: None,
        }
    }

    #[test]
    fn without_a_list_all_are_served_where_queries_can_arrive() {
        let all = Selection::new(None, &["169.254.0.2:53".parse().unwrap()]);
        assert!(all.takes(&link("lo", None, None)));
        assert!(all.takes(&link("eth0", None, None)));
        assert!(all.takes(&link("veth1", Some("veth"), Some("bridge"))));
        assert!(!all.takes(&link("br0", Some("bridge"), None)), "its ports are served");
        assert!(!all.takes(&link("eth1", None, Some("bond"))), "the bond is served");
        let loopback = Selection::new(None, &["127.0.0.1:53".parse().unwrap(), "[::1]:53".parse().unwrap()]);
        assert!(loopback.takes(&link("lo", None, None)));
        assert!(!loopback.takes(&link("eth0", None, None)));
    }

    #[test]
    fn lists_hold_names_and_globs() {
        let listed = ["lo", "w-*", "br[0"].map(str::to_owned);
        let selection = Selection::new(Some(&listed), &[]);
        for (name, served) in
            [("lo", true), ("w-abc-0", true), ("eth0", false), ("br[0", true), ("br0", false)]
        {
            assert_eq!(selection.takes(&link(name, Some("bridge"), None)), served, "{name}");
        }
    }

    #[test]
    fn wildcards_become_the_local_addresses_that_they_take() {
        let local: Vec<IpAddr> =
            ["10.0.0.1", "::1", "127.0.0.1", "10.0.0.1"].map(|ip| ip.parse().unwrap()).into();
        let listen = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert_eq!(expand(&[listen("0.0.0.0:53")], &local), [listen("127.0.0.1:53"), listen("10.0.0.1:53")]);
        let both = ["127.0.0.1:53", "[::1]:53", "10.0.0.1:53"].map(listen);
        assert_eq!(expand(&[listen("[::]:53")], &local), both, "IPv6's takes IPv4 too");
        assert_eq!(expand(&[listen("[::]:53"), listen("10.0.0.1:54")], &local)[..3], both);
        let own_v4 = expand(&[listen("[::]:53"), listen("10.0.0.1:53")], &local);
        assert_eq!(own_v4, [listen("[::1]:53"), listen("10.0.0.1:53")], "IPv4 has a socket of its own");
        assert_eq!(expand(&[listen("10.0.0.1:53"), listen("0.0.0.0:53")], &local).len(), 2, "no repeats");
    }

    #[test]
    fn endpoints_are_in_network_order() {
        let endpoint = to_endpoint("169.254.0.2:53".parse().unwrap());
        assert_eq!(endpoint.address, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 169, 254, 0, 2]);
        assert_eq!((endpoint.port, endpoint.family), ([0, 53], 4));
    }
}
