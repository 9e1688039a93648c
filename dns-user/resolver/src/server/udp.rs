//! The UDP workers, each with a thread and a socket: from a batch of datagrams to its replies. A worker also counts on
//! which interfaces queries arrive, and watches its queue.

use std::{
    collections::BTreeMap,
    io, mem,
    net::{IpAddr, SocketAddr},
    os::fd::RawFd,
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use dns_common::control::{CLIENT_BUCKETS, client_bucket};
use dns_fastpath::{Arrival, EVIDENCE, MAX_CLIENTS};
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::{runtime::Handle, sync::Notify};

use super::{
    Options,
    answer_cache::{AnswerCache, LowerName, Remembered},
    metrics::{Dropped, Responder, Stripe},
    near::NearClients,
    overload::{Overload, Report, WINDOW},
    service::{Deferred, Handled, Immediate, QueryHandler, WaitingPlace},
    sockets::{ReturnPath, WorkerSocket},
};
use crate::state::ServerState;
use dns_core::wire::{self, CLASS_IN, Parsed, Query, RequestInfo, Shuffle, TYPE_DS, Transport};
use dns_kit::{
    eager::poll_then_spawn,
    logs::LineLimit,
    mmsg::{self, ControlMessages, Incoming, ReceiveMetadata, socket_address},
};
use dns_upstream::WaitingQuery;

//----------- Worker ---------------------------------------------------------

/// Pause after a failed call.
const RECEIVE_PAUSE: Duration = Duration::from_millis(10);

/// Answers the queries of one socket.
pub(super) struct Worker {
    /// The socket for queries and replies.
    socket: Arc<WorkerSocket>,
    /// The service, shared by all workers.
    handler: Arc<QueryHandler>,
    /// Runs queries that must wait.
    runtime: Handle,
    /// Answers from the current records.
    cache: AnswerCache,
    /// The name of the current query.
    name: LowerName,
    workers: usize,
    shuffle: Shuffle,
    /// Clients without a limit on the reply size.
    near: NearClients,
    /// Watches the fill level of the queue.
    queue: QueueWatch,
    /// Counts on which interfaces queries arrive.
    arrivals: ArrivalCounter,
    /// Counters of this worker.
    stripe: Arc<Stripe>,
}

impl Worker {
    /// Creates a worker for `socket` without starting it. Must be called inside a tokio runtime.
    /// It is one of `workers`.
    pub(super) fn new(
        socket: Arc<WorkerSocket>,
        handler: Arc<QueryHandler>,
        workers: usize,
    ) -> Self {
        Self {
            socket,
            runtime: Handle::current(),
            cache: AnswerCache::new(workers),
            name: LowerName::default(),
            workers,
            shuffle: Shuffle::default(),
            near: NearClients::default(),
            queue: QueueWatch::new(handler.options.overload.clone()),
            arrivals: ArrivalCounter::new(&handler.options.arrivals),
            stripe: handler.metrics.stripe(),
            handler,
        }
    }

    pub(super) fn run(mut self) {
        // `serve` guards the answering of each query; this keeps the thread alive after any other
        // panic.
        while let Err(_panic) = panic::catch_unwind(AssertUnwindSafe(|| self.serve())) {
            tracing::error!(
                "a UDP thread panicked between queries and continues; replies of one batch may be lost"
            );
            self.cache = AnswerCache::new(self.workers);
        }
    }

    /// Answers queries until the socket is stopped; [`run`](Self::run) calls it again after a
    /// panic.
    fn serve(&mut self) {
        let mut batch = Batch::new(self.socket.with_pktinfo);
        let descriptor = self.socket.raw();
        loop {
            let count = match batch.receive(descriptor) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // Errors of earlier replies, such as to a client that is gone, are not reported to
                // unconnected sockets; other errors may be transient.
                Err(error) => {
                    if self.socket.stopping.load(Ordering::Acquire) {
                        return;
                    }
                    // One line for all workers: each tries again a hundred times a second.
                    static LIMIT: LineLimit = LineLimit::new();
                    if let Some(suppressed) = LIMIT.admit_per_minute() {
                        tracing::warn!(%error, suppressed, "cannot receive queries by UDP; trying again");
                    }
                    std::thread::sleep(RECEIVE_PAUSE);
                    continue;
                }
            };
            // One read of the clock serves the whole batch: a batch of cached answers takes a few
            // microseconds.
            let mut clock = Clock::start();
            let server_state = &self.handler.server_state;
            // Read before the state is loaded for a query: an answer from a newer state then counts
            // as one of this generation and is dropped with it. Read afterwards, an old answer
            // could pass for a new one.
            self.cache.enter(server_state.generation(), || {
                server_state.snapshot().instances().len()
            });
            let mut messages = 0;
            for mut datagram in batch.datagrams(count) {
                // A stopped socket yields empty datagrams without end, and a client may send one at
                // any time. Only a batch of nothing else ends the worker, so queries behind an
                // empty one are still answered.
                messages += usize::from(!datagram.query.is_empty());
                self.take(&mut datagram, &mut clock);
            }
            self.arrivals.batch_ended();
            // One system call for all replies; those that the send buffer does not take are lost,
            // as with any UDP server, and the client asks again.
            let failed = batch.send(descriptor, count);
            if failed > 0 {
                self.stripe.dropped(Dropped::NotSent, failed as u64);
            }
            self.queue.batch_ended(
                &self.socket,
                count == BATCH,
                clock.received,
                &self.handler.server_state,
            );
            if messages == 0 && self.socket.stopping.load(Ordering::Acquire) {
                return;
            }
        }
    }

    /// Counts one datagram, and answers it or hands it to a task.
    fn take(&mut self, datagram: &mut Datagram<'_>, clock: &mut Clock) {
        // Even an unreadable datagram has occupied the queue.
        self.queue.took(datagram.client.ip());
        // A defect triggered by one query must not cost other queries their replies.
        if panic::catch_unwind(AssertUnwindSafe(|| self.answer(datagram, clock))).is_err() {
            tracing::error!(
                "a UDP thread panicked on a query, which got no reply; other queries are not affected"
            );
            // The panic may have left half a reply.
            datagram.reply.clear();
            // It may have left the cache half changed, too, and the next queries rely on it.
            self.cache = AnswerCache::new(self.workers);
        }
        if let Some((ifindex, address)) = datagram.control.destination(datagram.control_len) {
            let endpoint = SocketAddr::new(address, self.socket.port);
            let client = datagram.client.ip().to_canonical();
            self.arrivals
                .arrived(ifindex, endpoint, client, !datagram.reply.is_empty());
        }
    }

    fn answer(&mut self, datagram: &mut Datagram<'_>, clock: &mut Clock) {
        let settings = &self.handler.reply_settings;
        let from = RequestInfo {
            // A socket for both families reports IPv4 clients as ::ffff:a.b.c.d (RFC 4291, section
            // 2.5.5.2). A client has one share of each limit, whichever socket it uses.
            client: Some(datagram.client.ip().to_canonical()),
            transport: Transport::Udp,
        };
        let query = match wire::parse_from(datagram.query, from, settings) {
            // `max_reply` spares others long replies to queries that were forged in their name. These
            // senders are near, or have proved their address.
            Parsed::Query(query) if self.is_unlimited(&query, datagram) => {
                self.handler.reserve_options(query.without_server_limit())
            }
            Parsed::Query(query) => self.handler.reserve_options(query),
            Parsed::Reply(reply) => {
                *datagram.reply = reply;
                let client = datagram.client;
                let cookies = &self.handler.options.cookies;
                // A query without a question is FORMERR, unless a client only fetches a cookie (RFC
                // 7873, section 5.4).
                cookies.answer_without_question(datagram.query, client.ip(), datagram.reply);
                let handled = Handled {
                    client,
                    transport: Transport::Udp,
                    message: datagram.query,
                    reply: datagram.reply,
                    took: clock.elapsed(),
                };
                return self
                    .handler
                    .observe(&self.stripe, &handled, None, Responder::None);
            }
            // Replies and fragments of a header get no reply: two servers would otherwise answer
            // each other's errors for ever.
            Parsed::Drop => {
                self.stripe.dropped(Dropped::NoQuery, 1);
                return;
            }
        };
        // Names are compared without regard to case (RFC 4343); records and caches hold them in
        // lower case.
        self.name.set(query.question.raw_name);
        let (responder, took) = match self.answer_from_cache(&query, datagram.reply) {
            Some(responder) => (responder, clock.elapsed_about()),
            None => match self.answer_uncached(&query, datagram, clock.received) {
                Some(responder) => (responder, clock.elapsed()),
                None => return,
            },
        };
        let Datagram {
            client,
            query: message,
            ref reply,
            ..
        } = *datagram;
        let handled = Handled {
            client,
            transport: Transport::Udp,
            message,
            reply,
            took,
        };
        self.handler
            .observe(&self.stripe, &handled, Some(&query), responder);
    }

    /// Returns whether the server's limit of replies does not hold: the client is near, or has proved its address.
    fn is_unlimited(&mut self, query: &Query<'_>, datagram: &Datagram<'_>) -> bool {
        let Options {
            max_reply, cookies, ..
        } = &self.handler.options;
        // Without a limit neither the kernel is asked for the interface's kind nor a cookie's hash
        // computed.
        max_reply.is_some()
            && (self.near.holds(
                datagram.client.ip(),
                datagram.control.interface(datagram.control_len),
            ) || cookies.is_proved(query))
    }

    fn answer_from_cache(&mut self, query: &Query<'_>, reply: &mut Vec<u8>) -> Option<Responder> {
        // Type DS may be routed elsewhere, and local data is of class IN.
        if query.question.qtype == TYPE_DS || query.question.qclass != CLASS_IN {
            return None;
        }
        let server_state = &self.handler.server_state;
        let remembered = self.cache.get(&self.name, |instances, changes| {
            server_state.has_health_changed(instances, changes)
        })?;
        let (Remembered { name, answer, .. }, tracked) = (remembered, remembered.tracked());
        // The tracker has given the name's place to others: its health is no longer followed, so
        // the cached answer would never change again. The look-up tracks it once more.
        if !server_state.touch(name, answer.existence, tracked, query.client) {
            return None;
        }
        wire::local_reply(query, answer, &mut self.shuffle, reply);
        self.handler.add_options(query, Responder::Local, reply);
        Some(Responder::Local)
    }

    /// Answers a query that is not cached; `None` if a task will reply.
    fn answer_uncached(
        &mut self,
        query: &Query<'_>,
        datagram: &mut Datagram<'_>,
        received: Instant,
    ) -> Option<Responder> {
        let name = self.name.to_name();
        match self
            .handler
            .answer_at_once(query, &name, &mut self.shuffle, datagram.reply)
        {
            Immediate::Replied {
                responder,
                resolution,
            } => {
                if let Some(resolution) = resolution
                    // The key is the name alone, and this one was routed by its parent (see
                    // `Route::of_parent`).
                    && query.question.qtype != TYPE_DS
                    && let Some(dependence) = self
                        .handler
                        .server_state
                        .dependence(&name, &resolution.checks)
                {
                    self.cache
                        .insert(&self.name, resolution.answer(), &dependence);
                }
                Some(responder)
            }
            Immediate::Deferred(deferred) => match self.handler.admit(query) {
                Some(place) => {
                    self.hand_over(deferred, datagram, received, place);
                    None
                }
                None => {
                    // SERVFAIL at once rather than silence: glibc then asks its next nameserver
                    // without waiting for its timeout (resolv.conf(5): five seconds).
                    *datagram.reply = self.handler.overload_reply(query);
                    Some(deferred.responder)
                }
            },
        }
    }

    /// Starts a query that must wait; another thread sends the reply.
    fn hand_over(
        &self,
        deferred: Deferred,
        datagram: &Datagram<'_>,
        received: Instant,
        place: WaitingPlace,
    ) {
        let answerer = deferred.answerer();
        let waiting = Box::new(DeferredDatagram {
            deferred,
            received,
            client: datagram.client,
            path: datagram.return_path(),
            socket: self.socket.clone(),
            handler: self.handler.clone(),
            runtime: self.runtime.clone(),
            _place: place,
        });
        match answerer {
            Some(answerer) => answerer.begin(waiting),
            None => waiting.wait(None),
        }
    }
}

