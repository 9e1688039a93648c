//! TCP: several queries on a connection (RFC 7766).

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::{Buf, BytesMut};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{
    connections::{Connections, Place},
    metrics::Dropped,
    service::{AtOnce, QueryHandler, observe::observe_unreadable},
};
use dns_core::wire::{self, Parsed, Query, Shuffle, Transport};

/// Queries of one connection that may wait for somebody else at a time; while
/// there are so many, no more are read.
const MAX_WAITING: usize = 64;
/// How long replies are held back behind an earlier query that still waits.
/// Then they overtake it (RFC 7766, section 6.2.1.1): the order is kept for
/// simple clients while that costs little.
const HOLD_ORDER: Duration = Duration::from_millis(500);
/// How long a client may take to accept replies before it is given up.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of replies that a connection may hold, framed or waiting for their turn. It reads
/// no further query meanwhile; the reply that crosses the bound has 64 KiB at most.
const MAX_HELD: usize = 128 << 10;
/// Bytes of replies that all connections may hold. A connection that holds some reads no
/// further query unless it holds less than what is left.
const MAX_HELD_BY_ALL: usize = 16 << 20;
/// Capacity of a buffer that a connection keeps for its next replies.
const KEPT_BUFFER: usize = 16 << 10;
/// How long to wait after `accept` failed, for lack of descriptors for example.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How often that is logged.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(10);

/// Serves the connections of one listener until told to stop; returns when the
/// last of them has ended.
pub(super) async fn serve(
    listener: TcpListener,
    handler: Arc<QueryHandler>,
    mut stopped: watch::Receiver<bool>,
) {
    let open = Arc::new(Connections::new(handler.options.max_tcp_connections, handler.options.own.clone()));
    let mut connections = JoinSet::new();
    let mut troubled: Option<Instant> = None;
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stopped.wait_for(|stopped| *stopped) => break,
            Some(_ended) = connections.join_next(), if !connections.is_empty() => continue,
        };
        let (stream, client) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                handler.metrics.tcp_not_accepted();
                if troubled.is_none_or(|last| last.elapsed() >= COMPLAINT_INTERVAL) {
                    tracing::warn!(
                        %error,
                        "cannot accept a TCP connection; closed the one that was idle longest to make room. \
                         Queries by UDP are answered; new TCP clients wait. If the limit on open files \
                         is the reason, raise LimitNOFILE"
                    );
                    troubled = Some(Instant::now());
                }
                open.call_off_idlest();
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // Replies are written whole, so waiting for more to send would only delay them.
        // That a client has gone already is noticed by reading.
        let _ = stream.set_nodelay(true);
        let (place, called_off) = open.enter(client);
        handler.metrics.tcp_called_off(called_off);
        let session = Session::new(stream, client, handler.clone(), place);
        let stopped = stopped.clone();
        connections.spawn(async move {
            let _counted = session.handler.metrics.tcp_session();
            // A client that goes away is no news.
            let _gone = session.run(stopped).await;
        });
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

struct Session {
    stream: TcpStream,
    /// Who is at its other end.
    client: SocketAddr,
    /// From a query to its reply.
    handler: Arc<QueryHandler>,
    /// Its place among all connections.
    place: Place,
    /// Bytes that came in and are no complete query yet.
    input: BytesMut,
    /// Queries that wait for somebody else; they give their number and the reply.
    waiting: JoinSet<(u64, Vec<u8>)>,
    /// Replies behind one that is not there yet, by number of their query.
    held: BTreeMap<u64, Vec<u8>>,
    /// Number of the next query to come in.
    next_query: u64,
    /// Number of the query whose reply is to go out next.
    next_reply: u64,
    /// Framed replies that may go out.
    output: Vec<u8>,
    /// Bytes of `held` and `output`, counted among those of all connections.
    bytes: HeldBytes,
    shuffle: Shuffle,
    /// Last time that a query came in or replies went out.
    active: Instant,
    /// Since when replies are held back.
    holding: Option<Instant>,
}

impl Session {
    /// Takes up a connection.
    fn new(stream: TcpStream, client: SocketAddr, handler: Arc<QueryHandler>, place: Place) -> Self {
        Self {
            stream,
            client,
            handler,
            place,
            input: BytesMut::new(),
            waiting: JoinSet::new(),
            held: BTreeMap::new(),
            next_query: 0,
            next_reply: 0,
            output: Vec::new(),
            bytes: HeldBytes::new(),
            shuffle: Shuffle::default(),
            active: Instant::now(),
            holding: None,
        }
    }

