//! Threads that read the sockets to recursors, and end the queries whose time is up.
//!
//! Each thread waits for all of its sockets together. The thread that reads a reply also passes it to the client,
//! so a query needs neither a task nor a timer.

use std::{
    collections::HashMap,
    io,
    os::fd::RawFd,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use mio::{Events, Interest, Poll, Registry, Token, Waker, unix::SourceFd};
use parking_lot::Mutex;

use dns_kit::threads::{self, OnPanic};

/// Maximum number of threads: each handles more than 100,000 replies per second.
const MAX_READERS: usize = 4;
/// Maximum number of events per system call.
const MAX_EVENTS: usize = 64;
/// Maximum pause between calls of [`ReadSocket::expire`].
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// Announces new sockets. No descriptor has this number.
const NEW: Token = Token(usize::MAX);

/// A socket without blocking.
pub(crate) trait ReadSocket: Send + Sync {
    /// Returns the descriptor, which stays open and the same.
    fn descriptor(&self) -> RawFd;

    /// Reads some of what is queued; returns whether there may be more. `has_error`: the kernel reports an error of
    /// the socket.
    fn read(&self, has_error: bool) -> bool;

    /// Ends queries that have waited for too long; returns when to call this again, or `None` to read no more.
    /// A query that begins later must not end before that time.
    fn expire(&self, now: Instant) -> Option<Instant>;
}

/// Reads a socket from now on.
pub(crate) fn read(socket: Arc<dyn ReadSocket>) -> io::Result<()> {
    static READERS: Mutex<Vec<Reader>> = Mutex::new(Vec::new());
    static NEXT: AtomicUsize = AtomicUsize::new(0);

    let count = thread::available_parallelism().map_or(1, |count| count.get().min(MAX_READERS));
    let mut readers = READERS.lock();
    // All at once, so that the number of descriptors says what sockets are open.
    while readers.len() < count {
        let reader = Reader::start(readers.len())?;
        readers.push(reader);
    }
    let next = NEXT.fetch_add(1, Ordering::Relaxed) % readers.len();
    readers[next].add(socket)
}

/// Sockets that a thread does not know yet.
type NewSockets = Arc<Mutex<Vec<Arc<dyn ReadSocket>>>>;

/// The part of a thread that others know.
struct Reader {
    new: NewSockets,
    waker: Waker,
}

impl Reader {
    fn start(number: usize) -> io::Result<Self> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), NEW)?;
        let new = NewSockets::default();
        let thread = ReaderThread {
            new: Arc::clone(&new),
            known: HashMap::default(),
        };
        let name = format!("recursors-{number}");
        // Queries on its sockets would never end.
        threads::spawn(name, OnPanic::EndProcess, move || {
            thread.read_forever(poll);
        })?;
        Ok(Self { new, waker })
    }

    fn add(&self, socket: Arc<dyn ReadSocket>) -> io::Result<()> {
        self.new.lock().push(socket);
        self.waker.wake()
    }
}

/// A thread with its sockets.
struct ReaderThread {
    new: NewSockets,
    known: HashMap<Token, Arc<dyn ReadSocket>, foldhash::fast::RandomState>,
}

impl ReaderThread {
    fn read_forever(mut self, mut poll: Poll) {
        let mut events = Events::with_capacity(MAX_EVENTS);
        // Sockets to be read, each with whether an error was reported.
        let mut ready = Vec::new();
        // Sockets that may have more. The poll reports each only once (EPOLLET).
        let mut unread: Vec<Token> = Vec::new();
        let mut now = Instant::now();
        let mut due = now;
        loop {
            let mut pause = due.saturating_duration_since(now);
            if !unread.is_empty() {
                pause = Duration::ZERO;
            }
            if let Err(error) = poll.poll(&mut events, Some(pause))
                && error.kind() != io::ErrorKind::Interrupted
            {
                tracing::error!(%error, "cannot wait for replies of recursors; trying again");
                // An error that lasts would otherwise use a whole core.
                thread::sleep(Duration::from_millis(10));
            }
            // In turns: a recursor that sends without end must delay neither the replies nor the time limits of others.
            for token in unread.drain(..) {
                ready.push((token, false));
            }
            for event in &events {
                if event.token() == NEW {
                    self.adopt(poll.registry());
                    // When the first query of the new socket expires is not known here.
                    due = now;
                } else {
                    ready.push((event.token(), event.is_error()));
                }
            }
            for (token, has_error) in ready.drain(..) {
                if let Some(socket) = self.known.get(&token)
                    && socket.read(has_error)
                    && !unread.contains(&token)
                {
                    unread.push(token);
                }
            }
            now = Instant::now();
            if due <= now {
                due = self.expire(now);
            }
        }
    }