/// A query that waits for its reply.
struct DeferredDatagram {
    deferred: Deferred,
    received: Instant,
    client: SocketAddr,
    path: ReturnPath,
    socket: Arc<WorkerSocket>,
    handler: Arc<QueryHandler>,
    /// Runs tasks.
    runtime: Handle,
    /// Held until the reply is sent, so that shutdown waits for it.
    _place: WaitingPlace,
}

impl WaitingQuery for DeferredDatagram {
    fn query(&self) -> Query<'_> {
        self.deferred.query.as_query()
    }

    fn time_limit(&self) -> Duration {
        let limit = self.handler.options.request_timeout;
        // The client has waited since its query was read, whatever was done with it before this
        // call.
        limit.saturating_sub(self.received.elapsed())
    }

    fn reply(mut self: Box<Self>, reply: &mut Vec<u8>) {
        // Before the reply is counted: a malformed cookie turns it into FORMERR.
        self.handler.complete(&self.deferred, reply);
        self.observe(reply);
        match self.socket.try_send(reply, &mut self.path) {
            Ok(()) => {}
            // The send buffer is full.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let reply = mem::take(reply);
                let runtime = self.runtime.clone();
                // The thread that called reads the replies of all recursors, so it must not wait
                // for this socket.
                runtime.spawn(self.send(reply));
            }
            Err(_) => self.handler.metrics.tasks().dropped(Dropped::NotSent, 1),
        }
    }

    fn wait(mut self: Box<Self>, begun: Option<BoxFuture<'static, Vec<u8>>>) {
        // The recursor has been asked already; asking again would send the query twice.
        if let Some(answer) = begun {
            self.deferred.wait_for(answer);
        }
        let runtime = self.runtime.clone();
        poll_then_spawn(&runtime, async move {
            let limit = self.time_limit();
            let reply = self
                .handler
                .answer_deferred(&mut self.deferred, limit)
                .await;
            self.observe(&reply);
            self.send(reply).await;
        });
    }
}

