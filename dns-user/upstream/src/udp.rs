//! Queries one address over UDP, with thousands of queries in flight on few sockets.
//!
//! Each socket is connected, so the kernel drops datagrams from other addresses and reports closed
//! ports. A forger must guess one of several random source ports and a random id, and repeat the
//! question. The number of identical questions in flight is limited ([`crate::cached`]), which
//! gives the probabilities of RFC 5452, section 7 (docs/operating.md has the numbers). `rand`
//! chooses sockets, ids and letter case by a cryptographic generator; `fastrand` is predictable.

use std::{
    cell::RefCell,
    collections::{HashMap, VecDeque},
    io,
    net::{SocketAddr, UdpSocket},
    os::fd::{AsRawFd, RawFd},
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::oneshot,
};

use super::{TryError, message};
use dns_kit::{
    eager::resume_woken,
    logs::LineLimit,
    mmsg::{Incoming, ReceiveMetadata},
};

/// Number of sockets, and thus source ports, in use per recursor.
const SOCKETS: usize = 8;
/// Age from which a socket takes no more queries...
const LIFETIME: Duration = Duration::from_secs(10);
/// ...or number of queries; its successor has a different port.
const MAX_USES: u32 = 8192;
/// Maximum number of queries in flight on one socket, so that enough ids stay free. Admission (see
/// [`super::admission`]) permits fewer.
pub(crate) const MAX_IN_FLIGHT: usize = 16_384;
/// Pause and number of retries while the send buffer is full.
const SEND_PAUSE: Duration = Duration::from_millis(1);
const SEND_TRIES: usize = 50;
/// Maximum sleep of a socket's task, so that an unused socket is closed in time.
const MAX_SLEEP: Duration = Duration::from_secs(5);
/// Size of the receive buffer in bytes. The kernel grants at most `net.core.rmem_max`.
const RECEIVE_BUFFER: usize = 1 << 20;

/// How strictly the question of a reply is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Matching {
    /// A reply with another question is ignored.
    Strict,
    /// As in bosh-dns, id and address suffice. A reply with another question is kept until the
    /// timeout, in case the right one arrives.
    Lenient,
}

/// The sockets that may carry a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SocketChoice {
    Any,
    /// One without another query of the same question, for queries that differ in more than their question.
    WithoutQuestion,
}

/// The UDP sockets for one recursor.
#[derive(Debug)]
pub(crate) struct UdpSockets {
    address: SocketAddr,
    /// Time limit of a query.
    timeout: Duration,
    /// How replies are matched to queries.
    matching: Matching,
    /// The sockets that accept queries. Each belongs to its task, so that an unused one is closed.
    slots: [Mutex<Weak<Socket>>; SOCKETS],
    /// Number of datagrams that matched no query in flight.
    mismatched: Arc<AtomicU64>,
}

impl UdpSockets {
    /// Creates the slots for sockets to `address`; none is open yet.
    pub(crate) fn new(
        address: SocketAddr,
        timeout: Duration,
        matching: Matching,
        mismatched: Arc<AtomicU64>,
    ) -> Self {
        Self {
            address,
            timeout,
            matching,
            slots: Default::default(),
            mismatched,
        }
    }

    /// Sends `query` with a new id and waits for its reply; the query keeps the id. `question` is
    /// the range of its question.
    pub(crate) async fn ask(
        &self,
        query: &mut [u8],
        question: std::ops::Range<usize>,
        exact_case: bool,
        choice: SocketChoice,
    ) -> Result<Vec<u8>, TryError> {
        let question = SmallVec::from_slice(query.get(question).ok_or(TryError::Unreadable)?);
        let chosen = match choice {
            SocketChoice::Any => rand::random_range(0..SOCKETS),
            SocketChoice::WithoutQuestion => self.without(&question)?,
        };
        let (socket, id, waiting) = self.register(chosen, question, exact_case)?;
        message::set_id(query, id);
        socket.send(query).await?;
        // A lost reply is a timeout: the sender is dropped unused only if the socket's task has
        // ended early, which does not happen while queries wait.
        waiting.await.unwrap_or(Err(TryError::TimedOut))
    }

