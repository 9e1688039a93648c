//! The thread that follows the interfaces and the local addresses as they come and go.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    os::fd::AsFd,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use dns_common::control::{Endpoint, Interface, MAX_ENDPOINTS};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::sync::watch;

use super::{
    attachment::{self, Means, Standing},
    choice::{self, Attachment, NotServed},
    endpoints::{expand, to_endpoint},
    hook::Hook,
    netlink::{Link, Socket},
    pins::{KeptMaps, PinnedLink, Pins},
    selection::Selection,
};
use crate::{
    mailbox::{self, Ended},
    map::control::ControlPage,
    observe::messages::Messages,
    programs::Programs,
};
use dns_core::config::{HookMode, OnStop};
use dns_platform::threads::{self, OnPanic};

/// How long to wait for further news of the kernel before acting: containers bring several at once.
const COALESCE: Duration = Duration::from_millis(20);

/// The same while news keep coming: each look lists all interfaces.
const COALESCE_MOST: Duration = Duration::from_millis(640);

/// How long there must have been no news for the next ones to be acted upon at once.
const CALM: Duration = Duration::from_secs(2);

/// How often everything is looked at even without news.
const ROUND: Duration = Duration::from_secs(10);

/// How often to look whether the map has been filled.
const FILL_ROUND: Duration = Duration::from_millis(10);

/// One interface, for the status.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct InterfaceStatus {
    /// Its name.
    pub name: String,
    /// Its number.
    pub ifindex: u32,
    /// The hook that serves it; null: none does, its queries are answered from userspace.
    pub hook: Option<Hook>,
    /// Why that one, or why none.
    pub why: String,
}

/// Where queries are answered.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct InterfacesStatus {
    /// Interfaces that are served, or should be, by number.
    pub interfaces: Vec<InterfaceStatus>,
    /// Addresses and ports whose queries the program answers.
    pub endpoints: Vec<SocketAddr>,
    /// Addresses and ports beyond the program's limit: answered from userspace.
    pub endpoints_left_out: usize,
    /// Whether another server has taken over, so that this one follows nothing any more.
    pub taken_over: bool,
    /// How often all interfaces were listed so far.
    pub looks: u64,
}

/// What the follower works with.
pub(crate) struct Setting {
    /// Which interfaces.
    pub(crate) selection: Selection,
    /// Which hook.
    pub(crate) mode: HookMode,
    /// What to attach.
    pub(crate) programs: Programs,
    /// Where to pin; `None`: nowhere.
    pub(crate) pins: Option<Pins>,
    /// Where the server listens; wildcards are made into the local addresses.
    pub(crate) listen: Vec<SocketAddr>,
    /// Where the program learns the addresses.
    pub(crate) control: Arc<ControlPage>,
    /// Links of a predecessor, to be taken over.
    pub(crate) predecessor: Vec<PinnedLink>,
    /// Becomes 1 when the map is filled: only then are programs attached.
    pub(crate) installs: watch::Receiver<u64>,
    /// What the programs need when this process is gone.
    pub(crate) kept_maps: Arc<KeptMaps>,
    /// Messages of the programs, read here because this thread sleeps until
    /// something comes anyway.
    pub(crate) messages: Option<Messages>,
}

/// What the thread is told. When nobody is left who could tell it anything, it detaches and ends.
enum Command {
    /// Serve exactly these addresses.
    Listen(Vec<SocketAddr>),
    /// End.
    Stop(OnStop),
}

/// The thread that follows the interfaces.
pub(crate) struct Interfaces {
    /// To it.
    commands: mailbox::Sender<Command>,
    /// What it last saw.
    status: watch::Receiver<InterfacesStatus>,
    /// Becomes true when the first round is done.
    ready: watch::Receiver<bool>,
    /// The thread.
    thread: JoinHandle<()>,
}

