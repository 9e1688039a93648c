//! Time limits of a replay. A recording is of an idle machine; on a busy one, a prompt reply may take
//! seconds, and must not be taken for the late reply or the silence that a scenario is about.

use std::path::Path;

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::scenario::{read_json, read_json_lines};

/// Factor of all times in a scenario in which something is late or silent on purpose.
const SLOWER: u64 = 4;

/// Settings that limit the time of an answer. In a scenario in which nothing is late on purpose, they
/// are reached only on failure.
const LIMITS: [(&str, &str); 3] = [
    ("/recursor_timeout", "60s"),
    ("/request_timeout", "100s"),
    ("/health/synchronous_check_timeout", "60s"),
];

/// Members of a script that make a reply late, or one that the server does not take for the reply.
const LATE: [&str; 7] = [
    "delay_ms",
    "drop",
    "wrong_id",
    "raw",
    "cut",
    "no_question",
    "question",
];

/// `recursor_timeout` if something is late, and answers age meanwhile.
const AGING: &str = "2s";

/// The pace of a scenario's replay.
#[derive(Clone, Copy, Debug)]
pub struct Pace(u64);

impl Default for Pace {
    /// Returns the pace of the recording.
    fn default() -> Self {
        Self(1)
    }
}

impl Pace {
    /// Returns the pace for a scenario.
    pub fn of(scenario: &Value) -> Self {
        // TTLs pass in real time.
        let is_slower = is_late(scenario) && !is_cached(scenario);
        Self(if is_slower { SLOWER } else { 1 })
    }

    /// Reads `scenario.json`.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read or contains unknown members.
    pub fn read_scenario<T: DeserializeOwned>(path: &Path) -> Result<(Self, T)> {
        let mut scenario: Value = read_json(path)?;
        let pace = Self::of(&scenario);
        pace.stretch(&mut scenario);
        if !is_late(&scenario) {
            for (setting, limit) in LIMITS {
                if let Some(setting) = scenario["config"].pointer_mut(setting) {
                    *setting = json!(limit);
                }
            }
        } else if is_cached(&scenario) {
            scenario["config"]["recursor_timeout"] = json!(AGING);
        }
        let scenario = serde_json::from_value(scenario).with_context(|| path.display().to_string());
        Ok((pace, scenario?))
    }

    /// Reads a scenario's cases or steps; none if the file does not exist.
    ///
    /// # Errors
    ///
    /// Same as [`Self::read_scenario`]; the error contains the line number.
    pub fn read_lines<T: DeserializeOwned>(self, path: &Path) -> Result<Vec<T>> {
        let lines: Vec<Value> = read_json_lines(path)?.unwrap_or_default();
        let mut read = Vec::with_capacity(lines.len());
        for (number, mut line) in lines.into_iter().enumerate() {
            self.stretch(&mut line);
            let line = serde_json::from_value(line);
            read.push(line.with_context(|| format!("{}: line {}", path.display(), number + 1))?);
        }
        Ok(read)
    }

    /// Multiplies all times in a document.
    fn stretch(self, value: &mut Value) {
        match value {
            Value::Object(members) => {
                for (name, member) in members {
                    match name.as_str() {
                        "ms" | "delay_ms" | "count_after_ms" | "timeout_ms" => {
                            self.multiply(member)
                        }
                        "elapsed_ms" => {
                            self.multiply(&mut member["min"]);
                            self.multiply(&mut member["max"]);
                        }
                        "recursor_timeout"
                        | "request_timeout"
                        | "check_interval"
                        | "synchronous_check_timeout" => self.multiply_duration(member),
                        _ => self.stretch(member),
                    }
                }
            }
            Value::Array(items) => {
                for item in items {
                    self.stretch(item);
                }
            }
            _ => {}
        }
    }

    fn multiply(self, number: &mut Value) {
        if let Some(milliseconds) = number.as_u64() {
            *number = json!(milliseconds * self.0);
        }
    }

    /// Multiplies a duration such as `400ms`.
    fn multiply_duration(self, duration: &mut Value) {
        let text = duration.as_str().unwrap_or_default();
        let digits = text.trim_end_matches(|letter: char| !letter.is_ascii_digit());
        if let Ok(number) = digits.parse::<u64>() {
            *duration = json!(format!("{}{}", number * self.0, &text[digits.len()..]));
        }
    }
}

fn is_late(scenario: &Value) -> bool {
    let scripts = ["recursors", "http", "health"];
    scripts.iter().any(|scripts| has_late(&scenario[scripts]))
}

fn is_cached(scenario: &Value) -> bool {
    scenario["config"]["cache"]["enabled"] == true
}

/// Returns whether a script has a late reply, or none.
fn has_late(script: &Value) -> bool {
    match script {
        Value::Object(members) => members
            .iter()
            .any(|(name, member)| LATE.contains(&name.as_str()) || has_late(member)),
        Value::Array(items) => items.iter().any(has_late),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_replies_multiply_times() {
        let mut scenario = json!({
            "config": {"recursor_timeout": "400ms", "health": {"check_interval": "1s"}, "port": 53},
            "recursors": {"RECURSOR1": {"rules": [{"name": "a.", "action": {"delay_ms": 1500}}]}},
        });
        let pace = Pace::of(&scenario);
        pace.stretch(&mut scenario);
        let wanted = json!({
            "config": {"recursor_timeout": "1600ms", "health": {"check_interval": "4s"}, "port": 53},
            "recursors": {"RECURSOR1": {"rules": [{"name": "a.", "action": {"delay_ms": 6000}}]}},
        });
        assert_eq!(scenario, wanted);
        let mut step = json!({"do": "query", "elapsed_ms": {"min": 900, "max": 2200}, "ms": 5});
        pace.stretch(&mut step);
        let wanted = json!({"do": "query", "elapsed_ms": {"min": 3600, "max": 8800}, "ms": 20});
        assert_eq!(step, wanted);
    }

    #[test]
    fn times_stay_where_none_is_late() {
        let script =
            json!({"RECURSOR1": {"rules": [{"action": {"answers": [["@", "A", 5, "x"]]}}]}});
        assert_eq!(Pace::of(&json!({"recursors": script})).0, 1);
        for late in LATE {
            let script = json!({"RECURSOR1": {"rules": [{"seq": [{}, {late: 1}]}]}});
            assert_eq!(Pace::of(&json!({"recursors": script})).0, SLOWER, "{late}");
        }
    }
}
