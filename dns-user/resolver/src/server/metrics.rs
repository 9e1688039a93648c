//! Metrics of the sockets.
//!
//! Each UDP worker writes to a separate [`Stripe`] with plain loads and stores; tasks share one
//! with atomic additions. A scrape sums the stripes and adds the labels, so that answering a query
//! requires neither.

use std::{
    borrow::Cow,
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;

use prometheus::{
    Registry,
    proto::{Histogram, MetricFamily},
};

use dns_core::wire::Transport;
use dns_kit::metrics::{families, histogram, labels};

//----------- ServerMetrics --------------------------------------------------

/// All counters of the sockets. Clones share them.
#[derive(Clone)]
pub struct ServerMetrics {
    /// State shared by all clones.
    shared: Arc<StripedMetrics>,
}

/// State shared by all clones of [`ServerMetrics`].
struct StripedMetrics {
    /// Value of the label `server`.
    server: String,
    /// One stripe per worker.
    stripes: Mutex<Vec<Arc<Stripe>>>,
    tasks: Arc<Stripe>,
    tcp_sessions: AtomicI64,
    /// TCP connections closed to make room for others.
    tcp_called_off: AtomicU64,
    /// Failed calls of `accept`.
    tcp_not_accepted: AtomicU64,
    /// Times a TCP connection reached a limit, by [`Paused`].
    tcp_paused: [AtomicU64; Paused::ALL.len()],
    /// Maximum number of TCP connections.
    tcp_limit: AtomicU64,
    /// TCP connections closed because the client did not read.
    tcp_unread: AtomicU64,
    /// Number of queries that wait for recursors, handlers or first checks.
    in_flight: AtomicI64,
}

/// A reply and its query, as counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Observed {
    pub(super) transport: Transport,
    /// Whether the query came from an IPv6 address.
    pub(super) from_v6: bool,
    /// QTYPE; `None` if no question could be read.
    pub(super) qtype: Option<u16>,
    /// Whether DO was set.
    pub(super) dnssec_ok: bool,
    /// The lower four bits of the RCODE.
    pub(super) rcode: u8,
    pub(super) responder: Responder,
    pub(super) query_len: usize,
    pub(super) reply_len: usize,
    /// Time from reading the query from the socket to the reply.
    pub(super) took: Duration,
}

/// The source of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Responder {
    /// The fleet's records, counted as internal.
    Local,
    /// Recursors, counted as external.
    Recursors,
    /// A handler.
    Handler,
    /// Consul's names.
    Consul,
    /// Reverse names.
    Reverse,
    /// The up-check.
    Upcheck,
    /// The server's name or version in class CH.
    Chaos,
    /// The server itself: errors and refusals.
    None,
}

impl Responder {
    /// All values in numerical order, with their labels.
    const ALL: [(Self, &str); 8] = [
        (Self::Local, "local"),
        (Self::Recursors, "recursors"),
        (Self::Handler, "handler"),
        (Self::Consul, "consul"),
        (Self::Reverse, "reverse"),
        (Self::Upcheck, "upcheck"),
        (Self::Chaos, "chaos"),
        (Self::None, ""),
    ];

    const IN_ORDER: () = {
        let mut number = 0;
        while number < Self::ALL.len() {
            // `label` and the counters index by the number; a variant moved in one place alone does
            // not compile.
            assert!(Self::ALL[number].0 as usize == number);
            number += 1;
        }
    };

    /// Returns the value of the label `plugin`, also shown in the request log.
    pub(super) const fn label(self) -> &'static str {
        const { Self::IN_ORDER };
        Self::ALL[self as usize].1
    }
}

/// Reason for not replying to a message.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub(super) enum Dropped {
    /// The message is shorter than a header, or is a reply.
    NoQuery,
    /// The kernel refused to send the reply.
    NotSent,
}

impl Dropped {
    /// All values with their labels.
    const ALL: [(Self, &str); 2] = [(Self::NoQuery, "no_query"), (Self::NotSent, "not_sent")];
}

/// Reason for not reading queries from a TCP connection.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub(super) enum Paused {
    /// Too many bytes of replies are unsent.
    Bytes,
    /// Too many queries are waiting.
    Queries,
}

