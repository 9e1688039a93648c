//! Schedules the checks of instances. Does no I/O; the caller passes in the time.
//!
//! Every instance has a phase within the interval. Phases are chosen so that any number of
//! instances is spread evenly. The first check of an instance does not wait for its phase.
//!
//! Two lanes keep silent instances from delaying the others:
//!
//! * the **fast lane** runs first checks and checks of responsive instances; a check that exceeds
//!   the caller's patience must leave it;
//! * the **slow lane** runs the checks that left the fast lane, and all checks of instances that
//!   were silent last time. A quarter of it is reserved for instances that answered last time and
//!   are slow now.
//!
//! Thousands of unreachable instances thus fill only their part of the slow lane, and never delay
//! an instance that answers.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    net::IpAddr,
    time::{Duration, Instant},
};

/// The golden ratio's fraction in units of 2⁻³²: its multiples modulo one are evenly distributed
/// for any count (Weyl sequence).
const GOLDEN: u32 = 0x9e37_79b9;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lanes {
    /// Maximum number of checks in the fast lane.
    pub(super) fast: usize,
    /// Maximum number of checks in the slow lane.
    pub(super) slow: usize,
    /// Minimum time between the starts of two checks in the slow lane: checks that start together
    /// would end together, and start together again.
    pub(super) pace: Duration,
}

/// Lane in which a check runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// A check must leave it when the patience ends.
    Fast,
    /// A check may use its whole time limit.
    Slow,
}

/// Result of a check, as far as it affects the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// The instance responded in some way, including a refused connection.
    Answered,
    /// The time limit passed without a response.
    Silent,
    /// The check had to leave the fast lane while the slow one was full: nothing is known.
    CutOff,
}

/// Identifies a check from its start to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ticket(u64);

#[derive(Debug)]
pub(super) struct Schedule {
    /// Time between two checks of one instance.
    interval: Duration,
    epoch: Instant,
    /// Limits of running checks.
    lanes: Lanes,
    /// Phase of the next instance, in 2⁻³² of the interval.
    next_phase: u32,
    next_ticket: u64,
    targets: HashMap<IpAddr, Target>,
    /// Instances never checked for which a query waits. May contain instances that have since left
    /// the schedule or this queue; these are skipped.
    urgent: VecDeque<IpAddr>,
    /// Other instances never checked, with the same caveat.
    first: VecDeque<IpAddr>,
    /// Next checks of responsive instances.
    due: BTreeSet<(Instant, IpAddr)>,
    /// Next checks of silent instances.
    silent: BTreeSet<(Instant, IpAddr)>,
    running: HashMap<Ticket, (IpAddr, Lane)>,
    /// Number of checks in the slow lane.
    running_slow: usize,
    /// Earliest start of the next check in the slow lane.
    next_slow: Instant,
    /// Whether the next first check is taken from the new end of its queue.
    newest_next: bool,
}

#[derive(Clone, Copy, Debug)]
struct Target {
    /// Its phase, in 2⁻³² of the interval.
    phase: u32,
    /// The queue that holds the instance, or its running check.
    waits: Waits,
    /// Whether the last check got an answer.
    answered: bool,
}

/// The state of an instance in the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waits {
    Urgent,
    First,
    Due(Instant),
    Silent(Instant),
    /// The instance's check is running.
    Running(Ticket),
}

impl Schedule {
    /// Creates an empty schedule. `phase` shifts all phases (in 2⁻³² of the interval): a random one
    /// keeps machines from checking in step.
    pub(super) fn new(interval: Duration, lanes: Lanes, epoch: Instant, phase: u32) -> Self {
        Self {
            interval,
            epoch,
            lanes,
            next_phase: phase,
            next_ticket: 0,
            targets: HashMap::new(),
            urgent: VecDeque::new(),
            first: VecDeque::new(),
            due: BTreeSet::new(),
            silent: BTreeSet::new(),
            running: HashMap::new(),
            running_slow: 0,
            next_slow: epoch,
            newest_next: false,
        }
    }

