//! Logging: one line per event on standard output, as text or JSON, with RFC 3339 times, a general
//! level and levels for single tags.
//!
//! Logging never blocks: lines pass through a bounded queue to a separate thread, and are dropped and counted
//! if the reader of the output stalls (a full log pipe stops DNS in bosh-dns; observed).

pub mod requests;
pub mod tags;
mod writer;

use std::{
    collections::{BTreeMap, VecDeque},
    io::{self, Write as _},
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::anyhow;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tracing::{Event, Subscriber};
use tracing_subscriber::{
    Layer, Registry,
    filter::{LevelFilter, Targets},
    layer::{Context, SubscriberExt},
    reload,
    util::SubscriberInitExt,
};

pub use requests::Request;
pub use writer::{time_of, with_causes};

use self::writer::LineWriter;
use crate::rate::TokenBucket;
use dns_core::config::{LogLevel, LoggingConfig};

//----------- Logs -----------------------------------------------------------

/// A handle to the logs of this process; clones refer to the same state.
#[derive(Clone)]
pub struct Logs {
    shared: Arc<Shared>,
}

/// State shared by all handles.
struct Shared {
    filter: reload::Handle<Targets, Registry>,
    /// Current levels, from which the filter is built.
    levels: Mutex<Levels>,
    /// General level of the configuration.
    configured: Mutex<LogLevel>,
    /// Queue to the writing thread.
    writer: LineWriter,
    /// The latest warnings and errors.
    recent: Recent,
}

/// Format of log lines (`--log-format`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// `2026-01-02T03:04:05.678901Z INFO  [tag] message key=value`.
    #[default]
    Text,
    /// One flat JSON object a line: time, level, tag, message, then the fields.
    Json,
}

impl LogFormat {
    /// Returns the format's name on a command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
        }
    }
}

/// Prints an error of a program on standard error, where there is no log yet. Other machines may have written
/// parts of the text, so control characters are escaped. In the journal it has the priority of an error.
pub fn print_error(program: &str, text: &str) {
    let priority = if writer::is_journal(io::stderr()) {
        "<3>"
    } else {
        ""
    };
    let text = dns_core::terminal::lines(text);
    // Nothing can report a failure of this write.
    let _ = writeln!(io::stderr(), "{priority}{program}: {text}");
}

impl Logs {
    /// Sets up logging for this process to standard output. Unknown tags are reported through the
    /// new log, together with the known ones.
    pub fn init(config: &LoggingConfig, format: LogFormat) -> anyhow::Result<Self> {
        let writer = LineWriter::start(io::stdout())
            .map_err(|error| anyhow!("cannot start the thread that writes the log: {error}"))?;
        let levels = Levels::from_config(config);
        let (filter, handle) = reload::Layer::new(levels.filter());
        let output = tracing_subscriber::fmt::layer()
            .event_format(writer::Lines {
                format,
                journal: writer::is_journal(io::stdout()),
            })
            .with_ansi(false)
            .with_writer(writer.clone())
            .with_filter(filter);
        let recent = Recent::default();
        tracing_subscriber::registry()
            .with(output)
            .with(recent.clone().with_filter(LevelFilter::WARN))
            .try_init()
            .map_err(|_| anyhow!("logging is already set up in this process"))?;
        let configured = Mutex::new(config.level);
        let levels = Mutex::new(levels);
        let logs = Self {
            shared: Arc::new(Shared {
                filter: handle,
                levels,
                configured,
                writer,
                recent,
            }),
        };
        logs.warn_of_unknown_tags();
        Ok(logs)
    }

    /// Applies the levels of a new configuration; run-time changes are lost.
    pub fn apply(&self, config: &LoggingConfig) {
        *self.shared.configured.lock() = config.level;
        self.replace(|levels| *levels = Levels::from_config(config));
        self.warn_of_unknown_tags();
    }

    /// Sets the level of a tag, or the general level.
    pub fn set(&self, tag: Option<&str>, level: LogLevel) {
        self.replace(|levels| match tag {
            None => levels.general = level,
            Some(tag) => {
                levels.tags.insert(tag.to_owned(), level);
            }
        });
    }

