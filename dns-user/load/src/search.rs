//! The command `search`: the highest rate without loss.

use std::{fmt, net::SocketAddr, path::PathBuf, time::Duration};

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;

use crate::{
    measure::{self, Ended, Plan, measure},
    output::Output,
    plot,
    report::{Kind, Report},
    run::write,
    target::{Target, endpoint},
};

/// Share of the time that generating threads wait for their CPU, above which other work on it limits the rate.
const MAX_WAITED: f64 = 0.01;

#[derive(Debug, Args)]
pub(crate) struct Search {
    /// Server: ADDRESS or ADDRESS:PORT, on the interface's link, private or loopback.
    #[arg(long, value_parser = endpoint)]
    server: SocketAddr,
    #[command(flatten)]
    target: Target,
    /// Highest loss of a rate that counts as answered, in percent.
    #[arg(long, default_value_t = 0.1, value_parser = percent)]
    max_loss: f64,
    /// Seconds for which a rate is tried.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// First rate.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    from: u32,
    /// Highest rate.
    #[arg(long, default_value_t = 20_000_000, value_parser = clap::value_parser!(u32).range(1..))]
    to: u32,
    /// Distance of the lowest failed rate from the highest answered one at which the search ends, in percent.
    #[arg(long, default_value_t = 2.0, value_parser = percent)]
    precision: f64,
    /// Prints JSON Lines: an object for each rate, and one with the result.
    #[arg(long)]
    json: bool,
    /// Draws answered rates and latencies over the rates tried, as SVG.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

fn percent(text: &str) -> Result<f64> {
    let percent: f64 = text.parse()?;
    if !(0.0..=100.0).contains(&percent) {
        bail!("expected a number from 0 to 100");
    }
    Ok(percent)
}

/// Rates tried so far.
#[derive(Debug)]
struct Progress {
    from: u32,
    to: u32,
    /// Smallest relative step.
    precision: f64,
    /// Highest rate without loss; 0 before there is one.
    answered: u32,
    /// Lowest rate with loss.
    failed: Option<u32>,
}

impl Progress {
    /// Returns the next rate, if the answer is not exact enough yet.
    fn next(&self) -> Option<u32> {
        let next = match (self.answered, self.failed) {
            (0, None) => self.from.min(self.to),
            (answered, None) => answered.saturating_mul(2).min(self.to),
            (answered, Some(failed)) => {
                let step = (f64::from(answered) * self.precision).max(1.0);
                if f64::from(failed - answered) <= step {
                    return None;
                }
                answered + (failed - answered) / 2
            }
        };
        (next > self.answered).then_some(next)
    }

    fn note(&mut self, rate: u32, is_answered: bool) {
        if is_answered {
            self.answered = rate;
        } else {
            self.failed = Some(rate);
        }
    }
}

/// What limits the rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Limit {
    /// The highest rate that was allowed.
    Allowed,
    /// The generator can send no more.
    Generator,
    /// Other work on the generator's CPUs.
    OwnCpu,
    /// The interface, which drops packets.
    Interface,
    Server,
}

impl Limit {
    /// Returns the reason for the failure of a rate.
    fn of(failed: Option<&Report>, max_loss: f64) -> Self {
        let Some(failed) = failed else {
            return Self::Allowed;
        };
        if is_skipped(failed, max_loss) {
            return if failed.cpu_waited > MAX_WAITED {
                Self::OwnCpu
            } else {
                Self::Generator
            };
        }
        let dropped = failed.dropped.received + failed.dropped.sent;
        if dropped * 2 >= failed.lost {
            Self::Interface
        } else {
            Self::Server
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Allowed => "the highest rate that was allowed (--to)",
            Self::Generator => "the generator, which cannot send more: give it more CPUs (--cpu)",
            Self::OwnCpu => "the generator's CPU, which has other work: choose another one (--cpu)",
            Self::Interface => "the interface, which drops packets: see its rings and queues",
            Self::Server => "the server, or the way to it",
        })
    }
}

/// Returns whether more queries were skipped than may be lost, or none was sent at all.
fn is_skipped(report: &Report, max_loss: f64) -> bool {
    report.sent == 0 || report.skipped as f64 > max_loss * (report.sent + report.skipped) as f64
}

/// The result of a search.
#[derive(Debug, Serialize)]
struct Found {
    kind: &'static str,
    /// Highest rate without loss; 0 if there is none.
    rate: u32,
    limit: Limit,
}

