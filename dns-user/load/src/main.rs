//! The program `bosh-dns-xdp-load`: sends DNS queries from inside the kernel, and writes query files for other
//! load generators.
//!
//! * [`mod@frames`]: names to query, from a query file or from records.json, and their packets
//! * [`generator`]: sends them and counts replies, with a BPF program; meanwhile measures latency by a socket
//! * [`report`]: the result

mod frames;
mod generator;
mod report;

use std::{
    net::{Ipv4Addr, SocketAddrV4, UdpSocket},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use clap::{Args, CommandFactory as _, Parser, Subcommand};
use dns_kit::command_line;

use crate::{
    frames::{Query, Route, frames},
    generator::{Generator, Load},
    report::Report,
};

/// Port of the server: the programs count replies from this port.
const PORT: u16 = 53;
/// Time that is waited for replies to the last queries.
const DRAIN: Duration = Duration::from_secs(1);

/// Measures DNS servers with load that the kernel generates.
#[derive(Debug, Parser)]
#[command(name = "bosh-dns-xdp-load", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Queries a server, counts replies, and prints rates, losses and latencies.
    ///
    /// Needs root, Linux 5.18, and an interface whose driver transmits XDP frames (`ndo_xdp_xmit`). Replies to UDP
    /// ports 2048 to 2063 are counted and dropped at the interface while it runs.
    Run(Run),
    /// Writes a query file for dnsperf, kxdpgun and `run`: a line `name type` for each query.
    Querygen(Querygen),
    /// Prints the manual page, or writes a page for each command.
    Man(command_line::Man),
    /// Prints a script that completes commands and options in a shell.
    Completions(command_line::Completions),
}

#[derive(Debug, Args)]
struct Run {
    /// IPv4 address of the server, which listens on port 53.
    #[arg(long)]
    server: Ipv4Addr,
    /// Interface that queries leave by.
    #[arg(long)]
    interface: String,
    /// Query file with lines `name type`.
    #[arg(long, required_unless_present = "records", conflicts_with = "records")]
    queries: Option<PathBuf>,
    /// records.json, whose names are queried for A and AAAA.
    #[arg(long)]
    records: Option<PathBuf>,
    /// Queries per second; without it, as many as possible.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rate: Option<u32>,
    /// Length of the measurement.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// CPU that generates the queries; by default the last one.
    #[arg(long)]
    cpu: Option<usize>,
    /// Hardware address of the server, or of the router to it; by default looked up in the ARP table.
    #[arg(long)]
    mac: Option<String>,
    /// UDP size of an OPT in each query; without it, queries have none.
    #[arg(long, value_parser = clap::value_parser!(u16).range(512..))]
    edns: Option<u16>,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
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

fn main() -> ExitCode {
    let Cli { command } = command_line::parse();
    let done = match command {
        Command::Run(options) => run(&options),
        Command::Querygen(options) => querygen(&options),
        Command::Man(man) => man.run(Cli::command()),
        Command::Completions(completions) => completions.run(Cli::command()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => command_line::failed("bosh-dns-xdp-load", &problem),
    }
}

fn querygen(options: &Querygen) -> Result<()> {
    let queries = frames::of_records(&options.records, &options.types, options.names)?;
    let lines: String = queries.iter().map(|query| format!("{query}\n")).collect();
    Ok(command_line::print(lines.as_bytes())?)
}

fn run(options: &Run) -> Result<()> {
    let queries: Vec<Query> = match (&options.queries, &options.records) {
        (Some(file), _) => frames::of_file(file)?,
        (None, Some(file)) => frames::of_records(file, &["A".to_owned(), "AAAA".to_owned()], None)?,
        (None, None) => anyhow::bail!("name a query file (--queries) or records.json (--records)"),
    };
    let server = SocketAddrV4::new(options.server, PORT);
    // Also fills the ARP table.
    let first = queries.first().context("the file has no query")?.message(0, options.edns);
    let socket = probe_socket(server)?;
    ensure!(generator::ask(&socket, &first).is_some(), "{server} does not answer; the load was not started");
    let source = match socket.local_addr()? {
        std::net::SocketAddr::V4(address) => *address.ip(),
        std::net::SocketAddr::V6(_) => anyhow::bail!("no IPv4 address to send from"),
    };
    let route = Route::of(&options.interface, options.mac.as_deref(), source, server)?;
    let frames = frames(&queries, &route, options.edns)?;
    let mut generator = Generator::new(&options.interface, &frames, options.cpu)?;
    let load = options.rate.map_or(Load::Saturate, Load::Rate);
    let length = Duration::from_secs(options.seconds);
    let (measured, latencies) = generator
        .run(load, length, DRAIN, |over| generator::probe_until(&socket, &queries, options.edns, over))?;
    let report = Report::new(options.rate, &measured, latencies);
    let text = if options.json { report.json()? } else { report.table() };
    Ok(command_line::print(text.as_bytes())?)
}

/// Returns a socket for probes, on a port of the kernel's choice.
fn probe_socket(server: SocketAddrV4) -> Result<UdpSocket> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(server).with_context(|| format!("no route to {server}"))?;
    socket.set_read_timeout(Some(generator::PROBE_TIMEOUT))?;
    Ok(socket)
}

#[cfg(test)]
#[path = "../../resolver/src/cli/command_page.rs"]
#[expect(dead_code, reason = "this program has no metrics")]
mod command_page;

#[cfg(test)]
#[test]
fn command_reference_is_current() {
    let page = command_page::commands(Cli::command());
    command_page::compare("load-commands.md", &page);
}
