//! The registry: the version that each agent holds, and the agents to contact next. Pure: time is passed
//! in, in milliseconds.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::message::{self, Reply, Report};

/// Time an agent has to reply, in addition to the period over which downloads are spread.
pub(crate) const REPLY_TIMEOUT_MS: u64 = 10_000;

/// Longest pause before a silent agent is retried.
const MAX_PAUSE_MS: u64 = 300_000;

/// First pause after an exception.
const EXCEPTION_PAUSE_MS: u64 = 5_000;

/// Shortest time between two calls to one agent, however often it reports.
const MIN_GAP_MS: u64 = 1_000;

/// Number of open calls per agent whose replies are accepted; older ones are forgotten.
const OPEN_CALLS: usize = 4;

/// Largest step by which a report raises the version. A single faulty agent must not exhaust the numbers.
pub(crate) const MAX_RAISE: u64 = 1_000_000;

/// The file that an agent holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AgentVersion {
    /// Version of the file; 0 without one.
    pub version: u64,
    /// Digest of the file; `None` from a BOSH agent, which reports none.
    pub digest: Option<String>,
}

/// Last known state of one agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Agent {
    /// Its file, as last reported to this publisher process.
    pub held: Option<AgentVersion>,
    /// Time of its last message, in milliseconds since 1970.
    pub heard: Option<u64>,
    /// Time of the last call, in milliseconds since 1970.
    pub asked: Option<u64>,
    /// Number of calls since its last success.
    pub failures: u32,
    /// Exception of the agent's last reply.
    pub error: Option<String>,
    /// Whether the agent applies patches, as ours do.
    #[serde(default)]
    pub patches: bool,
    /// Whether the agent knows no signed links, as older BOSH agents; it gets the blob's id instead.
    #[serde(default)]
    pub unsigned: bool,
    /// Time of the next call if the agent lags.
    #[serde(default)]
    next: u64,
    /// Whether the agent has reported to this process: an unexpected report afterwards means a
    /// second publisher.
    #[serde(skip)]
    has_reported: bool,
    /// Open calls, oldest first.
    #[serde(skip)]
    calls: Vec<AgentCall>,
}

impl Agent {
    /// Records why the agent did not take the current version.
    fn record_exception(&mut self, problem: String, now: u64, random: f64) -> Verdict {
        self.has_reported = true;
        // Older BOSH agents know `sync_dns` only. It is no failure, so the next call follows soon.
        if !self.unsigned && is_unknown_method(&problem) {
            self.unsigned = true;
            self.next = now + MIN_GAP_MS;
            return Verdict::Noted;
        }
        // An agent repeats its reason with each attempt, which one line in the log says.
        let known = self.error.as_ref() == Some(&problem);
        self.error = Some(problem.clone());
        // 2^6 times the first pause is above the longest one, and a shift by 64 would overflow.
        let pause = (EXCEPTION_PAUSE_MS << self.failures.min(6)).min(MAX_PAUSE_MS);
        self.next = now + jitter(pause, random);
        if known {
            Verdict::Noted
        } else {
            Verdict::Complains(problem)
        }
    }
}

/// An open call to an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AgentCall {
    /// Announced version; 0 for a request to report.
    pub version: u64,
    /// Random number in the reply's subject, which another party cannot guess.
    pub nonce: u64,
}

impl AgentCall {
    /// Returns the last token of the reply's subject.
    pub(crate) fn token(self) -> String {
        format!("{}-{:016x}", self.version, self.nonce)
    }

    pub(crate) fn parse(token: &str) -> Option<Self> {
        let (version, nonce) = token.split_once('-')?;
        Some(Self {
            version: version.parse().ok()?,
            nonce: u64::from_str_radix(nonce, 16).ok()?,
        })
    }
}

/// An agent's state relative to the version of the fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AgentState {
    /// Holds the version with its digest.
    Synced,
    /// Replied `synced` without a digest, as BOSH agents do.
    Unverified,
    /// Holds a higher version, or other bytes with this version.
    Disagreeing,
    /// Holds an older version or none, and answered the last call.
    Failing,
    /// Holds an older version or none, and did not answer the last call.
    Silent,
}

/// The publisher's record of all agents, kept in `agents.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AgentRegistry {
    /// Version that all agents should hold; 0 before the first one.
    pub version: u64,
    #[serde(default)]
    pub digest: String,
    /// Time of its announcement, in milliseconds since 1970.
    #[serde(default)]
    pub made: u64,
    /// Bytes of announcements sent for it.
    #[serde(default)]
    pub bytes_sent: u64,
    pub agents: BTreeMap<String, Agent>,
}

