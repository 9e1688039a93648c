//! A mix of fleet and outside names, as queried by containers, compared with other forwarders in front of one
//! authority.

use std::{collections::HashMap, fmt::Write as _, fs, time::Duration};

use anyhow::{Result, ensure};
use bosh_dns_xdp_benches::{
    dnsperf::{self, Seen},
    forwarders::{Forwarder, ZONE},
    foundation::Foundation,
    lab::Lab,
    load::Loaded,
    report::{Bar, Data, Figure, Rounds, number},
};
use tempfile::TempDir;
use whole_system_tests::metrics::{Metrics, wait_for_metrics};

use crate::{Plan, queries};

const FORWARDERS: [Forwarder; 5] = [
    Forwarder::Interface,
    Forwarder::Ours { cache: true },
    Forwarder::Unbound,
    Forwarder::Dnsmasq,
    Forwarder::KnotResolver,
];

/// Size of the foundation.
const INSTANCES: usize = 1_000;

/// Outside names in steady use.
const HOT_NAMES: usize = 300;

/// Queries per second of the mix: 5 % of them, the cold names, are a rate that all forwarders can
/// forward.
const RATE: u32 = 20_000;

/// Queries per second that keep every cache busy: at [`RATE`], waking a thread for each packet costs
/// more than the answer.
const BUSY_RATE: u32 = 100_000;

/// Duration of a load that saturates the server's core.
const SATURATED_FOR: Duration = Duration::from_secs(1);

/// Shares of the mix in percent: fleet and hot outside names; the rest is cold.
const MIX: (usize, usize) = (70, 25);

/// Duration of the warm-up of each load: outside names are published on their second use.
const WARM_UP: Duration = Duration::from_millis(500);

/// The names of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Fleet,
    /// Outside names that every cache holds.
    Hot,
    Mix,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Measure {
    /// CPU time of the server's side per reply, in microseconds.
    Cost,
    /// CPU time of a core that never waits for a query, per reply, in microseconds.
    Saturated,
    /// Percentage of the replies from the interface.
    Share,
    Median,
    /// 99th percentile of latency, in microseconds.
    Tail,
}

/// Names at a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Load {
    kind: Kind,
    /// Rate in queries per second.
    rate: u32,
}

type Values = HashMap<(Measure, Load, Forwarder), Rounds>;

/// The loads whose CPU time is measured.
const LOADS: [Load; 5] =
    [FLEET, HOT, MIXED, Load { rate: BUSY_RATE, ..FLEET }, Load { rate: BUSY_RATE, ..HOT }];
const FLEET: Load = Load { kind: Kind::Fleet, rate: RATE };
const HOT: Load = Load { kind: Kind::Hot, rate: RATE };
const MIXED: Load = Load { kind: Kind::Mix, rate: RATE };

impl Kind {
    fn label(self) -> &'static str {
        match self {
            Self::Fleet => "fleet names",
            Self::Hot => "hot outside names",
            Self::Mix => "70 % fleet, 25 % hot outside, 5 % cold outside",
        }
    }
}

/// Draws the queries of loads, cold names never twice.
struct Drawer {
    fleet: Vec<String>,
    hot: Vec<String>,
    /// Cold names drawn so far.
    cold: usize,
    random: fastrand::Rng,
    folder: TempDir,
}

impl Drawer {
    fn new(foundation: &Foundation) -> Result<Self> {
        Ok(Self {
            fleet: queries::for_names(foundation, queries::is_shared),
            hot: (0..HOT_NAMES).map(|number| format!("hot-{number}.{ZONE} A\n")).collect(),
            cold: 0,
            random: fastrand::Rng::with_seed(1),
            folder: TempDir::with_prefix("bdx-outside-")?,
        })
    }

    /// Writes the queries of a load of `duration`.
    fn write(&mut self, Load { kind, rate }: Load, duration: Duration) -> Result<std::path::PathBuf> {
        let count = (f64::from(rate) * (duration.as_secs_f64() + 1.0)) as usize;
        let mut text = String::new();
        for _ in 0..count {
            let percent = match kind {
                Kind::Fleet => 0,
                Kind::Hot => MIX.0,
                Kind::Mix => self.random.usize(..100),
            };
            let names = if percent < MIX.0 { &self.fleet } else { &self.hot };
            if percent < MIX.0 + MIX.1 {
                text.push_str(&names[self.random.usize(..names.len())]);
            } else {
                writeln!(text, "cold-{}.{ZONE} A", self.cold)?;
                self.cold += 1;
            }
        }
        let path = self.folder.path().join("queries");
        fs::write(&path, text)?;
        Ok(path)
    }
}