    /// Removes the level of a tag, which then follows the general level, or returns the general level to the
    /// configured one.
    pub fn unset(&self, tag: Option<&str>) {
        let configured = *self.shared.configured.lock();
        self.replace(|levels| match tag {
            None => levels.general = configured,
            Some(tag) => {
                levels.tags.remove(tag);
            }
        });
    }

    /// Returns the current levels.
    pub fn levels(&self) -> Levels {
        self.shared.levels.lock().clone()
    }

    /// Returns the number of lines dropped because the reader stalled.
    pub fn dropped(&self) -> u64 {
        self.shared.writer.dropped()
    }

    /// Returns the latest warnings and errors regardless of the levels, oldest first.
    pub fn problems(&self) -> Vec<Problem> {
        self.shared.recent.0.lock().iter().cloned().collect()
    }

    /// Returns the levels in the form shown by `/status` and `/log`.
    pub fn status(&self) -> LoggingStatus {
        let Levels { general, tags } = self.levels();
        LoggingStatus {
            level: general.name().to_owned(),
            tags: tags
                .into_iter()
                .map(|(tag, level)| (tag, level.name().to_owned()))
                .collect(),
            requests_per_second: requests::limit(),
            lost: self.dropped(),
        }
    }

    /// Waits until all earlier lines are written, for at most one second.
    pub fn flush(&self) {
        self.shared.writer.flush(Duration::from_secs(1));
    }

    /// Changes the levels and replaces the filter.
    fn replace(&self, change: impl FnOnce(&mut Levels)) {
        let mut levels = self.shared.levels.lock();
        change(&mut levels);
        // Fails only without the subscriber, which stays until the process ends.
        let _ = self.shared.filter.reload(levels.filter());
    }

    fn warn_of_unknown_tags(&self) {
        let unknown: Vec<String> = self.levels().unknown_tags().map(str::to_owned).collect();
        if !unknown.is_empty() {
            tracing::warn!(
                tags = unknown.join(","),
                known = tags::names().collect::<Vec<_>>().join(","),
                "logging.tags names unknown tags; they are ignored"
            );
        }
    }
}

//----------- Levels ---------------------------------------------------------

/// The general level and the levels of single tags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Levels {
    /// `log_level`: level for tags without their own.
    pub general: LogLevel,
    /// `logging.tags`: levels by tag name.
    pub tags: BTreeMap<String, LogLevel>,
}

impl Levels {
    /// Creates the configured levels. If a tag occurs twice, its last level applies.
    pub fn from_config(config: &LoggingConfig) -> Self {
        Self {
            general: config.level,
            tags: config.tags.iter().cloned().collect(),
        }
    }

    /// Returns the level of a tag.
    pub fn of(&self, tag: &str) -> LogLevel {
        let own = self
            .tags
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(tag));
        own.map_or(self.general, |(_, level)| *level)
    }

    /// Returns the tags that cover no module.
    pub fn unknown_tags(&self) -> impl Iterator<Item = &str> {
        self.tags
            .keys()
            .map(String::as_str)
            .filter(|tag| tags::spelt(tag).is_none())
    }

    /// Returns the filter for these levels. They apply to this project's crates; other crates log
    /// at WARN at most.
    fn filter(&self) -> Targets {
        let general = level_filter(self.general);
        let libraries = level_filter(self.of(tags::LIBRARIES));
        let mut targets = Targets::new().with_default(libraries.min(LevelFilter::WARN));
        for ours in tags::our_crates() {
            targets = targets.with_target(ours, general);
        }
        // All tags, including those without a level: modules of one tag may be inside modules of another.
        for tag in tags::TAGS {
            for target in tag.targets {
                targets = targets.with_target(*target, level_filter(self.of(tag.name)));
            }
        }
        targets
    }
}

/// Converts a level to tracing's type.
fn level_filter(level: LogLevel) -> LevelFilter {
    match level {
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::None => LevelFilter::OFF,
    }
}

/// Parses a level as written in the configuration, or `WARNING`, in any letter case.
pub fn parse_level(text: &str) -> Option<LogLevel> {
    if text.eq_ignore_ascii_case("WARNING") {
        Some(LogLevel::Warn)
    } else {
        LogLevel::named(text)
    }
}

