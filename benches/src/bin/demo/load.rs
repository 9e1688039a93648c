//! Measures the server under load and prints the figures.

use std::{fs, path::Path, time::Duration};

use anyhow::Result;
use bosh_dns_xdp_benches::{
    dnsperf,
    lab::{Lab, SERVER_ADDRESS},
    load::Loaded,
    reference::quoted,
    report::number,
};
use whole_system_tests::{metrics::Metrics, server::Server};

/// Queries per second for latencies: a rate that both paths serve without a queue.
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

impl Figures {
    /// Returns the queries per second of a core that does nothing else.
    fn of_one_core(&self) -> f64 {
        1.0 / self.cpu.as_secs_f64().max(1e-9)
    }
}

/// Measures the running server.
pub(super) fn measure(lab: &Lab, server: &Server, queries: &Path, seconds: u64) -> Result<Figures> {
    let duration = Duration::from_secs(seconds);
    let load = dnsperf::Load {
        server: SERVER_ADDRESS,
        queries,
        duration,
        rate: Some(LATENCY_RATE),
        percentiles: true,
        edns: false,
        one_at_a_time: false,
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

/// Prints the table and its interpretation.
pub(super) fn print(interface: &Figures, userspace: &Figures) {
    println!(
        "{:<16} {:>22} {:>14} {:>14} {:>14} {:>13} {:>13}",
        "",
        "queries/s answered",
        "CPU per query",
        "latency p50",
        "latency p99",
        "by interface",
        "by userspace",
    );
    for (label, figures) in [("fast path", interface), ("userspace only", userspace)] {
        println!(
            "{label:<16} {:>22} {:>14} {:>14} {:>14} {:>13} {:>13}",
            number(figures.best),
            microseconds(figures.cpu),
            microseconds(figures.median),
            microseconds(figures.slow),
            number(figures.hits as f64),
            number(figures.misses as f64),
        );
    }
    println!(
        "queries/s answered: of one core that is asked for all that it can do, by a generator within the kernel.\nCPU per query: of the server's process and the receive path of its \
         interface, meanwhile.\nlatency: by dnsperf at {} queries/s, the way there and back included.",
        number(LATENCY_RATE.into()),
    );
    let queries = CONTAINERS * QUERIES_A_CONTAINER;
    let share = |cpu: Duration| format!("{} %", number(cpu.as_secs_f64() * f64::from(queries) * 100.0));
    println!(
        "\n== To remember\n\
         A core that does nothing else answers {} queries/s at the interface, {} in userspace.\n\
         A cell with {CONTAINERS} containers of {QUERIES_A_CONTAINER} queries/s each asks {} times a second. That is\n\
         \x20   {:>8} of a core at the interface,\n\
         \x20   {:>8} of a core in userspace,\n\
         \x20   {:>8} of a core by bosh-dns (quoted: {} queries/s of one core, {}).",
        number(interface.of_one_core()),
        number(userspace.of_one_core()),
        number(queries.into()),
        share(interface.cpu),
        share(userspace.cpu),
        share(Duration::from_secs_f64(1.0 / quoted::SATURATED)),
        number(quoted::SATURATED),
        quoted::SATURATED_ON,
    );
}

/// A duration in microseconds.
fn microseconds(duration: Duration) -> String {
    format!("{} µs", number(duration.as_secs_f64() * 1e6))
}
