//! One recursor, with retries after network errors and statistics.

use std::{
    net::SocketAddr,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use arc_swap::ArcSwapOption;

use super::{
    TryError,
    endpoint::{Endpoint, has_host_name, socket_address},
    failed_tries::{FailedTries, Reason},
    host_names::{HostName, HostNames},
    message::{self, Form, Forwarded, QueryMessage, ValidatedReply},
    own::OwnAddresses,
    tcp::{TcpConnections, Tls},
    udp::{Landing, Matching, SocketChoice, UdpSockets},
};
use dns_core::wire::{OPTION_PADDING, Query, Transport, push_option};
use dns_dnstap::{Exchange, Protocol};
use dns_kit::clock::milliseconds;

/// Consecutive tries without any answer after which a recursor counts as silent.
const SILENT_TRIES: u32 = 5;
/// Interval between probes of a silent recursor while no query needs its answer.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// Size of padded queries over TLS, in bytes (RFC 8467, section 4.1).
const PADDING_BLOCK: usize = 128;
/// Consecutive queries with EDNS without any answer after which one is sent without EDNS.
const EDNS_TRIES: u32 = 2;
/// Minimum interval between queries without EDNS to a silent recursor.
const PLAIN_INTERVAL: Duration = Duration::from_secs(10);
/// Interval between queries with EDNS to a recursor that drops them.
const EDNS_CHECK_INTERVAL: Duration = Duration::from_secs(300);

/// The outcome of a try.
pub(crate) type TryResult = Result<ValidatedReply, TryError>;

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
    /// Name as configured: `host:port`, or `tls://host:port#name`.
    pub(crate) name: Arc<str>,
    /// The part `host:port` of the name.
    endpoint: Arc<str>,
    /// TLS of all queries; `None` for plain DNS.
    tls: Option<Arc<Tls>>,
    /// Settings shared with the other recursors of the list.
    options: RecursorOptions,
    /// Host name and port; `None` if configured by address.
    host: Option<(Arc<HostName>, u16)>,
    /// Addresses of this server.
    own: OwnAddresses,
    /// The sockets; `None` while no address is known.
    sockets: ArcSwapOption<Sockets>,
    /// Counters of tries, by result.
    pub(crate) counters: RecursorCounters,
    /// Detects that the recursor has fallen silent, or that queries with EDNS are dropped.
    silence: Silence,
}

/// Whether a query that already holds an NXDOMAIN queries a recursor as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProbeDecision {
    /// The recursor has answered recently: wait for it.
    Wait,
    /// The recursor is silent: probe it now, without waiting.
    Probe,
    /// The recursor is silent and was probed recently.
    Skip,
}

/// Whether the recursor is silent, and whether it, or a firewall before it, drops queries with EDNS (RFC 6891, section
/// 6.2.2). Times are in milliseconds after `since`.
#[derive(Debug)]
struct Silence {
    since: Instant,
    /// Number of consecutive tries without any answer.
    tries: AtomicU32,
    /// Earliest time of the next probe of a silent recursor.
    probe_at_ms: AtomicU64,
    /// Number of consecutive queries with EDNS without any answer.
    edns_tries: AtomicU32,
    /// Earliest time of the next query without EDNS.
    plain_at_ms: AtomicU64,
    /// Time of the next query with EDNS while EDNS is dropped; [`EDNS_WORKS`] otherwise.
    check_at_ms: AtomicU64,
}

/// Value of [`Silence::check_at_ms`] while queries carry EDNS.
const EDNS_WORKS: u64 = u64::MAX;

impl Silence {
    fn new() -> Self {
        Self {
            since: Instant::now(),
            tries: AtomicU32::new(0),
            probe_at_ms: AtomicU64::new(milliseconds(PROBE_INTERVAL)),
            edns_tries: AtomicU32::new(0),
            plain_at_ms: AtomicU64::new(0),
            check_at_ms: AtomicU64::new(EDNS_WORKS),
        }
    }

    fn drops_edns(&self) -> bool {
        self.check_at_ms.load(Ordering::Relaxed) != EDNS_WORKS
    }

    /// Records that a query with EDNS was answered; returns whether it was considered dropped.
    fn answered_edns(&self) -> bool {
        // Written only on a change, because all threads read it.
        if self.edns_tries.load(Ordering::Relaxed) != 0 {
            self.edns_tries.store(0, Ordering::Relaxed);
        }
        self.drops_edns() && self.check_at_ms.swap(EDNS_WORKS, Ordering::Relaxed) != EDNS_WORKS
    }

    /// Returns whether the query should be repeated without EDNS, after it timed out.
    fn try_without_edns(&self) -> bool {
        self.edns_tries.load(Ordering::Relaxed) >= EDNS_TRIES
            && self.is_my_turn(&self.plain_at_ms, PLAIN_INTERVAL)
    }

