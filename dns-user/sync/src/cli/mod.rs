//! The command line. Exit codes: 0 success; 1 failure, or an agent lags or disagrees; 2 invalid usage.

mod address;
mod instance;
mod status;

use std::{
    io::{self, IsTerminal},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::Context;
use clap::{CommandFactory, Parser, Subcommand};
use dns_kit::{
    command_line,
    files::atomic::{self, Attributes},
};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::{
    agent, bus,
    distributor::{self, PublishOptions, registry::Count, source::InventoryOptions, state::Folder},
    http::TlsFiles,
};

/// Distribute records to a fleet by the BOSH director's protocol
#[derive(Debug, Parser)]
#[command(name = "bosh-dns-sync", version, arg_required_else_help = true)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Distribute the records of an inventory to the fleet, or write them to a local file
    Publish(Box<PublishOptions>),
    /// Receive records on a VM
    Agent(Box<agent::AgentOptions>),
    /// Add, remove or move an instance, in the state folder or through the publisher's API
    #[command(subcommand)]
    Instance(instance::Instance),
    /// Show each agent's version and lag, and list silent and disagreeing agents
    Status(status::Status),
    /// Print the name of a link or an instance group
    Address(address::Address),
    /// Print the name of a link for a certificate
    San(address::San),
    /// Print the manual page, or write all pages to a folder
    Man(command_line::Man),
    /// Print completions for a shell
    Completions(command_line::Completions),
    /// Confirm that the inventory may remove this many instances at once
    ConfirmRemovals(ConfirmRemovals),
    /// Print the configuration of nats-server, with a director's permissions
    NatsConfig(NatsConfig),
}

#[derive(Debug, clap::Args)]
struct ConfirmRemovals {
    /// Number of instances, as logged by the publisher
    instances: usize,
    /// The publisher's state folder on this machine
    #[arg(long, value_name = "FOLDER")]
    state: PathBuf,
}

impl ConfirmRemovals {
    fn run(self) -> anyhow::Result<()> {
        Ok(Folder::existing(&self.state)?.write(distributor::state_writer::CONFIRMED, &self.instances)?)
    }
}

#[derive(Debug, clap::Args)]
struct NatsConfig {
    /// The inventory, for its agents.
    #[command(flatten)]
    source: InventoryOptions,
    /// State folder, to include changes made by command
    #[arg(long, value_name = "FOLDER")]
    state: Option<PathBuf>,
    /// Address and port of the NATS server
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:4222")]
    listen: String,
    /// The server's certificates.
    #[command(flatten)]
    tls: TlsFiles,
    /// Part of a certificate that identifies its user; dns-name scales to thousands of agents
    #[arg(long, value_enum, default_value_t)]
    users_by: bus::UsersBy,
    /// JetStream folder, for --blobstore nats:BUCKET
    #[arg(long, value_name = "FOLDER", requires = "bucket")]
    jetstream: Option<PathBuf>,
    /// JetStream bucket of the blobs
    #[arg(long, value_name = "BUCKET", requires = "jetstream")]
    bucket: Option<String>,
    /// Output file; default: standard output
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Parses the command line, runs the command and returns its exit code.
pub fn main() -> ExitCode {
    let CommandLine { command } = command_line::parse::<CommandLine>();
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    let filter = filter.unwrap_or_else(|_| "info,async_nats=warn".into());
    let colours = io::stderr().is_terminal();
    let bars = MultiProgress::new();
    let log = Log(bars.clone());
    let log = move || log.clone();
    tracing_subscriber::fmt().with_writer(log).with_ansi(colours).with_env_filter(filter).init();
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&error.into()),
    };
    let code = match runtime.block_on(command.run(&bars)) {
        Ok(code) => code,
        Err(error) => failed(&error),
    };
    // A call to a folder that hangs must not delay the exit.
    runtime.shutdown_background();
    code
}

fn failed(error: &anyhow::Error) -> ExitCode {
    command_line::failed("bosh-dns-sync", error)
}

impl Command {
    /// Runs the command; its progress bar is drawn with `bars`.
    async fn run(self, bars: &MultiProgress) -> anyhow::Result<ExitCode> {
        match self {
            Self::Publish(options) => publish(*options, bars).await,
            Self::Agent(options) => agent::run(*options).await.map(|()| ExitCode::SUCCESS),
            Self::Instance(instance) => instance.run().await.map(|()| ExitCode::SUCCESS),
            Self::Status(status) => status.run().await,
            Self::Address(address) => address.run().map(|()| ExitCode::SUCCESS),
            Self::San(san) => san.run().map(|()| ExitCode::SUCCESS),
            Self::ConfirmRemovals(confirm) => confirm.run().map(|()| ExitCode::SUCCESS),
            Self::Man(man) => man.run(CommandLine::command()).map(|()| ExitCode::SUCCESS),
            Self::Completions(completions) => {
                completions.run(CommandLine::command()).map(|()| ExitCode::SUCCESS)
            }
            Self::NatsConfig(config) => config.run().map(|()| ExitCode::SUCCESS),
        }
    }
}

