//! Alert rules and documentation, generated from the table.
//!
//! Both files are committed; `UPDATE_REFERENCES=1 cargo nextest run -p dns-resolver conditions` rewrites
//! their generated parts.

use std::{collections::BTreeSet, fmt::Write as _, fs, path::PathBuf};

use super::{CheckResult, Condition, TABLE};

/// The line that precedes the generated alerts, which are the rest of the file.
const RULES_BEGIN: &str =
    "  # Generated from the conditions of the server (docs/troubleshooting.md).\n";

/// The lines around the generated table.
const PAGE_BEGIN: &str = "<!-- conditions: generated -->\n";
const PAGE_END: &str = "<!-- conditions: end -->\n";

fn rules() -> String {
    let mut text = RULES_BEGIN.to_owned();
    text.push_str("  - name: bosh-dns-xdp-conditions\n    rules:\n");
    for condition in TABLE {
        let Condition {
            name,
            check,
            words,
            consequence,
            remedy,
            alert,
            ..
        } = condition;
        let summary = format!(
            "{{{{ $labels.instance }}}}: {check}: {}: {consequence}",
            words.trim_end_matches([':', ' '])
        );
        let action = format!("`bosh-dns-xdp status` on the VM names the cause; {remedy}");
        let mut expression = format!("bosh_dns_xdp_condition{{condition=\"{name}\"}} == 1");
        if let Some(counter) = alert.rising {
            let _ = write!(
                expression,
                " and on (job, instance) sum by (job, instance) (increase({counter}[{}])) > 0",
                alert.after
            );
        }
        let _ = write!(
            text,
            "      - alert: {}\n        expr: {expression}\n        \
             for: {}\n        labels:\n          severity: {}\n          condition: {name}\n        \
             annotations:\n          \
             summary: {}\n          action: {}\n\n",
            alert.name,
            alert.after,
            alert.severity,
            quoted(&summary),
            quoted(&action)
        );
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}

/// Formats a YAML text. Prometheus expands `$` only inside double braces.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

fn table() -> String {
    let mut text = PAGE_BEGIN.to_owned();
    text.push_str(
        "\n| Condition | Check, result | The line says | Consequence | Remedy | Alert |\n|---|---|---|---|---|---|\n",
    );
    for condition in TABLE {
        let result = match condition.result {
            CheckResult::Ok | CheckResult::Degraded => "warn",
            CheckResult::NotReady => "fail: not ready",
            CheckResult::NotAlive => "fail: not alive",
        };
        let _ = writeln!(
            text,
            "| `{}` | {}, {result} | `{}` | {} | {} | `{}` |",
            condition.name,
            condition.check,
            condition.words.trim(),
            condition.consequence.replace('|', "\\|"),
            condition.remedy.replace('|', "\\|"),
            condition.alert.name
        );
    }
    text.push('\n');
    text.push_str(PAGE_END);
    text
}

/// Compares a part of a file with `wanted`, or replaces it. The part is from the beginning of `begin`
/// to the end of `end`, or to the end of the file.
fn compare(file: &str, begin: &str, end: Option<&str>, wanted: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(file);
    let text = fs::read_to_string(&path).unwrap();
    let (before, rest) = text
        .split_once(begin)
        .unwrap_or_else(|| panic!("{file} lacks {begin:?}"));
    let after = end.map_or("", |end| rest.split_once(end).unwrap().1);
    let current = format!("{before}{wanted}{after}");
    if std::env::var_os("UPDATE_REFERENCES").is_some() {
        fs::write(&path, current).unwrap();
    } else {
        assert_eq!(text, current, "{file}: UPDATE_REFERENCES=1 rewrites it");
    }
}

#[test]
fn alert_rules_follow_conditions() {
    compare("deploy/prometheus/rules.yml", RULES_BEGIN, None, &rules());
}

#[test]
fn troubleshooting_page_follows_conditions() {
    compare(
        "docs/troubleshooting.md",
        PAGE_BEGIN,
        Some(PAGE_END),
        &table(),
    );
}

#[test]
fn conditions_have_unique_names() {
    let names: BTreeSet<&str> = TABLE.iter().map(|condition| condition.name).collect();
    assert_eq!(names.len(), TABLE.len());
    assert!(TABLE.len() >= 40, "{} conditions", TABLE.len());
    for condition in TABLE {
        assert!(
            condition.result != CheckResult::Ok
                && !condition.words.is_empty()
                && !condition.consequence.is_empty()
                && !condition.remedy.is_empty(),
            "{}",
            condition.name
        );
    }
}