    /// Records that a query without EDNS was answered after others with EDNS were not.
    fn found_edns_dropped(&self) {
        self.check_at_ms.store(self.now_ms(), Ordering::Relaxed);
    }

    /// Returns whether a query should check now if EDNS is still dropped.
    fn edns_check_is_due(&self) -> bool {
        self.drops_edns() && self.is_my_turn(&self.check_at_ms, EDNS_CHECK_INTERVAL)
    }

    /// Returns whether the time `at` has come, and moves it by `interval`; true for one caller.
    fn is_my_turn(&self, at: &AtomicU64, interval: Duration) -> bool {
        let now = self.now_ms();
        let due = at.load(Ordering::Relaxed);
        now >= due
            && at
                .compare_exchange(
                    due,
                    now + milliseconds(interval),
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                )
                .is_ok()
    }

    fn now_ms(&self) -> u64 {
        milliseconds(self.since.elapsed())
    }
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
pub(crate) const LATENCY_BOUNDS_US: [u64; 12] = [
    250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 2_500_000,
];

impl RecursorCounters {
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
    /// Creates a recursor at `name`, which is `address:port`, `[address]:port` or `host:port`, after
    /// `tls://` with DNS over TLS and the name in its certificate after `#`.
    pub(crate) fn new(name: &str, options: RecursorOptions, hosts: &Arc<HostNames>) -> Self {
        let counters = RecursorCounters::new(name);
        let endpoint = Endpoint::of(name);
        let tls = endpoint.tls.map(|server| Arc::new(Tls::new(server)));
        let endpoint = endpoint.address;
        let sockets = socket_address(endpoint)
            .map(|address| Arc::new(Sockets::new(address, options, &counters, tls.clone())));
        let mut host = None;
        if has_host_name(endpoint)
            && let Some((name, port)) = endpoint.rsplit_once(':')
            && let Ok(port) = port.parse()
        {
            host = Some((hosts.follow(name), port));
        }
        Self {
            name: name.into(),
            endpoint: endpoint.into(),
            tls,
            options,
            host,
            own: hosts.own.clone(),
            sockets: ArcSwapOption::new(sockets),
            counters,
            silence: Silence::new(),
        }
    }

    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.sockets.load().as_ref().map(|sockets| sockets.address)
    }

    /// Returns whether the recursor is this server, as far as its address is known.
    pub(crate) fn is_own(&self) -> bool {
        self.address()
            .is_some_and(|address| self.own.contains(address))
    }

    /// Returns whether queries over UDP are sent without EDNS, because queries with EDNS are dropped.
    pub(crate) fn drops_edns(&self) -> bool {
        self.silence.drops_edns()
    }

    /// Queries the recursor, with the configured retries. `message` comes from [`Form::message`] for
    /// `query`; its id and, with 0x20, its letter case are overwritten.
    ///
    /// While EDNS is dropped, queries over UDP are sent without it. `first` is the outcome of the first try, if
    /// there was one already.
    pub(crate) async fn ask(
        self: &Arc<Self>,
        query: &Query<'_>,
        message: &mut [u8],
        first: Option<TryResult>,
    ) -> TryResult {
        let transport = self.transport(query);
        let mut plain;
        let mut message = message;
        if first.is_none() && transport == Transport::Udp && self.drops_edns() {
            if self.silence.edns_check_is_due() {
                self.check_edns(query, message);
            }
            plain = without_edns(query, message);
            message = &mut plain;
        }
        self.ask_again(query, transport, message, first).await
    }

    /// Returns a query over UDP that can be sent without waiting; `None` if the address is unknown, or the query
    /// takes another form.
    pub(crate) fn prepare(self: &Arc<Self>, query: &Query<'_>) -> Option<PreparedQuery> {
        // Tasks take over the rare cases: several messages, or a connection.
        if self.transport(query) != Transport::Udp || self.drops_edns() {
            return None;
        }
        let sockets = self.open_sockets()?;
        let mut message = self.options.form.message(query);
        let question = query.question_range();
        if self.options.randomise_case {
            randomise(&mut message[question.clone()]);
        }
        Some(PreparedQuery {
            recursor: Arc::clone(self),
            sockets,
            message,
            question,
            choice: self.socket_choice(query),
        })
    }

    /// Returns what a client gets for this recursor's reply.
    pub(crate) fn answer(&self, validated: ValidatedReply, query: &Query<'_>) -> Forwarded {
        Forwarded {
            recursor: Some(Arc::clone(&self.name)),
            ..validated.finish(query, self.options.form)
        }
    }

    fn socket_choice(&self, query: &Query<'_>) -> SocketChoice {
        match self.options.form.subnet(query) {
            // Queries for several subnets ask the same question: on one socket, the reply to one
            // could be taken for another's.
            Some(_) => SocketChoice::WithoutQuestion,
            None => SocketChoice::Any,
        }
    }

    /// Returns the transport of a query to this recursor.
    fn transport(&self, query: &Query<'_>) -> Transport {
        // An encrypted recursor must never get a query in the clear.
        if self.tls.is_some() {
            Transport::Tcp
        } else {
            query.transport
        }
    }

