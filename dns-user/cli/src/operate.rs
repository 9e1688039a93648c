//! Commands that query or change a running server, and commands that need none.
//!
//! They share these exit codes:
//!
//! | Code | Meaning |
//! |---|---|
//! | 0 | success with a positive result |
//! | 1 | the server answered with a negative result: not ready, no such name, a partially failed reload |
//! | 2 | invalid arguments |
//! | 3 | the server is unreachable or rejects the client |

mod address;
mod cache;
mod client;
mod status;
mod table;
mod tap;
mod top;
mod waiting;

use std::{
    borrow::Cow,
    io::{self, Write as _},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
};

use bytes::Bytes;
use clap::{Args, Subcommand};
use serde_json::Value;

pub(super) use self::client::{SERVER_NAME, client_files, connect_tls, usual_config};
use self::{
    client::{Client, Connection, escaped, get, wait_for},
    tap::query_type,
};
use super::manual;
use dns_attacher::{Detached, FolderState, detach_all};
use dns_command_line::{Completions, Man, table::Table};
use dns_core::terminal;
use dns_kit::logs::{parse_level, tags};
use dns_resolver::ops::{
    api::{CacheFlush, DEFAULT_LEVEL, Group, InstanceLine, LEVELS, LogChange},
    service_status::Reloaded,
};

/// Exit code for a negative result.
const BAD_ANSWER: u8 = 1;

/// Exit code for an unreachable server.
const UNREACHABLE: u8 = 3;

#[derive(Debug, Subcommand)]
pub(super) enum Operate {
    /// Show the health of the server: version, records, fast path, recursors, last reload, newest problems
    Status(WholeServer),
    /// List all instances, or the instances behind a name
    Instances(Instances),
    /// List the links of this VM's jobs with their health
    LocalGroups(LocalGroups),
    /// Explain step by step how a name resolves, and which path answers
    Resolve(Resolve),
    /// Build the DNS name of an instance group, as BOSH links do
    Address(address::Address),
    /// Show live queries of the fast path and of userspace
    Tap(tap::TapArgs),
    /// Show the busiest names and clients, rates, misses and interfaces
    Top(top::Top),
    /// List, look up and flush cached answers of recursors and handlers
    Cache(cache::Cache),
    /// Empty all caches of forwarded answers, as `cache flush all` does
    Flush(WholeServer),
    /// Reload all files, as SIGHUP does
    Reload(WholeServer),
    /// Show or change log levels
    Log(Log),
    /// Detach the fast path from all interfaces, even if the server died
    Detach(Detach),
    /// Print completions for a shell
    Completions(Completions),
    /// Print the manual page
    Man(Man),
}

/// Reason a command failed.
#[derive(Debug, thiserror::Error)]
enum Problem {
    /// The server gave a negative result.
    #[error("{0}")]
    BadAnswer(String),
    /// The server is unreachable or rejects the client.
    #[error("{0}")]
    Unreachable(String),
    /// The reader of our output has exited; not reported.
    #[error("output closed")]
    OutputClosed,
    /// Standard output cannot be written, for example because a disk is full.
    #[error("cannot write to standard output: {0}")]
    Output(io::Error),
}

impl Operate {
    /// Runs the command. `command` is the complete command line, for completions and the manual
    /// page.
    pub(super) fn run(self, command: clap::Command) -> ExitCode {
        let result = match self {
            Self::Status(server) => status::run(server),
            Self::Instances(instances) => instances.run(),
            Self::LocalGroups(groups) => groups.run(),
            Self::Resolve(resolve) => resolve.run(),
            Self::Address(address) => address.run(),
            Self::Tap(tap) => tap.run(),
            Self::Top(top) => top.run(),
            Self::Cache(cache) => cache.run(),
            Self::Flush(server) => server.flush(),
            Self::Reload(server) => server.reload(),
            Self::Log(log) => log.run(),
            Self::Detach(detach) => detach.run(),
            Self::Completions(completions) => write(&completions.text(command)),
            Self::Man(man) => manual(man, command),
        };
        exit_code(result)
    }
}

