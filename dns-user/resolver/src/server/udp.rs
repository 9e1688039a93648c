//! The UDP workers, each with a thread and a socket.

use std::{
    io, mem,
    net::SocketAddr,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::runtime::Handle;

use super::{
    answer_cache::{AnswerCache, LowerName, Remembered},
    arrivals::ArrivalCounter,
    metrics::{Dropped, Responder, Stripe},
    near::NearClients,
    overload::QueueWatch,
    service::{Deferred, Handled, Immediate, QueryHandler, WaitingPlace},
};
use dns_core::wire::{self, CLASS_IN, Parsed, Query, Shuffle, TYPE_DS, Transport};
use dns_kit::{
    eager::poll_then_spawn,
    mmsg::{self, ControlMessages, Incoming, ReceiveMetadata, socket_address},
};

/// Time that a task waits for room in the socket's send buffer, and the number of retries.
const SEND_RETRY: (Duration, usize) = (Duration::from_millis(1), 20);

//----------- Socket ---------------------------------------------------------

/// A bound socket, shared by its worker and the tasks that reply later.
pub(super) struct Socket {
    descriptor: OwnedFd,
    /// Whether the kernel reports the destination of datagrams, from which replies are then sent.
    with_pktinfo: bool,
    port: u16,
    /// Set when the worker should stop.
    stopping: AtomicBool,
}

impl Socket {
    /// Wraps a bound, blocking socket.
    pub(super) fn new(descriptor: OwnedFd, with_pktinfo: bool, port: u16) -> Self {
        Self { descriptor, with_pktinfo, port, stopping: AtomicBool::new(false) }
    }

    /// Stops the worker after it has answered its queued queries.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        // Wakes the worker: further `recvmmsg` calls return the queued datagrams, then empty ones
        // without a sender. SAFETY: the descriptor is open. An unconnected socket returns ENOTCONN
        // although it is shut down (inet_shutdown, kernel 2.6 and later).
        let _not_connected = unsafe { libc::shutdown(self.raw(), libc::SHUT_RD) };
    }

    #[cfg(test)]
    pub(super) fn into_descriptor(self) -> OwnedFd {
        self.descriptor
    }

    fn raw(&self) -> RawFd {
        self.descriptor.as_raw_fd()
    }

    /// Sends one reply without blocking.
    fn try_send(&self, reply: &mut [u8], peer: &mut ReturnPath) -> io::Result<()> {
        let mut slice = libc::iovec { iov_base: reply.as_mut_ptr().cast(), iov_len: reply.len() };
        // SAFETY: all-zero bytes are a valid header.
        let mut header: libc::msghdr = unsafe { mem::zeroed() };
        header.msg_name = (&raw mut peer.peer).cast();
        header.msg_namelen = peer.address_len();
        header.msg_iov = &raw mut slice;
        header.msg_iovlen = 1;
        if self.with_pktinfo {
            header.msg_control = peer.control.as_mut_ptr();
            header.msg_controllen = peer.control_len;
        }
        // SAFETY: the header points to buffers that outlive the call.
        let sent = unsafe { libc::sendmsg(self.raw(), &raw const header, libc::MSG_DONTWAIT) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Sends one reply from a task; returns whether the kernel accepted it.
    async fn send(&self, mut reply: Vec<u8>, mut peer: ReturnPath) -> bool {
        let (pause, tries) = SEND_RETRY;
        for _ in 0..tries {
            match self.try_send(&mut reply, &mut peer) {
                Ok(()) => return true,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(pause).await,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        false
    }
}

/// Destination of a reply, and the local address from which it is sent.
#[derive(Clone)]
struct ReturnPath {
    peer: libc::sockaddr_storage,
    /// The local address, as a control message.
    control: ControlMessages,
    control_len: usize,
}

impl ReturnPath {
    fn of(datagram: &Datagram<'_>) -> Self {
        let mut control = *datagram.control;
        control.clear_interface(datagram.control_len);
        Self { peer: *datagram.peer, control, control_len: datagram.control_len }
    }

    fn address_len(&self) -> libc::socklen_t {
        let length = if i32::from(self.peer.ss_family) == libc::AF_INET {
            size_of::<libc::sockaddr_in>()
        } else {
            size_of::<libc::sockaddr_in6>()
        };
        length as libc::socklen_t
    }
}

//----------- Worker ---------------------------------------------------------

/// Answers the queries of one socket.
pub(super) struct Worker {
    /// The socket for queries and replies.
    socket: Arc<Socket>,
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
    pub(super) fn new(socket: Arc<Socket>, handler: Arc<QueryHandler>, workers: usize) -> Self {
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
                    tracing::warn!(%error, "cannot receive queries by UDP; trying again");
                    std::thread::sleep(Duration::from_millis(10));
                    continue;
                }
            };
            let mut clock = Clock::start();
            let server_state = &self.handler.server_state;
            self.cache.enter(server_state.generation(), || server_state.snapshot().instances().len());
            let mut messages = 0;
            for mut datagram in batch.datagrams(count) {
                messages += usize::from(!datagram.query.is_empty());
                // Even an unreadable datagram has occupied the queue.
                self.queue.took(datagram.client.ip());
                // A defect triggered by one query must not cost other queries their replies.
                if panic::catch_unwind(AssertUnwindSafe(|| self.answer(&mut datagram, &mut clock))).is_err() {
                    tracing::error!(
                        "a UDP thread panicked on a query, which got no reply; other queries are not affected"
                    );
                    datagram.reply.clear();
                    self.cache = AnswerCache::new(self.workers);
                }
                if let Some((ifindex, address)) = datagram.control.destination(datagram.control_len) {
                    let endpoint = SocketAddr::new(address, self.socket.port);
                    let client = datagram.client.ip().to_canonical();
                    self.arrivals.arrived(ifindex, endpoint, client, !datagram.reply.is_empty());
                }
            }
            self.arrivals.batch_ended();
            let failed = batch.send(descriptor, count);
            if failed > 0 {
                self.stripe.dropped(Dropped::NotSent, failed as u64);
            }
            self.queue.batch_ended(descriptor, count == BATCH, clock.received, &self.handler.server_state);
            if messages == 0 && self.socket.stopping.load(Ordering::Acquire) {
                return;
            }
        }
    }

    /// Answers one datagram, or hands it to a task.
    fn answer(&mut self, datagram: &mut Datagram<'_>, clock: &mut Clock) {
        let mut query = match wire::parse(datagram.query) {
            Parsed::Query(query) => query,
            Parsed::Reply(reply) => {
                *datagram.reply = reply;
                let client = datagram.client;
                let cookies = &self.handler.options.cookies;
                cookies.answer_without_question(datagram.query, client.ip(), datagram.reply);
                let handled = Handled {
                    client,
                    transport: Transport::Udp,
                    message: datagram.query,
                    reply: datagram.reply,
                    took: clock.elapsed(),
                };
                return self.handler.observe(&self.stripe, &handled, None, Responder::None);
            }
            Parsed::Drop => {
                self.stripe.dropped(Dropped::NoQuery, 1);
                return;
            }
        };
        query.client = Some(datagram.client.ip().to_canonical());
        query.settings.echo_client_opt = self.handler.options.compat.echo_opt;
        if let Some(most) = self.handler.options.max_reply {
            let ifindex = datagram.control.interface(datagram.control_len);
            if !self.near.holds(datagram.client.ip(), ifindex)
                && !self.handler.options.cookies.is_proved(&query)
            {
                query.settings.max_udp_reply = most.into();
            }
        }
        let (responder, took) = match self.answer_from_cache(&query, datagram.reply) {
            Some(responder) => (responder, clock.elapsed_about()),
            None => match self.answer_uncached(&query, datagram, clock.received) {
                Some(responder) => (responder, clock.elapsed()),
                None => return,
            },
        };
        let Datagram { client, query: message, ref reply, .. } = *datagram;
        let handled = Handled { client, transport: Transport::Udp, message, reply, took };
        self.handler.observe(&self.stripe, &handled, Some(&query), responder);
    }

    fn answer_from_cache(&mut self, query: &Query<'_>, reply: &mut Vec<u8>) -> Option<Responder> {
        // Type DS may be routed elsewhere, and local data is of class IN.
        if query.question.qtype == TYPE_DS || query.question.qclass != CLASS_IN {
            return None;
        }
        let server_state = &self.handler.server_state;
        self.name.set(query.question.raw_name);
        let remembered = self
            .cache
            .get(&self.name, |instances, changes| server_state.has_health_changed(instances, changes))?;
        let (Remembered { name, answer, .. }, tracked) = (remembered, remembered.tracked());
        if !server_state.touch(name, answer.existence, tracked, query.client) {
            return None;
        }
        let limit = query.limit(Transport::Udp);
        wire::local_reply(query, answer, limit, &mut self.shuffle, reply);
        self.handler.add_options(query, Responder::Local, Transport::Udp, reply);
        Some(Responder::Local)
    }

    /// Answers a query that is not cached; `None` if a task will reply.
    fn answer_uncached(
        &mut self,
        query: &Query<'_>,
        datagram: &mut Datagram<'_>,
        received: Instant,
    ) -> Option<Responder> {
        match self.handler.answer_at_once(query, Transport::Udp, &mut self.shuffle, datagram.reply) {
            Immediate::Replied { responder, resolution } => {
                if let Some(resolution) = resolution
                    && query.question.qtype != TYPE_DS
                {
                    self.name.set(query.question.raw_name);
                    let server_state = &self.handler.server_state;
                    if let Some(dependence) =
                        server_state.dependence(&query.question.name(), &resolution.checks)
                    {
                        self.cache.insert(&self.name, resolution.answer(), &dependence);
                    }
                }
                Some(responder)
            }
            Immediate::Deferred(deferred) => match self.handler.admit(query) {
                Some(place) => {
                    self.hand_over(deferred, datagram, received, place);
                    None
                }
                None => {
                    *datagram.reply = self.handler.overload_reply(query, Transport::Udp);
                    Some(deferred.responder)
                }
            },
        }
    }

    /// Starts a query that must wait; a task sends the reply.
    fn hand_over(&self, deferred: Deferred, datagram: &Datagram<'_>, received: Instant, place: WaitingPlace) {
        let (path, client) = (ReturnPath::of(datagram), datagram.client);
        let (socket, handler) = (self.socket.clone(), self.handler.clone());
        poll_then_spawn(&self.runtime, async move {
            // Held until the reply is sent, so that shutdown waits for it.
            let _place = place;
            let reply = handler.answer_deferred(&deferred, Transport::Udp).await;
            let stripe = handler.metrics.tasks();
            let query = deferred.query.as_query();
            let (message, took) = (query.message, received.elapsed());
            let handled = Handled { client, transport: Transport::Udp, message, reply: &reply, took };
            handler.observe(stripe, &handled, Some(&query), deferred.responder);
            if !socket.send(reply, path).await {
                stripe.dropped(Dropped::NotSent, 1);
            }
        });
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
        Self { received: Instant::now(), last: None }
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

impl Batch {
    /// Allocates buffers for [`BATCH`] datagrams; `metadata` requests control messages.
    fn new(metadata: bool) -> Self {
        // SAFETY: all-zero bytes are valid headers and slices: they consist of integers and
        // raw pointers.
        let (header, slice): (libc::mmsghdr, libc::iovec) = unsafe { (mem::zeroed(), mem::zeroed()) };
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
        self.incoming.datagrams(count).zip(&mut self.replies).map(|(datagram, reply)| {
            let mmsg::Datagram { bytes, peer, control, control_len } = datagram;
            reply.clear();
            Datagram { query: bytes, reply, peer, client: socket_address(peer), control, control_len }
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
            self.slices[ready] = libc::iovec { iov_base: reply.as_mut_ptr().cast(), iov_len: reply.len() };
            let header = &mut self.outgoing[ready].msg_hdr;
            *header = self.incoming.reply_header(at);
            (header.msg_iov, header.msg_iovlen) = (&raw mut self.slices[ready], 1);
            ready += 1;
        }
        // SAFETY: each header points to a reply, an address and control messages of this batch,
        // which outlive the call.
        unsafe { mmsg::send(socket, &mut self.outgoing[..ready]) }
    }
}