impl DeferredDatagram {
    fn observe(&self, reply: &[u8]) {
        let query = self.query();
        let handled = Handled {
            client: self.client,
            transport: Transport::Udp,
            message: query.message,
            reply,
            took: self.received.elapsed(),
        };
        let stripe = self.handler.metrics.tasks();
        let responder = self.deferred.responder;
        self.handler
            .observe(stripe, &handled, Some(&query), responder);
    }

    async fn send(self: Box<Self>, reply: Vec<u8>) {
        if !self.socket.send(reply, self.path.clone()).await {
            self.handler.metrics.tasks().dropped(Dropped::NotSent, 1);
        }
    }
}

/// Measures the times in a batch with few clock reads.
struct Clock {
    /// Time at which the batch was read from the socket.
    received: Instant,
    last: Option<Duration>,
}

impl Clock {
    fn start() -> Self {
        Self {
            received: Instant::now(),
            last: None,
        }
    }

    fn elapsed(&mut self) -> Duration {
        *self.last.insert(self.received.elapsed())
    }

    /// Returns the time from the start to the latest clock read. This is precise enough for cached
    /// answers, a whole batch of which takes a few microseconds.
    fn elapsed_about(&mut self) -> Duration {
        match self.last {
            Some(last) => last,
            None => self.elapsed(),
        }
    }
}

