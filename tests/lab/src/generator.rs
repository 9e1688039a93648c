//! Generates load inside the kernel (`benches/programs/ebpf/src/generator.rs`): one core produces more
//! queries than another one can answer, and has time left for the replies.

use std::{
    io,
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use anyhow::{Context, Result, ensure};
use aya::{
    Ebpf, EbpfLoader, TestRun as _, TestRunAttrs, TestRunOptions,
    maps::{Array, MapData},
    programs::{ProgramError, Xdp, XdpMode},
};
use bench_programs::generator::{Counts, FIRST_PORT, Frame, MAX_FRAME_LEN, Orders, PORTS};
use hickory_proto::rr::RecordType;

use crate::{
    checksum, client,
    cpu::stay_on,
    lab::{self, CLIENT_CPU, CLIENT_INTERFACE, Lab},
};

/// Frames that the kernel prepares and reuses: the maximum, so that few are prepared again
/// while the server's ring holds 256.
const BATCH: u32 = 256;

/// Interface for the generating program, attached only because the kernel's dispatcher must hold the program:
/// each run of a program outside the dispatcher waits for two RCU grace periods
/// (`bpf_dispatcher_change_prog`), in which nothing is sent. No packets pass this interface.
const UNUSED_INTERFACE: &str = "lo";

/// Runs of the program per system call: some 50 to 300 ms.
const RUNS: u32 = 1_000_000;

/// Length of an Ethernet header.
const ETHERNET_LEN: usize = 14;

/// Length of all headers before the message, over IPv4.
pub const HEADERS_LEN: usize = ETHERNET_LEN + 20 + 8;

/// Rate of the queries.
#[derive(Clone, Copy, Debug)]
pub enum Load {
    /// As many as possible: the server's interface always has the next one queued. The client's end
    /// receives few replies.
    Flood,
    /// A fixed rate, whether answered or not; the client's core receives replies first.
    Rate {
        /// Queries per second on average.
        rate: u32,
        /// Queries that leave together; 1 spaces them evenly.
        burst: u32,
    },
}

/// Frames of queries in the order of sending.
#[derive(Debug)]
pub struct Frames(pub Vec<Vec<u8>>);

impl Frames {
    /// Builds queries from lines of `name type`, from the lab's client to its server; with `edns`, they have an OPT
    /// of that size.
    pub fn of_lines(lab: &Lab, lines: &[String], edns: Option<u16>) -> Result<Self> {
        let hardware = lab.hardware_addresses()?;
        let frame = |(number, line): (usize, &String)| {
            let (name, record_type) = line
                .trim()
                .split_once(' ')
                .context("no type after the name")?;
            let message = message(number as u16, name, record_type.parse()?, edns)?;
            let from = SocketAddr::from((lab.client_address(), FIRST_PORT + number as u16 % PORTS));
            let frame = checksum::udp_frame(hardware, from, lab.endpoint(), &message);
            ensure!(
                frame.len() <= MAX_FRAME_LEN,
                "{name}: too long for the generator"
            );
            Ok(frame)
        };
        Ok(Self(
            lines.iter().enumerate().map(frame).collect::<Result<_>>()?,
        ))
    }
}

/// The generator, with its counting program on the client's end; detached when dropped.
pub struct Generator<'a> {
    lab: &'a Lab,
    object: Ebpf,
    orders: Array<MapData, OrderWords>,
    /// Counters of the programs.
    counts: Array<MapData, CountWords>,
    frames: u64,
    loads: u64,
}

/// Reads the counters of sent and received packets.
pub struct Counter<'a>(&'a Array<MapData, CountWords>);

impl Counter<'_> {
    /// Returns the totals of all loads so far.
    pub fn read(&self) -> Result<Counts> {
        Ok(zerocopy::transmute!(self.0.get(&0, 0)?))
    }
}

/// [`Orders`] as words, a type that aya knows to be plain data.
type OrderWords = [u64; size_of::<Orders>() / 8];

type CountWords = [u64; size_of::<Counts>() / 8];