/// Returns the addresses on which the running server listens that a configuration's control socket or port
/// leads to; empty without one.
pub(super) fn served_addresses(config: &Path) -> Vec<SocketAddr> {
    let mut addresses = Vec::new();
    if let Ok(status) = wait_for(client::status_of(config)) {
        for text in status.listen {
            addresses.extend(text.parse::<SocketAddr>());
        }
    }
    addresses
}

fn exit_code(result: Result<(), Problem>) -> ExitCode {
    let (problem, code) = match result {
        // `status | head -1` has had what it wanted.
        Ok(()) | Err(Problem::OutputClosed) => return ExitCode::SUCCESS,
        Err(problem @ (Problem::BadAnswer(_) | Problem::Output(_))) => (problem, BAD_ANSWER),
        Err(problem @ Problem::Unreachable(_)) => (problem, UNREACHABLE),
    };
    super::complain(&problem);
    ExitCode::from(code)
}

/// Writes text to standard output, escaping terminal control characters.
fn print(text: &str) -> Result<(), Problem> {
    write(&terminal::lines(text))
}

/// Writes JSON to standard output; JSON escapes control characters itself.
fn print_json(text: &str) -> Result<(), Problem> {
    write(&terminal::json(text))
}

fn write(text: &str) -> Result<(), Problem> {
    let mut output = io::stdout().lock();
    output
        .write_all(text.as_bytes())
        // Rust flushes at lines only, and ignores errors at the end of the process: a full disk
        // would look like success.
        .and_then(|()| output.flush())
        .map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe => Problem::OutputClosed,
            _ => Problem::Output(error),
        })
}

/// Prints the main page of the manual, or writes all pages.
fn manual(man: Man, command: clap::Command) -> Result<(), Problem> {
    let folder = man.folder();
    let page = manual::write(command, folder).map_err(|error| {
        let folder = folder.map(|folder| format!("{}: ", folder.display()));
        Problem::BadAnswer(format!("{}{error}", folder.unwrap_or_default()))
    })?;
    print(&String::from_utf8_lossy(&page))
}

//----------- Instances ---------------------------------------------------------

#[derive(Debug, Args)]
pub(super) struct Instances {
    #[command(flatten)]
    connection: Connection,
    /// Only the instances behind this name, after the health filter
    #[arg(long, value_name = "NAME")]
    address: Option<String>,
    /// Print JSON lines, as the API returns them
    #[arg(long)]
    json: bool,
}

impl Instances {
    /// Lists the instances; an unknown name is a negative result.
    fn run(self) -> Result<(), Problem> {
        let Self {
            connection,
            address,
            json,
        } = self;
        let path = match address {
            Some(name) => format!("/instances?address={}", escaped(&name)),
            None => "/instances".to_owned(),
        };
        let answer = get(&connection, &path)?;
        if json {
            return print_json(&String::from_utf8_lossy(&answer.body));
        }
        let mut table = Table::new([
            "ID",
            "GROUP",
            "NETWORK",
            "DEPLOYMENT",
            "IP",
            "DOMAIN",
            "AZ",
            "INDEX",
            "HEALTH",
        ]);
        for line in answer.json_lines::<InstanceLine<'static>>()? {
            let InstanceLine {
                id,
                group,
                network,
                deployment,
                ip,
                domain,
                az,
                index,
                health_state,
            } = line;
            let texts = [
                id,
                group,
                network,
                deployment,
                ip.into(),
                domain,
                az,
                index.into(),
                health_state,
            ];
            table.line(texts.map(Cow::into_owned));
        }
        print(&table.text(0))
    }
}

#[derive(Debug, Args)]
pub(super) struct LocalGroups {
    #[command(flatten)]
    connection: Connection,
    /// Print JSON lines, as the API returns them
    #[arg(long)]
    json: bool,
}