impl Interfaces {
    /// Starts to follow. Sockets are opened here, in the caller's network namespace.
    pub(crate) fn start(setting: Setting) -> std::io::Result<Self> {
        let (commands, commanded) = mailbox::channel()?;
        let (status, seen) = watch::channel(InterfacesStatus::default());
        let (is_ready, ready) = watch::channel(false);
        let news = Socket::news()?;
        let netlink = Socket::requests()?;
        let mut follower = Follower {
            setting,
            netlink,
            attached: BTreeMap::new(),
            refused: BTreeMap::new(),
            waiting: BTreeSet::new(),
            status,
            complete: false,
            taken_over: false,
        };
        // The addresses are known before anything can be answered.
        follower.follow_addresses();
        let thread = threads::spawn("interfaces", OnPanic::EndProcess, move || {
            follower.run(&news, &commanded, &is_ready);
        })?;
        Ok(Self { commands, status: seen, ready, thread })
    }

    /// Serves exactly these addresses from now on.
    pub(crate) fn set_listen(&self, listen: &[SocketAddr]) {
        // An error: the thread has panicked, which was logged.
        let _ = self.commands.send(Command::Listen(listen.to_vec()));
    }

    /// What was last seen.
    pub(crate) fn status(&self) -> InterfacesStatus {
        self.status.borrow().clone()
    }

    /// Where the programs were told to answer.
    pub(crate) fn endpoints(&self) -> Vec<Endpoint> {
        self.status.borrow().endpoints.iter().map(|&endpoint| to_endpoint(endpoint)).collect()
    }

    /// Becomes true when all interfaces of the start have been dealt with.
    pub(crate) fn ready(&self) -> watch::Receiver<bool> {
        self.ready.clone()
    }

