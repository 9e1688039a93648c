//! Watches a server's packets within a limit of CPU.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use dns_core::{config::wildcard_receives, wire::Transport};
use nix::{
    ifaddrs::getifaddrs,
    sys::{
        resource::{UsageWho, getrusage},
        time::TimeValLike,
    },
};

use crate::{
    capture::{Capture, SeenPacket},
    filter::Share,
    frames::{Content, Unreadable},
    judge::{Judge, TRANSITION},
    latency::Latencies,
    pairs::{Pairs, Sighting},
    reference::Reference,
    report::Seen,
};

/// Pause when there is nothing to read: packets wait in the socket's queue.
const PAUSE: Duration = Duration::from_millis(10);
/// Interval between adjustments of the share.
const ADJUSTMENT: Duration = Duration::from_millis(200);
/// Interval between reports of progress.
const PROGRESS: Duration = Duration::from_secs(1);
/// Time limit of reading what is queued at the end.
const MAX_DRAINING: Duration = Duration::from_secs(5);
/// Interval between readings of the machine's addresses; each takes the kernel's lock of network configuration.
const ADDRESSES: Duration = Duration::from_secs(10);
/// CPU time that may be used in advance, as time at the permitted share.
const MAX_CREDIT: Duration = Duration::from_millis(250);

/// How long and with how much CPU to watch.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Time after which watching ends.
    pub time: Duration,
    /// Share of a core, 0 to 1.
    pub cpu: f64,
}

/// The result of watching.
#[derive(Debug, Default)]
pub struct Watched {
    /// The failure that ended it early.
    pub failure: Option<String>,
    /// Numbers of packets.
    pub seen: Seen,
    /// Latency of the observed server.
    pub latencies: Latencies,
    /// CPU time of this thread.
    pub cpu: Duration,
    /// Time for which was watched.
    pub time: Duration,
}

struct Watcher<'a, R> {
    capture: Capture,
    endpoints: Endpoints<'a>,
    judge: &'a mut Judge<R>,
    pairs: Pairs,
    share: Share,
    budget: Budget,
    watched: Watched,
    /// Packets that were read, with copies on `lo`.
    read: u64,
    /// Estimate of the packets that passed the interfaces: the number behind the filter, divided by its share.
    packets: f64,
    /// Whether packets were left out.
    is_sampled: bool,
}

/// Watches until the time is over, `stop` is set or the packet socket fails. `progress` gets the counts every second.
pub fn watch<R: Reference>(
    capture: Capture,
    endpoints: &[SocketAddr],
    judge: &mut Judge<R>,
    limits: Limits,
    stop: &AtomicBool,
    progress: impl FnMut(&Seen, &Judge<R>),
) -> Watched {
    let begin = Instant::now();
    let mut watcher = Watcher {
        capture,
        endpoints: Endpoints::new(endpoints),
        judge,
        pairs: Pairs::default(),
        share: Share::ALL,
        budget: Budget::new(limits.cpu, begin, thread_cpu()),
        watched: Watched::default(),
        read: 0,
        packets: 0.0,
        is_sampled: false,
    };
    let result = watcher.run(limits.time, stop, progress);
    watcher.publish();
    let mut watched = watcher.watched;
    // Hours of comparisons may precede a failure.
    watched.failure = result
        .err()
        .map(|problem| format!("packet socket: {problem}"));
    watched.time = begin.elapsed();
    watched.cpu = thread_cpu().saturating_sub(watcher.budget.before);
    settle_all(watcher.judge, stop);
    watched
}

/// Judges the last differences when their time has come.
pub fn settle_all<R: Reference>(judge: &mut Judge<R>, stop: &AtomicBool) {
    let begin = Instant::now();
    let was_stopped = stop.load(Ordering::Relaxed);
    // A signal ends the wait, unless one has ended the watching.
    while !judge.is_settled() && begin.elapsed() < 2 * TRANSITION {
        if !was_stopped && stop.load(Ordering::Relaxed) {
            break;
        }
        judge.settle(Instant::now());
        thread::sleep(PAUSE);
    }
    judge.finish();
}

