//! Clocks: the kernel's monotonic clock, and one that includes suspend.

use std::{fs, ops::Add, sync::OnceLock, time::Duration};

use nix::time::{ClockId, clock_gettime};

/// Returns the time of BPF programs' clock (`bpf_ktime_get_ns`) in nanoseconds: `CLOCK_MONOTONIC`
/// without the offset of the time namespace (kernel 5.6). Programs ignore time namespaces, so a
/// lease in the process's own time would expire too late, or immediately.
pub fn kernel_monotonic_ns() -> u64 {
    kernel_ns(ClockId::CLOCK_MONOTONIC)
}

/// Returns the same time as of the kernel's last tick, up to 10 ms ago (`bpf_ktime_get_coarse_ns`).
pub fn kernel_coarse_ns() -> u64 {
    kernel_ns(ClockId::CLOCK_MONOTONIC_COARSE)
}

/// Returns the time of a monotonic clock without the offset of the time namespace.
fn kernel_ns(clock: ClockId) -> u64 {
    static OFFSET: OnceLock<i128> = OnceLock::new();
    let offset = OFFSET.get_or_init(|| namespace_offset_ns("monotonic"));
    let time = clock_gettime(clock).expect("every Linux kernel since 2.6.32 has both clocks");
    let own = i128::from(time.tv_sec()) * 1_000_000_000 + i128::from(time.tv_nsec());
    // The kernel's clock starts at 0, so the result is not negative.
    u64::try_from(own - offset).unwrap_or(0)
}

/// Returns the offset of a clock in this process's time namespace, which never changes for a
/// process. Without /proc, the initial namespace is assumed.
fn namespace_offset_ns(clock: &str) -> i128 {
    // The file exists since kernel 5.6; before, there are no time namespaces.
    let text = fs::read_to_string("/proc/self/timens_offsets").unwrap_or_default();
    offset_ns(&text, clock).unwrap_or(0)
}

/// A point in time of `CLOCK_BOOTTIME`, which includes suspend (unlike `std::time::Instant`): for
/// periods of real time such as the TTL of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootInstant(Duration);

impl BootInstant {
    /// Returns the current time of the clock.
    pub fn now() -> Self {
        let time =
            clock_gettime(ClockId::CLOCK_BOOTTIME).expect("every Linux kernel since 2.6.39 has it");
        Self(time.into())
    }

    /// Returns the time since `self`, suspend included.
    pub fn elapsed(self) -> Duration {
        Self::now().since(self)
    }

    /// Returns the time between `earlier` and `self`; zero if that is the later one.
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// Returns the time in nanoseconds on the clock of BPF programs (`bpf_ktime_get_boot_ns`):
    /// without the offset of the time namespace.
    pub fn kernel_ns(self) -> u64 {
        static OFFSET: OnceLock<i128> = OnceLock::new();
        let offset = OFFSET.get_or_init(|| namespace_offset_ns("boottime"));
        let own = i128::try_from(self.0.as_nanos()).unwrap_or(i128::MAX);
        u64::try_from(own - offset).unwrap_or(0)
    }
}

impl Add<Duration> for BootInstant {
    type Output = Self;

    fn add(self, time: Duration) -> Self {
        Self(self.0.saturating_add(time))
    }
}

/// Parses the offset of a clock from `/proc/PID/timens_offsets`: name, seconds, nanoseconds.
fn offset_ns(text: &str, clock: &str) -> Option<i128> {
    let line = text.lines().find_map(|line| line.strip_prefix(clock))?;
    let mut numbers = line.split_whitespace().map(str::parse::<i64>);
    let seconds = numbers.next()?.ok()?;
    let nanoseconds = numbers.next()?.ok()?;
    Some(i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds))
}

/// Returns a time in whole milliseconds.
pub fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Returns ticks at an interval, the first at once. After a late one the next takes its whole interval, so that work
/// does not pile up.
pub fn every(interval: Duration) -> tokio::time::Interval {
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    ticks
}

//----------- Standstill -----------------------------------------------------

/// Interval between two readings of the clocks.
const INTERVAL: Duration = Duration::from_secs(1);

/// Delay beyond [`INTERVAL`] that counts as a standstill.
const TOLERANCE: Duration = Duration::from_secs(2);

/// A period in which the process did not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Standstill {
    /// Length of the period, including suspend.
    length: Duration,
    /// Time that the machine was suspended.
    suspended: Duration,
}

/// Readings of the clocks with and without suspend.
#[derive(Clone, Copy)]
struct Clocks {
    boot: Duration,
    monotonic: Duration,
}

impl Clocks {
    fn now() -> Self {
        let [boot, monotonic] =
            [ClockId::CLOCK_BOOTTIME, ClockId::CLOCK_MONOTONIC].map(clock_gettime);
        Self {
            boot: boot.expect("Linux has it since 2.6.39").into(),
            monotonic: monotonic.expect("Linux has it since 2.6").into(),
        }
    }

    /// Returns the standstill between `self` and `now`, if any.
    fn standstill(self, now: Self) -> Option<Standstill> {
        let passed = now.boot.saturating_sub(self.boot);
        let suspended = passed.saturating_sub(now.monotonic.saturating_sub(self.monotonic));
        let length = passed
            .checked_sub(INTERVAL)
            .filter(|length| *length >= TOLERANCE)?;
        Some(Standstill { length, suspended })
    }
}

