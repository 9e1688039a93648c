//! `cargo xtask bench`: measures this server, its peers and the bare reflector in one run on one
//! machine, and writes the report.

mod arguments;
mod containers;
mod flood;
mod forwarding;
mod interfaces;
mod life;
mod one_core;
mod part;
mod subject;
mod traffic;
mod types;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use bosh_dns_xdp_benches::{
    echo,
    figures::quoted,
    is_wanted, lab, page_cache,
    report::{Report, number, titles},
    servers::{Forwarder, Peer},
    yardstick::Hook,
};
use clap::Parser as _;
use whole_system_tests::{interrupt, server};

use self::{
    arguments::Arguments,
    part::{Measure, Part},
    subject::{
        Extra,
        Subject::{self, Constant, Ours, Reflector, Skeleton},
    },
};

/// The amount of measuring.
struct Plan {
    /// Rounds; each subject is measured once per round.
    rounds: usize,
    /// Duration of one measurement.
    duration: Duration,
    /// Turns of each subject on a saturated core, in each round.
    turns: usize,
    /// Whether `--quick` is set.
    quick: bool,
    /// Path of bosh-dns's binary.
    reference: Option<PathBuf>,
    /// Other builds of the server to compare with, and the mode of the fast path.
    builds: Vec<Subject>,
    /// Texts, one of which must be in a subject's label; empty for all subjects.
    wanted: Vec<String>,
}

impl Plan {
    /// Returns `few` if the run is quick, else `many`.
    fn pick<T: Clone>(&self, few: &[T], many: &[T]) -> Vec<T> {
        if self.quick { few } else { many }.to_vec()
    }

    /// Returns the builds to compare, or these subjects if there is only one build.
    fn builds_or(&self, subjects: &[Subject]) -> Vec<Subject> {
        if self.builds.is_empty() {
            return subjects.to_vec();
        }
        self.builds.clone()
    }

    /// Returns the subjects, and bosh-dns if its binary is given.
    fn with_reference(&self, subjects: &[Subject]) -> Vec<Subject> {
        let mut all = subjects.to_vec();
        all.extend(self.reference.clone().map(Subject::Reference));
        all
    }
}

/// Titles of the figures in the summary.
const MAIN: [&str; 5] = [
    titles::SATURATED,
    "Latency at 20,000 queries/s, p99",
    titles::SCALE,
    "Throughput of other traffic with the fast path",
    "A cell of containers: latency, p99",
];

const KNOT: Subject = Subject::Peer(Peer::Knot);
const NSD: Subject = Subject::Peer(Peer::Nsd);
const UNBOUND: Subject = Subject::Peer(Peer::Unbound);
const DNSMASQ: Subject = Subject::Peer(Peer::Dnsmasq);
const AUTHORITATIVE: [Subject; 3] = [Subject::Peer(Peer::KnotXdp), KNOT, NSD];

