//! The command line. Exit codes: 0 success; 1 failure, or an agent lags or disagrees; 2 invalid usage.

mod inventory;

use std::{
    io::{self, IsTerminal},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::Context;
use clap::{Args, CommandFactory, Parser, Subcommand};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use self::inventory::call;
use crate::{
    agent, bus,
    distributor::{
        self, PublishOptions,
        registry::{Agent, AgentRegistry, AgentState, Count},
        source::{CHANGES, InventoryOptions},
        state::{Folder, PublisherState},
    },
    http::{TlsFiles, TlsOptions},
    inventory::changes::Changes,
    now_ms,
};
use dns_command_line::{print, table::Table};
use dns_core::terminal;
use dns_kit::{
    files::atomic::{self, Attributes},
    foreign::printable,
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
    Instance(inventory::InstanceCommand),
    /// Show each agent's version and lag, and list silent and disagreeing agents
    Status(StatusOptions),
    /// Print the name of a link or an instance group
    Address(inventory::Address),
    /// Print the name of a link for a certificate
    San(inventory::San),
    /// Print the manual page, or write all pages to a folder
    Man(dns_command_line::Man),
    /// Print completions for a shell
    Completions(dns_command_line::Completions),
    /// Confirm that the inventory may remove this many instances at once
    ConfirmRemovals(ConfirmRemovals),
    /// Print the configuration of nats-server, with a director's permissions
    NatsConfig(NatsConfig),
}

#[derive(Debug, Args)]
struct ConfirmRemovals {
    /// Number of instances, as logged by the publisher
    instances: usize,
    /// The publisher's state folder on this machine
    #[arg(long, value_name = "FOLDER")]
    state: PathBuf,
}

impl ConfirmRemovals {
    fn run(self) -> anyhow::Result<()> {
        Ok(Folder::existing(&self.state)?
            .write(distributor::state_writer::CONFIRMED, &self.instances)?)
    }
}

#[derive(Debug, Args)]
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
    let CommandLine { command } = dns_command_line::parse::<CommandLine>();
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    // The client logs each attempt to connect; `ConnectFailures` does it with cause and remedy.
    let filter = filter.unwrap_or_else(|_| "info,async_nats=warn".into());
    let colours = io::stderr().is_terminal();
    let bars = MultiProgress::new();
    let log = Log(bars.clone());
    tracing_subscriber::fmt()
        .with_writer(move || log.clone())
        .with_ansi(colours)
        .with_env_filter(filter)
        .init();
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&error.into()),
    };
    let code = runtime
        .block_on(command.run(&bars))
        .unwrap_or_else(|error| failed(&error));
    // A call to a folder that hangs must not delay the exit.
    runtime.shutdown_background();
    code
}

fn failed(error: &anyhow::Error) -> ExitCode {
    dns_command_line::failed("bosh-dns-sync", error)
}

