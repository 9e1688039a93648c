//! Generates load and counts replies: in the kernel, by the programs of `ebpf/src/main.rs`, or through sockets.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::SocketAddr,
    ops::{Range, RangeInclusive},
    os::fd::{AsFd as _, AsRawFd as _},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    process::Command,
    slice,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use aya::{
    Ebpf, EbpfLoader, TestRun as _, TestRunAttrs, TestRunOptions,
    maps::{Array, Map, MapData, PerCpuArray},
    programs::{ProgramError, Xdp, XdpMode},
    util::nr_cpus,
};
use memmap2::{MmapMut, MmapOptions, MmapRaw};
use nix::{
    libc::{self, pthread_t},
    sched::{CpuSet, sched_setaffinity},
    sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction},
    unistd::{Pid, gettid},
};
use serde_json::Value;

use crate::{
    frames::Route,
    orders::{BUCKETS, Counts, FRACTION_BITS, Frame, Orders, Replies, sets},
    pauses::Moment,
    sockets::{self, MAX_SOCKETS, Moments, Sockets, lock},
};

/// The programs.
pub const OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/load"));

/// Frames that the kernel prepares and reuses: the maximum, so that few are prepared again while a ring holds 256.
const BATCH: u32 = 256;

/// Length at which a frame begins.
const START_LEN: usize = 64;

/// The same for frames with little tailroom: a page less 256 bytes of headroom, what the kernel puts before that (152
/// bytes on Linux 5.18, 112 on 6.18) and behind the frame (320), leaves 200 to 256 bytes behind it.
const SMALL_TAILROOM_START_LEN: usize = 3_152;

/// Runs of the program per system call, each a query or a moment of waiting. The end of the load interrupts the call;
/// between two calls nothing is sent for some RCU grace periods.
const RUNS: u32 = u32::MAX;

/// Time of a recorded load for its last replies, and for its end to be noticed.
const RECORDED_LONGER: Duration = Duration::from_secs(2);

/// Bits of the nanoseconds of the shortest moment that is recorded, about a sixteenth of a millisecond.
const MIN_MOMENT_BITS: u64 = 16;

/// Maximum number of moments; a long load has longer ones.
const MAX_MOMENTS: u64 = 1 << 18;

/// Bounds of the backlog: if the CPU could not send queries on time, those beyond it are skipped. A burst of all of them
/// would measure something else, and a veth pair's ring, which has had time to get empty, holds 256: room for a
/// burst of 16.
const MIN_BACKLOG: u64 = 64;
const MAX_BACKLOG: u64 = 240;

/// Maximum number of queries that are due at the same moment: what that ring has room for beside a backlog.
pub(crate) const MAX_BURST: i64 = 16;

/// Time whose queries may be late in any case. With the work of the kernel, and of a server's program that answers in it,
/// a batch of frames takes that long: where less may be late, the generator idles in the rest of a batch, and sends a
/// fifth less than it could.
const BATCH_TIME: Duration = Duration::from_micros(256);

/// Interrupts the system call.
const WAKE: Signal = Signal::SIGUSR1;

/// Rate of the queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// As many as possible.
    Saturate,
    /// A fixed rate, whether answered or not.
    Rate {
        /// Queries per second on average, by all CPUs together.
        rate: u32,
        /// Queries that are due at the same moment, of each CPU; 1 spaces them evenly.
        burst: u32,
    },
}

/// Queries of a generator, and where it sends them from.
#[derive(Clone, Debug)]
pub struct Settings<'a> {
    /// Interface that queries leave by.
    pub interface: &'a str,
    /// CPUs that generate the load.
    pub cpus: &'a [usize],
    /// Source ports, in equal parts for the CPUs.
    pub ports: RangeInclusive<u16>,
    /// Number of source addresses, up from the frames' own.
    pub addresses: u32,
    /// Ports of the servers, to recognize replies.
    pub servers: [u16; 2],
    /// The queries.
    pub frames: &'a [Frame],
    /// Indices of frames in the order of sending.
    pub sequence: &'a [u32],
}

impl Settings<'_> {
    /// Returns which packets are replies, and how loads of this length are recorded.
    fn replies(&self, length: Duration) -> Result<Replies> {
        let generators = self.cpus.len() as u64;
        ensure!(generators > 0, "no CPU to generate load");
        // Two threads of one CPU would have one schedule.
        let cpus: BTreeSet<usize> = self.cpus.iter().copied().collect();
        ensure!(cpus.len() == self.cpus.len(), "a CPU is named twice");
        ensure!(!self.sequence.is_empty(), "no queries");
        let all_ports = u64::from(self.ports.end() - self.ports.start()) + 1;
        // A reply finds the slot of its query by its port, and each slot belongs to one generator.
        let ports = all_ports / generators;
        ensure!(ports > 0, "fewer source ports than CPUs");
        let mut replies = Replies {
            servers: self.servers.map(u64::from),
            port: (*self.ports.start()).into(),
            ports,
            generators,
            set_mask: sets(ports) - 1,
            moments: 0,
            moment_bits: MIN_MOMENT_BITS,
        };
        if !length.is_zero() {
            let nanoseconds = (length + RECORDED_LONGER).as_nanos() as u64;
            // Longer moments rather than more of them: an hour takes no more memory than a minute.
            while nanoseconds >> replies.moment_bits > MAX_MOMENTS {
                replies.moment_bits += 1;
            }
            // A power of two, so that a mask makes the map a ring.
            replies.moments = (nanoseconds >> replies.moment_bits).next_power_of_two();
        }
        Ok(replies)
    }

    /// Returns the programs with maps of the sizes that they need.
    fn load(&self, replies: &Replies) -> Result<Ebpf> {
        let cpu_count = nr_cpus()
            .map_err(|(_file, error)| error)
            .context("the CPUs")?;
        let slots = (replies.generators * (replies.set_mask + 1)) << 16;
        // A map has an element at least.
        let moments = replies.moments.max(1);
        EbpfLoader::new()
            .map_max_entries("FRAMES", u32::try_from(self.frames.len())?)
            .map_max_entries("SEQUENCE", u32::try_from(self.sequence.len())?)
            .map_max_entries("ORDERS", u32::try_from(cpu_count)?)
            .map_max_entries("SLOTS", u32::try_from(slots)?)
            .map_max_entries("SENT_AT", u32::try_from(moments)?)
            .map_max_entries("RECEIVED_AT", u32::try_from(moments)?)
            .load(OBJECT)
            .context("cannot load the programs; run as root")
    }
}