//----------- Batch ----------------------------------------------------------

/// Maximum number of datagrams per system call.
const BATCH: usize = 32;
/// Maximum length of a query in bytes. Real queries are far shorter; a truncated one cannot be
/// parsed and gets FORMERR.
const QUERY_SIZE: usize = 4096;

/// Buffers for incoming datagrams and their replies. The replies use the addresses and control
/// messages written by the kernel, so a reply is sent from the address to which its query was sent.
struct Batch {
    incoming: Incoming<BATCH, QUERY_SIZE>,
    replies: [Vec<u8>; BATCH],
    /// Headers of the replies to be sent.
    outgoing: Box<[libc::mmsghdr; BATCH]>,
    /// One buffer for each of these headers.
    slices: Box<[libc::iovec; BATCH]>,
}

/// One datagram of a batch, with the room for its reply.
struct Datagram<'a> {
    query: &'a [u8],
    /// Buffer for the reply; nothing is sent if it stays empty.
    reply: &'a mut Vec<u8>,
    peer: &'a libc::sockaddr_storage,
    /// The same address, converted once for all uses.
    client: SocketAddr,
    /// The control messages received with it.
    control: &'a ControlMessages,
    control_len: usize,
}

impl Datagram<'_> {
    fn return_path(&self) -> ReturnPath {
        ReturnPath::new(self.peer, self.control, self.control_len)
    }
}