impl<'a> Generator<'a> {
    /// Loads the generator with these queries and attaches the program that counts replies.
    pub fn new(lab: &'a Lab, frames: &Frames) -> Result<Self> {
        let count = u32::try_from(frames.0.len())?;
        ensure!(count > 0, "nothing to ask");
        let mut object = EbpfLoader::new()
            .map_max_entries("FRAMES", count)
            .load(bench_programs::GENERATOR)?;
        type FrameWords = [u64; size_of::<Frame>() / 8];
        let mut map: Array<&mut MapData, FrameWords> = object
            .map_mut("FRAMES")
            .context("no map FRAMES")?
            .try_into()?;
        for (number, bytes) in (0..).zip(&frames.0) {
            let mut padded = [0; MAX_FRAME_LEN];
            padded
                .get_mut(..bytes.len())
                .context("a name that is too long")?
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
        let generate = program(&mut object, "generate")?;
        generate.load()?;
        lab.client
            .run(|| generate.attach(UNUSED_INTERFACE, XdpMode::Skb))??;
        let count_replies = program(&mut object, "count")?;
        count_replies.load()?;
        lab.client
            .run(|| count_replies.attach(CLIENT_INTERFACE, XdpMode::Driver))??;
        lab.pin_napi()?;
        Ok(Self {
            lab,
            object,
            orders,
            counts,
            frames: count.into(),
            loads: 0,
        })
    }

    /// Returns the packets sent and received in all loads so far.
    pub fn counts(&self) -> Result<Counts> {
        Counter(&self.counts).read()
    }

    /// Sends queries from the client's CPU while `meanwhile` runs.
    pub fn during<T>(
        &mut self,
        load: Load,
        meanwhile: impl FnOnce(&Counter<'_>) -> Result<T>,
    ) -> Result<T> {
        self.loads += 1;
        let mut orders = Orders {
            load: self.loads,
            frames: self.frames,
            ..Orders::default()
        };
        match load {
            Load::Flood => {}
            Load::Rate { rate, burst } => {
                orders.rate = Orders::rate_of(rate);
                orders.burst = burst.into();
            }
        }
        let words: OrderWords = zerocopy::transmute!(orders);
        self.orders.set(0, words, 0)?;
        let Self {
            lab,
            object,
            orders,
            counts,
            ..
        } = self;
        let program: &Xdp = object
            .program("generate")
            .context("no program")?
            .try_into()?;
        let replies_first = !matches!(load, Load::Flood);
        lab.let_client_napi_wait(!replies_first)?;
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let asking = scope.spawn(|| lab.client.run(|| ask(program, replies_first, &over))?);
            let done = meanwhile(&Counter(counts));
            over.store(true, Ordering::Relaxed);
            // The rest of the run is short.
            let stopped = orders.set(0, OrderWords::default(), 0);
            let asked = asking
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            lab.let_client_napi_wait(false)?;
            // An error of the load explains why the measurement failed, so it comes first.
            asked?;
            stopped?;
            done
        })
    }
}

/// Runs the generating program until it stops; with `replies_first`, only while there are no
/// replies to receive.
fn ask(program: &Xdp, replies_first: bool, over: &AtomicBool) -> Result<()> {
    stay_on(CLIENT_CPU)?;
    if replies_first {
        lab::set_waiting(0, true)?;
    }
    let interface = nix::net::if_::if_nametoindex(CLIENT_INTERFACE)?;
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
            // A signal: the program was asked to stop, and the waiting thread notices.
            Err(ProgramError::SyscallError(call))
                if call.io_error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error).context("load by live frames (Linux 5.18)"),
        }
    }
    Ok(())
}

/// Returns an XDP program of the object.
fn program<'a>(object: &'a mut Ebpf, name: &str) -> Result<&'a mut Xdp> {
    Ok(object
        .program_mut(name)
        .with_context(|| format!("no program {name}"))?
        .try_into()?)
}

/// Returns a query as stub resolvers send it.
fn message(id: u16, name: &str, record_type: RecordType, edns: Option<u16>) -> Result<Vec<u8>> {
    let mut message = client::query(name, record_type, edns)?;
    message.metadata.id = id;
    Ok(message.to_vec()?)
}
