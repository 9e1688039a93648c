//! A subject that runs in a lab, and what is measured of it: one measurement after the
//! other, so that a server is started once for all of them.
//!
//! What a core answers, and what it costs, the generator within the kernel shows; how long a
//! client waits, dnsperf.

use std::time::Duration;

use anyhow::Result;
use aya::Ebpf;
use bosh_dns_xdp_benches::{
    dnsperf::{Load, Seen, percentile},
    foundation::Foundation,
    lab::{Lab, SERVER_ADDRESS},
    load::Loaded,
    report::Rounds,
};

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

/// In how many parts the latencies of a load are told.
const LATENCY_PARTS: usize = 4;

/// A subject that answers in a lab.
pub(super) struct Cell<'a> {
    pub(super) subject: &'a Subject,
    /// Its processes; they end before the lab goes.
    pub(super) running: Running,
    pub(super) lab: Lab,
}

/// Asks a cell by dnsperf.
pub(super) struct Asker<'a> {
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

    /// For latencies; to be dropped before [`Self::loaded`]: both attach a program to the client's end.
    pub(super) fn asker(&self) -> Result<Asker<'_>> {
        let program = self.subject.client_program(&self.lab)?;
        self.lab.pin_napi()?;
        Ok(Asker { cell: self, _program: program })
    }

    /// For everything else; to be dropped before [`Self::asker`].
    pub(super) fn loaded(&self, queries: &Queries) -> Result<Loaded<'_>> {
        Loaded::new(&self.lab, &self.running.processes, &queries.lines)
    }
}

impl Asker<'_> {
    /// Asks until all caches and tables are filled.
    pub(super) fn warm_up(&self, queries: &Queries) -> Result<()> {
        self.run(Load { rate: Some(LATENCY_RATE), ..load(queries, WARM_UP) })?;
        Ok(())
    }

    /// Latencies in microseconds for each of [`PERCENTILES`], part by part.
    pub(super) fn latencies(&self, queries: &Queries, duration: Duration) -> Result<[Rounds; 3]> {
        let timed = Load { rate: Some(LATENCY_RATE), percentiles: true, ..load(queries, duration) };
        let seen = self.run(timed)?;
        let parts = || seen.latencies.chunks(seen.latencies.len().div_ceil(LATENCY_PARTS).max(1));
        let within = |part, share| percentile(part, share).unwrap_or_default().as_secs_f64() * 1e6;
        Ok(PERCENTILES.map(|(_, share)| Rounds(parts().map(|part| within(part, share)).collect())))
    }

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