    /// Ends the thread, detaching or not.
    pub(crate) fn stop(self, on_stop: OnStop) {
        let Self { commands, status: _, ready: _, thread } = self;
        // An error: the thread has panicked.
        let _ = commands.send(Command::Stop(on_stop));
        if thread.join().is_err() {
            tracing::error!(
                "the thread that follows the interfaces had panicked: what it attached may still be attached"
            );
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
    /// Interfaces that could not be served.
    refused: BTreeMap<u32, Refused>,
    /// Interfaces whose programs are being loaded.
    waiting: BTreeSet<u32>,
    /// For others to read.
    status: watch::Sender<InterfacesStatus>,
    /// Whether all that a predecessor left is ours, or gone.
    complete: bool,
    /// Whether a successor has taken over.
    taken_over: bool,
}

/// An interface that could not be served.
struct Refused {
    /// As it was then.
    link: Link,
    /// Why.
    why: String,
    /// Whether to try again though it is still the same.
    again: bool,
}

impl Follower {
    /// Works until told to stop.
    fn run(mut self, news: &Socket, commands: &mailbox::Receiver<Command>, ready: &watch::Sender<bool>) {
        let begun = Instant::now();
        let mut last_round = begun;
        let mut pace = Pace::new();
        let mut first = true;
        self.order_programs();
        loop {
            let filled = !first || *self.setting.installs.borrow() > 0;
            if filled {
                if last_round.elapsed() >= ROUND {
                    self.look_after();
                    last_round = Instant::now();
                }
                self.reconcile();
                if first && self.waiting.is_empty() {
                    first = false;
                    ready.send_replace(true);
                    tracing::debug!(
                        milliseconds = begun.elapsed().as_millis(),
                        "dealt with all interfaces of the start"
                    );
                }
            }
            let wait = if filled { ROUND } else { FILL_ROUND };
            let messages = self.setting.messages.as_ref().map(AsFd::as_fd);
            let fds = [Some(news.as_fd()), Some(commands.as_fd()), messages, self.setting.programs.news()];
            let mut fds: Vec<_> =
                fds.into_iter().flatten().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
            let timeout = PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX);
            // An interrupted wait is a wait that was shorter.
            let _ = poll(&mut fds, timeout);
            let is_told = fds[1].any().unwrap_or(false);
            if let Some(messages) = &mut self.setting.messages {
                messages.hand_on();
            }
            self.setting.programs.collect();
            if is_told {
                match commands.take() {
                    Ok(Some(Command::Listen(listen))) => {
                        self.setting.listen = listen;
                        self.follow_addresses();
                    }
                    Ok(Some(Command::Stop(on_stop))) => return self.finish(on_stop),
                    Ok(None) => {}
                    Err(Ended) => return self.finish(OnStop::Detach),
                }
                continue;
            }
            if news.heard() {
                // Whoever wakes us does not wait for that: what woke us is still there then.
                let mut wake = [PollFd::new(commands.as_fd(), PollFlags::POLLIN)];
                let wait = PollTimeout::try_from(pace.wait(Instant::now())).unwrap_or(PollTimeout::MAX);
                let _ = poll(&mut wake, wait);
                news.heard();
                self.follow_addresses();
            }
        }
    }

    /// Has the programs loaded that will be needed, while the map is being filled.
    fn order_programs(&mut self) {
        // An error comes again where it is told, when it is time to attach.
        let Ok(links) = self.netlink.links() else { return };
        for link in links.iter().filter(|link| self.setting.selection.takes(link)) {
            if let Ok(plan) = choice::plan(self.setting.mode, link) {
                plan.order(&mut self.setting.programs);
            }
        }
    }

    /// Makes the attachments follow the interfaces that there are.
    fn reconcile(&mut self) {
        if self.taken_over {
            return;
        }
        self.status.send_modify(|status| status.looks += 1);
        let links = match self.netlink.links() {
            Ok(links) => links,
            Err(error) => {
                tracing::warn!(%error, "cannot list the interfaces (netlink): programs stay attached where they are; trying again");
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
        self.waiting.clear();
        // Before anything is attached: what XDP does not know goes up.
        let known: Vec<Interface> = wanted.values().map(|link| to_interface(link, &links)).collect();
        self.setting.control.set_interfaces(&known);
        if !self.complete {
            self.setting.kept_maps.prepare();
        }
        let before = self.attached.len();
        for (&ifindex, &link) in &wanted {
            if !self.attached.contains_key(&ifindex) {
                self.attach(link);
            }
        }
        if !self.waiting.is_empty() {
            // What a predecessor left answers meanwhile.
        } else if !self.complete {
            self.complete_takeover();
        } else if before < self.attached.len() {
            self.setting.kept_maps.pin_if_gone();
        }
        // Who sees that interfaces answer may rely on their going on when we are killed.
        self.publish_status(&wanted);
    }

    /// Attaches to one interface, unless it refused before and is still the same.
    fn attach(&mut self, link: &Link) {
        let before = self.refused.get(&link.ifindex);
        if before.is_some_and(|before| before.link == *link && !before.again) {
            return;
        }
        let made = choice::plan(self.setting.mode, link)
            .and_then(|plan| Attachment::make(plan, link, &mut means(&mut self.setting, &mut self.netlink)));
        match made {
            Ok(attachment) => {
                tracing::info!(interface = %link.name, hook = %attachment.hook(), why = attachment.why(), "program attached: the interface answers queries");
                self.refused.remove(&link.ifindex);
                self.attached.insert(link.ifindex, attachment);
            }
            Err(NotServed::Loading) => {
                self.waiting.insert(link.ifindex);
            }
            Err(refusal) => {
                let why = refusal.to_string();
                // Tried again and again, but said once.
                if before.is_none_or(|before| before.why != why) {
                    tracing::warn!(interface = %link.name, why, "interface not served: its queries are answered from userspace");
                }
                let refused = Refused { link: link.clone(), why, again: false };
                self.refused.insert(link.ifindex, refused);
            }
        }
    }

    /// Looks whether all is as it should be: what somebody else detached is
    /// attached again, what a successor took is his.
    fn look_after(&mut self) {
        self.setting.programs.try_again();
        self.refused.values_mut().for_each(|refused| refused.again = true);
        let Self { setting, netlink, attached, taken_over, .. } = self;
        let mut gone = Vec::new();
        for (&ifindex, attachment) in attached.iter() {
            match attachment.standing(&setting.programs, netlink) {
                Standing::Ours => {}
                Standing::Gone => gone.push(ifindex),
                Standing::TakenOver => *taken_over = true,
            }
        }
        for ifindex in gone {
            attached.remove(&ifindex);
        }
    }

    /// After the first round: what the predecessor served and we do not goes.
    fn complete_takeover(&mut self) {
        for left in std::mem::take(&mut self.setting.predecessor) {
            attachment::drop_predecessor(left);
        }
        self.setting.kept_maps.take_over();
        self.complete = true;
    }

    /// Tells the program where the server listens.
    fn follow_addresses(&mut self) {
        let local = if self.setting.listen.iter().all(|listen| listen.ip().is_loopback()) {
            Vec::new()
        } else {
            match self.netlink.addresses() {
                Ok(addresses) => addresses,
                Err(error) => {
                    tracing::warn!(%error, "cannot list the local addresses (netlink): programs answer at those known so far; trying again");
                    return;
                }
            }
        };
        let all = expand(&self.setting.listen, &local);
        let served = &all[..all.len().min(MAX_ENDPOINTS)];
        let endpoints: Vec<_> = served.iter().map(|&endpoint| to_endpoint(endpoint)).collect();
        self.setting.control.set_endpoints(&endpoints);
        let left_out = all.len() - served.len();
        if left_out > self.status.borrow().endpoints_left_out {
            tracing::warn!(
                left_out,
                "more listen addresses than the programs hold: queries to the rest are answered from userspace"
            );
        }
        self.status.send_modify(|status| {
            status.endpoints_left_out = left_out;
            status.endpoints = served.to_vec();
        });
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
                    why: attachment
                        .map(|attachment| attachment.why().to_owned())
                        .or_else(|| self.refused.get(&ifindex).map(|refused| refused.why.clone()))
                        .or_else(|| self.waiting.contains(&ifindex).then(|| NotServed::Loading.to_string()))
                        .unwrap_or_default(),
                }
            })
            .collect();
        self.status.send_modify(|status| {
            status.interfaces = interfaces;
            status.taken_over = self.taken_over;
        });
    }

