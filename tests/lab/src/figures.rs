//! Figures: repeated measurements, their format, and figures measured earlier.

use serde::{Deserialize, Serialize};

/// Repeated measurements of a figure: several rounds, with slices of each.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Rounds(pub Vec<f64>);

impl Rounds {
    /// Returns the median; for an even count the mean of the middle two, for none NaN.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        match sorted.len() {
            0 => f64::NAN,
            n if n % 2 == 1 => sorted[n / 2],
            n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
        }
    }

    /// Returns the best quartile: on a shared machine the least disturbed values. NaN if empty.
    pub fn best_quartile(&self, more_is_better: bool) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        if more_is_better {
            sorted.reverse();
        }
        sorted.get(sorted.len() / 4).copied().unwrap_or(f64::NAN)
    }

    /// Returns the smallest and the largest value.
    pub fn spread(&self) -> (f64, f64) {
        let fold = |pick: fn(f64, f64) -> f64, start| self.0.iter().copied().fold(start, pick);
        (
            fold(f64::min, f64::INFINITY),
            fold(f64::max, f64::NEG_INFINITY),
        )
    }

    /// Returns this figure relative to another one with as many rounds. A drift of the machine's
    /// speed between rounds affects both and cancels out.
    pub fn ratio_to(&self, other: &Self) -> Self {
        Self(
            self.0
                .iter()
                .zip(&other.0)
                .map(|(own, theirs)| own / theirs)
                .collect(),
        )
    }
}

/// Formats a number with three significant digits and thousands separators.
pub fn number(value: f64) -> String {
    if !value.is_finite() {
        return "–".to_owned();
    }
    let decimals = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        _ => 2,
    };
    let text = format!("{value:.decimals$}");
    let (whole, fraction) = text
        .split_once('.')
        .map_or((text.as_str(), None), |(w, f)| (w, Some(f)));
    let digits = whole.trim_start_matches('-');
    let mut grouped = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    let sign = if whole.starts_with('-') { "-" } else { "" };
    fraction.map_or_else(
        || format!("{sign}{grouped}"),
        |fraction| format!("{sign}{grouped}.{fraction}"),
    )
}

/// Figures of bosh-dns for runs without its binary: measured earlier, in the same set-ups, on
/// similar machines (two cores, Linux 6.18). Not measured by the current run.
pub mod quoted {
    /// Best rate of one saturated core, in queries per second: 155 group names, kxdpgun.
    pub const SATURATED: f64 = 13_600.0;

    /// Time and place of the measurement of [`SATURATED`].
    pub const SATURATED_ON: &str = "2026-11-22 on an AMD EPYC";

    /// The other figures, as a fact of the report.
    pub const OTHERS: &str = "bosh-dns of August 2026, mixed names, by dnsperf, date not recorded: 19,545 queries/s at \
                              100 instances, 5,963 at 1,000, 670 at 10,000; at 1,000 instances and 2,000 \
                              queries/s 212 µs of CPU for each and a median latency of 232 µs; from a new \
                              records.json to the first new answer 514 ms at 1,000 instances, 620 ms at 10,000";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_ratios() {
        let a = Rounds(vec![3.0, 1.0, 2.0]);
        assert_eq!(a.median(), 2.0);
        assert_eq!(a.spread(), (1.0, 3.0));
        let many = Rounds((1..=8).map(f64::from).collect());
        assert_eq!(
            (many.best_quartile(false), many.best_quartile(true)),
            (3.0, 6.0)
        );
        assert_eq!(a.ratio_to(&Rounds(vec![1.0, 1.0, 4.0])).0, [3.0, 1.0, 0.5]);
        assert!(Rounds::default().median().is_nan());
    }

    #[test]
    fn numbers_are_readable() {
        assert_eq!(number(1234567.8), "1,234,568");
        assert_eq!(number(12.345), "12.3");
        assert_eq!(number(0.5), "0.50");
        assert_eq!(number(-1500.0), "-1,500");
        assert_eq!(number(f64::NAN), "–");
    }
}
