//! Runs dnsperf and parses its report.

use std::{collections::HashMap, path::Path, process::Command, time::Duration};

use anyhow::{Result, bail};

use crate::{lab::SERVER_ADDRESS, process::capture};

/// Parameters of a load.
#[derive(Clone, Debug)]
pub struct Load<'a> {
    /// File of `name type` lines.
    pub queries: &'a Path,
    /// Duration of the load.
    pub duration: Duration,
    /// Queries per second; `None` for as many as possible.
    pub rate: Option<u32>,
    /// Whether to keep each query's latency for percentiles, which costs the generator a line of
    /// output per query.
    pub percentiles: bool,
}

/// Totals of one run, as dnsperf reports them.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Number of queries sent.
    pub sent: u64,
    /// Number of replies within the time limit.
    pub completed: u64,
    /// Replies per second over the whole run.
    pub rate: f64,
    /// Latencies of single queries in the order of their replies; empty unless requested.
    pub latencies: Vec<Duration>,
    /// Number of replies by name of the RCODE.
    pub rcodes: HashMap<String, u64>,
}

impl Seen {
    /// Returns the number of queries without a reply.
    pub fn lost(&self) -> u64 {
        self.sent.saturating_sub(self.completed)
    }

    /// Returns the latency within which `share` (0 to 1) of the queries were answered.
    pub fn percentile(&self, share: f64) -> Option<Duration> {
        percentile(&self.latencies, share)
    }
}

/// Returns the value below which `share` (0 to 1) of the latencies lie.
pub fn percentile(latencies: &[Duration], share: f64) -> Option<Duration> {
    let last = latencies.len().checked_sub(1)?;
    let mut latencies = latencies.to_vec();
    let (_, found, _) = latencies.select_nth_unstable((last as f64 * share).round() as usize);
    Some(*found)
}

impl<'a> Load<'a> {
    /// Creates a load of as many of these queries as possible, without percentiles.
    pub fn new(queries: &'a Path, duration: Duration) -> Self {
        Self {
            queries,
            duration,
            rate: None,
            percentiles: false,
        }
    }

    /// Runs dnsperf against the lab's server; `launcher` is prepended to the command (a namespace, a
    /// CPU to pin to).
    pub fn run(&self, launcher: &[String]) -> Result<Seen> {
        let mut words: Vec<String> = launcher.to_vec();
        words.extend(["dnsperf", "-s"].map(str::to_owned));
        words.extend([
            SERVER_ADDRESS.to_string(),
            "-d".to_owned(),
            self.queries.display().to_string(),
        ]);
        words.extend(["-l", &self.duration.as_secs_f64().to_string()].map(str::to_owned));
        words.extend(["-c", "8", "-T", "1", "-q", "200", "-t", "2"].map(str::to_owned));
        if let Some(rate) = self.rate {
            words.extend(["-Q".to_owned(), rate.to_string()]);
        }
        if self.percentiles {
            words.push("-v".to_owned());
        }
        parse(&capture(Command::new(&words[0]).args(&words[1..]))?)
    }
}

/// Parses dnsperf's report and, with `-v`, its line per query (`> NOERROR name type seconds`).
fn parse(report: &str) -> Result<Seen> {
    let mut seen = Seen::default();
    for line in report.lines() {
        if let Some(reply) = line.strip_prefix("> ") {
            let seconds = reply
                .split_whitespace()
                .nth(3)
                .and_then(|field| field.parse().ok());
            seen.latencies.extend(seconds.map(Duration::from_secs_f64));
            continue;
        }
        let Some((key, value)) = line.trim().split_once(':') else {
            continue;
        };
        let first = value.split_whitespace().next().unwrap_or_default();
        match key {
            "Queries sent" => seen.sent = first.parse()?,
            "Queries completed" => seen.completed = first.parse()?,
            "Queries per second" => seen.rate = first.parse()?,
            "Response codes" => seen.rcodes = rcodes(value),
            _ => {}
        }
    }
    if seen.sent == 0 {
        bail!("dnsperf sent nothing: {report}");
    }
    Ok(seen)
}

/// Parses `NOERROR 123 (99.00%), NXDOMAIN 1 (1.00%)`.
fn rcodes(text: &str) -> HashMap<String, u64> {
    let entry = |part: &str| {
        let mut words = part.split_whitespace();
        Some((words.next()?.to_owned(), words.next()?.parse().ok()?))
    };
    text.split(',').filter_map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_is_parsed() {
        let report = "> NOERROR a.example A 0.000100\n> NOERROR b.example A 0.000300\n\
            Statistics:\n\n  Queries sent:         3\n  Queries completed:    2 (66.67%)\n  Queries lost:         1 (33.33%)\n\n\
              Response codes:       NOERROR 1 (50.00%), NXDOMAIN 1 (50.00%)\n\
              Queries per second:   1234.5\n\n  Average Latency (s):  0.000200 (min 0.000100, max 0.000300)\n";
        let seen = parse(report).unwrap();
        assert_eq!((seen.sent, seen.completed, seen.lost()), (3, 2, 1));
        assert_eq!(seen.rate, 1234.5);
        assert_eq!(seen.percentile(1.0), Some(Duration::from_micros(300)));
        assert_eq!(seen.rcodes["NXDOMAIN"], 1);
    }
}
