//! Clocks: the kernel's own monotonic one, and one that goes on in suspend.

use std::{fs, sync::OnceLock, time::Duration};

use nix::time::{ClockId, clock_gettime};

/// The clock of BPF programs (`bpf_ktime_get_ns`), ns: `CLOCK_MONOTONIC` without what a time
/// namespace adds to it (kernel 5.6). Programs know of no time namespace, so a lease given in
/// the process's own time would end too late, or at once.
pub fn kernel_monotonic_ns() -> u64 {
    static OFFSET: OnceLock<i128> = OnceLock::new();
    // A process stays in its time namespace. Without /proc it is taken for the first one.
    let offset = OFFSET.get_or_init(|| {
        let text = fs::read_to_string("/proc/self/timens_offsets").unwrap_or_default();
        monotonic_offset_ns(&text).unwrap_or(0)
    });
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("every Linux kernel has CLOCK_MONOTONIC");
    let own = i128::from(time.tv_sec()) * 1_000_000_000 + i128::from(time.tv_nsec());
    // The kernel's clock counts from its start, so it is positive.
    u64::try_from(own - offset).unwrap_or(0)
}

/// A moment of `CLOCK_BOOTTIME`, which counts the time that the machine is suspended
/// (`std::time::Instant` does not): for what is good for a time in the world outside, such as
/// an answer for its TTL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootInstant(Duration);

impl BootInstant {
    /// This moment.
    pub fn now() -> Self {
        let time = clock_gettime(ClockId::CLOCK_BOOTTIME).expect("every Linux kernel since 2.6.39 has it");
        Self(time.into())
    }

    /// Time since then.
    pub fn elapsed(self) -> Duration {
        let (Self(now), Self(then)) = (Self::now(), self);
        now.saturating_sub(then)
    }
}

/// What `/proc/PID/timens_offsets` says of `CLOCK_MONOTONIC`: name, seconds, nanoseconds.
fn monotonic_offset_ns(text: &str) -> Option<i128> {
    let line = text.lines().find_map(|line| line.strip_prefix("monotonic"))?;
    let mut numbers = line.split_whitespace().map(str::parse::<i64>);
    let (seconds, nanoseconds) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    Some(i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_runs_forward() {
        let first = kernel_monotonic_ns();
        assert!(first > 0 && kernel_monotonic_ns() >= first);
    }

    #[test]
    fn boot_time_counts_suspend() {
        let boot = BootInstant::now();
        // The machine may have been suspended before, so it is not behind.
        let monotonic: Duration = clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap().into();
        assert!(boot.0 + Duration::from_secs(1) >= monotonic);
        assert!(boot.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn the_offset_of_a_time_namespace_is_read() {
        let text = "monotonic        -3  500000000\nboottime          7         0\n";
        assert_eq!(monotonic_offset_ns(text), Some(-2_500_000_000));
        assert_eq!(monotonic_offset_ns("boottime 7 0\n"), None);
    }
}