/// Totals of all loads so far.
#[derive(Clone, Debug)]
pub struct Totals {
    /// Counters by CPU. A CPU counts the queries that it sent and the replies that it received.
    pub cpus: BTreeMap<usize, Counts>,
    /// Replies by latency, see [`crate::orders::bucket_of`].
    pub latencies: Vec<u64>,
    /// Replies by the time since their query was sent; empty without sockets: the kernel queues a program's frames.
    pub service_times: Vec<u64>,
}

impl Totals {
    /// Returns the sum of all CPUs.
    pub fn sum(&self) -> Counts {
        let mut sum = Counts::default();
        for counts in self.cpus.values() {
            sum.add(counts);
        }
        sum
    }
}

/// CPU time of the generating threads, as the scheduler accounts it.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuUse {
    /// Time on the CPU.
    pub used: Duration,
    /// Time in which the threads waited for their CPU.
    pub waited: Duration,
}

/// Sends queries and counts replies; programs in the kernel are detached when it is dropped.
pub struct Generator {
    engine: Engine,
    sent_at: Record,
    received_at: Record,
    replies: Replies,
    addresses: u32,
    cpus: Vec<usize>,
    sequence_len: u64,
    loads: Mutex<u64>,
    /// Length at which a frame begins.
    start_len: usize,
    over: AtomicBool,
    /// Whether a thread has ended although the load is not over.
    failed: AtomicBool,
    /// Generating threads.
    threads: Mutex<Vec<(pthread_t, Pid)>>,
}

/// What sends the queries.
enum Engine {
    Kernel(Box<Programs>),
    Sockets(Sockets),
}

/// The loaded programs.
struct Programs {
    object: Ebpf,
    orders: Mutex<Array<MapData, OrderWords>>,
    maps: Maps,
    frames: Array<MapData, FrameWords>,
    frame_count: u32,
    interface: u32,
}

/// [`Orders`] as words, a type that aya knows to be plain data.
type OrderWords = [u64; size_of::<Orders>() / 8];

type ReplyWords = [u64; size_of::<Replies>() / 8];

type CountWords = [u64; size_of::<Counts>() / 8];

type FrameWords = [u64; size_of::<Frame>() / 8];

/// Queries or replies by moment: the memory that a program counts in. System calls for each moment would take longer than
/// many a load.
struct Record(MmapRaw);

impl Record {
    fn of(object: &mut Ebpf, name: &str) -> Result<Self> {
        let Map::Array(array) = map_mut(object, name)? else {
            bail!("{name} is no array");
        };
        let length = array.info()?.max_entries() as usize * size_of::<u64>();
        let fd = array.fd().as_fd().as_raw_fd();
        let memory = MmapOptions::new().len(length).map_raw(fd);
        Ok(Self(memory.with_context(|| format!("cannot map {name}"))?))
    }

    /// Returns memory of this process for so many moments.
    fn anonymous(moments: u64) -> Result<Self> {
        let length = moments.max(1) as usize * size_of::<u64>();
        Ok(Self(MmapMut::map_anon(length)?.into()))
    }

    fn moments(&self) -> &[AtomicU64] {
        // SAFETY: mapped as long as `self`, and aligned, because mappings begin at a page's start. The programs change
        // the words atomically.
        unsafe {
            slice::from_raw_parts(self.0.as_mut_ptr().cast(), self.0.len() / size_of::<u64>())
        }
    }
}

/// Maps that the programs count in.
struct Maps {
    counts: PerCpuArray<MapData, CountWords>,
    latencies: PerCpuArray<MapData, [u64; BUCKETS]>,
}

impl Maps {
    fn of(object: &mut Ebpf) -> Result<Self> {
        Ok(Self {
            counts: map(object, "COUNTS")?.try_into()?,
            latencies: map(object, "LATENCIES")?.try_into()?,
        })
    }

    fn counts(&self) -> Result<BTreeMap<usize, Counts>> {
        let mut cpus = BTreeMap::new();
        for (cpu, words) in self.counts.get(&0, 0)?.iter().enumerate() {
            // The map has an element for each possible CPU, most of which take no part.
            let counts: Counts = zerocopy::transmute!(*words);
            if counts != Counts::default() {
                cpus.insert(cpu, counts);
            }
        }
        Ok(cpus)
    }

    fn totals(&self) -> Result<Totals> {
        let mut latencies = vec![0; BUCKETS];
        for of_cpu in self.latencies.get(&0, 0)?.iter() {
            for (sum, count) in latencies.iter_mut().zip(of_cpu) {
                *sum += count;
            }
        }
        Ok(Totals {
            cpus: self.counts()?,
            latencies,
            service_times: Vec::new(),
        })
    }
}

impl Generator {
    /// Loads the programs with these queries, and counts replies at the interface.
    pub fn new(settings: &Settings<'_>) -> Result<Self> {
        Self::recording(settings, Duration::ZERO)
    }

    /// Does the same for loads up to this length that are recorded, see [`Self::begin_record`].
    pub fn recording(settings: &Settings<'_>, length: Duration) -> Result<Self> {
        let replies = settings.replies(length)?;
        let mut object = settings.load(&replies)?;
        let mut frames: Array<MapData, FrameWords> = map(&mut object, "FRAMES")?.try_into()?;
        for (index, frame) in (0..).zip(settings.frames) {
            let words: FrameWords = zerocopy::transmute!(*frame);
            frames.set(index, words, 0)?;
        }
        let mut sequence: Array<_, u32> = map_mut(&mut object, "SEQUENCE")?.try_into()?;
        for (index, frame) in (0..).zip(settings.sequence) {
            sequence.set(index, frame, 0)?;
        }
        expect_replies(&mut object, replies)?;
        let orders = map(&mut object, "ORDERS")?.try_into()?;
        let maps = Maps::of(&mut object)?;
        let sent_at = Record::of(&mut object, "SENT_AT")?;
        let received_at = Record::of(&mut object, "RECEIVED_AT")?;
        program(&mut object, "generate")?
            .load()
            .context("the kernel cannot generate load (Linux 5.18); --sockets needs no program")?;
        attach(&mut object, "count", settings.interface, false)?;
        let programs = Programs {
            object,
            orders: Mutex::new(orders),
            maps,
            frames,
            frame_count: u32::try_from(settings.frames.len())?,
            interface: nix::net::if_::if_nametoindex(settings.interface)?,
        };
        let engine = Engine::Kernel(Box::new(programs));
        Ok(Self::of(settings, engine, replies, [sent_at, received_at]))
    }

