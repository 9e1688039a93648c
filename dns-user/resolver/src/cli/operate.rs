//! The commands that talk to a running server, or need none at all.
//!
//! Exit codes, the same for all of them:
//!
//! | Code | Means |
//! |---|---|
//! | 0 | it went well, and the answer is good |
//! | 1 | the server answered, and the answer is bad: not ready, no such name, a reload that failed in part |
//! | 2 | the call cannot be understood |
//! | 3 | the server cannot be reached, or does not trust us |

mod address;
mod client;
mod connection;
pub(super) mod consul_aliases;
mod detach;
mod explain;
mod lists;
mod log;
mod shell;
mod status;
mod table;
mod tap;
mod top;

use std::process::ExitCode;

use clap::Subcommand;
use dns_core::terminal;

/// The answer is bad.
const BAD_ANSWER: u8 = 1;

/// The server cannot be reached.
const UNREACHABLE: u8 = 3;

/// The commands.
#[derive(Debug, Subcommand)]
pub(super) enum Operate {
    /// Is it healthy: version, records, fast path, recursors, last reload, newest problems
    Status(status::Status),
    /// List instances, all or those behind a name
    Instances(lists::Instances),
    /// List the links of this VM's jobs with their health
    LocalGroups(lists::LocalGroups),
    /// Why does a name resolve to this: step by step, and which path answers
    Resolve(explain::Resolve),
    /// Build the name to ask for: a group, availability zones, health, as links do
    Address(address::Address),
    /// Show live queries, of the fast path and of userspace
    Tap(tap::TapArgs),
    /// Show what is hot and who asks so much: rates, names, clients, misses, interfaces
    Top(top::Top),
    /// Empty the cache of forwarded answers
    Flush(log::Flush),
    /// Read all files anew, as SIGHUP does
    Reload(log::Reload),
    /// Show or change levels of the log
    Log(log::Log),
    /// Take the fast path off all interfaces, also after a server that is dead
    Detach(detach::Detach),
    /// Print completions for a shell
    Completions(shell::Completions),
    /// Print the manual page
    Man(shell::Man),
}

/// Why a command did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
enum Problem {
    /// The answer is bad.
    #[error("{0}")]
    BadAnswer(String),
    /// The server cannot be asked.
    #[error("{0}")]
    Unreachable(String),
    /// Whoever reads our output has gone away: no reason to complain.
    #[error("nobody reads the output")]
    OutputClosed,
}

impl Operate {
    /// Does it. `command` is all of the command line, for completions and the manual.
    pub(super) fn run(self, command: clap::Command) -> ExitCode {
        let result = match self {
            Self::Status(status) => status.run(),
            Self::Instances(instances) => instances.run(),
            Self::LocalGroups(groups) => groups.run(),
            Self::Resolve(resolve) => resolve.run(),
            Self::Address(address) => address.run(),
            Self::Tap(tap) => tap.run(),
            Self::Top(top) => top.run(),
            Self::Flush(flush) => flush.run(),
            Self::Reload(reload) => reload.run(),
            Self::Log(log) => log.run(),
            Self::Detach(detach) => detach.run(),
            Self::Completions(completions) => completions.run(command),
            Self::Man(man) => man.run(command),
        };
        exit_code(result)
    }
}

/// Reports the problem of a command, if there is one.
fn exit_code(result: Result<(), Problem>) -> ExitCode {
    let (problem, code) = match result {
        Ok(()) | Err(Problem::OutputClosed) => return ExitCode::SUCCESS,
        Err(problem @ Problem::BadAnswer(_)) => (problem, BAD_ANSWER),
        Err(problem @ Problem::Unreachable(_)) => (problem, UNREACHABLE),
    };
    super::complain(&problem);
    ExitCode::from(code)
}

/// Writes text to standard output; what a terminal would act on is escaped.
fn print(text: &str) -> Result<(), Problem> {
    write(&terminal::lines(text))
}

/// Writes JSON to standard output, escaped by its own means.
fn print_json(text: &str) -> Result<(), Problem> {
    write(&terminal::json(text))
}

fn write(text: &str) -> Result<(), Problem> {
    use std::io::Write;
    let mut output = std::io::stdout().lock();
    output.write_all(text.as_bytes()).and_then(|()| output.flush()).map_err(|_| Problem::OutputClosed)
}
