//! Logs: one line per event on standard output, as text or JSON, with RFC 3339
//! times, a level for everything and levels for single tags.
//!
//! A line never holds up whoever logs it: lines go through a bounded queue to
//! a thread of their own, and are counted and dropped when nobody reads the
//! other end (observed with the reference: a full log pipe stops its DNS).

mod format;
mod recent;
mod request;
pub mod requests;
mod status;
mod strangers;
pub mod tags;
mod writer;

use std::{collections::BTreeMap, io, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tracing_subscriber::{
    Layer, Registry,
    filter::{LevelFilter, Targets},
    layer::SubscriberExt,
    reload,
    util::SubscriberInitExt,
};

pub use self::{
    request::Request,
    status::{LoggingStatus, Problem},
    strangers::LineLimit,
};
use dns_core::config::{LogLevel, LoggingConfig};
use recent::Recent;
use writer::LineWriter;

//----------- Logs -----------------------------------------------------------

/// Handle on the logs of this process; clones share it.
#[derive(Clone)]
pub struct Logs {
    /// What the clones share.
    shared: Arc<Shared>,
}

/// What all handles have in common.
struct Shared {
    /// Replaces the filter of the subscriber.
    filter: reload::Handle<Targets, Registry>,
    /// The levels of the moment; the filter is made from them.
    levels: Mutex<Levels>,
    /// The queue to the writing thread.
    writer: LineWriter,
    /// The newest warnings and errors.
    recent: Recent,
}

/// How a line looks (`--log-format`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// `2026-01-02T03:04:05.678901Z INFO  [tag] message key=value`.
    #[default]
    Text,
    /// One flat JSON object a line: time, level, tag, message, then the fields.
    Json,
}

/// Why logging could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum LogsError {
    /// This process logs already.
    #[error("logging is already set up in this process")]
    AlreadySet,
    /// The thread that writes the lines could not be started.
    #[error("cannot start the thread that writes the log: {0}")]
    Thread(#[from] io::Error),
    /// The subscriber that the filter belonged to is gone.
    #[error("logging has been shut down")]
    Gone,
}

impl Logs {
    /// Sets up logging for this process, to standard output. Unknown tags are
    /// reported through the new log, with the tags that exist.
    pub fn init(config: &LoggingConfig, format: LogFormat) -> Result<Self, LogsError> {
        let writer = LineWriter::start(io::stdout())?;
        let levels = Levels::from_config(config);
        let (filter, handle) = reload::Layer::new(levels.filter());
        let output = tracing_subscriber::fmt::layer()
            .event_format(format::Lines { format, journal: format::stdout_is_journal() })
            .with_ansi(false)
            .with_writer(writer.clone())
            .with_filter(filter);
        let recent = Recent::default();
        tracing_subscriber::registry()
            .with(output)
            .with(recent.clone().with_filter(LevelFilter::WARN))
            .try_init()
            .map_err(|_| LogsError::AlreadySet)?;
        let logs =
            Self { shared: Arc::new(Shared { filter: handle, levels: Mutex::new(levels), writer, recent }) };
        logs.warn_of_unknown_tags();
        Ok(logs)
    }

    /// Levels as a new configuration has them; what was changed at run time is gone.
    pub fn apply(&self, config: &LoggingConfig) -> Result<(), LogsError> {
        self.replace(|levels| *levels = Levels::from_config(config))?;
        self.warn_of_unknown_tags();
        Ok(())
    }

    /// Changes the level of one tag, or the general one.
    pub fn set(&self, tag: Option<&str>, level: LogLevel) -> Result<(), LogsError> {
        self.replace(|levels| match tag {
            None => levels.general = level,
            Some(tag) => {
                levels.tags.insert(tag.to_owned(), level);
            }
        })
    }

    /// Lets a tag follow the general level again.
    pub fn unset(&self, tag: &str) -> Result<(), LogsError> {
        self.replace(|levels| {
            levels.tags.remove(tag);
        })
    }

    /// The levels of the moment.
    pub fn levels(&self) -> Levels {
        self.shared.levels.lock().clone()
    }

    /// Lines that were dropped because nobody read the log.
    pub fn dropped(&self) -> u64 {
        self.shared.writer.dropped()
    }

    /// The newest warnings and errors, oldest first, whatever the levels are.
    pub fn problems(&self) -> Vec<Problem> {
        self.shared.recent.problems()
    }

    /// The levels as `/status` and `/log` show them.
    pub fn status(&self) -> LoggingStatus {
        let Levels { general, tags } = self.levels();
        LoggingStatus {
            level: level_text(general).to_owned(),
            tags: tags.into_iter().map(|(tag, level)| (tag, level_text(level).to_owned())).collect(),
            requests_per_second: requests::limit(),
            lost: self.dropped(),
        }
    }

