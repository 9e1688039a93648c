//! Load on the server, and the table that shows what came of it.

use std::{path::Path, time::Duration};

use anyhow::Result;
use bosh_dns_xdp_benches::{
    dnsperf::Load,
    lab::{Lab, SERVER_ADDRESS},
};
use whole_system_tests::{metrics::Metrics, server::Server};

/// Queries per second at which latency and CPU are compared: what both can serve.
/// At lower rates most of the CPU goes into waking up, whoever answers.
const RATE: u32 = 50_000;

/// What the load showed.
pub(super) struct Figures {
    /// Replies per second when asked as hard as dnsperf can.
    fastest: f64,
    /// Median latency at [`RATE`].
    median: Duration,
    /// 99th percentile of latency at [`RATE`].
    slow: Duration,
    /// CPU of the server's side per query at [`RATE`]: process and receive path.
    cpu: Duration,
    /// Queries without a reply, in both runs.
    lost: u64,
    /// Replies from the interface, in both runs.
    hits: u64,
    /// Queries that went up to userspace, in both runs.
    misses: u64,
}

/// Measures the running server.
pub(super) fn measure(lab: &Lab, server: &Server, queries: &Path, seconds: u64) -> Result<Figures> {
    let launcher = lab.client_launcher();
    let mut load = Load {
        server: SERVER_ADDRESS,
        queries,
        duration: Duration::from_secs(seconds),
        rate: None,
        percentiles: false,
        edns: false,
    };
    let before = Metrics::read(&lab.server)?;
    let hard = load.run(&launcher)?;
    load.rate = Some(RATE);
    let cpu_before = lab.server_cpu(&[server.pid()])?;
    let steady = load.run(&launcher)?;
    let cpu = lab.server_cpu(&[server.pid()])? - cpu_before;
    load.percentiles = true;
    let timed = load.run(&launcher)?;
    let after = Metrics::read(&lab.server)?;
    Ok(Figures {
        fastest: hard.rate,
        median: timed.percentile(0.5).unwrap_or_default(),
        slow: timed.percentile(0.99).unwrap_or_default(),
        cpu: cpu / u32::try_from(steady.completed.max(1))?,
        lost: hard.lost() + steady.lost() + timed.lost(),
        hits: after.fast_path_replies() - before.fast_path_replies(),
        misses: after.userspace_replies() - before.userspace_replies(),
    })
}

/// One small table.
pub(super) fn print_table(rows: &[(&str, &Figures)]) {
    println!(
        "{:<16} {:>12} {:>14} {:>14} {:>16} {:>12} {:>12} {:>6}",
        "",
        "queries/s",
        "latency p50",
        "latency p99",
        "CPU per query",
        "by interface",
        "by userspace",
        "lost"
    );
    for (label, figures) in rows {
        let Figures { fastest, median, slow, cpu, lost, hits, misses } = figures;
        println!(
            "{label:<16} {fastest:>12.0} {:>14} {:>14} {:>16} {hits:>12} {misses:>12} {lost:>6}",
            microseconds(*median),
            microseconds(*slow),
            microseconds(*cpu),
        );
    }
    println!(
        "queries/s: as many as dnsperf could send and get answered on one core, so partly its own limit.\n\
         latency and CPU at {RATE} queries/s; CPU: the server's process and the receive path of its interface."
    );
}

/// A duration in microseconds.
fn microseconds(duration: Duration) -> String {
    format!("{:.1} µs", duration.as_secs_f64() * 1e6)
}
