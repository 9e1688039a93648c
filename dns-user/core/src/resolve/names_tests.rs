//! Instances to which names resolve in every state of health, and the explanations of that.

use std::collections::BTreeSet;

use super::*;
use crate::catalog::{AliasFiles, RECORD_KEYS, Records};

/// Running, failing, unknown and unchecked instances, by the last byte of an IPv4 address; running by IPv6.
struct ByLastByte;

impl Health for ByLastByte {
    fn state(&self, ip: IpAddr, _group: Option<&str>) -> HealthState {
        match ip {
            IpAddr::V4(ip) => match ip.octets()[3] {
                1 => HealthState::Running,
                2 => HealthState::Failing,
                3 => HealthState::Unknown,
                _ => HealthState::Unchecked,
            },
            IpAddr::V6(_) => HealthState::Running,
        }
    }
}

fn build(rows: &[&str], more: &str, aliases: &str) -> Snapshot {
    let keys = RECORD_KEYS.map(|key| format!("{key:?}")).join(",");
    let rows = rows.join(",");
    let file = format!(r#"{{"record_keys": [{keys}], "record_infos": [{rows}]{more}}}"#);
    let (records, _) = Records::parse(file.as_bytes()).unwrap();
    let (aliases, _) = AliasFiles::parse([("aliases.json", aliases.as_bytes())]).unwrap();
    Snapshot::build(records, &aliases).0
}

fn snapshot() -> Snapshot {
    let rows = [
        r#"["a","1","web",["1"],"z1","1","net","1","dep","10.0.0.1","bosh","agent-a",0]"#,
        r#"["b","2","web",["1"],"z2","2","net","2","dep","10.0.0.2","bosh","agent-b",1]"#,
        r#"["c","3","web",["1"],"z1","1","net","1","dep","10.0.0.3","bosh","agent-c",2]"#,
        r#"["d","4","web",["1"],"z1","1","net2","1","dep","10.0.0.4","bosh","agent-d",10]"#,
        r#"["e","5","web",["1","2"],"z2","2","net","1","dep","nowhere","bosh","agent-e",3]"#,
        r#"["f","6","web",["2"],null,"2","net","1","dep","fd00::1","bosh","agent-f",4]"#,
    ];
    let definitions = r#", "aliases": {
        "_.z.alias": [{"group_id": "1", "root_domain": "bosh", "placeholder_type": "az", "health_filter": "all"}],
        "_.n.alias": [{"group_id": "1", "root_domain": "bosh", "placeholder_type": "network", "health_filter": "all"}],
        "_.i.alias": [{"group_id": "1", "root_domain": "bosh", "placeholder_type": "index", "health_filter": "all"}],
        "_.u.alias": [{"group_id": "1", "root_domain": "bosh", "placeholder_type": "uuid", "health_filter": "all"}]}"#;
    let aliases = r#"{"two.alias": ["q-s4.q-g1.bosh", "a.web.net.dep.bosh", "10.0.0.9", "fd00::9"],
        "_.any.alias": ["_.web.net.dep.bosh"]}"#;
    build(&rows, definitions, aliases)
}

fn name(text: &str) -> Name {
    Name::from_text(text).unwrap()
}

/// Returns a resolution with sorted addresses, which have no particular order.
fn resolution(text: &str) -> Option<Resolution> {
    let mut found = resolve(&snapshot(), &ByLastByte, &name(text))?;
    found.v4.sort_unstable();
    found.v6.sort_unstable();
    Some(found)
}