/// Number of agents in each [`AgentState`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub agents: usize,
    /// Agents on the current version, including `unverified` ones.
    pub synced: usize,
    /// BOSH agents that replied `synced`, which proves no digest.
    pub unverified: usize,
    /// Agents that hold a higher version or other bytes.
    pub disagreeing: usize,
    /// Lagging agents that answered the last call, with an exception or an older version.
    pub failing: usize,
    /// Lagging agents that did not answer.
    pub silent: usize,
}

impl Count {
    /// Returns whether every agent holds the version.
    pub(crate) fn complete(&self) -> bool {
        self.synced == self.agents
    }
}

impl std::fmt::Display for Count {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            agents: _,
            synced: _,
            unverified,
            disagreeing,
            failing,
            silent,
        } = self;
        write!(out, "{failing} failing, {silent} silent")?;
        if *disagreeing > 0 {
            write!(out, ", {disagreeing} disagreeing")?;
        }
        if *unverified > 0 {
            write!(
                out,
                ", {unverified} unverified (BOSH agents report no digest)"
            )?;
        }
        Ok(())
    }
}

/// Consequence of an agent's message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Only the registry changed.
    Noted,
    /// The agent replied with a new exception.
    Complains(String),
    /// The agent's first report disagrees: the next version must be above the reported one.
    Raise(u64),
    /// An agent that reported before now disagrees: another publisher is active.
    Disagrees(AgentVersion),
    /// The message answers no open call, or comes from an unknown agent.
    Ignored,
}

impl AgentRegistry {
    /// Prepares the registry of a previous process: all agents must report again.
    pub(crate) fn forget_reports(&mut self) {
        for agent in self.agents.values_mut() {
            *agent = Agent {
                heard: agent.heard,
                asked: agent.asked,
                unsigned: agent.unsigned,
                ..Agent::default()
            };
        }
    }

