//! The latency of the observed server, in a histogram of fixed size.

use std::time::Duration;

use serde::Serialize;

/// Upper bounds of the buckets in microseconds; the last bucket has none.
const BOUNDS: [u64; 18] = [
    10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000,
    500_000, 1_000_000, 2_000_000, 5_000_000,
];

/// Numbers of replies by bucket of their latency.
#[derive(Clone, Debug, Default)]
pub struct Latencies {
    counts: [u64; BOUNDS.len() + 1],
}

/// Latencies, as reports show them.
#[derive(Clone, Debug, Serialize)]
pub struct LatencyReport {
    /// Number of replies that were measured.
    pub replies: u64,
    /// Upper bound in microseconds of the bucket that holds the median.
    pub median_us: Option<u64>,
    /// The same for 99 of 100.
    pub p99_us: Option<u64>,
    /// Upper bounds in microseconds with their counts; empty buckets are left out.
    pub buckets: Vec<(Option<u64>, u64)>,
}

impl Latencies {
    /// Counts the latency of a reply.
    pub fn add(&mut self, latency: Duration) {
        let micros = latency.as_micros();
        self.counts[BOUNDS.partition_point(|&bound| u128::from(bound) < micros)] += 1;
    }

    /// Returns the latencies for a report.
    pub fn report(&self) -> LatencyReport {
        let mut buckets = Vec::new();
        for (bucket, &count) in self.counts.iter().enumerate() {
            if count > 0 {
                buckets.push((BOUNDS.get(bucket).copied(), count));
            }
        }
        LatencyReport {
            replies: self.counts.iter().sum(),
            median_us: self.quantile(50),
            p99_us: self.quantile(99),
            buckets,
        }
    }

    /// Returns the upper bound of the bucket that holds this percentile; `None` without any latency, or
    /// in the last bucket.
    fn quantile(&self, percent: u64) -> Option<u64> {
        let total: u64 = self.counts.iter().sum();
        // Rounded up, so that a single reply is its own median.
        let wanted = (total * percent).div_ceil(100);
        let mut sum = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            sum += count;
            if total > 0 && sum >= wanted {
                return BOUNDS.get(bucket).copied();
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_bounds_of_buckets() {
        let mut latencies = Latencies::default();
        assert_eq!(latencies.report().median_us, None);
        for _ in 0..98 {
            latencies.add(Duration::from_micros(30));
        }
        latencies.add(Duration::from_micros(900));
        latencies.add(Duration::from_secs(9));
        let report = latencies.report();
        assert_eq!((report.replies, report.median_us), (100, Some(50)));
        assert_eq!(report.p99_us, Some(1_000));
        assert_eq!(
            report.buckets,
            [(Some(50), 98), (Some(1_000), 1), (None, 1)]
        );
    }
}