/// The parts in the order of measuring.
static PARTS: [Part; 13] = [
    Part {
        name: "saturated",
        about: "1,000 instances; group names, aliases and long forms at random, A, no EDNS. A generator in the \
                kernel, on the other core, offers more than the server's core can answer, or the load at which \
                it answers most; replies are counted, and freed, where they are sent. The rate is replies per \
                second of that core's CPU time; loads under which it slept between packets do not count. The \
                bare reflector sends an empty reply; the constant reflector sends the mean number of answers \
                without a look-up, which is the minimum cost of any answer. The skeleton is our program without the jobs \
                that a mere lookup could do without: checking checksums and sender, comparing the name, choosing an \
                order, and counting. The socket echo does the same in \
                userspace, with the server's batches and socket options: the minimum cost behind sockets.",
        axis: "",
        points: |_| vec![String::new()],
        ordered: false,
        quantities: &[
            (MAIN[0], "queries/s"),
            ("CPU utilisation of that core", "%"),
        ],
        subjects: |plan| {
            let of = |hook, mode| [Reflector(hook), Constant(hook), Skeleton(hook), Ours(mode)];
            let ours = [
                &of(Hook::Tc, "tc")[..],
                &of(Hook::Native, "native"),
                &[Ours("off"), Subject::Echo],
            ]
            .concat();
            let few = [&ours[..], &AUTHORITATIVE].concat();
            plan.with_reference(&plan.pick(&few, &[&few[..], &[UNBOUND, DNSMASQ]].concat()))
        },
        measure: Measure::Together(one_core::saturated),
    },
    Part {
        name: "forms",
        about: "The same load over IPv6, with EDNS (an OPT of 1,232 bytes), in frames with as little room behind them \
                as a socket leaves (256 bytes instead of 3,000), and while records.json is replaced five times per second, each time with another address of one of 1,000 instances; the CPU time of \
                reading and publishing it counts.",
        axis: "load",
        points: one_core::points_of_forms,
        ordered: false,
        quantities: &[
            (
                "Queries per second of one saturated core by form of the load",
                "queries/s",
            ),
            ("By form of the load: CPU utilisation of that core", "%"),
            ("By form of the load: records.json read", "reloads/s"),
        ],
        subjects: |_| {
            let ours = ["tc", "native", "off"].map(Ours);
            [&ours[..], &AUTHORITATIVE].concat()
        },
        measure: Measure::Together(one_core::forms),
    },
    Part {
        name: "scale",
        about: "As many names as instances, of all forms including single instances, all published (max_names is \
                raised accordingly); the constant reflector sends the mean number of answers of these names. \
                Zipf: the name of rank n is queried in proportion to 1/n.",
        axis: "names, order",
        points: |plan| one_core::points(plan, &one_core::sizes(plan)),
        ordered: false,
        quantities: &[(MAIN[2], "queries/s")],
        subjects: |plan| {
            let few = [Ours("tc"), Constant(Hook::Tc), Ours("off")];
            let more = [Ours("native"), Constant(Hook::Native)];
            plan.pick(&few, &[&few[..], &more].concat())
        },
        measure: Measure::Together(|plan, of, to| {
            one_core::by_shape(plan, of, &one_core::sizes(plan), to)
        }),
    },
    Part {
        name: "cost",
        about: "1,000 instances, group names, aliases and long forms, A, no EDNS, 100,000 queries per second. CPU \
                time of the server's side (its processes and the receive path of its interface, threaded NAPI on \
                its own core) per reply. A server that cannot keep up is measured at the rate it answers. Sent \
                one by one, each query wakes the NAPI thread, which dominates its cost for every server, so \
                costs are comparable only within one regime. The saturated core, at its own rate, never sleeps.",
        axis: "how 100,000 queries/s come",
        points: one_core::points_of_cost,
        ordered: false,
        quantities: &[
            ("CPU per query at 100,000 queries/s", "µs"),
            ("Packets per wake-up at 100,000 queries/s", "packets"),
        ],
        subjects: |plan| {
            let ours = [
                Reflector(Hook::Native),
                Ours("tc"),
                Ours("native"),
                Ours("off"),
            ];
            let few = [&ours[..], &AUTHORITATIVE, &[UNBOUND]].concat();
            plan.with_reference(&plan.pick(&few, &[&few[..], &[DNSMASQ]].concat()))
        },
        measure: Measure::Each(one_core::cost),
    },
    Part {
        name: "latency",
        about: "Measured by dnsperf over an untuned veth.",
        axis: "",
        points: |_| vec![String::new()],
        ordered: false,
        quantities: &[
            ("Latency at 20,000 queries/s, p50", "µs"),
            (MAIN[1], "µs"),
            ("Latency at 20,000 queries/s, p99.9", "µs"),
        ],
        subjects: |plan| {
            let few = [
                Reflector(Hook::Tc),
                Ours("tc"),
                Ours("off"),
                KNOT,
                NSD,
                UNBOUND,
            ];
            plan.with_reference(&plan.pick(&few, &[&few[..], &[DNSMASQ]].concat()))
        },
        measure: Measure::Each(one_core::latency),
    },
    Part {
        name: "forwarding",
        about: "All forward to one NSD, which shares a core with dnsperf; each forwarder has its own core, over an \
                untuned veth. Cached: 1,000 names, all queried before. Uncached: every name is new; the cache is \
                on unless stated otherwise, so storing the answer is part of the cost.",
        axis: "",
        points: |_| forwarding::KINDS.map(str::to_owned).to_vec(),
        ordered: false,
        quantities: &[
            (titles::FORWARDED, "µs"),
            ("Latency of forwarded queries at 2,000/s, p50", "µs"),
            ("Latency of forwarded queries at 2,000/s, p99", "µs"),
            ("Highest rate of forwarded queries", "queries/s"),
        ],
        subjects: |plan| {
            let mut subjects = Vec::new();
            for cache in [true, false] {
                for build in plan.builds_or(&[Ours("off")]) {
                    subjects.extend(build.forwarding(cache));
                }
            }
            if plan.builds.is_empty() {
                let peers = [Forwarder::Unbound, Forwarder::Dnsmasq];
                subjects.extend(peers.map(Subject::Forwarder));
            }
            subjects
        },
        measure: Measure::Each(forwarding::forwarding),
    },
    Part {
        name: "outside",
        about: "1,000 instances; 300 hot outside names, all queried before; every cold name is new. The mix has \
                70 % fleet names, 25 % hot and 5 % cold outside names. All forward to one NSD. CPU time of the \
                server's side, including the receive path of its interface (threaded NAPI); latencies over an \
                untuned veth. A saturated core is loaded by a generator in the kernel.",
        axis: "names and queries/s",
        points: |_| forwarding::LOADS.iter().map(|load| load.label()).collect(),
        ordered: false,
        quantities: &[
            ("Fleet and outside names: CPU per query", "µs"),
            (
                "Fleet and outside names: CPU per query of a saturated core",
                "µs",
            ),
            ("Fleet and outside names: replies from the interface", "%"),
            ("Fleet and outside names: latency, p50", "µs"),
            ("Fleet and outside names: latency, p99", "µs"),
        ],
        subjects: |_| {
            let cached = Forwarder::Ours { cache: true };
            [
                Forwarder::Interface,
                cached,
                Forwarder::Unbound,
                Forwarder::Dnsmasq,
                Forwarder::KnotResolver,
            ]
            .map(Subject::Forwarder)
            .to_vec()
        },
        measure: Measure::Each(forwarding::outside),
    },
    Part {
        name: "flood",
        about: "One client queries 15,000 new names per second; another client queries 100 new names and 100 names \
                of a fleet of 1,000 instances per second. Both servers have one core and their default limits; the \
                recursor shares that core, and the clients share the other one.",
        axis: "load",
        points: |_| flood::points(),
        ordered: false,
        quantities: &[
            ("Flood: forwarded names of another client, answered", "%"),
            ("Flood: forwarded names of another client, p99", "ms"),
            ("Flood: names of the fleet, p99", "ms"),
            ("Flood: peak of resident memory", "MiB"),
        ],
        subjects: |_| {
            [Forwarder::Fleet, Forwarder::Unbound]
                .map(Subject::Forwarder)
                .to_vec()
        },
        measure: Measure::Each(flood::measure),
    },
    Part {
        name: "footprint",
        about: "From process start to the first answer; with the fast path, to the first answer from the interface \
                (userspace answers meanwhile). On one CPU. Resident memory includes mapped BPF maps, after some \
                thousand queries and a pause. The maps' memory is as accounted by the kernel (memlock); they are \
                allocated for max_names at startup, so a growing fleet needs no further memory.",
        axis: "instances",
        points: |plan| {
            let sizes = life::sizes(plan);
            sizes.iter().map(|&size| number(size as f64)).collect()
        },
        ordered: true,
        quantities: &[
            (titles::START, "ms"),
            (titles::START_CPU, "ms"),
            (titles::RSS, "MiB"),
            (titles::PSS, "MiB"),
            ("Memory of the BPF maps by size", "MiB"),
        ],
        subjects: |plan| plan.builds_or(&[Ours("tc"), Ours("off")]),
        measure: Measure::Each(life::footprint),
    },
    Part {
        name: "reload",
        about: "One instance gets another address, and one client queries its name continuously: a name that it \
                queries at every reload (hot), or one that was never queried before (cold). This server: \
                records.json is renamed into place and noticed. Peers: the zone files are already in place and \
                SIGHUP is sent; writing and noticing them is not counted. CPU time is that of all processes within \
                two seconds, without that of two idle ones.",
        axis: "instances",
        points: |_| life::RELOAD_SIZES.map(|size| number(size as f64)).to_vec(),
        ordered: true,
        quantities: &[
            (titles::HOT, "ms"),
            (titles::COLD, "ms"),
            ("Slowest query during that reload", "ms"),
            (titles::RELOAD_CPU, "ms"),
        ],
        subjects: |plan| plan.builds_or(&[Ours("tc"), KNOT, NSD]),
        measure: Measure::Each(life::reload),
    },
    Part {
        name: "traffic",
        about: "iperf3 with one core per end, GRO and TSO on, no DNS load, in alternating turns over the same \
                interfaces: the cost of passing every packet through the program, which is attached to both.",
        axis: "traffic",
        points: |_| traffic::KINDS.iter().map(|kind| kind.label()).collect(),
        ordered: false,
        quantities: &[
            (MAIN[3], "%"),
            ("Other traffic: bulk TCP", "Gbit/s"),
            (
                "Other traffic: datagrams of another UDP service",
                "packets/s",
            ),
        ],
        subjects: |_| vec![Subject::Nothing, Ours("auto")],
        measure: Measure::Together(traffic::measure),
    },
    Part {
        name: "cell",
        about: "250 containers with silk's interfaces and rules send 20 queries per second each, through their own \
                interfaces and from a new port each; then a burst of 50,000 queries in a second. One process \
                offers the load; CPU time is the whole machine's, including that process. Creation: interface, \
                silk's rules and the bandwidth plugin's qdiscs, ten per second, in alternating blocks of ten containers with and \
                without the server, which send queries as soon as they exist.",
        axis: "",
        points: |_| vec![String::new()],
        ordered: false,
        quantities: &[
            ("A cell of containers: latency, p50", "µs"),
            (MAIN[4], "µs"),
            ("A cell of containers: CPU time per query", "µs"),
            ("A cell of containers: connections tracked", "entries"),
            ("A cell of containers: answers to the burst", "%"),
            ("A cell of containers: p99 of the burst", "ms"),
            ("A cell of containers: creation of a container", "ms"),
        ],
        subjects: |_| {
            vec![
                Subject::Nothing,
                Ours("off"),
                Ours("auto"),
                UNBOUND,
                DNSMASQ,
            ]
        },
        measure: Measure::Each(containers::measure),
    },
    Part {
        name: "interfaces",
        about: "500 veths that have been quiet begin to query, six times each. The server's log dates each attach, whose \
                whole duration counts as holding the RTNL lock. Probes are those per second and interface of half a \
                minute in which each sends several queries per second, after a minute without any change.",
        axis: "",
        points: |_| vec![String::new()],
        ordered: false,
        quantities: &[
            (titles::SERVED, "s"),
            (titles::RTNL, "ms"),
            (titles::PROBES, "Hz"),
        ],
        subjects: |_| vec![Ours("tc")],
        measure: Measure::Each(interfaces::measure),
    },
];