    /// Adds an instance. If `urgent`, a query waits for it, and its pending first check becomes urgent as well.
    pub(super) fn add(&mut self, ip: IpAddr, urgent: bool) {
        let phase = self.next_phase;
        let waits = if urgent { Waits::Urgent } else { Waits::First };
        match self.targets.get_mut(&ip) {
            None => {
                self.targets.insert(
                    ip,
                    Target {
                        phase,
                        waits,
                        answered: false,
                    },
                );
                self.next_phase = self.next_phase.wrapping_add(GOLDEN);
            }
            Some(target) if urgent && target.waits == Waits::First => target.waits = Waits::Urgent,
            Some(_) => return,
        }
        if urgent {
            &mut self.urgent
        } else {
            &mut self.first
        }
        .push_back(ip);
    }

    /// Removes the instance. Returns the ticket of its running check, which the caller must still end.
    pub(super) fn remove(&mut self, ip: IpAddr) -> Option<Ticket> {
        match self.targets.remove(&ip)?.waits {
            Waits::Due(at) => _ = self.due.remove(&(at, ip)),
            Waits::Silent(at) => _ = self.silent.remove(&(at, ip)),
            Waits::Running(ticket) => return Some(ticket),
            // Skipped at its turn.
            Waits::Urgent | Waits::First => {}
        }
        None
    }

    pub(super) fn holds(&self, ip: IpAddr) -> bool {
        self.targets.contains_key(&ip)
    }

    /// Starts the next check that is due and has a slot.
    pub(super) fn start(&mut self, now: Instant) -> Option<(Ticket, IpAddr, Lane)> {
        let (ip, lane) = if let Some(ip) = self.next_fast(now) {
            (ip, Lane::Fast)
        } else {
            let &(at, ip) = self.silent.first().filter(|_| self.has_slow_room(false))?;
            if at.max(self.next_slow) > now {
                return None;
            }
            self.silent.remove(&(at, ip));
            self.running_slow += 1;
            self.next_slow = now + self.lanes.pace;
            (ip, Lane::Slow)
        };
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        self.running.insert(ticket, (ip, lane));
        if let Some(target) = self.targets.get_mut(&ip) {
            target.waits = Waits::Running(ticket);
        }
        Some((ticket, ip, lane))
    }

    /// Takes the next instance for the fast lane from its queue: first checks that a query waits
    /// for, then due checks, then other first checks.
    fn next_fast(&mut self, now: Instant) -> Option<IpAddr> {
        if self.running.len() - self.running_slow >= self.lanes.fast {
            return None;
        }
        self.newest_next = !self.newest_next;
        if let Some(ip) = Self::pop(
            &mut self.urgent,
            &self.targets,
            Waits::Urgent,
            !self.newest_next,
        ) {
            return Some(ip);
        }
        // Before other first checks: a large new group must not delay the checks of known
        // instances.
        if let Some(&(at, ip)) = self.due.first().filter(|(at, _)| *at <= now) {
            self.due.remove(&(at, ip));
            return Some(ip);
        }
        Self::pop(
            &mut self.first,
            &self.targets,
            Waits::First,
            !self.newest_next,
        )
    }

    /// Takes the first (or, with `newest`, the last) instance still waiting in `queue`. The caller
    /// alternates, so that a small group waits neither for a big group added before it nor for one
    /// added after it.
    fn pop(
        queue: &mut VecDeque<IpAddr>,
        targets: &HashMap<IpAddr, Target>,
        waits: Waits,
        newest: bool,
    ) -> Option<IpAddr> {
        while let Some(ip) = if newest {
            queue.pop_back()
        } else {
            queue.pop_front()
        } {
            if targets.get(&ip).is_some_and(|target| target.waits == waits) {
                return Some(ip);
            }
        }
        None
    }

