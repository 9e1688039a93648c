//! The binary `bosh-dns-xdp`: the command line of the server and of its machine.
//!
//! * `run`, `health`, `attach` and `prepare-pins` are the programs of `dns-resolver` and `dns-health`.
//! * [`check`], [`defaults`], [`manual`]: a configuration checked; one to start from; help and manual pages.
//! * [`operate`]: commands for a running server.
//! * [`shadow`]: compares the server in use with this one.
//! * [`resolver`], [`system`]: makes the server the machine's resolver, by resolv.conf or systemd-resolved.
//! * [`try_out`]: serves an example.
//!
//! bosh-dns is called as `bosh-dns --config FILE` and parses its options with Go's `flag` package;
//! [`arguments`] translates such a call into `run --config FILE`.

mod check;
mod defaults;
mod manual;
mod operate;
#[cfg(test)]
mod reference_tests;
mod resolver;
mod shadow;
mod system;
mod try_out;

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};

use dns_health::server;
use dns_kit::logs::{LogFormat, print_error};
use dns_resolver::{
    daemon::{self, RunOptions},
    ops::version::VERSION_AND_COMMIT,
};

/// Exit code for invalid arguments, as in clap and bosh-dns.
const USAGE: u8 = 2;

/// The command line of `bosh-dns-xdp`.
#[derive(Debug, Parser)]
#[command(name = "bosh-dns-xdp", version = VERSION_AND_COMMIT)]
#[command(about = "DNS server for the VMs of a BOSH-managed fleet")]
#[command(after_help = "bosh-dns-xdp --config FILE is short for bosh-dns-xdp run --config FILE.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Commands of the server and of its machine.
#[derive(Debug, Subcommand)]
enum Command {
    /// Serve DNS until SIGTERM
    Run {
        /// config.json of bosh-dns
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// Format of log lines
        #[arg(long, value_enum, default_value_t)]
        log_format: LinesAs,
    },
    /// Check configuration, records, aliases and handlers, and print what would be served
    Check(check::CheckArguments),
    /// Run the health server, which answers the health checks of other machines, until SIGTERM
    Health {
        /// The health server's own configuration file (health_server_config.json of bosh-dns)
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// Format of log lines
        #[arg(long, value_enum, default_value_t)]
        log_format: LinesAs,
    },
    /// Compare the replies of the DNS server in use with those that this one would give, without changing anything
    Shadow(shadow::Shadow),
    /// Serve a small foundation, or your records, on a free local port until Ctrl-C
    Try(try_out::Try),
    /// Print a configuration to start from
    Config(defaults::PrintConfig),
    /// Wait until a name resolves
    Wait(resolver::Wait),
    /// Load and attach the BPF programs for an unprivileged server (xdp.attach_socket) until SIGTERM
    Attach {
        /// config.json of bosh-dns
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// Format of log lines
        #[arg(long, value_enum, default_value_t)]
        log_format: LinesAs,
        /// Serve the server that started this process, at standard input
        #[arg(long, hide = true)]
        parent: bool,
    },
    /// Create the pin folder (xdp.bpffs) for a service that does not start as root
    PreparePins {
        /// config.json of bosh-dns
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// User that the service runs as; becomes the folder's owner
        #[arg(long, value_name = "NAME")]
        user: String,
    },
    /// Use the server as this machine's resolver until SIGTERM
    Resolver(resolver::Resolver),
    /// Commands for a running server, and commands that need no server.
    #[command(flatten)]
    Operate(Box<operate::Operate>),
}

/// The values of `--log-format`.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum LinesAs {
    /// `2026-01-02T03:04:05.678901Z INFO  [tag] message key=value`.
    #[default]
    Text,
    /// One flat JSON object a line: time, level, tag, message, then the fields.
    Json,
}

impl From<LinesAs> for LogFormat {
    fn from(lines: LinesAs) -> Self {
        match lines {
            LinesAs::Text => Self::Text,
            LinesAs::Json => Self::Json,
        }
    }
}