impl Paused {
    /// All values with their labels.
    const ALL: [(Self, &str); 2] = [(Self::Bytes, "bytes"), (Self::Queries, "queries")];
}

impl ServerMetrics {
    /// Creates counters at zero; `server` is the value of that label.
    pub fn new(server: String) -> Self {
        Self {
            shared: Arc::new(StripedMetrics {
                server,
                stripes: Mutex::default(),
                tasks: Arc::new(Stripe::new(false)),
                tcp_sessions: AtomicI64::new(0),
                tcp_called_off: AtomicU64::new(0),
                tcp_not_accepted: AtomicU64::new(0),
                tcp_paused: Default::default(),
                tcp_limit: AtomicU64::new(0),
                tcp_unread: AtomicU64::new(0),
                in_flight: AtomicI64::new(0),
            }),
        }
    }

    /// Registers all families of the sockets with `registry`.
    pub fn register(&self, registry: &Registry) -> prometheus::Result<()> {
        let metrics = self.clone();
        families::REPLIES_TOTAL.scrape(registry, move || metrics.collect())
    }

    /// Returns a new stripe for exclusive use by one thread.
    pub(super) fn stripe(&self) -> Arc<Stripe> {
        let stripe = Arc::new(Stripe::new(true));
        let mut stripes = self.shared.stripes.lock();
        // Addresses files may open and close sockets for ever: the counts of a worker that has ended move to the
        // stripe that stays.
        stripes.retain_mut(|of_worker| match Arc::get_mut(of_worker) {
            Some(ended) => {
                self.shared.tasks.add_all(ended);
                false
            }
            None => true,
        });
        stripes.push(stripe.clone());
        stripe
    }

    /// Returns the stripe that all tasks share.
    pub(super) fn tasks(&self) -> &Stripe {
        &self.shared.tasks
    }

    /// Counts an open TCP connection while the guard lives.
    pub(super) fn tcp_session(&self) -> impl Drop + Send + use<> {
        Counted::new(self.shared.clone(), |shared| &shared.tcp_sessions)
    }

