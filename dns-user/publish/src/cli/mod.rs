//! The command line. Exit codes: 0 all is well, 1 something failed, 2 `plan` found changes or the
//! call cannot be understood.

mod ownership;
mod publish;

use std::{
    ffi::OsString,
    io::{self, IsTerminal as _},
    path::PathBuf,
    process::ExitCode,
};

use clap::{Args, CommandFactory as _, Parser, Subcommand};
use indicatif::MultiProgress;

use crate::{
    config::{Config, USUAL},
    publication::Target,
    runner,
};

/// End of the help and of the manual page.
const FILES: &str = "\
Exit codes:
  0  all is well
  1  something failed, or is not published
  2  `plan` found changes, or the call cannot be understood

Files:
  /etc/bosh-dns-xdp/publish.yml          configuration
  /etc/bosh-dns-xdp/publish.d            documents; FILE.status has their status
  /etc/bosh-dns-xdp/publish.env          credentials of providers, read by the unit only
  /var/lib/bosh-dns-publish              resources from the API, health and recent deletions
  /run/bosh-dns-publish/control.sock     control socket";

/// Publish names of the fleet to external DNS: BIND, Knot, CoreDNS, Route 53
#[derive(Debug, Parser)]
#[command(name = "bosh-dns-publish", version, arg_required_else_help = true, after_long_help = FILES)]
struct CommandLine {
    /// Configuration file [default: /etc/bosh-dns-xdp/publish.yml if it exists]
    #[arg(
        long,
        value_name = "FILE",
        global = true,
        env = "BOSH_DNS_PUBLISH_CONFIG"
    )]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Publish continuously, and serve the API
    Run,
    /// Show the changes that `apply` would make; exit with code 2 if there are any
    Plan(publish::PlanArguments),
    /// Publish the records once and exit
    Apply(publish::Apply),
    /// Take ownership of wanted records without an owner; only ownership records change
    Adopt(ownership::Adopt),
    /// Transfer records from one owner to another; only ownership records change
    TransferOwner(ownership::TransferOwner),
    /// Delete all records of this owner, or release them without an owner
    Retire(ownership::Retire),
    /// Check configuration and documents
    Check,
    /// Write Kubernetes manifests for external-dns
    Render(publish::Render),
    /// Show the state of the running publisher
    Status(publish::Status),
    /// Print completions for a shell
    #[command(hide = true)]
    Completions(dns_command_line::Completions),
    /// Print the manual page, or write all pages to a folder
    #[command(hide = true)]
    Man(dns_command_line::Man),
}

#[derive(Debug, Args)]
struct Selection {
    /// Only this DNS Update Record; repeatable; `default/` may be omitted
    #[arg(long = "provider", value_name = "PROJECT/NAME")]
    providers: Vec<String>,
}

impl Selection {
    /// Returns the selected targets; an unknown name is an error.
    fn of<'a>(&self, read: &'a runner::SourceState) -> anyhow::Result<Vec<&'a Target>> {
        let targets = &read.publication.targets;
        for name in &self.providers {
            if !targets.keys().any(|target| is_named(target, name)) {
                let known: Vec<&str> = targets.keys().map(String::as_str).collect();
                anyhow::bail!(
                    "DNS Update Record {name} does not exist; existing ones: {}",
                    known.join(", ")
                );
            }
        }
        let mut selected = Vec::new();
        for (name, target) in targets {
            if self.providers.is_empty() || self.providers.iter().any(|one| is_named(name, one)) {
                selected.push(&**target);
            }
        }
        Ok(selected)
    }
}

fn is_named(target: &str, name: &str) -> bool {
    target == name || target.strip_prefix("default/") == Some(name)
}

#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
enum Colour {
    /// Only on a terminal
    #[default]
    Auto,
    /// Also in files and pipes
    Always,
    /// Plain text without colour
    Never,
}

impl Colour {
    fn is_on(self) -> bool {
        self.is_on_at(io::stdout().is_terminal(), std::env::var_os("NO_COLOR"))
    }

    fn is_on_at(self, is_terminal: bool, no_color: Option<OsString>) -> bool {
        match self {
            // An empty value counts as unset (no-color.org).
            Self::Auto => is_terminal && no_color.is_none_or(|value| value.is_empty()),
            Self::Always => true,
            Self::Never => false,
        }
    }
}

fn exit_code(has_failed: bool) -> ExitCode {
    ExitCode::from(u8::from(has_failed))
}

/// Parses the command line, runs the command and returns its exit code.
pub fn main() -> ExitCode {
    let CommandLine { config, command } = dns_command_line::parse::<CommandLine>();
    // Before the logs, whose lines have to be printed above the bars.
    let bars = MultiProgress::new();
    start_logs(&bars);
    match execute(config, command, &bars) {
        Ok(code) => code,
        Err(error) => dns_command_line::failed("bosh-dns-publish", &error),
    }
}