    /// Waits until what was logged so far has been written, a second at most.
    pub fn flush(&self) {
        self.shared.writer.flush(Duration::from_secs(1));
    }

    /// Changes the levels and puts a new filter in force.
    fn replace(&self, change: impl FnOnce(&mut Levels)) -> Result<(), LogsError> {
        let mut levels = self.shared.levels.lock();
        change(&mut levels);
        self.shared.filter.reload(levels.filter()).map_err(|_| LogsError::Gone)
    }

    /// One warning for the tags of the configuration that nothing here uses.
    fn warn_of_unknown_tags(&self) {
        let unknown: Vec<String> = self.levels().unknown_tags().map(str::to_owned).collect();
        if !unknown.is_empty() {
            tracing::warn!(
                tags = unknown.join(","),
                known = tags::names().collect::<Vec<_>>().join(","),
                "logging.tags names tags that do not exist; they are ignored"
            );
        }
    }
}

//----------- Levels ---------------------------------------------------------

/// The general level and the levels of single tags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Levels {
    /// `log_level`.
    pub general: LogLevel,
    /// `logging.tags`, by name.
    pub tags: BTreeMap<String, LogLevel>,
}

impl Levels {
    /// As configured. Of a tag that is named twice the last level counts.
    pub fn from_config(config: &LoggingConfig) -> Self {
        Self { general: config.level, tags: config.tags.iter().cloned().collect() }
    }

    /// Tags that nothing here uses.
    pub fn unknown_tags(&self) -> impl Iterator<Item = &str> {
        self.tags.keys().map(String::as_str).filter(|tag| tags::targets(tag).is_none())
    }

    /// The same as a filter: our own modules by these levels, other people's
    /// crates never below WARN.
    fn filter(&self) -> Targets {
        let general = level_filter(self.general);
        let mut targets = Targets::new().with_default(general.min(LevelFilter::WARN));
        for ours in tags::OUR_CRATES {
            targets = targets.with_target(*ours, general);
        }
        for (tag, level) in &self.tags {
            for target in tags::targets(tag).unwrap_or_default() {
                targets = targets.with_target(*target, level_filter(*level));
            }
        }
        targets
    }
}

/// Our level as tracing's.
fn level_filter(level: LogLevel) -> LevelFilter {
    match level {
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::None => LevelFilter::OFF,
    }
}

/// Reads a level as the configuration writes it, in any letter case.
pub fn parse_level(text: &str) -> Option<LogLevel> {
    Some(match text.to_ascii_uppercase().as_str() {
        "DEBUG" => LogLevel::Debug,
        "INFO" => LogLevel::Info,
        "WARN" | "WARNING" => LogLevel::Warn,
        "ERROR" => LogLevel::Error,
        "NONE" => LogLevel::None,
        _ => return None,
    })
}

/// A level as the configuration writes it.
pub fn level_text(level: LogLevel) -> &'static str {
    match level {
        LogLevel::Debug => "DEBUG",
        LogLevel::Info => "INFO",
        LogLevel::Warn => "WARN",
        LogLevel::Error => "ERROR",
        LogLevel::None => "NONE",
    }
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    /// Levels with these tags.
    fn levels(general: LogLevel, tags: &[(&str, LogLevel)]) -> Levels {
        let tags = tags.iter().map(|(tag, level)| ((*tag).to_owned(), *level)).collect();
        Levels { general, tags }
    }

    #[test]
    fn a_tag_overrides_the_general_level_for_its_modules_only() {
        let filter = levels(LogLevel::Error, &[("ForwardHandler", LogLevel::Debug)]).filter();
        assert!(filter.would_enable("dns_upstream::pool", &Level::DEBUG));
        assert!(!filter.would_enable("dns_resolver::server", &Level::WARN));
        assert!(filter.would_enable("dns_resolver::server", &Level::ERROR));
    }

    #[test]
    fn a_tag_can_be_quieter_than_the_rest() {
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
        let levels = levels(LogLevel::Info, &[("Nonsense", LogLevel::Debug), ("main", LogLevel::Debug)]);
        assert_eq!(levels.unknown_tags().collect::<Vec<_>>(), ["Nonsense"]);
    }

    #[test]
    fn levels_read_what_they_write() {
        for level in [LogLevel::Debug, LogLevel::Info, LogLevel::Warn, LogLevel::Error, LogLevel::None] {
            assert_eq!(parse_level(&level_text(level).to_lowercase()), Some(level));
        }
        assert_eq!(parse_level("LOUD"), None);
    }
}