impl Batch {
    /// Allocates buffers for [`BATCH`] datagrams; `metadata` requests control messages.
    fn new(metadata: bool) -> Self {
        // SAFETY: all-zero bytes are valid headers and slices: they consist of integers and
        // raw pointers.
        let (header, slice): (libc::mmsghdr, libc::iovec) =
            unsafe { (mem::zeroed(), mem::zeroed()) };
        Self {
            incoming: Incoming::new(if metadata {
                ReceiveMetadata::PeersAndControls
            } else {
                ReceiveMetadata::Peers
            }),
            replies: [const { Vec::new() }; BATCH],
            outgoing: Box::new([header; BATCH]),
            slices: Box::new([slice; BATCH]),
        }
    }

    /// Waits for a datagram and takes all that are queued, up to [`BATCH`]; returns their number.
    fn receive(&mut self, socket: RawFd) -> io::Result<usize> {
        self.incoming.receive(socket, libc::MSG_WAITFORONE)
    }

    /// Returns the first `count` datagrams received by [`receive`](Self::receive).
    fn datagrams(&mut self, count: usize) -> impl Iterator<Item = Datagram<'_>> {
        self.incoming
            .datagrams(count)
            .zip(&mut self.replies)
            .map(|(datagram, reply)| {
                let mmsg::Datagram {
                    bytes,
                    peer,
                    control,
                    control_len,
                } = datagram;
                // The buffers are used again for each batch: after the first ones no reply needs an
                // allocation.
                reply.clear();
                Datagram {
                    query: bytes,
                    reply,
                    peer,
                    client: socket_address(peer),
                    control,
                    control_len,
                }
            })
    }

    /// Sends the non-empty replies to the first `count` datagrams; returns how many the kernel
    /// refused.
    fn send(&mut self, socket: RawFd, count: usize) -> usize {
        let mut ready = 0;
        for (at, reply) in self.replies.iter_mut().enumerate().take(count) {
            if reply.is_empty() {
                continue;
            }
            self.slices[ready] = libc::iovec {
                iov_base: reply.as_mut_ptr().cast(),
                iov_len: reply.len(),
            };
            let header = &mut self.outgoing[ready].msg_hdr;
            // With the control message of the query, so that a server with several addresses
            // answers from the one that was asked. A client drops a reply from another (RFC 2181,
            // section 4.1).
            *header = self.incoming.reply_header(at);
            (header.msg_iov, header.msg_iovlen) = (&raw mut self.slices[ready], 1);
            ready += 1;
        }
        // SAFETY: each header points to a reply, an address and control messages of this batch,
        // which outlive the call.
        unsafe { mmsg::send(socket, &mut self.outgoing[..ready]) }
    }
}

//----------- QueueWatch -----------------------------------------------------

/// Watches the receive queue of one UDP thread.
struct QueueWatch {
    overload: Overload,
    /// Queries taken since `since`, by group of clients.
    taken: [u32; CLIENT_BUCKETS],
    since: Instant,
}

impl QueueWatch {
    fn new(overload: Overload) -> Self {
        Self {
            overload,
            taken: [0; CLIENT_BUCKETS],
            since: Instant::now(),
        }
    }

    /// Counts a datagram taken from the queue, regardless of its content.
    fn took(&mut self, client: IpAddr) {
        // The counts have a use only if interfaces can shed.
        if self.overload.0.is_some() {
            self.taken[bucket(client)] += 1;
        }
    }