fn execute(
    config: Option<PathBuf>,
    command: Command,
    bars: &MultiProgress,
) -> anyhow::Result<ExitCode> {
    // Without the configuration, which need not exist where a package builds manual pages.
    let command = match command {
        Command::Completions(completions) => {
            completions.run(CommandLine::command())?;
            return Ok(ExitCode::SUCCESS);
        }
        Command::Man(man) => {
            man.run(CommandLine::command())?;
            return Ok(ExitCode::SUCCESS);
        }
        command => command,
    };
    let config = load(config)?;
    let runtime = tokio::runtime::Runtime::new()?;
    let result = runtime.block_on(async {
        match command {
            Command::Run => runner::run(config).await.map(|()| ExitCode::SUCCESS),
            Command::Plan(plan) => plan.run(&config).await,
            Command::Apply(apply) => apply.run(&config, bars).await,
            Command::Adopt(adopt) => adopt.run(&config).await,
            Command::TransferOwner(transfer) => transfer.run(&config).await,
            Command::Retire(retire) => retire.run(&config).await,
            Command::Check => publish::check(&config).await,
            Command::Render(render) => render.run(&config).await,
            Command::Status(status) => status.run(&config).await,
            Command::Completions(_) | Command::Man(_) => Ok(ExitCode::SUCCESS),
        }
    });
    // The runtime would wait for a read on a mount that hangs, or for the look-up of a host name.
    runtime.shutdown_background();
    result
}

/// Loads the given configuration, else the one at the usual path, else the defaults.
fn load(path: Option<PathBuf>) -> anyhow::Result<Config> {
    let path = match path {
        Some(path) => path,
        // A file that is named must exist; the usual one need not.
        None if PathBuf::from(USUAL).exists() => PathBuf::from(USUAL),
        None => return Ok(Config::default()),
    };
    Config::load(&path).map_err(|problems| {
        let lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
        anyhow::anyhow!("{}", lines.join("\n"))
    })
}

fn start_logs(bars: &MultiProgress) {
    let filter =
        tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    let log = Log(bars.clone());
    tracing_subscriber::fmt()
        .with_writer(move || log.clone())
        .with_ansi(io::stderr().is_terminal())
        .with_target(false)
        .with_env_filter(filter)
        .init();
}

/// Standard error for log lines, which clears a progress bar for each line.
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

/// Prints to standard output; a closed pipe is not an error.
fn print(text: &str) -> io::Result<()> {
    dns_command_line::print(text.as_bytes())
}

/// Prints a value as indented JSON. Owners of other records may have written a part of it.
fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(value)? + "\n";
    Ok(print(&dns_core::terminal::json(&text))?)
}

/// Prints a problem to standard error. Servers and documents of others may have written its text.
fn complain(problem: &str) {
    eprintln!("{}", dns_core::terminal::lines(problem));
}

/// Prints the problems of a provider. Returns whether there are any.
fn complain_of(name: &str, problems: &[String]) -> bool {
    for problem in problems {
        complain(&format!("{name}: {problem}"));
    }
    !problems.is_empty()
}

