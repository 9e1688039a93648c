//! Child processes: run to completion, or kept for the length of a test.

use std::{
    fmt::Display,
    fs,
    process::{Child, Command, ExitStatus, Output},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::interrupt;

/// Runs a command to completion; the error contains its output.
pub fn run(command: &mut Command) -> Result<()> {
    capture(command).map(drop)
}

/// Runs a command to completion and returns its output; the error contains the output too.
///
/// Also fails if this program was interrupted meanwhile: some programs (dnsperf) report partial
/// results on SIGTERM and exit successfully.
pub fn capture(command: &mut Command) -> Result<String> {
    let Output {
        status,
        stdout,
        stderr,
    } = command
        .output()
        .with_context(|| format!("cannot run {command:?}"))?;
    ensure!(!interrupt::requested(), "interrupted");
    if !status.success() {
        bail!(
            "{command:?} failed ({status}): {}",
            String::from_utf8_lossy(&stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

/// A process that is ended on drop.
#[derive(Debug)]
pub struct Kept(Child);

impl Kept {
    /// Starts a command; the process is ended on drop.
    pub fn spawn(command: &mut Command) -> Result<Self> {
        Ok(Self(
            command
                .spawn()
                .with_context(|| format!("cannot run {command:?}"))?,
        ))
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(self.target(), signal)?)
    }

    /// Returns the exit status if the process has ended.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.0.try_wait()?)
    }

    /// Waits at most `limit` for the process to end.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!("process {} still runs after {limit:?}", self.pid());
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Sends SIGTERM and waits.
    pub fn stop(&mut self, limit: Duration) -> Result<ExitStatus> {
        if self.ended()?.is_none() {
            self.signal(Signal::SIGTERM)?;
        }
        self.wait(limit)
    }

    /// Sends SIGKILL and waits.
    pub fn kill(&mut self, limit: Duration) -> Result<ExitStatus> {
        self.signal(Signal::SIGKILL)?;
        self.wait(limit)
    }

    fn target(&self) -> Pid {
        Pid::from_raw(self.0.id().cast_signed())
    }
}

impl From<Child> for Kept {
    fn from(child: Child) -> Self {
        Self(child)
    }
}

impl Drop for Kept {
    /// Sends SIGTERM, then SIGKILL if the process does not end.
    fn drop(&mut self) {
        if self.stop(Duration::from_secs(5)).is_err() {
            // Failure means that the process has already ended.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// Returns a process and its descendants.
pub fn family(pid: u32) -> Vec<u32> {
    let mut found = vec![pid];
    let mut next = 0;
    while let Some(&parent) = found.get(next) {
        next += 1;
        // A process or thread may end meanwhile.
        let tasks = fs::read_dir(format!("/proc/{parent}/task"));
        for task in tasks.into_iter().flatten().flatten() {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            for child in children.split_whitespace() {
                found.extend(child.parse::<u32>());
            }
        }
    }
    found
}

/// Polls `ready` until it returns true; fails after `limit` or if this program is interrupted,
/// because the awaited process is then being ended too.
pub fn wait_until(what: &str, limit: Duration, mut ready: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + limit;
    while !ready() {
        ensure!(!interrupt::requested(), "interrupted");
        if Instant::now() > deadline {
            bail!("gave up after {limit:?}: waiting for {what}");
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Returns the value of a line in `/proc/PID/status`.
pub fn status_line(pid: impl Display, name: &str) -> Result<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    Ok(line
        .with_context(|| format!("no {name} in {status}"))?
        .trim()
        .to_owned())
}

/// Returns a size in `/proc/PID/status`, such as `VmRSS`, in bytes.
pub fn memory(pid: impl Display, name: &str) -> Result<u64> {
    let size = status_line(pid, name)?;
    let kib: u64 = size
        .strip_suffix(" kB")
        .with_context(|| format!("{name}: {size}"))?
        .parse()?;
    Ok(kib << 10)
}

/// Returns the datagrams that sockets in the network namespace of a process have received
/// (`InDatagrams`).
pub fn datagrams_received(process: u32) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{process}/net/snmp"))?;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let (names, values) = lines
        .next()
        .zip(lines.next())
        .context("no line of UDP in snmp")?;
    let place = names
        .split(' ')
        .position(|name| name == "InDatagrams")
        .context("no InDatagrams in snmp")?;
    Ok(values
        .split(' ')
        .nth(place)
        .context("a value for each name in snmp")?
        .parse()?)
}

/// Returns the memory of a process in bytes, with its share of the pages that others use, too.
pub fn proportional_set_size(pid: u32) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("Pss:")?.trim().strip_suffix(" kB"));
    Ok(line.context("no Pss in smaps_rollup")?.parse::<u64>()? << 10)
}