impl LocalGroups {
    fn run(self) -> Result<(), Problem> {
        let Self { connection, json } = self;
        let answer = get(&connection, "/local-groups")?;
        if json {
            return print_json(&String::from_utf8_lossy(&answer.body));
        }
        let mut table = Table::new(["JOB", "LINK", "TYPE", "GROUP", "HEALTH"]);
        for Group {
            job_name,
            link_name,
            link_type,
            group_id,
            health_state,
        } in answer.json_lines::<Group>()?
        {
            let job_name = if job_name.is_empty() {
                "(this VM)".to_owned()
            } else {
                job_name
            };
            table.line([job_name, link_name, link_type, group_id, health_state]);
        }
        print(&table.text(0))
    }
}

//----------- Resolution --------------------------------------------------------

#[derive(Debug, Args)]
pub(super) struct Resolve {
    #[command(flatten)]
    connection: Connection,
    /// Name to look up; the final dot is optional
    name: String,
    /// Query type: A, AAAA, PTR, TYPE65, ... [default: both types of addresses]
    #[arg(long = "type", value_name = "TYPE", value_parser = query_type)]
    query_type: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Resolve {
    /// Prints the explanation; a nonexistent or malformed name is a negative result.
    fn run(self) -> Result<(), Problem> {
        let Self {
            connection,
            name,
            query_type,
            json,
        } = self;
        let mut path = format!("/resolve?name={}", escaped(&name));
        if let Some(query_type) = query_type {
            path += &format!("&type={}", escaped(&query_type));
        }
        let explanation: Value = get(&connection, &path)?.json()?;
        if json {
            print_json(&(serde_json::to_string_pretty(&explanation).unwrap_or_default() + "\n"))?;
        } else {
            let text = explanation["text"].as_str().unwrap_or_default();
            let answered_by = explanation["answered_by"].as_str().unwrap_or_default();
            print(&format!(
                "{}\nanswered by: {answered_by}\n",
                text.trim_end()
            ))?;
        }
        match explanation["rcode"].as_str() {
            Some(rcode) if rcode != "NOERROR" => {
                Err(Problem::BadAnswer(format!("{name}: {rcode}")))
            }
            _ => Ok(()),
        }
    }
}

//----------- Changes of a running server ---------------------------------------

#[derive(Debug, Args)]
pub(super) struct Log {
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
    fn run(self) -> Result<(), Problem> {
        let Self {
            connection,
            level,
            tag,
            requests_per_second,
            json,
        } = self;
        let change = LogChange {
            level,
            tag,
            requests_per_second,
        };
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
        text.push_str(&format!(
            "request lines a second: {}\n",
            table::plain(&levels["requests_per_second"])
        ));
        let mut tags = Table::new(["TAG", "LEVEL", "ABOUT"]);
        for tag in shown["known_tags"].as_array().into_iter().flatten() {
            let name = table::plain(&tag["name"]);
            let mut own = "-".to_owned();
            for (key, level) in levels["tags"].as_object().into_iter().flatten() {
                if key.eq_ignore_ascii_case(&name) {
                    own = table::plain(level);
                }
            }
            tags.line([name, own, table::plain(&tag["about"])]);
        }
        text.push_str(&tags.text(0));
        print(&text)
    }
}

fn level(text: &str) -> Result<String, &'static str> {
    let is_known = text.eq_ignore_ascii_case(DEFAULT_LEVEL) || parse_level(text).is_some();
    if is_known {
        Ok(text.to_owned())
    } else {
        Err(LEVELS)
    }
}

/// Accepts the name of a tag in any letter case.
fn tag(text: &str) -> Result<String, String> {
    match tags::spelt(text) {
        Some(tag) => Ok(tag.to_owned()),
        None => {
            let known: Vec<_> = tags::names().collect();
            Err(format!("the tags are {}", known.join(", ")))
        }
    }
}

