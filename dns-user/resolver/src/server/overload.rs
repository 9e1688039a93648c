//! Overload: more queries come up than the UDP threads can answer.
//!
//! A query that a full receive queue drops has cost the kernel its whole way up, and the more
//! the queues drop the less of the CPU is left for answering. So while a queue is full, the
//! program on the interface sheds a part of what would go up ([`Slot::shed`](dns_fastpath::Slot::shed)). Clients are told
//! apart by groups ([`client_bucket`]), and each group may have an equal part of what can be
//! answered (max-min fairness): one client that floods the server takes nothing from the others.
//!
//! A thread looks only after it took a full batch, or while something is shed. An order holds
//! for [`ORDER`]: a server that dies sheds no longer than that.

use std::{
    fmt, io,
    net::IpAddr,
    os::fd::RawFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use dns_common::control::{CLIENT_BUCKETS, client_bucket};
use parking_lot::Mutex;

use crate::fleet::Fleet;

/// How long an order to the program holds.
const ORDER: Duration = Duration::from_millis(100);

/// How often the threads' reports are looked at.
const WINDOW: Duration = Duration::from_millis(10);

/// How many windows in a row a queue has to be full before anything is shed: a burst is not overload.
const FULL_WINDOWS: u32 = 2;

/// A queue counts as full when so much of it is in use.
const FULL: f64 = 0.75;

/// A queue counts as empty as long as no more of it is in use.
const EMPTY: f64 = 1.0 / 16.0;

/// How fast the capacity is taken to grow while the queues are empty, a window: what full
/// queues dropped took the CPU from the threads when it was measured first.
const GROWTH: f64 = 1.1;

/// How much less than the capacity goes up, for each part of a queue that is in use. Observed: queries
/// that have waited in a long queue are in no near cache any more, and cost twice as much. So the
/// queues are kept nearly empty.
const DRAIN: f64 = 2.0;

/// Least part of a group's queries that goes up: it tells how many there are.
const LEAST_SHARE: f64 = 1.0 / 1024.0;

/// How often the log is told, at most.
const TELL_INTERVAL: Duration = Duration::from_secs(10);

//----------- What the threads share -----------------------------------------

/// What all UDP threads know of overload; off by default.
#[derive(Clone, Default)]
pub struct Overload(Option<Arc<Shared>>);

#[derive(Default)]
struct Shared {
    /// Whether something is shed.
    is_shedding: AtomicBool,
    /// What is to be shed.
    limiter: Mutex<Limiter>,
}

impl Overload {
    /// Sheds when it has to.
    pub fn on() -> Self {
        Self(Some(Arc::default()))
    }
}

impl fmt::Debug for Overload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "on" } else { "off" })
    }
}

//----------- What a thread does ---------------------------------------------

/// Looks at the receive queue of one UDP thread.
pub(super) struct QueueWatch {
    /// What all threads know.
    overload: Overload,
    /// Queries taken since then, by group of clients.
    taken: [u32; CLIENT_BUCKETS],
    /// When the count began.
    since: Instant,
}

/// What a thread saw since its last report.
#[derive(Clone, Copy, Debug)]
struct Report<'a> {
    /// Queries that it took from its queue, by group of clients.
    taken: &'a [u32; CLIENT_BUCKETS],
    /// Seconds that it counted.
    seconds: f64,
    /// How much of the queue is in use: 0 to about 1.
    fill: f64,
}

impl QueueWatch {
    /// A watch on an empty queue.
    pub(super) fn new(overload: Overload) -> Self {
        Self { overload, taken: [0; CLIENT_BUCKETS], since: Instant::now() }
    }

    /// A datagram was taken from the queue, whatever it says.
    pub(super) fn took(&mut self, client: IpAddr) {
        self.taken[bucket(client)] += 1;
    }

    /// A batch was answered; `is_full`: it was as large as a batch can be, so that more may wait.
    pub(super) fn batch_ended(&mut self, socket: RawFd, is_full: bool, now: Instant, fleet: &Fleet) {
        let Some(shared) = &self.overload.0 else { return };
        if !is_full && !shared.is_shedding.load(Ordering::Relaxed) {
            self.restart(now);
        } else if now.duration_since(self.since) >= WINDOW {
            // Where the kernel does not tell, nothing is shed.
            let fill = queue_fill(socket).unwrap_or(0.0);
            let seconds = now.duration_since(self.since).as_secs_f64();
            shared.report(Report { taken: &self.taken, seconds, fill }, now, fleet);
            self.restart(now);
        }
    }

    fn restart(&mut self, now: Instant) {
        (self.taken, self.since) = ([0; CLIENT_BUCKETS], now);
    }
}

