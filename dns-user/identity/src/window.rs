//! The part of a certificate's validity in which it is renewed, and an identity's time within it.

use std::time::Duration;

use aws_lc_rs::digest;

/// Longest validity for which the window is a fraction of it (seed document 004).
const SHORT: Duration = Duration::from_secs(4 * 3600);

/// Renewal window, as offsets from the start of the validity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RenewalWindow {
    /// First time at which a renewal is allowed.
    pub start: Duration,
    /// Last time at which a healthy rotator renews.
    pub end: Duration,
}

impl RenewalWindow {
    /// Returns the documented window. For a validity above 4 h: from 1 h to 20 min before the end.
    /// Otherwise: from 1/4 to 1/12 of the validity before the end.
    pub fn of(validity: Duration) -> Self {
        let (early, late) = if validity > SHORT {
            (Duration::from_secs(3600), Duration::from_secs(20 * 60))
        } else {
            (validity / 4, validity / 12)
        };
        Self { start: validity - early, end: validity - late }
    }

    /// Returns the offset at which an identity is renewed: the start of the window plus the
    /// identity's share of its length. This spreads renewals, and a restart changes nothing.
    pub fn moment(&self, share: Share) -> Duration {
        self.start + share.of_length(self.end - self.start)
    }
}

/// Fraction below one, derived from a guid.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share(f64);

impl Share {
    /// Returns the share of `guid`: the first bits of its SHA-256 as a fraction.
    pub fn of(guid: &str) -> Self {
        let hash = digest::digest(&digest::SHA256, guid.as_bytes());
        let mut first = [0; 8];
        first.copy_from_slice(&hash.as_ref()[..8]);
        // 53 bits are exact in an f64, so the fraction stays below one.
        Self((u64::from_be_bytes(first) >> 11) as f64 / (1_u64 << 53) as f64)
    }

    /// Returns this share of `length`.
    pub fn of_length(self, length: Duration) -> Duration {
        length.mul_f64(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renewals_spread_over_window() {
        let window = RenewalWindow::of(Duration::from_secs(24 * 3600));
        let length = window.end - window.start;
        let mut tenths = [0; 10];
        for number in 0..1000 {
            let moment = window.moment(Share::of(&format!("container-{number}")));
            assert!(moment >= window.start && moment < window.end);
            let tenth = (moment - window.start).as_secs_f64() / length.as_secs_f64() * 10.0;
            tenths[tenth as usize] += 1;
        }
        assert!(tenths.iter().all(|&count| (60..=140).contains(&count)), "{tenths:?}");
    }

    #[test]
    fn moment_survives_restart() {
        // A literal, because a change of the hash would move every renewal at an upgrade.
        assert_eq!(Share::of("").of_length(Duration::from_secs(1 << 20)).as_secs(), 0xe3b0_c442 >> 12);
    }
}