/// Also measured with `--against`, for the builds side by side.
static TYPES: Part = Part {
    name: "types",
    about: "The queries of gRPC applications at 20,000 per second: A, AAAA, SRV (`_grpclb._tcp` of groups), TXT and \
            HTTPS at equal rates, for groups of a fleet of 1,000 instances, and for Consul services of 3, 20 and \
            100 instances. CPU time of the server's side, including the receive path of its interface (threaded \
            NAPI); latencies over an untuned veth.",
    axis: "targets",
    points: |_| types::TARGETS.map(str::to_owned).to_vec(),
    ordered: false,
    quantities: &[
        ("Mix of types: replies from the interface", "%"),
        ("Mix of types: CPU per query", "µs"),
        ("Mix of types: latency, p50", "µs"),
        ("Mix of types: latency, p99", "µs"),
    ],
    subjects: |plan| plan.builds_or(&[Ours("tc"), Ours("off")]),
    measure: Measure::Each(types::measure),
};

/// Also measured with `--against`, whose builds have no extras: what is off must cost nothing.
static EXTRAS: Part = Part {
    name: "extras",
    about: "1,000 instances; group names, aliases and long forms at random, A, no EDNS, so that no query has a cookie. \
            dnstap logs to a file: every query of userspace, one in 100 of interfaces.",
    axis: "",
    points: |_| vec![String::new()],
    ordered: false,
    quantities: &[
        ("Saturated core with what is off by default", "queries/s"),
        (
            "With what is off by default: CPU utilisation of that core",
            "%",
        ),
    ],
    subjects: |plan| {
        let modes = match &plan.builds[..] {
            [] => vec!["tc", "off"],
            builds => builds.iter().find_map(Subject::mode).into_iter().collect(),
        };
        let mut subjects = Vec::new();
        for mode in modes {
            subjects.push(Ours(mode));
            subjects.extend(Extra::ALL.map(|extra| Subject::With(extra, mode)));
        }
        // The first build is this one, which is there already.
        subjects.extend_from_slice(plan.builds.get(1..).unwrap_or_default());
        subjects
    },
    measure: Measure::Together(one_core::extras),
};