    /// Ends a batch. `is_full`: it had the maximum size, so more datagrams may be queued.
    fn batch_ended(
        &mut self,
        socket: &WorkerSocket,
        is_full: bool,
        now: Instant,
        server_state: &ServerState,
    ) {
        let Some(shared) = &self.overload.0 else {
            return;
        };
        // A batch that is not full has emptied the queue, so nothing is lost and the system call
        // for the fill level is saved. While queries are shed, the queue is short because of that:
        // only the report tells when to stop.
        if !is_full && !shared.is_shedding.load(Ordering::Relaxed) {
            self.restart(now);
        } else if now.duration_since(self.since) >= WINDOW {
            // If the kernel reports no fill level, nothing is shed.
            let fill = socket.queue_fill().unwrap_or(0.0);
            let seconds = now.duration_since(self.since).as_secs_f64();
            shared.report(
                Report {
                    taken: &self.taken,
                    seconds,
                    fill,
                },
                now,
                server_state,
            );
            self.restart(now);
        }
    }

    fn restart(&mut self, now: Instant) {
        (self.taken, self.since) = ([0; CLIENT_BUCKETS], now);
    }
}

fn bucket(client: IpAddr) -> usize {
    client_bucket(match client.to_canonical() {
        IpAddr::V4(client) => client.octets(),
        // The program hashes the last four bytes of either address; both must put a client in one
        // group.
        IpAddr::V6(client) => (client.to_bits() as u32).to_be_bytes(),
    })
}

//----------- Arrivals -------------------------------------------------------
//
// The interfaces on which queries arrive. The fast path serves an endpoint on an interface only after the kernel has
// delivered queries for that endpoint from that interface.

/// Maximum number of pairs of interface and endpoint per report. Further pairs appear in the next
/// report.
const MAX_PAIRS: usize = 2048;

/// Arrivals since the last report, by interface and endpoint. Each UDP worker has separate counts,
/// so that no two CPUs write the same lock. Off by default: without a fast path nothing is counted.
#[derive(Clone, Default)]
pub struct Arrivals(Option<Arc<ArrivalCounts>>);

#[derive(Default)]
struct ArrivalCounts {
    workers: Mutex<Vec<WorkerPairs>>,
    /// Whether [`Arrivals::evidence`] waits. Workers read it, and write it once.
    is_awaited: AtomicBool,
    evidence: Notify,
}

/// The counts of one worker.
type WorkerPairs = Arc<OwnLines<Mutex<Pairs>>>;

/// A value in cache lines that hold nothing else, because one worker writes it for each batch.
#[derive(Default)]
#[repr(align(128))]
struct OwnLines<T>(T);

type Pairs = BTreeMap<(u32, SocketAddr), EndpointArrivals>;

/// Arrivals at one endpoint through one interface.
#[derive(Debug, Default)]
struct EndpointArrivals {
    /// Queries answered immediately by the worker.
    queries: u32,
    /// Senders of datagrams of any kind.
    clients: Vec<IpAddr>,
    /// Whether there were more senders.
    more: bool,
}

impl EndpointArrivals {
    fn add(&mut self, other: Self) {
        let Self {
            queries,
            clients,
            more,
        } = other;
        self.queries = self.queries.saturating_add(queries);
        self.more |= more;
        for client in clients {
            self.add_client(client);
        }
    }

    fn add_client(&mut self, client: IpAddr) {
        if self.clients.contains(&client) {
            return;
        }
        // Senders may be forged: the list is bounded, and the attacher learns that it is
        // incomplete.
        if self.clients.len() < MAX_CLIENTS {
            self.clients.push(client);
        } else {
            self.more = true;
        }
    }
}

impl Arrivals {
    /// Creates the shared counts, switched on.
    pub fn on() -> Self {
        Self(Some(Arc::default()))
    }

