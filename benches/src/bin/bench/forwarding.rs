//! Cost of forwarding, compared with unbound and dnsmasq, with one authority for all.

use std::{
    collections::HashMap,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Result, ensure};
use bosh_dns_xdp_benches::{
    cpu::CpuTime,
    dnsperf::{Load, Seen},
    forwarders::{Forwarder, ZONE},
    lab::Lab,
    report::{Bar, Data, Figure, Rounds},
};
use tempfile::TempDir;

use crate::Plan;

const FORWARDERS: [Forwarder; 4] = [
    Forwarder::Ours { cache: true },
    Forwarder::Ours { cache: false },
    Forwarder::Unbound,
    Forwarder::Dnsmasq,
];

/// Names that fit into every cache.
const KNOWN_NAMES: usize = 1_000;

/// Queries per second for latency measurements, low enough for every server.
const LATENCY_RATE: u32 = 2_000;

/// Duration of the warm-up at that rate: long enough for [`KNOWN_NAMES`].
const WARM_UP: Duration = Duration::from_millis(600);

/// Maximum queries per second that a run without repeated names can send.
const MAX_RATE: usize = 150_000;

/// Whether queries repeat names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    /// The same few names, all queried before.
    Cached,
    /// Every name is new.
    Uncached,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Measure {
    /// CPU time of the forwarder per reply at a fixed rate, in microseconds.
    Cost,
    Median,
    /// 99th percentile of latency, in microseconds.
    Tail,
    Rate,
}

/// Values by quantity, kind of query and forwarder.
type Values = HashMap<(Measure, Kind, Forwarder), Rounds>;

impl Kind {
    const ALL: [Self; 2] = [Self::Cached, Self::Uncached];

    fn label(self) -> &'static str {
        match self {
            Self::Cached => "cached",
            Self::Uncached => "uncached",
        }
    }

    /// Returns the queries per second for costs, which all can serve, even on a slower machine.
    /// Under overload a server saves system calls, so the costs would not be comparable.
    fn cost_rate(self) -> u32 {
        match self {
            Self::Cached => 15_000,
            Self::Uncached => 3_000,
        }
    }

    /// Returns whether the quantity can be measured for a forwarder.
    fn applies_to(self, forwarder: Forwarder) -> bool {
        self == Self::Uncached || forwarder != Forwarder::Ours { cache: false }
    }
}

impl Measure {
    /// All, in the order of the report.
    const ALL: [Self; 4] = [Self::Cost, Self::Median, Self::Tail, Self::Rate];

    fn title(self, kind: Kind) -> (String, &'static str) {
        let cached = kind.label();
        match self {
            Self::Cost => {
                (format!("CPU per forwarded query at {} queries/s, {cached}", kind.cost_rate()), "µs")
            }
            Self::Median => {
                (format!("Latency of forwarded queries at {LATENCY_RATE}/s, {cached}: p50"), "µs")
            }
            Self::Tail => (format!("Latency of forwarded queries at {LATENCY_RATE}/s, {cached}: p99"), "µs"),
            Self::Rate => (format!("Highest rate of forwarded queries, {cached}"), "queries/s"),
        }
    }
}

/// Query files that have no name in common.
struct Queries {
    folder: TempDir,
}