    /// Answers until the client has closed its end, is silent for too long, or
    /// the server stops; what was asked before is answered.
    async fn run(mut self, mut stopped: watch::Receiver<bool>) -> io::Result<()> {
        let mut reading = true;
        while reading || !self.waiting.is_empty() {
            self.bytes.set(self.held_len() + self.output.len());
            let deadline = match self.holding {
                Some(since) => since + HOLD_ORDER,
                None => self.active + self.handler.options.tcp_idle_timeout,
            };
            let idle = self.waiting.is_empty();
            tokio::select! {
                // Queries that came in before go first: what is left of them had to wait for a place.
                read = self.stream.read_buf(&mut self.input), if reading && self.may_read() => {
                    reading = read? > 0;
                    self.take_queries();
                }
                Some(done) = self.waiting.join_next(), if !idle => match done {
                    Ok((number, reply)) => {
                        self.held.insert(number, reply);
                        // There may be queries left that had to wait for a place.
                        self.take_queries();
                    }
                    // A defect: the client gets no reply to this one, and the
                    // order is lost.
                    Err(_panic) => self.overtake(),
                },
                _ = sleep_until(deadline), if idle || self.holding.is_some() => {
                    if self.holding.is_none() {
                        return Ok(());
                    }
                    self.overtake();
                }
                _ = stopped.wait_for(|stopped| *stopped), if reading => reading = false,
                () = self.place.called_off() => return Ok(()),
            }
            self.release_in_order();
            self.write().await?;
            // Those that were left for want of room.
            while self.has_query() && self.has_room() {
                self.take_queries();
                self.release_in_order();
                self.write().await?;
            }
        }
        self.overtake();
        self.write().await?;
        self.stream.shutdown().await
    }

    /// Answers the complete queries that came in, as long as there is a place.
    fn take_queries(&mut self) {
        while self.has_room() {
            let Some(length) = self.query_len() else { return };
            self.input.advance(2);
            let message = self.input.split_to(length);
            self.active = Instant::now();
            self.place.touch();
            self.answer(&message);
        }
    }

    /// Bytes of the complete query that came in first.
    fn query_len(&self) -> Option<usize> {
        let length = usize::from(u16::from_be_bytes(*self.input.first_chunk()?));
        (self.input.len() >= 2 + length).then_some(length)
    }

    /// Whether a complete query has come in.
    fn has_query(&self) -> bool {
        self.query_len().is_some()
    }

    /// Whether one more query may be answered: not too many wait, and not too many bytes of
    /// replies are held.
    fn has_room(&mut self) -> bool {
        if self.waiting.len() >= MAX_WAITING {
            return false;
        }
        self.bytes.set(self.held_len() + self.output.len());
        if self.bytes.has_room() {
            return true;
        }
        if !self.held.is_empty() {
            // Behind an earlier query that still waits: they overtake it.
            self.overtake();
        }
        self.handler.metrics.tcp_paused();
        false
    }

    /// Whether bytes are to be read: there may be room for their replies, and those that
    /// were read before are used up.
    fn may_read(&self) -> bool {
        self.waiting.len() < MAX_WAITING && !self.has_query()
    }

    /// Bytes of the replies that wait for their turn.
    fn held_len(&self) -> usize {
        self.held.values().map(Vec::len).sum()
    }

    /// Answers one query, now or later.
    fn answer(&mut self, message: &[u8]) {
        let received = std::time::Instant::now();
        let stripe = self.handler.metrics.tasks();
        let query = match wire::parse(message) {
            Parsed::Query(query) => Query {
                client: Some(self.client.ip().to_canonical()),
                echoes_opt: self.handler.options.compat.echo_opt,
                ..query
            },
            Parsed::Reply(reply) => {
                let took = received.elapsed();
                observe_unreadable(stripe, self.client, Transport::Tcp, message, &reply, took);
                return self.hold(reply);
            }
            Parsed::Drop => return stripe.dropped(Dropped::NoQuery, 1),
        };
        let mut reply = Vec::new();
        let by = match self.handler.answer_at_once(&query, Transport::Tcp, &mut self.shuffle, &mut reply) {
            AtOnce::Replied { by, resolution: _ } => by,
            AtOnce::Later(later) => match self.handler.admit(&query) {
                Some(permit) => {
                    let number = self.number();
                    let (handler, client) = (self.handler.clone(), self.client);
                    self.waiting.spawn(async move {
                        let _permit = permit;
                        let reply = handler.answer_later(&later, Transport::Tcp).await;
                        let took = received.elapsed();
                        let stripe = handler.metrics.tasks();
                        let query = later.query.as_query();
                        handler.observe(stripe, client, Transport::Tcp, &query, &reply, later.by, took);
                        (number, reply)
                    });
                    return;
                }
                None => {
                    reply = self.handler.overload_reply(&query);
                    later.by
                }
            },
        };
        self.handler.observe(stripe, self.client, Transport::Tcp, &query, &reply, by, received.elapsed());
        self.hold(reply);
    }

