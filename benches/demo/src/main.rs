//! `cargo xtask demo`: the main job on real input, from end to end.
//!
//! Two network namespaces joined by veth; the real server in one, dig and
//! dnsperf in the other.

mod arguments;

use std::{
    fs,
    io::IsTerminal as _,
    net::{IpAddr, Ipv4Addr},
    path::PathBuf,
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::Parser as _;
use hickory_proto::rr::RecordType;
use serde_json::{Value, json};
use test_lab::{
    client, dnsperf,
    figures::{number, quoted},
    foundation::Foundation,
    interrupt,
    lab::{self, Lab, SERVER_ADDRESS, SERVER_CPU, SERVER_INTERFACE},
    load::Loaded,
    metrics::{Metrics, wait_for_fast_path, wait_for_metrics},
    noise::{self, Measured, NOISY},
    process::{Kept, capture},
    server::{self, Server},
};

use self::arguments::Arguments;

/// Port of the demo's recursor inside the server's namespace.
const RECURSOR_PORT: u16 = 5353;

/// A name outside BOSH, resolved by the demo's recursor.
const OUTSIDE_NAME: &str = "www.example.com";
/// The recursor's answer for [`OUTSIDE_NAME`].
const OUTSIDE_ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 80);

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let shown = interrupt::install().and_then(|()| show(&arguments));
    match shown {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) if interrupt::requested() => ExitCode::from(130),
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the steps of the demo in order.
fn show(arguments: &Arguments) -> Result<()> {
    let mut foundation = match &arguments.records {
        Some(records) => Foundation::read(records, arguments.aliases.as_deref())?,
        None => Foundation::generate(arguments.instances)?,
    };
    headline("Two network namespaces joined by veth, the server in one of them");
    let lab = Lab::split()?;
    let _recursor = start_recursor(&lab)?;
    println!(
        "client 169.254.0.1 ── veth ── {SERVER_ADDRESS} server ── 127.0.0.1:{RECURSOR_PORT} recursor (dnsmasq)"
    );
    println!("{}", summary(&foundation));

    let running = start_server(&lab, &foundation, &json!({"mode": arguments.mode}))?;
    for line in running
        .log()
        .lines()
        .filter(|line| line.contains(SERVER_INTERFACE))
    {
        println!("server's log: {line}");
    }

    headline("Look-ups with dig: which path answers?");
    println!(
        "(From the server's counters: bosh_dns_xdp_fast_path_packets_total{{outcome=\"hit\"}} on its metrics \
         port.)"
    );
    for (name, record_type) in examples(&foundation) {
        look_up(&lab, &name, record_type)?;
    }
    look_up(&lab, OUTSIDE_NAME, "A")?;

    headline("An instance is recreated: a new records.json");
    replace_records(&lab, &running, &mut foundation)?;

    compare_paths(&lab, &running, &foundation, arguments.seconds)?;
    headline("Next");
    println!(
        "Try it with your own records (no root needed):\n    target/release/bosh-dns-xdp try --records records.json\n\
         Then read docs/one-machine.md. The demo removes everything it created."
    );
    Ok(())
}

/// Measures the running server beside one without the fast path, for this time on each path.
fn compare_paths(lab: &Lab, running: &Server, foundation: &Foundation, seconds: u64) -> Result<()> {
    headline("Load: latency by dnsperf on both paths in turn, then one saturated core");
    // Beside the first server: latencies that are measured one after the other compare two moments
    // of the machine.
    let plain_lab = Lab::split()?;
    let _plain_recursor = start_recursor(&plain_lab)?;
    let plain = start_server(&plain_lab, foundation, &json!({"mode": "off"}))?;
    let subjects = [
        Subject::new(lab, running, foundation)?,
        Subject::new(&plain_lab, &plain, foundation)?,
    ];
    let Measured { value, noise } = noise::undisturbed(
        SERVER_CPU,
        || measure_in_turn(&subjects, seconds),
        |share| {
            let text = format!(
                "other programs took {} of CPU {SERVER_CPU}: measuring again",
                shown_share(share)
            );
            println!("{}", yellow(&text));
        },
    )?;
    let [with, without] = value;
    print_comparison(&with, &without);
    if noise >= NOISY {
        let text = format!(
            "These figures are unreliable: in every attempt other programs took up to {} of CPU {SERVER_CPU}.\n\
             Stop them and run the demo again.",
            shown_share(noise)
        );
        println!("\n{}", yellow(&text));
    }
    Ok(())
}

