//! The command line. Exit codes: 0 success; 1 failure or findings; 2 the call is not understood.

mod certificates;

use std::{
    io::{self, IsTerminal},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context;
use clap::{CommandFactory, Parser, Subcommand};

use crate::{
    descriptions::read_any,
    fleet::{
        RotateOptions,
        agent::{self, AgentOptions},
        issuer::{self, IssuerOptions},
        rotate_ca,
    },
    profile::Guid,
    run::{self, ControlCommand, Reply, RunOptions},
};

/// Certificates that identify instances and renew themselves
#[derive(Debug, Parser)]
#[command(name = "bosh-dns-identity", version, arg_required_else_help = true)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Maintain certificates and keys for a set of identities
    Run(Box<RunOptions>),
    /// Issue one certificate and key into a folder
    Issue(certificates::Issue),
    /// Check a CA, an identity folder, or the names of a certificate
    Check(certificates::Check),
    /// Create an identity in a running rotator
    Create(Describe),
    /// Change the description of an identity in a running rotator
    Update(Describe),
    /// Remove an identity and its files from a running rotator
    Destroy(Destroy),
    /// Show all identities of a running rotator; exit with code 1 if a renewal failed or a description has no identity
    Status(StatusOptions),
    /// Print the names of link providers for certificates
    San(certificates::San),
    /// Issue certificates to the agents of a fleet
    Issuer(Box<IssuerOptions>),
    /// Create a bootstrap token for one instance
    Token(certificates::Token),
    /// Confirm that many identities or instances may disappear at once
    ConfirmRemovals(certificates::ConfirmRemovals),
    /// Renew this machine's certificates and keys through the issuer
    Agent(Box<AgentOptions>),
    /// Rotate the fleet's CA in three steps; each waits for all agents
    RotateCa(RotateOptions),
    /// Print the manual page
    Man(dns_command_line::Man),
    /// Print completions for a shell
    Completions(dns_command_line::Completions),
}

/// A socket and a description.
#[derive(Debug, clap::Args)]
struct Describe {
    /// Control socket of the rotator
    #[arg(long, value_name = "SOCKET")]
    control: PathBuf,
    /// JSON file that describes the container
    #[arg(value_name = "FILE")]
    description: PathBuf,
}

#[derive(Debug, clap::Args)]
struct Destroy {
    /// Control socket of the rotator
    #[arg(long, value_name = "SOCKET")]
    control: PathBuf,
    /// Id of the identity
    guid: String,
}

