//! Limits how often events are handled, and how long the RTNL lock is held: all network configuration
//! of the machine needs it. A CNI plugin adds its `ingress` qdisc some time after the interface, and fails if another
//! qdisc occupies that slot, so an interface that may still change waits.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{AsFd, BorrowedFd},
    thread,
    time::{Duration, Instant},
};

use dns_fastpath::protocol::Operation;

use super::{
    netlink::{Link, NetworkEvent, Socket},
    work::count,
};
use crate::mailbox::wait_readable;

/// Time to wait for further events before handling them: starting a container causes several.
const COALESCE: Duration = Duration::from_millis(20);

/// Maximum of that time while events keep coming: each round lists all interfaces.
const MAX_COALESCE: Duration = Duration::from_millis(640);

/// Silence after which the next event is handled immediately.
const CALM: Duration = Duration::from_secs(2);

/// Pause after an operation while no interface waits too long, as a multiple of its duration: the lock
/// is free for 95 % of the time.
const RELAXED_PAUSE: u32 = 19;

/// Shortest pause, as a divisor of the operation's duration: even if many interfaces are late, the
/// lock is free for a fifth of the time.
const HURRIED_PAUSE: u32 = 4;

/// Maximum pause: an operation longer than a twentieth of it was waiting for the lock or the CPU.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// How long an interface may wait for its program. Pauses shrink as far as that needs.
pub(super) const DEADLINE: Duration = Duration::from_millis(2000);

/// Time after an event of network configuration until others count as finished: creating a container takes
/// the RTNL lock many times within some milliseconds, and each would wait for an operation of ours.
const SILENCE: Duration = Duration::from_millis(20);

/// How long after that an operation of ours may begin while containers come one after the other: at the end of a pause
/// it would hold up the next one.
const ROOM: Duration = Duration::from_millis(30);

/// Time without events after which no further container is expected.
const REST: Duration = Duration::from_millis(500);

/// Maximum number of events that wait to be handled, and of those received at a time; beyond that, everything is
/// listed again.
const MAX_EVENTS: usize = 16_384;

pub(super) struct Events {
    socket: Socket,
    /// Time of the last one.
    last: Option<Instant>,
    /// Those received and not handled yet, at most [`MAX_EVENTS`]. [`NetworkEvent::Lost`] replaces all before it.
    pending: Vec<NetworkEvent>,
}

impl Events {
    /// Subscribes to the events of the calling thread's network namespace.
    pub(super) fn subscribe() -> io::Result<Self> {
        Ok(Self {
            socket: Socket::subscribed()?,
            last: None,
            pending: Vec::new(),
        })
    }

    /// Returns whether there are events, without waiting.
    pub(super) fn any(&mut self) -> bool {
        self.receive();
        !self.pending.is_empty()
    }

    /// Returns the events since the last call, without waiting.
    pub(super) fn take(&mut self) -> Vec<NetworkEvent> {
        self.receive();
        std::mem::take(&mut self.pending)
    }

    fn receive(&mut self) {
        let mut received = 0;
        while let Some(events) = self.socket.events() {
            self.last = Some(Instant::now());
            received += events.len();
            self.add(events);
            // A process that changes routes without end would keep this thread here, and nothing would watch rules and probes.
            if received > MAX_EVENTS {
                return self.begin_again();
            }
        }
    }

    /// Gives up the events that wait in the kernel.
    fn begin_again(&mut self) {
        // They would be applied to a newer list. Without another socket they are, and the list after them is right.
        if let Ok(socket) = Socket::subscribed() {
            self.socket = socket;
        }
        self.add(vec![NetworkEvent::Lost]);
    }

    fn add(&mut self, events: Vec<NetworkEvent>) {
        for event in events {
            // A list will tell everything.
            let is_lost = self.pending.first() == Some(&NetworkEvent::Lost);
            // A routing daemon changes thousands of routes alike.
            if is_lost || self.pending.last() == Some(&event) {
                continue;
            }
            if event == NetworkEvent::Lost || self.pending.len() >= MAX_EVENTS {
                self.pending = vec![NetworkEvent::Lost];
            } else {
                self.pending.push(event);
            }
        }
    }