/// Standard error for log lines; hides progress bars while writing one.
#[derive(Clone)]
struct Log(MultiProgress);

impl io::Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.suspend(|| io::stderr().write(line))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// `publish`, with a progress bar where standard error is a terminal.
async fn publish(options: PublishOptions, bars: &MultiProgress) -> anyhow::Result<ExitCode> {
    if options.watch || options.local.is_some() {
        return distributor::run(options, |_| {}).await.map(|_| ExitCode::SUCCESS);
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} agents, {elapsed} {msg}")?;
    let bar = bars.add(ProgressBar::new(0).with_style(style));
    let last = std::cell::Cell::new(Count::default());
    let all = distributor::run(options, |count| {
        last.set(count);
        bar.set_length(count.agents as u64);
        bar.set_position(count.synced as u64);
        bar.set_message(count.to_string());
    })
    .await?;
    // `finish` would show all agents as synced.
    bar.abandon();
    let count = last.get();
    let Count { agents, synced, .. } = count;
    println!("{synced} of {agents} agents have this version, {count}");
    Ok(if all { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl NatsConfig {
    fn run(self) -> anyhow::Result<()> {
        let Self { source, state, listen, tls, users_by, jetstream, bucket, output } = self;
        let folder = Folder::open(&state.unwrap_or_default());
        let inventory = source.load(&folder)?;
        let agents = inventory.instances.iter().filter_map(|instance| instance.agent.as_deref());
        let jetstream = jetstream.as_deref().zip(bucket.as_deref());
        let text = bus::nats_server_config(&listen, &tls, jetstream, users_by, agents);
        match output {
            Some(path) => {
                let permissions = Attributes { mode: 0o640, ..Attributes::PRIVATE };
                atomic::replace(&path, text.as_bytes(), permissions).map(drop).context("nats-config")
            }
            None => {
                print!("{text}");
                Ok(())
            }
        }
    }
}

#[cfg(test)]
#[path = "../../../resolver/src/cli/command_page.rs"]
mod command_page;

#[cfg(test)]
#[test]
fn command_reference_is_current() {
    let command = CommandLine::command();
    command_page::compare("sync-commands.md", &command_page::commands(command));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_consistent() {
        CommandLine::command().debug_assert();
        for words in [
            "publish --nodes n --state s --local f",
            "publish --nodes n --state s --nats tls://n --tls-ca a --tls-certificate b --tls-key c",
            "instance remove i --state s --inventory f",
            "instance move i 10.0.0.1 --api https://p --tls-ca a --tls-certificate b --tls-key c",
            "status --state s",
            "status --api https://p --tls-ca a --tls-certificate b --tls-key c",
        ] {
            let line = std::iter::once("bosh-dns-sync").chain(words.split(' '));
            assert!(CommandLine::try_parse_from(line).is_ok(), "{words}");
        }
        // Options that the packages' systemd units pass.
        for (command, environment) in [
            ("agent", include_str!("../../../../deploy/debian/sync-agent.env")),
            ("publish --watch --state s", include_str!("../../../../deploy/debian/sync-publisher.env")),
        ] {
            let options = environment.lines().find_map(|line| line.strip_prefix("OPTIONS=")).unwrap();
            let words = format!("bosh-dns-sync {command} {options}");
            assert!(CommandLine::try_parse_from(words.split(' ')).is_ok(), "{words}");
        }
        for words in ["publish --nodes n --state s", "status", "status --api https://p", "instance remove i"]
        {
            let line = std::iter::once("bosh-dns-sync").chain(words.split(' '));
            assert!(CommandLine::try_parse_from(line).is_err(), "{words}");
        }
    }
}

#[test]
fn metrics_reference_is_current() {
    let families = [distributor::metric_families(), agent::metric_families()].concat();
    let rows = families.iter().map(|family| {
        let labels =
            family.get_metric().first().map(|metric| metric.get_label().iter().map(|label| label.name()));
        let kind = format!("{:?}", family.get_field_type());
        (family.name(), kind, labels.into_iter().flatten().collect(), family.help())
    });
    let introduction = "# Metrics of bosh-dns-sync\n\nFamilies of the publisher and, with `agent` in the name, of the agents.";
    command_page::compare("sync-metrics.md", &command_page::metrics(introduction, rows));
}
