//! One load: from its first query to its last reply.

use std::{
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use nix::{
    libc,
    sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction},
};

use crate::{
    generator::{Generator, Load},
    interface::Interface,
    orders::Counts,
    report::{Kind, Reading, Report},
};

/// Interval at which the counters are looked at.
const POLL: Duration = Duration::from_millis(10);

/// Time that is waited for replies to the last queries.
const MAX_DRAIN: Duration = Duration::from_secs(1);

/// Time without a reply after which the rest is lost. Between turns it is short, or most of a comparison would be waiting.
const MAX_PAUSE: Duration = Duration::from_millis(250);
const MAX_TURN_PAUSE: Duration = Duration::from_millis(50);

/// Time without a reply after which the load ends: a server that is gone, or that has had enough of us, is left alone.
const MAX_SILENCE: Duration = Duration::from_secs(2);

/// Queries that a silence has at least: a single lost one says nothing.
const MIN_UNANSWERED: u64 = 10;

/// Set by SIGINT and SIGTERM.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// A load to measure.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) kind: Kind,
    /// Queries per second; none for as many as possible.
    pub(crate) rate: Option<u32>,
    /// Queries that are due at the same moment at this rate.
    pub(crate) burst: u32,
    pub(crate) length: Duration,
    /// Part of the sequence.
    pub(crate) part: Range<u64>,
}

/// Why a load ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Its time was over.
    InTime,
    /// SIGINT or SIGTERM.
    Interrupted,
    /// The server stopped answering: queries since the last reply.
    Silent(u64),
}

/// Makes SIGINT and SIGTERM end the load, and the next one the program.
pub(crate) fn end_by_signals() -> Result<()> {
    extern "C" fn note(_signal: libc::c_int) {
        INTERRUPTED.store(true, Ordering::Relaxed);
    }
    let action = SigAction::new(
        SigHandler::Handler(note),
        SaFlags::SA_RESTART | SaFlags::SA_RESETHAND,
        SigSet::empty(),
    );
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        // SAFETY: the handler only stores to an atomic.
        unsafe { sigaction(signal, &action)? };
    }
    Ok(())
}

/// Returns whether SIGINT or SIGTERM was received.
pub(crate) fn is_interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Notices that replies have stopped.
struct Silence {
    /// Counts and time of the last reply, at first those of the start.
    last: Counts,
    since: Instant,
}

impl Silence {
    fn new(counts: Counts) -> Self {
        Self {
            last: counts,
            since: Instant::now(),
        }
    }

    /// Returns the number of queries without a reply once they are too many for too long.
    fn unanswered(&mut self, now: Counts) -> Option<u64> {
        if now.received() > self.last.received() {
            *self = Self::new(now);
            return None;
        }
        let unanswered = now.sent - self.last.sent;
        let is_over = self.since.elapsed() >= MAX_SILENCE && unanswered >= MIN_UNANSWERED;
        is_over.then_some(unanswered)
    }
}

/// Measures one load, and calls `tick` with the figures of each interval.
pub(crate) fn measure(
    generator: &Generator,
    interface: &Interface,
    plan: &Plan,
    interval: Duration,
    tick: &mut dyn FnMut(&Report) -> Result<()>,
) -> Result<(Report, Ended)> {
    let load = match plan.rate {
        None => Load::Saturate,
        Some(rate) => Load::Rate {
            rate,
            burst: plan.burst,
        },
    };
    // Before the order, so that the total has its first query.
    let first = Reading::take(generator, interface)?;
    let begun = Instant::now();
    let before = generator.counts()?;
    let mut silence = Silence::new(before);
    generator.order(load, plan.part.clone())?;
    let mut last = Reading::take(generator, interface)?;
    let mut next = interval;
    let ended = loop {
        if is_interrupted() {
            break Ended::Interrupted;
        }
        generator.ensure_sending()?;
        if let Some(unanswered) = silence.unanswered(generator.counts()?) {
            break Ended::Silent(unanswered);
        }
        let elapsed = begun.elapsed();
        if elapsed >= next.min(plan.length) {
            let now = Reading::take(generator, interface)?;
            tick(&now.since(&last, Kind::Interval, plan.rate)?)?;
            last = now;
            next += interval;
            // Intervals that this process missed, such as while it was stopped, are one.
            if next < elapsed {
                next = elapsed + interval;
            }
        }
        if elapsed >= plan.length {
            break Ended::InTime;
        }
        let until = next.min(plan.length).saturating_sub(begun.elapsed());
        // An interval ends on time, not when the counters are looked at next.
        thread::sleep(POLL.min(until));
    };
    generator.pause()?;
    let end = Reading::take(generator, interface)?;
    let pause = match plan.kind {
        Kind::Turn | Kind::Saturated => MAX_TURN_PAUSE,
        Kind::Interval | Kind::Total | Kind::Trial => MAX_PAUSE,
    };
    // The last replies belong to the load, the wait for them does not: rates are those of the time
    // in which queries were sent.
    drain(generator, before, pause)?;
    let end = end.with_replies_of(Reading::take(generator, interface)?);
    Ok((end.since(&first, plan.kind, plan.rate)?, ended))
}