/// Prints an error to standard error, escaping terminal control characters.
fn complain(problem: &dyn std::fmt::Display) {
    print_error("bosh-dns-xdp", &problem.to_string());
}

fn main() -> ExitCode {
    // First of all: glibc raises the threshold when the first large buffer is freed (mallopt(3)).
    dns_kit::memory::return_large_buffers();
    let given = own_form(env::args_os().collect());
    // clap would answer with the whole help; an init script's log needs the one sentence.
    if given.len() < 2 {
        eprintln!("bosh-dns-xdp: no configuration: run bosh-dns-xdp --config FILE (or --help)");
        return ExitCode::from(USAGE);
    }
    let (arguments, ignored) = arguments(given);
    let matches = manual::grouped(Cli::command()).try_get_matches_from(&arguments);
    let cli = match matches.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => {
            dns_command_line::print_parse_error(&error, arguments);
            return if error.use_stderr() {
                ExitCode::from(USAGE)
            } else {
                ExitCode::SUCCESS
            };
        }
    };
    // bosh-dns ignores them in silence; a misspelt option after one of them would never be noticed.
    if !ignored.is_empty() {
        complain(&format_args!("ignored: {}", ignored.join(" ")));
    }
    match cli.command {
        Command::Run { config, log_format } => daemon::run(
            &config,
            RunOptions {
                log_format: log_format.into(),
                ..RunOptions::default()
            },
        ),
        Command::Check(check) => check.run(),
        Command::Health { config, log_format } => server::run(&config, log_format.into()),
        Command::Shadow(shadow) => shadow.run(),
        Command::Try(try_out) => try_out.run(),
        Command::Config(config) => config.run(),
        Command::Wait(wait) => wait.run(),
        Command::Attach {
            config,
            log_format,
            parent,
        } => dns_attacher::attach(&config, log_format.into(), parent),
        Command::PreparePins { config, user } => dns_attacher::prepare_pins(&config, &user),
        Command::Resolver(resolver) => resolver.run(),
        Command::Operate(operate) => operate.run(Cli::command()),
    }
}

/// Translates a call in bosh-dns's syntax to ours; also returns the words that bosh-dns ignores.
///
/// Go's `flag` accepts `-config` for `--config` and stops at the first word that is not an option;
/// bosh-dns ignores the rest (observed).
fn arguments(given: Vec<OsString>) -> (Vec<OsString>, Vec<String>) {
    // Every other call begins with a command, which bosh-dns does not have.
    if !given.get(1).is_some_and(is_config) {
        return (given, Vec::new());
    }
    let mut given = given.into_iter();
    let mut ours: Vec<OsString> = given.next().into_iter().collect();
    ours.push("run".into());
    while let Some(word) = given.next() {
        if !word.to_string_lossy().starts_with('-') {
            let mut ignored = vec![word.to_string_lossy().into_owned()];
            for word in given {
                ignored.push(word.to_string_lossy().into_owned());
            }
            return (ours, ignored);
        }
        // Left to clap, which knows whether there is such an option.
        if !is_config(&word) {
            ours.push(word);
            continue;
        }
        let text = word.to_string_lossy();
        match text.split_once('=') {
            Some((_, value)) => ours.extend(["--config".into(), value.into()]),
            None => {
                ours.push("--config".into());
                ours.extend(given.next());
            }
        }
    }
    (ours, Vec::new())
}

fn is_config(word: &OsString) -> bool {
    let word = word.to_string_lossy();
    let name = word.split('=').next().unwrap_or_default();
    matches!(name, "-config" | "--config")
}

//----------- Names of the program ----------------------------------------------

