//! Behaviour of the pure core for settings, names, records and replies, through its public functions.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot build its input has failed"
)]

mod changed;
mod explained;
mod messages;
mod settings;

use dns_core::{
    catalog::{AliasFiles, Records, Snapshot},
    name::Name,
};

const ALIASES: &str = r#"{"web.alias": ["*.web.net.dep.bosh"], "fixed.alias": ["10.0.0.9"], "c.alias": ["c.db.net.dep.bosh"],
    "_.any.alias": ["_.web.net.dep.bosh"]}"#;

fn name(text: &str) -> Name {
    Name::from_text(text).unwrap()
}

/// Builds a snapshot of rows: id, number, group, group ids, zone, network, address, agent, index.
fn snapshot_of(rows: &[&str], more: &str) -> Snapshot {
    let rows = rows.join(", ");
    let text = format!(
        r#"{{"record_keys": ["id", "num_id", "instance_group", "group_ids", "az", "network", "ip", "agent_id",
            "instance_index", "deployment", "domain"], "record_infos": [{rows}]{more}}}"#
    );
    let (records, warnings) = Records::parse(text.as_bytes()).unwrap();
    assert_eq!(warnings, [] as [&str; 0]);
    let (aliases, _) = AliasFiles::parse([("aliases.json", ALIASES.as_bytes())]).unwrap();
    Snapshot::build(records, &aliases).0
}

/// Returns a row of the group `web`, or of `db`.
fn row(id: &str, number: u8, group: &str) -> String {
    let group_id = if group == "web" { 1 } else { 2 };
    format!(
        r#"["{id}", "{number}", "{group}", ["{group_id}"], "z{number}", "net", "10.0.0.{number}", "agent-{id}", {number},
            "dep", "bosh"]"#
    )
}

/// Returns a snapshot of rows as [`row`] makes them.
fn fleet(rows: &[(&str, u8, &str)]) -> Snapshot {
    let rows: Vec<String> = rows
        .iter()
        .map(|(id, number, group)| row(id, *number, group))
        .collect();
    snapshot_of(&rows.iter().map(String::as_str).collect::<Vec<_>>(), "")
}
