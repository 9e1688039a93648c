//! One recursor, with retries after network errors and statistics.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use arc_swap::ArcSwapOption;

use super::{
    TryError,
    failed_tries::{FailedTries, Reason},
    host_names::{HostName, HostNames, has_host_name, socket_address},
    message,
    outgoing::Form,
    tcp::TcpConnections,
    udp::{Matching, UdpSockets},
    validated::ValidatedReply,
};
use dns_core::wire::{Query, Transport};

/// Consecutive tries without any answer after which a recursor counts as silent.
const SILENT_TRIES: u32 = 5;
/// Interval between probes of a silent recursor while no query needs its answer.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// Settings for all recursors of a list.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecursorOptions {
    pub(crate) timeout: Duration,
    /// Number of retries after network errors.
    pub(crate) max_retries: u32,
    /// The parts of a client's query that are forwarded.
    pub(crate) form: Form,
    /// How strictly the question of a reply is checked.
    pub(crate) matching: Matching,
    /// Whether to randomise the letter case of the question (0x20).
    pub(crate) randomise_case: bool,
}

#[derive(Debug)]
pub(crate) struct Recursor {
    /// Name as configured, `host:port`.
    name: Arc<str>,
    /// Settings shared with the other recursors of the list.
    options: RecursorOptions,
    /// Host name and port; `None` if configured by address.
    host: Option<(Arc<HostName>, u16)>,
    /// The sockets; `None` while no address is known.
    sockets: ArcSwapOption<Sockets>,
    /// Counters of tries, by result.
    pub(crate) counters: RecursorCounters,
    /// Detects that the recursor has fallen silent.
    silence: Silence,
}

/// State that distinguishes a silent recursor from a responsive one.
#[derive(Debug)]
struct Silence {
    /// Number of consecutive tries without any answer.
    tries: AtomicU32,
    /// Start of the clock for `probed_ms`.
    since: Instant,
    /// Time of the last probe, in milliseconds after `since`.
    probed_ms: AtomicU64,
}

/// Result of [`Recursor::worth`] for a query that already holds an NXDOMAIN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Worth {
    /// The recursor has answered recently.
    Waiting,
    /// The recursor is silent; the query should probe it now.
    Probing,
    /// The recursor is silent and was probed recently.
    Nothing,
}

/// The sockets for one address.
#[derive(Debug)]
struct Sockets {
    address: SocketAddr,
    udp: UdpSockets,
    tcp: TcpConnections,
}

/// Tries of a recursor since the start, by result.
#[derive(Debug)]
pub(crate) struct RecursorCounters {
    /// Tries, and failures by reason.
    pub(crate) failed: Arc<FailedTries>,
    /// Number of datagrams that matched no query in flight: late, wrong or forged.
    pub(crate) mismatched: Arc<AtomicU64>,
    /// Smoothed response time in microseconds; 0 before the first reply.
    pub(crate) latency_us: AtomicU64,
    /// Number of replies per latency bucket, with the bounds of [`LATENCY_BOUNDS_US`] in
    /// microseconds; the last bucket counts all slower ones.
    pub(crate) latencies: [AtomicU64; LATENCY_BOUNDS_US.len() + 1],
    /// Sum of all latencies in microseconds.
    pub(crate) latency_sum_us: AtomicU64,
}

/// Upper bounds of the latency histogram in microseconds.
pub(crate) const LATENCY_BOUNDS_US: [u64; 12] =
    [250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 2_500_000];

impl RecursorCounters {
    /// Creates the counters of the recursor with this name.
    fn new(recursor: &str) -> Self {
        Self {
            failed: FailedTries::new(recursor),
            mismatched: Arc::default(),
            latency_us: AtomicU64::new(0),
            latencies: Default::default(),
            latency_sum_us: AtomicU64::new(0),
        }
    }
}

impl Recursor {
    /// Creates a recursor at `name`, which is `address:port`, `[address]:port` or `host:port`.
    pub(crate) fn new(name: &str, options: RecursorOptions, hosts: &Arc<HostNames>) -> Self {
        let counters = RecursorCounters::new(name);
        let sockets = socket_address(name).map(|address| Arc::new(Sockets::new(address, options, &counters)));
        let host = name
            .rsplit_once(':')
            .filter(|_| has_host_name(name))
            .and_then(|(host, port)| Some((hosts.follow(host), port.parse().ok()?)));
        let silence =
            Silence { tries: AtomicU32::new(0), since: Instant::now(), probed_ms: AtomicU64::new(0) };
        Self { name: name.into(), options, host, sockets: ArcSwapOption::new(sockets), counters, silence }
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Returns the current address, if known.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.sockets.load().as_ref().map(|sockets| sockets.address)
    }

    /// Queries the recursor, with the configured retries. `message` comes from [`Form::message`] for
    /// `query`; its id and, with 0x20, its letter case are overwritten.
    pub(crate) async fn ask(
        &self,
        query: &Query<'_>,
        transport: Transport,
        message: &mut [u8],
    ) -> Result<ValidatedReply, TryError> {
        let mut tries = 0;
        let reply = loop {
            // The last try is for recursors that do not preserve the letter case.
            let randomise_case = self.options.randomise_case && tries == 0;
            let outcome = self.ask_once(query, transport, message, randomise_case).await;
            match outcome {
                Err(error) if error.is_network_error() && tries < self.options.max_retries => tries += 1,
                Err(TryError::TimedOut) if randomise_case && tries == self.options.max_retries => tries += 1,
                outcome => break outcome?,
            }
        };
        Ok(self.made_whole(query, transport, message, reply).await)
    }

