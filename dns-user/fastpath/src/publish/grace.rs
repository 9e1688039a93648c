//! RCU grace periods, waited for on a thread of their own.
//!
//! Cells of an entry that was replaced may be read by a program run that began
//! before; after one RCU grace period none is left. Waiting for it takes the kernel
//! 10 ms and more, during which the publisher has better things to do.

use std::{io, thread, time::Duration};

use crossbeam::channel::{Receiver, Sender, bounded};

use crate::bpf;
use dns_platform::threads::{self, OnPanic};

/// How long cells stay in quarantine where the kernel refuses membarrier (with
/// `nohz_full`, for one). A program run takes microseconds; this is a wide margin,
/// not a proof, and the status says so.
pub(crate) const WITHOUT_MEMBARRIER: Duration = Duration::from_secs(2);

/// Begins grace periods, one at a time, and tells when they are over.
#[derive(Debug)]
pub(crate) struct GracePeriods {
    /// Asks the thread for one; dropping it ends the thread.
    begin: Sender<()>,
    /// One message for each that is over: whether the kernel vouches for it.
    over: Receiver<bool>,
    /// Whether one was begun whose end has not been taken notice of.
    running: bool,
    /// Whether the kernel vouched for all so far.
    vouched: bool,
}

impl GracePeriods {
    /// Starts the thread, which asks the kernel.
    pub(crate) fn start() -> io::Result<Self> {
        Self::start_with(|| bpf::rcu_grace_period().is_ok())
    }

    /// Starts the thread; `wait` waits for a grace period, and tells whether there was one.
    pub(crate) fn start_with(mut wait: impl FnMut() -> bool + Send + 'static) -> io::Result<Self> {
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

    /// Begins one, unless one is running. Whether it did.
    pub(crate) fn begin(&mut self) -> bool {
        if self.running {
            return false;
        }
        // An error means that the thread has ended: then cells are never used again,
        // which is wasteful, but safe.
        self.running = self.begin.send(()).is_ok();
        self.running
    }

    /// Whether the one that was running is over now. Tells so once.
    pub(crate) fn ended(&mut self) -> bool {
        let told = if self.running { self.over.try_recv().ok() } else { None };
        self.note(told)
    }

    /// Waits for the one that is running; `false`: none is.
    pub(crate) fn wait(&mut self) -> bool {
        let told = if self.running { self.over.recv().ok() } else { None };
        self.note(told)
    }

    /// Whether one is running.
    pub(crate) fn is_running(&self) -> bool {
        self.running
    }

    /// Whether the kernel vouched for every grace period so far; else a fixed time
    /// was waited in its place.
    pub(crate) fn vouched(&self) -> bool {
        self.vouched
    }

    /// Takes notice of an end.
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
    fn one_runs_at_a_time_and_its_end_is_told_once() {
        let mut grace = GracePeriods::start().unwrap();
        assert!(!grace.ended() && !grace.wait(), "none was begun");
        assert!(grace.begin());
        assert!(!grace.begin(), "one is running");
        assert!(grace.wait());
        assert!(!grace.ended() && !grace.is_running());
    }
}