    /// Repeats a query without EDNS that has timed out, if earlier ones with EDNS got no answer either.
    /// Once it is answered, others are sent without EDNS as well, until one with EDNS is answered again.
    pub(crate) async fn ask_without_edns(
        self: &Arc<Self>,
        query: &Query<'_>,
        message: &[u8],
    ) -> Option<ValidatedReply> {
        // With transparent forwarding, the client decides about EDNS, as behind bosh-dns.
        let may_help = self.transport(query) == Transport::Udp && !self.options.form.transparent;
        if !may_help || self.drops_edns() || !self.silence.try_without_edns() {
            return None;
        }
        let mut plain = without_edns(query, message);
        let reply = self
            .ask_once(query, Transport::Udp, &mut plain)
            .await
            .ok()?;
        self.silence.found_edns_dropped();
        // The recursor may merely have been down for a moment.
        if self.silence.edns_check_is_due() {
            self.check_edns(query, message);
        }
        Some(
            self.complete(query, Transport::Udp, &mut plain, reply)
                .await,
        )
    }

    /// Queries with EDNS in the background, to find out whether such queries are still dropped.
    fn check_edns(self: &Arc<Self>, query: &Query<'_>, message: &[u8]) {
        let recursor = Arc::clone(self);
        let query = query.to_owned();
        let mut message = message.to_vec();
        tokio::spawn(async move {
            let outcome = recursor
                .ask_once(&query.as_query(), Transport::Udp, &mut message)
                .await;
            if matches!(outcome, Err(TryError::TimedOut)) {
                tracing::warn!(
                    recursor = &*recursor.name,
                    "a recursor, or a firewall before it, drops queries with EDNS: it is queried without EDNS, and \
                     DNSSEC records and large replies over UDP are lost; checked again every {} s",
                    EDNS_CHECK_INTERVAL.as_secs(),
                );
            }
        });
    }

    /// Queries with the configured retries, and improves an incomplete reply.
    async fn ask_again(
        &self,
        query: &Query<'_>,
        transport: Transport,
        message: &mut [u8],
        mut first: Option<TryResult>,
    ) -> TryResult {
        let mut tries = 0;
        let reply = loop {
            let outcome = match first.take() {
                Some(outcome) => outcome,
                None => self.ask_once(query, transport, message).await,
            };
            match outcome {
                // As in bosh-dns, only timeouts, wrong ids and closed ports are tried again
                // (observed).
                Err(error) if error.is_network_error() && tries < self.options.max_retries => {
                    tries += 1
                }
                outcome => break outcome?,
            }
        };
        if !self.is_incomplete(transport, message, &reply) {
            return Ok(reply);
        }
        // Boxed like other rare ways, because every query's future would have room for it.
        Ok(Box::pin(self.complete(query, transport, message, reply)).await)
    }

    /// Returns whether [`Self::complete`] may find a better reply.
    fn is_incomplete(&self, transport: Transport, message: &[u8], reply: &ValidatedReply) -> bool {
        let is_truncated = transport == Transport::Udp && reply.is_truncated();
        // With transparent forwarding, the client repeats the query over TCP or without EDNS itself.
        !self.options.form.transparent && (is_truncated || rejects_edns(message, reply))
    }

    /// Replaces a reply that rejects EDNS by one to a query without EDNS, and a
    /// truncated one by the reply over TCP. A client without TCP, such as musl, gets as much of the
    /// complete answer as fits.
    async fn complete(
        &self,
        query: &Query<'_>,
        transport: Transport,
        message: &mut [u8],
        mut reply: ValidatedReply,
    ) -> ValidatedReply {
        let mut plain;
        let mut message = message;
        if rejects_edns(message, &reply) {
            plain = without_edns(query, message);
            message = &mut plain;
            if let Ok(better) = self.ask_once(query, transport, message).await {
                reply = better;
            }
        }
        // If this fails, the client gets the truncated reply, and repeats the query over TCP.
        if transport == Transport::Udp
            && reply.is_truncated()
            && let Ok(whole) = self.ask_once(query, Transport::Tcp, message).await
        {
            reply = whole;
        }
        reply
    }

