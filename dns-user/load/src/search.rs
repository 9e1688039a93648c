//! The command `search`: the highest rate without loss.

use std::{fmt, net::SocketAddr, path::PathBuf, time::Duration};

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;

use crate::{
    generator::MAX_BURST,
    measure::{self, Ended, Plan, measure},
    output::Output,
    pauses::Pauses,
    plot,
    report::{Kind, Report},
    run::ResultFile,
    target::{Prepared, Target, endpoint},
};

/// Trials of a rate, most of which have to hold. A rate that holds at once is not tried again.
const MAX_TRIALS: u32 = 3;

/// Changes of mind of a search: bounds that were tried again once they were close, and then did otherwise. A server between
/// two speeds would never end it.
const MAX_DOUBTS: u32 = 4;

/// Trials are so many times as long as the loads at full speed between them.
const TRIALS_PER_SATURATED: u32 = 4;

/// Highest rate without `--to`, far above what an interface carries.
const MAX_RATE: u32 = 20_000_000;

/// Share of the time that generating threads wait for their CPU, above which other work on it limits the rate.
const MAX_WAITED: f64 = 0.01;

/// Maximum share of the queries that the generator may skip. They were not sent, so the server has lost none of them, and the
/// bisection ends with steps of about as much. Held to the limit of losses, stalls of the generator that add up to a millisecond
/// in a second bounded a server of 1.09 million answers/s at 0.89 of them.
const MAX_SKIPPED: f64 = 0.01;

#[derive(Debug, Args)]
pub(crate) struct Search {
    /// Server: ADDRESS or ADDRESS:PORT, on the interface's link, private or loopback.
    #[arg(long, value_parser = endpoint)]
    server: SocketAddr,
    #[command(flatten)]
    target: Target,
    /// Highest loss of a rate that holds, in percent.
    #[arg(long, default_value_t = 0.1, value_parser = percent)]
    max_loss: f64,
    /// Maximum share of the queries, in percent, whose loss in pauses does not count: a pause is an eighth of a millisecond or longer
    /// in which the server answers nothing, or a millisecond in which the generator has no CPU. With 0 every loss counts, as in RFC 2544.
    #[arg(long, default_value_t = 10.0, value_parser = percent)]
    max_pauses: f64,
    /// Seconds for which a rate is tried. One that fails is tried up to three times, and holds if it does so twice.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// First rate.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    from: u32,
    /// Queries of each CPU that are due at the same moment, such as a client's A and AAAA: 1 to 16. The rate stays the mean.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=MAX_BURST))]
    burst: u32,
    /// Highest rate. Without it, 20,000,000/s, and loads at full speed between the trials, once a rate has failed.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    to: Option<u32>,
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

/// Parses a percentage.
pub(crate) fn percent(text: &str) -> Result<f64> {
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
    /// Rates without loss, each higher than the one before.
    answered: Vec<u32>,
    /// Rates with loss, each lower than the one before, all above those without.
    failed: Vec<u32>,
    /// Rates tried again since the last step, with the same result.
    confirmed: Vec<u32>,
    /// Rates tried again with another result.
    doubts: u32,
}

impl Progress {
    fn new(from: u32, to: u32, precision: f64) -> Self {
        Self {
            from: from.min(to),
            to,
            precision,
            answered: Vec::new(),
            failed: Vec::new(),
            confirmed: Vec::new(),
            doubts: 0,
        }
    }

    /// Returns the highest rate without loss; 0 before there is one.
    fn answered(&self) -> u32 {
        self.answered.last().copied().unwrap_or(0)
    }

    /// Returns the lowest rate with loss.
    fn failed(&self) -> Option<u32> {
        self.failed.last().copied()
    }

    /// Returns the next rate, if the answer is not exact enough yet.
    fn next(&self) -> Option<u32> {
        let answered = self.answered();
        let Some(failed) = self.failed() else {
            let next = answered.saturating_mul(2).clamp(self.from, self.to);
            return (next > answered).then_some(next);
        };
        // At least one, because rates are whole numbers.
        let step = (f64::from(answered) * self.precision).max(1.0);
        if f64::from(failed - answered) > step {
            return Some(answered + (failed - answered) / 2);
        }
        self.doubtful()
    }