    /// The number of a query that has just come in.
    fn number(&mut self) -> u64 {
        self.next_query += 1;
        self.next_query - 1
    }

    /// Keeps a reply until its turn comes.
    fn hold(&mut self, reply: Vec<u8>) {
        let number = self.number();
        self.held.insert(number, reply);
    }

    /// Frames the replies whose turn it is.
    fn release_in_order(&mut self) {
        while let Some(entry) = self.held.first_entry()
            // Smaller ones were overtaken.
            && *entry.key() <= self.next_reply
        {
            let (number, reply) = entry.remove_entry();
            self.next_reply = self.next_reply.max(number + 1);
            self.frame(&reply);
        }
        self.holding = match (self.held.is_empty(), self.holding) {
            (true, _) => None,
            (false, since) => since.or_else(|| Some(Instant::now())),
        };
    }

    /// Frames all replies that are there, whatever still waits before them.
    fn overtake(&mut self) {
        for (number, reply) in std::mem::take(&mut self.held) {
            self.next_reply = self.next_reply.max(number + 1);
            self.frame(&reply);
        }
        self.holding = None;
    }

    /// Appends a reply behind its length.
    fn frame(&mut self, reply: &[u8]) {
        // Longer ones cannot be: `fit` and `local_reply` cut them.
        if let Ok(length) = u16::try_from(reply.len())
            && length > 0
        {
            self.output.extend_from_slice(&length.to_be_bytes());
            self.output.extend_from_slice(reply);
        }
    }

    /// Writes what was framed; a client that does not take it is given up.
    async fn write(&mut self) -> io::Result<()> {
        if self.output.is_empty() {
            return Ok(());
        }
        tokio::select! {
            written = timeout(WRITE_TIMEOUT, self.stream.write_all(&self.output)) => match written {
                Ok(written) => written?,
                Err(unread) => {
                    self.handler.metrics.tcp_unread();
                    return Err(unread.into());
                }
            },
            () = self.place.called_off() => return Err(io::ErrorKind::ConnectionAborted.into()),
        }
        self.output.clear();
        self.output.shrink_to(KEPT_BUFFER);
        if self.input.is_empty() && self.input.capacity() > KEPT_BUFFER {
            self.input = BytesMut::new();
        }
        self.bytes.set(self.held_len());
        self.active = Instant::now();
        Ok(())
    }
}

/// Bytes of replies that all connections hold.
static HELD_BY_ALL: AtomicUsize = AtomicUsize::new(0);

/// Bytes of replies that all TCP connections hold.
pub(super) fn held_by_all() -> usize {
    HELD_BY_ALL.load(Ordering::Relaxed)
}

/// Bytes of replies that one connection holds, as a part of those of all.
struct HeldBytes(usize);

impl HeldBytes {
    const fn new() -> Self {
        Self(0)
    }

    /// Counts other bytes from now on.
    fn set(&mut self, bytes: usize) {
        let Self(before) = self;
        if bytes >= *before {
            HELD_BY_ALL.fetch_add(bytes - *before, Ordering::Relaxed);
        } else {
            HELD_BY_ALL.fetch_sub(*before - bytes, Ordering::Relaxed);
        }
        *before = bytes;
    }

    /// Whether one more reply may be added. A connection that holds none always may.
    fn has_room(&self) -> bool {
        let left = MAX_HELD_BY_ALL.saturating_sub(held_by_all());
        self.0 == 0 || self.0 < MAX_HELD.min(left)
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.set(0);
    }
}