impl Command {
    /// Runs the command; its progress bar is drawn with `bars`.
    async fn run(self, bars: &MultiProgress) -> anyhow::Result<ExitCode> {
        match self {
            Self::Publish(options) => return publish(*options, bars).await,
            Self::Status(status) => return status.run().await,
            Self::Agent(options) => agent::run(*options).await?,
            Self::Instance(instance) => instance.run().await?,
            Self::Address(address) => address.run()?,
            Self::San(san) => san.run()?,
            Self::ConfirmRemovals(confirm) => confirm.run()?,
            Self::Man(man) => man.run(CommandLine::command())?,
            Self::Completions(completions) => completions.run(CommandLine::command())?,
            Self::NatsConfig(config) => config.run()?,
        }
        Ok(ExitCode::SUCCESS)
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
    // A process that runs for ever, or has no agents, has no progress.
    if options.watch || options.local.is_some() {
        return distributor::run(options, |_| {})
            .await
            .map(|_| ExitCode::SUCCESS);
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
    let line = format!("{synced} of {agents} agents have this version, {count}\n");
    print(line.as_bytes())?;
    Ok(if all {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

impl NatsConfig {
    fn run(self) -> anyhow::Result<()> {
        let Self {
            source,
            state,
            listen,
            tls,
            users_by,
            jetstream,
            bucket,
            output,
        } = self;
        // Its folder belongs to the publisher, so nothing in it changes.
        let changes = match state {
            Some(state) => Folder::open(&state).read(CHANGES)?.unwrap_or_default(),
            None => Changes::default(),
        };
        let inventory = source.parse(&changes, source.files()?)?;
        let agents = inventory
            .instances
            .iter()
            .filter_map(|instance| instance.agent.as_deref());
        let jetstream = jetstream.as_deref().zip(bucket.as_deref());
        let text = bus::nats_server_config(&listen, &tls, jetstream, users_by, agents);
        match output {
            Some(path) => {
                let permissions = Attributes {
                    mode: 0o640,
                    ..Attributes::PRIVATE
                };
                atomic::replace(&path, text.as_bytes(), permissions)
                    .map(drop)
                    .context("nats-config")
            }
            None => Ok(print(text.as_bytes())?),
        }
    }
}

//----------- Status ---------------------------------------------------------

/// `status`. The exit code is 1 unless all agents hold the version.
#[derive(Debug, Args)]
struct StatusOptions {
    /// The publisher's state folder on this machine
    #[arg(long, value_name = "FOLDER", required_unless_present = "api")]
    state: Option<PathBuf>,
    /// URL of the publisher's API, https://HOST:PORT; needs --tls-*
    #[arg(long, value_name = "URL", requires = "ca", conflicts_with = "state")]
    api: Option<String>,
    /// Our certificates for the API.
    #[command(flatten)]
    tls: TlsOptions,
    /// Show all agents, not only lagging ones
    #[arg(long)]
    all: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl StatusOptions {
    async fn run(self) -> anyhow::Result<ExitCode> {
        let Self {
            state,
            api,
            tls,
            all,
            json,
        } = self;
        let (registry, newest): (AgentRegistry, u64) = match (api, tls.files()) {
            (Some(api), Some(files)) => {
                let registry: AgentRegistry =
                    serde_json::from_slice(&call(&api, "/v1/status", &files, None).await?)?;
                let newest = registry.version;
                (registry, newest)
            }
            _ => {
                let path = state
                    .context("--state FOLDER, or --api URL with its --tls-* files, is required")?;
                let folder = Folder::open(&path);
                let registry: Option<AgentRegistry> = folder.read("agents.json")?;
                let registry = registry.with_context(|| {
                    format!(
                        "{}: no agent reports: nothing has been published from this state folder, or the \
                         disk is full (see the publisher's log)",
                        path.display()
                    )
                })?;
                // A version is committed before it is announced, and announced before the registry is
                // saved: reading the state after the registry shows whether the registry is current.
                let state: PublisherState = folder.read("state.json")?.unwrap_or_default();
                (
                    registry,
                    state.versions.last().map_or(0, |made| made.version),
                )
            }
        };
        let count = registry.count();
        // A fleet without a version, or one whose newest is not announced yet, is not synced,
        // although no agent lags.
        let synced = count.complete() && registry.version > 0 && newest <= registry.version;
        let code = if synced {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        };
        let mut text = if json {
            format!("{}\n", terminal::json(&serde_json::to_string(&registry)?))
        } else {
            terminal::lines(&table(&registry, all, now_ms())).into_owned()
        };
        if newest > registry.version && !json {
            text += &format!("announcing version {newest}\n");
        }
        print(text.as_bytes())?;
        Ok(code)
    }
}

/// Formats the registry as text.
fn table(registry: &AgentRegistry, all: bool, now: u64) -> String {
    let count = registry.count();
    let Count { agents, synced, .. } = count;
    let mut text = match registry.version {
        0 => format!("no version was announced yet\n0 of {agents} agents have one, {count}\n"),
        version => format!(
            "version {version}, made {}\n{synced} of {agents} agents have it, {count}\n{} bytes of messages \
             sent for it\n",
            ago(now, Some(registry.made)),
            registry.bytes_sent
        ),
    };
    let mut table = Table::new([
        "AGENT", "VERSION", "LAG", "HEARD", "ASKED", "ATTEMPTS", "ERROR",
    ]);
    let mut is_empty = true;
    for (id, agent) in &registry.agents {
        if all || registry.state(agent) != AgentState::Synced {
            table.line(row(registry, id, agent, now));
            is_empty = false;
        }
    }
    if !is_empty {
        text.push_str(&table.text(0));
    }
    text
}

/// Returns the cells of an agent.
fn row(registry: &AgentRegistry, id: &str, agent: &Agent, now: u64) -> [String; 7] {
    let Agent {
        held,
        heard,
        asked,
        failures,
        error,
        ..
    } = agent;
    let version = held.as_ref().map_or(0, |held| held.version);
    let error = match registry.state(agent) {
        AgentState::Disagreeing => {
            let digest = held.as_ref().and_then(|held| held.digest.as_deref());
            format!("disagrees: holds {}", digest.unwrap_or_default())
        }
        AgentState::Unverified => "reports no digest (BOSH agent)".to_owned(),
        _ => error.clone().unwrap_or_default(),
    };
    [
        printable(id),
        version.to_string(),
        registry.version.saturating_sub(version).to_string(),
        ago(now, *heard),
        ago(now, *asked),
        failures.to_string(),
        printable(&error),
    ]
}

fn ago(now: u64, at: Option<u64>) -> String {
    match at {
        Some(at) => format!("{} s ago", now.saturating_sub(at) / 1000),
        None => "never".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use test_support::command_page;

    use super::*;
    use crate::{
        distributor::registry::AgentCall,
        message::{Reply, Report},
    };

    #[test]
    fn command_reference_is_current() {
        let command = CommandLine::command();
        command_page::compare("sync-commands.md", &command_page::commands(command));
    }

    #[test]
    fn metrics_reference_is_current() {
        let families = [distributor::metric_families(), agent::metric_families()].concat();
        let introduction = "# Metrics of bosh-dns-sync\n\nFamilies of the publisher and, with `agent` in the name, of the agents.";
        command_page::compare(
            "sync-metrics.md",
            &command_page::metrics_of(introduction, &families),
        );
    }

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
            (
                "agent",
                include_str!("../../../../deploy/debian/sync-agent.env"),
            ),
            (
                "publish --watch --state s",
                include_str!("../../../../deploy/debian/sync-publisher.env"),
            ),
        ] {
            let options = environment
                .lines()
                .find_map(|line| line.strip_prefix("OPTIONS="))
                .unwrap();
            let words = format!("bosh-dns-sync {command} {options}");
            assert!(
                CommandLine::try_parse_from(words.split(' ')).is_ok(),
                "{words}"
            );
        }
        for words in [
            "publish --nodes n --state s",
            "status",
            "status --api https://p",
            "instance remove i",
        ] {
            let line = std::iter::once("bosh-dns-sync").chain(words.split(' '));
            assert!(CommandLine::try_parse_from(line).is_err(), "{words}");
        }
    }

    #[test]
    fn unsynced_agents_are_listed() {
        let call = AgentCall {
            version: 5,
            nonce: 1,
        };
        let mut registry = AgentRegistry::default();
        registry.set_agents(["a", "b", "c"].into_iter());
        registry.set_version(5, "five", 0);
        for id in ["a", "b", "c"] {
            registry.record_call(id, call, 0, 0, 0.5);
        }
        let report = |digest: &str| Report {
            version: 5,
            digest: Some(digest.to_owned()),
            patches: true,
        };
        registry.record_reply("a", call, Reply::Synced(Some(report("five"))), 1000, 0.5);
        registry.record_reply(
            "b",
            call,
            Reply::Exception("disk full".to_owned()),
            1000,
            0.5,
        );
        registry.record_reply("c", call, Reply::Synced(Some(report("other"))), 1000, 0.5);
        let text = table(&registry, false, 4000);
        assert_eq!(
            text,
            "version 5, made 4 s ago\n1 of 3 agents have it, 1 failing, 0 silent, 1 disagreeing\n\
             0 bytes of messages sent for it\n\
             AGENT  VERSION  LAG  HEARD    ASKED    ATTEMPTS  ERROR\n\
             b      0        5    3 s ago  4 s ago  1         disk full\n\
             c      5        0    3 s ago  4 s ago  0         disagrees: holds other\n"
        );
        assert!(table(&registry, true, 4000).contains("\na "));
        let early = table(&AgentRegistry::default(), false, 1_795_721_272_000);
        assert_eq!(
            early,
            "no version was announced yet\n0 of 0 agents have one, 0 failing, 0 silent\n"
        );
    }

    #[tokio::test]
    async fn status_succeeds_once_all_have_the_newest_version() {
        let folder = tempfile::tempdir().unwrap();
        for (held, announced, newest, expected) in [
            (5, 5, 5, ExitCode::SUCCESS),
            (4, 5, 5, ExitCode::FAILURE),
            (5, 5, 6, ExitCode::FAILURE),
            (0, 0, 0, ExitCode::FAILURE),
        ] {
            let mut registry = AgentRegistry::default();
            registry.set_agents(["a"].into_iter());
            registry.set_version(announced, "five", 0);
            let report = Report {
                version: held,
                digest: Some("five".to_owned()),
                patches: false,
            };
            registry.report("a", report, 0);
            let mut state = serde_json::to_value(PublisherState::default()).unwrap();
            state["versions"] = serde_json::json!([
                {"version": newest, "blob": "", "digest": "five", "at": 0}
            ]);
            let write = |name: &str, json: Vec<u8>| std::fs::write(folder.path().join(name), json);
            write("agents.json", serde_json::to_vec(&registry).unwrap()).unwrap();
            write("state.json", serde_json::to_vec(&state).unwrap()).unwrap();
            let words = ["bosh-dns-sync", "status", "--state"].map(std::ffi::OsStr::new);
            let line = words.into_iter().chain([folder.path().as_os_str()]);
            let Command::Status(status) = CommandLine::parse_from(line).command else {
                panic!("another command")
            };
            let code = status.run().await.unwrap();
            assert_eq!(code, expected, "{held} of {announced}, {newest} committed");
        }
    }

    #[tokio::test]
    async fn incomplete_fleet_is_not_synced() {
        let folder = tempfile::tempdir().unwrap();
        let status = async || {
            let words = ["bosh-dns-sync", "status", "--json", "--state"].map(std::ffi::OsStr::new);
            let line = words.into_iter().chain([folder.path().as_os_str()]);
            let Command::Status(status) = CommandLine::parse_from(line).command else {
                panic!("another command")
            };
            status.run().await.map_err(|error| error.to_string())
        };
        assert_eq!(
            status().await,
            Err(format!(
                "{}: no agent reports: nothing has been published from this state folder, or the disk is full (see \
                 the publisher's log)",
                folder.path().display()
            ))
        );
        for (version, expected) in [(0, ExitCode::FAILURE), (1, ExitCode::SUCCESS)] {
            let mut registry = AgentRegistry::default();
            registry.set_version(version, "d", 0);
            let text = serde_json::to_vec(&registry).unwrap();
            std::fs::write(folder.path().join("agents.json"), text).unwrap();
            assert_eq!(status().await, Ok(expected), "{version}");
        }
        assert_eq!(ago(5000, None), "never");
        assert_eq!(ago(5999, Some(3000)), "2 s ago");
        assert_eq!(ago(1, Some(3000)), "0 s ago");
    }

    #[test]
    fn agents_of_bosh_report_no_digest() {
        let call = AgentCall {
            version: 5,
            nonce: 1,
        };
        let mut registry = AgentRegistry::default();
        registry.set_agents(["a"].into_iter());
        registry.set_version(5, "five", 0);
        registry.record_call("a", call, 0, 0, 0.5);
        registry.record_reply("a", call, Reply::Synced(None), 1000, 0.5);
        let cells = row(&registry, "a", &registry.agents["a"], 2000);
        assert_eq!(cells[1], "5");
        assert_eq!(cells[6], "reports no digest (BOSH agent)");
    }

    #[tokio::test]
    async fn configuration_of_the_bus_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().display().to_string();
        std::fs::write(folder.path().join("nodes"), "10.0.0.1 web\n10.0.0.2 db\n").unwrap();
        let words = format!(
            "bosh-dns-sync nats-config --nodes {path}/nodes --listen 0.0.0.0:4222 --tls-ca a --tls-certificate b \
             --tls-key c --output {path}/nats.conf"
        );
        let command = CommandLine::try_parse_from(words.split_whitespace());
        let bars = MultiProgress::new();
        let code = command.unwrap().command.run(&bars).await.unwrap();
        assert_eq!(code, ExitCode::SUCCESS);
        let text = std::fs::read_to_string(folder.path().join("nats.conf")).unwrap();
        for agent in ["web", "db"] {
            let name = format!("CN={agent}.agent.bosh-internal");
            assert!(text.contains(&name), "{text}");
        }
        let facts = std::fs::metadata(folder.path().join("nats.conf")).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::mode(&facts.permissions());
        assert_eq!(mode & 0o777, 0o640);
    }
}