    async fn ask_once(
        &self,
        query: &Query<'_>,
        transport: Transport,
        message: &mut [u8],
    ) -> TryResult {
        // Before the address is known: a failure without one is a try, too.
        self.counters.failed.began();
        let sockets = self
            .sockets()
            .await
            .inspect_err(|_| self.counters.failed.failed(Reason::NoAddress))?;
        let start = Instant::now();
        let question = query.question_range();
        let outcome = match transport {
            Transport::Udp => {
                // New letters for every try: a forger may have seen, or caused, the failure of the one before.
                let randomise_case = self.options.randomise_case;
                if randomise_case {
                    randomise(&mut message[question.clone()]);
                }
                let choice = self.socket_choice(query);
                let reply = sockets
                    .udp
                    .ask(message, question.clone(), randomise_case, choice)
                    .await;
                reply.and_then(|reply| ValidatedReply::of_datagram(reply, &message[question]))
            }
            Transport::Tcp if self.tls.is_some() => {
                let mut padded = padded(message);
                let reply = Box::pin(sockets.tcp.ask(&mut padded, question)).await;
                // dnstap and further tries use `message`, which must have the id that was sent.
                message::set_id(message, message::id(&padded));
                reply.and_then(ValidatedReply::new)
            }
            Transport::Tcp => Box::pin(sockets.tcp.ask(message, question))
                .await
                .and_then(ValidatedReply::new),
        };
        let took = start.elapsed();
        self.conclude(sockets.address, transport, message, &outcome, took);
        outcome
    }

    /// Records the outcome of a try with `message`. Must be called inside a tokio runtime if it has failed.
    pub(crate) fn conclude(
        &self,
        to: SocketAddr,
        transport: Transport,
        message: &[u8],
        outcome: &TryResult,
        took: Duration,
    ) {
        self.note(outcome, took);
        if let Some(dnstap) = dns_dnstap::get() {
            let protocol = if self.tls.is_some() {
                Protocol::Dot
            } else {
                transport.into()
            };
            let exchange = Exchange {
                protocol,
                from: None,
                to: Some(to),
                query: message,
                reply: outcome.as_ref().ok().map(|validated| &*validated.reply),
                age: Duration::ZERO,
                took,
            };
            dnstap.forwarder(&exchange, &self.name);
        }
        if transport == Transport::Udp && has_edns(message) {
            self.note_edns(outcome);
        }
        if outcome
            .as_ref()
            .is_err_and(|error| error.is_network_error())
            && let Some((host, _)) = &self.host
        {
            // The host name may have a different address now.
            host.failed();
        }
    }

    /// Returns whether a query that already holds an NXDOMAIN should wait for this recursor. While
    /// the recursor is silent, one query per second probes it.
    pub(crate) fn probe_decision(&self) -> ProbeDecision {
        let Silence {
            tries, probe_at_ms, ..
        } = &self.silence;
        if tries.load(Ordering::Relaxed) < SILENT_TRIES {
            ProbeDecision::Wait
        } else if self.silence.is_my_turn(probe_at_ms, PROBE_INTERVAL) {
            ProbeDecision::Probe
        } else {
            ProbeDecision::Skip
        }
    }

    /// Records the outcome of a query with EDNS over UDP.
    fn note_edns(&self, outcome: &TryResult) {
        match outcome {
            Err(TryError::TimedOut) => _ = self.silence.edns_tries.fetch_add(1, Ordering::Relaxed),
            Err(_) => {}
            Ok(_) => {
                if self.silence.answered_edns() {
                    tracing::info!(
                        recursor = &*self.name,
                        "the recursor answers queries with EDNS"
                    );
                }
            }
        }
    }

    fn note(&self, outcome: &TryResult, took: Duration) {
        match outcome {
            Err(TryError::TimedOut) => _ = self.silence.tries.fetch_add(1, Ordering::Relaxed),
            // The recursor was not queried.
            Err(error) if error.is_own() => {}
            // Written only on a change, because all threads read it.
            _ if self.silence.tries.load(Ordering::Relaxed) == 0 => {}
            _ => self.silence.tries.store(0, Ordering::Relaxed),
        }
        let RecursorCounters {
            failed,
            mismatched: _,
            latency_us,
            latencies,
            latency_sum_us,
        } = &self.counters;
        if outcome.is_ok() {
            // 0 stands for no reply yet.
            let took = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).max(1);
            // Smoothed like TCP's round-trip time (RFC 6298, section 2).
            let before = latency_us.load(Ordering::Relaxed);
            let after = if before == 0 {
                took
            } else {
                before - before / 8 + took / 8
            };
            latency_us.store(after, Ordering::Relaxed);
            let bucket = LATENCY_BOUNDS_US.partition_point(|&bound| bound < took);
            latencies[bucket].fetch_add(1, Ordering::Relaxed);
            latency_sum_us.fetch_add(took, Ordering::Relaxed);
        }
        match Reason::of(outcome) {
            Some(reason) => failed.failed(reason),
            None => failed.answered(),
        }
    }

    /// Returns the sockets for the current address; `None` if it is unknown or new.
    fn open_sockets(&self) -> Option<Arc<Sockets>> {
        let open = self.sockets.load_full()?;
        match &self.host {
            // The name has another address now, or several of which this one failed.
            Some((host, _)) if host.known() != Some(open.address.ip()) => None,
            _ => Some(open),
        }
    }

    /// Returns the sockets for the current address.
    async fn sockets(&self) -> Result<Arc<Sockets>, TryError> {
        if let Some(open) = self.open_sockets() {
            return Ok(open);
        }
        let address = match &self.host {
            // The address's zone was not an interface before.
            None => socket_address(&self.endpoint),
            Some((host, port)) => {
                let address = Box::pin(host.address(self.options.timeout)).await;
                address.map(|address| SocketAddr::new(address, *port))
            }
        };
        let address = address.ok_or(TryError::Refused)?;
        let sockets = Arc::new(Sockets::new(
            address,
            self.options,
            &self.counters,
            self.tls.clone(),
        ));
        // Several queries may come here at once. The last sockets stay; the others are closed with
        // the queries that opened them.
        self.sockets.store(Some(Arc::clone(&sockets)));
        Ok(sockets)
    }
}

