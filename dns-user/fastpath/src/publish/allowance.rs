//! A rate limit: a token bucket that holds one second's worth of tokens.

use std::time::Instant;

/// A bucket of tokens, refilled at a steady rate.
#[derive(Debug)]
pub(crate) struct Allowance {
    /// Tokens per second, and the bucket's capacity.
    rate: f64,
    left: f64,
    /// The time at which `left` was correct.
    at: Instant,
}

impl Allowance {
    /// Returns a full bucket with `rate` tokens per second, at least 64.
    pub(crate) fn new(rate: usize, now: Instant) -> Self {
        let rate = rate.max(64) as f64;
        Self { rate, left: rate, at: now }
    }

    /// Returns whether a token is left.
    pub(crate) fn is_left(&mut self, now: Instant) -> bool {
        let gained = now.saturating_duration_since(self.at).as_secs_f64() * self.rate;
        self.left = (self.left + gained).min(self.rate);
        self.at = now;
        self.left >= 1.0
    }

    /// Takes a token; `false` if none is left.
    pub(crate) fn take(&mut self, now: Instant) -> bool {
        let is_left = self.is_left(now);
        if is_left {
            self.left -= 1.0;
        }
        is_left
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn tokens_refill_up_to_capacity() {
        let start = Instant::now();
        let mut allowance = Allowance::new(100, start);
        let taken = |allowance: &mut Allowance, at: Instant| (0..1000).filter(|_| allowance.take(at)).count();
        assert_eq!(taken(&mut allowance, start), 100);
        assert_eq!(taken(&mut allowance, start + Duration::from_millis(105)), 10);
        assert_eq!(taken(&mut allowance, start + Duration::from_secs(60)), 100);
        assert!(!allowance.is_left(start), "a clock that goes back gives nothing");
    }
}