    /// Selects a socket on which this question is not in flight, so at most [`SOCKETS`] copies are.
    fn without(&self, question: &[u8]) -> Result<usize, TryError> {
        let first = rand::random_range(0..SOCKETS);
        let is_in_flight_on = |at: usize| {
            let socket = self.slots[at].lock().upgrade();
            socket.is_some_and(|socket| socket.pending.lock().has_question(question))
        };
        let mut all = (0..SOCKETS).map(|step| (first + step) % SOCKETS);
        all.find(|&at| !is_in_flight_on(at)).ok_or(TryError::Busy)
    }

    fn register(
        &self,
        chosen: usize,
        question: SmallVec<[u8; 64]>,
        exact_case: bool,
    ) -> Result<(Arc<Socket>, u16, oneshot::Receiver<QueryResult>), TryError> {
        let mut slot = self.slots[chosen].lock();
        let (sender, receiver) = oneshot::channel();
        let mut waiting = PendingQuery {
            question,
            exact_case,
            serial: 0,
            second_best: None,
            sender,
        };
        if let Some(socket) = slot.upgrade() {
            match socket.enter(waiting, self, ReuseLimits::Enforced) {
                Ok(id) => return Ok((socket, id, receiver)),
                Err(refused) => waiting = refused,
            }
        }
        let socket = match Socket::open(self.address) {
            Ok(socket) => Arc::new(socket),
            Err(error) => {
                // Most likely the limit on open files.
                drop(slot);
                let (socket, id) = self.register_anywhere(waiting).ok_or(error)?;
                return Ok((socket, id, receiver));
            }
        };
        tokio::spawn(Arc::clone(&socket).serve(
            self.matching,
            self.timeout,
            Arc::clone(&self.mismatched),
        ));
        let id = socket
            .enter(waiting, self, ReuseLimits::Enforced)
            .map_err(|_| TryError::TimedOut)?;
        *slot = Arc::downgrade(&socket);
        Ok((socket, id, receiver))
    }

    /// Registers the query with any open socket, even a worn one: a port that is in use for longer
    /// is better than no forwarding.
    fn register_anywhere(&self, mut waiting: PendingQuery) -> Option<(Arc<Socket>, u16)> {
        for slot in &self.slots {
            let Some(socket) = slot.lock().upgrade() else {
                continue;
            };
            match socket.enter(waiting, self, ReuseLimits::Ignored) {
                Ok(id) => return Some((socket, id)),
                Err(ended) => waiting = ended,
            }
        }
        None
    }
}

/// Whether age and number of queries keep a socket from taking more.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReuseLimits {
    Enforced,
    /// The number of queries is ignored, because no new socket can be opened.
    Ignored,
}

/// The result of a query on a socket.
type QueryResult = Result<Vec<u8>, TryError>;

#[derive(Debug)]
struct Socket {
    /// The socket, registered only for replies and errors. With write readiness, the runtime would
    /// wake a thread for every datagram that leaves the send buffer.
    io: AsyncFd<UdpSocket>,
    opened: Instant,
    /// Queries that wait for replies.
    pending: Mutex<PendingQueries>,
}

/// The queries in flight on a socket.
#[derive(Debug, Default)]
struct PendingQueries {
    waiting: HashMap<u16, PendingQuery, foldhash::fast::RandomState>,
    /// Queries by expiry, which is the order of sending because all have the same timeout. Answered
    /// queries may still be listed.
    order: VecDeque<(Instant, u16, u64)>,
    /// Number of the next query, to distinguish uses of the same id.
    next_serial: u64,
    /// Number of queries sent so far.
    uses: u32,
    /// Whether another socket has taken its slot.
    retired: bool,
    /// Whether the task has ended, so that nothing reads the socket any more.
    ended: bool,
}

/// One query in flight.
#[derive(Debug)]
struct PendingQuery {
    /// The question section as sent.
    question: SmallVec<[u8; 64]>,
    /// Whether the reply must repeat the letter case (0x20).
    exact_case: bool,
    /// Serial number, which distinguishes uses of an id.
    serial: u64,
    /// A reply with another question, kept by [`Matching::Lenient`].
    second_best: Option<Vec<u8>>,
    sender: oneshot::Sender<QueryResult>,
}