    /// Sets the fleet's agents; new ones are due immediately, removed ones are forgotten.
    pub(crate) fn set_agents<'a>(&mut self, ids: impl Iterator<Item = &'a str>) {
        let mut old = std::mem::take(&mut self.agents);
        self.agents = ids
            .map(|id| (id.to_owned(), old.remove(id).unwrap_or_default()))
            .collect();
    }

    /// Sets the fleet's version; lagging agents are due immediately.
    pub(crate) fn set_version(&mut self, version: u64, digest: &str, made: u64) {
        if version == self.version && digest == self.digest {
            return;
        }
        (self.version, self.digest, self.made, self.bytes_sent) =
            (version, digest.to_owned(), made, 0);
        for agent in self.agents.values_mut() {
            (agent.next, agent.failures) = (0, 0);
        }
    }

    pub(crate) fn state(&self, agent: &Agent) -> AgentState {
        match &agent.held {
            // A BOSH agent confirms what it was told, and keeps a higher version without saying so.
            Some(AgentVersion {
                version,
                digest: None,
            }) if *version > 0 && *version >= self.version => AgentState::Unverified,
            Some(AgentVersion { version, digest }) if *version == self.version && *version > 0 => {
                if digest.as_deref() == Some(&*self.digest) {
                    AgentState::Synced
                } else {
                    AgentState::Disagreeing
                }
            }
            Some(AgentVersion { version, .. }) if *version > self.version => {
                AgentState::Disagreeing
            }
            _ if agent.heard.is_some() && agent.heard >= agent.asked && agent.error.is_some() => {
                AgentState::Failing
            }
            _ => AgentState::Silent,
        }
    }

    fn lags(&self, agent: &Agent) -> bool {
        matches!(self.state(agent), AgentState::Failing | AgentState::Silent)
    }

    /// Returns the agents to call now, each with the version that it holds if it applies patches.
    pub(crate) fn due(&self, now: u64) -> Vec<(String, Option<u64>)> {
        let mut due = Vec::new();
        for (id, agent) in &self.agents {
            // A synced agent needs nothing, and one that disagrees would refuse the lower version.
            if agent.next > now || !self.lags(agent) {
                continue;
            }
            let held = match &agent.held {
                Some(held) if agent.patches => Some(held.version),
                _ => None,
            };
            due.push((id.clone(), held));
        }
        due
    }

    /// Returns whether every agent has answered this process.
    pub(crate) fn all_reported(&self) -> bool {
        self.agents.values().all(|agent| agent.has_reported)
    }

    /// Records a call that is sent at `at` and whose reply may take `spread` longer. `random` is in
    /// 0..1.
    pub(crate) fn record_call(
        &mut self,
        id: &str,
        call: AgentCall,
        at: u64,
        spread: u64,
        random: f64,
    ) {
        let Some(agent) = self.agents.get_mut(id) else {
            return;
        };
        // An agent that never answers would let the list grow with every call.
        if agent.calls.len() == OPEN_CALLS {
            agent.calls.remove(0);
        }
        agent.calls.push(call);
        // A question takes no part in the pauses between announcements.
        if call.version == 0 {
            return;
        }
        // Each agent has a separate pause, so that a silent one delays no other.
        let pause = (REPLY_TIMEOUT_MS << agent.failures.min(6)).min(MAX_PAUSE_MS);
        agent.asked = Some(at);
        agent.failures = agent.failures.saturating_add(1);
        agent.next = at + spread + jitter(pause, random);
    }

    /// Processes a reply. Only the first reply to an open call counts; a late one counts as a report.
    pub(crate) fn record_reply(
        &mut self,
        id: &str,
        call: AgentCall,
        reply: Reply,
        now: u64,
        random: f64,
    ) -> Verdict {
        let Some(agent) = self.agents.get_mut(id) else {
            return Verdict::Ignored;
        };
        // The number cannot be guessed, so a reply counts only from who received the call.
        // nats-server's permissions keep agents apart as well.
        let Some(open) = agent.calls.iter().position(|open| *open == call) else {
            return Verdict::Ignored;
        };
        agent.calls.remove(open);
        agent.heard = Some(now);
        match reply {
            Reply::Synced(Some(report)) => {
                agent.failures = 0;
                agent.error = None;
                self.report(id, report, now)
            }
            Reply::Synced(None) => {
                agent.has_reported = true;
                if call.version == 0 {
                    return Verdict::Noted;
                }
                let before = agent.held.as_ref().map_or(0, |held| held.version);
                // A late reply must not take back what a newer one has confirmed.
                if before < call.version {
                    agent.held = Some(AgentVersion {
                        version: call.version,
                        digest: None,
                    });
                }
                if call.version < self.version {
                    // The reply is late; the current version is due now.
                    agent.next = now;
                }
                agent.failures = 0;
                agent.error = None;
                Verdict::Noted
            }
            // A BOSH agent without a file replies to a request to report with an exception; an
            // older version no longer matters.
            Reply::Exception(_) if call.version < self.version => {
                agent.has_reported = true;
                Verdict::Noted
            }
            Reply::Exception(problem) => agent.record_exception(problem, now, random),
        }
    }

    /// Processes an agent's report of its file.
    pub(crate) fn report(&mut self, id: &str, report: Report, now: u64) -> Verdict {
        let Report {
            version,
            digest,
            patches,
        } = report;
        let Some(agent) = self.agents.get_mut(id) else {
            return Verdict::Ignored;
        };
        let held = AgentVersion {
            version,
            // Empty without a file: `None` stands for BOSH agents, which report nothing.
            digest: Some(digest.unwrap_or_default()),
        };
        let changed = agent.held.as_ref() != Some(&held);
        // The first report tells what was before this process, and raises the version; later ones
        // can only be the work of another publisher.
        let first = !std::mem::replace(&mut agent.has_reported, true);
        agent.patches = patches;
        agent.heard = Some(now);
        if changed || first || version < self.version {
            // It may hold less than before, on a new disk, or its fault may be mended. It is reachable, so its
            // pauses end.
            agent.failures = 0;
            agent.next = agent
                .asked
                .map_or(0, |asked| asked + MIN_GAP_MS)
                .min(now + MIN_GAP_MS);
            // A new or restarted machine may have no records at all, so it does not wait.
            if version < self.version && first {
                agent.next = 0;
            }
        }
        agent.held = Some(held.clone());
        let agent = &self.agents[id];
        if self.state(agent) != AgentState::Disagreeing {
            return Verdict::Noted;
        }
        if first && version <= self.version.saturating_add(MAX_RAISE) {
            Verdict::Raise(version)
        } else if changed {
            Verdict::Disagrees(held)
        } else {
            Verdict::Noted
        }
    }

    pub(crate) fn count(&self) -> Count {
        let mut count = Count {
            agents: self.agents.len(),
            ..Count::default()
        };
        for agent in self.agents.values() {
            match self.state(agent) {
                AgentState::Synced => count.synced += 1,
                AgentState::Unverified => {
                    count.synced += 1;
                    count.unverified += 1;
                }
                AgentState::Disagreeing => count.disagreeing += 1,
                AgentState::Failing => count.failing += 1,
                AgentState::Silent => count.silent += 1,
            }
        }
        count
    }

    pub(crate) fn disagreeing(&self) -> Option<(&str, &AgentVersion)> {
        self.agents.iter().find_map(|(id, agent)| {
            let held = agent.held.as_ref()?;
            (self.state(agent) == AgentState::Disagreeing).then_some((&**id, held))
        })
    }
}