#[derive(Debug, clap::Args)]
struct StatusOptions {
    /// Control socket of the rotator
    #[arg(long, value_name = "SOCKET")]
    control: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Parses the command line, runs the command and returns its exit code.
pub fn main() -> ExitCode {
    let CommandLine { command } = dns_command_line::parse::<CommandLine>();
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    // A mistake in `RUST_LOG` must not stop certificates from being renewed.
    let filter = filter.unwrap_or_else(|_| "info".into());
    // The journal and files would keep the escape sequences.
    let colours = io::stderr().is_terminal();
    tracing_subscriber::fmt()
        // Standard output carries results that scripts read: tokens, names, JSON.
        .with_writer(io::stderr)
        .with_ansi(colours)
        .with_env_filter(filter)
        .init();
    command
        .run()
        .unwrap_or_else(|error| dns_command_line::failed("bosh-dns-identity", &error))
}

impl Command {
    fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Check(check) => return check.run(),
            Self::Status(status) => return status.run(),
            Self::San(san) => return san.run(),
            Self::Run(options) => block_on(run::run(*options))?,
            Self::Issue(issue) => issue.run()?,
            Self::Create(describe) => {
                describe.send(|container| ControlCommand::Create { container })?;
            }
            Self::Update(describe) => {
                describe.send(|container| ControlCommand::Update { container })?;
            }
            Self::Destroy(Destroy { control, guid }) => {
                let guid = Guid::try_from(guid)?;
                order(&control, &ControlCommand::Destroy { guid })?;
            }
            Self::Issuer(options) => block_on(issuer::run(*options))?,
            Self::Token(token) => token.run()?,
            Self::ConfirmRemovals(confirm) => confirm.run()?,
            Self::Agent(options) => block_on(agent::run(*options))?,
            Self::RotateCa(options) => block_on(rotate_ca(options))?,
            Self::Man(man) => man.run(CommandLine::command())?,
            Self::Completions(completions) => completions.run(CommandLine::command())?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Runs a future to its end on a new runtime.
fn block_on(future: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    // Not a runtime of one thread, because the metrics of the rotator use `block_in_place`.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let done = runtime.block_on(future);
    // A folder that hangs holds threads for good, which must not delay the end.
    runtime.shutdown_background();
    done
}

impl Describe {
    fn send(
        self,
        command: impl FnOnce(crate::profile::Container) -> ControlCommand,
    ) -> anyhow::Result<()> {
        let Self {
            control,
            description,
        } = self;
        let container =
            read_any(&description).with_context(|| description.display().to_string())?;
        order(&control, &command(container)).map(drop)
    }
}

/// Sends a command to a rotator; an error in the reply is an error.
fn order(control: &Path, command: &ControlCommand) -> anyhow::Result<Reply> {
    match run::send_command(control, command)? {
        Reply::Error(problem) => anyhow::bail!(problem),
        reply => Ok(reply),
    }
}

impl StatusOptions {
    fn run(self) -> anyhow::Result<ExitCode> {
        let Self { control, json } = self;
        let Reply::Status(status) = order(&control, &ControlCommand::Status)? else {
            anyhow::bail!("the rotator did not return its status")
        };
        let mut identities = status.identities.iter();
        let failing = identities.any(|identity| identity.failure.is_some());
        let text = if json {
            format!("{}\n", serde_json::to_string_pretty(&status)?)
        } else {
            table(&status)
        };
        dns_command_line::print(text.as_bytes())?;
        let well = !failing && status.authority.problem.is_none() && status.problems.is_empty();
        Ok(if well {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }
}

/// Formats a rotator's status as text.
fn table(status: &crate::rotator::RotatorStatus) -> String {
    use crate::{authority::date, certificate::moment, rotator::Problem};
    let authority = &status.authority;
    let mut text = format!(
        "CA {} ends {}\n",
        authority.file.display(),
        date(authority.not_after)
    );
    if let Some(problem) = &authority.problem {
        text += &format!("  new CA refused: {problem}\n");
    }
    text += &format!(
        "key pool {} of {}, {} renewals\n",
        status.pool_ready, status.pool_size, status.renewals
    );
    for Problem { path, message } in &status.problems {
        text += &format!("{}: no identity: {message}\n", path.display());
    }
    for identity in &status.identities {
        let ends = identity
            .not_after
            .map_or_else(|| "-".to_owned(), |end| date(moment(end)));
        text += &format!(
            "{}  ends {ends}  renews {}\n",
            identity.guid,
            date(identity.renews_at)
        );
        if let Some(failure) = &identity.failure {
            text += &format!(
                "  failed {} times, next attempt {}: {}\n",
                failure.attempts,
                date(failure.retry_at),
                failure.message
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use test_support::command_page;

    use super::*;

    #[test]
    fn command_reference_is_current() {
        let command = CommandLine::command();
        command_page::compare("identity-commands.md", &command_page::commands(command));
    }

    #[test]
    fn metrics_reference_is_current() {
        let families = crate::metrics::DECLARED
            .iter()
            .map(|(name, kind, labels, help)| (*name, (*kind).to_owned(), labels.to_vec(), *help));
        let introduction =
            "# Metrics of bosh-dns-identity\n\nFamilies of the rotator, the issuer and the agents.";
        command_page::compare(
            "identity-metrics.md",
            &command_page::metrics(introduction, families),
        );
    }

    #[test]
    fn command_line_is_consistent() {
        CommandLine::command().debug_assert();
        for (words, understood) in [
            ("run --ca a --ca-key k --folder f --containers c", true),
            (
                "run --ca a --ca-key k --folder f --control s --validity 1h --key-type p-256",
                true,
            ),
            ("run --ca a --ca-key k --folder f", false),
            (
                "run --ca a --ca-key k --folder f --control s --validity 59m",
                false,
            ),
            ("issue --ca a --ca-key k --container c --folder f", true),
            ("check --ca a", true),
            ("check --folder f", true),
            ("check --certificate c --records r", true),
            ("check", false),
            ("san --deployment d --instance-group g", true),
            ("san --manifest m", true),
            ("san --manual db.example.org", true),
            ("status --control s", true),
            ("issuer --state s --records r", true),
            ("issuer --state s --records r --ca a", false),
            ("token --state s --instance i", true),
            ("agent --issuer h:1 --instance i --folder f --trust a", true),
            ("rotate-ca --state s --ca a --ca-key k", true),
            ("rotate-ca --state s --back", true),
            ("rotate-ca --state s", false),
            ("confirm-removals 20 --control s", true),
            ("confirm-removals 20", false),
            (
                "run --ca a --ca-key k --folder f --control s --also-trust p --keep-old-ca 0h --backdate 10m",
                true,
            ),
        ] {
            let line = std::iter::once("bosh-dns-identity").chain(words.split(' '));
            assert_eq!(
                CommandLine::try_parse_from(line).is_ok(),
                understood,
                "{words}"
            );
        }
    }
}