/// Starts the server in its namespace, on its CPU.
fn start_server(lab: &Lab, foundation: &Foundation, xdp: &Value) -> Result<Server> {
    let folder = server::folder(&foundation.records, foundation.aliases.as_deref())?;
    let mut settings = json!({"interfaces": [SERVER_INTERFACE, "lo"]});
    server::merge(&mut settings, xdp);
    let extra = json!({
        "disable_recursors": false,
        "recursors": [format!("127.0.0.1:{RECURSOR_PORT}")],
        "metrics": {"enabled": true},
        "xdp": settings,
    });
    let server = Server::start(
        Some(&lab.server),
        folder,
        (SERVER_ADDRESS, 53).into(),
        &extra,
    )?;
    if xdp["mode"] == "off" {
        wait_for_metrics(&lab.server)?;
    } else {
        wait_for_fast_path(&lab.server)?;
    }
    lab::pin(server.pid(), SERVER_CPU)?;
    lab.pin_napi()?;
    Ok(server)
}

/// Starts dnsmasq as the recursor that names outside BOSH are forwarded to.
fn start_recursor(lab: &Lab) -> Result<Kept> {
    // Without any of this machine's configuration, which could answer the names of the demo.
    let mut command = lab.server.command("dnsmasq")?;
    command
        .args([
            "--keep-in-foreground",
            "--no-resolv",
            "--no-hosts",
            "--bind-interfaces",
            "--conf-file=/dev/null",
        ])
        .args(["--listen-address=127.0.0.1", "--pid-file="])
        .arg(format!("--port={RECURSOR_PORT}"))
        .arg(format!("--address=/{OUTSIDE_NAME}/{OUTSIDE_ADDRESS}"))
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    Kept::spawn(&mut command)
}

/// Looks a name up with dig until the interface answers: the second query finds it published, unless it
/// is a probe.
fn look_up(lab: &Lab, name: &str, record_type: &str) -> Result<()> {
    for _ in 0..3 {
        let before = Metrics::read(&lab.server)?;
        let server = format!("@{SERVER_ADDRESS}");
        let mut dig = Command::new("ip");
        dig.args([
            "netns",
            "exec",
            lab.client.name(),
            "dig",
            &server,
            name,
            record_type,
        ]);
        // One try: a repeated query could take another path than the one that is shown.
        let answer = capture(dig.args(["+noall", "+comments", "+answer", "+time=2", "+tries=1"]))?;
        let hit = Metrics::read(&lab.server)?.fast_path_replies() > before.fast_path_replies();
        let path = if hit {
            coloured("the interface (BPF)", "32")
        } else {
            "userspace".to_owned()
        };
        let status = answer
            .split("status: ")
            .nth(1)
            .and_then(|rest| rest.split(',').next())
            .unwrap_or("?");
        let addresses: Vec<&str> = answer
            .lines()
            .filter(|line| !line.starts_with(';'))
            .filter_map(|line| line.split_whitespace().nth(4))
            .collect();
        let shown = match addresses.len() {
            0 => "no addresses".to_owned(),
            1..=3 => addresses.join(" "),
            count => format!("{} … ({count} addresses)", addresses[..2].join(" ")),
        };
        println!("dig {name} {record_type}\n    {status}, {shown}\n    answered by {path}");
        if hit || name == OUTSIDE_NAME {
            break;
        }
    }
    Ok(())
}

