//! Log of queries and replies in the format dnstap (dnstap.info): Protocol Buffers in Frame Streams, to a
//! socket, a TCP address or a file.
//!
//! Like the text log, it is one for the whole process, so that the server's sockets, the interfaces and the
//! recursors write to it directly. A query costs one load while it is off; while it is on, a copy of the two messages
//! and a bounded queue that is never waited for.
//!
//! * [`Dnstap`]: takes exchanges, samples them, and queues them.
//! * [`writer`]: the thread that encodes and writes them.
//! * [`output`]: whether the output can be opened, before the server starts.
//! * [`frames`]: the stream protocol, and the Protocol Buffers messages.

mod frames;
mod output;
mod writer;

pub use output::problem;

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant, SystemTime},
};

use crossbeam_channel::{Sender, bounded};
use dns_core::{
    config::{DnstapConfig, DnstapMessages},
    wire::Transport,
};
use dns_kit::{
    metrics::families,
    threads::{self, OnPanic},
};
use parking_lot::Mutex;
use prometheus::{Registry, proto::MetricFamily};

/// Maximum number of exchanges in the queue.
const MAX_QUEUED: usize = 16_384;
/// Maximum size in bytes of the messages in the queue.
const MAX_QUEUED_BYTES: usize = 16 << 20;
/// Time that [`finish`] waits for the writer.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);

/// The log of this process.
static DNSTAP: OnceLock<Dnstap> = OnceLock::new();

/// Starts the log of this process; does nothing if it has one. `version` is the default of
/// [`DnstapConfig::version`].
pub fn start(config: &DnstapConfig, version: &str) -> io::Result<()> {
    if DNSTAP.get().is_none() {
        let _already_started = DNSTAP.set(Dnstap::new(config, version)?);
    }
    Ok(())
}

/// Returns the log of this process; `None` if it is off.
#[inline]
pub fn get() -> Option<&'static Dnstap> {
    DNSTAP.get()
}

/// Writes what is queued, and ends the stream. Blocks for at most two seconds.
pub fn finish() {
    if let Some(dnstap) = get() {
        dnstap.finish();
    }
}

/// The protocol of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Plain DNS over UDP (field `socket_protocol`).
    Udp,
    /// Plain DNS over TCP (field `socket_protocol`).
    Tcp,
    /// DNS over TLS (RFC 7858).
    Dot,
}

impl From<Transport> for Protocol {
    fn from(transport: Transport) -> Self {
        match transport {
            Transport::Udp => Self::Udp,
            Transport::Tcp => Self::Tcp,
        }
    }
}

/// A query and its reply.
#[derive(Clone, Copy, Debug)]
pub struct Exchange<'a> {
    /// Protocol between the two.
    pub protocol: Protocol,
    /// Sender of the query.
    pub from: Option<SocketAddr>,
    /// Receiver of the query; its address may be unspecified.
    pub to: Option<SocketAddr>,
    /// The query in wire form.
    pub query: &'a [u8],
    /// The reply; `None` if there was none.
    pub reply: Option<&'a [u8]>,
    /// Time since the reply, or since the query was given up.
    pub age: Duration,
    /// Time from the query to the reply.
    pub took: Duration,
}

/// The parties of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Parties {
    ClientAndServer,
    ServerAndRecursor,
}

/// An exchange in the queue.
#[derive(Debug)]
struct Queued {
    parties: Parties,
    protocol: Protocol,
    from: Option<SocketAddr>,
    to: Option<SocketAddr>,
    query: Vec<u8>,
    reply: Option<Vec<u8>>,
    /// Time of the query since 1970, by this machine's clock.
    query_time: Duration,
    reply_time: Duration,
    /// Text of the field `extra` in the frame.
    extra: String,
}

impl Queued {
    /// Returns the number of messages to write.
    fn messages(&self, wanted: DnstapMessages) -> u64 {
        let (query, reply) = match self.parties {
            Parties::ClientAndServer => (wanted.client_query, wanted.client_response),
            Parties::ServerAndRecursor => (wanted.forwarder_query, wanted.forwarder_response),
        };
        u64::from(query) + u64::from(reply && self.reply.is_some())
    }

    fn bytes(&self) -> usize {
        self.query.len() + self.reply.as_ref().map_or(0, Vec::len)
    }
}

/// Counters, and what the writer shares with the senders.
#[derive(Debug, Default)]
struct Shared {
    queued_bytes: AtomicUsize,
    stopping: AtomicBool,
    is_open: AtomicBool,
    /// Why it is not open, with the remedy.
    problem: Mutex<Option<String>>,
    written: AtomicU64,
    /// Messages lost because the queue was full or the connection broke.
    lost: AtomicU64,
    /// Sampled queries of interfaces lost beyond the tap's rate.
    lost_at_interfaces: AtomicU64,
}

/// The log: samples exchanges and queues them for its writer.
#[derive(Debug)]
pub struct Dnstap {
    queue: Sender<Box<Queued>>,
    messages: DnstapMessages,
    /// One exchange in this many is logged.
    sample: u32,
    interface_sample: u32,
    shared: Arc<Shared>,
    writer: JoinHandle<()>,
}

impl Dnstap {
    /// Starts a log with its writer.
    pub fn new(config: &DnstapConfig, version: &str) -> io::Result<Self> {
        let (queue, exchanges) = bounded(MAX_QUEUED);
        let shared = Arc::<Shared>::default();
        let writer = writer::Writer::new(config, version, exchanges, Arc::clone(&shared));
        // Without the writer, the queue fills and losses are counted.
        let writer = threads::spawn("dnstap", OnPanic::Continue, move || writer.run())?;
        let DnstapConfig {
            messages,
            sample,
            interface_sample,
            ..
        } = *config;
        Ok(Self {
            queue,
            messages,
            sample,
            interface_sample,
            shared,
            writer,
        })
    }