/// A query over UDP that can be sent without waiting.
pub(crate) struct PreparedQuery {
    recursor: Arc<Recursor>,
    sockets: Arc<Sockets>,
    message: QueryMessage,
    /// The range of the question in the message.
    question: Range<usize>,
    choice: SocketChoice,
}

impl PreparedQuery {
    /// Returns the recursor's address.
    pub(crate) fn to(&self) -> SocketAddr {
        self.sockets.address
    }

    /// Sends the query, whose outcome `landing` gets.
    pub(crate) fn send(mut self, landing: Box<dyn Landing>) {
        let exact_case = self.recursor.options.randomise_case;
        let udp = &self.sockets.udp;
        if udp.begin(
            &mut self.message,
            self.question,
            exact_case,
            self.choice,
            landing,
        ) {
            self.recursor.counters.failed.began();
        }
    }
}

impl Sockets {
    fn new(
        address: SocketAddr,
        options: RecursorOptions,
        counters: &RecursorCounters,
        tls: Option<Arc<Tls>>,
    ) -> Self {
        let RecursorOptions {
            timeout,
            matching,
            form,
            ..
        } = options;
        let mismatched = Arc::clone(&counters.mismatched);
        // bosh-dns has a connection for each query; one with TLS, which it lacks, costs a handshake.
        let is_persistent = !form.transparent || tls.is_some();
        Self {
            address,
            udp: UdpSockets::new(address, timeout, matching, mismatched),
            tcp: TcpConnections::new(address, timeout, matching, is_persistent, tls),
        }
    }
}

/// Returns whether a query built by [`Form::message`] has an OPT, its only additional record.
fn has_edns(message: &[u8]) -> bool {
    message.get(11).is_some_and(|&additionals| additionals != 0)
}

/// Returns whether a reply rejects the EDNS of its query (RFC 6891, section 7).
fn rejects_edns(message: &[u8], reply: &ValidatedReply) -> bool {
    // A server that knows EDNS has an OPT in its reply, so its FORMERR has another reason.
    matches!(reply.rcode(), message::FORMERR | message::NOTIMP)
        && reply.index.opt.is_none()
        && has_edns(message)
}

/// Pads a query with EDNS to a multiple of [`PADDING_BLOCK`] bytes.
fn padded(message: &[u8]) -> Vec<u8> {
    // The option's code and length take 4 of the bytes.
    let mut padded = message.to_vec();
    let length = (message.len() + 4).next_multiple_of(PADDING_BLOCK);
    let zeros = vec![0; length - message.len() - 4];
    // Without an OPT the query stays as it is: padding is an option of EDNS (RFC 7830, section 3).
    push_option(&mut padded, length, OPTION_PADDING, &[&zeros]);
    padded
}

/// Returns a query built by [`Form::message`] without its OPT.
fn without_edns(query: &Query<'_>, message: &[u8]) -> Vec<u8> {
    let mut plain = message[..query.question_range().end].to_vec();
    // No additional records.
    plain[11] = 0;
    plain
}

