//! Other programs: run to their end, or kept while a test lasts.

use std::{
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

/// Runs a command to its end; fails with what it said unless it succeeds.
pub fn run(command: &mut Command) -> Result<()> {
    capture(command).map(drop)
}

/// Runs a command to its end and returns what it printed; fails with what it said unless it succeeds.
///
/// Fails as well if it ran while this program was asked to end: some that are told to end
/// (dnsperf) report how far they came and call that a success.
pub fn capture(command: &mut Command) -> Result<String> {
    let Output { status, stdout, stderr } =
        command.output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(!interrupt::requested(), "interrupted");
    if !status.success() {
        bail!("{command:?} failed ({status}): {}", String::from_utf8_lossy(&stderr).trim());
    }
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

/// A process that ends with the test.
#[derive(Debug)]
pub struct Kept(Child);

impl Kept {
    /// Starts a command.
    pub fn spawn(command: &mut Command) -> Result<Self> {
        Ok(Self(command.spawn().with_context(|| format!("cannot run {command:?}"))?))
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(self.target(), signal)?)
    }

    /// Its exit status, if it has ended.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.0.try_wait()?)
    }

    /// Waits for its end, for so long at most.
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

    /// Asks it to end (SIGTERM) and waits.
    pub fn stop(&mut self, limit: Duration) -> Result<ExitStatus> {
        if self.ended()?.is_none() {
            self.signal(Signal::SIGTERM)?;
        }
        self.wait(limit)
    }

    /// Ends it without asking (SIGKILL) and waits.
    pub fn kill(&mut self, limit: Duration) -> Result<ExitStatus> {
        self.signal(Signal::SIGKILL)?;
        self.wait(limit)
    }

    /// The process for `kill`.
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
    /// Asks it to end, and kills it if it does not.
    fn drop(&mut self) {
        if self.stop(Duration::from_secs(5)).is_err() {
            // Nothing more can be done where even this fails: it has ended, or is not ours.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// Asks `ready` again and again until it says so; fails after `limit`, and when this
/// program is asked to end: whom it waits for has been told to end then, too.
pub fn wait_until(what: &str, limit: Duration, mut ready: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + limit;
    while !ready() {
        ensure!(!interrupt::requested(), "interrupted");
        if Instant::now() > deadline {
            bail!("waited {limit:?} in vain for {what}");
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
