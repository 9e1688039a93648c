//! Sends queries and receives replies through UDP sockets, and counts both as the programs in the kernel do
//! (`ebpf/src/main.rs`): for latencies as an application has them, and where no such program can run.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    os::fd::{AsFd as _, AsRawFd as _},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result};
use dns_kit::mmsg::{Incoming, ReceiveMetadata};
use nix::{
    errno::Errno,
    getsockopt_impl, libc,
    net::if_::if_nametoindex,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sockopt_impl,
    sys::{
        socket::{MsgFlags, getsockopt, send, setsockopt, sockopt},
        timerfd::{self, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags},
    },
    time::{ClockId, clock_gettime},
};

use crate::{
    frames::{Route, message},
    orders::{
        BUCKETS, Counts, FRACTION_BITS, Frame, MAX_FRAME_LEN, Orders, STALL_BITS, Slot, bucket_of,
        sets,
    },
};

/// Maximum number of sockets of a thread, which waits for all of them at once.
pub(crate) const MAX_SOCKETS: u64 = 64;

/// Maximum number of queries on their way at full speed, for each thread; dnsperf's (`-q`) by default. Without a limit
/// sockets would drop most of them.
const MAX_OUTSTANDING: usize = 100;

/// Time after which a query is given up at full speed, and makes room for the next one. Its reply is a late one.
const MAX_AGE: Duration = Duration::from_secs(1);

/// Maximum number of queries sent, and of replies taken from a socket, before the thread does the other.
const MAX_BATCH: usize = 32;

/// Length of the part of a reply that is read: its header.
const HEADER_LEN: usize = 12;

/// Nanoseconds for which a thread stays awake before a query is due. A timer of a virtual machine (AMD EPYC, Linux 6.18) woke it 23 µs
/// late, which would be latencies of the server; a thread that never sleeps sees none of the wake-ups that an application has.
const AWAKE: u64 = 20_000;

/// Maximum nanoseconds until a thread looks at its orders.
const MAX_SLEEP: u64 = 250_000;

sockopt_impl!(
    /// Memory of a socket, and how many datagrams found no room (linux/sock_diag.h).
    MemoryInfo,
    GetOnly,
    libc::SOL_SOCKET,
    libc::SO_MEMINFO,
    [u32; 9]
);

/// Queries, and the threads that send them.
pub(crate) struct Sockets {
    /// Endpoints of the servers, whose frames follow one another in equal parts.
    servers: Vec<SocketAddr>,
    frames: Vec<Frame>,
    counters: Vec<FrameCounters>,
    sequence: Vec<u32>,
    threads: BTreeMap<usize, SocketThread>,
    /// Errors of sending and receiving by number: as many as there are.
    errors: Mutex<BTreeMap<i32, u64>>,
}

/// Counters of a [`Frame`], which all threads change.
#[derive(Default)]
struct FrameCounters {
    sent: AtomicU64,
    received: AtomicU64,
    answers: AtomicU64,
}

/// What a thread shares with the measurement.
struct SocketThread {
    /// One for each source port.
    sockets: Vec<UdpSocket>,
    /// Locked while queries are sent, so that none leaves after its load has ended.
    exchange: Mutex<Exchange>,
    latencies: Vec<AtomicU64>,
    service_times: Vec<AtomicU64>,
}

/// Orders of a thread, and its counts so far.
#[derive(Default)]
struct Exchange {
    orders: Orders,
    counts: Counts,
}

/// The moments in which queries were sent, and in which those were due whose replies came.
#[derive(Clone, Copy)]
pub(crate) struct Moments<'a> {
    pub(crate) sent_at: &'a [AtomicU64],
    pub(crate) received_at: &'a [AtomicU64],
    pub(crate) bits: u64,
}

impl Moments<'_> {
    fn count(&self, moments: &[AtomicU64], due: u64) {
        // Their number is a power of two. Without a record there is one, which nobody reads.
        add(
            &moments[(due >> self.bits) as usize & (moments.len() - 1)],
            1,
        );
    }
}

impl Sockets {
    /// Prepares queries to these servers.
    pub(crate) fn new(routes: &[Route], frames: &[Frame], sequence: &[u32]) -> Self {
        let mut counters = Vec::new();
        counters.resize_with(frames.len(), FrameCounters::default);
        Self {
            servers: routes.iter().map(|route| route.server).collect(),
            frames: frames.to_vec(),
            counters,
            sequence: sequence.to_vec(),
            threads: BTreeMap::new(),
            errors: Mutex::default(),
        }
    }

