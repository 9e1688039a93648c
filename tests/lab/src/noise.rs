//! Detects work of other programs on a CPU, which distorts a measurement.

use std::time::{Duration, Instant};

use anyhow::Result;
use nix::time::{ClockId, clock_gettime};

use crate::cpu::on_cpu;

/// Duration of a reading.
const READING: Duration = Duration::from_millis(300);

/// Share of a CPU from which the machine counts as noisy.
pub const NOISY: f64 = 0.1;

/// Maximum number of attempts at one measurement.
const ATTEMPTS: usize = 3;

/// Delay before another attempt.
const PAUSE: Duration = Duration::from_secs(2);

/// A measurement with the noise around it.
#[derive(Clone, Copy, Debug)]
pub struct Measured<T> {
    /// Result of the measured work.
    pub value: T,
    /// Share of the CPU that other programs took, 0 to 1.
    pub noise: f64,
}

/// Measures until the CPU is undisturbed, at most [`ATTEMPTS`] times; returns the least disturbed
/// result. `disturbed` is called before a repetition with the share of other programs.
pub fn undisturbed<T>(
    cpu: usize,
    mut measure: impl FnMut() -> Result<T>,
    mut disturbed: impl FnMut(f64),
) -> Result<Measured<T>> {
    let mut best: Option<Measured<T>> = None;
    for attempt in 1.. {
        let before = foreign_share(cpu)?;
        let value = measure()?;
        let noise = before.max(foreign_share(cpu)?);
        if best.as_ref().is_none_or(|best| noise < best.noise) {
            best = Some(Measured { value, noise });
        }
        if noise < NOISY || attempt == ATTEMPTS {
            break;
        }
        disturbed(noise);
        std::thread::sleep(PAUSE);
    }
    best.ok_or_else(|| anyhow::anyhow!("nothing was measured"))
}

/// Returns the share of a CPU (0 to 1) that the scheduler or the hypervisor gives to others while this
/// thread wants all of it.
pub fn foreign_share(cpu: usize) -> Result<f64> {
    on_cpu(cpu, || {
        let begun = Instant::now();
        let before = thread_time()?;
        while begun.elapsed() < READING {
            std::hint::spin_loop();
        }
        let own = thread_time()?.saturating_sub(before);
        Ok(1.0 - (own.as_secs_f64() / begun.elapsed().as_secs_f64()).min(1.0))
    })
}

fn thread_time() -> Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?.into())
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicBool, Ordering},
        thread,
    };

    use crate::cpu::stay_on;

    use super::*;

    #[test]
    fn competing_threads_are_noticed() {
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    stay_on(0).unwrap();
                    while !done.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let share = foreign_share(0);
            done.store(true, Ordering::Relaxed);
            assert!(share.unwrap() > NOISY);
        });
    }

    #[test]
    fn disturbed_measurement_is_repeated() {
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                stay_on(0).unwrap();
                while !done.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let (mut measured, mut repeated) = (0, 0);
            let result = undisturbed(
                0,
                || {
                    measured += 1;
                    Ok(measured)
                },
                |_| repeated += 1,
            );
            done.store(true, Ordering::Relaxed);
            assert!(result.unwrap().noise >= NOISY);
            assert_eq!((measured, repeated), (ATTEMPTS, ATTEMPTS - 1));
        });
    }
}
