//! Figures of a load, between two readings of the counters.

use std::{collections::BTreeMap, time::Instant};

use anyhow::Result;
use hdrhistogram::Histogram;
use hickory_proto::op::ResponseCode;
use nix::errno::Errno;
use serde::{Serialize, Serializer};

use crate::{
    generator::{CpuUse, Generator, Totals},
    interface::{Drops, Interface, Losses},
    orders::{BUCKETS_PER_DOUBLING, Counts},
    pauses::Pauses,
};

/// Significant digits of the histogram, as many as the kernel's buckets have.
const DIGITS: u8 = 2;

/// The subject of the figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// A part of a load, as it runs. Replies to its last queries may count in the next one.
    Interval,
    /// A load, with its last replies.
    Total,
    /// A load of a search.
    Trial,
    /// A load at full speed between those of a search.
    Saturated,
    /// A load of a comparison.
    Turn,
}

/// Figures of a load; latencies in microseconds.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) kind: Kind,
    /// Wanted rate; none for saturation.
    pub(crate) rate: Option<u32>,
    /// Seconds from the first query to the last.
    pub(crate) seconds: f64,
    pub(crate) sent: u64,
    /// Queries that were due but not sent, because the generating CPU was busy or a socket refused them.
    pub(crate) skipped: u64,
    /// Those of them that were skipped at once, because something had the CPU for about a millisecond or longer.
    pub(crate) stalled: u64,
    pub(crate) received: u64,
    /// Queries without a reply.
    pub(crate) lost: u64,
    /// Their share of the queries.
    pub(crate) loss: f64,
    /// Replies that no query awaited any more.
    pub(crate) late: u64,
    /// Replies with another number of answers than the first one to the same query.
    pub(crate) different: u64,
    /// Replies by RCODE.
    pub(crate) rcodes: BTreeMap<String, u64>,
    pub(crate) sent_per_second: f64,
    pub(crate) received_per_second: f64,
    /// From the moment at which a query was due.
    pub(crate) latency: Option<Latency>,
    /// From the moment at which a query was sent, of a load at a rate through sockets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) service_time: Option<Latency>,
    /// CPU time of the generating threads for each query, waiting for its time included.
    pub(crate) cpu_per_query: f64,
    /// Share of the time in which the generating threads waited for their CPU.
    pub(crate) cpu_waited: f64,
    /// Packets that the interface dropped, and replies that the sockets had no room for.
    pub(crate) dropped: Drops,
    /// Counters of losses of the interface's driver that have changed.
    pub(crate) counters: BTreeMap<String, u64>,
    /// Errors of the sockets by number.
    #[serde(serialize_with = "by_name", skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) errors: BTreeMap<i32, u64>,
    /// Pauses of the server, of a trial.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pauses: Option<Pauses>,
    pub(crate) cpus: Vec<OfCpu>,
    /// Latencies and, where they are known, service times.
    #[serde(skip)]
    pub(crate) histograms: Vec<Histogram<u64>>,
}

/// Distribution of the times of replies.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Latency {
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) max: f64,
}

/// Figures of one CPU: queries that it sent, and replies that it received.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct OfCpu {
    pub(crate) cpu: usize,
    pub(crate) sent: u64,
    pub(crate) skipped: u64,
    pub(crate) received: u64,
}

/// All counters at a moment.
pub(crate) struct Reading {
    time: Instant,
    totals: Totals,
    cpu: CpuUse,
    losses: Losses,
    errors: BTreeMap<i32, u64>,
}

impl Reading {
    pub(crate) fn take(generator: &Generator, interface: &Interface) -> Result<Self> {
        let mut losses = interface.read()?;
        // Else the server would be blamed.
        losses.drops.received += generator.dropped()?;
        Ok(Self {
            time: Instant::now(),
            totals: generator.totals()?,
            cpu: generator.cpu_use(),
            losses,
            errors: generator.errors(),
        })
    }

    /// Returns this reading with the replies of a later one, but the time and the generator's use of this one.
    pub(crate) fn with_replies_of(&self, later: Self) -> Self {
        Self {
            time: self.time,
            cpu: self.cpu,
            ..later
        }
    }