impl Queries {
    /// Writes the files for runs of `duration`.
    fn write(duration: Duration) -> Result<Self> {
        let queries = Self { folder: TempDir::with_prefix("bdx-queries-")? };
        let at_most = |rate: usize| rate * (duration.as_secs().max(1) as usize + 1);
        for (name, count) in [
            ("known", KNOWN_NAMES),
            ("cost", at_most(Kind::Uncached.cost_rate() as usize)),
            ("latency", at_most(LATENCY_RATE as usize)),
            ("rate", at_most(MAX_RATE)),
        ] {
            let mut text = String::new();
            for number in 0..count {
                writeln!(text, "{name}-{number}.{ZONE} A")?;
            }
            fs::write(queries.path(name), text)?;
        }
        Ok(queries)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the file for a load.
    fn for_load(&self, kind: Kind, name: &str) -> PathBuf {
        self.path(if kind == Kind::Cached { "known" } else { name })
    }
}

/// CPU time per query, latency and highest rate, for cache hits and misses.
pub(super) fn measure(plan: &Plan) -> Result<Vec<Figure>> {
    let queries = Queries::write(plan.duration)?;
    let mut values = Values::new();
    for _ in 0..plan.rounds {
        for forwarder in FORWARDERS {
            for kind in Kind::ALL.into_iter().filter(|kind| kind.applies_to(forwarder)) {
                let line = measure_one(plan, forwarder, kind, &queries, &mut values)?;
                println!("{:<16} {:<9} {line}", forwarder.label(), kind.label());
            }
        }
    }
    let figure = |(kind, measure): (Kind, Measure)| {
        let bar = |forwarder: &Forwarder| Bar {
            label: forwarder.label().to_owned(),
            value: values.get(&(measure, kind, *forwarder)).cloned().unwrap_or_default(),
            ours: forwarder.is_ours(),
        };
        let (title, unit) = measure.title(kind);
        Figure::new(
            title,
            format!(
                "All forward to one NSD, which shares a core with dnsperf; each forwarder has its own core, \
                 over an untuned veth. Cached: {KNOWN_NAMES} names, all queried before. Uncached: every name \
                 is new; the cache is on unless stated otherwise, so storing the answer is part of the cost."
            ),
            unit,
            Data::Bars(FORWARDERS.iter().filter(|one| kind.applies_to(**one)).map(bar).collect()),
        )
    };
    Ok(Kind::ALL
        .into_iter()
        .flat_map(|kind| Measure::ALL.map(|measure| (kind, measure)))
        .map(figure)
        .collect())
}

/// Measures one forwarder; returns the figures as text.
fn measure_one(
    plan: &Plan,
    forwarder: Forwarder,
    kind: Kind,
    queries: &Queries,
    values: &mut Values,
) -> Result<String> {
    let lab = Lab::plain()?;
    let running = forwarder.start(&lab)?;
    let ask = |name: &str, rate, percentiles| {
        load(&lab, &queries.for_load(kind, name), plan.duration, rate, percentiles)
    };
    // Fill the cache with the known names; the first load also starts the servers' threads.
    load(&lab, &queries.path("known"), WARM_UP, Some(LATENCY_RATE), false)?;
    let before = CpuTime::of_process(running.pid)?;
    let seen = ask("cost", Some(kind.cost_rate()), false)?;
    let spent = CpuTime::of_process(running.pid)? - before;
    ensure!(
        seen.rcodes.keys().all(|rcode| rcode == "NOERROR"),
        "{} answers {:?}",
        forwarder.label(),
        seen.rcodes
    );
    let latency = ask("latency", Some(LATENCY_RATE), true)?;
    let percentile = |share| latency.percentile(share).unwrap_or_default().as_secs_f64() * 1e6;
    let found = [
        (Measure::Cost, spent.as_secs_f64() * 1e6 / seen.completed.max(1) as f64),
        (Measure::Median, percentile(0.5)),
        (Measure::Tail, percentile(0.99)),
        (Measure::Rate, ask("rate", None, false)?.rate),
    ];
    for (measure, value) in found {
        values.entry((measure, kind, forwarder)).or_default().0.push(value);
    }
    let [(_, cost), (_, median), (_, tail), (_, rate)] = found;
    Ok(format!(
        "{cost:>7.2} µs/query   p50 {median:>6.0} µs   p99 {tail:>6.0} µs   {rate:>7.0}/s at most   {} lost",
        seen.lost()
    ))
}

fn load(lab: &Lab, queries: &Path, duration: Duration, rate: Option<u32>, percentiles: bool) -> Result<Seen> {
    let load = Load { rate, percentiles, ..Load::new(queries, duration) };
    load.run(&lab.client_launcher())
}
