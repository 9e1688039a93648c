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

use anyhow::{Result, ensure};
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

/// The lowest rate that is tried, in queries per second.
const LOWEST: f64 = 8_000.0;

/// Who answers less than this share of what was sent, and of his best, has collapsed.
const COLLAPSED: f64 = 0.8;

/// A rate of which less than this share is sent is more than the generator can do.
const OFFERED: f64 = 0.8;

/// Queries that leave together where a rate is tried.
const BURST: u32 = 16;

/// A server in a lab under load.
pub struct Loaded<'a> {
    /// Where.
    lab: &'a Lab,
    /// Processes whose CPU counts.
    processes: &'a [u32],
    /// What asks.
    generator: Generator<'a>,
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

impl<'a> Loaded<'a> {
    /// Ready to ask these lines of `name type`, in this order.
    pub fn new(lab: &'a Lab, processes: &'a [u32], lines: &[String]) -> Result<Self> {
        let generator = Generator::new(lab, &Frames::of_lines(lab, lines)?)?;
        Ok(Self { lab, processes, generator })
    }

    /// As many replies per second as one core gives.
    ///
    /// As many queries as go come first: who answers at the interface answers most then. Who
    /// answers by sockets has a core full of packets that nobody will read; so then rates are
    /// tried, from one that is surely kept to one at which much less is answered.
    pub fn saturate(&mut self, duration: Duration) -> Result<Offered> {
        let mut best = self.offer(Load::Flood, duration)?;
        let mut best_rate = None;
        let mut rate = (best.answered.median() / STEP).max(LOWEST);
        loop {
            let seen = self.offer(Load::Rate { rate: rate as u32, burst: BURST }, duration)?;
            let (answered, highest) = (seen.answered.median(), best.answered.median());
            let is_over = seen.sent < OFFERED * rate || answered < COLLAPSED * highest.min(seen.sent);
            if answered > highest {
                best = seen;
                best_rate = Some(rate);
            }
            if is_over {
                break;
            }
            rate *= STEP;
        }
        for rate in best_rate.iter().flat_map(|rate| [rate / STEP.sqrt(), rate * STEP.sqrt()]) {
            let seen = self.offer(Load::Rate { rate: rate as u32, burst: BURST }, duration)?;
            if seen.answered.median() > best.answered.median() {
                best = seen;
            }
        }
        Ok(best)
    }

    /// What comes of a load, whether it is kept up with or not, in slices of this duration.
    pub fn offer(&mut self, load: Load, duration: Duration) -> Result<Offered> {
        let Self { lab, processes, generator } = self;
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

/// What there was up to a moment.
struct Reading {
    /// The moment.
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