impl Search {
    pub(crate) fn run(&self) -> Result<()> {
        let prepared = self.target.prepare(&[self.server])?;
        measure::end_by_signals()?;
        let mut output = Output::new(self.json, None)?;
        let max_loss = self.max_loss / 100.0;
        let mut progress = Progress {
            from: self.from,
            to: self.to,
            precision: self.precision / 100.0,
            answered: 0,
            failed: None,
        };
        let mut trials: Vec<Report> = Vec::new();
        let length = Duration::from_secs(self.seconds);
        let generator = &prepared.generator;
        generator.during(&|| Ok(()), || {
            while let Some(rate) = progress.next() {
                let plan = Plan {
                    kind: Kind::Trial,
                    rate: Some(rate),
                    length,
                    part: generator.whole(),
                };
                let interface = &self.target.interface;
                let (trial, ended) = measure(generator, interface, &plan, length, &mut |_| Ok(()))?;
                if ended == Ended::Interrupted {
                    break;
                }
                output.line(&trial)?;
                let is_answered = trial.loss <= max_loss && !is_skipped(&trial, max_loss);
                progress.note(rate, is_answered);
                trials.push(trial);
            }
            Ok(())
        })?;
        let failed = trials
            .iter()
            .find(|trial| trial.rate == progress.failed && progress.failed.is_some());
        let limit = Limit::of(failed, max_loss);
        if let Some(file) = &self.plot {
            write(file, plot::over_rates(&trials)?)?;
        }
        if output.is_json() {
            return output.json(&Found {
                kind: "found",
                rate: progress.answered,
                limit,
            });
        }
        output.print(&format!(
            "{}/s with at most {} % lost, for {} s; the limit is {limit}\n",
            progress.answered, self.max_loss, self.seconds
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Drops, tests::report};

    /// Searches for a limit; returns what was found and the rates tried.
    fn search(limit: u32, from: u32, to: u32) -> (u32, Vec<u32>) {
        let mut progress = Progress {
            from,
            to,
            precision: 0.02,
            answered: 0,
            failed: None,
        };
        let mut tried = Vec::new();
        while let Some(rate) = progress.next() {
            tried.push(rate);
            progress.note(rate, rate <= limit);
        }
        (progress.answered, tried)
    }

    #[test]
    fn rates_double_and_bisect() {
        let (found, tried) = search(6_200, 1_000, 1_000_000);
        assert_eq!(tried[..6], [1_000, 2_000, 4_000, 8_000, 6_000, 7_000]);
        assert!((6_076..=6_200).contains(&found), "{found}");
        // Nothing is tried twice.
        let mut once = tried.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), tried.len());
    }

    #[test]
    fn ends_of_the_range_are_found() {
        assert_eq!(
            search(u32::MAX, 1_000, 5_000),
            (5_000, vec![1_000, 2_000, 4_000, 5_000])
        );
        assert_eq!(search(u32::MAX, 9_000, 5_000), (5_000, vec![5_000]));
        assert_eq!(search(0, 4, 100), (0, vec![4, 2, 1]));
        assert_eq!(search(u32::MAX, 3_000_000_000, u32::MAX).0, u32::MAX);
    }

    #[test]
    fn limits_are_told_apart() {
        let limit = |change: fn(&mut Report)| {
            let mut failed = report(1000, 900);
            change(&mut failed);
            Limit::of(Some(&failed), 0.001)
        };
        assert_eq!(Limit::of(None, 0.001), Limit::Allowed);
        assert_eq!(limit(|_| {}), Limit::Server);
        assert_eq!(limit(|report| report.skipped = 100), Limit::Generator);
        // Nothing is lost where nothing was sent.
        assert_eq!(limit(|report| report.sent = 0), Limit::Generator);
        assert_eq!(
            limit(|report: &mut Report| {
                report.skipped = 100;
                report.cpu_waited = 0.5;
            }),
            Limit::OwnCpu
        );
        assert_eq!(
            limit(|report: &mut Report| {
                report.dropped = Drops {
                    received: 30,
                    sent: 30,
                };
            }),
            Limit::Interface
        );
    }

    #[test]
    fn steps_end_at_the_precision() {
        for (answered, failed, precision, next) in [
            (0, None, 0.02, Some(1_000)),
            (1_000, None, 0.02, Some(2_000)),
            (6_000, None, 0.02, Some(10_000)),
            (10_000, None, 0.02, None),
            (1_000, Some(1_021), 0.02, Some(1_010)),
            (1_000, Some(1_020), 0.02, None),
            // At least one query a second.
            (10, Some(12), 0.02, Some(11)),
            (10, Some(11), 0.02, None),
            (0, Some(1), 0.02, None),
            (0, Some(3), 0.02, Some(1)),
        ] {
            let progress = Progress {
                from: 1_000,
                to: 10_000,
                precision,
                answered,
                failed,
            };
            assert_eq!(progress.next(), next, "{answered} {failed:?}");
        }
    }

    #[test]
    fn limits_begin_behind_their_bounds() {
        let failed = |skipped, waited, dropped: [u64; 2]| {
            let mut failed = report(1000, 900);
            failed.skipped = skipped;
            failed.cpu_waited = waited;
            failed.dropped = Drops {
                received: dropped[0],
                sent: dropped[1],
            };
            Limit::of(Some(&failed), 0.5)
        };
        // Half of 2,000 queries may be lost.
        assert_eq!(failed(1000, 0.0, [0, 0]), Limit::Server);
        assert_eq!(failed(1001, 0.0, [0, 0]), Limit::Generator);
        assert_eq!(failed(1001, MAX_WAITED, [0, 0]), Limit::Generator);
        assert_eq!(failed(1001, 0.011, [0, 0]), Limit::OwnCpu);
        // Of 100 lost queries half have to be dropped.
        assert_eq!(failed(0, 0.5, [24, 25]), Limit::Server);
        assert_eq!(failed(0, 0.5, [25, 25]), Limit::Interface);
        assert_eq!(failed(0, 0.5, [50, 0]), Limit::Interface);
        let shown = [
            (Limit::Allowed, "--to"),
            (Limit::Generator, "give it more CPUs"),
            (Limit::OwnCpu, "choose another one"),
            (Limit::Interface, "drops packets"),
            (Limit::Server, "the server"),
        ];
        for (limit, text) in shown {
            assert!(limit.to_string().contains(text), "{limit}");
        }
    }

    #[test]
    fn percentages_have_limits() {
        for (text, expected) in [
            ("0", Some(0.0)),
            ("100", Some(100.0)),
            ("0.1", Some(0.1)),
            ("-0.1", None),
            ("100.1", None),
            ("NaN", None),
            ("x", None),
        ] {
            assert_eq!(percent(text).ok(), expected, "{text}");
        }
    }
}