    /// Moves a check that exceeded its patience to the slow lane; `false` if that is full, in which
    /// case the check must be ended as cut off.
    pub(super) fn slow_down(&mut self, ticket: Ticket) -> bool {
        let Some((ip, _)) = self.running.get(&ticket) else {
            return false;
        };
        let room = self.has_slow_room(self.targets.get(ip).is_some_and(|target| target.answered));
        match self.running.get_mut(&ticket) {
            Some((_, lane @ Lane::Fast)) if room => {
                *lane = Lane::Slow;
                self.running_slow += 1;
                true
            }
            Some((_, Lane::Slow)) => true,
            _ => false,
        }
    }

    /// Ends a check and schedules the next one.
    pub(super) fn end(&mut self, ticket: Ticket, ending: Ending, now: Instant) {
        let Some((ip, lane)) = self.running.remove(&ticket) else {
            return;
        };
        self.running_slow -= usize::from(lane == Lane::Slow);
        let Some(target) = self.targets.get_mut(&ip) else {
            return;
        };
        // The instance was removed and added again while the check ran, so the new entry waits for
        // its own check.
        if target.waits != Waits::Running(ticket) {
            return;
        }
        let at = match ending {
            // Some time after the previous check, so that the second check does not immediately
            // follow the first.
            Ending::Answered | Ending::Silent => next_moment(
                self.epoch,
                self.interval,
                target.phase,
                now + self.interval / 4,
            ),
            // Again at once, but in the slow lane, where it has its whole time.
            Ending::CutOff => now,
        };
        target.answered = ending == Ending::Answered;
        if target.answered {
            target.waits = Waits::Due(at);
            self.due.insert((at, ip));
        } else {
            target.waits = Waits::Silent(at);
            self.silent.insert((at, ip));
        }
    }

    /// Returns the time of the next call of [`Self::start`], unless a check ends earlier.
    pub(super) fn next_wake(&self) -> Option<Instant> {
        // First checks need no time here: `start` has taken all for which there was a slot.
        let has_fast_room = self.running.len() - self.running_slow < self.lanes.fast;
        let mut wakes = Vec::new();
        if has_fast_room && let Some((at, _)) = self.due.first() {
            wakes.push(*at);
        }
        if self.has_slow_room(false)
            && let Some((at, _)) = self.silent.first()
        {
            wakes.push(self.next_slow.max(*at));
        }
        wakes.into_iter().min()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.running.len()
    }

    /// Returns whether the slow lane has a slot for another check; `answered` is whether the last
    /// check of its instance was answered.
    fn has_slow_room(&self, answered: bool) -> bool {
        let kept = if answered { 0 } else { self.lanes.slow / 4 };
        self.running_slow < self.lanes.slow - kept
    }
}

