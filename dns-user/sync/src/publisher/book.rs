//! Who has what, and who is to be asked next. Pure: the clock is a number of milliseconds.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::message::Reply;

/// How long a reply is waited for, beyond the time over which downloads are spread.
pub const PATIENCE_MS: u64 = 10_000;

/// Longest pause before an agent that does not answer is asked again.
const LONGEST_PAUSE_MS: u64 = 300_000;

/// Pause after an exception.
const EXCEPTION_PAUSE_MS: u64 = 5_000;

/// What is known of one agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Agent {
    /// Version that it has said to have; 0: not known.
    pub version: u64,
    /// When it was last heard, in milliseconds since 1970.
    pub heard: Option<u64>,
    /// When it was last asked.
    pub asked: Option<u64>,
    /// Attempts since it last did what it was asked to.
    pub failures: u32,
    /// What it last said went wrong.
    pub error: Option<String>,
    /// When it is to be asked next, if it lags.
    #[serde(default)]
    next: u64,
}

/// All agents.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Book {
    /// Version that all should have.
    pub version: u64,
    /// When it was made, in milliseconds since 1970.
    #[serde(default)]
    pub made: u64,
    /// Bytes of messages sent since the version was made.
    #[serde(default)]
    pub bytes_sent: u64,
    /// Agents by id.
    pub agents: BTreeMap<String, Agent>,
}

/// Numbers of a [`Book`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Agents.
    pub agents: usize,
    /// Those that have the version.
    pub synced: usize,
    /// Those that lag and have answered the last call, with an exception or an older version.
    pub failing: usize,
    /// Those that lag and have not answered.
    pub silent: usize,
}

impl Book {
    /// Sets who there is; whoever is new is asked at once, whoever is gone is forgotten.
    pub fn set_agents<'a>(&mut self, ids: impl Iterator<Item = &'a str>) {
        let mut old = std::mem::take(&mut self.agents);
        self.agents = ids.map(|id| (id.to_owned(), old.remove(id).unwrap_or_default())).collect();
    }

    /// Sets what all should have; all that lag are asked at once.
    pub fn set_version(&mut self, version: u64, made: u64) {
        if version == self.version {
            return;
        }
        (self.version, self.made, self.bytes_sent) = (version, made, 0);
        self.hurry();
    }

    /// Asks all that lag at once.
    pub fn hurry(&mut self) {
        for agent in self.agents.values_mut() {
            (agent.next, agent.failures) = (0, 0);
        }
    }

    /// Agents that are to be asked now, with the version that each has.
    pub fn due(&self, now: u64) -> Vec<(String, u64)> {
        let lags = |agent: &Agent| agent.version < self.version && agent.next <= now;
        let due = self.agents.iter().filter(|(_, agent)| lags(agent));
        due.map(|(id, agent)| (id.clone(), agent.version)).collect()
    }

    /// When somebody is to be asked next.
    pub fn next(&self) -> Option<u64> {
        let lagging = self.agents.values().filter(|agent| agent.version < self.version);
        lagging.map(|agent| agent.next).min()
    }

    /// An agent is asked; its reply may take `spread` longer. `random` is in 0..1.
    pub fn asked(&mut self, id: &str, now: u64, spread: u64, random: f64) {
        let Some(agent) = self.agents.get_mut(id) else { return };
        let pause = (PATIENCE_MS << agent.failures.min(6)).min(LONGEST_PAUSE_MS);
        agent.asked = Some(now);
        agent.failures = agent.failures.saturating_add(1);
        agent.next = now + spread + jitter(pause, random);
    }

    /// An agent replied to a call about `version`. Doubled, late and foreign replies do no harm:
    /// a version only grows, and never above what there is.
    pub fn replied(&mut self, id: &str, version: u64, reply: Reply, now: u64, random: f64) {
        let known = version <= self.version;
        let Some(agent) = self.agents.get_mut(id).filter(|_| known) else { return };
        agent.heard = Some(now);
        match reply {
            Reply::Synced => {
                if agent.version < version && version < self.version {
                    // It came late, and from here on there may be a patch.
                    agent.next = now;
                }
                agent.version = agent.version.max(version);
                (agent.failures, agent.error) = (0, None);
            }
            // What could not be done about an older version is over.
            Reply::Exception(_) if version < self.version => {}
            Reply::Exception(problem) => {
                agent.error = Some(problem);
                let pause = (EXCEPTION_PAUSE_MS << agent.failures.min(6)).min(LONGEST_PAUSE_MS);
                agent.next = now + jitter(pause, random);
            }
        }
    }

    /// An agent says what it has. Returns whether that is more than there is.
    pub fn said(&mut self, id: &str, version: u64, now: u64) -> bool {
        let Some(agent) = self.agents.get_mut(id) else { return false };
        // It may have less than before: a new disk. It is there: no pause is left.
        (agent.heard, agent.version) = (Some(now), version.min(self.version));
        (agent.next, agent.failures) = (0, 0);
        version > self.version
    }

    /// How many have it.
    pub fn count(&self) -> Count {
        let mut count = Count { agents: self.agents.len(), ..Count::default() };
        for agent in self.agents.values() {
            let answered = agent.heard.is_some() && agent.heard >= agent.asked;
            match agent.version >= self.version {
                true => count.synced += 1,
                false if answered && agent.error.is_some() => count.failing += 1,
                false => count.silent += 1,
            }
        }
        count
    }
}

