//! The thread that encodes exchanges and writes them. Only it waits for the reader.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    net::TcpStream,
    os::{
        fd::{AsRawFd, RawFd},
        unix::{
            fs::{MetadataExt, OpenOptionsExt},
            net::UnixStream,
        },
    },
    path::Path,
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use dns_core::config::{DnstapConfig, DnstapOutput};
use nix::sys::socket::{MsgFlags, recv};
use prost::Message as _;

use super::{
    Queued, Shared,
    frames::{self, Control, MESSAGE},
    output,
};

/// Pause between attempts to open the output.
const RETRY: Duration = Duration::from_secs(1);
/// Time limit of opening a stream, and of its end.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time until the writer notices that it should stop, or that its file was moved.
const POLL: Duration = Duration::from_millis(100);
/// Pause after each batch, so that senders rarely have to wake the thread.
const PAUSE: Duration = Duration::from_millis(10);
/// Maximum size of a batch in bytes, apart from its last exchange.
const BATCH: usize = 256 << 10;
/// Time that a stopping writer waits for its reader.
const LAST_TIMEOUT: Duration = Duration::from_secs(1);

/// Writes the queue to the output for as long as the process lives.
pub(super) struct Writer {
    config: DnstapConfig,
    identity: Vec<u8>,
    version: Vec<u8>,
    queue: Receiver<Box<Queued>>,
    shared: Arc<Shared>,
}

enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
    File { file: File, inode: u64 },
}

impl Writer {
    pub(super) fn new(
        config: &DnstapConfig,
        version: &str,
        queue: Receiver<Box<Queued>>,
        shared: Arc<Shared>,
    ) -> Self {
        let identity = config
            .identity
            .clone()
            .unwrap_or_else(|| {
                nix::unistd::gethostname()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned()
            })
            .into_bytes();
        let version = config
            .version
            .clone()
            .unwrap_or_else(|| version.to_owned())
            .into_bytes();
        Self {
            config: config.clone(),
            identity,
            version,
            queue,
            shared,
        }
    }

    /// Opens the output, again after each failure, until the server stops.
    pub(super) fn run(self) {
        let mut last_problem = None;
        while !self.is_stopping() {
            let problem = match self.open() {
                Ok(stream) => {
                    tracing::info!(output = %self.config.output, "dnstap: writing");
                    last_problem = None;
                    *self.shared.problem.lock() = None;
                    self.shared.is_open.store(true, Ordering::Relaxed);
                    let written = self.write(stream);
                    self.shared.is_open.store(false, Ordering::Relaxed);
                    match written {
                        Ok(()) => continue,
                        Err(error) => output::explain(&self.config.output, &error),
                    }
                }
                Err(error) => output::explain(&self.config.output, &error),
            };
            *self.shared.problem.lock() = Some(problem.clone());
            // Tried every second: the same line would fill the log while the reader is away.
            if last_problem.as_ref() != Some(&problem) {
                tracing::warn!(
                    "dnstap: {problem}; up to {} queries are kept, further ones are lost and counted; trying again \
                     every second",
                    super::MAX_QUEUED,
                );
            }
            last_problem = Some(problem);
            self.rest(RETRY);
        }
    }

    fn is_stopping(&self) -> bool {
        self.shared.stopping.load(Ordering::Acquire)
    }

    /// Sleeps unless the server stops.
    fn rest(&self, time: Duration) {
        let begun = Instant::now();
        while begun.elapsed() < time && !self.is_stopping() {
            thread::sleep(POLL.min(time));
        }
    }

    fn open(&self) -> io::Result<Stream> {
        let stream = match &self.config.output {
            DnstapOutput::File(path) => return open_file(path),
            DnstapOutput::Socket(path) => Stream::Unix(UnixStream::connect(path)?),
            DnstapOutput::Tcp(address) => {
                Stream::Tcp(TcpStream::connect_timeout(address, TIMEOUT)?)
            }
        };
        // A program that accepts and then says nothing must not hold the thread for good.
        stream.set_timeouts(TIMEOUT)?;
        let mut stream = stream;
        frames::open(&mut stream)?;
        // Short, so that a stop is noticed while the reader takes nothing.
        stream.set_timeouts(POLL)?;
        Ok(stream)
    }

