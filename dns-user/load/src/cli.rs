//! The command line.

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::{Args, CommandFactory as _, Parser, Subcommand};

use crate::{compare::Compare, queries, respond::Respond, run::Run, search::Search};

/// Measures DNS servers with load that the kernel generates, or sockets.
#[derive(Debug, Parser)]
#[command(name = "bosh-dns-xdp-load", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Queries a server, counts and times the replies.
    ///
    /// Needs root, Linux 5.18, and an interface whose driver transmits XDP frames (`ndo_xdp_xmit`). Replies to the
    /// ports of `--ports` are counted and dropped at the interface while it runs. `--sockets` needs none of this. Prints a
    /// line for each interval; Ctrl-C ends the load with the report so far.
    Run(Run),
    /// Finds the highest rate that a server answers without loss, and says what limits it.
    ///
    /// Tries rates as RFC 2544, section 26.1, does: each for the same time, doubled until one loses more than
    /// `--max-loss`, then bisected. A rate that fails is tried again, and holds if it does so in two of three trials;
    /// both bounds are tried once more in the end. Losses of pauses, in which the server answers nothing, are reported
    /// and count beyond `--max-pauses` only.
    Search(Search),
    /// Compares two servers, which get the same load in short turns.
    ///
    /// Turns come in blocks, first, second, second, first, and the other way round in the next block, so that what
    /// changes on the machines meanwhile affects both servers. The result is the median of the blocks' ratios with its
    /// 95 % interval, looked at after 8 blocks, 16, 32 and so on: the comparison ends when the interval is as narrow as
    /// `--precision` asks, or after `--turns`.
    Compare(Compare),
    /// Answers every query at an interface with an empty answer: what link and generator can do without a server.
    Respond(Respond),
    /// Writes a query file for dnsperf, kxdpgun and `run`: a line `name type` for each query.
    Querygen(Querygen),
    /// Prints the manual page, or writes a page for each command.
    Man(dns_command_line::Man),
    /// Prints a script that completes commands and options in a shell.
    Completions(dns_command_line::Completions),
}

#[derive(Debug, Args)]
struct Querygen {
    /// records.json.
    #[arg(long)]
    records: PathBuf,
    /// Types to query, separated by commas.
    #[arg(long, default_value = "A,AAAA", value_delimiter = ',')]
    types: Vec<String>,
    /// Maximum number of names, the most useful first: aliases, groups, instances.
    #[arg(long)]
    names: Option<usize>,
}

/// Runs the program with the arguments of the process.
pub fn main() -> ExitCode {
    let Cli { command } = dns_command_line::parse();
    let done = match command {
        Command::Run(options) => options.run(),
        Command::Search(options) => options.run(),
        Command::Compare(options) => options.run(),
        Command::Respond(options) => options.run(),
        Command::Querygen(options) => querygen(&options),
        Command::Man(man) => man.run(Cli::command()),
        Command::Completions(completions) => completions.run(Cli::command()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => dns_command_line::failed("bosh-dns-xdp-load", &problem),
    }
}

fn querygen(options: &Querygen) -> Result<()> {
    let queries = queries::of_records(&options.records, &options.types, options.names, None)?;
    let mut lines = String::new();
    for query in &queries {
        lines += &format!("{query}\n");
    }
    Ok(dns_command_line::print(lines.as_bytes())?)
}

#[cfg(test)]
#[test]
fn command_reference_is_current() {
    use test_support::command_page;

    let page = command_page::commands(Cli::command());
    command_page::compare("load-commands.md", &page);
}

#[cfg(test)]
#[test]
fn bursts_have_a_rate_and_a_limit() {
    for (arguments, expected) in [
        ("run --server 10.9.0.2 --rate 9 --burst 16", None),
        ("run --server 10.9.0.2 --rate 9 --burst 17", Some("1..=16")),
        ("run --server 10.9.0.2 --rate 9 --burst 0", Some("1..=16")),
        ("run --server 10.9.0.2 --burst 2", Some("--rate")),
        ("compare 10.9.0.2 10.9.0.3 --burst 2", Some("--rate")),
        ("search --server 10.9.0.2 --burst 2", None),
    ] {
        let all = format!("bosh-dns-xdp-load {arguments} --sockets --queries queries");
        let problem = Cli::try_parse_from(all.split(' '))
            .err()
            .map(|error| error.to_string());
        match expected {
            Some(part) => assert!(problem.unwrap().contains(part), "{arguments}"),
            None => assert_eq!(problem, None, "{arguments}"),
        }
    }
}

#[cfg(test)]
#[test]
fn generated_queries_are_printed() {
    const RECORDS: &str = r#"{"record_keys": ["id", "instance_group", "group_ids", "network", "deployment", "ip",
        "domain"], "record_infos": [["a", "web", ["1"], "net", "dep", "10.0.0.1", "bosh"]]}"#;
    if let Some(records) = std::env::var_os("GENERATED_FROM") {
        let options = Querygen {
            records: records.into(),
            types: vec!["A".to_owned(), "SRV".to_owned()],
            names: Some(2),
        };
        return querygen(&options).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let records = folder.path().join("records.json");
    std::fs::write(&records, RECORDS).unwrap();
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "cli::generated_queries_are_printed",
            "--exact",
            "--nocapture",
        ])
        .env("GENERATED_FROM", &records)
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let expected = "q-s0.q-g1.bosh. A\nq-s0.q-g1.bosh. SRV\n\
        q-s0.web.net.dep.bosh. A\nq-s0.web.net.dep.bosh. SRV\n";
    assert!(text.contains(expected), "{text}");
}
