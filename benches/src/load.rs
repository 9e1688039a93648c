//! What comes of a load from within the kernel, as the server's side shows it.
//!
//! Replies are counted where the server sends them. Under a flood the client's core is the
//! generator's: what finds no room at the client's end is dropped there, by the core that sent
//! it, which frees the packet as it would when a network card had sent it. So a figure is the
//! server's, and never what the client can take.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use whole_system_tests::interrupt;

use crate::{
    cpu::CpuTime,
    generator::{Frames, Generator, Load},
    lab::{Lab, Meter},
    report::Rounds,
};

/// What a load is measured in: a machine that is shared with others is disturbed for
/// shorter or longer than that, and the spread of the slices shows it.
const SLICE: Duration = Duration::from_millis(125);

/// How long a load goes on before the first slice. Observed: with its beginning in them,
/// figures of half a second are up to a fifth off those of longer loads.
const LEAD: Duration = Duration::from_millis(250);

/// Each rate that is tried on the way to what a core answers is so many times the one before.
const STEP: f64 = std::f64::consts::SQRT_2;

/// Rates so many times higher and lower than the best one are tried at last.
const NEAR: f64 = 1.09;

/// The lowest rate that is tried, in queries per second.
const LOWEST: f64 = 8_000.0;

/// A rate of which this share is answered is kept: a higher one is worth trying.
const KEPT: f64 = 0.97;

/// So many times the best is better: less may be chance.
const BETTER: f64 = 1.05;

/// So many rates in a row that are neither kept nor better are enough.
const ENOUGH: u32 = 2;

/// A core that is busy for this share of the time is as good as saturated: servers behind sockets
/// are just below that at the highest of the rates that they keep.
const SATURATED: f64 = 0.8;

/// Most packets that a poll of NAPI takes (`NAPI_POLL_WEIGHT`): who finds as many whenever he
/// wakes up, works as a saturated core does.
const POLL: f64 = 64.0;

/// Queries that leave together where a rate is tried.
const BURST: u32 = 16;

/// A server in a lab under load.
pub struct Loaded<'a> {
    lab: &'a Lab,
    /// Processes whose CPU counts.
    processes: &'a [u32],
    generator: Generator<'a>,
    /// The load under which most was answered, once that was looked for.
    best: Option<Load>,
}

/// What came of a load.
pub struct Offered {
    /// Queries per second that were sent.
    pub sent: f64,
    /// Replies per second, slice by slice.
    pub answered: Rounds,
    /// CPU time of the server's side for each reply, microseconds, slice by slice.
    pub cpu: Rounds,
    /// Share of the time in which the server's side had the CPU.
    pub busy: f64,
    /// Share of the queries that the ring of the server's interface had no room for.
    pub dropped_before: f64,
    /// How often the server's NAPI thread was woken up, each second.
    pub wake_ups: f64,
    /// The regime: how many queries the NAPI thread found whenever it was woken up. Where
    /// that is one, most of the cost is waking up, whoever answers.
    pub packets_a_wake_up: f64,
}

impl Offered {
    /// Replies per second of the server's CPU time, slice by slice: what a core gives that has
    /// nothing else to do. Where the generator pauses, or its rate is a step too low, the core
    /// rests, and nothing is lost.
    pub fn per_core(&self) -> Rounds {
        Rounds(self.cpu.0.iter().map(|microseconds| 1e6 / microseconds).collect())
    }

    /// Whether the core was in the regime of a saturated one: else much of what a reply costs is
    /// waking up.
    pub fn is_saturated(&self) -> bool {
        self.busy >= SATURATED || self.packets_a_wake_up >= POLL
    }
}

impl<'a> Loaded<'a> {
    /// Ready to ask these lines of `name type`, in this order.
    pub fn new(lab: &'a Lab, processes: &'a [u32], lines: &[String]) -> Result<Self> {
        let generator = Generator::new(lab, &Frames::of_lines(lab, lines)?)?;
        Ok(Self { lab, processes, generator, best: None })
    }

    /// As many replies as one core gives, each time anew; the first time the load under which it
    /// gives most is looked for.
    pub fn saturate(&mut self, duration: Duration) -> Result<Offered> {
        let best = match self.best {
            Some(best) => best,
            None => self.best_load(duration)?,
        };
        let mut seen = self.offer(best, duration)?;
        if let Load::Rate { rate, .. } = best {
            // What another time could be kept, or was too much, may be a step off by now.
            self.try_rates(around(rate.into(), NEAR), duration, &mut seen)?;
        }
        Ok(seen)
    }

