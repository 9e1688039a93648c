//! The programs that generate load inside the kernel and count replies (`benches/programs/ebpf/src/generator.rs`).

use std::{
    io,
    net::UdpSocket,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use aya::{
    Ebpf, EbpfLoader, TestRun as _, TestRunAttrs, TestRunOptions,
    maps::{Array, MapData},
    programs::{ProgramError, Xdp, XdpMode},
};
use bench_programs::generator::{Counts, Frame, MAX_FRAME_LEN, Orders};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};
use serde_json::Value;

use crate::frames::Query;

/// Frames that the kernel prepares and reuses.
const BATCH: u32 = 256;
/// Runs of the program per system call, each a query or a moment of waiting: some seconds. Between system calls
/// nothing is sent for an RCU grace period.
const RUNS: u32 = 20_000_000;
/// Interval at which the end of the replies is checked.
const POLL: Duration = Duration::from_millis(20);
/// Time without a reply after which the load ends: a server that is gone, or that has had enough of us, is left alone.
const MAX_SILENCE: Duration = Duration::from_secs(2);
/// Queries that a silence has at least: a single lost one says nothing.
const MIN_UNANSWERED: u64 = 10;

/// Rate of the queries.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Load {
    /// As many as possible.
    Saturate,
    /// This many per second.
    Rate(u32),
}

/// Counts of a measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    pub(crate) counts: Counts,
    /// Time from the first to the last query.
    pub(crate) took: Duration,
    /// Queries since the last reply, if the load ended early because replies had stopped.
    pub(crate) unanswered: Option<u64>,
}

/// Notices that replies have stopped.
struct Silence {
    /// Counts and time of the last reply, at first those of the start.
    last: Counts,
    since: Instant,
}

impl Silence {
    fn new(counts: Counts) -> Self {
        Self {
            last: counts,
            since: Instant::now(),
        }
    }

    /// Returns the number of queries without a reply once they are too many for too long.
    fn unanswered(&mut self, now: Counts) -> Option<u64> {
        if now.replies() > self.last.replies() {
            *self = Self::new(now);
            return None;
        }
        let unanswered = now.sent - self.last.sent;
        let is_over = self.since.elapsed() >= MAX_SILENCE && unanswered >= MIN_UNANSWERED;
        is_over.then_some(unanswered)
    }
}

/// The loaded programs; detached when dropped.
pub(crate) struct Generator {
    object: Ebpf,
    orders: Array<MapData, OrderWords>,
    counts: Array<MapData, CountWords>,
    frames: u64,
    interface: u32,
    cpu: usize,
}

/// [`Orders`] as words, a type that aya knows to be plain data.
type OrderWords = [u64; size_of::<Orders>() / 8];

type CountWords = [u64; size_of::<Counts>() / 8];

type FrameWords = [u64; size_of::<Frame>() / 8];

impl Generator {
    /// Loads the programs with these frames, and counts replies at the interface. Queries are sent by `cpu`, or by
    /// the last one.
    pub(crate) fn new(interface: &str, frames: &[Vec<u8>], cpu: Option<usize>) -> Result<Self> {
        let last = thread::available_parallelism().map_or(0, |number| number.get() - 1);
        let mut object = EbpfLoader::new()
            .map_max_entries("FRAMES", u32::try_from(frames.len())?)
            .load(bench_programs::GENERATOR)
            .context("cannot load the programs; run as root")?;
        let mut map: Array<&mut MapData, FrameWords> = object
            .map_mut("FRAMES")
            .context("no map FRAMES")?
            .try_into()?;
        for (number, bytes) in (0..).zip(frames) {
            let mut padded = [0; MAX_FRAME_LEN];
            padded
                .get_mut(..bytes.len())
                .context("a frame that is too long")?
                .copy_from_slice(bytes);
            let frame = Frame {
                len: bytes.len() as u64,
                bytes: zerocopy::transmute!(padded),
            };
            let words: FrameWords = zerocopy::transmute!(frame);
            map.set(number, words, 0)?;
        }
        let mut take = |name| {
            object
                .take_map(name)
                .context("no maps of orders and counts")
        };
        let (orders, counts) = (take("ORDERS")?.try_into()?, take("COUNTS")?.try_into()?);
        program(&mut object, "generate")?.load()?;
        let count_replies = program(&mut object, "count")?;
        count_replies.load()?;
        if count_replies.attach(interface, XdpMode::Driver).is_err() {
            count_replies
                .attach(interface, XdpMode::Skb)
                .with_context(|| match attached_program(interface) {
                    Some(found) => format!(
                        "cannot count replies at {interface}: the XDP program {found} serves it; if a program that has \
                         ended left it there, remove it with `ip link set dev {interface} xdp off`"
                    ),
                    None => format!("cannot count replies at {interface}"),
                })?;
        }
        let interface = nix::net::if_::if_nametoindex(interface)?;
        Ok(Self {
            object,
            orders,
            counts,
            frames: frames.len() as u64,
            interface,
            cpu: cpu.unwrap_or(last),
        })
    }