/// `--against`: a mechanism without a gain beyond the spread at any point should be removed.
static AGAINST: Part = Part {
    name: "against",
    about: "Builds take turns of a quarter of a second; queries answered per second of the core's CPU time.",
    axis: "queried names, instances, order",
    points: |plan| one_core::points(plan, &one_core::shapes(plan)),
    ordered: false,
    quantities: &[("Builds side by side, by saturated core", "queries/s")],
    subjects: |plan| plan.builds.clone(),
    measure: Measure::Together(|plan, of, to| {
        one_core::by_shape(plan, of, &one_core::shapes(plan), to)
    }),
};

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match measure_or_echo(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        // 128 and SIGINT, as shells report a program that the signal has ended.
        Err(_) if interrupt::requested() => ExitCode::from(130),
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn measure_or_echo(arguments: &Arguments) -> Result<()> {
    if let Some(answers) = arguments.echo {
        // Ended by SIGTERM.
        match echo::serve(&echo::at_server()?, answers)? {}
    }
    interrupt::install()?;
    run(arguments)
}

/// Measures all parts and writes the report.
fn run(arguments: &Arguments) -> Result<()> {
    // First, so that a folder that cannot be created fails before measuring.
    fs::create_dir_all(&arguments.output)
        .with_context(|| arguments.output.display().to_string())?;
    let mut report = Report {
        facts: facts(arguments),
        figures: Vec::new(),
        main: 0,
    };
    let measured = match &arguments.from {
        Some(file) => {
            let numbers = fs::read(file).with_context(|| file.display().to_string())?;
            report = Report::read(&numbers).with_context(|| file.display().to_string())?;
            Ok(())
        }
        None => measure(arguments, &mut report),
    };
    // After an error, the parts before it.
    if !report.figures.is_empty() {
        report.put_first(&MAIN);
        write(&report, &arguments.output)?;
    }
    measured
}

fn measure(arguments: &Arguments, report: &mut Report) -> Result<()> {
    let mut plan = Plan {
        rounds: if arguments.quick {
            1
        } else {
            arguments.rounds.map_or(3, usize::from)
        },
        duration: Duration::from_millis(if arguments.quick { 500 } else { 1_000 }),
        turns: if arguments.quick { 4 } else { 7 },
        quick: arguments.quick,
        reference: arguments.bosh_dns.clone(),
        builds: Vec::new(),
        wanted: arguments.subject.clone(),
    };
    // Or the memory of a program would depend on when it was linked or copied.
    page_cache::read_by_pages(&server::program()?)?;
    for build in &arguments.against {
        page_cache::read_by_pages(build)?;
    }
    let started = Instant::now();
    if !arguments.against.is_empty() {
        // Beside the saturated core what it does not show: the queries' types, starts and memory.
        let mut parts = vec![&AGAINST, &EXTRAS, &TYPES];
        parts.extend(named("footprint"));
        parts.retain(|part| is_wanted(&arguments.only, part.name));
        // Subjects hold the names of their modes for the life of the program.
        for mode in ["tc", "native", "off"] {
            if !arguments.mode.iter().any(|wanted| wanted == mode) {
                continue;
            }
            plan.builds = builds(arguments, mode);
            for part in &parts {
                report.figures.extend(part.measure(&plan)?);
            }
        }
        // Once: records are read and compared before any interface is concerned, and forwarded
        // queries go to userspace in every mode.
        for (name, mode) in [("reload", "tc"), ("forwarding", "off")] {
            plan.builds = builds(arguments, mode);
            for part in named(name) {
                if is_wanted(&arguments.only, part.name) {
                    report.figures.extend(part.measure(&plan)?);
                }
            }
        }
        return Ok(());
    }
    let mut parts: Vec<&Part> = PARTS.iter().chain([&EXTRAS, &TYPES]).collect();
    parts.retain(|part| is_wanted(&arguments.only, part.name));
    for (position, part) in parts.iter().enumerate() {
        let elapsed = started.elapsed().as_secs();
        println!(
            "\n[{}/{}] {} ({elapsed} s so far)",
            position + 1,
            parts.len(),
            part.name
        );
        report
            .figures
            .extend(part.measure(&plan).with_context(|| part.name)?);
    }
    Ok(())
}

/// Returns the parts with this name.
fn named(name: &'static str) -> impl Iterator<Item = &'static Part> {
    PARTS.iter().filter(move |part| part.name == name)
}

/// Returns this build of the server and those of `--against`, with this mode of the fast path.
fn builds(arguments: &Arguments, mode: &'static str) -> Vec<Subject> {
    let mut builds = vec![Ours(mode)];
    for build in &arguments.against {
        builds.push(Subject::Build(build.clone(), mode));
    }
    builds
}

/// Arguments of dpkg-query, and Debian's packages of the peers.
const VERSIONS: [&str; 3] = ["--show", "--showformat", "${Package} ${Version}; "];
const PEERS: [&str; 5] = ["knot", "nsd", "unbound", "dnsmasq-base", "knot-resolver"];

/// Returns the kernel's remedies for defects of this processor.
fn mitigations() -> String {
    // Remedies slow down system calls, so the figures of two machines compare only with the same
    // ones.
    let files = fs::read_dir("/sys/devices/system/cpu/vulnerabilities");
    let mut lines = Vec::new();
    for file in files.into_iter().flatten().flatten() {
        let text = fs::read_to_string(file.path()).unwrap_or_default();
        let remedy = text.trim();
        if !remedy.is_empty() && !remedy.starts_with("Not affected") {
            lines.push(format!("{}: {remedy}", file.file_name().to_string_lossy()));
        }
    }
    // A folder has no order, and the facts of two reports are compared.
    lines.sort();
    lines.join("; ")
}

/// Returns the facts of the run: commands, machine and time.
fn facts(arguments: &Arguments) -> Vec<(String, String)> {
    // A fact that cannot be found out stays empty: it is not worth a run of an hour.
    let output = |program: &str, words: &[&str]| {
        let output = Command::new(program)
            .args(words)
            .output()
            .map(|output| output.stdout)
            .unwrap_or_default();
        String::from_utf8_lossy(&output).trim().to_owned()
    };
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mut facts = vec![
        ("date", output("date", &["--utc", "+%Y-%m-%d %H:%M UTC"])),
        ("machine", lab::machine()),
        ("mitigations", mitigations()),
        ("peers", output("dpkg-query", &[&VERSIONS[..], &PEERS].concat())),
        ("command", format!("cargo xtask bench {}", words.join(" "))),
        ("commit", output("git", &["rev-parse", "--short", "HEAD"])),
        (
            "values",
            "median, best quartile, lowest and highest of all slices (125 ms) of a load in all rounds or \
             turns, or of all rounds"
                .to_owned(),
        ),
        ("generators", "in the kernel (live frames), one core; dnsperf for latencies".to_owned()),
    ];
    if arguments.bosh_dns.is_none() {
        facts.push((
            "quoted, not measured in this run",
            quoted::OTHERS.to_owned(),
        ));
    }
    facts
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value))
        .collect()
}

/// Writes the page, the tables, the numbers, and each plot.
fn write(report: &Report, folder: &Path) -> Result<()> {
    // First: the other files can be drawn again from it.
    fs::write(
        folder.join("report.json"),
        serde_json::to_vec_pretty(report)?,
    )?;
    fs::write(folder.join("report.html"), report.to_html()?)?;
    fs::write(folder.join("report.md"), report.to_markdown())?;
    for (number, figure) in report.figures.iter().enumerate() {
        fs::write(
            folder.join(format!("figure-{:02}.svg", number + 1)),
            Report::plot(figure)?,
        )?;
    }
    println!(
        "\n{}\nwritten: {}",
        report.to_markdown(),
        folder.join("report.html").display()
    );
    Ok(())
}
