//! Forwarded names, and a mix of fleet and outside names as containers query them, compared with other
//! forwarders before one authority.

use std::{fmt::Write as _, fs, time::Duration};

use anyhow::{Context, Result, ensure};
use bosh_dns_xdp_benches::{
    cpu::CpuTime,
    dnsperf::{self, Seen},
    lab::Lab,
    load::Loaded,
    report::{Rounds, number},
    servers::{Forwarder, ZONE},
};
use tempfile::TempDir;
use whole_system_tests::{
    metrics::{Metrics, wait_for_metrics},
    server,
};

use crate::{
    Plan,
    part::{Order, Selection, Setting, Table},
    subject::{Cell, Subject},
};

/// Duration of the warm-up of each load: outside names are published on their second use.
const WARM_UP: Duration = Duration::from_millis(600);

/// Draws names and writes query files; cold names are never drawn twice.
struct Drawer {
    fleet: Vec<String>,
    /// Outside names in steady use.
    hot: usize,
    next_hot: usize,
    next_cold: usize,
    random: fastrand::Rng,
    folder: TempDir,
}

impl Drawer {
    fn new(hot: usize, fleet: Vec<String>) -> Result<Self> {
        let folder = TempDir::with_prefix("bdx-queries-")?;
        Ok(Self {
            fleet,
            hot,
            next_hot: 0,
            next_cold: 0,
            random: fastrand::Rng::with_seed(1),
            folder,
        })
    }

    /// Queries at this rate (`None`: as many as possible) for `duration`, with these percentages of
    /// fleet and hot names; the rest is cold.
    fn ask(
        &mut self,
        lab: &Lab,
        (fleet, hot): (usize, usize),
        rate: Option<u32>,
        duration: Duration,
    ) -> Result<Seen> {
        /// Queries per second that a run without repeated names can send at most.
        const MAX_RATE: u32 = 150_000;
        // For a second more than the load lasts: dnsperf begins again at the end of its file, and
        // cold names would be hits.
        let count = f64::from(rate.unwrap_or(MAX_RATE)) * (duration.as_secs_f64() + 1.0);
        let mut text = String::new();
        for _ in 0..count as usize {
            let percent = self.random.usize(..100);
            if percent < fleet {
                text.push_str(&self.fleet[self.random.usize(..self.fleet.len())]);
            } else if percent < fleet + hot {
                writeln!(text, "hot-{}.{ZONE} A", self.next_hot % self.hot)?;
                self.next_hot += 1;
            } else {
                writeln!(text, "cold-{}.{ZONE} A", self.next_cold)?;
                self.next_cold += 1;
            }
        }
        let path = self.folder.path().join("queries");
        fs::write(&path, text)?;
        let load = dnsperf::Load {
            rate,
            percentiles: rate.is_some(),
            ..dnsperf::Load::new(&path, duration)
        };
        // Below, a refusal ends the run: it costs less than an answer.
        let seen = load.run(&lab.client_launcher())?;
        ensure!(
            seen.rcodes.keys().all(|rcode| rcode == "NOERROR"),
            "{:?}",
            seen.rcodes
        );
        ensure!(seen.completed > 0, "no reply");
        Ok(seen)
    }
}

/// Returns the latency within which this share was answered, in microseconds.
pub(crate) fn within(seen: &Seen, share: f64) -> f64 {
    seen.percentile(share).unwrap_or_default().as_secs_f64() * 1e6
}

/// Whether queries repeat names.
pub(crate) const KINDS: [&str; 2] = ["cached", "uncached"];

/// CPU time per query, latency and highest rate, for cache hits and misses.
pub(crate) fn forwarding(plan: &Plan, subject: &Subject, table: &mut Table) -> Result<()> {
    /// Names that fit into every cache.
    const KNOWN_NAMES: usize = 1_000;
    /// Queries per second for latency measurements, low enough for every server.
    const LATENCY_RATE: u32 = 2_000;
    let (forwarder, program) = match subject {
        Subject::Forwarder(forwarder) => (*forwarder, server::program()?),
        Subject::ForwardingBuild { program, cache } => {
            (Forwarder::Ours { cache: *cache }, program.clone())
        }
        _ => return Ok(()),
    };
    // Costs at rates that all can serve, even on a slower machine: under overload a server saves system
    // calls.
    for (point, (hot, cost_rate)) in [(100, 15_000), (0, 3_000)].into_iter().enumerate() {
        // Without a cache there are no hits to measure.
        if hot > 0 && forwarder == (Forwarder::Ours { cache: false }) {
            continue;
        }
        let lab = Lab::plain()?;
        let running = forwarder.start_build(program.clone(), &lab, None)?;
        let mut drawer = Drawer::new(KNOWN_NAMES, Vec::new())?;
        drawer.ask(&lab, (0, 100), Some(LATENCY_RATE), WARM_UP)?;
        let before = CpuTime::of_process(running.pid)?;
        let seen = drawer.ask(&lab, (0, hot), Some(cost_rate), plan.duration)?;
        let cost = (CpuTime::of_process(running.pid)? - before).as_secs_f64() * 1e6
            / seen.completed as f64;
        let latency = drawer.ask(&lab, (0, hot), Some(LATENCY_RATE), plan.duration)?;
        let highest = drawer.ask(&lab, (0, hot), None, plan.duration)?.rate;
        let values = [cost, within(&latency, 0.5), within(&latency, 0.99), highest];
        table.put_each(&subject.label(), point, &values);
    }
    Ok(())
}