/// Translates a call under the name of a program of the bosh-dns package, which other jobs and scripts call, or of
/// the health server.
///
/// | Called as | Runs |
/// |---|---|
/// | `bosh-dns-health FILE`, `bosh-dns-xdp-health FILE` | `health --config FILE` |
/// | `bosh-dns-wait ...` | `wait ...` |
/// | `bosh-dns-nameserverconfig ...` | `resolver --keep ...` |
/// | `bosh-dns-systemd-resolved-updater --config FILE` | `resolver --systemd-resolved --once --keep ...` |
/// | anything else | the command in its arguments |
fn own_form(given: Vec<OsString>) -> Vec<OsString> {
    let name = given
        .first()
        .and_then(|path| Path::new(path).file_name()?.to_str())
        .unwrap_or_default();
    let (command, options): (&[&str], _) = match name {
        "bosh-dns-health" | "bosh-dns-xdp-health" => {
            // Only a single word that is not an option; clap reports anything else.
            let is_file = given.len() == 2 && !given[1].to_string_lossy().starts_with('-');
            (
                if is_file {
                    &["health", "--config"]
                } else {
                    &["health"]
                },
                false,
            )
        }
        "bosh-dns-wait" => (&["wait"], true),
        // As in bosh-dns, nothing is restored when the process ends.
        "bosh-dns-nameserverconfig" => (&["resolver", "--keep"], true),
        "bosh-dns-systemd-resolved-updater" => (
            &["resolver", "--keep", "--systemd-resolved", "--once"],
            true,
        ),
        _ => return given,
    };
    let mut given = given.into_iter();
    let mut ours: Vec<OsString> = given.next().into_iter().collect();
    ours.extend(command.iter().map(OsString::from));
    ours.extend(given.map(|word| if options { two_dashes(word) } else { word }));
    ours
}

/// Accepts `-port` for `--port`, as Go's `flag` does.
fn two_dashes(word: OsString) -> OsString {
    match word.to_str() {
        Some(text) if text.len() > 2 && text.starts_with('-') && !text.starts_with("--") => {
            format!("-{text}").into()
        }
        _ => word,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls [`arguments`] with words.
    fn brought(words: &str) -> (String, String) {
        let given = std::iter::once("bosh-dns-xdp")
            .chain(words.split_whitespace())
            .map(OsString::from);
        let (ours, ignored) = arguments(given.collect());
        let ours: Vec<String> = ours
            .iter()
            .skip(1)
            .map(|word| word.to_string_lossy().into_owned())
            .collect();
        (ours.join(" "), ignored.join(" "))
    }

    #[test]
    fn bosh_dns_call_becomes_run() {
        for (words, ours, ignored) in [
            ("--config f", "run --config f", ""),
            ("-config f", "run --config f", ""),
            ("--config=f", "run --config f", ""),
            ("-config=f", "run --config f", ""),
            (
                "--config f extra --bogus",
                "run --config f",
                "extra --bogus",
            ),
            ("--config f --bogus", "run --config f --bogus", ""),
            ("check --config f", "check --config f", ""),
            ("--help", "--help", ""),
        ] {
            assert_eq!(
                brought(words),
                (ours.to_owned(), ignored.to_owned()),
                "{words}"
            );
        }
    }

    #[test]
    fn commands_pass_clap_checks() {
        Cli::command().debug_assert();
    }

    #[test]
    fn bosh_dns_names_are_commands() {
        for (given, expected) in [
            ("/x/bosh-dns --config f", "--config f"),
            ("bosh-dns-xdp status", "status"),
            ("/x/bosh-dns-health f.json", "health --config f.json"),
            ("bosh-dns-xdp-health --help", "health --help"),
            (
                "bosh-dns-wait -port 5 --checkDomain a.",
                "wait --port 5 --checkDomain a.",
            ),
            (
                "bosh-dns-nameserverconfig --bindAddress 1.1.1.1",
                "resolver --keep --bindAddress 1.1.1.1",
            ),
            (
                "bosh-dns-systemd-resolved-updater --config f",
                "resolver --keep --systemd-resolved --once --config f",
            ),
            ("cli instances", "instances"),
        ] {
            let words = own_form(given.split_whitespace().map(OsString::from).collect());
            let words: Vec<String> = words
                .into_iter()
                .skip(1)
                .map(|word| word.to_string_lossy().into_owned())
                .collect();
            assert_eq!(words.join(" "), expected, "{given}");
        }
    }
}