    fn adopt(&mut self, registry: &Registry) {
        for socket in self.new.lock().drain(..) {
            let descriptor = socket.descriptor();
            // Never negative.
            let token = Token(descriptor.unsigned_abs() as usize);
            let source = &mut SourceFd(&descriptor);
            // A socket that has received something already is reported at once.
            if let Err(error) = registry.register(source, token, Interest::READABLE) {
                tracing::error!(%error, "cannot wait for replies by a socket: its queries fail");
            }
            // Even if it cannot be read, so that its queries expire.
            self.known.insert(token, socket);
        }
    }

    /// Ends what has waited for too long on any socket; returns when to call this again.
    fn expire(&mut self, now: Instant) -> Instant {
        let mut due = now + MAX_PAUSE;
        // A socket that goes leaves the poll by itself when its last user closes it (epoll(7)).
        self.known.retain(|_, socket| {
            let next = socket.expire(now);
            due = due.min(next.unwrap_or(due));
            next.is_some()
        });
        due
    }
}

#[cfg(test)]
mod tests {
    use std::{net::UdpSocket, os::fd::AsRawFd, sync::atomic::AtomicBool};

    use super::*;

    /// A socket that is called again after this time, or never.
    struct Timed(Option<Duration>);

    impl ReadSocket for Timed {
        fn descriptor(&self) -> RawFd {
            0
        }

        fn read(&self, _has_error: bool) -> bool {
            false
        }

        fn expire(&self, now: Instant) -> Option<Instant> {
            Some(now + self.0?)
        }
    }

    /// A socket that counts the calls, and may always have more.
    struct Counted {
        socket: UdpSocket,
        has_more: bool,
        reads: AtomicUsize,
        expiries: AtomicUsize,
        is_over: AtomicBool,
    }

    impl Counted {
        /// Returns a socket that has received a datagram.
        fn new(has_more: bool) -> Arc<Self> {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            socket.connect(socket.local_addr().unwrap()).unwrap();
            socket.send(b"x").unwrap();
            Arc::new(Self {
                socket,
                has_more,
                reads: AtomicUsize::new(0),
                expiries: AtomicUsize::new(0),
                is_over: AtomicBool::new(false),
            })
        }
    }

    impl ReadSocket for Counted {
        fn descriptor(&self) -> RawFd {
            self.socket.as_raw_fd()
        }

        fn read(&self, _has_error: bool) -> bool {
            self.reads.fetch_add(1, Ordering::Relaxed);
            self.has_more
        }

        fn expire(&self, now: Instant) -> Option<Instant> {
            self.expiries.fetch_add(1, Ordering::Relaxed);
            (!self.is_over.load(Ordering::Relaxed)).then_some(now)
        }
    }

    #[test]
    fn endless_socket_delays_no_other() {
        let reader = Reader::start(0).unwrap();
        let endless = Counted::new(true);
        reader.add(Arc::<Counted>::clone(&endless)).unwrap();
        let until = |counter: &AtomicUsize, least| {
            while counter.load(Ordering::Relaxed) < least {
                thread::yield_now();
            }
        };
        until(&endless.reads, 3);
        // Another one is adopted, read and called again in time.
        let other = Counted::new(false);
        reader.add(Arc::<Counted>::clone(&other)).unwrap();
        until(&other.reads, 1);
        until(&other.expiries, 2);
        let before = endless.reads.load(Ordering::Relaxed);
        until(&endless.reads, before + 3);
        assert_eq!(other.reads.load(Ordering::Relaxed), 1, "it is read once");
        for socket in [endless, other] {
            socket.is_over.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn earliest_socket_time_counts() {
        let now = Instant::now();
        for (sockets, expected, left) in [
            (&[][..], 5_000, 0),
            (&[None], 5_000, 0),
            (&[Some(7_000)], 5_000, 1),
            (&[Some(3_000), None, Some(2_000)], 2_000, 2),
        ] {
            let mut thread = ReaderThread {
                new: NewSockets::default(),
                known: HashMap::default(),
            };
            for (number, ms) in sockets.iter().enumerate() {
                let socket: Arc<dyn ReadSocket> = Arc::new(Timed(ms.map(Duration::from_millis)));
                thread.known.insert(Token(number), socket);
            }
            let due = thread.expire(now);
            assert_eq!(due - now, Duration::from_millis(expected), "{sockets:?}");
            assert_eq!(thread.known.len(), left, "{sockets:?}");
        }
    }
}
