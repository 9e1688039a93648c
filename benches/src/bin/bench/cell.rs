//! A subject running in a lab, and its measurements, made consecutively so that a server is started only
//! once.
//!
//! The in-kernel generator measures throughput and cost; dnsperf measures latency.

use std::time::Duration;

use anyhow::Result;
use aya::Ebpf;
use bosh_dns_xdp_benches::{
    dnsperf::{Load, Seen, percentile},
    foundation::Foundation,
    lab::Lab,
    load::Loaded,
    report::Rounds,
};

use crate::{
    queries::Queries,
    subject::{Running, Subject},
};

/// Queries per second for latency measurements, low enough for every subject.
pub(super) const LATENCY_RATE: u32 = 20_000;

/// Reported percentiles of latency.
pub(super) const PERCENTILES: [(&str, f64); 3] = [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)];

/// Duration of the warm-up at that rate: some thousands of queries fill caches and tables, and
/// learn the names beyond the publisher's list of a huge foundation.
const WARM_UP: Duration = Duration::from_millis(300);

/// Number of parts into which the latencies of a load are divided.
const LATENCY_PARTS: usize = 4;

/// A subject that answers in a lab.
pub(super) struct Cell<'a> {
    pub(super) subject: &'a Subject,
    /// Processes of the subject, stopped before the lab is removed.
    pub(super) running: Running,
    pub(super) lab: Lab,
}

/// Queries a cell with dnsperf.
pub(super) struct Asker<'a> {
    cell: &'a Cell<'a>,
    /// In native mode sockets receive nothing from a subject without this program.
    _program: Option<Ebpf>,
}

impl<'a> Cell<'a> {
    /// Starts the subject and waits for its first answer.
    pub(super) fn start(lab: Lab, subject: &'a Subject, foundation: &Foundation) -> Result<Self> {
        let running = subject.start(&lab, foundation)?;
        Ok(Self { subject, running, lab })
    }

    /// Returns the client that measures latencies. Drop it before [`Self::loaded`]: both attach a program to
    /// the client's end.
    pub(super) fn asker(&self) -> Result<Asker<'_>> {
        let program = self.subject.client_program(&self.lab)?;
        self.lab.pin_napi()?;
        Ok(Asker { cell: self, _program: program })
    }

    /// Returns the load for all other measurements. Drop it before [`Self::asker`].
    pub(super) fn loaded(&self, queries: &Queries) -> Result<Loaded<'_>> {
        Loaded::new(&self.lab, &self.running.processes, &queries.lines)
    }
}

impl Asker<'_> {
    /// Queries until all caches and tables are filled.
    pub(super) fn warm_up(&self, queries: &Queries) -> Result<()> {
        self.run(Load { rate: Some(LATENCY_RATE), ..Load::new(&queries.path, WARM_UP) })?;
        Ok(())
    }

    /// Returns latencies in microseconds for each of [`PERCENTILES`], part by part.
    pub(super) fn latencies(&self, queries: &Queries, duration: Duration) -> Result<[Rounds; 3]> {
        let timed =
            Load { rate: Some(LATENCY_RATE), percentiles: true, ..Load::new(&queries.path, duration) };
        let seen = self.run(timed)?;
        let parts = || seen.latencies.chunks(seen.latencies.len().div_ceil(LATENCY_PARTS).max(1));
        let within = |part, share| percentile(part, share).unwrap_or_default().as_secs_f64() * 1e6;
        Ok(PERCENTILES.map(|(_, share)| Rounds(parts().map(|part| within(part, share)).collect())))
    }

    fn run(&self, load: Load<'_>) -> Result<Seen> {
        load.run(&self.cell.lab.client_launcher())
    }
}
