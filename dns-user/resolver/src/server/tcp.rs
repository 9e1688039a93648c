//! Serves TCP connections, with several queries on each (RFC 7766).
//!
//! Every reply is sent as soon as it is ready, so a forwarded query delays no other (section 6.2.1.1).
//! Clients match replies by id: glibc, systemd-resolved, unbound and BIND do, and others have one query
//! in flight.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use bytes::{Buf, BytesMut};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{
    metrics::{Dropped, Paused, Responder},
    service::{Deferred, Handled, Immediate, QueryHandler, WaitingPlace},
    tcp_limits::{HeldBytes, MAX_HELD, MAX_WAITING, WRITE_TIMEOUT},
};
use dns_core::wire::{self, Parsed, RequestInfo, Shuffle, Transport};
use dns_kit::connections::Place;

/// Capacity of the buffer that a connection keeps for its next replies.
const KEPT_BUFFER: usize = 16 << 10;
/// Pause after a failed `accept`, for example for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Minimum interval between log lines about failed `accept` calls.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(10);

/// Serves the connections of one listener until stopped; returns once the last one has ended.
pub(super) async fn serve(
    listener: TcpListener,
    handler: Arc<QueryHandler>,
    mut stopped: watch::Receiver<bool>,
) {
    let open = handler.options.connections.clone();
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
                // accept(2): with EMFILE the connection stays in the queue, and the listener stays
                // readable. Without a pause this loop would spin; without a closed connection it
                // would never succeed.
                handler.metrics.tcp_not_accepted();
                if troubled.is_none_or(|last| last.elapsed() >= COMPLAINT_INTERVAL) {
                    tracing::warn!(
                        %error,
                        "cannot accept a TCP connection; closed the longest idle one. UDP is not affected; \
                         new TCP clients wait. If the limit on open files is reached, raise LimitNOFILE"
                    );
                    troubled = Some(Instant::now());
                }
                if let Some(leaving) = open.call_off_idlest() {
                    leaving.ended().await;
                }
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // Complete replies are written at once, so delaying them gains nothing. An error means that
        // the client is gone, which reading will detect.
        let _ = stream.set_nodelay(true);
        let (place, leaving) = open.enter(client);
        if let Some(leaving) = leaving {
            handler.metrics.tcp_called_off();
            // Otherwise a burst of connections would hold more than the limit.
            leaving.ended().await;
        }
        let session = Session::new(stream, client, handler.clone(), place);
        let stopped = stopped.clone();
        connections.spawn(async move {
            let _counted = session.handler.metrics.tcp_session();
            // Clients that disconnect are not logged.
            let _gone = session.run(stopped).await;
        });
    }
    // Frees the port now: another process may listen while the last connections are answered.
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Sender and time of a query.
#[derive(Clone, Copy)]
struct Sender {
    client: SocketAddr,
    received: std::time::Instant,
}

impl Sender {
    /// Describes the sender's query with its reply, which is ready now.
    fn handled<'a>(self, message: &'a [u8], reply: &'a [u8]) -> Handled<'a> {
        Handled {
            client: self.client,
            transport: Transport::Tcp,
            message,
            reply,
            took: self.received.elapsed(),
        }
    }
}

struct Session {
    stream: TcpStream,
    client: SocketAddr,
    /// Turns queries into replies.
    handler: Arc<QueryHandler>,
    /// The slot among all connections.
    place: Place,
    /// Received bytes that do not form a complete query yet.
    input: BytesMut,
    /// Queries that wait for recursors, handlers or checks; each yields its reply.
    waiting: JoinSet<Vec<u8>>,
    /// Framed replies to be written.
    output: Vec<u8>,
    /// Bytes in `output`, which count against the limit of all connections.
    bytes: HeldBytes,
    shuffle: Shuffle,
    /// Time of the last query or reply.
    active: Instant,
}

impl Session {
    fn new(
        stream: TcpStream,
        client: SocketAddr,
        handler: Arc<QueryHandler>,
        place: Place,
    ) -> Self {
        Self {
            stream,
            client,
            handler,
            place,
            input: BytesMut::new(),
            waiting: JoinSet::new(),
            output: Vec::new(),
            bytes: HeldBytes::new(),
            shuffle: Shuffle::default(),
            active: Instant::now(),
        }
    }

    /// Serves until the client closes its end, the idle timeout passes, or the server stops;
    /// queries received before that are answered.
    async fn run(mut self, mut stopped: watch::Receiver<bool>) -> io::Result<()> {
        let mut reading = true;
        while reading || !self.waiting.is_empty() {
            self.bytes.set(self.output.len());
            // A connection is idle only while nothing is outstanding (RFC 7766, section 6.2.3): a
            // client that waits for a slow recursor keeps its connection.
            let deadline = self.active + self.handler.options.tcp_idle_timeout;
            let idle = self.waiting.is_empty();
            tokio::select! {
                // Queries received earlier come first, because they had to wait for a slot.
                read = self.stream.read_buf(&mut self.input), if reading && self.may_read() => {
                    // The client may shut down its side after its last query and still read the
                    // replies.
                    reading = read? > 0;
                    self.take_queries();
                }
                Some(done) = self.waiting.join_next(), if !idle => {
                    let mut next = Some(done);
                    while let Some(done) = next {
                        // After a panic, which is a defect, this query gets no reply.
                        self.frame(&done.unwrap_or_default());
                        let is_full = self.output.len() >= MAX_HELD;
                        next = if is_full { None } else { self.waiting.try_join_next() };
                    }
                    // There may be queries that had to wait for a slot.
                    self.take_queries();
                }
                _ = sleep_until(deadline), if idle => return Ok(()),
                // Queries that have been read are still answered; the client repeats the rest elsewhere.
                _ = stopped.wait_for(|stopped| *stopped), if reading => reading = false,
                () = self.place.called_off() => return Ok(()),
            }
            self.write().await?;
            // Queries that had to wait for room.
            while self.has_query() && self.has_room() {
                self.take_queries();
                self.write().await?;
            }
        }
        self.stream.shutdown().await
    }