// The options of a command that concerns the whole server.
#[derive(Debug, Args)]
pub(super) struct WholeServer {
    #[command(flatten)]
    connection: Connection,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl WholeServer {
    /// Empties all caches.
    fn flush(self) -> Result<(), Problem> {
        let Self { connection, json } = self;
        let everything = CacheFlush {
            all: true,
            ..CacheFlush::default()
        };
        cache::flush(&connection, &everything, json)
    }

    /// Reloads every file; an unusable file is a negative result.
    fn reload(self) -> Result<(), Problem> {
        let Self { connection, json } = self;
        let answer = wait_for(async {
            Client::new(&connection)
                .await?
                .post("/reload", Bytes::new())
                .await
        })?;
        // 409 carries the same document as 200; anything else has a reason in words.
        let Ok(Reloaded { done, failed }) = answer.json::<Reloaded>() else {
            return answer.good().map(drop);
        };
        if json {
            print_json(&(answer.text() + "\n"))?;
        } else {
            for part in &done {
                print(&format!("ok      {part}\n"))?;
            }
            for part in &failed {
                print(&format!("failed  {part}\n"))?;
            }
        }
        match failed.len() {
            0 => Ok(()),
            count => Err(Problem::BadAnswer(format!(
                "{count} part(s) could not be used; the last good state stays in use"
            ))),
        }
    }
}

//----------- Detach ------------------------------------------------------------

#[derive(Debug, Args)]
pub(super) struct Detach {
    /// config.json of the server whose fast path to detach
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Detach {
    /// Detaches the programs in the caller's network namespace.
    fn run(self) -> Result<(), Problem> {
        let loaded = dns_kit::files::load_config(&self.config)
            .map_err(|error| Problem::BadAnswer(error.to_string()))?;
        let config = loaded.config;
        // Not by the server, which may be dead or hung: that is when the command is needed.
        let detached = detach_all(&config.xdp, config.listen)
            .map_err(|error| Problem::BadAnswer(format!("cannot detach everything: {error}")))?;
        // The running server may have another configuration than the file.
        let is_served = match wait_for(client::status_of(&self.config)) {
            Ok(status) => status.fast_path.is_some(),
            Err(_) => false,
        };
        if detached.links + detached.filters == 0 && is_served {
            return Err(Problem::BadAnswer(
                "nothing was detached: the server is running and holds its programs without pins; they stay \
                 attached until it stops, or until xdp.enabled is false and it restarts"
                    .to_owned(),
            ));
        }
        if self.json {
            return print_json(&(serde_json::to_string(&detached).unwrap_or_default() + "\n"));
        }
        print(&sentence(&detached))?;
        if is_served {
            print(
                "the server is running and attaches its programs again; to keep them off, set xdp.enabled to \
                 false and restart it\n",
            )?;
        }
        Ok(())
    }
}

fn sentence(detached: &Detached) -> String {
    let Detached {
        links,
        filters,
        folder,
        folder_state,
    } = detached;
    let folder = folder.display();
    let programs = match (links, filters) {
        (0, 0) => "nothing was attached".to_owned(),
        _ => format!("detached {links} links and {filters} filters"),
    };
    match folder_state {
        FolderState::Absent => format!("{programs}; there are no pins ({folder})\n"),
        FolderState::Removed => format!("{programs}; removed {folder}\n"),
        FolderState::Kept => {
            format!("{programs}; {folder} stays: it holds entries that this version does not pin\n")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentence_states_each_outcome() {
        let say = |links, folder_state| {
            sentence(&Detached {
                links,
                filters: 0,
                folder: PathBuf::from("/pins"),
                folder_state,
            })
        };
        assert_eq!(
            say(0, FolderState::Absent),
            "nothing was attached; there are no pins (/pins)\n"
        );
        assert_eq!(
            say(2, FolderState::Removed),
            "detached 2 links and 0 filters; removed /pins\n"
        );
        assert_eq!(
            say(0, FolderState::Kept),
            "nothing was attached; /pins stays: it holds entries that this version does not pin\n"
        );
    }
}
