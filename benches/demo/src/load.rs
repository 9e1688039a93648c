//! Measures the server under load and prints the figures.

use std::{fs, path::Path, time::Duration};

use anyhow::Result;
use test_lab::{
    dnsperf,
    figures::{number, quoted},
    lab::Lab,
    load::Loaded,
    metrics::Metrics,
    server::Server,
};

/// Queries per second for latency measurements, low enough for both paths to avoid queues.
const LATENCY_RATE: u32 = 20_000;

/// Containers of a dense Diego cell.
const CONTAINERS: u32 = 250;

/// Queries per second of each container: ten new connections, A and AAAA.
const QUERIES_A_CONTAINER: u32 = 20;

/// Results of the load.
pub(super) struct Figures {
    /// Highest rate in replies per second.
    best: f64,
    /// CPU time per reply on the server's side: its process and its interface's receive path.
    cpu: Duration,
    /// Median latency at [`LATENCY_RATE`].
    median: Duration,
    /// 99th percentile of latency at [`LATENCY_RATE`].
    slow: Duration,
    /// Replies from the interface.
    hits: u64,
    misses: u64,
}

/// Measures the running server.
pub(super) fn measure(lab: &Lab, server: &Server, queries: &Path, seconds: u64) -> Result<Figures> {
    let duration = Duration::from_secs(seconds);
    let load = dnsperf::Load {
        rate: Some(LATENCY_RATE),
        percentiles: true,
        ..dnsperf::Load::new(queries, duration)
    };
    let before = Metrics::read(&lab.server)?;
    let timed = load.run(&lab.client_launcher())?;
    let lines: Vec<String> = fs::read_to_string(queries)?.lines().map(str::to_owned).collect();
    let processes = [server.pid()];
    let seen = Loaded::new(lab, &processes, &lines)?.saturate(duration / 4)?;
    let after = Metrics::read(&lab.server)?;
    Ok(Figures {
        best: seen.answered.median(),
        cpu: Duration::from_secs_f64(seen.cpu.median() / 1e6),
        median: timed.percentile(0.5).unwrap_or_default(),
        slow: timed.percentile(0.99).unwrap_or_default(),
        hits: after.fast_path_replies() - before.fast_path_replies(),
        misses: after.userspace_replies() - before.userspace_replies(),
    })
}

/// Prints the headline figure, the table behind it, and what it means for a cell.
pub(super) fn print(interface: &Figures, userspace: &Figures) {
    let gain = interface.best / userspace.best.max(1.0);
    let headline = format!(
        "One core answers {} queries/s at the interface, {:.1} times as many as in userspace.",
        count(interface.best),
        gain
    );
    println!("{}\n", super::coloured(&headline, "1;32"));
    println!(
        "{:<16} {:>12} {:>14} {:>12} {:>12} {:>13} {:>13}",
        "", "queries/s", "CPU per query", "latency p50", "latency p99", "by interface", "by userspace",
    );
    for (label, figures) in [("fast path", interface), ("userspace only", userspace)] {
        println!(
            "{label:<16} {:>12} {:>14} {:>12} {:>12} {:>13} {:>13}",
            count(figures.best),
            microseconds(figures.cpu),
            microseconds(figures.median),
            microseconds(figures.slow),
            count(figures.hits as f64),
            count(figures.misses as f64),
        );
    }
    println!(
        "queries/s: replies of one saturated core. CPU per query: server process and receive path of its \
         interface under that load.\nlatency: round trip by dnsperf at {} queries/s. by interface, by \
         userspace: replies during the measurement.",
        count(LATENCY_RATE.into()),
    );
    let queries = CONTAINERS * QUERIES_A_CONTAINER;
    let load = |cpu: Duration| share(cpu.as_secs_f64() * f64::from(queries));
    println!(
        "\nA cell with {CONTAINERS} containers of {QUERIES_A_CONTAINER} queries/s each sends {} queries/s. That is\n\
         {:>8} of a core at the interface,\n\
         {:>8} of a core in userspace,\n\
         {:>8} of a core in bosh-dns (quoted: {} queries/s of one core, {}).",
        count(queries.into()),
        load(interface.cpu),
        load(userspace.cpu),
        load(Duration::from_secs_f64(1.0 / quoted::SATURATED)),
        count(quoted::SATURATED),
        quoted::SATURATED_ON,
    );
}

/// Formats a count or rate as a whole number with thousands separators.
fn count(value: f64) -> String {
    // From 100 on there are no decimals; smaller values are exact counts.
    if value < 100.0 { format!("{value:.0}") } else { number(value) }
}

/// Formats a share of a CPU.
pub(super) fn share(share: f64) -> String {
    format!("{} %", number(share * 100.0))
}

/// A duration in microseconds.
fn microseconds(duration: Duration) -> String {
    format!("{} µs", number(duration.as_secs_f64() * 1e6))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_integers() {
        for (value, text) in [(0.0, "0"), (7.0, "7"), (12.0, "12"), (553_490.4, "553,490")] {
            assert_eq!(count(value), text);
        }
    }
}