#[test]
fn filters_and_health_choose_addresses() {
    for (text, lasts, checked, synchronous) in [
        ("q-s0.q-g1.bosh", &[1, 4][..], &[1, 2, 3, 4][..], false),
        ("q-s1.q-g1.bosh", &[2], &[1, 2, 3, 4], false),
        ("q-s3.q-g1.bosh", &[1], &[1, 2, 3, 4], false),
        ("q-s4.q-g1.bosh", &[1, 2, 3, 4], &[1, 2, 3, 4], false),
        ("q-s4y1.q-g1.bosh", &[1, 2, 3, 4], &[1, 2, 3, 4], true),
        ("q-s4y0.q-g1.bosh", &[1, 2, 3, 4], &[1, 2, 3, 4], false),
        // A single match is returned regardless of health, unless the filter is another one.
        ("q-m2s0y1.q-g1.bosh", &[2], &[], false),
        ("q-m2s3y1.q-g1.bosh", &[], &[2], true),
        ("q-m2m3s0.q-g1.bosh", &[2, 3], &[2, 3], false),
        // No address, no check to wait for.
        ("q-m5s4y1.q-g1.bosh", &[], &[], false),
        ("q-m4m5s0y1.q-g1.bosh", &[4], &[4], true),
        ("q-a1s4.q-g1.bosh", &[1, 3, 4], &[1, 3, 4], false),
        ("q-a1a9s4.q-g1.bosh", &[1, 3, 4], &[1, 3, 4], false),
        ("q-a1a2s4.q-g1.bosh", &[1, 2, 3, 4], &[1, 2, 3, 4], false),
        ("q-n2s4.q-g1.bosh", &[2], &[2], false),
        ("q-i0s4.q-g1.bosh", &[1], &[1], false),
        ("q-i10s4.q-g1.bosh", &[4], &[4], false),
        ("q-i1i10i1s4.q-g1.bosh", &[2, 4], &[2, 4], false),
        ("q-i1i77s4.q-g1.bosh", &[2], &[2], false),
        ("q-i1a1m3s4.q-g1.bosh", &[], &[], false),
        ("q-s4.web.net2.dep.bosh", &[4], &[4], false),
        ("q-s4.*.net2.dep.bosh", &[4], &[4], false),
        ("q-m1m4s4.*.net.*.bosh", &[1], &[1], false),
        ("a.web.net.dep.bosh", &[1], &[], false),
        ("a.q-g1.bosh", &[1], &[], false),
        ("agent-b.bosh-agent-id", &[2], &[], false),
        // Each instance once, whatever number of targets it matches.
        ("two.alias", &[1, 2, 3, 4, 9], &[1, 2, 3, 4], false),
        ("z1.z.alias", &[1, 3, 4], &[1, 3, 4], false),
        ("z2.z.alias", &[2], &[2], false),
        ("net2.n.alias", &[4], &[4], false),
        ("net.n.alias", &[1, 2, 3], &[1, 2, 3], false),
        ("10.i.alias", &[4], &[4], false),
        ("c.u.alias", &[3], &[3], false),
        ("b.any.alias", &[2], &[], false),
    ] {
        let address = |last: &u8| Ipv4Addr::new(10, 0, 0, *last);
        let found = resolution(text).unwrap();
        assert_eq!(
            found.v4,
            lasts.iter().map(address).collect::<Vec<_>>(),
            "{text}"
        );
        let instances: Vec<IpAddr> = checked.iter().map(|last| address(last).into()).collect();
        let checks = Checks {
            tracked: !instances.is_empty(),
            instances,
            synchronous,
        };
        assert_eq!(found.checks, checks, "{text}");
        let is_empty = lasts.is_empty() && text.starts_with("q-i1a1m3");
        let existence = if is_empty {
            Existence::NoSuchName
        } else {
            Existence::Found
        };
        assert_eq!(found.existence, existence, "{text}");
    }
    let both = resolution("q-m5m6s0y1.q-g2.bosh").unwrap();
    let six: Ipv6Addr = "fd00::1".parse().unwrap();
    let expected = Resolution {
        existence: Existence::Found,
        v4: vec![],
        v6: vec![six],
        checks: Checks {
            instances: vec![six.into()],
            tracked: true,
            synchronous: true,
        },
    };
    assert_eq!(both, expected);
    let answer = LocalAnswer {
        existence: Existence::Found,
        v4: &[],
        v6: &[six],
    };
    assert_eq!(both.answer(), answer);
    assert_eq!(
        resolution("two.alias").unwrap().v6,
        ["fd00::9".parse::<Ipv6Addr>().unwrap()]
    );
}