    /// Returns a bound that has been tried only once. Machines are slower for some seconds, in which each rate above a
    /// lower one fails: without a second look, one such time would bound the result.
    fn doubtful(&self) -> Option<u32> {
        if self.doubts >= MAX_DOUBTS {
            return None;
        }
        for bound in [self.failed(), self.answered.last().copied()] {
            let bound = bound.filter(|bound| !self.confirmed.contains(bound));
            if bound.is_some() {
                return bound;
            }
        }
        None
    }

    fn note(&mut self, rate: u32, is_answered: bool) {
        let was_answered = self.answered.last() == Some(&rate);
        let has_failed = self.failed.last() == Some(&rate);
        if (was_answered && is_answered) || (has_failed && !is_answered) {
            self.confirmed.push(rate);
            return;
        }
        if was_answered {
            self.answered.pop();
            self.doubts += 1;
        }
        if has_failed {
            self.failed.pop();
            self.doubts += 1;
        }
        self.confirmed.clear();
        if is_answered {
            self.answered.push(rate);
        } else {
            self.failed.push(rate);
        }
    }
}

/// Reason why no higher rate held.
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
    /// Times in which nothing was answered.
    Pauses,
    Server,
}

/// The losses that a rate may have.
#[derive(Clone, Copy, Debug)]
struct Tolerance {
    /// Share of the queries.
    max_loss: f64,
    /// Share of the queries whose loss in pauses does not count.
    max_pauses: f64,
}

impl Tolerance {
    /// Returns whether the generator sent the rate.
    fn is_sent(&self, trial: &Report) -> bool {
        let due = (trial.sent + trial.skipped) as f64;
        let mut skipped = trial.skipped;
        // CPU time that the machine takes from the generator is treated like time that it takes from the server.
        if trial.stalled as f64 <= self.max_pauses * due {
            skipped -= trial.stalled;
        }
        trial.sent > 0 && skipped as f64 <= self.max_loss.max(MAX_SKIPPED) * due
    }

    /// Returns whether pauses may be left out of the loss.
    fn allows_pauses(&self, trial: &Report) -> bool {
        trial.lost_in_pauses() <= self.max_pauses
    }

    /// Returns whether so much was answered, beside pauses, as the rate may lose.
    fn is_answered_beside_pauses(&self, trial: &Report) -> bool {
        let in_pauses = trial.pauses.map_or(0, |pauses| pauses.lost);
        let lost = trial.lost.saturating_sub(in_pauses);
        lost as f64 <= self.max_loss * trial.sent as f64
    }

    fn holds(&self, trial: &Report) -> bool {
        let is_answered = trial.loss <= self.max_loss
            || self.allows_pauses(trial) && self.is_answered_beside_pauses(trial);
        is_answered && self.is_sent(trial)
    }

    /// Returns what made a trial fail.
    fn limit(&self, failed: &Report) -> Limit {
        if !self.is_sent(failed) {
            return if failed.cpu_waited > MAX_WAITED {
                Limit::OwnCpu
            } else {
                Limit::Generator
            };
        }
        // A server that is silent most of the time is not in a pause.
        if failed.lost_in_pauses() < 0.5 && self.is_answered_beside_pauses(failed) {
            return Limit::Pauses;
        }
        let dropped = failed.dropped.received + failed.dropped.sent;
        // Drivers count the same packets by queue and in sum, so their counters are not added up.
        let of_driver = failed.counters.values().copied().max().unwrap_or(0);
        if dropped.max(of_driver) * 2 >= failed.lost {
            Limit::Interface
        } else {
            Limit::Server
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Allowed => "the highest rate that was allowed (--to)",
            Self::Generator => "the generator, which cannot send more: give it more CPUs (--cpu)",
            Self::OwnCpu => "the generator's CPU, which has other work: choose another one (--cpu)",
            Self::Interface => {
                "the interface, which drops packets: see its rings and queues (of a veth pair: the other end's queue; of sockets: net.core.rmem_default)"
            }
            Self::Pauses => {
                "pauses, in which nothing was answered: other work on the server's CPU, or its own (--max-pauses)"
            }
            Self::Server => "the server, or the way to it",
        })
    }
}

