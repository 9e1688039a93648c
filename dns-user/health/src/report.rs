//! The body of a health server's response: `{"state": "running", "group_state": {"7": "failing"}}`.

use std::collections::BTreeMap;

use serde::Serialize;

use super::states::InstanceHealth;
use dns_core::{config::json::Json, resolve::HealthState};

/// Maximum length of a report in bytes: twice the space that [`MAX_GROUPS`] groups need.
pub(super) const MAX_REPORT: usize = 64 << 10;

/// Maximum number of groups in a report. An instance has one per link that its jobs provide.
const MAX_GROUPS: usize = 1024;

/// A health server's report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// State of the whole instance.
    pub state: &'static str,
    /// State of each link group; omitted if there are none (observed).
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub group_state: BTreeMap<String, &'static str>,
}

/// Reasons why a report is invalid.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReportError {
    /// The body is not JSON.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// The body is JSON with another structure.
    #[error("is {0}, not an object")]
    NoObject(&'static str),
    /// The states of groups have another structure.
    #[error("group_state is {0}, not an object")]
    NoGroups(&'static str),
    /// The body contains more groups than any instance has.
    #[error("group_state has more than {MAX_GROUPS} groups")]
    TooManyGroups,
    /// A state has another JSON type.
    #[error("a state is {0}, not text")]
    NoText(&'static str),
}

/// Parses a report by bosh-dns's rules (observed): member names in any letter case, unknown members
/// ignored; a state that is not a string invalidates the whole report, and so does text after the
/// end.
pub(super) fn parse(body: &[u8]) -> Result<InstanceHealth, ReportError> {
    let members = match Json::parse(body)? {
        Json::Object(members) => members,
        Json::Null => Vec::new(),
        other => return Err(ReportError::NoObject(other.kind())),
    };
    let mut state = HealthState::Unknown;
    let mut groups: BTreeMap<String, HealthState> = BTreeMap::new();
    for (name, value) in members {
        if name.eq_ignore_ascii_case("state") {
            state = text(&value)?.map_or(state, state_of);
        } else if name.eq_ignore_ascii_case("group_state") {
            match value {
                Json::Object(members) => {
                    for (group, value) in members {
                        let state = text(&value)?.map_or(HealthState::Unknown, state_of);
                        groups.insert(group, state);
                        if groups.len() > MAX_GROUPS {
                            return Err(ReportError::TooManyGroups);
                        }
                    }
                }
                Json::Null => groups.clear(),
                other => return Err(ReportError::NoGroups(other.kind())),
            }
        }
    }
    let groups = groups.into_iter().map(|(group, state)| (group.into_boxed_str(), state)).collect();
    Ok(InstanceHealth { state, groups })
}

/// Returns the text of a state, `None` for null; any other type is an error.
fn text(value: &Json) -> Result<Option<&str>, ReportError> {
    match value {
        Json::Text(text) => Ok(Some(text)),
        Json::Null => Ok(None),
        other => Err(ReportError::NoText(other.kind())),
    }
}

/// Parses the text of a state, case-sensitively. An instance may report itself as unchecked, and is
/// then treated as such (observed).
fn state_of(text: &str) -> HealthState {
    match text {
        "running" => HealthState::Running,
        "failing" => HealthState::Failing,
        "unchecked" => HealthState::Unchecked,
        _ => HealthState::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the state of the instance in `body`; `None` if the body is invalid.
    fn state(body: &str) -> Option<HealthState> {
        parse(body.as_bytes()).ok().map(|health| health.state)
    }

    #[test]
    fn bodies_are_read_like_bosh_dns() {
        assert_eq!(state(r#"{"state":"running"}"#), Some(HealthState::Running));
        assert_eq!(
            state(r#"{"STATE":"failing","more":{"x":1},"group_state":{}}"#),
            Some(HealthState::Failing)
        );
        assert_eq!(state(r#"{"state":"unchecked"}"#), Some(HealthState::Unchecked));
        for odd in ["{}", r#"{"state":null}"#, r#"{"state":"Running"}"#, r#"{"state":"unknown"}"#, "null"] {
            assert_eq!(state(odd), Some(HealthState::Unknown), "{odd}");
        }
        for broken in [
            "",
            "running",
            "[]",
            r#"{"state":1}"#,
            r#"{"state":"running"} x"#,
            r#"{"state":"running","group_state":{"1":5}}"#,
            r#"{"state":"running","group_state":[]}"#,
        ] {
            assert_eq!(state(broken), None, "{broken}");
        }
    }

    #[test]
    fn groups_are_read() {
        let health = parse(br#"{"state":"running","group_state":{"2":"odd","1":"failing"}}"#).unwrap();
        let groups: Vec<_> = health.groups.iter().map(|(group, state)| (&**group, *state)).collect();
        assert_eq!(groups, [("1", HealthState::Failing), ("2", HealthState::Unknown)]);
    }

    #[test]
    fn too_many_groups_are_refused() {
        let report = |groups: usize| {
            let groups: Vec<_> = (0..groups).map(|group| format!(r#""{group}":"failing""#)).collect();
            parse(format!(r#"{{"state":"running","group_state":{{{}}}}}"#, groups.join(",")).as_bytes())
        };
        assert_eq!(report(MAX_GROUPS).unwrap().groups.len(), MAX_GROUPS);
        assert!(matches!(report(MAX_GROUPS + 1), Err(ReportError::TooManyGroups)));
    }

    #[test]
    fn report_without_groups_omits_field() {
        let mut report = Report { state: "running", group_state: BTreeMap::new() };
        assert_eq!(serde_json::to_string(&report).unwrap(), r#"{"state":"running"}"#);
        report.group_state.insert("1".to_owned(), "failing");
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(text, r#"{"state":"running","group_state":{"1":"failing"}}"#);
        assert_eq!(parse(text.as_bytes()).unwrap().groups.len(), 1);
    }
}