impl Socket {
    /// Opens a socket connected to `address`. The kernel selects a random port from
    /// `ip_local_port_range`, except reserved ones.
    fn open(address: SocketAddr) -> io::Result<Self> {
        let domain = socket2::Domain::for_address(address);
        let socket = socket2::Socket::new(domain, socket2::Type::DGRAM.nonblocking(), None)?;
        let _ = socket.set_recv_buffer_size(RECEIVE_BUFFER);
        socket.connect(&address.into())?;
        let interest = Interest::READABLE | Interest::ERROR;
        // SAFETY: the socket owns its descriptor, always gives the same one and keeps
        // it open until it is dropped, which happens inside the `AsyncFd`.
        let io = unsafe { AsyncFd::register_with_interest(socket.into(), interest) }?;
        Ok(Self {
            io,
            opened: Instant::now(),
            pending: Mutex::default(),
        })
    }

    /// Registers a query under a free random id; returns the query if this socket takes no more.
    fn enter(
        &self,
        mut query: PendingQuery,
        sockets: &UdpSockets,
        limits: ReuseLimits,
    ) -> Result<u16, PendingQuery> {
        let now = Instant::now();
        let mut pending = self.pending.lock();
        let is_worn_out = pending.uses >= MAX_USES || now.duration_since(self.opened) > LIFETIME;
        if pending.ended || is_worn_out && limits == ReuseLimits::Enforced {
            pending.retired = true;
            return Err(query);
        }
        pending.forget_answered();
        if pending.waiting.len() >= MAX_IN_FLIGHT {
            // The few free ids could be guessed.
            return Err(query);
        }
        let id = loop {
            let id = rand::random();
            if !pending.waiting.contains_key(&id) {
                break id;
            }
        };
        query.serial = pending.next_serial;
        pending.next_serial += 1;
        pending.uses += 1;
        pending
            .order
            .push_back((now + sockets.timeout, id, query.serial));
        pending.waiting.insert(id, query);
        Ok(id)
    }

    /// Sends a registered query.
    async fn send(&self, query: &[u8]) -> Result<(), TryError> {
        // An error may belong to an earlier query (a closed port, reported by ICMP). Reporting
        // clears it, so a second attempt decides.
        let mut errors = 0;
        for _ in 0..SEND_TRIES {
            match self.io.get_ref().send(query) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    // Boxed, because every query's future would have room for it.
                    Box::pin(tokio::time::sleep(SEND_PAUSE)).await;
                }
                Err(error) if errors == 2 => return Err(error.into()),
                Err(_) => errors += 1,
            }
        }
        // The send buffer stayed full for the whole wait: nothing leaves this machine.
        Err(TryError::Refused)
    }

    /// Delivers replies and expires queries until the socket is retired and no longer needed.
    async fn serve(
        self: Arc<Self>,
        matching: Matching,
        timeout: Duration,
        mismatched: Arc<AtomicU64>,
    ) {
        let sleep = tokio::time::sleep(timeout.min(MAX_SLEEP));
        tokio::pin!(sleep);
        loop {
            tokio::select! {
                ready = self.io.ready(Interest::READABLE | Interest::ERROR) => {
                    let Ok(mut ready) = ready else { break };
                    if ready.ready().is_error() {
                        // Reported by ICMP: the port is closed or the host unreachable, which affects all
                        // waiting queries.
                        while let Ok(Some(error)) = self.io.get_ref().take_error() {
                            self.pending.lock().fail_all(error.into());
                        }
                    }
                    // `receive` has handled all errors except `WouldBlock`, which makes the runtime
                    // wait for more.
                    let _ = resume_woken(|| ready.try_io(|_| self.receive(matching, &mismatched)));
                }
                () = &mut sleep => {
                    let now = Instant::now();
                    let mut pending = self.pending.lock();
                    pending.expire(now);
                    let old = pending.retired || now.duration_since(self.opened) > LIFETIME;
                    if pending.order.is_empty() && old {
                        pending.ended = true;
                        break;
                    }
                    // A query registered later also expires later.
                    let next = pending.order.front().map_or(now + timeout, |&(deadline, ..)| deadline);
                    sleep.as_mut().reset(next.min(now + MAX_SLEEP).into());
                }
            }
        }
        let mut pending = self.pending.lock();
        pending.ended = true;
        pending.fail_all(TryError::TimedOut);
    }

    /// Reads all queued datagrams; returns the final error.
    fn receive(&self, matching: Matching, mismatched: &AtomicU64) -> io::Result<()> {
        let error = take_all(self.io.as_raw_fd(), |datagram| {
            if !self.pending.lock().deliver(datagram, matching) {
                mismatched.fetch_add(1, Ordering::Relaxed);
            }
        });
        if error.kind() == io::ErrorKind::WouldBlock {
            return Err(error);
        }
        // Reported by ICMP, as in `serve`.
        self.pending.lock().fail_all(error.into());
        Ok(())
    }
}

