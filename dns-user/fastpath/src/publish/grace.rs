//! RCU grace periods, awaited on a separate thread.
//!
//! A program run that began earlier may still read the cells of a replaced entry; after one RCU
//! grace period no such run is left. The kernel takes 10 ms or more for it, too long for the
//! publisher to block.

use std::{io, thread, time::Duration};

use crossbeam_channel::{Receiver, Sender, bounded};

use dns_kit::threads::{self, OnPanic};

/// Time in quarantine if the kernel refuses membarrier (with `nohz_full`, for example). A program
/// run takes microseconds, so the margin is wide, but this is no proof, which the status reports.
pub(crate) const WITHOUT_MEMBARRIER: Duration = Duration::from_secs(2);

/// Runs grace periods one at a time and reports their ends.
#[derive(Debug)]
pub(crate) struct GracePeriods {
    /// Requests to the thread; dropping the sender ends the thread.
    begin: Sender<()>,
    /// One message per grace period: whether the kernel confirmed it.
    over: Receiver<bool>,
    /// Whether a grace period was begun whose end was not reported yet.
    running: bool,
    /// Whether the kernel confirmed every grace period so far.
    vouched: bool,
}

impl GracePeriods {
    /// Starts the thread; `wait` waits for a grace period and returns whether the kernel confirmed
    /// it.
    pub(crate) fn start(mut wait: impl FnMut() -> bool + Send + 'static) -> io::Result<Self> {
        let (begin, begun) = bounded::<()>(1);
        let (tell, over) = bounded(1);
        threads::spawn("grace", OnPanic::EndProcess, move || {
            while begun.recv().is_ok() {
                let vouched = wait();
                if !vouched {
                    thread::sleep(WITHOUT_MEMBARRIER);
                }
                if tell.send(vouched).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { begin, over, running: false, vouched: true })
    }

    /// Begins a grace period unless one is running; returns whether it did.
    pub(crate) fn begin(&mut self) -> bool {
        if self.running {
            return false;
        }
        // An error means that the thread has ended: freed cells are then never reused, which is
        // wasteful but safe.
        self.running = self.begin.send(()).is_ok();
        self.running
    }

    /// Returns whether the current grace period has ended; reports each end once.
    pub(crate) fn ended(&mut self) -> bool {
        let told = if self.running { self.over.try_recv().ok() } else { None };
        self.note(told)
    }

    /// Waits for the current grace period to end; `false` if none is running.
    pub(crate) fn wait(&mut self) -> bool {
        let told = if self.running { self.over.recv().ok() } else { None };
        self.note(told)
    }

    /// Returns whether a grace period is running.
    pub(crate) fn is_running(&self) -> bool {
        self.running
    }

    /// Returns whether the kernel confirmed every grace period so far; otherwise the thread waited
    /// for a fixed time instead.
    pub(crate) fn vouched(&self) -> bool {
        self.vouched
    }

    fn note(&mut self, told: Option<bool>) -> bool {
        let Some(vouched) = told else { return false };
        self.running = false;
        self.vouched &= vouched;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grace_periods_run_singly() {
        let mut grace = GracePeriods::start(|| true).unwrap();
        assert!(!grace.ended() && !grace.wait(), "none was begun");
        assert!(grace.begin());
        assert!(!grace.begin(), "one is running");
        assert!(grace.wait());
        assert!(!grace.ended() && !grace.is_running());
    }
}