    /// Returns the sampling rate of queries at interfaces, one in this many; 0 for none.
    pub fn interface_sample(&self) -> u32 {
        if self.messages.client_query || self.messages.client_response {
            self.interface_sample
        } else {
            0
        }
    }

    /// Logs a client's query that the server has answered.
    pub fn client(&self, exchange: &Exchange<'_>, answered_by: &str) {
        if (self.messages.client_query || self.messages.client_response) && self.samples() {
            let extra = format!(
                "path=userspace answered_by={answered_by}{}",
                self.sample_note()
            );
            self.queue(Parties::ClientAndServer, exchange, extra);
        }
    }

    /// Logs a client's query that an interface has answered and that stands for `weight` such queries: one in
    /// `weight` was seen. `details` are fields for `extra`.
    pub fn interface(&self, exchange: &Exchange<'_>, weight: u32, details: &str) {
        // A query that stands for more than the wanted number is logged in any case.
        let every = self.interface_sample().max(weight).max(1);
        // Viewers of the tap may sample more densely.
        if self.interface_sample() != 0 && fastrand::u32(..every) < weight.max(1) {
            let extra = format!("path=interface sample=1/{every} {details}");
            self.queue(Parties::ClientAndServer, exchange, extra);
        }
    }

    /// Counts sampled queries of interfaces that were lost on the way here.
    pub fn lost_at_interfaces(&self, number: u32) {
        self.shared
            .lost_at_interfaces
            .fetch_add(number.into(), Ordering::Relaxed);
    }

    /// Logs a query to a recursor.
    pub fn forwarder(&self, exchange: &Exchange<'_>, recursor: &str) {
        if (self.messages.forwarder_query || self.messages.forwarder_response) && self.samples() {
            let extra = format!("recursor={recursor}{}", self.sample_note());
            self.queue(Parties::ServerAndRecursor, exchange, extra);
        }
    }

    /// Returns whether the next exchange is logged.
    fn samples(&self) -> bool {
        // At random: a counter would be biased by periodic clients.
        self.sample <= 1 || fastrand::u32(..self.sample) == 0
    }

    fn sample_note(&self) -> String {
        if self.sample > 1 {
            format!(" sample=1/{}", self.sample)
        } else {
            String::new()
        }
    }

    fn queue(&self, parties: Parties, exchange: &Exchange<'_>, extra: String) {
        let Exchange {
            protocol,
            from,
            to,
            query,
            reply,
            age,
            took,
        } = *exchange;
        // dnstap has times since 1970. A clock before that gives 0.
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let reply_time = now.saturating_sub(age);
        // The writer needs copies: the caller's buffers are used for the next query.
        let queued = Queued {
            parties,
            protocol,
            from,
            to,
            query: query.to_vec(),
            reply: reply.map(<[u8]>::to_vec),
            query_time: reply_time.saturating_sub(took),
            reply_time,
            extra,
        };
        let bytes = queued.bytes();
        let messages = queued.messages(self.messages);
        // Added first: the writer may take the exchange and subtract it at once.
        let is_full =
            self.shared.queued_bytes.fetch_add(bytes, Ordering::Relaxed) > MAX_QUEUED_BYTES;
        // Never waited for: a reader that hangs must not delay answers.
        if is_full || self.queue.try_send(Box::new(queued)).is_err() {
            self.shared.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.shared.lost.fetch_add(messages, Ordering::Relaxed);
        }
    }

    /// Writes what is queued, and ends the stream. Blocks for at most [`FINISH_TIMEOUT`].
    pub fn finish(&self) {
        self.shared.stopping.store(true, Ordering::Release);
        let begun = Instant::now();
        // A thread cannot be joined with a time limit.
        while !self.writer.is_finished() && begun.elapsed() < FINISH_TIMEOUT {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns whether the output is open.
    pub fn is_open(&self) -> bool {
        self.shared.is_open.load(Ordering::Relaxed)
    }

    /// Returns why the output could not be opened or written last, with the remedy.
    pub fn problem(&self) -> Option<String> {
        self.shared.problem.lock().clone()
    }

    /// Returns the number of messages lost since the start.
    pub fn lost(&self) -> u64 {
        self.shared.lost.load(Ordering::Relaxed)
    }

    /// Registers the log's metrics.
    pub fn register(&self, registry: &Registry) -> prometheus::Result<()> {
        let shared = Arc::clone(&self.shared);
        families::DNSTAP_MESSAGES_TOTAL.scrape(registry, move || metrics(&shared))
    }
}

fn metrics(shared: &Shared) -> Vec<MetricFamily> {
    let Shared {
        queued_bytes: _,
        stopping: _,
        is_open,
        problem: _,
        written,
        lost,
        lost_at_interfaces,
    } = shared;
    let written = written.load(Ordering::Relaxed);
    let lost = lost.load(Ordering::Relaxed);
    let lost_at_interfaces = lost_at_interfaces.load(Ordering::Relaxed);
    let is_open = f64::from(u8::from(is_open.load(Ordering::Relaxed)));
    vec![
        families::DNSTAP_MESSAGES_TOTAL.is(written),
        families::DNSTAP_LOST_TOTAL.of([(["queue"], lost), (["interface"], lost_at_interfaces)]),
        families::DNSTAP_UP.is(is_open),
    ]
}