//----------- Recent -------------------------------------------------------
//
// The latest warnings and errors, kept for `/status` regardless of the levels.

/// Maximum number of lines kept.
const KEPT: usize = 20;

/// The kept lines, shared by all clones.
#[derive(Clone, Default)]
struct Recent(Arc<Mutex<VecDeque<Problem>>>);

impl<S: Subscriber> Layer<S> for Recent {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let problem = Problem {
            time: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs_f64(),
            level: metadata.level().to_string(),
            tag: tags::of_target(metadata.target()).to_owned(),
            text: writer::text_of(event),
        };
        let mut problems = self.0.lock();
        // A repetition only updates the time.
        if let Some(last) = problems.back_mut().filter(|last| last.text == problem.text) {
            last.time = problem.time;
            return;
        }
        if problems.len() == KEPT {
            problems.pop_front();
        }
        problems.push_back(problem);
    }
}

//----------- Status -------------------------------------------------------
//
// State of the log as shown by `/status` and `/log`.

/// A logged warning or error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// Time in seconds since 1970.
    pub time: f64,
    /// Level, either `WARN` or `ERROR`.
    pub level: String,
    /// Tag of the line.
    pub tag: String,
    /// Message and fields as text.
    pub text: String,
}

/// Levels and limits of the log.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct LoggingStatus {
    /// General level, `log_level` in the configuration.
    pub level: String,
    /// Tags with their own level.
    pub tags: BTreeMap<String, String>,
    /// Maximum number of request lines per second.
    pub requests_per_second: u32,
    /// Number of lines lost because the reader of the log stalled.
    pub lost: u64,
}

//----------- Rate limit -----------------------------------------------------

/// Burst size for lines of one kind.
const BURST: f64 = 10.0;

/// Sustained rate of lines of one kind per second.
const PER_SECOND: f64 = 1.0;

/// Minimum time between two lines of one kind about the same peer.
const PEER_PAUSE: Duration = Duration::from_secs(60);

/// Maximum number of peers remembered per kind.
const PEERS: usize = 256;

/// Rate limit for one kind of log line, usually a `static` next to the line.
///
/// A kind gets [`BURST`] lines and then [`PER_SECOND`]; each peer gets one line per [`PEER_PAUSE`].
#[derive(Debug)]
pub struct LineLimit(Mutex<LimitState>);

#[derive(Debug)]
struct LimitState {
    tokens: TokenBucket,
    /// Peers with a line within the last [`PEER_PAUSE`], oldest first.
    peers: VecDeque<(IpAddr, Instant)>,
    suppressed: u64,
}

impl LineLimit {
    /// Creates a limit with a full burst.
    #[expect(
        clippy::new_without_default,
        reason = "made in statics, which need a const fn"
    )]
    pub const fn new() -> Self {
        Self(Mutex::new(LimitState {
            tokens: TokenBucket::full(PER_SECOND, BURST),
            peers: VecDeque::new(),
            suppressed: 0,
        }))
    }

    /// Returns whether to log a line about `peer` now: `Some` with the number of lines suppressed before it.
    pub fn admit(&self, peer: IpAddr) -> Option<u64> {
        self.0.lock().admit(Some(peer), Instant::now())
    }

    /// Like [`Self::admit`], for a line about a single subject: one per [`PEER_PAUSE`].
    pub fn admit_per_minute(&self) -> Option<u64> {
        self.admit(IpAddr::V4(Ipv4Addr::UNSPECIFIED))
    }

    /// Like [`Self::admit`], for a line without a peer.
    pub fn admit_any(&self) -> Option<u64> {
        self.0.lock().admit(None, Instant::now())
    }
}