    /// Adds the thread of a CPU, which sends from these endpoints, by this interface if one is named.
    pub(crate) fn add_thread(
        &mut self,
        cpu: usize,
        sources: &[SocketAddr],
        interface: Option<&str>,
    ) -> Result<()> {
        let mut sockets = Vec::with_capacity(sources.len());
        for &source in sources {
            sockets.push(open(source, interface)?);
        }
        let thread = SocketThread {
            sockets,
            exchange: Mutex::default(),
            latencies: buckets(),
            service_times: buckets(),
        };
        self.threads.insert(cpu, thread);
        Ok(())
    }

    /// Returns the server of an element of the sequence.
    fn server_of(&self, element: u64) -> Result<SocketAddr> {
        let frame = self.sequence[element as usize] as usize;
        let server = frame * self.servers.len() / self.frames.len();
        self.servers.get(server).copied().context("no server")
    }

    fn thread(&self, cpu: usize) -> Result<&SocketThread> {
        self.threads.get(&cpu).context("no thread of this CPU")
    }

    /// Returns the orders of a CPU.
    pub(crate) fn orders(&self, cpu: usize) -> Result<Orders> {
        Ok(lock(&self.thread(cpu)?.exchange).orders)
    }

    /// Replaces the orders of a CPU.
    pub(crate) fn put(&self, cpu: usize, orders: Orders) -> Result<()> {
        lock(&self.thread(cpu)?.exchange).orders = orders;
        Ok(())
    }

    /// Returns the counts of each CPU.
    pub(crate) fn counts(&self) -> BTreeMap<usize, Counts> {
        let mut cpus = BTreeMap::new();
        for (&cpu, thread) in &self.threads {
            cpus.insert(cpu, lock(&thread.exchange).counts);
        }
        cpus
    }

    /// Returns the replies by latency, and by service time.
    pub(crate) fn times(&self) -> [Vec<u64>; 2] {
        let mut latencies = vec![0; BUCKETS];
        let mut service_times = vec![0; BUCKETS];
        for thread in self.threads.values() {
            add_all(&mut latencies, &thread.latencies);
            add_all(&mut service_times, &thread.service_times);
        }
        [latencies, service_times]
    }

    /// Returns the frames with their counters.
    pub(crate) fn frames(&self) -> Vec<Frame> {
        let mut frames = self.frames.clone();
        for (frame, counters) in frames.iter_mut().zip(&self.counters) {
            frame.sent = counters.sent.load(Ordering::Relaxed);
            frame.received = counters.received.load(Ordering::Relaxed);
            frame.answers = counters.answers.load(Ordering::Relaxed);
        }
        frames
    }

    /// Returns the number of replies that the sockets had no room for.
    pub(crate) fn dropped(&self) -> Result<u64> {
        let mut dropped = 0;
        for thread in self.threads.values() {
            for socket in &thread.sockets {
                let info = getsockopt(socket, MemoryInfo)?;
                dropped += u64::from(info[libc::SK_MEMINFO_DROPS as usize]);
            }
        }
        Ok(dropped)
    }

    /// Returns the number of each error of sending or receiving.
    pub(crate) fn errors(&self) -> BTreeMap<i32, u64> {
        lock(&self.errors).clone()
    }

    fn note(&self, error: i32) {
        *lock(&self.errors).entry(error).or_default() += 1;
    }