    /// Generates the load through UDP sockets, which need no privilege. The frames of the routes' servers follow one
    /// another in equal parts. The sockets are bound to `interface`, if one is named, and not to that of the settings.
    pub fn through_sockets(
        settings: &Settings<'_>,
        routes: &[Route],
        interface: Option<&str>,
        length: Duration,
    ) -> Result<Self> {
        let replies = settings.replies(length)?;
        let Replies { port, ports, .. } = replies;
        ensure!(
            ports <= MAX_SOCKETS,
            "through sockets a CPU has at most {MAX_SOCKETS} source ports"
        );
        let addresses = u64::from(settings.addresses);
        ensure!(
            addresses <= ports * replies.generators,
            "through sockets each source address has a port: name as many (--ports)"
        );
        let source = routes.first().context("no server")?.source;
        ensure!(
            routes.iter().all(|route| route.source == source),
            "the servers are reached from different addresses; choose one (--local)"
        );
        let mut sockets = Sockets::new(routes, settings.frames, settings.sequence);
        for (turn, &cpu) in (0..).zip(settings.cpus) {
            let mut sources = Vec::new();
            for place in turn * ports..(turn + 1) * ports {
                let address = sockets::nth_address(source, (place % addresses) as u32);
                sources.push(SocketAddr::new(address, (port + place) as u16));
            }
            sockets.add_thread(cpu, &sources, interface)?;
        }
        let moments = [
            Record::anonymous(replies.moments)?,
            Record::anonymous(replies.moments)?,
        ];
        Ok(Self::of(
            settings,
            Engine::Sockets(sockets),
            replies,
            moments,
        ))
    }

    fn of(
        settings: &Settings<'_>,
        engine: Engine,
        replies: Replies,
        [sent_at, received_at]: [Record; 2],
    ) -> Self {
        Self {
            engine,
            sent_at,
            received_at,
            replies,
            addresses: settings.addresses,
            cpus: settings.cpus.to_vec(),
            sequence_len: settings.sequence.len() as u64,
            loads: Mutex::new(0),
            start_len: START_LEN,
            over: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            threads: Mutex::new(Vec::new()),
        }
    }

    /// Leaves as little room behind each frame as a socket does, not the rest of a page.
    #[must_use]
    pub fn with_small_tailroom(mut self) -> Self {
        self.start_len = SMALL_TAILROOM_START_LEN;
        self
    }

    /// Makes the CPUs generate this load from now on, with this part of the sequence.
    pub fn order(&self, load: Load, part: Range<u64>) -> Result<()> {
        let generators = self.replies.generators;
        let number = {
            let mut loads = lock(&self.loads);
            *loads += 1;
            *loads
        };
        let (interval, burst) = match load {
            Load::Saturate => (0, 1),
            Load::Rate { rate, burst } => {
                ensure!(rate > 0 && burst > 0, "no rate");
                let second = 1_000_000_000 << FRACTION_BITS;
                (second / u64::from(rate) * generators, burst.into())
            }
        };
        let due_in_batch = (BATCH_TIME.as_nanos() as u64) << FRACTION_BITS;
        // None is late at full speed, where the interval is 0.
        let backlog = due_in_batch.checked_div(interval).unwrap_or(0);
        let sets = self.replies.set_mask + 1;
        self.pause()?;
        for (turn, &cpu) in (0..).zip(&self.cpus) {
            let mut orders = Orders {
                load: number,
                first: part.start,
                interval,
                // Else the bursts of all CPUs would come at the same moments.
                delay: interval * burst / generators * turn,
                burst,
                backlog: backlog.clamp(MIN_BACKLOG, MAX_BACKLOG),
                port: self.replies.port + turn * self.replies.ports,
                ports: self.replies.ports,
                addresses: self.addresses.into(),
                slots: (turn * sets) << 16,
                set_mask: self.replies.set_mask,
                length: 0,
            };
            self.put(cpu, orders)?;
            orders.length = part.end - part.start;
            self.put(cpu, orders)?;
        }
        Ok(())
    }

    /// Returns the range of the whole sequence.
    pub fn whole(&self) -> Range<u64> {
        0..self.sequence_len
    }

    /// Ends the load; [`Self::order`] starts another one.
    pub fn pause(&self) -> Result<()> {
        for &cpu in &self.cpus {
            let mut orders = self.orders(cpu)?;
            orders.length = 0;
            self.put(cpu, orders)?;
        }
        Ok(())
    }

    fn orders(&self, cpu: usize) -> Result<Orders> {
        match &self.engine {
            Engine::Kernel(programs) => {
                let words = lock(&programs.orders).get(&u32::try_from(cpu)?, 0)?;
                Ok(zerocopy::transmute!(words))
            }
            Engine::Sockets(sockets) => sockets.orders(cpu),
        }
    }

    /// Replaces the orders of a CPU. Its program reads them meanwhile, and may see half of a change: either only the length
    /// changes, or the rest while the length is 0. (An interval and ports that were cleared before the length sent a query
    /// at once, from port 0, and its reply was not counted.) A program that has read the length already may send one more
    /// query, of either load.
    fn put(&self, cpu: usize, orders: Orders) -> Result<()> {
        match &self.engine {
            Engine::Kernel(programs) => {
                let words: OrderWords = zerocopy::transmute!(orders);
                lock(&programs.orders).set(u32::try_from(cpu)?, words, 0)?;
                Ok(())
            }
            Engine::Sockets(sockets) => sockets.put(cpu, orders),
        }
    }

    /// Returns the counters of all loads so far.
    pub fn totals(&self) -> Result<Totals> {
        match &self.engine {
            Engine::Kernel(programs) => programs.maps.totals(),
            Engine::Sockets(sockets) => {
                let [latencies, service_times] = sockets.times();
                Ok(Totals {
                    cpus: sockets.counts(),
                    latencies,
                    service_times,
                })
            }
        }
    }

    /// Returns the sum of the counters of all CPUs.
    pub fn counts(&self) -> Result<Counts> {
        let cpus = match &self.engine {
            Engine::Kernel(programs) => programs.maps.counts()?,
            Engine::Sockets(sockets) => sockets.counts(),
        };
        let mut sum = Counts::default();
        for counts in cpus.values() {
            sum.add(counts);
        }
        Ok(sum)
    }

    /// Returns the number of replies that the sockets had no room for.
    pub(crate) fn dropped(&self) -> Result<u64> {
        match &self.engine {
            Engine::Kernel(_) => Ok(0),
            Engine::Sockets(sockets) => sockets.dropped(),
        }
    }

    /// Returns the number of each error of the sockets.
    pub fn errors(&self) -> BTreeMap<i32, u64> {
        match &self.engine {
            Engine::Kernel(_) => BTreeMap::new(),
            Engine::Sockets(sockets) => sockets.errors(),
        }
    }