    /// Sends queries for `length`, or until replies stop, with `probe` running until they end, and waits up to `drain`
    /// for the last replies.
    pub(crate) fn run(
        &mut self,
        load: Load,
        length: Duration,
        drain: Duration,
        probe: impl FnOnce(&AtomicBool) -> Latencies + Send,
    ) -> Result<(Measured, Latencies)> {
        let rate = match load {
            Load::Saturate => 0,
            Load::Rate(rate) => Orders::rate_of(rate),
        };
        let wanted = Orders {
            load: 1,
            frames: self.frames,
            rate,
            burst: 1,
        };
        let Self {
            object,
            orders,
            counts,
            interface,
            cpu,
            ..
        } = self;
        let program: &Xdp = object
            .program("generate")
            .context("no program")?
            .try_into()?;
        let read = |counts: &Array<MapData, CountWords>| -> Result<Counts> {
            Ok(zerocopy::transmute!(counts.get(&0, 0)?))
        };
        let over = AtomicBool::new(false);
        let (interface, cpu) = (*interface, *cpu);
        thread::scope(|scope| {
            let words: OrderWords = zerocopy::transmute!(wanted);
            orders.set(0, words, 0)?;
            let begun = Instant::now();
            let mut silence = Silence::new(read(counts)?);
            let mut unanswered = None;
            let asking = scope.spawn(|| send(program, interface, cpu, &over));
            let probing = scope.spawn(|| probe(&over));
            while begun.elapsed() < length && unanswered.is_none() && !asking.is_finished() {
                thread::sleep(POLL.min(length.saturating_sub(begun.elapsed())));
                match read(counts) {
                    Ok(now) => unanswered = silence.unanswered(now),
                    Err(_) => break,
                }
            }
            // The program sends nothing from here on, so the system call ends soon.
            let stopped = orders.set(0, OrderWords::default(), 0);
            let took = begun.elapsed();
            over.store(true, Ordering::Relaxed);
            let sent = asking
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let latencies = probing
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            sent?;
            stopped?;
            let begun = Instant::now();
            let mut final_counts = read(counts)?;
            while begun.elapsed() < drain && final_counts.replies() < final_counts.sent {
                thread::sleep(POLL);
                final_counts = read(counts)?;
            }
            Ok((
                Measured {
                    counts: final_counts,
                    took,
                    unanswered,
                },
                latencies,
            ))
        })
    }
}

/// Returns id and name of the interface's XDP program, if there is one and `ip` shows it.
fn attached_program(interface: &str) -> Option<String> {
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

/// Runs the generating program on `cpu` until it is told to stop.
fn send(program: &Xdp, interface: u32, cpu: usize, over: &AtomicBool) -> Result<()> {
    let mut cpus = CpuSet::new();
    cpus.set(cpu)?;
    sched_setaffinity(Pid::from_raw(0), &cpus)
        .with_context(|| format!("cannot run on CPU {cpu}"))?;
    let start = [0; 64];
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

fn program<'a>(object: &'a mut Ebpf, name: &str) -> Result<&'a mut Xdp> {
    Ok(object
        .program_mut(name)
        .with_context(|| format!("no program {name}"))?
        .try_into()?)
}

/// Time limit of a probe.
pub(crate) const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
const PROBE_PAUSE: Duration = Duration::from_millis(5);

/// Results of the probes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Latencies {
    /// Response times, in ascending order.
    pub(crate) answered: Vec<Duration>,
    /// Number of probes without a reply.
    pub(crate) lost: u64,
}

/// Sends probes until `over` is set.
pub(crate) fn probe_until(
    socket: &UdpSocket,
    queries: &[Query],
    edns: Option<u16>,
    over: &AtomicBool,
) -> Latencies {
    let mut found = Latencies::default();
    for (number, query) in queries.iter().cycle().enumerate() {
        if over.load(Ordering::Relaxed) {
            break;
        }
        match ask(socket, &query.message(number as u16, edns)) {
            Some(Answer { took, .. }) => found.answered.push(took),
            None => found.lost += 1,
        }
        thread::sleep(PROBE_PAUSE);
    }
    found.answered.sort_unstable();
    found
}

/// Reply to a probe.
pub(crate) struct Answer {
    pub(crate) took: Duration,
    pub(crate) message: Vec<u8>,
}

/// Sends a query and returns its reply.
pub(crate) fn ask(socket: &UdpSocket, message: &[u8]) -> Option<Answer> {
    let begun = Instant::now();
    socket.send(message).ok()?;
    let mut reply = [0; 4096];
    while begun.elapsed() < PROBE_TIMEOUT {
        let length = socket.recv(&mut reply).ok()?;
        // A late reply to an earlier probe has another id.
        if length >= 2 && reply[..2] == message[..2] {
            return Some(Answer {
                took: begun.elapsed(),
                message: reply[..length].to_vec(),
            });
        }
    }
    None
}
