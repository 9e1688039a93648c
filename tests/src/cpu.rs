//! Which CPU a thread runs on.

use anyhow::{Context, Result};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};

/// Does something with the calling thread on a CPU, and lets it go again. What is started
/// by it stays there; a server that counts CPUs before it starts threads starts as many as
/// on a machine with one.
pub fn on_cpu<T>(cpu: usize, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let before = sched_getaffinity(Pid::from_raw(0)).context("cannot read the CPUs of a thread")?;
    stay_on(cpu)?;
    let done = work();
    sched_setaffinity(Pid::from_raw(0), &before).context("cannot let a thread go")?;
    done
}

/// Puts the calling thread, and those that it will start, on a CPU; on the last one if there
/// are not so many.
pub fn stay_on(cpu: usize) -> Result<()> {
    let last = std::thread::available_parallelism().map_or(0, |count| count.get() - 1);
    pin_thread(Pid::from_raw(0), cpu.min(last)).context("cannot pin a thread")
}

/// Puts a thread (0: the calling one) on a CPU.
pub fn pin_thread(thread: Pid, cpu: usize) -> nix::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu)?;
    sched_setaffinity(thread, &set)
}