impl<R: Reference> Watcher<'_, R> {
    /// Watches for this time, or until `stop` is set.
    fn run(
        &mut self,
        time: Duration,
        stop: &AtomicBool,
        mut progress: impl FnMut(&Seen, &Judge<R>),
    ) -> io::Result<()> {
        let begin = Instant::now();
        // Before the first packet: wildcards have no address yet.
        self.endpoints.follow(begin)?;
        let mut adjusted = begin;
        let mut shown = begin;
        loop {
            let now = Instant::now();
            if now.duration_since(begin) >= time || stop.load(Ordering::Relaxed) {
                break;
            }
            let read = if self.budget.permits(now, thread_cpu()) {
                self.read(now)?
            } else {
                0
            };
            if read == 0 {
                // No event tells when the budget permits more, so waiting for the socket would not
                // suffice.
                thread::sleep(PAUSE);
            }
            if now.duration_since(adjusted) >= ADJUSTMENT {
                adjusted = now;
                self.adjust(now)?;
            }
            if now.duration_since(shown) >= PROGRESS {
                shown = now;
                self.publish();
                progress(&self.watched.seen, self.judge);
            }
        }
        self.drain()?;
        // Counts what arrived and expired since the last adjustment.
        self.adjust(Instant::now())
    }

    /// Reads queued packets; returns their number.
    fn read(&mut self, now: Instant) -> io::Result<usize> {
        let count = self.capture.receive()?;
        self.read += count as u64;
        for SeenPacket {
            packet,
            interface,
            stamp,
        } in self.capture.packets(count)
        {
            let seen = &mut self.watched.seen;
            let packet = match packet {
                Ok(packet) => packet,
                Err(unreadable) => {
                    match unreadable {
                        Unreadable::Fragment => seen.fragments += 1,
                        Unreadable::Malformed => seen.malformed += 1,
                    }
                    continue;
                }
            };
            let is_query = self.endpoints.have(packet.destination);
            let (client, server) = if is_query {
                (packet.source, packet.destination)
            } else if self.endpoints.have(packet.source) {
                (packet.destination, packet.source)
            } else {
                // Of another server: the filter passes every address at a wildcard's port.
                continue;
            };
            let mut sighting = Sighting {
                client,
                server,
                transport: packet.transport,
                interface,
                at: arrival(stamp, now),
                stamp,
                message: &[],
            };
            let messages = match packet.content {
                Content::Messages(messages) => messages,
                Content::Part(begin) => {
                    match packet.transport {
                        Transport::Udp => seen.fragments += 1,
                        Transport::Tcp => seen.split_segments += 1,
                    }
                    if !is_query {
                        sighting.message = begin;
                        self.pairs.forget(&sighting);
                    }
                    continue;
                }
            };
            for message in messages {
                sighting.message = message;
                if is_query {
                    seen.queries += u64::from(self.pairs.query(&sighting));
                } else if let Some(exchange) = self.pairs.reply(&sighting) {
                    if let Some(latency) = exchange.latency {
                        self.watched.latencies.add(latency);
                    }
                    self.judge.judge(exchange);
                }
            }
        }
        Ok(count)
    }

    /// Reads what was queued when the watching ended, within the limit of CPU.
    fn drain(&mut self) -> io::Result<()> {
        // The queue would be filled again while it is read.
        self.capture.pass(Share::NONE)?;
        let begin = Instant::now();
        while begin.elapsed() < MAX_DRAINING {
            let now = Instant::now();
            if !self.budget.permits(now, thread_cpu()) {
                thread::sleep(PAUSE);
            } else if self.read(now)? == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Follows the load and the machine's addresses, and judges what has waited long enough.
    fn adjust(&mut self, now: Instant) -> io::Result<()> {
        self.endpoints.follow(now)?;
        let statistics = self.capture.statistics()?;
        self.watched.seen.dropped += statistics.dropped;
        self.is_sampled |= statistics.dropped > 0;
        // Counted when packets arrive, so packets in the queue came with the same share.
        self.packets += statistics.passed as f64 / self.share.fraction();

        let share = if statistics.dropped > 0 {
            // The replies to waiting queries may be among them.
            self.pairs.forget_waiting();
            // A queue that overflows drops without a choice, which parts queries from their replies.
            self.share.halved()
        } else if self.share != Share::ALL && self.budget.is_idle(now) {
            // In smaller steps than it is halved, because each change loses the pairs in flight.
            self.share.raised()
        } else {
            self.share
        };
        if share != self.share {
            // Queries whose replies the new filter does not pass would count as unanswered.
            self.pairs.forget_waiting();
            self.capture.pass(share)?;
            self.share = share;
            self.is_sampled = true;
        }
        // Lost by the server or by the network: a matter of its load, not of its answers.
        self.watched.seen.unanswered += self.pairs.expire(now);
        self.judge.settle(now);
        Ok(())
    }

    fn publish(&mut self) {
        let seen = &mut self.watched.seen;
        seen.unpaired = self.pairs.unpaired;
        seen.estimated_queries = seen.queries;
        seen.sampled_share = 1.0;
        if self.is_sampled && self.read > 0 {
            let estimated = self.packets * seen.queries as f64 / self.read as f64;
            // Chance may estimate fewer than were counted.
            seen.estimated_queries = (estimated.round() as u64).max(seen.queries);
            seen.sampled_share = seen.queries as f64 / seen.estimated_queries.max(1) as f64;
        }
    }
}

/// Returns when a packet that is read now arrived: it may have waited in the queue, and records may have changed since.
fn arrival(stamp: Option<Duration>, now: Instant) -> Instant {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH);
    let age = stamp.and_then(|stamp| wall.unwrap_or_default().checked_sub(stamp));
    now.checked_sub(age.unwrap_or_default()).unwrap_or(now)
}