    /// Sends and receives as the thread of a CPU until the load is over.
    pub(crate) fn run(&self, cpu: usize, moments: Moments<'_>, over: &AtomicBool) -> Result<()> {
        let clock = timerfd::ClockId::CLOCK_MONOTONIC;
        let timer = TimerFd::new(clock, TimerFlags::TFD_CLOEXEC)?;
        let mut set_to = 0;
        let thread = self.thread(cpu)?;
        let mut polled = Vec::with_capacity(thread.sockets.len());
        for socket in &thread.sockets {
            polled.push(PollFd::new(socket.as_fd(), PollFlags::POLLIN));
        }
        polled.push(PollFd::new(timer.as_fd(), PollFlags::POLLIN));
        let mut incoming = Incoming::<MAX_BATCH, HEADER_LEN>::new(ReceiveMetadata::Nothing);
        let mut flight = Flight::new(self, thread, moments);
        while !over.load(Ordering::Relaxed) {
            let wake_up = {
                let mut exchange = lock(&thread.exchange);
                let wake_up = flight.send_due(&exchange.orders)?;
                exchange.counts = flight.counts;
                wake_up
            };
            // The kernel cancels a timeout of poll(2) when a reply comes. In a virtual machine that takes 3 to 5 µs, before the
            // reply is read. A separate timer is not cancelled.
            let timeout = match wake_up {
                None => PollTimeout::ZERO,
                Some(_) => PollTimeout::NONE,
            };
            if let Some(time) = wake_up.filter(|&time| time != set_to) {
                set_to = time;
                let expiration = Expiration::OneShot(Duration::from_nanos(time).into());
                timer.set(expiration, TimerSetTimeFlags::TFD_TIMER_ABSTIME)?;
            }
            match poll(&mut polled, timeout) {
                Ok(_) => {}
                Err(Errno::EINTR) => continue,
                Err(error) => return Err(error).context("cannot wait for replies"),
            }
            for (port, socket) in polled[..thread.sockets.len()].iter().enumerate() {
                if socket.any() != Some(false) {
                    flight.receive(port, &mut incoming)?;
                }
            }
        }
        lock(&thread.exchange).counts = flight.counts;
        Ok(())
    }
}

fn buckets() -> Vec<AtomicU64> {
    let mut buckets = Vec::new();
    buckets.resize_with(BUCKETS, AtomicU64::default);
    buckets
}

fn add_all(sums: &mut [u64], counts: &[AtomicU64]) {
    for (sum, count) in sums.iter_mut().zip(counts) {
        *sum += count.load(Ordering::Relaxed);
    }
}

/// Opens a socket at an endpoint of this machine.
fn open(mut source: SocketAddr, interface: Option<&str>) -> Result<UdpSocket> {
    // A link-local address exists once for each interface.
    if let (SocketAddr::V6(source), Some(interface)) = (&mut source, interface) {
        source.set_scope_id(if_nametoindex(interface)?);
    }
    let socket = UdpSocket::bind(source).with_context(|| {
        format!(
            "cannot send from {source}: --local takes addresses of this machine, --ports those that nothing else uses"
        )
    })?;
    if let Some(interface) = interface {
        setsockopt(&socket, sockopt::BindToDevice, &interface.into())
            .with_context(|| format!("cannot send by the interface {interface:?}"))?;
    }
    Ok(socket)
}

/// Returns the address at a place in a range.
pub(crate) fn nth_address(first: IpAddr, place: u32) -> IpAddr {
    match first {
        IpAddr::V4(first) => Ipv4Addr::from_bits(first.to_bits() + place).into(),
        IpAddr::V6(first) => Ipv6Addr::from_bits(first.to_bits() + u128::from(place)).into(),
    }
}

/// Queries of a thread on their way.
struct Flight<'a> {
    sockets: &'a Sockets,
    thread: &'a SocketThread,
    moments: Moments<'a>,
    counts: Counts,
    /// By set and id, see [`sets`].
    slots: Vec<Slot>,
    /// When the query of each slot was sent.
    sent_at: Vec<u64>,
    set_mask: u64,
    /// Slots with a query whose reply is awaited.
    awaited: usize,
    /// Queries sent in all loads: their lowest 16 bits are ids. None before the oldest one is awaited at full speed.
    number: u64,
    oldest: u64,
    /// The current load, when it began, and when its current or next burst is due: nanoseconds since then times
    /// 2^[`FRACTION_BITS`].
    load: u64,
    began: u64,
    due: u64,
    /// Queries of the current burst that are left.
    left: u64,
    /// Index of the next element of the sequence.
    next: u64,
}

impl<'a> Flight<'a> {
    fn new(sockets: &'a Sockets, thread: &'a SocketThread, moments: Moments<'a>) -> Self {
        let sets = sets(thread.sockets.len() as u64);
        Self {
            sockets,
            thread,
            moments,
            counts: lock(&thread.exchange).counts,
            slots: vec![Slot::default(); (sets as usize) << 16],
            sent_at: vec![0; (sets as usize) << 16],
            set_mask: sets - 1,
            awaited: 0,
            number: 0,
            oldest: 0,
            load: 0,
            began: 0,
            due: 0,
            left: 0,
            next: 0,
        }
    }

