//! The facets of names, and the rows, names and facets that differ between two snapshots.

use super::*;
use crate::catalog::{AliasFiles, NameRules, RECORD_KEYS, Records};

const ALIASES: &str =
    r#"{"web.alias": ["*.web.net.dep.bosh", "10.0.0.9"], "_.any.alias": ["_.web.net.dep.bosh"]}"#;

const DEFINITIONS: &str = r#", "aliases": {
    "_.p.alias": [{"group_id": "1", "root_domain": "bosh", "placeholder_type": "uuid"}],
    "z-_.alias": [{"group_id": "1", "root_domain": "bosh", "placeholder_type": "az"}],
    "n-_.alias": [{"group_id": "1", "root_domain": "bosh", "placeholder_type": "network"}],
    "i-_.alias": [{"group_id": "1", "root_domain": "bosh", "placeholder_type": "index"}],
    "other-_.alias": [{"group_id": "2", "root_domain": "bosh", "placeholder_type": "uuid"}],
    "far-_.alias": [{"group_id": "1", "root_domain": "far", "placeholder_type": "uuid"}],
    "fixed.alias": [{"group_id": "1", "root_domain": "bosh"}],
    "unmoved.alias": [{"group_id": "2", "root_domain": "bosh"}]}"#;

/// The rules by which a name with names below it exists.
const MODERN: NameRules = NameRules {
    formerr_for_malformed: false,
    nxdomain_for_empty_non_terminals: false,
};

