//! The command `compare`: two servers under the same load, in turns.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use anyhow::{Result, bail, ensure};
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

#[derive(Debug, Args)]
pub(crate) struct Compare {
    /// First server: ADDRESS or ADDRESS:PORT, on the interface's link, private or loopback.
    #[arg(value_parser = endpoint)]
    first: SocketAddr,
    /// Second server.
    #[arg(value_parser = endpoint)]
    second: SocketAddr,
    #[command(flatten)]
    target: Target,
    /// Queries per second; without it, as many as possible.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rate: Option<u32>,
    /// Turns of each server.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=1000))]
    turns: u32,
    /// Length of a turn in milliseconds.
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(50..=60_000))]
    turn: u64,
    /// Prints JSON Lines: an object for each turn, and one with the ratios.
    #[arg(long)]
    json: bool,
    /// Draws rates and latencies of both servers over the turns, as SVG.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// A ratio in all pairs of turns.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Ratio {
    median: f64,
    /// First and third quartile.
    low: f64,
    high: f64,
}

impl Ratio {
    /// Returns the ratio of the second server to the first, `None` where it is never defined.
    fn of(pairs: &[[Report; 2]], figure: fn(&Report) -> Option<f64>) -> Option<Self> {
        let mut ratios = Vec::new();
        for [first, second] in pairs {
            if let (Some(first), Some(second)) = (figure(first), figure(second))
                && first > 0.0
            {
                ratios.push(second / first);
            }
        }
        ratios.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let index = (share * ratios.len().saturating_sub(1) as f64).round() as usize;
            ratios.get(index).copied()
        };
        Some(Self {
            median: at(0.5)?,
            low: at(0.25)?,
            high: at(0.75)?,
        })
    }
}

/// The result: the second server's figures divided by the first one's.
#[derive(Debug, Serialize)]
struct Comparison {
    kind: &'static str,
    first: SocketAddr,
    second: SocketAddr,
    pairs: usize,
    received: Option<Ratio>,
    p50: Option<Ratio>,
    p99: Option<Ratio>,
}

impl Compare {
    pub(crate) fn run(&self) -> Result<()> {
        let servers = [self.first, self.second];
        ensure!(
            self.first.is_ipv6() == self.second.is_ipv6(),
            "the servers have addresses of different families"
        );
        let prepared = self.target.prepare(&servers)?;
        measure::end_by_signals()?;
        let turn = Duration::from_millis(self.turn);
        let mut output = Output::new(self.json, Some(turn * 2 * self.turns))?;
        let mut pairs: Vec<[Report; 2]> = Vec::new();
        let generator = &prepared.generator;
        let mut measured = |server: usize| -> Result<Option<Report>> {
            let plan = Plan {
                kind: Kind::Turn,
                rate: self.rate,
                length: turn,
                part: prepared.parts[server].clone(),
            };
            let interface = &self.target.interface;
            let (report, ended) = measure(generator, interface, &plan, turn, &mut |_| Ok(()))?;
            match ended {
                Ended::InTime => {}
                Ended::Interrupted => return Ok(None),
                Ended::Silent(unanswered) => bail!(
                    "{} stopped answering: no reply to the last {unanswered} queries",
                    servers[server]
                ),
            }
            output.line(&report)?;
            Ok(Some(report))
        };
        generator.during(&|| Ok(()), || {
            for turn in 0..self.turns as usize {
                // What drifts within a pair of turns favours each server in half of the pairs.
                let earlier = turn % 2;
                let (Some(one), Some(other)) = (measured(earlier)?, measured(1 - earlier)?) else {
                    break;
                };
                pairs.push(if earlier == 0 {
                    [one, other]
                } else {
                    [other, one]
                });
            }
            Ok(())
        })?;
        let comparison = Comparison {
            kind: "comparison",
            first: self.first,
            second: self.second,
            pairs: pairs.len(),
            received: Ratio::of(&pairs, |report| Some(report.received_per_second)),
            p50: Ratio::of(&pairs, |report| Some(report.latency?.p50)),
            p99: Ratio::of(&pairs, |report| Some(report.latency?.p99)),
        };
        output.finish();
        if let Some(file) = &self.plot {
            write(file, plot::over_turns(&pairs)?)?;
        }
        if self.json {
            return output.json(&comparison);
        }
        output.print(&comparison.table())
    }
}

impl Comparison {
    fn table(&self) -> String {
        let mut text = format!(
            "\n{} : {}, median (quartiles) of {} pairs of turns\n",
            self.second, self.first, self.pairs
        );
        for (name, ratio) in [
            ("received", self.received),
            ("p50", self.p50),
            ("p99", self.p99),
        ] {
            text += &match ratio {
                Some(Ratio { median, low, high }) => {
                    format!("{name:9} {median:.3} ({low:.3} to {high:.3})\n")
                }
                None => format!("{name:9} -\n"),
            };
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;

    #[test]
    fn ratios_are_those_of_pairs() {
        // The machine slows down: the quotient of the medians would say otherwise.
        let pairs: Vec<[Report; 2]> = [400, 200, 100]
            .map(|received| [report(1000, received), report(1000, received * 2)])
            .into();
        let found = Ratio::of(&pairs, |report| Some(report.received_per_second)).unwrap();
        assert_eq!(
            found,
            Ratio {
                median: 2.0,
                low: 2.0,
                high: 2.0
            }
        );
        assert_eq!(Ratio::of(&pairs, |report| Some(report.latency?.p50)), None);
        assert_eq!(Ratio::of(&[], |_| Some(1.0)), None);
    }

    #[test]
    fn quartiles_are_those_of_the_ratios() {
        let pairs: Vec<[Report; 2]> = [100, 500, 300, 400, 200]
            .map(|received| [report(1000, 100), report(1000, received)])
            .into();
        let received = |report: &Report| Some(report.received_per_second);
        let found = Ratio::of(&pairs, received).unwrap();
        assert_eq!([found.low, found.median, found.high], [2.0, 3.0, 4.0]);
        // A server that received nothing has no ratio; one that is compared with it has.
        let pairs = [
            [report(1000, 0), report(1000, 100)],
            [report(1000, 100), report(1000, 0)],
        ];
        assert_eq!(Ratio::of(&pairs, received).unwrap().median, 0.0);
        assert_eq!(Ratio::of(&pairs[..1], received), None);
    }

    #[test]
    fn table_has_a_line_for_each_figure() {
        let ratio = Ratio {
            median: 1.25,
            low: 1.0,
            high: 1.5,
        };
        let comparison = Comparison {
            kind: "comparison",
            first: "10.0.0.1:53".parse().unwrap(),
            second: "10.0.0.2:53".parse().unwrap(),
            pairs: 7,
            received: Some(ratio),
            p50: None,
            p99: Some(ratio),
        };
        assert_eq!(
            comparison.table(),
            "\n10.0.0.2:53 : 10.0.0.1:53, median (quartiles) of 7 pairs of turns\n\
             received  1.250 (1.000 to 1.500)\np50       -\np99       1.250 (1.000 to 1.500)\n"
        );
    }
}