//----------- Endpoints ------------------------------------------------------

/// The endpoints of the observed server.
struct Endpoints<'a> {
    all: &'a [SocketAddr],
    /// This machine's addresses, to which wildcards are limited, and when they were read.
    own: Vec<IpAddr>,
    read: Option<Instant>,
}

impl<'a> Endpoints<'a> {
    fn new(all: &'a [SocketAddr]) -> Self {
        Self {
            all,
            own: Vec::new(),
            read: None,
        }
    }

    /// Reads the machine's addresses again if a wildcard needs them and it is time.
    fn follow(&mut self, now: Instant) -> io::Result<()> {
        let has_wildcard = self.all.iter().any(|one| one.ip().is_unspecified());
        let is_due = self
            .read
            .is_none_or(|read| now.duration_since(read) >= ADDRESSES);
        if !has_wildcard || !is_due {
            return Ok(());
        }
        self.read = Some(now);
        self.own.clear();
        for interface in getifaddrs()? {
            // An interface without an address is listed as well (getifaddrs(3)).
            let Some(address) = interface.address else {
                continue;
            };
            if let Some(v4) = address.as_sockaddr_in() {
                self.own.push(v4.ip().into());
            } else if let Some(v6) = address.as_sockaddr_in6() {
                self.own.push(v6.ip().into());
            }
        }
        Ok(())
    }

    /// Returns whether an address is one of the endpoints, or covered by a wildcard.
    fn have(&self, address: SocketAddr) -> bool {
        let ip = address.ip();
        // The kernel delivers all of 127.0.0.0/8 locally, of which interfaces list one address.
        let is_own = ip.is_loopback() || self.own.contains(&ip);
        self.all.iter().any(|endpoint| {
            // Alone: whether the other endpoints leave it IPv4 is the observed server's choice.
            let is_covered = endpoint.ip() == ip || is_own && wildcard_receives(*endpoint, ip, &[]);
            is_covered && endpoint.port() == address.port()
        })
    }
}

