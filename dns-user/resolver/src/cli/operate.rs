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
mod connection;
mod detach;
mod explain;
mod lists;
mod log;
mod status;
mod table;
mod tap;
mod top;

use std::{
    io::{self, Write as _},
    net::SocketAddr,
    path::Path,
    process::ExitCode,
};

use clap::Subcommand;
use dns_core::terminal;

use super::{
    colour::{self, Colour},
    manual,
};
use dns_kit::command_line;

/// Exit code for a negative result.
const BAD_ANSWER: u8 = 1;

/// Exit code for an unreachable server.
const UNREACHABLE: u8 = 3;

#[derive(Debug, Subcommand)]
pub(super) enum Operate {
    /// Show the health of the server: version, records, fast path, recursors, last reload, newest problems
    Status(status::Status),
    /// List all instances, or the instances behind a name
    Instances(lists::Instances),
    /// List the links of this VM's jobs with their health
    LocalGroups(lists::LocalGroups),
    /// Explain step by step how a name resolves, and which path answers
    Resolve(explain::Resolve),
    /// Build the DNS name of an instance group, as BOSH links do
    Address(address::Address),
    /// Show live queries of the fast path and of userspace
    Tap(tap::TapArgs),
    /// Show the busiest names and clients, rates, misses and interfaces
    Top(top::Top),
    /// List, look up and flush cached answers of recursors and handlers
    Cache(cache::Cache),
    /// Empty all caches of forwarded answers, as `cache flush all` does
    Flush(log::Flush),
    /// Reload all files, as SIGHUP does
    Reload(log::Reload),
    /// Show or change log levels
    Log(log::Log),
    /// Detach the fast path from all interfaces, even if the server died
    Detach(detach::Detach),
    /// Print completions for a shell
    Completions(command_line::Completions),
    /// Print the manual page
    Man(command_line::Man),
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
            Self::Status(status) => status.run(),
            Self::Instances(instances) => instances.run(),
            Self::LocalGroups(groups) => groups.run(),
            Self::Resolve(resolve) => resolve.run(),
            Self::Address(address) => address.run(),
            Self::Tap(tap) => tap.run(),
            Self::Top(top) => top.run(),
            Self::Cache(cache) => cache.run(),
            Self::Flush(flush) => flush.run(),
            Self::Reload(reload) => reload.run(),
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
    let status = client::wait_for(client::status_of(config));
    status.map_or_else(|_| Vec::new(), |status| status.listen.iter().flat_map(|text| text.parse()).collect())
}

/// Prints the error, if any, and returns the exit code.
fn exit_code(result: Result<(), Problem>) -> ExitCode {
    let (problem, code) = match result {
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

/// Writes text like [`print()`], with the colours of its lines if the terminal has colours.
fn print_coloured(text: &str, colour: impl Fn(&str) -> Option<Colour>) -> Result<(), Problem> {
    let text = terminal::lines(text);
    if colour::wanted() { write(&colour::lines(&text, colour)) } else { write(&text) }
}

/// Writes JSON to standard output; JSON escapes control characters itself.
fn print_json(text: &str) -> Result<(), Problem> {
    write(&terminal::json(text))
}

fn write(text: &str) -> Result<(), Problem> {
    let mut output = io::stdout().lock();
    output.write_all(text.as_bytes()).and_then(|()| output.flush()).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => Problem::OutputClosed,
        _ => Problem::Output(error),
    })
}

/// Prints the main page of the manual, or writes all pages.
fn manual(man: command_line::Man, command: clap::Command) -> Result<(), Problem> {
    let folder = man.folder();
    let page = manual::write(command, folder).map_err(|error| {
        let folder = folder.map(|folder| format!("{}: ", folder.display()));
        Problem::BadAnswer(format!("{}{error}", folder.unwrap_or_default()))
    })?;
    print(&String::from_utf8_lossy(&page))
}
