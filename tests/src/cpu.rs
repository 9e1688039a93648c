//! CPU affinity of threads.

use anyhow::{Context, Result};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};

/// Runs `work` with the calling thread pinned to a CPU, then restores its affinity. Threads and
/// processes started by `work` stay pinned; a server that counts CPUs first starts as many threads
/// as on a machine with one CPU.
pub fn on_cpu<T>(cpu: usize, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let before = sched_getaffinity(Pid::from_raw(0)).context("cannot read the CPUs of a thread")?;
    stay_on(cpu)?;
    let done = work();
    sched_setaffinity(Pid::from_raw(0), &before).context("cannot let a thread go")?;
    done
}

/// Pins the calling thread, and threads it starts later, to a CPU, or to the last one if the
/// machine has fewer.
pub fn stay_on(cpu: usize) -> Result<()> {
    let last = std::thread::available_parallelism().map_or(0, |count| count.get() - 1);
    pin_thread(Pid::from_raw(0), cpu.min(last)).context("cannot pin a thread")
}

/// Pins a thread (0: the calling one) to a CPU.
pub fn pin_thread(thread: Pid, cpu: usize) -> nix::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu)?;
    sched_setaffinity(thread, &set)
}