    pub(super) fn tcp_called_off(&self) {
        self.shared.tcp_called_off.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of TCP connections that the kernel refused to accept.
    pub(crate) fn refused_connections(&self) -> u64 {
        self.shared.tcp_not_accepted.load(Ordering::Relaxed)
    }

    pub(super) fn tcp_not_accepted(&self) {
        self.shared.tcp_not_accepted.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn tcp_paused(&self, reason: Paused) {
        self.shared.tcp_paused[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn tcp_limit(&self, connections: usize) {
        self.shared
            .tcp_limit
            .store(connections as u64, Ordering::Relaxed);
    }

    pub(super) fn tcp_unread(&self) {
        self.shared.tcp_unread.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of replies so far, to all clients.
    pub fn replies(&self) -> u64 {
        self.sum().replies()
    }

    /// Counts a query in flight while the guard lives.
    pub(super) fn in_flight(&self) -> Counted {
        Counted::new(self.shared.clone(), |shared| &shared.in_flight)
    }

    fn sum(&self) -> Stripe {
        // All families of a scrape come from one sum, so that they agree with each other.
        let sum = Stripe::new(true);
        // Locked first: counts move from other stripes to the stripe of the tasks.
        let stripes = self.shared.stripes.lock();
        sum.add_all(&self.shared.tasks);
        for stripe in &*stripes {
            sum.add_all(stripe);
        }
        sum
    }
}

/// Keeps a gauge incremented while it lives.
pub(super) struct Counted {
    /// The owner of the gauge.
    shared: Arc<StripedMetrics>,
    gauge: fn(&StripedMetrics) -> &AtomicI64,
}

impl Counted {
    fn new(shared: Arc<StripedMetrics>, gauge: fn(&StripedMetrics) -> &AtomicI64) -> Self {
        gauge(&shared).fetch_add(1, Ordering::Relaxed);
        Self { shared, gauge }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        (self.gauge)(&self.shared).fetch_sub(1, Ordering::Relaxed);
    }
}

//----------- Stripe ---------------------------------------------------------

/// Types with a separate counter; one more counter is for all others.
// A series for each of 65,536 types would let one client fill the memory of Prometheus.
const TYPES: [u16; 19] = [
    1, 28, 2, 5, 6, 12, 15, 16, 33, 43, 46, 47, 48, 50, 64, 65, 251, 252, 255,
];
/// A type without a separate label.
const OTHER_TYPE: u16 = u16::MAX;

/// Transports times address families times types.
const REQUESTS: usize = 2 * 2 * (TYPES.len() + 1);

/// Bucket bounds of durations in seconds: CoreDNS's bounds, with finer ones below.
const DURATIONS: [f64; 20] = [
    0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002, 0.004, 0.008, 0.016,
    0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096, 8.192,
];
/// Bucket bounds of sizes in bytes, as in CoreDNS.
// 8291 is CoreDNS's own figure: dashboards select buckets by these texts.
const SIZES: [f64; 14] = [
    0.0, 100.0, 200.0, 300.0, 400.0, 511.0, 1023.0, 2047.0, 4095.0, 8291.0, 16_000.0, 32_000.0,
    48_000.0, 64_000.0,
];
/// The same bounds in nanoseconds and bytes, to find a bucket without floating point.
const DURATIONS_NS: [u64; DURATIONS.len()] = scaled(DURATIONS, 1e9);
const SIZES_BYTES: [u64; SIZES.len()] = scaled(SIZES, 1.0);

const fn scaled<const BOUNDS: usize>(bounds: [f64; BOUNDS], factor: f64) -> [u64; BOUNDS] {
    let mut whole = [0; BOUNDS];
    let mut at = 0;
    while at < BOUNDS {
        whole[at] = (bounds[at] * factor + 0.5) as u64;
        at += 1;
    }
    whole
}

/// Counters of one writer, in cache lines (and pairs of lines, which CPUs prefetch) that nothing else uses.
#[repr(align(128))]
pub(super) struct Stripe {
    /// Whether only one thread writes, so that plain loads and stores suffice.
    exclusive: bool,
    /// Requests by transport, address family and type.
    requests: [AtomicU64; REQUESTS],
    /// Responses by [`Responder`] and RCODE.
    responses: [AtomicU64; Responder::ALL.len() * 16],
    dnssec_ok: AtomicU64,
    /// Times to reply, in nanoseconds.
    durations: Buckets<{ DURATIONS.len() }>,
    /// Sizes of queries in bytes, by transport.
    query_sizes: [Buckets<{ SIZES.len() }>; 2],
    /// Sizes of replies in bytes, by transport.
    reply_sizes: [Buckets<{ SIZES.len() }>; 2],
    dropped: [AtomicU64; Dropped::ALL.len()],
}

/// A histogram with `BOUNDS` bounds and an overflow bucket.
struct Buckets<const BOUNDS: usize> {
    /// Observations by bucket, not cumulative, without `over`.
    counts: [AtomicU64; BOUNDS],
    /// Observations above the last bound.
    over: AtomicU64,
    /// Sum of all observations, `over` included.
    sum: AtomicU64,
}

impl<const BOUNDS: usize> Buckets<BOUNDS> {
    const fn new() -> Self {
        Self {
            counts: [const { AtomicU64::new(0) }; BOUNDS],
            over: AtomicU64::new(0),
            sum: AtomicU64::new(0),
        }
    }
}

impl Stripe {
    fn new(exclusive: bool) -> Self {
        Self {
            exclusive,
            requests: [const { AtomicU64::new(0) }; _],
            responses: [const { AtomicU64::new(0) }; _],
            dnssec_ok: AtomicU64::new(0),
            durations: Buckets::new(),
            query_sizes: [const { Buckets::new() }; 2],
            reply_sizes: [const { Buckets::new() }; 2],
            dropped: [const { AtomicU64::new(0) }; _],
        }
    }

    pub(super) fn observe(&self, observed: &Observed) {
        let Observed {
            transport,
            from_v6,
            qtype,
            dnssec_ok,
            rcode,
            responder,
            query_len,
            reply_len,
            took,
        } = *observed;
        let transport = transport_number(transport);
        let kind = match qtype {
            // A and AAAA are the first two of `TYPES` and nearly all of the traffic.
            Some(1) => 0,
            Some(28) => 1,
            Some(other) => TYPES
                .iter()
                .position(|known| *known == other)
                .unwrap_or(TYPES.len()),
            None => TYPES.len(),
        };
        self.add(
            &self.requests[(transport * 2 + usize::from(from_v6)) * (TYPES.len() + 1) + kind],
            1,
        );
        self.add(
            &self.responses[responder as usize * 16 + usize::from(rcode & 15)],
            1,
        );
        if dnssec_ok {
            self.add(&self.dnssec_ok, 1);
        }
        self.put(&self.durations, &DURATIONS_NS, took.as_nanos() as u64);
        self.put(&self.query_sizes[transport], &SIZES_BYTES, query_len as u64);
        self.put(&self.reply_sizes[transport], &SIZES_BYTES, reply_len as u64);
    }

    pub(super) fn dropped(&self, reason: Dropped, count: u64) {
        self.add(&self.dropped[reason as usize], count);
    }

    fn put<const BOUNDS: usize>(
        &self,
        buckets: &Buckets<BOUNDS>,
        bounds: &[u64; BOUNDS],
        value: u64,
    ) {
        let bucket = bounds.iter().position(|bound| value <= *bound);
        self.add(
            bucket.map_or(&buckets.over, |bucket| &buckets.counts[bucket]),
            1,
        );
        self.add(&buckets.sum, value);
    }

    #[inline]
    fn add(&self, counter: &AtomicU64, count: u64) {
        if self.exclusive {
            // A locked instruction for each of the eight counters of a reply is what the stripes
            // avoid. The scraper sees each counter whole, and perhaps one reply late.
            counter.store(counter.load(Ordering::Relaxed) + count, Ordering::Relaxed);
        } else {
            counter.fetch_add(count, Ordering::Relaxed);
        }
    }
}

const fn transport_number(transport: Transport) -> usize {
    match transport {
        Transport::Udp => 0,
        Transport::Tcp => 1,
    }
}

//----------- Exposition -----------------------------------------------------

impl Stripe {
    /// Adds the counters of another stripe; if this one is exclusive, it must not be in use.
    fn add_all(&self, other: &Self) {
        let Self {
            exclusive: _,
            requests,
            responses,
            dnssec_ok,
            durations,
            query_sizes,
            reply_sizes,
            dropped,
        } = other;
        self.add_each(&self.requests, requests);
        self.add_each(&self.responses, responses);
        self.add(&self.dnssec_ok, value(dnssec_ok));
        self.add_each(&self.dropped, dropped);
        self.add_buckets(&self.durations, durations);
        for (sum, other) in self.query_sizes.iter().zip(query_sizes) {
            self.add_buckets(sum, other);
        }
        for (sum, other) in self.reply_sizes.iter().zip(reply_sizes) {
            self.add_buckets(sum, other);
        }
    }

    fn add_each(&self, sums: &[AtomicU64], others: &[AtomicU64]) {
        for (sum, other) in sums.iter().zip(others) {
            self.add(sum, value(other));
        }
    }

    fn add_buckets<const BOUNDS: usize>(&self, sum: &Buckets<BOUNDS>, other: &Buckets<BOUNDS>) {
        self.add_each(&sum.counts, &other.counts);
        self.add(&sum.over, value(&other.over));
        self.add(&sum.sum, value(&other.sum));
    }

    /// Returns the number of replies by a responder, with any RCODE.
    fn replies_by(&self, responder: Responder) -> u64 {
        self.responses[responder as usize * 16..][..16]
            .iter()
            .map(value)
            .sum()
    }

    fn replies(&self) -> u64 {
        self.responses.iter().map(value).sum()
    }
}

impl<const BOUNDS: usize> Buckets<BOUNDS> {
    /// Converts to the exposition format; `unit` converts the sum to the unit of the family.
    fn histogram(&self, bounds: &[f64; BOUNDS], unit: f64) -> Histogram {
        let observations = self.counts.iter().chain([&self.over]).map(value);
        histogram(bounds, observations, value(&self.sum) as f64 * unit)
    }
}

impl ServerMetrics {
    fn collect(&self) -> Vec<MetricFamily> {
        let shared = &*self.shared;
        let sum = self.sum();
        let Stripe {
            exclusive: _,
            requests,
            responses,
            dnssec_ok,
            durations,
            query_sizes,
            reply_sizes,
            dropped,
        } = &sum;
        let common = [shared.server.as_str(), labels::ZONE, labels::VIEW];
        vec![
            families::REQUESTS_INTERNAL_TOTAL.is(sum.replies_by(Responder::Local)),
            families::REQUESTS_EXTERNAL_TOTAL.is(sum.replies_by(Responder::Recursors)),
            families::REPLIES_TOTAL.of([(["userspace"], sum.replies())]),
            families::COREDNS_REQUESTS_TOTAL.of(by_question(requests, common)),
            families::COREDNS_RESPONSES_TOTAL.of(by_responder(responses, common)),
            families::COREDNS_DO_REQUESTS_TOTAL.of([(common, value(dnssec_ok))]),
            families::COREDNS_REQUEST_DURATION_SECONDS.of([(common, durations.histogram(&DURATIONS, 1e-9))]),
            families::COREDNS_REQUEST_SIZE_BYTES.of(by_transport(query_sizes, common)),
            families::COREDNS_RESPONSE_SIZE_BYTES.of(by_transport(reply_sizes, common)),
            families::DROPPED_TOTAL
                .of(Dropped::ALL.map(|(reason, label)| ([label], value(&dropped[reason as usize])))),
            families::TCP_SESSIONS.is(shared.tcp_sessions.load(Ordering::Relaxed) as f64),
            families::TCP_CLOSED_FOR_OTHERS_TOTAL.is(value(&shared.tcp_called_off)),
            families::ACCEPT_FAILURES_TOTAL.is(value(&shared.tcp_not_accepted)),
            families::TCP_PAUSED_TOTAL
                .of(Paused::ALL.map(|(reason, label)| ([label], value(&shared.tcp_paused[reason as usize])))),
            families::LIMIT.of(super::tcp_limits::LIMITS.map(|(resource, limit)| ([resource], limit as f64))),
            families::LIMIT.of([(["tcp_connections"], value(&shared.tcp_limit) as f64)]),
            families::TCP_UNREAD_CLOSED_TOTAL.is(value(&shared.tcp_unread)),
            families::TCP_REPLY_BYTES.is(super::tcp_limits::held_by_all() as f64),
            families::REQUESTS_IN_FLIGHT.is(shared.in_flight.load(Ordering::Relaxed) as f64),
        ]
    }
}

/// Returns the requests by protocol, address family and type, without zeros.
fn by_question<'a>(
    requests: &[AtomicU64; REQUESTS],
    [server, zone, view]: [&'a str; 3],
) -> Vec<([&'a str; 6], u64)> {
    let mut samples = Vec::new();
    // In the order in which `Stripe::observe` numbers them.
    let mut counts = requests.iter().map(value);
    for proto in PROTOCOLS {
        for address in [IpAddr::from([0; 4]), IpAddr::from([1; 16])] {
            let family = labels::family_label(address);
            for kind in TYPES.into_iter().chain([OTHER_TYPE]) {
                let count = counts.next().unwrap_or_default();
                if count > 0 {
                    let kind = labels::type_label(kind);
                    samples.push(([server, zone, view, proto, family, kind], count));
                }
            }
        }
    }
    samples
}

/// Returns the responses by RCODE and responder, without zeros except SERVFAIL's: the increase of a counter whose
/// first value is not zero is unknown to Prometheus, and no alert would see the first failures.
fn by_responder<'a>(
    responses: &[AtomicU64],
    common: [&'a str; 3],
) -> Vec<([Cow<'a, str>; 5], u64)> {
    let mut samples = Vec::new();
    let mut counts = responses.iter().map(value);
    for (_, label) in Responder::ALL {
        for rcode in 0..16 {
            let count = counts.next().unwrap_or_default();
            if count > 0 || rcode == SERVFAIL {
                let [server, zone, view] = common.map(Cow::Borrowed);
                let rcode = labels::rcode_label(rcode);
                samples.push(([server, zone, view, rcode, label.into()], count));
            }
        }
    }
    samples
}

/// RCODE 2 (RFC 1035, section 4.1.1).
const SERVFAIL: u8 = 2;

/// Values of the label `proto`, by [`transport_number`].
const PROTOCOLS: [&str; 2] = ["udp", "tcp"];

fn by_transport<'a>(
    buckets: &'a [Buckets<{ SIZES.len() }>; 2],
    [server, zone, view]: [&'a str; 3],
) -> impl Iterator<Item = ([&'a str; 4], Histogram)> {
    PROTOCOLS
        .into_iter()
        .zip(buckets)
        .map(move |(proto, buckets)| ([server, zone, view, proto], buckets.histogram(&SIZES, 1.0)))
}

fn value(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::metrics::Metrics;

    /// Returns a reply to an A query over UDP.
    fn observed(responder: Responder) -> Observed {
        Observed {
            transport: Transport::Udp,
            from_v6: false,
            qtype: Some(1),
            dnssec_ok: true,
            rcode: 0,
            responder,
            query_len: 50,
            reply_len: 150,
            took: Duration::from_micros(20),
        }
    }

    #[test]
    fn stripes_sum_to_coredns_families() {
        let all = Metrics::new(
            "dns://127.0.0.1:53".into(),
            dns_fastpath::FastPathHandle::default(),
        )
        .unwrap();
        let metrics = ServerMetrics::new(all.server().to_owned());
        metrics.register(all.registry()).unwrap();
        let first = metrics.stripe();
        let second = metrics.stripe();
        first.observe(&observed(Responder::Local));
        second.observe(&observed(Responder::Local));
        metrics.tasks().observe(&Observed {
            transport: Transport::Tcp,
            from_v6: true,
            qtype: Some(4711),
            rcode: 3,
            took: Duration::from_secs(20),
            ..observed(Responder::Recursors)
        });
        first.dropped(Dropped::NoQuery, 3);
        let session = metrics.tcp_session();
        let text = all.text().unwrap();
        for line in [
            "boshdns_requests_internal_total 2",
            "boshdns_requests_external_total 1",
            "bosh_dns_xdp_replies_total{path=\"userspace\"} 3",
            "coredns_dns_requests_total{family=\"1\",proto=\"udp\",server=\"dns://127.0.0.1:53\",type=\"A\",view=\"\",zone=\".\"} 2",
            "coredns_dns_requests_total{family=\"2\",proto=\"tcp\",server=\"dns://127.0.0.1:53\",type=\"other\",view=\"\",zone=\".\"} 1",
            "coredns_dns_responses_total{plugin=\"recursors\",rcode=\"NXDOMAIN\",server=\"dns://127.0.0.1:53\",view=\"\",zone=\".\"} 1",
            "coredns_dns_request_duration_seconds_bucket{server=\"dns://127.0.0.1:53\",view=\"\",zone=\".\",le=\"0.00001\"} 0",
            "coredns_dns_request_duration_seconds_bucket{server=\"dns://127.0.0.1:53\",view=\"\",zone=\".\",le=\"0.000025\"} 2",
            "coredns_dns_request_duration_seconds_count{server=\"dns://127.0.0.1:53\",view=\"\",zone=\".\"} 3",
            "coredns_dns_response_size_bytes_sum{proto=\"udp\",server=\"dns://127.0.0.1:53\",view=\"\",zone=\".\"} 300",
            "coredns_dns_do_requests_total{server=\"dns://127.0.0.1:53\",view=\"\",zone=\".\"} 3",
            "bosh_dns_xdp_dropped_total{reason=\"no_query\"} 3",
            "bosh_dns_xdp_tcp_sessions 1",
        ] {
            assert!(
                text.contains(&format!("\n{line}\n")),
                "{line} is not in {text}"
            );
        }
        drop(session);
        assert!(
            all.text()
                .unwrap()
                .contains("\nbosh_dns_xdp_tcp_sessions 0\n")
        );
    }

    #[test]
    fn ended_workers_leave_only_their_counts() {
        let metrics = ServerMetrics::new("dns://127.0.0.1:53".to_owned());
        let lasting = metrics.stripe();
        for count in 1..=50 {
            let ending = metrics.stripe();
            ending.observe(&observed(Responder::Local));
            lasting.observe(&observed(Responder::Local));
            assert_eq!(metrics.replies(), 2 * count);
            assert_eq!(metrics.shared.stripes.lock().len(), 2);
        }
    }
}
