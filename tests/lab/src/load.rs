//! Measures a load from the in-kernel generator on the server's side.
//!
//! Replies are counted where the server sends them. Under a flood the generator occupies the
//! client's core, and packets without room at the client's end are dropped there by the sending
//! core, which frees them as it would after a network card has sent them. The figures are thus the
//! server's, and never limited by the client.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};

use crate::{
    cpu::CpuTime,
    figures::Rounds,
    generator::{Generator, Load, Queries},
    interrupt,
    lab::{Lab, Meter},
};

/// Length of the measured slices. Disturbances on a shared machine are shorter or longer than that,
/// so the spread of the slices shows them.
const SLICE: Duration = Duration::from_millis(125);

/// Duration of a load before the first slice. Observed: including the start changes figures of half
/// a second by up to a fifth.
const LEAD: Duration = Duration::from_millis(250);

/// Factor between the rates tried in search of a core's best rate.
const STEP: f64 = std::f64::consts::SQRT_2;

/// Factor of the last rates tried above and below the best one.
const NEAR: f64 = 1.09;

/// The lowest rate tried, in queries per second.
const LOWEST: f64 = 8_000.0;

/// Least answered share at which the server keeps up with a rate, so that a higher rate is tried.
const KEPT: f64 = 0.97;

/// Factor by which a rate must exceed the best one to be better than by chance.
const BETTER: f64 = 1.05;

/// Consecutive rates without success that end the search.
const ENOUGH: u32 = 2;

/// Busy share of a core that counts as saturated: servers behind sockets stay just below it at the
/// highest rate they can keep.
const SATURATED: f64 = 0.8;

/// Maximum number of packets per NAPI poll (`NAPI_POLL_WEIGHT`). A core that finds as many at every wake-up
/// works like a saturated one.
const POLL: f64 = 64.0;

/// Queries sent together when a rate is tried.
const BURST: u32 = 16;

/// A server in a lab under load.
pub struct Loaded<'a> {
    lab: &'a Lab,
    /// Processes whose CPU time counts.
    processes: &'a [u32],
    generator: Generator<'a>,
    /// The load with the highest answered rate, after it has been searched for.
    best: Option<Load>,
}

/// Results of a load.
pub struct Offered {
    /// Queries sent per second.
    pub sent: f64,
    /// Replies per second, by slice.
    pub answered: Rounds,
    /// CPU time of the server's side per reply in microseconds, by slice.
    pub cpu: Rounds,
    /// Share of the time in which the server's side used the CPU.
    pub busy: f64,
    /// Share of the queries without room in the ring of the server's interface.
    pub dropped_before: f64,
    /// Wake-ups of the server's NAPI thread per second.
    pub wake_ups: f64,
    /// The regime: mean number of queries found per wake-up of the NAPI thread. At one, most of the
    /// cost is waking up, for any server.
    pub packets_a_wake_up: f64,
}

impl Offered {
    /// Returns the replies per second of the server's CPU time, by slice: the rate of a core that
    /// does nothing else. Pauses of the generator, or a rate slightly too low, leave the core idle
    /// and do not change it.
    pub fn per_core(&self) -> Rounds {
        Rounds(
            self.cpu
                .0
                .iter()
                .map(|microseconds| 1e6 / microseconds)
                .collect(),
        )
    }

    /// Returns whether the core was in the regime of a saturated one. Otherwise wake-ups are a
    /// large part of the cost of a reply.
    pub fn is_saturated(&self) -> bool {
        self.busy >= SATURATED || self.packets_a_wake_up >= POLL
    }
}

impl<'a> Loaded<'a> {
    /// Prepares to query these lines of `name type`, in this order; with `edns`, with an OPT of that size.
    pub fn new(
        lab: &'a Lab,
        processes: &'a [u32],
        lines: &[String],
        edns: Option<u16>,
    ) -> Result<Self> {
        let generator = Generator::new(lab, &Queries::of_lines(lines, edns)?)?;
        Ok(Self {
            lab,
            processes,
            generator,
            best: None,
        })
    }

    /// Measures the highest rate of replies of one core. The first call searches for the load that
    /// gives it; later ones reuse that load.
    pub fn saturate(&mut self, duration: Duration) -> Result<Offered> {
        let best = match self.best {
            Some(best) => best,
            None => self.best_load(duration)?,
        };
        let mut seen = self.offer(best, duration)?;
        if let Load::Rate { rate, .. } = best {
            // The best rate of an earlier call may be a step too low or too high by now.
            self.try_rates(around(rate.into(), NEAR), duration, &mut seen)?;
        }
        Ok(seen)
    }

