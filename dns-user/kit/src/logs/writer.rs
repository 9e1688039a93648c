//! The writing thread and the bounded queue to it.

use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use tracing_subscriber::fmt::MakeWriter;

use super::requests;
use crate::threads::{self, OnPanic};

/// Maximum number of queued lines; further ones are dropped and counted.
const QUEUE_LINES: usize = 8192;

/// Interval of the reports about suppressed request lines.
const REPORT_EVERY: Duration = Duration::from_secs(1);

/// Sending side of the queue; clones share the queue.
#[derive(Clone)]
pub(super) struct LineWriter {
    lines: Sender<Message>,
    /// Lines dropped because the queue was full.
    dropped: Arc<AtomicU64>,
}

/// A message to the writing thread.
enum Message {
    /// A line including its newline.
    Line(Vec<u8>),
    /// Request for a signal once all earlier messages are processed.
    Flush(Sender<()>),
}

impl LineWriter {
    /// Starts the thread that writes to `output` until the process ends.
    pub(super) fn start(output: impl Write + Send + 'static) -> io::Result<Self> {
        let (lines, queue) = bounded(QUEUE_LINES);
        let dropped = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&dropped);
        threads::spawn("log", OnPanic::EndProcess, move || write_lines(&queue, output, &counter))?;
        Ok(Self { lines, dropped })
    }

    /// Returns the number of dropped lines.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Waits until all earlier lines are written, for at most `limit`.
    pub(super) fn flush(&self, limit: Duration) {
        let (done, wait) = bounded(1);
        if self.lines.send_timeout(Message::Flush(done), limit).is_ok() {
            // A timeout is fine: the function only promises to wait for `limit`.
            let _ = wait.recv_timeout(limit);
        }
    }
}

impl<'a> MakeWriter<'a> for LineWriter {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// The formatter writes each line with a single call.
impl Write for LineWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.lines.try_send(Message::Line(line.to_vec())).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Body of the thread: writes lines, inserts the number of lines lost before each, and reports
/// suppressed request lines once per second.
fn write_lines(queue: &Receiver<Message>, mut output: impl Write, dropped: &AtomicU64) {
    let mut reported = 0;
    loop {
        match queue.recv_timeout(REPORT_EVERY) {
            Ok(Message::Line(line)) => {
                // A failing log must not stop the DNS server.
                let _ = output.write_all(&line);
            }
            Ok(Message::Flush(done)) => {
                let _ = output.flush();
                let _ = done.try_send(());
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if queue.is_empty() {
            let _ = output.flush();
        }
        let lost = dropped.load(Ordering::Relaxed);
        if lost > reported && queue.len() < QUEUE_LINES / 2 {
            tracing::warn!(lines = lost - reported, "log lines lost: the reader of the log is too slow");
            reported = lost;
        }
        requests::report_suppressed();
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    /// An output that a test can inspect and block.
    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn flush_waits_for_earlier_lines() {
        let output = Shared::default();
        let mut writer = LineWriter::start(output.clone()).unwrap();
        for number in 0..100 {
            writer.write_all(format!("{number}\n").as_bytes()).unwrap();
        }
        LineWriter::flush(&writer, Duration::from_secs(5));
        let expected: String = (0..100).map(|number| format!("{number}\n")).collect();
        assert_eq!(String::from_utf8(output.0.lock().clone()).unwrap(), expected);
        assert_eq!(writer.dropped(), 0);
    }

    #[test]
    fn stuck_reader_never_blocks() {
        let output = Shared::default();
        let stuck = output.0.lock();
        let mut writer = LineWriter::start(output.clone()).unwrap();
        for _ in 0..QUEUE_LINES + 100 {
            writer.write_all(b"line\n").unwrap();
        }
        // The thread may hold one line; the rest is in the queue.
        assert!(writer.dropped() >= 99, "{}", writer.dropped());
        drop(stuck);
    }
}