/// The result of a search.
#[derive(Debug, PartialEq, Serialize)]
struct Found {
    kind: &'static str,
    /// Highest rate that held; 0 if there is none.
    rate: u32,
    /// Replies per second at this rate.
    received_per_second: f64,
    /// Pauses at this rate.
    pauses: Option<Pauses>,
    /// Highest rate tried that held although every loss counts.
    rate_with_pauses: u32,
    /// Replies per second at full speed, the median of loads between the trials.
    saturated: Option<f64>,
    limit: Limit,
}

impl Found {
    /// Sums up the loads of a search.
    fn of(progress: &Progress, loads: &Loads, tolerance: Tolerance) -> Self {
        let strict = Tolerance {
            max_pauses: 0.0,
            ..tolerance
        };
        let mut found = Self {
            kind: "found",
            rate: progress.answered(),
            received_per_second: 0.0,
            pauses: None,
            rate_with_pauses: 0,
            saturated: median(&loads.saturated),
            limit: Limit::Allowed,
        };
        for trial in &loads.trials {
            let rate = trial.rate.unwrap_or(0);
            let holds = tolerance.holds(trial);
            // The last trial of the rate: an earlier one may have met the machine at another speed.
            if holds && rate == found.rate {
                found.received_per_second = trial.received_per_second;
                found.pauses = trial.pauses;
            }
            if !holds && progress.failed() == Some(rate) {
                found.limit = tolerance.limit(trial);
            }
            if strict.holds(trial) {
                found.rate_with_pauses = found.rate_with_pauses.max(rate);
            }
        }
        found
    }
}

/// Returns the median of the replies per second.
fn median(loads: &[Report]) -> Option<f64> {
    let mut rates = Vec::with_capacity(loads.len());
    for load in loads {
        rates.push(load.received_per_second);
    }
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied()
}

/// Trials of one rate.
#[derive(Debug, Default)]
struct Votes {
    held: u32,
    failed: u32,
}

impl Votes {
    /// Returns whether the rate holds, once that is decided.
    fn add(&mut self, holds: bool) -> Option<bool> {
        if holds {
            self.held += 1;
        } else {
            self.failed += 1;
        }
        // A rate that holds at once is believed: by chance rates fail, but none holds.
        if self.failed == 0 || self.held > MAX_TRIALS / 2 {
            return Some(true);
        }
        (self.failed > MAX_TRIALS / 2).then_some(false)
    }
}

/// Loads of a search.
#[derive(Debug, Default)]
struct Loads {
    trials: Vec<Report>,
    /// Those at full speed.
    saturated: Vec<Report>,
}

/// A search as it proceeds.
struct Course<'a> {
    options: &'a Search,
    prepared: &'a Prepared,
    tolerance: Tolerance,
    output: Output,
    loads: Loads,
}

impl Search {
    pub(crate) fn run(&self) -> Result<()> {
        let prepared = self.target.prepare(&[self.server], self.length())?;
        let drawing = ResultFile::create(self.plot.as_deref())?;
        measure::end_by_signals()?;
        let mut course = Course {
            options: self,
            prepared: &prepared,
            tolerance: Tolerance {
                max_loss: self.max_loss / 100.0,
                max_pauses: self.max_pauses / 100.0,
            },
            output: Output::new(self.json, None)?,
            loads: Loads::default(),
        };
        let to = self.to.unwrap_or(MAX_RATE);
        let mut progress = Progress::new(self.from, to, self.precision / 100.0);
        let generator = &prepared.generator;
        generator.during(&|| Ok(()), || course.measure(&mut progress))?;
        if let Some(file) = drawing {
            file.write(plot::over_rates(&course.loads.trials)?)?;
        }
        let found = Found::of(&progress, &course.loads, course.tolerance);
        if self.json {
            return course.output.json(&found);
        }
        course.output.print(&self.summary(&found))
    }

    fn length(&self) -> Duration {
        Duration::from_secs(self.seconds)
    }

    fn summary(&self, found: &Found) -> String {
        let mut text = format!(
            "{}/s with at most {} % lost, for {} s; the limit is {}\n",
            found.rate, self.max_loss, self.seconds, found.limit
        );
        if let Some(pauses) = found.pauses.filter(|pauses| pauses.count > 0) {
            text += &format!(
                "beside pauses ({} of up to {:.1} ms), which lost {} queries; {:.0}/s were answered, and the highest rate tried \
                 at which every loss counts is {}/s\n",
                pauses.count,
                pauses.longest,
                pauses.lost,
                found.received_per_second,
                found.rate_with_pauses
            );
        }
        if let Some(saturated) = found.saturated {
            text += &format!("at full speed, between the trials, {saturated:.0}/s are answered\n");
        }
        text
    }
}

