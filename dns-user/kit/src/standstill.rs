//! Detects that the process did not run for a while: SIGSTOP, a suspended or paused machine, or no
//! CPU time at all.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Interval between two readings of the clocks.
const INTERVAL: Duration = Duration::from_secs(1);

/// Delay beyond [`INTERVAL`] that counts as a standstill.
const TOLERANCE: Duration = Duration::from_secs(2);

/// A period in which the process did not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standstill {
    /// Length of the period, including suspend.
    pub length: Duration,
    /// Time that the machine was suspended.
    pub suspended: Duration,
}

/// Readings of the clocks with and without suspend.
#[derive(Clone, Copy)]
struct Clocks {
    boot: Duration,
    monotonic: Duration,
}

impl Clocks {
    fn now() -> Self {
        let read =
            |clock| clock_gettime(clock).expect("every Linux kernel since 2.6.39 has both clocks").into();
        Self { boot: read(ClockId::CLOCK_BOOTTIME), monotonic: read(ClockId::CLOCK_MONOTONIC) }
    }

    /// Returns the standstill between `self` and `now`, if any.
    fn standstill(self, now: Self) -> Option<Standstill> {
        let passed = now.boot.saturating_sub(self.boot);
        let suspended = passed.saturating_sub(now.monotonic.saturating_sub(self.monotonic));
        let length = passed.checked_sub(INTERVAL).filter(|length| *length >= TOLERANCE)?;
        Some(Standstill { length, suspended })
    }
}

/// Logs every standstill with its length; never returns.
pub async fn watch() {
    let mut before = Clocks::now();
    loop {
        tokio::time::sleep(INTERVAL).await;
        let now = Clocks::now();
        if let Some(Standstill { length, suspended }) = before.standstill(now) {
            let cause = if suspended * 2 > length {
                "the machine was suspended"
            } else {
                "stopped, or without CPU time"
            };
            tracing::warn!(
                "the process stood still for {:.1} s ({cause}): userspace answered no queries meanwhile, and \
                 interfaces only until the lease expired",
                length.as_secs_f64()
            );
        }
        before = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(boot: u64, monotonic: u64) -> Clocks {
        Clocks { boot: Duration::from_secs(boot), monotonic: Duration::from_secs(monotonic) }
    }

    #[test]
    fn late_reading_is_a_standstill() {
        let start = at(100, 50);
        assert_eq!(start.standstill(at(101, 51)), None);
        assert_eq!(start.standstill(at(102, 52)), None);
        let stopped = Standstill { length: Duration::from_secs(12), suspended: Duration::ZERO };
        assert_eq!(start.standstill(at(113, 63)), Some(stopped));
        let slept = Standstill { length: Duration::from_secs(3600), suspended: Duration::from_secs(3600) };
        assert_eq!(start.standstill(at(3701, 51)), Some(slept));
    }
}