    /// Begins the record of the next load; returns its first moment.
    pub fn begin_record(&self) -> Result<u64> {
        for record in [&self.sent_at, &self.received_at] {
            for moment in record.moments() {
                moment.store(0, Ordering::Relaxed);
            }
        }
        self.this_moment()
    }

    /// Returns the record since its first moment. Moments beyond the announced length are cut off.
    pub fn record_since(&self, first: u64) -> Result<Vec<Moment>> {
        let sent_at = self.sent_at.moments();
        let received_at = self.received_at.moments();
        let mut moments = Vec::new();
        let end = self.this_moment()? + 1;
        for moment in first..end.min(first + self.replies.moments) {
            // The arrays are rings: no load has as many moments as they have elements.
            let index = (moment & (self.replies.moments - 1)) as usize;
            moments.push(Moment {
                sent: sent_at[index].load(Ordering::Relaxed),
                received: received_at[index].load(Ordering::Relaxed),
            });
        }
        Ok(moments)
    }

    /// Returns the length of a moment.
    pub fn moment(&self) -> Duration {
        Duration::from_nanos(1 << self.replies.moment_bits)
    }

    /// Returns the present moment of the clock that `bpf_ktime_get_ns` reads.
    fn this_moment(&self) -> Result<u64> {
        Ok(sockets::now()? >> self.replies.moment_bits)
    }

    /// Returns the frames with their counters, in the order of [`Settings::frames`].
    pub fn frames(&self) -> Result<Vec<Frame>> {
        let programs = match &self.engine {
            Engine::Kernel(programs) => programs,
            Engine::Sockets(sockets) => return Ok(sockets.frames()),
        };
        let mut frames = Vec::new();
        for index in 0..programs.frame_count {
            frames.push(zerocopy::transmute!(programs.frames.get(&index, 0)?));
        }
        Ok(frames)
    }

    /// Returns the CPU time of the generating threads so far.
    pub fn cpu_use(&self) -> CpuUse {
        let mut sum = CpuUse::default();
        for (_, thread) in lock(&self.threads).iter() {
            let file = format!("/proc/self/task/{thread}/schedstat");
            // A thread that has ended is not measured.
            let text = fs::read_to_string(file).unwrap_or_default();
            let mut fields = text.split_whitespace().flat_map(str::parse);
            sum.used += Duration::from_nanos(fields.next().unwrap_or(0));
            sum.waited += Duration::from_nanos(fields.next().unwrap_or(0));
        }
        sum
    }

    /// Fails once a generating thread has ended before its load: nothing more would be sent, however long one waits.
    /// [`Self::during`] returns that thread's own error instead.
    pub fn ensure_sending(&self) -> Result<()> {
        ensure!(
            !self.failed.load(Ordering::Relaxed),
            "a generating thread has ended"
        );
        Ok(())
    }

    /// Generates the ordered loads while `meanwhile` runs, which looks at [`Self::ensure_sending`]; each generating thread
    /// runs `prepare` first.
    pub fn during<T>(
        &self,
        prepare: &(dyn Fn() -> Result<()> + Sync),
        meanwhile: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        interrupt_by_signals()?;
        self.over.store(false, Ordering::Relaxed);
        self.failed.store(false, Ordering::Relaxed);
        thread::scope(|scope| {
            let mut sending = Vec::new();
            for &cpu in &self.cpus {
                sending.push(scope.spawn(move || {
                    let _presence = Presence::of_this_thread(self);
                    prepare()?;
                    self.send(cpu)
                }));
            }
            // The scope waits for its threads before a panic leaves it, and they end only when told below.
            let done = catch_unwind(AssertUnwindSafe(meanwhile));
            let paused = self.pause();
            self.over.store(true, Ordering::Relaxed);
            while !sending.iter().all(|thread| thread.is_finished()) {
                for (thread, _) in lock(&self.threads).iter() {
                    // A thread that is not in the system call yet gets the next signal. SAFETY: while the lock is held
                    // the thread exists.
                    unsafe { libc::pthread_kill(*thread, WAKE as libc::c_int) };
                }
                thread::sleep(Duration::from_millis(1));
            }
            for thread in sending {
                // An error of the load explains why the measurement failed, so it comes first.
                let sent = thread.join();
                sent.map_err(|_| anyhow!("a generating thread panicked"))??;
            }
            paused?;
            done.unwrap_or_else(|panic| resume_unwind(panic))
        })
    }

    /// Generates load on `cpu` until it is over.
    fn send(&self, cpu: usize) -> Result<()> {
        let mut cpus = CpuSet::new();
        cpus.set(cpu)?;
        // BPF_PROG_TEST_RUN runs live frames where it is called, and the program finds its orders by
        // its CPU.
        sched_setaffinity(Pid::from_raw(0), &cpus)
            .with_context(|| format!("cannot run on CPU {cpu}"))?;
        match &self.engine {
            Engine::Kernel(programs) => programs.run(self.start_len, &self.over),
            Engine::Sockets(sockets) => {
                let moments = Moments {
                    sent_at: self.sent_at.moments(),
                    received_at: self.received_at.moments(),
                    bits: self.replies.moment_bits,
                };
                sockets.run(cpu, moments, &self.over)
            }
        }
    }
}

impl Programs {
    /// Runs the generating program on this CPU until the load is over.
    fn run(&self, start_len: usize, over: &AtomicBool) -> Result<()> {
        let program = self.object.program("generate").context("no program")?;
        run_until(program.try_into()?, self.interface, start_len, over)
    }
}

/// A generating thread in the list of them, until it ends in any way.
struct Presence<'a> {
    generator: &'a Generator,
    thread: Pid,
}

impl<'a> Presence<'a> {
    fn of_this_thread(generator: &'a Generator) -> Self {
        let thread = gettid();
        // SAFETY: no precondition.
        let handle = unsafe { libc::pthread_self() };
        lock(&generator.threads).push((handle, thread));
        Self { generator, thread }
    }
}

impl Drop for Presence<'_> {
    fn drop(&mut self) {
        // While the lock is held the thread exists, so nothing else gets its signals.
        lock(&self.generator.threads).retain(|(_, thread)| *thread != self.thread);
        if !self.generator.over.load(Ordering::Relaxed) {
            self.generator.failed.store(true, Ordering::Relaxed);
        }
    }
}