impl Course<'_> {
    /// Tries rates until the answer is exact enough or a signal ends the search.
    fn measure(&mut self, progress: &mut Progress) -> Result<()> {
        while let Some(rate) = progress.next() {
            // Between the trials, because a machine's speed changes within a search. `--to` bounds all loads.
            if progress.failed().is_some() && self.options.to.is_none() && !self.saturate()? {
                return Ok(());
            }
            let Some(is_answered) = self.decide(rate)? else {
                return Ok(());
            };
            progress.note(rate, is_answered);
        }
        Ok(())
    }

    /// Tries a rate until it holds or fails; `None` if a signal ended that.
    fn decide(&mut self, rate: u32) -> Result<Option<bool>> {
        let mut votes = Votes::default();
        loop {
            let Some(trial) = self.trial(rate)? else {
                return Ok(None);
            };
            self.output.line(&trial)?;
            let decided = votes.add(self.tolerance.holds(&trial));
            self.loads.trials.push(trial);
            if decided.is_some() {
                return Ok(decided);
            }
        }
    }

    fn trial(&self, rate: u32) -> Result<Option<Report>> {
        let generator = &self.prepared.generator;
        let first_moment = generator.begin_record()?;
        let length = self.options.length();
        let (trial, ended) = self.load(Kind::Trial, Some(rate), length)?;
        let moments = generator.record_since(first_moment)?;
        let pauses = Pauses::of(&moments, generator.moment());
        let trial = Report {
            pauses: Some(pauses),
            ..trial
        };
        Ok((ended != Ended::Interrupted).then_some(trial))
    }

    /// Loads the server at full speed; returns whether no signal ended that.
    fn saturate(&mut self) -> Result<bool> {
        let length = self.options.length() / TRIALS_PER_SATURATED;
        let (load, ended) = self.load(Kind::Saturated, None, length)?;
        // Cut short, it may be that of a moment.
        if ended == Ended::Interrupted {
            return Ok(false);
        }
        self.output.line(&load)?;
        self.loads.saturated.push(load);
        Ok(true)
    }

    fn load(&self, kind: Kind, rate: Option<u32>, length: Duration) -> Result<(Report, Ended)> {
        let Prepared {
            generator,
            interface,
            ..
        } = self.prepared;
        let plan = Plan {
            kind,
            rate,
            burst: self.options.burst,
            length,
            part: generator.whole(),
        };
        let (load, ended) = measure(generator, interface, &plan, length, &mut |_| Ok(()))?;
        // Histograms of all loads would be large.
        let load = Report {
            histograms: Vec::new(),
            ..load
        };
        Ok((load, ended))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        generator::alone,
        interface::{Drops, Interface},
        report::tests::report,
    };

    const TOLERANCE: Tolerance = Tolerance {
        max_loss: 0.001,
        max_pauses: 0.1,
    };

    /// Searches for a limit; returns what was found and the rates tried.
    fn search(limit: u32, from: u32, to: u32) -> (u32, Vec<u32>) {
        let mut progress = Progress::new(from, to, 0.02);
        let mut tried = Vec::new();
        while let Some(rate) = progress.next() {
            tried.push(rate);
            progress.note(rate, rate <= limit);
        }
        (progress.answered(), tried)
    }

    #[test]
    fn rates_double_and_bisect() {
        let (found, tried) = search(6_200, 1_000, 1_000_000);
        assert_eq!(tried[..6], [1_000, 2_000, 4_000, 8_000, 6_000, 7_000]);
        assert!((6_076..=6_200).contains(&found), "{found}");
        // Only the bounds are tried twice.
        let mut once = tried.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), tried.len() - 2);
        let [.., failed, answered] = tried[..] else {
            panic!("{tried:?}");
        };
        assert!(answered == found && failed > found, "{tried:?}");
    }

    /// A server is slower for the trials of these numbers, of all that it gets.
    fn search_with_slow_time(slow: std::ops::Range<usize>) -> (u32, usize) {
        let mut progress = Progress::new(1_000, 1_000_000, 0.02);
        let mut count = 0;
        while let Some(rate) = progress.next() {
            let limit = if slow.contains(&count) {
                40_000
            } else {
                100_000
            };
            count += 1;
            progress.note(rate, rate <= limit);
        }
        (progress.answered(), count)
    }

    #[test]
    fn slow_time_does_not_bound_the_rate() {
        // Whenever it comes: 64,000 is the seventh rate.
        for first in 0..12 {
            let (found, count) = search_with_slow_time(first..first + 2);
            assert!((98_000..=100_000).contains(&found), "{first}: {found}");
            assert!(count <= 40, "{first}: {count}");
        }
        // A server that stays slow is believed.
        let (found, _) = search_with_slow_time(8..1_000);
        assert!((39_200..=40_000).contains(&found), "{found}");
    }

    #[test]
    fn doubts_have_a_limit() {
        // Each second trial of a rate has another result than the first one.
        let mut progress = Progress::new(1_000, 1_000_000, 0.02);
        let mut tried: Vec<u32> = Vec::new();
        while let Some(rate) = progress.next() {
            let times = tried.iter().filter(|earlier| **earlier == rate).count();
            progress.note(rate, (rate <= 6_200) == (times % 2 == 0));
            tried.push(rate);
            assert!(tried.len() < 100, "{tried:?}");
        }
        assert_eq!(progress.doubts, MAX_DOUBTS);
    }

    #[test]
    fn ends_of_the_range_are_found() {
        assert_eq!(
            search(u32::MAX, 1_000, 5_000),
            (5_000, vec![1_000, 2_000, 4_000, 5_000])
        );
        assert_eq!(search(u32::MAX, 9_000, 5_000), (5_000, vec![5_000]));
        assert_eq!(search(0, 4, 100), (0, vec![4, 2, 1, 1]));
        assert_eq!(search(u32::MAX, 3_000_000_000, u32::MAX).0, u32::MAX);
    }

    #[test]
    fn limits_are_told_apart() {
        let limit = |change: fn(&mut Report)| {
            let mut failed = report(1000, 900);
            change(&mut failed);
            assert!(!TOLERANCE.holds(&failed));
            TOLERANCE.limit(&failed)
        };
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
        assert_eq!(
            limit(|report: &mut Report| {
                report.counters.insert("rx_missed_errors".to_owned(), 50);
            }),
            Limit::Interface
        );
        assert_eq!(
            limit(|report: &mut Report| {
                report.lost = 200;
                report.pauses = Some(pauses(0.4, 200));
            }),
            Limit::Pauses
        );
        // Not a pause: a server that is gone.
        assert_eq!(
            limit(|report: &mut Report| {
                report.lost = 900;
                report.pauses = Some(pauses(1.8, 900));
            }),
            Limit::Server
        );
    }

    fn pauses(seconds: f64, lost: u64) -> Pauses {
        Pauses {
            count: 1,
            seconds,
            longest: seconds * 1e3,
            lost,
        }
    }

    /// A tenth of the queries may be lost in pauses.
    #[test]
    fn losses_of_pauses_count_beyond_their_bound() {
        let holds = |lost: u64, in_pauses| {
            let mut trial = report(100_000, 100_000 - lost);
            trial.pauses = Some(pauses(0.1, in_pauses));
            TOLERANCE.holds(&trial)
        };
        assert!(holds(100, 0));
        assert!(!holds(101, 0));
        assert!(holds(5_100, 5_000));
        assert!(!holds(5_101, 5_000));
        assert!(holds(10_100, 10_000));
        assert!(!holds(10_101, 10_001));
        assert!(!holds(95_000, 95_000));
        let strict = Tolerance {
            max_pauses: 0.0,
            ..TOLERANCE
        };
        let mut trial = report(100_000, 95_000);
        trial.pauses = Some(pauses(0.1, 5_000));
        assert!(TOLERANCE.holds(&trial) && !strict.holds(&trial));
        // A generator without its CPU is treated alike.
        let mut trial = report(90_000, 90_000);
        (trial.skipped, trial.stalled) = (10_000, 10_000);
        assert!(TOLERANCE.holds(&trial) && !strict.holds(&trial));
        // One in a hundred may be skipped for any reason.
        trial.stalled = 9_000;
        assert!(TOLERANCE.holds(&trial));
        trial.stalled = 8_999;
        assert!(!TOLERANCE.holds(&trial));
        (trial.skipped, trial.stalled) = (11_000, 11_000);
        assert!(!TOLERANCE.holds(&trial));
    }

    #[test]
    fn failed_rates_are_tried_again() {
        for (trials, holds) in [
            (vec![true], true),
            (vec![false, false], false),
            (vec![false, true, true], true),
            (vec![false, true, false], false),
        ] {
            let mut votes = Votes::default();
            let mut decided = Vec::new();
            for &trial in &trials {
                decided.push(votes.add(trial));
            }
            assert_eq!(decided.pop(), Some(Some(holds)), "{trials:?}");
            assert!(decided.iter().all(Option::is_none), "{trials:?}");
        }
    }

    #[test]
    fn result_is_that_of_the_last_rates() {
        let trial = |rate, received: u64, in_pauses| {
            let mut trial = report(100_000, received);
            trial.rate = Some(rate);
            trial.pauses = Some(pauses(0.1, in_pauses));
            trial
        };
        let trials = [
            trial(1000, 100_000, 0),
            trial(2000, 99_000, 1_000),
            trial(4000, 50_000, 0),
            trial(4000, 99_950, 0),
            trial(4000, 60_000, 0),
            trial(2040, 98_000, 500),
        ];
        let mut progress = Progress::new(1000, 9000, 0.02);
        progress.note(2000, true);
        progress.note(2040, false);
        let mut loads = Loads {
            trials: trials.into(),
            saturated: Vec::new(),
        };
        for received in [2_000, 9_000, 1_000] {
            loads.saturated.push(report(10_000, received));
        }
        let found = Found::of(&progress, &loads, TOLERANCE);
        let expected = Found {
            kind: "found",
            rate: 2000,
            received_per_second: 49_500.0,
            pauses: Some(pauses(0.1, 1_000)),
            // A rate that failed twice, and held once without a pause.
            rate_with_pauses: 4000,
            // In two seconds.
            saturated: Some(1_000.0),
            limit: Limit::Server,
        };
        assert_eq!(found, expected);
        progress.failed.clear();
        loads.saturated.clear();
        let allowed = Found::of(&progress, &loads, TOLERANCE);
        assert_eq!((allowed.limit, allowed.saturated), (Limit::Allowed, None));
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
            let mut progress = Progress::new(1_000, 10_000, precision);
            // The bounds are not tried again.
            progress.doubts = MAX_DOUBTS;
            progress.answered.extend((answered > 0).then_some(answered));
            progress.failed.extend(failed);
            assert_eq!(progress.next(), next, "{answered} {failed:?}");
        }
    }

    #[test]
    fn limits_begin_behind_their_bounds() {
        let failed = |skipped, waited, dropped: [u64; 2]| {
            let mut failed = report(1000, 900);
            failed.lost = 600;
            failed.skipped = skipped;
            failed.cpu_waited = waited;
            failed.dropped = Drops {
                received: dropped[0],
                sent: dropped[1],
            };
            let half = Tolerance {
                max_loss: 0.5,
                max_pauses: 0.0,
            };
            half.limit(&failed)
        };
        // Half of 2,000 queries may be lost.
        assert_eq!(failed(1000, 0.0, [0, 0]), Limit::Server);
        assert_eq!(failed(1001, 0.0, [0, 0]), Limit::Generator);
        assert_eq!(failed(1001, MAX_WAITED, [0, 0]), Limit::Generator);
        assert_eq!(failed(1001, 0.011, [0, 0]), Limit::OwnCpu);
        // Of 600 lost queries half have to be dropped.
        assert_eq!(failed(0, 0.5, [149, 150]), Limit::Server);
        assert_eq!(failed(0, 0.5, [150, 150]), Limit::Interface);
        assert_eq!(failed(0, 0.5, [300, 0]), Limit::Interface);
        let shown = [
            (Limit::Allowed, "--to"),
            (Limit::Generator, "give it more CPUs"),
            (Limit::OwnCpu, "choose another one"),
            (Limit::Interface, "drops packets"),
            (Limit::Pauses, "--max-pauses"),
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

    #[test]
    fn half_silent_loss_is_no_pause() {
        for (lost, expected) in [(499, Limit::Pauses), (500, Limit::Server)] {
            let mut failed = report(1000, 1000 - lost);
            failed.pauses = Some(pauses(0.9, lost));
            assert_eq!(TOLERANCE.limit(&failed), expected, "{lost}");
        }
    }

    #[test]
    fn rate_with_pauses_counts_every_loss() {
        let mut loads = Loads::default();
        for (rate, received, in_pauses) in [(1000, 100_000, 0), (2000, 99_000, 1_000)] {
            let mut trial = report(100_000, received);
            trial.rate = Some(rate);
            trial.pauses = Some(pauses(0.1, in_pauses));
            loads.trials.push(trial);
        }
        let mut progress = Progress::new(1000, 2000, 0.02);
        progress.note(1000, true);
        progress.note(2000, true);
        let found = Found::of(&progress, &loads, TOLERANCE);
        assert_eq!((found.rate, found.rate_with_pauses), (2000, 1000));
        assert_eq!(found.limit, Limit::Allowed);
    }

    #[test]
    fn median_is_a_measured_load() {
        for (received, expected) in [
            (vec![], None),
            (vec![9], Some(4.5)),
            (vec![2, 8], Some(4.0)),
            (vec![8, 2, 6, 4], Some(3.0)),
            (vec![8, 2, 6, 4, 0], Some(2.0)),
        ] {
            let loads: Vec<Report> = received.iter().map(|&count| report(9, count)).collect();
            assert_eq!(median(&loads), expected, "{received:?}");
        }
    }

    fn options(arguments: &[&str]) -> Search {
        #[derive(clap::Parser)]
        struct Only {
            #[command(flatten)]
            search: Search,
        }
        let usual = ["search", "--server", "10.0.0.1", "--interface", "lo"];
        let all = usual
            .iter()
            .chain(&["--queries", "queries"])
            .chain(arguments);
        <Only as clap::Parser>::parse_from(all).search
    }

    #[test]
    fn result_is_told_in_sentences() {
        let options = options(&["--seconds", "7", "--max-loss", "0.5"]);
        assert_eq!(options.length(), Duration::from_secs(7));
        let mut found = Found {
            kind: "found",
            rate: 2000,
            received_per_second: 1_999.4,
            pauses: Some(Pauses::default()),
            rate_with_pauses: 1000,
            saturated: None,
            limit: Limit::Server,
        };
        let result =
            "2000/s with at most 0.5 % lost, for 7 s; the limit is the server, or the way to it\n";
        assert_eq!(options.summary(&found), result);
        found.pauses = Some(pauses(0.02, 30));
        found.saturated = Some(2_500.6);
        assert_eq!(
            options.summary(&found),
            format!(
                "{result}beside pauses (1 of up to 20.0 ms), which lost 30 queries; 1999/s were answered, and the highest \
                 rate tried at which every loss counts is 1000/s\nat full speed, between the trials, 2501/s are \
                 answered\n"
            )
        );
    }

    /// A generator without threads sends nothing, so that no rate holds.
    #[test]
    fn full_speed_loads_separate_failures() {
        for (to, saturated) in [(None, 3), (Some(100), 0)] {
            alone(&[0], |generator| {
                let mut options = options(&[]);
                (options.to, options.seconds) = (to, 0);
                let prepared = Prepared {
                    interface: Interface::open("lo").unwrap(),
                    queries: Vec::new(),
                    parts: vec![generator.whole()],
                    generator,
                };
                let mut course = Course {
                    options: &options,
                    prepared: &prepared,
                    tolerance: TOLERANCE,
                    output: Output::new(true, None).unwrap(),
                    loads: Loads::default(),
                };
                let mut progress = Progress::new(4, 100, 0.02);
                course.measure(&mut progress).unwrap();
                // Each of them twice: one trial decides nothing.
                let trials: Vec<_> = course.loads.trials.iter().map(|trial| trial.rate).collect();
                assert_eq!(trials, [4, 4, 2, 2, 1, 1, 1, 1].map(Some));
                assert_eq!(course.loads.saturated.len(), saturated);
                for load in &course.loads.saturated {
                    assert_eq!((load.kind, load.rate), (Kind::Saturated, None));
                }
            });
        }
    }
}
