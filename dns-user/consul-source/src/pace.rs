//! Rate limit of requests, and pauses after failures.

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
/// Number of rounds after which the gate's pause stops growing. At most 8 s, as a single request is
/// no load.
const MOST_ROUNDS: u32 = 4;
/// Consecutive errors after which only a single request at a time is sent.
const MOST_FAILURES: u32 = 8;

/// Limits requests to a steady rate with bursts of 0.1 s.
#[derive(Debug)]
pub(crate) struct Rate {
    interval: Duration,
    /// Time at which the next request is due if none waits.
    next: Mutex<Option<Instant>>,
}

impl Rate {
    /// Creates a limit of at least one request per second.
    pub(crate) fn new(per_second: u32) -> Self {
        Self { interval: Duration::from_secs(1) / per_second.max(1), next: Mutex::new(None) }
    }

    /// Waits until the caller may send a request.
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

/// Pauses of one topic after consecutive errors: growing, and randomised so that requests that
/// failed together do not return together.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// Resets the pause after a success.
    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }

    /// Returns the pause after one more error.
    pub(crate) fn next(&mut self) -> Duration {
        self.failures = self.failures.saturating_add(1);
        drawn(self.failures)
    }
}

/// Returns the pause after this many errors: half to all of a time that doubles with each error.
fn drawn(failures: u32) -> Duration {
    let longest = (SHORTEST * 2u32.pow(failures.clamp(1, 7) - 1)).min(LONGEST);
    longest.mul_f64(0.5 + fastrand::f64() / 2.0)
}

/// Closes while no agent responds. Then only one request at a time is sent, with pauses, and all
/// others wait, so that a returning agent is not flooded.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: Mutex<GateState>,
    /// Signals a change of the state.
    changed: Notify,
}

#[derive(Debug, Default)]
struct GateState {
    /// Consecutive errors of all requests.
    failures: u32,
    /// Time before which no request passes.
    until: Option<Instant>,
    /// Whether a trial request is in progress.
    trying: bool,
}

/// Permission to send a request; takes its outcome.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    gate: &'a Gate,
    /// Whether all other requests wait for this one.
    trial: bool,
}

impl Gate {
    /// Waits until a request may be sent.
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
            // The pause can end without a notification.
            let _ = timeout(wait, changed).await;
        }
    }

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
    /// Returns whether all other requests wait for this one.
    pub(crate) fn is_trial(&self) -> bool {
        self.trial
    }

    pub(crate) fn succeeded(self) {
        self.gate.change(|state| *state = GateState { trying: state.trying, ..GateState::default() });
    }

    /// Reports a failure; `hopeless` if no agent could be reached at all.
    pub(crate) fn failed(self, hopeless: bool) {
        self.gate.change(|state| {
            state.failures = state.failures.saturating_add(1);
            if hopeless || self.trial || state.failures >= MOST_FAILURES {
                // Concurrent failures count once.
                if self.trial || state.until.is_none() {
                    let rounds = if self.trial { state.failures.min(MOST_ROUNDS) } else { 1 };
                    state.until = Some(Instant::now() + drawn(rounds));
                }
            }
        });
    }

    /// Reports that the agent requested a pause.
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
        // The first 0.1 s of requests pass at once.
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
