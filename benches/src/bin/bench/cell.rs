//! A subject that runs in a lab, and what is measured of it: one measurement after the
//! other, so that a server is started once for all of them.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use aya::Ebpf;
use bosh_dns_xdp_benches::{
    cpu::CpuTime,
    dnsperf::{Load, Seen, percentile},
    foundation::Foundation,
    kxdpgun,
    lab::{Lab, SERVER_ADDRESS},
    report::Rounds,
};
use whole_system_tests::{interrupt, process::wait_until};

use crate::{
    queries::Queries,
    subject::{Running, Subject},
};

/// Queries per second at which latencies are compared: what every subject can serve.
pub(super) const LATENCY_RATE: u32 = 20_000;

/// Shares of queries whose latency is told.
pub(super) const PERCENTILES: [(&str, f64); 3] = [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)];

/// How long is asked at that rate before anything is measured: some thousands of queries fill
/// caches and tables, and what has no room in the list of a huge foundation is learned.
const WARM_UP: Duration = Duration::from_millis(300);

/// What a load is measured in: a machine that is shared with others is disturbed for
/// shorter or longer than that, and the spread of the slices shows it.
const SLICE: Duration = Duration::from_millis(125);

/// How long a load goes on before the first slice. Observed: with its beginning in them,
/// figures of half a second are up to a fifth off those of longer loads.
const LEAD: Duration = Duration::from_millis(250);

/// How long it goes on after the last one.
const TRAIL: Duration = Duration::from_millis(50);

/// In how many parts the latencies of a load are told.
const LATENCY_PARTS: usize = 4;

/// A subject that answers in a lab.
pub(super) struct Cell<'a> {
    /// Who.
    pub(super) subject: &'a Subject,
    /// Its processes; they end before the lab goes.
    pub(super) running: Running,
    /// Where it runs.
    pub(super) lab: Lab,
}

/// Asks a cell by dnsperf.
pub(super) struct Asker<'a> {
    /// Whom.
    cell: &'a Cell<'a>,
    /// Without it sockets hear nothing from a subject in native mode.
    _program: Option<Ebpf>,
}

impl<'a> Cell<'a> {
    /// Starts the subject and waits for its first answer.
    pub(super) fn start(lab: Lab, subject: &'a Subject, foundation: &Foundation) -> Result<Self> {
        let running = subject.start(&lab, foundation)?;
        Ok(Self { subject, running, lab })
    }

    /// To be dropped before a cost is measured: kxdpgun wants the interface for itself.
    pub(super) fn asker(&self) -> Result<Asker<'_>> {
        let program = self.subject.client_program(&self.lab)?;
        self.lab.pin_napi()?;
        Ok(Asker { cell: self, _program: program })
    }

    /// CPU time in microseconds that the server's side uses for one reply, when queries
    /// come at this rate whether it keeps up or not; slice by slice.
    pub(super) fn cost(&self, queries: &Queries, rate: u32, duration: Duration) -> Result<Cost> {
        let load =
            kxdpgun::Load { queries: &queries.path, rate, batch: 10, duration: LEAD + duration + TRAIL };
        let lab = &self.lab;
        let (slices, _) = self.in_slices(duration, || load.run(lab))?;
        let cpu = |slice: &Slice| slice.cpu.as_secs_f64() * 1e6 / slice.replies.max(1) as f64;
        let [arrivals, sleeps] = [|slice: &Slice| slice.arrivals, |slice: &Slice| slice.sleeps]
            .map(|of| slices.iter().map(of).sum::<u64>());
        Ok(Cost {
            cpu: Rounds(slices.iter().map(cpu).collect()),
            packets_a_wake_up: arrivals as f64 / sleeps.max(1) as f64,
        })
    }

    /// What is answered when this rate is offered, whether it is kept up with or not.
    pub(super) fn offer(&self, queries: &Queries, rate: u32, duration: Duration) -> Result<Offered> {
        let load =
            kxdpgun::Load { queries: &queries.path, rate, batch: 32, duration: LEAD + duration + TRAIL };
        let before = self.read()?;
        let lab = &self.lab;
        let (slices, seen) = self.in_slices(duration, || load.run(lab))?;
        let arrived = self.read()?.arrivals - before.arrivals;
        let per_second = |of: fn(&Slice) -> f64| -> Rounds {
            Rounds(slices.iter().map(|slice| of(slice) / slice.time.as_secs_f64()).collect())
        };
        Ok(Offered {
            rate,
            answered: per_second(|slice| slice.replies as f64),
            busy: per_second(|slice| slice.cpu.as_secs_f64()).median(),
            dropped_before: seen.sent.saturating_sub(arrived) as f64 / seen.sent.max(1) as f64,
            wrong: seen.received - seen.no_error,
        })
    }

    /// What happens in the slices of this duration, under a load that begins [`LEAD`]
    /// before and ends [`TRAIL`] after it.
    fn in_slices<T: Send>(
        &self,
        duration: Duration,
        load: impl FnOnce() -> Result<T> + Send,
    ) -> Result<(Vec<Slice>, T)> {
        let before = self.lab.replies()?;
        thread::scope(|scope| {
            let load = scope.spawn(load);
            let slices = self.slices(before, duration);
            // What went wrong with the load is why there were no slices.
            let seen = load.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            Ok((slices?, seen))
        })
    }

    /// Reads slices, from [`LEAD`] after the first replies on.
    fn slices(&self, before: u64, duration: Duration) -> Result<Vec<Slice>> {
        /// How long a generator may take to begin.
        const BEGIN: Duration = Duration::from_secs(5);
        /// More packets than a new interface gets by itself.
        const BEGUN: u64 = 100;
        let begun = || self.lab.replies().is_ok_and(|replies| replies > before + BEGUN);
        wait_until("the first replies", BEGIN, begun)?;
        thread::sleep(LEAD);
        let mut slices = Vec::new();
        let mut last = self.read()?;
        for _ in 0..duration.div_duration_f64(SLICE).round() as u32 {
            thread::sleep(SLICE);
            ensure!(!interrupt::requested(), "interrupted");
            let now = self.read()?;
            slices.push(Slice {
                time: now.time - last.time,
                cpu: now.cpu - last.cpu,
                replies: now.replies - last.replies,
                arrivals: now.arrivals - last.arrivals,
                sleeps: now.sleeps.saturating_sub(last.sleeps),
            });
            last = now;
        }
        Ok(slices)
    }

    /// What there is up to now.
    fn read(&self) -> Result<Reading> {
        let cpu = self.lab.server_cpu(&self.running.processes)?;
        let (arrivals, sleeps) = (self.lab.arrivals()?, self.lab.sleeps()?);
        Ok(Reading { time: Instant::now(), cpu, replies: self.lab.replies()?, arrivals, sleeps })
    }
}