    /// Returns the figures since an earlier reading.
    pub(crate) fn since(&self, earlier: &Self, kind: Kind, rate: Option<u32>) -> Result<Report> {
        let counts = self.totals.sum().since(&earlier.totals.sum());
        let seconds = (self.time - earlier.time).as_secs_f64();
        let mut cpus = Vec::new();
        for (&cpu, now) in &self.totals.cpus {
            let before = earlier.totals.cpus.get(&cpu).copied().unwrap_or_default();
            let of_cpu = now.since(&before);
            cpus.push(OfCpu {
                cpu,
                sent: of_cpu.sent,
                skipped: of_cpu.skipped,
                received: of_cpu.received(),
            });
        }
        let now = &self.totals;
        let before = &earlier.totals;
        let mut histograms = vec![histogram_since(&before.latencies, &now.latencies)?];
        // At full speed a query is due when it is sent.
        if rate.is_some() && !now.service_times.is_empty() {
            histograms.push(histogram_since(&before.service_times, &now.service_times)?);
        }
        let used = (self.cpu.used.saturating_sub(earlier.cpu.used)).as_secs_f64();
        // A thread that has ended since is no longer in the sum.
        let waited = (self.cpu.waited.saturating_sub(earlier.cpu.waited)).as_secs_f64();
        let received = counts.received();
        // In an interval more replies may come than queries leave: those to queries of the one before.
        let lost = counts.sent.saturating_sub(received);
        let losses = self.losses.since(&earlier.losses);
        let mut errors = BTreeMap::new();
        for (&error, now) in &self.errors {
            let more = now - earlier.errors.get(&error).copied().unwrap_or(0);
            if more > 0 {
                errors.insert(error, more);
            }
        }
        Ok(Report {
            kind,
            rate,
            seconds,
            sent: counts.sent,
            skipped: counts.skipped,
            stalled: counts.stalled,
            received,
            lost,
            loss: share(lost, counts.sent),
            late: counts.late,
            different: counts.different,
            rcodes: rcodes(&counts),
            sent_per_second: counts.sent as f64 / seconds,
            received_per_second: received as f64 / seconds,
            latency: histograms.first().and_then(Latency::of),
            service_time: histograms.get(1).and_then(Latency::of),
            cpu_per_query: used * 1e6 / counts.sent.max(1) as f64,
            cpu_waited: waited / seconds,
            dropped: losses.drops,
            counters: losses.of_driver,
            errors,
            pauses: None,
            cpus,
            histograms,
        })
    }
}

impl Report {
    /// Returns the share of the queries that were lost in pauses.
    pub(crate) fn lost_in_pauses(&self) -> f64 {
        self.pauses
            .map_or(0.0, |pauses| share(pauses.lost, self.sent))
    }
}

fn by_name<S: Serializer>(errors: &BTreeMap<i32, u64>, serializer: S) -> Result<S::Ok, S::Error> {
    let name = |(&error, count)| (format!("{:?}", Errno::from_raw(error)), count);
    serializer.collect_map(errors.iter().map(name))
}

