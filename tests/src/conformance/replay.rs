//! Replays a scenario folder; returns verdicts.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use serde_json::Value;
use test_support::precedence;

use super::{
    Commands, Recorded, client, expect,
    patience::Pace,
    scenario::{Case, Counts, Kind, Scenario, read_json, read_json_lines},
    startup, steps,
    world::World,
};
use crate::server;

/// Time limit for a server's start.
const START: Duration = Duration::from_secs(120);

/// Timeout if a reply is expected.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Timeout if no reply is expected.
const SILENCE: Duration = Duration::from_millis(600);

/// Verdict on a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Id of the case.
    pub id: String,
    /// Differences from the recording.
    pub differences: Vec<String>,
    /// Reason for which differences are accepted.
    pub quirk: Option<String>,
}

impl Verdict {
    /// Returns whether the case has unaccepted differences.
    pub fn failed(&self) -> bool {
        !self.differences.is_empty() && self.quirk.is_none()
    }

    /// Returns whether the case has accepted differences.
    pub fn differs(&self) -> bool {
        !self.differences.is_empty() && self.quirk.is_some()
    }
}

/// Part of a scenario that is replayed with its own server.
#[derive(Clone, Debug)]
pub struct Part {
    pub scenario: String,
    folder: PathBuf,
    /// An entry of `startup.jsonl`; `None` for the queries and steps.
    start: Option<startup::Start>,
    /// How many parts may run beside this one.
    pub crowd: Crowd,
    /// Total of the explicit pauses, in milliseconds.
    pub pauses_ms: u64,
}

/// Sensitivity of a part to parallel load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crowd {
    /// Nearly all of its time is deliberate waiting.
    Many,
    /// Dozens of TLS handshakes of health checks must finish during its pauses.
    Few,
    /// Its cases depend on single seconds.
    Alone,
}

impl Crowd {
    /// Returns the maximum number of parts run in parallel.
    pub fn at_once(self) -> usize {
        match self {
            Self::Many => 6,
            Self::Few => 2,
            Self::Alone => 1,
        }
    }
}

impl Part {
    /// Returns the parts of a scenario: one per start, and one for queries and steps.
    ///
    /// # Errors
    ///
    /// Fails if a file of the scenario cannot be read.
    pub fn all(recorded: &Recorded, scenario: &str) -> Result<Vec<Self>> {
        let folder = recorded.scenarios.join(scenario);
        let part = |start, crowd, pauses_ms| Self {
            scenario: scenario.to_owned(),
            folder: folder.clone(),
            start,
            crowd,
            pauses_ms,
        };
        if let Some(starts) = read_json_lines::<startup::Start>(&folder.join("startup.jsonl"))? {
            let judged = starts.into_iter().filter(|start| start.expect.is_some());
            return Ok(judged
                .map(|start| part(Some(start), Crowd::Many, 0))
                .collect());
        }
        let steps: Vec<steps::Step> =
            read_json_lines(&folder.join("steps.jsonl"))?.unwrap_or_default();
        let scenario: Scenario = read_json(&folder.join("scenario.json"))?;
        let crowd = if steps.iter().any(steps::Step::counts_seconds) {
            Crowd::Alone
        } else if scenario.health.is_empty() {
            Crowd::Many
        } else {
            Crowd::Few
        };
        Ok(vec![part(
            None,
            crowd,
            steps.iter().map(steps::Step::pauses_ms).sum(),
        )])
    }

    /// Replays the part on a thread inside a network namespace, with `extra` merged into the DNS
    /// server's configuration.
    ///
    /// # Errors
    ///
    /// Fails if the recording cannot be read or its surroundings cannot be built; differences from
    /// the recording are returned as verdicts.
    pub fn replay(
        &self,
        recorded: &Recorded,
        commands: &Commands,
        extra: &Value,
    ) -> Result<Vec<Verdict>> {
        let file = self.folder.join("scenario.json");
        let (pace, mut scenario) = if self.start.is_some() {
            (Pace::default(), read_json(&file)?)
        } else {
            Pace::read_scenario::<Scenario>(&file)?
        };
        if self.crowd == Crowd::Alone {
            // The lifetimes of a recording pass in real time, however slow the replay is.
            precedence::take();
        }
        let command = match scenario.server {
            Kind::Dns => {
                server::merge(&mut scenario.config, extra);
                &commands.dns
            }
            Kind::Health => &commands.health,
        };
        match &self.start {
            Some(start) => Ok(vec![start.replay(
                scenario,
                &self.folder,
                &recorded.certificates,
                command,
            )?]),
            None => replay(
                scenario,
                pace,
                &self.folder,
                &recorded.certificates,
                command,
            ),
        }
    }
}