    /// Detaches, or leaves everything to a successor.
    fn finish(mut self, on_stop: OnStop) {
        // Links of a predecessor that were never taken over are his to lease out, or ours to remove.
        let left = std::mem::take(&mut self.setting.predecessor);
        match on_stop {
            OnStop::Keep => {
                let lost = self.attached.values().filter(|attachment| !attachment.is_kept()).count();
                if lost > 0 {
                    tracing::warn!(
                        lost,
                        "programs whose links are not pinned are detached when this process ends, whatever xdp.on_stop says"
                    );
                }
            }
            OnStop::Detach => {
                for link in left {
                    attachment::drop_predecessor(link);
                }
                for (_, attachment) in std::mem::take(&mut self.attached) {
                    attachment.detach(&self.setting.programs, &mut self.netlink);
                }
            }
        }
    }
}

/// How long to gather news before acting upon them.
struct Pace {
    /// The last wait.
    wait: Duration,
    /// When it began; `None`: there were no news yet.
    last: Option<Instant>,
}

impl Pace {
    /// No news yet.
    fn new() -> Self {
        Self { wait: COALESCE, last: None }
    }

    /// There are news: how long to wait for more. Little after a calm, and twice as long each
    /// time while they keep coming.
    fn wait(&mut self, now: Instant) -> Duration {
        let calm = self.last.is_none_or(|last| now.saturating_duration_since(last) > CALM);
        self.wait = if calm { COALESCE } else { (self.wait * 2).min(COALESCE_MOST) };
        self.last = Some(now);
        self.wait
    }
}

/// What attaching works with.
fn means<'a>(setting: &'a mut Setting, netlink: &'a mut Socket) -> Means<'a> {
    let Setting { programs, pins, predecessor, .. } = setting;
    Means { programs, pins: pins.as_ref(), predecessor, netlink }
}

/// To whom frames that come in by an interface may be addressed; `all`: among these is the
/// one that it is a part of.
fn to_interface(link: &Link, all: &[Link]) -> Interface {
    let master = all.iter().find(|other| Some(other.ifindex) == link.master);
    let padded = |[a, b, c, d, e, f]: [u8; 6]| [a, b, c, d, e, f, 0, 0];
    Interface {
        address: padded(link.address),
        master: padded(master.unwrap_or(link).address),
        ifindex: link.ifindex,
        padding: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_that_come_and_go_are_looked_at_together() {
        let (mut pace, mut now, mut looks) = (Pace::new(), Instant::now(), 0);
        assert_eq!(pace.wait(now), COALESCE, "one that comes alone is served at once");
        let end = now + Duration::from_secs(10);
        while now < end {
            now += pace.wait(now);
            looks += 1;
        }
        // Not 500: one every 20 ms.
        assert!(looks < 25, "{looks} looks in ten seconds of news");
        assert_eq!(pace.wait(now + CALM * 2), COALESCE, "after a calm");
    }
}
