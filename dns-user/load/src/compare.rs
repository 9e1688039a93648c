//! The command `compare`: two servers under the same load, in turns.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use anyhow::{Result, bail, ensure};
use clap::Args;
use serde::Serialize;

use crate::{
    generator::MAX_BURST,
    measure::{self, Ended, Plan, measure},
    output::Output,
    plot,
    ratio::Ratio,
    report::{Kind, Report},
    run::ResultFile,
    search::percent,
    target::{Prepared, Target, endpoint},
};

/// Servers of the turns of a block. A steady change during it affects both alike, and each one follows the other
/// once and itself once. Every second block begins with the other server.
const BLOCK: [usize; 4] = [0, 1, 1, 0];

/// Blocks after which the interval is looked at for the first time; then after twice as many.
const MIN_LOOK: u32 = 8;

/// Probability that any of the intervals looked at misses the ratio.
const MAX_ERROR: f64 = 0.05;

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
    /// Queries of each CPU that are due at the same moment, such as a client's A and AAAA: 1 to 16. The rate stays the mean.
    #[arg(long, default_value_t = 1, requires = "rate", value_parser = clap::value_parser!(u32).range(1..=MAX_BURST))]
    burst: u32,
    /// Ends the comparison when the 95 % interval of the ratio is at most this far from it on either side, in percent.
    /// The ratio is that of replies at full speed, and of median latencies at a rate. 0 takes all turns.
    #[arg(long, default_value_t = 1.0, value_parser = percent)]
    precision: f64,
    /// Maximum number of turns of each server, two in each block.
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(2..=1000))]
    turns: u32,
    /// Length of a turn in milliseconds.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(50..=60_000))]
    turn: u64,
    /// Prints JSON Lines: an object for each turn, and one with the ratios.
    #[arg(long)]
    json: bool,
    /// Draws rates and latencies of both servers over the turns, as SVG.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// Why a comparison ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum End {
    /// The interval is as narrow as `--precision` asks.
    Precise,
    /// All turns were taken.
    Turns,
    /// SIGINT or SIGTERM.
    Interrupted,
}

/// A turn, as JSON.
#[derive(Serialize)]
struct Turn<'a> {
    server: SocketAddr,
    #[serde(flatten)]
    report: &'a Report,
}

/// The result: the second server's figures divided by the first one's.
#[derive(Debug, Serialize)]
struct Comparison {
    kind: &'static str,
    first: SocketAddr,
    second: SocketAddr,
    /// Turns of each server.
    turns: usize,
    received: Option<Ratio>,
    p50: Option<Ratio>,
    p99: Option<Ratio>,
    ended: End,
}

impl Compare {
    pub(crate) fn run(&self) -> Result<()> {
        ensure!(
            self.first.is_ipv6() == self.second.is_ipv6(),
            "the servers have addresses of different families"
        );
        let servers = [self.first, self.second];
        let prepared = self.target.prepare(&servers, Duration::ZERO)?;
        let drawing = ResultFile::create(self.plot.as_deref())?;
        measure::end_by_signals()?;
        let most_blocks = self.turns.div_ceil(2);
        let all_turns = self.length() * most_blocks * BLOCK.len() as u32;
        let mut course = Course {
            options: self,
            servers,
            output: Output::new(self.json, Some(all_turns))?,
            looks: looks(most_blocks),
            turns: [Vec::new(), Vec::new()],
            prepared: &prepared,
        };
        let generator = &prepared.generator;
        let ended = generator.during(&|| Ok(()), || course.measure())?;
        course.output.finish();
        if let Some(file) = drawing {
            file.write(plot::over_turns(&course.turns)?)?;
        }
        let comparison = course.comparison(ended);
        if self.json {
            return course.output.json(&comparison);
        }
        let text = comparison.table() + &self.reason(&comparison);
        course.output.print(&text)
    }

    fn length(&self) -> Duration {
        Duration::from_millis(self.turn)
    }

    /// Returns the ratio whose precision ends the comparison: at a rate both servers receive the same.
    fn deciding(&self, comparison: &Comparison) -> Option<Ratio> {
        match self.rate {
            None => comparison.received,
            Some(_) => comparison.p50,
        }
    }

    fn is_precise(&self, comparison: &Comparison) -> bool {
        let ratio = self.deciding(comparison);
        let found = ratio.and_then(|ratio| ratio.precision());
        found.is_some_and(|found| found * 100.0 <= self.precision)
    }