/// Moves an instance to another address, replaces records.json by renaming, and queries until the
/// answer has changed.
fn replace_records(lab: &Lab, server: &Server, foundation: &mut Foundation) -> Result<()> {
    let change = foundation.recreate_one(Ipv4Addr::new(10, 255, 255, 1))?;
    println!(
        "{} moves from {} to {}",
        change.name, change.from, change.to
    );
    let file = server.folder.path().join("records.json");
    let next = file.with_extension("next");
    fs::write(&next, &foundation.records)?;
    let query = client::query(&change.name, RecordType::A, Some(1232))?;
    let started = Instant::now();
    // The time begins before, because noticing the file is a part of it.
    fs::rename(&next, &file)?;
    let asked = lab.client.run(|| -> Result<(u32, Duration)> {
        let wanted = IpAddr::V4(change.to);
        for asked in 1.. {
            let reply = client::ask((SERVER_ADDRESS, 53).into(), &query)?;
            if client::addresses(&reply).contains(&wanted) {
                return Ok((asked, started.elapsed()));
            }
            if started.elapsed() > Duration::from_secs(5) {
                break;
            }
        }
        anyhow::bail!("the new address was not served within 5 s")
    })??;
    let metrics = Metrics::read(&lab.server).context("metrics after the change")?;
    println!(
        "first new answer after {:.1} ms (query {} since the change); fast path replies so far: {}",
        asked.1.as_secs_f64() * 1e3,
        asked.0,
        metrics.fast_path_replies(),
    );
    Ok(())
}

/// Prints a headline above a part of the demo.
fn headline(text: &str) {
    println!("\n{}", coloured(&format!("== {text}"), "1"));
}

fn yellow(text: &str) -> String {
    coloured(text, "33")
}

/// Returns the text with these SGR parameters (ECMA-48), if standard output is a terminal and `NO_COLOR`
/// is not set.
fn coloured(text: &str, parameters: &str) -> String {
    // As no-color.org defines it: an empty value counts as none.
    let is_set = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    if is_set || !std::io::stdout().is_terminal() {
        return text.to_owned();
    }
    format!("\x1b[{parameters}m{text}\x1b[0m")
}

/// Returns one line about the size of a foundation.
fn summary(foundation: &Foundation) -> String {
    format!(
        "foundation: {} instances, {} aliases, {} names to publish",
        foundation.snapshot.instances().len(),
        foundation.snapshot.alias_count(),
        foundation.names().count(),
    )
}

/// Returns a few names worth looking up, with their types.
fn examples(foundation: &Foundation) -> Vec<(String, &'static str)> {
    let names: Vec<String> = foundation.names().map(|name| name.to_string()).collect();
    let first = |wanted: &dyn Fn(&str) -> bool| names.iter().find(|name| wanted(name)).cloned();
    let group = first(&|name| name.starts_with("q-s0.q-g"));
    let alias = first(&|name| !name.ends_with(".bosh.") && !name.starts_with("q-"));
    let instance = names
        .iter()
        .rev()
        .find(|name| !name.starts_with("q-"))
        .cloned();
    // A filter that is not published in advance: learned at the first query.
    let learned = group
        .as_ref()
        .map(|name| name.replacen("q-s0", "q-i0s0", 1));
    let missing = group
        .as_ref()
        .map(|name| name.replacen("q-s0", "q-i9999", 1));
    [
        (alias, "A"),
        (group.clone(), "A"),
        (group, "AAAA"),
        (instance, "A"),
        (learned, "A"),
        (missing, "A"),
    ]
    .into_iter()
    .filter_map(|(name, record_type)| Some((name?, record_type)))
    .collect()
}

/// Returns lines for dnsperf: A and AAAA of every published name except single instances.
fn query_lines(foundation: &Foundation) -> String {
    let names = foundation.names().map(|name| name.to_string());
    let shared = names.filter(|name| name.starts_with("q-s0.") || !name.ends_with(".bosh."));
    shared
        .flat_map(|name| [format!("{name} A\n"), format!("{name} AAAA\n")])
        .collect()
}

/// Queries per second for latency measurements, low enough for both paths to avoid queues.
const LATENCY_RATE: u32 = 20_000;

/// Containers of a dense Diego cell.
const CONTAINERS: u32 = 250;

/// Queries per second of each container: ten new connections, A and AAAA.
const QUERIES_A_CONTAINER: u32 = 20;

/// Results of the load.
struct Figures {
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

/// Rounds of latency on each path. Their medians are the result, so that a disturbance of the machine, which lasts
/// for one or two rounds, affects neither path.
const ROUNDS: usize = 5;

/// A running server to measure.
struct Subject<'a> {
    lab: &'a Lab,
    server: &'a Server,
    queries: PathBuf,
}

impl<'a> Subject<'a> {
    fn new(lab: &'a Lab, server: &'a Server, foundation: &Foundation) -> Result<Self> {
        let queries = server.folder.path().join("queries");
        fs::write(&queries, query_lines(foundation))?;
        Ok(Self {
            lab,
            server,
            queries,
        })
    }

