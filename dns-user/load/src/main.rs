//! The program `bosh-dns-xdp-load`: sends DNS queries from inside the kernel, and writes query files for other
//! load generators.
//!
//! * [`consent`]: whether the server may be loaded, and answers as expected
//! * [`mod@frames`]: names to query, from a query file or from records.json, and their packets
//! * [`generator`]: sends them and counts replies, with a BPF program; meanwhile measures latency by a socket

mod consent;
mod frames;
mod generator;

use std::{
    net::{Ipv4Addr, SocketAddrV4, UdpSocket},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use clap::{Args, CommandFactory as _, Parser, Subcommand};
use nix::sys::socket::{setsockopt, sockopt};
use serde::Serialize;

use self::{
    frames::{Query, Route, frames},
    generator::{Generator, Latencies, Load, Measured},
};
use dns_kit::command_line;

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
    /// IPv4 address of the server, which listens on port 53: on the interface's link, private or loopback.
    #[arg(long)]
    server: Ipv4Addr,
    /// Allows a server with a public address beyond the link, which its operator and those of the way to it agree to.
    #[arg(long)]
    public: bool,
    /// RCODE of the answer to the file's first query; with another one, or none, the load does not start.
    #[arg(long, value_enum, default_value_t = consent::Expected::Noerror)]
    expect: consent::Expected,
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
        (None, None) => bail!("name a query file (--queries) or records.json (--records)"),
    };
    if !options.public {
        consent::refuse_strangers(options.server, &options.interface)?;
    }
    let server = SocketAddrV4::new(options.server, PORT);
    // Also fills the ARP table.
    let first = queries
        .first()
        .context("the file has no query")?
        .message(0, options.edns);
    let socket = probe_socket(server, &options.interface)?;
    let answer = generator::ask(&socket, &first).with_context(|| {
        format!(
            "{server} does not answer at {}; the load was not started",
            options.interface
        )
    })?;
    options
        .expect
        .verify(&first, &answer.message)
        .with_context(|| {
            format!("{server} does not answer as expected; the load was not started")
        })?;
    let source = match socket.local_addr()? {
        std::net::SocketAddr::V4(address) => *address.ip(),
        std::net::SocketAddr::V6(_) => bail!("no IPv4 address to send from"),
    };
    let route = Route::of(&options.interface, options.mac.as_deref(), source, server)?;
    let frames = frames(&queries, &route, options.edns)?;
    let mut generator = Generator::new(&options.interface, &frames, options.cpu)?;
    let load = options.rate.map_or(Load::Saturate, Load::Rate);
    let length = Duration::from_secs(options.seconds);
    let (measured, latencies) = generator.run(load, length, DRAIN, |over| {
        generator::probe_until(&socket, &queries, options.edns, over)
    })?;
    let report = Report::new(options.rate, &measured, latencies);
    let text = if options.json {
        report.json()?
    } else {
        report.table()
    };
    command_line::print(text.as_bytes())?;
    if let Some(unanswered) = measured.unanswered {
        bail!(
            "{server} stopped answering: no reply to the last {unanswered} queries; the load was ended after {:.1} s",
            measured.took.as_secs_f64()
        );
    }
    Ok(())
}

/// Returns a socket for probes, on a port of the kernel's choice, which leave by the load's interface: an answer by
/// another way would not be that of the server that gets the load.
fn probe_socket(server: SocketAddrV4, interface: &str) -> Result<UdpSocket> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    setsockopt(&socket, sockopt::BindToDevice, &interface.into())
        .with_context(|| format!("cannot send by the interface {interface:?}"))?;
    socket
        .connect(server)
        .with_context(|| format!("no route to {server}"))?;
    socket.set_read_timeout(Some(generator::PROBE_TIMEOUT))?;
    Ok(socket)
}

#[cfg(test)]
#[test]
fn command_reference_is_current() {
    use test_support::command_page;

    let page = command_page::commands(Cli::command());
    command_page::compare("load-commands.md", &page);
}

//----------- Report ---------------------------------------------------------

/// Figures of a measurement; times in microseconds, rates per second.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// Wanted rate; `None` for saturation.
    rate: Option<u32>,
    seconds: f64,
    queries: u64,
    /// Queries that were due but not sent, because the generating CPU was busy.
    skipped: u64,
    replies: u64,
    /// Replies with an RCODE other than NOERROR.
    errors: u64,
    /// Share of the queries without a reply.
    loss: f64,
    queries_per_second: f64,
    replies_per_second: f64,
    latency: Option<Percentiles>,
    /// Probes without a reply.
    lost_probes: u64,
}