/// Randomises the letter case of the question's name (draft-vixie-dnsext-dns0x20). The last four
/// bytes, type and class, are unchanged.
fn randomise(question: &mut [u8]) {
    let Some(end) = question.len().checked_sub(4) else {
        return;
    };
    for bytes in question[..end].chunks_mut(32) {
        // The letters add to what a forger must guess, so they must not be predictable.
        let mut bits: u32 = rand::random();
        for byte in bytes.iter_mut().filter(|byte| byte.is_ascii_alphabetic()) {
            *byte = *byte & !0x20 | if bits & 1 == 0 { 0 } else { 0x20 };
            bits >>= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use dns_core::config::Compat;

    use super::*;
    use crate::tests::options;

    fn recursor() -> Recursor {
        Recursor::new(
            "127.0.0.1:53",
            options(0, Compat::default()),
            &Arc::default(),
        )
    }

    fn reply() -> TryResult {
        ValidatedReply::new([0, 1, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0].to_vec())
    }

    #[tokio::test]
    async fn latencies_are_smoothed_and_counted() {
        let recursor = recursor();
        let counters = &recursor.counters;
        let smoothed = |took: u64| {
            recursor.note(&reply(), Duration::from_micros(took));
            counters.latency_us.load(Ordering::Relaxed)
        };
        // The first one counts as it is; of others, an eighth.
        assert_eq!(smoothed(8000), 8000);
        assert_eq!(smoothed(16_000), 9000);
        assert_eq!(smoothed(0), 9000 - 1125);
        assert_eq!(smoothed(250), 7875 - 984 + 31);
        assert_eq!(smoothed(251), 6922 - 865 + 31);
        assert_eq!(smoothed(2_500_001), 6088 - 761 + 312_500);
        recursor.note(&Err(TryError::TimedOut), Duration::from_secs(9));
        let sum = counters.latency_sum_us.load(Ordering::Relaxed);
        assert_eq!(sum, 8000 + 16_000 + 1 + 250 + 251 + 2_500_001);
        let buckets: Vec<u64> = counters
            .latencies
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .collect();
        assert_eq!(buckets, [2, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1]);
        let timeouts = counters.failed.by_reason().next();
        assert!(matches!(timeouts, Some((Reason::TimedOut, 1))));
    }

    #[tokio::test]
    async fn silent_recursor_is_probed_now_and_then() {
        let recursor = recursor();
        let silence = &recursor.silence;
        let tries = || silence.tries.load(Ordering::Relaxed);
        for tried in 1..=SILENT_TRIES {
            recursor.note(&Err(TryError::TimedOut), Duration::ZERO);
            // It was not asked.
            recursor.note(&Err(TryError::Busy), Duration::ZERO);
            recursor.note(&Err(TryError::NoSocket), Duration::ZERO);
            assert_eq!(tries(), tried);
        }
        // Any other outcome is a sign of life.
        recursor.note(&Err(TryError::Refused), Duration::ZERO);
        assert_eq!(tries(), 0);

        let due = AtomicU64::new(silence.now_ms() + 600_000);
        assert!(!silence.is_my_turn(&due, Duration::from_secs(1)));
        due.store(silence.now_ms(), Ordering::Relaxed);
        let interval = Duration::from_secs(1000);
        assert!(silence.is_my_turn(&due, interval));
        assert!(due.load(Ordering::Relaxed) >= 1_000_000);
        assert!(!silence.is_my_turn(&due, interval), "once");
    }

    #[tokio::test]
    async fn dropped_edns_is_found_and_forgotten() {
        let recursor = recursor();
        let silence = &recursor.silence;
        recursor.note_edns(&Err(TryError::TimedOut));
        recursor.note_edns(&Err(TryError::Reset));
        assert!(!silence.try_without_edns(), "one is lost now and then");
        recursor.note_edns(&Err(TryError::TimedOut));
        assert!(silence.try_without_edns());
        assert!(!silence.try_without_edns(), "once in a while");
        assert!(!recursor.drops_edns());
        assert!(!silence.edns_check_is_due());
        silence.found_edns_dropped();
        assert!(recursor.drops_edns());
        assert!(silence.edns_check_is_due() && !silence.edns_check_is_due());
        assert!(recursor.drops_edns());
        recursor.note_edns(&reply());
        assert!(!recursor.drops_edns());
        assert_eq!(silence.edns_tries.load(Ordering::Relaxed), 0);
        assert!(!silence.answered_edns());
    }

    /// Returns the query for `a.` with an OPT that has these options.
    fn with_opt(options: &[u8]) -> Vec<u8> {
        let mut message = b"\0\x07\x01\x20\0\x01\0\0\0\0\0\x01\x01a\0\0\x01\0\x01".to_vec();
        message.extend_from_slice(b"\0\0\x29\x04\xd0\0\0\0\0");
        message.extend_from_slice(&(options.len() as u16).to_be_bytes());
        message.extend_from_slice(options);
        message
    }

    #[test]
    fn queries_are_padded_to_whole_blocks() {
        // The bare query has 30 bytes, the option's head 4.
        for (options, length, zeros) in [
            (0, 128, 94),
            (93, 128, 1),
            (94, 128, 0),
            (95, 256, 127),
            (222, 256, 0),
        ] {
            // An option of this length in all, or none.
            let mut option = vec![0; options];
            if let Some(fields) = option.first_chunk_mut() {
                let data = options as u16 - 4;
                *fields = [0, 10, (data >> 8) as u8, data as u8];
            }
            let message = with_opt(&option);
            let padded = padded(&message);
            assert_eq!(padded.len(), length, "{options}");
            let padding = [&[0, 12, 0, zeros][..], &vec![0; usize::from(zeros)]].concat();
            assert_eq!(padded[30..], [&option[..], &padding].concat());
            let data = (options + 4 + usize::from(zeros)) as u16;
            assert_eq!(padded[28..30], data.to_be_bytes());
            assert_eq!(padded[..28], message[..28]);
        }
        let plain = b"\0\x07\x01\x20\0\x01\0\0\0\0\0\0\x01a\0\0\x01\0\x01";
        assert_eq!(padded(plain), plain);
    }

    #[test]
    fn queries_lose_their_opt() {
        let message = with_opt(b"");
        let query = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x01a\0\0\x01\0\x01";
        let query = crate::tests::parsed(query);
        let plain = without_edns(&query, &message);
        assert_eq!(
            plain,
            b"\0\x07\x01\x20\0\x01\0\0\0\0\0\0\x01a\0\0\x01\0\x01"
        );
        assert!(has_edns(&message) && !has_edns(&plain));
        assert!(!has_edns(&message[..11]));
    }

    #[test]
    fn edns_rejections_are_recognized() {
        let with_edns = with_opt(b"");
        let without_edns = [0; 12];
        for (rcode, opt, with, without) in [
            (message::NOERROR, false, false, false),
            (message::FORMERR, false, true, false),
            (message::SERVFAIL, false, false, false),
            (message::NOTIMP, false, true, false),
            (message::REFUSED, false, false, false),
            // It knows EDNS, so this has another reason.
            (message::FORMERR, true, false, false),
        ] {
            let mut reply = vec![0, 7, 0x81, 0x80 | rcode, 0, 0, 0, 0, 0, 0, 0, 0];
            if opt {
                message::append_opt(&mut reply, 1232);
            }
            let reply = ValidatedReply::new(reply).unwrap();
            assert_eq!(rejects_edns(&with_edns, &reply), with, "{rcode} {opt}");
            assert_eq!(rejects_edns(&without_edns, &reply), without);
        }
    }

    #[test]
    fn only_letters_are_random() {
        let question = b"\x20abcdefghijklmnopqrstuvwxyzABCDE-\x04@[`{\0\x41\x61\x5a\x7a";
        let mut seen = std::collections::HashSet::new();
        for _ in 0..64 {
            let mut random = *question;
            randomise(&mut random);
            assert!(random.eq_ignore_ascii_case(question));
            let end = question.len() - 10;
            assert_eq!(random[end..], question[end..], "no letters, type and class");
            seen.insert(random);
        }
        assert!(seen.len() > 60, "{} of 2^31", seen.len());
        // Every letter changes in some, and stays in others.
        for at in 1..32 {
            let upper = seen.iter().filter(|random| random[at].is_ascii_uppercase());
            let upper = upper.count();
            assert!(upper > 0 && upper < seen.len(), "letter {at}");
        }
        let mut short = *b"abc";
        randomise(&mut short);
        assert_eq!(&short, b"abc");
    }

    #[tokio::test]
    async fn silent_recursors_are_not_waited_for() {
        let recursor = recursor();
        for _ in 1..SILENT_TRIES {
            recursor.note(&Err(TryError::TimedOut), Duration::ZERO);
            assert_eq!(recursor.probe_decision(), ProbeDecision::Wait);
        }
        recursor.note(&Err(TryError::TimedOut), Duration::ZERO);
        let probe_at = &recursor.silence.probe_at_ms;
        assert!(
            probe_at.load(Ordering::Relaxed) >= 1000,
            "not before a second"
        );
        probe_at.store(0, Ordering::Relaxed);
        assert_eq!(recursor.probe_decision(), ProbeDecision::Probe);
        probe_at.store(u64::MAX, Ordering::Relaxed);
        assert_eq!(recursor.probe_decision(), ProbeDecision::Skip);
        recursor.note(&reply(), Duration::ZERO);
        assert_eq!(recursor.probe_decision(), ProbeDecision::Wait);
    }

    #[tokio::test]
    async fn intervals_of_edns_checks_are_kept() {
        let recursor = recursor();
        let silence = &recursor.silence;
        for _ in 0..EDNS_TRIES {
            recursor.note_edns(&Err(TryError::TimedOut));
        }
        assert!(silence.try_without_edns());
        let plain_at = silence.plain_at_ms.load(Ordering::Relaxed);
        assert!(plain_at >= 10_000, "{plain_at}");
        silence.found_edns_dropped();
        assert!(silence.edns_check_is_due());
        let check_at = silence.check_at_ms.load(Ordering::Relaxed);
        assert!((300_000..EDNS_WORKS).contains(&check_at), "{check_at}");
        assert!(silence.answered_edns(), "it was considered dropped");
        assert!(!silence.answered_edns() && !silence.drops_edns());
        assert_eq!(milliseconds(Duration::from_micros(2_999)), 2);
        assert_eq!(milliseconds(Duration::MAX), u64::MAX);
    }

    #[tokio::test]
    async fn recursor_names_give_endpoints() {
        for (name, endpoint, is_encrypted, address, port_of_host) in [
            (
                "127.0.0.1:53",
                "127.0.0.1:53",
                false,
                Some("127.0.0.1:53"),
                None,
            ),
            ("[::1]:5353", "[::1]:5353", false, Some("[::1]:5353"), None),
            (
                "tls://192.0.2.1:853#ns.example",
                "192.0.2.1:853",
                true,
                Some("192.0.2.1:853"),
                None,
            ),
            ("ns.example:54", "ns.example:54", false, None, Some(54)),
            (
                "tls://ns.example:853",
                "ns.example:853",
                true,
                None,
                Some(853),
            ),
        ] {
            let options = options(0, Compat::default());
            let recursor = Recursor::new(name, options, &Arc::default());
            assert_eq!((&*recursor.name, &*recursor.endpoint), (name, endpoint));
            assert_eq!(recursor.tls.is_some(), is_encrypted, "{name}");
            let expected = address.map(|address| address.parse().unwrap());
            assert_eq!(recursor.address(), expected, "{name}");
            let port = recursor.host.as_ref().map(|(_, port)| *port);
            assert_eq!(port, port_of_host, "{name}");
            assert!(!recursor.is_own() && !recursor.drops_edns());
        }
    }

    #[tokio::test]
    async fn own_recursors_are_known_by_address() {
        let own = OwnAddresses::new(&["192.0.2.1:53".parse().unwrap()]);
        let hosts = HostNames::new(&[], own);
        for (name, is_own) in [
            ("192.0.2.1:53", true),
            ("tls://192.0.2.1:53", true),
            ("192.0.2.1:54", false),
            ("192.0.2.2:53", false),
            ("ns.example:53", false),
        ] {
            let recursor = Recursor::new(name, options(0, Compat::default()), &hosts);
            assert_eq!(recursor.is_own(), is_own, "{name}");
        }
    }

    #[tokio::test]
    async fn queries_without_waiting_go_by_udp() {
        let message = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x02oK\0\0\x01\0\x01";
        let udp = crate::tests::parsed(message);
        let mut tcp = udp;
        tcp.transport = Transport::Tcp;
        let plain = Arc::new(recursor());
        let prepared = plain.prepare(&udp).unwrap();
        assert_eq!(prepared.to(), "127.0.0.1:53".parse().unwrap());
        assert_eq!(prepared.question, 12..20);
        assert_eq!(
            prepared.message[12..20],
            message[12..],
            "the client's letters"
        );
        assert_eq!(prepared.choice, SocketChoice::Any);
        assert!(plain.prepare(&tcp).is_none());
        assert_eq!(
            (plain.transport(&udp), plain.transport(&tcp)),
            (Transport::Udp, Transport::Tcp)
        );
        plain.silence.found_edns_dropped();
        assert!(plain.prepare(&udp).is_none(), "several messages");
        let options = options(0, Compat::default());
        let tls = Recursor::new("tls://127.0.0.1:853", options, &Arc::default());
        assert_eq!(tls.transport(&udp), Transport::Tcp);
        assert!(Arc::new(tls).prepare(&udp).is_none());
        let unknown = Recursor::new("ns.example:53", options, &Arc::default());
        assert!(Arc::new(unknown).prepare(&udp).is_none());
    }

    #[tokio::test]
    async fn subnets_take_sockets_without_the_question() {
        let mut message = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\x01\x02oK\0\0\x01\0\x01".to_vec();
        message
            .extend_from_slice(b"\0\0\x29\x04\xd0\0\0\0\0\0\x0b\0\x08\0\x07\0\x01\x18\0\xc0\0\x02");
        let query = crate::tests::parsed(&message);
        for (client_subnet, expected) in [
            (false, SocketChoice::Any),
            (true, SocketChoice::WithoutQuestion),
        ] {
            let form = Form {
                client_subnet,
                ..Form::default()
            };
            let options = RecursorOptions {
                form,
                ..options(0, Compat::default())
            };
            let recursor = Recursor::new("127.0.0.1:53", options, &Arc::default());
            assert_eq!(recursor.socket_choice(&query), expected);
        }
    }

    #[tokio::test]
    async fn replies_may_be_incomplete() {
        let with_edns = with_opt(b"");
        let whole = || vec![0, 7, 0x81, 0x80, 0, 0, 0, 0, 0, 0, 0, 0];
        let mut truncated = whole();
        truncated[2] |= 0x02;
        let mut rejecting = whole();
        rejecting[3] |= message::FORMERR;
        for (reply, udp, tcp) in [
            (whole(), false, false),
            (truncated, true, false),
            (rejecting, true, true),
        ] {
            let reply = ValidatedReply::new(reply).unwrap();
            let recursor = recursor();
            for (transport, expected) in [(Transport::Udp, udp), (Transport::Tcp, tcp)] {
                let found = recursor.is_incomplete(transport, &with_edns, &reply);
                assert_eq!(found, expected, "{reply:?} {transport:?}");
                // Behind bosh-dns, the client decides.
                let compat = Compat {
                    transparent_forwarding: true,
                    ..Compat::default()
                };
                let options = options(0, compat);
                let transparent = Recursor::new("127.0.0.1:53", options, &Arc::default());
                assert!(!transparent.is_incomplete(transport, &with_edns, &reply));
            }
        }
    }
}
