//! A subject that runs in a lab, and what is measured of it: one measurement after the
//! other, so that a server is started once for all of them.

use std::time::Duration;

use anyhow::Result;
use aya::Ebpf;
use bosh_dns_xdp_benches::{
    dnsperf::{Load, Seen},
    foundation::Foundation,
    kxdpgun,
    lab::{Lab, SERVER_ADDRESS},
};

use crate::{
    queries::Queries,
    subject::{Running, Subject},
};

/// Queries per second at which latencies are compared: what every subject can serve.
pub(super) const LATENCY_RATE: u32 = 20_000;

/// Shortest load under which a cost is measured. Observed: in half a second the figures are
/// up to a fifth off those of longer loads; from one second on they stay alike.
const SHORTEST_FOR_COST: Duration = Duration::from_secs(1);

/// Shares of queries whose latency is told.
pub(super) const PERCENTILES: [(&str, f64); 3] = [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)];

/// How long is asked at that rate before anything is measured: some thousands of queries fill
/// caches and tables, and what has no room in the list of a huge foundation is learned.
const WARM_UP: Duration = Duration::from_millis(300);

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
    /// come at this rate whether it keeps up or not.
    pub(super) fn cost(&self, queries: &Queries, rate: u32, duration: Duration) -> Result<f64> {
        let used = || self.lab.server_cpu(&self.running.processes);
        let duration = duration.max(SHORTEST_FOR_COST);
        let before = used()?;
        let replies = kxdpgun::send(&self.lab, &queries.path, rate, duration)?.replies;
        let spent = used()? - before;
        Ok(spent.as_secs_f64() * 1e6 / replies.max(1) as f64)
    }
}

impl Asker<'_> {
    /// Asks until all caches and tables are filled.
    pub(super) fn warm_up(&self, queries: &Queries) -> Result<()> {
        self.run(Load { rate: Some(LATENCY_RATE), ..load(queries, WARM_UP) })?;
        Ok(())
    }

    /// As many replies per second as dnsperf gets.
    pub(super) fn highest_rate(&self, queries: &Queries, duration: Duration) -> Result<f64> {
        Ok(self.run(load(queries, duration))?.rate)
    }

    /// Latencies in microseconds, one for each of [`PERCENTILES`].
    pub(super) fn latencies(&self, queries: &Queries, duration: Duration) -> Result<[f64; 3]> {
        let timed = Load { rate: Some(LATENCY_RATE), percentiles: true, ..load(queries, duration) };
        let seen = self.run(timed)?;
        Ok(PERCENTILES.map(|(_, share)| seen.percentile(share).unwrap_or_default().as_secs_f64() * 1e6))
    }

    /// Runs dnsperf.
    fn run(&self, load: Load<'_>) -> Result<Seen> {
        load.run(&self.cell.lab.client_launcher())
    }
}

/// As many of these queries as go.
fn load(queries: &Queries, duration: Duration) -> Load<'_> {
    let path = &queries.path;
    Load { server: SERVER_ADDRESS, queries: path, duration, rate: None, percentiles: false, edns: false }
}