    /// Sends a batch of what is due; returns the time of the next look at it, unless more may be due now.
    fn send_due(&mut self, orders: &Orders) -> Result<Option<u64>> {
        if orders.length == 0 {
            return Ok(Some(next_look(now()?)));
        }
        if self.load != orders.load {
            self.begin(orders)?;
        }
        for _ in 0..MAX_BATCH {
            let now = now()?;
            let Some(due) = self.due(orders, now) else {
                return Ok(Some(self.wake_up(orders, now)));
            };
            self.send(orders, due, now);
        }
        Ok(None)
    }

    /// Begins another load.
    fn begin(&mut self, orders: &Orders) -> Result<()> {
        // Replies to the load before are late ones, and take no part in the limit of this one.
        self.oldest = self
            .oldest
            .max(self.number.saturating_sub(self.slots.len() as u64));
        while self.oldest < self.number {
            self.free(self.slot_of(self.oldest));
            self.oldest += 1;
        }
        let server = self.sockets.server_of(orders.first)?;
        for socket in &self.thread.sockets {
            let connected = socket.connect(server);
            connected.with_context(|| format!("no route to {server}"))?;
        }
        self.load = orders.load;
        self.began = now()?;
        self.due = orders.delay;
        self.left = 0;
        Ok(())
    }

    fn slot_of(&self, number: u64) -> usize {
        let set = (number >> 16) & self.set_mask;
        ((set << 16) | (number & 0xffff)) as usize
    }

    /// Awaits no reply to the query of a slot any more.
    fn free(&mut self, slot: usize) {
        if self.slots[slot].port != 0 {
            self.slots[slot].port = 0;
            self.awaited -= 1;
        }
    }

    /// Returns when the next query was due, if it is due.
    fn due(&mut self, orders: &Orders, now: u64) -> Option<u64> {
        if orders.interval == 0 {
            return self.has_room(now).then_some(now);
        }
        if self.left == 0 {
            let late = ((now - self.began) << FRACTION_BITS).checked_sub(self.due)?;
            let backlog = orders.interval * (orders.backlog + orders.burst);
            if late > backlog {
                let skipped = (late - backlog) / orders.interval;
                self.skip(skipped, skipped * orders.interval, late >> FRACTION_BITS);
            }
            self.left = orders.burst;
        }
        self.left -= 1;
        let due = self.began + (self.due >> FRACTION_BITS);
        if self.left == 0 {
            self.due += orders.interval * orders.burst;
        }
        Some(due)
    }

    /// Skips queries that are due for too long.
    fn skip(&mut self, count: u64, time: u64, latency: u64) {
        self.counts.skipped += count;
        if time >= 1 << (STALL_BITS + FRACTION_BITS) {
            self.counts.stalled += count;
        }
        self.due += time;
        // Else a stall of the CPU, which may be the server's work on it, would improve the latencies.
        add(&self.thread.latencies[bucket_of(latency)], count);
    }

    /// Returns whether another query may leave at full speed. The oldest ones are given up, or a network that loses some
    /// would end the load.
    fn has_room(&mut self, now: u64) -> bool {
        while self.awaited >= MAX_OUTSTANDING && self.oldest < self.number {
            let slot = self.slot_of(self.oldest);
            let Slot { time, port, .. } = self.slots[slot];
            if port != 0 && Duration::from_nanos(now.saturating_sub(time)) < MAX_AGE {
                return false;
            }
            self.free(slot);
            self.oldest += 1;
        }
        true
    }

    /// Returns when the thread must wake up if nothing is due now.
    fn wake_up(&self, orders: &Orders, now: u64) -> u64 {
        if orders.interval == 0 {
            return next_look(now);
        }
        let due = self.began + (self.due >> FRACTION_BITS);
        due.saturating_sub(AWAKE).min(next_look(now))
    }