    /// Writes batches until the stream fails, its file is moved (`Ok`), or the server stops (`Ok`).
    fn write(&self, mut stream: Stream) -> io::Result<()> {
        let mut batch = Vec::new();
        loop {
            let mut messages = 0;
            match self.queue.recv_timeout(POLL) {
                Ok(exchange) => messages += self.encode(*exchange, &mut batch),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return self.end(stream),
            }
            while batch.len() < BATCH
                && let Ok(exchange) = self.queue.try_recv()
            {
                messages += self.encode(*exchange, &mut batch);
            }
            let is_full = batch.len() >= BATCH;
            if let Err(error) = self.write_all(&mut stream, &batch) {
                // How much of the batch has arrived is unknown, and a new stream begins with a
                // whole frame.
                self.shared.lost.fetch_add(messages, Ordering::Relaxed);
                return Err(error);
            }
            batch.clear();
            self.shared.written.fetch_add(messages, Ordering::Relaxed);
            // Without messages, no write would show it.
            if messages == 0 && stream.is_closed() {
                return Err(io::Error::other("the reader closed the connection"));
            }
            if self.is_stopping() && self.queue.is_empty() {
                return self.end(stream);
            }
            if self.is_moved(&stream) {
                return self.end(stream);
            }
            if !is_full && messages > 0 {
                thread::sleep(PAUSE);
            }
        }
    }

    /// Appends the frames of an exchange, and returns their number.
    fn encode(&self, mut exchange: Queued, batch: &mut Vec<u8>) -> u64 {
        self.shared
            .queued_bytes
            .fetch_sub(exchange.bytes(), Ordering::Relaxed);
        let extra = Some(std::mem::take(&mut exchange.extra).into_bytes());
        let mut number = 0;
        for message in frames::messages(exchange, self.config.messages) {
            let frame = frames::DnstapFrame {
                identity: Some(self.identity.clone()),
                version: Some(self.version.clone()),
                extra: extra.clone(),
                message: Some(message),
                kind: MESSAGE,
            };
            // A vector grows as needed, so encoding cannot fail.
            frames::data(batch, |batch| _ = frame.encode(batch));
            number += 1;
        }
        number
    }

    /// Writes bytes, however long the reader takes. A stopping server waits for [`LAST_TIMEOUT`].
    fn write_all(&self, stream: &mut Stream, mut bytes: &[u8]) -> io::Result<()> {
        let mut stopping_since = None;
        while !bytes.is_empty() {
            match stream.write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => bytes = &bytes[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_timeout(&error) => {
                    if self.is_stopping()
                        && stopping_since.get_or_insert_with(Instant::now).elapsed() > LAST_TIMEOUT
                    {
                        return Err(error);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Returns whether the file was moved or deleted, for example by logrotate.
    fn is_moved(&self, stream: &Stream) -> bool {
        match (stream, &self.config.output) {
            (Stream::File { inode, .. }, DnstapOutput::File(path)) => {
                fs::metadata(path).map_or(true, |now| now.ino() != *inode)
            }
            _ => false,
        }
    }

    /// Ends the stream as the protocol wants it.
    fn end(&self, mut stream: Stream) -> io::Result<()> {
        if let Stream::File { file, .. } = &mut stream {
            file.write_all(&frames::control(Control::Stop))?;
            // The server ends or the file was moved: its end is on disk before a new one begins.
            return file.sync_data();
        }
        stream.set_timeouts(LAST_TIMEOUT)?;
        frames::close(&mut stream)
    }
}

/// Starts a new file; an existing one, which ends with its own stream, is kept as `FILE.old`.
fn open_file(path: &Path) -> io::Result<Stream> {
    // A reader takes a file for one stream, and ends at its STOP: appending would hide what
    // follows.
    if fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() > 0) {
        let mut old = path.as_os_str().to_owned();
        old.push(".old");
        fs::rename(path, old)?;
    }
    // Readable by the group at most: queries tell what clients do.
    let mut file = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o640)
        .open(path)?;
    file.write_all(&frames::control(Control::Start))?;
    // Of the open file: the path may have been renamed meanwhile.
    let inode = file.metadata()?.ino();
    Ok(Stream::File { file, inode })
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

impl Stream {
    /// Returns whether the reader has closed the connection, without waiting for it.
    fn is_closed(&self) -> bool {
        let socket: RawFd = match self {
            Self::Unix(socket) => socket.as_raw_fd(),
            Self::Tcp(socket) => socket.as_raw_fd(),
            Self::File { .. } => return false,
        };
        recv(
            socket,
            &mut [0],
            MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK,
        ) == Ok(0)
    }

    fn set_timeouts(&self, limit: Duration) -> io::Result<()> {
        match self {
            Self::Unix(socket) => {
                socket.set_read_timeout(Some(limit))?;
                socket.set_write_timeout(Some(limit))
            }
            Self::Tcp(socket) => {
                socket.set_read_timeout(Some(limit))?;
                socket.set_write_timeout(Some(limit))
            }
            Self::File { .. } => Ok(()),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(socket) => socket.read(buffer),
            Self::Tcp(socket) => socket.read(buffer),
            Self::File { file, .. } => file.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(socket) => socket.write(bytes),
            Self::Tcp(socket) => socket.write(bytes),
            Self::File { file, .. } => file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