fn run_until(program: &Xdp, interface: u32, start_len: usize, over: &AtomicBool) -> Result<()> {
    let start = vec![0; start_len];
    // `struct xdp_md`: data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex.
    let context = [0, start.len() as u32, 0, interface, 0, 0];
    let context: [u8; 24] = zerocopy::transmute!(context);
    while !over.load(Ordering::Relaxed) {
        let options = TestRunOptions {
            data_in: Some(&start),
            ctx_in: Some(&context),
            repeat: RUNS,
            attrs: TestRunAttrs::new().xdp_live_frames(BATCH),
            ..TestRunOptions::default()
        };
        match program.test_run(options) {
            Ok(_) => {}
            Err(ProgramError::SyscallError(call))
                if call.io_error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error).context("cannot send live frames (Linux 5.18)"),
        }
    }
    Ok(())
}

/// Lets a signal interrupt the system call without ending the process.
fn interrupt_by_signals() -> Result<()> {
    extern "C" fn nothing(_signal: libc::c_int) {}
    let action = SigAction::new(
        SigHandler::Handler(nothing),
        SaFlags::empty(),
        SigSet::empty(),
    );
    // SAFETY: the handler does nothing.
    unsafe { sigaction(WAKE, &action)? };
    Ok(())
}

/// The program that answers every query with an empty answer; detached when dropped.
pub struct Responder {
    _object: Ebpf,
    maps: Maps,
}

impl Responder {
    /// Answers queries to these ports at the interface, in the kernel's generic mode or in the driver.
    pub fn new(interface: &str, ports: [u16; 2], is_generic: bool) -> Result<Self> {
        let mut object = EbpfLoader::new()
            .load(OBJECT)
            .context("cannot load the programs; run as root")?;
        let replies = Replies {
            servers: ports.map(u64::from),
            ..Replies::default()
        };
        expect_replies(&mut object, replies)?;
        let maps = Maps::of(&mut object)?;
        attach(&mut object, "respond", interface, is_generic)?;
        Ok(Self {
            _object: object,
            maps,
        })
    }

    /// Returns the number of queries answered so far.
    pub fn answered(&self) -> Result<u64> {
        Ok(self.maps.counts()?.values().map(|counts| counts.sent).sum())
    }
}

fn expect_replies(object: &mut Ebpf, replies: Replies) -> Result<()> {
    let mut map: Array<_, ReplyWords> = map_mut(object, "REPLIES")?.try_into()?;
    let words: ReplyWords = zerocopy::transmute!(replies);
    map.set(0, words, 0)?;
    Ok(())
}

/// Attaches a program to the interface, unless `is_generic` in its driver if that is possible.
fn attach(object: &mut Ebpf, name: &str, interface: &str, is_generic: bool) -> Result<()> {
    let program = program(object, name)?;
    program.load()?;
    // In the driver a reply is dropped before an skb is made of it. Drivers without XDP have the
    // generic mode.
    if !is_generic && program.attach(interface, XdpMode::Driver).is_ok() {
        return Ok(());
    }
    program.attach(interface, XdpMode::Skb).with_context(|| {
        match attached_program(interface) {
            Some(found) => format!(
                "cannot attach to {interface}: the XDP program {found} serves it; if a program that has ended \
                 left it there, remove it with `ip link set dev {interface} xdp off`"
            ),
            None => format!("cannot attach to {interface}"),
        }
    })?;
    Ok(())
}

/// Returns id and name of the interface's XDP program, if there is one and `ip` shows it.
fn attached_program(interface: &str) -> Option<String> {
    // Only makes an error clearer, so whatever is missing here is no further error.
    let mut ip = Command::new("ip");
    ip.args(["-json", "-details", "link", "show", "dev", interface]);
    let links: Value = serde_json::from_slice(&ip.output().ok()?.stdout).ok()?;
    let id = links.pointer("/0/xdp/prog/id")?.as_u64()?;
    let mut loaded = aya::programs::loaded_programs().flatten();
    let program = loaded.find(|program| u64::from(program.id()) == id);
    match program.as_ref().and_then(|program| program.name_as_str()) {
        Some(name) => Some(format!("{id} ({name})")),
        None => Some(id.to_string()),
    }
}

/// Takes a map that is kept until all programs are loaded: it exists as long as its owner.
fn map(object: &mut Ebpf, name: &str) -> Result<Map> {
    object
        .take_map(name)
        .with_context(|| format!("no map {name}"))
}

fn map_mut<'a>(object: &'a mut Ebpf, name: &str) -> Result<&'a mut Map> {
    object
        .map_mut(name)
        .with_context(|| format!("no map {name}"))
}

fn program<'a>(object: &'a mut Ebpf, name: &str) -> Result<&'a mut Xdp> {
    Ok(object
        .program_mut(name)
        .with_context(|| format!("no program {name}"))?
        .try_into()?)
}

#[cfg(test)]
pub(crate) use tests::*;

#[cfg(test)]
mod tests {
    use test_support::requirements;

    use super::*;