    /// The load under which most is answered.
    ///
    /// As many queries as go come first: who answers at the interface answers most then. Who
    /// answers by sockets has a core full of packets that nobody will read; so then rates are
    /// tried, from one that is surely kept to those that bring no more, and others near the best.
    fn best_load(&mut self, duration: Duration) -> Result<Load> {
        let mut seen = self.offer(Load::Flood, duration)?;
        self.best = Some(Load::Flood);
        let mut rate = (seen.answered.median() / STEP).max(LOWEST);
        let mut in_vain = 0;
        while in_vain < ENOUGH {
            let highest = seen.answered.median();
            let answered = self.try_rates([rate], duration, &mut seen)?;
            in_vain = if answered >= KEPT * rate || answered > BETTER * highest { 0 } else { in_vain + 1 };
            rate *= STEP;
        }
        for step in [STEP.sqrt(), NEAR] {
            if let Some(Load::Rate { rate, .. }) = self.best {
                self.try_rates(around(rate.into(), step), duration, &mut seen)?;
            }
        }
        self.best.context("a load was tried")
    }

    /// Tries rates; one that brings more than the best so far becomes it. What the last one brought.
    fn try_rates(
        &mut self,
        rates: impl IntoIterator<Item = f64>,
        duration: Duration,
        best: &mut Offered,
    ) -> Result<f64> {
        let mut answered = 0.0;
        for rate in rates {
            let load = Load::Rate { rate: rate as u32, burst: BURST };
            let seen = self.offer(load, duration)?;
            answered = seen.answered.median();
            if answered > best.answered.median() {
                *best = seen;
                self.best = Some(load);
            }
        }
        Ok(answered)
    }

    /// What comes of a load, whether it is kept up with or not, in slices of this duration.
    pub fn offer(&mut self, load: Load, duration: Duration) -> Result<Offered> {
        let Self { lab, processes, generator, .. } = self;
        let meter = lab.meter(processes)?;
        let (slices, sent, other) = generator.during(load, |counter| {
            thread::sleep(LEAD);
            let before = counter.read()?;
            let mut slices = Vec::new();
            let mut last = Reading::take(&meter)?;
            for _ in 0..duration.div_duration_f64(SLICE).round() as u32 {
                thread::sleep(SLICE);
                ensure!(!interrupt::requested(), "interrupted");
                let now = Reading::take(&meter)?;
                slices.push(now.since(&last));
                last = now;
            }
            let after = counter.read()?;
            Ok((slices, after.sent - before.sent, after.other - before.other))
        })?;
        // A subject knows all names that it is asked for: else errors would be measured.
        ensure!(other == 0, "{other} replies with another RCODE than NOERROR");
        let sum = |of: fn(&Slice) -> u64| slices.iter().map(of).sum::<u64>();
        let time = slices.iter().map(|slice| slice.time).sum::<Duration>().as_secs_f64();
        let (arrivals, wake_ups) = (sum(|slice| slice.arrivals), sum(|slice| slice.wake_ups));
        let rate = |slice: &Slice| slice.answered as f64 / slice.time.as_secs_f64();
        let cpu = |slice: &Slice| slice.cpu.as_secs_f64() * 1e6 / slice.answered.max(1) as f64;
        Ok(Offered {
            sent: sent as f64 / time,
            answered: Rounds(slices.iter().map(rate).collect()),
            cpu: Rounds(slices.iter().map(cpu).collect()),
            busy: slices.iter().map(|slice| slice.cpu).sum::<Duration>().as_secs_f64() / time,
            dropped_before: sent.saturating_sub(arrivals) as f64 / sent.max(1) as f64,
            wake_ups: wake_ups as f64 / time,
            packets_a_wake_up: arrivals as f64 / wake_ups.max(1) as f64,
        })
    }
}

/// The rates next to this one.
fn around(rate: f64, step: f64) -> [f64; 2] {
    [rate / step, rate * step]
}

/// What there was up to a moment.
struct Reading {
    time: Instant,
    /// CPU time of the server's side.
    cpu: CpuTime,
    /// Replies that the server sent.
    answered: u64,
    /// Queries that reached the server's interface.
    arrivals: u64,
    /// How often the server's NAPI thread has gone to sleep, and so been woken up.
    wake_ups: u64,
}

impl Reading {
    /// What there is up to now.
    fn take(meter: &Meter) -> Result<Self> {
        let [answered, arrivals, wake_ups] = [meter.replies()?, meter.arrivals()?, meter.sleeps()?];
        Ok(Self { time: Instant::now(), cpu: meter.cpu()?, answered, arrivals, wake_ups })
    }

    /// What has happened since an earlier one.
    fn since(&self, earlier: &Self) -> Slice {
        let Self { time, cpu, answered, arrivals, wake_ups } = *self;
        Slice {
            time: time - earlier.time,
            cpu: cpu - earlier.cpu,
            answered: answered - earlier.answered,
            arrivals: arrivals - earlier.arrivals,
            wake_ups: wake_ups.saturating_sub(earlier.wake_ups),
        }
    }
}

/// What happened between two readings.
struct Slice {
    /// How long it was.
    time: Duration,
    /// CPU time of the server's side.
    cpu: Duration,
    /// Replies that the server sent.
    answered: u64,
    /// Queries that reached the server's interface.
    arrivals: u64,
    /// How often the server's NAPI thread was woken up.
    wake_ups: u64,
}