fn share(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

/// Returns replies by the names of their RCODEs.
fn rcodes(counts: &Counts) -> BTreeMap<String, u64> {
    let mut rcodes = BTreeMap::new();
    for (code, &count) in (0..).zip(&counts.rcodes) {
        if count > 0 {
            rcodes.insert(name_of(code), count);
        }
    }
    rcodes
}

/// Returns an RCODE as dig and dnsperf print it.
fn name_of(code: u8) -> String {
    match ResponseCode::from(0, code) {
        ResponseCode::NoError => "NOERROR".to_owned(),
        ResponseCode::FormErr => "FORMERR".to_owned(),
        ResponseCode::ServFail => "SERVFAIL".to_owned(),
        ResponseCode::NXDomain => "NXDOMAIN".to_owned(),
        ResponseCode::NotImp => "NOTIMP".to_owned(),
        ResponseCode::Refused => "REFUSED".to_owned(),
        _ => format!("RCODE{code}"),
    }
}

/// Returns a histogram for as many nanoseconds as the kernel's buckets have.
pub(crate) fn empty_histogram() -> Result<Histogram<u64>> {
    Ok(Histogram::new_with_bounds(1, 1 << 35, DIGITS)?)
}

/// Returns the histogram of the kernel's buckets, in nanoseconds.
fn histogram(buckets: &[u64]) -> Result<Histogram<u64>> {
    let mut histogram = empty_histogram()?;
    for (bucket, &count) in (0..).zip(buckets) {
        if count > 0 {
            histogram.record_n(middle_of(bucket), count)?;
        }
    }
    Ok(histogram)
}

/// Returns the histogram of what was counted since an earlier reading.
fn histogram_since(earlier: &[u64], now: &[u64]) -> Result<Histogram<u64>> {
    let mut buckets = Vec::new();
    for (now, before) in now.iter().zip(earlier) {
        buckets.push(now - before);
    }
    histogram(&buckets)
}

/// Returns the middle of a bucket of [`crate::orders::bucket_of`].
fn middle_of(bucket: u64) -> u64 {
    let shift = (bucket / BUCKETS_PER_DOUBLING).saturating_sub(1);
    let low = (bucket - shift * BUCKETS_PER_DOUBLING) << shift;
    low + ((1 << shift) >> 1)
}

impl Latency {
    fn of(histogram: &Histogram<u64>) -> Option<Self> {
        if histogram.is_empty() {
            return None;
        }
        let at = |share: f64| histogram.value_at_quantile(share) as f64 / 1e3;
        Some(Self {
            mean: histogram.mean() / 1e3,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: histogram.max() as f64 / 1e3,
        })
    }
}

/// Returns the percentiles in the text format of HdrHistogram, in microseconds.
pub(crate) fn percentiles(histogram: &Histogram<u64>) -> String {
    let mut text = "       Value     Percentile TotalCount 1/(1-Percentile)\n\n".to_owned();
    let mut total = 0;
    for step in histogram.iter_quantiles(5) {
        total += step.count_since_last_iteration();
        let value = step.value_iterated_to() as f64 / 1e3;
        let share = step.quantile_iterated_to();
        text += &format!("{value:12.3} {share:.12} {total:10}");
        // The last line has no quotient.
        if share < 1.0 {
            text += &format!(" {:14.2}", 1.0 / (1.0 - share));
        }
        text.push('\n');
    }
    text + &format!(
        "#[Mean = {:.3}, StdDeviation = {:.3}]\n#[Max = {:.3}, Total count = {}]\n",
        histogram.mean() / 1e3,
        histogram.stdev() / 1e3,
        histogram.max() as f64 / 1e3,
        histogram.len()
    )
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use super::*;
    use crate::orders::{BUCKETS, bucket_of};

    /// Figures of a load at a rate, all else empty.
    pub(crate) fn report(sent: u64, received: u64) -> Report {
        let reading = |sent, received| {
            let mut counts = Counts {
                sent,
                ..Counts::default()
            };
            counts.rcodes[0] = received;
            Totals {
                cpus: [(1, counts)].into(),
                latencies: vec![0; BUCKETS],
                service_times: Vec::new(),
            }
        };
        let begun = Instant::now();
        let earlier = Reading {
            time: begun,
            totals: reading(0, 0),
            cpu: CpuUse::default(),
            losses: Losses::default(),
            errors: BTreeMap::new(),
        };
        let later = Reading {
            time: begun + Duration::from_secs(2),
            totals: reading(sent, received),
            cpu: CpuUse::default(),
            losses: Losses::default(),
            errors: BTreeMap::new(),
        };
        later.since(&earlier, Kind::Total, Some(1000)).unwrap()
    }

    #[test]
    fn buckets_are_narrow() {
        for latency in [
            0,
            1,
            127,
            128,
            255,
            256,
            1_000,
            123_456,
            999_999_999,
            17_000_000_000,
        ] {
            let middle = middle_of(bucket_of(latency) as u64);
            assert!(
                middle.abs_diff(latency) * 200 <= latency,
                "{latency}: {middle}"
            );
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        // Buckets follow one another.
        for bucket in 0..BUCKETS as u64 {
            assert_eq!(bucket_of(middle_of(bucket)), bucket as usize);
        }
    }

    #[test]
    fn report_has_rates_and_percentiles() {
        let found = report(2000, 1600);
        assert_eq!(
            (found.sent_per_second, found.received_per_second),
            (1000.0, 800.0)
        );
        assert_eq!((found.lost, found.loss), (400, 0.2));
        assert_eq!(found.rcodes, [("NOERROR".to_owned(), 1600)].into());
        assert!(found.latency.is_none());

        let mut buckets = vec![0; BUCKETS];
        for microseconds in 1..=1000 {
            buckets[bucket_of(microseconds * 1000)] += 1;
        }
        let histogram = histogram(&buckets).unwrap();
        let latency = Latency::of(&histogram).unwrap();
        for (found, expected) in [
            (latency.p50, 500.0),
            (latency.p99, 990.0),
            (latency.max, 1000.0),
        ] {
            assert!(
                (found - expected).abs() <= expected / 100.0,
                "{found}, not {expected}"
            );
        }
        let text = percentiles(&histogram);
        assert!(text.contains("Total count = 1000]"), "{text}");
    }

    /// Returns a reading whose figures are multiples of `base`.
    fn reading(time: Instant, base: u64, cpus: &[usize]) -> Reading {
        let mut counts = Counts {
            sent: 10 * base,
            skipped: 3 * base,
            stalled: base,
            late: 2 * base,
            different: base,
            ..Counts::default()
        };
        counts.rcodes[0] = 5 * base;
        counts.rcodes[3] = base;
        let mut latencies = vec![0; BUCKETS];
        latencies[100] = 6 * base;
        let mut service_times = vec![0; BUCKETS];
        service_times[50] = 5 * base;
        Reading {
            time,
            totals: Totals {
                cpus: cpus.iter().map(|&cpu| (cpu, counts)).collect(),
                latencies,
                service_times,
            },
            cpu: CpuUse {
                used: Duration::from_millis(100 * base),
                waited: Duration::from_millis(40 * base),
            },
            losses: Losses {
                drops: Drops {
                    received: 7 * base,
                    sent: 8 * base,
                },
                of_driver: [("rx_missed".to_owned(), 9 * base)].into(),
            },
            errors: [(111, 4 * base)].into(),
        }
    }

    /// Returns the numbers of replies in the histograms of a report.
    fn counted(report: &Report) -> Vec<u64> {
        report.histograms.iter().map(Histogram::len).collect()
    }

    #[test]
    fn figures_are_those_since_the_earlier_reading() {
        let begun = Instant::now();
        let found = reading(begun + Duration::from_secs(4), 3, &[1, 2])
            .since(&reading(begun, 1, &[1]), Kind::Interval, None)
            .unwrap();
        assert_eq!(
            (found.kind, found.rate, found.seconds),
            (Kind::Interval, None, 4.0)
        );
        // Two of CPU 1, and three of CPU 2, which is new.
        assert_eq!((found.sent, found.skipped, found.stalled), (50, 15, 5));
        assert_eq!((found.received, found.lost, found.loss), (30, 20, 0.4));
        assert_eq!((found.late, found.different), (10, 5));
        let rcodes = [("NOERROR".to_owned(), 25), ("NXDOMAIN".to_owned(), 5)];
        assert_eq!(found.rcodes, rcodes.into());
        assert_eq!(
            (found.sent_per_second, found.received_per_second),
            (12.5, 7.5)
        );
        assert_eq!(found.cpu_per_query, 200_000.0 / 50.0);
        assert_eq!(found.cpu_waited, 0.02);
        let dropped = Drops {
            received: 14,
            sent: 16,
        };
        assert_eq!(found.dropped, dropped);
        assert_eq!(found.counters, [("rx_missed".to_owned(), 18)].into());
        assert_eq!(found.errors, [(111, 8)].into());
        let json = serde_json::to_value(&found).unwrap();
        assert_eq!(json["errors"], serde_json::json!({"ECONNREFUSED": 8}));
        let without = serde_json::to_value(report(1, 1)).unwrap();
        assert_eq!(without.get("errors"), None);
        let cpus: Vec<_> = found
            .cpus
            .iter()
            .map(|of| (of.cpu, of.sent, of.skipped, of.received))
            .collect();
        assert_eq!(cpus, [(1, 20, 6, 12), (2, 30, 9, 18)]);
        assert_eq!(counted(&found), [12]);
        assert!(json.get("service_time").is_none());
        let latency = found.latency.unwrap();
        assert_eq!((latency.mean, latency.p50, latency.max), (0.1, 0.1, 0.1));
    }

    #[test]
    fn service_times_begin_when_queries_are_sent() {
        let begun = Instant::now();
        // At a rate, what a query waited before it was sent is part of one and not of the other.
        let found = reading(begun + Duration::from_secs(4), 3, &[1])
            .since(&reading(begun, 1, &[1]), Kind::Interval, Some(10))
            .unwrap();
        assert_eq!(counted(&found), [12, 10]);
        let json = serde_json::to_value(&found).unwrap();
        assert_eq!(
            (&json["latency"]["p50"], &json["service_time"]["p50"]),
            (&0.1.into(), &0.05.into())
        );
    }

    #[test]
    fn load_ends_before_its_last_replies() {
        let ended = Instant::now();
        let later = reading(ended + Duration::from_secs(4), 3, &[1]);
        let end = reading(ended, 1, &[1]).with_replies_of(later);
        assert_eq!((end.time, end.cpu.used.as_millis()), (ended, 100));
        assert_eq!((end.totals.sum().sent, end.losses.drops.sent), (30, 24));
    }

    #[test]
    fn codes_have_their_names() {
        let names = [0, 1, 2, 3, 4, 5, 9].map(name_of);
        let expected = [
            "NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED", "RCODE9",
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn percentiles_are_written_as_by_hdr_histogram() {
        let mut histogram = Histogram::new_with_bounds(1, 1 << 35, DIGITS).unwrap();
        histogram.record_n(1000, 3).unwrap();
        histogram.record_n(2000, 1).unwrap();
        let text = percentiles(&histogram);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "       Value     Percentile TotalCount 1/(1-Percentile)"
        );
        assert_eq!(
            lines[2],
            "       1.003 0.000000000000          3           1.00"
        );
        let last = lines.iter().rfind(|line| !line.starts_with('#')).unwrap();
        assert!(last.ends_with("1.000000000000          4"), "{last}");
        assert!(text.contains("Total count = 4]"), "{text}");
        assert!(text.contains("#[Mean = 1.2"), "{text}");
    }

    #[test]
    fn buckets_double() {
        for (latency, bucket) in [
            (0, 0),
            (127, 127),
            (128, 128),
            (255, 255),
            (256, 256),
            (257, 256),
            (258, 257),
            (511, 383),
            (512, 384),
            (1 << 34, BUCKETS - 1),
            ((1 << 34) - 1, BUCKETS - 1),
            (1 << 33, BUCKETS - 128),
        ] {
            assert_eq!(bucket_of(latency), bucket, "{latency}");
        }
    }

    #[test]
    fn counts_are_added_and_subtracted() {
        let counts = |base: u64| Counts {
            sent: base,
            skipped: 2 * base,
            stalled: base,
            late: 3 * base,
            different: 4 * base,
            rcodes: std::array::from_fn(|code| base * code as u64),
        };
        let mut sum = counts(2);
        sum.add(&counts(5));
        assert_eq!(sum, counts(7));
        assert_eq!(sum.since(&counts(3)), counts(4));
        assert_eq!(counts(1).received(), (0..16).sum::<u64>());
        assert_eq!(counts(1).no_error(), 0);
        let mut only = Counts::default();
        only.rcodes[0] = 9;
        assert_eq!((only.no_error(), only.received()), (9, 9));
        for (ports, sets) in [
            (1, 1),
            (3, 1),
            (6, 2),
            (8, 8),
            (16, 16),
            (48, 16),
            (64, 16),
            (1024, 16),
        ] {
            assert_eq!(crate::orders::sets(ports), sets, "{ports}");
        }
    }

    #[test]
    fn middle_of_a_bucket_is_halfway() {
        for (bucket, middle) in [
            (0, 0),
            (127, 127),
            (255, 255),
            (256, 257),
            (257, 259),
            (384, 514),
            (512, 1028),
        ] {
            assert_eq!(middle_of(bucket), middle, "{bucket}");
        }
    }
}