/// A pause between 75 % and 125 %.
fn jitter(pause: u64, random: f64) -> u64 {
    (pause as f64 * (0.75 + random / 2.0)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A book of three agents at version 5, all asked at 0.
    fn book() -> Book {
        let mut book = Book::default();
        book.set_agents(["a", "b", "c"].into_iter());
        book.set_version(5, 0);
        assert_eq!(book.due(0).len(), 3);
        for id in ["a", "b", "c"] {
            book.asked(id, 0, 0, 0.5);
        }
        assert_eq!(book.due(0), []);
        book
    }

    #[test]
    fn who_does_not_answer_is_asked_again_for_itself() {
        let mut book = book();
        book.replied("a", 5, Reply::Synced, 10, 0.5);
        book.replied("b", 5, Reply::Exception("full".to_owned()), 10, 0.5);
        assert_eq!(book.count(), Count { agents: 3, synced: 1, failing: 1, silent: 1 });
        assert_eq!(book.due(10_000), [("c".to_owned(), 0)]);
        book.asked("c", 10_000, 0, 0.5);
        assert_eq!(book.due(10_010), [("b".to_owned(), 0)]);
        assert_eq!(book.due(29_999), [("b".to_owned(), 0)]);
        assert_eq!(book.due(30_000).len(), 2);
        for round in 0..100 {
            book.asked("c", round, 0, 1.0);
        }
        assert!(book.next().unwrap() < 2 * LONGEST_PAUSE_MS);
    }

    #[test]
    fn doubled_late_and_foreign_replies_do_no_harm() {
        let mut book = book();
        for _ in 0..2 {
            book.replied("a", 5, Reply::Synced, 10, 0.5);
        }
        book.set_version(6, 20);
        book.replied("a", 5, Reply::Synced, 21, 0.5);
        book.asked("c", 21, 0, 0.5);
        book.replied("c", 5, Reply::Synced, 22, 0.5);
        assert_eq!(book.due(22).last(), Some(&("c".to_owned(), 5)), "late, and told at once what is new");
        book.asked("c", 22, 0, 0.5);
        book.replied("c", 5, Reply::Synced, 23, 0.5);
        book.replied("b", 7, Reply::Synced, 21, 0.5);
        book.replied("x", 6, Reply::Synced, 21, 0.5);
        assert_eq!(book.due(23), [("a".to_owned(), 5), ("b".to_owned(), 0)]);
    }

    #[test]
    fn who_comes_back_is_asked_at_once() {
        let mut book = book();
        assert!(!book.said("c", 3, 100));
        assert_eq!(book.due(100), [("c".to_owned(), 3)]);
        assert!(book.said("a", 9, 100));
        assert_eq!(book.agents["a"].version, 5);
        assert!(!book.said("a", 0, 200));
        assert_eq!(book.agents["a"].version, 0);
    }

    #[test]
    fn who_is_gone_is_forgotten() {
        let mut book = book();
        book.set_agents(["b", "d"].into_iter());
        assert_eq!(book.due(0), [("d".to_owned(), 0)]);
    }
}