/// Names at a rate: percentages of fleet and hot outside names, and queries per second.
pub(crate) struct NamesAtRate(usize, usize, u32);

/// 5 % of the mix, the cold names, are a rate that all forwarders can forward. The higher rate keeps
/// every cache busy: at the lower one, waking a thread for each packet costs more than the answer.
pub(crate) const LOADS: [NamesAtRate; 5] = [
    NamesAtRate(100, 0, 20_000),
    NamesAtRate(0, 100, 20_000),
    NamesAtRate(70, 25, 20_000),
    NamesAtRate(100, 0, 100_000),
    NamesAtRate(0, 100, 100_000),
];
const MIX: usize = 2;

impl NamesAtRate {
    pub(crate) fn label(&self) -> String {
        let names = match self {
            Self(100, ..) => "fleet",
            Self(_, 100, _) => "hot outside",
            Self(..) => "mix",
        };
        format!("{names}, {}/s", number(self.2.into()))
    }
}

/// CPU time per query, share of the interface and latency, for fleet names, outside names and a mix.
pub(crate) fn outside(plan: &Plan, subject: &Subject, table: &mut Table) -> Result<()> {
    const HOT_NAMES: usize = 300;
    let Subject::Forwarder(forwarder) = subject else {
        return Ok(());
    };
    let setting = Setting::new(1_000, Selection::Shared, &[Order::AsListed])?;
    let fleet = setting.queries()?.lines.clone();
    let mut drawer = Drawer::new(HOT_NAMES, fleet.clone())?;
    {
        let cell = Cell::start(Lab::split()?, subject, &setting)?;
        let meter = cell.lab.meter(&cell.processes)?;
        for (point, &NamesAtRate(fleet_names, hot, rate)) in LOADS.iter().enumerate() {
            let mut ask =
                |duration| drawer.ask(&cell.lab, (fleet_names, hot), Some(rate), duration);
            ask(WARM_UP)?;
            let cpu = meter.cpu()?;
            // Other servers have no interface that answers.
            let before = if forwarder.is_ours() {
                Some(replies(&cell.lab)?)
            } else {
                None
            };
            let seen = ask(plan.duration)?;
            let cost = (meter.cpu()? - cpu).as_secs_f64() * 1e6 / seen.completed as f64;
            let mut share = Rounds::default();
            if let Some(before) = before {
                share.0.push(share_of_interface(&cell.lab, before)?);
            }
            let cost = Rounds(vec![cost]);
            table.put(forwarder.label(), point, &[cost, Rounds::default(), share]);
        }
        let mut hot = Vec::with_capacity(HOT_NAMES);
        for number in 0..HOT_NAMES {
            hot.push(format!("hot-{number}.{ZONE} A\n"));
        }
        for (point, lines) in [&fleet, &hot].into_iter().enumerate() {
            let mut loaded = Loaded::new(&cell.lab, &cell.processes, lines, None)?;
            let seen = cell.fill(&mut loaded, plan.duration)?;
            // As in `measure_alternately`: a core that slept between packets is in another regime.
            if seen.is_saturated() {
                table.put(forwarder.label(), point, &[Rounds::default(), seen.cpu]);
            }
        }
    }
    let cell = Cell::start(Lab::plain()?, subject, &setting)?;
    let NamesAtRate(fleet_names, hot, rate) = LOADS[MIX];
    let mut ask = |duration| drawer.ask(&cell.lab, (fleet_names, hot), Some(rate), duration);
    ask(WARM_UP)?;
    let seen = ask(plan.duration)?;
    let latencies = [0.5, 0.99].map(|share| Rounds(vec![within(&seen, share)]));
    let mut values = vec![Rounds::default(); 3];
    values.extend(latencies);
    table.put(forwarder.label(), MIX, &values);
    Ok(())
}

/// Returns this server's replies so far by the interface and by userspace.
pub(crate) fn replies(lab: &Lab) -> Result<[u64; 2]> {
    wait_for_metrics(&lab.server)?;
    let metrics = Metrics::read(&lab.server).context("metrics")?;
    Ok([metrics.fast_path_replies(), metrics.userspace_replies()])
}

/// Returns the percentage of the replies since `before` that the interface gave.
pub(crate) fn share_of_interface(lab: &Lab, before: [u64; 2]) -> Result<f64> {
    let after = replies(lab)?;
    let fast = after[0] - before[0];
    let userspace = after[1] - before[1];
    Ok(fast as f64 * 100.0 / (fast + userspace).max(1) as f64)
}