    pub(super) fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Returns the arrivals since the last call, and resets them.
    pub fn take(&self) -> Vec<Arrival> {
        let Some(shared) = &self.0 else {
            return Vec::new();
        };
        let mut pairs = Pairs::new();
        shared.workers.lock().retain(|worker| {
            for (pair, seen) in mem::take(&mut *worker.0.lock()) {
                // A pair may have reached several workers, since the kernel spreads the clients of
                // a socket.
                pairs.entry(pair).or_default().add(seen);
            }
            // The counts of a worker that has ended have just been taken.
            Arc::strong_count(worker) > 1
        });
        let mut arrivals = Vec::with_capacity(pairs.len());
        for ((ifindex, endpoint), seen) in pairs {
            let EndpointArrivals {
                queries,
                clients,
                more,
            } = seen;
            arrivals.push(Arrival {
                ifindex,
                endpoint,
                queries,
                clients,
                more,
            });
        }
        arrivals
    }

    /// Waits until a worker has answered as many queries at one endpoint through one interface, since the last
    /// report, as open its admission. Cancel-safe.
    pub async fn evidence(&self) {
        let Some(shared) = &self.0 else {
            return std::future::pending().await;
        };
        // No wake-up is lost between these lines: `notify_one` leaves a permit for the next wait.
        shared.is_awaited.store(true, Ordering::Relaxed);
        shared.evidence.notified().await;
    }
}

/// Counts the datagrams of one worker and publishes them per batch.
struct ArrivalCounter {
    /// This worker's counts, and the counts of all; `None` if nothing is counted.
    pairs: Option<(WorkerPairs, Arc<ArrivalCounts>)>,
    /// The datagrams of the current batch, as runs from one client to one pair.
    batch: Vec<Run>,
}

/// Consecutive datagrams from one client to one endpoint through one interface.
struct Run {
    pair: (u32, SocketAddr),
    client: IpAddr,
    /// Those answered immediately.
    answered: u32,
}

impl ArrivalCounter {
    fn new(all: &Arrivals) -> Self {
        let pairs = all.0.as_ref().map(|shared| {
            let pairs = WorkerPairs::default();
            shared.workers.lock().push(Arc::clone(&pairs));
            (pairs, Arc::clone(shared))
        });
        Self {
            pairs,
            batch: Vec::new(),
        }
    }

    fn arrived(&mut self, ifindex: u32, endpoint: SocketAddr, client: IpAddr, answered: bool) {
        if self.pairs.is_none() {
            return;
        }
        let pair = (ifindex, endpoint);
        let answered = u32::from(answered);
        match self.batch.last_mut() {
            // Often a whole batch comes from one client to one address, and then takes one entry.
            Some(run) if run.pair == pair && run.client == client => run.answered += answered,
            _ => self.batch.push(Run {
                pair,
                client,
                answered,
            }),
        }
    }

    /// Adds the batch to the counts.
    fn batch_ended(&mut self) {
        let Some((pairs, shared)) = &self.pairs else {
            return;
        };
        if self.batch.is_empty() {
            return;
        }
        let is_awaited = shared.is_awaited.load(Ordering::Relaxed);
        let mut pairs = pairs.0.lock();
        for runs in self.batch.chunk_by(|one, next| one.pair == next.pair) {
            let Some(&Run { pair, .. }) = runs.first() else {
                continue;
            };
            // Interfaces of containers may come and go by the thousand between two reports.
            if pairs.len() >= MAX_PAIRS && !pairs.contains_key(&pair) {
                continue;
            }
            let seen = pairs.entry(pair).or_default();
            for &Run {
                pair: _,
                client,
                answered,
            } in runs
            {
                seen.queries = seen.queries.saturating_add(answered);
                seen.add_client(client);
            }
            if is_awaited
                && seen.queries >= EVIDENCE
                // Of several workers that reach the number at once, one wakes the loop.
                && shared.is_awaited.swap(false, Ordering::Relaxed)
            {
                shared.evidence.notify_one();
            }
        }
        self.batch.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::server::{Identity, ServerMetrics};
    use dns_core::{
        catalog::Snapshot,
        config::{Config, Identity as Setting},
        resolve::AllRunning,
    };
    use dns_fastpath::FastPathHandle;
    use dns_kit::logs::{LogFormat, Logs};

    #[tokio::test]
    async fn failing_socket_logs_one_line() {
        let config = Config::parse("config.json", br#"{"port": 53}"#).unwrap();
        let logs = Logs::init(&config.config.logging, LogFormat::default()).unwrap();
        let state = ServerState::new(
            Snapshot::empty(),
            Arc::new(AllRunning),
            FastPathHandle::default(),
            None,
            None,
        );
        let handler = QueryHandler::new(
            Arc::new(state),
            Arc::new(Identity::of_this_host(Setting::Off)),
            ServerMetrics::new("dns://test".to_owned()),
            Options::default(),
        );
        // Not even a socket (recvmsg(2), ENOTSOCK).
        let (pipe, _writer) = nix::unistd::pipe().unwrap();
        let socket = Arc::new(WorkerSocket::new(pipe, false, 53));
        let worker = Worker::new(socket.clone(), Arc::new(handler), 1);
        let running = thread::spawn(|| worker.run());
        while logs.problems().is_empty() {
            thread::sleep(RECEIVE_PAUSE);
        }
        let problems = logs.problems();
        thread::sleep(20 * RECEIVE_PAUSE);
        // The same line again would only have another time.
        assert_eq!(logs.problems(), problems);
        socket.stop();
        running.join().unwrap();
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].text.contains("cannot receive queries by UDP"));
    }