//----------- Budget ---------------------------------------------------------

/// Limits the CPU time of a thread to a share of the time that passes.
struct Budget {
    share: f64,
    begin: Instant,
    /// CPU time before the beginning.
    before: Duration,
    /// Time up to which credit was granted, and CPU seconds still permitted.
    granted: Instant,
    credit: f64,
    /// CPU time used up to that time.
    used: Duration,
    /// The least credit since the last question.
    least: f64,
}

impl Budget {
    /// Begins with the thread's CPU time so far.
    fn new(share: f64, now: Instant, used: Duration) -> Self {
        Self {
            share,
            begin: now,
            before: used,
            granted: now,
            credit: MAX_CREDIT.as_secs_f64() * share,
            used,
            least: f64::MAX,
        }
    }

    /// Returns whether some CPU time is left, given the thread's CPU time. A step that takes more owes the rest.
    fn permits(&mut self, now: Instant, used: Duration) -> bool {
        let most = MAX_CREDIT.as_secs_f64() * self.share;
        let passed = now.duration_since(self.granted).as_secs_f64();
        let spent = used.saturating_sub(self.used).as_secs_f64();
        // Bounded, so that a quiet hour does not permit a burst at full use of a core.
        self.credit = (self.credit + passed * self.share - spent).min(most);
        self.granted = now;
        self.used = used;
        self.least = self.least.min(self.credit);
        self.credit > 0.0
    }

    /// Returns whether more than half of the permitted time was left since the last question.
    fn is_idle(&mut self, now: Instant) -> bool {
        let most = MAX_CREDIT.as_secs_f64() * self.share;
        std::mem::replace(&mut self.least, f64::MAX) > most / 2.0
            // The first credit is given, not saved, and says nothing about the load.
            && now.duration_since(self.begin) > MAX_CREDIT
    }
}

/// Returns the CPU time of this thread.
pub fn thread_cpu() -> Duration {
    let Ok(usage) = getrusage(UsageWho::RUSAGE_THREAD) else {
        // Cannot fail with these arguments (getrusage(2)).
        return Duration::ZERO;
    };
    let total = usage.user_time() + usage.system_time();
    Duration::from_micros(total.num_microseconds().unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of any length, on a machine that gives this thread half of a core at most.
    #[test]
    fn cpu_time_stays_within_its_share() {
        const SHARE: f64 = 0.05;
        let begin = Instant::now();
        for step in [Duration::from_micros(100), Duration::from_millis(30)] {
            let mut now = begin;
            let mut used = Duration::ZERO;
            let mut budget = Budget::new(SHARE, begin, used);
            let end = begin + Duration::from_secs(60);
            let mut was_idle = false;
            while now < end {
                if budget.permits(now, used) {
                    used += step;
                    now += 2 * step;
                } else {
                    now += PAUSE;
                }
                was_idle |= budget.is_idle(now) && now > begin + 4 * MAX_CREDIT;
            }
            let permitted = (end - begin + MAX_CREDIT).mul_f64(SHARE) + step;
            assert!(used <= permitted, "{used:?} of {permitted:?}");
            assert!(used > permitted.mul_f64(0.9), "{used:?} of {permitted:?}");
            assert!(!was_idle, "a busy thread counts as idle");
        }
    }

    #[test]
    fn saved_time_is_limited() {
        let begin = Instant::now();
        let mut budget = Budget::new(0.5, begin, Duration::ZERO);
        let later = begin + Duration::from_secs(3600);
        assert!(budget.permits(later, Duration::ZERO) && budget.is_idle(later));
        // A quarter of a second at half a core, whatever was saved before.
        assert!(!budget.permits(later, Duration::from_millis(126)));
    }
}