    /// Answers the complete queries received, while there is room.
    fn take_queries(&mut self) {
        while self.has_room() {
            let Some(length) = self.query_len() else {
                return;
            };
            // The length before each message (RFC 1035, section 4.2.2).
            self.input.advance(2);
            let message = self.input.split_to(length);
            self.active = Instant::now();
            // The idlest connection is closed for a new one, and this one is busy.
            self.place.touch();
            self.answer(&message);
        }
    }

    /// Returns the length of the first complete query received.
    fn query_len(&self) -> Option<usize> {
        // The length may arrive byte by byte, and the message after it.
        let length = usize::from(u16::from_be_bytes(*self.input.first_chunk()?));
        (self.input.len() >= 2 + length).then_some(length)
    }

    fn has_query(&self) -> bool {
        self.query_len().is_some()
    }

    /// Returns whether one more query may be answered: neither too many queries wait nor too many
    /// bytes of replies are held.
    fn has_room(&mut self) -> bool {
        if self.waiting.len() >= MAX_WAITING {
            self.handler.metrics.tcp_paused(Paused::Queries);
            return false;
        }
        self.bytes.set(self.output.len());
        if self.bytes.has_room() {
            return true;
        }
        self.handler.metrics.tcp_paused(Paused::Bytes);
        false
    }

    /// Returns whether to read from the client: there may be room for the replies, and no complete
    /// query is left in the input.
    fn may_read(&self) -> bool {
        // Otherwise a client that sends faster than it is answered would fill the memory. Left
        // unread, its queries fill the kernel's buffers, and TCP makes it wait.
        self.waiting.len() < MAX_WAITING && !self.has_query()
    }

    fn answer(&mut self, message: &[u8]) {
        let sender = Sender {
            client: self.client,
            received: std::time::Instant::now(),
        };
        let from = RequestInfo {
            client: Some(self.client.ip().to_canonical()),
            transport: Transport::Tcp,
        };
        let query = match wire::parse_from(message, from, &self.handler.reply_settings) {
            Parsed::Query(query) => self.handler.reserve_options(query),
            Parsed::Reply(mut reply) => {
                let cookies = &self.handler.options.cookies;
                cookies.answer_without_question(message, self.client.ip(), &mut reply);
                let handled = sender.handled(message, &reply);
                let stripe = self.handler.metrics.tasks();
                self.handler
                    .observe(stripe, &handled, None, Responder::None);
                return self.frame(&reply);
            }
            // The connection stays: a message that is a reply harms no other query on it.
            Parsed::Drop => return self.handler.metrics.tasks().dropped(Dropped::NoQuery, 1),
        };
        let mut reply = Vec::new();
        let responder = match self.handler.answer_at_once(
            &query,
            &query.question.name(),
            &mut self.shuffle,
            &mut reply,
        ) {
            Immediate::Replied {
                responder,
                resolution: _,
            } => responder,
            Immediate::Deferred(deferred) => match self.handler.admit(&query) {
                Some(place) => return self.wait_for(deferred, place, sender),
                None => {
                    reply = self.handler.overload_reply(&query);
                    deferred.responder
                }
            },
        };
        let handled = sender.handled(message, &reply);
        let stripe = self.handler.metrics.tasks();
        self.handler
            .observe(stripe, &handled, Some(&query), responder);
        self.frame(&reply);
    }

    /// Starts a task that waits for the reply to a query.
    fn wait_for(&mut self, mut deferred: Deferred, place: WaitingPlace, sender: Sender) {
        let limit = self.handler.options.request_timeout;
        let handler = self.handler.clone();
        self.waiting.spawn(async move {
            // Held until the reply is there, so that shutdown waits for it.
            let _place = place;
            let reply = handler.answer_deferred(&mut deferred, limit).await;
            let query = deferred.query.as_query();
            let handled = sender.handled(query.message, &reply);
            let stripe = handler.metrics.tasks();
            handler.observe(stripe, &handled, Some(&query), deferred.responder);
            reply
        });
    }

    /// Appends a reply after its length.
    fn frame(&mut self, reply: &[u8]) {
        // Always succeeds: `truncate_to_client` and `local_reply` truncate longer replies.
        if let Ok(length) = u16::try_from(reply.len())
            // A query without a reply, after a panic, gets no frame either: a length of 0 is no
            // message.
            && length > 0
        {
            self.output.extend_from_slice(&length.to_be_bytes());
            self.output.extend_from_slice(reply);
        }
    }

    /// Writes the framed replies; closes the connection of a client that does not accept them.
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
            // A client that does not read would otherwise hold the place that another one is
            // promised for up to `WRITE_TIMEOUT`.
            () = self.place.called_off() => return Err(io::ErrorKind::ConnectionAborted.into()),
        }
        self.output.clear();
        // A thousand idle connections would each keep the size of their largest reply.
        self.output.shrink_to(KEPT_BUFFER);
        // `BytesMut` has no `shrink_to`, and keeps the room of a message of 64 KiB.
        if self.input.is_empty() && self.input.capacity() > KEPT_BUFFER {
            self.input = BytesMut::new();
        }
        self.bytes.set(0);
        // The idle time counts from the last reply, too: the client must be able to read it first.
        self.active = Instant::now();
        Ok(())
    }
}
