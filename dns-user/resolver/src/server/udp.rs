//! The UDP workers: a thread and a socket each.

use std::{
    io,
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
    answer_cache::{AnswerCache, LowerName},
    arrivals::ArrivalCounter,
    batch::{BATCH, Batch, Datagram},
    eager::spawn_eagerly,
    metrics::{By, Dropped, Stripe},
    near::NearClients,
    overload::QueueWatch,
    service::{AtOnce, Later, QueryHandler, observe::observe_unreadable},
};
use dns_core::wire::{self, CLASS_IN, Parsed, Query, Shuffle, TYPE_DS, Transport};
use dns_platform::mmsg::{ControlMessages, socket_address};
use dns_upstream::admission::Permit;

/// How long a task waits for room in the socket's send buffer, and how often.
const SEND_RETRY: (Duration, usize) = (Duration::from_millis(1), 20);

//----------- Socket ---------------------------------------------------------

/// A bound socket, shared by its worker and the tasks that answer later.
pub(super) struct Socket {
    descriptor: OwnedFd,
    /// Whether the kernel says where datagrams were sent to, and replies say where from.
    told: bool,
    /// The port that it is bound to.
    port: u16,
    /// Whether the worker is to end.
    stopping: AtomicBool,
}

impl Socket {
    /// Takes a bound, blocking socket.
    pub(super) fn new(descriptor: OwnedFd, told: bool, port: u16) -> Self {
        Self { descriptor, told, port, stopping: AtomicBool::new(false) }
    }