/// Reads the sources once and reports their problems. Returns whether there are any.
async fn read_sources(config: &Config) -> anyhow::Result<(runner::SourceState, bool)> {
    let read = runner::read_once(config).await?;
    let mut problems: Vec<String> = read.scan.problems().map(ToString::to_string).collect();
    for (id, found) in &read.publication.problems {
        for problem in found {
            problems.push(format!("{id}: {problem}"));
        }
    }
    problems.extend(read.fleet_problem.clone());
    for problem in &problems {
        complain(problem);
    }
    Ok((read, !problems.is_empty()))
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, sync::Arc, time::Instant};

    use test_support::command_page;

    use super::*;
    use crate::{
        documents::{DocumentId, Kind},
        plan::Desired,
        provider::ProviderKind,
        publication::Publication,
        record::Record,
        update_record::{DocumentParameters, Metadata, UpdateRecord},
    };

    #[test]
    fn command_line_is_consistent() {
        CommandLine::command().debug_assert();
        for words in [
            "run",
            "plan --json --provider a/b",
            "apply --dry-run",
            "apply --confirm-deletions 12",
            "adopt",
            "transfer-owner --from a --to b",
            "retire --confirm-deletions 3",
            "retire --keep-records",
            "retire --orphans",
            "retire --orphans=other example.org",
            "retire --confirm-deletions 3 old.example.org",
            "check",
            "render --output d",
            "status --json",
            "--config f plan",
        ] {
            let line = std::iter::once("bosh-dns-publish").chain(words.split(' '));
            assert!(CommandLine::try_parse_from(line).is_ok(), "{words}");
        }
        for words in [
            "transfer-owner --from a",
            "apply --confirm-deletions x",
            "retire --orphans --keep-records",
        ] {
            let line = std::iter::once("bosh-dns-publish").chain(words.split(' '));
            assert!(CommandLine::try_parse_from(line).is_err(), "{words}");
        }
    }

    #[test]
    fn failure_is_an_exit_code() {
        assert_eq!(exit_code(true), ExitCode::FAILURE);
        assert_eq!(exit_code(false), ExitCode::SUCCESS);
    }

    #[test]
    fn default_project_is_implied() {
        assert!(is_named("default/bind", "bind") && is_named("shop/bind", "shop/bind"));
        assert!(is_named("default/bind", "default/bind"));
        assert!(!is_named("shop/bind", "bind") && !is_named("default/bind", "etcd"));
    }

    #[test]
    fn command_reference_is_current() {
        let command = CommandLine::command();
        command_page::compare("publish-commands.md", &command_page::commands(command));
    }

    #[test]
    fn metrics_reference_is_current() {
        let families = crate::status::families();
        let introduction = "# Metrics of bosh-dns-publish\n\nFamilies under the names of external-dns where it has the same.";
        command_page::compare(
            "publish-metrics.md",
            &command_page::metrics_of(introduction, &families),
        );
    }

    /// Returns the target `shop/etcd`, whose provider is opened without a request.
    pub(super) fn target(records: Vec<Record>) -> Target {
        Target {
            id: DocumentId {
                kind: Kind::UpdateRecord,
                namespace: "shop".to_owned(),
                name: "etcd".to_owned(),
            },
            record: UpdateRecord {
                metadata: Metadata::default(),
                provider: ProviderKind::CoreDns,
                selector: None,
                parameters: DocumentParameters::default(),
            },
            desired: Desired {
                records,
                ..Desired::default()
            },
            untargeted: Vec::new(),
            origins: BTreeMap::new(),
            counts: BTreeMap::new(),
            rival: None,
        }
    }

    #[test]
    fn selections_name_existing_targets() {
        let mut publication = Publication::default();
        for (namespace, name) in [("default", "bind"), ("shop", "bind"), ("shop", "etcd")] {
            let mut target = target(Vec::new());
            target.id.namespace = namespace.to_owned();
            target.id.name = name.to_owned();
            let target = Arc::new(target);
            publication.targets.insert(target.name(), target);
        }
        let read = runner::SourceState {
            scan: Arc::default(),
            publication,
            next: Instant::now(),
            fleet_problem: None,
        };
        let select = |names: &[&str]| {
            let providers = names.iter().map(|name| (*name).to_owned()).collect();
            let selected = Selection { providers }.of(&read);
            selected
                .map(|targets| {
                    targets
                        .iter()
                        .map(|target| target.name())
                        .collect::<Vec<_>>()
                })
                .map_err(|error| error.to_string())
        };
        assert_eq!(
            select(&[]).unwrap(),
            ["default/bind", "shop/bind", "shop/etcd"]
        );
        assert_eq!(select(&["bind"]).unwrap(), ["default/bind"]);
        assert_eq!(
            select(&["shop/etcd", "default/bind"]).unwrap(),
            ["default/bind", "shop/etcd"]
        );
        assert_eq!(
            select(&["bind", "etcd"]).unwrap_err(),
            "DNS Update Record etcd does not exist; existing ones: default/bind, shop/bind, shop/etcd"
        );
    }

    #[test]
    fn colour_is_chosen() {
        for (no_color, is_auto) in [(None, true), (Some(""), true), (Some("1"), false)] {
            let at = |colour: Colour, is_terminal| {
                colour.is_on_at(is_terminal, no_color.map(OsString::from))
            };
            assert_eq!(at(Colour::Auto, true), is_auto, "{no_color:?}");
            assert!(!at(Colour::Auto, false));
            assert!(at(Colour::Always, false) && !at(Colour::Never, true));
        }
    }

    #[test]
    fn provider_problems_fail_a_command() {
        assert!(!complain_of("p", &[]) && complain_of("p", &["x".to_owned()]));
    }

    #[test]
    fn a_named_configuration_must_exist() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("publish.yml");
        let load = || load(Some(file.clone())).map_err(|error| error.to_string());
        assert!(load().unwrap_err().contains("cannot be read: "));
        std::fs::write(&file, "stor: s\ncontrl: {}\n").unwrap();
        let problems = load().unwrap_err();
        assert_eq!(problems.lines().count(), 2, "{problems}");
        std::fs::write(&file, "store: s\n").unwrap();
        assert_eq!(load().unwrap().store, PathBuf::from("s"));
    }
}
