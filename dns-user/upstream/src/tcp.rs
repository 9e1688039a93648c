//! Asking one address by TCP. Connections are kept for a while and used again.

use std::{
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::{TryError, give_up::OldestOut, message, random, udp::Matching};

/// Most idle connections that are kept for one recursor.
const MAX_IDLE: usize = 4;
/// How long an idle connection is kept: less than servers do (RFC 7766, section
/// 6.2.3 speaks of a few seconds).
const MAX_IDLE_AGE: Duration = Duration::from_secs(4);
/// Most queries by TCP at a time for one recursor.
const MAX_CONNECTIONS: usize = 256;

/// The TCP connections to one recursor.
#[derive(Debug)]
pub(crate) struct TcpConnections {
    /// Whom they ask.
    address: SocketAddr,
    /// How long a query may take, connecting included.
    timeout: Duration,
    /// How replies are matched.
    matching: Matching,
    /// Connections that wait for further use, the one used last at the end.
    idle: Mutex<Vec<(Instant, TcpStream)>>,
    /// Bounds the connections in use.
    in_use: OldestOut,
}

impl TcpConnections {
    /// No connection to `address` yet.
    pub(crate) fn new(address: SocketAddr, timeout: Duration, matching: Matching) -> Self {
        Self { address, timeout, matching, idle: Mutex::default(), in_use: OldestOut::new(MAX_CONNECTIONS) }
    }

    /// Sends `query` with a new id and waits for its reply.
    pub(crate) async fn ask(
        &self,
        query: &mut [u8],
        question: std::ops::Range<usize>,
    ) -> Result<Vec<u8>, TryError> {
        let exchange = tokio::time::timeout(self.timeout, self.exchange(query, question));
        match self.in_use.run(exchange).await {
            Some(Ok(outcome)) => outcome,
            Some(Err(_)) => Err(TryError::TimedOut),
            None => Err(TryError::GivenUp),
        }
    }

    /// One exchange, over an idle connection where there is one.
    async fn exchange(
        &self,
        query: &mut [u8],
        question: std::ops::Range<usize>,
    ) -> Result<Vec<u8>, TryError> {
        message::set_id(query, random::u32() as u16);
        let length = u16::try_from(query.len()).map_err(|_| TryError::Unreadable)?;
        let frame = [&length.to_be_bytes()[..], query].concat();
        if let Some(mut stream) = self.take_idle() {
            match self.converse(&mut stream, &frame, query, question.clone()).await {
                // The server closed it while our query was under way: it never
                // looked at the query.
                Err(TryError::Reset) => {}
                Ok(reply) => {
                    self.keep(stream);
                    return Ok(reply);
                }
                Err(error) => return Err(error),
            }
        }
        let mut stream = TcpStream::connect(self.address).await?;
        let _ = stream.set_nodelay(true);
        let reply = self.converse(&mut stream, &frame, query, question).await?;
        self.keep(stream);
        Ok(reply)
    }

    /// Sends a framed query over a connection and reads its reply.
    async fn converse(
        &self,
        stream: &mut TcpStream,
        frame: &[u8],
        query: &[u8],
        question: std::ops::Range<usize>,
    ) -> Result<Vec<u8>, TryError> {
        stream.write_all(frame).await?;
        let length = stream.read_u16().await?;
        let mut reply = vec![0; usize::from(length)];
        stream.read_exact(&mut reply).await?;
        if reply.len() < message::HEADER_LEN {
            return Err(TryError::Unreadable);
        }
        if message::id(&reply) != message::id(query) || !message::Flags::of(&reply).is_reply() {
            // Only one query is under way: this peer is not to be trusted.
            return Err(TryError::WrongReply);
        }
        let same = match (query.get(question), message::question_range(&reply)) {
            (Some(ours), Some(theirs)) => message::same_question(ours, &reply[theirs]),
            // Some servers refuse without repeating the question.
            _ => {
                message::u16_at(&reply, 4) == Some(0)
                    && message::Flags::of(&reply).rcode() != message::NOERROR
            }
        };
        if same || self.matching == Matching::Lenient { Ok(reply) } else { Err(TryError::WrongReply) }
    }

    /// An idle connection that the server has not closed.
    fn take_idle(&self) -> Option<TcpStream> {
        let mut idle = self.idle.lock();
        while let Some((since, stream)) = idle.pop() {
            if since.elapsed() > MAX_IDLE_AGE {
                // The others are older still.
                idle.clear();
                return None;
            }
            let open = match stream.try_read(&mut [0]) {
                Err(error) => error.kind() == io::ErrorKind::WouldBlock,
                // Closed, or bytes that nobody asked for.
                Ok(_) => false,
            };
            if open {
                return Some(stream);
            }
        }
        None
    }

    /// Keeps a connection for the next query.
    fn keep(&self, stream: TcpStream) {
        let mut idle = self.idle.lock();
        if idle.len() >= MAX_IDLE {
            idle.remove(0);
        }
        idle.push((Instant::now(), stream));
    }
}