#[test]
fn names_without_instances_have_no_data() {
    for (text, existence) in [
        ("q-s0.q-g9.bosh", Some(Existence::NoSuchName)),
        ("q-a9s4.q-g1.bosh", Some(Existence::NoSuchName)),
        ("q-m9s4.q-g1.bosh", Some(Existence::NoSuchName)),
        ("q-n9s4.q-g1.bosh", Some(Existence::NoSuchName)),
        // Every criterion must hold.
        ("q-a1m2s4.q-g1.bosh", Some(Existence::NoSuchName)),
        ("q-a2m1s4.q-g1.bosh", Some(Existence::NoSuchName)),
        ("q-n2m1s4.q-g1.bosh", Some(Existence::NoSuchName)),
        ("q-n1m2s4.q-g1.bosh", Some(Existence::NoSuchName)),
        ("q-a1n2s4.q-g1.bosh", Some(Existence::NoSuchName)),
        ("q-i1m1s4.q-g1.bosh", Some(Existence::NoSuchName)),
        ("q-i1a1s4.q-g1.bosh", Some(Existence::NoSuchName)),
        ("q-m1s4.q-g2.bosh", Some(Existence::NoSuchName)),
        ("q-m1s4.web.net2.dep.bosh", Some(Existence::NoSuchName)),
        ("a.web.net2.dep.bosh", Some(Existence::NoSuchName)),
        // Indexes are compared as texts, and as numbers of 64 bits.
        ("q-i00s4.q-g1.bosh", Some(Existence::NoSuchName)),
        ("q-i01s4.q-g1.bosh", Some(Existence::NoSuchName)),
        (
            "q-i99999999999999999999s4.q-g1.bosh",
            Some(Existence::NoSuchName),
        ),
        ("x.q-g1.bosh", Some(Existence::NoSuchName)),
        ("a.q-g2.bosh", Some(Existence::NoSuchName)),
        ("x.bosh-agent-id", Some(Existence::NoSuchName)),
        ("x.any.alias", Some(Existence::NoSuchName)),
        ("9.i.alias", None),
        ("q-x.q-g1.bosh", Some(Existence::Malformed)),
        ("x.bosh", Some(Existence::Malformed)),
        ("q-x.any.alias", Some(Existence::Malformed)),
        ("a.elsewhere", None),
        (".", None),
    ] {
        let expected = existence.map(Resolution::without_data);
        assert_eq!(resolution(text), expected, "{text}");
    }
}

#[test]
fn instances_are_found_across_domains() {
    let snapshot = snapshot();
    for (text, rows) in [
        ("q-s3.q-g1.bosh", Ok(&[0][..])),
        ("q-s4.q-g1.bosh", Ok(&[0, 1, 2, 3, 4])),
        ("q-s1.q-g1.bosh", Ok(&[1])),
        ("two.alias", Ok(&[0, 1, 2, 3, 4])),
        ("b.elsewhere", Ok(&[1])),
        (".", Ok(&[0, 3, 5])),
        ("q-s3.q-g2.bosh", Ok(&[5])),
        ("q-s1.q-g2.bosh", Ok(&[])),
        ("q-s0.q-g9.bosh", Err(Existence::NoSuchName)),
        ("x.elsewhere", Err(Existence::NoSuchName)),
        ("q-x.q-g1.bosh", Err(Existence::Malformed)),
    ] {
        let mut found = instances(&snapshot, &ByLastByte, &name(text));
        if let Ok(rows) = &mut found {
            rows.sort_unstable();
        }
        assert_eq!(found, rows.map(<[u32]>::to_vec), "{text}");
        let has_rows = rows.is_ok();
        assert_eq!(has_matches(&snapshot, &name(text)), has_rows, "{text}");
    }
    for (text, index) in [
        ("0", Some(0)),
        ("7", Some(7)),
        ("10", Some(10)),
        ("00", None),
        ("07", None),
        ("9223372036854775807", Some(i64::MAX)),
        ("9223372036854775808", None),
    ] {
        assert_eq!(super::index(text.as_bytes()), index, "{text}");
    }
}

/// Every instance runs only as a part of group 1.
struct FirstGroup;

impl Health for FirstGroup {
    fn state(&self, _ip: IpAddr, group: Option<&str>) -> HealthState {
        match group {
            Some("1") => HealthState::Running,
            _ => HealthState::Failing,
        }
    }
}

#[test]
fn requested_group_decides_health() {
    let snapshot = snapshot();
    for (text, count) in [
        ("q-s3.q-g1.bosh", 4),
        ("q-s1.q-g1.bosh", 0),
        ("q-s3.q-g2.bosh", 0),
        ("q-s1.q-g2.bosh", 1),
        ("q-s3.web.*.dep.bosh", 0),
        ("q-s1.web.*.dep.bosh", 5),
    ] {
        let found = resolve(&snapshot, &FirstGroup, &name(text)).unwrap();
        assert_eq!(found.v4.len() + found.v6.len(), count, "{text}");
    }
    assert_eq!(
        AllRunning.state(IpAddr::V4(Ipv4Addr::LOCALHOST), None),
        HealthState::Running
    );
}

