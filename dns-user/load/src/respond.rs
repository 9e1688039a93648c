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

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead as _, BufReader},
        process::{Command, Stdio},
    };

    use nix::{
        sys::signal::{Signal, kill},
        unistd::Pid,
    };

    use super::*;

    #[test]
    fn answers_are_counted_until_a_signal() {
        if !test_support::requirements::root() {
            return;
        }
        if std::env::var_os("RESPOND").is_some() {
            crate::generator::pair();
            let respond = Respond {
                interface: "other".to_owned(),
                port: 53,
                generic: true,
                interval: 0,
                json: true,
            };
            return respond.run().unwrap();
        }
        let mut responding = Command::new(std::env::current_exe().unwrap())
            .args([
                "respond::tests::answers_are_counted_until_a_signal",
                "--exact",
            ])
            .args(["--nocapture", "--test-threads=2"])
            .env("RESPOND", "1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut kinds = Vec::new();
        for line in BufReader::new(responding.stdout.take().unwrap()).lines() {
            let line = line.unwrap();
            let Ok(found) = serde_json::from_str::<serde_json::Value>(&line) else {
                // Lines of the test itself.
                continue;
            };
            assert_eq!(found["answered"].as_u64(), Some(0), "{line}");
            kinds.push(found["kind"].as_str().unwrap().to_owned());
            if kinds.len() == 2 {
                let number = i32::try_from(responding.id()).unwrap();
                kill(Pid::from_raw(number), Signal::SIGTERM).unwrap();
            }
        }
        assert!(responding.wait().unwrap().success());
        assert_eq!(kinds.pop().as_deref(), Some("total"));
        assert!(kinds.len() >= 2 && kinds.iter().all(|kind| kind == "interval"));
    }
}
