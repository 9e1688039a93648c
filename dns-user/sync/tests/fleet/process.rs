//! Processes that are killed at the end of the test.

use std::{
    process::{Child, Command, ExitStatus},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// A process that ends with the test.
pub(crate) struct Kept(Child);

impl Kept {
    pub(crate) fn spawn(command: &mut Command) -> Result<Self> {
        Ok(Self(
            command
                .spawn()
                .with_context(|| format!("cannot run {command:?}"))?,
        ))
    }

    /// Returns the process id.
    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Sends SIGTERM and waits for the process to exit, which takes milliseconds on a quiet machine.
    pub(crate) fn stop(&mut self) -> Result<ExitStatus> {
        kill(Pid::from_raw(self.0.id().cast_signed()), Signal::SIGTERM)?;
        let begun = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait()? {
                return Ok(status);
            }
            ensure!(
                begun.elapsed() < Duration::from_secs(60),
                "process {} does not end",
                self.0.id()
            );
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns how the process ended; `None` while it runs.
    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.0.try_wait()?)
    }

    /// Suspends the process (SIGSTOP), or resumes it.
    pub(crate) fn pause(&self, pause: bool) -> Result<()> {
        let signal = if pause {
            Signal::SIGSTOP
        } else {
            Signal::SIGCONT
        };
        Ok(kill(Pid::from_raw(self.0.id().cast_signed()), signal)?)
    }

    /// Sends SIGKILL and waits for the process to exit.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // If it has already exited, the wait returns immediately.
        if self.stop().is_err() {
            let _ = self.kill();
        }
    }
}

/// Runs a command until it exits and returns its output.
pub(crate) fn capture(command: &mut Command) -> Result<String> {
    let output = command
        .output()
        .with_context(|| format!("cannot run {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{command:?} failed ({}): {said}",
        output.status
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Polls `ready` until it returns true; fails after `limit`.
pub(crate) fn wait_until(
    what: &str,
    limit: Duration,
    mut ready: impl FnMut() -> bool,
) -> Result<()> {
    let begun = Instant::now();
    while !ready() {
        ensure!(begun.elapsed() < limit, "waited {limit:?} for {what}");
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