impl PendingQueries {
    /// Delivers a datagram to the query that it answers; `false` if there is none.
    fn deliver(&mut self, datagram: &[u8], matching: Matching) -> bool {
        let Some(id) = message::u16_at(datagram, 0) else {
            return false;
        };
        let Some(waiting) = self.waiting.get_mut(&id) else {
            return false;
        };
        let outcome = match match_reply(datagram, &waiting.question, waiting.exact_case) {
            ReplyMatch::Reply | ReplyMatch::CutShort => Ok(datagram.to_vec()),
            ReplyMatch::Unreadable => Err(TryError::Unreadable),
            ReplyMatch::OtherQuestion => {
                if matching == Matching::Lenient {
                    waiting.second_best.get_or_insert_with(|| datagram.to_vec());
                }
                return false;
            }
            ReplyMatch::OtherLetters => {
                static LIMIT: LineLimit = LineLimit::new();
                if let Some(suppressed) = LIMIT.admit_per_minute() {
                    tracing::warn!(
                        suppressed,
                        "a reply of a recursor repeats the question in other letters and is ignored: it is forged, or \
                         the recursor does not preserve letter case; in that case set `recursor_0x20` to false"
                    );
                }
                return false;
            }
            ReplyMatch::NoReply => return false,
        };
        if let Some(waiting) = self.waiting.remove(&id) {
            // The client is gone.
            let _ = waiting.sender.send(outcome);
        }
        true
    }

    /// Fails the queries whose time is up, and drops answered ones from the front of the order.
    fn expire(&mut self, now: Instant) {
        self.forget_answered();
        while let Some(&(deadline, id, _)) = self.order.front()
            && deadline <= now
        {
            if let Some(waiting) = self.waiting.remove(&id) {
                let _ = waiting
                    .sender
                    .send(waiting.second_best.ok_or(TryError::TimedOut));
            }
            self.forget_answered();
        }
    }

    /// Returns whether a query with the same question is in flight.
    fn has_question(&self, question: &[u8]) -> bool {
        self.waiting
            .values()
            .any(|waiting| message::same_question(&waiting.question, question))
    }

    /// Drops answered queries from the front of the order.
    fn forget_answered(&mut self) {
        while let Some(&(_, id, serial)) = self.order.front() {
            if self
                .waiting
                .get(&id)
                .is_some_and(|waiting| waiting.serial == serial)
            {
                return;
            }
            self.order.pop_front();
        }
    }

    fn fail_all(&mut self, error: TryError) {
        self.order.clear();
        for (_, waiting) in self.waiting.drain() {
            let _ = waiting.sender.send(Err(error));
        }
    }
}

/// Relation of a message to the query with the same id.
pub(super) enum ReplyMatch {
    Reply,
    /// Truncated (TC) before the end of its question. Asks for a query over TCP.
    CutShort,
    /// Not a DNS message, though address and id match.
    Unreadable,
    /// A reply to another question.
    OtherQuestion,
    /// A reply that does not repeat the random letter case.
    OtherLetters,
    /// A query, or a reply to another kind of request (NOTIFY, UPDATE).
    NoReply,
}