    /// Replaces a reply that is truncated or rejects EDNS with a better one by TCP or without EDNS
    /// (RFC 6891, section 7). A client without TCP, such as musl, gets as much of the complete
    /// answer as fits.
    async fn made_whole(
        &self,
        query: &Query<'_>,
        transport: Transport,
        message: &mut [u8],
        reply: ValidatedReply,
    ) -> ValidatedReply {
        let form = self.options.form;
        if form.transparent {
            return reply;
        }
        let better = if transport == Transport::Udp && reply.is_truncated() {
            self.ask_once(query, Transport::Tcp, message, false).await
        } else if matches!(reply.rcode(), message::FORMERR | message::NOTIMP) && reply.index.opt.is_none() {
            let mut plain = message[..query.question_range().end].to_vec();
            // No additional records.
            plain[11] = 0;
            self.ask_once(query, transport, &mut plain, false).await
        } else {
            return reply;
        };
        better.unwrap_or(reply)
    }

    async fn ask_once(
        &self,
        query: &Query<'_>,
        transport: Transport,
        message: &mut [u8],
        randomise_case: bool,
    ) -> Result<ValidatedReply, TryError> {
        self.counters.failed.began();
        let sockets = self.sockets().await.inspect_err(|_| self.counters.failed.failed(Reason::NoAddress))?;
        let start = Instant::now();
        let question = query.question_range();
        let outcome = match transport {
            Transport::Udp => {
                if randomise_case {
                    randomise(&mut message[question.clone()]);
                }
                let alone = self.options.form.subnet(query).is_some();
                sockets.udp.ask(message, question, randomise_case, alone).await
            }
            Transport::Tcp => sockets.tcp.ask(message, question).await,
        };
        let outcome = outcome.and_then(ValidatedReply::new);
        self.note(&outcome, start.elapsed());
        if outcome.as_ref().is_err_and(|error| error.is_network_error())
            && let Some((host, _)) = &self.host
        {
            // The host name may have a different address now.
            host.failed();
        }
        outcome
    }

    /// Returns whether a query that already holds an NXDOMAIN should wait for this recursor. While
    /// the recursor is silent, one query per second probes it.
    pub(crate) fn worth(&self) -> Worth {
        let Silence { tries, since, probed_ms } = &self.silence;
        if tries.load(Ordering::Relaxed) < SILENT_TRIES {
            return Worth::Waiting;
        }
        let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let now = milliseconds(since.elapsed());
        let probed = probed_ms.load(Ordering::Relaxed);
        let is_due = now.saturating_sub(probed) >= milliseconds(PROBE_INTERVAL);
        let mine =
            is_due && probed_ms.compare_exchange(probed, now, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if mine { Worth::Probing } else { Worth::Nothing }
    }

    fn note(&self, outcome: &Result<ValidatedReply, TryError>, took: Duration) {
        match outcome {
            Err(TryError::TimedOut) => _ = self.silence.tries.fetch_add(1, Ordering::Relaxed),
            // The recursor was not queried.
            Err(TryError::Busy) => {}
            // Written only on a change, because all threads read it.
            _ if self.silence.tries.load(Ordering::Relaxed) == 0 => {}
            _ => self.silence.tries.store(0, Ordering::Relaxed),
        }
        let RecursorCounters { failed, mismatched: _, latency_us, latencies, latency_sum_us } =
            &self.counters;
        if outcome.is_ok() {
            let took = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).max(1);
            let before = latency_us.load(Ordering::Relaxed);
            let after = if before == 0 { took } else { before - before / 8 + took / 8 };
            latency_us.store(after, Ordering::Relaxed);
            let bucket = LATENCY_BOUNDS_US.partition_point(|&bound| bound < took);
            latencies[bucket].fetch_add(1, Ordering::Relaxed);
            latency_sum_us.fetch_add(took, Ordering::Relaxed);
        }
        if let Some(reason) = Reason::of(outcome) {
            failed.failed(reason);
        }
    }

    /// Returns the sockets for the current address.
    async fn sockets(&self) -> Result<Arc<Sockets>, TryError> {
        let open = self.sockets.load_full();
        let address = match (&self.host, &open) {
            (None, Some(sockets)) => return Ok(Arc::clone(sockets)),
            // The address's zone was not an interface before.
            (None, None) => socket_address(&self.name),
            (Some((host, port)), _) => {
                host.address(self.options.timeout).await.map(|address| SocketAddr::new(address, *port))
            }
        };
        let address = address.ok_or(TryError::Refused)?;
        if let Some(sockets) = open.filter(|sockets| sockets.address == address) {
            return Ok(sockets);
        }
        let sockets = Arc::new(Sockets::new(address, self.options, &self.counters));
        self.sockets.store(Some(Arc::clone(&sockets)));
        Ok(sockets)
    }
}

impl Sockets {
    fn new(address: SocketAddr, options: RecursorOptions, counters: &RecursorCounters) -> Self {
        let RecursorOptions { timeout, matching, form, .. } = options;
        let mismatched = Arc::clone(&counters.mismatched);
        Self {
            address,
            udp: UdpSockets::new(address, timeout, matching, mismatched),
            tcp: TcpConnections::new(address, timeout, matching, !form.transparent),
        }
    }
}

/// Randomises the letter case of the question's name (draft-vixie-dnsext-dns0x20). The last four
/// bytes, type and class, are unchanged.
fn randomise(question: &mut [u8]) {
    let Some(end) = question.len().checked_sub(4) else { return };
    for bytes in question[..end].chunks_mut(32) {
        let mut bits: u32 = rand::random();
        for byte in bytes.iter_mut().filter(|byte| byte.is_ascii_alphabetic()) {
            *byte = *byte & !0x20 | if bits & 1 == 0 { 0 } else { 0x20 };
            bits >>= 1;
        }
    }
}
