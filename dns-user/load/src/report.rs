//! The result of a measurement, as a table and as JSON.

use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use crate::generator::{Latencies, Measured};

/// Figures of a measurement; times in microseconds, rates per second.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    /// Wanted rate; `None` for saturation.
    rate: Option<u32>,
    seconds: f64,
    queries: u64,
    /// Queries that were due but not sent, because the generating CPU was busy.
    skipped: u64,
    replies: u64,
    /// Replies with an RCODE other than NOERROR.
    errors: u64,
    /// Share of the queries without a reply.
    loss: f64,
    queries_per_second: f64,
    replies_per_second: f64,
    latency: Option<Percentiles>,
    /// Probes without a reply.
    lost_probes: u64,
}

/// Latency of probes in microseconds.
#[derive(Clone, Debug, Serialize)]
struct Percentiles {
    probes: usize,
    p50: f64,
    p90: f64,
    p99: f64,
    p999: f64,
    max: f64,
}

impl Report {
    pub(crate) fn new(rate: Option<u32>, measured: &Measured, latencies: Latencies) -> Self {
        let Measured { counts, took } = measured;
        let (seconds, replies) = (took.as_secs_f64(), counts.no_error + counts.other);
        let lost = counts.sent.saturating_sub(replies);
        Self {
            rate,
            seconds,
            queries: counts.sent,
            skipped: counts.skipped,
            replies,
            errors: counts.other,
            loss: if counts.sent == 0 { 0.0 } else { lost as f64 / counts.sent as f64 },
            queries_per_second: counts.sent as f64 / seconds,
            replies_per_second: replies as f64 / seconds,
            latency: percentiles(&latencies.answered),
            lost_probes: latencies.lost,
        }
    }

    pub(crate) fn json(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    pub(crate) fn table(&self) -> String {
        let mut text = format!(
            "queries   {:>12}  {:>12.0}/s\nreplies   {:>12}  {:>12.0}/s\nerrors    {:>12}\nloss      {:>11.3}%\nskipped   {:>12}\n",
            self.queries,
            self.queries_per_second,
            self.replies,
            self.replies_per_second,
            self.errors,
            self.loss * 100.0,
            self.skipped,
        );
        if let Some(Percentiles { probes, p50, p90, p99, p999, max }) = &self.latency {
            text += &format!(
                "latency   p50 {p50:.0} µs, p90 {p90:.0} µs, p99 {p99:.0} µs, p99.9 {p999:.0} µs, max {max:.0} µs \
                 ({probes} probes by socket, {} lost)\n",
                self.lost_probes
            );
        }
        if self.replies == 0 {
            text += "no reply: does the driver transmit XDP frames, and the other end of a veth pair receive them \
                     (ethtool -K INTERFACE gro on)?\n";
        }
        text
    }
}

/// Returns percentiles of sorted times by the nearest rank.
fn percentiles(sorted: &[Duration]) -> Option<Percentiles> {
    let at = |share: f64| {
        let rank = (share * sorted.len() as f64).ceil().max(1.0) as usize;
        sorted.get(rank.min(sorted.len()).checked_sub(1)?).map(|time| time.as_secs_f64() * 1e6)
    };
    Some(Percentiles {
        probes: sorted.len(),
        p50: at(0.5)?,
        p90: at(0.9)?,
        p99: at(0.99)?,
        p999: at(0.999)?,
        max: at(1.0)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use bench_programs::generator::Counts;

    #[test]
    fn report_has_rates_and_percentiles() {
        let counts = Counts { sent: 2000, skipped: 5, no_error: 1500, other: 100 };
        let answered = (1..=1000).map(Duration::from_micros).collect();
        let measured = Measured { counts, took: Duration::from_secs(2) };
        let report = Report::new(Some(1000), &measured, Latencies { answered, lost: 3 });
        assert_eq!((report.queries_per_second, report.replies_per_second, report.loss), (1000.0, 800.0, 0.2));
        let latency = report.latency.clone().unwrap();
        let rounded = [latency.p50, latency.p90, latency.p99, latency.p999, latency.max].map(f64::round);
        assert_eq!(rounded, [500.0, 900.0, 990.0, 999.0, 1000.0]);
        assert!(report.table().contains("p99 990 µs"), "{}", report.table());
        assert!(report.json().unwrap().contains("\"errors\": 100"));
        let silent =
            Measured { counts: Counts { sent: 1, ..Counts::default() }, took: Duration::from_secs(1) };
        let report = Report::new(None, &silent, Latencies::default());
        assert!(report.latency.is_none() && report.table().contains("no reply: "));
    }
}