    /// Ends the worker once it has answered what is in the queue.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        // Wakes the worker: later `recvmmsg` calls return what is queued, and
        // then empty datagrams from nobody.
        // SAFETY: the descriptor is open. ENOTCONN is what an unconnected socket
        // says although it was shut down (inet_shutdown, kernel 2.6 and later).
        let _not_connected = unsafe { libc::shutdown(self.raw(), libc::SHUT_RD) };
    }

    fn raw(&self) -> RawFd {
        self.descriptor.as_raw_fd()
    }

    /// Sends one reply without blocking.
    fn try_send(&self, reply: &mut [u8], peer: &mut ReturnPath) -> io::Result<()> {
        let mut slice = libc::iovec { iov_base: reply.as_mut_ptr().cast(), iov_len: reply.len() };
        // SAFETY: all-zero bytes are a valid header.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_name = (&raw mut peer.peer).cast();
        header.msg_namelen = peer.address_len();
        header.msg_iov = &raw mut slice;
        header.msg_iovlen = 1;
        if self.told {
            header.msg_control = peer.control.as_mut_ptr();
            header.msg_controllen = peer.control_len;
        }
        // SAFETY: the header leads to buffers that live longer than the call.
        let sent = unsafe { libc::sendmsg(self.raw(), &raw const header, libc::MSG_DONTWAIT) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Sends one reply from a task; says whether the kernel took it.
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

/// Where a reply goes, and from which of our addresses.
#[derive(Clone)]
struct ReturnPath {
    peer: libc::sockaddr_storage,
    /// Our address, as a control message.
    control: ControlMessages,
    control_len: usize,
}

impl ReturnPath {
    /// Back to where `datagram` came from.
    fn of(datagram: &Datagram<'_>) -> Self {
        let mut control = *datagram.control;
        control.clear_interface(datagram.control_len);
        Self { peer: *datagram.peer, control, control_len: datagram.control_len }
    }

    /// Bytes of the client's address.
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

/// Answers what comes in on one socket.
pub(super) struct Worker {
    /// Where queries come in and replies go out.
    socket: Arc<Socket>,
    /// Everything that is not particular to this worker.
    handler: Arc<QueryHandler>,
    /// Where queries go that have to wait.
    runtime: Handle,
    /// Answers of the current generation.
    cache: AnswerCache,
    shuffle: Shuffle,
    /// Whose replies are not bounded.
    near: NearClients,
    /// How full the queue is.
    queue: QueueWatch,
    /// By which interfaces queries arrive.
    arrivals: ArrivalCounter,
    /// What this worker counts.
    stripe: Arc<Stripe>,
}

impl Worker {
    /// A worker for `socket`, not yet running. Must be called inside a tokio runtime.
    pub(super) fn new(socket: Arc<Socket>, handler: Arc<QueryHandler>) -> Self {
        Self {
            socket,
            runtime: Handle::current(),
            cache: AnswerCache::new(),
            shuffle: Shuffle::default(),
            near: NearClients::default(),
            queue: QueueWatch::new(handler.options.overload.clone()),
            arrivals: ArrivalCounter::new(handler.options.arrivals.clone()),
            stripe: handler.metrics.stripe(),
            handler,
        }
    }

    /// Answers until the socket is stopped.
    pub(super) fn run(mut self) {
        // What answers a single query is guarded in `serve`; this keeps the thread alive
        // whatever else fails.
        while let Err(_panic) = panic::catch_unwind(AssertUnwindSafe(|| self.serve())) {
            tracing::error!(
                "a UDP thread panicked between queries and goes on; a batch may have got no replies"
            );
            self.cache = AnswerCache::new();
        }
    }

    /// As [`run`](Self::run).
    fn serve(&mut self) {
        let mut batch = Batch::new(self.socket.told);
        let descriptor = self.socket.raw();
        loop {
            let count = match batch.receive(descriptor) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // Errors of earlier replies, such as a client that is gone, are
                // not reported to unconnected sockets; what else there is may pass.
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
            let fleet = &self.handler.fleet;
            self.cache.keep_only(fleet.generation(), || fleet.snapshot().instances().len());
            let mut messages = 0;
            for mut datagram in batch.datagrams(count) {
                messages += usize::from(!datagram.query.is_empty());
                // Whether it can be read or not: it took its place in the queue.
                self.queue.took(socket_address(datagram.peer).ip());
                // A defect in how one query is answered must not cost the others their replies.
                if panic::catch_unwind(AssertUnwindSafe(|| self.answer(&mut datagram, &mut clock))).is_err() {
                    tracing::error!(
                        "a UDP thread panicked over a query, which got no reply; all others were answered"
                    );
                    datagram.reply.clear();
                    self.cache = AnswerCache::new();
                }
                if let Some((ifindex, address)) = datagram.control.destination(datagram.control_len) {
                    let endpoint = SocketAddr::new(address, self.socket.port);
                    let client = socket_address(datagram.peer).ip().to_canonical();
                    self.arrivals.arrived(ifindex, endpoint, client, !datagram.reply.is_empty());
                }
            }
            self.arrivals.batch_ended();
            let failed = batch.send(descriptor, count);
            if failed > 0 {
                self.stripe.dropped(Dropped::NotSent, failed as u64);
            }
            self.queue.batch_ended(descriptor, count == BATCH, clock.received, &self.handler.fleet);
            if messages == 0 && self.socket.stopping.load(Ordering::Acquire) {
                return;
            }
        }
    }

    /// Answers one datagram, or sends it on its way.
    fn answer(&mut self, datagram: &mut Datagram<'_>, clock: &mut Clock) {
        let mut query = match wire::parse(datagram.query) {
            Parsed::Query(query) => query,
            Parsed::Reply(reply) => {
                *datagram.reply = reply;
                let client = socket_address(datagram.peer);
                observe_unreadable(
                    &self.stripe,
                    client,
                    Transport::Udp,
                    datagram.query,
                    datagram.reply,
                    clock.elapsed(),
                );
                return;
            }
            Parsed::Drop => {
                self.stripe.dropped(Dropped::NoQuery, 1);
                return;
            }
        };
        query.client = Some(socket_address(datagram.peer).ip().to_canonical());
        query.echoes_opt = self.handler.options.compat.echo_opt;
        if let Some(most) = self.handler.options.max_reply {
            let ifindex = datagram.control.interface(datagram.control_len);
            if !self.near.holds(socket_address(datagram.peer).ip(), ifindex) {
                query.most_by_udp = most.into();
            }
        }
        let (by, took) = match self.answer_from_cache(&query, datagram.reply) {
            Some(by) => (by, clock.elapsed_about()),
            None => match self.answer_anew(&query, datagram, clock.received) {
                Some(by) => (by, clock.elapsed()),
                None => return,
            },
        };
        let client = socket_address(datagram.peer);
        self.handler.observe(&self.stripe, client, Transport::Udp, &query, datagram.reply, by, took);
    }

    /// Answers a local name that was asked for before.
    fn answer_from_cache(&mut self, query: &Query<'_>, reply: &mut Vec<u8>) -> Option<By> {
        // Type DS may be routed elsewhere, and other classes are not ours.
        if query.question.qtype == TYPE_DS || query.question.qclass != CLASS_IN {
            return None;
        }
        let remembered = self.cache.get(&LowerName::new(query.question.raw_name))?;
        if !self.handler.fleet.asked_again(remembered.name, remembered.is_tracked) {
            return None;
        }
        let limit = query.limit(Transport::Udp);
        wire::local_reply(query, remembered.answer, limit, &mut self.shuffle, reply);
        self.handler.add_options(query, Transport::Udp, reply);
        Some(By::Local)
    }

    /// Answers a query that is not remembered; `None`: it was handed to a task.
    fn answer_anew(
        &mut self,
        query: &Query<'_>,
        datagram: &mut Datagram<'_>,
        received: Instant,
    ) -> Option<By> {
        match self.handler.answer_at_once(query, Transport::Udp, &mut self.shuffle, datagram.reply) {
            AtOnce::Replied { by, resolution } => {
                if let Some(resolution) = resolution
                    && query.question.qtype != TYPE_DS
                {
                    let name = LowerName::new(query.question.raw_name);
                    self.cache.insert(&name, resolution.answer(), resolution.checks.tracked);
                }
                Some(by)
            }
            AtOnce::Later(later) => match self.handler.admit(query) {
                Some(permit) => {
                    self.hand_over(later, datagram, received, permit);
                    None
                }
                None => {
                    *datagram.reply = self.handler.overload_reply(query);
                    Some(later.by)
                }
            },
        }
    }

    /// Begins what a query needs that has to wait; the rest is done by a task.
    fn hand_over(&self, later: Later, datagram: &Datagram<'_>, received: Instant, permit: Permit) {
        let path = ReturnPath::of(datagram);
        let (socket, handler) = (self.socket.clone(), self.handler.clone());
        spawn_eagerly(&self.runtime, async move {
            // Held until the reply is out, for an orderly end.
            let _permit = permit;
            let reply = handler.answer_later(&later, Transport::Udp).await;
            let client = socket_address(&path.peer);
            let stripe = handler.metrics.tasks();
            let query = later.query.as_query();
            handler.observe(stripe, client, Transport::Udp, &query, &reply, later.by, received.elapsed());
            if !socket.send(reply, path).await {
                stripe.dropped(Dropped::NotSent, 1);
            }
        });
    }
}

/// The time that a batch takes, read seldom.
struct Clock {
    /// When the batch was taken from the socket.
    received: Instant,
    last: Option<Duration>,
}

impl Clock {
    /// A batch was taken.
    fn start() -> Self {
        Self { received: Instant::now(), last: None }
    }

    fn elapsed(&mut self) -> Duration {
        *self.last.insert(self.received.elapsed())
    }

    /// Time since then at the last reading: good enough for remembered answers,
    /// of which a whole batch takes some microseconds.
    fn elapsed_about(&mut self) -> Duration {
        match self.last {
            Some(last) => last,
            None => self.elapsed(),
        }
    }
}