    /// Sends the next query.
    fn send(&mut self, orders: &Orders, due: u64, now: u64) {
        let at = if self.next < orders.length {
            self.next
        } else {
            0
        };
        self.next = at + 1;
        let frame = self.sockets.sequence[(orders.first + at) as usize];
        let number = self.number;
        self.number += 1;
        // Shifted with each set, so that each id meets each port.
        let port = ((number + (number >> 16)) % self.thread.sockets.len() as u64) as usize;
        let mut bytes = [0; MAX_FRAME_LEN];
        let query = message(&self.sockets.frames[frame as usize]);
        let bytes = &mut bytes[..query.len()];
        bytes.copy_from_slice(query);
        if let Some(id) = bytes.first_chunk_mut() {
            *id = (number as u16).to_be_bytes();
        }
        let slot = self.slot_of(number);
        self.free(slot);
        let socket = self.thread.sockets[port].as_raw_fd();
        // Without waiting: a query that finds no room is one that was not sent when it was due.
        if let Err(error) = send(socket, bytes, MsgFlags::MSG_DONTWAIT) {
            self.sockets.note(error as i32);
            self.counts.skipped += 1;
            return;
        }
        self.slots[slot] = Slot {
            time: due,
            frame,
            port: port as u32 + 1,
        };
        self.sent_at[slot] = now;
        self.awaited += 1;
        self.counts.sent += 1;
        add(&self.sockets.counters[frame as usize].sent, 1);
        self.moments.count(self.moments.sent_at, due);
    }

    /// Receives replies to one of our ports.
    fn receive(
        &mut self,
        port: usize,
        incoming: &mut Incoming<MAX_BATCH, HEADER_LEN>,
    ) -> Result<()> {
        let socket = self.thread.sockets[port].as_raw_fd();
        match incoming.receive(socket, libc::MSG_DONTWAIT) {
            Ok(count) => {
                let now = now()?;
                for reply in incoming.datagrams(count) {
                    self.count(port, reply.bytes, now);
                }
            }
            // A reply with a wrong checksum makes a socket readable, and is dropped when it is read.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // Such as ECONNREFUSED, of an ICMP message. The load goes on: a server may restart.
            Err(error) => self.sockets.note(error.raw_os_error().unwrap_or(0)),
        }
        Ok(())
    }

    /// Counts a reply that was received at this time.
    fn count(&mut self, port: usize, reply: &[u8], now: u64) {
        // Id, flags, number of questions, number of answers.
        let Some(header) = reply.first_chunk().copied().map(u64::from_be_bytes) else {
            return;
        };
        let flags = header >> 32;
        if flags & 0x8000 == 0 {
            return;
        }
        let id = header >> 48;
        let set = (port as u64).wrapping_sub(id) & self.set_mask;
        let place = ((set << 16) | id) as usize;
        let slot = self.slots[place];
        if slot.port != port as u32 + 1 {
            self.counts.late += 1;
            return;
        }
        // A second reply to the same query is a late one.
        self.free(place);
        let latency = now.saturating_sub(slot.time);
        add(&self.thread.latencies[bucket_of(latency)], 1);
        let service_time = now.saturating_sub(self.sent_at[place]);
        add(&self.thread.service_times[bucket_of(service_time)], 1);
        self.counts.rcodes[(flags & 0xf) as usize] += 1;
        let counters = &self.sockets.counters[slot.frame as usize];
        let answers = (header & 0xffff) + 1;
        // Only the first reply finds 0.
        let relaxed = Ordering::Relaxed;
        let expected = counters
            .answers
            .compare_exchange(0, answers, relaxed, relaxed);
        if expected.is_err_and(|expected| expected != answers) {
            self.counts.different += 1;
        }
        add(&counters.received, 1);
        self.moments.count(self.moments.received_at, slot.time);
    }
}

/// Returns when a thread looks at its orders again: the same time for all waits until then, so that its timer is rarely set.
fn next_look(now: u64) -> u64 {
    (now / MAX_SLEEP + 1) * MAX_SLEEP
}

/// Returns the nanoseconds of the clock that `bpf_ktime_get_ns` reads.
pub(crate) fn now() -> Result<u64> {
    let time = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?);
    Ok(time.as_nanos() as u64)
}

fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Holders do not panic between two changes that belong together.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Runs `test` with a thread of four ports, whose queries nobody answers.
    fn with_flight(test: impl FnOnce(&mut Flight<'_>)) {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let route = Route {
            hardware: [[0; 6]; 2],
            source: [127, 0, 0, 1].into(),
            server: server.local_addr().unwrap(),
        };
        let query = b"\0\0\x01\0\0\x01\0\0\0\0\0\0\x01a\0\0\x01\0\x01";
        let frame = route.frame(query).unwrap().unwrap();
        let mut sockets = Sockets::new(&[route], &[frame; 2], &[0, 1, 1]);
        let source = SocketAddr::new(route.source, 0);
        sockets.add_thread(3, &[source; 4], None).unwrap();
        let records = [(); 2].map(|()| [const { AtomicU64::new(0) }; 4]);
        let moments = Moments {
            sent_at: &records[0],
            received_at: &records[1],
            bits: 30,
        };
        test(&mut Flight::new(
            &sockets,
            sockets.thread(3).unwrap(),
            moments,
        ));
        let sent = server.recv(&mut [0; 64]).unwrap();
        assert_eq!(sent, query.len());
    }

    fn orders(interval: u64) -> Orders {
        Orders {
            load: 1,
            interval: interval << FRACTION_BITS,
            burst: 1,
            backlog: 64,
            length: 3,
            ..Orders::default()
        }
    }

    /// Sends all that is due.
    fn send_all(flight: &mut Flight<'_>, orders: &Orders, now: u64) {
        while let Some(due) = flight.due(orders, now) {
            flight.send(orders, due, now);
        }
    }

    fn reply(id: u16, flags: u16, answers: u16) -> Vec<u8> {
        [id, flags, 1, answers, 0, 0].map(u16::to_be_bytes).concat()
    }

    #[test]
    fn replies_are_matched_by_port_and_id() {
        with_flight(|flight| {
            let orders = orders(0);
            flight.begin(&orders).unwrap();
            for due in [100, 200, 300, 400] {
                flight.send(&orders, due, due + 50);
            }
            assert_eq!((flight.counts.sent, flight.awaited), (4, 4));
            for nothing in [
                &reply(1, 0x0100, 0)[..],
                &reply(1, 0x8000, 0)[..7],
                b"",
                b"\0\0",
            ] {
                flight.count(1, nothing, 1000);
            }
            assert_eq!(flight.counts.late, 0);
            // Another port's, one that was never sent, and a second one.
            flight.count(2, &reply(1, 0x8000, 0), 1000);
            flight.count(1, &reply(5, 0x8000, 0), 1000);
            assert_eq!((flight.counts.late, flight.counts.received()), (2, 0));
            flight.count(1, &reply(1, 0x8583, 2), 1000);
            flight.count(1, &reply(1, 0x8583, 2), 1000);
            assert_eq!((flight.counts.late, flight.counts.rcodes[3]), (3, 1));
            // Query 2 is the same one as query 1, query 3 the first one again.
            flight.count(2, &reply(2, 0x8000, 1), 1000);
            flight.count(3, &reply(3, 0x8000, 0), 1000);
            assert_eq!((flight.counts.no_error(), flight.counts.different), (2, 1));
            assert_eq!(flight.awaited, 1);
            for (times, time) in [
                (&flight.thread.latencies, 800),
                (&flight.thread.service_times, 750),
            ] {
                assert_eq!(times[bucket_of(time)].load(Ordering::Relaxed), 1);
            }
            let counted: Vec<[u64; 3]> = flight
                .sockets
                .frames()
                .iter()
                .map(|frame| [frame.sent, frame.received, frame.answers])
                .collect();
            assert_eq!(counted, [[2, 1, 1], [2, 2, 3]]);
            for (moments, count) in [(flight.moments.sent_at, 4), (flight.moments.received_at, 3)] {
                assert_eq!(moments[0].load(Ordering::Relaxed), count);
            }
        });
    }

    #[test]
    fn full_speed_has_a_window() {
        with_flight(|flight| {
            let orders = orders(0);
            flight.begin(&orders).unwrap();
            let age = MAX_AGE.as_nanos() as u64;
            send_all(flight, &orders, SECOND);
            assert_eq!(flight.counts.sent, 100);
            assert_eq!(flight.due(&orders, SECOND + age - 1), None);
            assert_eq!(flight.wake_up(&orders, SECOND), SECOND + MAX_SLEEP);
            // A reply makes room, and so does age.
            flight.count(3, &reply(7, 0x8000, 0), SECOND + 1);
            send_all(flight, &orders, SECOND + 2);
            assert_eq!(flight.counts.sent, 101);
            send_all(flight, &orders, SECOND + age);
            assert_eq!((flight.counts.sent, flight.awaited), (200, 100));
            flight.count(0, &reply(4, 0x8000, 0), SECOND + age);
            assert_eq!((flight.counts.late, flight.awaited), (1, 100));
            // The next load has all of the window.
            flight.begin(&orders).unwrap();
            assert_eq!(flight.awaited, 0);
            flight.count(0, &reply(104, 0x8000, 0), SECOND + age);
            assert_eq!(flight.counts.late, 2);
            send_all(flight, &orders, SECOND + age);
            assert_eq!(flight.counts.sent, 300);
        });
    }

    #[test]
    fn queries_follow_a_schedule() {
        const MILLISECOND: u64 = SECOND / 1000;
        with_flight(|flight| {
            let orders = orders(MILLISECOND);
            flight.begin(&orders).unwrap();
            flight.began = SECOND;
            let at = |milliseconds: u64| SECOND + milliseconds * MILLISECOND;
            send_all(flight, &orders, at(1) - 1);
            assert_eq!((flight.counts.sent, flight.load), (1, 1));
            for (now, expected) in [
                (at(0), at(0) + MAX_SLEEP),
                (at(0) + 1, at(0) + MAX_SLEEP),
                (at(1) - AWAKE - 5, at(1) - AWAKE),
                (at(3), at(1) - AWAKE),
            ] {
                assert_eq!(flight.wake_up(&orders, now), expected, "{now}");
            }
            // From when they were due, and no more of them than the backlog.
            assert_eq!(flight.due(&orders, at(3)), Some(at(1)));
            assert_eq!(flight.due(&orders, at(1000)), Some(at(935)));
            assert_eq!((flight.counts.skipped, flight.counts.stalled), (933, 933));
            let latency = bucket_of(998 * MILLISECOND);
            assert_eq!(
                flight.thread.latencies[latency].load(Ordering::Relaxed),
                933
            );
            // Ended.
            let ended = Orders {
                length: 0,
                ..orders
            };
            let next = flight.send_due(&ended).unwrap().unwrap();
            assert!(next % MAX_SLEEP == 0 && next <= now().unwrap() + MAX_SLEEP);
            assert_eq!(flight.counts.sent, 1);
        });
    }

    #[test]
    fn burst_is_due_at_once() {
        with_flight(|flight| {
            let orders = Orders {
                burst: 3,
                ..orders(SECOND)
            };
            flight.begin(&orders).unwrap();
            flight.began = 0;
            for (now, sent) in [(0, 3), (3 * SECOND - 1, 3), (9 * SECOND, 12)] {
                let mut due = Vec::new();
                while let Some(moment) = flight.due(&orders, now) {
                    flight.send(&orders, moment, now);
                    due.push(moment);
                }
                for burst in due.chunks(3) {
                    assert_eq!(burst, [burst[0]; 3]);
                }
                assert_eq!(flight.counts.sent, sent, "{now}");
            }
            // At the same mean rate.
            assert_eq!(flight.due >> FRACTION_BITS, 12 * SECOND);
        });
    }

    #[test]
    fn replies_without_room_are_counted() {
        let mut sockets = Sockets::new(&[], &[], &[]);
        let loopback = "127.0.0.1:0".parse().unwrap();
        sockets.add_thread(0, &[loopback; 2], None).unwrap();
        assert_eq!(sockets.dropped().unwrap(), 0);
        let full = &sockets.threads[&0].sockets[1];
        // As little as the kernel allows.
        setsockopt(full, sockopt::RcvBuf, &0).unwrap();
        let server = UdpSocket::bind(loopback).unwrap();
        let mut sent = 0;
        while sockets.dropped().unwrap() == 0 {
            server
                .send_to(&[0; 12], full.local_addr().unwrap())
                .unwrap();
            sent += 1;
            assert!(sent < 1_000_000, "room for all");
        }
    }

    #[test]
    fn sources_are_in_range() {
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!(nth_address(address("10.9.1.0"), 255), address("10.9.1.255"));
        assert_eq!(nth_address(address("fd00::1:0"), 2), address("fd00::1:2"));
        let foreign = "192.0.2.1:0".parse().unwrap();
        let problem = open(foreign, None).unwrap_err().to_string();
        assert!(problem.contains("--local"), "{problem}");
        assert!(open("127.0.0.1:0".parse().unwrap(), Some("no-interface")).is_err());
    }
}