    /// Returns the sentence that states the precision and why the comparison ended.
    fn reason(&self, comparison: &Comparison) -> String {
        let ratio = self.deciding(comparison);
        let found = match ratio.and_then(|ratio| ratio.precision()) {
            Some(found) => format!("the ratio is exact to {:.2} %", found * 100.0),
            None => "too few turns for an interval".to_owned(),
        };
        match comparison.ended {
            End::Precise => format!("{found}, as --precision asks\n"),
            End::Turns => format!("{found}, after the turns that --turns allows\n"),
            End::Interrupted => format!("{found}, interrupted\n"),
        }
    }
}

/// Returns the numbers of blocks after which the interval is looked at, the maximum last. Whoever looks after each block
/// finds a narrow interval by chance, sooner or later.
fn looks(most_blocks: u32) -> Vec<u32> {
    let mut looks = Vec::new();
    let mut next = MIN_LOOK;
    while next < most_blocks {
        looks.push(next);
        next *= 2;
    }
    looks.push(most_blocks);
    looks
}

/// A comparison as it proceeds.
struct Course<'a> {
    options: &'a Compare,
    servers: [SocketAddr; 2],
    output: Output,
    looks: Vec<u32>,
    prepared: &'a Prepared,
    /// Turns of each server, two in each complete block.
    turns: [Vec<Report>; 2],
}

impl Course<'_> {
    fn measure(&mut self) -> Result<End> {
        // The first turns find cold caches, above all the first server's.
        for server in [0, 1] {
            if self.turn(server)?.is_none() {
                return Ok(End::Interrupted);
            }
        }
        let mut blocks = 0;
        for look in self.looks.clone() {
            while blocks < look {
                if !self.block(blocks)? {
                    return Ok(End::Interrupted);
                }
                blocks += 1;
            }
            if self.options.is_precise(&self.comparison(End::Turns)) {
                return Ok(End::Precise);
            }
        }
        Ok(End::Turns)
    }

    /// Measures a block, and returns whether no signal ended it.
    fn block(&mut self, number: u32) -> Result<bool> {
        let begins_with = number as usize % 2;
        for place in BLOCK {
            let server = (begins_with + place) % 2;
            let Some(report) = self.turn(server)? else {
                return Ok(false);
            };
            self.show(server, &report)?;
            self.turns[server].push(report);
        }
        Ok(true)
    }

    /// Measures a turn; `None` if a signal ended it.
    fn turn(&self, server: usize) -> Result<Option<Report>> {
        let length = self.options.length();
        let plan = Plan {
            kind: Kind::Turn,
            rate: self.options.rate,
            burst: self.options.burst,
            length,
            part: self.prepared.parts[server].clone(),
        };
        let Prepared {
            generator,
            interface,
            ..
        } = self.prepared;
        let (report, ended) = measure(generator, interface, &plan, length, &mut |_| Ok(()))?;
        match ended {
            // Histograms of all turns would be large.
            Ended::InTime => Ok(Some(Report {
                histograms: Vec::new(),
                ..report
            })),
            Ended::Interrupted => Ok(None),
            // A ratio to a server that is gone would look like a result.
            Ended::Silent(unanswered) => bail!(
                "{} stopped answering: no reply to the last {unanswered} queries",
                self.servers[server]
            ),
        }
    }

    fn show(&mut self, server: usize, report: &Report) -> Result<()> {
        if !self.output.is_json() {
            return self.output.line(report);
        }
        self.output.progress(report);
        let server = self.servers[server];
        self.output.json(&Turn { server, report })
    }

    fn comparison(&self, ended: End) -> Comparison {
        Comparison {
            kind: "comparison",
            first: self.servers[0],
            second: self.servers[1],
            turns: self.turns[0].len().min(self.turns[1].len()),
            received: self.ratio(|report| Some(report.received_per_second)),
            p50: self.ratio(|report| Some(report.latency?.p50)),
            p99: self.ratio(|report| Some(report.latency?.p99)),
            ended,
        }
    }

    /// Returns the ratio of a figure.
    fn ratio(&self, figure: fn(&Report) -> Option<f64>) -> Option<Ratio> {
        // Each look has its part of the error (Bonferroni).
        let max_error = MAX_ERROR / self.looks.len() as f64;
        Ratio::of(&blocks(&self.turns, figure), max_error)
    }
}

/// Returns the sums of a figure of both servers in each block in which all turns have it.
fn blocks(turns: &[Vec<Report>; 2], figure: fn(&Report) -> Option<f64>) -> Vec<[f64; 2]> {
    let mut blocks = Vec::new();
    let [first, second] = turns;
    for (first, second) in first.chunks_exact(2).zip(second.chunks_exact(2)) {
        if let (Some(first), Some(second)) = (sum(first, figure), sum(second, figure)) {
            blocks.push([first, second]);
        }
    }
    blocks
}