/// Latency of probes in microseconds.
#[derive(Clone, Debug, Serialize)]
struct Percentiles {
    probes: usize,
    p50: f64,
    p90: f64,
    p99: f64,
    p999: f64,
    max: f64,
}

impl Report {
    pub(crate) fn new(rate: Option<u32>, measured: &Measured, latencies: Latencies) -> Self {
        let Measured { counts, took, .. } = measured;
        let seconds = took.as_secs_f64();
        let replies = counts.replies();
        let lost = counts.sent.saturating_sub(replies);
        Self {
            rate,
            seconds,
            queries: counts.sent,
            skipped: counts.skipped,
            replies,
            errors: counts.other,
            loss: if counts.sent == 0 {
                0.0
            } else {
                lost as f64 / counts.sent as f64
            },
            queries_per_second: counts.sent as f64 / seconds,
            replies_per_second: replies as f64 / seconds,
            latency: percentiles(&latencies.answered),
            lost_probes: latencies.lost,
        }
    }

    pub(crate) fn json(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    pub(crate) fn table(&self) -> String {
        let mut text = format!(
            "queries   {:>12}  {:>12.0}/s\nreplies   {:>12}  {:>12.0}/s\nerrors    {:>12}\nloss      {:>11.3}%\nskipped   {:>12}\n",
            self.queries,
            self.queries_per_second,
            self.replies,
            self.replies_per_second,
            self.errors,
            self.loss * 100.0,
            self.skipped,
        );
        if let Some(Percentiles {
            probes,
            p50,
            p90,
            p99,
            p999,
            max,
        }) = &self.latency
        {
            text += &format!(
                "latency   p50 {p50:.0} µs, p90 {p90:.0} µs, p99 {p99:.0} µs, p99.9 {p999:.0} µs, max {max:.0} µs \
                 ({probes} probes by socket, {} lost)\n",
                self.lost_probes
            );
        }
        if self.replies == 0 {
            text += "no reply: does the driver transmit XDP frames, and the other end of a veth pair receive them \
                     (ethtool -K INTERFACE gro on)?\n";
        }
        text
    }
}

/// Returns percentiles of sorted times by the nearest rank.
fn percentiles(sorted: &[Duration]) -> Option<Percentiles> {
    let at = |share: f64| {
        let rank = (share * sorted.len() as f64).ceil().max(1.0) as usize;
        sorted
            .get(rank.min(sorted.len()).checked_sub(1)?)
            .map(|time| time.as_secs_f64() * 1e6)
    };
    Some(Percentiles {
        probes: sorted.len(),
        p50: at(0.5)?,
        p90: at(0.9)?,
        p99: at(0.99)?,
        p999: at(0.999)?,
        max: at(1.0)?,
    })
}

#[cfg(test)]
mod tests {
    use bench_programs::generator::Counts;

    use super::*;

    #[test]
    fn report_has_rates_and_percentiles() {
        let counts = Counts {
            sent: 2000,
            skipped: 5,
            no_error: 1500,
            other: 100,
        };
        let answered = (1..=1000).map(Duration::from_micros).collect();
        let measured = Measured {
            counts,
            took: Duration::from_secs(2),
            unanswered: None,
        };
        let report = Report::new(Some(1000), &measured, Latencies { answered, lost: 3 });
        assert_eq!(
            (
                report.queries_per_second,
                report.replies_per_second,
                report.loss
            ),
            (1000.0, 800.0, 0.2)
        );
        let latency = report.latency.clone().unwrap();
        let rounded = [
            latency.p50,
            latency.p90,
            latency.p99,
            latency.p999,
            latency.max,
        ]
        .map(f64::round);
        assert_eq!(rounded, [500.0, 900.0, 990.0, 999.0, 1000.0]);
        assert!(report.table().contains("p99 990 µs"), "{}", report.table());
        assert!(report.json().unwrap().contains("\"errors\": 100"));
        let silent = Measured {
            counts: Counts {
                sent: 1,
                ..Counts::default()
            },
            took: Duration::from_secs(1),
            unanswered: None,
        };
        let report = Report::new(None, &silent, Latencies::default());
        assert!(report.latency.is_none() && report.table().contains("no reply: "));
    }
}
