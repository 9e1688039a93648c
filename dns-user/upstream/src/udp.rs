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
    ops::Range,
    os::fd::{AsRawFd, RawFd},
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::sync::oneshot;

use super::{
    TryError, message,
    readers::{self, ReadSocket},
};
use dns_kit::{
    eager::resume_woken,
    logs::LineLimit,
    mmsg::{Incoming, ReceiveMetadata},
    threads,
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
    /// The sockets that accept queries. Each belongs to the thread that reads it, so that an unused one is closed.
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
        question: Range<usize>,
        exact_case: bool,
        choice: SocketChoice,
    ) -> Result<Vec<u8>, TryError> {
        let (sender, receiver) = oneshot::channel();
        let question = query.get(question).ok_or(TryError::Unreadable)?;
        let pending = PendingQuery::new(question, exact_case, Recipient::Task(sender));
        let (socket, id) = self.register(choice, &mut Some(pending))?;
        message::set_id(query, id);
        socket.send(query).await?;
        // A lost reply is a timeout: the sender is dropped unused only after a panic.
        receiver.await.unwrap_or(Err(TryError::TimedOut))
    }

    /// Sends `query` as [`Self::ask`] does, without waiting: `landing` gets the outcome on the thread that
    /// reads it. Returns whether the query was sent.
    pub(crate) fn begin(
        &self,
        query: &mut [u8],
        question: Range<usize>,
        exact_case: bool,
        choice: SocketChoice,
        landing: Box<dyn Landing>,
    ) -> bool {
        let question = query.get(question).unwrap_or_default();
        let pending = PendingQuery::new(question, exact_case, Recipient::Here(landing));
        let mut pending = Some(pending);
        if let Ok((socket, id)) = self.register(choice, &mut pending) {
            message::set_id(query, id);
            if socket.try_send(query).is_ok() {
                return true;
            }
            // Gone if an error of the socket has ended it meanwhile.
            pending = socket.pending.lock().waiting.remove(&id);
        }
        if let Some(query) = pending
            && let Recipient::Here(landing) = query.recipient
        {
            landing.not_sent();
        }
        false
    }

    /// Selects a socket on which this question is not in flight, so at most [`SOCKETS`] copies are.
    fn without(&self, question: &[u8]) -> Result<usize, TryError> {
        // Not always the same one first: the port is part of what a forger must guess.
        let first = rand::random_range(0..SOCKETS);
        for step in 0..SOCKETS {
            let at = (first + step) % SOCKETS;
            let Some(socket) = self.slots[at].lock().upgrade() else {
                return Ok(at);
            };
            if !socket.pending.lock().has_question(question) {
                return Ok(at);
            }
        }
        Err(TryError::Busy)
    }

    /// Registers the query with a socket and takes it; leaves it where it is after an error.
    fn register(
        &self,
        choice: SocketChoice,
        query: &mut Option<PendingQuery>,
    ) -> Result<(Arc<Socket>, u16), TryError> {
        let question = query.as_ref().map_or(&[][..], |query| &query.question[..]);
        let chosen = match choice {
            SocketChoice::Any => rand::random_range(0..SOCKETS),
            SocketChoice::WithoutQuestion => self.without(question)?,
        };
        // Locked until the new socket is in its place: all queries that find an old one would open one each.
        let mut slot = self.slots[chosen].lock();
        if let Some(socket) = slot.upgrade()
            && let Some(id) = socket.enter(query, ReuseLimits::Enforced)
        {
            return Ok((socket, id));
        }
        let socket = match Socket::open(self) {
            Ok(socket) => socket,
            Err(error) => {
                // Most likely the limit on open files. `register_anywhere` locks every slot, this one as
                // well.
                drop(slot);
                return Ok(self.register_anywhere(query).ok_or(error)?);
            }
        };
        let id = socket
            .enter(query, ReuseLimits::Enforced)
            .ok_or(TryError::TimedOut)?;
        *slot = Arc::downgrade(&socket);
        Ok((socket, id))
    }

    /// Registers the query with any open socket, even a worn one: a port that is in use for longer
    /// is better than no forwarding.
    fn register_anywhere(&self, query: &mut Option<PendingQuery>) -> Option<(Arc<Socket>, u16)> {
        for slot in &self.slots {
            if let Some(socket) = slot.lock().upgrade()
                && let Some(id) = socket.enter(query, ReuseLimits::Ignored)
            {
                return Some((socket, id));
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

/// A query that waits for its reply without a task.
pub(crate) trait Landing: Send {
    /// Takes the outcome on the thread that reads the sockets, which must not be blocked.
    fn land(self: Box<Self>, sent: &SentQuery<'_>, outcome: Result<&[u8], TryError>);

    /// Takes note that the query could not be sent at once.
    fn not_sent(self: Box<Self>);
}

/// The fields of a query on the wire that differ from the client's.
pub(crate) struct SentQuery<'a> {
    pub(crate) id: u16,
    /// The question section, with random letter case.
    pub(crate) question: &'a [u8],
}

/// The receiver of a query's outcome.
enum Recipient {
    Task(oneshot::Sender<QueryResult>),
    /// The thread that reads the reply does the rest.
    Here(Box<dyn Landing>),
}

struct Socket {
    io: UdpSocket,
    /// Time limit of a query.
    timeout: Duration,
    /// How replies are matched to queries.
    matching: Matching,
    /// Number of datagrams that matched no query in flight.
    mismatched: Arc<AtomicU64>,
    opened: Instant,
    /// Queries that wait for replies.
    pending: Mutex<PendingQueries>,
}

/// The queries in flight on a socket.
#[derive(Default)]
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
    /// Whether nothing reads the socket any more.
    ended: bool,
}

/// One query in flight.
struct PendingQuery {
    /// The question section as sent.
    question: SmallVec<[u8; 64]>,
    /// Whether the reply must repeat the letter case (0x20).
    exact_case: bool,
    /// Serial number, which distinguishes uses of an id.
    serial: u64,
    /// A reply with another question, kept by [`Matching::Lenient`].
    second_best: Option<Box<[u8]>>,
    recipient: Recipient,
}

/// A query with its id and outcome.
type AnsweredQuery<'a> = (u16, PendingQuery, Result<&'a [u8], TryError>);

impl PendingQuery {
    fn new(question: &[u8], exact_case: bool, recipient: Recipient) -> Self {
        Self {
            question: SmallVec::from_slice(question),
            exact_case,
            serial: 0,
            second_best: None,
            recipient,
        }
    }

    /// Passes the outcome of the query with this id on. Without a lock, because the recipient may query again.
    fn end(self, id: u16, outcome: Result<&[u8], TryError>) {
        match self.recipient {
            Recipient::Task(sender) => {
                // The client may be gone.
                let _ = resume_woken(|| sender.send(outcome.map(<[u8]>::to_vec)));
            }
            Recipient::Here(landing) => {
                let question = &self.question;
                // A panic loses only this query.
                let _panicked =
                    threads::catch(|| landing.land(&SentQuery { id, question }, outcome));
            }
        }
    }
}

impl Socket {
    /// Opens and reads a socket connected to the address of `sockets`. The kernel selects a random port from
    /// `ip_local_port_range`, except reserved ones.
    fn open(sockets: &UdpSockets) -> io::Result<Arc<Self>> {
        let address = sockets.address;
        let domain = socket2::Domain::for_address(address);
        let socket = socket2::Socket::new(domain, socket2::Type::DGRAM.nonblocking(), None)?;
        // The kernel cuts a larger size down by itself. After any other error the default must do.
        let _ = socket.set_recv_buffer_size(RECEIVE_BUFFER);
        socket.connect(&address.into())?;
        let socket = Arc::new(Self {
            io: socket.into(),
            timeout: sockets.timeout,
            matching: sockets.matching,
            mismatched: Arc::clone(&sockets.mismatched),
            opened: Instant::now(),
            pending: Mutex::default(),
        });
        readers::read(Arc::<Self>::clone(&socket))?;
        Ok(socket)
    }

    /// Registers a query under a free random id and takes it; leaves it if this socket takes no more.
    fn enter(&self, query: &mut Option<PendingQuery>, limits: ReuseLimits) -> Option<u16> {
        let now = Instant::now();
        let mut pending = self.pending.lock();
        let is_worn_out = pending.uses >= MAX_USES || now.duration_since(self.opened) > LIFETIME;
        if pending.ended || is_worn_out && limits == ReuseLimits::Enforced {
            pending.retired = true;
            return None;
        }
        pending.forget_answered();
        if pending.waiting.len() >= MAX_IN_FLIGHT {
            // The few free ids could be guessed.
            return None;
        }
        let mut query = query.take()?;
        let id = message::free_id(&pending.waiting);
        query.serial = pending.next_serial;
        pending.next_serial += 1;
        pending.uses += 1;
        pending
            .order
            .push_back((now + self.timeout, id, query.serial));
        pending.waiting.insert(id, query);
        Some(id)
    }

    /// Sends a registered query, if the send buffer has room.
    fn try_send(&self, query: &[u8]) -> io::Result<usize> {
        // An error may belong to an earlier query (a closed port, reported by ICMP). Reporting
        // clears it, so a later attempt decides.
        for _ in 0..2 {
            match self.io.send(query) {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => {}
                result => return result,
            }
        }
        self.io.send(query)
    }

    /// Sends a registered query, and waits for room.
    async fn send(&self, query: &[u8]) -> Result<(), TryError> {
        for _ in 0..SEND_TRIES {
            match self.try_send(query) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    // Boxed, because every query's future would have room for it.
                    Box::pin(tokio::time::sleep(SEND_PAUSE)).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
        // The send buffer stayed full for the whole wait: nothing leaves this machine.
        Err(TryError::Refused)
    }

    fn fail_all(&self, error: TryError) {
        let failed = self.pending.lock().take_all();
        for (id, query) in failed {
            query.end(id, Err(error));
        }
    }
}

impl ReadSocket for Socket {
    fn descriptor(&self) -> RawFd {
        self.io.as_raw_fd()
    }

    fn read(&self, has_error: bool) -> bool {
        if has_error {
            // Reported by ICMP: the port is closed or the host unreachable, which affects all
            // waiting queries.
            while let Ok(Some(error)) = self.io.take_error() {
                self.fail_all(error.into());
            }
        }
        let taken = take_queued(self.io.as_raw_fd(), |datagram| {
            let answered = self.pending.lock().take_answered(datagram, self.matching);
            match answered {
                Some((id, query, outcome)) => query.end(id, outcome),
                None => _ = self.mismatched.fetch_add(1, Ordering::Relaxed),
            }
        });
        match taken {
            Ok(has_more) => has_more,
            Err(error) => {
                // Reported by ICMP, as above. Datagrams may be queued behind it.
                self.fail_all(error.into());
                true
            }
        }
    }

    fn expire(&self, now: Instant) -> Option<Instant> {
        let expired = self.pending.lock().take_expired(now);
        for (id, mut query) in expired {
            let second_best = query.second_best.take();
            query.end(id, second_best.as_deref().ok_or(TryError::TimedOut));
        }
        let mut pending = self.pending.lock();
        let is_old = pending.retired || now.duration_since(self.opened) > LIFETIME;
        if pending.order.is_empty() && is_old {
            pending.ended = true;
            return None;
        }
        // A query registered later also expires later.
        match pending.order.front() {
            Some(&(deadline, ..)) => Some(deadline),
            None => Some(now + self.timeout),
        }
    }
}

impl PendingQueries {
    /// Takes the query that a datagram answers; `None` if there is none.
    fn take_answered<'a>(
        &mut self,
        datagram: &'a [u8],
        matching: Matching,
    ) -> Option<AnsweredQuery<'a>> {
        let id = message::u16_at(datagram, 0)?;
        let waiting = self.waiting.get_mut(&id)?;
        let outcome = match match_reply(datagram, &waiting.question, waiting.exact_case) {
            ReplyMatch::Reply | ReplyMatch::CutShort => Ok(datagram),
            ReplyMatch::Unreadable => Err(TryError::Unreadable),
            ReplyMatch::OtherQuestion => {
                // The query goes on waiting: a forger must not end it by a wrong reply.
                if matching == Matching::Lenient {
                    waiting.second_best.get_or_insert_with(|| datagram.into());
                }
                return None;
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
                return None;
            }
            ReplyMatch::NoReply => return None,
        };
        let query = self.waiting.remove(&id)?;
        Some((id, query, outcome))
    }

    /// Takes the queries whose time is up, and drops answered ones from the front of the order.
    fn take_expired(&mut self, now: Instant) -> Vec<(u16, PendingQuery)> {
        let mut expired = Vec::new();
        self.forget_answered();
        while let Some(&(deadline, id, _)) = self.order.front()
            && deadline <= now
        {
            if let Some(query) = self.waiting.remove(&id) {
                expired.push((id, query));
            }
            self.forget_answered();
        }
        expired
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
            if let Some(waiting) = self.waiting.get(&id)
                && waiting.serial == serial
            {
                return;
            }
            // Answered; another query may have the id meanwhile.
            self.order.pop_front();
        }
    }

    fn take_all(&mut self) -> Vec<(u16, PendingQuery)> {
        self.order.clear();
        self.waiting.drain().collect()
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
// Reads the datagrams queued in a recursor's socket.

/// Maximum number of datagrams per system call.
const BATCH: usize = 8;
/// Maximum number of batches of one socket before it is the turn of others.
const MAX_BATCHES: usize = 16;
/// Maximum length of a UDP datagram.
const MAX_DATAGRAM: usize = 65_535;

thread_local! {
    /// Buffers for a batch.
    static INCOMING: RefCell<Incoming<BATCH, MAX_DATAGRAM>> = RefCell::new(Incoming::new(ReceiveMetadata::Nothing));
}

/// Passes datagrams queued in a connected socket to `each`, which must not call this function. Returns whether there
/// may be more, or an error reported by ICMP.
fn take_queued(socket: RawFd, mut each: impl FnMut(&[u8])) -> io::Result<bool> {
    INCOMING.with_borrow_mut(|incoming| {
        for _ in 0..MAX_BATCHES {
            match incoming.receive(socket, libc::MSG_DONTWAIT) {
                Ok(count) => {
                    incoming
                        .datagrams(count)
                        .for_each(|datagram| each(datagram.bytes));
                    if count < BATCH {
                        // The kernel found the queue empty, so another call is unnecessary. If it
                        // found an error instead, that is kept for the next call.
                        return Ok(false);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
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

    /// The length of a datagram and its last byte.
    type Taken = (usize, Option<u8>);

    /// Reads a socket once; returns the datagrams, and whether there may be more.
    fn taken(socket: &UdpSocket) -> (Vec<Taken>, Result<bool, io::ErrorKind>) {
        let mut taken = Vec::new();
        let has_more = take_queued(socket.as_raw_fd(), |datagram| {
            taken.push((datagram.len(), datagram.last().copied()));
        });
        (taken, has_more.map_err(|error| error.kind()))
    }

    #[test]
    fn pending_datagrams_keep_order() {
        let [sender, receiver] = pair();
        for count in [0, 1, BATCH - 1, BATCH, BATCH + 1, 3 * BATCH] {
            // Various sizes, including an empty and a large one.
            let sizes = (0..count).map(|number| if number == 1 { 60_000 } else { number * 100 });
            let expected: Vec<Taken> = sizes
                .zip(0..)
                .map(|(size, number)| (size, (size > 0).then_some(number)))
                .collect();
            for &(size, last) in &expected {
                let datagram = vec![last.unwrap_or(0); size];
                assert_eq!(sender.send(&datagram).unwrap(), size);
            }
            assert_eq!(taken(&receiver), (expected, Ok(false)));
        }
    }

    #[test]
    fn full_queue_is_read_in_parts() {
        let [sender, receiver] = pair();
        for _ in 0..MAX_BATCHES * BATCH + 1 {
            sender.send(b"x").unwrap();
        }
        let (first, has_more) = taken(&receiver);
        assert_eq!((first.len(), has_more), (MAX_BATCHES * BATCH, Ok(true)));
        assert_eq!(taken(&receiver), (vec![(1, Some(b'x'))], Ok(false)));
    }

    #[test]
    fn closed_port_is_an_error() {
        let [sender, receiver] = pair();
        drop(receiver);
        sender.send(b"x").unwrap();
        let refused = io::ErrorKind::ConnectionRefused;
        assert_eq!(taken(&sender), (vec![], Err(refused)));
        assert_eq!(taken(&sender), (vec![], Ok(false)));
    }
}

#[cfg(test)]
mod query_tests;
