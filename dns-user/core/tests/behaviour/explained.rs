//! `explain`: why a name has its answer.

use std::net::IpAddr;

use dns_core::resolve::{Health, HealthState, explain};

use super::{fleet, name, row, snapshot_of};

/// Running, except for the addresses with even last bytes; that of instance 6 is not known.
struct OddRunning;

impl Health for OddRunning {
    fn state(&self, ip: IpAddr, _group: Option<&str>) -> HealthState {
        match ip {
            IpAddr::V4(ip) if ip.octets()[3] == 6 => HealthState::Unknown,
            IpAddr::V4(ip) if ip.octets()[3] % 2 == 0 => HealthState::Failing,
            _ => HealthState::Running,
        }
    }
}

fn text(asked: &str) -> String {
    let snapshot = fleet(&[
        ("a", 1, "web"),
        ("b", 2, "web"),
        ("c", 3, "db"),
        ("f", 6, "web"),
    ]);
    explain(&snapshot, &OddRunning, &name(asked)).to_string()
}

#[test]
fn explanations_are_complete() {
    assert_eq!(
        text("q-s3y1.q-g1.bosh"),
        "q-s3y1.q-g1.bosh.\n  ours, by bosh.\n  q-s3y1.q-g1.bosh.: short form in bosh.\n    group id 1\n    \
         3 matches, health filter healthy: running\n    + 10.0.0.1 a web.net.dep (running)\n    \
         - 10.0.0.2 b web.net.dep (failing)\n    - 10.0.0.6 f web.net.dep (unknown)\n  NOERROR 10.0.0.1\n  \
         a query starts health checks and waits for the first ones\n"
    );
    assert_eq!(
        text("web.alias"),
        "web.alias.\n  ours, by web.alias.\n  alias web.alias. with 1 targets\n  q-s0.web.net.dep.bosh.: long form in \
         bosh.\n    instance group web; network net; deployment dep\n    3 matches, health filter smart: running and \
         unchecked instances, or all if there are none\n    + 10.0.0.1 a web.net.dep (running)\n    \
         - 10.0.0.2 b web.net.dep (failing)\n    - 10.0.0.6 f web.net.dep (unknown)\n  NOERROR 10.0.0.1\n  \
         a query starts health checks\n"
    );
}

#[test]
fn forms_and_filters_are_named() {
    for (asked, parts) in [
        (
            "fixed.alias",
            &[
                "10.0.0.9: address",
                "NOERROR 10.0.0.9",
                "starts no health checks",
            ][..],
        ),
        (
            "a.any.alias",
            &[
                "alias _.any.alias. with 1 targets",
                "instance id a;",
                "smart: a single match",
            ],
        ),
        (
            "agent-a.bosh-agent-id",
            &[
                "agent-a.bosh-agent-id.: agent\n",
                "agent id agent-a",
                "1 matches",
            ],
        ),
        (
            "a.elsewhere",
            &["not a local name", "outside all domains", "instance id a\n"],
        ),
        (
            "q-s1.q-g1.bosh",
            &[
                "unhealthy: failing",
                "- 10.0.0.1 ",
                "+ 10.0.0.2 ",
                "NOERROR 10.0.0.2",
            ],
        ),
        (
            "q-s4.q-g1.bosh",
            &["health filter all", "+ 10.0.0.1 ", "+ 10.0.0.6 "],
        ),
        (
            "q-a1i2m3n4s4.q-g1.bosh",
            &[
                "group id 1; az_id 1; index 2; num_id 3; network_id 4",
                "0 matches",
                "NXDOMAIN",
            ],
        ),
        ("q-m1m2s0.q-g1.bosh", &["num_id 1 or 2"]),
        (
            "q-s0.w*.*et.*.bosh",
            &["instance group beginning with w; network ending in et\n"],
        ),
        (
            "q-s0.w*b.net.dep.bosh",
            &["instance group with an inner star, which matches none"],
        ),
        (
            "q-x.q-g1.bosh",
            &[
                "malformed",
                "the first label is a filter without any",
                "FORMERR",
            ],
        ),
        (
            "a.b.bosh.bosh",
            &["malformed", "one label (short form) or three"],
        ),
    ] {
        let found = text(asked);
        for part in parts {
            assert!(found.contains(part), "{asked}: {part:?} in {found}");
        }
    }
    // Outside the domains nothing is answered.
    assert!(!text("a.elsewhere").contains("NOERROR"));
}

#[test]
fn long_lists_are_cut() {
    let rows: Vec<String> = (0..22)
        .map(|number| row(&format!("i{number}"), 1, "web"))
        .collect();
    let rows: Vec<&str> = rows.iter().map(String::as_str).collect();
    for (count, more) in [
        (20, None),
        (21, Some("and 1 more\n")),
        (22, Some("and 2 more\n")),
    ] {
        let snapshot = snapshot_of(&rows[..count], "");
        let text = explain(&snapshot, &OddRunning, &name("q-s4.q-g1.bosh")).to_string();
        assert_eq!(text.matches("    + 10.0.0.1 i").count(), 20);
        assert_eq!(text.contains(" more\n"), more.is_some(), "{count}");
        assert!(more.is_none_or(|more| text.contains(more)), "{text}");
    }
}

#[test]
fn placeholders_are_criteria() {
    let aliases = |kind: &str| {
        format!(
            r#", "aliases": {{"_.p.alias": [{{"group_id": "1", "root_domain": "bosh", "placeholder_type": "{kind}"}}]}}"#
        )
    };
    for (kind, asked, criterion) in [
        ("uuid", "a.p.alias", "num_id 1"),
        ("index", "1.p.alias", "index 1"),
        ("az", "z1.p.alias", "availability zone z1"),
        ("availability_zone", "z1.p.alias", "availability zone z1"),
        ("network", "net.p.alias", "network net"),
    ] {
        let rows = [row("a", 1, "web"), row("b", 2, "db")];
        let snapshot = snapshot_of(&rows.each_ref().map(String::as_str), &aliases(kind));
        let text = explain(&snapshot, &OddRunning, &name(asked)).to_string();
        assert!(
            text.contains(&format!("group id 1; {criterion}\n")),
            "{kind}: {text}"
        );
        assert!(text.contains("NOERROR 10.0.0.1\n"), "{kind}: {text}");
    }
}
