//! The writing thread and the bounded queue to it.

use std::{
    borrow::Cow,
    fmt, io,
    io::Write,
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use serde_json::{Map, Value};
use time::{OffsetDateTime, macros::format_description};
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter, format::Writer},
    registry::LookupSpan,
};

use super::{LogFormat, requests, tags};
use crate::{
    foreign::cut,
    threads::{self, OnPanic},
};
use dns_core::terminal;

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
        threads::spawn("log", OnPanic::EndProcess, move || {
            write_lines(&queue, output, &counter)
        })?;
        Ok(Self { lines, dropped })
    }

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
        // Threads that answer queries write here: a reader of the log that stands still must not
        // stop them.
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
        // The report goes through the same queue, so it waits until there is room.
        if lost > reported && queue.len() < QUEUE_LINES / 2 {
            tracing::warn!(
                lines = lost - reported,
                "log lines lost: the reader of the log is too slow"
            );
            reported = lost;
        }
        requests::report_suppressed();
    }
}

//----------- Format -------------------------------------------------------
//
// Formatting of events as lines.

/// Formats events as text or JSON, always as one line.
pub(super) struct Lines {
    pub(super) format: LogFormat,
    /// Whether the journal reads the lines. It adds a time stamp itself and takes the priority from
    /// a prefix (sd-daemon(3)).
    pub(super) journal: bool,
}

/// Returns whether standard output or error is connected to the journal: systemd stores the device and
/// inode in `JOURNAL_STREAM` (systemd.exec(5)).
pub(super) fn is_journal(output: impl AsFd) -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else {
        return false;
    };
    // Children inherit the variable even if their output goes elsewhere, hence the comparison.
    nix::sys::stat::fstat(output)
        .is_ok_and(|stat| stream == format!("{}:{}", stat.st_dev, stat.st_ino))
}

/// Returns the prefix that sets a line's priority in the journal (sd-daemon(3), syslog(3)).
fn priority(level: &Level) -> &'static str {
    match *level {
        Level::ERROR => "<3>",
        Level::WARN => "<4>",
        Level::INFO => "<6>",
        Level::DEBUG | Level::TRACE => "<7>",
    }
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        out: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        let mut fields = Fields::default();
        event.record(&mut fields);
        let mut out = out;
        if self.journal {
            out.write_str(priority(metadata.level()))?;
        }
        let line = Line {
            time: &now(),
            level: metadata.level().as_str(),
            tag: tags::of_target(metadata.target()),
            fields,
        };
        match self.format {
            LogFormat::Text if self.journal => line.bare_text(out),
            LogFormat::Text => line.text(out),
            LogFormat::Json => line.json(out),
        }
    }
}

struct Line<'a> {
    /// RFC 3339 in UTC with microseconds.
    time: &'a str,
    level: &'a str,
    tag: &'a str,
    fields: Fields,
}

impl Line<'_> {
    /// Writes `time LEVEL [tag] message key=value`.
    fn text(self, mut out: Writer<'_>) -> fmt::Result {
        let Self {
            time,
            level,
            tag,
            fields,
        } = self;
        writeln!(out, "{time} {level:<5} [{tag}] {fields}")
    }

    /// Writes `[tag] message key=value`, for readers that add time and level themselves.
    fn bare_text(self, mut out: Writer<'_>) -> fmt::Result {
        let Self {
            time: _,
            level: _,
            tag,
            fields,
        } = self;
        writeln!(out, "[{tag}] {fields}")
    }

    /// Writes one flat object. Fields with the name of a standard member get an underscore.
    fn json(self, mut out: Writer<'_>) -> fmt::Result {
        let Self {
            time,
            level,
            tag,
            fields: Fields { message, others },
        } = self;
        let mut object = Map::new();
        for (key, value) in [
            ("time", time),
            ("level", level),
            ("tag", tag),
            ("message", &message),
        ] {
            object.insert(key.to_owned(), Value::String(value.to_owned()));
        }
        for (key, value) in others {
            let key = if object.contains_key(key) {
                format!("{key}_")
            } else {
                key.to_owned()
            };
            object.insert(key, value);
        }
        writeln!(
            out,
            "{}",
            terminal::json(&Value::Object(object).to_string())
        )
    }
}