    /// Waits until no other process seems to be changing the configuration, nor about to; returns false if that does
    /// not happen before `limit`.
    pub(super) fn wait_for_silence(&mut self, limit: Instant) -> bool {
        loop {
            self.receive();
            let now = Instant::now();
            let Some(silent_at) = self.last.and_then(|last| silent_at(last, now)) else {
                return true;
            };
            if now >= limit {
                return false;
            }
            wait_readable([self.socket.as_fd()], silent_at.min(limit) - now);
        }
    }
}

/// Returns when an operation may begin, if nothing happens until then; `None`: now.
fn silent_at(last: Instant, now: Instant) -> Option<Instant> {
    let silence = now.saturating_duration_since(last);
    if silence < SILENCE {
        return Some(last + SILENCE);
    }
    let is_late = silence >= SILENCE + ROOM && silence < REST;
    is_late.then_some(last + REST)
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Decides how long to gather events.
pub(super) struct EventPace {
    wait: Duration,
    /// Start of the last wait; `None` before the first event.
    last: Option<Instant>,
}

impl EventPace {
    pub(super) fn new() -> Self {
        Self {
            wait: COALESCE,
            last: None,
        }
    }

    /// Returns how long to wait for more events: briefly after a quiet period, and twice as long
    /// each time while they keep coming.
    pub(super) fn wait(&mut self, now: Instant) -> Duration {
        let calm = self
            .last
            .is_none_or(|last| now.saturating_duration_since(last) > CALM);
        self.wait = if calm {
            COALESCE
        } else {
            (self.wait * 2).min(MAX_COALESCE)
        };
        self.last = Some(now);
        self.wait
    }
}

/// The interfaces that still wait for a program.
#[derive(Clone, Copy, Debug)]
pub(super) struct Backlog {
    pub(super) waiting: usize,
    /// Since when the oldest of them waits.
    pub(super) since: Instant,
}

/// Decides when the RTNL lock may be taken again.
#[derive(Debug, Default)]
pub(super) struct RtnlThrottle {
    /// Earliest time of the next operation; `None`: now.
    next: Option<Instant>,
}

impl RtnlThrottle {
    /// Waits for the end of the pause; returns false at once if it ends after `limit`.
    pub(super) fn wait_before(&self, limit: Instant) -> bool {
        let Some(next) = self.next else { return true };
        if next > limit {
            return false;
        }
        thread::sleep(next.saturating_duration_since(Instant::now()));
        true
    }

    /// Runs an operation that takes the lock; its whole duration counts as holding it. `backlog`
    /// describes what waits after it; `None`: nothing.
    pub(super) fn run<T>(
        &mut self,
        operation: Operation,
        backlog: Option<Backlog>,
        work: impl FnOnce() -> T,
    ) -> T {
        let begun = Instant::now();
        let done = count(operation, work);
        let now = Instant::now();
        // The wait for the lock included: if others need it that much, a longer pause is right.
        let took = begun.elapsed();
        self.next = Some(now + pause(took, backlog, now));
        done
    }

    pub(super) fn rest(&self) -> Duration {
        self.next.map_or(Duration::ZERO, |next| {
            next.saturating_duration_since(Instant::now())
        })
    }
}

/// Returns the pause after an operation that took the lock for `took`: as long as possible, and so short that
/// the whole backlog is served by its deadline.
fn pause(took: Duration, backlog: Option<Backlog>, now: Instant) -> Duration {
    let relaxed = (took * RELAXED_PAUSE).min(MAX_PAUSE);
    let Some(Backlog { waiting, since }) = backlog.filter(|backlog| backlog.waiting > 0) else {
        return relaxed;
    };
    let left = (since + DEADLINE).saturating_duration_since(now);
    let share = left / u32::try_from(waiting).unwrap_or(u32::MAX);
    // In this order: the least pause applies even if all are late, and none is longer than the
    // relaxed one.
    share
        .saturating_sub(took)
        .max(took / HURRIED_PAUSE)
        .min(relaxed)
}

/// How long an interface must stay unchanged before a qdisc may be added. Plugins run one after the
/// other, and between the first and the last thousands of packet filter rules may be written.
pub(crate) const QUIET: Duration = Duration::from_secs(20);

/// The interfaces' last changes.
#[derive(Debug, Default)]
pub(super) struct CniGrace {
    /// Time of the last change, by interface index.
    changed: BTreeMap<u32, Instant>,
    /// Interfaces that wait to be settled.
    waiting: BTreeSet<u32>,
}

impl CniGrace {
    pub(super) fn listed(&mut self, before: &[Link], after: &[Link], now: Instant) {
        let before: BTreeMap<u32, &Link> = before.iter().map(|link| (link.ifindex, link)).collect();
        let mut changed = BTreeMap::new();
        for link in after {
            // Every difference counts, also a new interface: a plugin may be about to work on
            // it.
            let is_same = before.get(&link.ifindex) == Some(&link);
            let since = self.changed.get(&link.ifindex).filter(|_| is_same);
            changed.insert(link.ifindex, since.copied().unwrap_or(now));
        }
        self.waiting.retain(|ifindex| changed.contains_key(ifindex));
        self.changed = changed;
    }

    /// Returns whether a qdisc may be added to an interface. CNI plugins use virtual interfaces only.
    pub(super) fn is_settled(&self, link: &Link, now: Instant) -> bool {
        link.kind.is_none()
            || self
                .changed
                .get(&link.ifindex)
                .is_some_and(|since: &Instant| now.saturating_duration_since(*since) >= QUIET)
    }

    pub(super) fn set_waiting(&mut self, ifindex: u32, waits: bool) {
        if waits {
            self.waiting.insert(ifindex);
        } else {
            self.waiting.remove(&ifindex);
        }
    }

    pub(super) fn is_waiting(&self, ifindex: u32) -> bool {
        self.waiting.contains(&ifindex)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use nix::sys::socket::{setsockopt, sockopt::SndBuf};

    use super::*;

    impl Events {
        /// Returns events that were received already.
        pub(in crate::attach) fn told(pending: Vec<NetworkEvent>) -> Self {
            Self {
                socket: Socket::requests().unwrap(),
                last: None,
                pending,
            }
        }
    }

    #[test]
    fn changes_end_with_silence() {
        let hour = Duration::from_secs(3600);
        let mut events = Events::subscribe().unwrap();
        assert!(
            events.wait_for_silence(Instant::now() + hour),
            "nothing changes"
        );
        events.last = Some(Instant::now() + hour);
        assert!(
            !events.wait_for_silence(Instant::now()),
            "the last change is too recent"
        );
        events.add(vec![NetworkEvent::LinkGone(7)]);
        assert!(events.any(), "received while waiting, not handled yet");
        assert!(events.take().contains(&NetworkEvent::LinkGone(7)));
        events.add(vec![NetworkEvent::Detail; MAX_EVENTS]);
        assert_eq!(events.pending.len(), 1, "alike");
        let most = u32::try_from(MAX_EVENTS).unwrap();
        events.add((0..=most).map(NetworkEvent::LinkGone).collect());
        assert_eq!(events.pending, [NetworkEvent::Lost], "too many");
        events.add(vec![NetworkEvent::LinkGone(7), NetworkEvent::Lost]);
        assert_eq!(events.pending, [NetworkEvent::Lost]);
    }

    #[test]
    fn endless_events_hold_nobody_up() {
        let (ours, changes) = UnixDatagram::pair().unwrap();
        changes.set_nonblocking(true).unwrap();
        setsockopt(&changes, SndBuf, &(1 << 20)).unwrap();
        // Changes of routing rules: the header suffices.
        let mut message = [0; 16];
        message[..4].copy_from_slice(&16_u32.to_ne_bytes());
        message[4..6].copy_from_slice(&libc::RTM_NEWRULE.to_ne_bytes());
        let datagram = message.repeat(MAX_EVENTS / 4);
        for _ in 0..5 {
            changes.send(&datagram).unwrap();
        }
        let mut events = Events {
            socket: Socket::of(ours.into()),
            last: None,
            pending: Vec::new(),
        };
        assert!(events.any());
        assert_eq!(events.take(), [NetworkEvent::Lost], "everything is listed");
    }

    #[test]
    fn operations_begin_soon_after_events() {
        let last = Instant::now();
        let wait = |after: u64| {
            let now = last + Duration::from_millis(after);
            silent_at(last, now).map(|at| (at - last).as_millis())
        };
        assert_eq!([wait(0), wait(19)], [Some(20), Some(20)]);
        assert_eq!([wait(20), wait(49)], [None, None]);
        // The next container may come at any moment.
        assert_eq!([wait(50), wait(499)], [Some(500), Some(500)]);
        assert_eq!([wait(500), wait(9999)], [None, None]);
    }

    #[test]
    fn frequent_events_are_gathered() {
        let mut pace = EventPace::new();
        let mut now = Instant::now();
        let mut looks = 0;
        assert_eq!(pace.wait(now), COALESCE, "a single one is served at once");
        let end = now + Duration::from_secs(10);
        while now < end {
            now += pace.wait(now);
            looks += 1;
        }
        // Without coalescing it would be 500, one every 20 ms.
        assert!(looks < 25, "{looks} looks in ten seconds of events");
        assert_eq!(pace.wait(now + CALM * 2), COALESCE, "after a calm");
    }

    /// Returns how long it takes to serve this many interfaces that begin to wait together, and how long the
    /// lock is held then, if each operation holds it for `took`.
    fn serve(interfaces: usize, took: Duration) -> (Duration, Duration) {
        let begin = Instant::now();
        let mut now = begin;
        let mut held = Duration::ZERO;
        for served in 1..=interfaces {
            now += took;
            held += took;
            let backlog = Backlog {
                waiting: interfaces - served,
                since: begin,
            };
            if served < interfaces {
                now += pause(took, Some(backlog), now);
            }
        }
        (now - begin, held)
    }

    #[test]
    fn five_hundred_are_served_in_time() {
        let (needed, held) = serve(500, Duration::from_micros(130));
        assert!(needed <= Duration::from_secs(3), "{needed:?}");
        assert!(
            held * 19 <= needed,
            "{held:?} of {needed:?}: the lock is free for 95 % of the time"
        );
    }

    #[test]
    fn lock_stays_free_without_hurry() {
        let (needed, held) = serve(8, Duration::from_millis(13));
        assert!(needed >= held * 16, "{held:?} of {needed:?}");
        let (needed, held) = serve(250, Duration::from_millis(13));
        assert!(
            needed >= held + held / 5,
            "{held:?} of {needed:?}: others take it even then"
        );
        assert!(needed <= held * 2, "{held:?} of {needed:?}");
        let alone = pause(Duration::from_millis(13), None, Instant::now());
        assert_eq!(alone, Duration::from_millis(13 * 19));
    }

    #[test]
    fn changes_restart_the_wait() {
        let mut grace = CniGrace::default();
        let begin = Instant::now();
        let uplink = Link::named(2, "eth0");
        let veth = Link {
            kind: Some("veth".to_owned()),
            ..Link::named(3, "s-1")
        };
        let first = [uplink.clone(), veth.clone()];
        grace.listed(&[], &first, begin);
        assert!(grace.is_settled(&uplink, begin), "hardware");
        assert!(!grace.is_settled(&veth, begin + QUIET / 2));
        grace.listed(&first, &first, begin + QUIET / 2);
        assert!(grace.is_settled(&veth, begin + QUIET));

        let bridged = Link {
            master: Some(9),
            ..veth.clone()
        };
        let second = [uplink, bridged.clone()];
        grace.listed(&first, &second, begin + QUIET);
        assert!(!grace.is_settled(&bridged, begin + QUIET));
        grace.set_waiting(3, true);
        grace.listed(&second, &second[..1], begin + QUIET * 2);
        assert!(
            !grace.is_settled(&bridged, begin + QUIET * 4) && !grace.is_waiting(3),
            "gone"
        );
    }
}