/// CPU time per query, share of the interface and latency, for fleet names, outside names and a mix.
pub(super) fn measure(plan: &Plan) -> Result<Vec<Figure>> {
    let foundation = Foundation::generate(INSTANCES)?;
    let mut drawer = Drawer::new(&foundation)?;
    let mut values = Values::new();
    for _ in 0..plan.rounds {
        for forwarder in FORWARDERS {
            measure_cost(plan, forwarder, &foundation, &mut drawer, &mut values)?;
            measure_latency(plan, forwarder, &foundation, &mut drawer, &mut values)?;
        }
    }
    let figure = |(measure, load): (Measure, Load)| {
        let of = |forwarder: &Forwarder| {
            let value = values.get(&(measure, load, *forwarder)).cloned()?;
            Some(Bar { label: forwarder.label().to_owned(), value, ours: forwarder.is_ours() })
        };
        let (what, unit) = match measure {
            Measure::Cost => ("CPU per query", "µs"),
            Measure::Saturated => ("CPU per query of a saturated core", "µs"),
            Measure::Share => ("Replies from the interface", "%"),
            Measure::Median => ("Latency, p50", "µs"),
            Measure::Tail => ("Latency, p99", "µs"),
        };
        let rate = match measure {
            Measure::Saturated => String::new(),
            _ => format!(" at {} queries/s", number(load.rate.into())),
        };
        Figure::new(
            format!("{what}{rate}: {}", load.kind.label()),
            format!(
                "{INSTANCES} instances; {HOT_NAMES} hot outside names, all queried before; every cold name \
                 is new. All forward to one NSD. CPU time of the server's side, including the receive path \
                 of its interface (threaded NAPI); latencies over an untuned veth. A saturated core is loaded by \
                 a generator in the kernel, at the rate at which it answers most."
            ),
            unit,
            Data::Bars(FORWARDERS.iter().filter_map(of).collect()),
        )
    };
    let costs = LOADS.map(|load| (Measure::Cost, load));
    let saturated = [FLEET, HOT].map(|load| (Measure::Saturated, load));
    let others = [HOT, MIXED].map(|load| (Measure::Share, load));
    let latencies = [(Measure::Median, MIXED), (Measure::Tail, MIXED)];
    Ok(costs.into_iter().chain(saturated).chain(others).chain(latencies).map(figure).collect())
}

/// Measures the CPU time of the server's side, and how many replies the interface gave.
fn measure_cost(
    plan: &Plan,
    forwarder: Forwarder,
    foundation: &Foundation,
    drawer: &mut Drawer,
    values: &mut Values,
) -> Result<()> {
    let lab = Lab::split()?;
    let running = forwarder.start_with_names(&lab, foundation)?;
    let meter = lab.meter(&[running.pid])?;
    for load in LOADS {
        run(&lab, drawer, load, WARM_UP, false)?;
        let before = (meter.cpu()?, counted(&lab, forwarder)?);
        let seen = run(&lab, drawer, load, plan.duration, false)?;
        let spent = meter.cpu()? - before.0;
        let cost = spent.as_secs_f64() * 1e6 / seen.completed.max(1) as f64;
        let Load { kind, rate } = load;
        let mut line =
            format!("{:<16} {:<48} {rate:>6}/s {cost:>7.2} µs/query", forwarder.label(), kind.label());
        values.entry((Measure::Cost, load, forwarder)).or_default().0.push(cost);
        if let (Some(before), Some(after)) = (before.1, counted(&lab, forwarder)?) {
            let [fast, userspace] = [after[0] - before[0], after[1] - before[1]];
            let share = fast as f64 * 100.0 / (fast + userspace).max(1) as f64;
            line.push_str(&format!("   {share:.1} % by the interface"));
            values.entry((Measure::Share, load, forwarder)).or_default().0.push(share);
        }
        println!("{line}   {} lost", seen.lost());
    }
    for (load, names) in [(FLEET, &drawer.fleet), (HOT, &drawer.hot)] {
        let processes = [running.pid];
        let mut loaded = Loaded::new(&lab, &processes, names)?;
        let seen = loaded.fill(matches!(forwarder, Forwarder::Interface), SATURATED_FOR)?;
        println!(
            "{:<16} {:<48} saturated {:>7.3} µs/query; core busy {:.0} %{}",
            forwarder.label(),
            load.kind.label(),
            seen.cpu.median(),
            seen.busy * 100.0,
            if seen.is_saturated() { "" } else { ": it slept between packets; not counted" }
        );
        if seen.is_saturated() {
            values.entry((Measure::Saturated, load, forwarder)).or_default().0.extend(seen.cpu.0);
        }
    }
    Ok(())
}

/// Measures latencies of the mix.
fn measure_latency(
    plan: &Plan,
    forwarder: Forwarder,
    foundation: &Foundation,
    drawer: &mut Drawer,
    values: &mut Values,
) -> Result<()> {
    let lab = Lab::plain()?;
    let _running = forwarder.start_with_names(&lab, foundation)?;
    run(&lab, drawer, MIXED, WARM_UP, false)?;
    let seen = run(&lab, drawer, MIXED, plan.duration, true)?;
    let within = |share| seen.percentile(share).unwrap_or_default().as_secs_f64() * 1e6;
    let [median, tail] = [within(0.5), within(0.99)];
    println!("{:<16} {:<48} p50 {median:>6.0} µs   p99 {tail:>6.0} µs", forwarder.label(), Kind::Mix.label());
    for (measure, value) in [(Measure::Median, median), (Measure::Tail, tail)] {
        values.entry((measure, MIXED, forwarder)).or_default().0.push(value);
    }
    Ok(())
}

/// Returns the replies so far by the interface and by userspace; `None` for other servers.
fn counted(lab: &Lab, forwarder: Forwarder) -> Result<Option<[u64; 2]>> {
    if !forwarder.is_ours() {
        return Ok(None);
    }
    wait_for_metrics(&lab.server)?;
    let metrics = Metrics::read(&lab.server)?;
    Ok(Some([metrics.fast_path_replies(), metrics.userspace_replies()]))
}

fn run(lab: &Lab, drawer: &mut Drawer, load: Load, duration: Duration, percentiles: bool) -> Result<Seen> {
    let queries = drawer.write(load, duration)?;
    let Load { kind, rate } = load;
    let load = dnsperf::Load { rate: Some(rate), percentiles, ..dnsperf::Load::new(&queries, duration) };
    let seen = load.run(&lab.client_launcher())?;
    ensure!(seen.rcodes.keys().all(|rcode| rcode == "NOERROR"), "{}: {:?}", kind.label(), seen.rcodes);
    ensure!(seen.completed > 0, "{}: no reply", kind.label());
    Ok(seen)
}