    /// A load of an hour takes no more memory than one of some seconds.
    #[test]
    fn records_have_a_limit() {
        let settings = Settings {
            interface: "lo",
            cpus: &[0, 1],
            ports: 2048..=2063,
            addresses: 1,
            servers: [53; 2],
            frames: &[],
            sequence: &[0],
        };
        for (seconds, moments, moment_bits) in [
            (0, 0, 16),
            (1, 1 << 16, 16),
            (5, 1 << 17, 16),
            (60, 1 << 18, 18),
            (3600, 1 << 18, 24),
        ] {
            let replies = settings.replies(Duration::from_secs(seconds)).unwrap();
            assert_eq!(
                (replies.moments, replies.moment_bits),
                (moments, moment_bits),
                "{seconds}"
            );
            assert_eq!((replies.ports, replies.generators), (8, 2));
        }
        // With the two seconds for the last replies: as many moments as there may be, and one more.
        for (nanoseconds, moments, moment_bits) in
            [(1 << 34, 1 << 18, 16), ((1 << 34) + (1 << 16), 1 << 17, 17)]
        {
            let length = Duration::from_nanos(nanoseconds) - Duration::from_secs(2);
            let replies = settings.replies(length).unwrap();
            assert_eq!(
                (replies.moments, replies.moment_bits),
                (moments, moment_bits),
                "{nanoseconds}"
            );
        }
        let fewer_ports = Settings {
            ports: 2048..=2048,
            ..settings
        };
        let problem = fewer_ports.replies(Duration::ZERO).err().unwrap();
        assert_eq!(problem.to_string(), "fewer source ports than CPUs");
        let settings = Settings {
            ports: 2048..=2063,
            ..fewer_ports
        };
        let problem = |settings: Settings<'_>| {
            let replies = settings.replies(Duration::ZERO);
            replies.err().unwrap().to_string()
        };
        let empty = Settings {
            sequence: &[],
            ..settings.clone()
        };
        assert_eq!(problem(empty), "no queries");
        let without_cpu = Settings {
            cpus: &[],
            ..settings.clone()
        };
        assert_eq!(problem(without_cpu), "no CPU to generate load");
        let twice = Settings {
            cpus: &[1, 0, 1],
            ..settings
        };
        assert_eq!(problem(twice), "a CPU is named twice");
    }

    /// Generates at `lo` of an own network, so that no other test's packets are counted.
    pub(crate) fn alone(cpus: &[usize], inside: impl FnOnce(Generator) + Send) {
        let has_cpus = if nr_cpus().unwrap() >= cpus.len() {
            Ok(())
        } else {
            Err("the machine has fewer")
        };
        if !requirements::root() || !requirements::met("the CPUs of the test", has_cpus) {
            return;
        }
        thread::scope(|scope| {
            let test = scope.spawn(|| {
                nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
                let mut frame: Frame = zerocopy::transmute!([0u64; size_of::<Frame>() / 8]);
                frame.len = 77;
                let settings = Settings {
                    interface: "lo",
                    cpus,
                    ports: 2048..=2063,
                    addresses: 3,
                    servers: [53; 2],
                    frames: &[frame, frame],
                    sequence: &[0, 1, 1],
                };
                inside(Generator::recording(&settings, Duration::from_secs(1)).unwrap());
            });
            test.join().unwrap();
        });
    }

    /// Sets the counters of CPU 0.
    pub(crate) fn count(generator: &mut Generator, sent: u64, received: u64) {
        let mut counts = Counts {
            sent,
            ..Counts::default()
        };
        counts.rcodes[0] = received;
        let mut of_cpus = vec![CountWords::default(); nr_cpus().unwrap()];
        of_cpus[0] = zerocopy::transmute!(counts);
        let maps = &mut programs(generator).maps;
        maps.counts.set(0, of_cpus.try_into().unwrap(), 0).unwrap();
    }

    fn programs(generator: &mut Generator) -> &mut Programs {
        match &mut generator.engine {
            Engine::Kernel(programs) => programs,
            Engine::Sockets(_) => panic!("sockets"),
        }
    }

    /// Returns the indices of frames in the order of sending.
    pub(crate) fn sequence(generator: &mut Generator) -> Vec<u32> {
        let array: Array<_, u32> = map_mut(&mut programs(generator).object, "SEQUENCE")
            .unwrap()
            .try_into()
            .unwrap();
        array.iter().map(|index| index.unwrap()).collect()
    }

    /// Makes a veth pair, `one` at 10.9.0.1 and `other` at 10.9.0.2, in a network of the calling thread's own.
    pub(crate) fn pair() {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        for arguments in [
            "link add one address 02:00:00:00:00:01 type veth peer name other address 02:00:00:00:00:02",
            "link set one up",
            "link set other up",
            "address add 10.9.0.1/24 dev one",
            "neighbour add 10.9.0.2 lladdr 02:00:00:00:00:02 dev one",
        ] {
            let done = Command::new("ip").args(arguments.split(' ')).status();
            assert!(done.unwrap().success(), "{arguments}");
        }
    }

    #[test]
    fn cpus_take_turns() {
        alone(&[1, 0], |generator| {
            let second = 1_000_000_000 << FRACTION_BITS;
            let rate = Load::Rate {
                rate: 1000,
                burst: 4,
            };
            let mut paused = [Orders::default(); 2];
            for (load, order, interval, burst) in
                [(1, rate, second / 500, 4), (2, Load::Saturate, 0, 1)]
            {
                generator.order(order, 1..3).unwrap();
                for (turn, cpu) in [(0, 1), (1, 0)] {
                    let expected = Orders {
                        load,
                        first: 1,
                        interval,
                        delay: turn * interval * burst / 2,
                        burst,
                        backlog: 64,
                        port: 2048 + 8 * turn,
                        ports: 8,
                        addresses: 3,
                        slots: (8 * turn) << 16,
                        set_mask: 7,
                        length: 2,
                    };
                    assert_eq!(generator.orders(cpu).unwrap(), expected, "{order:?} {cpu}");
                    paused[cpu] = Orders {
                        length: 0,
                        ..expected
                    };
                }
            }
            // The programs read an order while it ends, so nothing but its length changes.
            generator.pause().unwrap();
            for (cpu, expected) in (0..).zip(paused) {
                assert_eq!(generator.orders(cpu).unwrap(), expected, "{cpu}");
            }
            for (rate, burst) in [(0, 1), (1, 0)] {
                let none = Load::Rate { rate, burst };
                assert!(generator.order(none, 0..3).is_err());
            }
            assert_eq!(generator.whole(), 0..3);
        });
    }

    #[test]
    fn record_is_a_ring_of_moments() {
        alone(&[0], |generator| {
            assert_eq!(generator.moment(), Duration::from_nanos(1 << 16));
            let this_moment = || sockets::now().unwrap() >> 16;
            let records = [&generator.sent_at, &generator.received_at];
            for record in records {
                record.moments()[5].store(1, Ordering::Relaxed);
            }
            let earliest = this_moment();
            let begun = generator.begin_record().unwrap();
            assert!((earliest..=this_moment()).contains(&begun), "{begun}");
            for (index, record) in (6..).zip(records) {
                record.moments()[index].store(7 + index as u64, Ordering::Relaxed);
            }
            // Long ago, so the whole ring is read.
            let record = generator.record_since((1 << 16) + 4).unwrap();
            assert_eq!(record.len(), 1 << 16);
            let mut counted = Vec::new();
            for (index, moment) in record.iter().enumerate() {
                if (moment.sent, moment.received) != (0, 0) {
                    counted.push((index, moment.sent, moment.received));
                }
            }
            assert_eq!(counted, [(2, 13, 0), (3, 0, 14)]);
            assert!(generator.record_since(u64::MAX >> 17).unwrap().is_empty());
        });
    }

    #[test]
    fn counters_are_those_of_the_programs() {
        alone(&[0, 1], |mut generator| {
            assert_eq!(generator.frames().unwrap().len(), 2);
            assert_eq!(generator.frames().unwrap()[1].len, 77);
            assert!(generator.totals().unwrap().cpus.is_empty());
            assert_eq!(generator.counts().unwrap(), Counts::default());
            assert_eq!(generator.cpu_use().used, Duration::ZERO);
            let mut of_cpus = vec![CountWords::default(); nr_cpus().unwrap()];
            let mut latencies = vec![[0; BUCKETS]; nr_cpus().unwrap()];
            for (cpu, sent) in [(0, 3), (1, 4)] {
                let counts = Counts {
                    sent,
                    ..Counts::default()
                };
                of_cpus[cpu] = zerocopy::transmute!(counts);
                latencies[cpu][9] = sent;
            }
            let maps = &mut programs(&mut generator).maps;
            maps.counts.set(0, of_cpus.try_into().unwrap(), 0).unwrap();
            maps.latencies
                .set(0, latencies.try_into().unwrap(), 0)
                .unwrap();
            let totals = generator.totals().unwrap();
            assert_eq!(totals.cpus.len(), 2);
            assert_eq!(totals.cpus[&1].sent, 4);
            assert_eq!((totals.latencies[9], totals.latencies[8]), (7, 0));
            assert_eq!(totals.sum(), generator.counts().unwrap());
            assert_eq!(totals.sum().sent, 7);
            // SAFETY: no precondition.
            let own = (unsafe { libc::pthread_self() }, gettid());
            lock(&generator.threads).extend([own; 3]);
            assert!(generator.cpu_use().used > Duration::ZERO);
        });
    }

    #[test]
    fn backlog_follows_the_rate() {
        alone(&[0, 1], |generator| {
            for (rate, backlog) in [
                (1_000, 64),
                (500_000, 64),
                (1_000_000, 128),
                (1_875_000, 240),
                (9_000_000, 240),
            ] {
                let load = Load::Rate { rate, burst: 1 };
                generator.order(load, 0..3).unwrap();
                assert_eq!(generator.orders(0).unwrap().backlog, backlog, "{rate}");
            }
        });
    }

    #[test]
    fn maps_hold_queries_in_flight() {
        alone(&[0, 1], |mut generator| {
            let replies = generator.replies;
            let kept: Array<_, ReplyWords> =
                map_mut(&mut programs(&mut generator).object, "REPLIES")
                    .unwrap()
                    .try_into()
                    .unwrap();
            let expected: ReplyWords = zerocopy::transmute!(replies);
            assert_eq!(kept.get(&0, 0).unwrap(), expected);
            let Ok(Map::Array(slots)) = map_mut(&mut programs(&mut generator).object, "SLOTS")
            else {
                panic!("no array");
            };
            // Of each of two CPUs, with eight ports.
            let slots = slots.info().unwrap().max_entries();
            assert_eq!(slots, 2 * 8 * (1 << 16));
        });
    }

    #[test]
    fn record_includes_the_present_moment() {
        alone(&[0], |generator| {
            let first = generator.begin_record().unwrap();
            assert!(!generator.record_since(first).unwrap().is_empty());
        });
    }

    #[test]
    fn program_at_an_interface_is_named() {
        alone(&[0], |generator| {
            let found = attached_program("lo").unwrap();
            assert!(found.ends_with(" (count)"), "{found}");
            assert!(found.split(' ').next().unwrap().parse::<u32>().is_ok());
            let responding = Responder::new("lo", [53; 2], true).err().unwrap();
            let problem = responding.to_string();
            let expected = format!("cannot attach to lo: the XDP program {found} serves it; ");
            assert!(problem.starts_with(&expected), "{problem}");
            drop(generator);
            assert_eq!(attached_program("lo"), None);
            assert_eq!(attached_program("no-interface"), None);
        });
    }

    /// Returns how the interface's XDP program is attached (include/uapi/linux/if_link.h).
    fn xdp_mode(interface: &str) -> u64 {
        let output = Command::new("ip")
            .args(["-json", "link", "show", "dev", interface])
            .output()
            .unwrap();
        let links: Value = serde_json::from_slice(&output.stdout).unwrap();
        let mode = links.pointer("/0/xdp/mode");
        mode.and_then(Value::as_u64).unwrap_or(0)
    }

    #[test]
    fn programs_default_to_the_driver() {
        const XDP_ATTACHED_DRV: u64 = 1;
        const XDP_ATTACHED_SKB: u64 = 2;
        alone(&[0, 1], |generator| {
            // No driver.
            assert_eq!(xdp_mode("lo"), XDP_ATTACHED_SKB);
            drop(generator);
            let added = Command::new("ip")
                .args([
                    "link", "add", "one", "type", "veth", "peer", "name", "other",
                ])
                .status();
            assert!(added.unwrap().success());
            for (is_generic, mode) in [(false, XDP_ATTACHED_DRV), (true, XDP_ATTACHED_SKB)] {
                let mut responder = Responder::new("one", [53; 2], is_generic).unwrap();
                assert_eq!(xdp_mode("one"), mode, "{is_generic}");
                assert_eq!(responder.answered().unwrap(), 0);
                let mut of_cpus = vec![CountWords::default(); nr_cpus().unwrap()];
                for (cpu, sent) in [(0, 3), (1, 4)] {
                    let counts = Counts {
                        sent,
                        ..Counts::default()
                    };
                    of_cpus[cpu] = zerocopy::transmute!(counts);
                }
                let counts = &mut responder.maps.counts;
                counts.set(0, of_cpus.try_into().unwrap(), 0).unwrap();
                assert_eq!(responder.answered().unwrap(), 7);
            }
            assert_eq!(xdp_mode("one"), 0);
        });
    }

    #[test]
    fn early_thread_end_is_noticed() {
        alone(&[0], |generator| {
            for (is_over, is_sending) in [(true, true), (false, false)] {
                generator.over.store(is_over, Ordering::Relaxed);
                let presence = Presence::of_this_thread(&generator);
                assert_eq!(lock(&generator.threads).len(), 1);
                assert!(generator.ensure_sending().is_ok());
                drop(presence);
                assert!(lock(&generator.threads).is_empty());
                assert_eq!(generator.ensure_sending().is_ok(), is_sending);
            }
        });
    }

    #[test]
    fn wake_signal_ends_no_process() {
        interrupt_by_signals().unwrap();
        nix::sys::signal::raise(WAKE).unwrap();
    }

    /// Runs `test` with a generator through sockets on loopback, from an address of the test's own.
    fn through_sockets(
        server: SocketAddr,
        source: [u8; 4],
        test: impl FnOnce(&Generator) -> Result<()>,
    ) {
        let route = Route {
            hardware: [[0; 6]; 2],
            source: source.into(),
            server,
        };
        let query = b"\0\0\x01\0\0\x01\0\0\0\0\0\0\x01a\0\0\x01\0\x01";
        let frame = route.frame(query).unwrap().unwrap();
        let settings = Settings {
            interface: "lo",
            cpus: &[0],
            ports: 2048..=2051,
            addresses: 1,
            servers: [53; 2],
            frames: &[frame],
            sequence: &[0],
        };
        let length = Duration::from_secs(1);
        let generator = Generator::through_sockets(&settings, &[route], None, length).unwrap();
        let load = Load::Rate {
            rate: 100,
            burst: 1,
        };
        generator.order(load, 0..1).unwrap();
        let done = generator.during(&|| Ok(()), || test(&generator));
        done.unwrap();
        // Its thread has ended.
        let counts = generator.counts().unwrap();
        assert_eq!(generator.frames().unwrap()[0].sent, counts.sent);
        let totals = generator.totals().unwrap();
        assert_eq!(totals.sum(), counts);
        assert_eq!(totals.service_times.iter().sum::<u64>(), counts.received());
    }

    fn until(is_done: impl Fn() -> Result<bool>) -> Result<()> {
        for _ in 0..60_000 {
            if is_done()? {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(1));
        }
        bail!("too long")
    }

    #[test]
    fn load_through_sockets_is_counted() {
        let server = std::net::UdpSocket::bind("127.71.0.1:0").unwrap();
        let endpoint = server.local_addr().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut message = [0; 64];
                while let Ok((length @ 1.., from)) = server.recv_from(&mut message) {
                    message[2] |= 0x80;
                    // Twice: the second one is late.
                    for _ in 0..2 {
                        let _sent = server.send_to(&message[..length], from);
                    }
                }
            });
            through_sockets(endpoint, [127, 71, 0, 2], |generator| {
                let first = generator.begin_record()?;
                until(|| {
                    let counts = generator.counts()?;
                    Ok(counts.no_error() >= 20 && counts.late >= 20)
                })?;
                let mut recorded = 0;
                for moment in generator.record_since(first)? {
                    recorded += moment.received;
                }
                assert!((1..=generator.counts()?.sent).contains(&recorded));
                assert!(generator.errors().is_empty());
                Ok(())
            });
            let ending = std::net::UdpSocket::bind("127.71.0.1:0").unwrap();
            ending.send_to(&[], endpoint).unwrap();
        });
    }

    /// The load goes on without a server.
    #[test]
    fn refused_queries_are_counted() {
        let nobody = ([127, 71, 1, 1], 1).into();
        through_sockets(nobody, [127, 71, 1, 2], |generator| {
            until(|| {
                let errors = generator.errors();
                let refused = errors.get(&libc::ECONNREFUSED).copied().unwrap_or(0);
                Ok(refused >= 5 && generator.counts()?.sent >= 5)
            })
        });
    }

    #[test]
    fn sockets_have_a_limit() {
        let settings = Settings {
            interface: "lo",
            cpus: &[0, 1],
            ports: 2048..=2175,
            addresses: 128,
            servers: [53; 2],
            frames: &[],
            sequence: &[0],
        };
        let route = |source: [u8; 4]| Route {
            hardware: [[0; 6]; 2],
            source: source.into(),
            server: ([127, 0, 0, 1], 53).into(),
        };
        let routes = [route([192, 0, 2, 1]), route([192, 0, 2, 2])];
        let problem = |settings: &Settings<'_>, routes: &[Route]| {
            let made = Generator::through_sockets(settings, routes, None, Duration::ZERO);
            made.err().unwrap().to_string()
        };
        // As many as there may be: only the address is not ours.
        let found = problem(&settings, &routes[..1]);
        assert!(found.contains("cannot send from 192.0.2.1:2048"), "{found}");
        let found = problem(&settings, &routes);
        assert!(found.contains("different addresses"), "{found}");
        let more_addresses = Settings {
            addresses: 129,
            ..settings.clone()
        };
        let found = problem(&more_addresses, &routes[..1]);
        assert!(found.contains("has a port"), "{found}");
        let more_ports = Settings {
            ports: 2048..=2177,
            ..settings
        };
        let found = problem(&more_ports, &routes[..1]);
        assert!(found.contains("at most 64 source ports"), "{found}");
    }

    /// Queries leave by one end of a veth pair, and a program at the other end answers them.
    #[test]
    fn replies_to_load_are_counted() {
        if !requirements::root() {
            return;
        }
        let test = || {
            pair();
            let route = Route {
                hardware: [[2, 0, 0, 0, 0, 2], [2, 0, 0, 0, 0, 1]],
                source: [10, 9, 0, 1].into(),
                server: ([10, 9, 0, 2], 53).into(),
            };
            let query = b"\0\0\x01\0\0\x01\0\0\0\0\0\0\x01a\0\0\x01\0\x01";
            let frame = route.frame(query).unwrap().unwrap();
            let settings = Settings {
                interface: "one",
                cpus: &[0],
                ports: 2048..=2063,
                addresses: 1,
                servers: [53; 2],
                frames: &[frame],
                sequence: &[0],
            };
            let generator = Generator::recording(&settings, Duration::from_secs(1)).unwrap();
            let responder = Responder::new("other", [53; 2], false).unwrap();
            let load = Load::Rate {
                rate: 1000,
                burst: 4,
            };
            let first = generator.begin_record().unwrap();
            let until_answered = || {
                generator.order(load, 0..1)?;
                for _ in 0..60_000 {
                    generator.ensure_sending()?;
                    if generator.counts()?.received() >= 5 {
                        return Ok(());
                    }
                    thread::sleep(Duration::from_millis(1));
                }
                bail!("no replies: {:?}", generator.counts())
            };
            generator.during(&|| Ok(()), until_answered).unwrap();
            // The end of the load may cut the last burst.
            let record = generator.record_since(first).unwrap();
            let cut = record.iter().filter(|moment| moment.sent % 4 != 0);
            assert!(cut.count() <= 1);
            let counts = generator.counts().unwrap();
            let frame = generator.frames().unwrap()[0];
            assert!(counts.received() >= 5 && counts.received() <= counts.sent);
            assert_eq!(counts.no_error(), counts.received());
            assert!(frame.received >= 5 && frame.sent == counts.sent);
            // None, plus one.
            assert_eq!(frame.answers, 1);
            assert!(responder.answered().unwrap() >= 5);

            // The error of a thread says more than that of the load, which has noticed its end.
            let until_ended = || -> Result<()> {
                loop {
                    generator.ensure_sending()?;
                    thread::sleep(Duration::from_millis(1));
                }
            };
            let problem = generator.during(&|| bail!("not prepared"), until_ended);
            assert_eq!(problem.unwrap_err().to_string(), "not prepared");
        };
        thread::scope(|scope| scope.spawn(test).join().unwrap());
    }
}