impl LimitState {
    fn admit(&mut self, peer: Option<IpAddr>, now: Instant) -> Option<u64> {
        while self
            .peers
            .front()
            .is_some_and(|(_, at)| now.saturating_duration_since(*at) >= PEER_PAUSE)
        {
            self.peers.pop_front();
        }
        let is_known = peer.is_some_and(|peer| self.peers.iter().any(|(known, _)| *known == peer));
        if is_known || !self.tokens.take(now) {
            self.suppressed += 1;
            return None;
        }
        if let Some(peer) = peer {
            if self.peers.len() >= PEERS {
                self.peers.pop_front();
            }
            self.peers.push_back((peer, now));
        }
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
pub(crate) use writer::tests::logged;

#[cfg(test)]
mod tests {
    use std::{fs, process};

    use tracing::Level;

    use super::{writer::tests::Shared as Output, *};
    use test_support::own_process;

    /// Builds levels with these tags.
    fn levels(general: LogLevel, tags: &[(&str, LogLevel)]) -> Levels {
        let tags = tags
            .iter()
            .map(|(tag, level)| ((*tag).to_owned(), *level))
            .collect();
        Levels { general, tags }
    }

    #[test]
    fn tag_level_overrides_general_level() {
        let filter = levels(LogLevel::Error, &[("ForwardHandler", LogLevel::Debug)]).filter();
        assert!(filter.would_enable("dns_upstream::pool", &Level::DEBUG));
        assert!(!filter.would_enable("dns_resolver::server", &Level::WARN));
        assert!(filter.would_enable("dns_resolver::server", &Level::ERROR));
    }

    #[test]
    fn enclosing_tag_spares_others() {
        let filter = levels(LogLevel::Info, &[("main", LogLevel::None)]).filter();
        assert!(!filter.would_enable("dns_resolver::daemon::event_loop", &Level::ERROR));
        assert!(filter.would_enable("dns_resolver::server", &Level::INFO));
    }

    #[test]
    fn tags_can_be_quieter() {
        let filter = levels(LogLevel::Debug, &[("RequestLoggerHandler", LogLevel::None)]).filter();
        assert!(filter.would_enable("dns_resolver::server", &Level::DEBUG));
        assert!(!filter.would_enable(requests::TARGET, &Level::ERROR));
    }

    #[test]
    fn other_crates_stay_at_warnings() {
        let filter = levels(LogLevel::Debug, &[]).filter();
        assert!(!filter.would_enable("hyper::proto", &Level::DEBUG));
        assert!(filter.would_enable("hyper::proto", &Level::WARN));
        let quiet = levels(LogLevel::None, &[]).filter();
        assert!(!quiet.would_enable("hyper::proto", &Level::ERROR));
    }

    #[test]
    fn unknown_tags_are_found() {
        let levels = levels(
            LogLevel::Info,
            &[("Nonsense", LogLevel::Debug), ("main", LogLevel::Debug)],
        );
        assert_eq!(levels.unknown_tags().collect::<Vec<_>>(), ["Nonsense"]);
    }

    #[test]
    fn levels_round_trip() {
        for level in [
            LogLevel::Debug,
            LogLevel::Info,
            LogLevel::Warn,
            LogLevel::Error,
            LogLevel::None,
        ] {
            assert_eq!(parse_level(&level.name().to_lowercase()), Some(level));
        }
        assert_eq!(parse_level("LOUD"), None);
    }

    /// Returns the number of lines admitted for `peers` peers in `seconds`, with a hundred attempts
    /// per second each.
    fn lines(peers: u32, seconds: u32) -> u64 {
        let limit = LineLimit::new();
        let mut state = limit.0.lock();
        let begun = Instant::now();
        let mut lines = 0;
        for round in 0..seconds * 100 {
            let now = begun + Duration::from_millis(10) * round;
            for peer in 0..peers {
                lines += u64::from(
                    state
                        .admit(Some(IpAddr::from(peer.to_be_bytes())), now)
                        .is_some(),
                );
            }
        }
        lines
    }

    #[test]
    fn peer_gets_line_per_minute() {
        assert_eq!(lines(1, 59), 1);
        assert_eq!(lines(1, 119), 2);
    }

    #[test]
    fn peers_share_the_kind_limit() {
        let lines = lines(500, 10);
        assert!(
            (BURST as u64..=BURST as u64 + 10).contains(&lines),
            "{lines}"
        );
    }

    #[test]
    fn burst_and_refill_are_exact() {
        let limit = LineLimit::new();
        let mut state = limit.0.lock();
        let begun = Instant::now();
        let mut admitted = |seconds| {
            let now = begun + Duration::from_secs(seconds);
            (0..20).filter(|_| state.admit(None, now).is_some()).count()
        };
        let counts = [0, 1, 3, 1000].map(&mut admitted);
        assert_eq!(counts, [10, 1, 2, 10]);
    }

    #[test]
    fn suppressed_lines_are_counted() {
        let limit = LineLimit::new();
        let peer = IpAddr::from([192, 0, 2, 1]);
        assert_eq!(limit.admit(peer), Some(0));
        assert_eq!(limit.admit(peer), None);
        assert_eq!(limit.admit(peer), None);
        assert_eq!(limit.admit(IpAddr::from([192, 0, 2, 2])), Some(2));
    }

    fn config(level: LogLevel, tags: &[(&str, LogLevel)]) -> LoggingConfig {
        let Levels { tags, .. } = levels(level, tags);
        LoggingConfig {
            level,
            tags: tags.into_iter().collect(),
        }
    }

    /// Sets up a log as `init` does, for the caller's thread only.
    fn logs(config: &LoggingConfig, output: &Output) -> (Logs, impl Subscriber + Send + Sync) {
        let writer = LineWriter::start(output.clone()).unwrap();
        let levels = Levels::from_config(config);
        let (filter, handle) = reload::Layer::new(levels.filter());
        let recent = Recent::default();
        let lines = tracing_subscriber::fmt::layer()
            .event_format(writer::Lines {
                format: LogFormat::Text,
                journal: true,
            })
            .with_ansi(false)
            .with_writer(writer.clone())
            .with_filter(filter);
        let subscriber = tracing_subscriber::registry()
            .with(lines)
            .with(recent.clone().with_filter(LevelFilter::WARN));
        let shared = Shared {
            filter: handle,
            levels: Mutex::new(levels),
            configured: Mutex::new(config.level),
            writer,
            recent,
        };
        let logs = Logs {
            shared: Arc::new(shared),
        };
        (logs, subscriber)
    }

    #[test]
    fn levels_change_during_use() {
        let output = Output::default();
        let configured = config(LogLevel::Warn, &[("Consul", LogLevel::Error)]);
        let (logs, subscriber) = logs(&configured, &output);
        tracing::subscriber::with_default(subscriber, || {
            let line = |text: &str| tracing::info!(target: "dns_consul", "{text}");
            line("hidden by the configuration");
            logs.set(None, LogLevel::Info);
            line("hidden by the level of the tag");
            logs.unset(Some("Consul"));
            line("general");
            logs.set(Some("Consul"), LogLevel::None);
            line("hidden by the new level");
            logs.set(Some("Consul"), LogLevel::Debug);
            line("own");
            assert_eq!(
                logs.levels(),
                levels(LogLevel::Info, &[("Consul", LogLevel::Debug)])
            );
            logs.unset(None);
            let LoggingStatus {
                level,
                tags,
                requests_per_second,
                lost,
            } = logs.status();
            assert_eq!(
                (level.as_str(), requests_per_second, lost),
                ("WARN", 100, 0)
            );
            assert_eq!(tags, [("Consul".to_owned(), "DEBUG".to_owned())].into());
            tracing::info!(target: "dns_core", "hidden again");
            logs.apply(&config(LogLevel::Debug, &[]));
            assert_eq!(logs.levels(), levels(LogLevel::Debug, &[]));
            line("applied");
            logs.unset(None);
            assert_eq!(
                logs.levels().general,
                LogLevel::Debug,
                "the new configuration's"
            );
        });
        logs.flush();
        assert_eq!(
            output.text(),
            "<6>[Consul] general\n<6>[Consul] own\n<6>[Consul] applied\n"
        );
    }

    #[test]
    fn unknown_tags_report_known_tags() {
        let output = Output::default();
        let (logs, subscriber) = logs(&config(LogLevel::Error, &[]), &output);
        tracing::subscriber::with_default(subscriber, || {
            logs.apply(&config(LogLevel::Warn, &[("API", LogLevel::Info)]));
            logs.apply(&config(LogLevel::Warn, &[("Nonsense", LogLevel::Info)]));
        });
        logs.flush();
        let text = output.text();
        let begin = "<4>[main] logging.tags names unknown tags; they are ignored tags=Nonsense known=main,RecordsRepo,";
        assert!(text.starts_with(begin), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
    }

    #[test]
    fn levels_never_hide_latest_problems() {
        let output = Output::default();
        let (logs, subscriber) = logs(&config(LogLevel::None, &[]), &output);
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(target: "dns_core", "no problem");
            for number in 0..22 {
                tracing::warn!(target: "dns_consul", number, "again");
            }
            // A repetition is one problem.
            for _ in 0..3 {
                tracing::error!(target: "hyper", "same");
            }
        });
        let problems = logs.problems();
        let mut expected: Vec<_> = (3..22)
            .map(|number| ("WARN", "Consul", format!("again number={number}")))
            .collect();
        expected.push(("ERROR", "libraries", "same".to_owned()));
        let found: Vec<_> = problems
            .iter()
            .map(|problem| {
                (
                    problem.level.as_str(),
                    problem.tag.as_str(),
                    problem.text.clone(),
                )
            })
            .collect();
        assert_eq!(found, expected);
        assert!(problems.iter().all(|problem| problem.time > 1.7e9));
        logs.flush();
        assert_eq!(output.text(), "");
    }

    #[test]
    fn lost_lines_are_in_the_status() {
        let output = Output::default();
        let (logs, _subscriber) = logs(&config(LogLevel::Info, &[]), &output);
        let stuck = output.0.lock();
        let mut writer = logs.shared.writer.clone();
        for _ in 0..8_192 + 100 {
            writer.write_all(b"line\n").unwrap();
        }
        // The thread may hold one line.
        assert!(logs.dropped() >= 99, "{}", logs.dropped());
        assert_eq!(logs.status().lost, logs.dropped());
        drop(stuck);
    }

    #[test]
    fn level_and_format_names_match_options() {
        for (text, level) in [
            ("WARNING", Some(LogLevel::Warn)),
            ("warning", Some(LogLevel::Warn)),
            ("warn", Some(LogLevel::Warn)),
            ("none", Some(LogLevel::None)),
            ("", None),
        ] {
            assert_eq!(parse_level(text), level, "{text}");
        }
        let names = [LogFormat::Text, LogFormat::Json].map(LogFormat::name);
        assert_eq!(names, ["text", "json"]);
    }

    #[test]
    fn subject_gets_a_line_per_minute() {
        let limit = LineLimit::new();
        let admitted = [(); 3].map(|()| limit.admit_per_minute());
        assert_eq!(admitted, [Some(0), None, None]);
        // Lines without a peer are not about it.
        let admitted = [(); 2].map(|()| limit.admit_any());
        assert_eq!(admitted, [Some(2), Some(0)]);
    }

    #[test]
    fn peers_are_remembered_a_minute() {
        let limit = LineLimit::new();
        let mut state = limit.0.lock();
        let begun = Instant::now();
        for (seconds, peer, expected) in [
            (0, 1, Some(0)),
            (0, 2, Some(0)),
            (1, 1, None),
            (59, 2, None),
            (60, 1, Some(2)),
            (60, 2, Some(0)),
            (119, 1, None),
        ] {
            let peer = IpAddr::from([192, 0, 2, peer]);
            let found = state.admit(Some(peer), begun + Duration::from_secs(seconds));
            assert_eq!(found, expected, "{peer} after {seconds} s");
        }
    }

    #[test]
    fn only_journal_errors_have_priority() {
        use std::os::unix::fs::MetadataExt as _;

        if own_process::is_here() {
            return print_error("the-program", "no \u{1b}[2J file\nhere");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("stderr");
        let file = fs::File::create(&path).unwrap();
        let found = file.metadata().unwrap();
        let line = "the-program: no \\u{1b}[2J file\nhere\n";
        for (inode, expected) in [
            (found.ino(), format!("<3>{line}")),
            // Of another file: of the process that started this one.
            (found.ino() + 1, line.to_owned()),
        ] {
            file.set_len(0).unwrap();
            let mut command =
                own_process::command(module_path!(), "only_journal_errors_have_priority");
            let status = command
                .env("JOURNAL_STREAM", format!("{}:{inode}", found.dev()))
                .stdout(process::Stdio::null())
                .stderr(fs::File::options().append(true).open(&path).unwrap())
                .status()
                .unwrap();
            assert!(status.success());
            assert_eq!(fs::read_to_string(&path).unwrap(), expected);
        }
    }
}