#[test]
fn explanations_show_every_step() {
    let single = "smart: a single match is returned regardless of health";
    for (text, steps) in [
        (
            "q-m2s0.q-g1.bosh",
            format!(
                "  ours, by bosh.\n  q-m2s0.q-g1.bosh.: short form in bosh.\n    group id 1; num_id 2\n    \
                 1 matches, health filter {single}\n    + 10.0.0.2 b web.net.dep (failing)\n  NOERROR 10.0.0.2\n  \
                 a query starts no health checks\n"
            ),
        ),
        (
            "q-m5m6s4y1.q-g2.bosh",
            "  ours, by bosh.\n  q-m5m6s4y1.q-g2.bosh.: short form in bosh.\n    group id 2; num_id 5 or 6\n    \
             2 matches, health filter all\n    + no address e web.net.dep (unknown)\n    \
             + fd00::1 f web.net.dep (running)\n  NOERROR fd00::1\n  \
             a query starts health checks and waits for the first ones\n"
                .to_owned(),
        ),
        (
            "q-a1i2m3n1s1.q-g1.bosh",
            "  ours, by bosh.\n  q-a1i2m3n1s1.q-g1.bosh.: short form in bosh.\n    \
             group id 1; az_id 1; index 2; num_id 3; network_id 1\n    1 matches, health filter unhealthy: failing\n    \
             - 10.0.0.3 c web.net.dep (unknown)\n  NOERROR\n  a query starts health checks\n"
                .to_owned(),
        ),
        (
            "q-m1m4s3.q-g1.bosh",
            "  ours, by bosh.\n  q-m1m4s3.q-g1.bosh.: short form in bosh.\n    group id 1; num_id 1 or 4\n    \
             2 matches, health filter healthy: running\n    + 10.0.0.1 a web.net.dep (running)\n    \
             - 10.0.0.4 d web.net2.dep (unchecked)\n  NOERROR 10.0.0.1\n  a query starts health checks\n"
                .to_owned(),
        ),
        (
            "q-m1m2s0.q-g1.bosh",
            "  ours, by bosh.\n  q-m1m2s0.q-g1.bosh.: short form in bosh.\n    group id 1; num_id 1 or 2\n    \
             2 matches, health filter smart: running and unchecked instances, or all if there are none\n    \
             + 10.0.0.1 a web.net.dep (running)\n    - 10.0.0.2 b web.net.dep (failing)\n  NOERROR 10.0.0.1\n  \
             a query starts health checks\n"
                .to_owned(),
        ),
        (
            "q-s0.w*.*t2.d*p.bosh",
            format!(
                "  ours, by bosh.\n  q-s0.w*.*t2.d*p.bosh.: long form in bosh.\n    instance group beginning with w; \
                 network ending in t2; deployment with an inner star, which matches none\n    \
                 0 matches, health filter {single}\n  NXDOMAIN\n  a query starts no health checks\n"
            ),
        ),
        (
            "q-x.q-g1.bosh",
            "  ours, by bosh.\n  q-x.q-g1.bosh.: malformed\n    \
             the first label is a filter without any of a, i, m, n, s, y followed by digits\n  FORMERR\n  \
             a query starts no health checks\n"
                .to_owned(),
        ),
        (
            "a.elsewhere",
            format!(
                "  not a local name: handlers and recursors are queried. In the records it would be:\n  \
                 a.elsewhere.: outside all domains: an instance id anywhere\n    instance id a\n    \
                 1 matches, health filter {single}\n    + 10.0.0.1 a web.net.dep (running)\n"
            ),
        ),
        (
            "agent-b.bosh-agent-id",
            format!(
                "  ours, by bosh-agent-id.\n  agent-b.bosh-agent-id.: agent\n    agent id agent-b\n    \
                 1 matches, health filter {single}\n    + 10.0.0.2 b web.net.dep (failing)\n  NOERROR 10.0.0.2\n  \
                 a query starts no health checks\n"
            ),
        ),
        (
            "a.any.alias",
            format!(
                "  ours, by any.alias.\n  alias _.any.alias. with 1 targets\n  a.web.net.dep.bosh.: long form in bosh.\n    \
                 instance id a; instance group web; network net; deployment dep\n    \
                 1 matches, health filter {single}\n    + 10.0.0.1 a web.net.dep (running)\n  NOERROR 10.0.0.1\n  \
                 a query starts no health checks\n"
            ),
        ),
        (
            "z1.z.alias",
            "  ours, by z1.z.alias.\n  alias z1.z.alias. with 1 targets\n  q-s4.q-g1.bosh.: short form in bosh.\n    \
             group id 1; availability zone z1\n    3 matches, health filter all\n    \
             + 10.0.0.1 a web.net.dep (running)\n    + 10.0.0.3 c web.net.dep (unknown)\n    \
             + 10.0.0.4 d web.net2.dep (unchecked)\n  NOERROR 10.0.0.1 10.0.0.3 10.0.0.4\n  \
             a query starts health checks\n"
                .to_owned(),
        ),
    ] {
        let found = explain(&snapshot(), &ByLastByte, &name(text)).to_string();
        assert_eq!(found, format!("{text}.\n{steps}"));
    }
    for (text, criterion) in [
        ("net2.n.alias", "group id 1; network net2\n"),
        ("10.i.alias", "group id 1; index 10\n"),
        ("d.u.alias", "group id 1; num_id 4\n"),
    ] {
        let found = explain(&snapshot(), &ByLastByte, &name(text)).to_string();
        assert!(found.contains(criterion), "{found}");
    }
    let fixed = explain(&snapshot(), &ByLastByte, &name("two.alias"));
    let targets: Vec<(&str, &str)> = fixed
        .targets
        .iter()
        .map(|target| (target.target.as_str(), target.form))
        .collect();
    let expected = [
        ("q-s4.q-g1.bosh.", "short form"),
        ("a.web.net.dep.bosh.", "long form"),
        ("10.0.0.9", "address"),
        ("fd00::9", "address"),
    ];
    assert_eq!(targets, expected);
    let every = explain(&snapshot(), &ByLastByte, &Name::root());
    assert_eq!(every.targets[0].form, "every instance");
    assert_eq!(every.targets[0].matches.len(), 6);
    assert!(every.result.is_none());
}