/// The group of a client.
fn bucket(client: IpAddr) -> usize {
    client_bucket(match client.to_canonical() {
        IpAddr::V4(client) => client.octets(),
        IpAddr::V6(client) => (client.to_bits() as u32).to_be_bytes(),
    })
}

/// How much of a socket's receive queue is in use: 0 to about 1 (`SO_MEMINFO`, kernel 4.12).
fn queue_fill(socket: RawFd) -> io::Result<f64> {
    /// `SO_MEMINFO` (`asm-generic/socket.h`).
    const SO_MEMINFO: libc::c_int = 55;
    /// The first two: `SK_MEMINFO_RMEM_ALLOC`, `SK_MEMINFO_RCVBUF` (`linux/sock_diag.h`).
    const WORDS: usize = 2;
    let mut words = [0_u32; WORDS];
    let mut size = size_of_val(&words) as libc::socklen_t;
    // SAFETY: the kernel writes at most `size` bytes there.
    let result = unsafe {
        libc::getsockopt(socket, libc::SOL_SOCKET, SO_MEMINFO, words.as_mut_ptr().cast(), &raw mut size)
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let [used, allowed] = words;
    Ok(f64::from(used) / f64::from(allowed.max(1)))
}

impl Shared {
    /// Takes a thread's report, and tells the program what follows from it.
    fn report(&self, report: Report<'_>, now: Instant, fleet: &Fleet) {
        // Without a program there is nobody to shed.
        let Some(went_up) = fleet.fast_path.went_up() else { return };
        let decision = self.limiter.lock().report(report, went_up, now);
        match decision {
            Decision::Nothing => {}
            Decision::Shed(shares) => {
                self.is_shedding.store(true, Ordering::Relaxed);
                fleet.fast_path.shed(Some(&shares), ORDER);
            }
            Decision::End => {
                self.is_shedding.store(false, Ordering::Relaxed);
                fleet.fast_path.shed(None, ORDER);
            }
        }
    }
}

//----------- What is shed ---------------------------------------------------

/// What follows from a report.
#[derive(Debug, PartialEq)]
enum Decision {
    /// Things stay as they are.
    Nothing,
    /// So much goes up from now on: of 2^32 - 1 queries, by group of clients.
    Shed(Box<[u32; CLIENT_BUCKETS]>),
    /// All goes up again.
    End,
}

/// Decides how much goes up.
#[derive(Debug)]
struct Limiter {
    /// When it decided last.
    decided: Option<Instant>,
    /// Queries taken a second by the threads that reported since then, by group.
    taken: [f64; CLIENT_BUCKETS],
    /// Queries that had gone up by then.
    went_up: u64,
    /// How full the fullest queue was since then.
    fill: f64,
    /// Windows in a row in which a queue was full.
    full_windows: u32,
    /// Queries a second that can be answered; `None`: nothing is shed.
    capacity: Option<f64>,
    /// Queries a second that come to the interface and are not answered there, by group.
    offered: [f64; CLIENT_BUCKETS],
    /// The part of them that goes up.
    shares: [f64; CLIENT_BUCKETS],
    /// When the log was told last.
    told: Option<Instant>,
}

impl Default for Limiter {
    fn default() -> Self {
        Self {
            decided: None,
            taken: [0.0; CLIENT_BUCKETS],
            went_up: 0,
            fill: 0.0,
            full_windows: 0,
            capacity: None,
            offered: [0.0; CLIENT_BUCKETS],
            shares: [1.0; CLIENT_BUCKETS],
            told: None,
        }
    }
}

impl Limiter {
    /// Takes in a report, and decides once a window; `went_up`: queries that went up at interfaces so far.
    fn report(&mut self, report: Report<'_>, went_up: u64, now: Instant) -> Decision {
        let Report { taken, seconds, fill } = report;
        for (sum, &more) in self.taken.iter_mut().zip(taken) {
            *sum += f64::from(more) / seconds;
        }
        self.fill = self.fill.max(fill);
        let elapsed = self.decided.map_or(Duration::MAX, |decided| now.saturating_duration_since(decided));
        if elapsed < WINDOW {
            return Decision::Nothing;
        }
        // After a pause the program sheds nothing any more, and the counts are of no known time.
        let decision = if elapsed > ORDER {
            self.forget()
        } else {
            let came = went_up.saturating_sub(self.went_up) as f64 / elapsed.as_secs_f64();
            self.decide(came, now)
        };
        (self.taken, self.fill) = ([0.0; CLIENT_BUCKETS], 0.0);
        (self.decided, self.went_up) = (Some(now), went_up);
        decision
    }

    fn forget(&mut self) -> Decision {
        let was_shedding = self.capacity.is_some();
        *self = Self { told: self.told, ..Self::default() };
        if was_shedding { Decision::End } else { Decision::Nothing }
    }

    /// Decides by what was reported; `came`: queries a second that went up, whether they found
    /// room in a queue or not.
    fn decide(&mut self, came: f64, now: Instant) -> Decision {
        let taken: f64 = self.taken.iter().sum();
        // A queue drops and delays the queries of all groups alike.
        let came_for_each = if taken > 0.0 { came / taken } else { 1.0 };
        for ((offered, &taken), share) in self.offered.iter_mut().zip(&self.taken).zip(self.shares) {
            *offered = (*offered + taken * came_for_each / share) / 2.0;
        }
        let is_empty = self.fill <= EMPTY;
        let capacity = match self.capacity {
            // The threads had enough to do: this is what they can.
            Some(capacity) if !is_empty => (capacity + taken) / 2.0,
            Some(capacity) => GROWTH * capacity,
            None => {
                self.full_windows = if self.fill >= FULL { self.full_windows + 1 } else { 0 };
                if self.full_windows < FULL_WINDOWS {
                    return Decision::Nothing;
                }
                self.tell(now);
                taken
            }
        };
        let limit = capacity * (1.0 + DRAIN * (EMPTY / 2.0 - self.fill)).max(0.5);
        if is_empty && self.offered.iter().sum::<f64>() <= limit {
            return self.forget();
        }
        self.capacity = Some(capacity);
        self.shares = fair_shares(&self.offered, limit);
        let of_all = |share| (share * f64::from(u32::MAX)) as u32;
        Decision::Shed(Box::new(self.shares.map(of_all)))
    }

    /// Tells the log that something is shed.
    fn tell(&mut self, now: Instant) {
        if self.told.is_some_and(|told| now.saturating_duration_since(told) < TELL_INTERVAL) {
            return;
        }
        self.told = Some(now);
        tracing::warn!(
            "more queries come up than the UDP threads can answer: interfaces drop a part of them, the \
             most from clients that ask the most; names that interfaces answer are not concerned \
             (outcome \"shed\" of bosh_dns_xdp_fast_path_packets_total counts; xdp.shed: false turns it off)"
        );
    }
}

/// The part of what each group offers that may go up, so that all together stay within `limit`
/// and no group gets more than another one that gets less than it offers.
fn fair_shares(offered: &[f64; CLIENT_BUCKETS], limit: f64) -> [f64; CLIENT_BUCKETS] {
    let mut ascending = *offered;
    ascending.sort_by(f64::total_cmp);
    let (mut left, mut part) = (limit, f64::INFINITY);
    for (at, &rate) in ascending.iter().enumerate() {
        let equal = left / (CLIENT_BUCKETS - at) as f64;
        if rate > equal {
            part = equal;
            break;
        }
        left -= rate;
    }
    offered.map(|rate| if rate <= part { 1.0 } else { (part / rate).clamp(LEAST_SHARE, 1.0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Queries a second that are answered.
    const CAPACITY: f64 = 100_000.0;

    /// Queries that a queue holds.
    const QUEUE: f64 = 4_000.0;

    /// A server that answers [`CAPACITY`] of what comes, with a queue before it.
    struct Overloaded {
        limiter: Limiter,
        shares: Option<Box<[u32; CLIENT_BUCKETS]>>,
        /// Queries in the queue, by group.
        queue: [f64; CLIENT_BUCKETS],
        windows: u32,
        /// Queries that went up so far.
        went_up: f64,
    }

    impl Overloaded {
        /// One that has nothing to do.
        fn new() -> Self {
            Self {
                limiter: Limiter::default(),
                shares: None,
                queue: [0.0; CLIENT_BUCKETS],
                windows: 0,
                went_up: 0.0,
            }
        }

        /// One window; `offered`: queries a second by group. Returns those answered.
        fn window(&mut self, start: Instant, offered: &[f64; CLIENT_BUCKETS]) -> [f64; CLIENT_BUCKETS] {
            let seconds = WINDOW.as_secs_f64();
            for (bucket, (queued, rate)) in self.queue.iter_mut().zip(offered).enumerate() {
                let share = self
                    .shares
                    .as_ref()
                    .map_or(1.0, |shares| f64::from(shares[bucket]) / f64::from(u32::MAX));
                *queued += rate * seconds * share;
                self.went_up += rate * seconds * share;
            }
            let came: f64 = self.queue.iter().sum();
            let answered = self.queue.map(|queued| queued * (CAPACITY * seconds / came).min(1.0));
            let left = came - answered.iter().sum::<f64>();
            let kept = (QUEUE / left.max(1.0)).min(1.0);
            for (queued, answered) in self.queue.iter_mut().zip(answered) {
                *queued = (*queued - answered) * kept;
            }
            self.windows += 1;
            let counts = answered.map(|answered| answered.round() as u32);
            let left = left.min(QUEUE);
            let report = Report { taken: &counts, seconds, fill: left / QUEUE };
            let now = start + self.windows * WINDOW;
            match self.limiter.report(report, self.went_up as u64, now) {
                Decision::Nothing => {}
                Decision::Shed(shares) => self.shares = Some(shares),
                Decision::End => self.shares = None,
            }
            answered.map(|answered| answered / seconds)
        }

        /// So many windows; what is answered a second in the second half of them, by group.
        fn windows(&mut self, count: u32, offered: &[f64; CLIENT_BUCKETS]) -> [f64; CLIENT_BUCKETS] {
            let start = Instant::now();
            let mut sums = [0.0; CLIENT_BUCKETS];
            for window in 0..count {
                let answered = self.window(start, offered);
                if window >= count / 2 {
                    for (sum, answered) in sums.iter_mut().zip(answered) {
                        *sum += answered;
                    }
                }
            }
            sums.map(|sum| sum / f64::from(count - count / 2))
        }
    }

    #[test]
    fn what_can_be_answered_is_answered_and_the_rest_shed_before_the_queue() {
        let mut server = Overloaded::new();
        let mut offered = [0.0; CLIENT_BUCKETS];
        (offered[3], offered[5]) = (1_000_000.0, 2_000.0);
        let answered = server.windows(400, &offered);
        assert!(answered.iter().sum::<f64>() > 0.95 * CAPACITY, "{answered:?}");
        assert!(answered[5] > 0.98 * offered[5], "a modest client loses nothing: {}", answered[5]);
        let queued: f64 = server.queue.iter().sum();
        assert!(queued < 0.75 * QUEUE, "{queued} wait: the queue drops nothing");
        // It ends with the flood.
        offered[3] = 1_000.0;
        server.windows(100, &offered);
        assert_eq!(server.shares, None);
    }

    #[test]
    fn what_can_be_answered_is_never_shed() {
        let mut server = Overloaded::new();
        let offered = [0.9 * CAPACITY / CLIENT_BUCKETS as f64; CLIENT_BUCKETS];
        let start = Instant::now();
        for _ in 0..200 {
            server.window(start, &offered);
            assert_eq!(server.shares, None);
        }
        // Nor is a burst that fills the queue for a moment.
        server.window(start, &[20.0 * CAPACITY / CLIENT_BUCKETS as f64; CLIENT_BUCKETS]);
        assert_eq!(server.shares, None);
    }

    #[test]
    fn a_pause_ends_what_was_ordered_before() {
        let mut limiter = Limiter::default();
        let start = Instant::now();
        let report = Report { taken: &[100; CLIENT_BUCKETS], seconds: 0.01, fill: 1.0 };
        let decisions: Vec<Decision> = (0..5)
            .map(|window| limiter.report(report, 10_000 * u64::from(window), start + window * WINDOW))
            .collect();
        assert!(matches!(decisions[4], Decision::Shed(_)), "{decisions:?}");
        assert_eq!(limiter.report(report, 60_000, start + 5 * WINDOW + ORDER), Decision::End);
    }

    #[test]
    fn what_was_not_counted_is_not_taken_for_a_lack_of_capacity() {
        let mut limiter = Limiter::default();
        let start = Instant::now();
        // A thread that found its queue empty meanwhile counts anew, whenever the limiter decided last.
        let report = Report { taken: &[100; CLIENT_BUCKETS], seconds: 0.01, fill: 1.0 };
        for at in [0, 50, 100, 150] {
            limiter.report(report, at * 1_000, start + Duration::from_millis(at));
        }
        assert_eq!(limiter.capacity.map(f64::round), Some(640_000.0));
    }

    #[test]
    fn equal_parts_go_to_those_who_want_more() {
        let mut offered = [0.0; CLIENT_BUCKETS];
        (offered[0], offered[1], offered[2]) = (10.0, 100.0, 1_000.0);
        let shares = fair_shares(&offered, 70.0);
        assert_eq!((shares[0], shares[1] * 100.0, shares[2] * 1_000.0), (1.0, 30.0, 30.0));
        assert_eq!(fair_shares(&offered, 2_000.0), [1.0; CLIENT_BUCKETS]);
    }

    #[test]
    fn the_kernel_tells_how_full_a_queue_is() {
        use std::os::fd::AsRawFd as _;
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(queue_fill(socket.as_raw_fd()).unwrap(), 0.0);
        let address = socket.local_addr().unwrap();
        for _ in 0..10 {
            socket.send_to(&[0; 1000], address).unwrap();
        }
        let fill = queue_fill(socket.as_raw_fd()).unwrap();
        assert!(0.0 < fill && fill < 1.0, "{fill}");
    }
}
