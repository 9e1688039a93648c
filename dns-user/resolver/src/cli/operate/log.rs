//! The commands that modify a running server: `log`, `reload`, `flush`.

use bytes::Bytes;
use clap::Args;
use serde_json::Value;

use super::{
    Problem, cache,
    client::{Client, wait_for},
    connection::Connection,
    print, print_json,
    table::{self, Table},
};
use crate::ops::api::{CacheFlush, DEFAULT_LEVEL, LEVELS, LogChange, Reloaded};
use dns_kit::logs::{parse_level, tags};

#[derive(Debug, Args)]
pub(in crate::cli) struct Log {
    /// Where the server is.
    #[command(flatten)]
    connection: Connection,
    /// New level: debug, info, warn, error or none; default: return the tag to the general level, or the
    /// general level to the configured one
    #[arg(long, value_parser = level)]
    level: Option<String>,
    /// Tag to set the level of; by default, the general level
    #[arg(long, requires = "level", value_parser = tag)]
    tag: Option<String>,
    /// Maximum request lines per second (tag RequestLoggerHandler at debug)
    #[arg(long, value_name = "LINES")]
    requests_per_second: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Log {
    /// Applies the given changes and prints the resulting levels.
    pub(super) fn run(self) -> Result<(), Problem> {
        let Self { connection, level, tag, requests_per_second, json } = self;
        let change = LogChange { level, tag, requests_per_second };
        let shown = wait_for(async {
            let client = Client::new(&connection).await?;
            if change != LogChange::default() {
                let body = serde_json::to_vec(&change).unwrap_or_default();
                client.post("/log", Bytes::from(body)).await?.good()?;
            }
            client.get("/log").await?.good()?.json::<Value>()
        })?;
        if json {
            return print_json(&format!("{shown}\n"));
        }
        let levels = &shown["levels"];
        let mut text = format!("level: {}\n", table::plain(&levels["level"]));
        text.push_str(&format!("request lines a second: {}\n", table::plain(&levels["requests_per_second"])));
        let mut tags = Table::new(&["TAG", "LEVEL", "ABOUT"]);
        for tag in shown["known_tags"].as_array().into_iter().flatten() {
            let name = table::plain(&tag["name"]);
            let own = levels["tags"].as_object().and_then(|own| {
                own.iter()
                    .find(|(key, _)| key.eq_ignore_ascii_case(&name))
                    .map(|(_, level)| table::plain(level))
            });
            tags.line([name, own.unwrap_or_else(|| "-".to_owned()), table::plain(&tag["about"])]);
        }
        text.push_str(&tags.text(0));
        print(&text)
    }
}

/// Accepts the word for a level.
fn level(text: &str) -> Result<String, &'static str> {
    let is_known = text.eq_ignore_ascii_case(DEFAULT_LEVEL) || parse_level(text).is_some();
    if is_known { Ok(text.to_owned()) } else { Err(LEVELS) }
}

/// Accepts the name of a tag in any letter case.
fn tag(text: &str) -> Result<String, String> {
    let known = || format!("the tags are {}", tags::names().collect::<Vec<_>>().join(", "));
    tags::spelt(text).map(str::to_owned).ok_or_else(known)
}

#[derive(Debug, Args)]
pub(in crate::cli) struct Reload {
    /// Where the server is.
    #[command(flatten)]
    connection: Connection,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Reload {
    /// Reloads every file; an unusable file is a negative result.
    pub(super) fn run(self) -> Result<(), Problem> {
        let Self { connection, json } = self;
        let answer = wait_for(async { Client::new(&connection).await?.post("/reload", Bytes::new()).await })?;
        let Ok(Reloaded { done, failed }) = answer.json::<Reloaded>() else {
            return answer.good().map(drop);
        };
        if json {
            print_json(&(answer.text() + "\n"))?;
        } else {
            print(&done.iter().map(|part| format!("ok      {part}\n")).collect::<String>())?;
            print(&failed.iter().map(|part| format!("failed  {part}\n")).collect::<String>())?;
        }
        match failed.len() {
            0 => Ok(()),
            count => Err(Problem::BadAnswer(format!(
                "{count} part(s) could not be used; the last good state stays in use"
            ))),
        }
    }
}

#[derive(Debug, Args)]
pub(in crate::cli) struct Flush {
    /// Where the server is.
    #[command(flatten)]
    connection: Connection,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Flush {
    /// Flushes the cache of forwarded answers.
    pub(super) fn run(self) -> Result<(), Problem> {
        let Self { connection, json } = self;
        cache::flush(&connection, &CacheFlush { all: true, ..CacheFlush::default() }, json)
    }
}