/// Returns the earliest time at or after `earliest` that is at `phase` within an interval.
fn next_moment(epoch: Instant, interval: Duration, phase: u32, earliest: Instant) -> Instant {
    let length = interval.as_nanos().max(1);
    let offset = (length * u128::from(phase)) >> 32;
    let passed = earliest.saturating_duration_since(epoch).as_nanos();
    let rounds = (passed + length - 1).saturating_sub(offset) / length;
    let nanos = u64::try_from(rounds * length + offset).unwrap_or(u64::MAX);
    epoch + Duration::from_nanos(nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(n: u32) -> IpAddr {
        IpAddr::from(n.to_be_bytes())
    }

    /// Returns a schedule with an interval of ten seconds, and its start.
    fn schedule(fast: usize, slow: usize) -> (Schedule, Instant) {
        let epoch = Instant::now();
        (
            Schedule::new(
                Duration::from_secs(10),
                Lanes {
                    fast,
                    slow,
                    pace: Duration::ZERO,
                },
                epoch,
                12345,
            ),
            epoch,
        )
    }

    #[test]
    fn checks_are_spread_evenly() {
        for count in [10_u32, 100, 1000, 3000] {
            let (mut schedule, epoch) = schedule(usize::MAX, 1);
            for n in 0..count {
                schedule.add(ip(n), false);
            }
            // One in three is removed: the rest must still be spread evenly.
            for n in (0..count).step_by(3) {
                schedule.remove(ip(n));
            }
            let left = count - count.div_ceil(3);
            let mut now = epoch;
            let mut starts = Vec::new();
            while now < epoch + Duration::from_secs(40) {
                while let Some((ticket, _, _)) = schedule.start(now) {
                    starts.push(now);
                    schedule.end(ticket, Ending::Answered, now);
                }
                now = schedule.next_wake().unwrap();
            }
            // From the second interval on, after the first checks.
            starts.retain(|at| *at >= epoch + Duration::from_secs(20));
            let window = Duration::from_millis(500);
            let most = (0..starts.len())
                .map(|i| {
                    starts[i..]
                        .iter()
                        .take_while(|at| **at < starts[i] + window)
                        .count()
                })
                .max()
                .unwrap();
            assert_eq!(starts.len() as u32, left * 2);
            assert!(
                most as u32 <= (left / 10).max(2),
                "{most} of {left} within a twentieth"
            );
        }
    }

    #[test]
    fn first_check_is_immediate() {
        let (mut schedule, epoch) = schedule(1, 1);
        schedule.add(ip(1), false);
        schedule.add(ip(1), false);
        let (ticket, first, lane) = schedule.start(epoch).unwrap();
        assert_eq!((first, lane), (ip(1), Lane::Fast));
        assert!(
            schedule.start(epoch + Duration::from_secs(99)).is_none(),
            "one check at a time"
        );
        schedule.end(ticket, Ending::Answered, epoch);
        let mut last = epoch;
        for round in 0..5 {
            let next = schedule.next_wake().unwrap();
            let gap = next - last;
            if round == 0 {
                assert!(
                    gap >= Duration::from_millis(2500) && gap <= Duration::from_millis(12500),
                    "{gap:?}"
                );
            } else {
                assert_eq!(gap, Duration::from_secs(10));
            }
            assert!(schedule.start(next - Duration::from_nanos(1)).is_none());
            let (ticket, _, _) = schedule.start(next).unwrap();
            schedule.end(ticket, Ending::Answered, next + Duration::from_secs(1));
            last = next;
        }
    }

    #[test]
    fn silent_instances_fill_slow_lane() {
        let (mut schedule, mut now) = schedule(4, 8);
        let patience = Duration::from_millis(200);
        for n in 0..1000 {
            schedule.add(ip(n), false);
        }
        schedule.add(ip(5000), false);
        // All are silent except the last one in the queue.
        let mut waited = Duration::ZERO;
        'rounds: loop {
            let mut started = Vec::new();
            while let Some((ticket, ip, lane)) = schedule.start(now) {
                started.push((ticket, ip, lane));
            }
            for (ticket, at, lane) in started {
                if at == ip(5000) {
                    break 'rounds;
                }
                if lane == Lane::Fast && !schedule.slow_down(ticket) {
                    schedule.end(ticket, Ending::CutOff, now);
                }
            }
            now += patience;
            waited += patience;
        }
        // The queue is taken from both ends alternately, so the instance does not even wait for the
        // others' patience.
        assert!(waited <= patience, "{waited:?}");
        assert!(schedule.running_slow <= 6);
    }

    #[test]
    fn urgent_instances_are_checked_first() {
        let (mut schedule, now) = schedule(1, 1);
        for n in 0..10 {
            schedule.add(ip(n), false);
        }
        schedule.add(ip(7), true);
        schedule.add(ip(20), true);
        let mut order = Vec::new();
        while let Some((ticket, ip, _)) = schedule.start(now) {
            order.push(ip);
            schedule.end(ticket, Ending::Answered, now);
        }
        assert_eq!(order[..4], [ip(7), ip(20), ip(0), ip(9)]);
        assert_eq!(order.len(), 11);
    }

    #[test]
    fn slow_lane_reserves_room() {
        let (mut schedule, now) = schedule(100, 8);
        schedule.add(ip(100), false);
        let (ticket, _, _) = schedule.start(now).unwrap();
        schedule.end(ticket, Ending::Answered, now);
        (0..20).for_each(|n| schedule.add(ip(n), false));
        let tickets: Vec<_> = std::iter::from_fn(|| schedule.start(now)).collect();
        let slow = tickets
            .iter()
            .filter(|(ticket, _, _)| schedule.slow_down(*ticket))
            .count();
        assert_eq!((tickets.len(), slow), (20, 6));
        let next = schedule.next_wake().unwrap();
        let (ticket, again, _) = schedule.start(next).unwrap();
        assert_eq!(again, ip(100));
        assert!(schedule.slow_down(ticket));
    }

    #[test]
    fn recovered_instance_returns_to_fast_lane() {
        let (mut schedule, now) = schedule(1, 1);
        schedule.add(ip(1), false);
        let (ticket, _, _) = schedule.start(now).unwrap();
        assert!(schedule.slow_down(ticket));
        schedule.end(ticket, Ending::Silent, now);
        let next = schedule.next_wake().unwrap();
        let (ticket, _, lane) = schedule.start(next).unwrap();
        assert_eq!(lane, Lane::Slow);
        schedule.end(ticket, Ending::Answered, next);
        let next = schedule.next_wake().unwrap();
        assert_eq!(schedule.start(next).unwrap().2, Lane::Fast);
    }

    #[test]
    fn slow_lane_entries_are_spaced() {
        let epoch = Instant::now();
        let pace = Duration::from_millis(10);
        let lanes = Lanes {
            fast: 100,
            slow: 100,
            pace,
        };
        let mut schedule = Schedule::new(Duration::from_secs(10), lanes, epoch, 0);
        (0..50).for_each(|n| schedule.add(ip(n), false));
        while let Some((ticket, _, lane)) = schedule.start(epoch) {
            assert_eq!(lane, Lane::Fast);
            schedule.end(ticket, Ending::CutOff, epoch);
            if schedule.silent.len() == 50 {
                break;
            }
        }
        let mut now = epoch;
        for round in 0..50 {
            assert_eq!(
                schedule.start(now).map(|started| started.2),
                Some(Lane::Slow),
                "{round}"
            );
            assert!(schedule.start(now).is_none());
            if round < 49 {
                assert_eq!(schedule.next_wake(), Some(now + pace));
            }
            now += pace;
        }
    }

    #[test]
    fn running_instance_can_be_readded() {
        let (mut schedule, now) = schedule(2, 1);
        schedule.add(ip(1), false);
        let (old, _, _) = schedule.start(now).unwrap();
        assert_eq!(schedule.remove(ip(1)), Some(old));
        schedule.add(ip(1), false);
        let (new, _, _) = schedule.start(now).unwrap();
        schedule.end(old, Ending::Silent, now);
        assert_eq!(schedule.in_flight(), 1);
        schedule.end(new, Ending::Answered, now);
        assert!(schedule.next_wake().is_some() && schedule.silent.is_empty());
        assert!(
            schedule.remove(ip(1)).is_none()
                && !schedule.holds(ip(1))
                && schedule.next_wake().is_none()
        );
    }

    #[test]
    fn moments_lie_in_phase() {
        let epoch = Instant::now();
        let second = Duration::from_secs(1);
        let quarter = 1 << 30;
        for (interval, phase, earliest, expected) in [
            (10, 0, 0, 0),
            (10, 0, 10_000, 10_000),
            (10, 0, 10_001, 20_000),
            (10, 0, 9_999, 10_000),
            (10, quarter, 0, 2_500),
            (10, quarter, 2_500, 2_500),
            (10, quarter, 2_501, 12_500),
            (10, quarter, 31_000, 32_500),
            (8, 3 * quarter, 7_000, 14_000 - 8_000 + 8_000),
        ] {
            let found = next_moment(
                epoch,
                second * interval,
                phase,
                epoch + Duration::from_millis(earliest),
            );
            assert_eq!(
                found - epoch,
                Duration::from_millis(expected),
                "{interval} {phase} {earliest}"
            );
        }
        // An interval of nothing is a nanosecond.
        assert_eq!(
            next_moment(epoch, Duration::ZERO, 7, epoch + second),
            epoch + second
        );
    }

    #[test]
    fn full_lane_is_not_woken() {
        let (mut schedule, now) = schedule(1, 4);
        for n in 1..=3 {
            schedule.add(ip(n), false);
            let (ticket, _, _) = schedule.start(now).unwrap();
            schedule.end(ticket, Ending::Answered, now);
        }
        let due = schedule.next_wake().unwrap();
        let later = now + Duration::from_secs(20);
        let (first, _, _) = schedule.start(later).unwrap();
        assert_eq!((schedule.next_wake(), schedule.start(later)), (None, None));
        // The slot is free as soon as the check has left the lane, and only once.
        assert!(schedule.slow_down(first) && schedule.slow_down(first));
        assert!(schedule.next_wake().is_some_and(|at| at >= due));
        let (second, _, lane) = schedule.start(later).unwrap();
        assert_eq!((lane, schedule.in_flight()), (Lane::Fast, 2));
        assert_eq!(schedule.start(later), None);
        schedule.end(second, Ending::CutOff, later);
        schedule.end(first, Ending::Silent, later);
        assert!(!schedule.slow_down(first), "it has ended");
        assert_eq!(schedule.in_flight(), 0);
        // Cut off: its next check is due at once, in the slow lane.
        assert!(schedule.silent.first().is_some_and(|(at, _)| *at == later));
    }

    #[test]
    fn removed_silent_instance_is_not_checked() {
        let (mut schedule, now) = schedule(1, 1);
        schedule.add(ip(1), true);
        let (ticket, _, _) = schedule.start(now).unwrap();
        schedule.end(ticket, Ending::Silent, now);
        assert!(schedule.holds(ip(1)) && schedule.next_wake().is_some());
        assert_eq!(schedule.remove(ip(1)), None);
        assert_eq!((schedule.next_wake(), schedule.remove(ip(1))), (None, None));
    }

    /// Returns the state of an instance in the schedule.
    fn waits(schedule: &Schedule, n: u32) -> Waits {
        schedule.targets[&ip(n)].waits
    }

    #[test]
    fn only_first_checks_become_urgent() {
        let (mut schedule, now) = schedule(2, 4);
        schedule.add(ip(1), false);
        assert_eq!(waits(&schedule, 1), Waits::First);
        schedule.add(ip(1), false);
        assert_eq!((schedule.first.len(), schedule.urgent.len()), (1, 0));
        schedule.add(ip(1), true);
        assert_eq!(waits(&schedule, 1), Waits::Urgent);
        schedule.add(ip(1), true);
        schedule.add(ip(1), false);
        assert_eq!((schedule.first.len(), schedule.urgent.len()), (1, 1));
        let phase = schedule.next_phase;
        let (ticket, ..) = schedule.start(now).unwrap();
        for urgent in [true, false] {
            schedule.add(ip(1), urgent);
            assert_eq!(waits(&schedule, 1), Waits::Running(ticket));
        }
        schedule.end(ticket, Ending::Answered, now);
        let due = waits(&schedule, 1);
        schedule.add(ip(1), true);
        assert_eq!((waits(&schedule, 1), schedule.next_phase), (due, phase));
        assert_eq!(schedule.urgent.len(), 0);
        // The entry that is left in the queue is no check.
        assert_eq!(schedule.start(now), None);
        schedule.add(ip(2), false);
        assert_eq!(schedule.next_phase, phase.wrapping_add(GOLDEN));
        assert_eq!(schedule.targets[&ip(2)].phase, phase);
    }

    #[test]
    fn checks_follow_by_quarter_interval() {
        let epoch = Instant::now();
        let ms = Duration::from_millis;
        let lanes = Lanes {
            fast: 4,
            slow: 4,
            pace: Duration::ZERO,
        };
        // The phase is 2 s of 8.
        for (ended, ending, expected) in [
            (0, Ending::Answered, 2_000),
            (1, Ending::Answered, 10_000),
            (0, Ending::Silent, 2_000),
            (1, Ending::Silent, 10_000),
            (8_000, Ending::Answered, 10_000),
            (8_001, Ending::Answered, 18_000),
            (5, Ending::CutOff, 5),
        ] {
            let mut schedule = Schedule::new(ms(8_000), lanes, epoch, 1 << 30);
            schedule.add(ip(1), false);
            let (ticket, ..) = schedule.start(epoch).unwrap();
            schedule.end(ticket, ending, epoch + ms(ended));
            let at = epoch + ms(expected);
            let expected = match ending {
                Ending::Answered => Waits::Due(at),
                Ending::Silent | Ending::CutOff => Waits::Silent(at),
            };
            assert_eq!(waits(&schedule, 1), expected, "{ended} {ending:?}");
            let answered = schedule.targets[&ip(1)].answered;
            assert_eq!(answered, ending == Ending::Answered);
            assert_eq!(schedule.next_wake(), Some(at));
        }
    }

    #[test]
    fn lanes_are_counted_apart() {
        let (mut schedule, now) = schedule(2, 4);
        (0..9).for_each(|n| schedule.add(ip(n), false));
        let started: Vec<Ticket> = std::iter::from_fn(|| schedule.start(now))
            .map(|(ticket, ..)| ticket)
            .collect();
        assert_eq!((started.len(), schedule.in_flight()), (2, 2));
        assert!(schedule.slow_down(started[0]) && schedule.running_slow == 1);
        let (third, _, lane) = schedule.start(now).unwrap();
        assert_eq!(
            (lane, schedule.in_flight(), schedule.running_slow),
            (Lane::Fast, 3, 1)
        );
        assert_eq!(schedule.start(now), None, "two in the fast lane");
        assert!(schedule.slow_down(started[1]) && schedule.slow_down(third));
        // A quarter is kept for instances that answered.
        let (fourth, ..) = schedule.start(now).unwrap();
        assert!(!schedule.slow_down(fourth) && schedule.running_slow == 3);
        schedule.end(fourth, Ending::CutOff, now);
        assert_eq!((schedule.in_flight(), schedule.running_slow), (3, 3));
        // Nor is a slow check started, until another has ended.
        while let Some((ticket, _, lane)) = schedule.start(now) {
            assert_eq!(lane, Lane::Fast);
            schedule.end(ticket, Ending::Answered, now);
        }
        assert_eq!(schedule.silent.len(), 1);
        schedule.end(third, Ending::Answered, now);
        assert_eq!(schedule.next_wake(), Some(now));
        let (slow, _, lane) = schedule.start(now).unwrap();
        assert_eq!((lane, schedule.running_slow), (Lane::Slow, 3));
        schedule.end(slow, Ending::Answered, now);
        assert_eq!((schedule.in_flight(), schedule.running_slow), (2, 2));
        let tickets = [started[0], started[1], third, fourth, slow];
        let distinct: std::collections::HashSet<Ticket> = tickets.into_iter().collect();
        assert_eq!(distinct.len(), tickets.len());
    }

    #[test]
    fn due_checks_come_before_new_ones() {
        let (mut schedule, now) = schedule(1, 1);
        schedule.add(ip(1), false);
        let (ticket, ..) = schedule.start(now).unwrap();
        schedule.end(ticket, Ending::Answered, now);
        let due = schedule.next_wake().unwrap();
        schedule.add(ip(2), false);
        schedule.add(ip(3), true);
        let mut order = Vec::new();
        while let Some((ticket, ip, _)) = schedule.start(due) {
            order.push(ip);
            schedule.end(ticket, Ending::Answered, due);
        }
        assert_eq!(order, [3, 1, 2].map(ip));
    }
}