/// Logs every standstill with its length; never returns.
pub async fn watch_standstills() {
    let mut before = Clocks::now();
    loop {
        // Its timer stands still during suspend; CLOCK_BOOTTIME does not (clock_gettime(2)).
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

    #[test]
    fn clock_runs_forward() {
        let first = kernel_monotonic_ns();
        assert!(first > 0 && kernel_monotonic_ns() >= first);
        let coarse = kernel_coarse_ns();
        assert!(coarse <= kernel_monotonic_ns() && coarse + 1_000_000_000 > first);
    }

    #[test]
    fn boot_time_counts_suspend() {
        let boot = BootInstant::now();
        // Boot time includes suspend, so it is never behind.
        let monotonic: Duration = clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap().into();
        assert!(boot.0 + Duration::from_secs(1) >= monotonic);
        assert!(boot.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn time_namespace_offset_is_parsed() {
        let text = "monotonic        -3  500000000\nboottime          7         0\n";
        assert_eq!(offset_ns(text, "monotonic"), Some(-2_500_000_000));
        assert_eq!(offset_ns(text, "boottime"), Some(7_000_000_000));
        assert_eq!(offset_ns("boottime 7 0\n", "monotonic"), None);
    }

    fn at(boot: u64, monotonic: u64) -> Clocks {
        Clocks {
            boot: Duration::from_secs(boot),
            monotonic: Duration::from_secs(monotonic),
        }
    }

    #[test]
    fn late_reading_is_a_standstill() {
        let start = at(100, 50);
        assert_eq!(start.standstill(at(101, 51)), None);
        assert_eq!(start.standstill(at(102, 52)), None);
        let stopped = Standstill {
            length: Duration::from_secs(12),
            suspended: Duration::ZERO,
        };
        assert_eq!(start.standstill(at(113, 63)), Some(stopped));
        let slept = Standstill {
            length: Duration::from_secs(3600),
            suspended: Duration::from_secs(3600),
        };
        assert_eq!(start.standstill(at(3701, 51)), Some(slept));
    }

    #[test]
    fn kernel_clock_is_ours_without_the_offset() {
        let own = || {
            let now: Duration = clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap().into();
            now.as_nanos() as i128 - namespace_offset_ns("monotonic")
        };
        let earlier = own();
        let kernel = i128::from(kernel_monotonic_ns());
        assert!((earlier..=own()).contains(&kernel), "{earlier} {kernel}");
    }

    #[test]
    fn boot_instants_differ_by_time() {
        let start = BootInstant(Duration::from_secs(100));
        let later = start + Duration::from_millis(1_500);
        assert_eq!(later.since(start), Duration::from_millis(1_500));
        assert_eq!(start.since(later), Duration::ZERO);
        assert_eq!(
            start + Duration::MAX,
            BootInstant(Duration::MAX),
            "saturates"
        );
        // Since the start of the machine.
        let monotonic: Duration = clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap().into();
        assert!(BootInstant(Duration::ZERO).elapsed() >= monotonic);
    }

    #[test]
    fn standstill_begins_with_two_seconds() {
        let start = at(100, 50);
        for (boot, monotonic, length, suspended) in
            [(3_000, 3_000, 2_000, 0), (5_000, 4_000, 4_000, 1_000)]
        {
            let later = Clocks {
                boot: start.boot + Duration::from_millis(boot),
                monotonic: start.monotonic + Duration::from_millis(monotonic),
            };
            let expected = Standstill {
                length: Duration::from_millis(length),
                suspended: Duration::from_millis(suspended),
            };
            assert_eq!(start.standstill(later), Some(expected), "{boot}");
        }
        let later = Clocks {
            boot: start.boot + Duration::from_millis(2_999),
            monotonic: start.monotonic,
        };
        assert_eq!(start.standstill(later), None);
        assert_eq!(start.standstill(at(90, 40)), None, "a clock that goes back");
    }

    /// Reads the clocks that BPF programs read.
    fn kernel_clocks() -> [u64; 2] {
        let monotonic = kernel_monotonic_ns();
        let boot = BootInstant::now().kernel_ns();
        // It counts suspend as well.
        assert!(boot >= monotonic, "{boot} {monotonic}");
        [monotonic, boot]
    }

    /// BPF programs ignore time namespaces, in which containers may run.
    #[test]
    fn kernel_clocks_ignore_time_namespaces() {
        const BEFORE: &str = "KERNEL_CLOCKS";
        const HOUR: u64 = 3_600_000_000_000;
        if let Ok(text) = std::env::var(BEFORE) {
            let before: Vec<u64> = text.split(' ').map(|text| text.parse().unwrap()).collect();
            for (now, before) in kernel_clocks().into_iter().zip(before) {
                assert!((before..before + HOUR).contains(&now), "{before} {now}");
            }
            // The namespace's own clocks are 100,000 s and 200,000 s ahead.
            let own: Duration = clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap().into();
            let outside = Duration::from_nanos(kernel_monotonic_ns());
            assert!(own > outside + Duration::from_secs(99_000));
            return;
        }
        // Time namespaces came with kernel 5.6.
        if !fs::exists("/proc/self/timens_offsets").unwrap() || !test_support::requirements::root()
        {
            return;
        }
        let name = "kernel_clocks_ignore_time_namespaces";
        let mut unshare = std::process::Command::new("unshare");
        unshare
            .args([
                "--time",
                "--fork",
                "--monotonic=100000",
                "--boottime=200000",
            ])
            .arg(std::env::current_exe().unwrap())
            .args(test_support::own_process::arguments(module_path!(), name))
            .env(
                BEFORE,
                kernel_clocks().map(|time| time.to_string()).join(" "),
            );
        test_support::own_process::run(&mut unshare);
    }
}