fn build(rows: &[String], more: &str, aliases: &str) -> Snapshot {
    let keys = RECORD_KEYS.map(|key| format!("{key:?}")).join(",");
    let rows = rows.join(",");
    let file = format!(r#"{{"record_keys": [{keys}], "record_infos": [{rows}]{more}}}"#);
    let (records, warnings) = Records::parse(file.as_bytes()).unwrap();
    assert_eq!(warnings, [""; 0]);
    let (aliases, _) = AliasFiles::parse([("aliases.json", aliases.as_bytes())]).unwrap();
    Snapshot::build(records, &aliases).0
}

/// Returns the row of an instance of group 1 in the zone `z1`.
fn row(id: &str, number: u8) -> String {
    format!(
        r#"["{id}","{number}","web",["1"],"z1","1","net","1","dep","10.0.0.{number}","bosh","agent-{id}",{number}]"#
    )
}

/// Returns a snapshot with a row for each of these letters.
fn letters(ids: &str) -> Snapshot {
    let mut rows = Vec::new();
    for id in ids.chars() {
        rows.push(row(&id.to_string(), 1));
    }
    build(&rows, "", "{}")
}

fn name(text: &str) -> Name {
    Name::from_text(text).unwrap()
}

fn texts(names: &[Name]) -> Vec<String> {
    names.iter().map(Name::to_string).collect()
}

#[test]
fn reserved_facets_precede_hashes() {
    assert_eq!(Facet::ANY, Facet(0));
    assert_eq!([0, 1, 14].map(Facet::reserved), [1, 2, 15].map(Facet));
    assert!(Facet::of("a").0 >= 16 && Facet::of("a") != Facet::of("b"));
    let slots = [0, 1, 4095, 4096, 5000, u32::MAX].map(|hash| Facet(hash).slot());
    assert_eq!(slots, [0, 1, 4095, 0, 904, 4095]);
}

#[test]
fn rarest_value_is_the_facet() {
    let snapshot = build(&[row("a", 1), row("b", 2)], DEFINITIONS, ALIASES);
    let zone = |text: &str| Facet::from(Value::Zone(name(text).as_wire()));
    for (text, expected) in [
        (
            "agent-a.bosh-agent-id",
            &[zone("bosh-agent-id"), Value::Agent(b"agent-a").into()][..],
        ),
        ("a.elsewhere", &[Value::Id(b"a").into()]),
        (".", &[Facet::ANY]),
        ("a.q-g1.bosh", &[Value::Id(b"a").into()]),
        ("a.web.net.dep.bosh", &[Value::Id(b"a").into()]),
        ("q-s0.q-g1.bosh", &[Value::Group(b"1").into()]),
        ("q-m1s0.q-g1.bosh", &[Value::Number(b"1").into()]),
        ("q-m1m2s0.q-g1.bosh", &[Value::Group(b"1").into()]),
        ("q-m1m2s0.x.bosh", &[Value::Domain("bosh.").into()]),
        (
            "q-s0.web.net.dep.bosh",
            &[Value::Place([b"web", b"net", b"dep"]).into()],
        ),
        (
            "q-s0.web.*.dep.bosh",
            &[Value::InstanceGroup(b"web").into()],
        ),
        ("q-s0.we*.net.dep.bosh", &[Value::Deployment(b"dep").into()]),
        ("q-s0.*.net.*.bosh", &[Value::Network(b"net").into()]),
        ("q-s0.*.n*.*.bosh", &[Value::Domain("bosh.").into()]),
        ("q-s0.x.bosh", &[Value::Domain("bosh.").into()]),
        ("q-x.q-g1.bosh", &[]),
        (
            "web.alias",
            &[
                zone("web.alias"),
                Value::Place([b"web", b"net", b"dep"]).into(),
            ],
        ),
        ("a.any.alias", &[zone("any.alias"), Value::Id(b"a").into()]),
        (
            "a.p.alias",
            &[zone("a.p.alias"), Value::Number(b"1").into()],
        ),
        (
            "z-z1.alias",
            &[zone("z-z1.alias"), Value::Group(b"1").into()],
        ),
    ] {
        assert_eq!(facets(&snapshot, &name(text))[..], *expected, "{text}");
    }
    // Of an empty non-terminal the names below it count as well.
    let snapshot = snapshot.with_rules(MODERN);
    for (text, expected) in [
        ("q-s0.q-g1.bosh", &[Value::Group(b"1").into()][..]),
        (
            "q-s0.q-g9.bosh",
            &[Value::Group(b"9").into(), Value::Parents.into()],
        ),
        ("q-x.q-g1.bosh", &[Value::Parents.into()]),
    ] {
        assert_eq!(facets(&snapshot, &name(text))[..], *expected, "{text}");
    }
}

#[test]
fn differing_rows_are_found() {
    for (old, new, removed, added) in [
        ("abc", "abc", &[][..], &[][..]),
        ("abc", "axc", &[1], &[1]),
        ("abc", "abxc", &[], &[2]),
        ("abc", "ac", &[1], &[]),
        ("abc", "abcd", &[], &[3]),
        ("abc", "ab", &[2], &[]),
        ("abc", "xabc", &[], &[0]),
        ("abc", "bc", &[0], &[]),
        ("abcd", "axyd", &[1, 2], &[1, 2]),
        ("abc", "xyz", &[0, 1, 2], &[0, 1, 2]),
        ("ab", "axyb", &[], &[1, 2]),
        ("axyb", "ab", &[1, 2], &[]),
        ("ab", "ba", &[1], &[0]),
        ("", "ab", &[], &[0, 1]),
        ("ab", "", &[0, 1], &[]),
        ("abcdef", "abxdyf", &[2, 4], &[2, 4]),
    ] {
        let [before, after] = [old, new].map(letters);
        let found = changed_rows(before.instance_index(), after.instance_index());
        let expected = Rows {
            removed: removed.to_vec(),
            added: added.to_vec(),
        };
        assert_eq!(found, Some(expected), "{old} {new}");
    }
}

/// Returns a snapshot of `count` rows, of which those from `others` on have other ids.
fn many(count: usize, others: usize) -> Snapshot {
    let mut rows = Vec::new();
    for number in 0..count {
        let kind = if number < others { "i" } else { "other" };
        rows.push(row(&format!("{kind}{number}"), 1));
    }
    build(&rows, "", "{}")
}

#[test]
fn comparison_ends_at_its_limits() {
    for (old, new, count) in [
        // Each replaced row counts twice; up to 256 changes are compared, or an eighth of the rows.
        (many(300, 300), many(300, 172), Some((128, 128))),
        (many(300, 300), many(300, 171), None),
        (many(300, 300), many(44, 44), Some((256, 0))),
        (many(300, 300), many(43, 43), None),
        (many(44, 44), many(300, 300), Some((0, 256))),
        (many(43, 43), many(300, 300), None),
        (many(2400, 2400), many(2400, 2250), Some((150, 150))),
        (many(2400, 2400), many(2400, 2249), None),
    ] {
        let found = changed_rows(old.instance_index(), new.instance_index());
        let found = found.map(|rows| (rows.removed.len(), rows.added.len()));
        assert_eq!(found, count);
    }
}

#[test]
fn added_row_renews_group_names() {
    let [a, b] = [row("a", 1), row("b", 2)];
    let old = build(std::slice::from_ref(&a), DEFINITIONS, ALIASES);
    let new = build(&[a, b], DEFINITIONS, ALIASES);
    let renewed = ["i-2.alias.", "n-net.alias.", "z-z1.alias.", "b.p.alias."];
    let zones = ["i-2.alias.", "b.p.alias."];
    let of_b = [
        "i-2.alias.",
        "b.p.alias.",
        "b.q-g1.bosh.",
        "q-m2s0.q-g1.bosh.",
        "b.any.alias.",
        "b.web.net.dep.bosh.",
    ];
    let both = [
        "q-s0.q-g1.bosh.",
        "q-s0.web.net.dep.bosh.",
        "fixed.alias.",
        "n-net.alias.",
        "web.alias.",
        "z-z1.alias.",
    ];
    let sorted = |texts: &[&str]| {
        let mut names: Vec<Name> = texts.iter().map(|text| name(text)).collect();
        names.sort_unstable();
        names
    };
    let mut facets: Vec<Facet> = vec![
        Facet::ANY,
        Value::Id(b"b").into(),
        Value::Agent(b"agent-b").into(),
        Value::Number(b"2").into(),
        Value::Place([b"web", b"net", b"dep"]).into(),
        Value::InstanceGroup(b"web").into(),
        Value::Network(b"net").into(),
        Value::Deployment(b"dep").into(),
        Value::Domain("bosh.").into(),
        Value::Group(b"1").into(),
        Value::Parents.into(),
    ];
    facets.extend(zones.map(|zone| Facet::from(Value::Zone(name(zone).as_wire()))));
    let mut expected = Changes {
        facets: facets.into_iter().collect(),
        renewed: sorted(&renewed),
        listed: sorted(&of_b),
        still_listed: sorted(&both),
        unlisted: Vec::new(),
        zones: sorted(&zones),
    };
    assert_eq!(between(&old, &new), Some(expected.clone()));
    assert!(!expected.is_empty());
    std::mem::swap(&mut expected.listed, &mut expected.unlisted);
    assert_eq!(between(&new, &old), Some(expected));
}

#[test]
fn places_groups_and_agents_change_names() {
    let [a, b, c] = [row("a", 1), row("b", 2), row("c", 3)];
    let a_alone = a.replace("\"agent-a\"", "null");
    let b_alone = b.replace("\"agent-b\"", "null");
    let other_group = b.replace("[\"1\"]", "[\"2\"]");
    let both_groups = a.replace("[\"1\"]", "[\"1\",\"2\"]");
    let other_place = b.replace("\"net\"", "\"net2\"");
    let other_domain = c.replace("\"bosh\"", "\"other\"");
    for (old, new, expected) in [
        // The same place and groups.
        ([&a, &b, &c], [&a, &b, &row("d", 4)], false),
        ([&a, &b, &c], [&a, &b, &row("c", 9)], false),
        // A group, or a place, that only one of the snapshots has.
        ([&a, &b, &c], [&a, &other_group, &c], true),
        ([&a, &other_group, &c], [&a, &b, &c], true),
        ([&a, &b, &c], [&a, &other_place, &c], true),
        ([&a, &other_place, &c], [&a, &b, &c], true),
        // The group has other rows in both.
        (
            [&both_groups, &b, &c],
            [&both_groups, &other_group, &c],
            false,
        ),
        // The first agent.
        (
            [&a_alone, &b_alone, &b_alone],
            [&a, &b_alone, &b_alone],
            true,
        ),
        (
            [&a, &b_alone, &b_alone],
            [&a_alone, &b_alone, &b_alone],
            true,
        ),
        // With several domains a group may come and go in one of them.
        (
            [&a, &b, &other_domain],
            [&a, &row("b", 9), &other_domain],
            true,
        ),
    ] {
        let [old, new] = [old, new].map(|rows| build(&rows.map(String::clone), "", "{}"));
        let changes = between(&old, &new).unwrap();
        assert_eq!(changes.concern(Value::Parents.into()), expected);
        assert!(changes.concern(Facet::ANY));
        assert_eq!(texts(&changes.zones), [""; 0]);
    }
}

#[test]
fn other_sources_change_every_name() {
    let rows = [row("a", 1), row("b", 2)];
    let old = build(&rows, DEFINITIONS, ALIASES);
    let same = Snapshot::build(
        old.records(),
        &AliasFiles::parse([("aliases.json", ALIASES.as_bytes())])
            .unwrap()
            .0,
    )
    .0;
    for same in [&old, &same, &build(&rows, DEFINITIONS, ALIASES)] {
        assert_eq!(between(&old, same), Some(Changes::default()));
        assert!(between(&old, same).unwrap().is_empty());
    }
    let more_domains = [row("a", 1), row("b", 2).replace("\"bosh\"", "\"other\"")];
    let capital_domain = rows.clone().map(|row| row.replace("\"bosh\"", "\"Bosh\""));
    for other in [
        build(&rows, DEFINITIONS, ALIASES).with_rules(MODERN),
        build(&rows, DEFINITIONS, "{}"),
        build(&rows, "", ALIASES),
        build(&more_domains, DEFINITIONS, ALIASES),
        build(&capital_domain, DEFINITIONS, ALIASES),
    ] {
        assert_eq!(between(&old, &other), None);
        assert_eq!(between(&other, &old), None);
    }
}

#[test]
fn followed_rows_are_known() {
    let file = |kind: &str, replaced: usize| {
        let keys = RECORD_KEYS.map(|key| format!("{key:?}")).join(",");
        let rows: Vec<String> = (0..300)
            .map(|number| {
                let kind = if number < replaced { kind } else { "i" };
                row(&format!("{kind}{number}"), 1)
            })
            .collect();
        let rows = rows.join(",");
        format!(r#"{{"record_keys":[{keys}],"record_infos":[{rows}]}}"#)
    };
    let empty = crate::catalog::IndexedRecords::from(Records::default());
    let (before, _) = empty.next(file("i", 0).as_bytes()).unwrap();
    // 30 rows removed and 30 added are 60 changes, not 900.
    for replaced in [1, 30, 64] {
        let after = before.follow(file("x", replaced).as_bytes()).unwrap();
        let [old, new] = [before.clone(), after]
            .map(|records| Snapshot::build(records, &AliasFiles::default()).0);
        let rows: Vec<Row> = (0..replaced as Row).collect();
        let expected = Rows {
            removed: rows.clone(),
            added: rows,
        };
        let found = changed_rows(old.instance_index(), new.instance_index());
        assert_eq!(found, Some(expected), "{replaced}");
    }
}

#[test]
fn any_value_makes_a_row_differ() {
    let [first, second] = [row("a", 1), row("b", 2)];
    for (from, to) in [
        (r#""b","#, r#""x","#),
        (r#","2","web""#, r#","7","web""#),
        (r#","2","web""#, r#",null,"web""#),
        (r#""web""#, r#""db""#),
        (r#"["1"]"#, r#"["2"]"#),
        (r#"["1"]"#, r#"["1","2"]"#),
        (r#"["1"]"#, "[]"),
        (r#""z1""#, r#""z2""#),
        (r#""z1""#, "null"),
        (r#""z1","1""#, r#""z1","2""#),
        (r#""net""#, r#""net2""#),
        (r#""net","1""#, r#""net","2""#),
        (r#""net","1""#, r#""net",null"#),
        (r#""dep""#, r#""dep2""#),
        ("10.0.0.2", "10.0.0.3"),
        (r#""bosh""#, r#""other""#),
        (r#""agent-b""#, r#""agent-x""#),
        (r#""agent-b""#, "null"),
        (",2]", ",3]"),
    ] {
        let changed = second.replacen(from, to, 1);
        assert_ne!(changed, second, "{from}");
        let old = build(&[first.clone(), second.clone()], "", "{}");
        let new = build(&[first.clone(), changed], "", "{}");
        let expected = Rows {
            removed: vec![1],
            added: vec![1],
        };
        for [old, new] in [[&old, &new], [&new, &old]] {
            let found = changed_rows(old.instance_index(), new.instance_index());
            assert_eq!(found.as_ref(), Some(&expected), "{from} {to}");
        }
    }
    // The same values in another order have other numbers.
    let [old, new] = [["a", "b", "c"], ["c", "b", "a"]].map(|ids: [&str; 3]| {
        let rows = ids.map(|id| row(id, 1).replace("\"z1\"", &format!("\"z{id}\"")));
        build(&rows, "", "{}")
    });
    let found = changed_rows(old.instance_index(), new.instance_index()).unwrap();
    assert_eq!(
        (found.removed.len(), found.added.len()),
        (2, 2),
        "{found:?}"
    );
}