/// Replays queries and steps.
fn replay(
    scenario: Scenario,
    pace: Pace,
    folder: &Path,
    certificates: &Path,
    command: &str,
) -> Result<Vec<Verdict>> {
    let mut world = World::new(scenario, folder, certificates)?;
    world.write_config()?;
    world.launch(command)?;
    let cases: Vec<Case> = pace.read_lines(&folder.join("cases.jsonl"))?;
    let steps: Vec<steps::Step> = pace.read_lines(&folder.join("steps.jsonl"))?;
    if !world.wait_until_ready(START)? {
        let ids = cases.iter().map(|case| &case.id);
        let ids = ids.chain(
            steps
                .iter()
                .filter(|step| step.is_judged())
                .map(steps::Step::id),
        );
        let down = || vec![format!("the server did not start:\n{}", world.log())];
        return Ok(ids
            .map(|id| Verdict {
                id: id.clone(),
                differences: down(),
                quirk: None,
            })
            .collect());
    }
    let mut verdicts = Vec::new();
    for case in &cases {
        verdicts.push(Verdict {
            id: case.id.clone(),
            differences: ask(&world, case)?.differences(&world, case)?,
            quirk: case.quirk.clone(),
        });
    }
    for step in &steps {
        let (begin, pause) = (Instant::now(), Duration::from_millis(step.pauses_ms()));
        verdicts.extend(step.carry_out(&mut world)?);
        world.lateness += begin.elapsed().saturating_sub(pause);
    }
    let problems = world.script_problems();
    if !problems.is_empty() {
        verdicts.push(Verdict {
            id: "scripts".to_owned(),
            differences: problems,
            quirk: None,
        });
    }
    Ok(verdicts)
}

/// Result of a recorded query.
pub(super) struct Asked {
    observed: client::Observed,
    /// Time until the reply, in milliseconds.
    elapsed_ms: u64,
    /// Queries received by the scripted servers meanwhile.
    upstream: Counts,
}

/// Sends a recorded query.
pub(super) fn ask(world: &World<'_>, case: &Case) -> Result<Asked> {
    let expects_silence = case
        .expect
        .as_ref()
        .is_some_and(|expect| expect.no_response);
    let default = if expects_silence { SILENCE } else { TIMEOUT };
    let before = world.upstream_counts();
    let begin = Instant::now();
    let timeout = case.timeout_ms.map_or(default, Duration::from_millis);
    let observed = client::ask(&case.q, &world.ports, timeout)?;
    let elapsed_ms = u64::try_from(begin.elapsed().as_millis())?;
    thread::sleep(Duration::from_millis(case.count_after_ms));
    Ok(Asked {
        observed,
        elapsed_ms,
        upstream: growth(&before, world.upstream_counts()),
    })
}

impl Asked {
    /// Returns the differences from the recording.
    pub(super) fn differences(&self, world: &World<'_>, case: &Case) -> Result<Vec<String>> {
        let mut found = expect::differences(case, &self.observed, world.source, world.late())?;
        if let Some(elapsed) = case
            .elapsed_ms
            .filter(|elapsed| !elapsed.holds(self.elapsed_ms))
        {
            found.push(format!(
                "took {} ms, not {} to {}",
                self.elapsed_ms, elapsed.min, elapsed.max
            ));
        }
        if let Some(wanted) = case
            .upstream
            .as_ref()
            .filter(|wanted| **wanted != self.upstream)
        {
            found.push(format!(
                "upstream queries: want {wanted:?}, got {:?}",
                self.upstream
            ));
        }
        for (name, wanted) in case.upstream_last.iter().flatten() {
            let last = world.upstream_last(name);
            let got = last.map(|last| match wanted {
                Value::Object(members) => members
                    .keys()
                    .map(|key| (key.clone(), last[key].clone()))
                    .collect(),
                _ => last,
            });
            let got = got.unwrap_or(Value::Null);
            if got != *wanted {
                found.push(format!("{name} saw: want {wanted}, got {got}"));
            }
        }
        Ok(found)
    }
}

/// Returns the increase of each counter, without unchanged ones.
fn growth(before: &Counts, after: Counts) -> Counts {
    let grown = |(name, counts): (String, BTreeMap<String, u64>)| {
        let before = before.get(&name);
        let counts = counts.into_iter().map(|(proto, count)| {
            let before = before
                .and_then(|before| before.get(&proto))
                .copied()
                .unwrap_or(0);
            (proto, count - before)
        });
        let counts: BTreeMap<String, u64> = counts.filter(|(_, count)| *count > 0).collect();
        (!counts.is_empty()).then_some((name, counts))
    };
    after.into_iter().filter_map(grown).collect()
}
