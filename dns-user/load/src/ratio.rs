//! The ratio of a figure of two servers, from blocks of turns.

use serde::Serialize;

/// A ratio of the second server to the first one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Ratio {
    /// Median of the blocks' ratios.
    pub(crate) median: f64,
    /// Interval that holds the median of all possible blocks with the confidence that was asked for; absent with too few blocks.
    pub(crate) interval: Option<[f64; 2]>,
    /// First and third quartile of the blocks' ratios.
    pub(crate) quartiles: [f64; 2],
    /// Ratio of the sums of all blocks, in which every pause counts.
    pub(crate) overall: f64,
}

impl Ratio {
    /// Returns the ratio of blocks, each the figures of the first and the second server, with an interval that misses
    /// the median with at most the probability `max_error`; `None` if it is not defined in any block.
    pub(crate) fn of(blocks: &[[f64; 2]], max_error: f64) -> Option<Self> {
        let mut ratios = Vec::with_capacity(blocks.len());
        let mut sums = [0.0, 0.0];
        for [first, second] in blocks {
            sums[0] += first;
            sums[1] += second;
            if *first > 0.0 {
                ratios.push(second / first);
            }
        }
        ratios.sort_by(f64::total_cmp);
        let last = ratios.len().checked_sub(1)?;
        let at = |share: f64| ratios[(share * last as f64).round() as usize];
        // The upper one of two middle values would favour the second server.
        let median = (ratios[last / 2] + ratios[last.div_ceil(2)]) / 2.0;
        let outside = outside(ratios.len(), max_error);
        Some(Self {
            median,
            interval: outside.map(|outside| [ratios[outside], ratios[last - outside]]),
            quartiles: [at(0.25), at(0.75)],
            overall: sums[1] / sums[0],
        })
    }

    /// Returns half the width of the interval in relation to the median.
    pub(crate) fn precision(&self) -> Option<f64> {
        let [low, high] = self.interval?;
        Some((high - low) / 2.0 / self.median)
    }
}

/// Returns how many of the lowest values, and of the highest, lie outside the interval of the median.
fn outside(count: usize, max_error: f64) -> Option<usize> {
    // Each value is below the median with probability 1/2, whatever their distribution, so the number of those below it
    // is binomial. The interval misses the median if at most `below` of them are, or at most as many are above.
    let mut probability = 0.5_f64.powf(count as f64);
    let mut error = 0.0;
    let mut outside = None;
    for below in 0..count / 2 {
        error += 2.0 * probability;
        if error > max_error {
            break;
        }
        outside = Some(below);
        probability *= (count - below) as f64 / (below + 1) as f64;
    }
    outside
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns blocks whose ratios are these.
    fn blocks(ratios: impl IntoIterator<Item = f64>) -> Vec<[f64; 2]> {
        let mut blocks = Vec::new();
        for ratio in ratios {
            blocks.push([100.0, 100.0 * ratio]);
        }
        blocks
    }

    #[test]
    fn intervals_are_those_of_the_sign_test() {
        // Conover, Practical Nonparametric Statistics, table A3 (p = 1/2): the interval begins at value 6 of 20.
        for (count, max_error, expected) in [
            (5, 0.05, None),
            (6, 0.05, Some(0)),
            // Two of 2^5 and of 2^6 orders are errors.
            (5, 0.062_5, Some(0)),
            (5, 0.062_4, None),
            (6, 0.031_25, Some(0)),
            (8, 0.05, Some(0)),
            (9, 0.05, Some(1)),
            (20, 0.05, Some(5)),
            (20, 0.01, Some(3)),
            (100, 0.05, Some(39)),
            (0, 0.05, None),
        ] {
            assert_eq!(outside(count, max_error), expected, "{count} {max_error}");
        }
        // The largest number of blocks is not too many for floating point.
        assert_eq!(outside(500, 0.05), Some(227));
    }

    #[test]
    fn median_favours_no_server() {
        let even = Ratio::of(&blocks([0.9, 1.0, 1.2, 1.4]), 0.05).unwrap();
        assert!((even.median - 1.1).abs() < 1e-9, "{even:?}");
        assert_eq!((even.interval, even.precision()), (None, None));
        let odd = Ratio::of(&blocks([2.0, 5.0, 3.0]), 0.05).unwrap();
        assert_eq!((odd.median, odd.quartiles), (3.0, [3.0, 5.0]));
    }

    /// A pause of a server is one block's affair, but none that is hidden.
    #[test]
    fn outliers_move_the_sums_only() {
        let mut ratios = vec![1.0; 11];
        ratios.push(0.4);
        let found = Ratio::of(&blocks(ratios), 0.05).unwrap();
        assert_eq!(found.median, 1.0);
        assert_eq!(found.interval, Some([1.0, 1.0]));
        assert!((found.overall - 0.95).abs() < 1e-9, "{found:?}");
    }

    #[test]
    fn precision_is_half_the_interval() {
        let found = Ratio::of(&blocks([1.8, 1.9, 2.0, 2.0, 2.1, 2.2]), 0.05).unwrap();
        assert_eq!(found.interval, Some([1.8, 2.2]));
        let precision = found.precision().unwrap();
        assert!((precision - 0.1).abs() < 1e-9, "{precision}");
    }

    #[test]
    fn ratio_needs_a_first_figure() {
        assert_eq!(Ratio::of(&[], 0.05), None);
        assert_eq!(Ratio::of(&[[0.0, 1.0]], 0.05), None);
        let found = Ratio::of(&[[0.0, 1.0], [1.0, 0.0]], 0.05).unwrap();
        assert_eq!((found.median, found.overall), (0.0, 1.0));
    }
}