/// Returns whether an exception says that the agent does not know signed links.
fn is_unknown_method(problem: &str) -> bool {
    problem.to_ascii_lowercase().contains("unknown message")
        && problem.contains(message::SIGNED_METHOD)
}

/// Returns a pause of 75 % to 125 % of `pause`.
fn jitter(pause: u64, random: f64) -> u64 {
    (pause as f64 * (0.75 + random / 2.0)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(version: u64) -> AgentCall {
        AgentCall {
            version,
            nonce: version * 100,
        }
    }

    fn report(version: u64, digest: &str) -> Report {
        Report {
            version,
            digest: Some(digest.to_owned()),
            patches: true,
        }
    }

    fn synced(version: u64, digest: &str) -> Reply {
        Reply::Synced(Some(report(version, digest)))
    }

    /// Returns a registry of three agents at version 5, all contacted at 0.
    fn registry() -> AgentRegistry {
        let mut registry = AgentRegistry::default();
        registry.set_agents(["a", "b", "c"].into_iter());
        registry.set_version(5, "five", 0);
        assert_eq!(registry.due(0).len(), 3);
        for id in ["a", "b", "c"] {
            registry.record_call(id, call(5), 0, 0, 0.5);
        }
        assert_eq!(registry.due(0), []);
        registry
    }

    #[test]
    fn silent_agents_back_off_separately() {
        let mut registry = registry();
        registry.record_reply("a", call(5), synced(5, "five"), 10, 0.5);
        let complaint =
            registry.record_reply("b", call(5), Reply::Exception("full".to_owned()), 10, 0.5);
        assert_eq!(complaint, Verdict::Complains("full".to_owned()));
        let count = Count {
            agents: 3,
            synced: 1,
            failing: 1,
            silent: 1,
            ..Count::default()
        };
        assert_eq!(registry.count(), count);
        assert_eq!(registry.due(10_000), [("c".to_owned(), None)]);
        registry.record_call("c", call(5), 10_000, 0, 0.5);
        assert_eq!(registry.due(10_010), [("b".to_owned(), None)]);
        assert_eq!(registry.due(30_000).len(), 2);
        for round in 0..100 {
            registry.record_call("c", call(5), round, 0, 1.0);
        }
        assert!(registry.agents["c"].next < 2 * MAX_PAUSE_MS);
        assert_eq!(registry.agents["c"].calls.len(), OPEN_CALLS);
    }

    #[test]
    fn report_of_old_version_ends_pauses() {
        let mut registry = registry();
        registry.report("b", report(4, "four"), 10);
        for round in 0..6 {
            let now = 1_000_000 * (round + 1);
            registry.record_call(
                "b",
                AgentCall {
                    version: 5,
                    nonce: round,
                },
                now,
                0,
                0.5,
            );
            let complaint = Reply::Exception("no blob".to_owned());
            registry.record_reply(
                "b",
                AgentCall {
                    version: 5,
                    nonce: round,
                },
                complaint,
                now + 10,
                0.5,
            );
        }
        assert!(registry.agents["b"].next > 6_000_000 + 200_000);
        // It was restarted, with the same file.
        registry.report("b", report(4, "four"), 6_010_000);
        let is_due = |now: u64| registry.due(now).iter().any(|(id, _)| id == "b");
        assert!(is_due(6_010_000 + MIN_GAP_MS));
    }

    #[test]
    fn synced_requires_version_and_digest() {
        let mut registry = registry();
        registry.record_reply("a", call(5), synced(5, "five"), 10, 0.5);
        registry.record_reply("b", call(5), synced(5, "other"), 10, 0.5);
        registry.record_reply("c", call(5), synced(9, "nine"), 10, 0.5);
        let count = Count {
            agents: 3,
            synced: 1,
            disagreeing: 2,
            ..Count::default()
        };
        assert_eq!(registry.count(), count);
    }

    #[test]
    fn first_report_raises_later_disagree() {
        let mut registry = registry();
        assert_eq!(
            registry.report("a", report(9, "nine"), 1),
            Verdict::Raise(9)
        );
        assert_eq!(
            registry.report("b", report(5, "other"), 1),
            Verdict::Raise(5)
        );
        registry.set_version(10, "ten", 2);
        assert_eq!(registry.count().disagreeing, 0);
        assert_eq!(registry.due(1_000_000).len(), 3);
        let held = AgentVersion {
            version: 11,
            digest: Some("eleven".to_owned()),
        };
        assert_eq!(
            registry.report("a", report(11, "eleven"), 3),
            Verdict::Disagrees(held)
        );
        assert_eq!(registry.disagreeing().map(|(id, _)| id), Some("a"));
        assert_eq!(
            registry.report("a", report(11, "eleven"), 4),
            Verdict::Noted,
            "logged once"
        );
        let far = report(10 + MAX_RAISE + 1, "far");
        assert!(matches!(
            registry.report("c", far, 5),
            Verdict::Disagrees(_)
        ));
    }

    #[test]
    fn largest_raise_is_taken() {
        let mut registry = registry();
        let most = 5 + MAX_RAISE;
        assert!(matches!(
            registry.report("a", report(most + 1, "far"), 1),
            Verdict::Disagrees(_)
        ));
        assert_eq!(
            registry.report("b", report(most, "near"), 1),
            Verdict::Raise(most)
        );
    }

    #[test]
    fn only_open_calls_count() {
        let mut registry = registry();
        let forged = AgentCall {
            version: 5,
            nonce: 1,
        };
        assert_eq!(
            registry.record_reply("a", forged, synced(5, "five"), 10, 0.5),
            Verdict::Ignored
        );
        assert_eq!(
            registry.record_reply("x", call(5), synced(5, "five"), 10, 0.5),
            Verdict::Ignored
        );
        assert_eq!(
            registry.record_reply("a", call(5), synced(5, "five"), 10, 0.5),
            Verdict::Noted
        );
        assert_eq!(
            registry.record_reply("a", call(5), Reply::Exception("x".to_owned()), 10, 0.5),
            Verdict::Ignored
        );
        assert_eq!(registry.count().synced, 1);
    }

    #[test]
    fn agent_without_signed_links_is_remembered() {
        let mut registry = registry();
        let exception = "Agent exception: unknown message sync_dns_with_signed_url";
        let verdict = registry.record_reply(
            "a",
            call(5),
            Reply::Exception(exception.to_owned()),
            10,
            0.5,
        );
        assert_eq!(verdict, Verdict::Noted);
        assert!(registry.agents["a"].unsigned && !registry.agents["b"].unsigned);
        assert_eq!(registry.due(10 + MIN_GAP_MS), [("a".to_owned(), None)]);
        registry.forget_reports();
        assert!(registry.agents["a"].unsigned);
    }

    #[test]
    fn late_reply_counts_for_older_version() {
        let mut registry = registry();
        registry.set_version(6, "six", 20);
        registry.record_call("c", call(6), 21, 0, 0.5);
        registry.record_reply("c", call(5), Reply::Synced(None), 22, 0.5);
        assert_eq!(
            registry.agents["c"].held,
            Some(AgentVersion {
                version: 5,
                digest: None
            })
        );
        assert!(registry.due(22).contains(&("c".to_owned(), None)));
        registry.record_call(
            "c",
            AgentCall {
                version: 6,
                nonce: 1,
            },
            22,
            0,
            0.5,
        );
        registry.record_reply(
            "c",
            AgentCall {
                version: 6,
                nonce: 1,
            },
            Reply::Synced(None),
            23,
            0.5,
        );
        assert_eq!(
            (registry.count().synced, registry.count().unverified),
            (1, 1)
        );
    }

    #[test]
    fn reports_cannot_flood_calls() {
        let mut registry = registry();
        let mut calls = 0;
        for now in 0..1000 {
            registry.report("a", report(now % 2, "x"), 10_000 + now);
            for (id, _) in registry
                .due(10_000 + now)
                .into_iter()
                .filter(|(id, _)| id == "a")
            {
                registry.record_call(&id, call(5), 10_000 + now, 0, 0.5);
                calls += 1;
            }
        }
        assert!(calls <= 2, "{calls}");
    }

    #[test]
    fn returning_agent_is_due_immediately() {
        let mut registry = registry();
        assert_eq!(
            registry.report("c", report(3, "three"), 100),
            Verdict::Noted
        );
        assert_eq!(registry.due(100), [("c".to_owned(), Some(3))]);
    }

    #[test]
    fn missing_agents_are_forgotten() {
        let mut registry = registry();
        registry.set_agents(["b", "d"].into_iter());
        assert_eq!(registry.due(0), [("d".to_owned(), None)]);
    }

    #[test]
    fn restart_collects_reports_again() {
        let mut registry = registry();
        registry.record_reply("a", call(5), synced(5, "five"), 10, 0.5);
        let text = serde_json::to_vec(&registry).unwrap();
        let mut registry: AgentRegistry = serde_json::from_slice(&text).unwrap();
        registry.forget_reports();
        assert_eq!(
            (registry.count().synced, registry.all_reported()),
            (0, false)
        );
    }

    #[test]
    fn states_follow_version_and_digest() {
        let held = |version, digest: Option<&str>| {
            Some(AgentVersion {
                version,
                digest: digest.map(str::to_owned),
            })
        };
        let mut registry = registry();
        let failing = (Some(7), Some(7), Some("full".to_owned()));
        for (held, (heard, asked, error), state) in [
            (
                held(5, Some("five")),
                (None, None, None),
                AgentState::Synced,
            ),
            (
                held(5, Some("other")),
                (None, None, None),
                AgentState::Disagreeing,
            ),
            (held(5, None), (None, None, None), AgentState::Unverified),
            (held(6, None), (None, None, None), AgentState::Unverified),
            (
                held(6, Some("six")),
                (None, None, None),
                AgentState::Disagreeing,
            ),
            (
                held(4, Some("four")),
                (None, None, None),
                AgentState::Silent,
            ),
            (held(4, None), failing.clone(), AgentState::Failing),
            (None, failing, AgentState::Failing),
            (
                None,
                (Some(7), Some(8), Some("full".to_owned())),
                AgentState::Silent,
            ),
            (None, (Some(8), Some(7), None), AgentState::Silent),
            (
                None,
                (None, None, Some("full".to_owned())),
                AgentState::Silent,
            ),
        ] {
            let agent = Agent {
                held,
                heard,
                asked,
                error,
                ..Agent::default()
            };
            assert_eq!(registry.state(&agent), state, "{agent:?}");
            let lags = matches!(state, AgentState::Failing | AgentState::Silent);
            assert_eq!(registry.lags(&agent), lags);
        }
        // Without a version there is nothing to hold.
        registry.set_version(0, "", 0);
        for digest in [None, Some("")] {
            let agent = Agent {
                held: held(0, digest),
                ..Agent::default()
            };
            assert_eq!(registry.state(&agent), AgentState::Silent);
        }
    }

    #[test]
    fn pauses_double_to_their_limit() {
        for (random, least) in [(0.0, 0.75), (0.5, 1.0), (1.0, 1.25)] {
            assert_eq!(jitter(1000, random), (1000.0 * least) as u64);
        }
        let mut registry = registry();
        for failures in 1..12_u32 {
            registry.record_call("a", call(5), 1000, 50, 0.5);
            let pause = (REPLY_TIMEOUT_MS << failures.min(6)).min(MAX_PAUSE_MS);
            assert_eq!(registry.agents["a"].next, 1050 + pause, "{failures}");
        }
        // A question without a version counts as no attempt.
        let before = registry.agents["b"].next;
        registry.record_call("b", call(0), 9000, 0, 0.5);
        assert_eq!(
            (registry.agents["b"].next, registry.agents["b"].asked),
            (before, Some(0))
        );
        assert_eq!(
            registry
                .due(before - 1)
                .iter()
                .filter(|due| due.0 == "b")
                .count(),
            0
        );
        assert_eq!(
            registry
                .due(before)
                .iter()
                .filter(|due| due.0 == "b")
                .count(),
            1
        );
    }

    #[test]
    fn tokens_and_counts_are_written() {
        let call = AgentCall {
            version: 7,
            nonce: 0xabc,
        };
        assert_eq!(call.token(), "7-0000000000000abc");
        assert_eq!(AgentCall::parse(&call.token()), Some(call));
        for other in ["7", "x-1", "7-xyz", ""] {
            assert_eq!(AgentCall::parse(other), None, "{other}");
        }
        let mut count = Count {
            agents: 9,
            synced: 4,
            failing: 2,
            silent: 3,
            ..Count::default()
        };
        assert_eq!(count.to_string(), "2 failing, 3 silent");
        (count.disagreeing, count.unverified) = (1, 2);
        let text =
            "2 failing, 3 silent, 1 disagreeing, 2 unverified (BOSH agents report no digest)";
        assert_eq!(count.to_string(), text);
        assert!(!count.complete());
        count.synced = 9;
        assert!(count.complete());
    }

    #[test]
    fn versions_and_agents_are_replaced() {
        let mut registry = registry();
        assert!(!registry.all_reported());
        for id in ["a", "b", "c"] {
            registry.report(id, report(5, "five"), 10);
        }
        assert!(registry.all_reported());
        (registry.bytes_sent, registry.made) = (77, 5);
        registry.set_version(5, "five", 9);
        assert_eq!(
            (registry.bytes_sent, registry.made),
            (77, 5),
            "nothing has changed"
        );
        registry.set_version(5, "other", 9);
        assert_eq!((registry.bytes_sent, registry.made), (0, 9));
        registry.bytes_sent = 77;
        registry.set_version(6, "other", 10);
        assert_eq!(
            (registry.bytes_sent, registry.made, registry.due(0).len()),
            (0, 10, 3)
        );
        registry.set_agents(["c", "d"].into_iter());
        assert_eq!(registry.agents.keys().collect::<Vec<_>>(), ["c", "d"]);
        assert!(registry.agents["c"].held.is_some() && registry.agents["d"].held.is_none());
        assert_eq!(registry.report("x", report(1, "one"), 10), Verdict::Ignored);
        assert_eq!(
            registry.record_reply("x", call(1), synced(1, "one"), 10, 0.5),
            Verdict::Ignored
        );
        registry.agents.get_mut("c").unwrap().unsigned = true;
        registry.forget_reports();
        let agent = &registry.agents["c"];
        assert_eq!(
            (agent.held.is_none(), agent.heard, agent.unsigned),
            (true, Some(10), true)
        );
        assert!(!agent.has_reported);
    }

    #[test]
    fn only_the_signed_method_may_be_unknown() {
        for (problem, is_unknown) in [
            ("unknown message sync_dns_with_signed_url", true),
            ("Unknown Message: sync_dns_with_signed_url", true),
            ("unknown message sync_dns", false),
            ("sync_dns_with_signed_url failed", false),
        ] {
            assert_eq!(is_unknown_method(problem), is_unknown, "{problem}");
        }
    }

    #[test]
    fn news_end_the_pauses_of_an_agent() {
        let mut registry = registry();
        registry.report("a", report(5, "five"), 10);
        registry.agents.get_mut("a").unwrap().failures = 3;
        registry.report("a", report(5, "five"), 30);
        assert_eq!(registry.agents["a"].failures, 3);
        registry.report("a", report(5, "other"), 40);
        assert_eq!(registry.agents["a"].failures, 0);
    }

    #[test]
    fn complaints_about_older_versions_are_noted() {
        let mut registry = registry();
        registry.set_version(6, "six", 10);
        let complaint = || Reply::Exception("full".to_owned());
        let verdict = registry.record_reply("a", call(5), complaint(), 20, 0.5);
        assert_eq!(verdict, Verdict::Noted);
        registry.record_call("b", call(6), 20, 0, 0.5);
        let verdict = registry.record_reply("b", call(6), complaint(), 30, 0.5);
        assert_eq!(verdict, Verdict::Complains("full".to_owned()));
    }

    /// Returns an agent's time of the next call.
    fn next(registry: &AgentRegistry, id: &str) -> u64 {
        registry.agents[id].next
    }

    #[test]
    fn pauses_are_exact() {
        // Calls: each has the time for a reply, twice as long after each silence, and the spread of downloads.
        let mut registry = registry();
        let call_at = |registry: &mut AgentRegistry, at: u64, spread: u64, random: f64| {
            registry.record_call("a", call(5), at, spread, random);
            next(registry, "a")
        };
        assert_eq!(next(&registry, "a"), 10_000);
        assert_eq!(call_at(&mut registry, 1_000, 7, 0.5), 1_007 + 20_000);
        assert_eq!(call_at(&mut registry, 1_000, 0, 0.0), 1_000 + 30_000);
        assert_eq!(call_at(&mut registry, 1_000, 0, 1.0), 1_000 + 100_000);
        assert_eq!(call_at(&mut registry, 1_000, 0, 0.5), 1_000 + 160_000);
        assert_eq!(call_at(&mut registry, 1_000, 0, 0.5), 1_000 + MAX_PAUSE_MS);
        assert_eq!(call_at(&mut registry, 1_000, 0, 0.5), 1_000 + MAX_PAUSE_MS);
        assert_eq!(registry.agents["a"].failures, 7);
        // A request to report pauses nothing.
        registry.record_call("a", call(0), 2_000, 0, 0.5);
        let agent = &registry.agents["a"];
        assert_eq!((agent.failures, agent.asked), (7, Some(1_000)));
        assert_eq!(agent.next, 1_000 + MAX_PAUSE_MS);
        let open: Vec<u64> = agent.calls.iter().map(|call| call.version).collect();
        assert_eq!(open, [5, 5, 5, 0]);

        // Exceptions: a new one is a complaint.
        let complain = |registry: &mut AgentRegistry, text: &str| {
            registry.record_call("b", call(5), 0, 0, 0.5);
            registry.record_reply("b", call(5), Reply::Exception(text.to_owned()), 50, 0.5)
        };
        let complains = |text: &str| Verdict::Complains(text.to_owned());
        assert_eq!(complain(&mut registry, "full"), complains("full"));
        assert_eq!(next(&registry, "b"), 50 + 4 * EXCEPTION_PAUSE_MS);
        assert_eq!(complain(&mut registry, "full"), Verdict::Noted);
        assert_eq!(next(&registry, "b"), 50 + 8 * EXCEPTION_PAUSE_MS);
        assert_eq!(complain(&mut registry, "hung"), complains("hung"));
        for _ in 0..9 {
            complain(&mut registry, "hung");
        }
        assert_eq!(next(&registry, "b"), 50 + MAX_PAUSE_MS);
        // An older version no longer matters.
        registry.set_version(6, "six", 60);
        assert_eq!(
            (registry.agents["b"].failures, next(&registry, "b")),
            (0, 0)
        );
        registry.record_call("b", call(5), 70, 0, 0.5);
        let old = Reply::Exception("old".to_owned());
        assert_eq!(
            registry.record_reply("b", call(5), old, 80, 0.5),
            Verdict::Noted
        );
        assert_eq!(registry.agents["b"].error.as_deref(), Some("hung"));
        assert_eq!(registry.agents["b"].heard, Some(80));
    }

    #[test]
    fn reports_make_agents_due() {
        for (version, is_first, asked, expected) in [
            // The first report of an older version is answered at once.
            (4, true, Some(50_000), 0),
            (4, false, Some(50_000), 51_000),
            (4, false, Some(40_000), 41_000),
            (4, false, None, 0),
            (4, false, Some(90_000), 61_000),
            (5, true, Some(50_000), 51_000),
            // The same report again.
            (5, false, Some(50_000), 7),
        ] {
            let mut registry = registry();
            let agent = registry.agents.get_mut("a").unwrap();
            agent.asked = asked;
            agent.has_reported = !is_first;
            agent.failures = 3;
            agent.next = 7;
            if version == 5 && !is_first {
                agent.held = Some(AgentVersion {
                    version,
                    digest: Some("five".to_owned()),
                });
            }
            let verdict = registry.report("a", report(version, "five"), 60_000);
            assert_eq!(verdict, Verdict::Noted);
            let shown = format!("{version} {is_first} {asked:?}");
            assert_eq!(next(&registry, "a"), expected, "{shown}");
            let agent = &registry.agents["a"];
            assert_eq!(agent.failures, if expected == 7 { 3 } else { 0 }, "{shown}");
            assert!(agent.patches && agent.has_reported);
            assert_eq!(agent.heard, Some(60_000));
        }
        let unknown = registry().report("x", report(5, "five"), 0);
        assert_eq!(unknown, Verdict::Ignored);
    }

    #[test]
    fn restart_keeps_times_only() {
        let mut registry = registry();
        registry.report("a", report(5, "five"), 77);
        let agent = registry.agents.get_mut("a").unwrap();
        agent.unsigned = true;
        agent.error = Some("full".to_owned());
        agent.next = 9;
        let kept = Agent {
            heard: Some(77),
            asked: Some(0),
            unsigned: true,
            ..Agent::default()
        };
        registry.forget_reports();
        assert_eq!(registry.agents["a"], kept);
    }
}