    /// Measures a full core: under a flood if the server answers at the interface, else as
    /// [`Self::saturate`]. All subjects are thus in one regime: at a fixed rate the client takes
    /// replies, and the core that sends one also wakes the client (observed: a seventh of its time).
    pub fn fill(&mut self, at_interface: bool, duration: Duration) -> Result<Offered> {
        if at_interface {
            self.offer(Load::Saturate, duration)
        } else {
            self.saturate(duration)
        }
    }

    /// Searches for the load with the highest rate of replies.
    ///
    /// A flood comes first: it is best for servers that answer at the interface. For servers behind
    /// sockets it fills the core with packets that are never read, so rates are tried next, from
    /// one that is surely kept up with to rates without a gain, and finally rates close to the
    /// best.
    fn best_load(&mut self, duration: Duration) -> Result<Load> {
        let mut seen = self.offer(Load::Saturate, duration)?;
        self.best = Some(Load::Saturate);
        let mut rate = (seen.answered.median() / STEP).max(LOWEST);
        let mut in_vain = 0;
        while in_vain < ENOUGH {
            let highest = seen.answered.median();
            let answered = self.try_rates([rate], duration, &mut seen)?;
            in_vain = if answered >= KEPT * rate || answered > BETTER * highest {
                0
            } else {
                in_vain + 1
            };
            rate *= STEP;
        }
        for step in [STEP.sqrt(), NEAR] {
            if let Some(Load::Rate { rate, .. }) = self.best {
                self.try_rates(around(rate.into(), step), duration, &mut seen)?;
            }
        }
        self.best.context("a load was tried")
    }

    /// Tries rates; the best one replaces `best` if it is higher. Returns the answered rate of the
    /// last one.
    fn try_rates(
        &mut self,
        rates: impl IntoIterator<Item = f64>,
        duration: Duration,
        best: &mut Offered,
    ) -> Result<f64> {
        let mut answered = 0.0;
        for rate in rates {
            let load = Load::Rate {
                rate: rate as u32,
                burst: BURST,
            };
            let seen = self.offer(load, duration)?;
            answered = seen.answered.median();
            if answered > best.answered.median() {
                *best = seen;
                self.best = Some(load);
            }
        }
        Ok(answered)
    }

    /// Measures a load, whether the server keeps up with it or not, in slices over this duration.
    pub fn offer(&mut self, load: Load, duration: Duration) -> Result<Offered> {
        let Self {
            lab,
            processes,
            generator,
            ..
        } = self;
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
            let counts = after.since(&before);
            Ok((slices, counts.sent, counts.received() - counts.no_error()))
        })?;
        // A subject knows all queried names; otherwise errors would be measured.
        ensure!(
            other == 0,
            "{other} replies with another RCODE than NOERROR"
        );
        let sum = |of: fn(&Slice) -> u64| slices.iter().map(of).sum::<u64>();
        let time = slices
            .iter()
            .map(|slice| slice.time)
            .sum::<Duration>()
            .as_secs_f64();
        let (arrivals, wake_ups) = (sum(|slice| slice.arrivals), sum(|slice| slice.wake_ups));
        let rate = |slice: &Slice| slice.answered as f64 / slice.time.as_secs_f64();
        let cpu = |slice: &Slice| slice.cpu.as_secs_f64() * 1e6 / slice.answered.max(1) as f64;
        Ok(Offered {
            sent: sent as f64 / time,
            answered: Rounds(slices.iter().map(rate).collect()),
            cpu: Rounds(slices.iter().map(cpu).collect()),
            busy: slices
                .iter()
                .map(|slice| slice.cpu)
                .sum::<Duration>()
                .as_secs_f64()
                / time,
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

/// Totals at a moment.
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
    /// Reads the current totals.
    fn take(meter: &Meter) -> Result<Self> {
        let [answered, arrivals, wake_ups] = [meter.replies()?, meter.arrivals()?, meter.sleeps()?];
        Ok(Self {
            time: Instant::now(),
            cpu: meter.cpu()?,
            answered,
            arrivals,
            wake_ups,
        })
    }

    /// Returns the differences from an earlier reading.
    fn since(&self, earlier: &Self) -> Slice {
        let Self {
            time,
            cpu,
            answered,
            arrivals,
            wake_ups,
        } = *self;
        Slice {
            time: time - earlier.time,
            cpu: cpu - earlier.cpu,
            answered: answered - earlier.answered,
            arrivals: arrivals - earlier.arrivals,
            wake_ups: wake_ups.saturating_sub(earlier.wake_ups),
        }
    }
}

/// Differences between two readings.
struct Slice {
    /// Time between the readings.
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