/// Maximum number of characters of a message or of the value of another field. The longest of our own are lists
/// of errors in a configuration.
const MAX_FIELD: usize = 16 << 10;

/// Fields of an event, including its message.
#[derive(Default)]
struct Fields {
    message: String,
    /// The other fields, in source order.
    others: Vec<(&'static str, Value)>,
}

/// Formats as `message key=value` on one line.
impl fmt::Display for Fields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&terminal::line(&self.message))?;
        for (key, value) in &self.others {
            match value {
                Value::String(text) if is_bare(text) => write!(f, " {key}={text}")?,
                other => write!(f, " {key}={}", terminal::json(&other.to_string()))?,
            }
        }
        Ok(())
    }
}

impl Fields {
    fn push(&mut self, field: &Field, mut value: Value) {
        // A line has a limit, even if a peer sends more: it is read by people, and kept by the disk.
        if let Value::String(text) = &mut value
            && let Cow::Owned(shown) = cut(text, MAX_FIELD)
        {
            *text = shown;
        }
        match (field.name(), value) {
            ("message", Value::String(text)) => self.message = text,
            ("message", other) => self.message = other.to_string(),
            (name, value) => self.others.push((name.trim_start_matches("r#"), value)),
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.push(field, Value::String(format!("{value:?}")));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.push(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.push(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.push(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.push(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.push(field, value.into());
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.push(field, with_causes(value).into());
    }
}

/// Returns the messages of an error and its causes, separated by colons, without causes that it repeats.
pub fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut messages: Vec<_> = anyhow::Chain::new(error).map(ToString::to_string).collect();
    messages.dedup_by(|cause, error| error.contains(cause.as_str()));
    messages.join(": ")
}

/// Returns whether a value needs no quotes.
fn is_bare(text: &str) -> bool {
    !text.is_empty()
        && text
            .chars()
            .all(|c| !c.is_whitespace() && !terminal::is_active(c) && !"\"=\\".contains(c))
}

/// Returns message and fields of an event in the format of a text line.
pub(super) fn text_of(event: &Event<'_>) -> String {
    let mut fields = Fields::default();
    event.record(&mut fields);
    fields.to_string()
}

/// Returns the current time in the format of a line.
pub(super) fn now() -> String {
    rfc3339(OffsetDateTime::now_utc())
}

/// Formats a time in seconds since 1970 as in a line.
pub fn time_of(seconds: f64) -> String {
    // A time outside the calendar cannot come from this process.
    rfc3339(
        OffsetDateTime::UNIX_EPOCH
            .checked_add(time::Duration::seconds_f64(seconds))
            .unwrap_or(OffsetDateTime::UNIX_EPOCH),
    )
}

fn rfc3339(time: OffsetDateTime) -> String {
    let format =
        format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:6]Z");
    // A UTC time has all components of the format; in any case, the line is more important than its time.
    time.format(&format).unwrap_or_default()
}

#[cfg(test)]
pub(crate) mod tests {
    use parking_lot::Mutex;

    use super::*;

    /// An output that a test can inspect and block.
    #[derive(Clone, Default)]
    pub(crate) struct Shared(pub(crate) Arc<Mutex<Vec<u8>>>);

    impl Shared {
        pub(crate) fn text(&self) -> String {
            String::from_utf8(self.0.lock().clone()).unwrap()
        }
    }

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
        assert_eq!(
            String::from_utf8(output.0.lock().clone()).unwrap(),
            expected
        );
        assert_eq!(writer.dropped(), 0);
    }

    /// Returns what is logged meanwhile, in this form.
    fn logged_as(lines: Lines, output: &Shared, work: impl FnOnce()) -> String {
        let writer = output.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(Level::TRACE)
            .event_format(lines)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, work);
        output.text()
    }

    /// Returns what is logged meanwhile.
    pub(crate) fn logged(work: impl FnOnce()) -> String {
        let lines = Lines {
            format: LogFormat::Text,
            journal: false,
        };
        logged_as(lines, &Shared::default(), work)
    }

    #[test]
    fn lost_lines_await_room() {
        let (lines, queue) = bounded(QUEUE_LINES);
        for _ in 0..5_000 {
            assert!(lines.send(Message::Line(b"line\n".to_vec())).is_ok());
        }
        drop(lines);
        let output = Shared::default();
        let form = Lines {
            format: LogFormat::Text,
            journal: true,
        };
        let text = logged_as(form, &output, || {
            write_lines(&queue, output.clone(), &AtomicU64::new(3));
        });
        let report = "<4>[main] log lines lost: the reader of the log is too slow lines=3\n";
        let (before, after) = text.split_once(report).unwrap();
        // Less than half of the queue is left.
        assert_eq!(after.lines().count(), 4_095);
        assert_eq!(before.lines().count(), 5_000 - 4_095);
    }

    #[test]
    fn journal_and_json_have_their_forms() {
        let warned = |format, journal| {
            let lines = Lines { format, journal };
            logged_as(lines, &Shared::default(), || tracing::warn!("careful"))
        };
        assert_eq!(warned(LogFormat::Text, true), "<4>[main] careful\n");
        let text = warned(LogFormat::Text, false);
        assert_eq!(text.split_at(27).1, " WARN  [main] careful\n", "{text}");
        for (journal, prefix) in [(true, "<4>"), (false, "")] {
            let text = warned(LogFormat::Json, journal);
            let object: Map<String, Value> =
                serde_json::from_str(text.strip_prefix(prefix).unwrap()).unwrap();
            assert_eq!(object["level"], "WARN");
            assert_eq!(object["tag"], "main");
            assert_eq!(object["message"], "careful");
            assert_eq!(object["time"].as_str().map(str::len), Some(27));
            assert_eq!(object.len(), 4);
        }
        let priorities = [
            Level::ERROR,
            Level::WARN,
            Level::INFO,
            Level::DEBUG,
            Level::TRACE,
        ];
        let priorities = priorities.map(|level| priority(&level));
        assert_eq!(priorities, ["<3>", "<4>", "<6>", "<7>", "<7>"]);
    }

    #[test]
    fn values_of_every_kind_show() {
        let line = logged(|| {
            let cause = io::Error::other("no route");
            let error: &(dyn std::error::Error + 'static) = &cause;
            tracing::info!(
                text = "a b",
                small = -1_i64,
                large = u64::MAX,
                part = 0.5,
                is_set = true,
                list = ?[1, 2],
                name = %"x",
                error,
                "shown"
            );
        });
        let expected = " INFO  [main] shown text=\"a b\" small=-1 large=18446744073709551615 part=0.5 is_set=true \
                        list=\"[1, 2]\" name=x error=\"no route\"\n";
        assert_eq!(line.split_at(27).1, expected);
    }

    #[test]
    fn ambiguous_values_are_quoted() {
        for (text, expected) in [
            ("a.b-c:1/é", true),
            ("", false),
            ("a b", false),
            ("a\u{a0}b", false),
            ("a\u{7}", false),
            ("a\"b", false),
            ("a=b", false),
            ("a\\b", false),
        ] {
            assert_eq!(is_bare(text), expected, "{text:?}");
        }
    }

    #[test]
    fn fields_end_at_their_limit() {
        for (length, is_cut) in [(16_384, false), (16_385, true)] {
            let text = "x".repeat(length);
            let line = logged(|| tracing::info!("{text}"));
            assert_eq!(line.matches('x').count(), 16_384);
            assert_eq!(line.ends_with("…\n"), is_cut, "{length}");
        }
    }

    #[test]
    fn seconds_become_times() {
        for (seconds, expected) in [
            (0.0, "1970-01-01T00:00:00.000000Z"),
            (1_000_000_000.25, "2001-09-09T01:46:40.250000Z"),
            // Outside the calendar.
            (1e18, "1970-01-01T00:00:00.000000Z"),
        ] {
            assert_eq!(time_of(seconds), expected);
        }
    }

    #[test]
    fn lost_lines_are_reported_once() {
        for (lost, reports) in [(0, 0), (3, 1)] {
            let (lines, queue) = bounded(2);
            for _ in 0..2 {
                assert!(lines.send(Message::Line(Vec::new())).is_ok());
            }
            drop(lines);
            let dropped = AtomicU64::new(lost);
            let log = logged(|| write_lines(&queue, io::sink(), &dropped));
            assert_eq!(log.matches("log lines lost").count(), reports, "{log}");
        }
    }

    #[test]
    fn long_texts_are_cut() {
        let long = "x".repeat(100_167);
        let length = logged(|| tracing::info!(reason = long, "{long}")).len();
        assert!(length > MAX_FIELD && length < 3 * MAX_FIELD, "{length}");
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

#[cfg(test)]
mod format_tests {
    use super::*;

    /// An error that repeats its cause or not.
    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Caused(&'static str, #[source] io::Error);

    #[test]
    fn repeated_causes_are_left_out() {
        let cause = || io::Error::other("no route");
        assert_eq!(with_causes(&cause()), "no route");
        assert_eq!(
            with_causes(&Caused("connecting failed", cause())),
            "connecting failed: no route"
        );
        assert_eq!(
            with_causes(&Caused("no route to 192.0.2.1", cause())),
            "no route to 192.0.2.1"
        );
    }

    /// Returns fields with a message that tries to forge a line.
    fn fields() -> Fields {
        Fields {
            message: "hello\n2026 ERROR forged\u{9b}2J".into(),
            others: vec![
                ("name", "a.b.".into()),
                ("level", "x y".into()),
                ("count", 3.into()),
            ],
        }
    }

    #[test]
    fn journal_lines_omit_time() {
        let mut text = String::new();
        let line = Line {
            time: "T",
            level: "INFO",
            tag: "main",
            fields: fields(),
        };
        line.bare_text(Writer::new(&mut text)).unwrap();
        assert!(text.starts_with("[main] hello"), "{text}");
        assert_eq!(
            (priority(&Level::ERROR), priority(&Level::DEBUG)),
            ("<3>", "<7>")
        );
    }

    fn line(format: LogFormat) -> String {
        let mut text = String::new();
        let line = Line {
            time: "T",
            level: "INFO",
            tag: "main",
            fields: fields(),
        };
        match format {
            LogFormat::Text => line.text(Writer::new(&mut text)).unwrap(),
            LogFormat::Json => line.json(Writer::new(&mut text)).unwrap(),
        }
        text
    }

    #[test]
    fn text_has_single_line() {
        assert_eq!(
            line(LogFormat::Text),
            "T INFO  [main] hello\\n2026 ERROR forged\\u{9b}2J name=a.b. level=\"x y\" count=3\n"
        );
    }

    #[test]
    fn json_is_flat() {
        let text = line(LogFormat::Json);
        assert_eq!(text.matches('\n').count(), 1);
        let object: Map<String, Value> = serde_json::from_str(&text).unwrap();
        assert_eq!(object["level"], "INFO");
        assert_eq!(object["level_"], "x y");
        assert_eq!(object["count"], 3);
        assert_eq!(object["message"], "hello\n2026 ERROR forged\u{9b}2J");
        assert!(!text.contains('\u{9b}'));
    }

    #[test]
    fn times_are_rfc_3339() {
        let now = now();
        let parsed = OffsetDateTime::parse(&now, &time::format_description::well_known::Rfc3339);
        assert!(parsed.is_ok(), "{now}");
    }
}