#[test]
fn twenty_matches_are_shown() {
    for (count, last) in [
        (19, None),
        (20, None),
        (21, Some("    and 1 more")),
        (25, Some("    and 5 more")),
    ] {
        let mut rows = Vec::new();
        for number in 0..count {
            rows.push(format!(
                r#"["i{number}","1","web",["1"],"z1","1","net","1","dep","10.0.0.1","bosh","x",0]"#
            ));
        }
        let rows: Vec<&str> = rows.iter().map(String::as_str).collect();
        let snapshot = build(&rows, "", "{}");
        let text = explain(&snapshot, &ByLastByte, &name("q-s4.q-g1.bosh")).to_string();
        assert_eq!(text.matches("    + 10.0.0.1 i").count(), count.min(20));
        let found = text.lines().find(|line| line.ends_with(" more"));
        assert_eq!(found, last, "{count}");
    }
}

#[test]
fn requests_hold_a_thousand_names() {
    let list = |count: usize| {
        let query = r#"{"name": "a.bosh", "withdrawn": ["10.0.0.1"]}"#;
        format!("[{}]", vec![query; count].join(","))
    };
    for count in [0, 1, 999, 1000] {
        let AddressQueries(queries) = serde_json::from_str(&list(count)).unwrap();
        let query = AddressQuery {
            name: "a.bosh".to_owned(),
            withdrawn: BTreeSet::from([[10, 0, 0, 1].into()]),
        };
        assert_eq!(queries, vec![query; count]);
    }
    for (text, problem) in [
        (list(1001), "more than 1000 names in one request"),
        (
            "7".to_owned(),
            "invalid type: integer `7`, expected a list of at most 1000 names",
        ),
    ] {
        let error = serde_json::from_str::<AddressQueries>(&text).unwrap_err();
        assert!(error.to_string().starts_with(problem), "{error}");
    }
    for (reason, text) in [
        (
            NoAddresses::Foreign,
            "is not a name of the fleet; correct it, or add the alias to the server",
        ),
        (
            NoAddresses::NoInstance,
            "matches no instance; correct the name",
        ),
        (
            NoAddresses::Malformed,
            "is not a valid query; see docs/architecture.md",
        ),
        (
            NoAddresses::Filtered,
            "has no addresses: its instances have none, or its filter excludes all",
        ),
    ] {
        assert_eq!(reason.to_string(), text);
    }
}
