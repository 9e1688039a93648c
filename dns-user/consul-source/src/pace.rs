//! How often may be asked, and how long to wait after what went wrong.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until, timeout},
};

/// First pause after an error.
const SHORTEST: Duration = Duration::from_secs(1);
/// Longest pause after errors.
const LONGEST: Duration = Duration::from_secs(60);
/// Rounds after which the pauses of the gate grow no more: 8 s at most, as a single
/// question is no burden.
const MOST_ROUNDS: u32 = 4;
/// Consecutive errors after which a single request at a time tries the agent.
const MOST_FAILURES: u32 = 8;

/// Lets requests go at a steady rate, a tenth of a second's worth at once.
#[derive(Debug)]
pub(crate) struct Rate {
    /// Time from one request to the next.
    interval: Duration,
    /// When the next one is due, if none waits.
    next: Mutex<Option<Instant>>,
}

impl Rate {
    /// Creates a limit in requests per second, at least one.
    pub(crate) fn new(per_second: u32) -> Self {
        Self { interval: Duration::from_secs(1) / per_second.max(1), next: Mutex::new(None) }
    }

    /// Returns when the caller's turn has come.
    pub(crate) async fn turn(&self) {
        let at = {
            let mut next = self.next.lock();
            let now = Instant::now();
            let earliest = now.checked_sub(Duration::from_millis(100)).unwrap_or(now);
            let at = next.map_or(earliest, |next| next.max(earliest));
            *next = Some(at + self.interval);
            at
        };
        sleep_until(at).await;
    }
}

/// Pauses of one question after errors in a row: longer each time, and drawn by lot, so
/// that many questions which failed together do not come back together.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    /// Errors in a row.
    failures: u32,
}

impl Backoff {
    /// All is well again.
    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }

    /// The pause after one more error.
    pub(crate) fn next(&mut self) -> Duration {
        self.failures = self.failures.saturating_add(1);
        drawn(self.failures)
    }
}

/// A pause after so many errors: half to all of a time that doubles each time.
fn drawn(failures: u32) -> Duration {
    let longest = (SHORTEST * 2u32.pow(failures.clamp(1, 7) - 1)).min(LONGEST);
    longest.mul_f64(0.5 + fastrand::f64() / 2.0)
}

/// Whether agents answer at all. While they do not, one question at a time goes to them,
/// with pauses, and all others wait: a returning agent is not flooded.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: Mutex<GateState>,
    /// Rung when that has changed.
    changed: Notify,
}

#[derive(Debug, Default)]
struct GateState {
    /// Errors in a row, of all questions.
    failures: u32,
    /// Nobody passes before this.
    until: Option<Instant>,
    /// Whether one question is on its way to try.
    trying: bool,
}

/// Permission to ask; says how it went.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    gate: &'a Gate,
    /// Whether all others wait for this one.
    trial: bool,
}

impl Gate {
    /// Waits until it makes sense to ask.
    pub(crate) async fn pass(&self) -> Pass<'_> {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let wait = {
                let mut state = self.state.lock();
                let now = Instant::now();
                match state.until {
                    None => return Pass { gate: self, trial: false },
                    Some(until) if until <= now && !state.trying => {
                        state.trying = true;
                        return Pass { gate: self, trial: true };
                    }
                    Some(until) if until > now => until - now,
                    Some(_) => LONGEST,
                }
            };
            // The time can pass without a notification.
            let _ = timeout(wait, changed).await;
        }
    }

    /// Whether it is closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.state.lock().until.is_some()
    }

    /// Changes the state and wakes all waiting requests.
    fn change(&self, change: impl FnOnce(&mut GateState)) {
        change(&mut self.state.lock());
        self.changed.notify_waiters();
    }
}

impl Pass<'_> {
    /// Whether all others wait for this one.
    pub(crate) fn is_trial(&self) -> bool {
        self.trial
    }

    /// There was an answer.
    pub(crate) fn succeeded(self) {
        self.gate.change(|state| *state = GateState { trying: state.trying, ..GateState::default() });
    }

    /// There was none. `hopeless`: no agent could be reached at all.
    pub(crate) fn failed(self, hopeless: bool) {
        self.gate.change(|state| {
            state.failures = state.failures.saturating_add(1);
            if hopeless || self.trial || state.failures >= MOST_FAILURES {
                // Questions that were on their way together count once.
                if self.trial || state.until.is_none() {
                    let rounds = if self.trial { state.failures.min(MOST_ROUNDS) } else { 1 };
                    state.until = Some(Instant::now() + drawn(rounds));
                }
            }
        });
    }

    /// We are asked to come back later.
    pub(crate) fn told_to_wait(self, pause: Duration) {
        self.gate.change(|state| {
            let until = Instant::now() + pause.clamp(SHORTEST, LONGEST).mul_f64(1.0 + fastrand::f64() / 4.0);
            state.until = Some(state.until.map_or(until, |already| already.max(until)));
        });
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if self.trial {
            self.gate.change(|state| state.trying = false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn requests_go_at_the_rate() {
        let rate = Rate::new(1000);
        let begun = Instant::now();
        for _ in 0..401 {
            rate.turn().await;
        }
        // A tenth of a second's worth went at once.
        let took = begun.elapsed();
        assert!(took >= Duration::from_millis(300), "{took:?}");
    }

    #[tokio::test]
    async fn closed_gate_passes_single_trial() {
        let gate = Gate::default();
        gate.pass().await.failed(true);
        assert!(gate.is_closed());
        let trial = gate.pass().await;
        assert!(trial.trial);
        assert!(timeout(SHORTEST * 2, gate.pass()).await.is_err(), "only one at a time");
        trial.failed(true);
        let trial = gate.pass().await;
        trial.succeeded();
        assert!(!gate.is_closed() && !gate.pass().await.trial);
    }

    #[test]
    fn pauses_grow_and_differ() {
        let mut backoff = Backoff::default();
        let pauses: Vec<Duration> = (0..9).map(|_| backoff.next()).collect();
        assert!(pauses[0] <= SHORTEST && pauses[8] >= LONGEST / 2 && pauses[8] <= LONGEST, "{pauses:?}");
        assert_ne!(drawn(7), drawn(7));
    }
}