    #[test]
    fn pairs_are_counted_apart() {
        let all = Arrivals::on();
        let mut worker = ArrivalCounter::new(&all);
        let endpoint: SocketAddr = "169.254.0.2:53".parse().unwrap();
        for number in 0..40 {
            worker.arrived(
                7,
                endpoint,
                IpAddr::from([10, 0, 0, number]),
                number % 2 == 0,
            );
        }
        worker.arrived(8, endpoint, IpAddr::from([10, 0, 0, 1]), true);
        assert_eq!(all.take(), [], "not before the batch has ended");
        worker.batch_ended();
        let taken = all.take();
        assert_eq!(taken.len(), 2);
        assert_eq!(
            (
                taken[0].ifindex,
                taken[0].queries,
                taken[0].clients.len(),
                taken[0].more
            ),
            (7, 20, MAX_CLIENTS, true)
        );
        assert_eq!(
            (taken[1].ifindex, taken[1].queries, taken[1].more),
            (8, 1, false)
        );
        assert_eq!(all.take(), []);
    }

    #[test]
    fn workers_share_no_counts() {
        let all = Arrivals::on();
        let mut workers = [ArrivalCounter::new(&all), ArrivalCounter::new(&all)];
        let endpoint: SocketAddr = "169.254.0.2:53".parse().unwrap();
        // The lock of the first worker is taken, which must not keep the second one waiting.
        let first = workers[0].pairs.clone().unwrap().0;
        let held = first.0.lock();
        workers[1].arrived(7, endpoint, IpAddr::from([10, 0, 0, 1]), true);
        workers[1].batch_ended();
        drop(held);
        workers[0].arrived(7, endpoint, IpAddr::from([10, 0, 0, 2]), true);
        workers[0].batch_ended();
        drop((first, workers));
        let taken = all.take();
        assert_eq!(
            (taken.len(), taken[0].queries, taken[0].clients.len()),
            (1, 2, 2)
        );
        assert_eq!(
            all.0.unwrap().workers.lock().len(),
            0,
            "workers that have ended are forgotten"
        );
    }

    #[test]
    fn fifth_query_is_evidence() {
        use futures_util::FutureExt as _;
        let all = Arrivals::on();
        let mut worker = ArrivalCounter::new(&all);
        let endpoint: SocketAddr = "169.254.0.2:53".parse().unwrap();
        let mut ask = |number: u32| {
            for number in 0..number {
                worker.arrived(7, endpoint, IpAddr::from([10, 0, 0, number as u8]), true);
            }
            worker.batch_ended();
        };
        let is_evident = || all.evidence().now_or_never().is_some();
        assert!(!is_evident());
        ask(EVIDENCE - 1);
        assert!(!is_evident());
        ask(1);
        assert!(is_evident());
        assert!(!is_evident(), "announced once");
        // The counts go on until they are taken.
        ask(1);
        assert!(is_evident());
        assert_eq!(all.take()[0].queries, EVIDENCE + 1);
        assert!(!is_evident());
        ask(1);
        assert!(!is_evident());
    }
}