/// What queries cost at a fixed rate.
pub(super) struct Cost {
    /// CPU time of the server's side for each reply, microseconds, slice by slice.
    pub(super) cpu: Rounds,
    /// The regime: how many queries the NAPI thread found whenever it was woken up. Where
    /// that is one, most of the cost is waking up, whoever answers.
    pub(super) packets_a_wake_up: f64,
}

/// What came of a load that is not held back by the server.
pub(super) struct Offered {
    /// Queries per second that were offered.
    pub(super) rate: u32,
    /// Replies per second, slice by slice.
    pub(super) answered: Rounds,
    /// Share of the time in which the server's side had the CPU.
    pub(super) busy: f64,
    /// Share of the queries that the server's end of the veth had no room for.
    pub(super) dropped_before: f64,
    /// Replies with another RCODE than NOERROR.
    pub(super) wrong: u64,
}

/// What there was up to a moment.
struct Reading {
    /// The moment.
    time: Instant,
    /// CPU time of the server's side.
    cpu: CpuTime,
    /// Replies that reached the client.
    replies: u64,
    /// Queries that reached the server's interface.
    arrivals: u64,
    /// How often the server's NAPI thread has gone to sleep.
    sleeps: u64,
}

/// What happened between two readings.
struct Slice {
    /// How long it was.
    time: Duration,
    /// CPU time of the server's side.
    cpu: Duration,
    /// Replies that reached the client.
    replies: u64,
    /// Queries that reached the server's interface.
    arrivals: u64,
    /// How often the server's NAPI thread went to sleep.
    sleeps: u64,
}

impl Asker<'_> {
    /// Asks until all caches and tables are filled.
    pub(super) fn warm_up(&self, queries: &Queries) -> Result<()> {
        self.run(Load { rate: Some(LATENCY_RATE), ..load(queries, WARM_UP) })?;
        Ok(())
    }

    /// As many replies per second as dnsperf gets, slice by slice.
    pub(super) fn highest_rate(&self, queries: &Queries, duration: Duration) -> Result<Rounds> {
        let launcher = self.cell.lab.client_launcher();
        let load = load(queries, LEAD + duration + TRAIL);
        let (slices, _) = self.cell.in_slices(duration, || load.run(&launcher))?;
        let rate = |slice: &Slice| slice.replies as f64 / slice.time.as_secs_f64();
        Ok(Rounds(slices.iter().map(rate).collect()))
    }

    /// Latencies in microseconds for each of [`PERCENTILES`], part by part.
    pub(super) fn latencies(&self, queries: &Queries, duration: Duration) -> Result<[Rounds; 3]> {
        let timed = Load { rate: Some(LATENCY_RATE), percentiles: true, ..load(queries, duration) };
        let seen = self.run(timed)?;
        let parts = || seen.latencies.chunks(seen.latencies.len().div_ceil(LATENCY_PARTS).max(1));
        let within = |part, share| percentile(part, share).unwrap_or_default().as_secs_f64() * 1e6;
        Ok(PERCENTILES.map(|(_, share)| Rounds(parts().map(|part| within(part, share)).collect())))
    }

    /// Runs dnsperf.
    fn run(&self, load: Load<'_>) -> Result<Seen> {
        load.run(&self.cell.lab.client_launcher())
    }
}

/// As many of these queries as go.
fn load(queries: &Queries, duration: Duration) -> Load<'_> {
    let path = &queries.path;
    Load {
        server: SERVER_ADDRESS,
        queries: path,
        duration,
        rate: None,
        percentiles: false,
        edns: false,
        one_at_a_time: false,
    }
}