/// Waits for the last replies of the load since `before`, until none has come for `max_pause`. Returns whether all have
/// come.
fn drain(generator: &Generator, before: Counts, max_pause: Duration) -> Result<bool> {
    let begun = Instant::now();
    let mut last_reply = Instant::now();
    let mut received = 0;
    while begun.elapsed() < MAX_DRAIN && last_reply.elapsed() < max_pause {
        let counts = generator.counts()?.since(&before);
        if counts.received() >= counts.sent {
            return Ok(true);
        }
        if counts.received() > received {
            received = counts.received();
            last_reply = Instant::now();
        }
        thread::sleep(POLL);
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use test_support::own_process;

    use super::*;
    use crate::generator::{alone, count};

    /// Returns whether this is the process in which the test goes on; otherwise runs it there. Signals, and
    /// [`INTERRUPTED`], belong to the whole process.
    fn is_in_own_process(name: &str) -> bool {
        if own_process::is_here() {
            return true;
        }
        own_process::run(&mut own_process::command(module_path!(), name));
        false
    }

    #[test]
    fn silence_is_many_queries_for_long() {
        let counts = |sent, received| {
            let mut counts = Counts {
                sent,
                ..Counts::default()
            };
            counts.rcodes[3] = received;
            counts
        };
        let long_ago = Instant::now() - MAX_SILENCE;
        let silence = |since| Silence {
            last: counts(100, 90),
            since,
        };
        assert_eq!(silence(long_ago).unanswered(counts(110, 90)), Some(10));
        assert_eq!(silence(long_ago).unanswered(counts(109, 90)), None);
        // Not long enough yet.
        let later = Instant::now() + MAX_SILENCE;
        assert_eq!(silence(later).unanswered(counts(900, 90)), None);
        let mut answered = silence(long_ago);
        assert_eq!(answered.unanswered(counts(900, 91)), None);
        assert!(answered.since > long_ago);
        answered.since = long_ago;
        assert_eq!(answered.unanswered(counts(920, 91)), Some(20));
        let begun = Silence::new(counts(1, 1));
        assert!(begun.since > long_ago && begun.last == counts(1, 1));
    }

    #[test]
    fn signals_end_load_then_program() {
        if !is_in_own_process("signals_end_load_then_program") {
            return;
        }
        assert!(!is_interrupted());
        for signal in [Signal::SIGINT, Signal::SIGTERM] {
            end_by_signals().unwrap();
            nix::sys::signal::raise(signal).unwrap();
            assert!(is_interrupted());
            INTERRUPTED.store(false, Ordering::Relaxed);
            let usual = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
            // SAFETY: no handler.
            let left = unsafe { sigaction(signal, &usual) }.unwrap();
            assert!(matches!(left.handler(), SigHandler::SigDfl));
        }
        end_by_signals().unwrap();
        let usual = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
        for signal in [Signal::SIGINT, Signal::SIGTERM] {
            // SAFETY: no handler.
            let ours = unsafe { sigaction(signal, &usual) }.unwrap();
            // System calls go on: an interrupted write of a report would be lost.
            assert!(
                ours.flags()
                    .contains(SaFlags::SA_RESTART | SaFlags::SA_RESETHAND)
            );
        }
    }

    /// A generator without threads sends nothing.
    #[test]
    fn load_keeps_length_and_intervals() {
        if !is_in_own_process("load_keeps_length_and_intervals") {
            return;
        }
        alone(&[0], |generator| {
            let interface = Interface::open("lo").unwrap();
            let plan = Plan {
                kind: Kind::Turn,
                rate: Some(1000),
                burst: 1,
                length: Duration::from_millis(60),
                part: generator.whole(),
            };
            let mut ticks = Vec::new();
            let mut measured = || {
                measure(
                    &generator,
                    &interface,
                    &plan,
                    Duration::from_millis(20),
                    &mut |report| {
                        ticks.push(report.kind);
                        Ok(())
                    },
                )
                .unwrap()
            };
            let (report, ended) = measured();
            assert_eq!(ended, Ended::InTime);
            assert_eq!((report.kind, report.rate), (Kind::Turn, Some(1000)));
            assert!(report.seconds >= 0.06, "{}", report.seconds);
            INTERRUPTED.store(true, Ordering::Relaxed);
            let (_, ended) = measured();
            INTERRUPTED.store(false, Ordering::Relaxed);
            assert_eq!(ended, Ended::Interrupted);
            // A slow machine misses some, and none is of the second load.
            assert!((1..=3).contains(&ticks.len()), "{ticks:?}");
            assert!(ticks.iter().all(|kind| *kind == Kind::Interval));
        });
    }

    #[test]
    fn missed_intervals_are_one() {
        alone(&[0], |generator| {
            let plan = Plan {
                kind: Kind::Turn,
                rate: Some(1000),
                burst: 1,
                length: Duration::from_millis(200),
                part: generator.whole(),
            };
            let interface = Interface::open("lo").unwrap();
            let interval = Duration::from_millis(20);
            let mut ticks = 0;
            let mut tick = |_: &Report| {
                if ticks == 0 {
                    thread::sleep(7 * interval);
                }
                ticks += 1;
                Ok(())
            };
            measure(&generator, &interface, &plan, interval, &mut tick).unwrap();
            // The first one, the missed ones, the last two.
            assert!(ticks <= 4, "{ticks}");
        });
    }

    #[test]
    fn last_replies_are_waited_for() {
        alone(&[0], |mut generator| {
            count(&mut generator, 3, 2);
            let begun = Instant::now();
            let pause = Duration::from_millis(30);
            assert!(!drain(&generator, Counts::default(), pause).unwrap());
            assert!(begun.elapsed() >= pause);
            count(&mut generator, 3, 3);
            let hour = Duration::from_secs(3600);
            assert!(drain(&generator, Counts::default(), hour).unwrap());
        });
    }
}
