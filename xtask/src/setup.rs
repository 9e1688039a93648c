//! Set-up steps that run side by side: downloads and installations beside compilers.

use std::{
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

/// Steps faster than this found everything in place, and are not worth a line.
const UNNOTICED: Duration = Duration::from_secs(1);

/// A step in a separate thread.
pub(crate) struct Step {
    name: &'static str,
    thread: JoinHandle<Result<()>>,
}

impl Step {
    /// Starts a step; its end is printed with its duration.
    pub(crate) fn start(name: &'static str, work: impl FnOnce() -> Result<()> + Send + 'static) -> Self {
        let thread = thread::spawn(move || {
            let begin = Instant::now();
            let done = work();
            let took = begin.elapsed();
            if done.is_ok() && took > UNNOTICED {
                println!("set-up: {name}: done in {} s", took.as_secs());
            }
            done
        });
        Self { name, thread }
    }

    /// Waits for the end of the step.
    pub(crate) fn finish(self) -> Result<()> {
        match self.thread.join() {
            Ok(done) => done.map_err(|error| error.context(self.name)),
            Err(_) => bail!("{} panicked", self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_step_is_named() {
        let step = Step::start("kernels", || bail!("no network"));
        assert_eq!(format!("{:#}", step.finish().unwrap_err()), "kernels: no network");
        Step::start("nothing", || Ok(())).finish().unwrap();
    }
}