    /// Measures the latency of a round: its median and 99th percentile.
    fn latency(&self, duration: Duration) -> Result<[Duration; 2]> {
        let load = dnsperf::Load {
            rate: Some(LATENCY_RATE),
            percentiles: true,
            ..dnsperf::Load::new(&self.queries, duration)
        };
        let timed = load.run(&self.lab.client_launcher())?;
        Ok([0.5, 0.99].map(|share| timed.percentile(share).unwrap_or_default()))
    }

    /// Measures a saturated core, and adds the latencies of the rounds.
    fn figures(&self, duration: Duration, rounds: &[[Duration; 2]]) -> Result<Figures> {
        let text = fs::read_to_string(&self.queries)?;
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        let processes = [self.server.pid()];
        let seen = Loaded::new(self.lab, &processes, &lines, None)?.saturate(duration)?;
        // Both begin at zero with the server.
        let replies = Metrics::read(&self.lab.server)?;
        let [median, slow] = medians(rounds);
        Ok(Figures {
            best: seen.answered.median(),
            cpu: Duration::from_secs_f64(seen.cpu.median() / 1e6),
            median,
            slow,
            hits: replies.fast_path_replies(),
            misses: replies.userspace_replies(),
        })
    }
}

/// Measures both servers: latency in rounds, on each path in turn, then a saturated core.
fn measure_in_turn(subjects: &[Subject<'_>; 2], seconds: u64) -> Result<[Figures; 2]> {
    let duration = Duration::from_secs(seconds);
    let round = (duration / ROUNDS as u32).max(Duration::from_secs(1));
    let mut rounds = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (subject, rounds) in subjects.iter().zip(&mut rounds) {
            rounds.push(subject.latency(round)?);
        }
    }
    let [interface, userspace] = subjects;
    Ok([
        interface.figures(duration / 4, &rounds[0])?,
        userspace.figures(duration / 4, &rounds[1])?,
    ])
}

/// Returns the median of each figure over the rounds.
fn medians(rounds: &[[Duration; 2]]) -> [Duration; 2] {
    [0, 1].map(|figure| {
        let mut all: Vec<Duration> = rounds.iter().map(|round| round[figure]).collect();
        all.sort_unstable();
        all.get(all.len() / 2).copied().unwrap_or_default()
    })
}

/// Prints the headline figure, the table behind it, and what it means for a cell.
fn print_comparison(interface: &Figures, userspace: &Figures) {
    let gain = interface.best / userspace.best.max(1.0);
    let headline = format!(
        "One core answers {} queries/s at the interface, {:.1} times as many as in userspace.",
        count(interface.best),
        gain
    );
    println!("{}\n", coloured(&headline, "1;32"));
    println!(
        "{:<16} {:>12} {:>14} {:>12} {:>12} {:>13} {:>13}",
        "",
        "queries/s",
        "CPU per query",
        "latency p50",
        "latency p99",
        "by interface",
        "by userspace",
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
         interface under that load.\nlatency: round trip by dnsperf at {} queries/s, medians of {ROUNDS} rounds on both \
         paths in turn. by interface, by userspace: replies since the server's start.",
        count(LATENCY_RATE.into()),
    );
    let queries = CONTAINERS * QUERIES_A_CONTAINER;
    let load = |cpu: Duration| shown_share(cpu.as_secs_f64() * f64::from(queries));
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
    if value < 100.0 {
        format!("{value:.0}")
    } else {
        number(value)
    }
}

fn shown_share(share: f64) -> String {
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
    fn disturbed_rounds_count_little() {
        let round = |median: u64, slow: u64| [median, slow].map(Duration::from_micros);
        // Two of five rounds were disturbed.
        let rounds = [
            round(20, 40),
            round(90, 900),
            round(21, 41),
            round(80, 700),
            round(19, 39),
        ];
        assert_eq!(medians(&rounds), round(21, 41));
    }

    #[test]
    fn counts_are_integers() {
        for (value, text) in [(0.0, "0"), (7.0, "7"), (12.0, "12"), (553_490.4, "553,490")] {
            assert_eq!(count(value), text);
        }
    }
}
