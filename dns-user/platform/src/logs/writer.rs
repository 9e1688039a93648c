//! The thread that writes the lines, and the bounded queue to it.

use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded};
use tracing_subscriber::fmt::MakeWriter;

use super::requests;
use crate::threads::{self, OnPanic};

/// Lines that wait at most; further ones are dropped and counted.
const QUEUE_LINES: usize = 8192;

/// How often the thread looks for suppressed request lines to report.
const REPORT_EVERY: Duration = Duration::from_secs(1);

/// Sending end of the queue; clones share it.
#[derive(Clone)]
pub(super) struct LineWriter {
    /// To the thread.
    lines: Sender<Message>,
    /// Lines that found the queue full.
    dropped: Arc<AtomicU64>,
}

/// What the thread is sent.
enum Message {
    /// A line, with its newline.
    Line(Vec<u8>),
    /// Asks for a sign when everything before it has been written.
    Flush(Sender<()>),
}

impl LineWriter {
    /// Starts the thread that writes to `output` for the life of the process.
    pub(super) fn start(output: impl Write + Send + 'static) -> io::Result<Self> {
        let (lines, queue) = bounded(QUEUE_LINES);
        let dropped = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&dropped);
        threads::spawn("log", OnPanic::EndProcess, move || write_lines(&queue, output, &counter))?;
        Ok(Self { lines, dropped })
    }

    /// Lines dropped so far.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Waits until all earlier lines have been written, `limit` at most.
    pub(super) fn flush(&self, limit: Duration) {
        let (done, wait) = bounded(1);
        if self.lines.send_timeout(Message::Flush(done), limit).is_ok() {
            // Nothing depends on it having arrived: the limit is the promise.
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

/// One call is one line: the formatter hands over whole lines.
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

/// The thread: writes what comes, says how many lines were lost before it, and
/// once a second reports suppressed request lines.
fn write_lines(queue: &Receiver<Message>, mut output: impl Write, dropped: &AtomicU64) {
    let mut reported = 0;
    loop {
        match queue.recv_timeout(REPORT_EVERY) {
            Ok(Message::Line(line)) => {
                // A log that cannot be written is no reason to stop serving DNS.
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
            tracing::warn!(lines = lost - reported, "log lines were lost: nobody read the log fast enough");
            reported = lost;
        }
        requests::report_suppressed();
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    /// Output that a test can look at and hold up.
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
    fn lines_arrive_in_order_before_a_flush_returns() {
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
    fn a_stuck_reader_never_holds_up_a_writer() {
        let output = Shared::default();
        let stuck = output.0.lock();
        let mut writer = LineWriter::start(output.clone()).unwrap();
        for _ in 0..QUEUE_LINES + 100 {
            writer.write_all(b"line\n").unwrap();
        }
        // One line may be in the thread's hands, the queue holds the rest.
        assert!(writer.dropped() >= 99, "{}", writer.dropped());
        drop(stuck);
    }
}
