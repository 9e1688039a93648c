//! CPUs: affinity of threads, and CPU time as the scheduler accounts it.
//!
//! `/proc/stat` is sampled by ticks and badly wrong for short bursts;
//! `/proc/<pid>/task/*/schedstat` holds nanoseconds. With threaded NAPI the receive softirq, and
//! the BPF program in it, runs in a separate kernel thread, `napi/<interface>-<id>`, whose time can
//! be read the same way.

use std::{
    collections::BTreeSet,
    fs, io,
    ops::Sub,
    os::fd::{AsFd as _, AsRawFd as _},
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result};
use aya::{maps::MapInfo, programs::loaded_programs};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::{Pid, SysconfVar, sysconf},
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
    pin_thread(Pid::from_raw(0), cpu.min(last_cpu())).context("cannot pin a thread")
}

/// Returns the highest CPU number.
pub(crate) fn last_cpu() -> usize {
    std::thread::available_parallelism().map_or(0, |count| count.get() - 1)
}

/// Pins a thread (0: the calling one) to a CPU.
pub fn pin_thread(thread: Pid, cpu: usize) -> nix::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu)?;
    sched_setaffinity(thread, &set)
}

/// CPU time used since the start of a process or thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct CpuTime(pub Duration);

impl CpuTime {
    /// Returns the CPU time of all threads of a process.
    pub fn of_process(pid: u32) -> io::Result<Self> {
        let mut total = Duration::ZERO;
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            // A thread may end between listing and reading.
            total += run_time(&task?.path()).unwrap_or_default();
        }
        Ok(Self(total))
    }

    /// Returns the sum over several processes.
    pub fn of_processes(pids: &[u32]) -> io::Result<Self> {
        pids.iter().try_fold(Self::default(), |sum, &pid| {
            Ok(Self(sum.0 + Self::of_process(pid)?.0))
        })
    }
}

impl Sub for CpuTime {
    type Output = Duration;

    /// Returns the time used between two readings.
    fn sub(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

/// First field of `schedstat`: nanoseconds on a CPU (Documentation/scheduler/sched-stats).
fn run_time(task: &Path) -> io::Result<Duration> {
    let text = fs::read_to_string(task.join("schedstat"))?;
    let nanoseconds = text
        .split_whitespace()
        .next()
        .and_then(|field| field.parse().ok());
    nanoseconds
        .map(Duration::from_nanos)
        .ok_or_else(|| io::Error::other("unreadable schedstat"))
}

/// Returns the process ids of the threaded NAPI kernel threads of an interface.
///
/// They are named `napi/<interface>-<id>`; a thread's name holds 15 bytes, so the interface's name
/// must be short. Attaching XDP can recreate them.
pub fn napi_threads(interface: &str) -> io::Result<Vec<u32>> {
    let wanted = format!("napi/{interface}-");
    let mut found = Vec::new();
    for process in fs::read_dir("/proc")? {
        let process = process?;
        let Some(pid) = process
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        if fs::read_to_string(process.path().join("comm"))
            .is_ok_and(|name| name.starts_with(&wanted))
        {
            found.push(pid);
        }
    }
    Ok(found)
}

/// Returns how often a thread has gone to sleep voluntarily (`voluntary_ctxt_switches`).
pub fn sleeps(thread: u32) -> io::Result<u64> {
    let status = fs::read_to_string(format!("/proc/{thread}/status"))?;
    field(&status, "voluntary_ctxt_switches")
        .ok_or_else(|| io::Error::other("no count of context switches"))
}

/// Returns the bytes that the kernel holds (`memlock`) for the BPF maps that a process has
/// descriptors of, or that its programs use. Each map counts once.
pub fn map_memory(pid: u32) -> io::Result<u64> {
    let (mut maps, mut programs) = (BTreeSet::new(), BTreeSet::new());
    for descriptor in fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
        // A descriptor may be closed between listing and reading.
        let Ok(text) = fs::read_to_string(descriptor?.path()) else {
            continue;
        };
        maps.extend(field(&text, "map_id").and_then(|id| u32::try_from(id).ok()));
        programs.extend(field(&text, "prog_id").and_then(|id| u32::try_from(id).ok()));
    }
    for program in loaded_programs()
        .filter_map(Result::ok)
        .filter(|program| programs.contains(&program.id()))
    {
        maps.extend(
            program
                .map_ids()
                .map_err(io::Error::other)?
                .into_iter()
                .flatten(),
        );
    }
    maps.into_iter().map(memory_of_map).sum()
}

/// Returns `memlock` of the map with this id.
fn memory_of_map(id: u32) -> io::Result<u64> {
    let map = MapInfo::from_id(id)
        .and_then(|info| info.fd())
        .map_err(io::Error::other)?;
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", map.as_fd().as_raw_fd()))?;
    field(&text, "memlock").ok_or_else(|| io::Error::other("no memlock"))
}

/// Finds a number in the text of a `fdinfo` or `status` file.
fn field(text: &str, name: &str) -> Option<u64> {
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    value?.trim().parse().ok()
}

/// Returns the total CPU time that the machine has spent since it was started: all but idle time, which the kernel
/// measures (`/proc/uptime`). The other times of `/proc/stat` are sampled by a tick that wakes the same threads.
pub fn machine_time() -> Result<Duration> {
    let text = fs::read_to_string("/proc/uptime")?;
    let (up, idle) = text.trim().split_once(' ').context("two numbers")?;
    // Those online, because this thread may be confined to some of them.
    let cpus = sysconf(SysconfVar::_NPROCESSORS_ONLN)?.context("no number of CPUs")? as f64;
    Ok(Duration::from_secs_f64(
        (up.parse::<f64>()? * cpus - idle.parse::<f64>()?).max(0.0),
    ))
}
