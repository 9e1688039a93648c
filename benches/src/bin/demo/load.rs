//! Load on the server, and what a newcomer should remember of it.

use std::{path::Path, time::Duration};

use anyhow::Result;
use bosh_dns_xdp_benches::{
    dnsperf, kxdpgun,
    lab::{Lab, SERVER_ADDRESS},
    reference::quoted,
    report::number,
};
use whole_system_tests::{metrics::Metrics, server::Server};

/// Queries per second at which latency is compared: what both serve without a queue.
const LATENCY_RATE: u32 = 20_000;

/// Rates that are offered by kxdpgun, from one core, to find what the server's core answers
/// at most: the program is best at the highest, userspace somewhere between.
const OFFERED: [u32; 6] = [250_000, 350_000, 500_000, 700_000, 1_400_000, 2_800_000];

/// Containers of a dense Diego cell.
const CONTAINERS: u32 = 250;

/// Queries per second of each: ten new connections, A and AAAA.
const QUERIES_A_CONTAINER: u32 = 20;

/// What the load showed.
pub(super) struct Figures {
    /// Most replies per second that came of a load.
    best: f64,
    /// CPU of the server's side for each of them: its process and its interface's receive path.
    cpu: Duration,
    /// Median latency at [`LATENCY_RATE`].
    median: Duration,
    /// 99th percentile of latency at [`LATENCY_RATE`].
    slow: Duration,
    /// Replies from the interface.
    hits: u64,
    /// Replies from userspace.
    misses: u64,
}

impl Figures {
    /// Queries per second of a core that does nothing else.
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
    let (mut best, mut cpu) = (0.0, Duration::ZERO);
    for rate in OFFERED {
        let used = lab.server_cpu(&[server.pid()])?;
        let seen = kxdpgun::Load { queries, rate, batch: 32, duration: duration / 2 }.run(lab)?;
        let answered = seen.received as f64 / (duration / 2).as_secs_f64();
        // Past its best rate a server answers less: the queue that nobody reads eats the core.
        if answered < best * 0.8 {
            break;
        }
        if answered > best {
            best = answered;
            let used = lab.server_cpu(&[server.pid()])? - used;
            cpu = used.div_f64(seen.received.max(1) as f64);
        }
    }
    let after = Metrics::read(&lab.server)?;
    Ok(Figures {
        best,
        cpu,
        median: timed.percentile(0.5).unwrap_or_default(),
        slow: timed.percentile(0.99).unwrap_or_default(),
        hits: after.fast_path_replies() - before.fast_path_replies(),
        misses: after.userspace_replies() - before.userspace_replies(),
    })
}

/// The table, and what it means.
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
        "queries/s answered: kxdpgun offers ever more from one core until no more is answered; where the generator is at \
         its limit first, that is the generator's.\nCPU per query: of the server's process and the receive path of its \
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