fn sum(turns: &[Report], figure: fn(&Report) -> Option<f64>) -> Option<f64> {
    let mut sum = 0.0;
    for turn in turns {
        sum += figure(turn)?;
    }
    Some(sum)
}

impl Comparison {
    fn table(&self) -> String {
        let mut text = format!(
            "\n{} : {}, {} turns of each\n             median  95 % interval       quartiles            all turns\n",
            self.second, self.first, self.turns
        );
        for (name, ratio) in [
            ("received", self.received),
            ("p50", self.p50),
            ("p99", self.p99),
        ] {
            let Some(ratio) = ratio else {
                text += &format!("{name:9}         -\n");
                continue;
            };
            let interval = match ratio.interval {
                Some([low, high]) => format!("{low:.3} to {high:.3}"),
                None => "-".to_owned(),
            };
            let [low, high] = ratio.quartiles;
            text += &format!(
                "{name:9} {:9.3}  {interval:18}  {low:.3} to {high:.3}  {:12.3}\n",
                ratio.median, ratio.overall
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{generator::alone, interface::Interface, report::tests::report};

    /// A steady drift cancels out within each block.
    #[test]
    fn blocks_are_free_of_drift() {
        let received = |report: &Report| Some(report.received_per_second);
        // Turn by turn 40 queries fewer, in the order first, second, second, first.
        let mut turns = [
            vec![report(1000, 400), report(1000, 280)],
            vec![report(1000, 360), report(1000, 320)],
        ];
        assert_eq!(blocks(&turns, received), [[340.0, 340.0]]);
        // A block without latencies is none, and neither is half of one.
        let p50 = |report: &Report| Some(report.latency?.p50);
        assert_eq!(blocks(&turns, p50), [[0.0; 2]; 0]);
        turns[1].pop();
        assert_eq!(blocks(&turns, received), [[0.0; 2]; 0]);
    }

    #[test]
    fn servers_take_each_place_equally_often() {
        let mut follows = [[0; 2]; 2];
        let mut places = [[0; 2]; 4];
        let mut order = Vec::new();
        for begins_with in [0, 1] {
            for (index, place) in BLOCK.into_iter().enumerate() {
                let server = (begins_with + place) % 2;
                places[index][server] += 1;
                order.push(server);
            }
        }
        for pair in order.windows(2) {
            follows[pair[0]][pair[1]] += 1;
        }
        assert_eq!(places, [[1; 2]; 4]);
        assert_eq!(follows[0][0], follows[1][1]);
        assert_eq!(order, [0, 1, 1, 0, 1, 0, 0, 1]);
    }

    /// Turns of equal servers on a machine that takes a fifth of the turns' CPU away for a while: the interval at which
    /// the comparison ends misses 1 as rarely as it says, wherever it ends, and the median is near it.
    #[test]
    fn equal_servers_compare_equal() {
        const COMPARISONS: usize = 500;
        let mut random = fastrand::Rng::with_seed(71);
        let mut turn = || {
            let pause = if random.u32(..5) == 0 {
                0.5 * random.f64()
            } else {
                0.0
            };
            // A sum of four is nearly normal, here with a deviation of 3 %.
            let noise = (0..4).map(|_| random.f64() - 0.5).sum::<f64>() * 0.052;
            (1.0 + noise) * (1.0 - pause)
        };
        let mut misses = 0;
        let mut far = 0;
        let mut early = 0;
        for _ in 0..COMPARISONS {
            let looks = looks(250);
            let mut blocks: Vec<[f64; 2]> = Vec::new();
            let mut found = None;
            for &look in &looks {
                while blocks.len() < look as usize {
                    blocks.push([turn() + turn(), turn() + turn()]);
                }
                let ratio = Ratio::of(&blocks, MAX_ERROR / looks.len() as f64).unwrap();
                found = Some(ratio);
                if ratio.precision().is_some_and(|precision| precision <= 0.01) {
                    early += usize::from(look < 250);
                    break;
                }
            }
            let ratio = found.unwrap();
            let [low, high] = ratio.interval.unwrap();
            misses += usize::from(low > 1.0 || high < 1.0);
            far += usize::from((ratio.median - 1.0).abs() > 0.02);
        }
        assert!(misses as f64 <= MAX_ERROR * COMPARISONS as f64, "{misses}");
        assert_eq!(far, 0);
        assert!(early > 0);
    }

    #[test]
    fn looks_are_fixed_beforehand() {
        assert_eq!(looks(1), [1]);
        assert_eq!(looks(8), [8]);
        assert_eq!(looks(9), [8, 9]);
        assert_eq!(looks(250), [8, 16, 32, 64, 128, 250]);
        assert_eq!(looks(500).len(), 7);
    }

    fn options(arguments: &[&str]) -> Compare {
        #[derive(clap::Parser)]
        struct Only {
            #[command(flatten)]
            compare: Compare,
        }
        let usual = ["compare", "10.0.0.1", "10.0.0.2", "--interface", "lo"];
        let queries = ["--queries", "queries"];
        let all = usual.iter().chain(&queries).chain(arguments);
        <Only as clap::Parser>::parse_from(all).compare
    }

    fn comparison(received: Option<Ratio>, p50: Option<Ratio>, ended: End) -> Comparison {
        Comparison {
            kind: "comparison",
            first: "10.0.0.1:53".parse().unwrap(),
            second: "10.0.0.2:53".parse().unwrap(),
            turns: 14,
            received,
            p50,
            p99: None,
            ended,
        }
    }

    const RATIO: Ratio = Ratio {
        median: 1.25,
        interval: Some([1.2, 1.3]),
        quartiles: [1.0, 1.5],
        overall: 1.125,
    };

    #[test]
    fn precision_is_that_of_the_deciding_ratio() {
        let exact = Ratio {
            interval: Some([1.25, 1.25]),
            ..RATIO
        };
        let found = comparison(Some(RATIO), Some(exact), End::Turns);
        assert!(!options(&[]).is_precise(&found));
        assert!(options(&["--rate", "9"]).is_precise(&found));
        assert!(options(&["--precision", "4.1"]).is_precise(&found));
        assert!(!options(&["--precision", "3.9"]).is_precise(&found));
        let too_few = Ratio {
            interval: None,
            ..RATIO
        };
        let found = comparison(Some(too_few), None, End::Turns);
        assert!(!options(&["--precision", "100"]).is_precise(&found));
        assert!(!options(&["--rate", "9"]).is_precise(&found));
    }

    #[test]
    fn end_has_its_reason() {
        let reason = |ended| options(&[]).reason(&comparison(Some(RATIO), None, ended));
        let precise = "the ratio is exact to 4.00 %, as --precision asks\n";
        assert_eq!(reason(End::Precise), precise);
        assert!(reason(End::Turns).contains("--turns allows"));
        assert!(reason(End::Interrupted).contains("interrupted"));
        let none = options(&["--rate", "9"]).reason(&comparison(Some(RATIO), None, End::Turns));
        assert!(none.starts_with("too few turns"), "{none}");
    }

    #[test]
    fn table_has_a_line_for_each_figure() {
        let without = Ratio {
            interval: None,
            ..RATIO
        };
        let text = comparison(Some(RATIO), Some(without), End::Turns).table();
        let lines: Vec<&str> = text.trim().lines().collect();
        assert_eq!(lines[0], "10.0.0.2:53 : 10.0.0.1:53, 14 turns of each");
        assert_eq!(
            lines[2],
            "received      1.250  1.200 to 1.300      1.000 to 1.500         1.125"
        );
        assert_eq!(
            lines[3],
            "p50           1.250  -                   1.000 to 1.500         1.125"
        );
        assert_eq!(lines[4], "p99               -");
    }

    #[test]
    fn servers_take_turns_in_blocks() {
        alone(&[0], |generator| {
            let mut options = options(&[]);
            options.turn = 0;
            let prepared = Prepared {
                generator,
                interface: Interface::open("lo").unwrap(),
                queries: Vec::new(),
                parts: vec![0..1, 1..3],
            };
            let mut course = Course {
                servers: [options.first, options.second],
                options: &options,
                output: Output::new(true, None).unwrap(),
                looks: vec![1, 3],
                prepared: &prepared,
                turns: [Vec::new(), Vec::new()],
            };
            assert_eq!(course.measure().unwrap(), End::Turns);
            // Turns that warm up the servers do not count.
            assert_eq!(course.turns.each_ref().map(Vec::len), [6, 6]);
            for turn in course.turns.iter().flatten() {
                assert_eq!((turn.kind, turn.rate), (Kind::Turn, None));
                assert!(turn.histograms.is_empty());
            }
            let comparison = course.comparison(End::Turns);
            assert_eq!((comparison.turns, comparison.received), (6, None));
            // Of six blocks the interval misses the median with a probability of 1/32.
            course.turns = [(); 2].map(|()| vec![report(1000, 900); 12]);
            for (looks, interval) in [(vec![6], Some([1.0, 1.0])), (vec![1, 6], None)] {
                course.looks = looks;
                let ratio = course.comparison(End::Turns).received.unwrap();
                assert_eq!(ratio.interval, interval);
            }
        });
    }
}
