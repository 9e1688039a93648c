//! A field of the commands' JSON has the same type wherever it occurs.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use whole_system_tests::{metrics::wait_for_fast_path, namespace::Namespace, requires};

use crate::{dnsmasq, running::Running};

/// Objects whose members are named by data: kinds of files, tags, outcomes, interfaces.
const MAPS: &[&str] = &[
    "files",
    "last_reload",
    "last_failure",
    "failures",
    "outcomes",
    "tags",
    "by_interface",
    "fallbacks",
];

/// Types of each field, with the places where they occur.
type Types = BTreeMap<String, BTreeMap<&'static str, BTreeSet<String>>>;

fn type_of(value: &Value) -> Option<&'static str> {
    Some(match value {
        Value::Null => return None,
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "text",
        Value::Array(_) => "list",
        Value::Object(_) => "object",
    })
}

/// Notes the types of all members of `value`, which is at `place`.
fn note(value: &Value, place: &str, types: &mut Types) {
    match value {
        Value::Object(members) => {
            let is_map = MAPS.iter().any(|map| place.ends_with(map));
            for (name, member) in members {
                if let Some(found) = type_of(member).filter(|_| !is_map) {
                    types
                        .entry(name.clone())
                        .or_default()
                        .entry(found)
                        .or_default()
                        .insert(place.to_owned());
                }
                note(member, &format!("{place}.{name}"), types);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| note(item, place, types)),
        _ => {}
    }
}

#[test]
fn fields_have_one_type() -> Result<()> {
    requires!(namespaces, bpf);
    let namespace = Namespace::new("types")?;
    let (_recursor, address) = dnsmasq::start(&namespace, 10)?;
    let running = Running::start_in(
        namespace,
        &json!({
            "xdp": {"mode": "tc", "interfaces": ["lo"]}, "disable_recursors": false, "recursors": [address],
            "cache": {"enabled": true},
        }),
    )?;
    wait_for_fast_path(&running.namespace)?;
    running.ask("www.example.org.", 2)?;
    running.ask("www.elsewhere.test.", 1)?;
    let mut types = Types::new();
    for arguments in [
        &["status", "--json"][..],
        &["check", "--json"],
        &["instances", "--json"],
        &["local-groups", "--json"],
        &["resolve", "--json", "web.alias"],
        &["resolve", "--json", "www.example.org"],
        &["log", "--json"],
        &["reload", "--json"],
        &["flush", "--json"],
        &["top", "--json", "--seconds", "1"],
    ] {
        let (_, text, problem) = running.cli(arguments)?;
        let mut documents = serde_json::Deserializer::from_str(&text)
            .into_iter::<Value>()
            .peekable();
        ensure!(documents.peek().is_some(), "{arguments:?}: {text}{problem}");
        for document in documents {
            note(&document?, arguments[0], &mut types);
        }
    }
    let tapped = std::thread::scope(|scope| {
        let tap =
            scope.spawn(|| running.cli(&["tap", "--json", "--count", "4", "--seconds", "20"]));
        while !tap.is_finished() {
            running.ask("q-s0.q-g1.bosh.", 1)?;
            running.ask("www.example.org.", 1)?;
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        tap.join().expect("the commands do not panic")
    })?;
    for line in tapped.1.lines() {
        note(&serde_json::from_str(line)?, "tap", &mut types);
    }
    types.retain(|_, found| found.len() > 1);
    ensure!(types.is_empty(), "{types:#?}");
    Ok(())
}
