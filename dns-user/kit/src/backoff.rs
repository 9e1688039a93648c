//! Pauses after failures.

use std::time::Duration;

/// Returns the pause after a number of consecutive failures, at least one: `first`, doubled by each further failure up
/// to `max`.
pub fn pause(first: Duration, max: Duration, failures: u32) -> Duration {
    // A shift by 32 would overflow.
    let doublings = failures.saturating_sub(1).min(31);
    first.saturating_mul(1 << doublings).min(max)
}

/// Returns half to three halves of a pause, so that callers that failed together do not return together.
pub fn spread(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + fastrand::f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_maximum() {
        let first = Duration::from_secs(1);
        let max = Duration::from_secs(5);
        let pauses = [0, 1, 2, 3, 4, 100, u32::MAX].map(|failures| pause(first, max, failures));
        assert_eq!(pauses.map(|pause| pause.as_secs()), [1, 1, 2, 4, 5, 5, 5]);
        assert_eq!(
            pause(Duration::MAX, Duration::MAX, 9),
            Duration::MAX,
            "saturates"
        );
    }

    #[test]
    fn pauses_are_spread_around_their_length() {
        let pause = Duration::from_secs(10);
        for _ in 0..1_000 {
            let spread = spread(pause);
            assert!(spread >= pause / 2 && spread < pause * 3 / 2, "{spread:?}");
        }
    }
}
