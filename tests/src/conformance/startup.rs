//! Server starts: accepted and rejected configurations and files, and the answers after a start.

use std::{collections::BTreeMap, path::Path, time::Duration};

use anyhow::Result;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    client,
    expect::compare,
    replay::Verdict,
    scenario::{Expect, Query, Scenario},
    world::World,
};

/// Time limit for a server's start, or for its end if it should not start.
const START: Duration = Duration::from_secs(120);

const TIMEOUT: Duration = Duration::from_secs(120);

/// Time in which a server that started may end.
const ENDS_MS: u64 = 400;

/// Milliseconds for which a started server must keep running.
const SETTLE_MS: u64 = 200;

/// A line of `startup.jsonl`: a fresh server with these changes.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Start {
    pub id: String,
    #[serde(default, rename = "why")]
    _why: String,
    /// Members merged into the configuration, recursing into objects.
    #[serde(default)]
    config_merge: Map<String, Value>,
    /// Members removed from the configuration.
    #[serde(default)]
    config_remove: Vec<String>,
    /// Files in the scratch folder, as text or as a document.
    #[serde(default)]
    files: BTreeMap<String, Value>,
    /// Replaces the whole configuration file.
    config_text: Option<String>,
    /// Arguments of the program.
    args: Option<String>,
    /// Time limit in milliseconds for the server to exit, if it should.
    within_ms: Option<u64>,
    /// Queries after the start.
    #[serde(default)]
    queries: Vec<Query>,
    pub expect: Option<Started>,
    /// Reason for which the server may behave differently.
    pub quirk: Option<String>,
}

/// Recorded result of a start.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Started {
    starts: bool,
    /// Only compared as zero or nonzero.
    exit_code: Option<i32>,
    /// One answer per query.
    #[serde(default)]
    answers: Vec<Expect>,
}

impl Start {
    /// Returns the queries with their recorded replies.
    pub fn exchanges(&self) -> impl Iterator<Item = (&Query, &Expect)> {
        let answers = self.expect.iter().flat_map(|expect| &expect.answers);
        self.queries.iter().zip(answers)
    }

    /// Starts the server and sends the queries.
    pub(super) fn replay(
        &self,
        mut scenario: Scenario,
        folder: &Path,
        certificates: &Path,
        command: &str,
    ) -> Result<Verdict> {
        scenario.settle_ms = SETTLE_MS;
        let mut world = self.world(scenario, folder, certificates)?;
        let program = command.split_whitespace().next().unwrap_or_default();
        let with_arguments = self
            .args
            .as_ref()
            .map(|arguments| format!("{program} {arguments}"));
        world.launch(with_arguments.as_deref().unwrap_or(command))?;
        let ready = world.wait_until_ready(START)?;
        let should_end = self.expect.as_ref().is_some_and(|expect| !expect.starts);
        // Some end a while after they have listened.
        let limit = match self.within_ms {
            Some(_) if should_end => START,
            within => Duration::from_millis(within.unwrap_or(ENDS_MS)),
        };
        let exit_code = world.wait_for_exit(limit)?;
        let differences = self.differences(&world, ready, exit_code)?;
        Ok(Verdict {
            id: self.id.clone(),
            differences,
            quirk: self.quirk.clone(),
        })
    }

    /// Builds the surroundings with the changed configuration and files.
    ///
    /// # Errors
    ///
    /// Same as [`World::new`].
    pub fn world<'a>(
        &self,
        mut scenario: Scenario,
        folder: &'a Path,
        certificates: &'a Path,
    ) -> Result<World<'a>> {
        self.change(&mut scenario.config);
        let world = World::new(scenario, folder, certificates)?;
        world.write_config()?;
        for (path, contents) in &self.files {
            let text = contents
                .as_str()
                .map_or_else(|| contents.to_string(), str::to_owned);
            world.write_file(path, &text, true)?;
        }
        if let Some(text) = &self.config_text {
            world.write_file("config.json", text, true)?;
        }
        Ok(world)
    }

    fn change(&self, config: &mut Value) {
        let Some(config) = config.as_object_mut() else {
            return;
        };
        for key in &self.config_remove {
            config.remove(key);
        }
        for (key, value) in &self.config_merge {
            match (config.get_mut(key), value) {
                (Some(Value::Object(members)), Value::Object(more)) => members.extend(more.clone()),
                _ => drop(config.insert(key.clone(), value.clone())),
            }
        }
        // A busy machine answers its own up-checks late.
        let starts = self.expect.as_ref().is_some_and(|expect| expect.starts);
        if let Some(timeout) = config.get_mut("timeout")
            && starts
        {
            *timeout = "60s".into();
        }
    }

    /// Returns the differences from the recording.
    fn differences(
        &self,
        world: &World<'_>,
        ready: bool,
        exit_code: Option<i32>,
    ) -> Result<Vec<String>> {
        let Some(expected) = &self.expect else {
            return Ok(Vec::new());
        };
        let mut found = Vec::new();
        let starts = ready && exit_code.is_none();
        if starts != expected.starts {
            let log = world.log();
            found.push(format!(
                "starts: want {}, got {starts} (exit code {exit_code:?})\n{log}",
                expected.starts
            ));
            return Ok(found);
        }
        if !starts && (expected.exit_code == Some(0)) != (exit_code == Some(0)) {
            found.push(format!(
                "exit code: want {:?}, got {exit_code:?}",
                expected.exit_code
            ));
        }
        if starts && expected.answers.len() != self.queries.len() {
            found.push("the recording lacks an expectation for some query".to_owned());
        }
        for (query, expected) in self.queries.iter().zip(&expected.answers) {
            let observed = client::ask(query, &world.ports, TIMEOUT)?;
            found.extend(compare(query, expected, &observed, world.source, 0)?);
        }
        Ok(found)
    }
}
