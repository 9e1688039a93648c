//! Formats plans as text and JSON. Pure.

use serde_json::{Value, json};

use crate::{engine::Planned, plan::Action, record::Record};

/// Formats an action as one line that starts with `+`, `~`, `-` or `=`.
pub fn line(action: &Action) -> String {
    match action {
        Action::Create(record) => format!("+ {record}"),
        Action::Update { before, after } => match change(before, after) {
            Some(change) => format!("~ {} {}: {change}", before.name, before.record_type),
            None => format!("~ {before} -> {after}"),
        },
        Action::Delete(record) => format!("- {record}"),
        Action::Release(record) => format!("= {record}: remains without an owner"),
        Action::DropOrphan(record) => {
            format!("- {} {}: owner record of {:?}", record.name, record.record_type, record.labels.owner())
        }
    }
}

/// Returns the changed members of a set.
fn change(before: &Record, after: &Record) -> Option<String> {
    let mut parts = Vec::new();
    if let (Some(new), old) = (after.ttl, before.ttl)
        && Some(new) != old
    {
        parts.push(format!("ttl {} -> {new}", old.unwrap_or(0)));
    }
    parts.extend(before.targets.difference(&after.targets).map(|target| format!("-{target}")));
    parts.extend(after.targets.difference(&before.targets).map(|target| format!("+{target}")));
    if before.labels.owner() != after.labels.owner() {
        let shown = |owner: &str| if owner.is_empty() { "none".to_owned() } else { format!("{owner:?}") };
        parts.push(format!("owner {} -> {}", shown(before.labels.owner()), shown(after.labels.owner())));
    }
    if before.properties != after.properties {
        parts.push(format!("properties {:?} -> {:?}", before.properties, after.properties));
    }
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// Formats the plan of one provider as lines, coloured for terminals. `confirmed` is the number of
/// deletions that the operator allows.
pub fn text(
    name: &str,
    planned: &Planned,
    failures: &[String],
    confirmed: Option<usize>,
    is_coloured: bool,
) -> String {
    // Zones and servers belong to others, whose text must not reach the terminal raw.
    let paint = |code: &str, line: &str| match (is_coloured, dns_core::terminal::line(line)) {
        (true, line) => format!("\x1b[{code}m{line}\x1b[0m\n"),
        (false, line) => format!("{line}\n"),
    };
    let mut shown = paint("1", &format!("{name}:"));
    for zone in &planned.zones {
        for action in zone.plan.actions() {
            let code = match action {
                Action::Create(_) => "32",
                Action::Update { .. } => "33",
                Action::Delete(_) | Action::DropOrphan(_) => "31",
                Action::Release(_) => "36",
            };
            shown.push_str(&paint(code, &format!("  {}", line(action))));
        }
        for note in &zone.plan.notes {
            shown.push_str(&paint("2", &format!("  # {note}")));
        }
        if let Err(refusal) = planned.check(zone, confirmed) {
            shown.push_str(&paint("1;31", &format!("  ! {}: {refusal}", zone.id)));
        }
    }
    for note in &planned.notes {
        shown.push_str(&paint("2", &format!("  # {note}")));
    }
    for failure in failures {
        shown.push_str(&paint("1;31", &format!("  ! {failure}")));
    }
    if planned.is_empty() && planned.notes().next().is_none() && failures.is_empty() {
        shown.push_str("  nothing to do\n");
    }
    shown
}

/// Formats the plan of one provider as JSON.
pub fn json(planned: &Planned, failures: &[String]) -> Value {
    let actions = planned.zones.iter().flat_map(|zone| zone.plan.actions());
    let actions: Vec<(&str, Value)> = actions
        .map(|action| match action {
            Action::Create(record) => ("create", json!(record.to_string())),
            Action::Update { before, after } => ("update", json!([before.to_string(), after.to_string()])),
            Action::Delete(record) => ("delete", json!(record.to_string())),
            Action::Release(record) => ("release", json!(record.to_string())),
            Action::DropOrphan(record) => ("drop_orphan", json!(record.to_string())),
        })
        .collect();
    let lines = |kind: &str| -> Vec<&Value> {
        actions.iter().filter(|(found, _)| *found == kind).map(|(_, line)| line).collect()
    };
    let notes = planned.notes();
    let refusals = planned.zones.iter().filter_map(|zone| planned.check(zone, None).err());
    json!({
        "create": lines("create"),
        "update": lines("update"),
        "delete": lines("delete"),
        "release": lines("release"),
        "drop_orphan": lines("drop_orphan"),
        "notes": notes.map(ToString::to_string).collect::<Vec<_>>(),
        "needs_confirmation": refusals.map(|refusal| refusal.to_string()).collect::<Vec<_>>(),
        "errors": failures,
    })
}
