//! The command `respond`: the other end of a link without a server.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use crate::{
    generator::Responder,
    measure::{end_by_signals, is_interrupted},
    output::Output,
};

/// Interval at which the end is looked for.
const POLL: Duration = Duration::from_millis(20);

#[derive(Debug, Args)]
pub(crate) struct Respond {
    /// Interface whose queries are answered, at XDP: no program on this machine gets them.
    #[arg(long)]
    interface: String,
    /// UDP port of the queries.
    #[arg(long, default_value_t = 53, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    /// Attaches in the kernel's generic mode: for a driver without XDP, or a veth pair, whose driver's mode reaches only
    /// an end with an XDP program.
    #[arg(long)]
    generic: bool,
    /// Seconds between two lines.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
    /// Prints JSON Lines.
    #[arg(long)]
    json: bool,
}

/// Queries answered in an interval, or in all.
#[derive(Debug, Serialize)]
struct Answered {
    kind: &'static str,
    seconds: f64,
    answered: u64,
    answered_per_second: f64,
}

impl Answered {
    fn new(kind: &'static str, time: Duration, answered: u64) -> Self {
        let seconds = time.as_secs_f64();
        Self {
            kind,
            seconds,
            answered,
            answered_per_second: answered as f64 / seconds,
        }
    }

    fn show(&self, output: &Output) -> Result<()> {
        if output.is_json() {
            return output.json(self);
        }
        output.print(&format!(
            "{:8} {:7.2} s  {:>12} answered  {:>12.0}/s\n",
            self.kind, self.seconds, self.answered, self.answered_per_second
        ))
    }
}

impl Respond {
    pub(crate) fn run(&self) -> Result<()> {
        end_by_signals()?;
        let responder = Responder::new(&self.interface, [self.port; 2], self.generic)?;
        let output = Output::new(self.json, None)?;
        let interval = Duration::from_secs(self.interval);
        let begun = Instant::now();
        let mut last = (begun, 0);
        while !is_interrupted() {
            // Sleep goes on after a signal, whose handler only sets a flag.
            thread::sleep(POLL);
            let (since, before) = last;
            if since.elapsed() >= interval {
                let answered = responder.answered()?;
                Answered::new("interval", since.elapsed(), answered - before).show(&output)?;
                last = (Instant::now(), answered);
            }
        }
        Answered::new("total", begun.elapsed(), responder.answered()?).show(&output)
    }
}