/// Compares a message with the question of the query with its id.
pub(super) fn match_reply(datagram: &[u8], question: &[u8], exact_case: bool) -> ReplyMatch {
    if datagram.len() < message::HEADER_LEN {
        return ReplyMatch::Unreadable;
    }
    let flags = message::Flags::of(datagram);
    if !flags.is_reply() || flags.opcode() != 0 {
        return ReplyMatch::NoReply;
    }
    if message::u16_at(datagram, 4) == Some(0) {
        return match flags.rcode() {
            _ if flags.truncated() => ReplyMatch::CutShort,
            // Some servers refuse without repeating the question. That they cannot answer says nothing
            // about the name; every other RCODE does, and must name its question.
            message::FORMERR | message::SERVFAIL | message::NOTIMP | message::REFUSED => {
                ReplyMatch::Reply
            }
            _ => ReplyMatch::OtherQuestion,
        };
    }
    let Some(theirs) = message::question_range(datagram).map(|range| &datagram[range]) else {
        return if flags.truncated() {
            ReplyMatch::CutShort
        } else {
            ReplyMatch::Unreadable
        };
    };
    if !message::same_question(question, theirs) {
        ReplyMatch::OtherQuestion
    } else if exact_case && *theirs != *question {
        ReplyMatch::OtherLetters
    } else {
        ReplyMatch::Reply
    }
}

//----------- Inbox --------------------------------------------------------
//
// Reads all datagrams queued in a recursor's socket.

/// Maximum number of datagrams per system call.
const BATCH: usize = 8;
/// Maximum length of a UDP datagram.
const MAX_DATAGRAM: usize = 65_535;

thread_local! {
    /// Buffers for a batch.
    static INCOMING: RefCell<Incoming<BATCH, MAX_DATAGRAM>> = RefCell::new(Incoming::new(ReceiveMetadata::Nothing));
}

/// Passes all datagrams queued in a connected socket to `each`, which must not call this function.
/// Returns the error that ends the queue: `WouldBlock`, or one reported by ICMP.
pub(super) fn take_all(socket: RawFd, mut each: impl FnMut(&[u8])) -> io::Error {
    INCOMING.with_borrow_mut(|incoming| {
        loop {
            match incoming.receive(socket, libc::MSG_DONTWAIT) {
                Ok(count) => {
                    incoming
                        .datagrams(count)
                        .for_each(|datagram| each(datagram.bytes));
                    if count < BATCH {
                        // The kernel found the queue empty, so another call is unnecessary. If it
                        // found an error instead, that is kept for the next call.
                        return io::ErrorKind::WouldBlock.into();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error,
            }
        }
    })
}

#[cfg(test)]
mod inbox_tests {
    use std::{net::UdpSocket, os::fd::AsRawFd};

    use super::*;

    /// Returns two sockets connected to each other.
    fn pair() -> [UdpSocket; 2] {
        let [one, other] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        one.connect(other.local_addr().unwrap()).unwrap();
        other.connect(one.local_addr().unwrap()).unwrap();
        [one, other]
    }

    /// Reads a socket until it is empty; returns the length and last byte of each datagram, and the
    /// final error.
    fn all(socket: &UdpSocket) -> (Vec<(usize, Option<u8>)>, io::ErrorKind) {
        let mut taken = Vec::new();
        let error = take_all(socket.as_raw_fd(), |datagram| {
            taken.push((datagram.len(), datagram.last().copied()));
        });
        (taken, error.kind())
    }

    #[test]
    fn pending_datagrams_keep_order() {
        let [sender, receiver] = pair();
        for count in [0, 1, BATCH - 1, BATCH, BATCH + 1, 3 * BATCH] {
            // Various sizes, including an empty and a large one.
            let sizes = (0..count).map(|number| if number == 1 { 60_000 } else { number * 100 });
            let expected: Vec<(usize, Option<u8>)> = sizes
                .zip(0..)
                .map(|(size, number)| (size, (size > 0).then_some(number)))
                .collect();
            for &(size, last) in &expected {
                let datagram = vec![last.unwrap_or(0); size];
                assert_eq!(sender.send(&datagram).unwrap(), size);
            }
            assert_eq!(all(&receiver), (expected, io::ErrorKind::WouldBlock));
        }
    }

    #[test]
    fn closed_port_is_an_error() {
        let [sender, receiver] = pair();
        drop(receiver);
        sender.send(b"x").unwrap();
        assert_eq!(all(&sender), (vec![], io::ErrorKind::ConnectionRefused));
        assert_eq!(all(&sender), (vec![], io::ErrorKind::WouldBlock));
    }
}
